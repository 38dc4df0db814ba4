"""tasks.py: problems for starter.py: a seed or a JSONL file -> list of {"prompt", what the reward needs}.

A new task is a function of main()'s configuration -> (train, held-out problems), added to TASKS, and a reward.
"""
import checks
from machine import InputError

import random
import zlib
from fractions import Fraction
from functools import partial

COUNTDOWN_PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use each number exactly once, with + - * / "
    "and parentheses. Think in a few short lines, then give the expression alone in answer tags, for example "
    "<answer>(1 + 2) * 3</answer>.")
GSM8K_PROMPT = ("{question}\nThink step by step in a few short lines, then give the number alone in answer tags, for "
                "example <answer>42</answer>.")


def is_held_out(*key):
    """A fixed quarter of all keys: train and held-out problems are disjoint by construction, whatever the seeds."""
    return zlib.crc32(repr(key).encode()) % 4 == 0


def make_countdown(n, numbers_per_problem, max_number, max_target, held_out, seed, template=COUNTDOWN_PROMPT):
    """-> n problems, solvable by construction: the target is what random operations make of the numbers."""
    rng, problems, seen = random.Random(f"{seed} {held_out}"), [], set()
    for _ in range(20_000 + 200 * n):
        numbers = [rng.randint(1, max_number) for _ in range(rng.choice(numbers_per_problem))]
        pool = [(Fraction(number), str(number)) for number in numbers]
        while len(pool) > 1:
            (a, x), (b, y) = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
            values = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else Fraction(-1)}
            op = rng.choice([op for op, value in values.items() if value >= 0 and value.denominator == 1])
            pool.append((values[op], f"({x}{op}{y})"))
        (target, solution), = pool
        key = sorted(numbers), int(target)
        if not 1 <= target <= max_target or is_held_out(*key) != held_out or (held_out and str(key) in seen):
            continue  # held-out problems all differ, so that their count is the sample size of the interval
        seen.add(str(key))
        problems.append({"prompt": template.format(numbers=" ".join(map(str, numbers)), target=target),
                         "numbers": numbers, "target": int(target), "solution": solution[1:-1]})
        if len(problems) == n:
            return problems
    raise InputError(f"only {len(problems)} of {n} Countdown problems were found for max_number = {max_number} and "
                     f"max_target = {max_target}; use larger numbers or fewer problems")


def countdown_problems(c):
    """-> (train, held-out)."""
    make = partial(make_countdown, numbers_per_problem=c.numbers_per_problem, max_number=c.max_number,
                   max_target=c.max_target, seed=c.seed, template=c.countdown_prompt)
    return make(c.n_train_problems, held_out=False), make(c.n_eval_problems, held_out=True)


def gsm8k_problems(c):
    """-> (train, held-out) of JSONL files whose answers end in "#### 1,234". No eval_file: a quarter is held out."""
    def read(path):
        return [{"prompt": GSM8K_PROMPT.format(question=row["question"]),
                 "answer": row["answer"].rpartition("####")[2].strip()}
                for row in checks.read_jsonl(path, ("question", "answer"))]

    problems = read(c.train_file)
    held_out = read(c.eval_file) if c.eval_file else [p for p in problems if is_held_out(p["prompt"])]
    problems = problems if c.eval_file else [p for p in problems if not is_held_out(p["prompt"])]
    return problems, held_out[:c.n_eval_problems]


TASKS = {"countdown": countdown_problems, "gsm8k": gsm8k_problems}  # name: configuration -> (train, held-out)
