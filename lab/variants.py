"""Compares the recipes with each other and with starter.py as it is, on the built-in model.

    python -m lab.variants            the runs that results/variants.csv does not hold yet (66 runs,
                                      about 35 minutes on two quiet cores)
    python -m lab.variants --figure   draws figures/variants.png

Each run trains for the same time: SECONDS of rollout, reward and update, as the run itself counts
them, whatever its number of steps. Evaluation and start-up are outside. Learning rate, batch and
problems are those of TINY for all; the cosine of that recipe ends when the time does. Two runs go
side by side, each on one thread. A run takes place in a copy of the repository with the recipe
applied. The KL is that to the starting model, also where the reference is another one. The teacher
of "distillation" is the model that starter.py as it is has trained with seed 0.
"""
import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from lab import recipes
from lab.ablate_kl import append_rows, other_skills, read_csv

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "lab" / "results" / "variants.csv"
FIGURE = REPOSITORY / "lab" / "figures" / "variants.png"
SEEDS = (0, 1, 2)
SECONDS = 40
OFF, ON = {}, {"use_kl_penalty": True}
BASE = "starter.py"  # as it is
# With two optimiser steps per rollout; GSPO also takes the mean over each response first.
CHANGED = {"two epochs": dict(epochs_per_rollout=2),
           "two epochs, grpo": dict(epochs_per_rollout=2, loss_average="grpo")}
# wandb and calculator change nothing in how this model learns.
BOTH = (*CHANGED, "minibatches", "rloo", "maxrl", "gspo", "cispo", "sapo", "dynamic_sampling",
        "cosine")
JOBS = [(BASE, OFF), (BASE, ON), *((name, kl) for name in BOTH for kl in (OFF, ON)),
        ("moving_reference", ON), ("distillation", ON)]


def train_for_a_while(changes, seconds):
    """main() of the starter.py in the working directory, stopped after so much training."""
    import starter
    candidates, ranks, guarded = starter.find_parts()

    class TimedRun(guarded):
        def remaining_steps(self):
            while self.state["seconds"] < seconds:
                yield self.state["step"] + 1

        def report(self, result, policy, ref_model, *rest):
            result["steps"] = self.state["step"]
            return super().report(result, policy, None, *rest)  # None: the start is loaded

    starter.find_parts = lambda: (candidates, ranks, TimedRun)
    result = starter.main(model_id="tiny", eval_every=0, save_every=0, **changes)
    print("result", json.dumps({name: value for name, value in result.items()
                                if name != "run_folder"}))


def copy_with(name, folder):
    """Copies starter.py with a recipe in it, and what it needs, to the folder."""
    for part in ("support", "lab", "tiny"):
        shutil.copytree(REPOSITORY / part, folder / part,
                        ignore=shutil.ignore_patterns("results", "figures", "__pycache__"))
    text = (REPOSITORY / "starter.py").read_text("utf-8")
    if name in recipes.RECIPES:
        text = recipes.apply(name, text)
    (folder / "starter.py").write_text(text, "utf-8")


def usual_steps(kl_penalty):
    """Steps that starter.py as it is made in the time: the median of its seeds."""
    return statistics.median_low(int(row["steps"]) for row in read_csv(RESULTS)
                                 if (row["recipe"], row["kl_penalty"]) == (BASE, kl_penalty))


def run_one(name, kl, seed, teacher, seconds=SECONDS):
    """Returns the row of one run, made by a process of its own in a folder of its own."""
    changes = kl | {"seed": seed} | CHANGED.get(name, {})
    if name == "cosine":  # ends when the time does
        changes["n_train_steps"] = usual_steps("on" if kl else "off")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        copy_with(name, folder)
        if name == "distillation":
            shutil.copytree(teacher, folder / "runs" / "teacher" / "model")
        command = [sys.executable, "-m", "lab.variants", "--child", json.dumps(changes),
                   "--seconds", str(seconds)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(done.stdout[-1000:] + done.stderr[-2000:])
        if (name, kl, seed) == (BASE, OFF, 0):
            trained = max((folder / "runs").glob("*/model"))
            shutil.copytree(trained, teacher, dirs_exist_ok=True)
    result = json.loads(done.stdout.split("\nresult ")[-1])
    row = {"recipe": name, "kl_penalty": "on" if kl else "off", "seed": seed,
           "steps": result["steps"], "seconds": round(result["seconds"], 1),
           "kl_per_token": round(result["kl_per_token"], 4)}
    for moment in ("before", "after"):
        for key, value in result[moment].items():
            row[f"{key}_{moment}"] = round(value, 4)
    return row


def run_all():
    """Runs what the csv does not hold yet; what a run gives is written at once."""
    import starter
    starter.find_model("tiny")  # built once, before the copies are made
    from lab.real_model import commit
    known = {(row["recipe"], row["kl_penalty"], row["seed"]) for row in read_csv(RESULTS)}
    teacher = Path(tempfile.gettempdir()) / "starter_teacher"
    todo = [(name, kl, seed) for name, kl in JOBS for seed in SEEDS
            if (name, "on" if kl else "off", str(seed)) not in known]
    if not teacher.is_dir() and todo and todo[0] != (BASE, OFF, 0):
        todo.insert(0, (BASE, OFF, 0))  # for the teacher alone
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        jobs = {pool.submit(run_one, *job, teacher): job for job in todo}
        for done in as_completed(jobs):
            if done.exception():  # the others go on
                print(f"{jobs[done]} failed: {done.exception()}", flush=True)
                continue
            row = done.result()
            if (row["recipe"], row["kl_penalty"], str(row["seed"])) not in known:
                append_rows(RESULTS, [row | {"commit": commit()}])
            print(f"{row['recipe']}, KL penalty {row['kl_penalty']}, seed {row['seed']}: solved "
                  f"{row['solved_after']:.1%} after {row['steps']} steps", flush=True)


# --------------------------------------------------------------------------------------------------
# Reading the rows

def groups():
    """[((recipe, "on" or "off"), rows of its seeds)], in the order of JOBS."""
    rows = read_csv(RESULTS)
    keys = [(name, "on" if kl else "off") for name, kl in JOBS]
    found = [(key, [row for row in rows if (row["recipe"], row["kl_penalty"]) == key])
             for key in keys]
    return [(key, of_key) for key, of_key in found if of_key]


def variants_table():
    from lab.tables import markdown, spread
    lines = []
    for (name, kl), rows in groups():
        lines.append([name, kl, spread([int(row["steps"]) for row in rows]),
                      spread([100 * float(row["solved_after"]) for row in rows]),
                      spread([100 * other_skills([row]) for row in rows]),
                      spread([float(row["kl_per_token"]) for row in rows], 3)])
    return markdown(["recipe", "KL penalty", "steps", "solved, %", "other skills, %",
                     "KL to the start, nats per token"], lines)


def draw():
    """Draws figures/variants.png: solved against other skills, a point for each run."""
    import matplotlib
    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharex=True,
                                sharey=True)
    names = [BASE, *BOTH, "moving_reference", "distillation"]
    for axis, kl in zip(axes, ("off", "on")):
        for (name, of_kl), rows in groups():
            if of_kl == kl:
                number = names.index(name)
                axis.scatter([100 * float(row["solved_after"]) for row in rows],
                             [100 * other_skills([row]) for row in rows], s=22, label=name,
                             color=f"C{number % 10}", marker="o" if number < 10 else "x")
        axis.set(title=f"KL penalty {kl}", xlabel="solved, %")
    axes[0].set(ylabel="other skills, %")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(FIGURE, dpi=100)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description="compares the recipes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--figure", action="store_true")
    given = parser.parse_args()
    if given.child:
        train_for_a_while(json.loads(given.child), given.seconds)
        return
    if not given.figure:
        run_all()
    draw()
    print(variants_table())


if __name__ == "__main__":
    main()
