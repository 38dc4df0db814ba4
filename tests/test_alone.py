"""starter.py works alone: copied into an empty folder, without the rest of the repository."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from conftest import scalars
from forked import run_python
from lab import crash_test

import starter


@pytest.fixture
def alone(tmp_path):
    """A folder that holds starter.py and nothing else."""
    (tmp_path / "alone").mkdir()
    return Path(shutil.copy(starter.__file__, tmp_path / "alone")).parent


@pytest.mark.slow
def test_file_alone_trains_and_a_killed_run_resumes_bit_for_bit(alone, checkpoint):
    given = crash_test.SETTINGS | {"model_id": str(checkpoint), "kl_adaptation_method": "none"}
    given["ref_model_id"] = str(Path(starter.__file__).with_name("support") / "tiny")
    killed, whole = (given | {"out_dir": str(alone / name / "runs")} for name in "ab")
    status, _ = crash_test.run(killed, alone, kill=("Step 3/", 0.0))
    assert status == -signal.SIGKILL
    for settings in (killed | {"resume": True}, whole):
        status, printed = crash_test.run(settings, alone)
        assert status == 0, printed
        assert (" after step 2\n" in printed) == ("resume" in settings)
        assert "support/ is not here" in printed
    assert crash_test.outcome(alone / "a") == crash_test.outcome(alone / "b")
    for folder in alone.glob("?/runs/*"):
        names = {re.split(r"[._]", path.name)[0] for path in folder.iterdir()}
        assert names == {"events", "settings", "model", "checkpoint"}
        assert [*scalars(folder)["eval/solved"]] == [0, 3, 6]


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, words",
    [
        ("", "so give --model_id ID --task FILE.jsonl"),
        ("other.jsonl", "other.jsonl"),
        ("data.jsonl", "rules.txt"),
    ],
)
def test_file_alone_says_in_one_sentence_what_is_wrong_unless_it_is_in_a_reward(
    alone, checkpoint, task, words
):
    """A file that the command line names costs one sentence, and one that a reward does not find
    its traceback."""
    source = (alone / "starter.py").read_text()
    call = "    return score_answer(response_text, problem)\n"
    assert source.count(call) == 1
    (alone / "starter.py").write_text(source.replace(call, f"    open('rules.txt')\n{call}"))
    lines = [json.dumps({"prompt": f"add 1 {i}", "answer": i}) for i in range(40)]
    (alone / "data.jsonl").write_text("\n".join(lines))
    options = ["--max_new_tokens=4", "--n_train_steps=0", "--device=cpu"]
    if task:
        options += [f"--model_id={checkpoint}", f"--task={task}"]
    done = run_python("starter.py", *options, folder=alone, paths=())
    assert ("\nsupport/ is not here: a run is slower" in done.stdout) == bool(task)
    assert words in done.stderr and done.returncode == 1
    if words == "rules.txt":
        assert "Traceback" in done.stderr and "a response to {'prompt'" in done.stderr
    else:
        assert done.stderr.startswith("starter.py stopped: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "name, value",
    [
        ("lora_rank", 8),
        ("loss_average", "drgrpo"),
        ("rollout_batch_size", 4),  # less than a group
        ("kl_in", "reward"),  # with k3
        ("temperature", 0),
        ("kl_adaptation_method", "half+none"),
        ("reward", None),  # without a KL term
    ],
)
def test_file_alone_refuses_what_would_act_like_something_else(without_support, name, value):
    given = dict(engine="transformers", rollout_batch_size=16, group_size=8)
    given |= dict(normalize_by_std=True, kl_adaptation_method="target+clip")
    starter.check_settings(starter.cfg_with(**given))
    with pytest.raises(starter.InputError, match=name):
        starter.check_settings(starter.cfg_with(**given | {name: value}))


# Prints what changed while starter was imported.
LOOK = """
import json, logging, os, random, signal, sys, threading, warnings, numpy, torch

def state():
    return dict(
        path=list(sys.path), warnings=list(warnings.filters), threads=threading.active_count(),
        signals=[signal.getsignal(number) for number in signal.valid_signals()],
        logging=(logging.root.level, list(logging.root.handlers), sys.excepthook),
        generators=(random.getstate(), str(numpy.random.get_state()), str(torch.get_rng_state())),
        torch=(torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
               torch.are_deterministic_algorithms_enabled(), torch.cuda.is_initialized(),
               torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark))

before, environment = state(), dict(os.environ)
import starter
after = state()
print(json.dumps([[name for name in before if before[name] != after[name]],
                  sorted(os.environ.keys() - environment.keys()),
                  [name for name in environment if environment[name] != os.environ.get(name)],
                  [name for name in sys.modules if name.startswith(("transformers", "support"))]]))
"""


def test_import_changes_nothing_but_variables_that_are_not_set(alone, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")  # which starter.py sets
    done = run_python("-c", LOOK, folder=alone, paths=())
    assert (done.stderr, done.returncode) == ("", 0)
    changed, variables, overwritten, imported = json.loads(done.stdout)
    assert changed == overwritten == imported == [] != variables
    assert {path.name for path in alone.iterdir()} <= {"starter.py", "__pycache__"}
