"""Tests of what a GPU would be told. None is there: torch.cuda and vLLM are stood in for, and what
they are called with is compared with what docs/several_gpus.md says."""
import inspect
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import save_checkpoint

import starter


def test_vllm_starts_on_the_gpu_of_its_process_with_a_float32_head(monkeypatch):
    given = {}
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(
        LLM=lambda model, **settings: given.update(settings)))
    monkeypatch.setattr(starter, "VLLM_IS_CPU", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    starter.init_vllm("model", 0, 64, 0.2, bf16=True)
    assert given["device_ids"] == [3]  # without it every process under torchrun gets GPU 0
    assert given["hf_overrides"] == {"head_dtype": "float32"}  # else logits of 16 round by 0.06
    assert given["gpu_memory_utilization"] == 0.2 and given["dtype"] == "bfloat16"
    starter.init_vllm("model", 0, 64, 0.2, bf16=False)
    assert given["hf_overrides"] == {} and given["dtype"] == "float32"


@pytest.mark.slow
@pytest.mark.skipif(not starter.importlib.util.find_spec("vllm"), reason="vLLM is not installed")
def test_vllm_knows_what_it_is_told_on_a_gpu(monkeypatch):
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    given = {}
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(
        LLM=lambda model, **settings: given.update(settings)))
    monkeypatch.setattr(starter, "VLLM_IS_CPU", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    starter.init_vllm("model", 0, 64, 0.2, bf16=True)
    known = {*inspect.signature(EngineArgs).parameters, *inspect.signature(LLM).parameters}
    assert given.keys() <= known


def test_device_with_a_number_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in ("cuda", "cuda:1"):
        cfg = SimpleNamespace(device=device, bf16="auto", engine="transformers")
        assert starter.choose_hardware(cfg).startswith("device: a card | bf16")
    assert chosen == [torch.device("cuda:1")]


def test_phases_are_timed_when_the_gpu_has_done_its_work(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(True))
    with starter.timed(starter.defaultdict(float), "rollout"):
        assert len(waits) == 1
    assert len(waits) == 2


def test_float32_on_a_gpu_has_the_limit_of_tf32():
    assert starter.FLOAT32_LIMIT["cpu"] == 1e-3 and starter.FLOAT32_LIMIT["cuda"] == 1e-2


def test_rows_decoded_together_fit_into_the_bytes_of_the_cache():
    from transformers import Qwen3Config
    config = Qwen3Config(num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                         head_dim=128, hidden_size=2048)
    policy = SimpleNamespace(config=config)
    of_row = 2 * 28 * 8 * 128 * 406 * 4  # keys and values, float32, by hand
    n = starter.rows_at_once(policy, 406)
    assert n * of_row <= starter.CACHE_BYTES < (n + 1) * of_row and n < starter.ROWS_AT_ONCE
    assert starter.rows_at_once(policy, 1) == starter.ROWS_AT_ONCE
    assert starter.rows_at_once(policy, 10**9) == 1


@pytest.mark.parametrize("budget", [1, 10**9])
def test_cut_by_the_bytes_of_the_cache_changes_no_token(tmp_path, monkeypatch, budget):
    policy, _ = starter.init_policy(save_checkpoint(tmp_path / "model"), "cpu")
    sampling = starter.Sampling(3, 5, 1.0, 0, (1,))
    whole = starter.rollout_with_transformers(policy, [[3, 4], [5, 6]], sampling)
    monkeypatch.setattr(starter, "CACHE_BYTES", budget)
    cut = starter.rollout_with_transformers(policy, [[3, 4], [5, 6]], sampling)
    assert [r.response_ids for r in cut] == [r.response_ids for r in whole]


def test_ranks_wait_an_hour_for_one_another(monkeypatch):
    ranks = pytest.importorskip("support.ranks")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with mock.patch.object(torch.cuda, "set_device") as set_device, \
            mock.patch.object(ranks.dist, "init_process_group") as joined, \
            mock.patch.object(ranks.dist, "get_rank", return_value=0), \
            mock.patch.object(ranks.dist, "get_world_size", return_value=2):
        ranks.find()
    set_device.assert_called_once_with(1)
    assert joined.call_args.args == ("nccl",)
    assert joined.call_args.kwargs["timeout"].total_seconds() == 3600
