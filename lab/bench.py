"""What a step of starter.py costs, beside TRL's GRPOTrainer.

    python -m lab.bench           CASES, beside TRL -> lab/results/bench_step.csv
    python -m lab.bench --alone   some, by starter.py without support/ -> bench_alone.csv

A step is 32 prompts x 8 responses, sampled, rewarded and learnt from. Models have random weights,
so that most responses have their full length, and random rewards, so that every group teaches. Each
side runs in a process of its own, in turns, with as many rows at once as are quickest for it; the
first two of its steps are not counted. Times are medians, a ratio is the median over the rounds.
TRL needs `pip install trl==1.16.0 datasets`.
"""

import functools
import json
import multiprocessing
import random
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import yaml

from lab.rows import REPOSITORY, append_rows, where

WARM_UP = 2  # steps of each process that are not counted
STEPS = 5  # that are
ROUNDS = 3
PROMPT = 30  # tokens of a prompt, about
SHAPES = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())
SIZES = {  # shape, tokens of a response, rows at once of which the quickest is taken
    "S": ("S", 16, [256, 128, 64]),
    "M": ("M", 16, [256, 128, 64]),
    "M-64": ("M", 64, [256, 64, 32]),
    "L": ("L", 16, [64]),
}
ALONE = [("S", "bfloat16", "off"), ("M", "bfloat16", "off"), ("L", "float32", "off")]
CASES = [  # size, dtype, KL penalty
    *ALONE,
    ("M-64", "bfloat16", "off"),
    ("S", "bfloat16", "on"),
    ("M", "bfloat16", "on"),
    ("S", "float32", "off"),
    ("M", "float32", "off"),
]


# 1. A model and problems, in a folder that every side reads.


def config_of(shape):
    """Returns the configuration of a Qwen3 of this shape."""
    from transformers import Qwen3Config

    return Qwen3Config(**SHAPES[shape])


def save_random(shape, folder):
    """Saves a Qwen3 with random weights, and the built-in model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from support import tasks

    tokenizer = AutoTokenizer.from_pretrained(tasks.TINY)
    tokenizer.save_pretrained(folder)
    config = config_of(shape)
    config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)


def made_up_problems(cfg):
    """A task."""
    problems = [{"prompt": f"make {n}: 3 4 17 25", "answer": n} for n in range(10_000, 12_000)]
    return problems[8:], problems[:8]


def noise(text, problem):
    """A reward by which no group has equal ones."""
    return random.random()


def chosen(settings):
    """What main() makes of these settings."""
    import starter

    cfg = starter.cfg_with(**settings)
    starter.find_support().check_settings(cfg)
    starter.apply_preset(cfg)
    starter.choose_device(cfg)
    return cfg


# 2. Sides.  Settings of main() -> what is logged, {tag: [(step, value)]}.


def train_ours(settings, code, rows=None):
    """Runs main() of the starter.py in the folder `code`. rows: at once, in place of the preset's
    max_tokens_per_microbatch."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if rows is not None:
        n_tokens = rows * (PROMPT + settings["max_new_tokens"])
        settings = {**settings, "max_tokens_per_microbatch": n_tokens}
    sys.path.insert(0, str(code))
    import starter

    with tempfile.TemporaryDirectory() as folder:
        result = starter.main(out_dir=folder, **settings)
        log = EventAccumulator(str(result["run_folder"])).Reload()
        tags = log.Tags()["scalars"]
        return {tag: [(event.step, event.value) for event in log.Scalars(tag)] for tag in tags}


def train_with_trl(settings, rows):
    """TRL's trainer with the same settings, `rows` rows at once, and starter.evaluate."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import starter

    cfg = chosen(settings)
    model = AutoModelForCausalLM.from_pretrained(cfg.model_id, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(cfg.model_id)
    cfg.stop_token_ids = starter.find_stop_tokens(model, tokenizer)
    problems, held_out = starter.load_problems(cfg)
    held_out = starter.with_prompt_ids(held_out, model, tokenizer, cfg)
    log = {"time/total": [], "eval/solved": []}

    def reward(prompts, completions, number, **others):
        texts = [messages[0]["content"] for messages in completions]
        return [cfg.reward(text, problems[i]) for text, i in zip(texts, number)]

    def evaluate(step):
        if cfg.eval_every and step % cfg.eval_every == 0:
            metrics, _ = starter.evaluate(model, None, tokenizer, held_out, cfg)
            log["eval/solved"].append((step, metrics["solved"]))

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **others):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, *others, **more):
            seconds = time.perf_counter() - self.start
            log["time/total"].append((state.global_step, seconds))
            evaluate(state.global_step)

    config = GRPOConfig(  # TRL's other defaults are those of main()
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=cfg.precision == "bf16",
        seed=cfg.seed,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=cfg.rollout_batch_size // rows,
        num_generations=cfg.group_size,
        max_steps=cfg.n_train_steps,
        max_completion_length=cfg.max_new_tokens,
        learning_rate=cfg.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=cfg.warmup_steps,
        beta=cfg.kl_coef * cfg.use_kl_penalty,
        adam_beta2=0.95,
        gradient_checkpointing=False,
        logging_steps=10**6,
        disable_tqdm=True,
    )
    prompts = [[{"role": "user", "content": problem["prompt"]}] for problem in problems]
    data = Dataset.from_dict({"prompt": prompts, "number": range(len(prompts))})
    evaluate(0)
    trainer = GRPOTrainer(model, reward, config, data, None, tokenizer, callbacks=[Clock()])
    trainer.train()
    return log


def in_process(function, *arguments):
    """Returns what the function returns in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def seconds_of(side, rows):
    """Returns the seconds of each step of a side, with so many rows at once."""
    log = in_process(side, rows)
    return [seconds for _, seconds in log["time/total"]][WARM_UP:]


def quickest(side, choices):
    """Returns the number of rows at once at which a side is quickest. side: one of the functions
    above, of its last argument alone."""
    medians = {rows: statistics.median(seconds_of(side, rows)) for rows in choices}
    return min(medians, key=medians.get)


# 3. Measurements.


def measure(size, dtype, kl, alone):
    """Returns a row: a step of ours beside one of TRL's."""
    shape, new_tokens, choices = SIZES[size]
    seconds = {"ours": [], "trl": []}  # for each round those of its steps
    with tempfile.TemporaryDirectory() as folder:
        save_random(shape, folder)
        settings = dict(
            model_id=folder,
            task=made_up_problems,
            reward=noise,
            rollout_batch_size=256,
            max_new_tokens=new_tokens,
            learning_rate=1e-6,
            precision=dtype.replace("bfloat", "bf"),
            use_kl_penalty=kl == "on",
            device="cpu",
            n_train_steps=WARM_UP + STEPS,
            eval_every=0,
            save_every=0,
        )
        code = REPOSITORY
        if alone:
            shutil.copy(REPOSITORY / "starter.py", folder)
            code = folder
        sides = {
            "ours": functools.partial(train_ours, settings, code),
            "trl": functools.partial(train_with_trl, settings),
        }
        rows = {name: quickest(side, choices) for name, side in sides.items()}
        for number in range(ROUNDS):
            for name in sorted(sides, reverse=number % 2):
                seconds[name].append(seconds_of(sides[name], rows[name]))
    row = {"size": size, "dtype": dtype, "kl_penalty": kl, "steps": STEPS, "rounds": ROUNDS}
    for side in seconds:
        steps = sum(seconds[side], [])
        row[f"{side}_s"] = f"{statistics.median(steps):.3f}"
        row[f"{side}_min_s"] = f"{min(steps):.3f}"
        row[f"{side}_max_s"] = f"{max(steps):.3f}"
        row[f"{side}_rows_at_once"] = rows[side]
    ours, trl = (map(statistics.median, rounds) for rounds in seconds.values())
    row["ratio"] = f"{statistics.median(b / a for a, b in zip(ours, trl)):.2f}"
    return {**row, **where()}


def main():
    alone = "--alone" in sys.argv
    for case in ALONE if alone else CASES:
        row = measure(*case, alone)
        print(json.dumps(row), flush=True)
        append_rows("bench_alone" if alone else "bench_step", [row])


if __name__ == "__main__":
    main()
