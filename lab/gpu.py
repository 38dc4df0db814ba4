"""What this project does on NVIDIA GPUs -> lab/results/gpu_update.csv, gpu_vllm.csv, gpu_cards.csv.

    python -m lab.gpu              first without vLLM, four minutes; where vLLM is installed, eight
    python -m lab.gpu --cards 2    the rows of several cards, by torchrun on as many of one machine
    python -m lab.gpu --rehearse   small models, here on a CPU; publishes nothing
    python -m lab.gpu --memory     the formula of support/memory.py for Qwen3 -> gpus.csv, cards.csv
    bash lab/pack_wheels.sh FOLDER packs what a machine without a network needs, in parts

lab/gpu_rows.yaml has the rows, in the order of their worth. Each is a run of main() in a process of
its own, which is ended when its time is over, and is written as soon as it is there; all results
are then copied to the folder that the variable OUT names, if it is set. One that fails leaves its
reason in the column "error". Rows that a file has, of this card and commit, are skipped, and those
with vLLM where it is not installed. Qwen3 is its shape, with random weights and rewards; SmolLM2 is
lab/real_model.py's. gb are the most that torch's tensors took, vLLM's included; retries, how often
the allocator gave memory back and asked again; share is share_of_peak of support/gpu.py, which
counts 4 % more than the rows of commit 375db7f did.

gpu_update.csv: the update of Qwen3-1.7B alone, with 128 made-up responses of 256 tokens. shipped:
as it is without vLLM, where support/gpu.py changes nothing; 1: layers compiled; 2: statistics
compiled; 3: microbatches of 8,192 tokens instead of 4,096, which is what runs beside vLLM; then of
16,384 tokens, with what torch's activation_memory_budget may keep of the layers. The head
multiplies 16 bits and adds up in float32; at commit 375db7f that was a part of 2, and "shipped" had
TF32. Parts are timed one by one, each with its backward pass; head_s is what is left, and held the
statistics before. kernels_s: the sum over all kernels of an update, which is below s where the card
waits. logp and gradient: how far a row is from "shipped" (plain), and from float32. T4: attention
of heads that share keys with the kernels that such a card has, as torch takes them, and with
repeated keys. overflow: fp16 with a gradient of inf in step 1.

gpu_vllm.csv: seconds are means without the first step; gc_s are those of Python's collector. "sync"
scales weights and hands them over: diff is in nats between sampler and trainer, stale before and
then after; greedy_same is the share of greedy tokens that are the trainer's best, too; same_twice,
whether prompts asked again get the same responses. "frozen" is a sampler that keeps its weights:
found, the step in which a run ends for that. "engine": seconds of a rollout of 128 responses, and
without seeds, without log-probs, with flat ones, and of 64 and 256. "learns": how many seconds of
steps it takes until 75 % are solved. "agents": 64 with tools of 50 ms, and without their time.
TRL: GRPOTrainer with vLLM in the same process, and the same work.

gpu_cards.csv: the same columns, of the first process; formula_gb of each card.
"""

import contextlib
import functools
import gc
import importlib.util
import itertools
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
from types import SimpleNamespace

import starter  # before torch, for which it sets variables

import torch
import yaml

from lab import agents, bench, real_model, rows
from lab.bench import noise  # rows name it
from lab.switches import around_an_update, optimise, turn_on
from support import fast, gpu, memory, ranks

ON_GPU = torch.cuda.is_available()
ALL_ROWS = yaml.safe_load(Path(__file__).with_name("gpu_rows.yaml").read_text())


# 1. Memory by the formula.


def formula_gb(shape, settings, cache, n_cards=1, vllm_tp=1):
    """Trainer, reference and vLLM's weights on each card, with microbatches of 4,096 tokens. cache:
    GB of vLLM's, which come on top."""
    usual = dict(preset="qwen3-1.7b", device="cuda", precision="bf16", engine="vllm")
    cfg = bench.chosen({**usual, **settings, "gpu_mem_util": cache})
    cfg.vllm_tp = vllm_tp
    n_tokens = cfg.max_tokens_per_microbatch
    return memory.predicted_gb(bench.config_of(shape), cfg, n_tokens, n_cards)


def memory_rows():
    found = []
    for settings in ALL_ROWS["memory"]:
        names = ", ".join(f"{name}={value}" for name, value in settings.items())
        for shape in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B"):
            gb = formula_gb(shape, settings, 1)
            found.append({"settings": names, "model": shape, "gb": f"{gb:.0f}"})
    return found


CACHE = {24: 3, 80: 8}  # GB of a card: of these for vLLM's cache
ROOM = 0.93  # of a card, for what the driver and torch's allocator take


def card_rows():
    """The first wish that each number of cards fulfils, and the vllm_tp that it takes."""
    found = []
    for (card_gb, cache), n_cards in itertools.product(CACHE.items(), (1, 2, 4, 8)):
        for shape in ("Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B"):
            row = {"card_gb": card_gb, "cards": n_cards, "model": shape, "trained": "nothing"}
            for wish, vllm_tp in itertools.product(ALL_ROWS["wishes"], (1, 2, 4, 8)):
                if vllm_tp > n_cards:
                    continue
                settings = ALL_ROWS["wishes"][wish]
                gb = cache + formula_gb(shape, settings, cache, n_cards, vllm_tp)
                if gb <= ROOM * card_gb:
                    row |= {"trained": wish, "vllm_tp": vllm_tp, "gb": f"{gb:.0f}"}
                    break
            found.append(row)
    return found


def columns_of_all(share, policy, cfg):
    """Returns the columns that updates and runs have in common. share: of the card's peak."""
    n_tokens = cfg.max_tokens_per_microbatch
    row = {"formula_gb": memory.predicted_gb(policy.config, cfg, n_tokens, ranks.WORLD)}
    if ON_GPU:
        if cfg.engine == "vllm" and cfg.gpu_mem_util < 1:
            row["formula_gb"] += cfg.gpu_mem_util * torch.cuda.mem_get_info()[1] / 1e9
        row["gb"] = torch.cuda.max_memory_allocated() / 1e9
        row["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
        row["share"] = share
    return row


# 2. The update.  Each measure_...() is called in the place of train(); go_on() trains. -> columns


def seconds_of(function, n_calls=1):
    """Returns the median seconds of calls, of more than one without the first, which compiles."""
    taken = []
    for _ in range(n_calls):
        start = bench.now()
        function()
        taken.append(bench.now() - start)
    return statistics.median(taken[1:] or taken)


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
    cfg = SimpleNamespace(**{**vars(cfg), "precision": precision})
    starter.grpo_microbatch_step(policy, some, cfg)
    learning = [p for p in policy.parameters() if p.grad is not None]
    gradient = torch.cat([p.grad.flatten()[::1000] for p in learning])
    policy.zero_grad()
    return some["old_log_probs"][some["response_mask"]], gradient


def measure_update(switches, policy, optimizer, llm, problems, cfg, go_on):
    batch = made_up_batch(policy, problems, cfg)
    others = {"plain": outputs_of(policy, batch, cfg)}
    if not cfg.frozen_in_bf16:
        others["float32"] = outputs_of(policy, batch, cfg, "float32")
    turn_on(switches, policy)
    log_probs, gradient = outputs_of(policy, batch, cfg)
    row = {}
    for name, (its_log_probs, its_gradient) in others.items():
        far = (gradient - its_gradient).norm() / its_gradient.norm()
        row[f"logp_mean_{name}"] = (log_probs - its_log_probs).abs().mean().item()
        row[f"gradient_{name}"] = far.item()
    microbatches = starter.cut_microbatches(batch, cfg.max_tokens_per_microbatch)
    n_answered = batch["response_mask"].sum().item()

    def update():
        with around_an_update(switches):
            for microbatch in microbatches:
                starter.grpo_microbatch_step(policy, microbatch, cfg)
        optimise(switches, policy, optimizer, cfg.max_grad_norm)
        optimizer.zero_grad()

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
        share = gpu.share_of_peak(policy, metrics, microbatches, cfg).get("share_of_peak", 0.0)
    row |= columns_of_all(share, policy, cfg)
    parts = {
        "layers_s": seconds_of(layers, 4),
        "statistics_s": seconds_of(statistics_twice, 4) * n_answered / n,
        # Of the gradient that layers() left
        "optimiser_s": seconds_of(
            lambda: optimise(switches, policy, optimizer, cfg.max_grad_norm), 4
        ),
    }
    with torch.profiler.profile() as seen:
        update()
    kernels = [kernel for kernel in seen.events() if kernel.device_type.name == "CUDA"]
    row["kernels_s"] = sum(kernel.self_device_time_total for kernel in kernels) / 1e6
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


def measure_attention(switches, policy, optimizer, llm, problems, cfg, go_on):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attention = policy.model.layers[0].self_attn
    n = 512 if ON_GPU else 16
    heads, shared = policy.config.num_attention_heads, policy.config.num_key_value_heads
    size = dict(device=policy.device, dtype=torch.float16 if ON_GPU else torch.float32)
    query = torch.randn(8, heads, n, attention.head_dim, **size, requires_grad=True)
    key = torch.randn(8, shared, n, attention.head_dim, **size, requires_grad=True)
    row = {}
    ways = {"as_it_is": sdpa_attention_forward, "repeated": gpu.attention_with_repeated_keys}
    for name, attend in ways.items():

        def call():
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                attend(attention, query, key, key, None)[0].sum().backward()

        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        row[f"{name}_s"] = seconds_of(call, 4)
        if ON_GPU:
            row[f"{name}_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return row


def measure_overflow(switches, policy, optimizer, llm, problems, cfg, go_on):
    steps = []
    add_up = starter.add_up_gradients
    head = policy.get_output_embeddings().weight

    def overflows(policy, microbatches, cfg, ref_model, kl_coef, scaler):
        sums = add_up(policy, microbatches, cfg, ref_model, kl_coef, scaler)
        steps.append(scaler.get_scale())
        if len(steps) == 1:
            head.grad[0, 0] = torch.inf
        return sums

    starter.add_up_gradients = overflows
    go_on()
    return {"scales": " ".join(f"{scale:g}" for scale in steps)}


# 3. Runs with vLLM.  The same.


def seconds_of_collector():
    """Returns a list that grows with the seconds of each run of Python's garbage collector."""
    taken = []

    def note(phase, info):
        if phase == "start":
            note.start = time.perf_counter()
        else:
            taken.append(time.perf_counter() - note.start)

    gc.callbacks.append(note)
    return taken


def measure_run(switches, policy, optimizer, llm, problems, cfg, go_on):
    steps, solved, syncs, shares = [], [], [], []
    share_of_peak = gpu.share_of_peak
    sync = starter.load_policy_into_vllm_instance

    def noted_share(*inputs):
        found = share_of_peak(*inputs)
        shares.append(found.get("share_of_peak", 0.0))
        return found

    starter.log_train = lambda run, step, metrics: steps.append(metrics)
    starter.log_eval = lambda run, step, metrics: solved.append(100 * metrics["solved"])
    starter.load_policy_into_vllm_instance = bench.timed(sync, syncs)
    gpu.share_of_peak = noted_share
    collected = seconds_of_collector()
    go_on()
    means = {name: statistics.mean(step[name] for step in steps[1:]) for name in steps[0]}
    sync_s = statistics.median(seconds for _, seconds in syncs) if syncs else 0.0
    row = {
        "steps": len(steps),
        "step_s": means["time/total"],
        "generate_s": means["time/rollout"] - sync_s,
        "sync_s": sync_s,
        "update_s": means["time/total"] - means["time/rollout"],
        "gc_s": sum(collected) / len(steps),
        "sampler_diff": means["sampler_logprob_diff"],
    }
    if cfg.reward is not noise:
        row["solved"] = solved[-1]
        row["curve_solved"] = " ".join(f"{value:.3g}" for value in solved)
    return row | columns_of_all(statistics.mean(shares[1:] or [0.0]), policy, cfg)


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


def freeze(worker):
    """Runs inside vLLM: takes weights, and keeps its own."""
    worker.reload_weights = lambda weights_iterator: [None for _ in weights_iterator]


def measure_frozen(switches, policy, optimizer, llm, problems, cfg, go_on):
    llm.collective_rpc(freeze)
    steps = []
    starter.log_train = lambda run, step, metrics: steps.append(step)
    try:
        go_on()
    except starter.RunStopped:
        return {"found": len(steps) + 1}
    return {"found": "no"}


def measure_engine(switches, policy, optimizer, llm, problems, cfg, go_on):
    from vllm import SamplingParams

    def seconds(n, **changes):
        usual = dict(temperature=1.0, max_tokens=cfg.max_new_tokens, ignore_eos=True, logprobs=0)
        prompts = [problems.train[i // 8]["prompt_ids"] for i in range(n)]
        params = [
            SamplingParams(**{**usual, "detokenize": False, "seed": i, **changes}) for i in range(n)
        ]
        prompts = [{"prompt_token_ids": ids} for ids in prompts]
        starter.forget_prompts(llm)
        return seconds_of(lambda: llm.generate(prompts, params, use_tqdm=False), 3)

    n = cfg.rollout_batch_size
    return {
        "s": seconds(n),
        "without_seeds_s": seconds(n, seed=None),
        "without_logprobs_s": seconds(n, logprobs=None),
        "flat_logprobs_s": seconds(n, flat_logprobs=True),
        "half_s": seconds(n // 2),
        "twice_s": seconds(2 * n),
    }


def measure_agents(switches, policy, optimizer, llm, problems, cfg, go_on):
    row = {}
    for name, seconds in (("tools_s", 0.05), ("without_s", 0.0)):

        def rollout():
            agent = agents.three_turns(seconds)
            starter.rollout(policy, llm, problems.train[:8], cfg, 1, 8, 1.0, agent)

        row[name] = seconds_of(rollout, 4)
    return row


def measure_learning(switches, policy, optimizer, llm, problems, cfg, go_on):
    """Until three quarters are solved, of which the seconds of evaluations are no part."""
    row, seconds = {}, []
    starter.log_train = lambda run, step, metrics: seconds.append(metrics["time/total"])

    def until(run, step, metrics):
        run.stop = metrics["solved"] >= 0.75
        row.setdefault("curve_solved", "")
        row["curve_solved"] += f"{100 * metrics['solved']:.3g} "

    starter.log_eval = until
    go_on()
    return {**row, "steps": len(seconds), "s": sum(seconds)}


def columns_of_trl(settings, trl):
    """TRL's trainer on the same work. Not called in the place of train()."""
    settings = {"device": "cuda" if ON_GPU else "cpu", "save_every": 0, **settings}
    cfg = bench.chosen(settings)
    at_once = min(trl.pop("rows"), cfg.rollout_batch_size)
    log = bench.train_with_trl({"eval_every": 0, **settings}, at_once, **trl)
    row = {name: statistics.mean(values) for name, values in bench.phases(log, 1).items()}
    row["curve_solved"] = " ".join(f"{100 * solved:.3g}" for _, solved in log["eval/solved"])
    if ON_GPU:
        row["gb"] = torch.cuda.max_memory_allocated() / 1e9
    return row


# 4. Rows.


def long_problems(cfg):
    """A task with prompts of about 90 tokens."""
    text = "3 4 17 25 " * 8
    problems = [{"prompt": f"make {n}: {text}", "answer": n} for n in range(1_000, 3_000)]
    return problems[8:], problems[:8]


def gsm8k(cfg):
    """A task: GSM8K, from the folder shared/ in the repository or beside it."""
    folder = rows.REPOSITORY / "shared" / "data" / "gsm8k"
    if not folder.is_dir():
        folder = rows.REPOSITORY.parent / "shared" / "data" / "gsm8k"
    [train], [test] = sorted(folder.glob("*train*")), sorted(folder.glob("*test*"))
    read = starter.read_problems
    asked = [{**problem, "last_number": True} for problem in read(train) + read(test)[:200]]
    return asked[:-200], asked[-200:]


def rows_of(n_cards):
    """Returns {name: settings} of the rows for as many cards, with the functions that they name."""
    found = {}
    for name, settings in ALL_ROWS["one card" if n_cards == 1 else "several cards"].items():
        named = {"measure", "task", "reward"} & settings.keys()
        found[name] = settings | {key: globals()[settings[key]] for key in named}
    return found


REHEARSAL = dict(n_train_steps=2, rollout_batch_size=16, max_new_tokens=12, n_eval_problems=8)
SECONDS = 150  # that a row may take
ALL_SECONDS = {"gpu_update": 240, "gpu_vllm": 480}  # those of a call


def measure(name, models, is_rehearsal):
    """Prints "result" and the columns of a row. models: a folder for those with random weights."""
    settings = {"n_train_steps": 20, **rows_of(ranks.WORLD)[name]}
    function = settings.pop("measure")
    shape = settings.pop("shape", None)
    switches = settings.pop("switches", [])
    limit_gb = settings.pop("limit_gb", None)
    trl = settings.pop("trl", None)
    settings.pop("environment", None)
    if is_rehearsal:
        settings |= REHEARSAL
        torch.compiler.set_stance("force_eager")
    if settings["preset"] == "smollm2":
        if is_rehearsal:
            shape = "small"
        else:
            settings["model_id"] = str(real_model.model_folder())
    if shape is not None:
        if is_rehearsal and "small" not in shape:
            shape = "small"
        model = Path(models, shape)
        settings["model_id"] = str(model)
        if ranks.RANK:
            while not model.is_dir():
                time.sleep(1)
        elif not model.is_dir():
            bench.save_random(shape, f"{model}, unfinished")
            Path(f"{model}, unfinished").rename(model)
            torch.cuda.empty_cache()
    if limit_gb is not None and ON_GPU:
        share = limit_gb * 1e9 / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(share)
    if trl is None:
        columns = columns_in_main(function, switches, settings)
    else:
        columns = columns_of_trl(settings, trl)
    for column, value in columns.items():
        if isinstance(value, float):
            columns[column] = float(f"{value:.3g}")
    print("\nresult", json.dumps(columns), flush=True)
    os._exit(0)  # vLLM and compiling leave threads that may wait


def columns_in_main(function, switches, settings):
    """Calls the function in the place of train()."""
    train = starter.train

    def measure_policy(*inputs):
        policy, _, llm, optimizer, problems, cfg, *_ = inputs
        go_on = functools.partial(train, *inputs)
        return function(switches, policy, optimizer, llm, problems, cfg, go_on)

    return bench.in_place_of_train(measure_policy, {"eval_every": 0, **settings})


def columns_of(command, seconds, environment={}):
    """Runs a command, and ends it and what it started after some seconds. Returns the columns that
    it printed, or why there are none."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **environment},
        )
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


def measure_all(is_rehearsal, n_cards):
    """Measures the rows that the files have not."""
    begun = time.monotonic()
    place = rows.where() | {"machine": torch.cuda.get_device_name() if ON_GPU else "CPU"}
    has_vllm = importlib.util.find_spec("vllm") is not None
    of_call = ALL_SECONDS["gpu_vllm" if has_vllm else "gpu_update"]
    with tempfile.TemporaryDirectory() as models:
        for name, settings in rows_of(n_cards).items():
            needs_vllm = settings["engine"] == "vllm"
            file = "gpu_vllm" if needs_vllm else "gpu_update"
            launcher = []
            if n_cards > 1:
                file = "gpu_cards"
                launcher = (
                    f"-m torch.distributed.run --standalone --nproc-per-node={n_cards}".split()
                )
            key = {"row": name, "error": "", "machine": place["machine"], "commit": place["commit"]}
            is_known = any(key.items() <= row.items() for row in rows.read_csv(file))
            passed = time.monotonic() - begun
            left = SECONDS if is_rehearsal else of_call - passed
            if is_known or left < 30 or needs_vllm and not has_vllm:
                continue
            command = [sys.executable, *launcher, "-m", "lab.gpu", "--row", name, models]
            command += ["--rehearse"] * is_rehearsal
            variables = settings.get("environment", {})
            columns = columns_of(command, min(left, SECONDS), variables)
            print(f"{passed:.0f} s: {name}: {columns}", flush=True)
            if not is_rehearsal:
                rows.append_rows(file, [{"row": name, **columns, **place}])
            if "OUT" in os.environ:
                shutil.copytree(rows.RESULTS, os.environ["OUT"], dirs_exist_ok=True)


def main():
    if "--memory" in sys.argv:
        rows.write_csv("gpus", memory_rows())
        rows.write_csv("cards", card_rows())
    elif "--row" in sys.argv:
        measure(*sys.argv[2:4], "--rehearse" in sys.argv)
    else:
        n_cards = 1
        if "--cards" in sys.argv:
            n_cards = int(sys.argv[sys.argv.index("--cards") + 1])
        measure_all("--rehearse" in sys.argv, n_cards)


if __name__ == "__main__":
    main()
