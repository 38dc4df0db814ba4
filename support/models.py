"""Whether starter.py is right for the model that was loaded, asked before it trains."""
import torch
from transformers import AutoModelForCausalLM

import starter
from starter import InputError
from support import edits


def check_type(config, model_id):
    """Raises InputError for a model that transformers has no class for as a model of text alone."""
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise InputError(f"model_id = {str(model_id)!r} is of the type {config.model_type!r}, for "
                         "which transformers has no model of text alone (AutoModelForCausalLM); "
                         "give another model")


def check_reading(policy, prompts, cfg):
    """Raises InputError for a model that padding on the right changes, whose weights a forward pass
    changes, that has no gradient, or that cannot be saved as what it is. One that decodes otherwise
    than it reads is decoded by reading everything again, and the log says so."""
    name = type(policy).__name__
    if type(policy.config) not in AutoModelForCausalLM._model_mapping:
        raise InputError(f"{name} is a part of a larger model, which cannot be saved alone; give "
                         "the folder of a model for text")
    prompts = sorted(prompts, key=len)
    was_training = policy.training
    policy.eval()
    try:
        fault = fault_of_reading(policy, prompts, cfg)
    except Exception as error:  # code of the model's authors
        fault = f"its forward or backward pass fails ({type(error).__name__}: {error!s:.150})"
    policy.zero_grad()
    if fault:
        remedy = ("leave gradient_checkpointing out" if "gradient_checkpointing" in fault else
                  "give another model")
        raise InputError(f"{name} cannot be trained here: {fault}; {remedy}")
    if edits.is_shipped("decode") and not decodes_as_it_reads(policy, prompts, cfg):
        starter.MECHANICS["decode"] = decode_without_cache
        print(f"{name} decodes otherwise than it reads: it samples without a cache, which is slow")
    policy.train(was_training)


def log_softmax(logits):
    return logits.detach().float().log_softmax(dim=-1)


def fault_of_reading(policy, prompts, cfg):
    """Returns what is wrong with a forward and a backward pass, or ""."""
    vocabulary = policy.config.get_text_config().vocab_size
    longest = max(map(len, prompts)) + cfg.max_new_tokens
    checksum = sum(p.detach().double().sum() for p in policy.parameters())
    for prompt in (prompts[0], prompts[-1]):
        n = len(prompt)
        width = max(n + 1, min(longest, starter.LOGITS_AT_ONCE // vocabulary))
        row = torch.tensor([(prompt + prompts[-1] * width)[:width]], device=policy.device)
        with torch.set_grad_enabled(not cfg.lora_rank):  # else there may be no memory for them
            alone = policy(input_ids=row[:, :n], use_cache=False).logits
        if not cfg.lora_rank:
            alone.float().log_softmax(dim=-1)[0, :, 0].sum().backward()
        with torch.no_grad():
            whole = policy(input_ids=row, use_cache=False).logits
            policy.train(cfg.gradient_checkpointing)
            trained = policy(input_ids=row, use_cache=False).logits
        policy.eval()
        difference = (log_softmax(alone) - log_softmax(whole[:, :n])).abs().max().item()
        if not difference < 0.01:
            return f"what stands after a token changes its log-probs by {difference:.2g} nats"
        difference = (log_softmax(whole) - log_softmax(trained)).abs().max().item()
        if not difference < 0.01:
            return (f"in train mode, which gradient_checkpointing needs, its log-probs change by "
                    f"{difference:.2g} nats")
    if not all(p.grad.isfinite().all() for p in policy.parameters() if p.grad is not None):
        return "a gradient is not finite"
    if sum(p.detach().double().sum() for p in policy.parameters()) != checksum:
        return "its forward pass changes its weights"
    return ""


@torch.no_grad()
def decodes_as_it_reads(policy, prompts, cfg):
    """Compares the logits of some tokens after three prompts with those of the row read at once."""
    n_new = min(12, cfg.max_new_tokens)
    try:
        for prompt in (prompts[0], prompts[len(prompts) // 2], prompts[-1]):
            row = torch.tensor([prompt + (prompts[-1] * n_new)[:n_new]], device=policy.device)
            whole = policy(input_ids=row, use_cache=False).logits[0, len(prompt) - 1:-1]
            decoder = starter.decode.__wrapped__(policy, [prompt], cfg)
            steps = [next(decoder)]
            steps += [decoder.send(row[:, i, None]) for i in range(len(prompt), row.shape[1] - 1)]
            decoder.close()
            difference = log_softmax(torch.cat(steps)) - log_softmax(whole)
            if not difference.abs().max() < 0.01:
                return False
    except Exception:  # code of the model's authors: some have no cache that works
        return False
    return True


def decode_without_cache(policy, prompts, cfg):
    """Like starter.decode, by reading the whole row again for each token."""
    ids = torch.tensor(prompts, device=policy.device)
    while True:
        tokens = yield policy(input_ids=ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, tokens], dim=1)
