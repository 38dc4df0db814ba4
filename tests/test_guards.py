"""What looks on during a run: the lock of its folder, samples and headlines in TensorBoard,
warnings, and what happens to steps that are skipped."""
import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import starter
from starter import InputError, RunStopped
from support import guards

from conftest import log_of, scalars, settings, variety


@pytest.fixture(scope="module")
def watched(checkpoint, tmp_path_factory):
    """The folder of a short run with the KL penalty."""
    given = settings(checkpoint, tmp_path_factory.mktemp("watched"), use_kl_penalty=True, seed=3,
                     n_train_steps=3, eval_every=2)
    return starter.main(**given)["run_folder"]


# The lock

LOCK = """
import fcntl, sys
file = open(sys.argv[1] + "/.lock", "ab")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


@pytest.fixture
def locked(tmp_path):
    """The folder of a run at which another process is at work, for as long as the test lasts."""
    pytest.importorskip("fcntl")
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text("{}")
    program = [sys.executable, "-c", LOCK + "print(flush=True)\ninput()", str(folder)]
    other = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    yield folder
    other.communicate(b"\n")


@pytest.mark.parametrize("resume", [True, "runs/first"])
def test_run_at_which_another_process_works_is_refused_before_anything_slow(
        checkpoint, locked, capsys, monkeypatch, resume):
    monkeypatch.chdir(locked.parent.parent)
    monkeypatch.setattr(starter, "init_policy", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a checkpoint was loaded"))
    with pytest.raises(InputError, match="runs/first is in use by another process; wait until it"):
        starter.main(**settings(checkpoint, "runs", resume=resume))
    assert "resumed" not in capsys.readouterr().out


def is_free(folder):
    """Whether another process could lock the folder."""
    done = subprocess.run([sys.executable, "-c", LOCK, str(folder)], stderr=subprocess.PIPE)
    assert done.returncode == 0 or b"BlockingIOError" in done.stderr
    return done.returncode == 0


def test_run_is_locked_until_it_ends_or_this_process_begins_another(checkpoint, tmp_path):
    pytest.importorskip("fcntl")
    seen = []

    def reward(text, problem):
        seen[len(seen):] = [is_free(path.parent) for path in tmp_path.glob("*/.lock")]
        if len(seen) == 11:
            raise ValueError
        return variety(text, problem)

    given = settings(checkpoint, tmp_path, n_train_steps=1, reward=reward)
    with pytest.raises(ValueError):
        starter.main(**given)
    [first] = tmp_path.iterdir()
    assert not is_free(first)  # by this process, which can resume it
    resumed = starter.main(**given | dict(resume=True))["run_folder"]
    assert resumed == first and is_free(first) and len(seen) > 11 and not any(seen)


# What is logged

def test_headline_curves_come_first_and_equal_those_they_repeat(watched):
    logged = scalars(watched)
    assert min(logged) == "0_headline/kl_per_token"
    for headline, tag in (("reward", "train/reward_mean"), ("kl_per_token", "train/kl_per_token"),
                          ("response_length", "train/response_length"), ("solved", "eval/solved")):
        assert logged[f"0_headline/{headline}"] == logged[tag]
    assert logged["0_headline/solved"].keys() == {0, 2, 3}


def test_text_page_begins_with_samples_that_show_what_was_asked_and_answered(watched):
    log = log_of(watched)
    texts = {tag.removesuffix("/text_summary"): log.Tensors(tag)[-1].tensor_proto.string_val[0]
             for tag in log.Tags()["tensors"]}
    names = sorted(texts)
    assert names == ["samples/best", "samples/held_out_0", "samples/held_out_1",
                     "samples/held_out_2", "samples/worst", "settings"]
    assert b"    learning_rate = 0.001\n" in texts["settings"]
    for name in names[:-1]:
        lines = texts[name].decode().split("\n")
        assert all(line.startswith("    ") for line in lines)  # nothing is taken for markup
        for part in ("prompt: add ", "response: ", "reward: ", "expected answer: "):
            assert any(line.startswith(f"    {part}") for line in lines), lines


class Log:
    """A run that keeps what is logged: {tag: value}."""

    def __init__(self, folder=None, **cfg):
        self.cfg = starter.cfg_with(**cfg)
        self.folder, self.is_first = folder, True
        self.state = {"step": 7, "skipped": [], "before": None}
        self.logged = {}

    def log(self, what, tag, value, step):
        self.logged[tag] = value


def step_of(rewards, group_size=2, **changes):
    """The metrics and samples of a step with these rewards."""
    n = len(rewards)
    problems = [{"prompt": f"p{i}", "answer": f"a{i}"} for i in range(n // group_size)]
    responses = [starter.Response([1], [2, 3], [-1.0, -3.0], True)] * n
    metrics = dict(loss=0.1, grad_norm=1.0, reward_mean=0.3, frac_zero_std=0.0, truncated_frac=0.0,
                   response_length=8.0) | {"time/total": 0.1}
    return metrics | changes, (problems, [f"t{i}" for i in range(n)], torch.tensor(rewards),
                               responses)


def test_best_and_worst_sample_are_those_of_the_step(tmp_path):
    run = Log(tmp_path)
    metrics, samples = step_of([0.1, 0.0, 1.0, 0.5])
    guards.Guards(run)(10, metrics, samples)
    assert run.logged["samples/best"].split("\n    ") == [
        "    prompt: p1", "response: t2", "reward: 1", "expected answer: a1"]
    assert run.logged["samples/worst"].split("\n    ")[:2] == ["    prompt: p0", "response: t1"]
    assert run.logged["debug/policy_logp_mean"] == -2.0
    run.logged.clear()
    guards.Guards(run)(11, metrics, samples)
    assert "samples/best" not in run.logged and "0_headline/reward" in run.logged


def test_second_step_tells_how_long_the_run_will_take(tmp_path, capsys):
    watch = guards.Guards(Log(tmp_path, n_train_steps=21))
    for step, seconds in ((10, 99.0), (11, 12.0), (12, 60.0)):
        watch(step, *step_of([0.1, 1.0], **{"time/total": seconds}))
    assert capsys.readouterr().out == "about 2 min to go, without evaluations\n"


def test_run_has_the_same_bits_with_and_without_guards(checkpoint, tmp_path):
    results = []
    for watch in (guards.Guards, lambda run: None):
        with mock.patch.object(guards, "Guards", watch):
            results.append(starter.main(**settings(
                checkpoint, tmp_path, use_kl_penalty=True, n_train_steps=3, eval_every=1)))
    logged = [scalars(result["run_folder"]) for result in results]
    for tag in ("train/loss", "train/grad_norm", "train/kl_k1", "eval/reward_mean"):
        assert logged[0][tag] == logged[1][tag]
    assert "0_headline/reward" in logged[0] and "0_headline/reward" not in logged[1]


# Warnings

FIRST = dict(reward_mean=0.3, frac_zero_std=0.2, truncated_frac=0.0, response_length=8.0,
             ratio_mean=1.0, grad_norm=0.5)
FINE = FIRST | dict(reward_mean=0.6, response_length=9.0, kl_per_token=0.005, kl_capped_frac=0.02)


@pytest.mark.parametrize("sign, words, changes, at_first", [
    (None, "", dict(), dict()), (None, "", dict(kl_per_token=0.15), dict()),
    ("drift", "KL is 0.21 nats per token, above 0.2", dict(kl_per_token=0.21), dict()),
    ("infinite", "the reference forbids a token", dict(kl_per_token=math.inf), dict()),
    ("weights", "the mean of pi / old is 4, not", dict(ratio_mean=4.0), dict()),
    ("no gradient", "0 although rewards differ", dict(grad_norm=0.0), dict()),
    ("stuck", "0.0050 nats per token, below 0.01", dict(reward_mean=0.31), dict()),
    (None, "", dict(reward_mean=0.31, kl_per_token=0.02), dict()),
    ("length", "1.5 times as long as at first", dict(response_length=12.1), dict()),
    ("capped", "pi / sampler is above kl_ratio_cap", dict(kl_capped_frac=0.2), dict()),
    ("endless", "lower learning_rate = 1e-05 first", dict(truncated_frac=1.0), dict()),
    ("truncated", "max_new_tokens = 16, none reached a stop token (7,)",
     dict(truncated_frac=1.0, reward_mean=0.3, kl_per_token=0.05), dict(truncated_frac=1.0)),
    (None, "", dict(truncated_frac=1.0), dict(truncated_frac=1.0)),  # the reward has risen
    ("equal", "all rewards of each group are equal", dict(frac_zero_std=1), dict(frac_zero_std=1)),
    (None, "", dict(frac_zero_std=1), dict()),  # solved by training
])
def test_sign_of_trouble_in_a_step_is_named_and_no_other(sign, words, changes, at_first):
    cfg = starter.cfg_with(n_train_steps=100, learning_rate=1e-5, max_new_tokens=16,
                           use_kl_penalty=True, stop_token_ids=(7,))
    _, samples = step_of([0.0, 1.0])
    samples[1][0] = "<answer>1</answer>"
    signs = guards.step_signs(FINE | changes, FIRST | at_first, samples, 50, cfg)
    assert list(signs) == ([] if sign is None else [sign])
    assert words in "".join(signs.values())


@pytest.mark.parametrize("rewards, n_equal, noticed", [
    ([0.1, 0.1], 5, True), ([0.1, 0.1], 4, False), ([0.1, 1.0], 5, False)])
def test_steps_that_teach_nothing_are_noticed_where_nothing_is_solved(
        rewards, n_equal, noticed, tmp_path, capsys):
    run = SimpleNamespace(
        cfg=starter.cfg_with(), folder=tmp_path, is_first=True, log=lambda *_: None,
        state={"step": 1, "skipped": [], "warned": [], "first": dict(FIRST), "before": None})
    with mock.patch.object(guards, "lock"):
        watch = guards.Guards(run)
    for step in range(2, 3 + n_equal):  # the first of these steps still teaches
        watch(step, *step_of(rewards, frac_zero_std=0.5 if step == 2 else 1.0))
    assert ("for 5 steps all rewards of each group" in capsys.readouterr().out) == noticed


def test_responses_without_tags_are_noticed_where_the_reward_looks_for_tags():
    def sign(texts, reward=starter.reward_fn, **problem):
        cfg = starter.cfg_with(reward=reward)
        equal = FINE | dict(frac_zero_std=1)
        return [*guards.step_signs(equal, equal, ([problem], texts, None, None), 2, cfg)][0]

    assert sign(["4", "<answer>4"]) == "untagged"
    assert sign(["4"], reward=[(starter.reward_fn, 1.0), (variety, 0.1)]) == "untagged"
    assert sign(["4", "<answer>4</answer>"]) == "equal"
    assert sign(["4"], reward=variety) == sign(["4"], last_number=True) == "equal"


def share(*rewards):
    return [({}, "", reward) for reward in rewards]


@pytest.mark.parametrize("sign, words, changes, samples, settings", [
    (None, "", dict(), share(1.0, 0.1), dict()), (None, "", dict(retention_sort=0.86), [], dict()),
    ("forgotten", "(sort from 90% to 80%): lower learning_rate, or set use_kl_penalty",
     dict(retention_sort=0.8), share(1.0), dict()),
    ("forgotten", "raise kl_coef", dict(retention_sort=0.8), share(1.0), dict(use_kl_penalty=True)),
    # Of a run that collapses the learning rate is named, not the KL penalty.
    ("collapse", "solved fell from 30% to 10%", dict(solved=0.1, retention_sort=0.2), share(0.0),
     dict()),
    # Each solution of ten tokens or more earns less than 1: a reward with something taken off.
    ("nearly", "67% of the rewards are from 0.5 to below 1", dict(solved=0.25),
     share(0.9, 0.95, 0.0), dict(reward=variety)),
    (None, "", dict(solved=0.9), share(1.0, 1.0, 0.9), dict(reward=variety)),
    ("not a number", "mend the reward", dict(reward_mean=math.nan), share(1.0), dict()),
    (None, "", dict(solved=0.25), share(0.9, 0.95), dict(reward=[(variety, 1.0), (variety, -0.1)])),
])
def test_sign_of_trouble_in_an_evaluation_is_named_and_no_other(sign, words, changes, samples,
                                                                settings):
    metrics = dict(solved=0.6, retention_sort=0.88, reward_mean=0.5)
    first = dict(solved=0.3, retention_sort=0.9)
    signs = guards.evaluation_signs(metrics | changes, first, samples or share(0.0), 50,
                                    starter.cfg_with(**settings))
    assert list(signs) == ([] if sign is None else [sign])
    assert words in "".join(signs.values())


def test_reward_that_never_reaches_1_is_told_after_the_first_evaluation():
    def signs(step, **settings):
        nothing = dict(solved=0.0, reward_mean=0.3)
        return [*guards.evaluation_signs(nothing, nothing, share(0.3), step,
                                         starter.cfg_with(**settings))]

    assert signs(5, reward=variety) == ["unsolved"]
    assert signs(0, reward=variety) == []
    assert signs(5) == signs(5, reward=[(starter.reward_fn, 1.0), (variety, 1.0)]) == []


def test_warning_is_printed_once_and_not_again_after_resume(checkpoint, tmp_path, capsys):
    """What is forgotten is told at every evaluation."""
    given = settings(checkpoint, tmp_path, eval_every=1)
    with mock.patch.object(guards, "step_signs", return_value={"drift": "it drifts"}), \
            mock.patch.object(guards, "evaluation_signs", return_value={"forgotten": "it forgets"}):
        starter.main(**given | dict(n_train_steps=2))
        starter.main(**given | dict(n_train_steps=4, resume=True))
    printed = capsys.readouterr().out
    assert re.findall(r"Step (\d) \|.*\nWarning: it drifts", printed) == ["1"]
    assert printed.count("it drifts") == 1
    assert printed.count("it forgets") == printed.count("Eval at step") == 5


# Steps that are skipped

def test_responses_of_skipped_steps_are_kept_and_several_in_a_row_stop_the_run(tmp_path, capsys):
    run = Log(tmp_path)
    watch = guards.Guards(run)
    metrics, samples = step_of([0.0, 1.0, 2.0, 3.0], loss=math.nan)
    watch(0, metrics, samples)
    for step in (1, 2, 3, 4, 6, 7, 8, 9):  # step 5 was fine
        run.state["skipped"] = [*run.state["skipped"], step]
        watch(step, metrics, samples)
    assert {path.name for path in tmp_path.glob("*.json")} == {
        f"skipped_step_{step}.json" for step in run.state["skipped"]}
    path = tmp_path / "skipped_step_9.json"
    assert f"The responses of step 9 are kept in {path}\n" in capsys.readouterr().out
    assert json.loads(path.read_text()) == {"step": 9, "responses": [
        {"prompt": f"p{i // 2}", "text": f"t{i}", "reward": i, "ids": [2, 3],
         "log_probs": [-1.0, -3.0]} for i in range(4)]}
    run.state["skipped"] = [*run.state["skipped"], 10]
    with pytest.raises(RunStopped, match="5 steps in a row had a loss or gradient that is not"):
        watch(10, metrics, samples)
