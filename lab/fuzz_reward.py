"""Searches for a text that hurts starter.reward_fn, with a coverage-guided fuzzer.

    pip install atheris
    python -m lab.fuzz_reward --runs 1000000

takes minutes on one core; the last line says how many texts broke a limit. It appends a row to
lab/results/fuzz.csv and writes lab/fuzz_corpus.jsonl anew.

Atheris (libFuzzer) changes bytes and keeps those that reach something new; text_of() makes a text
of any bytes. Each text meets each of PROBLEMS. It breaks a limit if the reward raises, is none of
0.0, 0.1 and 1.0, takes more than 10 ms of CPU time, allocates more than 10 MB beside the text, or
if solves(), which shares no code with it, disagrees on whether the Countdown problem is solved.
The tests use the same checks; they do not need atheris.
"""
import starter  # first: it sets variables that torch reads when it is imported

import argparse
import csv
import gc
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import tracemalloc
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
CORPUS = HERE / "fuzz_corpus.jsonl"
RESULTS = HERE / "results" / "fuzz.csv"
LIMIT_MS = 10  # of one call: CPU time of its thread
LIMIT_MB = 10  # of one call: peak of what Python allocates
PROBLEMS = (
    {"numbers": [3, 5, 7], "target": 22},
    {"answer": "1,234.5"},
    {"skill": "s", "prompt": "", "answer": "a b"},
    {"prompt": "What is 23 + 45?", "answer": "68", "last_number": True},
)
SEEDS = ["<answer>3*5+7</answer>", "<answer>-(1/3)</answer>", "<answer>$1,234.50</answer>",
         "<answer>a b</answer>", "23 + 45 = 68."]
PIECES = [
    "<answer>", "</answer>", *"3579012+-*/() \n.,$_\0", "-", "(", "**", "1,234.5", "a b", "e9",
    "999999999",
    # Digits, minus and space of other alphabets, half a character, and wide ones
    "\u0663", "\uff13", "\u00b2", "\u2212", "\u3000", "\ud800", "\U0001f600", "\U0001d7db",
]
DECODINGS = (("utf-8", "surrogateescape"), ("utf-16-le", "surrogatepass"), ("latin-1", "strict"),
             ("utf-8", "ignore"))


# --------------------------------------------------------------------------------------------------
# 1. The checks.  Text, problem -> what is wrong with the reward.

class ExpressionReader:
    """Reads arithmetic by recursive descent, where starter.py uses Python's ast."""

    def __init__(self, text):
        self.tokens = re.findall("[0-9]+|[^ ]", text)
        self.used = []  # whole numbers

    def sum(self):
        value = self.product()
        while self.tokens and self.tokens[0] in "+-":
            op = self.tokens.pop(0)
            other = self.product()
            value = value + other if op == "+" else value - other
        return value

    def product(self):
        value = self.factor()
        while self.tokens and self.tokens[0] in "*/":
            op = self.tokens.pop(0)
            other = self.factor()
            value = value * other if op == "*" else value / other
        return value

    def factor(self):
        """A number, a negative or a parenthesis."""
        token = self.tokens.pop(0)
        if token == "-":
            return -self.factor()
        if token == "(":
            value = self.sum()
            if self.tokens.pop(0) != ")":
                raise ValueError("no closing parenthesis")
            return value
        if not re.fullmatch("0+|[1-9][0-9]*", token):  # as in Python, 03 is not a number
            raise ValueError(token)
        self.used.append(int(token))
        return Fraction(token)


def solves(text, problem):
    """Whether a text solves a Countdown problem. Shares no code with starter.reward_fn."""
    before_close = "</answer>".join(text[-200_000:].split("</answer>")[:-1])
    answer = ""
    if "<answer>" in before_close:
        answer = before_close.split("<answer>")[-1].strip()
    if len(answer) > 200:
        return False
    reader = ExpressionReader(answer)
    try:
        right = reader.sum() == problem["target"]
    except (ValueError, IndexError, ZeroDivisionError):
        return False
    return right and not reader.tokens and sorted(reader.used) == sorted(problem["numbers"])


class Cost(NamedTuple):
    reward: float
    ms: float
    mb: float  # at the peak, above what was there


def cost(text, problem):
    """Returns the Cost of one call. Tracing slows the call: the time is an upper bound."""
    was_tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        start = time.thread_time()
        reward = starter.reward_fn(text, problem)
        seconds = time.thread_time() - start
        _, peak = tracemalloc.get_traced_memory()
        return Cost(reward, 1e3 * seconds, (peak - before) / 1e6)
    finally:
        if not was_tracing:
            tracemalloc.stop()


def examine(text, problem):
    """Returns what is wrong, or "", and the Cost."""
    try:
        reward, ms, mb = cost(text, problem)
    except Exception as error:  # whatever it is, it is the finding
        return f"raised {type(error).__name__}: {error}", Cost(None, 0.0, 0.0)
    for _ in range(3):  # again: a garbage collection may fall into a call
        if ms > LIMIT_MS:
            ms = min(ms, cost(text, problem).ms)
    wrong = []
    if reward not in (0.0, 0.1, 1.0):
        wrong.append(f"returned {reward!r}")
    if ms > LIMIT_MS:
        wrong.append(f"took {ms:.1f} ms")
    if mb > LIMIT_MB:
        wrong.append(f"allocated {mb:.1f} MB")
    if "target" in problem and (reward == 1) != solves(text, problem):
        wrong.append(f"returned {reward}, unlike the checker")
    return ", ".join(wrong), Cost(reward, ms, mb)


# --------------------------------------------------------------------------------------------------
# 2. The fuzzer.

def text_of(data):
    """Makes a text of any bytes: decoded, or of pieces, some of them repeated; bare or in answer
    tags. The first byte says which."""
    import atheris
    how = data[0] if data else 0
    data = data[1:]
    if how % 8 < len(DECODINGS):
        if how % 8 == 1:  # two bytes for each character
            data = data[:len(data) // 2 * 2]
        text = data.decode(*DECODINGS[how % 8])
    else:
        choices = atheris.FuzzedDataProvider(data)
        text = ""
        while choices.remaining_bytes():
            piece = choices.PickValueInList(PIECES)
            dice = choices.ConsumeIntInRange(0, 511)  # above 491 the piece is repeated
            most = max(1, (2 ** 20 - len(text)) // len(piece))
            text += piece * min(2 ** max(0, dice - 491), most)
    return f"<answer>{text}</answer>" if how & 8 else text


def bytes_of(text):
    """Bytes of which text_of() makes this text."""
    how = 0 if text.isascii() else 1
    return bytes([how]) + text.encode(*DECODINGS[how])


def corpus_lines(broken, texts):
    """Returns JSON lines of at most 100,000 characters in all: what broke a limit, then the
    shortest texts. Long ones, which are mostly repeats, are left out."""
    texts = sorted(set(texts) - set(broken), key=lambda text: (len(text), text))
    lines = [line for line in map(json.dumps, broken + texts) if len(line) < 5_000][:300]
    total = 0
    kept = []
    for line in lines:
        total += len(line) + 1
        if total <= 100_000:
            kept.append(line)
    return kept


class Findings:
    """Counts what the texts did, and writes the results after the last."""

    def __init__(self, runs, folder):
        self.runs = runs
        self.folder = folder  # libFuzzer's own, of texts that reached something new
        self.start = time.time()
        self.broken = []
        self.row = {"command": f"python -m lab.fuzz_reward --runs {runs}", "inputs": 0,
                    "longer than 100,000": 0, "with an answer": 0, "solved": 0, "broken": 0,
                    "slowest in ms": 0.0, "largest allocation in MB": 0.0}

    def one_input(self, data):
        row = self.row
        text = text_of(data)
        wrong, costs = zip(*(examine(text, problem) for problem in PROBLEMS))
        rewards = [of_problem.reward for of_problem in costs]
        row["inputs"] += 1
        row["longer than 100,000"] += len(text) > 100_000
        row["with an answer"] += 0.0 not in rewards[:3]  # of the last, the tags do not matter
        row["solved"] += 1.0 in rewards
        row["slowest in ms"] = max(row["slowest in ms"], *(x.ms for x in costs))
        row["largest allocation in MB"] = max(row["largest allocation in MB"],
                                              *(x.mb for x in costs))
        if any(wrong):
            row["broken"] += 1
            self.broken.append(text)
            print(f"\n{wrong}: {len(text)} characters, {text[:200]!r}, from {data!r}", flush=True)
        if row["inputs"] == self.runs or row["broken"] == 100:
            self.finish()

    def finish(self):
        """libFuzzer never returns, so the last input writes the results and ends the process."""
        lines = corpus_lines(self.broken, [text_of(path.read_bytes())
                                           for path in self.folder.iterdir()])
        CORPUS.write_text("\n".join(lines) + "\n")
        shutil.rmtree(self.folder)
        row = self.row | {"corpus size": len(lines), "python": platform.python_version(),
                          "atheris": version("atheris"),
                          "seconds": round(time.time() - self.start)}
        cells = [f"{cell:.3f}" if isinstance(cell, float) else cell for cell in row.values()]
        header = [] if RESULTS.exists() else [list(row)]
        with RESULTS.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(header + [cells])
        print("\n" + ", ".join(f"{name}: {cell}" for name, cell in zip(row, cells)), flush=True)
        os._exit(1 if self.broken else 0)


def fuzz(runs):
    """Tries so many texts, those of the corpus among them."""
    import atheris
    # The checker too: ast.parse is C, and shows atheris nothing of the grammar.
    for function in (starter.reward_fn, starter.arithmetic, starter.pure_number, solves,
                     ExpressionReader.sum, ExpressionReader.product, ExpressionReader.factor):
        atheris.instrument_func(function)
    gc.freeze()  # else a collection walks all that torch imported, which is not the reward's time
    tracemalloc.start()  # once: before Python 3.13 each start and stop loses some bytes
    folder = Path(tempfile.mkdtemp())
    texts = list(SEEDS)
    if CORPUS.exists():
        texts += [json.loads(line) for line in CORPUS.read_text().splitlines()]
    for i, text in enumerate(texts):
        (folder / str(i)).write_bytes(bytes_of(text))
    findings = Findings(runs, folder)
    options = ["-runs=-1", "-max_len=1000", "-use_value_profile=1", "-timeout=60",
               "-rss_limit_mb=4096"]
    atheris.Setup([sys.argv[0], *options, str(folder)], findings.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="searches for a text that hurts the reward")
    parser.add_argument("--runs", type=int, required=True)
    fuzz(parser.parse_args().runs)
