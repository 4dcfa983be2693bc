"""What is said of numbers that are not the right ones: where they part, what explains them, which lines are right."""

import pytest
import torch
from helpers.answers import defined

from course.judge.attempt import Attempt, NotYet
from course.judge.compare import agree, first_without, made_of, related, right_lines, where

NUMBERS = torch.arange(24.0).sin().view(2, 3, 4).double()
NAMES = ["token", "head"]


def refused(*args, **kwargs) -> str:
    with pytest.raises(NotYet) as caught:
        agree(*args, **kwargs)
    return str(caught.value)


def test_the_first_mistake_whose_numbers_are_the_same_is_said():
    right, wrong = torch.tensor([1.0, 2.0, 400.0]), torch.tensor([1.0, 2.0, 401.0])
    agree(torch.tensor([1.0, 2.03, 400.0]), right, {}, "no")  # within 1e-4 of the largest number
    assert refused(torch.tensor([1.0, 2.05, 400.0]), right, {"a": wrong}, "neither") == (
        "wrong for number 1 of 3: the first, number 1, is 2.05, and 2 is right\n"
        "What is off by so little has lost digits: in which dtype is it computed, or kept?")
    assert refused(torch.tensor([1.0, 4.05, 400.0]), right, {"a": wrong}, "neither") == "neither"
    assert refused(wrong, right, {"shape": right[:2], "a": (right, wrong), "b": wrong}, "neither") == "a"
    small = torch.tensor([1e-5, 0.0])
    agree(torch.tensor([1e-5, 9e-5]), small, {}, "below one, one counts")
    assert refused(torch.tensor([1e-5, 2e-4]), small, {}, "no") == "no"
    agree(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), {}, "no", within=0.3)
    assert refused(right[:2], right, {}, "of another shape") == "of another shape"


def test_what_agrees_may_be_a_number_or_a_list_too():
    agree([1, 2], [1, 2], {}, "no")
    assert refused([1, 2], [1, 3], {"longer": [1, 2, 3], "it": [1, 2]}, "no") == "it"
    assert refused(2, 1, {"twice": 2.0}, "no") == "twice"
    assert refused(float("nan"), 1, {}, "no") == "no"


@pytest.mark.parametrize("value, says", [
    (-NUMBERS, "It is right but for its sign"), (NUMBERS.abs(), "It is right but for signs"),
    (NUMBERS * 0.4, "Every number is 0.4 times what it must be"),
    (NUMBERS - 2, "Every number is off by -2"),
    (NUMBERS.flip(1), "head 0 has what belongs to head 2; head 2 has what belongs to head 0"),
    (NUMBERS[:1].expand(2, 3, 4), "token 1 has what belongs to token 0"),
    (NUMBERS.roll(1, 2), "number 0 has what belongs to number 3; number 1 has what belongs to number 0; number 2 has "
     "what belongs to number 1"),
    (NUMBERS.flatten().sort().values.view(2, 3, 4), "The numbers are right, and stand in another order"),
    (NUMBERS * torch.tensor([1.0, 2, 1, 1]), ""), (NUMBERS * float("nan"), ""), (NUMBERS[:1], "")])
def test_what_turns_all_right_numbers_into_these(value, says):
    assert related(value, NUMBERS, 1e-9, NAMES) == says


def test_where_it_is_wrong():
    wrong = NUMBERS.clone()
    wrong[1, 1:, 2] = 7
    assert where(wrong, NUMBERS, 1e-9, NAMES) == (
        "wrong for token 1 of 2 and heads 1–2 of 3: the first, token 1, head 1, number 2, is 7, and -0.751 is right")
    assert where(NUMBERS + 1, NUMBERS, 1e-9, NAMES).startswith("wrong for every token: the first, token 0, head 0, num")
    hidden = torch.tensor([[True, False]])
    assert where(~hidden, hidden, 0, ["query", "key"], "hidden") == (
        "wrong for every query: the first, key 0, is not hidden, and hidden is right")
    assert where(NUMBERS, NUMBERS, 1e-9, NAMES) == ""


def test_how_often_each_summand_is_in_it():
    parts = {f"leaf {n}": torch.randn(4, 6, generator=torch.Generator().manual_seed(n)).double() for n in range(4)}
    one, two, three, four = parts.values()
    right = one + two + three + four

    def said(value):
        return made_of(value, right, 1e-6, ["token"], parts)

    assert said(one * 2 + two + three + four) == "In yours, leaf 0 counts 2 times (right: 1)"
    assert said(four) == "In yours, leaf 0 to leaf 2 count 0 times (right: 1)"
    assert said(one + three) == "In yours, leaf 1 counts 0 times (right: 1), leaf 3 counts 0 times (right: 1)"
    by_row = right.clone()
    by_row[2] = (one + two)[2]
    assert said(by_row) == "In yours, at token 2, leaf 2 and leaf 3 count 0 times (right: 1)"
    assert said(right + 1) == "", "no sum of these"
    assert made_of(one[:, :4], right[:, :4], 1e-6, ["token"], {n: p[:, :4] for n, p in parts.items()})
    few = {name: part[:1, :3] for name, part in parts.items()}
    assert made_of(NUMBERS[:1, 0, :3], right[:1, :3], 1e-6, ["token"], few) == "", "three numbers fit any four summands"


STEPS = {"the product": (NUMBERS * 2).float(), "the sum": (NUMBERS * 2 + 1).float()}


@pytest.mark.parametrize("body, says", [
    ("y = x * 2\n    return y - 1", "Right in yours: the product (line 2); not found: the sum"),
    ("y = x.mT * 2\n    z = y + 1\n    return z * 0",
     "Right in yours: the product (line 2), the sum (line 3). See what follows in line 3 or after it"),
    ("return x + 9", "None of your lines makes the product"),
    ("y = x * 2 + 1\n    y = y.abs()\n    return x", "Your line 3 makes the right result: what becomes of it?"),
    ("y = x + x + 1\n    return y.cos()", "Right in yours: the product (line 2), the sum (line 2). See what "
     "follows in line 2 or after it")])
def test_which_lines_are_right_in_whatever_layout(body, says):
    attempt = Attempt(defined(f"def f(x):\n    {body}", "f"), "x")
    attempt(NUMBERS.float())
    assert right_lines({**STEPS, "the result": (NUMBERS * 2 + 1).abs().float()}, attempt.made[0], 1e-5) == says


def test_the_rank_whose_part_is_missing():
    lines = [(3, NUMBERS[0])]
    assert first_without({0: lines, 1: lines}, [NUMBERS[0], NUMBERS[1]]) == 1
    assert first_without({0: lines}, [NUMBERS[0].mT]) == 0


@pytest.mark.parametrize("code, names", [
    ("def f(a, b): return a", ["b"]), ("def f(a, b): return [b for _ in a]", []),
    ("def f(x, y): return (lambda: x)()", ["y"]), ("def f(*a): return a", []),
    ("def f(a, b):\n    b = 3\n    return a", ["b"]), ("class f:\n    def __init__(self, a, b): pass", [])])
def test_parameters_that_no_line_reads(code, names):
    assert Attempt(defined(code, "f"), "a, b").unread("") == names
    assert Attempt(defined("def f(a, b): return a", "f"), "a, b").unread("b") == []


@pytest.mark.parametrize("body, name", [("return b", "b"), ("return b.clone()", "b"), ("return a.add_(1)", ""),
                                        ("return 3, b", "b"), ("return b + 1", ""), ("return 3", ""),
                                        ("return b.to('meta')", "")])
def test_an_argument_that_comes_back_as_it_went_in(body, name):
    attempt = Attempt(defined(f"def f(a, b): {body}", "f"), "a, b", "a")
    attempt(NUMBERS.clone(), NUMBERS * 2)
    assert attempt.unchanged() == name
