"""Tests of lora_rank: adapters of peft in the policy, which is its own reference without them."""

import copy
import json
import shutil

import pytest
import torch
from conftest import make_responses, make_step, save_checkpoint, scalars, settings
from lab.architectures import own_log_probs
from lab.small_models import make_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import starter
from support import edits, fast, lora

peft = pytest.importorskip("peft")

RESPONSES = make_responses((4, 3, 1), prompt_lengths=(3, 2, 1))


def randomize(model):
    """Gives both matrices of each adapter random numbers: at the start B is 0."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0, 0.1, generator=generator)


def with_adapters(start):
    policy = copy.deepcopy(start)
    cfg = starter.cfg_with(lora_rank=4, use_kl_penalty=True)
    reference = lora.add_adapters(policy, cfg)
    randomize(policy)
    return policy, reference


def log_probs_of(model):
    rows = make_step(RESPONSES)
    return starter.token_statistics(model, rows, 1.0)["log_probs"][rows["response_mask"]]


def by_hand(model):
    """Log-probs of RESPONSES, each alone, by a model's own forward pass."""
    return torch.cat([own_log_probs(model, response)[1] for response in RESPONSES])


def use_fast(*models):
    """Puts all of support/fast.py in the place of the plain functions."""
    for model in models:
        fast.attend_on_cpu(model)
    edits.replace(**fast.FUNCTIONS)


# gpt2's weights are transposed; falcon's layers are of a class of its own
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "falcon"])
def test_log_probs_and_gradients_are_those_of_pefts_own_forward_pass(family):
    start = make_model(family)
    policy, _ = with_adapters(start)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(copy.deepcopy(start), config).eval()
    prefix = "base_model.model."
    adapter = {
        prefix + name: value for name, value in policy.state_dict().items() if ".lora_" in name
    }
    assert adapter and not wrapped.load_state_dict(adapter, strict=False).unexpected_keys
    expected = by_hand(wrapped)
    expected.sum().backward()
    gradients = {name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad}
    for is_fast in (False, True):
        if is_fast:
            use_fast(policy)
        ours = log_probs_of(policy)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
        assert (ours - log_probs_of(start)).abs().max() > 0.01  # the adapter does something
        ours.sum().backward()
        learning = {
            prefix + name: p.grad for name, p in policy.named_parameters() if p.requires_grad
        }
        torch.testing.assert_close(learning, gradients, rtol=1e-4, atol=1e-5)
        policy.zero_grad()


def test_merged_weights_are_float32_under_the_names_of_the_model():
    """Also where frozen layers are stored in bf16."""
    start = make_model("gpt2")
    policy, _ = with_adapters(start)
    for name, parameter in policy.named_parameters():
        if ".base_layer." in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    merged = dict(starter.weights_by_name(policy))
    assert merged.keys() == start.state_dict().keys()
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32}


def test_weight_that_two_layers_share_gets_no_adapter():
    """As in Zamba: it could not be saved with two."""
    model = make_model("qwen3")
    first, second = (layer.mlp.down_proj for layer in model.model.layers)
    second.weight = first.weight
    names = lora.layers_to_adapt(model)
    assert len(names) == 2 * 6 and not any("down_proj" in name for name in names)


@pytest.mark.parametrize("estimator", ["k3", "exact"])
@pytest.mark.parametrize("path", ["plain", "fast"])
def test_policy_without_its_adapters_is_the_reference(path, estimator):
    """Loss and gradients are those with a copy of the model before training."""
    start = make_model("qwen3").requires_grad_(False)
    policy, reference = with_adapters(start.requires_grad_())
    if path == "fast":
        use_fast(policy, start)
    cfg = starter.cfg_with(use_kl_penalty=True, kl_estimator=estimator, precision="float32")
    steps = []
    for ref_model in (start.requires_grad_(False), reference):
        rows = make_step(RESPONSES)
        loss, metadata = starter.grpo_microbatch_step(policy, rows, cfg, ref_model, 0.1)
        steps.append([loss, *(p.grad for p in policy.parameters() if p.grad is not None)])
        policy.zero_grad()
        assert metadata["kl_per_token"] > 1e-4
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-5, atol=1e-7)
    assert len(steps[0]) == 1 + sum(p.requires_grad for p in policy.parameters())
    own = {parameter.data_ptr() for parameter in policy.parameters()}
    assert own >= {parameter.data_ptr() for parameter in reference.parameters()}


# Runs

LORA = dict(lora_rank=4, use_kl_penalty=True, kl_coef=0.1, learning_rate=1e-2)


def test_run_with_adapters_learns_saves_and_resumes_to_the_same_bits(checkpoint, tmp_path):
    changes = dict(LORA, n_train_steps=2, save_every=1)
    whole = starter.main(**settings(checkpoint, tmp_path / "whole", **changes))
    assert scalars(whole["run_folder"])["train/kl_penalty"][2] > 0  # it has moved
    stopped = shutil.copytree(whole["run_folder"], tmp_path / "halves" / "stopped")
    last = stopped / "checkpoint_00000002.pt"
    kept = torch.load(last)["model"]
    assert kept and all(".lora_" in name or name == "lm_head.weight" for name in kept)
    last.unlink()
    resumed = starter.main(**settings(checkpoint, tmp_path / "halves", resume=True, **changes))
    assert whole["after"] == resumed["after"]
    before, ours, again = (
        load_file(folder / "model.safetensors")
        for folder in (checkpoint, whole["run_folder"] / "model", stopped / "model")
    )
    assert all(torch.equal(again[name], ours[name]) for name in ours)
    changed = {name for name in before if not torch.equal(before[name], ours[name])}
    assert ours.keys() == before.keys()
    assert changed == {name for name in before if "_proj.weight" in name}


@pytest.mark.parametrize("family", ["Qwen3", "GPT2"])  # whose weights are transposed
def test_saved_adapters_make_the_saved_model_of_the_base(tmp_path, family):
    base = save_checkpoint(tmp_path / "base", family=family)
    folder = starter.main(**settings(base, tmp_path, **LORA))["run_folder"]
    ids = torch.tensor([[5, 6, 7, 8]])
    load = AutoModelForCausalLM.from_pretrained
    merged, without = (load(path)(ids).logits for path in (folder / "model", base))
    adapted = peft.PeftModel.from_pretrained(load(base), folder / "adapters")
    torch.testing.assert_close(adapted(ids).logits, merged, rtol=0, atol=1e-5)
    assert (merged - without).abs().max() > 0.01
    described = json.loads((folder / "adapters" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [dict(gradient_checkpointing=True), dict(precision="bf16", frozen_in_bf16=True)]
)
def test_options_that_save_memory_keep_the_curve(checkpoint, tmp_path, changes, capsys):
    rounded = LORA | dict(precision=changes.get("precision", "float32"))
    runs = [
        starter.main(**settings(checkpoint, tmp_path, **rounded | more)) for more in ({}, changes)
    ]
    plain, saving = (scalars(run["run_folder"])["train/loss"] for run in runs)
    assert saving == pytest.approx(plain, abs=1e-6)
    assert "does not fit" not in capsys.readouterr().out
    saved = load_file(runs[1]["run_folder"] / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
