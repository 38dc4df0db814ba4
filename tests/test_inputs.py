"""What callers get wrong: each mistake costs one sentence with the value and a remedy, before
anything is written; what changes nothing, or is often a mistake, is said."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
from conftest import make_tokenizer, settings

import starter
from starter import InputError
from support import kl_checks, presets, rules


def typed(text, **changes):
    """Settings that were typed like this, as main() has them at first."""
    return starter.cfg_with(**starter.settings_from(text.split()), **changes)


def chosen(text, **changes):
    """The same after presets are applied."""
    cfg = typed(text, **changes)
    presets.choose(cfg)
    starter.apply_preset(cfg)
    return cfg


def refusal(check, *arguments):
    """Returns the sentence, which must be short."""
    with pytest.raises(InputError) as refused:
        check(*arguments)
    text = str(refused.value)
    assert len(text) < 500 and "\n" not in text
    return text


# 1. Parameters of main()

WRONG = {
    "--seed 0.5": "seed = 0.5 must be a whole number, such as 0",
    "--n_train_steps 1,0": "n_train_steps = (1, 0) must be a whole number, such as 80",
    "--group_size None": "group_size = None must be",
    "--learning_rate": "learning_rate = True must be a number",
    "--use_kl_penalty 1.0": "use_kl_penalty = 1.0 must be True or False",
    "--max_sampler_diff none": "max_sampler_diff = 'none' must be a number",
    "--importance_cap 0.5": "importance_cap = 0.5 must be 1 or more",
    "--kl_coef 0.1": "kl_coef = 0.1 changes nothing; leave it out, or set use_kl_penalty",
    "--beta_min 0.1": "beta_min = 0.1 changes nothing",
    "--use_kl_penalty --kl_target 0.2": "or set a kl_adaptation_method",
}


@pytest.mark.parametrize("text", WRONG)
def test_setting_of_another_kind_or_without_effect_is_refused(text):
    assert WRONG[text] in refusal(rules.check_kinds, typed(text))


@pytest.mark.parametrize(
    "name, given, kept",
    [
        ("n_train_steps", 1e3, 1000),
        ("normalize_by_std", numpy.bool_(False), False),
        ("clip_range", torch.tensor([0.25, 0.5]), [0.25, 0.5]),
        ("temperature", 2, 2),
        ("max_sampler_diff", math.inf, math.inf),
    ],
)
def test_unusual_and_right_setting_is_taken(name, given, kept):
    cfg = starter.cfg_with(**{name: given})
    rules.check_kinds(cfg)
    value = getattr(cfg, name)
    assert (value, type(value)) == (kept, type(kept))


def test_new_parameter_of_main_needs_no_rule(monkeypatch):
    new = dict(entropy_coef=0.0, shuffle=False, kl_window=10, schedule=(1, 2))
    known = starter.cfg_with
    monkeypatch.setattr(starter, "cfg_with", lambda **changes: known(**{**new, **changes}))
    for changes in (dict(entropy_coef="high"), dict(shuffle=3), dict(kl_window=5)):
        refusal(rules.check_kinds, starter.cfg_with(**changes))
    rules.check_kinds(starter.cfg_with(entropy_coef=-0.01, shuffle=True, schedule=[3]))


@pytest.mark.parametrize(
    "name, value, hint",
    [
        ("kl_estimator", "exat", "did you mean 'exact'?"),
        ("kl_adaptation_method", "clip+targt", "'targt' is not known; did you mean 'target"),
        ("preset", "large", "use one of ['qwen3-1.7b', 'smollm2', 'tiny']"),
    ],
)
def test_unknown_name_gets_a_hint_at_its_spelling(checkpoint, tmp_path, name, value, hint):
    given = settings(checkpoint, tmp_path, **{"use_kl_penalty": True, name: value})
    assert hint in refusal(lambda: starter.main(**given))


@pytest.mark.parametrize(
    "text, has_gpu, expected",
    [
        ("", False, "tiny"),
        ("", True, "qwen3-1.7b"),
        ("--device cpu", True, "tiny"),
        ("--device cuda:1", False, "qwen3-1.7b"),
        ("--model_id tiny", True, "tiny"),
        ("--model_id user/model", False, "qwen3-1.7b"),
        ("--preset smollm2", True, "smollm2"),
    ],
)
def test_preset_follows_model_and_device(monkeypatch, text, has_gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    cfg = typed(text)
    presets.choose(cfg)
    assert cfg.preset == expected


MISFITS = {
    "--reward exact": "reward = 'exact' must be a function (response_text, problem)",
    "--eval_file x.jsonl --task addition": "is not read by task = 'addition'",
    "--frozen_in_bf16 --precision bf16": "use_kl_penalty or lora_rank",
    "--frozen_in_bf16 --lora_rank 8 --precision float32": "needs precision bf16",
    "--out_dir /dev/null/a": "cannot be written",
}


@pytest.mark.parametrize("text", MISFITS)
def test_settings_that_do_not_fit_together_are_refused(text):
    assert MISFITS[text] in refusal(rules.check_settings, chosen(text))


def test_adapters_of_lora_are_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge_and_unload" in refusal(rules.check_settings, chosen("", model_id=tmp_path))


@pytest.mark.parametrize(
    "text, is_said",
    [
        ("--model_id user/other", True),
        ("--model_id user/other --learning_rate 2e-5", False),
        ("--preset smollm2", False),
        ("--preset tiny --lora_rank 8", False),
        ("--preset smollm2 --lora_rank 8", True),
    ],
)
def test_rate_that_was_found_for_other_weights_is_said(text, is_said, capsys):
    cfg = chosen(text)
    capsys.readouterr()
    rules.note_on_rate(cfg)
    assert ("learning_rate = " in capsys.readouterr().out) == is_said


def test_refused_run_loads_no_model_and_writes_nothing(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(starter, "init_policy", lambda *_: pytest.fail("the model was loaded"))
    for changes in (dict(seed=0.5), dict(reward="exact"), dict(engine="vlm")):
        refusal(lambda: starter.main(**settings(checkpoint, tmp_path, **changes)))
    assert not list(tmp_path.iterdir())


# 2. KL terms

REMEDIES = {
    "--kl_estimator k2 --kl_in reward": "kl_estimator = 'k1'",
    "--kl_estimator k3 --kl_in reward": "kl_estimator = 'k1'",
    "--kl_estimator k1 --kl_gradient as_written": "kl_gradient = 'reverse'",
    "--kl_gradient as_written --kl_in loss_to_go": "kl_gradient = 'reverse'",
    "--kl_estimator k2 --kl_in loss_to_go": "kl_estimator = 'exact'",
    "--kl_estimator k1 --kl_adaptation_method target+sigmoid": "'exact'",
    "--kl_estimator exact --kl_adaptation_method clip_sound": "'k3'",
    "--kl_gradient as_written --kl_adaptation_method clip_sound": "'reverse'",
}


@pytest.mark.parametrize("text", REMEDIES)
def test_kl_term_that_is_known_not_to_work_needs_reproduce_paper(text):
    cfg = typed(text, use_kl_penalty=True)
    _, remedy = refusal(kl_checks.check_kl, cfg).split("; use ")
    assert REMEDIES[text] in remedy and "or reproduce_paper = True" in remedy
    cfg.reproduce_paper = True
    kl_checks.check_kl(cfg)
    assert kl_checks.check_kl(typed(text)) == []


@pytest.mark.parametrize("kl_coef", [0, math.nan])
def test_penalty_that_penalises_nothing_is_refused(kl_coef):
    refusal(kl_checks.check_kl, typed("--use_kl_penalty --reproduce_paper", kl_coef=kl_coef))


NOTES = {
    "": ["k3 is its value only"],
    "--kl_estimator exact": [],
    "--kl_gradient as_written": ["forward KL"],
    "--kl_gradient as_written --kl_estimator k2": ["first epoch only"],
    "--kl_estimator exact --kl_in loss_to_go": [],
    "--kl_in loss_to_go --loss_average grpo": ["no bound", "1 / own length"],
}


@pytest.mark.parametrize("text", NOTES)
def test_kl_term_that_is_not_what_its_name_says_is_noted(text):
    lines = kl_checks.check_kl(typed(text, use_kl_penalty=True))
    assert all(note in line for note, line in zip(NOTES[text], lines, strict=True))


# 3. Models, tokenizers and problems


@pytest.mark.parametrize("name", ["user/model", "user/data:main:test", "countdown", None])
def test_hub_that_cannot_be_reached_is_named_once_and_its_cache_used(name, monkeypatch, capsys):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    session = mock.Mock(**{"head.side_effect": OSError("no route")})
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    for _ in range(2):
        rules.check_hub(name, Path(__file__), starter.reward_fn)
    is_on_hub = "/" in str(name)
    assert session.head.call_count == is_on_hub == huggingface_hub.constants.HF_HUB_OFFLINE
    assert ("no route" in capsys.readouterr().out) == is_on_hub


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("model.safetensors", b"{", b"garbage"),
        ("config.json", b'"qwen3"', b'"perceptron"'),
        ("config.json", b'size": 64', b'size": 32'),
        ("tokenizer.json", b"{", b""),
    ],
)
def test_broken_checkpoint_is_refused_in_one_sentence(checkpoint, tmp_path, name, old, new):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    path = tmp_path / name
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    rules.attach()
    text = refusal(starter.init_policy, str(tmp_path), "cpu")
    assert str(tmp_path) in text and "; give a folder written by save_pretrained" in text


def test_code_of_a_model_is_neither_run_nor_asked_for(checkpoint, tmp_path, monkeypatch):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "own", "auto_map": own})
    )
    (folder / "own.py").write_text("raise SystemExit('foreign code ran')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    rules.attach()
    assert "custom code" in refusal(starter.init_policy, folder, "cpu")


def test_prompt_that_the_chat_template_cannot_take_is_shown():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    rules.attach()
    text = refusal(starter.ids_of_prompt, "add 1 2", tokenizer, False)
    assert "'add 1 2'" in text and "no system role" in text


def loaded(checkpoint, text="", n_held_out=30):
    """What rules.check_model looks at."""
    policy, tokenizer = starter.init_policy(checkpoint, "cpu")
    problems = [{"prompt": f"add {i}", "answer": i, "prompt_ids": [7, 8]} for i in range(100)]
    parts = starter.Problems(problems[:40], problems[40 : 40 + n_held_out])
    cfg = chosen(f"--preset tiny {text}", stop_token_ids=[1])
    return SimpleNamespace(policy=policy, tokenizer=tokenizer, problems=parts, cfg=cfg)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda x: x.problems.held_out[3].update(prompt_ids=[7, 58]), "needs ids below 58"),
        (lambda x: x.problems.train[3].update(prompt_ids=[]), "makes [] of 'add 3'"),
        (lambda x: setattr(x.tokenizer, "chat_template", "hello"), "leaves out the user's"),
        (lambda x: x.problems.held_out.append(x.problems.train[3]), "1 of 31 held-out problems"),
    ],
)
def test_model_that_does_not_fit_its_problems_is_refused(checkpoint, spoil, words):
    x = loaded(checkpoint)
    rules.check_model(**vars(x))
    spoil(x)
    assert words in refusal(rules.check_model, *vars(x).values())


def test_mistake_in_a_reward_shows_before_anything_is_sampled(checkpoint):
    x = loaded(checkpoint)
    x.cfg.reward = lambda text, problem: problem["gold"]
    with pytest.raises(KeyError, match="gold") as error:
        rules.check_model(**vars(x))
    assert "a trial with an empty response" in error.value.__notes__[-1]


@pytest.mark.parametrize(
    "text, n_held_out, words",
    [
        ("", 29, "29 held-out problems are too few"),
        ("--n_eval_problems 5", 5, ""),  # as few as were asked for
        ("--warmup_steps 151", 30, "warmup_steps = 151"),
        ("--clip_range 0.1", 30, "clip_range changes nothing"),
        ("--clip_range 0.1 --epochs_per_rollout 2", 30, ""),
    ],
)
def test_what_is_often_a_mistake_is_said(checkpoint, capsys, text, n_held_out, words):
    x = loaded(checkpoint, text, n_held_out)
    capsys.readouterr()
    rules.note_mistakes(x.tokenizer, x.problems, x.cfg)
    printed = capsys.readouterr().out
    assert words in printed and bool(words) == bool(printed)


def test_prompts_that_the_model_cannot_see_are_counted(checkpoint, capsys):
    x = loaded(checkpoint)
    for problem, text in zip(x.problems.train, ("sort 21", "Sort 21", "TOP 1")):
        problem.update(prompt=text, prompt_ids=x.tokenizer(text)["input_ids"])
    rules.note_mistakes(x.tokenizer, x.problems, x.cfg)
    assert "2 of 40 prompts hold characters" in capsys.readouterr().out


# 4. A run that is resumed


def resumed(folder, text):
    """A run of the built-in model with 20 of 150 steps, from which a process goes on with this."""
    before = vars(chosen("--preset tiny"))
    (folder / "settings.json").write_text(json.dumps(before, default=str))
    for step in (10, 20):
        torch.save({"weights": torch.arange(1000)}, folder / f"checkpoint_{step:08d}.pt")
    cfg = chosen(f"--preset tiny --resume {text}")
    return SimpleNamespace(cfg=cfg, folder=folder, writes_files=True)


def test_settings_that_would_break_the_curve_of_a_resumed_run_are_refused(tmp_path):
    run = resumed(tmp_path, "--group_size 4")
    assert "group_size = 4 would break" in refusal(rules.check_resume, run)


def test_other_changes_of_a_resumed_run_are_said(tmp_path, capsys):
    run = resumed(tmp_path, "--learning_rate 1e-5 --clip_range (0.2,0.3) --n_train_steps 20")
    capsys.readouterr()
    rules.check_resume(run)
    *changes, end = capsys.readouterr().out.splitlines()
    assert sorted(changes) == [
        "resume: clip_range was 0.2, now it is [0.2, 0.3]",
        "resume: learning_rate was 0.0003, now it is 1e-05",
        "resume: n_train_steps was 150, now it is 20",
    ]
    assert "has done 20 steps" in end


@pytest.mark.parametrize("n_bytes", [900, 1000])
def test_damaged_checkpoint_is_set_aside_with_a_warning(tmp_path, capsys, n_bytes):
    """One that is cut, and one with nine other bytes."""
    run = resumed(tmp_path, "--n_train_steps 10")
    path = tmp_path / "checkpoint_00000020.pt"
    content = path.read_bytes()
    rest = content[1009:] if n_bytes == 1000 else b""
    path.write_bytes(content[:n_bytes] + b"?" * 9 + rest)
    rules.check_resume(run)
    printed = capsys.readouterr().out
    assert f"Warning: {path} is damaged" in printed and "has done 10 steps" in printed
    assert [x.stem for x in tmp_path.glob("*.damaged")] == [path.stem]
