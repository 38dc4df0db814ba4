"""What main()'s parameters must be, and what must be true of the model and problems that they name.

The kind of a parameter (switch, whole number, number or text) is that of its default in main(), or
of the preset's value where that is None. So a new parameter of main() needs no entry here.
"""
import importlib.util
import inspect
import json
import math
import os
import re
from pathlib import Path

import torch

import starter
from starter import InputError
from support.tasks import HUB_NAME, TABLES

# The smallest and the largest value of a number
LIMITS = {
    "rollout_batch_size": (2, 10**9), "group_size": (2, 10**9),
    "max_new_tokens": (1, 10**9), "temperature": (0.01, 10), "gpu_mem_util": (0.05, 1000),
    "importance_cap": (1, 10**9), "epochs_per_rollout": (1, 10**9), "kl_target": (1e-9, 10**9),
    "dynamic_beta_decay": (1e-9, 1), "reward_threshold": (-10**9, 10**9),
    "beta_schedule_steps": (1, 10**9), "learning_rate": (1e-12, 1), "weight_decay": (0, 1),
    "max_grad_norm": (1e-9, 10**9), "max_tokens_per_microbatch": (1, 10**9),
    "n_eval_problems": (1, 10**9), "eval_temperature": (0, 10), "eval_samples": (1, 1000),
    "kl_clip_threshold": (1e-9, 10**9), "kl_ratio_cap": (1, math.inf), "lora_rank": (0, 4096),
} | dict.fromkeys("n_train_steps seed warmup_steps kl_coef beta_min "
                  "eval_every save_every max_sampler_diff".split(), (0, 10**9))
KINDS = {"bf16": bool, "max_sampler_diff": float, "kl_clip_threshold": float}  # beside the default
MAY_BE_NONE = {"importance_cap", "max_sampler_diff"}

# What a resumed run may change. Any other change would put two experiments into one curve.
MAY_CHANGE = {"n_train_steps", "eval_every", "save_every", "out_dir", "run_name", "resume",
              "preset", "engine", "device", "bf16", "gpu_mem_util", "max_tokens_per_microbatch",
              "gradient_checkpointing", "max_sampler_diff"}
# What only a rule of kl_adaptation_method reads
OF_A_RULE = {"kl_clip_threshold", "kl_target", "dynamic_beta_decay", "reward_threshold", "beta_min",
             "beta_schedule_steps"}


def is_path(value):
    return isinstance(value, (str, Path)) and str(value) != ""


def is_number(value):
    return isinstance(value, (int, float)) and type(value) is not bool and abs(value) < 1e300


def is_clip_range(value):
    low, high = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, value)
    return is_number(low) and is_number(high) and 0 <= low <= 0.99 and high >= 0


def is_reward(function):
    """Whether it can be called with a text, a problem and, if it asks for that, the Response."""
    try:
        signature = inspect.signature(function)
        signature.bind("", {}, **{"response": None} if "response" in signature.parameters else {})
        return True
    except (TypeError, ValueError):
        return False


def are_rewards(value):
    pairs = value if isinstance(value, (list, tuple)) else [(value, 1.0)]
    return bool(pairs) and all(isinstance(pair, (list, tuple)) and len(pair) == 2
                               and is_reward(pair[0]) and is_number(pair[1]) for pair in pairs)


# By name: what is required, and whether a value is that
OTHERS = {
    "model_id": ("a checkpoint folder or a Hugging Face name", is_path),
    "task": ("a task's name, a function or the path of a JSONL file",
             lambda value: callable(value) or is_path(value)),
    "eval_file": ("the path of a JSONL file", is_path),
    "reward": ("a function (response_text, problem) -> number or a list of (function, weight)",
               are_rewards),
    "device": ("'auto', 'cpu', 'mps', 'cuda' or 'cuda:1'",
               lambda value: re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", str(value))),
    "engine": ("'auto', 'vllm' or 'transformers'",
               lambda value: value in ("auto", "vllm", "transformers")),
    "clip_range": ("a number from 0 to 0.99 or a pair (below 1, above 1)", is_clip_range),
    "out_dir": ("the path of a folder", is_path),
    "run_name": ("a name of letters, digits and . + - _",
                 lambda value: is_path(value) and re.fullmatch(r"[\w.+-]{1,100}", str(value))),
    "resume": ("True or the folder of a run",
               lambda value: isinstance(value, bool) or is_path(value)),
}


def converted(value, kind, low, high):
    """Returns what is required, and the value as one of this kind (1e3 as 1000), or None if it
    is none."""
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    works = type(value) is kind or kind is float and type(value) is int
    if kind in (int, float):
        works = works and low <= value <= high
    words = {bool: "True or False", str: "a text", int: f"a whole number from {low:_} to {high:_}",
             float: f"a number from {low:_} to {high:_}"}[kind]
    return words, value if works else None


def check_settings(cfg):
    """Raises InputError for a parameter that cannot work. Loads nothing."""
    check_kinds(cfg)
    check_machine(cfg)


def check_kinds(cfg):
    """Raises InputError for a parameter of another kind than its default, or outside its limits.
    Puts Python's own numbers and switches into cfg. Can be called before starter.choose() and after
    it."""
    for name, parameter in inspect.signature(starter.main).parameters.items():
        default = parameter.default
        given = getattr(cfg, name)
        given = given.tolist() if hasattr(given, "tolist") else given  # of numpy or torch
        of_presets = [preset[name] for preset in starter.PRESETS.values() if name in preset]
        example = of_presets[0] if default is None and of_presets else default
        kind = KINDS.get(name, type(example))
        if repr(given) == repr(default) or given is None and name in MAY_BE_NONE:
            continue
        if name in OTHERS:
            words, works = OTHERS[name]
            value = given if works(given) else None
        elif kind in (bool, int, float, str):
            words, value = converted(given, kind, *LIMITS.get(name, (-10**9, 10**9)))
        else:
            continue
        if value is None:
            options = re.findall(r"'(\w+)'", words)
            usual = "for example" if default is None and of_presets else "the default is"
            remedy = (starter.nearest(given, options) if options else
                      f"{usual} {getattr(example, '__name__', repr(example))}")
            shown = (f"{given.__name__}{inspect.signature(given)}" if inspect.isfunction(given) else
                     f"{given!r:.200}")
            raise InputError(f"{name} = {shown} must be {words}; {remedy}")
        setattr(cfg, name, value)
        is_off = not cfg.use_kl_penalty and (name.startswith("kl_") or name in OF_A_RULE)
        is_unread = name in OF_A_RULE and cfg.kl_adaptation_method == "none"
        if value != default and (is_off or is_unread):
            remedy = "use_kl_penalty = True" if is_off else "a kl_adaptation_method that reads it"
            raise InputError(f"{name} = {value!r} changes nothing; leave it out, or set {remedy}")
    if str(cfg.device) == "mps" and not torch.backends.mps.is_available():
        raise InputError("device = 'mps' but torch finds no such device here; use device = 'cpu'")
    gpu = re.fullmatch(r"cuda:?(\d*)", str(cfg.device))
    n_gpus = torch.cuda.device_count()
    if gpu and int(gpu[1] or 0) >= n_gpus:
        raise InputError(f"device = {str(cfg.device)!r} but there are {n_gpus} CUDA GPUs here; use "
                         "device = 'cpu'")


def check_machine(cfg):
    """Raises InputError for what is not there, and for parameters that do not fit together."""
    model_id = cfg.model_id or "tiny"
    is_folder = os.path.isdir(model_id)
    is_name = model_id == "tiny" or isinstance(model_id, str) and re.fullmatch(
        r"[\w-][\w.-]*/[\w.-]+", model_id)
    has_adapters = (Path(model_id) / "adapter_config.json").is_file() if is_folder else False
    out_dir = Path(cfg.out_dir).absolute()
    while not os.path.exists(out_dir) and out_dir != out_dir.parent:
        out_dir = out_dir.parent
    for wrong, sentence in (
        (cfg.engine == "vllm" and not importlib.util.find_spec("vllm"),
         "engine = 'vllm' but vllm is not installed here; use engine = 'transformers'"),
        (cfg.lora_rank and not importlib.util.find_spec("peft"),
         f"lora_rank = {cfg.lora_rank} but peft is not installed here; pip install peft"),
        (cfg.eval_file is not None and (cfg.task is None or cfg.task in starter.TASKS),
         f"eval_file = {str(cfg.eval_file)!r} is not read by task = {cfg.task!r}; give a JSONL "
         "file as task, or leave eval_file out"),
        (cfg.frozen_in_bf16 and not cfg.bf16, "frozen_in_bf16 = True needs bf16; leave it out"),
        (cfg.frozen_in_bf16 and not (cfg.use_kl_penalty or cfg.lora_rank),
         "frozen_in_bf16 = True needs weights that do not learn, as with use_kl_penalty or "
         "lora_rank; leave it out"),
        (not is_folder and not is_name,
         f"model_id = {str(model_id)!r:.200} is no folder; give one, or a Hugging Face name like "
         f"'user/model', or {starter.nearest(model_id, ['tiny'])}"),
        (has_adapters, f"model_id = {str(model_id)!r:.200} holds LoRA adapters; merge them into "
         "their model with peft's merge_and_unload(), and give the folder where you save that"),
        (is_folder and not (Path(model_id) / "config.json").is_file(),
         f"model_id = {str(model_id)!r:.200} has no config.json; give a folder of save_pretrained"
         ", such as model in the folder of a run"),
        (not (out_dir.is_dir() and os.access(out_dir, os.W_OK)),
         f"out_dir = {str(cfg.out_dir)!r:.200} cannot be written; give another folder"),
    ):
        if wrong:
            raise InputError(sentence)


def note_on_rate(run):
    """Says that the learning rate is the preset's where the model is another one."""
    of_preset = next((preset["model_id"] for preset in starter.PRESETS.values()
                      if preset["learning_rate"] == run.cfg.learning_rate), None)
    is_given = run.settings["learning_rate"] is not None or run.cfg.lora_rank  # it has its own note
    if not is_given and run.settings["model_id"] not in (None, of_preset):
        print(f"learning_rate = {run.cfg.learning_rate:g} is that of the preset, for {of_preset}; "
              "SmolLM2-135M learnt with 2e-5, the built-in model with 3e-4")


def check_hub(*names):
    """Where the Hugging Face hub cannot be reached, says so at once, and has its libraries use
    their cache only: otherwise they try again for more than a minute."""
    from huggingface_hub import constants, get_session
    on_hub = [name for name in names if HUB_NAME.fullmatch(str(name))
              and not os.path.exists(name) and Path(name).suffix not in (*TABLES, ".jsonl")]
    if on_hub and not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=10)
        except Exception as error:  # whatever a network can do
            print(f"{constants.ENDPOINT} cannot be reached ({error!s:.100}): {', '.join(on_hub)} "
                  "can come from its cache only")
            constants.HF_HUB_OFFLINE = True
            os.environ["HF_HUB_OFFLINE"] = "1"  # for the library datasets


def check_resume(run):
    """Raises InputError where the settings of a run that is resumed do not fit its beginning."""
    path = run.folder / "settings.json"
    if not path.is_file():
        return
    try:
        before = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InputError(f"{path} cannot be read ({error}); resume another run") from None
    for name, value in run.settings.items():
        if name not in MAY_CHANGE and before.get(name, value) != value:
            model = run.folder / "model"
            begin = f"begin anew with model_id = {str(model)!r}" if model.is_dir() else "begin anew"
            raise InputError(f"{name} = {value!r} would break the curve of {run.folder}, which "
                             f"began with {before[name]!r}; give that, or {begin}")
    newest = max(run.folder.glob("checkpoint_*.pt"), default=None)
    n_done = int(newest.name.split("_")[1]) if newest else 0
    if run.cfg.n_train_steps < n_done:
        raise InputError(f"n_train_steps = {run.cfg.n_train_steps} counts from the start, and "
                         f"{run.folder} has done {n_done} steps; use more")
    if run.cfg.n_train_steps == n_done:
        print(f"{run.folder} has done all its {n_done} steps: only its end is repeated; to go on, "
              "raise n_train_steps")


def check_model(policy, tokenizer, problems, cfg):
    """Raises InputError where model, tokenizer and problems do not fit together. Prints notes."""
    n_rows = policy.get_input_embeddings().num_embeddings
    ids = {token for part in problems for problem in part
           for token in problem["prompt_ids"] or [n_rows]}
    trained_on = {str(problem["prompt"]) for problem in problems.train}
    both = [str(problem["prompt"]) for problem in problems.held_out
            if str(problem["prompt"]) in trained_on]
    chat = [{"role": "user", "content": "1 + 1"}]
    has_template = tokenizer.chat_template is not None
    shown = tokenizer.apply_chat_template(chat, tokenize=False) if has_template else "1 + 1"
    for wrong, sentence in (
        (not all(parameter.isfinite().all() for parameter in policy.parameters()),
         f"model_id = {str(cfg.model_id)!r} has weights that are not finite; give another model"),
        (max(ids) >= n_rows,
         f"the tokenizer of {cfg.model_id} makes nothing of a prompt, or ids from {n_rows} on, "
         "which its model cannot read; save the right tokenizer there"),
        ("1 + 1" not in shown,
         f"the chat template of {cfg.model_id} leaves out the user's message; mend or delete it"),
        (both, f"{len(both)} of {len(problems.held_out)} held-out problems are also trained on, "
               f"for example {(both or [''])[0]!r:.200}; take them out of one of the two"),
        (cfg.gradient_checkpointing and not policy.supports_gradient_checkpointing,
         f"gradient_checkpointing = True does not work with {type(policy).__name__}; leave it out"),
    ):
        if wrong:
            raise InputError(sentence)
    # A mistake in a reward shows here, before the engine starts and anything is sampled.
    [first] = problems.train[:1]
    empty = starter.Response(first["prompt_ids"], [*cfg.stop_token_ids[:1]], [0.0], True)
    try:
        starter.score.__wrapped__([empty], [first], tokenizer, cfg.reward)
    except Exception as error:
        error.add_note("This was a trial with an empty response, before anything is sampled: "
                       "return a number for any text, 0.0 for one without an answer.")
        raise
    for line in notes(tokenizer, problems, cfg):
        print(line)


def notes(tokenizer, problems, cfg):
    """Returns lines about what is often a mistake."""
    n, rate = len(problems.held_out), cfg.learning_rate
    defaults = inspect.signature(starter.main).parameters
    known = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, None}
    unknown = [problem["prompt"] for problem in problems.train
               if {tokenizer.unk_token_id} & set(problem["prompt_ids"]) - known]
    characters = [x for x in sorted({*str((unknown or [""])[0])})
                  if tokenizer.unk_token_id in tokenizer(x, add_special_tokens=False)["input_ids"]]
    long = [x["answer"] for x in problems.train  # a token has a byte at least
            if len(str(x.get("answer", "")).encode()) >= cfg.max_new_tokens <= len(
                tokenizer(str(x["answer"]), add_special_tokens=False)["input_ids"])]
    return [line for applies, line in (
        (long and cfg.reward is starter.reward_fn,
         f"Warning: {len(long)} of {len(problems.train)} answers are too long for max_new_tokens = "
         f"{cfg.max_new_tokens}, for example {(long or [''])[0]!r:.80}: no response can hold them; "
         "raise it, or shorten the answers"),
        (n < min(30, cfg.n_eval_problems),
         f"Warning: {n} held-out problems are too few to tell whether the model gets better; give "
         "more data, a longer eval_file, or a larger n_eval_problems"),
        (n == cfg.n_eval_problems and cfg.eval_file,
         f"at most n_eval_problems = {n} problems of the eval_file are used"),
        (unknown,
         f"Warning: {len(unknown)} of {len(problems.train)} prompts hold characters that the "
         f"tokenizer does not know: the model cannot see {characters} in "
         f"{(unknown or [''])[0]!r:.200}; change the prompts, or give another model_id"),
        (cfg.warmup_steps > cfg.n_train_steps > 0,
         f"Warning: warmup_steps = {cfg.warmup_steps}, so a run of {cfg.n_train_steps} steps ends "
         "before its learning rate is reached"),
        (cfg.engine == "transformers" and cfg.gpu_mem_util != defaults["gpu_mem_util"].default,
         f"gpu_mem_util = {cfg.gpu_mem_util} changes nothing without vLLM"),
        (cfg.epochs_per_rollout == 1 and cfg.clip_range != defaults["clip_range"].default,
         "clip_range does nothing here: with epochs_per_rollout = 1 the ratio is always 1"),
        (cfg.enable_thinking and "enable_thinking" not in str(tokenizer.chat_template),
         "enable_thinking = True changes nothing: the model's chat template does not read it"),
        (cfg.lora_rank and rate < 1e-4,
         f"learning_rate = {rate:g} is small for LoRA adapters, which need about ten times the "
         "rate of all weights; SmolLM2 learnt with 2e-4"),
    ) if applies]
