"""Kills runs at random moments, resumes each, and compares it with a run that nothing interrupted.

    python -m lab.crash_test                   20 kills -> their rows of lab/results/kills.csv
    python -m lab.crash_test --alone           starter.py in a folder of its own, without support/
    python -m lab.crash_test --engine vllm     sampled by vLLM instead of transformers
    python -m lab.crash_test --lora            adapters instead of all weights
    python -m lab.crash_test --processes 2     several processes of torchrun
    python -m lab.crash_test --device cuda     on a GPU, in bf16

The run is short but whole: two epochs per rollout, a KL penalty with a controller, evaluations, a
reward that draws random numbers. Each kill is kill -9 of all its processes, at a random moment of a
random phase. Compared bit for bit are the saved model, the weights, AdamW's moments and the state
in the last checkpoint, and every number in TensorBoard but times and memory, with its step.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# Times and memory; settings, whose tuples come back as lists.
NOT_COMPARED = ("time/", "mem/", "tokens_per_s", "seconds", "param_groups")
PHASES = ("rollout", "update", "save", "evaluate")
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
)


def growing(controller, cfg, kl, reward):
    """A coefficient rule that keeps a number from step to step."""
    controller.state["total"] = controller.state.get("total", 0.0) + kl
    return controller.start * (1 + controller.state["total"])


def noisy_variety(text, problem):
    """A reward that random weights can earn, and that draws from the global generator."""
    return len(set(text)) / 10 + random.random() / 100


def sums(cfg):
    """A task. Its prompts are longer than a block of vLLM's prefix cache, and differ in length."""
    problems = [
        {"prompt": f"sort {n} and add the digits of it: {n * n}", "answer": "1"}
        for n in range(95, 165)
    ]
    return problems[cfg.n_eval_problems :], problems


def child(settings):
    """The run, in its own process. Functions that are wrapped here print where a phase begins."""
    import starter

    def wrap(phase, owner, name):
        real = getattr(owner, name)

        def wrapped(*args, **kwargs):
            print(f"phase {phase} {time.monotonic()}", flush=True)  # in one piece: it may be killed
            return real(*args, **kwargs)

        setattr(owner, name, wrapped)

    print("process", os.getpid(), flush=True)
    if os.environ.get("RANK", "0") == "0":
        wrap("rollout", starter, "problems_of_step")
        wrap("update", starter, "make_batch")
        wrap("save", starter.Run, "save")
        wrap("evaluate", starter, "evaluate")
    starter.COEFFICIENT_RULES["growing"] = growing
    starter.main(task=sums, reward=noisy_variety, **settings)
    print("phase end", time.monotonic(), flush=True)


def run(settings, code, processes, kill=None):
    """Runs main(**settings) with the starter.py of the folder `code`. kill: (phase, its number from
    1, seconds into it). Returns [(phase, when it began)], the exit status and what was printed."""
    command = [sys.executable, __file__, "--child", json.dumps(settings)]
    if processes > 1:
        command[1:1] = f"-m torch.distributed.run --standalone --nproc_per_node={processes}".split()
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=code,
        env=os.environ | environment,
    )
    pids = [process.pid]

    def end():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    hanging = threading.Timer(600, end)  # seconds
    hanging.start()
    phases, printed = [], []
    for line in process.stdout:
        first, *words = line.split() or [""]
        if first == "process":
            pids.insert(0, int(words[0]))
        elif first == "phase":
            phases.append((words[0], float(words[1])))
            if kill and kill[:2] == (words[0], [name for name, _ in phases].count(words[0])):
                time.sleep(kill[2])
                end()
        else:
            printed.append(line)
    hanging.cancel()
    return phases, process.wait(), "".join(printed)


def outcome(folder):
    """Returns what two runs of the same settings must share, as two dicts: hashes and numbers of
    what is saved, and the numbers of the log."""
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run_folder,) = (path.parent for path in folder.glob("runs/*/settings.json"))
    files = [*run_folder.glob("model/*.safetensors")]
    saved = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    logged = {}

    def add(found, name, value):
        if isinstance(value, dict):
            for key in value:
                add(found, f"{name} {key}", value[key])
        elif not any(word in name for word in NOT_COMPARED):
            is_tensor = isinstance(value, torch.Tensor)
            found[name] = hashlib.sha256(value.numpy()).hexdigest() if is_tensor else str(value)

    checkpoint = max(run_folder.glob("checkpoint_*.pt"))
    add(saved, "checkpoint", torch.load(checkpoint, weights_only=True))
    log = EventAccumulator(str(run_folder), size_guidance={"scalars": 0}).Reload()
    for tag in log.Tags()["scalars"]:
        add(logged, tag, [(event.step, event.value) for event in log.Scalars(tag)])
    return saved, logged


def random_kill(number, phases):
    """Returns a kill for run(), at a random moment. A phase lasts until the next one begins."""
    rng = random.Random(number)
    starts = [i for i, (name, _) in enumerate(phases) if name == PHASES[number % len(PHASES)]]
    i = rng.choice(starts)
    seconds = phases[i + 1][1] - phases[i][1]
    return phases[i][0], starts.index(i) + 1, rng.uniform(0, seconds)


def main(kills, engine, alone, lora, processes, device):
    from lab.rows import REPOSITORY, read_csv, write_csv  # child() runs where there is no lab/

    parts = ("starter.py alone" if alone else "support/") + ", LoRA" * lora
    parts += f", {processes} processes" * (processes > 1) + f", {device}" * (device != "cpu")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        code = folder / "code"  # a copy, since somebody may be editing the repository
        code.mkdir()
        shutil.copy(REPOSITORY / "starter.py", code)
        if not alone:
            shutil.copytree(REPOSITORY / "support", code / "support")
        program = "import sys, conftest; conftest.save_checkpoint(sys.argv[1])"
        subprocess.run(
            [sys.executable, "-c", program, str(folder / "model")],
            check=True,
            cwd=REPOSITORY / "tests",
            env=os.environ | {"PYTHONPATH": str(code)},
        )
        settings = SETTINGS | {
            "model_id": str(folder / "model"),
            "out_dir": str(folder / "runs"),
            "engine": engine,
            "lora_rank": 4 * lora,
            "device": device,
            "precision": "auto",
        }
        phases, status, printed = run(settings, code, processes)
        if status != 0 or ("support/ is not here" in printed) != alone:
            sys.exit(f"the run without a kill failed:\n{printed}")
        whole = outcome(folder)
        for number in range(kills):
            trial = folder / str(number)
            settings["out_dir"] = str(trial / "runs")
            kill = random_kill(number, phases)
            _, killed, _ = run(settings, code, processes, kill)
            _, status, printed = run(settings | {"resume": True}, code, processes)
            step = printed.partition("resumed: ")[2].partition("\n")[0].partition(" after ")[2]
            ours = outcome(trial) if status == 0 else ({}, {})
            row = {
                "engine": engine,
                "parts": parts,
                "kill": number,
                "phase": kill[0],
                "occurrence": kill[1],
                "ms_into_it": round(1000 * kill[2]),
                "killed": killed == -signal.SIGKILL,
                "went_on": step or "from the start",
                "same_weights": ours[0] == whole[0],
                "same_log": ours[1] == whole[1],
            }
            print(*row.values(), flush=True)
            rows.append(row)
            if ours != whole:
                print(printed, *(ours[i].items() ^ whole[i].items() for i in (0, 1)))
    others = [row for row in read_csv("kills") if (row["engine"], row["parts"]) != (engine, parts)]
    write_csv("kills", others + rows)
    n_same = sum(row["killed"] and row["same_weights"] and row["same_log"] for row in rows)
    print(f"{engine}, {parts}: {n_same} of {kills} killed runs ended with the same bits")
    sys.exit(n_same != kills)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="kills runs, resumes them, compares")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--engine", default="transformers", choices=("transformers", "vllm"))
    parser.add_argument("--alone", action="store_true", help="starter.py without support/")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    arguments = vars(parser.parse_args())
    settings = arguments.pop("child")
    if settings is None:
        main(**arguments)
    else:
        child(settings)
