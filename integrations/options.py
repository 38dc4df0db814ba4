"""main()'s parameters of the KL penalty, for trainers that are not starter.py."""

import starter
from support import adaptive_rules, kl_checks, rules  # noqa: F401  the first adds rules

NAMES = {name for name in vars(starter.cfg_with()) if name.startswith("kl_")}
NAMES |= rules.OF_A_RULE | {"max_new_tokens", "reproduce_paper"}


def checked_kl_settings(**options):
    """Values of some of NAMES -> starter.KLSettings; what is None has main()'s default. Raises
    InputError for what is not known or changes nothing, and for a term that penalises nothing or
    the wrong thing, unless reproduce_paper=True."""
    for name in options:
        starter.check_known("an option", name, NAMES)
    given = {name: value for name, value in options.items() if value is not None}
    cfg = starter.cfg_with(**given, use_kl_penalty=True)
    rules.check_kinds(cfg, vars(cfg))
    settings = starter.KLSettings(**{name: getattr(cfg, name) for name in NAMES})
    kl_checks.check_kl(cfg)
    return settings
