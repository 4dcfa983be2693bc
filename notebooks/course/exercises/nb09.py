"""Notebook 09: the last cure of patient zero, judged by the check's report on the whole engine with all cures: nothing
may differ from Hugging Face."""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch

from course.judge.differ import kind
from course.judge.exercise import Exercise
from course.judge.setting import in_learners_words
from course.judge.words import NotYet, first_cause, in_words
from tplab.errors import TplabError
from tplab.shard import split_evenly

if (_NOTEBOOKS := str(Path(__file__).resolve().parents[2])) not in sys.path:
    sys.path.append(_NOTEBOOKS)  # where patient zero lies, on the ranks too


class _Late:
    """A module of patient zero that is loaded by its first use: the other notebooks need none."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str):
        return getattr(import_module(self._name), name)


linear = _Late("patient_zero.linear")


def with_cures(cures: Mapping[str, Callable], function: Callable, *args):
    """``function(*args)`` while each of ``cures`` stands in the place of the function of ``patient_zero`` so called."""
    with ExitStack() as stack:
        for name, cure in cures.items():
            try:
                stack.enter_context(mock.patch(f"patient_zero.{name}", cure))
            except (ImportError, AttributeError):
                raise TplabError(f"patient_zero has no function {name!r}; one is 'linear.share'") from None
        return function(*args)


def kv_share(num_heads, num_kv_heads):
    first, count = linear.share(num_heads)
    read = torch.arange(first, first + count) // (num_heads // num_kv_heads)
    heads, repeats = read.unique(return_counts=True)
    return heads[0].item(), len(heads), repeats


def in_patient_zero(setting, answer) -> None:
    """``setting.engine(cures)`` runs patient zero with these besides those found so far, on the notebook's ranks, and
    gives the check's report."""
    if setting.engine is None:
        raise NotYet("a cure is judged in patient zero, as notebook 09 does it with engine=…")
    share = wrong_share(answer, setting.checkpoint.config)
    try:
        report = setting.engine({"linear.kv_share": answer})
    except TplabError as error:
        raise NotYet(share or f"in the engine, {in_words(first_cause(error))}") from error
    stopped = sorted(report.stopped, key=lambda words: "Abandoned" in words)  # those that waited for another rank last
    wrong = [*map(in_learners_words, report.diagnoses), *report.recording.contradictions, *stopped]
    wrong += [f"{point} is not what its own inputs give" for point in report.guilty]
    if share or wrong:
        raise NotYet(share or f"in the engine: {wrong[0]}")


def heads_read(cure, heads: int, kv_heads: int, rank: int, size: int) -> tuple[list[int], list[int]]:
    """The KV head that each query head of a rank reads, and those that the rank holds."""
    def of_this_rank(total):
        part = split_evenly(total, size)[rank]
        return part.start, len(part)

    with mock.patch("patient_zero.linear.share", of_this_rank), mock.patch.multiple(  # linear.tp_rank asks it, too
            "torch.distributed", is_initialized=lambda: True, get_rank=lambda: rank, get_world_size=lambda: size):
        given = cure(heads, kv_heads)
        if not isinstance(given, list | tuple) or len(given) != 3:
            returned = f"{len(given)} values" if isinstance(given, list | tuple) else repr(given)
            raise NotYet(f"it returns {returned}, and should return three values: the first KV head, how many, and how "
                         "often each is repeated")
        first, count, repeats = given
        if not all(isinstance(number, int) for number in (first, count)):
            raise NotYet(f"the first KV head is {kind(first)}, and how many is {kind(count)}; whole numbers are right")
        if isinstance(repeats, list | tuple):
            raise NotYet("how often each head is repeated is a list, and repeat_interleave takes a number or a tensor")
        if count < 1:
            raise NotYet(f"on {size} ranks, rank {rank} holds no KV head: which one does its last query head read?")
        held = torch.arange(first, first + count)
        return held.repeat_interleave(torch.as_tensor(repeats)).tolist(), held.tolist()


def wrong_share(answer, config) -> str:
    """The first rank of two to four whose heads are wrong; the empty string if there is none."""
    heads = config.num_heads, config.num_kv_heads
    for size in range(2, min(4, config.num_heads) + 1):
        for rank in range(size):
            right, _ = heads_read(kv_share, *heads, rank, size)
            this_rank = f"with {heads[0]} query and {heads[1]} KV heads on {size} ranks, rank {rank}"
            try:
                read, held = heads_read(answer, *heads, rank, size)
            except NotYet as wrong:
                return str(wrong)
            except Exception as error:
                return f"{this_rank}: {in_words(error)}"
            if read != right:
                return f"{this_rank}'s query heads read the KV heads {read}, and {right} is right"
            if held != (needed := sorted(set(right))):
                return f"{this_rank} holds the KV heads {held}, and its query heads read only {needed}"
    return ""


EXERCISES = [Exercise("09", kv_share, engine=in_patient_zero,
                      agreed="the check finds no difference from Hugging Face in the whole engine")]
