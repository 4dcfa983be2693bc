"""Products of parameters by turns: each value of each once, in few cases; all of them with ``pytest --all-cases``."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product

ALL = False  # set by tests/conftest.py before a test file is imported


def by_turns(*parameters: Sequence, least: int = 8) -> list[tuple]:
    """Cases for ``@pytest.mark.parametrize("a, b, …", by_turns(A, B, …))``.

    At least ``least`` cases, and as many as it takes until each value of each parameter was in one; always the same
    ones. The next case has the values, and then the pairs of values, that were taken least often so far.
    """
    every = [tuple(enumerate(places)) for places in product(*(range(len(values)) for values in parameters))]
    values, pairs, chosen = Counter(), Counter(), []
    missing = {(n, place) for n, some in enumerate(parameters) for place in range(len(some))}
    while not ALL and len(chosen) < len(every) and (missing or len(chosen) < least):
        case = min(set(every) - set(chosen), key=lambda case: (
            sum(values[value] for value in case), sum(pairs[pair] for pair in combinations(case, 2)), case))
        chosen.append(case)
        values.update(case)
        pairs.update(combinations(case, 2))
        missing -= set(case)
    return [tuple(parameters[n][place] for n, place in case) for case in sorted(every if ALL else chosen)]
