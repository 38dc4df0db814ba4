"""Refuses KL terms that are known not to work, for main() and for the integrations."""
import math

from starter import ESTIMATORS, TERM_RULES, InputError, rule_among


def check_kl(cfg):
    """Raises InputError for a KL term whose gradient is zero or wrong, unless a paper is to be
    reproduced. Returns lines about others that are not what their name says. cfg: use_kl_penalty,
    kl_coef, reproduce_paper, perhaps loss_average, and the KL term's."""
    in_reward = cfg.kl_in == "reward"
    to_go = cfg.kl_in == "loss_to_go"
    as_written = cfg.kl_gradient == "as_written" and not in_reward
    term = rule_among(TERM_RULES, cfg) or ""
    if not cfg.use_kl_penalty:
        return []
    if not 0 < cfg.kl_coef < math.inf:
        raise InputError(f"kl_coef = {cfg.kl_coef!r} with use_kl_penalty = True penalises nothing; "
                         "use a number above 0, or use_kl_penalty = False")
    for wrong, remedy, why in (
        (in_reward and cfg.kl_estimator != "k1", "kl_estimator = 'k1'",
         f"kl_estimator = {cfg.kl_estimator!r} with kl_in = 'reward' does not see the sign of the "
         "log-ratio, so that its gradient has no fixed direction"),
        (as_written and cfg.kl_estimator == "k1", "kl_gradient = 'reverse'",
         "kl_estimator = 'k1' with kl_gradient = 'as_written' has an expected gradient of zero on "
         "the policy's own samples"),
        (as_written and to_go, "kl_gradient = 'reverse'",
         "kl_gradient = 'as_written' with kl_in = 'loss_to_go' is the gradient of no divergence"),
        (to_go and cfg.kl_estimator == "k2", "kl_estimator = 'exact'",
         "kl_estimator = 'k2' with kl_in = 'loss_to_go' charges earlier tokens with a biased KL"),
        ("sigmoid" in term and cfg.kl_estimator == "k1", "kl_estimator = 'exact'",
         f"kl_adaptation_method = {cfg.kl_adaptation_method!r} reverses the gradient where k1 is "
         "negative"),
        (term == "clip_sound" and (as_written or cfg.kl_estimator == "exact"),
         "kl_estimator = 'k3'",
         "kl_adaptation_method = 'clip_sound' clamps the log-ratios of sampled tokens, which "
         "neither 'as_written' nor 'exact' uses in the gradient"),
    ):
        if wrong and not cfg.reproduce_paper:
            raise InputError(f"{why}; use {remedy}, or reproduce_paper = True to run it anyway")
    one_gradient = cfg.kl_gradient == "reverse" and cfg.kl_in == "loss" and not term
    return [f"KL term: {note}" for applies, note in (
        (one_gradient and cfg.kl_estimator in ESTIMATORS,
         f"{cfg.kl_estimator} is its value only; the gradient, which all sampled estimators share, "
         "is that of KL(policy || reference)"),
        (as_written and cfg.kl_estimator == "k2",
         "k2 as written has the gradient of reverse KL in a rollout's first epoch only"),
        (as_written and cfg.kl_estimator == "k3",
         "k3 as written has the gradient of forward KL(reference || policy)"),
        (to_go and cfg.kl_estimator == "k3", "the k3 of later tokens has no bound and enters the "
         "gradient; 'exact' has less variance"),
        (cfg.kl_in != "loss" and getattr(cfg, "loss_average", None) == "grpo",
         f"kl_in = {cfg.kl_in!r} under loss_average = 'grpo' is weighted by 1 / own length: not "
         "the gradient of the sequence KL, which 'dr_grpo' gives"),
    ) if applies]
