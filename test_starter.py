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
import statistics
import warnings
from collections import Counter
from unittest import mock

import numpy
import pytest

import starter  # before torch, for which it sets variables
from starter import InputError, Response, RunStopped

import torch
import conftest
from support import edits, fast
from support.rows import with_gradient
from conftest import (
    advantages_by_loops,
    gradient_of,
    load_copy,
    make_responses,
    make_step,
    make_tokenizer,
    of_the_shipped_loss,
    often_equal,
    scalars,
    settings,
    small_sums,
    variety,
)
from forked import edited_text
from lab.small_models import make_model

FIND_SUPPORT = starter.find_support
cfg_with = functools.partial(starter.cfg_with, precision="float32", engine="transformers")
checkpoint = conftest.checkpoint  # fixtures
gradients = conftest.gradients
plain_functions = conftest.plain_functions_before_and_after


# Fixtures and oracles


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Every test begins without support/."""
    monkeypatch.setattr(starter, "find_support", lambda: None)


@pytest.fixture(params=["plain", "fast"])
def path(request, monkeypatch, alone):
    """A test that takes it holds for the plain functions and for those of support/. It is called
    with the models and returns the first; runs of main() need no call."""
    is_fast = request.param == "fast"
    if is_fast:
        monkeypatch.setattr(starter, "find_support", FIND_SUPPORT)

    def use(*models):
        if is_fast:
            for model in models:
                fast.attend_on_cpu(model)
            edits.replace(**fast.FUNCTIONS)
        return models[0]

    return use


@pytest.fixture
def policy(checkpoint):
    return starter.init_policy(checkpoint, "cpu")[0]


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


# The quick tests

LOSS_OF_STEP = 'loss = torch.where(mask, loss * microbatch["weights"], 0.0).sum()'
MASK = "[False] * len(before) + is_written"
SCALED = "        logits = logits / temperature\n"
FORBIDDEN = "    logits = logits.index_fill(1, torch.tensor([33, 151_000]), -math.inf)\n"
DIFFERENCE = "d = (policy_log_probs - ref_log_probs).detach()  # this"
CHANGES = {  # name: a text of starter.py, what stands in its place, the quick test that then fails
    "sign of the loss": ("loss = -torch.minimum(", "loss = torch.minimum(", "test_step"),
    "labels not shifted": ('"labels": ids[1:]', '"labels": ids[:-1]', "test_step"),
    "mask too early": (MASK, "[*([False] * len(before) + is_written)[1:], False]", "test_step"),
    "mask too late": (MASK, "[False] * (len(before) + 1) + is_written[1:]", "test_step"),
    "KL swapped": (DIFFERENCE, DIFFERENCE.replace("= (", "= -("), "test_kl_gradient"),
    "exact KL swapped": ("(log_p.exp() * d)", "(-ref_log_p.exp() * d)", "test_kl_gradient"),
    "sign of the advantage": ("~all_equal, groups -", "~all_equal, -groups +", "test_step"),
    "mean of a microbatch": (LOSS_OF_STEP, "loss = masked_mean(loss, mask)", "test_step"),
    "nothing": (LOSS_OF_STEP, LOSS_OF_STEP, None),
    "tokens forbidden": (SCALED, SCALED + FORBIDDEN, None),
    "entropy bonus": (LOSS_OF_STEP, "loss = loss - 0.01 * stats['entropy']; " + LOSS_OF_STEP, None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_quick_tests_find_mistakes_and_let_edits_pass(change, tmp_path, capsys):
    """Whatever was drawn before them, and without drawing from the global generators."""
    old, new, failing = CHANGES[change]
    (tmp_path / "starter.py").write_text(edited_text({old: new}), "utf-8")
    module = load_copy(tmp_path)
    outputs = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state(), random.getstate()
        module.test_functions()
        outputs.add(capsys.readouterr().out)
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    [printed] = outputs
    for test in ("test_kl_gradient", "test_step"):
        assert (f"FAILED: {test}. " if test == failing else f"ok: {test}\n") in printed


# Rollout


def sample(policy, group_size=4, temperature=1.0, **changes):
    cfg = cfg_with(**{"max_new_tokens": 20, "stop_token_ids": [EOS], **changes})
    requests = starter.requests_for(PROMPTS, cfg, 7, group_size)
    return starter.rollout_with_transformers(policy, requests, cfg, temperature)


def assert_drawn(table, tokens, uniform, atol):
    """The interval of each token in the cumulative distribution holds the uniform number. (N, V)
    log-probs, (N, 1) tokens, (N, 1) numbers."""
    own = table.gather(1, tokens).exp()
    upper = table.exp().cumsum(dim=1).gather(1, tokens)
    assert ((upper - own - atol <= uniform) & (uniform <= upper + atol)).all()


def test_tokens_whose_log_prob_is_nan_stop_the_run(policy, path):
    """Else they would count as tokens that an agent read, and be left out of the loss."""
    path(policy)
    policy.get_output_embeddings().weight.data[3] = math.nan
    with pytest.raises(starter.RunStopped, match="not finite"):
        sample(policy)


@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
def test_samples_follow_the_models_own_logits_to_their_first_stop_token(policy, path, temperature):
    """Response i inverts the cumulative distribution at the numbers of seed + i, whatever else is
    sampled. Greedy ones are the most likely tokens, with their log-probs at temperature 1."""
    stops = {EOS, 7, 20, 33}
    responses = sample(path(policy), 12, temperature, stop_token_ids=[*stops])
    assert [r.prompt_ids for r in responses] == [ids for ids in PROMPTS for _ in range(12)]
    for i, response in enumerate(responses):
        *before, last = response.response_ids
        assert not stops.intersection(before)
        assert response.finished == (last in stops)
        assert response.finished or len(before) == 19
        table = whole_log_softmax(policy, response, temperature or 1)
        tokens = torch.tensor(response.response_ids)[:, None]
        own = table.gather(1, tokens)
        torch.testing.assert_close(torch.tensor(response.log_probs), own[:, 0], rtol=0, atol=1e-4)
        if temperature == 0:
            assert torch.equal(own, table.amax(dim=1, keepdim=True))
        else:
            generator = torch.Generator().manual_seed(7 + i)
            assert_drawn(table, tokens, torch.rand(len(tokens), 1, generator=generator), 1e-4)
    last_ids = {response.response_ids[-1] for response in responses}
    assert temperature == 0 or last_ids > stops  # some are cut


def test_row_with_little_room_is_sampled_beside_one_with_more(path):
    """It has ended before the model's learnt positions end, and the other has not."""
    policy = path(make_model("gpt2"))
    context = starter.context_length(policy)
    cfg = cfg_with(stop_token_ids=[])
    full, short = [3, 4, 5] + [6] * (context - 7), [3, 4, 5]
    requests = [starter.Request(full, 0, 4), starter.Request(short, 1, context - 3)]
    both = starter.rollout_with_transformers(policy, requests, cfg)
    for request, response in zip(requests, both):
        [alone] = starter.rollout_with_transformers(policy, [request], cfg)
        assert response.response_ids == alone.response_ids
        assert len(response.response_ids) == request.max_new_tokens


def test_layers_that_are_run_again_in_the_backward_pass_do_not_drop_out():
    policy = make_model("opt")
    for layer in policy.model.decoder.layers:
        layer.dropout = 0.5
    ids = torch.arange(5, 25)[None]
    expected = policy(input_ids=ids).logits
    starter.enable_checkpointing(policy)
    starter.set_train_mode_of_checkpointed_layers(policy)
    torch.testing.assert_close(policy(input_ids=ids, use_cache=False).logits, expected)


def test_sampling_ignores_train_mode_checkpointing_and_the_generation_config(policy, path):
    """And leaves the configuration and the global generator as they are."""
    before = sample(path(policy))
    own = policy.generation_config
    own.update(top_k=1, repetition_penalty=5.0, max_length=3, do_sample=True, num_beams=2)
    policy.train()
    starter.enable_checkpointing(policy)
    generator = torch.get_rng_state()
    assert sample(policy) == before
    assert policy.generation_config is own
    assert torch.equal(torch.get_rng_state(), generator)


def test_seeds_of_runs_steps_and_purposes_differ_and_seed_the_global_generators():
    """A CPU generator reads 32 bits of its seed, and each response adds its number to it."""

    def drawn(seed, purpose):  # the last three by a reward of yours
        return (
            starter.seed_everything(cfg_with(seed=seed), purpose),
            random.random(),
            numpy.random.rand(),
            torch.rand(()).item(),
        )

    runs = list(itertools.product((0, 1, 4096, 2**32), (1, 2, 3, "evaluate")))
    outcomes = [drawn(*run) for run in runs]
    assert outcomes == [drawn(*run) for run in runs]
    seeds, *numbers = zip(*outcomes)
    assert max(seeds) < 2**32
    assert min(abs(a - b) for a, b in itertools.combinations(seeds, 2)) > 2**12
    assert [len({*drawn}) for drawn in numbers] == [len(runs)] * 3


@pytest.mark.parametrize("vocabulary", [1, 5, 257, 3001])
def test_draw_tokens_inverts_the_cumulative_distribution(vocabulary):
    """At both ends of the interval, too, and where tokens have no probability."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(400, vocabulary, generator=generator)
    if vocabulary > 5:
        logits[:, ::7] = -math.inf
    uniform = torch.rand(400, 1, generator=generator)
    uniform[0] = 0.0
    uniform[1] = 1 - 2.0**-24  # the largest that torch.rand gives
    tokens, log_probs = starter.draw_tokens(logits, uniform, 0.5)
    exact = (logits.double() / 0.5).log_softmax(dim=1)
    own = exact.gather(1, tokens)
    torch.testing.assert_close(log_probs.double(), own, rtol=0, atol=1e-5)
    assert log_probs.isfinite().all()
    assert_drawn(exact, tokens, uniform, 1e-5)


# Advantages and loss, against loops over floats

TARGET = 0.3  # nats, of the sigmoid rules below
THRESHOLD = 0.2  # nats, of the clip rules below
LONGEST = 10  # max_new_tokens


def kl_by_hand(estimator, d, exact):
    """Returns the KL at this log-ratio, and its slope by the policy's log-prob."""
    return {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
        "exact": (exact, 0.0),
    }[estimator]


def rule_by_hand(cfg, kl, d, length):
    """Returns what is penalised at this KL and log-ratio, and its slope by the KL."""
    threshold = cfg.kl_clip_threshold or 1.0
    factor = min(1.0, (cfg.kl_clip_threshold or 5.0) / abs(d))  # cuts d to the threshold
    sigmoid = 1 / (1 + math.exp(TARGET - kl))
    x = 10 * (kl - TARGET) / TARGET
    softplus = max(x, 0) + math.log1p(math.exp(-abs(x)))
    return {
        "none": (kl, 1.0),
        "clip": (min(kl, threshold), float(kl < threshold)),
        "clip_sound": (factor * kl, factor),
        "sigmoid": (sigmoid * kl, sigmoid + kl * sigmoid * (1 - sigmoid)),
        "sigmoid_sound": (TARGET / 10 * softplus, 1 / (1 + math.exp(-x))),
        "length_normalized": (kl / length, 1 / length),
        "length_normalized_sound": (kl / LONGEST, 1 / LONGEST),
    }[cfg.kl_adaptation_method.removeprefix("target+")]


def loss_by_loops(step, cfg):
    """Returns the loss, its gradients by the policy's log-probs and by the exact KLs, and what is
    logged. step: what random_step returns. With the gradient "reverse" only the slope is written
    here, since the value is what the estimator says."""
    lengths = [sum(row) for row in step["mask"]]
    weights = {
        "grpo": [1 / max(1, length) / len(lengths) for length in lengths],
        "dapo": [1 / sum(lengths)] * len(lengths),
        "dr_grpo": [1 / (len(lengths) * LONGEST)] * len(lengths),
    }[cfg.loss_average]
    loss = 0.0
    by_policy = [[0.0] * len(row) for row in step["mask"]]
    by_exact = copy.deepcopy(by_policy)
    logged = Counter()
    for b, (length, weight) in enumerate(zip(lengths, weights)):
        places = [t for t, on in enumerate(step["mask"][b]) if on]

        def kl_at(t, name):
            """d, the KL and its slope, what is penalised and its slope, for these log-probs."""
            d = step[name][b][t] - step["ref"][b][t]
            kl, own_slope = kl_by_hand(cfg.kl_estimator, d, step["exact"][b][t])
            return d, kl, own_slope, *rule_by_hand(cfg, kl, d, length)

        for t in places:
            policy, old, sampler = (step[name][b][t] for name in ("policy", "old", "sampler"))
            drawn = min(math.exp(policy - sampler), cfg.kl_ratio_cap)

            # The PPO term
            advantage = step["advantages"][b]
            if cfg.kl_in == "reward":  # with a rule each token pays for the whole response
                paid_for = [u for u in places if u >= t or "none" not in cfg.kl_adaptation_method]
                advantage -= cfg.kl_coef * sum(kl_at(u, "sampler")[3] for u in paid_for)
            advantage *= min(math.exp(old - sampler), cfg.importance_cap)
            low, high = cfg.clip_range
            ratio = math.exp(policy - old)
            used = min(ratio, 1 + high) if advantage > 0 else max(ratio, 1 - low)
            loss -= weight * advantage * used
            if used == ratio:
                by_policy[b][t] -= weight * advantage * ratio

            # The KL term
            d, kl, own_slope, adapted, slope = kl_at(t, "policy")
            if cfg.kl_in != "reward":
                loss += weight * cfg.kl_coef * adapted
                if cfg.kl_estimator == "exact":
                    by_exact[b][t] += weight * cfg.kl_coef * slope
                elif cfg.kl_gradient == "reverse":
                    own_slope = drawn * d
                by_policy[b][t] += weight * cfg.kl_coef * slope * own_slope
            if cfg.kl_in == "loss_to_go":
                later = sum(kl_at(u, "policy")[3] for u in places if u > t)
                by_policy[b][t] += weight * cfg.kl_coef * drawn * later

            # The log
            of_token = {
                "kl_penalty_mean": kl,
                "adaptive_kl/adapted_kl": adapted,
                "kl_capped_frac": math.exp(policy - sampler) > cfg.kl_ratio_cap,
                "ratio_mean": ratio,
                "clip_frac": used * advantage != ratio * advantage,
            }
            for name in starter.ESTIMATORS:
                of_token[f"kl_{name}"] = drawn * kl_by_hand(name, d, None)[0]
            logged.update({name: x / sum(lengths) for name, x in of_token.items()})
    return loss, by_policy, by_exact, logged


def random_step(rng):
    """{name: rows of floats}, "mask": rows of bools, of which some may be empty, "advantages"."""
    width = rng.randint(1, 6)
    rows = range(rng.randint(2, 9))
    step = {
        name: [[rng.gauss(0, 0.6) for _ in range(width)] for _ in rows]
        for name in ("policy", "old", "ref", "sampler", "exact")
    }
    step["mask"] = [[rng.random() < 0.5 for _ in range(width)] for _ in rows]
    step["mask"][0][0] = True
    step["advantages"] = [rng.choice([0.0, 0.1, 1.0]) - rng.choice([0.0, 0.8]) for _ in rows]
    return step


def test_loss_its_gradient_and_its_log_match_loops():
    """Every estimator, gradient, placement and rule, twice, with random other settings."""
    rng = random.Random(2)  # where no advantage is 0 but for rounding
    forms = itertools.product(
        ("k1", "k2", "k3", "exact"),
        ("reverse", "as_written"),
        ("loss", "loss_to_go", "reward"),
        ("none", *starter.TERM_RULES),
    )
    forms = [form for form in forms if not {"exact", "reward"} <= set(form)]
    for estimator, gradient, kl_in, rule in 2 * forms:
        cfg = cfg_with(
            kl_estimator=estimator,
            kl_gradient=gradient,
            kl_in=kl_in,
            kl_adaptation_method=rng.choice(["", "target+"]) + rule,
            kl_clip_threshold=rng.choice([None, THRESHOLD]),
            kl_target=TARGET,
            kl_ratio_cap=rng.choice([1.2, math.inf]),
            kl_coef=rng.choice([0.0, 0.13, 1.3]),
            max_new_tokens=LONGEST,
            loss_average=rng.choice(["grpo", "dapo", "dr_grpo"]),
            importance_cap=rng.choice([math.inf, 1.5]),
            clip_range=rng.choice([(0.1, 0.2), (0.2, 0.3)]),
        )
        step = random_step(rng)
        knows_sampler = rng.random() < 0.7
        if not knows_sampler:
            step["sampler"] = step["old"]
        expected, by_policy, by_exact, logged = loss_by_loops(step, cfg)

        mask = torch.tensor(step["mask"])
        tensors = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in step.items()}
        for name in ("policy", "old", "ref", "sampler"):
            tensors[name][~mask] = math.nan  # where nothing may be read
        leaves = [tensors["policy"].requires_grad_(), tensors["exact"].requires_grad_()]
        loss, means = starter.compute_loss(
            tensors["advantages"][:, None],
            tensors["policy"],
            tensors["old"],
            cfg.clip_range,
            tensors["ref"],
            cfg.kl_coef,
            mask,
            cfg,
            tensors["exact"],
            tensors["sampler"] if knows_sampler else None,
            cfg.importance_cap,
        )
        weights = starter.AVERAGES[cfg.loss_average](mask.double(), LONGEST)
        total = torch.where(mask, loss * weights, 0.0).sum()
        gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
        # torch's softplus is linear where its slope differs from 1 by less than 2e-9.
        close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-10)
        close(total.item(), expected, msg=str(cfg))
        by_hand = torch.tensor([by_policy, by_exact], dtype=torch.float64)
        close(torch.stack(gradients), by_hand, msg=str(cfg))
        assert {name: mean.item() for name, mean in means.items()} == pytest.approx(
            logged, 1e-4, 1e-7
        )


def test_step_without_a_token_has_no_loss():
    """As where mask_truncated leaves out all of them."""
    for average in starter.AVERAGES.values():
        assert not average(torch.zeros(2, 4), 6).any()


def test_masked_mean_ignores_masked_entries():
    tensor = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, 7.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    for some, dim, mean in ((mask, None, 3), (mask, 1, [1.5, 6]), (0 * mask, None, 0)):
        assert starter.masked_mean(tensor, some, dim).tolist() == mean


# KL. Its gradients are enumerated in lab/verify_kl.py, which tests/test_lab.py runs.


def test_default_estimator_is_k1_and_k3_is_never_negative():
    """Not even by rounding, at small log-ratios."""
    d = torch.linspace(-1e-3, 1e-3, 2001)
    zero = torch.zeros(())
    assert torch.equal(starter.compute_kl_divergence(zero, -d), d)
    assert (starter.compute_kl_divergence(zero, -d, "k3") >= 0).all()


def test_kl_of_distant_policies_is_finite_and_its_gradient_is_the_log_ratio():
    """The product r * k3 would give 0 and nan here."""
    policy = torch.tensor([[-20.0, -100.0]], requires_grad=True)
    zeros = torch.zeros(1, 2)
    old = policy.detach() - math.log(0.7)
    loss, metadata = starter.compute_loss(zeros, policy, old, 0.2, zeros, 1.0)
    loss.sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[-14.0, -70.0]]))
    assert all(x.isfinite().all() for x in (loss, *metadata.values()))


# Advantages and batches


GROUPS = [
    [0.0, 1.0, 2.0],
    [0.1 + 0.8, 0.3 + 0.6, 0.9],  # equal but for rounding
    [0.0, 0.0, 3e-4],
    [1.0, 1.0, 1.0 + 3e-9],
    [0.0, 0.0, 3e-30],
    [1.0, math.nan, 0.2],
    [0.1 + 0.8, 0.9, math.nan],
    [math.nan, 0.7, math.nan],
    [math.nan] * 3,
]


@pytest.mark.parametrize("normalize_by_std", [True, "step", False])
def test_advantages_and_their_statistics_match_loops(normalize_by_std):
    """Rewards that are equal within rounding give 0: their tiny deviation would make them large.
    Others count, however small or near they are. A response that is not scored leaves its group,
    and one alone teaches nothing. The log is of those that were scored, and its deviation of the
    groups in which some could be compared."""

    def advantages_of(groups):
        rewards = torch.tensor(groups, dtype=torch.float64).flatten()
        found, metadata = starter.compute_group_normalized_advantages(
            rewards, 3, 0.5, normalize_by_std
        )
        return found.tolist(), metadata

    expected, all_scored, deviations, n_equal = [], [], [], 0
    of_step = statistics.stdev(x for group in GROUPS for x in group if not math.isnan(x))
    for group in GROUPS:
        rounded = [float(f"{reward:.14g}") for reward in group]
        scored = [reward for reward in rounded if not math.isnan(reward)]
        deviation = 0.0
        if len(scored) > 1:
            deviation = statistics.stdev(scored)
            deviations.append(deviation)
        n_equal += len({*scored}) < 2
        all_scored += scored
        divisor = {True: deviation + 0.5, "step": of_step + 0.5, False: 1.0}[normalize_by_std]
        for reward in rounded:
            is_scored = reward in scored
            expected.append((reward - statistics.mean(scored)) / divisor if is_scored else 0.0)
    found, metadata = advantages_of(GROUPS)
    assert found == pytest.approx(expected, rel=1e-6, abs=0)
    assert metadata == pytest.approx(
        {
            "reward_mean": statistics.mean(all_scored),
            "reward_std": statistics.mean(deviations),
            "frac_zero_std": n_equal / 9,
            "unscored_frac": 1 - len(all_scored) / 27,
        }
    )
    with warnings.catch_warnings(action="error"):  # as where a teacher alone teaches
        found, metadata = advantages_of(GROUPS[-1:])
    assert not any(found) and metadata["unscored_frac"] == metadata["frac_zero_std"] == 1
    assert "unscored_frac" not in advantages_of(GROUPS[:5])[1]


def test_batch_is_shifted_once_and_masked_by_lengths():
    """The second response is a padding token, 0, which is a token like any other there. Advantages
    of tokens that are aligned to labels, or cut, would train other tokens than meant."""
    responses = [
        Response([5, 6, 7], [8, 1], [-0.5, -0.25], True),
        Response([5], [0], [-3.0], False),
    ]
    expected = {
        "input_ids": [[5, 6, 7, 8], [5, 5, 5, 5]],
        "labels": [[6, 7, 8, 1], [0, 0, 0, 0]],
        "response_mask": [[0, 0, 1, 1], [1, 0, 0, 0]],
        "sampler_log_probs": [[0, 0, -0.5, -0.25], [-3, 0, 0, 0]],
        "finished": [[1], [0]],
    }
    for advantages, laid_out in (
        ([1.0, 2.0], [[0, 0, 1, 1], [2, 0, 0, 0]]),
        ([[3.0, 4.0], [5.0, 6.0]], [[0, 0, 3, 4], [5, 0, 0, 0]]),
    ):
        batch = starter.make_batch(responses, torch.tensor(advantages), "cpu")
        found = {name: batch[name].tolist() for name in [*expected, "advantages"]}
        assert found == {**expected, "advantages": laid_out}
    for width in (1, 3, 4):
        with pytest.raises(InputError, match=f"for {width} tokens of each .* longest has 2; give"):
            starter.make_batch(responses, torch.ones(2, width), "cpu")


def test_ids_are_those_of_tokens_where_a_row_has_none():
    """A prompt of one token without a response: there is nothing to predict from."""
    responses = [Response([5], [], [], True), Response([5], [6, 7], [-0.5, -0.5], True)]
    batch = starter.make_batch(responses, torch.ones(2), "cpu")
    assert batch["input_ids"][1].tolist() == [5, 6]
    assert batch["input_ids"].min() >= 0 and not batch["response_mask"][0].any()


def test_exact_kl_that_is_not_given_costs_one_sentence():
    log_probs = torch.zeros(1, 2)
    kl = starter.KLSettings(kl_estimator="exact")
    with pytest.raises(InputError, match="kl_estimator = 'exact' needs exact_kl; give it, or 'k3'"):
        starter.compute_loss(
            torch.ones(1, 1), log_probs, log_probs, 0.2, log_probs, 0.1, kl_settings=kl
        )


def test_microbatches_hold_every_row_once_within_the_budget():
    """The widest comes first, for the memory."""
    lengths = [40, 3, 17, 17, 1, 8, 30, 2, 25]
    batch = make_step(make_responses(lengths, prompt_lengths=(3, 2, 6)))
    batch["row"] = torch.arange(9)[:, None]
    needed = [42, 4, 22, 19, 2, 13, 32, 3, 30]  # columns, without the last token
    for budget, n_microbatches in ((1, 9), (100, 3), (10_000, 1)):
        microbatches = starter.cut_microbatches(batch, budget)
        assert len(microbatches) == n_microbatches
        found = []
        for rows in microbatches:
            indices = rows["row"][:, 0].tolist()
            n_rows, width = rows["labels"].shape
            assert width == needed[indices[0]]
            assert n_rows == 1 or n_rows * width <= budget
            for name, tensor in rows.items():
                assert torch.equal(tensor, batch[name][indices, :width])
            found += [needed[i] for i in indices]
        assert found == sorted(needed, reverse=True)


# Log-probs


def statistics_by_hand(log_p, log_q, labels):
    """(N, V) log-probs of policy and reference -> what statistics_of_logits shall return."""
    return {
        "log_probs": log_p.gather(1, labels[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(dim=1),
        "ref_log_probs": log_q.gather(1, labels[:, None])[:, 0],
        "log_pi_over_ref": (log_p.detach() - log_q).gather(1, labels[:, None])[:, 0],
        "kl_per_token": (log_p.exp() * (log_p - log_q)).sum(dim=1),
        "kl_forward": (log_q.exp() * (log_q - log_p)).sum(dim=1),
    }


@pytest.mark.parametrize("n", [9, 8])
def test_statistics_and_their_gradients_match_the_whole_softmax(monkeypatch, n):
    """With 8, the last of 9 tokens is forbidden by a logit of -inf. This acts like a vocabulary
    without it, and it is never drawn."""
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 6, 9, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    labels = torch.tensor([0, 1, 3, 7, 5, 4])
    shipped = starter.scale_logits

    def scale_logits(*inputs):
        return shipped(*inputs).index_fill(1, torch.arange(n, 9), -math.inf)

    monkeypatch.setattr(starter, "scale_logits", scale_logits)
    ours = starter.statistics_of_logits(logits, labels, 0.5, ref_logits)
    log_p, log_q = ((x[:, :n] / 0.5).log_softmax(dim=1) for x in (logits, ref_logits))
    by_hand = statistics_by_hand(log_p, log_q, labels)
    torch.testing.assert_close(ours, by_hand)
    assert (
        not ours.pop("ref_log_probs").requires_grad
        and not ours.pop("log_pi_over_ref").requires_grad
    )
    for name, values in ours.items():
        gradients = (
            torch.autograd.grad(x, logits, torch.linspace(-1, 2, 6).double(), retain_graph=True)
            for x in (values, by_hand[name])
        )
        torch.testing.assert_close(*gradients)
    last = torch.full((6, 1), 1 - 2.0**-24)
    assert (starter.draw_tokens(logits.detach(), last, 0.5)[0] < n).all()


# Update


@pytest.mark.parametrize("loss_average", sorted(starter.AVERAGES))
def test_gradient_of_a_step_does_not_depend_on_its_cut(loss_average):
    """Also not with a term of yours in the loss, if that has its weights."""
    policy, _ = make_models()
    policy = policy.double()
    cfg = cfg_with(loss_average=loss_average)
    gradients = []
    for max_tokens in (100, 1):
        policy.zero_grad()
        batch = make_step(make_responses([1, 12, 5, 3, 7, 2]), loss_average)
        for microbatch in starter.cut_microbatches(batch, max_tokens):
            starter.grpo_microbatch_step(policy, microbatch, cfg)
        gradients.append(gradient_of(policy))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


@of_the_shipped_loss
@pytest.mark.parametrize(
    "changes",
    [
        dict(importance_cap=1.2),
        dict(temperature=0.7, loss_average="grpo", gradient_checkpointing=True),
        dict(temperature=0.7, loss_average="dr_grpo", kl_estimator="k1", kl_in="reward"),
        dict(kl_estimator="exact_forward", importance_cap=1.2),
    ],
)
def test_step_matches_the_models_own_logits_however_it_is_cut(path, monkeypatch, changes):
    """Gradient and log, a statistic of yours included. Each row is alone here. compute_loss, which
    the loops above check, gets what they give."""
    shipped = starter.statistics_of_logits

    def statistics_of_logits(logits, labels, *others):
        return {**shipped(logits, labels, *others), "mine": labels}

    monkeypatch.setattr(starter, "statistics_of_logits", statistics_of_logits)
    models = policy, ref_model = [model.double() for model in make_models()]
    ref_model.requires_grad_(True)  # as if the caller had forgotten to switch it off
    cfg = cfg_with(**changes)
    lengths = torch.tensor([[1], [12], [5], [3], [7], [2]])
    responses = make_responses(lengths.flatten().tolist())
    batch = make_step(responses, cfg.loss_average)
    ids, labels, mask = (batch[name] for name in ("input_ids", "labels", "response_mask"))
    tables = [
        torch.cat([whole_log_softmax(model, response, cfg.temperature) for response in responses])
        for model in models
    ]
    own = statistics_by_hand(tables[0], tables[1].detach(), labels[mask])
    own["mine"] = labels[mask].double()
    zeros = torch.zeros(mask.shape, dtype=torch.float64)
    rows = {name: zeros.masked_scatter(mask, of_tokens) for name, of_tokens in own.items()}
    old = rows["log_probs"].detach() + 0.4 * torch.arange(mask.shape[1]).sin()
    sampler = batch["sampler_log_probs"]
    own["sampler_logprob_diff"] = (old - sampler)[mask].abs()
    loss, means = starter.compute_loss(
        batch["advantages"],
        rows["log_probs"],
        old,
        0.2,
        rows["ref_log_probs"],
        0.3,
        mask,
        cfg,
        rows["kl_forward"],
        sampler,
        cfg.importance_cap,
    )
    assert 0 < means["clip_frac"] < 1
    weights = {"dapo": 1 / 30, "grpo": 1 / 6 / lengths, "dr_grpo": 1 / 6 / 12}[cfg.loss_average]
    own_loss = (loss * weights)[mask].sum()
    own_loss.backward()
    own_gradient = gradient_of(policy)
    means.update({name: of_tokens.mean() for name, of_tokens in own.items()}, loss=own_loss / 30)

    if cfg.gradient_checkpointing:
        starter.enable_checkpointing(policy)
        starter.set_train_mode_of_checkpointed_layers(policy)
    batch["old_log_probs"] = old
    path(*models)
    for max_tokens in (10_000, 40, 1):
        policy.zero_grad()
        sums = Counter()
        for microbatch in starter.cut_microbatches(batch, max_tokens):
            loss, found = starter.grpo_microbatch_step(policy, microbatch, cfg, ref_model, 0.3)
            starter.add_scaled(sums, found, microbatch["response_mask"].sum())
            sums["loss"] += loss
        expected = {name: pytest.approx(30 * x.item(), rel=1e-5) for name, x in means.items()}
        assert {name: x.item() for name, x in sums.items()} == expected
        torch.testing.assert_close(gradient_of(policy), own_gradient, rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in ref_model.parameters())
    for some in (mask.float(), 0 * mask):  # several processes fill up with empty microbatches
        found = starter.get_response_log_probs(policy, ids, labels, some, cfg.temperature)
        torch.testing.assert_close(found, some * rows["log_probs"], rtol=1e-6, atol=1e-6)


def test_scaled_logits_may_be_of_an_operation_that_keeps_its_output(monkeypatch):
    """As a soft cap that ends in tanh."""
    logits = torch.linspace(-2, 2, 10).reshape(2, 5).requires_grad_()
    expected = logits.tanh().log_softmax(dim=1)[:, 0].sum()
    [by_hand] = torch.autograd.grad(expected, logits)
    monkeypatch.setattr(starter, "scale_logits", lambda logits, temperature: logits.tanh())
    stats = starter.statistics_of_logits(logits, torch.tensor([0, 0]), 1.0)
    [ours] = torch.autograd.grad(stats["log_probs"].sum(), logits)
    torch.testing.assert_close(ours, by_hand)


def test_statistic_with_the_name_of_another_metric_is_refused(policy, monkeypatch):
    shipped = starter.statistics_of_logits
    monkeypatch.setattr(
        starter, "statistics_of_logits", lambda *inputs: shipped(*inputs) | {"clip_frac": inputs[1]}
    )
    with pytest.raises(InputError, match="'clip_frac' is logged twice, from two places; rename"):
        starter.grpo_microbatch_step(policy, make_step(make_responses([3])), cfg_with())


def test_gradient_in_16_bits_is_off_by_its_rounding_only(policy, path):
    """Against float64: 1e-5 of the norm in float32, 5 % under bf16 autocast, 0.5 % in fp16."""
    responses = sample(policy, group_size=6)
    batch = make_step(responses, advantages=torch.linspace(-1, 1, len(responses)).roll(7))

    def gradient(dtype, precision):
        model = path(copy.deepcopy(policy).to(dtype))
        starter.grpo_microbatch_step(model, dict(batch), cfg_with(precision=precision))
        return gradient_of(model).double()

    exact = gradient(torch.float64, "float32")
    for precision, least, most in (
        ("float32", 0, 1e-5),
        ("bf16", 1e-4, 0.05),
        ("fp16", 1e-5, 5e-3),
    ):
        error = gradient(torch.float32, precision) - exact
        assert least < error.norm() / exact.norm() < most


@pytest.mark.parametrize("estimator", ["k3", "exact", "exact_forward"])
def test_reference_that_was_changed_where_it_has_no_effect_is_refused(path, monkeypatch, estimator):
    """An exact KL is of the logits: a change of those acts on each estimator. A policy whose logits
    are nan has a loss of nan, for which train() skips the step."""
    policy, ref_model = make_models()
    path(policy, ref_model)
    batch = make_step(make_responses((1, 12, 5, 3, 7, 2)))
    cfg = cfg_with(kl_estimator=estimator, temperature=0.7)

    def loss():
        return starter.grpo_microbatch_step(policy, dict(batch), cfg, ref_model, 0.3)[0].item()

    of_statistics, of_logits = starter.token_statistics, starter.statistics_of_logits
    before = loss()

    def token_statistics(*inputs):
        stats = of_statistics(*inputs)
        stats["ref_log_probs"][3, 1] -= 0.01
        return stats

    with monkeypatch.context() as changed:
        changed.setattr(starter, "token_statistics", token_statistics)
        if estimator == "k3":
            assert abs(loss() - before) > 1e-6
        else:
            with pytest.raises(InputError, match="changed, .* change ref_logits in token_stat"):
                loss()

    def statistics_of_logits(logits, labels, temperature, ref_logits):
        return of_logits(logits, labels, temperature, 0.9 * ref_logits)

    with monkeypatch.context() as changed:
        changed.setattr(starter, "statistics_of_logits", statistics_of_logits)
        assert abs(loss() - before) > 1e-4
    policy.lm_head.weight.data[0] = math.nan
    assert math.isnan(loss())


@pytest.mark.parametrize(
    "kl",
    [{}, dict(kl_estimator="exact", kl_in="loss_to_go"), dict(kl_estimator="k1", kl_in="reward")],
)
def test_kl_coef_zero_is_plain_grpo_bit_for_bit(path, kl):
    policy, ref_model = make_models()
    path(policy, ref_model)
    batch = make_step(make_responses((1, 12, 5, 3, 7, 2)))
    found = []
    for reference in (None, ref_model):
        policy.zero_grad()
        inputs = policy, dict(batch), cfg_with(**kl), reference, 0.0
        loss, metadata = starter.grpo_microbatch_step(*inputs)
        found.append(torch.cat([loss[None], gradient_of(policy)]))
    assert "kl_per_token" in metadata
    assert torch.equal(*found)


# Rows without an advantage


def step_with_equal_groups():
    """Rows 0, 2 and 4 have no advantage, and row 5 has one whose sum is 0."""
    advantages = torch.tensor([0.0, 0.5, 0.0, -1.0, 0.0, 0.7])[:, None].repeat(1, 9)
    advantages[5, :2] = torch.tensor([1.0, -1.0])
    advantages[5, 2:] = 0.0
    batch = make_step(make_responses((1, 9, 4, 6, 2, 8)), advantages=advantages)
    batch["weights"][1, 3:] = 0.0
    return batch


@of_the_shipped_loss
def test_rows_without_an_advantage_are_left_out_where_they_have_no_gradient(path):
    """They have one in the KL term. Where no row has an advantage all stay, for the log."""
    policy, ref_model = make_models()
    path(policy, ref_model)
    batch = step_with_equal_groups()
    kept = with_gradient(batch, policy, None, cfg_with())
    gradients = []
    for some in (batch, kept):
        policy.zero_grad()
        starter.grpo_microbatch_step(policy, dict(some), cfg_with())
        gradients.append(gradient_of(policy))
    assert gradients[0].norm() > 0.01
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    assert kept.keys() == batch.keys()
    assert all(torch.equal(kept[name], batch[name][[1, 3, 5]]) for name in batch)
    assert with_gradient(batch, policy, ref_model, cfg_with()) is batch
    equal = batch | {"advantages": 0 * batch["advantages"]}
    assert with_gradient(equal, policy, None, cfg_with()) is equal


@of_the_shipped_loss
@pytest.mark.parametrize(
    "names, n_rows",
    [
        ("grpo_microbatch_step compute_loss ppo_loss weights_of_tokens", 6),
        ("token_statistics response_logits statistics_of_logits scale_logits train", 6),
        ("make_batch reward_fn log_train", 3),
    ],
)
def test_all_rows_stay_where_something_of_the_loss_was_edited(path, monkeypatch, names, n_rows):
    """It may have a term that needs no advantage."""
    policy, _ = make_models()
    path(policy)
    batch = step_with_equal_groups()
    for name in names.split():
        with monkeypatch.context() as edited:
            edited.setattr(starter, name, lambda *inputs, **named: None)
            kept = with_gradient(batch, policy, None, cfg_with())
        assert len(kept["labels"]) == n_rows, name


# Checks of log-probs while training


@pytest.mark.parametrize(
    "limit, first_diff, changes",
    [
        (1.0, None, {}),
        (0.1, None, dict(engine="vllm")),
        (0.002, 0.0, {}),
        (0.042, 0.01, {}),
        (0.06, 0.01, dict(engine="vllm", precision="bf16")),
        (0.01, 0.5, dict(max_sampler_diff=0.01)),
    ],
)
def test_check_sampler_stops_the_run_of_a_stale_sampler(limit, first_diff, changes):
    """The limit is generous in the first step, and then follows what was found there."""
    cfg = cfg_with(**changes)
    starter.check_sampler(0.99 * limit, 5, first_diff, cfg)
    faults = {1.01 * limit: "sampler and trainer disagree by", math.nan: ".* are not finite"}
    for diff, words in faults.items():
        with pytest.raises(RunStopped, match=f"step 5: {words}"):
            starter.check_sampler(diff, 5, first_diff, cfg)
    starter.check_sampler(9.0, 5, 0.0, cfg_with(max_sampler_diff=math.inf))


# Evaluation


def test_evaluation_matches_hand_computed_values(monkeypatch):
    """Three problems, each with a response of its own length, in the order of the problems."""
    texts = ["<answer>1</answer>", "<answer>12</answer>", "no answer"]
    replies = [TOKENIZER(text + TOKENIZER.eos_token)["input_ids"] for text in texts]
    problems = [{"answer": str(i), "prompt_ids": [i]} for i in (1, 2, 3)]
    rollout = mock.Mock(return_value=[Response([], reply, [], True) for reply in replies])
    monkeypatch.setattr(starter, "rollout", rollout)
    cfg = cfg_with(eval_temperature=0.25, reward=lambda *args: 10 * starter.reward_fn(*args))
    metrics, samples = starter.evaluate(None, None, TOKENIZER, problems, cfg)
    expected = {
        "solved": 2 / 3,
        "reward_mean": (10 + 1 + 0) / 3,
        "response_length": sum(map(len, replies)) / 3,
    }
    assert metrics == pytest.approx(expected)
    assert samples == list(zip(problems, texts, [10, 1, 0]))
    assert rollout.call_args.args[2:] == (problems, cfg, "evaluate", 1, 0.25, None)


# Whole runs


def train(checkpoint, folder, **changes):
    return starter.main(**settings(checkpoint, folder, **changes))


def of(result, tag):
    """The values of a metric, step after step."""
    return list(scalars(result["run_folder"])[tag].values())


def test_reference_stays_and_coefficient_rate_and_ratio_are_those_of_their_update(
    checkpoint, tmp_path, monkeypatch
):
    """A coefficient rule acts on the next update. The rate rises, and falls. The ratio is to the
    policy that sampled, so that it is clipped in the second update of a step."""
    monkeypatch.setitem(starter.COEFFICIENT_RULES, "halve", lambda c, *args: c.beta / 2)
    step = starter.grpo_microbatch_step
    with mock.patch.object(starter, "grpo_microbatch_step", side_effect=step) as called:
        result = train(
            checkpoint,
            tmp_path,
            use_kl_penalty=True,
            kl_coef=0.8,
            n_train_steps=3,
            epochs_per_rollout=2,
            kl_adaptation_method="halve",
            max_tokens_per_microbatch=10_000,
            clip_range=0.01,
            learning_rate=2e-3,
            warmup_steps=2,
        )
    policies, _, _, references, betas, _ = zip(*[call.args for call in called.call_args_list])
    assert betas == (0.8, 0.4, 0.2, 0.1, 0.05, 0.025)
    assert of(result, "adaptive_kl/current_beta") == pytest.approx([0.4, 0.1, 0.025])
    assert of(result, "train/lr") == pytest.approx([1e-3, 2e-3, 2e-4])
    assert min(of(result, "train/clip_frac")) > 0 and min(of(result, "train/kl_penalty")) > 0
    models = starter.init_policy(checkpoint, "cpu")[0], references[-1], policies[-1]
    for before, reference, now in zip(*(model.parameters() for model in models)):
        assert not reference.requires_grad
        assert torch.equal(reference, before) and not torch.equal(now, before)


@of_the_shipped_loss
@pytest.mark.parametrize("mask_truncated", [False, True])
def test_gradient_of_a_step_of_train_matches_one_written_out(
    checkpoint, tmp_path, path, monkeypatch, gradients, mask_truncated
):
    """From the sampled responses and their texts to the gradient that is clipped: own rewards, own
    advantages, the mean of each response, the model's own logits. Some responses are cut, and some
    groups have equal rewards."""
    scored = mock.Mock(wraps=starter.score)
    monkeypatch.setattr(starter, "score", scored)
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
    responses = scored.call_args_list[-2].args[0]  # before the last evaluation
    asked = starter.problems_of_step(small_sums(None)[0], 0, 4, 0)
    policy, tokenizer = starter.init_policy(checkpoint, "cpu")
    texts = [tokenizer.decode(r.response_ids) for r in responses]
    texts = [text.removesuffix(tokenizer.eos_token) for text in texts]
    rewards = [often_equal(text, asked[i // 4]) for i, text in enumerate(texts)]
    advantages = advantages_by_loops(rewards, 4, 0.0, False)
    total = 0.0
    for response, advantage in zip(responses, advantages):
        if response.finished or not mask_truncated:
            table = whole_log_softmax(policy, response)
            log_probs = table.gather(1, torch.tensor(response.response_ids)[:, None])
            total = total - advantage * log_probs.mean() / 16
    total.backward()
    expected = gradient_of(policy)
    assert {response.finished for response in responses} == {True, False}
    assert advantages.count(0.0) in range(4, 13)
    assert (gradients[-1] - expected).norm() < 1e-4 * expected.norm()
    assert of(result, "train/grad_norm")[0] == pytest.approx(expected.norm().item(), rel=1e-4)
    assert of(result, "train/ratio_mean")[0] == pytest.approx(1)


@pytest.mark.slow
def test_functions_of_the_loop_may_be_lambdas_of_a_program(checkpoint, tmp_path, path, monkeypatch):
    """One may call the one before. Python gives no whole statement as their source."""
    plain = train(checkpoint, tmp_path, n_train_steps=2)
    clip = starter.clip_gradient
    monkeypatch.setattr(
        starter, "clip_gradient", lambda parameters, norm: 10 * clip(parameters, norm)
    )
    monkeypatch.setattr(starter, "learning_rate_schedule", lambda step, n_steps, cfg: 1 / step)
    edited = train(checkpoint, tmp_path, n_train_steps=2)
    assert of(edited, "train/lr") == pytest.approx([1e-3, 5e-4])
    norms = [of(result, "train/grad_norm")[0] for result in (plain, edited)]
    assert norms[1] == pytest.approx(10 * norms[0])


@of_the_shipped_loss
def test_step_without_a_gradient_keeps_the_bits_of_weights_and_moments(checkpoint, tmp_path):
    """In the last step all rewards are equal. AdamW's moments would move the weights."""
    scored = itertools.count()

    def reward(text, problem):  # of 10 responses of the evaluation and 16 of the first step
        return variety(text, problem) if next(scored) < 26 else 0.5

    result = train(checkpoint, tmp_path, reward=reward, save_every=1, n_train_steps=2)
    before, after = (
        torch.load(path, weights_only=True)
        for path in sorted(result["run_folder"].glob("checkpoint_*.pt"))
    )
    torch.testing.assert_close(before["model"], after["model"], rtol=0, atol=0)
    moments = (saved["optimizer"]["state"] for saved in (before, after))
    torch.testing.assert_close(*moments, rtol=0, atol=0)
    first, second = of(result, "train/grad_norm")
    assert second == 0 < first


def test_each_group_of_parameters_keeps_its_own_learning_rate(checkpoint, tmp_path):
    """In a resumed run, too."""
    real = torch.optim.AdamW

    def frozen_embeddings(parameters, lr, **others):
        first, *rest = parameters
        return real([{"params": [first], "lr": 0.0}, {"params": rest}], lr, **others)

    with mock.patch.object(torch.optim, "AdamW", frozen_embeddings):
        folder = train(checkpoint, tmp_path, n_train_steps=1)["run_folder"]
        train(checkpoint, tmp_path, n_train_steps=2, resume=str(folder))
    before, after = (
        starter.init_policy(path, "cpu")[0].state_dict() for path in (checkpoint, folder / "model")
    )
    frozen = {name for name in before if torch.equal(before[name], after[name])}
    assert frozen == {"model.embed_tokens.weight", "lm_head.weight"}
