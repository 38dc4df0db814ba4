"""Faster mechanics for starter.py on one process, with the numbers of its plain ones.

* A prompt is computed and held once, however many responses follow it: while sampling (decode)
  and while learning (token_statistics).
* The key-value cache is written in place; transformers' own is copied for every token.
* Logits are made for some tokens at a time, and again in the backward pass; starter.py computes
  the statistics from them.
* On a CPU short rows are attended to without torch's fused kernel, which is slow there.

attach() compares all of this with the plain functions, values and gradients, for the model that was
loaded, and leaves them in place where it does not fit. On a GPU the model itself runs as in
starter.py, where its own attention is fast, and only the logits and the sampler are those of this
file.
"""
import contextlib
import ctypes
import functools
import inspect
import math
import random
import sys
from itertools import groupby
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import starter
from support import edits

# Ways of an update that lab.gpu measures beside each other; off is what was measured before.
SWITCHES = SimpleNamespace(
    head_in_half=False,  # the head with inputs of 16 bits and float32 sums, on CUDA
    compiled_statistics=False,  # statistics_of_logits by torch.compile
    only_slopes=False,  # the backward pass computes log-probs alone where they alone have a slope
    packed=False,  # a prompt once for its group and no padding, by variable-length attention
)


def compile_layers(model, on=True):
    """Compiles each decoder layer in place, or takes that back. Names of parameters stay."""
    for layer in model.base_model.layers:
        if getattr(layer, "compiled", (None, None))[0] != id(layer):  # a copy has its own
            layer.compile(dynamic=True)
            layer.compiled = id(layer), layer._compiled_call_impl
        layer._compiled_call_impl = layer.compiled[1] if on else None


# 1. The prompts of a batch, each once

def split_rows(rows):
    """rows: (B, W) input_ids, response_mask -> (B, L) prompts, padded on the right with -1; (B, T)
    what follows them, padded on the right with 0; (B, T) True where the mask is. A prompt's last
    token is the first that follows, since its output is the first that is scored."""
    mask = rows["response_mask"]
    ids = rows["input_ids"]
    columns = torch.arange(mask.shape[1], device=mask.device)
    first = mask.int().argmax(dim=1, keepdim=True)  # 0 in a row without a response
    last = torch.where(mask, columns, 0).amax(dim=1, keepdim=True)
    length = int((last - first).max()) + 1
    places = first + torch.arange(length, device=mask.device)
    inside = places <= last
    places = places.clamp(max=mask.shape[1] - 1)
    before = columns[:int(first.max())]
    prompts = torch.where(before < first, ids[:, :len(before)], -1)
    input_ids = torch.where(inside, ids.gather(1, places), 0)
    return prompts, input_ids, mask.gather(1, places) & inside


def hidden_after_prompts(model, prompts, input_ids):
    """(B, L) prompts padded on the right with -1, (B, T) ids that follow them -> (B, T, H) last
    hidden states. A prompt that rows have in common is read once, in one row with all that
    follows; attention() keeps the parts of that row apart."""
    n, length = input_ids.shape
    device = input_ids.device
    distinct, which = prompts.unique(dim=0, return_inverse=True)  # (P, L), (B,)
    in_prompt = (prompts >= 0)[:, None, None].expand(-1, 1, length, -1)
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask = added(torch.cat([in_prompt, causal.expand(n, 1, -1, -1)], dim=3), compute_dtype(model))
    after = (prompts >= 0).sum(dim=1, keepdim=True) + torch.arange(length, device=device)
    of_prompts = torch.arange(prompts.shape[1], device=device).expand(len(distinct), -1)
    ids = torch.cat([distinct.clamp(min=0).flatten(), input_ids.flatten()])[None]
    positions = torch.cat([of_prompts.flatten(), after.flatten()])[None]
    out = model.base_model(input_ids=ids, position_ids=positions, attention_mask=mask,
                           use_cache=False, responses_of=which)
    return out.last_hidden_state[0, distinct.numel():].view(n, length, -1)


class Packed:
    """What packed rows look at: prompts, then responses, one after the other without padding."""

    def __init__(self, prompts, which, inside):
        """(P, L) distinct prompts, padded with -1; (B,) the prompt of each response; (B, T) True
        where a response has a token that is read."""
        n_prompts, width = prompts.shape
        of_prompt = (prompts >= 0).sum(dim=1)
        of_response = inside.sum(dim=1)
        start = F.pad(torch.cat([of_prompt, of_response]).cumsum(dim=0), (1, 0))
        columns = torch.arange(width + inside.shape[1], device=prompts.device)
        looked_at = start[which, None] + columns[:width]
        own = start[n_prompts:-1, None] + columns[:inside.shape[1]]
        valid = torch.cat([columns[:width] < of_prompt[which, None], inside], dim=1)
        self.keys = torch.cat([torch.arange(int(start[n_prompts]), device=prompts.device),
                               torch.cat([looked_at, own], dim=1)[valid]])
        n_keys = torch.cat([of_prompt, of_prompt[which] + of_response])
        self.ends_of_queries = start.int()
        self.ends_of_keys = F.pad(n_keys.cumsum(dim=0), (1, 0)).int()
        self.most_queries = max(width, inside.shape[1])
        self.most_keys = width + inside.shape[1]


def hidden_of_packed(model, prompts, input_ids, inside):
    """Like hidden_after_prompts, but (N, H): of the tokens where inside is True."""
    distinct, which = prompts.unique(dim=0, return_inverse=True)
    in_prompt = distinct >= 0
    device = prompts.device
    after = (prompts >= 0).sum(dim=1, keepdim=True) + torch.arange(inside.shape[1], device=device)
    of_prompts = torch.arange(prompts.shape[1], device=device).expand(len(distinct), -1)
    ids = torch.cat([distinct[in_prompt], input_ids[inside]])[None]
    positions = torch.cat([of_prompts[in_prompt], after[inside]])[None]
    # A mask of four dimensions passes through transformers as it is. Nothing reads it.
    out = model.base_model(input_ids=ids, position_ids=positions, use_cache=False,
                           attention_mask=torch.zeros(1, 1, 1, 1, device=device),
                           responses_of=Packed(distinct, which, inside))
    return out.last_hidden_state[0, int(in_prompt.sum()):]


def hidden_states(model, rows, bf16=False):
    """(B, T) input_ids, response_mask -> (N, H) last hidden states at the N positions of the mask,
    row after row."""
    mask = rows["response_mask"]
    with torch.autocast(mask.device.type, torch.bfloat16, enabled=bf16):
        if model.config._attn_implementation != "starter":
            out = model.base_model(input_ids=rows["input_ids"], use_cache=False)
            return out.last_hidden_state[mask]
        prompts, input_ids, scored = split_rows(rows)
        if SWITCHES.packed:
            inside = scored.flip(1).cumsum(dim=1).flip(1) > 0  # up to the last that is scored
            return hidden_of_packed(model, prompts, input_ids, inside)[scored[inside]]
        if prompts.shape[1]:
            hidden = hidden_after_prompts(model, prompts, input_ids)
        else:
            hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, scored.flatten().nonzero()[:, 0])


# 2. Attention

class Shared(NamedTuple):
    """Keys or values while sampling: of P prompts, and of G responses to each so far."""
    prompts: torch.Tensor  # (P, kv_heads, L, d)
    responses: torch.Tensor  # (P, kv_heads, G, t, d)
    mask: torch.Tensor  # (P, kv_heads, 1, L), added to the scores


class SharedLayer(DynamicLayer):
    """One layer's cache while sampling, written in place."""

    def __init__(self, layer, mask, group_size, room):
        super().__init__()
        n_prompts, kv_heads, _, d = layer.keys.shape
        # Under autocast norms leave float32.
        self.prompts = layer.keys.to(mask.dtype), layer.values.to(mask.dtype)
        self.keys, self.values = mask.new_empty(2, n_prompts, kv_heads, group_size, room, d)
        self.mask = mask.expand(-1, kv_heads, -1, -1)
        self.is_initialized = True
        self.length = 0

    def get_seq_length(self):
        return self.prompts[0].shape[2] + self.length

    def update(self, keys, values, *args, **kwargs):
        n_prompts, _, group_size, _, _ = self.keys.shape
        for own, new in ((self.keys, keys), (self.values, values)):  # new: (B, kv_heads, 1, d)
            by_prompt = new[:, :, 0].unflatten(0, (n_prompts, group_size))
            own[:, :, :, self.length] = by_prompt.transpose(1, 2)
        self.length += 1
        return tuple(Shared(prompts, own[:, :, :, :self.length], self.mask)
                     for prompts, own in zip(self.prompts, (self.keys, self.values)))


def softmax(scores):
    """Over the last dimension, in float32 at least: a CPU takes four times as long in bf16."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(dim=-1, dtype=dtype).to(scores.dtype)


def shared_attention(query, keys, values, scaling):
    """(B, heads, 1, d) queries of one new token -> (B, 1, heads, d). The queries of a group meet
    their prompt together."""
    n_prompts, kv_heads, group_size, t, d = keys.responses.shape
    length = keys.prompts.shape[2]
    by_prompt = (n_prompts * kv_heads, -1)  # the same memory as matrices of both kinds
    by_response = (n_prompts * kv_heads * group_size, -1)
    query = (query * scaling).to(keys.responses.dtype)
    query = query.view(n_prompts, group_size, kv_heads, -1, d).transpose(1, 2).contiguous()
    with torch.autocast(query.device.type, enabled=False):  # the cache has the quickest dtype
        to_prompts = torch.baddbmm(keys.mask.flatten(0, 1), query.view(*by_prompt, d),
                                   keys.prompts.flatten(0, 1).mT)
        to_responses = torch.bmm(query.view(*by_response, d), keys.responses.flatten(0, 2).mT)
        scores = torch.cat([to_prompts, to_responses.view(*by_prompt, t)], dim=2)
        to_prompts, to_responses = softmax(scores).split([length, t], dim=2)
        out = torch.bmm(to_prompts, values.prompts.flatten(0, 1)).view(*by_response, d)
        out = torch.baddbmm(out, to_responses.reshape(*by_response, t),
                            values.responses.flatten(0, 2))
    out = out.view(n_prompts, kv_heads, group_size, -1, d).transpose(1, 2)
    return out.reshape(n_prompts * group_size, 1, -1, d)


def added(allowed, dtype):
    """True where a query may look -> what is added to its scores there: 0, else -1e30, or the least
    number of float16."""
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill_(~allowed, max(-1e30, torch.finfo(dtype).min))


# Largest T * K at which multiplying attention out was quicker than torch's fused kernel, forward
# and backward, on two cores with AVX-512 and head sizes of 32 and 64.
MULTIPLIED_OUT = {torch.bfloat16: 256 * 256, torch.float32: 128 * 144}


@torch.compiler.disable
def packed_attention(module, query, key, value, mask, scaling, which):
    """(1, heads, P * L + B * T, d), prompts before responses -> (1, P * L + B * T, heads, d).

    which: (B,) the prompt of each response; mask: (B, 1, T, L + T) for the responses.
    """
    n, _, length, both_lengths = mask.shape
    prompt_length = both_lengths - length

    def unpacked(x):  # -> (P, heads, L, d), (B, heads, T, d)
        prompts, responses = x[0].split([x.shape[2] - n * length, n * length], dim=1)
        return (prompts.unflatten(1, (-1, prompt_length)).transpose(0, 1),
                responses.unflatten(1, (n, length)).transpose(0, 1))

    query_of_prompts, query_of_responses = unpacked(query)
    keys_values = [unpacked(key.to(value.dtype)), unpacked(value)]
    of_prompts = attention(module, query_of_prompts, *(prompts for prompts, _ in keys_values),
                           None, scaling)[0]
    keys_values = (torch.cat([prompts.index_select(0, which), own], dim=2)
                   for prompts, own in keys_values)
    of_responses = attention(module, query_of_responses, *keys_values, mask, scaling)[0]
    return torch.cat([of_prompts.flatten(0, 1), of_responses.flatten(0, 1)])[None]


class Gathered(torch.autograd.Function):
    """x[index] along the first dimension, whose gradient is added up in float32."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.n = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, gradient):
        index, = ctx.saved_tensors
        sums = torch.zeros(ctx.n, *gradient.shape[1:], device=gradient.device)
        return sums.index_add_(0, index, gradient.float()).to(gradient.dtype), None


def attention_by_segments(query, key, value, packed, scaling):
    """What varlen_attn computes on CUDA, one segment after the other, for a CPU."""
    out = []
    ends = zip(packed.ends_of_queries.tolist(), packed.ends_of_queries[1:].tolist(),
               packed.ends_of_keys.tolist(), packed.ends_of_keys[1:].tolist())
    for first, last, first_key, last_key in ends:
        q, k, v = (x.transpose(0, 1) for x in (
            query[first:last], key[first_key:last_key], value[first_key:last_key]))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        mask = mask.tril(k.shape[1] - q.shape[1])
        out.append(F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True))
    return torch.cat(out, dim=1).transpose(0, 1)


@torch.compiler.disable
def variable_length_attention(query, key, value, packed, scaling):
    """(1, heads, S, d) -> (1, S, heads, d)."""
    query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    key, value = (Gathered.apply(x, packed.keys) for x in (key, value))
    if query.device.type != "cuda":
        return attention_by_segments(query, key, value, packed, scaling)[None]
    from torch.nn.attention.varlen import varlen_attn
    has_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters  # before torch 2.12 always
    return varlen_attn(query.contiguous(), key, value, packed.ends_of_queries, packed.ends_of_keys,
                       packed.most_queries, packed.most_keys, scale=scaling,
                       window_size=(-1, 0),  # causal, from the end
                       **{"enable_gqa": True} if has_gqa else {})[None]


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0,
              responses_of=None, **kwargs):
    """transformers' attention interface -> (B, T, heads, d), None.

    attention_mask: (B, 1, T, K), added to the scores, or True where a query may look, or None:
    causal. responses_of: which of packed_attention. On a CPU short rows are multiplied out: at 16
    tokens torch's fused kernel with its backward pass takes twice as long in float32 there, and
    ten times as long in bf16.
    """
    if isinstance(key, Shared):
        return shared_attention(query, key, value, scaling), None
    if isinstance(responses_of, Packed):
        return variable_length_attention(query, key, value, responses_of, scaling), None
    if responses_of is not None:
        return packed_attention(module, query, key, value, attention_mask, scaling,
                                responses_of), None
    n, heads, length, d = query.shape
    kv_heads, n_keys = key.shape[1:3]
    short = length * n_keys <= MULTIPLIED_OUT.get(value.dtype, 0)
    if query.device.type != "cpu" or not short or kwargs.get("position_bias") is not None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask,
                                               scaling=scaling, dropout=dropout, **kwargs)
    if attention_mask is None:
        attention_mask = torch.ones(length, n_keys, dtype=torch.bool).tril(n_keys - length)
    if attention_mask.dtype == torch.bool:
        attention_mask = added(attention_mask, value.dtype)
    query = (query * scaling).to(value.dtype)
    scores = query.reshape(n, kv_heads, -1, d) @ key.to(value.dtype).mT
    scores = scores.view(n, heads, length, n_keys).add_(attention_mask)
    weights = softmax(scores).view(n, kv_heads, -1, n_keys)
    return (weights @ value).view(n, heads, length, d).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("starter", attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("starter", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def compute_dtype(model):
    """Returns the dtype of queries and keys: autocast's where that is on, else the weights'."""
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


# 3. Sampling

def read_prompts(model, prompts, group_size, room):
    """Lists of ids -> (P, H) last hidden state of each, a cache in which group_size responses to
    each have room, and the position of their first token (B, 1)."""
    device = model.device
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in prompts],
                                          batch_first=True).to(device)
    in_prompt = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    out = model.base_model(input_ids=ids, use_cache=True)  # padding on the right needs no mask
    # On a CPU bf16 takes up to four times as long as float32 for matrices as small as these.
    dtype = torch.float32 if device.type == "cpu" else compute_dtype(model)
    mask = added(in_prompt[:, None, None], dtype)
    layers = [SharedLayer(layer, mask, group_size, room) for layer in out.past_key_values.layers]
    last = out.last_hidden_state[torch.arange(len(ids), device=device), lengths - 1]
    positions = lengths[:, None].repeat_interleave(group_size, dim=0)
    return last, Cache(layers=layers), positions


def group_size_of(prompts):
    """The largest number G such that each prompt is repeated G times, or a multiple of it, in a
    row."""
    return math.gcd(*(len(list(equal)) for _, equal in groupby(prompts))) if prompts else 1


def draw_from(probs, uniform, size=512):
    """Like starter.draw_from. Looks first among blocks of tokens, then within one, since a running
    sum over a vocabulary of 150,000 takes as long as the head."""
    last = probs.shape[1] - 1
    n_whole = probs.shape[1] // size
    whole, rest = probs[:, :n_whole * size], probs[:, n_whole * size:]
    blocks = [whole.unflatten(1, (n_whole, size)).sum(dim=2), rest.sum(dim=1, keepdim=True)]
    ends = torch.cat(blocks, dim=1).cumsum(dim=1, dtype=torch.float64)
    share = uniform * ends[:, -1:]
    block = torch.searchsorted(ends, share, right=True).clamp(max=n_whole)
    start = F.pad(ends, (1, 0)).gather(1, block)
    tokens = block * size + torch.arange(size, device=probs.device)
    inside = probs.gather(1, tokens.clamp(max=last)).masked_fill(tokens > last, 0.0)
    ends = start + inside.cumsum(dim=1, dtype=torch.float64)
    share = share.minimum(ends[:, -1:].nextafter(start))  # the sum of the block was rounded
    return block * size + torch.searchsorted(ends, share, right=True)


def rows_to_decode(prompts, max_new_tokens):
    """Like starter.rows_to_decode. Prompts of different lengths come together, since each is held
    once and read without its responses."""
    longest = max(map(len, prompts), default=0) + max_new_tokens
    group_size = group_size_of(prompts)
    n = max(1, starter.TOKENS_AT_ONCE // longest // group_size) * group_size
    for start in range(0, len(prompts), n):
        yield list(range(start, min(start + n, len(prompts))))


def decode(policy, prompts, cfg):
    """Like starter.decode: yields (B, V) logits of the next tokens, and is sent (B, 1) tokens."""
    group_size = group_size_of(prompts)
    own_attention = policy.config._attn_implementation
    if own_attention != "starter":  # on a GPU, where the model learns with its own
        policy.set_attn_implementation("starter")
    try:
        hidden, cache, positions = read_prompts(policy, prompts[::group_size], group_size,
                                                cfg.max_new_tokens)
        hidden = hidden.repeat_interleave(group_size, dim=0)  # (B, H)
        while True:
            tokens = yield logits_from(policy, hidden)
            out = policy.base_model(input_ids=tokens, position_ids=positions, past_key_values=cache)
            hidden = out.last_hidden_state[:, -1]
            positions = positions + 1
    finally:
        if own_attention != "starter":
            policy.set_attn_implementation(own_attention)


# 4. Statistics

# Logits held at a time, and a few times that in the backward pass. Few large kernels are quick on a
# GPU.
LOGITS_AT_ONCE = {"cpu": 1 << 24, "gpu": 1 << 26}


@contextlib.contextmanager
def tensor_cores(bf16):
    """Where the layers are in bf16, which rounds to 8 bits, a GPU multiplies the head's float32
    matrices in TF32, of 11 bits, which is several times faster. RoPE must stay outside: TF32 would
    round positions. A choice of your own stays."""
    matmul = torch.backends.cuda.matmul
    if not bf16 or matmul.fp32_precision != "none":
        yield
        return
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = "none"


def product_in_float32(a, b):
    """The matrix product, in float32, of matrices of 16 bits."""
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class HeadInHalf(torch.autograd.Function):
    """(N, H) hidden, (V, H) weight, the same weight in 16 bits -> (N, V) float32 logits. Inputs of
    each product have 16 bits; sums, logits and gradients are float32."""

    @staticmethod
    def forward(ctx, hidden, weight, rounded):
        hidden = hidden.to(rounded.dtype)
        ctx.save_for_backward(hidden, rounded)
        return product_in_float32(hidden, rounded.T)

    @staticmethod
    def backward(ctx, gradient):
        hidden, rounded = ctx.saved_tensors
        gradient = gradient.to(rounded.dtype)
        of_hidden = of_weight = None
        if ctx.needs_input_grad[0]:
            of_hidden = product_in_float32(gradient, rounded)
        if ctx.needs_input_grad[1]:
            of_weight = product_in_float32(gradient.T, hidden)
        return of_hidden, of_weight, None


def head_in_half(head, hidden):
    """The head's logits; its weight is rounded once for each of its values."""
    dtype = torch.get_autocast_dtype(hidden.device.type)
    version = head.weight._version, dtype
    if getattr(head, "rounded", (None,))[0] != version:
        head.rounded = version, head.weight.detach().to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return HeadInHalf.apply(hidden, head.weight, head.rounded[1])


def logits_from(model, hidden):
    """(N, H) last hidden states -> (N, V) logits, as the usual models make them. The comparison in
    attach() finds out whether this one is usual."""
    config = model.config.get_text_config()

    def first_of(*names, default):
        return next((value for name in names if (value := getattr(config, name, None))), default)

    in_half = torch.is_autocast_enabled(hidden.device.type)
    if SWITCHES.head_in_half and in_half:
        logits = head_in_half(model.get_output_embeddings(), hidden)
    else:
        with tensor_cores(in_half):
            logits = model.get_output_embeddings()(hidden)
    scale = first_of("logit_scale", "lm_head_multiplier", default=1.0)
    scale = scale / first_of("logits_scaling", default=1.0)
    if scale != 1.0:
        logits = logits * scale
    cap = first_of("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap",
                   default=None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


class Within:
    """A reference that is the policy itself within a context, to be called like a model."""

    def __init__(self, policy, context):
        self.policy = policy
        self.context = context  # a function of the policy

    def __call__(self, **inputs):
        with self.context(self.policy):
            return self.policy(**inputs)


class Recomputed(torch.autograd.Function):
    """function(hidden), of which nothing is kept: the backward pass computes it again. torch's own
    checkpoint would keep what belongs to statistics that the loss does not use."""

    @staticmethod
    def forward(ctx, function, bf16, hidden, *parameters):
        ctx.function, ctx.bf16 = function, bf16
        ctx.save_for_backward(hidden, *parameters)
        ctx.set_materialize_grads(False)
        return tuple(function(hidden))

    @staticmethod
    def backward(ctx, *gradients):
        hidden, *parameters = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_()
        alone = SWITCHES.only_slopes and all(gradient is None for gradient in gradients[1:])
        with torch.enable_grad():
            outputs = ctx.function(hidden, alone=True) if alone else ctx.function(hidden)
        asked = [(output, gradient) for output, gradient in zip(outputs, gradients)
                 if output.requires_grad and gradient is not None]
        outputs, gradients = zip(*asked)
        with tensor_cores(ctx.bf16 and not SWITCHES.head_in_half):  # else nothing is in float32
            return None, None, *torch.autograd.grad(outputs, [hidden, *parameters], gradients)


def log_probs_of_logits(logits, labels, temperature):
    """The first of statistics_of_logits; torch.compile leaves the others out."""
    return starter.statistics_of_logits(logits, labels, temperature).log_probs


@functools.cache
def compiled(function):
    return torch.compile(function, dynamic=True)


def function_for(function):
    return compiled(function) if SWITCHES.compiled_statistics else function


def token_statistics(model, rows, temperature, bf16=False, ref_model=None):
    """Like starter.token_statistics. Only some of the (N, V) logits exist at a time."""
    mask = rows["response_mask"]
    labels = rows["labels"][mask]
    ref_hidden = None
    if ref_model is not None:
        is_policy = isinstance(ref_model, Within)
        base = ref_model.policy if is_policy else ref_model
        context = ref_model.context if is_policy else contextlib.nullcontext
        with torch.no_grad(), context(base):
            ref_hidden = hidden_states(base, rows, bf16)
    hidden = hidden_states(model, rows, bf16)

    def of_chunk(hidden, labels, ref_hidden, alone=False):
        ref_logits = None
        with torch.autocast(mask.device.type, torch.bfloat16, enabled=bf16):
            if ref_hidden is not None and not alone:
                with torch.no_grad():
                    ref_logits = logits_from(base, ref_hidden)
            logits = logits_from(model, hidden)
        if alone:
            return function_for(log_probs_of_logits)(logits, labels, temperature),
        return tuple(function_for(starter.statistics_of_logits)(logits, labels, temperature,
                                                                ref_logits))

    head = model.get_output_embeddings()
    learning = [parameter for parameter in head.parameters() if parameter.requires_grad]
    kind = "cpu" if mask.device.type == "cpu" else "gpu"
    chunk = max(1, LOGITS_AT_ONCE[kind] // len(head.weight))
    chunks = []
    for start in range(0, max(1, len(labels)), chunk):
        some = slice(start, start + chunk)
        ref_some = None if ref_hidden is None else ref_hidden[some]
        compute = functools.partial(of_chunk, labels=labels[some], ref_hidden=ref_some)
        if len(labels) <= chunk or not torch.is_grad_enabled():
            chunks.append(compute(hidden[some]))
        else:
            chunks.append(Recomputed.apply(compute, bf16, hidden[some], *learning))
    zeros = torch.zeros(mask.shape, dtype=chunks[0][0].dtype, device=mask.device)
    return starter.TokenStatistics(*(zeros.masked_scatter(mask, torch.cat(values))
                                     for values in zip(*chunks)))


# 5. Which models

class Misfit(Exception):
    """Why this file does not run a model."""


def check_layers(model):
    """Raises Misfit for a model whose layers do not all look back without end; the comparison finds
    what this does not know of."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if kinds != {"full_attention"} or (window and not getattr(config, "layer_types", None)):
        raise Misfit("it has layers that do not look back without end")
    if any(value for module in model.modules() for name, value in vars(module).items()
           if "drop" in name and isinstance(value, float)):
        raise Misfit("it has dropout, which its fast attention would leave out")
    if not model._supports_attention_backend:
        raise Misfit("its attention is code of its own")


def made_up_responses(prompts, max_new_tokens, vocabulary):
    """Returns Responses to prompts of different lengths. The last is as long as any row of the run
    can become, so that it exceeds a sliding window if any row does."""
    prompts = sorted(prompts, key=len)
    draw = random.Random(0)
    responses = []
    for prompt_ids, length in ((prompts[0], 1), (prompts[len(prompts) // 2], 5),
                               (prompts[-1], 3), (prompts[-1], max_new_tokens)):
        ids = [*prompt_ids, *(draw.randrange(vocabulary) for _ in range(length))]
        n_scored = min(length, 64)
        zeros = [0.0] * n_scored
        responses.append(starter.Response(ids[:-n_scored], ids[-n_scored:], zeros, False))
    return responses


@contextlib.contextmanager
def with_half_embeddings(policy):
    """Makes the policy another model for a while. As its own reference it would have a KL of 0,
    however wrong the KL is computed."""
    hook = policy.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output / 2)
    try:
        yield
    finally:
        hook.remove()


def outputs_of(functions, policy, responses, cfg, at_once):
    """What attach() compares, by name: the statistics of made-up responses and some gradients of a
    loss, by functions["token_statistics"] with at_once rows in a call; and logits of a few tokens
    after two prompts, by functions["decode"]. Where one is missing, so is what it computes."""
    outputs = {}
    if "token_statistics" in functions:
        ref_model = Within(policy, with_half_embeddings)
        whole = starter.make_batch(responses, torch.zeros(len(responses)), policy.device)
        statistics = []
        for rows in torch.arange(len(responses)).split(at_once):
            batch = {name: tensor[rows] for name, tensor in whole.items()}
            mask = batch["response_mask"]
            x = functions["token_statistics"](policy, batch, cfg.temperature, False, ref_model)
            weights = torch.linspace(-1, 1, mask.shape[1], device=mask.device)
            ((x.log_probs - 0.3 * x.exact_kl - 0.2 * x.forward_kl) * weights)[mask].sum().backward()
            statistics.append([values.detach()[mask] for values in x])
        outputs |= zip(starter.TokenStatistics._fields, map(torch.cat, zip(*statistics)))
        for name, p in policy.named_parameters():
            if p.grad is not None:
                outputs[f"gradient of {name}"] = p.grad.flatten()[::max(1, p.numel() // 1000)]
        policy.zero_grad()
    if "decode" in functions:
        prompts = [responses[i].prompt_ids for i in (0, 0, -1, -1)]
        tokens = torch.arange(12, device=policy.device).view(4, 3, 1)
        logits = [None] * 4
        for rows in functions["rows_to_decode"](prompts, cfg.max_new_tokens):
            decoder = functions["decode"](policy, [prompts[i] for i in rows], cfg)
            with torch.no_grad():
                steps = [next(decoder)]
                for i in range(min(3, cfg.max_new_tokens - 1)):
                    steps.append(decoder.send(tokens[rows, i]))
            decoder.close()
            for i, of_row in zip(rows, torch.stack(steps, dim=1)):
                logits[i] = of_row
        outputs["logit while sampling"] = torch.stack(logits)
    return outputs


def compare(ours, plain):
    """Raises Misfit where an output differs by more than a thousandth of its largest value. Equal
    infinities, and nan in both, are no difference: an edit of scale_logits may forbid tokens."""
    largest = {name: torch.where(values.isfinite(), values.abs(), 0.0).max()
               for name, values in plain.items()}
    steepest = max([x for name, x in largest.items() if "gradient" in name], default=0.0)
    for name, values in plain.items():
        alike = (ours[name] == values) | (ours[name].isnan() & values.isnan())
        difference = torch.where(alike, 0.0, (ours[name] - values).abs()).max()
        least = 1e-3 * steepest if "gradient" in name else 0.01
        error = (difference / largest[name].clamp(min=least)).item()
        if not error <= 1e-3:
            raise Misfit(f"its {name} differs by {error:.1%}")


def keep_freed_memory():
    """Keeps freed memory for the next step: giving it back and faulting it in again takes time."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):  # glibc
        for option, value in ((-3, 32 << 20), (-1, 1 << 30)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, value)


def mechanics_for(policy):
    """Gives the policy this file's attention. Returns the functions for starter.MECHANICS."""
    check_layers(policy)
    functions = {"decode": decode, "token_statistics": token_statistics, "draw_from": draw_from}
    if edits.is_shipped("decode"):  # another one may need prompts of one length
        functions["rows_to_decode"] = rows_to_decode
    if policy.device.type == "cpu":
        policy.set_attn_implementation("starter")
    return functions


def attach(policy, ref_model, problems, cfg):
    """Puts this file's functions into starter.MECHANICS if they fit the model, and says so."""
    keep_freed_memory()
    own_attention = policy.config._attn_implementation
    prompts = [problem["prompt_ids"] for some in problems for problem in some]
    vocabulary = policy.config.get_text_config().vocab_size
    responses = made_up_responses(prompts, cfg.max_new_tokens, vocabulary)
    names = [name for name in ("decode", "token_statistics") if edits.is_shipped(name)]
    plain = {name: inspect.unwrap(getattr(starter, name)) for name in (*names, "rows_to_decode")}
    was_training = policy.training
    policy.eval()
    try:
        check_layers(policy)
        longest = max(len(r.prompt_ids) + len(r.response_ids) for r in responses)
        at_once = max(1, starter.LOGITS_AT_ONCE // (longest * vocabulary))
        expected = outputs_of(plain, policy, responses, cfg, at_once)  # with its own attention
        functions = mechanics_for(policy)
        compared = {name: functions[name] for name in functions if name in plain}
        compare(outputs_of(compared, policy, responses, cfg, len(responses)), expected)
    except Exception as error:  # code of the model's authors runs here
        policy.set_attn_implementation(own_attention)
        policy.zero_grad()
        reason = error if isinstance(error, Misfit) else f"{type(error).__name__}: {error!s:.100}"
        print(f"support/fast.py does not fit {type(policy).__name__}: {reason}; the model's own "
              "forward pass runs, which takes more time and memory")
        return
    finally:
        policy.train(was_training)
    if isinstance(ref_model, torch.nn.Module):
        ref_model.set_attn_implementation(policy.config._attn_implementation)
    edits.install(**functions)
