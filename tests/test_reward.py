"""The reward: right answers solve, wrong ones do not, and no text does any harm.

lab/fuzz_reward.py has the second parser, `solves`, which shares no code with starter.py, and
`examine`, which measures time and memory. Here they meet texts written by hand, texts made by
hypothesis and lab/fuzz_corpus.jsonl, which fuzzing found.
"""
import itertools
import json
import math
import sys

import numpy
import pytest

import starter
from starter import InputError, Response

import torch
from conftest import make_tokenizer

hypothesis = pytest.importorskip("hypothesis")
fuzz_reward = pytest.importorskip("lab.fuzz_reward")
from hypothesis import strategies

COUNTDOWN, NUMBER, TEXT, LAST_NUMBER = fuzz_reward.PROBLEMS


def answer(text):
    return f"<answer>{text}</answer>"


# --------------------------------------------------------------------------------------------------
# Right and wrong answers

def test_division_by_zero_is_wrong_and_a_product_of_zero_may_be_right():
    problem = {"numbers": [5, 5, 7], "target": 0}
    assert starter.reward_fn(answer("7/(5-5)"), problem) == 0.1
    assert starter.reward_fn(answer("7*(5-5)"), problem) == 1.0


def test_countdown_is_exact_where_floats_are_not():
    """1/3 + 1/3 + 1/3 is 1, and 10**16 + 1 is not 10**16."""
    thirds = {"numbers": [1, 3, 1, 3, 1, 3], "target": 1}
    assert starter.reward_fn(answer("1/3+1/3+1/3"), thirds) == 1.0
    large = {"numbers": [10**16, 1], "target": 10**16}
    assert starter.reward_fn(answer(f"{10**16}+1"), large) == 0.1


def test_countdown_agrees_with_a_second_parser_on_all_short_expressions():
    shapes = ("{}{}{}{}{}", "({}{}{}){}{}", "{}{}({}{}{})", "-({}{}{}){}{}", "{}{}-{}{}{}")
    solved = 0
    for a, b, c in itertools.permutations("357"):
        for x, y in itertools.product("+-*/", repeat=2):
            for shape, target in itertools.product(shapes, (22, 1, -22, 26, 50)):
                text = answer(shape.format(a, x, b, y, c))
                problem = COUNTDOWN | {"target": target}
                expected = fuzz_reward.solves(text, problem)
                assert (starter.reward_fn(text, problem) == 1.0) == expected, text
                solved += expected
    assert solved > 40  # else both would agree on nothing


def expressions():
    """Arithmetic, most of it well-formed: numbers, signs, parentheses, spaces."""
    number = strategies.sampled_from(["3", "5", "7", "0", "22", "00", "07", "9" * 9, "1" * 12])
    operator = strategies.sampled_from([*"+-*/", " + ", " * ", "**", "//", " "])
    return strategies.recursive(
        number,
        lambda inner: (strategies.builds("({})".format, inner)
                       | strategies.builds("-{}".format, inner)
                       | strategies.builds("{}{}{}".format, inner, operator, inner)),
        max_leaves=30)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=500)
@hypothesis.given(expressions() | strategies.text("357()+-*/ ", max_size=12))
def test_value_and_numbers_agree_with_a_second_parser(text):
    parsed = starter.arithmetic(text)
    value, used = parsed or (22, [3, 5, 7])  # what is refused here must not solve there
    problem = {"numbers": used, "target": value}
    assert fuzz_reward.solves(answer(text), problem) == bool(parsed), (text, parsed)
    if parsed:
        assert starter.reward_fn(answer(text), problem) == 1.0, text
        assert starter.reward_fn(answer(text), problem | {"target": value + 1}) == 0.1, text


@hypothesis.settings(deadline=None, derandomize=True, max_examples=300)
@hypothesis.given(strategies.decimals(-10**9, 10**9, places=2), strategies.sampled_from(
    ["{:.2f}", "{:,.2f}", "x = {:,.2f}", "{:,.3f} dollars"]))
def test_number_is_read_as_it_is_written(number, style):
    problem = {"answer": f"{number:,.2f}"}
    text = f"<answer>9</answer><answer> {style.format(number)} </answer> 9"
    assert starter.reward_fn(text, problem) == 1.0
    assert starter.reward_fn(text.replace("-", "\u2212"), problem) == 1.0
    assert starter.reward_fn(text, {"answer": str(number + 1)}) == 0.1


def test_text_is_compared_without_blanks_and_case():
    for text, expected in (("a b", 1.0), (" a b\n", 1.0), ("a  b", 1.0), ("A b", 1.0),
                           ("ab", 0.1), ("a b c", 0.1), ("", 0.0)):
        assert starter.reward_fn(answer(text), TEXT) == expected, text


def test_only_the_end_of_a_long_text_is_read():
    ending = "\U0001f600"
    assert starter.reward_fn(answer("3*5+7") + 199_000 * ending, COUNTDOWN) == 1.0
    assert starter.reward_fn(answer("3*5+7") + 200_000 * ending, COUNTDOWN) == 0.0
    assert starter.reward_fn(answer("x" * 150_000), {"answer": "x" * 150_000}) == 1.0


@pytest.mark.parametrize("text, reward", [
    ("68", 1), ("23 + 45 = 68", 1), ("The sum of 23 and 45 is 68.", 1), ("68.0", 1),
    ("**68**\n", 1), ("first 67, no: 68!", 1), ("x" * 500 + " 68", 1), ("1 " * 500 + "68", 1),
    ("68,", 1), ("It is $68.", 1), ("23+45=68", 1),
    ("", 0), ("sixty-eight", 0), ("67", 0), ("-68", 0), ("68 is 23 + 45", 0), ("168", 0),
    ("6 8", 0), ("68.5", 0), ("6" * 500 + "68", 0), ("1" + "0" * 198 + "68", 0), ("68\n69", 0),
    ("168 " + "x" * 197, 0), ("6,8", 0), ("1,068", 0), ("<answer>68</answer> 1", 0),
])
def test_last_number_is_the_answer_where_the_problem_says_so(text, reward):
    assert starter.reward_fn(text, {"answer": "68", "last_number": True}) == reward


# --------------------------------------------------------------------------------------------------
# Hostile texts

# What stands between the tags, and how often. None is the answer to any of the three problems.
HOSTILE = [
    ("(", 10**6), ("-", 10**6), ("[", 10**6), ("3(", 10**6), ("(3", 60), ("3(((3(3(", 25),
    ("(3(***", 33), ("-(", 10**5), ("((5))", 20), ("-" * 150 + "3", 1), ("9**", 10**5),
    ("9**9**9", 1), ("3**22222222", 1), ("999999999*", 19), ("9" * 199, 1), ("1" * 4301, 1),
    ("1", 10**7), ("1/", 10**6), ("1e9", 10**5), ("+0", 10**5), ("3+", 10**5), ("()", 10**5),
    ("1/0", 1), ("0/0+", 40), ("3/(5-5)+7", 1), ("3//5", 1), ("03*5+7", 1), ("+3*5+7", 1),
    ("3*5+7+0", 1), ("3*5+7+3-3", 1), ("5+5+5+7", 1), ("3 *\n5+7", 1), ("3;5", 1), ("3*5+7#", 1),
    # digits, minus signs and spaces of other scripts
    ("\u0663*\u0665+\u0667", 1), ("\uff13*\uff15+\uff17", 1),
    ("\u0661,\u0662\u0663\u0664.\u0665", 1), ("\uff11\uff12\uff13\uff14.\uff15", 1),
    ("\u00b2", 100), ("\u2167", 100), ("\u2212", 10**6),
    ("\u200b", 10**6), ("\u3000", 10**6), ("\ufeff1", 3), ("\U0001d7db*\U0001d7dd", 1),
    ("\u202e7+5*3", 1),
    # half characters, null characters
    ("\0", 1), ("3*5+7\0", 1), ("\0", 10**6), ("\ud800", 1), ("3*5+7\udfff", 1), ("\udcff", 10**6),
    ("\ud83d\ude00", 10**5), ("a\u0301", 10**6),
    # tags
    ("<answer>", 10**5), ("</answer>", 10**5), ("<answer>3</answer>", 10**5),
    ("</answer><answer>", 10**5), ("<answer", 10**6), ("nswer>", 10**6),
    # numbers
    ("1,", 10**6), ("1,,", 60), (".", 10**6), ("1.", 60), ("-$", 10**6), ("$", 199), ("-.", 1),
    ("1.5.", 50), ("\n", 10**6), ("3 5 7 22", 10**5), ("nan", 1), ("inf", 1),
    # Python
    ("__import__('os').abort()", 1), ("[].__class__", 1), ("lambda:3", 1), ("{}.x", 1),
    ("'%s'%3", 1), ("1 if 3 else 5", 1), ("3and 22", 1), ("22j", 1), ("0x16", 1), ("2_2", 1),
    # texts that take four bytes for each character
    ("\U0001f600", 2_500_000), ("\U0001f600", 10**7), ("\U0001f600<answer>3", 10**6),
    ("\U0001d7db", 10**6), ("x" * 10**6 + "\U0001f600", 2),
]
RIGHT = (("3*5+7", COUNTDOWN), ("1234.5", NUMBER), ("a b", TEXT))


def harm(text):
    """What the reward of a text does wrong, by problem: it raises, returns another value than 0,
    0.1 and 1, takes more than 10 ms or more than 10 MB, or disagrees with the second parser."""
    examined = [(fuzz_reward.examine(text, problem)[0], problem)
                for problem in fuzz_reward.PROBLEMS]
    return [(wrong, problem) for wrong, problem in examined if wrong]


def test_reward_does_no_harm_on_hostile_texts():
    for piece, times in HOSTILE:
        shorter = min(times, 190_000 // len(piece))  # so that both tags are read
        for n in {times, shorter}:
            body = piece * n
            for text in (body, answer(body), answer("3*5+7") + " " + answer(body)):
                assert not harm(text), (harm(text), piece[:50], n)
                for problem in fuzz_reward.PROBLEMS:
                    assert starter.reward_fn(text, problem) < 1, (piece[:50], n)
            for right, problem in RIGHT:
                text = f"{body}<answer> {right}\n</answer>"
                assert starter.reward_fn(text, problem) == 1.0, (piece[:50], n)


CHARACTERS = (strategies.characters(exclude_categories=())
              | strategies.sampled_from([*"".join(fuzz_reward.PIECES)]))
PIECES = strategies.sampled_from(fuzz_reward.PIECES) | strategies.text(CHARACTERS, max_size=9)
TIMES = strategies.sampled_from([1, 1, 1, 2, 60, 250, 10**4, 3 * 10**5])


@hypothesis.settings(deadline=None, derandomize=True, max_examples=200)
@hypothesis.given(strategies.text(CHARACTERS, max_size=300), strategies.integers(0, 3))
def test_reward_does_no_harm_on_any_text(text, tags):
    text = "<answer>" * (tags & 1) + text + "</answer>" * (tags >> 1)
    assert not harm(text), text


@hypothesis.settings(deadline=None, derandomize=True, max_examples=200)
@hypothesis.given(strategies.lists(strategies.tuples(PIECES, TIMES), max_size=12))
def test_reward_does_no_harm_on_repeated_pieces(pieces):
    text = "".join(piece * times for piece, times in pieces)
    assert not harm(answer(text)) + harm(text), pieces


def test_reward_does_no_harm_on_texts_that_fuzzing_found():
    texts = [json.loads(line) for line in fuzz_reward.CORPUS.read_text().splitlines()]
    assert 50 < len(texts) <= 300
    assert not [(text, harm(text)) for text in texts if harm(text)]
    assert {starter.reward_fn(text, COUNTDOWN) for text in texts} == {0.0, 0.1, 1.0}


def test_reward_returns_where_the_stack_is_nearly_full():
    def deeper(n):
        if n:
            return deeper(n - 1)
        return starter.reward_fn(answer("-" * 190 + "3"), COUNTDOWN)

    depth = next(n for n in itertools.count(1) if not sys._getframe(n).f_back)
    for left in (400, 150, 120, 100):
        assert deeper(sys.getrecursionlimit() - depth - left) == 0.1, left


@pytest.mark.parametrize("reward, what", [
    (lambda text, problem: 1 / 0, "raised"),
    (lambda text, problem: 0.5, "returned"),
    (lambda text, problem: 0.0 * len(bytes(11 * 10**6)), "allocated"),
    (lambda text, problem: 0.0 * sum(range(10**6)), "took"),
    (lambda text, problem: 1.0, "unlike the checker"),
])
def test_harm_is_seen(reward, what, monkeypatch):
    """The negative control of the tests above."""
    monkeypatch.setattr(starter, "reward_fn", reward)
    assert what in fuzz_reward.examine(answer("3*5"), COUNTDOWN)[0]


# --------------------------------------------------------------------------------------------------
# Calling a reward

@pytest.mark.parametrize("value", [1, 0.5, True, numpy.float32(0.25), math.inf, math.nan])
def test_reward_of_returns_any_number_as_a_float(value):
    found = starter.reward_of(lambda text, problem: value, "a", {})
    assert type(found) is float
    assert found == value or math.isnan(value) and math.isnan(found)


@pytest.mark.parametrize("reward, message", [
    (lambda text, problem: 1 / 0, "reward raised ZeroDivisionError: division by zero on the text "
                                  "'a' of a problem with .*; it must return one "
                                  "number for every text"),
    (lambda text, problem: [1.0, 2.0], r"reward returned \[1.0, 2.0\] on the text 'a'"),
    (lambda text, problem: None, "reward returned None on the text 'a'"),
    (lambda text, problem: "1.0", "reward returned '1.0' on the text 'a'"),
    (lambda text, problem: 1j, "reward returned 1j on the text 'a'"),
    (lambda text: 1.0, "reward raised TypeError"),
])
def test_reward_of_refuses_what_is_no_number(reward, message):
    with pytest.raises(InputError, match=message):
        starter.reward_of(reward, "a", {})


def test_score_takes_each_response_with_the_problem_of_its_group():
    tokenizer = make_tokenizer()
    problems = [{"answer": 1}, {"answer": 2}]
    responses = [Response([0], tokenizer(text)["input_ids"], [], True) for text in "xyzuvw"]

    def reward(text, problem):
        return problem["answer"] + (text == "v")

    run = type("RunWithoutGuards", (), {"reward_of": staticmethod(starter.reward_of)})
    parts = starter.Parts(starter.PLAIN, starter.OneProcess(), run)
    texts, rewards, solved, _ = starter.score(responses, problems, tokenizer, reward, parts)
    assert texts == list("xyzuvw")
    assert rewards.tolist() == [1, 1, 1, 2, 3, 2] and rewards.dtype == torch.float32
    assert solved.all()
    weighted = [(reward, 0.5), (lambda text, problem: ord(text) - ord("u"), 2.0)]
    _, rewards, _, means = starter.score(responses, problems, tokenizer, weighted, parts)
    assert rewards.tolist() == [0.5 + 6, 0.5 + 8, 0.5 + 10, 1.0, 1.5 + 2, 1.0 + 4]
    assert means == pytest.approx({"reward/reward": 10 / 6, "reward/<lambda>": 15 / 6})


def test_first_of_several_rewards_says_what_is_solved():
    """A penalty for length does not turn a right response into one that is not solved."""
    tokenizer = make_tokenizer()
    responses = [Response([0], tokenizer(text)["input_ids"], [], True) for text in ("x", "y")]
    run = type("RunWithoutGuards", (), {"reward_of": staticmethod(starter.reward_of)})
    rewards = [(lambda text, problem: text == "x", 1.0), (lambda text, problem: -3, 0.5)]
    _, total, solved, _ = starter.score(responses, [{}], tokenizer, rewards, starter.Parts(
        starter.PLAIN, starter.OneProcess(), run))
    assert total.tolist() == [-0.5, -1.5] and solved.tolist() == [True, False]


def test_score_leaves_out_special_tokens_and_keeps_answer_tags():
    tokenizer = make_tokenizer()
    ids = tokenizer("<|user|><answer>1</answer><|end|><|pad|>")["input_ids"]
    seen = []

    def reward(text, problem):
        seen.append(text)
        return 0

    run = type("RunWithoutGuards", (), {"reward_of": staticmethod(starter.reward_of)})
    parts = starter.Parts(starter.PLAIN, starter.OneProcess(), run)
    starter.score([Response([0], ids, [], True)], [{}], tokenizer, reward, parts)
    assert seen == ["<answer>1</answer>"]
