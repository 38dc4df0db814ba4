"""What each KL term of GRPO really does, by exact enumeration.

    python -m lab.verify_kl              writes lab/results/kl_*.csv, in about two minutes; the last
                                         line says how many claims held
    python -m lab.verify_kl gradients    one of EXPERIMENTS

The code under test is starter.py's own: every row runs its public functions. The other side of
each comparison is written here, with plain probabilities and autograd, over all responses of a
policy that is small enough to list them. A row with a claim says what it is compared with, how
far off it is, and whether the claim held. Many claims are that a term is wrong: a check that
cannot see a known mistake proves nothing.

In the comments d = log policy - log reference and r = policy / sampler, both of the sampled token.
The sampler is the policy, an old policy, or an engine that differs from that. KL is in nats.
"""

import math
import sys
from collections import defaultdict
from itertools import product
from typing import NamedTuple

import starter  # before torch, for which it sets variables

import torch

from lab.rows import write_csv

starter.find_support()  # its import adds the rules as printed


def term(kl_estimator="k3", kl_gradient="reverse", kl_in="loss", **others):
    """Returns starter's KLSettings. Unless others say so, no ratio is cut."""
    return starter.KLSettings(
        kl_estimator=kl_estimator,
        kl_gradient=kl_gradient,
        kl_in=kl_in,
        **dict(kl_ratio_cap=math.inf) | others,
    )


def holds(value, bar):
    """Whether a value is on the right side of a bar such as "< 0.1" or "> 5"; "" without a bar."""
    if not bar:
        return ""
    sign, number = bar.split()
    return value < float(number) if sign == "<" else value > float(number)


# 1. Enumeration.  Vocabulary, length -> every response.
#
# A policy is a (V, H) weight. Its logits in a state are features @ weight.T.


class World(NamedTuple):
    """All B responses of at most T tokens, and the features of the S states they go through. A
    state is the list of tokens so far."""

    states: torch.Tensor  # (B, T)
    labels: torch.Tensor  # (B, T)
    mask: torch.Tensor  # (B, T)
    features: torch.Tensor  # (S, H)
    vocabulary: int


def make_world(vocabulary, max_tokens, n_features=None):
    """Returns a World in which token 0 ends a response.

    n_features: None gives each state its own logits (a table); a number gives states random
    features, so that a change in one state changes the others too, as in a neural network.
    """
    responses = []
    prefixes = [()]
    for prefix in prefixes:  # the list grows while it is read
        for token in range(vocabulary):
            ended = token == 0 or len(prefix) + 1 == max_tokens
            (responses if ended else prefixes).append(prefix + (token,))

    states, labels = torch.zeros(2, len(responses), max_tokens, dtype=torch.long)
    mask = torch.zeros_like(states, dtype=torch.bool)
    for i, response in enumerate(responses):
        for t, token in enumerate(response):
            states[i, t] = prefixes.index(response[:t])
            labels[i, t] = token
            mask[i, t] = True
    features = torch.eye(len(prefixes))
    if n_features is not None:
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(len(prefixes), n_features, generator=generator)
    return World(states, labels, mask, features.double(), vocabulary)


def random_policies(world, drift, staleness, seed):
    """Returns the (V, H) weights of reference, policy, old policy and sampler. Policy and reference
    differ by logits of about drift nats, policy, old policy and sampler by staleness."""
    generator = torch.Generator().manual_seed(seed)
    n_states, n_features = world.features.shape
    scale = 1 if n_features == n_states else n_features**-0.5
    ref, step, stale, other = (
        scale * torch.randn(world.vocabulary, n_features, generator=generator).double()
        for _ in range(4)
    )
    policy = ref + drift * step
    old = policy + staleness * stale
    return ref, policy, old, old + staleness * other


def look_up(world, weight, ref):
    """Returns starter's statistics, a dict of (B, T) tensors, 0 outside the mask."""
    hidden = world.features[world.states[world.mask]]
    stats = starter.statistics_of_logits(
        hidden @ weight.T, world.labels[world.mask], 1.0, hidden @ ref.T
    )
    zeros = torch.zeros(world.mask.shape).double()
    return {name: zeros.masked_scatter(world.mask, x) for name, x in stats.items()}


def token_loss(
    world,
    weight,
    ref,
    old=None,
    advantages=0.0,
    kl_coef=1.0,
    kl=starter.KLSettings(),
    sampler=None,
    is_corrected=True,
):
    """Returns the (B, T) loss of every response by starter's functions, and the (B,) probability
    of each under the sampler, which is the old policy where it is None, and that the policy itself.
    Nothing is clipped. is_corrected: whether the loss knows the sampler's log-probs."""
    stats = look_up(world, weight, ref)
    log_probs = stats["log_probs"]
    old_log_probs = log_probs.detach()
    if old is not None:
        old_log_probs = look_up(world, old, ref)["log_probs"]
    sampler_log_probs = old_log_probs
    if sampler is not None:
        sampler_log_probs = look_up(world, sampler, ref)["log_probs"]
    loss, _ = starter.compute_loss(
        torch.zeros(len(world.mask), 1).double() + advantages,
        log_probs,
        old_log_probs,
        math.inf,
        stats["ref_log_probs"],
        kl_coef,
        world.mask,
        kl,
        stats.get(starter.EXACT.get(kl.kl_estimator)),
        sampler_log_probs if is_corrected else None,
    )
    return torch.where(world.mask, loss, 0.0), sampler_log_probs.sum(dim=1).exp()


def expected_gradient(world, policy, ref, kl, loss_average=None, **samplers):
    """Returns the (V, H) gradient of the KL term, summed over tokens, expected over all responses
    of the sampler. loss_average: weights tokens by starter.AVERAGES, scaled so that a token
    weighs 1 on average. samplers: old, sampler and is_corrected of token_loss."""
    weight = policy.clone().requires_grad_()
    loss, p = token_loss(world, weight, ref, kl=kl, **samplers)
    p = p[:, None] * world.mask  # (B, T)
    if loss_average is not None:
        share = starter.AVERAGES[loss_average](world.mask.double(), world.mask.shape[1])
        p = p * share * p.sum() / (p * share).sum()
    return torch.autograd.grad((p * loss).sum(), weight)[0]


TOKEN = "reverse KL per token"
SEQUENCE = "KL of whole responses"
FORWARD = "forward KL per token"
FORWARD_SEQUENCE = "forward KL of visited states"
ZERO = "zero"
AWAY = "minus KL(old || policy)"


def exact_gradients(world, policy, ref, old):
    """Returns {target: (V, H) gradient}, by plain autograd through the probabilities of tokens and
    responses.

    "per token" is a sum over the states that the sampler, old, visits, as often as it does,
    whatever the policy does; "of visited states" over those that the policy itself visits.
    """
    weight = policy.clone().requires_grad_()
    log_p, log_q, log_old = (
        (world.features @ w.T).log_softmax(dim=1) for w in (weight, ref, old)
    )  # (S, V)
    of_p, of_q, of_old = (  # (B,) log-prob of the response
        torch.where(world.mask, table[world.states, world.labels], 0.0).sum(dim=1)
        for table in (log_p, log_q, log_old)
    )

    # (S,) mean number of visits in a response of the old policy
    p_of_visit = of_old.exp()[:, None].expand_as(world.mask)[world.mask]
    visits = torch.zeros(len(log_p)).double().index_add(0, world.states[world.mask], p_of_visit)

    forward = (log_q.exp() * (log_q - log_p)).sum(dim=1)  # (S,)
    quantities = {
        TOKEN: visits @ (log_p.exp() * (log_p - log_q)).sum(dim=1),
        FORWARD: visits @ forward,
        FORWARD_SEQUENCE: of_p.exp() @ (forward[world.states] * world.mask).sum(dim=1),
        AWAY: -visits @ (log_old.exp() * (log_old - log_p)).sum(dim=1),
        SEQUENCE: of_p.exp() @ (of_p - of_q),
        ZERO: 0 * log_p.sum(),
    }
    return {
        name: torch.autograd.grad(quantity, weight, retain_graph=True)[0]
        for name, quantity in quantities.items()
    }


def cosine(a, b):
    return torch.cosine_similarity(a.flatten(), b.flatten(), 0).item()


# 2. Truth table.  Estimator x gradient x placement x who sampled -> error against what is claimed.


class Case(NamedTuple):
    sampled_by: str  # "policy", "old" or "sampler"
    kl: starter.KLSettings
    claims: dict  # target: whether the gradient is exactly that
    note: str = ""
    others: dict = {}  # of expected_gradient


def claims_of(kl, on_policy, one_step):
    """Returns what is claimed of a setting: {target: whether the gradient is exactly that}."""
    to_go = kl.kl_in == "loss_to_go" and not one_step
    if kl.kl_in == "reward":
        return {SEQUENCE: kl.kl_estimator == "k1" and on_policy}
    if kl.kl_estimator == "exact_forward":
        forward = {FORWARD_SEQUENCE: on_policy} if to_go else {FORWARD: True}
        return forward | {TOKEN: False}
    reverse = (
        kl.kl_gradient == "reverse"
        or kl.kl_estimator == "exact"
        or (kl.kl_estimator == "k2" and on_policy)
    )
    if to_go:  # a k2 of later tokens is a biased value, and the samples must be the policy's own
        return {SEQUENCE: reverse and kl.kl_estimator != "k2" and on_policy}
    if reverse:  # a token's own KL; how the token changes that of later ones is missing
        return {TOKEN: True} if one_step else {TOKEN: True, SEQUENCE: False}
    as_written = {"k1": {ZERO if on_policy else AWAY: True}, "k2": {}, "k3": {FORWARD: on_policy}}
    return {TOKEN: False} | as_written[kl.kl_estimator]


def make_cases(one_step):
    """Returns the Cases of the full grid, and some more."""
    grid = [
        term(*setting)
        for setting in [
            *product(
                ("k1", "k2", "k3", "exact"), ("reverse", "as_written"), ("loss", "loss_to_go")
            ),
            *product(("exact_forward",), ("reverse",), ("loss", "loss_to_go")),
            *product(("k1", "k2", "k3"), ("reverse",), ("reward",)),
        ]
    ]
    in_reward = term("k1", kl_in="reward")
    return [
        *(
            Case(by, kl, claims_of(kl, by == "policy", one_step))
            for by, kl in product(("policy", "old"), grid)
        ),
        *(
            Case("sampler", term(estimator), {TOKEN: True})
            for estimator in ("k1", "k2", "k3", "exact")
        ),
        Case("sampler", term("exact_forward"), {FORWARD: True}),
        *(
            Case(
                "sampler", term(estimator), {TOKEN: False}, "not corrected", {"is_corrected": False}
            )
            for estimator in ("k1", "k2", "k3")
        ),
        Case("old", term(kl_ratio_cap=2.0), {TOKEN: False}, "r cut at 2"),
        *(
            Case(
                "policy",
                term(estimator, kl_adaptation_method="clip", kl_clip_threshold=0.3),
                {TOKEN: False},
                "min(KL, 0.3)",
            )
            for estimator in ("k1", "k3", "exact")
        ),
        Case(
            "policy", in_reward, {SEQUENCE: True}, "constant divisor", {"loss_average": "dr_grpo"}
        ),
        Case("policy", in_reward, {SEQUENCE: one_step}, "1 / own length", {"loss_average": "grpo"}),
    ]


def gradient_rows(n_policies=10):
    """Returns the rows of kl_gradients.csv, each over n_policies random policies.

    "exact" holds where no policy is off by 1e-10 (norm of the difference). "wrong" holds where
    the median error is above 1 % of the target's norm (of the norm of the sequence KL's gradient
    where the target is zero).
    """
    columns = [
        "policy",
        "sampled by",
        "placement",
        "estimator",
        "gradient",
        "note",
        "target",
        "claim",
    ]
    worlds = {
        "one step": make_world(7, 1),
        "3 steps, tabular": make_world(4, 3),
        "3 steps, shared": make_world(4, 3, n_features=3),
    }
    measured = defaultdict(list)  # columns -> for each policy error, relative, cosine
    for (name, world), seed in product(worlds.items(), range(n_policies)):
        ref, policy, old, sampler = random_policies(world, drift=1.5, staleness=1.0, seed=seed)
        samplers = {"policy": {}, "old": {"old": old}, "sampler": {"old": old, "sampler": sampler}}
        targets_of = {
            by: exact_gradients(world, policy, ref, last)
            for by, last in zip(samplers, (policy, old, sampler))
        }
        for case in make_cases(name == "one step"):
            ours = expected_gradient(
                world, policy, ref, case.kl, **samplers[case.sampled_by], **case.others
            )
            targets = targets_of[case.sampled_by]
            direction = cosine(ours, targets[SEQUENCE]) if ours.norm() > 1e-10 else math.nan
            gradient = "" if case.kl.kl_in == "reward" else case.kl.kl_gradient
            for target, is_exact in case.claims.items():
                error = (ours - targets[target]).norm()
                size = targets[target].norm() or targets[SEQUENCE].norm()
                key = (
                    name,
                    case.sampled_by,
                    case.kl.kl_in,
                    case.kl.kl_estimator,
                    gradient,
                    case.note,
                    target,
                    "exact" if is_exact else "wrong",
                )
                measured[key].append([error.item(), (error / size).item(), direction])
    rows = []
    for key, errors in measured.items():
        errors = torch.tensor(errors, dtype=torch.float64)
        largest = errors[:, 0].max().item()
        _, relative, direction = errors.median(dim=0).values.tolist()
        held = holds(largest, "< 1e-10") if key[-1] == "exact" else holds(relative, "> 0.01")
        rows.append(
            dict(zip(columns, key))
            | {
                "largest error": largest,
                "median relative error": relative,
                "median cosine to sequence KL": "" if math.isnan(direction) else direction,
                "holds": held,
            }
        )
    return rows


# Penalties as published code has them, of one token: formula, placement, and the value. In the loss
# it is differentiated as it stands; from the reward it is subtracted. d = log pi - log ref.
MISTAKES = [
    ("d", "loss", lambda d: d),
    ("-d", "loss", lambda d: -d),
    ("exp(d) - 1 - d", "loss", lambda d: torch.expm1(d) - d),  # k3 with the sign of d reversed
    ("exp(d) * d", "loss", lambda d: d.exp() * d),
    ("min(k3, 1)", "loss", lambda d: (torch.expm1(-d) + d).clamp(max=1.0)),
    ("-d", "reward", lambda d: -d),
    ("abs(d)", "reward", lambda d: d.abs()),
    ("d^2 / 2", "reward", lambda d: d.square() / 2),
    ("k3", "reward", lambda d: torch.expm1(-d) + d),
]


def mistake_rows(n_policies=10):
    """Returns the rows of kl_mistakes.csv: medians over random policies of seven tokens. "value"
    and "size" are shares of the KL and of its gradient. The claim: that is off by 10 % or more."""
    world = make_world(7, 1)
    rows = []
    for formula, place, value_of in MISTAKES:
        measured = []
        for seed in range(n_policies):
            ref, policy, _, _ = random_policies(world, drift=1.5, staleness=0.0, seed=seed)
            weight = policy.clone().requires_grad_()
            stats = look_up(world, weight, ref)
            log_probs = stats["log_probs"]
            value = value_of(log_probs - stats["ref_log_probs"])
            surrogate = value if place == "loss" else value.detach() * log_probs
            p = log_probs.detach().exp()
            [ours] = torch.autograd.grad((p * surrogate).sum(), weight)
            exact = exact_gradients(world, policy, ref, policy)[SEQUENCE]
            share = (p * value).sum() / (p * stats["kl_per_token"]).sum()
            size = ours.norm() / exact.norm()
            error = (ours - exact).norm() / exact.norm()
            measured.append([share.item(), size.item(), cosine(ours, exact), error.item()])
        medians = torch.tensor(measured, dtype=torch.float64).median(dim=0).values.tolist()
        row = {"formula": formula, "in": place}
        row |= dict(zip(("value", "size", "cosine", "relative error"), medians))
        rows.append({**row, "holds": holds(medians[3], "> 0.1")})
    return rows


# 3. Bias and variance of the gradient that one response gives.

GRADIENTS = {
    "k1 in the reward": term("k1", kl_in="reward"),
    "k1 loss_to_go": term("k1", kl_in="loss_to_go"),
    "k3 loss_to_go": term("k3", kl_in="loss_to_go"),
    "exact loss_to_go": term("exact", kl_in="loss_to_go"),
    "k1, k2 or k3 in the loss": term("k3"),  # three values, one gradient
    "exact in the loss": term("exact"),
}


def bias_and_variance(world, policy, ref, kl):
    """Of the gradient that one response gives. Bias: against the gradient of the sequence KL, as a
    share of its norm. Variance: trace of the covariance."""
    target = exact_gradients(world, policy, ref, policy)[SEQUENCE].flatten()
    weight = policy.clone().requires_grad_()
    loss, p = token_loss(world, weight, ref, kl=kl)
    each = torch.stack(
        [  # (B, V * H)
            torch.autograd.grad(of_response, weight, retain_graph=True)[0].flatten()
            for of_response in loss.sum(dim=1)
        ]
    )
    mean = p @ each
    bias = (mean - target).norm() / target.norm()
    return [bias, p @ (each - mean).square().sum(dim=1)]


def variance_rows(n_policies=3):
    """Returns the rows of kl_variance.csv: means over policies; own samples, 3 steps, 8 shared
    features."""
    world = make_world(7, 3, 8)
    rows = []
    for (drift, size), (name, kl) in product((("small", 0.1), ("large", 1.5)), GRADIENTS.items()):
        errors = []
        for seed in range(n_policies):
            ref, policy, _, _ = random_policies(world, size, 0.0, seed)
            errors.append(bias_and_variance(world, policy, ref, kl))
        bias, variance = torch.tensor(errors).double().mean(dim=0).tolist()
        if name == "k1 in the reward":  # the first of GRADIENTS
            of_k1 = variance
        bar = "< 0.1" if (name, drift) == ("exact loss_to_go", "small") else ""
        rows.append(
            {
                "gradient": name,
                "drift": drift,
                "bias": bias,
                "of k1 in the reward": variance / of_k1,
                "bar": bar,
                "holds": holds(variance / of_k1, bar),
            }
        )
    return rows


# 4. Explosion.  A low-rank policy in float32, sampled, several updates per rollout -> the largest
#    gradient norm.

EXPLOSION = {  # name: changes of the KLSettings
    "none": dict(kl_coef=0.0),
    "k3 as written": dict(kl_gradient="as_written"),
    "k3 as written, min(k3, 10)": dict(
        kl_gradient="as_written", kl_adaptation_method="clip", kl_clip_threshold=10.0
    ),
    "k1 as written": dict(kl_estimator="k1", kl_gradient="as_written"),
    "k3, reverse (default)": {},
    "k3, reverse, d cut at 5": dict(kl_adaptation_method="clip_sound", kl_clip_threshold=5.0),
    # There the value of later tokens, exp(-d) and all, is in the gradient.
    "k3 loss_to_go": dict(kl_in="loss_to_go"),
    "exact in the loss": dict(kl_estimator="exact"),
    "exact loss_to_go": dict(kl_estimator="exact", kl_in="loss_to_go"),
}
VOCABULARY, WIDTH, RANK = 128, 32, 16
N_RESPONSES, N_TOKENS = 128, 16
DIVISOR = 256  # tokens per response by which the loss divides
EPOCHS, N_ROLLOUTS = 8, 15


def explosion_run(seed, kl):
    """One training run. Returns the largest gradient norm before clipping, the last one, and the
    KL at the end.

    logits = embedding(last token) @ up @ down.T, where down is 3 times the usual size: peaked
    distributions, and every update moves all tokens. A batch has 2,048 tokens and gets 8 Adam
    steps, with the gradient norm cut at 1. The reward is the share of tokens in a random eighth of
    the vocabulary. The loss divides by 256 tokens per response (dr_grpo), so that the effective
    coefficient is 0.04 * 16 / 256 = 0.0025 and drift costs almost nothing until the tail of
    exp(-d) is met. Beyond d = -88 exp(-d) overflows, and a cut of the value makes 0 * inf = nan of
    its gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
    up = WIDTH**-0.5 * torch.randn(WIDTH, RANK, generator=generator)
    down = 3.0 * torch.randn(VOCABULARY, RANK, generator=generator)
    liked = torch.randperm(VOCABULARY, generator=generator)[: VOCABULARY // 8]
    ref_up, ref_down = up.clone(), down.clone()
    optimizer = torch.optim.Adam([up.requires_grad_(), down.requires_grad_()], 0.03)

    norms = []
    for _, epoch in product(range(N_ROLLOUTS), range(EPOCHS)):
        if epoch == 0:
            first = torch.randint(VOCABULARY, (N_RESPONSES // 8, 1), generator=generator)
            tokens = first.repeat_interleave(8, dim=0)
            for _ in range(N_TOKENS):
                p = (embedding[tokens[:, -1]] @ up @ down.T).softmax(dim=1).detach()
                tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], dim=1)
            hidden = embedding[tokens[:, :-1].flatten()]  # (N, WIDTH)
            labels = tokens[:, 1:]  # (B, T)
            rewards = torch.isin(labels, liked).float().mean(dim=1)
            advantages, _ = starter.compute_group_normalized_advantages(rewards, 8, 1e-6, True)
        stats = starter.statistics_of_logits(
            hidden @ up @ down.T, labels.flatten(), 1.0, hidden @ ref_up @ ref_down.T
        )
        stats = {name: values.view(labels.shape) for name, values in stats.items()}
        if epoch == 0:
            old_log_probs = stats["log_probs"].detach()
        loss, _ = starter.compute_loss(
            advantages[:, None],
            stats["log_probs"],
            old_log_probs,
            0.2,
            stats["ref_log_probs"],
            kl.kl_coef,
            kl_settings=kl,
            vocab_kl=stats["kl_per_token"],
        )
        optimizer.zero_grad()
        (loss * starter.AVERAGES["dr_grpo"](torch.ones_like(loss), DIVISOR)).sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_([up, down], 1.0).item())
        if not math.isfinite(norms[-1]):
            break
        optimizer.step()
    return {
        "largest gradient norm": max(norm for norm in norms if not math.isnan(norm)),
        "last gradient norm": norms[-1],
        "last KL per token": stats["kl_per_token"].mean().item(),
    }


def explosion_rows(n_seeds=5):
    """Returns the rows of kl_explosion.csv, one for each seed. A run ends where its gradient is
    not finite."""
    bars = {"k3 as written": "> 1e6", "k3, reverse (default)": "< 1"}
    rows = []
    for (name, changes), seed in product(EXPLOSION.items(), range(n_seeds)):
        kl = starter.KLSettings(**dict(kl_coef=0.04) | changes)
        row = {"KL term": name, "seed": seed} | explosion_run(seed, kl)
        bar = bars.get(name, "")
        rows.append(row | {"bar": bar, "holds": holds(row["largest gradient norm"], bar)})
    return rows


# 5. Length.  One rare answer token, then filler or stop; the expected gradient over all lengths ->
#    which KL term makes responses longer.

LONGEST = 32  # tokens of a response
IN_REWARD = dict(kl_estimator="k1", kl_in="reward")
LENGTHS = {  # name: changes of the KLSettings, bar of the mean length
    "none": (dict(kl_coef=0.0), "< 5.1"),
    "sum of KL in the reward": (IN_REWARD, "< 5.1"),
    "KL / constant in the reward": (
        IN_REWARD | dict(kl_adaptation_method="length_normalized_sound"),
        "< 5.1",
    ),
    **{
        f"KL / own length in the reward, {kl_coef}": (
            IN_REWARD | dict(kl_adaptation_method="length_normalized", kl_coef=kl_coef),
            "> 8",
        )
        for kl_coef in (0.05, 0.2, 1.0)
    },
    "exact in the loss": (dict(kl_estimator="exact"), "< 5.1"),
    "exact loss_to_go": (dict(kl_estimator="exact", kl_in="loss_to_go"), "< 5.1"),
    "k1 as written, mean of each response": (
        dict(kl_estimator="k1", kl_gradient="as_written", loss_average="grpo"),
        "> 25",
    ),
}


def length_world(p_answer=0.05, p_stop=0.25):
    """Returns a World, the (2, S) reference log-probs and the (B, 1) reward, 1 for the answer.

    Token 0 is the answer at first and stop later, token 1 anything else. A state is the place and
    whether the answer came.
    """
    # First token and number of tokens. The longest are those that were cut.
    responses = list(product((0, 1), range(2, LONGEST + 2)))
    first, n_tokens = (torch.tensor(column)[:, None] for column in zip(*responses))
    place = torch.arange(LONGEST)[None]
    labels = torch.where(place == 0, first, (place < n_tokens - 1).long())
    states = torch.where(place == 0, 0, place + first * (LONGEST - 1))
    p = [[p_answer, 1 - p_answer]] + [[p_stop, 1 - p_stop]] * (2 * LONGEST - 2)
    features = torch.eye(len(p)).double()
    world = World(states, labels, place < n_tokens, features, 2)
    return world, torch.tensor(p).double().log().T.contiguous(), (first == 0).double()


def length_rows(steps=600):
    """Returns the rows of kl_length.csv: after Adam on the expected gradient. The reference's mean
    length is 5.0 tokens."""
    world, ref, reward = length_world()
    rows = []
    for name, (changes, bar) in LENGTHS.items():
        kl = starter.KLSettings(
            **dict(kl_coef=0.05, loss_average="dr_grpo", max_new_tokens=LONGEST) | changes
        )
        weight = ref.clone().requires_grad_()
        optimizer = torch.optim.Adam([weight], 0.05)
        # The probability of a response takes the place of 1 / B.
        share = starter.AVERAGES[kl.loss_average](world.mask.double(), LONGEST) * len(world.mask)
        for _ in range(steps + 1):
            stats = look_up(world, weight.detach(), ref)
            p = stats["log_probs"].sum(dim=1).exp()
            loss, _ = token_loss(world, weight, ref, None, reward - p @ reward, kl.kl_coef, kl)
            optimizer.zero_grad()
            (p[:, None] * share * loss).sum().backward()
            optimizer.step()
        length = (p @ world.mask.double().sum(dim=1)).item()
        kl_of_response = (p @ (stats["log_probs"] - stats["ref_log_probs"]).sum(dim=1)).item()
        rows.append(
            {
                "KL in": name,
                "kl_coef": kl.kl_coef,
                "P(answer)": (p @ reward).item(),
                "mean length": length,
                "KL per response": kl_of_response,
                "KL per token": kl_of_response / length,
                "bar": bar,
                "holds": holds(length, bar),
            }
        )
    return rows


# 6. The program.

EXPERIMENTS = {
    "gradients": gradient_rows,
    "mistakes": mistake_rows,
    "variance": variance_rows,
    "explosion": explosion_rows,
    "length": length_rows,
}


def cell(value):
    """A value as the csv files have it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else value


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors of a few hundred numbers: more threads only wait
    held = []
    for name in sys.argv[1:] or EXPERIMENTS:
        rows = [
            {column: cell(value) for column, value in row.items()} for row in EXPERIMENTS[name]()
        ]
        write_csv(f"kl_{name}", rows)
        for row in rows:
            if row["holds"]:
                held.append(row["holds"] == "yes")
                print(*row.values(), sep=" | ", flush=True)
    print(f"{sum(held)} of {len(held)} claims held")
    sys.exit(0 if all(held) else 1)
