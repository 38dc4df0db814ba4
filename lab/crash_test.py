"""Kills runs at random moments, resumes each, and compares it with a run that nothing interrupted.

    python -m lab.crash_test support      20 kills -> that many more rows of lab/results/kills.csv
    python -m lab.crash_test alone lora   others of CASES

The run is short but whole: two epochs per rollout, a KL penalty with a controller, evaluations, a
reward that draws random numbers. Each kill is kill -9 of all its processes, or of one of two, in
the time that a step takes after the line of a random step: while it evaluates, saves, samples or
learns. Compared bit for bit are the saved model, the weights, AdamW's moments and the state in the
last checkpoint, and every number in TensorBoard but times and memory, with its step.
"""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab import bench
from lab.rows import REPOSITORY, append_rows, read_log

NOT_COMPARED = ("time/", "mem/", "seconds", "steps_shown", "param_groups")  # times and settings
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
    "processes": ("support/, 2 processes", 10, {}),
    "one process": ("support/, one of 2 processes", 10, {}),
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
    """The run, in its own process."""
    import starter

    print(f"process {os.getpid()}\n", end="", flush=True)  # in one piece, beside another process
    starter.COEFFICIENT_RULES["growing"] = growing
    starter.main(task=sums, reward=noisy_variety, **settings)


def run(settings, code, parallel=False, kill=None, only=None):
    """Runs main(**settings) with the starter.py in the folder `code`. parallel: in two processes.
    kill: (how a line that is printed begins, seconds after it). only: the number of the process
    that is killed alone. Returns the exit status and what was printed."""
    command = [sys.executable, "-m", "lab.crash_test", "child", json.dumps(settings)]
    if parallel:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = os.pathsep.join([str(code), str(REPOSITORY)])
    process = subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
    )
    pids = [process.pid] if only is None else []
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith("process "):
            pids.append(int(line.split()[1]))
        if kill and line.startswith(kill[0]):
            time.sleep(kill[1])
            for pid in pids if only is None else pids[only:][:1]:
                os.kill(pid, signal.SIGKILL)
    return process.wait(), printed


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


def read_checkpoint(path):
    """Returns what a checkpoint of one or several processes holds."""
    import torch

    from support import checkpoints

    if path.is_dir():
        return checkpoints.read_parts(path, lambda keys, shape: None)
    return torch.load(path, weights_only=True)


def outcome(folder):
    """Returns what two runs of the same settings must share: what is saved, and what is logged."""
    [settings] = folder.glob("runs/*/settings.json")
    run_folder = settings.parent
    files = run_folder.glob("model/*.safetensors")
    model = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    checkpoint = read_checkpoint(max(run_folder.glob("checkpoint_*")))
    return compared({**model, **checkpoint, **read_log(run_folder)})


def kill_runs(name, folder):
    """Yields a row for each kill."""
    parts, n_kills, changes = CASES[name]
    code = REPOSITORY
    if name == "alone":
        code = folder
        shutil.copy(REPOSITORY / "starter.py", code)
    bench.save_random("S", folder / "model")
    settings = {**SETTINGS, **changes, "model_id": f"{folder}/model"}

    def one(trial, kill=None, resume=None, only=None):
        given = {**settings, "out_dir": f"{folder}/{trial}/runs", "resume": resume}
        return run(given, code, "process" in name, kill, only)

    status, printed = one("whole")
    assert status == 0, printed
    whole = outcome(folder / "whole")
    seconds_of_steps = re.findall(r"\| ([\d.]+) s", printed)
    for number in range(n_kills):
        rng = random.Random(number)
        step = rng.randint(1, SETTINGS["n_train_steps"])
        seconds = rng.uniform(0, float(seconds_of_steps[step - 1]))
        only = rng.randrange(2) if name == "one process" else None
        status, _ = one(number, (f"Step {step}/", seconds), only=only)
        one(number, resume=True)
        is_same = outcome(folder / str(number)) == whole
        yield {
            "engine": settings["engine"],
            "parts": parts,
            "same_bits": is_same and status == (1 if name == "one process" else -signal.SIGKILL),
        }


if __name__ == "__main__":
    if sys.argv[1] == "child":
        child(json.loads(sys.argv[2]))
    else:
        for name in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as folder:
                for row in kill_runs(name, Path(folder)):
                    print(row, flush=True)
                    append_rows("kills", [row])
