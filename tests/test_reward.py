"""The reward: right answers solve, wrong ones do not, and no text does any harm."""
import functools
import itertools
import math

import pytest

import starter
from starter import Response

import torch
from conftest import make_tokenizer

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies

COUNTDOWN = {"numbers": [3, 5, 7], "target": 22}
NUMBER = {"answer": "1,234.5"}
TEXT = {"answer": "a b"}
LAST_NUMBER = {"answer": "68", "last_number": True}


def reward_of(answer, problem):
    problem = problem if isinstance(problem, dict) else {"answer": problem}
    return starter.reward_fn(f"<answer>{answer}</answer>", problem)


def test_tasks_of_support_go_through_reward_fn_where_an_edit_acts_on_them(monkeypatch):
    monkeypatch.setitem(starter.SCORERS, "numbers", lambda text, problem: 0.25)
    assert starter.reward_fn("any", COUNTDOWN) == 0.25
    assert starter.cfg_with().reward is starter.reward_fn
    assert starter.reward_fn.__code__.co_filename == starter.__file__


# Countdown: arithmetic

def test_arithmetic_is_exact_where_floats_are_not():
    """1/3 + 1/3 + 1/3 is 1, and 10**16 + 1 is not 10**16."""
    assert reward_of("1/3+1/3+1/3", {"numbers": [1, 3, 1, 3, 1, 3], "target": 1}) == 1.0
    assert reward_of(f"{10**16}+1", {"numbers": [10**16, 1], "target": 10**16}) == 0.1
    assert reward_of("7/(5-5)", {"numbers": [5, 5, 7], "target": 0}) == 0.1
    assert reward_of("7*(5-5)", {"numbers": [5, 5, 7], "target": 0}) == 1.0


def test_each_number_must_be_used_exactly_once():
    for text, reward in (("3*5+7", 1.0), ("7 + (5 * 3)", 1.0), ("22", 0.1), ("3*5+7+3-3", 0.1),
                         ("5+5+5+7", 0.1), ("3*(5+7)", 0.1), ("3*5+7=22", 0.1), ("35-7-3-3", 0.1)):
        assert reward_of(text, COUNTDOWN) == reward, text


# Other answers: numbers, words; and any text

@pytest.mark.parametrize("answer, gold", [
    # the same number
    ("5.", "5"), ("1,234.50", "$1,234.5"), (".5", "0.50"), ("-0", "0"), ("-12", "\u221212"),
    ("$5", "5"), ("\u20ac5.00", "5"), ("18%", "18"), ("18 %", "18.0%"), ("-$5", "-5"),
    ("-1,234,567.89", "\u22121,234,567.890"), ("1234567", "1,234,567"),
    # texts
    ("Paris.", "paris"), ("new  york", "New York"), ("x = 5", "X = 5"), ("5 km/h", "5 km/h"),
    ("1/2", "1/2"), ("(3, 4)", "(3, 4)"),
    ("2024-01-05", "2024-01-05"), ("0012", "0012"), ("a " * 50_000, "a " * 50_000),
])
def test_equal_answers_solve(answer, gold):
    assert reward_of(answer, gold) == reward_of(gold, answer) == 1.0


@pytest.mark.parametrize("answer, gold", [
    # another number
    ("56", "5"), ("-5", "5"), ("12", "0012"), ("1/5", "5"), ("12,34", "1234"), ("3,4", "34"),
    ("1.234,5", "1234.5"), ("50%", "0.5"), ("5 million", "5"), ("5k", "5"), ("5 squared", "5"),
    ("5 dozen", "5"), ("5!", "5"), ("sqrt 5", "5"), ("--5", "5"), ("-$-5", "-5"), ("3.1.4", "3.1"),
    ("5 and a half", "5"), ("1e3", "1000"), ("five", "5"), ("nan", "5"), ("$", "5"), (".", "5"),
    # several, or a calculation
    ("5 or 6", "5"), ("5 (or 6)", "5"), ("5+0", "5"), ("5 x 2", "5"), ("5=5", "5"),
    # a name or a unit, another text
    ("y = 4", "x = 4"), ("x = 4", "4"), ("5 km", "5 m"), ("5 cents", "5"),
    ("3/2", "1/2"), ("7:30", "6:30"), ("2^10", "3^10"), ("x=5,y=4", "x=3,y=4"), ("a b c", "a b"),
    # long texts that begin with the answer
    ("5" + " " * 2000 + "or 6", "5"), ("1" * 100_000, "5"), ("a " * 50_000, "a"),
])
def test_different_answers_do_not_solve(answer, gold):
    assert reward_of(answer, gold) == 0.1 and not starter.same_answer(gold, answer)


@pytest.mark.parametrize("text, reward", [
    ("68", 1), ("The sum of 23 and 45 is 68.", 1), ("68.0", 1), ("**68**\n", 1), ("23+45=68", 1),
    ("first 67, no: 68!", 1), ("x" * 500 + " 68", 1), ("1 " * 500 + "68", 1), ("It is $68,", 1),
    ("", 0), ("67", 0), ("-68", 0), ("68 is 23 + 45", 0), ("168", 0), ("6 8", 0), ("68.5", 0),
    ("6" * 500 + "68", 0), ("168 " + "x" * 197, 0), ("1,068", 0), ("<answer>68</answer> 1", 0),
])
def test_last_number_is_the_answer_where_the_problem_says_so(text, reward):
    assert starter.reward_fn(text, LAST_NUMBER) == reward


def test_tags_must_be_there_and_the_last_ones_count():
    for text, reward in (("<answer>1</answer><answer>a b</answer> c", 1.0), ("a b", 0.0),
                         ("<answer>a b", 0.0), ("a b</answer>", 0.0),
                         ("</answer><answer>a b", 0.0),
                         ("<answer> \n</answer>", 0.0), ("<answer>a b</answer" + ">" * 2, 1.0)):
        assert starter.reward_fn(text, TEXT) == reward, text
    answer = "<answer>a b</answer>"  # only the end of a long text is read
    assert starter.reward_fn(answer + "x" * 199_000, TEXT) == 1.0
    assert starter.reward_fn(answer + "x" * 200_000, TEXT) == 0.0


PIECES = strategies.text(max_size=9) | strategies.sampled_from([
    "<answer>", "</answer>", *"3579012+-*/()[] \n.,$_\0", "**", "1,234.5", "a b", "e9", "9" * 9,
    "__import__('os').abort()", "22j", "x = ", "%",
    "\u0663", "\uff13", "\u00b2", "\u2212", "\u3000", "\ud800", "\U0001f600", "\U0001d7db"])
TIMES = strategies.sampled_from([1, 1, 1, 2, 60, 250, 10**4, 10**5])


@hypothesis.settings(deadline=None, derandomize=True, max_examples=150)
@hypothesis.given(strategies.lists(strategies.tuples(PIECES, TIMES), max_size=12))
@hypothesis.example([("(", 200)]).via("deep nesting")
@hypothesis.example([("9**", 66), ("9", 1)]).via("a huge power")
@hypothesis.example([("1", 10**6)]).via("a huge number")
def test_reward_of_any_text_is_a_number(pieces):
    text = "".join(piece * times for piece, times in pieces)
    for problem, text in itertools.product((COUNTDOWN, NUMBER, TEXT, LAST_NUMBER),
                                           (text, f"<answer>{text}</answer>")):
        assert starter.reward_fn(text, problem) in (0.0, 0.1, 1.0)


def score(texts, problems, reward):
    tokenizer = make_tokenizer()
    responses = [Response([0], tokenizer(text)["input_ids"], [], False) for text in texts]
    return starter.score(responses, problems, tokenizer, reward)


def test_score_takes_each_response_with_the_problem_of_its_group():
    def reward(text, problem):
        return problem["answer"] + (text == "v")

    def length(text, problem, response):  # asks for the Response as well
        return len(response.response_ids) + response.finished

    problems = [{"answer": 1}, {"answer": 0}]
    written = [*"xyzuv", "<|user|><answer>w</answer><|end|>"]
    texts, rewards, solved, means = score(written, problems, reward)
    assert texts == [*"xyzuv", "<answer>w</answer>"]  # without special tokens, with answer tags
    assert rewards.tolist() == solved.tolist() == [1, 1, 1, 0, 1, 0] and means == {}
    _, rewards, solved_again, means = score(  # a partial function has no name
        written, problems, [(reward, 0.5), (functools.partial(length), -2.0)])
    assert rewards.tolist() == [-1.5, -1.5, -1.5, -2, -1.5, -10]
    assert solved_again.equal(solved)  # the first reward alone says what is solved
    assert means == pytest.approx({"reward/reward": 4 / 6, "reward/unnamed": 10 / 6})


def test_problem_that_no_scorer_knows_is_one_sentence():
    with pytest.raises(starter.InputError, match="one of .'answer', .*; give another reward"):
        starter.reward_fn("<answer>4</answer>", {"prompt": "2 + 2", "gold": "4"})


@pytest.mark.parametrize("reward", [lambda text, problem: 1 / 0, lambda text, problem: "a",
                                    lambda text, problem: None])
def test_error_of_a_reward_shows_its_text_and_its_problem(reward):
    with pytest.raises((ArithmeticError, TypeError, ValueError)) as error:
        score("x", [{"answer": 1}], reward)
    assert error.value.__notes__ == [f"{reward} got 'x' and {{'answer': 1}}; return a number."]
    for value in (math.inf, True, torch.tensor(0.5).numpy()[()]):  # inf: a skipped step
        assert score("x", [{}], lambda text, problem: value)[1].item() == value
