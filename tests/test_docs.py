"""Tests of what README.md, README_KL.md, recipes/README.md and docs/ say: numbers, commands, names
and links that must be true."""

import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest

import starter
from conftest import scalars, settings
from lab import tables

REPOSITORY = tables.REPOSITORY
EACH_PAGE = pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)


def pins(name):
    """Returns {package: version} of a requirements file."""
    text = (REPOSITORY / name).read_text()
    return dict(re.findall(r"^([\w-]+)==(\S+)$", text, flags=re.M))


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
    cpu = pins("requirements-cpu.txt")
    for name in ("requirements.txt", "requirements-vllm-cpu.txt"):
        assert all(cpu.get(package, pin) == pin for package, pin in pins(name).items())
    block = (REPOSITORY / "starter.py").read_text("utf-8").partition("# ///\n")[0]
    assert dict(re.findall(r'"([\w-]+)==([\w.]+)"', block)).items() <= cpu.items()


def test_data_and_reward_of_the_readme_train_and_every_tag_is_explained(
    checkpoint, tmp_path, monkeypatch, capsys
):
    """The program that writes sort.jsonl, the lines that train on it with another reward, and those
    that talk with the result."""

    def run(program, **names):
        exec(program, names)  # noqa: S102  our own page
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    [writer] = re.findall(r'python -c "(.*?)" > sort.jsonl', "".join(blocks("bash")), flags=re.S)
    Path("sort.jsonl").write_text(run(writer))
    lines = [json.loads(line) for line in open("sort.jsonl")]
    assert all(sorted(row["prompt"].split()[-1]) == list(row["answer"]) for row in lines)
    [example] = [block for block in blocks("python") if "reward=brief" in block]
    small = settings(checkpoint, tmp_path, use_kl_penalty=True, kl_adaptation_method="dynamic")
    del small["task"], small["reward"]
    run(example.replace('"sort.jsonl",', '"sort.jsonl", **small,'), small=small)
    [model] = tmp_path.glob("*/model")
    [chat] = [block for block in blocks("python") if "pipeline(" in block]
    assert run(chat.replace("runs/<run>/model", str(model))).strip()
    [agent] = [block for block in blocks("python") if "agent=play" in block]
    small = settings(checkpoint, tmp_path / "agent", n_train_steps=1)
    del small["reward"], small["max_new_tokens"]
    run("import starter\n" + agent.replace("agent=play,", "agent=play, **small,"), small=small)
    assert len([*tmp_path.glob("agent/*/model")]) == 1
    page = (REPOSITORY / "docs" / "monitoring.md").read_text("utf-8")
    for tag in scalars(model.parent):
        assert f"`{tag}`" in page or f"`{tag.split('/')[0]}/" in page, tag


def test_math_verify_as_a_reward():
    names = {**vars(pytest.importorskip("math_verify")), "starter": starter}
    page = (REPOSITORY / "docs" / "your_own.md").read_text("utf-8")
    [source] = re.findall(r"`(lambda text, problem: float\(verify.*?)`", page)
    exec(f"reward = {source}", names)  # noqa: S102  our own page
    for gold, answer, right in (
        ("72", "72.0", 1),
        (r"1 - \sqrt{2}", "1", 0),
        (r"1 - \sqrt{2}", r"-\sqrt{2} + 1", 1),
    ):
        assert names["reward"](f"<answer>{answer}</answer>", {"answer": gold}) == right
