"""Popular families of models, small and with random weights, are computed as their own forward pass
computes them: by starter.py alone, with the faster functions of support/, and with adapters.
lab/architectures.py, whose checks these are, goes through all causal models of transformers."""

import pytest

import starter  # before torch, for which it sets variables

import torch
from lab import architectures as A
from lab.small_models import make_model
from support import edits, models

# support/fast.py fits attention over everything before.
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
    "deepseek_v3",
    "granite",  # behind whose head something scales the logits, as of the next, or caps them
    "cohere",
    "gemma2 (caps, no window)",
]
OTHERS = [
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "qwen3_5_text",
    "mamba",
    "mamba2",
    "lfm2",
    "falcon_h1",
    "llama4_text",
    "gemma3n_text (windows alone)",
]

# While editing, a few are enough.
QUICK = ["llama", "qwen3_moe", "gemma2"]
slow = pytest.mark.slow
EACH_FAMILY = pytest.mark.parametrize(
    "name",
    [*QUICK, *[pytest.param(name, marks=slow) for name in FITTING + OTHERS if name not in QUICK]],
)


@EACH_FAMILY
@pytest.mark.parametrize("mode", A.MODES)
def test_family_is_right(mode, name):
    """Log-probs, gradients, rollouts and the saved model, alone, with support/, with adapters and
    with gradient checkpointing. Of the gradients of adapters tests/test_lora.py."""
    assert A.examine(name, mode) == ("right", "")
    is_fast = mode in ("support", "LoRA") and name in FITTING
    assert ("token_statistics" in edits.replaced_names()) == is_fast


@EACH_FAMILY
def test_family_is_right_within_its_rounding_in_bf16(name, tmp_path):
    case = A.make_case(name, tmp_path)
    A.attach_fast(case)
    exact, rounded = (
        starter.token_statistics(case.policy, case.batch, 1.0, precision)["log_probs"]
        for precision in ("float32", "bf16")
    )
    assert (exact - rounded)[case.batch["response_mask"]].abs().mean() < 0.2


FUTURE = "what stands after a token changes its log-probs"


@pytest.mark.parametrize(
    "name, words",
    [
        ("bert (looks ahead)", FUTURE),
        ("deepseek_v32", FUTURE),
        ("deepseek_v4", FUTURE),  # in long rows alone, like the next
        ("hy_v4", FUTURE),
        ("xlm", FUTURE),
        ("llama (rope longrope, rows on both sides)", FUTURE),
        ("mllama", "no model of text alone"),
        ("rwkv (weights rescaled for sampling)", "its forward pass changes its weights"),
    ],
)
def test_model_that_would_be_trained_wrongly_is_refused(name, words):
    verdict, sentence = A.examine(name, "plain")
    assert verdict == "refused" and words in sentence


def test_long_rows_are_read_whole_whatever_the_vocabulary(monkeypatch):
    """Of this model positions change beyond 16 tokens, which responses alone reach. It is refused
    also where there is no room for the logits of a whole row."""
    monkeypatch.setattr(starter, "LOGITS_AT_ONCE", 1)
    policy = make_model("llama (rope longrope, rows on both sides)")
    cfg = starter.cfg_with(max_new_tokens=40, precision="float32")
    with pytest.raises(starter.InputError, match=FUTURE):
        models.check_reading(policy, [[5, 6, 7], [8, 9, 5, 4]], cfg)


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
def test_model_that_decodes_otherwise_than_it_reads_samples_without_a_cache(name, capsys):
    assert A.examine(name, "plain") == ("right", "")
    assert "decodes otherwise than it reads: it samples without a cache" in capsys.readouterr().out


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
        assert check(case).abs().max() > 3 * A.CHECKS[check]


def test_model_saved_without_its_buffers_is_refused(monkeypatch):
    """The bias of a router is a weight, too, though no parameter."""
    parameters = torch.nn.Module.named_parameters
    monkeypatch.setitem(starter.MECHANICS, "weights_by_name", parameters)
    verdict, where = A.examine("deepseek_v3", "plain")
    assert verdict == "wrong" and "gate.e_score_correction_bias" in where
