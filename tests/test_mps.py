"""A Mac's GPU, which has no float64. No such machine is at hand: a run on a CPU, where float64 is
forbidden and starter.py takes the branch for "mps", stands for it."""

import shutil
import subprocess
import sys

import pytest

import starter
from support import memory

import torch
from conftest import REPOSITORY

PROGRAM = """
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


@pytest.mark.slow
@pytest.mark.parametrize("with_support", [True, False])
def test_run_makes_no_float64_tensor(checkpoint, tmp_path, with_support):
    text = (REPOSITORY / "starter.py").read_text()
    own = {'probs.device.type != "mps"': 'probs.device.type != "cpu"'}
    own["dtype=torch.float64)  # on the CPU"] = ")"  # rewards, which never are on the device
    for old, new in own.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "starter.py").write_text(text)
    if with_support:
        shutil.copytree(REPOSITORY / "support", tmp_path / "support")
    shutil.copy(REPOSITORY / "tests" / "conftest.py", tmp_path)
    command = [sys.executable, "-c", PROGRAM, checkpoint, tmp_path / "runs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Step 2/" in done.stdout and ("token_statistics" in done.stdout) == with_support


def test_memory_of_a_mac_is_what_its_gpu_may_use(monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 11 * 10**9)
    assert memory.free_gb(starter.cfg_with(device=torch.device("mps"))) == 11.0
