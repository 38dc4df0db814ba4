"""Runs main() over KL settings and seeds, on the built-in model.

    python -m lab.ablate_kl               the short grid: coefficients, KL penalty off and on
    python -m lab.ablate_kl --full        also estimators, placements, adaptive methods: some 80
                                          runs, over an hour on two cores
    python -m lab.ablate_kl --engines     KL penalty off, sampled by transformers and by vLLM
    python -m lab.ablate_kl --console     two runs as a user sees them -> results/console_*.txt
    python -m lab.ablate_kl --figures     draws figures/kl_*.png from the results (needs matplotlib)

The runs go into lab/results: kl_ablation.csv, kl_curves.csv, kl_by_token.csv, engines.csv. A sweep
that was killed goes on where it was. `python -m lab.tables` puts the results into the pages.

Runs go side by side, one per core, each on one thread. The sweep is at HOT, a learning rate at
which the model does forget: at the default one, 200 steps forget little, with or without a KL
penalty (those rows stand beside).
"""
import argparse
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

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "lab" / "results"
FIGURES = REPOSITORY / "lab" / "figures"
ABLATION = RESULTS / "kl_ablation.csv"
CURVES = RESULTS / "kl_curves.csv"
BY_TOKEN = RESULTS / "kl_by_token.csv"
ENGINES = RESULTS / "engines.csv"

SEEDS = (0, 1, 2)
HOT = dict(learning_rate=6e-4)
PENALTY = dict(use_kl_penalty=True, kl_coef=1.0, kl_estimator="exact")  # what is changed below
BASE = HOT | PENALTY

DEFAULT_RATE = [{}, dict(use_kl_penalty=True, kl_coef=0.3)]
COEFFICIENTS = [HOT, *(BASE | dict(kl_coef=kl_coef)
                       for kl_coef in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))]
ESTIMATORS = [BASE | changes for changes in (
    # k2 as written has the gradient of k3 reversed, in a rollout's first epoch.
    dict(kl_estimator="k3"),
    dict(kl_estimator="k3", kl_gradient="as_written"),
    dict(kl_estimator="k1", kl_gradient="as_written", reproduce_paper=True),
    dict(kl_in="loss_to_go"),
    dict(kl_estimator="k3", kl_in="loss_to_go"),
    dict(kl_estimator="k1", kl_in="reward"),
)]
TARGET_SOUND = BASE | dict(kl_adaptation_method="target_sound")
METHODS = [TARGET_SOUND, *(BASE | changes for changes in (
    dict(kl_adaptation_method="clip"),
    dict(kl_adaptation_method="length_normalized"),
    dict(kl_adaptation_method="length_normalized", kl_estimator="k1", kl_in="reward"),
    dict(kl_adaptation_method="dynamic"),
    dict(kl_adaptation_method="sigmoid"),
    dict(kl_adaptation_method="target", kl_target=0.05),  # as in print
    dict(kl_adaptation_method="dynamic_sound"),
    dict(kl_adaptation_method="sigmoid_sound"),
    dict(kl_adaptation_method="clip_sound", kl_estimator="k3"),
    dict(kl_adaptation_method="length_normalized_sound"),
))]
SHORT = COEFFICIENTS + DEFAULT_RATE
FULL = SHORT + ESTIMATORS + METHODS

# What a run had that its row does not name, to read a row without starter.py
DEFAULTS = dict(learning_rate=3e-4, use_kl_penalty=False, kl_coef=0.0, kl_estimator="k3",
                kl_gradient="reverse", kl_in="loss", kl_adaptation_method="none",
                engine="transformers")


# --------------------------------------------------------------------------------------------------
# 1. Runs.  Settings, seed -> rows of the csv files.

def key_of(changes, seed):
    """Returns the text that stands for a run in the csv files."""
    return json.dumps(changes | {"seed": seed}, sort_keys=True)


def id_of(key):
    """Returns eight letters that stand for a run in the long tables."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def read_csv(path):
    """Returns the rows, oldest first; [] where there is no file."""
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def append_rows(path, new):
    if not new:
        return
    rows = read_csv(path)
    if rows and set(rows[0]) != set(new[0]):
        sys.exit(f"{path} has other columns than this version writes; move it away")
    path.parent.mkdir(exist_ok=True)
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0] if rows else new[0]), lineterminator="\n")
        if not rows:
            writer.writeheader()
        writer.writerows(new)


CURVE_TAGS = ("train/reward_mean", "train/response_length", "train/kl_per_token", "train/kl_k1",
              "train/kl_k2", "train/kl_k3", "adaptive_kl/current_beta")


def run_one(changes, seed):
    """One training run, in a process of its own. Returns its row, its curve (a row for every fifth
    step) and, for the first seed, its KL by token."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)  # a dozen runs would print into each other
    import starter
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = starter.main(model_id="tiny", seed=seed, eval_every=0, out_dir=folder, **changes)
        minutes = (time.perf_counter() - start) / 60
        log = EventAccumulator(str(result["run_folder"])).Reload()
        by_token = json.loads((result["run_folder"] / "kl_by_token.json").read_text())

    key = key_of(changes, seed)
    row = {"run": key, "id": id_of(key), "seed": seed, "minutes": round(minutes, 2)}
    for name in ("kl_per_token", "kl_per_sequence"):
        row[name] = round(result[name], 4)
    for moment in ("before", "after"):
        for name, value in result[moment].items():
            row[f"{name}_{moment}"] = round(value, 4)

    logged = {tag: {event.step: event.value for event in log.Scalars(tag)}
              for tag in CURVE_TAGS if tag in log.Tags()["scalars"]}
    if changes.get("use_kl_penalty") and CURVE_TAGS[-1] not in logged:  # no method moves it
        kl_coef = changes.get("kl_coef", starter.TINY["kl_coef"])
        logged[CURVE_TAGS[-1]] = dict.fromkeys(logged["train/reward_mean"], kl_coef)
    curve = []
    for step in logged["train/reward_mean"]:
        if step % 5 == 0:
            curve.append({"id": row["id"], "step": step} | {
                tag.split("/")[1]: f"{logged[tag][step]:.4g}" if tag in logged else ""
                for tag in CURVE_TAGS})

    tokens = []
    if seed == SEEDS[0]:
        for kind, table in by_token.items():
            for name, (nats, n) in table.items():
                tokens.append({"id": row["id"], "by": kind, "key": name, "nats": round(nats, 2),
                               "tokens": n})
    return row, curve, tokens


def fill(grid, path=ABLATION):
    """Runs what the csv does not hold yet. What a run gives is written as soon as it is there."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that run_one gets
    import starter
    weights = starter.find_model("tiny") / "model.safetensors"
    model = hashlib.sha256(weights.read_bytes()).hexdigest()[:8]
    rows = read_csv(path)
    if any(row["model"] != model for row in rows):
        # The same build gives other weights on another kind of processor.
        sys.exit(f"{path} was made with another build of the built-in model; move it away, or go "
                 "on where it was made")
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    known = {row["run"] for row in rows}
    todo = [(changes, seed) for changes in grid for seed in SEEDS
            if key_of(changes, seed) not in known]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(run_one, *job) for job in todo]):
            if done.exception():  # the others go on
                print(f"a run failed: {done.exception()}", flush=True)
                continue
            row, curve, tokens = done.result()
            append_rows(path, [row | {"commit": commit, "model": model}])
            if path == ABLATION:
                append_rows(CURVES, curve)
                append_rows(BY_TOKEN, tokens)
            print(f"{row['run']}: solved {row['solved_after']:.1%}, {row['minutes']} min",
                  flush=True)


def write_consoles():
    """The first command of README.md, without and with the KL penalty, each in a process of its
    own."""
    for name, settings in (("off", ""), ("on", "use_kl_penalty=True")):
        program = f"import starter; starter.test_functions(); starter.main({settings})"
        process = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, text=True,
                                 stdout=subprocess.PIPE, check=True)
        (RESULTS / f"console_{name}.txt").write_text(process.stdout)


# --------------------------------------------------------------------------------------------------
# 2. Reading the rows.

def settings_of(row):
    """Returns the settings of a row's run, defaults filled in."""
    return DEFAULTS | json.loads(row["run"])


def groups_of(grid):
    """Returns [(settings, rows of its seeds)] of a grid, as far as the csv holds them."""
    by_run = {row["run"]: row for row in read_csv(ABLATION)}
    groups = []
    for changes in grid:
        keys = [key_of(changes, seed) for seed in SEEDS]
        rows = [by_run[key] for key in keys if key in by_run]
        if rows:
            groups.append((DEFAULTS | changes, rows))
    return groups


def rows_of(changes):
    """Returns the rows of one setting of a grid."""
    return groups_of([changes])[0][1]


def numbers_of(rows, column):
    return [float(row[column]) for row in rows]


def skills_of(row):
    return [name.removeprefix("retention_").removesuffix("_after") for name in row
            if re.fullmatch(r"retention_\w+_after", name)]


def retention(row, moment="after"):
    """Returns the mean share of the other skills' held-out problems that are solved."""
    return statistics.mean(float(row[f"retention_{skill}_{moment}"]) for skill in skills_of(row))


def solved(rows):
    return statistics.mean(numbers_of(rows, "solved_after"))


def other_skills(rows):
    return statistics.mean(map(retention, rows))


def best_coefficient():
    """Returns settings and rows of the KL penalty that keeps most of the other skills, of those
    within 2 points of the solved rate without it."""
    off = rows_of(HOT)
    near = [(settings, rows) for settings, rows in groups_of(COEFFICIENTS[1:])
            if solved(rows) >= solved(off) - 0.02]
    return max(near, key=lambda group: other_skills(group[1]), default=(None, off))


def controller_rows():
    """Returns, for each run with target_sound, the share of its second half within half of the
    target, and its largest KL / target."""
    curves = read_csv(CURVES)
    measured = []
    for row in rows_of(TARGET_SOUND):
        kls = [float(point["kl_per_token"]) for point in curves if point["id"] == row["id"]]
        late = kls[len(kls) // 2:]
        near = statistics.mean(0.05 <= kl <= 0.15 for kl in late)
        measured.append((near, max(kls) / 0.1))
    return measured


def curve_of(rows, column):
    """Returns steps, and the mean over the rows' seeds of a column of their curves."""
    ids = {row["id"] for row in rows}
    by_step = {}
    for point in read_csv(CURVES):
        if point["id"] in ids and point[column]:
            by_step.setdefault(int(point["step"]), []).append(float(point[column]))
    steps = sorted(by_step)
    return steps, [statistics.mean(by_step[step]) for step in steps]


# --------------------------------------------------------------------------------------------------
# 3. Figures.

def draw_frontier(plt):
    """Other skills against KL, solved and other skills against the coefficient."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for grid, style, label in (
            (COEFFICIENTS[1:], "o-", "exact, by kl_coef"),
            (ESTIMATORS, "o", "other estimators and places, 1.0"),
            (METHODS, "o", "adaptive methods, from 1.0"),
            ([HOT], "o", "KL penalty off")):
        groups = groups_of(grid)
        kls = [statistics.mean(numbers_of(rows, "kl_per_token")) for _, rows in groups]
        left.plot(kls, [100 * other_skills(rows) for _, rows in groups], style, label=label,
                  markersize=4)
    left.set(xlabel="KL(policy || start), nats per token", ylabel="other skills, %",
             xlim=(0, None))
    left.legend(fontsize=7)

    groups = groups_of(COEFFICIENTS[1:])
    off = rows_of(HOT)
    for name, share in (("solved", solved), ("other skills", other_skills)):
        line, = right.plot([settings["kl_coef"] for settings, _ in groups],
                           [100 * share(rows) for _, rows in groups], "o-", label=name,
                           markersize=4)
        right.axhline(100 * share(off), color=line.get_color(), linestyle=":",
                      label=f"{name}, KL penalty off")
    right.set(xlabel="kl_coef", ylabel="%", xscale="log")
    right.legend(fontsize=7)
    return figure


def draw_methods(plt):
    """KL and beta over the steps, for the methods that move beta; lengths of all."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2))
    for settings, rows in groups_of([BASE, *METHODS]):
        method = settings["kl_adaptation_method"]
        if method.startswith(("none", "target", "dynamic")):
            label = "constant" if method == "none" else method
            axes[0].plot(*curve_of(rows, "kl_per_token"), label=label)
            axes[1].plot(*curve_of(rows, "current_beta"))
        axes[2].plot(*curve_of(rows, "response_length"))
    axes[0].legend(fontsize=6)
    titles = ("KL, nats per token", "beta", "response length, tokens (all methods)")
    for axis, title in zip(axes, titles):
        axis.set_xlabel("step")
        axis.set_title(title, fontsize=8)
    axes[1].set_yscale("log")
    return figure


CLASSES = {"digits": r"\d", "operators": r"[-+*/()=]", "answer tags": r"</?answer>",
           "EOS": r"<\|end\|>", "other": r"[\s\S]*"}


def kl_by_class(rows):
    """Rows of kl_by_token.csv -> {class of token: (nats, tokens)}."""
    sums = {name: (0.0, 0) for name in CLASSES}
    for row in rows:
        text = row["key"].split(" ", 1)[1]
        name = next(name for name, pattern in CLASSES.items() if re.fullmatch(pattern, text))
        nats, n = sums[name]
        sums[name] = (nats + float(row["nats"]), n + int(row["tokens"]))
    return sums


def draw_where(plt):
    """KL by position in the response, and by class of token: seed 0, KL penalty off and on."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    table = read_csv(BY_TOKEN)
    for shift, (changes, label) in enumerate(((HOT, "KL penalty off"), (BASE, "kl_coef 1.0"))):
        run = id_of(key_of(changes, 0))
        of_run = [row for row in table if row["id"] == run]
        at = {int(row["key"]): float(row["nats"]) / int(row["tokens"]) for row in of_run
              if row["by"] == "position"}
        left.bar([position + 0.4 * shift for position in at], at.values(), 0.4, label=label)
        sums = kl_by_class([row for row in of_run if row["by"] == "token"])
        all_tokens = sum(n for _, n in sums.values())
        shown = {name: nats / n for name, (nats, n) in sums.items()
                 if n > 0.01 * all_tokens}  # the mean of a dozen tokens says nothing
        right.bar([i + 0.4 * shift for i in range(len(shown))], shown.values(), 0.4)
        right.set_xticks([i + 0.2 for i in range(len(shown))], shown, fontsize=7)
    left.set(xlabel="position in the response", ylabel="KL, nats per token")
    left.legend(fontsize=7)
    right.set_ylabel("KL, nats per token of the class")
    return figure


def draw_estimators(plt):
    """k1, k2, k3 and the exact KL of the same tokens over one run."""
    figure, axis = plt.subplots(figsize=(9, 3))
    one_run = rows_of(BASE)[:1]
    for column in ("kl_k1", "kl_k2", "kl_k3", "kl_per_token"):
        exact = column == "kl_per_token"
        axis.plot(*curve_of(one_run, column), label="exact" if exact else column[3:],
                  linewidth=2 if exact else 1)
    axis.set(xlabel="step", ylabel="KL of the step's tokens, nats per token")
    axis.legend(fontsize=7)
    return figure


def draw():
    """Draws the figures of the ablation from the results."""
    import matplotlib
    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt
    FIGURES.mkdir(exist_ok=True)
    for name, make in (("frontier", draw_frontier), ("methods", draw_methods),
                       ("where", draw_where), ("estimators", draw_estimators)):
        figure = make(plt)
        figure.tight_layout()
        figure.savefig(FIGURES / f"kl_{name}.png", dpi=100)
        plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description="main() over KL settings and seeds")
    choice = parser.add_mutually_exclusive_group()
    for name in ("full", "engines", "console", "figures"):
        choice.add_argument(f"--{name}", action="store_true")
    arguments = parser.parse_args()
    if arguments.figures:
        draw()
    elif arguments.console:
        write_consoles()
    elif arguments.engines:
        fill([{}, {"engine": "vllm"}], ENGINES)
    else:
        fill(FULL if arguments.full else SHORT)


if __name__ == "__main__":
    main()
