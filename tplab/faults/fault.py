"""What a fault is: a small patch on the clean engine, and what there is to know about it."""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from tplab.patch import Patch, original


def anywhere(config, tensor_parallel_size: int) -> str:
    """No condition: the fault shows with every model and every number of ranks."""
    return ""


def two_ranks(config, tensor_parallel_size: int) -> str:
    """The fault needs a second rank."""
    return "" if tensor_parallel_size > 1 else "one rank holds everything, so nothing can be cut or added up wrongly"


@dataclass(frozen=True)
class Fault:
    """One bug of the museum.

    Attributes:
        name: its key, as ``faults.fault(name)`` takes it.
        title: a few words for a table or a checkbox.
        symptom: what the user of the broken model notices, in a sentence.
        first_point: the trace point at which the fault must first show; or, where the numbers stay right, what shows
            it: ``"load"`` (bytes read), ``"steps"`` (tokens computed), ``"blocks"`` (blocks in use), ``"drawn"``
            (tokens drawn), ``"error"`` (it ends in an error).
        notebook: the notebook that teaches it.
        patches: what is replaced by what.
        shows_in: what has to be run to see it: ``"forward"`` (:func:`tplab.align.align`) or ``"decode"``
            (:func:`tplab.align.align_decode`).
        sightings: where it happened, as ``(what happened, link)``.
        needs: ``(config, tensor_parallel_size)`` → why the fault cannot show there; empty if it can.
    """

    name: str
    title: str
    symptom: str
    first_point: str
    notebook: str
    patches: tuple[Patch, ...]
    shows_in: str = "forward"
    sightings: tuple[tuple[str, str], ...] = ()
    needs: Callable[[object, int], str] = anywhere

    def why_not(self, config, tensor_parallel_size: int = 2) -> str:
        """Why this fault changes nothing on a model with this many ranks; the empty string where it does."""
        return self.needs(config, tensor_parallel_size)

    def applies_to(self, config, tensor_parallel_size: int = 2) -> bool:
        """Whether the fault can show; :meth:`why_not` says why if it cannot."""
        return not self.why_not(config, tensor_parallel_size)

    @property
    def broken(self) -> str:
        """Source of the wrong code, ready to be shown."""
        return "\n\n".join(_source(patch.replacement) for patch in self.patches)

    @property
    def right(self) -> str:
        """Source of the engine's own code at the same places."""
        return "\n\n".join(_source(original(patch.target)) for patch in self.patches)

    def __str__(self) -> str:
        return f"{self.name}: {self.title}"


def _source(function: Callable) -> str:
    return textwrap.dedent(inspect.getsource(function)).strip()
