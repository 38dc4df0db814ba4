"""Puts the numbers of lab/results into README.md, README_KL.md, recipes/README.md and docs/*.md.

    python -m lab.tables              fills the pages; measures nothing
    python -m lab.tables --figures    also draws lab/figures/*.png (needs matplotlib)

A page has <!-- table: NAME --> or <!-- console: NAME --> where a table or the output of a run
goes, and <!-- end --> after it; what stands between them is replaced. The output is that of the
middle run of lab/results/machines.csv, made by

    export OMP_NUM_THREADS=2
    python starter.py --precision float32 | grep -E "^(Eval at|Step (1|150)/)" > $FILE

where FILE=lab/results/console_off.txt, with dots where lines are left out.
"""

import json
import re
import statistics
import sys

import numpy

import starter
from lab.architectures import MODES
from lab.race import race_lines
from lab.rows import REPOSITORY, RESULTS, read_csv

PAGES = [
    *REPOSITORY.glob("*.md"),
    *REPOSITORY.glob("recipes/*.md"),
    *sorted(REPOSITORY.glob("docs/*.md")),
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


def described(settings):
    """Returns the settings of a run, with the texts that tables show of them."""
    texts = {"KL penalty": "off", "kl_coef": "off", "KL": "", "kl_adaptation_method": "off"}
    if "use_kl_penalty" in settings:
        names = ("kl_gradient", "kl_in", "loss_average")
        others = [settings[name] for name in names if name in settings]
        texts = {
            "KL penalty": "on",
            "kl_coef": f"{settings.get('kl_coef', starter.cfg_with().kl_coef):g}",
            "KL": ", ".join([settings.get("kl_estimator", "k3"), *others]),
            "kl_adaptation_method": settings.get("kl_adaptation_method", "none"),
        }
    return settings | texts


def runs_of(name):
    """Returns [(described settings, rows of its seeds)]. "what" says in words what was tried."""
    runs = []
    for (settings,), rows in grouped(read_csv(name), "settings").items():
        of_rows = {"runs": len(rows), "seeds": len(rows), "what": rows[0].get("what")}
        runs.append((described(json.loads(settings)) | of_rows, rows))
    return runs


SOLVED = {"solved, %": ("solved_after", ".0%")}  # header: column of the csv file, form
SKILLS = {"other skills, %": ("kept_after", ".0%")}
QUESTIONS = {"questions kept, %": ("kept_after", ".0%")}
KL = {"KL per token": ("kl_per_token", ".3f")}
LARGE_KL = {"KL per token": ("kl_per_token", ".2f")}
MEASURED = SOLVED | SKILLS | KL


def run_lines(runs, shown, measured):
    """Returns a line for each of [(described settings, rows)]: the settings that are shown, and
    what was measured."""
    lines = []
    for settings, rows in runs:
        cells = [settings[name] for name in shown]
        lines.append([*cells, *(spread(rows, *column) for column in measured.values())])
    return lines


def run_table(runs, shown, measured=MEASURED):
    return table([*shown, *measured], run_lines(runs, shown, measured))


def n_steps_of(settings):
    return settings.get("n_train_steps", starter.PRESETS["tiny"]["n_train_steps"])


def name_of_task(settings):
    """Of a run in coefficients.csv or smollm2.csv."""
    task = settings.get("task", "Countdown")
    if settings.get("preset") == "smollm2":
        task = "SmolLM2: addition"
    # Those of the preset before have their group_size with them
    return task + ", LoRA" * ("lora_rank" in settings) + ", before" * is_of_before(settings)


def is_of_before(settings):
    return "group_size" in settings


def penalty_table():
    """Without and with the KL penalty, by its defaults."""
    default = f"{starter.cfg_with().kl_coef:g}"
    lines = []
    for settings, rows in [*runs_of("coefficients"), *runs_of("smollm2")]:
        kl = settings["kl_coef"], settings["kl_adaptation_method"]
        is_shown = "lora_rank" not in settings and not is_of_before(settings)
        if kl in (("off", "off"), (default, "none")) and is_shown:
            cells = spread(rows, "solved_after"), spread(rows, "kept_after")
            lines.append([name_of_task(settings), settings["kl_coef"], *cells])
    return table(["task", "`kl_coef`", "solved, %", "kept, %"], lines)


def default_table():
    """What was tried for the default run, losers too."""
    runs = runs_of("default")
    for settings, _ in runs:
        settings["steps"] = n_steps_of(settings)
    return run_table(runs, ["what", "steps", "runs"], SOLVED | SKILLS)


def agents_table():
    """A second try, learnt with an agent and without."""
    lines = []
    for settings, rows in runs_of("agents"):
        learnt = {"before": "before training", "after": "the agent"}
        if "model_id" in settings:
            learnt = {"after": "one turn"}
        for moment, name in learnt.items():
            first_try = f"solved_{moment}"
            for row in rows:
                # Of the mean 1, 0.8 and 0.1 are the rewards of the first try, the second, and none
                mean = float(row[f"reward_mean_{moment}"])
                row["second_try"] = (mean - 0.1 - 0.9 * float(row[first_try])) / 0.7
            columns = (first_try, "second_try", f"kept_{moment}")
            seconds = spread(rows, "s_per_step", ".2f") if name == "the agent" else ""
            lines.append([name, *(spread(rows, column) for column in columns), seconds])
    headers = ["learnt", "first try, %", "second try, %", "other skills, %", "s a step"]
    return table(headers, lines)


def gym_table():
    """SmolLM2 with tasks of reasoning_gym."""
    measured = {
        "solved, %, before": ("solved_before", ".1%"),
        "solved, %, after": ("solved_after", ".1%"),
        "score before": ("reward_mean_before", ".2f"),
        "score after": ("reward_mean_after", ".2f"),
    }
    return run_table(runs_of("gym"), ["task", "seeds"], measured)


def agents_cost_table():
    lines = []
    for row in read_csv("agents_cost"):
        ratio = float(row["seconds"]) / float(row["beside"])
        lines.append([row["what"], row["seconds"], row["beside"], f"{ratio:.2f}"])
    return table(["what is compared", "s", "s", "ratio"], lines)


def machines_table():
    """Runs of all numbers of threads and sets of instructions, by processor and dtype."""
    of_machines = []
    for settings, rows in runs_of("machines"):
        for row in rows:
            processor, _, _ = row["machine"].rpartition(",")  # of threads
            of_machines.append(row | {"processor": processor, "dtype": settings["precision"]})
    runs = []
    for (processor, dtype), rows in grouped(of_machines, "processor", "dtype").items():
        runs.append(({"processor": processor, "dtype": dtype, "runs": len(rows)}, rows))
    return run_table(runs, ["processor", "dtype", "runs"], SOLVED | SKILLS)


def coefficients_table():
    """Of the default run, README's own data, and LoRA, with each coefficient and with a rule. Of
    the preset before what was not measured with the present one."""
    runs = []
    shown = set()
    for settings, rows in runs_of("coefficients"):
        measured = name_of_task(settings).removesuffix(", before"), settings["kl_coef"]
        is_plain = settings["kl_adaptation_method"] in ("off", "none")
        if is_of_before(settings) and is_plain and measured in shown:
            continue
        shown.add(measured)
        coefficient = settings["kl_coef"]
        if not is_plain:
            coefficient += f", `{settings['kl_adaptation_method']}`"
        runs.append((settings | {"task": name_of_task(settings), "kl_coef": coefficient}, rows))
    return run_table(runs, ["task", "kl_coef"])


def divergences_table():
    runs = []
    for settings, rows in runs_of("kl_divergences"):
        if settings["kl_coef"] in ("off", "0.3", "1"):
            runs.append((settings, rows))
    measured = SOLVED | {"pass@8, %": ("pass_at_8_after", ".0%")} | SKILLS
    all_rows = [row for _, rows in runs for row in rows]
    before = ["before training", ""]
    for column, form in measured.values():
        before.append(spread(all_rows, column.replace("after", "before"), form))
    lines = run_lines(runs, ["KL", "kl_coef"], measured | KL)
    return table(["KL", "kl_coef", *measured, *KL], [[*before, "0"], *lines])


def methods_table():
    """Those whose KL is in the loss."""
    runs = [run for run in runs_of("kl") if "kl_in" not in run[0]]
    return run_table(runs, ["kl_adaptation_method"])


def recipes_table():
    runs = runs_of("recipes")
    for settings, _ in runs:
        names = ("epochs_per_rollout", "loss_average", "kl_coef")
        others = [f"`{x}={settings[x]}`" for x in names if settings.get(x, "off") != "off"]
        settings["recipe"] = ", ".join([settings.get("recipe", "starter.py"), *others])
    return run_table(runs, ["recipe", "seeds"])


def precision_table():
    """vLLM against trainer, in the first and the last tenth of the steps."""
    runs = [run for run in runs_of("precision") if run[0]["engine"] == "vllm"]
    for settings, rows in runs:
        settings["model"] = settings.get("preset", "built-in")
        for row in rows:
            row["first"], *_, row["last"] = row["curve_nats"].split()
    nats = {"nats, first steps": ("first", ".1g"), "last steps": ("last", ".1g")}
    return run_table(runs, ["model", "precision"], nats | SOLVED)


def teacher_runs():
    """Runs that follow a teacher, and others that follow the reward."""
    runs = runs_of("teacher")
    for settings, _ in runs:
        student = settings.get("model_id", settings.get("preset", "built-in"))
        if isinstance(student, dict):
            student = "smaller" if "sizes" in student else "built-in, which forgot"
        teacher = "reward"
        if "ref_model_id" in settings:
            teacher = f"teacher, {settings['KL']}" + " and reward" * ("reward" not in settings)
        settings |= {"student": student, "taught by": teacher}
    return runs


def teacher_table():
    return run_table(teacher_runs(), ["student", "taught by"])


def smollm2_table():
    runs = runs_of("smollm2")
    for settings, _ in runs:
        settings["what learns"] = "LoRA 16" if "lora_rank" in settings else "all weights"
    measured = SOLVED | QUESTIONS | LARGE_KL | {"s a step": ("s_per_step", ".1f")}
    return run_table(runs, ["what learns", "kl_coef"], measured)


def schedule_table():
    """SmolLM2's preset by learning rates and schedules."""
    runs = runs_of("smollm2_schedule")
    for settings, _ in runs:
        settings["learning rate"] = settings["what"]
    return run_table(runs, ["learning rate", "seeds"], SOLVED | QUESTIONS | LARGE_KL)


# 2. Of lab.verify_kl: what is enumerated.

USES = {  # estimator, gradient and placement: where to use them
    "k1, k2, k3 | reverse | loss": "the default: right for each token's own KL",
    "exact | any | loss": "least noise; it sums over the vocabulary",
    "exact_forward | any | loss": "another divergence, on purpose",
    "k1 | as_written | loss": "never (refused)",
    "k2 | as_written | loss": "the same as reverse in the first epoch",
    "k3 | as_written | loss": "to reproduce DeepSeekMath",
    "k1 | reverse | loss_to_go": "as k1 in the reward; later epochs have their own KL",
    "k3 | reverse | loss_to_go": "only near the reference; else the noise is large",
    "exact | any | loss_to_go": "for the KL of whole responses; least noise",
    "k2 | reverse | loss_to_go": "never (refused): k1 is better in the first epoch",
    "k1 | any | reward": "for the KL of whole responses, one epoch; as in PPO for RLHF",
    "k2 | any | reward": "never (refused)",
    "k3 | any | reward": "never (refused)",
}
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


def gradients_table():
    names = ["policy", "sampled by", "estimator", "gradient", "placement"]
    groups = grouped(read_csv("kl_gradients"), *names)
    lines = []
    for setting, use in USES.items():
        estimators, gradient, placement = setting.split(" | ")
        of_setting = (estimators.partition(",")[0], gradient, placement)
        cells = []
        for column in GRADIENT_COLUMNS.values():
            cells.append(gradient_cell(groups[*column, *of_setting]))
        lines.append([setting, *cells, use])
    headers = ["`kl_estimator`", "`kl_gradient`", "`kl_in`", *GRADIENT_COLUMNS, "use"]
    return table(headers, lines)


def mistakes_table():
    """Penalties as published code has them, and what they do."""
    lines = []
    for row in read_csv("kl_mistakes"):
        size, direction = float(row["size"]), float(row["cosine"])
        gradient = "**zero**"
        if size > 1e-9:
            gradient = f"{size:.1f}, {direction:.2f}"
        lines.append([f"`{row['formula']}`", row["in"], gradient])
    return table(["penalty", "in the", "gradient / the KL's: length, cosine"], lines)


def explosion_table():
    lines = []
    for (term,), rows in grouped(read_csv("kl_explosion"), "KL term").items():
        n_large = sum(norm > 1e6 for norm in numbers(rows, "largest gradient norm"))
        lines.append([term, f"{n_large} of {len(rows)}"])
    return table(["KL term in the loss", "seeds with a gradient norm above 1e6"], lines)


# 3. Of lab.architectures, lab.crash_test, lab.bench, lab.race, lab.mutation and lab.gpu.


def architectures_table():
    """How many model types are right in each mode, and which are not in some."""
    lines = []
    for (verdict,), rows in sorted(grouped(read_csv("architectures"), "verdict").items()):
        modes = [row["mode"] for row in rows]
        counts = [modes.count(mode) for mode in MODES]
        names = dict.fromkeys(f"`{row['name']}`" for row in rows)
        lines.append([verdict, *counts, "" if verdict == "right" else ", ".join(names)])
    return table(["verdict", *MODES, "which, in some mode"], lines)


def count_table(name, columns, counted, headers):
    """How many rows there are of each kind, and of how many the column `counted` is true."""
    lines = []
    for kind, rows in grouped(read_csv(name), *columns).items():
        n_true = [row[counted] for row in rows].count("True")
        lines.append([*kind, len(rows), n_true])
    return table([*columns, *headers], lines)


def kills_table():
    """Runs that were killed and resumed."""
    headers = ["killed", "ended with the same bits"]
    return count_table("kills", ["engine", "parts"], "same_bits", headers)


def mutants_table():
    """How many mutants of each section the quick tests see."""
    return count_table("mutation", ["section"], "seen", ["mutants", "seen"])


def speed_table():
    """A step of starter.py, with support/ and alone, and of TRL's, in turns."""
    kind = ["with", "model", "dtype", "KL penalty"]
    columns = [*kind, "starter.py, s", "TRL 1.16, s", "ratio"]
    lines = []
    for rows in grouped(read_csv("bench"), *kind).values():
        newest = rows[-1]
        lines.append([newest[column] for column in columns])
    return table(columns, lines)


def vllm_table():
    """A step of both sides by phase, with vLLM in the same process."""
    lines = []
    for (model, dtype), rows in grouped(read_csv("bench_vllm"), "model", "dtype").items():
        for row in rows:
            cells = [row[name] for name in ("generate_s", "sync_s", "rest_s", "step_s")]
            ratio = float(row["step_s"]) / float(rows[0]["step_s"])
            lines.append([model, dtype, row["side"], *cells, f"{ratio:.2f}"])
    headers = ["model", "dtype", "side", "sampling, s", "hand-over, s", "the rest, s", "step, s"]
    return table([*headers, "ratio"], lines)


def busy_table():
    lines = []
    for kind, rows in grouped(read_csv("bench_busy"), "side", "threads", "GOMP_SPINCOUNT").items():
        lines.append([*kind, *(row["s"] for row in rows)])
    headers = ["side", "threads", "`GOMP_SPINCOUNT`", "quiet, s", "beside a busy program, s"]
    return table(headers, lines)


def race_table():
    headers = ["until", "seeds", "starter.py, s", "TRL 1.16, s", "median ratio"]
    return table(headers, race_lines("tiny"))


def gpus_table():
    """By the formula of support/memory.py."""
    groups = grouped(read_csv("gpus"), "settings")
    lines = []
    for (settings,), rows in groups.items():
        shown = f"`{settings}`" if settings else "the default"
        lines.append([shown, *(row["gb"] for row in rows)])
    return table(["GB for", *(row["model"] for row in rows)], lines)


def cards_table():
    """What numbers of cards train, by the same formula."""
    lines = []
    for (card_gb, n_cards), rows in grouped(read_csv("cards"), "card_gb", "cards").items():
        cells = []
        for row in rows:
            tp = f", `vllm_tp={row['vllm_tp']}`" if row["vllm_tp"] not in ("", "1") else ""
            cells.append(f"{row['trained']}{tp}" + (f" ({row['gb']})" if row["gb"] else ""))
        lines.append([f"{n_cards} of {card_gb} GB", *cells])
    return table(["cards", *(row["model"] for row in rows)], lines)


def parts_table():
    """What a process takes while a model is loaded, handed over and saved."""
    lines = []
    for (phase,), rows in grouped(read_csv("parts"), "phase").items():
        mb = {row["way"]: row["mb_at_most"] for row in rows}
        lines.append([phase, mb["whole"], mb["in parts"]])
    return table(["MB", "whole in each process", "in parts"], lines)


GPU = {  # header: column
    "model": "model",
    "s a step": "step_s",
    "s sampling": "rollout_s",
    "GB": "gb",
    "GB by the formula": "formula_gb",
    "nats between sampler and trainer": "sampler_diff",
    "solved, %": "solved",
}


def gpu_table():
    """Runs on one GPU, sampled by transformers and by vLLM."""
    lines = []
    for sampler, name in (("transformers", "gpu"), ("vLLM", "gpu_vllm")):
        for row in read_csv(name):
            row["model"] = row["model"] or row.get("row")  # as newer rows have it
            if row["gb"]:  # others are of parts of a run
                lines.append([sampler, *(row[column] for column in GPU.values())])
    return table(["sampled by", *GPU], lines)


UPDATE = {  # header: column
    "changes": "row",
    "s": "s",
    "share of peak": "share",
    "GB": "gb",
}


def updates_table():
    """An update of Qwen3-1.7B's shape with each of the changes that docs/hardware.md numbers."""
    rows = read_csv("gpu_update")[:4]
    return table(UPDATE, [[row[column] for column in UPDATE.values()] for row in rows])


# 4. The pages.


def off_console():
    """How the output of starter.py begins and ends."""
    return f"```text\n{(RESULTS / 'console_off.txt').read_text()}```"


BLOCK = re.compile(r"(<!-- (\w+): (\w+) -->\n).*?(<!-- end -->)", flags=re.S)


def with_tables(text):
    """Returns a page with each block made from lab/results, by the function of its name."""

    def fresh(block):
        make = globals()[f"{block[3]}_{block[2]}"]
        return f"{block[1]}{make()}\n{block[4]}"

    return BLOCK.sub(fresh, text)


# 5. The figures of README.md.


def draw_curves(panel, runs, column, name):
    """A line for each seed over the steps, a colour for each setting."""
    for i, (settings, rows) in enumerate(runs):
        for row in rows:
            values = [float(value) for value in row[column].split()]
            [line] = panel.plot(
                numpy.linspace(0, n_steps_of(settings), len(values)), values, f"C{i}"
            )
        line.set_label(settings[name])
    panel.set_xlabel("step (each line is a run with another seed)")
    panel.legend(title=name)


def draw_learning(figure):
    """Solved and other skills over the steps."""
    left, right = figure.subplots(1, 2)
    runs = runs_of("learning")[:2]  # without an adaptive rule
    draw_curves(left, runs, "curve_solved", "KL penalty")
    draw_curves(right, runs, "curve_kept", "KL penalty")
    left.set(ylabel="trained task: share solved", ylim=(0, 1))
    right.set(ylabel="four other skills: share solved", ylim=(0, 1))


def draw_agents(figure):
    """The built-in model, over the steps: learnt with a second try, and in one turn."""
    left, right = figure.subplots(1, 2)
    [*_, (_, one_turn)] = runs_of("learning")  # by the preset that the agent's runs had
    [(_, agent), *_] = runs_of("agents")
    runs = [({"learnt": "in one turn"}, one_turn), ({"learnt": "with a second try"}, agent)]
    draw_curves(left, runs, "curve_solved", "learnt")
    draw_curves(right, runs, "curve_kept", "learnt")
    left.set(ylabel="solved at the first try", ylim=(0, 1))
    right.set(ylabel="four other skills: share solved", ylim=(0, 1))


def draw_precision(figure):
    """Sampler against trainer over a run of the built-in model."""
    for panel, engine in zip(figure.subplots(1, 2, sharey=True), ("transformers", "vllm")):
        runs = [run for run in runs_of("precision") if run[0]["engine"] == engine]
        draw_curves(panel, runs[:3], "curve_nats", "precision")
        panel.set(title=f"sampled by {engine}", yscale="log")
    figure.supylabel("|sampler − trainer|, nats per token")


def draw_teacher(figure):
    """Solved over the steps of the built-in model."""
    panel = figure.subplots()
    draw_curves(panel, teacher_runs()[:6], "curve_solved", "taught by")
    panel.set_ylabel("share solved")


def draw_penalty(figure):
    """Solved against other skills for several coefficients: each seed, and the mean."""

    def draw(panel, rows, moment, color, label):
        solved = numbers(rows, f"solved_{moment}")
        kept = numbers(rows, f"kept_{moment}")
        panel.plot(solved, kept, f"{color}.")
        panel.plot(statistics.mean(solved), statistics.mean(kept), f"{color}D", label=label)

    for panel, task in zip(figure.subplots(1, 2), ("Countdown", "sort.jsonl")):
        runs = [
            (settings["kl_coef"], rows)
            for settings, rows in runs_of("coefficients")
            if name_of_task(settings) == task
            and settings["kl_adaptation_method"] in ("off", "none")
        ]
        draw(panel, [row for _, rows in runs for row in rows], "before", "k", "before training")
        for i, (coefficient, rows) in enumerate(runs):
            draw(panel, rows, "after", f"C{i}", f"kl_coef = {coefficient}")
        panel.set(title=task, xlabel="trained task: share solved", ylabel="four other skills")
    panel.legend(title="dots: seeds\ndiamonds: their means", loc=(1.02, 0.2))


if __name__ == "__main__":
    if "--figures" in sys.argv:
        from matplotlib.figure import Figure

        for draw in (draw_learning, draw_penalty, draw_agents, draw_precision, draw_teacher):
            figure = Figure(figsize=(9, 3.4), layout="constrained")
            draw(figure)
            name = draw.__name__.removeprefix("draw_")
            figure.savefig(REPOSITORY / "lab" / "figures" / f"{name}.png")
    for page in PAGES:
        page.write_text(with_tables(page.read_text("utf-8")), "utf-8")
