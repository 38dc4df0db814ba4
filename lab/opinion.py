"""How far do support/'s mechanics and starter.py's own ones differ where both are right?

    python -m lab.opinion         writes lab/results/opinion.csv, in a quarter of an hour
    python -m lab.opinion cost    what a comparison costs: lab/results/opinion_cost.csv

Asked of every architecture of lab/architectures.py that support/fast.py fits: by rounding alone, in
the way of support/opinion.py, in three precisions. Its LIMITS must lie above the largest of these.
"""

import statistics
import sys
import tempfile
from pathlib import Path

import starter  # before torch, for which it sets variables

import torch

from lab import architectures, bench
from lab.rows import REPOSITORY, where, write_csv
from lab.small_models import ROWS
from support import edits, opinion

SECONDS = 180  # that an architecture may take


def largest(numbers):
    """Returns the largest difference between numbers by support/ and by starter.py alone."""
    pairs, _ = numbers
    return max(opinion.difference_of(name, *pair) for name, pair in pairs.items())


def examine(name):
    """Returns {column: largest difference}, or {} where support/fast.py does not fit."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            case = architectures.make_case(name, Path(folder))
            architectures.attach_fast(case)
        except Exception:  # lab/architectures.py says why
            return {}
        if "token_statistics" not in edits.replaced_names():
            return {}
        ref_model, _ = starter.init_policy(Path(folder) / "start", "cpu")
        ref_model.requires_grad_(False)
        for parameter in ref_model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape)
        differences = {}
        for precision in ("float32", "bf16", "fp16"):
            cfg = starter.cfg_with(**{**vars(architectures.CFG), "precision": precision})
            inputs = starter.requests_for(case.prompts, cfg, 0, 4), cfg, 1.0
            responses = starter.rollout_with_transformers(case.policy, *inputs)
            sampler = opinion.numbers_of_sampler(case.policy, responses, *inputs)
            differences[f"sampler, {precision}"] = largest(sampler)
            batch = starter.make_batch(responses, torch.linspace(-1, 1, len(responses)), "cpu")
            batch["weights"] = starter.weights_of_tokens(batch, cfg)
            step = opinion.numbers_of_step(batch, case.policy, ref_model, cfg)
            differences[f"step, {precision}"] = largest(step)
        return differences


# The cost.  Models with random weights, of the sizes of lab/bench.py.


def seconds_of_run(settings):
    """Returns the seconds of each step, and those of each comparison."""
    compared = []
    of_opinion = opinion.SecondOpinion
    of_opinion.is_wrong = bench.timed(of_opinion.is_wrong, compared)
    log = bench.train_ours(settings, REPOSITORY)
    return [seconds for _, seconds in log["time/total"]], [seconds for _, seconds in compared]


def cost_of(size):
    """Returns the row of a size: three comparisons are those of a run of 100 steps."""
    with tempfile.TemporaryDirectory() as folder:
        bench.save_random(bench.SIZES[size][0], folder)
        settings = bench.settings_of(folder, size, "float32") | {"n_train_steps": 10}
        steps, compared = bench.in_process(seconds_of_run, settings)
    step = statistics.median(steps[1:-1])
    each = sum(compared) / 2  # in steps 1 and 10, of the sampler and of the rows
    return {
        "model": size,
        "a step, s": f"{step:.2f}",
        "a comparison, s": f"{each:.2f}",
        "share of 100 steps": f"{3 * each / (100 * step):.2%}",
        **where(),
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["cost"]:
        write_csv("opinion_cost", [cost_of(size) for size in ("S", "M")])
        sys.exit()
    rows = []
    for name in sorted(ROWS):
        differences = architectures.within(SECONDS, examine, name)
        if differences:
            numbers = {column: f"{difference:.1e}" for column, difference in differences.items()}
            rows.append({"name": name, **numbers})
            print(*rows[-1].values(), sep=" | ", flush=True)
    write_csv("opinion", rows)
