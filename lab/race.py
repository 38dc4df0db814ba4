"""Time to a solved rate: starter.py beside TRL 1.16.

    python -m lab.race tiny       the built-in model: 16 seeds, about five minutes a seed

Both train the same model on the same problems with the same reward, learning rates, batch, loss
(dapo, no KL penalty), optimiser and number of steps; TRL with as many rows at once as are quickest
for it, and one seed by its own schedule, too. The clock runs during steps only: rollout, reward,
update. Every five steps it stands still, and the same 500 held-out problems are solved greedily. A
goal is reached where the mean of the last three such evaluations is at or above it. Each run is a
process of its own; which side goes first changes from seed to seed. Seeds that
lab/results/race_<name>.csv holds are not run again. Needs `pip install trl==1.16.0 datasets`.
"""

import functools
import itertools
import math
import statistics
import sys

from lab import bench
from lab.rows import REPOSITORY, append_rows, read_csv, where

SEEDS = range(16)
GOALS = ((0.70, 0.70), (0.75, 0.75), (0.78, 0.70))  # shares solved: ours, TRL's
OWN = "TRL, its own schedule"  # linear, without warm-up
OWN_SEEDS = range(1)
TRL_ROWS = (256, 128, 64)  # at once, of which the quickest is taken


def run(side, seed, preset):
    """Returns [(step, seconds of all steps so far, solved)] at each evaluation."""
    model = f"{REPOSITORY}/support/tiny"
    settings = dict(preset=preset, model_id=model, seed=seed, eval_every=5, save_every=0)
    if side == "starter.py":
        log = bench.in_process(bench.train_ours, settings, REPOSITORY)
    else:
        short = {**settings, "n_train_steps": 5, "eval_every": 0}
        train = bench.quickest_trl(short, [dict(rows=rows) for rows in TRL_ROWS])
        if side == OWN:
            linear = dict(lr_scheduler_type="linear", lr_scheduler_kwargs=None, warmup_steps=0)
            train = functools.partial(train, **linear)
        log = bench.in_process(train, settings)
    seconds = [0.0, *itertools.accumulate(value for _, value in log["time/total"])]
    return [(step, seconds[step], solved) for step, solved in log["eval/solved"]]


def read_runs(name):
    """{(side, seed): [(step, seconds, solved)]}"""
    runs = {}
    for row in read_csv(f"race_{name}"):
        point = int(row["step"]), float(row["seconds"]), float(row["solved"])
        runs.setdefault((row["side"], int(row["seed"])), []).append(point)
    return runs


def smoothed(points):
    """[(step, seconds, solved)] -> [(seconds, mean of the last three solved)]"""
    means = []
    for i, (_, seconds, _) in enumerate(points):
        last = [solved for _, _, solved in points[max(0, i - 2) : i + 1]]
        means.append((seconds, statistics.mean(last)))
    return means


def time_to(points, goal):
    """Seconds at which the smoothed curve is at the goal, or inf."""
    return next((seconds for seconds, solved in smoothed(points) if solved >= goal), math.inf)


def line_of(shown, times):
    """[(our seconds, TRL's)] of each seed -> cells of the table. In the median ratio a seed that
    only one side solved counts as inf or 0; the seconds are of those that both did."""
    ratios = [trl / ours for ours, trl in times if min(ours, trl) < math.inf]
    both = [pair for pair in times if max(pair) < math.inf]
    medians = [statistics.median(side) for side in zip(*both)]
    cells = [*(f"{seconds:.1f}" for seconds in medians), f"{statistics.median(ratios):.2f}"]
    return [shown, len(times), *cells]


def race_lines(name):
    """Lines of the table: one for each goal, and one for all steps."""
    runs = read_runs(name)
    seeds = [seed for side, seed in runs if side == "TRL" and ("starter.py", seed) in runs]
    pairs = [(runs["starter.py", seed], runs["TRL", seed]) for seed in sorted(seeds)]
    lines = []
    for ours, trl in GOALS:
        times = [(time_to(a, ours), time_to(b, trl)) for a, b in pairs]
        shown = f"{ours:.0%} solved" + f", by TRL {trl:.0%}" * (ours != trl)
        if any(max(pair) < math.inf for pair in times):
            lines.append(line_of(shown, times))
    ends = []
    for side in zip(*pairs):
        ends.append(statistics.mean(smoothed(points)[-1][1] for points in side))
    shown = f"all {pairs[0][0][-1][0]} steps, to {ends[0]:.1%} and {ends[1]:.1%} solved"
    lines.append(line_of(shown, [[points[-1][1] for points in pair] for pair in pairs]))
    return lines


def main(name):
    for seed in SEEDS:
        sides = sorted(["starter.py", "TRL"], reverse=seed % 2 == 0)
        for side in sides + [OWN] * (seed in OWN_SEEDS):
            if (side, seed) in read_runs(name):
                continue
            points = run(side, seed, name)
            rows = []
            for step, seconds, solved in points:
                row = {"side": side, "seed": seed, "step": step, "seconds": f"{seconds:.2f}"}
                rows.append({**row, "solved": f"{solved:.4f}", **where()})
            append_rows(f"race_{name}", rows)
            print(f"{side}, seed {seed}: {points[-1]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
