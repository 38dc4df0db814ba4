"""Tests of what README.md and docs/ say: commands, names and links that must be true."""
import inspect
import json
import re
import shutil
import socket
from pathlib import Path
from unittest import mock

import pytest

import starter
from conftest import scalars, settings

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
    result = starter.main(**settings(folder, tmp_path, use_kl_penalty=True))
    logged = {re.sub("retention_.*", "retention_*", tag) for tag in scalars(result["run_folder"])}
    page = (REPOSITORY / "docs" / "monitoring.md").read_text()
    table = page.partition("## Troubleshooting")[0]
    cells = re.findall(r"^\| (`[a-z_]+/[^|]*) \|", table, flags=re.M)
    explained = [tag for cell in cells for tag in re.findall(r"`([\w/*]+)`", cell)]
    assert len(explained) == len(set(explained))
    assert logged | {"time/sync"} == set(explained)


def test_names_in_the_table_for_trl_users_are_parameters_of_main():
    page = (REPOSITORY / "docs" / "monitoring.md").read_text()
    table = page.partition("## If you know TRL")[2]
    names = {name for cell in re.findall(r"^\| (`[^|]*) \|", table, flags=re.M)
             for name in re.findall(r"`(\w+)(?: = [^`]*)?`", cell) if "/" not in cell}
    allowed = set(inspect.signature(starter.main).parameters) | {"grpo", "dapo", "dr_grpo"}
    assert len(names) > 8 and names <= allowed


def test_example_of_the_readme_trains(checkpoint, tmp_path, monkeypatch):
    """The lines of the README, with a file of made-up capitals and a small model."""
    page = (REPOSITORY / "README.md").read_text()
    example = re.search(r"```python\n(import starter.*?)```", page, flags=re.S).group(1)
    rows = [{"prompt": f"capital of country{i}", "answer": "abcdefgh"[i % 8]} for i in range(140)]
    monkeypatch.chdir(tmp_path)
    Path("capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call = re.search(r"starter\.main\((.*?)\)\n$", example, flags=re.S).group(1)
    small = settings(checkpoint, tmp_path)
    for name in re.findall(r"(\w+)=", call):
        small.pop(name, None)
    example = example.replace('"path/to/checkpoint"', repr(str(checkpoint)))
    example = example.replace("n_train_steps=100", "n_train_steps=2")
    example = re.sub(r"\)\n$", ", **small)\n", example)
    exec(compile(example, "README.md", "exec"), {"small": small})  # noqa: S102  our own page
    report = max(tmp_path.glob("*/report.txt")).read_text()
    assert "capitals, 100 held-out problems" in report


def test_local_model_is_loaded_without_the_network(checkpoint, tmp_path):
    refused = AssertionError("the network was asked")
    with mock.patch.object(socket.socket, "connect", side_effect=refused), \
            mock.patch.object(socket, "getaddrinfo", side_effect=refused):
        starter.main(**settings(checkpoint, tmp_path, n_train_steps=1))
