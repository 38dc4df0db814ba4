"""Tests of `python starter.py --name value`."""

import inspect
import math
import re
import signal
import subprocess
import sys

import pytest
from conftest import settings

import starter

GIVEN = {
    "--n_train_steps=50 --use_kl_penalty True": {"n_train_steps": 50, "use_kl_penalty": True},
    "--use_kl_penalty no --mask_truncated on": {"use_kl_penalty": False, "mask_truncated": True},
    "--kl_ratio_cap inf": {"kl_ratio_cap": math.inf},
    "--clip_range (0.2,0.28)": {"clip_range": (0.2, 0.28)},
    "--rollout 8 --use_kl": {"rollout_batch_size": 8, "use_kl_penalty": True},
    "--eval_file None --resume": {"eval_file": None, "resume": True},
    "--resume=runs/a=b --seed -1": {"resume": "runs/a=b", "seed": -1},
    # A text that is no literal stays a text. It is never executed.
    "--n-train-steps 5 --run_name 5 --out-dir=2024-a": {
        "n_train_steps": 5,
        "run_name": "5",
        "out_dir": "2024-a",
    },
    "--normalize_by_std False": {"normalize_by_std": False},
    "--normalize_by_std step": {"normalize_by_std": "step"},
    "--model_id 123 --task 5 --seed 5": {"model_id": "123", "task": "5", "seed": 5},
    "--seed __import__('os').abort()": {"seed": "__import__('os').abort()"},
}


@pytest.mark.parametrize("arguments", GIVEN)
def test_arguments_become_parameters_of_main(arguments):
    assert repr(starter.settings_from(arguments.split())) == repr(GIVEN[arguments])


@pytest.mark.parametrize(
    "arguments",
    ["--lerning_rate 1e-4", "50 --seed 1", "seed=1", "--beta 3", "--learning_rate --seed 1"],
)
def test_wrong_argument_is_refused_with_where_to_find_the_right_one(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        starter.settings_from(arguments.split())
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert arguments.split()[0] in printed and "--name value" in printed and "--help" in printed


def test_help_lists_every_parameter_with_its_comment(capsys):
    with pytest.raises(SystemExit) as end:
        starter.settings_from(["--help"])
    assert not end.value.code
    printed = capsys.readouterr().out
    assert {*inspect.signature(starter.main).parameters} <= {*re.findall(r" (\w+)=", printed)}
    assert "# responses to one prompt" in printed and "cfg = " not in printed


def test_misspelt_name_gets_the_nearest(capsys):
    with pytest.raises(SystemExit):
        starter.settings_from(["--n-trainsteps=5"])
    assert "--n_trainsteps=5 is no --name of a parameter" in (printed := capsys.readouterr().err)
    assert "near: ['n_train_steps'" in printed


def command(checkpoint, folder, **changes):
    """The command line of a short run of the shipped reward."""
    given = settings(checkpoint, folder, task="countdown_small", **changes)
    del given["reward"]
    return [sys.executable, "-u", starter.__file__, *(f"--{name}={x}" for name, x in given.items())]


@pytest.mark.slow
def test_log_that_nobody_reads_any_more_ends_the_run_in_a_sentence(checkpoint, tmp_path):
    """As after `| head -1`. The run saves the step before."""
    process = subprocess.Popen(
        command(checkpoint, tmp_path, n_train_steps=50),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not process.stdout.readline().startswith("Step 2/"):
        assert process.poll() is None
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=300) == 1
    assert errors.endswith("starter.py stopped: nobody reads its log any more\n")
    assert "Traceback" not in errors and list(tmp_path.glob("*/checkpoint_*.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["=== Running Quick Tests", "Step 1/"])
def test_ctrl_c_ends_with_code_130(checkpoint, tmp_path, moment):
    """While it trains, it ends after its step with a checkpoint and the model."""
    process = subprocess.Popen(
        command(checkpoint, tmp_path, n_train_steps=300),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not process.stdout.readline().startswith(moment):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in errors
    if moment == "Step 1/":
        assert "--resume " in printed
        assert list(tmp_path.glob("*/checkpoint_*.pt")) and list(tmp_path.glob("*/model/*.json"))
