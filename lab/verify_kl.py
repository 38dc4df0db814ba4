"""verify_kl.py: what each KL term of GRPO really does, by exact enumeration -> results/kl_*.csv, figures/kl_*.png.

    python verify_kl.py      a minute or two on two cores; the last line says how many claims held

The code under test is starter.py's own: every row runs its public functions. The other side of each comparison is
written here with plain probabilities and autograd, over all responses of a policy small enough to list them. A row with
a claim says what it is compared with, how far off it is, and whether the claim held. Many claims are that a term is
wrong: a check that cannot see a known mistake proves nothing.

d = log policy - log reference, r = policy / the policy that sampled ("old"), both of the sampled token; KL in nats.
"""
import starter  # first: it sets variables that torch reads when it is imported

import copy
import csv
import math
import random
import sys
import time
from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path(__file__).parent
SETTINGS = SimpleNamespace(kl_clip_threshold=1.0, kl_target=0.1, max_new_tokens=32)  # of the term rules


def rule(name, **changes):
    """-> one of starter's term rules, as compute_loss takes it."""
    return partial(starter.TERM_RULES[name], c=SimpleNamespace(**(vars(SETTINGS) | changes)))


# ----------------------------------------------------------------------------------------------------------------------
# 1. Enumeration: vocabulary, length -> every response; a policy is a (V, H) weight, its logits are features @ weight.T

def make_world(vocab, max_tokens, n_features=None):
    """-> namespace: (B, T) states, labels, mask of every response (token 0 ends one); (S, H) features of the S states.

    A state is the list of tokens so far. n_features None: each has its own logits (tabular); else random features, so
    that moving one state moves the others too, as in a neural network.
    """
    responses, prefixes = [], [()]
    for prefix in prefixes:  # it grows while it is read
        for token in range(vocab):
            over = token == 0 or len(prefix) + 1 == max_tokens
            (responses if over else prefixes).append(prefix + (token,))
    states, labels, mask = (torch.zeros(len(responses), max_tokens, dtype=dtype) for dtype in (int, int, bool))
    for i, response in enumerate(responses):
        for t, token in enumerate(response):
            states[i, t], labels[i, t], mask[i, t] = prefixes.index(response[:t]), token, True
    features = torch.eye(len(prefixes)) if n_features is None else torch.randn(
        len(prefixes), n_features, generator=torch.Generator().manual_seed(0))
    return SimpleNamespace(states=states, labels=labels, mask=mask, features=features.double(), vocab=vocab)


def random_policies(world, drift, staleness, seed):
    """-> reference, policy, old policy: (V, H) weights; their logits differ by about drift and staleness nats."""
    generator, n = torch.Generator().manual_seed(seed), world.features.shape[1]
    scale = 1 if n == len(world.features) else n ** -0.5
    ref, step, stale = (scale * torch.randn(world.vocab, n, generator=generator).double() for _ in range(3))
    return ref, ref + drift * step, ref + drift * step + staleness * stale


def look_up(world, weight, ref):
    """-> (B, T) log-prob, exact KL at that state, the reference's log-prob, from starter's head; 0 outside the mask."""
    mask, hidden = world.mask, world.features[world.states[world.mask]]
    found = starter.ChunkedHead.apply(hidden, weight, world.labels[mask], 1.0, hidden, ref)
    log_probs, exact_kl, _, ref_log_probs = (x.new_zeros(mask.shape).masked_scatter(mask, x) for x in found)
    return log_probs, exact_kl, ref_log_probs


def token_loss(world, weight, ref, old=None, advantages=0.0, kl_coef=1.0, kl_in="loss", kl_estimator="k3", kl_rule=None,
               d_of_policy=False, response_weight=False, **settings):
    """Policy, reference, old -> (B, T) loss of every response by starter's functions, (B,) probability under old.

    Nothing is clipped. Two ways that starter.py does not go, for the reward off-policy: d_of_policy, its KL is made of
    the policy's log-probs, not old's; response_weight, a token is weighted by policy / old of the whole response.
    """
    log_probs, exact_kl, ref_log_probs = look_up(world, weight, ref)
    old_log_probs = log_probs.detach() if old is None else look_up(world, old, ref)[0]
    advantages = torch.zeros(len(log_probs), 1).double() + advantages  # (B, 1)
    if kl_in == "reward":
        advantages = starter.put_kl_into_advantages(advantages, log_probs if d_of_policy else old_log_probs,
                                                    ref_log_probs, world.mask, kl_coef, kl_estimator, kl_rule)
    log_ratio = (log_probs - old_log_probs).detach()
    others = (log_ratio.sum(dim=1, keepdim=True) - log_ratio).exp() if response_weight else None
    loss, _ = starter.compute_loss(advantages, log_probs, old_log_probs, math.inf, ref_log_probs, kl_coef,
                                   mask=world.mask, importance_weights=others, exact_kl=exact_kl, kl_in=kl_in,
                                   kl_estimator=kl_estimator, kl_rule=kl_rule, **settings)
    return torch.where(world.mask, loss, 0.0), old_log_probs.sum(dim=1).exp()


def expected_gradient(world, policy, ref, old, loss_average=None, not_ours=None, **settings):
    """-> (V, H) gradient of the KL term, summed over tokens, expected over all responses of the old policy.

    loss_average: starter.token_weights in place of the sum, scaled so that a token weighs 1 on average. not_ours:
    (d, log_probs, mask) -> (B, T) loss of other code, to compare.
    """
    weight = policy.clone().requires_grad_()
    loss, p = token_loss(world, weight, ref, old, **{"kl_ratio_cap": math.inf} | settings)
    if not_ours:
        log_probs, _, ref_log_probs = look_up(world, weight, ref)
        loss = not_ours(log_probs - ref_log_probs, log_probs, world.mask)
    p = p[:, None] * world.mask  # (B, T)
    if loss_average:
        share = starter.token_weights(world.mask, loss_average, world.mask.shape[1])
        p = p * share * p.sum() / (p * share).sum()
    return torch.autograd.grad((p * loss).sum(), weight)[0]


TOKEN, SEQUENCE, FORWARD = "reverse KL per token", "KL of whole responses", "forward KL per token"
ZERO, AWAY, REST = "zero", "minus KL(old || policy)", "KL(policy || ref) - KL(policy || old) of responses"


def exact_gradients(world, policy, ref, old):
    """-> {target: (V, H) gradient}, by plain autograd through the probabilities of tokens and responses.

    "per token": summed over the states that the old policy visits, as often as it does, whatever the policy does.
    """
    weight = policy.clone().requires_grad_()
    log_p, log_q, log_old = ((world.features @ w.T).log_softmax(dim=1) for w in (weight, ref, old))  # (S, V)
    of_p, of_q, of_old = (torch.where(world.mask, x[world.states, world.labels], 0.0).sum(dim=1)
                          for x in (log_p, log_q, log_old))  # (B,) log-prob of the response
    visits = torch.zeros(len(log_p)).double().index_add(  # (S,) mean number of visits in a response
        0, world.states[world.mask], of_old.exp()[:, None].expand_as(world.mask)[world.mask])
    quantities = {TOKEN: visits @ (log_p.exp() * (log_p - log_q)).sum(dim=1),
                  FORWARD: visits @ (log_q.exp() * (log_q - log_p)).sum(dim=1),
                  AWAY: -visits @ (log_old.exp() * (log_old - log_p)).sum(dim=1),
                  SEQUENCE: of_p.exp() @ (of_p - of_q), REST: of_p.exp() @ (of_old - of_q), ZERO: 0 * log_p.sum()}
    return {name: torch.autograd.grad(x, weight, retain_graph=True)[0] for name, x in quantities.items()}


def cosine(a, b):
    return torch.cosine_similarity(a.flatten(), b.flatten(), 0).item()


# ----------------------------------------------------------------------------------------------------------------------
# 2. Truth table: estimator x gradient x placement x who sampled -> error against the target that is claimed

def claims_of(estimator, gradient, place, on_policy, one_step):
    """-> [(target, "exact" or "wrong")] of one setting; what is wrong is wrong as that target."""
    if place == "reward":
        return [(SEQUENCE, "exact" if estimator == "k1" and on_policy else "wrong")]
    reverse = gradient == "reverse" or estimator == "exact" or (estimator == "k2" and on_policy)
    if place == "loss_to_go" and not one_step:  # a k2 of later tokens is a biased value; samples must be the policy's
        return [(SEQUENCE, "exact" if reverse and estimator != "k2" and on_policy else "wrong")]
    if reverse:  # a token's own KL: how it changes that of later ones is missing
        return [(TOKEN, "exact")] + ([] if one_step else [(SEQUENCE, "wrong")])
    return [(TOKEN, "wrong")] + {"k1": [(ZERO if on_policy else AWAY, "exact")], "k2": [],
                                 "k3": [(FORWARD, "exact" if on_policy else "wrong")]}[estimator]


def cases_of(one_step):
    """-> [(note, sampled by, settings, claims)], the full grid and what it does not show."""
    grid = list(product(("k1", "k2", "k3", "exact"), ("reverse", "as_written"), ("loss", "loss_to_go")))
    cases = [("", by, dict(kl_estimator=estimator, kl_gradient=gradient, kl_in=place),
              claims_of(estimator, gradient, place, by == "policy", one_step))
             for by, (estimator, gradient, place) in product(
                 ("policy", "old"), grid + [(estimator, "reverse", "reward") for estimator in ("k1", "k2", "k3")])]
    reward, clipped = dict(kl_estimator="k1", kl_in="reward"), dict(kl_rule=rule("clip", kl_clip_threshold=0.3))
    return cases + [
        ("r cut at 2, none larger", "near old", dict(kl_ratio_cap=2.0), [(TOKEN, "exact")]),
        ("r cut at 2", "old", dict(kl_ratio_cap=2.0), [(TOKEN, "wrong")]),
        *(("min(KL, 0.3)", "policy", clipped | dict(kl_estimator=estimator), [(TOKEN, "wrong")])
          for estimator in ("k1", "k3", "exact")),
        ("constant divisor (dr_grpo)", "policy", reward | dict(loss_average="dr_grpo"), [(SEQUENCE, "exact")]),
        ("1 / own length (grpo)", "policy", reward | dict(loss_average="grpo"),
         [(SEQUENCE, "exact" if one_step else "wrong")]),
        ("d of policy, weight of the response", "old", reward | dict(d_of_policy=True, response_weight=True),
         [(SEQUENCE, "exact")]),
        ("d of old, weight of the response", "old", reward | dict(response_weight=True),
         [(REST, "exact"), (SEQUENCE, "wrong")]),  # a reward is fixed: it is log old - log ref
        ("not ours: ref - policy in the loss", "policy", dict(not_ours=lambda d, log_probs, mask: -d),
         [(ZERO, "exact"), (TOKEN, "wrong")]),
        ("not ours: ref - policy in the loss", "old", dict(not_ours=lambda d, log_probs, mask: -d), [(TOKEN, "wrong")]),
        ("not ours: d * log policy, d not fixed", "policy", dict(not_ours=lambda d, log_probs, mask: d * log_probs),
         [(TOKEN, "wrong")]),
        ("not ours: exp(d) * d off the reward", "policy", dict(not_ours=lambda d, log_probs, mask: (
            starter.sum_to_go(d.exp() * d, mask).detach() * log_probs)), [(SEQUENCE, "wrong")])]


def gradient_rows(n_policies=10):
    """-> rows of kl_gradients.csv, each over n_policies random policies.

    "exact" holds where no policy is off by 1e-10 (norm of the difference), "wrong" where the median error is above 1 %
    of the target's norm (of the sequence KL's gradient where the target is zero).
    """
    measured, rows = defaultdict(list), []
    worlds = {"one step": make_world(7, 1), "3 steps, tabular": make_world(4, 3),
              "3 steps, shared": make_world(4, 3, n_features=3)}
    for (name, world), seed in product(worlds.items(), range(n_policies)):
        ref, policy, old = random_policies(world, drift=1.5, staleness=1.0, seed=seed)
        share = math.log(2) / 2 / (world.features @ (old - policy).T).abs().max()  # of the way: no ratio is above 2
        sampled_by = {"policy": policy, "near old": policy + share * (old - policy), "old": old}
        targets_of = {by: exact_gradients(world, policy, ref, weight) for by, weight in sampled_by.items()}
        for note, by, settings, claims in cases_of(name == "one step"):
            found, targets = expected_gradient(world, policy, ref, sampled_by[by], **settings), targets_of[by]
            place, estimator, gradient = (settings.get(key, default) for key, default in (
                ("kl_in", "loss"), ("kl_estimator", "k3"), ("kl_gradient", "reverse")))
            if place == "reward" or "not_ours" in settings:
                gradient, estimator = "", "" if "not_ours" in settings else estimator
            for target, claim in claims:
                error, size = (found - targets[target]).norm(), targets[target].norm() or targets[SEQUENCE].norm()
                direction = cosine(found, targets[SEQUENCE]) if found.norm() > 1e-10 else math.nan
                measured[name, by, place, estimator, gradient, note, target, claim].append(
                    torch.stack([error, error / size, error.new_tensor(direction)]))
    for key, errors in measured.items():
        (largest, relative, _), (_, median, middle) = (x.tolist() for x in (
            torch.stack(errors).amax(dim=0), torch.stack(errors).median(dim=0).values))
        columns = "policy", "sampled by", "placement", "estimator", "gradient", "note", "target", "claim"
        rows.append(dict(zip(columns, key)) | {
            "largest error": largest, "largest relative error": relative, "median relative error": median,
            "median cosine to sequence KL": "" if math.isnan(middle) else middle,
            "lowest cosine": "" if math.isnan(middle) else torch.stack(errors)[:, 2].amin().item(),
            "holds": largest < 1e-10 if key[-1] == "exact" else median > 0.01})
    refused = dict.fromkeys(rows[0], "") | {"policy": "any", "placement": "reward", "estimator": "exact",
                                            "note": "does not know the sampled token", "claim": "refused"}
    try:
        starter.put_kl_into_advantages(*torch.zeros(4, 1, 1), 1.0, "exact")
        return rows + [refused | {"holds": False}]
    except starter.InputError:
        return rows + [refused | {"holds": True}]


# ----------------------------------------------------------------------------------------------------------------------
# 3. Bias and variance: of the value at one token, and of the gradient that one sampled response gives

GRADIENTS = {
    "k1 in the reward": dict(kl_estimator="k1", kl_in="reward"),
    "k3 in the reward": dict(kl_estimator="k3", kl_in="reward"),
    "k1 as written in the loss": dict(kl_estimator="k1", kl_gradient="as_written"),
    "k3 as written in the loss": dict(kl_estimator="k3", kl_gradient="as_written"),
    "k1, k2 or k3 in the loss": dict(kl_estimator="k3"),  # three values, one gradient
    "exact in the loss": dict(kl_estimator="exact"),
    "k1 loss_to_go": dict(kl_estimator="k1", kl_in="loss_to_go"),
    "k3 loss_to_go": dict(kl_estimator="k3", kl_in="loss_to_go"),
    "exact loss_to_go": dict(kl_estimator="exact", kl_in="loss_to_go"),
}


def variance_rows(n_policies=3):
    """-> rows of kl_variance.csv: on-policy, 3 steps, 8 shared features, mean over n_policies.

    Values: against the exact KL of the same state, nats per token. Gradients: bias against that of the sequence KL, as
    a share of its norm; variance: trace of the covariance over single responses.
    """
    rows = []
    for vocab, (drift_name, drift) in product((4, 7), (("small", 0.1), ("large", 1.5))):
        world, measured = make_world(vocab, 3, 8), defaultdict(list)
        for seed in range(n_policies):
            ref, policy, _ = random_policies(world, drift, 0.0, seed)
            log_probs, exact_kl, ref_log_probs = look_up(world, policy, ref)
            p = log_probs.sum(dim=1).exp()
            share = p[:, None] * world.mask / (p[:, None] * world.mask).sum()  # (B, T), sums to 1
            for estimator in ("k1", "k2", "k3"):
                error = starter.compute_kl_divergence(log_probs, ref_log_probs, estimator) - exact_kl
                measured["value", estimator].append([(share * error ** n).sum() for n in (1, 2)])
            target = exact_gradients(world, policy, ref, policy)[SEQUENCE].flatten()
            for name, settings in GRADIENTS.items():
                weight = policy.clone().requires_grad_()
                loss, _ = token_loss(world, weight, ref, kl_ratio_cap=math.inf, **settings)
                each = torch.stack([torch.autograd.grad(x, weight, retain_graph=True)[0].flatten()
                                    for x in loss.sum(dim=1)])  # (B, V * H)
                mean = p @ each
                measured["gradient", name].append([(mean - target).norm() / target.norm(),
                                                   p @ (each - mean).square().sum(dim=1)])
        means = {key: torch.tensor(x).double().mean(dim=0).tolist() for key, x in measured.items()}
        for (of, what), (bias, square) in means.items():
            bar, holds, times = "", "", means["gradient", "k1 in the reward"][1] / square
            if of == "value":
                bar, holds = ("biased", abs(bias) > 1e-9) if what == "k2" else ("bias < 1e-12", abs(bias) < 1e-12)
            elif (what, vocab, drift_name) == ("exact loss_to_go", 7, "small"):
                bar, holds = "variance at most 1 / 10 of k1 in the reward", times >= 10
            rows.append({"vocabulary": vocab, "drift": drift_name, "of": of, "what": what, "bias": bias,
                         "rms error": math.sqrt(square) if of == "value" else "",
                         "variance": square if of == "gradient" else "",
                         "k1 in the reward / this": times if of == "gradient" else "", "bar": bar, "holds": holds})
    return rows


def tiny_rows(batches=24, scale=0.02):
    """Variance of the gradient of the sequence KL on the built-in model, moved away from its start by noise on every
    weight: trace of the covariance over batches of 64 responses to the same 8 prompts, per placement. -> rows."""
    policy, tokenizer = starter.init_policy(starter.machine.find_model("tiny"), torch.device("cpu"))
    ref_model = copy.deepcopy(policy).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            p += scale * torch.randn(p.shape, generator=generator)
    numbers = {name: values[0] for name, values in starter.DEFAULTS.items()}
    problems = starter.tasks.make_countdown(8, numbers["numbers_per_problem"], numbers["max_number"], 99, False, 0,
                                      numbers["countdown_prompt"])
    prompts = starter.prompt_ids_of(problems, tokenizer)
    ways = [("k1", "reward"), ("k1", "loss_to_go"), ("k3", "loss_to_go"), ("exact", "loss_to_go"), ("exact", "loss")]
    gradients, kls = {way: [] for way in ways}, []
    for seed in range(batches):
        responses = starter.rollout(policy, None, prompts, group_size=8, max_new_tokens=numbers["max_new_tokens"],
                                    temperature=1.0, seed=1000 * seed, eos_token_id=tokenizer.eos_token_id)
        batch = starter.make_batch(responses, torch.zeros(len(responses)), policy.device)
        batch["weights"] = starter.token_weights(batch["response_mask"], "dr_grpo", 1)  # sum over a response, then mean
        for estimator, place in ways:
            policy.zero_grad()
            _, metadata, _ = starter.grpo_microbatch_step(policy, batch, 0.2, ref_model, 1.0, importance_cap=None,
                                                          kl_estimator=estimator, kl_in=place, kl_ratio_cap=math.inf)
            gradients[estimator, place].append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
        kls.append(metadata["kl_per_token"].item())
    traces = {way: torch.stack(g).var(dim=0).sum().item() for way, g in gradients.items()}
    return [{"KL per token": sum(kls) / batches, "estimator": e, "kl_in": place, "trace": traces[e, place],
             "of k1 in the reward": traces[e, place] / traces["k1", "reward"]} for e, place in ways]


# ----------------------------------------------------------------------------------------------------------------------
# 4. Fixed points: a bandit of 7 arms, expected gradient, until nothing moves -> which policy the penalty ends at

def settle(world, ref, reward, beta, steps, size=0.2, natural=True, start=None, **settings):
    """-> (V, 1) log-probs after steps along the expected gradient (or the natural one) of starter's loss."""
    weight = ref if start is None else start
    for _ in range(steps):
        weight, p = weight.clone().requires_grad_(), weight.softmax(dim=0)
        loss, _ = token_loss(world, weight, ref, None, reward - p.T @ reward, beta, **settings)  # centred advantages
        gradient, = torch.autograd.grad((p * loss).sum(), weight)
        weight = (weight.detach() - size * (gradient / p if natural else gradient)).log_softmax(dim=0)
    return weight


def fixed_point_rows():
    """-> rows of kl_fixed_points.csv; error: largest difference in log-prob; KL in nats."""
    world, rows, beta = make_world(7, 1), [], 0.8  # above the largest advantage, where the second form has its pole
    ref, start, _ = (x.log_softmax(dim=0) for x in random_policies(world, 0.8, 0.0, seed=0))
    reward = torch.rand(7, 1, generator=torch.Generator().manual_seed(0)).double()

    def add(place, estimator, gradient, target, found, error="", bar="", holds=""):
        kl, forward = ((x.exp() * (x - y)).sum().item() for x, y in ((found, ref), (ref, found)))
        rows.append({"placement": place, "estimator": estimator, "gradient": gradient, "compared with": target,
                     "error": error, "KL(policy || ref)": kl, "KL(ref || policy)": forward, "bar": bar, "holds": holds})

    for place, estimator, gradient in [*product(("loss",), ("k1", "k2", "k3", "exact"), ("reverse",)),
                                       ("reward", "k1", ""), *product(("loss",), ("k2", "k3", "k1"), ("as_written",))]:
        found = settle(world, ref, reward, beta, 400, kl_estimator=estimator, kl_in=place,
                       kl_gradient=gradient or "reverse")
        target, wanted = "ref * exp(R / beta), normalised", (ref + reward / beta).log_softmax(dim=0)
        if (estimator, gradient) == ("k3", "as_written"):  # the mean is taken under the policy that is found
            target = "ref / (1 - (R - mean R) / beta)"
            wanted = ref - (1 - (reward - found.exp().T @ reward) / beta).log()
        error = (found - wanted).abs().max().item()
        if (estimator, gradient) == ("k1", "as_written"):  # no leash at all: the best arm takes everything
            add(place, estimator, gradient, target, found, error, "error > 1", error > 1)
        else:
            add(place, estimator, gradient, target, found, error, "error < 1e-10", error < 1e-10)
    for steps in (0, 250, 500, 1000):  # an arm below the reference costs as much as one above it: both are fled
        found = settle(world, ref, 0 * ref, 1.0, steps, 0.5, False, start, kl_estimator="k3", kl_in="reward")
        add("reward", "k3", "", f"no task reward, step {steps}", found)
    first, last = (rows[i]["KL(ref || policy)"] for i in (-4, -1))
    rows[-1] |= {"bar": "KL(ref || policy) grew 100 times", "holds": last > 100 * first}
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# 5. Explosion: a low-rank policy in float32, sampled, several updates per rollout -> the largest gradient norm

EXPLOSION = {
    "none": dict(kl_coef=0.0),
    "k3 as written": dict(kl_gradient="as_written"),
    "k3 as written, min(k3, 10)": dict(kl_gradient="as_written", kl_rule=rule("clip", kl_clip_threshold=10.0)),
    "k1 as written": dict(kl_estimator="k1", kl_gradient="as_written"),
    "k3, reverse (default)": {},
    "k3, reverse, d cut at 5": dict(kl_log_ratio_cap=5.0),
    "k3 loss_to_go": dict(kl_in="loss_to_go"),  # there the value of later tokens, exp(-d) and all, is in the gradient
    "exact in the loss": dict(kl_estimator="exact"),
    "exact loss_to_go": dict(kl_estimator="exact", kl_in="loss_to_go"),
}


def explosion_run(seed, kl_coef=0.04, vocab=128, width=32, rank=16, n_responses=128, length=16, max_tokens=256,
                  rollouts=15, epochs=8, learning_rate=0.03, **settings):
    """One training run -> its row: largest gradient norm before clipping, how it ended, and where.

    logits = hidden(last token) @ up @ down.T, `down` 3 times the usual size: peaked distributions, and every update
    moves all tokens. 2,048 tokens a batch, 8 Adam steps on each, gradient norm cut at 1, reward: the share of tokens in
    a random eighth of the vocabulary. The loss divides by 256 tokens a response (dr_grpo), so that the effective
    coefficient is 0.04 * 16 / 256 = 0.0025 and drift is nearly free until the tail of exp(-d) fires. Beyond d = -88
    exp(-d) overflows, and a cut of the value makes 0 * inf = nan of its gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    embedding, up, down = (scale * torch.randn(n, m, generator=generator) for n, m, scale in (
        (vocab, width, 1.0), (width, rank, width ** -0.5), (vocab, rank, 3.0)))
    ref_up, ref_down, liked = up.clone(), down.clone(), torch.randperm(vocab, generator=generator)[:vocab // 8]
    optimizer = torch.optim.Adam([up.requires_grad_(), down.requires_grad_()], learning_rate)
    norms, gaps = [0.0], []
    for _ in range(rollouts):
        tokens = torch.randint(vocab, (n_responses // 8, 1), generator=generator).repeat_interleave(8, dim=0)
        with torch.no_grad():
            for _ in range(length):
                p = (embedding[tokens[:, -1]] @ up @ down.T).softmax(dim=1)
                tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], dim=1)
        hidden, labels = embedding[tokens[:, :-1].flatten()], tokens[:, 1:]  # (N, width), (B, T)
        rewards = torch.isin(labels, liked).float().mean(dim=1)
        advantages, _ = starter.compute_group_normalized_advantages(rewards, 8, 1e-6, True)
        weights, old = starter.token_weights(torch.ones_like(labels), "dr_grpo", max_tokens), None
        for _ in range(epochs if math.isfinite(norms[-1]) else 0):
            found = starter.ChunkedHead.apply(hidden @ up, down, labels.flatten(), 1.0, hidden @ ref_up, ref_down)
            log_probs, exact_kl, _, ref = (x.view(labels.shape) for x in found)
            old = log_probs.detach() if old is None else old
            loss, _ = starter.compute_loss(advantages[:, None], log_probs, old, 0.2, ref, kl_coef, exact_kl=exact_kl,
                                           **settings)
            optimizer.zero_grad()
            (loss * weights).sum().backward()
            norms.append(torch.nn.utils.clip_grad_norm_([up, down], 1.0).item())
            gaps.append((ref - log_probs).max().item())
            if not math.isfinite(norms[-1]):
                break
            optimizer.step()
    return {"largest gradient norm": max(x for x in norms if not math.isnan(x)), "updates": len(gaps),
            "last gradient norm": norms[-1], "largest log(ref / policy)": max(gaps),
            "last KL per token": exact_kl.mean().item(), "last reward": rewards.mean().item()}


def explosion_rows(n_seeds=5):
    """-> rows of kl_explosion.csv, one for each seed; a run ends where its gradient is not finite."""
    rows = []
    for (name, settings), seed in product(EXPLOSION.items(), range(n_seeds)):
        row = {"KL term": name, "seed": seed} | explosion_run(seed, **settings)
        norm = row["largest gradient norm"]
        bar, holds = {"k3 as written": ("norm > 1e6", norm > 1e6), "k3, reverse (default)": (
            "norm < 1", norm < 1 and math.isfinite(row["last gradient norm"]))}.get(name, ("", ""))
        rows.append(row | {"bar": bar, "holds": holds})
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# 6. Length: one rare answer token, then filler or stop; the expected gradient over all lengths -> who writes longer

IN_REWARD = dict(kl_estimator="k1", kl_in="reward")
LENGTHS = [  # name, coefficient, what the loss divides by, settings of token_loss
    ("none", 0.0, "dr_grpo", {}),
    ("sum of KL in the reward", 0.05, "dr_grpo", IN_REWARD),
    ("KL / constant in the reward", 0.05, "dr_grpo", IN_REWARD | dict(kl_rule=rule("length_normalized_sound"))),
    *((f"KL / own length in the reward, {beta}", beta, "dr_grpo", IN_REWARD | dict(kl_rule=rule("length_normalized")))
      for beta in (0.05, 0.2, 1.0)),
    ("exact in the loss", 0.05, "dr_grpo", dict(kl_estimator="exact")),
    ("exact loss_to_go", 0.05, "dr_grpo", dict(kl_estimator="exact", kl_in="loss_to_go")),
    ("k1 as written, mean of each response", 0.05, "grpo", dict(kl_estimator="k1", kl_gradient="as_written")),
]


def length_world(p_answer=0.05, p_stop=0.25, longest=32):
    """-> namespace as make_world's, with (2, S) reference log-probs and the (B, 1) reward, 1 for the answer.

    Token 0 is the answer at first and stop later, token 1 anything else. A state is the place and if the answer came.
    """
    rows = list(product((0, 1), range(2, longest + 2)))  # first token, tokens in all; the last: cut, it never stopped
    first, n = (torch.tensor(column)[:, None] for column in zip(*rows))
    place = torch.arange(longest)[None]
    labels, mask = torch.where(place == 0, first, (place < n - 1).long()), place < n
    states = torch.where(place == 0, 0, place + first * (longest - 1))
    p = torch.tensor([[p_answer, 1 - p_answer]] + [[p_stop, 1 - p_stop]] * (2 * longest - 2)).double()
    return SimpleNamespace(states=states, labels=labels, mask=mask, features=torch.eye(len(p)).double(),
                           ref=p.log().T.contiguous(), reward=(first == 0).double())


def length_run(world, kl_coef, divisor, settings, steps=600):
    """-> P(answer), mean length, KL per response and per token after Adam on the expected gradient."""
    weight = world.ref.clone().requires_grad_()
    optimizer = torch.optim.Adam([weight], 0.05)
    share = starter.token_weights(world.mask, divisor, world.mask.shape[1]) * len(world.mask)  # p takes 1 / B's place
    for _ in range(steps + 1):
        log_probs, _, ref = (x.detach() for x in look_up(world, weight, world.ref))
        p = log_probs.sum(dim=1).exp()
        loss, _ = token_loss(world, weight, world.ref, None, world.reward - p @ world.reward, kl_coef, **settings)
        optimizer.zero_grad()
        (p[:, None] * share * loss).sum().backward()
        optimizer.step()
    length, kl = (p @ world.mask.double().sum(dim=1)).item(), (p @ (log_probs - ref).sum(dim=1)).item()
    return {"P(answer)": (p @ world.reward).item(), "mean length": length, "KL per response": kl,
            "KL per token": kl / length}


def length_rows():
    """-> rows of kl_length.csv; lengths in tokens, KL in nats. The reference's mean length is 5.0."""
    world, rows = length_world(), []
    start = length_run(world, 0.0, "dr_grpo", {}, steps=0)["mean length"]
    for name, kl_coef, divisor, settings in LENGTHS:
        row, bar, holds = length_run(world, kl_coef, divisor, settings), "", ""
        longer = row["mean length"] - start
        if "own length" in name:
            plain = rows[1]  # the sum
            bar = "longer by > 3; against the sum: KL per token lower, per response higher"
            holds = longer > 3 and (row["KL per token"] < plain["KL per token"]) and (
                row["KL per response"] > plain["KL per response"])
        elif name.startswith(("sum", "KL / constant", "exact")):
            bar, holds = "longer by < 0.1", abs(longer) < 0.1
        elif divisor == "grpo":
            bar, holds = "longer by > 20", longer > 20
        rows.append({"KL in": name, "kl_coef": kl_coef,
                     "loss divides by": {"grpo": "own length", "dr_grpo": "constant"}[divisor], **row,
                     "longer than the reference by": longer, "bar": bar, "holds": holds})
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# 7. Adaptive methods: slope of each term rule, direction of its gradient, walk of each coefficient rule

def slope(name, kl, n_tokens=8):
    """-> d(penalised) / d(KL) of one of starter's term rules, by autograd."""
    kl = torch.tensor([[float(kl)]], dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(rule(name)(kl, torch.tensor([[n_tokens]])), kl)[0].item()


def cosines_to_plain(estimator, name, n_policies=20, **settings):
    """-> cosines between the expected gradient with the rule and without, lowest first; drift of 3 nats, one step."""
    world, found = make_world(7, 1), []
    for seed in range(n_policies):
        ref, policy, _ = random_policies(world, 3.0, 0.0, seed)
        found.append(cosine(*(expected_gradient(world, policy, ref, policy, kl_estimator=estimator, **more)
                              for more in ({}, settings | dict(kl_rule=rule(name))))))
    return sorted(found)


def walk(name, steps, kl_of, reward_of):
    """-> beta, KL of each step under one of starter's coefficient rules; kl_of(step, beta) is what beta acts on."""
    c = SimpleNamespace(coefficient_rule=name, kl_coef=0.04, kl_target=0.1, dynamic_beta_decay=0.9,
                        reward_threshold=0.8, beta_min=0.0, beta_schedule_steps=1000)
    state, path = {"beta": c.kl_coef, "step": 0, "kl": None, "reward": None}, []
    for step in range(steps):
        path.append((state["beta"], kl_of(step, state["beta"])))
        state = starter.next_beta(state, path[-1][1], reward_of(step), c)
    return zip(*path)


def simulated_policy(pull, quiet=100):
    """-> kl_of(step, beta): at distance x from the reference, pulled away by the reward and back by beta * x.

    KL = x^2 / 2, measured with 10 % noise. Nothing pulls in the first `quiet` steps: no response is solved yet.
    """
    x, rng = 0.0, random.Random(0)

    def kl_of(step, beta):
        nonlocal x
        x += (pull if step >= quiet else 0.0) - beta * x
        return x * x / 2 * rng.gauss(1, 0.1)
    return kl_of


def adaptive_rows():
    """-> rows of kl_adaptive.csv. KL and slopes per token; the coefficient starts at 0.04, the target is 0.1 nats.

    Under pull 0.02 nothing is claimed of the largest KL: both target rules wind down while nothing pulls yet, the sound
    one to its floor, and a policy that then moves as fast as this is past the target before either has come back.
    """
    rows = []

    def add(experiment, name, at, value, bar="", holds=""):
        rows.append({"experiment": experiment, "rule": name, "at": at, "value": value, "bar": bar, "holds": holds})

    for name, kl in product(starter.TERM_RULES, [i / 20 for i in range(-30, 31)]):
        add("slope over KL", name, kl, slope(name, kl))
    for name, kl, n_tokens, expected in (
            ("clip", 1.01, 8, 0), ("clip_sound", 1.01, 8, 1), ("sigmoid", -1.5, 8, -0.0417), ("sigmoid", 0, 8, 0.475),
            ("sigmoid", 0.2, 8, 0.575), ("sigmoid_sound", 0, 8, 0), ("sigmoid_sound", 0.1, 8, 0.5),
            ("sigmoid_sound", 0.2, 8, 1), ("length_normalized", 1, 8, 1 / 8), ("length_normalized", 1, 32, 1 / 32),
            ("length_normalized_sound", 1, 8, 1 / 32), ("length_normalized_sound", 1, 32, 1 / 32)):
        found = slope(name, kl, n_tokens)
        add("slope", name, f"KL {kl}, {n_tokens} tokens", found, f"{expected:.4g} +- 0.0002",
            abs(found - expected) < 2e-4)
    for estimator, name, bar, settings in (
            ("k1", "clip", "below 0", {}), ("k3", "clip", "below 0", {}), ("k3", "sigmoid", "", {}),
            ("k3", "sigmoid_sound", "", {}), ("k3", "clip_sound", "above 0.95", dict(kl_log_ratio_cap=5.0))):
        found = cosines_to_plain(estimator, name, **settings)
        add("cosine to the gradient without it", name, f"{estimator}, median of 20", found[10])
        add("cosine to the gradient without it", name, f"{estimator}, lowest of 20", found[0], bar,
            bar and (found[0] < 0 if bar == "below 0" else found[0] > 0.95))
    for name in ("dynamic", "dynamic_sound"):
        after = []
        for seed in range(20):
            rng = random.Random(seed)
            betas, _ = walk(name, 101, lambda step, beta: 0.1, lambda step: rng.gauss(0.75, 0.08))
            after.append(betas[100] / 0.04)
        middle = sorted(after)[10]
        bar, holds = ("< 0.1: a ratchet", middle < 0.1) if name == "dynamic" else ("> 0.7", middle > 0.7)
        add("beta / first, reward 0.75 +- 0.08", name, "step 100, median of 20", middle, bar, holds)
        betas, _ = walk(name, 1001, lambda step, beta: 0.1, lambda step: 0.5)
        jump = betas[1000] / betas[999]
        bar, holds = ("0: the leash is cut", jump == 0) if name == "dynamic" else ("> 0.99", jump > 0.99)
        add("beta / the step before, reward 0.5", name, "step 1000", jump, bar, holds)
    for pull, name in product((0.005, 0.02), ("target", "target_sound")):
        betas, kls = walk(name, 1101, simulated_policy(pull), lambda step: 0.5)
        over, near = max(kls) / 0.1, sum(0.05 <= kl <= 0.15 for kl in kls[600:]) / len(kls[600:])
        bars = {"target": ("> 5", over > 5), "target_sound": ("< 2", over < 2)} if pull == 0.005 else {}
        add("largest KL / target", name, f"pull {pull}", over, *bars.get(name, ("", "")))
        add("lowest beta", name, f"pull {pull}", min(betas), *(
            ("< 1e-9: winds down", min(betas) < 1e-9) if name == "target" else (">= 0.004", min(betas) > 0.00399)))
        add("share of KL within 0.5 to 1.5 of target", name, f"pull {pull}, steps 600 on", near, "> 0.9", near > 0.9)
        for step in range(0, 1101, 20) if pull == 0.005 else ():
            add("beta over steps", name, step, betas[step])
            add("KL over steps", name, step, kls[step])
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# 8. Tables and figures: rows -> results/kl_*.csv, the same on the console; csv -> figures/kl_*.png

def publish(name, rows):
    """Writes results/kl_<name>.csv and prints it, without the points of curves."""
    def text(x):
        return {True: "yes", False: "no"}[x] if isinstance(x, bool) else f"{x:.4g}" if isinstance(x, float) else str(x)

    lines = [list(rows[0]), *([text(x) for x in row.values()] for row in rows)]
    with open(HERE / "results" / f"kl_{name}.csv", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
    lines = [line for line in lines if " over " not in line[0]]
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f"\n=== results/kl_{name}.csv ===")
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def draw():
    """results/kl_*.csv -> figures/kl_*.png."""
    import matplotlib
    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot
    explosion, length, adaptive = (list(csv.DictReader((HERE / "results" / f"kl_{name}.csv").read_text().splitlines()))
                                   for name in ("explosion", "length", "adaptive"))

    explosion_figure, axes = pyplot.subplots(1, 2, figsize=(9, 4), sharey=True)
    for axis, column, label in zip(axes, ("largest gradient norm", "last KL per token"), (
            "largest gradient norm, one point a seed", "KL at the end, nats per token")):
        for finite, color in ((True, "tab:blue"), (False, "tab:red")):
            runs = [r for r in explosion[::-1] if math.isfinite(float(r["last gradient norm"])) == finite]
            axis.plot([min(float(r[column]), 1e39) for r in runs], [r["KL term"] for r in runs], "o", color=color,
                      alpha=0.6, label="all updates" if finite else "ended: gradient not finite")
        axis.set_xlabel(label)
    axes[0].set_xscale("log")
    axes[0].legend(fontsize=7)

    length_figure, axes = pyplot.subplots(1, 3, figsize=(9, 4), sharey=True)
    for axis, column, unit in zip(axes, ("mean length", "KL per response", "KL per token"), ("tokens", "nats", "nats")):
        axis.barh([r["KL in"] for r in length[::-1]], [float(r[column]) for r in length[::-1]])
        axis.set_xlabel(f"{column}, {unit}")
    axes[0].tick_params(axis="y", labelsize=8)

    rules_figure, axes = pyplot.subplots(1, 3, figsize=(9, 4))
    for axis, of, x, y in zip(axes, ("slope over KL", "beta over steps", "KL over steps"), (
            "KL, nats per token", "step", "step"), ("slope of what is penalised", "beta", "KL, nats per token")):
        for name in dict.fromkeys(r["rule"] for r in adaptive if r["experiment"] == of):
            curve = [r for r in adaptive if (r["experiment"], r["rule"]) == (of, name)]
            axis.plot([float(r["at"]) for r in curve], [float(r["value"]) for r in curve],
                      "--" if name.endswith("_sound") else "-", label=name)
        axis.set(xlabel=x, ylabel=y)
        axis.legend(fontsize=7, framealpha=0.5)
    axes[1].set_yscale("log")

    (HERE / "figures").mkdir(exist_ok=True)
    for figure, name in ((explosion_figure, "explosion"), (length_figure, "length"), (rules_figure, "rules")):
        figure.tight_layout()
        figure.savefig(HERE / "figures" / f"kl_{name}.png", dpi=100)
        pyplot.close(figure)


def main():
    torch.set_num_threads(1)  # tensors of a few hundred numbers: more threads only wait for each other
    start, held = time.perf_counter(), []
    for name, rows_of in (("gradients", gradient_rows), ("variance", variance_rows), ("variance_tiny", tiny_rows),
                          ("fixed_points", fixed_point_rows), ("explosion", explosion_rows), ("length", length_rows),
                          ("adaptive", adaptive_rows)):
        rows = rows_of()
        publish(name, rows)
        held += [row["holds"] for row in rows if row.get("holds", "") != ""]
        if name == "gradients":
            exact = max(row["largest error"] for row in rows if row["claim"] == "exact")
            far = sum(row["claim"] == "wrong" and row["median relative error"] > 0.1 for row in rows)
            print(f"claimed exact: largest error {exact:.1e} (bar 1e-10); claimed wrong: {far} rows by > 10 % (bar 8)")
            held.append(far >= 8)
    try:
        draw()
    except ImportError:
        print("figures were not drawn: matplotlib is missing; pip install matplotlib")
    print(f"\n{sum(held)} of {len(held)} claims held ({time.perf_counter() - start:.0f} s)")
    sys.exit(0 if all(held) else 1)


if __name__ == "__main__":
    main()
