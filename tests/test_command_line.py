"""Tests of `python starter.py --name value`."""
import inspect
import subprocess
import sys

import pytest

import starter
from starter import InputError


@pytest.mark.parametrize("arguments, expected", [
    ([], {}),
    (["--n_train_steps", "50"], {"n_train_steps": 50}),
    (["--n_train_steps=50", "--use_kl_penalty", "True"],
     {"n_train_steps": 50, "use_kl_penalty": True}),
    (["--learning_rate", "1e-4", "--kl_coef", "0.1"], {"learning_rate": 1e-4, "kl_coef": 0.1}),
    (["--clip_range", "(0.2, 0.28)"], {"clip_range": (0.2, 0.28)}),
    (["--importance_cap", "None"], {"importance_cap": None}),
    (["--kl_clip_threshold", "5"], {"kl_clip_threshold": 5}),
    (["--bf16", "True"], {"bf16": True}),
    (["--bf16", "auto", "--device", "cuda:1"], {"bf16": "auto", "device": "cuda:1"}),
    (["--resume", "runs/a"], {"resume": "runs/a"}),
    (["--resume", "True"], {"resume": True}),
    (["--model_id", "7"], {"model_id": "7"}),  # a text in main() stays a text
    (["--seed", "-1"], {"seed": -1}),
])
def test_arguments_become_parameters_of_main(arguments, expected):
    given = starter.settings_from(arguments)
    assert given == expected
    assert [type(value) for value in given.values()] == [type(v) for v in expected.values()]


def test_argument_is_not_executed():
    """A text that is no literal stays a text, which the checks of main() then refuse."""
    text = "__import__('os').abort()"
    assert starter.settings_from(["--seed", text]) == {"seed": text}


@pytest.mark.parametrize("arguments, sentence", [
    (["--lerning_rate", "1e-4"], "--lerning_rate is not an argument; did you mean "
                                 "'learning_rate'?"),
    (["--learning", "1e-4"], "--learning is not an argument"),
    (["50"], "50 is not an argument"),
    (["--reward", "print"], "--reward is not an argument"),
    (["--seed"], "argument --seed: expected one argument; --help lists the parameters"),
])
def test_wrong_argument_is_refused_with_the_nearest_name(arguments, sentence):
    with pytest.raises(InputError) as refusal:
        starter.settings_from(arguments)
    assert str(refusal.value).startswith(sentence)


def test_help_lists_every_parameter_with_its_comment(capsys):
    with pytest.raises(SystemExit) as end:
        starter.settings_from(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    for name, parameter in inspect.signature(starter.main).parameters.items():
        if not callable(parameter.default):
            assert f"--{name} " in printed
    assert "responses to one prompt" in " ".join(printed.split())


def test_program_with_a_wrong_argument_ends_in_one_line():
    done = subprocess.run([sys.executable, starter.__file__, "--n_train_step", "5"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("starter.py stopped: --n_train_step is not an argument; did you "
                                  "mean 'n_train_steps'?")
    assert len(done.stderr.splitlines()) == 1
