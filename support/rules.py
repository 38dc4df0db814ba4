"""What main()'s parameters must be, and what must be true of the model and problems that they name.

A rule stands here if a person would otherwise wait for minutes before an error, or get a wrong
result without a word. The kind of a parameter (switch, whole number, number) is that of its default
in main(), or of a preset's value where that is None, so that a new one needs no entry here.
"""

import difflib
import importlib.util
import json
import os
import re
import tempfile
import zipfile
from pathlib import Path

import starter
from starter import InputError
from support import edits

# 1. Parameters

KINDS = {bool: "True or False", int: "a whole number", float: "a number"}
# Values of the right kind where the default has another; None: anything goes
EXAMPLES = {"max_sampler_diff": 0.1, "kl_clip_threshold": 1.0, "clip_range": None}
# Below these, training would go wrong in silence
SMALLEST = {
    "epochs_per_rollout": 1,
    "importance_cap": 1,
    "kl_ratio_cap": 1,
    "kl_target": 1e-9,
    "max_grad_norm": 1e-9,
}
# What only a rule of kl_adaptation_method reads
OF_A_RULE = set(
    "kl_clip_threshold kl_target dynamic_beta_decay reward_threshold beta_min "
    "beta_schedule_steps".split()
)


def nearest(value, options):
    """Returns a remedy: the option with a near spelling, or all."""
    near = difflib.get_close_matches(str(value), options, n=1, cutoff=0.7)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"use one of {sorted(options)}"


def check_known(name, value, options):
    """starter.check_known, with a hint at the spelling."""
    if value not in options:
        raise InputError(f"{name} = {value!r} is not known; {nearest(value, options)}")


def example_of(name, default):
    """Returns a value of the kind that this parameter of main() must have."""
    for preset in starter.PRESETS.values():
        if default is None:
            default = preset.get(name)
    return EXAMPLES.get(name, default)


def check_kinds(cfg):
    """Raises InputError for a switch or a number of another kind than its default, for a number
    that is too small, and for what changes nothing. Puts Python's own numbers into cfg, 1000 for
    1e3. Settings may still be None or "auto"."""
    for name, default in vars(starter.cfg_with()).items():
        value = getattr(cfg, name)
        if hasattr(value, "tolist"):  # of numpy or torch
            value = value.tolist()
        example = example_of(name, default)
        kind = type(example)
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        setattr(cfg, name, value)
        if value == default:
            continue
        is_of_kind = type(value) is kind or (kind is float and type(value) is int)
        if kind in KINDS and not is_of_kind:
            raise InputError(f"{name} = {value!r:.200} must be {KINDS[kind]}, such as {example!r}")
        smallest = SMALLEST.get(name)
        if smallest is not None and not value >= smallest:
            raise InputError(f"{name} = {value!r} must be {smallest!r} or more")
        check_is_read(name, value, cfg)


def check_is_read(name, value, cfg):
    """Raises InputError for a setting of the KL penalty that changes nothing."""
    remedy = None
    if name in OF_A_RULE and cfg.kl_adaptation_method == "none":
        remedy = "a kl_adaptation_method that reads it"
    if not cfg.use_kl_penalty and (name in OF_A_RULE or name.startswith("kl_")):
        remedy = "use_kl_penalty = True"
    if remedy is not None:
        raise InputError(f"{name} = {value!r} changes nothing; leave it out, or set {remedy}")


def note_on_rate(cfg):
    """Says where the learning rate is that of another model, or of other weights."""
    rate = cfg.learning_rate
    preset = starter.PRESETS[cfg.preset]
    if cfg.lora_rank and rate < 1e-4:
        print(
            f"learning_rate = {rate:g} is small for LoRA adapters, which need about ten times the "
            "rate of all weights; SmolLM2 learnt with 2e-4"
        )
    elif rate == preset.get("learning_rate") and cfg.model_id != preset.get("model_id"):
        print(
            f"learning_rate = {rate:g} is the preset's, for {preset.get('model_id')}; SmolLM2-135M "
            "learnt with 2e-5, the built-in model with 3e-4"
        )


def check_settings(cfg):
    """Raises InputError for settings that do not fit together, or name what cannot be used. Comes
    after presets are applied, and before anything is loaded."""
    if not callable(cfg.reward):
        raise InputError(
            f"reward = {cfg.reward!r:.200} must be a function (response_text, problem) -> number; "
            "for several rewards see recipes/several_rewards.patch"
        )
    if cfg.eval_file is not None and cfg.task in starter.TASKS:
        raise InputError(
            f"eval_file = {str(cfg.eval_file)!r} is not read by task = {cfg.task!r}; give a file "
            "as task, too, or leave eval_file out"
        )
    frozen = cfg.use_kl_penalty or cfg.lora_rank
    if cfg.frozen_in_bf16 and not (frozen and cfg.precision != "float32"):
        raise InputError(
            "frozen_in_bf16 = True needs precision bf16 or fp16, and weights that do not learn, as "
            "with use_kl_penalty or lora_rank; leave it out"
        )
    if cfg.lora_rank and importlib.util.find_spec("peft") is None:
        raise InputError(
            f"lora_rank = {cfg.lora_rank} needs peft, which is not installed here; pip install peft"
        )
    if Path(cfg.model_id, "adapter_config.json").is_file():  # transformers would train both
        raise InputError(
            f"model_id = {str(cfg.model_id)!r} holds LoRA adapters; merge them into their model "
            "with peft's merge_and_unload(), and give the folder where you save that"
        )
    try:
        Path(cfg.out_dir).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cfg.out_dir).close()
    except OSError as error:
        raise InputError(f"out_dir cannot be written ({error}); give another folder") from None
    note_on_rate(cfg)


# 2. What is loaded

HUB_NAME = re.compile(r"[\w.-]+/[\w.:-]+(?<!\.jsonl)")


def check_hub(*names):
    """Where the Hugging Face hub cannot be reached, says so at once, and has its libraries use
    their cache only: otherwise they try again for more than a minute."""
    from huggingface_hub import constants, get_session

    on_hub = [x for x in names if HUB_NAME.fullmatch(str(x)) and not os.path.exists(x)]
    if constants.HF_HUB_OFFLINE or not on_hub:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # whatever a network can do
        print(f"The hub cannot be reached ({error!s:.100}): {on_hub} can come from its cache only")
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for the library datasets


def explained(name, sentence):
    """Returns the function of starter.py that has this name, with a sentence for its errors."""
    function = edits.own(name)

    def call(*arguments):
        try:
            return function(*arguments)
        except Exception as error:  # whatever transformers raises over files that others wrote
            words = " ".join(str(error).split())
            raise InputError(sentence.format(arguments[0], words)) from error

    return call


def attach():
    """Has starter.py say more in its errors."""
    edits.replace(
        check_known=check_known,
        init_policy=explained(
            "init_policy",
            "model_id = {!r:.200} cannot be loaded ({:.300}); give a folder written by "
            "save_pretrained, or a Hugging Face name",
        ),
        ids_of_prompt=explained(
            "ids_of_prompt",
            "the tokenizer cannot read the prompt {!r:.150} ({:.150}); change it, or the chat "
            "template",
        ),
    )


def check_model(policy, tokenizer, problems, cfg):
    """Raises InputError where model, tokenizer and problems do not fit together. Prints notes."""
    n_rows = policy.get_input_embeddings().num_embeddings
    for problem in problems.train + problems.held_out:
        ids = problem["prompt_ids"]
        if not ids or max(ids) >= n_rows:
            raise InputError(
                f"the tokenizer of {cfg.model_id} makes {ids!s:.50} of {problem['prompt']!r:.100}, "
                f"but its model needs ids below {n_rows}; save the right tokenizer there"
            )
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": "1 + 1"}]
        if "1 + 1" not in tokenizer.apply_chat_template(chat, tokenize=False):
            raise InputError(
                f"the chat template of {cfg.model_id} leaves out the user's message; mend or "
                "delete it"
            )
    trained_on = {str(problem["prompt"]) for problem in problems.train}
    in_both = [problem for problem in problems.held_out if str(problem["prompt"]) in trained_on]
    if in_both:
        raise InputError(
            f"{len(in_both)} of {len(problems.held_out)} held-out problems are also trained on, "
            f"for example {in_both[0]['prompt']!r:.200}; take them out of one of the two"
        )
    try_reward(tokenizer, problems.train[0], cfg)
    note_mistakes(tokenizer, problems, cfg)


def try_reward(tokenizer, problem, cfg):
    """A mistake in a reward shows here, before the engine starts and anything is sampled."""
    empty = starter.Response(problem["prompt_ids"], cfg.stop_token_ids[:1], [0.0], True)
    try:
        edits.own("score")([empty], [problem], tokenizer, cfg.reward)
    except Exception as error:
        error.add_note(
            "This was a trial with an empty response, before anything is sampled: the reward must "
            "return a number for any text, 0.0 for one without an answer."
        )
        raise


def note_mistakes(tokenizer, problems, cfg):
    """Prints lines about what is often a mistake."""
    if len(problems.held_out) < min(30, cfg.n_eval_problems):
        print(
            f"Warning: {len(problems.held_out)} held-out problems are too few to tell whether the "
            "model gets better; give more data, or a longer eval_file"
        )
    unknown = tokenizer.unk_token_id
    unseen = [x["prompt"] for x in problems.train if unknown in x["prompt_ids"]]
    if unseen and unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        print(
            f"Warning: {len(unseen)} of {len(problems.train)} prompts hold characters that the "
            f"tokenizer does not know, for example {unseen[0]!r:.200}: the model cannot see them"
        )
    if cfg.warmup_steps > cfg.n_train_steps > 0:
        print(f"Warning: all steps are below the learning rate: warmup_steps = {cfg.warmup_steps}")
    if cfg.epochs_per_rollout == 1 and cfg.clip_range != starter.cfg_with().clip_range:
        print("clip_range changes nothing: with epochs_per_rollout = 1 the ratio is always 1")


# 3. A run that is resumed

# With another value of these it would repeat or leave out problems, or compare what differs.
FIXED = (
    "model_id task eval_file n_eval_problems eval_temperature seed rollout_batch_size group_size "
    "lora_rank".split()
)


def as_in_file(settings):
    """Returns the settings as settings.json holds them, without the addresses of functions."""
    text = json.dumps(settings, default=str)
    return json.loads(re.sub(" at 0x[0-9a-fA-F]+", "", text))


def check_resume(run):
    """Raises InputError for a change of settings with which the run cannot go on rightly, and says
    what else has changed. Sets damaged checkpoints aside."""
    path = run.folder / "settings.json"
    if not path.is_file():
        return
    before = as_in_file(json.loads(path.read_text("utf-8")))
    now = as_in_file(vars(run.cfg))
    for name, old in before.items():
        new = now.get(name, old)
        if new == old or name == "resume":
            continue
        if name in FIXED:
            raise InputError(
                f"{name} = {new!r} would break the curve of {run.folder}, which began with "
                f"{old!r}; give that, or begin a new run without resume"
            )
        print(f"resume: {name} was {old!r}, now it is {new!r}")
    n_done = 0
    for checkpoint in sorted(run.folder.glob("checkpoint_*.pt")):
        if is_whole(checkpoint):
            n_done = int(checkpoint.stem.removeprefix("checkpoint_"))
        elif run.writes_files:
            checkpoint.rename(checkpoint.with_suffix(".damaged"))
            print(f"Warning: {checkpoint} is damaged, and renamed; the run goes on from before it")
    if run.cfg.n_train_steps <= n_done:
        print(
            f"n_train_steps = {run.cfg.n_train_steps} counts from the start, and {run.folder} has "
            f"done {n_done} steps: only its end is repeated; to go on, raise n_train_steps"
        )


def is_whole(checkpoint):
    """Whether each part of the file has its checksum."""
    try:
        return zipfile.ZipFile(checkpoint).testzip() is None
    except Exception:  # whatever zipfile raises over damaged bytes
        return False
