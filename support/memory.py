"""How much memory a run takes, and what is done where it is too little."""
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import torch

import starter
from support import edits, models
from support.fast import LOGITS_AT_ONCE

PROMPT = 150  # tokens, where no prompt is known yet


def linear_layers(model):
    """The linear layers, without the LM head."""
    from transformers.pytorch_utils import Conv1D
    return [module for module in model.modules() if isinstance(module, (torch.nn.Linear, Conv1D))
            and module is not model.get_output_embeddings()]


def predicted_gb(config, cfg, n_tokens, ranks=1):
    """A transformers config, main()'s settings, tokens of a microbatch -> {what: gigabytes} in use
    at the height of the update, or of loading. ranks: processes that divide the weights among
    themselves.

    The model is built without memory for its weights, so that all are counted. For the backward
    pass a token keeps about 4 bytes (5 in float32) for each input and output of a linear layer, and
    two layers' worth more while the backward pass is in one of them.
    """
    from transformers import AutoModelForCausalLM
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config = config.get_text_config()
    ends = {*model.get_input_embeddings().parameters(),
            *model.get_output_embeddings().parameters()}  # one tensor where they are tied
    n_ends = sum(p.numel() for p in ends)
    n_body = sum(p.numel() for p in model.parameters()) - n_ends
    sides = sum(sum(layer.weight.shape) for layer in linear_layers(model))  # inputs + outputs
    n_learning = cfg.lora_rank * sides if cfg.lora_rank else n_body + n_ends
    has_copy = cfg.use_kl_penalty and not cfg.lora_rank  # of the model, as reference
    frozen = 2 if cfg.frozen_in_bf16 else 4  # bytes of a parameter that does not learn
    cast = n_learning if cfg.lora_rank and cfg.frozen_in_bf16 else n_body  # autocast's copies
    cast += n_body if has_copy and not cfg.frozen_in_bf16 else 0
    kept = (4 if cfg.bf16 else 5) * sides / config.num_hidden_layers  # by a token in a layer
    of_layers = kept * config.num_hidden_layers
    if cfg.gradient_checkpointing:
        of_layers = kept + 4 * config.hidden_size * config.num_hidden_layers
    at_once = max(64 * n_tokens, LOGITS_AT_ONCE["cpu" if cfg.device.type == "cpu" else "gpu"])
    logits = min(n_tokens * config.vocab_size, at_once)
    n_head = config.vocab_size * config.hidden_size
    rounded = 6 * n_head if cfg.engine == "vllm" and cfg.bf16 else 0  # see Float32Head
    beside = cfg.engine == "vllm" and cfg.gpu_mem_util >= 1  # its weights; else within its share
    sizes = {
        "libraries": 0.5e9 if cfg.device.type == "cpu" else 0,
        "weights": ((frozen if cfg.lora_rank else 4) * n_body + 4 * n_ends) / ranks,
        "adapters": 4 * n_learning / ranks if cfg.lora_rank else 0,
        "gradients": 4 * n_learning / ranks,
        "moments": 8 * n_learning / ranks,
        "reference": (frozen * n_body + 4 * n_ends) * has_copy / ranks,
        "bf16 copies": 2 * cast if cfg.bf16 else 0,
        "activations": n_tokens * (of_layers + 2 * kept + 14 * config.hidden_size),
        "vLLM": (2 if cfg.bf16 else 4) * (n_body + n_ends) * beside,
        "head": (0 if cfg.lora_rank else 4 * n_head) + rounded + 20 * logits,
    }
    # Loaded whole and in float32, before anything is divided or stored in bf16
    sizes["loading"] = max(0, 4 * (n_body + n_ends) * (1 + has_copy) - sum(sizes.values()))
    return {name: size / 1e9 for name, size in sizes.items()}


def free_gb(cfg):
    """Returns the free memory of a GPU, less vLLM's share or cache, or of this machine where /proc
    tells it, else inf."""
    if cfg.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(cfg.device)
        unit = total if cfg.gpu_mem_util < 1 else 1e9
        return (free - cfg.gpu_mem_util * unit * (cfg.engine == "vllm")) / 1e9
    path = Path("/proc/meminfo")
    text = path.read_text("utf-8") if path.is_file() else ""
    found = re.search(r"MemAvailable:\s*(\d+) kB", text)
    return int(found[1]) * 1024 / 1e9 if found else math.inf


def check_fits(cfg):
    """Raises InputError where the model cannot be trained in the free memory, even with one
    response at a time, and says what would fit. A model that cannot be counted passes."""
    from transformers import AutoConfig

    def needed_gb(**changes):
        given = SimpleNamespace(**vars(cfg) | changes)
        n_ranks = int(os.environ.get("WORLD_SIZE", 1))
        return sum(predicted_gb(config, given, cfg.max_new_tokens + PROMPT, n_ranks).values())

    try:
        config = AutoConfig.from_pretrained(cfg.model_id, trust_remote_code=False)
    except Exception:  # whatever others wrote into its files: init_policy says what is wrong
        return
    models.check_type(config, cfg.model_id)
    try:
        needed = needed_gb()
    except Exception:
        return
    free = free_gb(cfg)
    if needed <= free:
        return
    remedy = "more memory"
    small = {"lora_rank": 16, "gradient_checkpointing": True}
    for changes in (small | {"frozen_in_bf16": bool(cfg.bf16)}, small, {"lora_rank": 16},
                    {"use_kl_penalty": False}):  # the last that fits costs least
        if needed_gb(**changes) <= free:
            remedy = " and ".join(f"{name} = {value!r}" for name, value in changes.items())
    raise starter.InputError(
        f"model_id = {str(cfg.model_id)!r} needs about {needed:.1f} GB with these settings, even "
        f"for one response at a time; {free:.1f} GB are free; use {remedy}, or a smaller model")


@torch.no_grad()
def store_frozen_in_bf16(policy, ref_model, cfg):
    """Stores the linear layers that do not learn in bf16. Autocast rounds them so in any case: the
    log-probs keep their bits. Raises InputError for a model where they do not."""
    ids = torch.arange(16, device=policy.device)[None]
    rows = {"input_ids": ids, "labels": ids, "response_mask": ids >= 0}
    model = policy if cfg.lora_rank else ref_model  # with LoRA the reference is the policy, too
    log_probs = []
    for dtype in (torch.float32, torch.bfloat16):
        for layer in linear_layers(model):
            if not layer.weight.requires_grad:
                layer.to(dtype)
        log_probs.append(starter.token_statistics.__wrapped__(model, rows, 1.0, True).log_probs)
    if not torch.equal(*log_probs):
        raise starter.InputError(f"frozen_in_bf16 = True changes the log-probs of "
                                 f"{type(model).__name__}; leave it out")


def is_out_of_memory(error):
    """Whether torch raised it because memory ran out. A CPU, and a GPU that other processes fill,
    say so in words alone."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in (
        "DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory"))


def attach(run):
    """Puts a loop around starter.accumulate_gradients. Where memory runs out, nothing is left of
    the attempt, and the step is repeated with smaller microbatches, which take the place of those
    in the list. Their size is kept in run.state for all later steps.

    Rows without a weight in the means teach nothing by the shipped loss. Then they get no forward
    pass."""
    edited = [name for name in edits.LOSS if not edits.is_shipped(name)]
    if edited:
        print(f"edited: {', '.join(edited)}; so rows without an advantage have a forward pass, too")
        if run.cfg.epochs_per_rollout == 1 and "compute_loss" in edited:
            print("With epochs_per_rollout = 1 the ratio is 1, and what clips it does nothing")

    def accumulate_gradients(policy, microbatches, cfg, ref_model=None, kl_coef=0.0):
        while True:
            counted = [rows for rows in microbatches if edited or rows["mean_weights"].any()
                       or (rows["advantages"] * rows["response_mask"]).any()]  # edited in train
            try:
                return starter.accumulate_gradients.__wrapped__(policy, counted, cfg, ref_model,
                                                                kl_coef)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            policy.zero_grad()
            cfg.max_tokens_per_microbatch = cut_smaller(microbatches, cfg)
            run.state["max_tokens"] = cfg.max_tokens_per_microbatch
            print("Warning: out of memory: microbatches of "
                  f"{cfg.max_tokens_per_microbatch} tokens from here on", flush=True)

    starter.MECHANICS["accumulate_gradients"] = accumulate_gradients


def cut_smaller(microbatches, cfg):
    """Cuts the microbatches of the list into smaller ones. Returns their size in tokens. Raises
    RunStopped where each of them is a single response."""
    smaller = microbatches
    largest = max(rows["labels"].numel() for rows in microbatches)
    max_tokens = min(cfg.max_tokens_per_microbatch, largest)
    while len(smaller) == len(microbatches) and max_tokens > 1:
        max_tokens //= 2
        smaller = [part for rows in microbatches
                   for part in starter.cut_microbatches(rows, max_tokens)]
    if len(smaller) == len(microbatches):
        raise starter.RunStopped(
            "out of memory with a single response at a time; lower max_new_tokens, set "
            "gradient_checkpointing = True, or take a smaller model; then resume")
    microbatches[:] = smaller
    return max_tokens


def go_on(run):
    """A run that is resumed keeps the size of microbatches at which memory did not run out."""
    most = run.state.get("max_tokens", math.inf)
    if most < run.cfg.max_tokens_per_microbatch:
        run.cfg.max_tokens_per_microbatch = most
        print(f"microbatches of {most} tokens: before the resume, memory ran out with larger ones")
