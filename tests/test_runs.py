"""Whole runs: checkpoints, resume, signals, faults, and what a run says.

Each fault comes from outside, by a function that is replaced while main() runs. What must hold
for starter.py alone and with the guards of support/ is tested with both ("plain", "guarded").
"""
import dataclasses
import errno
import gc
import importlib.util
import inspect
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
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import safetensors.torch
import torch
from conftest import save_checkpoint, scalars, settings, variety
from reference.inputs import make_tokenizer

import starter
from lab import crash_test
from starter import InputError, RunStopped

REPOSITORY = Path(starter.__file__).resolve().parent
HAS_SUPPORT = (REPOSITORY / "support" / "fast.py").is_file()
needs_support = pytest.mark.skipif(not HAS_SUPPORT, reason="needs support/")
slow = pytest.mark.slow
GUARDED = pytest.param("guarded", marks=needs_support)
both = pytest.mark.parametrize("kind", ["plain", GUARDED])
# Where the two share the code that is tested, one of them is left to the slow tests.
plain_first = pytest.mark.parametrize(
    "kind", ["plain", pytest.param("guarded", marks=[slow, needs_support])])
guarded_first = pytest.mark.parametrize("kind", [pytest.param("plain", marks=slow), GUARDED])
if HAS_SUPPORT:
    from support import fast, runs

N_EVAL = 10  # problems of an evaluation, in settings()
ROLLOUT = 16  # responses of a step, in settings()


@pytest.fixture(scope="module", autouse=True)
def few_problems():
    """Making 10,000 problems would take most of the time of these runs."""
    with mock.patch.object(starter, "N_TRAIN_PROBLEMS", 60):
        yield


def plain_parts():
    return [starter.PLAIN], starter.OneProcess(), starter.Run


def run(kind="guarded" if HAS_SUPPORT else "plain", **given):
    """Calls main() with the parts in starter.py, or with those of support/."""
    parts = mock.patch.object(starter, "find_parts", plain_parts)
    with parts if kind == "plain" else nullcontext():
        return starter.main(**given)


def full_settings(checkpoint, folder, **changes):
    """A run in which every state matters: AdamW's moments, the KL controller, the reference model,
    random numbers in the reward, old log-probs."""
    full = dict(n_train_steps=6, save_every=2, eval_every=3, epochs_per_rollout=2,
                use_kl_penalty=True, kl_coef=0.1, kl_adaptation_method="target_sound",
                reward=crash_test.noisy_variety)
    return settings(checkpoint, folder / "runs", **full | changes)


@pytest.fixture(scope="module")
def undisturbed(checkpoint, tmp_path_factory):
    """Returns what a run that nothing interrupts ends with, for each kind."""
    known = {}

    def outcome(kind):
        if kind not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            run(kind, **full_settings(checkpoint, folder))
            known[kind] = crash_test.outcome(folder)
        return known[kind]

    return outcome


def at_call(owner, name, number, act, after=False):
    """A patch: call `number` (from 1) of owner.name also does act(), before or after itself."""
    real = getattr(owner, name)
    calls = itertools.count(1)

    def wrapped(*args, **kwargs):
        hit = next(calls) == number
        if hit and not after:
            act()
        result = real(*args, **kwargs)
        if hit and after:
            act()
        return result

    return mock.patch.object(owner, name, wrapped)


def at_reward(kind, place, broken):
    """A reward like variety(), but broken(text, problem) at this call, counted after those of the
    first evaluation."""
    trials = 1 if kind == "guarded" else 0  # support/ tries the reward before the run
    calls = itertools.count(1 - trials - N_EVAL)

    def reward(text, problem):
        call = next(calls)
        hit = place(call) if callable(place) else call == place
        return broken(text, problem) if hit else variety(text, problem)

    return reward


class Killed(BaseException):
    """Stands for kill -9 inside this process: no handler may catch it."""


def die():
    raise Killed


def kill(kind, checkpoint, folder, patch, **changes):
    with patch, pytest.raises(Killed):
        run(kind, **full_settings(checkpoint, folder, **changes))


def resume(kind, checkpoint, folder, **changes):
    random.seed(99)  # a new process has other random states
    torch.manual_seed(99)
    return run(kind, **full_settings(checkpoint, folder, resume=True, **changes))


def checkpoints_of(folder):
    return sorted(path.stem for path in folder.glob("runs/*/checkpoints/step_*.safetensors"))


# --------------------------------------------------------------------------------------------------
# Killed, and resumed

KILLS = [
    (starter, "evaluate", 1, slow), (starter, "evaluate", 2, ()), (starter, "rollout", 5, slow),
    (starter, "accumulate_gradients", 2, slow), (starter, "accumulate_gradients", 6, slow),
    (torch.nn.utils, "clip_grad_norm_", 7, slow), (torch.optim.AdamW, "step", 8, ()),
    (starter, "log_train", 3, slow), (starter, "report_text", 1, slow),
]


@both
@pytest.mark.parametrize("owner, name, number", [
    pytest.param(*where, marks=marks) for *where, marks in KILLS])
def test_resume_after_kill_is_bit_identical(checkpoint, tmp_path, undisturbed, kind, owner, name,
                                            number):
    kill(kind, checkpoint, tmp_path, at_call(owner, name, number, die))
    resume(kind, checkpoint, tmp_path)
    assert crash_test.outcome(tmp_path) == undisturbed(kind)


def cut_unfinished_file(folder):
    """What a kill in the middle of a write leaves."""
    file, = folder.glob("runs/*/checkpoints/unfinished")
    os.truncate(file, file.stat().st_size // 2)
    raise Killed


# Where a save dies: the call, whether after it, the newest whole checkpoint. Each save syncs one
# file, and with support/ its checksum before. Path.replace is called once for the settings when a
# run begins, and with support/ at each save; Path.unlink when a third checkpoint is there.
SAVES = [
    ("write_chunks", 2, False, 2), ("write_chunks", 2, True, 2),
    ("sync_to_disk", "first", False, 2), ("sync_to_disk", "last", True, 2),
    ("replace", "second", False, 2),
    ("replace", "second", True, 4), ("unlink", 1, False, 6),
]
OWNERS = {"write_chunks": starter, "sync_to_disk": starter, "replace": Path,
          "unlink": Path}
FAST_SAVES = (1, 4)


@both
@pytest.mark.parametrize("name, number, after, step", [
    pytest.param(*row, marks=() if i in FAST_SAVES else slow) for i, row in enumerate(SAVES)])
def test_save_that_was_cut_short_is_not_loaded(checkpoint, tmp_path, undisturbed, capsys, kind,
                                               name, number, after, step):
    """The second save, of step 4, dies before or after a file operation."""
    numbers = {"first": 2, "last": 2, "second": 3}
    if kind == "guarded":
        numbers = {"first": 3, "last": 4, "second": 5}
    number = numbers.get(number, number)
    half = name == "write_chunks" and after
    act = partial(cut_unfinished_file, tmp_path) if half else die
    kill(kind, checkpoint, tmp_path, at_call(OWNERS[name], name, number, act, after))
    capsys.readouterr()
    resume(kind, checkpoint, tmp_path)
    assert f"after step {step}\n" in capsys.readouterr().out
    assert crash_test.outcome(tmp_path) == undisturbed(kind)
    assert not list(tmp_path.glob("runs/*/checkpoints/unfinished"))
    assert len(checkpoints_of(tmp_path)) == (3 if step == 6 else 2)  # the next save takes the third


@pytest.fixture(scope="module")
def stopped(checkpoint, tmp_path_factory):
    """Returns the folder of a run that was killed in step 6, with checkpoints of steps 2, 4."""
    folder = tmp_path_factory.mktemp("stopped")
    kill("guarded", checkpoint, folder, at_call(starter, "log_train", 6, die))
    return folder


@needs_support
@pytest.mark.parametrize("suffix, damage", [
    ("safetensors", "flip"), pytest.param("safetensors", "cut", marks=slow),
    pytest.param("sha256", "gone", marks=slow), pytest.param("sha256", "cut", marks=slow),
    pytest.param("sha256", "flip", marks=slow)])
def test_damaged_checkpoint_gives_way_to_the_one_before(checkpoint, tmp_path, undisturbed, stopped,
                                                        capsys, suffix, damage):
    shutil.copytree(stopped / "runs", tmp_path / "runs")
    path = max(tmp_path.glob(f"runs/*/checkpoints/step_*.{suffix}"))
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    resume("guarded", checkpoint, tmp_path)
    printed = capsys.readouterr().out
    assert re.search(r"Warning: \S+step_00000004.safetensors is damaged \(.*\); going back to "
                     r"the checkpoint before it\n", printed)
    assert "after step 2" in printed
    assert crash_test.outcome(tmp_path) == undisturbed("guarded")


def test_plain_run_does_not_resume_from_half_a_checkpoint(checkpoint, tmp_path):
    kill("plain", checkpoint, tmp_path, at_call(starter, "log_train", 3, die))
    file, = tmp_path.glob("runs/*/checkpoints/*")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(InputError, match="step_00000002.safetensors' is not a checkpoint that can"):
        resume("plain", checkpoint, tmp_path)


@guarded_first
def test_resume_passes_over_folders_that_are_no_runs(checkpoint, tmp_path, capsys, kind):
    """The newest folder in out_dir is a model, the one before it a run whose settings are lost."""
    given = settings(checkpoint, tmp_path / "runs", n_train_steps=2)
    folder = run(kind, **given)["run_folder"]
    shutil.copytree(checkpoint, tmp_path / "runs" / "z_model")
    shutil.copytree(folder, tmp_path / "runs" / "y_run")
    (tmp_path / "runs" / "y_run" / "config.json").write_text("{")
    (tmp_path / "runs" / "z_empty").mkdir()
    capsys.readouterr()
    assert run(kind, **given | dict(resume=True, n_train_steps=3))["run_folder"] == folder
    printed = capsys.readouterr().out
    assert f"resumed: {folder} after step 2\n" in printed
    if kind == "guarded":
        assert "changed since: n_train_steps = 3 (was 2)\n" in printed


@guarded_first
def test_run_of_an_older_version_goes_on(checkpoint, tmp_path, capsys, kind):
    """main() has got a parameter since, and has lost one."""
    given = settings(checkpoint, tmp_path, n_train_steps=2)
    folder = run(kind, **given)["run_folder"]
    config = json.loads((folder / "config.json").read_text())
    config["version"] = "1.9"
    config["settings"].pop("importance_cap")
    config["settings"]["vllm_sleep"] = False
    (folder / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    run(kind, **given | dict(resume=True, n_train_steps=3))
    printed = capsys.readouterr().out
    assert "Step 3 |" in printed
    if kind == "guarded":
        assert "new since: importance_cap = 2.0\n" in printed
        assert printed.count("since: ") == 2


def test_runs_of_the_same_second_get_a_folder_each(tmp_path):
    """Nor does one run write into the folder of another, whatever its name."""
    cfg = SimpleNamespace(out_dir=tmp_path, resume=False, resume_from=None, run_name="same",
                          parameters=[])
    first, second = (starter.Run(cfg, starter.OneProcess()) for _ in range(2))
    assert first.folder != second.folder
    first.make_folder()
    second.folder = first.folder
    with pytest.raises(FileExistsError):
        second.make_folder()


@needs_support
def test_second_process_cannot_write_into_a_run(checkpoint, tmp_path, stopped):
    shutil.copytree(stopped / "runs", tmp_path / "runs")
    folder, = tmp_path.glob("runs/*")
    program = ("import fcntl, sys, time; file = open(sys.argv[1], 'w'); "
               "fcntl.lockf(file, fcntl.LOCK_EX); print('locked', flush=True); time.sleep(60)")
    other = subprocess.Popen([sys.executable, "-c", program, str(folder / ".lock")],
                             stdout=subprocess.PIPE)
    other.stdout.readline()
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="is in use by another process; wait until it ends"):
        resume("guarded", checkpoint, tmp_path)
    other.kill()
    other.wait()
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@needs_support
def test_finished_run_lets_another_process_into_its_folder(checkpoint, tmp_path):
    folder = run("guarded", **settings(checkpoint, tmp_path, n_train_steps=1))["run_folder"]
    program = ("import fcntl, sys; file = open(sys.argv[1], 'ab'); "
               "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)")
    done = subprocess.run([sys.executable, "-c", program, str(folder / ".lock")],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@slow
@needs_support
def test_changed_script_is_kept_beside_the_new_one(checkpoint, tmp_path, capsys):
    given = settings(checkpoint, tmp_path, n_train_steps=1)
    folder = run(**given)["run_folder"]
    (folder / "starter.py").write_text("# the script of that day\n")
    run(**given | dict(resume=True, n_train_steps=2))
    assert "starter.py has changed since this run began" in capsys.readouterr().out
    old, = folder.glob("starter_until_*.py")
    assert old.read_text() == "# the script of that day\n"
    assert (folder / "starter.py").read_bytes() == (REPOSITORY / "starter.py").read_bytes()


# --------------------------------------------------------------------------------------------------
# Signals

@both
@pytest.mark.parametrize("number, status", [
    (signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=slow)])
def test_signal_ends_the_run_after_its_step_with_a_checkpoint(checkpoint, tmp_path, undisturbed,
                                                              capsys, kind, number, status):
    def send():
        os.kill(os.getpid(), number)

    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with at_call(starter, "accumulate_gradients", 5, send), pytest.raises(SystemExit) as ended:
        run(kind, **full_settings(checkpoint, tmp_path, save_every=0))
    assert ended.value.code == status
    printed = capsys.readouterr().out
    assert "stopping after this step, with a checkpoint, the model and a report; once" in printed
    assert "stopped after step 3 of 6; to go on, add --resume " in printed
    assert "Eval at step 3 |" in printed and "=== Report ===" in printed
    [folder] = (tmp_path / "runs").iterdir()
    assert (folder / "report.txt").read_text().strip() in printed
    saved = safetensors.torch.load_file(folder / "model" / "model.safetensors")
    weights = safetensors.torch.load_file(
        folder / "checkpoints" / "step_00000003.safetensors")
    assert all(torch.equal(saved[name], weights[f"weights {name}"]) for name in saved)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert checkpoints_of(tmp_path) == ["step_00000003"]
    gc.collect()
    resume(kind, checkpoint, tmp_path)
    assert crash_test.outcome(tmp_path) == undisturbed(kind)


@plain_first
def test_second_signal_ends_the_run_at_once(checkpoint, tmp_path, kind):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with at_call(starter, "accumulate_gradients", 2, twice), pytest.raises(KeyboardInterrupt):
        run(kind, **full_settings(checkpoint, tmp_path))
    assert checkpoints_of(tmp_path) == []


# --------------------------------------------------------------------------------------------------
# A new run that goes on from another's checkpoint, and names of runs

@both
def test_resume_from_begins_a_new_run_under_other_settings(checkpoint, tmp_path, capsys, kind):
    first = run(kind, **full_settings(checkpoint, tmp_path))["run_folder"]
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    origin = first / "checkpoints" / "step_00000004.safetensors"
    changes = dict(resume_from=str(origin), kl_coef=0.3, kl_adaptation_method="none",
                   learning_rate=1e-4, n_train_steps=5, eval_every=2)
    with mock.patch.object(starter, "train", side_effect=StopIteration) as train:
        with pytest.raises(StopIteration):
            run(kind, **full_settings(checkpoint, tmp_path, **changes))
    policy, optimizer = train.call_args.args[0], train.call_args.args[3]
    saved = safetensors.torch.load_file(origin)
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter.detach(), saved[f"weights {name}"])
        assert torch.equal(optimizer.state[parameter]["exp_avg"], saved[f"exp_avg {name}"])
    capsys.readouterr()
    fork = run(kind, **full_settings(checkpoint, tmp_path, **changes))["run_folder"]
    printed = capsys.readouterr().out
    assert f"a new run from {origin} after step 4" in printed
    assert re.findall(r"^Eval at step (\d) \|", printed, re.MULTILINE) == ["4", "5"]
    if kind == "guarded":
        assert "changed since: kl_coef = 0.3 (was 0.1)" in printed
    assert re.findall(r"^Step (\d) \|", printed, re.MULTILINE) == ["5"]
    assert fork != first and scalars(fork)["train/kl_penalty"].keys() == {5}
    assert before == {path: path.read_bytes() for path in before}


@both
def test_resume_from_takes_the_newest_checkpoint_of_a_run(checkpoint, tmp_path, capsys, kind):
    first = run(kind, **full_settings(checkpoint, tmp_path, n_train_steps=2))["run_folder"]
    changes = dict(resume_from=first, n_train_steps=3, seed=5, task="countdown")
    run(kind, **full_settings(checkpoint, tmp_path, max_new_tokens=8, **changes))
    assert "step_00000002.safetensors after step 2" in capsys.readouterr().out


@both
def test_checkpoint_of_another_model_is_refused(checkpoint, tmp_path, kind):
    first = run(kind, **full_settings(checkpoint, tmp_path, n_train_steps=2))["run_folder"]
    other = save_checkpoint(tmp_path / "other", intermediate_size=64)
    changes = dict(resume_from=first, model_id=str(other), n_train_steps=3)
    with pytest.raises(InputError, match="which '.*other' does not have; use the model that it"):
        run(kind, **full_settings(checkpoint, tmp_path) | changes)


@needs_support
def test_damaged_checkpoint_is_no_origin(checkpoint, tmp_path):
    first = run(**full_settings(checkpoint, tmp_path, n_train_steps=2))["run_folder"]
    origin = first / "checkpoints" / "step_00000002.safetensors"
    content = bytearray(origin.read_bytes())
    content[-1] ^= 1
    origin.write_bytes(content)
    with pytest.raises(InputError, match="is damaged .its checksum is another.; give another"):
        run(**full_settings(checkpoint, tmp_path, n_train_steps=3, resume_from=origin))


@needs_support
@pytest.mark.parametrize("changes, name", [
    (dict(), ""),
    (dict(use_kl_penalty=True), "kl0.3"),
    (dict(use_kl_penalty=True, kl_coef=0.02, learning_rate=3e-5, seed=1), "kl0.02_seed1_lr3e-5"),
    (dict(use_kl_penalty=True, kl_adaptation_method="dynamic+sigmoid"), "kl0.3_dynamic+sigmoid"),
    (dict(n_train_steps=50, engine="transformers", out_dir="elsewhere"), "steps50"),
    (dict(task="a/b/sums.jsonl", reward=variety), "sums.jsonl_variety"),
    (dict(reward=[(starter.reward_fn, 1.0), (variety, 0.5)]), "reward_fn+variety"),
    (dict(clip_range=(0.2, 0.28)), "clip_range-0.2-0.28"),
])
def test_run_is_named_by_the_settings_that_were_changed(changes, name):
    defaults = {key: p.default for key, p in inspect.signature(starter.main).parameters.items()}
    cfg = SimpleNamespace(**defaults | {"model_id": "tiny"} | starter.TINY | changes,
                          parameters=list(defaults))
    assert runs.name_of(runs.changed_settings(cfg), cfg) == name


@both
def test_run_name_ends_the_name_of_the_folder(checkpoint, tmp_path, kind):
    folder = run(kind, **settings(checkpoint, tmp_path, n_train_steps=1, run_name="mine"))
    assert re.fullmatch(r"[\d_.-]+_mine", folder["run_folder"].name)


# --------------------------------------------------------------------------------------------------
# A disk that refuses

def test_full_disk_costs_a_checkpoint_and_not_the_run(checkpoint, tmp_path, undisturbed, capsys):
    """While the second checkpoint is written no file can grow beyond 100 kB."""
    pytest.importorskip("support.fast")
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, limits[1]))
    free = partial(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
    try:
        with at_call(starter.Run, "save", 2, fill), at_call(runs.GuardedRun, "save", 2, free, True):
            result = run("guarded", **full_settings(checkpoint, tmp_path))
    finally:
        free()
    assert re.search(r"Warning: no checkpoint of step 4: .*[Ff]ile too large.*; the one before it "
                     r"stays\n", capsys.readouterr().out)
    names = sorted(path.name for path in result["run_folder"].glob("checkpoints/*.safetensors"))
    assert names == ["step_00000002.safetensors", "step_00000006.safetensors"]
    assert crash_test.outcome(tmp_path) == undisturbed("guarded")


@slow
@needs_support
def test_checksums_of_deleted_checkpoints_are_deleted(checkpoint, tmp_path):
    result = run("guarded", **settings(checkpoint, tmp_path, save_every=1))
    folder = result["run_folder"] / "checkpoints"
    assert {path.stem for path in folder.glob("*.safetensors")} == {"step_00000003",
                                                                    "step_00000004"}
    assert "step_00000001" not in {path.stem for path in folder.glob("*.sha256")}


def test_every_tensor_is_made_whole_where_the_disk_is_full(tmp_path):
    """Other processes take part in making each tensor whole, and would wait for ever."""
    def fill(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    made_whole = []
    saving = SimpleNamespace(
        tensors=lambda: {name: torch.ones(2) for name in "abc"}, state={"step": 1},
        folder=tmp_path, write_checkpoint=fill,
        ranks=SimpleNamespace(rank=0, whole=lambda part: made_whole.append(part) or part))
    with pytest.raises(OSError, match="No space"):
        starter.Run.save(saving)
    assert len(made_whole) == 3


@slow
def test_plain_run_on_a_full_disk_can_be_resumed(checkpoint, tmp_path, undisturbed):
    def fill():
        raise OSError(errno.ENOSPC, "No space left on device")

    with at_call(starter, "write_chunks", 2, fill), pytest.raises(OSError, match="No space"):
        run("plain", **full_settings(checkpoint, tmp_path))
    resume("plain", checkpoint, tmp_path)
    assert crash_test.outcome(tmp_path) == undisturbed("plain")


@slow
@needs_support
def test_run_goes_on_where_checkpoints_cannot_be_written(checkpoint, tmp_path, capsys):
    def put_a_file_there():
        folder, = tmp_path.glob("runs/*/checkpoints")
        shutil.rmtree(folder)
        folder.write_text("a file where the folder was")

    with at_call(runs.GuardedRun, "save", 2, put_a_file_there):
        result = run("guarded", **full_settings(checkpoint, tmp_path))
    printed = capsys.readouterr().out
    assert printed.count("Warning: no checkpoint of step") == 2 and "=== Report ===" in printed
    assert len(scalars(result["run_folder"])["train/loss"]) == 6


@slow
@needs_support
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
def test_run_survives_the_loss_of_its_folder(checkpoint, tmp_path, undisturbed, capsys):
    """The folder is deleted in the middle. A new log is begun, and the next checkpoint is whole."""
    def vanish():
        for path in tmp_path.glob("runs/*"):
            shutil.rmtree(path)

    with at_call(starter, "evaluate", 2, vanish):
        kill("guarded", checkpoint, tmp_path, at_call(starter, "rollout", 8, die))
    assert re.search(r"Warning: the log of .* could not be written \(.*\); a new file is begun",
                     capsys.readouterr().out)
    resume("guarded", checkpoint, tmp_path)
    ours, whole = crash_test.outcome(tmp_path), undisturbed("guarded")
    assert ours["hashes"] == whole["hashes"]
    for tag, logged in whole["log"].items():
        assert [entry for entry in ours["log"][tag] if entry[0] > 3] == \
            [entry for entry in logged if entry[0] > 3]


# --------------------------------------------------------------------------------------------------
# Lack of memory

def weights_of(folder):
    policy, _ = starter.init_policy(folder, "cpu")
    return torch.cat([parameter.flatten() for parameter in policy.parameters()])


@needs_support
def test_measured_kl_is_that_of_the_logits_of_both_models(checkpoint):
    policy, start = (starter.init_policy(str(checkpoint), "cpu")[0] for _ in range(2))
    with torch.no_grad():
        for parameter in policy.parameters():  # the head's, too
            parameter.mul_(1.1)
    responses = [starter.Response([1, 2, 3], [10, 11, 12], [-1.0] * 3, True),
                 starter.Response([4], [13, 14], [-1.0] * 2, True)]
    cfg = SimpleNamespace(seed=0, max_new_tokens=4, temperature=0.7, stop_token_ids=(0,),
                          bf16=False, max_tokens_per_microbatch=100)
    parts = starter.Parts(starter.PLAIN, starter.OneProcess(), None)
    problems = [{"prompt_ids": response.prompt_ids} for response in responses]
    with mock.patch.object(starter, "rollout", return_value=responses), torch.no_grad():
        measured = runs.measure_kl(policy, start, None, problems, cfg, parts)
    of_token = {int(token): (kl, int(place)) for kl, place, token in measured.T.tolist()}
    assert len(of_token) == 5
    for prompt_ids, ids, *_ in responses:
        both = [model(torch.tensor([prompt_ids + ids])).logits[0].detach().double() / 0.7
                for model in (policy, start)]
        log_p, log_q = (logits.log_softmax(dim=1) for logits in both)
        kl = (log_p.exp() * (log_p - log_q)).sum(dim=1)
        for place, token in enumerate(ids):
            at = len(prompt_ids) - 1 + place
            assert of_token[token] == (pytest.approx(kl[at].item(), rel=1e-4), place)
            assert kl[at] > 1e-4


@needs_support
@pytest.mark.parametrize("with_kl", [True, pytest.param(False, marks=slow)])
def test_step_after_a_lack_of_memory_has_the_same_gradient(checkpoint, tmp_path, capsys, with_kl):
    """Memory for 100 tokens: larger microbatches fail in the middle of the backward pass, much
    larger ones in the forward pass of the reference model."""
    real_step = starter.grpo_microbatch_step

    def small_step(policy, rows, *args):
        found = real_step(policy, rows, *args)
        if rows["labels"].numel() > 100:  # after gradients were added
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return found

    def small_hidden(model, rows, bf16=False):
        if rows["input_ids"].numel() > 200 and not torch.is_grad_enabled():
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:128] . DefaultCPUAllocator: can't "
                               "allocate memory: you tried to allocate 9 bytes.")
        return fast.COMPUTE.hidden_states(model, rows, bf16)

    def small_parts():
        real = dataclasses.replace(fast.COMPUTE, hidden_states=small_hidden)
        return [real], starter.OneProcess(), runs.GuardedRun

    kl = dict(use_kl_penalty=True, kl_coef=0.1) if with_kl else {}
    given = dict(n_train_steps=5, max_tokens_per_microbatch=1000, epochs_per_rollout=2, **kl)
    weights = []
    for name, patches in (("plenty", {}), ("small", dict(grpo_microbatch_step=small_step,
                                                          find_parts=small_parts))):
        with mock.patch.multiple(starter, **patches or dict(main=starter.main)), \
                mock.patch.object(runs, "refuse_settings_without_effect"), \
                mock.patch.object(starter, "choose_compute", lambda found, *_: (found[0], [])), \
                mock.patch.object(runs, "measure_kl", return_value=torch.ones(3, 1)):
            result = run("guarded", **settings(checkpoint, tmp_path / name, **given))
        weights.append(weights_of(result["run_folder"] / "model"))
    printed = capsys.readouterr().out
    warning = r"Warning: out of memory: microbatches of (\d+) tokens from here on\n"
    sizes = list(map(int, re.findall(warning, printed)))
    assert len(sizes) >= 2 and sizes == sorted(set(sizes), reverse=True)  # ever smaller
    assert not re.search(warning, printed[printed.rindex("Step 2 |"):])  # until they fit
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


@needs_support
@pytest.mark.parametrize("given, used", [(100_000, "halved"), (50_000, 50_000)])
def test_resumed_run_keeps_smaller_microbatches_until_a_number_is_given(checkpoint, tmp_path, given,
                                                                        used):
    """Memory was short in step 1. Only the number that turned out too large is replaced."""
    def no_memory():
        raise torch.OutOfMemoryError("CUDA out of memory")

    seen = []
    with at_call(starter, "grpo_microbatch_step", 1, no_memory):
        run(**settings(checkpoint, tmp_path, n_train_steps=1, max_tokens_per_microbatch=100_000))
    real = runs.GuardedRun.open
    with mock.patch.object(runs.GuardedRun, "open", lambda self, *models: (
            seen.append((self.state["max_tokens"], self.cfg.max_tokens_per_microbatch)),
            real(self, *models))):
        run(**settings(checkpoint, tmp_path, n_train_steps=2, resume=True,
                       max_tokens_per_microbatch=given))
    (halved, now), = seen
    assert halved < 50_000
    assert now == (halved if used == "halved" else used)


@needs_support
def test_lack_of_memory_for_one_response_stops_the_run(checkpoint, tmp_path):
    def no_memory():
        starter.grpo_microbatch_step = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out"))

    with mock.patch.object(starter, "grpo_microbatch_step", starter.grpo_microbatch_step), \
            at_call(starter, "rollout", 3, no_memory), \
            pytest.raises(RunStopped, match="out of memory with a single response at a time; "
                                            "lower max_new_tokens"):
        run("guarded", **settings(checkpoint, tmp_path / "runs"))
    assert checkpoints_of(tmp_path) == ["step_00000001"]  # the step before is not lost


@needs_support
def test_lack_of_memory_is_told_from_other_errors():
    assert runs.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    on_a_cpu = "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: 9"
    assert runs.is_out_of_memory(RuntimeError(on_a_cpu))
    assert not runs.is_out_of_memory(RuntimeError("shapes do not match"))


@needs_support
def test_halved_microbatches_have_the_same_rows():
    def rows(first, n):
        return {"labels": torch.arange(first, first + n)[:, None], "ref_hidden": torch.ones(n, 2)}

    halves = runs.halved([rows(10, 1), rows(20, 5)])
    assert [half["labels"][:, 0].tolist() for half in halves] == [[10], [20, 21, 22], [23, 24]]
    assert not any("ref_hidden" in half for half in halves)


@slow
@guarded_first
def test_other_errors_do_not_pass_for_a_lack_of_memory(checkpoint, tmp_path, kind):
    with mock.patch.object(starter, "grpo_microbatch_step", side_effect=RuntimeError("shapes")):
        with pytest.raises(RuntimeError, match="shapes"):
            run(kind, **settings(checkpoint, tmp_path))


# --------------------------------------------------------------------------------------------------
# Numbers that are not finite

def return_nan(text, problem):
    return math.nan


def return_inf(text, problem):
    return math.inf


@guarded_first
@pytest.mark.parametrize("bad", [return_nan, pytest.param(return_inf, marks=slow)])
def test_reward_that_is_not_finite_skips_its_step(checkpoint, tmp_path, capsys, kind, bad):
    """In step 3 one response gets no finite reward: that step moves nothing, and says so."""
    reward = at_reward(kind, 2 * ROLLOUT + 5, bad)
    result = run(kind, **settings(
        checkpoint, tmp_path, n_train_steps=5, reward=reward, use_kl_penalty=True, kl_coef=0.1,
        epochs_per_rollout=2, kl_adaptation_method="target"))
    logged = scalars(result["run_folder"])
    assert list(logged["train/skipped_steps"].values()) == [0, 0, 1, 1, 1]
    assert math.isnan(logged["train/loss"][3])
    assert all(math.isfinite(loss) for step, loss in logged["train/loss"].items() if step != 3)
    assert all(math.isfinite(beta) for beta in logged["adaptive_kl/current_beta"].values())
    assert math.isfinite(result["after"]["reward_mean"])
    printed = capsys.readouterr().out
    assert "Warning: step 3 is skipped, its loss and grad_norm not finite" in printed
    if kind == "guarded":
        path = result["run_folder"] / "skipped_step_3.json"
        assert f"The responses of step 3 are kept in {path}\n" in printed
        kept = json.loads(path.read_text())
        assert kept["step"] == 3 and len(kept["responses"]) == ROLLOUT
        assert str(kept["responses"][4]["reward"]) == str(bad("", {}))
        assert set(kept["responses"][4]) == {"prompt", "text", "reward", "ids", "log_probs"}


@plain_first
def test_gradient_that_is_not_finite_moves_no_weight(checkpoint, tmp_path, kind):
    """The loss of step 2 is finite, one gradient is not."""
    weights = {}
    real = torch.nn.utils.clip_grad_norm_
    calls = itertools.count(1)

    def spoil(parameters, norm):
        parameters = list(parameters)
        step = next(calls)
        weights[step] = [parameter.detach().clone() for parameter in parameters]
        if step == 2:
            parameters[-1].grad[0] = math.inf
        return real(parameters, norm)

    with mock.patch.object(torch.nn.utils, "clip_grad_norm_", spoil):
        result = run(kind, **settings(checkpoint, tmp_path, n_train_steps=4))
    assert all(map(torch.equal, weights[2], weights[3]))
    assert not any(map(torch.equal, weights[3], weights[4]))
    assert list(scalars(result["run_folder"])["train/skipped_steps"].values()) == [0, 1, 1, 1]


def test_step_ends_with_the_epoch_whose_gradient_is_not_finite(checkpoint, tmp_path):
    real = torch.nn.utils.clip_grad_norm_
    calls = []

    def spoil(parameters, norm):
        parameters = list(parameters)
        calls.append(norm)
        if len(calls) == 1:
            parameters[-1].grad[0] = math.inf
        return real(parameters, norm)

    with mock.patch.object(torch.nn.utils, "clip_grad_norm_", spoil):
        result = run("plain", **settings(checkpoint, tmp_path, n_train_steps=2,
                                         epochs_per_rollout=2))
    assert len(calls) == 1 + 2
    assert list(scalars(result["run_folder"])["train/skipped_steps"].values()) == [1, 1]


@needs_support
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Windows has no timers")
def test_time_limit_leaves_no_timer_and_the_handler_that_was_there():
    before = signal.getsignal(signal.SIGALRM)
    with runs.time_limit(60):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


@slow
@needs_support
def test_run_stops_after_several_skipped_steps(checkpoint, tmp_path):
    reward = at_reward("guarded", lambda call: call > ROLLOUT, return_nan)
    given = settings(checkpoint, tmp_path / "runs", n_train_steps=9, save_every=1)
    with mock.patch.object(runs, "MAX_SKIPPED_STEPS", 3), \
            pytest.raises(RunStopped, match="3 steps in a row had a loss or gradient that is not "
                                            "finite; mend the reward or lower learning_rate"):
        run("guarded", **given | dict(reward=reward))
    assert checkpoints_of(tmp_path)[-1] == "step_00000004"
    gc.collect()
    mended = at_reward("guarded", lambda call: False, return_nan)  # under the same name
    result = run("guarded", **given | dict(reward=mended, resume=True))
    skipped = scalars(result["run_folder"])["train/skipped_steps"]
    assert list(skipped.values()) == [0, 1, 2, 3, 3, 3, 3, 3, 3]


# --------------------------------------------------------------------------------------------------
# Errors in the middle of a run

def hang(text, problem):
    while True:
        try:
            time.sleep(60)
        except Exception:  # even one that catches everything it may
            pass


def divide_by_zero(text, problem):
    return 1 / 0


def return_text(text, problem):
    return "1.0"


@guarded_first
@pytest.mark.parametrize("broken, words", [
    (divide_by_zero, "raised ZeroDivisionError: division by zero on the text"),
    pytest.param(return_text, "returned '1.0' on the text", marks=slow),
    (hang, "took more than 0.2 s on the text")])
def test_broken_reward_stops_the_run_in_one_sentence(checkpoint, tmp_path, kind, broken, words):
    if broken is hang and kind == "plain":
        pytest.skip("the limit of time is a guard of support/")
    reward = at_reward(kind, ROLLOUT + 3, broken)
    limit = mock.patch.object(runs, "REWARD_SECONDS", 0.2) if HAS_SUPPORT else nullcontext()
    with limit, pytest.raises(InputError, match=f"reward {re.escape(words)} .*; it must return"):
        run(kind, **settings(checkpoint, tmp_path / "runs", reward=reward))
    saved = ["step_00000001"] if kind == "guarded" else []  # support/ saves the step before
    assert checkpoints_of(tmp_path) == saved


@needs_support
def test_weights_in_the_middle_of_a_step_are_never_saved(checkpoint, tmp_path, undisturbed):
    """An error in the second epoch of step 4, when the weights have moved: they belong neither to
    step 3 nor to step 4."""
    bug = mock.Mock(side_effect=RuntimeError("a bug"))
    with at_call(starter, "accumulate_gradients", 8, bug), pytest.raises(RuntimeError, match="bug"):
        run("guarded", **full_settings(checkpoint, tmp_path))
    assert checkpoints_of(tmp_path) == ["step_00000002"]
    gc.collect()
    resume("guarded", checkpoint, tmp_path)
    assert crash_test.outcome(tmp_path) == undisturbed("guarded")


@needs_support
@pytest.mark.parametrize("name, number", [
    ("evaluate", 2), pytest.param("rollout", 6, marks=slow)])
def test_run_that_an_error_stopped_goes_on_with_the_same_bits(checkpoint, tmp_path, undisturbed,
                                                              name, number):
    """Between the checkpoints of steps 2 and 4, after random numbers were drawn: the finished step
    is saved, and nothing of the unfinished one counts."""
    bug = mock.Mock(side_effect=RuntimeError("a bug"))
    with at_call(starter, name, number, bug, after=True), pytest.raises(RuntimeError, match="bug"):
        run("guarded", **full_settings(checkpoint, tmp_path))
    assert checkpoints_of(tmp_path) == ["step_00000002", "step_00000003"]
    gc.collect()
    resume("guarded", checkpoint, tmp_path)
    assert crash_test.outcome(tmp_path) == undisturbed("guarded")


# --------------------------------------------------------------------------------------------------
# An engine that dies or hangs

class FakeEngine:
    """As much of vLLM's LLM as is called. It samples with the policy itself."""
    started = 0

    def __init__(self, policy, faults):
        FakeEngine.started += 1
        self.policy = policy
        self.faults = faults
        self.weights = None
        self.fresh = False

    def collective_rpc(self, load, args):
        self.weights = {name: parameter.clone() for name, parameter in args[0]()}

    def reset_prefix_cache(self):
        self.fresh = True
        return True

    def generate(self, prompts, params, use_tqdm):
        assert self.fresh, "what was cached before would decide over bits"
        self.fresh = False
        if self.faults:
            self.faults.pop()()
        assert all(torch.equal(parameter, self.weights[name])
                   for name, parameter in self.policy.named_parameters()), "old weights"
        first = params[0]
        sampling = starter.Sampling(first.n, first.max_tokens, first.temperature, first.seed,
                                    tuple(first.stop_token_ids))
        prompts = [prompt["prompt_token_ids"] for prompt in prompts]
        outputs = []
        for response in starter.rollout_with_transformers(self.policy, prompts, sampling):
            chosen = zip(response.response_ids, response.log_probs)
            outputs.append(SimpleNamespace(
                token_ids=response.response_ids,
                finish_reason="stop" if response.finished else "length",
                logprobs=[{token: SimpleNamespace(logprob=value)} for token, value in chosen]))
        return [SimpleNamespace(outputs=outputs[i:i + first.n])
                for i in range(0, len(outputs), first.n)]


def run_with_fake_engine(kind, checkpoint, folder, faults=()):
    """A run whose engine has these faults, one a call, from the rollout of step 2 on."""
    policies = []
    active = []
    real_init = starter.init_policy

    def init_policy(*args):
        policies.append(real_init(*args))
        return policies[-1]

    def init_vllm(*args):
        return FakeEngine(policies[0][0], active)

    FakeEngine.started = 0
    vllm = SimpleNamespace(SamplingParams=SimpleNamespace)
    with mock.patch.multiple(starter, init_policy=init_policy, init_vllm=init_vllm), \
            mock.patch.dict(sys.modules, vllm=vllm), \
            mock.patch.object(importlib.util, "find_spec", return_value=True), \
            at_call(starter, "rollout", 3, lambda: active.extend(faults)):
        return run(kind, **settings(checkpoint, folder / "runs", engine="vllm", n_train_steps=3,
                                    save_every=3))


def engine_dies():
    raise RuntimeError("EngineDeadError")


def engine_hangs():
    time.sleep(60)


@needs_support
@pytest.mark.parametrize("fault, words", [
    (engine_dies, r"failed \(RuntimeError: EngineDeadError\)"),
    pytest.param(engine_hangs, "did not return within 2 s", marks=slow)])
def test_engine_is_started_again_with_the_present_weights(checkpoint, tmp_path, capsys, fault,
                                                          words):
    with mock.patch.object(runs, "ENGINE_SECONDS", 2):
        run_with_fake_engine("guarded", checkpoint, tmp_path / "sound")
        assert FakeEngine.started == 1
        run_with_fake_engine("guarded", checkpoint, tmp_path / "once", [fault])
        assert FakeEngine.started == 2
        assert re.search(rf"Warning: vLLM's generate {words}; it is started again with the "
                         r"present weights\n", capsys.readouterr().out)
        assert crash_test.outcome(tmp_path / "once") == crash_test.outcome(tmp_path / "sound")
        with pytest.raises(RunStopped, match=f"vLLM's generate {words}, twice; resume = True"):
            run_with_fake_engine("guarded", checkpoint, tmp_path / "twice", [fault, fault])
    assert checkpoints_of(tmp_path / "twice") == ["step_00000001"]


@slow
def test_plain_run_ends_with_its_engine(checkpoint, tmp_path):
    run_with_fake_engine("plain", checkpoint, tmp_path / "sound")
    with pytest.raises(RuntimeError, match="EngineDeadError"):
        run_with_fake_engine("plain", checkpoint, tmp_path / "dies", [engine_dies])


@needs_support
def test_engine_that_cannot_start_again_stops_the_run(capsys):
    engines = iter([mock.Mock(generate=mock.Mock(side_effect=RuntimeError("died")))])

    def start():
        for engine in engines:
            return engine
        raise ValueError("no memory for the cache")

    with pytest.raises(RunStopped, match=r"vLLM's generate failed \(ValueError: no memory for the "
                                         r"cache\), twice; resume = True"):
        runs.RestartedVLLM(start, None, starter.OneProcess()).generate([])
    assert "failed (RuntimeError: died); it is started again" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# For real: kill -9, memory that ends

def test_published_kills_were_all_survived():
    rows = crash_test.read_rows()
    kinds = {(row["engine"], row["parts"]) for row in rows}
    assert {("transformers", "support/"), ("vllm", "support/")} <= kinds
    for kind in kinds:
        of_kind = [row for row in rows if (row["engine"], row["parts"]) == kind]
        assert len(of_kind) >= 50, kind
        assert {row["phase"] for row in of_kind} == set(crash_test.PHASES)
    assert [row for row in rows if not crash_test.is_same(row)] == []


@slow
@needs_support
def test_killed_processes_end_with_the_same_bits():
    for row in crash_test.kill_runs(range(4), at_once=2):
        assert crash_test.is_same(row), row


def run_program(program, *arguments, timeout=300):
    """Runs a program that uses this file as t, with the built-in problems cut to 60."""
    program = ("import starter, test_runs as t\nstarter.N_TRAIN_PROBLEMS = 60\n" + program)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(
        map(str, (REPOSITORY, Path(__file__).parent)))}
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], text=True,
                          env=environment, capture_output=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@slow
@needs_support
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_real_lack_of_memory_does_not_end_the_run(checkpoint, tmp_path):
    """The address space is limited to what is in use before the update and a little more; a large
    microbatch does not fit."""
    program = """
import resource, sys
from pathlib import Path
real = starter.accumulate_gradients
def limited(*args, **kwargs):
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = in_use + int(sys.argv[3]) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        return real(*args, **kwargs)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
starter.accumulate_gradients = limited
t.run(**t.settings(sys.argv[1], sys.argv[2], n_train_steps=2, rollout_batch_size=1024,
                   max_new_tokens=32, max_tokens_per_microbatch=100_000))
"""
    weights = []
    for name, megabytes in (("plenty", 20_000), ("small", 300)):
        printed = run_program(program, checkpoint, tmp_path / name, megabytes)
        folder, = (tmp_path / name).glob("*/model")
        weights.append(weights_of(folder))
    assert "Warning: out of memory: microbatches of " in printed and printed.count("Step ") == 2
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


# --------------------------------------------------------------------------------------------------
# What a run computes

def numbers_of(result):
    """The scalars of a run without those that measure time or memory."""
    return {tag: values for tag, values in scalars(result["run_folder"]).items()
            if not tag.startswith(("time/", "mem/")) and tag != "train/tokens_per_s"}


@guarded_first
def test_same_seed_gives_the_same_numbers(checkpoint, tmp_path, kind):
    first, second, other = (
        numbers_of(run(kind, **settings(checkpoint, tmp_path, use_kl_penalty=True, seed=seed,
                                        n_train_steps=2))) for seed in (0, 0, 1))
    assert first == second != other


@both
@pytest.mark.parametrize("loss_average", ["grpo", "dapo"])
def test_truncated_responses_can_be_left_out_of_the_loss(checkpoint, tmp_path, kind,
                                                         loss_average):
    """Only tokens of responses that ended by themselves have a weight, and their weights add up
    as if there were no others."""
    real_rollout, real_update = starter.rollout, starter.accumulate_gradients
    sampled, updated = [], []

    def rollout(*given):
        responses = [r._replace(finished=i % 3 == 0) for i, r in enumerate(real_rollout(*given))]
        sampled.append(responses)
        return responses

    def update(policy, microbatches, *others):
        updated.append([dict(rows) for rows in microbatches])
        return real_update(policy, microbatches, *others)

    with mock.patch.object(starter, "rollout", rollout), \
            mock.patch.object(starter, "accumulate_gradients", update):
        run(kind, **settings(checkpoint, tmp_path, n_train_steps=1, mask_truncated=True,
                             loss_average=loss_average, use_kl_penalty=True, kl_coef=0.1))
    finished = [r for r in sampled[1] if r.finished]
    counted = torch.cat([(rows["weights"] > 0).sum(dim=1) for rows in updated[0]])
    assert sorted(counted[counted > 0].tolist()) == sorted(len(r.response_ids) for r in finished)
    weights = sum(rows["weights"].sum() for rows in updated[0])
    assert weights == pytest.approx(1.0 if loss_average == "dapo" else len(finished) / ROLLOUT)


@both
def test_step_of_truncated_responses_alone_changes_nothing(checkpoint, tmp_path, kind):
    real = starter.rollout

    def rollout(*given):
        return [response._replace(finished=False) for response in real(*given)]

    with mock.patch.object(starter, "rollout", rollout):
        result = run(kind, **settings(checkpoint, tmp_path, n_train_steps=2, mask_truncated=True,
                                      use_kl_penalty=True, kl_coef=0.1))
    logged = scalars(result["run_folder"])
    assert set(logged["train/loss"].values()) == set(logged["train/grad_norm"].values()) == {0.0}
    before = safetensors.torch.load_file(checkpoint / "model.safetensors")
    after = safetensors.torch.load_file(result["run_folder"] / "model" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


@needs_support
def test_saved_model_can_be_trained_further_with_its_skills(checkpoint, tmp_path):
    folder = tmp_path / "with_skills"
    shutil.copytree(checkpoint, folder)
    (folder / "retention.jsonl").write_text(
        '{"skill": "sort", "prompt": "sort 21", "answer": "12"}\n')
    first = run(**settings(folder, tmp_path, n_train_steps=1))["run_folder"]
    further = run(**settings(first / "model", tmp_path, n_train_steps=1))
    assert "retention_sort" in further["after"]


@plain_first
def test_saved_model_is_the_trained_one(checkpoint, tmp_path, kind):
    trained = {}
    real = starter.evaluate

    def note(policy, *args):  # before training and after
        trained.update({name: tensor.clone() for name, tensor in policy.state_dict().items()})
        return real(policy, *args)

    with mock.patch.object(starter, "evaluate", note):
        result = run(kind, **settings(checkpoint, tmp_path))
    policy, tokenizer = starter.init_policy(result["run_folder"] / "model", "cpu")
    start, _ = starter.init_policy(checkpoint, "cpu")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in policy.state_dict().items())
    assert not torch.equal(policy.lm_head.weight, start.lm_head.weight)
    prompt_ids, = starter.prompt_ids_of([{"prompt": "make 3: 1 2"}], tokenizer)
    assert prompt_ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")


def test_no_reference_is_in_memory_without_the_penalty(checkpoint, tmp_path):
    with mock.patch.object(starter.copy, "deepcopy", wraps=starter.copy.deepcopy) as copies:
        result = run(**settings(checkpoint, tmp_path))
    assert not any(isinstance(call.args[0], torch.nn.Module) for call in copies.call_args_list)
    assert "train/kl_penalty" not in scalars(result["run_folder"])


@slow
@needs_support
@pytest.mark.parametrize("changes", [
    dict(), dict(kl_estimator="exact"), dict(kl_estimator="exact", kl_in="loss_to_go"),
    dict(kl_estimator="k1", kl_in="reward"), dict(kl_adaptation_method="clip_sound"),
    dict(kl_estimator="k3", kl_gradient="as_written")], ids=starter.describe)
def test_strong_penalty_of_any_kind_keeps_the_policy_near(checkpoint, tmp_path, changes):
    given = settings(checkpoint, tmp_path, n_train_steps=12, learning_rate=3e-3)
    free = run(**given)["kl_per_token"]
    penalised = run(**given, use_kl_penalty=True, kl_coef=5.0, **changes)["kl_per_token"]
    assert penalised < 0.6 * free


@slow
def test_adaptive_method_changes_gradient_and_coefficient(checkpoint, tmp_path):
    def numbers(**changes):
        given = settings(checkpoint, tmp_path, learning_rate=1e-2, n_train_steps=3,
                         use_kl_penalty=True, kl_coef=0.1)
        return numbers_of(run(**given, **changes))

    plain = numbers()
    clipped = numbers(kl_adaptation_method="clip", kl_clip_threshold=0.01)
    falling = numbers(kl_adaptation_method="dynamic", reward_threshold=0.0, dynamic_beta_decay=0.5)
    assert falling["adaptive_kl/raw_kl"] == falling["train/kl_penalty"]
    for step, raw in falling["adaptive_kl/raw_kl"].items():
        assert raw == pytest.approx(falling["adaptive_kl/adapted_kl"][step], rel=1e-5)
    assert clipped["adaptive_kl/adapted_kl"][3] <= 0.01 < clipped["adaptive_kl/raw_kl"][3]
    betas = list(falling["adaptive_kl/current_beta"].values())
    assert betas == pytest.approx([0.1, 0.05, 0.025])
    for other in (clipped, falling):  # at the start the policy is the reference
        assert other["train/grad_norm"][1] == plain["train/grad_norm"][1]
        assert other["train/grad_norm"][3] != plain["train/grad_norm"][3]


@slow
def test_run_goes_on_after_its_schedule_has_switched_the_penalty_off(checkpoint, tmp_path):
    result = run(**settings(checkpoint, tmp_path, n_train_steps=3, use_kl_penalty=True,
                            kl_coef=0.1, kl_adaptation_method="dynamic", beta_schedule_steps=1))
    logged = scalars(result["run_folder"])
    assert list(logged["adaptive_kl/current_beta"].values()) == pytest.approx([0.1, 0.0, 0.0])
    assert logged["train/kl_penalty"][3] > 0


@slow
@needs_support
def test_thirty_steps_raise_the_reward_of_the_built_in_model(tmp_path):
    result = starter.main(model_id="tiny", n_train_steps=30, eval_every=0, n_eval_problems=200,
                          out_dir=str(tmp_path), engine="transformers")
    rewards = list(scalars(result["run_folder"])["train/reward_mean"].values())
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.03


# --------------------------------------------------------------------------------------------------
# What a run says

@slow
def test_progress_bar_is_shown_in_a_terminal_only(checkpoint, tmp_path):
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios
    program = ("import sys, starter, test_runs as t\nstarter.N_TRAIN_PROBLEMS = 60\n"
               "t.run('plain', **t.settings(*sys.argv[1:]))")
    command = [sys.executable, "-c", program, str(checkpoint), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(
        map(str, (REPOSITORY, Path(__file__).parent)))}
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    in_terminal = subprocess.Popen(command, env=environment, stdout=inside,
                                   stderr=subprocess.DEVNULL)
    in_pipe = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    os.close(inside)
    shown = b""
    try:
        while part := os.read(terminal, 4096):
            shown += part
    except OSError:  # Linux says so when the other side has closed
        pass
    piped, _ = in_pipe.communicate()
    assert in_terminal.wait() == 0 and in_pipe.returncode == 0
    assert b"/4 [" in shown and b"Step 4 |" in shown
    assert b"\r" not in piped and b"/4 [" not in piped and piped.count(b"Step ") == 4


@needs_support
def test_warning_is_printed_once_and_not_again_after_resume(checkpoint, tmp_path, capsys):
    given = settings(checkpoint, tmp_path, save_every=1)
    sign = {"drift": "the policy drifts; raise kl_coef"}
    with mock.patch.object(runs, "warning_signs", return_value=sign):
        run("guarded", **given | dict(n_train_steps=2))
        first = capsys.readouterr().out
        run("guarded", **given | dict(n_train_steps=4, resume=True))
        second = capsys.readouterr().out

    def steps_with_warning(printed):
        return re.findall(r"Step (\d) \|.*\nWarning: the policy drifts", printed)

    assert steps_with_warning(first) == ["1"] and steps_with_warning(second) == []
    evaluations = first.count("Eval at step") + second.count("Eval at step")
    assert (first + second).count("the policy drifts") == 1 + evaluations  # these repeat it


@needs_support
def test_responses_without_tags_are_noticed_where_the_reward_looks_for_tags():
    def untagged(texts, reward=starter.reward_fn, **problem):
        cfg = SimpleNamespace(reward=reward)
        return runs.untagged(([problem], texts, None, None), cfg)

    assert untagged(["4", "<answer>4"]) and not untagged(["4", "<answer>4</answer>"])
    assert untagged(["4"], reward=[(starter.reward_fn, 1.0), (variety, 0.1)])
    assert not untagged(["4"], reward=variety) and not untagged(["4"], last_number=True)


@needs_support
def test_few_held_out_problems_are_told():
    def lines(n, wanted=500):
        return runs.too_few(starter.Problems([], [{}] * n, []),
                            SimpleNamespace(n_eval_problems=wanted))

    assert "1 held-out problem is too few" in lines(1)[0]
    assert "29 held-out problems are too few" in lines(29)[0]
    assert lines(30) == [] and lines(5, wanted=5) == []  # as few as were asked for


@needs_support
def test_learning_rate_of_another_model_is_told():
    def notes(model_id, learning_rate, lora_rank=0):
        return runs.notes_on_learning_rate(SimpleNamespace(
            model_id=model_id, learning_rate=learning_rate, lora_rank=lora_rank))

    assert "meant for Qwen3-1.7B" in notes("my/model", 7e-6)[0]
    assert notes("Qwen/Qwen3-1.7B", 7e-6) == [] and notes("my/model", 2e-5) == []
    assert "small for LoRA" in notes("Qwen/Qwen3-1.7B", 7e-6, lora_rank=16)[0]
    assert notes("my/model", 2e-4, lora_rank=16) == []


@needs_support
def test_warning_signs_name_what_is_wrong_and_nothing_else():
    cfg = SimpleNamespace(n_train_steps=100, use_kl_penalty=True, learning_rate=1e-5,
                          max_new_tokens=16, stop_token_ids=(7,), reward=starter.reward_fn)
    first = dict(response_length=8.0, solved=0.3, reward_mean=0.3, retention_sort=0.9,
                 kl_per_token=0.0)
    fine = dict(response_length=9.0, solved=0.6, reward_mean=0.6, retention_sort=0.88,
                kl_per_token=0.005, kl_capped_frac=0.02)

    def signs(**changes):
        return runs.warning_signs(fine | changes, first, cfg, 50)

    assert signs() == {} and signs(kl_per_token=0.15) == {}
    assert signs(truncated_frac=1.0) == {}  # the reward has risen all the same
    for name, changes, words in (
            ("drift", dict(kl_per_token=0.21), "KL is 0.21 nats per token, above 0.2"),
            ("stuck", dict(reward_mean=0.31), "nothing is learnt"),
            ("forgotten", dict(retention_sort=0.8), "forgotten (sort from 90% to 80%)"),
            ("length", dict(response_length=12.1), "1.5 times as long as at first"),
            ("cut", dict(kl_capped_frac=0.2), "their ratio is cut"),
            ("truncated", dict(truncated_frac=1.0, reward_mean=0.3, kl_per_token=0.05),
             "max_new_tokens = 16, none reached a stop"),
            ("endless", dict(truncated_frac=1.0), "lower learning_rate = 1e-05 first"),
            ("collapse", dict(solved=0.1), "solved fell from 30% to 10%"),
            # Of a run that collapses the learning rate is named, not the KL penalty.
            ("collapse", dict(solved=0.1, retention_sort=0.2), "learning_rate = 1e-05 first")):
        if name == "endless":
            first["truncated_frac"] = 0.1
        found = signs(**changes)
        assert list(found) == [name] and words in found[name]
    first |= dict(solved=0.0)
    cfg.reward = variety
    assert list(signs(solved=0.0)) == ["unsolved"] and signs(solved=0.1) == {}
    for reward in (starter.reward_fn, [(starter.reward_fn, 1.0), (variety, 0.1)]):
        cfg.reward = reward  # the first has its own scale, on which a hard task begins at 0
        assert signs(solved=0.0) == {}
    first |= dict(frac_zero_std=1.0)
    assert list(signs(frac_zero_std=1.0)) == ["equal"] and signs(frac_zero_std=0.9) == {}
    assert list(signs(frac_zero_std=1.0, untagged=True)) == ["untagged"]
    assert signs(frac_zero_std=0.9, untagged=True) == {}
    first |= dict(frac_zero_std=0.2)
    assert signs(frac_zero_std=1.0) == {}  # solved by training
    cfg.use_kl_penalty = False
    assert "set use_kl_penalty = True" in signs(retention_sort=0.8)["forgotten"]
    assert signs(response_length=12.1) == {}  # without the penalty no curve of the KL is logged


@needs_support
def test_report_advises_what_fits_the_outcome():
    cfg = SimpleNamespace(use_kl_penalty=False)

    def advice(kl=0.1, solved=0.6, sort=0.9):
        return runs.advice({"before": dict(solved=0.3, retention_sort=0.9), "kl_per_token": kl,
                            "after": dict(solved=solved, retention_sort=sort)}, cfg)

    assert advice() == []
    [far] = advice(kl=0.3)
    assert "above 0.2 nats" in far
    [forgot] = advice(sort=0.8)
    assert "to keep the other skills, set use_kl_penalty = True" in forgot
    assert advice(solved=0.1, sort=0.2) == []  # it collapsed: the penalty is not the first remedy
    cfg.use_kl_penalty = True
    assert advice(kl=0.3, sort=0.8) == []


@needs_support
def test_characters_that_the_tokenizer_does_not_know_are_named():
    def warning(*prompts):
        problems = starter.Problems([{"prompt": prompt} for prompt in prompts], [], [])
        return runs.unknown_in(problems, make_tokenizer())

    assert warning("sort 21", [{"role": "user", "content": "max 12"}]) == []
    [text] = warning("sort 21", "Sort 21", [{"role": "user", "content": "T 1"}])
    assert text.startswith("Warning: 2 of 3 prompts hold characters that the tokenizer does not")
    assert "such as 'S T'" in text


@needs_support
def test_interval_of_a_share_matches_published_values():
    """R. G. Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, 0 of 20."""
    assert runs.wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert runs.wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


@needs_support
def test_kl_by_position_and_by_token_adds_up(checkpoint, tmp_path):
    result = run("guarded", **settings(checkpoint, tmp_path))
    tables = json.loads((result["run_folder"] / "kl_by_token.json").read_text())
    for table in tables.values():
        nats, tokens = (sum(column) for column in zip(*table.values()))
        assert nats / tokens == pytest.approx(result["kl_per_token"])
        assert nats / N_EVAL == pytest.approx(result["kl_per_sequence"])
    assert tables["position"]["0"][1] == N_EVAL
    assert set(tables["position"]) == set(map(str, range(len(tables["position"]))))


# --------------------------------------------------------------------------------------------------
# KL settings without effect

def start_with_kl(checkpoint, folder, **changes):
    """Starts a run and ends it before its first evaluation, with StopIteration."""
    changes = dict(use_kl_penalty=True, kl_coef=0.1) | changes
    given = settings(checkpoint, folder / "runs", **changes)
    with mock.patch.object(starter, "evaluate", side_effect=StopIteration):
        run("guarded", **given)


@needs_support
@pytest.mark.parametrize("named, changes", [
    ("kl_adaptation_method = 'clip'", dict(kl_adaptation_method="clip", kl_clip_threshold=1e9)),
    ("kl_coef = 0.1", dict(kl_adaptation_method="clip", kl_clip_threshold=0.0)),
    pytest.param("kl_target = 0.3", dict(kl_adaptation_method="clip", kl_target=0.3), marks=slow),
    pytest.param("kl_clip_threshold = 0.5", dict(kl_clip_threshold=0.5), marks=slow),
    ("beta_min = 0.05", dict(beta_min=0.05)),
    ("kl_coef = 1e-12", dict(kl_coef=1e-12)),
    ("kl_gradient = 'as_written'", dict(kl_estimator="exact", kl_gradient="as_written")),
    # In the first epoch of a rollout the two gradients of k2 are the same.
    ("kl_gradient = 'as_written'", dict(kl_estimator="k2", kl_gradient="as_written")),
    ("kl_adaptation_method = 'dynamic'", dict(
        kl_adaptation_method="dynamic", reward_threshold=7.0, reward=starter.reward_fn)),
], ids=starter.describe)
def test_setting_without_effect_is_refused(checkpoint, tmp_path, named, changes):
    with pytest.raises(InputError, match=re.escape(named) + " changes nothing here"):
        start_with_kl(checkpoint, tmp_path, **changes)
    assert not list(tmp_path.iterdir())


@needs_support
@pytest.mark.parametrize("changes", [
    dict(kl_adaptation_method="clip", kl_clip_threshold=1.0), dict(kl_coef=1e-4),
    dict(kl_estimator="k2"), dict(kl_adaptation_method="target_sound", kl_target=0.2),
    dict(kl_estimator="k2", kl_gradient="as_written", epochs_per_rollout=2),
    dict(kl_adaptation_method="dynamic", beta_min=0.09), dict(kl_adaptation_method="clip_sound"),
    dict(kl_adaptation_method="length_normalized", kl_estimator="k1", kl_in="reward"),
    # Only its author knows how far this reward reaches.
    dict(kl_adaptation_method="dynamic", reward_threshold=7.0)], ids=starter.describe)
def test_setting_with_effect_is_accepted(checkpoint, tmp_path, changes):
    with pytest.raises(StopIteration):
        start_with_kl(checkpoint, tmp_path, **changes)


@needs_support
def test_check_of_the_settings_leaves_no_gradient(checkpoint, tmp_path):
    """The first steps have the same gradient with that check and without it."""
    given = settings(checkpoint, tmp_path, n_train_steps=2, use_kl_penalty=True, kl_coef=0.1)
    norms = [scalars(run("guarded", **given)["run_folder"])["train/grad_norm"]]
    with mock.patch.object(runs, "refuse_settings_without_effect"):
        norms.append(scalars(run("guarded", **given)["run_folder"])["train/grad_norm"])
    assert norms[0] == norms[1]


# --------------------------------------------------------------------------------------------------
# What resume finds, and what the report says

def test_resume_goes_on_with_the_newest_run(checkpoint, tmp_path):
    given = settings(checkpoint, tmp_path, n_train_steps=2, save_every=1, n_eval_problems=5)
    older, newer = (run("plain", **given, run_name=name)["run_folder"] for name in ("a", "b"))
    assert older.name < newer.name
    resumed = run("plain", **given | dict(n_train_steps=3, resume=True, run_name="b"))
    assert resumed["run_folder"] == newer
    assert scalars(newer)["train/loss"].keys() == {1, 2, 3}
    assert scalars(older)["train/loss"].keys() == {1, 2}


def test_resume_under_other_parts_says_that_bits_will_differ(checkpoint, tmp_path, capsys):
    given = settings(checkpoint, tmp_path, n_train_steps=1, save_every=1, n_eval_problems=5)
    run("plain", **given)
    again = given | dict(n_train_steps=2, resume=True)
    other = dataclasses.replace(starter.PLAIN, name="other")
    with mock.patch.object(starter, "find_parts", lambda: (
            [other], starter.OneProcess(), starter.Run)):
        starter.main(**again)
    line = "the run began with parts: compute plain, ranks 1, run Run, engine transformers, float32"
    assert f"{line}; with others its bits will differ" in capsys.readouterr().out
    run("plain", **again | dict(n_train_steps=3))
    assert "the run began with parts: compute other" in capsys.readouterr().out


def test_report_shows_rates_before_and_after_and_their_difference(tmp_path):
    result = {"before": {"solved": 0.25, "retention_sort": 1.0, "reward_mean": 0.3},
              "after": {"solved": 0.755, "retention_sort": 0.9, "reward_mean": 0.8},
              "n_eval_problems": 200, "seconds": 90.0, "tokens_per_s": 1234.4}
    cfg = SimpleNamespace(task="countdown", eval_temperature=0.0)
    assert starter.report_text(result, cfg, tmp_path / "runs" / "a") == (
        "\n=== Report ===\ncountdown, 200 held-out problems, sampled at temperature 0\n"
        "  solved              25.0% ->  75.5%  (+50.5 points)\n"
        "  retention_sort     100.0% ->  90.0%  (-10.0 points)\n"
        "training took 1.5 min, 1234 response tokens/s\n"
        f"run folder: {tmp_path}/runs/a\nlook at it: tensorboard --logdir {tmp_path}/runs")


def test_resume_in_another_precision_measures_the_sampler_anew(checkpoint, tmp_path, capsys):
    """What float32 rounds is no limit for bf16."""
    given = settings(checkpoint, tmp_path, n_train_steps=2, save_every=2, n_eval_problems=5)
    run("plain", **given)
    seen = []
    real = starter.check_log_probs

    def note(microbatches, step, first_difference, *others):
        seen.append((step, first_difference))
        return real(microbatches, step, first_difference, *others)

    with mock.patch.object(starter, "check_log_probs", note):
        run("plain", **given | dict(n_train_steps=4, resume=True, bf16=True))
    assert [step for step, _ in seen] == [3, 4]
    assert seen[0][1] is None and seen[1][1] > 1e-6


def test_new_run_from_a_checkpoint_counts_and_adapts_from_its_own_start(checkpoint, tmp_path):
    given = settings(checkpoint, tmp_path, n_train_steps=2, save_every=2, n_eval_problems=5,
                     use_kl_penalty=True, kl_coef=0.1, kl_adaptation_method="dynamic",
                     reward_threshold=0.0, dynamic_beta_decay=0.5)

    def state_of(folder, step):
        path = folder / "checkpoints" / f"step_{step:08d}.safetensors"
        with safetensors.safe_open(path, "pt") as file:
            return json.loads(file.metadata()["state"])

    first = run("plain", **given)["run_folder"]
    differences = scalars(first)["train/sampler_logprob_diff"]
    assert state_of(first, 2)["first_difference"] == pytest.approx(differences[1])
    assert differences[1] != differences[2]
    folder = run("plain", **given | dict(resume_from=str(first), n_train_steps=4))["run_folder"]
    logged = scalars(folder)
    assert logged["adaptive_kl/current_beta"] == pytest.approx({3: 0.1, 4: 0.05})
    state = state_of(folder, 4)
    n_responses = given["rollout_batch_size"]
    own_tokens = n_responses * sum(logged["train/response_length"].values())
    assert state["tokens"] == pytest.approx(own_tokens)
    assert state["seconds"] == pytest.approx(sum(logged["time/total"].values()), rel=1e-4)


def test_resume_from_a_finished_run_wants_a_step_of_its_own(checkpoint, tmp_path):
    given = settings(checkpoint, tmp_path, n_train_steps=2, save_every=2, n_eval_problems=5)
    first = run("plain", **given)["run_folder"]
    with pytest.raises(InputError, match="n_train_steps = 2 counts .* has done 2 steps; use at "
                                         "least 3"):
        run("plain", **given | dict(resume_from=str(first)))
