# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.19.0", "tensorboard==2.21.0", "peft==0.21.2",
#                 "matplotlib==3.11.2"]
# ///
"""starter.py: GRPO with an optional KL penalty, in one file that you can read, copy and change.

    python starter.py                       quick tests, then main(): evaluate, train, evaluate
    python starter.py --n_train_steps 50    with another value for a parameter of main()

It reads in the order in which the data flows, from problems to the loop and its numbers. For the
algorithm read section 13, then 6 to 10, and 11 if you use the KL penalty. Easily broken are the
shift in make_batch, the order of weights_of_tokens and cut_microbatches in train, each detach() of
10 and 11, and load_policy_into_vllm_instance in rollout.

GRPO (arXiv:2402.03300) samples a group of responses to each prompt, scores them with a rule, and
makes the responses that beat their group's mean more likely. Unlike in the paper the KL penalty is
off by default; the loss is a mean over all response tokens of the step (DAPO, arXiv:2503.14476);
the KL term's value is k3, but its gradient at each token is that of KL(policy || reference).

The folder support/ is optional: it makes the same computation faster, adds LoRA and several
processes, and watches over a run. What you change here is what runs.

Copyright (c) 2026 the starter.py authors. SPDX-License-Identifier: MIT
"""
import os

for variable, setting in (  # read by libraries while they are imported; one from outside wins
        ("TOKENIZERS_PARALLELISM", "false"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("TRANSFORMERS_VERBOSITY", "error"), ("TORCH_CPP_LOG_LEVEL", "ERROR"),
        ("GOMP_SPINCOUNT", "2000"), ("THP_MEM_ALLOC_ENABLE", "1"), ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0")):  # vLLM's engine runs in this process
    os.environ.setdefault(variable, setting)

import argparse
import ast
import copy
import difflib
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import random
import re
import signal
import sys
import time
import zlib
from collections import Counter
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F


class InputError(ValueError):
    """A mistake that the caller can correct. The message is one sentence: value and remedy."""


class RunStopped(RuntimeError):
    """The run cannot go on, or its numbers would be wrong. The message says what to check."""


def nearest(value, options):
    """Returns a remedy: options with this part, these initials or a near spelling, or all."""
    value = str(value).lower()
    parts = [x for x in options if value in (*x.split("_"), re.sub("([a-z])[a-z]*_?", r"\1", x))]
    near = parts[:3] or difflib.get_close_matches(value, options, n=1, cutoff=0.7)
    others = ", ".join(map(repr, options)) if len(options) < 20 else "those that --help lists"
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"use one of {others}"


def check_known(name, value, options):
    """Raises InputError, with a remedy, for a value of main()'s parameter that is no option."""
    if value not in [*options]:
        raise InputError(f"{name} = {value!r} is not known; {nearest(value, options)}")


MECHANICS = {}  # name of a function with the mark @mechanics -> what support/ runs in its place


def mechanics(function):
    """Marks a function that support/ may replace: by a faster one with the same results, unless you
    have edited this one; or by one that calls this one, as for several processes and LoRA."""
    @functools.wraps(function)
    def call(*args, **settings):
        return MECHANICS.get(function.__name__, function)(*args, **settings)

    return call


def find_support():
    """Returns support/attach.py, or None where that folder does not lie beside this file."""
    here = Path(__file__).resolve().parent
    if not (here / "support" / "attach.py").is_file():
        return None
    sys.modules.setdefault("starter", sys.modules[__name__])  # support/ imports this very module
    sys.path[:0] = [] if str(here) in sys.path else [str(here)]
    from support import attach  # support.check_settings and so on are its functions
    return attach


# --------------------------------------------------------------------------------------------------
# 1. Problems.  A task's name -> problems for training and held-out problems.
#
# A problem is a dict with "prompt" and whatever the reward needs. A task is a function from the
# settings of main() to (training problems, held-out problems), given as task or named in TASKS.

def is_held_out(*key):
    """Whether this problem is in the fixed quarter of all problems that is never trained on."""
    return zlib.crc32(repr(key).encode()) % 4 == 0


@mechanics
def read_problems(source):
    """The path of a JSONL file -> its problems. "prompt" is a text or a list of chat messages,
    "answer" a text or a number; other keys are for a reward of your own. support/ reads more."""
    problems = []
    try:
        for line in open(source, encoding="utf-8-sig"):
            row = json.loads(line)
            if "last_number" in row:
                raise ValueError("last_number needs support/")
            problems.append(row | {"prompt": row["prompt"], "answer": str(row["answer"]).strip()})
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{source} cannot be read ({error}); give a file in UTF-8") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{source} line {len(problems) + 1} is not a JSON object with 'prompt' "
                         f"and 'answer' ({error!r:.150}); mend that line") from None
    return problems


def problems_of_files(cfg):
    """Problems of cfg.task and cfg.eval_file; without an eval_file a quarter is held out."""
    problems = read_problems(cfg.task)
    if cfg.eval_file is not None:
        return problems, read_problems(cfg.eval_file)
    return ([problem for problem in problems if not is_held_out(problem["prompt"])],
            [problem for problem in problems if is_held_out(problem["prompt"])])


TASKS = {}  # support/tasks.py adds Countdown, in two sizes, and addition


class Problems(NamedTuple):
    train: list
    held_out: list
    skills: list  # of other skills, to see what is forgotten; "skill" is the name of each one's


def load_problems(cfg):
    """Returns the Problems of cfg.task, and of other skills if the model's folder has some."""
    task = cfg.task if callable(cfg.task) else TASKS.get(cfg.task, problems_of_files)
    train, held_out = task(cfg)
    if not (train and held_out):
        raise InputError(f"task = {cfg.task!r} gave {len(train)} problems for training and "
                         f"{len(held_out)} held out; give more different prompts, or an eval_file")
    retention = Path(cfg.model_id) / "retention.jsonl"
    skills = read_problems(retention) if retention.is_file() else []
    return Problems(train, held_out[:cfg.n_eval_problems], skills)


def problems_of_step(problems, step, n, seed):
    """Returns the n problems of this step (from 0). Each pass over the list is in another random
    order. They depend on step and seed alone, so that a resumed run sees the same ones."""
    first_pass, start = divmod(step * n, len(problems))
    passes = (random.Random(f"{seed} {number}").sample(problems, len(problems))
              for number in itertools.count(first_pass))
    return list(itertools.islice(itertools.chain.from_iterable(passes), start, start + n))


# --------------------------------------------------------------------------------------------------
# 2. Model.  A checkpoint folder or Hugging Face name -> policy and tokenizer.

class Float32Head(torch.nn.Linear):
    """An LM head whose logits are float32 under autocast, too: bf16 would round them by up to 0.06.
    vLLM in bf16 rounds inputs and weights of its head, but not the sums; beside it so does this."""
    rounds = False  # choose() sets it: True where vLLM samples in bf16

    def forward(self, hidden):
        dtype, weight = self.weight.dtype, self.weight
        if self.rounds and torch.is_autocast_enabled(hidden.device.type):
            hidden, weight = hidden.bfloat16(), weight.bfloat16()
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(dtype), weight.to(dtype), self.bias)


def init_policy(model_id, device):
    """Returns (policy, tokenizer). The policy is in float32, whatever the checkpoint's dtype: in
    bf16, 84 to 98 % of the updates at learning rates of 1e-5 to 1e-6 would round to nothing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    try:
        policy, loading = AutoModelForCausalLM.from_pretrained(
            model_id, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True,
            trust_remote_code=False)  # else it asks at a terminal
        tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=False)
        lost = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
        if lost:  # transformers would give random numbers to them
            raise ValueError(f"its files do not hold {lost[0]} and {len(lost) - 1} more")
    except Exception as error:  # whatever transformers raises over files that others wrote
        raise InputError(f"model_id = {str(model_id)!r} cannot be loaded "
                         f"({' '.join(str(error).split())[:300]}); give a folder written by "
                         "save_pretrained, or a Hugging Face name") from error
    head = policy.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        head.__class__ = Float32Head
    for module in policy.modules():  # dropout would change the log-probs at random
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or type(module) is torch.nn.Dropout):
                setattr(module, name, 0.0)
    if getattr(policy.config.get_text_config(), "attn_logit_softcapping", None):
        policy.set_attn_implementation("eager")  # torch's fused kernel leaves the soft-cap out
    return policy.to(device).eval(), tokenizer


def find_stop_tokens(policy, tokenizer):
    """The ids that end a response: EOS, and those in generation_config, such as a turn's end."""
    listed = policy.generation_config.eos_token_id
    listed = listed if isinstance(listed, (list, tuple)) else [listed]
    return tuple(sorted({tokenizer.eos_token_id, *listed} - {None}))


def with_prompt_ids(problems, policy, tokenizer, cfg):
    """Returns the problems that fit into the model's context, each with the token ids of its prompt
    under "prompt_ids", in the tokenizer's chat template if it has one. Responses are never
    tokenised: the sampler's ids are used as they are."""
    context = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or math.inf
    fitting = []
    for problem in problems:
        chat = problem["prompt"]
        try:
            if tokenizer.chat_template is not None:
                chat = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
                chat = tokenizer.apply_chat_template(chat, enable_thinking=cfg.enable_thinking,
                                                     tokenize=False, add_generation_prompt=True)
            ids = tokenizer(chat, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
        except Exception as error:  # a chat without a template, or what a template may raise
            raise InputError(f"the tokenizer cannot read the prompt {problem['prompt']!r:.150} "
                             f"({error!s:.150}); change it, or the chat template") from error
        if len(ids) + cfg.max_new_tokens <= context:
            fitting.append(problem | {"prompt_ids": ids})
    if len(fitting) < len(problems):
        print(f"{len(problems) - len(fitting)} of {len(problems)} prompts are left out: with "
              f"max_new_tokens = {cfg.max_new_tokens} they do not fit into {context} tokens")
    return fitting


# --------------------------------------------------------------------------------------------------
# 3. Engine.  The policy's weights -> vLLM.

@mechanics
def weights_of(policy):
    """Yields (name, tensor) of the parameters and persistent buffers, by the names of state_dict().
    support/ merges LoRA's adapters, and joins the parts of several processes."""
    yield from policy.state_dict().items()


@mechanics
def init_vllm(model_id, seed, max_model_len, gpu_mem_util, bf16):
    """Returns a vLLM engine. Its log-probs are log_softmax(logits / temperature), like ours."""
    from vllm import LLM
    return LLM(str(model_id), seed=seed, dtype="bfloat16" if bf16 else "float32",
               max_model_len=max_model_len, max_num_seqs=256, max_num_batched_tokens=8_192,
               # below 1 a share of the GPU; from 1 on GB of the cache, and the share is not read
               gpu_memory_utilization=gpu_mem_util if gpu_mem_util < 1 else 0.05,
               kv_cache_memory_bytes=int(gpu_mem_util * 1e9) if gpu_mem_util >= 1 else None,
               device_ids=[torch.cuda.current_device()] if torch.cuda.is_available() else None,
               hf_overrides={"head_dtype": "float32"} if bf16 else {},  # like Float32Head
               logprobs_mode="processed_logprobs", use_tqdm_on_load=False)


@mechanics
def load_weights_in_worker(worker, weights):
    """Runs inside vLLM. weights: {name: tensor}, as in a checkpoint."""
    worker.reload_weights(weights_iterator=weights.items())


def load_policy_into_vllm_instance(policy, llm):
    """Hands the policy's weights to vLLM and drops what its prefix cache computed with the old
    ones. Without it vLLM would sample from an old policy."""
    from transformers.core_model_loading import revert_weight_conversion
    weights = revert_weight_conversion(policy, dict(weights_of(policy)))  # as checkpoints name them
    llm.collective_rpc(load_weights_in_worker, args=(weights,))
    if llm.reset_prefix_cache() is not True:
        raise RunStopped("vLLM kept its prefix cache after a weight sync, so it would read "
                         "prompts with old weights; check the version of vLLM")


# --------------------------------------------------------------------------------------------------
# 4. Rollout.  Prompts -> group_size responses to each, with the log-prob of every sampled token.

TOKENS_AT_ONCE = 1 << 16  # prompts and responses that are decoded together, at most
LOGITS_AT_ONCE = 1 << 26  # float32 logits that a microbatch may hold, without support/


class Response(NamedTuple):
    prompt_ids: list
    response_ids: list  # as the sampler gave them; the token that ended it included
    log_probs: list  # of response_ids, at the sampling temperature (at 1 where it is 0)
    finished: bool  # ended by a stop token; otherwise cut at max_new_tokens


def seed_for(cfg, purpose):
    """Seeds the global generators, for rewards, and returns the seed of a step or other purpose."""
    import numpy
    seed = random.Random(f"{cfg.seed} {purpose}").getrandbits(32)  # torch's CPU reads 32 bits
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return seed


@mechanics
def rollout_with_vllm(llm, prompts, cfg, seed, group_size=1, temperature=1.0):
    """P lists of prompt ids -> P * group_size Responses, group after group."""
    from vllm import SamplingParams
    params = [SamplingParams(
        n=group_size, temperature=temperature, logprobs=0, max_tokens=cfg.max_new_tokens,
        stop_token_ids=list(cfg.stop_token_ids), detokenize=False, ignore_eos=True,
        seed=seed + i * group_size) for i in range(len(prompts))]
    llm.reset_prefix_cache()  # a resumed run then repeats the same bits
    requests = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [Response(ids, list(out.token_ids),
                     [at[token].logprob for token, at in zip(out.token_ids, out.logprobs)],
                     out.finish_reason == "stop")
            for ids, request in zip(prompts, requests) for out in request.outputs]


def scale_logits(logits, temperature):
    """(B, V) logits of the model -> (B, V) float32 logits, by which tokens are drawn and scored. To
    forbid tokens in both, return logits.index_fill(1, tokens, -math.inf); vLLM draws by itself."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature in (0, 1) else logits / temperature  # 0: greedy, scored at 1


@mechanics
def draw_from(probs, uniform):
    """Inverse transform sampling: (B, V) probabilities, (B, 1) uniform numbers -> (B, 1) tokens."""
    cumulative = probs.cumsum(dim=1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return tokens.clamp(max=probs.shape[1] - 1)


def draw_tokens(logits, uniform, temperature):
    """(B, V) logits, (B, 1) uniform numbers in [0, 1) -> (B, 1) tokens, (B, 1) log-probs."""
    probs = scale_logits(logits, temperature).softmax(dim=1)
    tokens = draw_from(probs, uniform) if temperature > 0 else probs.argmax(dim=1, keepdim=True)
    return tokens, probs.gather(1, tokens).log()


@mechanics
def rows_to_decode(prompts, max_new_tokens):
    """Prompts -> lists of the indices of those that are decoded together. These have one length:
    recurrent and sliding-window layers would read padding in front of the response as text."""
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for length, rows in itertools.groupby(by_length, key=lambda i: len(prompts[i])):
        rows, n = list(rows), max(1, TOKENS_AT_ONCE // (length + max_new_tokens))
        yield from (rows[i:i + n] for i in range(0, len(rows), n))


@mechanics
def decode(policy, prompts, cfg):
    """B prompts -> a generator, used by its send(). send(None) gives (B, V) logits of the first
    tokens; send(tokens), with the (B, 1) tokens drawn from them, gives those of the next ones."""
    new_ids = torch.tensor(prompts, device=policy.device)
    accepted = inspect.signature(policy.forward).parameters
    inputs = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in accepted else {})
    has_rope = getattr(policy.config.get_text_config(), "rope_parameters", None) is not None
    n_read = 0
    while True:
        if has_rope and "position_ids" in accepted:  # some models count from 0 in each call
            positions = torch.arange(n_read, n_read + new_ids.shape[1], device=policy.device)
            inputs["position_ids"] = positions.expand_as(new_ids)
        out = policy(input_ids=new_ids, **inputs)
        tokens = yield out.logits[:, -1]
        if getattr(out, "past_key_values", None) is None:  # it reads all tokens each time
            new_ids = torch.cat([new_ids, tokens], dim=1)
        else:
            inputs["past_key_values"] = out.past_key_values
            n_read += new_ids.shape[1]
            new_ids = tokens


@mechanics
@torch.no_grad()
def rollout_with_transformers(policy, prompts, cfg, seed, group_size=1, temperature=1.0):
    """P lists of prompt ids -> P * group_size Responses, group after group. Response i draws with
    seed + i, whatever else is sampled."""
    was_training = policy.training
    policy.eval()  # in train mode gradient checkpointing drops the cache
    stop = torch.tensor(cfg.stop_token_ids, device=policy.device)
    prompts = [prompt_ids for prompt_ids in prompts for _ in range(group_size)]
    responses = [None] * len(prompts)
    for rows in rows_to_decode(prompts, cfg.max_new_tokens):
        generators = [torch.Generator().manual_seed(seed + i) for i in rows]
        uniform = torch.stack([torch.rand(cfg.max_new_tokens, generator=generator)
                               for generator in generators]).to(policy.device)
        decoder = decode(policy, [prompts[i] for i in rows], cfg)
        running = torch.ones(len(rows), 1, dtype=torch.bool, device=policy.device)
        tokens = None  # what starts a generator
        drawn = []  # (tokens, log-probs), (B, 1) each
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=cfg.bf16):
            while running.any() and len(drawn) < cfg.max_new_tokens:
                logits = decoder.send(tokens)
                drawn.append(draw_tokens(logits, uniform[:, len(drawn), None], temperature))
                tokens = drawn[-1][0]
                running &= ~torch.isin(tokens, stop)
        tokens, log_probs = (torch.cat(columns, dim=1).tolist() for columns in zip(*drawn))
        for i, ids, chosen in zip(rows, tokens, log_probs):
            ends = [n for n, token in enumerate(ids, 1) if token in cfg.stop_token_ids]
            length = ends[0] if ends else len(ids)
            responses[i] = Response(prompts[i], ids[:length], chosen[:length], bool(ends))
    policy.train(was_training)
    return responses


def rollout(policy, llm, prompts, cfg, purpose, group_size, temperature):
    """P lists of prompt ids -> P * group_size Responses of the policy as it is now."""
    seed = seed_for(cfg, purpose)
    if llm is None:
        return rollout_with_transformers(policy, prompts, cfg, seed, group_size, temperature)
    load_policy_into_vllm_instance(policy, llm)
    return rollout_with_vllm(llm, prompts, cfg, seed, group_size, temperature)


# --------------------------------------------------------------------------------------------------
# 5. Reward.  Response text, problem -> 1.0 solved, 0.1 well-formed but wrong, 0.0 otherwise.
#
# To use another, write a function (response_text, problem) -> number and give it to main(), or
# several with weights: reward=[(reward_fn, 1.0), (brief, 0.5)]. Their weighted sum is learnt; the
# first says what is solved (1 or more). A parameter named response gets the Response as well.

# One number and nothing else, as in "-12", "$1,234.50" or "18 %"
NUMBER = re.compile(
    r"-?[$\u20ac\u00a3]?(?:0|[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d*)?(?:\.\d+)?(?<=\d) ?%?", re.ASCII)


def same_answer(answer, gold):
    """Whether two answers are equal texts, or equal numbers, as "$1,234.50" and "1234.5"."""
    values = []
    for text in (answer, gold):
        text = " ".join(text.replace("\u2212", "-").split()).casefold().removesuffix(".")
        if len(text) <= 100 and NUMBER.fullmatch(text):
            text = Fraction(re.sub(r"[^\d.-]", "", text))
        values.append(text)
    return values[0] == values[1]


def tagged_answer(text):
    """The text between the last <answer> and </answer>, or "" where there is none."""
    head, closed, _ = text[-200_000:].rpartition("</answer>")
    _, opened, answer = head.rpartition("<answer>")
    return answer.strip() if closed and opened else ""


def score_answer(response_text, problem):
    """1.0 if the answer in the tags is problem["answer"], 0.1 if it is another, 0.0 without one."""
    answer = tagged_answer(response_text)
    if not answer:
        return 0.0
    return 1.0 if same_answer(answer, str(problem["answer"])) else 0.1


# A key that a problem may have -> what scores its responses; of several the last one. support/ adds
# two: "numbers", of its Countdown, and "last_number", which needs no tags.
SCORERS = {"answer": score_answer}


def reward_fn(response_text, problem):
    """1.0 solved, 0.1 well-formed but wrong, 0.0 otherwise. Any text is safe to give."""
    scorers = [scorer for key, scorer in SCORERS.items() if problem.get(key) is not None]
    if not scorers:
        raise InputError(f"reward_fn needs a problem with one of {[*SCORERS]}; give another reward")
    return scorers[-1](response_text, problem)


@mechanics
def score(responses, problems, tokenizer, reward):
    """P * G Responses, P problems -> P * G texts, (P * G,) float32 rewards, (P * G,) whether each
    is solved, and for the log the mean of each reward where there are several."""
    rewards = [(reward, 1.0)] if callable(reward) else reward
    texts = tokenizer.batch_decode([r.response_ids for r in responses], skip_special_tokens=True)
    problem_of_each = [x for x in problems for _ in range(len(responses) // len(problems))]
    values = torch.zeros(len(responses), len(rewards))
    for j, (function, _) in enumerate(rewards):
        asks = "response" in inspect.signature(function).parameters
        for i, (r, text, problem) in enumerate(zip(responses, texts, problem_of_each)):
            try:  # nan and inf pass: the loop skips such a step
                values[i, j] = float(function(text, problem, **{"response": r} if asks else {}))
            except Exception as error:  # in your function, or because it gave no number
                shown = {key: x for key, x in problem.items() if key != "prompt_ids"}
                error.add_note(f"{function} got {text[:200]!r} and {shown}; return a number.")
                raise
    means = {f"reward/{getattr(function, '__name__', 'unnamed')}": mean.item()
             for (function, _), mean in zip(rewards, values.mean(dim=0))}
    total = (values * torch.tensor([float(weight) for _, weight in rewards])).sum(dim=1)
    return texts, total, values[:, 0] >= 1, means if len(rewards) > 1 else {}


# --------------------------------------------------------------------------------------------------
# 6. Advantages.  Rewards -> how much better each response is than the others of its group.

def compute_group_normalized_advantages(rewards, group_size, advantage_eps, normalize_by_std):
    """(P * G,) rewards, group after group -> (P * G,) advantages and statistics for the log.

    GRPO divides by the group's standard deviation (arXiv:2402.03300). Dr. GRPO does not, so that
    easy and hard prompts weigh the same (arXiv:2503.20783). With group_size 2, rewards [1, 0, 1, 1]
    become [+0.71, -0.71, 0, 0]: a group whose rewards are all equal teaches nothing."""
    groups = rewards.reshape(-1, group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    all_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    # The mean of an equal group can be off by a bit; here it gets exactly 0. For a baseline across
    # groups delete this line, and divide by rewards.std(), since the std of an equal group is 0.
    advantages = advantages.masked_fill(all_equal, 0.0)
    if normalize_by_std:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + advantage_eps)
    metadata = {"reward_mean": rewards.mean().item(), "reward_std": groups.std(dim=1).mean().item(),
                "frac_zero_std": all_equal.float().mean().item()}
    return advantages.reshape(-1), metadata


# --------------------------------------------------------------------------------------------------
# 7. Microbatches.  Responses -> (B, T) tensors. Column t of every one is about labels[:, t].

def make_batch(responses, advantages, device):
    """Responses, their advantages -> dict of (B, T) tensors.

    advantages: (B,), one for each response, or (B, L), one for each of its tokens. A row is a
    prompt and its response without a gap, padded on the right. input_ids and labels are shifted
    against each other once, here:

        prompt [5, 6], response [7, 8]:  input_ids [5, 6, 7]   labels [6, 7, 8]   mask [0, 1, 1]

    The mask comes from lengths and not from ids: the stop token may well be the padding token.
    """
    columns = {"input_ids": [], "labels": [], "response_mask": [], "rollout_log_probs": []}
    width = max(len(r.prompt_ids) + len(r.response_ids) for r in responses) - 1
    for r in responses:
        ids = [*r.prompt_ids, *r.response_ids]
        before, after = len(r.prompt_ids) - 1, width + 1 - len(ids)
        columns["input_ids"].append(ids[:-1] + ids[:1] * after)  # some break at padding's own id
        columns["labels"].append(ids[1:] + [0] * after)
        columns["response_mask"].append(
            [False] * before + [True] * len(r.response_ids) + [False] * after)
        columns["rollout_log_probs"].append([0.0] * before + [*r.log_probs] + [0.0] * after)
    batch = {name: torch.tensor(values, device=device) for name, values in columns.items()}
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    elif advantages.shape[1] > 1:  # the n-th token of a response gets column n
        place = (batch["response_mask"].cumsum(dim=1) - 1).clamp(min=0)
        advantages = advantages.to(device).gather(1, place)
    return batch | {"advantages": advantages.to(device)}


# (B, T) float mask of the whole step, longest possible response -> (B, T) weight of each token in
# the loss, fixed before the step is cut into microbatches: the gradient does not depend on the cut.
# grpo: mean over each response, then over responses (arXiv:2402.03300). dapo: mean over all tokens
# (arXiv:2503.14476). dr_grpo: sum / constant: no response's own length matters (arXiv:2503.20783).
AVERAGES = {
    "grpo": lambda mask, max_new_tokens: mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask),
    "dapo": lambda mask, max_new_tokens: mask / mask.sum().clamp(min=1),
    "dr_grpo": lambda mask, max_new_tokens: mask / (len(mask) * max_new_tokens),
}


def weights_of_tokens(batch, responses, cfg, has_reference):
    """Returns "weights", of each token in the loss, and "mean_weights", in the means for the log:
    these leave out rows that support/ skips (no advantage and no KL term), unless all are such."""
    mask = in_loss = batch["response_mask"]
    if cfg.mask_truncated:
        in_loss = mask & torch.tensor([[r.finished] for r in responses], device=mask.device)
    teaches = (batch["advantages"] * mask).any(dim=1, keepdim=True)
    in_means = (mask & (teaches | has_reference | ~teaches.any())).float()
    return {"weights": AVERAGES[cfg.loss_average](in_loss.float(), cfg.max_new_tokens),
            "mean_weights": in_means / in_means.sum()}


@mechanics
def cut_microbatches(batch, max_tokens):
    """Cuts a batch into microbatches of at most max_tokens tokens, padding included, or of one
    row. Rows of similar length come together, the longest first, since they need most memory. Rows
    without a weight in the means are last, by themselves: support/ can skip them."""
    mask = batch["response_mask"]
    lengths = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1).tolist()
    in_means = batch.get("mean_weights", mask).any(dim=1).tolist()
    order = sorted(range(len(lengths)), key=lambda row: (not in_means[row], -lengths[row]))
    microbatches = []
    while order:
        width = max(1, lengths[order[0]])
        n_rows = max(1, max_tokens // width)
        rows = [row for row in order[:n_rows] if in_means[row] == in_means[order[0]]]
        microbatches.append({name: x[rows, :width] for name, x in batch.items()})
        order = order[len(rows):]
    return microbatches


# --------------------------------------------------------------------------------------------------
# 8. Log-probs.  (B, T) ids -> log-probs of the response tokens, by the model's own forward pass.

class TokenStatistics(NamedTuple):
    """One float for each token, in nats. The last three are 0 without a reference."""
    log_probs: torch.Tensor  # of the label
    entropy: torch.Tensor  # over the vocabulary
    ref_log_probs: torch.Tensor  # the reference's log-prob of the label; without a gradient
    exact_kl: torch.Tensor  # KL(policy || reference) over the vocabulary
    forward_kl: torch.Tensor  # KL(reference || policy) over the vocabulary


def statistics_of_logits(logits, labels, temperature, ref_logits=None):
    """(N, V) logits of the policy and, with a reference, of the reference, (N,) labels ->
    TokenStatistics of (N,) tensors. All that the loss knows of the logits is computed here. A token
    that is forbidden (logit -inf) adds 0 to the sums and to their gradients; one that the reference
    alone forbids makes exact_kl infinite."""
    labels = labels[:, None]
    log_p = scale_logits(logits, temperature).log_softmax(dim=1)
    log_probs = log_p.gather(1, labels)[:, 0]
    entropy = -(log_p.exp() * log_p.clamp(min=-1e9)).sum(dim=1)
    if ref_logits is None:
        return TokenStatistics(log_probs, entropy, *[torch.zeros_like(entropy)] * 3)
    ref_log_p = scale_logits(ref_logits, temperature).log_softmax(dim=1)
    exact_kl = (log_p.exp() * (log_p - ref_log_p).nan_to_num(posinf=math.inf, neginf=0)).sum(dim=1)
    forward_kl = (ref_log_p.exp() * (ref_log_p - log_p).nan_to_num(posinf=0, neginf=0)).sum(dim=1)
    return TokenStatistics(log_probs, entropy, ref_log_p.gather(1, labels)[:, 0], exact_kl,
                           forward_kl)


@mechanics
def token_statistics(model, rows, temperature, bf16=False, ref_model=None):
    """rows: (B, T) "input_ids", "labels", "response_mask" -> TokenStatistics of (B, T) tensors, 0
    outside the mask. With padding on the right a causal model needs no attention mask. The (N, V)
    logits of all N response tokens are in memory at once; main() bounds N."""
    mask = rows["response_mask"]

    def logits_of(model):
        with torch.autocast(mask.device.type, torch.bfloat16, enabled=bf16):
            return model(input_ids=rows["input_ids"], use_cache=False).logits[mask]

    with torch.no_grad():
        ref_logits = None if ref_model is None else logits_of(ref_model)
    stats = statistics_of_logits(logits_of(model), rows["labels"][mask], temperature, ref_logits)
    zeros = stats.log_probs.new_zeros(mask.shape)
    return TokenStatistics(*(zeros.masked_scatter(mask, values) for values in stats))


def get_response_log_probs(model, input_ids, labels, response_mask=None, temperature=1.0,
                           bf16=False):
    """For programs of yours: (B, T) ids and labels -> (B, T) float32 log-probs, 0 where masked."""
    mask = torch.ones_like(labels, dtype=torch.bool) if response_mask is None else response_mask
    rows = {"input_ids": input_ids, "labels": labels, "response_mask": mask.bool()}
    return token_statistics(model, rows, temperature, bf16).log_probs


# --------------------------------------------------------------------------------------------------
# 9. Loss.  Log-probs and advantages -> loss of each token.

def masked_mean(tensor, mask, dim=None):
    """For the log: the mean where the mask is 1, or 0 where it is empty. Masked nan do no harm."""
    tensor, mask = torch.broadcast_tensors(tensor, mask.bool())
    return torch.where(mask, tensor, 0).sum(dim) / mask.sum(dim).clamp(min=1)


def compute_loss(advantages, policy_log_probs, old_log_probs, clip_range, ref_log_probs=None,
                 kl_coef=0.0, mask=None, kl_settings=None, vocab_kl=None, sampler_log_probs=None):
    """(B, 1) or (B, T) advantages, (B, T) log-probs -> (B, T) loss: PPO-clipped term + kl_coef * KL
    (section 11), and metadata: means over the mask. clip_range: e, for ratios in [1 - e, 1 + e], or
    (low, high), DAPO's "clip-higher". Take no mean here: it would be over one microbatch alone."""
    kl_settings = kl_settings or KLSettings()
    mask = torch.ones_like(policy_log_probs, dtype=torch.bool) if mask is None else mask.bool()
    policy_log_probs = torch.where(mask, policy_log_probs, 0.0)
    old_log_probs = torch.where(mask, old_log_probs, 0.0)
    # The PPO-clipped term (arXiv:1707.06347). In the first epoch of a rollout the ratio is 1, but
    # its gradient is not 0; the clip acts only with epochs_per_rollout above 1.
    clip_low, clip_high = clip_range if isinstance(clip_range, (tuple, list)) else [clip_range] * 2
    ratio = torch.exp(policy_log_probs - old_log_probs)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)  # for the log, of this clip
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    metadata = {"ratio_mean": ratio, "clip_frac": too_low | too_high,
                "clip_frac_low": too_low, "clip_frac_high": too_high}
    if ref_log_probs is not None:
        ref_log_probs = torch.where(mask, ref_log_probs, 0.0)
        sampler_log_probs = old_log_probs if sampler_log_probs is None else sampler_log_probs
        penalty, of_kl = kl_penalty(policy_log_probs, ref_log_probs, sampler_log_probs, mask,
                                    kl_settings, vocab_kl)
        metadata |= of_kl
        if kl_coef and kl_settings.kl_in != "reward":
            loss = loss + kl_coef * penalty
    return loss, {key: masked_mean(x.detach().to(loss.dtype), mask) for key, x in metadata.items()}


# --------------------------------------------------------------------------------------------------
# 10. Update.  Microbatches -> gradients of the step's loss, and its means over tokens.

@mechanics
def have_slope(slopes):
    """[(statistic, slope of the loss at it)] -> whether any slope is not 0."""
    return any(slope.any() for _, slope in slopes)


def grpo_microbatch_step(policy, rows, cfg, ref_model=None, kl_coef=0.0):
    """Forward pass, loss and backward pass of one microbatch.

    rows: (B, T) "input_ids", "labels", "response_mask", "weights", "rollout_log_probs"; (B, 1) or
    (B, T) "advantages". The first pass over these rows sets rows["old_log_probs"], so its ratio is
    1; later epochs keep them. recipes/minibatches.patch makes an optimiser step per minibatch.
    Returns its part of the step's loss, and metadata: means over its tokens."""
    mask = rows["response_mask"]
    attached = token_statistics(policy, rows, cfg.temperature, cfg.bf16, ref_model)
    # Two backward passes: from the loss to these copies, then from them to the weights. The second
    # is the slow one, and left out where all slopes are 0.
    statistics = TokenStatistics(*(x.detach().requires_grad_(x.requires_grad) for x in attached))
    log_probs = statistics.log_probs
    vocab_kl = getattr(statistics, EXACT.get(cfg.kl_estimator, "exact_kl"))
    ref_log_probs = None if ref_model is None else statistics.ref_log_probs
    old_log_probs = rows.setdefault("old_log_probs", log_probs.detach())  # later epochs find it
    advantages = rows["advantages"]
    if ref_model is not None and cfg.kl_in == "reward":
        advantages = put_kl_into_advantages(advantages, rows["rollout_log_probs"], ref_log_probs,
                                            mask, kl_coef, cfg)
    # The sampler's engine computes slightly other log-probs than the trainer; the PPO term and the
    # KL are corrected for it (truncated importance sampling, arXiv:2508.04700).
    sampler_error = old_log_probs - rows["rollout_log_probs"]
    sampler_log_probs = None
    if cfg.importance_cap is not None:
        sampler_log_probs = rows["rollout_log_probs"]
        advantages = advantages * sampler_error.exp().clamp(max=cfg.importance_cap)
    loss, metadata = compute_loss(
        advantages, log_probs, old_log_probs, cfg.clip_range, ref_log_probs, kl_coef, mask,
        kl_settings=cfg, vocab_kl=vocab_kl, sampler_log_probs=sampler_log_probs)
    loss = torch.where(mask, loss * rows["weights"], 0.0).sum()
    loss.backward()
    slopes = [(x, leaf.grad) for x, leaf in zip(attached, statistics) if leaf.grad is not None]
    if have_slope(slopes):
        torch.autograd.backward(*zip(*slopes))  # (the statistics, their slopes)
    seen = {"entropy": statistics.entropy, "sampler_logprob_diff": sampler_error.abs()}
    if ref_model is not None:  # both divergences, whichever is penalised
        seen |= {"kl_per_token": statistics.exact_kl, "kl_forward": statistics.forward_kl}
    return loss.detach(), metadata | {
        name: masked_mean(values.detach(), mask) for name, values in seen.items()}


@mechanics
def accumulate_gradients(policy, microbatches, cfg, ref_model=None, kl_coef=0.0):
    """Adds up the gradients of a step. Returns its loss, and means over its tokens."""
    sums = Counter()  # Counter.update adds up
    for rows in microbatches:
        loss, metadata = grpo_microbatch_step(policy, rows, cfg, ref_model, kl_coef)
        share = rows["mean_weights"].sum()
        sums.update({"loss": loss} | {name: value * share for name, value in metadata.items()})
    return {name: value.item() for name, value in sums.items()}


# --------------------------------------------------------------------------------------------------
# 11. KL penalty.  Log-probs -> a penalty per token.
# Below, d = log pi - log ref, at a token that the policy sampled. Three choices are independent of
# each other: the estimator (which number), the gradient (of what), the placement (who pays for it).

# d -> an estimate of KL(policy || reference) in nats: a value to report. The gradient: kl_penalty.
ESTIMATORS = {
    "k1": lambda d: d,  # unbiased, can be negative
    "k2": lambda d: d.square() / 2,  # biased
    # exp(-d) - 1 + d: unbiased, never negative (J. Schulman, "Approximating KL divergence", 2020)
    "k3": lambda d: torch.expm1(-d) + d,
}

# Estimators that are sums over the vocabulary, with their own gradient: fields of TokenStatistics.
EXACT = {"exact": "exact_kl", "exact_forward": "forward_kl"}

# A term rule: (kl (B, T), lengths (B, 1) in tokens, cfg) -> (B, T), penalised instead of kl; its
# slope scales the gradient. support/ adds rules of both kinds; "_sound" marks a repaired one.
TERM_RULES = {"clip_sound": lambda kl, lengths, cfg: kl}  # unchanged: log_ratio_cap cuts d


def target_sound_rule(c, cfg, kl, reward):
    """Small steps in log beta on a moving average, since the policy needs some steps to follow."""
    error = math.log(max(c.state["kl"], 1e-9) / cfg.kl_target)
    beta = c.beta * math.exp(0.1 * max(-1.0, min(1.0, error)))
    return max(0.1 * c.start, min(10 * c.start, beta))


# (c: KLController, cfg, and of the step kl, nats per token, and reward, its mean) -> the next
# beta. c.state["step"] is the number of the optimiser step.
COEFFICIENT_RULES = {"target_sound": target_sound_rule}


class KLSettings(SimpleNamespace):
    """The settings of a KL term for programs of yours: main()'s parameters with these changes. In
    this file cfg takes its place."""

    def __init__(self, **changes):
        defaults = {name: x.default for name, x in inspect.signature(main).parameters.items()}
        super().__init__(**defaults | {"max_new_tokens": 256} | changes)
        check_kl_names(self)


def check_kl_names(cfg):
    """Raises InputError for a value that is not known: it would act like the default."""
    check_known("kl_in", cfg.kl_in, ["loss", "loss_to_go", "reward"])
    in_reward = cfg.kl_in == "reward"
    check_known("kl_estimator" + " (in the reward)" * in_reward, cfg.kl_estimator,
                ESTIMATORS if in_reward else ESTIMATORS | EXACT)
    check_known("kl_gradient", cfg.kl_gradient, ["reverse", "as_written"])
    rules = cfg.kl_adaptation_method.split("+")
    for rule in rules:
        check_known("kl_adaptation_method", rule, ["none", *TERM_RULES, *COEFFICIENT_RULES])
    if any(sum(x in kind for x in rules) > 1 for kind in (TERM_RULES, COEFFICIENT_RULES)):
        raise InputError(f"kl_adaptation_method = {cfg.kl_adaptation_method!r} has two rules of a "
                         "kind; give one for the term and one for the coefficient at most")


def rule_among(rules, cfg):
    """Returns the name among the rules in cfg.kl_adaptation_method, such as "a+b", or None."""
    return next((name for name in cfg.kl_adaptation_method.split("+") if name in rules), None)


def log_ratio_cap(cfg):
    """Where "clip_sound" cuts d in the gradient, in nats."""
    return (cfg.kl_clip_threshold or 5.0) if rule_among(["clip_sound"], cfg) else math.inf


def adapted_kl(kl, mask, cfg):
    """(B, T) KL -> (B, T) what is penalised."""
    name = rule_among(TERM_RULES, cfg)
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return kl if name is None else TERM_RULES[name](kl, lengths, cfg)


def compute_kl_divergence(policy_log_probs, ref_log_probs, estimator="k1"):
    """(B, T), (B, T) -> (B, T) float32: the estimate of the KL at each token, in nats."""
    check_known("kl_estimator (of two log-probs)", estimator, ESTIMATORS)
    dtype = torch.promote_types(policy_log_probs.dtype, torch.float32)
    return ESTIMATORS[estimator](policy_log_probs.to(dtype) - ref_log_probs.to(dtype))


def with_gradient_of(value, surrogate):
    """Returns the value, to whose gradient, if it has one, that of the surrogate is added."""
    return value + (surrogate - surrogate.detach())


def sum_to_go(kl, mask):
    """(B, T) -> (B, T): sum over this token of the response and all later ones."""
    return torch.where(mask, kl, 0.0).flip(1).cumsum(1).flip(1)


def kl_penalty(policy_log_probs, ref_log_probs, sampler_log_probs, mask, cfg, vocab_kl=None):
    """(B, T) log-probs -> (B, T) penalty, which compute_loss multiplies by beta, (B, T) metadata.

    By default its value is k3(d), and its gradient w * d * grad log pi, with w = pi / sampler. The
    mean of that over what the sampler draws is the gradient of KL(policy || reference) at the
    states it visits. kl_ratio_cap cuts w, which bounds the gradient and biases it."""
    d, cap = (policy_log_probs - ref_log_probs).detach(), log_ratio_cap(cfg)
    ratio = torch.exp(policy_log_probs - sampler_log_probs).detach()
    capped_ratio = ratio.clamp(max=cfg.kl_ratio_cap)
    if cfg.kl_estimator in EXACT and vocab_kl is not None:  # it has its own gradient
        kl = vocab_kl
    elif cfg.kl_gradient == "as_written":  # that of the estimator, to reproduce papers
        kl = compute_kl_divergence(policy_log_probs, ref_log_probs, cfg.kl_estimator)
    else:
        capped_d = d.clamp(-cap, cap)
        value = compute_kl_divergence(  # at most 20 nats, so that exp(-d) does not overflow
            capped_d.clamp(-20, 20), torch.zeros_like(d), cfg.kl_estimator)
        kl = with_gradient_of(value, capped_ratio * capped_d * policy_log_probs)
    adapted = penalty = adapted_kl(kl, mask, cfg)
    if cfg.kl_in == "loss_to_go":
        # Token t also pays for the later KL, to which it leads: by later * w * grad log pi_t. This
        # is, on-policy, the gradient of whole responses' KL; "exact" has the least noise.
        later = (sum_to_go(adapted, mask) - adapted).detach()
        penalty = with_gradient_of(adapted, capped_ratio * later * policy_log_probs)
    # The rest is for the log. What is estimated counts each sampled token w times.
    estimates = {name: capped_ratio * f(d.clamp(-20, 20)) for name, f in ESTIMATORS.items()}
    is_exact = cfg.kl_estimator in EXACT
    return penalty, {
        "kl_penalty_mean": kl if is_exact else estimates[cfg.kl_estimator],
        "kl_per_token": estimates["k3"] if vocab_kl is None else vocab_kl,
        "adaptive_kl/adapted_kl": adapted if is_exact else capped_ratio * adapted,
        "kl_capped_frac": (ratio > cfg.kl_ratio_cap) | (d.abs() > cap),
        **{f"kl_{name}": values for name, values in estimates.items()},
    }


def put_kl_into_advantages(advantages, log_probs, ref_log_probs, mask, kl_coef, cfg):
    """(B, 1) or (B, T) advantages, (B, T) log-probs at rollout -> (B, T) advantages: token t pays
    kl_coef * (KL_t + KL_t+1 + ...). With k1, and where the loss divides by a constant, this is the
    gradient of the response's KL. With a published term rule each token pays for all."""
    cap = log_ratio_cap(cfg)
    d = (log_probs - ref_log_probs).detach().clamp(-cap, cap)
    to_go = sum_to_go(adapted_kl(ESTIMATORS[cfg.kl_estimator](d), mask, cfg), mask)
    pays_for_later = rule_among(TERM_RULES, cfg) in (None, "clip_sound")
    return advantages - kl_coef * (to_go if pays_for_later else to_go[:, :1])


class KLController:
    """beta, the coefficient of the KL term, which a coefficient rule may move after each update."""

    def __init__(self, kl_coef, settings, state=None):
        self.start = kl_coef
        self.settings = settings  # cfg, or KLSettings
        self.state = {"beta": kl_coef, "step": 0, "kl": None, "reward": None} | (state or {})
        self.rule = rule_among(COEFFICIENT_RULES, settings)
        self.state["beta"] = self.state["beta"] if self.rule else kl_coef  # that of a resumed run

    @property
    def beta(self):
        return self.state["beta"]

    def update(self, kl, reward):
        """kl: of the step, nats per token; reward: its mean. If one is not finite, beta stays."""
        self.state["step"] += 1
        if not (math.isfinite(kl) and math.isfinite(reward)):
            return
        for name, value in (("kl", kl), ("reward", reward)):
            average = self.state[name]
            self.state[name] = value if average is None else 0.8 * average + 0.2 * value
        if self.rule:
            self.state["beta"] = COEFFICIENT_RULES[self.rule](self, self.settings, kl, reward)


# --------------------------------------------------------------------------------------------------
# 12. Evaluate and log.

def evaluate(policy, llm, tokenizer, problems, cfg):
    """Samples one response to each held-out problem, of the task and of other skills. Returns
    {"solved", "reward_mean", "retention_<skill>", ...} and samples (problem, text, reward)."""
    prompts = [problem["prompt_ids"] for problem in problems.held_out + problems.skills]
    responses = rollout(policy, llm, prompts, cfg, "evaluate", 1, cfg.eval_temperature)
    n = len(problems.held_out)
    texts, rewards, solved, means = score(responses[:n], problems.held_out, tokenizer, cfg.reward)
    metrics = {"solved": solved.float().mean().item(), "reward_mean": rewards.mean().item(),
               "response_length": sum(len(r.response_ids) for r in responses[:n]) / n, **means}
    if cfg.eval_samples > 1:  # pass@k of more samples, unbiased (arXiv:2107.03374)
        more = rollout(policy, llm, prompts[:n], cfg, "pass@k", cfg.eval_samples, cfg.temperature)
        _, _, solved, _ = score(more, problems.held_out, tokenizer, cfg.reward)
        n_wrong = (~solved).reshape(n, -1).sum(dim=1).tolist()
        for k in (2**i for i in range(cfg.eval_samples.bit_length())):
            missed = sum(math.comb(wrong, k) for wrong in n_wrong) / math.comb(cfg.eval_samples, k)
            metrics[f"pass_at_{k}"] = 1 - missed / n
    _, _, right, _ = score(responses[n:], problems.skills, tokenizer, reward_fn)
    for skill in sorted({problem["skill"] for problem in problems.skills}):
        of_skill = torch.tensor([problem["skill"] == skill for problem in problems.skills])
        metrics[f"retention_{skill}"] = right[of_skill].float().mean().item()
    return metrics, list(zip(problems.held_out, texts, rewards.tolist()))


@mechanics
def log_train(run, step, metrics):
    """Writes the metrics of a step to TensorBoard, and a line to the console."""
    for name, value in metrics.items():
        run.log("add_scalar", name if "/" in name else f"train/{name}", value, step)
    line = (f"Step {step} | Loss: {metrics['loss']:.4f} | Grad norm: {metrics['grad_norm']:.4f} "
            f"| Reward: {metrics['reward_mean']:.3f} | Equal: {metrics['frac_zero_std']:.0%} "
            f"| Length: {metrics['response_length']:.1f} | {metrics['time/total']:.2f} s")
    if "kl_penalty" in metrics:
        line += (f" | KL penalty: {metrics['kl_penalty']:.4f} "
                 f"| beta: {metrics['adaptive_kl/current_beta']:.3g}")
    print(line, flush=True)


def log_eval(run, step, metrics):
    """Writes an evaluation to TensorBoard, and a line to the console."""
    line = (f"Eval at step {step} | Solved: {metrics['solved']:.1%} "
            f"| Reward: {metrics['reward_mean']:.3f} | Length: {metrics['response_length']:.1f}")
    for name, value in metrics.items():
        run.log("add_scalar", f"eval/{name}", value, step)
        if name.startswith(("retention_", "pass_at_")):
            line += f" | {name.removeprefix('retention_')}: {value:.0%}"
    print(line, flush=True)


# --------------------------------------------------------------------------------------------------
# 13. The loop.

def check_log_probs(means, step, cfg, first_diff):
    """Raises RunStopped where the sampler's log-probs differ from the trainer's by much more than
    in step 1 (stale weights) or by 1 nat, and where in step 1 the reference is not the policy."""
    diff, limit = means["sampler_logprob_diff"], cfg.max_sampler_diff
    if limit == "auto":  # bf16 engines round by 0.01 to 0.1, GPUs multiply in TF32 in places
        rounding = 0.02 if cfg.bf16 else 1e-3 if cfg.device.type == "cpu" else 1e-2
        limit = 0.1 if cfg.bf16 and step == 1 else rounding + 4 * (first_diff or 0.0)
    text = f"step {step}: sampler and trainer disagree by {diff:.2g} nats per token"
    if limit is not None and not diff <= limit:
        if step > 1 or cfg.engine == "vllm" or not diff < 1:
            raise RunStopped(f"{text} (limit {limit:.2g}): the sampler has stale or other weights "
                             "(load_policy_into_vllm_instance) or draws otherwise; if on purpose, "
                             "set max_sampler_diff = None and see recipes/off_policy.patch")
        print(f"Warning: {text} with equal weights: draw_tokens and the loss do not agree; later "
              "steps may differ by four times that if max_sampler_diff is 'auto'")
    moved = math.sqrt(2 * means.get("kl_k2", 0.0))  # k2 is d^2 / 2: the root mean square of d
    if step == 1 and not moved < (0.5 if cfg.bf16 else 1e-4):
        raise RunStopped(f"policy and reference differ by {moved:.2g} nats before training; if on "
                         "purpose, delete this check")


def train(policy, tokenizer, llm, optimizer, problems, cfg, run, ref_model=None, kl_coef=0.0,
          watch=None):
    """Trains the policy for cfg.n_train_steps steps, with evaluations. ref_model=None is plain
    GRPO. watch: a function (step, metrics, samples) that looks on, from support/."""
    def evaluate_at(step):
        metrics, samples = evaluate(policy, llm, tokenizer, problems, cfg)
        log_eval(run, step, metrics)
        if watch is not None:
            watch(step, metrics, samples)
        return metrics

    state = run.state
    controller = KLController(kl_coef, cfg, state["controller"])
    state["before"] = state["before"] or evaluate_at(state["step"])

    for step in range(state["step"] + 1, cfg.n_train_steps + 1):
        # 1. Sample a group of responses to each prompt with the current policy.
        start = time.perf_counter()
        asked = problems_of_step(problems.train, step - 1,
                                 cfg.rollout_batch_size // cfg.group_size, cfg.seed)
        prompts = [problem["prompt_ids"] for problem in asked]
        responses = rollout(policy, llm, prompts, cfg, step, cfg.group_size, cfg.temperature)
        rollout_seconds = time.perf_counter() - start

        # 2. Score them. The advantages compare the responses of one group alone.
        texts, rewards, _, reward_means = score(responses, asked, tokenizer, cfg.reward)
        advantages, metrics = compute_group_normalized_advantages(
            rewards, cfg.group_size, 1e-6, cfg.normalize_by_std)

        # 3. Lay the step out in (B, T) microbatches, with the weight of each token in the loss.
        batch = make_batch(responses, advantages, policy.device)
        batch |= weights_of_tokens(batch, responses, cfg, ref_model is not None)
        microbatches = cut_microbatches(batch, cfg.max_tokens_per_microbatch)

        # 4. One optimiser step per epoch over the whole rollout. The rate is set here alone.
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(1.0, step / max(cfg.warmup_steps, 1))
        sums = Counter()
        for epoch in range(cfg.epochs_per_rollout):
            beta = controller.beta
            means = accumulate_gradients(policy, microbatches, cfg, ref_model, beta)
            if epoch == 0:
                check_log_probs(means, step, cfg, state["first_diff"])
            for parameter in policy.parameters():  # 0, not None: else no momentum and no decay
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
            means["grad_norm"] = getattr(norm, "full_tensor", lambda: norm)().item()
            sums.update(means)  # of a Counter: it adds
            if not (math.isfinite(means["loss"]) and math.isfinite(means["grad_norm"])):
                optimizer.zero_grad()
                state["skipped"] = [*state["skipped"], step]
                print(f"Warning: step {step} is skipped, its loss or gradient is not finite")
                break
            optimizer.step()
            optimizer.zero_grad()
            if ref_model is not None:
                controller.update(means["kl_per_token"], metrics["reward_mean"])

        # 5. Log, evaluate and save.
        seconds = time.perf_counter() - start
        n_tokens = batch["response_mask"].sum().item()
        metrics |= reward_means | {name: value / (epoch + 1) for name, value in sums.items()}
        metrics |= {"lr": optimizer.param_groups[0]["lr"],
                    "response_length": n_tokens / len(responses),
                    "truncated_frac": sum(not r.finished for r in responses) / len(responses),
                    "tokens_per_s": n_tokens / seconds, "skipped_steps": len(state["skipped"]),
                    "time/rollout": rollout_seconds, "time/total": seconds}
        if ref_model is not None:
            metrics["kl_penalty"] = metrics["adaptive_kl/raw_kl"] = metrics.pop("kl_penalty_mean")
            metrics["adaptive_kl/current_beta"] = beta
            metrics["kl_per_sequence"] = metrics["kl_per_token"] * metrics["response_length"]
        state |= {"step": step, "controller": controller.state,  # in place: run.save() writes it
                  "seconds": state["seconds"] + seconds,
                  "first_diff": state["first_diff"] or metrics["sampler_logprob_diff"]}
        log_train(run, step, metrics)
        if watch is not None:
            watch(step, metrics, (asked, texts, rewards, responses))
        is_last = run.stop or step == cfg.n_train_steps
        if is_last or cfg.eval_every and step % cfg.eval_every == 0:
            state["after"] = evaluate_at(step)
        if is_last or cfg.save_every and step % cfg.save_every == 0:
            run.save()
        if is_last:
            break


# --------------------------------------------------------------------------------------------------
# 14. The numbers.

# A preset fills the parameters of main() that are None. preset="auto" is "qwen3-1.7b" on a GPU or
# with a model_id of yours; otherwise "tiny", or without support/ "smollm2".
PRESETS = {
    "tiny": dict(  # the built-in model
        model_id="tiny", task="countdown_small", n_train_steps=150, rollout_batch_size=256,
        max_new_tokens=16, learning_rate=3e-4, warmup_steps=10, max_tokens_per_microbatch=8_192),
    "smollm2": dict(  # a small pretrained model that learns on a laptop
        model_id="HuggingFaceTB/SmolLM2-135M-Instruct", task="addition", n_train_steps=40,
        rollout_batch_size=128, max_new_tokens=12, learning_rate=2e-5, warmup_steps=3,
        max_tokens_per_microbatch=4_096),
    "qwen3-1.7b": dict(
        model_id="Qwen/Qwen3-1.7B", task="countdown", n_train_steps=80, rollout_batch_size=128,
        max_new_tokens=256, learning_rate=7e-6, warmup_steps=10, max_tokens_per_microbatch=4_096),
}


def main(
    # Model and data. None takes the preset's value, if it has one; any other value wins over it.
    preset="auto",  # a name in PRESETS; the log prints what it sets
    model_id=None,  # a checkpoint folder or a Hugging Face name
    task=None,  # a name in TASKS, a function like those, JSONL, or "user/dataset" on the hub
    eval_file=None,  # held-out problems, JSONL or "user/data::test"; None: a quarter of task's
    reward=reward_fn,  # see section 5; or a list of (function, weight)
    lora_rank=0,  # 16: LoRA adapters learn, the weights do not; needs peft and a higher rate
    seed=0,  # the same seed gives the same numbers on the same machine
    device="auto",  # "cpu", "cuda" or "cuda:1"; auto: a GPU if there is one

    # Rollout
    engine="auto",  # "vllm" or "transformers"; auto: vLLM on a GPU, if it is installed
    n_train_steps=None,  # rollouts, those before a resume included; 0: evaluate only
    rollout_batch_size=None,  # responses per step = prompts x group_size
    group_size=8,  # responses to one prompt
    max_new_tokens=None,  # longer responses are cut
    temperature=1.0,  # of sampling; all log-probs are taken at it
    enable_thinking=False,  # what the chat template is told, where it has such a mode
    gpu_mem_util=0.2,  # share of the GPU's memory for vLLM; from 1 on: GB of its cache, exactly
    max_sampler_diff="auto",  # nats per token between sampler and trainer; None: no limit

    # Advantages and loss
    normalize_by_std=True,  # False: the advantage of Dr. GRPO, whose average is "dr_grpo"
    mask_truncated=False,  # True: responses cut at max_new_tokens are left out of the loss
    loss_average="dapo",  # a name in AVERAGES: "dapo", "grpo", "dr_grpo"
    clip_range=0.2,  # of the ratio pi / old; (0.2, 0.28) clips less above 1
    importance_cap=2.0,  # cut of the sampler's correction; None: no correction, in the KL neither
    epochs_per_rollout=1,  # optimiser steps per rollout

    # KL penalty. README_KL.md has the measured tables.
    use_kl_penalty=False,  # True costs a copy of the model (none with LoRA) and a forward pass
    kl_coef=0.3,  # measured on the built-in model and on SmolLM2; smaller ones did hardly anything
    kl_estimator="k3",  # the value; "k1", "k2", "k3" have the same gradient; or one of EXACT
    kl_gradient="reverse",  # of KL(policy || reference), for k1 to k3; "as_written": as in papers
    kl_in="loss",  # "loss_to_go", "reward" (with "k1"): a token also pays for the KL of later ones
    kl_adaptation_method="none",  # a name in TERM_RULES or COEFFICIENT_RULES, or "a+b" of both
    kl_ratio_cap=2.0,  # largest pi / sampler in the KL's gradient; inf: unbiased, but unbounded
    kl_clip_threshold=None,  # nats, of clip (support/, None: 1.0) and clip_sound (None: 5.0)
    kl_target=0.1,  # nats per token; the next four are of rules in support/adaptive_rules.py
    dynamic_beta_decay=0.9, reward_threshold=0.8, beta_min=0.0, beta_schedule_steps=1000,
    reproduce_paper=False,  # True: run KL terms that support/ refuses since they do not work

    # Optimiser (AdamW on float32 weights)
    learning_rate=None, warmup_steps=None, weight_decay=0.0, max_grad_norm=1.0,
    max_tokens_per_microbatch=None,  # memory and speed, never the gradient
    gradient_checkpointing=False,  # True: less memory, more time
    bf16="auto",  # autocast; auto: on a GPU, and on a CPU with AMX
    frozen_in_bf16=False,  # True: what does not learn (reference, base of LoRA) in half the memory

    # Evaluation and logging
    eval_every=50,  # steps; 0: only before and after
    n_eval_problems=500,  # at most, of an eval_file too; 500: the 95 % interval is +-4.4 points
    eval_temperature=0.0,  # 0: greedy
    eval_samples=1,  # more: also pass@1, pass@2, pass@4 ... of that many samples at temperature
    out_dir="runs",  # each run gets a new folder in it, named by its time
    run_name=None,  # ends the folder's name
    save_every=50,  # steps between checkpoints; 0: only at the end and after Ctrl-C or SIGTERM
    resume=None,  # the folder of a run, to go on from its checkpoint; True: of the newest
):
    cfg = SimpleNamespace(**locals())
    MECHANICS.clear()
    support = find_support()
    if support:  # support/, 1 of 4: kind and range of each setting
        support.check_settings(cfg)
    print(choose(cfg))
    run = Run(cfg)
    if support:  # support/, 2 of 4: the lock of a run, memory, other processes, the built-in model
        support.check(run)
    run.find_checkpoint()

    # Load problems, model, reference, engine and optimiser.
    problems = load_problems(cfg)
    policy, tokenizer = init_policy(cfg.model_id, cfg.device)
    cfg.stop_token_ids = find_stop_tokens(policy, tokenizer)
    problems = Problems(*(with_prompt_ids(part, policy, tokenizer, cfg) for part in problems))
    if not cfg.stop_token_ids:
        raise InputError("no response could end; set the tokenizer's eos_token, and save it")
    if not (problems.train and problems.held_out):
        raise InputError("too few prompts fit: shorten them, lower max_new_tokens or set a preset")
    ref_model = None
    if cfg.use_kl_penalty and not cfg.lora_rank:  # with LoRA support/ makes it
        # If it is to move, keep it in run.state: a resumed run makes this one again, of model_id.
        ref_model = copy.deepcopy(policy).eval().requires_grad_(False)
    if support:  # support/, 3 of 4: LoRA, faster mechanics, compared with those above, processes
        ref_model = support.prepare(policy, ref_model, tokenizer, problems, cfg)
    else:
        print("support/ is not here: slower, more memory, no LoRA, no warnings, no report")
    if cfg.gradient_checkpointing:
        policy.train().gradient_checkpointing_enable()
    if "token_statistics" not in MECHANICS:  # all logits of a microbatch are held at once
        most = LOGITS_AT_ONCE // policy.config.get_text_config().vocab_size
        cfg.max_tokens_per_microbatch = min(most, cfg.max_tokens_per_microbatch)
    llm = None
    if cfg.engine == "vllm":
        longest = cfg.max_new_tokens + max(len(x["prompt_ids"]) for part in problems for x in part)
        llm = init_vllm(cfg.model_id, cfg.seed, longest, cfg.gpu_mem_util, cfg.bf16)
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, cfg.learning_rate, betas=(0.9, 0.95),
                                  weight_decay=cfg.weight_decay, fused=True)
    run.open(policy, optimizer)
    watch = support.watch(run) if support else None  # 4 of 4: warnings, samples, report

    # Train. The first Ctrl-C lets the step finish, the second does not.
    def stop(number, frame):
        if run.state["before"] is None:  # in the first evaluation: there is nothing to keep yet
            raise KeyboardInterrupt
        run.stop = number
        signal.signal(number, signal.default_int_handler)
        print(f"\n{signal.Signals(number).name}: stopping after this step; again: now", flush=True)

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        train(policy, tokenizer, llm, optimizer, problems, cfg, run, ref_model,
              cfg.kl_coef if cfg.use_kl_penalty else 0.0, watch)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    # Save the model, and report.
    weights = {name: tensor.detach() for name, tensor in weights_of(policy)}
    if run.is_first:
        policy.save_pretrained(run.folder / "model", state_dict=weights)
        tokenizer.save_pretrained(run.folder / "model")
    result = {"before": run.state["before"], "run_folder": run.folder,
              "after": run.state["after"] or run.state["before"]}  # None after 0 steps
    if watch is not None:  # before and after, the KL by position and token, pictures
        watch.report(result, policy, ref_model, llm, tokenizer, problems)
    run.log("close")
    print(f"the model: {run.folder}/model | the curves: tensorboard --logdir {cfg.out_dir}")
    if run.stop and run.state["step"] < cfg.n_train_steps:
        print(f"stopped after step {run.state['step']} of {cfg.n_train_steps}; to go on, add "
              f"--resume {run.folder}, or resume={str(run.folder)!r} in a script")
        raise SystemExit(128 + run.stop)
    return result


# --------------------------------------------------------------------------------------------------
# 15. Quick tests.  They take a second or two and run before main().

def cfg_with(**changes):
    """The settings of a run with main()'s defaults and these changes, for tests."""
    fixed = dict(preset="smollm2", max_new_tokens=None, device="cpu", bf16=False,
                 stop_token_ids=(1,), task=len)  # any function: no problem is loaded
    cfg = KLSettings(**fixed | changes)
    choose(cfg)
    return cfg


def expected_kl_gradient(logits, ref_logits, old_logits, kl):
    """The expected gradient of the KL term. Row i: token i, with the old policy's probability."""
    n = len(logits)
    logits = logits.clone().requires_grad_()
    old_log_probs = old_logits.log_softmax(0)[None]
    x = statistics_of_logits(logits.expand(n, n), torch.arange(n), 1.0, ref_logits.expand(n, n))
    loss, _ = compute_loss(torch.zeros(1, 1), x.log_probs[None], old_log_probs, 0.2,
                           x.ref_log_probs[None], 1.0, None, kl, x.exact_kl[None])
    return torch.autograd.grad((loss * old_log_probs.exp()).sum(), logits)[0]


def test_kl_gradient_matches_enumeration():
    generator = torch.Generator().manual_seed(0)
    logits, ref, old = torch.randn(3, 7, dtype=torch.float64, generator=generator)
    leaf = logits.clone().requires_grad_()
    reverse_kl = (leaf.softmax(0) * (leaf.log_softmax(0) - ref.log_softmax(0))).sum()
    by_hand = torch.autograd.grad(reverse_kl, leaf)[0]
    for estimator in ("k1", "k2", "k3", "exact"):
        for sampled_by in (logits, old):  # on-policy and off-policy
            kl = KLSettings(kl_estimator=estimator, kl_ratio_cap=math.inf)
            ours = expected_kl_gradient(logits, ref, sampled_by, kl)
            torch.testing.assert_close(ours, by_hand, rtol=0, atol=1e-12)
    kl = KLSettings(kl_estimator="k1", kl_gradient="as_written")
    as_written = expected_kl_gradient(logits, ref, logits, kl)
    assert as_written.abs().max() < 1e-12  # differentiating k1 itself penalises nothing


def test_reward_and_advantages_of_two_groups():
    rewards = [reward_fn(f"<answer>{text}</answer>", {"answer": "1"}) for text in (1, 2, "", "")]
    assert rewards == [1.0, 0.1, 0.0, 0.0]
    advantages, _ = compute_group_normalized_advantages(torch.tensor(rewards), 2, 1e-6, True)
    assert advantages[0] > 0 > advantages[1] and not advantages[2:].any()


def gradient_of_a_step(max_tokens, cfg):
    """The gradient of one step on a small random model, cut into microbatches of max_tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    torch.manual_seed(0)
    policy = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)).eval()
    ref_model = copy.deepcopy(policy).requires_grad_(False)
    ref_model.lm_head.weight.data += 0.05 * torch.randn(32, 32)
    responses = [Response(list(range(n % 5 + 1)), [(5 * n + i * i) % 32 for i in range(n)],
                          [-3.4] * n, True) for n in (1, 9, 4, 6, 7, 2, 8, 3)]
    batch = make_batch(responses, torch.linspace(-1, 1, 8), "cpu")
    batch["weights"] = AVERAGES[cfg.loss_average](batch["response_mask"].float(), 9)
    for rows in cut_microbatches(batch, max_tokens):
        grpo_microbatch_step(policy, rows, cfg, ref_model, 0.1)
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def test_gradient_does_not_depend_on_microbatch_size():
    for changes in (dict(loss_average="grpo"), dict(kl_estimator="exact", kl_in="loss_to_go"),
                    dict(loss_average="dr_grpo", kl_estimator="k1", kl_in="reward")):
        cfg = cfg_with(**changes)
        whole = gradient_of_a_step(10_000, cfg)
        for n in (60, 1):
            torch.testing.assert_close(gradient_of_a_step(n, cfg), whole, rtol=0, atol=1e-6)


def test_functions():
    """Runs every quick test above. One that no longer holds is reported, and training goes on."""
    print("=== Running Quick Tests ===")
    for name in [name for name in globals() if re.match("test_(?!functions)", name)]:
        title = name.removeprefix("test_").replace("_", " ")
        try:
            globals()[name]()
            print(f"ok: {title}")
        except Exception as error:  # an edit above
            line = (error.__traceback__.tb_next or error.__traceback__).tb_lineno
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:80]
            print(f"FAILED: {title} no longer holds (line {line}: {reason})")


# --------------------------------------------------------------------------------------------------
# 16. Around a run.  Its folder, the settings that were not given, the command line.

class Run:
    """A run's folder, with settings, TensorBoard's log and the last two checkpoints; and its state,
    which is what one step hands to the next besides the weights."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.state = {"step": 0, "seconds": 0.0, "skipped": [], "first_diff": None,
                      "controller": None, "before": None, "after": None}
        self.saved = None  # the content of the checkpoint to go on from
        self.writer = None  # TensorBoard's, in the first of torchrun's processes
        self.is_first = os.environ.get("RANK", "0") == "0"
        self.stop = 0  # the number of SIGINT or SIGTERM: end after this step
        values = {name: getattr(cfg, name) for name in inspect.signature(main).parameters}
        self.settings = json.loads(json.dumps(
            values, default=lambda x: getattr(x, "__name__", re.sub(" at 0x.*", "", str(x)))))
        name = f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}_{cfg.run_name or ''}".strip("_")
        self.folder = Path(cfg.out_dir) / name
        if cfg.resume:
            newest = max(Path(cfg.out_dir).glob("*/settings.json"), default=Path("none/none"))
            self.folder = newest.parent if cfg.resume is True else Path(cfg.resume)

    def log(self, what, *values):
        """One call of TensorBoard's writer, in the first process."""
        try:
            if self.writer is not None:
                getattr(self.writer, what)(*values)
        except OSError as error:  # the disk is full, say: the run goes on
            self.writer = None
            print(f"Warning: nothing more is logged: {error}", flush=True)

    def save(self):
        """Writes weights, AdamW's moments and the state to checkpoint_<step>_<checksum>.pt, which
        gets this name when it is on the disk: a checkpoint is whole or it is not there."""
        from torch.distributed.checkpoint.state_dict import get_state_dict
        model, optimizer = get_state_dict(self.policy, self.optimizer, options=self.options)
        if not self.is_first:
            return
        self.log("flush")
        try:
            with open(self.folder / "unfinished", "wb+") as file:
                torch.save({"model": model, "optimizer": optimizer, "state": self.state}, file)
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
                checksum = hashlib.file_digest(file, "sha256").hexdigest()[:16]
            name = f"checkpoint_{self.state['step']:08d}_{checksum}.pt"
            (self.folder / "unfinished").replace(self.folder / name)
        except (OSError, RuntimeError) as error:
            (self.folder / "unfinished").unlink(missing_ok=True)
            print(f"Warning: no checkpoint of step {self.state['step']}: {error}", flush=True)
        for old in sorted(self.folder.glob("checkpoint_*.pt"))[:-2]:
            old.unlink()

    def find_checkpoint(self):
        """To resume: prints which settings have changed, and reads the newest whole checkpoint."""
        if not self.cfg.resume:
            return
        path = self.folder / "settings.json"
        if not path.is_file():
            raise InputError(f"resume: there is no run in {self.folder}; give the folder of one")
        for name, before in json.loads(path.read_text("utf-8")).items():
            if name != "resume" and self.settings.get(name, before) != before:
                print(f"resume: {name} was {before!r}, now it is {self.settings[name]!r}")
        for path in sorted(self.folder.glob("checkpoint_*.pt"), reverse=True):
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest()[:16] in path.name:
                    file.seek(0)
                    self.saved = torch.load(file, map_location="cpu", weights_only=True)
                    self.state = self.saved["state"]
                    break
            print(f"Warning: {path} is damaged; going back to the checkpoint before it")
        if self.saved is None and [*self.folder.glob("*.pt"), *self.folder.glob("model")]:
            raise InputError(f"resume: {self.folder} has no whole checkpoint; begin a new run")

    def open(self, policy, optimizer):
        """Loads the checkpoint if there is one. Makes the folder and writes settings.json."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
        self.policy, self.optimizer = policy, optimizer
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        # With LoRA the adapters only. Of several processes the first one has the whole state.
        self.options = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False,
                                        ignore_frozen_params=True)
        if self.saved is not None:
            groups = [dict(group) for group in optimizer.param_groups]
            set_state_dict(policy, optimizer, model_state_dict=self.saved["model"],
                           optim_state_dict=self.saved["optimizer"], options=self.options)
            for group, values in zip(optimizer.param_groups, groups):
                group.update(values)  # the learning rate and the like are those of now
            self.saved = None
            print(f"resumed: {self.folder} after step {self.state['step']}")
        if self.is_first:
            from torch.utils.tensorboard import SummaryWriter
            # What was logged after the checkpoint is dropped, since it will be logged again.
            first = self.state["step"] + (self.state["before"] is not None)
            self.writer = SummaryWriter(self.folder, purge_step=first)  # makes the folder
            (self.folder / "settings.json").write_text(json.dumps(self.settings, indent=1), "utf-8")


def choose(cfg):
    """Puts values into what is None or "auto" in cfg. Returns two lines for the log."""
    has_support = find_support() is not None
    auto_device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg.device = torch.device(auto_device if cfg.device == "auto" else cfg.device)
    on_gpu = cfg.device.type == "cuda"
    if on_gpu and cfg.device.index is not None:
        torch.cuda.set_device(cfg.device)
    name = cfg.preset if cfg.preset != "auto" else (
        "qwen3-1.7b" if on_gpu or cfg.model_id else "tiny" if has_support else "smollm2")
    check_known("preset", name, ["auto", *PRESETS])
    preset = {key: value for key, value in PRESETS[name].items() if vars(cfg).get(key) is None}
    vars(cfg).update(preset)
    if cfg.bf16 == "auto":
        cfg.bf16 = on_gpu or torch.cpu.get_capabilities().get("amx_bf16", False)
    if cfg.engine == "auto":
        cfg.engine = "vllm" if on_gpu and importlib.util.find_spec("vllm") else "transformers"
    Float32Head.rounds = cfg.engine == "vllm" and cfg.bf16
    check_kl_names(cfg)
    check_known("loss_average", cfg.loss_average, AVERAGES)
    if cfg.group_size < 2 or cfg.rollout_batch_size % cfg.group_size:
        raise InputError(f"group_size = {cfg.group_size} must be 2 or more, and divide "
                         f"rollout_batch_size = {cfg.rollout_batch_size}; change one of them")
    if not has_support and (cfg.lora_rank or cfg.frozen_in_bf16 or cfg.model_id == "tiny"):
        raise InputError("lora_rank, frozen_in_bf16 and the built-in model need support/; add it")
    if not (has_support or callable(cfg.task) or cfg.task in TASKS or Path(cfg.task).is_file()):
        raise InputError(f"task = {cfg.task!r} is no file; give one, and a model_id, or support/")
    precision = "bf16 autocast over float32 weights" if cfg.bf16 else "float32"
    engine = "vllm, which draws the tokens itself" if cfg.engine == "vllm" else cfg.engine
    taken = ", ".join(f"{key} = {value!r}" for key, value in preset.items()) or "nothing taken"
    return (f"preset {name}: {taken}\n"
            f"{cfg.device}, {torch.get_num_threads()} threads | {precision} | engine: {engine}")


def value_of(text):
    """"50" -> 50, "(0.2, 0.28)" -> a tuple, "no" -> False. What is no Python value stays a text."""
    switches = dict(yes=True, true=True, on=True, no=False, false=False, off=False)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return switches.get(text.lower(), text)


def settings_from(arguments):
    """["--n_train_steps", "50"] -> {"n_train_steps": 50}. --help shows the parameters of main()."""
    if {"-h", "--help"} & {*arguments}:
        print(inspect.getsource(main).partition("\n):")[0] + "\n)")
        sys.exit()
    names = [*inspect.signature(main).parameters]
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    for name in names:  # without a value it is True, as in --use_kl_penalty
        parser.add_argument(f"--{name}", type=value_of, nargs="?", const=True)
    settings, others = parser.parse_known_args(arguments)
    if others:
        name = others[0].partition("=")[0]
        raise InputError(f"{name} is not --name value; {nearest(name.removeprefix('--'), names)}")
    return vars(settings)


if __name__ == "__main__":
    try:
        settings = settings_from(sys.argv[1:])
        test_functions()
        main(**settings)
    except (InputError, RunStopped, KeyboardInterrupt) as error:
        reason = " ".join(str(error).split()) or "interrupted"
        print(f"starter.py stopped: {reason}", file=sys.stderr)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
