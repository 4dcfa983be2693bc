"""What the judge says of any answer: errors with the learner's line, changed arguments, right steps, differences."""

import re

import pytest
import torch
from helpers.answers import defined

from course import lesson
from course.exercises import ExerciseError
from course.exercises.nb04 import my_attend
from course.judge import limit, observe
from course.judge.differ import differs, kind
from course.judge.exercise import Example, Exercise, Most, edited
from course.judge.setting import Setting
from course.judge.verdict import judge
from tplab.ranks import all_reduce, rank


def doubled(x, factor):
    twice = x * 2
    return twice * factor


def summed(x):
    return all_reduce(x * (rank() + 1))


DOUBLED = Exercise("99", doubled, lambda: [Example(torch.arange(1.0, 4), 1.0), Example(torch.arange(6.0).view(2, 3),
    3.0)],
                   {"factor is not used": "twice * factor -> twice", "x comes back": "twice * factor -> x",
                    "it is halved": "x * 2 -> x / 2"}, "it doubles", engine=lambda setting, answer:
                        "a remark", dims="row, column")
SUMMED = Exercise("99", summed, lambda: [Example(torch.ones(2), ranks=2, says="two ranks")], {
    "each rank returns its own": "all_reduce(x * (rank() + 1)) -> x * (rank() + 1)"}, "it sums", engine=lambda *_: None)


def told(code, exercise=DOUBLED, capsys=None):
    answer = defined(code, exercise.name) if isinstance(code, str) else code
    return judge(exercise, answer, Setting())


@pytest.mark.parametrize("code, said", [
    ("def doubled(x, factor): return x * 2 * factor", "PASS  doubled: it doubles; a remark"),
    ("def doubled(x, factor): return x * 2", "NOT YET  doubled: factor is not used\n"
     "         With x [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], factor 3.0: 5 of 6 numbers are wrong: the first, row 0, "
     "column 1, is 2, and 6 is right. Each number is the right one times 0.333"),
    ("def doubled(x, factor): return x.clone()", "NOT YET  doubled: x comes back\n         With x [1.0, 2.0, "
                                                 "3.0], factor 1.0: 3 of 3"),
    ("def doubled(x, factor): return (x * 2 * factor).flip(0)",
     "Along row, the right numbers stand in the order 2, 1, 0"),
    ("def doubled(x): return x", "it must take (x, factor); yours takes (x)"),
    ("doubled = 3", "it is 3; define a function that takes (x, factor)"),
    ("def doubled(x, factor): x *= 2 * factor", "it returns nothing, and changes its argument x, which its caller "
                                                "still"),
    ("def doubled(x, factor): x *= 2 * factor; return x", "it changes its argument x"),
    ("def doubled(x, factor): pass", "it returns nothing (is a return missing?); a tensor [3] must come back"),
    ("def doubled(x, factor):\n    y = x\n    return y.nowhere", "AttributeError: 'Tensor' object has no attribute "
     "'nowhere'\n         at your line 3: return y.nowhere\n         It was called with x [1.0, 2.0, 3.0], factor 1.0"),
    ("def doubled(x, factor): raise SystemExit", "SystemExit"),
    ("def doubled(x, factor): yield x", "it returns a generator: use def with return"),
    ("async def doubled(x, factor): return x", "it returns a coroutine: use def with return"),
    ("def doubled(x, factor): return (x * 2 * factor).double()", "it returns torch.float64; torch.float32 must come "
        "back"),
    ("def doubled(x, factor): return (x * 2 * factor).to('meta')", "a tensor on meta"),
    ("def doubled(x, factor): return all_reduce(x * 2 * factor)", "the result is right; the number of collectives "
        "is 1, and 0"),
    ("kept = {}\ndef doubled(x, factor):\n    return kept.setdefault(x.shape, x * 2 * factor)", "what is kept"),
    ("def doubled(x, factor): return doubled", "it returns a function; a tensor [3] must come back"),
])
def test_an_answer_is_told_what_is_wrong(code, said, capsys):
    told(code)
    printed = re.sub(r"\n {11}(?=\S)", " ", capsys.readouterr().out)
    assert said in printed and printed.count("\n") <= 3, printed


@pytest.mark.parametrize("body, said", [
    ("return x * 3 if rank() else all_reduce(x)", "rank 1 returned; rank 0 waits in all_reduce at "),
    ("while rank(): pass\n    return all_reduce(x)", "is still at your line 2"),
    ("while True: pass", "What ends it?"), ("return all_reduce(x[rank():])", "All ranks must make the same call"),
    ("return 1 / (1 - rank())", "on rank 1: ZeroDivisionError"), ("return x * (rank() + 1)", "each rank returns its "
        "own"),
    ("return all_reduce(x * 5 * rank())", "on every rank, 2 of 2 numbers"), ("return x * 3 + rank()", "on rank 1 of "
        "2, 2 of 2"),
])
def test_on_ranks_it_is_said_which_of_them(body, said, capsys, monkeypatch):
    monkeypatch.setattr(observe, "LIMIT", 0.5)
    told(f"def summed(x):\n    {body}", SUMMED)
    assert said in re.sub(r"\n {11}(?=\S)", " ", capsys.readouterr().out)


@pytest.mark.parametrize("code, said", [
    ("def my_generate(step, ids, count):\n    new = [step(ids, range(len(ids)))]\n    while len(new) < count:\n"
     "        new.append(step(new[-1:], [len(ids) + len(new) - 1]))\n    ids += new\n    return new",
     "it changes its argument ids"),
    ("def my_embedding(ids, weight_here, rows):\n    return all_reduce(weight_here[ids % len(rows)])",
     "it returns the rows of ["),
    ("def my_rounds(write, read, rounds):\n    if rank() == 0:\n        barrier()\n    return [*range(rounds)]",
     "rank 0 calls barrier at <answer"),
    ("def my_best_offer(offer_here):\n    offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))\n"
     "    return offers[:, offers[:, :, 0].argmax(dim=-1), 1].long()",
     "[sequence] = [2] must come back\n"),  # and no word of an argument that it does not take
])
def test_exercises_name_what_they_see_in_the_learners_terms(code, said, capsys):
    name = re.match(r"def (\w+)", code).group(1)
    lesson.judge(defined(code, name), name=name)
    printed = re.sub(r"\n {11}(?=\S)", " ", capsys.readouterr().out)
    assert said in printed and "course/exercises" not in printed, printed


def test_what_an_answer_sets_for_all_of_torch_is_put_back():
    threads = torch.get_num_threads()
    told("def doubled(x, factor):\n    torch.set_default_dtype(torch.float64)\n    torch.set_num_threads(3)\n    "
         "return x")
    assert torch.get_default_dtype() == torch.float32 and torch.get_num_threads() == threads


def test_what_the_engine_does_with_an_answer_ends_too(monkeypatch, capsys):
    monkeypatch.setattr(limit, "LIMIT", 0.3)
    endless = Exercise("99", doubled, DOUBLED.examples, engine=lambda setting, answer: next(iter(lambda: 0,
        1)) or endless_loop())
    told("def doubled(x, factor): return x * 2 * factor", endless)
    assert "not finished after 0 s of computing, in the engine" in capsys.readouterr().out


def endless_loop():
    while True:
        pass


def test_an_edit_must_find_what_it_changes():
    with pytest.raises(ValueError, match="my_attend has no 'nothing of it' to change"):
        edited(my_attend, "nothing of it -> something")


def test_an_answer_to_no_exercise_is_refused_by_name():
    def my_guess():
        pass

    with pytest.raises(ExerciseError, match="no exercise 'my_guess'; there are mask_scores, .* with name="):
        lesson.judge(my_guess)


@pytest.mark.parametrize("value, right, said", [
    ([1, 2], [1, 2], ""), ((1, 2), [1, 2], ""), (range(2), [0, 1], ""), ([1, 3], [1, 2], "it returns [1, 3], and "
        "[1, 2] is right"),
    ([1], [1, 2], "it returns [1], and [1, 2] is right"), (1.0, 1, "it returns 1.0, and 1 is right"), (True, 1,
        "True, and 1"),
    (1.00001, 1.0, ""), (1.1, 1.0, "1.1, and 1.0"), (float("nan"), float("nan"), ""), (None, 3, "nothing (is a "
        "return missing?)"),
    (3, None, "3, and None is right"), (Most(130), Most(100), ""), (Most(131), Most(100), "131, and 100 are enough"),
    ({"a": 1}, {"a": 2}, "it returns, for 'a', 1, and 2"), ({"a": 1}, {"b": 1}, "{'a': 1}, and {'b': 1}"),
    (torch.ones(2, 3), torch.ones(3, 2), "it returns a tensor [2, 3]; [row, column] = [3, 2] must come back (yours is "
                                         "[column, row])"),
    (torch.tensor([0.0, 2]), torch.tensor([0.0, 1]), "1 of 2 numbers is wrong: number 1 is 2, and 1"),
    (torch.tensor([1.00001]), torch.tensor([1.0]), ""), (torch.tensor([1.001]), torch.tensor([1.0]), "is 1.001, and "
        "1 is right"),
    (torch.tensor([1.00001]).double(), torch.tensor([1.0]).double(), "is 1.00001, and 1 is right"),
    (torch.tensor([812.7]), torch.tensor([1111.5]), "is 812.7, and 1111.5 is right"),
    (torch.tensor([True]), torch.tensor([False]), "returns [True], and [False]"),
    (True, False, "returns; this must not happen"),
    (False, True, "expected, but not so: it returns"), (torch.tensor([float("nan")]), torch.tensor([1.0]),
        "is nan, and 1"),
])
def test_how_a_value_differs(value, right, said):
    found = differs(value, right, 1e-4, "row, column" if getattr(right, "ndim", 0) == 2 else "")
    assert said in found and bool(said) == bool(found)


def test_a_value_is_named_without_an_address():
    assert kind(object()) == "a object" and kind([object()]) == "a list of 1" and kind(len) == "<built-in function len>"
