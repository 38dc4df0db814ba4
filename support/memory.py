"""How much memory a run takes, computed from the sizes of its model before anything is loaded.

python -m lab.bench --memory holds the formula against measurements on a CPU.
"""
import math
import re
from pathlib import Path
from types import SimpleNamespace

import torch

import starter
from support.fast import LOGITS_AT_ONCE

FIXED = ("weights", "gradients", "moments", "reference", "adapters")
LIBRARIES = 0.5e9  # torch and transformers, in the memory of a process on a CPU
FALLBACK_PROMPT = 150  # tokens, where no prompt is known yet


def shape_of(config):
    """A transformers config -> hidden, queries, keys (all heads together), intermediate, layers,
    heads, vocabulary, n_body and n_head (parameters). Raises AttributeError for a model whose
    config names these otherwise."""
    config = config.get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    shape = SimpleNamespace(
        hidden=hidden, heads=heads, queries=heads * head_dim,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        intermediate=config.intermediate_size, layers=config.num_hidden_layers,
        vocabulary=config.vocab_size)
    linears = hidden * (2 * shape.queries + 2 * shape.keys + 3 * shape.intermediate)
    n_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if n_experts:
        raise AttributeError("the formula does not count experts")
    shape.n_body = shape.layers * (linears + 2 * hidden)
    shape.n_head = shape.vocabulary * hidden * (1 if config.tie_word_embeddings else 2)
    return shape


def n_of_adapters(shape, rank):
    """Parameters of LoRA adapters of this rank beside the seven linear layers of each block."""
    sides = (2 * (shape.hidden + shape.queries) + 2 * (shape.hidden + shape.keys)
             + 3 * (shape.hidden + shape.intermediate))
    return shape.layers * rank * sides


def predicted_gb(config, responses, prompts, bf16=True, kl_penalty=False, checkpointing=False,
                 on_cpu=True, max_tokens=8_192, lora_rank=0, ranks=1):
    """Returns {what: gigabytes} in use at the height of the update, from the sizes alone.

    responses, prompts: {"all": tokens of all of them, "longest": of the longest}. ranks: processes
    among which weights, gradients, moments and reference are divided.

    Bytes per token and layer, kept for the backward pass under bf16 autocast: two norms and the
    inputs of six linears 26 H, queries 14 Q, keys 16 K, MLP 8 I, attention 6 for each head and key
    where it is multiplied out (on a CPU). In float32: 24 H, 12 Q, 20 K, 16 I, 4. Two layers' worth
    more while the backward pass is in one of them, and a few slices of logits. With LoRA each
    adapter keeps an input of its own, and there is no second model. Layers that do not learn are
    stored in bf16 where autocast is on and one process has them.
    """
    s = shape_of(config)
    h, q, k, i = s.hidden, s.queries, s.keys, s.intermediate
    all_tokens = responses["all"] + prompts["all"]
    n_tokens = min(max_tokens, all_tokens)
    n_scored = n_tokens * responses["all"] / all_tokens
    at_once = LOGITS_AT_ONCE["cpu" if on_cpu else "cuda"]
    logits = n_scored * min(s.vocabulary, max(64, at_once / n_scored))  # of one slice
    scores = 0
    if on_cpu and not checkpointing:
        scores = s.heads * (responses["longest"] + prompts["longest"])
    kept = 24 * h + 12 * q + 20 * k + 16 * i + 4 * scores
    if bf16:
        kept = 26 * h + 14 * q + 16 * k + 8 * i + 6 * scores
    if lora_rank:
        kept += 6 * h if bf16 else 0
    of_layers = kept + 4 * h * s.layers if checkpointing else kept * s.layers
    n_learning = n_of_adapters(s, lora_rank) if lora_rank else s.n_body + s.n_head
    has_copy = kl_penalty and not lora_rank  # of the model, as reference
    frozen = 2 if bf16 and ranks == 1 else 4  # bytes of a parameter of a frozen layer
    cast = n_learning if lora_rank else s.n_body  # autocast's copies
    if has_copy and frozen == 4:
        cast += s.n_body
    sizes = {
        "libraries": LIBRARIES if on_cpu else 0,
        "weights": ((frozen if lora_rank else 4) * s.n_body + 4 * s.n_head) / ranks,
        "adapters": 4 * n_learning / ranks if lora_rank else 0,
        "gradients": 4 * n_learning / ranks,
        "moments": 8 * n_learning / ranks,
        "reference": (frozen * s.n_body + 4 * s.n_head) * has_copy / ranks,
        "bf16 copies": 2 * cast if bf16 else 0,
        "activations": n_tokens * (of_layers + 2 * kept) + 14 * h * n_scored,
        "head": (0 if lora_rank else 4 * s.vocabulary * h) + 5 * 4 * logits,
    }
    return {name: size / 1e9 for name, size in sizes.items()}


def vllm_gb(config):
    """Returns what a vLLM engine beside the trainer needs: bf16 weights, a cache for some dozens
    of responses, and its own buffers."""
    s = shape_of(config)
    tokens = 64 * 512
    cache = 2 * 2 * s.layers * s.keys * tokens
    return (2 * (s.n_body + s.n_head) + cache) / 1e9 + 1.5


def free_gb(device):
    """Returns the free memory of a GPU, or of this machine where /proc tells it, else inf."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 1e9
    path = Path("/proc/meminfo")
    text = path.read_text("utf-8") if path.is_file() else ""
    found = re.search(r"MemAvailable:\s*(\d+) kB", text)
    return int(found[1]) * 1024 / 1e9 if found else math.inf


def needed_gb(config, cfg, **changes):
    """Returns the least that a run takes, by the formula: one response at a time."""
    changed = SimpleNamespace(**vars(cfg) | changes)
    one = {"all": changed.max_new_tokens, "longest": changed.max_new_tokens}
    prompt = {"all": FALLBACK_PROMPT, "longest": FALLBACK_PROMPT}
    parts = predicted_gb(config, one, prompt, changed.bf16, changed.use_kl_penalty,
                         changed.gradient_checkpointing, changed.device.type == "cpu",
                         one["all"] + prompt["all"], changed.lora_rank, changed.n_ranks)
    engine = vllm_gb(config) if changed.engine == "vllm" else 0.0
    return sum(parts.values()) + engine


def check_fits(model_id, cfg, n_ranks, free=None):
    """Raises starter.InputError where the model cannot be trained in the free memory, whatever the
    microbatches, with what would fit. A model that the formula does not know passes."""
    from transformers import AutoConfig
    try:
        config = AutoConfig.from_pretrained(model_id)
        cfg = SimpleNamespace(**vars(cfg) | {"n_ranks": n_ranks})
        needed = needed_gb(config, cfg)
    except Exception:  # whatever others wrote into its files: init_policy says what is wrong
        return
    free = free_gb(cfg.device) if free is None else free
    if needed <= free:
        return
    remedies = []
    for changes in ({"lora_rank": 16}, {"use_kl_penalty": False},
                    {"lora_rank": 16, "gradient_checkpointing": True}):
        less = needed_gb(config, cfg, **changes)
        if less <= free and not remedies:
            text = " and ".join(f"{name} = {value!r}" for name, value in changes.items())
            remedies.append(f"{text} (about {less:.1f} GB)")
    remedies.append("a smaller model")
    where = "on this GPU" if cfg.device.type == "cuda" else "on this machine"
    raise starter.InputError(
        f"model_id = {str(model_id)!r} needs about {needed:.1f} GB with these settings, even with "
        f"one response at a time, and {free:.1f} GB are free {where}; use {', or '.join(remedies)}")


# --------------------------------------------------------------------------------------------------
# What does not learn, in bf16

def frozen_layers(model):
    """The linear layers whose weights do not learn, without the LM head, whose sums are float32."""
    from transformers.pytorch_utils import Conv1D
    head = model.get_output_embeddings()
    return [module for module in model.modules()
            if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head
            and not module.weight.requires_grad]


@torch.no_grad()
def store_in_bf16(model, prompts, compute):
    """Stores frozen_layers in bf16. Autocast rounds them so in any case: hidden states keep their
    bits. Undoes it, and says so, for a model where they do not."""
    responses = starter.responses_for_check(prompts, 16, model.config.get_text_config().vocab_size)
    rows = starter.make_batch(responses, torch.zeros(len(responses)), model.device)
    before = compute.hidden_states(model, rows, True)
    layers = frozen_layers(model)
    kept = [(parameter, parameter.data) for layer in layers for parameter in layer.parameters()]
    for layer in layers:
        layer.to(torch.bfloat16)
    try:
        reason = "its hidden states change"
        if torch.equal(compute.hidden_states(model, rows, True), before):
            return
    except RuntimeError as error:  # a layer of its own that runs without autocast
        reason = starter.in_one_line(error)
    for parameter, data in kept:
        parameter.data = data
    print(f"frozen layers of {type(model).__name__} stay in float32: {reason}")
