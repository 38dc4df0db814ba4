"""What this project does on one NVIDIA GPU.

python -m lab.gpu --memory    the formula of support/memory.py for Qwen3's sizes -> gpus.csv
"""

import sys

from lab import bench
from lab.rows import write_csv

SHAPES = {
    "Qwen3-0.6B": dict(num_hidden_layers=28, hidden_size=1024, intermediate_size=3072),
    "Qwen3-1.7B": dict(num_hidden_layers=28, hidden_size=2048, intermediate_size=6144),
    "Qwen3-4B": dict(
        num_hidden_layers=36, hidden_size=2560, intermediate_size=9728, num_attention_heads=32
    ),
    "Qwen3-8B": dict(
        num_hidden_layers=36,
        hidden_size=4096,
        intermediate_size=12_288,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "SmolLM2-135M": dict(
        num_hidden_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49_152,
    ),
}
LORA = dict(lora_rank=16)
CHECKPOINTING = dict(gradient_checkpointing=True)
SMALL = LORA | CHECKPOINTING | dict(frozen_in_bf16=True)
MEMORY = [  # settings whose memory is computed
    {},
    dict(use_kl_penalty=True),
    CHECKPOINTING,
    LORA,
    LORA | CHECKPOINTING,
    SMALL,
]


# 1. Memory by the formula.


def config_of(name):
    """Returns the configuration of a Qwen3 of this shape."""
    from transformers import Qwen3Config

    usual = dict(num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True)
    return Qwen3Config(**{**usual, **SHAPES[name]})


def memory_rows():
    """Trainer, reference and vLLM's weights, with microbatches of 4,096 tokens. vLLM's cache comes
    on top."""
    from support.memory import predicted_gb

    on_gpu = dict(device="cuda", precision="bf16", engine="vllm", gpu_mem_util=1)
    rows = []
    for changes in MEMORY:
        cfg = bench.chosen({"preset": "qwen3-1.7b", **on_gpu, **changes})
        names = ", ".join(f"{name}={value}" for name, value in changes.items())
        for model in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B"):
            gb = predicted_gb(config_of(model), cfg, cfg.max_tokens_per_microbatch)
            rows.append({"settings": names, "model": model, "gb": f"{gb:.0f}"})
    return rows


if __name__ == "__main__":
    if "--memory" in sys.argv:
        write_csv("gpus", memory_rows())
