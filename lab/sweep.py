"""Runs main() over settings and seeds: a row of a csv file for each run.

    python -m lab.sweep learning               a sweep of SWEEPS -> lab/results/learning.csv
    python -m lab.sweep smollm2 --text gsm8k.jsonl --jobs 1
    python -m lab.sweep mine kl_coef=0.1,0.3 use_kl_penalty=True --seeds 0 1
                                               any numbers of main(), every combination

Runs that the file holds already are not repeated, so that a sweep that was killed goes on where it
was. Each run is a process of its own, --jobs at a time, which share the cores. Settings may also
name a "recipe": the run then takes place in a copy of the repository with that patch applied; or an
"environment": variables of that process.

A row has the settings, the seed, every number of the evaluations before and after, the exact
KL(policy || starting model) of sampled responses to the held-out problems, and curves: a value for
every fifth step, for each step of a run of at most 50, and for each evaluation.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from lab.rows import REPOSITORY, append_rows, peak_gb, read_csv, run_python, where

# 1. Sweeps.  Name -> settings that differ from main()'s defaults. preset is "tiny" unless named.

ON = dict(use_kl_penalty=True)
TARGET = ON | dict(kl_adaptation_method="target_sound")
# At twice the learning rate of the preset the built-in model forgets more, so that what keeps it
# from that shows.
HOT = dict(learning_rate=6e-4)
BASE = HOT | ON | dict(kl_coef=1.0, kl_estimator="exact")
SAMPLED = HOT | dict(eval_samples=8)  # of recipes/pass_at_k.patch, which is applied for it
COEFFICIENTS = [
    SAMPLED,
    *(
        SAMPLED | ON | dict(kl_coef=kl_coef, kl_estimator="exact")
        for kl_coef in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    ),
]
TO_GO = dict(kl_estimator="exact", kl_in="loss_to_go", loss_average="dr_grpo")
# Which divergence and which placement, each at several coefficients, with pass@8
DIVERGENCES = [
    *COEFFICIENTS,
    *(
        SAMPLED | ON | dict(kl_coef=kl_coef) | what
        for what in ({}, dict(kl_estimator="exact_forward"), TO_GO)
        for kl_coef in (0.1, 0.3, 1.0, 3.0)
    ),
    *(
        SAMPLED | ON | dict(kl_coef=1.0) | what
        for what in (
            dict(kl_estimator="k1", kl_in="reward"),
            dict(kl_gradient="as_written"),
            dict(kl_estimator="k1", kl_gradient="as_written", reproduce_paper=True),
        )
    ),
]
METHODS = [
    BASE | dict(kl_adaptation_method=method) | changes
    for method, changes in (
        ("target_sound", {}),
        ("clip", {}),
        ("length_normalized", {}),
        ("length_normalized", dict(kl_estimator="k1", kl_in="reward")),
        ("dynamic", {}),
        ("sigmoid", {}),
        ("target", dict(kl_target=0.05)),  # as in print
        ("dynamic_sound", {}),
        ("sigmoid_sound", {}),
        ("clip_sound", dict(kl_estimator="k3")),
        ("length_normalized_sound", {}),
    )
]
SMOLLM2 = dict(preset="smollm2")
LORA = dict(lora_rank=16, learning_rate=2e-4)
TWICE = dict(epochs_per_rollout=2)
# Some compare with starter.py at two epochs; some change nothing that this model learns.
NOT_TRIED = {
    "moving_reference",
    "length_reward",
    "several_rewards",
    "pass_at_k",
    "multi_turn",
    "sampler_mask",
}
NAMES = {path.stem for path in (REPOSITORY / "recipes").glob("*.patch")}
RECIPES = [{}, TWICE, TWICE | dict(loss_average="grpo")]
RECIPES += [dict(recipe=name) for name in sorted(NAMES - NOT_TRIED)]
RECIPES += [dict(recipe="off_policy+sampler_mask")]

# What another machine would see: threads, and the instructions of older processors.
MACHINES = [
    dict(precision=precision, environment=dict(OMP_NUM_THREADS=threads) | others)
    for precision, threads, others in (
        ("float32", "2", {}),
        ("float32", "1", {}),
        ("bf16", "2", {}),
        ("bf16", "1", {}),
        ("float32", "2", dict(ATEN_CPU_CAPABILITY="avx2")),
        ("float32", "2", dict(ATEN_CPU_CAPABILITY="default")),
    )
]

SWEEPS = {
    "machines": MACHINES,
    "machines_amx": MACHINES[2:4],  # on a processor with AMX
    "learning": [settings | dict(eval_every=10) for settings in ({}, ON, TARGET)],
    "kl": [HOT, BASE, *METHODS],
    "kl_divergences": DIVERGENCES,
    "recipes": [
        *RECIPES,
        ON,  # with the penalty those that change the KL's part
        *(ON | dict(recipe=name) for name in ("maxrl", "moving_reference", "rloo")),
    ],
    "smollm2": [
        SMOLLM2 | what
        for what in (
            {},
            *(ON | dict(kl_coef=kl_coef) for kl_coef in (0.03, 0.1, 0.3)),
            LORA,
            LORA | ON | dict(kl_coef=0.3),
        )
    ],
    # with the KL that forgetting is compared with, at coefficients that the sweep above leaves out
    "smollm2_divergences": [
        SMOLLM2 | what
        for what in (
            {},
            *(ON | dict(kl_coef=kl_coef) for kl_coef in (0.2, 0.3)),
            ON | dict(kl_coef=0.3, kl_estimator="exact_forward"),
            *(ON | dict(kl_coef=kl_coef) | TO_GO for kl_coef in (0.1, 0.3)),
            LORA,
            LORA | ON | dict(kl_coef=0.1),
        )
    ],
}


def key_of(settings):
    return json.dumps(settings, sort_keys=True)


# 2. One run, in this process.  Settings, seed -> its row.

CURVES = {
    "reward": "train/reward_mean",
    "kl": "train/kl_per_token",
    "beta": "adaptive_kl/current_beta",
    "solved": "eval/solved",
}


def start_of(preset):
    """Returns the folder of a preset's model."""
    if preset == "smollm2":
        from lab import real_model

        return real_model.model_folder()
    from support import tasks

    return Path(tasks.TINY)


def train(settings, seed, text):
    """Runs main() once. Returns its row."""
    import starter
    from lab import real_model

    preset = settings.get("preset", "tiny")
    start = start_of(preset)
    with tempfile.TemporaryDirectory() as out_dir:
        result = starter.main(
            **dict(
                preset=preset,
                model_id=str(start),
                seed=seed,
                eval_every=0,
                save_every=0,
                out_dir=out_dir,
            )
            | settings
        )
        folder = result["run_folder"]
        row = {"settings": key_of(settings), "seed": seed}
        for moment in ("before", "after"):
            for name, value in result[moment].items():
                row[f"{name}_{moment}"] = round(value, 4)
        row |= measure_kl(start, folder) | read_log(folder)
        if text:
            row |= real_model.forgetting(start, folder / "model", text)
    return row | {"peak_gb": round(peak_gb(), 2)} | where()


def measure_kl(start, folder):
    """Samples a response to each held-out problem of a finished run. Returns the exact KL to the
    model in the folder start, also where a recipe's reference was another one, and KL(start ||
    policy) in the same states."""
    import torch

    import starter

    settings = json.loads((folder / "settings.json").read_text("utf-8"))
    cfg = starter.cfg_with(
        **settings | dict(reward=starter.reward_fn, device="cpu", precision="float32")
    )
    ref_model, tokenizer = starter.init_policy(start, "cpu")
    policy, _ = starter.init_policy(folder / "model", "cpu")
    cfg.stop_token_ids = starter.find_stop_tokens(policy, tokenizer)
    held_out = starter.with_prompt_ids(starter.load_problems(cfg).held_out, policy, tokenizer, cfg)
    prompts = [problem["prompt_ids"] for problem in held_out]
    responses = starter.rollout_with_transformers(policy, prompts, cfg, 0, 1, 1.0)
    batch = starter.make_batch(responses, torch.zeros(len(responses)), "cpu")
    reverse = forward = 0.0
    with torch.no_grad():
        for rows in starter.cut_microbatches(batch, cfg.max_tokens_per_microbatch):
            stats = starter.token_statistics(policy, rows, 1.0, False, ref_model)
            reverse += stats["kl_per_token"].sum().item()
            forward += stats["kl_forward"].sum().item()
    n_tokens = batch["response_mask"].sum().item()
    return {
        "kl_per_token": round(reverse / n_tokens, 4),
        "kl_per_response": round(reverse / len(responses), 3),
        "forward_kl_per_token": round(forward / n_tokens, 4),
        "forward_kl_per_response": round(forward / len(responses), 3),
    }


def read_log(folder):
    """Returns seconds, extremes and curves of a run, as TensorBoard has them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    logged = {
        tag: {event.step: event.value for event in log.Scalars(tag)}
        for tag in log.Tags()["scalars"]
    }
    seconds = logged["time/total"].values()
    every = 1 if len(seconds) <= 50 else 5
    kls = logged.get("train/kl_per_token", {}).values()
    row = {
        "steps": len(seconds),
        "seconds": round(sum(seconds), 1),
        "s_per_step": round(statistics.median(seconds), 3),
        "largest_grad_norm": f"{max(logged['train/grad_norm'].values()):.4g}",
        "largest_kl": f"{max(kls):.4g}" if kls else "",
    }
    skills = [tag for tag in logged if tag.startswith("eval/retention_")]
    if skills:
        CURVES["other_skills"] = "eval/other_skills"
        logged["eval/other_skills"] = {
            step: statistics.mean(logged[tag][step] for tag in skills) for step in logged[skills[0]]
        }
    for name, tag in CURVES.items():
        kept = [
            value
            for step, value in logged.get(tag, {}).items()
            if tag.startswith("eval/") or step % every == 0
        ]
        row[f"curve_{name}"] = " ".join(f"{value:.4g}" for value in kept)
    return row


# 3. All runs.


def run_one(settings, seed, text, threads):
    """Returns the row of one run, made by a process of its own; with a recipe, in a copy of what a
    run needs, to which the recipe's patches are applied."""
    changes = dict(settings)
    recipes = changes.pop("recipe", "").split("+")
    if "eval_samples" in changes:
        recipes.append("pass_at_k")
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | changes.pop("environment", {})
    job = ["-m", "lab.sweep", "--child", json.dumps([changes, seed, text])]
    if not any(recipes):
        row = json.loads(run_python(job, environment=environment))
        return row | {"settings": key_of(settings)}
    patches = [str(REPOSITORY / "recipes" / f"{name}.patch") for name in recipes if name]
    with tempfile.TemporaryDirectory() as folder:
        for part in ("support", "lab"):
            shutil.copytree(
                REPOSITORY / part,
                Path(folder, part),
                ignore=shutil.ignore_patterns("results", "figures", "__pycache__"),
            )
        shutil.copy(REPOSITORY / "starter.py", folder)
        subprocess.run(
            ["git", "apply", *patches],
            cwd=folder,
            check=True,
            env=os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(folder).parent)},
        )
        row = json.loads(run_python(job, folder, environment))
    return row | {"settings": key_of(settings), "commit": where()["commit"]}


def sweep(name, grid, seeds, jobs, text=None):
    """Runs what the csv file does not hold yet. A row is written as soon as its run has ended."""
    known = {(row["settings"], row["seed"]) for row in read_csv(name)}
    todo = [
        (settings, seed)
        for seed in seeds
        for settings in grid
        if (key_of(settings), str(seed)) not in known
    ]
    threads = max(1, os.cpu_count() // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run_one, *job, text, threads): job for job in todo}
        for done in as_completed(running):
            settings, seed = running[done]
            if done.exception():  # the others go on
                print(f"{key_of(settings)}, seed {seed} failed: {done.exception()}", flush=True)
                continue
            row = done.result()
            append_rows(name, [row])
            print(
                f"{row['settings']}, seed {seed}: solved {row['solved_before']:.1%} -> "
                f"{row['solved_after']:.1%}, {row['seconds'] / 60:.1f} min",
                flush=True,
            )


def grid_of(texts):
    """["a=1,2", "b=x"] -> [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]."""
    from starter import value_of

    choices = []
    for text in texts:
        name, _, values = text.partition("=")
        choices.append([(name, value_of(value)) for value in values.split(",")])
    return [dict(chosen) for chosen in itertools.product(*choices)]


def main():
    parser = argparse.ArgumentParser(description="main() over settings and seeds")
    parser.add_argument("name", nargs="?", help=f"of the csv file; {', '.join(SWEEPS)} are defined")
    parser.add_argument("choices", nargs="*", metavar="setting=value,value")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--text", help="GSM8K's test.jsonl: measures what SmolLM2 forgets")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print("result", json.dumps(train(*given.child)))
    elif given.choices or given.name in SWEEPS:
        grid = grid_of(given.choices) if given.choices else SWEEPS[given.name]
        sweep(given.name, grid, given.seeds, given.jobs, given.text)
    else:
        parser.error(f"name a sweep ({', '.join(SWEEPS)}), or give settings")


if __name__ == "__main__":
    main()
