"""A device that is not the CPU, and computes on it all the same.

Its tensors say that they are on the device "pretend:0". It refuses what a GPU refuses: an operation
on tensors of which some are on the CPU. Autocast there casts as PyTorch's page "Automatic Mixed
Precision" says for CUDA, for the operations that language models use. Nothing else of a GPU is
imitated: not its kernels, its rounding, its memory or speed.

Importing this file adds the device to the process for good: use it in a process of its own.
"""
import contextlib

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

aten = torch.ops.aten


class Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


backend_registration._setup_privateuseone_for_python_backend("pretend", Backend())
PRETEND = torch.device("pretend", 0)

COPIES = {aten.copy_.default, aten._to_copy.default}  # these may have tensors of both devices
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
            aten._index_put_impl_.default}  # a GPU takes their places from the CPU, too


class PretendTensor(torch.Tensor):
    """Has no numbers of its own; those of `inner`, on the CPU, are meant."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=PRETEND)
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return compute(function, args, kwargs or {})

    def __repr__(self):
        return f"PretendTensor({self.inner})"

    def tolist(self):
        return self.cpu().tolist()


class PretendGpu(TorchDispatchMode):
    """Inside, tensors can be made on the device and moved to it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return compute(function, args, kwargs or {})


def is_pretend(device):
    return device is not None and torch.device(device).type == "pretend"


def compute(function, args, kwargs):
    """Does an operation with the numbers that are meant. Raises RuntimeError where a GPU would,
    since some of the tensors are not on it. A tensor of a single number may be on the CPU."""
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
    on_device = [x for x in tensors if isinstance(x, PretendTensor)]
    on_cpu = [x for x in tensors if not isinstance(x, PretendTensor) and x.dim() > 0]
    may_mix = function in COPIES or (function in INDEXING and isinstance(args[0], PretendTensor))
    if on_device and on_cpu and not may_mix:
        raise RuntimeError(f"{function}: not all tensors are on {PRETEND}; on the CPU are those of "
                           f"the shapes {[tuple(x.shape) for x in on_cpu]}")
    target = kwargs.get("device")
    result_on_device = bool(on_device) if target is None else is_pretend(target)
    if function is aten.copy_.default:
        result_on_device = isinstance(args[0], PretendTensor)
    if is_pretend(target):
        kwargs = kwargs | {"device": torch.device("cpu")}
    known = {id(x.inner): x for x in on_device}  # operations in place return what they were given
    args, kwargs = tree_map(lambda x: x.inner if isinstance(x, PretendTensor) else x,
                            (args, kwargs))

    def wrapped(x):
        if not isinstance(x, torch.Tensor) or not result_on_device:
            return x
        return known[id(x)] if id(x) in known else PretendTensor(x)

    return tree_map(wrapped, function(*args, **kwargs))


# Autocast. An operation's tensors are cast above autograd, then it is done without autocast.

IN_BF16 = ["addmm", "baddbmm", "bmm", "linear", "matmul", "mm", "mv",
           "scaled_dot_product_attention"]
IN_FLOAT32 = ["cumprod", "cumsum", "exp", "expm1", "layer_norm", "log", "log1p",
              "log_softmax.int", "logsumexp", "norm.Scalar", "pow.Tensor_Scalar",
              "pow.Tensor_Tensor", "reciprocal", "rsqrt", "softmax.int", "softplus", "sum",
              "sum.dim_IntList"]
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def with_cast(operation, dtype):
    def cast(x):
        floats = (torch.bfloat16, torch.float32)
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in floats else x

    def call(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    return call


def register_autocast():
    """Returns the libraries; the registrations last as long as they do."""
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    listed = torch.library.Library("aten", "IMPL")
    for names, dtype in ((IN_BF16, torch.bfloat16), (IN_FLOAT32, torch.float32)):
        for name in names:
            name, _, overload = name.partition(".")
            operation = getattr(getattr(aten, name), overload or "default")
            listed.impl(operation, with_cast(operation, dtype), "AutocastPrivateUse1")
    return others, listed


LIBRARIES = register_autocast()


@contextlib.contextmanager
def pretend_gpu():
    """Inside, torch's own ways of making and moving tensors know the device."""
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) then asks the mode
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied
    try:
        with PretendGpu():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_swap_module_params_on_conversion(False)
