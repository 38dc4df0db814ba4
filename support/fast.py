"""A faster `compute` for starter.py, with the numbers of the plain one.

* A prompt is computed and held once, however many responses follow it: while sampling
  (read_prompts) and while learning (hidden_after_prompts).
* The key-value cache is written in place; transformers' own is copied for every token.
* The LM head and its softmax run over slices of the vocabulary, forward and backward.
* On a CPU short rows are attended to without torch's fused kernel, which is slow there.

starter.py's self-check compares all of this with the model's own forward pass at start-up, and
takes the plain functions for a model that it does not fit. On a GPU the model itself runs as in
starter.py, where its own attention is fast, and only the head and the sampler are those of this
file.
"""
import ctypes
import dataclasses
import math
import sys
from collections import defaultdict
from functools import partial
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import starter

# --------------------------------------------------------------------------------------------------
# 1. The prompts of a batch, each once


class Split(NamedTuple):
    """The rows of a batch as prompts and what follows them. A prompt's last token is the first
    that follows, since its output is the first that is scored."""
    prompts: torch.Tensor  # (B, L) all but the last token, padded on the right with -1
    input_ids: torch.Tensor  # (B, T) the rest, padded on the right with 0
    scored: torch.Tensor  # (B, T) True where rows["response_mask"] is


def split_rows(rows):
    """rows: (B, W) input_ids, response_mask -> Split."""
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
    return Split(prompts, input_ids, mask.gather(1, places) & inside)


def cut_microbatches(batch, max_tokens):
    """Like starter.cut_microbatches, but counts a prompt once, and ends a microbatch before 8 %
    of all so far would be padding, unless it or the rest is below max_tokens / 32: small
    microbatches are slow."""
    split = split_rows(batch)
    lengths = batch["response_mask"].sum(dim=1).clamp(min=1).tolist()
    widths = starter.row_lengths(batch).tolist()
    prompts = [tuple(row) for row in split.prompts.tolist()]
    prompt_width = split.prompts.shape[1]
    small = max_tokens // 32
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    excess = 0.0  # padded tokens so far beyond the 8 %
    microbatches = []
    while order:
        width = lengths[order[0]]
        left = sum(lengths[row] for row in order)
        n_rows, n_tokens = 0, 0
        read = set()  # prompts of this microbatch
        for row in order:
            read.add(prompts[row])
            padded = (n_rows + 1) * width
            wasteful = excess + 0.92 * padded > n_tokens + lengths[row]
            large = min(n_rows * width, left - n_tokens) >= small
            too_large = padded + len(read) * prompt_width > max_tokens
            if n_rows and (too_large or (wasteful and large)):
                break
            n_rows += 1
            n_tokens += lengths[row]
        taken = order[:n_rows]
        widest = max([1, *(widths[row] for row in taken)])
        microbatches.append(starter.take_rows(batch, taken, widest))
        order = order[n_rows:]
        excess += 0.92 * n_rows * width - n_tokens
    return microbatches


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


def response_hidden_states(model, rows, bf16=False):
    """Like starter.response_hidden_states: (N, H), row after row."""
    if model.config._attn_implementation != "starter":
        return starter.response_hidden_states(model, rows, bf16)
    split = split_rows(rows)
    with torch.autocast(split.prompts.device.type, torch.bfloat16, enabled=bf16):
        if split.prompts.shape[1]:
            hidden = hidden_after_prompts(model, split.prompts, split.input_ids)
        else:
            out = model.base_model(input_ids=split.input_ids, use_cache=False)
            hidden = out.last_hidden_state
    hidden = hidden.flatten(0, 1).index_select(0, split.scored.flatten().nonzero()[:, 0])
    return hidden.to(torch.bfloat16 if bf16 else model.get_output_embeddings().weight.dtype)


# --------------------------------------------------------------------------------------------------
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
    """True where a query may look -> what is added to its scores there: 0, else -1e30."""
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill_(~allowed, -1e30)


# Largest T * K at which multiplying attention out was quicker than torch's fused kernel, forward
# and backward, on two cores with AVX-512 and head sizes of 32 and 64.
MULTIPLIED_OUT = {torch.bfloat16: 256 * 256, torch.float32: 128 * 144}


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


# --------------------------------------------------------------------------------------------------
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


def first_above(weights, share):
    """(B, K) weights, (B, 1) share in [0, 1) -> (B, 1) index at which the running sum passes that
    share of the whole, and how far into that index it does, in [0, 1)."""
    passed = weights.double().cumsum(dim=1)
    share = share * passed[:, -1:]
    index = (passed <= share).sum(dim=1, keepdim=True).clamp(max=weights.shape[1] - 1)
    here = weights.gather(1, index).double()
    return index, (1 - (passed.gather(1, index) - share) / here).clamp(0, 1 - 1e-9)


def draw_tokens(logits, uniform, temperature, logits_at_once=1 << 21):
    """Like starter.draw_tokens: (B, V) logits, (B, 1) uniform numbers -> (B, 1) tokens, (B, 1)
    their log-probs. Looks first among blocks of 256 tokens, then within one, since a running sum
    over a vocabulary of 150,000 costs more than the model."""
    tokens, log_probs = [], []
    rows_at_once = max(1, logits_at_once // logits.shape[1])
    for part, share in zip(logits.split(rows_at_once), uniform.split(rows_at_once)):
        logit = part.float() if temperature in (0, 1) else part.float() / temperature
        top = logit.amax(dim=1, keepdim=True)
        whole_blocks = -(-logit.shape[1] // 256) * 256
        p = logit.new_zeros(len(logit), whole_blocks)
        torch.sub(logit, top, out=p[:, :logit.shape[1]]).exp_()
        p = p.unflatten(1, (-1, 256))
        blocks = p.sum(dim=2)
        if not temperature:
            token = logit.argmax(dim=1, keepdim=True)
        else:
            block, share = first_above(blocks, share)
            in_block = p.gather(1, block[..., None].expand(-1, 1, 256))[:, 0]
            token = first_above(in_block, share)[0] + 256 * block
        tokens.append(token)
        log_z = top + blocks.sum(dim=1, keepdim=True).log()
        log_probs.append(logit.gather(1, token) - log_z)
    return torch.cat(tokens), torch.cat(log_probs)


@torch.no_grad()
def rollout(policy, prompts, sampling, head_of=starter.lm_head_of):
    """Like starter.rollout_with_transformers: P lists of prompt ids -> P * group_size Responses,
    group after group."""
    group_size = sampling.group_size
    device = policy.device
    was_training = policy.training
    policy.eval()
    own_attention = policy.config._attn_implementation
    if own_attention != "starter":  # on a GPU, where the model learns with its own
        policy.set_attn_implementation("starter")
    head = head_of(policy)
    stop = torch.tensor(sampling.stop_token_ids, device=device)
    longest = max(map(len, prompts), default=0) + sampling.max_new_tokens
    prompts_at_once = max(1, starter.rows_at_once(policy, longest) // group_size)
    responses = []
    for start in range(0, len(prompts), prompts_at_once):
        chunk = prompts[start:start + prompts_at_once]
        first = start * group_size
        draw = starter.DrawTokens(sampling, range(first, first + len(chunk) * group_size), device)
        # Autocast is around all of it, so that each weight is cast once.
        with torch.autocast(device.type, torch.bfloat16, enabled=sampling.bf16):
            hidden, cache, positions = read_prompts(policy, chunk, group_size,
                                                    sampling.max_new_tokens)
            hidden = hidden.repeat_interleave(group_size, dim=0)  # (B, H)
            running = torch.ones(len(hidden), dtype=torch.bool, device=device)
            for i in range(sampling.max_new_tokens):
                token, log_prob = draw_tokens(head.logits(hidden), draw.uniform[:, i:i + 1],
                                              sampling.temperature)
                draw.tokens.append(token)
                draw.log_probs.append(log_prob)
                running &= ~torch.isin(token[:, 0], stop)
                if not running.any() or i == sampling.max_new_tokens - 1:
                    break
                out = policy.base_model(input_ids=token, position_ids=positions + i,
                                        past_key_values=cache)
                hidden = out.last_hidden_state[:, -1]
        responses += draw.responses([ids for ids in chunk for _ in range(group_size)])
    policy.train(was_training)
    if own_attention != "starter":
        policy.set_attn_implementation(own_attention)
    return responses


# --------------------------------------------------------------------------------------------------
# 4. LM head

# Logits of a slice. 16 MB fit a CPU's cache; on a GPU few large kernels are quick.
LOGITS_AT_ONCE = defaultdict(lambda: 1 << 26, cpu=1 << 22)


class SlicedHead(torch.autograd.Function):
    """(N, H) hidden, (V, H) weight, (N,) labels, a reference's hidden and weight or None -> four
    (N,) tensors in nats: log-prob of the label, exact KL(policy || reference); without a
    gradient: entropy, the reference's log-prob of the label.

    LM head and softmax run over a slice of the vocabulary at a time, so that memory is that of a
    few slices. Sums run under a running maximum. KL = E[d] - log Z + log Z_ref with d = logit -
    the reference's; its derivative by a logit is p * (d - E[d]). bf16 hidden states are
    multiplied as bf16 and summed in float32.
    """

    @staticmethod
    def slices(hidden, weight, labels, logits_at_once):
        """Yields the tokens of a slice, their (N, C) logits, the (N, 1) places of the labels in
        it, and whether each label is in it. Nothing here waits for a GPU."""
        width = max(64, logits_at_once // max(1, len(hidden)))
        slice_of_label = (labels // width)[:, None]
        places = (labels % width)[:, None]
        for i, part in enumerate(weight.split(width)):
            if len(part) < width:  # the last
                places = places.clamp(max=len(part) - 1)
            yield (slice(i * width, (i + 1) * width), hidden @ part.T, places,
                   slice_of_label == i)

    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, ref_hidden, ref_weight,
                logits_at_once=None):
        logits_at_once = logits_at_once or LOGITS_AT_ONCE[hidden.device.type]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        scaled = hidden.to(wide) / temperature
        ref_scaled = None if ref_hidden is None else ref_hidden.to(wide) / temperature
        z, e_logit, e_d = scaled.new_zeros(3, len(hidden))
        at_label, ref_at_label = scaled.new_zeros(2, len(hidden), 1)
        top, ref_log_z = scaled.new_full((2, len(hidden)), -math.inf)
        with starter.matmuls_in(hidden.dtype):
            for part, logits, places, inside in SlicedHead.slices(scaled, weight, labels,
                                                                  logits_at_once):
                higher = torch.maximum(top, logits.amax(dim=1))
                p = (logits - higher[:, None]).exp_()  # not normalised yet
                shrink = (top - higher).exp()
                top = higher
                z = torch.addcmul(p.sum(dim=1), z, shrink)
                e_logit = torch.addcmul((p * logits).sum(dim=1), e_logit, shrink)
                at_label = torch.where(inside, logits.gather(1, places), at_label)
                if ref_hidden is not None:
                    ref_logits = ref_scaled @ ref_weight[part].T
                    ref_log_z = torch.logaddexp(ref_log_z, ref_logits.logsumexp(dim=1))
                    ref_at_label = torch.where(inside, ref_logits.gather(1, places), ref_at_label)
                    of_slice = p.mul_(logits.sub_(ref_logits)).sum(dim=1)
                    e_d = torch.addcmul(of_slice, e_d, shrink)
        at_label, ref_at_label = at_label[:, 0], ref_at_label[:, 0]
        log_z = top + z.log()
        e_d = e_d / z
        ctx.save_for_backward(hidden, weight, labels, ref_hidden, ref_weight, log_z, e_d)
        ctx.temperature = temperature
        ctx.logits_at_once = logits_at_once
        entropy = log_z - e_logit / z
        ref_log_prob = ref_at_label - ref_log_z
        if ref_hidden is None:
            ref_log_prob = torch.zeros_like(ref_at_label)
        ctx.mark_non_differentiable(entropy, ref_log_prob)
        ctx.set_materialize_grads(False)  # None, not zeros, for an output that the loss ignores
        kl = e_d if ref_hidden is None else e_d - log_z + ref_log_z
        return at_label - log_z, kl, entropy, ref_log_prob

    @staticmethod
    def backward(ctx, grad_label, grad_kl, *_):
        hidden, weight, labels, ref_hidden, ref_weight, log_z, e_d = ctx.saved_tensors
        scaled = hidden.to(log_z.dtype) / ctx.temperature
        if ref_hidden is not None:
            ref_scaled = ref_hidden.to(log_z.dtype) / ctx.temperature
        grad_hidden = torch.zeros_like(scaled)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        up = torch.zeros_like(log_z) if grad_label is None else grad_label
        up, log_z, e_d = (x[:, None] for x in (up, log_z, e_d))
        down, narrow = -up, scaled.to(hidden.dtype)
        with starter.matmuls_in(hidden.dtype):
            for part, logits, places, inside in SlicedHead.slices(scaled, weight, labels,
                                                                  ctx.logits_at_once):
                p = (logits - log_z).exp_()
                slope = down  # of the loss by each logit, divided by p
                if grad_kl is not None and ref_hidden is not None:
                    d = logits.sub_(ref_scaled @ ref_weight[part].T)
                    slope = d.sub_(e_d).mul_(grad_kl[:, None]).add_(down)
                grad = p.mul_(slope).scatter_add_(1, places, up * inside)
                grad = grad.to(hidden.dtype)
                grad_hidden += grad @ weight[part].to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight[part] = grad.T @ narrow
        grad_hidden = (grad_hidden / ctx.temperature).to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def token_statistics(hidden, labels, head, temperature, ref_hidden=None, ref_head=None):
    """Like starter.token_statistics, for a head that is a matrix and nothing else; another head
    is computed as there."""
    plain = head.bias is None and head.scale == 1.0 and head.cap is None
    if not plain:
        return starter.token_statistics(hidden, labels, head, temperature, ref_hidden, ref_head)
    ref_weight = None if ref_hidden is None else ref_head.weight
    return starter.TokenStatistics(*SlicedHead.apply(hidden, head.weight, labels, temperature,
                                                     ref_hidden, ref_weight))


# --------------------------------------------------------------------------------------------------
# 5. Which models

def looks_back_without_end(config):
    """Whether every layer of the model is attention without a window."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return set(kinds) == {"full_attention"}
    window = getattr(config, "sliding_window", None)
    return not (window and getattr(config, "use_sliding_window", True))


def prepare(model):
    """Gives the model this file's attention. Raises InputError for a model that it does not fit;
    the self-check finds what this does not know of."""
    config = model.config.get_text_config()
    model._own_attention = model.config._attn_implementation
    if not looks_back_without_end(config):
        raise starter.InputError("it has layers that do not look back without end")
    keep_freed_memory()
    if model.device.type == "cpu":
        model.set_attn_implementation("starter")


def undo(model):
    model.set_attn_implementation(model._own_attention)


def keep_freed_memory():
    """Keeps freed memory for the next step: giving it back and faulting it in again takes time."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):  # glibc
        for option, value in ((-3, 32 << 20), (-1, 1 << 30)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, value)


@torch.no_grad()
def check_against_plain(policy, responses, prompts, sampling):
    """Raises RunStopped where this file computes something else than the plain functions of
    starter.py. An edit of a plain function then takes effect, although this file has a faster
    one."""
    rows = starter.make_batch(responses, torch.zeros(len(responses)), policy.device)
    labels = rows["labels"][rows["response_mask"]]
    sampling = dataclasses.replace(sampling, bf16=False, max_new_tokens=min(
        4, sampling.max_new_tokens))
    statistics, sampled = [], []
    for compute in (COMPUTE, starter.PLAIN):
        hidden = compute.hidden_states(policy, rows)
        head = compute.head_of(policy)
        statistics.append(compute.token_statistics(hidden, labels, head, sampling.temperature,
                                                   hidden.roll(1, 0), head))
        responses = compute.rollout(policy, prompts, sampling)
        sampled.append([response.response_ids for response in responses])
    different = [name for name, ours, plain in zip(starter.TokenStatistics._fields, *statistics)
                 if not torch.allclose(ours, plain, rtol=1e-3, atol=1e-3)]
    if sampled[0] != sampled[1]:
        different.append("sampling")
    if different:
        raise starter.RunStopped(f"its {different[0]} differs from that of starter.py's own "
                                 "functions, which may have been edited")


def with_heads(head_of):
    """Returns the `compute` of this file for heads that head_of(model) returns."""
    return starter.Compute("fast", response_hidden_states, token_statistics, head_of,
                           cut_microbatches, partial(rollout, head_of=head_of), prepare, undo,
                           check_against_plain)


COMPUTE = with_heads(starter.lm_head_of)
