"""Runs of starter.py on one NVIDIA GPU, sampled by transformers -> lab/results/gpu.csv.

    python -m lab.gpu                         all of RUNS, a row each
    python -m lab.gpu --runs 0 3 --together   some of them, at once, without their times

The built-in model and SmolLM2 (lab/real_model.py) are trained by their presets. Qwen3's shapes have
random weights and rewards, so that nearly all responses are cut at 256 tokens; three steps of the
preset's 16 prompts x 8 responses. Seconds are medians without the first step. GB is the most that
torch's tensors took; formula_gb is what support/memory.py predicts of it.
"""
import argparse
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from lab import bench, real_model
from lab.rows import append_rows, where
from support.memory import predicted_gb

SMALL = dict(lora_rank=16, gradient_checkpointing=True, frozen_in_bf16=True)
RUNS = (
    ("built-in", {}),
    ("SmolLM2", {}),
    *(("Qwen3-0.6B", changes) for changes in ({}, dict(use_kl_penalty=True))),
    *(("Qwen3-1.7B", changes) for changes in ({}, dict(use_kl_penalty=True), SMALL)),
    ("Qwen3-1.7B", dict(gradient_checkpointing=True)),
    ("Qwen3-1.7B", dict(lora_rank=16)),
    ("Qwen3-8B", SMALL),
)


def settings_of(model, folder):
    """Returns settings of main() for a run of this model. Writes random weights into folder."""
    if model not in bench.QWEN3:
        return {"built-in": dict(preset="tiny", noise=False),
                "SmolLM2": dict(preset="smollm2", noise=False, model_id=str(
                    real_model.CACHE / "SmolLM2-135M-Instruct"))}[model]
    made = bench.make_folder(Path(folder), **bench.QWEN3[model], new_tokens=256)
    return made | dict(preset="qwen3-1.7b", rollout_batch_size=128, n_train_steps=3)


def row_of(model, changes, with_times):
    """Returns the row of one run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(model, folder) | changes
        result = bench.run_ours(settings)
        cfg = bench.chosen({name: x for name, x in settings.items() if name != "noise"})
    logged = result["logged"]
    later = {tag: statistics.median(x for step, x in logged[tag] if step > 1)
             for tag in ("time/total", "time/rollout", "train/sampler_logprob_diff")}
    row = {"model": model, "settings": ", ".join(f"{k}={v}" for k, v in changes.items()),
           "step_s": "", "rollout_s": "", "gb": f"{result['gb']:.1f}",
           "sampler_diff": f"{later['train/sampler_logprob_diff']:.4f}"}
    if with_times:
        row |= {"step_s": f"{later['time/total']:.2f}",
                "rollout_s": f"{later['time/rollout']:.2f}"}
    if model in bench.QWEN3:
        parts = predicted_gb(bench.qwen3_config(**bench.QWEN3[model]), cfg,
                             cfg.max_tokens_per_microbatch)
        row["formula_gb"] = f"{sum(parts.values()):.1f}"
    else:
        row["solved"] = f"{100 * logged['eval/solved'][-1][1]:.1f}"
    return row | where() | {"machine": torch.cuda.get_device_name()}


def main():
    parser = argparse.ArgumentParser(description="runs of starter.py on one NVIDIA GPU")
    parser.add_argument("--runs", nargs="*", type=int, default=range(len(RUNS)))
    parser.add_argument("--together", action="store_true", help="at once, without their times")
    given = parser.parse_args()

    def measure(number):
        try:
            row = row_of(*RUNS[number], not given.together)
            print(row, flush=True)
            append_rows("gpu", [row])
        except RuntimeError as error:
            print(f"{RUNS[number]}: {error}", flush=True)

    with ThreadPoolExecutor(len(given.runs) if given.together else 1) as pool:
        list(pool.map(measure, given.runs))


if __name__ == "__main__":
    main()
