"""Windows, consoles and locales: what is missing there is hidden here, since no such machine is at
hand."""

import os
import subprocess
import sys

import pytest
from conftest import REPOSITORY

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
starter.test_functions()
starter.main(**given)
starter.main(**given | dict(n_train_steps=3, resume=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, environment",
    [(AS_ON_WINDOWS, {}), ("", {"PYTHONIOENCODING": "ascii"}), (OTHER_LOCALE, {})],
    ids=["Windows", "ASCII console", "other locale"],
)
def test_run_trains_saves_and_resumes_elsewhere(checkpoint, tmp_path, program, environment):
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    fixed = dict(OMP_NUM_THREADS="1", PYTHONPATH=path, PYTHONUTF8="0")
    environment = {**os.environ, **fixed, "PYTHONWARNDEFAULTENCODING": "1", **environment}
    command = [sys.executable, "-c", program + TRAIN, checkpoint, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-2000:]
    assert " after step 2\n" in done.stdout and "Step 3/" in done.stdout
    assert "FAILED" not in done.stdout
    for line in done.stderr.splitlines():
        is_own = str(REPOSITORY) in line and "site-packages" not in line
        assert not (is_own and "EncodingWarning" in line), line
    if "PYTHONIOENCODING" in environment:
        assert "ok: test_step" in done.stdout and done.stdout.isascii()
