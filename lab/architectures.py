"""Is starter.py right for an architecture? Asked of every causal language model of transformers.

    python -m lab.architectures              writes lab/results/architectures.csv, in half an hour
    python -m lab.architectures gemma2 rwkv  prints the rows whose names begin like this

Each is a small model with random weights (lab/small_models.py). It is saved, loaded by
starter.init_policy, and compared with its own forward pass (eager attention, one row at a time, no
padding, no cache), in a process of its own with a time limit: as it is, with the functions of
support/, with adapters, and with gradient checkpointing. tests/test_architectures.py runs some.
"""

import itertools
import json
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import starter  # before torch, for which it sets variables

import torch
import transformers

from lab.rows import write_csv
from lab.small_models import ROWS, VOCABULARY, make_model, save_tokenizer, token_ids
from support import fast, lora, models

MAX_NEW_TOKENS = 12
PROMPT_LENGTHS = (3, 7, 7, 12, 20)
CFG = starter.cfg_with(
    max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=[VOCABULARY + 1], precision="float32"
)
SECONDS = 120  # that a row may take
MEMORY = 12 << 30  # bytes that it may ask for


def make_case(name, folder):
    """Returns everything that the checks below look at."""
    own = make_model(name)
    own.save_pretrained(folder / "start")
    save_tokenizer(folder / "start")
    # In transformers 5.19 the eager attention of Falcon adds ALiBi twice.
    own.set_attn_implementation("sdpa" if name == "falcon (alibi)" else "eager")
    policy, tokenizer = starter.init_policy(folder / "start", "cpu")
    rng = random.Random(1)
    prompts = [token_ids(rng, n) for n in PROMPT_LENGTHS]
    texts = [{"prompt": " ".join(map(str, prompt))} for prompt in prompts]
    if len(starter.with_prompt_ids(texts, policy, tokenizer, CFG)) < len(prompts):
        raise starter.InputError("some prompts do not fit into the model's context")
    models.check_reading(policy, prompts, CFG)
    responses = [
        starter.Response(prompt, token_ids(rng, n), [0.0] * n, True)
        for prompt, n in zip(prompts * 2, (12, 5, 9, 1, 3, 12, 2, 12))
    ]
    batch = starter.make_batch(responses, torch.linspace(-1, 1, len(responses)), "cpu")
    return SimpleNamespace(
        own=own,
        policy=policy,
        folder=folder,
        prompts=prompts,
        responses=responses,
        batch=batch,
        sampled=[],
    )


def own_log_probs(model, r):
    """A Response -> (L, V) log-probs of its tokens by the model's own forward pass of this row
    alone, and (L,) those of the tokens that it has."""
    ids = torch.tensor([[*r.prompt_ids, *r.response_ids[:-1]]])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    log_probs = logits.log_softmax(dim=1)[len(r.prompt_ids) - 1 :]
    return log_probs, log_probs.gather(1, torch.tensor(r.response_ids)[:, None])[:, 0]


# 1. Checks.  A case -> a difference, which must be at most the number beside the check. A check of
# LoRA or of checkpointing is one more function in CHECKS.


@torch.no_grad()
def log_probs(case):
    """Nats between token_statistics of a padded batch and each row alone."""
    statistics = starter.token_statistics(case.policy, case.batch, 1.0)
    ours = statistics["log_probs"][case.batch["response_mask"]]
    return ours - torch.cat([own_log_probs(case.own, r)[1] for r in case.responses])


def gradients(case):
    """Between the gradients of a padded batch and of each row alone, relative to the largest."""
    rng = torch.Generator().manual_seed(2)
    weights = torch.randn(case.batch["labels"].shape, generator=rng)
    statistics = starter.token_statistics(case.policy, case.batch, 1.0)
    (weights * statistics["log_probs"]).sum().backward()
    mask = case.batch["response_mask"]
    for row, response in enumerate(case.responses):
        (weights[row][mask[row]] * own_log_probs(case.own, response)[1]).sum().backward()
    # By their order: a checkpoint of a model that also sees images has longer names.
    own, ours = (
        [p.grad for p in model.parameters() if p.grad is not None]
        for model in (case.own, case.policy)
    )
    largest = max(gradient.abs().max() for gradient in own)
    return torch.stack([(a - b).abs().max() / largest for a, b in zip(ours, own, strict=True)])


@torch.no_grad()
def rollout(case):
    """Nats between the log-probs of greedily sampled tokens and those of the whole row read again,
    or by which another token has more."""
    differences = []
    case.sampled = starter.rollout_with_transformers(case.policy, case.prompts, CFG, 0, 1, 0.0)
    for r in case.sampled:
        again, chosen = own_log_probs(case.own, r)
        differences += [torch.tensor(r.log_probs) - chosen, again.amax(dim=1) - chosen]
    return torch.cat(differences)


@torch.no_grad()
def first_step(case):
    """Mean nats between sampler and trainer, which starter.check_sampler looks at."""
    if not case.sampled:  # the rollout raised an error
        return torch.zeros(1)
    batch = starter.make_batch(case.sampled, torch.zeros(len(case.sampled)), "cpu")
    statistics = starter.token_statistics(case.policy, batch, 1.0)
    difference = (statistics["log_probs"] - batch["rollout_log_probs"])[batch["response_mask"]]
    return difference.abs().mean()


@torch.no_grad()
def saved(case):
    """Between the logits of a policy that has moved and of its saved model read back. Adapters and
    merged weights round otherwise: 3e-4 of Qwen3.5 in float32 are 1e-5 in float64."""
    torch.manual_seed(3)
    for name, tensor in case.policy.state_dict().items():
        if tensor.is_floating_point():
            tensor += 0.02 * torch.randn_like(tensor)
    weights = {name: tensor.detach() for name, tensor in starter.weights_by_name(case.policy)}
    case.policy.save_pretrained(case.folder / "model", state_dict=weights)
    save_tokenizer(case.folder / "model")
    ids = torch.tensor([case.prompts[-1]])
    again, _ = starter.init_policy(case.folder / "model", "cpu")
    logits, ours = (model(input_ids=ids, use_cache=False).logits for model in (again, case.policy))
    return logits - ours


CHECKS = {log_probs: 1e-4, gradients: 1e-3, rollout: 1e-4, first_step: 1e-3, saved: 1e-3}


def attach_fast(case):
    problems = starter.Problems([{"prompt_ids": ids} for ids in case.prompts], [])
    fast.attach(case.policy, None, problems, CFG)


def add_adapters(case):
    lora.add_adapters(case.policy, starter.cfg_with(lora_rank=4))
    attach_fast(case)


def checkpoint_layers(case):
    if not case.policy.supports_gradient_checkpointing:
        raise starter.InputError("it has no gradient checkpointing")
    cfg = starter.cfg_with(max_new_tokens=MAX_NEW_TOKENS, gradient_checkpointing=True)
    models.check_reading(case.policy, case.prompts, cfg)
    case.policy.gradient_checkpointing_enable()
    starter.train_checkpointed_layers(case.policy)


# What is done to a model before the checks.
MODES = {
    "plain": lambda case: None,
    "support": attach_fast,
    "LoRA": add_adapters,
    "checkpointing": checkpoint_layers,
}


# 2. Verdicts.  A name, a mode -> a row of the csv file. "right"; "refused", with the sentence;
# "wrong", and where; "not built".


def examine(name, mode, folder):
    row = {"name": name, "mode": mode, "verdict": "right"}
    try:
        case = make_case(name, folder)
        MODES[mode](case)
    except starter.InputError as error:
        return row | {"verdict": "refused", "where": str(error)}
    except Exception as error:
        return row | {"verdict": "not built", "where": sentence(error)}
    wrong = []
    for check, limit in CHECKS.items():
        if check is gradients and mode == "LoRA":  # tests/test_lora.py
            continue
        try:
            largest = check(case).abs().max().item()
        except Exception as error:
            wrong.append(f"{check.__name__}: {sentence(error)}")
        else:
            row[check.__name__] = f"{largest:.1e}"
            if not largest <= limit:
                wrong.append(f"{check.__name__}: {largest:.2g}")
    if wrong:
        row |= {"verdict": "wrong", "where": "; ".join(wrong)}
    return row


def sentence(error):
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"


def examine_in_process(name, mode):
    """examine(name, mode) in a forked process that is ended after SECONDS."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "row.json")
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            row = examine(name, mode, Path(folder))
            path.write_text(json.dumps(row).replace(f"{folder}/", ""))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return json.loads(path.read_text())
    return {"name": name, "mode": mode, "verdict": "wrong", "where": f"ended with status {status}"}


def main(wanted):
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    columns = ["name", "mode", "verdict", "where", *(check.__name__ for check in CHECKS)]
    rows = []
    for name, mode in itertools.product(sorted(ROWS), MODES):
        if not wanted or name.startswith(tuple(wanted)):
            rows.append(dict.fromkeys(columns, "") | examine_in_process(name, mode))
            print(*rows[-1].values(), sep=" | ", flush=True)
    if not wanted:
        write_csv("architectures", [row | versions for row in rows])


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    main(sys.argv[1:])
