"""Rows of lab/results/*.csv: how they are read and written, and where they come from."""

import csv
import platform
import re
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "lab" / "results"


def read_csv(name):
    """Returns the rows of lab/results/<name>.csv, oldest first; [] where there is no such file."""
    path = RESULTS / f"{name}.csv"
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_csv(name, rows):
    """Writes lab/results/<name>.csv, with every column that some row has."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with open(RESULTS / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def append_rows(name, rows):
    write_csv(name, [*read_csv(name), *rows])


def read_log(run_folder):
    """Returns what a run logged, {tag: [(step, value)]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(run_folder)).Reload()
    tags = log.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in log.Scalars(tag)] for tag in tags}


def commit():
    """Returns the commit of the working tree, with "-dirty" where code was changed since."""

    def git(*command):
        return subprocess.run(
            ["git", *command], cwd=REPOSITORY, capture_output=True, text=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def machine():
    """Returns the processor's name, as far as the system tells it, with the numbers that tell apart
    those of one name, and torch's threads."""
    import torch

    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.is_file() else ""
    found = re.search(r"model name\s*: (.*)", text)
    name = found[1].split(" @")[0] if found else platform.machine()
    numbers = re.search(r"cpu family\s*: (\d+)\nmodel\s*: (\d+)", text)
    if numbers:
        name += f" (family {numbers[1]}, model {numbers[2]})"
    return f"{name}, {torch.get_num_threads()} threads"


def where():
    """Returns the columns that say what a row was measured with."""
    import torch
    import transformers

    return {
        "commit": commit(),
        "machine": machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
