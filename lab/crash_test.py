"""Kills runs at random moments, lets each go on, and compares it with one that nothing interrupted.

    python -m lab.crash_test                   50 kills -> rows of lab/results/kills.csv
    python -m lab.crash_test --engine vllm     sampled by vLLM instead of transformers
    python -m lab.crash_test --alone           starter.py in a folder of its own, without support/

The run is short but whole: two epochs per rollout, a KL penalty with a controller, evaluations, a
reward that draws random numbers. Each kill is kill -9 at a random moment of a random phase;
nothing in starter.py knows of it. Compared bit for bit are the weights, AdamW's moments, every
number in TensorBoard but times and memory, the steps at which each was logged, and, with support/,
the KL by token.
"""
import argparse
import csv
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "lab" / "results" / "kills.csv"
PHASES = ("rollout", "update", "save", "evaluate")
HANGING = 600  # seconds after which a run is ended and counts as failed
PROMPT = "sort 54321 " * 4 + "make {target}: {numbers}"  # longer than a block of vLLM's cache


# --------------------------------------------------------------------------------------------------
# 1. The run, in a process of its own.

def noisy_variety(text, problem):
    """A reward that random weights can earn, and that draws from the global generator."""
    return len(set(text)) / 10 + random.random() / 100


def long_prompts(cfg):
    """A task: Countdown with two or three small numbers."""
    import starter
    numbers = dict(n_numbers=(2, 3), max_number=9, prompt=PROMPT)
    return (starter.make_countdown(50, False, cfg.seed, **numbers),
            starter.make_countdown(cfg.n_eval_problems, True, cfg.seed, **numbers))


def settings_of(folder, engine):
    return dict(
        model_id=str(folder / "model"), out_dir=str(folder / "runs"), engine=engine, device="cpu",
        bf16=False, n_train_steps=6, rollout_batch_size=16, group_size=4, max_new_tokens=8,
        learning_rate=1e-3, n_eval_problems=20, eval_every=3, save_every=2,
        max_tokens_per_microbatch=400, epochs_per_rollout=2, use_kl_penalty=True, kl_coef=0.1,
        kl_adaptation_method="target_sound")


def child(settings, messages):
    """The run itself. It tells the start of each phase to the pipe `messages`, by functions that
    are wrapped from outside."""
    import starter

    def tell(phase):
        os.write(messages, f"{phase} {time.monotonic()}\n".encode())

    def wrap(owner, name, phase):
        real = getattr(owner, name)

        def wrapped(*args, **kwargs):
            tell(phase)
            return real(*args, **kwargs)

        setattr(owner, name, wrapped)

    wrap(starter, "rollout", "rollout")
    wrap(starter, "accumulate_gradients", "update")
    wrap(starter.Run, "save", "save")
    wrap(starter, "evaluate", "evaluate")
    starter.main(task=long_prompts, reward=noisy_variety, **settings)
    tell("end")


# --------------------------------------------------------------------------------------------------
# 2. Kill it, resume it, compare.

class Kill(NamedTuple):
    phase: str
    occurrence: int  # 1: the first time that the phase begins
    delay: float  # seconds after its beginning


class Finished(NamedTuple):
    phases: list  # of (phase, when it began)
    status: int
    output: str


def run(settings, code, kill=None):
    """Runs main(**settings) with the starter.py of the folder `code`. Returns Finished."""
    reading, writing = os.pipe()
    command = [sys.executable, __file__, "--child", json.dumps(settings), "--messages",
               str(writing)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(code)}
    process = subprocess.Popen(command, pass_fds=[writing], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, cwd=code, env=environment)
    os.close(writing)
    phases = []
    hanging = threading.Timer(HANGING, process.kill)
    hanging.start()
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(process.stdout.read)
        for line in open(reading):
            phase, when = line.split()
            phases.append((phase, float(when)))
            n_times = sum(name == phase for name, _ in phases)
            if kill is not None and (phase, n_times) == kill[:2]:
                time.sleep(kill.delay)
                process.kill()
        status = process.wait()
        hanging.cancel()
        return Finished(phases, status, output.result())


def outcome(folder):
    """Returns everything that two runs of the same settings must share: hashes of the files, and
    every logged number with its step."""
    from safetensors.torch import load_file
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    (run_folder,) = (path.parent for path in folder.glob("runs/*/config.json"))
    log = EventAccumulator(str(run_folder), size_guidance={"scalars": 0}).Reload()
    logged = {}
    for tag in log.Tags()["scalars"]:
        if tag.startswith(("time/", "mem/")) or tag == "train/tokens_per_s":
            continue
        # By time: files that were begun in the same second are read in any order.
        events = sorted(log.Scalars(tag), key=lambda event: event.wall_time)
        logged[tag] = [(event.step, event.value) for event in events]
    files = [run_folder / "model" / "model.safetensors", *run_folder.glob("kl_by_token.json")]
    hashes = {str(path.relative_to(run_folder)): hashlib.sha256(path.read_bytes()).hexdigest()
              for path in files}
    # The checkpoint's state, in the same file, holds times.
    last_checkpoint = max(run_folder.glob("checkpoints/step_*.safetensors"))
    for name, tensor in load_file(last_checkpoint).items():
        hashes[f"{last_checkpoint.stem} {name}"] = hashlib.sha256(tensor.numpy()).hexdigest()
    return {"log": logged, "hashes": hashes}


def make_model(folder):
    """Saves a two-layer Qwen3 of random weights, in a process of its own."""
    program = (
        "import sys, torch\n"
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "from support.tiny import make_tokenizer\n"
        "tokenizer = make_tokenizer()\n"
        "torch.manual_seed(0)\n"
        "model = Qwen3ForCausalLM(Qwen3Config(\n"
        "    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, head_dim=32,\n"
        "    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,\n"
        "    tie_word_embeddings=True, max_position_embeddings=256, initializer_range=0.15,\n"
        "    eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,\n"
        "    bos_token_id=None))\n"
        "model.save_pretrained(sys.argv[1])\n"
        "tokenizer.save_pretrained(sys.argv[1])\n")
    subprocess.run([sys.executable, "-c", program, str(folder)], cwd=REPOSITORY, check=True)


class CrashTest:
    """An engine and a folder of code, the model, and the run that nothing interrupted."""

    def __init__(self, folder, engine, alone):
        self.engine = engine
        self.alone = alone
        self.model = folder / "model"
        make_model(self.model)
        self.code = REPOSITORY
        if alone:
            self.code = folder / "code"
            self.code.mkdir()
            shutil.copy(REPOSITORY / "starter.py", self.code)
        self.whole = run(settings_of(folder, engine), self.code)
        if self.whole.status != 0:
            raise RuntimeError(f"the run without a kill failed:\n{self.whole.output}")
        parts = "compute plain" if alone else "compute fast"
        if parts not in self.whole.output:
            raise RuntimeError(f"the run did not use {parts!r}:\n{self.whole.output}")
        self.outcome = outcome(folder)

    def random_kill(self, number):
        """Returns the kill of this number: its phase in turn, the rest at random."""
        rng = random.Random(number)
        phase = PHASES[number % len(PHASES)]
        starts = [i for i, (name, _) in enumerate(self.whole.phases) if name == phase]
        pick = rng.randrange(len(starts))
        began = self.whole.phases[starts[pick]][1]
        next_began = self.whole.phases[starts[pick] + 1][1]
        return Kill(phase, pick + 1, rng.uniform(0, next_began - began))

    def trial(self, number):
        """One kill and what became of it. Returns its row, and the output of the resumed run."""
        kill = self.random_kill(number)
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            (folder / "model").symlink_to(self.model)
            settings = settings_of(folder, self.engine)
            killed = run(settings, self.code, kill)
            resumed = run(settings | {"resume": True}, self.code)
            from_step = "from the start"
            for line in resumed.output.splitlines():
                if line.startswith("resumed: ") and " after " in line:
                    from_step = line.partition(" after ")[2]
            same_weights = same_log = False
            if resumed.status == 0:
                after = outcome(folder)
                same_weights = after["hashes"] == self.outcome["hashes"]
                same_log = after["log"] == self.outcome["log"]
        row = {"engine": self.engine, "parts": "starter.py alone" if self.alone else "support/",
               "kill": number, "phase": kill.phase, "occurrence": kill.occurrence,
               "ms_into_it": round(1000 * kill.delay), "killed": killed.status == -9,
               "went_on": from_step, "same_weights": same_weights, "same_log": same_log}
        return row, resumed.output


def is_same(row):
    """Whether a row's run was killed and ended with the same bits."""
    return all(str(row[name]) == "True" for name in ("killed", "same_weights", "same_log"))


def kill_runs(numbers, engine="transformers", alone=False, at_once=1):
    """Yields a row for each kill. The output of a run that differs is printed."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        test = CrashTest(Path(folder), engine, alone)
        for row, output in pool.map(test.trial, numbers):
            if not is_same(row):
                print(output)
            yield row


def read_rows():
    if not RESULTS.is_file():
        return []
    with open(RESULTS, newline="") as file:
        return list(csv.DictReader(file))


def main(engine, alone, kills):
    """The rows of this engine and these parts take the place of the earlier ones, once all kills
    are done."""
    start = time.monotonic()
    new = []
    for row in kill_runs(range(kills), engine, alone, os.cpu_count()):
        new.append(row)
        print(" ".join(map(str, row.values())), flush=True)
    kind = (new[0]["engine"], new[0]["parts"])
    rows = [row for row in read_rows() if (row["engine"], row["parts"]) != kind] + new
    with open(RESULTS, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(new[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    good = sum(map(is_same, new))
    print(f"{', '.join(kind)}: {good} of {len(new)} killed runs ended with the same bits "
          f"({time.monotonic() - start:.0f} s)")
    sys.exit(good != len(new))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="kills runs, resumes them, compares")
    parser.add_argument("--engine", default="transformers", choices=("transformers", "vllm"))
    parser.add_argument("--alone", action="store_true", help="starter.py without support/")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--messages", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child, arguments.messages)
    else:
        main(arguments.engine, arguments.alone, arguments.kills)
