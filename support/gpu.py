"""A faster update on a GPU, and the share of the card's peak that a run reaches.

attach() compiles the decoder layers, in place, and what is computed from the logits, and doubles
the microbatches, where a card has shown what that gains: from 2.6 to 1.2 s an update for the shape
of Qwen3-1.7B on an H100, together with the head of support/engines.py (lab/results/gpu_update.csv).
"""

import re
from types import SimpleNamespace

import torch
from transformers import AttentionInterface, AttentionMaskInterface

import starter
from support import edits, fast, presets

LARGE = 1_000_000_000  # parameters; below, compiling takes longer than it saves


def compile_layers(model):
    """Compiles the decoder layers, which families keep under different names. The names of
    parameters stay."""
    kinds = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in kinds:
            module.compile(dynamic=True)


def end_compiling(*models):
    """For the report, whose passes in float32 would be compiled anew."""
    if not fast.COMPILED:  # then it is an edit of yours that compiles
        return
    fast.COMPILED.clear()
    for model in models:
        for module in model.modules():
            module._compiled_call_impl = None


def compile_statistics():
    """Compiles what is computed from the logits, as it stands in starter.py, of more tokens at a
    time."""
    fast.COMPILED.add("statistics")
    fast.LOGITS_AT_ONCE["cuda"] = 4 * starter.LOGITS_AT_ONCE


def enlarge_microbatches(cfg):
    """Doubles the preset's microbatches: compiled layers keep half as much for a token. Where that
    is too much after all, support/memory.py halves them."""
    of_preset = starter.PRESETS[cfg.preset].get("max_tokens_per_microbatch")
    if cfg.max_tokens_per_microbatch == of_preset:
        cfg.max_tokens_per_microbatch *= 2


def attention_with_repeated_keys(module, query, key, value, attention_mask, **more):
    """transformers' attention interface. Cards before compute capability 8.0 have no fused kernel
    for heads that share keys: torch would keep the scores of all pairs of tokens, of each head."""
    groups = getattr(module, "num_key_value_groups", 1)
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    module = SimpleNamespace(is_causal=module.is_causal, training=module.training)
    attend = AttentionInterface()["sdpa"]
    return attend(module, query, key, value, attention_mask, **more)


AttentionInterface.register("repeated", attention_with_repeated_keys)
AttentionMaskInterface.register("repeated", AttentionMaskInterface()["sdpa"])


def choose_attention(models, device):
    """Takes the kernels of torch that suit this card."""
    # cuDNN's makes a plan, in up to a second, for each new shape of a microbatch. Importing vLLM
    # turns it off, too.
    torch.backends.cuda.enable_cudnn_sdp(False)
    for model in models:
        if torch.cuda.get_device_capability(device) < (8, 0):
            if model.config._attn_implementation == "sdpa":
                model.set_attn_implementation("repeated")


def attach(policy, ref_model, cfg):
    """Does this where it was measured. torch.compile needs what vLLM needs, too: a C compiler."""
    if cfg.device.type == "cuda":
        choose_attention(filter(None, [policy, ref_model]), cfg.device)
    is_plain = cfg.precision == "bf16" and not cfg.lora_rank and not cfg.gradient_checkpointing
    fits = "token_statistics" in edits.replaced_names()
    fast.COMPILED.clear()  # of an earlier run of this process
    beside_vllm = cfg.device.type == "cuda" and cfg.engine == "vllm"
    if is_plain and beside_vllm and policy.num_parameters() > LARGE and fits:
        compile_layers(policy)
        if ref_model is not None:
            compile_layers(ref_model)
        compile_statistics()
        enlarge_microbatches(cfg)
        print(
            "layers and statistics are compiled, which takes half a minute; "
            f"max_tokens_per_microbatch = {cfg.max_tokens_per_microbatch}"
        )


def share_of_peak(policy, metrics, microbatches, cfg):
    """Returns {"share_of_peak": ...} of a step's update, where the card's peak is known. For each
    parameter and token that this process computes 2 operations count forward, 4 back, and 2 of a
    reference; with LoRA 2 less. The seconds are those outside of the rollout."""
    card = torch.cuda.get_device_name(cfg.device)
    peaks = presets.NUMBERS["peaks"]
    name = next((name for name in peaks if re.search(rf"\b{name}\b", card)), None)
    if name is None:
        return {}
    operations = 6 + 2 * cfg.use_kl_penalty - 2 * (cfg.lora_rank > 0)
    n_tokens = 0
    for microbatch in microbatches:
        mask = microbatch["response_mask"]
        columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        n_tokens += (mask * columns).amax(dim=1).sum().item()  # without padding
    done = operations * policy.num_parameters() * n_tokens * cfg.epochs_per_rollout
    seconds = metrics["time/total"] - metrics["time/rollout"]
    return {"share_of_peak": done / seconds / peaks[name]}
