"""Faster mechanics for starter.py on one process, with the numbers of its plain ones.

* A prompt is read once, however many responses follow it: while sampling (next_logits) and, on a
  CPU, while learning (token_statistics).
* Logits are made for some tokens at a time, and again in the backward pass; starter.py computes
  the statistics from them.
* On a CPU short rows are attended to without torch's fused kernel, which is slow there.

attach() compares all of this with the plain functions, values and gradients, for the model that was
loaded, and leaves them in place where it does not fit. On a GPU the layers run as in starter.py
while learning.
"""

import contextlib
import functools
import random

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import starter
from support import edits


class Misfit(Exception):
    """Why this file does not run a model."""


# --------------------------------------------------------------------------------------------------
# 1. Prompts, each read once.


def read_prompts(model, prompts):
    """(B, L) prompts, padded on the right with -1 -> (B, H) hidden states of their last tokens, and
    a cache of keys and values with B rows. Equal prompts are read once."""
    distinct, which = prompts.unique(dim=0, return_inverse=True)  # (P, L), (B,)
    outputs = model.base_model(input_ids=distinct.clamp(min=0), use_cache=True)
    cache = outputs.past_key_values
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise Misfit("it has layers that do not look back without end")
    last = (distinct >= 0).sum(dim=1) - 1
    rows = torch.arange(len(distinct), device=prompts.device)
    # It selects by index_select: the backward pass of x[which] adds up in any order
    cache.reorder_cache(which)
    return outputs.last_hidden_state[rows, last].index_select(0, which), cache


def read_on(model, ids, n, cache):
    """(B, K) ids, of which the cache holds all but the last n -> (B, n, H) last hidden states. An
    id of -1, between a prompt and what follows it, is no token: nothing looks there."""
    is_token = ids >= 0
    positions = is_token.cumsum(dim=1) - 1
    outputs = model.base_model(
        input_ids=ids[:, -n:],
        attention_mask=is_token,
        position_ids=positions[:, -n:],
        past_key_values=cache,
        use_cache=True,
    )
    return outputs.last_hidden_state


def prompts_apart(rows):
    """rows: (B, W) input_ids, response_mask -> (B, L) prompts, padded on the right with -1; (B, T)
    what follows them; (B, T) True where the mask is. A prompt's last token is the first that
    follows, since its output is the first that is scored."""
    ids = rows["input_ids"]
    mask = rows["response_mask"]
    columns = torch.arange(ids.shape[1], device=ids.device)
    first = mask.int().argmax(dim=1, keepdim=True)  # 0 in a row without a response
    last = (mask * columns).amax(dim=1, keepdim=True)
    n_after = (last - first).max() + 1
    prompts = torch.where(columns < first, ids, -1)[:, : first.max()]
    places = first + columns[:n_after]
    ids_after = F.pad(ids, (0, n_after)).gather(1, places)
    mask_after = F.pad(mask, (0, n_after)).gather(1, places)
    return prompts, ids_after, mask_after


def hidden_states(model, rows, precision):
    """-> (N, H) last hidden states at the N response tokens, row after row."""
    mask = rows["response_mask"]
    has_prompts = mask.int().argmax(dim=1).any()  # of two tokens and more
    with starter.autocast(mask.device, precision):
        if mask.device.type != "cpu" or model.is_gradient_checkpointing or not has_prompts:
            outputs = model.base_model(input_ids=rows["input_ids"], use_cache=False)
            return outputs.last_hidden_state[mask]
        prompts, ids, mask = prompts_apart(rows)
        _, cache = read_prompts(model, prompts)
        ids = torch.cat([prompts, ids], dim=1)
        return read_on(model, ids, mask.shape[1], cache)[mask]


# --------------------------------------------------------------------------------------------------
# 2. Attention on a CPU.

# Largest T * K at which multiplying attention out was quicker than torch's fused kernel, forward
# and backward, on two cores with AVX-512 and head sizes of 32 and 64.
MULTIPLIED_OUT = {torch.bfloat16: 65_536, torch.float16: 65_536, torch.float32: 18_432}


def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """transformers' attention interface -> (B, T, heads, d), None. attention_mask: (B, 1, T, K),
    True where a query may look, or None: causal. Short rows are multiplied out: at 16 tokens
    torch's kernel takes twice as long in float32, and ten times as long in bf16."""
    n, heads, length, d = query.shape
    kv_heads, n_keys = key.shape[1:3]
    if length * n_keys > MULTIPLIED_OUT.get(value.dtype, 0):
        fused = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return fused(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if attention_mask is None:
        attention_mask = torch.ones(length, n_keys, dtype=torch.bool).tril(n_keys - length)
    query = (query * scaling).to(value.dtype)
    scores = query.reshape(n, kv_heads, -1, d) @ key.to(value.dtype).mT
    scores = scores.view(n, heads, length, n_keys)
    scores = scores.masked_fill_(~attention_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)  # slow in bf16
    out = weights.view(n, kv_heads, -1, n_keys) @ value
    return out.view(n, heads, length, d).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("starter", attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("starter", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def attend_on_cpu(model):
    """Gives a model on a CPU this attention in the place of torch's kernel."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("starter")


# --------------------------------------------------------------------------------------------------
# 3. Logits.

# Logits held at a time, and a few times that in the backward pass. Elsewhere starter's number: few
# large kernels are quick on a GPU.
LOGITS_AT_ONCE = {"cpu": 16_777_216}


@contextlib.contextmanager
def tensor_cores(in_16_bits):
    """Where the layers are in 16 bits (bf16 rounds to 8, fp16 to 11), a GPU multiplies the head's
    float32 matrices in TF32, of 11 bits, which is several times faster. RoPE must stay outside:
    TF32 would round positions. A choice of your own stays."""
    matmul = torch.backends.cuda.matmul
    chosen = matmul.fp32_precision
    if in_16_bits and chosen == "none":
        matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = chosen


class Hidden(BaseModelOutputWithPast):
    """What a model's layers return, with nothing in it but the last hidden states."""

    def __getattr__(self, name):
        return None


def logits_from(model, hidden):
    """(N, H) last hidden states -> (N, V) logits, by the model's own code, which may scale or cap
    them. It runs with these hidden states in the place of its layers."""
    layers = model.base_model
    outputs = Hidden(last_hidden_state=hidden[None])
    layers.forward = lambda *args, **kwargs: outputs
    try:
        with tensor_cores(torch.is_autocast_enabled(hidden.device.type)):
            ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            return model(input_ids=ids).logits[0]
    finally:
        del layers.forward


# --------------------------------------------------------------------------------------------------
# 4. Sampling.

TOKENS_AT_ONCE = 65_536  # prompts and responses that are decoded together, at most


def draw_from(probs, uniform, size=512):
    """Like starter.draw_from. Looks first among blocks of tokens, then within one, since a running
    sum over a vocabulary of 150,000 takes as long as the head."""
    n_tokens = probs.shape[1]
    if probs.device.type == "mps" or n_tokens <= size:
        return edits.own("draw_from")(probs, uniform)
    blocks = F.pad(probs, (0, -n_tokens % size)).unflatten(1, (-1, size))  # (B, n, size)
    ends = blocks.sum(dim=2).cumsum(dim=1, dtype=torch.float64)
    share = uniform * ends[:, -1:]
    block = torch.searchsorted(ends, share, right=True).clamp(max=ends.shape[1] - 1)
    start = F.pad(ends, (1, 0)).gather(1, block)
    rows = torch.arange(len(probs), device=probs.device)
    ends = start + blocks[rows, block[:, 0]].cumsum(dim=1, dtype=torch.float64)
    share = share.minimum(ends[:, -1:].nextafter(start))  # the sum of the block was rounded
    tokens = block * size + torch.searchsorted(ends, share, right=True)
    return tokens.clamp(max=n_tokens - 1)


def rows_to_decode(prompts, max_new_tokens):
    """Like starter.rows_to_decode. Prompts of different lengths come together, since nothing looks
    at the padding between them and their responses."""
    longest = max(map(len, prompts), default=0) + max_new_tokens
    n = max(1, TOKENS_AT_ONCE // longest)
    rows = list(range(len(prompts)))
    return [rows[start : start + n] for start in range(0, len(rows), n)]


def next_logits(policy, ids, cache=None):
    """Like starter.next_logits. Equal prompts are read once."""
    if cache is None:
        hidden, cache = read_prompts(policy, ids)
    else:
        hidden = read_on(policy, ids, 1, cache)[:, 0]
    return logits_from(policy, hidden), cache


# --------------------------------------------------------------------------------------------------
# 5. Statistics.


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
    def forward(ctx, function, precision, hidden, *parameters):
        ctx.function = function
        ctx.precision = precision
        ctx.save_for_backward(hidden, *parameters)
        ctx.set_materialize_grads(False)
        return function(hidden)

    @staticmethod
    def backward(ctx, *gradients):
        hidden, *parameters = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            stats = ctx.function(hidden)
        used = []
        for output, gradient in zip(stats, gradients):
            if output.requires_grad and gradient is not None:
                used.append((output, gradient))
        outputs, gradients = zip(*used)
        with tensor_cores(ctx.precision != "float32"):
            return None, None, *torch.autograd.grad(outputs, [hidden, *parameters], gradients)


def reference_of(ref_model, model, rows, precision):
    """-> a value for each response token, and a function that makes the reference's logits of it.
    Another kind of model than the policy, such as two models in one, gives its logits itself."""
    base = ref_model
    context = contextlib.nullcontext
    if isinstance(ref_model, Within):
        base = ref_model.policy
        context = ref_model.context
    if type(base) is not type(model) or base.config != model.config:
        return starter.response_logits(ref_model, rows, precision), torch.nn.Identity()
    with context(base):
        return hidden_states(base, rows, precision), functools.partial(logits_from, base)


def token_statistics(model, rows, temperature, precision="float32", ref_model=None):
    """Like starter.token_statistics. Only some of the (N, V) logits exist at a time."""
    mask = rows["response_mask"]
    device = mask.device
    labels = rows["labels"][mask]
    if ref_model is not None:
        with torch.no_grad():
            ref_values, ref_head = reference_of(ref_model, model, rows, precision)
    names = []

    def of_slice(some, hidden):
        ref_logits = None
        with starter.autocast(device, precision):
            if ref_model is not None:
                with torch.no_grad():
                    ref_logits = ref_head(ref_values[some])
            logits = logits_from(model, hidden)
        stats = starter.statistics_of_logits(logits, labels[some], temperature, ref_logits)
        names[:] = stats
        return tuple(stats.values())

    hidden = hidden_states(model, rows, precision)
    head = model.get_output_embeddings()
    learning = [parameter for parameter in head.parameters() if parameter.requires_grad]
    at_once = LOGITS_AT_ONCE.get(device.type, starter.LOGITS_AT_ONCE)
    n = max(1, at_once // len(head.weight))
    slices = []
    for start in range(0, max(1, len(labels)), n):
        some = slice(start, start + n)
        function = functools.partial(of_slice, some)
        slices.append(Recomputed.apply(function, precision, hidden[some], *learning))
    stats = dict(zip(names, map(torch.cat, zip(*slices))))
    zeros = torch.zeros(mask.shape, dtype=stats["log_probs"].dtype, device=device)
    return {name: zeros.masked_scatter(mask, x.to(zeros.dtype)) for name, x in stats.items()}


# --------------------------------------------------------------------------------------------------
# 6. Which models.

FUNCTIONS = {
    "draw_from": draw_from,
    "next_logits": next_logits,
    "rows_to_decode": rows_to_decode,
    "token_statistics": token_statistics,
}


def made_up_responses(prompts, max_new_tokens, vocabulary):
    """Returns Responses to prompts of different lengths. One to the shortest and one to the longest
    are as long as any of the run can become, so that they exceed a sliding window if any does."""
    shortest = min(prompts, key=len)
    longest = max(prompts, key=len)
    kinds = [(shortest, max_new_tokens), (shortest, 1), (prompts[0], 5), (longest, max_new_tokens)]
    draw = random.Random(0)
    responses = []
    for prompt_ids, length in kinds:
        ids = [*prompt_ids, *draw.choices(range(vocabulary), k=length)]
        n_scored = min(length, 64)
        zeros = [0.0] * n_scored
        responses.append(starter.Response(ids[:-n_scored], ids[-n_scored:], zeros, False))
    return responses


def with_half_embeddings(policy):
    """Makes the policy another model within a context. As its own reference it would have a KL of
    0, however wrong the KL is computed."""
    embeddings = policy.get_input_embeddings()
    return embeddings.register_forward_hook(lambda module, inputs, output: output / 2)


def outputs_of_learning(token_statistics, policy, responses, n_rows):
    """-> {name: tensor}: the statistics of made-up responses, with n_rows of them in a call, and
    some gradients of the sum of those that have one."""
    ref_model = Within(policy, with_half_embeddings)
    batch = starter.make_batch(responses, torch.zeros(len(responses)), policy.device)
    parts = {}
    for start in range(0, len(responses), n_rows):
        rows = starter.keep_rows(batch, slice(start, start + n_rows))
        stats = token_statistics(policy, rows, 1.0, "float32", ref_model)
        loss = 0.0
        for i, (name, values) in enumerate(stats.items()):
            parts.setdefault(name, []).append(values.detach())
            if values.requires_grad:
                weights = torch.linspace(-1, i + 1, values.shape[1], device=values.device)
                loss = loss + (weights * values).sum()
        loss.backward()
    outputs = {name: torch.cat(values) for name, values in parts.items()}
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            step = max(1, parameter.numel() // 1000)
            outputs[f"gradient of {name}"] = parameter.grad.flatten()[::step]
    policy.zero_grad()
    return outputs


@torch.no_grad()
def outputs_of_sampling(next_logits, rows_to_decode, policy, prompts):
    """-> {name: (B, 3, V) tensor}: logits of three tokens after each prompt."""
    logits = []
    for rows in rows_to_decode(prompts, 3):
        ids = pad_sequence([torch.tensor(prompts[i]) for i in rows], True, -1).to(policy.device)
        tokens = ids.new_tensor(rows)[:, None]
        cache = None
        steps = []
        for t in range(3):
            step, cache = next_logits(policy, ids, cache)
            steps.append(step)
            ids = torch.cat([ids, tokens + t], dim=1)
        logits.append(torch.stack(steps, dim=1))
    return {"logit while sampling": torch.cat(logits)}


def outputs_of(functions, policy, responses, n_rows):
    """Returns what is compared of these functions."""
    prompts = [responses[i].prompt_ids for i in (0, 0, -1, -1)]
    decode = functions["next_logits"], functions["rows_to_decode"]
    sampled = outputs_of_sampling(*decode, policy, prompts)
    learnt = outputs_of_learning(functions["token_statistics"], policy, responses, n_rows)
    return {**learnt, **sampled}


def compare(ours, plain):
    """Raises Misfit where an output differs by more than a thousandth of its largest value."""
    gradients = [values for name, values in plain.items() if name.startswith("gradient")]
    steepest = max(values.abs().max().item() for values in gradients)
    for name, values in plain.items():
        least = 1e-3 * steepest if name.startswith("gradient") else 0.01
        difference = (ours[name] - values).abs().max()
        error = (difference / values.abs().max().clamp(min=least)).item()
        if not error <= 1e-3:
            raise Misfit(f"its {name} differs by {error:.1%}")


def functions_that_fit(policy, problems, cfg):
    """Returns those of this file's functions that stand for functions which were not edited. Raises
    Misfit, or what the model raises, where one of them computes something else."""
    own = {name: edits.own(name) for name in FUNCTIONS}
    prompts = [problem["prompt_ids"] for some in problems for problem in some]
    config = policy.config.get_text_config()
    responses = made_up_responses(prompts, cfg.max_new_tokens, config.vocab_size)
    plain = outputs_of(own, policy, responses, 1)
    attend_on_cpu(policy)
    functions = {name: f for name, f in FUNCTIONS.items() if edits.is_shipped(name)}
    if not edits.is_shipped("response_logits"):
        functions.pop("token_statistics", None)
    if "next_logits" not in functions:  # another one may need prompts of one length
        functions.pop("rows_to_decode", None)
    compare(outputs_of({**own, **functions}, policy, responses, len(responses)), plain)
    return functions


def attach(policy, ref_model, problems, cfg):
    """Puts this file's functions into starter.py if they fit the model, else says why not."""
    own_attention = policy.config._attn_implementation
    try:
        functions = functions_that_fit(policy, problems, cfg)
    except Exception as error:  # code of the model's authors runs here
        policy.set_attn_implementation(own_attention)
        policy.zero_grad()
        reason = error if isinstance(error, Misfit) else f"{type(error).__name__}: {error!s:.100}"
        print(
            f"support/fast.py does not fit {type(policy).__name__}: {reason}; the model's own "
            "forward pass runs, which takes more time and memory"
        )
        return
    if isinstance(ref_model, PreTrainedModel):
        attend_on_cpu(ref_model)
    edits.replace(**functions)
