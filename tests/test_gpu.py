"""What starter.py decides and tells vLLM on a GPU, and rehearsals of lab/gpu.py. None is there:
torch.cuda and vLLM are stood in for."""

import contextlib
import inspect
import os
import sys
from unittest import mock

import pytest
import torch
from conftest import needs_vllm
from transformers import Qwen3ForCausalLM

import starter
from lab import bench, gpu
from support import edits, engines, ranks


@pytest.fixture
def llm(monkeypatch):
    """The class vllm.LLM, beside four GPUs of which the last is current."""
    vllm = mock.Mock(__spec__=object())
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(engines, "ON_CPU", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", mock.Mock())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    return vllm.LLM


@pytest.mark.parametrize(
    "changes, chosen",
    [
        ({}, ("cuda", "bf16", "vllm")),
        (dict(device="cpu", precision="float32"), ("cpu", "float32", "transformers")),
    ],
)
def test_a_gpu_gets_bf16_and_vllm(llm, changes, chosen):
    cfg = starter.cfg_with(**changes)
    starter.choose_device(cfg)
    assert (cfg.device.type, cfg.precision, cfg.engine) == chosen


def test_a_gpu_that_is_named_is_the_current_one_which_vllm_takes(llm):
    starter.choose_device(starter.cfg_with(device="cuda:1"))
    torch.cuda.set_device.assert_called_once_with(torch.device("cuda:1"))


@pytest.mark.parametrize("init_vllm", [starter.init_vllm, engines.init_vllm])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "float32"])
def test_vllm_gets_the_precision_of_the_policy_and_a_float32_head(llm, init_vllm, precision):
    init_vllm("model", 0, 64, 0.2, precision)
    options = llm.call_args.kwargs
    assert options["gpu_memory_utilization"] == 0.2
    assert options["dtype"] == starter.DTYPES[precision]
    # Else logits of 16 would round by 0.06
    assert options["hf_overrides"] == {"head_dtype": "float32"}
    assert options["logprobs_mode"] == "processed_logprobs"  # at the temperature, as ours
    assert options.get("max_num_seqs", 256) >= 256  # a rollout's responses, at once


def test_vllm_gets_the_current_gpu_and_with_support_gigabytes_for_its_cache(llm):
    engines.init_vllm("model", 0, 128, 12, "bf16")
    options = llm.call_args.kwargs
    assert options["device_ids"] == [3]
    assert options["gpu_memory_utilization"] == 0.05
    assert options["kv_cache_memory_bytes"] == 12 * 10**9


def test_each_process_takes_the_gpu_of_its_rank(llm, monkeypatch):
    current = mock.Mock()
    monkeypatch.setattr(torch.cuda, "set_device", current)
    monkeypatch.setattr(ranks, "WORLD", 2)
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    cfg = starter.cfg_with()
    ranks.connect(cfg)
    current.assert_called_once_with("cuda:1")
    assert cfg.device == "cuda:1"


def test_processes_that_share_an_engine_start_it_together_each_with_a_cache_of_its_own(
    llm, monkeypatch
):
    monkeypatch.setattr(ranks, "WORLD", 4)
    monkeypatch.setattr(ranks, "RANK", 3)
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    engines.attach(starter.cfg_with(engine="vllm", vllm_tp=2, device=torch.device("cuda")))
    assert os.environ.pop("VLLM_CACHE_ROOT").endswith("process_3")
    starter.init_vllm("model", 0, 128, 0.2, "bf16")
    options = llm.call_args.kwargs
    assert options["tensor_parallel_size"] == 2 and "device_ids" not in options
    assert options["distributed_executor_backend"] == "external_launcher"


@pytest.mark.parametrize(
    "n_processes, vllm_tp, is_refused", [(4, 4, False), (4, 3, True), (1, 2, True)]
)
def test_processes_must_be_a_multiple_of_those_that_share_an_engine(
    monkeypatch, n_processes, vllm_tp, is_refused
):
    monkeypatch.setattr(ranks, "WORLD", n_processes)
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    refused = pytest.raises(starter.InputError, match=f"this is one of {n_processes}; type")
    with refused if is_refused else contextlib.nullcontext():
        ranks.connect(starter.cfg_with(device="cpu", vllm_tp=vllm_tp))


def test_engine_that_does_not_start_says_how_to_go_on(llm):
    llm.side_effect = ValueError("no kernels for this card")
    with pytest.raises(starter.RunStopped, match="no kernels .* --engine transformers"):
        engines.init_vllm("model", 0, 128, 0.2, "fp16")


def test_rollout_refuses_an_engine_that_keeps_its_prefix_cache_or_would_cut_responses(llm):
    llm.reset_prefix_cache.return_value = False
    llm.llm_engine.model_config.max_model_len = 5
    cfg = starter.cfg_with(stop_token_ids=[2], max_new_tokens=4)
    with pytest.raises(starter.RunStopped, match="started for 5 tokens .* 6 "):
        starter.rollout_with_vllm(llm, starter.requests_for([[1, 2], [1]], cfg, 0, 1), cfg)
    with pytest.raises(starter.RunStopped, match="kept its prefix cache"):
        starter.forget_prompts(llm)


@needs_vllm
def test_vllm_knows_what_it_is_told_on_a_gpu():
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    with mock.patch("vllm.LLM") as llm:
        edits.OWN["init_vllm"]("model", 0, 64, 0.2, "bf16")
    known = {*inspect.signature(EngineArgs).parameters, *inspect.signature(LLM).parameters}
    assert llm.call_args.kwargs.keys() <= known


def test_every_tensor_of_a_step_is_on_the_policys_device():
    """On the device "meta" tensors have no numbers, and torch refuses to mix them with others."""
    with torch.device("meta"):
        policy = Qwen3ForCausalLM(bench.config_of("small"))
    responses = [starter.Response([1, 2], [3] * n, [-1.0] * n, True) for n in (1, 4)]
    batch = starter.make_batch(responses, torch.ones(2), policy.device)
    assert {tensor.device.type for tensor in batch.values()} == {"meta"}
    next_logits = starter.start_decoding(policy, [[1, 2], [3], [4, 5]])
    tokens = None
    for _ in range(3):
        logits = next_logits(tokens)
        tokens, log_probs = starter.draw_tokens(logits, torch.zeros(3, 1, device="meta"), 1.0)
        assert log_probs.device.type == "meta"


@needs_vllm
@pytest.mark.parametrize("name", ["1+2+3", "sync, untied", "SmolLM2 learns", "frozen"])
def test_row_of_a_gpu_is_rehearsed(name, tmp_path):
    command = [sys.executable, "-m", "lab.gpu", "--row", name, str(tmp_path), "--rehearse"]
    columns = gpu.columns_of(command, 600)
    assert columns["error"] == ""
    assert columns.get("diff_after", 0.0) < 0.05 < columns.get("diff_stale", 1.0)
    assert columns.get("found", 2) == 2  # in the step after the first update
