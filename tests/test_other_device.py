"""Whole runs on a device that is not the CPU. None is there: tests/pretend_gpu.py computes on the
CPU what the device is asked to, and refuses tensors that were left behind. A run there must log the
numbers of a run on the CPU. The runs have processes of their own."""
import contextlib
import io
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import save_checkpoint, scalars, settings
from forked import REPOSITORY, in_new_process

import starter

KL = dict(use_kl_penalty=True, kl_coef=0.3)
VARIANTS = {
    "default": dict(),
    "later epochs": KL | dict(kl_estimator="exact", kl_in="loss_to_go", loss_average="dr_grpo",
                              epochs_per_rollout=2, gradient_checkpointing=True),
    "KL in the reward": KL | dict(kl_estimator="k1", kl_in="reward", mask_truncated=True),
    "adapters": KL | dict(lora_rank=4, kl_adaptation_method="dynamic_sound+sigmoid_sound"),
    "bf16": KL | dict(bf16=True),
    "bf16 adapters": KL | dict(bf16=True, lora_rank=4),
}


# --------------------------------------------------------------------------------------------------
# What runs in the other process

def run_on(device, checkpoint, out_dir, module=starter, **changes):
    """A run on "cpu" or "pretend". Returns {tag: {step: value}}, and the line of its parts."""
    from pretend_gpu import PRETEND, pretend_gpu
    choose_hardware = module.choose_hardware

    def choose(cfg):
        line = choose_hardware(cfg)
        cfg.device = PRETEND
        return line

    def collect(ranks, pairs):  # saving the model is the work of transformers
        return {name: tensor.cpu() for name, tensor in pairs}

    with contextlib.ExitStack() as stack:
        if device == "pretend":
            for context in (mock.patch.object(module, "choose_hardware", choose),
                            mock.patch.object(module.OneProcess, "collect", collect),
                            mock.patch.dict(module.FLOAT32_LIMIT, {"pretend": 1e-3}),
                            pretend_gpu()):
                stack.enter_context(context)
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        result = module.main(**settings(checkpoint, out_dir, **dict(n_train_steps=3) | changes))
    parts = next(line for line in printed.getvalue().splitlines() if line.startswith("parts: "))
    return scalars(result["run_folder"]), parts


def run_all_variants(folder):
    """Returns {variant: [what run_on returns on the CPU, the same on the other device]}."""
    checkpoint = save_checkpoint(Path(folder) / "model")
    return {name: [run_on(device, checkpoint, Path(folder) / device / name, **changes)
                   for device in ("cpu", "pretend")] for name, changes in VARIANTS.items()}


def run_recipes(folder):
    """Returns {recipe: the gradient norms of its steps}."""
    import os
    import sys

    import test_recipes
    os.chdir(folder)  # the recipe with a teacher looks for it here
    wandb = SimpleNamespace(log=lambda *_, **__: None)
    sys.modules["wandb"] = SimpleNamespace(__spec__=object(), init=lambda **_: wandb)
    checkpoint = save_checkpoint(Path(folder) / "model")
    found = {}
    for name in test_recipes.NAMES:
        module = test_recipes.load(name, Path(folder))
        log, _ = run_on("pretend", checkpoint, Path(folder) / name, module, n_train_steps=2)
        found[name] = list(log["train/grad_norm"].values())
    return found


def run_and_resume(folder):
    """Returns what a run logs on the device, whole and stopped after its first step."""
    checkpoint = save_checkpoint(Path(folder) / "model")
    whole, stopped = (Path(folder) / name for name in ("whole", "stopped"))
    run_on("pretend", checkpoint, stopped, n_train_steps=1, **KL)
    return [run_on("pretend", checkpoint, whole, **KL)[0],
            run_on("pretend", checkpoint, stopped, resume=True, **KL)[0]]


def refusals():
    """Returns the error of mixing devices, and the numbers of what a GPU does not refuse."""
    from pretend_gpu import pretend_gpu
    with pretend_gpu():
        there = torch.arange(3.0, device="pretend:0")
        with pytest.raises(RuntimeError) as refused:
            there + torch.ones(3)
        with torch.autocast("pretend", torch.bfloat16):
            product = there @ there
            dtypes = [str(x.dtype) for x in (product, there.softmax(0), product.exp())]
        return [str(refused.value), (there + torch.tensor(1.0)).tolist(),
                there[torch.tensor([2, 0])].tolist(), dtypes]


def waits_of_a_microbatch(folder):
    """Returns {compute: [waits without, with a reference]} of a forward and backward pass."""
    import copy

    from pretend_gpu import PRETEND, pretend_gpu
    from support import fast
    found = {}
    cfg = SimpleNamespace(kl=starter.KLSettings(), bf16=True, temperature=1.0, importance_cap=2.0,
                          clip_range=0.2)
    responses = [starter.Response([1, 2, 3], list(range(4, 4 + n)), [-3.0] * n, True)
                 for n in (5, 3, 7)]
    with pretend_gpu() as device:
        policy, _ = starter.init_policy(save_checkpoint(Path(folder) / "model"), PRETEND)
        ref_model = copy.deepcopy(policy).requires_grad_(False)
        for compute in (starter.PLAIN, fast.COMPUTE):
            compute.prepare(policy)
            compute.prepare(ref_model)
            batch = starter.make_batch(responses, torch.tensor([1.0, -1.0, 0.5]), PRETEND)
            batch["weights"] = starter.token_weights(batch["response_mask"], "dapo", 8)
            rows, = compute.cut_microbatches(batch, 1000)
            found[compute.name] = []
            for reference in (None, ref_model):
                before = device.waits
                starter.grpo_microbatch_step(policy, dict(rows), cfg, reference, 0.1, compute)
                found[compute.name].append(device.waits - before)
    return found


# --------------------------------------------------------------------------------------------------
# The tests

def test_the_device_refuses_what_a_gpu_refuses(tmp_path):
    refused, sums, picked, dtypes = in_new_process("test_other_device", "refusals", tmp_path,
                                                   REPOSITORY)
    assert "not all tensors are on pretend:0" in refused and "[(3,)]" in refused
    assert sums == [1, 2, 3] and picked == [2, 0]  # a number, and places, may be on the CPU
    assert dtypes == ["torch.bfloat16", "torch.float32", "torch.float32"]


@pytest.fixture(scope="module", params=["with support/", "alone"])
def both_devices(request, tmp_path_factory):
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("devices")
    starter_folder = REPOSITORY
    if request.param == "alone":
        starter_folder = tmp_path_factory.mktemp("alone")
        shutil.copy(starter.__file__, starter_folder)
    runs = in_new_process("test_other_device", "run_all_variants", folder, starter_folder,
                          str(folder))
    return "fast" if request.param == "with support/" else "plain", runs


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_on_another_device_logs_the_numbers_of_the_cpu(both_devices, variant):
    compute, runs = both_devices
    (on_cpu, _), (elsewhere, parts) = runs[variant]
    assert f"compute {compute}," in parts
    assert on_cpu.keys() == elsewhere.keys()
    for tag in on_cpu:
        if tag.startswith(("time/", "mem/")) or tag.endswith(("tokens_per_s", "diff_max")):
            continue
        for step, value in on_cpu[tag].items():
            other = elsewhere[tag][step]
            if "bf16" in variant:  # autocast rounds other operations there
                assert math.isfinite(other), tag
            else:
                assert other == pytest.approx(value, rel=2e-3, abs=2e-5), (tag, step)
    if "bf16" in variant:
        assert max(elsewhere["train/sampler_logprob_diff"].values()) < 0.05
        assert elsewhere["train/kl_per_token"]["1"] == 0


@pytest.mark.slow
def test_each_recipe_trains_on_another_device(tmp_path):
    pytest.importorskip("lab.recipes")
    found = in_new_process("test_other_device", "run_recipes", tmp_path, REPOSITORY, str(tmp_path))
    assert len(found) >= 9
    for name, norms in found.items():
        assert len(norms) == 2 and all(map(math.isfinite, norms)), name
        # The teacher of distillation is the student here, and nothing is learnt.
        assert (max(norms) > 0.05) == (name != "distillation"), name


@pytest.mark.slow
def test_a_run_on_another_device_is_resumed_to_the_same_bits(tmp_path):
    whole, resumed = in_new_process("test_other_device", "run_and_resume", tmp_path, REPOSITORY,
                                    str(tmp_path))
    for tag in whole:
        if not tag.startswith(("time/", "mem/")) and not tag.endswith("tokens_per_s"):
            assert resumed[tag] == whole[tag], tag


@pytest.mark.slow
def test_a_microbatch_waits_for_the_device_a_few_times_only(tmp_path):
    """Once where transformers looks for packed rows, and where the mask picks hidden states,
    labels and, in the backward pass, gradients. The reference has the first two as well. The head
    waits for nothing, whatever its size."""
    waits = in_new_process("test_other_device", "waits_of_a_microbatch", tmp_path, REPOSITORY,
                           str(tmp_path))
    assert waits == {"plain": [4, 6], "fast": [4, 6]}
