"""The controller of the KL coefficient, and the rules for the coefficient and for the KL term."""

import json
import math

import pytest

import starter  # before torch, for which it sets variables

import torch
from starter import KLController, cfg_with
from support import adaptive_rules  # noqa: F401  adds its rules


def controller(rule, state=None, **changes):
    return KLController(0.2, cfg_with(kl_adaptation_method=rule, **changes), state)


def betas(rule, numbers, **changes):
    """beta after each step. The numbers are what the rule follows: the KL, or the reward. The state
    goes through JSON each time, as in a checkpoint."""
    found = []
    state = None
    for number in numbers:
        resumed = controller(rule, state, **changes)
        if "target" in rule:
            resumed.update(number, 0.0)
        else:
            resumed.update(0.1, number)
        state = json.loads(json.dumps(resumed.state))
        found.append(resumed.beta)
    return found


FIRST = 0.2 * 2**0.1
SECOND = FIRST * 1.8**0.1


@pytest.mark.parametrize(
    "rule, numbers, changes, by_hand",
    [
        ("target", [0.16, 0.15, 0.1, 0.05, 0.04], {}, [0.3, 0.3, 0.3, 0.3, 0.225]),
        ("sigmoid+target", [0.16, 0.04], {}, [0.3, 0.225]),
        ("dynamic", [0.81, 0.8, 0.79, 1.0], dict(beta_min=0.17), [0.18, 0.18, 0.18, 0.17]),
        (
            "dynamic",
            [0.0] * 4,
            dict(beta_min=0.01, beta_schedule_steps=3),
            [0.2, 0.2, 0.01, 0.01],
        ),
        # The moving averages are 0.2, 0.18, 1.144, and a step is bounded.
        ("target_sound", [0.2, 0.1, 5.0], {}, [FIRST, SECOND, SECOND * math.exp(0.1)]),
        (
            "dynamic_sound",
            [1.0] * 19 + [0.5] + [0.0] * 20,  # their average falls below 0.8 in step 21
            dict(beta_schedule_steps=10**9),
            [0.2] * 9 + [0.18] * 10 + [0.162] * 10 + [0.18] * 10 + [0.2],
        ),
        (
            "dynamic_sound",
            [0.0] * 6,
            dict(beta_schedule_steps=4),
            [0.2 * 0.1 ** (step / 4) for step in (1, 2, 3, 4, 4, 4)],  # the ceiling
        ),
    ],
)
def test_coefficient_rules_match_hand_computed_values(rule, numbers, changes, by_hand):
    assert betas(rule, numbers, **changes) == pytest.approx(by_hand)


@pytest.mark.parametrize("numbers", [[0.0], [9.0], [0.0, 9.0]])
@pytest.mark.parametrize("rule, high", [("target_sound", 2.0), ("dynamic_sound", 0.2)])
def test_sound_coefficient_rules_keep_their_bounds_and_do_not_jump(rule, high, numbers):
    found = [0.2, *betas(rule, numbers * 600, beta_schedule_steps=500)]
    assert min(found) > 0.02 - 1e-12 and max(found) < high + 1e-12
    assert all(abs(math.log(b / a)) < 0.12 for a, b in zip(found, found[1:]))


def test_clip_sound_has_the_gradient_of_the_log_ratio_cut_to_five_nats():
    """Or to another threshold: test_starter.py."""
    ref = torch.tensor([[-9.0, -1.0, -2.0, -8.0]])
    log_probs = torch.tensor([[-1.0, -8.0, -1.5, -8.0]], requires_grad=True)  # d: 8, -7, 0.5, 0
    mask = torch.ones(1, 4).bool()
    cfg = cfg_with(kl_adaptation_method="target+clip_sound")
    kl = starter.kl_in_loss(log_probs, ref, log_probs.detach(), mask, cfg)
    [gradient] = torch.autograd.grad(kl.sum(), log_probs)
    assert gradient[0].tolist() == pytest.approx([5.0, -5.0, 0.5, 0.0])


@pytest.mark.parametrize("rule", starter.COEFFICIENT_RULES)
def test_number_that_is_not_finite_moves_neither_beta_nor_an_average(rule):
    for kl, reward in ((math.nan, 1.0), (math.inf, 1.0), (0.1, math.nan)):
        state = {**controller(rule).state, "step": 4, "kl": 0.1, "reward": 0.5}
        resumed = controller(rule, dict(state))
        resumed.update(kl, reward)
        assert resumed.state == {**state, "step": 5}
    assert math.isfinite(betas(rule, [0.0, -0.1, 0.0])[-1])


@pytest.mark.parametrize(
    "method, kl_coef, begins_anew",
    [("target", 0.2, False), ("target", 1.0, True), ("dynamic", 0.2, True), ("none", 0.2, True)],
)
def test_rule_begins_anew_where_a_resume_has_changed_it_or_kl_coef(method, kl_coef, begins_anew):
    before = controller("target")
    before.update(10.0, 0.5)
    assert before.beta == pytest.approx(0.3)
    resumed = KLController(kl_coef, cfg_with(kl_adaptation_method=method), dict(before.state))
    if begins_anew:
        assert (resumed.beta, resumed.state["step"]) == (kl_coef, 0)
    else:
        assert resumed.state == before.state


def test_rule_that_returns_nothing_is_named(monkeypatch):
    monkeypatch.setitem(starter.COEFFICIENT_RULES, "mine", lambda controller, cfg, kl, reward: None)
    with pytest.raises(starter.InputError, match="<lambda>.* returned None"):
        controller("mine").update(0.1, 0.5)
