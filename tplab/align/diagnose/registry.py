"""The hypotheses of this folder: which are asked about what, and in which order.

A hypothesis is a function marked with :func:`hypothesis`, in any file of this folder; nothing else names it. Files are
gone through in alphabetical order, each from top to bottom, and the first that fits is the diagnosis; others that fit
and name a fault are its lookalikes. So what fits little stands before what fits much.
"""

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module

from tplab.align.diagnose.case import Diagnosis
from tplab.align.points import LAYER_POINTS

COST = "cost"  # asked with an AlignReport whose numbers are all right
ERROR = "error"  # asked with the error in which a run ended
_SUBJECTS = {"embed", *LAYER_POINTS, "gate", "up", "norm", "logits", COST, ERROR}

Hypothesis = Callable[..., Diagnosis | None]


def hypothesis(*subjects: str, last: bool = False) -> Callable[[Hypothesis], Hypothesis]:
    """Mark a function as a hypothesis about the trace points of these short names, to be asked with a :class:`Case`
    whose first divergence is at one of them; or about ``COST`` or ``ERROR``. Where it does not fit it is None. One that
    fits much, and says little, is asked ``last``: only where no other fits."""
    if not subjects or not _SUBJECTS.issuperset(subjects):
        raise ValueError(f"a hypothesis is about some of {', '.join(sorted(_SUBJECTS))}, not {subjects}")

    def mark(function: Hypothesis) -> Hypothesis:
        function.subjects, function.last = subjects, last
        return function
    return mark


def hypotheses(subject: str, last: bool = False) -> Iterator[Hypothesis]:
    """All that are marked with ``subject``, in the order in which they are asked; those that are asked ``last`` apart.
    """
    for name in sorted(module.name for module in pkgutil.iter_modules(import_module(__package__).__path__)):
        theme = import_module(f"{__package__}.{name}")
        yield from (found for found in vars(theme).values()
                    if subject in getattr(found, "subjects", ()) and found.last == last
                    and found.__module__ == theme.__name__)
