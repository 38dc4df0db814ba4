"""Problems: made up, from files and from data sets; their prompts; and which a step gets."""

import json
import sys
from types import SimpleNamespace

import pytest
from conftest import make_tokenizer

import starter
from starter import InputError
from support import edits, tasks

# Countdown and addition


def key_of(problem):
    return tuple(sorted(problem["numbers"])), problem["target"]


@pytest.mark.parametrize(
    "task, prompt",
    [
        ("countdown", "Using the numbers {}, write an expression that equals {}. Use each"),
        ("countdown_small", "make {1}: {0}"),
    ],
)
def test_countdown_problems_have_solutions_and_held_out_ones_are_not_trained_on(
    task, prompt, monkeypatch
):
    monkeypatch.setattr(tasks, "N_TRAIN_PROBLEMS", 400)
    train, held_out = starter.TASKS[task](SimpleNamespace(seed=0, n_eval_problems=500))
    trained_on_by_another_seed, _ = starter.TASKS[task](SimpleNamespace(seed=1, n_eval_problems=1))
    assert (len(train), len(held_out)) == (400, 500) and train != trained_on_by_another_seed
    for problem in train + held_out:
        assert tasks.score_answer(f"<answer>{problem['solution']}</answer>", problem) == 1.0, (
            problem
        )
        assert 1 <= problem["target"] <= tasks.MAX_TARGET
        numbers = " ".join(map(str, problem["numbers"]))
        assert problem["prompt"].startswith(prompt.format(numbers, problem["target"]))
    assert not {*map(key_of, train + trained_on_by_another_seed)} & {*map(key_of, held_out)}
    assert len({*map(key_of, held_out)}) == 500


def test_countdown_problems_stay_those_that_the_built_in_model_was_measured_on():
    first, second = tasks.make_countdown(2, True, 0, **tasks.SMALL_COUNTDOWN)
    assert (first["prompt"], first["solution"]) == ("make 43: 14 29", "29+14")
    assert (second["prompt"], second["solution"]) == ("make 8: 2 4", "4*2")


def test_countdown_refuses_more_held_out_problems_than_there_are():
    with pytest.raises(InputError, match="n_eval_problems = 40: only .* were found; use"):
        tasks.make_countdown(40, True, 0, n_numbers=(2,), max_number=2)


def test_addition_holds_out_problems_that_are_not_trained_on_in_either_order():
    def pair_of(problem):
        a, b = problem["prompt"].removeprefix("What is ").removesuffix("?").split(" + ")
        return tuple(sorted((int(a), int(b))))

    train, held_out = starter.TASKS["addition"](SimpleNamespace())
    assert len(train) + len(held_out) == 90 * 90 and len(held_out) > 1500
    assert not {*map(pair_of, train)} & {*map(pair_of, held_out)}
    for problem in train + held_out:
        assert problem["answer"] == str(sum(pair_of(problem)))
        assert tasks.score_answer(f"It is {problem['answer']}.", problem) == 1.0


# Files, and data sets of the Hugging Face hub


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
ANSWER = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("read", [edits.own("read_problems"), tasks.read_problems])
def test_prompts_are_texts_or_chats_and_other_keys_stay(read, tmp_path, capsys):
    """As editors and Windows write it, too: a byte order mark and carriage returns."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": 12}\r\n'
        b'{"prompt": "\xc3\xa9\\ud83d\\ude00", "answer": 0.5, "more": null}\n'
        + json.dumps({"prompt": CHAT, "answer": " 4 ", "question": "?"}).encode()
    )
    assert read(path) == [
        {"prompt": "a", "answer": "12"},
        {"prompt": "\u00e9\U0001f600", "answer": "0.5", "more": None},
        {"prompt": CHAT, "answer": "4", "question": "?"},
    ]
    assert not capsys.readouterr().out


GSM8K = {"question": "Why {x}?", "answer": "2+2 = <<2+2=4>>4\n#### 1,234"}
MATH = {"problem": "Why {x}?", "solution": r"So $\boxed{1}$ or \boxed{\frac{1}{\sqrt{2}}}."}


@pytest.mark.parametrize(
    "row, answer",
    [(GSM8K, "1,234"), (MATH, r"\frac{1}{\sqrt{2}}"), ({**MATH, "answer": 6}, "6")],
)  # under the name .json, which is right as long as each line is an object
def test_columns_of_gsm8k_and_math_are_understood_and_said(row, answer, tmp_path, capsys):
    [problem] = tasks.read_problems(write_jsonl(tmp_path / "a.json", [row]))
    assert problem["answer"] == answer
    assert problem["prompt"].startswith("Why {x}?\n") and "<answer>" in problem["prompt"]
    [line] = capsys.readouterr().out.splitlines()
    assert "is the prompt, with a request for answer tags" in line
    assert ("the answer is what follows '####'" in line) == (answer != "6")


@pytest.mark.parametrize(
    "row, answer",
    [
        ({"messages": [*CHAT, ANSWER]}, "4"),
        ({"messages": [*CHAT, ANSWER], "answer": 5}, "5"),
        ({"messages": CHAT, "answer": 5}, "5"),
    ],
)
def test_chat_that_ends_with_an_answer_is_a_prompt_and_its_answer(row, answer, tmp_path, capsys):
    [problem] = tasks.read_problems(write_jsonl(tmp_path / "a.jsonl", [row]))
    assert (problem["prompt"], problem["answer"]) == (CHAT, answer)
    is_said = "the assistant's last message is the answer" in capsys.readouterr().out
    assert is_said == (ANSWER in row["messages"])


def test_csv_files_and_json_arrays_are_read_as_they_are(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,answer\n"a, b",0258\n"c\nd",x\n')
    problems = tasks.read_problems(tmp_path / "a.csv")
    assert problems == [{"prompt": "a, b", "answer": "0258"}, {"prompt": "c\nd", "answer": "x"}]
    (tmp_path / "a.json").write_text(json.dumps(problems, indent=1))
    assert tasks.read_problems(tmp_path / "a.json") == problems
    (tmp_path / "a.csv").write_text("prompt,answer\n1\n")
    with pytest.raises(InputError, match="a.csv row 1, .* has None under 'answer'"):
        tasks.read_problems(tmp_path / "a.csv")


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{", r"line 2 is not JSON \(.*\): '{'; write one whole object into each line"),
        (b"[" * 100_000, r"line 2 is not JSON \(.*recursion"),
        (b'{"prompt": "caf\xe9", "answer": "1"}', r"line 2 is no text in UTF-8 \(byte 0xe9\)"),
        (b'["prompt", "answer"]', r"line 2 is \['prompt', 'answer'\]; write an object"),
        (
            b'{"prompt": "a", "Answer": 1}',
            r"with the keys \['prompt', 'Answer'\], has None under 'answer'",
        ),
        (b'{"prompt": "a", "answer": null}', "has None under 'answer'"),
        (b'{"question": 3, "answer": 1}', "has 3 under 'question'; give a text or chat"),
        (b'{"prompt": " ", "answer": "1"}', "has ' ' under 'prompt'"),
        (b'{"prompt": "a", "answer": NaN}', "has nan under 'answer'"),
        (b'{"prompt": "a", "answer": "7", "last_number": 0}', "2 has 0 under 'last_number'"),
        (b'{"prompt": "a", "answer": "7 apples", "last_number": true}', "and '7 apples' under"),
        (b'{"prompt": "a", "answer": "5 ####"}', "has '5 ####' under 'answer'; write what"),
        (b'{"prompt": "a", "answer": "<answer>5</answer>"}', "'<answer>5</answer>' under "),
        (b'{"prompt": [{"role": "system", "content": "a"}], "answer": "1"}', "user's message; add"),
        (b'{"prompt": [], "answer": "1"}', r"has \[\] under 'prompt'"),
        (b'{"prompt": [{"from": "human", "value": "a"}], "answer": "1"}', "a 'role' of .*'user'"),
        (b'{"prompt": [{"role": "human", "content": "a"}], "answer": "1"}', "a 'role' of .*'user'"),
    ],
)
def test_mistake_in_a_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n' + line + b"\n")
    with pytest.raises(InputError, match=message) as error:
        tasks.read_problems(path)
    assert str(error.value).startswith(f"{path} line 2") and len(str(error.value)) < 400


@pytest.mark.parametrize(
    "content, message",
    [(b"\x1f\x8b\x08\x00", "is no text in UTF-8 .*; unpack the file"), (b"\n \n", "has no lines")],
)
def test_file_of_another_form_is_named(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message):
        tasks.read_problems(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    "source, remedy",
    [
        ("countdwon", "did you mean 'countdown'?"),
        ("trian.jsonl", "did you mean 'train.jsonl'?"),
        (".", "use one of ['addition', 'countdown', 'countdown_small', 'train.jsonl']"),
    ],
)
def test_name_of_no_task_and_no_file_gets_the_nearest(source, remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(InputError) as error:
        tasks.read_problems(source)
    assert f"{source!r} is no task" in str(error.value) and remedy in str(error.value)


def test_file_alone_names_the_line_that_is_wrong(tmp_path):
    for line in ("{", "3", '{"prompt": "a"}'):
        (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "1"}\n' + line)
        with pytest.raises(InputError, match="line 2 is no JSON object with 'prompt' and 'answer'"):
            starter.read_problems(tmp_path / "a.jsonl")


ROWS = [{"question": f"{i} + 1?", "answer": f"so\n#### {i + 1}"} for i in range(40)]


def put_datasets(monkeypatch, **splits):
    """Stands for the library datasets, as far as it is called. Returns the calls."""
    asked = []
    library = SimpleNamespace(load_dataset=lambda *name: asked.append(name) or splits)
    monkeypatch.setitem(sys.modules, "datasets", library)
    return asked


def test_dataset_gives_its_train_split_and_another_that_is_named(monkeypatch, capsys):
    asked = put_datasets(monkeypatch, train=ROWS[:30], test=ROWS[30:])
    edits.replace(read_problems=tasks.read_problems)
    cfg = SimpleNamespace(task="openai/gsm8k:main", eval_file="openai/gsm8k:main:test")
    train, held_out = starter.problems_of_files(cfg)
    assert asked == [("openai/gsm8k", "main")] * 2 and len(train) == 30
    assert [problem["answer"] for problem in train + held_out] == [str(i) for i in range(1, 41)]
    assert "for eval_file there are also ['openai/gsm8k:main:test']" in capsys.readouterr().out
    tasks.read_problems("a/b")
    assert asked[-1] == ("a/b", None)


def test_split_that_is_not_there_gets_the_nearest(monkeypatch):
    put_datasets(monkeypatch, train=ROWS, test=ROWS)
    with pytest.raises(InputError, match="split of 'a/b' = 'tets' is not known; did you mean 'tes"):
        tasks.read_problems("a/b::tets")


def test_dataset_without_a_network_or_the_library_costs_one_sentence(monkeypatch):
    def load_dataset(*name):
        raise ConnectionError("Couldn't reach\nthe hub" + "!" * 1000)

    offline = SimpleNamespace(load_dataset=load_dataset)
    failure = r"cannot be loaded \(ConnectionError: Couldn't reach the hub.*the network"
    for library, text in ((offline, failure), (None, "needs the package datasets; ")):
        monkeypatch.setitem(sys.modules, "datasets", library)
        with pytest.raises(InputError, match=f"data set 'a/b' {text}") as error:
            tasks.read_problems("a/b:main")
        assert len(str(error.value)) < 500


def test_dataset_is_read_by_the_real_library(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    (tmp_path / "me" / "sums").mkdir(parents=True)
    write_jsonl(tmp_path / "me" / "sums" / "train.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    problems = tasks.read_problems("me/sums")
    assert [problem["answer"] for problem in problems] == [str(i) for i in range(1, 41)]


# From files to a step's prompts


def test_files_hold_out_a_quarter_or_take_an_eval_file(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": str(i), "answer": i} for i in range(1000)])
    cfg = SimpleNamespace(task=str(path), eval_file=None, n_eval_problems=7, model_id="none")
    train, held_out = starter.problems_of_files(cfg)
    assert len(train) + len(held_out) == 1000 and 200 < len(held_out) < 300
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in held_out}
    assert starter.load_problems(cfg) == starter.Problems(train, held_out[:7])
    cfg.eval_file = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x", "answer": 1}])
    train, held_out = starter.load_problems(cfg)
    assert len(train) == 1000 and held_out == [{"prompt": "x", "answer": "1"}]


def test_load_problems_takes_a_function():
    sides = [{"prompt": "a"}], [{"prompt": "b", "anything": 1}]
    cfg = SimpleNamespace(task=lambda cfg: sides, n_eval_problems=5)
    assert starter.load_problems(cfg) == sides


def test_chats_go_through_the_template_and_prompts_that_are_too_long_are_left_out(capsys):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':' + m.content + '.' }}{% endfor %}"
        "{{ 'think' if enable_thinking else 'answer' }}"
    )
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2"}]
    problems = [{"prompt": chat}, {"prompt": "2+2"}, {"prompt": "2" * 50}]
    text = SimpleNamespace(max_position_embeddings=44)
    policy = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    cfg = SimpleNamespace(max_new_tokens=14, enable_thinking=True)

    def fitting(problems):
        found = starter.with_prompt_ids(problems, policy, tokenizer, cfg)
        return [tokenizer.decode(problem["prompt_ids"]) for problem in found]

    # The first fits exactly.
    assert fitting(problems) == ["system:be brief.user:2+2.think", "user:2+2.think"]
    assert "1 of 3 prompts are left out: with max_new_tokens = 14" in capsys.readouterr().out
    text.max_position_embeddings = tokenizer.chat_template = None
    assert fitting(problems[1:]) == ["2+2", "2" * 50]


def test_problems_of_steps_go_through_a_new_shuffle_in_each_epoch():
    problems = list(range(10))
    steps = [starter.problems_of_step(problems, step, 4, seed=1) for step in range(5)]
    assert starter.problems_of_step(problems, 3, 4, seed=1) == steps[3]
    assert starter.problems_of_step(problems, 3, 4, seed=2) != steps[3]
    in_order = sum(steps, [])
    assert sorted(in_order[:10]) == sorted(in_order[10:]) == problems != in_order[:10]
    assert in_order[:10] != in_order[10:]
    chosen = starter.problems_of_step(["a", "b", "c"], 0, 8, seed=0)
    assert sorted(map(chosen.count, "abc")) == [2, 3, 3]
