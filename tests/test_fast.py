"""support/fast.py gives the values and gradients of starter.py's plain functions, or leaves them in
place and says so; support/edits.py replaces no function that was edited."""

import copy
import random
from unittest import mock

import pytest
from conftest import make_responses

import starter  # before torch, for which it sets variables

import torch
from lab.small_models import make_model
from support import edits, fast

FAMILIES = ["qwen3", "llama (tied)", "gpt2", "phi", "gpt_oss (sinks, no window)"]


def model_named(name):
    """One of lab/small_models.py, in float64, with the head of starter.init_policy."""
    model = make_model(name).double()
    model.set_experts_implementation("eager")  # another one knows no float64
    model.lm_head.__class__ = starter.Float32Head
    return model


def make_rows(lengths=(1, 12, 5, 3, 7, 2), prompt_lengths=(1, 9, 4)):
    """A batch of random responses. Response i has prompt i modulo the number of prompts."""
    responses = make_responses(lengths, prompt_lengths, vocabulary=61)
    return starter.make_batch(responses, torch.zeros(len(responses)), "cpu")


def outputs(model, rows, ref_model=None, precision="float32"):
    """-> {name: (N,) statistic, or gradient of a sum of those that the loss may use}."""
    mask = rows["response_mask"]
    stats = starter.token_statistics(model, rows, 0.7, precision, ref_model)
    torch.manual_seed(0)
    loss = 0.0
    for name in ("log_probs", "entropy", "log_z", "kl_per_token", "kl_forward"):
        if name in stats:
            loss = loss + (torch.randn(mask.shape) * stats[name]).sum()
    loss.backward()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    assert all((values[~mask] == 0).all() for values in stats.values())
    return {name: values.detach()[mask] for name, values in stats.items()} | gradients


def assert_equal_outputs(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def attach(model, max_new_tokens=20):
    """Calls fast.attach as prepare() does. Returns the names of the functions that it put in."""
    ids = random.Random(0).choices(range(4, 61), k=12)
    fast.attach(model, None, [ids[:3], ids], starter.cfg_with(max_new_tokens=max_new_tokens))
    return {*edits.replaced_names()}


# Statistics


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_and_gradients_match_the_plain_function(family, monkeypatch):
    """Without a reference, with one that has other weights, and with one that is another kind of
    model; all logits at once, and in slices. A user has added whole numbers, and a statistic with
    another gradient."""
    shipped = starter.statistics_of_logits

    def statistics_of_logits(logits, labels, *others):
        stats = shipped(logits, labels, *others)
        stats["log_z"] = logits.logsumexp(dim=1)
        stats["rank"] = (logits > logits.gather(1, labels[:, None])).sum(dim=1)
        return stats

    monkeypatch.setattr(starter, "statistics_of_logits", statistics_of_logits)
    model = model_named(family)
    moved = copy.deepcopy(model).requires_grad_(False)
    torch.manual_seed(0)
    for parameter in moved.parameters():
        parameter += 0.1 * torch.randn_like(parameter)

    def mean_of_two(**inputs):  # it has no layers and no head
        outputs = model(**inputs)
        outputs.logits = (outputs.logits + moved(**inputs).logits) / 2
        return outputs

    references = None, moved, mean_of_two
    rows = make_rows()
    expected = [outputs(model, rows, ref_model) for ref_model in references]
    assert (expected[1]["kl_per_token"] > 1e-3).all() and expected[0]["rank"].max() > 1
    edits.replace(token_statistics=fast.token_statistics)
    on_a_gpu = set()  # prompts are read again for each row
    for logits_at_once, devices in ((1 << 24, {"cpu"}), (7 * 61, {"cpu"}), (1 << 24, on_a_gpu)):
        monkeypatch.setitem(fast.LOGITS_AT_ONCE, "cpu", logits_at_once)
        monkeypatch.setattr(fast, "PROMPTS_READ_ONCE", devices)
        for ref_model, plain in zip(references, expected):
            assert_equal_outputs(outputs(model, rows, ref_model), plain)


def test_each_prompt_is_read_once_and_logits_are_made_in_slices(monkeypatch):
    model = model_named("qwen3")
    edits.replace(**fast.FUNCTIONS)
    monkeypatch.setitem(fast.LOGITS_AT_ONCE, "cpu", 7 * 61)
    n_read, n_logits = [], []
    model.model.embed_tokens.register_forward_hook(lambda *_: n_read.append(_[2][..., 0].numel()))
    model.lm_head.register_forward_hook(lambda *_: n_logits.append(_[2].shape[-2]))
    outputs(model, make_rows())
    assert max(n_logits) == 7 and sum(n_logits) == 2 * 30  # again in the backward pass
    cfg = starter.cfg_with(max_new_tokens=2, stop_token_ids=[], precision="float32")
    for tokens_at_once in (1_000, 5 * 4):
        monkeypatch.setattr(starter, "TOKENS_AT_ONCE", tokens_at_once)
        requests = starter.requests_for([[5, 6, 7], [8, 9]], cfg, 0, 4)
        starter.rollout_with_transformers(model, requests, cfg)
    # Prompts without their last tokens, and what follows; in sampling whole ones, and a step
    assert n_read == [3 * 8, 6 * 12, 2 * 3, 8, 3, 4, 2, 4]


@pytest.mark.parametrize("head", ["of the model", "in bf16", "with adapters"])
def test_rows_with_gaps_or_without_tokens_and_other_heads_keep_values_and_gradients(head):
    """As where the text of a tool is left out of the loss."""
    rows = make_rows((12, 12, 4))
    rows["response_mask"][1, 11:14] = False
    rows["response_mask"][2] = False
    model = model_named("qwen3")
    if head == "in bf16":
        model.lm_head.to(torch.bfloat16)
    elif head == "with adapters":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, model)
    expected = outputs(model, rows)
    edits.replace(token_statistics=fast.token_statistics)
    assert_equal_outputs(outputs(model, rows), expected)
    rows["response_mask"][:] = False
    assert not starter.token_statistics(model, rows, 1.0)["log_probs"].any()


def test_gradients_that_would_miss_the_head_are_refused():
    model = model_named("qwen3")
    log_probs = fast.token_statistics(model, make_rows(), 1.0)["log_probs"]
    with pytest.raises(RuntimeError, match="needs loss.backward()"):
        torch.autograd.grad(log_probs.sum(), model.model.embed_tokens.weight)


# Which models, and edits


def steeper(hidden):
    return hidden + 0.01 * (hidden - hidden.detach())


def of_other_rows(next_logits):
    return lambda tokens: next_logits(tokens).roll(1, dims=0)


def mistaken(hidden):
    return hidden.no_such_attribute


@pytest.mark.parametrize(
    "name, function, change, reason",
    [
        ("mistral", None, None, "do not look back without end"),
        ("gpt_neo", None, None, "its log_probs differs"),  # whose windows lie in its own code
        ("qwen3", "hidden_states", steeper, "its gradient differs by 1.0%"),
        ("qwen3", "start_decoding", of_other_rows, "decodes otherwise than it reads"),
        ("qwen3", "hidden_states", mistaken, "has no attribute 'no_such_attribute'"),
    ],
)
def test_model_that_does_not_fit_keeps_the_plain_functions_with_one_line(
    name, function, change, reason, monkeypatch, capsys
):
    """change: what is done to the outputs of this function."""
    model = model_named(name)
    if function:
        shipped = getattr(fast, function)
        monkeypatch.setattr(fast, function, lambda *inputs: change(shipped(*inputs)))
    assert attach(model) == set()
    [line] = capsys.readouterr().out.splitlines()
    assert reason in line
    assert model.config._attn_implementation != "starter"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_mistake_of_support_is_not_put_down_to_the_model(monkeypatch, capsys):
    """But an error of the model's own code is, also where support/ called it."""
    monkeypatch.setattr(fast, "prompts_apart", lambda ids: ids)
    assert attach(model_named("qwen3")) == set()
    assert "has a fault, which is none of Qwen3ForCausalLM: TypeError" in capsys.readouterr().out
    monkeypatch.undo()
    model = model_named("qwen3")
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output.missing)
    with pytest.raises(AttributeError):
        model(torch.tensor([[5]]))
    monkeypatch.setattr(fast, "outputs_of", lambda *_: model.model(torch.tensor([[5]])))
    assert attach(model) == set()
    printed = capsys.readouterr().out
    assert "does not fit Qwen3ForCausalLM: 'Tensor' object has no attribute 'missing'" in printed


def read_other_ids(module, how):
    """Has a module read other ids than it is given."""

    def changed(named):
        return {**named, "input_ids": (named["input_ids"] + 1) % 61}

    forward = module.forward
    if how == "hook":

        def hook(module, arguments, named):
            return arguments, changed(named)

        module.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        module.forward = lambda **named: forward(**changed(named))


@pytest.mark.parametrize("of_model", ["policy", "reference"])
@pytest.mark.parametrize("where", ["whole", "base"])
@pytest.mark.parametrize("how", ["hook", "forward"])
def test_model_with_hooks_or_a_forward_of_its_own_runs_as_it_is(of_model, where, how, capsys):
    """Also where it gets them after the start of the run."""
    policy = model_named("qwen3")
    reference = copy.deepcopy(policy).requires_grad_(False)
    reference.lm_head.weight *= 1.1
    rows = make_rows()
    before = outputs(policy, rows, reference)
    model = policy if of_model == "policy" else reference
    read_other_ids(model.model if where == "base" else model, how)
    expected = outputs(policy, rows, reference)
    assert (expected["kl_per_token"] - before["kl_per_token"]).abs().max() > 0.01
    edits.replace(token_statistics=fast.token_statistics)
    assert_equal_outputs(outputs(policy, rows, reference), expected)
    edits.restore()
    assert attach(model) == set()
    assert "it has a forward() of its own, or hooks" in capsys.readouterr().out


@pytest.mark.parametrize("max_new_tokens", [1, 300])
def test_model_that_fits_gets_all_functions(max_new_tokens, monkeypatch):
    """Tokens that scale_logits forbids are no misfit."""
    monkeypatch.setattr(
        starter,
        "scale_logits",
        lambda logits, temperature: logits.index_fill(1, torch.arange(50, 61), -torch.inf),
    )
    model = model_named("qwen3")
    model.config.max_position_embeddings = 1024
    assert attach(model, max_new_tokens) == {*fast.FUNCTIONS}


@pytest.mark.parametrize("name", [*fast.FUNCTIONS, "response_logits"])
def test_functions_that_would_not_call_an_edited_one_are_left_out(name):
    """One is not enough: they fit each other alone."""
    with mock.patch.object(starter, name, wraps=getattr(starter, name)):
        assert attach(model_named("qwen3")) == set()


@pytest.mark.slow
def test_gradient_has_the_same_bits_each_time_with_two_threads():
    """x[which] of shared prompts would add up its gradient in any order."""
    model = model_named("qwen3")
    fast.attend_on_cpu(model)
    edits.replace(token_statistics=fast.token_statistics)
    rows = make_rows(lengths=[8] * 256, prompt_lengths=[40])
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    first, *others = [outputs(model, rows) for _ in range(6)]
    torch.set_num_threads(n_threads)
    for again in others:
        torch.testing.assert_close(again, first, rtol=0, atol=0)
