"""Values at the door: what is a number, what is none, and error messages that are never errors themselves."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from tplab.checks import counted, number, positive_int, quoted, readable, whole_number
from tplab.errors import TplabError


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers(value):
    assert whole_number(value, 3, 3) == 3 and type(whole_number(value)) is int
    assert whole_number(value, 4) is None and whole_number(value, 0, 2) is None


@pytest.mark.parametrize("value",
                         [True, np.bool_(True), 3.0, Fraction(3), "3", None, [], math.nan, 10**400, torch.tensor(3)],
                         ids=lambda value: type(value).__name__)
def test_what_is_no_whole_number(value):
    assert whole_number(value) is None
    with pytest.raises(TplabError, match="size must be a whole number from 1 up, not"):
        positive_int("size", value, TplabError)


@pytest.mark.parametrize("value", [1, 0.5, np.float16(0.5), np.int8(1), Fraction(1, 2), Fraction(1, 10**400), 5e-324])
def test_numbers(value):
    assert type(number(value, 0, 1)) is float and number(value, 0, 1) == float(value)


@pytest.mark.parametrize("value", [True, np.bool_(True), math.nan, math.inf, 10**400, Fraction(10**400), "1", 1j, None,
                                   Decimal(1), np.array([1.0]), 1.5, -0.1], ids=lambda value: type(value).__name__)
def test_what_is_no_number(value):
    assert number(value, 0, 1) is None
    assert value in (1.5, -0.1) or number(value, -math.inf, math.inf) is None


def test_what_an_error_shows_is_never_an_error():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    assert quoted(10**5000) == "a value of type int" and quoted(Broken()) == "a value of type Broken"
    assert len(quoted([1] * 1000)) < 200 and quoted("short") == "'short'" and quoted("x" * 198) == repr("x" * 198)
    assert quoted("a" * 150 + "b" * 150) == "'" + "a" * 149 + "…" + "b" * 19 + "'"


def test_a_size_begins_at_one():
    assert repr(positive_int("size", np.int64(1), TplabError)) == "1"
    with pytest.raises(TplabError, match="size must be a whole number from 1 up, not 0"):
        positive_int("size", 0, TplabError)


def test_a_text_that_no_tokenizer_can_read():
    assert readable("é🦊", TplabError) == "é🦊"
    with pytest.raises(TplabError, match=r"character 3 is '\\udce9', half of a character"):
        readable(b"caf\xe9".decode(errors="surrogateescape"), TplabError)


def test_things_are_counted_in_words():
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
