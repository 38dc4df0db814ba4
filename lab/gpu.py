"""Runs of starter.py on one NVIDIA GPU, sampled by transformers -> lab/results/gpu.csv.

    python -m lab.gpu --runs 0 1    some of RUNS, a row each; without --runs all

The built-in model and SmolLM2 (lab/real_model.py) are trained by their presets. Qwen3's shapes have
random weights and rewards, so that nearly all responses are cut at 256 tokens; three steps of the
preset's 16 prompts x 8 responses. Seconds are medians without the first step. GB is the most that
torch's tensors took; formula_gb is what support/memory.py predicts of it.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from lab import bench, real_model
from lab.rows import append_rows, where

SMALL = dict(lora_rank=16, gradient_checkpointing=True, frozen_in_bf16=True)
RUNS = (
    ("built-in", {}),
    ("SmolLM2", {}),
    ("Qwen3-0.6B", {}),
    ("Qwen3-1.7B", {}),
    ("Qwen3-1.7B", dict(use_kl_penalty=True)),
    ("Qwen3-1.7B", dict(gradient_checkpointing=True)),
    ("Qwen3-1.7B", SMALL),
)


def settings_of(model, folder):
    """Returns settings of main() for a run of this model. Writes random weights into folder."""
    if model in bench.QWEN3:
        made = bench.make_folder(Path(folder), **bench.QWEN3[model], new_tokens=256)
        return made | dict(preset="qwen3-1.7b", rollout_batch_size=128, n_train_steps=3)
    if model == "SmolLM2":
        return dict(preset="smollm2", model_id=str(real_model.model_folder()), noise=False)
    return dict(preset="tiny", noise=False)


def formula_gb(settings):
    """Returns what support/memory.py predicts for a GPU without vLLM."""
    from transformers import AutoConfig

    from support import memory, tasks

    on_gpu = dict(device="cuda", precision="bf16", engine="transformers")
    cfg = bench.chosen({name: x for name, x in settings.items() if name != "noise"} | on_gpu)
    config = AutoConfig.from_pretrained(tasks.TINY if cfg.model_id == "tiny" else cfg.model_id)
    return memory.predicted_gb(config, cfg, cfg.max_tokens_per_microbatch)


def row_of(model, changes):
    """Returns the row of one run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(model, folder) | changes | dict(engine="transformers")
        formula = formula_gb(settings)
        result = bench.run_ours(settings)
    logged = result["logged"]
    later = {
        tag: statistics.median(x for step, x in logged[tag] if step > 1)
        for tag in ("time/total", "time/rollout", "train/sampler_logprob_diff")
    }
    return {
        "model": model,
        "settings": ", ".join(f"{k}={v}" for k, v in changes.items()),
        "step_s": f"{later['time/total']:.2f}",
        "rollout_s": f"{later['time/rollout']:.2f}",
        "gb": f"{result['gb']:.1f}",
        "formula_gb": f"{formula:.1f}",
        "sampler_diff": f"{later['train/sampler_logprob_diff']:.4f}",
        "solved": "" if model in bench.QWEN3 else f"{100 * logged['eval/solved'][-1][1]:.1f}",
        **where(),
    }


def main():
    import torch

    card = torch.cuda.get_device_name()
    parser = argparse.ArgumentParser(description="runs of starter.py on one NVIDIA GPU")
    parser.add_argument("--runs", nargs="*", type=int, default=range(len(RUNS)))
    for number in parser.parse_args().runs:
        row = row_of(*RUNS[number]) | {"machine": card}
        print(row, flush=True)
        append_rows("gpu", [row])


if __name__ == "__main__":
    main()
