"""Guards and reports around a run of starter.py. Nothing here enters a loss or a gradient.

GuardedRun takes the place of starter.Run: it checks every setting, keeps checksums of checkpoints,
locks its folder, survives a full disk, lack of memory and an engine that dies, limits the time of
a reward, warns of signs of trouble, and reports the KL by position and by token.
"""
import contextlib
import functools
import gc
import hashlib
import inspect
import json
import math
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch

import starter
from starter import InputError, RunStopped
from support import memory, pictures

MAX_SKIPPED_STEPS = 5  # in a row, before the run stops
SAMPLES_EVERY = 10  # steps between the best and worst samples in TensorBoard
REWARD_SECONDS = 10.0  # a reward that takes longer on one text stops the run
ENGINE_SECONDS = 1800.0  # a call of vLLM that takes longer counts as hung: it is started again

# --------------------------------------------------------------------------------------------------
# 1. What each parameter of main() must be


def is_number(value, kind=(int, float)):
    """Whether it is a number, and finite. True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool) and -1e300 < value < 1e300


def is_path(value):
    return isinstance(value, (str, Path)) and str(value) != ""


def is_text_like(value, pattern):
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def at_least(low):
    return (f"a whole number from {low} to 10**9",
            lambda value: is_number(value, int) and low <= value <= 10**9)


def one_of(*options):
    return ("one of " + ", ".join(map(repr, options)),
            lambda value: isinstance(value, str) and value in options)


def between(low, high):
    return f"a number from {low} to {high}", lambda value: is_number(value) and low <= value <= high


def is_clip_range(value):
    values = value if isinstance(value, (tuple, list)) and len(value) == 2 else [value]
    return all(is_number(x) and x >= 0 for x in values) and (is_number(values[0])
                                                             and values[0] <= 0.99)


def is_file_of_problems(task):
    return isinstance(task, (str, Path)) and str(task).endswith(".jsonl")


def is_task(value):
    known = isinstance(value, str) and value in starter.TASKS
    return known or callable(value) or is_file_of_problems(value)


# What is required, whether a value is that, and for each parameter a value that works.
RULES = [
    (*one_of("auto", "vllm", "transformers"), dict(engine="auto")),
    (*one_of("grpo", "dapo", "dr_grpo"), dict(loss_average="dapo")),
    (*one_of("k1", "k2", "k3", "exact"), dict(kl_estimator="k3")),
    (*one_of("reverse", "as_written"), dict(kl_gradient="reverse")),
    (*one_of("loss", "loss_to_go", "reward"), dict(kl_in="loss")),
    ("a text such as 'dynamic+sigmoid'", lambda v: isinstance(v, str),
     dict(kl_adaptation_method="none")),
    ("'auto', 'cpu', 'mps', 'cuda' or 'cuda:N'",
     lambda v: re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", str(v)), dict(device="auto")),
    ("'tiny', a checkpoint folder or a Hugging Face name", is_path, dict(model_id="tiny")),
    ("the path of a folder", is_path, dict(out_dir="runs")),
    ("None or the path of a JSONL file", lambda v: v is None or is_path(v),
     dict(eval_file="test.jsonl")),
    ("None or a name on the Hugging Face hub such as 'openai/gsm8k:main'",
     lambda v: v is None or is_text_like(v, r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?"),
     dict(dataset=None)),
    ("None or a name of letters, digits and . + - _",
     lambda v: v is None or is_text_like(v, r"[\w.+-]{1,100}"),
     dict(run_name="first")),
    ("None, a checkpoint or the folder of a run", lambda v: v is None or is_path(v),
     dict(resume_from=None)),
    ("True, False or the folder of a run", lambda v: isinstance(v, bool) or is_path(v),
     dict(resume=False)),
    ("True or False", lambda v: isinstance(v, bool),
     dict(normalize_by_std=True, mask_truncated=False, enable_thinking=False, use_kl_penalty=True,
          reproduce_paper=False, gradient_checkpointing=False)),
    ("'auto', True or False", lambda v: v == "auto" or isinstance(v, bool), dict(bf16="auto")),
    (*at_least(0), dict(seed=0, lora_rank=16, warmup_steps=10, eval_every=50, save_every=50)),
    (*at_least(1), dict(n_train_steps=100, max_new_tokens=256, epochs_per_rollout=1,
                        n_eval_problems=500, beta_schedule_steps=1000)),
    (*at_least(2), dict(rollout_batch_size=128, group_size=8)),
    (*at_least(16), dict(max_tokens_per_microbatch=16_384)),
    ("a number from 0 to 0.99, or a pair (below 1, above 1)", is_clip_range,
     dict(clip_range=0.2)),
    (*between(0, 1), dict(weight_decay=0.0)),
    (*between(0, 10), dict(eval_temperature=0.0)),
    (*between(0.01, 10), dict(temperature=1.0)),
    (*between(0.05, 0.95), dict(gpu_mem_util=0.4)),
    ("a number", is_number, dict(reward_threshold=0.8)),
    ("a number above 0", lambda v: is_number(v) and v > 0,
     dict(learning_rate=1e-5, max_grad_norm=1.0)),
    ("a number above 0, in nats per token", lambda v: is_number(v) and v > 0, dict(kl_target=0.1)),
    ("a number above 0 and below 1", lambda v: is_number(v) and 0 < v < 1,
     dict(dynamic_beta_decay=0.9)),
    ("a number of at least 0", lambda v: is_number(v) and v >= 0, dict(kl_coef=0.3, beta_min=0.0)),
    ("None or a number of at least 0", lambda v: v is None or is_number(v) and v >= 0,
     dict(kl_clip_threshold=None)),
    ("None or a number of at least 1", lambda v: v is None or is_number(v) and v >= 1,
     dict(importance_cap=2.0)),
]


def short(value):
    """repr, cut to a length that can be read."""
    text = repr(str(value) if isinstance(value, Path) else value)
    return text if len(text) <= 200 else text[:200] + "..."


def plain_numbers(value):
    """Returns the value with numpy's and torch's numbers as Python's."""
    if type(value) in (list, tuple):
        return type(value)(map(plain_numbers, value))
    return value.tolist() if hasattr(value, "tolist") else value


def check_every_setting(cfg):
    """Raises InputError for the first setting that cannot work. Loads no model."""
    for name in cfg.parameters:
        setattr(cfg, name, plain_numbers(getattr(cfg, name)))
    known = ", ".join(map(repr, starter.TASKS))
    rules = [(f"one of {known}, the path of a .jsonl file, or a function", is_task,
              dict(task="countdown")), *RULES]
    for requirement, works, examples in rules:
        for name, example in examples.items():
            if name not in cfg.parameters:  # somebody has taken it out of main()
                continue
            value = getattr(cfg, name)
            if not works(value):
                options = re.findall(r"'(\w+)'", requirement)
                remedy = starter.nearest(value, options) if options else ""
                if not remedy.startswith("did you mean"):
                    remedy = f"use for example {example!r}"
                raise InputError(f"{name} = {short(value)} must be {requirement}; {remedy}")
    check_files(cfg)
    check_model_folder(cfg.model_id)
    check_out_dir(cfg.out_dir)


def check_files(cfg):
    """The files of problems must be there, and read by somebody."""
    if cfg.dataset is not None and (callable(cfg.task) or is_file_of_problems(cfg.task)):
        raise InputError(f"task = {short(starter.describe(cfg.task))} and dataset = "
                         f"{cfg.dataset!r} are both given; leave one of them out")
    for name in (*(["task"] if is_file_of_problems(cfg.task) else []), "eval_file"):
        path = getattr(cfg, name)
        if path is not None and not (os.path.isfile(path) and os.access(path, os.R_OK)):
            raise InputError(f"{name} = {short(path)} is not a file that can be read; give the "
                             "path of a JSONL file")


def check_model_folder(model_id):
    """A path must be a checkpoint folder; "tiny" and a Hugging Face name are looked up later."""
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(model_id))
    if str(model_id) == "tiny" or is_hub_name and not os.path.exists(model_id):
        if not (is_hub_name and isinstance(model_id, Path)):
            return
    if not os.path.isdir(model_id):
        near = starter.nearest(model_id, ["tiny"])
        raise InputError(f"model_id = {short(model_id)} is not a folder; give a checkpoint folder "
                         f"or a Hugging Face name; {near if 'mean' in near else 'see README.md'}")
    names = {path.name for pattern in ("config.json", "*.safetensors", "*.bin")
             for path in Path(model_id).glob(pattern)}
    if not {"config.json"} < names:
        raise InputError(f"model_id = {short(model_id)} is not a checkpoint: config.json and "
                         "*.safetensors are not there; give a folder written by save_pretrained")


def check_out_dir(out_dir):
    """It must be a possible name, and its nearest existing parent a folder that can be written."""
    parent = Path(out_dir).absolute()
    longest = max(len(os.fsencode(part)) for part in parent.parts)
    if "\0" in str(out_dir) or longest > 255:
        raise InputError(f"out_dir = {short(out_dir)} cannot be written: no folder can have this "
                         "name; use out_dir = 'runs'")
    while not os.path.exists(parent) and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK) or str(parent).startswith("/proc"):
        raise InputError(f"out_dir = {short(out_dir)} cannot be written: {parent} is not a folder "
                         "that can be written to; use one that is")


def check_tokenizer(policy, tokenizer, model_id):
    """The tokenizer must make something of a text, and the chat template show the user's message.
    A model may have more tokens than its tokenizer (rows added for speed)."""
    if not tokenizer("1 + 1")["input_ids"]:
        raise InputError(f"the tokenizer of {model_id} makes nothing of a text; save it there with "
                         "save_pretrained")
    if not all(parameter.isfinite().all() for parameter in policy.parameters()):
        raise InputError(f"model_id = {short(model_id)} has weights that are not finite; give "
                         "another checkpoint")
    if tokenizer.chat_template is None:
        return
    chat = [{"role": "user", "content": "1 + 1"}]
    settings = dict(tokenize=False, enable_thinking=False)
    try:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, **settings)
        without = tokenizer.apply_chat_template(chat, add_generation_prompt=False, **settings)
    except Exception as error:  # the template is a program of its author's
        raise InputError(f"the chat template of {model_id} fails on a user's message ({error}); "
                         "mend it, or delete it to have prompts taken as they are") from error
    if "1 + 1" not in text:
        raise InputError(f"the chat template of {model_id} leaves out the user's message; mend it, "
                         "or delete it to have prompts taken as they are")
    if text == without:
        print(f"Warning: the chat template of {model_id} adds no generation prompt: responses "
              "follow the user's turn directly, which is right for some models only")


def check_problems(problems, task):
    """Each must have a prompt, and none may be on both sides."""
    for kind, some in (("training", problems.train), ("held-out", problems.held_out)):
        if not all(isinstance(problem, dict) and problem.get("prompt") for problem in some):
            raise InputError(f"task = {task!r} gave a {kind} problem without a 'prompt'; each "
                             "problem must be a dict with a text under 'prompt'")


def check_overlap(problems):
    """Held-out problems must not be trained on."""
    trained_on = {str(problem["prompt"]) for problem in problems.train}
    held_out = [str(problem["prompt"]) for problem in problems.held_out]
    both = [prompt for prompt in held_out if prompt in trained_on]
    if both:
        raise InputError(f"{len(both)} of {len(problems.held_out)} held-out problems are also "
                         f"trained on, for example {both[0][:80]!r}; take them out of one of the "
                         "two lists")


def too_few(problems, cfg):
    """Returns a warning where so few problems are held out that the solved rate says little."""
    n = len(problems.held_out)
    if n >= min(30, cfg.n_eval_problems):
        return []
    return [f"Warning: {n} held-out problem{'s are' if n > 1 else ' is'} too few to tell whether "
            "the model gets better; give more data, or an eval_file"]


def unknown_in(problems, tokenizer):
    """Returns a warning where the tokenizer has no token for a character of the prompts."""
    texts = [p if isinstance(p, str) else " ".join(str(message["content"]) for message in p)
             for p in (problem["prompt"] for problem in problems.train)]
    unknown = {letter for letter in set("".join(texts)) if tokenizer.unk_token_id is not None
               and tokenizer(letter, add_special_tokens=False)["input_ids"] ==
               [tokenizer.unk_token_id]}
    n = sum(not unknown.isdisjoint(text) for text in texts)
    if not n:
        return []
    return [f"Warning: {n} of {len(texts)} prompts hold characters that the tokenizer does not "
            f"know, such as {' '.join(sorted(unknown)[:10])!r}: the model cannot see them; write "
            "the prompts without them, or take another model"]


def estimated_time(policy, cfg):
    """Returns a line with the most that a run on a CPU may take, if that is a minute or more:
    sampling and learning take about eight operations per parameter and token, at the speed of a
    large matrix product here."""
    side = 1024
    matrix = torch.ones(side, side)
    start = time.perf_counter()
    for _ in range(3):
        matrix @ matrix
    operations_per_second = 3 * 2 * side**3 / (time.perf_counter() - start)
    n_parameters = sum(parameter.numel() for parameter in policy.parameters())
    tokens = cfg.rollout_batch_size * cfg.max_new_tokens
    seconds = 8 * n_parameters * tokens * cfg.epochs_per_rollout / operations_per_second
    minutes = seconds * cfg.n_train_steps / 60
    return [f"on this CPU a step of full responses may take about {seconds:.1f} s, all "
            f"{cfg.n_train_steps} steps {minutes:.0f} min"] if minutes >= 1 else []


def notes_on_kl(cfg):
    """Returns a line for each way in which the KL term is not what its name says."""
    kl = cfg.kl
    notes = []
    if kl.gradient == "as_written" and kl.placement != "reward" and kl.estimator != "exact":
        meaning = {"k1": "its expected gradient is zero",
                   "k2": "reverse KL in a rollout's first epoch, biased in later ones",
                   "k3": "its gradient is that of forward KL(reference || policy)"}
        notes.append(f"KL term: {kl.estimator} as written; {meaning[kl.estimator]}")
    if kl.placement == "loss_to_go" and kl.estimator == "k3":
        notes.append("KL term: the k3 of later tokens has no bound and enters the gradient; "
                     "'exact' has less variance")
    if kl.placement != "loss" and cfg.loss_average == "grpo":
        notes.append(f"KL term: kl_in = {kl.placement!r} under loss_average = 'grpo' is weighted "
                     "by 1 / own length, which is not the gradient of the sequence KL; 'dr_grpo' "
                     "is")
    return notes


def notes_on_learning_rate(cfg):
    """Returns a line where the learning rate was made for another model, or for all weights."""
    rate = cfg.learning_rate
    if cfg.lora_rank and rate < 1e-4:
        return [f"learning_rate = {rate:g} is small for LoRA adapters, which need about ten times "
                "the rate of all weights; SmolLM2 learnt with 2e-4"]
    if rate == 7e-6 and "Qwen3-1.7B" not in str(starter.origin_of(cfg.model_id)):
        return [f"learning_rate = {rate:g} is meant for Qwen3-1.7B; SmolLM2-135M learnt with 2e-5, "
                "the built-in model with 3e-4"]
    return []


# --------------------------------------------------------------------------------------------------
# 2. Time limits, and an engine that can be started again

class TimedOut(BaseException):
    """Not an Exception, so that the code that took too long cannot catch it."""


@contextlib.contextmanager
def time_limit(seconds):
    """Raises TimedOut inside after so many seconds. There is no limit on Windows and outside the
    main thread, which hear no SIGALRM. Python code is stopped; a call that never returns from C
    is not."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not (in_main_thread and hasattr(signal, "setitimer")):
        yield
        return

    def ring(*_):
        raise TimedOut

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # and again, should the first be swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class RestartedVLLM:
    """vLLM's LLM, as far as starter.py calls it. A call that fails or takes longer than
    ENGINE_SECONDS is made once more, in a new engine with the present weights. A second failure
    in the same call raises RunStopped."""

    def __init__(self, start, policy, ranks):
        self.start = start
        self.policy = policy
        self.ranks = ranks
        self.llm = start()

    def call(self, name, *args, **settings):
        states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        for attempt in (1, 2):
            try:
                with time_limit(ENGINE_SECONDS):
                    if self.llm is None:
                        self.llm = self.start()
                        starter.load_policy_into_vllm_instance(self.policy, self.llm)
                        random.setstate(states[0])  # a new engine sets the global generators
                        numpy.random.set_state(states[1])
                        torch.set_rng_state(states[2])
                    return getattr(self.llm, name)(*args, **settings)
            except (Exception, TimedOut) as error:
                what = f"failed ({type(error).__name__}: {error})"
                if isinstance(error, TimedOut):
                    what = f"did not return within {ENGINE_SECONDS:g} s"
            self.llm = None
            gc.collect()
            again = attempt == 1 and self.ranks.world == 1  # other ranks give no weights now
            if not again:
                times = ", twice" if attempt == 2 else ""
                raise RunStopped(f"vLLM's {name} {what}{times}; resume = True goes on from the "
                                 "checkpoint")
            print(f"Warning: vLLM's {name} {what}; it is started again with the present weights",
                  flush=True)

    def __getattr__(self, name):
        return functools.partial(self.call, name)


def check_vllm(policy, llm, prompts, cfg):
    """Raises RunStopped unless vLLM, given the policy's weights, samples with its log-probs."""
    sampling = starter.sampling_for(cfg, "self-check", 2,
                                    max_new_tokens=min(16, cfg.max_new_tokens))
    some_prompts = [min(prompts, key=len), max(prompts, key=len)]
    try:
        starter.load_policy_into_vllm_instance(policy, llm)
        responses = starter.rollout_with_vllm(llm, some_prompts, sampling)
        starter.check_sampler(policy, responses, sampling)
    except Exception as error:  # code of vLLM runs here
        raise RunStopped(f"vLLM does not sample as {type(policy).__name__} does "
                         f"({starter.in_one_line(error)}); use engine = 'transformers'") from error


# --------------------------------------------------------------------------------------------------
# 3. Checksums, memory

def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def hash_of_weights(model):
    """Returns the SHA-256 of a model's parameters: which start this is, whatever its folder."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().numpy())
    return digest.hexdigest()


def damage(checkpoint):
    """Returns what is wrong with a checkpoint, or ""."""
    try:
        if checkpoint.with_suffix(".sha256").read_text("utf-8") == sha256(checkpoint):
            return ""
        return "its checksum is another"
    except (OSError, ValueError) as error:
        return str(error)


def is_out_of_memory(error):
    """Whether torch raised it because memory ran out; on a CPU its allocator's words tell."""
    return (isinstance(error, torch.OutOfMemoryError)
            or "DefaultCPUAllocator: can't allocate memory" in str(error))


def peak_memory_gb():
    """Returns the most memory used so far: the GPU's where torch uses one, else this process's."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


# --------------------------------------------------------------------------------------------------
# 4. Settings of the KL term that change nothing

def effects_of(cfg, policy, ref_model, batch, parts):
    """Returns what the KL settings in cfg change: the gradient of one weight matrix on this
    batch, a walk of beta, the loss."""
    learning = [p for p in policy.base_model.parameters() if p.requires_grad]
    last = learning[-1]  # every token's gradient passes here
    rows = dict(batch)
    loss, _, _ = starter.grpo_microbatch_step(policy, rows, cfg, ref_model, cfg.kl_coef,
                                              parts.compute)
    gradient = last.grad.clone()
    policy.zero_grad()
    highest = 1.0 if cfg.reward is starter.reward_fn else math.inf
    walk = [(1.0, highest), (0.1, 0.0), (0.01, 0.5), (0.03, 0.85)]  # KL, reward
    controller = starter.KLController(cfg.kl_coef, cfg.kl)
    betas = []
    for i in range(max(8, cfg.n_train_steps)):
        kl, reward = walk[i % 4]
        controller.update(kl, min(reward, cfg.reward_threshold + 1))
        betas.append(controller.beta)
    return gradient, torch.tensor(betas) / cfg.kl_coef, loss


def refuse_settings_without_effect(cfg, policy, ref_model, responses, parts):
    """Raises InputError for a KL setting that differs from main()'s and changes neither loss nor
    gradient nor coefficient.

    Compares one microbatch, and a walk of the coefficient rule, with the setting and without it.
    The reference moves away from the policy token by token: at the start it equals the policy,
    and no setting could do anything.
    """
    defaults = {name: p.default for name, p in inspect.signature(starter.main).parameters.items()}
    names = [name for name in starter.KL_NAMES if name != "kl_coef" and name in defaults]
    changed = [name for name in names if getattr(cfg, name) != defaults[name]]
    batch = starter.make_batch(responses, torch.linspace(-1, 1, len(responses)), policy.device)
    batch["weights"] = starter.token_weights(batch["response_mask"], cfg.loss_average,
                                             cfg.max_new_tokens)
    with torch.no_grad():
        hidden = parts.compute.hidden_states(ref_model, batch)  # (N, H)
    far = torch.linspace(0, 1, len(hidden), device=hidden.device)[:, None]
    batch["ref_hidden"] = hidden + far * (2 * hidden.roll(1, 0) - hidden)
    if cfg.epochs_per_rollout > 1:
        batch["old_log_probs"] = batch["rollout_log_probs"].flip(0)  # ratios other than 1
    cfg = SimpleNamespace(**vars(cfg) | {"bf16": False})
    with_all = effects_of(cfg, policy, ref_model, batch, parts)
    for name in changed:
        other = SimpleNamespace(**vars(cfg) | {name: defaults[name]})
        other.kl = starter.kl_settings(other)
        without = effects_of(other, policy, ref_model, batch, parts)
        same = [(a - b).norm() <= 1e-6 * a.norm() for a, b in zip(with_all, without)]
        if other.kl != cfg.kl and all(same):
            raise InputError(f"{name} = {getattr(cfg, name)!r} changes nothing here: loss and "
                             "gradient are the same without it; leave it at "
                             f"{defaults[name]!r}")
    without = effects_of(SimpleNamespace(**vars(cfg) | {"kl_coef": cfg.kl_coef * 1e-9}), policy,
                         ref_model, batch, parts)
    if (with_all[0] - without[0]).norm() <= 1e-6 * with_all[0].norm():
        raise InputError(f"kl_coef = {cfg.kl_coef!r} changes nothing here: loss and gradient are "
                         "the same without it; use a larger one")


# --------------------------------------------------------------------------------------------------
# 5. Report

def wilson_interval(share, n):
    """Returns the ends of the 95 % interval of a share of n (E. B. Wilson, 1927)."""
    z = 1.96
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2) / (1 + z * z / n)
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def as_given(problems):
    """The problems as they were read, without the token ids of their prompts."""
    return [{name: value for name, value in problem.items() if name != "prompt_ids"}
            for problem in problems]


@torch.no_grad()
def measure_kl(policy, start_model, llm, problems, cfg, parts):
    """Samples a response to each problem. Returns (3, N): the exact KL(policy || start_model) at
    each token in nats, the token's place in its response, and its id."""
    sampling = starter.sampling_for(cfg, "measure_kl")
    prompts = [problem["prompt_ids"] for problem in problems]
    responses = starter.rollout(policy, llm, prompts, sampling, parts)
    batch = starter.make_batch(responses, torch.zeros(len(responses)), policy.device)
    compute = parts.compute
    measured = []
    for rows in compute.cut_microbatches(batch, cfg.max_tokens_per_microbatch):
        mask = rows["response_mask"]
        with starter.without_adapter(start_model):
            start_hidden = compute.hidden_states(start_model, rows, cfg.bf16)
        kl = compute.token_statistics(
            compute.hidden_states(policy, rows, cfg.bf16), rows["labels"][mask],
            compute.head_of(policy), cfg.temperature, start_hidden,
            compute.head_of(start_model)).exact_kl
        place = mask.cumsum(1)[mask] - 1
        measured.append(torch.stack([kl.double(), place, rows["labels"][mask]]))
    return torch.cat(measured, dim=1).cpu()


def tables_of_kl(kl, tokenizer):
    """(3, N) of measure_kl -> {"position": {i: [nats, tokens]}, "token": {"id text": the same}}."""
    tables = {}
    for name, key in (("position", kl[1].long()), ("token", kl[2].long())):
        nats = key.bincount(kl[0]).tolist()
        counts = key.bincount().tolist()
        tables[name] = {f"{i} {tokenizer.decode([i])}" if name == "token" else i: [x, n]
                        for i, (x, n) in enumerate(zip(nats, counts)) if n}
    return tables


# The tags that TensorBoard shows first, by the name of the metric
HEADLINES = {
    "training": {"reward_mean": "reward", "kl_per_token": "kl_per_token",
                 "response_length": "response_length"},
    "held_out": {"solved": "solved", "other_skills": "other_skills"},
}

# Short forms of settings in the name of a run
SHORT = {"learning_rate": "lr", "n_train_steps": "steps", "rollout_batch_size": "batch",
         "group_size": "group", "max_new_tokens": "length", "warmup_steps": "warmup",
         "kl_estimator": "", "kl_in": "", "kl_gradient": "", "kl_adaptation_method": "",
         "model_id": "", "task": "", "dataset": "", "reward": "", "loss_average": ""}
# What does not change what is learnt, or is in the name otherwise
NOT_IN_NAME = {"out_dir", "run_name", "resume", "resume_from", "save_every", "eval_every", "device",
               "engine", "gpu_mem_util", "use_kl_penalty", "kl_coef", "max_tokens_per_microbatch",
               "eval_file", "n_eval_problems", "reproduce_paper", "bf16"}


def changed_settings(cfg):
    """Returns {name: value} of the settings that are neither main()'s nor the preset's."""
    usual = {name: p.default for name, p in inspect.signature(starter.main).parameters.items()}
    given = {"task": cfg.task} | ({"dataset": cfg.dataset} if cfg.dataset is not None else {})
    usual |= starter.preset_for(cfg.model_id, given)[1]
    return {name: getattr(cfg, name) for name in cfg.parameters
            if name not in usual or getattr(cfg, name) != usual[name]}


def name_of(changed, cfg):
    """{"learning_rate": 3e-4, "seed": 1} with the KL penalty at 0.3 -> "kl0.3_lr3e-4_seed1"."""
    parts = [f"kl{number_text(cfg.kl_coef)}"] if cfg.use_kl_penalty else []
    for name, value in changed.items():
        if name not in NOT_IN_NAME:
            if name in ("model_id", "task", "dataset") and isinstance(value, (str, Path)):
                value = Path(value).name
            if name == "reward" and not callable(value):
                value = "+".join(starter.describe(reward) for reward, _ in value)
            parts.append(SHORT.get(name, name) + number_text(value))
    return re.sub(r"[^\w.+-]+", "-", "_".join(parts))[:80].strip("-_.")


def number_text(value):
    """3e-4 for 0.0003, as people write it."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        return re.sub(r"\.?0*e-0?", "e-", f"{value:e}")
    return f"{value:g}" if isinstance(value, float) else starter.describe(value)


# --------------------------------------------------------------------------------------------------
# 6. The run

class GuardedRun(starter.Run):
    """starter.Run with guards and reports."""

    def __init__(self, cfg, ranks):
        self.debug = {}  # {tag: value} of the step
        self.lock_file = None
        super().__init__(cfg, ranks)
        self.saved = self.state.get("step")
        given = self.settings.get("max_tokens_per_microbatch")
        if self.state.get("max_tokens_given") == given:
            cfg.max_tokens_per_microbatch = self.state.get("max_tokens", given)
        if cfg.resume:
            self.lines += changes_since(self.before, self.settings)
        elif cfg.resume_from is not None:
            origin = Path(cfg.resume_from)
            origin = origin if origin.is_dir() else origin.parent.parent
            self.lines += changes_since(starter.settings_of_run(origin) or {}, self.settings)
        if cfg.use_kl_penalty:
            self.lines += notes_on_kl(cfg)
        self.lines += notes_on_learning_rate(cfg)

    def name_of_changes(self):
        return name_of(changed_settings(self.cfg), self.cfg)

    @staticmethod
    def check_settings(cfg):
        check_every_setting(cfg)
        starter.check_settings(cfg)

    @staticmethod
    def load_problems(cfg, model_folder):
        problems = starter.load_problems(cfg, model_folder)
        check_problems(problems, starter.describe(cfg.task))
        return problems

    # --- checkpoints

    def find_checkpoint(self, checkpoint):
        given = checkpoint is not None and str(checkpoint) == str(self.cfg.resume_from)
        if given and checkpoint.with_suffix(".sha256").is_file() and (wrong := damage(checkpoint)):
            raise InputError(f"{str(checkpoint)!r} is damaged ({wrong}); give another checkpoint "
                             "of that run, or its folder")
        super().find_checkpoint(checkpoint)

    def newest_checkpoint(self, folder):
        """Returns the newest whose files have their checksums. Names those that do not."""
        files = sorted(folder.glob("checkpoints/step_*.safetensors"), reverse=True)
        for file in files:
            wrong = damage(file)
            if not wrong:
                return file
            print(f"Warning: {file} is damaged ({wrong}); going back to the checkpoint before it",
                  flush=True)
        if files:
            raise InputError(f"no checkpoint of {folder} is whole; use resume = False to "
                             "begin a new run")
        return None

    def write_checkpoint(self, unfinished, final, chunks):
        """Writes the checksum, too, before the checkpoint has its name."""
        digest = hashlib.sha256()

        def seen():
            for chunk in chunks:
                digest.update(chunk)
                yield chunk

        super().write_checkpoint(unfinished, final, seen())
        checksum = final.with_suffix(".sha256")
        checksum.write_text(digest.hexdigest(), "utf-8")
        starter.sync_to_disk(checksum)
        known = {path.stem for path in final.parent.glob("step_*.safetensors")}
        for old in final.parent.glob("step_*.sha256"):
            if old.stem not in known and old != checksum:
                old.unlink()

    def save(self):
        """A disk that refuses costs one line and this checkpoint, not the run."""
        try:
            if self.ranks.rank == 0:
                self.write_settings()
            super().save()
            self.saved = self.state["step"]
        except OSError as error:
            with contextlib.suppress(OSError):
                (self.folder / "checkpoints" / "unfinished").unlink()
            print(f"Warning: no checkpoint of step {self.state['step']}: {error}; the one before "
                  "it stays", flush=True)

    def make_folder(self):
        super().make_folder()
        self.lock()
        copied = self.folder / Path(starter.__file__).name
        now = Path(starter.__file__).read_bytes()
        if copied.is_file() and copied.read_bytes() != now:
            before = copied.with_name(f"{copied.stem}_until_"
                                      f"{time.strftime('%Y-%m-%d_%H-%M-%S')}.py")
            copied.rename(before)
            print(f"{copied.name} has changed since this run began; the old one is kept as "
                  f"{before.name}")

    def lock(self):
        """Raises InputError where another process is at work in this folder. The lock goes when
        the process does."""
        try:
            import fcntl
        except ImportError:  # Windows
            return
        self.lock_file = open(self.folder / ".lock", "ab")
        try:
            fcntl.lockf(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise InputError(f"{self.folder} is in use by another process; wait until it ends, or "
                             "use resume = False") from None

    def log(self, what, *values):
        """Where TensorBoard's file cannot be written, a new one is begun. The last call, "close",
        lets other processes into the folder."""
        if what == "close" and self.lock_file is not None:
            self.lock_file.close()
        for attempt in (1, 2):
            try:
                return super().log(what, *values)
            except OSError as error:
                self.writer = None
                then = "a new file is begun" if attempt == 1 else "this entry is lost"
                print(f"Warning: the log of {self.folder} could not be written ({error}); {then}",
                      flush=True)

    def open(self, policy, optimizer):
        super().open(policy, optimizer)
        if self.checkpoint is None:
            lines = [f"    {name} = {value!r}" for name, value in self.settings.items()]
            self.log("add_text", "config", "\n".join(lines))
        optimizer.register_step_pre_hook(self.note_step)

    def note_step(self, *_):
        """From here to the end of the step the weights belong to no checkpoint."""
        self.between_states = True

    def end_of_step(self):
        self.between_states = False
        super().end_of_step()
        step = self.state["step"]
        if set(range(step - MAX_SKIPPED_STEPS + 1, step + 1)) <= set(self.state["skipped"]):
            raise RunStopped(f"{MAX_SKIPPED_STEPS} steps in a row had a loss or gradient that is "
                             "not finite; mend the reward or lower learning_rate")

    @contextlib.contextmanager
    def guarded(self):
        """Whatever stops the loop between two updates costs no finished step."""
        self.between_states = False
        with super().guarded():
            try:
                yield
            except Exception:
                finished = self.state.get("step")
                alone = self.ranks.world == 1  # the other ranks are at work: they give no weights
                if alone and finished and finished != self.saved and not self.between_states:
                    self.save()
                raise

    # --- the start

    def check_memory(self, model_folder):
        memory.check_fits(model_folder, self.cfg, self.ranks.world)

    def check_model(self, policy, tokenizer):
        check_tokenizer(policy, tokenizer, self.cfg.model_id)

    def check_start(self, policy, ref_model, tokenizer, problems, parts):
        check_overlap(problems)
        for line in [*unknown_in(problems, tokenizer), *too_few(problems, self.cfg)]:
            print(starter.wrapped(line))
        start = hash_of_weights(policy)
        if self.state.get("start", start) != start:
            raise InputError(f"model_id = {str(self.cfg.model_id)!r} holds other weights than "
                             "those that the run began with; put these back, or use resume = False")
        known = json.dumps([as_given(problems.train), as_given(problems.held_out)],
                           default=str).encode()
        known = hashlib.sha256(known).hexdigest()
        if self.state.get("problems", known) != known:
            raise InputError(f"the problems are not those that {self.folder} began with; put their "
                             "files back, or use resume = False")
        self.state = self.state | {"start": start, "problems": known}
        if policy.device.type == "cpu" and self.cfg.model_id != "tiny":
            for line in estimated_time(policy, self.cfg):
                print(line)
        for reward, _ in starter.weighted(self.cfg.reward):
            value = self.reward_of(reward, "<answer>1</answer>", problems.train[0])
            if math.isfinite(value):
                continue
            raise InputError(f"reward returned {value} on the text '<answer>1</answer>'; it must "
                             "return one finite number for every text")
        if ref_model is not None:
            prompts = [problem["prompt_ids"] for problem in problems.train[:2]]
            vocabulary = policy.config.get_text_config().vocab_size
            responses = starter.responses_for_check(prompts, min(self.cfg.max_new_tokens, 16),
                                                    vocabulary)
            responses = [r._replace(log_probs=starter.own_log_probs(
                policy, r, self.cfg.temperature)[0].tolist()) for r in responses]
            refuse_settings_without_effect(self.cfg, policy, ref_model, responses, parts)

    def start_engine(self, policy, prompts, *settings):
        start = functools.partial(super().start_engine, policy, prompts, *settings)
        llm = RestartedVLLM(start, policy, self.ranks)
        if self.ranks.world == 1:  # of several processes each holds a part of the weights
            check_vllm(policy, llm, prompts, self.cfg)
        return llm

    def before_training(self, policy, ref_model, prompts, compute):
        """Under bf16 autocast, what does not learn is stored in bf16."""
        if self.cfg.bf16 and self.ranks.world == 1 and ref_model is not None:
            memory.store_in_bf16(ref_model, prompts, compute)
        elif self.cfg.bf16 and self.ranks.world == 1 and self.cfg.lora_rank:
            memory.store_in_bf16(policy, prompts, compute)

    # --- the loop

    def reward_of(self, reward, text, problem):
        try:
            with time_limit(REWARD_SECONDS):
                return super().reward_of(reward, text, problem)
        except TimedOut:
            raise InputError(f"reward took more than {REWARD_SECONDS:g} s on the text "
                             f"{text[:200]!r}; it must return one number for every text") from None

    def accumulate(self, policy, microbatches, *others):
        """After a lack of memory nothing of the attempt is left in the gradients, and the step is
        repeated with microbatches of half the rows, which take the place of those in the list."""
        while True:
            try:
                means, log_probs = super().accumulate(policy, microbatches, *others)
                self.debug = debug_numbers(microbatches, log_probs, self.ranks)
                return means, log_probs
            except RuntimeError as error:
                if self.ranks.world > 1 or not is_out_of_memory(error):
                    raise  # the other ranks do not know of it
            policy.zero_grad()
            microbatches[:] = halved(microbatches)
            largest = max(rows["labels"].numel() for rows in microbatches)
            # Always less than before: the fast path counts fewer tokens than there are.
            max_tokens = max(1, min(self.cfg.max_tokens_per_microbatch // 2, largest))
            self.cfg.max_tokens_per_microbatch = max_tokens
            self.state = self.state | {
                "max_tokens": max_tokens,
                "max_tokens_given": self.settings["max_tokens_per_microbatch"]}
            print(f"Warning: out of memory: microbatches of {max_tokens} tokens from here on",
                  flush=True)

    def log_step(self, step, metrics, seconds, samples):
        """Adds warnings, and keeps what a skipped step was about to learn from."""
        self.log("add_scalar", "mem/peak_gb", peak_memory_gb(), step)
        lines = super().log_step(step, metrics, seconds, samples)
        self.log_headline(metrics, step)
        for tag, value in self.debug.items():
            self.log("add_scalar", f"debug/{tag}", value, step)
        if step == 1 or step % SAMPLES_EVERY == 0:
            self.log_best_and_worst(samples, step)
        lines += self.warnings(metrics | {"untagged": untagged(samples, self.cfg)}, step)
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            lines += self.keep_samples(step, samples)
        return lines

    def log_eval(self, step, metrics, samples):
        lines = super().log_eval(step, metrics, samples)
        self.log_headline(metrics, step)
        return lines + self.warnings(metrics, step)

    def log_headline(self, metrics, step):
        """The five curves to look at first, in a group that TensorBoard shows first."""
        skills = [value for name, value in metrics.items() if name.startswith("retention_")]
        if skills:
            metrics = metrics | {"other_skills": sum(skills) / len(skills)}
        kind = "held_out" if "solved" in metrics else "training"
        for name, title in HEADLINES[kind].items():
            if name in metrics:
                self.log("add_scalar", f"0_headline/{title}", metrics[name], step)

    def log_best_and_worst(self, samples, step):
        problems, texts, rewards, _ = samples
        for title, i in (("best", rewards.argmax().item()), ("worst", rewards.argmin().item())):
            problem = problems[i // self.cfg.group_size]
            self.log("add_text", f"samples/{title}",
                     starter.sample_text(problem, texts[i], rewards[i].item()), step)

    def log_hparams(self, result):
        """A row of TensorBoard's HPARAMS page: the settings that were changed, and the outcome."""
        cfg = self.cfg
        always = {"model_id": cfg.model_id, "learning_rate": cfg.learning_rate, "seed": cfg.seed,
                  "kl_coef": cfg.kl_coef if cfg.use_kl_penalty else 0.0}
        settings = {}
        for name, value in (changed_settings(cfg) | always).items():
            if name not in NOT_IN_NAME or name in always:
                is_plain = isinstance(value, (bool, int, float))
                settings[name] = value if is_plain else starter.describe(value)
        outcome = {f"hparam/{name}": value for name, value in result["after"].items()
                   if name == "solved" or name.startswith("retention_")}
        outcome["hparam/kl_per_token"] = result["kl_per_token"]
        self.log("add_hparams", settings, outcome, None, ".")

    def keep_samples(self, step, samples):
        if self.ranks.rank:
            return []
        path = self.folder / f"skipped_step_{step}.json"
        problems, texts, rewards, responses = samples
        rows = [{"prompt": problems[i // self.cfg.group_size]["prompt"], "text": texts[i],
                 "reward": rewards[i].item(), "ids": r.response_ids, "log_probs": r.log_probs}
                for i, r in enumerate(responses)]
        try:
            path.write_text(json.dumps({"step": step, "responses": rows}, indent=1), "utf-8")
        except OSError as error:
            return [f"The responses of step {step} could not be kept: {error}"]
        return [f"The responses of step {step} are kept in {path}"]

    def warnings(self, metrics, step):
        """Each sign of trouble is a line, a forgotten skill at every evaluation, others once."""
        is_evaluation = "solved" in metrics
        first_name = "before" if is_evaluation else "first"
        first = self.state.get(first_name) or metrics
        signs = warning_signs(metrics, first, self.cfg, step)
        if is_evaluation:
            return [starter.wrapped(f"Warning: {text}") for text in signs.values()]
        said = set(self.state.get("said", []))
        new = [sign for sign in signs if sign not in said]
        self.state = self.state | {"first": first, "said": sorted(said | set(new))}
        return [starter.wrapped(f"Warning: {signs[sign]}") for sign in new]

    def report(self, result, policy, ref_model, llm, tokenizer, problems, parts):
        """Adds to the result and to the text how far the policy is from the start, and writes
        kl_by_token.json: nats and tokens by position and by token."""
        text = super().report(result, policy, ref_model, llm, tokenizer, problems, parts)
        if ref_model is None and self.cfg.lora_rank:
            ref_model = policy  # without its adapter
        if ref_model is None:
            start = starter.find_model(self.cfg.model_id)
            ref_model, _ = starter.init_policy(start, self.cfg.device)
            parts.compute.prepare(ref_model)
        kl = measure_kl(policy, ref_model, llm, problems.held_out, self.cfg, parts)
        n = len(problems.held_out)
        result |= {"kl_per_token": kl[0].mean().item(), "kl_per_sequence": kl[0].sum().item() / n}
        if self.ranks.rank == 0:
            (self.folder / "kl_by_token.json").write_text(
                json.dumps(tables_of_kl(kl, tokenizer)) + "\n", "utf-8")
        low, high = wilson_interval(result["after"]["solved"], n)
        text += (f"\n95 % interval of solved: {low:.1%} to {high:.1%}\n"
                 f"KL(policy || start): {result['kl_per_token']:.3f} nats per token, "
                 f"{result['kl_per_sequence']:.2f} nats per response")
        if self.ranks.rank == 0 and problems.skills:  # for whoever trains the model further
            lines = [json.dumps(problem) + "\n" for problem in as_given(problems.skills)]
            (self.folder / "model" / "retention.jsonl").write_text("".join(lines), "utf-8")
        self.log_hparams(result)
        text += "\n" + pictures.draw(self, kl, tokenizer)
        return "\n".join([text, *advice(result, self.cfg)])


def advice(result, cfg):
    """What the outcome of a run without a KL penalty suggests for the next one, in lines."""
    before, after = result["before"], result["after"]
    forgot = any(name.startswith("retention_") and after[name] < before[name] - 0.05
                 for name in after)
    collapsed = after["solved"] < before["solved"] - 0.1  # then the learning rate comes first
    lines = []
    if result["kl_per_token"] > 0.2 and not cfg.use_kl_penalty:
        lines.append("the policy is far from the start, above 0.2 nats per token; a lower "
                     "learning_rate or use_kl_penalty = True keeps it nearer")
    if forgot and not cfg.use_kl_penalty and not collapsed:
        lines.append("to keep the other skills, set use_kl_penalty = True "
                     "(README_KL.md: how to choose kl_coef)")
    return lines


def debug_numbers(microbatches, log_probs, ranks):
    """Mean log-prob of the policy and of the reference over the step's response tokens, and mean,
    largest and smallest k3 of a token. Without a reference the first alone."""
    masks = [rows["response_mask"] for rows in microbatches]
    policy = torch.cat([now[mask] for now, mask in zip(log_probs, masks)])
    found = {"n": len(policy), "policy_logp_mean": policy.sum().item()}
    if "ref_log_probs" in microbatches[0]:
        ref = torch.cat([rows["ref_log_probs"][mask] for rows, mask in zip(microbatches, masks)])
        k3 = starter.compute_kl_divergence(policy, ref, "k3")
        found |= {"ref_logp_mean": ref.sum().item(), "kl_mean": k3.sum().item(),
                  "kl_max": k3.max().item() if len(k3) else -math.inf,
                  "kl_min": -k3.min().item() if len(k3) else -math.inf}  # largest of the negated
    total = {name: float(value) for name, value in ranks.total(
        found, largest=("kl_max", "kl_min")).items()}
    n = total.pop("n")
    means = {name: value / n for name, value in total.items() if name.endswith("_mean")}
    if "kl_min" in total:
        means |= {"kl_max": total["kl_max"], "kl_min": -total["kl_min"]}
    return means


def changes_since(before, settings):
    """Settings of a resumed run at its beginning and now -> lines for the log."""
    lines = []
    for name, value in settings.items():
        if name not in before:
            lines.append(f"new since: {name} = {value!r}")
        elif before[name] != value and name not in ("resume", "resume_from", "out_dir"):
            lines.append(f"changed since: {name} = {value!r} (was {before[name]!r})")
    return lines


def halved(microbatches):
    """Returns the same rows in microbatches of half the rows. The reference reads them again."""
    if all(len(rows["labels"]) == 1 for rows in microbatches):
        raise RunStopped("out of memory with a single response at a time; lower max_new_tokens, "
                         "set gradient_checkpointing = True, or take a smaller model; resume = "
                         "True then goes on")
    halves = []
    for rows in microbatches:
        n = (len(rows["labels"]) + 1) // 2
        for part in (slice(n), slice(n, None)):
            if len(rows["labels"][part]):
                halves.append({name: tensor[part] for name, tensor in rows.items()
                               if name not in ("ref_hidden", "ref_log_probs")})
    return halves


def untagged(samples, cfg):
    """Whether the built-in reward looks for tags that no response of the step has."""
    problems, texts, _, _ = samples
    return (starter.weighted(cfg.reward)[0][0] is starter.reward_fn
            and not any(problem.get("last_number") for problem in problems)
            and not any("</answer>" in text for text in texts))


def warning_signs(metrics, first, cfg, step):
    """Metrics of a step or an evaluation, those of the first -> {sign: text} of what is wrong."""
    kl = metrics.get("kl_per_token", 0.1)
    before, now = first.get("solved", 0), metrics.get("solved", 0)
    learnt = metrics.get("reward_mean", 0) > first.get("reward_mean", 0) + 0.02
    signs = {}
    all_equal = metrics.get("frac_zero_std") == first.get("frac_zero_std") == 1 and step > 1
    if all_equal and metrics.get("untagged"):
        signs["untagged"] = ("no response has its answer between <answer> and </answer>, where the "
                             "reward looks for it, so that nothing is learnt: ask for these tags "
                             "in the prompts, or give a reward of your own")
    elif all_equal:
        signs["equal"] = ("in the first step and in this one all rewards of each group are equal, "
                          "so that nothing is learnt: look at the samples (TensorBoard, Text); "
                          "the task may be too hard or too easy for this model")
    if metrics.get("truncated_frac") == 1 and first.get("truncated_frac", 1) < 0.5:
        signs["endless"] = ("hardly any response was cut at first, now all are: training does "
                            f"harm; lower learning_rate = {cfg.learning_rate:g} first, for example "
                            "to a tenth")
    elif metrics.get("truncated_frac") == 1 and not learnt:
        stop = ", ".join(map(str, cfg.stop_token_ids))
        signs["truncated"] = (f"all responses were cut at max_new_tokens = {cfg.max_new_tokens}, "
                              f"none reached a stop token ({stop}): raise max_new_tokens, or check "
                              "that generation_config.json lists the token that ends a response")
    own_reward = starter.weighted(cfg.reward)[0][0] is not starter.reward_fn  # the first decides
    if "solved" in metrics and step and own_reward and now == before == 0:
        signs["unsolved"] = ("no response earned a reward of 1, which is what counts as solved: "
                             "watch the reward instead, or let the reward return 1 for a solution")
    if now < before - 0.1:
        signs["collapse"] = (f"solved fell from {before:.0%} to {now:.0%}: training does harm; "
                             f"lower learning_rate = {cfg.learning_rate:g} first, for example to a "
                             "tenth")
        return signs
    if kl > 0.2:
        signs["drift"] = (f"KL is {kl:.2f} nats per token, above 0.2: the policy drifts; raise "
                          "kl_coef")
    if kl < 0.01 and not learnt and step > max(20, cfg.n_train_steps / 4):
        signs["stuck"] = (f"KL is {kl:.4f} nats per token, below 0.01, and the reward has not "
                          "risen: nothing is learnt; lower kl_coef or raise learning_rate")
    if metrics.get("kl_capped_frac", 0) > 0.1:
        signs["cut"] = ("over 10 % of the tokens have a smaller KL gradient than they should, "
                        "since their ratio is cut; lower epochs_per_rollout or learning_rate")
    if cfg.use_kl_penalty and metrics["response_length"] > 1.5 * first["response_length"]:
        signs["length"] = ("responses are 1.5 times as long as at first: KL per token can fall "
                           "while KL per response rises; watch train/kl_per_sequence")
    fallen = [f"{name.removeprefix('retention_')} from {first[name]:.0%} to {metrics[name]:.0%}"
              for name in metrics
              if name.startswith("retention_") and metrics[name] < first[name] - 0.05]
    if fallen:
        remedy = "raise kl_coef" if cfg.use_kl_penalty else "set use_kl_penalty = True"
        signs["forgotten"] = f"other skills are being forgotten ({', '.join(fallen)}); {remedy}"
    return signs
