"""Tests of the algorithm in starter.py: values and gradients against independent oracles.

    pytest -m "not slow"     what to run while editing
    pytest                   everything; what needs vLLM or TRL is skipped where these are missing

The oracles are loops in float64, enumeration of all outcomes, and the model's own logits. The file
has the order of starter.py. Tests of everything else are in tests/.
"""
import copy
import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest

import starter  # before torch, for which it sets variables
from starter import InputError, KLSettings, Response, RunStopped, cfg_with

import torch
import conftest
from support import adaptive_rules  # noqa: F401  its rules are tested here, too
from conftest import (advantages_by_loops, make_responses, make_step, make_tokenizer, scalars,
                      settings, small_sums, variety)
from lab.small_models import make_model

CPU = torch.device("cpu")
FIND_SUPPORT = starter.find_support
checkpoint = conftest.checkpoint  # a fixture


# Fixtures and oracles

@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Every test begins with the file's own functions."""
    monkeypatch.setattr(starter, "MECHANICS", {})
    monkeypatch.setattr(starter, "find_support", lambda: None)


@pytest.fixture(params=["plain", "fast"])
def path(request, monkeypatch, alone):
    """A test that takes it holds for the plain functions and for those of support/. It is called
    with the models and returns the first; runs of main() need no call."""
    if request.param == "plain":
        return lambda *models: models[0]
    fast = pytest.importorskip("support.fast")
    monkeypatch.setattr(starter, "find_support", FIND_SUPPORT)
    monkeypatch.setattr("support.report.report", lambda *args: None)  # pictures take a second

    def use(*models):
        for model in models:
            starter.MECHANICS |= fast.mechanics_for(model)
        return models[0]

    return use


@pytest.fixture
def policy(checkpoint):
    return starter.init_policy(checkpoint, CPU)[0]


TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id
PROMPTS = [TOKENIZER(f"<|user|>{text}<|assistant|>")["input_ids"]
           for text in ("make 3: 1 2", "sort 54321", "a", "sort 90210")]


def make_models():
    """Returns a policy and a reference, all weights of which differ."""
    with torch.random.fork_rng(devices=[]):
        policy = make_model("qwen3 (tied)", largest_logit=3.0)
        ref_model = copy.deepcopy(policy).requires_grad_(False)
        for parameter in ref_model.parameters():
            parameter += 0.06 * torch.randn(parameter.shape)
    return policy, ref_model


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


def gradient_of(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


# The quick tests

QUICK_TESTS = {name: test for name, test in vars(starter).items()
               if name.startswith("test_") and name != "test_functions"}
globals().update(QUICK_TESTS)  # here they are strict


def test_quick_tests_print_one_line_each_and_go_on_after_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(starter, "gradient_of_a_step", lambda *args: torch.zeros(3))  # a second
    monkeypatch.setattr(starter, "test_below", lambda: None, raising=False)  # test_functions
    with mock.patch.object(starter, "compute_loss", side_effect=ValueError("two\n lines")):
        starter.test_functions()
    failed, *others = [name.removeprefix("test_").replace("_", " ") for name in QUICK_TESTS]
    source = Path(starter.__file__).read_text("utf-8").partition("ours = expected_kl_gradient(")
    line = source[0].count("\n") + 1
    assert capsys.readouterr().out.splitlines() == [
        "=== Running Quick Tests ===",
        f"FAILED: {failed} no longer holds (line {line}: ValueError: two lines)",
        *(f"ok: {title}" for title in [*others, "below"])]


# Rollout

def sample(policy, prompts=PROMPTS, group_size=4, temperature=1.0, seed=7, max_new_tokens=20,
           stop_token_ids=(EOS,)):
    cfg = cfg_with(max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids)
    return starter.rollout_with_transformers(policy, prompts, cfg, seed, group_size, temperature)


def ids_of(responses):
    return [response.response_ids for response in responses]


def test_greedy_samples_equal_generate(policy, path):
    ours = sample(path(policy), group_size=1, max_new_tokens=30, temperature=0)
    for prompt_ids, response in zip(PROMPTS, ours):
        ids = torch.tensor([prompt_ids])
        theirs = policy.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                 max_new_tokens=30, eos_token_id=EOS, pad_token_id=0)
        assert response.response_ids == theirs[0, len(prompt_ids):].tolist()


@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
def test_log_probs_of_samples_are_the_models_own(policy, path, temperature):
    responses = sample(path(policy), group_size=8, temperature=temperature)
    assert [r.prompt_ids for r in responses] == [ids for ids in PROMPTS for _ in range(8)]
    for response in responses:
        own = labels_of(whole_log_softmax(policy, response, temperature or 1), response)
        torch.testing.assert_close(torch.tensor(response.log_probs), own, rtol=0, atol=1e-4)


def test_responses_end_with_their_first_stop_token(policy, path):
    stop_token_ids = (EOS, 7, 20)
    responses = sample(path(policy), group_size=30, stop_token_ids=stop_token_ids)
    for response in responses:
        *before, last = response.response_ids
        assert not set(before) & set(stop_token_ids)
        assert response.finished == (last in stop_token_ids)
        assert response.finished or len(response.response_ids) == 20
        assert len(response.log_probs) == len(response.response_ids)
    assert {r.response_ids[-1] for r in responses if r.finished} == set(stop_token_ids)
    assert not all(response.finished for response in responses)


def test_samples_follow_the_policys_distribution(policy, path):
    """Chi-square of 4,000 first tokens, and of the second tokens, whose distribution is summed over
    all first ones, over the tokens that are expected five times or more."""
    prompt = torch.tensor(PROMPTS[2:3])
    every = torch.arange(len(TOKENIZER))[:, None]
    first = policy(prompt).logits[0, -1].softmax(dim=0)
    second = policy(torch.cat([prompt.expand(len(every), -1), every], dim=1)).logits[:, -1]
    second = torch.where(every[:, 0] != EOS, first, 0.0) @ second.softmax(dim=1)
    responses = ids_of(sample(path(policy), PROMPTS[2:3], group_size=4000, max_new_tokens=2))
    for place, probabilities in enumerate((first, second)):
        found = torch.tensor([ids[place] for ids in responses if len(ids) > place])
        counts = found.bincount(minlength=len(TOKENIZER))
        expected = 4000 * probabilities
        often = expected > 5
        chi_square = ((counts - expected)[often].square() / expected[often]).sum()
        assert often.sum() > 10
        assert chi_square < often.sum() + 5 * (2 * often.sum()).sqrt()


def test_response_does_not_depend_on_what_else_is_sampled(policy, path, monkeypatch):
    """Response j of prompt i draws with seed + i * group_size + j: alone, as one of many, or in
    parts, though two of the prompts have equal lengths."""
    together = sample(path(policy))
    alone = [response for i, prompt_ids in enumerate(PROMPTS)
             for response in sample(policy, [prompt_ids], seed=7 + 4 * i)]
    assert ids_of(together) == ids_of(alone)
    assert [r.prompt_ids for r in together] == [r.prompt_ids for r in alone]
    assert len(set(map(tuple, ids_of(together)))) > 8
    for tokens in (1, 200):  # 1: each response alone; 200: 5 to 9 responses
        monkeypatch.setattr(starter, "TOKENS_AT_ONCE", tokens)
        assert ids_of(sample(policy)) == ids_of(together)


def test_sampling_ignores_train_mode_checkpointing_and_the_generation_config(policy, path):
    """And leaves them, and the global generator, as they are."""
    before = sample(path(policy))
    own = policy.generation_config
    own.update(top_k=1, repetition_penalty=5.0, max_length=3, do_sample=True, num_beams=2)
    policy.train()
    policy.gradient_checkpointing_enable()
    generator = torch.get_rng_state()
    assert ids_of(sample(policy)) == ids_of(before)
    assert policy.training and policy.generation_config is own
    assert torch.equal(torch.get_rng_state(), generator)


def test_seeds_of_runs_steps_and_purposes_differ_and_seed_the_global_generators():
    """A CPU generator reads 32 bits of its seed, and each response adds its number to it."""
    purposes = [*range(1, 6), "evaluate"]
    seeds = {starter.seed_for(SimpleNamespace(seed=seed), purpose)
             for seed in (0, 1, 4096, 2**32) for purpose in purposes}
    assert len(seeds) == 4 * len(purposes)
    assert 0 <= min(seeds) and max(seeds) < 2**32
    assert min(abs(a - b) for a, b in itertools.combinations(seeds, 2)) > 2**12

    def drawn(purpose):  # by a reward that draws from the global generators
        starter.seed_for(SimpleNamespace(seed=0), purpose)
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    assert drawn(1) == drawn(1)
    assert not set(drawn(1)) & set(drawn(2))


@pytest.mark.parametrize("vocabulary", [1, 5, 257, 3001])
def test_draw_tokens_inverts_the_cumulative_distribution(vocabulary):
    """In float64; with both ends of the interval, and with tokens that have no probability."""
    logits = 3 * torch.randn(400, vocabulary, generator=torch.Generator().manual_seed(0))
    if vocabulary > 5:
        logits[:, ::7] = -math.inf
    uniform = torch.rand(400, 1, generator=torch.Generator().manual_seed(1))
    uniform[0] = 0.0
    uniform[1] = 1 - 2.0**-24  # the largest that torch.rand gives
    for temperature in (0, 0.5, 1.0):
        tokens, log_probs = starter.draw_tokens(logits, uniform, temperature)
        exact = (logits.double() / (temperature or 1)).log_softmax(dim=1)
        torch.testing.assert_close(log_probs.double(), exact.gather(1, tokens), rtol=0, atol=1e-5)
        if temperature == 0:
            assert torch.equal(tokens[:, 0], logits.argmax(dim=1))
            continue
        upper = exact.exp().cumsum(dim=1).gather(1, tokens)
        lower = upper - exact.exp().gather(1, tokens)
        assert ((lower - 1e-5 <= uniform) & (uniform <= upper + 1e-5)).all()
        assert (log_probs > -100).all()


# Advantages and loss, against loops in float64

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
    """The step's loss and its gradient by each policy log-prob and each exact KL, written out: a
    float, two lists of rows of floats.

    batch: rows of floats "policy", "old", "ref", "rollout", "exact", rows of bools "mask",
    "advantages". s: the settings. With the gradient "reverse" only the derivative is written here,
    since the value is what the estimator says.
    """
    lengths = [sum(row) for row in batch["mask"]]
    total = 0.0
    gradient = [[0.0] * len(row) for row in batch["mask"]]
    exact_gradient = copy.deepcopy(gradient)
    for b, row in enumerate(batch["mask"]):
        places = [t for t, on in enumerate(row) if on]

        def cut(d):
            return max(-THRESHOLD, min(THRESHOLD, d)) if s.rule == "clip_sound" else d

        def value_and_slope(log_prob, t, always_cut=False):
            d = log_prob - batch["ref"][b][t]
            d = cut(d) if s.gradient == "reverse" or always_cut else d
            exact = s.estimator == "exact"
            kl = batch["exact"][b][t] if exact else kl_by_hand(s.estimator, d)
            return rule_by_hand(s.rule, kl, lengths[b])

        for t in places:
            policy, old, ref = (batch[name][b][t] for name in ("policy", "old", "ref"))
            sampler = batch["rollout"][b][t]
            weight = {"grpo": 1 / lengths[b] / len(lengths), "dapo": 1 / sum(lengths),
                      "dr_grpo": 1 / (len(lengths) * MAX_NEW_TOKENS)}[s.average]

            # The PPO term
            advantage = batch["advantages"][b]
            if s.placement == "reward":  # with a published rule, it pays for the whole response
                paid_for = [u for u in places if u >= t or s.rule not in ("none", "clip_sound")]
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
            total += weight * s.kl_coef * kl
            d = policy - ref
            if s.estimator == "exact":
                exact_gradient[b][t] += weight * s.kl_coef * slope
            elif s.gradient == "reverse":
                gradient[b][t] += weight * s.kl_coef * slope * min(ratio, s.ratio_cap) * cut(d)
            else:
                own = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[s.estimator]
                gradient[b][t] += weight * s.kl_coef * slope * own
            if s.placement == "loss_to_go":
                later = sum(value_and_slope(batch["policy"][b][u], u)[0]
                            for u in places if u > t)
                gradient[b][t] += weight * s.kl_coef * min(ratio, s.ratio_cap) * later
    return total, gradient, exact_gradient


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
             "policy": noise(0.4), "old": noise(0.4), "ref": noise(1.0), "rollout": noise(0.4),
             "exact": [[x * x / 10 for x in row] for row in noise(1.0)]}
    return batch, rewards, group_size


def test_loss_and_its_gradient_match_loops():
    """Every estimator, gradient, placement and rule, four times, with random other settings."""
    rng = random.Random(0)
    forms = [form for form in itertools.product(
        ("k1", "k2", "k3", "exact"), ("reverse", "as_written"), ("loss", "loss_to_go", "reward"),
        ("none", *starter.TERM_RULES)) if not {"exact", "reward"} <= set(form)]
    for case, (estimator, gradient, placement, rule) in enumerate(4 * forms):
        s = SimpleNamespace(
            estimator=estimator, gradient=gradient, placement=placement, rule=rule,
            average=rng.choice(["grpo", "dapo", "dr_grpo"]), importance_cap=rng.choice([None, 1.5]),
            ratio_cap=rng.choice([1.2, math.inf]), clip_low=rng.choice([0.1, 0.2]),
            clip_high=rng.choice([0.2, 0.3]), kl_coef=rng.choice([0.0, 0.1, 1.0]))
        batch, rewards, group_size = random_loss_case(rng, case)
        by_std = rng.random() < 0.5
        batch["advantages"] = advantages_by_loops(rewards, group_size, 1e-6, by_std)
        value, *gradients = loss_by_loops(batch, s)

        mask = torch.tensor(batch["mask"])

        def tensor(name):  # nan where nothing may be read
            values = torch.tensor(batch[name], dtype=torch.float64)
            return values.masked_fill(~mask, math.nan)

        kl = KLSettings(
            kl_estimator=s.estimator, kl_gradient=s.gradient, kl_in=s.placement,
            kl_adaptation_method=s.rule, kl_clip_threshold=THRESHOLD, kl_target=TARGET,
            max_new_tokens=MAX_NEW_TOKENS, kl_ratio_cap=s.ratio_cap)
        policy = tensor("policy").requires_grad_()
        exact_kl = tensor("exact").masked_fill(~mask, 0.0).requires_grad_()
        advantages, _ = starter.compute_group_normalized_advantages(
            torch.tensor(rewards, dtype=torch.float64), group_size, 1e-6, by_std)
        advantages = advantages[:, None]
        if s.placement == "reward":
            advantages = starter.put_kl_into_advantages(
                advantages, tensor("rollout"), tensor("ref"), mask, s.kl_coef, kl)
        if s.importance_cap is not None:
            importance = (tensor("old") - tensor("rollout")).exp().clamp(max=s.importance_cap)
            advantages = advantages * importance
        loss, metadata = starter.compute_loss(
            advantages, policy, tensor("old"), (s.clip_low, s.clip_high), tensor("ref"),
            s.kl_coef, mask, kl, exact_kl)
        assert all(mean.isfinite() for mean in metadata.values())
        weights = starter.AVERAGES[s.average](mask.double(), MAX_NEW_TOKENS)
        assert not starter.AVERAGES[s.average](torch.zeros(2, 4), 6).any()  # and none is nan
        total = torch.where(mask, loss * weights, 0.0).sum()
        total.backward()
        assert total.item() == pytest.approx(value, rel=1e-9, abs=1e-10), s
        for leaf, by_hand in zip((policy, exact_kl), gradients):
            ours = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(ours, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-9,
                                       atol=1e-10, msg=lambda m: f"{s}: {m}")


def test_masked_mean_ignores_masked_entries():
    tensor = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, 7.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert starter.masked_mean(tensor, mask).item() == 3
    assert starter.masked_mean(tensor, mask, dim=1).tolist() == [1.5, 6.0]
    assert starter.masked_mean(tensor, torch.zeros_like(mask)).item() == 0
    one_per_row = torch.tensor([[4.0], [1.0]])  # such as the ratio of a whole response
    assert starter.masked_mean(one_per_row, mask).item() == 3


def test_metadata_of_the_loss_are_means_over_response_tokens():
    """A ratio counts as clipped only on the side where the clip cuts the gradient."""
    ratios = [[0.5, 0.9, 1.5, 1.4, 9.9], [1.5, 0.5, 1.1, 0.5, 9.9], [0.5, 1.5, 1.0, 1.0, 9.9]]
    policy = torch.tensor(ratios).log()
    mask = torch.tensor([[1, 1, 1, 1, 0]] * 3)
    old = torch.zeros(3, 5)
    advantages = torch.tensor([[0.5], [-0.5], [0.0]])

    def metadata_of(kl=KLSettings(), exact_kl=None):
        return starter.compute_loss(advantages, policy, old, (0.2, 0.45), 0.5 * policy, 0.1, mask,
                                    kl, exact_kl)[1]

    found = metadata_of()
    for side, n_clipped in (("_low", 2), ("_high", 1), ("", 3)):
        assert found[f"clip_frac{side}"] == pytest.approx(n_clipped / 12)
    assert found["ratio_mean"] == pytest.approx(11.9 / 12)
    of_tokens = [ratio for row in ratios for ratio in row[:4]]
    for estimator in ("k1", "k2", "k3"):
        mean = sum(x * kl_by_hand(estimator, 0.5 * math.log(x)) for x in of_tokens) / 12
        assert found[f"kl_{estimator}"] == pytest.approx(mean, rel=1e-5)
    assert found["kl_penalty_mean"] == found["kl_k3"] == found["kl_per_token"]
    exact_kl = torch.tensor([[1.0, 2, 3, 4, 99], [5, 6, 7, 8, 99], [3, 4, 5, 6, 99]])
    for changes, capped in (
            ({}, 0), (dict(kl_ratio_cap=1.2), 4 / 12), (dict(kl_estimator="exact"), 0),
            (dict(kl_in="loss_to_go", kl_ratio_cap=1.2), 4 / 12),
            (dict(kl_adaptation_method="clip_sound", kl_clip_threshold=0.3), 4 / 12),
            (dict(kl_estimator="exact", kl_ratio_cap=1.2), 4 / 12)):
        kl = KLSettings(**dict(kl_estimator="k1") | changes)
        found = metadata_of(kl, exact_kl)
        assert found["kl_capped_frac"] == pytest.approx(capped)
        assert found["kl_per_token"] == 4.5
        assert found["kl_penalty_mean"] == (4.5 if kl.kl_estimator == "exact" else found["kl_k1"])
        if kl.kl_adaptation_method == "none":
            assert found["adaptive_kl/adapted_kl"] == pytest.approx(found["kl_penalty_mean"])


# KL. Its gradients are enumerated in lab/verify_kl.py, which tests/test_lab.py runs.

@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_logged_kl_of_older_samples_is_that_of_the_present_policy(estimator):
    """Summed over a vocabulary that the old policy samples, without the cut of the ratio."""
    generator = torch.Generator().manual_seed(0)
    policy, ref, old = torch.randn(3, 1, 5, generator=generator).double().log_softmax(dim=2)
    kl = KLSettings(kl_estimator=estimator, kl_ratio_cap=math.inf)
    _, logged = starter.kl_penalty(policy, ref, old, torch.ones(1, 5, dtype=torch.bool), kl)
    expected = (policy.exp() * (policy - ref)).sum()
    for name in ("kl_penalty_mean", f"kl_{estimator}", "adaptive_kl/adapted_kl"):
        torch.testing.assert_close((old.exp() * logged[name]).sum(), expected)


def test_kl_estimates_are_in_float32_and_k3_is_never_negative():
    """Their values are compared in the loops above. Without a name the estimator is k1."""
    policy_log_probs = torch.tensor([[0.5, 0.25]]).log().bfloat16()
    ours = starter.compute_kl_divergence(policy_log_probs, policy_log_probs.flip(1))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, math.log(2) * torch.tensor([[1.0, -1]]), rtol=0, atol=0.01)
    d = torch.linspace(-1e-3, 1e-3, 2001)
    assert (starter.compute_kl_divergence(d, torch.zeros(()), "k3") >= 0).all()


def test_kl_of_distant_policies_is_finite_and_its_gradient_is_the_log_ratio():
    """The product r * k3 would give 0 and nan here."""
    policy = torch.tensor([[-20.0, -100.0, -30.0]], requires_grad=True)
    old = policy.detach() - math.log(0.7)
    loss, metadata = starter.compute_loss(torch.zeros(1, 1), policy, old, 0.2, torch.zeros(1, 3),
                                          1.0)
    loss.sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[-14.0, -70.0, -21.0]]))
    assert loss.isfinite().all()
    assert all(value.isfinite() for value in metadata.values())


def test_ratio_in_the_kl_gradient_is_cut_at_two_by_default():
    policy = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -1.0]]) - torch.tensor([1.5, 10.0]).log()
    mask = torch.ones(1, 2, dtype=torch.bool)
    kl, _ = starter.kl_penalty(policy, torch.tensor([[-2.0, -2.0]]), old, mask, cfg_with())
    kl.sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[1.5, 2.0]]))  # ratio * d, and d = 1


def test_value_of_the_kl_term_is_that_of_the_estimator_bit_for_bit():
    policy = torch.tensor([[-7.3, -9.1]], requires_grad=True)
    ref = policy.detach() - torch.tensor([1e-2, 1e-4])
    kl, _ = starter.kl_penalty(policy, ref, policy.detach(), ref < 0, cfg_with())
    assert torch.equal(kl, starter.compute_kl_divergence(policy, ref, "k3"))


def test_kl_estimator_exact_without_the_exact_kl_is_refused():
    with pytest.raises(InputError, match="of two log-probs. = 'exact' is not known"):
        starter.compute_loss(torch.zeros(1, 1), torch.zeros(1, 2), torch.zeros(1, 2), 0.2,
                             torch.zeros(1, 2), 0.1, kl_settings=KLSettings(kl_estimator="exact"))


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


def test_equal_rewards_give_zero_advantage():
    """Though the mean of equal floats may be off by a bit, which a tiny deviation would blow up."""
    means = set()
    for size in (3, 6, 7):
        for value in (0.1, 0.7, 1 / 3):
            rewards = torch.full((2 * size,), value)
            means.add((rewards[:size].mean() == rewards[0]).item())
            advantages, metadata = starter.compute_group_normalized_advantages(
                rewards, size, 1e-6, True)
            assert (advantages == 0).all() and metadata["frac_zero_std"] == 1
    assert means == {False, True}


def test_batch_is_shifted_once_and_masked_by_lengths():
    """The second response is a padding token, 0, which is a token like any other there."""
    responses = [Response([5, 6, 7], [8, 1], [-0.5, -0.25], True),
                 Response([5], [0], [-3.0], True),
                 Response([9, 1], [1], [-2.0], True),
                 Response([9, 1], [], [], False)]
    of_rows = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for advantages in (of_rows, of_rows[:, None]):
        batch = starter.make_batch(responses, advantages, "cpu")
        assert batch["advantages"].tolist() == [[1], [2], [3], [4]]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [5, 5, 5, 5], [9, 1, 9, 9], [9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[6, 7, 8, 1], [0, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert batch["response_mask"].int().tolist() == [
        [0, 0, 1, 1], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert batch["rollout_log_probs"].tolist() == [
        [0, 0, -0.5, -0.25], [-3, 0, 0, 0], [0, -2, 0, 0], [0, 0, 0, 0]]
    of_tokens = torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 9.0], [5.0, 6.0, 9.0], [7.0, 8.0, 9.0]])
    for width in (3, 2):
        batch = starter.make_batch(responses, of_tokens[:, :width], "cpu")
        assert torch.where(batch["response_mask"], batch["advantages"], 0.0).tolist() == [
            [0, 0, 1, 2], [3, 0, 0, 0], [0, 5, 0, 0], [0, 0, 0, 0]]


def test_microbatches_hold_every_row_once_within_the_budget():
    lengths = [40, 3, 17, 17, 1, 8, 30, 2, 25]
    responses = make_responses(lengths, prompt_lengths=(3, 2, 6))
    batch = make_step(responses)
    batch["row"] = torch.arange(9)[:, None].expand_as(batch["labels"])
    for budget in (1, 16, 50, 100, 10_000):
        microbatches = starter.cut_microbatches(batch, budget)
        found = []
        widths = []
        for rows in microbatches:
            indices = rows["row"][:, 0].tolist()
            width = rows["labels"].shape[1]
            found += indices
            widths.append(width)
            assert width == max(len(responses[i].prompt_ids) + lengths[i] - 1 for i in indices)
            assert len(indices) == 1 or len(indices) * width <= budget
            for name, tensor in rows.items():
                assert torch.equal(tensor, batch[name][indices, :width])
        assert sorted(found) == list(range(9))
        assert widths == sorted(widths, reverse=True)  # the largest first, for the memory
    assert len(microbatches) == 1


# Log-probs

def test_log_probs_are_of_all_labels_without_a_mask_and_0_with_an_empty_one(policy, path):
    """Several processes fill up with microbatches of an empty mask."""
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    inputs, labels = ids[:, :-1], ids[:, 1:]
    path(policy)
    for temperature in (0.7, 1.0):
        own = (policy(inputs).logits / temperature).log_softmax(dim=2)
        own = own.gather(2, labels[:, :, None])[:, :, 0]
        ours = starter.get_response_log_probs(policy, inputs, labels, temperature=temperature)
        torch.testing.assert_close(ours, own, rtol=0, atol=1e-5)
    rounded = starter.get_response_log_probs(policy, inputs, labels, bf16=True)
    assert 1e-4 < (rounded - own).abs().max() < 0.1
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    ours = starter.get_response_log_probs(policy, inputs, labels, nothing)
    assert torch.equal(ours, torch.zeros(2, 3))


def test_statistics_and_their_gradients_match_the_whole_softmax(path):
    """Log-probs, entropy, the reference's log-probs, both KLs over the vocabulary; and the gradient
    of those that have one through the whole model in float64."""
    policy, ref_model = (model.double() for model in make_models())
    ref_model.requires_grad_(True)  # as if the caller had forgotten to switch it off
    responses = make_responses((1, 12, 5, 3, 7, 2))
    batch = starter.make_batch(responses, torch.zeros(6), "cpu")
    mask = batch["response_mask"]
    ours = starter.token_statistics(path(policy, ref_model), batch, 0.8, ref_model=ref_model)
    assert all((values[~mask] == 0).all() for values in ours)
    ours = starter.TokenStatistics(*(values[mask] for values in ours))

    expected = []
    for response in responses:
        log_p = whole_log_softmax(policy, response, 0.8)
        log_q = whole_log_softmax(ref_model, response, 0.8)
        expected.append(torch.stack([
            labels_of(log_p, response), -(log_p.exp() * log_p).sum(dim=1),
            labels_of(log_q, response), (log_p.exp() * (log_p - log_q)).sum(dim=1),
            (log_q.exp() * (log_q - log_p)).sum(dim=1)]))
    expected = torch.cat(expected, dim=1)
    # The norms of the model are float32 inside.
    torch.testing.assert_close(torch.stack(list(ours)), expected, rtol=1e-6, atol=1e-6)
    upstream = torch.randn(5, mask.sum(), dtype=torch.float64,
                           generator=torch.Generator().manual_seed(0))
    parameters = list(policy.parameters())
    for i in (0, 1, 3, 4):
        mine = torch.autograd.grad((ours[i] * upstream[i]).sum(), parameters, retain_graph=True)
        theirs = torch.autograd.grad((expected[i] * upstream[i]).sum(), parameters,
                                     retain_graph=True)
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert not ours.ref_log_probs.requires_grad
    of_reference = torch.autograd.grad(ours.exact_kl.sum(), list(ref_model.parameters()),
                                       allow_unused=True)
    assert all(gradient is None for gradient in of_reference)


@pytest.mark.parametrize("forbidden_in_both", [False, True])
def test_forbidden_token_acts_like_a_vocabulary_without_it(forbidden_in_both):
    """A logit of -inf: log-probs, entropy, both KLs and their gradients are those of a softmax over
    the other tokens. If the reference still has the token, its other probabilities sum to less."""
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 6, 9, dtype=torch.float64, generator=generator)
    upstream = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    labels = torch.tensor([0, 1, 3, 8, 5, 4])  # 2 is forbidden
    others = [0, 1, 3, 4, 5, 6, 7, 8]
    leaf = logits.clone().requires_grad_()
    forbid = torch.zeros(9, dtype=torch.float64)
    forbid[2] = -math.inf
    ours = starter.statistics_of_logits(leaf + forbid, labels, 1.0,
                                        ref_logits + forbid if forbidden_in_both else ref_logits)
    log_p = leaf[:, others].log_softmax(dim=1)
    log_q = ref_logits.log_softmax(dim=1)[:, others]
    if forbidden_in_both:
        log_q = ref_logits[:, others].log_softmax(dim=1)
    at = torch.tensor([others.index(label) for label in labels])[:, None]
    expected = [log_p.gather(1, at)[:, 0], -(log_p.exp() * log_p).sum(dim=1),
                log_q.gather(1, at)[:, 0], (log_p.exp() * (log_p - log_q)).sum(dim=1),
                (log_q.exp() * (log_q - log_p)).sum(dim=1)]
    for found, by_hand in zip(ours, expected):
        torch.testing.assert_close(found, by_hand.detach())
    for i in (0, 1, 3, 4):
        mine, = torch.autograd.grad((ours[i] * upstream[i]).sum(), leaf, retain_graph=True)
        theirs, = torch.autograd.grad((expected[i] * upstream[i]).sum(), leaf, retain_graph=True)
        torch.testing.assert_close(mine, theirs)
    of_reference = starter.statistics_of_logits(leaf, labels, 1.0, ref_logits + forbid)
    assert of_reference.exact_kl.isinf().all() and of_reference.forward_kl.isfinite().all()


# Update

@pytest.mark.parametrize("temperature, estimator, placement, cap, checkpointing", [
    (1.0, "k3", "loss", 1.2, False), (0.7, "k3", "loss", None, True),
    (0.7, "k1", "reward", 1.2, False), (1.0, "exact_forward", "loss", 1.2, False)])
def test_gradient_of_a_step_matches_the_loss_written_out(path, temperature, estimator, placement,
                                                         cap, checkpointing):
    """The whole step in one expression: own logits of each row alone, PPO term with its clip and
    its importance weight, k3 with the gradient of reverse KL, k1 in the advantages or the exact
    forward KL, mean over all tokens."""
    policy, ref_model = (model.double() for model in make_models())
    responses = make_responses((1, 12, 5, 3, 7, 2))
    advantages = torch.linspace(-1, 1, 6)
    kl_coef = 0.3
    noise = random.Random(0)
    total = 0.0
    old_rows = []
    for response, advantage in zip(responses, advantages.tolist()):
        log_p, log_q = (whole_log_softmax(model, response, temperature)
                        for model in (policy, ref_model))
        log_probs = labels_of(log_p, response)
        ref_log_probs = labels_of(log_q, response).detach()
        rollout_log_probs = torch.tensor(response.log_probs)
        old = log_probs.detach() + torch.tensor([noise.gauss(0, 0.3) for _ in log_probs])
        importance = 1 if cap is None else (old - rollout_log_probs).exp().clamp(max=cap)
        if placement == "reward":
            to_go = (rollout_log_probs - ref_log_probs).flip(0).cumsum(0).flip(0)
            advantage = advantage - kl_coef * to_go
        ratio = (log_probs - old).exp()
        ppo = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * importance
        d = (log_probs - ref_log_probs).detach()
        kl = torch.exp(-d) - 1 + d
        sampler = old if cap is None else rollout_log_probs
        surrogate = (log_probs - sampler).exp().detach().clamp(max=2.0) * d * log_probs
        penalty = {"k3": kl + surrogate - surrogate.detach(), "k1": 0.0,
                   "exact_forward": (log_q.exp() * (log_q - log_p)).sum(dim=1)}[estimator]
        total = total + (ppo + kl_coef * penalty).sum() / 30
        old_rows.append(old)
    total.backward()
    expected = gradient_of(policy)
    policy.zero_grad()
    if checkpointing:
        policy.train().gradient_checkpointing_enable()

    batch = make_step(responses, "dapo")
    batch["old_log_probs"] = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    batch["old_log_probs"][batch["response_mask"]] = torch.cat(old_rows)
    cfg = cfg_with(temperature=temperature, importance_cap=cap, kl_estimator=estimator,
                   kl_in=placement)
    path(policy, ref_model)
    loss = sum(starter.grpo_microbatch_step(policy, rows, cfg, ref_model, kl_coef)[0]
               for rows in starter.cut_microbatches(batch, 40))
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(gradient_of(policy), expected, rtol=1e-4, atol=1e-6)


def two_epochs(path, batch, max_tokens, cfg, kl_coef):
    """Returns the number of microbatches, and of each epoch the means and the gradient. Between
    the epochs all weights move by 0.15 against the gradient."""
    policy, ref_model = make_models()
    path(policy, ref_model)
    microbatches = starter.cut_microbatches(dict(batch), max_tokens)
    found = []
    for epoch in range(2):
        means = starter.accumulate_gradients(policy, microbatches, cfg,
                                             ref_model if kl_coef else None, kl_coef)
        found.append((means, gradient_of(policy)))
        for parameter in policy.parameters():
            parameter.data -= 0.15 * parameter.grad / found[-1][1].norm()
        policy.zero_grad()
    return len(microbatches), found


@pytest.mark.parametrize("loss_average", ["grpo", "dapo", "dr_grpo"])
def test_gradient_and_logged_means_do_not_depend_on_the_cut(path, loss_average):
    """In 1 to 8 microbatches, over two epochs, with clip, KL term and importance weights active."""
    batch = make_step(make_responses((1, 9, 4, 6, 7, 2, 8, 3)), loss_average)
    cfg = cfg_with(importance_cap=1.2)
    n_whole, whole = two_epochs(path, batch, 10_000, cfg, 0.1)
    n_cut = set()
    for max_tokens in (70, 30, 1):
        n, cut = two_epochs(path, batch, max_tokens, cfg, 0.1)
        n_cut.add(n)
        for (means, gradient), (whole_means, whole_gradient) in zip(cut, whole):
            assert means == pytest.approx(whole_means, rel=1e-4, abs=1e-5)
            torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-5)
    policy, ref_model = make_models()  # the sum has the KL term as well
    starter.grpo_microbatch_step(path(policy, ref_model), dict(batch), cfg, ref_model, 0.1)
    torch.testing.assert_close(gradient_of(policy), whole[0][1], rtol=0, atol=1e-5)
    assert n_whole == 1 and max(n_cut) == 8 and len(n_cut) == 3
    assert whole[0][0]["ratio_mean"] == pytest.approx(1) and whole[1][0]["clip_frac"] > 0


def test_microbatch_without_a_slope_costs_no_backward_pass(path):
    """Its advantages are 0. Terms that do not need one bring the gradient back: a KL term, or terms
    of your own, in the loss or at the values that the model really has."""
    policy, ref_model = make_models()
    path(policy, ref_model)
    batch = make_step(make_responses((1, 9, 4)), advantages=torch.zeros(3))
    real = starter.compute_loss

    def has_gradient(ref_model=None, compute_loss=real):
        policy.zero_grad()
        with mock.patch.object(starter, "compute_loss", compute_loss):
            loss, metadata = starter.grpo_microbatch_step(policy, dict(batch), cfg_with(),
                                                          ref_model, 0.1)
        assert metadata["entropy"] > 0
        return any(p.grad is not None and p.grad.any() for p in policy.parameters())

    def hinge_at(threshold):
        def compute_loss(advantages, log_probs, *others, **named):
            loss, metadata = real(advantages, log_probs, *others, **named)
            return loss + (threshold - log_probs).relu(), metadata
        return compute_loss

    assert not has_gradient()
    assert has_gradient(ref_model)
    assert has_gradient(compute_loss=hinge_at(-3.0))
    assert not has_gradient(compute_loss=hinge_at(-30.0))


def test_gradient_in_bf16_is_off_by_its_rounding_only(policy, path):
    """Against float64: 1e-5 of the norm in float32, 5 % under bf16 autocast."""
    responses = [response for seed in range(3)
                 for response in sample(policy, group_size=8, seed=100 * seed)]
    batch = make_step(responses, advantages=torch.linspace(-1, 1, len(responses)).roll(7))
    gradients = {}
    for name, dtype, bf16 in (("exact", torch.float64, False), ("float32", torch.float32, False),
                              ("bf16", torch.float32, True)):
        model = path(copy.deepcopy(policy).to(dtype))
        starter.grpo_microbatch_step(model, dict(batch), cfg_with(bf16=bf16))
        gradients[name] = gradient_of(model).double()
    norm = gradients["exact"].norm()
    errors = {name: ((gradients[name] - gradients["exact"]).norm() / norm).item()
              for name in ("float32", "bf16")}
    assert errors["float32"] < 1e-5 and 1e-4 < errors["bf16"] < 0.05, errors


@pytest.mark.parametrize("estimator", ["k3", "exact_forward"])
def test_logged_entropy_and_kls_are_those_of_the_whole_softmax(estimator):
    policy, ref_model = make_models()
    responses = make_responses((1, 12, 5))
    cfg = cfg_with(kl_estimator=estimator)
    _, metadata = starter.grpo_microbatch_step(policy, make_step(responses), cfg, ref_model, 0.1)
    log_p, log_q = (torch.cat([whole_log_softmax(model, response) for response in responses])
                    for model in (policy, ref_model))
    for name, terms in (("entropy", -log_p.exp() * log_p),
                        ("kl_per_token", log_p.exp() * (log_p - log_q)),
                        ("kl_forward", log_q.exp() * (log_q - log_p))):
        by_hand = terms.sum(dim=1).mean().item()
        assert metadata[name].item() == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.parametrize("kl", [{}, dict(kl_estimator="exact", kl_in="loss_to_go"),
                                dict(kl_estimator="k1", kl_in="reward")])
def test_kl_coef_zero_is_plain_grpo_bit_for_bit(path, kl):
    gradients = []
    for with_reference in (False, True):
        policy, ref_model = make_models()
        path(policy, ref_model)
        batch = make_step(make_responses((1, 12, 5, 3, 7, 2)))
        loss, metadata = starter.grpo_microbatch_step(
            policy, batch, cfg_with(**kl), ref_model if with_reference else None, 0.0)
        gradients.append(torch.cat([loss[None], gradient_of(policy)]))
        assert ("kl_per_token" in metadata) == with_reference
    assert torch.equal(*gradients)


# Checks of log-probs while training

def check(step=5, diff=0.0, first_diff=None, kl_k2=0.0, **changes):
    cfg = cfg_with(**changes)
    starter.check_log_probs({"sampler_logprob_diff": diff, "kl_k2": kl_k2}, step, cfg, first_diff)


def test_check_log_probs_stops_the_run_of_a_stale_sampler():
    """The limit is 0.001 nats in float32, 0.02 in bf16, plus four times the first difference."""
    with pytest.raises(RunStopped, match="step 5: sampler and trainer disagree by 0.002 nats .*stal"
                                         "e or other weights .* set max_sampler_diff = None and see"
                                         " recipes/off_policy.patch"):
        check(diff=0.002)
    for limit, changes in (
            (0.001, {}), (0.005, dict(first_diff=1e-3)), (0.02, dict(bf16=True)),
            (0.22, dict(bf16=True, first_diff=0.05)), (0.01, dict(max_sampler_diff=0.01)),
            (0.01, dict(device="cuda")),  # for TF32
            (0.001, dict(step=1, engine="vllm")), (0.1, dict(step=1, engine="vllm", bf16=True))):
        check(diff=0.99 * limit, **changes)
        for diff in (1.01 * limit, math.nan):
            with pytest.raises(RunStopped, match="disagree"):
                check(diff=diff, **changes)
    check(diff=9.0, max_sampler_diff=None)


def test_check_log_probs_warns_in_the_first_step_where_no_weights_can_be_stale(capsys):
    check(step=1, diff=0.5)
    assert capsys.readouterr().out.startswith(
        "Warning: step 1: sampler and trainer disagree by 0.5 nats per token with equal weights: ")
    check(step=2, diff=1.9, first_diff=0.5)
    check(step=1, diff=0.5, max_sampler_diff=None)
    assert capsys.readouterr().out == ""
    with pytest.raises(RunStopped, match="disagree by 1 nats"):  # a batch that is shifted, say
        check(step=1, diff=1.0)


def test_check_log_probs_stops_a_run_whose_reference_is_not_the_policy_at_first():
    """kl_k2 is half the mean square of the log-ratio."""
    with pytest.raises(RunStopped, match="policy and reference differ by 0.001 nats before train"):
        check(step=1, kl_k2=0.001**2 / 2)
    check(step=1, kl_k2=0.00001**2 / 2)
    check(step=1, kl_k2=0.1**2 / 2, bf16=True)
    check(step=2, kl_k2=0.001**2 / 2, first_diff=0.0)  # later it may
    with pytest.raises(RunStopped, match="differ by nan"):
        check(step=1, kl_k2=math.nan)


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
    asked = []
    for problem in held_out + skills:
        problem["prompt_ids"] = tokenizer(problem["prompt"])["input_ids"]

    def rollout(policy, llm, prompts, cfg, purpose, group_size, temperature):
        texts = tokenizer.batch_decode(prompts)
        asked.append((texts, purpose, group_size, temperature))
        replies = [tokenizer(said[text])["input_ids"] for text in texts]
        return [Response(ids, reply, [0.0] * len(reply), True)
                for ids, reply in zip(prompts, replies)]

    monkeypatch.setattr(starter, "rollout", rollout)
    cfg = cfg_with(eval_temperature=0.25)
    metrics, samples = starter.evaluate(None, None, tokenizer,
                                        starter.Problems([], held_out, skills), cfg)
    lengths = [len(tokenizer(said[problem["prompt"]])["input_ids"]) for problem in held_out]
    assert metrics == pytest.approx({
        "solved": 2 / 4, "reward_mean": (1 + 0.1 + 0 + 1) / 4, "retention_max": 1.0,
        "retention_sort": 1 / 2, "response_length": sum(lengths) / 4})
    assert [(problem["prompt"], text) for problem, text, _ in samples] == [
        (f"task {i}", said[f"task {i}"]) for i in range(4)]
    assert [reward for *_, reward in samples] == pytest.approx([1.0, 0.1, 0.0, 1.0])
    assert asked == [([problem["prompt"] for problem in held_out + skills], "evaluate", 1, 0.25)]


def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(monkeypatch):
    tokenizer = make_tokenizer()
    right, wrong = ([*tokenizer(f"<answer>{i}</answer>")["input_ids"]] for i in (5, 6))
    n_right = (0, 1, 3, 5)  # of five samples to each problem
    held_out = [{"prompt": "add", "answer": "5", "prompt_ids": [i]} for i in range(4)]
    asked = []

    def rollout(policy, llm, prompts, cfg, purpose, group_size, temperature):
        asked.append((len(prompts), purpose, group_size, temperature))
        return [Response(ids, right if i < n_right[ids[0]] else wrong, [], True)
                for ids in prompts for i in range(group_size)]

    monkeypatch.setattr(starter, "rollout", rollout)
    cfg = cfg_with(eval_samples=5, temperature=0.7)
    metrics, _ = starter.evaluate(None, None, tokenizer, starter.Problems([], held_out, []), cfg)
    assert asked == [(4, "evaluate", 1, 0.0), (4, "pass@k", 5, 0.7)]
    found = {name: value for name, value in metrics.items() if name.startswith("pass_at_")}
    by_hand = {}
    for k in (1, 2, 4):
        choices = list(itertools.combinations(range(5), k))
        by_hand[f"pass_at_{k}"] = sum(
            min(chosen) < n for n in n_right for chosen in choices) / len(choices) / 4
    assert found == pytest.approx(by_hand)


# Whole runs

def train(checkpoint, folder, **changes):
    return starter.main(**settings(checkpoint, folder, **changes))


def of(result, tag):
    """The values of a metric, step after step."""
    return list(scalars(result["run_folder"])[tag].values())


def test_reference_does_not_move_while_the_policy_does(checkpoint, tmp_path, path):
    with mock.patch.object(starter, "train", side_effect=starter.train) as called:
        result = train(checkpoint, tmp_path, use_kl_penalty=True, kl_coef=0.1)
    policy, *_, ref_model, kl_coef, watch = called.call_args.args
    start, _ = starter.init_policy(checkpoint, CPU)
    for before, reference, now in zip(*(x.parameters() for x in (start, ref_model, policy))):
        assert not reference.requires_grad
        assert torch.equal(reference, before) and not torch.equal(now, before)
    kl = of(result, "train/kl_penalty")
    assert kl[0] < 1e-6 < kl[-1]


def test_ratio_compares_with_the_policy_that_sampled(checkpoint, tmp_path, path):
    """With one update the ratio is 1. With three its mean over the updates is not, and the clip
    acts."""
    for epochs in (1, 3):
        result = train(checkpoint, tmp_path, epochs_per_rollout=epochs, clip_range=0.01,
                       learning_rate=1e-2, n_train_steps=1, warmup_steps=0)
        assert of(result, "train/lr") == pytest.approx([1e-2])  # no warm-up
        assert (of(result, "train/ratio_mean")[0] == pytest.approx(1)) == (epochs == 1)
        assert (of(result, "train/clip_frac")[0] > 0) == (epochs == 3)


def test_coefficient_rule_moves_the_coefficient_of_the_next_update(checkpoint, tmp_path):
    """While the KL is far below its target, target_sound divides it by exp(0.1) each epoch."""
    update = starter.accumulate_gradients
    with mock.patch.object(starter, "accumulate_gradients", side_effect=update) as called:
        result = train(checkpoint, tmp_path, use_kl_penalty=True, kl_coef=0.1, n_train_steps=3,
                       epochs_per_rollout=2, kl_adaptation_method="target_sound", kl_target=1.0)
    by_hand = [0.1 * math.exp(-0.1 * i) for i in range(6)]
    assert [call.args[-1] for call in called.call_args_list] == pytest.approx(by_hand)
    assert of(result, "adaptive_kl/current_beta") == pytest.approx(by_hand[1::2])


def test_learning_rate_rises_during_the_warm_up_and_then_stays(checkpoint, tmp_path):
    result = train(checkpoint, tmp_path, n_train_steps=4, warmup_steps=2, learning_rate=2e-4)
    assert of(result, "train/lr") == pytest.approx([1e-4, 2e-4, 2e-4, 2e-4])


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_gradient_of_a_step_of_train_matches_one_written_out(checkpoint, tmp_path, path,
                                                             mask_truncated):
    """From the sampled responses and their texts to the gradient that is clipped: own rewards, own
    advantages, the mean of each response, the model's own logits. Some responses are cut."""
    responses = []
    gradients = []
    real_rollout = starter.rollout
    real_clip = torch.nn.utils.clip_grad_norm_

    def rollout(policy, llm, prompts, cfg, purpose, *others):
        found = real_rollout(policy, llm, prompts, cfg, purpose, *others)
        responses.extend(found if purpose == 1 else [])
        return found

    def clip(parameters, max_norm):
        parameters = list(parameters)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
        return real_clip(parameters, max_norm)

    with (mock.patch.object(starter, "rollout", rollout),
          mock.patch.object(torch.nn.utils, "clip_grad_norm_", clip)):
        result = train(checkpoint, tmp_path, n_train_steps=1, loss_average="grpo",
                       normalize_by_std=False, mask_truncated=mask_truncated, max_new_tokens=12)
    policy, tokenizer = starter.init_policy(checkpoint, CPU)
    rewards = [variety(tokenizer.decode(r.response_ids, skip_special_tokens=True), None)
               for r in responses]
    total = 0.0
    for response, advantage in zip(responses, advantages_by_loops(rewards, 4, 0.0, False)):
        if response.finished or not mask_truncated:
            log_probs = labels_of(whole_log_softmax(policy, response), response)
            total = total - advantage * log_probs.mean() / 16
    total.backward()
    expected = gradient_of(policy)
    assert {response.finished for response in responses} == {True, False}
    assert (gradients[0] - expected).norm() < 1e-4 * expected.norm()
    assert of(result, "train/grad_norm")[0] == pytest.approx(expected.norm().item(), rel=1e-4)


def test_groups_of_equal_rewards_cost_no_backward_pass_and_change_nothing(checkpoint, tmp_path,
                                                                          path):
    """Half of the groups have equal rewards; in the last step all have. A run that goes back
    through the model each time has the same curve, and AdamW does every step."""
    def reward(text, problem):
        of_last_step = problem["answer"] in last_answers
        return 0.5 if of_last_step or int(problem["answer"]) % 2 else variety(text, problem)

    last_answers = {problem["answer"] for problem in starter.problems_of_step(
        small_sums(None)[0], 3, 4, 0)}
    real = starter.have_slope
    logs = []
    for always in (False, True):
        answers = []

        def have_slope(slopes):
            answers.append(real(slopes))
            return always or answers[-1]

        with mock.patch.object(starter, "have_slope", have_slope):
            result = train(checkpoint, tmp_path, reward=reward)
        assert set(answers) == {False, True}
        saved, _ = starter.init_policy(result["run_folder"] / "model", CPU)
        logs.append([of(result, tag) for tag in ("train/loss", "train/grad_norm", "train/entropy")]
                    + [torch.cat([p.flatten() for p in saved.parameters()])])
    assert logs[0][1][-1] == 0
    for ours, always in zip(*logs):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(always), rtol=1e-5,
                                   atol=1e-7)


def test_each_group_of_parameters_keeps_its_own_learning_rate(checkpoint, tmp_path):
    real = torch.optim.AdamW

    def frozen_embeddings(parameters, lr, **others):
        first, *rest = parameters
        return real([{"params": [first], "lr": 0.0}, {"params": rest}], lr, **others)

    with mock.patch.object(torch.optim, "AdamW", frozen_embeddings):
        result = train(checkpoint, tmp_path, n_train_steps=2, save_every=1)
        resumed = train(checkpoint, tmp_path, n_train_steps=3, resume=str(result["run_folder"]))
    before, after = (starter.init_policy(folder, CPU)[0].state_dict()
                     for folder in (checkpoint, resumed["run_folder"] / "model"))
    moved = {name: not torch.equal(before[name], after[name]) for name in before}
    assert not moved.pop("model.embed_tokens.weight") and not moved.pop("lm_head.weight")
    assert all(moved.values())
