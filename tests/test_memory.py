"""Tests of support/memory.py: what a run takes, and the refusal of one that cannot fit."""
from types import SimpleNamespace

import pytest
import torch
from conftest import save_checkpoint, scalars, settings

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


def test_reference_takes_2_bytes_for_each_parameter_of_a_layer():
    config = config_of("1.7B")
    shape = memory.shape_of(config)
    parts = memory.predicted_gb(config, RESPONSES, PROMPTS, kl_penalty=True, on_cpu=False)
    assert parts["reference"] == pytest.approx((2 * shape.n_body + 4 * shape.n_head) / 1e9)


def test_processes_divide_what_does_not_depend_on_the_microbatch():
    two, four = (memory.predicted_gb(config_of("4B"), RESPONSES, PROMPTS, kl_penalty=True,
                                     on_cpu=False, ranks=ranks) for ranks in (2, 4))
    for name, size in two.items():
        divided = name in memory.FIXED
        assert four[name] == pytest.approx(size / 2 if divided else size)


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
    assert "needs about 38" in text and "24.0 GB are free on this GPU" in text
    assert "use lora_rank = 16 (about 7." in text and text.endswith("or a smaller model")


def test_experts_are_not_guessed():
    from transformers import Qwen3MoeConfig
    with pytest.raises(AttributeError, match="experts"):
        memory.shape_of(Qwen3MoeConfig())


@pytest.mark.parametrize("changes, n_ranks, free", [
    (dict(), 1, 80.0), (dict(lora_rank=16), 1, 24.0), (dict(), 2, 27.0),
    (dict(use_kl_penalty=False), 1, 35.0)])
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


# --------------------------------------------------------------------------------------------------
# What does not learn, in bf16

def model_of(family, tmp_path):
    if family != "GPT2":
        return starter.init_policy(save_checkpoint(tmp_path / "model", family=family), "cpu")[0]
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        n_embd=64, n_layer=2, n_head=2, vocab_size=40, n_positions=64, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0)).eval()


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "GPT2"])
@pytest.mark.parametrize("lora", [False, True])
def test_what_does_not_learn_gives_the_same_bits_from_bf16(family, lora, tmp_path, capsys):
    model = model_of(family, tmp_path).requires_grad_(False)
    if lora:
        pytest.importorskip("peft")
        starter.add_adapter(model, 4, seed=0)
    responses = [starter.Response([3, 4, 5], [6, 7, 8, 9], [-2.0] * 4, True),
                 starter.Response([3], [9, 8], [-2.0] * 2, True)]
    batch = starter.make_batch(responses, torch.zeros(2), "cpu")
    before = starter.response_hidden_states(model, batch, bf16=True)
    memory.store_in_bf16(model, [[3, 4], [5]], starter.PLAIN)
    assert torch.equal(starter.response_hidden_states(model, batch, bf16=True), before)
    assert capsys.readouterr().out == ""
    halved = [p.numel() for p in model.parameters() if p.dtype == torch.bfloat16]
    body = sum(p.numel() for name, p in model.named_parameters()
               if p.dim() == 2 and ".lora_" not in name and "emb" not in name
               and "wte" not in name and "wpe" not in name and "lm_head" not in name)
    assert sum(halved) >= body and model.get_output_embeddings().weight.dtype == torch.float32


def test_what_learns_stays_in_float32(tmp_path):
    policy = model_of("Qwen3", tmp_path)
    memory.store_in_bf16(policy, [[3, 4], [5]], starter.PLAIN)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}


def test_model_whose_bits_would_change_keeps_float32(tmp_path, capsys):
    model = model_of("Llama", tmp_path).requires_grad_(False)
    layer = model.model.layers[0].mlp.down_proj

    def without_autocast(x):
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.linear(x.to(layer.weight.dtype), layer.weight)

    layer.forward = without_autocast
    before = {name: p.clone() for name, p in model.named_parameters()}
    memory.store_in_bf16(model, [[3, 4], [5]], starter.PLAIN)
    assert "LlamaForCausalLM stay in float32: its hidden states change" in capsys.readouterr().out
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("changes", [dict(use_kl_penalty=True, kl_coef=0.1),
                                     dict(lora_rank=4, learning_rate=1e-2)])
def test_run_in_bf16_has_the_same_bits_with_and_without_the_saving(checkpoint, tmp_path,
                                                                  monkeypatch, changes):
    if "lora_rank" in changes:
        pytest.importorskip("peft")
    runs = []
    for saves in (True, False):
        if not saves:
            monkeypatch.setattr(memory, "store_in_bf16", lambda *_: None)
        runs.append(starter.main(**settings(checkpoint, tmp_path, bf16=True, n_train_steps=3,
                                            **changes)))
    assert runs[0]["after"] == runs[1]["after"]
    first, second = (scalars(run["run_folder"]) for run in runs)
    for tag in ("train/loss", "train/grad_norm", "train/kl_penalty"):
        assert first.get(tag) == second.get(tag), tag
