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
    "clip": lambda kl, lengths, s: kl.clamp(max=s.clip_threshold),
    # Close to a constant factor of 0.5.
    "sigmoid": lambda kl, lengths, s: torch.sigmoid(kl - s.target) * kl,
    # The slope rises from 0 below the target to 1 above it.
    "sigmoid_sound": lambda kl, lengths, s: s.target / 10 * F.softplus(10 * kl / s.target - 10),
    # In the reward it makes long responses cheap.
    "length_normalized": lambda kl, lengths, s: kl / lengths,
    "length_normalized_sound": lambda kl, lengths, s: kl / s.max_new_tokens,
}


def target_rule(c, s, kl, reward):
    """Without bounds beta winds down while the policy is still at the reference."""
    if kl > 1.5 * s.target:
        return c.beta * 1.5
    return c.beta * 0.75 if kl < 0.5 * s.target else c.beta


def dynamic_rule(c, s, kl, reward):
    """It only ever falls: one lucky batch is enough."""
    if c.state["step"] >= s.beta_schedule_steps:
        return s.beta_min
    return max(s.beta_min, c.beta * (s.dynamic_beta_decay if reward > s.reward_threshold else 1.0))


def dynamic_sound_rule(c, s, kl, reward):
    """Moves once in 10 steps by the average reward, up as well as down, below a ceiling that
    falls to a floor above 0."""
    floor = max(s.beta_min, 0.1 * c.start)
    progress = min(1.0, c.state["step"] / s.beta_schedule_steps)
    ceiling = c.start * (floor / c.start) ** progress
    beta = c.beta
    if c.state["step"] % 10 == 0:
        reached = c.state["reward"] > s.reward_threshold
        beta = beta * s.dynamic_beta_decay if reached else beta / s.dynamic_beta_decay
    return max(floor, min(ceiling, beta))


starter.COEFFICIENT_RULES |= {"target": target_rule, "dynamic": dynamic_rule,
                              "dynamic_sound": dynamic_sound_rule}
