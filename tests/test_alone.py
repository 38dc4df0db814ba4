"""starter.py works alone: copied into an empty folder, without the rest of the repository."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from conftest import scalars
from lab import crash_test

import starter

ENVIRONMENT = os.environ | {"PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
ENVIRONMENT.pop("TOKENIZERS_PARALLELISM", None)  # which starter.py sets


@pytest.fixture
def alone(tmp_path):
    """A folder that holds starter.py and nothing else."""
    (tmp_path / "alone").mkdir()
    return Path(shutil.copy(starter.__file__, tmp_path / "alone")).parent


def run(folder, *arguments):
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=ENVIRONMENT, text=True,
                          capture_output=True)


@pytest.mark.slow
def test_file_alone_trains_and_a_killed_run_resumes_bit_for_bit(alone, checkpoint):
    given = crash_test.SETTINGS | {"model_id": str(checkpoint)}
    killed, whole = (given | {"out_dir": str(alone / name / "runs")} for name in "ab")
    _, status, _ = crash_test.run(killed, alone, 1, kill=("rollout", 4, 0.0))
    assert status == -signal.SIGKILL
    for settings in (killed | {"resume": True}, whole):
        _, status, printed = crash_test.run(settings, alone, 1)
        assert status == 0, printed
        assert (" after step 2\n" in printed) == ("resume" in settings)
        assert "support/ is not here: slower, more memory, no LoRA" in printed
        assert printed.count(" | beta: ") == (4 if "resume" in settings else 6)
    assert crash_test.outcome(alone / "a") == crash_test.outcome(alone / "b")
    for folder in alone.glob("?/runs/*"):
        names = {re.split(r"[._]", path.name)[0] for path in folder.iterdir()}
        assert names == {"events", "settings", "model", "checkpoint"}
        logged = scalars(folder)
        assert list(logged["eval/solved"]) == [0, 3, 6]
        assert len(set(logged["adaptive_kl/current_beta"].values())) == 6


def test_file_alone_refuses_in_one_sentence_what_needs_support(alone):
    """Here the task of the preset; and what would fail late."""
    done = run(alone, "starter.py")
    assert done.returncode == 1
    assert done.stderr.startswith("starter.py stopped: task = 'addition' is no file; give one, an")
    assert "=== Running Quick Tests ===" in done.stdout and "no longer holds" not in done.stdout
    assert {path.name for path in alone.iterdir()} <= {"starter.py", "__pycache__"}
    for changes, message in (
            (dict(lora_rank=8), "lora_rank, frozen_in_bf16 and the built-in model need support/"),
            (dict(loss_average="drgrpo"), "loss_average = 'drgrpo' is not known; did you mean"),
            (dict(rollout_batch_size=4), "group_size = 8 must be 2 or more, and divide .* = 4;")):
        with mock.patch.object(starter, "find_support", lambda: None):
            with pytest.raises(starter.InputError, match=message):
                starter.cfg_with(**changes)


# Prints what changed while starter was imported.
LOOK = """
import json, logging, os, random, signal, sys, threading, warnings, numpy, torch

def state():
    return dict(
        path=list(sys.path), warnings=list(warnings.filters), threads=threading.active_count(),
        signals=[signal.getsignal(number) for number in signal.valid_signals()],
        logging=(logging.root.level, list(logging.root.handlers), sys.excepthook),
        generators=(random.getstate(), str(numpy.random.get_state()), str(torch.get_rng_state())),
        torch=(torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
               torch.are_deterministic_algorithms_enabled(), torch.cuda.is_initialized(),
               torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark))

before, environment = state(), dict(os.environ)
import starter
after = state()
print(json.dumps([[name for name in before if before[name] != after[name]],
                  sorted(os.environ.keys() - environment.keys()),
                  [name for name in environment if environment[name] != os.environ.get(name)],
                  [name for name in sys.modules if name.startswith(("transformers", "support"))]]))
"""


def test_import_changes_nothing_but_variables_that_are_not_set(alone):
    done = run(alone, "-c", LOOK)
    assert (done.stderr, done.returncode) == ("", 0)
    changed, variables, overwritten, imported = json.loads(done.stdout)
    assert changed == overwritten == imported == [] != variables
    assert {path.name for path in alone.iterdir()} <= {"starter.py", "__pycache__"}
