"""crash_test.py: kills runs at random moments, lets each go on, and compares it bit for bit with one never interrupted.

    python crash_test.py                   50 kills, sampled by transformers -> rows of results/kills.csv
    python crash_test.py --engine vllm     the same with vLLM

The run is short but whole: two epochs a rollout, a leash with a controller, evaluations, a reward that draws random
numbers. Each kill is kill -9 at a random moment of a random phase; nothing in starter.py knows of it. Compared are the
weights, every number in TensorBoard but times and memory, the steps at which each was logged, and the KL by token.
"""
import argparse
import csv
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
PHASES = "rollout", "update", "save", "evaluate"


def noisy_variety(text, problem):
    """A reward that random weights can earn, and that draws from the global generator."""
    return len(set(text)) / 10 + random.random() / 100


def settings_of(folder, engine):
    return dict(model_id=str(folder / "model"), out_dir=str(folder / "runs"), engine=engine, device="cpu", bf16=False,
                n_train_steps=6, rollout_batch_size=16, group_size=4, max_new_tokens=8, learning_rate=1e-3,
                max_number=9, n_train_problems=50, n_eval_problems=20, numbers_per_problem=(2, 3), eval_every=3,
                save_every=2,
                countdown_prompt="sort 54321 " * 4 + "make {target}: {numbers}",  # longer than a block of vLLM's cache
                max_tokens_per_microbatch=400, epochs_per_rollout=2,
                use_kl_penalty=True, kl_coef=0.1, kl_adaptation_method="target_sound", reward=noisy_variety)


def child(settings):
    """The run itself. The start of each phase is told on stdout, by wrapping the functions from outside."""
    import starter
    settings["reward"] = noisy_variety

    def told(owner, name, phase):
        real = getattr(owner, name)

        def wrapped(*args, **kwargs):
            os.write(3, f"{phase} {time.monotonic()}\n".encode())
            return real(*args, **kwargs)
        setattr(owner, name, wrapped)

    told(starter, "rollout", "rollout"), told(starter, "accumulate_gradients", "update")
    told(starter.machine.Run, "save", "save"), told(starter, "evaluate", "evaluate")
    starter.main(**settings)
    os.write(3, f"end {time.monotonic()}\n".encode())


def run(settings, kill=None):
    """-> [(phase, when)], exit status, output. kill -9 comes at kill = (phase, occurrence, seconds after its start)."""
    reading, writing = os.pipe()
    command = [sys.executable, __file__, "--child", json.dumps(settings | {"reward": None})]
    process = subprocess.Popen(["bash", "-c", f'exec "$@" 3>&{writing}', "-", *command], pass_fds=[writing], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=HERE,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})
    os.close(writing)
    with ThreadPoolExecutor(1) as pool:
        output, phases = pool.submit(process.stdout.read), []
        for line in open(reading):
            phases.append((line.split()[0], float(line.split()[1])))
            if kill and [phase for phase, _ in phases].count(kill[0]) == kill[1] and phases[-1][0] == kill[0]:
                time.sleep(kill[2])
                process.kill()
        return phases, process.wait(), output.result()


def outcome(folder, checkpoints=True):
    """-> everything that two runs of the same settings must share: hashes, and every logged number with its step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    (run_folder,) = (path.parent for path in folder.glob("runs/*/config.json"))
    events = EventAccumulator(str(run_folder), size_guidance={"scalars": 0}).Reload()
    in_time = lambda tag: sorted(events.Scalars(tag), key=lambda e: e.wall_time)  # files of one second sort as text
    numbers = {tag: [(e.step, e.value) for e in in_time(tag)] for tag in events.Tags()["scalars"]
               if not tag.startswith(("time/", "mem/")) and tag != "train/tokens_per_s"}
    files = [run_folder / "model/model.safetensors", run_folder / "kl_by_token.json"]
    files += sorted(run_folder.glob("checkpoints/*"))[-1].glob("*.safetensors") if checkpoints else []
    return {"numbers": numbers, "sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}}


def make_model(folder):
    from test_starter import save_checkpoint
    save_checkpoint(folder / "model")
    return folder


def trial(number, engine, model, whole, phases):
    """One kill and what became of it -> a row."""
    rng = random.Random(number)
    phase = PHASES[number % len(PHASES)]
    starts = [i for i, (name, _) in enumerate(phases) if name == phase]
    pick = rng.randrange(len(starts))
    length = phases[starts[pick] + 1][1] - phases[starts[pick]][1]  # until the next phase began
    delay = rng.uniform(0, length)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "model").symlink_to(model / "model")
        settings = settings_of(folder, engine)
        _, status, _ = run(settings, (phase, pick + 1, delay))
        _, resumed, output = run(settings | {"resume": True})
        said = next((line for line in output.splitlines() if line.startswith("resumed: ")), output[-300:])
        same = resumed == 0 and outcome(folder)
        return {"engine": engine, "kill": number, "phase": phase, "occurrence": pick + 1,
                "ms_into_it": round(1000 * delay), "killed": status == -9,
                "went_on": said.partition(" after ")[2] or "from the start",
                "same_weights": bool(same) and same["sha256"] == whole["sha256"],
                "same_log": bool(same) and same["numbers"] == whole["numbers"]}, output


def kill_runs(numbers, engine, at_once=1):
    """-> rows, one a kill; the output of those that differ is printed."""
    with tempfile.TemporaryDirectory() as model:
        model = make_model(Path(model))
        phases, status, output = run(settings_of(model, engine))
        assert status == 0, output
        whole = outcome(model)
        with ThreadPoolExecutor(at_once) as pool:
            for row, output in pool.map(lambda n: trial(n, engine, model, whole, phases), numbers):
                if not (row["same_weights"] and row["same_log"]):
                    print(output)
                yield row


def main(engine="transformers", kills=50):
    path = HERE / "results" / "kills.csv"
    rows = list(csv.DictReader(open(path))) if path.is_file() else []
    rows = [row for row in rows if row["engine"] != engine]
    for row in kill_runs(range(kills), engine, os.cpu_count()):
        rows.append(row)
        print(" ".join(map(str, row.values())), flush=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[-1]))
        writer.writeheader()
        writer.writerows(rows)
    mine = [row for row in rows if row["engine"] == engine]
    good = sum(row["killed"] and row["same_weights"] and row["same_log"] for row in mine)
    print(f"{engine}: {good} of {len(mine)} killed runs ended with the same bits")
    sys.exit(good != len(mine))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--child", type=json.loads)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
    else:
        main(arguments.engine, arguments.kills)
