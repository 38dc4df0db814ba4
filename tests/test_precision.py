"""precision: which one a machine gets, and float16 with its loss scale."""

import functools
import math
from unittest import mock

import pytest

import starter
from support import memory, presets

import torch
import transformers
from conftest import scalars, settings


def run(checkpoint, folder, **changes):
    return starter.main(**settings(checkpoint, folder, precision="fp16", **changes))


def scaler_from(scale):
    """Has runs begin with this loss scale. A large one overflows, as float16 ends at 65,504."""
    made = functools.partial(torch.amp.GradScaler, init_scale=scale)
    return mock.patch.object(torch.amp, "GradScaler", made)


def weights_of(folder, step):
    saved = torch.load(folder / f"checkpoint_{step:08d}.pt", weights_only=True)
    return saved["model"], saved["state"]["scaler"]["scale"]


@pytest.mark.parametrize("alone", [False, True])
def test_step_that_overflows_is_skipped_and_said_and_does_not_stop_a_run(
    checkpoint, tmp_path, capsys, alone, monkeypatch
):
    if alone:
        monkeypatch.setattr(starter, "find_support", lambda: None)
    with scaler_from(2.0**24):
        result = run(checkpoint, tmp_path, n_train_steps=12, warmup_steps=0)
    norms = scalars(result["run_folder"])["train/grad_norm"]
    n_skipped = sum(not math.isfinite(norm) for norm in norms.values())
    assert n_skipped >= 5 and capsys.readouterr().out.count("is skipped") == n_skipped
    after, scale = weights_of(result["run_folder"], 12)
    assert scale == 2.0 ** (24 - n_skipped)
    start, _ = starter.init_policy(checkpoint, "cpu")
    moved = [not torch.equal(x, after[name]) for name, x in start.state_dict().items()]
    assert any(moved)


def test_norm_and_step_are_those_of_the_unscaled_gradient(checkpoint, tmp_path):
    norms = {}
    for precision, scale in (("float32", 1.0), ("fp16", 2.0**4), ("fp16", 2.0**14)):
        with scaler_from(scale):
            given = settings(checkpoint, tmp_path, precision=precision, n_train_steps=1)
            logged = scalars(starter.main(**given)["run_folder"])
        norms[precision, scale] = logged["train/grad_norm"][1]
    exact = norms.pop(("float32", 1.0))
    assert list(norms.values()) == pytest.approx([exact, exact], rel=0.01)


def test_run_in_fp16_that_is_resumed_ends_with_the_same_bits(checkpoint, tmp_path):
    """The loss scale falls in step 1 and 2: a resumed run must not begin with the first one."""
    with scaler_from(2.0**24):
        whole = run(checkpoint, tmp_path / "whole", n_train_steps=4)
        part = run(checkpoint, tmp_path / "parts", n_train_steps=2)
        resumed = run(
            checkpoint, tmp_path / "parts", n_train_steps=4, resume=str(part["run_folder"])
        )
    expected, ours = (weights_of(result["run_folder"], 4) for result in (whole, resumed))
    assert ours[1] == expected[1] < 2.0**24
    for name, tensor in expected[0].items():
        assert torch.equal(ours[0][name], tensor), name


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


# Cards of 8 to 141 GB: name, GB, compute capability, KL penalty -> model, LoRA, precision
CARDS = [
    ("RTX 2080", 8, (7, 5), "SmolLM2-135M-Instruct", 16, "fp16"),
    ("RTX 3060", 12, (8, 6), "SmolLM2-135M-Instruct", 16, "bf16"),
    ("T4", 15, (7, 5), "Qwen3-0.6B", 16, "fp16"),
    ("V100", 16, (7, 0), "Qwen3-0.6B", 16, "fp16"),
    ("RTX 4090", 24, (8, 9), "Qwen3-1.7B", 16, "bf16"),
    ("A100 of 40 GB", 40, (8, 0), "Qwen3-1.7B", 16, "bf16"),
    ("L40S", 48, (8, 9), "Qwen3-1.7B", 16, "bf16"),
    ("H100", 80, (9, 0), "Qwen3-1.7B", 0, "bf16"),
    ("RTX PRO 6000", 96, (12, 0), "Qwen3-1.7B", 0, "bf16"),
    ("H200", 141, (9, 0), "Qwen3-1.7B", 0, "bf16"),
]
SHAPES = {  # layers, hidden, MLP, heads, of keys and values, of a head, vocabulary
    "SmolLM2-135M-Instruct": (30, 576, 1536, 9, 3, 64, 49_152),
    "Qwen3-0.6B": (28, 1024, 3072, 16, 8, 128, 151_936),
    "Qwen3-1.7B": (28, 2048, 6144, 16, 8, 128, 151_936),
}
NAMES = (
    "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads "
    "head_dim vocab_size".split()
)


@pytest.mark.parametrize("use_kl_penalty", [False, True])
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
@pytest.mark.parametrize("card, gb, capability, model, lora_rank, precision", CARDS)
def test_card_gets_what_fits_by_the_formula(
    card, gb, capability, model, lora_rank, precision, engine, use_kl_penalty, monkeypatch, capsys
):
    total = int(gb * 1e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(0.98 * total), total))
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or capability >= (8, 0),
    )
    cfg = starter.cfg_with(engine=engine, use_kl_penalty=use_kl_penalty)
    presets.choose(cfg)
    starter.apply_preset(cfg)
    starter.choose_device(cfg)
    if gb == 80 and use_kl_penalty:
        lora_rank = 16  # a reference of its own would not fit
    assert (cfg.model_id.split("/")[1], cfg.lora_rank, cfg.precision) == (
        model,
        lora_rank,
        precision,
    )
    assert f"{card}, {0.98 * gb:.0f} GB free: preset" in capsys.readouterr().out
    shape = dict(zip(NAMES, SHAPES[model]), tie_word_embeddings=True)
    config = transformers.Qwen3Config(**shape)
    needed = memory.predicted_gb(config, cfg, cfg.max_tokens_per_microbatch)
    assert needed <= memory.free_gb(cfg)
