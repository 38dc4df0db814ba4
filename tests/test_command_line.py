"""Tests of `python starter.py --name value`."""
import inspect
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import settings

import starter
from starter import InputError


@pytest.mark.parametrize("arguments, expected", [
    ("", {}),
    ("--n_train_steps 50", {"n_train_steps": 50}),
    ("--n_train_steps=50 --use_kl_penalty True", {"n_train_steps": 50, "use_kl_penalty": True}),
    ("--use_kl_penalty --kl_coef 0.1", {"use_kl_penalty": True, "kl_coef": 0.1}),
    ("--clip_range (0.2,0.28)", {"clip_range": (0.2, 0.28)}),
    ("--importance_cap None --resume", {"importance_cap": None, "resume": True}),
    ("--resume runs/a=b --seed -1", {"resume": "runs/a=b", "seed": -1}),
    ("--resume=runs/a=b", {"resume": "runs/a=b"}),
    ("--use_kl_penalty no --bf16 on", {"use_kl_penalty": False, "bf16": True}),
    ("--normalize_by_std false", {"normalize_by_std": False}),
    # A text that is no literal stays a text. It is never executed.
    ("--seed __import__('os').abort()", {"seed": "__import__('os').abort()"}),
])
def test_arguments_become_parameters_of_main(arguments, expected):
    given = starter.settings_from(arguments.split())
    assert given == expected
    assert list(map(type, given.values())) == list(map(type, expected.values()))


@pytest.mark.parametrize("arguments, sentence", [
    ("--lerning_rate 1e-4", "--lerning_rate is not --name value; did you mean 'learning_rate'?"),
    ("--seed 1 50", "50 is not --name value; use one of those that --help lists"),
    ("-seed 1", "-seed is not --name value; "),
    ("--lr 1e-4", "--lr is not --name value; did you mean 'lora_rank' or 'learning_rate'?"),
    ("--batch_size 8", "--batch_size is not --name value; did you mean 'rollout_batch_size'?"),
    ("--steps=9", "--steps is not --name value; did you mean 'n_train_steps' or 'beta_"),
])
def test_wrong_argument_is_refused_with_the_nearest_name(arguments, sentence):
    with pytest.raises(InputError) as refusal:
        starter.settings_from(arguments.split())
    assert str(refusal.value).startswith(sentence)


def test_help_lists_every_parameter_with_its_comment(capsys):
    with pytest.raises(SystemExit) as end:
        starter.settings_from(["--n_train_steps", "5", "--help"])
    assert not end.value.code
    printed = capsys.readouterr().out
    for name in inspect.signature(starter.main).parameters:
        assert re.search(rf"[ ]{name}=", printed)
    assert "# responses to one prompt" in printed and "cfg = " not in printed


def start(*arguments):
    return subprocess.Popen([sys.executable, "-u", starter.__file__, *map(str, arguments)],
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_error_is_one_sentence_with_code_1():
    """Here one that support/ raises."""
    process = start("--seed", "-1")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1 and errors.count("\n") == 1
    assert errors.startswith("starter.py stopped: seed = -1 must be a whole number from 0 to ")


@pytest.mark.parametrize("moment, errors", [
    ("=== Running Quick Tests", "starter.py stopped: interrupted\n"),
    pytest.param("Step 1 |", "", marks=pytest.mark.slow)])
def test_ctrl_c_ends_with_code_130(checkpoint, tmp_path, moment, errors):
    """While it trains, it ends after its step with a checkpoint and the model."""
    task = tmp_path / "sums.jsonl"
    task.write_text("\n".join(json.dumps({"prompt": f"add {a} 1", "answer": a + 1})
                              for a in range(50)))
    given = settings(checkpoint, tmp_path / "runs", task=task, n_train_steps=10_000)
    del given["reward"]
    process = start(*(f"--{name}={value}" for name, value in given.items()))
    for line in process.stdout:
        if line.startswith(moment):
            break
    process.send_signal(signal.SIGINT)
    printed, found = process.communicate(timeout=300)
    assert (process.returncode, found) == (130, errors)
    if moment == "Step 1 |":
        assert "of 10000; to go on, add --resume " in printed
        [folder] = (tmp_path / "runs").iterdir()
        assert list(folder.glob("checkpoint_*.pt")) and (folder / "model" / "config.json").is_file()
