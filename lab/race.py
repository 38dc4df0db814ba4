"""Time to a solved rate: starter.py beside TRL 1.16.

    python -m lab.race tiny       the built-in model: 16 seeds, about four minutes a seed

Both train the same model on the same problems with the same reward, learning rate, warm-up, batch,
loss (dapo, no KL penalty), optimiser and number of steps; TRL with as many rows at once as are
quickest for it. The clock runs during steps only: rollout, reward, update. Every five steps it
stands still, and the same 500 held-out problems are solved greedily. A goal is reached where the
mean of the last three such evaluations is at or above it. Each run is a process of its own; which
side goes first changes from seed to seed. Seeds that lab/results/race_<name>.csv holds are not run
again. Needs `pip install trl==1.16.0 datasets`.
"""

import argparse
import itertools
import math
import statistics

from lab import bench
from lab.rows import append_rows, read_csv, where
from lab.sweep import start_of

SEEDS = range(16)
GOALS = (0.70, 0.75)  # shares of the held-out problems
TRL_ROWS = (256, 128, 64)  # at once, of which the quickest is taken
EVALUATE_EVERY = 5  # steps


# 1. Runs, each in a process of its own -> [step, seconds of all steps so far, solved].


def run_ours(settings):
    """main() itself evaluates, and logs the seconds of its steps."""
    logged = bench.run_ours(settings | {"eval_every": EVALUATE_EVERY})["logged"]
    seconds = [0.0, *itertools.accumulate(x for _, x in logged["time/total"])]
    return [[step, seconds[step], solved] for step, solved in logged["eval/solved"]]


def train_with_trl(settings, rows):
    """Runs TRL's trainer in this process, with evaluations by starter.evaluate."""
    import starter

    cfg = bench.chosen({name: x for name, x in settings.items() if name != "noise"})
    policy, tokenizer = starter.init_policy(cfg.model_id, "cpu")
    cfg.stop_token_ids = starter.find_stop_tokens(policy, tokenizer)
    held_out = starter.with_prompt_ids(starter.load_problems(cfg).held_out, policy, tokenizer, cfg)
    solved = {}  # {step: share}

    def after_step(step, seconds, model):
        if step % EVALUATE_EVERY == 0:
            metrics, _ = starter.evaluate(model, None, tokenizer, held_out, cfg)
            solved[step] = metrics["solved"]

    after_step(0, 0.0, policy)
    of_steps = bench.train_with_trl(settings, rows, after_step)["seconds"]
    seconds = [0.0, *itertools.accumulate(of_steps)]
    return [[step, seconds[step], share] for step, share in solved.items()]


# 2. Reading the rows.


def read_runs(name):
    """{(side, seed): [(step, seconds, solved)]}"""
    runs = {}
    for row in read_csv(f"race_{name}"):
        runs.setdefault((row["side"], int(row["seed"])), []).append(
            (int(row["step"]), float(row["seconds"]), float(row["solved"]))
        )
    return runs


def smoothed(points):
    """[(step, seconds, solved)] -> [(seconds, mean of the last three solved)]"""
    return [
        (points[i][1], statistics.mean(solved for _, _, solved in points[max(0, i - 2) : i + 1]))
        for i in range(len(points))
    ]


def time_to(points, goal):
    """Seconds at which the smoothed curve is at the goal, or None. goal None: seconds in all."""
    if goal is None:
        return points[-1][1]
    return next((seconds for seconds, solved in smoothed(points) if solved >= goal), None)


def race_lines(name):
    """Cells of the table: one line for each goal, and for all steps. In the median ratio a seed
    counts as the largest ratio where only TRL missed the goal, and as the smallest where only we
    did. The other columns are of the seeds where both reached it."""
    runs = read_runs(name)
    pairs = [
        (runs["starter.py", seed], runs["TRL", seed])  # of seeds that both sides have run
        for side, seed in sorted(runs)
        if side == "starter.py" and ("TRL", seed) in runs
    ]
    lines = []
    for goal in (*GOALS, None) if pairs else ():
        times = [[time_to(points, goal) for points in pair] for pair in pairs]
        both = [(ours, trl) for ours, trl in times if None not in (ours, trl)]
        ratios = [trl / ours for ours, trl in both]
        ratios += [
            math.inf if trl is None else 0.0
            for ours, trl in times
            if (ours is None) != (trl is None)
        ]
        cells = ["", "", "", ""]
        if both:
            medians = [statistics.median(side) for side in zip(*both)]
            cells = [
                *(f"{median:.1f}" for median in medians),
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios[: len(both)]):.2f} to {max(ratios[: len(both)]):.2f}",
            ]
        missed = [sum(seconds is None for seconds in side) for side in zip(*times)]
        ends = [statistics.mean(smoothed(points)[-1][1] for points in side) for side in zip(*pairs)]
        lines.append(
            [
                f"{goal:.0%} solved"
                if goal
                else f"all {pairs[0][0][-1][0]} steps, to {ends[0]:.1%} and {ends[1]:.1%} solved",
                len(pairs),
                *cells,
                f"{missed[0]} and {missed[1]}",
            ]
        )
    return lines


def main():
    parser = argparse.ArgumentParser(description="time to a solved rate, beside TRL")
    parser.add_argument("name", choices=["tiny"], help="the preset")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="by default 0 to 15")
    given = parser.parse_args()
    for seed in given.seeds:
        settings = dict(
            preset=given.name,
            model_id=str(start_of(given.name)),
            seed=seed,
            noise=False,
            save_every=0,
        )
        for side in ("starter.py", "TRL")[:: 1 if seed % 2 == 0 else -1]:
            if (side, seed) in read_runs(given.name):
                continue
            if side == "starter.py":
                notes = run_ours(settings)
            else:
                notes = bench.run_trl(settings, bench.quickest_rows(settings, TRL_ROWS), "race")
            append_rows(
                f"race_{given.name}",
                [
                    {
                        "side": side,
                        "seed": seed,
                        "step": step,
                        "seconds": f"{seconds:.2f}",
                        "solved": f"{solved:.4f}",
                    }
                    | where()
                    for step, seconds, solved in notes
                ],
            )
            _, seconds, solved = notes[-1]
            print(f"{side}, seed {seed}: {seconds:.0f} s, solved {solved:.1%}", flush=True)


if __name__ == "__main__":
    main()
