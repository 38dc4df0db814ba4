"""Tests of `python starter.py --name value`."""
import inspect
import json
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
    (["--learning", "1e-4"], "--learning is not an argument; did you mean 'learning_rate'?"),
    (["--n_eval", "16"], "--n_eval is not an argument; did you mean 'n_eval_problems'?"),
    (["50"], "50 is not an argument"),
    (["--reward", "print"], "--reward is not an argument; a function is given to main()"),
    (["--rewards", "print"], "--rewards is not an argument; did you mean 'reward_threshold'?"),
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


def test_functions_as_defaults_are_no_arguments_and_other_texts_replace_them(monkeypatch):
    """Somebody has edited main(): two rewards, and a task of their own."""
    def main(reward=[(starter.reward_fn, 1.0)], task=starter.countdown_problems):  # comment
        pass

    monkeypatch.setattr(starter, "main", main)
    assert starter.settings_from(["--task", "countdown"]) == {"task": "countdown"}
    with pytest.raises(InputError, match="--reward is not an argument"):
        starter.settings_from(["--reward", "print"])


def test_program_with_a_wrong_argument_ends_in_one_line():
    done = subprocess.run([sys.executable, starter.__file__, "--n_train_step", "5"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("starter.py stopped: --n_train_step is not an argument; did you "
                                  "mean 'n_train_steps'?")
    assert len(done.stderr.splitlines()) == 1


# --------------------------------------------------------------------------------------------------
# Presets

@pytest.fixture
def called(monkeypatch):
    """Calls main() with its preset around it. Returns the settings that reach it."""
    def main(model_id="tiny", task="countdown", dataset=None, max_new_tokens=256, **others):
        return dict(model_id=model_id, task=task, max_new_tokens=max_new_tokens, **others)

    parameters = inspect.signature(starter.main).parameters
    monkeypatch.setattr(starter, "check_given", lambda given, _: None)
    monkeypatch.setattr(main, "__signature__", inspect.Signature(parameters.values()),
                        raising=False)
    return starter.with_preset(main)


def test_preset_of_the_built_in_model_gives_way_to_what_the_caller_says(called):
    assert called(model_id="tiny") == starter.TINY
    assert called(model_id="tiny", task="my.jsonl", max_new_tokens=7) == starter.TINY | {
        "task": "my.jsonl", "max_new_tokens": 7}


@pytest.mark.parametrize("model_id", [starter.SMALL["model_id"],
                                      "models/SmolLM2-135M-Instruct"])
def test_preset_of_the_small_model_holds_for_its_own_task_only(called, model_id, capsys):
    assert called(model_id=model_id) == starter.SMALL | {"model_id": model_id}
    assert "SMALL, above main(), overrides main() with" in capsys.readouterr().out
    for others in ({"task": "my.jsonl"}, {"dataset": "openai/gsm8k:main"}):
        assert called(model_id=model_id, **others)["max_new_tokens"] == 256
        assert capsys.readouterr().out == ""


def test_model_that_a_run_has_saved_keeps_the_preset_of_its_origin(called, tmp_path):
    """Also over two runs; a folder beside a config.json of another kind has none."""
    origin = starter.TINY["model_id"]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(
            {"settings": {"model_id": str(origin)}}))
        origin = tmp_path / name / "model"
    assert called(model_id=str(origin)) == starter.TINY | {"model_id": str(origin)}
    (tmp_path / "first" / "config.json").write_text('{"model_type": "llama"}')
    assert called(model_id=str(origin))["max_new_tokens"] == 256


def test_preset_lists_its_coefficient_where_the_penalty_is_on(called, capsys):
    called(model_id="tiny")
    assert "kl_coef" not in capsys.readouterr().out
    called(model_id="tiny", use_kl_penalty=True)
    assert "kl_coef=0.3" in capsys.readouterr().out


def test_other_models_have_no_preset(called):
    assert called(model_id="Qwen/Qwen3-1.7B")["max_new_tokens"] == 256


def test_default_model_is_one_that_the_machine_can_train(monkeypatch, tmp_path):
    monkeypatch.setattr(starter.torch.cuda, "is_available", lambda: False)
    assert starter.default_model() == ("tiny" if (starter.Path(starter.__file__).parent / "support"
                                                  ).is_dir() else starter.SMALL["model_id"])
    monkeypatch.setattr(starter, "__file__", str(tmp_path / "starter.py"))
    assert starter.default_model() == starter.SMALL["model_id"]
    monkeypatch.setattr(starter.torch.cuda, "is_available", lambda: True)
    assert starter.default_model() == "Qwen/Qwen3-1.7B"
