"""main()'s parameters of the KL penalty, for trainers that are not starter.py."""
import inspect
import tempfile
from types import SimpleNamespace

import starter
from support import adaptive_rules, kl_checks, rules  # noqa: F401  the first adds rules

DEFAULTS = {name: parameter.default
            for name, parameter in inspect.signature(starter.main).parameters.items()}
NAMES = sorted({name for name in DEFAULTS if name.startswith("kl_")} | rules.OF_A_RULE
               | {"max_new_tokens", "reproduce_paper"})


def checked_kl_settings(**options):
    """Values of some of NAMES -> starter.KLSettings; what is None has main()'s default. Raises
    InputError for what is not known or changes nothing, and for a term that penalises nothing or
    the wrong thing, unless reproduce_paper=True."""
    for name in options:
        if name not in NAMES:
            raise starter.InputError(f"{name} is not an option of the KL penalty; "
                                     f"{starter.nearest(name, NAMES)}")
    given = {name: value for name, value in options.items() if value is not None}
    cfg = SimpleNamespace(**DEFAULTS | given | {
        "use_kl_penalty": True, "out_dir": tempfile.gettempdir()})  # where nothing is written
    rules.check_settings(cfg)
    starter.check_kl_names(cfg)
    kl_checks.check_kl(cfg)
    return starter.KLSettings(**{name: getattr(cfg, name) for name in given})
