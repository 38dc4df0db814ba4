"""Whole runs on a device that is not the CPU. None is there: tests/pretend_gpu.py computes on the
CPU what the device is asked to, and refuses tensors that were left behind. A run there must log the
numbers of a run on the CPU. The runs have processes of their own."""
import contextlib
import io
import math
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import save_checkpoint, scalars, settings
from forked import REPOSITORY, in_new_process

import starter

SHORT = dict(n_train_steps=2, rollout_batch_size=8, n_eval_problems=4)
KL = dict(use_kl_penalty=True, kl_coef=0.3)
VARIANTS = {
    "default": dict(),
    "later epochs": KL | dict(kl_estimator="exact", kl_in="loss_to_go", loss_average="dr_grpo",
                              epochs_per_rollout=2, gradient_checkpointing=True),
    "KL in the reward": KL | dict(kl_estimator="k1", kl_in="reward", mask_truncated=True),
    "bf16": KL | dict(bf16=True),
}
WITH_SUPPORT = {
    "adapters": KL | dict(lora_rank=4, kl_adaptation_method="dynamic_sound+sigmoid_sound"),
    "bf16 adapters": KL | dict(bf16=True, lora_rank=4, frozen_in_bf16=True),
}


# --------------------------------------------------------------------------------------------------
# What runs in the other process

def run_on(device, checkpoint, out_dir, **changes):
    """A run on "cpu" or "pretend". Returns {tag: {step: value}}, and whether it was support/'s."""
    from pretend_gpu import PRETEND, pretend_gpu
    from transformers import PreTrainedModel
    find_checkpoint, save = starter.Run.find_checkpoint, PreTrainedModel.save_pretrained

    def find_on_device(run):  # after the settings were checked, before anything is loaded
        run.cfg.device = PRETEND
        find_checkpoint(run)

    def save_from_device(model, folder, state_dict):  # this is the work of transformers
        save(model, folder, state_dict={name: x.cpu() for name, x in state_dict.items()})

    with contextlib.ExitStack() as stack:
        if device == "pretend":
            for context in (mock.patch.object(starter.Run, "find_checkpoint", find_on_device),
                            mock.patch.object(PreTrainedModel, "save_pretrained", save_from_device),
                            pretend_gpu()):
                stack.enter_context(context)
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        result = starter.main(**settings(checkpoint, out_dir, **SHORT | changes))
    log = {tag: values for tag, values in scalars(result["run_folder"]).items()
           if not tag.startswith(("time/", "mem/")) and not tag.endswith("tokens_per_s")}
    return log, "token_statistics" in starter.MECHANICS


def run_all_variants(folder, names):
    """Returns {variant: [what run_on returns on the CPU, the same on the other device]}."""
    checkpoint = save_checkpoint(Path(folder) / "model")
    variants = VARIANTS | WITH_SUPPORT
    return {name: [run_on(device, checkpoint, Path(folder) / device / name, **variants[name])
                   for device in ("cpu", "pretend")] for name in names}


def run_and_resume(folder):
    """Returns what a run logs on the device, whole and after its first step's checkpoint."""
    checkpoint = save_checkpoint(Path(folder) / "model")
    whole = run_on("pretend", checkpoint, Path(folder) / "runs", save_every=1, **KL)
    run, = (Path(folder) / "runs").iterdir()
    for path in sorted(run.glob("checkpoint_*.pt"))[1:]:
        path.unlink()
    return [whole[0], run_on("pretend", checkpoint, Path(folder) / "runs", save_every=1,
                             resume=str(run), **KL)[0]]


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


# --------------------------------------------------------------------------------------------------
# The tests

def test_the_device_refuses_what_a_gpu_refuses(tmp_path):
    refused, sums, picked, dtypes = in_new_process("test_other_device", "refusals", tmp_path,
                                                   REPOSITORY)
    assert "not all tensors are on pretend:0" in refused and "[(3,)]" in refused
    assert sums == [1, 2, 3] and picked == [2, 0]  # a number, and places, may be on the CPU
    assert dtypes == ["torch.bfloat16", "torch.float32", "torch.float32"]


@pytest.fixture(scope="module", params=["with support/", "alone"])
def runs(request, tmp_path_factory):
    """-> whether support/ was there, {variant: runs on both devices}."""
    folder = tmp_path_factory.mktemp("devices")
    if request.param == "with support/":
        pytest.importorskip("peft")
        names = [*VARIANTS, *WITH_SUPPORT]
        return True, in_new_process("test_other_device", "run_all_variants", folder, REPOSITORY,
                                    str(folder), names)
    alone = tmp_path_factory.mktemp("alone")
    shutil.copy(starter.__file__, alone)
    return False, in_new_process("test_other_device", "run_all_variants", folder, alone,
                                 str(folder), [*VARIANTS])


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*VARIANTS, *WITH_SUPPORT])
def test_a_run_on_another_device_logs_the_numbers_of_the_cpu(runs, variant):
    has_support, outcomes = runs
    if variant not in outcomes:
        return  # lora_rank and frozen_in_bf16 need support/
    (on_cpu, fast_on_cpu), (elsewhere, fast_elsewhere) = outcomes[variant]
    assert fast_on_cpu == fast_elsewhere == has_support
    assert on_cpu.keys() == elsewhere.keys()
    for tag in on_cpu:
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
def test_a_run_on_another_device_is_resumed_to_the_same_bits(tmp_path):
    whole, resumed = in_new_process("test_other_device", "run_and_resume", tmp_path, REPOSITORY,
                                    str(tmp_path))
    assert whole == resumed and whole["train/kl_penalty"]["2"] > 0
