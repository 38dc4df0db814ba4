"""Whether the tests see changes of the algorithm: mutmut's mutants of sections 5 to 11.

    pip install mutmut==3.8.1 && python -m lab.mutation     about an hour -> mutation.csv

mutmut makes the mutants: one operator, number, argument or name of starter.py is changed in each.
mutmut's own runner cannot start a file that its tests copy and run as a program, so each mutant is
a starter.py in a folder of its own here, beside the rest of the repository, with the quick ones of
TESTS run on it until one fails. Texts of messages and docstrings are not changed.
"""
import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from lab.rows import REPOSITORY, write_csv

TESTS = ["test_starter.py", "tests/test_reward.py", "tests/test_adaptive_rules.py"]
HERE = str(REPOSITORY)
SECONDS = 300  # a mutant that runs longer is seen


def lines_of_sections(source, first, last):
    """The numbers of the lines from the heading of one section to the end of another."""
    lines = source.splitlines()
    starts = {int(line[2:].split(".")[0]): i for i, line in enumerate(lines, 1)
              if line.startswith("# ") and line[2:].split(".")[0].isdigit()}
    return range(starts[first], starts[last + 1] - 1)


def mutants(source, lines):
    """Yields (line, before, after, source) of each mutant."""
    import libcst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation.file_mutation import create_mutations
    module, mutations, *_ = create_mutations("starter.py", source, set(lines))
    places = MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)
    for mutation in mutations:
        if not isinstance(mutation.original_node, libcst.BaseString):
            mutant = module.deep_replace(mutation.original_node, mutation.mutated_node)
            before, after = (" ".join(module.code_for_node(node).split())
                             for node in (mutation.original_node, mutation.mutated_node))
            yield places[mutation.original_node].start.line, before, after, mutant.code


class QuickestFirst:
    """A plugin of pytest: begins with the tests that have seen most mutants so far."""

    def __init__(self, seen_by):
        self.seen_by = seen_by

    def pytest_collection_modifyitems(self, items):
        seen_by = list(self.seen_by)
        items.sort(key=lambda item: -seen_by.count(item.nodeid))

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.seen_by.append(report.nodeid)


def is_seen(mutant):
    """Runs TESTS on a mutant, in a process that is used once. Returns whether one failed."""
    import pytest
    *_, source = mutant
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(SECONDS)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(folder) / "repository"
        shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns(".git", "runs"))
        (folder / "starter.py").write_text(source, "utf-8")
        os.chdir(folder)
        sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", HERE))]
        for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
            del sys.modules[name]
        failed = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not slow",
                              *TESTS], plugins=[plugin])
        os.chdir("/")
    return bool(failed)


def main():
    os.environ["OMP_NUM_THREADS"] = "1"
    import peft  # noqa: F401  what every mutant would import again
    import transformers.models.qwen3  # noqa: F401
    source = (REPOSITORY / "starter.py").read_text("utf-8")
    todo = list(mutants(source, lines_of_sections(source, 5, 11)))
    todo.insert(0, (0, "nothing", "nothing", source))
    rows = []
    global plugin
    plugin = QuickestFirst(multiprocessing.Manager().list())
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        for (line, before, after, _), seen in zip(todo, pool.imap(is_seen, todo)):
            assert line or not seen, "the tests fail without a change"
            rows.append({"line": line, "before": before, "after": after, "seen": seen})
            if line and not seen:
                print(f"survived: {line}: {before!r} -> {after!r}", flush=True)
    write_csv("mutation.csv", rows[1:])
    print(f"{sum(row['seen'] for row in rows[1:])} of {len(rows) - 1} mutants are seen")


if __name__ == "__main__":
    main()
