"""Faster mechanics for starter.py on one process, with the numbers of its plain ones.

* A prompt is read once, however many responses follow it: while sampling (start_decoding) and, on a
  CPU, while learning (token_statistics).
* Logits are made for some tokens at a time, and again in the backward pass; starter.py computes
  the statistics from them.
* On a CPU short rows are attended to without torch's fused kernel, which is slow there.

attach() compares all of this with the plain functions, values and gradients, for the model that was
loaded, and leaves them in place where it does not fit; support/opinion.py compares again during the
run. On a GPU the layers run as in starter.py while learning.
"""

import functools
import inspect

import traceback
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import starter
from support import edits, models


class DoesNotFit(ValueError):
    """The model that was loaded is not of the kind for which this file is right."""


# --------------------------------------------------------------------------------------------------
# 1. Prompts, each read once.


def runs_as_its_class(model):
    """Whether the forward pass is that of the model's class: nobody gave this one a forward() of
    its own, or hooks that see or change what goes in and out."""
    for module in (model, model.base_model):
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return False
    return True


def last_hidden_state(outputs):
    """Of a base model, such as LlamaModel."""
    hidden = getattr(outputs, "last_hidden_state", None)
    if hidden is None:
        raise DoesNotFit("its base model gives no last_hidden_state")
    return hidden


def read_prompts(model, prompts):
    """(B, L) prompts, padded on the right with -1 -> (B, H) hidden states of their last tokens, and
    a cache of keys and values with B rows. Equal prompts are read once."""
    distinct, which = prompts.unique(dim=0, return_inverse=True)  # (P, L), (B,)
    outputs = model.base_model(input_ids=distinct.clamp(min=0), use_cache=True)
    cache = getattr(outputs, starter.name_of_cache(model.base_model), None)
    layers = getattr(cache, "layers", [None])
    if any(type(layer) is not DynamicLayer for layer in layers):
        raise DoesNotFit("it has layers that do not look back without end")
    last = (distinct >= 0).sum(dim=1) - 1
    rows = torch.arange(len(distinct), device=prompts.device)
    # It selects by index_select: the backward pass of x[which] adds up in any order
    cache.reorder_cache(which)
    return last_hidden_state(outputs)[rows, last].index_select(0, which), cache


def read_on(model, ids, n, cache):
    """(B, K) ids, of which the cache holds all but the last n -> (B, n, H) last hidden states. An
    id of -1, between a prompt and what follows it, is no token: nothing looks there."""
    is_token = ids >= 0
    positions = is_token.cumsum(dim=1) - 1
    # While decoding, rows that have ended go on with the others, which may have more room
    positions = positions.clamp(max=starter.context_length(model) - 1)
    outputs = model.base_model(
        input_ids=ids[:, -n:],
        attention_mask=is_token,
        position_ids=positions[:, -n:],
        use_cache=True,
        **{starter.name_of_cache(model.base_model): cache},
    )
    return last_hidden_state(outputs)


PROMPTS_READ_ONCE = {"cpu"}  # devices where this was measured to be quicker in the update


def is_checkpointed(model):
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def prompts_apart(ids, mask):
    """(B, W) ids, (B, W) True at the response tokens -> (B, L) prompts, padded on the right with
    -1; (B, T) what follows them; (B, T) True where the mask is. A prompt's last token is the first
    that follows, since its output is the first that is scored."""
    starts = mask.int().argmax(dim=1).tolist()  # 0 in a row without a response
    prompts = pad_sequence([row[:n] for row, n in zip(ids, starts)], True, -1)
    ids_after = pad_sequence([row[n:] for row, n in zip(ids, starts)], True)
    mask_after = pad_sequence([row[n:] for row, n in zip(mask, starts)], True)
    width = mask_after.any(dim=0).nonzero().max() + 1
    return prompts, ids_after[:, :width], mask_after[:, :width]


def hidden_states(model, rows, precision):
    """-> (N, H) last hidden states at the N response tokens, row after row."""
    ids = rows["input_ids"]
    mask = rows["response_mask"]
    has_prompts = mask.int().argmax(dim=1).any()  # of two tokens and more
    with starter.autocast(ids.device, precision):
        reads_once = ids.device.type in PROMPTS_READ_ONCE and has_prompts
        if is_checkpointed(model) or not reads_once:
            outputs = model.base_model(input_ids=ids, use_cache=False)
            return last_hidden_state(outputs)[mask]
        prompts, ids_after, mask_after = prompts_apart(ids, mask)
        _, cache = read_prompts(model, prompts)
        ids = torch.cat([prompts, ids_after], dim=1)
        return read_on(model, ids, ids_after.shape[1], cache)[mask_after]


# --------------------------------------------------------------------------------------------------
# 2. Attention on a CPU.

MULTIPLIED_OUT = 65_536  # largest T * K; beyond it torch's fused kernel is as quick, or quicker


def attention(module, query, key, value, attention_mask, **kwargs):
    """transformers' attention interface -> (B, T, heads, d), None. attention_mask: (B, 1, T, K),
    0 where a query may look, else a large negative number. Short rows are multiplied out: at 64
    tokens torch's kernel takes 1.5 times as long in float32, and five times as long in bf16."""
    n, heads, length, d = query.shape
    kv_heads, n_keys = key.shape[1:3]
    if length * n_keys > MULTIPLIED_OUT:
        fused = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return fused(module, query, key, value, attention_mask, **kwargs)
    query = query.reshape(n, kv_heads, -1, d) * kwargs["scaling"]  # heads that share keys, together
    scores = (query @ key.mT).view(n, heads, length, n_keys)
    weights = (scores + attention_mask).softmax(dim=-1).to(value.dtype)
    out = weights.view(n, kv_heads, -1, n_keys) @ value
    return out.view(n, heads, length, -1).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("starter", attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("starter", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def attend_on_cpu(model):
    """Gives a model on a CPU this attention in the place of torch's kernel."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("starter")


def attends_here(model):
    """Whether a model, or what an edit has put in its place, has this attention."""
    return getattr(getattr(model, "config", None), "_attn_implementation", "") == "starter"


def attend_as_loaded(model):
    if attends_here(model):
        model.set_attn_implementation("sdpa")


# --------------------------------------------------------------------------------------------------
# 3. Logits.

# Logits held at a time, and a few times that in the backward pass. Elsewhere starter's number: few
# large kernels are quick on a GPU.
LOGITS_AT_ONCE = {"cpu": 16_777_216}


@functools.cache
def calls_its_base_model(model_class):
    """Whether forward() of this class calls its base model, and not, as OPT's, a part of it."""
    return f"self.{model_class.base_model_prefix}(" in inspect.getsource(model_class.forward)


class OfBaseModel(BaseModelOutputWithPast):
    """What a base model returns, of which everything but the hidden states is None."""

    def __getattr__(self, name):
        return None


def logits_from(model, hidden):
    """(N, H) last hidden states -> (N, V) logits, by the model's own forward(), for which its base
    model gives these states: a scale or a soft-cap behind the head has its effect."""
    if not calls_its_base_model(type(model)):
        return model.get_output_embeddings()(hidden)
    outputs = OfBaseModel(last_hidden_state=hidden[None])
    ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)  # not looked at
    base_model = model.base_model
    base_model.forward = lambda *arguments, **named: outputs
    try:
        return model(input_ids=ids, use_cache=False).logits[0]
    finally:
        del base_model.forward


# --------------------------------------------------------------------------------------------------
# 4. Sampling.


def start_decoding(policy, prompts):
    """Like starter.start_decoding. Equal prompts are read once. Prompts of different lengths come
    together, since nothing looks at the padding between them and their responses."""
    ids = pad_sequence([torch.tensor(p) for p in prompts], True, -1).to(policy.device)
    cache = None

    def next_logits(tokens):
        nonlocal ids, cache
        if tokens is None:
            hidden, cache = read_prompts(policy, ids)
        else:
            ids = torch.cat([ids, tokens], dim=1)
            hidden = read_on(policy, ids, 1, cache)[:, 0]
        return logits_from(policy, hidden)

    return next_logits


# --------------------------------------------------------------------------------------------------
# 5. Statistics.


COMPILED = set()  # "statistics", where support/gpu.py has them compiled


@functools.cache
def compiled(function):
    return torch.compile(function, dynamic=True)


class Recomputed(torch.autograd.Function):
    """function(hidden), of which nothing is kept: the backward pass computes it again. torch's own
    checkpoint would keep what belongs to statistics that the loss does not use."""

    @staticmethod
    def forward(ctx, function, hidden):
        ctx.function = function
        ctx.save_for_backward(hidden)
        ctx.set_materialize_grads(False)
        return function(hidden)

    @staticmethod
    def backward(ctx, *gradients):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("support/fast.py needs loss.backward(), without inputs")
        [hidden] = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            loss = 0.0
            for values, gradient in zip(ctx.function(hidden), gradients):
                if gradient is not None:  # of a statistic that the loss uses
                    loss = loss + (values * gradient).sum()
        loss.backward()  # gives the head's weights theirs, too
        return None, hidden.grad


@torch.no_grad()
def reference_of(ref_model, model, rows, precision):
    """-> a function from a slice of the response tokens to the reference's logits there. Another
    kind of model than the policy, such as two models in one, makes all its logits at once."""
    if ref_model is None:
        return lambda some: None
    is_alike = type(ref_model) is type(model) and ref_model.config == model.config
    if not is_alike or not runs_as_its_class(ref_model):
        logits = starter.response_logits(ref_model, rows, precision)
        return lambda some: logits[some]
    hidden = hidden_states(ref_model, rows, precision)
    return lambda some: logits_from(ref_model, hidden[some]).detach()


def token_statistics(model, rows, temperature, precision="float32", ref_model=None):
    """Like starter.token_statistics. Only some of the (N, V) logits exist at a time."""
    if not runs_as_its_class(model):
        plain = edits.OWN["token_statistics"]
        return plain(model, rows, temperature, precision, ref_model)
    mask = rows["response_mask"]
    device = mask.device
    labels = rows["labels"][mask]
    ref_logits_of = reference_of(ref_model, model, rows, precision)
    statistics_of_logits = starter.statistics_of_logits
    if COMPILED:
        statistics_of_logits = compiled(statistics_of_logits)
    names = []  # of the statistics, which autograd's functions do not take

    def of_slice(some, hidden):
        with starter.autocast(device, precision):
            logits = logits_from(model, hidden)
            ref_logits = ref_logits_of(some)
        stats = statistics_of_logits(logits, labels[some], temperature, ref_logits)
        names[:] = stats
        return tuple(stats.values())

    hidden = hidden_states(model, rows, precision)
    hidden.requires_grad_()  # the head may be all that learns
    at_once = LOGITS_AT_ONCE.get(device.type, starter.LOGITS_AT_ONCE)
    n = max(1, at_once // model.config.get_text_config().vocab_size)
    slices = []
    for start in range(0, max(1, len(labels)), n):
        some = slice(start, start + n)
        function = functools.partial(of_slice, some)
        slices.append(Recomputed.apply(function, hidden[some]))
    stats = dict(zip(names, map(torch.cat, zip(*slices))))
    zeros = torch.zeros(mask.shape, dtype=stats["log_probs"].dtype, device=device)
    return {name: zeros.masked_scatter(mask, x.to(zeros.dtype)) for name, x in stats.items()}


# --------------------------------------------------------------------------------------------------
# 6. Which models.

FUNCTIONS = {"start_decoding": start_decoding, "token_statistics": token_statistics}


def made_up_responses(prompts, policy, max_new_tokens):
    """Returns a Response to each prompt. Rows are as long as any of the run can become, or as there
    is memory for all of their logits; their ends are scored."""
    n = min(max_new_tokens, 64)
    most = starter.LOGITS_AT_ONCE // policy.config.get_text_config().vocab_size
    responses = []
    for prompt_ids in prompts:
        [ids] = models.longest_row(policy, prompt_ids, max_new_tokens).tolist()
        ids = ids[: max(len(prompt_ids) + 2, most)]
        responses.append(starter.Response(ids[:-n], ids[-n:], [0.0] * n, False))
    return responses


def some_of_gradient(policy):
    """Returns about a thousand numbers of the gradient of each tensor."""
    gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return torch.cat([x[:: 1 + len(x) // 1000].float() for x in gradients])


def outputs_of(token_statistics, policy, batches):
    """Lists of Responses -> {name: output}, and among these some of the gradient of all statistics
    together, each weighted by the number of its token."""
    parts = []
    for responses in batches:
        rows = starter.make_batch(responses, torch.zeros(len(responses)), policy.device)
        stats = token_statistics(policy, rows, 1.0)
        loss = sum((rows["labels"] * values).sum() for values in stats.values())
        loss.backward()
        mask = rows["response_mask"]
        parts.append({name: values[mask].detach() for name, values in stats.items()})
    outputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    outputs["gradient"] = some_of_gradient(policy)
    policy.zero_grad()
    return outputs


def check_fit(policy, prompts, cfg):
    """Raises DoesNotFit, or an error of the model, where an output differs by more than a
    thousandth of the largest from that of the plain functions for each row alone."""
    if not runs_as_its_class(policy):
        raise DoesNotFit("it has a forward() of its own, or hooks")
    prompts = sorted(prompts, key=len)
    prompts = [prompts[0], prompts[-1], prompts[-1]]
    responses = made_up_responses(prompts, policy, cfg.max_new_tokens)
    alone = [[response] for response in responses]
    plain = outputs_of(edits.OWN["token_statistics"], policy, alone)
    attend_on_cpu(policy)
    ours = outputs_of(token_statistics, policy, [responses])
    for name, values in plain.items():
        difference = (ours[name] - values).abs().max()
        error = (difference / values.abs().max().clamp(min=0.01)).item()
        if not error <= 1e-3:
            raise DoesNotFit(f"its {name} differs by {error:.1%}")
    row = models.longest_row(policy, prompts[-1], cfg.max_new_tokens)
    if not reads_long_rows(policy, row):
        raise DoesNotFit("it reads its longest rows otherwise")
    if not models.decodes_as_it_reads(start_decoding, policy, row, map(len, prompts)):
        raise DoesNotFit("it decodes otherwise than it reads")


@torch.no_grad()
def reads_long_rows(policy, ids):
    """Whether log-probs at the end of (1, L) ids are those of the model's own forward pass."""
    columns = models.last_columns(ids.shape[1] - 1)
    rows = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    rows["response_mask"] = torch.zeros_like(rows["labels"], dtype=torch.bool)
    rows["response_mask"][:, columns] = True
    ours = token_statistics(policy, rows, 1.0)["log_probs"][0, columns]
    whole = models.log_probs(policy, ids, columns)
    return not models.differ(ours, whole.gather(1, ids[0, 1:][columns, None])[:, 0])


def is_fault_of_support(error):
    """Whether code of this folder raised an error that it did not mean to raise."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Path(last.filename).parent == Path(__file__).parent and type(error) is not DoesNotFit


def attach(policy, ref_model, prompts, cfg):
    """Has this file's functions run in the place of starter.py's if they fit the model, else says
    why not."""
    if not edits.is_shipped(*FUNCTIONS, *edits.PARTS["token_statistics"]):
        return  # they fit each other alone
    try:
        check_fit(policy, prompts, cfg)
    except Exception as error:  # code of the model's authors runs here
        attend_as_loaded(policy)
        policy.zero_grad()
        reason = f"does not fit {type(policy).__name__}: {error!s:.150}"
        if is_fault_of_support(error):
            reason = f"has a fault, which is none of {type(policy).__name__}: {error!r:.150}"
        print(
            f"support/fast.py {reason}; the model's own forward pass runs, which takes more time "
            "and memory"
        )
        return
    if isinstance(ref_model, type(policy)):
        attend_on_cpu(ref_model)
    edits.replace(**FUNCTIONS)
