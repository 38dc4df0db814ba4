"""The demonstration of the adaptive-KL document, on the built-in model, inside TRL.

    pip install torch==2.13.0 trl==1.16.0     python -m integrations.example_trl

trains the built-in model once with each method of the document and ends in one table. It takes
under five minutes on two CPU cores, the minute that builds the model at the first run included.

    python -m integrations.example_trl clip dynamic+sigmoid    only these methods
    python -m integrations.example_trl --save    more methods, 3 seeds: lab/results/trl_methods.csv
    python -m integrations.example_trl --cost    seconds, FLOPs of a step: lab/results/trl_cost.csv
"""
import argparse
import contextlib
import csv
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GOMP_SPINCOUNT", "0")  # spinning threads are slow where others work too
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # TRL warns about what is chosen here
warnings.filterwarnings("ignore", category=FutureWarning)

import torch
from datasets import Dataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging

from integrations.trl_kl import GRPOConfig, GRPOTrainer  # was: from trl import ...

import starter

RESULTS = Path(starter.__file__).parent / "lab" / "results"
BETA = 0.3  # measured for the built-in model: README_KL.md
STEPS = 60
LAST = 10  # steps over which the table takes means
MAX_NEW_TOKENS = 16

# Two of the methods start from their example in the document: its thresholds suit this task better.
DYNAMIC = dict(reward_threshold=0.7, beta_min=0.001, beta_schedule_steps=500)
METHODS = {  # those of the document
    "baseline": {},  # TRL's own KL term
    "clip": {},
    "length_normalized": {},
    "dynamic": DYNAMIC,
    "sigmoid": dict(kl_target=0.2),
}
MORE_METHODS = METHODS | {
    "no penalty": dict(beta=1e-9, kl_in="loss"),  # so that the KL is measured all the same
    "exact": dict(kl_estimator="exact"),
    "clip_sound": {},
    "length_normalized_sound": {},
    "dynamic_sound": DYNAMIC,
    "sigmoid_sound": dict(kl_target=0.2),
    "target_sound": {},
    "dynamic+length_normalized": DYNAMIC,  # the document's advice: start with it, and combine
    "length_normalized in the reward": dict(kl_in="reward", kl_estimator="k1"),
}
COLUMNS = ["method", "seed", "steps", "reward", "raw_kl", "adapted_kl", "beta", "length",
           "other_skills", "seconds"]


def options_of(method):
    """The changed options of GRPOConfig. A name that is not in MORE_METHODS is taken as it is."""
    options = dict(MORE_METHODS.get(method, {}))
    rule = method.split(" ")[0]
    if rule not in ("baseline", "no", "exact"):
        options["kl_adaptation_method"] = rule
    return options


def reward(completions, numbers, target, **columns):
    """TRL's form of starter.reward_fn."""
    return [starter.reward_fn(chat[0]["content"], {"numbers": of_problem, "target": wanted})
            for chat, of_problem, wanted in zip(completions, numbers, target)]


def make_trainer(folder, output_dir, options, seed=0, steps=None, callbacks=(),
                 config_class=GRPOConfig, trainer_class=GRPOTrainer):
    """A trainer of the built-in model on small Countdown problems."""
    problems = starter.make_countdown(10_000, False, seed, **starter.SMALL_COUNTDOWN)
    dataset = Dataset.from_list([
        {"prompt": [{"role": "user", "content": problem["prompt"]}],
         "numbers": problem["numbers"], "target": problem["target"]} for problem in problems])
    settings = dict(
        output_dir=output_dir, max_steps=steps or STEPS, seed=seed, beta=BETA, learning_rate=6e-4,
        lr_scheduler_type="constant_with_warmup", warmup_steps=10, adam_beta2=0.95,
        per_device_train_batch_size=64, num_generations=8, max_completion_length=MAX_NEW_TOKENS,
        use_cpu=not torch.cuda.is_available(), bf16=False, gradient_checkpointing=False,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True)
    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=config_class(**settings | options), reward_funcs=reward, train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(folder), callbacks=list(callbacks))


def other_skills(model, tokenizer, folder):
    """The share of held-out problems of skills that were not trained, solved greedily."""
    problems = starter.read_jsonl(folder / "retention.jsonl")
    greedy = starter.Sampling(1, MAX_NEW_TOKENS, 0.0, 0, (tokenizer.eos_token_id,))
    responses = starter.rollout_with_transformers(
        model, starter.prompt_ids_of(problems, tokenizer), greedy)
    texts = tokenizer.batch_decode([response.response_ids for response in responses],
                                   skip_special_tokens=True)
    return statistics.mean(starter.reward_fn(text, problem) == 1
                           for text, problem in zip(texts, problems))


def run(folder, method, seed):
    """Trains with one method. Returns a row under COLUMNS."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as output_dir, contextlib.redirect_stdout(None):
        trainer = make_trainer(folder, output_dir, options_of(method), seed)
        trainer.train()
    steps = [log for log in trainer.state.log_history if "reward" in log][-LAST:]

    def mean(name, otherwise=None):
        return statistics.mean(log.get(name, log.get(otherwise, BETA)) for log in steps)

    return dict(zip(COLUMNS, (
        method, seed, STEPS, mean("reward"), mean("adaptive_kl/raw_kl", "kl"),
        mean("adaptive_kl/adapted_kl", "kl"), mean("adaptive_kl/current_beta"),
        mean("completions/mean_length"),
        other_skills(trainer.model, trainer.processing_class, folder),
        time.perf_counter() - started)))


def table(rows):
    """Rows under COLUMNS -> lines of a table, with the mean over seeds of each method."""
    shown = ["reward", "raw_kl", "adapted_kl", "beta", "length", "other_skills"]
    lines = [f"{'method':<32}" + "".join(f"{name:>13}" for name in shown)]
    for method in dict.fromkeys(row["method"] for row in rows):
        of_method = [row for row in rows if row["method"] == method]
        means = [statistics.mean(row[name] for row in of_method) for name in shown]
        lines.append(f"{method:<32}" + "".join(f"{mean:>13.4g}" for mean in means))
    return lines


class Clock(TrainerCallback):
    """The seconds of each optimiser step."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **others):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **others):
        self.seconds.append(time.perf_counter() - self.started)


COSTS = {  # what a step of each costs, beside TRL without a KL term
    "TRL, beta = 0": dict(beta=0.0),
    "TRL, beta > 0": {},
    "reverse": dict(kl_gradient="reverse"),
    "clip": options_of("clip"),
    "length_normalized": options_of("length_normalized"),
    "dynamic+sigmoid": options_of("dynamic+sigmoid"),
    "loss_to_go": dict(kl_in="loss_to_go"),
    "k1 in the reward": dict(kl_in="reward", kl_estimator="k1"),
    "exact": dict(kl_estimator="exact"),
}


def costs(folder, rounds=5, steps=6):
    """Rows of COSTS: median seconds of a step over rounds taken in turns, and GFLOPs of a step:
    sampling, scoring, forward and backward pass, counted by torch."""
    rows = {name: {"term": name, "seconds": [], "gflops": 0.0} for name in COSTS}
    for number in range(rounds + 1):
        for name, options in COSTS.items():
            clock = Clock()
            counter = FlopCounterMode(display=False) if number == 0 else contextlib.nullcontext()
            with tempfile.TemporaryDirectory() as output_dir, contextlib.redirect_stdout(None):
                n_steps = 1 if number == 0 else steps
                options = options | dict(learning_rate=0.0)  # so that all sample the same tokens
                trainer = make_trainer(folder, output_dir, options, 0, n_steps, [clock])
                with counter:
                    trainer.train()
            if number == 0:
                rows[name]["gflops"] = counter.get_total_flops() / 1e9
            else:
                rows[name]["seconds"] += clock.seconds[1:]
    base = rows["TRL, beta = 0"]
    return [row | {"seconds": statistics.median(row["seconds"]),
                   "time_ratio": statistics.median(row["seconds"])
                   / statistics.median(base["seconds"]),
                   "flops_ratio": row["gflops"] / base["gflops"]} for row in rows.values()]


def save(name, rows):
    with open(RESULTS / name, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: f"{value:.6g}" if isinstance(value, float) else value
                          for key, value in row.items()} for row in rows)
    print(f"written: {RESULTS / name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--cost", action="store_true")
    given = parser.parse_args()
    logging.disable_progress_bar()
    folder = starter.find_model("tiny")
    if given.cost:
        save("trl_cost.csv", costs(folder))
        return
    rows = []
    for seed in (0, 1, 2) if given.save else (0,):
        for method in MORE_METHODS if given.save else given.methods:
            rows.append(run(folder, method, seed))
            print(f"{method}, seed {seed}: {rows[-1]['seconds']:.0f} s", flush=True)
    print(*table(rows), sep="\n")
    if given.save:
        save("trl_methods.csv", rows)


if __name__ == "__main__":
    main()
