"""What each KL term of GRPO really does, by exact enumeration.

    python -m lab.verify_kl      writes lab/results/kl_*.csv, in two minutes, and prints the claims
                                 that did not hold

The code under test is starter.py's own: every row runs its public functions. The other side of
each comparison is written here, with plain probabilities and autograd, over all responses of a
policy that is small enough to list them. Many claims are that a term is wrong: a check that cannot
see a known mistake proves nothing.

In the comments d = log policy - log reference and r = policy / sampler, both of the sampled token.
The sampler is the policy, an old policy, or an engine that differs from that. KL is in nats.
"""

import math
from itertools import product
from typing import NamedTuple

import starter  # before torch, for which it sets variables

import torch
from torch.nn.utils.rnn import pad_sequence

from lab.rows import write_csv

starter.find_support()  # its import adds the rules as printed


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


def make_world(vocabulary, max_tokens):
    """Returns a World in which token 0 ends a response. The states of several tokens have three
    random features, so that a change in one state changes the others, as in a neural network."""
    responses = []
    prefixes = [()]
    for prefix in prefixes:  # the list grows while it is read
        for token in range(vocabulary):
            ended = token == 0 or len(prefix) + 1 == max_tokens
            (responses if ended else prefixes).append((*prefix, token))
    number = {prefix: i for i, prefix in enumerate(prefixes)}
    rows = []  # (L, 2) each: state and label of each token
    for response in responses:
        pairs = [(number[response[:t]], token) for t, token in enumerate(response)]
        rows.append(torch.tensor(pairs))
    padded = pad_sequence(rows, batch_first=True, padding_value=-1)
    states, labels = padded.clamp(min=0).unbind(dim=2)
    features = torch.ones(1, 1)
    if max_tokens > 1:
        torch.manual_seed(0)
        features = torch.randn(len(prefixes), 3)
    return World(states, labels, padded[:, :, 0] >= 0, features.double())


def random_policies(world, seed):
    """Returns {name: (V, H) weight}. Policy and reference differ by logits of about 1.5 nats;
    policy, old policy and sampler by one."""
    torch.manual_seed(seed)
    n_features = world.features.shape[1]
    shape = (world.labels.max() + 1, n_features)
    scale = n_features**-0.5
    ref, step, stale, other = (scale * torch.randn(shape).double() for _ in range(4))
    policy = ref + 1.5 * step
    old = policy + stale
    return {"ref": ref, "policy": policy, "old": old, "sampler": old + other}


def look_up(world, weight, ref):
    """Returns starter's statistics, a dict of (B, T) tensors, 0 outside the mask."""
    hidden = world.features[world.states[world.mask]]
    stats = starter.statistics_of_logits(
        hidden @ weight.T, world.labels[world.mask], 1.0, hidden @ ref.T
    )
    zeros = torch.zeros(world.mask.shape).double()
    return {name: zeros.masked_scatter(world.mask, x) for name, x in stats.items()}


def settings_of(kl_estimator, kl_gradient="reverse", kl_in="loss"):
    """Returns starter's KLSettings of a term whose ratio is not cut."""
    return starter.KLSettings(
        kl_estimator=kl_estimator,
        kl_gradient=kl_gradient,
        kl_in=kl_in,
        kl_ratio_cap=math.inf,
        loss_average="dr_grpo",
        reproduce_paper=True,  # what main() refuses is measured, too
    )


def gradient_of_term(world, policies, sampled_by, kl):
    """Returns the (V * H,) gradient of the KL term by starter's functions, summed over tokens and
    expected over all responses. Nothing is clipped. sampled_by: "policy", "old" or "sampler"."""
    ref, weight = policies["ref"], policies["policy"].clone().requires_grad_()
    old = policies["policy" if sampled_by == "policy" else "old"]
    stats = look_up(world, weight, ref)
    sampler_log_probs = look_up(world, policies[sampled_by], ref)["log_probs"]
    loss, _ = starter.compute_loss(
        torch.zeros(len(world.mask), 1).double(),
        stats["log_probs"],
        look_up(world, old, ref)["log_probs"],
        math.inf,
        stats["ref_log_probs"],
        1.0,
        world.mask,
        kl,
        stats.get(starter.EXACT.get(kl.kl_estimator)),
        sampler_log_probs,
    )
    p = sampler_log_probs.sum(dim=1).exp()  # (B,)
    [gradient] = torch.autograd.grad(p @ (world.mask * loss).sum(dim=1), weight)
    return gradient.flatten()


TOKEN = "reverse KL per token"
SEQUENCE = "KL of whole responses"
FORWARD = "forward KL per token"
FORWARD_SEQUENCE = "forward KL of visited states"
ZERO = "zero"
AWAY = "minus KL(old || policy)"


def exact_gradients(world, policies, sampled_by):
    """Returns {target: (V * H,) gradient}, by plain autograd through the probabilities of tokens
    and responses.

    "per token" is a sum over the states that the sampler visits, as often as it does, whatever the
    policy does; "of visited states" over those that the policy itself visits.
    """

    def token_kl(log_a, log_b):  # (S,)
        return (log_a.exp() * (log_a - log_b)).sum(dim=1)

    def of_responses(table):  # (B,) sum of a (B, T) table over each response
        return (table * world.mask).sum(dim=1)

    weight = policies["policy"].clone().requires_grad_()
    weights = (weight, policies["ref"], policies[sampled_by])
    log_p, log_q, log_old = ((world.features @ w.T).log_softmax(dim=1) for w in weights)  # (S, V)
    chosen = (world.states, world.labels)
    of_p, of_q, of_old = (of_responses(table[chosen]) for table in (log_p, log_q, log_old))
    p_of_visit = (of_old.exp()[:, None] * world.mask).flatten()
    visits = (
        torch.zeros(len(log_p)).double().index_add(0, world.states.flatten(), p_of_visit)
    )  # (S,)
    forward = token_kl(log_q, log_p)
    quantities = {
        TOKEN: visits @ token_kl(log_p, log_q),
        FORWARD: visits @ forward,
        FORWARD_SEQUENCE: of_p.exp() @ of_responses(forward[world.states]),
        AWAY: -visits @ token_kl(log_old, log_p),
        SEQUENCE: of_p.exp() @ (of_p - of_q),
        ZERO: 0 * log_p.sum(),
    }
    gradients = {}
    for name, quantity in quantities.items():
        [gradient] = torch.autograd.grad(quantity, weight, retain_graph=True)
        gradients[name] = gradient.flatten()
    return gradients


# 2. Truth table.  Estimator x gradient x placement x who sampled -> error against what is claimed.

SAMPLED = ("k1", "k2", "k3")
GRID = [
    *product(SAMPLED, ("reverse", "as_written"), ("loss", "loss_to_go")),
    *product(starter.EXACT, ["reverse"], ("loss", "loss_to_go")),
    *product(SAMPLED, ["reverse"], ["reward"]),
]
CASES = [  # sampled by, what settings_of() takes
    *product(("policy", "old"), GRID),
    *product(["sampler"], product((*SAMPLED, *starter.EXACT), ["reverse"], ["loss"])),
]


def claims_of(sampled_by, kl, one_step):
    """Returns what is claimed of a case: {target: whether the gradient is exactly that}."""
    on_policy = sampled_by == "policy"
    to_go = kl.kl_in == "loss_to_go" and not one_step
    if kl.kl_in == "reward":
        return {SEQUENCE: kl.kl_estimator == "k1" and on_policy}
    if kl.kl_estimator == "exact_forward":
        forward = {FORWARD_SEQUENCE: on_policy} if to_go else {FORWARD: True}
        return {**forward, TOKEN: False}
    is_reverse = kl.kl_gradient == "reverse"
    if kl.kl_estimator == "k2":
        is_reverse = is_reverse or on_policy
    if to_go:  # a k2 of later tokens is a biased value, and the samples must be the policy's own
        return {SEQUENCE: is_reverse and kl.kl_estimator != "k2" and on_policy}
    if is_reverse:  # a token's own KL; how the token changes that of later ones is missing
        return {TOKEN: True} if one_step else {TOKEN: True, SEQUENCE: False}
    as_written = {"k1": {ZERO if on_policy else AWAY: True}, "k2": {}, "k3": {FORWARD: on_policy}}
    return {TOKEN: False, **as_written[kl.kl_estimator]}


def gradient_rows(n_policies=10):
    """Returns the rows of kl_gradients.csv, each over n_policies random policies.

    "exact" holds where no policy is off by 1e-10 (norm of the difference). "wrong" holds where
    the median error is above 1 % of the target's norm (a share of which is inf for zero).
    """
    worlds = {"one step": make_world(7, 1), "3 steps, shared": make_world(4, 3)}
    rows = []
    for name, world in worlds.items():
        drawn = [random_policies(world, seed) for seed in range(n_policies)]
        for sampled_by, setting in CASES:
            kl = settings_of(*setting)
            ours = torch.stack([gradient_of_term(world, w, sampled_by, kl) for w in drawn])
            targets = [exact_gradients(world, policies, sampled_by) for policies in drawn]
            exact = {target: torch.stack([of[target] for of in targets]) for target in targets[0]}
            direction = ""
            if ours.norm() > 1e-9:
                direction = torch.cosine_similarity(ours, exact[SEQUENCE]).median().item()
            has_no_choice = kl.kl_in == "reward" or kl.kl_estimator in starter.EXACT
            for target, is_exact in claims_of(sampled_by, kl, name == "one step").items():
                errors = (ours - exact[target]).norm(dim=1)
                relative = (errors / exact[target].norm(dim=1)).median().item()
                rows.append(
                    {
                        "policy": name,
                        "sampled by": sampled_by,
                        "placement": kl.kl_in,
                        "estimator": kl.kl_estimator,
                        "gradient": "any" if has_no_choice else kl.kl_gradient,
                        "target": target,
                        "claim": "exact" if is_exact else "wrong",
                        "median cosine to sequence KL": direction,
                        "holds": errors.max().item() < 1e-10 if is_exact else relative > 0.01,
                    }
                )
    return rows


def k3(d):
    return torch.expm1(-d) + d


# Penalties as published code has them, of one token: formula, placement, and the value. In the loss
# it is differentiated as it stands; from the reward it is subtracted. d = log pi - log ref.
MISTAKES = [
    ("d", "loss", lambda d: d),
    ("-d", "loss", lambda d: -d),
    ("exp(d) - 1 - d", "loss", lambda d: torch.expm1(d) - d),  # k3 with the sign of d reversed
    ("exp(d) * d", "loss", lambda d: d.exp() * d),
    ("min(k3, 1)", "loss", lambda d: k3(d).clamp(max=1.0)),
    ("-d", "reward", lambda d: -d),
    ("abs(d)", "reward", torch.abs),
    ("d^2 / 2", "reward", lambda d: d.square() / 2),
    ("k3", "reward", k3),
]


def mistake_rows(n_policies=10):
    """Returns the rows of kl_mistakes.csv: medians over random policies of seven tokens. "value"
    and "size" are shares of the KL and of its gradient. The claim: that is off by 10 % or more."""
    world = make_world(7, 1)
    rows = []
    for formula, place, value_of in MISTAKES:
        measured = []
        for seed in range(n_policies):
            policies = random_policies(world, seed)
            weight = policies["policy"].flatten().requires_grad_()
            log_p = weight.log_softmax(dim=0)
            d = log_p - policies["ref"].flatten().log_softmax(dim=0)
            p = log_p.detach().exp()
            value = value_of(d)
            surrogate = value if place == "loss" else value.detach() * log_p
            kl = (log_p.exp() * d).sum()
            [exact] = torch.autograd.grad(kl, weight, retain_graph=True)
            [ours] = torch.autograd.grad((p * surrogate).sum(), weight)
            size = ours.norm() / exact.norm()
            cosine = torch.cosine_similarity(ours, exact, dim=0)
            error = (ours - exact).norm() / exact.norm()
            measured.append(torch.stack([(p * value).sum() / kl, size, cosine, error]))
        medians = torch.stack(measured).median(dim=0).values.tolist()
        row = dict(zip(("value", "size", "cosine", "relative error"), medians))
        rows.append({"formula": formula, "in": place, **row, "holds": medians[3] > 0.1})
    return rows


# 3. Explosion.  A low-rank policy in float32, sampled, several updates per rollout -> the largest
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


def train_low_rank(seed, kl):
    """One training run. Returns the largest gradient norm before clipping, and the last KL. It ends
    where the gradient is not finite.

    logits = embedding(last token) @ up @ down.T, where down is 3 times the usual size: peaked
    distributions, and every update moves all tokens. A batch has 2,048 tokens and gets 8 Adam
    steps, with the gradient norm cut at 1. The reward is the share of tokens in a random eighth of
    the vocabulary. The loss divides by 256 tokens per response (dr_grpo), so that the effective
    coefficient is 0.04 * 16 / 256 = 0.0025 and drift costs almost nothing until the tail of
    exp(-d) is met. Beyond d = -88 exp(-d) overflows, and a cut of the value makes 0 * inf = nan of
    its gradient.
    """
    torch.manual_seed(seed)
    embedding = torch.randn(VOCABULARY, WIDTH)
    up = WIDTH**-0.5 * torch.randn(WIDTH, RANK)
    down = 3.0 * torch.randn(VOCABULARY, RANK)
    liked = torch.randperm(VOCABULARY)[: VOCABULARY // 8]
    ref_up, ref_down = up.clone(), down.clone()
    optimizer = torch.optim.Adam([up.requires_grad_(), down.requires_grad_()], 0.03)
    weights = starter.AVERAGES["dr_grpo"](torch.ones(N_RESPONSES, N_TOKENS), DIVISOR)
    largest = 0.0
    for _ in range(N_ROLLOUTS):
        first = torch.randint(VOCABULARY, (N_RESPONSES // 8, 1))
        tokens = first.repeat_interleave(8, dim=0)
        for _ in range(N_TOKENS):
            p = (embedding[tokens[:, -1]] @ up @ down.T).softmax(dim=1).detach()
            tokens = torch.cat([tokens, torch.multinomial(p, 1)], dim=1)
        hidden = embedding[tokens[:, :-1].flatten()]  # (N, WIDTH)
        labels = tokens[:, 1:]  # (B, T)
        rewards = torch.isin(labels, liked).float().mean(dim=1)
        advantages, _ = starter.compute_group_normalized_advantages(rewards, 8, 1e-6, True)
        old_log_probs = None
        for _ in range(EPOCHS):
            stats = starter.statistics_of_logits(
                hidden @ up @ down.T, labels.flatten(), 1.0, hidden @ ref_up @ ref_down.T
            )
            stats = {name: values.view(labels.shape) for name, values in stats.items()}
            if old_log_probs is None:
                old_log_probs = stats["log_probs"].detach()
            loss, _ = starter.compute_loss(
                advantages[:, None],
                stats["log_probs"],
                old_log_probs,
                0.2,
                stats["ref_log_probs"],
                kl.kl_coef,
                kl_settings=kl,
                exact_kl=stats["kl_per_token"],
            )
            optimizer.zero_grad()
            (weights * loss).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_([up, down], 1.0).item()
            kl_per_token = stats["kl_per_token"].mean().item()
            largest = max(largest, norm)  # where norm is nan, the one before
            if not math.isfinite(norm):
                return largest, kl_per_token
            optimizer.step()
    return largest, kl_per_token


def explosion_rows(n_seeds=5):
    """Returns the rows of kl_explosion.csv, one for each seed."""
    rows = []
    for (name, changes), seed in product(EXPLOSION.items(), range(n_seeds)):
        kl = starter.KLSettings(**{"kl_coef": 0.04, **changes})
        largest, last = train_low_rank(seed, kl)
        claims = {"k3 as written": largest > 1e6, "k3, reverse (default)": largest < 1}
        rows.append(
            {
                "KL term": name,
                "seed": seed,
                "largest gradient norm": largest,
                "last KL per token": last,
                "holds": claims.get(name, ""),
            }
        )
    return rows


# 4. The program.


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors of a few hundred numbers: more threads only wait
    for make_rows, name in (
        (gradient_rows, "kl_gradients"),
        (mistake_rows, "kl_mistakes"),
        (explosion_rows, "kl_explosion"),
    ):
        rows = make_rows()
        for row in rows:
            if row["holds"] is False:
                print(f"does not hold: {row}")
            for column, value in row.items():
                if isinstance(value, float):
                    row[column] = f"{value:.4g}"
        write_csv(name, rows)
