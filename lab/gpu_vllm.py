"""starter.py with vLLM on one GPU: what lab.gpu runs in its second part, each row in a process.

"built-in" and "Qwen3-1.7B" are runs of main(), without its checkpoints: seconds of each phase are
medians without the first step. "Qwen3-1.7B" has random weights and rewards; prompts have about 90
tokens, and nearly all responses are cut at 256. gb is the most that torch's tensors took, vLLM's
included; formula_gb is support/memory.py's prediction, with vLLM's share. share: see gpu_update.

"sync" scales one layer of a small model and hands it over: sampler_diff is |log-prob of the sampler
- that of the trainer| in nats, mean over sampled tokens, before, while vLLM has old weights, and
after; greedy_same is the share of greedy tokens that are the trainer's best, too.

"difference" is sampler_diff for one model and prompts by dtype of the layers and of the head. In
vLLM before 0.32 the head has the layers' dtype; "float32 sums" puts 0.32's product in its place.
"""
import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import starter
from lab import bench, gpu_update
from lab.gpu import VLLM as ROWS
from lab.gpu_update import half_precision

ON_GPU = torch.cuda.is_available()
SMALL_SHAPE = dict(hidden=256, layers=4, heads=4, head_dim=64, intermediate=512, vocabulary=2_048)


def synchronized():
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


# 1. vLLM, changed where a row asks for it

def change_vllm(eager, dtype=None):
    """Changes what init_vllm gives to LLM()."""
    import vllm
    start = getattr(vllm.LLM, "shipped", vllm.LLM)
    changes = dict(enforce_eager=True) if eager else {}
    if dtype is not None:
        changes["dtype"] = dtype

    def start_changed(*args, **settings):
        begun = time.perf_counter()
        llm = start(*args, **settings | changes)
        print(f"vLLM started in {time.perf_counter() - begun:.1f} s", flush=True)
        start_changed.seconds = time.perf_counter() - begun
        return llm

    start_changed.shipped = start
    vllm.LLM = start_changed
    return start_changed


SUMS = {"in float32": False}


def change_head():
    """Makes vLLM's head one with float32 sums where SUMS says so."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from support.fast import product_in_float32
    shipped = LogitsProcessor._get_logits

    def _get_logits(self, hidden_states, lm_head, embedding_bias, *others):
        if not (SUMS["in float32"] and hidden_states.dtype != torch.float32):
            return shipped(self, hidden_states, lm_head, embedding_bias, *others)
        logits = product_in_float32(hidden_states, lm_head.weight.T)
        return logits[..., :self.org_vocab_size]

    LogitsProcessor._get_logits = _get_logits


class HeadOfVLLM(starter.Float32Head):
    """The trainer's head beside vLLM's: inputs in autocast's dtype, sums in float32."""

    def forward(self, hidden):
        hidden_weight = hidden, self.weight
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden_weight = [x.to(dtype) for x in hidden_weight]
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(*(x.float() for x in hidden_weight))


# 2. Runs of main()

class Trained(Exception):
    """After the last step: nothing is saved."""


def run(model, rehearse, eager, gb=None, settings=None, dtype=None):
    """Returns the columns of a run."""
    seconds = {"sync": [], "generate": []}
    steps, evaluations, rows = [], [], []

    def timed(name, function):
        @functools.wraps(function)
        def call(*args, **others):
            begun = synchronized()
            result = function(*args, **others)
            seconds[name].append(synchronized() - begun)
            return result

        return call

    def log_train(run, step, metrics):
        steps.append(metrics)
        print(f"step {step}: " + ", ".join(f"{name} {metrics[name]:.4g}" for name in (
            "loss", "grad_norm", "reward_mean", "sampler_logprob_diff", "time/rollout",
            "time/total")), flush=True)

    def train(*args, **others):
        trained(*args, **others)
        raise Trained

    def keep(batch, responses, *others):
        rows.append(responses)
        return weights_of_tokens(batch, responses, *others)

    trained, weights_of_tokens = starter.train, starter.weights_of_tokens
    starter.load_policy_into_vllm_instance = timed("sync", starter.load_policy_into_vllm_instance)
    starter.rollout_with_vllm = timed("generate", starter.rollout_with_vllm)
    starter.log_train, starter.train, starter.weights_of_tokens = log_train, train, keep
    starter.log_eval = lambda run, step, metrics: evaluations.append(metrics)
    starter.Run.save = lambda self: None
    vllm = change_vllm(eager, dtype)
    total = torch.cuda.mem_get_info()[1] if ON_GPU else 24e9
    if gb is not None and ON_GPU:
        torch.cuda.set_per_process_memory_fraction(gb * 1e9 / total)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as changes:
        given = dict(out_dir=folder, engine="vllm", save_every=0, eval_every=0, bf16=True)
        if model == "built-in":
            given |= dict(preset="tiny", n_train_steps=3 if rehearse else 20)
        else:
            given |= folder_of_shape(Path(folder), rehearse) | dict(
                preset="qwen3-1.7b", n_train_steps=3 if rehearse or gb else 4, reward=noise,
                max_sampler_diff=None, rollout_batch_size=16 if rehearse else 128,
                max_new_tokens=12 if rehearse else 256, n_eval_problems=8)
        given |= settings or {}
        if gb is not None:
            given |= dict(gpu_mem_util=3 if ON_GPU else 1)  # GB of vLLM's cache
        if dtype == "float16":
            changes.enter_context(half_precision(torch.float16))
            starter.Float32Head.forward = HeadOfVLLM.forward
        begun = time.perf_counter()
        with contextlib.suppress(Trained):
            starter.main(**given)
        print(f"main() took {time.perf_counter() - begun:.1f} s", flush=True)
        formula = formula_gb(given, total)
        flops = flops_of(given, rows[-1])
    later = {name: statistics.median(step[name] for step in steps[1:])
             for name in ("time/total", "time/rollout", "sampler_logprob_diff")}
    update = later["time/total"] - later["time/rollout"]
    n = len(evaluations)  # each of them has a sync and a rollout
    first = 2 if n else 1  # the evaluation before training, and the first step
    columns = {
        "steps": len(steps), "start_s": f"{vllm.seconds:.1f}",
        "step_s": f"{later['time/total']:.3f}",
        "generate_s": f"{statistics.median(seconds['generate'][first:len(steps) + 1]):.3f}",
        "sync_s": f"{statistics.median(seconds['sync'][first:len(steps) + 1]):.3f}",
        "update_s": f"{update:.3f}", "share": f"{flops / update / gpu_update.PEAK:.4f}",
        "tokens": sum(len(r.response_ids) for r in rows[-1]),
        "gb": f"{torch.cuda.max_memory_allocated() / 1e9 if ON_GPU else 0:.1f}",
        "formula_gb": f"{formula:.1f}",
        "sampler_diff_first": f"{steps[0]['sampler_logprob_diff']:.2g}",
        "sampler_diff": f"{later['sampler_logprob_diff']:.2g}",
        "sampler_diff_last": f"{steps[-1]['sampler_logprob_diff']:.2g}"}
    if model == "built-in":
        columns |= {"solved_before": f"{100 * evaluations[0]['solved']:.1f}",
                    "solved": f"{100 * evaluations[-1]['solved']:.1f}"}
    return columns


def noise(text, problem):
    """A reward by which no group has equal ones."""
    import random
    return random.random()


def folder_of_shape(folder, rehearse):
    """Writes the model and problems of about 90 tokens. Returns settings."""
    shape = bench.QWEN3["Qwen3-1.7B"]
    if rehearse:
        shape = SMALL_SHAPE
    made = bench.make_folder(folder, **shape, new_tokens=256)
    path = Path(made["task"])
    problems = [json.loads(line) for line in path.read_text().splitlines()]
    with open(path, "w") as file:
        for problem in problems:
            problem["prompt"] = " ".join([problem["prompt"]] * 5)
            print(json.dumps(problem), file=file)
    return {name: made[name] for name in ("model_id", "task")}


def formula_gb(given, total):
    """Returns what support/memory.py predicts, vLLM's share or cache included."""
    from transformers import AutoConfig
    from support import memory, tasks
    cfg = starter.cfg_with(**{name: x for name, x in given.items() if name != "reward"}
                           | dict(device="cuda" if ON_GPU else "cpu"))
    config = AutoConfig.from_pretrained(tasks.TINY if cfg.model_id == "tiny" else cfg.model_id)
    predicted = memory.predicted_gb(config, cfg, cfg.max_tokens_per_microbatch)
    share = cfg.gpu_mem_util * (total / 1e9 if cfg.gpu_mem_util < 1 else 1)
    return sum(predicted.values()) + share


def flops_of(given, responses):
    """Model FLOPs of the last update, as gpu_update counts them."""
    from transformers import AutoConfig
    from support import tasks
    model_id = given.get("model_id", tasks.TINY)
    config = AutoConfig.from_pretrained(model_id)
    return gpu_update.model_flops(config, responses, False)


# 3. Sampler beside trainer

class Pair:
    """A model as the trainer has it and as vLLM has it."""

    def __init__(self, folder, shape, dtype, eager, peaked, n_prompts=16, length=48):
        self.bf16 = dtype != "float32"
        self.dtype = getattr(torch, dtype)
        device = torch.device("cuda" if ON_GPU else "cpu")
        tied = shape.pop("tied", True)
        model_folder = folder / "model"
        if not model_folder.is_dir():
            bench.make_folder(folder, **shape, tied=tied, new_tokens=length)
        self.policy, tokenizer = starter.init_policy(model_folder, device)
        with torch.no_grad():  # log-probs of random weights are all alike
            self.policy.base_model.norm.weight.mul_(peaked)
        self.policy.get_output_embeddings().__class__ = HeadOfVLLM
        vocabulary = self.policy.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        self.prompts = [torch.randint(2, vocabulary, (20 + i % 5,), generator=generator).tolist()
                        for i in range(n_prompts)]
        self.cfg = starter.cfg_with(preset="qwen3-1.7b", max_new_tokens=length, bf16=self.bf16,
                                    stop_token_ids=(vocabulary - 1,))
        change_vllm(eager, dtype)
        from support import edits, engines
        starter.MECHANICS.clear()
        engines.attach()
        edits.install(load_weights_in_worker=engines.load_weights_in_worker)
        self.llm = starter.init_vllm(model_folder, 0, 128, 2 if ON_GPU else 1, self.bf16)

    def sync(self):
        starter.load_policy_into_vllm_instance(self.policy, self.llm)

    @torch.no_grad()
    def logits(self, responses):
        """Yields each Response with the trainer's (T, V) logits of its tokens."""
        for r in responses:
            ids = torch.tensor([[*r.prompt_ids, *r.response_ids]], device=self.policy.device)
            with half_precision(self.dtype), torch.autocast(
                    self.policy.device.type, torch.bfloat16, enabled=self.bf16):
                logits = self.policy(input_ids=ids[:, :-1], use_cache=False).logits[0]
            yield r, logits[len(r.prompt_ids) - 1:].float()

    def sample(self, group_size=4, temperature=1.0):
        return starter.rollout_with_vllm(self.llm, self.prompts, self.cfg, 1, group_size,
                                         temperature)

    def errors(self, responses):
        """Returns a tensor of |log-prob of the sampler - that of the trainer|."""
        errors = []
        for r, logits in self.logits(responses):
            ids = torch.tensor(r.response_ids, device=logits.device)
            ours = logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]
            errors.append((ours - torch.tensor(r.log_probs, device=ours.device)).abs())
        return torch.cat(errors)

    def greedy(self):
        """Returns the share of vLLM's greedy tokens that are best for the trainer, too, and by how
        many nats the others are worse at most."""
        behind = []
        for r, logits in self.logits(self.sample(1, 0.0)):
            ids = torch.tensor(r.response_ids, device=logits.device)
            chosen = logits.gather(1, ids[:, None])[:, 0]
            behind.append(logits.max(dim=1).values - chosen)
        behind = torch.cat(behind)
        return (behind == 0).float().mean().item(), behind.max().item()


def sync_row(tied, rehearse, eager):
    """Returns the columns of a model whose layer is scaled and handed over."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder), SMALL_SHAPE | dict(tied=tied), "bfloat16", eager, 4.0)
        pair.sync()
        before = pair.errors(pair.sample())
        with torch.no_grad():
            layer = pair.policy.base_model.layers[2]
            layer.mlp.down_proj.weight.mul_(8.0)
            pair.policy.get_input_embeddings().weight[:, ::2].mul_(1.5)
            if not tied:
                pair.policy.get_output_embeddings().weight[:, ::3].mul_(0.5)
        stale = pair.errors(pair.sample())
        begun = synchronized()
        pair.sync()
        seconds = synchronized() - begun
        responses = pair.sample()
        after = pair.errors(responses)
        again = pair.sample() == responses
        same, behind = pair.greedy()
    return {"diff_before": f"{before.mean().item():.2g}",
            "diff_stale": f"{stale.mean().item():.2g}",
            "diff_after": f"{after.mean().item():.2g}", "diff_max": f"{after.max().item():.2g}",
            "greedy_same": f"{same:.4f}", "greedy_behind": f"{behind:.2g}",
            "same_twice": again, "sync_s": f"{seconds:.3f}"}


PAIRS = {}


def difference_row(dtype, sums, rehearse, eager, folder):
    """Returns the columns of a dtype. One engine serves both kinds of its head."""
    shape = dict(SMALL_SHAPE if rehearse else bench.QWEN3["Qwen3-0.6B"])
    if dtype not in PAIRS:
        PAIRS.clear()
        PAIRS[dtype] = Pair(folder, shape, dtype, eager, 10.0, n_prompts=32, length=64)
        PAIRS[dtype].sync()
    pair = PAIRS[dtype]
    SUMS["in float32"] = sums
    errors = pair.errors(pair.sample())
    same, behind = pair.greedy()
    return {"dtype": dtype, "head": "float32 sums" if sums else dtype,
            "sampler_diff": f"{errors.mean().item():.3g}",
            "diff_p99": f"{errors.quantile(0.99).item():.3g}",
            "diff_max": f"{errors.max().item():.3g}", "tokens": len(errors),
            "greedy_same": f"{same:.4f}", "greedy_behind": f"{behind:.2g}"}


def row_of(name, rehearse, eager, folder):
    way = dict(ROWS[name])
    way.pop("instead_of", None)
    if "run" in way:
        eager |= way.pop("eager", False)
        return run(way.pop("run"), rehearse, eager, **way)
    if "sync" in way:
        return sync_row(way["sync"], rehearse, True)
    return difference_row(way["dtype"], way["sums"], rehearse, True, folder)


def main():
    """Prints "begin NAME" and "row {...}" for each of the rows named on the command line."""
    parser = argparse.ArgumentParser(description="rows with vLLM, for lab.gpu")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args()
    print("\nbegin", given.names[0], flush=True)
    print("\nwhere", json.dumps(gpu_update.where_on_gpu()), flush=True)
    import vllm
    change_head()
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names:
            print("\nbegin", name, flush=True)
            columns = row_of(name, given.rehearse, given.eager, Path(folder))
            eager = given.eager or ROWS[name].get("eager", "run" not in ROWS[name])
            columns |= {"eager": eager, "vllm": vllm.__version__}
            print("\nrow", json.dumps({"row": name} | columns), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's exit handlers may wait
