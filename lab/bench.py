"""What a step of starter.py costs, beside TRL's GRPOTrainer or another commit.

    python -m lab.bench                   S, M, M-64, L beside TRL -> bench_step.csv
    python -m lab.bench --sizes S M --dtype float32 --kl on --rounds 5 --steps 3
    python -m lab.bench --alone           starter.py without support/, beside TRL -> bench_alone.csv
    python -m lab.bench --gpus            the formula for Qwen3's sizes -> gpus.csv

A step is 32 prompts x 8 responses, sampled, rewarded and learnt from. Models have random weights,
so that most responses have their full length, and random rewards, so that every group teaches. Each
side runs in a process of its own, in turns; the first two of its steps are not counted. Times are
medians, a ratio is the median over the rounds. GB is the most memory that a process held, libraries
included. TRL takes as many rows at once as are quickest for it. TRL needs
`pip install trl==1.16.0 datasets`.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from lab.rows import REPOSITORY, append_rows, run_python, where, write_csv

SIZES = {  # vocabulary None: that of the built-in model's tokenizer, 58
    "S": dict(hidden=128, layers=4, heads=4, vocabulary=None, new_tokens=16),
    "M": dict(hidden=384, layers=6, heads=6, vocabulary=None, new_tokens=16),
    "M-64": dict(hidden=384, layers=6, heads=6, vocabulary=None, new_tokens=64),
    "L": dict(hidden=256, layers=4, heads=4, vocabulary=151_936, new_tokens=16),
}
QWEN3 = {
    "Qwen3-0.6B": dict(
        hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072
    ),
    "Qwen3-1.7B": dict(
        hidden=2048, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=6144
    ),
    "Qwen3-4B": dict(hidden=2560, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=9728),
    "Qwen3-8B": dict(
        hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12_288, tied=False
    ),
}
TRL_ROWS = {"S": (256, 128, 64), "M": (256, 128, 64), "M-64": (256, 64, 32), "L": (64,)}
# Tokens of a microbatch of ours that are quickest, with support/ and alone
OUR_TOKENS = {"S": 8_192, "M": 8_192, "M-64": 2_048, "L": 2_048}
TOKENS_ALONE = {"S": 4_096, "M": 2_048, "M-64": 2_048, "L": 2_048}
WARM_UP = 2  # steps of each process that are not counted


# 1. Models and problems -> a folder and a file that every side reads.


def qwen3_config(
    hidden,
    layers,
    heads,
    vocabulary=151_936,
    new_tokens=None,
    kv_heads=None,
    head_dim=None,
    intermediate=None,
    tied=True,
):
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocabulary or 58,
        hidden_size=hidden,
        intermediate_size=intermediate or 2 * hidden,
        head_dim=head_dim or hidden // heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads // 2,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
    )


def make_folder(folder, **shape):
    """Writes model/, a Qwen3 with random weights and the built-in model's tokenizer, and
    problems.jsonl. Returns what both sides are told."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    from support import tasks

    tokenizer = AutoTokenizer.from_pretrained(tasks.TINY)
    config = qwen3_config(**shape)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16 if on_gpu else torch.float32).save_pretrained(folder / "model")
    del model
    torch.cuda.empty_cache()  # the run has a process of its own
    tokenizer.save_pretrained(folder / "model")
    problems = tasks.make_countdown(2_000, False, 0, **tasks.SMALL_COUNTDOWN)
    with open(folder / "problems.jsonl", "w") as file:
        for problem in problems:
            print(json.dumps({"prompt": problem["prompt"], "answer": problem["target"]}), file=file)
    return dict(
        preset="tiny",
        model_id=str(folder / "model"),
        task=str(folder / "problems.jsonl"),
        rollout_batch_size=256,
        max_new_tokens=shape["new_tokens"],
        learning_rate=1e-6,
        n_eval_problems=8,
        eval_every=0,
        save_every=0,
    )


# 2. Sides.  Settings of main() -> {"seconds": of each step, "gb": peak, ...}.

# Runs in the folder of any commit, and beside a starter.py that is alone. Settings that main() does
# not know there are left out.
PROGRAM = r"""
import inspect, json, random, re, sys, tempfile
import starter, torch

def noise(text, problem):  # no group has equal rewards
    return random.random()

settings = json.loads(sys.argv[1])
if settings.pop("noise", True):
    settings["reward"] = noise
known = inspect.signature(starter.main).parameters
with tempfile.TemporaryDirectory() as folder:
    result = starter.main(out_dir=folder, **{k: v for k, v in settings.items() if k in known})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    log = EventAccumulator(str(result["run_folder"])).Reload()
    logged = {tag: [[event.step, event.value] for event in log.Scalars(tag)]
              for tag in log.Tags()["scalars"]}
gb = int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1]) / 1e6
if torch.cuda.is_available():
    gb = torch.cuda.max_memory_allocated() / 1e9
print("result", json.dumps({"seconds": [x for _, x in logged["time/total"]], "gb": gb,
                            "logged": logged}))
"""


def run_ours(settings, folder=REPOSITORY):
    """Runs main() of the starter.py in this folder, in a process of its own."""
    return json.loads(run_python(["-c", PROGRAM, json.dumps(settings)], folder))


def run_trl(settings, rows, module="bench"):
    """Runs train_with_trl() of this module, or of another one in lab/, in a process of its own."""
    program = (
        f"import json, sys\nfrom lab import {module}\n"
        f"print('result', json.dumps({module}.train_with_trl(*json.loads(sys.argv[1]))))"
    )
    return json.loads(run_python(["-c", program, json.dumps([settings, rows])]))


def chosen(settings):
    """What main() makes of these settings, which name a preset."""
    import starter

    starter.find_support()  # its import adds presets and tasks
    cfg = starter.cfg_with(**settings)
    starter.apply_preset(cfg)
    starter.choose_device(cfg)
    return cfg


def train_with_trl(settings, rows, each_step=None):
    """TRL's trainer with main()'s settings, `rows` rows at once. each_step(step, seconds, model) is
    called after each step, while the clock stands still."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import starter
    from lab.rows import peak_gb

    settings = dict(settings)
    is_noise = settings.pop("noise", True)
    cfg = chosen(settings)
    problems, _ = starter.load_problems(cfg)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model_id)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem["prompt"]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for problem in problems
    ]
    seconds = []

    def reward(prompts, completions, number, **kwargs):
        return [
            random.random() if is_noise else starter.reward_fn(text, problems[i])
            for i, text in zip(number, completions)
        ]

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, model=None, **kwargs):
            seconds.append(time.perf_counter() - self.start)
            if each_step is not None:
                each_step(state.global_step, seconds[-1], model)

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        precision=cfg.precision,
        seed=cfg.seed,
        per_device_train_batch_size=rows,
        num_generations=cfg.group_size,
        gradient_accumulation_steps=cfg.rollout_batch_size // rows,
        max_steps=cfg.n_train_steps,
        max_completion_length=cfg.max_new_tokens,
        learning_rate=cfg.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=cfg.warmup_steps,
        beta=cfg.kl_coef if cfg.use_kl_penalty else 0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=cfg.weight_decay,
        max_grad_norm=cfg.max_grad_norm,
        loss_type=cfg.loss_average,
        epsilon=cfg.clip_range,
        scale_rewards="group",
        temperature=cfg.temperature,
        gradient_checkpointing=False,
        logging_steps=10**6,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = Dataset.from_dict({"prompt": prompts, "number": list(range(len(problems)))})
    model = AutoModelForCausalLM.from_pretrained(cfg.model_id, dtype=torch.float32)
    GRPOTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=data,
        callbacks=[Clock()],
    ).train()
    return {"seconds": seconds, "gb": peak_gb()}


def quickest_rows(settings, choices):
    """Returns the number of rows at once at which TRL is quickest."""
    if len(choices) == 1:
        return choices[0]
    median = {
        rows: statistics.median(run_trl(settings | {"n_train_steps": 4}, rows)["seconds"][1:])
        for rows in choices
    }
    return min(median, key=median.get)


# 3. Measurements.


def in_turns(sides, rounds):
    """{name: () -> result} of two sides -> columns: medians and ranges of the steps, GB, and the
    median over rounds of second / first. The one that begins changes from round to round."""
    seconds = {name: [] for name in sides}  # for each round those of its steps
    gb = {}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            result = sides[name]()
            seconds[name].append(result["seconds"][WARM_UP:])
            gb[name] = result["gb"]
    row = {}
    for name in sides:
        steps = [x for of_round in seconds[name] for x in of_round]
        row |= {
            f"{name}_s": f"{statistics.median(steps):.3f}",
            f"{name}_min_s": f"{min(steps):.3f}",
            f"{name}_max_s": f"{max(steps):.3f}",
            f"{name}_gb": f"{gb[name]:.2f}",
        }
    ratios = [statistics.median(b) / statistics.median(a) for a, b in zip(*seconds.values())]
    return row | {"rounds": rounds, "ratio": f"{statistics.median(ratios):.2f}"}


def beside(size, given):
    """Returns a row: a step of ours beside one of TRL's."""
    with tempfile.TemporaryDirectory() as folder:
        settings = make_folder(Path(folder), **SIZES[size]) | dict(
            precision="bf16" if given.dtype == "bfloat16" else "float32",
            use_kl_penalty=given.kl == "on",
            device="cpu",
            n_train_steps=WARM_UP + given.steps,
        )
        tokens = (TOKENS_ALONE if given.alone else OUR_TOKENS)[size]
        ours = settings | {"max_tokens_per_microbatch": tokens}
        here = REPOSITORY
        if given.alone:
            here = Path(folder) / "alone"
            here.mkdir()
            shutil.copy(REPOSITORY / "starter.py", here)
        row = {"size": size, "dtype": given.dtype, "kl_penalty": given.kl, "steps": given.steps}
        rows = row["trl_rows_at_once"] = quickest_rows(settings, TRL_ROWS[size])
        sides = {"ours": lambda: run_ours(ours, here), "trl": lambda: run_trl(settings, rows)}
        return row | in_turns(sides, given.rounds) | where()


def gpu_rows():
    """By the formula: memory of trainer, reference and vLLM's weights for Qwen3's sizes, with
    microbatches of 4,096 tokens. vLLM's cache comes on top."""
    from support.memory import predicted_gb

    rows = []
    small = dict(lora_rank=16, gradient_checkpointing=True)
    for changes in (
        {},
        dict(use_kl_penalty=True),
        dict(gradient_checkpointing=True),
        dict(lora_rank=16),
        small,
        small | dict(frozen_in_bf16=True),
    ):
        on_gpu = dict(
            preset="qwen3-1.7b", device="cuda", precision="bf16", engine="vllm", gpu_mem_util=1
        )
        cfg = chosen(on_gpu | changes)
        for model, shape in QWEN3.items():
            gb = predicted_gb(qwen3_config(**shape), cfg, cfg.max_tokens_per_microbatch)
            names = ", ".join(f"{name}={value}" for name, value in changes.items())
            rows.append({"settings": names, "model": model, "gb": f"{gb:.0f}"})
    return rows


def main():
    parser = argparse.ArgumentParser(description="what a step of starter.py costs")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--kl", default="off", choices=("off", "on"), help="the KL penalty")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of each round that are counted")
    for part in ("alone", "gpus"):
        parser.add_argument(f"--{part}", action="store_true")
    given = parser.parse_args()
    if given.gpus:
        write_csv("gpus", gpu_rows())
    else:
        for size in given.sizes:
            row = beside(size, given)
            print(json.dumps(row), flush=True)
            append_rows("bench_alone" if given.alone else "bench_step", [row])


if __name__ == "__main__":
    main()
