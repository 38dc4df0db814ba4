"""What callers get wrong: each mistake costs one sentence with the value and a remedy, before
anything is written."""
import importlib.util
import inspect
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch

import starter
from starter import InputError, reward_fn
from support import kl_checks, rules

from conftest import make_tokenizer, settings

WHOLE = r"must be a whole number from {} to 1_000_000_000; the default is "
NOTHING = "changes nothing; leave it out, or set "


def cfg_of(**changes):
    """The settings as main() has them before it has chosen any."""
    defaults = {name: x.default for name, x in inspect.signature(starter.main).parameters.items()}
    return SimpleNamespace(**defaults | changes, parameters=list(defaults))


def with_kl(**changes):
    return dict(use_kl_penalty=True) | changes


def refusal(check, *arguments):
    """Returns the sentence. It must be short, and its remedy must follow a semicolon."""
    with pytest.raises(InputError) as refused:
        check(*arguments)
    text = str(refused.value)
    assert len(text) < 500 and "; " in text and "\n" not in text
    return text


# Parameters of main()

BAD = [
    # Whole numbers
    (dict(seed=-1), "seed = -1 " + WHOLE.format(0) + "0"),
    (dict(seed=0.5), "seed = 0.5 " + WHOLE.format(0)),
    (dict(seed=10**400), r"seed = 10{198,}\.* ?" + WHOLE.format(0)),
    (dict(n_train_steps=(1, 0)), r"n_train_steps = \(1, 0\) must be a whole .*; for example 150"),
    (dict(group_size=1), "group_size = 1 " + WHOLE.format(2) + "8"),
    (dict(group_size=None), "group_size = None " + WHOLE.format(2)),
    (dict(reward=lambda text: 1.0), r"reward = <lambda>\(text\) must be a function \(response_te"),
    # Numbers
    (dict(temperature=math.nan), "temperature = nan must be a number from 0.01 to 10; "),
    (dict(learning_rate=True), "learning_rate = True must be a number from 1e-12 to 1; "),
    (dict(clip_range=(0.2, "0.3")), r"clip_range = \(0.2, '0.3'\) must be a number"),
    # Switches and texts
    (dict(use_kl_penalty=1), "use_kl_penalty = 1 must be True or False; the default is False"),
    (dict(normalize_by_std="maybe"), "normalize_by_std = 'maybe' must be True or False; "),
    (dict(bf16="bf16"), "bf16 = 'bf16' must be True or False; the default is 'auto'"),
    (dict(engine="vlm"), "engine = 'vlm' must be .*; did you mean 'vllm'?"),
    (dict(device="cdua"), "device = 'cdua' must be .*; did you mean 'cuda'?"),
    # What is not there, or does not fit together
    (dict(device="mps"), "device = 'mps' but torch finds no such device here; use device = 'cpu'"),
    (dict(device="cuda:99"), r"device = 'cuda:99' but there are \d+ CUDA GPUs here; use device = "),
    (dict(model_id=Path("nowhere/model")), "model_id = 'nowhere/model' is no folder; give one"),
    (dict(model_id="tinny"), "model_id = 'tinny' is no folder; .*did you mean 'tiny'?"),
    (dict(model_id=str(Path(__file__).parent)), "model_id = .* has no config.json; give a folder"),
    (dict(out_dir=3), "out_dir = 3 must be the path of a folder; the default is 'runs'"),
    (dict(out_dir="/dev/null/a"), "out_dir = '/dev/null/a' cannot be written; give another"),
    (dict(task=["countdown"]), r"task = \['countdown'\] must be a task's name, a function or"),
    (dict(eval_file=True), "eval_file = True must be the path of a JSONL file; the default is"),
    (dict(eval_file="test.jsonl"), "eval_file = 'test.jsonl' is not read by task = None; give"),
    (dict(resume=2), "resume = 2 must be True or the folder of a run; the default is None"),
    *((dict(reward=reward), r"reward = .* must be a function \(response_text, problem\) -> number "
                            r"or a list of \(function, weight\); the default is reward_fn")
      for reward in ("exact", None, [], [reward_fn], [(reward_fn, "1")], [(reward_fn, math.nan)],
                     len, lambda text: 1.0, lambda text, problem, answer: 1.0)),
    # What changes nothing
    (dict(kl_coef=0.1), f"kl_coef = 0.1 {NOTHING}use_kl_penalty = True"),
    (dict(beta_min=0.1), f"beta_min = 0.1 {NOTHING}use_kl_penalty = True"),
    (with_kl(kl_target=0.2), f"kl_target = 0.2 {NOTHING}a kl_adaptation_method that reads it"),
    (dict(frozen_in_bf16=True), "frozen_in_bf16 = True needs weights that do not"),
]
for package, changes in (("vllm", dict(engine="vllm")), ("peft", dict(lora_rank=8))):
    if importlib.util.find_spec(package) is None:
        BAD.append((changes, f".* but {package} is not installed here; "))


@pytest.mark.parametrize("changes, message", BAD)
def test_bad_parameter_is_refused_in_one_sentence(changes, message):
    assert re.match(message, refusal(rules.check_settings, cfg_of(**changes)))


@pytest.mark.parametrize("name, given, kept", [
    ("n_train_steps", 1e3, 1000), ("group_size", numpy.int64(4), 4), ("seed", numpy.int32(7), 7),
    ("normalize_by_std", numpy.bool_(False), False), ("learning_rate", numpy.float64(0.01), 0.01),
    ("clip_range", torch.tensor(0.25), 0.25), ("clip_range", numpy.array([0.1, 0.3]), [0.1, 0.3]),
    ("importance_cap", None, None), ("max_sampler_diff", None, None), ("temperature", 1, 1),
    ("eval_temperature", 0, 0), ("resume", False, False), ("device", "cpu", "cpu"),
    ("model_id", "user/model-1.5", "user/model-1.5"), ("run_name", "lr3e-4", "lr3e-4")])
def test_unusual_and_right_parameter_is_taken(name, given, kept):
    cfg = cfg_of(**{name: given})
    rules.check_settings(cfg)
    value = getattr(cfg, name)
    assert (value, type(value)) == (kept, type(kept))


def test_every_default_and_every_preset_passes_before_and_after_it_is_chosen():
    for preset in ["auto", *starter.PRESETS]:
        cfg = cfg_of(preset=preset)
        rules.check_settings(cfg)
        starter.choose(cfg)
        chosen = dict(vars(cfg))
        rules.check_settings(cfg)
        assert vars(cfg) == chosen


@pytest.mark.parametrize("name", ["user/model", "user/data:main:test", "countdown", None])
def test_hub_that_cannot_be_reached_is_named_once_and_its_cache_used(name, monkeypatch, capsys):
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    session = mock.Mock(**{"head.side_effect": OSError("no route")})
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    for _ in range(2):
        rules.check_hub(name, Path(__file__))
    is_on_hub = "/" in str(name)
    assert session.head.call_count == is_on_hub == huggingface_hub.constants.HF_HUB_OFFLINE
    said = f"cannot be reached (no route): {name} can come from its cache only\n"
    assert capsys.readouterr().out.endswith(said if is_on_hub else "")


def test_adapters_of_lora_are_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    text = refusal(rules.check_settings, cfg_of(model_id=tmp_path))
    assert "holds LoRA adapters; merge them into their model with peft's merge_and_unload()" in text


def test_code_of_a_model_is_neither_run_nor_asked_for(checkpoint, tmp_path, monkeypatch):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM":
                                                 "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('foreign code ran')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(InputError, match="cannot be loaded .*contains custom code"):
        starter.init_policy(folder, "cpu")


def test_new_parameter_of_main_and_new_average_need_no_rule(monkeypatch):
    new = dict(entropy_coef=0.0, n_tries=3, shuffle=False, kl_window=10, schedule=(1, 2))
    known = inspect.signature(starter.main)
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                  for name, default in new.items()]
    monkeypatch.setattr(starter.main, "__signature__", raising=False, value=known.replace(
        parameters=[*known.parameters.values(), *parameters]))
    for changes, message in (
            (dict(entropy_coef="high"), "entropy_coef = 'high' must be a number from -"),
            (dict(n_tries=2.5), "n_tries = 2.5 must be a whole number from -"),
            (dict(shuffle=3), "shuffle = 3 must be True or False; the default is False"),
            (dict(kl_window=5), f"kl_window = 5 {NOTHING}use_kl_penalty = True")):
        assert re.match(message, refusal(rules.check_settings, cfg_of(**changes)))
    cfg = cfg_of(entropy_coef=0.01, shuffle=True, schedule=[3])
    rules.check_settings(cfg)
    assert cfg.shuffle is True and cfg.schedule == [3]


@pytest.mark.parametrize("changes, message", [
    (dict(seed=-1), "seed = -1 must be"), (dict(model_id="nowhere"), "model_id = 'nowhere' is no"),
    (with_kl(kl_estimator="k2", kl_in="reward"), "kl_estimator = 'k2' with kl_in = 'reward'")])
def test_refused_run_loads_no_model_and_writes_nothing(checkpoint, tmp_path, monkeypatch, changes,
                                                       message):
    monkeypatch.setattr(starter, "init_policy", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(InputError, match=message):
        starter.main(**settings(checkpoint, tmp_path / "runs") | changes)
    assert not list(tmp_path.iterdir())


def test_mistake_in_a_reward_shows_before_anything_is_sampled(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(starter, "rollout", lambda *_: pytest.fail("responses were sampled"))
    with pytest.raises(KeyError, match="gold") as error:
        starter.main(**settings(checkpoint, tmp_path, reward=lambda text, x: x["gold"]))
    assert "got '' and {'prompt'" in error.value.__notes__[0]
    assert "a trial with an empty response, before anything" in error.value.__notes__[1]
    assert not list(tmp_path.iterdir())


# KL terms that are known not to work

@pytest.mark.parametrize("changes, message", [
    *((dict(kl_estimator=name, kl_in="reward"),
       f"'{name}' with kl_in = 'reward' .*, so that its gradient has no fixed direction")
      for name in ("k2", "k3")),
    (dict(kl_estimator="k1", kl_gradient="as_written"), "has an expected gradient of zero"),
    (dict(kl_gradient="as_written", kl_in="loss_to_go"), "is the gradient of no divergence"),
    (dict(kl_estimator="k2", kl_in="loss_to_go"), "charges earlier tokens with a biased KL"),
    (dict(kl_estimator="k1", kl_adaptation_method="sigmoid"), "reverses the gradient where k1"),
    (dict(kl_estimator="exact", kl_adaptation_method="clip_sound"), "clamps the log-ratios")])
def test_kl_term_that_is_known_not_to_work_needs_reproduce_paper(changes, message):
    cfg = starter.cfg_with(**with_kl(**changes))
    assert re.search(message + ".*; use kl_.*, or reproduce_paper = True",
                     refusal(kl_checks.check_kl, cfg))
    kl_checks.check_kl(starter.cfg_with(**with_kl(**changes), reproduce_paper=True))
    cfg.use_kl_penalty = False
    assert kl_checks.check_kl(cfg) == []


@pytest.mark.parametrize("changes, notes", [
    (dict(), ["k3 is its value only; the gradient, which all sampled estimators share, is"]),
    (dict(kl_estimator="exact", kl_in="loss_to_go"), []), (dict(kl_estimator="exact"), []),
    (dict(kl_gradient="as_written"), ["forward KL"]),
    (dict(kl_gradient="as_written", kl_estimator="k2"), ["first epoch only"]),
    (dict(kl_in="loss_to_go", loss_average="grpo"), ["no bound", "1 / own length"]),
    (dict(kl_in="reward", kl_estimator="k1", loss_average="dr_grpo"), [])])
def test_kl_term_that_is_not_what_its_name_says_is_noted(changes, notes):
    lines = kl_checks.check_kl(starter.cfg_with(**with_kl(**changes)))
    assert len(lines) == len(notes) and all(note in line for note, line in zip(notes, lines))


# Models, tokenizers and problems

@pytest.mark.parametrize("name, change", [
    ("model.safetensors", lambda content: content[:-1000]),
    ("model.safetensors", lambda content: b"garbage" * 100), ("config.json", lambda content: b"[]"),
    ("config.json", lambda content: content.replace(b'"qwen3"', b'"perceptron"')),
    ("config.json", lambda content: content.replace(b'"hidden_size": 64', b'"hidden_size": 32')),
    ("tokenizer.json", lambda content: content[:100])])
def test_broken_checkpoint_is_refused_in_one_sentence(checkpoint, tmp_path, name, change):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    text = refusal(starter.init_policy, str(tmp_path), "cpu")
    assert str(tmp_path) in text and "save_pretrained" in text


def loaded(checkpoint, n_held_out=30, **changes):
    """What rules.check_model looks at."""
    policy, tokenizer = starter.init_policy(checkpoint, "cpu")
    problems = starter.Problems(*(
        [{"prompt": f"add {i}", "answer": i, "prompt_ids": [7, 8]} for i in some]
        for some in (range(40), range(40, 40 + n_held_out), [])))
    return SimpleNamespace(policy=policy, tokenizer=tokenizer, problems=problems,
                           cfg=starter.cfg_with(model_id="model", **changes))


@pytest.mark.parametrize("spoil, words", [
    (lambda x: x.policy.model.norm.weight.data.fill_(math.nan), "has weights that are not finite"),
    (lambda x: x.problems.held_out[3].update(prompt_ids=[7, 58]), "or ids from 58 on"),
    (lambda x: x.problems.train[3].update(prompt_ids=[]), "makes nothing of a prompt"),
    (lambda x: setattr(x.tokenizer, "chat_template", "{% for m in messages %}hello{% endfor %}"),
     "leaves out the user's message"),
    (lambda x: x.problems.held_out.extend(x.problems.train[38:]),
     "2 of 32 held-out problems are also trained on, for example 'add 38'"),
    (lambda x: setattr(x.policy, "supports_gradient_checkpointing", False),
     "gradient_checkpointing = True does not work with Qwen3ForCausalLM")])
def test_model_that_does_not_fit_its_problems_is_refused(checkpoint, spoil, words):
    x = loaded(checkpoint, gradient_checkpointing=True)
    rules.check_model(**vars(x))
    spoil(x)
    assert words in refusal(rules.check_model, *vars(x).values())


@pytest.mark.parametrize("changes, n_held_out, words", [
    (dict(), 30, []), (dict(), 29, ["29 held-out problems are too few"]),
    (dict(n_eval_problems=5), 5, []),  # as few as were asked for
    (dict(max_new_tokens=1), 30, ["answers are too long for max_new_tokens = 1, for example 0:"]),
    (dict(warmup_steps=41), 30, ["warmup_steps = 41, so a run of 40 steps ends before"]),
    (dict(enable_thinking=True, clip_range=0.1, gpu_mem_util=0.5), 30,
     ["gpu_mem_util = 0.5 changes nothing", "clip_range does nothing", "template does"]),
    (dict(learning_rate=7e-6, lora_rank=8), 30, ["small for LoRA adapters"])])
def test_notes_say_what_is_often_a_mistake(checkpoint, changes, n_held_out, words):
    x = loaded(checkpoint, n_held_out, **dict(learning_rate=1e-3) | changes)
    lines = rules.notes(x.tokenizer, x.problems, x.cfg)
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines))


@pytest.mark.parametrize("changes, said", [
    (dict(model_id="user/other"), True), (dict(model_id="user/other", learning_rate=2e-5), False),
    (dict(), False), (dict(model_id="user/other", lora_rank=8), False)])
def test_rate_of_a_preset_for_another_model_is_said(changes, said, capsys, tmp_path):
    cfg = starter.cfg_with(**dict(preset="tiny", out_dir=str(tmp_path)) | changes)
    given = dict(model_id=None, learning_rate=None) | changes
    rules.note_on_rate(SimpleNamespace(cfg=cfg, settings=given))
    assert ("= 0.0003 is that of the preset, for tiny;" in capsys.readouterr().out) == said


def test_prompts_that_the_model_cannot_see_are_counted():
    tokenizer = make_tokenizer()
    problems = [{"prompt": text, "prompt_ids": tokenizer(text)["input_ids"]}
                for text in ("sort 21", "Sort 21", "TOP 1")]
    problems = starter.Problems(problems, problems * 10, [])
    [line] = rules.notes(tokenizer, problems, starter.cfg_with(learning_rate=1e-3))
    assert "2 of 3 prompts hold characters that the tokenizer does not know" in line
    assert "'Sort 21'" in line
