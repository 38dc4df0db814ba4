"""The methods of the adaptive-KL document, on the built-in model, inside TRL: three minutes.

    pip install torch==2.13.0 trl==1.16.0     python -m integrations.example_trl
    python -m integrations.example_trl clip dynamic+sigmoid    only these methods
"""
import contextlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # TRL warns about what is chosen here
warnings.filterwarnings("ignore", category=FutureWarning)

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from integrations.trl_kl import GRPOConfig, GRPOTrainer  # was: from trl import ...

import starter
from support import tasks

BETA = 0.3  # measured for the built-in model: README_KL.md
STEPS = 60
MAX_NEW_TOKENS = 16  # that the built-in model may say
LAST = 10  # steps over which the table takes means

# Two of the methods start from their example in the document: its thresholds suit this task better.
DYNAMIC = dict(reward_threshold=0.7, beta_min=0.001, beta_schedule_steps=500)
METHODS = {
    "baseline": {},  # TRL's own KL term
    "clip": {},
    "length_normalized": {},
    "dynamic": DYNAMIC,
    "sigmoid": dict(kl_target=0.2),
}

def options_of(method):
    """The changed options of GRPOConfig. A name that is not in METHODS is taken as it is."""
    rule = {} if method == "baseline" else {"kl_adaptation_method": method}
    return METHODS.get(method, {}) | rule


def reward(completions, numbers, target, **columns):
    """TRL's form of starter.reward_fn."""
    return [starter.reward_fn(chat[0]["content"], {"numbers": of_problem, "target": wanted})
            for chat, of_problem, wanted in zip(completions, numbers, target)]


def make_trainer(output_dir, options, seed):
    """A trainer of the built-in model on small Countdown problems."""
    dataset = Dataset.from_list([
        {"prompt": [{"role": "user", "content": problem["prompt"]}],
         "numbers": problem["numbers"], "target": problem["target"]}
        for problem in tasks.make_countdown(10_000, False, seed, **tasks.SMALL_COUNTDOWN)])
    settings = dict(
        output_dir=output_dir, max_steps=STEPS, seed=seed, beta=BETA, learning_rate=6e-4,
        lr_scheduler_type="constant_with_warmup", warmup_steps=10, adam_beta2=0.95,
        per_device_train_batch_size=64, num_generations=8,
        max_completion_length=MAX_NEW_TOKENS,
        use_cpu=not torch.cuda.is_available(), bf16=False, gradient_checkpointing=False,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True)
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(tasks.TINY, dtype=torch.float32),
        args=GRPOConfig(**settings | options), reward_funcs=reward, train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(tasks.TINY))


def other_skills(model, tokenizer):
    """The share of held-out problems of skills that were not trained, solved greedily."""
    cfg = starter.cfg_with(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(tokenizer.eos_token_id,))
    problems = starter.with_prompt_ids(
        starter.read_problems(Path(tasks.TINY, "retention.jsonl")), model, tokenizer, cfg)
    prompts = [problem["prompt_ids"] for problem in problems]
    responses = starter.rollout_with_transformers(model, prompts, cfg, seed=0, temperature=0.0)
    _, _, solved, _ = starter.score(responses, problems, tokenizer, starter.reward_fn)
    return solved.float().mean().item()


def run(method, seed):
    """Trains with one method. Returns a row for the table."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as output_dir, contextlib.redirect_stdout(None):
        trainer = make_trainer(output_dir, options_of(method), seed)
        trainer.train()
    steps = [log for log in trainer.state.log_history if "reward" in log][-LAST:]

    def mean(name, otherwise=None):
        return statistics.mean(log.get(name, log.get(otherwise, BETA)) for log in steps)

    return {"method": method, "seed": seed, "steps": STEPS, "reward": mean("reward"),
            "raw_kl": mean("adaptive_kl/raw_kl", "kl"),
            "adapted_kl": mean("adaptive_kl/adapted_kl", "kl"),
            "beta": mean("adaptive_kl/current_beta"), "length": mean("completions/mean_length"),
            "other_skills": other_skills(trainer.model, trainer.processing_class),
            "seconds": time.perf_counter() - started}


def main(methods):
    logging.disable_progress_bar()
    for method in methods or METHODS:
        print(*(f"{name}: {value:.4g}" if isinstance(value, float) else value
                for name, value in run(method, seed=0).items()), sep=" | ", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
