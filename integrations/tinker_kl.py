"""The KL penalty of starter.py for scripts that train with Tinker (tinker 0.38).

docs/tinker.md has the lines to change in such a script, the parameters, and what each method was
measured to do. Terms and adaptive rules are imported from starter.py and support/. Log-probs are in
nats and at temperature 1, so sample at temperature 1.
"""

import asyncio
import math

import torch
from tinker import types
from torch.nn.utils.rnn import pad_sequence

import starter
from integrations.options import checked_kl_settings
from starter import InputError, KLController, KLSettings


def padded(rows):
    """B tensors -> (B, T), with 0 on the right."""
    return pad_sequence(rows, batch_first=True)


# 1. Settings.


def make_controller(kl_coef=0.1, state=None, **options):
    """Returns a starter.KLController. Its beta is the coefficient of the next step, its settings
    are what compute_grpo_kl_loss takes as kl.

    options: main()'s parameters of the KL penalty (options.py). state: the controller.state of a
    run that is resumed, a dict of numbers.
    """
    kl = checked_kl_settings(kl_coef=kl_coef, **options)
    check_estimator(kl)
    return KLController(kl_coef, kl, state)


def check_estimator(kl):
    """Raises InputError for an estimator that needs more than two log-probs of a token."""
    if kl.kl_estimator in starter.EXACT:
        raise InputError(
            f"kl_estimator = {kl.kl_estimator!r} sums over the vocabulary, but the service gives "
            f"two log-probs of a token; use one of {sorted(starter.ESTIMATORS)}"
        )


def ppo_loss_fn_config(cliprange=0.2):
    """Returns the loss_fn_config of the built-in "ppo": 0.2 is ratios in [0.8, 1.2], which the
    service takes as absolute numbers. cliprange may be a pair (low, high)."""
    low = high = cliprange
    if isinstance(cliprange, (tuple, list)):
        low, high = cliprange
    if not (0 < low <= 1 and 0 < high < math.inf):
        raise InputError(
            f"cliprange = {cliprange!r} must be a distance from 1, such as 0.2 for ratios in "
            "[0.8, 1.2]"
        )
    return {"clip_low_threshold": 1 - low, "clip_high_threshold": 1 + high}


# 2. Advantages.  Lists of numbers, as they come from the sampling client.

IN_REWARD = KLSettings(kl_estimator="k1", kl_in="reward")


def advantages_with_kl(advantages, logprobs, ref_logprobs, kl_coef=0.1, kl=IN_REWARD):
    """B advantages, B lists of log-probs -> B lists of advantages, one for each token: less
    kl_coef times the KL of this token and of all later ones.

    This is the alternative that works with the built-in "ppo". One optimiser step per rollout:
    on older samples its gradient is biased (README_KL.md).
    """
    if kl.kl_estimator != "k1":
        raise InputError(
            f"kl_estimator = {kl.kl_estimator!r} in the advantages does not see the sign of the "
            "log-ratio; use kl_estimator = 'k1'"
        )
    mask = padded([torch.ones(len(row), dtype=torch.bool) for row in logprobs])
    old = padded(for_each_token(logprobs, logprobs, "logprobs"))
    ref = padded(for_each_token(ref_logprobs, logprobs, "ref_logprobs"))
    of_tokens = padded(for_each_token(advantages, logprobs, "advantages"))
    of_tokens = of_tokens - kl_coef * starter.kl_in_reward(old, ref, mask, kl)
    return [row[: len(own)].tolist() for row, own in zip(of_tokens, logprobs)]


def for_each_token(values, rows, name):
    """B numbers or lists of them -> B tensors as long as the rows, which are the responses. Raises
    InputError where they do not belong to the same responses."""
    if len(values) != len(rows):
        raise InputError(
            f"{name} has {len(values)} entries for {len(rows)} responses; give one for each"
        )
    tensors = []
    for i, (own, row) in enumerate(zip(values, rows)):
        if not torch.is_tensor(own):
            own = torch.tensor(own, dtype=torch.get_default_dtype())
        if own.dim() == 0:
            own = own.expand(len(row))
        if len(own) != len(row):
            raise InputError(
                f"{name}[{i}] has {len(own)} numbers for {len(row)} response tokens; give one for "
                "each"
            )
        tensors.append(own)
    return tensors


# 3. Datums.  Position t of every tensor is about the target that follows input token t.


def make_datums(prompt_tokens, response_tokens):
    """B lists of prompt ids, B lists of response ids -> B Datums for forward_backward_custom.

    They hold what old and new versions of the SDK let through: target_tokens, and weights, which
    are 1 on the response. A weight is the share of its token in the loss: scale it for another
    average.
    """
    datums = []
    for prompt, response in zip(prompt_tokens, response_tokens, strict=True):
        datums.append(make_datum(prompt, response, weights=torch.ones(len(response))))
    return datums


def make_ppo_datums(prompt_tokens, response_tokens, logprobs, advantages):
    """The same for the built-in "ppo" and "importance_sampling".

    logprobs: of the sampler, one for each response token. advantages: a number for each response,
    or a list with one for each token. The prompt has advantage 0, which is how it is left out.
    """
    logprobs = for_each_token(logprobs, response_tokens, "logprobs")
    advantages = for_each_token(advantages, response_tokens, "advantages")
    datums = []
    for i, (prompt, response) in enumerate(zip(prompt_tokens, response_tokens, strict=True)):
        datums.append(make_datum(prompt, response, logprobs=logprobs[i], advantages=advantages[i]))
    return datums


def make_datum(prompt, response, **of_response):
    """One prompt, one response and what is known of each response token -> Datum."""
    if not len(prompt) or not len(response):
        raise InputError(
            f"a prompt of {len(prompt)} and a response of {len(response)} tokens cannot be "
            "trained; each needs at least one, so leave this one out"
        )
    whole = [*prompt, *response]
    inputs = {"target_tokens": torch.tensor(whole[1:])}
    for name, values in of_response.items():
        inputs[name] = torch.cat([torch.zeros(len(prompt) - 1), values])
    return types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)


async def compute_reference_logprobs(ref_client, prompt_tokens, response_tokens):
    """B lists of prompt ids, B lists of response ids -> B lists of log-probs of the response
    tokens under the reference, in nats. All requests run at the same time.

    ref_client: service_client.create_sampling_client(base_model=...).
    """
    requests = [
        ref_client.compute_logprobs(types.ModelInput.from_ints([*prompt, *response]))
        for prompt, response in zip(prompt_tokens, response_tokens, strict=True)
    ]
    ref_logprobs = []
    for i, of_text in enumerate(await asyncio.gather(*requests)):
        # Entry t is about token t itself: it is not shifted. The first has nothing before it.
        of_response = of_text[len(prompt_tokens[i]) :]
        if len(of_response) != len(response_tokens[i]) or None in of_response:
            raise InputError(
                f"response {i} was not scored on all of its {len(response_tokens[i])} tokens; its "
                "prompt needs at least one token"
            )
        ref_logprobs.append(of_response)
    return ref_logprobs


# 4. Loss.


def compute_grpo_kl_loss(
    data,
    logprobs_list,
    kl_coef=0.1,
    cliprange=0.2,
    advantages=None,
    old_logprobs=None,
    ref_logprobs=None,
    kl=KLSettings(),
    as_printed=False,
):
    """A loss for forward_backward_custom: the PPO-clipped term plus kl_coef * KL, summed over the
    response tokens of all datums, as the built-in "ppo" sums. Returns it and metrics.

    data, logprobs_list: what the SDK hands over. advantages, old_logprobs, ref_logprobs: for each
    datum a list with one number for each response token (advantages also: one number). They come
    in by functools.partial; if one is absent, it is read from each datum's loss_fn_inputs, padded
    with zeros on the prompt ("advantages", "logprobs", "ref_logprobs", as in the Tinker guide).
    kl_coef = 0 needs no reference. kl: of a KLController, or a starter.KLSettings.

    as_printed=True is the guide's own term, kl_coef * (log ref - log pi) on every position, the
    prompt included. Its expected gradient on the response is zero; kl is then not used.
    """
    if not 0 <= kl_coef < math.inf:
        raise InputError(f"kl_coef = {kl_coef!r} must be a number of at least 0; use 0.3")
    check_estimator(kl)
    policy = padded(logprobs_list)
    weights = [weights_of(datum).to(policy.dtype) for datum in data]
    advantages = aligned(advantages, "advantages", data, weights)
    old = aligned(old_logprobs, "logprobs", data, weights)
    ref = aligned(ref_logprobs, "ref_logprobs", data, weights)
    if advantages is None or old is None or (ref is None and kl_coef):
        raise InputError(
            f"the loss with kl_coef = {kl_coef!r} needs advantages, old_logprobs and "
            "ref_logprobs; pass them with functools.partial"
        )
    shares = padded(weights)
    mask = shares != 0
    beta = 0.0 if as_printed else kl_coef
    loss, metadata = starter.compute_loss(advantages, policy, old, cliprange, ref, beta, mask, kl)
    total = torch.where(mask, loss * shares, 0.0).sum()
    if as_printed and kl_coef:
        total = total + kl_coef * (ref - policy).sum()  # padding is 0 in both

    metrics = {name: float(value) for name, value in metadata.items()}
    if ref is not None:
        metrics["kl_per_token"] = metrics["kl_k3"]
        metrics["kl_per_sequence"] = metrics["kl_k3"] * float(mask.sum()) / len(data)
        metrics["adaptive_kl/raw_kl"] = metrics["kl_penalty_mean"]
        metrics["adaptive_kl/current_beta"] = float(kl_coef)
    return total, metrics


def weights_of(datum):
    """(T,) share of each token in the loss; 0 on the prompt. A datum of the guide's form has no
    weights: its prompt is the zeros with which all of its tensors begin."""
    inputs = datum.loss_fn_inputs
    if "weights" in inputs:
        return inputs["weights"].to_torch()
    names = [name for name in ("advantages", "logprobs", "ref_logprobs") if name in inputs]
    if not names:
        raise InputError(
            f"a datum with {sorted(inputs)} does not say which tokens are the response; build it "
            "with make_datums"
        )
    is_known = torch.stack([inputs[name].to_torch() != 0 for name in names]).any(dim=0)
    return (is_known.cumsum(0) > 0).float()


def aligned(given, name, data, weights):
    """Values for each response token, or those in the datums -> (B, T), 0 on the prompt. None if
    there are neither."""
    dtype = weights[0].dtype
    if given is None:
        if not all(name in datum.loss_fn_inputs for datum in data):
            return None
        return padded([datum.loss_fn_inputs[name].to_torch().to(dtype) for datum in data])
    masks = [share != 0 for share in weights]
    of_response = for_each_token(given, [mask[mask] for mask in masks], name)
    rows = []
    for mask, values in zip(masks, of_response):
        zeros = torch.zeros(mask.shape, dtype=dtype)
        rows.append(zeros.masked_scatter(mask, values.to(dtype)))
    return padded(rows)
