"""Tests of support/memory.py: what a run takes, and the refusal of one that cannot fit."""
from types import SimpleNamespace

import pytest
import torch
from conftest import settings

import starter

memory = pytest.importorskip("support.memory")
bench = pytest.importorskip("lab.bench")

RESPONSES = {"all": 128 * 256, "longest": 256}
PROMPTS = {"all": 16 * 150, "longest": 150}


def config_of(name):
    return bench.model_config(**bench.TABLE_SIZES[name])


@pytest.fixture(params=["Qwen3", "Llama"])
def config(request):
    import transformers
    return getattr(transformers, f"{request.param}Config")(
        vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=request.param == "Qwen3")


def test_parameters_are_counted_as_torch_counts_them(config):
    from transformers import AutoModelForCausalLM
    shape = memory.shape_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    n = sum(parameter.numel() for parameter in model.parameters())
    assert shape.n_body + shape.n_head == pytest.approx(n, rel=0.01)  # but for a few norms


def test_parameters_of_adapters_are_counted_as_torch_counts_them(config):
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_config(config)
    starter.add_adapter(model, 16, seed=0)
    n = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert memory.n_of_adapters(memory.shape_of(config), 16) == n


def test_adapters_take_the_place_of_gradients_moments_and_reference():
    """By hand: 16 bytes for each parameter of the adapters, 2 for each frozen one of the body, 4
    for the embedding."""
    config = config_of("1.7B")
    shape = memory.shape_of(config)
    parts = memory.predicted_gb(config, RESPONSES, PROMPTS, kl_penalty=True, on_cpu=False,
                                lora_rank=16)
    fixed = sum(parts[name] for name in memory.FIXED)
    by_hand = 2 * shape.n_body + 4 * shape.n_head + 16 * memory.n_of_adapters(shape, 16)
    assert fixed == pytest.approx(by_hand / 1e9)
    full = memory.predicted_gb(config, RESPONSES, PROMPTS, kl_penalty=True, on_cpu=False)
    assert fixed < 0.3 * sum(full[name] for name in memory.FIXED)


def test_processes_divide_what_does_not_depend_on_the_microbatch():
    one, four = (memory.predicted_gb(config_of("4B"), RESPONSES, PROMPTS, kl_penalty=True,
                                     on_cpu=False, ranks=ranks) for ranks in (1, 4))
    for name, size in one.items():
        divided = name in memory.FIXED
        assert four[name] == pytest.approx(size / 4 if divided else size)


def cfg_of(**changes):
    given = dict(max_new_tokens=256, bf16=True, use_kl_penalty=True, gradient_checkpointing=False,
                 device=torch.device("cuda"), lora_rank=0, engine="transformers")
    return SimpleNamespace(**given | changes)


@pytest.fixture
def saved(tmp_path):
    config = config_of("1.7B")
    config.save_pretrained(tmp_path)
    return tmp_path


def test_run_that_cannot_fit_is_refused_with_what_would_fit(saved):
    with pytest.raises(starter.InputError) as refusal:
        memory.check_fits(saved, cfg_of(), 1, free=24.0)
    text = str(refusal.value)
    assert "needs about 4" in text and "24.0 GB are free on this GPU" in text
    assert "use lora_rank = 16 (about 6." in text and text.endswith("or a smaller model")


def test_experts_are_not_guessed():
    from transformers import Qwen3MoeConfig
    with pytest.raises(AttributeError, match="experts"):
        memory.shape_of(Qwen3MoeConfig())


@pytest.mark.parametrize("changes, n_ranks, free", [
    (dict(), 1, 80.0), (dict(lora_rank=16), 1, 24.0), (dict(), 2, 26.0),
    (dict(use_kl_penalty=False), 1, 34.0)])
def test_run_that_may_fit_is_not_refused(saved, changes, n_ranks, free):
    memory.check_fits(saved, cfg_of(**changes), n_ranks, free)


def test_model_that_the_formula_does_not_know_is_not_refused(tmp_path):
    memory.check_fits(tmp_path, cfg_of(), 1, free=0.0)
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "vocab_size": 8}')
    memory.check_fits(tmp_path, cfg_of(), 1, free=0.0)


def test_refusal_comes_before_the_model_is_loaded(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_gb", lambda device: 0.1)
    monkeypatch.setattr(starter, "init_policy", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(starter.InputError, match="0.1 GB are free on this machine; use a smaller"):
        starter.main(**settings(checkpoint, tmp_path))
    assert not list(tmp_path.iterdir())
