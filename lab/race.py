"""Time to a solved rate: starter.py beside TRL 1.16.

    python -m lab.race              on the built-in model: the seeds that results/race.csv does not
                                    hold yet (eight; about four minutes a seed on two quiet cores)
    python -m lab.race --small      on SmolLM2's addition -> results/race_small.csv (two seeds, half
                                    an hour each; lab.real_model makes the model)
    python -m lab.race --table      prints the ratios
    python -m lab.race --figure     draws figures/race.png

Both train the same model on the same problems with the same reward, learning rate, warm-up, batch,
loss (dapo, no KL penalty), optimiser and number of steps; TRL with as many rows at once as are
quickest for it. The clock runs during steps only: rollout, reward, update. Every five steps it
stands still, and the same 500 held-out problems are solved greedily, by the same code for both.
A goal is reached where the mean of the last three such evaluations is at or above it. Each run is
a process of its own; which side goes first changes from seed to seed. Needs `pip install
trl==1.16.0 datasets`.
"""
import os
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # for both: here nothing else is at work

import starter  # first: it sets variables that torch reads when it is imported

import argparse
import csv
import inspect
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Callable, NamedTuple

import torch

from lab import bench, real_model

class Contest(NamedTuple):
    name: str  # of the csv file
    preset: dict  # of starter.py
    model: Callable  # () -> its folder
    seeds: range
    goals: tuple
    trl_rows: tuple  # at once, of which the quickest is taken


TINY = Contest("race", starter.TINY, lambda: starter.find_model("tiny"), range(8),
               (0.70, 0.75, 0.80), (256, 128, 64))
SMALL = Contest("race_small", starter.SMALL, lambda: real_model.model_folder(real_model.CACHE),
                range(2), (0.50, 0.60, 0.70), (128, 64, 32, 16))
EVALUATE_EVERY = 5
COLUMNS = ["side", "seed", "step", "seconds", "solved", "rows_at_once", "commit", "machine"]


class Track:
    """Notes (step, seconds of all steps so far, solved) and keeps the clock of the steps."""

    def __init__(self, cfg, tokenizer, held_out):
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.problems = starter.Problems([], starter.with_prompt_ids(held_out, tokenizer), [])
        self.parts = starter.Parts(bench.fast.COMPUTE, starter.OneProcess(),
                                   bench.one_step_run(starter.Run)(cfg, starter.OneProcess()))
        self.seconds = 0.0
        self.notes = []

    def note(self, step, policy):
        metrics, _ = starter.evaluate(policy, None, self.tokenizer, self.problems, self.cfg,
                                      self.parts)
        self.notes.append((step, self.seconds, metrics["solved"]))

    def after_step(self, step, seconds, policy):
        self.seconds += seconds
        if step % EVALUATE_EVERY == 0:
            self.note(step, policy)


def settings_of(contest, seed):
    """What the preset changes in main()'s settings, and the seed."""
    parameters = inspect.signature(starter.main).parameters
    preset = {name: parameters[name].default for name in (
        "rollout_batch_size", "max_tokens_per_microbatch")} | contest.preset
    del preset["model_id"], preset["max_new_tokens"]
    return preset | {"seed": seed, "reward": starter.reward_fn}


def run_ours(contest, seed, steps):
    ours = bench.Ours(contest.model(), contest.preset["max_new_tokens"], True, False,
                      **settings_of(contest, seed))
    cfg = ours.cfg
    _, held_out = starter.TASKS[cfg.task](cfg)
    track = Track(cfg, ours.tokenizer, held_out)
    track.note(0, ours.policy)
    for step in range(1, steps + 1):
        start = time.perf_counter()
        ours.step()
        track.after_step(step, time.perf_counter() - start, ours.policy)
    return track.notes, cfg.rollout_batch_size


def trl_trainer(cfg, rows, steps, callback):
    """TRL's trainer with the settings of cfg, `rows` rows at once."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    problems, _ = starter.TASKS[cfg.task](cfg)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model_id)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": problem["prompt"]}],
                                             tokenize=False, add_generation_prompt=True)
               for problem in problems]

    def reward(prompts, completions, number, **kwargs):
        return [cfg.reward(text, problems[i]) for i, text in zip(number, completions)]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=True, seed=cfg.seed,
        per_device_train_batch_size=rows, num_generations=cfg.group_size,
        gradient_accumulation_steps=cfg.rollout_batch_size // rows, max_steps=steps,
        max_completion_length=cfg.max_new_tokens, learning_rate=cfg.learning_rate,
        lr_scheduler_type="constant_with_warmup", warmup_steps=cfg.warmup_steps, beta=0.0,
        adam_beta1=0.9, adam_beta2=0.95, weight_decay=cfg.weight_decay,
        max_grad_norm=cfg.max_grad_norm, loss_type=cfg.loss_average, epsilon=cfg.clip_range,
        scale_rewards="group", temperature=cfg.temperature, gradient_checkpointing=False,
        logging_steps=10**6, save_strategy="no", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False)
    data = Dataset.from_dict({"prompt": prompts, "number": list(range(len(problems)))})
    model = AutoModelForCausalLM.from_pretrained(cfg.model_id, dtype=torch.float32)
    return GRPOTrainer(model=model, args=config, processing_class=tokenizer, reward_funcs=reward,
                       train_dataset=data, callbacks=[callback])


def clock(each_step):
    """A callback of TRL's trainer; each_step(step, seconds, model) is called after each step."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, model=None, **kwargs):
            each_step(state.global_step, time.perf_counter() - self.start, model)

    return Clock()


def run_trl(contest, seed, steps):
    cfg = bench.configuration(contest.model(), contest.preset["max_new_tokens"], True, False,
                              **settings_of(contest, seed))
    quickest = {}
    for rows in contest.trl_rows:  # the first of four steps is not counted
        times = []
        trl_trainer(cfg, rows, 4, clock(lambda step, seconds, model: times.append(seconds))).train()
        quickest[rows] = min(times[1:])
    rows = min(quickest, key=quickest.get)
    _, held_out = starter.TASKS[cfg.task](cfg)
    policy, tokenizer = starter.init_policy(cfg.model_id, torch.device("cpu"))
    cfg.stop_token_ids = starter.find_stop_tokens(policy, tokenizer)
    track = Track(cfg, tokenizer, held_out)
    track.note(0, policy)
    trl_trainer(cfg, rows, steps, clock(track.after_step)).train()
    return track.notes, rows


SIDES = {"starter.py": run_ours, "TRL": run_trl}


def run_in_process(contest, side, seed, steps):
    """Returns the rows of one run, made by a process of its own."""
    command = [sys.executable, "-m", "lab.race", "--child", side, "--seeds", str(seed),
               "--steps", str(steps), *(["--small"] if contest is SMALL else [])]
    done = subprocess.run(command, cwd=bench.REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    notes, rows_at_once = json.loads(done.stdout.split("notes ")[-1])
    where = {"commit": bench.commit_of(bench.REPOSITORY), "machine": bench.machine_line()}
    return [{"side": side, "seed": seed, "step": step, "seconds": f"{seconds:.2f}",
             "solved": f"{solved:.4f}", "rows_at_once": rows_at_once} | where
            for step, seconds, solved in notes]


# --------------------------------------------------------------------------------------------------
# Reading the rows

def results_of(contest):
    return bench.RESULTS / f"{contest.name}.csv"


def read_runs(contest):
    """{(side, seed): [(step, seconds, solved)]}"""
    runs = {}
    if results_of(contest).is_file():
        with open(results_of(contest), newline="") as file:
            for row in csv.DictReader(file):
                runs.setdefault((row["side"], int(row["seed"])), []).append(
                    (int(row["step"]), float(row["seconds"]), float(row["solved"])))
    return runs


def smoothed(points):
    """[(step, seconds, solved)] -> [(seconds, mean of the last three solved)]"""
    return [(points[i][1], statistics.mean(solved for _, _, solved in points[max(0, i - 2):i + 1]))
            for i in range(len(points))]


def time_to(points, goal):
    """Seconds at which the smoothed curve is at the goal, or None."""
    return next((seconds for seconds, solved in smoothed(points) if solved >= goal), None)


def bootstrap_interval(ratios, draws=10_000):
    """The 90 % interval of the median of these ratios, over resamples of the seeds."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.05 * draws)], medians[int(0.95 * draws)]


def pairs_of(runs):
    """[(ours, TRL's)] for the seeds that both sides have run."""
    return [(runs["starter.py", seed], runs["TRL", seed])
            for side, seed in sorted(runs) if side == "starter.py" and ("TRL", seed) in runs]


def race_table(contest):
    """One line for each goal, and for all steps."""
    from lab.tables import markdown
    pairs = pairs_of(read_runs(contest))
    lines = []
    if not pairs:
        return markdown(["goal"], lines)
    for goal in (*contest.goals, None):
        times = [[time_to(points, goal) if goal else points[-1][1] for points in pair]
                 for pair in pairs]
        both = [(ours, trl) for ours, trl in times if ours is not None and trl is not None]
        ratios = [trl / ours for ours, trl in both]
        cells = ["", "", "", ""]
        if ratios:
            low, high = bootstrap_interval(ratios)
            interval = f"{low:.2f} to {high:.2f}" if len(ratios) > 1 else ""
            cells = [f"{statistics.median(ours for ours, _ in both):.1f}",
                     f"{statistics.median(trl for _, trl in both):.1f}",
                     f"{statistics.median(ratios):.2f}", interval]
        missed = [sum(of_side is None for of_side in side) for side in zip(*times)]
        lines.append([f"{goal:.0%} solved" if goal else f"all {pairs[0][0][-1][0]} steps",
                      str(len(pairs)), *cells, f"{missed[0]} and {missed[1]}"])
    interval = "90 % interval" if len(pairs) > 2 else "range of the seeds"
    return markdown(["until", "seeds", "starter.py, s", "TRL 1.16, s", "median ratio", interval,
                     "not reached by starter.py and TRL"], lines)


def final_table(contest):
    """Solved at the end: mean of the last three evaluations, over the seeds."""
    from lab.tables import markdown
    pairs = pairs_of(read_runs(contest))
    lines = []
    for side, name in ((0, "starter.py"), (1, "TRL 1.16")):
        ends = [smoothed(pair[side])[-1][1] for pair in pairs]
        if len(ends) > 1:
            error = statistics.stdev(ends) / len(ends) ** 0.5
            lines.append([name, str(len(ends)), f"{100 * statistics.mean(ends):.1f}",
                          f"{100 * error:.1f}"])
    return markdown(["side", "seeds", "solved at the end, %", "standard error"], lines)


def draw():
    """Draws figures/race.png: solved over the seconds of training, a line for each run."""
    import matplotlib
    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt
    contests = [contest for contest in (TINY, SMALL) if read_runs(contest)]
    figure, axes = plt.subplots(1, len(contests), figsize=(5 * len(contests) + 1, 3.4),
                                layout="constrained", squeeze=False)
    for axis, contest in zip(axes[0], contests):
        labelled = set()
        for (side, _), points in sorted(read_runs(contest).items()):
            seconds, solved = zip(*smoothed(points))
            axis.plot(seconds, [100 * share for share in solved],
                      color="C0" if side == "starter.py" else "C1", alpha=0.7, linewidth=1.1,
                      label=None if side in labelled else side)
            labelled.add(side)
        for goal in contest.goals:
            axis.axhline(100 * goal, color="0.8", linewidth=0.8, zorder=0)
        axis.set(xlabel="seconds of rollout, reward and update", ylabel="solved, %",
                 title="built-in model" if contest is TINY else "SmolLM2, addition")
        axis.legend()
    bench.FIGURES.mkdir(exist_ok=True)
    figure.savefig(bench.FIGURES / "race.png", dpi=100)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description="time to a solved rate, beside TRL")
    parser.add_argument("--seeds", nargs="+", type=int, help="by default those of the contest")
    parser.add_argument("--steps", type=int, help="by default those of the preset")
    parser.add_argument("--small", action="store_true", help="SmolLM2's addition")
    parser.add_argument("--child", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    contest = SMALL if given.small else TINY
    steps = given.steps or contest.preset["n_train_steps"]
    if given.child:
        print("notes", json.dumps(SIDES[given.child](contest, given.seeds[0], steps)))
        return
    if not (given.table or given.figure):
        contest.model()
        for seed in given.seeds or contest.seeds:
            order = list(SIDES) if seed % 2 == 0 else list(SIDES)[::-1]
            for side in order:
                if (side, seed) in read_runs(contest):
                    continue
                rows = run_in_process(contest, side, seed, steps)
                is_new = not results_of(contest).is_file()
                with open(results_of(contest), "a", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                    if is_new:
                        writer.writeheader()
                    writer.writerows(rows)
                print(f"{side}, seed {seed}: {rows[-1]['seconds']} s, solved "
                      f"{float(rows[-1]['solved']):.1%}", flush=True)
    if given.figure:
        draw()
    print(race_table(contest))
    print(final_table(contest))


if __name__ == "__main__":
    main()
