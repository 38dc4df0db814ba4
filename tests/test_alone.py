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
from conftest import scalars, settings
from lab.crash_test import outcome

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


# Runs main() with each dict of settings in turn. Kills itself, as kill -9 does, when the reward
# has been called n_calls times.
PROGRAM = """
import json, os, signal, sys
import starter
n_calls, runs = json.loads(sys.argv[1])

def variety(text, problem):
    global n_calls
    n_calls -= 1
    if n_calls == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return len(set(text)) / 10

for settings in runs:
    starter.main(reward=variety, **settings)
"""


@pytest.mark.slow
def test_file_alone_trains_and_a_killed_run_resumes_bit_for_bit(alone, checkpoint, tmp_path):
    task = tmp_path / "sums.jsonl"
    sums = [{"prompt": f"add {a} {b}", "answer": a + b} for a in range(5, 15) for b in range(6, 12)]
    task.write_text("\n".join(map(json.dumps, sums)))
    given = settings(checkpoint, alone / "a" / "runs", task=str(task), n_train_steps=6,
                     save_every=2, eval_every=3, use_kl_penalty=True,
                     kl_adaptation_method="target_sound")
    del given["reward"]
    n_calls = 2 * given["n_eval_problems"] + 3 * given["rollout_batch_size"] + 5  # in step 4
    killed = run(alone, "-c", PROGRAM, json.dumps([n_calls, [given]]))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = [given | {"resume": True}, given | {"out_dir": str(alone / "b" / "runs")}]
    done = run(alone, "-c", PROGRAM, json.dumps([-1, again]))
    assert done.returncode == 0, done.stderr
    assert " after step 2\n" in done.stdout
    assert done.stdout.count("support/ is not here: slower, more memory, no LoRA") == 2
    assert outcome(alone / "a") == outcome(alone / "b")
    for folder in alone.glob("?/runs/*"):
        names = {re.split(r"[._]", path.name)[0] for path in folder.iterdir()}
        assert names == {"events", "settings", "starter", "model", "checkpoint"}
        logged = scalars(folder)
        assert list(logged["eval/solved"]) == [0, 3, 6]
        assert len(set(logged["adaptive_kl/current_beta"].values())) == 6


def test_file_alone_refuses_in_one_sentence_what_needs_support(alone):
    """Here the task of the preset; and what would fail late."""
    done = run(alone, "starter.py")
    assert done.returncode == 1
    assert done.stderr == ("starter.py stopped: task = 'addition' is no JSONL file; give one, or "
                           "add support/\n")
    assert "=== Running Quick Tests ===" in done.stdout and "no longer holds" not in done.stdout
    assert {path.name for path in alone.iterdir()} <= {"starter.py", "__pycache__"}
    for changes, message in (
            (dict(lora_rank=8), "lora_rank, frozen_in_bf16 and the built-in model need support/"),
            (dict(loss_average="drgrpo"), "loss_average = 'drgrpo' is not known; did you mean"),
            (dict(rollout_batch_size=4), "rollout_batch_size = 4 is not a multiple of .* = 8")):
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
