"""What a run takes, the refusal of one that cannot fit, and steps for which memory runs out."""

import copy
import math
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import make_responses, make_step, save_checkpoint, settings
from lab import bench

import starter
from starter import InputError, RunStopped
from support import edits, lora, memory

# Parameters of Qwen3-1.7B by hand: 28 layers of q, k, v, o, three of the MLP, and norms
BODY = 28 * (2048 * (2 * 2048 + 2 * 1024 + 3 * 6144) + 2 * 2048 + 2 * 128) + 2048
EMBEDDING = 151_936 * 2048
ADAPTERS = 16 * 28 * (2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144))


@pytest.fixture(scope="module")
def qwen():
    return bench.qwen3_config(**bench.QWEN3["Qwen3-1.7B"])


def cfg_of(**changes):
    usual = dict(precision="bf16", engine="transformers", use_kl_penalty=True, max_new_tokens=256)
    return starter.cfg_with(**{"device": torch.device("cuda"), **usual, **changes})


def test_what_is_in_memory_is_counted_by_hand(qwen):
    def check(n_tokens=4096, ranks=1, by_hand=(), **changes):
        sizes = memory.predicted_gb(qwen, cfg_of(**changes), n_tokens, ranks)
        for name, size in dict(by_hand).items():
            assert sizes[name] * 1e9 == pytest.approx(size), name
        return sizes

    n = BODY + EMBEDDING
    of_model = {"weights": 4 * n, "gradients": 4 * n, "moments": 8 * n, "reference": 4 * n}
    sizes = check(by_hand=of_model)
    twice = {"activations": 2e9 * sizes["activations"]}
    check(8192, 2, {**{name: size / 2 for name, size in of_model.items()}, **twice})
    rounded = 2 + 4  # bytes of each weight of the head: in bf16, and in float32 again
    head = 1e9 * sizes["head"] + rounded * EMBEDDING
    check(engine="vllm", gpu_mem_util=4, by_hand={"head": head, "vLLM": 2 * n})
    many = check(64, 1000, gradient_checkpointing=True)
    assert sum(many.values()) == pytest.approx(8 * n / 1e9)  # policy and reference, while loading
    assert "reference" not in check(use_kl_penalty=False)
    learning = {"adapters": 4 * ADAPTERS, "gradients": 4 * ADAPTERS, "moments": 8 * ADAPTERS}
    frozen = {"weights": 2 * BODY + 4 * EMBEDDING}
    check(lora_rank=16, frozen_in_bf16=True, by_hand={**learning, **frozen})


@pytest.mark.parametrize(
    "changes, free, remedy",
    [
        (dict(), 24.0, "lora_rank = 16,"),
        (dict(), 36.0, "use_kl_penalty = False,"),
        (dict(), 7.0, "lora_rank = 16 and gradient_checkpointing = True and frozen_in_bf16 = True"),
        (dict(), 2.0, "more memory"),
        (dict(use_kl_penalty=False), 36.0, None),
    ],
)
def test_run_that_cannot_fit_is_refused_with_what_would_fit(
    qwen, tmp_path, monkeypatch, changes, free, remedy
):
    monkeypatch.setattr(memory, "free_gb", lambda cfg: free)
    cfg = cfg_of(model_id=str(tmp_path), **changes)
    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    memory.check_fits(cfg)  # what cannot be counted is not refused
    qwen.save_pretrained(tmp_path)
    if remedy is None:
        memory.check_fits(cfg)
        return
    with pytest.raises(InputError, match=f"about 4\\d.* GB .*; {free} GB are free; use {remedy}"):
        memory.check_fits(cfg)


def test_free_memory_of_a_gpu_is_less_what_vllm_takes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20e9, 24e9))
    assert memory.free_gb(cfg_of(engine="vllm", gpu_mem_util=0.25)) == 14.0
    assert memory.free_gb(cfg_of(engine="vllm", gpu_mem_util=4)) == 16.0
    assert memory.free_gb(cfg_of()) == 20.0
    assert 0 < memory.free_gb(cfg_of(device=torch.device("cpu"))) < 1e5


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_what_does_not_learn_gives_the_same_bits_from_bf16(tmp_path, lora_rank):
    policy, _ = starter.init_policy(save_checkpoint(tmp_path / "model"), "cpu")
    cfg = starter.cfg_with(lora_rank=lora_rank, use_kl_penalty=True, precision="bf16")
    model = copy.deepcopy(policy).requires_grad_(False)
    if lora_rank:
        pytest.importorskip("peft")
        lora.add_adapters(policy, cfg)
        model = policy
    ids = torch.arange(20)[None] % 9
    before = starter.get_response_log_probs(model, ids, ids, ids >= 0, precision="bf16")
    memory.store_frozen_in_bf16(policy, model, cfg)
    after = starter.get_response_log_probs(model, ids, ids, ids >= 0, precision="bf16")
    assert torch.equal(after, before)
    for name, parameter in model.named_parameters():
        is_stored = "proj" in name and not parameter.requires_grad
        assert parameter.dtype == (torch.bfloat16 if is_stored else torch.float32), name


def test_model_whose_bits_would_change_is_refused(checkpoint):
    policy, _ = starter.init_policy(checkpoint, "cpu")
    model = copy.deepcopy(policy).requires_grad_(False)
    layer = model.model.layers[0].mlp.down_proj
    layer.forward = lambda x: (x.float()[..., None, :] * layer.weight.float()).sum(dim=-1)
    with pytest.raises(InputError, match="frozen_in_bf16 = True changes the log-probs of Qwen3For"):
        memory.store_frozen_in_bf16(policy, model, starter.cfg_with(precision="bf16"))


CUDA = "CUDA out of memory. Tried to allocate 20.00 MiB."


@pytest.fixture
def device(monkeypatch):
    """A device on which microbatches of more than n_tokens fail after some gradients were added."""
    device = SimpleNamespace(n_tokens=math.inf, message=CUDA)
    real = starter.grpo_microbatch_step

    def step(policy, rows, *others):
        result = real(policy, rows, *others)
        if rows["labels"].numel() > device.n_tokens:
            raise RuntimeError(device.message)
        return result

    monkeypatch.setattr(starter, "grpo_microbatch_step", step)
    return device


@pytest.mark.parametrize(
    "message",
    [CUDA, "CUDA error: out of memory", "DefaultCPUAllocator: can't allocate memory"],
)
def test_steps_after_a_lack_of_memory_have_the_same_numbers(checkpoint, device, message):
    """In the first of two epochs memory runs out at the second of three microbatches, and again at
    its repetition; in the second epoch there is less."""
    device.message = message
    batch = make_step(make_responses((9, 9, 9, 9, 4, 6, 7, 2, 8, 3), prompt_lengths=(3, 3, 9)))
    found = []
    for limits in ((math.inf, math.inf), (40, 20)):
        policy, _ = starter.init_policy(checkpoint, "cpu")
        cfg = starter.cfg_with(precision="float32", max_tokens_per_microbatch=1000)
        run = SimpleNamespace(state={}, cfg=cfg)
        edits.restore()
        memory.attach(run)
        microbatches = [starter.keep_rows(batch, slice(i, i + 4)) for i in (8, 0, 4)]
        results = []
        for device.n_tokens in limits:
            for rows in microbatches:
                loss, means = starter.grpo_microbatch_step(policy, rows, cfg)
                results += [loss, *means.values(), rows["old_log_probs"]]
            results += [p.grad for p in policy.parameters()]
            torch.optim.SGD(policy.parameters(), 0.1).step()
            policy.zero_grad()
        found.append(results)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
    assert run.state["max_tokens"] == cfg.max_tokens_per_microbatch <= 20


def test_smaller_microbatches_stay_for_the_rest_of_the_run(checkpoint, tmp_path, capsys, device):
    given = settings(checkpoint, tmp_path, max_tokens_per_microbatch=1000)
    device.n_tokens = 100
    starter.main(**given)
    starter.main(**{**given, "n_train_steps": 6, "resume": True})
    printed = capsys.readouterr().out
    sizes = [int(n) for n in re.findall(r"out of memory: microbatches of (\d+) tokens", printed)]
    assert len(sizes) >= 2 and sizes == sorted(set(sizes), reverse=True)  # ever smaller
    assert "out of memory" not in printed[printed.index("Step 1 |") :]
    assert f"microbatches of {sizes[-1]} tokens, since memory ran out before" in printed


@pytest.mark.parametrize(
    "message, kind, words",
    [(CUDA, RunStopped, "with a single response at a time"), ("shapes", RuntimeError, "^shapes$")],
)
def test_other_errors_and_a_lack_for_one_response_stop_the_run(
    checkpoint, device, message, kind, words
):
    policy, _ = starter.init_policy(checkpoint, "cpu")
    vars(device).update(n_tokens=0, message=message)
    memory.attach(SimpleNamespace(state={}, cfg=starter.cfg_with(max_tokens_per_microbatch=90)))
    with pytest.raises(kind, match=words):
        rows = make_step(make_responses((4, 6)))
        starter.grpo_microbatch_step(policy, rows, starter.cfg_with(precision="float32"))
