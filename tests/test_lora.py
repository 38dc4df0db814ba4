"""Tests of lora_rank: adapters of peft in the policy, which is its own reference without them."""

import copy
import shutil

import pytest
import torch
from conftest import make_step, save_checkpoint, scalars, settings
from lab import architectures as A
from lab.small_models import make_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import starter
from support import edits, fast, lora

peft = pytest.importorskip("peft")


def add_adapters(policy):
    """Random numbers in both matrices of each adapter: at the start B is 0. Returns the policy
    without its adapters."""
    cfg = starter.cfg_with(lora_rank=4, use_kl_penalty=True)
    reference = lora.add_adapters(policy, cfg)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1)
    return reference


# gpt2's weights are transposed; falcon's layers are of a class of its own
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "falcon"])
@pytest.mark.parametrize("is_fast", [False, True])
def test_log_probs_and_gradients_are_those_of_pefts_own_forward_pass(family, is_fast, tmp_path):
    case = A.make_case(family, tmp_path)
    add_adapters(case.policy)
    assert A.log_probs(case).abs().max() > 0.01  # the adapters do something
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    case.own = peft.get_peft_model(case.own, config).eval()
    adapters = {
        f"base_model.model.{name}": value
        for name, value in case.policy.state_dict().items()
        if ".lora_" in name
    }
    assert adapters and not case.own.load_state_dict(adapters, strict=False).unexpected_keys
    if is_fast:
        A.attach_fast(case)
    assert ("token_statistics" in edits.replaced_names()) == is_fast
    assert A.log_probs(case).abs().max() <= 1e-5
    assert A.gradients(case).max() <= 1e-5


def test_weight_that_two_layers_share_gets_no_adapter():
    """As in Zamba: it could not be saved with two."""
    model = make_model("qwen3")
    first, second = (layer.mlp.down_proj for layer in model.model.layers)
    second.weight = first.weight
    names = lora.layers_to_adapt(model)
    assert len(names) == 2 * 6 and not any("down_proj" in name for name in names)


@pytest.mark.parametrize("estimator", ["k3", "exact"])
@pytest.mark.parametrize("is_fast", [False, True])
def test_policy_without_its_adapters_is_the_reference(is_fast, estimator, tmp_path):
    """Loss and gradients are those with a copy of the model before training."""
    case = A.make_case("qwen3", tmp_path)
    policy = case.policy
    start = copy.deepcopy(policy).requires_grad_(False)
    cfg = starter.cfg_with(use_kl_penalty=True, kl_estimator=estimator, precision="float32")
    reference = add_adapters(policy)
    if is_fast:
        fast.attend_on_cpu(policy)
        fast.attend_on_cpu(start)
        edits.replace(**fast.FUNCTIONS)
    steps = []
    for ref_model in (start, reference):
        rows = make_step(case.responses)
        loss, metadata = starter.grpo_microbatch_step(policy, rows, cfg, ref_model, 0.1)
        steps.append([loss, *(p.grad for p in policy.parameters() if p.requires_grad)])
        policy.zero_grad()
        assert metadata["kl_per_token"] > 1e-4
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-5, atol=1e-7)
    own = {parameter.data_ptr() for parameter in policy.parameters()}
    assert own >= {parameter.data_ptr() for parameter in reference.parameters()}


# Runs

LORA = dict(lora_rank=4, use_kl_penalty=True, kl_coef=0.1, learning_rate=1e-2)


def assert_saved_adapters_make_the_saved_model(base, folder):
    ids = torch.tensor([[5, 6, 7, 8]])
    load = AutoModelForCausalLM.from_pretrained
    merged, without = (load(path)(ids).logits for path in (folder / "model", base))
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapters")
    torch.testing.assert_close(adapted(ids).logits, merged, rtol=0, atol=1e-5)
    assert (merged - without).abs().max() > 0.01


@pytest.mark.slow
def test_saved_adapters_of_transposed_weights_make_the_saved_model(tmp_path):
    base = save_checkpoint(tmp_path / "base", family="GPT2")
    folder = starter.main(**settings(base, tmp_path, **LORA))["run_folder"]
    assert_saved_adapters_make_the_saved_model(base, folder)


@pytest.mark.slow
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
    torch.testing.assert_close(again, ours, rtol=0, atol=0)
    changed = {name for name in before if not torch.equal(before[name], ours[name])}
    assert ours.keys() == before.keys()
    assert changed == {name for name in before if "_proj.weight" in name}
    assert_saved_adapters_make_the_saved_model(checkpoint, whole["run_folder"])


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


def test_linear_layer_that_takes_other_inputs_gets_no_adapter():
    """As the grouped layers of DeepSeek-V4."""

    class Grouped(torch.nn.Linear):
        def forward(self, groups):
            return torch.einsum("bgi,oi->bgo", groups, self.weight)

    policy = make_model("qwen3")
    policy.model.layers[0].self_attn.o_proj.__class__ = Grouped
    names = lora.layers_to_adapt(policy)
    assert "model.layers.1.self_attn.o_proj" in names
    assert "model.layers.0.self_attn.o_proj" not in names
