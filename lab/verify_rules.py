"""What each rule of adaptive KL does, as printed and in its sound form.

    python -m lab.verify_rules    writes lab/results/kl_adaptive.csv; the last line says how many
                                  claims held

Slope of what a term rule penalises, direction of its gradient, path of each coefficient rule. The
code under test is starter.py's and support's own.
"""
import random
import sys

import starter  # before torch, for which it sets variables

import torch

from lab.verify_kl import cosine, expected_gradient, holds, make_world, random_policies, run, term

def slope(rule, kl, n_tokens=8):
    """Returns d(penalised) / d(KL) of one of starter's term rules, by autograd."""
    kl = torch.tensor([[float(kl)]], dtype=torch.float64, requires_grad=True)
    settings = term(adaptation=rule, target=0.1, clip_threshold=1.0)
    adapted = settings.adapted(kl, torch.tensor([[n_tokens]]))
    return torch.autograd.grad(adapted, kl)[0].item()


SLOPES = [  # rule, KL, tokens of the response, expected slope
    ("clip", 1.01, 8, "= 0"), ("clip_sound", 1.01, 8, "= 1"), ("sigmoid", -1.5, 8, "= -0.0417"),
    ("sigmoid", 0, 8, "= 0.475"), ("sigmoid_sound", 0, 8, "= 0"),
    ("sigmoid", 0.2, 8, "= 0.575"), ("sigmoid_sound", 0.2, 8, "= 1"),
    ("length_normalized", 1, 8, "= 0.125"), ("length_normalized_sound", 1, 8, "= 0.03125"),
    ("length_normalized", 1, 32, "= 0.03125"), ("length_normalized_sound", 1, 32, "= 0.03125"),
]
DIRECTIONS = [  # estimator, rule, its threshold, claim about the lowest cosine
    ("k1", "clip", 1.0, "< 0"), ("k3", "clip", 1.0, "< 0"), ("k3", "clip_sound", 5.0, "> 0.95"),
]


def lowest_cosine(estimator, rule, clip_threshold, n_policies=20):
    """Returns the lowest cosine between the expected gradient with the rule and without it; drift
    of 3 nats, one step."""
    world = make_world(7, 1)
    adapted = term(estimator, adaptation=rule, clip_threshold=clip_threshold)
    cosines = []
    for seed in range(n_policies):
        ref, policy, _ = random_policies(world, 3.0, 0.0, seed)
        plain, ours = (expected_gradient(world, policy, ref, policy, kl)
                       for kl in (term(estimator), adapted))
        cosines.append(cosine(plain, ours))
    return min(cosines)


START_BETA = 0.04


def walk(rule, n_steps, kl_of, reward_of):
    """Returns beta and KL of each step under one of starter's coefficient rules. kl_of(step, beta)
    is what beta acts on."""
    controller = starter.KLController(START_BETA, starter.KLSettings(adaptation=rule, target=0.1))
    betas, kls = [], []
    for step in range(n_steps):
        betas.append(controller.beta)
        kls.append(kl_of(step, controller.beta))
        controller.update(kls[-1], reward_of(step))
    return betas, kls


def simulated_policy(reward_gradient, quiet=100):
    """Returns kl_of(step, beta) of a policy at distance x from the reference: the reward moves it
    away by reward_gradient per step, the penalty moves it back by beta * x.

    KL = x^2 / 2, measured with 10 % noise. The reward moves nothing in the first `quiet` steps:
    no response is solved yet.
    """
    x = 0.0
    rng = random.Random(0)

    def kl_of(step, beta):
        nonlocal x
        x += (reward_gradient if step >= quiet else 0.0) - beta * x
        return x * x / 2 * rng.gauss(1, 0.1)

    return kl_of


def adaptive_rows():
    """Returns the rows of kl_adaptive.csv, a rule as printed before its sound form. KL and slopes
    are per token; the coefficient starts at 0.04, the target is 0.1 nats.

    At reward gradient 0.02 nothing is claimed of the largest KL: both target rules fall while the
    policy does not move yet, the sound one to its floor, and a policy that then moves as fast as
    this is past the target before either has come back.
    """
    rows = []

    def add(experiment, rule, at, value, bar=""):
        rows.append({"experiment": experiment, "rule": rule, "at": at, "value": value, "bar": bar,
                     "holds": bar and holds(value, bar)})

    for rule, kl, n_tokens, bar in SLOPES:
        add("slope", rule, f"KL {kl}, {n_tokens} tokens", slope(rule, kl, n_tokens), bar)
    for estimator, rule, threshold, bar in DIRECTIONS:
        add("lowest cosine to the gradient without it", rule, f"{estimator}, 20 policies",
            lowest_cosine(estimator, rule, threshold), bar)
    for rule, bar in (("dynamic", "< 0.1"), ("dynamic_sound", "> 0.7")):
        add("beta after 100 steps / first, reward 0.75 +- 0.08", rule, "median of 20",
            beta_left(rule), bar)
    for rule, bar in (("dynamic", "= 0"), ("dynamic_sound", "> 0.99")):
        betas, _ = walk(rule, 1001, lambda step, beta: 0.1, lambda step: 0.5)
        add("beta / the step before, reward 0.5", rule, "step 1000", betas[1000] / betas[999], bar)
    for gradient, bars in ((0.005, ("> 5", "< 2")), (0.02, ("", ""))):
        paths = {rule: walk(rule, 1101, simulated_policy(gradient), lambda step: 0.5)
                 for rule in ("target", "target_sound")}
        for (rule, (betas, kls)), bar in zip(paths.items(), bars):
            add("largest KL / target", rule, f"reward gradient {gradient}", max(kls) / 0.1, bar)
        for (rule, (betas, kls)), bar in zip(paths.items(), ("< 1e-9", "> 0.00399")):
            add("lowest beta", rule, f"reward gradient {gradient}", min(betas), bar)
    return rows


def beta_left(rule):
    """Returns beta after 100 steps / first, where the reward stays below the threshold on average:
    the median of 20 seeds."""
    left = []
    for seed in range(20):
        rng = random.Random(seed)
        betas, _ = walk(rule, 101, lambda step, beta: 0.1, lambda step: rng.gauss(0.75, 0.08))
        left.append(betas[100] / START_BETA)
    return sorted(left)[10]


if __name__ == "__main__":
    run({"adaptive": adaptive_rows}, sys.argv[1:])
