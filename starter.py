# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.19.0", "tensorboard==2.21.0", "peft==0.21.2",
#                 "matplotlib==3.11.2"]
# ///
"""starter.py: GRPO with an optional KL penalty, in one file that you can read, copy and change.

    python starter.py                       quick tests, then main(): evaluate, train, evaluate
    python starter.py --n_train_steps 50    with another value for a parameter of main()
    python starter.py --model_id ID --task FILE.jsonl --learning_rate 1e-5 --max_new_tokens 64
                                            what a copy without support/ needs

The file follows the data: problems, model, rollout, reward, advantages, batch, log-probs, KL
penalty, loss. The loop that joins them is train() in section 13, and all numbers are in main() in
section 14. Read those two first, then sections 6 to 10.

GRPO (arXiv:2402.03300) samples a group of responses to each prompt, scores them with a rule, and
makes the responses that beat their group's mean more likely. Unlike in the paper the KL penalty is
off by default; the loss is a mean over all response tokens of the step (DAPO, arXiv:2503.14476);
the KL term's value is k3, but its gradient at each token is that of KL(policy || reference).

The folder support/ is optional: it makes the same computation faster, adds LoRA and several
processes, and watches over a run. What you change here is what runs.

Copyright (c) 2026 the starter.py authors. SPDX-License-Identifier: MIT
"""

import os

ENVIRONMENT = {  # read by libraries while they are imported; a value from outside wins
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "GOMP_SPINCOUNT": "2000",
    "THP_MEM_ALLOC_ENABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # vLLM's engine runs in this process
}
for variable, setting in ENVIRONMENT.items():
    os.environ.setdefault(variable, setting)

import argparse
import ast
import copy
import functools
import glob
import importlib.util
import inspect
import json
import math
import random
import re
import sys
import time
import zlib
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence


class InputError(ValueError):
    """A mistake that the caller can correct. The message is one sentence: value and remedy."""


class RunStopped(RuntimeError):
    """The run cannot go on, or its numbers would be wrong. The message says what to check."""


def check_known(name, value, options):
    """Raises InputError for a value that is not one of the options."""
    if value not in options:
        raise InputError(f"{name} = {value!r} is not known; use one of {sorted(options)}")


def find_support():
    """Returns the module support.attach, or None if that folder does not lie beside this file."""
    if not Path(__file__).with_name("support").is_dir():
        return None
    # So that support/ imports this very module, and no second one
    sys.modules.setdefault("starter", sys.modules[__name__])
    from support import attach

    return attach


# --------------------------------------------------------------------------------------------------
# 1. Problems.  In: the name of a task or file. Out: training problems and held-out problems.
#
# A problem is a dict with "prompt" and whatever the reward needs. A task is a function from the
# settings of main() to (training problems, held-out problems), given as task or named in TASKS.


def is_held_out(*key):
    """Whether this problem is in the fixed quarter of all problems that is never trained on."""
    return zlib.crc32(repr(key).encode()) % 4 == 0


def read_problems(source):
    """The path of a JSONL file -> its problems. "prompt" is a text or a list of chat messages,
    "answer" a text or a number; other keys are for a reward of your own.
    support/ replaces this function: it reads other files too, and explains what is wrong."""
    problems = []
    for line in filter(str.strip, open(source, encoding="utf-8-sig")):
        try:
            problem = json.loads(line)
            problems.append({"prompt": problem["prompt"], "answer": problem["answer"], **problem})
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{source}, problem {len(problems) + 1} is no JSON object with 'prompt' and "
                f"'answer' ({error!r}); mend its line"
            )
    return problems


def problems_of_files(cfg):
    """Problems of cfg.task and cfg.eval_file; without an eval_file a quarter is held out."""
    problems = read_problems(cfg.task)
    if cfg.eval_file is not None:
        return problems, read_problems(cfg.eval_file)
    train = [problem for problem in problems if not is_held_out(problem["prompt"])]
    held_out = [problem for problem in problems if is_held_out(problem["prompt"])]
    return train, held_out


TASKS = {}  # support/tasks.py adds Countdown, in two sizes, and addition


class Problems(NamedTuple):
    train: list
    held_out: list


def load_problems(cfg):
    """Returns the Problems of cfg.task."""
    task = TASKS.get(cfg.task, cfg.task)
    if not callable(task):
        task = problems_of_files
    train, held_out = task(cfg)
    return Problems(train, held_out[: cfg.n_eval_problems])


def problems_of_step(problems, step, n, seed):
    """Returns the n problems of this step (from 0). The list is shuffled anew for each pass over
    it. The choice depends on step and seed alone, so that a resumed run sees the same ones."""
    pass_number, start = divmod(step * n, len(problems))
    upcoming = []  # from the beginning of this pass on
    while len(upcoming) < start + n:
        rng = random.Random(f"{seed} {pass_number}")
        upcoming += rng.sample(problems, len(problems))
        pass_number += 1
    return upcoming[start : start + n]


# --------------------------------------------------------------------------------------------------
# 2. Model.  In: a checkpoint folder or Hugging Face name. Out: policy and tokenizer.


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


def autocast(device, precision):
    """Within it the layers compute in this precision. Weights, logits and the loss are float32."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "float32")


class Float32Head(torch.nn.Linear):
    """An LM head whose logits are float32 under autocast, too: bf16 rounds them by up to 0.06."""

    def forward(self, hidden):
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.to(self.weight.dtype))


def init_policy(model_id, device):
    """Returns (policy, tokenizer). The policy is in float32, whatever the checkpoint's dtype: in
    bf16, 84 to 98 % of the updates at learning rates of 1e-5 to 1e-6 would round to nothing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy, loading = AutoModelForCausalLM.from_pretrained(
        model_id, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    if loading["missing_keys"]:  # transformers would give random numbers to them
        raise InputError(f"{model_id} holds no weights for {sorted(loading['missing_keys'])[:3]}")
    tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=False)
    head = policy.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        head.__class__ = Float32Head  # the same weights; a deepcopy of the policy keeps it
    if getattr(policy.config.get_text_config(), "attn_logit_softcapping", None):
        policy.set_attn_implementation("eager")  # torch's fused kernel leaves the soft-cap out
    return policy.to(device), tokenizer  # in eval mode, as from_pretrained gives it


def init_teacher(ref_model_id, tokenizer, device):
    """Returns the model of a checkpoint, frozen, as the reference of the KL penalty. It may be of
    another size or class than the policy, but must know the same tokens by the same ids."""
    teacher, its_tokenizer = init_policy(ref_model_id, device)
    if its_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"ref_model_id = {str(ref_model_id)!r} has other tokens than the policy, so that its "
            "log-probs are of other texts; take a teacher of the same family"
        )
    return teacher.requires_grad_(False)


def train_checkpointed_layers(policy):
    """Puts into train mode the layers that gradient checkpointing runs again, and nothing inside
    them: dropout would change the log-probs at random."""
    for module in policy.modules():
        module.training = hasattr(module, "gradient_checkpointing")  # an attribute of such layers


def find_stop_tokens(policy, tokenizer):
    """Returns the ids that end a response: EOS, and those in generation_config, such as a turn's
    end."""
    stop_tokens = policy.generation_config.eos_token_id
    if not isinstance(stop_tokens, list):
        stop_tokens = [stop_tokens]
    return sorted({*stop_tokens, tokenizer.eos_token_id} - {None})


def ids_of_prompt(prompt, tokenizer, enable_thinking):
    """A text or chat messages -> token ids, in the tokenizer's chat template if it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt)["input_ids"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(
        prompt, enable_thinking=enable_thinking, tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def with_prompt_ids(problems, policy, tokenizer, cfg):
    """Returns the problems that fit into the model's context, each with the token ids of its prompt
    under "prompt_ids". Responses are never tokenised: the sampler's ids are used as they are."""
    context = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or -1
    fitting = []
    for problem in problems:
        ids = ids_of_prompt(problem["prompt"], tokenizer, cfg.enable_thinking)
        if context < 0 or len(ids) + cfg.max_new_tokens <= context:  # -1: no limit
            fitting.append({**problem, "prompt_ids": ids})
    if len(fitting) < len(problems):
        print(
            f"{len(problems) - len(fitting)} of {len(problems)} prompts are left out: with "
            f"max_new_tokens = {cfg.max_new_tokens} they do not fit into {context} tokens"
        )
    return fitting


# --------------------------------------------------------------------------------------------------
# 3. Engine.  In: the policy's weights. Out: a vLLM engine that samples with them.


def weights_by_name(policy):
    """Yields (name, tensor) of the parameters and persistent buffers, as state_dict() names them.
    support/ replaces this function: it merges LoRA's adapters, and joins what processes divide."""
    yield from policy.state_dict().items()


def init_vllm(model_id, seed, max_model_len, gpu_mem_util, precision):
    """Returns a vLLM engine. Its log-probs are log_softmax(logits / temperature), like ours.
    support/ replaces this function: it knows more kinds of machines."""
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
    """Runs inside vLLM. weights: {name: tensor}, as in a checkpoint.
    support/ replaces this function: it checks that each weight of vLLM's model got a new value."""
    worker.reload_weights(weights_iterator=weights.items())


def load_policy_into_vllm_instance(policy, llm):
    """Hands the policy's weights to vLLM, which would sample from an old policy otherwise."""
    from transformers.core_model_loading import revert_weight_conversion

    # Named as in checkpoints
    weights = revert_weight_conversion(policy, dict(weights_by_name(policy)))
    llm.collective_rpc(load_weights_in_worker, args=(weights,))


# --------------------------------------------------------------------------------------------------
# 4. Rollout.  In: prompts. Out: group_size responses to each, with each sampled token's log-prob.


class Response(NamedTuple):
    prompt_ids: list
    response_ids: list  # as the sampler gave them; the token that ended it included
    log_probs: list  # of response_ids, at the sampling temperature; if greedy, at 1
    finished: bool  # ended by a stop token; otherwise cut at max_new_tokens


def seed_for(cfg, purpose):
    """Seeds random and torch, for rewards, and returns the seed of a step or other purpose."""
    seed = random.Random(f"{cfg.seed} {purpose}").getrandbits(32)  # torch's CPU reads 32 bits
    random.seed(seed)
    torch.manual_seed(seed)
    return seed


def rollout_with_vllm(llm, prompts, cfg, seed, group_size=1, temperature=1.0):
    """P lists of prompt ids -> P * group_size Responses, group after group."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            n=group_size,
            seed=seed + i * group_size,
            temperature=temperature,
            max_tokens=cfg.max_new_tokens,
            stop_token_ids=cfg.stop_token_ids,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        for i in range(len(prompts))
    ]
    if llm.reset_prefix_cache() is not True:  # also, so that a resumed run repeats the same bits
        raise RunStopped(
            "vLLM kept its prefix cache, so it would read prompts with old weights; check the "
            "version of vLLM"
        )
    inputs = [{"prompt_token_ids": prompt_ids} for prompt_ids in prompts]
    responses = []
    for prompt_ids, request in zip(prompts, llm.generate(inputs, params, use_tqdm=False)):
        for output in request.outputs:
            ids = list(output.token_ids)
            log_probs = [by_id[token].logprob for token, by_id in zip(ids, output.logprobs)]
            responses.append(Response(prompt_ids, ids, log_probs, output.finish_reason == "stop"))
    return responses


def scale_logits(logits, temperature):
    """(B, V) logits of the model -> (B, V) float32 logits, by which tokens are drawn and scored. To
    forbid tokens in both, return logits.index_fill(1, tokens, -math.inf); vLLM draws by itself."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature in (0, 1):  # 0: greedy, scored at 1
        return logits
    return logits / temperature


def draw_from(probs, uniform):
    """Inverse transform sampling: (B, V) probabilities, (B, 1) uniform numbers -> (B, 1) tokens."""
    if probs.device.type != "mps":  # mps has no float64
        probs = probs.double()
    cumulative = probs.cumsum(dim=1)
    tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return tokens.clamp(max=probs.shape[1] - 1)


def draw_tokens(logits, uniform, temperature):
    """(B, V) logits, (B, 1) uniform numbers in [0, 1) -> (B, 1) tokens, (B, 1) log-probs."""
    probs = scale_logits(logits, temperature).softmax(dim=1)
    if temperature == 0:
        tokens = probs.argmax(dim=1, keepdim=True)
    else:
        tokens = draw_from(probs, uniform)
    return tokens, probs.gather(1, tokens).log()


def rows_to_decode(prompts, max_new_tokens):
    """Prompts -> lists of the indices of those that are decoded together. These have one length:
    recurrent and sliding-window layers would read padding in front of the response as text.
    support/ replaces this function together with next_logits."""
    rows_of_length = {}
    for i, prompt_ids in enumerate(prompts):
        rows_of_length.setdefault(len(prompt_ids), []).append(i)
    return [rows for _, rows in sorted(rows_of_length.items())]


@functools.cache
def forward_parameters(model_class):
    """Returns the names of what the forward() of this class of models accepts."""
    return set(inspect.signature(model_class.forward).parameters)


def next_logits(policy, ids, cache=None):
    """(B, n) prompts and what was drawn so far -> (B, V) logits of the next token, and the model's
    cache of keys and values for the next call. A model without one reads all ids each time.
    support/ replaces this function by one that reads a prompt once for its group."""
    accepted = forward_parameters(type(policy))
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    options = {}
    if cache is not None:
        options["past_key_values"] = cache
        ids, positions = ids[:, -1:], positions[:, -1:]
    if "logits_to_keep" in accepted:
        options["logits_to_keep"] = 1
    has_rope = getattr(policy.config.get_text_config(), "rope_parameters", None) is not None
    if has_rope and "position_ids" in accepted:  # some models count from 0 in each call
        options["position_ids"] = positions
    outputs = policy(input_ids=ids, use_cache=True, **options)
    return outputs.logits[:, -1], getattr(outputs, "past_key_values", None)


@torch.no_grad()
def rollout_with_transformers(policy, prompts, cfg, seed, group_size=1, temperature=1.0):
    """P lists of prompt ids -> P * group_size Responses, group after group. Response i draws with
    seed + i, whatever else is sampled."""
    policy.eval()  # in train mode gradient checkpointing drops the cache
    stop_tokens = torch.tensor(cfg.stop_token_ids, device=policy.device)
    prompts = [prompt_ids for prompt_ids in prompts for _ in range(group_size)]
    responses = [None] * len(prompts)
    for rows in rows_to_decode(prompts, cfg.max_new_tokens):
        generators = [torch.Generator().manual_seed(seed + i) for i in rows]
        uniform = torch.stack([torch.rand(cfg.max_new_tokens, generator=g) for g in generators])
        uniform = uniform.to(policy.device)
        # Only support/ puts prompts of several lengths together. It knows the padding by the -1.
        ids = pad_sequence([torch.tensor(prompts[i]) for i in rows], True, -1).to(policy.device)
        n_before = ids.shape[1]
        log_probs = []  # (B, 1) each
        is_running = torch.ones_like(ids[:, :1], dtype=torch.bool)
        lengths = torch.zeros_like(ids[:, :1])
        cache = None
        with autocast(policy.device, cfg.precision):
            for t in range(cfg.max_new_tokens):
                logits, cache = next_logits(policy, ids, cache)
                tokens, token_log_probs = draw_tokens(logits, uniform[:, t, None], temperature)
                ids = torch.cat([ids, tokens], dim=1)
                log_probs.append(token_log_probs)
                lengths += is_running
                is_running &= ~torch.isin(tokens, stop_tokens)
                if not is_running.any():
                    break
        drawn = ids[:, n_before:].tolist()
        log_probs = torch.cat(log_probs, dim=1).tolist()
        for row, i in enumerate(rows):
            n = lengths[row].item()
            responses[i] = Response(
                prompts[i], drawn[row][:n], log_probs[row][:n], not is_running[row]
            )
    return responses


def rollout(policy, llm, prompts, cfg, purpose, group_size, temperature):
    """P lists of prompt ids -> P * group_size Responses of the policy as it is now."""
    seed = seed_for(cfg, purpose)
    if llm is None:
        return rollout_with_transformers(policy, prompts, cfg, seed, group_size, temperature)
    load_policy_into_vllm_instance(policy, llm)
    return rollout_with_vllm(llm, prompts, cfg, seed, group_size, temperature)


# --------------------------------------------------------------------------------------------------
# 5. Reward.  In: a response's text and its problem. Out: a number; 1 or more counts as solved.

# One number and nothing else, as "-12", "$1,234.50", "18 %" are, and "007", "1/2", "1,2" are not
NUMBER = re.compile(
    r"-?[$\u20ac\u00a3]?(?:0|[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d*)?(?:\.\d+)?(?<=\d) ?%?", re.ASCII
)


def normalized_answer(text):
    """Returns a text without differences of case and spaces, or the number that it is."""
    text = " ".join(text.replace("\u2212", "-").split())
    text = text.casefold().removesuffix(".")
    if len(text) <= 100 and NUMBER.fullmatch(text):
        return Fraction(re.sub(r"[^\d.-]", "", text))
    return text


def same_answer(answer, gold):
    """Whether two answers are equal texts, or equal numbers, as "$1,234.50" and "1234.5", but not
    as "$5" and "5 %"."""
    if normalized_answer(answer) != normalized_answer(gold):
        return False
    units = {*re.findall("[$\u20ac\u00a3%]", answer + gold)}
    return len(units) < 2 or answer == gold


def tagged_answer(text):
    """The text of the last <answer> that </answer> closes, or "" where there is none."""
    answers = re.findall("<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    return "".join(answers[-1:]).strip()


def score_answer(response_text, problem):
    """1.0 if the answer in the tags is problem["answer"], 0.1 if it is another, 0.0 without one.
    This scores the other skills, too, whatever the reward is.
    support/ wraps this function: it scores the equations of its Countdown, and answers without
    tags."""
    answer = tagged_answer(response_text)
    if not answer:
        return 0.0
    return 1.0 if same_answer(answer, str(problem["answer"])) else 0.1


def reward_fn(response_text, problem):
    """1.0 solved, 0.1 well-formed but wrong, 0.0 otherwise. Write your own reward here, or give
    one to main(): a function (response_text, problem) -> number. If it has a parameter that is
    named response, it gets the Response as well. With support/ it may be async, which is awaited
    for all responses at once, and give None for a response that it cannot score."""
    return score_answer(response_text, problem)


def no_reward(response_text, problem):
    """In training with reward=None: the KL term alone teaches."""
    return 0.0


def score(responses, problems, tokenizer, reward):
    """P * G Responses, P problems -> P * G texts, (P * G,) float64 rewards.
    support/ wraps this function: it awaits async rewards, and of several processes one scores."""
    # Without the stop token. Other special tokens stay: a fine-tuning may have added <answer>.
    all_ids = [r.response_ids[: len(r.response_ids) - r.finished] for r in responses]
    texts = tokenizer.batch_decode(all_ids)
    group_size = len(responses) // len(problems)
    takes_response = "response" in inspect.signature(reward).parameters
    rewards = torch.zeros(len(responses), dtype=torch.float64)  # on the CPU
    for i, text in enumerate(texts):
        problem = problems[i // group_size]
        if takes_response:
            value = reward(text, problem, response=responses[i])
        else:
            value = reward(text, problem)
        rewards[i] = float(value)
    return texts, rewards


# --------------------------------------------------------------------------------------------------
# 6. Advantages.  In: rewards. Out: how much better each response is than others of its group.


def compute_group_normalized_advantages(rewards, group_size, advantage_eps, normalize_by_std):
    """(P * G,) rewards, group after group -> (P * G,) advantages and statistics for the log.

    GRPO divides by the group's standard deviation (arXiv:2402.03300). Dr. GRPO does not, so that
    easy and hard prompts weigh the same (arXiv:2503.20783). With group_size 2, rewards [1, 0, 1, 1]
    become [+0.71, -0.71, 0, 0]: a group whose rewards are all equal teaches nothing.
    support/ wraps this function: a response that was not scored leaves its group."""
    groups = rewards.reshape(-1, group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    # The mean of equal rewards can be off by one bit, and so can sums of several. Here the
    # advantages of such a group become exactly 0.
    all_equal = torch.isclose(groups, groups[:, :1], rtol=1e-6).all(dim=1, keepdim=True)
    advantages = advantages.masked_fill(all_equal, 0.0)
    if normalize_by_std:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + advantage_eps)
    metadata = {
        "reward_mean": rewards.mean().item(),
        "reward_std": groups.std(dim=1).mean().item(),
        "frac_zero_std": all_equal.float().mean().item(),
    }
    return advantages.reshape(-1), metadata


# --------------------------------------------------------------------------------------------------
# 7. Batch.  In: responses. Out: (B, T) tensors; column t of each is about labels[:, t].


def make_batch(responses, advantages, device):
    """Responses, their advantages -> dict of (B, T) tensors.

    advantages: (B,), one for each response, or (B, L), one for each of its tokens, where L is the
    longest response. A row is a prompt and its response without a gap, padded on the right.
    input_ids and labels are shifted against each other once, here:

        prompt [5, 6], response [7, 8]:  input_ids [5, 6, 7]   labels [6, 7, 8]   mask [0, 1, 1]

    The mask comes from lengths and not from ids: the stop token may well be the padding token.
    What you add to the batch must be (B, T) or (B, 1), since it is cut like the rest."""
    rows = [torch.tensor(response.prompt_ids + response.response_ids) for response in responses]
    ids = pad_sequence(rows, batch_first=True)
    columns = torch.arange(ids.shape[1])
    starts = torch.tensor([[len(response.prompt_ids)] for response in responses])
    lengths = torch.tensor([[len(response.response_ids)] for response in responses])
    is_row = columns < starts + lengths
    mask = is_row & (columns >= starts)
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(-1, lengths.max())
    is_token = torch.arange(lengths.max()) < lengths  # advantages must be as wide
    log_probs = torch.cat([torch.tensor(response.log_probs) for response in responses])
    zeros = torch.zeros(ids.shape)
    batch = {
        # Padded with the row's first id: some models break at padding's own id.
        "input_ids": torch.where(is_row, ids, ids[:, :1])[:, :-1],
        "labels": ids[:, 1:],
        "response_mask": mask[:, 1:],
        "rollout_log_probs": zeros.masked_scatter(mask, log_probs)[:, 1:],
        "advantages": zeros.masked_scatter(mask, advantages[is_token].float())[:, 1:],
        "finished": torch.tensor([[response.finished] for response in responses]),  # (B, 1)
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


# What the loss of a step is a mean over. (B, T) float mask of the whole step, longest possible
# response -> (B, T) weight of each token in the loss.


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


def weights_of_tokens(batch, cfg):
    """Returns the (B, T) weight of each token in the loss. Call it for the whole step, before rows
    are left out and microbatches are cut: the gradient then depends on neither."""
    mask = batch["response_mask"]
    if cfg.mask_truncated:
        mask = mask & batch["finished"]
    return AVERAGES[cfg.loss_average](mask.float(), cfg.max_new_tokens)


def keep_rows(batch, rows):
    """Returns some rows of a batch: (B,) booleans, or indices."""
    return {name: tensor[rows] for name, tensor in batch.items()}


def cut_microbatches(batch, max_tokens):
    """Cuts a batch into microbatches of at most max_tokens tokens, padding included, or of one
    row. Rows of similar length come together, the longest first, since they need most memory.
    support/ replaces this function where several processes share the work."""
    mask = batch["response_mask"]
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    lengths = (mask * columns).amax(dim=1)
    order = lengths.argsort(descending=True, stable=True)
    microbatches = []
    while len(order) > 0:
        width = max(1, lengths[order[0]].item())
        n_rows = max(1, max_tokens // width)
        rows = keep_rows(batch, order[:n_rows])
        microbatches.append({name: tensor[:, :width] for name, tensor in rows.items()})
        order = order[n_rows:]
    return microbatches


# --------------------------------------------------------------------------------------------------
# 8. Log-probs.  In: (B, T) ids. Out: statistics of the response tokens.

LOGITS_AT_ONCE = 67_108_864  # float32 logits that a microbatch may hold, without support/


def all_log_probs(logits, temperature):
    """(N, V) logits -> (N, V) log-probs, of forbidden tokens (logit -inf) -1e9, not -inf: with a
    probability of 0 they then add 0 to sums over the vocabulary and to their gradients."""
    return scale_logits(logits, temperature).log_softmax(dim=1).clamp(min=-1e9)


def statistics_of_logits(logits, labels, temperature, ref_logits=None):
    """(N, V) logits of the policy and a reference, (N,) labels -> dict of (N,) tensors, in nats.

    All that the loss knows of the logits is computed here. A tensor that you add reaches
    grpo_microbatch_step under its name and, as a mean over the tokens that are trained on, the
    log. Without a KL term these are the tokens of responses that have an advantage."""
    labels = labels[:, None]
    log_p = all_log_probs(logits, temperature)
    stats = {
        "log_probs": log_p.gather(1, labels)[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(dim=1),
    }
    if ref_logits is not None:
        # A larger teacher of a family may have more logits, of no token
        ref_log_p = all_log_probs(ref_logits[:, : log_p.shape[1]], temperature)
        difference = log_p - ref_log_p
        stats["ref_log_probs"] = ref_log_p.gather(1, labels)[:, 0]
        stats["kl_per_token"] = (log_p.exp() * difference).sum(dim=1)  # KL(policy || reference)
        stats["kl_forward"] = -(ref_log_p.exp() * difference).sum(dim=1)  # KL(reference || policy)
    return stats


def response_logits(model, rows, precision):
    """Returns the (N, V) logits at the N response tokens. With padding on the right a causal model
    needs no attention mask."""
    with autocast(rows["input_ids"].device, precision):
        outputs = model(input_ids=rows["input_ids"], use_cache=False)
    return outputs.logits[rows["response_mask"]]


def token_statistics(model, rows, temperature, precision="float32", ref_model=None):
    """rows: (B, T) "input_ids", "labels", "response_mask" -> dict of (B, T) tensors, 0 outside the
    mask. The logits of all N response tokens are in memory at once; main() bounds N.
    support/ replaces this function by one that holds some of the logits at a time."""
    mask = rows["response_mask"]
    ref_logits = None
    if ref_model is not None:
        with torch.no_grad():  # the only place that runs the reference
            ref_logits = response_logits(ref_model, rows, precision)
    logits = response_logits(model, rows, precision)
    stats = statistics_of_logits(logits, rows["labels"][mask], temperature, ref_logits)
    zeros = torch.zeros(mask.shape, dtype=stats["log_probs"].dtype, device=mask.device)
    return {name: zeros.masked_scatter(mask, x.to(zeros.dtype)) for name, x in stats.items()}


def get_response_log_probs(
    model, input_ids, labels, response_mask, temperature=1.0, precision="float32"
):
    """For programs of yours: (B, T) ids and labels -> (B, T) float32 log-probs, 0 where masked."""
    rows = {"input_ids": input_ids, "labels": labels, "response_mask": response_mask.bool()}
    return token_statistics(model, rows, temperature, precision)["log_probs"]


# --------------------------------------------------------------------------------------------------
# 9. KL penalty.  In: log-probs. Out: a penalty for each token.
#
# Below, d = log pi - log ref, at a token that the policy sampled. Three choices are independent of
# each other: the estimator (which number), the gradient (of what), the placement (who pays for it).


def k1(d):
    """Unbiased, can be negative."""
    return d


def k2(d):
    """Biased, never negative."""
    return d.square() / 2


def k3(d):
    """exp(-d) - 1 + d: unbiased, never negative (J. Schulman, "Approximating KL divergence")."""
    return torch.expm1(-d) + d


# d -> an estimate of KL(policy || reference) in nats. It is the value; sampled_kl has the gradient.
ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}

# Estimators that are sums over the vocabulary, with their own gradient -> a key of the statistics
EXACT = {"exact": "kl_per_token", "exact_forward": "kl_forward"}

# Rules of adaptive KL: support/adaptive_rules.py has some of both kinds. For example
#     TERM_RULES["half"] = lambda kl, d, mask, cfg: kl / 2    (B, T) each: penalised instead of kl
#     COEFFICIENT_RULES["rise"] = lambda controller, cfg, kl, reward: 1.01 * controller.beta
# where kl and reward are the step's nats per token and mean reward, and the result the next beta.
TERM_RULES = {}
COEFFICIENT_RULES = {}


def rule_among(rules, cfg):
    """Returns the rule that cfg.kl_adaptation_method, such as "a+b", names among these, or None."""
    for name in cfg.kl_adaptation_method.split("+"):
        if name in rules:
            return rules[name]
    return None


def cfg_with(**changes):
    """Returns the settings of main() with these changes, for tests and programs of yours."""
    parameters = inspect.signature(main).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    return SimpleNamespace(**defaults | changes)


class KLSettings(SimpleNamespace):
    """main()'s settings of the KL term, with these changes, for programs of yours that use it
    alone. In this file cfg takes its place."""

    def __init__(self, **changes):
        defaults = vars(cfg_with())
        of_kl = {name: defaults[name] for name in defaults if name.startswith("kl_")}
        super().__init__(**of_kl | changes)
        check_names(self)


def check_names(cfg):
    """Raises InputError for a name that is not known: it would act like another one, or fail after
    a whole evaluation. KLSettings has some of the names only."""
    options = {
        "engine": ["vllm", "transformers"],
        "precision": ["auto", *DTYPES],
        "loss_average": AVERAGES,
        "kl_in": ["loss", "loss_to_go", "reward"],
        "kl_estimator": [*ESTIMATORS, *EXACT],
        "kl_gradient": ["reverse", "as_written"],
    }
    for name in options.keys() & vars(cfg).keys():
        check_known(name, getattr(cfg, name), options[name])
    for name in cfg.kl_adaptation_method.split("+"):
        check_known("kl_adaptation_method", name, ["none", *TERM_RULES, *COEFFICIENT_RULES])


def compute_kl_divergence(policy_log_probs, ref_log_probs, estimator="k1"):
    """(B, T), (B, T) -> (B, T): the estimate of the KL at each token, in nats."""
    return ESTIMATORS[estimator](policy_log_probs - ref_log_probs)


def add_gradient(value, surrogate):
    """Returns the value, with the gradients of both."""
    return value + (surrogate - surrogate.detach())


def sampled_kl(policy_log_probs, ref_log_probs, weight, cfg):
    """(B, T) log-probs of the sampled tokens -> (B, T) KL: the value is that of the estimator.

    The gradient is weight * d * grad log pi. With weight = pi / sampler its mean over what the
    sampler draws is the gradient of KL(policy || reference), whichever estimator gives the value.
    kl_gradient = "as_written" differentiates the estimator itself, to reproduce papers."""
    d = policy_log_probs - ref_log_probs
    estimator = ESTIMATORS[cfg.kl_estimator]
    if cfg.kl_gradient == "as_written":
        return estimator(d)
    d = d.detach()
    value = estimator(d.clamp(-20, 20))  # beyond, exp(-d) could overflow
    return add_gradient(value, weight * d * policy_log_probs)


def apply_term_rule(kl, d, mask, cfg):
    """(B, T) KL and log-ratios -> (B, T) what is penalised."""
    rule = rule_among(TERM_RULES, cfg)
    if rule is None:
        return kl
    return rule(kl, d, mask, cfg)


def sum_to_go(kl, mask):
    """(B, T) -> (B, T): sum over this token of the response and all later ones."""
    return torch.where(mask, kl, 0.0).flip(1).cumsum(1).flip(1)


def penalty_in_reward(d, mask, cfg):
    """(B, T) log-ratios at the rollout -> (B, T) what compute_loss takes off each advantage.

    A token pays for its own and all later KL, as measured at the rollout, in every epoch, inside of
    the PPO clip. With k1, and where the loss divides by a constant, this gives the gradient of the
    response's KL. With a term rule, which may look at the whole response, each token pays for all.
    """
    kl = apply_term_rule(ESTIMATORS[cfg.kl_estimator](d), d, mask, cfg)
    to_go = sum_to_go(kl, mask)
    if rule_among(TERM_RULES, cfg) is not None:
        return to_go[:, :1].expand_as(to_go)
    return to_go


def kl_penalty(policy_log_probs, ref_log_probs, sampler_log_probs, mask, cfg, vocab_kl=None):
    """(B, T) log-probs -> (B, T) penalty, which compute_loss multiplies by beta, and (B, T) tensors
    for the log. vocab_kl: (B, T), the KL over the vocabulary that an estimator in EXACT asks for.

    kl_ratio_cap cuts the weight pi / sampler, which bounds the gradient and biases it."""
    d = (policy_log_probs - ref_log_probs).detach()
    ratio = torch.exp(policy_log_probs - sampler_log_probs).detach()
    weight = ratio.clamp(max=cfg.kl_ratio_cap)
    if cfg.kl_estimator in EXACT:
        kl = vocab_kl
    else:
        kl = sampled_kl(policy_log_probs, ref_log_probs, weight, cfg)
    adapted = apply_term_rule(kl, d, mask, cfg)
    penalty = adapted
    if cfg.kl_in == "loss_to_go":
        # Token t also pays for the later KL to which it leads: later * weight * grad log pi_t. On
        # policy this is the gradient of the whole response's KL; "exact" has the least noise.
        later = (sum_to_go(adapted, mask) - adapted).detach()
        penalty = add_gradient(adapted, weight * later * policy_log_probs)
    elif cfg.kl_in == "reward":
        penalty = penalty_in_reward((sampler_log_probs - ref_log_probs).detach(), mask, cfg)
    metadata = {
        "kl_penalty_mean": kl,
        "adaptive_kl/adapted_kl": adapted,
        "kl_capped_frac": ratio > cfg.kl_ratio_cap,
    }
    for name, estimator in ESTIMATORS.items():
        metadata[f"kl_{name}"] = weight * estimator(d.clamp(-20, 20))
    return penalty, metadata


class KLController:
    """beta, the coefficient of the KL term, which a coefficient rule may move after each update."""

    def __init__(self, kl_coef, settings, state=None):
        self.start = kl_coef
        self.settings = settings  # cfg, or KLSettings
        self.rule = rule_among(COEFFICIENT_RULES, settings)
        self.state = state or {"step": 0, "beta": kl_coef}  # and what the rule keeps
        if self.rule is None:
            self.state["beta"] = kl_coef  # that of now, in a resumed run

    @property
    def beta(self):
        return self.state["beta"]

    def update(self, kl, reward):
        """kl: of the step, nats per token; reward: its mean. If one is not finite, beta stays."""
        self.state["step"] += 1
        if self.rule is not None and math.isfinite(kl + reward):
            self.state["beta"] = self.rule(self, self.settings, kl, reward)


# --------------------------------------------------------------------------------------------------
# 10. Loss.  In: log-probs and advantages. Out: the loss of each token, and the step's gradient.


def masked_mean(tensor, mask, dim=None):
    """For the log: the mean where the mask is 1, or 0 where it is empty. Masked nan do no harm."""
    mask = mask.bool()
    return torch.where(mask, tensor, 0).sum(dim) / mask.sum(dim).clamp(min=1)


def means_of_tokens(tensors, mask):
    """For the log: {name: (B, T) tensor} -> {name: its mean over the mask}."""
    return {name: masked_mean(tensor.detach().float(), mask) for name, tensor in tensors.items()}


def compute_loss(
    advantages,
    policy_log_probs,
    old_log_probs,
    clip_range,
    ref_log_probs=None,
    kl_coef=0.0,
    mask=None,
    kl_settings=None,
    vocab_kl=None,
    sampler_log_probs=None,
    importance_cap=math.inf,
):
    """(B, 1) or (B, T) advantages, (B, T) log-probs -> (B, T) loss: PPO-clipped term + kl_coef * KL
    (section 9), and metadata: means over the mask. clip_range: e, for ratios in [1 - e, 1 + e], or
    (low, high), DAPO's "clip-higher". Take no mean here: it would be over one microbatch alone."""
    if mask is None:
        mask = torch.ones_like(policy_log_probs)
    mask = mask.bool()
    policy_log_probs = torch.where(mask, policy_log_probs, 0.0)
    old_log_probs = torch.where(mask, old_log_probs, 0.0)
    if sampler_log_probs is None:
        sampler_log_probs = old_log_probs
    metadata = {}
    kl_loss = 0.0
    if ref_log_probs is not None:
        kl_settings = kl_settings or KLSettings()
        ref_log_probs = torch.where(mask, ref_log_probs, 0.0)
        penalty, metadata = kl_penalty(
            policy_log_probs, ref_log_probs, sampler_log_probs, mask, kl_settings, vocab_kl
        )
        if kl_settings.kl_in == "reward":
            advantages = advantages - kl_coef * penalty
        else:
            kl_loss = kl_coef * penalty
    # The sampler's engine computes slightly other log-probs than the trainer. Each token is
    # weighted by their ratio: truncated importance sampling (F. Yao et al., 2025, "On the
    # Rollout-Training Mismatch in Modern RL Systems").
    advantages = advantages * torch.exp(old_log_probs - sampler_log_probs).clamp(max=importance_cap)
    # The PPO-clipped term (arXiv:1707.06347). In the first epoch of a rollout the ratio is 1, but
    # its gradient is not 0; the clip acts only with epochs_per_rollout above 1.
    clip_low = clip_high = clip_range
    if isinstance(clip_range, (tuple, list)):
        clip_low, clip_high = clip_range
    ratio = torch.exp(policy_log_probs - old_log_probs)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    metadata["ratio_mean"] = ratio
    metadata["clip_frac"] = clipped_ratio * advantages < ratio * advantages
    return loss + kl_loss, means_of_tokens(metadata, mask)


NO_SCALING = torch.amp.GradScaler(enabled=False)


def grpo_microbatch_step(policy, rows, cfg, ref_model=None, kl_coef=0.0, scaler=NO_SCALING):
    """Forward pass, loss and backward pass of one microbatch.

    rows: what make_batch returns, and "weights". The first pass over them sets "old_log_probs", so
    that its ratio is 1; later epochs keep them. Returns its part of the step's loss, and metadata:
    means over its tokens. recipes/minibatches.patch makes an optimiser step per minibatch.
    support/ wraps this function: where memory runs out, the microbatch is cut in two."""
    mask = rows["response_mask"]
    stats = token_statistics(policy, rows, cfg.temperature, cfg.precision, ref_model)
    log_probs = stats["log_probs"]
    old_log_probs = rows.setdefault("old_log_probs", log_probs.detach())
    stats["sampler_logprob_diff"] = (old_log_probs - rows["rollout_log_probs"]).abs()
    loss, metadata = compute_loss(
        rows["advantages"],
        log_probs,
        old_log_probs,
        cfg.clip_range,
        stats.get("ref_log_probs"),
        kl_coef,
        mask,
        kl_settings=cfg,
        vocab_kl=stats.get(EXACT.get(cfg.kl_estimator)),
        sampler_log_probs=rows["rollout_log_probs"],
        importance_cap=cfg.importance_cap,
    )
    loss = torch.where(mask, loss * rows["weights"], 0.0).sum()
    scaler.scale(loss).backward()  # in fp16 small gradients would become 0
    if stats.keys() & metadata.keys():
        raise InputError(f"rename {stats.keys() & metadata.keys()}: compute_loss logs that, too")
    return loss.detach(), {**metadata, **means_of_tokens(stats, mask)}


# --------------------------------------------------------------------------------------------------
# 11. Evaluate and log.


def evaluate(policy, llm, tokenizer, problems, cfg):
    """Samples one response to each of the held-out problems. Returns {"solved", "reward_mean", ...}
    and samples: (problem, text, reward).
    support/ wraps this function: it adds "retention_<name>" of other skills."""
    prompts = [problem["prompt_ids"] for problem in problems]
    responses = rollout(policy, llm, prompts, cfg, "evaluate", 1, cfg.eval_temperature)
    texts, rewards = score(responses, problems, tokenizer, cfg.reward or reward_fn)
    metrics = {
        "solved": (rewards >= 1).float().mean().item(),
        "reward_mean": rewards.nanmean().item(),  # nan: not scored, as None with support/
        "response_length": fmean(len(response.response_ids) for response in responses),
    }
    return metrics, list(zip(problems, texts, rewards.tolist()))


def log_train(run, step, metrics):
    """Writes the metrics of a step to TensorBoard, and a line to the console."""
    run.log("train", metrics, step)
    steps_left = run.cfg.n_train_steps - step
    line = (
        f"Step {step}/{run.cfg.n_train_steps} | Reward: {metrics['reward_mean']:.3f} "
        f"| Equal: {metrics['frac_zero_std']:.0%} | Length: {metrics['response_length']:.1f} "
        f"| Grad norm: {metrics['grad_norm']:.3f} | {metrics['time/total']:.2f} s, "
        f"{steps_left * metrics['time/total'] / 60:.0f} min left"
    )
    if "kl_penalty" in metrics:
        line += f" | KL penalty: {metrics['kl_penalty']:.4f}"
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
# 12. A run.  Its folder, with settings, TensorBoard's log and the last two checkpoints.


def checkpoint_of(policy, optimizer):
    """Returns what a checkpoint holds of weights and moments.
    support/ replaces this function and the next one: for LoRA, and for several processes."""
    return {"model": policy.state_dict(), "optimizer": optimizer.state_dict()}


def load_checkpoint(policy, optimizer, saved):
    """Loads weights and moments. The optimiser keeps its settings, such as weight_decay."""
    policy.load_state_dict(saved["model"])
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({**saved["optimizer"], "param_groups": groups})


class Run:
    """A run's folder, and its state: what one step hands to the next besides the weights. With
    support/ it also knows data, reward and model by a hash, and a resumed run says which changed;
    this file alone does not look."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.state = {"step": 0, "controller": None, "before": None}
        self.writes_files = True  # as the only process, or the first of several
        self.stop = 0  # support/ sets it at Ctrl-C or SIGTERM: end after this step
        name = f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}_{cfg.run_name}"
        self.folder = Path(cfg.out_dir) / name
        if cfg.resume:
            folder = cfg.resume
            if folder is True:
                folder = f"{cfg.out_dir}/*"
            found = glob.glob(f"{folder}/settings.json")
            if not found:
                raise InputError(f"resume: {folder} is no folder of a run; give one")
            self.folder = Path(max(found)).parent

    def open(self, policy, optimizer):
        """Loads the newest checkpoint, if there is one, and makes the folder with its log."""
        from torch.utils.tensorboard import SummaryWriter

        for path in sorted(self.folder.glob("checkpoint_*.pt"))[-1:]:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            load_checkpoint(policy, optimizer, saved)
            self.state = saved["state"]
        if self.cfg.resume:  # of step 0, if there is no checkpoint
            print(f"resumed: {self.folder} after step {self.state['step']}")
        if self.writes_files:
            # What was logged after the checkpoint is dropped, since it will be logged again.
            next_step = self.state["step"] + 1 if self.state["before"] else 0
            self.writer = SummaryWriter(self.folder, purge_step=next_step)
            settings = json.dumps(vars(self.cfg), default=str, indent=1)
            (self.folder / "settings.json").write_text(settings, "utf-8")

    def log(self, kind, metrics, step):
        """Writes {name: number} to TensorBoard, under kind/ where a name has no kind of its own."""
        if self.writes_files:
            for name, value in metrics.items():
                self.writer.add_scalar(name if "/" in name else f"{kind}/{name}", value, step)

    def save(self, policy, optimizer):
        """Writes checkpoint_<step>.pt, which gets this name when it is on the disk: a checkpoint is
        whole or it is not there. The last two are kept."""
        content = {**checkpoint_of(policy, optimizer), "state": self.state}
        if not self.writes_files:
            return
        self.writer.flush()
        unfinished = self.folder / "unfinished"
        with open(unfinished, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.folder / f"checkpoint_{self.state['step']:08d}.pt")
        for path in sorted(self.folder.glob("checkpoint_*.pt"))[:-2]:
            path.unlink()


# --------------------------------------------------------------------------------------------------
# 13. The loop.


def sum_over_processes(sums):
    """{name: number} -> the same. support/ replaces this function: several processes add theirs."""
    return sums


def add_scaled(sums, values, factor):
    """Adds factor * values to sums, name by name."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + factor * value


def clip_gradient(policy, max_norm):
    """Scales the gradient down to this norm if it is longer. Returns its norm before.
    support/ replaces this function where several processes share the work."""
    return torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm).item()


def check_sampler(diff, step, first_diff, cfg):
    """Raises RunStopped where the sampler's log-probs differ from the trainer's by 1 nat per token,
    or much more than in step 1, as they do if the sampler has stale weights."""
    limit = cfg.max_sampler_diff
    if limit is None:
        limit = 0.1 if cfg.engine == "vllm" else 1.0
        if first_diff is not None:
            limit = 4 * first_diff + (2e-3 if cfg.precision == "float32" else 0.02)
    if not diff <= limit:
        raise RunStopped(
            f"step {step}: sampler and trainer disagree by {diff:.2g} nats per token (limit "
            f"{limit:.2g}): the sampler has stale or other weights, or draws otherwise; if on "
            "purpose, set max_sampler_diff = inf and see recipes/off_policy.patch"
        )


def leave_out_rows(policy, batch, step, probe, cfg, scaler=NO_SCALING):
    """Without a KL term a row whose advantages are all 0 has no gradient. Returns the batch without
    such rows, which saves their forward pass, too.

    If you give the loss another term, such as an entropy bonus, these rows have a gradient. So one
    of them is tried at first, and again after ten steps. probe: a dict that keeps what was
    found."""
    has_advantage = (batch["advantages"] != 0).any(dim=1)
    has_weight = (batch["weights"] != 0).any(dim=1)  # not if mask_truncated leaves it out
    others = keep_rows(batch, has_weight & ~has_advantage)
    if len(others["labels"]) == 0 or not has_advantage.any():
        return batch
    if step >= probe.get("next_step", 0):
        grpo_microbatch_step(policy, keep_rows(others, slice(1)), cfg, None, 0.0, scaler)
        left_out = clip_gradient(policy, cfg.max_grad_norm) == 0
        policy.zero_grad()
        if left_out != probe.get("left_out"):
            print(f"step {step}: rows without an advantage are left out: {left_out}")
        probe["left_out"] = left_out
        probe["next_step"] = step + 10
    if probe["left_out"]:
        return keep_rows(batch, has_advantage)
    return batch


def train(
    policy, tokenizer, llm, optimizer, problems, cfg, run, ref_model=None, kl_coef=0.0, watch=None
):
    """Trains the policy for cfg.n_train_steps steps, with evaluations. ref_model=None is plain
    GRPO. watch: a function (step, metrics, samples) that looks on, from support/.
    support/ wraps this function: after an error of the reward it saves a checkpoint."""

    def evaluate_at(step):
        metrics, samples = evaluate(policy, llm, tokenizer, problems.held_out, cfg)
        log_eval(run, step, metrics)
        if watch:
            watch(step, metrics, samples)
        state["after"] = metrics

    state = run.state
    controller = KLController(kl_coef, cfg, state["controller"])
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    n_prompts = cfg.rollout_batch_size // cfg.group_size
    probe = {}
    scaler = torch.amp.GradScaler(policy.device.type, enabled=cfg.precision == "fp16")
    scaler.load_state_dict(state.get("scaler") or scaler.state_dict())
    if state["before"] is None:
        evaluate_at(0)
        state["before"] = state["after"]

    for step in range(state["step"] + 1, cfg.n_train_steps + 1):
        # 1. Sample a group of responses to each prompt with the current policy.
        start = time.perf_counter()
        asked = problems_of_step(problems.train, step - 1, n_prompts, cfg.seed)
        prompts = [problem["prompt_ids"] for problem in asked]
        responses = rollout(policy, llm, prompts, cfg, step, cfg.group_size, cfg.temperature)
        rollout_seconds = time.perf_counter() - start

        # 2. Score them. The advantages compare the responses of one group alone.
        texts, rewards = score(responses, asked, tokenizer, cfg.reward or no_reward)  # (P * G,)
        advantages, metrics = compute_group_normalized_advantages(
            rewards, cfg.group_size, 1e-6, cfg.normalize_by_std
        )

        # 3. Lay the step out in (B, T) microbatches. The weights are those of the whole step.
        if cfg.gradient_checkpointing:
            train_checkpointed_layers(policy)
        batch = make_batch(responses, advantages, policy.device)
        batch["weights"] = weights_of_tokens(batch, cfg)
        if ref_model is None:
            batch = leave_out_rows(policy, batch, step, probe, cfg, scaler)
        n_tokens = batch["response_mask"].sum()
        microbatches = cut_microbatches(batch, cfg.max_tokens_per_microbatch)

        # 4. One optimiser step per epoch over the whole rollout.
        for group, learning_rate in zip(optimizer.param_groups, learning_rates):
            group["lr"] = learning_rate * min(1.0, step / max(1, cfg.warmup_steps))
        for epoch in range(cfg.epochs_per_rollout):
            beta = controller.beta
            sums = {}
            for rows in microbatches:
                loss, means = grpo_microbatch_step(policy, rows, cfg, ref_model, beta, scaler)
                share = rows["response_mask"].sum() / n_tokens
                add_scaled(sums, {"loss": loss}, 1.0)
                add_scaled(sums, means, share)
            sums = sum_over_processes({name: value.item() for name, value in sums.items()})
            check_sampler(sums["sampler_logprob_diff"], step, state.get("first_diff"), cfg)
            scaler.unscale_(optimizer)
            sums["grad_norm"] = clip_gradient(policy, cfg.max_grad_norm)
            add_scaled(metrics, sums, 1 / cfg.epochs_per_rollout)
            is_finite = math.isfinite(sums["loss"] + sums["grad_norm"])
            if is_finite and sums["grad_norm"] > 0:  # at 0 AdamW's moments alone would move them
                scaler.step(optimizer)
            scaler.update()  # after an overflow of fp16 to a smaller scale
            optimizer.zero_grad()
            if not is_finite:
                print(f"Warning: step {step} is skipped: loss or gradient is not finite")
                break
            if ref_model is not None:
                controller.update(sums["kl_per_token"], metrics["reward_mean"])

        # 5. Log, evaluate and save.
        metrics["lr"] = optimizer.param_groups[0]["lr"]
        metrics["response_length"] = fmean(len(response.response_ids) for response in responses)
        metrics["truncated_frac"] = fmean(not response.finished for response in responses)
        metrics["time/rollout"] = rollout_seconds
        metrics["time/total"] = time.perf_counter() - start
        if ref_model is not None:
            metrics["kl_penalty"] = metrics.pop("kl_penalty_mean")
            metrics["adaptive_kl/current_beta"] = beta
        state.setdefault("first_diff", metrics["sampler_logprob_diff"])
        state["step"] = step
        state["controller"] = controller.state
        state["scaler"] = scaler.state_dict()
        log_train(run, step, metrics)
        if watch:
            watch(step, metrics, (asked, texts, rewards, responses))
        is_last = run.stop or step == cfg.n_train_steps
        if is_last or (cfg.eval_every and step % cfg.eval_every == 0):
            evaluate_at(step)
        if is_last or (cfg.save_every and step % cfg.save_every == 0):
            run.save(policy, optimizer)
        if is_last:
            break


# --------------------------------------------------------------------------------------------------
# 14. The numbers.

# A preset fills the parameters of main() that are None. support/presets.py adds those of the small
# models, and says which one preset="auto" is.
PRESETS = {
    "qwen3-1.7b": dict(
        model_id="Qwen/Qwen3-1.7B",
        task="countdown",
        n_train_steps=80,
        rollout_batch_size=128,
        max_new_tokens=256,
        learning_rate=7e-6,
        warmup_steps=10,
        max_tokens_per_microbatch=4_096,
    ),
}


def apply_preset(cfg):
    """Puts the numbers of a preset into the settings that are None, and prints them."""
    name = "qwen3-1.7b" if cfg.preset == "auto" else cfg.preset
    taken = {key: x for key, x in PRESETS[name].items() if getattr(cfg, key) is None}
    vars(cfg).update(taken)
    print(f"preset {name}: {taken}")


def choose_device(cfg):
    """Replaces "auto" in the settings of device, precision and engine, and prints what is used."""
    if cfg.device == "auto":
        cfg.device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg.device = torch.device(cfg.device)
    on_gpu = cfg.device.type == "cuda"
    if cfg.precision == "auto":
        has_bf16 = torch.cpu.get_capabilities().get("amx_bf16", False)
        cfg.precision = "float32"
        if on_gpu:
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            cfg.precision = "fp16"
        if has_bf16:
            cfg.precision = "bf16"
    if cfg.engine == "auto":
        has_vllm = importlib.util.find_spec("vllm")
        cfg.engine = "vllm" if on_gpu and has_vllm else "transformers"
    print(f"{cfg.device} | precision: {cfg.precision} | engine: {cfg.engine}")


def check_settings(cfg):
    """Raises InputError for a value that would act like another one without a word. Python itself
    finds other mistakes, and support/ explains them."""
    check_names(cfg)
    if cfg.group_size < 2 or cfg.rollout_batch_size % cfg.group_size:
        raise InputError(
            f"group_size = {cfg.group_size} must be 2 or more, and divide rollout_batch_size = "
            f"{cfg.rollout_batch_size}; change one of them"
        )
    if cfg.temperature <= 0:
        raise InputError("temperature must be above 0; eval_temperature = 0 is greedy")
    if cfg.kl_in == "reward" and cfg.kl_estimator != "k1" and not cfg.reproduce_paper:
        raise InputError("kl_in = 'reward' works with kl_estimator = 'k1' alone; set that")
    if find_support() is None and (cfg.lora_rank or cfg.frozen_in_bf16):
        raise InputError("lora_rank and frozen_in_bf16 need the folder support/ beside this file")


def main(
    # Model and data. None takes the preset's value, if it has one; any other value wins over it.
    preset="auto",  # a name in PRESETS; the log prints what it sets
    model_id=None,  # a checkpoint folder or a Hugging Face name
    task=None,  # a name in TASKS, a function like those, JSONL, or "user/dataset" on the hub
    eval_file=None,  # held-out problems, JSONL or "user/data::test"; None: a quarter of task's
    reward=reward_fn,  # see section 5; None: only the KL term teaches, with ref_model_id
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
    gpu_mem_util=0.2,  # share of the GPU's memory for vLLM; with support/, from 1 on: GB of cache
    max_sampler_diff=None,  # nats per token between sampler and trainer; inf: no limit
    # Advantages and loss
    normalize_by_std=True,  # False: the advantage of Dr. GRPO, whose average is "dr_grpo"
    mask_truncated=False,  # True: responses cut at max_new_tokens are left out of the loss
    loss_average="dapo",  # a name in AVERAGES: "dapo", "grpo", "dr_grpo"
    clip_range=0.2,  # of the ratio pi / old; (0.2, 0.28) clips less above 1
    importance_cap=2.0,  # largest weight of a token that corrects for the sampler
    epochs_per_rollout=1,  # optimiser steps per rollout
    # KL penalty. README_KL.md has the measured tables.
    use_kl_penalty=False,  # True costs a copy of the model (none with LoRA) and a forward pass
    ref_model_id=None,  # a teacher as the reference: a folder or name; None: the model as it starts
    kl_coef=0.3,  # measured on the built-in model and on SmolLM2; smaller ones did hardly anything
    kl_estimator="k3",  # or "k1", "k2": another value, in "loss" the same gradient; or of EXACT
    kl_gradient="reverse",  # of KL(policy || reference), for k1 to k3; "as_written": as in papers
    kl_in="loss",  # "loss_to_go", "reward" (with "k1"): a token also pays for the KL of later ones
    kl_adaptation_method="none",  # a name in TERM_RULES or COEFFICIENT_RULES, or "a+b" of both
    kl_ratio_cap=2.0,  # largest pi / sampler in the KL's gradient; inf: unbiased, but unbounded
    kl_clip_threshold=None,  # nats, of clip (None: 1.0) and clip_sound (None: 5.0)
    kl_target=0.1,  # nats per token; this and the next four are of support/adaptive_rules.py
    dynamic_beta_decay=0.9,
    reward_threshold=0.8,
    beta_min=0.0,
    beta_schedule_steps=1000,
    reproduce_paper=False,  # True: run KL terms that are refused (with support/) as of no use
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
    save_every=50,  # steps between checkpoints; 0: at the end, and with support/ after Ctrl-C
    resume=None,  # the folder of a run, to go on from its checkpoint; True: of the newest
):
    cfg = SimpleNamespace(**locals())
    support = find_support()
    if support:  # support/, 1 of 4: kind and range of each setting
        support.check_settings(cfg)
    else:
        print(
            "support/ is not here, so give --model_id ID --task FILE.jsonl; without it a run is "
            "slower, needs more memory, and has no LoRA, no warnings and no report"
        )
    apply_preset(cfg)
    choose_device(cfg)
    check_settings(cfg)
    run = Run(cfg)
    if support:  # support/, 2 of 4: memory, the folder of a resumed run, several processes
        support.check(run)

    # Load problems, model, reference, engine and optimiser.
    problems = load_problems(cfg)
    policy, tokenizer = init_policy(cfg.model_id, cfg.device)
    cfg.stop_token_ids = find_stop_tokens(policy, tokenizer)
    problems = Problems(*[with_prompt_ids(part, policy, tokenizer, cfg) for part in problems])
    if not problems.train or not problems.held_out:
        raise InputError(
            f"task = {cfg.task!r} has {len(problems.train)} prompts to train on, "
            f"{len(problems.held_out)} held out; give more or shorter ones, an eval_file, or a "
            "lower max_new_tokens"
        )
    ref_model = None
    if cfg.ref_model_id:
        ref_model = init_teacher(cfg.ref_model_id, tokenizer, cfg.device)
    elif cfg.use_kl_penalty and not cfg.lora_rank:  # with LoRA support/ makes it
        ref_model = copy.deepcopy(policy).eval().requires_grad_(False)
    if support:  # support/, 3 of 4: LoRA, faster mechanics
        ref_model = support.prepare(policy, ref_model, tokenizer, problems, cfg)
    else:
        most = LOGITS_AT_ONCE // policy.config.get_text_config().vocab_size
        cfg.max_tokens_per_microbatch = min(most, cfg.max_tokens_per_microbatch)
    if cfg.gradient_checkpointing:
        policy.gradient_checkpointing_enable()
    llm = None
    if cfg.engine == "vllm":
        longest = max(len(problem["prompt_ids"]) for part in problems for problem in part)
        longest += cfg.max_new_tokens
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
    if support:  # support/, 4 of 4: warnings, Ctrl-C, and after the run the report
        watch = support.watch(run)

    train(policy, tokenizer, llm, optimizer, problems, cfg, run, ref_model, cfg.kl_coef, watch)

    # Save the model, and report.
    weights = dict(weights_by_name(policy))
    if run.writes_files:
        policy.save_pretrained(run.folder / "model", state_dict=weights)
        tokenizer.save_pretrained(run.folder / "model")
    result = {
        "before": run.state["before"],
        "after": run.state["after"],
        "run_folder": run.folder,
    }
    if watch:
        optimizer.state.clear()  # room for a second model
        watch.report(result, policy, ref_model, llm, tokenizer, problems)
    print(f"the model: {run.folder}/model | the curves: tensorboard --logdir {run.folder.parent}")
    return result


# --------------------------------------------------------------------------------------------------
# 15. Quick tests.  They take two seconds and run before main().

VOCABULARY = 200_000  # of their models: larger than others, so that you may forbid any token


def test_kl_gradient():
    """Fails if the expected gradient of the KL term is not that of KL(policy || reference)."""
    logits = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64)[None].requires_grad_()
    ref_logits = logits.detach().square()
    log_p, ref_log_p = all_log_probs(logits, 1.0), all_log_probs(ref_logits, 1.0)
    probs = log_p.exp()
    [by_hand] = torch.autograd.grad((probs * (log_p - ref_log_p)).sum(), logits, retain_graph=True)
    exact = statistics_of_logits(logits, torch.tensor([0]), 1.0, ref_logits)["kl_per_token"]
    for estimator in [*ESTIMATORS, "exact"]:
        # Column i is token i. It is drawn with its probability, by which its penalty is weighted.
        cfg = KLSettings(kl_estimator=estimator)
        mask = probs.bool()
        penalty, _ = kl_penalty(log_p, ref_log_p, log_p.detach(), mask, cfg, exact[:, None])
        mean = (probs.detach() * penalty).sum()
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
    policy = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **small))
    cfg = cfg_with(precision="float32", max_new_tokens=9)
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
        for rows in cut_microbatches(batch, max_tokens):
            grpo_microbatch_step(policy, rows, cfg)
        gradients.append(policy.lm_head.weight.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)
    torch.optim.SGD(policy.parameters(), lr=0.1).step()
    assert log_prob_by_hand(policy, responses[0]) > before[0]
    assert log_prob_by_hand(policy, responses[1]) < before[1]


def test_functions():
    """Runs the quick tests. One that fails says what that means, and training goes on."""
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
    words = {
        "inf": math.inf,
        "true": True,
        "yes": True,
        "on": True,
        "false": False,
        "no": False,
        "off": False,
    }
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return words.get(text, text)


def settings_from(arguments):
    """["--n_train_steps", "50"] -> {"n_train_steps": 50}. --help shows the parameters of main(). A
    name may be cut short, as in --learning 1e-5."""
    if "--help" in arguments:
        print(inspect.getsource(main).split("\n):")[0])
        raise SystemExit
    parser = argparse.ArgumentParser(
        usage="starter.py --name value ... (names: --help; TRL's names for them: docs/trl.md)",
        argument_default=argparse.SUPPRESS,
    )
    for name in inspect.signature(main).parameters:
        # Without a value it is True, as in --use_kl_penalty
        parser.add_argument(f"--{name}", type=value_of, nargs="?", const=True)
    return vars(parser.parse_args(arguments))


if __name__ == "__main__":
    try:
        settings = settings_from(sys.argv[1:])
        test_functions()
        main(**settings)
    except (InputError, RunStopped, FileNotFoundError, PermissionError) as error:
        raise SystemExit(f"starter.py stopped: {error}")
    except KeyboardInterrupt:
        raise SystemExit(130)
