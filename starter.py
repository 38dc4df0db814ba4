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
from machine import InputError, RunStopped

import ast
import contextlib
import copy
import math
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
from tqdm import tqdm

# ----------------------------------------------------------------------------------------------------------------------
# 1. Problems: a seed or a JSONL file -> list of {"prompt", what the reward needs}. A new task is added here.

COUNTDOWN_PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use each number exactly once, with + - * / "
    "and parentheses. Think in a few short lines, then give the expression alone in answer tags, for example "
    "<answer>(1 + 2) * 3</answer>.")
GSM8K_PROMPT = ("{question}\nThink step by step in a few short lines, then give the number alone in answer tags, for "
                "example <answer>42</answer>.")


def is_held_out(*key):
    """A fixed quarter of all keys: train and held-out problems are disjoint by construction, whatever the seeds."""
    return zlib.crc32(repr(key).encode()) % 4 == 0


def make_countdown(n, numbers_per_problem, max_number, max_target, held_out, seed, template=COUNTDOWN_PROMPT):
    """-> n problems, solvable by construction: the target is what random operations make of the numbers."""
    rng, problems, seen = random.Random(f"{seed} {held_out}"), [], set()
    for _ in range(20_000 + 200 * n):
        numbers = [rng.randint(1, max_number) for _ in range(rng.choice(numbers_per_problem))]
        pool = [(Fraction(number), str(number)) for number in numbers]
        while len(pool) > 1:
            (a, x), (b, y) = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
            values = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else Fraction(-1)}
            op = rng.choice([op for op, value in values.items() if value >= 0 and value.denominator == 1])
            pool.append((values[op], f"({x}{op}{y})"))
        (target, solution), = pool
        key = sorted(numbers), int(target)
        if not 1 <= target <= max_target or is_held_out(*key) != held_out or (held_out and str(key) in seen):
            continue  # held-out problems all differ, so that their count is the sample size of the interval
        seen.add(str(key))
        problems.append({"prompt": template.format(numbers=" ".join(map(str, numbers)), target=target),
                         "numbers": numbers, "target": int(target), "solution": solution[1:-1]})
        if len(problems) == n:
            return problems
    raise InputError(f"only {len(problems)} of {n} Countdown problems were found for max_number = {max_number} and "
                     f"max_target = {max_target}; use larger numbers or fewer problems")


def read_gsm8k(path):
    """-> problems of a JSONL file with "question" and "answer", where the answer ends in "#### 1,234"."""
    rows = machine.read_jsonl(path, ("question", "answer"))
    return [{"prompt": GSM8K_PROMPT.format(question=row["question"]),
             "answer": row["answer"].rpartition("####")[2].strip()} for row in rows]


def countdown_problems(c):
    """-> (train, held-out)."""
    make = partial(make_countdown, numbers_per_problem=c.numbers_per_problem, max_number=c.max_number,
                   max_target=c.max_target, seed=c.seed, template=c.countdown_prompt)
    return make(c.n_train_problems, held_out=False), make(c.n_eval_problems, held_out=True)


def gsm8k_problems(c):
    """-> (train, held-out). Without an eval_file a fixed quarter of the train file is held out."""
    if not c.train_file:
        raise InputError("task = 'gsm8k' needs a JSONL file; use for example train_file = 'gsm8k/train.jsonl'")
    problems = read_gsm8k(c.train_file)
    if c.eval_file:
        return problems, read_gsm8k(c.eval_file)[:c.n_eval_problems]
    parts = {part: [p for p in problems if is_held_out(p["prompt"]) == part] for part in (False, True)}
    return parts[False], parts[True][:c.n_eval_problems]


TASKS = {"countdown": countdown_problems, "gsm8k": gsm8k_problems}  # name: configuration -> (train, held-out)


def problems_of_step(problems, step, n, seed):
    """-> the n problems of this step: a walk through a fresh shuffle each epoch, found from the step alone."""
    chosen, orders = [], {}
    for position in range(step * n, (step + 1) * n):
        epoch, index = divmod(position, len(problems))
        if epoch not in orders:
            orders[epoch] = random.Random(f"{seed} {epoch}").sample(range(len(problems)), len(problems))
        chosen.append(problems[orders[epoch][index]])
    return chosen


# ----------------------------------------------------------------------------------------------------------------------
# 2. Models and engines: a checkpoint folder -> policy, tokenizer, vLLM with the same weights

def init_policy(model_id, device):
    """-> policy in float32, tokenizer. float32: in bf16, 84-98 % of the updates at lr 1e-5 to 1e-6 round away."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    policy = AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_id)
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer of {model_id} has no EOS token, so no response could end; set its eos_token")
    ids = torch.arange(5, device=device)[None]
    with torch.no_grad():  # the log-prob pass applies the LM head itself, and nothing after it
        ours = policy.base_model(ids).last_hidden_state @ policy.get_output_embeddings().weight.T
        if (ours - policy(ids).logits).abs().max() > 1e-2:
            raise InputError(f"{model_id} changes its logits after the LM head (bias, scale or cap), which the "
                             "log-prob pass does not do; use a Qwen, Llama or Mistral model")
    return policy, tokenizer


def init_vllm(model_id, seed, max_model_len, gpu_mem_util, bf16):
    """-> vLLM engine in this process. Its log-probs are log_softmax(logits / T), at the sampling temperature T."""
    from vllm import LLM
    memory = machine.vllm_memory(model_id, max_model_len, gpu_mem_util, bf16)
    with machine.random_states_kept():
        return LLM(str(model_id), seed=seed, dtype="bfloat16" if bf16 else "float32", max_model_len=max_model_len,
                   logprobs_mode="processed_logprobs", max_num_seqs=256, use_tqdm_on_load=False, **memory)


def load_policy_into_vllm_instance(policy, llm):
    """Hand the policy's weights to vLLM and drop what its prefix cache computed with the old ones."""
    llm.collective_rpc(machine.vllm_worker_load, args=([(n, p.detach()) for n, p in policy.named_parameters()],))
    if llm.reset_prefix_cache() is not True:
        raise RunStopped("vLLM kept its prefix cache after a weight sync: it would read prompts with old weights")


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
    with machine.random_states_kept():  # a CPU engine draws from torch's global generator too
        requests = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [Response(prompt, list(out.token_ids), [lp[t].logprob for t, lp in zip(out.token_ids, out.logprobs)],
                     out.finish_reason == "stop")
            for prompt, request in zip(prompts, requests) for out in request.outputs]


@torch.no_grad()
def rollout_with_transformers(policy, prompts, group_size, max_new_tokens, temperature, seed, eos_token_id):
    """P lists of prompt ids -> P * group_size Responses, group after group. A prompt is read once for its group."""
    responses, generator, mode = [], torch.Generator(policy.device).manual_seed(seed), policy.training
    policy.eval()  # in train mode gradient checkpointing drops the cache
    prompts_at_once = max(1, 512 // group_size)  # 512 rows: large enough to be quick, small enough for a laptop
    for start in range(0, len(prompts), prompts_at_once):
        chunk = prompts[start:start + prompts_at_once]
        longest = max(map(len, chunk))  # padded on the left: the last column holds each prompt's last token
        ids = torch.tensor([[eos_token_id] * (longest - len(p)) + p for p in chunk], device=policy.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in chunk], device=policy.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = policy(ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
        out.past_key_values.batch_repeat_interleave(group_size)
        logits, mask, positions = (x.repeat_interleave(group_size, 0) for x in (out.logits, mask, positions[:, -1:]))
        running, tokens, chosen = torch.ones(len(mask), dtype=torch.bool, device=policy.device), [], []
        while len(tokens) < max_new_tokens:
            log_probs = torch.log_softmax(logits[:, -1].float() / (temperature or 1), dim=-1)  # (B, V)
            draw = partial(torch.multinomial, num_samples=1, generator=generator)
            token = draw(log_probs.exp()) if temperature else log_probs.argmax(dim=1, keepdim=True)
            tokens.append(token), chosen.append(log_probs.gather(1, token))
            running &= token[:, 0] != eos_token_id
            if not running.any():
                break
            mask, positions = torch.cat([mask, torch.ones_like(token)], dim=1), positions + 1
            out = policy(token, attention_mask=mask, position_ids=positions, past_key_values=out.past_key_values)
            logits = out.logits
        for i, (row, log_prob_row) in enumerate(zip(torch.cat(tokens, 1).tolist(), torch.cat(chosen, 1).tolist())):
            end = row.index(eos_token_id) + 1 if eos_token_id in row else len(row)
            responses.append(Response(chunk[i // group_size], row[:end], log_prob_row[:end], eos_token_id in row))
    policy.train(mode)
    return responses


def rollout(policy, llm, prompts, **settings):
    """One call, two engines: vLLM where there is one, else the policy itself. -> Responses, group after group."""
    if llm is not None:
        return rollout_with_vllm(llm, prompts, **settings)
    return rollout_with_transformers(policy, prompts, **settings)


# ----------------------------------------------------------------------------------------------------------------------
# 4. Reward: response text, problem -> 1.0 solved, 0.1 well-formed <answer> but wrong, 0.0 otherwise

OPERATIONS = {ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
              ast.Div: lambda a, b: a / b if b else None}


def arithmetic(text):
    """-> (value as an exact Fraction, whole numbers used) or None. Digits and + - * / ( ) only; nothing is executed."""
    if len(text) > 200 or not re.fullmatch(r"[0-9+\-*/() ]+", text) or re.search(r"\d{10}", text):
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError):  # what CPython's parser says of a model's text
        return None
    used = []

    def value(node, depth=0):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if depth < 50 and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = value(node.operand, depth + 1)
            return None if inner is None else -inner
        if depth < 50 and isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:  # ** and // are not among them
            left, right = value(node.left, depth + 1), value(node.right, depth + 1)
            return None if left is None or right is None else OPERATIONS[type(node.op)](left, right)

    result = value(tree)
    return None if result is None else (result, used)


def last_number(text):
    """-> last number in a short text as a Fraction, or None. Reads "$1,234.50", "-12 C", "18 %", "72 clips"."""
    if len(text) > 200:
        return None
    found = re.findall(r"((?<![\w)])-)?\$?(\d[\d,]*(?:\.\d+)?|\.\d+)", text.replace("\u2212", "-"), re.ASCII)
    return Fraction("".join(found[-1]).replace(",", "")) if found else None


def reward_fn(response_text, problem):
    """The last <answer>...</answer> of the text against the problem -> 1.0, 0.1 or 0.0. Never raises on any text."""
    head, closed, _ = response_text.rpartition("</answer>")
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


def checked_reward(reward, text, problem):
    """-> float. Names the text on which a reward raises or returns something else than one finite number."""
    try:
        value = reward(text, problem)
    except Exception as error:  # the user's own function on a model's text
        raise InputError(f"reward raised {type(error).__name__}: {error} on the text {text[:200]!r}; it must return "
                         "one finite number for every text") from error
    if not (isinstance(value, (int, float)) and math.isfinite(value)):
        raise InputError(f"reward returned {str(value)[:80]} on the text {text[:200]!r}; it must return one finite "
                         "number for every text")
    return float(value)


def score(responses, problems, tokenizer, reward):
    """P * G Responses, P problems -> P * G texts, (P * G,) float32 rewards."""
    group_size = len(responses) // len(problems)
    texts = tokenizer.batch_decode([r.response_ids for r in responses], skip_special_tokens=True)
    rewards = [checked_reward(reward, text, problems[i // group_size]) for i, text in enumerate(texts)]
    return texts, torch.tensor(rewards)


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
    """-> dict of (B, T) tensors, padded on the right. The mask comes from lengths: EOS may well be the pad id."""
    rows = [r.prompt_ids + r.response_ids for r in responses]
    shape = len(rows), max(map(len, rows)) - 1
    batch = {"input_ids": torch.zeros(shape, dtype=torch.long), "labels": torch.zeros(shape, dtype=torch.long),
             "response_mask": torch.zeros(shape, dtype=torch.bool), "rollout_log_probs": torch.zeros(shape)}
    for i, (response, row) in enumerate(zip(responses, rows)):
        first, end = len(response.prompt_ids) - 1, len(row) - 1
        batch["input_ids"][i, :end] = torch.tensor(row[:-1])
        batch["labels"][i, :end] = torch.tensor(row[1:])
        batch["response_mask"][i, first:end] = True
        batch["rollout_log_probs"][i, first:end] = torch.tensor(response.log_probs)
    batch["advantages"] = advantages[:, None]  # (B, 1)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def token_weights(response_mask, loss_average, max_new_tokens):
    """(B, T) mask of the whole step -> (B, T) share of each token in the step's loss, fixed before it is cut up.

    "grpo": mean over each response, then over responses. "dapo": mean over all tokens. "dr_grpo": sum / (B * max).
    """
    mask = response_mask.float()
    if loss_average == "grpo":
        return mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / len(mask)
    return mask / (mask.sum().clamp(min=1) if loss_average == "dapo" else len(mask) * max_new_tokens)


def cut_microbatches(response_mask, max_tokens):
    """(B, T) mask -> [(row indices, width)], longest rows first, at most max_tokens padded tokens (or one row) each."""
    columns = torch.arange(1, response_mask.shape[1] + 1, device=response_mask.device)
    ends = (response_mask * columns).amax(dim=1).clamp(min=1)  # (B,) column after the last response token
    order, cuts = ends.argsort(descending=True, stable=True), []
    while len(order):
        width = int(ends[order[0]])
        n = max(1, max_tokens // width)
        cuts.append((order[:n], width))
        order = order[n:]
    return cuts


def rows_of(batch, cut):
    """-> one microbatch: these rows, no wider than their longest."""
    index, width = cut
    return {name: tensor[index, :width] for name, tensor in batch.items()}


# ----------------------------------------------------------------------------------------------------------------------
# 7. Log-probs: (B, T) ids -> (B, T) float32 log-probs and entropy of the response tokens; no (B, T, V) in any dtype

class ChunkedHead(torch.autograd.Function):
    """(N, H) hidden, (V, H) weight, (N,) labels -> (N,) log-prob of each label, (N,) entropy in nats, for show only.

    The LM head and its softmax, a few rows at a time, forward and backward: memory is that of one chunk of logits.
    """
    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature):
        ctx.save_for_backward(hidden, weight, labels)
        ctx.temperature, ctx.rows = temperature, max(1, (1 << 24) // len(weight))  # 64 MB of float32 logits
        log_probs, entropy = hidden.new_empty(len(hidden)), hidden.new_empty(len(hidden))
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = (hidden[part] @ weight.T).div_(temperature)
            log_z = logits.logsumexp(dim=1)
            log_probs[part] = logits.gather(1, labels[part, None])[:, 0] - log_z
            entropy[part] = log_z - (logits.sub(log_z[:, None]).exp_() * logits).sum(dim=1)
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, _):
        hidden, weight, labels = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            grad = grad_log_probs[part, None] / ctx.temperature
            probs = (hidden[part] @ weight.T).div_(ctx.temperature).softmax(dim=1)
            grad_logits = probs.mul_(-grad).scatter_add_(1, labels[part, None], grad)  # (onehot - p) * grad
            grad_hidden[part] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, hidden[part])
        return grad_hidden, grad_weight, None, None


def get_response_log_probs(model, input_ids, labels, response_mask=None, temperature=1.0, bf16=False,
                           with_entropy=False):
    """(B, T) input_ids, labels -> (B, T) float32 log p(label | prefix) at this temperature; 0 outside the mask.

    with_entropy=True gives (log_probs, entropy), both (B, T). No attention mask is needed: padding is on the right.
    """
    mask = torch.ones_like(labels, dtype=torch.bool) if response_mask is None else response_mask
    with torch.autocast(labels.device.type, torch.bfloat16, enabled=bf16):
        hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[mask]  # (N, H)
    weight = model.get_output_embeddings().weight
    both = ChunkedHead.apply(hidden.to(weight.dtype), weight, labels[mask], temperature)  # outside autocast: float32
    log_probs, entropy = (torch.zeros_like(mask, dtype=x.dtype).masked_scatter(mask, x) for x in both)
    return (log_probs, entropy) if with_entropy else log_probs


# ----------------------------------------------------------------------------------------------------------------------
# 8. KL and loss: log-probs, advantages -> per-token loss

def masked_mean(tensor, mask, dim=None):
    """Mean where the mask is 1, over dim or over all; 0 where nothing is. Masked entries may be nan or inf."""
    mask = mask.bool().expand_as(tensor)
    kept, n = torch.where(mask, tensor, torch.zeros_like(tensor)), mask.to(tensor.dtype)
    return kept.sum() / n.sum().clamp(min=1) if dim is None else kept.sum(dim) / n.sum(dim).clamp(min=1)


def compute_kl_divergence(policy_log_probs, ref_log_probs, estimator="k1"):
    """(B, T), (B, T) -> (B, T) float32, nats: KL(policy || reference) estimated at each token that the policy sampled.

    With d = log pi - log ref: k1 = d (unbiased, signed), k2 = d^2 / 2 (biased), k3 = exp(-d) - 1 + d (unbiased, >= 0);
    J. Schulman, "Approximating KL divergence" (2020). These are values; for gradients see compute_loss.
    """
    dtype = torch.promote_types(policy_log_probs.dtype, torch.float32)
    d = policy_log_probs.to(dtype) - ref_log_probs.to(dtype)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return torch.expm1(-d) + d  # exp(-d) - 1 + d in float32 is negative on 2 % of the tokens near d = 0
    raise InputError(f"kl_estimator = {estimator!r} must be 'k1', 'k2' or 'k3'; use 'k3'")


def check_kl(c):
    """-> a line to print, or None. Refuses a KL term whose gradient is zero, unless a paper is being reproduced."""
    if not c.use_kl_penalty or c.kl_gradient == "reverse":
        return None
    if c.kl_estimator == "k1" and not c.reproduce_paper:
        raise InputError("kl_estimator = 'k1' with kl_gradient = 'as_written' has an expected gradient of zero on the "
                         "policy's own samples, so it holds nothing; use kl_gradient = 'reverse', or "
                         "reproduce_paper = True to run it all the same")
    pull = {"k1": "its expected gradient is zero", "k2": "reverse KL in a rollout's first epoch, biased in later ones",
            "k3": "it pulls with the gradient of forward KL(reference || policy)"}[c.kl_estimator]
    return f"KL term: {c.kl_estimator} as written; {pull}"


def compute_loss(advantages, policy_log_probs, old_log_probs, clip_range, ref_log_probs=None, kl_coef=0.0, *, mask=None,
                 clip_range_high=None, importance_weights=None, kl_estimator="k3", kl_gradient="reverse",
                 kl_ratio_cap=2.0):
    """(B, 1) or (B, T) advantages, (B, T) log-probs -> (B, T) loss = PPO-clipped term + kl_coef * KL, metadata.

    kl_gradient "reverse": the value is the estimator's, the gradient is r * d * grad log pi, that of KL(policy ||
    reference) for every estimator, on the policy's own samples and on older ones (r = pi / old, cut at kl_ratio_cap).
    "as_written" differentiates the estimator itself. importance_weights: (B, T) truncated old / sampler probability,
    on the policy term alone (arXiv:2508.04700). Metadata are means over the mask, log-ratios beyond +-20 shown as 20.
    """
    mask = torch.ones_like(policy_log_probs, dtype=torch.bool) if mask is None else mask.bool()
    policy, old = (torch.where(mask, x, 0.0) for x in (policy_log_probs, old_log_probs))
    ratio = torch.exp(policy - old)
    low, high = 1 - clip_range, 1 + (clip_range if clip_range_high is None else clip_range_high)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if importance_weights is not None:
        loss = loss * importance_weights
    too_low, too_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)  # where the gradient is cut
    metadata = {"ratio_mean": ratio, "clip_frac": too_low | too_high, "clip_frac_low": too_low,
                "clip_frac_high": too_high}
    if ref_log_probs is not None:
        ref = torch.where(mask, ref_log_probs, 0.0)
        d = (policy - ref).detach()
        shown = d.clamp(-20, 20), torch.zeros_like(d)
        value = compute_kl_divergence(*shown, kl_estimator)
        metadata |= {"kl_penalty_mean": value, "kl_per_token": compute_kl_divergence(*shown, "k3"),
                     "kl_capped_frac": ratio > kl_ratio_cap}
        if kl_coef and kl_gradient == "as_written":
            loss = loss + kl_coef * compute_kl_divergence(policy, ref, kl_estimator)
        elif kl_coef:
            pull = ratio.detach().clamp(max=kl_ratio_cap) * d * policy
            loss = loss + kl_coef * (value + pull - pull.detach())
    return loss, {name: masked_mean(x.detach().to(loss.dtype), mask) for name, x in metadata.items()}


# ----------------------------------------------------------------------------------------------------------------------
# 9. Update: one microbatch -> gradients and means; the optimiser steps in the loop

def grpo_microbatch_step(policy, rows, clip_range, ref_model=None, kl_coef=0.0, temperature=1.0, importance_cap=2.0,
                         bf16=False, **loss_settings):
    """Forward, loss, backward of one microbatch -> its share of the step's loss, token means, log-probs (B, T).

    rows: (B, T) input_ids, labels, response_mask, weights, rollout_log_probs; (B, 1) advantages; old_log_probs and
    ref_log_probs where they are known. Without old_log_probs the policy has not moved since the rollout: it is its own.
    """
    mask = rows["response_mask"]
    log_probs_of = partial(get_response_log_probs, input_ids=rows["input_ids"], labels=rows["labels"],
                           response_mask=mask, temperature=temperature, bf16=bf16)
    policy_log_probs, entropy = log_probs_of(policy, with_entropy=True)
    old_log_probs, ref_log_probs = rows.get("old_log_probs", policy_log_probs.detach()), rows.get("ref_log_probs")
    if ref_log_probs is None and ref_model is not None and kl_coef:
        with torch.no_grad():
            ref_log_probs = log_probs_of(ref_model)
    if importance_cap is not None:  # what the sampler's engine computes differently
        importance = torch.exp(old_log_probs - rows["rollout_log_probs"]).clamp(max=importance_cap)
        loss_settings["importance_weights"] = importance
    loss, metadata = compute_loss(rows["advantages"], policy_log_probs, old_log_probs, clip_range, ref_log_probs,
                                  kl_coef, mask=mask, **loss_settings)
    loss = torch.where(mask, loss * rows["weights"], 0.0).sum()
    loss.backward()
    return loss.detach(), metadata | {"entropy": masked_mean(entropy, mask)}, policy_log_probs.detach()


@torch.no_grad()
def score_batch(model, batch, cuts, temperature, bf16):
    """-> (B, T) log-probs of a whole rollout batch under one model, cut as the update cuts it."""
    log_probs = torch.zeros_like(batch["rollout_log_probs"])
    for index, width in cuts:
        rows = rows_of({name: batch[name] for name in ("input_ids", "labels", "response_mask")}, (index, width))
        log_probs[index, :width] = get_response_log_probs(model, **rows, temperature=temperature, bf16=bf16)
    return log_probs


def check_log_probs(batch, step, first_diff, bf16):
    """The canary, on the whole step before its first update -> mean and max |sampler - trainer| log-prob.

    float32: at most 1e-3 (healthy: below 1e-4). bf16 engines differ by rounding, 0.01 to 0.1, so there the test is
    growth: at step 1 the sampler holds the checkpoint itself, and that step's difference, first_diff, is the measure.
    """
    mask, trainer = batch["response_mask"], batch["old_log_probs"]
    diff = torch.where(mask, (trainer - batch["rollout_log_probs"]).abs(), 0.0)
    mean, limit = masked_mean(diff, mask).item(), 1e-3
    if bf16:
        limit = 0.2 if first_diff is None else 0.02 + 4 * first_diff
    if not mean <= limit:
        raise RunStopped(f"step {step}: sampler and trainer disagree by {mean:.2g} nats a token (limit {limit:.2g}): "
                           "the sampler has stale or other weights; check load_policy_into_vllm_instance")
    if first_diff is None and "ref_log_probs" in batch:
        drift = torch.where(mask, (trainer - batch["ref_log_probs"]).abs(), 0.0).max().item()
        if not drift < (0.5 if bf16 else 1e-4):
            raise RunStopped(f"step {step}: the policy differs from its own copy by {drift:.2g} nats before any "
                               "update: the reference is not the start, or is scored otherwise (temperature, dropout)")
    return {"sampler_logprob_diff": mean, "sampler_logprob_diff_max": diff.max().item()}


# ----------------------------------------------------------------------------------------------------------------------
# 10. Evaluate: held-out problems -> solved; held-out problems of other skills -> what was forgotten; drift in nats

def evaluate(policy, llm, tokenizer, problems, skills, c):
    """-> {"solved", "reward_mean", "response_length", "retention_<skill>" ...} of one response each; three samples."""
    responses = rollout(policy, llm, prompt_ids_of(problems + skills, tokenizer), group_size=1, seed=c.seed << 32,
                        max_new_tokens=c.max_new_tokens, temperature=c.eval_temperature,
                        eos_token_id=tokenizer.eos_token_id)
    n = len(problems)
    texts, rewards = score(responses[:n], problems, tokenizer, c.reward)
    metrics = {"solved": (rewards == 1).float().mean().item(), "reward_mean": rewards.mean().item(),
               "response_length": sum(len(r.response_ids) for r in responses[:n]) / n}
    if skills:
        _, right = score(responses[n:], skills, tokenizer, reward_fn)
        for skill in sorted({problem["skill"] for problem in skills}):
            mine = torch.tensor([problem["skill"] == skill for problem in skills])
            metrics[f"retention_{skill}"] = masked_mean((right == 1).float(), mine).item()
    return metrics, list(zip([problem["prompt"] for problem in problems], texts, rewards[:3].tolist()))


def measure_kl(policy, llm, tokenizer, problems, ref_model, c):
    """-> KL(policy || reference) in nats per token and per response: means of k3 on fresh samples."""
    responses = rollout(policy, llm, prompt_ids_of(problems, tokenizer), group_size=1, seed=c.seed << 32,
                        max_new_tokens=c.max_new_tokens, temperature=c.temperature, eos_token_id=tokenizer.eos_token_id)
    batch = make_batch(responses, torch.zeros(len(responses)), policy.device)
    cuts, mask = cut_microbatches(batch["response_mask"], c.max_tokens_per_microbatch), batch["response_mask"]
    kl = compute_kl_divergence(*(score_batch(m, batch, cuts, c.temperature, c.bf16) for m in (policy, ref_model)), "k3")
    return masked_mean(kl, mask).item(), torch.where(mask, kl, 0.0).sum(dim=1).mean().item()


# ----------------------------------------------------------------------------------------------------------------------
# 11. Log: numbers -> TensorBoard, one console line a step, a report

@contextlib.contextmanager
def timed(seconds, phase):
    """Adds the seconds spent inside to seconds[phase]."""
    start = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - start


def log_train(writer, step, metrics, seconds, left):
    """Writes train/*, time/* and mem/*; -> the console line of this step. left: seconds until the last one."""
    scalars = {f"train/{name}": value for name, value in metrics.items()}
    scalars |= {f"time/{phase}": value for phase, value in seconds.items()} | {"mem/peak_gb": machine.peak_memory_gb()}
    for tag, value in scalars.items():
        writer.add_scalar(tag, value, step)
    m = metrics
    line = (f"Step {step} | Loss: {m['loss']:7.4f} | Grad norm: {m['grad_norm']:.4f} | Reward: {m['reward_mean']:.3f} "
            f"| Equal groups: {m['frac_zero_std']:4.0%} | Length: {m['response_length']:.1f} "
            f"| Entropy: {m['entropy']:.3f} | Sampler diff: {m['sampler_logprob_diff']:.0e} "
            f"| {seconds['total']:.2f} s, {left / 60:.1f} min left")
    return line + (f" | KL penalty: {m['kl_penalty']:.4f}" if "kl_penalty" in m else "")


def log_eval(writer, step, metrics, samples):
    """Writes eval/* and a few samples as text; -> the console line of this evaluation."""
    for name, value in metrics.items():
        writer.add_scalar(f"eval/{name}", value, step)
    for i, (prompt, text, reward) in enumerate(samples):
        lines = f"reward {reward:g}\n{prompt}\n{text}".splitlines()
        writer.add_text(f"samples/{i}", "\n".join(f"    {line}" for line in lines), step)
    skills = [f" | {name[10:]}: {value:.1%}" for name, value in metrics.items() if name.startswith("retention_")]
    return (f"Eval at step {step} | Solved: {metrics['solved']:.1%} | Reward: {metrics['reward_mean']:.3f} | "
            f"Length: {metrics['response_length']:.1f}" + "".join(skills))


def log_report(before, after, kl, run_folder, seconds, tokens, c):
    """-> the final report as text."""
    def change(name, key):
        return f"  {name:<10} {before[key]:6.1%} -> {after[key]:6.1%}  ({100 * (after[key] - before[key]):+.1f} points"
    interval = 196 * math.sqrt(max(after["solved"] * (1 - after["solved"]), 1e-9) / c.n_eval_problems)
    skills = [name for name in after if name.startswith("retention_")]
    how = "greedy" if c.eval_temperature == 0 else f"sampled at temperature {c.eval_temperature:g}"
    return "\n".join([
        "", "=== Report ===", f"{c.task}, {c.n_eval_problems} held-out problems, {how}",
        change("solved", "solved") + f"; 95 % interval of the second: +-{interval:.1f})",
        *(["skills that were not trained"] if skills else []), *(change(name[10:], name) + ")" for name in skills),
        f"KL(policy || start): {kl[0]:.3f} nats per token, {kl[1]:.2f} nats per response",
        f"KL leash: on, kl_coef = {c.kl_coef:g}, {c.kl_estimator}, {c.kl_gradient}" if c.use_kl_penalty else
        "KL leash: off; to keep the other skills set use_kl_penalty = True in main() (README_KL.md says which kl_coef)",
        f"training took {seconds / 60:.1f} min, {tokens / seconds:.0f} response tokens/s",
        f"run folder: {run_folder}", f"look at it: tensorboard --logdir {run_folder.parent}"])


# ----------------------------------------------------------------------------------------------------------------------
# 12. The loop

def train(policy, tokenizer, llm, optimizer, problems, c, writer, evaluate_now, ref_model=None, kl_coef=0.0):
    """n_train_steps times: rollout, rewards, advantages, log-probs, loss, update, sync, log. -> tokens sampled."""
    log_prob_settings = dict(temperature=c.temperature, bf16=c.bf16)
    loss_settings = dict(clip_range=c.clip_range, clip_range_high=c.clip_range_high, importance_cap=c.importance_cap,
                         kl_estimator=c.kl_estimator, kl_gradient=c.kl_gradient, kl_ratio_cap=c.kl_ratio_cap)
    n_prompts, first_diff, all_tokens, start = c.rollout_batch_size // c.group_size, None, 0, time.perf_counter()
    bar = tqdm(total=c.n_train_steps, unit="step", disable=not sys.stdout.isatty(), file=sys.stdout, leave=False)
    for step in range(1, c.n_train_steps + 1):
        seconds, totals = defaultdict(float), Counter()
        with timed(seconds, "total"):
            asked = problems_of_step(problems, step - 1, n_prompts, c.seed)
            with timed(seconds, "rollout"):
                responses = rollout(policy, llm, prompt_ids_of(asked, tokenizer), group_size=c.group_size,
                                    max_new_tokens=c.max_new_tokens, temperature=c.temperature,
                                    seed=(c.seed << 32) + (step << 20), eos_token_id=tokenizer.eos_token_id)
            texts, rewards = score(responses, asked, tokenizer, c.reward)
            advantages, metrics = compute_group_normalized_advantages(rewards, c.group_size, c.advantage_eps,
                                                                      c.normalize_by_std)
            batch = make_batch(responses, advantages, policy.device)
            batch["weights"] = token_weights(batch["response_mask"], c.loss_average, c.max_new_tokens)
            cuts = cut_microbatches(batch["response_mask"], c.max_tokens_per_microbatch)
            n_tokens = int(batch["response_mask"].sum())
            if ref_model is not None:
                with timed(seconds, "log_probs"):  # the reference reads a rollout once, whatever the number of epochs
                    batch["ref_log_probs"] = score_batch(ref_model, batch, cuts, **log_prob_settings)
            for epoch in range(c.epochs_per_rollout):
                with timed(seconds, "update"):
                    log_probs = torch.zeros_like(batch["rollout_log_probs"])
                    for index, width in cuts:
                        rows = rows_of(batch, (index, width))
                        loss, metadata, log_probs[index, :width] = grpo_microbatch_step(
                            policy, rows, ref_model=ref_model, kl_coef=kl_coef, **log_prob_settings, **loss_settings)
                        share = rows["response_mask"].sum() / n_tokens  # token means -> the step's mean
                        totals.update({"loss": loss} | {name: value * share for name, value in metadata.items()})
                    if epoch == 0:  # the policy has not moved yet: this pass gives the old log-probs of later epochs
                        batch["old_log_probs"] = log_probs
                        metrics |= check_log_probs(batch, step, first_diff, c.bf16)
                        first_diff = first_diff or metrics["sampler_logprob_diff"]
                    totals["grad_norm"] += torch.nn.utils.clip_grad_norm_(policy.parameters(), c.max_grad_norm)
                    for group in optimizer.param_groups:
                        group["lr"] = c.learning_rate * min(1.0, step / max(c.warmup_steps, 1))
                    optimizer.step()
                    optimizer.zero_grad()
            if llm is not None:
                with timed(seconds, "sync"):
                    load_policy_into_vllm_instance(policy, llm)
        all_tokens += n_tokens
        metrics |= {name: float(value) / c.epochs_per_rollout for name, value in totals.items()}
        if ref_model is not None:
            metrics["kl_penalty"] = metrics.pop("kl_penalty_mean")
            metrics["kl_per_sequence"] = metrics["kl_per_token"] * n_tokens / len(responses)
        metrics |= {"lr": optimizer.param_groups[0]["lr"], "response_length": n_tokens / len(responses),
                    "truncated_frac": sum(not r.finished for r in responses) / len(responses),
                    "tokens_per_s": n_tokens / seconds["total"]}
        left = (time.perf_counter() - start) / step * (c.n_train_steps - step)
        tqdm.write(log_train(writer, step, metrics, seconds, left))
        bar.update()
        if c.eval_every and step % c.eval_every == 0 and step < c.n_train_steps:
            evaluate_now(step)
    bar.close()
    return all_tokens


# ----------------------------------------------------------------------------------------------------------------------
# 13. The numbers

DEFAULTS = {  # what differs:   the built-in model on a CPU,   a downloaded model on a GPU
    "model_id":                  ("tiny",                        "Qwen/Qwen3-1.7B"),
    "n_train_steps":             (200,                           80),
    "rollout_batch_size":        (256,                           128),
    "max_new_tokens":            (16,                            256),
    "learning_rate":             (3e-4,                          7e-6),
    "numbers_per_problem":       ((2,),                          (3, 4)),
    "max_number":                (50,                            99),
    "countdown_prompt":          ("make {target}: {numbers}",    COUNTDOWN_PROMPT),
}


def main(
    # the model and what it is asked
    model_id=None,  # "tiny" (make_tiny.py builds it), a checkpoint folder or a Hugging Face name
    task="countdown",  # or "gsm8k"
    train_file=None, eval_file=None,  # JSONL with "question" and "answer", for gsm8k
    reward=reward_fn,  # (response_text, problem) -> number
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
    gpu_mem_util=0.4,  # share of the GPU's memory that vLLM takes; the trainer needs the rest
    # advantages and loss
    normalize_by_std=True, advantage_eps=1e-6,  # False: Dr. GRPO, groups with a small spread weigh less
    loss_average="dapo",  # mean over the step's tokens; "grpo": over each response first; "dr_grpo": constant divisor
    clip_range=0.2, clip_range_high=None,  # ratio kept in [1 - clip_range, 1 + clip_range_high]; None: symmetric
    importance_cap=2.0,  # sampler-trainer correction exp(old - sampler) is cut here; None: no correction
    epochs_per_rollout=1,  # more: fewer rollouts, staler samples
    # the KL leash
    use_kl_penalty=False,  # True: hold the policy near its start, for a second copy of the weights and one forward pass
    kl_coef=0.01,  # nats to reward; README_KL.md has the measured table
    kl_estimator="k3",  # the value that is shown: "k1", "k2", "k3"
    kl_gradient="reverse",  # the pull: that of KL(policy || start), or "as_written": autograd through the estimator
    kl_ratio_cap=2.0,  # cut of pi / old in that pull; math.inf: exact, and unbounded off-policy
    reproduce_paper=False,  # True: allow a KL term that is known not to work
    # update
    learning_rate=None, warmup_steps=10, weight_decay=0.0,  # AdamW on float32 weights
    max_grad_norm=1.0,  # the gradient is scaled down to this norm
    max_tokens_per_microbatch=16_384,  # changes memory and speed, never the gradient
    gradient_checkpointing=False,  # True: less memory, more time
    bf16=None,  # autocast; None: where the hardware gains from it
    # evaluate, log, save
    eval_every=50,  # steps; 0: only before and after
    n_eval_problems=500,  # at 500 the 95 % interval is at most +-4.4 points
    eval_temperature=0.0,  # 0: greedy
    out_dir="runs",  # each run gets a new folder here
    save_model=True,  # at the end, with save_pretrained, in the run folder
):
    config = dict(locals())
    column = 0 if model_id == "tiny" or (model_id is None and not torch.cuda.is_available()) else 1
    config |= {name: values[column] for name, values in DEFAULTS.items() if config[name] is None}
    machine.check_config(config, TASKS)
    c = SimpleNamespace(**config)
    c.device, c.bf16, use_vllm, hardware_line = machine.choose_hardware(c)
    kl_line = check_kl(c)
    problems, eval_problems = TASKS[c.task](c)
    c.n_eval_problems = len(eval_problems)
    checked_reward(c.reward, "<answer>1</answer>", problems[0])
    model_folder = machine.find_model(c.model_id)
    skills = machine.read_skills(model_folder)
    print(hardware_line, *([kl_line] if kl_line else []), sep="\n")

    policy, tokenizer = init_policy(model_folder, c.device)
    policy.train(c.gradient_checkpointing)  # which needs train mode; without it eval mode keeps dropout out
    if c.gradient_checkpointing:
        policy.gradient_checkpointing_enable()
    longest = max(map(len, prompt_ids_of(problems + eval_problems + skills, tokenizer)))
    context = policy.config.max_position_embeddings
    if longest + c.max_new_tokens > context:
        raise InputError(f"max_new_tokens = {c.max_new_tokens} after a prompt of {longest} tokens does not fit into "
                         f"the {context} tokens that {c.model_id} reads; use {context - longest} or fewer")
    leash = c.use_kl_penalty and c.kl_coef > 0
    ref_model = copy.deepcopy(policy).eval().requires_grad_(False) if leash else None
    llm = init_vllm(model_folder, c.seed, longest + c.max_new_tokens, c.gpu_mem_util, c.bf16) if use_vllm else None
    optimizer = torch.optim.AdamW(policy.parameters(), c.learning_rate, betas=(0.9, 0.95), weight_decay=c.weight_decay)

    run_folder = machine.make_run_folder(c.out_dir, vars(c), __file__)
    writer = machine.open_writer(run_folder, vars(c))

    def evaluate_now(step):
        metrics, samples = evaluate(policy, llm, tokenizer, eval_problems, skills, c)
        tqdm.write(log_eval(writer, step, metrics, samples))
        return metrics

    before = evaluate_now(0)
    start = time.perf_counter()
    tokens = train(policy, tokenizer, llm, optimizer, problems, c, writer, evaluate_now, ref_model, leash and c.kl_coef)
    seconds = time.perf_counter() - start
    after = evaluate_now(c.n_train_steps)
    start_model = ref_model or init_policy(model_folder, c.device)[0]  # leash off: read again, for this measurement
    kl = measure_kl(policy, llm, tokenizer, eval_problems, start_model, c)
    if c.save_model:
        policy.save_pretrained(run_folder / "model"), tokenizer.save_pretrained(run_folder / "model")
    report = log_report(before, after, kl, run_folder, seconds, tokens, c)
    (run_folder / "report.txt").write_text(report + "\n")
    writer.close()
    print(report)
    return {"before": before, "after": after, "kl_per_token": kl[0], "kl_per_sequence": kl[1], "seconds": seconds,
            "tokens_per_s": tokens / seconds, "run_folder": run_folder}


# ----------------------------------------------------------------------------------------------------------------------
# 14. Quick tests: about a second; they run before main(). Each is named for the mistake that it stops.

def test_kl_value_has_the_wrong_sign_or_direction():
    policy, ref = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log()
    ln2 = math.log(2)
    by_hand = {"k1": [ln2, -ln2], "k2": [ln2 * ln2 / 2] * 2, "k3": [0.5 - 1 + ln2, 2 - 1 - ln2]}
    for estimator, values in by_hand.items():
        torch.testing.assert_close(compute_kl_divergence(policy, ref, estimator), torch.tensor([values]))


def kl_gradient_by_enumeration(logits, ref_logits, old_logits, **settings):
    """Expected gradient of the KL term: all V tokens, weighted by their probability under the policy that sampled."""
    logits = logits.clone().requires_grad_()
    log_probs, ref, old = logits.log_softmax(0), ref_logits.log_softmax(0), old_logits.log_softmax(0)
    loss, _ = compute_loss(torch.zeros(1, 1), log_probs[None], old[None], 0.2, ref[None], 1.0, **settings)
    return torch.autograd.grad((loss[0] * old.exp()).sum(), logits)[0]


def test_kl_gradient_is_not_that_of_reverse_kl():
    logits, ref, old = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaf = logits.clone().requires_grad_()
    exact, = torch.autograd.grad((leaf.softmax(0) * (leaf.log_softmax(0) - ref.log_softmax(0))).sum(), leaf)
    for estimator in ("k1", "k2", "k3"):
        for sampled_by in (logits, old):  # on-policy and off
            ours = kl_gradient_by_enumeration(logits, ref, sampled_by, kl_estimator=estimator, kl_ratio_cap=math.inf)
            torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)
    zero = kl_gradient_by_enumeration(logits, ref, logits, kl_estimator="k1", kl_gradient="as_written")
    torch.testing.assert_close(zero, torch.zeros_like(zero), rtol=0, atol=1e-12)  # why this combination is refused


def test_masked_mean_counts_masked_tokens():
    tensor, mask = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, 7.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_mean(tensor, mask).item() == 3 and masked_mean(tensor, mask, dim=1).tolist() == [1.5, 6.0]


def test_equal_rewards_give_an_advantage():
    advantages, metadata = compute_group_normalized_advantages(torch.tensor([0.1] * 3 + [0.0, 1.0, 0.5]), 3, 1e-6, True)
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True)).eval()
        ref_model = copy.deepcopy(policy).requires_grad_(False)
        ref_model.lm_head.weight.data += 0.05 * torch.randn(32, 32)  # tied: the reference differs everywhere
    rng = random.Random(0)
    responses = [Response(rng.choices(range(32), k=rng.randint(1, 5)), rng.choices(range(32), k=n), [-3.4] * n, True)
                 for n in (1, 9, 4, 4, 7, 2, 8, 3)]
    batch = make_batch(responses, torch.linspace(-1, 1, 8), "cpu")
    batch["weights"] = token_weights(batch["response_mask"], loss_average, 9)
    for cut in cut_microbatches(batch["response_mask"], max_tokens):
        grpo_microbatch_step(policy, rows_of(batch, cut), 0.2, ref_model, 0.1, **settings)
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def test_gradient_depends_on_the_microbatch_size():
    for loss_average in ("grpo", "dapo", "dr_grpo"):
        whole = tiny_step(10_000, loss_average)
        for max_tokens in (60, 20, 1):
            torch.testing.assert_close(tiny_step(max_tokens, loss_average), whole, rtol=0, atol=1e-6)


def test_chunked_head_differs_from_log_softmax():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 2, generator=generator, requires_grad=True) for n in (70, 1 << 18))  # two chunks
    labels, upstream = torch.randint(len(weight), (70,), generator=generator), torch.randn(70, generator=generator)
    ours = ChunkedHead.apply(hidden, weight, labels, 0.7)
    plain = (hidden @ weight.T / 0.7).log_softmax(1)
    torch.testing.assert_close(ours, (plain[range(70), labels], -(plain.exp() * plain).sum(1)), rtol=1e-3, atol=1e-3)
    gradients = (torch.autograd.grad(x @ upstream, (hidden, weight)) for x in (ours[0], plain[range(70), labels]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_reward_is_fooled():
    problem = {"numbers": [3, 5, 7], "target": 22}
    solved = ["<answer>3*5+7</answer>", "<answer> 7 - -(5 * 3) </answer>.", "<answer>1</answer><answer>3*5+7</answer>"]
    wrong = [f"<answer>{x}</answer>" for x in ("22", "3*5+7+0", "5+5+5+7", "7**(5-3)", "7/(5-5)", "9**9**9", "(" * 300)]
    neither = ["", "3*5+7", "<answer>", "</answer><answer>3*5+7", "<answer></answer>"]
    for value, texts in ((1.0, solved), (0.1, wrong), (0.0, neither)):
        assert [reward_fn(text, problem) for text in texts] == [value] * len(texts), (value, texts)
    for text in ("$1,234.50", "1234.5 dollars", "it costs 1,234.5"):
        assert reward_fn(f"<answer>{text}</answer>", {"answer": "1,234.5"}) == 1.0, text


def test_functions():
    """Every test_ function above, a line each. A failure is an AssertionError: the run does not start."""
    print("=== Running Quick Tests ===")
    for name in [name for name in globals() if name.startswith("test_") and name != "test_functions"]:
        globals()[name]()
        print(f"\u2705 {name.removeprefix('test_').replace('_', ' ')}: no")
    print("=== All Tests Passed! ===\n")


if __name__ == "__main__":
    test_functions()
    main()
