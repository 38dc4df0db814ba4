"""Rules of adaptive KL; importing this adds them to starter.TERM_RULES and COEFFICIENT_RULES.

The names without _sound (and target, in starter.py) are the forms of the adaptive-KL documents, to
reproduce them; what is wrong with each stands beside it, and README_KL.md has the measurements. A
name that ends in _sound is the form that does what the name promises.
"""

import math

import torch.nn.functional as F

import starter


def clip(kl, d, mask, cfg):
    """The gradient is 0 for the tokens that drifted most."""
    return kl.clamp(max=cfg.kl_clip_threshold or 1.0)


def clip_sound(kl, d, mask, cfg):
    """The gradient is that of d, cut to the threshold."""
    threshold = cfg.kl_clip_threshold or 5.0
    return kl * (threshold / d.abs()).clamp(max=1.0)


def sigmoid(kl, d, mask, cfg):
    """Close to a constant factor of 0.5."""
    return kl * F.sigmoid(kl - cfg.kl_target)


def sigmoid_sound(kl, d, mask, cfg):
    """The slope rises from 0 below the target to 1 above it."""
    return F.softplus(kl - cfg.kl_target, beta=10 / cfg.kl_target)


def length_normalized(kl, d, mask, cfg):
    """In the reward it makes long responses cheap."""
    return kl / mask.sum(dim=1, keepdim=True).clamp(min=1)


def length_normalized_sound(kl, d, mask, cfg):
    """Each token weighs the same, in short and in long responses."""
    return kl / cfg.max_new_tokens


def moving_average(state, name, value):
    """Keeps 0.8 of the average before and 0.2 of this value. The first value is the average."""
    state[name] = 0.8 * state.get(name, value) + 0.2 * value
    return state[name]


def target_sound(controller, cfg, kl, reward):
    """Small steps in log beta on a moving average, since the policy needs some steps to follow."""
    ratio = moving_average(controller.state, "kl", kl) / cfg.kl_target
    beta = controller.beta * max(1 / math.e, min(math.e, ratio)) ** 0.1
    return max(0.1 * controller.start, min(10 * controller.start, beta))


def dynamic(controller, cfg, kl, reward):
    """It only ever falls: one lucky batch is enough."""
    if controller.state["step"] >= cfg.beta_schedule_steps:
        return cfg.beta_min
    beta = controller.beta
    if reward > cfg.reward_threshold:
        beta *= cfg.dynamic_beta_decay
    return max(cfg.beta_min, beta)


def dynamic_sound(controller, cfg, kl, reward):
    """Moves once in 10 steps by the average reward, up as well as down, below a ceiling that
    falls to a floor above 0."""
    step = controller.state["step"]
    start = controller.start
    floor = max(cfg.beta_min, 0.1 * start)
    ceiling = start * (floor / start) ** (step / cfg.beta_schedule_steps)
    beta = controller.beta
    average = moving_average(controller.state, "reward", reward)
    if step % 10 == 0:
        if average > cfg.reward_threshold:
            beta *= cfg.dynamic_beta_decay
        else:
            beta /= cfg.dynamic_beta_decay
    return max(floor, min(ceiling, beta))


for rule in (clip, clip_sound, sigmoid, sigmoid_sound, length_normalized, length_normalized_sound):
    starter.TERM_RULES.setdefault(rule.__name__, rule)  # one of yours stays
for rule in (target_sound, dynamic, dynamic_sound):
    starter.COEFFICIENT_RULES.setdefault(rule.__name__, rule)
