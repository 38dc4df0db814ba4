"""Tests of lora_rank: adapters of peft in the policy, which is its own reference without them."""
import copy
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import save_checkpoint, scalars, settings
from safetensors.torch import load_file

import starter
from starter import InputError, Response

peft = pytest.importorskip("peft")

RESPONSES = [Response([3, 4, 5], [6, 7, 8, 9], [-2.0] * 4, True),
             Response([3, 4], [9, 8, 7], [-2.0] * 3, True),
             Response([5], [4], [-2.0], False)]


def randomize(model, seed=0):
    """Gives both matrices of each adapter random numbers: at the start B is 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0, 0.1, generator=generator)


@pytest.fixture(params=["Qwen3", "Llama", "GPT2"])
def models(request, tmp_path):
    """(policy with an adapter of random numbers, the same model as peft wraps it, the model
    before). GPT-2's layers hold their weights transposed."""
    if request.param == "GPT2":
        from transformers import GPT2Config, GPT2LMHeadModel
        torch.manual_seed(0)
        start = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=40,
                                           n_positions=64, resid_pdrop=0, embd_pdrop=0,
                                           attn_pdrop=0)).eval()
    else:
        folder = save_checkpoint(tmp_path / "model", family=request.param)
        start, _ = starter.init_policy(folder, "cpu")
    policy = copy.deepcopy(start)
    starter.add_adapter(policy, 4, seed=0)
    randomize(policy)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(copy.deepcopy(start), config).eval()
    adapter = {name: value for name, value in policy.state_dict().items() if ".lora_" in name}
    state = {f"base_model.model.{name}": value for name, value in adapter.items()}
    missing = wrapped.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and adapter
    return policy, wrapped, start


def log_probs_of(model, compute=starter.PLAIN):
    batch = starter.make_batch(RESPONSES, torch.zeros(3), "cpu")
    mask = batch["response_mask"]
    return starter.get_response_log_probs(model, batch["input_ids"], batch["labels"], mask,
                                          compute=compute)[mask]


def by_hand(forward):
    """Log-probs of RESPONSES, each alone, by a model's own forward pass."""
    found = []
    for prompt_ids, ids, _, _ in RESPONSES:
        logits = forward(torch.tensor([prompt_ids + ids])).logits[0].double()
        rows = logits.log_softmax(dim=1)[len(prompt_ids) - 1:-1]
        found += [row[token].item() for row, token in zip(rows, ids)]
    return torch.tensor(found)


def test_log_probs_are_those_of_pefts_own_forward_pass(models):
    policy, wrapped, start = models
    expected = by_hand(wrapped)
    torch.testing.assert_close(log_probs_of(policy), expected, rtol=0, atol=1e-5)
    assert (expected - by_hand(start)).abs().max() > 0.01  # the adapter does something


def test_fast_path_computes_the_adapter(tmp_path):
    fast = pytest.importorskip("support.fast")
    policy, _ = starter.init_policy(save_checkpoint(tmp_path / "model"), "cpu")
    starter.add_adapter(policy, 4, seed=0)
    randomize(policy)
    plain = log_probs_of(policy)
    sampling = starter.Sampling(2, 6, 1.0, 0, (1,))
    by_plain = starter.rollout_with_transformers(policy, [[3, 4], [5]], sampling)
    fast.COMPUTE.prepare(policy)
    torch.testing.assert_close(log_probs_of(policy, fast.COMPUTE), plain, rtol=0, atol=1e-5)
    by_fast = fast.COMPUTE.rollout(policy, [[3, 4], [5]], sampling)
    assert [r.response_ids for r in by_fast] == [r.response_ids for r in by_plain]


def test_policy_without_its_adapter_is_the_model_before_training(models):
    policy, _, start = models
    expected = log_probs_of(start)
    with starter.without_adapter(policy):
        assert torch.equal(log_probs_of(policy), expected)
    assert not torch.equal(log_probs_of(policy), expected)
    with pytest.raises(ZeroDivisionError), starter.without_adapter(policy):
        1 / 0
    assert not torch.equal(log_probs_of(policy), expected)


def test_only_the_adapter_learns(models):
    policy, _, start = models
    with starter.without_adapter(policy):  # peft freezes the adapter meanwhile
        pass
    learning = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert learning == {name for name, _ in policy.named_parameters() if ".lora_" in name}


@pytest.mark.parametrize("estimator", ["k3", "exact"])
def test_gradient_with_the_adapter_off_as_reference_is_that_with_a_copy(models, estimator):
    policy, _, start = models
    cfg = starter.SimpleNamespace(clip_range=0.2, importance_cap=2.0, temperature=1.0, bf16=False,
                                  kl=starter.KLSettings(estimator))
    batch = starter.make_batch(RESPONSES, torch.tensor([1.0, -1.0, 0.5]), "cpu")
    batch["weights"] = starter.token_weights(batch["response_mask"], "dapo", 4)
    gradients = []
    for reference in (start.requires_grad_(False), policy):
        loss, metadata, _ = starter.grpo_microbatch_step(policy, dict(batch), cfg, reference, 0.1)
        gradients.append([p.grad for p in policy.parameters() if p.grad is not None])
        policy.zero_grad()
        assert metadata["kl_per_token"] > 1e-4
    assert len(gradients[0]) == sum(".lora_" in name for name, _ in policy.named_parameters())
    for with_copy, with_adapter_off in zip(*gradients):
        torch.testing.assert_close(with_adapter_off, with_copy, rtol=1e-5, atol=1e-7)


def test_merged_weights_are_float32_where_frozen_layers_are_stored_in_bf16(models):
    """Weights and biases, with the numbers that bf16 holds."""
    policy, _, start = models
    for name, parameter in policy.named_parameters():
        if ".base_layer." in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    for name, tensor in starter.merged_weights(policy):
        assert tensor.dtype == torch.float32, name
        if name.endswith(".bias") and ".ln" not in name:
            torch.testing.assert_close(tensor, start.get_parameter(name).bfloat16().float(),
                                       rtol=0, atol=0)


def test_merged_weights_are_the_policy_under_the_names_of_the_model(models):
    policy, _, start = models
    merged = dict(starter.merged_weights(policy))
    assert merged.keys() == dict(start.named_parameters()).keys()
    start.load_state_dict(merged, strict=False)
    torch.testing.assert_close(log_probs_of(start), log_probs_of(policy), rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------------------------
# Runs

LORA = dict(lora_rank=4, use_kl_penalty=True, kl_coef=0.1, learning_rate=1e-2)


@pytest.fixture(params=["guarded", pytest.param("plain", marks=pytest.mark.slow)])
def kind(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(starter, "find_parts", lambda: (
            [starter.PLAIN], starter.OneProcess(), starter.Run))
    elif not (Path(starter.__file__).parent / "support" / "runs.py").is_file():
        pytest.skip("needs support/")
    return request.param


def test_run_with_adapters_learns_saves_and_resumes_to_the_same_bits(checkpoint, tmp_path, kind):
    whole = starter.main(**settings(checkpoint, tmp_path / "whole", save_every=2, **LORA))
    assert scalars(whole["run_folder"])["train/kl_penalty"][4] > 0  # it has moved
    halves = settings(checkpoint, tmp_path / "halves", save_every=2, **LORA)
    starter.main(**halves | {"n_train_steps": 2})
    resumed = starter.main(**halves, resume=True)
    saved = [load_file(run["run_folder"] / "model" / "model.safetensors")
             for run in (whole, resumed)]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert whole["after"] == resumed["after"]
    before = load_file(Path(checkpoint) / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], saved[0][name])}
    assert saved[0].keys() == before.keys()
    assert changed == {name for name in before if "_proj.weight" in name}

    kept = load_file(next(whole["run_folder"].glob("checkpoints/*4.safetensors")))
    assert kept and all(".lora_" in name for name in kept)


def test_checkpoint_of_adapters_is_refused_by_a_run_without_them(checkpoint, tmp_path, kind):
    run = starter.main(**settings(checkpoint, tmp_path, n_train_steps=1, **LORA))
    with pytest.raises(InputError, match="does not have; use the model that it began with"):
        starter.main(**settings(checkpoint, tmp_path, resume_from=str(run["run_folder"])))


def test_saved_model_is_loaded_by_transformers_as_the_policy_was(checkpoint, tmp_path):
    policies = []
    original = starter.Run.open

    def keep(run, policy, optimizer):
        policies.append(policy)
        original(run, policy, optimizer)

    with mock.patch.object(starter.Run, "open", keep):
        run = starter.main(**settings(checkpoint, tmp_path, **LORA))
    loaded, _ = starter.init_policy(run["run_folder"] / "model", "cpu")
    torch.testing.assert_close(log_probs_of(loaded), log_probs_of(policies[0]), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_gradient_checkpointing_gives_the_same_run(checkpoint, tmp_path):
    runs = [starter.main(**settings(checkpoint, tmp_path, gradient_checkpointing=on, **LORA))
            for on in (False, True)]
    losses = [scalars(run["run_folder"])["train/loss"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.slow
def test_run_in_bf16_trains_and_saves_float32(checkpoint, tmp_path):
    run = starter.main(**settings(checkpoint, tmp_path, bf16=True, **LORA))
    saved = load_file(run["run_folder"] / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    config = json.loads((run["run_folder"] / "model" / "config.json").read_text())
    assert config["dtype"] == "float32"


def test_adapters_without_peft_get_one_sentence(checkpoint, tmp_path):
    find_spec = starter.importlib.util.find_spec
    with mock.patch.object(starter.importlib.util, "find_spec",
                           lambda name: None if name == "peft" else find_spec(name)):
        with pytest.raises(InputError, match="lora_rank = 4 needs peft, which is not installed "
                                             "here; pip install peft, or use lora_rank = 0"):
            starter.main(**settings(checkpoint, tmp_path, lora_rank=4))


@pytest.mark.slow
@pytest.mark.skipif(not starter.importlib.util.find_spec("vllm"), reason="vLLM is not installed")
def test_vllm_samples_with_the_merged_adapter_and_loads_the_saved_model(checkpoint, tmp_path):
    changes = LORA | dict(engine="vllm", epochs_per_rollout=2)
    run = starter.main(**settings(checkpoint, tmp_path, **changes))
    log = scalars(run["run_folder"])
    assert max(log["train/sampler_logprob_diff_max"].values()) < 1e-3
    assert log["train/kl_penalty"][4] > 0.01  # the policy that vLLM sampled from had moved
    policy, _ = starter.init_policy(run["run_folder"] / "model", "cpu")
    for bf16 in (False, True):
        llm = starter.init_vllm(run["run_folder"] / "model", 0, 128, 0.3, bf16)
        sampling = starter.Sampling(2, 6, 1.0, 0, (1,), bf16)
        starter.check_sampler(policy, starter.rollout_with_vllm(llm, [[3, 4]], sampling), sampling)
        del llm
