# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.19.0", "tensorboard==2.21.0", "peft==0.21.2",
#                 "matplotlib==3.11.2"]
# ///
"""starter.py: GRPO with an optional KL penalty, in one file that you can read, copy and change.

    python starter.py                       quick tests, then main(): evaluate, train, evaluate
    python starter.py --n_train_steps 50    with another value for a parameter of main()
    python starter.py --model_id ID --task FILE.jsonl --learning_rate 1e-5 --max_new_tokens 64
                                            the first two are what a lone copy of this file needs

One step of training, in the names of this file:

    responses = rollout(policy, ...)                        G responses to each of P prompts
    texts, rewards = score(responses, ...)                  (P * G,)
    advantages = compute_group_normalized_advantages(rewards, ...)
    batch = make_batch(responses, advantages, ...)          (B, T) tensors
    batch["weights"] = weights_of_tokens(batch, ...)        of the mean over the whole step
    microbatches = cut_microbatches(batch, ...)
    for each epoch over this rollout (one by default):
        for microbatch in microbatches:
            grpo_microbatch_step(policy, microbatch, ...)   log-probs, loss, backward pass
        optimizer.step()

train() in section 13 takes these steps; the loop over microbatches is add_up_gradients() in section
11; main() in section 14 has the settings. Sections 1 to 10 follow the data: problems,
model, rollout, reward, advantages, batch, log-probs, KL penalty, loss, evaluation. Section 11,
mechanics, is about how models, engines and processes are run.

Shapes: P prompts, G responses to each, n responses in all, B rows of a batch (mostly one a
response), T columns, N tokens, V tokens in the vocabulary. Four log-probs of a sampled token:
policy (pi, of the weights that are trained), old (the same before this rollout's first update),
sampler (as the engine that drew the token computed it), ref (of the reference).

GRPO (arXiv:2402.03300) samples a group of responses to each prompt, scores them with a rule, and
makes the responses that beat their group's mean more likely. Unlike in the paper the KL penalty is
off by default. The loss is a mean over all response tokens of the step (DAPO, arXiv:2503.14476).
Each token is weighted by old / sampler, at most 2: this is 1, up to rounding, unless the sampler's
engine computes log-probs in another way. The KL term has the value of k3, and its mean gradient at
each token is that of KL(policy || reference).

Who calls whom, with the numbers of the sections:

    train 13 > rollout 3 > sample 11 > rollout_with_transformers 3 > decode 3 > start_decoding 11
    train 13 > add_up_gradients 11 > grpo_microbatch_step 9
                 > token_statistics 11 > statistics_of_logits 7
                 > compute_loss 9 > kl_in_loss 8, ppo_loss 9

Where the other folders lie beside this file, their faster functions with the same gradient take
the place of those of section 11, and of no others: what you change here is what runs. What they
add besides (kinds of files, odd models, agents, async rewards) is called in sight, by
find_support().

Copyright (c) 2026 the starter.py authors. SPDX-License-Identifier: MIT
"""

import os

# Libraries read these while they are imported. A value from outside wins.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # "true" warns in each new process
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # torch's idle threads soon leave their cores
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # memory in large pages, which are quicker

import argparse
import ast
import contextlib
import copy
import difflib
import functools
import importlib.util
import inspect
import io
import json
import math
import pickle
import random
import re
import shutil
import sys
import time
import unicodedata
import zlib
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import NamedTuple

import numpy
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves


class InputError(ValueError):
    """A mistake that the caller can correct. The message is one sentence: value and remedy."""


class RunStopped(RuntimeError):
    """The run cannot go on, or its numbers would be wrong. The message says what to check."""


def check_known(name, value, options):
    """Raises InputError for a value that is not one of the options, which are texts."""
    if value not in options:
        near = difflib.get_close_matches(str(value), options)
        raise InputError(f"{name} = {value!r} is not known; use one of {near or sorted(options)}")


def find_support():
    """Returns the module support.attach, or None if that folder does not lie beside this file."""
    if not Path(__file__).with_name("support").is_dir():
        return None
    # support/ says `import starter`, and means this module, also if it is a copy with another name
    own = sys.modules.get(__name__)
    if sys.modules.setdefault("starter", own) is not own:
        raise InputError(
            f"{__name__} and starter are both imported, and support/ serves one of them; import one"
        )
    from support import attach

    return attach


# --------------------------------------------------------------------------------------------------
# 1. Problems.  In: the name of a task or file. Out: problems to train on, and held-out ones.
#
# A problem is a dict with "prompt" and whatever the reward needs; a file must have "answer", too. A
# task is a function from the settings of main() to (problems to train on, held-out ones), such as
#     def sums(cfg):
#         train, held_out = [], []
#         for a in range(50):
#             for b in range(50):
#                 part = held_out if is_held_out(a, b) else train
#                 part.append({"prompt": f"{a} + {b}", "answer": a + b})
#         random.Random(0).shuffle(held_out)  # its first n_eval_problems are asked
#         return train, held_out

TASKS = {}  # name: task; add yours here, or give the function itself. support/tasks.py adds some.


class Problems(NamedTuple):
    train: list
    held_out: list
    other_skills: list = ()  # asked in evaluations only, to show what training forgets


def is_held_out(*key):
    """Whether the problem that is known by this key, such as its prompt, is in the fixed quarter of
    all problems that is never trained on."""
    return zlib.crc32(repr(key).encode()) % 4 == 0


def read_jsonl(text, path):
    """The text of a file -> ("line 1", what it holds) for each line that is not blank."""
    for n, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(
                f"{path}, line {n} is no JSON ({error.msg}, at character {error.colno}); mend it"
            ) from error
        yield f"line {n}", row


def read_problems(path):
    """A JSONL file -> its problems. "prompt" is a text or a list of chat messages, "answer" a text,
    a number, or a list of right answers. Other keys stay, for a reward of your own."""
    support = find_support()
    if support:  # other kinds of files and data sets too, with the same two keys in the end
        rows = support.read_rows(path)
    else:
        rows = read_jsonl(Path(path).read_text("utf-8-sig"), path)
    problems = []
    for place, row in rows:
        if not isinstance(row, dict) or not {"prompt", "answer"} <= row.keys():
            raise InputError(
                f"{path}, {place} is no JSON object with 'prompt' and 'answer'; mend it"
            )
        problems.append(row)
    return problems


def each_prompt_once(problems):
    """Returns the first problem of each prompt. Repeated ones would count as more evidence."""
    first = {}
    for problem in problems:
        first.setdefault(repr(problem["prompt"]), problem)
    if len(first) < len(problems):
        print(f"{len(first)} of {len(problems)} held-out prompts differ: each is asked once")
    return list(first.values())


def problems_of_files(cfg):
    """Problems of cfg.task and cfg.eval_file; without an eval_file a quarter is held out."""
    problems = read_problems(cfg.task)
    if cfg.eval_file is not None:
        held_out = read_problems(cfg.eval_file)
    else:
        held_out = [problem for problem in problems if is_held_out(problem["prompt"])]
        problems = [problem for problem in problems if not is_held_out(problem["prompt"])]
    held_out = each_prompt_once(held_out)
    if len(held_out) > cfg.n_eval_problems:  # a fixed sample: a file may be sorted by difficulty
        held_out = random.Random(0).sample(held_out, cfg.n_eval_problems)
    return problems, held_out


def load_problems(cfg):
    """Returns the Problems of cfg.task: a function, a name in TASKS, or the path of a file. A file
    retention.jsonl in the model's folder holds those of other skills."""
    task = cfg.task
    if not callable(task):
        task = TASKS.get(task, problems_of_files)
    train, held_out = task(cfg)
    other_skills = []
    path = Path(cfg.model_id, "retention.jsonl")
    if path.is_file():
        other_skills = read_problems(path)
        if not all("skill" in problem for problem in other_skills):
            raise InputError(f"{path}: each line needs a 'skill', the name of what it asks for")
    return Problems(train, held_out[: cfg.n_eval_problems], other_skills)


def problems_of_step(problems, step, n, seed):
    """Returns the n problems of this step (from 0). The list is shuffled anew for each pass over
    it; where a pass ends within a step, a problem can come twice in that step. The choice depends
    only on step, n and seed, so that a resumed run sees the same ones."""
    pass_number, start = divmod(step * n, len(problems))
    upcoming = []  # from the beginning of this pass on
    while len(upcoming) < start + n:
        rng = random.Random(f"{seed} {pass_number}")
        upcoming += rng.sample(problems, len(problems))
        pass_number += 1
    return upcoming[start : start + n]


# --------------------------------------------------------------------------------------------------
# 2. Model and prompts.  In: a checkpoint folder or Hugging Face name; problems. Out: policy and
# tokenizer; problems with the token ids of their prompts.
#
# The model

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


def autocast(device, precision):
    """Within it the layers compute in this precision. The weights and the loss are float32."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "float32")


class Float32Head(torch.nn.Linear):
    """An LM head whose logits are float32 under autocast, too: bf16 rounds them by up to 0.06."""

    def forward(self, hidden):
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.to(self.weight.dtype))


def make_logits_float32(model):
    """Gives the model's LM head another forward(), with the same weights."""
    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        head.__class__ = Float32Head


@contextlib.contextmanager
def loading(model_id):
    """Raises InputError for whatever transformers raises over files that others wrote."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        hint = "" if Path(model_id).is_dir() else "is no folder, and "
        raise InputError(
            f"{str(model_id)!r} {hint}cannot be loaded ({' '.join(str(error).split()):.300}); "
            "give a folder written by save_pretrained, or a Hugging Face name"
        ) from error


def check_loaded(model_id, policy, keys):
    """Raises InputError where transformers has loaded another model than the checkpoint holds."""
    if keys["missing_keys"]:  # transformers has given random numbers to them
        raise InputError(
            f"{str(model_id)!r} cannot be loaded: it holds no weights for "
            f"{sorted(keys['missing_keys'])[:3]}; give a whole checkpoint"
        )
    if hasattr(policy.config, "quantization_config"):
        raise InputError(
            f"{str(model_id)!r} holds quantised weights, which cannot be trained and saved; give "
            "the checkpoint from which it was made"
        )


def init_policy(model_id, device):
    """Returns (policy, tokenizer). The policy is in float32, whatever the checkpoint's dtype: bf16
    keeps 8 bits of a weight, and most updates at learning rates below 1e-5 are smaller."""
    from transformers import AutoTokenizer

    with loading(model_id):
        policy, keys = load_model(model_id, device)
        tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=False)
    check_loaded(model_id, policy, keys)
    unread = sorted(keys["unexpected_keys"])
    if unread:
        print(f"{model_id} holds {len(unread)} weights that its model lacks: {unread[:3]}")
    make_logits_float32(policy)
    support = find_support()
    if support:  # what is odd in some models and tokenizers
        support.mend_model(policy, tokenizer, unread)
    return policy, tokenizer


def init_teacher(ref_model_id, tokenizer, device, longest):
    """Returns the model of a checkpoint, frozen, as the reference of the KL penalty. It may be of
    another size or class than the policy, but must know the same tokens by the same ids, and read
    the longest prompt with its response."""
    teacher, its_tokenizer = init_policy(ref_model_id, device)
    if its_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"ref_model_id = {str(ref_model_id)!r} has other tokens than the policy, so that its "
            "log-probs are of other texts; take a teacher of the same family"
        )
    if longest > context_length(teacher):
        raise InputError(
            f"ref_model_id = {str(ref_model_id)!r} reads {context_length(teacher)} tokens, and the "
            f"longest prompt with its response has {longest}; lower max_new_tokens, or take "
            "another teacher"
        )
    return teacher.requires_grad_(False)


def enable_checkpointing(policy):
    """In train mode the layers then keep nothing but their inputs for the backward pass."""
    if hasattr(policy, "activation_checkpointing_enable"):  # its name from transformers 5.24 on
        policy.activation_checkpointing_enable()
    else:
        policy.gradient_checkpointing_enable()


def set_train_mode_of_checkpointed_layers(policy):
    """Gradient checkpointing runs layers again in the backward pass, if they are in train mode. All
    other modules stay in eval mode: dropout would change the log-probs at random."""
    for module in policy.modules():
        can_be_run_again = hasattr(module, "gradient_checkpointing")
        module.training = can_be_run_again  # module.train() would reach those inside of it, too
        if can_be_run_again:
            turn_dropout_off(module)


def turn_dropout_off(layer):
    """In train mode the layers of some families, such as OPT, drop out by themselves."""
    for name, value in vars(layer).items():
        if "drop" in name and isinstance(value, float):
            setattr(layer, name, 0.0)


def find_stop_tokens(policy, tokenizer):
    """Returns the ids that end a response: EOS, and those in generation_config, such as the end of
    a turn."""
    stop_tokens = policy.generation_config.eos_token_id
    if not isinstance(stop_tokens, list):
        stop_tokens = [stop_tokens]
    return sorted({*stop_tokens, tokenizer.eos_token_id} - {None})


# Prompts


def begun_answer(problem):
    """Returns the assistant's words at the end of a chat, where the response goes on, or "":
    [{"role": "user", ...}, {"role": "assistant", "content": "<answer>"}] -> "<answer>"."""
    prompt = problem.get("prompt")
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        return prompt[-1]["content"]
    return ""


def text_of_prompt(problem, tokenizer, enable_thinking):
    """A problem's prompt, a text or chat messages -> its text in the tokenizer's chat template,
    which is also told the problem's "tools" and "chat_template_kwargs"."""
    prompt = problem["prompt"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    begun = begun_answer(problem)
    goes_on = begun.strip() != ""
    if prompt[-1]["role"] == "assistant" and not goes_on:
        prompt = prompt[:-1]
    options = {"enable_thinking": enable_thinking, **(problem.get("chat_template_kwargs") or {})}
    text = tokenizer.apply_chat_template(
        prompt,
        tools=problem.get("tools"),
        tokenize=False,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        **options,
    )
    if not (goes_on and text.endswith(begun)):  # some templates cut blanks at the end of a message
        text += begun[len(begun.rstrip()) :]
    return text


def ids_of_prompt(problem, tokenizer, enable_thinking):
    """A problem's prompt -> token ids, in the tokenizer's chat template if it has one."""
    if tokenizer.chat_template is not None:
        text = text_of_prompt(problem, tokenizer, enable_thinking)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = tokenizer(problem["prompt"])["input_ids"]
    if ids and ids[-1] == tokenizer.eos_token_id:  # some put EOS behind each text
        ids = ids[:-1]
    if not ids:
        raise ValueError("it has no tokens")
    return ids


def context_length(policy):
    """Returns how many tokens the model can read, prompt and response together."""
    config = policy.config.get_text_config()
    length = getattr(config, "max_position_embeddings", None) or -1
    return length if length > 0 else sys.maxsize  # some say -1 for no limit


def with_prompt_ids(problems, policy, tokenizer, cfg):
    """Returns the problems that fit into the model's context, each with the token ids of its prompt
    under "prompt_ids". Responses are never tokenised: the sampler's ids are used as they are."""
    context = context_length(policy)
    fitting = []
    for problem in problems:
        try:
            ids = ids_of_prompt(problem, tokenizer, cfg.enable_thinking)
        except Exception as error:  # whatever others' templates raise
            raise InputError(
                f"no prompt for this tokenizer can be made of {problem['prompt']!r:.200} "
                f"({error!s:.200}); give texts where there is no chat template, and no system "
                "message where it has no such role"
            ) from error
        if len(ids) + cfg.max_new_tokens <= context:
            fitting.append({**problem, "prompt_ids": ids})
    if len(fitting) < len(problems):
        print(
            f"{len(problems) - len(fitting)} of {len(problems)} prompts are left out: with "
            f"max_new_tokens = {cfg.max_new_tokens} they do not fit into {context} tokens"
        )
    return fitting


def tokenized(problems, policy, tokenizer, cfg):
    """Returns the Problems that fit, each with its "prompt_ids". Raises InputError if none do."""
    problems = Problems(*[with_prompt_ids(part, policy, tokenizer, cfg) for part in problems])
    if not problems.train or not problems.held_out:
        n_different = len({repr(problem["prompt"]) for problem in problems.train})
        raise InputError(
            f"task = {cfg.task!r} has {len(problems.train)} prompts to train on ({n_different} "
            f"different ones), {len(problems.held_out)} held out; give more different or shorter "
            "ones, an eval_file, or a lower max_new_tokens"
        )
    return problems


# --------------------------------------------------------------------------------------------------
# 3. Rollout.  In: prompts. Out: group_size responses to each, with each sampled token's log-prob.
#
# rollout() calls, by way of sample() in section 11, one of two engines: rollout_with_vllm, or
# rollout_with_transformers. The latter calls decode(), which draws the tokens one by one, from the
# logits that start_decoding() in section 11 gives it.

TOKENS_AT_ONCE = 65_536  # of prompts and responses that are decoded together, at most


class Request(NamedTuple):
    prompt_ids: list
    seed: int  # by which the tokens are drawn, whatever else is sampled
    max_new_tokens: int


class Response(NamedTuple):
    prompt_ids: list
    response_ids: list  # as the sampler gave them; the token that ended it included
    # Of response_ids, at the sampling temperature; if greedy, at 1. nan: a token that the policy
    # did not write but read, such as a tool's reply to an agent.
    log_probs: list
    finished: bool  # ended by a stop token; otherwise cut at max_new_tokens
    reward: float | None = None  # where an agent has given one
    others: tuple = ()  # Responses: an agent's further conversations, rows of their own in a batch

    def n_written(self):
        """Tokens that the policy wrote."""
        n = len(self.response_ids) - sum(map(math.isnan, self.log_probs))
        return n + sum(other.n_written() for other in self.others)


def seed_everything(cfg, purpose):
    """Returns the seed of a step or other purpose, such as "evaluate". Seeds the generators of
    random, numpy and torch with it, for rewards that draw numbers."""
    seed = random.Random(f"{cfg.seed} {purpose}").getrandbits(32)  # torch's CPU reads 32 bits
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def requests_for(prompts, cfg, seed, group_size):
    """P lists of prompt ids -> P * group_size Requests, group after group."""
    prompts = [prompt_ids for prompt_ids in prompts for _ in range(group_size)]
    return [Request(ids, seed + i, cfg.max_new_tokens) for i, ids in enumerate(prompts)]


def rollout(policy, llm, problems, cfg, purpose, group_size, temperature, agent=None):
    """P problems -> P * group_size Responses of the policy as it is now, group after group. An
    agent talks with the policy in several turns; without one the response follows the prompt."""
    seed = seed_everything(cfg, purpose)
    if llm is not None:
        load_policy_into_vllm_instance(policy, llm)
        forget_prompts(llm)
    if agent is not None:
        return find_support().play(agent, policy, llm, problems, cfg, seed, group_size, temperature)
    prompts = [problem["prompt_ids"] for problem in problems]
    requests = requests_for(prompts, cfg, seed, group_size)
    return sample(policy, llm, requests, cfg, temperature)


def scale_logits(logits, temperature):
    """(B, V) logits of the model -> (B, V) float32 logits, by which tokens are drawn and scored;
    vLLM draws by itself."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # float64 stays
    if temperature > 0:  # what is greedy is scored at 1
        logits = logits / temperature
    # To forbid tokens: logits = logits.index_fill(1, ids, -math.inf); ids: a tensor on its device
    return logits


def draw_from(probs, uniform):
    """(B, V) probabilities, (B, 1) uniform numbers in [0, 1) -> (B, 1) tokens.

    With probabilities [0.2, 0.5, 0.3] a number below 0.2 draws token 0, one below 0.7 token 1
    (inverse transform sampling). torch.multinomial would draw other tokens for a row on another
    device, or among other rows."""
    if probs.device.type != "mps":  # mps has no float64
        probs = probs.double()
    cumulative = probs.cumsum(dim=1)
    tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return tokens.clamp(max=probs.shape[1] - 1)


def draw_tokens(logits, uniform, temperature):
    """(B, V) logits, (B, 1) uniform numbers in [0, 1) -> (B, 1) tokens, (B, 1) log-probs.

    If you cut the probabilities, as top-k does, return the log-probs of what you draw from: the
    loss weights tokens by old / sampler, and max_sampler_diff bounds how far these may differ."""
    probs = scale_logits(logits, temperature).softmax(dim=1)
    if temperature == 0:
        tokens = probs.argmax(dim=1, keepdim=True)
    else:
        tokens = draw_from(probs, uniform)
    return tokens, probs.gather(1, tokens).log()


def decode(policy, requests, uniform, cfg, temperature):
    """B Requests, (B, T) uniform numbers -> B Responses of at most T tokens."""
    prompts = [request.prompt_ids for request in requests]
    limits = torch.tensor([[request.max_new_tokens] for request in requests], device=policy.device)
    stop_tokens = torch.tensor(cfg.stop_token_ids, dtype=torch.long, device=policy.device)
    next_logits = start_decoding(policy, prompts)
    tokens = None  # (B, 1) those drawn last
    drawn = []  # (B, 1) each
    log_probs = []  # (B, 1) each
    is_running = torch.ones_like(limits, dtype=torch.bool)
    is_finished = torch.zeros_like(is_running)
    lengths = torch.zeros_like(limits)
    for t in range(uniform.shape[1]):
        # A row that has ended goes on with the others; what it draws then is cut off below
        logits = next_logits(tokens)
        tokens, token_log_probs = draw_tokens(logits, uniform[:, t, None], temperature)
        drawn.append(tokens)
        log_probs.append(token_log_probs)
        lengths += is_running  # this token counts, also if it ends the row
        is_finished |= is_running & torch.isin(tokens, stop_tokens)
        is_running &= ~is_finished & (lengths < limits)
        if not is_running.any():
            break
    responses = []
    rows = zip(prompts, torch.cat(drawn, dim=1).tolist(), torch.cat(log_probs, dim=1).tolist())
    for i, (prompt_ids, ids, ids_log_probs) in enumerate(rows):
        n = lengths[i].item()
        finished = is_finished[i].item()
        responses.append(Response(prompt_ids, ids[:n], ids_log_probs[:n], finished))
    return responses


def check_log_probs(responses):
    """Raises RunStopped where the log-prob of a drawn token is nan, as after a division by 0. Such
    a token would count as one that an agent read."""
    for response in responses:
        if any(map(math.isnan, response.log_probs)):
            raise RunStopped(
                f"the policy gave the log-probs {response.log_probs[:3]} to tokens that it drew; "
                "its weights or logits are not finite: lower learning_rate, and begin again or go "
                "on from an older checkpoint; or with precision = 'fp16' take another one"
            )


@torch.no_grad()
def rollout_with_transformers(policy, requests, cfg, temperature=1.0):
    """B Requests -> B Responses."""
    policy.eval()  # in train mode gradient checkpointing drops the cache
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    n_at_once = max(1, TOKENS_AT_ONCE // longest)
    responses = []
    with autocast(policy.device, cfg.precision):
        for start in range(0, len(requests), n_at_once):
            some = requests[start : start + n_at_once]
            uniform = []
            for request in some:
                generator = torch.Generator().manual_seed(request.seed)
                uniform.append(torch.rand(request.max_new_tokens, generator=generator))
            uniform = pad_sequence(uniform, batch_first=True).to(policy.device)
            responses += decode(policy, some, uniform, cfg, temperature)
    check_log_probs(responses)
    return responses


def forget_prompts(llm):
    """Empties vLLM's prefix cache: its keys and values are of older weights. Also, so that a
    resumed run repeats the same bits."""
    if llm.reset_prefix_cache() is not True:
        raise RunStopped(
            "vLLM kept its prefix cache, so it would read prompts with old weights; check the "
            "version of vLLM"
        )


def rollout_with_vllm(llm, requests, cfg, temperature=1.0):
    """B Requests -> B Responses."""
    from vllm import SamplingParams

    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    most = llm.llm_engine.model_config.max_model_len
    if longest > most:  # it would cut them without a word
        raise RunStopped(
            f"vLLM was started for {most} tokens of prompt and response, and {longest} are asked "
            "for; give main() the largest max_new_tokens of the run"
        )
    inputs = [{"prompt_token_ids": request.prompt_ids} for request in requests]
    params = [
        SamplingParams(
            seed=request.seed,
            temperature=temperature,
            max_tokens=request.max_new_tokens,
            stop_token_ids=cfg.stop_token_ids,
            ignore_eos=True,  # it is among the stop tokens
            logprobs=0,  # only that of the drawn token
            detokenize=False,
        )
        for request in requests
    ]
    responses = []
    for request, outputs in zip(requests, llm.generate(inputs, params, use_tqdm=False)):
        [output] = outputs.outputs
        ids = list(output.token_ids)
        log_probs = [by_id[token].logprob for token, by_id in zip(ids, output.logprobs)]
        finished = output.finish_reason == "stop"
        responses.append(Response(request.prompt_ids, ids, log_probs, finished))
    check_log_probs(responses)
    return responses


# --------------------------------------------------------------------------------------------------
# 4. Reward.  In: a response's text and its problem. Out: a number; from SOLVED on it is solved.

SOLVED = 1 - 1e-6  # a sum of weights such as 0.6 + 0.3 + 0.1 is just below 1


def reward_fn(response_text, problem):
    """1.0 solved, 0.1 well-formed but wrong, 0.0 otherwise.

    Write your own reward here, or give one to main(): a function (response_text, problem) ->
    number, or None for a response that it cannot score. If it has a third parameter that is named
    response, it gets the Response as well. Leave score_answer as it is: in evaluations it scores
    the other skills."""
    return score_answer(response_text, problem)


def score_answer(response_text, problem):
    """1.0 if the answer in the tags is right, 0.1 if it is wrong, 0.0 without one. A problem with
    "last_number": true needs no tags: 1.0 if the last number of the text is right, otherwise 0.0.
    """
    if problem.get("last_number"):
        return float(is_right(last_number(response_text), problem))
    answer = tagged_answer(response_text)
    if not answer:
        return 0.0
    share_right = float(is_right(answer, problem))
    return max(0.1, share_right)


def is_right(answer, problem):
    """Whether an answer is problem["answer"], or one of a list. A task may judge by itself, as
    Countdown does: its problems bring a function (answer, problem) -> bool, or a share."""
    if "is_right" in problem:
        return problem["is_right"](answer, problem)
    right = problem["answer"]
    if not isinstance(right, list):
        right = [right]
    return any(same_answer(answer, str(gold)) for gold in right)


def no_reward(response_text, problem):
    """In training with reward=None: only the KL term teaches."""
    return 0.0


def reward_of_agent(response_text, problem, response):
    """In the place of main()'s reward where an agent gives it."""
    return response.reward


def call_reward(reward, text, problem, **more):
    """Returns what the reward returns. What it raises, unless it is async, gets a note with the
    response and its problem."""
    try:
        with torch.enable_grad():  # so that a reward which turns gradients off does so for itself
            return reward(text, problem, **more)
    except SystemExit:  # of what it runs: it would end this program as if all were well
        raise RuntimeError(f"exit() was called by the reward, for {text!r:.500}") from None
    except Exception as error:
        error.add_note(f"It is of the reward, for {text!r:.500}, a response to {problem!r:.500}")
        raise


def number_from(value, text):
    """What a reward returned -> a number, None as nan."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"the reward returned {value!r:.100} for the response {text!r:.200}; it must return "
            "one number, or None"
        ) from error


def texts_of(responses, tokenizer):
    """Responses -> their texts, without the stop token. Other special tokens stay: a fine-tuning
    may have added <answer>."""
    all_ids = []
    for response in responses:
        n_stop = int(response.finished)
        all_ids.append(response.response_ids[: len(response.response_ids) - n_stop])
    return tokenizer.batch_decode(all_ids, clean_up_tokenization_spaces=False)


def score(responses, problems, tokenizer, reward):
    """P * G Responses, P problems -> P * G texts, (P * G,) float64 rewards on the CPU, None as nan.
    Where a prompt ends with words of the assistant, the text begins with these."""
    texts = texts_of(responses, tokenizer)
    group_size = len(responses) // len(problems)
    texts = [begun_answer(problems[i // group_size]) + text for i, text in enumerate(texts)]
    takes_response = "response" in [*inspect.signature(reward).parameters][2:]
    values = []
    for i, text in enumerate(texts):
        more = {"response": responses[i]} if takes_response else {}
        values.append(call_reward(reward, text, problems[i // group_size], **more))
    support = find_support()
    if support:
        values = support.awaited(values)  # where the reward is async: all at once
    values = [number_from(value, text) for value, text in zip(values, texts)]
    return texts, torch.tensor(values, dtype=torch.float64)


# Answers: found in a text, and compared


def tagged_answer(text):
    """The text of the last <answer> that </answer> closes, or "" where there is none."""
    answers = re.findall("<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    return answers[-1].strip() if answers else ""


def last_number(text):
    """The last number in a text, or "": of "23 + 45 = 68." it is "68"."""
    number = r"(?:(?<![\w)])-[$€£]?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
    found = re.findall(number, with_plain_minus(text), re.ASCII)
    return "".join(found[-1:]).rstrip(",")


def with_plain_minus(text):
    """Puts "-" in the place of the typographical minus."""
    return text.replace("\u2212", "-")


def same_answer(answer, gold):
    """Whether two answers are equal numbers, or equal texts: " 1,234.50" is "$1234.5"."""
    return normalized_answer(answer) == normalized_answer(gold)


def normalized_answer(text):
    """Returns the number that a text is, or the text without differences of case, spaces, and how
    an accent is written."""
    text = unicodedata.normalize("NFC", with_plain_minus(text))
    text = " ".join(text.split()).casefold().removesuffix(".")
    number = number_of(text)
    return text if number is None else number


NUMBER = re.compile(
    r"""
    [+-]?
    (?: (?!0\d) \d+ | [1-9]\d{0,2} (?:,\d{3})+ )?  # 12 or 1,234; not 007 or 1,2
    (?: \.\d+ )?
    (?<=\d)  # there is a digit before the exponent
    (?: e[+-]?\d{1,3} )?
    """,
    re.ASCII | re.VERBOSE,
)


def number_of(text):
    """Returns the number that a text is, also with a currency sign or % ("$5", "5 %"), or None."""
    text = re.sub(r"^(-?)[$\u20ac\u00a3]", r"\1", text).rstrip("%$\u20ac\u00a3 ")
    if len(text) > 100 or not NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace(",", ""))


# --------------------------------------------------------------------------------------------------
# 5. Advantages.  In: rewards. Out: how much better each response is than others of its group.


def have_equal_rewards(groups, mean):
    """(P, G) rewards and (P, 1) their means -> (P, 1), true where all that were scored are equal,
    or only one was. The mean of equal rewards can be off by one bit, and so can rewards that are
    sums, such as 0.6 + 0.3 + 0.1: neither counts as a difference."""
    is_equal = torch.isclose(groups, mean, rtol=1e-12, atol=0.0) | groups.isnan()
    return is_equal.all(dim=1, keepdim=True)


def compute_group_normalized_advantages(rewards, group_size, advantage_eps, normalize_by_std):
    """(P * G,) rewards, group after group -> (P * G,) advantages and statistics for the log.

    An advantage is the reward less the mean of its group. True: GRPO divides it by the group's
    standard deviation (arXiv:2402.03300). False: Dr. GRPO does not, so that easy and hard prompts
    weigh the same (arXiv:2503.20783). "step" divides by the deviation of all rewards of the step
    (arXiv:2508.08221): prompts weigh the same, and the advantages are about as large as GRPO's,
    for which most values of kl_coef were found. With group_size 2, GRPO makes rewards [1, 0, 1, 1]
    into [+0.71, -0.71, 0, 0]: a group whose rewards are all equal teaches nothing.
    A response whose reward is nan was not scored. It leaves its group: its advantage is 0, and the
    others are compared with each other. Its tokens still count in the average of section 6."""
    groups = rewards.reshape(-1, group_size)
    is_scored = ~groups.isnan()
    mean = groups.nanmean(dim=1, keepdim=True)
    all_equal = have_equal_rewards(groups, mean)
    advantages = torch.where(is_scored & ~all_equal, groups - mean, 0.0)
    # Scored responses less one: the divisor of an unbiased variance
    n_others = (is_scored.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    std = (advantages.square().sum(dim=1, keepdim=True) / n_others).sqrt()  # 0 / 0 is nan
    divisor = std
    if normalize_by_std == "step" and is_scored.sum() > 1:
        divisor = rewards[~rewards.isnan()].std()
    if normalize_by_std:
        advantages = advantages / (divisor.nan_to_num() + advantage_eps)
    metadata = {
        "reward_mean": rewards.nanmean().item(),
        "reward_std": std.nanmean().item(),  # over the groups
        "frac_zero_std": all_equal.float().mean().item(),
    }
    if not is_scored.all():
        metadata["unscored_frac"] = 1 - is_scored.float().mean().item()
    return advantages.reshape(-1), metadata


# --------------------------------------------------------------------------------------------------
# 6. Batch.  In: responses. Out: (B, T) tensors; column t of each is about labels[:, t].


def conversations_of(responses):
    """Returns (index of the response, Response) for each row: each response, and behind it further
    conversations of the same agent."""
    found = []
    for i, response in enumerate(responses):
        found.append((i, response))
        found += [(i, other) for other in response.others]
    return found


def padded(rows, filler):
    """Lists -> a (B, T) tensor. Shorter ones are filled up on the right."""
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def make_batch(responses, advantages, device):
    """Responses, their advantages -> dict of (B, T) tensors; "finished" and "response_index" are
    (B, 1). A row is a response, or another conversation of its agent.

    advantages: (n,), one for each response, or (n, L), one for each of its tokens, where L is the
    longest one; further conversations of an agent have the advantages of the same row.
    A prompt and its response come without a gap, padded on the right. input_ids and labels are
    shifted against each other once, here:

        prompt [5, 6], response [7, 8]:  input_ids [5, 6, 7]   labels [6, 7, 8]   mask [0, 1, 1]

    The mask comes from lengths and not from ids: the stop token may well be the padding token. What
    an agent read between two turns has nan as its log-prob, and is masked.
    What you add to the batch must be (B, T) or (B, 1), since it is cut like the rest."""
    conversations = conversations_of(responses)
    longest = max(len(response.response_ids) for _, response in conversations)
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(-1, longest)
    if advantages.shape[1] != longest:
        raise InputError(
            f"there are advantages for {advantages.shape[1]} tokens of each response, and the "
            f"longest has {longest}; give (n,) advantages, or one for each of these"
        )
    token_advantages = advantages.float().tolist()
    rows = []
    for i, response in conversations:
        ids = response.prompt_ids + response.response_ids
        before = [0.0] * (len(response.prompt_ids) - 1)  # columns whose label is of the prompt
        is_written = [not math.isnan(x) for x in response.log_probs]
        log_probs = [x if written else 0.0 for x, written in zip(response.log_probs, is_written)]
        row = {
            "input_ids": ids[:-1],
            "labels": ids[1:],
            "response_mask": [False] * len(before) + is_written,
            "sampler_log_probs": before + log_probs,
            "advantages": before + token_advantages[i][: len(log_probs)],
            "finished": [response.finished],
            "response_index": [i],
        }
        rows.append(row)
    fillers = {"input_ids": -1, "labels": 0, "response_mask": False}
    batch = {}
    for name in rows[0]:
        batch[name] = padded([row[name] for row in rows], fillers.get(name, 0.0)).to(device)
    # -1, which is no id, marks the padding. It becomes the row's first id, since some models break
    # at that of the padding token; in a row of one token, which has no input, it becomes 0
    ids = batch["input_ids"]
    batch["input_ids"] = torch.where(ids < 0, ids[:, :1].clamp(min=0), ids)
    return batch


# Weights of tokens: each function takes the (B, T) float mask of the whole step and max_new_tokens,
# and returns the (B, T) weight of each token in the loss. With mask_truncated the mask of responses
# that were cut is 0: "grpo" and "dr_grpo" still divide by all rows, "dapo" by the tokens left.


def mean_of_responses(mask, max_new_tokens):
    """GRPO: mean over each response, then over responses (arXiv:2402.03300)."""
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mask / lengths / len(mask)


def mean_of_tokens(mask, max_new_tokens):
    """DAPO: mean over all tokens (arXiv:2503.14476)."""
    return mask / mask.sum().clamp(min=1)


def sum_over_constant(mask, max_new_tokens):
    """Dr. GRPO: no response's own length matters (arXiv:2503.20783)."""
    return mask / (len(mask) * max_new_tokens)


AVERAGES = {"grpo": mean_of_responses, "dapo": mean_of_tokens, "dr_grpo": sum_over_constant}


def weights_of_conversations(mask, response_index, average, max_new_tokens):
    """(B, T) mask, (B,) the index of each row's response -> (B, T) weights. The conversations of an
    agent weigh as much as one response that has all of their tokens; each would count as a response
    of its own otherwise.

    An agent had two conversations, with the masks [1, 1, 0] and [1, 1, 1]: its columns have 2, 2
    and 1 tokens. The average takes these counts for the mask of one response: mean_of_tokens gives
    the columns 0.4, 0.4 and 0.2, which their tokens share, so that each has 0.2."""
    _, index = response_index.unique(return_inverse=True)  # from 0, without gaps
    counts = torch.zeros_like(mask[: index.max() + 1]).index_add(0, index, mask)
    shares = average(counts, max_new_tokens) / counts.clamp(min=1)
    return shares[index] * mask


def weights_of_tokens(batch, cfg):
    """Returns the (B, T) weight of each token in the loss. Call it for the whole step, before
    microbatches are cut: the gradient then does not depend on how."""
    mask = batch["response_mask"]
    if cfg.mask_truncated:
        mask = mask & batch["finished"]
    mask = mask.float()
    average = AVERAGES[cfg.loss_average]
    response_index = batch["response_index"][:, 0]
    if len(response_index.unique()) == len(mask):  # each row is a response
        return average(mask, cfg.max_new_tokens)
    return weights_of_conversations(mask, response_index, average, cfg.max_new_tokens)


def keep_rows(batch, indices):
    """Returns some rows of a batch: (B,) booleans, or indices."""
    return {name: tensor[indices] for name, tensor in batch.items()}


def cut_microbatches(batch, max_tokens):
    """Cuts a batch into microbatches of at most max_tokens tokens, padding included, or of one
    row. Rows of similar length come together, the longest first, since they need most memory."""
    mask = batch["response_mask"]
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    lengths = (mask * columns).amax(dim=1)  # up to the last token of the response, with the prompt
    order = lengths.argsort(descending=True, stable=True)
    microbatches = []
    while len(order) > 0:
        width = max(1, lengths[order[0]].item())
        n_rows = max(1, max_tokens // width)
        some = keep_rows(batch, order[:n_rows])
        microbatches.append({name: tensor[:, :width] for name, tensor in some.items()})
        order = order[n_rows:]
    return microbatches


# --------------------------------------------------------------------------------------------------
# 7. Log-probs.  In: (N, V) logits at N response tokens. Out: (N,) statistics, such as log-probs.
#
# token_statistics in section 11 runs policy and reference, and lays these out as (B, T) tensors.


def all_log_probs(logits, temperature):
    """(N, V) logits -> (N, V) log-probs. Those of forbidden tokens, whose logit is -inf, are -1e9:
    times a probability of 0 that adds 0 to sums over the vocabulary, where -inf would add nan."""
    logits = scale_logits(logits, temperature)
    logits.data.clamp_(min=-1e9)  # in place; a forbidden token has no gradient in any case
    return logits.log_softmax(dim=1)


def statistics_of_logits(logits, labels, temperature, ref_logits=None):
    """(N, V) logits of the policy and a reference, (N,) labels -> dict of (N,) tensors, in nats.

    All that the loss knows of the logits is computed here. A tensor that you add reaches
    grpo_microbatch_step under its name and, as a mean over the response tokens, the log."""
    labels = labels[:, None]
    log_p = all_log_probs(logits, temperature)
    stats = {
        "log_probs": log_p.gather(1, labels)[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(dim=1),
    }
    if ref_logits is not None:
        # Models of a family may have more logits than others, of no token
        n = min(log_p.shape[1], ref_logits.shape[1])
        ref_log_p = all_log_probs(ref_logits[:, :n], temperature)
        if n < log_p.shape[1]:
            log_p = log_p[:, :n]
        d = log_p - ref_log_p
        labels = labels.clamp(max=n - 1)  # one that the reference lacks is seldom drawn
        stats["ref_log_probs"] = ref_log_p.gather(1, labels)[:, 0]
        stats["log_pi_over_ref"] = (stats["log_probs"] - stats["ref_log_probs"]).detach()
        stats["kl_per_token"] = (log_p.exp() * d).sum(dim=1)  # KL(policy || reference)
        stats["kl_forward"] = -(ref_log_p.exp() * d).sum(dim=1)  # KL(reference || policy)
    return stats


def get_response_log_probs(
    model, input_ids, labels, response_mask, temperature=1.0, precision="float32"
):
    """For programs of yours: (B, T) ids and labels -> (B, T) float32 log-probs, 0 where masked."""
    rows = {"input_ids": input_ids, "labels": labels, "response_mask": response_mask.bool()}
    return token_statistics(model, rows, temperature, precision)["log_probs"]


# --------------------------------------------------------------------------------------------------
# 8. KL penalty.  In: log-probs of policy, sampler and reference. Out: the KL that is charged.
#
# At a token that the policy sampled, d = log pi - log ref says how much likelier it is than for the
# reference. With use_kl_penalty = True the KL of the tokens is charged, times beta, where beta is
# kl_coef, or what a rule of section 9b makes of it. kl_in says to whom:
#
#     kl_in            a token pays for                in          clipped   function
#     "loss"           its own KL                      its loss    no        kl_in_loss
#     "loss_to_go"     its own and all later KL        its loss    no        kl_in_loss
#     "reward"         its own and all later KL        advantage   as PPO    kl_in_reward
#
# In the loss a token's own KL has the number that kl_estimator names, by default k3(d), and another
# gradient, that of kl_gradient = "reverse": pi / sampler * d * grad log pi. Its mean over the
# samples is the gradient of KL(policy || reference) of the next token, given those before it. pi /
# sampler, at most kl_ratio_cap, makes samples of another engine, or of an epoch before, count as
# the policy's. The number is for the log; for later KL and in the reward it is what is paid.
#
# Why is the estimator not simply differentiated? The samples come from the policy, which changes
# too, so that the mean of the gradients is not the gradient of the mean. Differentiated as written,
# k1 has a mean gradient of 0, k3 that of KL(reference || policy), and only k2 the right one.
#
# compute_loss in section 9 calls kl_in_loss or kl_in_reward, and kl_for_log. All three apply the
# rule of tokens that kl_adaptation_method names; without one apply_term_rule changes nothing.


def k1(d):
    """Unbiased, can be negative."""
    return d


def k2(d):
    """Biased, never negative."""
    return d.square() / 2


def k3(d):
    """exp(-d) - 1 + d: unbiased, never negative (J. Schulman, "Approximating KL divergence")."""
    return torch.expm1(-d) + d


# d -> an estimate of KL(policy || reference) in nats. These functions are differentiated
# only with kl_gradient = "as_written"
ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}

# Estimators that are sums over the vocabulary, with their own gradient -> a key of the statistics
EXACT = {"exact": "kl_per_token", "exact_forward": "kl_forward"}


def compute_kl_divergence(policy_log_probs, ref_log_probs, estimator="k1"):
    """(B, T), (B, T) -> (B, T): the estimate of the KL at each token, in nats."""
    return ESTIMATORS[estimator](policy_log_probs - ref_log_probs)


def add_gradient(value, surrogate):
    """Returns the value, with the gradients of both."""
    return value + (surrogate - surrogate.detach())


def kl_of_tokens(policy_log_probs, ref_log_probs, pi_over_sampler, cfg, exact_kl):
    """(B, T) log-probs of the sampled tokens -> (B, T) KL, with a number and a gradient of its own.

    kl_gradient = "reverse" is the gradient above, whichever estimator gives the number.
    "as_written" differentiates the estimator itself, unweighted, to reproduce papers. exact_kl,
    of an estimator in EXACT, has its gradient from the logits."""
    if cfg.kl_estimator in EXACT:
        if exact_kl is None:
            raise InputError(
                f"kl_estimator = {cfg.kl_estimator!r} needs exact_kl; give it, or 'k3'"
            )
        return exact_kl
    if cfg.kl_gradient == "as_written":  # not cut as below
        return compute_kl_divergence(policy_log_probs, ref_log_probs, cfg.kl_estimator)
    d = (policy_log_probs - ref_log_probs).detach()  # this detach decides which divergence it is
    value = ESTIMATORS[cfg.kl_estimator](d.clamp(-20, 20))  # exp(-d) may overflow
    return add_gradient(value, pi_over_sampler * d * policy_log_probs)


def sum_to_go(kl, mask):
    """(B, T) -> (B, T): sum over this token of the response and all later ones."""
    return torch.where(mask, kl, 0.0).flip(1).cumsum(1).flip(1)


def add_gradient_of_later_kl(kl, policy_log_probs, pi_over_sampler, mask):
    """kl_in = "loss_to_go": a token also pays for the KL of later tokens of its row, to which it
    leads: of a response with the KL [1, 2, 3] the first pays for 5 more, the second for 3. On
    policy, with an unbiased estimator and loss_average = "dr_grpo", this is the gradient of the
    whole response's KL; kl_estimator = "exact" has the least noise."""
    later = (sum_to_go(kl, mask) - kl).detach()  # a weight of grad log pi
    return add_gradient(kl, pi_over_sampler * later * policy_log_probs)


def kl_in_loss(policy_log_probs, ref_log_probs, sampler_log_probs, mask, cfg, exact_kl=None):
    """kl_in = "loss" or "loss_to_go": (B, T) log-probs -> (B, T) KL, which compute_loss adds, times
    beta, to the loss of each token. exact_kl: (B, T), of an estimator in EXACT.

    kl_ratio_cap bounds the weight pi / sampler, and so biases the gradient."""
    ratio = torch.exp(policy_log_probs - sampler_log_probs).detach()  # a weight
    pi_over_sampler = ratio.clamp(max=cfg.kl_ratio_cap)
    kl = kl_of_tokens(policy_log_probs, ref_log_probs, pi_over_sampler, cfg, exact_kl)
    d = (policy_log_probs - ref_log_probs).detach()  # which rules look at
    kl = apply_term_rule(kl, d, mask, cfg)
    if cfg.kl_in == "loss_to_go":
        kl = add_gradient_of_later_kl(kl, policy_log_probs, pi_over_sampler, mask)
    return kl


def kl_in_reward(sampler_log_probs, ref_log_probs, mask, cfg):
    """kl_in = "reward": (B, T) log-probs -> (B, T) KL, which compute_loss takes, times beta, off
    the advantage of each token: a reward of -beta * KL, which is not compared within the group.

    A token pays for its own and all later KL, as measured at the rollout, in every epoch, inside of
    the PPO clip. With k1 and loss_average = "dr_grpo" this is the gradient of the response's KL."""
    d = (sampler_log_probs - ref_log_probs).detach()
    kl = ESTIMATORS[cfg.kl_estimator](d)
    charged = apply_term_rule(kl, d, mask, cfg)
    if rule_among(TERM_RULES, cfg) is not None:
        # What a rule makes of a token may depend on later ones, so all pay for the whole response
        charged = torch.where(mask, charged, 0.0)
        return charged.sum(dim=1, keepdim=True).expand_as(charged)
    return sum_to_go(charged, mask)


@torch.no_grad()
def kl_for_log(policy_log_probs, ref_log_probs, sampler_log_probs, mask, cfg, exact_kl=None):
    """(B, T) log-probs -> {name: (B, T)} of which the log has the means: the KL at the sampled
    tokens by cfg.kl_estimator, before a rule and after it; and the KL by each estimator, weighted
    so that the mean is over the policy's own samples."""
    ratio = torch.exp(policy_log_probs - sampler_log_probs)
    pi_over_sampler = ratio.clamp(max=cfg.kl_ratio_cap)
    kl = kl_of_tokens(policy_log_probs, ref_log_probs, pi_over_sampler, cfg, exact_kl)
    d = policy_log_probs - ref_log_probs
    tensors = {  # named after their means
        "kl_penalty_mean": kl,
        "adaptive_kl/adapted_kl": apply_term_rule(kl, d, mask, cfg),
        "kl_capped_frac": ratio > cfg.kl_ratio_cap,
    }
    for name, estimator in ESTIMATORS.items():
        tensors[f"kl_{name}"] = pi_over_sampler * estimator(d.clamp(-20, 20))
    return tensors


# --------------------------------------------------------------------------------------------------
# 9. Loss.  In: log-probs and advantages. Out: the loss of each token, and the step's gradient.


def ppo_loss(policy_log_probs, old_log_probs, advantages, clip_range):
    """(B, T) each -> (B, T) the clipped term (arXiv:1707.06347), and (B, T) tensors for the log,
    which are named after their means. In the first epoch of a rollout the ratio is 1, but its
    gradient is not 0; the clip acts only with epochs_per_rollout above 1."""
    clip_low = clip_high = clip_range
    if isinstance(clip_range, (tuple, list)):
        clip_low, clip_high = clip_range
    pi_over_old = torch.exp(policy_log_probs - old_log_probs)
    clipped_ratio = pi_over_old.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(pi_over_old * advantages, clipped_ratio * advantages)
    is_clipped = clipped_ratio * advantages < pi_over_old * advantages
    return loss, {"ratio_mean": pi_over_old, "clip_frac": is_clipped}


def compute_loss(
    advantages,  # (B, 1) or (B, T)
    policy_log_probs,  # (B, T), like all that follow
    old_log_probs,  # of the policy before the first update of this rollout
    clip_range,  # e, for ratios in [1 - e, 1 + e]; or (low, high), DAPO's "clip-higher"
    ref_log_probs=None,  # None: there is no KL term
    kl_coef=0.0,  # the present one; that of kl_settings is not read
    mask=None,  # None: all tokens count
    kl_settings=None,  # cfg, or KLSettings
    exact_kl=None,  # of an estimator in EXACT
    sampler_log_probs=None,  # as the sampler's engine reported them; None: old_log_probs
    importance_cap=math.inf,
):
    """Returns the (B, T) loss: the clipped term, plus kl_coef times the KL unless that is in the
    reward; and metadata, means over the mask. Take no mean of the loss here: it would be over
    this microbatch only."""
    if mask is None:
        mask = torch.ones_like(policy_log_probs)
    mask = mask.bool()
    policy_log_probs = torch.where(mask, policy_log_probs, 0.0)
    old_log_probs = torch.where(mask, old_log_probs, 0.0)
    if sampler_log_probs is None:
        sampler_log_probs = old_log_probs
    sampler_log_probs = torch.where(mask, sampler_log_probs, 0.0)
    kl_loss = 0.0
    kl_metadata = {}
    if ref_log_probs is not None:
        cfg = kl_settings or KLSettings()
        ref_log_probs = torch.where(mask, ref_log_probs, 0.0)
        if cfg.kl_in == "reward":
            charged = kl_in_reward(sampler_log_probs, ref_log_probs, mask, cfg)
            advantages = advantages - kl_coef * charged
        else:
            kl = kl_in_loss(policy_log_probs, ref_log_probs, sampler_log_probs, mask, cfg, exact_kl)
            kl_loss = kl_coef * kl
        kl_metadata = kl_for_log(
            policy_log_probs, ref_log_probs, sampler_log_probs, mask, cfg, exact_kl
        )
    # The sampler's engine computes slightly other log-probs than the trainer. Each token is
    # weighted by their ratio: truncated importance sampling (F. Yao et al., 2025, "On the
    # Rollout-Training Mismatch in Modern RL Systems"). Times the ratio of ppo_loss, pi / old, this
    # is pi / sampler, the weight that the KL has, but for the caps.
    old_over_sampler = torch.exp(old_log_probs - sampler_log_probs).clamp(max=importance_cap)
    weighted = advantages * old_over_sampler
    loss, metadata = ppo_loss(policy_log_probs, old_log_probs, weighted, clip_range)
    return loss + kl_loss, means_for_log({**kl_metadata, **metadata}, mask)


def check_reference(stats):
    """Raises InputError where an edit has put other log-probs into the place of the reference's: an
    exact KL, which comes from the logits, would know nothing of them."""
    now = stats["log_probs"] - stats["ref_log_probs"]
    if not torch.allclose(now, stats["log_pi_over_ref"], rtol=1e-4, atol=1e-4, equal_nan=True):
        raise InputError(
            "ref_log_probs were changed, which kl_estimator = 'exact' does not read; change "
            "ref_logits in token_statistics, or use another estimator"
        )


NO_SCALING = torch.amp.GradScaler(enabled=False)


def grpo_microbatch_step(policy, microbatch, cfg, ref_model=None, kl_coef=0.0, scaler=NO_SCALING):
    """Forward pass, loss and backward pass of one microbatch.

    microbatch: what make_batch returns, and "weights". The first epoch adds "old_log_probs" to it,
    so that the ratio is 1. Later epochs keep these, the sampler's log-probs and the advantages; the
    policy's log-probs are new. Returns its part of the step's loss, and metadata: means over its
    tokens."""
    mask = microbatch["response_mask"]
    stats = token_statistics(policy, microbatch, cfg.temperature, cfg.precision, ref_model)
    log_probs = stats["log_probs"]
    if "old_log_probs" not in microbatch:  # the first epoch, whose policy is the old one
        microbatch["old_log_probs"] = log_probs.detach()
    old_log_probs = microbatch["old_log_probs"]
    sampler_log_probs = microbatch["sampler_log_probs"]
    stats["sampler_logprob_diff"] = (old_log_probs - sampler_log_probs).abs()
    exact_kl = None
    if ref_model is not None and cfg.kl_estimator in EXACT:
        check_reference(stats)
        exact_kl = stats[EXACT[cfg.kl_estimator]]
    loss, metadata = compute_loss(
        advantages=microbatch["advantages"],
        policy_log_probs=log_probs,
        old_log_probs=old_log_probs,
        clip_range=cfg.clip_range,
        ref_log_probs=stats.get("ref_log_probs"),
        kl_coef=kl_coef,
        mask=mask,
        kl_settings=cfg,
        exact_kl=exact_kl,
        sampler_log_probs=sampler_log_probs,
        importance_cap=cfg.importance_cap,
    )
    # Another term comes here, such as: loss = loss - 0.01 * stats["entropy"]
    # All terms have the same weights, the KL too: with mask_truncated cut responses pay none
    loss = torch.where(mask, loss * microbatch["weights"], 0.0).sum()
    scaler.scale(loss).backward()  # in fp16 small gradients would become 0
    return loss.detach(), joined(metadata, means_for_log(stats, mask))


# --------------------------------------------------------------------------------------------------
# 9b. Adaptive KL.  Skip this unless you set kl_adaptation_method, which names a rule, or two as in
# "a+b": one that changes the coefficient of the KL after each update, of which a step has
# epochs_per_rollout; and one that changes the KL of each token. support/adaptive_rules.py adds more
# of both; README_KL.md has how they fared.


def steer_to_target(controller, cfg, kl, reward):
    """Steers the KL to cfg.kl_target (like the adaptive penalty of PPO, arXiv:1707.06347, which has
    other factors)."""
    if kl > 1.5 * cfg.kl_target:
        return 1.5 * controller.beta
    if kl < 0.5 * cfg.kl_target:
        return 0.75 * controller.beta
    return controller.beta


# Name: a rule of the coefficient. KLController, cfg, the update's KL in nats per token, the mean
# reward -> the next coefficient
COEFFICIENT_RULES = {"target": steer_to_target}

# Name: a rule of the KL of each token. (B, T) KL, d and mask, and cfg -> (B, T) KL that is charged:
#     TERM_RULES["half"] = lambda kl, d, mask, cfg: kl / 2
TERM_RULES = {}


def rule_among(rules, cfg):
    """Returns the rule that cfg.kl_adaptation_method, such as "a+b", names among these, or None."""
    for name in cfg.kl_adaptation_method.split("+"):
        if name in rules:
            return rules[name]
    return None


def apply_term_rule(kl, d, mask, cfg):
    """(B, T) KL and log-ratios -> (B, T) KL that is charged."""
    rule = rule_among(TERM_RULES, cfg)
    if rule is None:
        return kl
    return rule(kl, d, mask, cfg)


class KLController:
    """beta, the coefficient of the KL term: kl_coef, or what a rule makes of it after an update."""

    def __init__(self, kl_coef, cfg, state=None):
        self.cfg = cfg  # or KLSettings
        self.rule = rule_among(COEFFICIENT_RULES, cfg)
        self.start = kl_coef  # some rules keep within a range around it
        began_with = {"method": cfg.kl_adaptation_method, "kl_coef": kl_coef}
        # In the run's checkpoint, "step" counts updates; a rule may keep averages of its own in it
        new = {"step": 0, "beta": kl_coef, **began_with}
        self.state = {**new, **(state or {})}
        if not began_with.items() <= self.state.items():  # a resume has changed them
            self.state = new

    @property
    def beta(self):
        return self.state["beta"]

    def update(self, kl, reward, used_beta=None):
        """Returns the next beta. kl: of the update, nats per token; reward: the mean. used_beta:
        that of the update, from which a rule goes on, since an edit of train() may use another one
        than this class has returned. If kl or reward is not finite, beta stays."""
        self.state["step"] += 1
        if used_beta is not None:
            self.state["beta"] = used_beta
        if self.rule is not None and math.isfinite(kl + reward):
            beta = self.rule(self, self.cfg, kl, reward)
            if beta is None:
                raise InputError(f"{self.rule} returned None; it must return the next coefficient")
            self.state["beta"] = beta
        return self.beta


# --------------------------------------------------------------------------------------------------
# 10. Evaluate and log.


def evaluate(policy, llm, tokenizer, problems, cfg, reward=None):
    """Samples one response to each of the problems. Returns {"solved", "reward_mean", ...} and
    samples: (problem, text, reward).

    reward=None: as in training, with the agent if there is one; reward_fn if main() has neither.
    Another reward is given for single answers, without the agent. A response that was not scored
    is not solved, and has no part in the mean."""
    agent = cfg.agent if reward is None else None
    responses = rollout(policy, llm, problems, cfg, "evaluate", 1, cfg.eval_temperature, agent)
    reward = reward or cfg.reward or reward_fn
    texts, rewards = by_first_process(score, responses, problems, tokenizer, reward)
    metrics = {
        "solved": (rewards >= SOLVED).float().mean().item(),
        "reward_mean": rewards.nanmean().item(),  # nan: not scored
        "response_length": fmean(response.n_written() for response in responses),
    }
    return metrics, list(zip(problems, texts, rewards.tolist()))


def solved_by_skill(samples):
    """Samples of other skills -> {"retention_<skill>": the share that is solved}."""
    solved = {}
    for problem, _, reward in samples:
        solved.setdefault(f"retention_{problem['skill']}", []).append(reward >= SOLVED)
    return {name: fmean(solved[name]) for name in sorted(solved)}


def masked_mean(tensor, mask, dim=None):
    """For the log: the mean where the mask is 1, or 0 where it is empty. Masked nan do no harm."""
    mask = mask.bool()
    return torch.where(mask, tensor, 0).sum(dim) / mask.sum(dim).clamp(min=1)


def means_for_log(tensors, mask):
    """For the log: {name: (B, T) tensor} -> {name: its mean over the mask}."""
    return {name: masked_mean(tensor.detach().float(), mask) for name, tensor in tensors.items()}


def joined(metrics, others):
    """Returns two dicts for the log as one. Raises InputError for a name that both have."""
    for name in metrics.keys() & others.keys():
        raise InputError(f"{name!r} is logged twice, from two places; rename one of them")
    return {**metrics, **others}


def log_train(run, step, metrics):
    """Writes the metrics of a step to TensorBoard, and a line to the console."""
    run.log("train", metrics, step)
    steps_left = run.cfg.n_train_steps - step
    seconds = steps_left * metrics["time/total"]
    left = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    line = (
        f"Step {step}/{run.cfg.n_train_steps} | Reward: {metrics['reward_mean']:.3f} "
        f"| Equal: {metrics['frac_zero_std']:.0%} | Length: {metrics['response_length']:.1f} "
        f"| Grad norm: {metrics['grad_norm']:.3f} | {metrics['time/total']:.2f} s, "
        f"{left} left"
    )
    if "kl_penalty" in metrics:
        line += f" | KL: {metrics['kl_penalty']:.4f}"
    if "kl_penalty" in metrics and rule_among(COEFFICIENT_RULES, run.cfg):
        line += f" | Coefficient: {metrics['adaptive_kl/current_beta']:.3g}"
    print(line, flush=True)


def log_eval(run, step, metrics):
    """Writes an evaluation to TensorBoard, and a line to the console."""
    run.log("eval", metrics, step)
    line = (
        f"Eval at step {step} | Solved: {metrics['solved']:.1%} "
        f"| Reward: {metrics['reward_mean']:.3f} | Length: {metrics['response_length']:.1f}"
    )
    for name, value in metrics.items():
        if name.startswith("retention_"):
            line += f" | {name.removeprefix('retention_')}: {value:.0%}"
    print(line, flush=True)


# --------------------------------------------------------------------------------------------------
# 11. Mechanics.  How models, engines and processes are run.
#
# Here are the twelve functions with @mechanic, which the others call as they call any function:
#
#     learning    rows_to_train_on, token_statistics, add_up_gradients
#     sampling    start_decoding, sample, by_first_process
#     weights     load_model, weights_by_name, init_vllm, load_policy_into_vllm_instance,
#                 save_checkpoint, load_checkpoint
#
# Read those of learning with sections 6 to 9: they hold the forward passes of policy and reference,
# and the loop over microbatches. Skip the others. What is drawn, computed from logits, rewarded and
# minimised is decided in other sections, whose functions these call.
#
# They stand together since the folder support/ may put a faster function, with the same gradient,
# in the place of one: for long prompts, adapters, several processes, vLLM. The log names what it
# has replaced. It does not replace what you have edited: a function with @mechanic, or a helper of
# one, such as response_logits, that the faster function would not call. During a run some of its
# results are compared with those of this section. To run all of this file as it stands, rename that
# folder.

MECHANICS = {}  # name of a function with @mechanic: the function that runs when it is called


def mechanic(function):
    """Marks a function in whose place support/ may put another one, by an entry in MECHANICS."""
    name = function.__name__
    MECHANICS[name] = function

    @functools.wraps(function)
    def call(*inputs, **named):
        return MECHANICS[name](*inputs, **named)

    return call


# Learning


@mechanic
def rows_to_train_on(batch, policy, ref_model, cfg):
    """Returns the rows of the step that this process computes, at least one. Here: all. support/:
    its share of them; and, while the functions of the loss, and train() from here to its call of
    clip_gradient, are as shipped, without those whose advantages are 0 and that pay no KL: they
    have no gradient. Means in the log are over the rows that are left."""
    return batch


def response_logits(model, rows, precision):
    """Returns the (N, V) logits at the N response tokens. With padding on the right a causal model
    needs no attention mask."""
    with autocast(rows["input_ids"].device, precision):
        outputs = model(input_ids=rows["input_ids"], use_cache=False)
    return outputs.logits[rows["response_mask"]]


@mechanic
def token_statistics(model, rows, temperature, precision="float32", ref_model=None):
    """rows: (B, T) "input_ids", "labels", "response_mask" -> dict of (B, T) tensors, 0 outside the
    mask: what statistics_of_logits returns. The logits of all tokens are in memory at once; in a
    lone copy limit_logits bounds them, but for a single longer row. To have two references, change
    ref_logits here: all estimators see it."""
    mask = rows["response_mask"]
    ref_logits = None
    if ref_model is not None:
        with torch.no_grad():  # the only place that runs the reference, anew in each epoch
            ref_logits = response_logits(ref_model, rows, precision)
    logits = response_logits(model, rows, precision)
    stats = statistics_of_logits(logits, rows["labels"][mask], temperature, ref_logits)
    zeros = torch.zeros(mask.shape, dtype=stats["log_probs"].dtype, device=mask.device)
    return {name: zeros.masked_scatter(mask, x.to(zeros.dtype)) for name, x in stats.items()}


def add_scaled(sums, values, factor):
    """Adds factor * values to sums, name by name."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + factor * value


@mechanic
def add_up_gradients(policy, microbatches, cfg, ref_model=None, kl_coef=0.0, scaler=NO_SCALING):
    """Leaves the gradient of a step in .grad. Returns the loss and, for the log, means over the
    tokens of all microbatches. Here: one after the other. support/: also where memory runs out, by
    cutting them in two and beginning again."""
    n_tokens = sum(microbatch["response_mask"].sum() for microbatch in microbatches)
    sums = {}
    for microbatch in microbatches:
        loss, means = grpo_microbatch_step(policy, microbatch, cfg, ref_model, kl_coef, scaler)
        joined({"loss": loss}, means)  # no statistic may have this name
        add_scaled(sums, {"loss": loss}, 1.0)
        add_scaled(sums, means, microbatch["response_mask"].sum() / n_tokens)
    return {name: value.item() for name, value in sums.items()}


# Sampling


def name_of_cache(model):
    """Returns what this version of transformers calls the cache of a model's keys and values."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def read_on(policy, group, of_cache):
    """Has the model read what it has not read yet of a group's (b, n) ids: the last ones, or all if
    it keeps no cache. Returns the (b, V) logits of the next token."""
    b, n = group.ids.shape
    n_read = 0 if group.cache is None else n - 1
    positions = torch.arange(n_read, n, device=policy.device)
    # Rows that have ended go on with the others, which may have more room
    positions = positions.clamp(max=context_length(policy) - 1)
    outputs = policy(
        input_ids=group.ids[:, n_read:],
        position_ids=positions.expand(b, -1),  # some models would count from 0 in each call
        use_cache=True,
        logits_to_keep=1,
        **{of_cache: group.cache},
    )
    group.cache = getattr(outputs, of_cache, None)
    return outputs.logits[:, -1]


@mechanic
def start_decoding(policy, prompts):
    """B prompts -> a function that returns the (B, V) logits of each row's next token. It is called
    with None first, then with the (B, 1) tokens that were drawn.

    Prompts of one length are read together: recurrent and sliding-window layers would read padding
    in front of the response as text. A model without a cache of keys and values reads all ids again
    for each token."""
    rows_of_length = {}
    for row, prompt_ids in enumerate(prompts):
        rows_of_length.setdefault(len(prompt_ids), []).append(row)
    groups = []  # b rows each, with their (b, n) ids so far and what the model keeps of these
    for rows in rows_of_length.values():
        ids = torch.tensor([prompts[row] for row in rows], device=policy.device)
        groups.append(SimpleNamespace(rows=rows, ids=ids, cache=None))
    of_cache = name_of_cache(policy)
    # Logits come group after group. order brings them back into the order of the prompts
    rows_in_groups = [row for rows in rows_of_length.values() for row in rows]
    order = torch.tensor(rows_in_groups, device=policy.device).argsort()

    def next_logits(tokens):
        logits = []
        for group in groups:
            if tokens is not None:
                group.ids = torch.cat([group.ids, tokens[group.rows]], dim=1)
            logits.append(read_on(policy, group, of_cache))
        return torch.cat(logits)[order]

    return next_logits


@mechanic
def sample(policy, llm, requests, cfg, temperature):
    """B Requests -> B Responses. Here: by this process. support/: several share the work."""
    if llm is None:
        return rollout_with_transformers(policy, requests, cfg, temperature)
    return rollout_with_vllm(llm, requests, cfg, temperature)


@mechanic
def by_first_process(function, *arguments):
    """Returns what the function returns. support/: of several processes one calls it, and all get
    its result, since a reward may be random, or cost money."""
    return function(*arguments)


# Weights


@mechanic
def load_model(model_id, device):
    """Returns the model of a checkpoint in float32 and eval mode, and what transformers tells of
    its weights: {"missing_keys": ...}. support/: of several processes each will hold a part."""
    from transformers import AutoModelForCausalLM

    model, keys = AutoModelForCausalLM.from_pretrained(
        model_id, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    return model.to(device), keys


@mechanic
def weights_by_name(policy):
    """Yields (name, tensor) of the parameters and persistent buffers, as transformers names them in
    the model. support/: adapters are added to the weights beside them, and the parts that
    several processes hold are joined, one after the other."""
    yield from policy.state_dict().items()


@mechanic
def init_vllm(model_id, seed, max_model_len, gpu_mem_util, precision):
    """Returns a vLLM engine. Its log-probs are log_softmax(logits / temperature), like ours."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine runs in this process
    from vllm import LLM

    print("vLLM draws the tokens by itself; draw_tokens has no part in it")
    return LLM(
        str(model_id),
        seed=seed,
        dtype=DTYPES[precision],
        hf_overrides={"head_dtype": "float32"},  # like Float32Head
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_mem_util,
        logprobs_mode="processed_logprobs",
        use_tqdm_on_load=False,
    )


def load_weights_in_worker(worker, weights):
    """Runs inside vLLM. weights: {name: tensor}, as in a checkpoint."""
    worker.reload_weights(weights_iterator=weights.items())


@mechanic
def load_policy_into_vllm_instance(policy, llm):
    """Hands the policy's weights to vLLM, which would sample from an old policy otherwise. Some
    models rename or stack weights while they are loaded; vLLM expects the names in checkpoints."""
    from transformers.core_model_loading import revert_weight_conversion

    weights = revert_weight_conversion(policy, dict(weights_by_name(policy)))
    llm.collective_rpc(load_weights_in_worker, args=(weights,))


@mechanic
def save_checkpoint(path, policy, optimizer, state):
    """Writes a file that holds weights, moments, and the run's state. support/: a folder, to which
    each of several processes adds its part; with LoRA, only what learns."""
    content = {"model": policy.state_dict(), "optimizer": optimizer.state_dict(), "state": state}
    with written_whole(path, content) as unfinished, open(unfinished, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


@mechanic
def load_checkpoint(path, policy, optimizer):
    """Loads weights and moments. Returns the run's state. support/: also from parts."""
    if path.is_dir():
        raise InputError(f"{path} holds the parts of several processes, which support/ can read")
    saved = torch.load(path, map_location="cpu", weights_only=True)
    take_over(policy, optimizer, saved)
    return saved["state"]


def take_over(policy, optimizer, saved):
    """Loads {"model": ..., "optimizer": ...}. The optimiser keeps its settings, such as
    weight_decay."""
    policy.load_state_dict(saved["model"])
    groups = optimizer.state_dict().get("param_groups", [])
    before = saved["optimizer"].get("param_groups", [])
    if settings_of(groups) != settings_of(before):
        print(
            f"resume: the optimiser's settings are {settings_of(groups)}, and they were "
            f"{settings_of(before)}; what an optimiser counts among its settings begins anew"
        )
    own = {"param_groups": groups} if groups else {}
    optimizer.load_state_dict({**saved["optimizer"], **own})


def settings_of(groups):
    """Parameter groups of an optimiser -> a text, without the rates, which train() sets."""
    if not groups or isinstance(groups[0], list):  # of several optimisers
        return ", ".join(map(settings_of, groups))
    left_out = {"params", "lr", "initial_lr", "scheduled_lr"}
    settings = [{name: x for name, x in group.items() if name not in left_out} for group in groups]
    return json.dumps(settings, default=str)


# --------------------------------------------------------------------------------------------------
# 12. A run.  Its folder, with settings, TensorBoard's log, the last two checkpoints and the model.
#
# But for what a resumed run goes on from (weights, moments, state), nothing of this section has a
# part in what is learnt.


class Run:
    """A run's folder, and its state: what one step hands to the next besides weights and moments.

    A run that is resumed has

        from main(), as a new one    its settings, and the reference: the weights before training
        from its folder              weights, moments, and this state
    """

    def __init__(self, cfg):
        self.cfg = cfg
        self.state = {
            "step": 0,  # the last one whose update is done
            "n_steps": None,  # the n_train_steps with which it began, by which the rate falls
            "controller": None,  # of a KLController
            "scaler": None,  # of fp16
            "first_diff": None,  # for check_sampler
            "before": None,  # the evaluation before step 1
            "after": None,  # the last evaluation
            "evaluated": None,  # the step of that one
        }
        self.writes_files = True  # as the only process, or the first of several
        self.stop = False  # if train() finds True, it ends the run with this step's checkpoint
        self.in_update = False  # set by train(), where an error would leave weights of no step
        self.folder = folder_of_run(cfg)

    def open(self, policy, optimizer):
        """Goes on from the newest checkpoint, if there is one, and opens TensorBoard's log."""
        check_can_be_saved(policy, optimizer)
        newest = max(self.folder.glob("checkpoint_*"), default=None)
        if newest is not None:
            self.state.update(load_checkpoint(newest, policy, optimizer))
        is_over = False
        if self.cfg.resume:
            print(f"resumed: {self.folder} after step {self.state['step']}")
            is_over = self.state["step"] >= max(1, self.cfg.n_train_steps)
        if is_over:
            print("no step is left to train: raise n_train_steps, which counts from step 1")
        if self.writes_files:
            self.open_log()
            if not is_over:  # else the file stays that describes the steps that were trained
                with written_whole(self.folder / "settings.json", []) as unfinished:
                    unfinished.write_text(text_of_settings(self.cfg), "utf-8")

    def open_log(self):
        """Makes the folder with TensorBoard's log. What was logged after the checkpoint is dropped
        from it, since it will be logged again."""
        from torch.utils.tensorboard import SummaryWriter

        next_step = self.state["step"] + 1 if self.state["before"] else 0  # 0: an evaluation
        try:
            self.writer = SummaryWriter(self.folder, purge_step=next_step)
        except OSError as error:
            raise RunStopped(
                f"{self.folder} cannot be written into ({error}); make room"
            ) from error

    def log(self, kind, metrics, step):
        """Writes {name: number} to TensorBoard, under kind/ where a name has no kind of its own."""
        if self.writes_files:
            for name, value in metrics.items():
                self.writer.add_scalar(name if "/" in name else f"{kind}/{name}", value, step)

    def save(self, policy, optimizer):
        """Writes checkpoint_<step>.pt. The last two are kept."""
        check_can_be_read_back(self.state)
        if self.writes_files:
            self.writer.flush()
        path = self.folder / f"checkpoint_{self.state['step']:08d}.pt"
        save_checkpoint(path, policy, optimizer, self.state)  # by all processes
        if self.writes_files:
            keep_last_two(self.folder)


def check_can_be_saved(policy, optimizer):
    """Raises InputError, before the first step, for a model or optimiser that no checkpoint would
    hold."""
    if hasattr(policy, "_orig_mod"):
        raise InputError(
            "torch.compile(policy) returns another model, whose weights have other names; write "
            "policy.compile() instead"
        )
    try:
        optimizer.state_dict()
    except Exception as error:
        raise InputError(
            f"the optimiser cannot be saved ({error!r:.200}); give it state_dict() and "
            "load_state_dict(), as those of torch have them"
        ) from error


def check_can_be_read_back(state):
    """Raises InputError for what could not be read back from a checkpoint, which holds no code."""
    for name, value in state.items():
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        try:
            torch.load(file, weights_only=True)
        except pickle.UnpicklingError as error:
            raise InputError(
                f"run.state[{name!r}] cannot be read back from a checkpoint; keep only dicts, "
                "lists, numbers, texts and tensors in run.state"
            ) from error


def remove(path):
    """Removes a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def keep_last_two(folder):
    """Removes older checkpoints."""
    for older in sorted(folder.glob("checkpoint_*"))[:-2]:
        remove(older)


@contextlib.contextmanager
def written_whole(path, content):
    """Gives a place where to write a file or folder, which gets the name `path` when it is on the
    disk: it is whole, or it is not there. content: the tensors in it, whose size is compared with
    the room that is free. Raises RunStopped where it cannot be written, for whatever reason."""
    unfinished = path.with_name("unfinished")
    remove(unfinished)  # of a run that was killed
    sizes = [x.nbytes for x in tree_leaves(content) if isinstance(x, torch.Tensor)]
    needed = sum(sizes) / 1e9
    try:
        if needed > shutil.disk_usage(path.parent).free / 1e9:
            raise OSError("the disk is too full")
        yield unfinished
        if path.is_dir():  # of a run that was resumed; a file is replaced at once
            remove(path)
        unfinished.replace(path)
    except Exception as error:
        free = shutil.disk_usage(path.parent).free / 1e9
        raise RunStopped(
            f"{path} cannot be written ({error}): it needs {needed:.3g} GB, and {free:.3g} GB are "
            f"free; make room, if that is the cause, and add --resume {path.parent}"
        ) from error
    finally:
        remove(unfinished)


def save_after_error(run, policy, optimizer):
    """Saves a checkpoint of the last step, if the weights are those of it. The error is raised
    again in any case, whether this works or not."""
    step = run.state["step"]
    if step == 0 or run.in_update:
        return
    try:
        run.save(policy, optimizer)
        print(
            f"An error ends the run; a checkpoint of step {step} is saved; to go on: resume = "
            f"{str(run.folder)!r}"
        )
    except Exception as error:
        print(f"An error ends the run, and no checkpoint of step {step} is saved ({error!r:.300})")


def save_model(run, policy, tokenizer):
    """Writes the run's folder model/, as Hugging Face lays it out, with the problems of other
    skills for whoever goes on training it."""
    # All processes take part; the one that writes keeps what it gets.
    weights = {name: x for name, x in weights_by_name(policy) if run.writes_files}
    if not run.writes_files:
        return
    with written_whole(run.folder / "model", weights) as unfinished:
        policy.save_pretrained(unfinished, state_dict=weights)
        tokenizer.save_pretrained(unfinished)
        other_skills = Path(run.cfg.model_id, "retention.jsonl")
        if other_skills.is_file():
            shutil.copy(other_skills, unfinished)


def folder_of_run(cfg):
    """Returns the folder of the run to resume, or that of a new one, which is not made yet."""
    return folder_to_resume(cfg) if cfg.resume else new_folder(cfg)


def new_folder(cfg):
    """Returns a folder that is named by the time. Raises InputError if it could not be made."""
    out_dir = Path(cfg.out_dir)
    there = out_dir.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(
            f"out_dir = {str(cfg.out_dir)!r}: {there} is no folder that this program may write "
            "into; give another"
        )
    name = cfg.run_name.replace("/", "_")
    return out_dir / f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}_{name}"


def folder_to_resume(cfg):
    """Returns the folder that cfg.resume names; if it is True, that of the run that was begun or
    resumed last. Raises InputError if there is none."""
    if cfg.resume is True:
        settings_files = list(Path(cfg.out_dir).glob("*/settings.json"))
    else:
        settings_files = [Path(cfg.resume, "settings.json")]
    found = [path for path in settings_files if path.is_file()]
    if not found:
        raise InputError(f"resume: {cfg.resume} is no folder of a run; give one")
    return max(found, key=os.path.getmtime).parent


def text_of_settings(cfg):
    """Settings -> JSON, in which the same function is always the same text."""
    return re.sub(" at 0x[0-9a-f]+", "", json.dumps(vars(cfg), default=str, indent=1))


# --------------------------------------------------------------------------------------------------
# 13. The loop.


FINAL_RATE = 0.1  # of learning_rate, at the end of a run


def learning_rate_schedule(step, n_steps, cfg):
    """Returns the factor on the learning rate in a step, counted from 1. It rises over warmup_steps
    to 1, and falls along half a cosine to FINAL_RATE in step n_steps (SGDR, arXiv:1608.03983)."""
    rising = min(1.0, step / max(1, cfg.warmup_steps))
    progress = max(0, step - cfg.warmup_steps) / max(1, n_steps - cfg.warmup_steps)
    cosine = math.cos(math.pi * min(1.0, progress))
    return rising * (FINAL_RATE + (1 - FINAL_RATE) * (1 + cosine) / 2)


def set_learning_rate(optimizer, step, n_steps, cfg):
    """Each group of parameters gets its own rate times learning_rate_schedule. Raises InputError
    where something else, such as a scheduler of torch, has set it: one of them would be lost."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        if group["lr"] != group.get("scheduled_lr", group["lr"]):
            raise InputError(
                f"step {step}: the learning rate was set to {group['lr']}, and train() sets it in "
                "each step; change learning_rate_schedule instead"
            )
        group["lr"] = group["initial_lr"] * learning_rate_schedule(step, n_steps, cfg)
        group["scheduled_lr"] = group["lr"]


def check_sampler(diff, step, first_diff, cfg):
    """Raises RunStopped where the sampler's log-probs differ from the trainer's by 1 nat per token
    (by 0.1 with vLLM) in step 1, or later by much more than in step 1, as they do if the sampler
    has stale weights."""
    if math.isnan(diff):
        raise RunStopped(
            f"step {step}: the trainer's log-probs of sampled tokens are not finite; lower "
            "learning_rate, or with precision = 'fp16' take another one"
        )
    limit = cfg.max_sampler_diff
    if limit is None:
        limit = 0.1 if cfg.engine == "vllm" else 1.0
        if first_diff is not None:
            limit = 4 * first_diff + (2e-3 if cfg.precision == "float32" else 0.02)
    if diff > limit:
        raise RunStopped(
            f"step {step}: sampler and trainer disagree by {diff:.2g} nats per token (limit "
            f"{limit:.2g}): the sampler has stale or other weights, or draws otherwise; if on "
            "purpose, set max_sampler_diff = inf and see recipes/off_policy.patch"
        )


def length_of_schedule(cfg, state):
    """Returns the step until which the learning rate falls: the n_train_steps with which the run
    began. A run that is resumed keeps it, if its rate has begun to fall."""
    if state["n_steps"] is None or state["step"] <= cfg.warmup_steps:
        state["n_steps"] = cfg.n_train_steps
    n_steps = state["n_steps"]
    step = state["step"] + 1
    if n_steps != cfg.n_train_steps and step <= cfg.n_train_steps:
        rate = cfg.learning_rate * learning_rate_schedule(step, n_steps, cfg)
        print(
            f"the learning rate follows its schedule of {n_steps} steps, the n_train_steps with "
            f"which the run began: in step {step} it is {rate:g}"
        )
    return n_steps


def clip_gradient(parameters, max_norm):
    """Scales the gradient down to this norm if it is longer. Returns its norm before."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()


def make_scaler(device, cfg, state):
    """Returns torch's scaler of the loss: in fp16 small gradients would become 0. In other
    precisions it does nothing."""
    is_fp16 = cfg.precision == "fp16"
    # After an overflow the scale grows back within a run: by default after 2,000 steps
    scaler = torch.amp.GradScaler(device.type, growth_interval=20, enabled=is_fp16)
    if state["scaler"]:  # it is {} in other precisions
        scaler.load_state_dict(state["scaler"])
    return scaler


def is_multiple(step, every):
    """Whether something is due in this step; every = 0 is never."""
    return every > 0 and step % every == 0


def train(
    policy, tokenizer, llm, optimizer, problems, cfg, run, ref_model=None, kl_coef=0.0, watch=None
):
    """Trains the policy for cfg.n_train_steps steps, with evaluations. ref_model=None is plain
    GRPO. watch looks on: it is handed what each step and evaluation made, and may end the run."""
    state = run.state

    def evaluate_at(step):
        metrics, samples = evaluate(policy, llm, tokenizer, problems.held_out, cfg)
        if problems.other_skills:
            skills = problems.other_skills
            _, answered = evaluate(policy, llm, tokenizer, skills, cfg, score_answer)
            metrics.update(solved_by_skill(answered))
        log_eval(run, step, metrics)
        if watch:
            watch.after_evaluation(step, metrics, samples)
        state["after"] = metrics
        state["evaluated"] = step

    controller = KLController(kl_coef, cfg, state["controller"])
    kl_coef = controller.beta
    trainable = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    n_prompts = cfg.rollout_batch_size // cfg.group_size
    n_steps = length_of_schedule(cfg, state)
    scaler = make_scaler(policy.device, cfg, state)
    if state["before"] is None:
        evaluate_at(0)
        state["before"] = state["after"]
    # A resumed run makes up for an evaluation in which an error ended it
    is_due = cfg.n_train_steps <= state["step"] or is_multiple(state["step"], cfg.eval_every)
    if is_due and state["evaluated"] != state["step"]:
        evaluate_at(state["step"])
        run.save(policy, optimizer)

    for step in range(state["step"] + 1, cfg.n_train_steps + 1):
        # 1. Sample a group of responses to each prompt with the current policy.
        start = time.perf_counter()
        asked = problems_of_step(problems.train, step - 1, n_prompts, cfg.seed)
        responses = rollout(
            policy, llm, asked, cfg, step, cfg.group_size, cfg.temperature, cfg.agent
        )
        rollout_seconds = time.perf_counter() - start

        # 2. Score them. The advantages compare only responses of one group.
        reward = cfg.reward or no_reward
        texts, rewards = by_first_process(score, responses, asked, tokenizer, reward)  # (P * G,)
        advantages, metrics = compute_group_normalized_advantages(
            rewards, cfg.group_size, 1e-6, cfg.normalize_by_std
        )

        # 3. Lay the step out in (B, T) microbatches. The weights are those of the whole step.
        batch = make_batch(responses, advantages, policy.device)
        batch["weights"] = weights_of_tokens(batch, cfg)
        rows = rows_to_train_on(batch, policy, ref_model, cfg)
        microbatches = cut_microbatches(rows, cfg.max_tokens_per_microbatch)

        # 4. One optimiser step per epoch over the whole rollout. There is no dropout, as there was
        # none in sampling: the policy stays in eval mode, but for layers that run twice.
        if cfg.gradient_checkpointing:
            set_train_mode_of_checkpointed_layers(policy)
        set_learning_rate(optimizer, step, n_steps, cfg)
        totals = {}  # for the log
        n_epochs = 0  # less than epochs_per_rollout, if one is skipped
        for _ in range(cfg.epochs_per_rollout):
            beta = kl_coef
            sums = add_up_gradients(policy, microbatches, cfg, ref_model, beta, scaler)
            check_sampler(sums["sampler_logprob_diff"], step, state["first_diff"], cfg)
            scaler.unscale_(optimizer)
            sums = joined(sums, {"grad_norm": clip_gradient(trainable, cfg.max_grad_norm)})
            add_scaled(totals, sums, 1.0)
            n_epochs += 1
            is_finite = math.isfinite(sums["loss"] + sums["grad_norm"])
            if is_finite and sums["grad_norm"] > 0:  # else only AdamW's moments would move weights
                run.in_update = True
                scaler.step(optimizer)
            scaler.update()  # after an overflow of fp16 to a smaller scale
            optimizer.zero_grad()
            policy.zero_grad()  # if the optimiser does not have all of its weights
            if not is_finite:
                which = f"epoch {n_epochs} of step" if n_epochs > 1 else "step"
                print(f"Warning: {which} {step} is skipped: loss or gradient is not finite")
                break
            if ref_model is not None and controller.rule is not None:
                kl_coef = controller.update(sums["kl_per_token"], metrics["reward_mean"], beta)
        means = {name: total / n_epochs for name, total in totals.items()}
        metrics = joined(metrics, means)
        if state["first_diff"] is None:
            state["first_diff"] = metrics["sampler_logprob_diff"]
        state["step"] = step  # also where it was skipped
        state["controller"] = controller.state
        state["scaler"] = scaler.state_dict()
        run.in_update = False

        # 5. Log, evaluate and save.
        others = {
            "lr": optimizer.param_groups[0]["lr"],
            "response_length": fmean(response.n_written() for response in responses),
            "truncated_frac": fmean(not x.finished for _, x in conversations_of(responses)),
            "time/rollout": rollout_seconds,
            "time/total": time.perf_counter() - start,
        }
        if ref_model is not None:
            others["kl_penalty"] = metrics.pop("kl_penalty_mean")
            others["adaptive_kl/current_beta"] = beta
        metrics = joined(metrics, others)
        log_train(run, step, metrics)
        if watch:
            step_data = asked, responses, texts, rewards, microbatches
            run.stop = watch.after_step(step, metrics, *step_data) or run.stop
        is_last = run.stop or step == cfg.n_train_steps
        if is_last or is_multiple(step, cfg.eval_every):
            evaluate_at(step)
        is_last = is_last or run.stop  # which an evaluation may set
        if is_last or is_multiple(step, cfg.save_every):
            run.save(policy, optimizer)
        if is_last:
            break


# --------------------------------------------------------------------------------------------------
# 14. main() and its settings.

# A preset fills the parameters of main() that are None. support/presets.py adds more of them, and
# chooses what "auto" is on this machine; without it "auto" is "qwen3-1.7b", also for other models.
PRESETS = {
    # What `python starter.py` runs without a GPU: a built-in model, which support/ has
    "tiny": dict(
        model_id="tiny",
        task="countdown_small",
        n_train_steps=150,
        rollout_batch_size=256,
        group_size=4,
        max_new_tokens=16,
        normalize_by_std="step",
        learning_rate=3e-4,
        warmup_steps=10,
        max_tokens_per_microbatch=8_192,
    ),
    "qwen3-1.7b": dict(
        model_id="Qwen/Qwen3-1.7B",
        task="countdown",
        n_train_steps=80,
        rollout_batch_size=128,
        group_size=8,
        max_new_tokens=256,
        normalize_by_std=True,
        learning_rate=7e-6,
        warmup_steps=10,
        max_tokens_per_microbatch=4_096,
    ),
}

LOGITS_AT_ONCE = 67_108_864  # float32 logits that are in memory together


def limit_logits(policy, cfg):
    """Lowers max_tokens_per_microbatch to where all logits of a microbatch fit into memory."""
    most = LOGITS_AT_ONCE // policy.config.get_text_config().vocab_size
    if most < cfg.max_tokens_per_microbatch:
        print(f"max_tokens_per_microbatch = {most}, so that a microbatch's logits fit into memory")
        cfg.max_tokens_per_microbatch = most


def apply_preset(cfg):
    """Puts the numbers of a preset into the settings that are None, and prints them."""
    name = "qwen3-1.7b" if cfg.preset == "auto" else cfg.preset
    check_known("preset", name, PRESETS)
    taken = {key: x for key, x in PRESETS[name].items() if getattr(cfg, key) is None}
    vars(cfg).update(taken)
    print(f"preset {name}: {taken}")
    missing = [key for key in PRESETS["tiny"] if getattr(cfg, key) is None]
    if missing:
        raise InputError(f"preset {name} has no {missing}; add them to it, or give them to main()")


def choose_device(cfg):
    """Replaces "auto" in the settings of device, precision and engine, and prints what is used."""
    if cfg.device == "auto":
        cfg.device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg.device = torch.device(cfg.device)
    on_gpu = cfg.device.type == "cuda"
    if on_gpu and cfg.device.index is not None:
        torch.cuda.set_device(cfg.device)  # where support/ starts vLLM, too
    if cfg.precision == "auto" and on_gpu:
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        cfg.precision = "bf16" if has_bf16 else "fp16"
    elif cfg.precision == "auto":
        has_bf16 = torch.cpu.get_capabilities().get("amx_bf16", False)
        cfg.precision = "bf16" if has_bf16 else "float32"
    has_vllm = importlib.util.find_spec("vllm") is not None
    if cfg.engine == "auto":
        cfg.engine = "vllm" if on_gpu and has_vllm else "transformers"
    if cfg.engine == "vllm" and not has_vllm:
        raise InputError("engine = 'vllm' needs the package vllm; install it, or leave engine out")
    print(f"{cfg.device} | precision: {cfg.precision} | engine: {cfg.engine}")


def check_names(cfg):
    """Raises InputError for a name that is not known: it would act like another one, or fail after
    a whole evaluation; and for names that do not go together."""
    options = {
        "engine": ["auto", "vllm", "transformers"],
        "precision": ["auto", *DTYPES],
        "loss_average": AVERAGES,
        "kl_in": ["loss", "loss_to_go", "reward"],
        "kl_estimator": [*ESTIMATORS, *EXACT],
        "kl_gradient": ["reverse", "as_written"],
    }
    for name in options:
        check_known(name, getattr(cfg, name), options[name])
    names = cfg.kl_adaptation_method.split("+")
    for name in names:
        check_known("kl_adaptation_method", name, ["none", *TERM_RULES, *COEFFICIENT_RULES])
    for rules in (TERM_RULES, COEFFICIENT_RULES):
        if len(rules.keys() & set(names)) > 1:
            raise InputError(
                f"kl_adaptation_method = {cfg.kl_adaptation_method!r} names two rules of one kind, "
                "of which one would be left out; name one of each kind at most"
            )
    if cfg.kl_in == "reward" and cfg.kl_estimator != "k1":
        if cfg.kl_estimator in EXACT or not cfg.reproduce_paper:
            raise InputError("kl_in = 'reward' works only with kl_estimator = 'k1'; set that")


def check_settings(cfg):
    """Raises InputError for settings that would have the run do something else than they say. Many
    more are checked by support/."""
    check_names(cfg)
    if cfg.group_size < 2 or cfg.rollout_batch_size % cfg.group_size:
        raise InputError(
            f"group_size = {cfg.group_size} must be 2 or more, and divide rollout_batch_size = "
            f"{cfg.rollout_batch_size}; change one of them"
        )
    if cfg.normalize_by_std not in (True, False, "step"):
        raise InputError(
            f"normalize_by_std = {cfg.normalize_by_std!r} must be True (divide by the deviation of "
            "the group), 'step' (by that of all rewards of the step) or False (do not divide)"
        )
    if isinstance(cfg.task, list):
        raise InputError("task is a list; give a function: lambda cfg: (to train on, held out)")
    if cfg.reward is not None and not callable(cfg.reward):
        raise InputError(
            f"reward = {cfg.reward!r:.100} is no function; give one in a script that calls main()"
        )
    if cfg.reward is None and not (cfg.use_kl_penalty and cfg.ref_model_id):
        raise InputError(
            "reward = None leaves only the KL term to teach; set use_kl_penalty = True, and a "
            "teacher as ref_model_id"
        )
    if cfg.temperature <= 0:
        raise InputError("temperature must be above 0; eval_temperature = 0 is greedy")
    if cfg.ref_model_id and not cfg.use_kl_penalty:
        raise InputError("ref_model_id is read only with use_kl_penalty = True; set that")
    if cfg.agent is not None and cfg.reward is not reward_fn:
        raise InputError("an agent returns the reward itself; leave reward out")
    is_alone = find_support() is None
    if is_alone and (cfg.lora_rank or cfg.frozen_in_bf16 or cfg.agent or cfg.vllm_tp > 1):
        raise InputError(
            "lora_rank, frozen_in_bf16, agent and vllm_tp need the folder support/ beside this file"
        )


def main(
    # Model and data. None takes the preset's value, if it has one; any other value wins over it.
    preset="auto",  # a name in PRESETS; the log prints what it sets
    model_id=None,  # a checkpoint folder or a Hugging Face name
    task=None,  # a name in TASKS, a function like those, JSONL, or "user/dataset" on the hub
    eval_file=None,  # held-out problems, JSONL or "user/data::test"; None: a quarter of task's
    agent=None,  # async (problem, ask) -> reward, for several turns: docs/agents.md
    reward=reward_fn,  # see section 4; None: only the KL term teaches, with ref_model_id
    lora_rank=0,  # 16: LoRA adapters learn, the weights do not; needs peft and a higher rate
    seed=0,  # the same seed gives the same numbers on the same machine
    device="auto",  # "cpu", "cuda", "cuda:1" (vLLM: with support/), "mps"; auto: a GPU of NVIDIA
    # Rollout
    engine="auto",  # "vllm" or "transformers"; auto: vLLM on a GPU, if it is installed
    n_train_steps=None,  # rollouts, those before a resume included; 0: evaluate, and save the model
    rollout_batch_size=None,  # responses per step = prompts x group_size
    group_size=None,  # responses to one prompt
    max_new_tokens=None,  # longer responses are cut; what an agent reads counts, too
    temperature=1.0,  # of sampling; all log-probs are taken at it
    enable_thinking=False,  # what the chat template is told, where it has such a mode
    gpu_mem_util=0.2,  # share of the GPU's memory for vLLM; with support/, from 1 on: GB of cache
    vllm_tp=1,  # GPUs, of as many processes, that share a vLLM engine (tensor_parallel_size)
    max_sampler_diff=None,  # nats between sampler and trainer; None: see check_sampler; inf: any
    # Advantages and loss
    normalize_by_std=None,  # True: divide by the group's; "step": by that of all; False: do not
    mask_truncated=False,  # True: responses that were cut are left out of the loss, not of groups
    loss_average="dapo",  # a name in AVERAGES: "dapo", "grpo", "dr_grpo"
    clip_range=0.2,  # of the ratio pi / old; (0.2, 0.28) clips less above 1
    importance_cap=2.0,  # largest weight of a token that corrects for the sampler
    epochs_per_rollout=1,  # passes over a rollout, with one optimiser step each
    # KL penalty. README_KL.md has the measured tables.
    use_kl_penalty=False,  # True costs a copy of the model (none with LoRA) and much of the time
    ref_model_id=None,  # a teacher (folder or name) as the reference; None: the model as it starts
    kl_coef=0.1,  # measured on three tasks; 0.3 keeps more, and may stop the learning
    kl_estimator="k3",  # "k1", "k2": with kl_in = "loss" the same gradient; or a name in EXACT
    kl_gradient="reverse",  # of KL(policy || reference), for k1 to k3; "as_written": as in papers
    kl_in="loss",  # "loss_to_go", "reward" (with "k1"): a token also pays for the KL of later ones
    kl_adaptation_method="none",  # a name in TERM_RULES or COEFFICIENT_RULES, or "a+b" of both
    kl_ratio_cap=2.0,  # largest pi / sampler in the KL's gradient; inf: unbiased, but unbounded
    reproduce_paper=False,  # True: run what is refused (most by support/) for a wrong gradient
    # Read only by the rules of adaptive KL, in section 9b and support/adaptive_rules.py
    kl_clip_threshold=None,  # nats, of clip (None: 1.0) and clip_sound (None: 5.0)
    kl_target=0.1,  # nats per token
    dynamic_beta_decay=0.9,
    reward_threshold=0.8,
    beta_min=0.0,
    beta_schedule_steps=1000,
    # Optimiser (AdamW on float32 weights)
    learning_rate=None,
    warmup_steps=None,
    weight_decay=0.0,
    max_grad_norm=1.0,
    max_tokens_per_microbatch=None,  # memory and speed, never the gradient
    gradient_checkpointing=False,  # True: less memory, more time
    precision="auto",  # of the layers: "bf16", "fp16", "float32"; auto: what the device has
    frozen_in_bf16=False,  # True: what does not learn (reference, base of LoRA) in half the memory
    # Evaluation and logging
    eval_every=50,  # steps; 0: only before and after
    n_eval_problems=500,  # at most, of an eval_file too; 500: the 95 % interval is +-4.4 points
    eval_temperature=0.0,  # 0: greedy
    out_dir="runs",  # each run gets a new folder in it, named by its time
    run_name="run",  # ends the folder's name
    save_every=50,  # steps between checkpoints; 0: only at the end and after errors
    resume=None,  # the folder of a run, to go on from its checkpoint; True: of the newest
):
    # The first line, so that these are only the parameters. None and "auto" in it are replaced
    # below, by begin(), apply_preset() and choose_device(); later stop_token_ids comes to them
    cfg = SimpleNamespace(**locals())
    if hasattr(sys.stdout, "reconfigure"):  # a console may lack characters that a model writes
        sys.stdout.reconfigure(errors="replace")
    support = find_support()
    if support:  # checks the kind and range of each setting, and chooses preset="auto"
        support.begin(cfg)
    elif cfg.model_id is None or cfg.task is None:
        raise InputError("support/ is not here, so give --model_id ID --task FILE.jsonl")
    else:
        print(
            "support/ is not here: a run is slower, needs more memory, and has no LoRA, no "
            "warnings and no report; Ctrl-C ends it without saving"
        )
    apply_preset(cfg)
    choose_device(cfg)
    check_settings(cfg)
    if cfg.agent is not None:
        cfg.reward = reward_of_agent
    run = Run(cfg)
    if support:  # checks whether the model fits into the memory, and the folder of a resumed run
        support.check(run)

    # Load problems, model, reference, engine and optimiser.
    problems = load_problems(cfg)
    policy, tokenizer = init_policy(cfg.model_id, cfg.device)
    cfg.stop_token_ids = find_stop_tokens(policy, tokenizer)
    problems = tokenized(problems, policy, tokenizer, cfg)
    longest = max(len(problem["prompt_ids"]) for part in problems for problem in part)
    longest += cfg.max_new_tokens
    ref_model = None
    if cfg.ref_model_id:
        ref_model = init_teacher(cfg.ref_model_id, tokenizer, cfg.device, longest)
    elif cfg.use_kl_penalty and not cfg.lora_rank:  # with LoRA support/ makes it
        # Before run.open(), which may load the weights of a checkpoint into the policy
        ref_model = copy.deepcopy(policy).eval().requires_grad_(False)
    if support:  # adds LoRA's adapters, makes their reference, and replaces functions of section 11
        ref_model = support.prepare(policy, ref_model, tokenizer, problems, run)
    else:
        limit_logits(policy, cfg)
    if cfg.gradient_checkpointing:
        enable_checkpointing(policy)
    llm = None
    if cfg.engine == "vllm":
        llm = init_vllm(cfg.model_id, cfg.seed, longest, cfg.gpu_mem_util, cfg.precision)
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trainable,
        cfg.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=cfg.weight_decay,
        fused=True,
    )
    run.open(policy, optimizer)
    watch = None
    if support:  # looks on: warnings, Ctrl-C, and after the run the report
        watch = support.watch(run, policy, ref_model, tokenizer, optimizer)

    try:
        train(policy, tokenizer, llm, optimizer, problems, cfg, run, ref_model, cfg.kl_coef, watch)
    except Exception:  # of a reward, for example
        save_after_error(run, policy, optimizer)
        raise

    save_model(run, policy, tokenizer)
    result = {
        "before": run.state["before"],
        "after": run.state["after"],
        "run_folder": run.folder,
    }
    if watch:
        watch.report(result, llm, problems)
    print(f"the model: {run.folder}/model | the curves: tensorboard --logdir {run.folder.parent}")
    return result


def cfg_with(**changes):
    """Returns the settings of main() with these changes, for tests and programs of yours. Give what
    main() puts in the place of None and "auto", if it is read: precision, max_new_tokens, and for a
    rollout stop_token_ids (see find_stop_tokens)."""
    parameters = inspect.signature(main).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    for name in changes:
        check_known("the name of a setting", name, [*defaults, "stop_token_ids"])
    return SimpleNamespace(**defaults | changes)


class KLSettings(SimpleNamespace):
    """The settings of main() with these changes, which are checked: for programs of yours that use
    only the KL term. In this file cfg takes its place."""

    def __init__(self, **changes):
        super().__init__(**vars(cfg_with(**changes)))
        check_names(self)


# --------------------------------------------------------------------------------------------------
# 15. Quick tests.  They take two seconds and run before main().

# Their vocabulary. It is as large as that of real models, so that they also run where scale_logits
# forbids some tokens of yours.
VOCABULARY = 200_000


def test_kl_gradient():
    """Fails if the expected gradient of the KL term is not that of KL(policy || reference)."""
    logits = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64)[None].requires_grad_()
    ref_logits = logits.detach().square()
    # All samples are enumerated: there is a response for each token of the vocabulary, of this one
    # token. With three tokens that is a batch of three rows and one column, (3, 1). Weighted by the
    # probability of each token their sum is the mean over what the policy samples.
    log_p = all_log_probs(logits, 1.0).T
    ref_log_p = all_log_probs(ref_logits, 1.0).T
    probs = log_p.exp()
    [by_hand] = torch.autograd.grad((probs * (log_p - ref_log_p)).sum(), logits, retain_graph=True)
    exact = statistics_of_logits(logits, torch.tensor([0]), 1.0, ref_logits)["kl_per_token"]
    mask = torch.ones_like(probs, dtype=torch.bool)
    for estimator in [*ESTIMATORS, "exact"]:
        cfg = KLSettings(kl_estimator=estimator)
        kl = kl_in_loss(log_p, ref_log_p, log_p.detach(), mask, cfg, exact[:, None])
        mean = (probs.detach() * kl).sum()
        [ours] = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(ours, by_hand, rtol=0, atol=1e-12)


def log_prob_by_hand(policy, response):
    """Returns the log-prob of a response, from the loss that the model itself computes."""
    ids = torch.tensor([response.prompt_ids + response.response_ids])
    labels = ids.clone()
    labels[:, : len(response.prompt_ids)] = -100  # left out of that loss
    return -policy(input_ids=ids, labels=labels).loss * len(response.response_ids)


def test_step():
    """Fails if log-probs are of other tokens, a step has the wrong sign or depends on its cut."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **small)).eval()
    cfg = cfg_with(precision="float32", max_new_tokens=9)
    # Log-probs of -12 are about those of tokens drawn at random: -log(VOCABULARY)
    responses = [Response([8], [9, 10], [-12.0] * 2, True), Response([1, 2], [3], [-12.0], True)]
    advantages, _ = compute_group_normalized_advantages(torch.tensor([1.0, 0.1]), 2, 1e-6, True)
    batch = make_batch(responses, advantages, "cpu")
    batch["weights"] = weights_of_tokens(batch, cfg)
    before = torch.stack([log_prob_by_hand(policy, response) for response in responses])
    ours = token_statistics(policy, batch, 1.0)["log_probs"].sum(dim=1)
    torch.testing.assert_close(ours, before, rtol=0, atol=1e-3)
    gradients = []
    for max_tokens in (100, 1):
        policy.zero_grad()
        for microbatch in cut_microbatches(batch, max_tokens):
            grpo_microbatch_step(policy, microbatch, cfg)
        gradients.append(policy.lm_head.weight.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)
    torch.optim.SGD(policy.parameters(), lr=0.1).step()
    assert log_prob_by_hand(policy, responses[0]) > before[0]
    assert log_prob_by_hand(policy, responses[1]) < before[1]


def test_functions():
    """Runs the quick tests. One that fails says what that means, and training goes on. A script
    that calls main() may call this before."""
    print("=== Running Quick Tests ===")
    for test in (test_kl_gradient, test_step):
        try:
            test()
            print(f"ok: {test.__name__}")
        except Exception as error:  # an edit above
            print(f"FAILED: {test.__name__}. {test.__doc__} It may be what you want. {error!r:.80}")


# --------------------------------------------------------------------------------------------------
# 16. The command line.


def value_of(text):
    """ "50" -> 50, "(0.2, 0.28)" -> a tuple, "no" -> False. Other values stay texts."""
    if text in ("true", "yes", "on", "false", "no", "off"):
        return text in ("true", "yes", "on")
    try:
        return math.inf if text == "inf" else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def settings_from(arguments):
    """["--n_train_steps", "50"] -> {"n_train_steps": 50}. --help shows the parameters of main(). A
    name may have dashes, and be cut short, as in --learning 1e-5. A parameter whose default is a
    text gets a text: --run_name 5 is "5"."""
    if {"-h", "--help"} & set(arguments):
        print(inspect.getsource(main).split("\n):")[0])
        raise SystemExit
    parser = argparse.ArgumentParser(
        usage="starter.py --name value ... (names: --help; TRL's names for them: docs/trl.md)",
        argument_default=argparse.SUPPRESS,
    )
    for name, default in vars(cfg_with()).items():
        is_text = isinstance(default, str) or name in ("model_id", "task")
        kind = str if is_text else value_of
        if isinstance(default, bool) or name == "resume":  # without a value it is True
            parser.add_argument(f"--{name}", type=kind, nargs="?", const=True)
        else:
            parser.add_argument(f"--{name}", type=kind)
    typed = re.compile("(?<=^--)[^=]+")  # "--group-size=4" is "--group_size=4"
    arguments = [typed.sub(lambda found: found[0].replace("-", "_"), text) for text in arguments]
    settings, unknown = parser.parse_known_args(arguments)
    if unknown:
        near = difflib.get_close_matches(unknown[0].partition("=")[0], vars(cfg_with()))
        hint = f"; near: {near}" if near else ""
        parser.error(f"{unknown[0]} is no --name of a parameter, or value after one{hint}")
    return vars(settings)


if __name__ == "__main__":
    sys.modules["starter"] = sys.modules[__name__]  # what `import starter` means in support/
    try:
        settings = settings_from(sys.argv[1:])
        test_functions()
        main(**settings)
    except (InputError, RunStopped, FileNotFoundError, PermissionError) as error:
        is_named = not isinstance(error, OSError) or error.filename in map(str, settings.values())
        if hasattr(error, "__notes__") or not is_named:  # of a reward, for example
            raise  # its author needs the whole traceback
        raise SystemExit(f"starter.py stopped: {error}")
    except BrokenPipeError:
        sys.stdout = sys.stderr  # what was piped into is gone, as after `| head`
        raise SystemExit("starter.py stopped: nobody reads its log any more")
    except KeyboardInterrupt:
        raise SystemExit(130)
