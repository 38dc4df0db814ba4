"""Whether starter.py is right for the model that was loaded, asked before it trains."""

import random

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import starter
from starter import InputError
from support import edits


def check_reading(policy, prompts, cfg):
    """Raises InputError for a model that padding on the right changes, whose weights a forward pass
    changes, or whose backward pass fails. One that decodes otherwise than it reads is decoded by
    reading everything again, and the log says so."""
    name = type(policy).__name__
    prompts = sorted(prompts, key=len)
    lengths = len(prompts[0]), len(prompts[-1])
    ids = longest_row(policy, prompts[-1], cfg.max_new_tokens)
    try:
        fault = fault_of_reading(policy, ids, lengths, cfg)
    except Exception as error:  # code of the model's authors
        fault = f"its forward or backward pass fails with {error!r:.150}"
    policy.zero_grad()
    policy.eval()
    if fault:
        raise InputError(f"{name} cannot be trained here: {fault}; give another model")
    own = edits.own("next_logits")
    decodes = all(decodes_as_it_reads(own, policy, ids, [n]) for n in lengths)
    if edits.is_shipped("next_logits") and not decodes:
        edits.wrap(next_logits=next_logits)
        print(f"{name} decodes otherwise than it reads: it samples without a cache, which is slow")


def turn_dropout_off(policy):
    """Layers that gradient checkpointing runs again are in train mode, and some families' drop out
    by themselves."""
    for module in policy.modules():
        if hasattr(module, "gradient_checkpointing"):
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


def longest_row(policy, prompt, max_new_tokens):
    """Returns (1, L) ids as long as a run's longest row, or as there is memory for: the prompt, and
    its tokens again in any order. Padding's id comes first, which a policy may well sample."""
    config = policy.config.get_text_config()
    most = starter.LOGITS_AT_ONCE // config.vocab_size
    row = prompt + random.Random(0).choices(prompt, k=max_new_tokens)
    pad = getattr(config, "pad_token_id", None)
    if pad in range(config.vocab_size):
        row[len(prompt)] = pad
    return torch.tensor([row[: max(len(prompt) + 2, most)]], device=policy.device)


def log_probs(policy, ids):
    """(1, L) ids -> (L, V) log-probs by the model's own forward pass."""
    return starter.all_log_probs(policy(input_ids=ids, use_cache=False).logits[0], 1.0)


def differ(log_p, other):
    """Whether log-probs of the same tokens differ by more than rounding; nan always does."""
    return not (log_p - other).abs().max() < 0.01


def checksum(policy):
    return [p.sum().item() for p in policy.parameters()]


def fault_of_reading(policy, ids, lengths, cfg):
    """Returns what is wrong with a forward and a backward pass, or None."""
    if type(policy.config) not in AutoModelForCausalLM._model_mapping:
        return "for its type transformers has no model of text alone (AutoModelForCausalLM)"
    weights = checksum(policy)
    with torch.no_grad():
        whole = log_probs(policy, ids)
        for n in (*lengths, ids.shape[1] - 1):
            if differ(log_probs(policy, ids[:, :n]), whole[:n]):
                return "what stands after a token changes its log-probs"
        if cfg.gradient_checkpointing:
            turn_dropout_off(policy)
            starter.train_checkpointed_layers(policy)
            if differ(log_probs(policy, ids), whole):
                return "with gradient_checkpointing its log-probs change, without it perhaps not"
    if not cfg.lora_rank:  # else there may be no memory for gradients of all weights
        log_probs(policy, ids[:, : lengths[-1]])[:, 0].sum().backward()
    if checksum(policy) != weights:
        return "its forward pass changes its weights"


@torch.no_grad()
def decodes_as_it_reads(next_logits, policy, ids, lengths):
    """Compares some tokens after the first ones of (1, L) ids with the same of the row read at
    once. lengths: of the prompts, which are decoded together."""
    whole = log_probs(policy, ids)
    row = ids[0]
    ends = torch.tensor(lengths, device=ids.device)
    prompts = pad_sequence([row[:n] for n in lengths], True, -1)
    cache = None
    try:
        for _ in range(min(12, len(row) - max(lengths))):
            logits, cache = next_logits(policy, prompts, cache)
            if differ(starter.all_log_probs(logits, 1.0), whole[ends - 1]):
                return False
            prompts = torch.cat([prompts, row[ends, None]], dim=1)
            ends += 1
    except Exception:  # code of the model's authors: some have no cache that works
        return False
    return True


def next_logits(policy, ids, cache=None):
    """Like starter.next_logits, by reading all ids again for each token."""
    return policy(input_ids=ids, use_cache=False).logits[:, -1], None
