"""What a step of starter.py costs, with support/ and alone, beside TRL's GRPOTrainer.

    python -m lab.bench       CASES -> lab/results/bench.csv

A step is 32 prompts x 8 responses, sampled, rewarded and learnt from. Models have random weights,
so that most responses have their full length, and random rewards, so that every group teaches. Each
side runs in a process of its own, in turns; TRL with as many rows at once as are quickest for it.
The first two steps are not counted. Times are medians over the rounds, a ratio is that of medians.
TRL needs `pip install trl==1.16.0 datasets`.
"""

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

from lab.rows import REPOSITORY, append_rows, read_log, where

WARM_UP = 2  # steps of each process that are not counted
STEPS = 5  # that are
ROUNDS = 3
SHAPES = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())
SIZES = {  # shape, tokens of a response, TRL's rows at once, of which the quickest is taken
    "S": ("S", 16, [256, 128, 64]),
    "M": ("M", 16, [256, 128, 64]),
    "M-64": ("M", 64, [256, 64, 32]),
    "L": ("L", 16, [64]),
}
CASES = [  # with what, size, dtype, KL penalty
    "support/ S bfloat16 off",
    "support/ M bfloat16 off",
    "support/ M-64 bfloat16 off",
    "support/ S bfloat16 on",
    "support/ M bfloat16 on",
    "support/ S float32 off",
    "support/ M float32 off",
    "support/ L float32 off",
    "alone S bfloat16 off",
    "alone M bfloat16 off",
    "alone L float32 off",
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
    starter.find_support().begin(cfg)
    starter.apply_preset(cfg)
    starter.choose_device(cfg)
    return cfg


# 2. Sides.  Settings of main() -> what is logged, {tag: [(step, value)]}.


def train_ours(settings, code):
    """Runs main() of the starter.py in the folder `code`."""
    sys.path.insert(0, str(code))
    import starter

    with tempfile.TemporaryDirectory() as folder:
        result = starter.main(out_dir=folder, **settings)
        return read_log(result["run_folder"])


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
    problems, held_out, _ = starter.load_problems(cfg)
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


def seconds_of(side, *arguments):
    """Returns the seconds of each step of a side, one of the functions above."""
    log = in_process(side, *arguments)
    return [seconds for _, seconds in log["time/total"]][WARM_UP:]


def quickest_rows(settings, choices):
    """Returns with how many rows at once TRL is quickest."""
    medians = {}
    for rows in choices:
        medians[rows] = statistics.median(seconds_of(train_with_trl, settings, rows))
    return min(medians, key=medians.get)


# 3. Measurements.


def measure(parts, size, dtype, kl):
    """Returns a row: a step of ours beside one of TRL's."""
    shape, new_tokens, choices = SIZES[size]
    seconds = {"starter.py": [], "TRL 1.16": []}
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
        if parts == "alone":
            shutil.copy(REPOSITORY / "starter.py", folder)
            code = folder
        rows = quickest_rows(settings, choices)
        for _ in range(ROUNDS):
            seconds["starter.py"] += seconds_of(train_ours, settings, code)
            seconds["TRL 1.16"] += seconds_of(train_with_trl, settings, rows)
    row = {"with": parts, "model": size, "dtype": dtype, "KL penalty": kl}
    medians = []
    for side, steps in seconds.items():
        medians.append(statistics.median(steps))
        row[f"{side}, s"] = f"{medians[-1]:.3f} ({min(steps):.3f}–{max(steps):.3f})"
    row["ratio"] = f"{medians[1] / medians[0]:.2f}"
    return {**row, **where()}


if __name__ == "__main__":
    for case in CASES:
        append_rows("bench", [measure(*case.split())])
