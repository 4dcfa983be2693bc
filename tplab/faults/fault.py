"""A fault: a small patch on the clean engine, with its symptom, its first trace point and its sightings."""

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tplab.patch import Patch, original


def anywhere(config, tensor_parallel_size: int) -> str:
    """No condition: the fault shows with every model and every number of ranks."""
    return ""


def two_ranks(config, tensor_parallel_size: int) -> str:
    """The fault needs a second rank."""
    return "" if tensor_parallel_size > 1 else "one rank holds everything, so nothing can be cut or added up wrongly"


def only_if(holds: Callable[[object], object], otherwise: str, after: Callable[[object, int], str] = anywhere
            ) -> Callable[[object, int], str]:
    """A condition on the configuration, checked after another condition; ``otherwise`` says why the fault cannot show.
    """
    def why_not(config, tensor_parallel_size: int) -> str:
        return after(config, tensor_parallel_size) or ("" if holds(config) else otherwise)
    return why_not


@dataclass(frozen=True)
class Fault:
    """One bug of the museum: its key, and a few words for a table or a checkbox."""

    name: str
    title: str
    symptom: str  # what the user of the broken model notices, in a sentence
    # The trace point at which it must first show; or, where the numbers stay right, what shows it: "load" (bytes read),
    # "steps" (tokens computed), "blocks" (blocks in use), "drawn" (tokens drawn), "error" (it ends in an error).
    first_point: str
    notebook: str  # the one that teaches it
    patches: tuple[Patch, ...]
    shows_in: str = "forward"  # what has to be run to see it: tplab.align.align; or align_decode if "decode"
    sightings: tuple[tuple[str, str], ...] = ()  # where it happened: (what happened, link)
    needs: Callable[[object, int], str] = anywhere  # (config, tensor_parallel_size) → as why_not
    options: Mapping = field(default_factory=dict)  # of the run in which it shows, as ``align`` takes them
    below_bfloat16: bool = False  # its numbers differ by less than bfloat16 rounds

    def why_not(self, config, tensor_parallel_size: int = 2) -> str:
        """Why this fault changes nothing on a model with this many ranks; the empty string where it does."""
        return self.needs(config, tensor_parallel_size)

    def applies_to(self, config, tensor_parallel_size: int = 2) -> bool:
        """Whether the fault can show; :meth:`why_not` says why if it cannot."""
        return not self.why_not(config, tensor_parallel_size)

    @property
    def broken(self) -> str:
        """Source of the wrong code, ready to be shown; a function that replaces several is shown once."""
        return "\n\n".join(dict.fromkeys(_source(patch.replacement) for patch in self.patches))

    @property
    def right(self) -> str:
        """Source of the engine's own code at the same places."""
        return "\n\n".join(dict.fromkeys(_source(original(patch.target)) for patch in self.patches))

    def __str__(self) -> str:
        return f"{self.name}: {self.title}"


def bug(target: str, replacement: Callable, title: str, symptom: str, *sightings: tuple[str, str],
        more: tuple[Patch, ...] = (), **facts) -> Fault:
    """A :class:`Fault` with the name of ``replacement``, which replaces ``target``; ``more``: further patches."""
    return Fault(replacement.__name__, title, symptom, patches=(Patch(target, replacement), *more),
                 sightings=sightings, **facts)


def _source(function: Callable) -> str:
    return textwrap.dedent(inspect.getsource(function)).strip()
