"""The controller of the KL coefficient, and the rules for the coefficient and for the KL term."""
import json
import inspect
import math
import random

import pytest

import starter  # before torch, for which it sets variables

import torch
from starter import InputError, KLController, KLSettings
from support import adaptive_rules  # noqa: F401  adds its rules


def controller(rule="none", kl_coef=0.2, **changes):
    return KLController(kl_coef, KLSettings(kl_adaptation_method=rule, **changes))


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


def slope(rule, kl, n_tokens=8):
    """d(penalised) / d(KL), by autograd."""
    kl = torch.tensor([[float(kl)]], dtype=torch.float64, requires_grad=True)
    adapted = starter.adapted_kl(kl, torch.ones(1, n_tokens), KLSettings(kl_adaptation_method=rule))
    return torch.autograd.grad(adapted, kl)[0].item()


def test_printed_term_rules_penalise_what_readme_kl_says():
    """At a threshold of 1 and a target of 0.1 nats."""
    assert slope("clip", 1.01) == 0 < slope("clip_sound", 1.01)
    assert slope("sigmoid", 0.0) == pytest.approx(0.475, abs=1e-3)
    assert slope("sigmoid", 0.2) == pytest.approx(0.575, abs=1e-3)
    assert slope("sigmoid_sound", 0.0) < 1e-4 and slope("sigmoid_sound", 0.2) > 0.999
    assert slope("length_normalized", 1, 8) == 4 * slope("length_normalized", 1, 32)
    assert slope("length_normalized_sound", 1, 8) == slope("length_normalized_sound", 1, 32)


@pytest.mark.parametrize("both", ["target+sigmoid", "sigmoid+target"])
def test_rule_of_each_kind_acts_as_if_it_were_alone(both):
    assert slope(both, 0.2) == slope("sigmoid", 0.2)
    kls, rewards = [0.16, 0.05], [0.0, 0.0]
    assert betas(controller(both), kls, rewards) == betas(controller("target"), kls, rewards)


def test_printed_coefficient_rules_fall_where_the_sound_ones_hold():
    """The median of 20 seeds, 100 steps: rewards below the threshold on average, with noise. And
    400 steps in which nothing drifts yet."""
    left = {}
    for rule in ("dynamic", "dynamic_sound"):
        left[rule] = sorted(betas(controller(rule), [0.1] * 100, [
            random.Random(f"{seed} {i}").gauss(0.75, 0.08) for i in range(100)])[-1]
            for seed in range(20))[10] / 0.2
    assert left["dynamic"] < 0.1 and left["dynamic_sound"] > 0.7
    assert betas(controller("target"), [0.0] * 400, [0.0] * 400)[-1] < 1e-9
    assert betas(controller("target_sound"), [0.0] * 400, [0.0] * 400)[-1] == pytest.approx(0.02)


@pytest.mark.parametrize("rule", starter.COEFFICIENT_RULES)
def test_number_that_is_not_finite_does_not_move_beta(rule):
    for kl, reward in ((math.nan, 1.0), (math.inf, 1.0), (0.1, math.nan), (-math.inf, 0.0)):
        state = {"beta": 0.2, "step": 4, "kl": 0.1, "reward": 0.5}
        c = KLController(0.2, KLSettings(kl_adaptation_method=rule), state)
        c.update(kl, reward)
        assert c.state == state | {"step": 5}
    assert math.isfinite(betas(controller(rule), [0.0, -0.1, 0.0], [0.0] * 3)[-1])


def test_resumed_controller_without_a_rule_takes_the_coefficient_of_now():
    assert KLController(0.2, KLSettings(), KLController(0.1, KLSettings()).state).beta == 0.2


def test_kl_settings_have_the_defaults_of_main():
    of_main, settings = starter.cfg_with(), KLSettings(kl_target=0.5)
    for name in inspect.signature(starter.main).parameters:
        if name.startswith(("kl_", "beta_")) and name != "kl_target":
            assert getattr(settings, name) == getattr(of_main, name)
    assert settings.kl_target == 0.5 and settings.max_new_tokens == 256


def test_clip_threshold_is_larger_where_only_the_gradient_is_clipped():
    assert slope("clip", 0.99) == 1 and slope("target+clip", 1.01) == 0
    for rule, nats in (("clip", math.inf), ("clip_sound", 5.0), ("target+clip_sound", 5.0)):
        assert starter.log_ratio_cap(starter.cfg_with(kl_adaptation_method=rule)) == nats
    assert starter.log_ratio_cap(KLSettings(
        kl_adaptation_method="clip_sound", kl_clip_threshold=0.3)) == 0.3


@pytest.mark.parametrize("changes, message", [
    (dict(kl_estimator="k4"), "kl_estimator = 'k4' is not known; "),
    (dict(kl_estimator="exact", kl_in="reward"), r"\(in the reward\) = 'exact' is not known; use"),
    (dict(kl_gradient="revers"), r"kl_gradient = 'revers' is not known; did you mean 'reverse'\?"),
    (dict(kl_in="advantage"), "kl_in = 'advantage' is not known; use one of 'loss', "),
    (dict(kl_adaptation_method="Clip_sound"), "method = 'Clip_sound' is not known; did you "),
    (dict(kl_adaptation_method=""), "kl_adaptation_method = '' is not known"),
    (dict(kl_adaptation_method="target_sound+target_sound"), "has two rules of a kind"),
])
def test_kl_settings_refuse_what_would_act_like_another_value(changes, message):
    with pytest.raises(InputError, match=message):
        KLSettings(**changes)
