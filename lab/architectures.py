"""Is starter.py right for an architecture? Asked of every causal language model of transformers.

    python -m lab.architectures      writes lab/results/architectures.csv, in half an hour

Each is a small model with random weights (lab/small_models.py). It is saved, loaded by
starter.init_policy, and compared with its own forward pass (eager attention, one row at a time, no
padding, no cache), in a process of its own with a time limit: as it is, with the functions of
support/, with adapters, and with gradient checkpointing. tests/test_architectures.py runs some.
"""

import multiprocessing
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace

import starter  # before torch, for which it sets variables

import torch
import transformers

from lab.rows import write_csv
from lab.small_models import ROWS, VOCABULARY, make_model, save_tokenizer, token_ids
from support import fast, lora, models

CFG = starter.cfg_with(max_new_tokens=12, stop_token_ids=[VOCABULARY + 1], precision="float32")
SECONDS = 120  # that a row may take


def make_case(name, folder):
    """Returns everything that the checks below look at."""
    own = make_model(name)
    own.save_pretrained(folder / "start")
    save_tokenizer(folder / "start")
    # In transformers 5.19 the eager attention of Falcon adds ALiBi twice.
    own.set_attn_implementation("sdpa" if name == "falcon (alibi)" else "eager")
    policy, _ = starter.init_policy(folder / "start", "cpu")
    rng = random.Random(1)
    prompts = [token_ids(rng, n) for n in (3, 7, 7, 12, 20)]
    models.check_reading(policy, prompts, CFG)
    responses = []
    for prompt, n in zip(prompts * 2, (12, 5, 9, 1, 3, 12, 2, 12)):
        responses.append(starter.Response(prompt, token_ids(rng, n), [0.0] * n, True))
    batch = starter.make_batch(responses, torch.linspace(-1, 1, len(responses)), "cpu")
    return SimpleNamespace(
        own=own, policy=policy, folder=folder, prompts=prompts, responses=responses, batch=batch
    )


def own_log_probs(model, r):
    """A Response -> (L, V) log-probs of its tokens by the model's own forward pass of this row
    alone, and (L,) those of the tokens that it has."""
    ids = torch.tensor([[*r.prompt_ids, *r.response_ids[:-1]]])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    log_probs = logits.log_softmax(dim=1)[len(r.prompt_ids) - 1 :]
    return log_probs, log_probs.gather(1, torch.tensor(r.response_ids)[:, None])[:, 0]


def both_log_probs(case):
    """Returns the log-probs of all response tokens, by token_statistics of a padded batch, and by
    each row alone."""
    stats = starter.token_statistics(case.policy, case.batch, 1.0)
    own = [own_log_probs(case.own, response)[1] for response in case.responses]
    return stats["log_probs"][case.batch["response_mask"]], torch.cat(own)


# 1. Checks.  A case -> a difference, which must be at most the number beside the check. A check of
# LoRA or of checkpointing is one more function in CHECKS.


@torch.no_grad()
def log_probs(case):
    """In nats."""
    ours, own = both_log_probs(case)
    return ours - own


def gradients(case):
    """Relative to the largest."""
    ours, own = both_log_probs(case)
    weights = torch.randn(len(own), generator=torch.Generator().manual_seed(2))
    (weights * ours).sum().backward()
    (weights * own).sum().backward()
    # By their order: a checkpoint of a model that also sees images has longer names.
    ours, own = (
        [p.grad for p in model.parameters() if p.grad is not None]
        for model in (case.policy, case.own)
    )
    largest = max(gradient.abs().max() for gradient in own)
    return torch.stack([(a - b).abs().max() / largest for a, b in zip(ours, own, strict=True)])


@torch.no_grad()
def rollout(case):
    """Nats between the log-probs of greedily sampled tokens and those of the whole row read again,
    or by which another token has more."""
    differences = []
    requests = starter.requests_for(case.prompts, CFG, 0, 1)
    for r in starter.rollout_with_transformers(case.policy, requests, CFG, 0.0):
        again, chosen = own_log_probs(case.own, r)
        differences += [torch.tensor(r.log_probs) - chosen, again.amax(dim=1) - chosen]
    return torch.cat(differences)


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


CHECKS = {log_probs: 1e-4, gradients: 1e-3, rollout: 1e-4, saved: 1e-3}


def attach_fast(case):
    fast.attach(case.policy, None, case.prompts, CFG)


def add_adapters(case):
    lora.add_adapters(case.policy, starter.cfg_with(lora_rank=4))
    attach_fast(case)


def checkpoint_layers(case):
    if not case.policy.supports_gradient_checkpointing:
        raise starter.InputError("it has no gradient checkpointing")
    cfg = starter.cfg_with(**{**vars(CFG), "gradient_checkpointing": True})
    models.check_reading(case.policy, case.prompts, cfg)
    starter.enable_checkpointing(case.policy)
    starter.set_train_mode_of_checkpointed_layers(case.policy)


# What is done to a model before the checks.
MODES = {
    "plain": lambda case: None,
    "support": attach_fast,
    "LoRA": add_adapters,
    "checkpointing": checkpoint_layers,
}


# 2. Verdicts.  A name, a mode -> "right"; "refused", with the sentence; "wrong", and where; "not
# built".


def examine(name, mode):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            case = make_case(name, Path(folder))
            MODES[mode](case)
        except starter.InputError as error:
            return "refused", str(error).replace(f"{folder}/", "")
        except Exception as error:
            return "not built", repr(error)
        wrong = []
        for check, limit in CHECKS.items():
            if check is gradients and mode == "LoRA":  # tests/test_lora.py
                continue
            try:
                largest = check(case).abs().max().item()
                assert largest <= limit, largest
            except Exception as error:
                wrong.append(f"{check.__name__}: {error!r}")
    return "wrong" if wrong else "right", "; ".join(wrong)


def within(seconds, function, *arguments):
    """Returns what the function returns in a process of its own, or None where that takes longer
    and is ended, or crashes."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            return pool.apply_async(function, arguments).get(seconds)
        except multiprocessing.TimeoutError:
            return None


def row_of(name, mode):
    too_long = "wrong", f"it takes more than {SECONDS} s, or crashes"
    verdict, where = within(SECONDS, examine, name, mode) or too_long
    return {
        "name": name,
        "mode": mode,
        "verdict": verdict,
        "where": where,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    rows = []
    for name in sorted(ROWS):
        for mode in MODES:
            rows.append(row_of(name, mode))
            print(*rows[-1].values(), sep=" | ", flush=True)
    write_csv("architectures", rows)
