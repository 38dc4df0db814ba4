"""What a run takes, the refusal of one that cannot fit, and steps for which memory runs out."""

import contextlib
import itertools
import math
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import make_responses, make_step, scalars, settings
from lab import bench

import starter
from starter import InputError
from support import divided, edits, lora, memory, opinion

QWEN = bench.config_of("Qwen3-1.7B")
SMOLLM2 = bench.config_of("SmolLM2-135M")
KL = dict(use_kl_penalty=True, frozen_in_bf16=True)
LORA = dict(lora_rank=16, gradient_checkpointing=True, frozen_in_bf16=True)


def cfg_of(engine="transformers", **changes):
    cfg = starter.cfg_with(engine=engine, precision="bf16", max_new_tokens=256, **changes)
    cfg.device = torch.device("cuda")
    return cfg


def test_weights_while_they_are_handed_over_are_counted_by_hand():
    linear = 28 * 2048 * (2 * 2048 + 2 * 1024 + 3 * 6144)  # q, k, v, o, three of the MLP
    embedding = 151_936 * 2048
    # Stored, merged and vLLM's; vLLM has another embedding for a moment
    by_hand = (2 + 4 + 2) * linear + (4 + 2 + 2) * embedding
    gb = memory.predicted_gb(QWEN, cfg_of("vllm", gpu_mem_util=3, **LORA), 64)
    assert gb - 0.5 - 0.28 == pytest.approx(by_hand / 1e9, rel=1e-3)  # buffers, adapters


@pytest.mark.parametrize(
    "config, changes, engine, share, measured",
    [  # GB, in lab/results/gpu.csv, gpu_update.csv and gpu_vllm.csv
        (SMOLLM2, {}, "transformers", 0, 6.6),
        (QWEN, KL, "transformers", 0, 54.0),
        (QWEN, {}, "vllm", 0, 66.2 - 17.0),
        (QWEN, LORA, "vllm", 3, 17.3 - 3),
    ],
)
def test_prediction_covers_what_a_gpu_used(config, changes, engine, share, measured):
    predicted = memory.predicted_gb(config, cfg_of(engine, gpu_mem_util=share, **changes), 4096)
    assert measured <= predicted < 1.4 * measured


@pytest.mark.parametrize(
    "engine, share, free, enough",
    [("transformers", 4, 33.0, 36e9), ("vllm", 0.25, 23.0, 47e9), ("vllm", 4, 29.0, 45e9)],
)
def test_run_that_cannot_fit_is_refused_with_what_takes_less(
    tmp_path, monkeypatch, engine, share, free, enough
):
    """Of the free memory of a GPU vLLM takes a share of all of it, or gigabytes."""
    cfg = cfg_of(engine, model_id=str(tmp_path), gpu_mem_util=share)
    QWEN.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (33e9, 40e9))
    with pytest.raises(InputError, match=f"{free} GB are free; set lora_rank = 16"):
        memory.check_fits(cfg)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (enough, 40e9))
    memory.check_fits(cfg)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 40e9))
    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    memory.check_fits(cfg)  # what cannot be counted is not refused


def test_parts_of_several_processes_are_counted_by_hand():
    """Qwen3-8B on 8 cards, with the penalty, checkpointing, and vLLM over two of them."""
    layers = 36 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 12_288) + 2 * 4096 + 2 * 128)
    embedding = 151_936 * 4096  # and the head, another one
    n_all = layers + 2 * embedding + 4096
    divided = 20 * n_all / 8  # weights, reference, gradients, two moments
    of_vllm = 2 * n_all / 2 + 0.5e9  # and buffers
    # The head with its gradient; two layers in 16 bits, and the gradients of one in both precisions
    joined = 8 * embedding + (2 * 2 + 2 + 4) * layers / 36
    head = 6 * embedding  # that rounds
    cfg = cfg_of(
        "vllm", gpu_mem_util=3, vllm_tp=2, use_kl_penalty=True, gradient_checkpointing=True
    )
    gb = memory.predicted_gb(bench.config_of("Qwen3-8B"), cfg, 0, n_processes=8)
    assert gb == pytest.approx((divided + of_vllm + joined + head) / 1e9, rel=1e-3)


def test_share_of_vllm_that_has_no_room_for_its_cache_is_refused(tmp_path, monkeypatch):
    """A fifth of 85 GB, for the 16.4 GB of an 8B model."""
    bench.config_of("Qwen3-8B").save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900e9, 85e9))
    cfg = cfg_of("vllm", model_id=str(tmp_path))
    with pytest.raises(InputError, match="0.2 is 17.0 GB, of which the weights take 16.4 in vLLM"):
        memory.check_fits(cfg)
    for name, value in (("gpu_mem_util", 0.3), ("gpu_mem_util", 4), ("vllm_tp", 2)):
        memory.check_fits(cfg_of("vllm", model_id=str(tmp_path), **{name: value}))


def test_nothing_is_stored_in_16_bits_in_float32_which_is_said(checkpoint, capsys):
    cfg = cfg_of(**KL)
    cfg.precision = "float32"
    plain = cfg_of(use_kl_penalty=True)
    plain.precision = "float32"
    needed = [memory.predicted_gb(QWEN, each, 100) for each in (cfg, plain)]
    assert needed[0] == needed[1]
    model, _ = starter.init_policy(checkpoint, torch.device("cpu"))
    memory.store_frozen_in_bf16(model.requires_grad_(False), None, cfg)
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    assert "frozen_in_bf16 = True changes nothing" in capsys.readouterr().out


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_what_does_not_learn_gives_the_same_bits_from_bf16(checkpoint, lora_rank):
    model, _ = starter.init_policy(checkpoint, "cpu")
    model.requires_grad_(False)
    cfg = starter.cfg_with(lora_rank=lora_rank, precision="bf16")
    if lora_rank:
        pytest.importorskip("peft")
        lora.add_adapters(model, cfg)
    batch = make_step(make_responses((9, 4)))
    before = starter.token_statistics(model, batch, 1.0, "bf16")
    memory.store_frozen_in_bf16(model, None, cfg)
    after = starter.token_statistics(model, batch, 1.0, "bf16")
    assert torch.equal(after["log_probs"], before["log_probs"])
    stored = [name for name, p in model.named_parameters() if p.dtype == torch.bfloat16]
    assert len(stored) == 14 and all("proj." in name for name in stored)


CUDA = "CUDA out of memory. Tried to allocate 20.00 MiB."
CPU = "DefaultCPUAllocator: can't allocate memory"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


@pytest.fixture
def device(monkeypatch):
    """A device on which microbatches of more than n_tokens fail after some gradients were added:
    those of the policy, and of a parameter of the optimiser's beside them."""
    beside = torch.nn.Parameter(torch.ones(()))
    device = SimpleNamespace(
        n_tokens=math.inf, messages=itertools.cycle([CUDA, CPU, CUBLAS]), beside=beside
    )
    real = starter.grpo_microbatch_step

    def step(policy, rows, *others):
        result = real(policy, rows, *others)
        (beside * rows["weights"].sum()).backward()
        if rows["labels"].numel() > device.n_tokens:
            raise RuntimeError(next(device.messages))
        return result

    monkeypatch.setattr(starter, "grpo_microbatch_step", step)
    return device


def test_steps_after_a_lack_of_memory_have_the_same_numbers(checkpoint, device, capsys):
    """In the first of two epochs memory runs out at the second of three microbatches, and again
    when the step is repeated; in the second epoch there is less."""
    batch = make_step(make_responses((9, 9, 9, 9, 4, 6, 7, 2, 8, 3), prompt_lengths=(3, 3, 9)))
    found = []
    for limits in ((math.inf, math.inf), (40, 20)):
        policy, _ = starter.init_policy(checkpoint, "cpu")
        optimizer = torch.optim.SGD([*policy.parameters(), device.beside], 0.1)
        cfg = starter.cfg_with(precision="float32", max_tokens_per_microbatch=1000)
        run = SimpleNamespace(cfg=cfg, state={})
        edits.restore()
        edits.replace(add_up_gradients=memory.add_up_gradients)
        memory.resume(run, optimizer)
        whole = [starter.keep_rows(batch, slice(*ends)) for ends in ((8, 9), (0, 8), (9, 10))]
        microbatches = [dict(rows) for rows in whole]
        results = []
        for device.n_tokens in limits:
            sums = starter.add_up_gradients(policy, microbatches, cfg)
            results += [torch.tensor([*sums.values()]), device.beside.grad.clone()]
            results += [torch.cat([rows["old_log_probs"] for rows in microbatches])]
            results += [p.grad for p in policy.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            device.beside.fill_(1.0)
        found.append(results)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
    n_columns = batch["labels"].shape[1]
    printed = re.findall(r"out of memory: microbatches of (\d+) tokens", capsys.readouterr().out)
    assert [int(n) / n_columns for n in printed] == [4, 2, 1]
    assert cfg.max_tokens_per_microbatch == run.state["max_tokens"] == n_columns
    assert [len(rows["labels"]) for rows in microbatches] == [1] * 10
    assert microbatches[0].keys() == whole[0].keys() | {"old_log_probs"}


@pytest.mark.slow
def test_lack_of_memory_while_support_is_compared_changes_nothing(
    checkpoint, tmp_path, capsys, monkeypatch
):
    """No number, and no function that runs: those of starter.py would need even more memory. It is
    lacking with the functions of support/, the first call, and without, the second."""
    real = starter.grpo_microbatch_step
    norms = []
    for failing in (None, 1, 2):
        calls = itertools.count(1)

        def step(*inputs):
            result = real(*inputs)
            if next(calls) == failing:
                raise RuntimeError(CUDA)
            return result

        monkeypatch.setattr(starter, "grpo_microbatch_step", step)
        given = settings(checkpoint, tmp_path, n_train_steps=3)
        folder = starter.main(**given)["run_folder"]
        norms.append(scalars(folder)["train/grad_norm"])
        printed = capsys.readouterr().out
        assert ("no memory to compare with" in printed) == (failing is not None)
        assert "microbatches of" not in printed
    assert norms[0] == norms[1] == norms[2]


@pytest.mark.parametrize("fails", [False, True])
def test_comparison_leaves_no_gradient_also_of_parameters_beside_the_policy(
    checkpoint, device, fails
):
    policy, _ = starter.init_policy(checkpoint, "cpu")
    cfg = starter.cfg_with(precision="float32", max_tokens_per_microbatch=1000)
    optimizer = torch.optim.SGD([*policy.parameters(), device.beside])
    memory.resume(SimpleNamespace(cfg=cfg, state={}), optimizer)
    device.n_tokens = 0 if fails else math.inf
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        opinion.numbers_of_rows(make_step(make_responses((9, 4))), policy, None, cfg)
    assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])


@pytest.mark.slow
def test_smaller_microbatches_stay_until_a_single_response_is_too_large(
    checkpoint, tmp_path, capsys, device
):
    given = settings(checkpoint, tmp_path, max_tokens_per_microbatch=1000, n_train_steps=2)
    device.n_tokens = 100
    starter.main(**given)
    starter.main(**{**given, "n_train_steps": 3, "resume": True})
    before, _, after = capsys.readouterr().out.partition("Step 1/")
    assert before.count("out of memory: microbatches of") >= 2
    assert "Step 3/" in after and "out of memory" not in after
    device.n_tokens = 0
    for message in (CUDA, "shapes"):
        device.messages = itertools.repeat(message)
        with pytest.raises(RuntimeError, match=message):
            starter.main(**given)
        assert ("out of memory" in capsys.readouterr().out) == (message == CUDA)


def test_logits_of_a_microbatch_are_limited_where_all_are_in_memory(checkpoint, monkeypatch):
    """In a lone copy, and in several processes."""
    policy, _ = starter.init_policy(checkpoint, "cpu")
    monkeypatch.setattr(starter, "LOGITS_AT_ONCE", 58 * 30 + 5)
    for given, expected in ((1000, 30), (20, 20)):
        cfg = starter.cfg_with(max_tokens_per_microbatch=given, device=torch.device("cpu"))
        starter.limit_logits(policy, cfg)
        assert cfg.max_tokens_per_microbatch == expected
    monkeypatch.setattr(divided, "shard", mock.Mock())
    cfg = starter.cfg_with(max_tokens_per_microbatch=1000, engine="transformers")
    divided.divide(policy, None, cfg)
    assert cfg.max_tokens_per_microbatch == 30
