"""What this project does on one NVIDIA GPU -> lab/results/gpu_update.csv, gpu_vllm.csv.

    python -m lab.gpu              eight minutes; a second call goes on
    python -m lab.gpu --rehearse   small models, here on a CPU; publishes nothing
    python -m lab.gpu --memory     the formula of support/memory.py for Qwen3 -> gpus.csv

ROWS come in the order of their worth. Each is a run of main() in a process of its own, which is
ended when its time is over, and is written as soon as it is there; all results are then copied to
the folder that the variable OUT names, if it is set. One that fails leaves its reason in the column
"error". Rows that a file has, of this card and commit, are skipped, and those with vLLM where it is
not installed. Qwen3 and SmolLM2 are their shapes, with random weights and rewards. GB are the most
that torch's tensors took, vLLM's included; share is share_of_peak of support/gpu.py, which counts
4 % more than the rows of commit 375db7f did.

gpu_update.csv: the update of Qwen3-1.7B alone, with 128 made-up responses of 256 tokens. shipped:
as it is without vLLM, where support/gpu.py changes nothing; 1: layers compiled; 2: statistics
compiled; 3: microbatches of 8,192 tokens instead of 4,096. The head multiplies 16 bits and adds up
in float32; at commit 375db7f that was a part of 2, and "shipped" had TF32. Parts are timed one by
one, each with its backward pass; head_s is what is left, and held the statistics before. logp and
gradient: how far a row is from "shipped" (plain), and from float32.

gpu_vllm.csv: seconds are means without the first step. "sync" scales weights and hands them over:
diff is in nats between sampler and trainer, stale before and then after; greedy_same is the share
of greedy tokens that are the trainer's best, too; same_twice, whether prompts asked again get the
same responses.
"""

import contextlib
import functools
import importlib.util
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import starter  # before torch, for which it sets variables

import torch

from lab import bench, rows
from support import fast, gpu, memory

ON_GPU = torch.cuda.is_available()
LORA = dict(lora_rank=16)
CHECKPOINTING = dict(gradient_checkpointing=True)
SMALL = LORA | CHECKPOINTING | dict(frozen_in_bf16=True)


# 1. Memory by the formula.


def memory_rows():
    """Trainer, reference and vLLM's weights, with microbatches of 4,096 tokens. vLLM's cache comes
    on top."""
    usual = dict(preset="qwen3-1.7b", device="cuda", precision="bf16", engine="vllm")
    kl = dict(use_kl_penalty=True)
    found = []
    for changes in ({}, kl, CHECKPOINTING, LORA, LORA | CHECKPOINTING, SMALL):
        cfg = bench.chosen({**usual, **changes, "gpu_mem_util": 1})
        names = ", ".join(f"{name}={value}" for name, value in changes.items())
        for shape in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B"):
            gb = memory.predicted_gb(bench.config_of(shape), cfg, cfg.max_tokens_per_microbatch)
            found.append({"settings": names, "model": shape, "gb": f"{gb:.0f}"})
    return found


def columns_of_all(share, policy, cfg):
    """Returns the columns that updates and runs have in common. share: of the card's peak."""
    row = {"formula_gb": memory.predicted_gb(policy.config, cfg, cfg.max_tokens_per_microbatch)}
    if ON_GPU:
        if cfg.engine == "vllm" and cfg.gpu_mem_util < 1:
            row["formula_gb"] += cfg.gpu_mem_util * torch.cuda.mem_get_info()[1] / 1e9
        row["gb"] = torch.cuda.max_memory_allocated() / 1e9
        row["share"] = share
    return row


# 2. The update.  Each measure_...() is called in the place of train(); go_on() trains. -> columns


def seconds_of(function, n_calls=1):
    """Returns the median seconds of calls, of more than one without the first, which compiles."""
    taken = []
    for _ in range(n_calls):
        start = time.perf_counter()
        function()
        if ON_GPU:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:] or taken)


def turn_on(switches, policy):
    """The one place where the switches of a row take effect."""
    if "layers" in switches:
        gpu.compile_layers(policy)
    if "statistics" in switches:
        gpu.compile_statistics()


def made_up_batch(policy, problems, cfg):
    """Returns a step's batch: random tokens and advantages."""
    draw = random.Random(0)
    n = cfg.max_new_tokens
    responses = []
    for i in range(cfg.rollout_batch_size):
        prompt_ids = problems.train[i // cfg.group_size]["prompt_ids"]
        ids = draw.choices(range(policy.config.vocab_size), k=n)
        responses.append(starter.Response(prompt_ids, ids, [-12.0] * n, True))
    batch = starter.make_batch(responses, torch.randn(len(responses)), policy.device)
    batch["weights"] = starter.weights_of_tokens(batch, cfg)
    return batch


def outputs_of(policy, batch, cfg, precision="bf16"):
    """Returns log-probs of the first responses, and some numbers of their gradient."""
    some = starter.keep_rows(batch, slice(8))
    cfg = starter.cfg_with(**{**vars(cfg), "precision": precision})
    starter.grpo_microbatch_step(policy, some, cfg)
    gradient = torch.cat([p.grad.flatten()[::1000] for p in policy.parameters()])
    policy.zero_grad()
    return some["old_log_probs"][some["response_mask"]], gradient


def measure_update(switches, policy, optimizer, llm, problems, cfg, go_on):
    batch = made_up_batch(policy, problems, cfg)
    plain, float32 = (outputs_of(policy, batch, cfg, name) for name in ("bf16", "float32"))
    turn_on(switches, policy)
    log_probs, gradient = outputs_of(policy, batch, cfg)
    row = {}
    for name, (its_log_probs, its_gradient) in (("plain", plain), ("float32", float32)):
        far = (gradient - its_gradient).norm() / its_gradient.norm()
        row[f"logp_mean_{name}"] = (log_probs - its_log_probs).abs().mean().item()
        row[f"gradient_{name}"] = far.item()
    microbatches = starter.cut_microbatches(batch, cfg.max_tokens_per_microbatch)
    n_answered = batch["response_mask"].sum().item()

    def update():
        for microbatch in microbatches:
            starter.grpo_microbatch_step(policy, microbatch, cfg)
        optimise()
        optimizer.zero_grad()

    def optimise():
        starter.clip_gradient([*policy.parameters()], cfg.max_grad_norm)
        optimizer.step()

    def layers():
        for microbatch in microbatches:
            fast.hidden_states(policy, microbatch, cfg.precision).sum().backward()

    vocabulary = policy.config.vocab_size
    n = fast.LOGITS_AT_ONCE.get(policy.device.type, starter.LOGITS_AT_ONCE) // vocabulary
    n = min(n, n_answered)  # whose logits exist at a time
    logits = torch.randn(n, vocabulary, device=policy.device, requires_grad=True)

    def statistics_twice():
        for _ in range(2):  # forward, and again in the backward pass
            stats = starter.statistics_of_logits(logits, batch["labels"][0, :1].expand(n), 1.0)
        stats["log_probs"].sum().backward()

    s = row["s"] = seconds_of(update, 4)
    share = 0.0
    if ON_GPU:
        metrics = {"time/total": s, "time/rollout": 0.0}
        share = gpu.share_of_peak(metrics, microbatches, cfg).get("share_of_peak", 0.0)
    row |= columns_of_all(share, policy, cfg)
    parts = {
        "layers_s": seconds_of(layers, 4),
        "statistics_s": seconds_of(statistics_twice, 4) * n_answered / n,
        "optimiser_s": seconds_of(optimise, 4),  # of the gradient that layers() left
    }
    return {**row, **parts, "head_s": s - sum(parts.values())}


def measure_profile(switches, policy, optimizer, llm, problems, cfg, go_on):
    """Appends the kernels that take longest in the update of eight responses to gpu_profile.txt."""
    batch = made_up_batch(policy, problems, cfg)
    outputs_of(policy, batch, cfg)
    with torch.profiler.profile() as seen:
        outputs_of(policy, batch, cfg)
    kernels = seen.key_averages()
    if ON_GPU:
        with open(rows.RESULTS / "gpu_profile.txt", "a") as file:
            print(kernels.table(sort_by="self_cuda_time_total", row_limit=25), file=file)
    return {"waits": sum(kernel.count for kernel in kernels if "Synchronize" in kernel.key)}


# 3. Runs with vLLM.  The same.


def measure_run(switches, policy, optimizer, llm, problems, cfg, go_on):
    steps, solved, syncs, shares = [], [], [], []
    share_of_peak = gpu.share_of_peak
    sync = starter.load_policy_into_vllm_instance
    starter.log_train = lambda run, step, metrics: steps.append(metrics)
    starter.log_eval = lambda run, step, metrics: solved.append(100 * metrics["solved"])
    starter.load_policy_into_vllm_instance = lambda *args: syncs.append(
        seconds_of(functools.partial(sync, *args))
    )
    gpu.share_of_peak = lambda *inputs: shares.append(share_of_peak(*inputs)) or shares[-1]
    go_on()
    means = {name: statistics.mean(step[name] for step in steps[1:]) for name in steps[0]}
    sync_s = statistics.median(syncs)
    row = {
        "steps": len(steps),
        "step_s": means["time/total"],
        "generate_s": means["time/rollout"] - sync_s,
        "sync_s": sync_s,
        "update_s": means["time/total"] - means["time/rollout"],
        "sampler_diff": means["sampler_logprob_diff"],
    }
    if cfg.reward is not bench.noise:
        row["solved"] = solved[-1]
    share = statistics.mean(found.get("share_of_peak", 0.0) for found in shares[1:] or [{}])
    return row | columns_of_all(share, policy, cfg)


@torch.no_grad()
def measure_sync(switches, policy, optimizer, llm, problems, cfg, go_on):
    prompts = [problem["prompt_ids"] for problem in problems.held_out]

    def sample(group_size, temperature):
        """Returns Responses, nats between sampler and trainer, and whether a token is the best."""
        starter.forget_prompts(llm)
        requests = starter.requests_for(prompts, cfg, 1, group_size)
        responses = starter.rollout_with_vllm(llm, requests, cfg, temperature)
        batch = starter.make_batch(responses, torch.zeros(len(responses)), policy.device)
        mask = batch["response_mask"]
        log_probs = starter.response_logits(policy, batch, cfg.precision).float().log_softmax(1)
        ours = log_probs.gather(1, batch["labels"][mask][:, None])[:, 0]
        difference = (ours - batch["sampler_log_probs"][mask]).abs().mean()
        is_best = (ours == log_probs.amax(dim=1)).float().mean()
        return responses, difference.item(), is_best.item()

    policy.model.norm.weight.mul_(4)  # so that the log-probs differ from token to token
    policy.model.layers[2].mlp.down_proj.weight.mul_(8)
    policy.get_output_embeddings().weight[:, ::2].mul_(1.5)
    _, stale, _ = sample(4, 1.0)
    starter.load_policy_into_vllm_instance(policy, llm)
    responses, after, _ = sample(4, 1.0)
    again, _, _ = sample(4, 1.0)
    _, _, same = sample(1, 0.0)
    row = {"diff_stale": stale, "diff_after": after, "greedy_same": same}
    return {**row, "same_twice": again == responses}


# 4. Rows.


def long_problems(cfg):
    """A task with prompts of about 90 tokens."""
    text = "3 4 17 25 " * 8
    problems = [{"prompt": f"make {n}: {text}", "answer": n} for n in range(1_000, 3_000)]
    return problems[8:], problems[:8]


# Settings of main(), and: shape, switches, limit_gb (memory that may be used), eager (vLLM
# compiles nothing, which would take a minute)
RANDOM = dict(task=long_problems, reward=bench.noise, precision="bf16", n_train_steps=4)
UPDATE = RANDOM | dict(shape="Qwen3-1.7B", preset="qwen3-1.7b", engine="transformers")
BOTH = UPDATE | dict(switches=["layers", "statistics"])
QWEN = UPDATE | dict(engine="vllm")
SYNC = QWEN | dict(eager=True, max_new_tokens=48)
ROWS = {
    "shipped": (measure_update, UPDATE),
    "1": (measure_update, UPDATE | dict(switches=["layers"])),
    "1+2": (measure_update, BOTH),
    "1+2+3": (measure_update, BOTH | dict(max_tokens_per_microbatch=8_192)),
    "built-in": (measure_run, dict(engine="vllm", preset="tiny", precision="bf16")),
    "sync, tied": (measure_sync, SYNC | dict(shape="small")),
    "sync, untied": (measure_sync, SYNC | dict(shape="small, untied")),
    "Qwen3-1.7B": (measure_run, QWEN),
    "Qwen3-1.7B, fp16": (measure_run, QWEN | dict(precision="fp16")),
    "Qwen3-1.7B, 24 GB": (
        measure_run,
        QWEN | SMALL | dict(limit_gb=24, gpu_mem_util=3, eager=True),
    ),
    "profile": (measure_profile, UPDATE),
    "SmolLM2": (measure_run, QWEN | dict(shape="SmolLM2-135M", preset="smollm2")),
}
REHEARSAL = dict(n_train_steps=2, rollout_batch_size=16, max_new_tokens=12, n_eval_problems=8)
SECONDS = 150  # that a row may take
ALL_SECONDS = 480


class Done(Exception):
    """Everything was measured: nothing is saved."""


def measure(name, models, is_rehearsal):
    """Prints "result" and the columns of a row. models: a folder for those with random weights."""
    function, settings = ROWS[name]
    settings = {"n_train_steps": 20, **settings}
    shape = settings.pop("shape", None)
    switches = settings.pop("switches", [])
    limit_gb = settings.pop("limit_gb", None)
    if is_rehearsal:
        settings |= REHEARSAL
        torch.compiler.set_stance("force_eager")
    if shape is not None:
        if is_rehearsal and "small" not in shape:
            shape = "small"
        model = Path(models, shape)
        settings["model_id"] = str(model)
        if not model.is_dir():
            bench.save_random(shape, f"{model}, unfinished")
            Path(f"{model}, unfinished").rename(model)
            torch.cuda.empty_cache()
    if limit_gb is not None and ON_GPU:
        share = limit_gb * 1e9 / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(share)
    if settings.pop("eager", False):
        import vllm

        vllm.LLM = functools.partial(vllm.LLM, enforce_eager=True)
    train = starter.train
    columns = {}

    def train_and_measure(*args):
        policy, _, llm, optimizer, problems, cfg, *_ = args
        go_on = functools.partial(train, *args)
        columns.update(function(switches, policy, optimizer, llm, problems, cfg, go_on))
        raise Done

    starter.train = train_and_measure
    starter.Run.save = lambda *args: None
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Done):
        starter.main(out_dir=folder, eval_every=0, **settings)
    for column, value in columns.items():
        if isinstance(value, float):
            columns[column] = float(f"{value:.3g}")
    print("\nresult", json.dumps(columns), flush=True)
    os._exit(0)  # vLLM and compiling leave threads that may wait


def columns_of(command, seconds):
    """Runs a command, and ends it and what it started after some seconds. Returns the columns that
    it printed, or why there are none."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        printed = output.read().strip()
    _, found, result = printed.rpartition("\nresult ")
    if found:
        return {"error": "", **json.loads(result.splitlines()[0])}
    return {"error": f"status {process.wait()}, {printed[-300:]}"}


def measure_all(is_rehearsal):
    """Measures the rows that the files have not."""
    begun = time.monotonic()
    place = rows.where() | {"machine": torch.cuda.get_device_name() if ON_GPU else "CPU"}
    has_vllm = importlib.util.find_spec("vllm") is not None
    with tempfile.TemporaryDirectory() as models:
        for name, (_, settings) in ROWS.items():
            file = "gpu_vllm" if settings["engine"] == "vllm" else "gpu_update"
            key = {"row": name, "error": "", "machine": place["machine"], "commit": place["commit"]}
            is_known = any(key.items() <= row.items() for row in rows.read_csv(file))
            passed = time.monotonic() - begun
            left = SECONDS if is_rehearsal else ALL_SECONDS - passed
            if is_known or left < 30 or file == "gpu_vllm" and not has_vllm:
                continue
            command = [sys.executable, "-m", "lab.gpu", "--row", name, models]
            columns = columns_of(command + ["--rehearse"] * is_rehearsal, min(left, SECONDS))
            print(f"{passed:.0f} s: {name}: {columns}", flush=True)
            if not is_rehearsal:
                rows.append_rows(file, [{"row": name, **columns, **place}])
            if "OUT" in os.environ:
                shutil.copytree(rows.RESULTS, os.environ["OUT"], dirs_exist_ok=True)


def main():
    if "--memory" in sys.argv:
        rows.write_csv("gpus", memory_rows())
    elif "--row" in sys.argv:
        measure(*sys.argv[2:4], "--rehearse" in sys.argv)
    else:
        measure_all("--rehearse" in sys.argv)


if __name__ == "__main__":
    main()
