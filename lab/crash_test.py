"""Kills runs at random moments, resumes each, and compares it with a run that nothing interrupted.

    python -m lab.crash_test support      20 kills -> their rows of lab/results/kills.csv
    python -m lab.crash_test alone lora   others of CASES

The run is short but whole: two epochs per rollout, a KL penalty with a controller, evaluations, a
reward that draws random numbers. Each kill is kill -9 of all its processes, at a random moment of a
random phase. Compared bit for bit are the saved model, the weights, AdamW's moments and the state
in the last checkpoint, and every number in TensorBoard but times and memory, with its step.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab import bench
from lab.rows import REPOSITORY, read_csv, write_csv

NOT_COMPARED = ("time/", "mem/", "tokens_per_s", "seconds", "param_groups")  # times and settings
PHASES = ["rollout", "update", "save", "evaluate"]
SETTINGS = dict(
    rollout_batch_size=16,
    group_size=4,
    max_new_tokens=8,
    learning_rate=1e-3,
    warmup_steps=3,
    epochs_per_rollout=2,
    max_tokens_per_microbatch=400,
    n_train_steps=6,
    save_every=2,
    eval_every=3,
    n_eval_problems=20,
    use_kl_penalty=True,
    kl_coef=0.1,
    kl_adaptation_method="growing",
    device="cpu",
    engine="transformers",
)
CASES = {  # name: what the table shows, kills, changes of the settings
    "support": ("support/", 20, {}),
    "alone": ("starter.py alone", 10, {}),
    "lora": ("support/, LoRA", 3, dict(lora_rank=4)),
    "processes": ("support/, 2 processes", 2, {}),
    "vllm": ("support/", 2, dict(engine="vllm")),
    "cuda": ("support/, cuda", 2, dict(device="cuda", precision="bf16")),
}


def growing(controller, cfg, kl, reward):
    """A coefficient rule that keeps a number from step to step."""
    controller.state["total"] = controller.state.get("total", 0.0) + kl
    return controller.start * (1 + controller.state["total"])


def noisy_variety(text, problem):
    """A reward that random weights can earn, and that draws from the global generator."""
    return len(set(text)) / 10 + random.random() / 100


def sums(cfg):
    """A task. Its prompts are longer than a block of vLLM's prefix cache, and differ in length."""
    problems = []
    for n in range(95, 165):
        prompt = f"sort {n} and add the digits of it: {n * n}"
        problems.append({"prompt": prompt, "answer": "1"})
    return problems[cfg.n_eval_problems :], problems


def child(settings):
    """The run, in its own process. Functions that are wrapped here print where a phase begins."""
    import starter

    def announced(phase, function):
        def call(*args):
            print(f"phase {phase} {time.monotonic()}", flush=True)  # in one piece: it may be killed
            return function(*args)

        return call

    print("process", os.getpid(), flush=True)
    if os.environ.get("RANK", "0") == "0":
        starter.problems_of_step = announced("rollout", starter.problems_of_step)
        starter.make_batch = announced("update", starter.make_batch)
        starter.evaluate = announced("evaluate", starter.evaluate)
        starter.Run.save = announced("save", starter.Run.save)
    starter.COEFFICIENT_RULES["growing"] = growing
    starter.main(task=sums, reward=noisy_variety, **settings)
    print("phase end", time.monotonic(), flush=True)


def run(settings, code, processes, kill=None):
    """Runs main(**settings) with the starter.py of the folder `code`. kill: (phase, its number from
    1, seconds into it). Returns [(phase, when it began)], the exit status and what was printed."""
    command = [sys.executable, "-m", "lab.crash_test", "child", json.dumps(settings)]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = os.pathsep.join([str(code), str(REPOSITORY)])
    process = subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
    )
    pids = {process.pid}
    phases = []
    printed = ""
    for line in process.stdout:
        printed += line
        first, *words = line.split() or [""]
        if first == "process":
            pids.add(int(words[0]))
        elif first == "phase":
            phases.append((words[0], float(words[1])))
            number = [name for name, _ in phases].count(words[0])
            if kill and kill[:2] == (words[0], number):
                time.sleep(kill[2])
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
    return phases, process.wait(), printed


def compared(values):
    """A dict of a checkpoint or a log -> what two runs must share of it, with hashes of tensors."""
    kept = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = compared(value)
        elif hasattr(value, "numpy"):
            value = hashlib.sha256(value.numpy()).hexdigest()
        if not any(word in str(name) for word in NOT_COMPARED):
            kept[name] = value
    return kept


def outcome(folder):
    """Returns what two runs of the same settings must share: what is saved, and what is logged."""
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [settings] = folder.glob("runs/*/settings.json")
    run_folder = settings.parent
    files = run_folder.glob("model/*.safetensors")
    model = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    checkpoint = torch.load(max(run_folder.glob("checkpoint_*.pt")), weights_only=True)
    log = EventAccumulator(str(run_folder)).Reload()
    logged = {}
    for tag in log.Tags()["scalars"]:
        logged[tag] = [(event.step, event.value) for event in log.Scalars(tag)]
    return {"saved": compared({**model, **checkpoint}), "logged": compared(logged)}


def random_kill(number, phases):
    """Returns a kill for run(), at a random moment. A phase lasts until the next one begins."""
    rng = random.Random(number)
    phase = PHASES[number % len(PHASES)]
    starts = [i for i, (name, _) in enumerate(phases) if name == phase]
    i = rng.choice(starts)
    seconds = phases[i + 1][1] - phases[i][1]
    return phase, starts.index(i) + 1, rng.uniform(0, seconds)


def kill_runs(name, folder):
    """Returns a row for each kill."""
    parts, n_kills, changes = CASES[name]
    code = REPOSITORY
    if name == "alone":
        code = folder
        shutil.copy(REPOSITORY / "starter.py", code)
    n_processes = 2 if name == "processes" else 1
    bench.save_random("S", folder / "model")
    settings = {**SETTINGS, **changes, "model_id": f"{folder}/model"}

    def one(trial, kill=None, resume=None):
        given = {**settings, "out_dir": f"{folder}/{trial}/runs", "resume": resume}
        phases, status, printed = run(given, code, n_processes, kill)
        if kill is None and status != 0:
            sys.exit(printed)
        return phases, status == -signal.SIGKILL

    phases, _ = one("whole")
    whole = outcome(folder / "whole")
    rows = []
    for number in range(n_kills):
        kill = random_kill(number, phases)
        row = {"engine": settings["engine"], "parts": parts, "kill": number, "phase": kill[0]}
        _, row["killed"] = one(number, kill)
        one(number, resume=True)
        ours = outcome(folder / str(number))
        row["same_weights"] = ours["saved"] == whole["saved"]
        row["same_log"] = ours["logged"] == whole["logged"]
        print(*row.values(), flush=True)
        rows.append(row)
    return rows


def main(names):
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            rows = kill_runs(name, Path(folder))
        case = {key: rows[0][key] for key in ("engine", "parts")}
        others = [row for row in read_csv("kills") if not case.items() <= row.items()]
        write_csv("kills", others + rows)


if __name__ == "__main__":
    if sys.argv[1] == "child":
        child(json.loads(sys.argv[2]))
    else:
        main(sys.argv[1:])
