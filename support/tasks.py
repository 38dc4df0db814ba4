"""Tasks whose problems are made up: Countdown and addition; and files and data sets of many kinds.

Importing this adds the tasks to starter.TASKS.
read_problems takes the place of starter.py's: it reads data sets of the Hugging Face hub and other
column names too, and says in one sentence what is wrong with a file.
"""

import ast
import csv
import io
import itertools
import json
import operator
import os
import random
import re
from fractions import Fraction
from pathlib import Path

import starter
from starter import InputError, is_held_out
from support import edits, rules

TINY = str(Path(__file__).resolve().parent / "tiny")  # the built-in model; see lab/build_tiny.py

# Countdown: an expression of given numbers that equals a target. Addition: a sum.

COUNTDOWN_PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use each number "
    "exactly once, with + - * / and parentheses. Think in a few short lines, then give the "
    "expression alone in answer tags, for example <answer>(1 + 2) * 3</answer>."
)
# Two numbers up to 50, in the short form that the built-in model was taught.
SMALL_COUNTDOWN = dict(n_numbers=(2,), max_number=50, prompt="make {target}: {numbers}")
N_TRAIN_PROBLEMS = 10_000  # of Countdown, which are made up
MAX_TARGET = 99


def random_countdown(rng, n_numbers, max_number):
    """Returns (numbers, target, solution). Random operations on the numbers give the target, so
    that a solution exists. Intermediate results are whole and not negative."""
    numbers = [rng.randint(1, max_number) for _ in range(n_numbers)]
    pool = [(number, str(number)) for number in numbers]
    while len(pool) > 1:
        a, a_text = pool.pop(rng.randrange(len(pool)))
        b, b_text = pool.pop(rng.randrange(len(pool)))
        results = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b and a % b == 0 else -1}
        op = rng.choice([op for op, x in results.items() if x >= 0])
        pool.append((results[op], f"({a_text}{op}{b_text})"))
    target, solution = pool[0]
    return numbers, target, solution[1:-1]


def make_countdown(n, held_out, seed, n_numbers=(3, 4), max_number=99, prompt=COUNTDOWN_PROMPT):
    """Returns n problems, each of one of n_numbers many numbers. Held-out problems all differ, so
    that their count is the sample size of the reported interval."""
    rng = random.Random(f"{seed} {held_out}")
    problems, seen = [], set()
    in_vain = 0  # tries since the last problem
    while len(problems) < n:
        if in_vain == 20_000:
            raise InputError(
                f"n_eval_problems = {n}: only {len(problems)} different Countdown "
                f"problems were found; use n_eval_problems = {len(problems)} or fewer"
            )
        in_vain += 1
        numbers, target, solution = random_countdown(rng, rng.choice(n_numbers), max_number)
        key = (sorted(numbers), target)
        on_this_side = 1 <= target <= MAX_TARGET and is_held_out(*key) == held_out
        if not on_this_side or held_out and str(key) in seen:
            continue
        in_vain = 0
        seen.add(str(key))
        text = prompt.format(numbers=" ".join(map(str, numbers)), target=target)
        problems.append(
            {"prompt": text, "numbers": numbers, "target": target, "solution": solution}
        )
    return problems


def countdown_problems(cfg, **kind):
    """Three or four numbers up to 99, asked for in words; or another kind."""
    return (
        make_countdown(N_TRAIN_PROBLEMS, False, cfg.seed, **kind),
        make_countdown(cfg.n_eval_problems, True, cfg.seed, **kind),
    )


def addition_problems(cfg):
    """Sums of two numbers of two digits, for a small pretrained model. a + b and b + a are on the
    same side, for training or held out. The last number of a response is its answer."""
    pairs = list(itertools.product(range(10, 100), repeat=2))
    random.Random(0).shuffle(pairs)
    sides = {False: [], True: []}
    for a, b in pairs:
        problem = {"prompt": f"What is {a} + {b}?", "answer": str(a + b), "last_number": True}
        sides[is_held_out(min(a, b), max(a, b))].append(problem)
    return sides[False], sides[True]


OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def arithmetic(text):
    """Returns (value as an exact Fraction, the whole numbers used), or None where the text is not
    arithmetic. Only digits and + - * / ( ) are read, and nothing is executed."""
    used = []

    def value_of(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value_of(node.operand)
        if isinstance(node, ast.BinOp):  # no ** and no //
            return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
        raise KeyError(node)

    # A short text can hold neither a huge number nor deep nesting.
    if not re.fullmatch(r"[0-9+\-*/() ]{1,200}", text):
        return None
    try:
        return value_of(ast.parse(text.strip(), mode="eval").body), used
    except (KeyError, ZeroDivisionError, SyntaxError, MemoryError, RecursionError):
        return None


def score_countdown(response_text, problem):
    """1.0 where the answer in the tags is arithmetic on the problem's numbers, each used once, with
    the target as its value; 0.1 for another answer, 0.0 for none."""
    answer = starter.tagged_answer(response_text)
    if not answer:
        return 0.0
    value, used = arithmetic(answer) or (None, [])
    solves = value == problem["target"] and sorted(used) == sorted(problem["numbers"])
    return 1.0 if solves else 0.1


def last_number(text):
    """The last number in a text: "23 + 45 = 68." -> "68". "" where its end has none."""
    end = text if len(text) <= 200 else re.sub(r"^\S*", "", text[-200:])  # no half numbers
    found = re.findall(r"(?:(?<![\w)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", end, re.ASCII)
    return found[-1].rstrip(",") if found else ""


def score_last_number(response_text, problem):
    """1.0 where the last number of the text is the answer, which needs no tags; otherwise 0.0."""
    return float(starter.same_answer(last_number(response_text), str(problem["answer"])))


starter.TASKS |= {
    "addition": addition_problems,
    "countdown": countdown_problems,
    "countdown_small": lambda cfg: countdown_problems(cfg, **SMALL_COUNTDOWN),
}


def score_answer(response_text, problem):
    """starter.score_answer for these tasks, and for any problem with "last_number"."""
    if "target" in problem and "numbers" in problem:
        return score_countdown(response_text, problem)
    if problem.get("last_number"):
        return score_last_number(response_text, problem)
    return edits.own("score_answer")(response_text, problem)


# Files and data sets -> problems.

QUESTION_PROMPT = (
    "{question}\nThink step by step in a few short lines, then give the answer alone in answer "
    "tags, for example <answer>42</answer>."
)
ROLES = ("system", "developer", "user", "assistant", "tool")  # of chat messages
TABLES = (".csv", ".json", ".jsonl", ".parquet")
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([^:]*))?(?::([^:]+))?")
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")


def read_problems(source):
    """A JSONL, JSON or CSV file, or "user/name", "user/name:configuration" or
    "user/name:configuration:split" of a data set on the Hugging Face hub (split "train") -> its
    problems.

    "prompt" is a text or a list of chat messages, which may be named "messages"; "question" or
    "problem" in its place is put into QUESTION_PROMPT. "answer", or "solution", is a text or a
    number; of one that ends in "#### 72" (GSM8K) or holds \\boxed{72} (MATH) it is 72. Other keys
    stay, for a reward of your own.
    """
    hub_name = HUB_NAME.fullmatch(str(source))
    if os.path.isfile(source):
        rows = rows_of_file(Path(source))
    elif hub_name and Path(source).suffix not in TABLES:
        rows = rows_of_hub(*hub_name.groups())
    else:
        known = [*starter.TASKS, *map(str, Path(source).parent.glob("*.jsonl"))]
        raise InputError(
            f"{str(source)!r} is no task, no file, and no 'user/name' of a data set on the Hugging "
            f"Face hub; {rules.nearest(source, known)}"
        )
    notes = set()
    problems = [as_problem(row, where, notes) for where, row in rows]
    if not problems:
        raise InputError(
            f"{source} has no lines; write an object with 'prompt' and 'answer' in each"
        )
    if notes:
        print(f"{source}: {len(problems)} problems; {'; '.join(sorted(notes))}")
    return problems


def text_of(path):
    """Returns the text of a file."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path} line {number} is no text in UTF-8 (byte 0x{content[error.start]:02x}); unpack "
            "the file, or save it as JSONL in that encoding"
        ) from None


def from_json(text, where):
    """Returns what a text in JSON stands for."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where} is not JSON ({error}): {text!r:.80}; write one whole object into each line"
        ) from None


def rows_of_file(path):
    """Yields (where it stands, the content) of each problem in a file."""
    text = text_of(path)
    if path.suffix == ".csv":
        for number, row in enumerate(csv.DictReader(io.StringIO(text)), 1):
            yield f"{path} row {number}", row
    elif text.lstrip().startswith("["):
        for number, row in enumerate(from_json(text, path), 1):
            yield f"{path} item {number}", row
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                where = f"{path} line {number}"
                yield where, from_json(line, where)


def rows_of_hub(name, configuration, split):
    """Yields (where it stands, the row) of each row of a split of a data set."""
    try:
        from datasets import load_dataset

        splits = load_dataset(name, configuration or None)
    except ModuleNotFoundError as error:
        raise InputError(f"data set {name!r} needs the package {error.name}; install it") from None
    except Exception as error:  # whatever the library raises over a network and others' files
        raise InputError(
            f"data set {name!r} cannot be loaded ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}); check the network, and the name "
            "'user/name:configuration'"
        ) from error
    split = split or "train"
    rules.check_known(f"split of {name!r}", split, list(splits))
    others = [f"{name}:{configuration or ''}:{other}" for other in splits if other != split]
    print(f"{name}: the split {split!r}; for eval_file there are also {others}")
    for i, row in enumerate(splits[split]):
        yield f"{name}, {split} row {i}", row


def check_chat(chat, where):
    """Raises InputError where a list is no chat."""
    for message in chat:
        is_message = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_message or message.get("role") not in ROLES:
            raise InputError(
                f"{where} has the chat message {message!r:.80}; give it a text under 'content' and "
                f"a 'role' of {ROLES}"
            )
    if all(message["role"] != "user" for message in chat):
        raise InputError(f"{where} has a chat without a user's message; add one")


def column(row, names, types, where):
    """Returns the first of these keys that a row has, and what stands there."""
    key = next((name for name in names if name in row), names[0])
    value = row.get(key)
    if type(value) not in types or value == [] or not str(value).strip() or value != value:
        other = "chat messages" if list in types else "a number"
        raise InputError(
            f"{where}, with the keys {[*row]}, has {value!r:.80} under {key!r}; give a text or "
            f"{other}"
        )
    return key, value


def as_problem(row, where, notes):
    """Returns the problem in a row. What was understood without being said goes into notes."""
    if not isinstance(row, dict):
        raise InputError(f"{where} is {row!r:.80}; write an object with 'prompt' and 'answer'")
    key, prompt = column(row, ("prompt", "question", "problem", "messages"), (str, list), where)
    if isinstance(prompt, list):
        check_chat(prompt, where)
        if prompt[-1]["role"] == "assistant":
            row = {"answer": prompt[-1]["content"], **row}
            prompt = prompt[:-1]
            notes.add("the assistant's last message is the answer, where there is no 'answer'")
    elif key != "prompt":
        notes.add(f"{key!r} is the prompt, with a request for answer tags; 'prompt' gets none")
        prompt = QUESTION_PROMPT.format(question=prompt)
    key, answer = column(row, ("answer", "solution"), (str, int, float), where)
    _, mark, final = str(answer).rpartition("####")
    final = final.strip()
    if key == "solution" and not mark:
        final = (BOXED.findall(final) or [final])[-1]
    if key == "solution" or mark:
        notes.add(f"of {key!r} the answer is what follows '####' or is in the last \\boxed, if any")
    if not final or "<answer>" in final:
        raise InputError(
            f"{where} has {answer!r:.80} under {key!r}; write what shall stand in the answer tags, "
            "without them"
        )
    last_number = row.get("last_number")
    if last_number not in (None, True) or last_number and not starter.NUMBER.fullmatch(final):
        raise InputError(
            f"{where} has {last_number!r:.80} under 'last_number' and {answer!r:.80} under "
            f"{key!r}; write true and a number, or leave last_number out"
        )
    return {**row, "prompt": prompt, "answer": final}
