"""Sets functions of support/ in the place of starter.py's, by name, unless you have edited yours.

python -m support.edits    writes shipped.json anew, after a change of starter.py that is to stay
"""

import hashlib
import inspect
import json
import re
from pathlib import Path

import starter

SHIPPED_FILE = Path(__file__).with_name("shipped.json")
SHIPPED = json.loads(SHIPPED_FILE.read_text("utf-8"))  # name of a function: its fingerprint
OWN = {}  # name: the function of starter.py that another one has replaced
IN_PLACE = {}  # name: that other one


def fingerprint(function):
    """A text that changes with what a function does, but not with its comments, docstring or
    layout; "" where its source cannot be had."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    code = re.sub(r'"""[\s\S]*?"""|\s#.*', "", source)
    return hashlib.sha256("".join(code.split()).encode()).hexdigest()[:12]


def own(name):
    """Returns the function of this name that stands in starter.py."""
    return OWN.get(name, getattr(starter, name))


def is_shipped(name):
    """Whether the function of this name in starter.py is as it was shipped."""
    return fingerprint(own(name)) == SHIPPED[name]


def restore():
    """Gives starter.py its own functions back, but for those that you have set since."""
    for name in OWN:
        if getattr(starter, name) is IN_PLACE[name]:
            setattr(starter, name, OWN[name])
    OWN.clear()


def replace(**functions):
    """Each takes the place of the function of this name in starter.py, unless that was edited."""
    wrap(**{name: functions[name] for name in functions if is_shipped(name)})


def wrap(**functions):
    """Each takes the place of the function of this name, which it calls, edited or not."""
    for name in functions:
        OWN.setdefault(name, getattr(starter, name))
    vars(starter).update(functions)
    IN_PLACE.update(functions)


def log_edits(cfg):
    """Says which functions of starter.py were edited, and which of support/ run."""
    edited = [name for name in SHIPPED if hasattr(starter, name) and not is_shipped(name)]
    if edited:
        print(f"edited, and run as they are: {', '.join(edited)}")
    if edited and cfg.engine == "vllm":
        print("vLLM draws the tokens by itself: edits of sampling have no part in it")
    print(f"of support/ run: {', '.join(sorted(OWN)) or 'no functions'}")


def write_shipped():
    """Writes the fingerprints of starter.py's functions as they are now."""
    fingerprints = {}
    for name, value in vars(starter).items():
        if getattr(value, "__module__", None) == "starter":
            fingerprints[name] = fingerprint(value)
    SHIPPED_FILE.write_text(json.dumps(fingerprints, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    write_shipped()
