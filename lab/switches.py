"""Ways to a quicker update on a GPU that no card has judged yet: switches of lab/gpu.py. Each of
them computes what the plain way does, within rounding. One that a card shows to save 5 % of an
update goes to support/gpu.py.

    layers, statistics   compiled: these run beside vLLM already
    0.5, 0.7, 1.0        what layers that are compiled may keep for the backward pass, as a share
    casts                the weights are cast to 16 bits once an update, not in each microbatch
    float32 gradients    a weight's gradient is summed in float32, and not rounded to 16 bits before
    prompts              a prompt is read once for its group, as on a CPU
    head slices          the logits of 4,096 tokens exist at a time, whatever the vocabulary
    clip in AdamW        its kernel divides by the gradient's norm, which nobody waits for
"""

import contextlib

import torch
import torch.nn.functional as F

import starter
from support import engines, fast, gpu


class Float32Gradient(torch.autograd.Function):
    """(..., H) hidden, (O, H) weight, a dtype of 16 bits -> (..., O) in it."""

    @staticmethod
    def forward(ctx, hidden, weight, dtype):
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden, weight)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        of_weight = engines.product_in_float32(gradient.flatten(0, -2).T, hidden.flatten(0, -2))
        return gradient @ weight, of_weight, None


class Float32GradientLinear(torch.nn.Linear):
    def forward(self, hidden):
        device = hidden.device.type
        if self.bias is not None or not torch.is_autocast_enabled(device):
            return super().forward(hidden)
        return Float32Gradient.apply(hidden, self.weight, torch.get_autocast_dtype(device))


def turn_on(switches, policy):
    """Before an update. "casts" and "clip in AdamW" are of the update itself."""
    for switch in switches:
        if switch == "layers":
            gpu.compile_layers(policy)
        elif switch == "statistics":
            gpu.compile_statistics()
        elif switch == "float32 gradients":
            for module in policy.modules():
                if type(module) is torch.nn.Linear:
                    module.__class__ = Float32GradientLinear
        elif switch == "prompts":
            fast.PROMPTS_READ_ONCE.add(policy.device.type)
        elif switch == "head slices":
            vocabulary = policy.config.get_text_config().vocab_size
            fast.LOGITS_AT_ONCE[policy.device.type] = 4_096 * vocabulary
        elif isinstance(switch, float):
            torch._functorch.config.activation_memory_budget = switch


@contextlib.contextmanager
def around_an_update(switches):
    """Autocast keeps the weights that it has cast until the outermost of its contexts ends. With
    "casts" this is one that casts nothing by itself, and the backward pass is outside of autocast,
    as it should be."""
    if "casts" not in switches:
        yield
        return
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def optimise(switches, policy, optimizer, max_norm):
    """The end of an update. torch's fused AdamW divides each gradient by a loss scale, if it has
    one: with "clip in AdamW" that is what clipping divides by."""
    parameters = [parameter for parameter in policy.parameters() if parameter.grad is not None]
    if "clip in AdamW" not in switches:
        starter.clip_gradient(parameters, max_norm)
        optimizer.step()
        return
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    optimizer.grad_scale = (norm / max_norm).clamp(min=1)
    optimizer.found_inf = torch.zeros_like(norm)
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf
