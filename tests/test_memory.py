"""What a run takes, the refusal of one that cannot fit, and steps for which memory runs out."""
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from lab import bench

import starter
from starter import InputError, RunStopped
from support import lora, memory

from conftest import make_responses, make_step, save_checkpoint, settings

# Parameters of Qwen3-1.7B by hand: 28 layers of q, k, v, o, three of the MLP, and norms
BODY = 28 * (2048 * (2 * 2048 + 2 * 1024 + 3 * 6144) + 2 * 2048 + 2 * 128) + 2048
EMBEDDING = 151_936 * 2048
ADAPTERS = 16 * 28 * (2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144))


@pytest.fixture(scope="module")
def qwen():
    return bench.qwen3_config(**bench.QWEN3["Qwen3-1.7B"])


def cfg_of(**changes):
    return starter.cfg_with(**dict(preset="qwen3-1.7b", bf16=True, engine="transformers",
                                   device="cuda", use_kl_penalty=True) | changes)


def test_what_is_in_memory_is_counted_by_hand(qwen):
    n = BODY + EMBEDDING
    by_hand = {"weights": 4 * n, "gradients": 4 * n, "moments": 8 * n, "reference": 4 * n}
    sizes = memory.predicted_gb(qwen, cfg_of(), 4096)
    assert by_hand == pytest.approx({name: sizes[name] * 1e9 for name in by_hand})
    beside_vllm = memory.predicted_gb(qwen, cfg_of(engine="vllm"), 4096)["head"]
    rounded = 2 + 4  # bytes of each weight of the head: in bf16, and in float32 again
    assert beside_vllm == pytest.approx(sizes["head"] + rounded * EMBEDDING / 1e9)
    engine = memory.predicted_gb(qwen, cfg_of(engine="vllm", gpu_mem_util=4), 4096)["vLLM"]
    assert engine == pytest.approx(2 * n / 1e9)  # bf16 weights, beside 4 GB of cache
    halves = memory.predicted_gb(qwen, cfg_of(), 8192, ranks=2)
    for name, size in sizes.items():
        twice = 2 if name == "activations" else 0.5 if name in by_hand else 1
        assert name == "head" or halves[name] == pytest.approx(twice * size), name
    many = memory.predicted_gb(qwen, cfg_of(gradient_checkpointing=True), 64, ranks=1000)
    assert sum(many.values()) == pytest.approx(8 * n / 1e9)  # policy and reference, while loading
    assert memory.predicted_gb(qwen, cfg_of(use_kl_penalty=False), 4096)["reference"] == 0
    by_hand = {"weights": 2 * BODY + 4 * EMBEDDING, "adapters": 4 * ADAPTERS, "reference": 0,
               "gradients": 4 * ADAPTERS, "moments": 8 * ADAPTERS}
    sizes = memory.predicted_gb(qwen, cfg_of(lora_rank=16, frozen_in_bf16=True), 4096)
    assert by_hand == pytest.approx({name: sizes[name] * 1e9 for name in by_hand})


@pytest.mark.parametrize("changes, free, remedy", [
    (dict(), 24.0, "lora_rank = 16"), (dict(), 36.0, "use_kl_penalty = False"),
    (dict(), 7.0, "lora_rank = 16 and gradient_checkpointing = True and frozen_in_bf16 = True"),
    (dict(), 2.0, "more memory"), (dict(), 80.0, ""), (dict(use_kl_penalty=False), 36.0, ""),
    (dict(lora_rank=16), 24.0, "")])
def test_run_that_cannot_fit_is_refused_with_what_would_fit(qwen, tmp_path, monkeypatch, changes,
                                                            free, remedy):
    assert 0 < memory.free_gb(starter.cfg_with()) < 1e5
    monkeypatch.setattr(memory, "free_gb", lambda cfg: free)
    cfg = cfg_of(model_id=str(tmp_path), **changes)
    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    memory.check_fits(cfg)  # what cannot be counted is not refused
    qwen.save_pretrained(tmp_path)
    if not remedy:
        return memory.check_fits(cfg)
    with pytest.raises(InputError, match=f"about 44.* GB .*; {free} GB are free; use {remedy}"):
        memory.check_fits(cfg)


@pytest.mark.parametrize("gpu_mem_util, engine, free", [
    (0.25, "vllm", 14.0), (4, "vllm", 16.0), (4, "transformers", 20.0)])
def test_free_memory_of_a_gpu_is_less_what_vllm_takes(monkeypatch, gpu_mem_util, engine, free):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20e9, 24e9))
    assert memory.free_gb(cfg_of(gpu_mem_util=gpu_mem_util, engine=engine)) == free


@pytest.mark.parametrize("family, lora_rank", [("Qwen3", 0), ("Llama", 0), ("Qwen3", 4)])
def test_what_does_not_learn_gives_the_same_bits_from_bf16(tmp_path, family, lora_rank):
    policy, _ = starter.init_policy(save_checkpoint(tmp_path / "model", family=family), "cpu")
    cfg = starter.cfg_with(frozen_in_bf16=True, lora_rank=lora_rank, use_kl_penalty=True)
    model = policy if lora_rank else starter.copy.deepcopy(policy).requires_grad_(False)
    if lora_rank:
        pytest.importorskip("peft")
        lora.add_adapters(policy, cfg)
    ids = torch.arange(20)[None] % 9
    before = starter.get_response_log_probs(model, ids, ids, bf16=True)
    memory.store_frozen_in_bf16(policy, None if lora_rank else model, cfg)
    assert torch.equal(starter.get_response_log_probs(model, ids, ids, bf16=True), before)
    dtypes = {p.dtype for p in model.parameters() if p.dim() == 2 and not p.requires_grad}
    assert dtypes == {torch.float32, torch.bfloat16}  # embedding and head; the rest
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}


def test_model_whose_bits_would_change_is_refused(checkpoint):
    policy, _ = starter.init_policy(checkpoint, "cpu")
    model = starter.copy.deepcopy(policy).requires_grad_(False)
    layer = model.model.layers[0].mlp.down_proj

    def without_autocast(x):
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.linear(x.float(), layer.weight.float())

    layer.forward = without_autocast
    with pytest.raises(InputError, match="frozen_in_bf16 = True changes the log-probs of Qwen3For"):
        memory.store_frozen_in_bf16(policy, model, starter.cfg_with(use_kl_penalty=True))


def with_memory_for(n_tokens, error):
    """grpo_microbatch_step on a device with so little memory that larger microbatches fail, after
    some gradients were added."""
    real = starter.grpo_microbatch_step

    def step(policy, rows, *others):
        found = real(policy, rows, *others)
        if rows["labels"].numel() > n_tokens and len(others) < 4:  # not at made-up statistics
            raise error
        return found

    return mock.patch.object(starter, "grpo_microbatch_step", step)


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")])
def test_step_after_a_lack_of_memory_has_the_same_gradient(checkpoint, error):
    policy, _ = starter.init_policy(checkpoint, "cpu")
    batch = make_step(make_responses((1, 9, 4, 6, 7, 2, 8, 3)))
    found = []
    for n_tokens in (10_000, 20):
        cfg = starter.cfg_with(max_tokens_per_microbatch=90)
        microbatches = starter.cut_microbatches(batch, 90)
        policy.zero_grad()
        with with_memory_for(n_tokens, error):
            memory.attach(SimpleNamespace(state={}, cfg=starter.cfg_with()))
            means = starter.accumulate_gradients(policy, microbatches, cfg)
        found.append((means["loss"], torch.cat([p.grad.flatten() for p in policy.parameters()])))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert max(rows["labels"].numel() for rows in microbatches) <= 20  # for the next epoch
    assert sum(len(rows["labels"]) for rows in microbatches) == 8
    assert all("old_log_probs" in rows for rows in microbatches)


def test_smaller_microbatches_stay_for_the_rest_of_the_run(checkpoint, tmp_path, capsys):
    given = settings(checkpoint, tmp_path, max_tokens_per_microbatch=1000)
    with with_memory_for(100, torch.OutOfMemoryError("CUDA out of memory")):
        starter.main(**given)
        starter.main(**given | dict(n_train_steps=6, resume=True))
    printed = capsys.readouterr().out
    sizes = [int(n) for n in re.findall(r"out of memory: microbatches of (\d+) tokens", printed)]
    assert len(sizes) >= 2 and sizes == sorted(set(sizes), reverse=True)  # ever smaller
    assert "out of memory" not in printed[printed.index("Step 1 |"):]


@pytest.mark.parametrize("error, kind, words", [
    (torch.OutOfMemoryError("CUDA out of memory"), RunStopped, "with a single response at a time"),
    (RuntimeError("shapes"), RuntimeError, "^shapes$")])
def test_other_errors_and_a_lack_for_one_response_stop_the_run(checkpoint, tmp_path, error, kind,
                                                               words):
    with with_memory_for(0, error), pytest.raises(kind, match=words):
        starter.main(**settings(checkpoint, tmp_path))
