"""A checkpoint becomes a policy and a tokenizer, and problems become prompts."""
from types import SimpleNamespace

import pytest

import starter
from conftest import make_tokenizer, save_checkpoint

import torch

CPU = torch.device("cpu")
TOKENIZER = make_tokenizer()


@pytest.fixture
def policy(checkpoint):
    return starter.init_policy(checkpoint, CPU)[0]


def test_policy_is_float32_whatever_the_checkpoint_holds(tmp_path):
    model = starter.init_policy(save_checkpoint(tmp_path / "model"), CPU)[0]
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    TOKENIZER.save_pretrained(tmp_path / "bf16")
    policy, _ = starter.init_policy(tmp_path / "bf16", CPU)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}


@pytest.mark.parametrize("family, changes", [
    ("Qwen3", dict(attention_dropout=0.5)), ("GPT2", dict(resid_pdrop=0.5, embd_pdrop=0.5))])
def test_dropout_of_a_checkpoint_is_off_in_train_mode(tmp_path, family, changes):
    """In Qwen3 it is a number, in GPT2 a module."""
    folder = save_checkpoint(tmp_path / "m", family=family, **changes)
    policy, _ = starter.init_policy(folder, CPU)
    ids = torch.tensor([TOKENIZER("a b c")["input_ids"]])
    assert torch.equal(policy.train()(ids).logits, policy.eval()(ids).logits)


def test_head_multiplies_in_float32_under_autocast(policy):
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        logits = policy.lm_head(hidden)
    assert torch.equal(logits, hidden @ policy.lm_head.weight.T)


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(policy):
    tokenizer = SimpleNamespace(eos_token_id=7)
    for listed, expected in ((None, (7,)), (3, (3, 7)), ([9, 7, 3], (3, 7, 9))):
        policy.generation_config.eos_token_id = listed
        assert starter.find_stop_tokens(policy, tokenizer) == expected
