"""Puts functions of support/ in the place of starter.py's mechanics, unless you have edited yours,
and says which functions you have edited.

python -m support.edits    writes shipped.json anew, after a change of starter.py that is to stay
"""

import ast
import functools
import hashlib
import inspect
import json
import sys
import textwrap
from pathlib import Path

import starter

SHIPPED_FILE = Path(__file__).with_name("shipped.json")
SHIPPED = json.loads(SHIPPED_FILE.read_text("utf-8"))  # name: fingerprint, and one of each line

SERVED = starter.MECHANICS
# name: the mechanic that stands in starter.py, also where another one runs in its place
OWN = dict(SERVED)

# What a mechanic of starter.py calls, and the one of support/ does not
PARTS = {
    "token_statistics": ["response_logits"],
    "start_decoding": ["read_on"],
    "load_policy_into_vllm_instance": ["load_weights_in_worker"],
}


# 1. What was edited.


def source_of(function):
    """Returns the text of a function, or "" where it cannot be had."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""


def meaning(node):
    """A parsed program -> a text that changes with what it does, and not with its comments,
    docstrings and layout. It is the same in every version of Python, as ast.unparse's is not."""
    if isinstance(node, list):
        return f"[{','.join(map(meaning, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list):
            value = [x for x in value if not is_text(x)]
        if value not in (None, []) and name not in ("ctx", "kind"):
            parts.append(f"{name}={meaning(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def is_text(statement):
    """Whether this is a docstring, or another constant that stands alone."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def short_hash(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def fingerprint(function):
    """A text that changes with what a function does; "" where its source cannot be had."""
    try:
        return fingerprint_of(function)
    except TypeError:  # it has no hash, as an object of a dataclass that can be called
        return ""


@functools.cache
def fingerprint_of(function):
    source = source_of(function)
    if not source:
        return ""
    try:
        return short_hash(meaning(ast.parse(source)))
    except SyntaxError:  # of a lambda, this is the line that holds it
        return short_hash(source)


def is_shipped(*names):
    """Whether the functions of these names in starter.py are as they were shipped."""
    return all(fingerprint(getattr(starter, name)) == SHIPPED[name]["meaning"] for name in names)


def called_by(name):
    """Returns the names of all functions of starter.py that this one calls, directly or through
    others, with its own."""
    found = {name}
    waiting = [name]
    while waiting:
        source = source_of(getattr(starter, waiting.pop()))
        try:
            tree = ast.parse(source)
        except SyntaxError:  # of a lambda, this is the line that holds it
            continue
        for node in ast.walk(tree):
            called = getattr(node, "id", None)
            if called == "main":  # whose parameters cfg_with reads
                continue
            if called in SHIPPED and called not in found:
                found.add(called)
                waiting.append(called)
    return found


def edited_names():
    """Returns the names of the functions of starter.py that were edited."""
    return [name for name in SHIPPED if hasattr(starter, name) and not is_shipped(name)]


# 2. What runs in the place of mechanics.


def replace(**functions):
    """Each runs in the place of the mechanic of this name, unless that was edited."""
    for name in functions:
        if name not in starter.MECHANICS:
            raise ValueError(
                f"{name} is none of the mechanics of starter.py ({sorted(starter.MECHANICS)}), "
                "and nothing else may be replaced"
            )
        if is_shipped(name, *PARTS.get(name, [])):
            starter.MECHANICS[name] = functions[name]


def replaced_names():
    """Returns the names of the mechanics in whose place others run."""
    return sorted(name for name in OWN if starter.MECHANICS[name] is not OWN[name])


def check_is_served():
    """Raises InputError where starter.py was loaded anew, after what of support/ serves it."""
    if starter.MECHANICS is not SERVED:
        raise starter.InputError(
            "starter.py was loaded anew, and support/ still serves the one before; start Python, "
            "or the kernel of the notebook, again"
        )


def restore(*names):
    """Has these mechanics of starter.py run again, or all."""
    for name in names or OWN:
        starter.MECHANICS[name] = OWN[name]


def log_edits(unused):
    """Says which functions of starter.py were edited, and which of support/ run. unused: those that
    a lone copy alone calls."""
    edited = edited_names()
    acting = [name for name in edited if name not in unused]
    if acting:
        print(f"edited, and run as they are: {', '.join(acting)}")
    if len(acting) < len(edited):
        print(f"edited, and without a part beside support/: {', '.join({*edited} - {*acting})}")
    print(f"of support/ run: {', '.join(replaced_names()) or 'no functions'}")


# 3. Whether an edit has a part in the run.

NOT_IN_A_STEP = {"evaluate", "log_eval", "solved_by_skill"}


def lines_of(function):
    """Returns the lines of a function, and the number of the first in its file; no lines where its
    source cannot be had."""
    try:
        return inspect.getsourcelines(function)
    except (OSError, TypeError):
        return [], 0


def edited_lines(function, shipped):
    """Returns the numbers of a function's lines, in its file, that were not shipped with it: of
    train() up to the call that ends the look at a step. shipped: the hashes of those that were."""
    source, first = lines_of(function)
    edited = set()
    for n, line in enumerate(source, start=first):
        if short_hash(line.strip()) not in shipped:
            edited.add(n)
        if "after_step" in line:
            break
    return edited


class EditsInStep:
    """Looks which lines run, from its start to its end, of the functions that were edited. It says
    which functions have edits that none of these lines is of: they are in a branch, or a function,
    that these settings do not use."""

    def __init__(self, may_trace):
        self.edits = {}  # code: name of its function, lines that were edited and have not run
        for name in sorted(called_by("train") - NOT_IN_A_STEP):
            function = inspect.unwrap(getattr(starter, name))
            if inspect.isfunction(function) and source_of(function) and not is_shipped(name):
                lines = edited_lines(function, SHIPPED[name]["lines"])
                codes = [*codes_of(function.__code__)]
                if name == "train":  # whose inner function evaluates
                    codes = codes[:1]
                of_code = {line for code in codes for _, _, line in code.co_lines()}
                for code in codes:
                    self.edits[code] = name, lines & of_code
        self.ran = set()
        self.before = sys.gettrace()
        # A debugger, or what measures coverage, keeps its trace
        if may_trace and self.edits and self.before is None:
            sys.settrace(self.trace)

    def trace(self, frame, event, argument):
        if frame.f_code not in self.edits:
            return None
        name, lines = self.edits[frame.f_code]
        if frame.f_lineno in lines:
            self.ran.add(name)
        return self.trace

    def end(self):
        """Prints what had no part."""
        if sys.gettrace() == self.trace:
            sys.settrace(self.before)
        elif self.edits:
            return
        edited = {name for name, lines in self.edits.values() if lines}
        for name in sorted(edited - self.ran):
            print(
                f"edited, but without a part in this step: {name}; these settings take another "
                "branch, or another engine or function in its place"
            )


def codes_of(code):
    """Yields the code of a function, and then that of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from codes_of(constant)


def write_shipped():
    """Writes the fingerprints of starter.py's functions, and of their lines, as they are now."""
    shipped = {}
    for name, value in vars(starter).items():
        if getattr(value, "__module__", None) == "starter":
            lines = {short_hash(line.strip()) for line in source_of(value).split("\n")}
            shipped[name] = {"meaning": fingerprint(value), "lines": sorted(lines)}
    text = ",\n".join(f" {json.dumps(name)}: {json.dumps(x)}" for name, x in shipped.items())
    SHIPPED_FILE.write_text(f"{{\n{text}\n}}\n", "utf-8")


if __name__ == "__main__":
    write_shipped()
