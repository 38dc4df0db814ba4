"""ablate_kl.py: main() over KL settings and seeds -> results/*.csv, and from these the tables of README_KL.md.

    python ablate_kl.py               the runs that are missing from results/kl_ablation.csv (a killed sweep goes on)
    python ablate_kl.py --vllm        the same without the leash, sampled by vLLM (needs it installed)
    python ablate_kl.py --console     the README's runs, leash off and on, as a user sees them -> results/console_*.txt
    python ablate_kl.py --tables      writes tables and outputs into README_KL.md, from results/ alone
"""
import csv
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import starter

HERE = Path(__file__).parent
CSV = HERE / "results" / "kl_ablation.csv"
README = HERE / "README_KL.md"
SEEDS = (0, 1, 2)
OFF = dict(use_kl_penalty=False)
ON = dict(use_kl_penalty=True, kl_coef=0.3)  # what the README recommends for the built-in model
GRID = [OFF, *(dict(use_kl_penalty=True, kl_coef=kl_coef) for kl_coef in (0.3, 0.1, 0.03))]


def key_of(changes, seed):
    return json.dumps(changes | {"seed": seed}, sort_keys=True)


def read_rows():
    """-> rows of the csv, oldest first."""
    if not CSV.is_file():
        return []
    with open(CSV, newline="") as file:
        return list(csv.DictReader(file))


def run_one(changes, seed):
    """One training run -> its row."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout.strip()
    start = time.perf_counter()
    result = starter.main(seed=seed, save_model=False, **changes)
    minutes = (time.perf_counter() - start) / 60
    row = {"run": key_of(changes, seed), "commit": commit, "seed": seed, "use_kl_penalty": changes["use_kl_penalty"],
           "kl_coef": changes.get("kl_coef", 0.0), "minutes": round(minutes, 2),
           "kl_per_token": round(result["kl_per_token"], 4), "kl_per_sequence": round(result["kl_per_sequence"], 3),
           "tokens_per_s": round(result["tokens_per_s"])}
    for moment in ("before", "after"):
        row |= {f"{name}_{moment}": round(value, 4) for name, value in result[moment].items()}
    return row


def append_row(row):
    rows = read_rows()
    if rows and set(rows[0]) != set(row):
        sys.exit(f"{CSV} has other columns than this version writes; move it away")
    CSV.parent.mkdir(exist_ok=True)
    with open(CSV, "a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0] if rows else row))
        if not rows:
            writer.writeheader()
        writer.writerow(row)


def fill(grid):
    """Runs what the csv does not hold yet; each row is written as soon as it is there."""
    for changes in grid:
        for seed in SEEDS:
            if key_of(changes, seed) not in {row["run"] for row in read_rows()}:
                append_row(run_one(changes, seed))


# --- tables -----------------------------------------------------------------------------------------------------------

def spread(values):
    """-> "mean (smallest to largest)" in per cent."""
    values = [100 * float(value) for value in values]
    return f"{sum(values) / len(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def skills_of(rows):
    return [name[len("retention_"):-len("_after")] for name in rows[0] if re.fullmatch(r"retention_\w+_after", name)]


def engine_of(row):
    return json.loads(row["run"]).get("engine", "transformers")


def engine_table(rows):
    """Solved after training, leash off, seed by seed, with either engine."""
    rows = [row for row in rows if row["use_kl_penalty"] == "False"]
    seeds = sorted({row["seed"] for row in rows if engine_of(row) == "vllm"})
    lines = ["| engine | " + " | ".join(f"solved, seed {seed}" for seed in seeds) + " |", "|---|" + "---|" * len(seeds)]
    for engine in ("transformers", "vllm"):
        solved = {row["seed"]: f"{100 * float(row['solved_after']):.1f}" for row in rows if engine_of(row) == engine}
        lines.append(f"| {engine} | " + " | ".join(solved[seed] for seed in seeds) + " |")
    return "\n".join(lines)


def coefficient_table(rows):
    """One line a setting, mean and range over seeds, in per cent."""
    rows = [row for row in rows if engine_of(row) == "transformers"]
    skills, groups = skills_of(rows), {}
    for row in rows:
        groups.setdefault((row["use_kl_penalty"] == "True", float(row["kl_coef"])), []).append(row)
    lines = ["| kl_coef | solved | " + " | ".join(skills) + " | KL per token | KL per response | minutes |",
             "|---|---|" + "---|" * (len(skills) + 3)]
    before = [spread(r[name] for r in rows) for name in ("solved_before", *(f"retention_{s}_before" for s in skills))]
    lines.append("| before training | " + " | ".join(before) + " | 0 | 0 | |")
    for (leash, kl_coef), group in sorted(groups.items()):
        mean = lambda name: sum(float(r[name]) for r in group) / len(group)
        cells = [f"{kl_coef:g}" if leash else "off", spread(r["solved_after"] for r in group),
                 *(spread(r[f"retention_{s}_after"] for r in group) for s in skills),
                 f"{mean('kl_per_token'):.3f}", f"{mean('kl_per_sequence'):.2f}", f"{mean('minutes'):.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Per cent, mean (range) over seeds {', '.join(sorted({r['seed'] for r in rows}))}."])


def write_consoles():
    """Runs the README's first command, without and with its one edit, each in a process of its own."""
    for name, changes in (("off", OFF), ("on", ON)):
        program = f"import starter; starter.test_functions(); starter.main(**{changes!r})"
        run = subprocess.run([sys.executable, "-c", program], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True)
        (HERE / "results" / f"console_{name}.txt").write_text(run.stdout)


def console(name):
    """-> a run's output: its beginning (leash off), and its last evaluation and report."""
    lines = (HERE / "results" / f"console_{name}.txt").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("Step 4 "))
    last = max(i for i, line in enumerate(lines) if line.startswith("Step "))
    return "\n".join(["```text", *(lines[:first] + ["..."] if name == "off" else []), *lines[last:], "```"])


def with_tables(text):
    """README text -> the same with each <!-- table: NAME --> and <!-- console: NAME --> block made from results/."""
    tables = {"coefficients": coefficient_table, "engines": engine_table}
    make = {"table": lambda name: tables[name](read_rows()), "console": console}
    return re.sub(r"(<!-- (table|console): (\w+) -->\n).*?(<!-- end -->)",
                  lambda m: m[1] + make[m[2]](m[3]) + "\n" + m[4], text, flags=re.S)


if __name__ == "__main__":
    if sys.argv[1:] == ["--tables"]:
        README.write_text(with_tables(README.read_text()))
    elif sys.argv[1:] == ["--console"]:
        write_consoles()
    elif sys.argv[1:] == ["--vllm"]:
        fill([OFF | {"engine": "vllm"}])
    elif sys.argv[1:]:
        sys.exit("usage: python ablate_kl.py [--vllm | --console | --tables]")
    else:
        fill(GRID)
