"""Puts the numbers of lab/results into README.md, README_KL.md, recipes/README.md and docs/*.md.

    python -m lab.tables              fills the pages; measures nothing
    python -m lab.tables --console    first runs starter.py, for what it prints
    python -m lab.tables --figure     also draws lab/figures/learning.png (needs matplotlib)

A page has <!-- table: NAME --> or <!-- console: NAME --> where a table or the output of a run
goes, and <!-- end --> after it; what stands between them is replaced.
"""
import json
import re
import statistics
import subprocess
import sys
import tempfile

from lab import architectures, sweep
from lab.race import race_lines
from lab.rows import REPOSITORY, RESULTS, numbers, read_csv
from starter import EXACT

PAGES = [REPOSITORY / "README.md", REPOSITORY / "README_KL.md",
         REPOSITORY / "recipes" / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def table(headers, lines):
    """Returns a Markdown table of texts."""
    rows = [headers, ["---"] * len(headers), *lines]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in rows)


def spread(values, digits=0):
    """Returns "mean (smallest to largest)"; "" without values."""
    values = list(values)
    if not values:
        return ""
    three = (statistics.mean(values), min(values), max(values))
    return "{} ({} to {})".format(*(f"{value:.{digits}f}" for value in three))


def per_cent(values):
    return spread(100 * value for value in values)


def grouped(rows, *columns):
    """Returns {values of these columns: rows}, in the order of the file."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def newest(name, *columns):
    """Returns the newest row of each combination of these columns."""
    return [rows[-1] for rows in grouped(read_csv(name), *columns).values()]


# 1. Of lab.sweep: runs of main().

def runs_of(name, grid):
    """Returns [(settings, rows of its seeds)] of a grid, as far as the csv file holds them."""
    groups = grouped(read_csv(name), "settings")
    keys = [(settings, (sweep.key_of(settings),)) for settings in grid]
    return [(settings, groups[key]) for settings, key in keys if key in groups]


def skills_of(row):
    return [column.removeprefix("retention_").removesuffix("_after") for column in row
            if re.fullmatch(r"retention_\w+_after", column)]


def other_skills(row, moment="after"):
    """The mean share of the other skills' held-out problems that are solved."""
    return statistics.mean(float(row[f"retention_{skill}_{moment}"]) for skill in skills_of(row))


def largest_fall(row):
    """By how much the skill fell that fell most."""
    return max(float(row[f"retention_{skill}_before"]) - float(row[f"retention_{skill}_after"])
               for skill in skills_of(row))


def curve(row, name):
    return [float(value) for value in row[f"curve_{name}"].split()]


MEASURED = ["solved, %", "other skills, %", "KL per token", "KL per response"]


def measured(rows):
    """Returns the cells under MEASURED."""
    return [per_cent(numbers(rows, "solved_after")), per_cent(map(other_skills, rows)),
            spread(numbers(rows, "kl_per_token"), 3), spread(numbers(rows, "kl_per_response"), 2)]


def before_training(rows):
    return [per_cent(numbers(rows, "solved_before")),
            per_cent(other_skills(row, "before") for row in rows)]


def coefficient(settings):
    return f"{settings.get('kl_coef', 0.3):g}" if settings.get("use_kl_penalty") else "off"


def penalty_name(settings):
    if not settings.get("use_kl_penalty"):
        return "no KL penalty (the default)"
    rule = settings.get("kl_adaptation_method")
    return "`use_kl_penalty = True`" + (f", `kl_adaptation_method = \"{rule}\"`" if rule else "")


def penalty_table():
    """The default run with the KL penalty off, on and adaptive."""
    groups = runs_of("learning", sweep.SWEEPS["learning"])
    everything = [row for _, rows in groups for row in rows]
    lines = [["before training", *before_training(everything), "0", ""]] if groups else []
    for settings, rows in groups:
        solved, others, kl, _ = measured(rows)
        lines.append([penalty_name(settings), solved, others, kl,
                      f"{100 * max(map(largest_fall, rows)):.0f} points"])
    return table(["run of the built-in model", *MEASURED[:3],
                  "largest fall of a skill, any seed"], lines)


def machine_table():
    """The default run on what other machines have."""
    lines = []
    for settings, rows in [*runs_of("machines", sweep.MACHINES),
                           *runs_of("machines_amx", sweep.MACHINES)]:
        threads, cpu = (settings["environment"].get(name, "all that it has") for name in (
            "OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY"))
        lines.append([rows[0]["machine"].partition(",")[0],
                      "bfloat16" if settings["bf16"] else "float32", threads, cpu,
                      " ".join(f"{100 * x:.1f}" for x in numbers(rows, "solved_after")),
                      per_cent(map(other_skills, rows)),
                      f"{100 * max(map(largest_fall, rows)):.0f} points"])
    return table(["processor", "dtype", "threads", "instructions", "solved, %, seed by seed",
                  "other skills, %", "largest fall of a skill"], lines)


def coefficient_table():
    groups = runs_of("kl_divergences", sweep.COEFFICIENTS)
    skills = skills_of(groups[0][1][0])
    first = groups[0][1]

    def of_skills(rows, moment):
        return [per_cent(numbers(rows, f"retention_{skill}_{moment}")) for skill in skills]

    lines = [["before training", *before_training(first), "0", "0", *of_skills(first, "before")]]
    lines += [[coefficient(settings), *measured(rows), *of_skills(rows, "after")]
              for settings, rows in groups]
    return table(["kl_coef", *MEASURED, *skills], lines)


def kind_of_kl(settings):
    return ", ".join([settings.get("kl_estimator", "k3"), *(settings[name] for name in (
        "kl_gradient", "kl_in", "loss_average") if name in settings)])


def divergence_table():
    """Divergence and placement at several coefficients, with the diversity that is left."""
    groups = runs_of("kl_divergences", sweep.DIVERGENCES)
    everything = [row for _, rows in groups for row in rows]
    lines = [["before training", "", "", *(per_cent(numbers(everything, f"{name}_before")) for name
                                           in ("solved", "pass_at_1", "pass_at_8")),
              before_training(everything)[1], "0", "0"]]
    for settings, rows in groups:
        lines.append([kind_of_kl(settings) if "kl_coef" in settings else "",
                      coefficient(settings), len(rows),
                      *(per_cent(numbers(rows, f"{name}_after"))
                        for name in ("solved", "pass_at_1", "pass_at_8")), *measured(rows)[1:3],
                      spread(numbers(rows, "forward_kl_per_token"), 3)])
    return table(["KL", "kl_coef", "seeds", "solved, %", "pass@1, %", "pass@8, %", *MEASURED[1:3],
                  "KL(reference ‖ policy) per token"], lines)


def forgetting_table():
    """Over all runs of a sweep: which number goes along with what was lost."""
    lines = []
    for model, name, lost_by in (
            ("built-in", "kl_divergences",
             lambda row: other_skills(row, "before") - other_skills(row)),
            ("SmolLM2", "smollm2_divergences", lambda row: 1 - float(row["questions_kept"]))):
        rows = read_csv(name)
        lost = list(map(lost_by, rows))
        for divergence, column in (("KL(policy ‖ reference)", "kl_per_token"),
                                   ("KL(reference ‖ policy)", "forward_kl_per_token")):
            values = numbers(rows, column)
            ranks = [[sorted(x).index(value) for value in x] for x in (values, lost)]
            lines.append([model, divergence, len(rows),
                          *(f"{statistics.correlation(*pair):.2f}"
                            for pair in ((values, lost), ranks))])
    return table(["model", "per token", "runs", "correlation with what is lost", "of ranks"], lines)


def method_table():
    """Adaptive methods, all from the same coefficient."""
    lines = []
    for settings, rows in runs_of("kl", [sweep.HOT, sweep.BASE, *sweep.METHODS]):
        method, term = "off", ""
        if settings.get("use_kl_penalty"):
            method = settings.get("kl_adaptation_method", "none")
            term = f"{settings['kl_estimator']} in the {settings.get('kl_in', 'loss')}"
        betas = [curve(row, "beta")[-1] for row in rows if row["curve_beta"]]
        lines.append([method, term, *measured(rows), spread(betas, 3),
                      spread(numbers(rows, "response_length_after"), 1)])
    return table(["kl_adaptation_method", "KL", *MEASURED, "beta at the end", "length"], lines)


def recipe_table():
    lines = []
    for (key,), rows in grouped(read_csv("recipes"), "settings").items():
        settings = json.loads(key)
        penalty = "on" if settings.pop("use_kl_penalty", False) else "off"
        name = settings.pop("recipe", "starter.py").replace("+", " + ")
        others = ", ".join(f"`{setting}={value}`" for setting, value in settings.items())
        lines.append([name + (", " if others else "") + others, penalty, *measured(rows)[:3]])
    lines.sort(key=lambda line: (line[1], not line[0].startswith("starter.py"), line[0]))
    return table(["recipe", "KL penalty", *MEASURED[:3]], lines)


SMOLLM2 = [  # title, column, digits; without digits in per cent
    ("solved, %", "solved_after", None), ("KL per token", "kl_per_token", 2),
    ("KL(reference ‖ policy)", "forward_kl_per_token", 2),
    ("English, nats per token more", "english_nats_more", 3),
    ("questions kept, %", "questions_kept", None), ("same tokens, %", "same_tokens", None),
    ("s a step", "s_per_step", 1), ("peak memory, GB", "peak_gb", 1)]


def smollm2_table(name, left_out):
    columns = [column for column in SMOLLM2 if column[1] not in left_out]
    lines = []
    for settings, rows in runs_of(name, sweep.SWEEPS[name]):
        cells = [(numbers(rows, column), digits) for _, column, digits in columns]
        lines.append([
            f"LoRA {settings['lora_rank']}" if "lora_rank" in settings else "all weights",
            kind_of_kl(settings) if "kl_coef" in settings else "", coefficient(settings),
            len(rows),
            *(per_cent(x) if digits is None else spread(x, digits) for x, digits in cells)])
    titles = [title for title, *_ in columns]
    return table(["what learns", "KL", "kl_coef", "seeds", *titles], lines)


# 2. Of lab.verify_kl: what is enumerated.

GRADIENT_ROWS = [  # shown as, estimator, gradient, placement, where to use it
    ("k1, k2, k3", "k3", "reverse", "loss", "the default: right for each token's own KL"),
    ("exact", "exact", "reverse", "loss", "least noise; it sums over the vocabulary"),
    ("exact_forward", "exact_forward", "reverse", "loss", "another divergence, on purpose"),
    ("k1", "k1", "as_written", "loss", "never (refused)"),
    ("k2", "k2", "as_written", "loss", "the same as reverse in the first epoch"),
    ("k3", "k3", "as_written", "loss", "to reproduce DeepSeekMath"),
    ("k1", "k1", "reverse", "loss_to_go", "as k1 in the reward; later epochs have their own KL"),
    ("k3", "k3", "reverse", "loss_to_go", "only near the reference; else the noise is large"),
    ("exact", "exact", "reverse", "loss_to_go", "for the KL of whole responses; least noise"),
    ("k2", "k2", "reverse", "loss_to_go", "never (refused): k1 is better in the first epoch"),
    ("k1", "k1", "", "reward", "for the KL of whole responses, one epoch; as in PPO for RLHF"),
    ("k2", "k2", "", "reward", "never (refused)"),
    ("k3", "k3", "", "reward", "never (refused)"),
]
TARGETS = {
    "reverse KL per token": "exact", "KL of whole responses": "exact", "zero": "**zero**",
    "forward KL per token": "gradient of KL(reference ‖ policy)",
    "minus KL(old || policy)": "pushes **away** from the old policy",
}


def gradient_cell(rows):
    """The rows of one setting in one column -> what its expected gradient is."""
    of_whole = [row for row in rows if row["policy"] == "one step"
                or row["target"] == "KL of whole responses"]
    exact = [TARGETS[row["target"]] for row in of_whole if row["claim"] == "exact"]
    if exact:
        return exact[0]
    cosine = rows[0]["median cosine to sequence KL"]
    if cosine in ("", "nan"):
        return "**zero**"
    digits = 3 if f"{float(cosine):.2f}" == "1.00" else 2
    return f"cosine {float(cosine):.{digits}f}"


def gradient_table():
    groups = grouped([row for row in read_csv("kl_gradients") if not row["note"]],
                     "policy", "sampled by", "estimator", "gradient", "placement")
    columns = [("one step", "policy"), ("one step", "old"), ("3 steps, shared", "policy"),
               ("3 steps, shared", "old")]
    lines = []
    for shown, estimator, gradient, place, use in GRADIENT_ROWS:
        any_gradient = place == "reward" or estimator in EXACT and place == "loss"
        lines.append([shown, "any" if any_gradient else gradient, place,
                      *(gradient_cell(groups[*column, estimator, gradient, place])
                        for column in columns), use])
    return table(["`kl_estimator`", "`kl_gradient`", "`kl_in`", "one token, first epoch",
                  "one token, later epochs", "several tokens, first epoch",
                  "several tokens, later epochs", "use"], lines)


def mistake_table():
    """Penalties as published code has them, and what they do."""
    lines = []
    for row in read_csv("kl_mistakes"):
        value, size, direction = (float(row[name]) for name in ("value", "size", "cosine"))
        gradient = f"{size:.1f} times as long, cosine {direction:.2f}"
        if size < 1e-9:
            gradient = "**zero**"
        lines.append([f"`{row['formula']}`", row["in"], f"{value:.1f}", gradient])
    return table(["penalty", "in the", "value / KL", "gradient, beside that of the KL"], lines)


def variance_table():
    lines = []
    for (name,), rows in grouped(read_csv("kl_variance"), "gradient").items():
        bias = float(rows[-1]["bias"])  # at the large drift
        lines.append([name, *(f"{float(row['of k1 in the reward']):.2f}" for row in rows),
                      "none" if bias < 1e-10 else f"{bias:.2f}"])
    return table(["gradient of the KL of responses", "variance, small drift", "large drift",
                  "bias, large drift"], lines)


def explosion_table():
    lines = []
    for (name,), rows in grouped(read_csv("kl_explosion"), "KL term").items():
        norms = numbers(rows, "largest gradient norm")
        lines.append([name, f"{sum(norm > 1e6 for norm in norms)} of {len(norms)}",
                      f"{statistics.median(norms):.2g}",
                      f"{statistics.median(numbers(rows, 'last KL per token')):.2f}"])
    return table(["KL term in the loss", "seeds with a gradient norm above 1e6",
                  "largest norm, median", "KL per token at the end, median"], lines)


def length_table():
    columns = ["P(answer)", "mean length", "KL per response", "KL per token"]
    lines = [[row["KL in"], row["kl_coef"], *(f"{float(row[column]):.2f}" for column in columns)]
             for row in read_csv("kl_length")]
    return table(["KL in", "kl_coef", *columns], lines)


# 3. Of lab.architectures, lab.crash_test and lab.bench.

def architecture_table():
    """How many model types are right in each mode, and which are not in some."""
    lines = []
    for (verdict,), rows in sorted(grouped(read_csv("architectures"), "verdict").items()):
        counts = [sum(row["mode"] == mode for row in rows) for mode in architectures.MODES]
        names = dict.fromkeys(f"`{row['name']}`" for row in rows)
        lines.append([verdict, *counts, "" if verdict == "right" else ", ".join(names)])
    return table(["verdict", *architectures.MODES, "which, in some mode"], lines)


def kill_table():
    """Runs that were killed and resumed."""
    lines = []
    for (engine, parts), rows in grouped(read_csv("kills"), "engine", "parts").items():
        same = sum(row["killed"] == row["same_weights"] == row["same_log"] == "True"
                   for row in rows)
        lines.append([engine, parts, len(rows), same])
    return table(["engine", "parts", "killed", "ended with the same bits"], lines)


SIZE_NAMES = {
    "S": "S: hidden 128, 4 layers, 16 new tokens", "M": "M: hidden 384, 6 layers, 16 new tokens",
    "M-64": "M, 64 new tokens",
    "L": "L: hidden 256, 4 layers, vocabulary 151,936, 16 new tokens"}


def median_and_range(row, name):
    return f"{row[f'{name}_s']} ({row[f'{name}_min_s']} to {row[f'{name}_max_s']})"


def speed_table(alone=False):
    """A step of starter.py and of TRL's, in turns."""
    lines = [[SIZE_NAMES[row["size"]], row["dtype"], row["kl_penalty"],
              median_and_range(row, "ours"), median_and_range(row, "trl"), row["ratio"],
              *([] if alone else [row["ours_gb"], row["trl_gb"]])]
             for row in newest("bench_alone" if alone else "bench_step", "size", "dtype",
                               "kl_penalty")]
    return table(["model", "dtype", "KL penalty", "starter.py, s", "TRL 1.16, s", "ratio",
                  *([] if alone else ["GB", "TRL, GB"])], lines)


def gpu_table():
    """By the formula of support/memory.py, written by `python -m lab.bench --gpus`."""
    groups = grouped(read_csv("gpus"), "settings")
    models = list(dict.fromkeys(row["model"] for row in read_csv("gpus")))
    lines = [[f"`{settings}`" if settings else "the default", *(row["gb"] for row in rows)]
             for (settings,), rows in groups.items()]
    return table(["GB for", *models], lines)


def mutant_table():
    lines = []
    for (section,), rows in grouped(read_csv("mutation"), "section").items():
        alive = [f"`{row['before'][:60]}` as `{row['after'][:60]}`" for row in rows
                 if row["seen"] == "False"]
        lines.append([section, len(rows), len(rows) - len(alive),
                      ", ".join(dict.fromkeys(alive)).replace("|", "\\|")])
    return table(["section", "mutants", "seen", "not seen"], lines)


# 4. The pages.

RACE = ["until", "seeds", "starter.py, s", "TRL 1.16, s", "median ratio", "range",
        "not reached by starter.py and TRL"]
TABLES = {
    "penalty": penalty_table, "machines": machine_table, "coefficients": coefficient_table,
    "divergences": divergence_table, "forgetting": forgetting_table,
    "methods": method_table, "recipes": recipe_table,
    "smollm2": lambda: smollm2_table("smollm2", ["forward_kl_per_token"]),
    "smollm2_divergences": lambda: smollm2_table("smollm2_divergences", ["s_per_step", "peak_gb"]),
    "gradients": gradient_table, "mistakes": mistake_table, "variance": variance_table,
    "explosion": explosion_table, "length": length_table,
    "architectures": architecture_table, "kills": kill_table, "speed": speed_table,
    "mutants": mutant_table, "alone": lambda: speed_table(alone=True), "gpus": gpu_table,
    "race": lambda: table(RACE, race_lines("tiny")),
}
BLOCK = re.compile(r"(<!-- (table|console): (\w+) -->\n).*?(<!-- end -->)", flags=re.S)
CONSOLE = RESULTS / "console_off.txt"


def write_console():
    """Runs starter.py, and keeps how its output begins and ends."""
    with tempfile.TemporaryDirectory() as out_dir:
        done = subprocess.run([sys.executable, "starter.py", "--out_dir", out_dir], cwd=REPOSITORY,
                              text=True, check=True, stdout=subprocess.PIPE)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("Warning")]
    first = next(i for i, line in enumerate(lines) if line.startswith("Eval at step 0"))
    last = max(i for i, line in enumerate(lines) if line.startswith("Step "))
    report = next(i for i, line in enumerate(lines) if line.startswith("=== Report"))
    kept = [*lines[first:first + 2], "...", *lines[last:last + 2], "...",
            *(line for line in lines[report:] if line.startswith("  "))]
    CONSOLE.write_text("\n".join(kept) + "\n")


def draw_learning(path):
    """Solved and other skills over the steps, a line for each seed."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.2), dpi=100, layout="constrained")
    axes = figure.subplots(1, 2)
    groups = runs_of("learning", sweep.SWEEPS["learning"][:2])
    titles = {"solved": "trained task: solved, %", "other_skills": "not trained: other skills, %"}
    for axis, (name, title) in zip(axes, titles.items()):
        for (settings, rows), color in zip(groups, ("C3", "C0")):
            label = "use_kl_penalty = True" if "use_kl_penalty" in settings else "no KL penalty"
            for i, row in enumerate(rows):
                values = [100 * value for value in curve(row, name)]
                steps = [settings["eval_every"] * step for step in range(len(values))]
                axis.plot(steps, values, color=color, alpha=0.8, linewidth=1.2,
                          label=label if i == 0 else None)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(path)


def with_tables(text):
    """Returns a page with each block made from lab/results."""
    def fresh(match):
        first_line, kind, name, last_line = match.groups()
        block = f"```text\n{CONSOLE.read_text()}```" if kind == "console" else TABLES[name]()
        return f"{first_line}{block}\n{last_line}"

    return BLOCK.sub(fresh, text)


if __name__ == "__main__":
    if "--console" in sys.argv:
        write_console()
    if "--figure" in sys.argv:
        draw_learning(REPOSITORY / "lab" / "figures" / "learning.png")
    for page in PAGES:
        before = page.read_text("utf-8")
        after = with_tables(before)
        if after != before:
            page.write_text(after, "utf-8")
            print(f"{page.relative_to(REPOSITORY)}: new numbers")
