"""The reward: right answers solve, wrong ones do not, and no text does any harm."""

import asyncio
import itertools
import math
import sys
import threading

import pytest

import starter
from starter import Response
from support import rewards, tasks

import torch
from conftest import interrupt_twice, make_tokenizer, scalars, settings, variety

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies

COUNTDOWN = {"numbers": [3, 5, 7], "target": 22, "is_right": tasks.is_countdown_solution}
TEXT = {"answer": "a b"}
LAST_NUMBER = {"answer": "68", "last_number": True}


def reward_of(text, **problem):
    return starter.score_answer(f"<answer>{text}</answer>", problem)


def test_problem_may_judge_its_answer_by_itself():
    """The answer is that in the tags, or the last number of the text."""
    asked = []

    def is_right(answer, problem):
        asked.append((answer, problem["answer"]))
        return len(asked) % 2 == 1

    problem = {"answer": "7", "is_right": is_right}
    assert [reward_of(text, **problem) for text in (" 8 - 1 ", "7", "")] == [1.0, 0.1, 0.0]
    problem["last_number"] = True
    assert [starter.score_answer(text, problem) for text in ("12 or 9.", "no")] == [1.0, 0.0]
    assert asked == [("8 - 1", "7"), ("7", "7"), ("9", "7"), ("", "7")]
    assert reward_of("7", answer="7", numbers=[1, 2]) == 1.0  # keys alone make no Countdown


def rows_of(table):
    return [line.split(" | ") for line in table.strip().splitlines()]


# Countdown: arithmetic that is exact where floats are not, and uses each number exactly once.
# In each line: numbers, target, answer, reward.

SUMS = """
1 3 1 3 1 3 | 1 | 1/3+1/3+1/3 | 1.0
10000000000000000 1 | 10000000000000000 | 10000000000000000+1 | 0.1
5 5 7 | 0 | 7/(5-5) | 0.1
5 5 7 | 0 | 7*(5-5) | 1.0
3 5 7 | 22 | 3*5+7 | 1.0
3 5 7 | 22 | 7 + (5 * 3) | 1.0
3 5 7 | 22 | 22 | 0.1
3 5 7 | 22 | 3*5+7+3-3 | 0.1
3 5 7 | 22 | 5+5+5+7 | 0.1
3 5 7 | 36 | 3*(5+7) | 1.0
3 5 7 | 22 | 3*(5+7) | 0.1
3 5 7 | 22 | 3*5+7=22 | 0.1
3 5 7 | 22 | 35-7-3-3 | 0.1
"""


@pytest.mark.parametrize("numbers, target, answer, reward", rows_of(SUMS))
def test_countdown_is_solved_by_exact_arithmetic(numbers, target, answer, reward):
    numbers = [int(number) for number in numbers.split()]
    problem = COUNTDOWN | {"numbers": numbers, "target": int(target)}
    assert reward_of(answer, **problem) == float(reward)


# Other answers: numbers, words; and any text

EQUAL = """
5. | 5
1,234.50 | $1,234.5
.5 | 0.50
-0 | 0
-12 | \u221212
$5 | 5
\u20ac5.00 | 5
18% | 18
18 % | 18.0%
-$5 | -5
5\u20ac | 5
$5 | 5 %
+5 | 5
1e3 | 1000
1234567 | 1,234,567
-1,234,567.89 | \u22121,234,567.890
Paris. | paris
new  york | New York
x = 5 | X = 5
5 km/h | 5 km/h
1/2 | 1/2
(3, 4) | (3, 4)
2024-01-05 | 2024-01-05
0012 | 0012
"""
DIFFERENT = """
56 | 5
-5 | 5
12 | 0012
1/5 | 5
12,34 | 1234
3,4 | 34
1.234,5 | 1234.5
50% | 0.5
5 million | 5
5k | 5
5 squared | 5
5 dozen | 5
5! | 5
sqrt 5 | 5
--5 | 5
-$-5 | -5
3.1.4 | 3.1
5 and a half | 5
five | 5
nan | 5
$ | 5
. | 5
5 or 6 | 5
5 (or 6) | 5
5+0 | 5
5 x 2 | 5
5=5 | 5
y = 4 | x = 4
x = 4 | 4
5 km | 5 m
1$5 | 15
5\u20ac50 | 550
5 cents | 5
3/2 | 1/2
7:30 | 6:30
2^10 | 3^10
x=5,y=4 | x=3,y=4
a b c | a b
"""


CAFE = "caf\u00e9", "cafe\u0301"  # with the accent in the letter, and behind it


@pytest.mark.parametrize("answer, gold", [*rows_of(EQUAL), ("a " * 50_000, "a " * 50_000), CAFE])
def test_equal_answers_solve(answer, gold):
    assert reward_of(answer, answer=gold) == reward_of(gold, answer=answer) == 1.0


@pytest.mark.parametrize(
    "answer, gold", [*rows_of(DIFFERENT), ("1" * 100_000, "5"), ("a " * 50_000, "a")]
)
def test_different_answers_do_not_solve(answer, gold):
    assert reward_of(answer, answer=gold) == 0.1 and not starter.same_answer(gold, answer)


@pytest.mark.parametrize(
    "answer, gold",
    [
        ("0.00001", 0.00001),
        ("10000000000000000", 1e16),
        ("5", 5),
        ("7", [5, "7"]),
        ("Bo", ["Al", "bo"]),
    ],
)
def test_numbers_of_json_and_one_of_several_answers_are_right(answer, gold):
    assert reward_of(answer, answer=gold) == 1.0
    assert reward_of("6", answer=gold) == 0.1


LAST_NUMBERS = """
68 | 1
The sum of 23 and 45 is 68. | 1
68.0 | 1
**68** | 1
23+45=68 | 1
It is $68, | 1
first 67, no: 68! | 1
67 | 0
-68 | 0
68 is 23 + 45 | 0
168 | 0
6 8 | 0
68.5 | 0
6.8e1 | 1
−68 | 0
-$68 | 0
not $68 | 1
68e5 | 0
1,068 | 0
<answer>68</answer> 1 | 0
"""


@pytest.mark.parametrize("text, reward", rows_of(LAST_NUMBERS))
def test_last_number_is_the_answer_where_the_problem_says_so(text, reward):
    assert starter.score_answer(text, LAST_NUMBER) == float(reward)


TAGS = """
<answer>1</answer><answer>a b</answer> c | 1.0
<answer>a b</answer>> | 1.0
<answer>a b</answer> so </answer> | 1.0
a b | 0.0
<answer>a b | 0.0
a b</answer> | 0.0
</answer><answer>a b | 0.0
<answer> </answer> | 0.0
"""


@pytest.mark.parametrize("text, reward", rows_of(TAGS))
def test_tags_must_be_there_and_the_last_pair_counts(text, reward):
    assert starter.score_answer(text, TEXT) == float(reward)


PIECES = """<answer> </answer> 3 5 7 90 1,234.5 + - * / ** ( ) [ ] . $ % = x e9 22j a b
999999999 __import__('os').abort() \0 \u0663 \uff13 \u00b2 \u2212 \ud800 \U0001f600 \U0001d7db"""
PIECE = strategies.text(max_size=9) | strategies.sampled_from(PIECES.split(" "))


@hypothesis.settings(deadline=None, derandomize=True, max_examples=100)
@hypothesis.given(strategies.lists(PIECE, max_size=12), strategies.sampled_from([1, 250]))
@hypothesis.example(["("], 200)  # deep nesting
@hypothesis.example(["9**9**9"], 20)  # a huge power
@hypothesis.example(["1"], 10**6)  # a huge number
@hypothesis.example(["22j"], 1)  # a number of another kind
def test_reward_of_any_text_is_a_number(pieces, times):
    text = "".join(pieces) * times
    for problem in (COUNTDOWN, COUNTDOWN | LAST_NUMBER, TEXT, LAST_NUMBER):
        for whole in (text, f"<answer>{text}</answer>"):
            assert starter.score_answer(whole, problem) in (0.0, 0.1, 1.0)


def score(texts, problems, reward):
    tokenizer = make_tokenizer()
    ids = tokenizer([text + tokenizer.eos_token for text in texts])["input_ids"]
    responses = [Response([0], response_ids, [], True) for response_ids in ids]
    return starter.score(responses, problems, tokenizer, reward)


def test_score_takes_each_response_with_the_problem_of_its_group():
    def reward(text, problem):
        return problem["answer"] + (text == "v")

    def length(text, problem, response):  # asks for the Response as well
        return 10 * len(response.response_ids) + reward(text, problem)

    problems = [{"answer": 1}, {"answer": 0}]
    written = [*"xyzuv", "<|user|><answer>w</answer>"]
    texts, rewards = score(written, problems, reward)
    assert texts == written  # without the stop token, with other special ones
    assert rewards.tolist() == [1, 1, 1, 0, 1, 0]
    assert score(written, problems, length)[1].tolist() == [21, 21, 21, 20, 21, 50]


def test_reward_may_be_any_number():
    for value in (math.inf, True, torch.tensor(0.5).numpy()[()]):  # inf: a skipped step
        assert score("x", [{}], lambda text, problem: value)[1].item() == value


def test_reward_may_call_the_text_a_response():
    def reward(response, problem):
        return len(response)

    assert score("x", [{}], reward)[1].tolist() == [1.0]


def test_text_of_a_response_is_what_was_sampled():
    """Llama 3's tokenizers have this switch, which takes blanks out."""
    tokenizer = make_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    written = "3 , 4 = 5 . b"
    ids = tokenizer(written)["input_ids"]
    responses = [Response([0], ids, [], False)]
    texts, _ = starter.score(responses, [{}], tokenizer, lambda text, problem: 0)
    assert texts == [written]


def test_text_of_a_response_begins_with_the_answer_that_its_prompt_began():
    """As in TRL: with "<answer>" at the end of the prompt the shipped reward finds the answer."""
    chat = [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": "<answer>"}]
    problems = [{"prompt": chat, "answer": "5"}]
    texts, rewards = score(["5</answer>", "4</answer>"], problems, starter.reward_fn)
    assert texts[0] == "<answer>5</answer>" and rewards.tolist() == [1.0, 0.1]


def test_reward_leaves_the_grad_mode_as_it_was():
    def reward(text, problem):
        torch.set_grad_enabled(False)
        return 1.0

    score("xy", [{}], reward)
    assert torch.is_grad_enabled()


def test_weights_that_sum_to_one_solve(checkpoint):
    """0.6 + 0.3 + 0.1 is a little less than 1."""
    weights = (0.6, 0.3, 0.1)
    assert sum(weights) < 1
    policy, tokenizer = starter.init_policy(checkpoint, "cpu")
    problems = [{"prompt": "a", "prompt_ids": [5], "skill": "sort"}]
    cfg = starter.cfg_with(max_new_tokens=2, precision="float32", stop_token_ids=[1])
    metrics, samples = starter.evaluate(
        policy, None, tokenizer, problems, cfg, lambda text, problem: sum(weights)
    )
    assert metrics["solved"] == 1.0
    assert starter.solved_by_skill(samples) == {"retention_sort": 1.0}


def test_error_of_a_reward_names_the_response_and_its_problem():
    def reward(text, problem):
        return 1 / (text != "v")

    with pytest.raises(ZeroDivisionError) as error:
        score([*"xyzuv", "w" * 10_000], [{"answer": 1}, {"answer": 0}], reward)
    [note] = error.value.__notes__
    assert "for 'v', a response to {'answer': 0}" in note
    with pytest.raises(TypeError) as error:
        score(["w" * 10_000], [{"answer": "1" * 10_000}], lambda text, problem: text + 1)
    assert len(error.value.__notes__[0]) < 1200


def test_error_of_an_async_reward_is_raised():
    async def judge(text, problem):
        raise OSError("no judge")

    with pytest.raises(OSError, match="no judge") as error:
        score("xy", [{}], judge)
    assert error.value.__notes__  # for which the command line prints the whole traceback


# Rewards that are awaited, and responses that cannot be scored


def calls_exit(text, problem):
    sys.exit()


async def calls_exit_later(text, problem):
    sys.exit()


@pytest.mark.parametrize("reward", [calls_exit, calls_exit_later])
def test_exit_in_a_reward_is_an_error(reward, checkpoint, tmp_path):
    """It may be of a program that the policy wrote. The run does not end as if all were well, nor
    does the event loop, for which all would wait."""
    with pytest.raises(RuntimeError, match=r"exit\(\) was called by the reward"):
        starter.main(**settings(checkpoint, tmp_path, reward=reward))


def test_async_rewards_wait_together_within_their_bound_and_in_one_event_loop(monkeypatch):
    """Also where a loop runs already, and where some numbers are known at once."""
    monkeypatch.setattr(rewards, "AT_ONCE", 2)
    loops, waiting, most = set(), set(), []

    async def judge(text, problem, response):
        loops.add(asyncio.get_running_loop())
        waiting.add(text)
        most.append(len(waiting))
        await asyncio.sleep(0.001 * ord(text))  # they end in another order
        waiting.remove(text)
        return problem["answer"] + len(response.response_ids)

    def reward(text, problem, response):
        return 3 if text == "x" else judge(text, problem, response)

    async def program():
        return score("xyzu", [{"answer": 1}, {"answer": 0}], reward)[1].tolist()

    assert asyncio.run(program()) == asyncio.run(program()) == [3, 3, 2, 2]
    assert max(most) == 2 and len(loops) == 1


def test_response_without_a_score_has_a_reward_of_nan(with_support):
    """Of such rewards test_starter.py has the advantages."""
    numbers = {"x": None, "y": 0.5, "z": math.nan, "u": 0}
    _, found = score("xyzu", [{}], lambda text, problem: numbers[text])
    assert found.tolist() == pytest.approx([math.nan, 0.5, math.nan, 0], nan_ok=True)


# Whole runs: a trial of the reward, an evaluation of 10 responses, steps of 16


def test_run_without_some_scores_trains_and_evaluates_the_others(checkpoint, tmp_path, capsys):
    """Every fourth response gets none; in step 3 none does, which teaches nothing."""
    calls = itertools.count()

    async def reward(text, problem):
        n = next(calls)
        in_step_3 = 11 + 32 <= n < 11 + 48
        return None if in_step_3 or n % 4 == 0 else variety(text, problem)

    logged = scalars(starter.main(**settings(checkpoint, tmp_path, reward=reward))["run_folder"])
    assert logged["train/unscored_frac"] == {1: 0.25, 2: 0.25, 3: 1.0, 4: 0.25}
    rewards_of_steps = logged["train/reward_mean"].values()
    assert [*map(math.isnan, rewards_of_steps)] == [False, False, True, False]
    norms = logged["train/grad_norm"]
    assert norms[3] == logged["train/loss"][3] == 0 < min(norms[1], norms[2], norms[4])
    assert math.isfinite(logged["eval/reward_mean"][4])
    printed = capsys.readouterr().out
    assert "is skipped" not in printed and "gradient is 0" not in printed


@pytest.mark.slow
def test_second_interrupt_ends_a_run_whose_async_reward_hangs(checkpoint, tmp_path):
    calls = itertools.count()
    cancelled = threading.Event()

    async def reward(text, problem):
        n = next(calls)
        if n == 11:
            interrupt_twice()
        try:
            await asyncio.sleep(60 * (n >= 11))
        except asyncio.CancelledError:
            cancelled.set()
        return 1

    with pytest.raises(KeyboardInterrupt):
        starter.main(**settings(checkpoint, tmp_path, reward=reward))
    assert cancelled.wait(10)


def test_reward_of_several_numbers_is_refused_without_support_too(without_support):
    """As a table it would be taken for the rewards of several responses."""
    responses = [Response([5], [6, 1], [0.0, 0.0], True)] * 2
    for reward in (lambda *_: (1.0, 0.0), lambda *_: "wrong", lambda *_: 10**400):
        with pytest.raises(starter.InputError, match="must return one number, or None"):
            starter.score(responses, [{"prompt": "a"}], make_tokenizer(), reward)
