"""Whole runs: kill and resume, signals, faults, and what a run saves and logs.

Each fault comes from outside, by a function that is replaced while main() runs. Runs are made with
starter.py alone ("alone") or with support/ ("support").
"""

import functools
import importlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from conftest import scalars, settings, variety
from lab.crash_test import noisy_variety, outcome
from safetensors.torch import load_file

import starter
from starter import RunStopped
from support import checkpoints, guards, report, steps
from support.report import draw  # fixtures replace report.draw

slow = pytest.mark.slow
both = pytest.mark.parametrize("kind", ["alone", pytest.param("support", marks=slow)])


def run(kind, **given):
    """Calls main() with support/ or without. Returns its result."""
    alone = mock.patch.object(starter, "find_support", lambda: None)
    with alone if kind == "alone" else nullcontext():
        return starter.main(**given)


def full_settings(checkpoint, folder, **changes):
    """A run in which every state matters: AdamW's moments, the KL controller, the reference model,
    random numbers in the reward, old log-probs."""
    full = dict(
        n_train_steps=6,
        save_every=2,
        eval_every=3,
        epochs_per_rollout=2,
        use_kl_penalty=True,
        kl_coef=0.1,
        kl_adaptation_method="target_sound",
        reward=noisy_variety,
    )
    return settings(checkpoint, folder / "runs", **{**full, **changes})


@pytest.fixture(scope="module")
def undisturbed(checkpoint, tmp_path_factory):
    """Returns what a run that nothing interrupts ends with, for each kind."""

    @functools.cache
    def of_kind(kind):
        folder = tmp_path_factory.mktemp("undisturbed")
        run(kind, **full_settings(checkpoint, folder))
        return outcome(folder)

    return of_kind


def at_call(owner, name, number, act):
    """A patch: call `number` (from 1; None: each) of owner.name does act() first."""
    real = getattr(owner, name)
    calls = itertools.count(1)

    def wrapped(*args, **kwargs):
        if number in (next(calls), None):
            act()
        return real(*args, **kwargs)

    return mock.patch.object(owner, name, wrapped)


class Killed(BaseException):
    """Stands for kill -9 inside this process: no handler may catch it."""


def die():
    raise Killed


def seed_all(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def resume(kind, checkpoint, folder, **changes):
    seed_all(99)  # a new process has other random states
    return run(kind, **full_settings(checkpoint, folder, resume=True, **changes))


def steps_in(printed, what="Step"):
    return [int(step) for step in re.findall(rf"^{what} (\d+)[/ ]", printed, re.MULTILINE)]


# Killed, and resumed

# In the middle of a step, an evaluation, or a save: before its file is on the disk, before it has
# its name, before an older one is deleted. At last the step that is resumed from.
KILLS = [
    ("alone", starter, "evaluate", 2, 2),
    ("alone", os, "fsync", 2, 2),
]
MORE_KILLS = [
    ("support", torch.optim.AdamW, "step", 6, 2),
    ("alone", starter, "log_train", 2, 0),
    ("support", starter, "evaluate", 1, 0),
    ("support", Path, "unlink", 1, 6),
]


@pytest.mark.parametrize(
    "kind, owner, name, number, step", [*KILLS, *(pytest.param(*x, marks=slow) for x in MORE_KILLS)]
)
def test_resume_after_kill_is_bit_identical(
    checkpoint, tmp_path, undisturbed, capsys, kind, owner, name, number, step
):
    with at_call(owner, name, number, die), pytest.raises(Killed):
        run(kind, **full_settings(checkpoint, tmp_path))
    capsys.readouterr()
    resume(kind, checkpoint, tmp_path)
    assert (f"after step {step}\n" if step else "Eval at step 0") in capsys.readouterr().out
    assert outcome(tmp_path) == undisturbed(kind)
    assert not list(tmp_path.glob("runs/*/unfinished"))
    saved = sorted(path.name for path in tmp_path.glob("runs/*/checkpoint_*.pt"))
    assert saved[-2:] == ["checkpoint_00000004.pt", "checkpoint_00000006.pt"]


def test_run_depends_on_its_seed_and_not_on_global_generators(checkpoint, tmp_path, undisturbed):
    seed_all(7)
    run("alone", **full_settings(checkpoint, tmp_path))
    assert outcome(tmp_path) == undisturbed("alone")
    run("alone", **full_settings(checkpoint, tmp_path / "other", seed=1))
    assert outcome(tmp_path / "other") != undisturbed("alone")


@slow
def test_signal_ends_the_run_after_its_step_with_a_checkpoint(
    checkpoint, tmp_path, undisturbed, capsys
):
    handler = signal.getsignal(signal.SIGTERM)
    send = functools.partial(signal.raise_signal, signal.SIGTERM)
    with at_call(starter, "problems_of_step", 3, send), pytest.raises(SystemExit) as ended:
        run("support", **full_settings(checkpoint, tmp_path, save_every=0))
    assert ended.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) == handler
    printed = capsys.readouterr().out
    assert steps_in(printed) == [1, 2, 3] and steps_in(printed, "Eval at step") == [0, 3]
    assert f"to go on: main(..., resume='{tmp_path}" in printed
    resume("support", checkpoint, tmp_path)
    assert outcome(tmp_path) == undisturbed("support")


@both
def test_run_of_no_steps_evaluates_the_model_as_it_is(checkpoint, tmp_path, capsys, kind):
    result = run(kind, **full_settings(checkpoint, tmp_path, n_train_steps=0, warmup_steps=1))
    printed = capsys.readouterr().out
    assert steps_in(printed, "Eval at step") == [0] and steps_in(printed) == []
    assert result["after"] == result["before"]
    before = load_file(checkpoint / "model.safetensors")
    after = load_file(result["run_folder"] / "model" / "model.safetensors")
    torch.testing.assert_close(after, before, rtol=0, atol=0)


# An error, such as one of a reward


@both
def test_error_leaves_a_checkpoint_from_which_the_run_goes_on_with_the_same_bits(
    checkpoint, tmp_path, undisturbed, capsys, kind
):
    """But none of an update that was begun, which would be of no step."""

    fail = mock.Mock(side_effect=ZeroDivisionError)
    given = full_settings(checkpoint, tmp_path, save_every=0)
    for owner, name, number, saved in (
        (starter, "problems_of_step", 1, []),  # of step 1: there is nothing to save
        (torch.optim.AdamW, "step", 6, []),  # of step 3, its second epoch
        (starter, "clip_gradient", 5, [2]),  # in its first one, which has moved no weight yet
        (starter, "log_train", 2, [2]),
        (starter, "compute_group_normalized_advantages", 6, [5]),
    ):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        with at_call(owner, name, number, fail), pytest.raises(ZeroDivisionError):
            run(kind, **given)
        said = r"An error ends the run; a checkpoint of step (\d+) is saved; to go on: resume = "
        assert [int(step) for step in re.findall(said, capsys.readouterr().out)] == saved
        paths = tmp_path.glob("runs/*/checkpoint_*")
        assert [path.name for path in paths] == [f"checkpoint_{step:08d}.pt" for step in saved]
    resume(kind, checkpoint, tmp_path, save_every=0)
    assert "after step 5\n" in capsys.readouterr().out
    assert outcome(tmp_path) == undisturbed(kind)


def test_checkpoint_that_fails_after_an_error_does_not_hide_it(checkpoint, tmp_path, capsys):
    given = full_settings(checkpoint, tmp_path, save_every=0)
    full = mock.Mock(side_effect=OSError("no room"))
    with (
        mock.patch.object(starter, "save_checkpoint", full),
        at_call(starter, "log_train", 2, mock.Mock(side_effect=ZeroDivisionError)),
        pytest.raises(ZeroDivisionError),
    ):
        starter.main(**given)
    assert "no checkpoint of step 2 is saved (OSError('no room'))" in capsys.readouterr().out


def test_what_a_kill_left_unfinished_is_no_part_of_the_next_file(tmp_path):
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "shard").touch()
    with starter.written_whole(tmp_path / "checkpoint", {}) as unfinished:
        unfinished.write_text("whole")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]


def test_evaluation_that_an_error_ended_is_made_at_the_resume(checkpoint, tmp_path):
    given = full_settings(checkpoint, tmp_path, save_every=0, eval_every=2)
    fail = mock.Mock(side_effect=ZeroDivisionError)
    with at_call(starter, "evaluate", 2, fail), pytest.raises(ZeroDivisionError):
        run("alone", **given)
    resume("alone", checkpoint, tmp_path, save_every=0, eval_every=2)
    [folder] = tmp_path.glob("runs/*")
    assert [*scalars(folder)["eval/solved"]] == [0, 2, 4, 6]


@both
def test_error_in_the_last_evaluation_loses_no_step_and_a_resume_evaluates(
    checkpoint, tmp_path, undisturbed, capsys, kind
):
    given = full_settings(checkpoint, tmp_path, save_every=0)
    fail = mock.Mock(side_effect=ZeroDivisionError)
    with at_call(starter, "evaluate", 3, fail), pytest.raises(ZeroDivisionError):
        run(kind, **given)
    assert "a checkpoint of step 6 is saved" in capsys.readouterr().out
    resume(kind, checkpoint, tmp_path, save_every=0)
    printed = capsys.readouterr().out
    assert steps_in(printed) == [] and steps_in(printed, "Eval at step") == [6]
    assert outcome(tmp_path) == undisturbed(kind)


# A disk that fills

FULL = {  # what is being written then: whose call fills the disk, and which one
    "a checkpoint": (starter.Run, "save", 3),
    "a checkpoint, in its middle": (os, "fsync", 3),
    "the model": (starter, "weights_by_name", 1),
    "the model, in its middle": (transformers.PreTrainedModel, "save_pretrained", 1),
    "the log": (starter, "log_train", 3),
}


def fill(disk):
    (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free))


@pytest.fixture(scope="module")
def on_a_large_disk(checkpoint, tmp_path_factory):
    """Returns the last evaluation of such a run, for each kind."""

    @functools.cache
    def of_kind(kind):
        return run(kind, **settings(checkpoint, tmp_path_factory.mktemp("large")))["after"]

    return of_kind


@pytest.fixture
def small_disk(tmp_path):
    """Returns a disk of 20 MB, and fills it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", disk], check=False)
    if made.returncode:
        pytest.skip("no disk can be made here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("kind", ["alone", "support"])
@pytest.mark.parametrize("written", FULL)
@slow
def test_full_disk_leaves_the_last_checkpoint_whole_and_nothing_half_written(
    checkpoint, small_disk, on_a_large_disk, written, kind
):
    def fill_and_fail():
        fill(small_disk)
        if written == "a checkpoint, in its middle":
            raise OSError("No space left on device")

    given = settings(checkpoint, small_disk / "runs", save_every=1)
    full = at_call(*FULL[written], fill_and_fail)
    with full, pytest.raises(RunStopped, match="cannot be written") as end:
        run(kind, **given)
    assert re.search(r"needs [\d.e-]+ GB, and [\d.e-]+ GB are free; make room", str(end.value))
    [folder] = (small_disk / "runs").iterdir()
    names = {path.name.split(".")[0].rstrip("0123456789") for path in folder.iterdir()}
    names = {re.sub(".*(?=_from_step_)", "", name) for name in names}  # of starter.py and scripts
    assert names <= {"checkpoint_", "events", "settings", "steps", "", "_from_step_"}
    for path in folder.glob("checkpoint_*"):
        assert zipfile.ZipFile(path).testzip() is None
    (small_disk / "other").unlink()
    resumed = run(kind, **given, resume=str(folder))  # the command that the message names
    assert resumed["after"] == on_a_large_disk(kind)


@slow
def test_full_disk_costs_pictures_and_not_the_run(checkpoint, small_disk, capsys, monkeypatch):
    """It is full after a step, and again for the report and all that comes after it."""
    monkeypatch.setattr(report, "draw", draw)
    given = settings(checkpoint, small_disk / "runs", n_train_steps=1)
    full = [
        at_call(owner, name, 1, lambda: fill(small_disk))
        for owner, name in ((steps.Page, "add"), (report, "write_report"))
    ]
    emptied = at_call(starter.Run, "save", None, lambda: (small_disk / "other").unlink(True))
    with full[0], full[1], emptied:
        result = run("support", **given)
    printed = capsys.readouterr().out
    for what in ("steps.html", "the report", "curve.png"):
        assert f"{what} ends here: OSError(28" in printed
    left = [path.name for path in result["run_folder"].iterdir() if "unfinished" in path.name]
    assert not left and (result["run_folder"] / "model" / "model.safetensors").is_file()


# What resume finds


@both
def test_resume_of_a_finished_run_repeats_its_end_or_goes_on(checkpoint, tmp_path, capsys, kind):
    """Without a step left it says so, and keeps the settings."""
    given = full_settings(checkpoint, tmp_path, n_train_steps=2)
    first = run(kind, **given)
    ended = outcome(tmp_path)
    settings_file = first["run_folder"] / "settings.json"
    before = settings_file.read_text()
    capsys.readouterr()
    again = run(kind, **{**given, "learning_rate": 5e-5, "resume": True})
    printed = capsys.readouterr().out
    assert "no step is left to train: raise n_train_steps" in printed
    assert "the learning rate follows" not in printed
    assert steps_in(printed) == steps_in(printed, "Eval at step") == []
    run(kind, **{**given, "n_train_steps": 0, "resume": True})
    assert again == first and outcome(tmp_path) == ended and settings_file.read_text() == before
    resume(kind, checkpoint, tmp_path, n_train_steps=3, learning_rate=2e-3)
    assert steps_in(capsys.readouterr().out) == [3]
    rates = scalars(first["run_folder"])["train/lr"]  # in the warm-up; that of now
    assert list(rates.values()) == pytest.approx([1e-4, 2e-4, 6e-4])


def test_settings_of_a_run_are_whole_where_they_cannot_be_written(
    checkpoint, tmp_path, monkeypatch
):
    given = full_settings(checkpoint, tmp_path, n_train_steps=1)
    settings_file = run("alone", **given)["run_folder"] / "settings.json"
    before = settings_file.read_text()
    write_text = Path.write_text

    def write_half(path, text, *others):
        write_text(path, text[:100], *others)
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(RunStopped, match="settings.json cannot be written .no space.*make room"):
        run("alone", **{**given, "n_train_steps": 2, "resume": True})
    assert settings_file.read_text() == before


def test_folder_without_room_for_the_log_is_named(checkpoint, tmp_path, monkeypatch):
    def full(folder, **others):
        raise OSError("no space")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", full)
    with pytest.raises(RunStopped, match="cannot be written into .no space.; make room"):
        run("alone", **settings(checkpoint, tmp_path, n_train_steps=1))


def test_resume_goes_on_with_the_newest_run_and_keeps_the_source_of_each_part(checkpoint, tmp_path):
    """Names are of local time, and folders are renamed. Also where an older version began the run:
    main() has got a parameter since, and lost one."""

    def go(name, **changes):
        given = settings(checkpoint, tmp_path, run_name=name, **changes)
        return run("support", **given)["run_folder"]

    go("b", n_train_steps=0)
    newer = go("a", n_train_steps=1).rename(tmp_path / "0 best [0.1]")
    config = json.loads((newer / "settings.json").read_text()) | {"gone": 1}
    del config["importance_cap"]
    (newer / "settings.json").write_text(json.dumps(config))
    for n, resume in ((2, True), (3, str(newer))):
        assert go("b", n_train_steps=n, resume=resume) == newer
    assert list(scalars(newer)["train/loss"]) == [1, 2, 3]
    source = Path(starter.__file__).read_bytes()
    assert (newer / "starter_from_step_2.py").read_bytes() == source


def test_script_is_kept_with_the_run_and_a_resume_says_that_it_was_edited(
    checkpoint, tmp_path, capsys, monkeypatch
):
    script = tmp_path / "my_script.py"
    script.write_text("def reward(text, problem):\n    return float(len(text))\n")
    monkeypatch.syspath_prepend(tmp_path)
    my_script = importlib.import_module("my_script")
    started = tmp_path / "started.py"
    started.write_text("import my_script\n")
    monkeypatch.setattr(sys, "argv", [str(started)])
    given = settings(checkpoint, tmp_path, reward=my_script.reward)
    folder = run("support", **{**given, "n_train_steps": 1})["run_folder"]
    for file in (script, started):
        assert (folder / f"{file.stem}_from_step_1.py").read_text() == file.read_text()
    made_with = json.loads((folder / "settings.json").read_text())["made_with"]
    assert made_with["torch"] == torch.__version__
    started.write_text("import my_script  # edited\n")
    capsys.readouterr()
    run("support", **{**given, "n_train_steps": 2, "resume": True})
    printed = capsys.readouterr().out
    assert "resume: started.py is another one than started_from_step_1.py" in printed
    assert "my_script.py is another" not in printed and "made_with" not in printed


def test_learning_rate_that_has_not_begun_to_fall_falls_over_the_new_length(
    checkpoint, tmp_path, capsys
):
    given = settings(
        checkpoint, tmp_path, n_train_steps=2, warmup_steps=4, learning_rate=2e-3, eval_every=0
    )
    result = run("alone", **given)
    run("alone", **{**given, "n_train_steps": 6, "resume": str(result["run_folder"])})
    assert "the learning rate follows" not in capsys.readouterr().out
    rates = scalars(result["run_folder"])["train/lr"]
    shares = [0.25, 0.5, 0.75, 1.0, 0.55, 0.1]
    assert [rate / 2e-3 for rate in rates.values()] == pytest.approx(shares)


def test_learning_rate_falls_over_the_length_with_which_a_run_began(checkpoint, tmp_path, capsys):
    """Also where n_train_steps is raised on a resume, which the log says: to a tenth."""
    given = settings(
        checkpoint, tmp_path, n_train_steps=6, warmup_steps=2, learning_rate=2e-3, eval_every=0
    )
    result = run("alone", **given)
    assert "the learning rate follows" not in capsys.readouterr().out
    run("alone", **{**given, "n_train_steps": 8, "resume": str(result["run_folder"])})
    printed = capsys.readouterr().out
    assert "follows its schedule of 6 steps" in printed and "in step 7 it is 0.0002" in printed
    shares = [0.5, *(0.55 + 0.45 * math.cos(math.pi / 4 * i) for i in range(5)), 0.1, 0.1]
    rates = scalars(result["run_folder"])["train/lr"]
    assert [rate / 2e-3 for rate in rates.values()] == pytest.approx(shares)


def test_settings_of_two_runs_with_the_same_reward_are_the_same_text():
    """A function's text holds its address, which differs from process to process."""
    texts = [starter.text_of_settings(starter.cfg_with(reward=f)) for f in (lambda: 0, lambda: 0)]
    assert texts[0] == texts[1] and "lambda" in texts[0]


def test_compiled_copy_of_the_policy_is_refused_before_the_first_step(checkpoint, tmp_path):
    policy, _ = starter.init_policy(checkpoint, "cpu")
    run_ = starter.Run(starter.cfg_with(out_dir=tmp_path))
    policy.compile()
    run_.open(policy, torch.optim.SGD(policy.parameters()))
    compiled = torch.compile(policy)
    with pytest.raises(starter.InputError, match=r"write policy.compile\(\) instead"):
        run_.open(compiled, torch.optim.SGD(compiled.parameters()))


def test_log_is_on_the_disk_before_the_checkpoint(checkpoint, tmp_path):
    """A kill after it would otherwise leave a hole in the curves. What is renamed first is
    settings.json."""
    from torch.utils.tensorboard import SummaryWriter

    done = []
    log = at_call(SummaryWriter, "flush", 1, lambda: done.append("log"))
    with log, at_call(Path, "replace", 2, lambda: done.append("checkpoint")):
        run("alone", **settings(checkpoint, tmp_path, n_train_steps=1))
    assert done == ["log", "checkpoint"]


# A number that is not finite


def test_gradient_that_is_not_finite_moves_no_weight(checkpoint, tmp_path):
    """The loss of the first epoch of step 2 is finite, one gradient is not."""
    weights = []
    real = starter.clip_gradient

    def spoil(parameters, max_norm):
        weights.append(torch.nn.utils.parameters_to_vector(parameters).detach())
        if len(weights) == 3:
            parameters[-1].grad.view(-1)[0] = math.inf
        return real(parameters, max_norm)

    with mock.patch.object(starter, "clip_gradient", spoil):
        result = run("alone", **full_settings(checkpoint, tmp_path, n_train_steps=3))
    assert len(weights) == 2 + 1 + 2  # the second epoch of step 2 is left out
    assert list(map(torch.equal, weights, weights[1:])) == [False, False, True, False]
    betas = scalars(result["run_folder"])["adaptive_kl/current_beta"].values()
    assert all(map(math.isfinite, betas))


# What a run computes, saves and logs


def test_samples_and_evaluations_are_at_the_step_that_they_name(checkpoint, tmp_path):
    """Step n samples with the weights after step n - 1; what is logged at n has those after n."""
    order = []

    def check_mean(metrics, texts, n):
        assert len(texts) == n
        mean = sum(variety(text, None) for text in texts) / n
        assert metrics["reward_mean"] == pytest.approx(mean)

    class Watch:
        def __init__(self, *of_run):
            self.report = mock.Mock()

        def after_step(self, step, metrics, asked, responses, texts, rewards, microbatches):
            order.append(step)
            check_mean(metrics, texts, 16)
            assert rewards.tolist() == [variety(text, None) for text in texts]
            assert [r.prompt_ids for r in responses[::4]] == [x["prompt_ids"] for x in asked]
            assert sum(len(rows["labels"]) for rows in microbatches) == 16
            return False

        def after_evaluation(self, step, metrics, samples):
            order.append(step)
            check_mean(metrics, [text for _, text, _ in samples], 10)

    with (
        at_call(starter, "rollout", None, lambda: order.append("sample")),
        at_call(torch.optim.AdamW, "step", None, lambda: order.append("update")),
        mock.patch.object(guards, "Guards", Watch),
    ):
        run("support", **settings(checkpoint, tmp_path, eval_every=2, n_train_steps=3))
    step = ["sample", "update"]
    assert order == ["sample", 0, *step, 1, *step, 2, "sample", 2, *step, 3, "sample", 3]


@slow
def test_thirty_steps_raise_the_reward_of_the_built_in_model(tmp_path):
    given = dict(preset="tiny", n_train_steps=30, eval_every=0, n_eval_problems=200)
    result = starter.main(**given, out_dir=str(tmp_path), engine="transformers")
    rewards = list(scalars(result["run_folder"])["train/reward_mean"].values())
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.03


class Counting(torch.optim.SGD):
    """Counts its steps among its settings, as schedule-free optimisers do."""

    def step(self):
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


@pytest.mark.parametrize("optimizer_class, said", [(Counting, 1), (torch.optim.SGD, 0)])
def test_what_an_optimiser_counts_among_its_settings_is_said_to_begin_anew(
    optimizer_class, said, capsys
):
    model = torch.nn.Linear(3, 2)
    optimizer = optimizer_class(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05  # as the schedule does
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved["optimizer"]["param_groups"][0]["nesterov"] = False
    again = optimizer_class(model.parameters(), lr=0.1, momentum=0.9)
    starter.take_over(model, again, saved)
    printed = capsys.readouterr().out
    assert printed.count("what an optimiser counts among its settings begins anew") == said
    assert ('"k": 1' in printed) == said
    assert again.state_dict()["state"].keys() == {0, 1}


def test_checkpoint_before_the_first_update_holds_no_moments(tmp_path):
    """torch's own functions for checkpoints would count it as an update."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    path = tmp_path / "checkpoint_00000000.pt"
    checkpoints.save_checkpoint(path, model, optimizer, {})
    saved = torch.load(path, weights_only=True)
    assert not saved["optimizer"]["state"] and not optimizer.state
    checkpoints.load_checkpoint(path, model, optimizer)
    assert not optimizer.state
