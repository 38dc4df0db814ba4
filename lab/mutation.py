"""Do the tests see changes of the algorithm? mutmut's mutants of sections 4 to 10 -> mutation.csv.

    pip install mutmut==3.8.1 && python -m lab.mutation     half an hour on two cores

In each mutant one operator, number, argument or name of starter.py is another, or left out; texts
stay. It stands in a copy of the repository, where the quick ones of TESTS run until one fails.
"""

import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from lab.rows import REPOSITORY, write_csv

TESTS = [
    "test_starter.py",
    "tests/test_reward.py",
    "tests/test_adaptive_rules.py",
    "tests/test_gpu.py::test_every_tensor_of_a_step_is_on_the_policys_device",
]
SECTIONS = range(4, 11)
SECONDS = 300  # a mutant that runs longer is seen, and one that takes more memory
MEMORY = (6 << 30, 6 << 30)  # bytes, soft and hard


def mutants(source):
    """Yields (section, line, before, after, source) of each mutant."""
    import libcst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation.file_mutation import create_mutations

    section, sections = "", {}
    for line, text in enumerate(source.splitlines(), 1):
        found = re.match(r"# (\d+\. [^.]+)\.", text)
        sections[line] = section = found[1] if found else section
    lines = {line for line, name in sections.items() if int(name.split(".")[0] or 0) in SECTIONS}
    module, mutations, *_ = create_mutations("starter.py", source, lines)
    places = MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)
    for mutation in mutations:
        if not isinstance(mutation.original_node, libcst.BaseString):
            mutant = module.deep_replace(mutation.original_node, mutation.mutated_node).code
            line = places[mutation.original_node].start.line
            texts = [
                " ".join(module.code_for_node(node).split())
                for node in (mutation.original_node, mutation.mutated_node)
            ]
            yield sections[line], line, *texts, mutant


class QuickestFirst:
    """A plugin of pytest: begins with the tests that have seen most mutants so far."""

    seen_by = []

    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item, seen_by=list(self.seen_by): -seen_by.count(item.nodeid))

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.seen_by.append(report.nodeid)


def is_seen(mutant):
    """Runs TESTS on a mutant, in a process that is used once. Returns whether one failed."""
    import pytest

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, MEMORY)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder) / "repository"
        shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns(".git", "runs"))
        (folder / "starter.py").write_text(mutant[-1], "utf-8")
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        options = "-x -n 0 -p no:cacheprovider -p no:terminal -m".split()
        options += ["not slow", "-k", "not interrupt"]  # the process's own signals are others here
        failed = pytest.main([*options, *TESTS], plugins=[QuickestFirst()])
        os.chdir("/")
    return bool(failed)


def main():
    os.environ["OMP_NUM_THREADS"] = "1"
    import peft  # noqa: F401  what every mutant would import again
    import transformers.models.qwen3  # noqa: F401

    source = (REPOSITORY / "starter.py").read_text("utf-8")
    todo = [("", 0, "", "", source), *mutants(source)]
    QuickestFirst.seen_by = multiprocessing.Manager().list()
    rows = []
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        for (section, line, before, after, _), seen in zip(todo, pool.imap(is_seen, todo)):
            assert line or not seen, "the tests fail without a change"
            rows.append(dict(section=section, line=line, before=before, after=after, seen=seen))
    write_csv("mutation", rows[1:])


if __name__ == "__main__":
    main()
