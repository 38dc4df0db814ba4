"""The update of Qwen3-1.7B's shape on one GPU in several ways: the first part of lab.gpu.

A row is the whole update of 128 responses of 256 random tokens to 16 prompts of about 90: layout,
gradients by starter.py with support/fast.py, the gradient's norm, AdamW. The weights are random,
and the learning rate is 0, so that every way computes the same. One process measures all rows in
turns on one model.

share is model FLOPs / seconds / 989 TFLOP/s, an H100's peak in bf16. Model FLOPs are
    6 x parameters of the layers x tokens read            2 forward, 4 backward
  + 6 x parameters of the head x tokens of the responses
  + 12 x layers x heads x head size x (query, key) pairs that a causal mask admits
with the prompt of each row counted and padding not. What is computed a second time, as the head's
logits are, counts once. With the reference 2 is added to both 6, and 4 to the 12. share_once is the
same with a prompt counted once for its group.
"""
import argparse
import contextlib
import copy
import json
import math
import os
import random
import statistics
import sys
import time
import traceback

import torch

import starter
from lab import bench
from lab.gpu import UPDATE as ROWS
from lab.rows import where
from support import fast, memory

PEAK = 989e12
SHAPE = bench.QWEN3["Qwen3-1.7B"]
SMALL_SHAPE = dict(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96,
                   vocabulary=1_000)


# 1. Time by parts

class Clock:
    """Adds up seconds of the parts of an update, by CUDA's events, without waiting for them."""

    def __init__(self, device):
        self.on_gpu = device.type == "cuda"
        self.marks = []

    def now(self):
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(self, name, function):
        def call(*args, **settings):
            start = self.now()
            result = function(*args, **settings)
            self.marks.append((name, start, self.now()))
            return result

        return call

    def seconds(self):
        """Returns {name: seconds} since the last call."""
        if self.on_gpu:
            torch.cuda.synchronize()
        sums = {}
        for name, start, end in self.marks:
            passed = start.elapsed_time(end) / 1e3 if self.on_gpu else end - start
            sums[name] = sums.get(name, 0.0) + passed
        self.marks.clear()
        return sums


def watch_parts(clock):
    """Puts the clock around the parts. The head's backward pass lies within torch's."""
    fast.hidden_states = clock.timed("hidden", fast.hidden_states)
    fast.Recomputed.backward = staticmethod(clock.timed("head", fast.Recomputed.backward))
    torch.autograd.backward = clock.timed("backward", torch.autograd.backward)
    starter.MECHANICS["token_statistics"] = clock.timed("forward", fast.token_statistics)


def parts_of(seconds):
    """Seconds as the clock counts them -> those of layers, head with statistics, optimiser."""
    layers = seconds["hidden"] + seconds["backward"] - seconds.get("head", 0.0)
    head = seconds["forward"] - seconds["hidden"] + seconds.get("head", 0.0)
    return {"layers_s": layers, "head_s": head, "optimiser_s": seconds["optimiser"],
            "rest_s": seconds["whole"] - layers - head - seconds["optimiser"]}


# 2. What is updated

def made_up_step(shape, n_prompts, group_size, prompt_length, length):
    """Returns Responses of random tokens and random advantages."""
    draw = random.Random(0)
    vocabulary = shape.get("vocabulary") or 151_936
    responses = []
    for _ in range(n_prompts):
        n = prompt_length + draw.randint(-5, 5)
        prompt = [draw.randrange(vocabulary) for _ in range(n)]
        for _ in range(group_size):
            ids = [draw.randrange(vocabulary) for _ in range(length)]
            responses.append(starter.Response(prompt, ids, [-12.0] * length, False))
    torch.manual_seed(0)
    return responses, torch.randn(len(responses))


def model_flops(config, responses, has_reference, prompts_once=False):
    """The formula above."""
    with torch.device("meta"):
        model = starter_model(config)
    head = model.get_output_embeddings().weight.numel()
    layers = sum(p.numel() for p in model.base_model.layers.parameters())
    read = pairs = answered = 0
    seen = set()
    for response in responses:
        before, after = len(response.prompt_ids) - 1, len(response.response_ids)
        shared = before if prompts_once and tuple(response.prompt_ids) in seen else 0
        seen.add(tuple(response.prompt_ids))
        n = before + after
        read += n - shared
        pairs += n * (n + 1) // 2 - shared * (shared + 1) // 2
        answered += after
    passes = 8 if has_reference else 6
    size = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return passes * (layers * read + head * answered) + 2 * passes * size * pairs


def starter_model(config):
    from transformers import Qwen3ForCausalLM
    model = Qwen3ForCausalLM(config).eval()
    model.lm_head.__class__ = starter.Float32Head
    return model


@contextlib.contextmanager
def half_precision(dtype):
    """Makes autocast to bf16 one to this dtype."""
    shipped = torch.autocast

    def autocast(device_type, dtype=None, *others, **settings):
        return shipped(device_type, wanted if dtype == torch.bfloat16 else dtype, *others,
                       **settings)

    wanted = dtype
    if wanted != torch.bfloat16:
        torch.autocast = autocast
    try:
        yield
    finally:
        torch.autocast = shipped


class Bench:
    """One model, its optimiser, one step's responses, and the ways in which they are updated."""

    def __init__(self, rehearse, best):
        self.device = torch.device("cpu" if rehearse else "cuda")
        self.rehearse = rehearse
        shape = SMALL_SHAPE if rehearse else SHAPE
        size = (4, 4, 9, 12) if rehearse else (16, 8, 90, 256)
        self.config = bench.qwen3_config(**shape)
        self.responses, self.advantages = made_up_step(shape, *size)
        self.rounds = 2 if rehearse else 3
        torch.manual_seed(0)
        with self.device:
            self.policy = starter_model(self.config)
        self.cfg = starter.cfg_with(preset="qwen3-1.7b", device=self.device.type, bf16=True,
                                    engine="transformers", max_new_tokens=size[3],
                                    learning_rate=0.0)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), 0.0, betas=(0.9, 0.95),
                                           fused=True)
        self.reference = None
        self.own_attention = self.policy.config._attn_implementation
        self.shipped_slices = dict(fast.LOGITS_AT_ONCE)
        if rehearse:
            self.shipped_slices = {"cpu": 7_000, "gpu": 7_000}  # several slices of a microbatch
        self.expected = {}
        self.best = best
        self.seconds = {}
        problems = [[{"prompt_ids": r.prompt_ids} for r in self.responses]]
        started = time.perf_counter()
        fast.attach(self.policy, None, problems, self.cfg)
        self.policy.set_attn_implementation(self.own_attention)  # on a CPU: as on a GPU
        print(f"attached in {time.perf_counter() - started:.1f} s: {sorted(starter.MECHANICS)}",
              flush=True)
        self.clock = Clock(self.device)
        watch_parts(self.clock)

    def use(self, way):
        """Turns the switches."""
        way = dict(way)
        if way.pop("best", False):
            way = ROWS[self.best] | way
        way.pop("profile", None)
        self.precision = getattr(torch, way.pop("precision", "bfloat16"))
        self.cfg.max_tokens_per_microbatch = way.pop("max_tokens", 4_096)
        if self.rehearse:
            self.cfg.max_tokens_per_microbatch //= 40
        self.cfg.use_kl_penalty = way.pop("use_kl_penalty", False)
        self.cfg.kl_coef = 0.3
        starter.Float32Head.rounds = way.pop("rounds", False)
        slices = way.pop("slices", None)
        fast.LOGITS_AT_ONCE.update(self.shipped_slices)
        if slices is not None:
            fast.LOGITS_AT_ONCE["gpu"] = slices
            if self.rehearse:
                fast.LOGITS_AT_ONCE["cpu"] = slices // 10_000
        if self.cfg.use_kl_penalty and self.reference is None:
            fast.compile_layers(self.policy, False)
            self.reference = copy.deepcopy(self.policy).requires_grad_(False)
            for layer in memory.linear_layers(self.reference):  # frozen_in_bf16
                layer.to(torch.bfloat16)
        if not self.cfg.use_kl_penalty:
            self.reference = None
        compiled = way.pop("layers", False)
        attention = way.pop("attention", self.own_attention)
        for model in (self.policy, self.reference):
            if model is not None:
                model.set_attn_implementation(attention)
                fast.compile_layers(model, compiled)
                vars(model.get_output_embeddings()).pop("rounded", None)
        for name in vars(fast.SWITCHES):
            setattr(fast.SWITCHES, name, way.pop(name, False))
        assert not way, way
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def microbatches(self, some=slice(None)):
        batch = starter.make_batch(self.responses[some], self.advantages[some], self.device)
        batch |= starter.weights_of_tokens(batch, self.responses[some], self.cfg,
                                           self.reference is not None)
        return starter.cut_microbatches(batch, self.cfg.max_tokens_per_microbatch)

    def gradients(self, microbatches):
        with half_precision(self.precision):
            return starter.accumulate_gradients.__wrapped__(
                self.policy, microbatches, self.cfg, self.reference, self.cfg.kl_coef)

    def update(self):
        """One update, as in starter.train. Returns the number of microbatches."""
        microbatches = self.microbatches()
        self.gradients(microbatches)
        start = self.clock.now()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0).item()
        if math.isfinite(norm):  # in fp16 it may not be
            self.optimizer.step()
        else:
            print("the gradient is not finite: no step", flush=True)
        self.optimizer.zero_grad()
        self.clock.marks.append(("optimiser", start, self.clock.now()))
        return len(microbatches)

    def outputs(self):
        """Log-probs and some of the gradient of the first rows, of more than one prompt."""
        microbatch, = self.microbatches(slice(0, 10))
        self.gradients([microbatch])
        mask = microbatch["response_mask"]
        log_probs = microbatch["old_log_probs"][mask]
        gradient = torch.cat([p.grad.flatten()[::max(1, p.numel() // 100_000)]
                              for p in self.policy.parameters()])
        self.policy.zero_grad()
        return log_probs.detach().double().cpu(), gradient.double().cpu()

    def expect(self):
        """Computes what each way is compared with: plain functions in bf16, and in float32."""
        self.use({})
        self.cfg.max_tokens_per_microbatch = 4_096
        quick = starter.MECHANICS.pop("token_statistics")
        try:
            for name, bf16 in (("plain", True), ("float32", False)):
                self.cfg.bf16 = bf16
                self.expected[name] = self.outputs()
        finally:
            self.cfg.bf16 = True
            starter.MECHANICS["token_statistics"] = quick
        self.clock.seconds()

    def numerics(self):
        """Columns: how far log-probs and gradients are from those expected."""
        most = self.cfg.max_tokens_per_microbatch
        self.cfg.max_tokens_per_microbatch = 4_096
        log_probs, gradient = self.outputs()
        self.cfg.max_tokens_per_microbatch = most
        columns = {}
        for name, (of_log_probs, of_gradient) in self.expected.items():
            error = (log_probs - of_log_probs).abs()
            far = (gradient - of_gradient).norm() / of_gradient.norm()
            columns |= {f"logp_max_{name}": f"{error.max().item():.2g}",
                        f"logp_mean_{name}": f"{error.mean().item():.2g}",
                        f"gradient_{name}": f"{far.item():.2g}"}
        return columns

    def row(self, name):
        """Returns the columns of a row."""
        way = ROWS[name]
        if not self.expected:
            self.expect()
        self.use(way)
        if way.get("profile"):
            return self.profile(name)
        begun = time.perf_counter()
        columns = {} if way.get("use_kl_penalty") else self.numerics()
        self.update()  # the first one compiles
        self.clock.seconds()
        first = time.perf_counter() - begun
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        measured = []
        for _ in range(self.rounds):
            n_microbatches = self.clock.timed("whole", self.update)()
            seconds = self.clock.seconds()
            measured.append(parts_of(seconds) | {"s": seconds["whole"]})
        gb = torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else 0.0
        median = {part: statistics.median(x[part] for x in measured) for part in measured[0]}
        n_tokens = sum(len(r.prompt_ids) + len(r.response_ids) - 1 for r in self.responses)
        flops = [model_flops(self.config, self.responses, self.reference is not None, once)
                 for once in (False, True)]
        self.cfg.frozen_in_bf16 = self.reference is not None
        formula = sum(memory.predicted_gb(self.config, self.cfg,
                                          self.cfg.max_tokens_per_microbatch).values())
        if not way.get("use_kl_penalty") and "precision" not in way:
            self.seconds[name] = median["s"]
            self.best = min(self.seconds, key=self.seconds.get)
        return {
            "s": f"{median['s']:.3f}", "min_s": f"{min(x['s'] for x in measured):.3f}",
            "max_s": f"{max(x['s'] for x in measured):.3f}",
            **{part: f"{median[part]:.3f}" for part in median if part != "s"},
            "first_s": f"{first:.1f}", "tokens_per_s": f"{n_tokens / median['s']:.0f}",
            "share": f"{flops[0] / median['s'] / PEAK:.3f}",
            "share_once": f"{flops[1] / median['s'] / PEAK:.3f}",
            "gb": f"{gb:.1f}", "formula_gb": f"{formula:.1f}", "microbatches": n_microbatches,
            "of": self.best if way.get("best") else "", **columns}

    def profile(self, name):
        """Writes the kernels that take longest in one microbatch into a text file."""
        from torch.profiler import ProfilerActivity, profile
        self.gradients(self.microbatches()[:1])
        on_gpu = self.device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
        microbatches = self.microbatches()[:1]
        with profile(activities=kinds, acc_events=True) as seen:
            self.gradients(microbatches)
            if on_gpu:
                torch.cuda.synchronize()
        self.policy.zero_grad()
        self.clock.seconds()
        averages = seen.key_averages()
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        kernels = sorted((x for x in averages if getattr(x, order) > 0
                          and (not on_gpu or x.device_type != torch.autograd.DeviceType.CPU)),
                         key=lambda x: -getattr(x, order))
        lines = [f"{name}: one microbatch, {microbatches[0]['labels'].numel()} tokens, way of "
                 f"{self.best if ROWS[name].get('best') else 'shipped'}; kernels by time in ms"]
        total = sum(getattr(x, order) for x in kernels)
        lines.append(f"all {total / 1e3:9.2f}  {sum(x.count for x in kernels)} calls")
        lines += [f"{getattr(x, order) / 1e3:9.2f} {100 * getattr(x, order) / total:5.1f} % "
                  f"{x.count:6} calls  {x.key[:150]}" for x in kernels[:24]]
        waits = sum(x.count for x in averages if "Synchronize" in x.key)
        lines.append(f"{waits} calls of cudaStreamSynchronize and the like")
        text = "\n".join(lines) + "\n\n"
        print(text, flush=True)
        print("\nprofile", json.dumps(text), flush=True)
        return {"of": self.best if ROWS[name].get("best") else "shipped"}


def where_on_gpu():
    """Returns the columns that say what a row was measured with; machine is the card's name."""
    columns = where()
    if torch.cuda.is_available():
        columns["machine"] = torch.cuda.get_device_name()
    return columns


def main():
    """Prints "begin NAME" and "row {...}" for each of the rows named on the command line."""
    parser = argparse.ArgumentParser(description="rows of the update, for lab.gpu")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--best", default="shipped", help="the quickest row so far")
    given = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    print("\nbegin", given.names[0], flush=True)
    print("\nwhere", json.dumps(where_on_gpu()), flush=True)
    made = Bench(given.rehearse, given.best)
    for name in given.names:
        print("\nbegin", name, flush=True)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        try:
            row = made.row(name)
        except Exception as error:
            if "CUDA error" in str(error):
                raise  # nothing more works in this process
            made.policy.zero_grad()
            made.clock.marks.clear()
            row = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
            traceback.print_exc()
        row["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        print("\nrow", json.dumps({"row": name} | row), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a process with compile workers may wait for them
