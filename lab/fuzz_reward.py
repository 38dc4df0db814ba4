"""fuzz_reward.py: no text may hurt starter.reward_fn; many texts that try -> results/fuzz.csv, fuzz_corpus.jsonl.

    pip install atheris
    python fuzz_reward.py --runs 1000000      minutes on one core; the last line says how many texts broke a limit

Atheris (libFuzzer) changes bytes and keeps those that reach something new; text_of() makes a text of any bytes. Each
text meets each of PROBLEMS. It breaks a limit if the reward raises, is none of 0.0, 0.1 and 1.0, takes more than 10 ms
of CPU time, allocates more than 10 MB beside the text, or if solves(), which shares no code with it, disagrees on
whether the Countdown problem is solved. The tests use the same checks; they do not need atheris.
"""
import starter  # first: it sets variables that torch reads when it is imported

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

HERE = Path(__file__).parent
CORPUS, RESULTS = HERE / "fuzz_corpus.jsonl", HERE / "results" / "fuzz.csv"
LIMIT_MS, LIMIT_MB = 10, 10  # of one call: CPU time of its thread, peak of what Python allocates
PROBLEMS = ({"numbers": [3, 5, 7], "target": 22}, {"answer": "1,234.5"}, {"skill": "s", "prompt": "", "answer": "a b"})
PIECES = ["<answer>", "</answer>", *"3579012+-*/() \n.,$_\0", "-", "(", "**", "1,234.5", "a b", "e9", "999999999",
          "\u0663", "\uff13", "\u00b2", "\u2212", "\u3000", "\ud800", "\U0001f600", "\U0001d7db"]
DECODINGS = (("utf-8", "surrogateescape"), ("utf-16-le", "surrogatepass"), ("latin-1", "strict"), ("utf-8", "ignore"))
SEEDS = ["<answer>3*5+7</answer>", "<answer>-(1/3)</answer>", "<answer>$1,234.50</answer>", "<answer>a b</answer>"]


def solves(text, problem):
    """Whether a text solves a Countdown problem: split and recursive descent where starter.py has partition, ast."""
    closed = "</answer>".join(text[-200_000:].split("</answer>")[:-1])  # what stands before is not read
    answer, used = closed.split("<answer>")[-1].strip() if "<answer>" in closed else "", []
    tokens = re.findall("[0-9]+|[^ ]", answer) if len(answer) <= 200 else []

    def value(level):
        """Of what starts at tokens[0]; level 0 is a sum, 1 a product, 2 a number, a negative or a parenthesis."""
        if level < 2:
            x = value(level + 1)
            while tokens and tokens[0] in ("+-", "*/")[level]:
                op, y = tokens.pop(0), value(level + 1)
                x = x + y if op == "+" else x - y if op == "-" else x * y if op == "*" else x / y
            return x
        if (token := tokens.pop(0)) == "-":
            return -value(2)
        if token == "(":
            x = value(0)
            if tokens.pop(0) == ")":
                return x
        if not re.fullmatch("0+|[1-9][0-9]*", token):  # as in Python, 03 is not a number
            raise ValueError(token)
        used.append(int(token))
        return Fraction(token)

    try:
        return value(0) == problem["target"] and not tokens and sorted(used) == sorted(problem["numbers"])
    except (ValueError, IndexError, ZeroDivisionError):
        return False


def cost(text, problem):
    """-> reward, ms, MB at the peak above what was there. Tracing slows the call: the time is an upper bound."""
    on = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, start = tracemalloc.get_traced_memory()[0], time.thread_time()
        reward = starter.reward_fn(text, problem)
        return reward, 1e3 * (time.thread_time() - start), (tracemalloc.get_traced_memory()[1] - before) / 1e6
    finally:
        if not on:
            tracemalloc.stop()


def examine(text, problem):
    """-> what is wrong or "", reward, ms, MB. A time above the limit is taken again: a collection may fall into it."""
    try:
        reward, ms, mb = cost(text, problem)
    except Exception as error:  # whatever it is, it is the finding
        return f"raised {type(error).__name__}: {error}", None, 0.0, 0.0
    for _ in range(3):
        ms = min(ms, cost(text, problem)[1]) if ms > LIMIT_MS else ms
    wrong = {f"returned {reward!r}": reward not in (0.0, 0.1, 1.0), f"took {ms:.1f} ms": ms > LIMIT_MS,
             f"allocated {mb:.1f} MB": mb > LIMIT_MB,
             f"returned {reward}, unlike the checker": "target" in problem and (reward == 1) != solves(text, problem)}
    return ", ".join(what for what, so in wrong.items() if so), reward, ms, mb


def text_of(data):
    """Any bytes -> a text: decoded, or pieces, some repeated; bare or in answer tags. The first byte says which."""
    import atheris
    how, data, text = data[0] if data else 0, data[1:], ""
    if how % 8 < len(DECODINGS):
        text = data[:len(data) // 2 * 2 if how % 8 == 1 else None].decode(*DECODINGS[how % 8])
    else:
        choices = atheris.FuzzedDataProvider(data)
        while choices.remaining_bytes():
            piece, dice = choices.PickValueInList(PIECES), choices.ConsumeIntInRange(0, 511)
            text += piece * min(2 ** max(0, dice - 491), max(1, (2 ** 20 - len(text)) // len(piece)))
    return f"<answer>{text}</answer>" if how & 8 else text


def corpus_lines(broken, texts):
    """-> JSON lines: what broke a limit, then the shortest texts; long ones, mostly repeats, are left out."""
    texts = sorted(set(texts) - set(broken), key=lambda text: (len(text), text))
    lines = [line for line in map(json.dumps, broken + texts) if len(line) < 5_000][:300]
    return [line for i, line in enumerate(lines) if sum(map(len, lines[:i + 1])) + i < 100_000]


def fuzz(runs):
    """runs texts, the corpus among them -> a row of results/fuzz.csv, the corpus anew, exit code 1 if a limit broke."""
    import atheris
    for function in (starter.reward_fn, starter.arithmetic, starter.last_number, solves):
        atheris.instrument_func(function)  # solves too: ast.parse is C, and shows atheris nothing of the grammar
    gc.freeze()  # else a collection walks all that torch imported, which is not the reward's time
    tracemalloc.start()  # once: before Python 3.13 each start and stop loses some bytes
    folder, began, broken = Path(tempfile.mkdtemp()), time.time(), []
    seeds = SEEDS + [json.loads(line) for line in (CORPUS.read_text().splitlines() if CORPUS.exists() else [])]
    for i, text in enumerate(seeds):
        how = 0 if text.isascii() else 1
        (folder / str(i)).write_bytes(bytes([how]) + text.encode(*DECODINGS[how]))
    row = {"command": f"python fuzz_reward.py --runs {runs}", "inputs": 0, "longer than 100,000": 0,
           "with an answer": 0, "solved": 0, "broken": 0, "slowest in ms": 0.0, "largest allocation in MB": 0.0}

    def one_input(data):
        text = text_of(data)
        wrong, rewards, ms, mb = zip(*(examine(text, problem) for problem in PROBLEMS))
        row["inputs"] += 1
        row["longer than 100,000"] += len(text) > 100_000
        row["with an answer"] += 0.0 not in rewards
        row["solved"] += 1.0 in rewards
        row["slowest in ms"] = max(row["slowest in ms"], *ms)
        row["largest allocation in MB"] = max(row["largest allocation in MB"], *mb)
        if any(wrong):
            row["broken"] += 1
            broken.append(text)
            print(f"\n{wrong}: {len(text)} characters, {text[:200]!r}, from {data!r}", flush=True)
        if row["inputs"] == runs or row["broken"] == 100:
            finish()

    def finish():
        """libFuzzer never comes back, so that the last input writes the results."""
        lines = corpus_lines(broken, [text_of(path.read_bytes()) for path in folder.iterdir()])
        CORPUS.write_text("\n".join(lines) + "\n")
        shutil.rmtree(folder)
        row.update({"corpus size": len(lines), "python": platform.python_version(), "atheris": version("atheris"),
                    "seconds": round(time.time() - began)})
        cells = [f"{cell:.3f}" if isinstance(cell, float) else cell for cell in row.values()]
        header = [] if RESULTS.exists() else [list(row)]
        with RESULTS.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(header + [cells])
        print("\n" + ", ".join(f"{name}: {cell}" for name, cell in zip(row, cells)), flush=True)
        os._exit(1 if broken else 0)

    options = ["-runs=-1", "-max_len=1000", "-use_value_profile=1", "-timeout=60", "-rss_limit_mb=4096"]
    atheris.Setup([sys.argv[0], *options, str(folder)], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--runs" or not sys.argv[2].isdecimal():
        sys.exit("usage: python fuzz_reward.py --runs 1000000")
    fuzz(int(sys.argv[2]))
