"""Tests of the algorithm in starter.py: values and gradients against independent oracles.

    pytest -m "not slow"     what to run while editing
    pytest                   everything; what needs vLLM or TRL is skipped where these are missing

The oracles are loops in float64, enumeration of all outcomes, and the model's own logits. The file
has the order of starter.py. Tests of everything else are in tests/.
"""

import copy
import functools
import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import starter  # before torch, for which it sets variables
from starter import InputError, KLSettings, Response, RunStopped

import torch
from torch.nn.utils import parameters_to_vector
import conftest
from support import edits, fast
from conftest import (
    advantages_by_loops,
    make_responses,
    make_step,
    make_tokenizer,
    often_equal,
    scalars,
    settings,
    small_sums,
    variety,
)
from forked import (
    REPOSITORY,
    edited_text,
    import_copy,
    import_once,
    in_new_process,
    run_all,
    write_copy,
)
from lab.small_models import make_model

CPU = torch.device("cpu")
FIND_SUPPORT = starter.find_support
cfg_with = functools.partial(
    starter.cfg_with, device=CPU, precision="float32", engine="transformers"
)
checkpoint = conftest.checkpoint  # a fixture


# Fixtures and oracles


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Every test begins with the file's own functions."""
    edits.restore()
    monkeypatch.setattr(starter, "find_support", lambda: None)
    yield
    edits.restore()


@pytest.fixture(params=["plain", "fast"])
def path(request, monkeypatch, alone):
    """A test that takes it holds for the plain functions and for those of support/. It is called
    with the models and returns the first; runs of main() need no call."""
    if request.param == "plain":
        return lambda *models: models[0]
    monkeypatch.setattr(starter, "find_support", FIND_SUPPORT)
    monkeypatch.setattr("support.report.report", lambda *args: None)  # pictures take a second

    def use(*models):
        for model in models:
            fast.attend_on_cpu(model)
        edits.replace(**fast.FUNCTIONS)
        return models[0]

    return use


@pytest.fixture
def policy(checkpoint):
    return starter.init_policy(checkpoint, CPU)[0]


TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id
PROMPTS = [
    TOKENIZER(f"<|user|>{text}<|assistant|>")["input_ids"]
    for text in ("make 3: 1 2", "sort 54321", "a", "sort 90210")
]


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
    logits = model(input_ids=ids, use_cache=False).logits[0, len(response.prompt_ids) - 1 : -1]
    model.set_attn_implementation(before)
    return (logits / temperature).log_softmax(dim=1)


def labels_of(log_probs, response):
    """(T, V) -> (T,)"""
    return log_probs[range(len(response.response_ids)), response.response_ids]


def gradient_of(model):
    return parameters_to_vector(parameter.grad for parameter in model.parameters())


# The quick tests


def test_quick_tests_hold():
    """Here they are strict: an exception is a failure."""
    starter.test_kl_gradient()
    starter.test_step()


def test_quick_tests_say_what_a_failure_means_and_go_on(capsys):
    with mock.patch.object(starter, "kl_penalty", side_effect=ValueError("no")):
        starter.test_functions()
    assert capsys.readouterr().out.splitlines() == [
        "=== Running Quick Tests ===",
        f"FAILED: test_kl_gradient. {starter.test_kl_gradient.__doc__} It may be what you want. "
        "ValueError('no')",
        "ok: test_step",
    ]


LOSS_OF_ROWS = 'loss = torch.where(mask, loss * rows["weights"], 0.0).sum()'
SCALED = "    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))\n"
FORBIDDEN = "    logits = logits.index_fill(1, torch.tensor([{}]), -math.inf)\n"
CHANGES = {  # name: a text of starter.py, what stands in its place, the quick test that then fails
    "sign of the loss": ("loss = -torch.minimum(", "loss = torch.minimum(", "test_step"),
    "labels not shifted": ('"labels": ids[:, 1:]', '"labels": ids[:, :-1]', "test_step"),
    "mask too early": ("mask[:, 1:],", "mask[:, :-1],", "test_step"),
    "mask too late": ("columns >= starts", "columns > starts", "test_step"),
    "KL swapped": ("d = policy_log_probs - ref", "d = -policy_log_probs + ref", "test_kl_gradient"),
    "exact KL swapped": ("(log_p.exp() * diff", "(-ref_log_p.exp() * diff", "test_kl_gradient"),
    "sign of the advantage": ("advantages = groups -", "advantages = -groups +", "test_step"),
    "mean of a microbatch": (LOSS_OF_ROWS, "loss = masked_mean(loss, mask)", "test_step"),
    "nothing": (LOSS_OF_ROWS, LOSS_OF_ROWS, None),
    "token 33 forbidden": (SCALED, SCALED + FORBIDDEN.format(33), None),
    "token 151,000 forbidden": (SCALED, SCALED + FORBIDDEN.format(151_000), None),
    "entropy bonus": (LOSS_OF_ROWS, "loss = loss - 0.01 * stats['entropy']; " + LOSS_OF_ROWS, None),
}


def quick_tests_of_changed_files(folder):
    import_once()
    copies = []
    for i, (old, new, _) in enumerate(CHANGES.values()):
        copies.append(write_copy(Path(folder) / str(i), edited_text({old: new}), False))
    return run_all([lambda copy=copy: import_copy(copy).test_functions() for copy in copies])


def test_quick_tests_find_mistakes_and_let_edits_pass(tmp_path):
    outcomes = in_new_process(
        "test_starter", "quick_tests_of_changed_files", tmp_path, REPOSITORY, str(tmp_path)
    )
    for (name, (*_, failing)), outcome in zip(CHANGES.items(), outcomes, strict=True):
        for test in ("test_kl_gradient", "test_step"):
            start = f"FAILED: {test}. " if test == failing else f"ok: {test}\n"
            assert start in outcome["stdout"], f"{name}: {outcome}"


# Rollout


def sample(
    policy,
    prompts=PROMPTS,
    group_size=4,
    temperature=1.0,
    seed=7,
    max_new_tokens=20,
    stop_token_ids=(EOS,),
):
    cfg = cfg_with(max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids)
    return starter.rollout_with_transformers(policy, prompts, cfg, seed, group_size, temperature)


def ids_of(responses):
    return [response.response_ids for response in responses]


def test_greedy_samples_equal_generate(policy, path):
    ours = sample(path(policy), group_size=1, max_new_tokens=30, temperature=0)
    for prompt_ids, response in zip(PROMPTS, ours):
        ids = torch.tensor([prompt_ids])
        theirs = policy.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=30,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        assert response.response_ids == theirs[0, len(prompt_ids) :].tolist()


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
    """Chi-square of 4,000 first tokens, over those that are expected five times or more."""
    responses = sample(path(policy), PROMPTS[2:3], group_size=4000, max_new_tokens=1)
    counts = torch.tensor(ids_of(responses)).flatten().bincount(minlength=len(TOKENIZER))
    expected = 4000 * policy(torch.tensor(PROMPTS[2:3])).logits[0, -1].softmax(dim=0)
    often = expected > 5
    chi_square = ((counts - expected)[often].square() / expected[often]).sum()
    assert often.sum() > 10
    assert chi_square < often.sum() + 5 * (2 * often.sum()).sqrt()


def test_response_does_not_depend_on_what_else_is_sampled(policy, path):
    """Response j of prompt i draws with seed + i * group_size + j: alone, or as one of
    many, though two of the prompts have equal lengths."""
    together = sample(path(policy))
    alone = [
        response
        for i, prompt_ids in enumerate(PROMPTS)
        for response in sample(policy, [prompt_ids], seed=7 + 4 * i)
    ]
    assert ids_of(together) == ids_of(alone)
    assert [r.prompt_ids for r in together] == [r.prompt_ids for r in alone]
    assert len(set(map(tuple, ids_of(together)))) > 8


def test_sampling_ignores_train_mode_checkpointing_and_the_generation_config(policy, path):
    """And leaves the configuration and the global generator as they are."""
    before = sample(path(policy))
    own = policy.generation_config
    own.update(top_k=1, repetition_penalty=5.0, max_length=3, do_sample=True, num_beams=2)
    policy.train()
    policy.gradient_checkpointing_enable()
    generator = torch.get_rng_state()
    assert ids_of(sample(policy)) == ids_of(before)
    assert policy.generation_config is own
    assert torch.equal(torch.get_rng_state(), generator)


def test_seeds_of_runs_steps_and_purposes_differ_and_seed_the_global_generators():
    """A CPU generator reads 32 bits of its seed, and each response adds its number to it."""
    purposes = [*range(1, 6), "evaluate"]
    seeds = {
        starter.seed_for(SimpleNamespace(seed=seed), purpose)
        for seed in (0, 1, 4096, 2**32)
        for purpose in purposes
    }
    assert len(seeds) == 4 * len(purposes)
    assert max(seeds) < 2**32
    assert min(abs(a - b) for a, b in itertools.combinations(seeds, 2)) > 2**12

    def drawn(purpose):  # by a reward of yours
        starter.seed_for(SimpleNamespace(seed=0), purpose)
        return random.random(), torch.rand(()).item()

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


def rule_by_hand(rule, kl, d, length):
    """Returns the value of a term rule at this KL and log-ratio, and its slope by the KL."""
    if rule == "clip":
        return min(kl, THRESHOLD), float(kl < THRESHOLD)
    if rule == "clip_sound":  # the gradient of d, cut to the threshold
        factor = min(1.0, THRESHOLD / abs(d))
        return factor * kl, factor
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
    assert rule == "none"
    return kl, 1.0


def kl_by_hand(estimator, d, exact=None):
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "exact": exact}[estimator]


def loss_by_loops(batch, cfg):
    """The step's loss and its gradient by each policy log-prob and each exact KL, written out: a
    float, two lists of rows of floats.

    batch: rows of floats "policy", "old", "ref", "sampler", "exact", rows of bools "mask",
    "advantages". With the gradient "reverse" only the derivative is written here, since the value
    is what the estimator says.
    """
    lengths = [sum(row) for row in batch["mask"]]
    total = 0.0
    gradient = [[0.0] * len(row) for row in batch["mask"]]
    exact_gradient = copy.deepcopy(gradient)
    for b, row in enumerate(batch["mask"]):
        places = [t for t, on in enumerate(row) if on]

        def value_and_slope(log_probs, t):
            d = log_probs[b][t] - batch["ref"][b][t]
            kl = kl_by_hand(cfg.kl_estimator, d, batch["exact"][b][t])
            return rule_by_hand(cfg.kl_adaptation_method, kl, d, lengths[b])

        for t in places:
            policy, old, ref = (batch[name][b][t] for name in ("policy", "old", "ref"))
            sampler = batch["sampler"][b][t]
            weight = {
                "grpo": 1 / lengths[b] / len(lengths),
                "dapo": 1 / sum(lengths),
                "dr_grpo": 1 / (len(lengths) * MAX_NEW_TOKENS),
            }[cfg.loss_average]

            # The PPO term
            advantage = batch["advantages"][b]
            if cfg.kl_in == "reward":  # with a rule each token pays for the whole response
                paid_for = [u for u in places if u >= t or cfg.kl_adaptation_method != "none"]
                kls = [value_and_slope(batch["sampler"], u)[0] for u in paid_for]
                advantage -= cfg.kl_coef * sum(kls)
            advantage *= min(math.exp(old - sampler), cfg.importance_cap)
            ratio = math.exp(policy - old)
            low, high = cfg.clip_range
            used = min(ratio, 1 + high) if advantage > 0 else max(ratio, 1 - low)
            total -= weight * advantage * used
            if used == ratio:
                gradient[b][t] -= weight * advantage * ratio

            # The KL term
            if cfg.kl_in == "reward":
                continue
            kl, slope = value_and_slope(batch["policy"], t)
            total += weight * cfg.kl_coef * kl
            d = policy - ref
            drawn = min(math.exp(policy - sampler), cfg.kl_ratio_cap)
            if cfg.kl_estimator == "exact":
                exact_gradient[b][t] += weight * cfg.kl_coef * slope
            elif cfg.kl_gradient == "reverse":
                gradient[b][t] += weight * cfg.kl_coef * slope * drawn * d
            else:
                own = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[cfg.kl_estimator]
                gradient[b][t] += weight * cfg.kl_coef * slope * own
            if cfg.kl_in == "loss_to_go":
                later = sum(value_and_slope(batch["policy"], u)[0] for u in places if u > t)
                gradient[b][t] += weight * cfg.kl_coef * drawn * later
    return total, gradient, exact_gradient


def random_loss_case(rng, case):
    """A small batch, rows of floats, for loss_by_loops."""
    group_size = rng.randint(2, 4)
    n_rows = rng.randint(1, 3) * group_size
    width = rng.randint(1, 6)
    mask = []
    for row in range(n_rows):
        length = rng.randint(0 if row > 0 and case % 5 == 0 else 1, width)
        start = rng.randint(0, width - length)
        mask.append([start <= t < start + length for t in range(width)])

    def noise(scale):
        return [[rng.gauss(-2, scale) for _ in range(width)] for _ in range(n_rows)]

    rewards = [rng.choice([0.0, 0.1, 1.0]) for _ in range(n_rows)]
    batch = {
        "mask": mask,
        "policy": noise(0.4),
        "old": noise(0.4),
        "ref": noise(1.0),
        "sampler": noise(0.4),
        "exact": [[x * x / 10 for x in row] for row in noise(1.0)],
    }
    return batch, rewards, group_size


def test_loss_and_its_gradient_match_loops():
    """Every estimator, gradient, placement and rule, four times, with random other settings."""
    rng = random.Random(0)
    forms = itertools.product(
        ("k1", "k2", "k3", "exact"),
        ("reverse", "as_written"),
        ("loss", "loss_to_go", "reward"),
        ("none", *starter.TERM_RULES),
    )
    forms = [form for form in forms if not {"exact", "reward"} <= set(form)]
    for case, (estimator, gradient, kl_in, rule) in enumerate(4 * forms):
        cfg = cfg_with(
            kl_estimator=estimator,
            kl_gradient=gradient,
            kl_in=kl_in,
            kl_adaptation_method=rule,
            kl_clip_threshold=THRESHOLD,
            kl_target=TARGET,
            kl_ratio_cap=rng.choice([1.2, math.inf]),
            kl_coef=rng.choice([0.0, 0.1, 1.0]),
            max_new_tokens=MAX_NEW_TOKENS,
            loss_average=rng.choice(["grpo", "dapo", "dr_grpo"]),
            importance_cap=rng.choice([math.inf, 1.5]),
            clip_range=rng.choice([(0.1, 0.2), (0.2, 0.3)]),
        )
        batch, rewards, group_size = random_loss_case(rng, case)
        knows_sampler = rng.random() < 0.7
        if not knows_sampler:
            batch["sampler"] = batch["old"]
        by_std = rng.random() < 0.5
        batch["advantages"] = advantages_by_loops(rewards, group_size, 1e-6, by_std)
        value, *gradients = loss_by_loops(batch, cfg)

        mask = torch.tensor(batch["mask"])

        def tensor(name):  # nan where nothing may be read
            values = torch.tensor(batch[name], dtype=torch.float64)
            return values.masked_fill(~mask, math.nan)

        policy = tensor("policy").requires_grad_()
        exact_kl = tensor("exact").masked_fill(~mask, 0.0).requires_grad_()
        advantages, _ = starter.compute_group_normalized_advantages(
            torch.tensor(rewards, dtype=torch.float64), group_size, 1e-6, by_std
        )
        loss, metadata = starter.compute_loss(
            advantages[:, None],
            policy,
            tensor("old"),
            cfg.clip_range,
            tensor("ref"),
            cfg.kl_coef,
            mask,
            cfg,
            exact_kl,
            tensor("sampler") if knows_sampler else None,
            cfg.importance_cap,
        )
        assert all(mean.isfinite() for mean in metadata.values())
        weights = starter.AVERAGES[cfg.loss_average](mask.double(), MAX_NEW_TOKENS)
        assert not starter.AVERAGES[cfg.loss_average](torch.zeros(2, 4), 6).any()
        total = torch.where(mask, loss * weights, 0.0).sum()
        total.backward()
        # torch's softplus is linear where its slope differs from 1 by less than 2e-9.
        assert total.item() == pytest.approx(value, rel=1e-8, abs=1e-10), cfg
        for leaf, by_hand in zip((policy, exact_kl), gradients):
            ours = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            by_hand = torch.tensor(by_hand, dtype=torch.float64)
            torch.testing.assert_close(
                ours, by_hand, rtol=1e-8, atol=1e-10, msg=lambda m: f"{cfg}: {m}"
            )


def test_masked_mean_ignores_masked_entries():
    tensor = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, 7.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert starter.masked_mean(tensor, mask).item() == 3
    assert starter.masked_mean(tensor, mask, dim=1).tolist() == [1.5, 6.0]
    assert starter.masked_mean(tensor, 0 * mask).item() == 0


def test_metadata_of_the_loss_are_means_over_response_tokens():
    """A ratio counts as clipped only on the side where the clip cuts the gradient. A sampled KL
    counts for as many tokens as the policy would have drawn."""
    ratios = torch.tensor([[0.5, 0.9, 1.5, 1.4], [1.5, 0.5, 1.1, 0.5], [0.5, 1.5, 1.0, 1.0]])
    policy = torch.nn.functional.pad(ratios, (0, 1), value=9.9).log()  # a masked column
    mask = torch.tensor([[1, 1, 1, 1, 0]] * 3)
    advantages = torch.tensor([[0.5], [-0.5], [0.0]])
    exact_kl = torch.arange(15.0).reshape(3, 5)
    d = 0.5 * ratios.log()
    for name, kl_in, cap, n_capped in (
        ("k1", "loss", 2.0, 0),
        ("k2", "loss", 1.2, 4),
        ("k3", "loss_to_go", 1.2, 4),
        ("exact", "loss", 1.2, 4),
    ):
        kl = KLSettings(kl_estimator=name, kl_in=kl_in, kl_ratio_cap=cap)
        _, means = starter.compute_loss(
            advantages, policy, 0 * policy, (0.2, 0.45), 0.5 * policy, 0.1, mask, kl, exact_kl
        )
        weight = ratios.clamp(max=cap)
        by_hand = {"k1": weight * d, "k2": weight * d**2 / 2, "k3": weight * ((-d).exp() - 1 + d)}
        expected = {f"kl_{estimator}": by_hand[estimator].mean() for estimator in by_hand}
        by_hand["exact"] = exact_kl[:, :4]
        expected["kl_penalty_mean"] = expected["adaptive_kl/adapted_kl"] = by_hand[name].mean()
        expected["kl_capped_frac"] = torch.tensor(n_capped / 12)
        expected["ratio_mean"] = ratios.mean()
        expected["clip_frac"] = torch.tensor(3 / 12)
        torch.testing.assert_close(means, expected)


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


def test_default_estimator_is_k1_and_k3_is_never_negative():
    """Their values are compared in the loops above."""
    d = torch.linspace(-1e-3, 1e-3, 2001)
    zero = torch.zeros(())
    assert torch.equal(starter.compute_kl_divergence(d, zero), d)
    assert (starter.compute_kl_divergence(d, zero, "k3") >= 0).all()


def test_kl_of_distant_policies_is_finite_and_its_gradient_is_the_log_ratio():
    """The product r * k3 would give 0 and nan here."""
    policy = torch.tensor([[-20.0, -100.0, -30.0]], requires_grad=True)
    old = policy.detach() - math.log(0.7)
    loss, metadata = starter.compute_loss(
        torch.zeros(1, 1), policy, old, 0.2, torch.zeros(1, 3), 1.0
    )
    loss.sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[-14.0, -70.0, -21.0]]))
    assert loss.isfinite().all()
    assert all(value.isfinite() for value in metadata.values())


# Microbatches


def test_advantages_and_their_statistics_match_hand_computed_values():
    rewards = torch.tensor([0.0, 1.0, 2.0, 5.0, 5.0, 5.0, 1.0, 1.0, 1.0])
    for normalize_by_std, divisor in ((True, 1.5), (False, 1.0)):
        advantages, metadata = starter.compute_group_normalized_advantages(
            rewards, 3, 0.5, normalize_by_std
        )
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
                rewards, size, 1e-6, True
            )
            assert (advantages == 0).all() and metadata["frac_zero_std"] == 1
    assert means == {False, True}


def test_batch_is_shifted_once_and_masked_by_lengths():
    """The second response is a padding token, 0, which is a token like any other there."""
    responses = [
        Response([5, 6, 7], [8, 1], [-0.5, -0.25], True),
        Response([5], [0], [-3.0], True),
        Response([9, 1], [], [], False),
    ]
    batch = starter.make_batch(responses, torch.tensor([1.0, 2.0, 3.0]), "cpu")
    expected = {
        "input_ids": [[5, 6, 7, 8], [5, 0, 5, 5], [9, 1, 9, 9]],
        "labels": [[6, 7, 8, 1], [0, 0, 0, 0], [1, 0, 0, 0]],
        "response_mask": [[0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]],
        "rollout_log_probs": [[0, 0, -0.5, -0.25], [-3, 0, 0, 0], [0, 0, 0, 0]],
        "advantages": [[0, 0, 1, 1], [2, 0, 0, 0], [0, 0, 0, 0]],
        "finished": [[1], [1], [0]],
    }
    assert {name: tensor.tolist() for name, tensor in batch.items()} == expected
    of_tokens = torch.tensor([[1.0, 2.0], [3.0, 9.0], [9.0, 9.0]])
    batch = starter.make_batch(responses, of_tokens, "cpu")
    assert batch["advantages"].tolist() == [[0, 0, 1, 2], [3, 0, 0, 0], [0, 0, 0, 0]]


def test_advantages_of_tokens_need_a_column_for_each_token_of_the_longest_response():
    """Those that are aligned to labels, or cut, would train other tokens than meant."""
    responses = make_responses((3, 5))
    width_of_labels = starter.make_batch(responses, torch.zeros(2), "cpu")["labels"].shape[1]
    for width in (1, 4, 6, width_of_labels):
        with pytest.raises(IndexError, match=f"mask .2, 5. .* does not match .* .2, {width}."):
            starter.make_batch(responses, torch.ones(2, width), "cpu")


def test_microbatches_hold_every_row_once_within_the_budget():
    """The widest comes first, for the memory."""
    lengths = [40, 3, 17, 17, 1, 8, 30, 2, 25]
    responses = make_responses(lengths, prompt_lengths=(3, 2, 6))
    batch = make_step(responses)
    batch["row"] = torch.arange(9)[:, None].expand_as(batch["labels"])
    for budget, n_microbatches in ((1, 9), (100, 3), (10_000, 1)):
        found = []
        widths = []
        for rows in starter.cut_microbatches(batch, budget):
            indices = rows["row"][:, 0].tolist()
            width = rows["labels"].shape[1]
            found += indices
            widths.append(width)
            assert width == max(len(responses[i].prompt_ids) + lengths[i] - 1 for i in indices)
            assert len(indices) == 1 or len(indices) * width <= budget
            for name, tensor in rows.items():
                assert torch.equal(tensor, batch[name][indices, :width])
        assert sorted(found) == list(range(9))
        assert widths == sorted(widths, reverse=True) and len(widths) == n_microbatches


# Log-probs


def test_log_probs_are_of_all_labels_in_the_mask(policy, path):
    """An empty one gives 0: several processes fill up with such microbatches."""
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    inputs, labels = ids[:, :-1], ids[:, 1:]
    path(policy)

    own = (policy(inputs).logits / 0.7).log_softmax(dim=2).gather(2, labels[:, :, None])[:, :, 0]
    for mask in (torch.ones(2, 3), torch.zeros(2, 3)):
        ours = starter.get_response_log_probs(policy, inputs, labels, mask, 0.7)
        torch.testing.assert_close(ours, mask * own, rtol=0, atol=1e-5)


def statistics_by_hand(log_p, log_q, labels):
    """(N, V) log-probs of policy and reference -> what statistics_of_logits shall return."""
    return {
        "log_probs": log_p.gather(1, labels[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(dim=1),
        "ref_log_probs": log_q.gather(1, labels[:, None])[:, 0],
        "kl_per_token": (log_p.exp() * (log_p - log_q)).sum(dim=1),
        "kl_forward": (log_q.exp() * (log_q - log_p)).sum(dim=1),
    }


def assert_same_statistics(ours, expected, parameters):
    """Values, and gradients by the parameters of those that have one."""
    assert ours.keys() == expected.keys()
    for name, by_hand in expected.items():
        # The norms of a model are float32 inside.
        torch.testing.assert_close(ours[name], by_hand, rtol=1e-6, atol=1e-6)
        if name == "ref_log_probs":
            assert not ours[name].requires_grad
            continue
        upstream = torch.linspace(-1, 2, len(by_hand), dtype=torch.float64)
        mine, theirs = (
            torch.autograd.grad((x * upstream).sum(), parameters, retain_graph=True)
            for x in (ours[name], by_hand)
        )
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_statistics_and_their_gradients_match_the_whole_softmax(path):
    """Through the whole model in float64."""
    policy, ref_model = (model.double() for model in make_models())
    ref_model.requires_grad_(True)  # as if the caller had forgotten to switch it off
    responses = make_responses((1, 12, 5, 3, 7, 2))
    batch = starter.make_batch(responses, torch.zeros(6), "cpu")
    mask = batch["response_mask"]
    ours = starter.token_statistics(path(policy, ref_model), batch, 0.8, ref_model=ref_model)
    assert all((values[~mask] == 0).all() for values in ours.values())
    ours = {name: values[mask] for name, values in ours.items()}
    log_p, log_q = (
        torch.cat([whole_log_softmax(model, response, 0.8) for response in responses])
        for model in (policy, ref_model)
    )
    expected = statistics_by_hand(log_p, log_q.detach(), batch["labels"][mask])
    assert_same_statistics(ours, expected, list(policy.parameters()))
    of_reference = torch.autograd.grad(
        ours["kl_per_token"].sum(), list(ref_model.parameters()), allow_unused=True
    )
    assert all(gradient is None for gradient in of_reference)


def test_forbidden_token_acts_like_a_vocabulary_without_it(monkeypatch):
    """A logit of -inf: log-probs, entropy, both KLs and their gradients are those of a softmax over
    the other tokens, and it is never drawn."""
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 6, 9, dtype=torch.float64, generator=generator)
    leaf = logits.requires_grad_()
    labels = torch.tensor([0, 1, 3, 7, 5, 4])
    forbidden = torch.tensor([8])
    real = starter.scale_logits
    monkeypatch.setattr(
        starter, "scale_logits", lambda *args: real(*args).index_fill(1, forbidden, -math.inf)
    )
    ours = starter.statistics_of_logits(leaf, labels, 0.5, ref_logits)
    log_p, log_q = ((x[:, :8] / 0.5).log_softmax(dim=1) for x in (leaf, ref_logits))
    assert_same_statistics(ours, statistics_by_hand(log_p, log_q, labels), [leaf])
    for uniform in (0.0, 0.5, 1 - 2.0**-24):
        tokens, _ = starter.draw_tokens(leaf.detach(), torch.full((6, 1), uniform), 0.5)
        assert (tokens < 8).all()


def test_statistics_reach_the_log_and_so_does_one_of_yours(path):
    """An integer one, too. A name under which compute_loss logs something is refused."""
    policy, ref_model = make_models()
    path(policy, ref_model)
    responses = make_responses((1, 12, 5))
    real = starter.statistics_of_logits

    def logged(name):
        def with_rank(logits, labels, *others):
            sampled = logits.gather(1, labels[:, None])
            return {**real(logits, labels, *others), name: (logits > sampled).sum(dim=1)}

        with mock.patch.object(starter, "statistics_of_logits", with_rank):
            step = make_step(responses)
            return starter.grpo_microbatch_step(policy, step, cfg_with(), ref_model, 0.1)[1]

    log_p, log_q = (
        torch.cat([whole_log_softmax(model, response) for response in responses])
        for model in (policy, ref_model)
    )
    labels = torch.tensor([token for response in responses for token in response.response_ids])
    expected = statistics_by_hand(log_p, log_q, labels)
    expected["rank"] = (log_p > expected["log_probs"][:, None] + 1e-6).sum(dim=1).float()
    found = logged("rank")
    for name, of_tokens in expected.items():
        assert found[name].item() == pytest.approx(of_tokens.mean().item(), rel=1e-4)
    with pytest.raises(InputError, match="rename {'kl_k1'}: compute_loss logs that, too"):
        logged("kl_k1")


# Update


@pytest.mark.parametrize(
    "temperature, estimator, placement, cap, checkpointing",
    [
        (1.0, "k3", "loss", 1.2, False),
        (0.7, "k3", "loss", math.inf, True),
        (0.7, "k1", "reward", 1.2, False),
        (1.0, "exact_forward", "loss", 1.2, False),
    ],
)
def test_gradient_of_a_step_matches_the_loss_written_out(
    path, temperature, estimator, placement, cap, checkpointing
):
    """The whole step in one expression: own logits of each row alone, PPO term with its clip and
    its importance weight, k3 with the gradient of reverse KL, k1 in the advantages or the exact
    forward KL, mean over all tokens."""
    policy, ref_model = (model.double() for model in make_models())
    responses = make_responses((1, 12, 5, 3, 7, 2))
    advantages = torch.linspace(-1, 1, 6)
    kl_coef = 0.3
    total = 0.0
    old_rows = []
    for response, advantage in zip(responses, advantages.tolist()):
        log_p, log_q = (
            whole_log_softmax(model, response, temperature) for model in (policy, ref_model)
        )
        log_probs = labels_of(log_p, response)
        ref_log_probs = labels_of(log_q, response).detach()
        rollout_log_probs = torch.tensor(response.log_probs)
        old = log_probs.detach() + 0.4 * torch.arange(len(log_probs)).sin()
        importance = (old - rollout_log_probs).exp().clamp(max=cap)
        if placement == "reward":
            to_go = (rollout_log_probs - ref_log_probs).flip(0).cumsum(0).flip(0)
            advantage = advantage - kl_coef * to_go
        ratio = (log_probs - old).exp()
        advantage = advantage * importance
        ppo = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        d = (log_probs - ref_log_probs).detach()
        kl = torch.exp(-d) - 1 + d
        weight = (log_probs - rollout_log_probs).exp().detach().clamp(max=2.0)
        surrogate = weight * d * log_probs
        penalty = {
            "k3": kl + surrogate - surrogate.detach(),
            "k1": 0.0,
            "exact_forward": (log_q.exp() * (log_q - log_p)).sum(dim=1),
        }[estimator]
        total = total + (ppo + kl_coef * penalty).sum() / 30
        old_rows.append(old)
    total.backward()
    expected = gradient_of(policy)
    policy.zero_grad()
    if checkpointing:
        policy.gradient_checkpointing_enable()
        starter.train_checkpointed_layers(policy)

    batch = make_step(responses, "dapo")
    batch["old_log_probs"] = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    batch["old_log_probs"][batch["response_mask"]] = torch.cat(old_rows)
    cfg = cfg_with(
        temperature=temperature, importance_cap=cap, kl_estimator=estimator, kl_in=placement
    )
    path(policy, ref_model)
    loss = sum(
        starter.grpo_microbatch_step(policy, rows, cfg, ref_model, kl_coef)[0]
        for rows in starter.cut_microbatches(batch, 40)
    )
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(gradient_of(policy), expected, rtol=1e-4, atol=1e-6)


def two_epochs(path, batch, max_tokens, cfg):
    """Returns the number of microbatches, and of each epoch the means and the gradient. Between
    the epochs all weights move by 0.15 against the gradient."""
    policy, ref_model = make_models()
    path(policy, ref_model)
    microbatches = starter.cut_microbatches(batch, max_tokens)
    found = []
    for epoch in range(2):
        sums = {"loss": 0.0}
        for rows in microbatches:
            loss, means = starter.grpo_microbatch_step(policy, rows, cfg, ref_model, 0.1)
            sums["loss"] += loss.item()
            share = rows["response_mask"].sum() / batch["response_mask"].sum()
            for name, mean in means.items():
                sums[name] = sums.get(name, 0.0) + (share * mean).item()
        found.append((sums, gradient_of(policy)))
        for parameter in policy.parameters():
            parameter.data -= 0.15 * parameter.grad / found[-1][1].norm()
        policy.zero_grad()
    return len(microbatches), found


@pytest.mark.parametrize("loss_average", ["grpo", "dapo", "dr_grpo"])
def test_gradient_and_logged_means_do_not_depend_on_the_cut(path, loss_average):
    """In 1 to 8 microbatches, over two epochs, with clip, KL term and importance weights active."""
    batch = make_step(make_responses((1, 9, 4, 6, 7, 2, 8, 3)), loss_average)
    cfg = cfg_with(importance_cap=1.2)
    n_whole, whole = two_epochs(path, batch, 10_000, cfg)
    n_cut = set()
    for max_tokens in (70, 30, 1):
        n, cut = two_epochs(path, batch, max_tokens, cfg)
        n_cut.add(n)
        for (means, gradient), (whole_means, whole_gradient) in zip(cut, whole):
            assert means == pytest.approx(whole_means, rel=1e-4, abs=1e-5)
            torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-5)
    assert n_whole == 1 and max(n_cut) == 8 and len(n_cut) == 3
    assert whole[0][0]["ratio_mean"] == pytest.approx(1) and whole[1][0]["clip_frac"] > 0


def test_gradient_in_16_bits_is_off_by_its_rounding_only(policy, path):
    """Against float64: 1e-5 of the norm in float32, 5 % under bf16 autocast, 0.5 % in fp16."""
    responses = sample(policy, group_size=24)
    batch = make_step(responses, advantages=torch.linspace(-1, 1, len(responses)).roll(7))
    gradients = []
    kinds = ((torch.float64, "float32"), (torch.float32, "float32"), (torch.float32, "bf16"))
    for dtype, precision in (*kinds, (torch.float32, "fp16")):
        model = path(copy.deepcopy(policy).to(dtype))
        starter.grpo_microbatch_step(model, dict(batch), cfg_with(precision=precision))
        gradients.append(gradient_of(model).double())
    exact, *others = gradients
    in_float32, in_bf16, in_fp16 = ((other - exact).norm() / exact.norm() for other in others)
    assert in_float32 < 1e-5 and 1e-4 < in_bf16 < 0.05 and 1e-5 < in_fp16 < 0.005


@pytest.mark.parametrize(
    "kl",
    [{}, dict(kl_estimator="exact", kl_in="loss_to_go"), dict(kl_estimator="k1", kl_in="reward")],
)
def test_kl_coef_zero_is_plain_grpo_bit_for_bit(path, kl):
    gradients = []
    for with_reference in (False, True):
        policy, ref_model = make_models()
        path(policy, ref_model)
        batch = make_step(make_responses((1, 12, 5, 3, 7, 2)))
        loss, metadata = starter.grpo_microbatch_step(
            policy, batch, cfg_with(**kl), ref_model if with_reference else None, 0.0
        )
        gradients.append(torch.cat([loss[None], gradient_of(policy)]))
        assert ("kl_per_token" in metadata) == with_reference
    assert torch.equal(*gradients)


# Rows without an advantage


def half_of_a_step():
    """A batch in which every second row has an advantage."""
    advantages = torch.tensor([0.0, 0.5, 0.0, -1.0, 0.0, 0.7])
    batch = make_step(make_responses((1, 9, 4, 6, 2, 8)), advantages=advantages)
    batch["weights"][0] = 0.0  # as mask_truncated does
    return batch


def test_rows_without_an_advantage_have_no_forward_pass_and_no_gradient():
    policy, _ = make_models()
    batch = half_of_a_step()
    n_rows = []
    policy.register_forward_pre_hook(
        lambda model, args, named: n_rows.append(len(named["input_ids"])), with_kwargs=True
    )
    gradients = []
    for rows in (batch, starter.leave_out_rows(policy, batch, 1, {}, cfg_with())):
        starter.grpo_microbatch_step(policy, rows, cfg_with())
        gradients.append(gradient_of(policy))
        policy.zero_grad()
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-7)
    assert n_rows == [1, 6, 3]  # one of them is tried


@pytest.mark.parametrize("begins, found", [(1, 1), (5, 11), (99, 99)])
def test_loss_term_without_an_advantage_is_never_lost(path, capsys, monkeypatch, begins, found):
    """It is found in the first step, or within ten steps, and the log says so."""
    policy, _ = make_models()
    path(policy)
    real = starter.compute_loss

    def compute_loss(advantages, log_probs, *others, **named):
        loss, metadata = real(advantages, log_probs, *others, **named)
        return loss + 0.1 * (step >= begins) * log_probs, metadata

    monkeypatch.setattr(starter, "compute_loss", compute_loss)
    probe = {}
    for step in range(1, 13):
        kept = starter.leave_out_rows(policy, half_of_a_step(), step, probe, cfg_with())
        assert len(kept["labels"]) == (6 if step >= found else 3)
        assert all(parameter.grad is None for parameter in policy.parameters())
    said = capsys.readouterr().out
    assert ("left out: True" in said) == (begins > 1)
    assert (f"step {found}: rows without an advantage are left out: False" in said) == (found < 99)


# Checks of log-probs while training


def test_check_sampler_stops_the_run_of_a_stale_sampler():
    """The limit is generous in the first step, and then follows what was found there."""
    for limit, first_diff, changes in (
        (1.0, None, {}),
        (0.1, None, dict(engine="vllm")),
        (0.002, 0.0, {}),
        (0.042, 0.01, {}),
        (0.06, 0.01, dict(engine="vllm", precision="bf16")),
        (0.01, 0.5, dict(max_sampler_diff=0.01)),
    ):
        cfg = cfg_with(**changes)
        starter.check_sampler(0.99 * limit, 5, first_diff, cfg)
        for diff in (1.01 * limit, math.nan):
            with pytest.raises(
                RunStopped, match="step 5: sampler and trainer disagree by .* stale"
            ):
                starter.check_sampler(diff, 5, first_diff, cfg)
    starter.check_sampler(9.0, 5, 0.0, cfg_with(max_sampler_diff=math.inf))


# Evaluation


def test_evaluation_matches_hand_computed_values(monkeypatch):
    """Three problems, each with a response of its own length, in the order of the problems."""
    said = {
        "task 1": "<answer>1</answer>",
        "task 2": "<answer>12</answer>",
        "task 3": "no answer",
    }
    asked = []
    problems = []
    for prompt in said:
        skill, answer = prompt.split()
        ids = TOKENIZER(prompt)["input_ids"]
        problems.append({"prompt": prompt, "answer": answer, "skill": skill, "prompt_ids": ids})

    def rollout(policy, llm, prompts, cfg, purpose, group_size, temperature):
        asked.append((TOKENIZER.batch_decode(prompts), purpose, group_size, temperature))
        replies = [TOKENIZER(text)["input_ids"] for text in said.values()]
        return [Response(ids, reply, [], True) for ids, reply in zip(prompts, replies)]

    monkeypatch.setattr(starter, "rollout", rollout)
    cfg = cfg_with(eval_temperature=0.25, reward=lambda *args: 20 * starter.reward_fn(*args))
    metrics, samples = starter.evaluate(None, None, TOKENIZER, problems, cfg)
    lengths = [len(TOKENIZER(text)["input_ids"]) for text in said.values()]
    assert metrics == pytest.approx(
        {
            "solved": 2 / 3,
            "reward_mean": (20 + 2 + 0) / 3,
            "response_length": sum(lengths) / 3,
        }
    )
    assert [text for _, text, _ in samples] == [*said.values()]
    assert [reward for *_, reward in samples] == [20, 2, 0]
    assert asked == [([*said], "evaluate", 1, 0.25)]


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
        result = train(
            checkpoint,
            tmp_path,
            epochs_per_rollout=epochs,
            clip_range=0.01,
            learning_rate=1e-2,
            n_train_steps=1,
            warmup_steps=0,
        )
        assert of(result, "train/lr") == pytest.approx([1e-2])  # no warm-up
        assert (of(result, "train/ratio_mean")[0] == pytest.approx(1)) == (epochs == 1)
        assert (of(result, "train/clip_frac")[0] > 0) == (epochs == 3)


def test_coefficient_rule_moves_the_coefficient_of_the_next_update(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setitem(starter.COEFFICIENT_RULES, "halve", lambda c, *args: c.beta / 2)
    step = starter.grpo_microbatch_step
    with mock.patch.object(starter, "grpo_microbatch_step", side_effect=step) as called:
        result = train(
            checkpoint,
            tmp_path,
            use_kl_penalty=True,
            kl_coef=0.8,
            n_train_steps=2,
            epochs_per_rollout=2,
            kl_adaptation_method="halve",
            max_tokens_per_microbatch=10_000,
        )
    assert [call.args[4] for call in called.call_args_list] == [0.8, 0.4, 0.2, 0.1]
    assert of(result, "adaptive_kl/current_beta") == pytest.approx([0.4, 0.1])


def test_learning_rate_rises_during_the_warm_up_and_then_stays(checkpoint, tmp_path):
    result = train(checkpoint, tmp_path, n_train_steps=4, warmup_steps=2, learning_rate=2e-4)
    assert of(result, "train/lr") == pytest.approx([1e-4, 2e-4, 2e-4, 2e-4])


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_gradient_of_a_step_of_train_matches_one_written_out(
    checkpoint, tmp_path, path, mask_truncated
):
    """From the sampled responses and their texts to the gradient that is clipped: own rewards, own
    advantages, the mean of each response, the model's own logits. Some responses are cut, and some
    groups have equal rewards."""
    gradients = []
    real_clip = starter.clip_gradient

    def clip_gradient(policy, max_norm):
        gradients.append(gradient_of(policy))
        return real_clip(policy, max_norm)

    with (
        mock.patch.object(starter, "make_batch", side_effect=starter.make_batch) as called,
        mock.patch.object(starter, "clip_gradient", clip_gradient),
    ):
        result = train(
            checkpoint,
            tmp_path,
            n_train_steps=1,
            reward=often_equal,
            loss_average="grpo",
            normalize_by_std=False,
            mask_truncated=mask_truncated,
            max_new_tokens=12,
        )
    responses = called.call_args.args[0]
    asked = starter.problems_of_step(small_sums(None)[0], 0, 4, 0)
    policy, tokenizer = starter.init_policy(checkpoint, CPU)
    texts = [tokenizer.decode(r.response_ids, skip_special_tokens=True) for r in responses]
    rewards = [often_equal(text, asked[i // 4]) for i, text in enumerate(texts)]
    advantages = advantages_by_loops(rewards, 4, 0.0, False)
    total = 0.0
    for response, advantage in zip(responses, advantages):
        if response.finished or not mask_truncated:
            log_probs = labels_of(whole_log_softmax(policy, response), response)
            total = total - advantage * log_probs.mean() / 16
    total.backward()
    expected = gradient_of(policy)
    assert {response.finished for response in responses} == {True, False}
    assert advantages.count(0.0) in range(4, 13)
    assert (gradients[-1] - expected).norm() < 1e-4 * expected.norm()
    assert of(result, "train/grad_norm")[0] == pytest.approx(expected.norm().item(), rel=1e-4)


def test_step_without_a_gradient_keeps_the_bits_of_weights_and_moments(checkpoint, tmp_path, path):
    """In the last step all rewards are equal. AdamW's moments would move the weights."""
    last = [problem["answer"] for problem in starter.problems_of_step(small_sums(None)[0], 3, 4, 0)]

    def reward(text, problem):
        return 0.5 if problem["answer"] in last else variety(text, problem)

    result = train(checkpoint, tmp_path, reward=reward, save_every=1)
    third, fourth = (
        torch.load(path, weights_only=True)
        for path in sorted(result["run_folder"].glob("checkpoint_*.pt"))
    )
    torch.testing.assert_close(third["model"], fourth["model"], rtol=0, atol=0)
    moments = (saved["optimizer"]["state"] for saved in (third, fourth))
    torch.testing.assert_close(*moments, rtol=0, atol=0)
    norms = of(result, "train/grad_norm")
    assert norms[-1] == 0 < min(norms[:-1])


def test_resumed_run_with_rows_left_out_ends_with_the_same_bits(checkpoint, tmp_path):
    changes = dict(reward=often_equal, save_every=2)
    whole = train(checkpoint, tmp_path, n_train_steps=4, **changes)["run_folder"]
    parts = train(checkpoint, tmp_path, n_train_steps=2, **changes)["run_folder"]
    train(checkpoint, tmp_path, n_train_steps=4, resume=str(parts), **changes)
    resumed, expected = (
        torch.load(folder / "checkpoint_00000004.pt", weights_only=True)["model"]
        for folder in (parts, whole)
    )
    torch.testing.assert_close(resumed, expected, rtol=0, atol=0)


def test_each_group_of_parameters_keeps_its_own_learning_rate(checkpoint, tmp_path):
    real = torch.optim.AdamW

    def frozen_embeddings(parameters, lr, **others):
        first, *rest = parameters
        return real([{"params": [first], "lr": 0.0}, {"params": rest}], lr, **others)

    with mock.patch.object(torch.optim, "AdamW", frozen_embeddings):
        result = train(checkpoint, tmp_path, n_train_steps=2, save_every=1)
        resumed = train(checkpoint, tmp_path, n_train_steps=3, resume=str(result["run_folder"]))
    before, after = (
        starter.init_policy(folder, CPU)[0].state_dict()
        for folder in (checkpoint, resumed["run_folder"] / "model")
    )
    moved = {name: not torch.equal(before[name], after[name]) for name in before}
    assert not moved.pop("model.embed_tokens.weight") and not moved.pop("lm_head.weight")
    assert all(moved.values())
