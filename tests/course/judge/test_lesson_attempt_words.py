"""What is said of a learner's answer: its kind, its shape, the argument it wrote into, the line it failed in."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.answers import defined

from course.judge import attempt, words
from course.judge.attempt import (
    Attempt,
    NotYet,
    Object,
    count_ops,
    for_each,
    guarded,
    kind,
    on_ranks,
    one_number,
    ranks_in_words,
    saying,
    several,
    whole_numbers,
)
from tplab.ranks import OpRecord, RankError
from tplab.ranks.errors import Cause, CollectiveMismatch, Frame

NAN = float("nan")


def refused(function, *args, **kwargs):
    with pytest.raises(NotYet) as caught:
        function(*args, **kwargs)
    return str(caught.value)


class Told(str):
    __repr__ = str.__str__


@pytest.mark.parametrize("value, words", [
    (None, "nothing (is a return missing?)"), (torch.ones(2, 3), "a tensor [2, 3]"),
    (np.ones((4, 1)), "a numpy array [4, 1]"), ([1, 2, 3], "a list of 3"), ((), "a tuple of 0"),
    ({"a": 1}, "a dict of 1"), ({1, 2}, "a set of 2"), (int, "the class int itself"), (len, "the function len itself"),
    (3, "3 (int)"), ("x", "'x' (str)"), (object(), "an object of the class object"),
    (Told("<a block at 0x7f>"), "an object of the class Told"), (Told("my object"), "my object (Told)"),
    (Told("a table\nof two lines"), "an object of the class Told")])
def test_the_kind_of_an_answer(value, words):
    assert kind(value) == words


@pytest.mark.parametrize("value, dtype, words", [
    ([1], None, "it returns a list of 1; a tensor [heads, dim] = [2, 3] must come back"),
    (torch.ones(3, 2), None, "it returns [3, 2]; [heads, dim] = [2, 3] must come back (yours is [dim, heads])"),
    (torch.ones(2, 4), None, "it returns [2, 4]; [heads, dim] = [2, 3] must come back"),
    (torch.ones(2, 3, 1), None, "it returns [2, 3, 1]; [heads, dim] = [2, 3] must come back"),
    (torch.ones(2, 3).double(), torch.float32, "it returns torch.float64; torch.float32 must come back"),
    (torch.ones(2, 3).double(), None, ""), (torch.ones(2, 3), torch.float32, "")])
def test_a_tensor_of_the_wrong_shape_or_dtype(value, dtype, words):
    def tensor():
        return attempt.tensor(value, "heads, dim", (2, 3), dtype)

    assert (refused(tensor) if words else "") == words and (words or tensor() is value)


def test_what_is_returned_is_asked_for_its_shape_and_dtype():
    own = Attempt(lambda n: torch.ones(n).double(), "n")
    assert own.tensor(2, dims="tokens", shape=[2]).tolist() == [1, 1]
    assert refused(own.tensor, 2, dims="tokens", shape=[2], dtype=torch.float32).startswith("it returns torch.float64")
    assert refused(own.tensor, 2, dims="tokens", shape=[3]) == "it returns [2]; [tokens] = [3] must come back"


def test_dimensions_of_one_size_cannot_be_told_apart():
    said = refused(attempt.tensor, torch.ones(2, 3, 2), "a, b, c", [3, 2, 2])
    assert said == "it returns [2, 3, 2]; [a, b, c] = [3, 2, 2] must come back"
    said = refused(attempt.tensor, torch.ones(4, 2, 3), "a, b, c", [2, 3, 4])
    assert said.endswith("(yours is [c, a, b])")


@pytest.mark.parametrize("arg, write", [
    (torch.zeros(2), lambda arg: arg.add_(1e-9)), (torch.tensor([0.0, NAN]), lambda arg: arg.fill_(0)),
    (torch.tensor([1, 2]), lambda arg: arg.add_(1)), ({"a": 1}, lambda arg: arg.update(b=2)),
    ({"a": 1, "b": 2}, lambda arg: arg.update(a=arg.pop("a"))), ({"a": [1]}, lambda arg: arg["a"].append(2)),
    ([1, [2]], lambda arg: arg[1].clear()), ([1, 2], lambda arg: arg.pop()),
    ([torch.ones(1)], lambda arg: arg[0].zero_()), ([1], lambda arg: arg.__setitem__(0, "1")),
    ({1}, lambda arg: arg.add(2)), (torch.ones(2, 2), lambda arg: arg.resize_(4)),
    ([3], lambda arg: arg.__setitem__(0, None))])
def test_an_argument_that_was_written_into(arg, write):
    def answer(first, given):
        write(given)
        return 7

    before = copy.deepcopy(arg)
    said = refused(Attempt(answer, "first, given"), 1, arg)
    assert said == "it changes its argument given, which its caller still needs: work on a copy"
    assert attempt._same(arg, before), "its caller's own one"
    free = Attempt(answer, "first, given", "other, given")
    assert free(1, arg) == 7 and free.given[0] == 1 and not attempt._same(free.given[1], arg)


def test_an_argument_that_was_left_alone_may_hold_nan_and_objects_of_the_check():
    given = [torch.tensor([NAN, 1.0]), range(3), (1, "a", b"b", None, True), {"k": {2}}, SimpleNamespace(n=[1])]

    def answer(a, b, c, d, e):
        e.n.append(2)  # an object of the check's own watches itself
        return a

    assert Attempt(answer, "a, b, c, d, e")(*given) is not given[0]


@pytest.mark.parametrize("answer, words", [
    (3, "it is 3 (int); define a function that takes (a, b)"),
    (lambda a: a, "it must take (a, b); yours takes (a)"), (lambda a, b, c=1: a, ""), (max, "")])
def test_what_an_answer_must_take(answer, words):
    assert (refused(Attempt, answer, "a, b") if words else Attempt(answer, "a, b") and "") == words


def test_an_answer_that_gives_itself_up_is_said_with_its_line():
    code = "import sys\ndef f(n):\n    sys.exit('enough')"
    assert refused(Attempt(defined(code, "f"), "n"), 1) == "SystemExit: enough\nat your line 3: sys.exit('enough')"
    with pytest.raises(KeyboardInterrupt):
        guarded(defined("def f():\n    raise KeyboardInterrupt", "f"))
    assert refused(guarded, defined("async def f(): return 1", "f")) == (
        "with async def, a call gives a coroutine and runs none of your lines: use def, and return")
    assert refused(guarded, defined("def f(): yield 1", "f")).startswith("with yield, a call gives a generator and")
    deep = "def g(x):\n    return x['no']\ndef f():\n    return g({})"
    assert refused(guarded, defined(deep, "f")) == "KeyError: 'no'\nat your line 2: return x['no']"
    asked = "import json\ndef f():\n    return json.loads('{')"
    assert refused(guarded, defined(asked, "f")).endswith("\nat your line 3: return json.loads('{')")


def test_an_object_of_the_learners_class():
    class Made:
        size = 3

        @property
        def broken(self):
            raise ValueError("no")

        def half(self, by=2):
            return self.size / by

    made = Object(Made(), "my_pool")
    assert made.size == 3 and made.half() == 1.5 and made.half(by=3) == 1
    assert refused(lambda: made.free) == "my_pool has no free"
    assert refused(lambda: made.broken).startswith("ValueError: no\nat your line ")
    assert refused(made.half, 0).startswith("ZeroDivisionError: division by zero\nat your line ")


@pytest.mark.parametrize("ranks, size, words", [
    ([0], 1, "rank 0"), ([1], 2, "rank 1"), ([0, 1], 2, "every rank"), ([0, 2], 3, "ranks 0 and 2"),
    ([0, 1, 3], 4, "ranks 0, 1 and 3")])
def test_ranks_in_words(ranks, size, words):
    assert ranks_in_words(ranks, size) == words


def ran(*ops):
    return [(None, [OpRecord(at, op, (1,), "float32", 0, "f", 1, False) for at, op in enumerate(each)]) for each in ops]


def test_too_many_collectives_are_said_with_their_rank():
    count_ops(ran(["all_gather", "all_reduce"], ["all_reduce", "all_gather"]), {"all_reduce": 1, "all_gather": 1})
    assert refused(count_ops, ran(["a"], ["a", "b", "b"]), {"a": 1}) == "rank 1 of 2 calls a, b, b; 1 a must be enough"
    assert refused(count_ops, ran([]), {"a": 1, "b": 2}) == "rank 0 of 1 calls no collective; 1 a, 2 bs must be enough"


def failing(kinds, error=RankError, text="waits in barrier"):
    """A pool on which each rank ends so."""
    causes = [Cause(rank, kind, f"{text} {kind}", [Frame("f.py", 1, "f")]) for rank, kind in enumerate(kinds)]

    def run(function, *args, timeout):
        raise error("what happened at cell In[7], line 3", causes)

    return SimpleNamespace(run=run)


@pytest.mark.parametrize("pool, asks", [
    (failing(["waiting", "returned"]), "Who?"), (failing(["running", "running"]), "Who?"),
    (failing(["died", "waiting"]), None),
    (failing(["waiting", "waiting"], CollectiveMismatch), "All ranks must make the same call, with tensors of the same "
     "dtype and, where no sizes=[…] are given, of the same shape")])
def test_who_is_waited_for_is_asked_where_ranks_are_stuck(pool, asks):
    what, *rest = refused(on_ranks, pool, len, [], waits="Who?").splitlines()
    assert what == "what happened at line 3" and rest[1:] == [asks] * bool(asks)
    assert rest[:1] == ["at your line 1 (f.py, line 1)"]
    assert "Who?" not in refused(on_ranks, pool, len, [])


def test_the_first_collective_that_ranks_call_at_different_lines_is_shown():
    answer = defined("def f():\n    if rank() == 0:\n        barrier()\n    barrier()", "f")
    assert refused(on_ranks, 2, answer, waits="Who?").endswith("\nCollective 1 is in line 3 on rank 0, 4 on rank 1")
    answer = defined("def f():\n    barrier()\n    if rank() == 0:\n        barrier()", "f")
    assert refused(on_ranks, 2, answer, waits="Who?").endswith("\nWho?")


def test_one_rank_alone_is_no_every_rank():
    assert refused(on_ranks, failing(["raised"], text="raised"), len, []).startswith("on rank 0: ")
    assert refused(on_ranks, failing(["raised"] * 3, text="raised"), len, []).startswith("on every rank: ")
    causes = [Cause(rank, "raised", f"raised {what}", []) for rank, what in ((2, "A"), (0, "A"), (1, "B"))]
    assert words.in_words(RankError("x", causes)).partition(": ")[0] in ("on rank 0, 2", "on rank 1")


def test_a_long_line_is_cut_and_the_first_one_that_says_something_is_taken():
    assert words._short("\n  \n a \nb") == "a" and words._short("") == ""
    assert words._short("x" * 240) == "x" * 240 and words._short("x" * 241) == "x" * 240 + " …"


def test_what_an_error_began_with():
    first, ranks = ValueError("first"), RankError("ranks", [])
    try:
        try:
            raise first
        except ValueError as error:
            raise KeyError("second") from error
    except KeyError as error:
        assert words.first_cause(error) is first
        ranks.__cause__ = error
        assert words.first_cause(ranks) is ranks
    try:
        try:
            raise first
        except ValueError:
            raise KeyError("while that was handled")  # noqa: B904
    except KeyError as error:
        assert words.first_cause(error) is first


def test_numbers_that_were_written_down_are_seen():
    def check(case):
        if case != "shown":
            raise NotYet("5 is not 6")

    for_each(["shown"], check, shown=("", "hidden"))
    assert refused(for_each, ["hidden"], check, shown=("the text", "shown")) == "5 is not 6\nOn the text it is right"
    assert refused(for_each, ["hidden"], check, shown=("", "wrong too")) == "5 is not 6"


def test_an_answer_that_is_right_somewhere_is_told_where():
    def check(case):
        if case > 2:
            raise NotYet("wrong")

    for_each([1, 2], check)
    assert refused(for_each, [1, 2, 1, 3], check) == "wrong\nOn 1 ranks and 2 ranks it is right"
    assert refused(for_each, [3], check) == "wrong"
    assert refused(for_each, [1, 3], check, lambda case: "all") == "wrong", "it was right and wrong there"


def test_what_is_wrong_is_said_behind_where_and_keeps_its_cause():
    with pytest.raises(NotYet, match="^here: there: wrong$") as caught, saying("here: "):
        try:
            raise KeyError
        except KeyError as error:
            with saying("there: "):
                raise NotYet("wrong") from error
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("ask, value, found", [
    (one_number, 3, 3.0), (one_number, torch.tensor([[2.5]]), 2.5), (one_number, np.float32(0.5), 0.5),
    (one_number, True, "it returns True (bool); a number must come back"),
    (one_number, torch.ones(2), "it returns a tensor [2]; a number must come back"),
    (one_number, 2j, "it returns 2j (complex); a number must come back"),
    (one_number, torch.ones(1, device="meta"), "it returns a tensor on meta with layout torch.strided; an ordinary one"
     ", with numbers in this computer's memory, must come back"),
    (lambda value: whole_numbers(value, "ids"), (1, 2), [1, 2]),
    (lambda value: whole_numbers(value, "ids"), [1, 2.0], "it returns [1, 2.0]; whole numbers must come back, "
     "ids"),
    (lambda value: whole_numbers(value, "ids"), [*range(30), 2.0], "it returns 2.0 (float) among them; whole numbers "
     "must come back, ids"),
    (lambda value: whole_numbers(value, "ids"), 3, "it returns 3 (int); a list of whole numbers must come back, ids"),
    (lambda value: several(value, "k, v"), (1, 2), [1, 2]),
    (lambda value: several(value, "k, v"), [1], "it returns a list of 1; k, v must come back")])
def test_numbers_and_lists_that_come_back(ask, value, found):
    assert (refused(ask, value) if isinstance(found, str) else ask(value)) == found


def test_a_line_of_the_library_is_not_the_learners():
    frames = ["/x/site-packages/torch/nn.py", words.__file__, "<frozen importlib>", copy.__file__]
    assert [words.is_learners(file) for file in frames] == [False] * 4
    assert words.is_learners("cell.py")
