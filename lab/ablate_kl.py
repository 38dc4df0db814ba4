"""ablate_kl.py: main() over KL settings and seeds -> results/*.csv, figures/*.png, and the tables of README_KL.md.

    python ablate_kl.py               the short grid: coefficients, leash off and on (a killed sweep goes on)
    python ablate_kl.py --full        also estimators, placements, adaptive methods: some 70 runs, over an hour
    python ablate_kl.py --engines     leash off, sampled by transformers and by vLLM -> results/engines.csv (needs vLLM)
    python ablate_kl.py --console     the README's runs, leash off and on, as a user sees them -> results/console_*.txt
    python ablate_kl.py --figures     draws figures/ from results/ alone (needs matplotlib)
    python ablate_kl.py --tables      writes tables and outputs into README_KL.md, from results/ alone

Runs go side by side, one a core, each on one thread. The sweep is HOT, that is, at a learning rate at which the model
does forget: at the default one, 200 steps forget little, with or without a leash (its rows stand beside).
"""
import csv
import hashlib
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).parent
RESULTS, FIGURES, README = HERE / "results", HERE / "figures", HERE / "README_KL.md"
CSV, CURVES, BY_TOKEN = (RESULTS / f"kl_{name}.csv" for name in ("ablation", "curves", "by_token"))
ENGINES = RESULTS / "engines.csv"
SEEDS = (0, 1, 2)
HOT = dict(learning_rate=6e-4)
LEASH = dict(use_kl_penalty=True, kl_coef=1.0, kl_estimator="exact")  # what each factor below is changed from
ON = dict(use_kl_penalty=True, kl_coef=0.3)  # the README's one edit
DEFAULT_LR = [{}, ON]
COEFFICIENTS = [HOT, *(HOT | LEASH | dict(kl_coef=kl_coef) for kl_coef in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))]
ESTIMATORS = [HOT | LEASH | changes for changes in (
    dict(kl_estimator="k3"), dict(kl_estimator="k3", kl_gradient="as_written"),  # k2 as written pulls like k3 reversed
    dict(kl_estimator="k1", kl_gradient="as_written", reproduce_paper=True),
    dict(kl_in="loss_to_go"), dict(kl_estimator="k3", kl_in="loss_to_go"), dict(kl_estimator="k1", kl_in="reward"))]
METHODS = [HOT | LEASH | changes for changes in (
    dict(kl_adaptation_method="target_sound"), dict(kl_adaptation_method="clip"),
    dict(kl_adaptation_method="length_normalized"),
    dict(kl_adaptation_method="length_normalized", kl_estimator="k1", kl_in="reward"),
    dict(kl_adaptation_method="dynamic"), dict(kl_adaptation_method="sigmoid"),
    dict(kl_adaptation_method="target"), dict(kl_adaptation_method="dynamic_sound"),
    dict(kl_adaptation_method="sigmoid_sound"), dict(kl_adaptation_method="clip_sound", kl_estimator="k3"),
    dict(kl_adaptation_method="length_normalized_sound"))]
SHORT = COEFFICIENTS + DEFAULT_LR
FULL = SHORT + ESTIMATORS + METHODS
DEFAULTS = dict(learning_rate=3e-4, use_kl_penalty=False, kl_coef=0.0, kl_estimator="k3", kl_gradient="reverse",
                kl_in="loss", kl_adaptation_method="none", engine="transformers")  # to read a row without starter.py


# --- runs -------------------------------------------------------------------------------------------------------------

def key_of(changes, seed):
    return json.dumps(changes | {"seed": seed}, sort_keys=True)


def id_of(key):
    """-> 8 letters that stand for a run in the long tables."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def read_csv(path):
    """-> rows, oldest first; [] where there is no file."""
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def append_rows(path, new):
    rows = read_csv(path)
    if not new:
        return
    if rows and set(rows[0]) != set(new[0]):
        sys.exit(f"{path} has other columns than this version writes; move it away")
    path.parent.mkdir(exist_ok=True)
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0] if rows else new[0]))
        if not rows:
            writer.writeheader()
        writer.writerows(new)


def run_one(changes, seed):
    """One training run, in a process of its own -> its row, its curve (a row every 5 steps), its KL by token."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)  # a dozen runs' consoles at once tell nobody anything
    import starter
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = starter.main(seed=seed, save_model=False, eval_every=0, out_dir=folder, **changes)
        minutes = (time.perf_counter() - start) / 60
        events = EventAccumulator(str(result["run_folder"])).Reload()
        by_token = json.loads((result["run_folder"] / "kl_by_token.json").read_text())
    row = {"run": key_of(changes, seed), "id": id_of(key_of(changes, seed)), "seed": seed, "minutes": round(minutes, 2)}
    row |= {name: round(result[name], 4) for name in ("kl_per_token", "kl_per_sequence")}
    for moment in ("before", "after"):
        row |= {f"{name}_{moment}": round(value, 4) for name, value in result[moment].items()}
    tags = ("train/reward_mean", "train/response_length", "train/kl_per_token", "train/kl_k1", "train/kl_k2",
            "train/kl_k3", "adaptive_kl/current_beta")
    have = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in tags if tag in events.Tags()["scalars"]}
    curve = [{"id": row["id"], "step": step} | {
        tag.split("/")[1]: f"{have[tag][step]:.4g}" if tag in have else "" for tag in tags}
        for step in have["train/reward_mean"] if step % 5 == 0]
    tokens = [{"id": row["id"], "by": kind, "key": key, "nats": round(nats, 2), "tokens": n}
              for kind, table in by_token.items() for key, (nats, n) in table.items() if seed == SEEDS[0]]
    return row, curve, tokens


def fill(grid, path=CSV):
    """Runs what the csv does not hold yet; what a run gives is written as soon as it is there."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the children's
    import starter
    model = hashlib.sha256((starter.machine.find_model("tiny") / "model.safetensors").read_bytes()).hexdigest()[:8]
    have = read_csv(path)
    if any(row["model"] != model for row in have):  # its weights differ from one kind of processor to another
        sys.exit(f"{path} was made with another build of the built-in model; move it away, or go on where it was made")
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout.strip()
    have = {row["run"] for row in have}
    todo = [(changes, seed) for changes in grid for seed in SEEDS if key_of(changes, seed) not in have]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(run_one, *job) for job in todo]):
            if done.exception():  # the others go on
                print(f"a run failed: {done.exception()}", flush=True)
                continue
            row, curve, tokens = done.result()
            append_rows(path, [row | {"commit": commit, "model": model}])
            if path == CSV:
                append_rows(CURVES, curve)
                append_rows(BY_TOKEN, tokens)
            print(f"{row['run']}: solved {row['solved_after']:.1%}, {row['minutes']} min", flush=True)


# --- reading ----------------------------------------------------------------------------------------------------------

def settings_of(row):
    """-> the settings of a row's run, defaults filled in."""
    return DEFAULTS | json.loads(row["run"])


def groups_of(grid):
    """-> [(settings, rows of its seeds)] of a grid, as far as the csv holds them."""
    rows = read_csv(CSV)
    found = [(DEFAULTS | changes, [row for row in rows if row["run"] in {key_of(changes, seed) for seed in SEEDS}])
             for changes in grid]
    return [(settings, rows) for settings, rows in found if rows]


def skills_of(row):
    return [name[len("retention_"):-len("_after")] for name in row if re.fullmatch(r"retention_\w+_after", name)]


def retention(row, moment="after"):
    """-> mean share of the other skills' held-out problems that are solved."""
    skills = skills_of(row)
    return sum(float(row[f"retention_{skill}_{moment}"]) for skill in skills) / len(skills)


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def spread(values, scale=100, digits=0):
    """-> "mean (smallest to largest)"."""
    values = [scale * float(value) for value in values]
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def numbers(rows):
    """-> the cells that every table ends with."""
    return [spread(r["solved_after"] for r in rows), spread(map(retention, rows)),
            spread((r["kl_per_token"] for r in rows), 1, 3), spread((r["kl_per_sequence"] for r in rows), 1, 2)]


def markdown(header, lines):
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *lines])


# --- tables -----------------------------------------------------------------------------------------------------------

MEASURED = ["solved", "other skills", "KL per token", "KL per response"]
UNIT = "\n\nPer cent and nats; mean (smallest to largest) over seeds {seeds}."


def note(groups):
    return UNIT.format(seeds=", ".join(sorted({row["seed"] for _, rows in groups for row in rows})))


def coefficient_table():
    """One line a learning rate and coefficient."""
    groups = groups_of(COEFFICIENTS + DEFAULT_LR)
    skills, one = skills_of(groups[0][1][0]), groups[0][1]
    before = ["", "before training", spread(r["solved_before"] for r in one),
              spread(retention(r, "before") for r in one), "0", "0",
              *(spread(r[f"retention_{skill}_before"] for r in one) for skill in skills)]
    lines = [[f"{s['learning_rate']:g}", f"{s['kl_coef']:g}" if s["use_kl_penalty"] else "off", *numbers(rows),
              *(spread(r[f"retention_{skill}_after"] for r in rows) for skill in skills)] for s, rows in groups]
    return markdown(["learning rate", "kl_coef", *MEASURED, *skills], [before, *lines]) + note(groups)


def estimator_table():
    """Estimator, gradient and placement at one coefficient."""
    groups = groups_of([HOT, HOT | LEASH, *ESTIMATORS])
    lines = [["off", "", ""] + numbers(rows) if not s["use_kl_penalty"] else
             [s["kl_estimator"], "its own" if s["kl_estimator"] == "exact" else
              "" if s["kl_in"] == "reward" else s["kl_gradient"], s["kl_in"], *numbers(rows)] for s, rows in groups]
    return markdown(["kl_estimator", "kl_gradient", "kl_in", *MEASURED], lines) + note(groups)


def method_table():
    """Adaptive methods at one starting coefficient."""
    groups, curves = groups_of([HOT, HOT | LEASH, *METHODS]), read_csv(CURVES)
    last = {row["id"]: row for row in curves}  # the last step of each run
    lines = [[s["kl_adaptation_method"] if s["use_kl_penalty"] else "off",
              f"{s['kl_estimator']} in the {s['kl_in']}" if s["use_kl_penalty"] else "", *numbers(rows),
              spread((last[r["id"]]["current_beta"] for r in rows), 1, 3) if s["use_kl_penalty"] else "",
              spread((r["response_length_after"] for r in rows), 1, 1)] for s, rows in groups]
    return markdown(["kl_adaptation_method", "KL", *MEASURED, "beta at the end", "length"], lines) + note(groups)


def engine_table():
    """Solved after training, leash off, seed by seed, with either engine."""
    rows = sorted(read_csv(ENGINES), key=lambda row: row["seed"])
    lines = [[engine, *(f"{100 * float(r['solved_after']):.1f}" for r in rows if settings_of(r)["engine"] == engine)]
             for engine in ("transformers", "vllm")]
    return markdown(["engine", *(f"solved, seed {seed}" for seed in SEEDS)], lines)


def solved(rows):
    return mean(float(row["solved_after"]) for row in rows)


def kept(rows):
    return mean(map(retention, rows))


def best_coefficient():
    """-> settings and rows of the leash that keeps most, of those within 2 points of the solved rate without it."""
    (_, off), *on = groups_of(COEFFICIENTS)
    near = [(settings, rows) for settings, rows in on if solved(rows) >= solved(off) - 0.02]
    return max(near, key=lambda group: kept(group[1]), default=(None, off))


def verdict_table():
    """Claims about KL in GRPO, and what these runs say of each; a verdict follows from its numbers alone."""
    per_cent = lambda x: f"{100 * x:.0f} %"
    (_, off), (best, on) = groups_of([HOT])[0], best_coefficient()
    by_coef = {settings["kl_coef"]: rows for settings, rows in groups_of(COEFFICIENTS[1:])}
    method = {(s["kl_adaptation_method"], s["kl_in"]): rows for s, rows in groups_of([HOT | LEASH, *METHODS])}
    mild = groups_of([{}])[0][1]
    start, gain = mean(retention(row, "before") for row in off), kept(on) - kept(off)
    low, plain = by_coef[0.01], method["none", "loss"]
    own, reward = method["length_normalized", "loss"], method["length_normalized", "reward"]
    length = lambda rows: mean(float(row["response_length_after"]) for row in rows)
    lines = [
        ["kl_coef = 0.01 is optimal", f"0.01 keeps {per_cent(kept(low))} of the other skills, "
         f"{best['kl_coef'] if best else 'none':g} keeps {per_cent(kept(on))}; solved {per_cent(solved(low))} and "
         f"{per_cent(solved(on))}", "no: here it does next to nothing" if kept(low) < kept(off) + 0.1 else
         "no: here it is too low" if kept(on) > kept(low) + 0.05 else "yes"],
        ["without KL the model forgets", f"other skills {per_cent(start)} -> {per_cent(kept(off))} at learning rate "
         f"{HOT['learning_rate']:g}, -> {per_cent(kept(mild))} at {DEFAULTS['learning_rate']:g}",
         "yes, if it is trained hard enough" if kept(off) < start - 0.1 else "no"],
        ["a leash costs reward; with rule-based rewards beta should be 0",
         f"solved {per_cent(solved(off))} without, {per_cent(solved(on))} with kl_coef = {best['kl_coef'] if best else 0:g}, "
         f"and {100 * gain:.0f} points more of the other skills",
         "no" if gain > 0.1 else "yes"],
        ["start with length normalisation",
         f"it keeps {per_cent(kept(own))}, the plain term {per_cent(kept(plain))} at the same coefficient (it divides the "
         "leash by the length)", "no" if kept(own) < kept(plain) - 0.02 else "no harm"],
        ["longer responses exploit the KL", f"length {length(off):.1f} without leash, {length(plain):.1f} with it, "
         f"{length(reward):.1f} with KL / length in the reward (this task has no use for longer answers)",
         "not in this task; see the length experiment" if length(reward) < length(off) + 1 else "yes"],
        ["clipping the KL keeps the policy near", "KL per token "
         f"{mean(float(r['kl_per_token']) for r in plain):.3f} plain, "
         f"{mean(float(r['kl_per_token']) for r in method['clip', 'loss']):.3f} clipped at 1 nat; kept "
         f"{per_cent(kept(plain))} and {per_cent(kept(method['clip', 'loss']))}",
         "no: it lets go" if kept(method["clip", "loss"]) < kept(plain) - 0.02 else "it changes little here"],
    ]
    return markdown(["claim", "measured", "verdict"], lines)


def console(name):
    """-> a run's output: its beginning (leash off), and its last evaluation and report."""
    lines = (RESULTS / f"console_{name}.txt").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("Step 4 "))
    last = max(i for i, line in enumerate(lines) if line.startswith("Step "))
    return "\n".join(["```text", *(lines[:first] + ["..."] if name == "off" else []), *lines[last:], "```"])


def write_consoles():
    """The README's first command, without and with its one edit, each in a process of its own."""
    for name, changes in (("off", {}), ("on", ON)):
        program = f"import starter; starter.test_functions(); starter.main(**{changes!r})"
        run = subprocess.run([sys.executable, "-c", program], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True)
        (RESULTS / f"console_{name}.txt").write_text(run.stdout)


# --- tables of verify_kl.py's results ---------------------------------------------------------------------------------

GRADIENT_ROWS = [  # what is shown, estimator, gradient, placement, where to use it
    ("k1, k2, k3", "k3", "reverse", "loss", "default; with any number of epochs"),
    ("exact", "exact", "reverse", "loss", "the quietest; when a second pass over the vocabulary is cheap"),
    ("k1", "k1", "as_written", "loss", "never; refused"),
    ("k2", "k2", "as_written", "loss", "as reverse in a first epoch, so refused as a setting that changes nothing"),
    ("k3", "k3", "as_written", "loss", "to reproduce DeepSeekMath"),
    ("k1", "k1", "reverse", "loss_to_go", "the same gradient as k1 in the reward, outside the PPO clip"),
    ("k3", "k3", "reverse", "loss_to_go", "not at large drift: its tail enters the gradient"),
    ("exact", "exact", "reverse", "loss_to_go", "sequence KL, one epoch; the quietest of these"),
    ("k2", "k2", "reverse", "loss_to_go", "never; refused"),
    ("k1", "k1", "", "reward", "sequence KL, one epoch, as in PPO for RLHF"),
    ("k2", "k2", "", "reward", "never; refused"),
    ("k3", "k3", "", "reward", "never; refused"),
]
TARGETS = {"reverse KL per token": "exact", "KL of whole responses": "exact", "zero": "**zero**",
           "forward KL per token": "that of KL(start ‖ policy)", "minus KL(old || policy)": "**away** from old"}


def gradient_table():
    """Estimator x gradient x placement: what its expected gradient is, by enumeration."""
    rows = [row for row in read_csv(RESULTS / "kl_gradients.csv") if not row["note"]]

    def cell(policy, sampled_by, estimator, gradient, place):
        mine = [row for row in rows if (row["policy"], row["sampled by"], row["estimator"], row["gradient"],
                                        row["placement"]) == (policy, sampled_by, estimator, gradient, place)]
        exact = [TARGETS[row["target"]] for row in mine if row["claim"] == "exact"]
        whole = [row for row in mine if row["target"] == "KL of whole responses"]
        if policy != "one step" and not whole:
            cosine = mine[0]["median cosine to sequence KL"]
            return "zero" if cosine in ("", "nan") else f"another; cosine {float(cosine):.2f}"
        shown = whole[0] if policy != "one step" else mine[0]
        if shown["claim"] == "exact" or policy == "one step" and exact:
            return "exact" if shown["claim"] == "exact" else exact[0]
        return f"off by {100 * float(shown['median relative error']):.0f} %"

    lines = [[name, "its own" if estimator == "exact" else gradient, place,
              *(cell(policy, by, estimator, gradient, place) for policy, by in (
                  ("one step", "policy"), ("one step", "old"), ("3 steps, shared", "policy"))), use]
             for name, estimator, gradient, place, use in GRADIENT_ROWS]
    return markdown(["`kl_estimator`", "`kl_gradient`", "`kl_in`", "one token, own samples", "one token, older samples",
                     "KL of whole responses, own samples", "use"], lines)


def value_table():
    """Bias and spread of each estimator's value."""
    rows = [row for row in read_csv(RESULTS / "kl_variance.csv") if row["of"] == "value" and row["vocabulary"] == "7"]
    lines = [[row["what"], row["drift"], f"{float(row['bias']):+.1e}" if abs(float(row["bias"])) > 1e-12 else "0",
              f"{float(row['rms error']):.3f}"] for row in sorted(rows, key=lambda row: row["what"])]
    return markdown(["value", "drift", "bias, nats", "rms error of one token, nats"], lines)


def variance_table():
    """How much quieter than k1 in the reward each gradient is."""
    rows = {(row["what"], row["drift"]): row for row in read_csv(RESULTS / "kl_variance.csv")
            if row["of"] == "gradient" and row["vocabulary"] == "7"}
    tiny = {f"{row['estimator']} {row['kl_in']}": float(row["of k1 in the reward"])
            for row in read_csv(RESULTS / "kl_variance_tiny.csv")}
    lines = []
    for name, key in (("k1 in the reward", "k1 reward"), ("k1 loss_to_go", "k1 loss_to_go"),
                      ("k3 loss_to_go", "k3 loss_to_go"), ("exact loss_to_go", "exact loss_to_go"),
                      ("exact in the loss", "exact loss")):
        ratios = [1 / float(rows[name, drift]["k1 in the reward / this"]) for drift in ("small", "large")]
        bias = float(rows[name, "large"]["bias"])
        lines.append([name, *(f"{x:.2f}" for x in (*ratios, tiny[key])), "none" if bias < 1e-10 else f"{bias:.2f}"])
    return markdown(["gradient of the sequence KL", "variance, small drift", "large drift", "built-in model",
                     "bias, large drift"], lines)


def explosion_table():
    rows, names = read_csv(RESULTS / "kl_explosion.csv"), []
    for row in rows:
        if row["KL term"] not in names:
            names.append(row["KL term"])
    lines = []
    for name in names:
        mine = [row for row in rows if row["KL term"] == name and row["seed"].isdigit()]
        norms = sorted(float(row["largest gradient norm"]) for row in mine)
        kls = sorted(float(row["last KL per token"]) for row in mine)
        lines.append([name, f"{sum(norm > 1e6 for norm in norms)} of {len(norms)}", f"{norms[len(norms) // 2]:.2g}",
                      f"{kls[len(kls) // 2]:.2f}"])
    return markdown(["KL term in the loss", "seeds with a gradient norm above 1e6", "largest norm, median",
                     "KL per token at the end, median"], lines)


def length_table():
    lines = [[row["KL in"], row["kl_coef"], *(f"{float(row[column]):.2f}" for column in (
        "P(answer)", "mean length", "KL per response", "KL per token"))] for row in read_csv(RESULTS / "kl_length.csv")]
    return markdown(["KL in", "kl_coef", "P(answer)", "mean length", "KL per response", "KL per token"], lines)


def controller_rows():
    """-> of the runs with target_sound: share of the second half within half of the target, largest KL / target."""
    found = []
    for _, rows in groups_of([HOT | LEASH | dict(kl_adaptation_method="target_sound")]):
        for row in rows:
            kl = [float(p["kl_per_token"]) for p in read_csv(CURVES) if p["id"] == row["id"]]
            late = kl[len(kl) // 2:]
            found.append((mean(0.05 <= x <= 0.15 for x in late), max(kl) / 0.1))
    return found


def rule_table():
    """Adaptive methods: as in print, what that does, what to use."""
    rows = {(row["experiment"], row["rule"], row["at"]): row["value"] for row in read_csv(RESULTS / "kl_adaptive.csv")}

    def value(experiment, rule, at):
        return float(next(x for (e, r, a), x in rows.items() if e.startswith(experiment) and r == rule and a.startswith(at)))

    own = next(float(row["mean length"]) for row in read_csv(RESULTS / "kl_length.csv") if "own length" in row["KL in"])
    decay = {rule: value("beta / first", rule, "step 100, median") for rule in ("dynamic", "dynamic_sound")}
    over = {rule: value("largest KL / target", rule, "pull 0.005") for rule in ("target", "target_sound")}
    fast = value("largest KL / target", "target_sound", "pull 0.02")
    live = "".join(f"; on the built-in model {100 * min(x for x, _ in held):.0f} % or more of the second half within half "
                   f"of the target, at most {max(x for _, x in held):.1f} times the target"
                   for held in [controller_rows()] if held)
    lines = [
        ["clip", "min(KL, `kl_clip_threshold` 1.0)",
         f"slope {value('slope', 'clip', 'KL 1.01'):g} past the threshold: lets go of what drifted furthest, and can even "
         f"turn the pull around (cosine down to {value('cosine', 'clip', 'k1, lowest'):.2f})",
         "`clip_sound`: the log-ratio is cut at ±5 nats, the pull stays"],
        ["sigmoid", "sigmoid(KL - `kl_target` 0.1) · KL",
         f"near a constant 0.5: slope {value('slope', 'sigmoid', 'KL 0,'):.3f} at 0 and "
         f"{value('slope', 'sigmoid', 'KL 0.2'):.3f} at 0.2 nats; {value('slope', 'sigmoid', 'KL -1.5'):.3f} at -1.5",
         "`sigmoid_sound`: a softplus hinge, slope 0 below the target and 1 above"],
        ["length_normalized", "KL / own length",
         f"in the reward responses grow from 5 to {own:.0f} tokens: it makes the exploit that it is said to prevent; in the "
         "loss it weakens the leash by the length",
         "none, or `length_normalized_sound`: a constant divisor, `max_new_tokens`"],
        ["dynamic", "x `dynamic_beta_decay` 0.9 where the mean reward is above `reward_threshold` 0.8; `beta_min` 0.0 after "
         "`beta_schedule_steps` 1000",
         f"a ratchet: at a true mean of 0.75, noise 0.08, {100 * decay['dynamic']:.0f} % of beta is left after 100 steps; then "
         "the leash is cut",
         f"`dynamic_sound`: averages, up as well as down, a floor of 0.1 `kl_coef`, a ceiling that falls slowly "
         f"({100 * decay['dynamic_sound']:.0f} % left in the same test)"],
        ["target", "x 1.5 above 1.5 `kl_target` (0.05), x 0.75 below half of it",
         f"winds down while nothing has drifted yet, then overshoots {over['target']:.0f} times (simulated)",
         f"`target_sound`: small steps in log beta on an average, within 0.1 to 10 `kl_coef`: {over['target_sound']:.1f} times "
         f"in the same simulation, {fast:.1f} where the policy is pulled 4 times as hard{live}"],
    ]
    return markdown(["`kl_adaptation_method`", "as in print", "what it does", "what to use"], lines)


# --- figures: from results/ alone -------------------------------------------------------------------------------------

def curve_of(rows, column):
    """-> steps, mean over the rows' seeds of a column of their curves."""
    runs, by_step = {row["id"] for row in rows}, {}
    for point in read_csv(CURVES):
        if point["id"] in runs and point[column]:
            by_step.setdefault(int(point["step"]), []).append(float(point[column]))
    return zip(*sorted((step, mean(values)) for step, values in by_step.items()))


def draw_frontier(plt):
    """Solved and what is kept, against KL; what is kept against the coefficient."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for grid, label in ((COEFFICIENTS[1:], "exact, by kl_coef"), (ESTIMATORS, "other estimators and places, 1.0"),
                        (METHODS, "adaptive methods, from 1.0"), ([HOT], "leash off")):
        groups = groups_of(grid)
        left.plot([mean(float(r["kl_per_token"]) for r in rows) for _, rows in groups],
                  [100 * mean(map(retention, rows)) for _, rows in groups],
                  "o-" if grid is not ESTIMATORS and len(grid) == 7 else "o", label=label, markersize=4)
    left.set(xlabel="KL(policy || start), nats per token", ylabel="other skills kept, %", xlim=(0, None))
    left.legend(fontsize=7)
    groups = groups_of(COEFFICIENTS[1:])
    _, off = groups_of([HOT])[0]
    for name, value in (("solved", lambda r: float(r["solved_after"])), ("other skills kept", retention)):
        kept = [100 * mean(map(value, rows)) for _, rows in groups]
        line, = right.plot([s["kl_coef"] for s, _ in groups], kept, "o-", label=name, markersize=4)
        right.axhline(100 * mean(map(value, off)), color=line.get_color(), linestyle=":", label=f"{name}, leash off")
    right.set(xlabel="kl_coef", ylabel="%", xscale="log")
    right.legend(fontsize=7)
    return figure


def draw_methods(plt):
    """KL and beta over the steps, for the methods that move beta; lengths of all."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2))
    for settings, rows in groups_of([HOT | LEASH, *METHODS]):
        method = settings["kl_adaptation_method"]
        if method.startswith(("none", "target", "dynamic")):
            axes[0].plot(*curve_of(rows, "kl_per_token"), label="constant" if method == "none" else method)
            axes[1].plot(*curve_of(rows, "current_beta"))
        axes[2].plot(*curve_of(rows, "response_length"), label=method)
    axes[0].legend(fontsize=6)
    for axis, label in zip(axes, ("KL, nats per token", "beta", "response length, tokens (all methods)")):
        axis.set(xlabel="step", title=label)
        axis.title.set_fontsize(8)
    axes[1].set(yscale="log")
    return figure


CLASSES = {"digits": r"\d", "operators": r"[-+*/()=]", "answer tags": r"</?answer>", "EOS": r"<\|end\|>",
           "other": r"[\s\S]*"}


def draw_where(plt):
    """KL by position in the response, and by class of token: seed 0, leash off and on."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    table = read_csv(BY_TOKEN)
    for shift, (changes, label) in enumerate(((HOT, "leash off"), (HOT | LEASH, "kl_coef 1.0"))):
        mine = [row for row in table if row["id"] == id_of(key_of(changes, 0))]
        at = {int(row["key"]): float(row["nats"]) / int(row["tokens"]) for row in mine if row["by"] == "position"}
        left.bar([p + 0.4 * shift for p in at], at.values(), 0.4, label=label)
        nats, tokens = dict.fromkeys(CLASSES, 0.0), dict.fromkeys(CLASSES, 0)
        for row in (row for row in mine if row["by"] == "token"):
            text = row["key"].split(" ", 1)[1]
            name = next(name for name, pattern in CLASSES.items() if re.fullmatch(pattern, text))
            nats[name], tokens[name] = nats[name] + float(row["nats"]), tokens[name] + int(row["tokens"])
        shown = [name for name in CLASSES if tokens[name] > 0.01 * sum(tokens.values())]  # a dozen tokens say nothing
        right.bar([i + 0.4 * shift for i in range(len(shown))], [nats[name] / tokens[name] for name in shown], 0.4)
        right.set_xticks([i + 0.2 for i in range(len(shown))], shown, fontsize=7)
    left.set(xlabel="position in the response", ylabel="KL, nats per token")
    left.legend(fontsize=7)
    right.set(ylabel="KL, nats per token of the class")
    return figure


def draw_estimators(plt):
    """k1, k2, k3 and the exact KL of the same tokens over one run: bias and noise on live data."""
    figure, axis = plt.subplots(figsize=(9, 3))
    (_, rows), = groups_of([HOT | LEASH])
    for column in ("kl_k1", "kl_k2", "kl_k3", "kl_per_token"):
        axis.plot(*curve_of(rows[:1], column), label="exact" if column == "kl_per_token" else column[3:],
                  linewidth=2 if column == "kl_per_token" else 1)
    axis.set(xlabel="step", ylabel="KL of the step's tokens, nats per token")
    axis.legend(fontsize=7)
    return figure


def draw():
    """All figures of the ablation -> figures/*.png."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    FIGURES.mkdir(exist_ok=True)
    for name, make in (("frontier", draw_frontier), ("methods", draw_methods), ("where", draw_where),
                       ("estimators", draw_estimators)):
        figure = make(plt)
        figure.tight_layout()
        figure.savefig(FIGURES / f"kl_{name}.png", dpi=100)
        plt.close(figure)


def kill_table():
    """Runs that were killed and resumed, by engine and phase."""
    rows, lines = read_csv(RESULTS / "kills.csv"), []
    for engine in dict.fromkeys(row["engine"] for row in rows):
        mine = [row for row in rows if row["engine"] == engine]
        same = [row for row in mine if row["killed"] == row["same_weights"] == row["same_log"] == "True"]
        phases = [f"{sum(row['phase'] == phase for row in mine)} in {phase}" for phase in dict.fromkeys(
            row["phase"] for row in mine)]
        fresh = sum(row["went_on"] == "from the start" for row in mine)
        lines.append([engine, str(len(mine)), ", ".join(phases), str(fresh), str(len(same))])
    return markdown(["engine", "killed", "when", "before the first checkpoint", "ended with the same bits"], lines)


def mutant_table():
    """Planted faults by file, how many the fast tests catch, and those that they do not."""
    rows = read_csv(RESULTS / "mutants.csv")
    lines = [[file, str(sum(row["file"] == file for row in rows)),
              str(sum(row["file"] == file and row["caught_by"] != "" for row in rows))]
             for file in dict.fromkeys(row["file"] for row in rows)]
    missed = [f"`{row['stands'].strip()}` → `{row['becomes'].strip()}`" for row in rows if not row["caught_by"]]
    return markdown(["file", "planted", "caught"], lines) + (f"\n\nNot caught: {'; '.join(missed)}." if missed else "")


def fuzz_table():
    """The last run of the fuzzer."""
    row = read_csv(RESULTS / "fuzz.csv")[-1]
    names = ["inputs", "with an answer", "solved", "longer than 100,000", "broken", "slowest in ms",
             "largest allocation in MB", "corpus size"]
    return markdown(names, [[row[name] for name in names]])


SIZE_NAMES = {"S": "S: hidden 128, 4 layers, 16 new tokens", "M": "M: hidden 384, 6 layers, 16 new tokens",
              "M-64": "M, 64 new tokens", "L": "L: hidden 256, 4 layers, vocabulary 151,936, 16 new tokens"}


def last_rows(name, *keys):
    """-> the newest row of results/bench_<name>.csv for each combination of these columns."""
    return list({tuple(row[key] for key in keys): row for row in read_csv(RESULTS / f"bench_{name}.csv")}.values())


def speed_table():
    """A step of ours and of TRL's, in turns in one process."""
    lines = [[SIZE_NAMES[row["size"]], row["dtype"], "on" if row["leash"] == "True" else "off",
              f"{row['ours_s']} ({row['ours_min_s']} to {row['ours_max_s']})",
              f"{row['trl_s']} ({row['trl_min_s']} to {row['trl_max_s']})", row["ratio"], row["ours_gb"],
              f"{row['trl_gb']} ({row['trl_rows_at_once']} rows), {row['trl_gb_most_rows']} ({row['trl_most_rows']} rows)"]
             for row in last_rows("step", "size", "dtype", "leash")]
    return markdown(["model", "dtype", "leash", "starter.py, s", "TRL, s", "ratio", "GB", "TRL, GB"], lines)


def phase_table():
    lines = [[row["size"], row["phase"], f"{1000 * float(row['seconds']):.0f}", row["response_tokens_per_s"],
              row["share_of_matmul_rate"] or f"copy: {row['share_of_copy_rate']}"]
             for row in last_rows("phases", "size", "dtype", "phase")]
    return markdown(["model", "phase", "ms", "response tokens/s", "share of the machine's rate"], lines)


def memory_table():
    names = ["libraries", "weights", "gradients", "moments", "reference", "bf16 copies", "activations", "head"]
    lines = [[row["size"], "on" if row["leash"] == "True" else "off", *(f"{float(row[name]):.2f}" for name in names),
              row["predicted_gb"], row["measured_gb"], row["ratio"]] for row in last_rows("memory", "size", "leash")]
    return markdown(["model", "leash", *names, "formula", "measured", "ratio"], lines)


# leash, gradient checkpointing, max_tokens_per_microbatch
GPU_SETTINGS = (False, False, 4_096), (True, False, 4_096), (True, True, 4_096), (False, False, 16_384)


def gpu_table():
    """Which GPU: the formula for Qwen3's sizes, prompts of 150 tokens and responses of 256."""
    import bench
    lines = []
    for name, shape in bench.TABLE_SIZES.items():
        cells = [f"Qwen3-{name}"]
        for leash, checkpointing, budget in GPU_SETTINGS:
            found = bench.predicted_gb(shape, {"all": 128 * 256, "longest": 256}, {"all": 16 * 150, "longest": 150},
                                       leash=leash, checkpointing=checkpointing, on_cpu=False, budget=budget)
            cells.append(f"{sum(found.values()):.0f}")
        lines.append([*cells, f"{sum(found[k] for k in ('weights', 'gradients', 'moments', 'reference')):.0f}"])
    names = [f"leash {'on' if leash else 'off'}, {budget:,} tokens{', checkpointing' * checkpointing}"
             for leash, checkpointing, budget in GPU_SETTINGS]
    return markdown(["model", *names, "of it weights, gradients, moments, reference"], lines)


def learning_table():
    """The default run as it is now beside the sweep's, which was made before the step became faster."""
    earlier, lines = {row["run"]: row for row in read_csv(CSV)}, []
    for row in last_rows("learning", "leash", "seed"):
        leash = row["leash"] == "True"
        was = earlier[key_of({"use_kl_penalty": True, "kl_coef": 0.3} if leash else {}, int(row["seed"]))]
        lines.append(["on" if leash else "off", row["seed"], f"{100 * float(row['solved_after']):.1f}",
                      f"{100 * float(was['solved_after']):.1f}", f"{100 * float(row['other_skills']):.1f}",
                      f"{100 * retention(was):.1f}", row["kl_per_token"], was["kl_per_token"], row["seconds"],
                      row["tokens_per_s"]])
    return markdown(["leash", "seed", "solved, %", "in the sweep", "other skills, %", "in the sweep", "KL per token",
                     "in the sweep", "training, s", "response tokens/s"], lines)


def growth_table():
    """Exponents of the power laws through the measured points."""
    import bench
    lines = []
    for what, points in bench.growth_points().items():
        ends = [f"{x:.0f}: {1000 * seconds:.0f} ms" for x, seconds in (points["update"][0], points["update"][-1])]
        both = [(x, seconds + other) for (x, seconds), (_, other) in zip(points["update"], points["rollout"])]
        exponents = [f"{bench.slope(pairs):.2f}" for pairs in (points["update"], points["rollout"], both)]
        lines.append([f"`{what}`", *ends, *exponents])
    return markdown(["what grows", "least, an update", "most, an update", "exponent of the update", "of the rollout",
                     "of both"], lines)


def scaling_table():
    """Seconds of a step as processes are added, each with as many rows; beside one alone."""
    rows, lines, names = read_csv(RESULTS / "bench_scaling.csv"), [], {
        ("1", "1"): "one process", ("1", "2"): "two that know nothing of each other", ("2", "1"): "two ranks"}
    seconds = lambda size, kind: statistics.mean(float(row["total_s"]) for row in rows if (
        row["size"], row["ranks"], row["processes"]) == (size, *kind))
    for size in dict.fromkeys(row["size"] for row in rows):
        alone = seconds(size, ("1", "1"))
        lines += [[size, name, f"{seconds(size, kind):.2f}", f"{alone / seconds(size, kind):.2f}"]
                  for kind, name in names.items()]
    return markdown(["model", "processes, a thread each", "s a step", "weak scaling"], lines)


def start_table():
    rows = read_csv(RESULTS / "bench_start.csv")
    first, evaluation = ([float(row[name]) for row in rows] for name in ("first_step_s", "first_evaluation_s"))
    cells = [f"{x:.1f}" for x in (statistics.median(first), min(first), max(first), statistics.median(evaluation))]
    return markdown(["runs", "start to first finished step, s: median", "smallest", "largest",
                     "of it the first evaluation, s"], [[str(len(rows)), *cells]])


TABLES = {"coefficients": coefficient_table, "estimators": estimator_table, "methods": method_table,
          "engines": engine_table, "verdicts": verdict_table, "gradients": gradient_table, "values": value_table,
          "variance": variance_table, "explosion": explosion_table, "length": length_table, "rules": rule_table,
          "kills": kill_table, "fuzz": fuzz_table, "mutants": mutant_table, "speed": speed_table,
          "phases": phase_table, "memory": memory_table, "gpus": gpu_table, "learning": learning_table,
          "growth": growth_table, "scaling": scaling_table, "start": start_table}


def with_tables(text):
    """README text -> the same with each <!-- table: NAME --> and <!-- console: NAME --> block made from results/."""
    make = {"table": lambda name: TABLES[name](), "console": console}
    return re.sub(r"(<!-- (table|console): (\w+) -->\n).*?(<!-- end -->)",
                  lambda m: m[1] + make[m[2]](m[3]) + "\n" + m[4], text, flags=re.S)


if __name__ == "__main__":
    if sys.argv[1:] == ["--tables"]:
        README.write_text(with_tables(README.read_text()))
    elif sys.argv[1:] == ["--figures"]:
        draw()
    elif sys.argv[1:] == ["--console"]:
        write_consoles()
    elif sys.argv[1:] == ["--engines"]:
        fill([{}, {"engine": "vllm"}], ENGINES)
    elif sys.argv[1:] in ([], ["--full"]):
        fill(FULL if sys.argv[1:] else SHORT)
    else:
        sys.exit("usage: python ablate_kl.py [--full | --engines | --console | --figures | --tables]")
