"""A fault in support/'s mechanics is found in the next step that is compared. From that step on the
run is starter.py's alone, to the bit."""

import functools
import itertools
import math
import random
import shutil

import numpy
import pytest
import torch
from conftest import make_tokenizer, scalars, settings, variety
from lab.small_models import make_model

import starter
from support import edits, fast, opinion

NOT_COMPARED = ("time/", "mem/", "0_headline/")
FIRST, FOUND, LAST = 3, 10, 12  # step of the fault, step that is compared next, last step
LAST_RIGHT = 2 if edits.edited_names() else 1


@pytest.fixture
def now(monkeypatch):
    """Returns a function that gives the step which the run is in."""
    runs = []
    attach = opinion.attach

    def attach_and_keep(run, models):
        runs.append(run)
        attach(run, models)

    monkeypatch.setattr(opinion, "attach", attach_and_keep)
    return lambda: runs[-1].state["step"] + 1


def spoil(monkeypatch, now, name, change):
    """Has change(output of fast's function of this name) in its place from step FIRST on."""
    right = fast.FUNCTIONS[name]

    @functools.wraps(right)
    def spoilt(*inputs, **named):
        output = right(*inputs, **named)
        return change(output) if now() >= FIRST else output

    monkeypatch.setitem(fast.FUNCTIONS, name, spoilt)


def scaled_log_probs(stats):
    return {**stats, "log_probs": 1.001 * stats["log_probs"]}


def cut_from_the_graph(stats):
    return {**stats, "kl_per_token": stats["kl_per_token"].detach()}


def hotter(next_logits):
    return lambda tokens: next_logits(tokens) / 1.01


def head_alone(model, hidden):
    return model.get_output_embeddings()(hidden)


EXACT = dict(use_kl_penalty=True, kl_estimator="exact", kl_coef=1.0)
FAULTS = {  # name: mechanic, what is done to its output, settings, number that differs
    "log-probs times 1.001": ("token_statistics", scaled_log_probs, {}, "log_probs"),
    "a statistic without a gradient": ("token_statistics", cut_from_the_graph, EXACT, "gradient"),
    "a hotter sampler": ("start_decoding", hotter, {}, "log-probs of the sampler"),
}


def run_alone_from(checkpoint, folder, tmp_path, given, monkeypatch):
    """Goes on from a run's checkpoint before FOUND without support/. Returns what it logs."""
    alone = tmp_path / "alone"
    shutil.copytree(folder, alone)
    for path in [*alone.glob("events*"), alone / f"checkpoint_{LAST:08d}.pt"]:
        path.unlink()
    monkeypatch.setattr(starter, "find_support", lambda: None)
    return scalars(starter.main(**given, resume=str(alone))["run_folder"])


def assert_alone_from_here_on(given, folder, checkpoint, tmp_path, monkeypatch):
    expected = run_alone_from(checkpoint, folder, tmp_path, given, monkeypatch)
    found = scalars(folder)
    names = [name for name in expected if not name.startswith(NOT_COMPARED)]
    assert "train/loss" in names and "eval/solved" in names
    for name in names:
        last = {step: value for step, value in found[name].items() if step >= FOUND}
        assert last == {step: expected[name][step] for step in last}, name


QUICK = "log-probs times 1.001"
SLOW = [pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS if fault != QUICK]


@pytest.mark.parametrize("fault", [QUICK, *SLOW])
def test_fault_is_found_and_the_run_goes_on_as_starter_py_alone(
    fault, checkpoint, tmp_path, monkeypatch, now, capsys
):
    name, change, more, number = FAULTS[fault]
    spoil(monkeypatch, now, name, change)
    given = settings(checkpoint, tmp_path / "runs", n_train_steps=LAST, save_every=FOUND - 1)
    given |= more | dict(max_sampler_diff=math.inf)
    folder = starter.main(**given)["run_folder"]
    printed = capsys.readouterr().out
    assert f"step {FOUND}: support/ computes other {number} than" in printed
    assert f"the last right step was {LAST_RIGHT}. This step is repeated" in printed
    assert_alone_from_here_on(given, folder, checkpoint, tmp_path, monkeypatch)


@pytest.mark.slow
def test_soft_cap_that_is_left_out_is_found_when_logits_have_grown(
    tmp_path, monkeypatch, now, capsys
):
    """At first all logits are small, and the cap changes nothing."""
    model = make_model("nanochat", largest_logit=0.01)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")

    monkeypatch.setattr(fast, "logits_from", head_alone)
    given = settings(
        tmp_path / "model",
        tmp_path / "runs",
        n_train_steps=LAST,
        save_every=FOUND - 1,
        learning_rate=0.03,
        warmup_steps=0,
        max_sampler_diff=math.inf,
    )
    folder = starter.main(**given)["run_folder"]
    printed = capsys.readouterr().out
    assert f"step {FOUND}: support/ computes other" in printed
    assert f"the last right step was {LAST_RIGHT}." in printed
    assert_alone_from_here_on(given, folder, None, tmp_path, monkeypatch)


def test_reference_whose_own_forward_pass_is_not_called_is_found_at_once(
    checkpoint, tmp_path, monkeypatch, capsys
):
    init_teacher = starter.init_teacher

    def init_own_teacher(*inputs):
        teacher = init_teacher(*inputs)
        forward = teacher.forward

        def sharper(**inputs):
            outputs = forward(**inputs)
            outputs.logits = 2 * outputs.logits
            return outputs

        teacher.forward = sharper
        return teacher

    monkeypatch.setattr(starter, "init_teacher", init_own_teacher)
    monkeypatch.setattr(fast, "runs_as_its_class", lambda model: True)
    monkeypatch.setattr(fast, "logits_from", head_alone)
    given = settings(checkpoint, tmp_path, n_train_steps=2, ref_model_id=str(checkpoint), **EXACT)
    starter.main(**given)
    printed = capsys.readouterr().out
    assert "step 1: support/ computes other ref_log_probs than" in printed
    assert "it never fitted." in printed


@pytest.mark.slow
def test_run_that_was_put_aside_stays_so_after_a_resume(
    checkpoint, tmp_path, monkeypatch, now, capsys
):
    """The reference's, too: the same bits as in one go."""
    spoil(monkeypatch, now, "token_statistics", scaled_log_probs)
    given = settings(checkpoint, tmp_path / "runs", n_train_steps=LAST, save_every=FOUND)
    given |= dict(use_kl_penalty=True, kl_coef=1.0, max_sampler_diff=math.inf)
    folder = starter.main(**given)["run_folder"]
    again = shutil.copytree(folder, tmp_path / "again")
    last = f"checkpoint_{LAST:08d}.pt"
    for path in [*again.glob("events*"), again / last]:
        path.unlink()
    capsys.readouterr()
    starter.main(**given, resume=str(again))
    assert "stay out of this run, as they do from step 10 on" in capsys.readouterr().out
    assert "token_statistics" not in edits.replaced_names()
    found = [torch.load(path / last, weights_only=True)["model"] for path in (folder, again)]
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_healthy_run_is_never_put_aside(checkpoint, tmp_path, precision, capsys):
    """Also where the file is edited, which is compared in step 2 as well."""
    given = settings(checkpoint, tmp_path, n_train_steps=11, precision=precision, **EXACT)
    starter.main(**given)
    printed = capsys.readouterr().out
    assert "token_statistics" in printed and "repeated" not in printed


def test_losses_that_cancel_are_compared_in_their_own_size(checkpoint, tmp_path, capsys):
    """The advantages of a group of two are opposite, and the sum of these two losses is 0 but for
    rounding, which is another one in support/."""
    rewards = itertools.cycle([0.0, 1.0])
    given = dict(rollout_batch_size=2, group_size=2, loss_average="grpo", n_train_steps=1)
    given["reward"] = lambda text, problem: next(rewards)
    starter.main(**settings(checkpoint, tmp_path, **given))
    printed = capsys.readouterr().out
    assert "token_statistics" in printed and "repeated" not in printed


def test_step_of_many_tokens_is_no_fault_in_fp16(checkpoint, tmp_path, monkeypatch, capsys):
    """Each has a small part in the gradient then, which fp16 alone would take for 0."""
    monkeypatch.setitem(starter.AVERAGES, "dr_grpo", lambda mask, n: mask / 2**19)
    given = dict(precision="fp16", lora_rank=4, frozen_in_bf16=True, loss_average="dr_grpo")
    starter.main(**settings(checkpoint, tmp_path, n_train_steps=1, **given))
    printed = capsys.readouterr().out
    assert "token_statistics" in printed and "repeated" not in printed


def test_reward_that_is_not_finite_is_no_fault_of_support(checkpoint, tmp_path, capsys):
    rewards = itertools.cycle([math.inf, 1.0, 0.0])
    given = dict(n_train_steps=1, reward=lambda text, problem: next(rewards))
    starter.main(**settings(checkpoint, tmp_path, **given))
    printed = capsys.readouterr().out
    assert "token_statistics" in printed and "repeated" not in printed


@pytest.mark.parametrize("estimator", ["k3", "exact"])
def test_gradient_of_nothing_but_rounding_is_no_fault(checkpoint, tmp_path, estimator, capsys):
    """No advantage in the first step, in which the policy is the reference."""
    given = dict(use_kl_penalty=True, kl_estimator=estimator, reward=lambda text, problem: 1.0)
    starter.main(**settings(checkpoint, tmp_path, n_train_steps=1, **given))
    printed = capsys.readouterr().out
    assert "token_statistics" in printed and "repeated" not in printed


def test_edit_that_draws_with_numpy_is_no_fault(checkpoint, tmp_path, monkeypatch, capsys):
    """Both sides of the comparison see the same numbers."""
    compute_loss = starter.compute_loss

    def noisy(*inputs, **named):
        loss, metadata = compute_loss(*inputs, **named)
        return loss * (1 + torch.tensor(numpy.random.rand(*loss.shape)).float()), metadata

    monkeypatch.setattr(starter, "compute_loss", noisy)
    starter.main(**settings(checkpoint, tmp_path, n_train_steps=2))
    printed = capsys.readouterr().out
    assert "token_statistics" in printed and "repeated" not in printed


def test_comparison_of_the_sampler_draws_nothing_from_the_runs_generators(
    checkpoint, tmp_path, monkeypatch
):
    """An edit that draws tokens by torch.multinomial has the same ones after a resume, of which the
    first step is compared."""

    def draw(probs, uniform):
        return torch.multinomial(probs, 1)

    def state():
        return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())

    policy, _ = starter.init_policy(checkpoint, "cpu")
    cfg = starter.cfg_with(precision="float32", max_new_tokens=4, stop_token_ids=[])
    inputs = starter.requests_for([[1, 2]], cfg, 0, 2), cfg, 1.0
    monkeypatch.setattr(starter, "draw_from", draw)
    responses = starter.rollout_with_transformers(policy, *inputs)
    before = state()
    opinion.numbers_of_sampler(policy, responses, *inputs)
    assert state() == before


@pytest.mark.slow
def test_what_is_compared_changes_neither_gradients_nor_random_numbers(checkpoint, tmp_path):
    """With and without the comparison a run has the same bits."""
    steps = opinion.STEPS
    found = []
    for compared in (steps, ()):
        opinion.STEPS = compared
        try:
            given = settings(checkpoint, tmp_path / str(len(found)), reward=variety)
            folder = starter.main(**given)["run_folder"]
        finally:
            opinion.STEPS = steps
        found.append(torch.load(max(folder.glob("checkpoint_*.pt")), weights_only=True)["model"])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_mistake_in_the_comparison_itself_is_loud(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(opinion, "numbers_of_rows", lambda *inputs: undefined_name)  # noqa: F821
    starter.main(**settings(checkpoint, tmp_path, n_train_steps=1))
    printed = capsys.readouterr().out
    assert "failed with NameError" in printed and "it never fitted" in printed
