"""Windows, macOS, older Pythons, folders that cannot be written: what is missing there is hidden
here, since no such machine is at hand. And Ctrl-C before training."""
import ast
import inspect
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import settings

import starter

REPOSITORY = Path(starter.__file__).resolve().parent
HAS_SUPPORT = (REPOSITORY / "support" / "fast.py").is_file()
needs_support = pytest.mark.skipif(not HAS_SUPPORT, reason="needs support/")
UNIX_ONLY = ("fcntl", "resource", "pwd", "grp", "termios", "pty")

# Python in which the modules and names that Windows lacks are not there either.
AS_ON_WINDOWS = f"""
import importlib, importlib.util, os, signal, sys
if importlib.util.find_spec("psutil"):  # it has a file for each system; this one's needs resource
    importlib.import_module("psutil")
for name in {UNIX_ONLY!r}:
    sys.modules[name] = None
for owner, names in ((os, ("fork", "symlink", "killpg", "getuid")),
                     (signal, ("SIGALRM", "SIGKILL", "setitimer", "ITIMER_REAL"))):
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)
"""


def run_python(program, *arguments, folder=REPOSITORY, **environment):
    return subprocess.run([sys.executable, "-c", program, *map(str, arguments)], cwd=folder,
                          env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, text=True,
                          capture_output=True, encoding="utf-8")


TRAIN = """
import sys
sys.path[:0] = [sys.argv[3], sys.argv[4]]
import starter
from conftest import settings
starter.N_TRAIN_PROBLEMS = 60
given = settings(sys.argv[1], sys.argv[2], n_train_steps=2, save_every=1, use_kl_penalty=True,
                 kl_coef=0.1)
starter.test_functions()
starter.main(**given)
starter.main(**given | dict(n_train_steps=3, resume=True))
"""


@pytest.mark.slow
def test_run_saves_and_resumes_without_what_windows_lacks(checkpoint, tmp_path):
    done = run_python(AS_ON_WINDOWS + TRAIN, checkpoint, tmp_path, REPOSITORY,
                      REPOSITORY / "tests")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "after step 2" in done.stdout and "Step 3 |" in done.stdout


@pytest.mark.slow
def test_console_that_knows_only_ascii_gets_ascii(checkpoint, tmp_path):
    done = run_python(TRAIN, checkpoint, tmp_path, REPOSITORY, REPOSITORY / "tests",
                      PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ok kl gradient matches enumeration" in done.stdout and done.stdout.isascii()


@pytest.mark.slow
def test_files_are_written_as_utf8_whatever_the_locale(checkpoint, tmp_path):
    """A German or Japanese Windows has another default encoding."""
    done = run_python("import sys, _locale\n_locale.getencoding = lambda: 'cp1252'\n" + TRAIN,
                      checkpoint, tmp_path, REPOSITORY, REPOSITORY / "tests", PYTHONUTF8="0",
                      PYTHONWARNDEFAULTENCODING="1")
    assert done.returncode == 0, done.stderr[-2000:]
    own = [line for line in done.stderr.splitlines()
           if "EncodingWarning" in line and str(REPOSITORY) in line
           and "site-packages" not in line]
    assert own == []


@pytest.mark.parametrize("file", ["starter.py"])
def test_older_python_can_read_the_file_and_is_refused_in_one_sentence(file):
    source = (REPOSITORY / file).read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))
    done = run_python("import sys\nsys.version_info = (3, 10, 4)\n"
                      "import runpy; runpy.run_path('starter.py', run_name='__main__')")
    assert done.returncode == 1
    assert done.stderr.startswith("starter.py needs Python 3.11 or newer, and this is ")
    assert done.stderr.count("\n") == 1


@needs_support
def test_repository_that_cannot_be_written_has_its_model_in_the_cache(tmp_path, monkeypatch,
                                                                      capsys):
    from support import tiny
    built = []

    def build(command, **settings):
        folder = Path(command[-1])
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        built.append(folder)

    repository = tmp_path / "repository"
    repository.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tiny.subprocess, "run", build)
    monkeypatch.setattr(tiny.os, "access", lambda path, mode: Path(path) != repository)
    expected = tmp_path / "cache" / "starter" / "tiny"
    assert tiny.find(repository / "tiny") == expected and built == [expected]
    assert f"the built-in model is in {expected}" in capsys.readouterr().out
    assert tiny.find(repository / "tiny") == expected and built == [expected]


@needs_support
def test_repository_that_can_be_written_has_its_model_beside_it(tmp_path, monkeypatch):
    from support import tiny
    commands = []
    monkeypatch.setattr(tiny.subprocess, "run", lambda command, **_: commands.append(command))
    assert tiny.find(tmp_path / "tiny") == tmp_path / "tiny"
    assert commands[0][-1] == str(tmp_path / "tiny")


def test_mps_is_accepted_as_a_device(checkpoint, tmp_path):
    """It is untested: there is no Mac here. Where there is no such device, torch says so."""
    parameters = inspect.signature(starter.main).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    cfg = SimpleNamespace(**defaults | settings(checkpoint, tmp_path) | {"device": "mps"})
    starter.check_settings(cfg)
    assert "MPS, on which nothing has been tested" in starter.choose_hardware(cfg)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
@pytest.mark.parametrize("moment", ["imports", "quick tests", pytest.param(
    "building the built-in model", marks=[needs_support, pytest.mark.slow])])
def test_interrupt_before_training_is_one_line(checkpoint, tmp_path, moment):
    """Ctrl-C reaches every process of the terminal, so that of the built-in model as well."""
    for name in ("starter.py", "support"):
        if (REPOSITORY / name).exists():
            copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
            copy(REPOSITORY / name, tmp_path / name)
    process = subprocess.Popen([sys.executable, "starter.py"], cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
                               start_new_session=True)
    sign = {"quick tests": "=== Running", "building the built-in model": "building the tiny"}
    maps = Path(f"/proc/{process.pid}/maps")
    if moment == "imports":
        while maps.is_file() and "libtorch" not in maps.read_text():  # torch is being imported
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0 if maps.is_file() else 0.5)
    else:
        while sign[moment] not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(0.2 if moment == "quick tests" else 6)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "starter.py stopped: interrupted\n"
