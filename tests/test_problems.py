"""Problems: Countdown, JSONL files, datasets, skills, prompts, and which problems a step gets."""
import ast
import importlib.util
import json
import sys
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import pytest
from reference.inputs import make_tokenizer

import starter
from starter import InputError


def key_of(problem):
    return tuple(sorted(problem["numbers"])), problem["target"]


# --------------------------------------------------------------------------------------------------
# Countdown

@pytest.mark.parametrize("task", ["countdown", "countdown_small"])
def test_countdown_problems_have_solutions_and_held_out_ones_are_not_trained_on(
        task, monkeypatch):
    monkeypatch.setattr(starter, "N_TRAIN_PROBLEMS", 1000)
    cfg = SimpleNamespace(seed=0, n_eval_problems=500)
    train, held_out = starter.TASKS[task](cfg)
    assert (len(train), len(held_out)) == (1000, 500)
    for problem in train + held_out:
        text = f"<answer>{problem['solution']}</answer>"
        assert starter.reward_fn(text, problem) == 1.0, problem
        assert 1 <= problem["target"] <= starter.MAX_TARGET
    assert not set(map(key_of, train)) & set(map(key_of, held_out))
    assert len(set(map(key_of, held_out))) == 500


def test_intermediate_results_of_solutions_are_whole_and_not_negative():
    def values_of(node):
        """The values of a solution's operations, the last operation first."""
        if isinstance(node, ast.Constant):
            return [Fraction(node.value)]
        left, right = values_of(node.left), values_of(node.right)
        return [starter.OPERATIONS[type(node.op)](left[0], right[0]), *left, *right]

    operations = set()
    for problem in starter.make_countdown(1000, False, 0):
        values = values_of(ast.parse(problem["solution"], mode="eval").body)
        assert all(value >= 0 and value.denominator == 1 for value in values), problem
        operations |= set(problem["solution"]) & set("+-*/")
    assert operations == set("+-*/")


def test_countdown_problems_held_out_under_one_seed_are_trained_on_under_none():
    held_out = starter.make_countdown(200, True, 2)
    train = starter.make_countdown(1000, False, 1)
    assert train != starter.make_countdown(1000, False, 2)
    assert not set(map(key_of, train)) & set(map(key_of, held_out))


def test_countdown_depends_on_its_seed_only():
    first = starter.make_countdown(50, True, 3, (2, 3), 20)
    assert first == starter.make_countdown(50, True, 3, (2, 3), 20)
    assert first != starter.make_countdown(50, True, 4, (2, 3), 20)


def test_countdown_prompt_shows_numbers_and_target():
    problems = starter.make_countdown(200, False, 0, **starter.SMALL_COUNTDOWN)
    for problem in problems:
        target, numbers = problem["prompt"].removeprefix("make ").split(": ")
        assert (int(target), list(map(int, numbers.split()))) == (problem["target"],
                                                                  problem["numbers"])
        assert len(problem["numbers"]) == 2 and max(problem["numbers"]) <= 50
    for problem in starter.make_countdown(200, False, 0):
        assert problem["prompt"].startswith("Using the numbers " + " ".join(
            map(str, problem["numbers"])) + ", ") and f"equals {problem['target']}." in (
                problem["prompt"])
        assert len(problem["numbers"]) in (3, 4)


def test_countdown_refuses_more_held_out_problems_than_there_are():
    with pytest.raises(InputError, match="n_eval_problems = 40: only .* were found; use") as error:
        starter.make_countdown(40, True, 0, n_numbers=(2,), max_number=2)
    n = int(str(error.value).split("= ")[-1].split()[0])
    assert len(starter.make_countdown(n, True, 0, n_numbers=(2,), max_number=2)) == n


# --------------------------------------------------------------------------------------------------
# JSONL files

def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings_of_files(task, eval_file=None, n_eval_problems=500, dataset=None):
    return SimpleNamespace(task=task, eval_file=eval_file, n_eval_problems=n_eval_problems,
                           dataset=dataset)


GSM8K_ANSWERS = [  # the file's answer, texts that are right, texts that are wrong
    ("2+2 = <<2+2=4>>4\n#### 1,234",
     ("1234", "1,234", "$1,234.00", "1234 clips", "= 1,234"), ("234", "1,23", "1234.5", "-1234")),
    ("#### -12", ("-12", "\u221212", "-12.0 degrees", "-12 C"), ("12", "+12", "5-12")),
    ("#### 0.50", (".5", "$0.50", "0.5"), ("50", "5", "0.05")),
]


def test_gsm8k_answers_are_read_as_they_are_written(tmp_path):
    rows = [{"question": "How many?", "answer": answer} for answer, _, _ in GSM8K_ANSWERS]
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    problems, _ = starter.problems_of_files(settings_of_files(path, path))
    for problem, (_, right, wrong) in zip(problems, GSM8K_ANSWERS):
        for text in right:
            assert starter.reward_fn(f"<answer>{text}</answer>", problem) == 1.0, (problem, text)
        for text in wrong:
            assert starter.reward_fn(f"<answer>{text}</answer>", problem) == 0.1, (problem, text)


def test_gsm8k_prompt_holds_the_question(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "Why {x}?", "answer": "#### 1"}])
    problems, _ = starter.problems_of_files(settings_of_files(path, path))
    assert problems[0]["prompt"].startswith("Why {x}?\n")


def test_gsm8k_without_an_eval_file_holds_out_a_quarter(tmp_path):
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(1000)]
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    train, held_out = starter.problems_of_files(settings_of_files(path))
    assert len(train) + len(held_out) == 1000 and 200 < len(held_out) < 300
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in held_out}
    few = starter.problems_of_files(settings_of_files(path, n_eval_problems=7))
    assert few == (train, held_out[:7])


def test_gsm8k_with_an_eval_file_trains_on_all_of_the_train_file(tmp_path):
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(20)]
    train_file = write_jsonl(tmp_path / "train.jsonl", rows[:12])
    eval_file = write_jsonl(tmp_path / "test.jsonl", rows[12:])
    train, held_out = starter.problems_of_files(settings_of_files(train_file, eval_file, 5))
    assert [p["answer"] for p in train] == [str(i + 1) for i in range(12)]
    assert [p["answer"] for p in held_out] == [str(i + 1) for i in range(12, 17)]


def test_prompts_are_texts_or_chat_messages(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    path = write_jsonl(tmp_path / "a.jsonl", [
        {"prompt": "What is 1 + 1?", "answer": 2, "level": "easy"},
        {"prompt": chat, "answer": " 4 "}])
    assert starter.read_jsonl(path) == [
        {"prompt": "What is 1 + 1?", "answer": "2", "level": "easy"},
        {"prompt": chat, "answer": "4"}]


def test_jsonl_reads_what_editors_and_windows_write(tmp_path):
    """A byte order mark, carriage returns, empty lines, numbers as answers, a last line without
    an end."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": 12}\r\n\r\n'
                     b'  \n{"prompt": "\xc3\xa9\\ud83d\\ude00", "answer": 0.5, "more": null}')
    assert starter.read_jsonl(path) == [
        {"prompt": "a", "answer": "12"},
        {"prompt": "\u00e9\U0001f600", "answer": "0.5", "more": None}]


NEEDS = ("must have a text or a list of chat messages under 'prompt', and a text or a number under "
         "'answer'; mend or delete it")


@pytest.mark.parametrize("line, message", [
    (b"{", "line 2 is not JSON .*; mend or delete that line"),
    (b"[" * 100_000, "line 2 is not JSON"),
    (b'{"question": "a \xff", "answer": "1"}', "line 2 is not JSON"),
    (b'{"question": "half of one: \\ud83d", "answer": "1"}', "line 2 is not JSON"),
    (b'{"prompt": "a"}', "line 2 " + NEEDS),
    (b'{"question": "a", "answer": null}', "line 2 " + NEEDS),
    (b'{"prompt": "a", "answer": true}', "line 2 " + NEEDS),
    (b'{"prompt": " ", "answer": "1"}', "line 2 " + NEEDS),
    (b'{"prompt": ["a"], "answer": "1"}', "line 2 " + NEEDS),
    (b'{"prompt": [], "answer": "1"}', "line 2 " + NEEDS),
    (b'{"prompt": [{"role": "user"}], "answer": "1"}', "line 2 " + NEEDS),
    (b'{"question": ["a"], "answer": "1"}', "line 2 " + NEEDS),
    (b'["prompt", "answer"]', "line 2 " + NEEDS),
    (b"3", "line 2 " + NEEDS),
])
def test_jsonl_names_the_line_that_is_wrong(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"question": "a", "answer": "1"}\n' + line + b"\n")
    with pytest.raises(InputError, match=message):
        starter.read_jsonl(path)


def test_jsonl_without_lines_or_without_a_file_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n \n")
    with pytest.raises(InputError, match="has no lines; each must be a JSON object"):
        starter.read_jsonl(path)
    with pytest.raises(InputError, match="is not a file; give the path of a JSONL file"):
        starter.read_jsonl(tmp_path)


class Datasets:
    """The library datasets, as far as it is called."""

    def __init__(self, **splits):
        self.splits = splits
        self.asked = []

    def load_dataset(self, *name):
        self.asked.append(name)
        return self.splits


def test_dataset_gives_its_train_and_test_rows(monkeypatch, tmp_path):
    rows = [{"question": f"{i} + 1?", "answer": f"so\n#### {i + 1}"} for i in range(40)]
    library = Datasets(train=rows[:30], test=rows[30:])
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    cfg = settings_of_files("countdown", n_eval_problems=5, dataset="openai/gsm8k:main")
    train, held_out = starter.problems_of_files(cfg)
    assert library.asked == [("openai/gsm8k", "main")]
    assert [p["answer"] for p in train] == [str(i + 1) for i in range(30)]
    assert [p["answer"] for p in held_out] == [str(i + 1) for i in range(30, 35)]
    library.splits = {"train": rows}
    train, held_out = starter.problems_of_files(cfg)
    assert len(held_out) == 5 and len(train) < 40
    cfg.eval_file = write_jsonl(tmp_path / "own.jsonl", [{"prompt": "1 + 1?", "answer": 2}])
    train, held_out = starter.problems_of_files(cfg)
    assert len(train) == 40 and [p["prompt"] for p in held_out] == ["1 + 1?"]
    library.splits = {"train": [{"text": "a"}]}
    with pytest.raises(InputError, match="openai/gsm8k, train row 0, must have a text or a list"):
        starter.problems_of_files(cfg)


def test_dataset_takes_the_place_of_the_task(monkeypatch, tmp_path):
    rows = [{"prompt": f"{i} + 1?", "answer": i + 1} for i in range(40)]
    monkeypatch.setitem(sys.modules, "datasets", Datasets(train=rows[:30], test=rows[30:]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    found = starter.load_problems(settings_of_files("countdown", dataset="a/b"), tmp_path)
    assert [problem["prompt"] for problem in found.train] == [row["prompt"] for row in rows[:30]]


def test_prompt_of_a_row_stays_beside_a_question(tmp_path):
    row = {"prompt": "say it", "question": "2 + 2?", "answer": 4}
    assert starter.read_jsonl(write_jsonl(tmp_path / "a.jsonl", [row]))[0]["prompt"] == "say it"


def test_dataset_is_read_by_the_real_library(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    rows = [{"prompt": f"{i} + 1?", "answer": i + 1} for i in range(40)]
    (tmp_path / "me" / "sums").mkdir(parents=True)
    write_jsonl(tmp_path / "me" / "sums" / "train.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    train, held_out = starter.problems_of_files(settings_of_files("x", dataset="me/sums"))
    assert sorted(int(p["answer"]) for p in train + held_out) == list(range(1, 41))


def test_dataset_without_the_library_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="dataset = 'a/b' needs the library datasets, which is "
                                         "not installed here; install it, or give the path"):
        starter.problems_of_files(settings_of_files("countdown", dataset="a/b"))


# --------------------------------------------------------------------------------------------------
# Prompts and the model's context

def fitted(lengths_of_train, lengths_of_held_out, context=20, max_new_tokens=8):
    """fit_to_context with prompts of these many tokens: their problems and lines."""
    problems = starter.Problems(
        *([{"prompt": "a" * n, "answer": ""} for n in lengths]
          for lengths in (lengths_of_train, lengths_of_held_out)), [])
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(
        max_position_embeddings=context))
    tokenizer = mock.Mock(chat_template=None, side_effect=lambda text: {
        "input_ids": [1] * len(text)})
    cfg = SimpleNamespace(max_new_tokens=max_new_tokens, enable_thinking=False)
    return starter.fit_to_context(problems, SimpleNamespace(config=config), tokenizer, cfg)


def test_prompts_too_long_for_the_model_are_counted_and_left_out():
    problems, lines = fitted([5, 12, 13, 3], [12, 12])
    for kind, lengths in zip(problems, ([5, 12, 3], [12, 12], [])):
        assert [len(problem["prompt"]) for problem in kind] == lengths
        assert [problem["prompt_ids"] for problem in kind] == [[1] * n for n in lengths]
    assert lines == ["1 of 4 training prompts do not fit, with max_new_tokens = 8, into the 20 "
                     "tokens that the model reads; they are left out"]
    assert fitted([12], [12])[1] == [] and fitted([99], [99], context=None)[1] == []


def test_run_is_refused_where_more_than_half_of_the_prompts_are_too_long():
    assert len(fitted([5, 13], [5])[0].train) == 1
    with pytest.raises(InputError, match="2 of 3 training prompts do not fit, .*; use 6 or fewer"):
        fitted([5, 14, 15], [5])
    with pytest.raises(InputError, match="1 of 1 held-out prompts .*; shorten the prompts"):
        fitted([5], [20])


@pytest.mark.parametrize("thinking", [True, False])
def test_chat_messages_go_through_the_chat_template_as_they_are(thinking):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':' + m.content + '.' }}{% endfor %}"
        "{{ 'think' if enable_thinking else 'answer' }}")
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2"}]
    ids = starter.prompt_ids_of([{"prompt": chat}, {"prompt": "2+2"}], tokenizer, thinking)
    ending = "think" if thinking else "answer"
    assert [tokenizer.decode(prompt) for prompt in ids] == [
        f"system:be brief.user:2+2.{ending}", f"user:2+2.{ending}"]


def test_chat_messages_without_a_chat_template_are_refused():
    tokenizer = SimpleNamespace(chat_template=None)
    with pytest.raises(InputError, match="is a list of chat messages, and the tokenizer has no"):
        starter.prompt_ids_of([{"prompt": [{"role": "user", "content": "a"}]}], tokenizer)


# --------------------------------------------------------------------------------------------------
# load_problems

def problems_of(train, held_out):
    return SimpleNamespace(task=lambda cfg: (train, held_out), dataset=None)


ONE = [{"prompt": "a"}]


def test_load_problems_takes_a_function_and_the_skills_of_the_model(tmp_path):
    other = [{"prompt": "b", "anything": 1}]
    found = starter.load_problems(problems_of(ONE, other), tmp_path)
    assert found == starter.Problems(ONE, other, [])
    skills = [{"skill": "sort", "prompt": "sort 21", "answer": "12"}]
    write_jsonl(tmp_path / "retention.jsonl", skills)
    assert starter.load_problems(problems_of(ONE, other), tmp_path).skills == skills


@pytest.mark.parametrize("found, message", [
    (None, "returned NoneType; it must return two lists of problems, for training and held out"),
    ([ONE], "returned list; it must return two lists"),
])
def test_load_problems_refuses_what_is_not_two_lists(tmp_path, found, message):
    def my_task(cfg):
        return found

    with pytest.raises(InputError, match=f"task = 'my_task' {message}"):
        starter.load_problems(SimpleNamespace(task=my_task, dataset=None), tmp_path)


@pytest.mark.parametrize("found, message", [
    (([], ONE), "gave no training problems; give more different prompts, or an eval_file"),
    ((ONE, []), "gave no held-out problems"),
    ((ONE, [{"question": "a"}]), "gave a held-out problem without a 'prompt'"),
    ((["a"], ONE), "gave a training problem without a 'prompt'"),
    (([{"prompt": ""}], ONE), "gave a training problem without a 'prompt'"),
])
def test_guarded_run_says_what_a_task_returned_wrongly(tmp_path, found, message):
    runs = pytest.importorskip("support.runs")

    def my_task(cfg):
        return found

    with pytest.raises(InputError, match=f"task = 'my_task' {message}"):
        runs.GuardedRun.load_problems(SimpleNamespace(task=my_task, dataset=None), tmp_path)


# --------------------------------------------------------------------------------------------------
# problems_of_step

def test_problems_of_a_step_depend_on_step_and_seed_only():
    problems = list(range(10))
    steps = [starter.problems_of_step(problems, step, 4, seed=1) for step in range(5)]
    assert starter.problems_of_step(problems, 3, 4, seed=1) == steps[3]
    assert starter.problems_of_step(problems, 3, 4, seed=2) != steps[3]


def test_problems_of_steps_go_through_a_new_shuffle_in_each_epoch():
    problems = list(range(10))
    steps = [starter.problems_of_step(problems, step, 4, seed=1) for step in range(5)]
    in_order = sum(steps, [])
    assert sorted(in_order[:10]) == sorted(in_order[10:]) == problems
    assert in_order[:10] != in_order[10:] and in_order[:10] != problems


def test_problems_of_a_step_repeat_where_there_are_fewer_than_it_needs():
    chosen = starter.problems_of_step(["a", "b", "c"], 0, 8, seed=0)
    assert sorted(Counter(chosen).values()) == [2, 3, 3]


# --------------------------------------------------------------------------------------------------
# Addition

def pair_of(problem):
    a, b = problem["prompt"].removeprefix("What is ").removesuffix("?").split(" + ")
    return int(a), int(b)


def test_addition_holds_out_problems_that_are_not_trained_in_either_order():
    train, held_out = starter.TASKS["addition"](SimpleNamespace(seed=0, n_eval_problems=500))
    trained = {tuple(sorted(pair_of(problem))) for problem in train}
    asked = {pair_of(problem) for problem in held_out}
    assert len(asked) == 500 and not trained & {tuple(sorted(pair)) for pair in asked}
    assert len(train) > 5000
    for problem in train + held_out:
        a, b = pair_of(problem)
        assert 10 <= min(a, b) and max(a, b) <= 99 and problem["answer"] == str(a + b)


def test_held_out_additions_do_not_depend_on_the_seed():
    held_out = [starter.TASKS["addition"](SimpleNamespace(seed=seed, n_eval_problems=50))[1]
                for seed in (0, 1)]
    assert held_out[0] == held_out[1]
