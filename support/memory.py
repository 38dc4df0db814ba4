"""How much memory a run takes, and what is done where it is too little."""

import math
import os
import re

import psutil  # comes with peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import starter
from support import edits, ranks


def linear_layers(model):
    """The linear layers, without the LM head."""
    head = model.get_output_embeddings()
    kinds = torch.nn.Linear, Conv1D
    return [x for x in model.modules() if isinstance(x, kinds) and x is not head]


def without_memory(config):
    """The model of a transformers config, without memory for its weights: all can be counted."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def predicted_gb(config, cfg, n_tokens, n_processes=1):
    """A transformers config, main()'s settings, tokens of a microbatch, processes that divide the
    model -> gigabytes in use on each one's GPU when most is: in the update, or while the weights
    are handed over or saved.

    For the backward pass a token keeps about 4 bytes (5 in float32) for each input and output of a
    linear layer, and two layers' worth more while the backward pass is in one of them.
    """
    model = without_memory(config)
    config = config.get_text_config()
    layers = linear_layers(model)
    sides = sum(sum(layer.weight.shape) for layer in layers)  # inputs + outputs
    n_linear = sum(layer.weight.numel() for layer in layers)
    n_head = config.vocab_size * config.hidden_size
    n_all = model.num_parameters()
    is_stored = cfg.frozen_in_bf16 and cfg.precision != "float32"
    n_stored = n_linear if is_stored else 0  # in 16 bits
    is_divided = n_processes > 1

    # In bytes: weights; what an update, and a sync with vLLM or a saved model, take besides
    weights = 4 * n_all
    update = 20 * min(n_tokens * config.vocab_size, starter.LOGITS_AT_ONCE)
    sync = 0
    n_learning = n_all
    n_cast = n_all - n_head
    if cfg.lora_rank:
        n_learning = cfg.lora_rank * sides
        n_cast -= n_stored
        weights += 4 * n_learning - 2 * n_stored
        if not is_divided:
            sync = 4 * n_linear  # with the adapters added, all of them at once
    elif not is_divided:
        update += 4 * n_head
    # Of several processes LoRA's reference is a copy
    has_copy = cfg.use_kl_penalty and not cfg.ref_model_id and (is_divided or not cfg.lora_rank)
    if has_copy:
        weights += 4 * n_all - 2 * n_stored
    if cfg.ref_model_id:  # a teacher, all of whose logits are made at once
        teacher = without_memory(AutoConfig.from_pretrained(cfg.ref_model_id))
        weights += 4 * teacher.num_parameters()  # less with frozen_in_bf16
        update += 4 * n_tokens * config.vocab_size
    staying = (weights + 12 * n_learning) / n_processes  # with gradients and moments
    in_layers = 5 * sides  # by a token
    of_vllm = 4  # by a weight
    if cfg.precision != "float32":
        in_layers = 4 * sides
        of_vllm = 2
        if not is_divided:
            update += 2 * n_cast  # copies by autocast
    if is_divided:
        update += joined_bytes(n_all, n_head, config, cfg, of_vllm)
    in_two = 2 * in_layers / config.num_hidden_layers
    if cfg.gradient_checkpointing:
        in_layers = in_two / 2 + 4 * config.hidden_size * config.num_hidden_layers
    update += n_tokens * (in_layers + in_two + 14 * config.hidden_size)
    if cfg.engine == "vllm":
        update += 6 * n_head  # the head rounds as vLLM's does
        sync += of_vllm * n_head  # it reads each layer into a new one; the largest is the embedding
        if cfg.gpu_mem_util >= 1:  # else this is within its share
            staying += of_vllm * n_all / cfg.vllm_tp + 0.5e9  # and buffers
    return (staying + max(update, sync)) / 1e9


def joined_bytes(n_all, n_head, config, cfg, of_layers):
    """What a process holds of the others' parts while a model is run: embedding or head, in
    float32, with its gradient; and two layers, of_layers bytes a weight, with the gradients of
    one. Where it samples by transformers: all layers, and both of the first."""
    n_outside = n_head * (1 if config.tie_word_embeddings else 2)
    n_layers = n_all - n_outside
    n_layer = n_layers / config.num_hidden_layers
    if cfg.engine == "vllm":
        joined = 4 * n_head + 2 * of_layers * n_layer
    else:
        joined = 4 * n_outside + of_layers * n_layers
    return joined + 4 * n_head + (of_layers + 4) * n_layer


def free_gb(cfg):
    """Returns the free memory of a GPU, less vLLM's share or cache, what a Mac lends to its, or the
    free memory of this machine."""
    if cfg.device.type == "mps":
        return torch.mps.recommended_max_memory() / 1e9
    if cfg.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(cfg.device)
        if cfg.engine == "vllm":
            free -= cfg.gpu_mem_util * (total if cfg.gpu_mem_util < 1 else 1e9)
        return free / 1e9
    return psutil.virtual_memory().available / 1e9


def check_fits(cfg):
    """Raises InputError where the model cannot be trained in the free memory, even with one
    response at a time, and says what takes less; or where vLLM's share has no room for it. A model
    that cannot be counted passes."""
    free = min(ranks.gather([free_gb(cfg)]))
    if cfg.device.type == "cpu":  # which the processes of a machine share
        free /= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    n_tokens = cfg.max_new_tokens + 150  # of the prompt, which is not known yet
    try:
        config = AutoConfig.from_pretrained(cfg.model_id, trust_remote_code=False)
        needed = predicted_gb(config, cfg, n_tokens, ranks.WORLD)
        of_vllm = vllm_gb(config, cfg)
    except Exception:  # whatever others wrote into its files: init_policy says what is wrong
        return
    if needed > free:
        of_each = f" in each of {ranks.WORLD} processes" if ranks.WORLD > 1 else ""
        in_bf16 = ' with precision = "bf16"' if cfg.precision == "float32" else ""
        raise starter.InputError(
            f"model_id = {str(cfg.model_id)!r} needs about {needed:.1f} GB{of_each} with these "
            f"settings, even for one response at a time, and {free:.1f} GB are free; set lora_rank "
            f"= 16, gradient_checkpointing = True and frozen_in_bf16 = True{in_bf16}, take a "
            "smaller model, or more GPUs (docs/hardware.md)"
        )
    if cfg.engine == "vllm" and cfg.device.type == "cuda" and cfg.gpu_mem_util < 1:
        share = cfg.gpu_mem_util * torch.cuda.mem_get_info(cfg.device)[1] / 1e9
        if of_vllm + 1 > share:
            raise starter.InputError(
                f"gpu_mem_util = {cfg.gpu_mem_util} is {share:.1f} GB, of which the weights take "
                f"{of_vllm:.1f} in vLLM, so that there is no room for its cache; set gpu_mem_util "
                "= 4, which is GB of the cache alone, or divide them by vllm_tp = 2"
            )


def vllm_gb(config, cfg):
    """Gigabytes of the weights in vLLM, on one GPU."""
    by_a_weight = 4 if cfg.precision == "float32" else 2
    return by_a_weight * without_memory(config).num_parameters() / cfg.vllm_tp / 1e9


def store_frozen_in_bf16(policy, ref_model, cfg):
    """Stores the linear layers that do not learn in 16 bits. Autocast rounds them so in any case:
    the log-probs keep their bits, but for layers that compute in float32 in spite of it."""
    if cfg.precision == "float32":
        print("frozen_in_bf16 = True changes nothing: the precision is float32")
        return
    for model in filter(None, (policy, ref_model)):
        for layer in linear_layers(model):
            if not layer.weight.requires_grad:
                layer.to(starter.DTYPES[cfg.precision])


# Of this process's run: the run itself, and its optimiser, for what is done where memory runs out
RUN = {}


def resume(run, optimizer):
    """Later microbatches are cut as they were before the run was stopped, so that it gives the same
    bits."""
    RUN.update(run=run, optimizer=optimizer)
    of_state = run.state.get("max_tokens", math.inf)
    run.cfg.max_tokens_per_microbatch = min(of_state, run.cfg.max_tokens_per_microbatch)


def cut_to(microbatches, max_tokens):
    """Cuts microbatches of more tokens into some of at most these, in their places."""
    parts = []
    for microbatch in microbatches:
        n_rows, width = microbatch["labels"].shape
        for indices in torch.arange(n_rows).split(max(1, max_tokens // width)):
            if len(indices) == n_rows:
                parts.append(microbatch)  # itself: an edit may keep something in it
            else:
                parts.append(starter.keep_rows(microbatch, indices))
    microbatches[:] = parts


def is_lack(error):
    """Whether memory ran out, in the words of a GPU or of a CPU."""
    words = (
        "out of memory|can't allocate memory|_STATUS_ALLOC_FAILED"  # that of cuBLAS, for example
    )
    return isinstance(error, RuntimeError) and bool(re.search(words, str(error)))


def forget_gradients(policy):
    """Also those of the optimiser's other parameters, which an edit may have added."""
    policy.zero_grad()
    if "optimizer" in RUN:
        RUN["optimizer"].zero_grad()


def add_up_gradients(policy, microbatches, *others):
    """Like starter.add_up_gradients. Where memory runs out, nothing is left of the attempt: the
    microbatches, of this step and of later ones, are halved, and this step begins again."""
    while True:
        try:
            return edits.OWN["add_up_gradients"](policy, microbatches, *others)
        except RuntimeError as error:
            largest = max(microbatches, key=lambda microbatch: microbatch["labels"].numel())
            n_rows, width = largest["labels"].shape
            if n_rows == 1 or not is_lack(error):
                raise
        forget_gradients(policy)
        run = RUN["run"]
        run.state["max_tokens"] = run.cfg.max_tokens_per_microbatch = n_rows // 2 * width
        print(f"Warning: out of memory: microbatches of {n_rows // 2 * width} tokens from here on")
        cut_to(microbatches, n_rows // 2 * width)
