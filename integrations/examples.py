"""What example_trl.py needs: problems, and tables of results."""
import csv
import statistics
from pathlib import Path

import starter
from support import tasks

MAX_NEW_TOKENS = 16  # that the built-in model may say


def small_countdown(n, held_out, seed):
    """n problems of the task that the built-in model was taught to begin with."""
    return tasks.make_countdown(n, held_out, seed, **tasks.SMALL_COUNTDOWN)


def other_skills():
    """Problems of the skills that the built-in model has, and may forget."""
    return starter.read_problems(Path(tasks.TINY, "retention.jsonl"))


def prompt_ids_of(problems, tokenizer):
    """Problems -> lists of token ids, in the tokenizer's chat template."""
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": problem["prompt"]}],
                                           tokenize=False, add_generation_prompt=True)
             for problem in problems]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def table(rows):
    """Rows of runs, which begin with method, seed, steps -> lines with the means over seeds."""
    names = list(rows[0])[3:]
    lines = [f"{'method':<32}" + "".join(f"{name:>13}" for name in names)]
    for method in dict.fromkeys(row["method"] for row in rows):
        of_method = [row for row in rows if row["method"] == method]
        means = [statistics.mean(row[name] for row in of_method) for name in names]
        lines.append(f"{method:<32}" + "".join(f"{mean:>13.4g}" for mean in means))
    return lines


def save(name, rows):
    """Writes rows to lab/results."""
    with open(Path(starter.__file__).parent / "lab" / "results" / name, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: f"{value:.6g}" if isinstance(value, float) else value
                          for key, value in row.items()} for row in rows)
