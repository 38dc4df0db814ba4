"""What looks on during a run: the lock of its folder, signals, what is logged, warnings, and what
happens after steps that are skipped."""

import math
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import log_of, scalars, settings, variety

import starter
from starter import InputError, RunStopped
from support import guards, ranks


@pytest.fixture(scope="module")
def watched(checkpoint, tmp_path_factory):
    """The folder of a short run with the KL penalty."""
    changes = dict(use_kl_penalty=True, n_train_steps=3, eval_every=2)
    given = settings(checkpoint, tmp_path_factory.mktemp("watched"), **changes)
    return starter.main(**given)["run_folder"]


# The lock

LOCK = """
import fcntl, sys
file = open(sys.argv[1] + "/.lock", "ab")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


def test_run_at_which_another_process_works_is_refused(checkpoint, tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "settings.json").write_text("{}")
    program = [sys.executable, "-c", LOCK + "print(flush=True)\ninput()", str(tmp_path / "first")]
    other = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    monkeypatch.setattr(starter, "init_policy", lambda *_: pytest.fail("the model was loaded"))
    try:
        for resume in (True, str(tmp_path / "first")):
            with pytest.raises(InputError, match="first is in use by another process; wait until"):
                starter.main(**settings(checkpoint, tmp_path, resume=resume))
    finally:
        other.communicate(b"\n")


def is_free(folder):
    """Whether another process could lock the folder."""
    done = subprocess.run([sys.executable, "-c", LOCK, str(folder)], stderr=subprocess.PIPE)
    assert done.returncode == 0 or b"BlockingIOError" in done.stderr
    return done.returncode == 0


def test_run_is_locked_until_it_ends_or_this_process_begins_another(tmp_path):
    pytest.importorskip("fcntl")
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        guards.lock(SimpleNamespace(folder=folder))
        guards.lock(SimpleNamespace(folder=folder))  # as a run does that is resumed
        assert not is_free(folder)
    assert is_free(folders[0])
    guards.unlock()
    assert is_free(folders[1])


# Runs that stand still: what is given, and what is logged and printed


class Run:
    """A run that keeps what is logged: {tag: value}."""

    def __init__(self, folder, **changes):
        defaults = dict(n_train_steps=9, max_new_tokens=16, learning_rate=1e-5, stop_token_ids=[7])
        defaults["rollout_batch_size"] = 2
        self.cfg = starter.cfg_with(**{**defaults, **changes})
        self.folder, self.writes_files, self.stop = folder, True, 0
        self.state = {"step": 0, "before": {"solved": 0.0}}
        self.logged = {}
        self.writer = SimpleNamespace(add_text=lambda *given: self.log("", dict([given[:2]]), 0))

    def log(self, kind, metrics, step):
        self.logged.update(metrics)


FINE = {"loss": 0.1, "grad_norm": 1.0, "reward_mean": 0.3, "frac_zero_std": 0.0}
FINE.update({"truncated_frac": 0.0, "response_length": 8.0, "time/total": 0.1})


def step_of(rewards, **changes):
    """The metrics and samples of a step with these rewards, in groups of two."""
    problems = [{"prompt": f"p{i}", "answer": f"a{i}"} for i in range(len(rewards) // 2)]
    texts = [f"t{i}" for i in range(len(rewards))]
    return {**FINE, **changes}, (problems, texts, torch.tensor(rewards), None)


@pytest.fixture
def watch(tmp_path):
    """Starts guards of a run that stands still, and ends them with the test."""
    yield lambda **changes: guards.Guards(Run(tmp_path, **changes))
    guards.put_handlers_back()


# Signals


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def train(*numbers):
    """Stands for starter.train: these signals come while it runs."""
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.fixture
def in_training(monkeypatch):
    monkeypatch.setattr(starter, "train", train)
    return handlers()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_ends_the_run_after_its_step(watch, in_training, number, capsys):
    looking = watch()
    looking.run.state["step"] = 3
    train(number)
    assert looking.run.stop == 0  # all processes learn of it at the end of the step
    looking(3, *step_of([0.1, 1.0]))
    assert looking.run.stop == number
    with mock.patch.object(guards.report, "report"), pytest.raises(SystemExit) as ended:
        looking.report({}, *[None] * 5)
    assert ended.value.code == 128 + number
    printed = capsys.readouterr().out
    assert "stopping after this step; again: now" in printed
    assert f"stopped after step 3 of 9; to go on, add --resume {looking.run.folder}" in printed
    assert handlers() == in_training


def test_signal_of_another_process_ends_this_one_after_the_same_step(watch, monkeypatch):
    looking = watch()
    monkeypatch.setattr(ranks, "gather", lambda items: [*items, 15])
    looking(1, *step_of([0.1, 1.0]))
    assert looking.run.stop == 15


@pytest.mark.parametrize("n, before", [(2, {"solved": 0.0}), (1, None)])
def test_second_signal_or_one_in_the_first_evaluation_acts_at_once(watch, in_training, n, before):
    looking = watch()
    looking.run.state["before"] = before
    with pytest.raises(KeyboardInterrupt):
        train(*[signal.SIGINT] * n)
    assert handlers() == in_training


def test_signal_after_a_run_that_failed_acts_at_once(watch, in_training):
    """The next Ctrl-C in a notebook must not only print that a dead run is to stop."""
    watch()
    watch()  # and one that was started again
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert handlers() == in_training


def test_guards_of_a_run_in_another_thread_leave_signals_alone(watch, in_training):
    done = []
    thread = threading.Thread(target=lambda: done.append(watch()))
    thread.start()
    thread.join()
    assert done and handlers() == in_training


# What is logged


def test_headline_curves_come_first_and_equal_those_they_repeat(watched):
    logged = scalars(watched)
    assert min(logged) == "0_headline/kl_per_token"
    for tag in ("eval/solved", "train/kl_per_token", "train/response_length"):
        assert logged[f"0_headline/{tag.partition('/')[2]}"] == logged[tag]
    assert logged["0_headline/reward"] == logged["train/reward_mean"]
    assert logged["adaptive_kl/raw_kl"] == logged["train/kl_penalty"]
    for step, kl in logged["train/kl_per_token"].items():
        per_response = kl * logged["train/response_length"][step]
        assert logged["train/kl_per_sequence"][step] == pytest.approx(per_response)
        n_tokens = 16 * logged["train/response_length"][step]
        seconds = logged["time/total"][step]
        assert logged["train/tokens_per_s"][step] == pytest.approx(n_tokens / seconds, rel=1e-5)


def test_text_page_begins_with_samples_that_show_what_was_asked_and_answered(watched):
    log = log_of(watched)
    texts = {}
    for tag in log.Tags()["tensors"]:
        [content] = log.Tensors(tag)[-1].tensor_proto.string_val
        texts[tag.removesuffix("/text_summary")] = content.decode()
    *names, last = sorted(texts)
    assert names == [f"samples/held_out_{i}" for i in range(3)]
    assert last == "settings" and "    learning_rate = 0.001\n" in texts["settings"]
    for name in names:
        lines = texts[name].split("\n")
        assert all(line.startswith("    ") for line in lines)  # nothing is taken for markup
        for part in ("prompt: add ", "response: ", "reward: ", "expected answer: "):
            assert any(line.startswith(f"    {part}") for line in lines), lines


def test_run_has_the_same_bits_with_and_without_guards(checkpoint, tmp_path):
    given = settings(checkpoint, tmp_path, use_kl_penalty=True, n_train_steps=3, eval_every=1)
    watched = scalars(starter.main(**given)["run_folder"])
    with mock.patch.object(guards, "Guards", lambda run: None):
        alone = scalars(starter.main(**given)["run_folder"])
    for tag in ("train/loss", "train/grad_norm", "train/kl_k1", "eval/reward_mean"):
        assert watched[tag] == alone[tag]
    assert "0_headline/reward" in watched and "0_headline/reward" not in alone


# Warnings


@pytest.mark.parametrize(
    "sign, words, changes",
    [
        (None, "", {}),
        (None, "", dict(kl_per_token=0.15)),
        ("drift", "0.21 nats per token", dict(kl_per_token=0.21)),
        ("cut gradient", "weights stay as they are", dict(grad_norm=0.0)),
        (
            "truncated",
            "max_new_tokens = 16",
            dict(truncated_frac=1, reward_mean=0),
        ),
        (None, "", dict(truncated_frac=1.0)),  # the reward has risen
    ],
)
def test_sign_of_trouble_in_a_step_is_named_and_no_other(sign, words, changes, tmp_path):
    run = Run(tmp_path, n_train_steps=100)
    metrics, samples = step_of([0.0, 1.0], reward_mean=0.6, kl_per_token=0.005)
    guards.update_state(1, *step_of([0.0, 1.0]), run.state)
    signs = guards.step_signs(50, {**metrics, **changes}, samples, run.state, run.cfg)
    assert list(signs) == ([] if sign is None else [sign])
    assert words in "".join(signs.values())


@pytest.mark.parametrize("precision, k2, is_said", [("float32", 1e-8, True), ("bf16", 1e-8, False)])
def test_reference_that_is_not_the_policy_is_said_in_step_1(precision, k2, is_said, watch, capsys):
    metrics, samples = step_of([0.1, 1.0], kl_per_token=0.1, kl_penalty=0.1, kl_k2=k2)
    watch(precision=precision)(1, metrics, samples)
    assert ("policy and reference differ" in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(
    "rewards, n_equal, is_said",
    [([0.1, 0.1], 5, True), ([0.1, 0.1], 4, False), ([0.1, 1.0], 5, False)],
)
def test_steps_that_teach_nothing_are_said(rewards, n_equal, is_said, watch, capsys):
    looking = watch(reward=variety)
    looking(1, *step_of(rewards))
    assert "Warning" not in capsys.readouterr().out
    for step in range(2, 2 + n_equal):
        looking(step, *step_of(rewards, frac_zero_std=1.0, grad_norm=0.0))
    printed = capsys.readouterr().out
    assert printed.count("step 2: all rewards of each group are equal") == 1
    assert ("for 5 steps all rewards" in printed) == is_said


@pytest.mark.parametrize(
    "text, key, reward, is_said",
    [
        ("<answer>4", "prompt", starter.reward_fn, True),
        ("<answer>4</answer>", "prompt", starter.reward_fn, False),
        ("4", "prompt", variety, False),
        ("4", "last_number", starter.reward_fn, False),
    ],
)
def test_responses_without_tags_are_said_where_the_reward_looks_for_tags(
    text, key, reward, is_said, tmp_path
):
    run = Run(tmp_path, reward=reward)
    metrics, _ = step_of([], frac_zero_std=1.0)
    samples = [{key: True}], ["4", text], torch.tensor([0.0, 0.0]), None
    for step in (1, 2):
        guards.update_state(step, metrics, samples, run.state)
        signs = guards.step_signs(step, metrics, samples, run.state, run.cfg)
        assert ("untagged" in signs) == (is_said and step == 2)


@pytest.mark.parametrize(
    "sign, words, changes",
    [
        (None, "", dict(retention_sort=0.86)),
        ("forgotten", "(sort from 90% to 80%)", dict(retention_sort=0.8)),
        # Of a run that collapses the learning rate is named, not the KL penalty.
        ("collapse", "solved fell from 30% to 10%", dict(solved=0.1, retention_sort=0.2)),
    ],
)
def test_sign_of_trouble_in_an_evaluation_is_named_and_no_other(sign, words, changes):
    state = {"before": {"solved": 0.3, "retention_sort": 0.9}}
    metrics = {"solved": 0.6, "retention_sort": 0.88, **changes}
    signs = guards.evaluation_signs(50, metrics, state, starter.cfg_with(learning_rate=0.1))
    assert list(signs) == ([] if sign is None else [sign])
    assert words in "".join(signs.values())


@pytest.mark.parametrize(
    "best_reward, reward, step, is_said",
    [
        (0.9, variety, 5, True),
        (1.0, variety, 5, False),  # in training, though not in the evaluation
        (0.9, starter.reward_fn, 5, False),
        (0.9, variety, 0, False),
    ],
)
def test_reward_that_never_reaches_1_is_said(best_reward, reward, step, is_said):
    state = {"before": {"solved": 0.0}, "best_reward": best_reward}
    signs = guards.evaluation_signs(step, state["before"], state, starter.cfg_with(reward=reward))
    assert ("unsolved" in signs) == is_said


def test_warning_is_printed_once_and_not_again_after_resume(checkpoint, tmp_path, capsys):
    given = settings(checkpoint, tmp_path)
    with mock.patch.object(guards, "step_signs", return_value={"drift": "it drifts"}):
        starter.main(**{**given, "n_train_steps": 2})
        starter.main(**{**given, "resume": True})
    assert capsys.readouterr().out.count("Warning: it drifts") == 1


# Steps that are skipped


def test_several_skipped_steps_in_a_row_stop_the_run(watch, capsys):
    looking = watch()
    for step in range(1, 10):
        looking(step, *step_of([0.0, math.nan], loss=0.1 if step == 5 else math.nan))
    assert looking.run.logged["skipped_steps"] == 8
    assert "The reward of 't1' was nan; return a number" in capsys.readouterr().out
    with pytest.raises(RunStopped, match="5 steps in a row"):
        looking(10, *step_of([0.0, 1.0], grad_norm=math.inf))
