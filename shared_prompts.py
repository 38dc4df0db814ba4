"""shared_prompts.py: transformers models that compute and hold a prompt once, however many responses follow it: while
sampling (read_prompts) and while learning (hidden_after_prompts). Loads transformers, which takes seconds.
"""
import math
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Shared(NamedTuple):
    """Keys or values while sampling: of P prompts, and of the B = P * G responses so far."""
    prompts: torch.Tensor  # (P, kv_heads, L, d)
    responses: torch.Tensor  # (B, kv_heads, t, d)
    mask: torch.Tensor  # (P, 1, 1, L), added to the scores


class SharedLayer(DynamicLayer):
    """One layer's cache while sampling: written in place, where transformers' own is copied for every token."""

    def __init__(self, layer, mask, group_size, room):
        super().__init__()
        self.mask, self.is_initialized, self.length = mask, True, 0
        self.prompts = layer.keys.to(layer.values.dtype), layer.values  # norms leave keys in float32 under autocast
        self.keys, self.values = (x.new_empty(len(x) * group_size, x.shape[1], room, x.shape[3]) for x in self.prompts)

    def get_seq_length(self):
        return self.prompts[0].shape[2] + self.length

    def update(self, keys, values, *args, **kwargs):
        self.keys[:, :, self.length], self.values[:, :, self.length] = keys[:, :, 0], values[:, :, 0]
        self.length += 1
        return tuple(Shared(prompts, own[:, :, :self.length], self.mask)
                     for prompts, own in zip(self.prompts, (self.keys, self.values)))


def softmax(scores):
    """Over the last dimension, in float32 at least: a CPU takes four times as long in bf16."""
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)


def shared_attention(query, keys, values, scaling):
    """(B, heads, 1, d) queries of one new token -> (B, heads, 1, d). A group's queries meet their prompt together."""
    (n, heads, _, d), (n_prompts, kv, length, _) = query.shape, keys.prompts.shape
    group, per_kv = n // n_prompts, heads // kv

    def by_prompt(x):  # (B, kv, per_kv, y) -> (P, kv, group * per_kv, y)
        return x.reshape(n_prompts, group, kv, per_kv, -1).transpose(1, 2).reshape(n_prompts, kv, group * per_kv, -1)

    def by_response(x):  # and back
        return x.view(n_prompts, kv, group, per_kv, -1).transpose(1, 2).reshape(n, kv, per_kv, -1)

    query = (query * scaling).to(values.responses.dtype).reshape(n, kv, per_kv, d)
    to_prompts = by_response((by_prompt(query) @ keys.prompts.mT).add_(keys.mask))
    scores = torch.cat([to_prompts, query @ keys.responses.mT], dim=-1)
    weights = softmax(scores)
    out = by_response(by_prompt(weights[..., :length]) @ values.prompts) + weights[..., length:] @ values.responses
    return out.reshape(n, heads, 1, d)


def added(allowed, dtype):
    """True where a query may look -> what is added to its scores there: 0, else -1e30."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -1e30)


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """transformers' attention interface. On a CPU short rows are multiplied out: torch's fused kernel is up to twice
    as slow there. attention_mask: (B, 1, T, K), added to the scores, or True where a query may look, or None: causal.
    -> (B, T, heads, d)."""
    if isinstance(key, Shared):
        return shared_attention(query, key, value, scaling).transpose(1, 2), None
    (n, heads, length, d), (_, kv, n_keys, _) = query.shape, key.shape
    if query.device.type != "cpu" or length * n_keys > 256 * 256 or dropout or kwargs.get("position_bias") is not None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling,
                                               dropout=dropout, **kwargs)
    if attention_mask is None:
        attention_mask = torch.ones(length, n_keys, dtype=torch.bool).tril(n_keys - length)
    if attention_mask.dtype == torch.bool:
        attention_mask = added(attention_mask, value.dtype)
    query, key = (query * scaling).to(value.dtype), key.to(value.dtype)
    scores = (query.reshape(n, kv, -1, d) @ key.mT).view(n, heads, length, n_keys)
    weights = softmax(scores.add_(attention_mask)).view(n, kv, -1, n_keys)
    return (weights @ value).view(n, heads, length, d).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("starter", attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("starter", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def padded(rows, device):
    """Lists of ids -> (P, L) ids padded on the right with 0, (P, L) False where they are, lengths (P,)."""
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
    return ids, torch.arange(ids.shape[1], device=device) < lengths[:, None], lengths


def read_prompts(model, prompts, group_size, room):
    """Lists of ids -> (P, H) last hidden state of each, a cache in which group_size responses to each have room,
    and the position of their first token (B, 1)."""
    ids, known, lengths = padded(prompts, model.device)
    out = model.base_model(input_ids=ids, use_cache=True)  # padding on the right needs no mask here
    layers = out.past_key_values.layers
    mask = added(known[:, None, None], layers[0].values.dtype)
    layers = [SharedLayer(layer, mask, group_size, room) for layer in layers]
    last = out.last_hidden_state[torch.arange(len(ids), device=ids.device), lengths - 1]
    return last, Cache(layers=layers), lengths[:, None].repeat_interleave(group_size, dim=0)


def span_of_attention(config):
    """-> how many tokens back every layer looks: inf for full attention, its window, 0 where it is no attention."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None) or math.inf
    return window if kinds <= {"full_attention", "sliding_attention"} else 0


def shares_prompts(model):
    """Gradient checkpointing keeps no keys; a window or another kind of attention needs masks of its own."""
    return span_of_attention(model.config) == math.inf and not (model.is_gradient_checkpointing and model.training)


def hidden_after_prompts(model, prompts, input_ids):
    """(B, L) prompts padded on the right with -1, (B, T) ids that follow them -> (B, T, H) last hidden states.

    A prompt that many rows have in common is read once.
    """
    (n, length), device = input_ids.shape, input_ids.device
    if not shares_prompts(model):
        known = torch.cat([prompts >= 0, torch.ones_like(input_ids, dtype=torch.bool)], dim=1)
        ids, positions = torch.cat([prompts.clamp(min=0), input_ids], dim=1), (known.cumsum(1) - 1).clamp(min=0)
        out = model.base_model(input_ids=ids, attention_mask=known.long(), position_ids=positions, use_cache=False)
        return out.last_hidden_state[:, prompts.shape[1]:]
    distinct, which = prompts.unique(dim=0, return_inverse=True)  # (P, L), (B,)
    read = model.base_model(input_ids=distinct.clamp(min=0), use_cache=True)
    cache = read.past_key_values
    for layer in cache.layers:  # index_select: the backward pass of an index is eight times as slow
        layer.keys, layer.values = layer.keys.index_select(0, which), layer.values.index_select(0, which)
    known = (prompts >= 0)[:, None, None].expand(-1, 1, length, -1)
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(n, 1, -1, -1)
    positions = (prompts >= 0).sum(dim=1, keepdim=True) + torch.arange(length, device=device)
    mask = added(torch.cat([known, causal], dim=3), layer.values.dtype)
    out = model.base_model(input_ids=input_ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    return out.last_hidden_state + 0 * read.last_hidden_state.sum()  # its gradient makes FSDP2 gather weights again
