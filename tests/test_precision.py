"""precision: which one a machine gets, and float16 with its loss scale."""

import functools
import math
import shutil
from unittest import mock

import pytest

import starter
from support import memory, presets, ranks

import torch
from conftest import scalars, settings
from lab import bench
from lab.crash_test import outcome


def run(checkpoint, folder, **changes):
    given = settings(checkpoint, folder, precision="fp16", warmup_steps=0, max_new_tokens=4)
    return starter.main(**given | changes)["run_folder"]


def scaler_from(scale):
    """Has runs begin with this loss scale. A large one overflows, as float16 ends at 65,504."""
    made = functools.partial(torch.amp.GradScaler, init_scale=scale)
    return mock.patch.object(torch.amp, "GradScaler", made)


@pytest.mark.slow
def test_steps_that_overflow_are_skipped_and_a_resumed_run_has_the_same_bits(
    checkpoint, tmp_path, monkeypatch
):
    """More of them in a row than other steps that are not finite, which stop a run. The loss scale
    falls at once: a resumed run must not begin with the first one."""
    monkeypatch.setattr(starter, "learning_rate_schedule", lambda *_: 1.0)  # of any length
    with scaler_from(2.0**23):
        folder = run(checkpoint, tmp_path / "whole/runs", n_train_steps=8)
        for n_train_steps, resume in ((6, None), (8, True)):
            run(checkpoint, tmp_path / "parts/runs", n_train_steps=n_train_steps, resume=resume)
    norms = scalars(folder)["train/grad_norm"].values()
    n_skipped = sum(not math.isfinite(norm) for norm in norms)
    assert 5 <= n_skipped < 8
    whole, parts = (outcome(tmp_path / name) for name in ("whole", "parts"))
    assert whole["state"]["scaler"]["scale"] == 2.0 ** (23 - n_skipped)
    assert (whole["state"].pop("n_steps"), parts["state"].pop("n_steps")) == (8, 6)
    for name in ("model", "optimizer", "state"):
        assert parts[name] == whole[name]


@pytest.mark.slow
def test_loss_scale_grows_back_within_a_run(checkpoint, tmp_path):
    """At a scale of 1 small gradients would be 0 for the rest of it."""
    with scaler_from(1.0):
        folder = run(checkpoint, tmp_path, n_train_steps=41, save_every=41)
    [saved] = folder.glob("checkpoint_*.pt")
    assert torch.load(saved, weights_only=True)["state"]["scaler"]["scale"] == 4.0


@pytest.mark.parametrize(
    "has_gpu, has_bf16, expected",
    [(True, True, "bf16"), (True, False, "fp16"), (False, True, "bf16"), (False, False, "float32")],
)
def test_auto_is_what_the_machine_multiplies_fast(monkeypatch, has_gpu, has_bf16, expected):
    """A GPU of compute capability 7.5 emulates bf16, which must not count."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or has_bf16,
    )
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_bf16})
    cfg = starter.cfg_with()
    starter.choose_device(cfg)
    assert cfg.precision == expected


def test_processes_choose_the_preset_of_the_card_with_the_least_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80e9, 80e9))
    monkeypatch.setattr(ranks, "gather", lambda items: [*items, 15.0])
    cfg = starter.cfg_with(device=torch.device("cuda"))
    presets.choose(cfg)
    assert cfg.preset == "qwen3-0.6b"


@pytest.mark.parametrize(
    "gb, use_kl_penalty, preset, lora_rank",
    [
        (8, True, "smollm2", 16),
        (12, True, "qwen3-0.6b", 16),
        (15, True, "qwen3-0.6b", 16),
        (24, False, "qwen3-1.7b", 16),
        (80, False, "qwen3-1.7b", 0),
        (76, True, "qwen3-1.7b", 16),  # a reference of its own would not fit
        (80, True, "qwen3-1.7b", 0),
    ],
)
def test_card_gets_what_fits_by_the_formula(gb, use_kl_penalty, preset, lora_rank, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0.98e9 * gb, 1e9 * gb))
    cfg = starter.cfg_with(engine="vllm", precision="bf16", use_kl_penalty=use_kl_penalty)
    cfg.device = torch.device("cuda")
    presets.choose(cfg)
    starter.apply_preset(cfg)
    assert (cfg.preset, cfg.lora_rank) == (preset, lora_rank)
    config = bench.config_of(cfg.model_id.split("/")[1].removesuffix("-Instruct"))
    needed = memory.predicted_gb(config, cfg, cfg.max_tokens_per_microbatch)
    assert needed <= memory.free_gb(cfg)
    # Keys and values of a step, in 16 bits, at the lengths that a card has shown
    of_token = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    if lora_rank and gb > 12:
        assert cfg.rollout_batch_size * 360 * of_token <= 1e9 * cfg.gpu_mem_util


@pytest.mark.slow
def test_run_begun_in_float32_goes_on_in_fp16_with_the_norm_of_the_unscaled_gradient(
    checkpoint, tmp_path
):
    """As where one machine has bf16 and the next one has not."""
    begun = run(checkpoint, tmp_path / "begun", precision="float32", n_train_steps=1)
    norms = []
    for precision in ("float32", "fp16"):
        folder = shutil.copytree(begun, tmp_path / precision / "run")
        given = dict(precision=precision, n_train_steps=2, resume=str(folder))
        with scaler_from(2.0**14):
            run(checkpoint, tmp_path, **given)
        norms.append(scalars(folder)["train/grad_norm"][2])
    assert norms[1] == pytest.approx(norms[0], rel=0.01)
    saved = torch.load(folder / "checkpoint_00000002.pt", weights_only=True)
    assert saved["state"]["scaler"]["scale"] == 2.0**14
