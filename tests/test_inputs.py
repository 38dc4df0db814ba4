"""What callers get wrong: each mistake costs one sentence with the value and a remedy, before
anything is written; what changes nothing, or is often a mistake, is said."""

import ast
import dataclasses
import functools
import importlib.util
import json
import re
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import huggingface_hub
import pytest
import torch
import transformers

from conftest import settings, variety
from safetensors.torch import load_file, save_file

import starter
from starter import InputError
from support import attach, kl_checks, rules


def typed(text, **changes):
    """Settings that were typed like this, as main() has them at first."""
    return starter.cfg_with(**starter.settings_from(text.split()), **changes)


def chosen(text, **changes):
    """The same after presets are applied."""
    cfg = typed(text, **changes)
    attach.begin(cfg)
    starter.apply_preset(cfg)
    return cfg


def refusal(check, *arguments, **settings):
    """Returns the sentence, which must be short."""
    with pytest.raises(InputError) as refused:
        check(*arguments, **settings)
    text = str(refused.value)
    assert len(text) < 500 and "\n" not in text
    return text


# 1. Parameters of main()

WRONG = {
    "--seed 0.5": "seed = 0.5 must be int, such as 1",
    "--model_id tiny --n_train_steps 1,0": "n_train_steps = (1, 0) must be int, such as 150",
    "--use_kl_penalty 1.0": "use_kl_penalty = 1.0 must be bool, such as True",
    "--importance_cap 0.5": "importance_cap = 0.5 must be 1 or more",
    "--rollout_batch_size 0": "rollout_batch_size = 0 must be 1 or more",
    "--max_new_tokens 0": "max_new_tokens = 0 must be 1 or more",
    "--n_eval_problems 0": "n_eval_problems = 0 must be 1 or more",
    "--eval_temperature -1": "eval_temperature = -1 must be 0 or more",
    "--lora_rank -1": "lora_rank = -1 must be 0 or more",
    "--normalize_by_std batch": "normalize_by_std = 'batch' must be True (divide by",
    "--clip_range=-0.2": "clip_range = -0.2 must be a number, such as 0.2, or two",
    "--clip_range 0.2,0.3,0.4": "clip_range = (0.2, 0.3, 0.4) must be a number",
    "--use_kl_penalty --kl_adaptation_method clip --kl_clip_threshold 0": "must be 1e-09 or more",
    "--use_kl_penalty --kl_adaptation_method clip --kl_clip_threshold abc": "must be float, such",
    "--use_kl_penalty --reward None": "reward = None leaves only the KL term to teach",
    "--kl_coef 0.2": "kl_coef = 0.2 changes nothing; leave it out, or set use_kl_penalty",
    "--beta_min 0.1": "beta_min = 0.1 changes nothing",
    "--use_kl_penalty --kl_target 0.2": "or set a kl_adaptation_method",
    "--use_kl_penalty --kl_coef 0": "kl_coef = 0 penalises nothing",
    "--eval_file x.jsonl --task addition": "is not read by task = 'addition'",
    "--frozen_in_bf16 --precision bf16": "use_kl_penalty or lora_rank",
    "--model_id {}/adapters": "model_id = '{}/adapters' holds LoRA adapters; merge",
    "--use_kl_penalty --ref_model_id {}/adapters": "ref_model_id = '{}/adapters' holds LoRA",
    "--use_kl_penalty --kl_estimator exat": "use one of ['exact'",
    "--use_kl_penalty --kl_adaptation_method clip+targt": "'targt' is not known; use one of ['tar",
    "--resume nowhere": "nowhere is no folder of a run; give one",
    "--max_new_tokens 300": "0 prompts to train on",  # the context is of 256
    "--preset large": "use one of ['qwen3-0.6b', 'qwen3-1.7b', 'smollm2', 'tiny']",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_setting_or_one_without_effect_is_refused_before_anything_is_written(text, tmp_path):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    given = starter.settings_from(text.format(tmp_path).split())
    words = WRONG[text].replace("{}", str(tmp_path))
    assert words in refusal(starter.main, device="cpu", out_dir=tmp_path / "runs", **given)
    assert not (tmp_path / "runs").exists()


def test_parameter_whose_default_is_a_text_needs_a_value(capsys):
    with pytest.raises(SystemExit):
        starter.settings_from(["--run_name"])
    assert "--run_name: expected one argument" in capsys.readouterr().err


def test_kl_that_cannot_be_in_the_reward_is_refused_outside_of_main_too():
    for estimator in ("k2", "k3", "exact"):
        printed = refusal(starter.KLSettings, kl_in="reward", kl_estimator=estimator)
        assert "works only with kl_estimator = 'k1'" in printed
    assert starter.KLSettings(kl_in="reward", reproduce_paper=True).kl_estimator == "k3"


def test_names_of_settings_outside_of_main_are_checked():
    assert "use one of ['kl_coef']" in refusal(starter.KLSettings, kl_cof=0.1)
    assert starter.KLSettings(kl_adaptation_method="dynamic").beta_min == 0.0


def test_two_rules_of_one_kind_are_refused():
    for method in ("target+dynamic", "clip+none+clip_sound"):
        printed = refusal(starter.KLSettings, kl_adaptation_method=method)
        assert "two rules of one kind" in printed
    starter.KLSettings(kl_adaptation_method="target+clip")


def test_memory_that_runs_out_while_a_model_is_loaded_is_no_fault_of_its_folder():
    with pytest.raises(torch.OutOfMemoryError), starter.loading("a"):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("name, value", [("reward", "my_reward"), ("reward", 3), ("task", [{}])])
def test_what_is_no_function_is_refused(name, value, tmp_path):
    given = {"device": "cpu", "out_dir": tmp_path / "runs", name: value}
    assert "function" in refusal(starter.main, **given)


def test_warm_up_that_lasts_a_whole_run_is_said(capsys):
    for n, said in ((10, 1), (11, 0)):
        rules.check_settings(chosen(f"--preset tiny --n_train_steps {n}"))
        assert capsys.readouterr().out.count("the learning rate rises in all of the 10") == said


def test_vllm_that_is_not_installed_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    given = dict(device="cpu", engine="vllm", out_dir=tmp_path / "runs")
    assert "vllm; install it, or leave engine out" in refusal(starter.main, **given)
    assert not (tmp_path / "runs").exists()


def test_folder_of_runs_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    printed = refusal(starter.main, device="cpu", out_dir=tmp_path / "file" / "runs")
    assert f"{tmp_path}/file is no folder that this program may write into" in printed


def test_preset_of_yours_that_lacks_a_number_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(starter.PRESETS, "mine", dict(starter.PRESETS["tiny"], max_new_tokens=None))
    given = dict(device="cpu", preset="mine", out_dir=tmp_path / "runs")
    assert "preset mine has no ['max_new_tokens']; add them" in refusal(starter.main, **given)
    assert not (tmp_path / "runs").exists()


def test_prompts_that_are_all_equal_are_named_as_the_cause(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "add 1", "answer": 1}\n' * 20)
    printed = refusal(starter.main, device="cpu", out_dir=tmp_path, task=tmp_path / "a.jsonl")
    assert "(1 different ones)" in printed or "0 prompts to train on" in printed


def test_setting_that_changes_nothing_is_refused_when_typed_with_its_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["starter.py", "--kl_coef", "0.3"])
    assert "kl_coef = 0.3 changes nothing" in refusal(chosen, "--kl_coef 0.3")


@pytest.mark.parametrize(
    "text", ["--temperature 2", "--importance_cap inf", "--clip_range (0.2,0.3)", "--model_id None"]
)
def test_unusual_and_right_setting_is_taken(text):
    rules.check_settings(chosen(text))


@pytest.mark.parametrize(
    "text, has_gpu, expected",
    [
        ("--device cpu", True, "tiny"),
        ("--model_id tiny", True, "tiny"),
        ("--model_id user/model", False, "qwen3-1.7b"),
    ],
)
def test_preset_follows_model_and_device(monkeypatch, text, has_gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    cfg = typed(text)
    attach.begin(cfg)
    assert cfg.preset == expected


# 2. KL terms

REMEDIES = {
    "--kl_estimator k1 --kl_gradient as_written": "use kl_gradient = 'reverse'",
    "--kl_gradient as_written --kl_in loss_to_go": "use kl_gradient = 'reverse'",
    "--kl_estimator k2 --kl_in loss_to_go": "use kl_estimator = 'exact'",
    "--kl_estimator k1 --kl_adaptation_method target+sigmoid": "use kl_estimator = 'exact'",
    "--kl_estimator exact --kl_adaptation_method clip_sound": "use kl_estimator = 'k3'",
    "--kl_gradient as_written --kl_adaptation_method clip_sound": "kl_gradient = 'reverse'",
}


@pytest.mark.parametrize("text", REMEDIES)
def test_kl_term_that_is_known_not_to_work_needs_reproduce_paper(text):
    cfg = typed(text, use_kl_penalty=True)
    printed = refusal(kl_checks.check_kl, cfg)
    assert REMEDIES[text] in printed and "reproduce_paper = True" in printed
    for remedy in printed.rpartition("use ")[2].split(" or "):
        changed = re.findall(r"(\w+) = ('\w+'|True)", remedy)
        values = {name: ast.literal_eval(value) for name, value in changed}
        kl_checks.check_kl(SimpleNamespace(**vars(cfg) | values))
    kl_checks.check_kl(typed(text))


# 3. Models, tokenizers and problems


@pytest.mark.parametrize("name", ["user/model", "countdown"])
def test_hub_that_cannot_be_reached_is_named_and_its_cache_used(name, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    session = mock.Mock(**{"head.side_effect": OSError("no route")})
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    rules.check_hub(name, __file__, starter.reward_fn)
    is_on_hub = "/" in name
    assert session.head.called == is_on_hub == huggingface_hub.constants.HF_HUB_OFFLINE
    assert ("no route" in capsys.readouterr().out) == is_on_hub


OWN_CODE = b'"own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}'


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("model.safetensors", b"{", b"garbage"),
        ("model.safetensors", b"layers.1.mlp.up", b"layers.1.mlp.xx"),
        ("config.json", b'size": 64', b'size": 32'),
        ("config.json", b'"qwen3"', OWN_CODE),  # which is neither run nor asked for
    ],
)
def test_broken_checkpoint_is_refused_in_one_sentence(
    checkpoint, tmp_path, monkeypatch, name, old, new, with_support
):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    path = tmp_path / name
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    (tmp_path / "own.py").write_text("raise SystemExit('foreign code ran')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    text = refusal(starter.init_policy, str(tmp_path), "cpu")
    assert f"{str(tmp_path)!r} cannot be loaded" in text
    assert ("holds no weights for ['model.layers.1.mlp.up" in text) == (b"up" in old)


def config_in(folder, **config):
    """Returns the folder of a checkpoint of which there is the config.json alone."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    return folder


@pytest.mark.parametrize(
    "method", ["fp8", "mxfp4", "bitsandbytes", "gptq", "awq", "compressed-tensors"]
)
@pytest.mark.parametrize("name", ["model_id", "ref_model_id"])
def test_quantised_checkpoint_is_refused_with_the_name_of_the_whole_one(method, name, tmp_path):
    path = config_in(tmp_path / "Qwen3-8B-FP8", quantization_config={"quant_method": method})
    cfg = typed("", **{name: path})
    printed = refusal(rules.check_config, cfg)
    assert (
        f"quantised weights ({method})" in printed and f"perhaps '{tmp_path}/Qwen3-8B'" in printed
    )


def test_quantised_checkpoint_is_refused_without_support_too(
    checkpoint, monkeypatch, without_support
):
    """One of torchao's kind that transformers loads without a package: its weights are there."""
    policy, _ = starter.init_policy(checkpoint, "cpu")
    policy.config.quantization_config = {"quant_method": "x", "bits": 4}
    load = mock.Mock(return_value=(policy, {"missing_keys": [], "unexpected_keys": []}))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    assert "holds quantised weights" in refusal(starter.init_policy, str(checkpoint), "cpu")


def test_checkpoint_for_which_there_is_no_model_of_text_is_refused(tmp_path):
    path = config_in(tmp_path / "a", model_type="clip", architectures=["CLIPModel"])
    printed = refusal(rules.check_config, typed("", model_id=path))
    assert "'clip' (['CLIPModel'])" in printed and "no model of text alone" in printed


def test_gradient_checkpointing_that_a_model_lacks_is_refused(tmp_path):
    path = config_in(tmp_path / "a", model_type="ctrl")
    rules.check_config(typed("", model_id=path))
    printed = refusal(rules.check_config, typed("--gradient_checkpointing", model_id=path))
    assert "gradient_checkpointing = True: CTRLLMHeadModel has none" in printed


def test_heads_for_later_tokens_are_said_to_be_left_out(tmp_path, capsys):
    path = config_in(tmp_path / "a", model_type="deepseek_v3", num_nextn_predict_layers=2)
    rules.check_config(typed("", model_id=path))
    assert f"{path}: its 2 heads for later tokens are neither" in capsys.readouterr().out


def with_more_weights(checkpoint, folder, name):
    """A copy of a checkpoint with one tensor more."""
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_weights_that_the_model_lacks_are_named(checkpoint, tmp_path, capsys, with_support):
    """As those of a layer that config.json does not count."""
    name = "model.layers.2.mlp.up_proj.weight"
    starter.init_policy(with_more_weights(checkpoint, tmp_path / "a", name), "cpu")
    assert f"holds 1 weights that its model lacks: ['{name}']" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bias", "weight_scale_inv", "lora_A.weight"])
def test_weights_of_a_layer_that_the_model_lacks_are_refused(checkpoint, tmp_path, name):
    name = f"model.layers.1.mlp.up_proj.{name}"
    model = with_more_weights(checkpoint, tmp_path / "a", name)
    assert f"the checkpoint holds {name}, which" in refusal(starter.init_policy, model, "cpu")


def test_model_that_is_nowhere_is_said_to_be_no_folder(tmp_path):
    path = str(tmp_path / "a" / "b" / "c")
    assert f"{path!r} is no folder, and cannot be loaded" in refusal(
        starter.init_policy, path, "cpu"
    )


@pytest.mark.parametrize("preset", ["smollm2", "unknown"])
def test_model_that_a_run_saved_has_its_preset(checkpoint, tmp_path, preset):
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "settings.json").write_text(json.dumps({"preset": preset}))
    cfg = typed("--device cpu", model_id=str(tmp_path / "model"))
    attach.begin(cfg)
    assert cfg.preset == (preset if preset == "smollm2" else "qwen3-1.7b")


def loaded(checkpoint, text=""):
    """What rules.check_model looks at."""
    policy, tokenizer = starter.init_policy(checkpoint, "cpu")
    problems = [
        {"prompt": f"add {i}", "answer": i, "prompt_ids": [7 + i // 40, 8 + i % 40]}
        for i in range(100)
    ]
    parts = starter.Problems(problems[:40], problems[40:])
    cfg = chosen(f"--preset tiny {text}", stop_token_ids=[1])
    return SimpleNamespace(policy=policy, tokenizer=tokenizer, problems=parts, cfg=cfg)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda x: x.problems.held_out[3].update(prompt_ids=[7, 58]), "needs ids below 58"),
        (lambda x: setattr(x.tokenizer, "chat_template", "hello"), "leaves out {'role': 'user'"),
        (lambda x: x.problems.held_out.append(x.problems.train[3]), "'add 3' is also trained"),
        # Another text, of which the template makes the same ids
        (
            lambda x: x.problems.held_out.append({**x.problems.train[3], "prompt": "add 3 "}),
            "3 ' is",
        ),
        # As in TRL; and one that returns several numbers
        (lambda x: setattr(x.cfg, "reward", lambda completions: 0), "YOURS(completions=[text]"),
        (lambda x: setattr(x.cfg, "reward", lambda *_: [1.0]), "YOURS(text, problem)[0]"),
    ],
)
def test_model_or_reward_that_does_not_fit_its_problems_is_refused(checkpoint, spoil, words):
    x = loaded(checkpoint)
    rules.check_model(**vars(x))
    spoil(x)
    assert words in refusal(rules.check_model, *vars(x).values())


def test_number_of_problems_of_a_file_and_the_first_are_shown(checkpoint, capsys):
    x = loaded(checkpoint, "--task sums.jsonl")
    rules.check_model(**vars(x))
    line = "sums.jsonl: 40 problems to train on, 60 held out; the first: {'prompt': 'add 0', 'ans"
    assert line in capsys.readouterr().out
    x.cfg.task = "countdown_small"
    rules.check_model(**vars(x))
    assert "the first" not in capsys.readouterr().out


@pytest.mark.parametrize("reward", [starter.reward_fn, variety])
def test_columns_that_nothing_reads_are_named_once(checkpoint, capsys, reward):
    """As the choices of a question. A reward of one's own may read them."""
    x = loaded(checkpoint, "--task quiz.jsonl")
    x.cfg.reward = reward
    for problem in x.problems.train:
        problem.update(choices=["a", "b"], last_number=True)
    rules.check_model(**vars(x))
    says = capsys.readouterr().out.count("nothing reads ['choices']:")
    assert says == (reward is starter.reward_fn)


@pytest.mark.parametrize(
    "text, words",
    [
        ("--learning_rate 2e-4 --lora_rank 8", ""),
        ("--lora_rank 8", "learning_rate = 0.0003 was found for all weights of tiny;"),
        ("--model_id user/other", "learning_rate = 0.0003 was found for"),
        ("--use_kl_penalty --kl_adaptation_method dynamic", "= 'dynamic_sound'"),
        ("--use_kl_penalty --kl_adaptation_method target+clip", "= 'target_sound'"),
        ("--use_kl_penalty --kl_adaptation_method target_sound+clip", ""),
    ],
)
def test_what_is_often_a_mistake_is_said(capsys, text, words):
    cfg = chosen(f"--preset tiny {text}")
    capsys.readouterr()
    rules.check_settings(cfg)
    kl_checks.check_kl(cfg)
    printed = capsys.readouterr().out
    assert words in printed and bool(words) == bool(printed)


def test_prompts_that_the_model_cannot_see_are_counted(checkpoint, capsys):
    x = loaded(checkpoint)
    ids = x.tokenizer("Sort 21")["input_ids"]
    x.problems.train[3].update(prompt="Sort 21", prompt_ids=ids)
    rules.check_model(**vars(x))
    printed = capsys.readouterr().out
    assert "1 of 40 prompts hold characters" in printed
    assert f"sees '{x.tokenizer.unk_token}ort 21'" in printed


# 4. A run that is resumed


def resumed(folder, text, **began_with):
    """A run of the built-in model with 20 of 150 steps, from which a process goes on with this."""
    before = vars(chosen("--preset tiny", **began_with))
    content = starter.text_of_settings(SimpleNamespace(**before))
    (folder / "settings.json").write_text(content)
    for step in (10, 20):
        torch.save({"weights": torch.arange(1000)}, folder / f"checkpoint_{step:08d}.pt")
    cfg = chosen(f"--preset tiny --resume {text}")
    return SimpleNamespace(cfg=cfg, folder=folder, writes_files=True)


@pytest.mark.parametrize("is_script", [False, True])
@pytest.mark.parametrize("text", ["--group_size 4 --model_id other/tiny", "--task a/b.jsonl"])
def test_settings_that_would_break_the_curve_of_a_resumed_run_are_refused(
    tmp_path, text, is_script, monkeypatch
):
    """What the message says to type, or to give main(), is right."""
    monkeypatch.setattr(rules, "is_program", lambda: not is_script)
    printed = refusal(rules.check_resume, resumed(tmp_path, text))
    [advice] = re.findall(r"would break the curve of .*; (?:type|give main\(\)) (.*), or", printed)
    run = resumed(tmp_path, f"{text} {'' if is_script else advice}")
    if is_script:
        [call] = ast.parse(f"main({advice})").body
        for keyword in call.value.keywords:
            setattr(run.cfg, keyword.arg, ast.literal_eval(keyword.value))
    rules.check_resume(run)


@pytest.mark.parametrize(
    "typed, said",
    [
        ("--seed=5 --n-train-steps 3 --eval_every 7", ["--seed", "--n_train_steps"]),
        ("--use_kl_penalty --other 3 4", ["--use_kl_penalty"]),
    ],
)
def test_what_was_typed_for_a_script_and_not_passed_on_is_said(typed, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["my_script.py", *typed.split()])
    rules.say_what_is_for_the_script(starter.cfg_with(n_train_steps=10, eval_every=7))
    printed = capsys.readouterr().out
    assert re.findall("(--.*) was typed for the script", printed) == said


def test_resume_that_a_script_does_not_pass_on_is_refused(monkeypatch):
    """Otherwise a new run would begin."""
    monkeypatch.setattr(sys, "argv", ["my_script.py", "--resume"])
    assert "resume = None" in refusal(rules.say_what_is_for_the_script, starter.cfg_with())
    rules.say_what_is_for_the_script(starter.cfg_with(resume="runs/a"))


def test_other_changes_of_a_resumed_run_are_said(tmp_path, capsys):
    """Not the reward, which has another address in each process; the model's folder has moved."""
    began_with = dict(model_id="/old/m/tiny")
    text = "--learning_rate 1e-5 --clip_range (0.2,0.3) --model_id /new/m/tiny"
    run = resumed(tmp_path, text, **began_with)
    capsys.readouterr()
    rules.check_resume(run)
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "resume: clip_range was 0.2, now it is [0.2, 0.3]",
        "resume: learning_rate was 0.0003, now it is 1e-05",
        "resume: model_id was '/old/m/tiny', now it is '/new/m/tiny'",
    ]


@pytest.mark.parametrize("content", ["", '{"preset": "ti', "[1]"])
def test_run_whose_settings_are_damaged_goes_on_and_says_so(tmp_path, capsys, content):
    run = resumed(tmp_path, "")
    (tmp_path / "settings.json").write_text(content)
    rules.check_resume(run)
    assert f"{tmp_path / 'settings.json'} is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("is_cut", [True, False])
def test_damaged_checkpoint_is_set_aside_with_a_warning(tmp_path, capsys, is_cut):
    run = resumed(tmp_path, "")
    path = tmp_path / "checkpoint_00000020.pt"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1  # one bit
    path.write_bytes(content[:1000] if is_cut else content)
    rules.check_resume(run)
    assert f"Warning: {path} is damaged" in capsys.readouterr().out
    assert [x.stem for x in tmp_path.glob("damaged_*")] == [f"damaged_{path.stem}"]


@dataclasses.dataclass  # which has no hash
class Constant:
    def __call__(self, text, problem):
        return 0.5


async def one_agent(problem, ask):
    return 0.0


async def another_agent(problem, ask):
    return 1.0


@pytest.mark.parametrize(
    "source, change",
    [
        ("agent", lambda x: setattr(x.cfg, "agent", another_agent)),
        ("problems", lambda x: x.problems.train.pop()),
        ("problems", lambda x: x.problems.held_out[3].update(answer=7)),
        ("model", lambda x: x.policy.model.norm.weight.data.mul_(1.001)),
    ],
)
def test_source_that_changed_under_its_name_is_said(checkpoint, capsys, source, change):
    x = loaded(checkpoint)
    x.cfg.sources = {}
    x.cfg.agent = one_agent if source == "agent" else None

    def says():
        rules.note_changed_sources(x.policy, x.problems, x.cfg)
        return capsys.readouterr().out

    capsys.readouterr()
    assert says() == says() == ""
    change(x)
    assert says() == f"resume: the {source} changed\n"


def test_problems_with_objects_are_the_same_in_another_process():
    """The address of an object differs there."""
    texts = [rules.plain({"is_right": functools.partial(one_agent, x)}) for x in ({}, {})]
    assert texts[0] == texts[1] and " at 0x" not in texts[0]
    assert rules.plain({"answer": 1}) != rules.plain({"answer": 2})


def test_resumed_run_says_that_its_reward_has_changed(checkpoint, tmp_path, capsys):
    for n_train_steps, reward in ((1, variety), (2, Constant())):
        given = dict(n_train_steps=n_train_steps, reward=reward, resume=n_train_steps > 1)
        starter.main(**settings(checkpoint, tmp_path, **given))
    assert capsys.readouterr().out.count("resume: the reward changed") == 1
