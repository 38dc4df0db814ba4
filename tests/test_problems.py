"""Problems: made up, from files and from data sets; their prompts; and which a step gets."""

import gzip
import importlib
import json
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import make_tokenizer

import starter
from starter import InputError
from support import tasks

# Countdown and addition


def key_of(problem):
    return tuple(sorted(problem["numbers"])), problem["target"]


@pytest.mark.parametrize(
    "task, n, prompt",
    [
        ("countdown", 10_000, "Using the numbers {}, write an expression that equals {}. Use each"),
        ("countdown_small", 4_000, "make {1}: {0}"),
    ],
)
def test_countdown_problems_differ_have_solutions_and_held_out_ones_are_not_trained_on(
    task, n, prompt
):
    cfg = SimpleNamespace(seed=0, n_eval_problems=500)
    train, held_out = starter.TASKS[task](cfg)
    cfg.seed = 1
    of_another_seed, _ = starter.TASKS[task](cfg)
    assert (len(train), len(held_out)) == (n, 500) and train != of_another_seed
    assert len({problem["prompt"] for problem in train}) == n
    for problem in train[::20] + held_out:
        assert starter.score_answer(f"<answer>{problem['solution']}</answer>", problem) == 1.0
        assert 1 <= problem["target"] <= 99
        numbers = " ".join(map(str, problem["numbers"]))
        assert problem["prompt"].startswith(prompt.format(numbers, problem["target"]))
    keys = {*map(key_of, held_out)}
    assert len(keys) == 500 and not keys & {*map(key_of, train + of_another_seed)}


def test_countdown_problems_stay_those_that_the_built_in_model_was_measured_on():
    _, second = tasks.make_countdown(2, True, 0, **tasks.SMALL_COUNTDOWN)
    assert (second["prompt"], second["solution"]) == ("make 8: 2 4", "4*2")


def test_countdown_holds_out_as_many_problems_as_there_are():
    """From 1 and 2: 1 + 1, 1 * 1, 1 + 2, 2 - 1, 1 * 2, 2 + 2 and 2 / 2, of those held out."""
    possible = [([1, 1], 2), ([1, 1], 1), ([1, 2], 3), ([1, 2], 1), ([1, 2], 2), ([2, 2], 4)]
    possible.append(([2, 2], 1))
    found = tasks.make_countdown(40, True, 0, n_numbers=(2,), max_number=2)
    of_hand = [list(key_of(problem)) for problem in found]
    expected = [[tuple(a), b] for a, b in possible if starter.is_held_out(a, b)]
    assert sorted(of_hand) == sorted(expected) != []


def test_addition_holds_out_problems_that_are_not_trained_on_in_either_order():
    def pair_of(problem):
        a, b = problem["prompt"].removeprefix("What is ").removesuffix("?").split(" + ")
        return tuple(sorted((int(a), int(b))))

    train, held_out = starter.TASKS["addition"](SimpleNamespace())
    assert len(train) + len(held_out) == 90 * 90 and len(held_out) > 1500
    assert not {*map(pair_of, train)} & {*map(pair_of, held_out)}
    for problem in train + held_out:
        assert problem["answer"] == str(sum(pair_of(problem)))
        assert starter.score_answer(f"It is {problem['answer']}.", problem) == 1.0


# Files, and data sets of the Hugging Face hub


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}]
ANSWER = {"role": "assistant", "content": "4"}


def test_prompts_are_texts_or_chats_and_other_keys_stay(with_support, tmp_path):
    """As editors and Windows write it, too: a byte order mark and carriage returns."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": 12}\r\n'
        b'{"prompt": "\xc3\xa9\\ud83d\\ude00", "answer": 0.5, "more": null}\n'
        + json.dumps({"prompt": CHAT, "answer": "4", "question": "?"}).encode()
    )
    assert starter.read_problems(path) == [
        {"prompt": "a", "answer": 12},
        {"prompt": "\u00e9\U0001f600", "answer": 0.5, "more": None},
        {"prompt": CHAT, "answer": "4", "question": "?"},
    ]


GSM8K = {"question": "Why {x}?", "answer": "2+2 = <<2+2=4>>4\n#### 1,234"}
WHY = "Why {x}?\nThink step by step in a few short lines, then give the answer alone in answer tags"
DEEP = r"First \boxed{7}, then $\boxed{\frac{\sqrt{3^{2}}}{2}}$."
MATH = {"problem": "Why {x}?", "solution": r"So $\boxed{1}$ or \boxed{\frac{1}{\sqrt{2}}}."}


@pytest.mark.parametrize(
    "row, prompt, answer",
    [
        (GSM8K, WHY, "1,234"),
        (MATH, WHY, r"\frac{1}{\sqrt{2}}"),
        ({**MATH, "solution": DEEP}, WHY, r"\frac{\sqrt{3^{2}}}{2}"),
        ({**MATH, "answer": 6}, WHY, 6),
        ({"messages": [*CHAT, ANSWER]}, CHAT, "4"),
        ({"messages": CHAT, "answer": 5}, CHAT, 5),
    ],
)  # under the name .json, which is right as long as each line is an object
def test_columns_of_other_names_are_understood(row, prompt, answer, tmp_path):
    [problem] = starter.read_problems(write_jsonl(tmp_path / "a.json", [row]))
    assert (problem["prompt"][: len(prompt)], problem["answer"]) == (prompt, answer)
    assert all(problem[name] == row[name] for name in row if name != "answer")


TWO = [{"prompt": "a, b;c", "answer": "0258"}, {"prompt": "c\nd", "answer": "x"}]


def packed(text):
    return gzip.compress(text.encode())


def parquet(path):
    pyarrow = pytest.importorskip("pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(TWO), path)


FILES = {
    "a.csv": 'prompt,answer\n"a, b;c",0258\n"c\nd",x\n',
    "b.csv": 'prompt;answer\n"a, b;c";0258\n"c\nd";x\n',
    "a.tsv": 'prompt\tanswer\na, b;c\t0258\n"c\nd"\tx\n',
    "a.json": json.dumps(TWO, indent=1),
    "a.jsonl.gz": packed("\n".join(map(json.dumps, TWO))),
    "a.csv.gz": packed('prompt,answer\n"a, b;c",0258\n"c\nd",x\n'),
    "a.parquet": parquet,
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_other_kinds_are_read_as_they_are(name, tmp_path):
    path = tmp_path / name
    content = FILES[name]
    if callable(content):
        content(path)
    elif isinstance(content, str):
        path.write_text(content)
    else:
        path.write_bytes(content)
    assert starter.read_problems(path) == TWO


def test_rows_of_parquet_have_only_the_keys_that_they_had(tmp_path):
    """A column of Parquet has all keys in all rows, as null where a row had none."""
    pyarrow = pytest.importorskip("pyarrow")
    rows = [
        {"prompt": "a", "answer": 1, "tools": [{"name": "add"}], "chat_template_kwargs": {"x": 1}},
        {"prompt": "b", "answer": 2, "tools": [{"type": "b"}], "chat_template_kwargs": None},
    ]
    path = tmp_path / "a.parquet"
    importlib.import_module("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    assert starter.read_problems(path) == rows


def test_narrow_floats_of_parquet_are_the_decimals_that_they_stand_for(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    answers = pyarrow.array([0.1, 2.5, 1e-7], pyarrow.float32())
    table = pyarrow.table({"prompt": ["a", "b", "c"], "answer": answers})
    importlib.import_module("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    problems = starter.read_problems(tmp_path / "a.parquet")
    assert [problem["answer"] for problem in problems] == [0.1, 2.5, 1e-7]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_message_that_only_calls_tools_needs_no_content(content, tmp_path):
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    chat = [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "tool_calls": calls, **content},
        {"role": "tool", "content": "2"},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat, "answer": 2}])
    [problem] = starter.read_problems(path)
    assert problem["prompt"] == [chat[0], {**chat[1], "content": ""}, chat[2]]


def test_parquet_without_pyarrow_costs_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="to read Parquet, install pyarrow"):
        starter.read_problems(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "text, value", [("false", False), ("0", False), ("No", False), ("1", True)]
)
def test_last_number_in_csv_is_read_as_on_the_command_line(text, value, tmp_path):
    (tmp_path / "a.csv").write_text(f"prompt,answer,last_number\na,5,{text}\n")
    [problem] = starter.read_problems(tmp_path / "a.csv")
    assert problem["last_number"] is value


def test_held_out_prompts_are_asked_once_each(tmp_path, capsys):
    """As of DAPO-Math, which has each of its problems a hundred times."""
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": str(i % 40), "answer": i % 40} for i in range(400)]
    )
    cfg = SimpleNamespace(task=path, eval_file=None, n_eval_problems=500)
    train, held_out = starter.problems_of_files(cfg)
    prompts = [problem["prompt"] for problem in held_out]
    assert 0 < len(prompts) == len({*prompts}) < 40
    assert len(train) == 10 * (40 - len(prompts))
    assert (
        f"{len(prompts)} of {10 * len(prompts)} held-out prompts differ" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{", "line 3 is no JSON .Expecting property name"),
        (b"\x1f\x8b", "its beginning: 'utf-8' codec .*in UTF"),
        (b'["prompt", "answer"]', "line 3: .'prompt', 'answer'. is no JSON object"),
        (b'{"question": 3, "answer": 1}', "line 3: the prompt 3 "),
        (b'{"prompt": "", "answer": "1"}', "the prompt '' "),
        (
            b'{"prompt": "a", "Answer": 1}',
            "keys are .'prompt', 'Answer'., and .*'answer', 'solution'",
        ),
        (b'{"prompt": "a", "answer": "5 ####"}', "the answer '5 ####'"),
        (b'{"prompt": "a", "answer": "<answer>5</answer>"}', "'<answer>5</answer>'.*without tags"),
        (b'{"prompt": [{"role": "human", "content": "a"}], "answer": "1"}', "a 'role' of .*'user'"),
        (b'{"prompt": [{"role": "user", "content": ["a"]}], "answer": "1"}', "a text as 'content'"),
    ],
)
def test_mistake_in_a_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n\n' + line + b"\n")
    with pytest.raises(InputError, match=message) as error:
        starter.read_problems(path)
    assert str(error.value).startswith(f"{path}, ") and len(str(error.value)) < 600


@pytest.mark.parametrize(
    "line, message", [(b"{", "line 3 is no JSON .Exp"), (b'{"prompt": "a"}', "line 3 .*'answer'")]
)
def test_mistake_in_a_line_is_named_without_support(tmp_path, without_support, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n\n' + line + b"\n")
    with pytest.raises(InputError, match=message):
        starter.read_problems(path)


@pytest.mark.parametrize(
    "name, near", [("countdwon", "'countdown'"), ("{}/sorts.jsonl", "'{}/sort.jsonl'")]
)
def test_name_of_no_task_and_no_file_gets_the_nearest(tmp_path, name, near):
    (tmp_path / "sort.jsonl").write_text("")
    name, near = name.format(tmp_path), near.format(tmp_path)
    with pytest.raises(InputError, match=f"'{name}' is no task.*use one of \\[{near}"):
        starter.read_problems(name)


def test_row_of_a_csv_with_too_many_fields_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\na,1\nb,2,3\n")
    with pytest.raises(InputError, match="problem 2: it has more fields than .* \\['3'\\]"):
        starter.read_problems(tmp_path / "a.csv")


def put_datasets(monkeypatch, **behaviour):
    """Stands for the library datasets, as far as it is called."""
    library = mock.Mock(**{f"load_dataset.{name}": value for name, value in behaviour.items()})
    monkeypatch.setitem(sys.modules, "datasets", library)
    return library.load_dataset


@pytest.mark.parametrize(
    "source, configuration, split",
    [("a/b:main", "main", "train"), ("a/b::test", None, "test")],
)
def test_name_of_a_dataset_is_its_configuration_and_split(
    source, configuration, split, monkeypatch
):
    load_dataset = put_datasets(monkeypatch, return_value=[GSM8K])
    assert starter.read_problems(source)[0]["answer"] == "1,234"
    load_dataset.assert_called_once_with("a/b", configuration, split=split)


def test_dataset_that_cannot_be_loaded_costs_one_sentence(monkeypatch):
    """As without a network or the library, and where a file is meant that is not there."""
    put_datasets(monkeypatch, side_effect=ConnectionError("Couldn't reach the hub" + "!" * 1000))
    message = r"no file 'a/b', and .* loaded \(ConnectionError: Couldn't reach the hub.*network"
    with pytest.raises(InputError, match=message) as error:
        starter.read_problems("a/b")
    assert len(str(error.value)) < 600


def test_dataset_is_read_by_the_real_library(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    (tmp_path / "me" / "sums").mkdir(parents=True)
    write_jsonl(tmp_path / "me" / "sums" / "train.jsonl", [GSM8K])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    [problem] = starter.read_problems("me/sums")
    assert problem["answer"] == "1,234"


# From files to a step's prompts


def test_files_hold_out_a_quarter_or_take_an_eval_file(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": str(i), "answer": i} for i in range(1000)])
    cfg = SimpleNamespace(task=str(path), eval_file=None, n_eval_problems=1000, model_id="none")
    train, held_out = starter.problems_of_files(cfg)
    assert len(train) + len(held_out) == 1000 and 200 < len(held_out) < 300
    assert not any(problem in train for problem in held_out)
    assert starter.load_problems(cfg) == starter.Problems(train, held_out, [])
    cfg.eval_file = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x", "answer": 1}])
    train, held_out, _ = starter.load_problems(cfg)
    assert len(train) == 1000 and held_out == [{"prompt": "x", "answer": 1}]


@pytest.mark.parametrize("with_eval_file", [True, False])
def test_held_out_problems_of_a_file_are_a_fixed_sample_of_all(tmp_path, with_eval_file):
    """Files may be sorted, such as by difficulty. The sample is the same with each seed."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": str(i), "answer": i} for i in range(1000)])
    cfg = SimpleNamespace(task=str(path), eval_file=None, n_eval_problems=1000, model_id="none")
    cfg.eval_file = path if with_eval_file else None
    train, all_held_out = starter.problems_of_files(cfg)
    cfg.n_eval_problems = 50
    found = []
    for seed in (0, 1):
        cfg.seed = seed
        found.append(starter.load_problems(cfg))
    assert found[0] == found[1]
    assert found[0].train == train and len(found[0].held_out) == 50
    places = sorted(all_held_out.index(problem) for problem in found[0].held_out)
    assert len({*places}) == 50
    assert 0.35 < sum(places) / 50 / len(all_held_out) < 0.65


def test_chats_go_through_the_template_and_prompts_that_are_too_long_are_left_out(capsys):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':' + m.content + '.' }}{% endfor %}"
        "{{ 'think' if enable_thinking else 'answer' }}"
    )
    problems = [{"prompt": CHAT}, {"prompt": "2+2"}, {"prompt": "2" * 50}]
    policy = mock.Mock()
    text = policy.config.get_text_config()
    text.max_position_embeddings = 47
    cfg = SimpleNamespace(max_new_tokens=14, enable_thinking=True)

    def fitting(problems):
        found = starter.with_prompt_ids(problems, policy, tokenizer, cfg)
        return [tokenizer.decode(problem["prompt_ids"]) for problem in found]

    # The first fits exactly.
    assert fitting(problems) == ["system:be brief.user:2 + 2?.think", "user:2+2.think"]
    assert "1 of 3 prompts are left out: with max_new_tokens = 14" in capsys.readouterr().out
    tokenizer.chat_template = None
    text.max_position_embeddings = -1  # no limit
    assert fitting(problems[1:]) == ["2+2", "2" * 50]
    with pytest.raises(starter.InputError, match="'' .it has no tokens"):
        fitting([{"prompt": "", "answer": "1"}])


def test_problems_of_steps_go_through_a_new_shuffle_in_each_epoch():
    problems = list(range(10))
    steps = [starter.problems_of_step(problems, step, 4, seed=1) for step in range(5)]
    assert starter.problems_of_step(problems, 3, 4, seed=1) == steps[3]
    assert starter.problems_of_step(problems, 3, 4, seed=2) != steps[3]
    in_order = sum(steps, [])
    assert sorted(in_order[:10]) == sorted(in_order[10:]) == problems != in_order[:10]
    assert in_order[:10] != in_order[10:]
    assert sorted(starter.problems_of_step("ab", 0, 8, seed=0)) == [*"aaaabbbb"]


def test_problems_of_reasoning_gym_are_scored_by_the_library(tmp_path):
    """Two of its data sets in turn, with a request for answer tags. A part of a point is kept."""
    gym = pytest.importorskip("reasoning_gym")
    cfg = starter.cfg_with(task="reasoning_gym:chain_sum+word_sorting", model_id="", eval_file=None)
    train, held_out, _ = starter.load_problems(cfg)
    assert len(train) > 2000 and len(held_out) == 500
    assert not {problem["prompt"] for problem in train} & {p["prompt"] for p in held_out}
    assert {"<answer>42</answer>" in problem["prompt"] for problem in train} == {True}
    made = {}
    for name in ("chain_sum", "word_sorting"):
        data = gym.create_dataset(name, seed=0, size=2000)
        made[name] = {entry["question"]: (data, entry) for entry in data}
    of_kind = dict.fromkeys(made, 0)
    for problem in train[:100]:
        question = problem["prompt"].partition("\nThink step")[0]
        name = next(name for name in made if question in made[name])
        of_kind[name] += 1
        data, entry = made[name][question]
        for answer in (entry["answer"], entry["answer"].upper() + " ", "1", "a, b"):
            reward = starter.reward_fn(f"so <answer>{answer}</answer>", problem)
            expected = data.score_answer(answer.strip(), entry)
            assert reward == max(0.1, expected)
    assert min(of_kind.values()) > 30


def test_unknown_data_set_of_reasoning_gym_gets_near_names():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(InputError, match="'chain_sums' is not known; use one of .*'chain_sum'"):
        starter.read_problems("reasoning_gym:chain_sums")
