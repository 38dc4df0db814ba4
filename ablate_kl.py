"""ablate_kl.py: main() over KL settings and seeds -> results/*.csv, figures/*.png, and the tables of README_KL.md.

    python ablate_kl.py               the short grid: coefficients, leash off and on (a killed sweep goes on)
    python ablate_kl.py --full        also estimators, placements, adaptive methods: some 70 runs, over an hour
    python ablate_kl.py --vllm        leash off, sampled by vLLM (needs it installed)
    python ablate_kl.py --console     the README's runs, leash off and on, as a user sees them -> results/console_*.txt
    python ablate_kl.py --figures     draws figures/ from results/ alone (needs matplotlib)
    python ablate_kl.py --tables      writes tables and outputs into README_KL.md, from results/ alone

Runs go side by side, one a core, each on one thread. The sweep is HOT, that is, at a learning rate at which the model
does forget: at the default one, 200 steps forget little, with or without a leash (its rows stand beside).
"""
import csv
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).parent
RESULTS, FIGURES, README = HERE / "results", HERE / "figures", HERE / "README_KL.md"
CSV, CURVES, BY_TOKEN = (RESULTS / f"kl_{name}.csv" for name in ("ablation", "curves", "by_token"))
SEEDS = (0, 1, 2)
HOT = dict(learning_rate=6e-4)
LEASH = dict(use_kl_penalty=True, kl_coef=1.0, kl_estimator="exact")  # what each factor below is changed from
ON = dict(use_kl_penalty=True, kl_coef=0.3, kl_estimator="exact")  # what the README recommends for the built-in model
DEFAULT_LR = [{}, *(ON | dict(kl_coef=kl_coef) for kl_coef in (0.01, 0.3, 1.0))]
COEFFICIENTS = [HOT, *(HOT | LEASH | dict(kl_coef=kl_coef) for kl_coef in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))]
ESTIMATORS = [HOT | LEASH | changes for changes in (
    dict(kl_estimator="k3"), dict(kl_estimator="k3", kl_gradient="as_written"),
    dict(kl_estimator="k2", kl_gradient="as_written"),
    dict(kl_estimator="k1", kl_gradient="as_written", reproduce_paper=True),
    dict(kl_in="loss_to_go"), dict(kl_estimator="k3", kl_in="loss_to_go"), dict(kl_estimator="k1", kl_in="reward"))]
METHODS = [HOT | LEASH | dict(kl_adaptation_method=method) for method in (
    "clip", "sigmoid", "sigmoid_sound", "length_normalized", "length_normalized_sound", "dynamic", "dynamic_sound",
    "target", "target_sound")] + [
    HOT | LEASH | dict(kl_adaptation_method="clip_sound", kl_estimator="k3"),
    HOT | LEASH | dict(kl_adaptation_method="length_normalized", kl_estimator="k1", kl_in="reward")]
SHORT = COEFFICIENTS + DEFAULT_LR
FULL = SHORT + ESTIMATORS + METHODS
DEFAULTS = dict(learning_rate=3e-4, use_kl_penalty=False, kl_coef=0.0, kl_estimator="k3", kl_gradient="reverse",
                kl_in="loss", kl_adaptation_method="none", engine="transformers")  # to read a row without starter.py


# --- runs -------------------------------------------------------------------------------------------------------------

def key_of(changes, seed):
    return json.dumps(changes | {"seed": seed}, sort_keys=True)


def read_csv(path):
    """-> rows, oldest first; [] where there is no file."""
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def append_rows(path, new):
    rows = read_csv(path)
    if rows and set(rows[0]) != set(new[0]):
        sys.exit(f"{path} has other columns than this version writes; move it away")
    path.parent.mkdir(exist_ok=True)
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0] if rows else new[0]))
        if not rows:
            writer.writeheader()
        writer.writerows(new)


def run_one(changes, seed):
    """One training run, in a process of its own -> its row, its curve (a row every 10 steps), its KL by token."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)  # a dozen runs' consoles at once tell nobody anything
    import starter
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = starter.main(seed=seed, save_model=False, eval_every=0, out_dir=folder, **changes)
        minutes = (time.perf_counter() - start) / 60
        events = EventAccumulator(str(result["run_folder"])).Reload()
        by_token = json.loads((result["run_folder"] / "kl_by_token.json").read_text())
    row = {"run": key_of(changes, seed), "seed": seed, "minutes": round(minutes, 2)}
    row |= {name: round(result[name], 4) for name in ("kl_per_token", "kl_per_sequence")}
    for moment in ("before", "after"):
        row |= {f"{name}_{moment}": round(value, 4) for name, value in result[moment].items()}
    tags = [tag for tag in ("train/reward_mean", "train/response_length", "train/kl_per_token", "train/kl_k1",
                            "train/kl_k2", "train/kl_k3", "adaptive_kl/current_beta", "adaptive_kl/adapted_kl",
                            "train/grad_norm", "train/entropy")]
    have = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in tags if tag in events.Tags()["scalars"]}
    curve = [{"run": row["run"], "step": step} | {
        tag.split("/")[1]: f"{have[tag][step]:.5g}" if tag in have else "" for tag in tags}
        for step in have["train/reward_mean"] if step % 5 == 0]
    tokens = [{"run": row["run"], "by": kind, "key": key, "nats": round(nats, 3), "tokens": n}
              for kind, table in by_token.items() for key, (nats, n) in table.items()]
    return row, curve, tokens


def fill(grid):
    """Runs what the csv does not hold yet; what a run gives is written as soon as it is there."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the children's
    import starter
    model = hashlib.sha256((starter.machine.find_model("tiny") / "model.safetensors").read_bytes()).hexdigest()[:8]
    have = read_csv(CSV)
    if any(row["model"] != model for row in have):  # its weights differ from one kind of processor to another
        sys.exit(f"{CSV} was made with another build of the built-in model; move it away, or go on where it was made")
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout.strip()
    todo = [(changes, seed) for changes in grid for seed in SEEDS if key_of(changes, seed) not in {r["run"] for r in have}]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(run_one, *job) for job in todo]):
            row, curve, tokens = done.result()
            append_rows(CSV, [row | {"commit": commit, "model": model}])
            append_rows(CURVES, curve)
            append_rows(BY_TOKEN, tokens)
            print(f"{row['run']}: solved {row['solved_after']:.1%}, {row['minutes']} min", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--vllm"]:
        fill([{"engine": "vllm"}])
    elif sys.argv[1:] in ([], ["--full"]):
        fill(FULL if sys.argv[1:] else SHORT)
    else:
        sys.exit("usage: python ablate_kl.py [--full | --vllm | --console | --figures | --tables]")
