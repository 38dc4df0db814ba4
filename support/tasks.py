"""Tasks whose problems are made up: Countdown and addition; and files and data sets of many kinds.

Importing this adds the tasks to starter.TASKS.
read_rows, which starter.read_problems calls, reads data sets of the Hugging Face hub and other
column names too, and says in one sentence what is wrong with a file.
"""

import ast
import csv
import difflib
import gzip
import io
import itertools
import json
import operator
import random
import re
from fractions import Fraction
from pathlib import Path

import numpy

import starter
from starter import InputError, is_held_out

TINY = str(Path(__file__).resolve().with_name("tiny"))  # the built-in model; see lab/build_tiny.py

# Countdown: an expression of given numbers that equals a target. Addition: a sum.

COUNTDOWN_PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use each number "
    "exactly once, with + - * / and parentheses. Think in a few short lines, then give the "
    "expression alone in answer tags, for example <answer>(1 + 2) * 3</answer>."
)
# Two numbers up to 50, in the short form that the built-in model was taught.
SMALL_COUNTDOWN = dict(n_numbers=(2,), max_number=50, prompt="make {target}: {numbers}")
N_SMALL = 4_000  # of those to train on there are 4,226
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


def make_countdown(
    n, held_out, seed, n_numbers=(3, 4), max_number=99, prompt=COUNTDOWN_PROMPT, repeats=False
):
    """Returns n problems, or as many as there are, each of one of n_numbers many numbers. They all
    differ, unless repeats: then simple ones come more often. The same numbers in another order are
    another prompt to train on, but not another problem of an evaluation, whose count is the sample
    size of the reported interval."""
    rng = random.Random(f"{seed} {held_out}")
    problems, seen = [], set()
    for _ in range(100_000 + 100 * n):  # one in 30 tries fits, or more
        numbers, target, solution = random_countdown(rng, rng.choice(n_numbers), max_number)
        if not 1 <= target <= MAX_TARGET or is_held_out(sorted(numbers), target) != held_out:
            continue
        text = prompt.format(numbers=" ".join(map(str, numbers)), target=target)
        key = repr((sorted(numbers), target)) if held_out else text
        if repeats or key not in seen:
            seen.add(key)
            problems.append(
                {
                    "prompt": text,
                    "numbers": numbers,
                    "target": target,
                    "solution": solution,
                    "is_right": is_countdown_solution,
                }
            )
        if len(problems) == n:
            break
    return problems


def countdown_problems(cfg, n_train=10_000, **kind):
    """Three or four numbers up to 99, asked for in words; or another kind."""
    return (
        make_countdown(n_train, False, cfg.seed, **kind),
        make_countdown(cfg.n_eval_problems, True, cfg.seed, **kind),
    )


def addition_problems(cfg):
    """Sums of two numbers of two digits, for a small pretrained model. a + b and b + a are on the
    same side, for training or held out. The last number of a response is its answer."""
    pairs = list(itertools.product(range(10, 100), repeat=2))
    random.Random(0).shuffle(pairs)
    sides = [], []  # for training, held out
    for a, b in pairs:
        problem = {"prompt": f"What is {a} + {b}?", "answer": str(a + b), "last_number": True}
        sides[is_held_out(*sorted((a, b)))].append(problem)
    return sides


OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def arithmetic(text):
    """Returns the value as an exact Fraction, or None where the text is not arithmetic. Only digits
    and + - * / ( ) are read, and nothing is executed."""

    def value_of(node):
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        operation = OPERATIONS[type(node.op)]  # no ** and no //
        if isinstance(node, ast.UnaryOp):
            return operation(value_of(node.operand))
        return operation(value_of(node.left), value_of(node.right))

    # A short text can hold neither a huge number nor deep nesting.
    if not re.fullmatch(r"[0-9+\-*/() ]{1,200}", text):
        return None
    try:
        return value_of(ast.parse(text, mode="eval").body)
    except (AttributeError, KeyError, ZeroDivisionError, SyntaxError, MemoryError, RecursionError):
        return None


def is_countdown_solution(answer, problem):
    """Whether an answer is arithmetic on the problem's numbers, each used once, with the target as
    its value."""
    if arithmetic(answer) != problem["target"]:
        return False
    used = map(int, re.findall("[0-9]+", answer))
    return sorted(used) == sorted(problem["numbers"])


def small_countdown_problems(cfg):
    return countdown_problems(cfg, N_SMALL, **SMALL_COUNTDOWN)


starter.TASKS.setdefault("addition", addition_problems)  # one of yours stays
starter.TASKS.setdefault("countdown", countdown_problems)
starter.TASKS.setdefault("countdown_small", small_countdown_problems)


# Files and data sets -> problems.

QUESTION_PROMPT = (
    "{question}\nThink step by step in a few short lines, then give the answer alone in answer "
    "tags, for example <answer>42</answer>."
)
GYM = "reasoning_gym:"
N_GYM_PROBLEMS = 4_000  # of which a quarter is held out
ROLES = ("system", "developer", "user", "assistant", "tool")  # of chat messages
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([^:]*))?(?::([^:]+))?")
KINDS = {".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz"}  # of files


def read_rows(source):
    """A file or data set -> ("line 1" or "problem 1", the problem) of each.

    A file is JSONL, JSON, CSV (with commas, semicolons or tabs) or Parquet, perhaps packed by gzip.
    A data set of the Hugging Face hub is "user/name", "user/name:configuration" or
    "user/name:configuration:split" (split "train").

    "prompt" is a text or a list of chat messages, which may be named "messages"; "question" or
    "problem" in its place is put into QUESTION_PROMPT. "answer", or "solution", is a text, a
    number, or a list of right ones; of a text that ends in "#### 72" (GSM8K) or holds \\boxed{72}
    (MATH) it is 72. Other keys stay, for a reward of your own.

    "reasoning_gym:NAME", or "reasoning_gym:a+b", makes problems by that library.
    """
    if str(source).startswith(GYM):
        return rows_of_gym(str(source).removeprefix(GYM))
    hub_name = HUB_NAME.fullmatch(str(source))
    path = Path(source)
    problems = []
    place = "its beginning"
    try:
        if path.is_file():
            rows = rows_of_file(path)
        elif hub_name and not KINDS & set(path.suffixes):
            rows = numbered(rows_of_hub(*hub_name.groups()))
        else:
            beside = [str(x) for x in path.parent.iterdir()] if path.parent.is_dir() else []
            near = difflib.get_close_matches(str(source), [*starter.TASKS, *beside])
            raise InputError(
                f"{str(source)!r} is no task, no file, and no 'user/name' of a data set on the "
                f"Hugging Face hub; use one of {near or sorted(starter.TASKS)}"
            )
        for place, row in rows:
            problems.append((place, as_problem(row)))
    except InputError:
        raise
    except Exception as error:  # whatever others wrote
        raise InputError(
            f"{source}, {place}: {error!s:.200}; 'prompt' must be a text, or messages with a text "
            f"as 'content' and a 'role' of {ROLES}; 'answer' a text or number without tags, or a "
            "list of such; a file JSONL, JSON, CSV, TSV or Parquet, in UTF-8"
        )
    return problems


def rows_of_gym(names):
    """Returns ("problem 1", problem) of each, with as many from each data set of reasoning_gym. The
    library's own score of an answer, from 0 to 1, is the reward."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise InputError(f"{GYM}{names} needs pip install reasoning-gym") from None
    names = names.split("+")
    of_each = []
    for name in names:
        starter.check_known(GYM, name, DATASETS)
        data = reasoning_gym.create_dataset(name, seed=0, size=N_GYM_PROBLEMS // len(names))
        of_each.append([problem_of_gym(data, entry) for entry in data])
    return [*numbered(problem for some in zip(*of_each) for problem in some)]


def problem_of_gym(data, entry):
    def score(answer, problem):
        return data.score_answer(answer, entry)

    prompt = QUESTION_PROMPT.format(question=entry["question"])
    return {"prompt": prompt, "answer": str(entry["answer"]), "is_right": score}


def numbered(rows):
    return ((f"problem {n}", row) for n, row in enumerate(rows, start=1))


def rows_of_file(path):
    """Returns (place, row) of each problem in a file."""
    if ".parquet" in path.suffixes:
        return numbered(rows_of_parquet(path))
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    text = data.decode("utf-8-sig")
    if {".csv", ".tsv"} & set(path.suffixes):
        head = text.partition("\n")[0]
        separator = max(",;\t", key=head.count)
        return numbered(csv.DictReader(io.StringIO(text), delimiter=separator))
    if text.lstrip().startswith("["):
        return numbered(json.loads(text))
    return starter.read_jsonl(text, path)


def rows_of_parquet(path):
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: to read Parquet, install pyarrow") from None
    table = parquet.read_table(path)
    types = {field.name: str(field.type) for field in table.schema}
    return rows_of_arrow(table.to_pylist(), types)


def rows_of_arrow(rows, types):
    """types: of the columns. All rows have the same keys there, also inside of tools or messages:
    one that a row had not is None. Those are taken out, but for the names of columns. A float of 32
    bits is the decimal that it stands for, 0.1 and not 0.10000000149011612."""
    narrow = {name for name, of_column in types.items() if of_column in ("float", "float32")}
    for row in rows:
        row = {name: without_nulls(value) for name, value in row.items()}
        for name in narrow & row.keys():
            if row[name] is not None:
                row[name] = float(str(numpy.float32(row[name])))
        yield row


def without_nulls(x):
    if isinstance(x, dict):
        return {key: without_nulls(value) for key, value in x.items() if value is not None}
    if isinstance(x, list):
        return [without_nulls(value) for value in x]
    return x


def rows_of_hub(name, configuration, split):
    """Returns the rows of a split of a data set."""
    try:
        from datasets import load_dataset

        rows = load_dataset(name, configuration or None, split=split or "train")
        features = getattr(rows, "features", None) or {}
        types = {column: getattr(x, "dtype", "") for column, x in features.items()}
        return rows_of_arrow(rows, types)
    except Exception as error:  # whatever the library raises over a network and others' files
        raise InputError(
            f"there is no file {name!r}, and no such data set can be loaded "
            f"({type(error).__name__}: {error!s:.300}); check the name "
            "'user/name:configuration:split', the network, and that datasets is installed"
        )


def final_answer(text):
    """What follows "####" in a text, or else is in its last \\boxed, or else all of it."""
    _, mark, final = text.rpartition("####")
    if not mark:
        _, mark, after = text.rpartition("\\boxed{")
        inside = until_closed(after)
        if mark and inside is not None:
            return inside
    return final.strip()


def until_closed(text):
    """What stands before the brace that closes one which was opened before this text, or None."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:i]


def is_message(message):
    """Of a chat. Some templates leave out what they do not know, without a word."""
    return message.get("role") in ROLES and isinstance(message.get("content"), str)


def with_content(message):
    """A message of OpenAI's kind that only calls tools may have none."""
    if message.get("tool_calls"):
        return {**message, "content": message.get("content") or ""}
    return message


def is_answer(answer):
    """Whether this is a text or number without tags, or a list of such."""
    if isinstance(answer, list):
        return bool(answer) and all(map(is_answer, answer))
    final = final_answer(str(answer))
    return type(answer) in (str, int, float) and final != "" and "<answer>" not in final


def final_of(answer):
    """Returns the final answer of a text, or of each in a list. A number stays one."""
    if isinstance(answer, list):
        return [final_of(x) for x in answer]
    return final_answer(answer) if isinstance(answer, str) else answer


PROMPTS = ("prompt", "question", "problem", "messages")  # names of columns, the first that is there
ANSWERS = ("answer", "solution")


def as_problem(row):
    """Returns the problem in a row. Raises an error where there is none."""
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.80} is no JSON object")
    if None in row:  # so DictReader names what has no name
        raise ValueError(f"it has more fields than the first line has names: {row[None]!r:.80}")
    row = dict(row)
    prompt_name = next((name for name in PROMPTS if name in row), None)
    prompt = row.get(prompt_name)
    is_prompt = isinstance(prompt, str)
    if isinstance(prompt, list):
        prompt = [with_content(message) for message in prompt]
        is_prompt = all(map(is_message, prompt))
        # As in data to imitate: without an answer beside it, a chat's last words are the answer
        if prompt and prompt[-1].get("role") == "assistant" and not row.keys() & set(ANSWERS):
            row["answer"] = prompt[-1]["content"]
            prompt = prompt[:-1]
    elif is_prompt and prompt_name != "prompt":
        prompt = QUESTION_PROMPT.format(question=prompt)
    answer_name = next((name for name in ANSWERS if name in row), None)
    for found, names in ((prompt_name, PROMPTS), (answer_name, ANSWERS)):
        if found is None:
            raise ValueError(f"its keys are {[*row]}, and none of them is one of {names}")
    answer = row[answer_name]
    if not (prompt and is_prompt and is_answer(answer)):
        raise ValueError(f"the prompt {prompt!r:.80} has the answer {answer!r:.80}")
    if isinstance(row.get("last_number"), str):  # in CSV
        row["last_number"] = bool(starter.value_of(row["last_number"].lower()))
    return {**row, "prompt": prompt, "answer": final_of(answer)}
