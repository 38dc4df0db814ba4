"""bench.py: what a step of starter.py costs, beside TRL's GRPOTrainer on the same model, prompts and sizes.

    python bench.py                     S, M, M-64, L, bfloat16, leash off: ours and TRL in turns -> results/bench_step.csv
    python bench.py --sizes S M --dtype float32 --leash on --steps 10
    python bench.py --phases            each phase of ours alone, against the machine's limit -> results/bench_phases.csv
    python bench.py --growth            cost against tokens, group, vocabulary, epochs, budget -> results/bench_growth.csv

A step is 32 prompts x 8 responses, sampled, rewarded and learnt from. Models have random weights, so that every
response has its full length. Times are medians; ratios are taken within one process, step by step in turns. Peak
memory is that of a process of its own. Needs `pip install trl==1.16.0`. The last line is JSON.
"""
import starter  # first: it sets variables that torch reads when it is imported

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import make_tiny
import torch

HERE = Path(__file__).parent
SIZES = {  # hidden, layers, heads, vocabulary (None: the tokenizer's), new tokens, tokens per microbatch of TRL's batch
    "S": dict(hidden=128, layers=4, heads=4, vocabulary=None, new_tokens=16),
    "M": dict(hidden=384, layers=6, heads=6, vocabulary=None, new_tokens=16),
    "M-64": dict(hidden=384, layers=6, heads=6, vocabulary=None, new_tokens=64),
    "L": dict(hidden=256, layers=4, heads=4, vocabulary=151_936, new_tokens=16),
}
TRL_ROWS = {"S": (256, 128, 64), "M": (256, 128, 64), "M-64": (256, 64, 32), "L": (64, 32, 16)}  # rows at once: tried
GROUP, PROMPTS = 8, 32


def distinct(text, problem):
    """A reward that random weights can earn."""
    return len(set(text)) / 10


def make_checkpoint(folder, hidden, layers, heads, vocabulary, new_tokens):
    """A Qwen3 of this size with random weights, as an ordinary folder. EOS is never sampled: it has no chance."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    tokenizer = make_tiny.make_tokenizer()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=vocabulary or len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, head_dim=hidden // heads,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2, tie_word_embeddings=True,
        max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def configuration(folder, new_tokens, bf16, leash, **changes):
    """-> main()'s configuration for this model, without running main()."""
    import inspect
    c = {name: p.default for name, p in inspect.signature(starter.main).parameters.items()}
    c |= {name: values[0] for name, values in starter.DEFAULTS.items()}
    c |= dict(model_id=str(folder), bf16=bf16, max_new_tokens=new_tokens, rollout_batch_size=PROMPTS * GROUP,
              group_size=GROUP, use_kl_penalty=leash, kl_coef=0.04, eval_every=0, save_every=0, reward=distinct,
              learning_rate=1e-6, term_rule="none", coefficient_rule="none", **changes)
    return starter.checks.with_kl_rules(SimpleNamespace(**c), starter.TERM_RULES, starter.COEFFICIENT_RULES)


class Ours:
    """starter.train, a step at a time."""

    def __init__(self, folder, new_tokens, bf16, leash, **changes):
        self.c = configuration(folder, new_tokens, bf16, leash, **changes)
        self.policy, self.tokenizer = starter.init_policy(folder, torch.device("cpu"))
        self.reference = starter.copy.deepcopy(self.policy).requires_grad_(False) if leash else None
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), 1e-6, weight_decay=0.0)
        self.problems, _ = starter.countdown_problems(self.c)
        self.state, self.seconds = {}, {}
        quiet = lambda *args: None
        self.run = SimpleNamespace(log=self.log, weights_move=quiet, end_of_step=quiet, keep_skipped=quiet)

    def log(self, what, tag, value, step):
        self.seconds[tag] = value

    def step(self):
        """-> {tag: value} of one more step."""
        self.c.n_train_steps = self.state.get("step", 0) + 1
        self.state = starter.train(self.policy, self.tokenizer, None, self.optimizer, self.problems, self.c, self.run,
                                   None, self.state, self.reference, self.reference is not None and self.c.kl_coef)
        return self.seconds


def trl_trainer(folder, new_tokens, bf16, leash, rows, steps, each_step):
    """-> TRL's trainer on the same model, prompts and sizes. each_step(seconds) is called after each of its steps."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    c = configuration(folder, new_tokens, bf16, leash)
    problems, _ = starter.countdown_problems(c)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": p["prompt"]}], tokenize=False,
                                             add_generation_prompt=True) for p in problems[:PROMPTS * (steps + 1)]]

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            each_step(time.perf_counter() - self.start)

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=bf16, per_device_train_batch_size=rows, num_generations=GROUP,
        gradient_accumulation_steps=PROMPTS * GROUP // rows, max_completion_length=new_tokens, learning_rate=1e-6,
        beta=0.04 if leash else 0.0, max_steps=steps, logging_steps=10**6, save_strategy="no", report_to=[],
        gradient_checkpointing=False, temperature=1.0, disable_tqdm=True, dataloader_pin_memory=False, seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reward = lambda prompts, completions, **kwargs: [distinct(text, None) for text in completions]
    return GRPOTrainer(model=model, args=config, processing_class=tokenizer, reward_funcs=reward,
                       train_dataset=Dataset.from_dict({"prompt": prompts}), callbacks=[Clock()])


def peak_gb(side, folder, size, bf16, leash, rows):
    """-> most memory that a process of its own held over three steps."""
    program = (f"import bench, starter; settings = {(str(folder), SIZES[size]['new_tokens'], bf16, leash)}\n" + (
        "ours = bench.Ours(*settings)\nfor _ in range(3): ours.step()\n" if side == "ours" else
        f"bench.trl_trainer(*settings, {rows}, 3, lambda seconds: None).train()\n") +
        "print('peak', starter.machine.peak_memory_gb())")
    run = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    return float(run.stdout.split("peak ")[1])


def machine_line():
    names = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def commit():
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()


def append(name, rows):
    """Rows -> results/bench_<name>.csv, each with commit and machine."""
    path = HERE / "results" / f"bench_{name}.csv"
    rows = [row | {"commit": commit(), "machine": machine_line(), "torch": torch.__version__} for row in rows]
    new = not path.is_file()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writerows([]) if not new else writer.writeheader()
        writer.writerows(rows)
    return rows


def side_by_side(size, bf16, leash, steps):
    """-> row: medians of both, in turns within one process, TRL at the number of rows at once that suits it best."""
    shape = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, **shape)
        settings = folder, shape["new_tokens"], bf16, leash
        trial = {}
        for rows in TRL_ROWS[size]:  # its best setting: three steps of each, the first not counted
            times = []
            trl_trainer(*settings, rows, 3, times.append).train()
            trial[rows] = min(times[1:])
        rows = min(trial, key=trial.get)
        ours, pairs = Ours(*settings), []

        def turn(seconds):
            pairs.append((ours.step()["time/total"], seconds))

        trl_trainer(*settings, rows, steps + 2, turn).train()
        pairs = pairs[2:]  # two of each to warm up
        medians = [statistics.median(column) for column in zip(*pairs)]
        ratios = sorted(b / a for a, b in pairs)
        row = {"size": size, "dtype": "bfloat16" if bf16 else "float32", "leash": leash, "steps": len(pairs),
               "ours_s": f"{medians[0]:.3f}", "ours_min_s": f"{min(a for a, _ in pairs):.3f}",
               "ours_max_s": f"{max(a for a, _ in pairs):.3f}", "trl_s": f"{medians[1]:.3f}",
               "trl_min_s": f"{min(b for _, b in pairs):.3f}", "trl_max_s": f"{max(b for _, b in pairs):.3f}",
               "ratio": f"{statistics.median(ratios):.2f}", "trl_rows_at_once": rows}
        row |= {f"{part}_s": f"{ours.seconds[f'time/{part}']:.3f}" for part in ("rollout", "update")}
        row |= {"ours_gb": f"{peak_gb('ours', *settings[:1], size, bf16, leash, rows):.2f}",
                "trl_gb": f"{peak_gb('trl', *settings[:1], size, bf16, leash, rows):.2f}"}
        return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--leash", default="off", choices=("off", "on"))
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    made = []
    for size in arguments.sizes:
        made += append("step", [side_by_side(size, arguments.dtype == "bfloat16", arguments.leash == "on", arguments.steps)])
        print(" | ".join(f"{name} {value}" for name, value in made[-1].items()), flush=True)
    print(json.dumps(made))
