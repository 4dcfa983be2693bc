"""A learner's function on logical ranks: its collectives counted, its mistakes said in at most three lines."""

from collections.abc import Callable

from tplab.lesson.mine import NotYet, in_words
from tplab.ranks import OpRecord, RankError, logical_ranks, op_log, rank


def on_ranks(size: int, call: Callable[[int], object]) -> tuple[list, list[list[OpRecord]]]:
    """``call(rank)`` on each of ``size`` logical ranks: what each gives back, and the collectives of each.

    Raises :class:`NotYet` if a rank raises, or if the ranks do not meet in the same collectives; what every rank says
    is said once, what one says with its number.

        >>> results, ops = on_ranks(3, lambda rank: mine(ids, shards[rank], parts[rank]))
    """
    def one():
        return call(rank()), op_log()

    try:
        answers = logical_ranks(size, one)
    except RankError as error:
        wrong = {r: cause.exception for r, cause in sorted(error.causes.items()) if isinstance(cause.exception, NotYet)}
        if not wrong:
            raise NotYet(in_words(error)) from error
        said = str(next(iter(wrong.values())))
        alike = [r for r, one in wrong.items() if str(one) == said]
        where = "" if len(alike) == size else f"on rank {', '.join(map(str, alike))} of {size}: "
        raise NotYet(where + said) from error
    results, ops = zip(*answers)
    return list(results), list(ops)


def count_ops(ops: list[list[OpRecord]], wanted: dict[str, int]) -> None:
    """:class:`NotYet` unless every rank took part in exactly these collectives: ``{"all_reduce": 1}``."""
    for r, log in enumerate(ops):
        found = [record.op for record in log]
        if sorted(found) != sorted(op for op, count in wanted.items() for _ in range(count)):
            said = ", ".join(f"{count} {op}{'s' * (count > 1)}" for op, count in wanted.items()) or "no collective"
            mine = ", ".join(found) or "none"
            raise NotYet(f"on rank {r} of {len(ops)} it calls {mine}; {said} must be enough")
