"""Presets for small models, beside the one of starter.py."""

import torch

import starter

starter.PRESETS |= {
    "tiny": dict(  # the built-in model
        model_id="tiny",
        task="countdown_small",
        n_train_steps=150,
        rollout_batch_size=256,
        max_new_tokens=16,
        learning_rate=3e-4,
        warmup_steps=10,
        max_tokens_per_microbatch=8_192,
    ),
    "smollm2": dict(  # a small pretrained model that learns on a laptop
        model_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        task="addition",
        n_train_steps=40,
        rollout_batch_size=128,
        max_new_tokens=12,
        learning_rate=2e-5,
        warmup_steps=3,
        max_tokens_per_microbatch=4_096,
    ),
}


def choose(cfg):
    """preset="auto" is "tiny" for the built-in model, which is also that of a machine without a GPU
    if none is given, and otherwise "qwen3-1.7b"."""
    if cfg.preset != "auto":
        starter.check_known("preset", cfg.preset, starter.PRESETS)
        return
    cfg.preset = "qwen3-1.7b"
    on_gpu = "cuda" in str(cfg.device)
    if cfg.device == "auto":
        on_gpu = torch.cuda.is_available()
    if cfg.model_id == "tiny" or (cfg.model_id is None and not on_gpu):
        cfg.preset = "tiny"
