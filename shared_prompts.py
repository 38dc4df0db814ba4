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
    """Keys or values while sampling: of P prompts, and of G responses to each so far."""
    prompts: torch.Tensor  # (P, kv_heads, L, d)
    responses: torch.Tensor  # (P, kv_heads, G, t, d)
    mask: torch.Tensor  # (P, kv_heads, 1, L), added to the scores


class SharedLayer(DynamicLayer):
    """One layer's cache while sampling: written in place, where transformers' own is copied for every token."""

    def __init__(self, layer, mask, group_size, room):
        super().__init__()
        n_prompts, kv, _, d = layer.keys.shape
        self.prompts = layer.keys.to(mask.dtype), layer.values.to(mask.dtype)  # norms leave float32 under autocast
        self.keys, self.values = mask.new_empty(2, n_prompts, kv, group_size, room, d)
        self.mask, self.is_initialized, self.length = mask.expand(-1, kv, -1, -1), True, 0

    def get_seq_length(self):
        return self.prompts[0].shape[2] + self.length

    def update(self, keys, values, *args, **kwargs):
        n_prompts, _, group, _, _ = self.keys.shape
        for own, new in ((self.keys, keys), (self.values, values)):  # new: (B, kv_heads, 1, d)
            own[:, :, :, self.length] = new[:, :, 0].unflatten(0, (n_prompts, group)).transpose(1, 2)
        self.length += 1
        return tuple(Shared(prompts, own[:, :, :, :self.length], self.mask)
                     for prompts, own in zip(self.prompts, (self.keys, self.values)))


def softmax(scores):
    """Over the last dimension, in float32 at least: a CPU takes four times as long in bf16."""
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)


def shared_attention(query, keys, values, scaling):
    """(B, heads, 1, d) queries of one new token -> (B, 1, heads, d). A group's queries meet their prompt together."""
    (n_prompts, kv, group, t, d), length = keys.responses.shape, keys.prompts.shape[2]
    by_prompt, by_response = (n_prompts * kv, -1), (n_prompts * kv * group, -1)  # the same memory, matrices of both
    query = (query * scaling).to(keys.responses.dtype).view(n_prompts, group, kv, -1, d).transpose(1, 2).contiguous()
    with torch.autocast(query.device.type, enabled=False):  # the cache has the dtype that is quickest here
        to_prompts = torch.baddbmm(keys.mask.flatten(0, 1), query.view(*by_prompt, d), keys.prompts.flatten(0, 1).mT)
        to_responses = torch.bmm(query.view(*by_response, d), keys.responses.flatten(0, 2).mT).view(*by_prompt, t)
        to_prompts, to_responses = softmax(torch.cat([to_prompts, to_responses], dim=2)).split([length, t], dim=2)
        out = torch.bmm(to_prompts, values.prompts.flatten(0, 1)).view(*by_response, d)
        out = torch.baddbmm(out, to_responses.reshape(*by_response, t), values.responses.flatten(0, 2))
    return out.view(n_prompts, kv, group, -1, d).transpose(1, 2).reshape(n_prompts * group, 1, -1, d)


def added(allowed, dtype):
    """True where a query may look -> what is added to its scores there: 0, else -1e30."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -1e30)


# largest T * K so far at which that was the quicker, forward and backward (2 cores, AVX-512, head size 32 and 64)
MULTIPLIED_OUT = {torch.bfloat16: 256 * 256, torch.float32: 128 * 144}


def packed_attention(module, query, key, value, mask, scaling, which):
    """(1, heads, P * L + B * T, d), prompts before responses -> (1, P * L + B * T, heads, d). which: (B,) the prompt of
    each response; mask: (B, 1, T, L + T) for the responses."""
    n, _, length, prompt_length = *mask.shape[:3], mask.shape[3] - mask.shape[2]

    def unpacked(x):  # -> (P, heads, L, d), (B, heads, T, d)
        prompts, responses = x[0].split([x.shape[2] - n * length, n * length], dim=1)
        return (prompts.unflatten(1, (-1, prompt_length)).transpose(0, 1),
                responses.unflatten(1, (n, length)).transpose(0, 1))

    (query, own_query), *both = map(unpacked, (query, key.to(value.dtype), value))
    of_prompts = attention(module, query, *(prompts for prompts, _ in both), None, scaling)[0]
    keys_values = (torch.cat([prompts.index_select(0, which), own], dim=2) for prompts, own in both)
    of_responses = attention(module, own_query, *keys_values, mask, scaling)[0]
    return torch.cat([of_prompts.flatten(0, 1), of_responses.flatten(0, 1)])[None]


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, responses_of=None, **kwargs):
    """transformers' attention interface. On a CPU short rows are multiplied out: at 16 tokens torch's fused kernel with
    its backward pass takes twice as long in float32 there, ten times in bf16. attention_mask: (B, 1, T, K), added to
    the scores, or True where a query may look, or None: causal. responses_of: which of packed_attention.
    -> (B, T, heads, d)."""
    if isinstance(key, Shared):
        return shared_attention(query, key, value, scaling), None
    if responses_of is not None:
        return packed_attention(module, query, key, value, attention_mask, scaling, responses_of), None
    (n, heads, length, d), (_, kv, n_keys, _) = query.shape, key.shape
    limit = MULTIPLIED_OUT.get(value.dtype, 0)
    if query.device.type != "cpu" or length * n_keys > limit or dropout or kwargs.get("position_bias") is not None:
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


def compute_dtype(model):
    """-> dtype of queries and keys: autocast's where that is on, else the weights'."""
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


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
    cpu = model.device.type == "cpu"  # bf16 takes up to four times as long as float32 there, for matrices as small
    mask = added(known[:, None, None], torch.float32 if cpu else compute_dtype(model))
    layers = out.past_key_values.layers
    layers = [SharedLayer(layer, mask, group_size, room) for layer in layers]
    last = out.last_hidden_state[torch.arange(len(ids), device=ids.device), lengths - 1]
    return last, Cache(layers=layers), lengths[:, None].repeat_interleave(group_size, dim=0)


def span_of_attention(config):
    """-> how many tokens back every layer looks: inf for full attention, its window, 0 where it is no attention."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None) or math.inf
    return window if kinds <= {"full_attention", "sliding_attention"} else 0


def hidden_after_prompts(model, prompts, input_ids):
    """(B, L) prompts padded on the right with -1, (B, T) ids that follow them -> (B, T, H) last hidden states.

    A prompt that many rows have in common is read once, in one row with all that follows, where every layer's attention
    is the one above and looks back without end.
    """
    (n, length), device = input_ids.shape, input_ids.device
    if model.config._attn_implementation != "starter" or span_of_attention(model.config) < math.inf:
        known = torch.cat([prompts >= 0, torch.ones_like(input_ids, dtype=torch.bool)], dim=1)
        ids, positions = torch.cat([prompts.clamp(min=0), input_ids], dim=1), (known.cumsum(1) - 1).clamp(min=0)
        out = model.base_model(input_ids=ids, attention_mask=known.long(), position_ids=positions, use_cache=False)
        return out.last_hidden_state[:, prompts.shape[1]:]
    distinct, which = prompts.unique(dim=0, return_inverse=True)  # (P, L), (B,)
    known = (prompts >= 0)[:, None, None].expand(-1, 1, length, -1)
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(n, 1, -1, -1)
    positions = (prompts >= 0).sum(dim=1, keepdim=True) + torch.arange(length, device=device)
    of_prompts = torch.arange(prompts.shape[1], device=device).expand(len(distinct), -1)
    ids, positions = (torch.cat([x.flatten(), y.flatten()])[None]
                      for x, y in ((distinct.clamp(min=0), input_ids), (of_prompts, positions)))
    mask = added(torch.cat([known, causal], dim=3), compute_dtype(model))
    out = model.base_model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False,
                           responses_of=which)
    return out.last_hidden_state[0, distinct.numel():].view(n, length, -1)
