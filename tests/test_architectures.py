"""Popular families of models, small and with random weights, are computed as their own forward pass
computes them: by starter.py alone, with the faster functions of support/, and with adapters.
lab/architectures.py, whose checks these are, goes through all causal models of transformers."""

import re

import pytest

import starter  # before torch, for which it sets variables

import torch
from lab import architectures as A
from support import edits, lora, models

# support/fast.py fits attention over everything before, and a head that neither scales nor caps.
FITTING = [
    "opt (other width of embedding)",
    "llama",
    "qwen2 (tied)",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "phi3 (no window)",
    "olmo2",
    "gemma (tied)",
    "gpt2 (dropout)",
    "llama (rope yarn)",
    "gpt_oss (sinks, no window)",
    "bloom",
    "fuyu",
]
OTHERS = [
    "granite",
    "cohere",
    "gemma2 (caps, no window)",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_5_text",
    "mamba",
    "mamba2",
    "lfm2",
    "falcon_h1",
    "llama4_text",
    "gemma3n_text (windows alone)",
]

# While editing, a few are enough.
QUICK = ["llama", "qwen3_moe", "gemma2", "mamba", "deepseek_v3"]
slow = pytest.mark.slow
EACH_FAMILY = pytest.mark.parametrize(
    "name",
    [*QUICK, *[pytest.param(name, marks=slow) for name in FITTING + OTHERS if name not in QUICK]],
)


def attach(case):
    """Returns whether support/fast.py fits."""
    A.attach_fast(case)
    return "token_statistics" in edits.OWN


def error_of(check, case):
    return check(case).abs().max().item()


def assert_right(case, checks=tuple(A.CHECKS)):
    for check in checks:
        assert error_of(check, case) <= A.CHECKS[check], check.__name__


@EACH_FAMILY
def test_family_is_right_by_the_plain_functions(name, tmp_path):
    assert_right(A.make_case(name, tmp_path))


@EACH_FAMILY
def test_family_is_right_with_support(name, tmp_path):
    """In float32, with gradient checkpointing, and within its rounding in bf16."""
    case = A.make_case(name, tmp_path)
    assert attach(case) == (name in FITTING)
    mask = case.batch["response_mask"]
    exact, rounded = (
        starter.token_statistics(case.policy, case.batch, 1.0, precision)
        for precision in ("float32", "bf16")
    )
    assert (exact["log_probs"] - rounded["log_probs"])[mask].abs().mean() < 0.2
    if case.policy.supports_gradient_checkpointing:
        case.policy.gradient_checkpointing_enable()
        models.turn_dropout_off(case.policy)
        starter.train_checkpointed_layers(case.policy)
        assert_right(case, (A.log_probs, A.gradients))
        case.policy.zero_grad()
        case.own.zero_grad()
    assert_right(case)


@EACH_FAMILY
def test_family_is_right_with_adapters(name, tmp_path):
    """The saved model, too, after its adapters have moved. Of the gradients tests/test_lora.py."""
    pytest.importorskip("peft")
    case = A.make_case(name, tmp_path)
    cfg = starter.cfg_with(lora_rank=4, use_kl_penalty=True)
    reference = lora.add_adapters(case.policy, cfg)
    assert attach(case) == (name in FITTING)
    assert_right(case, [check for check in A.CHECKS if check is not A.gradients])
    own = starter.token_statistics(case.own, case.batch, 1.0)["log_probs"]
    moved = starter.token_statistics(case.policy, case.batch, 1.0, "float32", reference)
    assert (moved["log_probs"] - own).abs().max() > 0.01
    torch.testing.assert_close(moved["kl_per_token"] > 0, case.batch["response_mask"])


@pytest.mark.parametrize(
    "name, words",
    [
        ("bert (looks ahead)", "what stands after a token changes its log-probs"),
        ("deepseek_v32", "what stands after a token changes its log-probs"),
        ("deepseek_v4", "what stands after a token changes"),  # in long rows alone, like the next
        ("hy_v4", "what stands after a token changes"),
        ("xlm", "what stands after a token changes"),
        ("llama (rope longrope, rows on both sides)", "what stands after a token changes its"),
        ("mllama", "no model of text alone"),
        ("rwkv (weights rescaled for sampling)", "its forward pass changes its weights"),
    ],
)
def test_model_that_would_be_trained_wrongly_is_refused(name, words, tmp_path):
    with pytest.raises(starter.InputError, match=re.escape(words)):
        A.make_case(name, tmp_path)


def test_layer_that_is_random_in_train_mode_is_refused_with_checkpointing_alone(tmp_path):
    case = A.make_case("llama", tmp_path)
    layer = case.policy.model.layers[0]
    layer.register_forward_hook(lambda module, args, out: out + 0.5 * module.training)
    with pytest.raises(starter.InputError, match="with gradient_checkpointing its log-probs"):
        A.checkpoint_layers(case)
    models.check_reading(case.policy, case.prompts, A.CFG)
    assert not any(module.training for module in case.policy.modules())


@slow
@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_model_that_decodes_otherwise_than_it_reads_samples_without_a_cache(name, tmp_path, capsys):
    case = A.make_case(name, tmp_path)
    assert "decodes otherwise than it reads: it samples without a cache" in capsys.readouterr().out
    assert_right(case)


# What init_policy makes of a checkpoint


def test_policy_is_float32_whatever_the_checkpoint_holds(checkpoint, tmp_path):
    model, tokenizer = starter.init_policy(checkpoint, "cpu")
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy, _ = starter.init_policy(tmp_path, "cpu")
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(checkpoint):
    policy, tokenizer = starter.init_policy(checkpoint, "cpu")
    for listed, expected in ((None, [1]), (3, [1, 3]), ([9, 1, 3], [1, 3, 9])):
        policy.generation_config.eos_token_id = listed
        assert starter.find_stop_tokens(policy, tokenizer) == expected


# The checks see faults


def test_checks_see_weights_that_differ(tmp_path):
    case = A.make_case("llama", tmp_path)
    case.own.lm_head.weight.data *= 1.01
    for check in (A.log_probs, A.gradients, A.rollout):
        assert error_of(check, case) > 3 * A.CHECKS[check]


def test_model_saved_without_its_buffers_is_refused(tmp_path, monkeypatch):
    """The bias of a router is a weight, too, though no parameter."""
    case = A.make_case("deepseek_v3", tmp_path)
    monkeypatch.setattr(starter, "weights_by_name", lambda policy: policy.named_parameters())
    with pytest.raises(starter.InputError, match="gate.e_score_correction_bias"):
        A.saved(case)
