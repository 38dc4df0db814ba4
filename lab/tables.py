"""Puts the numbers of lab/results into README.md, README_KL.md, recipes/README.md and docs/*.md.

    python -m lab.tables              fills the pages; measures nothing
    python -m lab.tables --console    first runs starter.py, for what it prints
    python -m lab.tables --figures    also draws lab/figures/*.png (needs matplotlib)

A page has <!-- table: NAME --> or <!-- console: NAME --> where a table or the output of a run
goes, and <!-- end --> after it; what stands between them is replaced.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile

from lab import architectures
from lab.race import race_lines
from lab.rows import REPOSITORY, RESULTS, read_csv

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "README_KL.md",
    REPOSITORY / "recipes" / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]


def table(headers, lines):
    """Returns a Markdown table of texts."""
    rows = [headers, ["---"] * len(headers), *lines]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in rows)


def numbers(rows, column):
    return [float(row[column]) for row in rows]


def spread(rows, column, form=".0%"):
    """Returns "mean (smallest–largest)" of a column in this form; per cent without its sign."""
    values = numbers(rows, column)
    shown = f"{statistics.mean(values):{form}} ({min(values):{form}}–{max(values):{form}})"
    return shown.replace("%", "")


def grouped(rows, *columns):
    """Returns {values of these columns: rows}, in the order of the file."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


# 1. Of lab.sweep: runs of main(), in groups of the same settings.


def runs_of(name):
    """Returns [(settings, rows of its seeds)]. What is not set is None."""
    groups = grouped(read_csv(name), "settings")
    return [(json.loads(settings), rows) for (settings,), rows in groups.items()]


def penalty(settings):
    return "on" if "use_kl_penalty" in settings else "off"


def coefficient(settings):
    return "off" if penalty(settings) == "off" else f"{settings.get('kl_coef', 0.3):g}"


def kind_of_kl(settings):
    """ "k3", or "k1, reward", or "" without a penalty."""
    if penalty(settings) == "off":
        return ""
    names = ("kl_gradient", "kl_in", "loss_average")
    others = [settings[name] for name in names if name in settings]
    return ", ".join([settings.get("kl_estimator", "k3"), *others])


def method(settings):
    if penalty(settings) == "off":
        return "off"
    return settings.get("kl_adaptation_method", "none")


MEASURED = {  # header: column, form
    "solved, %": ("solved_after", ".0%"),
    "other skills, %": ("kept_after", ".0%"),
    "KL per token": ("kl_per_token", ".3f"),
}


def run_table(groups, shown, measured, before_training=False):
    """Returns a table with a line for each (settings, rows) of groups.

    shown: {header: function of the settings}. measured: {header: (column of the csv file, form)}.
    before_training: whether the first line is that of the model before training.
    """
    lines = []
    if before_training:
        rows = [row for _, rows in groups for row in rows]
        lines.append(["before training", *[""] * (len(shown) - 1)])
        for column, form in measured.values():
            before = column.replace("_after", "_before")
            lines[0].append("0" if before == column else spread(rows, before, form))
    for settings, rows in groups:
        cells = [text_of(settings) for text_of in shown.values()]
        lines.append([*cells, *(spread(rows, *column) for column in measured.values())])
    return table([*shown, *measured], lines)


def penalty_table():
    """Two models without and with the KL penalty, by its defaults."""
    models = {
        "learning": "built-in",
        "kl_divergences": "built-in, twice the rate",
        "smollm2": "SmolLM2",
    }
    lines = []
    for name, model in models.items():
        for settings, rows in runs_of(name):
            kl = (kind_of_kl(settings), coefficient(settings), method(settings))
            if kl in (("", "off", "off"), ("k3", "0.3", "none")):
                shown = model + ", LoRA" * ("lora_rank" in settings)
                cells = spread(rows, "solved_after"), spread(rows, "kept_after")
                lines.append([shown, coefficient(settings), *cells])
    return table(["model", "`kl_coef`", "solved, %", "kept, %"], lines)


def machine_table():
    lines = []
    for settings, rows in runs_of("machines") + runs_of("machines_amx"):
        processor = rows[0]["machine"].partition(",")[0]
        threads = settings["environment"]["OMP_NUM_THREADS"]
        instructions = settings["environment"].get("ATEN_CPU_CAPABILITY", "all")
        solved = " ".join(f"{100 * share:.1f}" for share in numbers(rows, "solved_after"))
        cells = [processor, settings["precision"], threads, instructions, solved]
        lines.append([*cells, spread(rows, "kept_after")])
    headers = ["processor", "dtype", "threads", "instructions", "solved, %, seed by seed"]
    return table([*headers, "other skills, %"], lines)


def coefficient_table():
    groups = [run for run in runs_of("kl_divergences") if kind_of_kl(run[0]) in ("", "exact")]
    return run_table(groups, {"kl_coef": coefficient}, MEASURED, before_training=True)


def divergence_table():
    groups = []
    for settings, rows in runs_of("kl_divergences"):  # those of "exact" are in README_KL.md
        if kind_of_kl(settings) != "exact" and coefficient(settings) in ("off", "0.3", "1"):
            groups.append((settings, rows))
    solved, *others = MEASURED.items()
    measured = dict([solved, ("pass@8, %", ("pass_at_8_after", ".0%")), *others])
    shown = {"KL": kind_of_kl, "kl_coef": coefficient}
    return run_table(groups, shown, measured, before_training=True)


def method_table():
    shown = {"kl_adaptation_method": method, "KL": kind_of_kl}
    return run_table(runs_of("kl"), shown, MEASURED)


def recipe(settings):
    """Returns "gspo", or "starter.py, `epochs_per_rollout=2`"."""
    names = settings.get("recipe", "starter.py").replace("+", " + ")
    others = settings.keys() - {"recipe", "use_kl_penalty"}
    return ", ".join([names, *(f"`{name}={settings[name]}`" for name in sorted(others))])


def what_learns(settings):
    return f"LoRA {settings['lora_rank']}" if "lora_rank" in settings else "all weights"


SMOLLM2 = {
    "solved, %": ("solved_after", ".0%"),
    "questions kept, %": ("kept_after", ".0%"),
    "KL per token": ("kl_per_token", ".2f"),
    "s a step": ("s_per_step", ".1f"),
}


def recipe_table():
    return run_table(runs_of("recipes"), {"recipe": recipe, "KL penalty": penalty}, MEASURED)


def smollm2_table():
    shown = {"what learns": what_learns, "kl_coef": coefficient}
    return run_table(runs_of("smollm2"), shown, SMOLLM2)


# 2. Of lab.verify_kl: what is enumerated.

GRADIENT_ROWS = [  # shown as, estimator, gradient, placement, where to use it
    ("k1, k2, k3", "k3", "reverse", "loss", "the default: right for each token's own KL"),
    ("exact", "exact", "any", "loss", "least noise; it sums over the vocabulary"),
    ("exact_forward", "exact_forward", "any", "loss", "another divergence, on purpose"),
    ("k1", "k1", "as_written", "loss", "never (refused)"),
    ("k2", "k2", "as_written", "loss", "the same as reverse in the first epoch"),
    ("k3", "k3", "as_written", "loss", "to reproduce DeepSeekMath"),
    ("k1", "k1", "reverse", "loss_to_go", "as k1 in the reward; later epochs have their own KL"),
    ("k3", "k3", "reverse", "loss_to_go", "only near the reference; else the noise is large"),
    ("exact", "exact", "any", "loss_to_go", "for the KL of whole responses; least noise"),
    ("k2", "k2", "reverse", "loss_to_go", "never (refused): k1 is better in the first epoch"),
    ("k1", "k1", "any", "reward", "for the KL of whole responses, one epoch; as in PPO for RLHF"),
    ("k2", "k2", "any", "reward", "never (refused)"),
    ("k3", "k3", "any", "reward", "never (refused)"),
]
GRADIENT_COLUMNS = {  # policy, sampled by
    "one token, first epoch": ("one step", "policy"),
    "one token, later epochs": ("one step", "old"),
    "several tokens, first epoch": ("3 steps, shared", "policy"),
    "several tokens, later epochs": ("3 steps, shared", "old"),
}
TARGETS = {
    "reverse KL per token": "exact",
    "KL of whole responses": "exact",
    "zero": "**zero**",
    "forward KL per token": "gradient of KL(reference ‖ policy)",
    "minus KL(old || policy)": "pushes **away** from the old policy",
}


def gradient_cell(rows):
    """The rows of one setting in one column -> what its expected gradient is."""
    for row in rows:
        is_whole = row["policy"] == "one step" or row["target"] == "KL of whole responses"
        if row["claim"] == "exact" and is_whole:
            return TARGETS[row["target"]]
    if not rows[0]["median cosine to sequence KL"]:
        return "**zero**"
    cosine = float(rows[0]["median cosine to sequence KL"])
    return f"cosine {cosine:.2f}" if cosine < 0.995 else f"cosine {cosine:.3f}"


def gradient_table():
    rows = [row for row in read_csv("kl_gradients") if not row["note"]]
    groups = grouped(rows, "policy", "sampled by", "estimator", "gradient", "placement")
    lines = []
    for shown, *setting, use in GRADIENT_ROWS:
        cells = [gradient_cell(groups[*column, *setting]) for column in GRADIENT_COLUMNS.values()]
        lines.append([shown, *setting[1:], *cells, use])
    headers = ["`kl_estimator`", "`kl_gradient`", "`kl_in`", *GRADIENT_COLUMNS, "use"]
    return table(headers, lines)


def mistake_table():
    """Penalties as published code has them, and what they do."""
    lines = []
    for row in read_csv("kl_mistakes"):
        value, size, direction = (float(row[name]) for name in ("value", "size", "cosine"))
        gradient = "**zero**"
        if size > 1e-9:
            gradient = f"{size:.1f} times as long, cosine {direction:.2f}"
        lines.append([f"`{row['formula']}`", row["in"], f"{value:.1f}", gradient])
    return table(["penalty", "in the", "value / KL", "gradient, beside that of the KL"], lines)


def explosion_table():
    lines = []
    for (term,), rows in grouped(read_csv("kl_explosion"), "KL term").items():
        n_large = sum(norm > 1e6 for norm in numbers(rows, "largest gradient norm"))
        kl = statistics.median(numbers(rows, "last KL per token"))
        lines.append([term, f"{n_large} of {len(rows)}", f"{kl:.2f}"])
    headers = ["seeds with a gradient norm above 1e6", "KL per token at the end, median"]
    return table(["KL term in the loss", *headers], lines)


# 3. Of lab.architectures, lab.crash_test, lab.bench, lab.race, lab.mutation and lab.gpu.


def architecture_table():
    """How many model types are right in each mode, and which are not in some."""
    lines = []
    for (verdict,), rows in sorted(grouped(read_csv("architectures"), "verdict").items()):
        modes = [row["mode"] for row in rows]
        counts = [modes.count(mode) for mode in architectures.MODES]
        names = dict.fromkeys(f"`{row['name']}`" for row in rows)
        lines.append([verdict, *counts, "" if verdict == "right" else ", ".join(names)])
    return table(["verdict", *architectures.MODES, "which, in some mode"], lines)


def kill_table():
    """Runs that were killed and resumed."""
    lines = []
    for key, rows in grouped(read_csv("kills"), "engine", "parts").items():
        verdicts = [{row["killed"], row["same_weights"], row["same_log"]} for row in rows]
        lines.append([*key, len(rows), verdicts.count({"True"})])
    return table(["engine", "parts", "killed", "ended with the same bits"], lines)


def mutant_table():
    """How many mutants of each section the quick tests see."""
    lines = []
    for (section,), rows in grouped(read_csv("mutation"), "section").items():
        lines.append([section, len(rows), [row["seen"] for row in rows].count("True")])
    return table(["section", "mutants", "seen"], lines)


def speed_table():
    """A step of starter.py, with support/ and alone, and of TRL's, in turns."""
    lines = []
    for shown, name in (("support/", "bench_step"), ("alone", "bench_alone")):
        for case, rows in grouped(read_csv(name), "size", "dtype", "kl_penalty").items():
            newest = rows[-1]
            times = []
            for side in ("ours", "trl"):
                mean, least, most = (newest[f"{side}_{x}s"] for x in ("", "min_", "max_"))
                times.append(f"{mean} ({least}–{most})")
            lines.append([shown, *case, *times, newest["ratio"]])
    sides = ["starter.py, s", "TRL 1.16, s"]
    return table(["with", "model", "dtype", "KL penalty", *sides, "ratio"], lines)


def race_table():
    return table(
        ["until", "seeds", "starter.py, s", "TRL 1.16, s", "median ratio"], race_lines("tiny")
    )


def memory_table():
    """By the formula of support/memory.py."""
    groups = grouped(read_csv("gpus"), "settings")
    lines = []
    for (settings,), rows in groups.items():
        shown = f"`{settings}`" if settings else "the default"
        lines.append([shown, *(row["gb"] for row in rows)])
    return table(["GB for", *(row["model"] for row in rows)], lines)


GPU = {  # header: column
    "model": "model",
    "s a step": "step_s",
    "s sampling": "rollout_s",
    "GB": "gb",
    "GB by the formula": "formula_gb",
    "nats between sampler and trainer": "sampler_diff",
    "solved, %": "solved",
}


def run_on_gpu_table():
    """Runs on one GPU, sampled by transformers and by vLLM."""
    lines = []
    for sampler, name in (("transformers", "gpu"), ("vLLM", "gpu_vllm")):
        for row in read_csv(name):
            if row["gb"]:  # others are of parts of a run
                lines.append([sampler, *(row[column] for column in GPU.values())])
    return table(["sampled by", *GPU], lines)


# 4. The pages.

TABLES = {
    "penalty": penalty_table,
    "machines": machine_table,
    "coefficients": coefficient_table,
    "divergences": divergence_table,
    "methods": method_table,
    "recipes": recipe_table,
    "smollm2": smollm2_table,
    "gradients": gradient_table,
    "mistakes": mistake_table,
    "explosion": explosion_table,
    "architectures": architecture_table,
    "kills": kill_table,
    "mutants": mutant_table,
    "speed": speed_table,
    "race": race_table,
    "gpus": memory_table,
    "gpu": run_on_gpu_table,
}
BLOCK = re.compile(r"(<!-- (table|console): (\w+) -->\n).*?(<!-- end -->)", flags=re.S)
CONSOLE = RESULTS / "console_off.txt"
CONSOLE_LINES = [  # how the lines begin that are kept
    "Eval at step 0 ",
    "Step 1 ",
    "...",
    "Step 150 ",
    "Eval at step 150 ",
    "...",
    "  solved",
    "  retention",
]


def write_console():
    """Runs starter.py, and keeps how its output begins and ends."""
    with tempfile.TemporaryDirectory() as out_dir:
        run = [sys.executable, "starter.py", "--out_dir", out_dir]
        printed = subprocess.check_output(run, cwd=REPOSITORY, text=True)
    kept = []
    for beginning in CONSOLE_LINES:
        found = [line for line in printed.splitlines() if line.startswith(beginning)]
        kept += found or [beginning]
    CONSOLE.write_text("\n".join(kept) + "\n")


def with_tables(text):
    """Returns a page with each block made from lab/results."""

    def fresh(match):
        first_line, kind, name, last_line = match.groups()
        block = f"```text\n{CONSOLE.read_text()}```" if kind == "console" else TABLES[name]()
        return f"{first_line}{block}\n{last_line}"

    return BLOCK.sub(fresh, text)


# 5. The figures of README.md.


def draw_learning(figure):
    """Solved and other skills over the steps, a line for each seed."""
    panels = figure.subplots(1, 2)
    shown = {
        "trained task: solved, %": "curve_solved",
        "four other skills: solved, %": "curve_kept",
    }
    for (settings, rows), color in zip(runs_of("learning"), ("C3", "C0")):
        for panel, (title, column) in zip(panels, shown.items()):
            panel.set(xlabel="step", ylabel=title)
            for row in rows:
                values = [100 * float(share) for share in row[column].split()]
                steps = range(0, settings["eval_every"] * len(values), settings["eval_every"])
                [line] = panel.plot(steps, values, color=color, alpha=0.8, linewidth=1.2)
        line.set_label(f"KL penalty {penalty(settings)}")
    return "three seeds each"


def draw_penalty(figure):
    """Solved against other skills for several coefficients: each seed, and the mean."""
    panel = figure.subplots()
    groups = [run for run in runs_of("kl_divergences") if kind_of_kl(run[0]) in ("", "k3")]

    def points(rows, moment):
        columns = (f"solved_{moment}", f"kept_{moment}")
        return [[100 * share for share in numbers(rows, column)] for column in columns]

    before = points([row for _, rows in groups for row in rows], "before")
    panel.plot(*map(statistics.mean, before), "k*", markersize=13, label="before training")
    for (settings, rows), color in zip(groups, ("C3", "C1", "C2", "C0", "C4")):
        x, y = points(rows, "after")
        panel.plot(x, y, "o", color=color, alpha=0.4, markersize=5)
        label = f"kl_coef = {coefficient(settings)}"
        if penalty(settings) == "off":
            label = "no KL penalty"
        mean = statistics.mean(x), statistics.mean(y)
        panel.plot(*mean, "D", color=color, markersize=9, label=label)
    panel.set(xlabel="trained task: solved, %", ylabel="four other skills: solved, %")
    return "mean, and each of five seeds"


def draw_figures():
    from matplotlib.figure import Figure

    for name, draw in (("learning", draw_learning), ("kl_penalty", draw_penalty)):
        figure = Figure(figsize=(9, 3.4), dpi=100, layout="constrained")
        title = draw(figure)
        for panel in figure.axes:
            panel.grid(alpha=0.3)
        figure.legend(loc="outside right center", frameon=False, title=title)
        figure.savefig(REPOSITORY / "lab" / "figures" / f"{name}.png")


if __name__ == "__main__":
    if "--console" in sys.argv:
        write_console()
    if "--figures" in sys.argv:
        draw_figures()
    for page in PAGES:
        before = page.read_text("utf-8")
        after = with_tables(before)
        if after != before:
            page.write_text(after, "utf-8")
            print(f"{page.relative_to(REPOSITORY)}: new numbers")
