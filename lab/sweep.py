"""Runs main() for each line of a csv file.

    python -m lab.sweep learning [--jobs 1]      fills lab/results/learning.csv

A line has "settings", what differs from main()'s defaults and from preset="tiny", and "seed". Lines
that the present commit has measured are not repeated, so that a sweep that was killed goes on where
it was. Each run is a process of its own, --jobs at a time, which share the cores. To measure
something new, add lines with these two columns.

Settings may also name a "recipe", or several as in "a+b", which are applied before the run; hold
"edits", {file: {a text of it: what is put in its place}}; and an "environment", variables of its
process. "agent" is the name of one in lab/agents.py. In the place of a model's name may stand the
settings of another run, whose model is taken, or {"sizes": ...} of one that lab.build_tiny builds.
The task "skills" asks for the other skills in training, "sort.jsonl" is README's example of data.

"kept" is the mean of the four other skills, or the share of the questions that SmolLM2 still
answers. A curve has a value for each evaluation; that of the nats per token between sampler and
trainer has one for each tenth of the steps.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.rows import REPOSITORY, commit, read_csv, read_log, where, write_csv

PROGRAM = """
import json, sys
from lab import sweep
print("\\n" + json.dumps(sweep.train(*json.loads(sys.argv[1]))))
"""


def write_readmes_data(path):
    """By the program in README.md, whose numbers are drawn from one seed here."""
    text = (REPOSITORY / "README.md").read_text("utf-8")
    [program] = re.findall(r'python -c "(.*?)" > sort.jsonl', text, re.DOTALL)
    program = "import random\nrandom.seed(0)\n" + program
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    path.write_bytes(done.stdout)


def run(settings, seed, out_dir):
    """Runs main() in this process. Returns its result."""
    import starter
    from lab import agents, build_tiny, real_model

    def skills(cfg):
        problems = [build_tiny.make_skill(skill, 1000, False) for skill in build_tiny.SKILLS]
        return sum(problems, []), starter.TASKS["countdown_small"](cfg)[1]

    chosen = {"preset": "tiny", "eval_every": 0, "save_every": 0, **settings}
    if chosen["preset"] == "smollm2":
        chosen["model_id"] = str(real_model.model_folder())
    if chosen.get("task") == "skills":
        chosen["task"] = skills
    if chosen.get("task") == "sort.jsonl":
        chosen["task"] = str(Path(out_dir, "sort.jsonl"))
        write_readmes_data(Path(chosen["task"]))
    if "agent" in chosen:
        chosen["agent"] = getattr(agents, chosen["agent"])
    for name in ("model_id", "ref_model_id"):
        source = chosen.get(name)
        if isinstance(source, dict):
            if "sizes" in source:
                folder = tempfile.mkdtemp(dir=out_dir)
                build_tiny.build(folder, **source["sizes"])
            else:
                folder = run(source, seed, out_dir)["run_folder"] / "model"
                shutil.copy(Path(build_tiny.tasks.TINY, "retention.jsonl"), folder)
            chosen[name] = str(folder)
    return starter.main(**chosen, seed=seed, out_dir=out_dir)


def train(settings, seed):
    """Returns what a run measures."""
    from lab import real_model

    is_smollm2 = settings.get("preset") == "smollm2"
    with tempfile.TemporaryDirectory() as out_dir:
        result = run(settings, seed, out_dir)
        log = read_log(result["run_folder"])
        kept = [float("nan")]
        if is_smollm2 and "precision" not in settings:  # else it would take most of the time
            trained = result["run_folder"] / "model"
            kept = [1.0, real_model.questions_kept(str(real_model.model_folder()), trained)]
    curves = {tag: [value for _, value in points] for tag, points in log.items()}
    if not is_smollm2:
        skills = [values for tag, values in curves.items() if tag.startswith("eval/retention_")]
        kept = [statistics.mean(shares) for shares in zip(*skills)]
    row = {"kept_before": f"{kept[0]:.4g}", "kept_after": f"{kept[-1]:.4g}"}
    for moment in ("before", "after"):
        for name, value in result[moment].items():
            row[f"{name}_{moment}"] = round(value, 4)
    row["kl_per_token"] = round(result["kl_per_token"], 4)
    nothing = [float("nan")]  # is trained
    row["s_per_step"] = round(statistics.median(curves.get("time/total", nothing)), 3)
    nats = curves.get("train/sampler_logprob_diff", nothing)
    tenth = max(1, len(nats) // 10)
    nats = [statistics.mean(nats[i : i + tenth]) for i in range(0, len(nats), tenth)]
    for name, values in (("solved", curves["eval/solved"]), ("kept", kept), ("nats", nats)):
        row[f"curve_{name}"] = " ".join(f"{value:.4g}" for value in values)
    return {**row, **where()}


def edit(path, replaced):
    """Puts texts in the place of others, each of which the file must hold once."""
    source = path.read_text()
    for text, other in replaced.items():
        if source.count(text) != 1:
            raise SystemExit(f"{text!r} is {source.count(text)} times in {path.name}")
        source = source.replace(text, other)
    path.write_text(source)


def run_one(settings, seed, threads):
    """Returns the columns of a run in a copy of the repository with its recipes; none where the run
    fails, whose process has said why."""
    settings = dict(settings)
    recipes = settings.pop("recipe", "").split("+")
    edits = settings.pop("edits", {})
    variables = settings.pop("environment", {})
    with tempfile.TemporaryDirectory() as folder:
        for part in ("support", "lab"):
            shutil.copytree(REPOSITORY / part, Path(folder, part))
        for name in ("starter.py", "README.md"):
            shutil.copy(REPOSITORY / name, folder)
        for name in filter(None, recipes):
            patch = REPOSITORY / "recipes" / f"{name}.patch"
            subprocess.run(["git", "apply", patch], cwd=folder, check=True)
        for name, replaced in edits.items():
            edit(Path(folder, name), replaced)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps([settings, seed])],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), **variables},
            text=True,
            stdout=subprocess.PIPE,
        )
    if done.returncode:
        return {}
    row = json.loads(done.stdout.splitlines()[-1])
    return {**row, "commit": commit()}


def sweep(name, jobs):
    """Measures the lines of lab/results/<name>.csv, which is written after each run."""
    rows = read_csv(name)
    present = commit()
    todo = [row for row in rows if row.get("commit") != present]
    threads = max(1, os.cpu_count() // jobs)

    def measure(row):
        return run_one(json.loads(row["settings"]), int(row["seed"]), threads)

    with ThreadPoolExecutor(jobs) as pool:
        for row, measured in zip(todo, pool.map(measure, todo)):
            row.update(measured)
            write_csv(name, rows)
            print(row["settings"], row["seed"], measured.get("solved_after", "failed"), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="runs main() for each line of a csv file")
    parser.add_argument("name", help="of the file in lab/results/")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    given = parser.parse_args()
    sweep(given.name, given.jobs)
