"""What starter.py decides and tells vLLM on a GPU. None is there: torch.cuda and vLLM are stood in
for."""

import importlib.util
import inspect
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import starter
from support import edits, engines


@pytest.fixture
def llm(monkeypatch):
    """The class vllm.LLM, beside four GPUs of which the last is current."""
    vllm = SimpleNamespace(LLM=mock.Mock(), __spec__=object())
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(engines, "ON_CPU", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    return vllm.LLM


def test_a_gpu_gets_bf16_and_vllm(llm):
    cfg = starter.cfg_with()
    starter.choose_device(cfg)
    assert (cfg.device.type, cfg.precision, cfg.engine) == ("cuda", "bf16", "vllm")
    cfg = starter.cfg_with(device="cpu", precision="float32")
    starter.choose_device(cfg)
    assert (cfg.device.type, cfg.precision, cfg.engine) == ("cpu", "float32", "transformers")


@pytest.mark.parametrize("init_vllm", [starter.init_vllm, engines.init_vllm])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "float32"])
def test_vllm_gets_the_precision_of_the_policy_and_a_float32_head(llm, init_vllm, precision):
    init_vllm("model", 0, 64, 0.2, precision)
    options = llm.call_args.kwargs
    assert options["gpu_memory_utilization"] == 0.2
    assert options["dtype"] == starter.DTYPES[precision]
    # Else logits of 16 would round by 0.06
    assert options["hf_overrides"] == {"head_dtype": "float32"}


def test_vllm_starts_on_the_gpu_of_the_policy(llm):
    engines.attach()
    starter.init_vllm("model", 0, 64, 0.2, "bf16")
    assert llm.call_args.kwargs["device_ids"] == [3]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed")
def test_vllm_knows_what_it_is_told_on_a_gpu():
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    with mock.patch("vllm.LLM") as llm:
        edits.own("init_vllm")("model", 0, 64, 0.2, "bf16")
    known = {*inspect.signature(EngineArgs).parameters, *inspect.signature(LLM).parameters}
    assert llm.call_args.kwargs.keys() <= known


def test_every_tensor_of_a_step_is_on_the_policys_device():
    """On the device "meta" tensors have no numbers, and torch refuses to mix them with others."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    heads = dict(head_dim=8, num_attention_heads=4, num_key_value_heads=4)
    with torch.device("meta"):
        policy = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
    responses = [starter.Response([1, 2], [3] * n, [-1.0] * n, True) for n in (1, 4)]
    for advantages in (torch.ones(2), torch.ones(2, 4)):
        batch = starter.make_batch(responses, advantages, policy.device)
        assert {tensor.device.type for tensor in batch.values()} == {"meta"}
    ids = torch.ones(2, 2, dtype=torch.long, device="meta")
    cache = None
    for _ in range(3):
        logits, cache = starter.next_logits(policy, ids, cache)
        tokens, log_probs = starter.draw_tokens(logits, torch.zeros(2, 1, device="meta"), 1.0)
        ids = torch.cat([ids, tokens], dim=1)
        assert log_probs.device.type == "meta"
