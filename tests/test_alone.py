"""starter.py works alone: copied into an empty folder, without the rest of the repository."""
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import starter

import torch
from conftest import scalars, settings
from safetensors.torch import load_file

ENVIRONMENT = {name: value for name, value in os.environ.items()
               if name not in ("PYTHONPATH", "STARTER_TRACEBACK")} | {"CUDA_VISIBLE_DEVICES": "",
                                                                 "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def alone(tmp_path):
    """A folder that holds starter.py and nothing else."""
    folder = tmp_path / "alone"
    folder.mkdir()
    shutil.copy(starter.__file__, folder / "starter.py")
    return folder


def run(folder, *arguments):
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=ENVIRONMENT,
                          capture_output=True, text=True)


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
    result = starter.main(reward=variety, **settings)
    print("run folder:", result["run_folder"])
"""


def train_alone(folder, *runs, n_calls=-1):
    """Returns the finished process and the run folders that it names."""
    done = run(folder, "-c", PROGRAM, json.dumps([n_calls, runs]))
    folders = [Path(line.removeprefix("run folder: ")) for line in done.stdout.splitlines()
               if line.startswith("run folder: ") and "alone" in line]
    return done, folders


def train_kill_resume(alone, checkpoint, n_steps, save_every, kill_in_step, **changes):
    """Trains once undisturbed, and once killed and resumed. Returns both run folders."""
    common = settings(checkpoint, alone / "a", n_train_steps=n_steps, save_every=save_every,
                      use_kl_penalty=True, kl_coef=0.1,
                      kl_adaptation_method="target_sound", **changes)
    del common["reward"]
    n_calls = common["n_eval_problems"] + common["rollout_batch_size"] * kill_in_step
    killed, _ = train_alone(alone, common, n_calls=n_calls)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert f"Step {kill_in_step - 1} " in killed.stdout
    assert f"Step {kill_in_step} " not in killed.stdout
    done, folders = train_alone(alone, common | {"resume": True},
                                common | {"out_dir": str(alone / "b")})
    assert done.returncode == 0, done.stderr
    saved = (kill_in_step - 1) // save_every * save_every
    assert f"after step {saved}" in done.stdout
    resumed, undisturbed = dict.fromkeys(folders)
    return resumed, undisturbed


def assert_same_run(resumed, undisturbed, n_steps):
    weights = [load_file(folder / "model" / "model.safetensors")
               for folder in (resumed, undisturbed)]
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        assert torch.equal(weights[0][name], weights[1][name]), name
    numbers = [{tag: values for tag, values in scalars(folder).items()
                if not tag.startswith(("time/", "mem/")) and tag != "train/tokens_per_s"}
               for folder in (resumed, undisturbed)]
    assert numbers[0] == numbers[1]
    assert list(numbers[0]["train/kl_penalty"]) == list(range(1, n_steps + 1))
    betas = list(numbers[0]["adaptive_kl/current_beta"].values())
    assert len(set(betas)) == n_steps  # the rule moves it in every step


def test_file_alone_trains_and_a_killed_run_resumes_bit_for_bit(alone, checkpoint):
    resumed, undisturbed = train_kill_resume(alone, checkpoint, 6, 2, 4)
    assert_same_run(resumed, undisturbed, 6)
    for folder in (resumed, undisturbed):
        names = {path.name.split(".")[0] if path.name.startswith("events") else path.name
                 for path in folder.iterdir()}
        assert {"events", "config.json", "starter.py", "report.txt", "model",
                "checkpoints"} <= names
        assert "=== Report ===" in (folder / "report.txt").read_text()
        starter.init_policy(folder / "model", "cpu")
    assert {path.name for path in alone.iterdir()} <= {"starter.py", "a", "b", "__pycache__"}


@pytest.mark.slow
def test_file_alone_resumes_thirty_steps_bit_for_bit(alone, checkpoint):
    resumed, undisturbed = train_kill_resume(alone, checkpoint, 30, 7, 24)
    assert_same_run(resumed, undisturbed, 30)


@pytest.mark.slow
def test_file_alone_trains_with_vllm(alone, checkpoint):
    pytest.importorskip("vllm")
    resumed, undisturbed = train_kill_resume(alone, checkpoint, 6, 2, 4, engine="vllm")
    assert_same_run(resumed, undisturbed, 6)
    log = scalars(undisturbed)
    assert max(log["train/sampler_logprob_diff_max"].values()) < 1e-3
    assert len(log["time/sync"]) == 6


@pytest.mark.slow
def test_file_alone_trains_the_small_pretrained_model(alone):
    done = run(alone, "starter.py")  # ENVIRONMENT allows no network: it cannot be fetched here
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "SMALL, above main(), overrides main() with" in done.stdout
    assert "model_id = 'HuggingFaceTB/SmolLM2-135M-Instruct' cannot be loaded" in done.stderr


def test_file_alone_has_no_built_in_model(alone):
    done = run(alone, "starter.py", "--model_id", "tiny")
    assert done.returncode == 1
    assert done.stderr == ("starter.py stopped: model_id = 'tiny' needs the folder support/ beside "
                           "starter.py; give model_id = a checkpoint folder or a Hugging Face "
                           "name\n")
    assert "=== All Tests Passed! ===" in done.stdout
    assert {path.name for path in alone.iterdir()} <= {"starter.py", "__pycache__"}


# Prints what changed in the process while starter was imported.
LOOK = """
import logging, random, signal, sys, threading, warnings
import numpy, torch, transformers

def state():
    return dict(
        excepthook=(sys.excepthook, threading.excepthook, sys.unraisablehook),
        signals=[signal.getsignal(number) for number in signal.valid_signals()],
        path=list(sys.path), modules=sys.modules["__main__"], argv=list(sys.argv),
        warnings=list(warnings.filters), logging=logging.root.level,
        handlers=list(logging.root.handlers), threads=threading.active_count(),
        streams=(sys.stdout, sys.stderr), recursion=sys.getrecursionlimit(),
        generators=(random.getstate(), str(numpy.random.get_state()),
                    torch.get_rng_state().tolist()),
        torch=(torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype(),
               torch.is_grad_enabled(), torch.get_float32_matmul_precision(),
               torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"),
               torch.get_default_device(), torch.set_num_threads, torch.cuda.is_initialized(),
               torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32),
        attention=sorted(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys()),
    )

import json, os
import transformers.modeling_utils
environment = dict(os.environ)
before = state()
import starter
after = state()
changed = [name for name in before if before[name] != after[name]]
variables = [name for name in os.environ if os.environ[name] != environment.get(name)]
print(json.dumps([changed, variables]))
"""


def test_import_changes_nothing_but_the_environment(alone):
    done = run(alone, "-c", LOOK)
    assert (done.stderr, done.returncode) == ("", 0)
    changed, variables = json.loads(done.stdout)
    assert changed == []
    assert set(variables) <= set(starter.ENVIRONMENT)
