"""How much memory a run takes, and what is done where it is too little."""

import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import torch

import starter
from support import edits

PROMPT = 150  # tokens, where no prompt is known yet


def linear_layers(model):
    """The linear layers, without the LM head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    kinds = (torch.nn.Linear, Conv1D)
    return [x for x in model.modules() if isinstance(x, kinds) and x is not head]


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
    head = model.get_output_embeddings()
    ends = {*model.get_input_embeddings().parameters(), *head.parameters()}  # one if tied
    n_ends = sum(p.numel() for p in ends)
    n_all = sum(p.numel() for p in model.parameters())
    n_body = n_all - n_ends
    n_head = config.vocab_size * config.hidden_size
    sides = sum(sum(layer.weight.shape) for layer in linear_layers(model))  # inputs + outputs
    has_copy = cfg.use_kl_penalty and not cfg.lora_rank  # of the model, as reference

    # Weights, in bytes
    n_learning = n_all
    whole = frozen = 4 * n_all
    n_cast = n_body  # autocast copies them; the reference's copies are gone by then
    if cfg.frozen_in_bf16:
        frozen -= 2 * n_body
    sizes = {"weights": whole}
    if cfg.lora_rank:
        n_learning = cfg.lora_rank * sides
        sizes = {"weights": frozen, "adapters": 4 * n_learning}
        if cfg.frozen_in_bf16:
            n_cast = n_learning
    if has_copy:
        sizes["reference"] = frozen
    sizes["gradients"] = 4 * n_learning
    sizes["moments"] = 8 * n_learning
    sizes = {name: size / ranks for name, size in sizes.items()}

    # What the passes take besides
    sizes["head"] = 20 * min(n_tokens * config.vocab_size, starter.LOGITS_AT_ONCE)
    if not cfg.lora_rank:
        sizes["head"] += 4 * n_head
    n_layers = config.num_hidden_layers
    in_layers = 5 * sides  # by a token
    if cfg.precision != "float32":
        in_layers = 4 * sides
        sizes["16-bit copies"] = 2 * n_cast
    in_two = 2 * in_layers / n_layers
    if cfg.gradient_checkpointing:
        in_layers = in_two / 2 + 4 * config.hidden_size * n_layers
    sizes["activations"] = n_tokens * (in_layers + in_two + 14 * config.hidden_size)
    if cfg.engine == "vllm":
        of_weight = 4
        if cfg.precision != "float32":
            of_weight = 2
            sizes["head"] += 6 * n_head  # the head rounds as vLLM's does
        if cfg.gpu_mem_util >= 1:  # else the weights are within its share
            sizes["vLLM"] = of_weight * n_all
    # Loaded whole and in float32, before anything is divided or stored in bf16
    sizes["loading"] = max(0, whole * (1 + has_copy) - sum(sizes.values()))
    return {name: size / 1e9 for name, size in sizes.items()}


def free_gb(cfg):
    """Returns the free memory of a GPU, less vLLM's share or cache, or of this machine where /proc
    tells it, else inf."""
    if cfg.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(cfg.device)
        unit = 1e9
        if cfg.gpu_mem_util < 1:
            unit = total
        if cfg.engine == "vllm":
            free -= cfg.gpu_mem_util * unit
        return free / 1e9
    path = Path("/proc/meminfo")
    if not path.is_file():
        return math.inf
    return int(re.search(r"MemAvailable:\s*(\d+) kB", path.read_text("utf-8"))[1]) * 1024 / 1e9


def check_fits(cfg):
    """Raises InputError where the model cannot be trained in the free memory, even with one
    response at a time, and says what would fit. A model that cannot be counted passes."""
    from transformers import AutoConfig

    n_tokens = cfg.max_new_tokens + PROMPT
    n_ranks = int(os.environ.get("WORLD_SIZE", 1))

    def needed_gb(**changes):
        changed = SimpleNamespace(**{**vars(cfg), **changes})
        return sum(predicted_gb(config, changed, n_tokens, n_ranks).values())

    try:
        config = AutoConfig.from_pretrained(cfg.model_id, trust_remote_code=False)
        needed = needed_gb()
    except Exception:  # whatever others wrote into its files: init_policy says what is wrong
        return
    free = free_gb(cfg)
    if needed <= free:
        return
    remedy = "more memory"
    small = {"lora_rank": 16, "gradient_checkpointing": True}
    smallest = {**small, "frozen_in_bf16": cfg.precision != "float32"}
    for changes in (smallest, small, {"lora_rank": 16}, {"use_kl_penalty": False}):
        if needed_gb(**changes) <= free:  # the last that fits costs least
            remedy = " and ".join(f"{name} = {value}" for name, value in changes.items())
    raise starter.InputError(
        f"model_id = {str(cfg.model_id)!r} needs about {needed:.1f} GB with these settings, even "
        f"for one response at a time; {free:.1f} GB are free; use {remedy}, or a smaller model"
    )


@torch.no_grad()
def store_frozen_in_bf16(policy, ref_model, cfg):
    """Stores the linear layers that do not learn in 16 bits. Autocast rounds them so in any case:
    the log-probs keep their bits. Raises InputError for a model where they do not."""
    model = policy if cfg.lora_rank else ref_model  # with LoRA the reference is the policy, too
    ids = torch.arange(16, device=policy.device)[None]
    before = starter.get_response_log_probs(model, ids, ids, ids >= 0, precision=cfg.precision)
    for layer in linear_layers(model):
        if not layer.weight.requires_grad:
            layer.to(starter.DTYPES[cfg.precision])
    after = starter.get_response_log_probs(model, ids, ids, ids >= 0, precision=cfg.precision)
    if not torch.equal(before, after):
        raise starter.InputError(
            f"frozen_in_bf16 = True changes the log-probs of {type(model).__name__}; leave it out"
        )


def is_out_of_memory(error):
    """Whether torch raised it because memory ran out. The first words are a GPU's."""
    return "out of memory" in str(error) or "can't allocate memory" in str(error)


def step_in_parts(step, policy, rows, n, *others):
    """Does a microbatch n rows at a time. Returns the loss and the means of all."""
    mask = rows["response_mask"]
    if len(mask) <= n:
        return step(policy, rows, *others)
    loss = 0.0
    means = {}
    old_log_probs = []
    for start in range(0, len(mask), n):
        part = starter.keep_rows(rows, slice(start, start + n))
        part_loss, part_means = step(policy, part, *others)
        loss += part_loss
        starter.add_scaled(means, part_means, part["response_mask"].sum() / mask.sum())
        old_log_probs.append(part["old_log_probs"])
    rows["old_log_probs"] = torch.cat(old_log_probs)  # for the next epoch
    return loss, means


def attach(run):
    """Where memory runs out, nothing is left of the attempt: the microbatches of this optimiser
    step so far are repeated in smaller parts. Later ones are cut so from the start, also after a
    resume, for which run.state keeps their size."""
    cfg = run.cfg
    step = starter.grpo_microbatch_step
    done = []  # microbatches whose gradients the policy holds
    if run.state.get("max_tokens", math.inf) < cfg.max_tokens_per_microbatch:
        cfg.max_tokens_per_microbatch = run.state["max_tokens"]
        print(
            f"microbatches of {cfg.max_tokens_per_microbatch} tokens, since memory ran out before"
        )

    def grpo_microbatch_step(policy, rows, *others):
        if all(p.grad is None for p in policy.parameters()):
            done.clear()
        done.append(rows)
        todo = [rows]
        while True:
            try:
                for rows in todo:
                    n = max(1, cfg.max_tokens_per_microbatch // rows["labels"].shape[1])
                    result = step_in_parts(step, policy, rows, n, *others)
                return result
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            policy.zero_grad()
            todo = done
            n_rows, width = rows["labels"].shape
            n = min(n, n_rows) // 2
            if n == 0:
                raise starter.RunStopped(
                    "out of memory with a single response at a time; lower max_new_tokens, set "
                    "gradient_checkpointing = True, or take a smaller model; then resume"
                )
            cfg.max_tokens_per_microbatch = run.state["max_tokens"] = n * width
            print(f"Warning: out of memory: microbatches of {n * width} tokens from here on")

    edits.wrap(grpo_microbatch_step=grpo_microbatch_step)
