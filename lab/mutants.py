"""Plants one fault at a time into a copy of the repository and expects the tests to fail.

    python -m lab.mutants                 runs the faults that lab/results/mutants.csv lacks
    python -m lab.mutants --only runs.py  those whose file, text or tests contain this
    python -m lab.mutants --list          prints them, with the test that caught each
    python -m lab.mutants --check         whether each fault's text stands exactly once
    python -m lab.mutants --quick         only short tests, of the likeliest files; keeps what
                                          these catch

The faults are in lab/faults.py. The tests run once without a fault, and coverage.py notes which
of them run which line. For each fault the tests that run its lines come first, the short before
the long; if they pass, the rest of the likeliest files. A test that fails
must fail alone, too, and pass alone without the fault. A fault that no test
catches survives: either a test is missing, or the fault changes nothing that matters and leaves
the list, with the reason.

Two run at a time, each in a fork of this process, which has imported torch and transformers.
Needs os.fork (Linux, macOS). Without coverage (`pip install coverage`) it takes a few times longer.
"""
import argparse
import ast
import csv
import gc
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab.faults import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "lab" / "results" / "mutants.csv"
COLUMNS = ["file", "stands", "becomes", "caught_by", "commit"]
AT_ONCE = 2
TIME_LIMIT = 300  # seconds, or three times as long as without a fault; a hang counts as caught
CONTROL_LIMIT = 1800  # seconds, without a fault
SHORT = 3.0  # seconds of a test that --quick runs
# These tests compare pages and lists with one another. A planted fault always changes them.
LEFT_OUT = ("tests/test_lab.py", "tests/test_docs.py", "tests/test_mutants.py")


class Fault(NamedTuple):
    file: str
    stands: str
    becomes: str
    tests: str = ""  # the files likeliest to catch it, apart by spaces
    slow: str = ""  # pytest -k, where only slow tests can

    @property
    def key(self):
        return self.file, self.stands, self.becomes


def all_faults():
    return [Fault(section.file, stands, becomes, section.tests, section.slow)
            for section in SECTIONS for stands, becomes in section.faults]


def misplaced(faults):
    """Returns {fault: what is wrong} of those whose text does not stand exactly once, that are
    twice in the list, or that change nothing."""
    wrong = {}
    texts = {fault.file: (ROOT / fault.file).read_text() for fault in faults}
    times = Counter(fault.key for fault in faults)
    for fault in faults:
        n = texts[fault.file].count(fault.stands)
        if n != 1:
            wrong[fault] = f"stands {n} times"
        elif times[fault.key] > 1:
            wrong[fault] = f"is {times[fault.key]} times in the list"
        elif fault.stands == fault.becomes:
            wrong[fault] = "changes nothing"
    return wrong


# --------------------------------------------------------------------------------------------------
# A copy of the repository, and pytest in it

def copy_repository(folder):
    """Copies all files that git knows or does not ignore, and links the built-in model."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    if (ROOT / "tiny").is_dir():
        (folder / "tiny").symlink_to(ROOT / "tiny")


def plant(fault, folder):
    path = folder / fault.file
    text = path.read_text()
    assert text.count(fault.stands) == 1, fault
    path.write_text(text.replace(fault.stands, fault.becomes))


def planted_lines(fault, text):
    """Returns the numbers of the lines of text whose run would run the fault: those of the
    innermost statement around it. Of a function's signature, the lines of its body."""
    first = text[:text.index(fault.stands)].count("\n") + 1
    last = first + fault.stands.strip("\n").count("\n")
    first += len(fault.stands) - len(fault.stands.lstrip("\n"))
    around = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)
              and node.lineno <= first and last <= node.end_lineno]
    if not around:
        return set(range(first, last + 1))
    innermost = min(around, key=lambda node: node.end_lineno - node.lineno)
    whole = range(innermost.lineno, innermost.end_lineno + 1)
    body = getattr(innermost, "body", None)
    if body and last < body[0].lineno:  # in the head of a statement
        function = isinstance(innermost, ast.FunctionDef)
        whole = range(*((body[0].lineno, whole.stop) if function
                        else (whole.start, body[0].lineno)))
    return set(whole)


def test_files(fault, folder):
    """Returns the test files that are likeliest to catch the fault, and the others."""
    found = [path.relative_to(folder).as_posix()
             for path in [*folder.glob("test_*.py"), *sorted(folder.glob("tests/test_*.py"))]]
    found = [name for name in found if name not in LEFT_OUT]
    likeliest = [name for name in fault.tests.split() if name in found]
    others = [name for name in found if name not in likeliest and not fault.slow]
    return likeliest, others


def arguments_of(files, slow, failing=()):
    """failing: ids of tests that fail without a fault, so that they can catch none. All in this
    one process, where the Stopwatch is."""
    chosen = ["-k", slow] if slow else ["-m", "not slow"]
    return ["-q", "-n0", "-p", "no:cacheprovider", *files, *chosen,
            *(f"--deselect={test}" for test in failing)]


class Stopwatch:
    """A pytest plugin that keeps the seconds of each test and of each fixture that tests share,
    and with watch=True the lines that they run. Given those of an earlier run, it runs the tests
    of wanted (names, or None for all tests) but not those of done, the short before the long, and
    those above most_seconds not at all. The first test to ask for a shared fixture pays for it, so
    it counts for all of them."""

    def __init__(self, known=None, most_seconds=math.inf, wanted=None, done=(),
                 watch=False):
        self.known = known
        self.most_seconds = most_seconds
        self.wanted = wanted
        self.done = set(done)
        self.seconds = Counter()
        self.in_shared_fixtures = 0.0
        self.names = []  # of the test and of the shared fixtures that run at present
        self.watch = watch and importlib.util.find_spec("coverage")
        self.watched = None

    def begin(self):
        """Called in the folder of the copy, before anything of it is imported."""
        if self.watch:
            here = [f"{Path.cwd()}/{name}" for name in ("starter.py", "support/*", "lab/*")]
            self.watched = importlib.import_module("coverage").Coverage(None, include=here)
            self.watched.start()

    def pytest_collection_modifyitems(self, items):
        if self.known is not None:
            items[:] = [item for item in items if self.known_seconds(item) <= self.most_seconds
                        and (self.wanted is None or self.names_of(item) & self.wanted)
                        and not self.names_of(item) & self.done]
            items.sort(key=self.known_seconds)

    def names_of(self, item):
        return {item.nodeid, *(f"fixture {name}" for name in item.fixturenames)}

    def known_seconds(self, item):
        own = self.known.get(item.nodeid, self.most_seconds)
        return own + sum(self.known.get(f"fixture {name}", 0.0) for name in item.fixturenames)

    def switch(self):
        if self.watched and self.names:
            self.watched.switch_context(self.names[-1])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.names = [item.nodeid]
        self.switch()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == "function":
            return (yield)
        began = time.perf_counter()
        self.names.append(f"fixture {fixturedef.argname}")
        self.switch()
        try:
            value = yield
        finally:
            self.names.pop()
            self.switch()
        seconds = time.perf_counter() - began
        self.seconds[f"fixture {fixturedef.argname}"] += seconds
        self.in_shared_fixtures += seconds
        return value

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration - self.in_shared_fixtures
        self.in_shared_fixtures = 0.0

    def pytest_sessionfinish(self):
        Path("seconds.json").write_text(json.dumps(self.seconds))
        lines = {}
        if self.watched:
            self.watched.stop()
            data = self.watched.get_data()
            for file in data.measured_files():
                name = Path(file).relative_to(Path.cwd()).as_posix()
                lines[name] = data.contexts_by_lineno(file)
        Path("lines.json").write_text(json.dumps(lines))


def import_once():
    """Imports what all tests import. Each fork then begins with it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("torch", "torch.utils.tensorboard", "safetensors.torch",
                 "transformers.generation.utils", "transformers.modeling_utils",
                 "transformers.models.auto.modeling_auto", "transformers.masking_utils",
                 "transformers.models.auto.tokenization_auto",
                 "transformers.models.qwen3.modeling_qwen3"):
        importlib.import_module(name)
    if importlib.util.find_spec("hypothesis"):
        importlib.import_module("hypothesis")
    gc.collect()
    gc.freeze()  # else the end of each fork copies what it shares with this process


def start(arguments, folder, stopwatch):
    """Starts pytest in a fork whose modules are those of the folder. Returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 70  # of a fork that fails outside pytest
    try:
        os.setsid()  # so that the processes that it starts can be ended with it
        os.chdir(folder)
        output = os.open(folder / "pytest.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(output, "w")
        sys.path = [str(folder)] + [path for path in sys.path if path not in ("", str(ROOT))]
        for name in list(sys.modules):
            if name.partition(".")[0] in ("lab", "starter", "support"):
                del sys.modules[name]
        stopwatch.begin()
        status = int(pytest.main(arguments, [stopwatch]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


class Job(NamedTuple):
    name: Any  # whatever tells the caller which this was
    arguments: list  # of pytest
    folder: Path
    stopwatch: Stopwatch


class Outcome(NamedTuple):
    failed: bool
    tests: list  # ids of those that failed
    seconds: float
    output: str


def run_all(next_job, limit):
    """next_job() -> a Job, or None if there is none at present. Yields (job, Outcome) as they
    end, until none is left. limit: seconds for each."""
    running = {}  # process id: (job, time of its start)
    while True:
        while len(running) < AT_ONCE and (job := next_job()):
            running[start(job.arguments, job.folder, job.stopwatch)] = job, time.monotonic()
        if not running:
            return
        time.sleep(0.1)
        for child, (job, began) in list(running.items()):
            seconds = time.monotonic() - began
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended and seconds < limit:
                continue
            kill_with_its_processes(child)
            output = (job.folder / "pytest.txt").read_text(errors="replace")
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+?)(?:\[| |$)", output, flags=re.M)
            if not ended:
                os.waitpid(child, 0)
                failed = ["a hang"]
            del running[child]
            nothing_to_run = ended and os.waitstatus_to_exitcode(status) == 5
            yield job, Outcome(status != 0 and not nothing_to_run or not ended, failed, seconds,
                               output)


def kill_with_its_processes(child):
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass


# --------------------------------------------------------------------------------------------------
# The csv file

def read_results():
    if not RESULTS.is_file():
        return {}
    with open(RESULTS, newline="") as file:
        return {(row["file"], row["stands"], row["becomes"]): row for row in csv.DictReader(file)}


def write_results(rows, faults):
    """Rows of faults that have left the list go."""
    unfinished = RESULTS.with_suffix(".unfinished")
    with open(unfinished, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows[fault.key] for fault in faults if fault.key in rows)
    unfinished.replace(RESULTS)


def mutants_table():
    """Planted faults by file, how many were caught, those that were not, and how many of the list
    were not tried with the present tests, as markdown."""
    rows = list(read_results().values())
    left = len({fault.key for fault in all_faults()} - set(read_results()))
    lines = ["| file | planted | caught |", "| --- | --- | --- |"]
    for file in dict.fromkeys(row["file"] for row in rows):
        of_file = [row for row in rows if row["file"] == file]
        caught = sum(row["caught_by"] != "" for row in of_file)
        lines.append(f"| {file} | {len(of_file)} | {caught} |")
    missed = [f"`{row['stands'].strip()}` → `{row['becomes'].strip()}`"
              for row in rows if row["caught_by"] == ""]
    if missed:
        lines += ["", f"Not caught: {'; '.join(missed)}."]
    if left:
        lines += ["", f"Of the list, not tried yet with the present tests: {left}."]
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# The program

def run_without_fault(snapshot, faults, quick):
    """Returns the ids of the tests that fail in the snapshot as it is, which can catch no fault,
    the seconds of the longest run of pytest, those of each test, and {file: {line: names of the
    tests and fixtures that run it}}."""
    files = defaultdict(set)
    for fault in faults:
        likeliest, others = test_files(fault, snapshot)
        files[fault.slow].update(likeliest, [] if quick else others)
    jobs = deque()
    for i, (slow, names) in enumerate(files.items()):
        folder = snapshot.with_name(f"control_{i}")
        shutil.copytree(snapshot, folder, symlinks=True)
        if names:
            jobs.append(Job("control", arguments_of(sorted(names), slow), folder,
                            Stopwatch(watch=True)))
    failing = set()
    seconds = {}
    names_of = defaultdict(lambda: defaultdict(set))
    longest = 0.0
    for job, outcome in run_all(lambda: jobs.popleft() if jobs else None, CONTROL_LIMIT):
        failing.update(outcome.tests)
        longest = max(longest, outcome.seconds)
        if outcome.failed and (not outcome.tests or outcome.tests == ["a hang"]):
            sys.exit(f"the tests do not run without a fault:\n{outcome.output[-3000:]}")
        seconds |= json.loads((job.folder / "seconds.json").read_text())
        for file, lines in json.loads((job.folder / "lines.json").read_text()).items():
            for line, names in lines.items():
                names_of[file][int(line)].update(filter(None, names))
    for i, test in enumerate(sorted(failing)):  # some fail only because coverage slows them
        folder = snapshot.with_name(f"again_{i}")
        shutil.copytree(snapshot, folder, symlinks=True)
        jobs.append(Job(test, ["-q", "-n0", "-p", "no:cacheprovider", "-m", "", test], folder,
                        Stopwatch()))
    outcomes = run_all(lambda: jobs.popleft() if jobs else None, CONTROL_LIMIT)
    return [job.name for job, outcome in outcomes if outcome.failed], longest, seconds, names_of


def caught_by(outcome):
    """Returns the name of the first test that failed; "" where none did."""
    if not outcome.failed:
        return ""
    if outcome.tests == ["a hang"]:
        return "a hang"
    name = outcome.tests[0].rpartition("::")[2] if outcome.tests else ""
    return name if name.startswith("test_") and "/" not in name else "cannot be imported"


def run_faults(faults, todo, quick):
    """Plants each fault of todo and keeps what caught it. faults: the whole list."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True,
                            capture_output=True).stdout.strip()
    import_once()
    known = read_results()
    n_done, n_survived = 0, 0
    with tempfile.TemporaryDirectory() as name:
        snapshot = Path(name) / "snapshot"
        snapshot.mkdir()
        copy_repository(snapshot)
        failing, longest, seconds, names_of = run_without_fault(snapshot, todo, quick)
        print(f"without a fault: at most {longest:.0f} s", flush=True)
        for test in failing:
            print(f"fails without a fault, so that it can catch none: {test}", flush=True)
        most_seconds = SHORT if quick else math.inf
        waiting = deque(enumerate(todo))
        at_work = {}  # fault: its folder, try_out(fault, folder)
        further = deque()  # their next jobs
        sound = set()  # tests that pass alone without a fault

        def attempts(fault):
            """Returns [(test files, names of the wanted tests or None for all), ...], which are
            tried in turn: the test that caught it last time, tests that run the planted lines, and
            the likeliest files, since some tests start processes, which coverage does not watch.
            The other files only where no test is known to run these lines."""
            lines = planted_lines(fault, (snapshot / fault.file).read_text())
            wanted = set().union(*(names_of[fault.file][line] for line in lines))
            likeliest, others = test_files(fault, snapshot)
            last = known.get(fault.key, {"caught_by": ""})["caught_by"]
            of_last = {test for test in seconds if test.partition("[")[0].endswith(f"::{last}")}
            found = [(sorted({test.partition("::")[0] for test in of_last}), of_last)]
            found = [attempt for attempt in [*found, (likeliest + others, wanted)] if attempt[1]]
            rest = [likeliest] if wanted else [likeliest, others]
            found += [(files, None) for files in rest if files]
            return found[:-1] if quick and len(found) > 1 else found

        def try_out(fault, folder):
            """Yields jobs, takes their outcomes, and returns what caught the fault, or ""."""
            def alone(test, folder):
                arguments = ["-q", "-n0", "-p", "no:cacheprovider", "-m", "", test]
                return Job(fault, arguments, folder, Stopwatch(seconds))

            done = set()
            for files, wanted in attempts(fault):
                while True:
                    arguments = ["-x", *arguments_of(files, fault.slow, failing)]
                    outcome = yield Job(fault, arguments, folder,
                                        Stopwatch(seconds, most_seconds, wanted, done))
                    caught = caught_by(outcome)
                    if not caught:
                        done |= wanted or {test for test in seconds
                                           if test.partition("::")[0] in files}
                        break
                    if not caught.startswith("test_"):
                        return caught
                    test = outcome.tests[0]
                    if (yield alone(test, folder)).failed:
                        if test not in sound:
                            control = folder.with_name(f"{folder.name}_control")
                            shutil.copytree(snapshot, control, symlinks=True)
                            if not (yield alone(test, control)).failed:
                                sound.add(test)
                            shutil.rmtree(control)
                        if test in sound:
                            return caught
                    print(f"fails for another reason than a fault: {test}", flush=True)
                    failing.append(test)
            return ""

        def next_job():
            if further:
                return further.popleft()
            if not waiting:
                return None
            i, fault = waiting.popleft()
            folder = Path(name) / f"fault_{i}"
            shutil.copytree(snapshot, folder, symlinks=True)
            plant(fault, folder)
            at_work[fault] = folder, try_out(fault, folder)
            return next(at_work[fault][1])

        for job, outcome in run_all(next_job, max(TIME_LIMIT, 3 * longest)):
            fault = job.name
            folder, trial = at_work[fault]
            try:
                further.append(trial.send(outcome))
                continue
            except StopIteration as end:
                caught = end.value
            shutil.rmtree(folder)
            n_done += 1
            n_survived += not caught
            print(f"{n_done} of {len(todo)} | {fault.file} | {caught or 'SURVIVED'} | "
                  f"{outcome.seconds:.0f} s | {fault.stands!r} -> {fault.becomes!r}", flush=True)
            if caught or not quick:
                row = dict(zip(COLUMNS, (*fault.key, caught, commit)))
                write_results(read_results() | {fault.key: row}, faults)
    print(f"{n_done - n_survived} of {n_done} planted faults caught")
    return 1 if n_survived else 0


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.mutants")
    parser.add_argument("--only", default="", help="whose file, text or tests contain this")
    parser.add_argument("--again", action="store_true", help="also those that are in the csv")
    parser.add_argument("--quick", action="store_true", help="only short tests")
    parser.add_argument("--list", action="store_true", help="print the faults and what caught them")
    parser.add_argument("--check", action="store_true", help="each text stands exactly once")
    given = parser.parse_args()
    faults = all_faults()
    chosen = [fault for fault in faults if any(given.only in text for text in fault)]
    rows = read_results()
    if given.list:
        for fault in chosen:
            caught = rows[fault.key]["caught_by"] or "SURVIVED" if fault.key in rows else "not run"
            print(f"{fault.file} | {caught} | {fault.stands!r} -> {fault.becomes!r}")
        return 0
    wrong = misplaced(faults)
    for fault, what in wrong.items():
        print(f"{fault.file}: {what}: {fault.stands!r}", flush=True)
    if given.check:
        print(f"{len(faults)} faults, {len(wrong)} misplaced")
        return 1 if wrong else 0
    todo = [fault for fault in chosen
            if fault not in wrong and (given.again or fault.key not in rows)
            and not (given.quick and fault.slow)]
    todo.sort(key=lambda fault: fault.key not in rows)  # quick ones first: their tests are known
    return run_faults(faults, todo, given.quick)


if __name__ == "__main__":
    sys.exit(main())
