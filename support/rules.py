"""What main()'s parameters must be, and what must be true of the model and problems that they name.

A rule stands here if a person would otherwise wait for minutes before an error, or get a wrong
result without a word. The kind of a parameter (switch, whole number, number) is that of its default
in main(), or of the preset's value where that is None, so that a new one needs no entry here.
"""

import argparse
import inspect
import json
import os
import platform
import re
import sys
import unicodedata
import zlib
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import starter
from starter import InputError
from support import agents, checkpoints, edits, presets
from support.resumed import first_numbers

# 1. Parameters

KINDS = {bool: [bool], int: [int], float: [int, float]}  # of a default: of a value
# Below these a run would go wrong, in silence or late
SMALLEST = {
    "n_train_steps": 0,
    "rollout_batch_size": 1,
    "max_new_tokens": 1,
    "max_tokens_per_microbatch": 1,
    "epochs_per_rollout": 1,
    "importance_cap": 1,
    "max_grad_norm": 1e-9,
    "warmup_steps": 0,
    "lora_rank": 0,
    "vllm_tp": 1,
    "n_eval_problems": 1,
    "eval_temperature": 0,
    "eval_every": 0,
    "save_every": 0,
    "kl_ratio_cap": 1,
    "kl_clip_threshold": 1e-9,
    "kl_target": 1e-9,
    "dynamic_beta_decay": 1e-9,
    "beta_min": 0,
    "beta_schedule_steps": 1,
}
EXAMPLES = {"kl_clip_threshold": 1.0, "max_sampler_diff": 0.1}  # of what is None by default
# What only a rule of kl_adaptation_method reads
OF_A_RULE = set(
    "kl_clip_threshold kl_target dynamic_beta_decay reward_threshold beta_min "
    "beta_schedule_steps".split()
)


def check_kinds(cfg, given):
    """Raises InputError for a switch or a number of another kind than its default, for a number
    that is too small, and for what changes nothing. Settings may still be None or "auto". given:
    the settings as main() got them, of which all that differ from the defaults are printed."""
    preset = starter.PRESETS.get(cfg.preset, {})
    typed = " ".join(sys.argv)
    changed = {}
    for name, default in vars(starter.cfg_with()).items():
        value = getattr(cfg, name)
        if value == default and f"--{name}" not in typed:
            continue
        if given[name] != default:
            changed[name] = value
        check_is_read(name, value, cfg)
        example = preset.get(name, EXAMPLES.get(name, default))
        kinds = KINDS.get(type(example))
        # Of these starter.py, or check_clip_range, knows what they may be
        has_kind = kinds and name not in ("clip_range", "normalize_by_std")
        if has_kind and type(value) not in kinds:
            example = True if kinds == [bool] else example or 1
            raise InputError(
                f"{name} = {value!r:.200} must be {kinds[-1].__name__}, such as {example!r}"
            )
        if name in SMALLEST and not value >= SMALLEST[name]:
            raise InputError(f"{name} = {value} must be {SMALLEST[name]} or more")
    check_clip_range(cfg.clip_range)
    if changed:
        print(f"not the defaults: {changed}")
    say_what_is_for_the_script(cfg)


def check_clip_range(clip_range):
    pair = clip_range if isinstance(clip_range, (tuple, list)) else (clip_range, clip_range)
    if len(pair) != 2 or not all(isinstance(x, (int, float)) and x >= 0 for x in pair):
        raise InputError(f"clip_range = {clip_range!r:.100} must be a number, such as 0.2, or two")


def is_program():
    """Whether starter.py, or a copy with another name, was started, and not a script that imports
    it."""
    return Path(sys.argv[0]).resolve() == Path(starter.__file__).resolve()


def typed_for_a_script():
    """Returns the parameters of main() that were typed behind the name of a script, with values."""
    parser = argparse.ArgumentParser(
        argument_default=argparse.SUPPRESS, add_help=False, allow_abbrev=False
    )
    for name in vars(starter.cfg_with()):
        spellings = f"--{name}", f"--{name.replace('_', '-')}"
        parser.add_argument(*spellings, type=starter.value_of, nargs="?", const=True)
    typed, _ = parser.parse_known_args()
    return vars(typed)


def say_what_is_for_the_script(cfg):
    """main() reads no command line, so that what was typed for a script may have no part in it.
    Raises InputError for --resume: another run would begin instead."""
    if is_program():
        return
    for name, value in typed_for_a_script().items():
        now = getattr(cfg, name)
        text = (
            f"--{name} was typed for the script, which gives main() {name} = {now!r}; it may pass "
            "on all that is typed, by main(**starter.settings_from(sys.argv[1:]))"
        )
        if name == "resume" and now is None:
            raise InputError(text)
        if str(now) != str(value):  # a text may look like a number
            print(text)


def check_is_read(name, value, cfg):
    """Raises InputError for a setting of the KL penalty that changes nothing."""
    of_kl = name in OF_A_RULE or re.match("kl_|ref_model_id", name)
    if not cfg.use_kl_penalty and of_kl:
        remedy = "use_kl_penalty = True"
    elif name == "frozen_in_bf16" and not (cfg.use_kl_penalty or cfg.lora_rank):
        remedy = "use_kl_penalty or lora_rank"
    elif name in OF_A_RULE and cfg.kl_adaptation_method == "none":
        remedy = "a kl_adaptation_method that reads it"
    else:
        return
    raise InputError(f"{name} = {value!r} changes nothing; leave it out, or set {remedy}")


def check_settings(cfg):
    """Raises InputError for settings that do not fit together, or name what cannot be used. Says
    what is often a mistake. Comes after presets are applied, and before anything is loaded."""
    if cfg.eval_file is not None and cfg.task in starter.TASKS:
        raise InputError(
            f"eval_file = {str(cfg.eval_file)!r} is not read by task = {cfg.task!r}; give a file "
            "as task, too, or leave eval_file out"
        )
    for name in ("model_id", "ref_model_id"):
        if Path(getattr(cfg, name) or "", "adapter_config.json").is_file():
            raise InputError(  # transformers would train both
                f"{name} = {str(getattr(cfg, name))!r} holds LoRA adapters; merge them into their "
                "model with peft's merge_and_unload(), and give the folder where you save that"
            )
    if Path(cfg.model_id, "model", "config.json").is_file():  # of a run
        raise InputError(
            f"model_id = {str(cfg.model_id)!r} is a run's folder; its model is "
            f"{str(Path(cfg.model_id, 'model'))!r}"
        )
    if cfg.vllm_tp > 1 and cfg.engine != "vllm":
        raise InputError(
            f"vllm_tp = {cfg.vllm_tp} changes nothing with engine = {cfg.engine!r}; leave it out, "
            "or set engine = 'vllm'"
        )
    if cfg.agent is not None:
        agents.check(cfg.agent)
    preset = starter.PRESETS[cfg.preset]
    goes_on = Path(cfg.model_id).with_name("settings.json").is_file()  # with a run's model
    if 0 < cfg.n_train_steps <= cfg.warmup_steps:
        print(
            f"warmup_steps = {cfg.warmup_steps}: the learning rate rises in all of the "
            f"{cfg.n_train_steps} steps"
        )
    is_other = cfg.lora_rank or cfg.model_id != preset.get("model_id") and not goes_on
    if is_other and cfg.learning_rate == preset.get("learning_rate"):
        print(
            f"learning_rate = {cfg.learning_rate:g} was found for all weights of "
            f"{preset.get('model_id')}; SmolLM2-135M learnt with 2e-5, its LoRA adapters with 2e-4"
        )


# 2. What is loaded


def check_hub(*names):
    """Where the Hugging Face hub cannot be reached, says so at once, and has its libraries use
    their cache only: otherwise they try again for minutes."""
    from huggingface_hub import constants, get_session

    on_hub = [name for name in names if "/" in str(name) and not os.path.exists(name)]
    if not on_hub:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # whatever a network can do
        print(f"The hub cannot be reached ({error!s:.100}): {on_hub} can come from its cache only")
        constants.HF_HUB_OFFLINE = True


QUANTISED = r"[-_.]?(fp8|nvfp4|mxfp4|awq|gptq|int[48]|w[48]a\d+|bnb|[48]-?bit|quantized)\b.*"


def check_config(cfg):
    """Raises InputError for a model that cannot be trained, by its config.json alone. Where that
    cannot be had, init_policy says why."""
    for name in filter(None, (cfg.model_id, cfg.ref_model_id)):
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        except Exception:  # whatever others wrote
            continue
        kind = getattr(config, "quantization_config", None)
        if kind is not None:
            kind = kind if isinstance(kind, dict) else vars(kind)
            whole = re.sub(QUANTISED, "", str(name), flags=re.IGNORECASE)
            raise InputError(
                f"{str(name)!r} holds quantised weights ({kind.get('quant_method')}), which cannot "
                f"be trained and saved; give the checkpoint from which it was made, perhaps "
                f"{whole!r}, or load it with dequantize=True in transformers' quantization_config, "
                "save it, and give that folder"
            )
        of_kind = AutoModelForCausalLM._model_mapping
        if type(config) not in of_kind:
            raise InputError(
                f"{str(name)!r} is of the type {config.model_type!r} ({config.architectures}), for "
                "which transformers has no model of text alone; give a model of text"
            )
        n_heads = getattr(config.get_text_config(), "num_nextn_predict_layers", 0)
        if n_heads:
            print(f"{name}: its {n_heads} heads for later tokens are neither trained nor saved")
        model_class = of_kind[type(config)]
        if cfg.gradient_checkpointing and not model_class.supports_gradient_checkpointing:
            raise InputError(
                f"gradient_checkpointing = True: {model_class.__name__} has none; leave it out"
            )


def letters_of(text):
    """Letters and digits alone: templates change spaces and marks."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", text)))


def messages_left_out(problem, text):
    """Returns the messages of a problem's prompt whose letters are not in a text."""
    letters = letters_of(text)
    left_out = []
    for message in agents.messages_of(problem["prompt"]):
        content = message["content"]
        in_json = json.dumps(content), json.dumps(content, ensure_ascii=False)  # of tools
        if not any(letters_of(x) in letters for x in (content, *in_json)):
            left_out.append(message)
    return left_out


def check_template(problems, tokenizer, cfg):
    """Raises InputError where the chat template leaves out a message of a problem. Says which of
    its switches it does not have."""
    template = str(tokenizer.chat_template)
    switches = {"enable_thinking"} if cfg.enable_thinking else set()
    n_cut = 0
    for problem in problems:
        switches |= (problem.get("chat_template_kwargs") or {}).keys()
        switches |= {"tools"} if problem.get("tools") else set()
        left_out = messages_left_out(problem, tokenizer.decode(problem["prompt_ids"]))
        if left_out:  # or the tokenizer does not know some of its characters
            text = starter.text_of_prompt(problem, tokenizer, cfg.enable_thinking)
            left_out = messages_left_out(problem, text)
        for message in left_out:
            thought, mark, answer = message["content"].rpartition("</think>")
            if mark and letters_of(answer) in letters_of(text):
                n_cut += 1  # as templates do with earlier turns
                continue
            raise InputError(
                f"the chat template leaves out {message!r:.200} of a prompt; mend either of them"
            )
    if n_cut:
        print(f"the chat template leaves out the reasoning of {n_cut} earlier turns")
    for name in sorted(switches):
        if name not in template:
            print(f"Warning: the chat template has no {name}, so that it changes nothing")


# Keys of a problem that this program reads
READ = set(
    "prompt answer prompt_ids last_number skill is_right tools chat_template_kwargs question "
    "problem messages solution numbers target".split()
)


def note_unread_columns(problems, cfg):
    """Names the columns of a file that neither its prompts nor the shipped reward read."""
    unread = {name for problem in problems for name in problem} - READ
    if unread and cfg.reward is starter.reward_fn and edits.is_shipped("reward_fn"):
        print(f"nothing reads {sorted(unread)}: what belongs to a question must be in its prompt")


def check_model(policy, tokenizer, problems, cfg):
    """Raises InputError where model, tokenizer and problems do not fit together. Prints notes."""
    n_rows = policy.get_input_embeddings().num_embeddings
    train, held_out, _ = problems
    is_file = not callable(cfg.task) and cfg.task not in starter.TASKS
    if is_file:
        shown = {name: value for name, value in train[0].items() if name != "prompt_ids"}
        print(
            f"{cfg.task}: {len(train)} problems to train on, {len(held_out)} held out; the first: "
            f"{shown!r:.500}"
        )
    print(f"stop tokens: {tokenizer.convert_ids_to_tokens(cfg.stop_token_ids)}")
    for problem in train + held_out:
        ids = problem["prompt_ids"]
        if not ids or max(ids) >= n_rows:
            raise InputError(
                f"the tokenizer of {cfg.model_id} makes {ids!s:.50} of {problem['prompt']!r:.100}, "
                f"but its model needs ids below {n_rows}; save the right tokenizer there"
            )
    if tokenizer.chat_template is not None:
        check_template(train + held_out, tokenizer, cfg)
    if is_file:
        note_unread_columns(train + held_out, cfg)
    left_out = {*tokenizer("")["input_ids"]} - {*train[0]["prompt_ids"]}
    if left_out:
        print(
            f"no {tokenizer.decode([*left_out])} in prompts, though the tokenizer puts it on texts"
        )
    trained = {tuple(problem["prompt_ids"]) for problem in train}
    for problem in held_out:
        if tuple(problem["prompt_ids"]) in trained:
            raise InputError(
                f"the held-out problem {problem['prompt']!r:.200} is also trained on; take it out"
            )
    try_reward_on_empty_response(tokenizer, train[0], cfg)
    unknown = tokenizer.unk_token_id
    unseen = [x["prompt_ids"] for x in train if unknown in x["prompt_ids"]]
    if unseen and unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        print(
            f"Warning: {len(unseen)} of {len(train)} prompts hold characters that the "
            f"tokenizer does not know; the model sees {tokenizer.decode(unseen[0])!r:.200}"
        )


def try_reward_on_empty_response(tokenizer, problem, cfg):
    """A mistake in a reward shows here, before the engine starts and anything is sampled."""
    reward = cfg.reward or starter.reward_fn
    if "completions" in inspect.signature(reward).parameters:
        raise InputError(
            "the reward has a parameter named completions, as in TRL, where it gets lists; give "
            "reward=lambda text, problem: YOURS(completions=[text], prompts=[problem['prompt']], "
            "**{key: [x] for key, x in problem.items()})[0]"
        )
    empty = starter.Response(problem["prompt_ids"], cfg.stop_token_ids[:1], [0.0], True)
    starter.score([empty], [problem], tokenizer, reward)


# 3. A run that is resumed

# With another value of these it would repeat or leave out problems, or compare what differs.
FIXED = (
    "model_id task eval_file n_eval_problems eval_temperature seed rollout_batch_size group_size "
    "lora_rank".split()
)


def check_resume(run):
    """Raises InputError for a change of settings with which the run cannot go on rightly, and says
    what else has changed. Sets damaged checkpoints aside."""
    before = presets.read_settings(run.folder / "settings.json")
    run.cfg.sources = before.get("sources", {})
    run.cfg.made_with = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    now = json.loads(starter.text_of_settings(run.cfg))
    needed = []
    for name, old in before.items():
        new = now.get(name, old)
        if new == old or name == "resume":
            continue
        ends = {Path(str(x)).parts[-2:] for x in (old, new)}  # of a file or folder, elsewhere
        if name in FIXED and len(ends) > 1:
            needed.append((name, old))
        else:
            print(f"resume: {name} was {old!r}, now it is {new!r}")
    if needed:
        if before["preset"] != now["preset"]:
            needed.insert(0, ("preset", before["preset"]))
        remedy = f"give main() {', '.join(f'{name}={old!r}' for name, old in needed)}"
        if is_program():
            remedy = "type " + " ".join(f"--{name} {old}" for name, old in needed)
        raise InputError(
            f"other settings would break the curve of {run.folder}; {remedy}, or leave out resume "
            "for a new run"
        )
    for path in run.folder.glob("checkpoint_*"):
        if not checkpoints.is_whole(path):
            if run.writes_files:
                path.rename(path.with_name(f"damaged_{path.name}"))
                print(f"Warning: {path} is damaged, and renamed; the run goes on from before it")
            continue
        missing = checkpoints.missing_parts(path)
        if missing:
            raise InputError(
                f"{path} lacks {missing}; if processes on another machine have written them there, "
                "copy the run's folders of all machines together, or remove this folder, to go on "
                "from the one before"
            )


def plain(problem):
    """A problem as two processes write it: a function by its name, and nothing by its address."""
    named = {name: getattr(x, "__qualname__", x) for name, x in problem.items()}
    return re.sub(" at 0x[0-9a-f]+", "", repr(named))


def note_changed_sources(policy, problems, cfg):
    """Keeps short hashes of what a run learns from and begins with, and says which of them are
    others than those with which a resumed run has trained. The first 1/64 of each tensor, at least
    one number and at most a thousand, tells two fine-tunes apart: of the part that the first
    process has, however many divide the tensor."""
    sources = {
        "problems": [[plain(problem) for problem in part] for part in problems],
        "reward": edits.fingerprint(cfg.reward) or edits.fingerprint(type(cfg.reward)),
        "model": [first_numbers(x, min(1000, 1 + x.numel() // 64)) for x in policy.parameters()],
    }
    if cfg.agent is not None:
        sources["agent"] = edits.fingerprint(cfg.agent) or edits.fingerprint(type(cfg.agent))
    for name, source in sources.items():
        code = zlib.crc32(repr(source).encode())
        if cfg.sources.get(name, code) != code:
            print(f"resume: the {name} changed")
        cfg.sources[name] = code
