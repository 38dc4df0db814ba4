"""What this project does on one NVIDIA GPU -> lab/results/gpu_update.csv, gpu_vllm.csv.

    python -m lab.gpu                             both parts, eight minutes at most
    python -m lab.gpu --parts update --seconds 240
    python -m lab.gpu --rehearse --results /tmp/rows    tiny shapes, on a CPU

lab/gpu_update.py has the rows of the first part, lab/gpu_vllm.py those of the second, which needs
vLLM. They come in the order of their worth. Each is written as soon as it is there, also into the
folder that the environment variable OUT names. Each has a time limit. One that fails leaves its
reason in the column error, and the next one follows in another process. Rows that the file has are
skipped. After the total time no further row starts.
"""
import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from lab import rows

# Rows: what each of them changes.

LAYERS = dict(layers=True)
HEAD = dict(head_in_half=True, slices=1 << 28)
STATISTICS = HEAD | dict(compiled_statistics=True)
SLOPES = STATISTICS | dict(only_slopes=True)
WIDER = dict(max_tokens=8_192)
WIDEST = dict(max_tokens=16_384)
PACKED = dict(packed=True, attention="starter")
KL = dict(use_kl_penalty=True)

# In the order of their worth. "best" stands for the quickest of those before it.
UPDATE = {
    "shipped": {},
    "1": LAYERS,
    "1+2": LAYERS | SLOPES,
    "1+2+3": LAYERS | SLOPES | WIDER,
    "1+2+3+5": LAYERS | SLOPES | WIDER | PACKED,
    "shipped again": {},
    "KL, shipped": KL,
    "KL, best": KL | dict(best=True),
    "profile, shipped": dict(profile=True),
    "profile, best": dict(profile=True, best=True),
    "shipped, as beside vLLM": dict(rounds=True),
    "2": SLOPES,
    "2, statistics not compiled": HEAD,
    "1+2, all statistics again": LAYERS | STATISTICS,
    "1+2+3 at 16,384 tokens": LAYERS | SLOPES | WIDEST,
    "1+2+3+5 at 16,384 tokens": LAYERS | SLOPES | WIDEST | PACKED,
    "1+2+3+5 with a mask": LAYERS | SLOPES | WIDER | dict(attention="starter"),
    "fp16, shipped": dict(precision="float16"),
    "fp16, 1+2": LAYERS | SLOPES | dict(precision="float16"),
    "shipped, slices of 883 tokens": dict(slices=1 << 27),
    "shipped, slices of 1,766 tokens": dict(slices=1 << 28),
    "shipped, 3": WIDER,
}

SMALL = dict(lora_rank=16, gradient_checkpointing=True, frozen_in_bf16=True)
VLLM = {
    "built-in": dict(run="built-in"),
    "built-in, eager": dict(run="built-in", eager=True, instead_of="built-in"),
    "sync, tied": dict(sync=True),
    "sync, untied": dict(sync=False),
    "Qwen3-1.7B": dict(run="Qwen3-1.7B"),
    "Qwen3-1.7B, eager, 10 GB of cache": dict(
        run="Qwen3-1.7B", eager=True, settings=dict(gpu_mem_util=10), instead_of="Qwen3-1.7B"),
    "difference, bf16, head bf16": dict(dtype="bfloat16", sums=False),
    "difference, bf16, float32 sums": dict(dtype="bfloat16", sums=True),
    "difference, fp16, head fp16": dict(dtype="float16", sums=False),
    "difference, fp16, float32 sums": dict(dtype="float16", sums=True),
    "difference, float32": dict(dtype="float32", sums=False),
    "Qwen3-1.7B, 24 GB": dict(run="Qwen3-1.7B", gb=24, settings=SMALL, eager=True),
    "built-in, fp16": dict(run="built-in", dtype="float16"),
}

# Rows of a group share a process, which loads once. (module, seconds for a row, seconds to load)
PARTS = {"update": ("lab.gpu_update", 80, 50), "vllm": ("lab.gpu_vllm", 90, 40)}
SLOW = {name: 150 for name in VLLM if name.startswith("Qwen3-1.7B")}


def groups_of(part):
    """Returns lists of names, in order. A row that stands instead of another is for the case that
    it failed."""
    if part == "update":
        return [list(UPDATE)]
    groups = {}
    for name in VLLM:
        word = name.partition(",")[0]
        groups.setdefault(word if word in ("sync", "difference") else name, []).append(name)
    return list(groups.values())


class Log:
    """Prints lines with the seconds since the start."""

    def __init__(self):
        self.start = time.monotonic()

    def __call__(self, line):
        print(f"{self.passed():6.1f}  {line}", flush=True)

    def passed(self):
        return time.monotonic() - self.start


class Table:
    """The rows of a part, as they are in its file."""

    def __init__(self, part):
        self.name = f"gpu_{part}"
        self.rows = rows.read_csv(self.name)

    def has(self, name):
        """Whether a row is there. One that failed is tried again, unless memory ran out."""
        return any(row["row"] == name and (not row.get("error") or "OutOfMemory" in row["error"])
                   for row in self.rows)

    def failed(self, name):
        return any(row["row"] == name and row.get("error") for row in self.rows)

    def best(self):
        """Returns the name of the quickest update, without a reference and in bf16."""
        seconds = {row["row"]: float(row["s"]) for row in self.rows if row.get("s")
                   and not {"use_kl_penalty", "precision"} & {*UPDATE[row["row"]]}}
        return min(seconds, key=seconds.get, default="shipped")

    def put(self, row):
        self.rows = [x for x in self.rows if x["row"] != row["row"]] + [row]
        rows.write_csv(self.name, self.rows)
        keep(f"{self.name}.csv")


def keep(file):
    """Copies a file of results to where the variable OUT points, if it is set."""
    if os.environ.get("OUT"):
        shutil.copy(rows.RESULTS / file, os.environ["OUT"])


class Child:
    """A process that prints rows, and what it has printed."""

    def __init__(self, command):
        self.process = subprocess.Popen(
            command, cwd=rows.REPOSITORY, text=True, stdout=subprocess.PIPE, errors="replace",
            stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"})
        self.lines = queue.Queue()
        self.last = []
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def next(self, seconds):
        """Returns the next line; None at the end. Raises queue.Empty after the seconds."""
        line = self.lines.get(timeout=max(0.1, seconds))
        if line is not None:
            self.last = [*self.last[-30:], line]
        return line

    def end(self):
        """Ends the process and those that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def reason(self):
        """Returns the line that says why it failed, and what stands around it."""
        lines = [line for line in self.last if line.strip()]
        errors = [line for line in lines if "Error" in line or "error" in line or "stopped" in line]
        return " | ".join([*errors[-3:], *lines[-1:]])[:600]


def run_group(module, names, table, given, log, limit):
    """Runs rows in a process. Returns those that are left to do. limit: seconds at which the whole
    program has to end."""
    _, for_row, to_load = PARTS[given.part]
    command = [sys.executable, "-m", module, *names]
    command += ["--rehearse"] * given.rehearse
    command += ["--eager"] * given.eager
    if given.part == "update":
        command += ["--best", table.best()]
    child = Child(command)
    name, where = names[0], {}
    left = list(names)
    deadline = log.passed() + SLOW.get(name, for_row) + to_load
    error = None
    try:
        while left:
            try:
                line = child.next(min(deadline, limit) - log.passed())
            except queue.Empty:
                at_end = log.passed() >= limit - 1
                error = "the program's time was over" if at_end else "its time was over"
                break
            if line is None:
                error = f"exit {child.process.wait()}: {child.reason()}"
                break
            kind, _, rest = line.partition(" ")
            if kind not in ("begin", "profile") and rest[:2] != '{"':
                kind = ""  # a line of some library
            if kind == "begin" and rest in names:
                if log.passed() > given.seconds:
                    return []
                name = rest
                deadline = log.passed() + SLOW.get(name, for_row) + (name == names[0]) * to_load
                log(f"--- {name}")
            elif kind == "where":
                where = json.loads(rest)
            elif kind == "profile":
                with open(rows.RESULTS / "gpu_profile.txt", "a") as file:
                    file.write(json.loads(rest))
                keep("gpu_profile.txt")
            elif kind == "row":
                log(line)
                table.put({"row": "", "error": ""} | json.loads(rest) | where)
                left.remove(name)
            elif line.strip() and "Attempted to load weight" not in line:  # vLLM, for each one
                log(line[:500])
    finally:
        child.end()
    if error is not None:
        log(f"FAILED {name}: {error}")
        table.put({"row": name, "error": error} | where)
        left.remove(name)
    return left


def main():
    parser = argparse.ArgumentParser(description="this project on one NVIDIA GPU")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--rows", nargs="*", help="some rows only")
    parser.add_argument("--seconds", type=float, default=480, help="after them no row starts")
    parser.add_argument("--grace", type=float, default=30, help="then the last row is ended")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--eager", action="store_true", help="vLLM without compiling")
    parser.add_argument("--results", type=Path, default=rows.RESULTS, help="folder of the files")
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    rows.RESULTS = given.results
    log = Log()
    for given.part in given.parts:
        module = PARTS[given.part][0]
        table = Table(given.part)
        for group in groups_of(given.part):
            left = [name for name in group if not table.has(name)
                    and (given.rows is None or name in given.rows)]
            other = VLLM.get(group[0], {}).get("instead_of")
            if other is not None and (table.has(other) or not table.failed(other)):
                continue
            while left and log.passed() < given.seconds:
                left = run_group(module, left, table, given, log, given.seconds + given.grace)
            if group == ["built-in"] and table.failed("built-in"):
                given.eager = True  # what does not compile once does not compile later
    log("end")


if __name__ == "__main__":
    main()
