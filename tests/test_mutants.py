"""Tests of lab/mutants.py, which plants faults and expects the tests to fail, and of its list."""
import os
import subprocess

import pytest

pytest.importorskip("support.fast")

from lab import mutants
from lab.mutants import Fault


@pytest.mark.slow
def test_every_planted_fault_stands_exactly_once():
    """A line that changes takes its fault with it. Slow only so that no edit is stopped by it."""
    assert mutants.misplaced(mutants.all_faults()) == {}


@pytest.mark.slow
def test_published_faults_are_those_of_the_list():
    assert set(mutants.read_results()) <= {fault.key for fault in mutants.all_faults()}


def test_fault_that_stands_twice_or_changes_nothing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "starter.py").write_text("a = b + b\nc = 1\n")
    faults = [Fault("starter.py", "b", "d"), Fault("starter.py", "gone", "d"),
              Fault("starter.py", "c = 1", "c = 1"), Fault("starter.py", "c = 1", "c = 2")]
    assert mutants.misplaced(faults) == {faults[0]: "stands 2 times", faults[1]: "stands 0 times",
                                         faults[2]: "changes nothing"}


def test_planted_lines_are_those_whose_run_would_show_the_fault():
    text = ("NAME = 1\ndef f(a, b=2):\n    if a:\n        a = g(a,\n              b)\n"
            "    return a\n")
    def lines_of(stands):
        return mutants.planted_lines(Fault("starter.py", stands, ""), text)
    assert lines_of("NAME") == {1}
    assert lines_of("b=2") == {3, 4, 5, 6}  # the signature: whatever calls f
    assert lines_of("if a") == {3}
    assert lines_of("              b)\n") == {4, 5}
    assert lines_of("if a:\n        a = g(a") == {3, 4, 5}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_faults_are_caught_by_tests_and_harmless_changes_survive(tmp_path, monkeypatch, capsys):
    (tmp_path / "tests").mkdir()
    (tmp_path / "starter.py").write_text(
        "def twice(x):\n    return 2 * x\n\n\nNAME = 'twice'\nLAST = True\n")
    (tmp_path / "tests" / "test_first.py").write_text(
        "import starter\n\ndef test_nothing():\n    pass\n\n"
        "def test_fails_anyway():\n    assert starter.NAME == 'another'\n")
    (tmp_path / "tests" / "test_second.py").write_text(
        "import starter\n\ndef test_twice_doubles():\n    assert starter.twice(3) == 6\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "RESULTS", tmp_path / "mutants.csv")
    monkeypatch.setattr(mutants, "TIME_LIMIT", 5)
    monkeypatch.setattr(mutants, "import_once", lambda: None)
    faults = [Fault("starter.py", "2 * x", "3 * x", "tests/test_first.py"),
              Fault("starter.py", "    return 2", "    while True:\n        pass\n    return 2"),
              Fault("starter.py", "LAST = True", "LAST ="),
              Fault("starter.py", "NAME = 'twice'", "NAME = 'double'")]
    assert mutants.run_faults(faults, faults, quick=False) == 1
    caught = {row["becomes"]: row["caught_by"] for row in mutants.read_results().values()}
    assert caught == {"3 * x": "test_twice_doubles", faults[1].becomes: "a hang",
                      "LAST =": "cannot be imported", "NAME = 'double'": ""}
    shown = capsys.readouterr().out
    assert "can catch none: tests/test_first.py::test_fails_anyway" in shown
    assert "3 of 4 planted faults caught" in shown
    not_tried = Fault("starter.py", "LAST", "FIRST")
    monkeypatch.setattr(mutants, "all_faults", lambda: [*faults, not_tried])
    assert mutants.mutants_table().splitlines()[2:] == [
        "| starter.py | 4 | 3 |", "", "Not caught: `NAME = 'twice'` → `NAME = 'double'`.",
        "", "Of the list, not tried yet with the present tests: 1."]
