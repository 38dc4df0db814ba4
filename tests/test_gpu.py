"""What starter.py decides and tells vLLM on a GPU. None is there: torch.cuda and vLLM are stood in
for."""
import inspect
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import starter


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs, and vLLM. Returns what its engine was given, and the GPUs that became current."""
    told = SimpleNamespace(settings={}, current=[0])
    vllm = SimpleNamespace(LLM=lambda model, **settings: told.settings.update(settings))
    vllm.__spec__ = object()
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device",
                        lambda device: told.current.append(torch.device(device).index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: told.current[-1])
    monkeypatch.setattr(starter.Float32Head, "rounds", False)
    return told


def test_a_gpu_gets_the_large_preset_bf16_and_vllm(gpus):
    cfg = starter.cfg_with(preset="auto", device="auto", bf16="auto")
    assert (cfg.device.type, cfg.bf16, cfg.engine) == ("cuda", True, "vllm")
    assert starter.Float32Head.rounds  # as vLLM does
    assert cfg.model_id == starter.PRESETS["qwen3-1.7b"]["model_id"]
    assert starter.choose(cfg).endswith("engine: vllm, which draws the tokens itself")


@pytest.mark.parametrize("bf16", [True, False])
def test_vllm_starts_on_the_gpu_of_the_policy_with_a_float32_head(gpus, bf16):
    cfg = starter.cfg_with(device="cuda:3", bf16=bf16)
    starter.init_vllm.__wrapped__("model", cfg.seed, 64, cfg.gpu_mem_util, cfg.bf16)
    given = gpus.settings
    assert given["device_ids"] == [3]
    assert given["gpu_memory_utilization"] == cfg.gpu_mem_util
    assert given["kv_cache_memory_bytes"] is None and given["max_num_batched_tokens"] == 8192
    if bf16:  # else logits of 16 would round by 0.06
        assert given["hf_overrides"] == {"head_dtype": "float32"} and given["dtype"] == "bfloat16"
    else:
        assert given["hf_overrides"] == {} and given["dtype"] == "float32"


@pytest.mark.parametrize("bf16, rounds", [(False, True), (True, False), (True, True)])
def test_head_rounds_its_inputs_as_vllm_does_where_that_samples_in_bf16(monkeypatch, bf16, rounds):
    monkeypatch.setattr(starter.Float32Head, "rounds", rounds)
    torch.manual_seed(0)
    head = starter.Float32Head(64, 8, bias=False)
    hidden = torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = head(hidden)
    logits.sum().backward()
    inputs = [hidden.double(), head.weight.detach().double()]
    if bf16 and rounds:
        inputs = [x.bfloat16().double() for x in inputs]
    torch.testing.assert_close(logits.double(), inputs[0] @ inputs[1].T, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(head.weight.grad.double(), inputs[0].sum(0).expand(8, 64), rtol=4e-3,
                               atol=4e-3)


def test_cache_of_vllm_can_be_given_in_gb(gpus):
    starter.init_vllm.__wrapped__("model", 0, 64, 2.5, True)
    assert gpus.settings["kv_cache_memory_bytes"] == 2_500_000_000
    assert gpus.settings["gpu_memory_utilization"] < 0.1  # which vLLM wants to find free


@pytest.mark.slow
@pytest.mark.skipif(not starter.importlib.util.find_spec("vllm"), reason="vLLM is not installed")
def test_vllm_knows_what_it_is_told_on_a_gpu():
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    with mock.patch("vllm.LLM") as llm:
        starter.init_vllm.__wrapped__("model", 0, 64, 0.2, True)
    known = {*inspect.signature(EngineArgs).parameters, *inspect.signature(LLM).parameters}
    assert llm.call_args.kwargs.keys() <= known


def test_every_tensor_of_a_step_is_on_the_policys_device():
    """On the device "meta" tensors have no numbers, and torch refuses to mix them with others."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    with torch.device("meta"):
        policy = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2))
    responses = [starter.Response([1, 2], [3] * n, [-1.0] * n, True) for n in (1, 4)]
    for advantages in (torch.ones(2), torch.ones(2, 4)):
        batch = starter.make_batch(responses, advantages, policy.device)
        assert {tensor.device.type for tensor in batch.values()} == {"meta"}
    cfg = starter.cfg_with(max_new_tokens=4)
    uniform = torch.zeros(2, 1, device="meta")
    decoder = starter.decode.__wrapped__(policy, [[1, 2], [1, 2]], cfg)
    for tokens in (None, *2 * [torch.zeros(2, 1, dtype=torch.long, device="meta")]):
        with torch.no_grad():
            drawn = starter.draw_tokens(decoder.send(tokens), uniform, 1.0)
        assert {x.device.type for x in drawn} == {"meta"}
