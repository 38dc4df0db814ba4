"""The default reward on answers that are not arithmetic: numbers, units, words."""
from pathlib import Path

import pytest

import starter

GSM8K_ANSWERS = Path(__file__).parent / "reference" / "gsm8k_answers.txt"

EQUAL = [
    ("5", "5"), ("5", "5.0"), ("5.", "5"), (" 5 ", "5"), ("1,234", "1234"),
    ("1,234.50", "$1,234.5"), ("1,000,000", "1000000"), (".5", "0.5"), ("0.50", ".5"),
    ("-0", "0"), ("12.50", "12.5"), ("x = 5", "5"), ("x=5", "5"), ("= 5", "5"),
    ("-12", "\u221212"), ("\u221212 C", "-12 C"), ("-12 C", "-12"),
    ("$5", "5"), ("5 dollars", "$5"), ("$5", "5 dollars"), ("-$5", "-5"), ("$-5", "-5"),
    ("\u20ac5", "5 euros"), ("18 %", "18%"), ("18%", "18"), ("18 percent", "18%"),
    ("18 per cent", "18 %"), ("72 clips", "72"), ("72", "72 clips"), ("72 clip", "72 clips"),
    ("5 km/h", "5 km/h"), ("5 km", "5 km"), ("100 miles per hour", "100 miles per hour"),
    ("Paris", "paris"), ("Paris.", "paris"), ("new  york", "New York"), ("yes", "Yes"),
    ("abcd", "abcd"), ("1/2", "1/2"), ("6:30", "6:30"), ("3^10", "3^10"), ("(3, 4)", "(3, 4)"),
    ("x=3,y=4", "x=3,y=4"), ("2024-01-05", "2024-01-05"), ("0012", "0012"),
    ("10 m^2", "10 m^2"),
]
DIFFERENT = [
    # A5 of the first users: the last number alone was compared.
    ("3/2", "1/2"), ("7:30", "6:30"), ("2^10", "3^10"), ("x=5,y=4", "x=3,y=4"),
    ("2024-01-06", "2024-01-05"), ("5", "x=3,y=5"), ("5", "1/5"), ("(4, 3)", "(3, 4)"),
    # Another number
    ("6", "5"), ("56", "5"), ("-5", "5"), ("12", "0012"), ("01", "1"), ("1/5", "5"), ("5/1", "5"),
    ("12,34", "1234"), ("1.234,5", "1234.5"), ("3,4", "34"), ("5-6", "5"), ("5 6", "5"),
    ("50%", "0.5"), ("5 million", "5"), ("5k", "5"), ("5 dozen", "5"), ("5 squared", "5"),
    ("5!", "5"), ("sqrt(5)", "5"), ("sqrt 5", "5"), ("minus 5", "5"), ("--5", "5"), ("-$-5", "-5"),
    ("5 and a half", "5"), ("1:00", "1"), ("3.1.4", "3.1"), ("5..", "5"), ("x=5", "y=3"),
    # Several, or a calculation
    ("5 or 6", "5"), ("5 to 6", "5"), ("5 (or 6)", "5"), ("5+0", "5"), ("2+3", "5"),
    ("5 x 2", "5"), ("5*1", "5"), ("5=5", "5"), ("5 plus 1", "5"), ("Paris or London", "Paris"),
    # Another unit
    ("5 km", "5 m"), ("5 cents", "$5"), ("5%", "$5"),
    # Not a number
    ("five", "5"), ("5", "five"), ("it is 5", "5"), ("not 5", "5"), ("5e0", "5"), ("1e3", "1000"),
    ("nan", "5"), ("inf", "5"), ("\u0665", "5"), ("$", "5"), (".", "5"), ("London", "Paris"),
]


def reward_of(answer, gold):
    return starter.reward_fn(f"<answer>{answer}</answer>", {"answer": gold})


@pytest.mark.parametrize("answer, gold", EQUAL)
def test_equal_answers_solve(answer, gold):
    assert reward_of(answer, gold) == 1.0


@pytest.mark.parametrize("answer, gold", DIFFERENT)
def test_different_answers_do_not_solve(answer, gold):
    assert reward_of(answer, gold) == 0.1


def test_table_has_at_least_80_pairs():
    assert len(set(EQUAL + DIFFERENT)) >= 80


def test_answers_of_gsm8k_are_numbers():
    """Each solves itself, with and without its separators and a unit, and no neighbour solves."""
    answers = GSM8K_ANSWERS.read_text(encoding="utf-8").splitlines()[1:]
    assert len(answers) > 900
    for gold in answers:
        plain = gold.replace(",", "")
        for answer in (gold, plain, f"${gold}", f"{plain} apples"):
            assert reward_of(answer, gold) == 1.0, answer
        for answer in (f"{plain}1", f"-1{plain}", f"{plain}/2", f"{plain} or {plain}"):
            assert reward_of(answer, gold) == 0.1, answer


def test_text_of_over_100_characters_is_not_read_as_a_number():
    assert starter.pure_number("1" * 100) == (int("1" * 100), "")
    assert starter.pure_number("1" * 101) is None


def test_long_answer_costs_nothing():
    assert reward_of("1" * 100_000, "5") == 0.1
    assert reward_of("a" * 100_000 + " 5", "a" * 100_000 + " 5") == 1.0
    assert reward_of("a " * 50_000, "a") == 0.1
