"""Rules of adaptive KL beyond those of starter.py; importing this adds them to its dicts.

The names without _sound are the forms of the adaptive-KL documents, to reproduce them; what is
wrong with each stands beside it, and README_KL.md has the measurements. A name that ends in _sound
is the form that does what the name promises. Arguments are those of starter.TERM_RULES and
starter.COEFFICIENT_RULES.
"""
import torch
import torch.nn.functional as F

import starter

starter.TERM_RULES |= {
    # The gradient is 0 for the tokens that drifted most.
    "clip": lambda kl, lengths, cfg: kl.clamp(max=cfg.kl_clip_threshold or 1.0),
    # Close to a constant factor of 0.5.
    "sigmoid": lambda kl, lengths, cfg: torch.sigmoid(kl - cfg.kl_target) * kl,
    # The slope rises from 0 below the target to 1 above it.
    "sigmoid_sound": lambda kl, lengths, cfg: (
        cfg.kl_target / 10 * F.softplus(10 * kl / cfg.kl_target - 10)),
    # In the reward it makes long responses cheap.
    "length_normalized": lambda kl, lengths, cfg: kl / lengths,
    "length_normalized_sound": lambda kl, lengths, cfg: kl / cfg.max_new_tokens,
}


def target_rule(c, cfg, kl, reward):
    """Without bounds beta winds down while the policy is still at the reference."""
    if kl > 1.5 * cfg.kl_target:
        return c.beta * 1.5
    return c.beta * 0.75 if kl < 0.5 * cfg.kl_target else c.beta


def dynamic_rule(c, cfg, kl, reward):
    """It only ever falls: one lucky batch is enough."""
    if c.state["step"] >= cfg.beta_schedule_steps:
        return cfg.beta_min
    factor = cfg.dynamic_beta_decay if reward > cfg.reward_threshold else 1.0
    return max(cfg.beta_min, c.beta * factor)


def dynamic_sound_rule(c, cfg, kl, reward):
    """Moves once in 10 steps by the average reward, up as well as down, below a ceiling that
    falls to a floor above 0."""
    floor = max(cfg.beta_min, 0.1 * c.start)
    progress = min(1.0, c.state["step"] / cfg.beta_schedule_steps)
    ceiling = c.start * (floor / c.start) ** progress
    beta = c.beta
    if c.state["step"] % 10 == 0:
        reached = c.state["reward"] > cfg.reward_threshold
        beta = beta * cfg.dynamic_beta_decay if reached else beta / cfg.dynamic_beta_decay
    return max(floor, min(ceiling, beta))


starter.COEFFICIENT_RULES |= {"target": target_rule, "dynamic": dynamic_rule,
                              "dynamic_sound": dynamic_sound_rule}
