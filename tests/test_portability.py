"""Windows, Macs, consoles and locales: what is missing there is hidden here, since no such machine
is at hand."""

import re
from pathlib import Path

import pytest
import torch
from forked import REPOSITORY, TESTS, edited_text, run_python, write_copy

import starter
from support import memory

UNIX_ONLY = ("fcntl", "resource", "pwd", "grp", "termios", "pty")

# Python in which the modules and names that Windows lacks are not there either.
AS_ON_WINDOWS = f"""
import importlib, importlib.util, os, signal, sys
for name in ("psutil", "torch.distributed.checkpoint.state_dict"):  # they look at sys.platform
    if importlib.util.find_spec(name):
        importlib.import_module(name)
for name in {UNIX_ONLY!r}:
    sys.modules[name] = None
for owner, names in ((os, ("fork", "symlink", "killpg", "getuid")),
                     (signal, ("SIGALRM", "SIGKILL", "setitimer", "ITIMER_REAL"))):
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)
"""
# A German or Japanese Windows has another default encoding.
OTHER_LOCALE = "import _locale\n_locale.getencoding = lambda: 'cp1252'\n"
TRAIN = """
import sys
import starter
from conftest import settings
given = settings(sys.argv[1], sys.argv[2], n_train_steps=2, save_every=1, use_kl_penalty=True)
given["task"] = sys.argv[3]
starter.test_functions()
starter.main(**given)
starter.main(**given | dict(n_train_steps=3, resume=True))
"""


# A Mac's GPU has no float64.
NO_FLOAT64 = """
import sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
                raise TypeError(f"{function} makes a float64 tensor")
        return made

import starter
from conftest import settings
with NoFloat64():
    starter.main(**settings(sys.argv[1], sys.argv[2], use_kl_penalty=True, n_train_steps=2))
"""
AS_ON_A_MAC = {
    'probs.device.type != "mps"': 'probs.device.type != "cpu"',
    "torch.tensor(values, dtype=torch.float64)": "torch.tensor(values)",  # rewards, on the CPU
}


def run_program(program, *arguments, folder=REPOSITORY, **environment):
    """Runs a program that imports starter from a folder. Returns its output and its errors."""
    environment |= {"PYTHONUTF8": "0", "PYTHONWARNDEFAULTENCODING": "1"}
    paths = folder, TESTS
    done = run_python("-c", program, *arguments, folder=folder, paths=paths, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


@pytest.mark.slow
def test_run_trains_saves_and_resumes_on_windows_with_a_console_of_ascii(checkpoint, tmp_path):
    """Which shows others in the place of characters that it lacks."""
    program = AS_ON_WINDOWS + OTHER_LOCALE + TRAIN
    lines = [f'{{"prompt": "\u00e9 {i}\U0001f600", "answer": 1}}\n' for i in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(lines), "utf-8")
    given = checkpoint, tmp_path / "runs", tmp_path / "data.jsonl"
    printed, errors = run_program(program, *given, PYTHONIOENCODING="ascii")
    assert re.search(r"Sample: '\? \d+\?'", printed)
    assert " after step 2\n" in printed and "Step 3/" in printed
    assert "ok: test_step" in printed and "FAILED" not in printed
    for line in errors.splitlines():
        is_own = str(REPOSITORY) in line and "site-packages" not in line
        assert not (is_own and "EncodingWarning" in line), line
    assert printed.isascii()


@pytest.mark.slow
@pytest.mark.parametrize("with_support", [True, False])
def test_run_makes_no_float64_tensor(checkpoint, tmp_path, with_support):
    copy = write_copy(tmp_path / "copy", edited_text(AS_ON_A_MAC), with_support)
    printed, _ = run_program(NO_FLOAT64, checkpoint, tmp_path / "runs", folder=copy)
    assert "Step 2/" in printed and ("token_statistics" in printed) == with_support
    assert "TypeError" not in printed  # of what looks on, or compares, and then ends


def test_memory_of_a_mac_is_what_its_gpu_may_use(monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 8e9)
    assert memory.free_gb(starter.cfg_with(device=torch.device("mps"))) == 8


RENAMED = """
import sys
import mine
given = dict(model_id=sys.argv[1], out_dir=sys.argv[2], task="countdown_small", n_train_steps=1,
             rollout_batch_size=8, max_new_tokens=4, n_eval_problems=4, device="cpu")
mine.main(**given)
assert sys.modules["starter"] is mine
sys.modules["starter"] = sys
mine.main(**given)
"""


@pytest.mark.slow
def test_copy_under_another_name_has_support_too(checkpoint, tmp_path):
    """Beside another module of that name it says that support/ serves one."""
    folder = Path(write_copy(tmp_path / "copy", edited_text({}), True))
    (folder / "starter.py").rename(folder / "mine.py")
    done = run_python("-c", RENAMED, checkpoint, tmp_path, folder=folder, paths=(folder, TESTS))
    assert "of support/ run: add_up_gradients" in done.stdout
    assert "mine and starter are both imported" in done.stderr
