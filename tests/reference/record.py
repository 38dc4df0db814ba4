"""record.py: reference values of the old code, so that new code can be compared with it.

The old code is commit 8070d16. Get it beside the present one, go there, and run this file from
there:

    git worktree add old 8070d16
    cd old
    python path/to/record.py path/to/values.json

It takes 20 seconds on two CPU cores. inputs.py, which lies beside this file, holds all inputs:
settings, tensors, models, responses and the checkpoint. This file gives them to the old modules and
writes what comes out. The section "about" of the result has the versions it was made with.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, os.getcwd())  # The old modules are in the folder from which this file is run.
import starter  # It comes before torch, because it sets variables that torch reads.

import checks
import shared_prompts  # noqa: F401  It registers the attention named "starter".
import tasks

import torch
import transformers

import inputs  # Python looks for it beside this file.


def numbers_of(metadata):
    """Gives the values of a dict as plain numbers."""
    return {name: float(value) for name, value in metadata.items()}


def with_rules(setting):
    """Gives the setting as the old code's configuration, with its rules and their numbers."""
    return checks.with_kl_rules(
        SimpleNamespace(**setting), starter.TERM_RULES, starter.COEFFICIENT_RULES
    )


# --------------------------------------------------------------------------------------------------
# Losses


def loss_of(setting):
    """Gives the weighted sum of one loss, its gradient by the policy's log-probs, its means.

    Where the loss has a gradient by the exact KL, the norm of that is there too.
    """
    t = inputs.loss_tensors(setting["extreme"])
    c = with_rules(setting | {"temperature": 1.0, "bf16": False})
    settings = starter.step_settings(c)
    for name in ("temperature", "bf16", "importance_cap"):  # They belong to the step.
        del settings[name]
    policy = t["policy"].requires_grad_()
    exact_kl = t["exact_kl"].requires_grad_() if c.with_exact_kl else None
    reference = t["reference"] if c.with_reference else None
    advantages = t["advantages"]
    if c.kl_in == "reward" and c.with_reference:
        advantages = starter.put_kl_into_advantages(
            advantages,
            t["sampler"],
            reference,
            t["mask"],
            c.kl_coef,
            c.kl_estimator,
            settings["kl_rule"],
            settings["kl_log_ratio_cap"],
        )
    importance = None
    if c.importance_cap is not None:
        importance = torch.exp(t["old"] - t["sampler"]).clamp(max=c.importance_cap)
    loss, metadata = starter.compute_loss(
        advantages,
        policy,
        t["old"],
        settings.pop("clip_range"),
        reference,
        c.kl_coef,
        mask=t["mask"],
        importance_weights=importance,
        exact_kl=exact_kl,
        **settings,
    )
    weights = starter.token_weights(t["mask"], c.loss_average, c.max_new_tokens)
    total = torch.where(t["mask"], loss * weights, 0.0).sum()
    total.backward()
    found = {
        "loss": total.item(),
        "gradient_norm": policy.grad.norm().item(),
        "along": inputs.along(policy.grad, t["direction"]),
    }
    if exact_kl is not None and exact_kl.grad is not None:
        found["exact_kl_gradient_norm"] = exact_kl.grad.norm().item()
    return found | numbers_of(metadata)


# --------------------------------------------------------------------------------------------------
# Steps


def step_of(setting):
    """Gives loss, gradient and token means of each epoch over one rollout."""
    c = with_rules(setting)
    policy, reference = inputs.make_models()
    policy.set_attn_implementation("starter")
    reference.set_attn_implementation("starter")
    responses = [starter.Response(**response) for response in inputs.make_responses()]
    batch = starter.make_batch(responses, inputs.step_advantages(), "cpu")
    batch["weights"] = starter.token_weights(
        batch["response_mask"], c.loss_average, c.max_new_tokens
    )
    microbatches = starter.cut_microbatches(batch, c.max_tokens_per_microbatch)
    n_tokens = int(batch["response_mask"].sum())
    epochs = []
    for _ in range(c.epochs_per_rollout):
        means, microbatches = starter.accumulate_gradients(
            policy,
            reference if c.with_reference else None,
            microbatches,
            n_tokens,
            c.kl_coef,
            defaultdict(float),
            **starter.step_settings(c),
        )
        named = [(name, p, p.grad) for name, p in policy.named_parameters()]
        norm = torch.cat([gradient.flatten() for _, _, gradient in named]).norm()
        along = 0.0
        for name, parameter, gradient in named:
            along += inputs.along(gradient, inputs.direction_of(name, parameter.shape))
        epochs.append({"gradient_norm": norm.item(), "along": along} | numbers_of(means))
        with torch.no_grad():
            for _, parameter, gradient in named:
                parameter -= inputs.SGD_STEP * gradient / norm
        policy.zero_grad()
    return epochs


# --------------------------------------------------------------------------------------------------
# Controllers


def rule_numbers_of(name):
    """Gives the numbers that a rule has where none are given."""
    c = with_rules(dict(kl_adaptation_method=name, kl_target=None, kl_clip_threshold=None))
    return {
        key: getattr(c, key)
        for key in ("term_rule", "coefficient_rule", "kl_target", "kl_clip_threshold")
    }


def betas_of(setting):
    """Gives the coefficient after each step."""
    c, betas = with_rules(setting), []
    state = {"beta": c.kl_coef, "step": 0, "kl": None, "reward": None}
    for kl, reward in inputs.kl_and_reward_of_steps():
        state = starter.next_beta(state, kl, reward, c)
        betas.append(state["beta"])
    return betas


# --------------------------------------------------------------------------------------------------
# A run


def run_of(settings, folder):
    """Gives the metrics of each step, the problems and the result of a run of main().

    crc32_of_response_ids tells whether a step sampled the same tokens. Left out are times and the
    difference between sampler and trainer, which is rounding and nothing else.
    """
    left_out = ("tokens_per_s", "sampler_logprob_diff", "sampler_logprob_diff_max")
    steps, latest, log_train, rollout = {}, [], starter.log_train, starter.rollout

    def rollout_that_is_kept(*args, **more):
        latest[:] = rollout(*args, **more)
        return list(latest)

    def log_train_that_is_kept(run, step, metrics, *rest):
        kept = {name: float(value) for name, value in metrics.items() if name not in left_out}
        ids = [response.response_ids for response in latest]
        crc = format(zlib.crc32(json.dumps(ids).encode()), "08x")
        steps[str(step)] = kept | {"crc32_of_response_ids": crc}
        return log_train(run, step, metrics, *rest)

    model = inputs.save_checkpoint(Path(folder) / "model")
    starter.rollout, starter.log_train = rollout_that_is_kept, log_train_that_is_kept
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            result = starter.main(
                model_id=str(model), out_dir=str(Path(folder) / "runs"), **settings
            )
    finally:
        starter.rollout, starter.log_train = rollout, log_train
    config = json.loads((result["run_folder"] / "config.json").read_text())
    train, held_out = tasks.TASKS[settings["task"]](SimpleNamespace(**settings))
    problems = {
        "crc32": config["problems_crc32"],
        "train": [problem["prompt"] for problem in train],
        "held_out": [problem["prompt"] for problem in held_out],
    }
    kept = {name: result[name] for name in ("before", "after", "kl_per_token", "kl_per_sequence")}
    return {f"step {step}": metrics for step, metrics in steps.items()} | {
        "problems": problems,
        "result": kept,
    }


# --------------------------------------------------------------------------------------------------
# Small functions


def record_rewards():
    """Gives the texts, and their rewards by problem."""
    lines = Path("fuzz_corpus.jsonl").read_text().splitlines()
    texts = inputs.REWARD_TEXTS + [json.loads(line) for line in lines]
    rewards = {
        name: [starter.reward_fn(text, problem) for text in texts]
        for name, problem in inputs.REWARD_PROBLEMS.items()
    }
    return {"texts": texts} | rewards


def advantages_of(given):
    """Gives the advantages and the means that the old code shows of their rewards."""
    advantages, metadata = starter.compute_group_normalized_advantages(**given)
    return {"advantages": advantages.tolist()} | numbers_of(metadata)


def record_kl_values():
    """Gives the value of each estimator at each pair of log-probs."""
    policy, reference = inputs.kl_inputs()
    return {
        k: starter.compute_kl_divergence(policy, reference, k)[0].tolist()
        for k in ("k1", "k2", "k3")
    }


# --------------------------------------------------------------------------------------------------
# All of it


def record():
    """Gives all sections."""
    assert tuple(starter.TERM_RULES) == inputs.TERM_RULES
    assert tuple(starter.COEFFICIENT_RULES) == inputs.COEFFICIENT_RULES
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    values = {"about": {"commit": "8070d16"} | versions}
    values["losses"] = {name: loss_of(setting) for name, setting in inputs.loss_settings().items()}
    values["steps"] = {name: step_of(setting) for name, setting in inputs.step_settings().items()}
    values["rule_numbers"] = {name: rule_numbers_of(name) for name in inputs.rule_names()}
    values["controllers"] = {
        name: betas_of(setting) for name, setting in inputs.controller_settings().items()
    }
    for name, settings in inputs.run_settings().items():
        with tempfile.TemporaryDirectory() as folder:
            values[f"run: {name}"] = run_of(settings, folder)
    values["rewards"] = record_rewards()
    values["advantages"] = {
        name: advantages_of(given) for name, given in inputs.advantage_inputs().items()
    }
    values["token_weights"] = {
        name: starter.token_weights(**given).tolist()
        for name, given in inputs.weight_inputs().items()
    }
    values["kl_values"] = record_kl_values()
    return values


def as_text(values):
    """Gives JSON with a line for each entry. Python writes each float so that it reads back."""
    sections = []
    for section, entries in values.items():
        lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
        sections.append(f"{json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python record.py values.json")
    Path(sys.argv[1]).write_text(as_text(record()))
