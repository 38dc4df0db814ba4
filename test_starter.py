"""Tests of starter.py, each named for the mistake that it stops.

    pytest -m "not slow"     what to run while editing
    pytest                   everything; tests of vLLM and TRL are skipped, by name, where these are not installed
"""
import contextlib
import ast
import csv
import fcntl
import gc
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import hypothesis
import pytest
from hypothesis import strategies

import starter  # before torch: it sets variables that torch and vLLM read
from starter import InputError, Response, RunStopped

import ablate_kl
import bench
import checks
import crash_test
import fuzz_reward
import engines
import machine
import make_tiny
import verify_kl
import numpy
import safetensors.torch
import torch

HERE = Path(__file__).parent
CPU = torch.device("cpu")
needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed")
needs_trl = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="TRL is not installed")


# ----------------------------------------------------------------------------------------------------------------------
# Fixtures: checkpoints made here, with random weights

def save_checkpoint(folder, tie=True, seed=0, family="Qwen3", **changes):
    """An ordinary Hugging Face folder: the built-in model's architecture and tokenizer, random weights of a lively size."""
    import transformers
    tokenizer = make_tiny.make_tokenizer()
    sizes = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    extra = dict(head_dim=32) if family == "Qwen3" else {}
    config = getattr(transformers, f"{family}Config")(
        tie_word_embeddings=tie, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        initializer_range=0.15, **(dict(max_position_embeddings=256) | sizes | extra | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def policy_and_tokenizer(checkpoint):
    return starter.init_policy(checkpoint, CPU)


@pytest.fixture(scope="session")
def tiny_model():
    """The built-in checkpoint itself, built once for the repository."""
    return starter.machine.find_model("tiny")


def test_built_in_model_cannot_be_built(tmp_path):
    """The README's first command in a fresh clone: two steps of its training, its evaluation, its files."""
    folder = make_tiny.make_tiny(tmp_path / "tiny", steps=2)
    assert {"config.json", "model.safetensors", "retention.jsonl"} <= {path.name for path in folder.iterdir()}
    starter.init_policy(folder, CPU)


def variety(text, problem):
    """A reward that random weights can earn: distinct characters."""
    return len(set(text)) / 10


def settings(checkpoint, tmp_path, **changes):
    """main() on a small random checkpoint: everything real, seconds long."""
    return dict(model_id=str(checkpoint), engine="transformers", device="cpu", bf16=False, n_train_steps=3, rollout_batch_size=16,
                group_size=4, max_new_tokens=8, learning_rate=1e-3, n_train_problems=50, n_eval_problems=20, max_number=9,
                numbers_per_problem=(2, 3), countdown_prompt="make {target}: {numbers}", out_dir=str(tmp_path),
                eval_every=2, max_tokens_per_microbatch=200, save_model=False, reward=variety) | changes


def scalars(run_folder):
    """-> {tag: [(step, value)]} of a run's TensorBoard file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(run_folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def same_numbers(a, b):
    """Scalars of two runs, without those that measure time or memory."""
    keep = lambda run: {tag: values for tag, values in run.items() if not tag.startswith(("time/", "mem/")) and "tokens_per_s" not in tag}
    return keep(a) == keep(b)


# ----------------------------------------------------------------------------------------------------------------------
# The quick tests of starter.py itself

globals().update({name: value for name, value in vars(starter).items() if name.startswith("test_") and name != "test_functions"})


def test_quick_tests_pass_over_a_failure(capsys):
    starter.test_functions()
    printed = capsys.readouterr().out
    assert printed.count("\u2705") == sum(name.startswith("test_") for name in vars(starter)) - 1 and "All Tests Passed" in printed
    with mock.patch.object(starter, "masked_mean", lambda tensor, mask, dim=None: tensor.mean()), pytest.raises(AssertionError):
        starter.test_functions()


# ----------------------------------------------------------------------------------------------------------------------
# 1. Problems

def test_countdown_problem_has_no_solution_or_is_both_trained_and_held_out():
    settings = dict(numbers_per_problem=(2, 3, 4), max_number=20, max_target=100)
    train, held_out = (starter.tasks.make_countdown(500, **settings, held_out=part, seed=part) for part in (False, True))
    for problem in train + held_out:
        assert starter.reward_fn(f"<answer>{problem['solution']}</answer>", problem) == 1.0, problem
    key = lambda problem: (tuple(sorted(problem["numbers"])), problem["target"])
    assert not set(map(key, train)) & set(map(key, held_out)) and len(set(map(key, held_out))) == 500


def test_endless_search_when_too_few_problems_exist():
    with pytest.raises(InputError, match="only .* of 40 Countdown problems .* max_number = 2 .*use larger numbers"):
        starter.tasks.make_countdown(40, (2,), 2, 10, True, 0)


def test_gsm8k_answers_are_misread(tmp_path):
    rows = [("How many?", "2+2 = <<2+2=4>>4\n#### 1,234"), ("How cold?", "#### -12"), ("How much?", "#### 0.50")]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    problems, _ = starter.tasks.gsm8k_problems(SimpleNamespace(train_file=path, eval_file=path, n_eval_problems=9))
    right = [("1234", "1,234", "$1,234.00", "1234 clips", "= 1,234"), ("-12", "\u221212", "-12.0 degrees", "-12 C"), (".5", "$0.50", "0.5")]
    wrong = [("234", "1,23", "1234.5", "-1234"), ("12", "+12", "5-12"), ("50", "5", "0.05")]
    for problem, good, bad in zip(problems, right, wrong):
        assert [starter.reward_fn(f"<answer>{x}</answer>", problem) for x in good] == [1.0] * len(good), problem
        assert [starter.reward_fn(f"<answer>{x}</answer>", problem) for x in bad] == [0.1] * len(bad), problem


def test_problems_of_a_step_depend_on_the_steps_before_it():
    problems = list(range(10))
    steps = [starter.problems_of_step(problems, step, 4, seed=1) for step in range(5)]
    assert sorted(sum(steps, [])) == sorted(problems * 2)  # two epochs, each problem once an epoch
    assert starter.problems_of_step(problems, 3, 4, seed=1) == steps[3] != starter.problems_of_step(problems, 3, 4, seed=2)


# ----------------------------------------------------------------------------------------------------------------------
# 3. Rollout

def test_sampler_with_a_shared_cache_differs_from_generate(policy_and_tokenizer):
    policy, tokenizer = policy_and_tokenizer
    prompts = starter.prompt_ids_of([{"prompt": p} for p in ("make 3: 1 2", "sort 54321", "a")], tokenizer)
    ours = starter.rollout_with_transformers(policy, prompts, 1, 30, 0, 0, tokenizer.eos_token_id)
    for prompt, response in zip(prompts, ours):
        theirs = policy.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                                 max_new_tokens=30, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
        assert response.response_ids == theirs[0, len(prompt):].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampler_log_probs_are_not_the_trainers(policy_and_tokenizer, temperature):
    policy, tokenizer = policy_and_tokenizer
    prompts = starter.prompt_ids_of([{"prompt": p} for p in ("make 3: 1 2", "sort 54321", "a")], tokenizer)
    responses = starter.rollout_with_transformers(policy, prompts, 8, 20, temperature, 0, tokenizer.eos_token_id)
    assert [r.prompt_ids for r in responses] == [p for p in prompts for _ in range(8)]
    for r in responses:  # a plain forward pass of one sequence, no padding, no cache
        logits = policy(torch.tensor([r.prompt_ids + r.response_ids])).logits[0, len(r.prompt_ids) - 1:-1]
        plain = (logits / temperature).log_softmax(-1)[range(len(r.response_ids)), r.response_ids]
        torch.testing.assert_close(torch.tensor(r.log_probs), plain, rtol=0, atol=1e-4)
        assert r.finished == (r.response_ids[-1] == tokenizer.eos_token_id) and tokenizer.eos_token_id not in r.response_ids[:-1]
    assert any(r.finished for r in responses) and not all(r.finished for r in responses)


def test_window_of_a_model_is_ignored_while_sampling(tmp_path):
    """A prompt and 8 tokens fit into a window of 64, not into one of 16; layers that are not attention never do."""
    for window, kinds, words in ((64, None, None), (16, None, "a window of 16 tokens"), (None, ["linear_attention"] * 2, "layers that are not attention")):
        policy, _ = starter.init_policy(save_checkpoint(tmp_path / str(window), family="Mistral", sliding_window=window), CPU)
        policy.config.layer_types = kinds
        with pytest.raises(InputError, match=words) if words else contextlib.nullcontext():
            engines.check_attention(policy, 40)
    starter.main(**settings(save_checkpoint(tmp_path / "ok", family="Mistral", sliding_window=64), tmp_path, n_train_steps=1))
    with pytest.raises(InputError, match="a window of 16 tokens"):
        starter.main(**settings(tmp_path / "16", tmp_path))


def test_response_depends_on_what_else_is_sampled(policy_and_tokenizer):
    """Response j of prompt i draws with seed + i * group_size + j: alone, or as one of many."""
    policy, tokenizer = policy_and_tokenizer
    prompts = starter.prompt_ids_of([{"prompt": p} for p in ("make 3: 1 2", "sort 54321", "a")], tokenizer)
    sample = lambda prompts, seed: [r.response_ids for r in starter.rollout(policy, None, prompts, group_size=4, max_new_tokens=20, temperature=1.0,
                                                                            seed=seed, eos_token_id=tokenizer.eos_token_id)]
    whole = sample(prompts, 7)
    assert whole[4:] == sample(prompts[1:], 11) and whole[8:] == sample(prompts[2:], 15) and len(set(map(tuple, whole))) > 6
    many = lambda prompts, seed: [r.response_ids for r in starter.rollout(policy, None, prompts, group_size=300, max_new_tokens=3, temperature=1.0,
                                                                          seed=seed, eos_token_id=tokenizer.eos_token_id)]
    assert many(prompts[:2], 7)[300:] == many(prompts[1:2], 307)  # the second prompt is in another chunk


@pytest.mark.parametrize("vocabulary", [1, 5, 256, 257, 3001])
def test_token_is_drawn_from_another_distribution(vocabulary):
    """Against the inverse of the cumulative distribution in float64; the ends of the interval, and tokens that have no probability."""
    logits = 3 * torch.randn(400, vocabulary, generator=torch.Generator().manual_seed(0))
    if vocabulary > 5:
        logits[:, ::7] = -1e4
    uniform = torch.rand(400, 1, generator=torch.Generator().manual_seed(1))
    uniform[0], uniform[1] = 0.0, 1 - 2.0**-24
    for temperature in (1.0, 0.5):
        tokens, log_probs = engines.draw_tokens(logits, uniform, temperature, logits_at_once=33 * vocabulary)
        plain = (logits.double() / temperature).log_softmax(1)
        torch.testing.assert_close(log_probs.double(), plain.gather(1, tokens), rtol=0, atol=1e-5)
        upper = plain.exp().cumsum(1).gather(1, tokens)
        lower = upper - plain.exp().gather(1, tokens)
        assert ((lower - 1e-5 <= uniform) & (uniform <= upper + 1e-5)).all() and (log_probs > -100).all()
    tokens, log_probs = engines.draw_tokens(logits, uniform, 0)
    assert (tokens[:, 0] == logits.argmax(1)).all()
    torch.testing.assert_close(log_probs.double(), logits.double().log_softmax(1).gather(1, tokens), rtol=0, atol=1e-5)


def test_head_holds_more_with_more_tokens():
    """The largest tensor that is made, forward and backward, with a reference, from 2,048 to 65,536 tokens: one slice of logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            self.most = max([self.most, *(x.numel() for x in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(x, torch.Tensor))])
            return out

    for n in (2_048, 16_384, 65_536):
        hidden, weight, other = torch.randn(n, 4, requires_grad=True), torch.randn(3_000, 4, requires_grad=True), torch.randn(n, 4)
        with Largest() as seen:
            log_prob, kl, _, _ = starter.ChunkedHead.apply(hidden, weight, torch.arange(n) % 3_000, 1.0, other, weight.detach())
            (log_prob + kl).sum().backward()
        assert 2**21 < seen.most <= 2**22, n


@pytest.mark.parametrize("implementation, multiplied_out", [("starter", True), ("starter", False), ("sdpa", False)])
@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Mistral"])
def test_shared_prompts_change_the_log_probs_or_their_gradient(tmp_path, family, implementation, multiplied_out, monkeypatch):
    """Ragged prompts, some shared, against one forward pass a sequence; with every way to attend; Mistral has a window and shares nothing."""
    import shared_prompts
    monkeypatch.setattr(shared_prompts, "MULTIPLIED_OUT", {torch.float64: 10**6 * multiplied_out})
    policy, tokenizer = starter.init_policy(save_checkpoint(tmp_path / "m", family=family), CPU)
    policy, rng = policy.double(), random.Random(0)
    policy.set_attn_implementation(implementation)
    prompts = [rng.choices(range(5, 40), k=n) for n in (1, 9, 4)]
    responses = [Response(prompts[i % 3], rng.choices(range(5, 40), k=n), [0.0] * n, True) for i, n in enumerate((1, 12, 5, 3, 7, 2))]
    plain = torch.stack([policy(torch.tensor([r.prompt_ids + r.response_ids])).logits[0, len(r.prompt_ids) - 1:-1].log_softmax(-1)
                         [range(len(r.response_ids)), r.response_ids].sum() for r in responses])
    batch, seen = starter.make_batch(responses, torch.zeros(6), "cpu"), []
    hook = policy.get_input_embeddings().register_forward_hook(lambda module, args, out: seen.append(args[0].numel()))
    ours = starter.get_response_log_probs(policy, batch["input_ids"], batch["labels"], batch["response_mask"], prompts=batch["prompts"]).sum(1)
    hook.remove()
    assert sum(seen) == 6 * 12 + (3 if implementation == "starter" and family != "Mistral" else 6) * 8  # each prompt is read once
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-5)  # the models' norms are float32 inside
    upstream = torch.randn(6, generator=torch.Generator().manual_seed(0)).double()
    for mine, theirs in zip(*(torch.autograd.grad((x * upstream).sum(), list(policy.parameters())) for x in (ours, plain))):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


def test_bf16_gradient_is_off_by_more_than_its_rounding(checkpoint):
    """The step's gradient in float32 and under bf16 autocast against float64: 1e-5 and 5 % of its norm."""
    policy, tokenizer = starter.init_policy(checkpoint, CPU)
    responses = starter.rollout(policy, None, starter.prompt_ids_of([{"prompt": f"make {n}: 1 2"} for n in range(8)], tokenizer), group_size=8,
                                max_new_tokens=16, temperature=1.0, seed=0, eos_token_id=tokenizer.eos_token_id)
    gradients = {}
    for name, dtype, bf16 in (("exact", torch.float64, False), ("float32", torch.float32, False), ("bf16", torch.float32, True)):
        model = starter.copy.deepcopy(policy).to(dtype)
        batch = starter.make_batch(responses, torch.linspace(-1, 1, 64).roll(7), "cpu")
        batch["weights"] = starter.token_weights(batch["response_mask"], "dapo", 16)
        starter.grpo_microbatch_step(model, batch, 0.2, bf16=bf16)
        gradients[name] = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    error = {name: ((gradient - gradients["exact"]).norm() / gradients["exact"].norm()).item() for name, gradient in gradients.items()}
    print(error)
    assert error["float32"] < 1e-5 and 1e-4 < error["bf16"] < 0.05


def test_long_rows_are_scored_otherwise_than_short_ones(checkpoint):
    """Rows of 300 tokens after a prompt of 10 take torch's fused attention, shorter ones do not: in float32, and within bf16's rounding."""
    policy, _ = starter.init_policy(save_checkpoint(checkpoint / "long", max_position_embeddings=1024), CPU)
    rng = random.Random(0)
    prompt = rng.choices(range(5, 40), k=11)
    responses = [Response(prompt, rng.choices(range(5, 40), k=n), [0.0] * n, True) for n in (300, 40)]
    batch = starter.make_batch(responses, torch.zeros(2), "cpu")
    score = lambda b, bf16: starter.get_response_log_probs(policy, b["input_ids"], b["labels"], b["response_mask"], bf16=bf16, prompts=b["prompts"])
    plain = policy(torch.tensor([prompt + responses[0].response_ids])).logits[0, 10:-1].log_softmax(-1)[range(300), responses[0].response_ids]
    torch.testing.assert_close(score(batch, False)[0], plain, rtol=0, atol=1e-4)
    assert (score(batch, True)[0] - plain).abs().mean() < 0.1
    short = {name: x[:, :40] if name != "prompts" else x for name, x in batch.items()}
    torch.testing.assert_close(score(short, False), score(batch, False)[:, :40], rtol=0, atol=1e-4)


def test_head_in_bf16_rounds_rotary_positions():
    before, x = "highest", torch.full((4, 1), 1001.0)
    torch.set_float32_matmul_precision(before)  # whatever a test before this one left
    with machine.matmuls_in(torch.float32):
        assert torch.get_float32_matmul_precision() == before
    with machine.matmuls_in(torch.bfloat16):
        assert torch.get_float32_matmul_precision() == "medium"
    with pytest.raises(RuntimeError), machine.matmuls_in(torch.bfloat16):
        raise RuntimeError("out of memory")
    assert torch.get_float32_matmul_precision() == before and (x @ torch.ones(1, 4) == 1001).all()


def test_samples_do_not_follow_the_policys_distribution(policy_and_tokenizer):
    policy, tokenizer = policy_and_tokenizer
    prompt, = starter.prompt_ids_of([{"prompt": "a"}], tokenizer)
    responses = starter.rollout_with_transformers(policy, [prompt], 4000, 1, 1.0, 0, tokenizer.eos_token_id)
    counts = torch.bincount(torch.tensor([r.response_ids[0] for r in responses]), minlength=len(tokenizer))
    expected = 4000 * policy(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    large = expected > 5
    chi2 = ((counts - expected)[large].square() / expected[large]).sum().item()
    assert chi2 < large.sum() + 5 * math.sqrt(2 * large.sum())


# ----------------------------------------------------------------------------------------------------------------------
# 4. Reward

def test_division_by_zero_has_a_value():
    assert starter.reward_fn("<answer>7/(5-5)</answer>", {"numbers": [5, 5, 7], "target": 0}) == 0.1
    assert starter.reward_fn("<answer>7*(5-5)</answer>", {"numbers": [5, 5, 7], "target": 0}) == 1.0


COUNTDOWN, NUMBER, TEXT = fuzz_reward.PROBLEMS
# what stands between the tags, and how often; none of these is the answer to any of the three problems
HOSTILE = [
    ("(", 10**6), ("-", 10**6), ("[", 10**6), ("3(", 10**6), ("(3", 60), ("3(((3(3(", 25), ("(3(***", 33), ("-(", 10**5), ("((5))", 20), ("-" * 150 + "3", 1),
    ("9**", 10**5), ("9**9**9", 1), ("3**22222222", 1), ("999999999*", 19),
    ("9" * 199, 1), ("1" * 4301, 1), ("1", 10**7), ("1/", 10**6), ("1e9", 10**5),
    ("+0", 10**5), ("3+", 10**5), ("()", 10**5), ("1/0", 1), ("0/0+", 40), ("3/(5-5)+7", 1), ("3//5", 1),
    ("03*5+7", 1), ("+3*5+7", 1), ("3*5+7+0", 1), ("3*5+7+3-3", 1), ("5+5+5+7", 1), ("3 *\n5+7", 1), ("3;5", 1), ("3*5+7#", 1),
    ("\u0663*\u0665+\u0667", 1), ("\uff13*\uff15+\uff17", 1), ("\uff11\uff12\uff13\uff14.\uff15", 1), ("\u0661,\u0662\u0663\u0664.\u0665", 1),
    ("\u00b2", 100), ("\u2167", 100), ("\u2212", 10**6), ("\u200b", 10**6), ("\u3000", 10**6), ("\ufeff1", 3), ("\U0001d7db*\U0001d7dd", 1), ("\u202e7+5*3", 1),
    ("\0", 1), ("3*5+7\0", 1), ("\0", 10**6), ("\ud800", 1), ("3*5+7\udfff", 1), ("\udcff", 10**6), ("\ud83d\ude00", 10**5), ("a\u0301", 10**6),
    ("<answer>", 10**5), ("</answer>", 10**5), ("<answer>3</answer>", 10**5), ("</answer><answer>", 10**5), ("<answer", 10**6), ("nswer>", 10**6),
    ("1,", 10**6), ("1,,", 60), (".", 10**6), ("1.", 60), ("-$", 10**6), ("$", 199), ("-.", 1), ("1.5.", 50), ("\n", 10**6), ("3 5 7 22", 10**5), ("nan", 1), ("inf", 1),
    ("__import__('os').abort()", 1), ("[].__class__", 1), ("lambda:3", 1), ("{}.x", 1), ("'%s'%3", 1), ("1 if 3 else 5", 1), ("3and 22", 1), ("22j", 1), ("0x16", 1), ("2_2", 1),
    ("\U0001f600", 2_500_000), ("\U0001f600", 10**7), ("\U0001f600<answer>3", 10**6), ("\U0001d7db", 10**6), ("x" * 10**6 + "\U0001f600", 2),
]

CHARACTERS = strategies.characters(exclude_categories=()) | strategies.sampled_from([*"".join(fuzz_reward.PIECES)])


def harm(text):
    """-> what is wrong with the reward of a text, for each problem: an exception, a value, a time, an allocation."""
    return [(wrong, problem) for problem in fuzz_reward.PROBLEMS for wrong in (fuzz_reward.examine(text, problem)[0],) if wrong]


def test_reward_raises_or_swells_on_hostile_text():
    sizes = [(piece, n) for piece, times in HOSTILE for n in sorted({times, min(times, 190_000 // len(piece))})]  # 190,000: both tags are read
    for piece, times in sizes:
        body = piece * times
        for text in (body, f"<answer>{body}</answer>", f"<answer>3*5+7</answer> <answer>{body}</answer>"):
            assert not harm(text), (harm(text), piece[:50], times)
            assert all(starter.reward_fn(text, problem) < 1 for problem in fuzz_reward.PROBLEMS), (piece[:50], times)
        for solution, problem in (("3*5+7", COUNTDOWN), ("1234.5", NUMBER), ("a b", TEXT)):
            assert starter.reward_fn(f"{body}<answer> {solution}\n</answer>", problem) == 1.0, (piece[:50], times)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=300)
@hypothesis.given(strategies.text(CHARACTERS, max_size=300) | strategies.text(CHARACTERS, min_size=50, max_size=300), strategies.integers(0, 3))
def test_reward_raises_or_swells_on_any_text(text, tags):
    assert not harm("<answer>" * (tags & 1) + text + "</answer>" * (tags >> 1)), text


@hypothesis.settings(deadline=None, derandomize=True, max_examples=300)
@hypothesis.given(strategies.lists(strategies.tuples(strategies.sampled_from(fuzz_reward.PIECES) | strategies.text(CHARACTERS, max_size=9),
                                                     strategies.sampled_from([1, 1, 1, 2, 60, 250, 10**4, 3 * 10**5])), max_size=12))
def test_reward_raises_or_swells_on_repeated_pieces(pieces):
    text = "".join(piece * times for piece, times in pieces)
    assert not harm(f"<answer>{text}</answer>") + harm(text), pieces


def test_reward_raises_where_the_stack_is_nearly_full():
    def deeper(n):
        return deeper(n - 1) if n else starter.reward_fn(f"<answer>{'-' * 190}3</answer>", COUNTDOWN)
    depth = next(n for n in itertools.count(1) if not sys._getframe(n).f_back)
    for left in (400, 150, 120, 100):
        assert deeper(sys.getrecursionlimit() - depth - left) == 0.1, left


def expressions():
    """Strings of arithmetic, most of them well-formed: numbers, signs, parentheses, spaces."""
    number = strategies.sampled_from(["3", "5", "7", "0", "22", "00", "07", "999999999", "1" * 12])
    operator = strategies.sampled_from([*"+-*/", " + ", " * ", "**", "//", " "])
    return strategies.recursive(number, lambda inner: strategies.builds("({})".format, inner) | strategies.builds("-{}".format, inner)
                                | strategies.builds("{}{}{}".format, inner, operator, inner), max_leaves=30)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=500)
@hypothesis.given(expressions() | strategies.text("357()+-*/ ", max_size=12))
def test_value_or_numbers_differ_from_a_second_parsers(text):
    parsed = starter.arithmetic(text)
    value, used = parsed or (22, [3, 5, 7])  # what is refused here must not solve there
    problem = {"numbers": used, "target": value}
    assert fuzz_reward.solves(f"<answer>{text}</answer>", problem) == bool(parsed), (text, parsed)
    assert not parsed or starter.reward_fn(f"<answer>{text}</answer>", problem) == 1.0, text
    assert not parsed or starter.reward_fn(f"<answer>{text}</answer>", problem | {"target": value + 1}) == 0.1, text


def test_countdown_is_solved_by_other_expressions_than_a_second_parsers():
    solved = 0
    for numbers in itertools.permutations("357"):
        for (x, y), shape in itertools.product(itertools.product("+-*/", repeat=2), ("{}{}{}{}{}", "({}{}{}){}{}", "{}{}({}{}{})", "-({}{}{}){}{}", "{}{}-{}{}{}")):
            text = f"<answer>{shape.format(numbers[0], x, numbers[1], y, numbers[2])}</answer>"
            for target in (22, 1, -22, 26, 50):
                problem = COUNTDOWN | {"target": target}
                assert (starter.reward_fn(text, problem) == 1.0) == fuzz_reward.solves(text, problem), text
                solved += fuzz_reward.solves(text, problem)
    assert solved > 40  # else all would agree on nothing


@hypothesis.settings(deadline=None, derandomize=True, max_examples=300)
@hypothesis.given(strategies.decimals(-10**9, 10**9, places=2), strategies.sampled_from(["{:.2f}", "{:,.2f}", "so it is {:,.2f}", "{:,.3f} dollars"]))
def test_number_is_read_otherwise_than_it_is_written(number, style):
    problem = {"answer": f"{number:,.2f}"}
    text = f"<answer>9</answer><answer> {style.format(number)} </answer> 9"
    assert starter.reward_fn(text, problem) == 1.0
    assert starter.reward_fn(text.replace("-", "\u2212"), problem) == 1.0
    assert starter.reward_fn(text, {"answer": str(number + 1)}) == 0.1


def test_answer_before_a_long_ending_is_lost_or_read_for_ever():
    assert starter.reward_fn("<answer>3*5+7</answer>" + "\U0001f600" * 199_000, COUNTDOWN) == 1.0
    assert starter.reward_fn("<answer>3*5+7</answer>" + "\U0001f600" * 200_000, COUNTDOWN) == 0.0
    assert starter.reward_fn(f"<answer>{'x' * 150_000}</answer>", {"answer": "x" * 150_000}) == 1.0


def test_text_that_fuzzing_found_breaks_a_limit():
    lines = fuzz_reward.CORPUS.read_text().splitlines()
    assert 50 < len(lines) <= 300 and fuzz_reward.CORPUS.stat().st_size <= 100_000
    assert not [(text, harm(text)) for text in map(json.loads, lines) if harm(text)]
    assert {starter.reward_fn(json.loads(line), COUNTDOWN) for line in lines} == {0.0, 0.1, 1.0}


def test_checker_of_the_fuzzing_sees_nothing(monkeypatch):
    harmful = {"raised": lambda text, problem: 1 / 0, "returned": lambda text, problem: 0.5, "allocated": lambda text, problem: 0.0 * len(bytes(11 * 10**6)),
               "took": lambda text, problem: 0.0 * sum(range(10**6)), "unlike the checker": lambda text, problem: 1.0}
    for what, reward in harmful.items():
        monkeypatch.setattr(starter, "reward_fn", reward)
        assert what in fuzz_reward.examine("<answer>3*5</answer>", COUNTDOWN)[0], what


def test_published_fuzzing_broke_a_limit_or_is_short():
    header, *rows = [line.split(",") for line in re.sub('"(.*?)"', lambda m: m[1].replace(",", ""), fuzz_reward.RESULTS.read_text()).splitlines()]
    row = dict(zip(header, rows[-1]))
    assert int(row["inputs"]) >= 10**6 and row["broken"] == "0" and float(row["slowest in ms"]) <= 10 and float(row["largest allocation in MB"]) <= 10
    assert row["command"] == f"python fuzz_reward.py --runs {row['inputs']}" and 0 < int(row["solved"]) < int(row["with an answer"])
    assert int(row["corpus size"]) == len(fuzz_reward.CORPUS.read_text().splitlines())


def test_response_is_scored_against_another_groups_problem(policy_and_tokenizer):
    _, tokenizer = policy_and_tokenizer
    problems = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    responses = [Response([0], tokenizer(text)["input_ids"], [], True) for text in ("x", "y", "z", "u", "v", "w")]
    c = SimpleNamespace(reward_seconds=1.0, reward_if_broken=None)
    texts, rewards = starter.score(responses, problems, tokenizer, lambda text, problem: float(problem["answer"]) + (text == "v"), c)
    assert rewards.tolist() == [1, 1, 1, 2, 3, 2] and texts == ["x", "y", "z", "u", "v", "w"]


@pytest.mark.parametrize("reward, message", [
    (lambda text, problem: 1 / 0, "reward raised ZeroDivisionError: division by zero on the text"),
    (lambda text, problem: math.nan, "reward returned nan on the text"),
    (lambda text, problem: [1.0, 2.0], r"reward returned \[1.0, 2.0\] on the text"),
    (lambda text, problem: None, "reward returned None on the text"),
    (lambda text: 1.0, "reward raised TypeError"),
])
def test_broken_reward_function_reaches_training(checkpoint, tmp_path, reward, message):
    with mock.patch.object(starter, "init_policy", side_effect=AssertionError("a model was loaded")):
        with pytest.raises(InputError, match=message):
            starter.main(**settings(checkpoint, tmp_path, reward=reward))


# ----------------------------------------------------------------------------------------------------------------------
# 5., 8. Advantages and loss against plain loops in float64

def loops_advantages(rewards, group_size, eps, by_std):
    out = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start:start + group_size]
        mean = sum(group) / group_size
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (group_size - 1))
        out += [0.0 if min(group) == max(group) else (r - mean) / (std + eps if by_std else 1) for r in group]
    return out


RULES = {  # rule: value and slope, by hand; c: target 0.3, threshold 0.2, max_new_tokens 10
    None: lambda v, n: (v, 1.0),
    "clip": lambda v, n: (min(v, 0.2), float(v < 0.2)),
    "clip_sound": lambda v, n: (v, 1.0),
    "sigmoid": lambda v, n: ((s := 1 / (1 + math.exp(0.3 - v))) * v, s + v * s * (1 - s)),
    "sigmoid_sound": lambda v, n: (max(v - 0.3, 0) + 0.03 * math.log1p(math.exp(-abs(v - 0.3) / 0.03)),
                                   1 / (1 + math.exp(min((0.3 - v) / 0.03, 700)))),
    "length_normalized": lambda v, n: (v / n, 1 / n),
    "length_normalized_sound": lambda v, n: (v / 10, 1 / 10)}
VALUES = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}


def loops_loss(batch, average, max_new_tokens, clip_low, clip_high, importance_cap, kl_coef, estimator, gradient, ratio_cap, place, rule):
    """Value and gradient (with respect to each policy log-prob) of the step's loss, written out by hand: -> float, rows of floats."""
    lengths = [sum(row) for row in batch["mask"]]
    tau = 0.2 if rule == "clip_sound" else math.inf
    value, grads = 0.0, []
    for b, row in enumerate(batch["mask"]):
        grads.append([])
        cut = lambda x: max(-tau, min(tau, x))
        rows = [(t, *(batch[name][b][t] for name in ("policy", "old", "ref", "rollout"))) for t, on in enumerate(row) if on]
        paid = {t: RULES[rule](VALUES[estimator](cut(pi - ref) if gradient == "reverse" else pi - ref), lengths[b])[0] for t, pi, _, ref, _ in rows}
        cost = {t: RULES[rule](VALUES[estimator](cut(sampler - ref)), lengths[b])[0] for t, _, _, ref, sampler in rows}
        for t, on in enumerate(row):
            if not on:
                grads[b].append(0.0)
                continue
            pi, old, ref, sampler = (batch[name][b][t] for name in ("policy", "old", "ref", "rollout"))
            weight = {"grpo": 1 / lengths[b] / len(lengths), "dapo": 1 / sum(lengths), "dr_grpo": 1 / (len(lengths) * max_new_tokens)}[average]
            A, ratio = batch["advantages"][b], math.exp(pi - old)
            if place == "reward":  # of this token and later ones; with a rule, of the whole response
                A -= kl_coef * sum(x for u, x in cost.items() if u >= t or rule)
            importance = 1.0 if importance_cap is None else min(math.exp(old - sampler), importance_cap)
            if A >= 0:
                loss, grad = (-A * (1 + clip_high), 0.0) if ratio > 1 + clip_high else (-A * ratio, -A * ratio)
            else:
                loss, grad = (-A * (1 - clip_low), 0.0) if ratio < 1 - clip_low else (-A * ratio, -A * ratio)
            d = pi - ref
            own = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[estimator] if gradient == "as_written" else min(ratio, ratio_cap) * cut(d)
            slope = RULES[rule](VALUES[estimator](cut(d) if gradient == "reverse" else d), lengths[b])[1] * own
            if place == "loss_to_go":
                slope += min(ratio, ratio_cap) * sum(x for u, x in paid.items() if u > t)
            on = place != "reward"
            value += weight * (importance * loss + on * kl_coef * paid[t])
            grads[b].append(weight * (importance * grad + on * kl_coef * slope))
    return value, grads


def test_loss_or_its_gradient_differs_from_plain_loops():
    rng = random.Random(0)
    c = SimpleNamespace(kl_target=0.3, kl_clip_threshold=0.2, max_new_tokens=10)
    grid = list(itertools.product(("grpo", "dapo", "dr_grpo"), ("k1", "k2", "k3"), ("reverse", "as_written"), (None, 1.5),
                                  (1.2, math.inf), ("loss", "loss_to_go", "reward"), RULES))
    for number, (average, estimator, gradient, importance_cap, ratio_cap, place, rule) in enumerate(rng.sample(grid, 500)):
        groups, group_size, T = rng.randint(1, 3), rng.randint(2, 4), rng.randint(1, 6)
        B = groups * group_size
        lengths = [rng.randint(0 if number % 5 == 0 else 1, T) for _ in range(B)]
        start = [rng.randint(0, T - n) for n in lengths]
        mask = [[start[b] <= t < start[b] + lengths[b] for t in range(T)] for b in range(B)]
        if not any(lengths):
            continue
        noise = lambda scale: [[rng.gauss(-2, scale) for _ in range(T)] for _ in range(B)]
        batch = {"mask": mask, "policy": noise(0.4), "old": noise(0.4), "ref": noise(1.0), "rollout": noise(0.4)}
        rewards = [rng.choice([0.0, 0.1, 1.0]) for _ in range(B)]
        by_std = rng.random() < 0.5
        batch["advantages"] = loops_advantages(rewards, group_size, 1e-6, by_std)
        clip_low, clip_high, kl_coef = rng.choice([0.1, 0.2]), rng.choice([0.2, 0.3]), rng.choice([0.0, 0.1, 1.0])
        value, grads = loops_loss(batch, average, 10, clip_low, clip_high, importance_cap, kl_coef, estimator, gradient, ratio_cap, place, rule)
        grads = [g if any(row) else [0.0] * T for g, row in zip(grads, mask)]

        tensor = lambda name: torch.tensor(batch[name], dtype=torch.float64).masked_fill(~torch.tensor(mask), math.nan)  # never read
        advantages, _ = starter.compute_group_normalized_advantages(torch.tensor(rewards, dtype=torch.float64), group_size, 1e-6, by_std)
        policy, on = tensor("policy").requires_grad_(), torch.tensor(mask)
        importance = None if importance_cap is None else (tensor("old") - tensor("rollout")).exp().clamp(max=importance_cap)
        kl_settings = dict(kl_estimator=estimator, kl_rule=rule and partial(starter.TERM_RULES[rule], c=c),
                           kl_log_ratio_cap=0.2 if rule == "clip_sound" else math.inf)
        advantages = advantages[:, None]
        if place == "reward":
            advantages = starter.put_kl_into_advantages(advantages, tensor("rollout"), tensor("ref"), on, kl_coef, **kl_settings)
        loss, _ = starter.compute_loss(
            advantages, policy, tensor("old"), clip_low, tensor("ref"), kl_coef, mask=on, clip_range_high=clip_high,
            importance_weights=importance, kl_gradient=gradient, kl_ratio_cap=ratio_cap, kl_in=place, **kl_settings)
        weights = starter.token_weights(on, average, 10).double()
        total = torch.where(on, loss * weights, 0.0).sum()
        total.backward()
        # token_weights is float32, as in training: 1e-7 relative
        told = (average, estimator, gradient, importance_cap, ratio_cap, place, rule)
        torch.testing.assert_close(total.item(), value, rtol=1e-6, atol=1e-7, msg=lambda m: f"{told}: {m}")
        torch.testing.assert_close(policy.grad, torch.tensor(grads, dtype=torch.float64), rtol=1e-6, atol=1e-8, msg=lambda m: f"{told}: {m}")


def test_metadata_counts_padding_or_reports_one_side_of_the_clip_as_the_other():
    ratio = torch.tensor([[0.5, 0.5, 1.5, 9.9], [1.5, 1.0, 0.5, 9.9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    loss, metadata = starter.compute_loss(torch.tensor([[1.0], [-1.0]]), ratio.log(), torch.zeros(2, 4), 0.2, 0.5 * ratio.log(), 0.1, mask=mask)
    assert metadata["clip_frac_high"] == pytest.approx(1 / 6) and metadata["clip_frac_low"] == pytest.approx(1 / 6)
    assert metadata["clip_frac"] == pytest.approx(2 / 6) and metadata["ratio_mean"] == pytest.approx(5.5 / 6)
    d = [0.5 * math.log(r) for r in (0.5, 0.5, 1.5, 1.5, 1.0, 0.5)]
    assert metadata["kl_penalty_mean"] == pytest.approx(sum(math.exp(-x) - 1 + x for x in d) / 6, rel=1e-5)
    for name, value in (("kl_k1", lambda x: x), ("kl_k2", lambda x: x * x / 2), ("kl_k3", lambda x: math.exp(-x) - 1 + x)):
        assert metadata[name] == pytest.approx(sum(map(value, d)) / 6, rel=1e-5)
    assert metadata["kl_per_token"] == metadata["kl_k3"]  # without the reference's hidden states the exact one is not known
    exact_kl = torch.tensor([[1.0, 2, 3, 99], [4, 5, 6, 99]])
    _, metadata = starter.compute_loss(torch.ones(2, 1), ratio.log(), torch.zeros(2, 4), 0.2, 0.5 * ratio.log(), 0.1, mask=mask, exact_kl=exact_kl)
    assert metadata["kl_per_token"] == 3.5 and metadata["kl_penalty_mean"] == metadata["kl_k3"]


@needs_trl
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("beta, bias_correction", [(0.0, False), (0.1, False), (0.1, True)])
def test_loss_or_gradient_differs_from_trl(loss_type, beta, bias_correction):
    """TRL's own _compute_loss on the same tensors. Its beta term is k3 as written, or r * k3, whose gradient is ours exactly."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    generator = torch.Generator().manual_seed(0)
    B, T = 8, 7
    policy, old, ref, sampler = (-2 + 0.3 * torch.randn(B, T, generator=generator) for _ in range(4))
    lengths = torch.tensor([7, 1, 4, 3, 7, 2, 5, 6])
    mask = torch.arange(T)[None] < lengths[:, None]
    advantages, importance = torch.randn(B, generator=generator), (old - sampler).exp().clamp(max=2.0)[:, :]
    theirs_in = policy.clone().requires_grad_()
    trainer = mock.MagicMock(
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=beta,
        loss_type=loss_type, epsilon_low=0.2, epsilon_high=0.28, use_vllm=True, vllm_importance_sampling_correction=True,
        max_completion_length=T, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False)
    trainer.args = SimpleNamespace(use_bias_correction_kl=bias_correction, delta=None, steps_per_generation=1)
    trainer.accelerator.num_processes, trainer.accelerator.gather = 1, lambda x: x
    trainer._get_per_token_logps_and_entropies.return_value = (theirs_in, torch.ones(B, T), None)
    inputs = dict(prompt_ids=torch.zeros(B, 1, dtype=torch.long), prompt_mask=torch.ones(B, 1, dtype=torch.long),
                  completion_ids=torch.zeros(B, T, dtype=torch.long), completion_mask=mask.long(), advantages=advantages,
                  old_per_token_logps=old, ref_per_token_logps=ref, importance_sampling_ratio=importance, num_items_in_batch=mask.sum())
    theirs = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    theirs.backward()

    ours_in = policy.clone().requires_grad_()
    loss, _ = starter.compute_loss(advantages[:, None], ours_in, old, 0.2, ref, beta, mask=mask, clip_range_high=0.28, kl_estimator="k3",
                                   importance_weights=importance, kl_gradient="reverse" if bias_correction else "as_written",
                                   kl_ratio_cap=math.inf)
    ours = (loss * starter.token_weights(mask, loss_type, T)).sum()
    ours.backward()
    torch.testing.assert_close(ours_in.grad, theirs_in.grad, rtol=1e-5, atol=1e-7)
    if not bias_correction:  # r * k3 shows another value than k3
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# 8. KL: gradients against exact enumeration, with negative controls

def tables(V=5, seed=0):
    """-> logits of policy, reference and old policy, (V,) float64."""
    return torch.randn(3, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def exact_gradient(kind, logits, ref, old):
    leaf = logits.clone().requires_grad_()
    log_pi, log_ref, log_old = leaf.log_softmax(0), ref.log_softmax(0), old.log_softmax(0)
    kl = {"reverse": (log_pi.exp() * (log_pi - log_ref)).sum(), "forward": (log_ref.exp() * (log_ref - log_pi)).sum(),
          "old": (log_old.exp() * (log_old - log_pi)).sum()}[kind]
    return torch.autograd.grad(kl, leaf)[0]


ROWS = [  # estimator, gradient, off-policy?, cap -> what its expected gradient is, exactly
    *((e, "reverse", off, math.inf, "reverse") for e in ("k1", "k2", "k3") for off in (False, True)),
    ("k2", "as_written", False, math.inf, "reverse"), ("k3", "as_written", False, math.inf, "forward"),
    ("k1", "as_written", False, math.inf, "zero"), ("k1", "as_written", True, math.inf, "minus old")]


@pytest.mark.parametrize("estimator, gradient, off, cap, target", ROWS)
def test_kl_gradient_is_not_the_one_claimed(estimator, gradient, off, cap, target):
    logits, ref, old = tables()
    old = old if off else logits
    ours = starter.kl_gradient_by_enumeration(logits, ref, old, kl_estimator=estimator, kl_gradient=gradient, kl_ratio_cap=cap)
    exact = {"zero": torch.zeros(5, dtype=torch.float64), "minus old": -exact_gradient("old", logits, ref, old)}.get(target)
    exact = exact_gradient(target, logits, ref, old) if exact is None else exact
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator, gradient, off, cap", [
    ("k1", "as_written", False, math.inf), ("k1", "as_written", True, math.inf), ("k2", "as_written", True, math.inf),
    ("k3", "as_written", False, math.inf), ("k3", "as_written", True, math.inf), ("k3", "reverse", True, 1.05)])
def test_negative_control_comes_out_right(estimator, gradient, off, cap):
    errors = []
    for seed in range(10):
        logits, ref, old = tables(seed=seed)
        exact = exact_gradient("reverse", logits, ref, old)
        ours = starter.kl_gradient_by_enumeration(logits, ref, old if off else logits, kl_estimator=estimator, kl_gradient=gradient, kl_ratio_cap=cap)
        errors.append(((ours - exact).norm() / exact.norm()).item())
    assert sorted(errors)[5] > 0.1


@pytest.mark.parametrize("gradient, fixed_point", [
    ("reverse", lambda ref, R, beta: (ref * torch.exp(R / beta)) / (ref * torch.exp(R / beta)).sum()),
    ("as_written", lambda ref, R, beta: None)])
def test_bandit_settles_elsewhere_than_the_theory_says(gradient, fixed_point):
    """Stationary policy of a bandit: ref * exp(R / beta) with the reverse gradient; ref / (1 - (R - mean R) / beta) with k3 as written."""
    ref_logits, R, beta = tables(4, seed=3)[1], torch.tensor([0.0, 0.3, 0.6, 1.0], dtype=torch.float64), 1.5
    logits = ref_logits.clone().requires_grad_()
    for _ in range(1500):
        log_pi = logits.log_softmax(0)
        pi = log_pi.exp().detach()
        loss, _ = starter.compute_loss((R - (pi * R).sum())[None], log_pi[None], log_pi[None].detach(), 0.2, ref_logits.log_softmax(0)[None],
                                       beta, kl_gradient=gradient, kl_ratio_cap=math.inf)
        grad, = torch.autograd.grad((loss[0] * pi).sum(), logits)
        logits.data -= 2.0 * grad
    pi, ref = logits.detach().softmax(0), ref_logits.softmax(0)
    expected = fixed_point(ref, R, beta)
    expected = ref / (1 - (R - (pi * R).sum()) / beta) if expected is None else expected
    torch.testing.assert_close(pi, expected, rtol=0, atol=1e-8)


def test_k3_is_negative_or_explodes_near_zero():
    d = torch.linspace(-1e-3, 1e-3, 2001)
    assert (starter.compute_kl_divergence(d, torch.zeros(()), "k3") >= 0).all()
    policy = torch.tensor([[-20.0, -100.0, -30.0]], requires_grad=True)  # the product r * k3 gives 0 and nan here
    loss, metadata = starter.compute_loss(torch.zeros(1, 1), policy, policy.detach() - math.log(0.7), 0.2, torch.zeros(1, 3), 1.0)
    loss.sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[-14.0, -70.0, -21.0]]), rtol=1e-5, atol=0)
    assert loss.isfinite().all() and all(torch.isfinite(x) for x in metadata.values())


# ----------------------------------------------------------------------------------------------------------------------
# 6., 7., 9. Alignment, log-probs, microbatches

def test_labels_are_shifted_or_the_mask_touches_prompt_and_padding():
    responses = [Response([5, 6, 7], [8, 1], [-0.5, -0.25], True), Response([5], [], [], False), Response([9, 1], [1], [-2.0], True)]
    batch = starter.make_batch(responses, torch.tensor([1.0, 2.0, 3.0]), "cpu")
    assert batch["prompts"].tolist() == [[5, 6], [-1, -1], [9, -1]]
    assert batch["input_ids"].tolist() == [[7, 8], [5, 0], [1, 0]]
    assert batch["labels"].tolist() == [[8, 1], [0, 0], [1, 0]]
    assert batch["response_mask"].int().tolist() == [[1, 1], [0, 0], [1, 0]]
    assert batch["rollout_log_probs"].tolist() == [[-0.5, -0.25], [0, 0], [-2.0, 0]] and batch["advantages"].tolist() == [[1], [2], [3]]
    for average, weights in {"grpo": [1 / 6, 1 / 6, 0, 1 / 3], "dapo": [1 / 3, 1 / 3, 0, 1 / 3], "dr_grpo": [1 / 12, 1 / 12, 0, 1 / 12]}.items():
        found = starter.token_weights(batch["response_mask"], average, 4)
        assert [found[0, 0], found[0, 1], found[1].sum(), found[2, 0]] == pytest.approx(weights) and found.sum() == pytest.approx(sum(weights))


def test_microbatches_lose_a_row_or_exceed_their_budget():
    lengths, row_numbers = [40, 3, 17, 17, 1, 8, 30, 2, 25], torch.arange(9)[:, None]
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    prompts = torch.tensor([[4, 5, 6], [4, 5, -1], [7, 8, 9]]).repeat_interleave(3, dim=0)
    for budget in (1, 16, 50, 100, 10_000):
        cuts = starter.cut_microbatches({"response_mask": mask, "rows": row_numbers, "prompts": prompts}, budget)
        assert all(len(rows["prompts"]) == len(rows["rows"]) for rows in cuts)
        cuts = [(rows["rows"][:, 0].tolist(), rows["response_mask"].shape[1], len(rows["prompts"].unique(dim=0))) for rows in cuts]
        assert sorted(i for index, _, _ in cuts for i in index) == list(range(9))
        assert all(len(index) * width + 3 * n <= budget or len(index) == 1 for index, width, n in cuts)
        assert [width for _, width, _ in cuts] == sorted((width for _, width, _ in cuts), reverse=True)
        assert all(width == max(lengths[i] for i in index) for index, width, _ in cuts)
    one_prompt, many = prompts[:1].expand(9, 3), torch.arange(27).reshape(9, 3)
    cuts = [len(starter.cut_microbatches({"response_mask": mask[:, :2], "prompts": p}, 9 * 2 + 3)) for p in (one_prompt, many)]
    assert cuts[0] == 1 and cuts[1] > 1  # a prompt that all have in common counts once


def test_much_of_a_microbatch_is_padding():
    """128 responses of 20 to 256 tokens, the size of a step on a GPU: less than a tenth is padding, in no more than a dozen microbatches."""
    rng = random.Random(0)
    lengths = [rng.randint(20, 256) for _ in range(128)]
    batch = {"response_mask": torch.arange(256) < torch.tensor(lengths)[:, None], "prompts": torch.arange(16 * 99).reshape(16, 99).repeat_interleave(8, 0)}
    cuts = starter.cut_microbatches(batch, 16_384)
    assert sum(lengths) == sum(int(rows["response_mask"].sum()) for rows in cuts)
    assert sum(rows["response_mask"].numel() for rows in cuts) < 1.11 * sum(lengths) and len(cuts) <= 12
    lengths = [64] * 120 + [rng.randint(1, 64) for _ in range(136)]  # those that fill up leave padding to the short ones
    batch = {"response_mask": torch.arange(64) < torch.tensor(lengths)[:, None], "prompts": torch.arange(32 * 16).reshape(32, 16).repeat_interleave(8, 0)}
    cuts = starter.cut_microbatches(batch, 2_048)
    assert sum(rows["response_mask"].numel() for rows in cuts) < 1.11 * sum(lengths) and len(cuts) <= 10
    short = {"response_mask": torch.arange(16) < torch.tensor([16] * 200 + [3] * 20)[:, None], "prompts": torch.zeros(220, 3)}
    assert len(starter.cut_microbatches(short, 8_192)) == 1  # what is left is too little for one of its own


def test_log_probs_see_padding_or_ignore_the_temperature(policy_and_tokenizer):
    policy, tokenizer = policy_and_tokenizer
    rng = random.Random(0)
    responses = [Response(rng.choices(range(5, 50), k=rng.randint(1, 9)), rng.choices(range(5, 50), k=n), [0.0] * n, True) for n in (1, 12, 5, 8)]
    batch = starter.make_batch(responses, torch.zeros(4), "cpu")
    found = starter.get_response_log_probs(policy, batch["input_ids"], batch["labels"], batch["response_mask"], 0.8, everything=True,
                                           prompts=batch["prompts"])
    log_probs, entropy = found["log_probs"], found["entropy"]
    assert log_probs.dtype == torch.float32 and (log_probs[~batch["response_mask"]] == 0).all()
    for i, r in enumerate(responses):
        plain = (policy(torch.tensor([r.prompt_ids + r.response_ids])).logits[0, len(r.prompt_ids) - 1:-1] / 0.8).log_softmax(-1)
        torch.testing.assert_close(log_probs[i][batch["response_mask"][i]], plain[range(len(r.response_ids)), r.response_ids], rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy[i][batch["response_mask"][i]], -(plain.exp() * plain).sum(-1), rtol=0, atol=1e-5)


def test_exact_kl_or_its_gradient_differs_from_the_whole_softmax(policy_and_tokenizer):
    """Value, and gradient through the whole model, of KL over the vocabulary, against plain autograd on all logits in float64."""
    policy, _ = policy_and_tokenizer
    policy = policy.double()
    ref_model = starter.copy.deepcopy(policy).requires_grad_(False)
    perturb(ref_model, 3)
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    responses = [Response(rng.choices(range(5, 50), k=3), rng.choices(range(5, 50), k=n), [0.0] * n, True) for n in (1, 12, 5)]
    batch = starter.make_batch(responses, torch.zeros(3), "cpu")
    ids, labels, mask = (batch[name] for name in ("input_ids", "labels", "response_mask"))
    reference = starter.response_hidden(ref_model, batch), ref_model.get_output_embeddings().weight
    ours = starter.get_response_log_probs(policy, ids, labels, mask, 0.8, reference=reference, everything=True, prompts=batch["prompts"])
    whole = torch.cat([batch["prompts"], ids], dim=1)  # all prompts have three tokens
    p, q = ((model(whole).logits[:, 2:] / 0.8).log_softmax(-1) for model in (policy, ref_model))
    plain = torch.where(mask, (p.exp() * (p - q)).sum(-1), 0.0)
    torch.testing.assert_close(ours["exact_kl"], plain, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours["ref_log_probs"][mask], q[mask][range(18), labels[mask]], rtol=1e-9, atol=1e-12)
    upstream = torch.randn(mask.shape, generator=generator).double()
    gradients = [torch.autograd.grad((kl * upstream).sum(), list(policy.parameters())) for kl in (ours["exact_kl"], plain)]
    for mine, theirs in zip(*gradients):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("n_rows", [1, 2, 4, 8])
def test_gradient_moves_with_the_number_of_microbatches(n_rows):
    """The same step cut into 8, 4, 2 and 1 pieces, with both clips, the leash and the importance weights active."""
    for average in ("grpo", "dapo", "dr_grpo"):
        whole = starter.tiny_step(10_000, average, kl_gradient="reverse", importance_cap=1.5)
        torch.testing.assert_close(starter.tiny_step(13 * n_rows, average, kl_gradient="reverse", importance_cap=1.5), whole, rtol=0, atol=1e-6)


def test_checkpointing_changes_the_gradient_or_the_samples(checkpoint, tmp_path):
    plain, checkpointed = (starter.main(**settings(checkpoint, tmp_path, gradient_checkpointing=x)) for x in (False, True))
    a, b = scalars(plain["run_folder"]), scalars(checkpointed["run_folder"])
    assert a["train/response_length"] == b["train/response_length"]
    assert [v for _, v in a["train/grad_norm"]] == pytest.approx([v for _, v in b["train/grad_norm"]], rel=1e-3)


def test_model_with_a_head_of_its_own_kind_is_scored_wrongly(tmp_path):
    """A model that scales its logits after the LM head must be refused: the chunked head would not know."""
    folder = save_checkpoint(tmp_path / "cohere", family="Cohere", logit_scale=0.5)
    with pytest.raises(InputError, match="changes its logits after the LM head"):
        starter.init_policy(folder, CPU)


MEMORY_PROBE = """
import starter, torch, threading, time, os, sys
from transformers import Qwen3Config, Qwen3ForCausalLM
torch.set_num_threads(2)
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=151_936, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
                                     num_key_value_heads=4, head_dim=64, tie_word_embeddings=True))
for p in model.parameters():
    p.grad = torch.zeros_like(p)
ids = torch.randint(1000, (8, 513))
page = os.sysconf("SC_PAGE_SIZE")
rss = lambda: int(open("/proc/self/statm").read().split()[1]) * page
base, peak, on = rss(), 0, True
def watch():
    global peak
    while on:
        peak = max(peak, rss()); time.sleep(0.002)
thread = threading.Thread(target=watch); thread.start()
if sys.argv[1] == "chunked":
    log_probs = starter.get_response_log_probs(model, ids[:, :-1], ids[:, 1:])
elif sys.argv[1] == "exact KL":
    rows = dict(input_ids=ids[:, :-1], response_mask=torch.ones_like(ids[:, 1:], dtype=torch.bool))
    hidden = starter.response_hidden(model, rows).detach().flip(0)
    found = starter.get_response_log_probs(model, ids[:, :-1], ids[:, 1:], reference=(hidden, model.lm_head.weight.detach()), everything=True)
    log_probs = found["log_probs"] + found["exact_kl"]
else:
    log_probs = model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])
log_probs.sum().backward()
on = False; thread.join()
print((peak - base) / 1e9)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_log_prob_pass_holds_all_logits():
    """8 x 512 tokens, hidden 256, vocabulary 151,936: under 1.2 GB above weights and gradients, forward and backward."""
    gigabytes = {}
    for way in ("chunked", "exact KL", "plain"):
        run = subprocess.run([sys.executable, "-c", MEMORY_PROBE, way], cwd=HERE, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        gigabytes[way] = float(run.stdout)
    print(gigabytes)
    assert gigabytes["chunked"] < 1.2 and gigabytes["exact KL"] < 1.2 and gigabytes["plain"] > 7


# ----------------------------------------------------------------------------------------------------------------------
# Whole runs

def test_same_seed_gives_other_numbers(checkpoint, tmp_path):
    runs = [scalars(starter.main(**settings(checkpoint, tmp_path, use_kl_penalty=True, seed=seed))["run_folder"]) for seed in (0, 0, 1)]
    assert same_numbers(runs[0], runs[1]) and not same_numbers(runs[0], runs[2])


def test_sampler_correction_is_turned_around_or_not_cut(policy_and_tokenizer):
    """The gradient of one response whose sampler's log-probs are off by -0.3, 0, 1: weights exp(0.3), 1 and exp(-1), cut at 1.2."""
    policy, _ = policy_and_tokenizer
    batch = starter.make_batch([Response([5, 6], [7, 8, 9], [0.0] * 3, True)], torch.ones(1), "cpu")
    mask = batch["response_mask"]
    own = starter.get_response_log_probs(policy, batch["input_ids"], batch["labels"], mask, prompts=batch["prompts"])
    batch |= {"weights": mask.float(), "rollout_log_probs": own.detach() + torch.zeros_like(own).masked_scatter(mask, torch.tensor([-0.3, 0.0, 1.0]))}
    by_hand = -(own[mask] * torch.tensor([1.2, 1.0, math.exp(-1)])).sum()
    first = next(policy.parameters())
    expected, = torch.autograd.grad(by_hand, first)
    starter.grpo_microbatch_step(policy, batch, 0.2, importance_cap=1.2)
    torch.testing.assert_close(first.grad, expected, rtol=0, atol=1e-5)


def test_evaluation_is_of_another_step(checkpoint, tmp_path):
    result = starter.main(**settings(checkpoint, tmp_path, n_train_steps=5))
    assert [step for step, _ in scalars(result["run_folder"])["eval/solved"]] == [0, 2, 4, 5]


def test_warning_is_said_again_each_step_or_after_resume(checkpoint, tmp_path):
    def say(m, first, c, step, said):
        heard.append((step, sorted(said)))
        said.add("drift")
        return []

    for resume, n_steps in ((False, 2), (True, 3)):
        heard = []
        with mock.patch.object(checks, "warning_signs", say):
            starter.main(**settings(checkpoint, tmp_path, eval_every=0, save_every=1, n_train_steps=n_steps, resume=resume))
        assert heard[0 if resume else 1:-1] == ([(3, ["drift"])] if resume else [(1, []), (2, ["drift"])])  # without the evaluations


def test_canary_overlooks_a_number_that_is_not_one():
    """A reference whose log-prob is nan, between others that agree."""
    rows = {"response_mask": torch.ones(1, 3, dtype=torch.bool), "old_log_probs": torch.zeros(1, 3), "rollout_log_probs": torch.zeros(1, 3)}
    with pytest.raises(RunStopped, match="differs from its own copy by nan"):
        starter.check_log_probs([rows | {"ref_log_probs": torch.tensor([[0.0, math.nan, 0.0]])}], 1, None, False)


def test_two_seeds_or_two_steps_sample_alike(checkpoint, tmp_path):
    seeds, real = [], starter.rollout

    def spy(*args, **kwargs):
        seeds.append(kwargs["seed"])
        return real(*args, **kwargs)

    with mock.patch.object(starter, "rollout", spy):
        for seed in (0, 1):
            starter.main(**settings(checkpoint, tmp_path, eval_every=0, seed=seed))
    assert len(seeds) == 12 and seeds[0] == seeds[4] and len(set(seeds)) == 10  # the two evaluations of a run share one
    assert max(seeds) < 2**32 - 1 and min(abs(a - b) for a, b in itertools.combinations(set(seeds), 2)) >= 2**16  # a response adds its number


def test_seed_has_bits_that_torch_does_not_read(policy_and_tokenizer):
    """A CPU generator takes the low 32 bits of its seed: seeds that differ above them sampled the same responses."""
    policy, tokenizer = policy_and_tokenizer
    prompts = starter.prompt_ids_of([{"prompt": "sort 54321"}], tokenizer)
    c = lambda seed: SimpleNamespace(seed=seed, max_new_tokens=20, temperature=1.0, bf16=False)
    cases = [(0, 1), (0, 4097), (1, 1), (2**32 - 1, 1), (0, "evaluate")]
    sampled = [tuple(tuple(r.response_ids) for r in starter.rollout(policy, None, prompts, group_size=4, **starter.sampling(c(seed), tokenizer, what)))
               for seed, what in cases]
    assert len(set(sampled)) == len(cases)


def test_logged_means_depend_on_the_microbatch_size(policy_and_tokenizer):
    policy, _ = policy_and_tokenizer
    batch = starter.make_batch([Response([3], [5 + i] * n, [-3.0] * n, True) for i, n in enumerate((1, 9, 4, 2))], torch.linspace(-1, 1, 4), "cpu")
    batch["weights"] = starter.token_weights(batch["response_mask"], "dapo", 9)
    means = [starter.accumulate_gradients(policy, None, starter.cut_microbatches(batch, n), 16, 0.0, starter.defaultdict(float), clip_range=0.2)[0]
             for n in (1000, 10, 1)]
    for name in means[0]:
        for other in means[1:]:
            torch.testing.assert_close(torch.as_tensor(other[name]), torch.as_tensor(means[0][name]), rtol=1e-5, atol=1e-6)


def test_leash_at_zero_is_not_plain_grpo(checkpoint, tmp_path):
    kept = {}
    for name, changes in {"off": {}, "zero": dict(use_kl_penalty=True, kl_coef=0.0)}.items():
        with mock.patch.object(starter.copy, "deepcopy", wraps=starter.copy.deepcopy) as copies:
            result = starter.main(**settings(checkpoint, tmp_path, save_model=True, **changes))
        assert not any(isinstance(call.args[0], torch.nn.Module) for call in copies.call_args_list), "a reference was held"
        kept[name] = (result["run_folder"] / "model" / "model.safetensors").read_bytes()
        assert "train/kl_penalty" not in scalars(result["run_folder"])
    assert kept["off"] == kept["zero"]


def test_reference_moves_with_the_policy(checkpoint, tmp_path):
    seen = {}
    real_train = starter.train

    def spy(policy, *args, **kwargs):
        ref_model = args[-2]
        seen["before"] = {name: p.clone() for name, p in ref_model.state_dict().items()}
        seen["ref"], seen["policy"] = ref_model, policy
        return real_train(policy, *args, **kwargs)

    with mock.patch.object(starter, "train", spy):
        result = starter.main(**settings(checkpoint, tmp_path, use_kl_penalty=True, kl_coef=0.1))
    assert all(torch.equal(p, seen["before"][name]) for name, p in seen["ref"].state_dict().items())
    assert not any(torch.equal(p, seen["before"][name]) for name, p in seen["policy"].named_parameters())
    kl = [value for _, value in scalars(result["run_folder"])["train/kl_penalty"]]
    assert kl[0] < 1e-6 < kl[-1] and result["kl_per_token"] > 0


def test_several_epochs_use_the_moved_policy_as_its_own_old_one(checkpoint, tmp_path):
    result = starter.main(**settings(checkpoint, tmp_path, epochs_per_rollout=3, clip_range=0.01, learning_rate=1e-2))
    clipped = [value for _, value in scalars(result["run_folder"])["train/clip_frac"]]
    assert all(value > 0 for value in clipped)  # were old log-probs taken anew each epoch, the ratio would be 1 for ever


def test_saved_model_is_not_the_trained_one(checkpoint, tmp_path):
    kept = {}
    real = starter.measure_kl

    def spy(policy, *args):
        kept.update({name: p.clone() for name, p in policy.state_dict().items()})
        return real(policy, *args)

    with mock.patch.object(starter, "measure_kl", spy):
        result = starter.main(**settings(checkpoint, tmp_path, save_model=True))
    policy, tokenizer = starter.init_policy(result["run_folder"] / "model", CPU)
    assert all(torch.equal(p, kept[name]) for name, p in policy.state_dict().items())
    assert starter.prompt_ids_of([{"prompt": "make 3: 1 2"}], tokenizer)[0][-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")


def test_stale_sampler_goes_unnoticed():
    batch = {"response_mask": torch.tensor([[True, True, False]]), "old_log_probs": torch.tensor([[-1.0, -2.0, 0.0]]),
             "rollout_log_probs": torch.tensor([[-1.0, -2.0001, 9.0]])}
    check = lambda *rest: starter.check_log_probs([batch], *rest)
    assert check(5, None, False)["sampler_logprob_diff"] == pytest.approx(5e-5, rel=0.01)
    batch["rollout_log_probs"] = torch.tensor([[-1.0, -2.01, 0.0]])
    with pytest.raises(RunStopped, match="step 5: sampler and trainer disagree by 0.005 .*stale"):
        check(5, None, False)
    check(5, None, True), check(5, 0.01, True)  # bf16 rounds that much
    batch["rollout_log_probs"] = torch.tensor([[-1.1, -2.1, 0.0]])
    with pytest.raises(RunStopped):  # but it must not grow
        check(5, 0.01, True)
    batch |= {"rollout_log_probs": batch["old_log_probs"], "ref_log_probs": torch.tensor([[-1.0, -2.001, 0.0]])}
    with pytest.raises(RunStopped, match="differs from its own copy by 0.001 nats before any update"):
        check(1, None, False)
    batch["old_log_probs"] = torch.tensor([[math.nan, 0.0, 0.0]])
    with pytest.raises(RunStopped, match="disagree by nan"):
        check(5, 1e-6, False)


@pytest.mark.slow
def test_thirty_steps_do_not_raise_the_reward(tiny_model, tmp_path):
    result = starter.main(n_train_steps=30, eval_every=0, n_eval_problems=200, out_dir=str(tmp_path), save_model=False, engine="transformers")
    reward = [value for _, value in scalars(result["run_folder"])["train/reward_mean"]]
    assert sum(reward[-5:]) / 5 > sum(reward[:5]) / 5 + 0.03


def test_terminal_has_no_progress_bar_or_a_file_is_full_of_bars(checkpoint, tmp_path):
    changes = settings(str(checkpoint), str(tmp_path))
    changes.pop("reward")
    command = [sys.executable, "-c", f"import starter; starter.main(**{changes})"]
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))  # a terminal of no width shows no bar
    process = subprocess.Popen(command, cwd=HERE, stdout=slave, stderr=subprocess.DEVNULL)
    os.close(slave)
    seen = b""
    try:
        while part := os.read(master, 4096):
            seen += part
    except OSError:  # Linux says so when the other side has closed
        pass
    assert process.wait() == 0 and b"/3 [" in seen and b"Step 3 |" in seen
    piped = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert piped.returncode == 0 and "\r" not in piped.stdout and piped.stdout.count("min left") == 3


# ----------------------------------------------------------------------------------------------------------------------
# 8., 9. Adaptive KL, dead knobs, warnings

def rules(rule="none", **changes):
    """-> what next_beta reads of the configuration."""
    return SimpleNamespace(**dict(coefficient_rule=rule, kl_coef=0.2, kl_target=0.1, dynamic_beta_decay=0.9, reward_threshold=0.8,
                                  beta_min=0.0, beta_schedule_steps=1000) | changes)


def betas(c, kls, rewards):
    """-> beta after each step; the state goes through JSON each time, as a checkpoint would hold it."""
    state, found = {"beta": c.kl_coef, "step": 0, "kl": None, "reward": None}, []
    for kl, reward in zip(kls, rewards):
        state = json.loads(json.dumps(starter.next_beta(state, kl, reward, c)))
        found.append(state["beta"])
    return found


def test_printed_coefficient_rule_is_not_the_documents():
    assert betas(rules("target"), [0.16, 0.15, 0.1, 0.05, 0.04], [0.0] * 5) == pytest.approx([0.3, 0.3, 0.3, 0.3, 0.225])
    assert betas(rules("dynamic"), [0.1] * 4, [0.81, 0.8, 0.79, 1.0]) == pytest.approx([0.18, 0.18, 0.18, 0.162])
    assert betas(rules("dynamic", beta_min=0.17), [0.1] * 3, [0.9] * 3) == pytest.approx([0.18, 0.17, 0.17])
    assert betas(rules("dynamic", beta_min=0.01, beta_schedule_steps=3), [0.1] * 4, [0.0] * 4) == pytest.approx([0.2, 0.2, 0.01, 0.01])


def test_sound_coefficient_rule_leaves_its_bounds_or_jumps():
    rng = random.Random(0)
    for rule, low, high in (("target_sound", 0.02, 2.0), ("dynamic_sound", 0.02, 0.2)):
        c = rules(rule, beta_schedule_steps=500)
        for kl, reward in ((0.0, 0.0), (0.0, 1.0), (9.0, 0.0), (9.0, 1.0)):
            found = betas(c, [kl] * 2000, [reward] * 2000)
            assert all(low - 1e-12 <= beta <= high + 1e-12 for beta in found)
        noisy = betas(c, [rng.lognormvariate(-2, 1) for _ in range(2000)], [rng.gauss(0.8, 0.2) for _ in range(2000)])
        assert all(abs(math.log(b / a)) < 0.12 for a, b in zip(noisy, noisy[1:]))  # continuous, at the end of the schedule too
    up = betas(rules("dynamic_sound", beta_schedule_steps=10**9), [0.1] * 200, [1.0] * 100 + [0.0] * 100)
    assert min(up) < 0.1 and up[-1] == pytest.approx(0.2, rel=1e-3)  # what was let go is taken back


def test_target_controller_misses_the_target_of_a_slow_plant():
    """KL follows 0.02 / beta with a lag of 10 steps and 20 % noise, and not at all in the first 20, as in a warm-up: meanwhile
    the printed rule winds down and overshoots tenfold; the sound one stays within its bounds."""
    def simulate(rule, seed):
        rng, c, kl, found = random.Random(seed), rules(rule, kl_coef=1.0), 0.0, []
        state = {"beta": 1.0, "step": 0, "kl": None, "reward": None}
        for step in range(400):
            kl += (0.02 * (step >= 20) / state["beta"] - kl) / 10
            found.append(kl * math.exp(rng.gauss(0, 0.2)))
            state = starter.next_beta(state, found[-1], 0.0, c)
        return found
    for seed in range(5):
        sound, printed = (simulate(rule, seed) for rule in ("target_sound", "target"))
        assert sum(0.05 < kl < 0.15 for kl in sound[200:]) >= 180
        assert max(sound) < 0.3 and max(printed) > 1.0


def test_broken_number_moves_the_leash():
    for rule in starter.COEFFICIENT_RULES:
        c = rules(rule)
        for kl, reward in ((math.nan, 1.0), (math.inf, 1.0), (0.1, math.nan), (-math.inf, 0.0)):
            state = {"beta": 0.2, "step": 4, "kl": 0.1, "reward": 0.5}
            assert starter.next_beta(state, kl, reward, c) == state | {"step": 5}
        assert math.isfinite(betas(c, [0.0, -0.1, 0.0], [0.0] * 3)[-1])


def test_controller_forgets_its_state_when_killed_and_resumed():
    rng = random.Random(1)
    kls, rewards = [rng.lognormvariate(-2, 0.5) for _ in range(60)], [rng.random() for _ in range(60)]
    for rule in starter.COEFFICIENT_RULES:
        c, state = rules(rule), {"beta": 0.2, "step": 0, "kl": None, "reward": None}
        for step, (kl, reward) in enumerate(zip(kls, rewards)):
            state = starter.next_beta(state, kl, reward, c)
        assert state["beta"] == betas(c, kls, rewards)[-1]  # which was written to JSON and read again after each step


def test_rule_names_are_taken_apart_wrongly():
    c = SimpleNamespace(kl_target=None, kl_clip_threshold=None)
    take = lambda method: checks.with_kl_rules(SimpleNamespace(**vars(c), kl_adaptation_method=method), starter.TERM_RULES,
                                                        starter.COEFFICIENT_RULES)
    for method, term, beta, target, threshold in (
            ("none", "none", "none", 0.1, 1.0), ("dynamic+sigmoid", "sigmoid", "dynamic", 0.1, 1.0), ("sigmoid+dynamic", "sigmoid", "dynamic", 0.1, 1.0),
            ("target", "none", "target", 0.05, 1.0), ("target_sound+clip_sound", "clip_sound", "target_sound", 0.1, 5.0)):
        found = take(method)
        assert (found.term_rule, found.coefficient_rule, found.kl_target, found.kl_clip_threshold) == (term, beta, target, threshold)
    for method in ("clip+sigmoid", "target+dynamic", "clip+clips", "Clip", ""):
        if method:
            with pytest.raises(InputError, match="kl_adaptation_method"):
                take(method)


def test_exact_kl_that_was_not_handed_over_is_taken_for_zero():
    with pytest.raises(InputError, match="kl_estimator = 'exact' must be 'k1', 'k2' or 'k3' for two log-probs"):
        starter.compute_loss(torch.zeros(1, 1), torch.zeros(1, 2), torch.zeros(1, 2), 0.2, torch.zeros(1, 2), 0.1, kl_estimator="exact")


def leash(**changes):
    return dict(use_kl_penalty=True, kl_coef=0.1) | changes


def test_adaptive_method_is_logged_but_not_applied(checkpoint, tmp_path):
    def run(**changes):
        return scalars(starter.main(**settings(checkpoint, tmp_path, learning_rate=1e-2, **leash(**changes)))["run_folder"])
    plain, clipped = run(), run(kl_adaptation_method="clip", kl_clip_threshold=0.01)
    values = lambda run, tag: [value for _, value in run[tag]]
    assert plain["adaptive_kl/raw_kl"] == plain["train/kl_penalty"]
    assert values(plain, "adaptive_kl/raw_kl") == pytest.approx(values(plain, "adaptive_kl/adapted_kl"), rel=1e-5)
    assert clipped["adaptive_kl/adapted_kl"][-1][1] <= 0.01 < clipped["adaptive_kl/raw_kl"][-1][1]
    grad = partial(values, tag="train/grad_norm")
    assert grad(plain)[0] == grad(clipped)[0] and grad(plain)[-1] != grad(clipped)[-1]
    steady, dynamic = (values(run, "adaptive_kl/current_beta") for run in (plain, run(
        kl_adaptation_method="dynamic+sigmoid", reward_threshold=0.0, dynamic_beta_decay=0.5)))
    assert steady == pytest.approx([0.1] * 3) and dynamic == pytest.approx([0.1, 0.05, 0.025])
    halved = grad(run(kl_adaptation_method="dynamic", reward_threshold=0.0, dynamic_beta_decay=0.5))
    assert halved[0] == grad(plain)[0] and halved[-1] != grad(plain)[-1]  # beta is not only logged


def test_leash_that_the_schedule_switched_off_stops_the_run(checkpoint, tmp_path):
    result = starter.main(**settings(checkpoint, tmp_path, **leash(kl_adaptation_method="dynamic", beta_schedule_steps=1)))
    numbers = scalars(result["run_folder"])
    assert [value for _, value in numbers["adaptive_kl/current_beta"]] == pytest.approx([0.1, 0.0, 0.0])
    assert len(numbers["train/kl_penalty"]) == 3 and numbers["train/kl_penalty"][-1][1] > 0


@pytest.mark.parametrize("place", [dict(kl_estimator="exact"), dict(kl_estimator="exact", kl_in="loss_to_go"), dict(kl_estimator="k1", kl_in="reward"),
                                   dict(kl_adaptation_method="clip_sound"), dict(kl_estimator="k3", kl_gradient="as_written")])
def test_leash_of_any_kind_holds_nothing(checkpoint, tmp_path, place):
    """The same short run without and with a strong leash: KL to the start must be smaller, by much."""
    run = lambda **changes: starter.main(**settings(checkpoint, tmp_path, n_train_steps=12, learning_rate=3e-3, eval_every=0, **changes))["kl_per_token"]
    assert run(**leash(kl_coef=5.0, **place)) < 0.6 * run()


def test_kl_where_it_arises_does_not_add_up(checkpoint, tmp_path):
    result = starter.main(**settings(checkpoint, tmp_path))
    tables = json.loads((result["run_folder"] / "kl_by_token.json").read_text())
    for table in tables.values():
        nats, tokens = (sum(column) for column in zip(*table.values()))
        assert nats / tokens == pytest.approx(result["kl_per_token"]) and nats / 20 == pytest.approx(result["kl_per_sequence"])
    assert tables["position"]["0"][1] == 20 and set(tables["position"]) == set(map(str, range(len(tables["position"]))))


@pytest.mark.parametrize("changes, named", [
    (dict(kl_adaptation_method="clip", kl_clip_threshold=1e9), "kl_adaptation_method = 'clip' changes nothing here"),
    (dict(kl_adaptation_method="clip", kl_clip_threshold=0.0), "kl_coef = 0.1 changes nothing here"),
    (dict(kl_adaptation_method="clip", kl_target=0.3), "kl_target = 0.3 changes nothing here"),
    (dict(kl_clip_threshold=0.5), "kl_clip_threshold = 0.5 changes nothing here"),
    (dict(beta_min=0.05), "beta_min = 0.05 changes nothing here"),
    (dict(kl_ratio_cap=5.0), "kl_ratio_cap = 5.0 changes nothing here"),
    (dict(kl_coef=1e-12), "kl_coef = 1e-12 changes nothing here"),
    (dict(kl_estimator="exact", kl_gradient="as_written"), "kl_gradient = 'as_written' changes nothing here"),
    (dict(kl_estimator="k2", kl_gradient="as_written"), "kl_gradient = 'as_written' changes nothing here"),  # in a first epoch, the same
    (dict(kl_adaptation_method="dynamic", reward_threshold=7.0, reward=starter.reward_fn), "kl_adaptation_method = 'dynamic' changes nothing here"),
])
def test_dead_knob_is_turned_in_vain(checkpoint, tmp_path, changes, named):
    with mock.patch.object(starter, "evaluate", side_effect=AssertionError("the run began")):
        with pytest.raises(InputError, match=named):
            starter.main(**settings(checkpoint, tmp_path, **leash(**changes)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changes", [
    dict(kl_adaptation_method="clip", kl_clip_threshold=1.0), dict(kl_ratio_cap=1.5, epochs_per_rollout=2), dict(kl_coef=1e-4),
    dict(kl_estimator="k2"), dict(kl_adaptation_method="target_sound", kl_target=0.2), dict(kl_adaptation_method="dynamic", beta_min=0.09),
    dict(kl_adaptation_method="length_normalized", kl_estimator="k1", kl_in="reward"), dict(kl_adaptation_method="clip_sound"),
    dict(kl_adaptation_method="dynamic", reward_threshold=7.0)])  # this reward's range is its author's
def test_living_knob_is_called_dead(checkpoint, tmp_path, changes):
    with mock.patch.object(starter, "evaluate", side_effect=StopIteration):
        with pytest.raises(StopIteration):
            starter.main(**settings(checkpoint, tmp_path, **leash(**changes)))


@pytest.mark.slow
def test_adaptive_method_is_called_dead_on_the_built_in_model(tiny_model, tmp_path):
    """Every method of the ablation: whichever responses the probe happens to sample, some tokens are near and some far."""
    for changes, seed in itertools.product(ablate_kl.METHODS, (0, 1)):
        with mock.patch.object(starter, "evaluate", side_effect=StopIteration), pytest.raises(StopIteration):
            starter.main(seed=seed, out_dir=str(tmp_path), engine="transformers", n_train_problems=100, **changes)


def test_probe_leaves_a_gradient_behind(checkpoint, tmp_path):
    """The first step's gradient is the same with the probe and without it."""
    norms = []
    for probe in (checks.refuse_dead_knobs, lambda *args: None):
        with mock.patch.object(checks, "refuse_dead_knobs", probe):
            norms.append(scalars(starter.main(**settings(checkpoint, tmp_path, **leash()))["run_folder"])["train/grad_norm"])
    assert norms[0] == norms[1]


def test_warning_sign_is_passed_over_or_raised_for_nothing():
    c = SimpleNamespace(n_train_steps=100, use_kl_penalty=True)
    first = dict(response_length=8.0, reward_mean=0.3, retention_sort=0.9, kl_per_token=0.0)
    fine = dict(response_length=9.0, reward_mean=0.6, retention_sort=0.88, kl_per_token=0.005, kl_capped_frac=0.02)
    look = lambda **changes: checks.warning_signs(fine | changes, first, c, 50, set())
    assert look() == [] and look(kl_per_token=0.15) == []
    for changes, words in ((dict(kl_per_token=0.21), "0.21 nats per token, above 0.2: the policy drifts"), (dict(reward_mean=0.31), "nothing is learnt"),
                           (dict(retention_sort=0.8), "sort fell from 90% to 80%"), (dict(response_length=12.1), "1.5 times as long"),
                           (dict(kl_capped_frac=0.2), "ratio is cut")):
        line, = look(**changes)
        assert words in line and line.startswith("Warning: ")
    said = set()
    assert len(checks.warning_signs(fine | {"kl_per_token": 0.3}, first, c, 50, said)) == 1
    assert checks.warning_signs(fine | {"kl_per_token": 0.3}, first, c, 51, said) == []  # once


# ----------------------------------------------------------------------------------------------------------------------
# The truth table of verify_kl.py, at fewer policies and seeds, and what is published of it

def test_verify_kl_claim_is_false():
    rows = verify_kl.gradient_rows(3)
    assert [row for row in rows if row["holds"] is not True] == []
    assert max(row["largest error"] for row in rows if row["claim"] == "exact") < 1e-10
    assert sum(row["claim"] == "wrong" and row["median relative error"] > 0.1 for row in rows) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("make, settings", [
    ("variance_rows", {"n_policies": 1}), ("fixed_point_rows", {}), ("length_rows", {}), ("adaptive_rows", {})])
def test_verify_kl_bar_is_missed(make, settings):
    rows = getattr(verify_kl, make)(**settings)
    assert any(row["holds"] is True for row in rows) and [row for row in rows if row["holds"] is False] == []


@pytest.mark.slow
def test_default_explodes_or_k3_as_written_does_not():
    written, default = (verify_kl.explosion_run(0, **verify_kl.EXPLOSION[name])["largest gradient norm"] for name in ("k3 as written", "k3, reverse (default)"))
    assert written > 1e6 and default < 1


def test_published_result_misses_its_bar():
    """The rows in results/ themselves: what the README says of them is drawn from these files."""
    rows = [row for name in ("gradients", "variance", "fixed_points", "explosion", "length", "adaptive")
            for row in ablate_kl.read_csv(HERE / "results" / f"kl_{name}.csv")]
    assert len(rows) > 200 and [row for row in rows if row["holds"] == "no"] == []
    controllers = ablate_kl.controller_rows()
    assert len(controllers) == 3 and all(held >= 0.9 and over < 2 for held, over in controllers)
    (_, on), ((_, off),) = ablate_kl.best_coefficient(), ablate_kl.groups_of([ablate_kl.HOT])
    assert len(on) == len(off) == 3 and ablate_kl.solved(on) >= ablate_kl.solved(off) - 0.02
    assert ablate_kl.kept(on) >= ablate_kl.kept(off) + 0.2


# ----------------------------------------------------------------------------------------------------------------------
# vLLM

@pytest.fixture(scope="session")
def vllm_engine(checkpoint):
    return starter.init_vllm(checkpoint, 0, 128, 0.3, False)


def perturb(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.02 * torch.randn(p.shape, generator=generator)


def difference(policy, tokenizer, responses, temperature=1.0):
    """Mean |sampler - trainer| log-prob as the loop computes it; RunStopped where the canary stops the run."""
    batch = starter.make_batch(responses, torch.zeros(len(responses)), "cpu")
    batch["old_log_probs"] = starter.get_response_log_probs(policy, batch["input_ids"], batch["labels"], batch["response_mask"], temperature,
                                                             prompts=batch["prompts"])
    return starter.check_log_probs([batch], 1, None, False)


@needs_vllm
@pytest.mark.slow
def test_engines_disagree_with_the_trainer_after_a_sync(vllm_engine, policy_and_tokenizer):
    policy, tokenizer = policy_and_tokenizer
    texts = ["make 3: 1 2", "sort 54321", "a", "b" * 70]  # the last is longer than a cache block
    prompts, eos = starter.prompt_ids_of([{"prompt": p} for p in texts], tokenizer), tokenizer.eos_token_id
    starter.load_policy_into_vllm_instance(policy, vllm_engine)  # whatever an earlier test left in it
    for sync in range(4):  # before any change, then after each of three
        if sync:
            perturb(policy, sync)
            starter.load_policy_into_vllm_instance(policy, vllm_engine)
        for temperature in (1.0, 0.7):
            for llm in (vllm_engine, None):
                responses = starter.rollout(policy, llm, prompts, group_size=4, max_new_tokens=20, temperature=temperature, seed=sync, eos_token_id=eos)
                assert [r.prompt_ids for r in responses] == [p for p in prompts for _ in range(4)]
                assert all(r.finished == (r.response_ids[-1] == eos) and len(r.log_probs) == len(r.response_ids) for r in responses)
                assert len({tuple(r.response_ids) for r in responses[:4]}) > 1  # a group is not one response four times
                assert difference(policy, tokenizer, responses, temperature)["sampler_logprob_diff_max"] < 1e-3
        greedy = [starter.rollout(policy, llm, prompts, group_size=1, max_new_tokens=20, temperature=0, seed=0, eos_token_id=eos)
                  for llm in (vllm_engine, None)]
        assert [r.response_ids for r in greedy[0]] == [r.response_ids for r in greedy[1]]


@needs_vllm
@pytest.mark.slow
def test_missing_sync_goes_unnoticed(vllm_engine, policy_and_tokenizer):
    policy, tokenizer = policy_and_tokenizer
    prompts = starter.prompt_ids_of([{"prompt": p} for p in ("make 3: 1 2", "sort 54321")], tokenizer)
    starter.load_policy_into_vllm_instance(policy, vllm_engine)
    perturb(policy, 9)
    responses = starter.rollout(policy, vllm_engine, prompts, group_size=4, max_new_tokens=20, temperature=1.0, seed=0,
                                eos_token_id=tokenizer.eos_token_id)
    with pytest.raises(RunStopped, match="stale"):
        difference(policy, tokenizer, responses)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("family, tie", [("Qwen2", True), ("Qwen2", False), ("Qwen3", False)])
def test_sync_loses_a_tensor_of_other_architectures(tmp_path, family, tie):
    program = f"""
import starter, test_starter as t, torch, sys
from pathlib import Path
folder = t.save_checkpoint(Path({str(tmp_path)!r}) / "m", tie={tie}, family={family!r})
policy, tokenizer = starter.init_policy(folder, "cpu")
llm = starter.init_vllm(folder, 0, 64, 0.3, False)
prompts = starter.prompt_ids_of([dict(prompt="sort 54321"), dict(prompt="a")], tokenizer)
for sync in range(3):
    t.perturb(policy, sync)
    starter.load_policy_into_vllm_instance(policy, llm)
    responses = starter.rollout(policy, llm, prompts, group_size=4, max_new_tokens=20, temperature=1.0, seed=0, eos_token_id=tokenizer.eos_token_id)
    assert t.difference(policy, tokenizer, responses)["sampler_logprob_diff_max"] < 1e-3
print("all agree")
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True, timeout=300)
    assert "all agree" in run.stdout, run.stderr[-2000:]


@needs_vllm
@pytest.mark.slow
def test_whole_run_with_vllm_differs_from_transformers(checkpoint, tmp_path):
    """In a process of its own: the same settings, the other engine; a healthy canary; the saved model loads in vLLM."""
    program = f"""
import starter, test_starter as t
from pathlib import Path
result = starter.main(**t.settings({str(checkpoint)!r}, {str(tmp_path)!r}, engine="vllm", use_kl_penalty=True, save_model=True, n_train_steps=4))
run = t.scalars(result["run_folder"])
assert max(v for _, v in run["train/sampler_logprob_diff_max"]) < 1e-3 and len(run["time/sync"]) == 4, run
print("saved in", result["run_folder"] / "model")
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True, timeout=300)
    assert "engine: vllm (asked for)" in run.stdout and "saved in" in run.stdout, run.stdout[-1000:] + run.stderr[-2000:]
    folder = run.stdout.split()[-1]
    program = f"""
import starter, test_starter as t
policy, tokenizer = starter.init_policy({folder!r}, "cpu")
llm = starter.init_vllm({folder!r}, 0, 64, 0.3, False)
prompts = starter.prompt_ids_of([dict(prompt="sort 54321")], tokenizer)
responses = starter.rollout(policy, llm, prompts, group_size=4, max_new_tokens=20, temperature=1.0, seed=0, eos_token_id=tokenizer.eos_token_id)
assert t.difference(policy, tokenizer, responses)["sampler_logprob_diff_max"] < 1e-3
print("the saved model samples in vLLM")
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True, timeout=300)
    assert "the saved model samples in vLLM" in run.stdout, run.stderr[-2000:]


# ----------------------------------------------------------------------------------------------------------------------
# Ranks: the same numbers from two processes as from one

RANK_GRADIENTS = """
import atexit, os, sys, torch, starter, test_starter as t
torch.set_num_threads(1)
atexit.register(sys.stderr.write, "left in order\\n")
class Late:
    __del__ = lambda self, write=os.write: write(2, b"met the interpreter's own end\\n")
late = Late()
with starter.ranks.joined():
    assert starter.ranks.total({"most": starter.ranks.rank() + 1, "sum": 1.5}, largest=("most",)) == {"most": 2, "sum": 3}
    for tie, at_once in ((True, 1), (True, 10**6), (False, 1), (False, 10**6)):
        policy, _ = starter.init_policy(f"{sys.argv[1]}/{tie}", "cpu")
        plain, ref_model = starter.copy.deepcopy(policy), starter.copy.deepcopy(policy).requires_grad_(False)
        t.perturb(ref_model, 3)
        responses = [starter.Response(list(range(5, 6 + n % 3)), [5 + (5 * n + i * i) % 32 for i in range(n)], [-3.4] * n, True) for n in (1, 9, 4, 6, 7, 2, 8, 3)]
        batch = starter.make_batch(responses, torch.linspace(-1, 1, 8), "cpu")
        batch["weights"] = starter.token_weights(batch["response_mask"], "dapo", 9)
        found = []
        for model, reference in ((plain, ref_model), [starter.ranks.shard(x, at_once) for x in (policy, starter.copy.deepcopy(ref_model))]):
            cut = starter.cut_microbatches(batch, 60) if model is plain else starter.ranks.own_microbatches(batch, 9, starter.cut_microbatches)
            numbers = [len(cut), sum(rows["response_mask"].any().item() for rows in cut)]
            for rows in cut:
                starter.grpo_microbatch_step(model, rows, 0.2, reference, 0.1, kl_estimator="exact")
            found.append({name: starter.ranks.whole(p.grad) for name, p in starter.ranks.release(model).named_parameters()})
        assert type(policy.get_output_embeddings().weight).__name__ == "DTensor" or "FSDP" in type(policy.base_model).__name__
        sampled = [starter.rollout(model, None, [[5, 6]], group_size=2, seed=0, max_new_tokens=4, temperature=1.0, eos_token_id=1) for model in (plain, policy)]
        assert sampled[0][0].response_ids == sampled[1][0].response_ids and len(sampled[1]) == 2, sampled  # rank 1 had no prompt
        error = max((found[0][name] - found[1][name]).abs().max().item() for name in found[0])
        scale = max(x.abs().max().item() for x in found[0].values())
        sys.stderr.write(f"rank {starter.ranks.rank()} of {starter.ranks.world()}, tied {tie}, {at_once} weights at once, {numbers} microbatches: {error / scale:.1e}\\n")
"""


def torchrun(program, *arguments, nodes=1, timeout=240):
    """Runs a program on two ranks, of one node or of two that meet on the loopback device. -> exit codes, their output."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = [f"--rdzv-endpoint=localhost:{port}", "--rdzv-backend=c10d", "--rdzv-id=test"]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}", *meeting]
    runs = [subprocess.Popen([*command, program, *map(str, arguments)], cwd=HERE, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}) for _ in range(nodes)]
    outputs = [run.communicate(timeout=timeout)[0] for run in runs]
    return [run.returncode for run in runs], "".join(outputs)


def test_two_ranks_have_another_gradient(tmp_path):
    """Ragged responses with a reference, tied and untied heads, unlike numbers of microbatches a rank: 1e-5 of the largest gradient."""
    for tie in (True, False):
        save_checkpoint(tmp_path / str(tie), tie=tie)
    (tmp_path / "program.py").write_text(RANK_GRADIENTS)
    codes, output = torchrun(tmp_path / "program.py", tmp_path)
    found = re.findall(r"rank (\d) of 2, tied (\w+), \d+ weights at once, \[(\d+), (\d+)\] microbatches: (\S+)", output)
    assert codes == [0] and len(found) == 8 and all(float(row[4]) < 1e-5 for row in found), output[-3000:]
    assert any(row[2] != row[3] for row in found), "no rank had to make up for a microbatch"
    # where gloo's threads, late to let go of a tensor, abort a run now and then
    assert output.count("left in order") == 2 and "own end" not in output, output[-3000:]


RANK_RUN = """
import json, sys, torch, starter, test_starter as t
torch.set_num_threads(1)
changes = json.loads(sys.argv[3])
with starter.ranks.joined():
    starter.main(**t.run_settings(sys.argv[1], sys.argv[2], reward=t.variety, **changes))
"""


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_two_ranks_learn_something_else_or_cannot_resume_elsewhere(checkpoint, tmp_path, nodes):
    """Every number of a run with the leash on, then resumed by one process from the ranks' checkpoint, and by ranks from one process's."""
    (tmp_path / "program.py").write_text(RANK_RUN)
    alone = starter.main(**run_settings(checkpoint, tmp_path / "alone", reward=variety))["run_folder"]
    codes, output = torchrun(tmp_path / "program.py", checkpoint, tmp_path / "ranks", "{}", nodes=nodes)
    assert codes == [0] * nodes and output.count("=== Report ===") == 1 and "2 ranks" in output, output[-3000:]
    ranks_folder, = tmp_path.glob("ranks/20*")

    def compare(first, second):
        one, two = ({tag: values for tag, values in scalars(run).items() if not tag.startswith(("time/", "mem/")) and "per_s" not in tag and "sampler" not in tag}
                    for run in (first, second))
        assert one.keys() == two.keys()
        for tag in one:
            assert [step for step, _ in one[tag]] == [step for step, _ in two[tag]]
            assert [x for _, x in one[tag]] == pytest.approx([x for _, x in two[tag]], rel=2e-3, abs=1e-5), tag
        weights = [safetensors.torch.load_file(run / "model/model.safetensors") for run in (first, second)]
        for name in weights[0]:
            torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=1e-4)

    compare(alone, ranks_folder)
    shutil.rmtree(ranks_folder / "checkpoints/step_00000006")  # the ranks had saved steps 4 and 6
    starter.main(**run_settings(checkpoint, tmp_path / "ranks", reward=variety, resume=True))
    compare(alone, ranks_folder)
    shutil.rmtree(alone / "checkpoints/step_00000006")
    codes, output = torchrun(tmp_path / "program.py", checkpoint, tmp_path / "alone", '{"resume": true}', nodes=nodes)
    assert codes == [0] * nodes and "after step 4" in output, output[-3000:]
    compare(ranks_folder, alone)


@needs_vllm
@pytest.mark.slow
def test_two_ranks_with_vllm_learn_something_else(checkpoint, tmp_path):
    """Each rank has a vLLM of its own: rewards, lengths and losses are those of one process with vLLM."""
    (tmp_path / "program.py").write_text(RANK_RUN)
    changes = json.dumps(dict(engine="vllm", save_model=False, n_train_steps=3))
    codes, output = torchrun(tmp_path / "program.py", checkpoint, tmp_path / "ranks", changes)
    assert codes == [0] and "2 ranks" in output and "engine: vllm" in output, output[-3000:]
    alone = subprocess.run([sys.executable, tmp_path / "program.py", checkpoint, tmp_path / "alone", changes], cwd=HERE, capture_output=True, text=True,
                           env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)})
    assert alone.returncode == 0, alone.stderr[-3000:]
    one, two = (scalars(next(tmp_path.glob(f"{name}/20*"))) for name in ("alone", "ranks"))
    for tag in ("train/reward_mean", "train/response_length", "train/loss", "train/kl_per_token", "train/grad_norm", "eval/reward_mean"):
        assert [x for _, x in one[tag]] == pytest.approx([x for _, x in two[tag]], rel=5e-3, abs=1e-4), tag


@pytest.mark.slow
def test_rank_that_fails_leaves_the_others_waiting(checkpoint, tmp_path):
    (tmp_path / "program.py").write_text(RANK_RUN.replace(
        "reward=t.variety", "reward=lambda text, problem: 1 / (starter.ranks.rank() == 0 or starter.ranks.world() == 1) and t.variety(text, problem)"))
    codes, output = torchrun(tmp_path / "program.py", checkpoint, tmp_path / "ranks", "{}", timeout=120)
    assert codes[0] != 0 and "reward raised ZeroDivisionError" in output


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints, resume and faults; each fault comes from outside

class Killed(BaseException):
    """Stands for kill -9 within this process: no handler in starter.py may catch it. crash_test.py kills for real."""


def run_settings(checkpoint, folder, **changes):
    """A run in which every state matters: moments, controller, reference, random numbers in the reward, old log-probs."""
    return settings(checkpoint, folder, **(dict(n_train_steps=6, save_every=2, eval_every=3, epochs_per_rollout=2, use_kl_penalty=True,
                    kl_coef=0.1, kl_adaptation_method="target_sound", save_model=True, reward=crash_test.noisy_variety) | changes))


@pytest.fixture(scope="session")
def undisturbed(checkpoint, tmp_path_factory):
    """-> what a run that nothing interrupts ends with."""
    folder = tmp_path_factory.mktemp("undisturbed")
    starter.main(**run_settings(checkpoint, folder / "runs"))
    return crash_test.outcome(folder)


def at_call(owner, name, number, act, after=False):
    """Patch: the number-th call of owner.name (counted from 1) also does act(), before or after the real one."""
    real, calls = getattr(owner, name), itertools.count(1)

    def wrapped(*args, **kwargs):
        hit = next(calls) == number
        if hit and not after:
            act()
        result = real(*args, **kwargs)
        if hit and after:
            act()
        return result
    return mock.patch.object(owner, name, wrapped)


def die():
    raise Killed


def killed(checkpoint, folder, patch, **changes):
    with patch, pytest.raises(Killed):
        starter.main(**run_settings(checkpoint, folder / "runs", **changes))


@pytest.fixture(scope="session")
def stopped(checkpoint, tmp_path_factory):
    """-> runs/ of a run that was killed in its sixth step, with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("stopped")
    killed(checkpoint, folder, at_call(starter, "log_train", 6, die))
    return folder / "runs"


@pytest.mark.parametrize("owner, name, number", [
    (starter, "rollout", 5), (starter, "accumulate_gradients", 2), (starter, "accumulate_gradients", 6), (torch.nn.utils, "clip_grad_norm_", 7), (torch.optim.AdamW, "step", 8),
    (starter, "evaluate", 2), (starter, "log_train", 3), (starter, "measure_kl", 1), (starter, "evaluate", 1)])
def test_killed_and_resumed_run_ends_elsewhere(checkpoint, tmp_path, undisturbed, owner, name, number):
    killed(checkpoint, tmp_path, at_call(owner, name, number, die))
    random.seed(99)  # a new process has other states
    torch.manual_seed(99)
    starter.main(**run_settings(checkpoint, tmp_path / "runs", resume=True))
    assert crash_test.outcome(tmp_path) == undisturbed


def die_with_half_a_file(folder):
    """What a kill in the middle of a write leaves."""
    newest = max(folder.glob("*/checkpoints/unfinished/*"), key=lambda path: path.stat().st_mtime_ns)
    os.truncate(newest, newest.stat().st_size // 2)
    raise Killed


SAVING = [(safetensors.torch, "save_file", 5 + i, act, after, 2) for i in range(4) for act, after in ((die, False), (die_with_half_a_file, True))]
SAVING += [(machine, "sync_to_disk", 10, die, False, 2), (machine, "sync_to_disk", 17, die, True, 2), (machine, "sync_to_disk", 18, die, False, 4)]
SAVING += [(Path, "rename", 2, die, False, 2), (Path, "rename", 2, die, True, 4), (shutil, "rmtree", 3, die, False, 2), (shutil, "rmtree", 7, die, False, 6)]


@pytest.mark.parametrize("owner, name, number, act, after, step", [
    pytest.param(*row, marks=[] if i in (3, 7, 11, 12) else [pytest.mark.slow]) for i, row in enumerate(SAVING)])
def test_save_that_was_cut_short_is_loaded(checkpoint, tmp_path, undisturbed, capsys, owner, name, number, act, after, step):
    """Dies before or after a file operation of a save; a file that is being written is left half. step: the newest whole checkpoint."""
    killed(checkpoint, tmp_path, at_call(owner, name, number, act if act is die else partial(act, tmp_path / "runs"), after))
    starter.main(**run_settings(checkpoint, tmp_path / "runs", resume=True))
    assert f"after step {step}\n" in capsys.readouterr().out
    assert crash_test.outcome(tmp_path) == undisturbed
    assert len(list(tmp_path.glob("runs/*/checkpoints/*"))) == (3 if step == 6 else 2)  # the next save takes the third


@pytest.mark.parametrize("file, damage", [("weights.safetensors", "flip"), ("exp_avg_sq.safetensors", "cut"), ("step.safetensors", "gone"),
                                          ("state.json", "flip"), ("state.json", "gone"), ("SHA256SUMS", "flip"), ("SHA256SUMS", "cut")])
def test_damaged_checkpoint_is_loaded(checkpoint, tmp_path, undisturbed, stopped, capsys, file, damage):
    shutil.copytree(stopped, tmp_path / "runs")
    newest = sorted(tmp_path.glob("runs/*/checkpoints/step_*"))[-1] / file
    whole = bytearray(newest.read_bytes())
    if damage == "gone":
        newest.unlink()
    elif damage == "cut":
        newest.write_bytes(whole[:len(whole) // 2])
    else:
        whole[len(whole) // 2] ^= 1
        newest.write_bytes(whole)
    starter.main(**run_settings(checkpoint, tmp_path / "runs", resume=True))
    printed = capsys.readouterr().out
    assert re.search(r"Warning: \S+step_00000004 is damaged \(.*\); going back to the checkpoint before it\n", printed), printed[-3000:]
    assert "after step 2" in printed and crash_test.outcome(tmp_path) == undisturbed


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_loses_the_step_or_ends_without_a_checkpoint(checkpoint, tmp_path, undisturbed, capsys, number, status):
    with at_call(starter, "accumulate_gradients", 5, lambda: os.kill(os.getpid(), number)), pytest.raises(SystemExit) as stopped:
        starter.main(**run_settings(checkpoint, tmp_path / "runs", save_every=0))
    assert stopped.value.code == status and "stopped after step 3; resume = True goes on from step 3" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    gc.collect()
    starter.main(**run_settings(checkpoint, tmp_path / "runs", resume=True))
    assert crash_test.outcome(tmp_path) == undisturbed


def test_second_signal_is_not_heard(checkpoint, tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT), os.kill(os.getpid(), signal.SIGINT)

    with at_call(starter, "accumulate_gradients", 2, twice), pytest.raises(KeyboardInterrupt):
        starter.main(**run_settings(checkpoint, tmp_path))


def test_two_processes_write_into_one_run(checkpoint, tmp_path, stopped):
    folder = shutil.copytree(stopped, tmp_path / "runs") and next(tmp_path.glob("runs/*"))
    program = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", program, str(folder / ".lock")], stdout=subprocess.PIPE)
    other.stdout.readline()
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="is in use by another process; wait until it ends"):
        starter.main(**run_settings(checkpoint, tmp_path / "runs", resume=True))
    other.kill()
    assert kept == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- a disk that refuses

def test_full_disk_ends_the_run_or_leaves_half_a_checkpoint(checkpoint, tmp_path, undisturbed, capsys):
    """From the fourth step on no file can grow beyond 100 kB, which the weights do."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    free = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    try:
        with at_call(machine.Run, "save", 2, fill), at_call(machine.Run, "save", 2, free, after=True):
            result = starter.main(**run_settings(checkpoint, tmp_path / "runs"))
    finally:
        free()
    printed = capsys.readouterr().out
    assert re.search(r"Warning: no checkpoint of step 4: .*[Ff]ile too large.*; the one before it stays\n", printed), printed[-3000:]
    assert sorted(path.name for path in result["run_folder"].glob("checkpoints/*")) == ["step_00000002", "step_00000006"]
    assert crash_test.outcome(tmp_path) == undisturbed


def test_unwritable_folder_ends_the_run(checkpoint, tmp_path, undisturbed, capsys):
    def no_folder():
        folder, = tmp_path.glob("runs/*/checkpoints")
        shutil.rmtree(folder)
        folder.write_text("a file where the folder was")

    with at_call(machine.Run, "save", 2, no_folder):
        result = starter.main(**run_settings(checkpoint, tmp_path / "runs"))
    printed = capsys.readouterr().out
    assert printed.count("Warning: no checkpoint of step") == 2 and "=== Report ===" in printed
    assert len(scalars(result["run_folder"])["train/loss"]) == 6


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread says so too
def test_run_dies_with_its_folder(checkpoint, tmp_path, undisturbed, capsys):
    """The folder is deleted in the middle: a new log is begun, the next checkpoint is whole, and it can go on from there."""
    vanish = lambda: [shutil.rmtree(path) for path in tmp_path.glob("runs/*")]
    killed(checkpoint, tmp_path, mock.patch.multiple(starter, evaluate=at_call(starter, "evaluate", 2, vanish).new,
                                                     rollout=at_call(starter, "rollout", 9, die).new))
    printed = capsys.readouterr().out
    assert re.search(r"Warning: the log of .* could not be written \(.*\); a new file is begun", printed), printed[-3000:]
    starter.main(**run_settings(checkpoint, tmp_path / "runs", resume=True))
    ours, whole = crash_test.outcome(tmp_path), undisturbed
    assert ours["sha256"] == whole["sha256"]
    later = lambda run: {tag: [(step, value) for step, value in values if step > 3] for tag, values in run["numbers"].items()}
    assert later(ours) == later(whole)


# --- memory

@pytest.mark.parametrize("changes", [{}, dict(use_kl_penalty=False, kl_adaptation_method="none", kl_coef=0.01)])
def test_step_after_a_lack_of_memory_is_another_one(checkpoint, tmp_path, capsys, changes):
    """Memory for 6 rows: larger microbatches fail in the middle of the backward pass, or while the reference reads."""
    real_step, real_hidden = starter.grpo_microbatch_step, starter.response_hidden

    def small(policy, rows, **kwargs):
        found = real_step(policy, rows, **kwargs)
        if len(rows["labels"]) > 6:  # after gradients were added
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return found

    def small_hidden(model, rows, bf16=False):
        if len(rows["input_ids"]) > 10 and kept.get("training"):
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:128] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return real_hidden(model, rows, bf16)

    kept, weights = {}, []
    for name, patches in {"plain": dict(rollout=starter.rollout), "small": dict(grpo_microbatch_step=small, response_hidden=small_hidden)}.items():
        kept["training"] = name == "small"
        with mock.patch.multiple(starter, **patches), mock.patch.object(checks, "refuse_dead_knobs"), \
                mock.patch.object(starter, "measure_kl", return_value=torch.ones(3, 1)):
            result = starter.main(**run_settings(checkpoint, tmp_path / name, n_train_steps=2, max_tokens_per_microbatch=1000, **changes))
        policy, _ = starter.init_policy(result["run_folder"] / "model", CPU)
        weights.append(torch.cat([p.flatten() for p in policy.parameters()]))
    printed = capsys.readouterr().out
    assert len(re.findall(r"Warning: out of memory: from step 1 on microbatches of \d+ tokens\n", printed)) == 2 and "from step 2 on" not in printed
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


def test_out_of_memory_with_one_response_goes_on_for_ever(checkpoint, tmp_path):
    error = torch.OutOfMemoryError("CUDA out of memory.")
    with at_call(starter, "rollout", 4, lambda: setattr(starter, "grpo_microbatch_step", mock.Mock(side_effect=error))), \
            mock.patch.object(starter, "grpo_microbatch_step", starter.grpo_microbatch_step):
        with pytest.raises(RunStopped, match="out of memory with a single response at a time; lower max_new_tokens"):
            starter.main(**run_settings(checkpoint, tmp_path, save_every=0))
    assert [path.name for path in tmp_path.glob("*/checkpoints/*")] == ["step_00000001"]  # the step before is not lost


def test_run_stops_while_some_microbatches_can_still_be_halved():
    rows = lambda n: {"labels": torch.arange(n)[:, None], "ref_hidden": torch.ones(n, 2)}
    halves = starter.halve([rows(1), rows(5)])
    assert [part["labels"][:, 0].tolist() for part in halves] == [[0], [0, 1, 2], [3, 4]] and not any("ref_hidden" in part for part in halves)


def test_other_errors_pass_for_a_lack_of_memory(checkpoint, tmp_path):
    with mock.patch.object(starter, "grpo_microbatch_step", side_effect=RuntimeError("shapes differ")), mock.patch.object(checks, "refuse_dead_knobs"):
        with pytest.raises(RuntimeError, match="shapes differ"):
            starter.main(**run_settings(checkpoint, tmp_path))


# --- numbers that are not finite

@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_infinite_reward_ruins_the_weights_or_the_controller(checkpoint, tmp_path, capsys, bad):
    """In the third step one response gets no finite reward: that step moves nothing, and says so."""
    calls = itertools.count(1)

    def reward(text, problem):  # 1 trial, 20 of the first evaluation, 16 a step, 20 of the evaluation after step 2
        return bad if next(calls) == 1 + 20 + 2 * 16 + 20 + 5 else variety(text, problem)

    result = starter.main(**settings(checkpoint, tmp_path, n_train_steps=5, reward=reward, use_kl_penalty=True, kl_coef=0.1, epochs_per_rollout=2,
                                     kl_adaptation_method="target"))
    seen = scalars(result["run_folder"])
    assert [value for _, value in seen["train/skipped_steps"]] == [0, 0, 1, 1, 1]
    assert math.isnan(seen["train/loss"][2][1]) and all(math.isfinite(value) for step, value in seen["train/loss"] if step != 3)
    beta = dict(seen["adaptive_kl/current_beta"])
    assert "Warning: step 3 is skipped, its loss and grad_norm not finite; its responses: " in capsys.readouterr().out
    path, = tmp_path.glob("*/skipped_step_3.json")
    kept = json.loads(path.read_text())
    assert len(kept["responses"]) == 16 and str(kept["responses"][4]["reward"]) == str(bad) and kept["not finite"] == ["loss", "grad_norm"]
    assert set(kept["responses"][4]) == {"prompt", "text", "reward", "ids", "log_probs"} and math.isfinite(result["after"]["reward_mean"])


def test_infinite_gradient_moves_the_weights(checkpoint, tmp_path):
    """The loss is fine, one gradient is not: weights and moments stay."""
    kept, real = {}, torch.nn.utils.clip_grad_norm_
    calls = itertools.count(1)

    def spoil(parameters, norm):
        parameters = list(parameters)
        if next(calls) == 2:
            kept["before"] = [p.detach().clone() for p in parameters]
            parameters[-1].grad[0] = math.inf
        elif "before" in kept and "after" not in kept:
            kept["after"] = [p.detach().clone() for p in parameters]
        return real(parameters, norm)

    with mock.patch.object(torch.nn.utils, "clip_grad_norm_", spoil):
        result = starter.main(**settings(checkpoint, tmp_path))
    assert all(map(torch.equal, kept["before"], kept["after"]))
    assert [value for _, value in scalars(result["run_folder"])["train/skipped_steps"]] == [0, 1, 1]


def test_run_goes_on_with_nothing_but_skipped_steps(checkpoint, tmp_path):
    calls = itertools.count(1)
    reward = lambda text, problem: variety(text, problem) if next(calls) < 1 + 20 + 16 + 5 else math.nan
    changes = settings(checkpoint, tmp_path, n_train_steps=9, max_skipped=3, eval_every=0, save_every=0)
    with pytest.raises(RunStopped, match=r"3 steps in a row had a loss or gradient that is not finite; look into .*skipped_step_4.json"):
        starter.main(**(changes | dict(reward=reward)))
    assert [path.name for path in tmp_path.glob("*/checkpoints/*")] == ["step_00000004"]
    gc.collect()
    result = starter.main(**(changes | dict(resume=True)))  # the reward was mended
    assert [value for _, value in scalars(result["run_folder"])["train/skipped_steps"]] == [0, 1, 2, 3, 3, 3, 3, 3, 3]


# --- a reward that is broken in the middle

def hang(text, problem):
    while True:
        try:
            time.sleep(60)
        except Exception:  # even one that catches everything it may
            pass


@pytest.mark.parametrize("broken, words", [
    (hang, "took more than 0.2 s on the text"), (lambda text, problem: 1 / 0, "raised ZeroDivisionError: division by zero on the text"),
    (lambda text, problem: "1.0", "returned '1.0' on the text")])
def test_broken_reward_loses_the_run_or_its_text(checkpoint, tmp_path, capsys, broken, words):
    calls = itertools.count(1)
    reward = lambda text, problem: broken(text, problem) if next(calls) == 1 + 20 + 16 + 3 else variety(text, problem)
    changes = settings(checkpoint, tmp_path, reward=reward, reward_seconds=0.2, save_every=0)
    with pytest.raises(InputError, match=f"reward {re.escape(words)} .*; it must return one finite number for every text, or set reward_if_broken"):
        starter.main(**changes)
    assert [path.name for path in tmp_path.glob("*/checkpoints/*")] == ["step_00000001"]
    calls = itertools.count(1)
    result = starter.main(**(changes | dict(reward_if_broken=-1.0)))
    assert re.search(rf"Warning: reward {re.escape(words)} .*; it gets -1.0\n", capsys.readouterr().out)
    reward_mean = dict(scalars(result["run_folder"])["train/reward_mean"])
    assert reward_mean[2] < reward_mean[1] and len(reward_mean) == 3
    calls = itertools.count(1 + 20 + 16 + 3)
    assert checks.rewards_of(reward, ["a", "b"], [{}, {}], 0.2, -1.0)[0] == -1.0


def test_weights_in_the_middle_of_a_step_are_saved_as_a_step(checkpoint, tmp_path, undisturbed):
    """An error in the second epoch of step 4, when the weights have moved: neither step 3 nor step 4 has these."""
    with pytest.raises(RuntimeError, match="a bug"), at_call(starter, "accumulate_gradients", 8, mock.Mock(side_effect=RuntimeError("a bug"))):
        starter.main(**run_settings(checkpoint, tmp_path / "runs"))
    assert [path.name for path in tmp_path.glob("runs/*/checkpoints/*")] == ["step_00000002"]
    gc.collect()
    starter.main(**run_settings(checkpoint, tmp_path / "runs", resume=True))
    assert crash_test.outcome(tmp_path) == undisturbed


def test_run_that_its_reward_stopped_goes_on_elsewhere(checkpoint, tmp_path, undisturbed):
    """Raised in the fourth step, after the evaluation of the third: neither its random numbers nor its lines may count."""
    calls = itertools.count(1)

    def reward(text, problem):
        return 1 / (next(calls) != 1 + 20 + 3 * 16 + 20 + 5) and crash_test.noisy_variety(text, problem)

    with pytest.raises(InputError, match="ZeroDivisionError"):
        starter.main(**run_settings(checkpoint, tmp_path / "runs", reward=reward, save_every=0))
    starter.main(**run_settings(checkpoint, tmp_path / "runs", resume=True))
    assert crash_test.outcome(tmp_path) == undisturbed


# --- an engine that dies or hangs

class FakeEngine:
    """As much of vLLM's LLM as is called, sampling with the policy itself. Counts the engines that were started."""
    started = 0

    def __init__(self, policy, tokenizer, faults):
        type(self).started += 1
        self.policy, self.tokenizer, self.faults, self.weights = policy, tokenizer, faults, None

    def collective_rpc(self, load, args):
        self.weights = {name: p.clone() for name, p in args[0]}

    def reset_prefix_cache(self):
        self.fresh = True
        return True

    def generate(self, prompts, params, use_tqdm):
        assert self.fresh, "what was cached before would decide over bits"
        self.fresh = False
        if self.faults:
            self.faults.pop()()
        assert all(torch.equal(p, self.weights[name]) for name, p in self.policy.named_parameters()), "old weights"
        p = params[0]
        rows = starter.rollout_with_transformers(self.policy, [prompt["prompt_token_ids"] for prompt in prompts], p.n, p.max_tokens, p.temperature,
                                                 p.seed, p.stop_token_ids[0])
        rows = [SimpleNamespace(token_ids=r.response_ids, finish_reason="stop" if r.finished else "length", logprobs=[
            {t: SimpleNamespace(logprob=lp)} for t, lp in zip(r.response_ids, r.log_probs)]) for r in rows]
        return [SimpleNamespace(outputs=rows[i:i + p.n]) for i in range(0, len(rows), p.n)]


def run_with_fake_engine(checkpoint, folder, at_rollout=None, faults=()):
    """A run whose engine has these faults, one a call, from the at_rollout-th rollout on."""
    policy_of, waiting = {}, list(faults)
    real_init = starter.init_policy

    def init(*args):
        policy_of.setdefault("model", real_init(*args))
        return policy_of["model"]

    active = []
    start = lambda *args: FakeEngine(*policy_of["model"], active)
    vllm = SimpleNamespace(SamplingParams=SimpleNamespace)
    FakeEngine.started = 0
    with mock.patch.object(starter, "init_policy", init), mock.patch.object(starter, "init_vllm", start), \
            mock.patch.dict(sys.modules, vllm=vllm), mock.patch.object(importlib.util, "find_spec", return_value=True), \
            at_call(starter, "rollout", at_rollout, lambda: active.extend(waiting)):
        return starter.main(**settings(checkpoint, folder, engine="vllm", engine_seconds=2, eval_every=0, save_every=0, save_model=True))


def test_engine_is_called_while_it_sleeps():
    """vLLM's generate() spins for ever while asleep, and a sync writes into memory that is not there: each call wakes it first."""
    calls, engine = [], mock.Mock()
    for name in ("generate", "sleep", "wake_up", "collective_rpc", "reset_prefix_cache"):
        getattr(engine, name).side_effect = lambda *args, name=name, **kwargs: calls.append(name)
    for sleep, expected in ((False, ["generate", "collective_rpc", "reset_prefix_cache", "generate"]),
                            (True, ["generate", "sleep", "wake_up", "collective_rpc", "reset_prefix_cache", "generate", "sleep", "wake_up", "generate", "sleep"])):
        calls.clear()
        llm = engines.RestartedVLLM(lambda: engine, None, 5, sleep)
        for name in ("generate", "collective_rpc", "reset_prefix_cache", "generate", "generate")[:5 if sleep else 4]:
            getattr(llm, name)()
        assert calls == expected


def engine_dies():
    raise RuntimeError("EngineDeadError")


def engine_hangs():
    time.sleep(60)


@pytest.mark.parametrize("fault, words", [(engine_dies, r"failed \(RuntimeError: EngineDeadError\)"), (engine_hangs, "did not return within 2 s")])
def test_engine_is_not_restarted_or_has_old_weights(checkpoint, tmp_path, capsys, fault, words):
    run_with_fake_engine(checkpoint, tmp_path / "plain/runs")
    assert FakeEngine.started == 1
    run_with_fake_engine(checkpoint, tmp_path / "once/runs", 3, [fault])
    assert FakeEngine.started == 2
    assert re.search(rf"Warning: vLLM's generate {words}; it is started again with the present weights\n", capsys.readouterr().out)
    assert crash_test.outcome(tmp_path / "once", checkpoints=False) == crash_test.outcome(tmp_path / "plain", checkpoints=False)
    with pytest.raises(RunStopped, match=f"vLLM's generate {words}, twice; resume = True goes on"):
        run_with_fake_engine(checkpoint, tmp_path / "twice", 3, [fault, fault])
    assert [path.name for path in tmp_path.glob("twice/*/checkpoints/*")] == ["step_00000001"]


def test_engine_that_cannot_start_again_is_a_traceback(capsys):
    at_hand = iter([mock.Mock(generate=mock.Mock(side_effect=RuntimeError("died")))])

    def start():
        for engine in at_hand:
            return engine
        raise ValueError("no memory for the cache")

    with pytest.raises(RunStopped, match=r"vLLM's generate failed \(ValueError: no memory for the cache\), twice; resume = True"):
        engines.RestartedVLLM(start, None, 5).generate([])
    assert "failed (RuntimeError: died); it is started again" in capsys.readouterr().out


# --- for real: kill -9, memory that ends, vLLM

@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_published_kill_was_not_survived(engine):
    rows = [row for row in ablate_kl.read_csv(HERE / "results" / "kills.csv") if row["engine"] == engine]
    assert len(rows) == 50 and {row["phase"] for row in rows} == set(crash_test.PHASES)
    assert all((row["killed"], row["same_weights"], row["same_log"]) == ("True",) * 3 for row in rows)


@pytest.mark.slow
def test_killed_processes_do_not_end_with_the_same_bits():
    for row in crash_test.kill_runs(range(4), "transformers", 2):
        assert row["killed"] and row["same_weights"] and row["same_log"], row


@needs_vllm
@pytest.mark.slow
def test_killed_processes_with_vllm_do_not_end_with_the_same_bits():
    for row in crash_test.kill_runs(range(4), "vllm", 2):
        assert row["killed"] and row["same_weights"] and row["same_log"], row


@needs_vllm
@pytest.mark.slow
def test_real_engine_cannot_be_started_again(checkpoint, tmp_path):
    program = """
import sys, itertools, starter, test_starter as t
from unittest import mock
from vllm import LLM
real, calls = LLM.generate, itertools.count(1)
def generate(self, *args, **kwargs):
    if next(calls) == int(sys.argv[3]):
        raise RuntimeError("the engine died")
    return real(self, *args, **kwargs)
with mock.patch.object(LLM, "generate", generate):
    starter.main(**t.settings(sys.argv[1], sys.argv[2], engine="vllm", save_model=True))
"""
    for name, at in (("plain", 99), ("died", 3)):
        run = subprocess.run([sys.executable, "-c", program, str(checkpoint), str(tmp_path / name / "runs"), str(at)], cwd=HERE, capture_output=True,
                             text=True, timeout=300)
        assert run.returncode == 0, run.stderr[-3000:]
    assert "vLLM's generate failed (RuntimeError: the engine died); it is started again with the present weights" in run.stdout
    assert crash_test.outcome(tmp_path / "died") == crash_test.outcome(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_real_lack_of_memory_ends_the_run(checkpoint, tmp_path):
    """The address space is limited to what is held before the first update and a little more; a large microbatch does not fit."""
    program = """
import sys, resource, starter, test_starter as t
from pathlib import Path
real = starter.accumulate_gradients
def limited(*args, **kwargs):
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + int(sys.argv[3]) * 2**20, resource.RLIM_INFINITY))
    try:
        return real(*args, **kwargs)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
starter.accumulate_gradients = limited
starter.main(**t.settings(sys.argv[1], sys.argv[2], n_train_steps=2, rollout_batch_size=1024, max_new_tokens=32, max_tokens_per_microbatch=100_000,
                          save_model=True))
"""
    folders = []
    for name, megabytes in (("plain", 20_000), ("small", 300)):
        run = subprocess.run([sys.executable, "-c", program, str(checkpoint), str(tmp_path / name), str(megabytes)], cwd=HERE, capture_output=True, text=True,
                             env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
        folders += (tmp_path / name).glob("*/model")
    assert "Warning: out of memory: from step 1 on microbatches of" in run.stdout and run.stdout.count("Step ") == 2
    weights = [torch.cat([p.flatten() for p in starter.init_policy(folder, CPU)[0].parameters()]) for folder in folders]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Bad input to main(): each row is a real run that must end with one sentence, before anything is written

VLLM = bool(importlib.util.find_spec("vllm"))
GSM8K = dict(task="gsm8k", train_file="train.jsonl")
RESUME = dict(resume=True, n_train_steps=2)
NUMBERS = [  # what is changed, how the sentence goes; refused before a model is loaded, with nothing on stdout
    (dict(model_id=3), r"model_id = 3 must be 'tiny', a checkpoint folder or a Hugging Face name; use for example 'tiny'"),
    (dict(model_id=""), r"model_id = '' must be 'tiny', a checkpoint folder"),
    (dict(model_id="./nowhere"), r"model_id = './nowhere' is not a folder; give a checkpoint folder"),
    (dict(model_id=Path("nowhere/model")), r"model_id = 'nowhere/model' is not a folder; give"),
    (dict(model_id="tinny"), r"model_id = 'tinny' is not a folder; .*did you mean 'tiny'\?"),
    (dict(model_id="x" * 5000), r"model_id = 'xxx.*\.\.\. is not a folder; give"), (dict(model_id="a\0b"), r"model_id = 'a\\x00b' is not a folder; give"),
    (dict(model_id="train.jsonl"), r"model_id = 'train.jsonl' is not a folder; give"),
    (dict(model_id="empty"), r"model_id = 'empty' is not a checkpoint: config.json and \*.safetensors are not there; give a folder written by"),
    (dict(model_id="no_config"), r"model_id = 'no_config' is not a checkpoint: config.json and"),
    (dict(model_id="no_weights"), r"model_id = 'no_weights' is not a checkpoint: config.json and"),
    (dict(task="chess"), r"task = 'chess' must be one of 'countdown', 'gsm8k'; use for example 'countdown'"),
    (dict(task="countdwon"), r"task = 'countdwon' must be .*; did you mean 'countdown'\?"), (dict(task=["gsm8k"]), r"task = \['gsm8k'\] must be"),
    (dict(task="gsm8k"), r"task = 'gsm8k' needs a JSONL file; use for example train_file = "),
    (dict(task="gsm8k", eval_file="train.jsonl"), r"task = 'gsm8k' needs a JSONL file; use for example train_file = "),
    (dict(train_file="train.jsonl"), r"train_file = 'train.jsonl' is not read by task = 'countdown'; use task = 'gsm8k'"),
    (GSM8K | dict(train_file="missing.jsonl"), r"train_file = 'missing.jsonl' is not a file that can be read; give the path of a JSONL file"),
    (GSM8K | dict(train_file=3), r"train_file = 3 must be None or the path of a JSONL file; use"),
    (GSM8K | dict(train_file=["train.jsonl"]), r"train_file = \['train.jsonl'\] must be None or the path of a JSONL file"),
    (GSM8K | dict(train_file="y" * 300), r"train_file = 'yyy.* is not a file that can be read; give"),
    (GSM8K | dict(train_file="empty"), r"train_file = 'empty' is not a file that can be read; give"),
    (GSM8K | dict(eval_file="missing.jsonl"), r"eval_file = 'missing.jsonl' is not a file that can be read; give"),
    (GSM8K | dict(eval_file=True), r"eval_file = True must be None or the path of a JSONL file"), (GSM8K | dict(eval_file=""), r"eval_file = '' must be None or the path of"),
    *((GSM8K | {key: file}, message) for key in ("train_file", "eval_file") for file, message in (
        ("bad_line.jsonl", r"bad_line.jsonl line 17 is not JSON \(Expecting value: .*\); mend or delete that line"),
        ("no_answer.jsonl", r"no_answer.jsonl line 17 has no text under 'answer'; each line must be an object with question and answer"),
        ("list.jsonl", r"list.jsonl line 17 has no text under 'question'"), ("number.jsonl", r"number.jsonl line 17 has no text under 'answer'"),
        ("deep.jsonl", r"deep.jsonl line 17 is not JSON \(.*recursion.*\); mend"), ("binary.jsonl", r"binary.jsonl line 1 is not JSON"),
        ("surrogate.jsonl", r"surrogate.jsonl line 17 .*surrogates not allowed\); mend or delete that line"),
        ("empty.jsonl", r"empty.jsonl has no lines; each line must be a JSON object with question and answer"))),
    (GSM8K | dict(train_file="one.jsonl"), r"task = 'gsm8k' gave no (train|held-out) problems; use more lines, or give an eval_file"),
    (GSM8K | dict(eval_file="train.jsonl"), r"4 of 4 held-out problems are trained on, for example '.*'; take them out of one of the two files"),
    (GSM8K | dict(eval_file="overlap.jsonl"), r"1 of 4 held-out problems are trained on, for example 'What is 39 \+ 1\?"),
    (dict(reward="exact"), r"reward = 'exact' must be a function \(response_text, problem\) -> number; use"), (dict(reward=None), r"reward = None must be a function"),
    (dict(reward=pow), r"reward raised TypeError: .* on the text .*; it must return one finite number"),
    (dict(reward=lambda text, problem: 10**400), r"reward raised OverflowError: .*; it must return one finite number"),
    (dict(reward=lambda text, problem: "a\nb"), r"reward returned 'a\\nb' on the text .*; it must return"),
    (dict(reward=lambda text, problem: [][0]), r"reward raised IndexError: .*; it must return"),
    (dict(reward=lambda text, problem: (_ for _ in ()).throw(ValueError("two\nlines"))), r"reward raised ValueError: two lines on the text .*; it must return"),
    (dict(reward=lambda text, problem: math.inf), r"reward returned inf on the text .*; it must return one finite number"),
    (dict(reward=lambda text, problem: time.sleep(9), reward_seconds=0.1), r"reward took more than 0.1 s on the text .*; it must"),
    (dict(reward_seconds=0), r"reward_seconds = 0 must be a number from 0.001 to 1000000; use for example 10"),
    (dict(reward_seconds=1e300), r"reward_seconds = 1e\+300 must be"), (dict(reward_seconds="10"), r"reward_seconds = '10' must be"),
    (dict(reward_if_broken="0"), r"reward_if_broken = '0' must be None or a number; use"), (dict(reward_if_broken=math.nan), r"reward_if_broken = nan must be"),
    (dict(n_train_problems=0), r"n_train_problems = 0 must be a whole number from 1 to 10\*\*9"), (dict(n_train_problems=1e3), r"n_train_problems = 1000.0 must be"),
    (dict(numbers_per_problem=3), r"numbers_per_problem = 3 must be a tuple of whole numbers from 2 to 6; use for example \(3, 4\)"),
    *((dict(numbers_per_problem=sizes), r"numbers_per_problem = .* must be a tuple of") for sizes in ((), (1, 2), [2, 7], (2, 2.0), "23", {2, 3}, (True, 2))),
    (dict(max_number=0), r"max_number = 0 must be a whole number from 1 to 10\*\*9"), (dict(max_number="99"), r"max_number = '99' must be"),
    (dict(max_number=2, numbers_per_problem=(2,), n_eval_problems=500), r"only \d+ of \d+ Countdown problems .*; use larger numbers or fewer problems"),
    (dict(max_target=-5), r"max_target = -5 must be a whole number from 1 to 10\*\*9"),
    (dict(countdown_prompt=5), r"countdown_prompt = 5 must be a text with \{numbers\} and \{target\} in it; use for example 'make \{target\}: \{numbers\}'"),
    *((dict(countdown_prompt=text), r"countdown_prompt = .* must be a text with \{numbers\} and \{target\} in it; use")
      for text in ("", "make {target}", "make {goal} {target}: {numbers}", "{numbers} {target} {", "{numbers} {target} {0}", "{numbers.x} {target}", "\ud800 {numbers} {target}")),
    (dict(seed=-1), r"seed = -1 must be a whole number from 0 to 10\*\*9"), (dict(seed=0.5), r"seed = 0.5 must be"), (dict(seed=True), r"seed = True must be"),
    (dict(seed=2**31), r"seed = 2147483648 must be a whole number from 0 to 10\*\*9; use"),
    (dict(engine="sglang"), r"engine = 'sglang' must be one of 'auto', 'vllm', 'transformers'; use for example 'auto'"),
    (dict(engine="vlm"), r"engine = 'vlm' must be .*; did you mean 'vllm'\?"), (dict(engine=torch.zeros(2)), r"engine = .* must be one of"),
    *([] if VLLM else [(dict(engine="vllm"), r"engine = 'vllm' needs vLLM, which is not installed here; use engine = 'transformers', or install")]),
    (dict(device="tpu"), r"device = 'tpu' must be 'auto', 'cpu', 'cuda' or 'cuda:N'; did you mean 'cpu'\?"), (dict(device="cuda:x"), r"device = 'cuda:x' must be"),
    (dict(device="cdua"), r"device = 'cdua' must be .*; did you mean 'cuda'\?"), (dict(device=0), r"device = 0 must be"),
    (dict(device="cuda:99"), r"device = 'cuda:99' needs a CUDA GPU of that number and there are \d+ here; use device = 'cpu'"),
    (dict(n_train_steps=0), r"n_train_steps = 0 must be a whole number from 1 to 10\*\*9"), (dict(n_train_steps="80"), r"n_train_steps = '80' must be"),
    (dict(n_train_steps=math.inf), r"n_train_steps = inf must be"), (dict(n_train_steps=[1, 2]), r"n_train_steps = \[1, 2\] must be"),
    (dict(n_train_steps=10**400), r"n_train_steps = 1000+\.\.\. must be a whole number"),
    (dict(rollout_batch_size=100, group_size=8), r"rollout_batch_size = 100 is not a multiple of group_size = 8; use 96 or 104"),
    (dict(rollout_batch_size=4, group_size=8), r"rollout_batch_size = 4 is not a multiple of group_size = 8; use 8"),
    (dict(rollout_batch_size=1), r"rollout_batch_size = 1 must be a whole number from 2 to 10\*\*9"),
    (dict(group_size=1), r"group_size = 1 must be a whole number from 2 to 10\*\*9; use"), (dict(group_size=4.0), r"group_size = 4.0 must be"),
    (dict(group_size=None), r"group_size = None must be"), (dict(group_size=True), r"group_size = True must be"),
    (dict(max_new_tokens=0), r"max_new_tokens = 0 must be a whole number from 1 to 10\*\*9"),
    (dict(temperature=0), r"temperature = 0 must be a number from 0.01"), (dict(temperature=math.nan), r"temperature = nan must be"),
    (dict(temperature="1"), r"temperature = '1' must be"), (dict(temperature=True), r"temperature = True must be"),
    (dict(temperature=torch.ones(2)), r"temperature = \[1.0, 1.0\] must be"),
    (dict(vllm_sleep=1), "vllm_sleep = 1 must be True or False"), (dict(vllm_sleep=True), "vllm_sleep = True needs vLLM on a CUDA GPU"),
    (dict(gpu_mem_util=4), r"gpu_mem_util = 4 must be a number from 0.05 to 0.95; use for example 0.4"), (dict(gpu_mem_util=0), r"gpu_mem_util = 0 must be"),
    (dict(engine_seconds=-1), r"engine_seconds = -1 must be a number from 0.001"), (dict(engine_seconds=math.inf), r"engine_seconds = inf must be"),
    (dict(normalize_by_std=1), r"normalize_by_std = 1 must be True or False"), (dict(advantage_eps=0), r"advantage_eps = 0 must be a number above 0"),
    (dict(loss_average="mean"), r"loss_average = 'mean' must be one of 'grpo', 'dapo', 'dr_grpo'; use for example 'dapo'"),
    (dict(loss_average="drgrpo"), r"loss_average = 'drgrpo' must be .*; did you mean 'dr_grpo'\?"),
    (dict(clip_range=-0.1), r"clip_range = -0.1 must be a number from 0 to 0.99"), (dict(clip_range=1), r"clip_range = 1 must be"),
    (dict(clip_range_high=-1), r"clip_range_high = -1 must be None or a number of at least 0"), (dict(clip_range_high="0.3"), r"clip_range_high = '0.3' must be"),
    (dict(importance_cap=0.5), r"importance_cap = 0.5 must be None or a number of at least 1"), (dict(importance_cap=math.inf), r"importance_cap = inf must be"),
    (dict(epochs_per_rollout=0), r"epochs_per_rollout = 0 must be a whole number from 1 to 10\*\*9"),
    (dict(use_kl_penalty="yes"), r"use_kl_penalty = 'yes' must be True or False"), (dict(use_kl_penalty=1), r"use_kl_penalty = 1 must be True or False"),
    (dict(kl_coef=-0.1), r"kl_coef = -0.1 must be a number of at least 0"), (dict(kl_coef=math.nan), r"kl_coef = nan must be"),
    (leash(kl_coef=10**400), r"kl_coef = 1000+\.\.\. must be"), (leash(kl_coef=math.inf), r"kl_coef = inf must be"),
    (dict(kl_estimator="k4"), r"kl_estimator = 'k4' must be one of 'k1', 'k2', 'k3', 'exact'"),
    (dict(kl_estimator="exactt"), r"kl_estimator = 'exactt' must be .*; did you mean 'exact'\?"),
    (dict(kl_gradient="revers"), r"kl_gradient = 'revers' must be .*; did you mean 'reverse'\?"),
    (dict(kl_in="rewards"), r"kl_in = 'rewards' must be one of 'loss', 'loss_to_go', 'reward'; did you mean 'reward'\?"),
    *((dict(kl_estimator=e, kl_in="reward"), r"kl_estimator = .* changes nothing while the leash is off; set use_kl_penalty = True") for e in ("k1", "k2")),
    *((leash(kl_estimator=e, kl_in="reward"), rf"kl_estimator = '{e}' with kl_in = 'reward' does not see the sign .* use kl_estimator = 'k1'")
      for e in ("k2", "k3", "exact")),
    (leash(kl_gradient="as_written", kl_in="loss_to_go"), r"kl_gradient = 'as_written' .* is the gradient of no divergence; use kl_gradient = 'reverse'"),
    (leash(kl_estimator="k2", kl_in="loss_to_go"), r"kl_estimator = 'k2' .* biased KL; use kl_estimator = 'exact'"),
    (leash(kl_estimator="k1", kl_adaptation_method="sigmoid"), r"kl_adaptation_method = .* turns the pull around where k1 is negative; use kl_estimator = 'exact'"),
    (leash(kl_estimator="exact", kl_adaptation_method="clip_sound"), r"kl_adaptation_method = 'clip_sound' cuts the log-ratios of sampled tokens, .* use kl_estimator = 'k3'"),
    (leash(kl_estimator="k1", kl_gradient="as_written"), r"kl_estimator = 'k1' .* expected gradient of zero .* use kl_gradient = 'reverse', or reproduce_paper"),
    (leash(kl_ratio_cap=0.5), r"kl_ratio_cap = 0.5 must be a number of at least 1, or math.inf"), (leash(kl_ratio_cap=torch.ones(2)), r"kl_ratio_cap = \[1.0, 1.0\] must be"),
    (leash(kl_adaptation_method="huber"), r"kl_adaptation_method = 'huber' must be 'none', one of clip, .*, one of target, .* 'dynamic\+sigmoid'"),
    (leash(kl_adaptation_method="clip+sigmoid"), r"kl_adaptation_method = 'clip\+sigmoid' must be"), (leash(kl_adaptation_method=""), r"kl_adaptation_method = '' must be"),
    (leash(kl_adaptation_method="sigmiod"), r"kl_adaptation_method = 'sigmiod' must be .*; did you mean 'sigmoid'\?"),
    (leash(kl_adaptation_method=None), r"kl_adaptation_method = None must be a text"),
    (leash(kl_coef=0.0, kl_adaptation_method="target"), r"kl_adaptation_method = 'target' changes nothing while the leash is off; .* kl_coef above 0"),
    (leash(kl_clip_threshold=-1), r"kl_clip_threshold = -1 must be"), (leash(kl_target=0), r"kl_target = 0 must be None or a number above 0, in nats per token"),
    (dict(kl_target=0.2), r"kl_target = 0.2 changes nothing while the leash is off"),
    (leash(dynamic_beta_decay=1.1), r"dynamic_beta_decay = 1.1 must be a number above 0 and below 1"), (leash(reward_threshold="0.8"), r"reward_threshold = '0.8' must be a number"),
    (leash(beta_min=-1), r"beta_min = -1 must be"), (leash(beta_schedule_steps=0), r"beta_schedule_steps = 0 must be"),
    (leash(reproduce_paper="no"), r"reproduce_paper = 'no' must be True or False"),
    (dict(learning_rate="1e-5"), r"learning_rate = '1e-5' must be a number above 0"), (dict(learning_rate=0), r"learning_rate = 0 must be"),
    (dict(learning_rate=math.inf), r"learning_rate = inf must be"), (dict(learning_rate=1j), r"learning_rate = 1j must be"),
    (dict(warmup_steps=-1), r"warmup_steps = -1 must be a whole number from 0 to 10\*\*9"), (dict(weight_decay=2), r"weight_decay = 2 must be a number from 0 to 1"),
    (dict(max_grad_norm=0), r"max_grad_norm = 0 must be a number above 0"), (dict(max_skipped=0), r"max_skipped = 0 must be a whole number from 1 to 10\*\*9"),
    (dict(max_tokens_per_microbatch=8), r"max_tokens_per_microbatch = 8 must be a whole number from 16 to 10\*\*9"),
    (dict(gradient_checkpointing=0), r"gradient_checkpointing = 0 must be True or False"), (dict(bf16="True"), r"bf16 = 'True' must be None, True or False"),
    (dict(eval_every=-1), r"eval_every = -1 must be a whole number from 0 to 10\*\*9"), (dict(n_eval_problems=0), r"n_eval_problems = 0 must be"),
    (dict(eval_temperature=-1), r"eval_temperature = -1 must be a number from 0 to 10"), (dict(eval_temperature="greedy"), r"eval_temperature = 'greedy' must be"),
    (dict(out_dir="/dev/null/runs"), r"out_dir = '/dev/null/runs' cannot be written: /dev/null is not a writable folder; use out_dir = 'runs'"),
    (dict(out_dir="train.jsonl"), r"out_dir = 'train.jsonl' cannot be written: .*train.jsonl is not a writable folder; use"),
    (dict(out_dir=3), r"out_dir = 3 must be the path of a folder; use for example 'runs'"), (dict(out_dir=""), r"out_dir = '' must be the path of a folder"),
    (dict(out_dir="z" * 300), r"out_dir = 'zzz.* cannot be written: .*; use out_dir = 'runs'"), (dict(out_dir="a\0b"), r"out_dir = 'a\\x00b' cannot be written: .*; use"),
    (dict(save_every=-1), r"save_every = -1 must be a whole number from 0 to 10\*\*9"), (dict(save_every=True), r"save_every = True must be"),
    (dict(resume=2), r"resume = 2 must be True, False or the folder of a run; use"), (dict(save_model="yes"), r"save_model = 'yes' must be True or False"),
    (dict(resume="nowhere"), r"resume = 'nowhere': there is no run in 'nowhere'; use the folder of one, or resume = False"),
    (dict(resume="x" * 5000), r"resume = 'xxx.*: there is no run in .*; use the folder of one"),
    (dict(resume=True, out_dir="empty"), r"resume = True: there is no run in 'empty'; use the folder of one, or resume = False"),
    (dict(resume="checkpoint"), r"resume = 'checkpoint': there is no run in 'checkpoint'; use the folder of one, or resume = False"),
    (dict(resume="empty"), r"resume = 'empty': there is no run in 'empty'; use"), (dict(resume="train.jsonl"), r"resume = 'train.jsonl': there is no run in"),
    (RESUME | dict(learning_rate=0.5), r"learning_rate = 0.5 would break the curve of runs/.*, which began with 0.001; use that value, or resume = False"),
    (RESUME | dict(model_id="with_space"), r"model_id = 'with_space' would break the curve of runs/.*, which began with 'checkpoint'; use that value"),
    (RESUME | dict(seed=1, eval_every=7), r"seed = 1 would break the curve of runs/.*, which began with 0; use that value"),
    (RESUME | dict(resume="torn_run"), r"torn_run/config.json is damaged; use resume = False to begin a new run"),
    (RESUME | dict(resume="list_run"), r"resume = 'list_run': there is no run in 'list_run'; use"),
    (RESUME | dict(resume="binary_run"), r"binary_run/config.json is damaged; use resume = False"),
    (RESUME | dict(resume="other_problems"), r"the problems are not those that other_problems began with; put their files back, or use resume = False"),
    (dict(resume=True, n_train_steps=1), r"n_train_steps = 1 is less than the 2 steps that runs/.* has done; use at least 2"),
]
FOLDERS = [  # refused once the files are read
    (RESUME | dict(resume="damaged_run"), r"no checkpoint of damaged_run is whole; use resume = False to begin a new run"),
    (RESUME | dict(resume="other_start", model_id="other_weights"), r"model_id = 'other_weights' holds other weights than those that the run began with; put these back, or use"),
    (RESUME, r"runs/.* is in use by another process; wait until it ends, or use resume = False"),
    *((dict(model_id=name), rf"model_id = '{name}' cannot be loaded \({cause}.*\); give a folder written by save_pretrained with its tokenizer") for name, cause in [
        ("half_tokenizer", ""), ("torn_config", "OSError: .*not a valid JSON"), ("list_config", ""), ("odd_config", ""), ("unknown_architecture", "ValueError: .*perceptron"), ("no_architecture", "ValueError"),
        ("torn_weights", "SafetensorError"), ("garbage_weights", "SafetensorError"), ("empty_weights", "SafetensorError"), ("half_header", "SafetensorError"),
        ("torn_tokenizer", ""), ("list_tokenizer", ""), ("nobody/no-such-model", "OSError"), ("nobody/--..--", "")]),
    (dict(model_id="missing_weights"), r"model_id = 'missing_weights' has no weights for .*; give a folder written by save_pretrained"),
    (dict(model_id="other_layers"), r"model_id = 'other_layers' has no weights for model.layers.2.* and 10 more in the shape that its config.json says; give"),
    (dict(model_id="other_shapes"), r"model_id = 'other_shapes' has no weights for .* and \d+ more in the shape that its config.json says; give"),
    (dict(model_id="nan_weights"), r"model_id = 'nan_weights' has weights that are not finite; give"),
    (dict(model_id="no_tokenizer"), r"the tokenizer of no_tokenizer makes nothing of a text; save it there with save_pretrained"),
    (dict(model_id="no_eos"), r"the tokenizer of no_eos has no EOS token, so no response could end; set its eos_token"),
    (dict(model_id="more_tokens"), r"the tokenizer of more_tokens has ids up to \d+, its model reads 40 tokens; take the tokenizer that belongs to it"),
    *((dict(model_id=name), rf"the chat template of {name} fails on a user's message \(.*\); mend it, or delete it") for name in ("raising_template", "torn_template")),
    (dict(model_id="deaf_template"), r"the chat template of deaf_template leaves out the user's message; mend it, or delete it"),
    (dict(model_id="bias"), r"bias changes its logits after the LM head \(bias, scale or cap\), .*; use a Qwen, Llama or Mistral model"),
    (dict(model_id="bad_skills"), r"bad_skills/retention.jsonl line 1 has no text under 'answer'; each line must be"),
    (dict(max_new_tokens=250), r"max_new_tokens = 250 after a prompt of \d+ tokens does not fit into the 256 tokens that checkpoint reads; use 2\d\d or fewer"),
    (dict(countdown_prompt="{numbers} {target}" + "?" * 300), r"max_new_tokens = 8 after a prompt of 3\d\d tokens does not fit into the 256 tokens that checkpoint reads; shorten it, or"),
    (GSM8K | dict(train_file="long.jsonl"), r"max_new_tokens = 8 after a prompt of \d+ tokens does not fit into the 256 tokens that checkpoint reads; shorten it, or"),
    (leash(kl_adaptation_method="clip", kl_clip_threshold=1e9), r"kl_adaptation_method = 'clip' changes nothing here: .*; leave it at 'none'"),
    (leash(kl_coef=1e-12), r"kl_coef = 1e-12 changes nothing here: .*; use a larger one"),
]


def make_bad_folders(root):
    """The files that the rows name, relative to root. runs/ gets its earlier run later."""
    def text(name, content):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    def copy(name, **files):
        """A copy of the checkpoint in which some files are others; None: deleted."""
        shutil.copytree(root / "checkpoint", root / name)
        for file, content in files.items():
            (root / name / FILES[file]).unlink()
            if content is not None:
                text(f"{name}/{FILES[file]}", content)

    def sums(name, *lines):
        text(name, "\n".join(json.dumps({"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"}) for i in range(16)) + "\n" + "\n".join(lines))

    save_checkpoint(root / "checkpoint")
    FILES = {"config": "config.json", "weights": "model.safetensors", "tokenizer": "tokenizer.json", "tokenizer_config": "tokenizer_config.json",
             "template": "chat_template.jinja", "generation": "generation_config.json"}
    old = {key: (root / "checkpoint" / name).read_bytes() for key, name in FILES.items()}
    config = json.loads(old["config"])
    (root / "empty").mkdir()
    for name in ("train.jsonl", "long.jsonl"):
        text(name, "".join(json.dumps({"question": f"What is {i} + 1?" + " Why?" * 60 * (name == "long.jsonl"), "answer": f"#### {i + 1}"}) + "\n" for i in range(40)))
    sums("bad_line.jsonl", '{"question": "?", "answer": '), sums("no_answer.jsonl", '{"question": "?"}'), sums("list.jsonl", "[1]")
    sums("number.jsonl", '{"question": "?", "answer": 3}'), sums("deep.jsonl", "[" * 100_000), sums("surrogate.jsonl", r'{"question": "\ud800", "answer": "#### 1"}')
    text("binary.jsonl", bytes(range(256)) * 8), text("empty.jsonl", "\n \n"), text("one.jsonl", json.dumps({"question": "?", "answer": "1"}))
    text("overlap.jsonl", "".join(json.dumps({"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"}) + "\n" for i in range(39, 43)))

    copy("no_config", config=None), copy("no_weights", weights=None), copy("with_space")
    copy("torn_config", config=old["config"][:200]), copy("list_config", config="[]"), copy("odd_config", config=json.dumps(config | {"hidden_size": "many"}))
    copy("unknown_architecture", config=json.dumps(config | {"model_type": "perceptron", "architectures": ["Perceptron"]}))
    copy("no_architecture", config=json.dumps({k: v for k, v in config.items() if k not in ("model_type", "architectures")}))
    copy("torn_weights", weights=old["weights"][:-1000]), copy("garbage_weights", weights=random.Random(0).randbytes(5000))
    copy("empty_weights", weights=b""), copy("half_header", weights=old["weights"][:100])
    copy("other_shapes", config=json.dumps(config | {"hidden_size": 32}))
    copy("other_layers", config=json.dumps(config | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}))
    copy("torn_tokenizer", tokenizer=old["tokenizer"][:200]), copy("list_tokenizer", tokenizer="[]")
    copy("half_tokenizer", tokenizer=None), copy("no_tokenizer", tokenizer=None, tokenizer_config=None, template=None)
    copy("no_eos", tokenizer_config=json.dumps({k: v for k, v in json.loads(old["tokenizer_config"]).items() if k != "eos_token"}))
    copy("raising_template", template="{{ raise_exception('no\\nsystem message') }}"), copy("torn_template", template="{% for m in messages %}{{ m['content']")
    copy("deaf_template", template="{% for m in messages %}<|user|>{% endfor %}<|assistant|>")
    copy("bad_skills"), text("bad_skills/retention.jsonl", '{"skill": "sort", "prompt": "sort 21"}\n')
    from safetensors.torch import load_file, save_file
    tensors = load_file(root / "checkpoint" / "model.safetensors")
    copy("missing_weights"), copy("nan_weights")
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp" not in k}, root / "missing_weights" / "model.safetensors", metadata={"format": "pt"})
    save_file({k: v * math.nan for k, v in tensors.items()}, root / "nan_weights" / "model.safetensors", metadata={"format": "pt"})
    save_checkpoint(root / "other_weights", seed=1)
    for name, changes in (("more_tokens", dict(vocab_size=40)), ("bias", dict(family="Phi"))):
        save_checkpoint(root / name, **changes)
    tensors = load_file(root / "bias" / "model.safetensors")
    save_file(tensors | {"lm_head.bias": torch.linspace(0, 1, len(tensors["lm_head.bias"]))}, root / "bias" / "model.safetensors", metadata={"format": "pt"})


def make_bad_runs():
    """Copies of the earlier run, each damaged in another way."""
    run, = Path("runs").iterdir()
    config = (run / "config.json").read_text()
    for name, content in {"torn_run": config[:100], "list_run": "[]", "binary_run": b"\xff\xfe\0" * 50, "damaged_run": config,
                          "other_problems": re.sub(r'"problems_crc32": \d+', '"problems_crc32": 1', config),
                          "other_start": config.replace('"model_id": "checkpoint"', '"model_id": "other_weights"')}.items():
        shutil.copytree(run, name)
        Path(name, "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    for path in Path("damaged_run").glob("checkpoints/*/weights.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])


def try_bad_inputs():
    """In a process of its own, which has not computed anything yet: a child per row. Prints the outcomes as JSON."""
    from transformers.models.auto import modeling_auto, tokenization_auto  # once, for all children
    from transformers.models.phi import modeling_phi
    from transformers.models.qwen3 import modeling_qwen3
    everything = lambda: {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None) for path in Path().rglob("*")}

    gc.freeze()  # or each child's end copies what it shares with this process
    hook = sys.excepthook

    def start(row, changes):
        files = [tempfile.TemporaryFile("w+") for _ in range(2)]
        child = os.fork()
        if child:
            return child, files
        os.dup2(files[0].fileno(), 1), os.dup2(files[1].fileno(), 2)
        if row % 8 and row < len(NUMBERS):  # the interpreter's own end takes a third of a second: it is left to the other rows
            sys.excepthook = lambda *caught: (hook(*caught), sys.stdout.flush(), sys.stderr.flush(), os._exit(1))
        starter.main(**settings("checkpoint", "runs", n_train_steps=2, save_every=1, n_eval_problems=4) | changes)
        sys.exit(0)

    def run(rows):
        """At once; a file that any of them touches is held against all."""
        before, begin, started, outcomes = everything(), time.perf_counter(), [start(*row) for row in rows], []
        for child, files in started:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            out, err = (file.seek(0) or file.read() for file in files)
            outcomes.append(dict(status=status, stdout=out, stderr=err, seconds=time.perf_counter() - begin))
        after = everything()
        touched = [name for name in before | after if before.get(name) != after.get(name)]
        return [outcome | {"touched": touched} for outcome in outcomes]

    earlier, = run([(0, {})])
    assert earlier["status"] == 0, earlier
    make_bad_runs()
    (ready, tell), (end, mine) = os.pipe(), os.pipe()
    if os.fork() == 0:  # another process at work in the earlier run, for as long as this one lives
        os.close(mine)
        lock = open(next(Path("runs").iterdir()) / ".lock", "a")
        fcntl.lockf(lock, fcntl.LOCK_EX)
        os.write(tell, b".")
        os._exit(len(os.read(end, 1)))
    os.read(ready, 1)
    rows, n = [(i, changes) for i, (changes, _) in enumerate(NUMBERS + FOLDERS)], os.cpu_count()
    json.dump([outcome for i in range(0, len(rows), n) for outcome in run(rows[i:i + n])], sys.__stdout__)


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    make_bad_folders(root)
    environment = os.environ | {"PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", "import test_starter; test_starter.try_bad_inputs()"], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("row", range(len(NUMBERS + FOLDERS)), ids=[", ".join(f"{k}={str(v)[:20]!a}" for k, v in changes.items()) for changes, _ in NUMBERS + FOLDERS])
def test_bad_input_is_found_late_or_said_unclearly_or_harms_an_earlier_run(outcomes, row):
    """Exit code 1, one sentence with the value and the remedy, no traceback, every file as it was."""
    outcome, (changes, message) = outcomes[row], (NUMBERS + FOLDERS)[row]
    assert outcome["status"] == 1 and outcome["stderr"].count("\n") == 1 and "Traceback" not in outcome["stderr"], outcome
    assert re.match(f"starter.py stopped: ({message})", outcome["stderr"]) and "; " in outcome["stderr"] and len(outcome["stderr"]) < 1000, outcome
    assert not outcome["touched"] and (row >= len(NUMBERS) or not outcome["stdout"]), outcome


def test_new_number_in_main_is_not_checked():
    refused = {name for changes, message in NUMBERS for name in changes if message.startswith(f"{name} = ")}
    assert refused == set(inspect.signature(starter.main).parameters) and len(NUMBERS + FOLDERS) >= 60


def test_misspelt_option_is_passed_over(checkpoint, tmp_path):
    with pytest.raises(TypeError, match="grop_size"):
        starter.main(**settings(checkpoint, tmp_path, grop_size=8))


GOOD = [  # what differs from the small checkpoint, what is changed
    (dict(config=dict(vocab_size=100)), {}),  # rows that no token has, added for speed
    (dict(drop="pad_token"), {}), (dict(template=None), {}),
    (dict(template="{% for m in messages %}<|user|>{{ m['content'] }}<|assistant|>{% endfor %}"), {}),
    ({}, dict(model_id=Path, out_dir=Path)),
    ({}, dict(numbers_per_problem=[2, 3])), ({}, dict(numbers_per_problem=numpy.array([2, 3]), kl_ratio_cap=math.inf, epochs_per_rollout=2, **leash())),
    ({}, dict(group_size=numpy.int64(4), seed=numpy.int32(7), learning_rate=numpy.float32(0.001), normalize_by_std=numpy.bool_(False), clip_range=torch.tensor(0.25))),
    ({}, dict(task="gsm8k", train_file=Path, eval_file=None)), ({}, dict(task="gsm8k", train_file=str, eval_file=Path)),
]


@pytest.mark.parametrize("differs, changes", GOOD, ids=[", ".join([*differs, *changes]) or "plain" for differs, changes in GOOD])
def test_good_input_is_refused(tmp_path, capsys, differs, changes):
    folder, files = save_checkpoint(tmp_path / "model", **differs.get("config", {})), dict(model_id=tmp_path / "model", out_dir=tmp_path / "runs")
    for name, rows in (("train_file", range(40)), ("eval_file", range(40, 50))):  # as written on Windows: a mark at the start, \r\n, an empty line at the end
        files[name] = tmp_path / name
        text = "".join(json.dumps({"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"}) + "\r\n" for i in rows)
        files[name].write_bytes(f"\ufeff{text}\r\n".encode())
    if "drop" in differs:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != differs["drop"]}))
    if "template" in differs:
        (folder / "chat_template.jinja").unlink() if differs["template"] is None else (folder / "chat_template.jinja").write_text(differs["template"])
    changes = {name: value(files[name]) if isinstance(value, type) else value for name, value in changes.items()}
    given = settings(folder, files["out_dir"], n_train_steps=1, n_eval_problems=4, save_every=1) | changes
    run_folder = starter.main(**given)["run_folder"]
    assert capsys.readouterr().out.count("Warning: the chat template") == bool(differs.get("template"))
    kept = json.loads((run_folder / "config.json").read_text())
    assert {key: kept[key] for key in changes} == {key: str(value) if isinstance(value, Path) else checks.plain(value) for key, value in changes.items()}
    starter.main(**(given | {key: checks.plain(value) for key, value in changes.items()} | dict(n_train_steps=2, resume=run_folder)))
    assert (run_folder / "checkpoints" / "step_00000002").is_dir() and " at 0x" not in machine.describe(partial(lambda: 0))


def test_user_sees_a_traceback_or_exit_code_zero(checkpoint, tmp_path):
    program = f"import starter; starter.main(model_id={str(checkpoint)!r}, group_size=7, rollout_batch_size=100, out_dir={str(tmp_path)!r})"
    run = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.strip().splitlines() == [
        "starter.py stopped: rollout_batch_size = 100 is not a multiple of group_size = 7; use 98 or 105"]
    asked = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True, env=os.environ | {"STARTER_TRACEBACK": "1"})
    assert asked.returncode == 1 and "Traceback" in asked.stderr


# ----------------------------------------------------------------------------------------------------------------------
# Shape of the file, and what the README says of it

SOURCE = (HERE / "starter.py").read_text()
TREE = ast.parse(SOURCE)
FUNCTIONS = [node for node in ast.walk(TREE) if isinstance(node, ast.FunctionDef)]
LOOP = 100  # train() is the loop, under the name that users know; main() holds the numbers


def nesting(node, depth=0):
    inside = isinstance(node, (ast.For, ast.While, ast.If, ast.With, ast.Try))
    return max([depth + inside, *(nesting(child, depth + inside) for child in ast.iter_child_nodes(node))])


def test_file_outgrows_its_budgets():
    assert SOURCE.count("\n") <= 1000 and max(map(len, SOURCE.splitlines())) <= 120
    lengths = {f.name: f.end_lineno - f.lineno + 1 for f in FUNCTIONS}
    assert all(n <= {"main": 190, "train": LOOP}.get(name, 60) for name, n in lengths.items()), lengths
    assert sorted(lengths.values())[len(lengths) // 2] <= 20
    for name in ("machine.py", "checks.py", "engines.py", "shared_prompts.py", "tasks.py"):  # 400 was meant for one helper: recovery, and a
        # sentence for each refusal, take more
        assert (HERE / name).read_text().count("\n") <= 500 and max(map(len, (HERE / name).read_text().splitlines())) <= 120


def test_function_uses_one_defined_below_it_or_a_lower_case_global():
    top = {node.name: node.lineno for node in TREE.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    modules = {alias.asname or alias.name.split(".")[0] for node in ast.walk(TREE) if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    assigned = {t.id for node in TREE.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    assert all(name.isupper() for name in assigned - modules), assigned
    for function in TREE.body:
        if isinstance(function, (ast.FunctionDef, ast.ClassDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and node.id in top and node.id != function.name:
                    assert top[node.id] < function.lineno, f"{function.name} uses {node.id}, defined below"


def test_nesting_or_try_grows():
    for function in FUNCTIONS:
        # with timed(...) marks a phase of the loop and is not a branch
        limit = 5 if function.name == "train" else 4
        assert nesting(function) <= limit, (function.name, nesting(function))
    tries = [node for node in ast.walk(TREE) if isinstance(node, ast.Try)]
    # a model's text; memory that runs out
    assert {f.name for f in FUNCTIONS for t in tries if f.lineno < t.lineno < f.end_lineno} == {"arithmetic", "accumulate_gradients"}


def test_something_from_outside_is_executed():
    for path in HERE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                assert not (isinstance(node.func, ast.Name) and name in ("eval", "exec", "compile")), (path.name, node.lineno)
                assert name not in ("loads", "load") or getattr(getattr(node.func, "value", None), "id", "") not in ("pickle", "torch"), path.name
                assert "trust_remote_code" not in {keyword.arg for keyword in node.keywords}, (path.name, node.lineno)


def test_local_model_is_loaded_over_the_network(checkpoint, tmp_path):
    with mock.patch.object(socket.socket, "connect", side_effect=AssertionError("network")), \
            mock.patch.object(socket, "getaddrinfo", side_effect=AssertionError("network")):
        starter.main(**settings(checkpoint, tmp_path, save_model=True))


README = (HERE / "README_KL.md").read_text()


def test_tag_is_logged_but_not_explained_or_explained_but_not_logged(checkpoint, tmp_path):
    """With the leash on; the sync of vLLM, which the transformers engine does not need, is added by name."""
    folder = tmp_path / "with_skills"
    shutil.copytree(checkpoint, folder)
    (folder / "retention.jsonl").write_text('{"skill": "sort", "prompt": "sort 21", "answer": "12"}\n')
    logged = set(scalars(starter.main(**settings(folder, tmp_path, use_kl_penalty=True))["run_folder"])) | {"time/sync"}
    cells = re.findall(r"^\| (`(?:train|eval|time|mem|adaptive_kl)/[^|]*) \|", README.partition("## Monitoring")[2].partition("\n## ")[0], flags=re.M)
    explained = [tag for cell in cells for tag in re.findall(r"`([\w/*]+)`", cell)]
    assert sorted(explained) == sorted(set(explained))
    assert {re.sub("retention_.*", "retention_*", tag) for tag in logged} == set(explained)


def test_readme_shows_other_numbers_than_the_results():
    assert not [path for path in re.findall(r"\]\((figures/[^)]*)\)", README) if not (HERE / path).is_file()]
    assert ablate_kl.with_tables(README) == README


def test_readme_names_a_setting_that_does_not_exist():
    ours = re.findall(r"^\| (`[^|]*) \|", README.partition("If you know TRL")[2].partition("\n## ")[0], flags=re.M)
    names = {name for cell in ours for name in re.findall(r"`(\w+)(?: = [^`]*)?`", cell) if "/" not in cell}
    assert len(names) > 8 and not names - set(inspect.signature(starter.main).parameters) - {"grpo", "dapo", "dr_grpo"}


def test_readmes_third_task_does_not_run(checkpoint, tmp_path):
    """The README's lines, put where it says, in a copy of tasks.py."""
    block, = re.findall(r"```python\n(def sums_problems.*?)```", README, flags=re.S)
    assert block.strip().count("\n") < 14
    for path in HERE.glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "tasks.py").write_text((HERE / "tasks.py").read_text() + "\n\n" + block)
    changes = settings(str(checkpoint), tmp_path, task="sums", max_new_tokens=4, n_train_steps=2)
    changes.pop("reward")
    program = f"import starter; starter.main(reward=lambda text, problem: len(text) / 10, **{changes})"
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and "sums, 20 held-out problems" in run.stdout, run.stderr


def test_newcomer_reads_for_long_before_the_first_command():
    assert len(re.sub(r"^#.*$", "", README.partition("```bash")[0], flags=re.M).split()) <= 120


# ----------------------------------------------------------------------------------------------------------------------
# bench.py and what it published

def test_slope_is_not_the_exponent_of_a_power_law():
    assert bench.slope([(x, 3 * x ** 1.7) for x in (1, 2, 5, 10)]) == pytest.approx(1.7)


def test_published_memory_is_not_what_the_formula_says():
    """Within 15 % for S, M and L; M-64 grows over the first updates by more than the formula knows, and the README says so."""
    rows = ablate_kl.last_rows("memory", "size", "leash")
    assert {row["size"] for row in rows} == set(bench.SIZES)
    for row in rows:
        parts = sum(float(row[name]) for name in ("libraries", "weights", "gradients", "moments", "reference", "bf16 copies", "activations", "head"))
        assert parts == pytest.approx(float(row["predicted_gb"]), abs=0.01)
        assert 0.85 <= float(row["predicted_gb"]) / float(row["measured_gb"]) <= 1.15 or row["size"] == "M-64", row


def test_published_ratio_is_not_that_of_its_medians():
    for row in ablate_kl.last_rows("step", "size", "dtype", "leash"):
        assert int(row["steps"]) >= 10 and float(row["ours_min_s"]) <= float(row["ours_s"]) <= float(row["ours_max_s"])
        assert float(row["ratio"]) == pytest.approx(float(row["trl_s"]) / float(row["ours_s"]), rel=0.1)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="TRL is not installed")
def test_bench_measures_another_step_than_it_says(tmp_path):
    """Both sides take steps of 32 prompts x 8 responses of the same model; ours counts its tokens, TRL's reward sees all its responses."""
    shape = dict(hidden=64, layers=1, heads=2, vocabulary=None, new_tokens=4)
    bench.make_checkpoint(tmp_path, **shape)
    ours, seconds, texts = bench.Ours(tmp_path, 4, True, False), [], []
    first = ours.step()
    assert first["time/total"] > 0 and ours.state["step"] == 1 and ours.state["tokens"] == round(first["train/response_length"] * 256)
    with mock.patch.object(bench, "distinct", lambda text, problem: texts.append(text) or 0.5):
        bench.trl_trainer(tmp_path, 4, True, False, 64, 2, seconds.append).train()
    assert len(seconds) == 2 and len(texts) == 2 * 256
    with mock.patch.dict(bench.SIZES, tiny=shape):
        rows = bench.phases("tiny", True)
    with_vllm = ["rollout, vLLM", "sync to vLLM"] if importlib.util.find_spec("vllm") else []
    assert [row["phase"] for row in rows] == ["rollout", "log-probs", "reference", "update", "update, leash on", *with_vllm]
    assert all(float(row["seconds"]) > 0 for row in rows)


# ----------------------------------------------------------------------------------------------------------------------
# Planted faults: `python test_starter.py --mutants` puts each into a copy of starter.py and expects the fast tier to fail

RANK_TESTS = "two_ranks and not vllm"
MUTANTS = [  # what stands there, what the fault makes of it
    ("% 4 == 0", "% 4 != 5", "tasks.py"),  # everything is held out
    ("is_held_out(*key) != held_out or", "", "tasks.py"),
    ("hidden = hidden.repeat_interleave(group_size, dim=0)", "hidden = hidden.repeat(group_size, 1)"),
    ("lengths[:, None].repeat_interleave(group_size, dim=0)", "lengths[:, None].repeat(group_size, 1)", "shared_prompts.py"),
    ("positions + i, past", "positions + i + 1, past"),
    ("range(seed + start * group_size,", "range(seed,"),
    ("if not temperature:", "if False:", "engines.py"),
    ("part.float() / temperature", "part.float()", "engines.py"),
    ("first_above(blocks, share)", "first_above(torch.ones_like(blocks), share)", "engines.py"),
    ("(1 - (passed.gather(1, index) - share) / here).clamp(0, 1 - 1e-9)", "share.clamp(0, 1 - 1e-9)", "engines.py"),
    ("(passed <= share)", "(passed < share)", "engines.py"),
    (" - top - blocks", " - blocks", "engines.py"),
    ("p = logit.new_zeros(len", "p = logit.new_ones(len", "engines.py"),
    ("end = row.index(eos_token_id) + 1 if", "end = row.index(eos_token_id) if"),
    ("torch.baddbmm(keys.mask.flatten(0, 1)", "torch.baddbmm(0 * keys.mask.flatten(0, 1)", "shared_prompts.py"),
    ("self.length += 1", "self.length = 1", "shared_prompts.py"),
    ("torch.baddbmm(out, to_responses", "torch.baddbmm(0 * out, to_responses", "shared_prompts.py"),
    ("(query * scaling).to(keys.responses.dtype)", "query.to(keys.responses.dtype)", "shared_prompts.py"),
    ("(query * scaling).to(value.dtype), key", "query.to(value.dtype), key", "shared_prompts.py"),
    (".tril(n_keys - length)", "", "shared_prompts.py"),
    ("prompts.index_select(0, which), own]", "prompts.index_select(0, which.flip(0)), own]", "shared_prompts.py"),
    ("(of_prompts, positions)))", "(of_prompts + 1, positions)))", "shared_prompts.py"),
    ("*(prompts for prompts, _ in both), None,", "*(prompts for prompts, _ in both), query.new_zeros(prompt_length, prompt_length),", "shared_prompts.py"),
    ("known = (prompts >= 0)[:, None, None]", "known = (prompts >= -1)[:, None, None]", "shared_prompts.py"),
    ("positions = (prompts >= 0).sum(dim=1, keepdim=True)", "positions = prompts.shape[1]", "shared_prompts.py"),
    (".tril().expand(n", ".expand(n", "shared_prompts.py"),
    ('!= "starter" or span_of_attention(model.config) < math.inf:', '!= "starter":', "shared_prompts.py"),
    ("if context > span:", "if False:", "engines.py"),
    ("policy.eval()  # in train mode", "pass  # in train mode"),
    ("KeyError, ZeroDivisionError, SyntaxError", "KeyError, SyntaxError"),
    ("return -value(inner)", "return value(inner)"),
    ("sorted(parsed[1]) == sorted(problem[\"numbers\"])", "set(parsed[1]) <= set(problem[\"numbers\"])"),
    ("ast.Div: operator.truediv}", "ast.Div: operator.truediv, ast.Pow: operator.pow}"),
    ("return value(ast.parse(text.strip(), mode=\"eval\").body), used", "return value(ast.parse(text.strip(), mode=\"eval\").body), []"),
    ('.replace(",", ""))', ")"),
    ("return 1.0 if solved else 0.1", "return 1.0 if solved else 0.0"),
    ("[problem for problem in problems for _ in range(len(responses) // len(problems))]", "problems * (len(responses) // len(problems))"),
    ("torch.where(all_equal, 0.0, groups - groups.mean(dim=1, keepdim=True))", "groups - groups.mean(dim=1, keepdim=True)"),
    ("groups - groups.mean(dim=1, keepdim=True))", "groups - groups.mean())"),
    ("groups.std(dim=1, keepdim=True) +", "groups.std(dim=1, keepdim=True, unbiased=False) +"),
    ("padded([r.prompt_ids[:-1] for r", "padded([r.prompt_ids for r"),
    ("padded([r.prompt_ids[-1:] + r.response_ids[:-1] for r in responses], 0)", "padded([r.response_ids for r in responses], 0)"),
    ("mask.sum(dim=1, keepdim=True).clamp(min=1) / len(mask)", "mask.sum(dim=1, keepdim=True).clamp(min=1)"),
    ('if loss_average == "dapo" else len(mask) * max_new_tokens', 'if loss_average == "dapo" else mask.numel()'),
    ("or (n + 1) * width + len(read)", "or n * width + len(read)"),
    ("if n and (wasteful or", "if n and (False or"),
    ("before + 0.92 * n * width - held", "before"),
    ("width = max(64, logits", "width = max(4096, logits"),
    (" + len(read) * len(prompts[0]) > max_tokens", " > max_tokens"),
    ("ctx.temperature, ctx.logits_at_once = temperature, logits_at_once", "ctx.temperature, ctx.logits_at_once = 1.0, logits_at_once"),
    ("(top - higher).exp()", "torch.ones_like(top)"),
    ("at_label[rows] = logits[rows, columns]\n                if", "at_label[rows] = logits[rows, columns - 1]\n                if"),
    ("e_d = e_d * shrink +", "e_d = e_d +"),
    ("ref_log_z = torch.logaddexp(ref_log_z, ref_logits.logsumexp(dim=1))", "ref_log_z = ref_logits.logsumexp(dim=1)"),
    ("ref_logits = ref_scaled @ ref_weight[part].T", "ref_logits = ref_scaled @ weight[part].T"),
    ("kl = e_d - log_z + ref_log_z", "kl = e_d + log_z - ref_log_z"),
    ("ref_at_label - ref_log_z", "ref_at_label - log_z"),
    ("entropy, ref_log_prob = log_z - e_logit / z", "entropy, ref_log_prob = log_z + e_logit / z"),
    ("p = (logits - log_z[:, None]).exp_()", "p = logits.exp()"),
    ("else -grad_label  #", "else grad_label  #"),
    ("d.sub_(e_d[:, None]).mul_(grad_kl", "d.mul_(grad_kl"),
    (".mul_(grad_kl[:, None]).add_(slope)", ".mul_(grad_kl[:, None])"),
    ("d = logits.sub_(ref_scaled @ ref_weight[part].T)", "d = logits.sub_(ref_scaled @ weight[part].T)"),
    ("grad[rows, columns] += grad_label[rows]", "grad[rows, columns] -= grad_label[rows]"),
    ("grad_hidden += grad @ weight[part]", "grad_hidden = grad @ weight[part]"),
    ("grad_weight[part] = grad.T @ scaled.to(hidden.dtype)", "grad_weight[part] = grad.T @ hidden"),
    ("(grad_hidden / ctx.temperature)", "(grad_hidden)"),
    ('rows | {"ref_hidden": response_hidden(ref_model, rows', 'rows | {"ref_hidden": response_hidden(policy, rows'),
    ('torch.set_float32_matmul_precision(before)\n', 'pass\n', "machine.py"),
    ('"k3": torch.expm1(-d) + d', '"k3": torch.exp(-d) - 1 + d'),
    ('"k3": torch.expm1(-d) + d', '"k3": torch.expm1(d) - d'),
    ("d.square() / 2", "d.square()"),
    ("kl.clamp(max=c.kl_clip_threshold)", "kl.clamp(min=c.kl_clip_threshold)"),
    ("torch.sigmoid(kl - c.kl_target) * kl", "torch.sigmoid(kl - c.kl_target).detach() * kl"),
    ("torch.sigmoid(kl - c.kl_target) * kl", "torch.sigmoid(kl + c.kl_target) * kl"),
    ("softplus(10 * kl / c.kl_target - 10)", "softplus(kl / c.kl_target - 1)"),
    ('"length_normalized": lambda kl, n, c: kl / n,', '"length_normalized": lambda kl, n, c: kl,'),
    ("kl / c.max_new_tokens", "kl / n"),
    ("torch.where(mask, kl, 0.0).flip(1).cumsum(1).flip(1)", "torch.where(mask, kl, 0.0).cumsum(1)"),
    ("torch.where(mask, kl, 0.0).flip(1)", "kl.flip(1)"),
    ("return advantages - kl_coef * sum_to_go(kl, mask)", "return advantages + kl_coef * sum_to_go(kl, mask)"),
    ("return advantages - kl_coef * sum_to_go(kl, mask)", "return advantages - kl_coef * kl"),
    ("mask)[:, :1]\n", "mask)\n"),
    ('if kl_coef and kl_in != "reward":', "if kl_coef:"),
    ("later = (sum_to_go(adapted, mask) - adapted).detach()", "later = sum_to_go(adapted, mask).detach()"),
    ("later = (sum_to_go(adapted, mask) - adapted).detach()", "later = sum_to_go(adapted, mask) - adapted"),
    ("clamp(max=kl_ratio_cap) * later * policy", "clamp(max=kl_ratio_cap) * later"),
    ("adapted = kl_rule(kl, n) if kl_rule else kl", "adapted = kl_rule(kl.detach(), n) if kl_rule else kl"),
    ("if not (math.isfinite(kl) and math.isfinite(reward)):", "if False:"),
    ("beta *= 1.5 if kl > 1.5 * c.kl_target", "beta *= 1.5 if kl > c.kl_target"),
    ("else 0.75 if kl < 0.5 * c.kl_target", "else 0.75 if kl > 0.5 * c.kl_target"),
    ("math.log(max(state[\"kl\"], 1e-9) / c.kl_target)", "math.log(c.kl_target / max(state[\"kl\"], 1e-9))"),
    ("beta = max(0.1 * c.kl_coef, min(10 * c.kl_coef, beta))", "pass"),
    ("beta = c.beta_min if step >= c.beta_schedule_steps else beta", "pass"),
    ("(0 if step % 10 else 1 if reached else -1)", "(0 if step % 10 else 1 if reached else 0)"),
    ("c.kl_coef * (floor / c.kl_coef) ** min(1.0, step / c.beta_schedule_steps)", "floor if step >= c.beta_schedule_steps else c.kl_coef"),
    ('"kl_per_token": shown["exact"]', '"kl_per_token": shown["k2"]'),
    ("kl = kl if broken else next_beta(kl, means", "kl if broken else next_beta(kl, means"),
    ('microbatches, n_tokens, kl["beta"],', "microbatches, n_tokens, kl_coef,"),
    ("        policy.zero_grad()\n", "", "checks.py"),
    ("    policy.zero_grad()\n", ""),
    ("if both[0] != both[1] and", "if", "checks.py"),
    ("advantages = put_kl_into_advantages(advantages, rows", "put_kl_into_advantages(advantages, rows"),
    ("mask.cumsum(1)[mask] - 1", "mask.cumsum(1)[mask]"),
    ("-torch.minimum(ratio * advantages", "-torch.maximum(ratio * advantages"),
    ("1 + (clip_range if clip_range_high is None else clip_range_high)", "1 + clip_range"),
    ("(ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)", "(ratio < low) & (advantages > 0), (ratio > high) & (advantages < 0)"),
    ("loss = loss * importance_weights", "pass"),
    ("pull = ratio.detach().clamp(max=kl_ratio_cap) * d * policy_log", "pull = ratio.clamp(max=kl_ratio_cap) * d * policy_log"),
    ("pull = ratio.detach().clamp(max=kl_ratio_cap) * d * policy_log", "pull = d * policy_log"),
    ("pull = ratio.detach().clamp(max=kl_ratio_cap) * d * policy_log", "pull = -ratio.detach().clamp(max=kl_ratio_cap) * d * policy_log"),
    ("d = (policy_log_probs - ref_log_probs).detach()", "d = policy_log_probs - ref_log_probs"),
    ("kl_estimator) + pull - pull.detach()", "kl_estimator) + pull"),
    (".clamp(-kl_log_ratio_cap, kl_log_ratio_cap)\n    pull", "\n    pull"),
    ("return compute_kl_divergence(policy_log_probs, ref_log_probs, kl_estimator)", "return compute_kl_divergence(policy_log_probs.detach(), ref_log_probs, kl_estimator)"),
    ("clamp(max=importance_cap)\n", "clamp(min=importance_cap)\n"),
    ("torch.exp(old_log_probs - rows[\"rollout_log_probs\"])", "torch.exp(rows[\"rollout_log_probs\"] - old_log_probs)"),
    ('rows.get("old_log_probs", found["log_probs"].detach())', 'found["log_probs"].detach()'),
    ("torch.where(mask, loss * rows[\"weights\"], 0.0).sum()", "torch.where(mask, loss * rows[\"weights\"], 0.0).mean()"),
    ("4 * first_diff", "400 * first_diff", "checks.py"),
    ("found[\"n\"], 1e-3", "found[\"n\"], 1e-1", "checks.py"),
    ("if not mean <= limit:", "if mean > limit:", "checks.py"),
    (").eval().requires_grad_(False) if leash else None", ").eval() if leash else None"),
    ("copy.deepcopy(policy).eval()", "policy.eval()"),
    ("optimizer.zero_grad()", "pass"),
    ("leash = c.use_kl_penalty and c.kl_coef > 0", "leash = c.use_kl_penalty"),
    ('random.Random(f"{c.seed} {what}").getrandbits(32)', 'c.seed << 32'),
    ('random.Random(f"{c.seed} {what}")', 'random.Random(f"{what}")'),
    ('random.Random(f"{c.seed} {what}")', 'random.Random(f"{c.seed}")'),
    ('share = rows["response_mask"].sum() / n_tokens', "share = 1 / len(microbatches)"),
    ("machine.save_model(policy,", "machine.save_model(init_policy(model_folder, c.device)[0],"),
    ("response_text[-200_000:].rpartition", "response_text.rpartition"), ("{1,200}", "+"), (", re.ASCII)", ")"), ("MemoryError, RecursionError):", "MemoryError):"),
    # what a resumed run must not forget, and what must not be done twice
    ("set_random_states(state)\n", "pass\n", "machine.py"),
    ("elif name in named:", "elif False:", "machine.py"),
    ("parameter.copy_(ranks.sharded_like(named[name].to(parameter.device), parameter))", "pass", "machine.py"),
    ('self.optimizer.state.get(parameter, {}).items():', '{}.items():', "machine.py"),
    ("random.seed(c.seed), ", "", "machine.py"),
    ("random.setstate((version, tuple(keys), gauss))", "pass", "machine.py"),
    ("os.truncate(path, min(sizes[path.name], path.stat().st_size))", "pass", "machine.py"),
    ("                path.unlink()\n", "                pass\n", "machine.py"),
    ("if not wrong:", "if True:", "machine.py"),
    ('for name in ("state.json", *sums)', "for name in sums", "machine.py"),
    ('glob("checkpoints/step_*"), reverse=True)', 'glob("checkpoints/step_*"))', "machine.py"),
    ('sorted(home.glob("step_*"))[:-2]', 'sorted(home.glob("step_*"))[:-1]', "machine.py"),
    ('            temporary.rename(final)\n', '            shutil.copytree(temporary, final)\n', "machine.py"),
    ('temporary, final = home / "unfinished", home', 'temporary = final = home', "machine.py"),
    ("self.write_config()  # should", "pass  # should", "machine.py"),
    ("fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", "machine.py"),
    ('before = state.get("before", {})', "before = {}"),
    ('first_step = c.rollout_batch_size // c.group_size, time.perf_counter(), state["step"] + 1', 'first_step = c.rollout_batch_size // c.group_size, time.perf_counter(), 1'),
    ("(step - 1) % c.eval_every == 0", "step % c.eval_every == 0"),
    ('"said": sorted(said)', '"said": []'),
    ('"kl": kl, "first": first,', '"kl": state["kl"], "first": first,'),
    ("machine.load_checkpoint(checkpoint, state, policy, optimizer)", "pass"),
    ("        checks.check_start(state, start, c)\n", ""),
    ("if name not in MAY_CHANGE:", "if False:", "checks.py"),
    # faults
    ("if not broken:", "if True:"),
    ("run.weights_move()", "pass"),
    ('state["in_a_row"] + 1 if broken else 0', '1 if broken else 0'),
    ('"skipped": metrics["skipped_steps"]', '"skipped": 0'),
    ('"max_tokens": max_tokens, "skipped"', '"max_tokens": c.max_tokens_per_microbatch, "skipped"'),
    ("for part in (slice(n), slice(n, None))", "for part in (slice(n), slice(n - 1, None))"),
    ("if all(n == len(rows", "if any(n == len(rows"),
    ("not machine.out_of_memory(error):", "False:"),
    ("isinstance(error, torch.OutOfMemoryError) or ", "", "machine.py"),
    ("DefaultCPUAllocator: can't", "no allocator's words: can't", "machine.py"),
    ("if signal_seen or c.save_every and", "if c.save_every and", "machine.py"),
    ("raise SystemExit(128 + signal_seen)", "return", "machine.py"),
    (">= c.max_skipped:", "> c.max_skipped:", "machine.py"),
    ("            except Exception:\n                alone", "            except ZeroDivisionError:\n                alone", "machine.py"),
    ("self.state = state | random_states() | {\"log_sizes\": sizes}", "self.state = state", "machine.py"),
    ("self.state = state | random_states()", "self.state = self.state if self.state else state | random_states()", "machine.py"),
    ("(json.dumps(state))", "(json.dumps(state | random_states()))", "machine.py"),
    ("except (OSError, SafetensorError) as error:", "except SafetensorError as error:", "machine.py"),
    ("except (OSError, SafetensorError) as error:", "except OSError as error:", "machine.py"),
    ("                self.writer = None\n                print", "                print", "machine.py"),
    ("if attempt == 2 or", "if attempt == 3 or", "engines.py"),
    ("                        load_policy_into_vllm_instance(self.policy, self.llm)\n", "", "engines.py"),
    ("class TimedOut(BaseException)", "class TimedOut(Exception)", "machine.py"),
    ("rewards.append(float(if_broken if what else value))", "rewards.append(0.0 if what else float(value))", "checks.py"),
    ("    llm.reset_prefix_cache()  #", "    pass  #"),
    ("        os._exit(0)\n", "        pass\n", "ranks.py", RANK_TESTS),
    ("modules[0].set_gradient_divide_factor(1.0)", "pass", "ranks.py", RANK_TESTS),
    ("full_tensor(grad_placements=[Partial()])", "full_tensor()", "ranks.py", RANK_TESTS),
    ("            head.weight = embedding.weight\n", "            pass\n", "ranks.py", RANK_TESTS),
    ("head.tied, layers = head.weight is embedding.weight,", "head.tied, layers = False,", "ranks.py", RANK_TESTS),
    ("            module.reshard()", "            pass", "ranks.py", RANK_TESTS),
    ("(rank() + 1) * n], rank() * n", "(rank() + 1) * n], 0", "ranks.py", RANK_TESTS),
    ("for part in parts for item in part]", "for part in parts[::-1] for item in part]", "ranks.py", RANK_TESTS),
    ("x.max() if name in largest else", "x.sum() if name in largest else", "ranks.py", RANK_TESTS),
    ("tensor[owner == i]", "tensor[owner >= i]", "ranks.py", RANK_TESTS),
    ("torch.zeros_like(empty[\"response_mask\"])", "torch.ones_like(empty[\"response_mask\"])", "ranks.py", RANK_TESTS),
    ("(max(map(len, cuts)) - len(cuts[rank()]))", "0", "ranks.py", RANK_TESTS),
    ("return distribute_tensor(tensor, parameter", "return distribute_tensor(torch.zeros_like(tensor), parameter", "ranks.py", RANK_TESTS),
    ("ranks.gathered(list(zip(texts, rewards)))", "list(zip(texts, rewards)) * ranks.world()", "starter.py", RANK_TESTS),
    ("return ranks.total(means), known", "return means, known", "starter.py", RANK_TESTS),
    ("        ranks.release(policy)\n", "", "starter.py", RANK_TESTS),
    ("head = ranks.gather(policy)", "head = ranks.head_of(policy)", "starter.py", RANK_TESTS),
]


def test_planted_fault_stands_nowhere_or_was_never_tried():
    """A line that changes takes its fault with it: the list and results/mutants.csv go along."""
    keys = [(*(fault + ("starter.py",))[2:3], *fault[:2]) for fault in MUTANTS]
    assert [key for key in keys if (HERE / key[0]).read_text().count(key[1]) != 1] == []
    with open(HERE / "results" / "mutants.csv", newline="") as file:
        assert {(row["file"], row["stands"], row["becomes"]) for row in csv.DictReader(file)} == set(keys)


FAULT_TESTS = "killed or cut_short or damaged or signal or disk or folder or memory or infinite or skipped or broken or engine or processes"


def survives(fault):
    """-> the test that fails first with this fault; "" where none does. fault: what stands there, what it becomes, file, and of which
    slow tests one may fail: without these, one of the fast tier has to."""
    import tempfile
    before, after, file, slow = fault + ("starter.py", "")[len(fault) - 2:]
    source = (HERE / file).read_text()
    if source.count(before) != 1:
        sys.exit(f"stands {source.count(before)} times in {file}, must be once: {before}")
    with tempfile.TemporaryDirectory() as folder:
        for path in (*HERE.glob("*.py"), HERE / "pytest.ini", HERE / "README_KL.md", HERE / "fuzz_corpus.jsonl"):
            shutil.copy(path, folder)
        for part in ("results", "figures"):
            shutil.copytree(HERE / part, Path(folder, part))
        Path(folder, file).write_text(source.replace(before, after))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k"]
        fast = ["not budgets and not readme_shows and not planted", "-m", "not slow"]  # the README shows these very results, which are being made
        for chosen in [[slow]] if slow else ([[FAULT_TESTS, *fast[1:]]] if file == "machine.py" else []) + [fast]:  # the likeliest first
            try:
                run = subprocess.run(command + chosen, cwd=folder, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
            except subprocess.TimeoutExpired:
                return "a hang"
            if run.returncode:
                return (re.findall(r"^(?:FAILED|ERROR) \S*?(?:::)?(\w+)(?:\[| |$)", run.stdout, flags=re.M) or ["cannot be imported"])[0]
    return ""


def run_mutants():
    """Each planted fault and the test that caught it -> results/mutants.csv, survivors are printed. Faults that stand there already are
    not run again: to begin anew delete the file. Over an hour on two cores."""
    from concurrent.futures import ThreadPoolExecutor, as_completed
    path, names = HERE / "results" / "mutants.csv", ("file", "stands", "becomes")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()
    have = {tuple(row[name] for name in names): row for row in ablate_kl.read_csv(path)}
    faults = {((*fault, "starter.py")[2], *fault[:2]): fault for fault in MUTANTS}

    def keep():
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, [*names, "caught_by", "commit"])
            writer.writeheader()
            writer.writerows(have[key] for key in faults if key in have)

    for control in (("import ast\n", "import ast  # no fault\n"), ("import ast\n", "import ast  # no fault\n", "starter.py", RANK_TESTS)):
        if failed := survives(control):
            sys.exit(f"{failed} fails without a fault: mend that first")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(survives, fault): key for key, fault in faults.items() if key not in have}
        for done in as_completed(running):
            key = running[done]
            have[key] = dict(zip(names, key), caught_by=done.result(), commit=commit)
            keep()
            if not done.result():
                print("survived:", *key, flush=True)
    caught = sum(bool(have[key]["caught_by"]) for key in faults)
    print(f"{caught} of {len(faults)} planted faults caught")
    return 0 if caught == len(faults) else 1


if __name__ == "__main__":
    if sys.argv[1:] != ["--mutants"]:
        sys.exit("usage: python test_starter.py --mutants   (the tests themselves run under pytest)")
    sys.exit(run_mutants())
