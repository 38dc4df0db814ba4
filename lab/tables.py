"""Puts the numbers of lab/results into README.md, README_KL.md, recipes/README.md and docs/*.md.

    python -m lab.tables              fills the pages; measures nothing
    python -m lab.tables --console    first runs starter.py, for what it prints
    python -m lab.tables --figures    also draws lab/figures/*.png (needs matplotlib)

A page has <!-- table: NAME --> or <!-- console: NAME --> where a table or the output of a run
goes, and <!-- end --> after it; what stands between them is replaced.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from operator import itemgetter

from lab import architectures, sweep
from lab.race import race_lines
from lab.rows import REPOSITORY, RESULTS, numbers, read_csv
from starter import EXACT

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


def spread(values, digits=0):
    """Returns "mean (smallest–largest)"; "" without values."""
    values = list(values)
    if not values:
        return ""
    three = (statistics.mean(values), min(values), max(values))
    return "{} ({}–{})".format(*(f"{value:.{digits}f}" for value in three))


def per_cent(values):
    return spread(100 * value for value in values)


def grouped(rows, *columns):
    """Returns {values of these columns: rows}, in the order of the file."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def table_of(groups, of_key, measured, has_line_before=False):
    """Returns a table with a line for each (key, rows) of groups.

    of_key: {header: function of the key}. measured: (header, column of the csv file, function that
    shows its values). has_line_before: whether it begins with "before training".
    """
    lines = [
        [
            *(text_of(key) for text_of in of_key.values()),
            *(show(numbers(rows, column)) for _, column, show in measured),
        ]
        for key, rows in groups
    ]
    if has_line_before and groups:
        everything = [row for _, rows in groups for row in rows]
        first = ["before training", *[""] * (len(of_key) - 1)]
        for _, column, show in measured:
            if column.endswith("_after"):
                first.append(show(numbers(everything, column.replace("_after", "_before"))))
            else:
                first.append("0" if "kl_per" in column else "")
        lines.insert(0, first)
    return table([*of_key, *(header for header, *_ in measured)], lines)


# 1. Of lab.sweep: runs of main().  The key of a group is the settings.

SKILLS = ("max", "next", "reverse", "sort")  # of the built-in model, beside the trained task


def read_runs(name):
    """Returns the rows of a sweep, with columns that follow from the others."""
    rows = read_csv(name)
    for row in rows:
        if "questions_kept" in row:  # SmolLM2
            row["kept"] = row["questions_kept"]
            continue
        before, after = (
            [float(row[f"retention_{skill}_{moment}"]) for skill in SKILLS]
            for moment in ("before", "after")
        )
        row["other_skills_before"] = statistics.mean(before)
        row["kept"] = row["other_skills_after"] = statistics.mean(after)
    return rows


def runs_of(name, grid=None):
    """Returns [(settings, rows of its seeds)] of a grid, as far as the csv file holds them."""
    groups = grouped(read_runs(name), "settings")
    keys = [(settings, (sweep.key_of(settings),)) for settings in grid or sweep.SWEEPS[name]]
    return [(settings, groups[key]) for settings, key in keys if key in groups]


def coefficient(settings):
    return f"{settings.get('kl_coef', 0.3):g}" if settings.get("use_kl_penalty") else "off"


def kind_of_kl(settings):
    if "kl_coef" not in settings:
        return ""
    return ", ".join(
        [
            settings.get("kl_estimator", "k3"),
            *(
                settings[name]
                for name in ("kl_gradient", "kl_in", "loss_average")
                if name in settings
            ),
        ]
    )


def recipe(settings):
    others = [
        f"`{name}={value}`"
        for name, value in settings.items()
        if name not in ("recipe", "use_kl_penalty")
    ]
    return ", ".join([settings.get("recipe", "starter.py").replace("+", " + "), *others])


def what_learns(settings):
    return f"LoRA {settings['lora_rank']}" if "lora_rank" in settings else "all weights"


one_digit, two_digits, three_digits = (partial(spread, digits=digits) for digits in (1, 2, 3))
SOLVED = ("solved, %", "solved_after", per_cent)
OTHERS = ("other skills, %", "other_skills_after", per_cent)
KL = ("KL per token", "kl_per_token", three_digits)
MEASURED = [SOLVED, OTHERS, KL]

# What the penalty does: shown as, sweep, settings of its runs
PENALTY_ROWS = [
    ("built-in", "learning", sweep.SWEEPS["learning"][:2]),
    (
        "built-in, twice the rate",
        "kl_divergences",
        [sweep.SAMPLED, sweep.SAMPLED | sweep.ON | dict(kl_coef=0.3)],
    ),
    (
        "SmolLM2",
        "smollm2",
        [sweep.SMOLLM2, sweep.SMOLLM2 | sweep.ON | dict(kl_coef=0.3)],
    ),
    (
        "SmolLM2, LoRA",
        "smollm2",
        [sweep.SMOLLM2 | sweep.LORA, sweep.SMOLLM2 | sweep.LORA | sweep.ON | dict(kl_coef=0.3)],
    ),
]


def penalty_table():
    """Two models without and with the KL penalty."""
    lines = []
    for shown, name, grid in PENALTY_ROWS:
        for settings, rows in runs_of(name, grid):
            cells = [per_cent(numbers(rows, column)) for column in ("solved_after", "kept")]
            lines.append([shown, coefficient(settings), *cells])
    return table(["model", "`kl_coef`", "solved, %", "kept, %"], lines)


RUN_TABLES = {
    "penalty": penalty_table,
    "machines": lambda: table_of(  # with the row, for its processor
        [
            (settings | settings["environment"] | rows[0], rows)
            for name in ("machines", "machines_amx")
            for settings, rows in runs_of(name)
        ],
        {
            "processor": lambda settings: settings["machine"].partition(",")[0],
            "dtype": lambda settings: settings["precision"],
            "threads": lambda settings: settings["OMP_NUM_THREADS"],
            "instructions": lambda settings: settings.get("ATEN_CPU_CAPABILITY", "all"),
        },
        [
            (
                "solved, %, seed by seed",
                "solved_after",
                lambda shares: " ".join(f"{100 * share:.1f}" for share in shares),
            ),
            OTHERS,
        ],
    ),
    "coefficients": lambda: table_of(
        runs_of("kl_divergences", sweep.COEFFICIENTS),
        {"kl_coef": coefficient},
        MEASURED,
        has_line_before=True,
    ),
    "divergences": lambda: table_of(
        [
            (settings, rows)
            for settings, rows in runs_of("kl_divergences")
            if settings.get("kl_coef") in (None, 0.3, 1.0)  # the others, of exact, in README_KL.md
            and settings not in sweep.COEFFICIENTS[1:]
        ],
        {"KL": kind_of_kl, "kl_coef": coefficient},
        [SOLVED, ("pass@8, %", "pass_at_8_after", per_cent), OTHERS, KL],
        has_line_before=True,
    ),
    "methods": lambda: table_of(  # all from the same coefficient
        runs_of("kl"),
        {
            "kl_adaptation_method": lambda settings: settings.get(
                "kl_adaptation_method", "none" if "use_kl_penalty" in settings else "off"
            ),
            "KL": kind_of_kl,
        },
        MEASURED,
    ),
    "recipes": lambda: table_of(
        runs_of("recipes"),
        {
            "recipe": recipe,
            "KL penalty": lambda settings: "on" if "use_kl_penalty" in settings else "off",
        },
        MEASURED,
    ),
    "smollm2": lambda: table_of(
        runs_of("smollm2"),
        {"what learns": what_learns, "kl_coef": coefficient},
        [
            SOLVED,
            ("questions kept, %", "kept", per_cent),
            ("KL per token", "kl_per_token", two_digits),
            ("s a step", "s_per_step", one_digit),
        ],
    ),
}


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
    "reverse KL per token": "exact",
    "KL of whole responses": "exact",
    "zero": "**zero**",
    "forward KL per token": "gradient of KL(reference ‖ policy)",
    "minus KL(old || policy)": "pushes **away** from the old policy",
}


def gradient_cell(rows):
    """The rows of one setting in one column -> what its expected gradient is."""
    for row in rows:
        if row["claim"] == "exact" and (
            row["policy"] == "one step" or row["target"] == "KL of whole responses"
        ):
            return TARGETS[row["target"]]
    if not rows[0]["median cosine to sequence KL"]:
        return "**zero**"
    cosine = float(rows[0]["median cosine to sequence KL"])
    return f"cosine {cosine:.2f}" if cosine < 0.995 else f"cosine {cosine:.3f}"


def gradient_table():
    groups = grouped(
        [row for row in read_csv("kl_gradients") if not row["note"]],
        "policy",
        "sampled by",
        "estimator",
        "gradient",
        "placement",
    )
    columns = {
        ("one step", "policy"): "one token, first epoch",
        ("one step", "old"): "one token, later epochs",
        ("3 steps, shared", "policy"): "several tokens, first epoch",
        ("3 steps, shared", "old"): "several tokens, later epochs",
    }
    lines = []
    for shown, estimator, gradient, place, use in GRADIENT_ROWS:
        any_gradient = place == "reward" or estimator in EXACT and place == "loss"
        lines.append(
            [
                shown,
                "any" if any_gradient else gradient,
                place,
                *(gradient_cell(groups[*column, estimator, gradient, place]) for column in columns),
                use,
            ]
        )
    return table(["`kl_estimator`", "`kl_gradient`", "`kl_in`", *columns.values(), "use"], lines)


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
    return table_of(
        grouped(read_csv("kl_explosion"), "KL term").items(),
        {"KL term in the loss": itemgetter(0)},
        [
            (
                "seeds with a gradient norm above 1e6",
                "largest gradient norm",
                lambda norms: f"{sum(norm > 1e6 for norm in norms)} of {len(norms)}",
            ),
            (
                "KL per token at the end, median",
                "last KL per token",
                lambda kl: f"{statistics.median(kl):.2f}",
            ),
        ],
    )


# 3. Of lab.architectures, lab.crash_test, lab.bench and lab.gpu.


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
        same = sum(
            row["killed"] == row["same_weights"] == row["same_log"] == "True" for row in rows
        )
        lines.append([engine, parts, len(rows), same])
    return table(["engine", "parts", "killed", "ended with the same bits"], lines)


def speed_table():
    """A step of starter.py, with support/ and alone, and of TRL's, in turns."""
    lines = []
    for shown, name in (("support/", "bench_step"), ("alone", "bench_alone")):
        for rows in grouped(read_csv(name), "size", "dtype", "kl_penalty").values():
            row = rows[-1]  # the newest
            times = [
                f"{row[f'{side}_s']} ({row[f'{side}_min_s']}–{row[f'{side}_max_s']})"
                for side in ("ours", "trl")
            ]
            lines.append(
                [shown, row["size"], row["dtype"], row["kl_penalty"], *times, row["ratio"]]
            )
    sides = ["starter.py, s", "TRL 1.16, s"]
    return table(["with", "model", "dtype", "KL penalty", *sides, "ratio"], lines)


def gpu_table():
    """By the formula of support/memory.py, written by `python -m lab.gpu --memory`."""
    groups = grouped(read_csv("gpus"), "settings")
    models = list(dict.fromkeys(row["model"] for row in read_csv("gpus")))
    lines = [
        [f"`{settings}`" if settings else "the default", *(row["gb"] for row in rows)]
        for (settings,), rows in groups.items()
    ]
    return table(["GB for", *models], lines)


def mutant_table():
    """How many mutants of each section the quick tests see."""
    lines = []
    for (section,), rows in grouped(read_csv("mutation"), "section").items():
        lines.append([section, len(rows), sum(row["seen"] == "True" for row in rows)])
    return table(["section", "mutants", "seen"], lines)


GPU = {  # header: column of gpu.csv and of gpu_vllm.csv
    "model": ("model", "row"),
    "s a step": ("step_s", "step_s"),
    "s sampling": ("rollout_s", "generate_s"),
    "GB": ("gb", "gb"),
    "GB by the formula": ("formula_gb", "formula_gb"),
    "nats between sampler and trainer": ("sampler_diff", "sampler_diff"),
    "solved, %": ("solved", "solved"),
}
WITH_VLLM = ["built-in", "Qwen3-1.7B", "Qwen3-1.7B, 24 GB"]  # rows of gpu_vllm.csv that are shown


def run_on_gpu_table():
    """Runs on one GPU, sampled by transformers and by vLLM."""
    lines = [
        ["transformers", *(row[column] for column, _ in GPU.values())] for row in read_csv("gpu")
    ]
    lines += [
        ["vLLM", *(row[column] for _, column in GPU.values())]
        for row in read_csv("gpu_vllm")
        if row["row"] in WITH_VLLM
    ]
    return table(["sampled by", *GPU], lines)


# 4. The pages.

RACE = ["until", "seeds", "starter.py, s", "TRL 1.16, s", "median ratio"]
TABLES = RUN_TABLES | {
    "gradients": gradient_table,
    "mistakes": mistake_table,
    "explosion": explosion_table,
    "architectures": architecture_table,
    "kills": kill_table,
    "mutants": mutant_table,
    "speed": speed_table,
    "gpus": gpu_table,
    "gpu": run_on_gpu_table,
    "race": lambda: table(RACE, [line[: len(RACE)] for line in race_lines("tiny")]),
}
BLOCK = re.compile(r"(<!-- (table|console): (\w+) -->\n).*?(<!-- end -->)", flags=re.S)
CONSOLE = RESULTS / "console_off.txt"


def write_console():
    """Runs starter.py, and keeps how its output begins and ends."""
    with tempfile.TemporaryDirectory() as out_dir:
        done = subprocess.run(
            [sys.executable, "starter.py", "--out_dir", out_dir],
            cwd=REPOSITORY,
            text=True,
            check=True,
            stdout=subprocess.PIPE,
        )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("Warning")]
    first = next(i for i, line in enumerate(lines) if line.startswith("Eval at step 0"))
    last = max(i for i, line in enumerate(lines) if line.startswith("Step "))
    report = next(i for i, line in enumerate(lines) if line.startswith("=== Report"))
    kept = [
        *lines[first : first + 2],
        "...",
        *lines[last : last + 2],
        "...",
        *(line for line in lines[report:] if line.startswith("  ")),
    ]
    CONSOLE.write_text("\n".join(kept) + "\n")


# 5. The figures of README.md.

COLORS = ("C3", "C1", "C2", "C0", "C4")


def draw_learning(figure):
    """Solved and other skills over the steps, a line for each seed."""
    panels = figure.subplots(1, 2)
    for panel, name in zip(panels, ("solved", "other_skills")):
        for (settings, rows), color in zip(runs_of("learning")[:2], ("C3", "C0")):
            for row in rows:
                values = [100 * float(share) for share in row[f"curve_{name}"].split()]
                steps = [settings["eval_every"] * i for i in range(len(values))]
                [line] = panel.plot(steps, values, color=color, alpha=0.8, linewidth=1.2)
            if name == "solved":
                line.set_label(f"KL penalty {'on' if 'use_kl_penalty' in settings else 'off'}")
        panel.set_xlabel("step")
    panels[0].set_ylabel("trained task: solved, %")
    panels[1].set_ylabel("four other skills: solved, %")
    return "three seeds each"


def draw_penalty(figure):
    """Solved against other skills for several coefficients: each seed, and the mean."""
    panel = figure.subplots()
    grid = [sweep.SAMPLED, *sweep.DIVERGENCES[len(sweep.COEFFICIENTS) :][:4]]  # of k3, the default
    groups = runs_of("kl_divergences", grid)

    def points(rows, moment):
        columns = [f"{name}_{moment}" for name in ("solved", "other_skills")]
        return [[100 * share for share in numbers(rows, column)] for column in columns]

    before = points([row for _, rows in groups for row in rows], "before")
    panel.plot(*map(statistics.mean, before), "k*", markersize=13, label="before training")
    for (settings, rows), color in zip(groups, COLORS):
        label = f"kl_coef = {settings['kl_coef']:g}" if "kl_coef" in settings else "no KL penalty"
        x, y = points(rows, "after")
        panel.plot(x, y, "o", color=color, alpha=0.4, markersize=5)
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
    if "--figures" in sys.argv:
        draw_figures()
    for page in PAGES:
        before = page.read_text("utf-8")
        after = with_tables(before)
        if after != before:
            page.write_text(after, "utf-8")
            print(f"{page.relative_to(REPOSITORY)}: new numbers")
