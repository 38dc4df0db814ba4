"""starter.py: GRPO with a KL leash, in one file. Functions stand in the order in which the data reaches them.

    python starter.py      quick tests, then main(): measure, train, measure again, report. Edit the numbers in main().

    problems -> prompts -> rollout -> rewards -> advantages -> microbatches -> log-probs -> loss -> optimiser -> sampler

GRPO (Shao et al. 2024, arXiv:2402.03300) samples a group of responses to each prompt, scores them with a rule, and
makes those above their group's mean likelier. Where this file differs from the paper: the loss is a mean over the
tokens of the whole step (DAPO, arXiv:2503.14476); the KL term shows k3 but pulls with the gradient of KL(policy ||
reference), which k3 as written does not have; the sampler's own log-probs correct for what its engine computes
differently from the trainer. The loss measures nothing: watch the reward.
"""
import machine  # first: it sets variables that torch and vLLM read when they are imported
import checks
import engines
import ranks
import tasks
from checks import check_log_probs
from engines import init_vllm, load_policy_into_vllm_instance
from machine import InputError, RunStopped, timed

import ast
import copy
import math
import operator
import random
import re
import sys
import time
import zlib
from collections import Counter, defaultdict
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.nn.functional import softplus
from tqdm import tqdm

# ----------------------------------------------------------------------------------------------------------------------
# 1. Problems: tasks.py makes or reads them -> the problems of a step

def problems_of_step(problems, step, n, seed):
    """-> the n problems of this step: a walk through a fresh shuffle each epoch, found from the step alone."""
    walk = [divmod(position, len(problems)) for position in range(step * n, (step + 1) * n)]
    orders = {e: random.Random(f"{seed} {e}").sample(range(len(problems)), len(problems)) for e in dict(walk)}
    return [problems[orders[epoch][index]] for epoch, index in walk]


# ----------------------------------------------------------------------------------------------------------------------
# 2. Model: a checkpoint folder -> policy, tokenizer; engines.py starts vLLM and hands it the weights

def init_policy(model_id, device):
    """-> policy in float32, tokenizer. float32: in bf16, 84-98 % of the updates at lr 1e-5 to 1e-6 round away."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    import shared_prompts  # noqa: F401  it registers the attention named below
    with machine.loading(model_id):
        policy, found = AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32, output_loading_info=True,
                                                             attn_implementation="starter",
                                                             ignore_mismatched_sizes=True)  # check_model reads found
        tokenizer = AutoTokenizer.from_pretrained(model_id)
    checks.check_model(policy.to(device).eval(), tokenizer, model_id, found)
    return policy, tokenizer


# ----------------------------------------------------------------------------------------------------------------------
# 3. Rollout: prompts -> group_size responses each, as token ids with the log-prob of every sampled token

class Response(NamedTuple):
    prompt_ids: list
    response_ids: list  # as the sampler gave them, EOS included
    log_probs: list  # of response_ids, at the sampling temperature (at 1 where decoding is greedy)
    finished: bool  # ended by EOS; otherwise cut at max_new_tokens


def prompt_ids_of(problems, tokenizer):
    """-> ids of each prompt, in the tokenizer's chat template if it has one. Nothing else is ever tokenised."""
    if tokenizer.chat_template is None:
        return [tokenizer(problem["prompt"])["input_ids"] for problem in problems]
    settings = dict(add_generation_prompt=True, enable_thinking=False, return_dict=False)
    chats = [[{"role": "user", "content": problem["prompt"]}] for problem in problems]
    return tokenizer.apply_chat_template(chats, **settings)


def rollout_with_vllm(llm, prompts, group_size, max_new_tokens, temperature, seed, eos_token_id):
    """P lists of prompt ids -> P * group_size Responses, group after group. temperature 0 is greedy.

    Response j of prompt i draws with seed + i * group_size + j, whatever else is in the batch.
    """
    from vllm import SamplingParams
    settings = dict(n=group_size, temperature=temperature, max_tokens=max_new_tokens, logprobs=0, detokenize=False,
                    stop_token_ids=[eos_token_id], ignore_eos=True)  # that token alone, not generation_config's list
    params = [SamplingParams(seed=seed + i * group_size, **settings) for i in range(len(prompts))]
    llm.reset_prefix_cache()  # bits then depend on nothing that was sampled before: a resumed run repeats them
    with machine.random_states_kept():  # a CPU engine draws from torch's global generator too
        requests = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [Response(prompt, list(out.token_ids), [lp[t].logprob for t, lp in zip(out.token_ids, out.logprobs)],
                     out.finish_reason == "stop")
            for prompt, request in zip(prompts, requests) for out in request.outputs]


@torch.no_grad()
def rollout_with_transformers(policy, prompts, group_size, max_new_tokens, temperature, seed, eos_token_id, bf16=False):
    """P lists of prompt ids -> P * group_size Responses, group after group. A prompt is read once for its group.

    Response j of prompt i draws with seed + i * group_size + j, whatever else is in the batch.
    """
    from shared_prompts import read_prompts
    responses, mode, device = [], policy.training, policy.device
    policy.eval()  # in train mode gradient checkpointing drops the cache
    head = ranks.gather(policy)  # layers whole on every rank; (V, H) weight of the LM head
    prompts_at_once = max(1, 512 // group_size)  # 512 rows: large enough to be quick, small enough for a laptop
    for start in range(0, len(prompts), prompts_at_once):
        chunk, tokens, log_probs = prompts[start:start + prompts_at_once], [], []
        seeds = range(seed + start * group_size, seed + (start + len(chunk)) * group_size)
        uniform = [torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        uniform = torch.stack(uniform).to(device)  # (B, max_new_tokens)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):  # around all: each weight is cast once
            hidden, cache, positions = read_prompts(policy, chunk, group_size, max_new_tokens)
            hidden = hidden.repeat_interleave(group_size, dim=0)  # (B, H)
            running = torch.ones(len(hidden), dtype=torch.bool, device=device)
            for i in range(max_new_tokens):
                logits = torch.nn.functional.linear(hidden, head)  # (B, V)
                token, log_prob = engines.draw_tokens(logits, uniform[:, i:i + 1], temperature)
                tokens.append(token), log_probs.append(log_prob)
                running &= token[:, 0] != eos_token_id
                if not running.any() or i == max_new_tokens - 1:
                    break
                out = policy.base_model(input_ids=token, position_ids=positions + i, past_key_values=cache)
                hidden = out.last_hidden_state[:, -1]
        for i, (row, chosen) in enumerate(zip(torch.cat(tokens, 1).tolist(), torch.cat(log_probs, 1).tolist())):
            end = row.index(eos_token_id) + 1 if eos_token_id in row else len(row)
            responses.append(Response(chunk[i // group_size], row[:end], chosen[:end], eos_token_id in row))
    policy.train(mode)
    return responses


def sampling(c, tokenizer, what):
    """-> settings of the rollout of a step, or for another purpose. seed: 32 bits, all that torch reads on a CPU."""
    return dict(max_new_tokens=c.max_new_tokens, temperature=c.temperature, eos_token_id=tokenizer.eos_token_id,
                seed=random.Random(f"{c.seed} {what}").getrandbits(32), bf16=c.bf16)


def rollout(policy, llm, prompts, group_size, seed, bf16=False, **settings):
    """One call, two engines: vLLM where there is one, else transformers with the policy itself. Each rank samples its
    share of the prompts. -> Responses, group after group."""
    mine, start = ranks.share_of(prompts)
    settings |= dict(group_size=group_size, seed=seed + start * group_size)
    if llm is None:
        return ranks.gathered(rollout_with_transformers(policy, mine, bf16=bf16, **settings))
    return ranks.gathered(rollout_with_vllm(llm, mine, **settings))


# ----------------------------------------------------------------------------------------------------------------------
# 4. Reward: response text, problem -> 1.0 solved, 0.1 well-formed <answer> but wrong, 0.0 otherwise

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def arithmetic(text):
    """-> (value as an exact Fraction, whole numbers used) or None. Digits and + - * / ( ) only; nothing is executed."""
    used = []

    def value(node):
        match node:
            case ast.Constant(value=int(number)):
                used.append(number)
                return Fraction(number)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner)
            case ast.BinOp(op=op, left=left, right=right):
                return OPERATIONS[type(op)](value(left), value(right))  # ** and // are not among them
        raise KeyError(node)

    if not re.fullmatch(r"[0-9+\-*/() ]{1,200}", text):  # too short for a huge number or for deep nesting
        return None
    try:
        return value(ast.parse(text.strip(), mode="eval").body), used
    except (KeyError, ZeroDivisionError, SyntaxError, MemoryError, RecursionError):  # what a model's text can be
        return None


def last_number(text):
    """-> last number in a short text as a Fraction, or None. Reads "$1,234.50", "-12 C", "18 %", "72 clips"."""
    if len(text) > 200:
        return None
    found = re.findall(r"((?<![\w)])-)?\$?(\d[\d,]*(?:\.\d+)?|\.\d+)", text.replace("\u2212", "-"), re.ASCII)
    return Fraction("".join(found[-1]).replace(",", "")) if found else None


def reward_fn(response_text, problem):
    """The last <answer>...</answer> of the text against the problem -> 1.0, 0.1 or 0.0. Any text is safe to give."""
    head, closed, _ = response_text[-200_000:].rpartition("</answer>")  # so every copy is bounded: a megabyte at most
    _, opened, answer = head.rpartition("<answer>")
    answer = answer.strip()
    if not (closed and opened and answer):
        return 0.0
    if "numbers" in problem:
        parsed = arithmetic(answer)
        solved = parsed and parsed[0] == problem["target"] and sorted(parsed[1]) == sorted(problem["numbers"])
    else:
        gold = last_number(problem["answer"])
        solved = answer == problem["answer"] or gold is not None and last_number(answer) == gold
    return 1.0 if solved else 0.1


def score(responses, problems, tokenizer, reward, c):
    """P * G Responses, P problems -> P * G texts, (P * G,) float32 rewards."""
    problem_of_each = [problem for problem in problems for _ in range(len(responses) // len(problems))]
    mine, problem_of_mine = (ranks.share_of(items)[0] for items in (responses, problem_of_each))
    texts = tokenizer.batch_decode([r.response_ids for r in mine], skip_special_tokens=True)
    rewards = checks.rewards_of(reward, texts, problem_of_mine, c.reward_seconds, c.reward_if_broken)
    texts, rewards = zip(*ranks.gathered(list(zip(texts, rewards))))
    return list(texts), torch.tensor(rewards)


# ----------------------------------------------------------------------------------------------------------------------
# 5. Advantages: rewards -> how much better than its group each response is

def compute_group_normalized_advantages(rewards, group_size, advantage_eps, normalize_by_std):
    """(P * G,) rewards -> (P * G,) advantages, metadata. A group whose rewards are all equal gets exactly 0.

    A = (r - mean) / (std + eps), unbiased std (GRPO), or r - mean alone (Dr. GRPO, arXiv:2503.20783).
    """
    groups = rewards.reshape(-1, group_size)
    all_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)  # (P, 1); a mean of equal floats may be off by a bit
    advantages = torch.where(all_equal, 0.0, groups - groups.mean(dim=1, keepdim=True))
    if normalize_by_std:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + advantage_eps)
    metadata = {"reward_mean": rewards.mean().item(), "reward_std": groups.std(dim=1).mean().item(),
                "frac_zero_std": all_equal.float().mean().item()}
    return advantages.reshape(-1), metadata


# ----------------------------------------------------------------------------------------------------------------------
# 6. Microbatches: Responses -> (B, T) tensors, aligned once: column t of every one speaks of the token labels[:, t]

def make_batch(responses, advantages, device):
    """-> dict of (B, T) tensors, padded on the right; advantages (B, 1); prompts (B, L) but for their last token, which
    is the first of input_ids, padded with -1. The mask comes from lengths: EOS may well be the pad id."""
    def padded(rows, value, dtype=torch.long):
        width = max(map(len, rows))
        return torch.tensor([row + [value] * (width - len(row)) for row in rows], dtype=dtype)

    labels, lengths = padded([r.response_ids for r in responses], 0), [len(r.response_ids) for r in responses]
    batch = {"prompts": padded([r.prompt_ids[:-1] for r in responses], -1), "labels": labels,
             "input_ids": padded([r.prompt_ids[-1:] + r.response_ids[:-1] for r in responses], 0),
             "response_mask": torch.arange(labels.shape[1]) < torch.tensor(lengths)[:, None],
             "rollout_log_probs": padded([r.log_probs for r in responses], 0.0, torch.float32),
             "advantages": advantages[:, None]}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def token_weights(response_mask, loss_average, max_new_tokens):
    """(B, T) mask of the whole step -> (B, T) share of each token in the step's loss, fixed before it is cut up.

    "grpo": mean over each response, then over responses. "dapo": mean over all tokens. "dr_grpo": sum / (B * max).
    """
    mask = response_mask.float()
    if loss_average == "grpo":
        return mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / len(mask)
    return mask / (mask.sum().clamp(min=1) if loss_average == "dapo" else len(mask) * max_new_tokens)


def cut_microbatches(batch, max_tokens):
    """-> microbatches, longest rows first, each of at most max_tokens padded tokens with its prompts, or of one row.

    8 % of all so far is padding at most, unless one or what is left is below max_tokens / 32: small ones are slow.
    """
    lengths, cuts, before, small = batch["response_mask"].sum(dim=1).clamp(min=1).tolist(), [], 0.0, max_tokens // 32
    prompts, order = list(map(tuple, batch["prompts"].tolist())), sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        width, n, read, held = lengths[order[0]], 0, set(), 0  # a prompt is read once in a microbatch
        left = sum(lengths[row] for row in order)
        for row in order:
            read.add(prompts[row])
            wasteful = before + 0.92 * (n + 1) * width > held + lengths[row] and min(n * width, left - held) >= small
            if n and (wasteful or (n + 1) * width + len(read) * len(prompts[0]) > max_tokens):
                break
            n, held = n + 1, held + lengths[row]
        cuts.append({name: tensor[order[:n]] if name == "prompts" else tensor[order[:n], :width]
                     for name, tensor in batch.items()})
        order, before = order[n:], before + 0.92 * n * width - held
    return cuts


# ----------------------------------------------------------------------------------------------------------------------
# 7. Log-probs: (B, T) ids -> log-probs of the response tokens and KL over the vocabulary; no (B, T, V) in any dtype

class ChunkedHead(torch.autograd.Function):
    """(N, H) hidden, (V, H) weight, (N,) labels, a reference's hidden and weight or None -> four (N,) tensors in nats:
    log-prob of the label, exact KL(policy || reference); for show: entropy, the reference's log-prob of the label.

    LM head and softmax for a slice of the vocabulary at a time, forward and backward: memory is that of a few slices.
    Sums run under a running maximum. KL = E[d] - log Z + log Z_ref with d = logit - the reference's; its slope by a
    logit is p * (d - E[d]). hidden in bf16: multiplied as bf16, summed in float32.
    """
    @staticmethod
    def slices(hidden, weight, labels, logits_at_once):
        """-> tokens of a slice, their (N, C) logits, rows whose label is among them, the label's place there."""
        width = max(64, logits_at_once // max(1, len(hidden)))
        for start in range(0, len(weight), width):
            rows = ((labels >= start) & (labels < start + width)).nonzero()[:, 0]
            yield slice(start, start + width), hidden @ weight[start:start + width].T, rows, labels[rows] - start

    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, ref_hidden, ref_weight, logits_at_once=1 << 22):  # 16 MB
        wide = torch.promote_types(hidden.dtype, torch.float32)
        scaled, ref_scaled = (None if x is None else x.to(wide) / temperature for x in (hidden, ref_hidden))
        z, e_logit, e_d, at_label, ref_at_label = scaled.new_zeros(5, len(hidden))
        top, ref_log_z = scaled.new_full((2, len(hidden)), -math.inf)
        with machine.matmuls_in(hidden.dtype):
            for part, logits, rows, columns in ChunkedHead.slices(scaled, weight, labels, logits_at_once):
                higher = torch.maximum(top, logits.amax(dim=1))
                p, shrink = (logits - higher[:, None]).exp_(), (top - higher).exp()  # p is not normalised yet
                top, z, e_logit = higher, z * shrink + p.sum(dim=1), e_logit * shrink + (p * logits).sum(dim=1)
                at_label[rows] = logits[rows, columns]
                if ref_hidden is not None:
                    ref_logits = ref_scaled @ ref_weight[part].T
                    ref_log_z = torch.logaddexp(ref_log_z, ref_logits.logsumexp(dim=1))
                    ref_at_label[rows] = ref_logits[rows, columns]
                    e_d = e_d * shrink + p.mul_(logits.sub_(ref_logits)).sum(dim=1)
        log_z, e_d = top + z.log(), e_d / z
        ctx.save_for_backward(hidden, weight, labels, ref_hidden, ref_weight, log_z, e_d)
        ctx.temperature, ctx.logits_at_once = temperature, logits_at_once
        entropy, ref_log_prob = log_z - e_logit / z, ref_at_label - ref_log_z
        ctx.mark_non_differentiable(entropy, ref_log_prob)
        ctx.set_materialize_grads(False)  # None, not zeros, where the loss does not use an output
        kl = e_d - log_z + ref_log_z if ref_hidden is not None else e_d
        return at_label - log_z, kl, entropy, ref_log_prob

    @staticmethod
    def backward(ctx, grad_label, grad_kl, *_):
        hidden, weight, labels, ref_hidden, ref_weight, log_z, e_d = ctx.saved_tensors
        scaled, ref_scaled = (None if x is None else x.to(log_z.dtype) / ctx.temperature for x in (hidden, ref_hidden))
        grad_hidden, grad_weight = torch.zeros_like(scaled), None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
        with machine.matmuls_in(hidden.dtype):
            for part, logits, rows, columns in ChunkedHead.slices(scaled, weight, labels, ctx.logits_at_once):
                p = (logits - log_z[:, None]).exp_()
                slope = torch.zeros_like(log_z) if grad_label is None else -grad_label  # of the loss by each logit, / p
                slope = slope[:, None]
                if grad_kl is not None and ref_hidden is not None:
                    d = logits.sub_(ref_scaled @ ref_weight[part].T)
                    slope = d.sub_(e_d[:, None]).mul_(grad_kl[:, None]).add_(slope)
                grad = p.mul_(slope)
                if grad_label is not None:
                    grad[rows, columns] += grad_label[rows]
                grad = grad.to(hidden.dtype)
                grad_hidden += grad @ weight[part].to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight[part] = grad.T @ scaled.to(hidden.dtype)
        return (grad_hidden / ctx.temperature).to(hidden.dtype), grad_weight, None, None, None, None, None


def response_hidden(model, rows, bf16=False):
    """rows: (B, T) input_ids, response_mask; (B, L) prompts before them, or none -> (N, H) last hidden states where the
    mask is 1. A prompt that rows have in common is read once. Padding on the right needs no attention mask."""
    from shared_prompts import hidden_after_prompts
    ids, prompts = rows["input_ids"], rows.get("prompts")
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        if prompts is None or not prompts.numel():
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        else:
            hidden = hidden_after_prompts(model, prompts, ids)
    hidden = hidden.flatten(0, 1).index_select(0, rows["response_mask"].flatten().nonzero()[:, 0])
    return hidden.to(torch.bfloat16 if bf16 else model.get_output_embeddings().weight.dtype)


def get_response_log_probs(model, input_ids, labels, response_mask=None, temperature=1.0, bf16=False, reference=None,
                           everything=False, prompts=None):
    """(B, T) input_ids, labels -> (B, T) float32 log p(label | prefix) at this temperature; 0 outside the mask.

    everything=True: a dict of log_probs, exact_kl, entropy, ref_log_probs, all (B, T); exact_kl is KL(policy ||
    reference) at each position, over the whole vocabulary. reference: its (N, H) response_hidden, (V, H) head, or None.
    prompts: (B, L) ids before input_ids, padded on the right with -1.
    """
    mask = torch.ones_like(labels, dtype=torch.bool) if response_mask is None else response_mask
    rows = {"input_ids": input_ids, "response_mask": mask, "prompts": prompts}
    hidden, weight = response_hidden(model, rows, bf16), ranks.head_of(model)
    found = ChunkedHead.apply(hidden, weight, labels[mask], temperature, *(reference or (None, None)))
    found = [torch.zeros_like(mask, dtype=x.dtype).masked_scatter(mask, x) for x in found]
    return dict(zip(("log_probs", "exact_kl", "entropy", "ref_log_probs"), found)) if everything else found[0]


# ----------------------------------------------------------------------------------------------------------------------
# 8. KL and loss: log-probs, advantages -> per-token loss; the coefficient of the next step

def masked_mean(tensor, mask, dim=None):
    """Mean where the mask is 1, over dim or over all; 0 where nothing is. Masked entries may be nan or inf."""
    mask = mask.bool().expand_as(tensor)
    kept, n = torch.where(mask, tensor, torch.zeros_like(tensor)), mask.to(tensor.dtype)
    return kept.sum() / n.sum().clamp(min=1) if dim is None else kept.sum(dim) / n.sum(dim).clamp(min=1)


def compute_kl_divergence(policy_log_probs, ref_log_probs, estimator="k1"):
    """(B, T), (B, T) -> (B, T) float32, nats: KL(policy || reference) estimated at each token that the policy sampled.

    With d = log pi - log ref: k1 = d (unbiased, signed), k2 = d^2 / 2 (biased), k3 = exp(-d) - 1 + d (unbiased, >= 0);
    J. Schulman, "Approximating KL divergence" (2020). These are values; for gradients see kl_with_gradient.
    """
    dtype = torch.promote_types(policy_log_probs.dtype, torch.float32)
    d = policy_log_probs.to(dtype) - ref_log_probs.to(dtype)
    if estimator not in ("k1", "k2", "k3"):
        raise InputError(f"kl_estimator = {estimator!r} must be 'k1', 'k2' or 'k3' for two log-probs; use 'k3'")
    return {"k1": d, "k2": d.square() / 2, "k3": torch.expm1(-d) + d}[estimator]  # exp(-d) - 1 + d can round below 0


def kl_with_gradient(policy_log_probs, ref_log_probs, ratio, exact_kl=None, kl_estimator="k3", kl_gradient="reverse",
                     kl_ratio_cap=2.0, kl_log_ratio_cap=math.inf):
    """(B, T) log-probs and ratio = pi / old -> (B, T) KL: the value is the estimator's, the gradient kl_gradient's.

    "reverse": r * d * grad log pi, the gradient of KL(policy || reference), on the policy's own samples and on older
    ones (r is cut at kl_ratio_cap, d at +-kl_log_ratio_cap). "as_written": autograd through the estimator. "exact":
    exact_kl (B, T), summed over the vocabulary, brings its own.
    """
    if kl_estimator == "exact" and exact_kl is not None:
        return exact_kl
    if kl_gradient == "as_written":
        return compute_kl_divergence(policy_log_probs, ref_log_probs, kl_estimator)
    d = (policy_log_probs - ref_log_probs).detach().clamp(-kl_log_ratio_cap, kl_log_ratio_cap)
    pull = ratio.detach().clamp(max=kl_ratio_cap) * d * policy_log_probs
    return compute_kl_divergence(d.clamp(-20, 20), torch.zeros_like(d), kl_estimator) + pull - pull.detach()


TERM_RULES = {  # kl (B, T), the responses' lengths n (B, 1) -> what is penalised; its slope scales the gradient of kl
    "clip": lambda kl, n, c: kl.clamp(max=c.kl_clip_threshold),  # as in print: lets go of what drifted furthest
    "clip_sound": lambda kl, n, c: kl,  # log-ratios are cut in kl_with_gradient instead: the pull stays
    "sigmoid": lambda kl, n, c: torch.sigmoid(kl - c.kl_target) * kl,  # as in print: close to a constant 0.5
    "sigmoid_sound": lambda kl, n, c: c.kl_target / 10 * softplus(10 * kl / c.kl_target - 10),  # slope 0 -> 1 at target
    "length_normalized": lambda kl, n, c: kl / n,  # as in print: in the reward it makes long responses cheap
    "length_normalized_sound": lambda kl, n, c: kl / c.max_new_tokens,
}


def sum_to_go(kl, mask):
    """(B, T) -> (B, T): sum over this token of the response and all later ones."""
    return torch.where(mask, kl, 0.0).flip(1).cumsum(1).flip(1)


def put_kl_into_advantages(advantages, log_probs, ref_log_probs, mask, kl_coef, kl_estimator="k1", kl_rule=None,
                           kl_log_ratio_cap=math.inf):
    """(B, 1) advantages, (B, T) log-probs at rollout -> (B, T): less kl_coef * KL of this token and all later ones.

    For k1 the policy gradient is then that of the whole sequence's KL, where the loss divides by a constant and no
    ratio is clipped. With a kl_rule each token pays for the whole response, as in print.
    """
    d = (log_probs - ref_log_probs).detach().clamp(-kl_log_ratio_cap, kl_log_ratio_cap)
    kl = compute_kl_divergence(d, torch.zeros_like(d), kl_estimator)
    if kl_rule:
        return advantages - kl_coef * sum_to_go(kl_rule(kl, mask.sum(dim=1, keepdim=True).clamp(min=1)), mask)[:, :1]
    return advantages - kl_coef * sum_to_go(kl, mask)


def compute_loss(advantages, policy_log_probs, old_log_probs, clip_range, ref_log_probs=None, kl_coef=0.0, *, mask=None,
                 clip_range_high=None, importance_weights=None, exact_kl=None, kl_estimator="k3", kl_gradient="reverse",
                 kl_in="loss", kl_rule=None, kl_ratio_cap=2.0, kl_log_ratio_cap=math.inf):
    """(B, 1) or (B, T) advantages, (B, T) log-probs -> (B, T) loss = PPO-clipped term + kl_coef * KL, metadata.

    kl_in "loss": a token pays for its own KL. "loss_to_go": its score pays for that of later tokens too; on own samples
    that is the gradient of the whole sequence's KL, with "exact" at the lowest variance (Rao-Blackwell). "reward": the
    advantages hold it. kl_rule: (kl (B, T), lengths (B, 1)) -> what is penalised. importance_weights: (B, T) truncated
    old / sampler probability, on the policy term (arXiv:2508.04700). Metadata: means over the mask, d cut at +-20.
    """
    mask = torch.ones_like(policy_log_probs, dtype=torch.bool) if mask is None else mask.bool()
    policy, old = (torch.where(mask, x, 0.0) for x in (policy_log_probs, old_log_probs))
    ratio = torch.exp(policy - old)
    low, high = 1 - clip_range, 1 + (clip_range if clip_range_high is None else clip_range_high)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if importance_weights is not None:
        loss = loss * importance_weights
    low, high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)  # where the gradient is cut
    metadata = {"ratio_mean": ratio, "clip_frac": low | high, "clip_frac_low": low, "clip_frac_high": high}
    if ref_log_probs is not None:
        ref, n = torch.where(mask, ref_log_probs, 0.0), mask.sum(dim=1, keepdim=True).clamp(min=1)
        kl = kl_with_gradient(policy, ref, ratio, exact_kl, kl_estimator, kl_gradient, kl_ratio_cap, kl_log_ratio_cap)
        adapted = kl_rule(kl, n) if kl_rule else kl
        if kl_coef and kl_in != "reward":
            loss = loss + kl_coef * adapted
        if kl_coef and kl_in == "loss_to_go":
            later = (sum_to_go(adapted, mask) - adapted).detach()
            pull = ratio.detach().clamp(max=kl_ratio_cap) * later * policy
            loss = loss + kl_coef * (pull - pull.detach())
        d = (policy - ref).detach()
        shown = {k: compute_kl_divergence(d.clamp(-20, 20), torch.zeros_like(d), k) for k in ("k1", "k2", "k3")}
        shown["exact"] = shown["k3"] if exact_kl is None else exact_kl
        metadata |= {"kl_penalty_mean": shown[kl_estimator], "kl_per_token": shown["exact"], "kl_k1": shown["k1"],
                     "kl_k2": shown["k2"], "kl_k3": shown["k3"], "adaptive_kl/adapted_kl": adapted,
                     "kl_capped_frac": (ratio > kl_ratio_cap) | (d.abs() > kl_log_ratio_cap)}
    return loss, {name: masked_mean(x.detach().to(loss.dtype), mask) for name, x in metadata.items()}


COEFFICIENT_RULES = "target", "target_sound", "dynamic", "dynamic_sound"


def next_beta(state, kl, reward, c):
    """{"beta", "step", "kl", "reward"}, the step's KL in nats per token and its mean reward -> the state after it.

    "target" and "dynamic" as in print: one has no bounds, the other is a ratchet that one lucky batch moves. The sound
    ones look at moving averages, have bounds and move both ways. A number that is not finite moves nothing.
    """
    state = state | {"step": state["step"] + 1}
    if not (math.isfinite(kl) and math.isfinite(reward)):
        return state
    state |= {k: x if state[k] is None else 0.8 * state[k] + 0.2 * x for k, x in (("kl", kl), ("reward", reward))}
    beta, step = state["beta"], state["step"]
    if c.coefficient_rule == "target":
        beta *= 1.5 if kl > 1.5 * c.kl_target else 0.75 if kl < 0.5 * c.kl_target else 1.0
    elif c.coefficient_rule == "target_sound":  # small steps in log beta: the policy needs some to follow
        beta *= math.exp(0.1 * max(-1.0, min(1.0, math.log(max(state["kl"], 1e-9) / c.kl_target))))
        beta = max(0.1 * c.kl_coef, min(10 * c.kl_coef, beta))
    elif c.coefficient_rule == "dynamic":
        beta = max(c.beta_min, beta * (c.dynamic_beta_decay if reward > c.reward_threshold else 1.0))
        beta = c.beta_min if step >= c.beta_schedule_steps else beta
    elif c.coefficient_rule == "dynamic_sound":  # once in 10 steps, under a ceiling that falls to the floor
        floor, reached = max(c.beta_min, 0.1 * c.kl_coef), state["reward"] > c.reward_threshold
        ceiling = c.kl_coef * (floor / c.kl_coef) ** min(1.0, step / c.beta_schedule_steps)
        beta = max(floor, min(ceiling, beta * c.dynamic_beta_decay ** (0 if step % 10 else 1 if reached else -1)))
    return state | {"beta": beta}


def step_settings(c):
    """-> keyword arguments of grpo_microbatch_step."""
    rule = None if c.term_rule == "none" else partial(TERM_RULES[c.term_rule], c=c)
    cap = c.kl_clip_threshold if c.term_rule == "clip_sound" else math.inf
    return dict(clip_range=c.clip_range, clip_range_high=c.clip_range_high, importance_cap=c.importance_cap,
                temperature=c.temperature, bf16=c.bf16, kl_estimator=c.kl_estimator, kl_gradient=c.kl_gradient,
                kl_in=c.kl_in, kl_ratio_cap=c.kl_ratio_cap, kl_log_ratio_cap=cap, kl_rule=rule)


# ----------------------------------------------------------------------------------------------------------------------
# 9. Update: microbatches -> gradients and means; the optimiser steps in the loop

def grpo_microbatch_step(policy, rows, clip_range, ref_model=None, kl_coef=0.0, temperature=1.0, importance_cap=2.0,
                         bf16=False, **loss_settings):
    """Forward, loss, backward of one microbatch -> its share of the step's loss, token means, log-probs by name.

    rows: (B, T) input_ids, labels, response_mask, weights, rollout_log_probs; (B, 1) advantages; old_log_probs (B, T)
    and the reference's ref_hidden (N, H) or ref_log_probs (B, T) where they are known. Without old_log_probs the
    policy has not moved since the rollout: it is its own. What is returned last is what a later epoch needs of them.
    """
    mask, ref_hidden, reference = rows["response_mask"], rows.get("ref_hidden"), None
    if ref_model is not None and (ref_hidden is not None or kl_coef and "ref_log_probs" not in rows):
        with torch.no_grad():
            ref_hidden = response_hidden(ref_model, rows, bf16) if ref_hidden is None else ref_hidden
        reference = ref_hidden, ranks.head_of(ref_model)
    found = get_response_log_probs(policy, rows["input_ids"], rows["labels"], mask, temperature, bf16, reference, True,
                                   rows.get("prompts"))
    old_log_probs, advantages = rows.get("old_log_probs", found["log_probs"].detach()), rows["advantages"]
    ref_log_probs = found["ref_log_probs"] if reference else rows.get("ref_log_probs")
    if loss_settings.get("kl_in") == "reward" and ref_log_probs is not None:
        mine = {k: loss_settings[k] for k in ("kl_estimator", "kl_rule", "kl_log_ratio_cap") if k in loss_settings}
        advantages = put_kl_into_advantages(advantages, rows["rollout_log_probs"], ref_log_probs, mask, kl_coef, **mine)
    if importance_cap is not None:  # what the sampler's engine computes differently
        importance = torch.exp(old_log_probs - rows["rollout_log_probs"]).clamp(max=importance_cap)
        loss_settings["importance_weights"] = importance
    if reference:
        loss_settings["exact_kl"] = found["exact_kl"]
    loss, metadata = compute_loss(advantages, found["log_probs"], old_log_probs, clip_range, ref_log_probs, kl_coef,
                                  mask=mask, **loss_settings)
    loss = torch.where(mask, loss * rows["weights"], 0.0).sum()
    loss.backward()
    known = {"old_log_probs": old_log_probs} | ({} if ref_log_probs is None else {"ref_log_probs": ref_log_probs})
    return loss.detach(), metadata | {"entropy": masked_mean(found["entropy"], mask)}, known


def accumulate_gradients(policy, ref_model, microbatches, n_tokens, kl_coef, seconds, **settings):
    """Gradients of the step's whole loss -> its token means, and the microbatches with what a later epoch needs.

    n_tokens: of the whole step. None where memory ran out; nothing of the attempt is left in the gradients.
    """
    means, known = Counter(), []
    try:
        for rows in microbatches:
            if ref_model is not None and "ref_hidden" not in rows:  # once a rollout, whatever the number of epochs
                with timed(seconds, "log_probs"), torch.no_grad():
                    rows = rows | {"ref_hidden": response_hidden(ref_model, rows, settings["bf16"])}
            with timed(seconds, "update"):
                loss, metadata, log_probs = grpo_microbatch_step(policy, rows, ref_model=ref_model, kl_coef=kl_coef,
                                                                 **settings)
            share = rows["response_mask"].sum() / n_tokens  # token means -> the step's mean
            means.update({"loss": loss} | {name: value * share for name, value in metadata.items()})
            known.append(log_probs | rows)  # log-probs of the first epoch, before the policy moves: later the old ones
        ranks.release(policy)
        return ranks.total(means), known
    except RuntimeError as error:
        if ranks.world() > 1 or not machine.out_of_memory(error):  # the others do not know of it
            raise
    policy.zero_grad()


def halve(microbatches):
    """-> the same rows in microbatches of half the rows; the reference reads them anew."""
    cuts = [(rows, (len(rows["labels"]) + 1) // 2) for rows in microbatches]
    if all(n == len(rows["labels"]) for rows, n in cuts):
        raise RunStopped("out of memory with a single response at a time; lower max_new_tokens, set "
                         "gradient_checkpointing = True, or take a smaller model; resume = True then goes on")
    return [{name: tensor[part] for name, tensor in rows.items() if name != "ref_hidden"}
            for rows, n in cuts for part in (slice(n), slice(n, None)) if len(rows["labels"][part])]


# ----------------------------------------------------------------------------------------------------------------------
# 10. Evaluate: held-out problems -> solved; held-out problems of other skills -> what was forgotten; drift in nats

def evaluate(policy, llm, tokenizer, problems, skills, c):
    """-> {"solved", "reward_mean", "response_length", "retention_<skill>" ...} of one response each; three samples."""
    settings = sampling(c, tokenizer, "evaluate") | dict(group_size=1, temperature=c.eval_temperature)
    responses = rollout(policy, llm, prompt_ids_of(problems + skills, tokenizer), **settings)
    n = len(problems)
    texts, rewards = score(responses[:n], problems, tokenizer, c.reward, c)
    metrics = {"solved": (rewards == 1).float().mean().item(), "reward_mean": rewards.mean().item(),
               "response_length": sum(len(r.response_ids) for r in responses[:n]) / n}
    if skills:
        _, right = score(responses[n:], skills, tokenizer, reward_fn, c)
        for skill in sorted({p["skill"] for p in skills}):
            metrics[f"retention_{skill}"] = right[[p["skill"] == skill for p in skills]].eq(1).float().mean().item()
    return metrics, list(zip([problem["prompt"] for problem in problems], texts, rewards[:3].tolist()))


@torch.no_grad()
def measure_kl(policy, llm, tokenizer, problems, ref_model, c):
    """-> (3, N): KL(policy || reference) in nats at each token of fresh samples, its place in the response, its id."""
    responses = rollout(policy, llm, prompt_ids_of(problems, tokenizer), group_size=1,
                        **sampling(c, tokenizer, "measure_kl"))
    batch, found = make_batch(responses, torch.zeros(len(responses)), policy.device), []
    for rows in cut_microbatches(batch, c.max_tokens_per_microbatch):
        ids, labels, mask = rows["input_ids"], rows["labels"], rows["response_mask"]
        reference = response_hidden(ref_model, rows, c.bf16), ranks.head_of(ref_model)
        kl = get_response_log_probs(policy, ids, labels, mask, c.temperature, c.bf16, reference, True,
                                    rows["prompts"])["exact_kl"]
        found.append(torch.stack([kl[mask].double(), mask.cumsum(1)[mask] - 1, labels[mask]]))
    return torch.cat(found, dim=1).cpu()


# ----------------------------------------------------------------------------------------------------------------------
# 11. Log: numbers -> TensorBoard, one console line a step, a report

def log_train(run, step, m, seconds, left):
    """Writes metrics m as train/* or adaptive_kl/*, time/*, mem/*; -> the console line. left: seconds to the end."""
    scalars = {name if "/" in name else f"train/{name}": value for name, value in m.items()}
    scalars |= {f"time/{phase}": value for phase, value in seconds.items()} | {"mem/peak_gb": machine.peak_memory_gb()}
    for tag, value in scalars.items():
        run.log("add_scalar", tag, value, step)
    line = (f"Step {step} | Loss: {m['loss']:7.4f} | Grad norm: {m['grad_norm']:.4f} | Reward: {m['reward_mean']:.3f} "
            f"| Equal groups: {m['frac_zero_std']:4.0%} | Length: {m['response_length']:.1f} "
            f"| Entropy: {m['entropy']:.3f} | Sampler diff: {m['sampler_logprob_diff']:.0e} "
            f"| {seconds['total']:.2f} s, {left / 60:.1f} min left")
    return line + (f" | KL penalty: {m['kl_penalty']:.4f}" if "kl_penalty" in m else "")


def log_eval(run, step, metrics, samples):
    """Writes eval/* and a few samples as text; -> the console line of this evaluation."""
    for name, value in metrics.items():
        run.log("add_scalar", f"eval/{name}", value, step)
    for i, (prompt, text, reward) in enumerate(samples):
        text = f"    reward {reward:g}\n{prompt}\n{text}".replace("\n", "\n    ")
        run.log("add_text", f"samples/{i}", text, step)
    return (f"Eval at step {step} | Solved: {metrics['solved']:.1%} | Reward: {metrics['reward_mean']:.3f} | "
            f"Length: {metrics['response_length']:.1f}" + "".join(
                f" | {name[10:]}: {value:.1%}" for name, value in metrics.items() if name.startswith("retention_")))


# ----------------------------------------------------------------------------------------------------------------------
# 12. The loop

def train(policy, tokenizer, llm, optimizer, problems, c, run, evaluate_now, state, ref_model=None, kl_coef=0.0):
    """n_train_steps times: sync, rollout, rewards, advantages, log-probs, loss, update, log. -> the last state.

    state: what one step hands to the next besides weights and moments, as JSON; {} or that of a checkpoint.
    """
    state = {"step": 0, "tokens": 0, "seconds": 0.0, "max_tokens": c.max_tokens_per_microbatch, "skipped": 0,
             "in_a_row": 0, "first_diff": None, "first": None, "said": [],
             "kl": {"beta": kl_coef, "step": 0, "kl": None, "reward": None}} | state
    n_prompts, start, first_step = c.rollout_batch_size // c.group_size, time.perf_counter(), state["step"] + 1
    for step in tqdm(range(first_step, c.n_train_steps + 1), initial=first_step - 1, total=c.n_train_steps, unit="step",
                     disable=not sys.stdout.isatty(), file=sys.stdout, leave=False):
        if c.eval_every and step > 1 and (step - 1) % c.eval_every == 0:
            evaluate_now(step - 1)
        seconds, totals, kl, max_tokens = defaultdict(float), Counter(), state["kl"], state["max_tokens"]
        with timed(seconds, "total"):
            if llm is not None:
                with timed(seconds, "sync"):
                    load_policy_into_vllm_instance(policy, llm)
            asked = problems_of_step(problems, step - 1, n_prompts, c.seed)
            with timed(seconds, "rollout"):
                responses = rollout(policy, llm, prompt_ids_of(asked, tokenizer), group_size=c.group_size,
                                    **sampling(c, tokenizer, step))
            texts, rewards = score(responses, asked, tokenizer, c.reward, c)
            advantages, metrics = compute_group_normalized_advantages(rewards, c.group_size, c.advantage_eps,
                                                                      c.normalize_by_std)
            batch = make_batch(responses, advantages, policy.device)
            batch["weights"] = token_weights(batch["response_mask"], c.loss_average, c.max_new_tokens)
            microbatches = ranks.own_microbatches(batch, max_tokens, cut_microbatches)
            n_tokens = int(batch["response_mask"].sum())
            optimizer.param_groups[0]["lr"] = c.learning_rate * min(1.0, step / max(c.warmup_steps, 1))
            for epoch in range(c.epochs_per_rollout):
                while not (done := accumulate_gradients(policy, ref_model, microbatches, n_tokens, kl["beta"],
                                                        seconds, **step_settings(c))):
                    microbatches = halve(microbatches)
                    max_tokens = max(rows["labels"].numel() for rows in microbatches)
                    tqdm.write(f"Warning: out of memory: from step {step} on microbatches of {max_tokens} tokens")
                means, microbatches = done
                if epoch == 0:
                    metrics |= check_log_probs(microbatches, step, state["first_diff"], c.bf16)
                with timed(seconds, "update"):
                    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), c.max_grad_norm)
                    means["grad_norm"] = ranks.whole(norm)
                    totals.update(means)
                    broken = [name for name in ("loss", "grad_norm") if not means[name].isfinite()]
                    if not broken:
                        run.weights_move()
                        optimizer.step()
                    optimizer.zero_grad()
                if ref_model is not None:
                    metrics["adaptive_kl/current_beta"] = kl["beta"]
                    kl = kl if broken else next_beta(kl, means["kl_per_token"].item(), metrics["reward_mean"], c)
                if broken:
                    break
        metrics |= {name: float(value) / (epoch + 1) for name, value in totals.items()}
        if ref_model is not None:
            metrics["adaptive_kl/raw_kl"] = metrics["kl_penalty"] = metrics.pop("kl_penalty_mean")
            metrics["kl_per_sequence"] = metrics["kl_per_token"] * n_tokens / len(responses)
        metrics |= {"lr": optimizer.param_groups[0]["lr"], "response_length": n_tokens / len(responses),
                    "truncated_frac": sum(not r.finished for r in responses) / len(responses),
                    "skipped_steps": state["skipped"] + bool(broken), "tokens_per_s": n_tokens / seconds["total"]}
        left = (time.perf_counter() - start) / (step - first_step + 1) * (c.n_train_steps - step)
        first, said = state["first"] or metrics, set(state["said"])
        lines = [log_train(run, step, metrics, seconds, left), *checks.warning_signs(metrics, first, c, step, said)]
        if broken:
            lines.append(run.keep_skipped(step, broken, asked, texts, rewards, responses))
        tqdm.write("\n".join(lines))
        state = state | {
            "step": step, "tokens": state["tokens"] + n_tokens, "seconds": state["seconds"] + seconds["total"],
            "max_tokens": max_tokens, "skipped": metrics["skipped_steps"], "kl": kl, "first": first,
            "in_a_row": state["in_a_row"] + 1 if broken else 0, "said": sorted(said),
            "first_diff": state["first_diff"] or metrics["sampler_logprob_diff"]}
        run.end_of_step(state, c)
    return state


# ----------------------------------------------------------------------------------------------------------------------
# 13. The numbers

DEFAULTS = {  # what differs:   the built-in model on a CPU,   a downloaded model on a GPU
    "model_id":                  ("tiny",                        "Qwen/Qwen3-1.7B"),
    "n_train_steps":             (200,                           80),
    "rollout_batch_size":        (256,                           128),
    "max_new_tokens":            (16,                            256),
    "learning_rate":             (3e-4,                          7e-6),
    "max_tokens_per_microbatch": (8_192,                         4_096),
    "numbers_per_problem":       ((2,),                          (3, 4)),
    "max_number":                (50,                            99),
    "countdown_prompt":          ("make {target}: {numbers}",    tasks.COUNTDOWN_PROMPT),
}


def main(
    # the model and what it is asked
    model_id=None,  # "tiny" (make_tiny.py builds it), a checkpoint folder or a Hugging Face name
    task="countdown",  # or "gsm8k"
    train_file=None, eval_file=None,  # JSONL with "question" and "answer", for gsm8k
    reward=reward_fn,  # (response_text, problem) -> number
    reward_seconds=10.0,  # a reward that takes longer counts as broken, like one that raises or gives no number:
    reward_if_broken=None,  # None: the run stops; a number: what such a text gets
    n_train_problems=10_000, numbers_per_problem=None, max_number=None, max_target=99, countdown_prompt=None,
    seed=0,  # the same seed gives the same numbers on the same machine
    # rollout
    engine="auto",  # "vllm", "transformers"; auto: vLLM on a CUDA GPU where it is installed, else transformers
    device="auto",  # "cpu", "cuda", "cuda:1"
    n_train_steps=None,  # rollouts; each gives epochs_per_rollout optimiser steps
    rollout_batch_size=None,  # responses a step = prompts x group_size
    group_size=8,  # responses to one prompt; more: finer advantages, fewer prompts
    max_new_tokens=None,  # longer responses are cut, count as unfinished and are trained with the reward they got
    temperature=1.0,  # of sampling; every log-prob is taken at it
    gpu_mem_util=0.3,  # share of the GPU's memory that vLLM takes; the trainer needs the rest
    vllm_sleep=False,  # True: vLLM gives its GPU memory back between rollouts, for the time to fill it again
    engine_seconds=1800.0,  # a call of vLLM that takes longer counts as hung: the engine is started again, once
    # advantages and loss
    normalize_by_std=True, advantage_eps=1e-6,  # False: Dr. GRPO, groups with a small spread weigh less
    loss_average="dapo",  # mean over the step's tokens; "grpo": over each response first; "dr_grpo": constant divisor
    clip_range=0.2, clip_range_high=None,  # ratio kept in [1 - clip_range, 1 + clip_range_high]; None: symmetric
    importance_cap=2.0,  # sampler-trainer correction exp(old - sampler) is cut here; None: no correction
    epochs_per_rollout=1,  # more: fewer rollouts, staler samples
    # the KL leash
    use_kl_penalty=False,  # True: hold the policy near its start, for a second copy of the weights and one forward pass
    kl_coef=0.01,  # nats to reward; README_KL.md has the measured table
    kl_estimator="k3",  # the value: "k1", "k2", "k3" of the sampled token, or "exact": over the vocabulary
    kl_gradient="reverse",  # the pull: that of KL(policy || start), or "as_written": autograd through the estimator
    kl_in="loss",  # a token pays for its own KL; "loss_to_go", "reward" (k1): for that of all later tokens too
    kl_ratio_cap=2.0,  # cut of pi / old in that pull; math.inf: exact, and unbounded off-policy
    kl_adaptation_method="none",  # TERM_RULES and COEFFICIENT_RULES, or one of each: "dynamic+sigmoid"
    kl_clip_threshold=None,  # nats: clip 1.0, clip_sound (of the log-ratio) 5.0
    kl_target=None,  # nats per token: 0.1; in the rule "target" 0.05
    dynamic_beta_decay=0.9, reward_threshold=0.8, beta_min=0.0, beta_schedule_steps=1000,  # of the dynamic rules
    reproduce_paper=False,  # True: allow a KL term that is known not to work
    # update
    learning_rate=None, warmup_steps=10, weight_decay=0.0,  # AdamW on float32 weights
    max_grad_norm=1.0,  # the gradient is scaled down to this norm
    max_skipped=5,  # steps in a row whose loss or gradient is not finite; each is skipped and kept for inspection
    max_tokens_per_microbatch=None,  # changes memory and speed, never the gradient
    gradient_checkpointing=False,  # True: less memory, more time
    bf16=None,  # autocast; None: where the hardware gains from it
    # evaluate, log, save
    eval_every=50,  # steps; 0: only before and after
    n_eval_problems=500,  # at 500 the 95 % interval is at most +-4.4 points
    eval_temperature=0.0,  # 0: greedy
    out_dir="runs",  # each run gets a new folder here
    save_every=50,  # steps from checkpoint to checkpoint; SIGTERM and Ctrl-C write one too; 0: only they do
    resume=False,  # True: go on with the newest run in out_dir; or the folder of a run
    save_model=True,  # at the end, with save_pretrained, in the run folder
):
    config = dict(locals())
    ranks.start()
    column = 0 if str(model_id) == "tiny" or (model_id is None and not torch.cuda.is_available()) else 1
    config |= {name: values[column] for name, values in DEFAULTS.items() if config[name] is None}
    config = checks.check_config(config, tasks.TASKS)
    knobs = checks.changed_knobs(config, main)
    c = checks.with_kl_rules(SimpleNamespace(**config), TERM_RULES, COEFFICIENT_RULES)
    lines = checks.check_kl(c, knobs)
    c.device, c.bf16, use_vllm, hardware_line = machine.choose_hardware(c)
    problems, eval_problems = tasks.TASKS[c.task](c)
    c.n_eval_problems, c.problems_crc32 = len(eval_problems), zlib.crc32(repr((problems, eval_problems)).encode())
    checks.check_problems(problems, eval_problems, c)
    run_folder, checkpoint, state, resume_lines = checks.find_run(c) if c.resume else (None, None, {}, [])
    model_folder = machine.find_model(c.model_id)
    skills = checks.read_skills(model_folder)
    print(hardware_line, *lines, *resume_lines, sep="\n")

    policy, tokenizer = init_policy(model_folder, c.device)
    policy.train(c.gradient_checkpointing)  # which needs train mode; without it eval mode keeps dropout out
    if c.gradient_checkpointing:
        policy.gradient_checkpointing_enable()
    longest = max(map(len, prompt_ids_of(problems + eval_problems + skills, tokenizer)))
    checks.check_prompts(policy, tokenizer, longest, c)
    if not use_vllm:
        engines.check_attention(policy, longest + c.max_new_tokens)
    leash = c.use_kl_penalty and c.kl_coef > 0
    ref_model = copy.deepcopy(policy).eval().requires_grad_(False) if leash else None
    start_vllm = partial(init_vllm, model_folder, c.seed, longest + c.max_new_tokens, c.gpu_mem_util, c.bf16,
                         c.vllm_sleep)
    llm = engines.RestartedVLLM(start_vllm, policy, c.engine_seconds, c.vllm_sleep) if use_vllm else None
    if leash:
        probe = rollout(policy, llm, prompt_ids_of(problems[:2], tokenizer), group_size=4,
                        **sampling(c, tokenizer, "probe"))
        knobs["kl_coef"] = c.kl_coef, 0.0
        checks.refuse_dead_knobs(sys.modules[__name__], policy, ref_model, probe, c, knobs)
    start = machine.hash_of_weights(policy)
    ranks.shard(policy), leash and ranks.shard(ref_model)
    optimizer = torch.optim.AdamW(policy.parameters(), c.learning_rate, betas=(0.9, 0.95), fused=True,
                                  weight_decay=c.weight_decay)
    if checkpoint:
        checks.check_start(state, start, c)
        machine.load_checkpoint(checkpoint, state, policy, optimizer)
    run = machine.Run(run_folder or machine.new_run_folder(c.out_dir), policy, optimizer, c, __file__, state)
    before = state.get("before", {})

    def evaluate_now(step):
        if llm is not None:
            load_policy_into_vllm_instance(policy, llm)
        metrics, samples = evaluate(policy, llm, tokenizer, eval_problems, skills, c)
        signs = checks.warning_signs(metrics, before or metrics, c, step, set())
        tqdm.write("\n".join([log_eval(run, step, metrics, samples), *signs]))
        return metrics

    before = before or evaluate_now(0)
    with run.guarded():
        state = train(policy, tokenizer, llm, optimizer, problems, c, run, evaluate_now,
                      state | {"before": before, "start": start}, ref_model, leash and c.kl_coef)
    after = evaluate_now(c.n_train_steps)
    start_model = ref_model or init_policy(model_folder, c.device)[0]  # leash off: read again, for this measurement
    kl = measure_kl(policy, llm, tokenizer, eval_problems, start_model, c)
    if c.save_model:
        machine.save_model(policy, tokenizer, run.folder / "model")
    run.log("close")
    result = {"before": before, "after": after, "kl_per_token": kl[0].mean().item(), "seconds": state["seconds"],
              "kl_per_sequence": kl[0].sum().item() / len(eval_problems),
              "tokens_per_s": state["tokens"] / state["seconds"]}
    if ranks.rank() == 0:
        print(checks.write_report(run.folder, result, kl, tokenizer, c))
    return result | {"run_folder": run.folder}


# ----------------------------------------------------------------------------------------------------------------------
# 14. Quick tests: about a second; they run before main(). Each is named for the mistake that it stops.

def test_kl_value_has_the_wrong_sign_or_direction():
    policy, ref, ln2 = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log(), math.log(2)
    by_hand = {"k1": [ln2, -ln2], "k2": [ln2 * ln2 / 2] * 2, "k3": [0.5 - 1 + ln2, 2 - 1 - ln2]}
    for estimator, values in by_hand.items():
        torch.testing.assert_close(compute_kl_divergence(policy, ref, estimator), torch.tensor([values]))


def kl_gradient_by_enumeration(logits, ref_logits, old_logits, **settings):
    """Expected gradient of the KL term: all V tokens, weighted by their probability under the policy that sampled."""
    logits = logits.clone().requires_grad_()
    old, hidden, labels = old_logits.log_softmax(0), torch.ones_like(logits)[:, None], torch.arange(len(logits))
    found = ChunkedHead.apply(hidden.detach(), logits[:, None], labels, 1.0, hidden.detach(), ref_logits[:, None])
    log_probs, exact_kl, _, ref = (x[None] for x in found)
    loss, _ = compute_loss(torch.zeros(1, 1), log_probs, old[None], 0.2, ref, 1.0, exact_kl=exact_kl, **settings)
    return torch.autograd.grad((loss[0] * old.exp()).sum(), logits)[0]


def test_kl_gradient_is_not_that_of_reverse_kl():
    logits, ref, old = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaf = logits.clone().requires_grad_()
    by_hand, = torch.autograd.grad((leaf.softmax(0) * (leaf.log_softmax(0) - ref.log_softmax(0))).sum(), leaf)
    for estimator in ("k1", "k2", "k3", "exact"):
        for sampled_by in (logits, old):  # on-policy and off
            ours = kl_gradient_by_enumeration(logits, ref, sampled_by, kl_estimator=estimator, kl_ratio_cap=math.inf)
            torch.testing.assert_close(ours, by_hand, rtol=0, atol=1e-12)
    zero = kl_gradient_by_enumeration(logits, ref, logits, kl_estimator="k1", kl_gradient="as_written")
    torch.testing.assert_close(zero, torch.zeros_like(zero), rtol=0, atol=1e-12)  # why this combination is refused


def test_masked_mean_counts_masked_tokens():
    tensor, mask = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, 7.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_mean(tensor, mask).item() == 3 and masked_mean(tensor, mask, dim=1).tolist() == [1.5, 6.0]


def test_equal_rewards_give_an_advantage():
    advantages, metadata = compute_group_normalized_advantages(torch.tensor([0.11] * 3 + [0, 1.0, 0.5]), 3, 1e-6, True)
    torch.testing.assert_close(advantages, torch.tensor([0.0, 0, 0, -1, 1, 0]), rtol=0, atol=1e-5)
    assert advantages[:3].tolist() == [0, 0, 0] and metadata["frac_zero_std"] == 0.5


def test_clip_takes_the_larger_side():
    ratio, advantages = torch.tensor([[0.5, 1.5, 0.5, 1.5]]), torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    loss, metadata = compute_loss(advantages, ratio.log(), torch.zeros(1, 4), 0.2, clip_range_high=0.3)
    torch.testing.assert_close(loss, torch.tensor([[-0.5, -1.3, 0.8, 1.5]]))
    assert metadata["clip_frac_low"] == 0.25 and metadata["clip_frac_high"] == 0.25


def tiny_step(max_tokens, loss_average="dapo", **settings):
    """Gradient of one whole step on a 2-layer random model and ragged random responses, cut at max_tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    import shared_prompts  # noqa: F401  it registers the attention named below
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True)).eval()
        policy.set_attn_implementation("starter")
        ref_model = copy.deepcopy(policy).requires_grad_(False)
        ref_model.lm_head.weight.data += 0.05 * torch.randn(32, 32)  # tied: the reference differs everywhere
    responses = [Response(list(range(n % 5 + 1)), [(5 * n + i * i) % 32 for i in range(n)], [-3.4] * n, True)
                 for n in (1, 9, 4, 6, 7, 2, 8, 3)]
    batch = make_batch(responses, torch.linspace(-1, 1, 8), "cpu")
    batch["weights"] = token_weights(batch["response_mask"], loss_average, 9)
    for rows in cut_microbatches(batch, max_tokens):
        grpo_microbatch_step(policy, rows, 0.2, ref_model, 0.1, **settings)
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def test_gradient_depends_on_the_microbatch_size():
    for loss_average, settings in (("grpo", {}), ("dapo", {"kl_estimator": "exact", "kl_in": "loss_to_go"}),
                                   ("dr_grpo", {"kl_estimator": "k1", "kl_in": "reward"})):
        whole = tiny_step(10_000, loss_average, **settings)
        for max_tokens in (60, 20, 1):
            torch.testing.assert_close(tiny_step(max_tokens, loss_average, **settings), whole, rtol=0, atol=1e-6)


def test_chunked_head_differs_from_log_softmax():
    generator, rows = torch.Generator().manual_seed(0), range(70)
    hidden, weight, ref_hidden, ref_weight = (torch.randn(n, 3, generator=generator).double().requires_grad_()
                                              for n in (70, 150, 70, 150))
    labels, upstream = torch.randint(150, (70,), generator=generator), torch.randn(2, 70, generator=generator).double()
    ours = ChunkedHead.apply(hidden, weight, labels, 0.7, ref_hidden, ref_weight, 1)  # three slices
    p, q = ((x @ w.T / 0.7).log_softmax(1) for x, w in ((hidden, weight), (ref_hidden, ref_weight)))
    plain = p[rows, labels], (p.exp() * (p - q)).sum(1), -(p.exp() * p).sum(1), q[rows, labels]
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(*(torch.autograd.grad((x[0] * upstream[0] + x[1] * upstream[1]).sum(), (hidden, weight))
                                 for x in (ours, plain)))


def test_reward_is_fooled():
    problem = {"numbers": [3, 5, 7], "target": 22}
    solved = ["<answer>3*5+7</answer>", "<answer> 7 - -(5 * 3) </answer>.", "<answer>1</answer><answer>7+3*5</answer>"]
    wrong = [f"<answer>{x}</answer>" for x in ("22", "3*5+7+0", "5+5+5+7", "7**(5-3)", "7/(5-5)", "9**9**9", "(" * 300)]
    neither = ["", "3*5+7", "<answer>", "</answer><answer>3*5+7", "<answer></answer>"]
    for value, texts in ((1.0, solved), (0.1, wrong), (0.0, neither)):
        assert [reward_fn(text, problem) for text in texts] == [value] * len(texts), (value, texts)
    for text in ("$1,234.50", "1234.5 dollars", "it costs 1,234.5"):
        assert reward_fn(f"<answer>{text}</answer>", {"answer": "1,234.5"}) == 1.0, text


def test_functions():
    """Every test_ function above, a line each. After an AssertionError the run does not start."""
    print("=== Running Quick Tests ===")
    for name in [name for name in globals() if name.startswith("test_") and name != "test_functions"]:
        globals()[name]()
        print(f"\u2705 {name.removeprefix('test_').replace('_', ' ')}: no")
    print("=== All Tests Passed! ===\n")


if __name__ == "__main__":
    with ranks.joined():
        test_functions()
        main()
