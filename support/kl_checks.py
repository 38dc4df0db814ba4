"""Refuses KL terms that are known not to work, for main() and for the integrations."""

from starter import ESTIMATORS, InputError


def check_kl(cfg):
    """Raises InputError for a KL term whose gradient is zero or wrong, unless a paper is to be
    reproduced; README_KL.md has a table of the others. cfg: main()'s."""
    if not cfg.use_kl_penalty:
        return
    if not cfg.kl_coef > 0:
        raise InputError(
            f"kl_coef = {cfg.kl_coef!r} penalises nothing; use a number above 0, or "
            "use_kl_penalty = False"
        )
    for rule in {"dynamic", "target"}.intersection(cfg.kl_adaptation_method.split("+")):
        print(f"README_KL.md advises against {rule}; use kl_adaptation_method = '{rule}_sound'")
    fault = fault_of(cfg)
    if fault and not cfg.reproduce_paper:
        raise InputError(f"{fault}, or reproduce_paper = True to run it anyway")


def fault_of(cfg):
    """Returns why the gradient of this KL term is zero or wrong, and what to use, or None. What
    kl_in = "reward" needs is checked by starter.check_names."""
    is_k1 = cfg.kl_estimator == "k1"
    to_go = cfg.kl_in == "loss_to_go"
    as_written = cfg.kl_gradient == "as_written" and cfg.kl_in != "reward"
    if as_written and is_k1:
        return (
            "kl_estimator = 'k1' with kl_gradient = 'as_written' has an expected gradient of zero "
            "on the policy's own samples; use kl_gradient = 'reverse'"
        )
    if as_written and to_go:
        return (
            "kl_gradient = 'as_written' with kl_in = 'loss_to_go' is the gradient of no "
            "divergence; use kl_gradient = 'reverse'"
        )
    if to_go and cfg.kl_estimator == "k2":
        return (
            "kl_estimator = 'k2' with kl_in = 'loss_to_go' charges earlier tokens with a biased "
            "KL; use kl_estimator = 'exact'"
        )
    if is_k1 and "sigmoid" in cfg.kl_adaptation_method:
        return (
            "kl_adaptation_method = 'sigmoid' reverses the gradient where k1 is negative; use "
            "kl_estimator = 'exact'"
        )
    if "clip_sound" in cfg.kl_adaptation_method:
        if as_written or cfg.kl_estimator not in ESTIMATORS:
            return (
                "kl_adaptation_method = 'clip_sound' cuts the log-ratios of sampled tokens, which "
                "neither 'as_written' nor 'exact' has as its gradient; use kl_estimator = 'k3' "
                "and kl_gradient = 'reverse'"
            )
