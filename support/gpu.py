"""A faster update on a GPU, and the share of the card's peak that a run reaches.

attach() compiles the decoder layers, in place, and what is computed from the logits, and doubles
the microbatches, where a card has shown what that gains: from 2.6 to 1.2 s an update for the shape
of Qwen3-1.7B on an H100, together with the head of support/engines.py (lab/results/gpu_update.csv).
"""

import torch

import starter
from support import edits, fast, presets, ranks

LARGE = 1_000_000_000  # parameters; below, compiling takes longer than it saves
RUN = {}  # of this process: the policy's parameters, and the mean length of a prompt


def compile_layers(model):
    """Compiles the decoder layers. The names of parameters stay."""
    for layer in model.base_model.layers:
        layer.compile(dynamic=True)


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


def attach(policy, ref_model, problems, cfg):
    """Does this where it was measured. torch.compile needs what vLLM needs, too: a C compiler."""
    prompts = [problem["prompt_ids"] for problem in problems.train]
    RUN["parameters"] = sum(p.numel() for p in policy.parameters())
    RUN["prompt_length"] = sum(map(len, prompts)) / len(prompts)
    is_plain = cfg.precision == "bf16" and not cfg.lora_rank and not cfg.gradient_checkpointing
    fits = "token_statistics" in edits.replaced_names()
    fast.COMPILED.clear()  # of an earlier run of this process
    beside_vllm = cfg.device.type == "cuda" and cfg.engine == "vllm"
    if is_plain and beside_vllm and RUN["parameters"] > LARGE and fits:
        compile_layers(policy)
        if ref_model is not None:
            compile_layers(ref_model)
        compile_statistics()
        enlarge_microbatches(cfg)
        print(
            "layers and statistics are compiled, which takes half a minute; "
            f"max_tokens_per_microbatch = {cfg.max_tokens_per_microbatch}"
        )


def share_of_peak(metrics, cfg):
    """Returns {"share_of_peak": ...} of a step's update, where the cards' peak is known. For each
    parameter and token 2 operations count forward, 4 back, and 2 of a reference; with LoRA 2 less.
    The seconds are those outside of the rollout."""
    operations = 6 + 2 * cfg.use_kl_penalty - 2 * (cfg.lora_rank > 0)
    n_tokens = cfg.rollout_batch_size * (RUN["prompt_length"] + metrics["response_length"])
    seconds = metrics["time/total"] - metrics["time/rollout"]
    card = torch.cuda.get_device_name(cfg.device)
    for name, peak in presets.NUMBERS["peaks"].items():
        if name in card:
            done = operations * RUN["parameters"] * n_tokens
            return {"share_of_peak": done / seconds / (peak * ranks.WORLD)}
    return {}
