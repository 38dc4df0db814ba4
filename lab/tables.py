"""Puts the numbers of lab/results into README.md, README_KL.md, recipes/README.md and docs/*.md.

    python -m lab.tables              fills the pages; measures nothing
    python -m lab.tables --console    first runs starter.py, for what it prints
    python -m lab.tables --figure     also draws lab/figures/learning.png (needs matplotlib)

A page has <!-- table: NAME --> or <!-- console: NAME --> where a table or the output of a run
goes, and <!-- end --> after it; what stands between them is replaced.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from itertools import product
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
            row["lost"] = 1 - float(row["questions_kept"])
            continue
        before, after = (
            [float(row[f"retention_{skill}_{moment}"]) for skill in SKILLS]
            for moment in ("before", "after")
        )
        row["other_skills_before"] = statistics.mean(before)
        row["other_skills_after"] = statistics.mean(after)
        row["lost"] = row["other_skills_before"] - row["other_skills_after"]
        row["largest_fall"] = max(x - y for x, y in zip(before, after))
        row["last_beta"] = row["curve_beta"].rpartition(" ")[2]
    return rows


def runs_of(name, grid=None):
    """Returns [(settings, rows of its seeds)] of a grid, as far as the csv file holds them."""
    groups = grouped(read_runs(name), "settings")
    keys = [(settings, (sweep.key_of(settings),)) for settings in grid or sweep.SWEEPS[name]]
    return [(settings, groups[key]) for settings, key in keys if key in groups]


def penalty(settings):
    if not settings.get("use_kl_penalty"):
        return "no KL penalty (the default)"
    rule = settings.get("kl_adaptation_method")
    return "`use_kl_penalty = True`" + (f', `kl_adaptation_method = "{rule}"`' if rule else "")


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


def points(falls):
    return f"{100 * max(falls):.0f} points"


one_digit, two_digits, three_digits = (partial(spread, digits=digits) for digits in (1, 2, 3))
SEEDS = ("seeds", "seed", len)
SOLVED = ("solved, %", "solved_after", per_cent)
OTHERS = ("other skills, %", "other_skills_after", per_cent)
KL = ("KL per token", "kl_per_token", three_digits)
MEASURED = [SOLVED, OTHERS, KL, ("KL per response", "kl_per_response", two_digits)]
SMOLLM2_SETTINGS = {"what learns": what_learns, "KL": kind_of_kl, "kl_coef": coefficient}
SMOLLM2 = [
    SEEDS,
    SOLVED,
    ("KL per token", "kl_per_token", two_digits),
    ("KL(reference ‖ policy)", "forward_kl_per_token", two_digits),
    ("English, nats per token more", "english_nats_more", three_digits),
    ("questions kept, %", "questions_kept", per_cent),
    ("same tokens, %", "same_tokens", per_cent),
    ("s a step", "s_per_step", one_digit),
    ("peak memory, GB", "peak_gb", one_digit),
]

RUN_TABLES = {
    "penalty": lambda: table_of(
        runs_of("learning"),
        {"run of the built-in model": penalty},
        [*MEASURED[:3], ("largest fall of a skill, any seed", "largest_fall", points)],
        has_line_before=True,
    ),
    "machines": lambda: table_of(  # with the row, for its processor
        [
            (settings | settings["environment"] | rows[0], rows)
            for name in ("machines", "machines_amx")
            for settings, rows in runs_of(name)
        ],
        {
            "processor": lambda settings: settings["machine"].partition(",")[0],
            "dtype": lambda settings: "bfloat16" if settings["bf16"] else "float32",
            "threads": lambda settings: settings.get("OMP_NUM_THREADS", "all that it has"),
            "instructions": lambda settings: settings.get("ATEN_CPU_CAPABILITY", "all that it has"),
        },
        [
            (
                "solved, %, seed by seed",
                "solved_after",
                lambda shares: " ".join(f"{100 * share:.1f}" for share in shares),
            ),
            OTHERS,
            ("largest fall of a skill", "largest_fall", points),
        ],
    ),
    "coefficients": lambda: table_of(
        runs_of("kl_divergences", sweep.COEFFICIENTS),
        {"kl_coef": coefficient},
        [*MEASURED, *((skill, f"retention_{skill}_after", per_cent) for skill in SKILLS)],
        has_line_before=True,
    ),
    "divergences": lambda: table_of(
        runs_of("kl_divergences"),
        {"KL": kind_of_kl, "kl_coef": coefficient},
        [
            SEEDS,
            SOLVED,
            ("pass@1, %", "pass_at_1_after", per_cent),
            ("pass@8, %", "pass_at_8_after", per_cent),
            OTHERS,
            KL,
            ("KL(reference ‖ policy) per token", "forward_kl_per_token", three_digits),
        ],
        has_line_before=True,
    ),
    "methods": lambda: table_of(  # all from the same coefficient
        runs_of("kl"),
        {
            "kl_adaptation_method": lambda settings: settings.get(
                "kl_adaptation_method", "none" if "use_kl_penalty" in settings else "off"
            ),
            "KL": lambda settings: (
                ""
                if "use_kl_penalty" not in settings
                else f"{settings['kl_estimator']} in the {settings.get('kl_in', 'loss')}"
            ),
        },
        [
            *MEASURED,
            ("beta at the end", "last_beta", three_digits),
            ("length", "response_length_after", one_digit),
        ],
    ),
    "recipes": lambda: table_of(
        runs_of("recipes"),
        {
            "recipe": recipe,
            "KL penalty": lambda settings: "on" if "use_kl_penalty" in settings else "off",
        },
        MEASURED[:3],
    ),
    "smollm2": lambda: table_of(runs_of("smollm2"), SMOLLM2_SETTINGS, [*SMOLLM2[:3], *SMOLLM2[4:]]),
    "smollm2_divergences": lambda: table_of(
        runs_of("smollm2_divergences"), SMOLLM2_SETTINGS, SMOLLM2[:7]
    ),
}


def forgetting_table():
    """Over all runs of a sweep: which number goes along with what was lost."""
    lines = []
    for (model, name), (divergence, column) in product(
        [("built-in", "kl_divergences"), ("SmolLM2", "smollm2_divergences")],
        [
            ("KL(policy ‖ reference)", "kl_per_token"),
            ("KL(reference ‖ policy)", "forward_kl_per_token"),
        ],
    ):
        rows = read_runs(name)
        values, lost = numbers(rows, column), numbers(rows, "lost")
        ranks = [[sorted(x).index(value) for value in x] for x in (values, lost)]
        lines.append(
            [
                model,
                divergence,
                len(rows),
                f"{statistics.correlation(values, lost):.2f}",
                f"{statistics.correlation(*ranks):.2f}",
            ]
        )
    return table(["model", "per token", "runs", "correlation with what is lost", "of ranks"], lines)


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


ENUMERATED = {
    "variance": lambda: table_of(
        grouped(read_csv("kl_variance"), "gradient").items(),
        {"gradient of the KL of responses": itemgetter(0)},
        [
            ("variance, small drift", "of k1 in the reward", lambda shares: f"{shares[0]:.2f}"),
            ("large drift", "of k1 in the reward", lambda shares: f"{shares[1]:.2f}"),
            (
                "bias, large drift",
                "bias",
                lambda biases: f"{biases[1]:.2f}" if biases[1] > 1e-10 else "none",
            ),
        ],
    ),
    "explosion": lambda: table_of(
        grouped(read_csv("kl_explosion"), "KL term").items(),
        {"KL term in the loss": itemgetter(0)},
        [
            (
                "seeds with a gradient norm above 1e6",
                "largest gradient norm",
                lambda norms: f"{sum(norm > 1e6 for norm in norms)} of {len(norms)}",
            ),
            (
                "largest norm, median",
                "largest gradient norm",
                lambda norms: f"{statistics.median(norms):.2g}",
            ),
            (
                "KL per token at the end, median",
                "last KL per token",
                lambda kl: f"{statistics.median(kl):.2f}",
            ),
        ],
    ),
    "length": lambda: table_of(
        grouped(read_csv("kl_length"), "KL in", "kl_coef").items(),
        {"KL in": itemgetter(0), "kl_coef": itemgetter(1)},
        [
            (column, column, lambda values: f"{values[0]:.2f}")
            for column in ("P(answer)", "mean length", "KL per response", "KL per token")
        ],
    ),
}


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
        same = sum(
            row["killed"] == row["same_weights"] == row["same_log"] == "True" for row in rows
        )
        lines.append([engine, parts, len(rows), same])
    return table(["engine", "parts", "killed", "ended with the same bits"], lines)


SIZE_NAMES = {
    "S": "S: hidden 128, 4 layers, 16 new tokens",
    "M": "M: hidden 384, 6 layers, 16 new tokens",
    "M-64": "M, 64 new tokens",
    "L": "L: hidden 256, 4 layers, vocabulary 151,936, 16 new tokens",
}


def speed_table(name, memory):
    """A step of starter.py and of TRL's, in turns. memory: {header: column of the csv file}."""
    lines = []
    for rows in grouped(read_csv(name), "size", "dtype", "kl_penalty").values():
        row = rows[-1]  # the newest
        times = [
            f"{row[f'{side}_s']} ({row[f'{side}_min_s']} to {row[f'{side}_max_s']})"
            for side in ("ours", "trl")
        ]
        lines.append(
            [
                SIZE_NAMES[row["size"]],
                row["dtype"],
                row["kl_penalty"],
                *times,
                *(row[column] for column in ("ratio", *memory.values())),
            ]
        )
    return table(
        ["model", "dtype", "KL penalty", "starter.py, s", "TRL 1.16, s", "ratio", *memory], lines
    )


def gpu_table():
    """By the formula of support/memory.py, written by `python -m lab.bench --gpus`."""
    groups = grouped(read_csv("gpus"), "settings")
    models = list(dict.fromkeys(row["model"] for row in read_csv("gpus")))
    lines = [
        [f"`{settings}`" if settings else "the default", *(row["gb"] for row in rows)]
        for (settings,), rows in groups.items()
    ]
    return table(["GB for", *models], lines)


def mutant_table():
    lines = []
    for (section,), rows in grouped(read_csv("mutation"), "section").items():
        alive = [
            f"`{row['before'][:60]}` as `{row['after'][:60]}`"
            for row in rows
            if row["seen"] == "False"
        ]
        lines.append(
            [
                section,
                len(rows),
                len(rows) - len(alive),
                ", ".join(dict.fromkeys(alive)).replace("|", "\\|"),
            ]
        )
    return table(["section", "mutants", "seen", "not seen"], lines)


# 4. The pages.

GPU = {  # header: column
    "model": "model",
    "settings": "settings",
    "solved, %": "solved",
    "s a step": "step_s",
    "s sampling": "rollout_s",
    "GB": "gb",
    "GB by the formula": "formula_gb",
    "nats between sampler and trainer": "sampler_diff",
}
RACE = [
    "until",
    "seeds",
    "starter.py, s",
    "TRL 1.16, s",
    "median ratio",
    "range",
    "not reached by starter.py and TRL",
]
TABLES = (
    RUN_TABLES
    | ENUMERATED
    | {
        "forgetting": forgetting_table,
        "gradients": gradient_table,
        "mistakes": mistake_table,
        "architectures": architecture_table,
        "kills": kill_table,
        "mutants": mutant_table,
        "speed": lambda: speed_table("bench_step", {"GB": "ours_gb", "TRL, GB": "trl_gb"}),
        "alone": lambda: speed_table("bench_alone", {}),
        "gpus": gpu_table,
        "gpu": lambda: table(
            GPU, [[row[column] for column in GPU.values()] for row in read_csv("gpu")]
        ),
        "race": lambda: table(RACE, race_lines("tiny")),
    }
)
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


def draw_learning(path):
    """Solved and other skills over the steps, a line for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), dpi=100, layout="constrained")
    axes = figure.subplots(1, 2)
    groups = runs_of("learning")[:2]
    titles = {"solved": "trained task: solved, %", "other_skills": "not trained: other skills, %"}
    for axis, (name, title) in zip(axes, titles.items()):
        for (settings, rows), color in zip(groups, ("C3", "C0")):
            label = "use_kl_penalty = True" if "use_kl_penalty" in settings else "no KL penalty"
            for i, row in enumerate(rows):
                values = [100 * float(share) for share in row[f"curve_{name}"].split()]
                steps = [settings["eval_every"] * step for step in range(len(values))]
                axis.plot(
                    steps,
                    values,
                    color=color,
                    alpha=0.8,
                    linewidth=1.2,
                    label=label if i == 0 else None,
                )
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
