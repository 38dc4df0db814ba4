"""Tests of the algorithm in starter.py: values and gradients against independent oracles.

    pytest -m "not slow"     what to run while editing
    pytest                   everything; what needs vLLM or TRL is skipped where these are missing

The oracles are loops in float64, enumeration of all outcomes, TRL, and the model's own logits. The
file has the order of starter.py. Tests of everything else are in tests/.
"""
import copy
import itertools
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import starter  # before torch, for which it sets variables
from starter import (  # noqa: F401  the quick tests, which are strict here
    InputError,
    KLController,
    KLSettings,
    Response,
    RunStopped,
    Sampling,
    test_advantages_are_those_of_grpo,
    test_equal_rewards_give_zero_advantage,
    test_gradient_does_not_depend_on_microbatch_size,
    test_kl_estimators_match_hand_computed_values,
    test_kl_gradient_matches_enumeration,
    test_reward_accepts_only_solutions,
)

import torch
from conftest import save_checkpoint, scalars, settings, variety
from reference.inputs import make_models, make_tokenizer

HERE = Path(__file__).resolve().parent
CPU = torch.device("cpu")


# --------------------------------------------------------------------------------------------------
# Fixtures and oracles

@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture
def policy(checkpoint):
    return starter.init_policy(checkpoint, CPU)[0]


@pytest.fixture(params=["plain", "fast"])
def compute(request):
    """Every test that takes it holds for the plain functions and for those of support/fast.py."""
    if request.param == "plain":
        return starter.PLAIN
    return pytest.importorskip("support.fast").COMPUTE


TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id
PROMPTS = starter.prompt_ids_of([{"prompt": text} for text in ("make 3: 1 2", "sort 54321", "a")],
                                TOKENIZER)


def make_responses(lengths, prompt_lengths=(1, 9, 4), vocabulary=32, seed=0):
    """Random responses of these lengths. Response i has prompt i modulo the number of prompts."""
    rng = random.Random(seed)
    prompts = [rng.choices(range(vocabulary), k=n) for n in prompt_lengths]
    return [Response(prompts[i % len(prompts)], rng.choices(range(vocabulary), k=n),
                     [-3.0 + rng.gauss(0, 0.3) for _ in range(n)], True)
            for i, n in enumerate(lengths)]


def whole_log_softmax(model, response, temperature=1.0):
    """(T, V) log-probs at the tokens of a response, from the model's own logits for this row alone.
    The attention is transformers' eager one."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids = torch.tensor([response.prompt_ids + response.response_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(response.prompt_ids) - 1:-1]
    model.set_attn_implementation(before)
    return (logits / temperature).log_softmax(dim=1)


def labels_of(log_probs, response):
    """(T, V) -> (T,)"""
    return log_probs[range(len(response.response_ids)), response.response_ids]


def step_settings(**changes):
    """What grpo_microbatch_step reads of main()'s settings."""
    plain = dict(clip_range=0.2, importance_cap=2.0, temperature=1.0, bf16=False, kl=KLSettings())
    return SimpleNamespace(**plain | changes)


def make_step(responses, loss_average="dapo", max_new_tokens=12, advantages=None):
    """One batch with the weights of its tokens."""
    if advantages is None:
        advantages = torch.linspace(-1, 1, len(responses))
    batch = starter.make_batch(responses, advantages, "cpu")
    batch["weights"] = starter.token_weights(batch["response_mask"], loss_average, max_new_tokens)
    return batch


def gradient_of(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


# --------------------------------------------------------------------------------------------------
# The quick tests

def quick_tests():
    return [name for name in vars(starter)
            if name.startswith("test_") and name != "test_functions"]


def test_every_quick_test_is_imported_here():
    assert set(quick_tests()) <= set(globals())


@pytest.fixture
def quick_gradients(monkeypatch):
    """Leaves out the second that the quick test of gradients takes."""
    monkeypatch.setattr(starter, "gradient_of_a_step", lambda *args: torch.zeros(3))


def test_quick_tests_print_one_line_each(capsys, quick_gradients):
    starter.test_functions()
    titles = [name.removeprefix("test_").replace("_", " ") for name in quick_tests()]
    assert capsys.readouterr().out.splitlines() == [
        "=== Running Quick Tests ===", *(f"\u2705 {title}" for title in titles),
        "=== All Tests Passed! ===", ""]


def test_failing_quick_test_prints_one_line_and_does_not_stop(capsys, quick_gradients):
    with mock.patch.object(starter, "compute_group_normalized_advantages",
                           lambda rewards, *_: (rewards, {})):
        starter.test_functions()
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("\u274c ")]
    assert "\u274c equal rewards give zero advantage: no longer holds (AssertionError" in failed[0]
    assert len(lines) == len(quick_tests()) + 3  # one line for each, a first, a last, an empty one
    counts = f"{len(failed)} of {len(quick_tests())}"
    assert lines[-2] == f"=== {counts} Tests Failed; training goes on ==="
    with mock.patch.object(starter, "reward_fn", side_effect=KeyError("two\nlines")):
        starter.test_functions()
    assert "no longer holds (KeyError: 'two\\nlines')" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# Model

def test_policy_is_float32_whatever_the_checkpoint_holds(tmp_path):
    model = starter.init_policy(save_checkpoint(tmp_path / "model"), CPU)[0]
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    TOKENIZER.save_pretrained(tmp_path / "bf16")
    policy, _ = starter.init_policy(tmp_path / "bf16", CPU)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}


def test_dropout_of_a_checkpoint_is_off_in_train_mode(tmp_path):
    policy, _ = starter.init_policy(save_checkpoint(tmp_path / "m", attention_dropout=0.5), CPU)
    ids = torch.tensor([PROMPTS[0]])
    assert torch.equal(policy.train()(ids).logits, policy.eval()(ids).logits)


def test_dropout_modules_and_layer_drop_are_switched_off():
    model = make_models()[0]
    model.dropout = torch.nn.Dropout(0.5)
    model.layer = torch.nn.Linear(2, 2)
    model.layer.layerdrop = 0.5
    starter.make_forward_exact(model)
    assert model.dropout.p == 0.0 and model.layer.layerdrop == 0.0


def test_prompts_are_chats_that_end_with_the_generation_prompt():
    problem = {"prompt": "make 7: 3 4"}
    assert TOKENIZER.decode(starter.prompt_ids_of([problem], TOKENIZER)[0]) == (
        TOKENIZER.apply_chat_template([{"role": "user", "content": "make 7: 3 4"}],
                                      tokenize=False, add_generation_prompt=True))


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(policy):
    tokenizer = SimpleNamespace(eos_token_id=7)
    for listed, expected in ((None, (7,)), (3, (3, 7)), ([9, 7, 3], (3, 7, 9))):
        policy.generation_config.eos_token_id = listed
        assert starter.find_stop_tokens(policy, tokenizer) == expected
    policy.generation_config.eos_token_id = None
    with pytest.raises(InputError, match="no EOS token, so that no response could end; set"):
        starter.find_stop_tokens(policy, SimpleNamespace(eos_token_id=None))


# --------------------------------------------------------------------------------------------------
# Rollout

def sample(policy, compute, prompts=PROMPTS, **changes):
    plain = dict(group_size=4, max_new_tokens=20, temperature=1.0, seed=7, stop_token_ids=(EOS,))
    compute.prepare(policy)
    return compute.rollout(policy, prompts, Sampling(**plain | changes))


def ids_of(responses):
    return [response.response_ids for response in responses]


def test_greedy_samples_equal_generate(policy, compute):
    ours = sample(policy, compute, group_size=1, max_new_tokens=30, temperature=0)
    compute.undo(policy)
    for prompt_ids, response in zip(PROMPTS, ours):
        ids = torch.tensor([prompt_ids])
        theirs = policy.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                 max_new_tokens=30, eos_token_id=EOS, pad_token_id=0)
        assert response.response_ids == theirs[0, len(prompt_ids):].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_of_samples_are_the_models_own(policy, compute, temperature):
    responses = sample(policy, compute, group_size=8, temperature=temperature)
    assert [r.prompt_ids for r in responses] == [ids for ids in PROMPTS for _ in range(8)]
    for response in responses:
        own = labels_of(whole_log_softmax(policy, response, temperature), response)
        torch.testing.assert_close(torch.tensor(response.log_probs), own, rtol=0, atol=1e-4)


def test_responses_end_with_their_first_stop_token(policy, compute):
    stop_token_ids = (EOS, 7, 20)
    responses = sample(policy, compute, group_size=30, stop_token_ids=stop_token_ids)
    for response in responses:
        *before, last = response.response_ids
        assert not set(before) & set(stop_token_ids)
        assert response.finished == (last in stop_token_ids)
        assert response.finished or len(response.response_ids) == 20
        assert len(response.log_probs) == len(response.response_ids)
    assert {r.response_ids[-1] for r in responses if r.finished} == set(stop_token_ids)
    assert not all(response.finished for response in responses)


def test_samples_follow_the_policys_distribution(policy, compute):
    """Chi-square of 4,000 first tokens, over the tokens that are expected five times or more."""
    responses = sample(policy, compute, PROMPTS[2:], group_size=4000, max_new_tokens=1)
    first = torch.tensor([response.response_ids[0] for response in responses])
    counts = first.bincount(minlength=len(TOKENIZER))
    expected = 4000 * policy(torch.tensor(PROMPTS[2:])).logits[0, -1].softmax(dim=0)
    often = expected > 5
    chi_square = ((counts - expected)[often].square() / expected[often]).sum()
    assert often.sum() > 10
    assert chi_square < often.sum() + 5 * (2 * often.sum()).sqrt()


def test_response_does_not_depend_on_what_else_is_sampled(policy, compute, monkeypatch):
    """Response j of prompt i draws with seed + i * group_size + j: alone, or as one of many."""
    together = ids_of(sample(policy, compute, seed=7))
    assert together[4:] == ids_of(sample(policy, compute, PROMPTS[1:], seed=11))
    assert together[8:] == ids_of(sample(policy, compute, PROMPTS[2:], seed=15))
    assert len(set(map(tuple, together))) > 6
    monkeypatch.setattr(starter, "ROWS_AT_ONCE", 4)  # each prompt in a chunk of its own
    assert together == ids_of(sample(policy, compute, seed=7))


def test_prompts_of_equal_length_are_sampled_like_each_alone(policy, compute, monkeypatch):
    texts = ("max 12345", "a", "max 54321", "max 90210")
    prompts = starter.prompt_ids_of([{"prompt": text} for text in texts], TOKENIZER)
    alone = [response for i, ids in enumerate(prompts)
             for response in sample(policy, compute, [ids], seed=7 + 4 * i,
                                                         max_new_tokens=8)]
    assert len(set(map(tuple, ids_of(alone)))) > 8
    for rows_at_once in (512, 8):  # 8: two prompts at a time
        monkeypatch.setattr(starter, "ROWS_AT_ONCE", rows_at_once)
        together = sample(policy, compute, prompts, max_new_tokens=8)
        assert ids_of(together) == ids_of(alone)
        assert [r.prompt_ids for r in together] == [r.prompt_ids for r in alone]


def test_sampling_in_train_mode_with_gradient_checkpointing_changes_nothing(policy, compute):
    before = sample(policy, compute)
    policy.train()
    policy.gradient_checkpointing_enable()
    after = sample(policy, compute)
    assert ids_of(before) == ids_of(after) and policy.training


def test_sampling_ignores_the_generation_config_of_the_checkpoint(policy, compute):
    before = ids_of(sample(policy, compute))
    own = policy.generation_config
    own.update(top_k=1, repetition_penalty=5.0, max_length=3, do_sample=True, num_beams=2)
    assert ids_of(sample(policy, compute)) == before
    assert policy.generation_config is own


def test_sampling_leaves_the_global_generator_alone(policy, compute):
    before = torch.get_rng_state()
    sample(policy, compute)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_of_runs_steps_and_purposes_differ():
    """A CPU generator reads 32 bits of its seed, and each response adds its number to it."""
    def seed_of(seed, purpose):
        cfg = SimpleNamespace(seed=seed, max_new_tokens=20, temperature=1.0, bf16=False,
                              stop_token_ids=(EOS,))
        return starter.sampling_for(cfg, purpose, 4).seed

    purposes = [*range(1, 6), "evaluate", "measure_kl", "self-check"]
    seeds = {seed_of(seed, purpose) for seed in (0, 1, 4096, 2**32) for purpose in purposes}
    assert len(seeds) == 4 * len(purposes)
    assert 0 <= min(seeds) and max(seeds) < 2**32
    assert min(abs(a - b) for a, b in itertools.combinations(seeds, 2)) > 2**12
    assert seed_of(0, 1) == seed_of(0, 1)


@pytest.mark.parametrize("vocabulary", [1, 5, 256, 257, 3001])
@pytest.mark.parametrize("name", ["plain", "fast"])
def test_draw_tokens_inverts_the_cumulative_distribution(name, vocabulary):
    """In float64; with both ends of the interval, and with tokens that have no probability."""
    draw = starter.draw_tokens
    if name == "fast":
        draw = pytest.importorskip("support.fast").draw_tokens
    logits = 3 * torch.randn(400, vocabulary, generator=torch.Generator().manual_seed(0))
    if vocabulary > 5:
        logits[:, ::7] = -1e4
    uniform = torch.rand(400, 1, generator=torch.Generator().manual_seed(1))
    uniform[0] = 0.0
    uniform[1] = 1 - 2.0**-24  # the largest that torch.rand gives
    for temperature in (1.0, 0.5):
        tokens, log_probs = draw(logits, uniform, temperature)
        exact = (logits.double() / temperature).log_softmax(dim=1)
        torch.testing.assert_close(log_probs.double(), exact.gather(1, tokens), rtol=0, atol=1e-5)
        upper = exact.exp().cumsum(dim=1).gather(1, tokens)
        lower = upper - exact.exp().gather(1, tokens)
        assert ((lower - 1e-5 <= uniform) & (uniform <= upper + 1e-5)).all()
        assert (log_probs > -100).all()
    tokens, log_probs = draw(logits, uniform, 0)
    assert torch.equal(tokens[:, 0], logits.argmax(dim=1))
    exact = logits.double().log_softmax(dim=1).gather(1, tokens)
    torch.testing.assert_close(log_probs.double(), exact, rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------------------------
# Advantages and loss, against loops in float64

def test_clip_keeps_the_smaller_objective():
    ratio = torch.tensor([[0.5, 1.5, 0.5, 1.5]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    loss, metadata = starter.compute_loss(advantages, ratio.log(), torch.zeros(1, 4), (0.2, 0.3))
    torch.testing.assert_close(loss, torch.tensor([[-0.5, -1.3, 0.8, 1.5]]))
    assert metadata["clip_frac_low"] == 0.25 and metadata["clip_frac_high"] == 0.25


def advantages_by_loops(rewards, group_size, eps, normalize_by_std):
    advantages = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start:start + group_size]
        mean = sum(group) / group_size
        std = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (group_size - 1))
        divisor = std + eps if normalize_by_std else 1.0
        equal = min(group) == max(group)
        advantages += [0.0 if equal else (reward - mean) / divisor for reward in group]
    return advantages


TARGET = 0.3  # nats, of the sigmoid rules below
THRESHOLD = 0.2  # nats, of the clip rules below
MAX_NEW_TOKENS = 10


def sigmoid(x):
    return 1 / (1 + math.exp(-max(-700.0, min(700.0, x))))


def rule_by_hand(rule, kl, length):
    """Returns the value of a term rule at this KL, and its slope."""
    if rule == "clip":
        return min(kl, THRESHOLD), float(kl < THRESHOLD)
    if rule == "sigmoid":
        s = sigmoid(kl - TARGET)
        return s * kl, s + kl * s * (1 - s)
    if rule == "sigmoid_sound":
        x = 10 * (kl - TARGET) / TARGET
        softplus = max(x, 0) + math.log1p(math.exp(-abs(x)))
        return TARGET / 10 * softplus, sigmoid(x)
    if rule == "length_normalized":
        return kl / length, 1 / length
    if rule == "length_normalized_sound":
        return kl / MAX_NEW_TOKENS, 1 / MAX_NEW_TOKENS
    assert rule in ("none", "clip_sound")
    return kl, 1.0


def kl_by_hand(estimator, d):
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def loss_by_loops(batch, s):
    """The step's loss and its gradient by each policy log-prob, written out: float, rows of floats.

    batch: rows of floats "policy", "old", "ref", "rollout", rows of bools "mask", "advantages".
    s: the settings. With the gradient "reverse" only the derivative below is written, not the
    value, since the value is what the estimator says.
    """
    lengths = [sum(row) for row in batch["mask"]]
    total = 0.0
    gradient = []
    for b, row in enumerate(batch["mask"]):
        gradient.append([0.0] * len(row))
        places = [t for t, on in enumerate(row) if on]

        def cut(d):
            return max(-THRESHOLD, min(THRESHOLD, d)) if s.rule == "clip_sound" else d

        def value_and_slope(log_prob, t, always_cut=False):
            d = log_prob - batch["ref"][b][t]
            d = cut(d) if s.gradient == "reverse" or always_cut else d
            return rule_by_hand(s.rule, kl_by_hand(s.estimator, d), lengths[b])

        for t in places:
            policy, old, ref = (batch[name][b][t] for name in ("policy", "old", "ref"))
            sampler = batch["rollout"][b][t]
            weight = {"grpo": 1 / lengths[b] / len(lengths), "dapo": 1 / sum(lengths),
                      "dr_grpo": 1 / (len(lengths) * MAX_NEW_TOKENS)}[s.average]

            # The PPO term
            advantage = batch["advantages"][b]
            if s.placement == "reward":  # with a rule, a token pays for the whole response
                paid_for = [u for u in places if u >= t or s.rule != "none"]
                advantage -= s.kl_coef * sum(
                    value_and_slope(batch["rollout"][b][u], u, always_cut=True)[0]
                    for u in paid_for)
            if s.importance_cap is not None:
                advantage *= min(math.exp(old - sampler), s.importance_cap)
            ratio = math.exp(policy - old)
            used = min(ratio, 1 + s.clip_high) if advantage > 0 else max(ratio, 1 - s.clip_low)
            total -= weight * advantage * used
            if used == ratio:
                gradient[b][t] -= weight * advantage * ratio

            # The KL term
            if s.placement == "reward":
                continue
            kl, slope = value_and_slope(policy, t)
            d = policy - ref
            own = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[s.estimator]
            if s.gradient == "reverse":
                own = min(ratio, s.ratio_cap) * cut(d)
            total += weight * s.kl_coef * kl
            gradient[b][t] += weight * s.kl_coef * slope * own
            if s.placement == "loss_to_go":
                later = sum(value_and_slope(batch["policy"][b][u], u)[0]
                            for u in places if u > t)
                gradient[b][t] += weight * s.kl_coef * min(ratio, s.ratio_cap) * later
    return total, gradient


def random_loss_case(rng, case):
    """A small batch, rows of floats, for loss_by_loops."""
    group_size = rng.randint(2, 4)
    n_rows = rng.randint(1, 3) * group_size
    width = rng.randint(1, 6)
    shortest = 0 if case % 5 == 0 else 1
    lengths = [rng.randint(shortest, width) for _ in range(n_rows)]
    lengths[0] = max(1, lengths[0])
    starts = [rng.randint(0, width - length) for length in lengths]

    def noise(scale):
        return [[rng.gauss(-2, scale) for _ in range(width)] for _ in range(n_rows)]

    rewards = [rng.choice([0.0, 0.1, 1.0]) for _ in range(n_rows)]
    batch = {"mask": [[start <= t < start + length for t in range(width)]
                      for start, length in zip(starts, lengths)],
             "policy": noise(0.4), "old": noise(0.4), "ref": noise(1.0), "rollout": noise(0.4)}
    return batch, rewards, group_size


def test_loss_and_its_gradient_match_loops():
    rng = random.Random(0)
    options = dict(
        average=("grpo", "dapo", "dr_grpo"), estimator=("k1", "k2", "k3"),
        gradient=("reverse", "as_written"), importance_cap=(None, 1.5), ratio_cap=(1.2, math.inf),
        placement=("loss", "loss_to_go", "reward"), rule=("none", *starter.TERM_RULES))
    grid = list(itertools.product(*options.values()))
    for case, values in enumerate(rng.sample(grid, 500)):
        s = SimpleNamespace(**dict(zip(options, values)), clip_low=rng.choice([0.1, 0.2]),
                            clip_high=rng.choice([0.2, 0.3]), kl_coef=rng.choice([0.0, 0.1, 1.0]))
        batch, rewards, group_size = random_loss_case(rng, case)
        by_std = rng.random() < 0.5
        batch["advantages"] = advantages_by_loops(rewards, group_size, 1e-6, by_std)
        value, gradient = loss_by_loops(batch, s)

        mask = torch.tensor(batch["mask"])

        def tensor(name):  # nan where nothing may be read
            values = torch.tensor(batch[name], dtype=torch.float64)
            return values.masked_fill(~mask, math.nan)

        kl = KLSettings(s.estimator, s.gradient, s.placement, s.rule, THRESHOLD, TARGET,
                        max_new_tokens=MAX_NEW_TOKENS, ratio_cap=s.ratio_cap)
        policy = tensor("policy").requires_grad_()
        advantages, _ = starter.compute_group_normalized_advantages(
            torch.tensor(rewards, dtype=torch.float64), group_size, 1e-6, by_std)
        advantages = advantages[:, None]
        if s.placement == "reward":
            advantages = starter.put_kl_into_advantages(
                advantages, tensor("rollout"), tensor("ref"), mask, s.kl_coef, kl)
        if s.importance_cap is not None:
            importance = (tensor("old") - tensor("rollout")).exp().clamp(max=s.importance_cap)
            advantages = advantages * importance
        loss, _ = starter.compute_loss(advantages, policy, tensor("old"),
                                       (s.clip_low, s.clip_high), tensor("ref"), s.kl_coef, mask,
                                       kl)
        weights = starter.token_weights(mask, s.average, MAX_NEW_TOKENS).double()
        total = torch.where(mask, loss * weights, 0.0).sum()
        total.backward()
        ours = policy.grad
        by_hand = torch.tensor(gradient, dtype=torch.float64)
        assert total.item() == pytest.approx(value, rel=1e-6, abs=1e-7), s  # weights are float32
        torch.testing.assert_close(ours, by_hand, rtol=1e-6, atol=1e-8, msg=lambda m: f"{s}: {m}")


def test_masked_mean_ignores_masked_entries():
    tensor = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, 7.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert starter.masked_mean(tensor, mask).item() == 3
    assert starter.masked_mean(tensor, mask, dim=1).tolist() == [1.5, 6.0]
    assert starter.masked_mean(tensor, torch.zeros_like(mask)).item() == 0
    one_per_row = torch.tensor([[4.0], [1.0]])  # such as the ratio of a whole response
    assert starter.masked_mean(one_per_row, mask).item() == 3
    rows = torch.tensor([[1], [0]])  # a mask of whole rows
    assert starter.masked_mean(torch.tensor([[1.0, 5.0], [7.0, 8.0]]), rows).item() == 3


def test_loss_reads_nothing_outside_the_mask():
    mask = torch.tensor([[1, 1, 0]])
    log_probs = torch.tensor([[-1.0, -2.0, math.nan]])
    loss, metadata = starter.compute_loss(torch.ones(1, 1), log_probs, log_probs, 0.2,
                                          log_probs - 0.5, 0.1, mask)
    assert loss.isfinite().all() and all(value.isfinite() for value in metadata.values())


def test_metadata_of_the_loss_are_means_over_response_tokens():
    """A ratio counts as clipped only on the side where the clip cuts the gradient."""
    ratios = [[0.5, 0.9, 1.5, 1.4, 9.9], [1.5, 0.5, 1.1, 0.5, 9.9]]
    policy = torch.tensor(ratios).log()
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]])
    old = torch.zeros(2, 5)
    advantages = torch.tensor([[1.0], [-1.0]])

    def metadata_of(kl=KLSettings(), exact_kl=None):
        return starter.compute_loss(advantages, policy, old, 0.2, 0.5 * policy, 0.1, mask, kl,
                                    exact_kl)[1]

    found = metadata_of()
    assert found["clip_frac_high"] == pytest.approx(2 / 8)
    assert found["clip_frac_low"] == pytest.approx(2 / 8)
    assert found["clip_frac"] == pytest.approx(4 / 8)
    assert found["ratio_mean"] == pytest.approx(7.9 / 8)
    d = [0.5 * math.log(ratio) for row in ratios for ratio in row[:4]]
    for estimator in ("k1", "k2", "k3"):
        mean = sum(kl_by_hand(estimator, x) for x in d) / 8
        assert found[f"kl_{estimator}"] == pytest.approx(mean, rel=1e-5)
    assert found["kl_penalty_mean"] == found["kl_k3"] == found["kl_per_token"]
    found = metadata_of(exact_kl=torch.tensor([[1.0, 2, 3, 4, 99], [5, 6, 7, 8, 99]]))
    assert found["kl_per_token"] == 4.5 and found["kl_penalty_mean"] == found["kl_k3"]
    for kl, capped in ((KLSettings("k1"), 0), (KLSettings("k1", ratio_cap=1.2), 3 / 8),
                       (KLSettings("k1", placement="loss_to_go", ratio_cap=1.2), 3 / 8),
                       (KLSettings("k1", gradient="as_written", ratio_cap=1.2), 0),
                       (KLSettings("k1", placement="reward", ratio_cap=1.2), 0),
                       (KLSettings("k1", adaptation="clip_sound", clip_threshold=0.3), 3 / 8)):
        found = metadata_of(kl)
        assert found["kl_capped_frac"] == pytest.approx(capped)
        assert found["kl_penalty_mean"] == found["kl_k1"] != found["kl_k3"]
    for placement, capped in (("loss", 0), ("loss_to_go", 3 / 8)):
        kl = KLSettings("exact", placement=placement, ratio_cap=1.2)
        assert metadata_of(kl, torch.ones(2, 5))["kl_capped_frac"] == pytest.approx(capped)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("beta, bias_correction", [(0.0, False), (0.1, False), (0.1, True)])
def test_loss_and_gradient_match_trl(loss_type, beta, bias_correction):
    """TRL's own _compute_loss on the same tensors. Its KL term is k3 as written, or r * k3, whose
    gradient is ours exactly."""
    pytest.importorskip("trl")
    from trl.trainer.grpo_trainer import GRPOTrainer
    generator = torch.Generator().manual_seed(0)
    B, T = 8, 7
    policy, old, ref, sampler = -2 + 0.3 * torch.randn(4, B, T, generator=generator)
    mask = torch.arange(T) < torch.tensor([7, 1, 4, 3, 7, 2, 5, 6])[:, None]
    advantages = torch.randn(B, generator=generator)
    importance = (old - sampler).exp().clamp(max=2.0)

    theirs_in = policy.clone().requires_grad_()
    trainer = mock.MagicMock(
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", beta=beta, loss_type=loss_type, epsilon_low=0.2,
        epsilon_high=0.28, use_vllm=True, vllm_importance_sampling_correction=True,
        max_completion_length=T, current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False)
    trainer.args = SimpleNamespace(use_bias_correction_kl=bias_correction, delta=None,
                                   steps_per_generation=1)
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather = lambda x: x
    trainer._get_per_token_logps_and_entropies.return_value = (theirs_in, torch.ones(B, T), None)
    one_token = torch.zeros(B, 1, dtype=torch.long)
    theirs = GRPOTrainer._compute_loss(trainer, trainer.model, dict(
        prompt_ids=one_token, prompt_mask=one_token + 1,
        completion_ids=torch.zeros(B, T, dtype=torch.long), completion_mask=mask.long(),
        advantages=advantages, old_per_token_logps=old, ref_per_token_logps=ref,
        importance_sampling_ratio=importance, num_items_in_batch=mask.sum()))
    theirs.backward()

    ours_in = policy.clone().requires_grad_()
    kl = KLSettings(gradient="reverse" if bias_correction else "as_written", ratio_cap=math.inf)
    loss, _ = starter.compute_loss(advantages[:, None] * importance, ours_in, old, (0.2, 0.28),
                                   ref, beta, mask, kl)
    ours = (loss * starter.token_weights(mask, loss_type, T)).sum()
    ours.backward()
    torch.testing.assert_close(ours_in.grad, theirs_in.grad, rtol=1e-5, atol=1e-7)
    if not bias_correction:  # the value of r * k3 is another one
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------
# KL: gradients against enumeration, with negative controls

def random_logits(vocabulary=5, seed=0):
    """Three (V,) tensors: logits of the policy, the reference, and the policy that sampled."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, vocabulary, dtype=torch.float64, generator=generator)


def exact_gradient(of, logits, ref, old):
    """The gradient of a divergence of two categorical distributions, by its definition."""
    leaf = logits.clone().requires_grad_()
    log_pi, log_ref, log_old = (x.log_softmax(dim=0) for x in (leaf, ref, old))
    divergence = {
        "KL(policy || ref)": (log_pi.exp() * (log_pi - log_ref)).sum(),
        "KL(ref || policy)": (log_ref.exp() * (log_ref - log_pi)).sum(),
        "-KL(old || policy)": -(log_old.exp() * (log_old - log_pi)).sum(),
        "nothing": 0.0 * leaf.sum(),
    }[of]
    return torch.autograd.grad(divergence, leaf)[0]


@pytest.mark.parametrize("estimator, gradient, off_policy, of", [
    ("k1", "reverse", False, "KL(policy || ref)"),
    ("k1", "reverse", True, "KL(policy || ref)"),
    ("k2", "reverse", False, "KL(policy || ref)"),
    ("k2", "reverse", True, "KL(policy || ref)"),
    ("k3", "reverse", False, "KL(policy || ref)"),
    ("k3", "reverse", True, "KL(policy || ref)"),
    ("exact", "reverse", False, "KL(policy || ref)"),
    ("exact", "reverse", True, "KL(policy || ref)"),
    ("k2", "as_written", False, "KL(policy || ref)"),
    ("k3", "as_written", False, "KL(ref || policy)"),
    ("k1", "as_written", False, "nothing"),
    ("k1", "as_written", True, "-KL(old || policy)"),
])
def test_kl_gradient_is_that_of_the_divergence_claimed(estimator, gradient, off_policy, of):
    logits, ref, old = random_logits()
    old = old if off_policy else logits
    kl = KLSettings(estimator, gradient, ratio_cap=math.inf)
    ours = starter.expected_kl_gradient(logits, ref, old, kl)
    expected = exact_gradient(of, logits, ref, old)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator, gradient, off_policy, ratio_cap", [
    ("k1", "as_written", False, math.inf),
    ("k1", "as_written", True, math.inf),
    ("k2", "as_written", True, math.inf),
    ("k3", "as_written", False, math.inf),
    ("k3", "as_written", True, math.inf),
    ("k3", "reverse", True, 1.05),
])
def test_kl_gradient_known_to_be_biased_is_seen_as_biased(estimator, gradient, off_policy,
                                                          ratio_cap):
    """The negative control of the test above: the median relative error exceeds 10 %."""
    errors = []
    for seed in range(11):
        logits, ref, old = random_logits(seed=seed)
        exact = exact_gradient("KL(policy || ref)", logits, ref, old)
        kl = KLSettings(estimator, gradient, ratio_cap=ratio_cap)
        ours = starter.expected_kl_gradient(logits, ref, old if off_policy else logits, kl)
        errors.append(((ours - exact).norm() / exact.norm()).item())
    assert sorted(errors)[5] > 0.1


@pytest.mark.parametrize("estimator, placement", [
    ("k1", "loss_to_go"), ("k3", "loss_to_go"), ("exact", "loss_to_go"), ("k1", "reward")])
def test_kl_to_go_is_the_gradient_of_the_sequence_kl(estimator, placement):
    """All 27 responses of three tokens from a vocabulary of three. A policy is a table of logits:
    one row for each of the 13 prefixes."""
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 13, 3, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    responses = list(itertools.product(range(3), repeat=3))
    prefixes = [prefix for n in range(3) for prefix in itertools.product(range(3), repeat=n)]
    rows = torch.tensor([[prefixes.index(ids[:t]) for t in range(3)] for ids in responses])
    labels = torch.tensor(responses)
    table, ref_table = logits.log_softmax(dim=1), ref_logits.log_softmax(dim=1)
    log_probs = table[rows, labels]  # (27, 3)
    ref_log_probs = ref_table[rows, labels]
    probability = log_probs.sum(dim=1).exp()  # (27,)
    sequence_kl = (probability * (log_probs - ref_log_probs).sum(dim=1)).sum()
    expected, = torch.autograd.grad(sequence_kl, logits, retain_graph=True)

    mask = torch.ones(27, 3, dtype=torch.bool)
    exact_kl = (table.exp() * (table - ref_table)).sum(dim=1)[rows]
    kl = KLSettings(estimator, placement=placement)
    advantages = torch.zeros(27, 1, dtype=torch.float64)
    if placement == "reward":
        advantages = starter.put_kl_into_advantages(advantages, log_probs.detach(), ref_log_probs,
                                                    mask, 1.0, kl)
    loss, _ = starter.compute_loss(advantages, log_probs, log_probs.detach(), 0.2, ref_log_probs,
                                   1.0, mask, kl, exact_kl)
    ours, = torch.autograd.grad((loss.sum(dim=1) * probability.detach()).sum(), logits)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("gradient", ["reverse", "as_written"])
def test_bandit_settles_where_the_theory_says(gradient):
    """The policy at which the gradient vanishes is ref * exp(R / beta) / Z with the gradient of
    reverse KL, and ref / (1 - (R - mean of R) / beta) with k3 as written."""
    ref_logits = random_logits(4, seed=3)[1]
    rewards = torch.tensor([0.0, 0.3, 0.6, 1.0], dtype=torch.float64)
    beta = 1.5
    logits = ref_logits.clone().requires_grad_()
    for _ in range(1500):
        log_pi = logits.log_softmax(dim=0)
        pi = log_pi.exp().detach()
        advantages = rewards - (pi * rewards).sum()
        loss, _ = starter.compute_loss(  # four responses of one token
            advantages[:, None], log_pi[:, None], log_pi[:, None].detach(), 0.2,
            ref_logits.log_softmax(dim=0)[:, None], beta,
            kl=KLSettings(gradient=gradient, ratio_cap=math.inf))
        logits.data -= 2.0 * torch.autograd.grad((loss[:, 0] * pi).sum(), logits)[0]
    pi = logits.detach().softmax(dim=0)
    ref = ref_logits.softmax(dim=0)
    if gradient == "reverse":
        expected = ref * torch.exp(rewards / beta)
        expected = expected / expected.sum()
    else:
        expected = ref / (1 - (rewards - (pi * rewards).sum()) / beta)
    torch.testing.assert_close(pi, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("placement", ["loss", "loss_to_go"])
def test_kl_gradient_does_not_depend_on_the_ppo_term(placement):
    """What the KL term adds to the gradient is the same for every clip range and advantage, which
    change the PPO term and its gradient."""
    generator = torch.Generator().manual_seed(0)
    policy, old, ref = -2 + 0.5 * torch.randn(3, 6, 5, dtype=torch.float64, generator=generator)

    def gradient(advantages, clip_range, kl_coef):
        leaf = policy.clone().requires_grad_()
        loss, _ = starter.compute_loss(advantages, leaf, old, clip_range, ref, kl_coef,
                                       kl=KLSettings(placement=placement))
        return torch.autograd.grad(loss.sum(), leaf)[0]

    added = []
    plain = []
    for scale in (0.0, 1.0, -7.0):
        for clip_range in (0.0, 0.2, (0.1, 0.9)):
            advantages = scale * torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None]
            plain.append(gradient(advantages, clip_range, 0.0))
            added.append(gradient(advantages, clip_range, 0.7) - plain[-1])
    for one in added[1:]:
        torch.testing.assert_close(one, added[0], rtol=0, atol=1e-12)
    assert added[0].norm() > 1
    assert len({round(one.norm().item(), 6) for one in plain}) > 3  # the three of scale 0 are 0


def test_ppo_term_does_not_depend_on_the_cuts_of_the_kl_term():
    """With kl_coef = 0 the loss is the PPO term, whatever the KL settings say."""
    generator = torch.Generator().manual_seed(0)
    policy, old, ref = -2 + 0.8 * torch.randn(3, 6, 5, generator=generator)
    advantages = torch.linspace(-1, 1, 6)[:, None]
    without, _ = starter.compute_loss(advantages, policy, old, 0.2)
    for kl in (KLSettings(ratio_cap=0.5), KLSettings(adaptation="clip_sound", clip_threshold=0.1),
               KLSettings("exact", placement="loss_to_go"), KLSettings("k1", placement="reward")):
        loss, _ = starter.compute_loss(advantages, policy, old, 0.2, ref, 0.0, None, kl,
                                       torch.ones(6, 5))
        assert torch.equal(loss, without)


def test_k3_is_never_negative():
    d = torch.linspace(-1e-3, 1e-3, 2001)
    assert (starter.compute_kl_divergence(d, torch.zeros(()), "k3") >= 0).all()


def test_kl_of_distant_policies_is_finite_and_pulls_with_its_log_ratio():
    """The product r * k3 would give 0 and nan here."""
    policy = torch.tensor([[-20.0, -100.0, -30.0]], requires_grad=True)
    old = policy.detach() - math.log(0.7)
    loss, metadata = starter.compute_loss(torch.zeros(1, 1), policy, old, 0.2, torch.zeros(1, 3),
                                          1.0)
    loss.sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[-14.0, -70.0, -21.0]]))
    assert loss.isfinite().all()
    assert all(value.isfinite() for value in metadata.values())


def test_kl_estimator_exact_without_the_exact_kl_is_refused():
    with pytest.raises(InputError, match="kl_estimator = 'exact' must be 'k1', 'k2' or 'k3' for "
                                         "two log-probs; use 'k3'"):
        starter.compute_loss(torch.zeros(1, 1), torch.zeros(1, 2), torch.zeros(1, 2), 0.2,
                             torch.zeros(1, 2), 0.1, kl=KLSettings("exact"))


# --------------------------------------------------------------------------------------------------
# Microbatches

def test_advantages_and_their_statistics_match_hand_computed_values():
    rewards = torch.tensor([0.0, 1.0, 2.0, 5.0, 5.0, 5.0, 1.0, 1.0, 1.0])
    for normalize_by_std, divisor in ((True, 1.5), (False, 1.0)):
        advantages, metadata = starter.compute_group_normalized_advantages(
            rewards, 3, 0.5, normalize_by_std)
        by_hand = torch.tensor([-1.0, 0, 1, 0, 0, 0, 0, 0, 0]) / divisor
        torch.testing.assert_close(advantages, by_hand)
        assert metadata["frac_zero_std"] == pytest.approx(2 / 3)
        assert metadata["reward_std"] == pytest.approx(1 / 3)  # the groups' mean
        assert metadata["reward_mean"] == pytest.approx(21 / 9)


def test_batch_is_shifted_once_and_masked_by_lengths():
    """The second response is a padding token, 0, which is a token like any other there."""
    responses = [Response([5, 6, 7], [8, 1], [-0.5, -0.25], True),
                 Response([5], [0], [-3.0], True),
                 Response([9, 1], [1], [-2.0], True),
                 Response([9, 1], [], [], False)]
    batch = starter.make_batch(responses, torch.tensor([1.0, 2.0, 3.0, 4.0]), "cpu")
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [5, 0, 0, 0], [9, 1, 0, 0], [9, 0, 0, 0]]
    assert batch["labels"].tolist() == [[6, 7, 8, 1], [0, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert batch["response_mask"].int().tolist() == [
        [0, 0, 1, 1], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert batch["rollout_log_probs"].tolist() == [
        [0, 0, -0.5, -0.25], [-3, 0, 0, 0], [0, -2, 0, 0], [0, 0, 0, 0]]
    assert batch["advantages"].tolist() == [[1], [2], [3], [4]]


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (3,), ()])
def test_advantages_of_another_shape_are_refused_with_both_shapes(shape):
    responses = [Response([5], [6], [0.0], True)] * 4
    with pytest.raises(InputError, match=r"advantages have the shape .*; there must be one for "
                                         "each of the 4 responses"):
        starter.make_batch(responses, torch.zeros(shape), "cpu")


def test_token_weights_match_hand_computed_values():
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    by_hand = {"grpo": [1 / 6, 1 / 3], "dapo": [1 / 3, 1 / 3], "dr_grpo": [1 / 18, 1 / 18]}
    for average, (first, third) in by_hand.items():
        expected = torch.tensor([[0, first, first, 0], [0, 0, 0, 0], [third, 0, 0, 0]])
        torch.testing.assert_close(starter.token_weights(mask, average, 6), expected)


def test_microbatches_hold_every_row_once_within_the_budget(compute):
    lengths = [40, 3, 17, 17, 1, 8, 30, 2, 25]
    responses = make_responses(lengths, prompt_lengths=(3, 2, 6))
    batch = make_step(responses) | {"row": torch.arange(9)[:, None]}
    batch["row"] = batch["row"].expand(-1, batch["labels"].shape[1])
    for budget in (1, 16, 50, 100, 10_000):
        microbatches = compute.cut_microbatches(batch, budget)
        found = []
        widths = []
        for rows in microbatches:
            indices = rows["row"][:, 0].tolist()
            width = rows["labels"].shape[1]
            found += indices
            widths.append(width)
            used = [len(responses[i].prompt_ids) + lengths[i] - 1 for i in indices]
            assert width == max(used)
            assert all(len(tensor) == len(indices) for tensor in rows.values())
            for name in ("labels", "response_mask", "weights"):
                assert torch.equal(rows[name], batch[name][indices, :width])
            assert len(indices) == 1 or sum(lengths[i] for i in indices) <= budget
            if compute is starter.PLAIN:
                assert len(indices) == 1 or len(indices) * width <= budget
            else:  # the fast path reads a prompt once
                responses_width = max(lengths[i] for i in indices)
                n_prompts = len({i % 3 for i in indices})
                assert len(indices) == 1 or (len(indices) * responses_width
                                             + n_prompts * (6 - 1) <= budget)
        assert sorted(found) == list(range(9))
        if compute is starter.PLAIN:
            assert widths == sorted(widths, reverse=True)  # the largest first, for the memory
    assert len(microbatches) < 9


# --------------------------------------------------------------------------------------------------
# Log-probs

@pytest.mark.parametrize("family, changes", [
    ("Qwen3", {}),
    ("Qwen3", dict(tie=False)),
    ("Mistral", dict(sliding_window=4)),  # shorter than the rows
])
def test_log_probs_are_the_models_own(tmp_path, family, changes):
    """Ragged rows, several in a batch, against the model's own logits for each row alone."""
    policy, _ = starter.init_policy(save_checkpoint(tmp_path / "m", family=family, **changes), CPU)
    responses = make_responses((1, 12, 5, 8, 3))
    batch = starter.make_batch(responses, torch.zeros(5), "cpu")
    mask = batch["response_mask"]
    ours = starter.get_response_log_probs(policy, batch["input_ids"], batch["labels"], mask, 0.8)
    assert ours.dtype == torch.float32 and (ours[~mask] == 0).all()
    for row, on, response in zip(ours, mask, responses):
        own = labels_of(whole_log_softmax(policy, response, 0.8), response)
        torch.testing.assert_close(row[on], own, rtol=0, atol=1e-4)


def test_log_probs_without_a_mask_are_of_all_labels(policy):
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    ours = starter.get_response_log_probs(policy, ids[:, :-1], ids[:, 1:])
    own = policy(ids[:, :-1]).logits.log_softmax(dim=2).gather(2, ids[:, 1:, None])[:, :, 0]
    torch.testing.assert_close(ours, own, rtol=0, atol=1e-5)


def test_rows_without_a_response_have_no_log_probs(policy, compute):
    """Several processes fill up with such microbatches."""
    ids = torch.tensor([[5, 6, 7, 8]])
    compute.prepare(policy)
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    ours = starter.get_response_log_probs(policy, ids[:, :-1], ids[:, 1:], nothing,
                                          compute=compute)
    assert torch.equal(ours, torch.zeros(1, 3))


def test_statistics_and_their_gradients_match_the_whole_softmax(compute, monkeypatch):
    """Log-probs, exact KL, entropy, the reference's log-probs, and the gradient of the first two
    through the whole model in float64, with the head cut into many pieces."""
    monkeypatch.setattr(starter, "LOGITS_AT_ONCE", 5 * 32)
    policy, ref_model = (model.double() for model in make_models())
    for model in (policy, ref_model):
        compute.prepare(model)
    responses = make_responses((1, 12, 5, 3, 7, 2))
    batch = starter.make_batch(responses, torch.zeros(6), "cpu")
    mask = batch["response_mask"]
    ours = compute.token_statistics(
        compute.hidden_states(policy, batch), batch["labels"][mask], compute.head_of(policy), 0.8,
        compute.hidden_states(ref_model, batch), compute.head_of(ref_model))

    expected = []
    for response in responses:
        log_p = whole_log_softmax(policy, response, 0.8)
        log_q = whole_log_softmax(ref_model, response, 0.8)
        expected.append(torch.stack([
            labels_of(log_p, response), (log_p.exp() * (log_p - log_q)).sum(dim=1),
            -(log_p.exp() * log_p).sum(dim=1), labels_of(log_q, response)]))
    expected = torch.cat(expected, dim=1)
    # The norms of the model are float32 inside.
    torch.testing.assert_close(torch.stack(list(ours)), expected, rtol=1e-6, atol=1e-6)
    upstream = torch.randn(2, mask.sum(), dtype=torch.float64,
                           generator=torch.Generator().manual_seed(0))
    parameters = list(policy.parameters())
    for i in range(2):
        mine = torch.autograd.grad((ours[i] * upstream[i]).sum(), parameters, retain_graph=True)
        theirs = torch.autograd.grad((expected[i] * upstream[i]).sum(), parameters,
                                     retain_graph=True)
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert not ours.entropy.requires_grad and not ours.ref_log_probs.requires_grad


def test_largest_tensor_of_the_head_does_not_grow_with_the_tokens(compute, monkeypatch):
    """Forward and backward, with a reference, at 2,048 and 8,192 tokens."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    monkeypatch.setattr(starter, "LOGITS_AT_ONCE", 1 << 22)  # that of support/fast.py
    ref_weight = torch.randn(3_000, 4)
    weight = ref_weight.clone().requires_grad_()
    for n in (2_048, 8_192):
        hidden = torch.randn(n, 4, requires_grad=True)
        labels = torch.arange(n) % 3_000
        with Largest() as largest:
            found = compute.token_statistics(hidden, labels, starter.LMHead(weight), 1.0,
                                             hidden.detach(), starter.LMHead(ref_weight))
            (found.log_probs + found.exact_kl).sum().backward()
        assert 1 << 21 < largest.elements <= 1 << 22, n


MEMORY_PROBE = """
import starter, os, sys, threading, time, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
how, what = sys.argv[1:]
model = Qwen3ForCausalLM(Qwen3Config(
    vocab_size=151_936, hidden_size=256, intermediate_size=512, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True))
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
ids = torch.randint(1000, (8, 513))
rows = dict(input_ids=ids[:, :-1], labels=ids[:, 1:],
            response_mask=torch.ones(8, 512, dtype=torch.bool))
compute = starter.PLAIN
if how == "fast":
    from support.fast import COMPUTE as compute
    compute.prepare(model)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = peak = resident()
running = True

def watch():
    global peak
    while running:
        peak = max(peak, resident())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
if how == "whole":
    logits = model(rows["input_ids"]).logits
    total = logits.log_softmax(-1).gather(2, rows["labels"][:, :, None]).sum()
else:
    hidden = compute.hidden_states(model, rows)
    reference = (None, None)
    if what == "exact":
        reference = (hidden.detach().flip(0), starter.LMHead(model.lm_head.weight.detach()))
    found = compute.token_statistics(hidden, rows["labels"].flatten(), compute.head_of(model), 1.0,
                                     *reference)
    total = found.log_probs.sum() + (found.exact_kl.sum() if what == "exact" else 0)
total.backward()
running = False
thread.join()
print((peak - before) / 1e9)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("how, what", [("plain", "log-probs"), ("plain", "exact"),
                                       ("fast", "log-probs"), ("fast", "exact"),
                                       ("whole", "log-probs")])
def test_log_prob_pass_needs_little_memory(how, what):
    """8 x 512 tokens, vocabulary 151,936: less than 1.2 GB above weights and gradients, where all
    logits together need more than 7 GB."""
    if how == "fast":
        pytest.importorskip("support.fast")
    run = subprocess.run([sys.executable, "-c", MEMORY_PROBE, how, what], cwd=HERE,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    gigabytes = float(run.stdout)
    print(how, what, gigabytes)
    assert gigabytes > 7 if how == "whole" else gigabytes < 1.2


@pytest.mark.parametrize("changes, message", [
    (dict(estimator="k4"), "kl_estimator = 'k4' is not known; "),
    (dict(gradient="revers"), r"kl_gradient = 'revers' is not known; did you mean 'reverse'\?"),
    (dict(placement="advantage"), "kl_in = 'advantage' is not known; use one of 'loss', "),
    (dict(target=0.0), "kl_target = 0.0 must be a number above 0, in nats per token"),
    (dict(target=math.nan), "kl_target = nan must be a number above 0"),
])
def test_kl_settings_refuse_what_would_act_like_another_value(changes, message):
    with pytest.raises(starter.InputError, match=message):
        KLSettings(**changes)


# --------------------------------------------------------------------------------------------------
# Update

@pytest.mark.parametrize("temperature, placement", [(1.0, "loss"), (0.7, "loss"), (0.7, "reward")])
def test_gradient_of_a_step_matches_the_loss_written_out(compute, temperature, placement):
    """The whole step in one expression: own logits of each row alone, PPO term with its clip and
    its importance weight, k3 with the gradient of reverse KL or k1 in the advantages, mean over
    all tokens."""
    policy, ref_model = (model.double() for model in make_models())
    responses = make_responses((1, 12, 5, 3, 7, 2))
    advantages = torch.linspace(-1, 1, 6)
    kl_coef = 0.3
    noise = random.Random(0)
    total = 0.0
    old_rows = []
    for response, advantage in zip(responses, advantages.tolist()):
        log_probs, ref_log_probs = (
            labels_of(whole_log_softmax(model, response, temperature), response)
            for model in (policy, ref_model))
        ref_log_probs = ref_log_probs.detach()
        rollout_log_probs = torch.tensor(response.log_probs)
        old = log_probs.detach() + torch.tensor([noise.gauss(0, 0.3) for _ in log_probs])
        importance = (old - rollout_log_probs).exp().clamp(max=2.0)
        if placement == "reward":
            to_go = (rollout_log_probs - ref_log_probs).flip(0).cumsum(0).flip(0)
            advantage = advantage - kl_coef * to_go
        ratio = (log_probs - old).exp()
        ppo = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * importance
        d = (log_probs - ref_log_probs).detach()
        kl = torch.exp(-d) - 1 + d
        score = ratio.detach().clamp(max=2.0) * d * log_probs
        penalty = kl + score - score.detach() if placement == "loss" else 0.0
        total = total + (ppo + kl_coef * penalty).sum() / 30
        old_rows.append(old)
    total.backward()
    expected = gradient_of(policy)
    policy.zero_grad()

    batch = make_step(responses, "dapo")
    for model in (policy, ref_model):
        compute.prepare(model)
    batch["old_log_probs"] = starter.spread(torch.cat(old_rows), batch["response_mask"])
    kl = KLSettings() if placement == "loss" else KLSettings("k1", placement="reward")
    cfg = step_settings(temperature=temperature, kl=kl)
    loss = sum(starter.grpo_microbatch_step(policy, rows, cfg, ref_model, kl_coef, compute)[0]
               for rows in compute.cut_microbatches(batch, 40))
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(gradient_of(policy), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss_average", ["grpo", "dapo", "dr_grpo"])
def test_gradient_and_logged_means_do_not_depend_on_the_cut(compute, loss_average):
    """In 1 to 8 microbatches, over two epochs, with clip, KL term and importance weights active."""
    def run(max_tokens):
        policy, ref_model = make_models()
        for model in (policy, ref_model):
            compute.prepare(model)
        batch = make_step(make_responses((1, 9, 4, 6, 7, 2, 8, 3)), loss_average)
        microbatches = compute.cut_microbatches(batch, max_tokens)
        parts = starter.Parts(compute, starter.OneProcess(), None)
        found = []
        for epoch in range(2):
            means, log_probs = starter.accumulate_gradients(
                policy, microbatches, 40, step_settings(importance_cap=1.2), parts, ref_model, 0.1)
            if epoch == 0:
                for rows, now in zip(microbatches, log_probs):
                    rows["old_log_probs"] = now
            found.append(({name: float(x) for name, x in means.items()}, gradient_of(policy)))
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter -= 0.15 * parameter.grad / found[-1][1].norm()
            policy.zero_grad()
        return len(microbatches), found

    n_whole, whole = run(10_000)
    n_cut = set()
    for max_tokens in (70, 30, 1):
        n, cut = run(max_tokens)
        n_cut.add(n)
        for (means, gradient), (whole_means, whole_gradient) in zip(cut, whole):
            assert means == pytest.approx(whole_means, rel=1e-4, abs=1e-5)
            torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-5)
    assert n_whole == 1 and max(n_cut) == 8 and len(n_cut) == 3
    assert whole[1][0]["clip_frac"] > 0


@pytest.mark.parametrize("loss_average", ["grpo", "dapo", "dr_grpo"])
def test_rows_without_a_gradient_are_left_out_and_change_nothing(compute, loss_average):
    """Advantage 0 in half of the rows, no weights in one more, two epochs."""
    def run(choose):
        policy, _ = make_models()
        compute.prepare(policy)
        batch = make_step(make_responses((1, 9, 4, 6, 7, 2, 8, 3)), loss_average)
        batch["advantages"][::2] = 0.0
        batch["weights"][3] = 0.0
        batch = choose(batch)
        microbatches = compute.cut_microbatches(batch, 30)
        parts = starter.Parts(compute, starter.OneProcess(), None)
        found = []
        for epoch in range(2):
            means, log_probs = starter.accumulate_gradients(
                policy, microbatches, 40, step_settings(importance_cap=1.2), parts)
            if epoch == 0:
                for rows, now in zip(microbatches, log_probs):
                    rows["old_log_probs"] = now
            found.append((float(means["loss"]), gradient_of(policy)))
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter -= 0.15 * parameter.grad / found[-1][1].norm()
            policy.zero_grad()
        return len(batch["labels"]), found

    n_all, whole = run(lambda batch: batch)
    n_left, ours = run(starter.rows_that_learn)
    assert (n_all, n_left) == (8, 3)
    for (loss, gradient), (whole_loss, whole_gradient) in zip(ours, whole):
        assert loss == pytest.approx(whole_loss, abs=1e-6)
        torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-6)


def test_one_row_is_left_where_none_learns():
    batch = make_step(make_responses((3, 2)), "dapo")
    batch["advantages"][:] = 0.0
    left = starter.rows_that_learn(batch)
    assert len(left["labels"]) == 1
    assert torch.equal(left["input_ids"][0], batch["input_ids"][0])


def test_importance_weights_correct_the_sampler_and_are_cut(policy):
    """The sampler's log-probs are off by -0.3, 0 and 1: the weights are exp(0.3), which is cut at
    1.2, 1 and exp(-1)."""
    batch = starter.make_batch([Response([5, 6], [7, 8, 9], [0.0] * 3, True)], torch.ones(1), "cpu")
    mask = batch["response_mask"]
    own = starter.get_response_log_probs(policy, batch["input_ids"], batch["labels"], mask)
    off = starter.spread(torch.tensor([-0.3, 0.0, 1.0]), mask)
    batch |= {"weights": mask.float(), "rollout_log_probs": own.detach() + off}
    by_hand = -(own[mask] * torch.tensor([1.2, 1.0, math.exp(-1)])).sum()
    first = next(policy.parameters())
    expected, = torch.autograd.grad(by_hand, first)
    starter.grpo_microbatch_step(policy, batch, step_settings(importance_cap=1.2))
    torch.testing.assert_close(first.grad, expected, rtol=0, atol=1e-5)


def test_gradient_in_bf16_is_off_by_its_rounding_only(policy, compute):
    """Against float64: 1e-5 of the norm in float32, 5 % under bf16 autocast."""
    responses = [response for seed in range(3)
                 for response in sample(policy, compute, group_size=8, seed=100 * seed)]
    compute.undo(policy)
    gradients = {}
    for name, dtype, bf16 in (("exact", torch.float64, False), ("float32", torch.float32, False),
                              ("bf16", torch.float32, True)):
        model = copy.deepcopy(policy).to(dtype)
        compute.prepare(model)
        batch = make_step(responses, advantages=torch.linspace(-1, 1, len(responses)).roll(7))
        starter.grpo_microbatch_step(model, batch, step_settings(bf16=bf16), compute=compute)
        gradients[name] = gradient_of(model).double()
    norm = gradients["exact"].norm()
    errors = {name: ((gradients[name] - gradients["exact"]).norm() / norm).item()
              for name in ("float32", "bf16")}
    assert errors["float32"] < 1e-5 and 1e-4 < errors["bf16"] < 0.05, errors


def test_gradient_checkpointing_changes_no_gradient(policy, compute):
    compute.prepare(policy)
    batch = make_step(make_responses((1, 12, 5, 3, 7, 2)))
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            policy.train()
            policy.gradient_checkpointing_enable()
        policy.zero_grad()
        starter.grpo_microbatch_step(policy, dict(batch), step_settings(), compute=compute)
        gradients.append(gradient_of(policy))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("kl", [KLSettings(), KLSettings("exact", placement="loss_to_go"),
                                KLSettings("k1", placement="reward")])
def test_kl_coef_zero_is_plain_grpo_bit_for_bit(compute, kl):
    gradients = []
    for with_reference in (False, True):
        policy, ref_model = make_models()
        for model in (policy, ref_model):
            compute.prepare(model)
        batch = make_step(make_responses((1, 12, 5, 3, 7, 2)))
        loss, metadata, _ = starter.grpo_microbatch_step(
            policy, batch, step_settings(kl=kl), ref_model if with_reference else None, 0.0,
            compute)
        gradients.append(torch.cat([loss[None], gradient_of(policy)]))
        assert ("kl_per_token" in metadata) == with_reference
    assert torch.equal(*gradients)


def test_reference_gets_no_gradient_and_is_computed_once_a_rollout():
    policy, ref_model = make_models()
    ref_model.requires_grad_(True)  # whatever the caller forgot
    batch = make_step(make_responses((1, 12, 5)))
    calls = []
    ref_model.base_model.register_forward_hook(lambda *args: calls.append(1))
    for _ in range(3):
        starter.grpo_microbatch_step(policy, batch, step_settings(), ref_model, 0.1)
    assert len(calls) == 1
    assert all(parameter.grad is None for parameter in ref_model.parameters())


def test_given_reference_log_probs_take_the_place_of_a_reference_model():
    """k3 needs the log-probs of the sampled tokens only."""
    gradients = []
    policy, ref_model = make_models()
    batch = make_step(make_responses((1, 12, 5, 3)))
    for given in (None, ref_model):
        policy.zero_grad()
        starter.grpo_microbatch_step(policy, batch, step_settings(), given or ref_model, 0.3)
        gradients.append(gradient_of(policy))
        del batch["ref_hidden"]  # "ref_log_probs" stay
    policy.zero_grad()
    starter.grpo_microbatch_step(policy, batch, step_settings(), None, 0.3)
    torch.testing.assert_close(gradient_of(policy), gradients[0], rtol=0, atol=1e-7)


# --------------------------------------------------------------------------------------------------
# Rules of the KL coefficient and of the KL term

def controller(rule="none", kl_coef=0.2, **changes):
    return KLController(kl_coef, KLSettings(adaptation=rule, **changes))


def betas(controller, kls, rewards):
    """beta after each step. The state goes through JSON each time, as in a checkpoint."""
    found = []
    for kl, reward in zip(kls, rewards):
        state = json.loads(json.dumps(controller.state))
        controller = KLController(controller.start, controller.settings, state)
        controller.update(kl, reward)
        found.append(controller.beta)
    return found


def test_printed_coefficient_rules_match_hand_computed_values():
    kls = [0.16, 0.15, 0.1, 0.05, 0.04]
    assert betas(controller("target"), kls, [0.0] * 5) == pytest.approx([0.3, 0.3, 0.3, 0.3, 0.225])
    dynamic = betas(controller("dynamic"), [0.1] * 4, [0.81, 0.8, 0.79, 1.0])
    assert dynamic == pytest.approx([0.18, 0.18, 0.18, 0.162])
    bounded = betas(controller("dynamic", beta_min=0.17), [0.1] * 3, [0.9] * 3)
    assert bounded == pytest.approx([0.18, 0.17, 0.17])
    scheduled = controller("dynamic", beta_min=0.01, beta_schedule_steps=3)
    assert betas(scheduled, [0.1] * 4, [0.0] * 4) == pytest.approx([0.2, 0.2, 0.01, 0.01])


def test_without_a_coefficient_rule_beta_stays():
    for adaptation in ("none", *starter.TERM_RULES):
        assert betas(controller(adaptation), [9.0] * 5, [1.0] * 5) == [0.2] * 5


@pytest.mark.parametrize("rule, low, high", [("target_sound", 0.02, 2.0),
                                             ("dynamic_sound", 0.02, 0.2)])
def test_sound_coefficient_rules_keep_their_bounds_and_do_not_jump(rule, low, high):
    rng = random.Random(0)
    for kl, reward in ((0.0, 0.0), (0.0, 1.0), (9.0, 0.0), (9.0, 1.0)):
        found = betas(controller(rule, beta_schedule_steps=500), [kl] * 2000, [reward] * 2000)
        assert all(low - 1e-12 <= beta <= high + 1e-12 for beta in found)
    noisy = betas(controller(rule, beta_schedule_steps=500),
                  [rng.lognormvariate(-2, 1) for _ in range(2000)],
                  [rng.gauss(0.8, 0.2) for _ in range(2000)])
    assert all(abs(math.log(b / a)) < 0.12 for a, b in zip(noisy, noisy[1:]))


def test_controller_keeps_moving_averages():
    c = controller("target_sound")
    for kl, reward in ((1.0, 0.5), (0.0, 1.0)):
        c.update(kl, reward)
    assert c.state["kl"] == pytest.approx(0.8) and c.state["reward"] == pytest.approx(0.6)


def test_sound_coefficient_rules_match_hand_computed_values():
    ln2 = math.log(2)
    kls = [0.2, 0.1, 5.0, 5.0, 0.0]  # the first moving averages are 0.2, 0.18, 1.144
    first, second, third, *_ = betas(controller("target_sound"), kls, [0.0] * 5)
    assert first == pytest.approx(0.2 * math.exp(0.1 * ln2))
    assert second == pytest.approx(first * math.exp(0.1 * math.log(1.8)))
    assert third == pytest.approx(second * math.exp(0.1))  # a step is bounded
    rewards = [1.0] * 20 + [0.0] * 20  # their average falls below 0.8 in step 22
    found = betas(controller("dynamic_sound", beta_schedule_steps=10**9), [0.1] * 40, rewards)
    by_hand = [0.2] * 9 + [0.18] * 10 + [0.162] * 10 + [0.18] * 10 + [0.2]
    assert found == pytest.approx(by_hand, rel=1e-6)
    found = betas(controller("dynamic_sound", beta_schedule_steps=4), [0.1] * 6, [0.0] * 6)
    falling = [0.2 * 0.1 ** (step / 4) for step in (1, 2, 3, 4, 4, 4)]  # the ceiling
    assert found == pytest.approx(falling)


def test_dynamic_sound_rule_takes_back_what_it_let_go():
    found = betas(controller("dynamic_sound", beta_schedule_steps=10**9), [0.1] * 200,
                  [1.0] * 100 + [0.0] * 100)
    assert min(found) < 0.1 and found[-1] == pytest.approx(0.2, rel=1e-3)


def test_target_sound_rule_reaches_the_target_of_a_slow_policy():
    """The KL follows 0.02 / beta with a lag of 10 steps and 20 % noise, and not at all in the first
    20, as in a warm-up. The printed rule winds down meanwhile and overshoots tenfold."""
    def simulate(rule, seed):
        rng = random.Random(seed)
        c = controller(rule, kl_coef=1.0)
        kl = 0.0
        found = []
        for step in range(400):
            kl += (0.02 * (step >= 20) / c.beta - kl) / 10
            found.append(kl * math.exp(rng.gauss(0, 0.2)))
            c.update(found[-1], 0.0)
        return found

    for seed in range(5):
        sound = simulate("target_sound", seed)
        assert sum(0.05 < kl < 0.15 for kl in sound[200:]) >= 180
        assert max(sound) < 0.3
        assert max(simulate("target", seed)) > 1.0


@pytest.mark.parametrize("rule", starter.COEFFICIENT_RULES)
def test_number_that_is_not_finite_does_not_move_beta(rule):
    for kl, reward in ((math.nan, 1.0), (math.inf, 1.0), (0.1, math.nan), (-math.inf, 0.0)):
        state = {"beta": 0.2, "step": 4, "kl": 0.1, "reward": 0.5}
        c = KLController(0.2, KLSettings(adaptation=rule), state)
        c.update(kl, reward)
        assert c.state == state | {"step": 5}
    assert math.isfinite(betas(controller(rule), [0.0, -0.1, 0.0], [0.0] * 3)[-1])


@pytest.mark.parametrize("rule", starter.COEFFICIENT_RULES)
def test_controller_goes_on_from_its_saved_state(rule):
    rng = random.Random(1)
    kls = [rng.lognormvariate(-2, 0.5) for _ in range(60)]
    rewards = [rng.random() for _ in range(60)]
    undisturbed = controller(rule)
    for kl, reward in zip(kls, rewards):
        undisturbed.update(kl, reward)
    assert undisturbed.beta == betas(controller(rule), kls, rewards)[-1]


def main_settings(**changes):
    """The settings of main() that say what the KL term is, with main()'s own values."""
    parameters = starter.inspect.signature(starter.main).parameters
    cfg = SimpleNamespace(**{name: p.default for name, p in parameters.items()})
    vars(cfg).update(dict(use_kl_penalty=True, kl_coef=0.1, model_id="a/b") | changes)
    cfg.kl = starter.kl_settings(cfg)
    return cfg


@pytest.mark.parametrize("method, term, coefficient, threshold", [
    ("none", None, None, 1.0),
    ("clip", "clip", None, 1.0),
    ("dynamic+sigmoid", "sigmoid", "dynamic", 1.0),
    ("sigmoid+dynamic", "sigmoid", "dynamic", 1.0),
    ("none+target", None, "target", 1.0),
    ("target_sound+clip_sound", "clip_sound", "target_sound", 5.0),
])
def test_adaptation_is_taken_apart_into_its_rules(method, term, coefficient, threshold):
    kl = main_settings(kl_adaptation_method=method).kl
    assert kl.rule_among(starter.TERM_RULES) == term
    assert kl.rule_among(starter.COEFFICIENT_RULES) == coefficient
    assert (kl.clip_threshold, kl.target) == (threshold, 0.1)
    assert kl.log_ratio_cap == (5.0 if term == "clip_sound" else math.inf)
    assert main_settings(kl_adaptation_method=method, kl_clip_threshold=0.3,
                         kl_target=0.7).kl.clip_threshold == 0.3


@pytest.mark.parametrize("method", ["clip+sigmoid", "target+dynamic", "clip+clips", "Clip", "",
                                    "clip + dynamic"])
def test_adaptation_that_is_not_one_of_each_is_refused(method):
    with pytest.raises(InputError, match=f"kl_adaptation_method = '{re.escape(method)}' must be "):
        main_settings(kl_adaptation_method=method)


def test_ratio_in_the_kl_gradient_is_cut_at_two_by_default():
    policy = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -1.0]]) - torch.tensor([1.5, 10.0]).log()
    kl = starter.kl_with_gradient(policy, torch.tensor([[-2.0, -2.0]]), old, main_settings().kl)
    kl.sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[1.5, 2.0]]))  # ratio * d, and d = 1


def test_kl_settings_hold_every_parameter_of_main():
    kl = main_settings(
        kl_estimator="k1", kl_gradient="as_written", kl_in="reward", kl_adaptation_method="target",
        kl_clip_threshold=3.0, kl_target=0.5, dynamic_beta_decay=0.8, reward_threshold=0.7,
        beta_min=0.01, beta_schedule_steps=77, max_new_tokens=9).kl
    assert kl == KLSettings("k1", "as_written", "reward", "target", 3.0, 0.5, 0.8, 0.7, 0.01, 77, 9)


@pytest.mark.parametrize("changes, message", [
    (dict(kl_estimator="k3", kl_in="reward"), "'k3' with kl_in = 'reward' does not see the sign"),
    (dict(kl_estimator="exact", kl_in="reward"), "'exact' with kl_in = 'reward' does not see"),
    (dict(kl_estimator="k1", kl_gradient="as_written"), "has an expected gradient of zero"),
    (dict(kl_gradient="as_written", kl_in="loss_to_go"), "is the gradient of no divergence"),
    (dict(kl_estimator="k2", kl_in="loss_to_go"), "charges earlier tokens with a biased KL"),
    (dict(kl_estimator="k1", kl_adaptation_method="sigmoid"), "reverses the gradient"),
    (dict(kl_estimator="k1", kl_in="reward", kl_adaptation_method="target+sigmoid_sound"),
     "reverses the gradient where k1 is negative"),
    (dict(kl_gradient="as_written", kl_adaptation_method="clip_sound"), "'clip_sound' clamps"),
    (dict(kl_estimator="exact", kl_adaptation_method="clip_sound"), "'clip_sound' clamps"),
])
def test_kl_term_known_not_to_work_is_refused_unless_a_paper_is_reproduced(changes, message):
    with pytest.raises(InputError, match=f"{message}.*; use kl_.*, or reproduce_paper = True"):
        starter.check_kl(main_settings(**changes))
    starter.check_kl(main_settings(reproduce_paper=True, **changes))


@pytest.mark.parametrize("changes", [
    *(dict(kl_estimator=estimator) for estimator in ("k1", "k2", "k3", "exact")),
    *(dict(kl_estimator=estimator, kl_in="loss_to_go") for estimator in ("k1", "k3", "exact")),
    *(dict(kl_estimator=estimator, kl_gradient="as_written") for estimator in ("k2", "k3")),
    dict(kl_estimator="k1", kl_in="reward"),
    dict(kl_estimator="k1", kl_in="reward", kl_gradient="as_written"),  # no gradient passes there
    dict(kl_estimator="k1", kl_in="reward", kl_adaptation_method="clip_sound"),
    *(dict(kl_adaptation_method=rule) for rule in starter.TERM_RULES),
    *(dict(kl_adaptation_method=rule) for rule in starter.COEFFICIENT_RULES),
])
def test_kl_term_that_works_is_not_refused(changes):
    assert starter.check_kl(main_settings(**changes)) == []


@pytest.mark.parametrize("kl_coef", [0.0, -0.1, math.inf, math.nan])
def test_kl_penalty_with_a_coefficient_that_penalises_nothing_is_refused(kl_coef):
    with pytest.raises(InputError, match=f"kl_coef = {kl_coef}.* use a number above 0, or"):
        starter.check_kl(main_settings(kl_coef=kl_coef))


def test_default_coefficient_is_called_unmeasured_on_other_models_only():
    assert starter.check_kl(main_settings(use_kl_penalty=False, kl_coef=0.01)) == []
    assert starter.check_kl(main_settings(model_id="tiny", kl_coef=0.01)) == []
    line, = starter.check_kl(main_settings(kl_coef=0.01))
    assert "conventional start, not measured on this model" in line


# --------------------------------------------------------------------------------------------------
# Checks of log-probs while training

def rows_with(old, rollout, **others):
    tensors = {"old_log_probs": old, "rollout_log_probs": rollout} | others
    return {name: torch.tensor([x]) for name, x in tensors.items()} | {
        "response_mask": torch.tensor([[True, True, False]])}


def check(rows, step, first_difference, bf16=False):
    return starter.check_log_probs([rows], step, first_difference, SimpleNamespace(bf16=bf16),
                                   starter.OneProcess())


def test_check_log_probs_returns_the_difference_over_response_tokens():
    rows = rows_with([-1.0, -2.0, 0.0], [-1.0, -2.0001, 9.0])
    found = check(rows, 5, None)
    assert found["sampler_logprob_diff"] == pytest.approx(5e-5, rel=0.01)
    assert found["sampler_logprob_diff_max"] == pytest.approx(1e-4, rel=0.01)


def test_check_log_probs_stops_the_run_of_a_stale_sampler():
    rows = rows_with([-1.0, -2.0, 0.0], [-1.0, -2.01, 0.0])
    with pytest.raises(RunStopped, match="step 5: sampler and trainer disagree by 0.005 .*stale"):
        check(rows, 5, None)
    check(rows, 5, None, bf16=True)  # bf16 rounds that much
    check(rows, 5, 0.01, bf16=True)
    with pytest.raises(RunStopped, match="disagree by 0.01 "):  # differences do not cancel
        check(rows_with([-1.0, -2.0, 0.0], [-1.01, -1.99, 0.0]), 5, None)
    rows = rows_with([-1.0, -2.0, 0.0], [-1.1, -2.1, 0.0])
    with pytest.raises(RunStopped, match="stale"):  # but it must not grow
        check(rows, 5, 0.01, bf16=True)
    rows = rows_with([math.nan, 0.0, 0.0], [0.0, 0.0, 0.0])
    with pytest.raises(RunStopped, match="disagree by nan"):
        check(rows, 5, 1e-6)


def test_check_log_probs_stops_a_run_whose_reference_is_not_the_policy_at_first():
    old = [-1.0, -2.0, 0.0]
    rows = rows_with(old, old, ref_log_probs=[-1.0, -2.001, 0.0])
    with pytest.raises(RunStopped, match="differs from its own copy by 0.001 nats before any"):
        check(rows, 1, None)
    check(rows, 2, 0.0)  # later it may
    check(rows_with(old, old, ref_log_probs=[-1.0, -2.0, 9.0]), 1, None)  # outside the mask
    with pytest.raises(RunStopped, match="differs from its own copy by nan"):
        check(rows_with(old, old, ref_log_probs=[-1.0, math.nan, 0.0]), 1, None)


# --------------------------------------------------------------------------------------------------
# Evaluation

def test_evaluation_matches_hand_computed_values(monkeypatch):
    """Four problems of the task, then three of two other skills, each with a response of its own
    length; a wrong answer in tags is worth 0.1 and solves nothing."""
    tokenizer = make_tokenizer()
    said = {"task 0": "<answer>5</answer>", "task 1": "<answer>6</answer>", "task 2": "no answer",
            "task 3": "<answer>5</answer>", "sort 1": "<answer>1</answer>",
            "sort 2": "<answer>9</answer>", "max 1": "<answer>1</answer>"}
    held_out = [{"prompt": f"task {i}", "answer": "5"} for i in range(4)]
    skills = [{"prompt": prompt, "answer": prompt[-1], "skill": prompt[:-2]}
              for prompt in ("sort 1", "max 1", "sort 2")]
    held_out, skills = (starter.with_prompt_ids(some, tokenizer) for some in (held_out, skills))
    asked = []

    def rollout(policy, llm, prompts, sampling, parts):
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts]
        asked.append((texts, sampling))
        replies = [next(said[name] for name in said if name in text) for text in texts]
        return [Response(ids, tokenizer(reply)["input_ids"], [0.0] * len(reply), True)
                for ids, reply in zip(prompts, replies)]

    monkeypatch.setattr(starter, "rollout", rollout)
    cfg = SimpleNamespace(seed=0, max_new_tokens=20, temperature=1.0, eval_temperature=0.25,
                          enable_thinking=False, reward=starter.reward_fn, bf16=False,
                          stop_token_ids=(EOS,))
    parts = starter.Parts(starter.PLAIN, starter.OneProcess(),
                          SimpleNamespace(reward_of=starter.reward_of))
    metrics, samples = starter.evaluate(None, None, tokenizer,
                                        starter.Problems([], held_out, skills), cfg, parts)
    lengths = [len(tokenizer(said[problem["prompt"]])["input_ids"]) for problem in held_out]
    assert metrics == pytest.approx({
        "solved": 2 / 4, "reward_mean": (1 + 0.1 + 0 + 1) / 4, "retention_max": 1.0,
        "retention_sort": 1 / 2, "response_length": sum(lengths) / 4})
    assert [(problem["prompt"], text) for problem, text, _ in samples] == [
        (f"task {i}", said[f"task {i}"]) for i in range(3)]
    assert [reward for *_, reward in samples] == pytest.approx([1.0, 0.1, 0.0])
    [(texts, sampling)] = asked
    assert len(texts) == 7 and sampling.temperature == 0.25 and sampling.group_size == 1


# --------------------------------------------------------------------------------------------------
# Whole runs

def train(checkpoint, folder, **changes):
    return starter.main(**settings(checkpoint, folder, **changes))


def of(result, tag):
    """The values of a metric, step after step."""
    return list(scalars(result["run_folder"])[tag].values())


def test_reference_does_not_move_while_the_policy_does(checkpoint, tmp_path):
    seen = {}
    real_train = starter.train

    def train_and_look(policy, tokenizer, llm, optimizer, problems, cfg, parts, ref_model, kl_coef):
        before = copy.deepcopy(ref_model.state_dict())
        real_train(policy, tokenizer, llm, optimizer, problems, cfg, parts, ref_model, kl_coef)
        after = ref_model.state_dict()
        assert not any(parameter.requires_grad for parameter in ref_model.parameters())
        seen["reference"] = [torch.equal(after[name], before[name]) for name in before]
        seen["policy"] = [torch.equal(p, before[name]) for name, p in policy.named_parameters()]

    with mock.patch.object(starter, "train", train_and_look):
        result = train(checkpoint, tmp_path, use_kl_penalty=True, kl_coef=0.1)
    assert all(seen["reference"]) and not any(seen["policy"])
    kl = of(result, "train/kl_penalty")
    assert kl[0] < 1e-6 < kl[-1] and result.get("kl_per_token", 1) > 0


def test_old_log_probs_are_those_of_the_first_epoch(checkpoint, tmp_path):
    """Three epochs over one rollout: in the first the ratio is 1, later ones compare with it."""
    calls = []
    real_step = starter.grpo_microbatch_step

    def step(policy, rows, *args):
        old_log_probs = rows.get("old_log_probs")
        loss, metadata, log_probs = real_step(policy, rows, *args)
        calls.append((old_log_probs, log_probs, metadata["ratio_mean"].item()))
        return loss, metadata, log_probs

    with mock.patch.object(starter, "grpo_microbatch_step", step):
        result = train(checkpoint, tmp_path, epochs_per_rollout=3, clip_range=0.01,
                       learning_rate=1e-2, n_train_steps=1, warmup_steps=0,
                       max_tokens_per_microbatch=100)
    n = len(calls) // 3
    assert n > 1 and len(calls) == 3 * n
    first_epoch = calls[:n]
    for old_log_probs, _, ratio_mean in first_epoch:
        assert old_log_probs is None and ratio_mean == 1
    for later_epoch in (calls[n:2 * n], calls[2 * n:]):
        for (old_log_probs, log_probs, _), (_, first, _) in zip(later_epoch, first_epoch):
            assert torch.equal(old_log_probs, first) and not torch.equal(log_probs, first)
    assert of(result, "train/clip_frac")[0] > 0


def test_coefficient_rule_moves_the_coefficient_of_the_next_step(checkpoint, tmp_path):
    used = []
    real_update = starter.Run.accumulate

    def update(*args):
        used.append(args[-1])
        return real_update(*args)

    with mock.patch.object(starter.Run, "accumulate", update):
        result = train(checkpoint, tmp_path, use_kl_penalty=True, kl_coef=0.1, n_train_steps=3,
                       kl_adaptation_method="dynamic", reward_threshold=0.0,
                       dynamic_beta_decay=0.5)
    assert used == pytest.approx([0.1, 0.05, 0.025])
    assert of(result, "adaptive_kl/current_beta") == pytest.approx([0.1, 0.05, 0.025])


def test_learning_rate_rises_during_the_warm_up_and_then_stays():
    def rates(warmup_steps):
        cfg = SimpleNamespace(learning_rate=2.0, warmup_steps=warmup_steps, n_train_steps=6)
        return [starter.learning_rate_at(step, cfg) for step in range(1, 7)]

    assert rates(4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0] and rates(0) == [2.0] * 6


def test_evaluation_is_of_the_step_that_it_names(checkpoint, tmp_path):
    """Before, every two steps, and after; each with the weights of its own step."""
    def metrics_of(n_train_steps):
        result = train(checkpoint, tmp_path, n_train_steps=n_train_steps, eval_every=2,
                       learning_rate=1e-2)
        return scalars(result["run_folder"])["eval/reward_mean"], result

    long, result = metrics_of(5)
    short, _ = metrics_of(2)
    assert list(long) == [0, 2, 4, 5] and list(short) == [0, 2]
    assert long[0] == short[0] == pytest.approx(result["before"]["reward_mean"])
    assert long[2] == short[2] != long[0]
    assert long[5] == pytest.approx(result["after"]["reward_mean"])


def test_logged_means_are_over_the_rows_that_learn(checkpoint, tmp_path):
    """Half of the groups have equal rewards and are left out. The mean of the ratio is still 1."""
    def equal_for_even_targets(text, problem):
        return variety(text, problem) if problem["target"] % 2 else 0.5

    result = train(checkpoint, tmp_path, reward=equal_for_even_targets)
    assert 0 < max(of(result, "train/frac_zero_std"))
    assert of(result, "train/ratio_mean") == pytest.approx([1.0] * 4)
