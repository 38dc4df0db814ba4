"""support/fast.py gives the values and gradients of starter.py's plain functions, or leaves them in
place and says so; support/edits.py replaces no function that was edited."""
import copy
import functools
import random
from types import SimpleNamespace

import pytest

import starter  # before torch, for which it sets variables

import torch
import test_starter
from lab.small_models import make_model
from starter import Response
from support import edits, fast, memory

FAST = {"decode", "rows_to_decode", "draw_from", "token_statistics"}
FAMILIES = ["qwen3", "llama (tied)", "gpt2", "phi", "granite", "nanochat"]


def model_named(name):
    """One of lab/small_models.py, loaded as starter.init_policy does it."""
    model = make_model(name)
    model.lm_head.__class__ = starter.Float32Head
    return model


def moved_copy(model):
    """A reference that differs from the policy in every weight."""
    ref_model = copy.deepcopy(model).requires_grad_(False)
    for i, parameter in enumerate(ref_model.parameters()):
        parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    return ref_model


def random_ids(rng, n):
    return rng.choices(range(4, 61), k=n)


def make_rows(lengths=(1, 12, 5, 3, 7, 2), prompt_lengths=(1, 9, 4), seed=0):
    """A batch of random responses. Response i has prompt i modulo the number of prompts."""
    rng = random.Random(seed)
    prompts = [random_ids(rng, n) for n in prompt_lengths]
    responses = [Response(prompts[i % len(prompts)], random_ids(rng, n), [-3.0] * n, True)
                 for i, n in enumerate(lengths)]
    return starter.make_batch(responses, torch.zeros(len(responses)), "cpu")


def outputs(model, rows, ref_model=None, bf16=False):
    """-> (4, N) statistics, {name: gradient} of a sum of all that have one."""
    mask = rows["response_mask"]
    statistics = starter.token_statistics(model, rows, 0.7, bf16, ref_model)
    assert all((values[~mask] == 0).all() for values in statistics)
    weights = torch.randn(2, *mask.shape, generator=torch.Generator().manual_seed(0))
    of_sample = statistics.log_probs + 0.5 * statistics.entropy
    (weights[0] * of_sample + weights[1] * statistics.exact_kl)[mask].sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return torch.stack([x.detach()[mask] for x in statistics]), gradients


def assert_equal_outputs(ours, expected):
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=5e-5)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-4, msg=name,
                                   atol=1e-5 * gradient.abs().max().item() + 1e-5)


def settings(**changes):
    return starter.cfg_with(**dict(temperature=0.9, max_new_tokens=20) | changes)


def attach(model, **changes):
    """Calls fast.attach as prepare() does. Returns the names of the functions that it put in."""
    problems = [{"prompt_ids": random_ids(random.Random(n), n)} for n in (3, 12)]
    fast.attach(model, None, starter.Problems(problems, [], []), settings(**changes))
    return {*starter.MECHANICS}


# Statistics

@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_and_gradients_match_the_plain_function(family, monkeypatch):
    """With and without a reference, which differs; all logits at once, and in slices."""
    model = model_named(family)
    references = None, moved_copy(model)
    rows = make_rows()
    expected = [outputs(model, rows, ref_model) for ref_model in references]
    assert (expected[1][0][1] > 1e-3).all()  # the exact KL
    starter.MECHANICS["token_statistics"] = fast.token_statistics
    for attention in ("the model's own", "starter"):  # as on a GPU, and on a CPU
        for logits_at_once in (1 << 24, 7 * 61):
            monkeypatch.setitem(fast.LOGITS_AT_ONCE, "cpu", logits_at_once)
            for ref_model, plain in zip(references, expected):
                assert_equal_outputs(outputs(model, rows, ref_model), plain)
        fast.mechanics_for(model)
        fast.mechanics_for(references[1])
    n_read, n_logits = [], []
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: n_read.append(inputs[0].numel()))
    model.lm_head.register_forward_hook(
        lambda module, inputs, output: n_logits.append(len(output)))
    outputs(model, rows)
    assert n_read == [6 * 12 + 3 * 8]  # responses, and each prompt once without its last token
    assert max(n_logits) == 7 and sum(n_logits) == 2 * 30  # again in the backward pass


@pytest.mark.parametrize("bf16, chosen, precision", [
    (False, "none", "none"), (True, "none", "tf32"), (True, "ieee", "ieee")])
def test_gpu_multiplies_the_head_alone_in_tf32_where_the_layers_are_in_bf16(
        bf16, chosen, precision, monkeypatch):
    """Forward and backward. In RoPE's angles TF32 would round positions."""
    def now(*_):
        return matmul.fp32_precision

    matmul, model, seen, elsewhere = torch.backends.cuda.matmul, model_named("qwen3"), [], []
    model.lm_head.register_forward_hook(lambda *_: seen.append(now()))
    model.lm_head.weight.register_hook(lambda gradient: seen.append(now()))
    model.model.rotary_emb.register_forward_hook(lambda *_: elsewhere.append(now()))
    monkeypatch.setitem(fast.LOGITS_AT_ONCE, "cpu", 30 * 61)
    monkeypatch.setitem(starter.MECHANICS, "token_statistics", fast.token_statistics)
    matmul.fp32_precision = chosen
    try:
        outputs(model, make_rows((40,)), bf16=bf16)
        elsewhere.append(now())
    finally:
        matmul.fp32_precision = "none"
    # Two slices: forward, and in the backward pass again, and back; then the sum of the gradients
    assert seen == [precision] * 6 + [chosen]
    assert {*elsewhere} == {chosen}


def test_bf16_and_long_rows_stay_within_the_rounding_of_the_plain_function():
    """Rows of 300 tokens take torch's fused attention, short ones do not."""
    model = model_named("qwen3")
    rows = make_rows((300, 40, 300), prompt_lengths=(11, 5))
    exact, rounded = (outputs(model, rows, None, bf16) for bf16 in (False, True))
    attach(model)
    assert_equal_outputs(outputs(model, rows), exact)
    for ours, plain in ((outputs(model, rows, None, True), rounded),
                        (outputs(model, make_rows(), None, True), outputs(model, make_rows()))):
        assert 0 < (ours[0] - plain[0]).abs().mean() < 0.05


# Which models, and edits

def steeper(*inputs, shipped=fast.hidden_states):
    hidden = shipped(*inputs)
    return hidden + 0.01 * (hidden - hidden.detach())


def with_wrong_kl(*inputs, shipped=fast.token_statistics):
    statistics = shipped(*inputs)
    return statistics._replace(exact_kl=1.01 * statistics.exact_kl)


@pytest.mark.parametrize("name, planted, reason", [
    ("mistral", {}, "do not look back without end"),
    ("bloom", {}, "its attention is code of its own"),
    ("gpt_oss (sinks, no window)", {}, "its log_probs differs"),
    ("gemma2 (caps, no window)", {}, "its log_probs differs"),
    ("qwen3", {"logits_from": lambda model, hidden: 1.01 * model.lm_head(hidden)},
     "its log_probs differs"),
    ("qwen3", {"hidden_states": steeper}, "its gradient of model.embed_tokens.weight"),
    ("qwen3", {"token_statistics": with_wrong_kl}, "its exact_kl differs by 1.0%"),
    ("qwen3", {"group_size_of": len}, "its logit while sampling differs"),
    ("qwen3", {"read_prompts": lambda *inputs: 1 / 0}, "ZeroDivisionError"),
])
def test_model_that_does_not_fit_keeps_the_plain_functions_with_one_line(
        name, planted, reason, monkeypatch, capsys):
    """The measure is the model's own attention: that of fast.py drops sinks and caps anywhere."""
    model = model_named(name).train()
    model.set_attn_implementation("eager")
    for name, function in planted.items():
        monkeypatch.setattr(fast, name, function)
    assert attach(model) == set()
    line, = capsys.readouterr().out.splitlines()
    assert line.startswith(f"support/fast.py does not fit {type(model).__name__}: ")
    assert reason in line and line.endswith("which takes more time and memory")
    assert model.config._attn_implementation == "eager" and model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("max_new_tokens", [1, 300])
def test_model_that_fits_gets_all_functions(max_new_tokens, monkeypatch, capsys):
    """Tokens that scale_logits forbids are no misfit."""
    monkeypatch.setattr(starter, "scale_logits", lambda logits, temperature: torch.cat(
        [logits[:, :50], torch.full_like(logits[:, 50:], -torch.inf)], dim=1) / temperature)
    model = model_named("qwen3")
    assert attach(model, max_new_tokens=max_new_tokens) == FAST
    assert capsys.readouterr().out.startswith("support.fast runs decode, token_statistics, ")
    assert model.config._attn_implementation == "starter"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_shipped_fingerprints_are_those_of_starter():
    found = {name: edits.fingerprint(getattr(starter, name)) for name in edits.SHIPPED}
    assert found == edits.SHIPPED, (
        "starter.py has changed: see that support/ still computes the same, then put what "
        "`python -m support.edits` prints into support/edits.py")


@pytest.mark.parametrize("name, partner", [("decode", "rows_to_decode"),
                                           ("token_statistics", "token_statistics")])
def test_edited_function_runs_and_the_log_says_so(name, partner, monkeypatch, capsys):
    """Nor is the one replaced that fits to the function of support/ alone."""
    def edited(*inputs):
        return original(*inputs)

    original = getattr(starter, name).__wrapped__
    edited.__name__ = name
    monkeypatch.setattr(starter, name, starter.mechanics(edited))
    assert attach(model_named("qwen3")) == FAST - {name, partner}
    assert f"{name} was edited: it runs, and not the one of support/" in capsys.readouterr().out


@pytest.mark.parametrize("edited", [None, "compute_loss", "grpo_microbatch_step", "advantages"])
def test_rows_that_are_not_counted_have_no_forward_pass_while_the_loss_is_as_shipped(
        edited, monkeypatch, capsys):
    """Gradients and means are those of the plain function, also where train gives advantages to
    such rows after the cut."""
    model = model_named("qwen3")
    counted = torch.tensor([[True], [True], [False], [False], [True], [True]])
    batch = make_rows()
    batch["advantages"] = torch.tensor([[1.0], [-0.5], [0.0], [0.0], [0.5], [0.0]])
    batch["weights"] = starter.AVERAGES["dapo"](batch["response_mask"].float(), 12)
    in_means = (batch["response_mask"] & counted).float()
    batch["mean_weights"] = in_means / in_means.sum()
    if edited == "advantages":
        batch["advantages"] = torch.tensor([[1.0], [-0.5], [0.7], [0.0], [0.5], [0.0]])
    n_read = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: n_read.append(len(inputs[0])))

    def step():
        n_read.clear()
        microbatches = [{name: tensor[rows] for name, tensor in batch.items()}
                        for rows in torch.arange(6).split(2)]
        for epoch in range(2):
            means = starter.accumulate_gradients(model, microbatches, settings())
        assert len(microbatches) == 3
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return means, gradients

    expected = step()
    assert expected[0]["ratio_mean"] == pytest.approx(1.0) and n_read == [2, 2, 2] * 2
    is_function = hasattr(starter, edited or "")
    if is_function:
        monkeypatch.setattr(starter, edited, functools.wraps(getattr(starter, edited))(
            functools.partial(getattr(starter, edited))))
    memory.attach(SimpleNamespace(state={}, cfg=starter.cfg_with()))
    found = step()
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
    assert n_read == ([2, 2, 2] if edited else [2, 2]) * 2
    assert capsys.readouterr().out == (
        f"edited: {edited}; so rows without an advantage have a forward pass, too\n" * is_function
        + "With epochs_per_rollout = 1 the ratio is 1, and what clips it does nothing\n"
        * (edited == "compute_loss"))


def test_comments_and_docstrings_are_no_edits(monkeypatch):
    def fingerprint(source):
        monkeypatch.setattr(edits.inspect, "getsource", lambda function: source)
        return edits.fingerprint(edits.is_shipped)

    shipped = fingerprint("def f(a):\n    return a + 1\n")
    same = fingerprint('def f(a):\n    "Adds."\n    # one\n    return (a +\n        1)  # one\n')
    assert same == shipped != fingerprint("def f(a):\n    return a + 2\n")


@pytest.mark.parametrize("vocabulary", [5, 511, 512, 3001])
def test_draw_from_inverts_the_cumulative_distribution(monkeypatch, vocabulary):
    monkeypatch.setitem(starter.MECHANICS, "draw_from", fast.draw_from)
    test_starter.test_draw_tokens_inverts_the_cumulative_distribution(vocabulary)
