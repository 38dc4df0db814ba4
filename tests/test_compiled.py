"""What a GPU runs in the place of the plain functions, here on a CPU: compiled layers and
statistics, larger microbatches, and the share of the card's peak."""

import shutil

import pytest

import starter
from support import edits, engines, fast, gpu, memory

import torch
from conftest import make_responses, make_step

H100 = "NVIDIA H100 80GB HBM3"


def gradients(policy, batch, cfg):
    starter.grpo_microbatch_step(policy, dict(batch), cfg)
    parts = [p.grad.flatten() for p in policy.parameters()]
    policy.zero_grad()
    return torch.cat(parts)


@pytest.mark.parametrize("precision, error", [("bf16", 5e-3), ("fp16", 6e-4)])
def test_rounding_head_is_the_float32_head_of_rounded_inputs(precision, error):
    torch.manual_seed(0)
    head = torch.nn.Linear(40, 90, bias=False)
    hidden = torch.randn(2, 7, 40, requires_grad=True)
    dtype = starter.DTYPES[precision]
    by_hand = hidden.detach().to(dtype).double() @ head.weight.detach().to(dtype).double().T
    direction = torch.randn(2, 7, 90)
    plain = head(hidden)
    exact = torch.autograd.grad((plain * direction).sum(), (hidden, head.weight))
    head.__class__ = engines.RoundingHead
    assert torch.equal(head(hidden), plain)
    with starter.autocast(torch.device("cpu"), precision):
        logits = head(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), by_hand, rtol=0, atol=1e-5)
    ours = torch.autograd.grad((logits * direction).sum(), (hidden, head.weight))
    for a, b in zip(ours, exact):
        assert a.dtype == torch.float32 and 1e-5 < (a - b).norm() / b.norm() < error
    with torch.no_grad():
        head.weight.mul_(2)  # a new value is rounded anew
    with starter.autocast(torch.device("cpu"), precision):
        torch.testing.assert_close(head(hidden), 2 * logits)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_update_is_as_near_to_float32_as_the_plain_one(checkpoint):
    policy, _ = starter.init_policy(checkpoint, "cpu")
    responses = make_responses((9, 12, 5, 12), vocabulary=30)
    batch = make_step(responses)
    exact, plain = (
        gradients(policy, batch, starter.cfg_with(precision=p)) for p in ("float32", "bf16")
    )
    edits.replace(token_statistics=fast.token_statistics)
    names = [name for name, _ in policy.named_parameters()]
    gpu.compile_layers(policy)
    gpu.compile_statistics()
    assert [name for name, _ in policy.named_parameters()] == names
    cfg = starter.cfg_with(precision="float32")
    torch.testing.assert_close(gradients(policy, batch, cfg), exact, rtol=0, atol=1e-5)
    ours = gradients(policy, batch, starter.cfg_with(precision="bf16"))
    assert 0 < (ours - exact).norm() < 1.5 * (plain - exact).norm()


def settings(**changes):
    changes = dict(precision="bf16", engine="vllm", device=torch.device("cuda")) | changes
    cfg = starter.cfg_with(preset="qwen3-1.7b", **changes)
    starter.apply_preset(cfg)
    return cfg


@pytest.fixture
def card(monkeypatch):
    """An H100 of which the policy has 7 GB and 60 GB are left for the trainer."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7e9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H100)
    monkeypatch.setattr(memory, "free_gb", lambda cfg: 60.0)


@pytest.mark.parametrize(
    "given, largest, expected", [(None, 66, 8_192), (None, 90, 4_096), (2_000, 66, 2_000)]
)
def test_microbatches_double_where_they_fit(card, monkeypatch, given, largest, expected):
    monkeypatch.setattr(memory, "predicted_gb", lambda config, cfg, n: largest * n / 8_192 + 10)
    cfg = settings(max_tokens_per_microbatch=given)
    gpu.enlarge_microbatches(None, cfg)
    assert cfg.max_tokens_per_microbatch == expected


@pytest.mark.parametrize(
    "changes",
    [
        dict(precision="fp16"),
        dict(lora_rank=8),
        dict(engine="transformers"),
        dict(gradient_checkpointing=True),
    ],
)
def test_nothing_is_compiled_that_no_card_has_shown(card, monkeypatch, changes):
    monkeypatch.setattr(gpu, "LARGE", 0)
    policy = torch.nn.Linear(2, 3)
    problems = starter.Problems([{"prompt_ids": [1, 2]}, {"prompt_ids": [1]}], [])
    edits.replace(token_statistics=fast.token_statistics)
    gpu.attach(policy, None, problems, settings(**changes))  # a Linear has no layers to compile
    with pytest.raises(AttributeError, match="base_model"):
        gpu.attach(policy, None, problems, settings())


def test_share_of_the_peak_by_hand(card, monkeypatch):
    monkeypatch.setattr(gpu, "RUN", {"parameters": 1e9, "prompt_length": 100.0})
    metrics = {"response_length": 150.0, "time/total": 5.0, "time/rollout": 3.0}
    cfg = settings(rollout_batch_size=100)
    by_hand = 6 * 1e9 * 100 * 250 / 2 / 989e12
    assert gpu.share_of_peak(metrics, cfg) == {"share_of_peak": pytest.approx(by_hand)}
    cfg.use_kl_penalty = True
    assert gpu.share_of_peak(metrics, cfg)["share_of_peak"] == pytest.approx(by_hand * 8 / 6)
