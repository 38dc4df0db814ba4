"""Puts the numbers of lab/results into README.md, README_KL.md and docs/*.md.

    python -m lab.tables

A page has <!-- table: NAME --> or <!-- console: NAME --> where a table or the output of a run
goes, and <!-- end --> after it; what stands between them is replaced. Nothing is measured here.
"""
import inspect
import math
import re
import statistics

import starter
from lab.ablate_kl import (
    BASE, COEFFICIENTS, CURVES, DEFAULTS, ENGINES, ESTIMATORS, HOT, METHODS,
    REPOSITORY, RESULTS, SEEDS, best_coefficient, controller_rows, groups_of, numbers_of,
    other_skills, read_csv, retention, rows_of, settings_of, skills_of, solved)
from lab import real_model
from lab.mutants import mutants_table
from support import memory

PAGES = [REPOSITORY / "README.md", REPOSITORY / "README_KL.md",
         REPOSITORY / "recipes" / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def markdown(header, lines):
    """Returns a table of texts."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def spread(values, digits=0):
    """Returns "mean (smallest to largest)"."""
    values = list(values)
    numbers = (statistics.mean(values), min(values), max(values))
    return "{} ({} to {})".format(*(f"{number:.{digits}f}" for number in numbers))


def per_cent(values):
    return spread(100 * value for value in values)


def whole_per_cent(share):
    return f"{100 * share:.0f} %"


def on_or_off(text):
    """A column that holds True or False."""
    return "on" if text == "True" else "off"


# --------------------------------------------------------------------------------------------------
# 1. Of ablate_kl: runs of the built-in model.

MEASURED = ["solved", "other skills", "KL per token", "KL per response"]


def measured(rows):
    """Returns the cells under MEASURED."""
    return [per_cent(numbers_of(rows, "solved_after")), per_cent(map(retention, rows)),
            spread(numbers_of(rows, "kl_per_token"), 3),
            spread(numbers_of(rows, "kl_per_sequence"), 2)]


def units(groups):
    """Returns the line below a table."""
    seeds = sorted({row["seed"] for _, rows in groups for row in rows})
    return ("\n\nPer cent and nats; mean (smallest to largest) over seeds "
            f"{', '.join(seeds)}.")


def before_training(rows):
    """Returns the cells "solved" and "other skills" of the model as it comes."""
    return [per_cent(numbers_of(rows, "solved_before")),
            per_cent(retention(row, "before") for row in rows)]


PENALTIES = {"off": "no KL penalty (the default)", "on": "`use_kl_penalty = True`, `kl_coef = 0.3`",
             "adaptive": "the same with `kl_adaptation_method = \"target_sound\"`"}


def penalty_table():
    """The default run with the KL penalty off, on and adaptive."""
    rows = last_rows("default", "variant", "seed")
    lines = [["before training", per_cent(numbers_of(rows, "solved_before")),
              per_cent(numbers_of(rows, "others_before")), ""]]
    for variant, name in PENALTIES.items():
        of_variant = [row for row in rows if row["variant"] == variant]
        lines.append([name, per_cent(numbers_of(of_variant, "solved_after")),
                      per_cent(numbers_of(of_variant, "others_after")),
                      f"{100 * max(numbers_of(of_variant, 'worst_fall')):.0f} points"])
    return markdown(["run of 200 steps", "solved, %", "other skills, %",
                     "largest fall of a skill, any seed"], lines)


def coefficient_table():
    """One line for each learning rate and coefficient."""
    groups = groups_of(COEFFICIENTS)
    first = groups[0][1]
    skills = skills_of(first[0])

    def of_skills(rows, moment):
        return [per_cent(numbers_of(rows, f"retention_{skill}_{moment}")) for skill in skills]

    lines = [["", "before training", *before_training(first), "0", "0",
              *of_skills(first, "before")]]
    for settings, rows in groups:
        kl_coef = f"{settings['kl_coef']:g}" if settings["use_kl_penalty"] else "off"
        lines.append([f"{settings['learning_rate']:g}", kl_coef, *measured(rows),
                      *of_skills(rows, "after")])
    return markdown(["learning rate", "kl_coef", *MEASURED, *skills], lines) + units(groups)


def estimator_table():
    """Estimator, gradient and placement at one coefficient."""
    groups = groups_of([HOT, BASE, *ESTIMATORS])
    lines = []
    for settings, rows in groups:
        estimator, gradient, place = (settings[name] for name in ("kl_estimator", "kl_gradient",
                                                                  "kl_in"))
        if estimator == "exact":
            gradient = ""
        if place == "reward":
            gradient = ""
        if not settings["use_kl_penalty"]:
            estimator, gradient, place = "off", "", ""
        lines.append([estimator, gradient, place, *measured(rows)])
    return markdown(["kl_estimator", "kl_gradient", "kl_in", *MEASURED], lines) + units(groups)


def method_table():
    """Adaptive methods, all from the same coefficient."""
    groups = groups_of([HOT, BASE, *METHODS])
    last_point = {point["id"]: point for point in read_csv(CURVES)}
    lines = []
    for settings, rows in groups:
        method, term, beta = "off", "", ""
        if settings["use_kl_penalty"]:
            method = settings["kl_adaptation_method"]
            term = f"{settings['kl_estimator']} in the {settings['kl_in']}"
            beta = spread((float(last_point[row["id"]]["current_beta"]) for row in rows), 3)
        lines.append([method, term, *measured(rows), beta,
                      spread(numbers_of(rows, "response_length_after"), 1)])
    header = ["kl_adaptation_method", "KL", *MEASURED, "beta at the end", "length"]
    return markdown(header, lines) + units(groups)


def engine_table():
    """Solved after training, KL penalty off, seed by seed, with either engine."""
    rows = sorted(read_csv(ENGINES), key=lambda row: row["seed"])
    lines = []
    for engine in ("transformers", "vllm"):
        of_engine = [row for row in rows if settings_of(row)["engine"] == engine]
        lines.append([engine, *(f"{100 * share:.1f}"
                                for share in numbers_of(of_engine, "solved_after"))])
    return markdown(["engine", *(f"solved, seed {seed}" for seed in SEEDS)], lines)


def verdict_table():
    """Claims about KL in GRPO, and what these runs say of each. A verdict follows from its numbers
    alone."""
    off = rows_of(HOT)
    best, on = best_coefficient()
    best_coef = f"{best['kl_coef']:g}" if best else "none"
    low = rows_of(BASE | dict(kl_coef=0.01))
    plain = rows_of(BASE)
    of_method = {(settings["kl_adaptation_method"], settings["kl_in"]): rows
                 for settings, rows in groups_of(METHODS)}
    own_length = of_method["length_normalized", "loss"]
    in_reward = of_method["length_normalized", "reward"]
    clipped = of_method["clip", "loss"]
    before = statistics.mean(retention(row, "before") for row in off)
    gain = other_skills(on) - other_skills(off)

    def length(rows):
        return statistics.mean(numbers_of(rows, "response_length_after"))

    def kl(rows):
        return statistics.mean(numbers_of(rows, "kl_per_token"))

    lines = []
    verdict = "yes"
    if other_skills(on) > other_skills(low) + 0.05:
        verdict = "no: here it is too low"
    if other_skills(low) < other_skills(off) + 0.1:
        verdict = "no: here it does next to nothing"
    lines.append(["kl_coef = 0.01 is optimal",
                  f"0.01 keeps {whole_per_cent(other_skills(low))} of the other skills, "
                  f"{best_coef} keeps {whole_per_cent(other_skills(on))}; solved "
                  f"{whole_per_cent(solved(low))} and {whole_per_cent(solved(on))}", verdict])

    forgets = other_skills(off) < before - 0.1
    lines.append(["without KL the model forgets",
                  f"other skills {whole_per_cent(before)} -> {whole_per_cent(other_skills(off))} "
                  f"at learning rate {HOT['learning_rate']:g}, -> "
                  f"{whole_per_cent(other_skills(rows_of({})))} at {DEFAULTS['learning_rate']:g}",
                  "yes, if it is trained hard enough" if forgets else "no"])

    lines.append(["a KL penalty costs reward; with rule-based rewards beta should be 0",
                  f"solved {whole_per_cent(solved(off))} without, {whole_per_cent(solved(on))} "
                  f"with kl_coef = {best_coef}, and {100 * gain:.0f} points more of the other "
                  "skills", "no" if gain > 0.1 else "yes"])

    worse = other_skills(own_length) < other_skills(plain) - 0.02
    lines.append(["start with length normalisation",
                  f"it keeps {whole_per_cent(other_skills(own_length))}, the plain term "
                  f"{whole_per_cent(other_skills(plain))} at the same coefficient (it divides the "
                  "penalty by the length)", "no" if worse else "no harm"])

    same_length = length(in_reward) < length(off) + 1
    lines.append(["longer responses exploit the KL",
                  f"length {length(off):.1f} without a KL penalty, {length(plain):.1f} with it, "
                  f"{length(in_reward):.1f} with KL / length in the reward (this task has no use "
                  "for longer answers)",
                  "not in this task; see the length experiment" if same_length else "yes"])

    worse = other_skills(clipped) < other_skills(plain) - 0.02
    lines.append(["clipping the KL limits the drift",
                  f"KL per token {kl(plain):.3f} plain, {kl(clipped):.3f} clipped at 1 nat; other "
                  f"skills {whole_per_cent(other_skills(plain))} and "
                  f"{whole_per_cent(other_skills(clipped))}",
                  "no: the tokens that drifted most have no gradient" if worse
                  else "it changes little here"])
    return markdown(["claim", "measured", "verdict"], lines)


def console(name):
    """Returns the output of a run: its beginning (KL penalty off), and its last evaluation and
    report."""
    lines = (RESULTS / f"console_{name}.txt").read_text().splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("Step "))
    shown = lines[last:]
    began = next(i for i, line in enumerate(lines) if line.startswith("Eval at step 0"))
    if name == "small":
        shown = [lines[began], "...", *lines[last:last + 2]]
    if name == "off":  # ten lines: how it begins, one step, how it ends
        report = next(i for i, line in enumerate(lines) if line.startswith("=== Report"))
        shown = [*lines[began:began + 3], "...", lines[last], lines[last + 1], "...",
                 *lines[report + 2:report + 5], "..."]
    return "\n".join(["```text", *shown, "```"])


# --------------------------------------------------------------------------------------------------
# 2. Of verify_kl: what is enumerated.

GRADIENT_ROWS = [  # what is shown, estimator, gradient, placement, where to use it
    ("k1, k2, k3", "k3", "reverse", "loss", "the default: right for each token's own KL"),
    ("exact", "exact", "reverse", "loss",
     "least noise; its backward pass sums over the vocabulary"),
    ("k1", "k1", "as_written", "loss", "never (refused)"),
    ("k2", "k2", "as_written", "loss",
     "the same as reverse in the first epoch"),
    ("k3", "k3", "as_written", "loss", "to reproduce DeepSeekMath"),
    ("k1", "k1", "reverse", "loss_to_go",
     "the same as k1 in the reward, but later epochs use the present policy's KL"),
    ("k3", "k3", "reverse", "loss_to_go", "only near the reference; else the noise is large"),
    ("exact", "exact", "reverse", "loss_to_go",
     "for the KL of whole responses; least noise"),
    ("k2", "k2", "reverse", "loss_to_go", "never (refused): k1 is better in the first epoch"),
    ("k1", "k1", "", "reward", "for the KL of whole responses, one epoch; as in PPO for RLHF"),
    ("k2", "k2", "", "reward", "never (refused)"),
    ("k3", "k3", "", "reward", "never (refused)"),
]
GRADIENT_COLUMNS = [("one step", "policy"), ("one step", "old"), ("3 steps, shared", "policy"),
                    ("3 steps, shared", "old")]
TARGETS = {
    "reverse KL per token": "exact", "KL of whole responses": "exact", "zero": "**zero**",
    "forward KL per token": "gradient of KL(reference ‖ policy)",
    "minus KL(old || policy)": "pushes **away** from the old policy",
}


def gradient_cell(rows):
    """The rows of one setting in one column -> what its expected gradient is."""
    of_whole = [row for row in rows if row["target"] == "KL of whole responses"]
    one_step = rows[0]["policy"] == "one step"
    exact = [TARGETS[row["target"]] for row in (rows if one_step else of_whole)
             if row["claim"] == "exact"]
    if exact:
        return exact[0]
    cosine = rows[0]["median cosine to sequence KL"]
    if cosine in ("", "nan"):
        return "**zero**"
    shown = f"{float(cosine):.2f}"
    return f"cosine {shown}" if shown != "1.00" else f"cosine {float(cosine):.3f}"


def gradient_table():
    """Estimator, gradient, placement -> what the expected gradient is, by enumeration."""
    by_setting = {}
    for row in read_csv(RESULTS / "kl_gradients.csv"):
        if not row["note"]:
            key = tuple(row[name] for name in ("policy", "sampled by", "estimator", "gradient",
                                               "placement"))
            by_setting.setdefault(key, []).append(row)
    lines = []
    for name, estimator, gradient, place, use in GRADIENT_ROWS:
        cells = [gradient_cell(by_setting[policy, sampled_by, estimator, gradient, place])
                 for policy, sampled_by in GRADIENT_COLUMNS]
        any_gradient = place == "reward" or (estimator, place) == ("exact", "loss")
        shown = "any" if any_gradient else gradient
        lines.append([name, shown, place, *cells, use])
    return markdown(["`kl_estimator`", "`kl_gradient`", "`kl_in`", "one token, first epoch",
                     "one token, later epochs", "several tokens, first epoch",
                     "several tokens, later epochs", "use"],
                    lines)


def variance_rows(of):
    """Returns the rows of kl_variance.csv for the larger vocabulary, of a value or a gradient."""
    return [row for row in read_csv(RESULTS / "kl_variance.csv")
            if row["of"] == of and row["vocabulary"] == "7"]


def value_table():
    """Bias and spread of each estimator's value."""
    lines = []
    for row in sorted(variance_rows("value"), key=lambda row: row["what"]):
        bias = float(row["bias"])
        lines.append([row["what"], row["drift"], f"{bias:+.1e}" if abs(bias) > 1e-12 else "0",
                      f"{float(row['rms error']):.3f}"])
    return markdown(["value", "drift", "bias, nats", "rms error of one token, nats"], lines)


def variance_table():
    """Variance of each gradient, relative to that of k1 in the reward."""
    rows = {(row["what"], row["drift"]): row for row in variance_rows("gradient")}
    on_tiny = {f"{row['estimator']} {row['kl_in']}": float(row["of k1 in the reward"])
               for row in read_csv(RESULTS / "kl_variance_tiny.csv")}
    lines = []
    for name, key in (("k1 in the reward", "k1 reward"), ("k1 loss_to_go", "k1 loss_to_go"),
                      ("k3 loss_to_go", "k3 loss_to_go"), ("exact loss_to_go", "exact loss_to_go"),
                      ("exact in the loss", "exact loss")):
        ratios = [1 / float(rows[name, drift]["k1 in the reward / this"])
                  for drift in ("small", "large")]
        bias = float(rows[name, "large"]["bias"])
        lines.append([name, *(f"{ratio:.2f}" for ratio in (*ratios, on_tiny[key])),
                      "none" if bias < 1e-10 else f"{bias:.2f}"])
    return markdown(["gradient of the sequence KL", "variance, small drift", "large drift",
                     "built-in model", "bias, large drift"], lines)


def explosion_table():
    rows = read_csv(RESULTS / "kl_explosion.csv")
    lines = []
    for name in dict.fromkeys(row["KL term"] for row in rows):
        of_term = [row for row in rows if row["KL term"] == name]
        norms = numbers_of(of_term, "largest gradient norm")
        kls = numbers_of(of_term, "last KL per token")
        lines.append([name, f"{sum(norm > 1e6 for norm in norms)} of {len(norms)}",
                      f"{statistics.median(norms):.2g}", f"{statistics.median(kls):.2f}"])
    return markdown(["KL term in the loss", "seeds with a gradient norm above 1e6",
                     "largest norm, median", "KL per token at the end, median"], lines)


def length_table():
    columns = ["P(answer)", "mean length", "KL per response", "KL per token"]
    lines = [[row["KL in"], row["kl_coef"], *(f"{float(row[column]):.2f}" for column in columns)]
             for row in read_csv(RESULTS / "kl_length.csv")]
    return markdown(["KL in", "kl_coef", *columns], lines)


def adaptive_value(experiment, rule, at):
    """The one number of kl_adaptive.csv whose experiment and point begin with these."""
    return next(float(row["value"]) for row in read_csv(RESULTS / "kl_adaptive.csv")
                if row["experiment"].startswith(experiment) and row["rule"] == rule
                and row["at"].startswith(at))


def rule_table():
    """Adaptive methods: as printed, what is wrong with that, what to use instead."""
    value = adaptive_value
    own_length = next(float(row["mean length"]) for row in read_csv(RESULTS / "kl_length.csv")
                      if "own length" in row["KL in"])
    left = value("beta / first", "dynamic", "step 100, median")
    over, over_sound = (value("largest KL / target", rule, "reward gradient 0.005")
                        for rule in ("target", "target_sound"))
    lines = [
        ["clip", "min(KL, `kl_clip_threshold`); default 1.0 nats",
         "above the threshold the gradient is zero, so it spares the tokens that drifted most",
         "`clip_sound`: the gradient stops growing where a token's log-ratio passes 5 nats"],
        ["sigmoid", "sigmoid(KL - `kl_target`) · KL; default 0.1 nats",
         "the target has almost no effect: about half of the KL is penalised, below it as above it "
         f"(slope of the penalty: {value('slope', 'sigmoid', 'KL 0,'):.3f} at 0 nats, "
         f"{value('slope', 'sigmoid', 'KL 0.2'):.3f} at 0.2)",
         "`sigmoid_sound` penalises almost nothing below the target, and above it what exceeds it"],
        ["length_normalized", "KL / tokens of the response",
         "with `kl_in = \"reward\"` it makes the model write longer responses: "
         f"from 5 to {own_length:.0f} tokens in our test",
         "none (`length_normalized_sound` divides by `max_new_tokens`, like a smaller `kl_coef`)"],
        ["dynamic", "the coefficient times `dynamic_beta_decay` (0.9) after each step with a mean "
         "reward above `reward_threshold` (0.8); after `beta_schedule_steps` (1000) it is "
         "`beta_min` (0)",
         "the coefficient only falls: with a mean reward of 0.75, below the threshold, noise alone "
         f"brings it to {100 * left:.0f} % of `kl_coef` in 100 steps",
         "`dynamic_sound` follows an average of the reward, and can rise again. Its floor is a "
         "tenth of `kl_coef`; its ceiling sinks to that floor in `beta_schedule_steps`"],
        ["target", "the coefficient times 1.5 if KL > 1.5 · `kl_target`, times 0.75 if KL < 0.5 · "
         "`kl_target`",
         "falls while nothing has drifted yet; then the KL overshoots, in a simulation to "
         f"{over:.0f} times the target",
         "`target_sound` takes small steps and follows an average: "
         f"{over_sound:.1f} times in the same simulation"],
    ]
    return markdown(["`kl_adaptation_method`", "as printed", "what is wrong with it",
                     "what to use instead"], lines)


def rule_number_table():
    """The numbers behind rule_table: each rule as printed, and its sound form."""
    value = adaptive_value
    left = {rule: value("beta / first", rule, "step 100, median")
            for rule in ("dynamic", "dynamic_sound")}
    over = {(rule, pull): value("largest KL / target", rule, f"reward gradient {pull}")
            for rule in ("target", "target_sound") for pull in (0.005, 0.02)}
    runs = controller_rows()
    lines = [
        ["clip", "slope of the penalty just above the threshold",
         f"{value('slope', 'clip', 'KL 1.01'):g}", ""],
        ["clip", "lowest cosine between its gradient and that of the KL, k1",
         f"{value('cosine', 'clip', 'k1, lowest'):.2f}", ""],
        ["sigmoid", "slope at -1.5, 0 and 0.2 nats",
         ", ".join(f"{value('slope', 'sigmoid', at):.3f}"
                   for at in ("KL -1.5", "KL 0,", "KL 0.2")), ""],
        ["dynamic", "share of the coefficient after 100 steps at a mean reward of 0.75, noise 0.08",
         *(f"{100 * left[rule]:.0f} %" for rule in ("dynamic", "dynamic_sound"))],
        ["target", "largest KL / target in a simulation",
         *(f"{over[rule, 0.005]:.1f}" for rule in ("target", "target_sound"))],
        ["target", "the same with a reward gradient four times as large",
         *(f"{over[rule, 0.02]:.1f}" for rule in ("target", "target_sound"))],
        ["target", "built-in model: steps of the second half within half of the target", "",
         f"{100 * min(near for near, _ in runs):.0f} %"],
        ["target", "built-in model: largest KL / target", "",
         f"{max(largest for _, largest in runs):.1f}"],
    ]
    return markdown(["rule", "number", "as printed", "`_sound`"], lines)


# --------------------------------------------------------------------------------------------------
# 3. Of crash_test and fuzz_reward; that of mutants is made there.

def kill_table():
    """Runs that were killed and resumed, by engine and parts."""
    by_kind = {}
    for row in read_csv(RESULTS / "kills.csv"):
        by_kind.setdefault((row["engine"], row["parts"]), []).append(row)
    lines = []
    for (engine, parts), rows in by_kind.items():
        phases = [row["phase"] for row in rows]
        when = [f"{phases.count(phase)} in {phase}" for phase in dict.fromkeys(phases)]
        fresh = sum(row["went_on"] == "from the start" for row in rows)
        same = sum(row["killed"] == row["same_weights"] == row["same_log"] == "True"
                   for row in rows)
        lines.append([engine, parts, str(len(rows)), ", ".join(when), str(fresh), str(same)])
    return markdown(["engine", "parts", "killed", "when", "before the first checkpoint",
                     "ended with the same bits"], lines)


def fuzz_table():
    """The last run of the fuzzer."""
    row = read_csv(RESULTS / "fuzz.csv")[-1]
    names = ["inputs", "with an answer", "solved", "longer than 100,000", "broken",
             "slowest in ms", "largest allocation in MB", "corpus size"]
    return markdown(names, [[row[name] for name in names]])


# --------------------------------------------------------------------------------------------------
# 4. Of bench.

SIZE_NAMES = {
    "S": "S: hidden 128, 4 layers, 16 new tokens",
    "M": "M: hidden 384, 6 layers, 16 new tokens",
    "M-64": "M, 64 new tokens",
    "L": "L: hidden 256, 4 layers, vocabulary 151,936, 16 new tokens",
}


def last_rows(name, *columns):
    """Returns the newest row of bench_<name>.csv for each combination of these columns."""
    newest = {}
    for row in read_csv(RESULTS / f"bench_{name}.csv"):
        newest[tuple(row[column] for column in columns)] = row
    return list(newest.values())


def median_and_range(row, name):
    return f"{row[f'{name}_s']} ({row[f'{name}_min_s']} to {row[f'{name}_max_s']})"


def speed_table():
    """A step of ours and of TRL's, in turns in one process."""
    lines = []
    for row in last_rows("step", "size", "dtype", "kl_penalty"):
        trl_gb = (f"{row['trl_gb']} ({row['trl_rows_at_once']} rows), "
                  f"{row['trl_gb_most_rows']} ({row['trl_most_rows']} rows)")
        lines.append([SIZE_NAMES[row["size"]], row["dtype"], on_or_off(row["kl_penalty"]),
                      median_and_range(row, "ours"), median_and_range(row, "trl"), row["ratio"],
                      row["ours_gb"], trl_gb])
    return markdown(["model", "dtype", "KL penalty", "starter.py, s", "TRL, s", "ratio", "GB",
                     "TRL, GB"], lines)


def version_table():
    """A step of earlier code, of this code and of starter.py alone, in turns."""
    lines = [[SIZE_NAMES[row["size"]], row["dtype"], on_or_off(row["kl_penalty"]), row["n"],
              median_and_range(row, "old"), median_and_range(row, "new"), row["new_over_old"],
              median_and_range(row, "alone"), row["alone_over_old"]]
             for row in last_rows("versions", "size", "dtype", "kl_penalty")]
    return markdown(["model", "dtype", "KL penalty", "rounds", "commit 8070d16, s",
                     "with support/, s", "ratio", "starter.py alone, s", "ratio"], lines)


def alone_table():
    """A step of starter.py without support/, in turns with TRL."""
    lines = [[SIZE_NAMES[row["size"]], row["dtype"], on_or_off(row["kl_penalty"]), row["steps"],
              median_and_range(row, "ours"), median_and_range(row, "trl"), row["ratio"]]
             for row in last_rows("alone", "size", "dtype", "kl_penalty")]
    return markdown(["model", "dtype", "KL penalty", "steps", "starter.py alone, s", "TRL, s",
                     "ratio"], lines)


def phase_table():
    lines = []
    for row in last_rows("phases", "size", "dtype", "phase"):
        share = row["share_of_matmul_rate"] or f"copy: {row['share_of_copy_rate']}"
        lines.append([row["size"], row["phase"], f"{1000 * float(row['seconds']):.0f}",
                      row["response_tokens_per_s"], share])
    return markdown(["model", "phase", "ms", "response tokens/s", "share of the machine's rate"],
                    lines)


def memory_table():
    names = ["libraries", "weights", "adapters", "gradients", "moments", "reference",
             "bf16 copies", "activations", "head"]
    lines = [[row["size"], row["lora_rank"] if row["lora_rank"] != "0" else "all weights",
              on_or_off(row["kl_penalty"]),
              *(f"{float(row[name]):.2f}" for name in names), row["predicted_gb"],
              row["measured_gb"], row["ratio"]]
             for row in last_rows("memory", "size", "kl_penalty", "lora_rank")]
    return markdown(["model", "LoRA", "KL penalty", *names, "formula", "measured", "ratio"], lines)


GPU_SETTINGS = [  # what changes, max_tokens_per_microbatch
    (dict(kl_penalty=False), 4_096), (dict(kl_penalty=True), 4_096),
    (dict(kl_penalty=True, checkpointing=True), 4_096), (dict(kl_penalty=False), 16_384),
    (dict(kl_penalty=True, lora_rank=16), 4_096),
    (dict(kl_penalty=True, lora_rank=16, checkpointing=True), 4_096),
]
RESPONSES = {"all": 128 * 256, "longest": 256}  # of the tables for GPUs: tokens of a step
PROMPTS = {"all": 16 * 150, "longest": 150}


def trainer_gb(config, **changes):
    return memory.predicted_gb(config, RESPONSES, PROMPTS, on_cpu=False, **changes)


def gpu_table():
    """Which GPU: the formula for Qwen3's sizes, 16 prompts of 150 tokens and 128 responses of
    256."""
    from lab import bench
    lines = []
    for name, shape in bench.TABLE_SIZES.items():
        config = bench.model_config(**shape)
        totals = [sum(trainer_gb(config, max_tokens=max_tokens, **changes).values())
                  for changes, max_tokens in GPU_SETTINGS]
        fixed = trainer_gb(config, kl_penalty=True, max_tokens=4_096)
        lines.append([f"Qwen3-{name}", *(f"{total:.0f}" for total in totals),
                      f"{sum(fixed[part] for part in memory.FIXED):.0f}"])
    names = []
    for changes, max_tokens in GPU_SETTINGS:
        name = f"KL penalty {'on' if changes['kl_penalty'] else 'off'}, {max_tokens:,} tokens"
        name += ", checkpointing" if changes.get("checkpointing") else ""
        names.append(name + (", LoRA" if changes.get("lora_rank") else ""))
    return markdown(["model", *names, "weights, gradients, moments and reference of the second"],
                    lines)


CARDS = (16, 24, 48, 80)  # GB of memory of common GPUs
SPARE = 0.95  # of a card is counted on
EDITS = [  # in the order of what they cost: main()'s names, the formula's
    ({}, {}),
    ({"gradient_checkpointing": True}, {"checkpointing": True}),
    ({"lora_rank": 16}, {"lora_rank": 16}),
    ({"lora_rank": 16, "gradient_checkpointing": True}, {"lora_rank": 16, "checkpointing": True}),
]


def edit_for(card, config):
    """Returns the first edit of main() with which trainer, reference and vLLM fit, or "too small".
    vLLM gets its share in steps of 5 %."""
    share = math.ceil(20 * memory.vllm_gb(config) / card) / 20
    default = inspect.signature(starter.main).parameters["gpu_mem_util"].default
    for edit, changes in EDITS:
        needed = sum(trainer_gb(config, kl_penalty=True, max_tokens=4_096, **changes).values())
        for used in sorted({share, max(share, default)}, reverse=True):
            if needed + used * card <= SPARE * card:
                if used != default:
                    edit = edit | {"gpu_mem_util": used}
                text = ", ".join(f"{name}={value!r}" for name, value in edit.items())
                return f"`{text}`" if text else "no change"
    return "too small"


def cards_table():
    """The edit of main() that fits each of Qwen3's sizes on a card, with the KL penalty on."""
    from lab import bench
    configs = [bench.model_config(**shape) for shape in bench.TABLE_SIZES.values()]
    lines = [[f"{card} GB", *(edit_for(card, config) for config in configs)] for card in CARDS]
    return markdown(["card", *(f"Qwen3-{name}" for name in bench.TABLE_SIZES)], lines)


# What the computed step on several GPUs assumes of an H100 (NVIDIA's data sheet: 989 TFLOP/s in
# bf16, 3.35 TB/s) and of the shares of it that are reached. No GPU has confirmed the shares.
FLOPS = 0.3 * 989e12
READS = 0.6 * 3.35e12  # bytes/s of its own memory
PER_TOKEN = 2.5e-3  # s that vLLM takes beside reading the weights
NVLINK, NETWORK = 300e9, 40e9  # bytes/s of a GPU to those of its node, and to others
RANKS = (1, 8, 64)


def rank_step(shape, ranks):
    """Returns (gigabytes of a GPU, seconds of a step) for 128 responses of 256 tokens a GPU, with
    the KL penalty on and gradient checkpointing: support/ranks.py gathers the policy's layers once
    a step and keeps them whole, and shares out the gradients of each microbatch."""
    from lab import bench
    config = bench.model_config(**shape)
    sizes = memory.shape_of(config)
    n = sizes.n_body + sizes.n_head
    gathered = 4 * n if ranks > 1 else 0
    gb = sum(trainer_gb(config, kl_penalty=True, checkpointing=True, max_tokens=4_096,
                        ranks=ranks).values()) + gathered / 1e9 + memory.vllm_gb(config)
    tokens = RESPONSES["all"] + PROMPTS["all"]
    sampling = RESPONSES["longest"] * (2 * n / READS + PER_TOKEN)
    learning = 10 * n * tokens / FLOPS  # forward, twice backward, forward again, reference
    speed = NVLINK if ranks <= 8 else NETWORK
    n_messages = 2 + math.ceil(tokens / 4_096)  # layers, reference, gradients
    messages = (4 * n * n_messages / speed) * (ranks - 1) / ranks
    sync = 4 * n / speed * (ranks > 1) + 2 * n / READS
    return gb, sampling + learning + messages + sync


def rank_table():
    """Computed, not measured: memory and step time on 1 to 64 GPUs of 80 GB."""
    from lab import bench
    lines = []
    for name, shape in bench.RANK_SIZES.items():
        cells = []
        for ranks in RANKS:
            gb, seconds = rank_step(shape, ranks)
            fits = gb <= SPARE * 80
            cells.append(f"{gb:.0f} GB, {seconds:.0f} s" if fits else f"{gb:.0f} GB: too large")
        lines.append([f"Qwen3-{name}", *cells])
    return markdown(["model", *(f"{ranks} GPU{'s' if ranks > 1 else ''}" for ranks in RANKS)],
                    lines)


def learning_table():
    """The default run, seed by seed."""
    lines = []
    for row in last_rows("default", "variant", "seed"):
        lines.append([row["variant"], row["seed"],
                      *(f"{100 * float(row[name]):.1f}" for name in (
                          "solved_before", "solved_after", "others_after", "worst_fall")),
                      row["kl_per_token"], row["seconds"], row["tokens_per_s"]])
    return markdown(["KL penalty", "seed", "solved before, %", "after, %", "other skills, %",
                     "largest fall of one skill, points", "KL per token", "training, s",
                     "response tokens/s"], lines)


def growth_table():
    """Exponents of the power laws through the measured points."""
    from lab import bench
    lines = []
    for what, points in bench.growth_points().items():
        updates, rollouts = points["update"], points["rollout"]
        both = [(x, update + rollout) for (x, update), (_, rollout) in zip(updates, rollouts)]
        ends = [f"{x:.0f}: {1000 * seconds:.0f} ms" for x, seconds in (updates[0], updates[-1])]
        exponents = [f"{bench.slope(pairs):.2f}" for pairs in (updates, rollouts, both)]
        lines.append([f"`{what}`", *ends, *exponents])
    return markdown(["what grows", "least, an update", "most, an update",
                     "exponent of the update", "of the rollout", "of both"], lines)


def scaling_table():
    """Seconds of a step as processes are added, each with as many rows, beside one alone."""
    rows = read_csv(RESULTS / "bench_scaling.csv")
    kinds = {("1", "1"): "one process", ("1", "2"): "two independent processes",
             ("2", "1"): "two ranks"}
    lines = []
    for size in dict.fromkeys(row["size"] for row in rows):
        seconds = {}
        for ranks, processes in kinds:
            of_kind = [row for row in rows
                       if (row["size"], row["ranks"], row["processes"]) == (size, ranks, processes)]
            seconds[ranks, processes] = statistics.mean(numbers_of(of_kind, "total_s"))
        alone = seconds["1", "1"]
        lines += [[size, name, f"{seconds[kind]:.2f}", f"{alone / seconds[kind]:.2f}"]
                  for kind, name in kinds.items()]
    return markdown(["model", "processes, a thread each", "s a step", "weak scaling"], lines)


def neighbour_table():
    """A step beside busy processes, by GOMP_SPINCOUNT."""
    rows = last_rows("neighbours", "busy_neighbours", "spin_count")
    counts = sorted({int(row["spin_count"]) for row in rows})
    lines = []
    for busy in sorted({row["busy_neighbours"] for row in rows}):
        of_busy = {row["spin_count"]: row for row in rows if row["busy_neighbours"] == busy}
        lines.append([busy, *(median_and_range(of_busy[str(count)], "step") for count in counts)])
    return markdown(["busy processes beside it", *(f"`GOMP_SPINCOUNT={count}`, s"
                                                   for count in counts)], lines)


def start_table():
    rows = read_csv(RESULTS / "bench_start.csv")
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    first = numbers_of(rows, "first_step_s")
    evaluation = numbers_of(rows, "first_evaluation_s")
    numbers = (statistics.median(first), min(first), max(first), statistics.median(evaluation))
    return markdown(["runs", "start to first finished step, s: median", "smallest", "largest",
                     "of it the first evaluation, s"],
                    [[str(len(rows)), *(f"{number:.1f}" for number in numbers)]])


def whole_table():
    """The default run before and after: seconds of its parts, medians over the runs in turns."""
    parts = ("to_first_evaluation", "training", "evaluations_between", "after_last_step", "whole")
    rows = read_csv(RESULTS / "bench_whole.csv")
    lines = []
    for kl_penalty in dict.fromkeys(row["kl_penalty"] for row in rows):
        medians = {}
        for code in ("before", "after"):
            runs = [row for row in rows if (row["kl_penalty"], row["code"]) == (kl_penalty, code)]
            medians[code] = [statistics.median(numbers_of(runs, f"{part}_s")) for part in parts]
            lines.append([kl_penalty, f"{code} ({runs[-1]['of_commit']})", str(len(runs)),
                          *(f"{seconds:.1f}" for seconds in medians[code])])
        lines.append([kl_penalty, "after / before", "",
                      *(f"{b / a:.2f}" for a, b in zip(medians["before"], medians["after"]))])
    return markdown(["KL penalty", "code", "runs", "to the first evaluation, s", "200 steps, s",
                     "evaluations between, s", "report and saving, s", "whole process, s"], lines)


def race_table():
    from lab import race
    return race.race_table(race.TINY)


def race_small_table():
    from lab import race
    return race.race_table(race.SMALL)


def race_final_table():
    from lab import race
    return race.final_table(race.TINY)


def race_small_final_table():
    from lab import race
    return race.final_table(race.SMALL)


def variants_table():
    from lab import variants
    return variants.variants_table()


# --------------------------------------------------------------------------------------------------
# 5. Of integrations/example_tinker.py.

def tinker_groups():
    """Returns {method: rows of its seeds}, in the order in which they ran."""
    groups = {}
    for row in read_csv(RESULTS / "tinker_runs.csv"):
        groups.setdefault(row["method"], []).append(row)
    return groups


def tinker_table():
    """One line for each method of the example."""
    lines = [[method, *(spread(numbers_of(rows, name), 2) for name in (
        "reward_first", "reward_last")), per_cent(numbers_of(rows, "solved")),
        per_cent(numbers_of(rows, "other_skills")), spread(numbers_of(rows, "kl_per_token"), 3),
        spread(numbers_of(rows, "beta_last"), 2), spread(numbers_of(rows, "length_last"), 1)]
        for method, rows in tinker_groups().items()]
    return markdown(["method", "reward, first steps", "last steps", "solved, %", "other skills, %",
                     "KL per token", "beta at the end", "length"], lines)


def tinker_cost_table():
    """Forward and backward pass of one rollout, each way."""
    return markdown(["forward and backward pass", "GFLOP", "against ppo", "s", "against ppo"],
                    [[row["way"], f"{float(row['gflop']):.1f}", f"{float(row['gflop_ratio']):.2f}",
                      f"{float(row['seconds']):.2f}", f"{float(row['seconds_ratio']):.2f}"]
                     for row in read_csv(RESULTS / "tinker_cost.csv")])


def tinker_verdict_table():
    """What the Tinker guide claims, and what the runs of the example say of it."""
    groups = tinker_groups()
    means = {method: {name: statistics.mean(numbers_of(rows, name)) for name in (
        "reward_last", "solved", "other_skills", "kl_per_token")}
        for method, rows in groups.items()}
    off, on, printed, mended = (means[name] for name in (
        "no penalty (ppo)", "reverse (default)", "as printed", "k1 as written"))
    pairs = zip(groups["no penalty (ppo)"], groups["kl_coef = 0"], strict=True)
    same = all(a[name] == b[name] for a, b in pairs for name in (
        "reward_first", "reward_last", "solved", "other_skills", "kl_per_token", "length_last"))
    cost = {row["way"]: row for row in read_csv(RESULTS / "tinker_cost.csv")}

    def ratio(way, name):
        return f"{float(cost[way][name]):.2f}"

    lines = [
        ["add kl_coef * (log ref - log pi) to the loss",
         "its gradient is the same constant on every token, and 0 on average on a response; the "
         "prompt, padded with zeros, is trained as text. KL per token "
         f"{off['kl_per_token']:.3f} without a penalty, {printed['kl_per_token']:.3f} with it; "
         f"other skills {whole_per_cent(off['other_skills'])} and "
         f"{whole_per_cent(printed['other_skills'])}",
         "no: worse than none" if printed["other_skills"] < off["other_skills"] else "no"],
        ["the same with its sign mended (k1 as written)",
         f"KL per token {off['kl_per_token']:.3f} without, {mended['kl_per_token']:.3f} with it",
         "no: it penalises nothing" if mended["kl_per_token"] > 0.8 * off["kl_per_token"]
         else "unclear"],
        ["the penalty keeps the policy near the reference",
         f"the default: KL per token {on['kl_per_token']:.3f} against {off['kl_per_token']:.3f}, "
         f"other skills {whole_per_cent(on['other_skills'])} against "
         f"{whole_per_cent(off['other_skills'])}, solved {whole_per_cent(on['solved'])} against "
         f"{whole_per_cent(off['solved'])}, reward {on['reward_last']:.2f} against "
         f"{off['reward_last']:.2f}",
         "yes, with the right gradient" if on["kl_per_token"] < 0.6 * off["kl_per_token"]
         else "no"],
        ["kl_coef = 0 is plain GRPO", "the runs agree in every number" if same else
         "the runs differ", "yes" if same else "no"],
        ["1.5x FLOPs, up to 3x wall-clock",
         f"{ratio('custom loss', 'gflop_ratio')}x the operations of ppo for the custom loss, "
         f"{ratio('custom loss and reference', 'gflop_ratio')}x with the reference; "
         f"{ratio('custom loss and reference', 'seconds_ratio')}x the time on the stand-in; KL in "
         f"the advantages {ratio('ppo and reference', 'gflop_ratio')}x and "
         f"{ratio('ppo and reference', 'seconds_ratio')}x",
         "about right in operations; the service's wall-clock was not measured"],
    ]
    return markdown(["claim", "measured", "verdict"], lines)


# --------------------------------------------------------------------------------------------------
# 6. Of integrations/example_trl.py: the methods inside TRL, and what a step of each costs.

def trl_method_table():
    groups = {}
    for row in read_csv(RESULTS / "trl_methods.csv"):
        groups.setdefault(row["method"], []).append(row)
    lines = [[method, spread(numbers_of(rows, "reward"), 2), spread(numbers_of(rows, "raw_kl"), 3),
              spread(numbers_of(rows, "adapted_kl"), 3),
              f"{statistics.mean(numbers_of(rows, 'beta')):.2g}",
              spread(numbers_of(rows, "length"), 1), per_cent(numbers_of(rows, "other_skills"))]
             for method, rows in groups.items()]
    return markdown(["method", "reward", "raw KL", "adapted KL", "beta", "length",
                     "other skills, %"], lines)


def trl_cost_table():
    lines = [[row["term"], f"{float(row['seconds']):.3f}", f"{float(row['time_ratio']):.2f}",
              f"{float(row['gflops']):.2f}", f"{float(row['flops_ratio']):.2f}"]
             for row in read_csv(RESULTS / "trl_cost.csv")]
    return markdown(["KL term", "seconds a step", "of TRL, beta = 0", "GFLOPs a step",
                     "of TRL, beta = 0"], lines)


# --------------------------------------------------------------------------------------------------
# 7. The pages.

TABLES = {
    "penalty": penalty_table, "coefficients": coefficient_table, "estimators": estimator_table,
    "methods": method_table, "engines": engine_table, "verdicts": verdict_table,
    "gradients": gradient_table, "values": value_table, "variance": variance_table,
    "explosion": explosion_table, "length": length_table, "rules": rule_table,
    "rule_numbers": rule_number_table,
    "kills": kill_table, "mutants": mutants_table, "fuzz": fuzz_table,
    "speed": speed_table, "versions": version_table, "alone": alone_table, "phases": phase_table,
    "memory": memory_table, "gpus": gpu_table, "cards": cards_table, "ranks": rank_table,
    "learning": learning_table,
    "growth": growth_table, "scaling": scaling_table, "start": start_table,
    "neighbours": neighbour_table, "whole": whole_table,
    "race": race_table, "race_small": race_small_table, "race_final": race_final_table,
    "race_small_final": race_small_final_table,
    "variants": variants_table,
    "trl_methods": trl_method_table, "trl_cost": trl_cost_table,
    "tinker": tinker_table, "tinker_cost": tinker_cost_table,
    "tinker_verdicts": tinker_verdict_table,
    "real_model_explosion": real_model.explosion_table,
    "real_model": real_model.results_table, "real_model_trials": real_model.trials_table,
}
BLOCK = re.compile(r"(<!-- (table|console): (\w+) -->\n).*?(<!-- end -->)", flags=re.S)


def with_tables(text):
    """Returns a page with each block made from lab/results."""
    def fresh(match):
        first_line, kind, name, last_line = match.groups()
        block = console(name) if kind == "console" else TABLES[name]()
        return f"{first_line}{block}\n{last_line}"

    return BLOCK.sub(fresh, text)


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text()
        after = with_tables(before)
        if after != before:
            page.write_text(after)
            print(f"{page.relative_to(REPOSITORY)}: new numbers")
