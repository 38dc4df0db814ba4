"""What looks on during a run: the lock of its folder, signals, what is logged, warnings, and what
happens after steps that are skipped."""

import itertools
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from conftest import make_responses, make_tokenizer, scalars, settings, variety

import starter
from starter import InputError, RunStopped
from support import guards


WITH_KL = dict(precision="bf16", use_kl_penalty=True, n_train_steps=3, eval_every=2)


@pytest.fixture(scope="module")
def watched(checkpoint, tmp_path_factory):
    """The folder of a short run with the KL penalty."""
    given = settings(checkpoint, tmp_path_factory.mktemp("watched"), **WITH_KL)
    return starter.main(**given)["run_folder"]


@pytest.fixture(autouse=True)
def without_a_run_of_another_test():
    """Gives back the signal handlers that a run of this process holds until the next one."""
    guards.close()


# The lock


PROGRAM = """
import fcntl, sys
file = open(sys.argv[1] + "/.lock", "ab")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("locked", flush=True)
input()
"""


def lock_elsewhere(folder):
    """Returns another process, which prints a line when it has the lock, and ends with its input,
    or when the lock is another's."""
    pytest.importorskip("fcntl")
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], text=True, **pipes)


def is_free(folder):
    """Whether another process could lock the folder."""
    return "locked" in lock_elsewhere(folder).communicate("\n")[0]


def test_run_at_which_another_process_works_is_refused(checkpoint, tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "settings.json").write_text("{}")
    other = lock_elsewhere(tmp_path / "first")
    other.stdout.readline()
    with pytest.raises(InputError, match="first is in use by another process; wait until"):
        starter.main(**settings(checkpoint, tmp_path, resume=True))
    other.communicate("\n")


def test_run_is_locked_until_it_ends_or_this_process_begins_another(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        run = mock.Mock(folder=folder)
        guards.lock(run)
        guards.lock(run)  # as a run does that is resumed
        assert not is_free(folder)
    assert is_free(folders[0])
    guards.close()
    assert is_free(folders[1])


# Runs that stand still: what is given, and what is logged and printed

FINE = {
    "loss": 0.1,
    "grad_norm": 1.0,
    "reward_mean": 0.3,
    "frac_zero_std": 0.0,
    "truncated_frac": 0.0,
    "response_length": 8.0,
    "sampler_logprob_diff": 0.0,
    "time/total": 0.1,
}
PROBLEMS = [{"prompt": "p", "prompt_ids": [5]}]
TEXTS = ["t0", "t1"]
STEP_DATA = PROBLEMS, make_responses([3, 2]), TEXTS, torch.tensor([0.1, math.nan]), []


@pytest.fixture
def watch(tmp_path):
    """Starts guards of a run that stands still, and ends them with the test."""

    def start():
        cfg = starter.cfg_with(
            n_train_steps=9, rollout_batch_size=2, group_size=2, max_new_tokens=4
        )
        state = {"step": 3, "before": {}, "scaler": {}}
        run = mock.Mock(cfg=cfg, folder=tmp_path, state=state, writes_files=True)
        policy = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(policy.parameters())
        return guards.Guards(run, policy, None, make_tokenizer(), optimizer)

    yield start
    guards.close()


# Signals


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def train(*numbers):
    """Stands for starter.train: these signals come while it runs."""
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("n, before", [(2, {}), (1, None)])
def test_second_signal_or_one_in_the_first_evaluation_acts_at_once(watch, monkeypatch, n, before):
    monkeypatch.setattr(starter, "train", train)
    shipped = handlers()
    watch().run.state["before"] = before
    with pytest.raises(KeyboardInterrupt):
        train(*[signal.SIGINT] * n)
    assert handlers() == shipped


def test_signal_that_comes_while_processes_gather_ends_the_run_after_the_next_step(
    watch, monkeypatch
):
    monkeypatch.setattr(starter, "train", train)
    guard = watch()

    def gather(signals):
        if signals == [0]:
            train(signal.SIGTERM)
        return signals

    monkeypatch.setattr(guards.ranks, "gather", gather)
    assert not guard.after_step(4, FINE, *STEP_DATA)
    monkeypatch.undo()
    assert guard.after_step(5, FINE, *STEP_DATA)


@pytest.mark.slow
def test_run_in_another_thread_leaves_signals_alone_also_after_one_that_failed(
    checkpoint, tmp_path
):
    shipped = handlers()
    calls = itertools.count()
    with pytest.raises(ZeroDivisionError):  # the first call is a trial
        starter.main(**settings(checkpoint, tmp_path, reward=lambda *_: 1 / (next(calls) == 0)))
    of_the_failed_run = handlers()
    assert of_the_failed_run != shipped
    with ThreadPoolExecutor() as pool:
        pool.submit(starter.main, **settings(checkpoint, tmp_path, n_train_steps=1)).result()
    assert handlers() == of_the_failed_run
    with pytest.raises(KeyboardInterrupt):
        train(signal.SIGINT)
    assert handlers() == shipped


# What is logged


def test_curves_of_a_step_are_those_by_hand(watched):
    logged = scalars(watched)
    for step, length in logged["train/response_length"].items():
        kl = logged["0_headline/kl_per_token"][step]
        assert kl == logged["train/kl_per_token"][step]
        assert logged["train/kl_per_sequence"][step] == pytest.approx(length * kl)


def test_run_has_the_same_bits_with_and_without_guards(watched, checkpoint, tmp_path):
    with mock.patch.object(guards, "Guards", lambda *_: None):
        result = starter.main(**settings(checkpoint, tmp_path, **WITH_KL))
    logged, alone = scalars(watched), scalars(result["run_folder"])
    for tag in ("train/loss", "train/grad_norm", "train/kl_k1", "eval/reward_mean"):
        assert logged[tag] == alone[tag]
    assert "0_headline/reward" not in alone
    [saved] = watched.glob("checkpoint_*.pt")
    assert "sampler" not in torch.load(saved)["state"]["warned"]  # by the rounding of bf16


# Warnings


@pytest.mark.parametrize(
    "sign, step, changes",
    [
        ("cut gradient", 2, dict(grad_norm=0.0)),
        ("truncated", 2, dict(truncated_frac=1.0)),
        ("mostly unscored", 2, dict(unscored_frac=0.5)),
        ("unscored", 2, dict(unscored_frac=1, grad_norm=0.0)),
        ("sampler", 1, dict(sampler_logprob_diff=0.021)),
        ("", 1, dict(sampler_logprob_diff=0.019)),
        ("", 2, dict(sampler_logprob_diff=0.021)),
    ],
)
def test_sign_of_trouble_in_a_step_is_named_and_no_other(sign, step, changes):
    cfg = starter.cfg_with(stop_token_ids=[7], precision="bf16", engine="transformers")
    inputs = step, FINE | changes, PROBLEMS, TEXTS, {"n_equal": 0}, cfg
    assert " ".join(dict(guards.step_signs(*inputs))) == sign
    cfg.engine = "vllm"  # which rounds otherwise
    assert "sampler" not in dict(guards.step_signs(*inputs))


@pytest.mark.parametrize(
    "sign, n_equal, text, key, reward",
    [
        ("flat", 5, "", "prompt", variety),
        ("", 4, "", "prompt", variety),
        ("untagged", 2, "<answer>4", "prompt", starter.reward_fn),
        ("", 2, "<answer>4</answer>", "prompt", starter.reward_fn),
        ("", 2, "4", "last_number", starter.reward_fn),
    ],
)
def test_steps_that_teach_nothing_are_said_with_their_cause(sign, n_equal, text, key, reward):
    state = {"scaler": {}}
    equal = {**FINE, "grad_norm": 0.0, "frac_zero_std": 1.0}
    for metrics in [equal, FINE, *[equal] * n_equal]:  # the first one does not count
        guards.update_state(metrics, state)
    samples = [{key: True}], ["4", text]
    signs = guards.step_signs(9, equal, *samples, state, starter.cfg_with(reward=reward))
    assert " ".join(dict(signs)) == sign


def evaluation(solved, sort):
    return {"solved": solved, "reward_mean": solved, "retention_sort": sort}


@pytest.mark.parametrize(
    "signs, solved, sort, changes",
    [
        ("", 0.21, 0.86, {}),
        ("forgotten", 0.3, 0.84, {}),
        # Of a run that collapses the learning rate is named, not the KL penalty.
        ("collapse", 0.1, 0.2, {}),
        ("held", 0.41, 0.9, {"kl": 0.14}),
        ("", 0.55, 0.9, {"kl": 0.14}),  # it learns
        ("", 0.31, 0.9, {"kl": 0.3}),  # it went away, so that the penalty does not hold it
        ("", 0.31, 0.9, {"kl": 0.01, "step": 20}),  # too early to say
        ("", 0.31, 0.9, {"kl": 0.01, "ref_model_id": "a teacher"}),
    ],
)
def test_signs_of_trouble_in_an_evaluation(signs, solved, sort, changes):
    changes = dict(changes)
    kl, step = changes.pop("kl", None), changes.pop("step", 50)
    cfg = starter.cfg_with(use_kl_penalty=kl is not None, **changes)
    state = {"before": evaluation(0.3, 0.9), "kl_per_token": kl}
    found = guards.evaluation_signs(evaluation(solved, sort), state, step, cfg)
    assert " ".join(dict(found)) == signs


def test_remedy_for_lost_skills_is_the_reward_where_nothing_is_solved():
    state = {"before": evaluation(0.0, 0.9), "kl_per_token": None}
    for solved, words in ((0.0, "look at what the reward rewards"), (0.1, "use_kl_penalty")):
        signs = guards.evaluation_signs(evaluation(solved, 0.2), state, 50, starter.cfg_with())
        assert words in dict(signs)["forgotten"]


def test_warning_is_printed_again_at_the_end_if_it_still_holds(watch, capsys):
    guard = watch()
    guard.run.state["before"] = evaluation(0.3, 0.9)
    samples = [({"prompt": "p"}, "t0", 0.1)]
    guard.after_evaluation(4, evaluation(0.3, 0.7), samples)
    guard.warn_at_the_end(evaluation(0.3, 0.7))
    assert capsys.readouterr().out.count("other skills are lost") == 1
    guard.after_evaluation(9, evaluation(0.3, 0.6), samples)
    assert "other skills" not in capsys.readouterr().out
    guard.warn_at_the_end(evaluation(0.3, 0.6))
    assert "other skills are lost (sort from 90% to 60%)" in capsys.readouterr().out


@pytest.mark.slow
def test_warning_is_printed_once_and_not_again_after_resume(checkpoint, tmp_path, capsys):
    with mock.patch.object(guards, "step_signs", return_value=[("drift", "it drifts")]):
        for n, resume in ((1, None), (2, True)):
            starter.main(**settings(checkpoint, tmp_path, n_train_steps=n, resume=resume))
    assert capsys.readouterr().out.count("Warning: it drifts") == 1


# Steps that are skipped


def test_several_skipped_steps_in_a_row_stop_the_run(watch):
    """Also one more of them, where it was resumed."""
    looking = watch()
    for step in range(1, 10):
        looking.after_step(step, {**FINE, "loss": math.inf if step != 5 else 0.1}, *STEP_DATA)
    for step in (10, 11):
        with pytest.raises(RunStopped, match="5 steps in a row"):
            looking.after_step(step, {**FINE, "grad_norm": math.inf}, *STEP_DATA)


@pytest.mark.parametrize("a_second, is_said", [(40, False), (1_900, True)])
def test_cores_that_others_take_are_said_once(monkeypatch, tmp_path, capsys, a_second, is_said):
    """From what was counted on a quiet machine, and beside a busy program."""
    total = itertools.count(0, a_second * 2)
    monkeypatch.setattr(guards, "interruptions", lambda: next(total))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    guard = mock.Mock(interruptions=guards.interruptions(), n_interrupted=0)
    guard.run.cfg.device = torch.device("cpu")
    for _ in range(12):
        guards.Guards.note_interruptions(guard, 2.0)
    printed = capsys.readouterr().out
    assert printed.count("other programs take the cores of torch's 2 threads") == is_said
