"""What a GPU runs in the place of the plain functions, here on a CPU: compiled layers and
statistics, larger microbatches, and the share of the card's peak."""

import copy
import shutil

import pytest

import starter
from support import edits, engines, fast, gpu

import torch
from conftest import gradient_of, make_responses, make_step


def gradients(policy, batch, precision):
    policy.zero_grad()
    starter.grpo_microbatch_step(policy, dict(batch), starter.cfg_with(precision=precision))
    return gradient_of(policy)


@pytest.mark.parametrize("precision, error", [("bf16", 5e-3), ("fp16", 6e-4)])
def test_rounding_head_is_the_float32_head_of_rounded_inputs(checkpoint, precision, error):
    """As vLLM's is. The reference is a copy of the policy."""
    engines.attach()
    policy, _ = starter.init_policy(checkpoint, "cpu")
    head = copy.deepcopy(policy).get_output_embeddings()
    torch.manual_seed(0)
    hidden = torch.randn(2, 7, 64, requires_grad=True)
    dtype = starter.DTYPES[precision]
    by_hand = hidden.detach().to(dtype).double() @ head.weight.detach().to(dtype).double().T
    direction = torch.randn(by_hand.shape)
    exact = torch.autograd.grad((hidden @ head.weight.T * direction).sum(), (hidden, head.weight))
    assert torch.equal(head(hidden), hidden @ head.weight.T)
    with starter.autocast(torch.device("cpu"), precision):
        logits = head(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), by_hand, rtol=0, atol=1e-5)
    ours = torch.autograd.grad((logits * direction).sum(), (hidden, head.weight))
    for a, b in zip(ours, exact):
        assert a.dtype == torch.float32 and 1e-5 < (a - b).norm() / b.norm() < error


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_update_is_as_near_to_float32_as_the_plain_one(checkpoint):
    policy, _ = starter.init_policy(checkpoint, "cpu")
    batch = make_step(make_responses((9, 12, 5, 12), vocabulary=30))
    exact = gradients(policy, batch, "float32")
    plain = gradients(policy, batch, "bf16")
    edits.replace(token_statistics=fast.token_statistics)
    names = [name for name, _ in policy.named_parameters()]
    gpu.compile_layers(policy)
    gpu.compile_statistics()
    assert [name for name, _ in policy.named_parameters()] == names
    torch.testing.assert_close(gradients(policy, batch, "float32"), exact, rtol=0, atol=1e-5)
    ours = gradients(policy, batch, "bf16")
    assert 0 < (ours - exact).norm() < 1.5 * (plain - exact).norm()


def settings(**changes):
    usual = dict(preset="qwen3-1.7b", precision="bf16", engine="vllm", device=torch.device("cuda"))
    cfg = starter.cfg_with(**usual | changes)
    starter.apply_preset(cfg)
    return cfg


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize("given, expected", [(None, 8_192), (2_000, 2_000)])
def test_microbatches_of_the_preset_double(given, expected):
    cfg = settings(max_tokens_per_microbatch=given)
    gpu.enlarge_microbatches(cfg)
    assert cfg.max_tokens_per_microbatch == expected


UNTRIED = dict(precision="fp16", lora_rank=8, engine="transformers", gradient_checkpointing=True)


@pytest.mark.parametrize("name", UNTRIED)
def test_nothing_is_compiled_that_no_card_has_shown(monkeypatch, name):
    monkeypatch.setattr(gpu, "LARGE", 0)
    edits.replace(token_statistics=fast.token_statistics)
    given = torch.nn.Linear(2, 3), None, starter.Problems([{"prompt_ids": [1]}], [])
    gpu.attach(*given, settings(**{name: UNTRIED[name]}))
    with pytest.raises(AttributeError, match="base_model"):  # a Linear has no layers to compile
        gpu.attach(*given, settings())


def test_share_of_the_peak_by_hand(card, monkeypatch):
    monkeypatch.setattr(gpu, "RUN", {"parameters": 1e9, "prompt_length": 100.0})
    metrics = {"response_length": 150.0, "time/total": 5.0, "time/rollout": 3.0}
    cfg = settings(rollout_batch_size=100)
    by_hand = 6 * 1e9 * 100 * 250 / 2 / 989e12
    assert gpu.share_of_peak(metrics, cfg) == {"share_of_peak": pytest.approx(by_hand)}
    cfg.use_kl_penalty = True
    assert gpu.share_of_peak(metrics, cfg)["share_of_peak"] == pytest.approx(by_hand * 8 / 6)
