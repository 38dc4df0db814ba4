"""Presets beside the one of starter.py, and which one preset="auto" is."""

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
    "qwen3-0.6b": starter.PRESETS["qwen3-1.7b"] | {"model_id": "Qwen/Qwen3-0.6B"},
}

# GB of free memory on a GPU -> a preset, and what is set besides, so that it fits by the formula of
# support/memory.py. gpu_mem_util is the size of vLLM's cache.
SMALL = {"lora_rank": 16, "gradient_checkpointing": True, "frozen_in_bf16": True, "gpu_mem_util": 3}
ON_GPU = {
    70: ("qwen3-1.7b", {}),
    20: ("qwen3-1.7b", SMALL | {"learning_rate": 7e-5}),
    13: ("qwen3-0.6b", SMALL | {"learning_rate": 7e-5}),
    7: ("smollm2", SMALL | {"learning_rate": 2e-4}),
    0: ("tiny", {}),
}
REFERENCE_GB = 20  # that a copy of all weights of Qwen3-1.7B needs, besides its passes


def choose(cfg):
    """preset="auto" is "tiny" for the built-in model, which is also that of a machine without a
    GPU. On a GPU it is what fits, or "qwen3-1.7b" for a model of yours."""
    if cfg.preset != "auto":
        starter.check_known("preset", cfg.preset, starter.PRESETS)
        return
    if cfg.device == "auto":
        cfg.device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = "cuda" in str(cfg.device)
    if cfg.model_id == "tiny" or (cfg.model_id is None and not on_gpu):
        cfg.preset = "tiny"
    elif cfg.model_id is None:
        choose_for_gpu(cfg)
    else:
        cfg.preset = "qwen3-1.7b"


def choose_for_gpu(cfg):
    """Takes the largest preset that fits into the free memory, and says so. Given values stay."""
    free_gb = torch.cuda.mem_get_info(cfg.device)[0] / 1e9
    for least_gb, (name, settings) in ON_GPU.items():
        # With LoRA there is no copy
        if free_gb >= least_gb + REFERENCE_GB * (cfg.use_kl_penalty and not settings):
            break
    cfg.preset = name
    unchanged = vars(starter.cfg_with())
    taken = {key: x for key, x in settings.items() if getattr(cfg, key) == unchanged[key]}
    vars(cfg).update(taken)
    card = torch.cuda.get_device_name(cfg.device)
    print(f"{card}, {free_gb:.0f} GB free: preset {name}, and {taken or 'all weights learn'}")
