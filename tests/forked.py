"""Runs many short programs in little time: one process imports torch and transformers, and each
program runs in a fork of it."""

import gc
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parent


def run_python(*arguments, folder, paths=(REPOSITORY, TESTS), **environment):
    """Runs Python in this folder, where it can import from these paths. Returns the ended process,
    with its output."""
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=os.environ | fixed | environment,
        capture_output=True,
        encoding="utf-8",
    )


def in_forks(module, function, calls, folder):
    """Runs function(*call) of a test module for each call, in forks of one new process in this
    folder, as many at once as there are cores. A call is of texts. Returns {"status", "stdout",
    "stderr"} of each; a status of 0: it ended well."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    program = f"import forked; forked.run_all({module!r}, {function!r}, {[*calls]!r})"
    done = run_python("-c", program, folder=folder, HF_HUB_OFFLINE="1", PYTHONSAFEPATH="1")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def edited_text(replaced):
    """{text that occurs once in starter.py: text in its place} -> the text of the edited file."""
    text = (REPOSITORY / "starter.py").read_text("utf-8")
    for old, new in replaced.items():
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in starter.py"
        text = text.replace(old, new)
    return text


def write_copy(folder, text, with_support):
    """Writes a folder with this text as starter.py, and a copy of support/. Returns its path."""
    folder.mkdir()
    (folder / "starter.py").write_text(text, "utf-8")
    if with_support:
        without_model = shutil.ignore_patterns("tiny")
        shutil.copytree(REPOSITORY / "support", folder / "support", ignore=without_model)
    return str(folder)


def import_copy(folder):
    """Returns the module starter of this folder, in a process that may know another one."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("starter", "support"):
            del sys.modules[name]
    sys.path.insert(0, folder)
    import starter

    assert starter.__file__ == os.path.join(folder, "starter.py")
    return starter


def import_once():
    """Imports what every fork would import, before anything was computed."""
    for name in (
        "transformers.models.auto.modeling_auto",
        "transformers.generation.utils",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.qwen3.modeling_qwen3",
        "torch.utils.tensorboard",
        "transformers.modeling_utils",
        "safetensors.torch",
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the end of each fork copies what it shares with this process


def start(program, call):
    """Starts program(*call) in a fork. Returns its process id and the files with its output."""
    files = {"stdout": tempfile.TemporaryFile("w+"), "stderr": tempfile.TemporaryFile("w+")}
    child = os.fork()
    if child:
        return child, files
    status = 1
    try:
        for number, file in enumerate(files.values(), 1):
            os.dup2(file.fileno(), number)
        program(*call)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)  # the interpreter's own end would take a third of a second


def run_all(module, function, calls):
    """Prints the outcomes that in_forks() returns."""
    program = getattr(importlib.import_module(module), function)
    import_once()
    outcomes = []
    n = os.cpu_count()
    for i in range(0, len(calls), n):
        for child, files in [start(program, call) for call in calls[i : i + n]]:
            outcome = {"status": os.waitpid(child, 0)[1]}
            for name, file in files.items():
                file.seek(0)
                outcome[name] = file.read()
            outcomes.append(outcome)
    print(json.dumps(outcomes))
