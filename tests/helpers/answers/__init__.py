"""What learners really answer: data, one file a notebook, read by ``tests/lesson/test_exercises.py``.

Each file holds ``ANSWERS = {exercise: [Wrong(code, words), Right(code), …]}``. ``code`` is what the learner's cell
holds; `torch`, `F` (torch.nn.functional), the collectives with `rank` and `world_size`, and patient zero's `attention`
and `linear` are imported for it. The solutions of the notebooks are right answers of their own and need no entry.
"""

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from course.judge import own_engine

_SETUP = own_engine.SETUP + "from patient_zero import attention, linear\n"
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "notebooks"))  # where patient zero lies


@dataclass(frozen=True)
class Wrong:
    """An answer that must be refused on every number of ranks in ``sizes``, in words among which are ``words``."""

    code: str
    words: str
    sizes: tuple[int, ...] = (2, 1, 3)


@dataclass(frozen=True)
class Right:
    """Another way to be right; the notebook's own is tried on one and on three ranks, too."""

    code: str
    sizes: tuple[int, ...] = (2,)


def answers() -> dict[str, list[Wrong | Right]]:
    """``{exercise: its answers}``."""
    found = {}
    for file in iter_modules(__path__):
        for name, some in import_module(f"{__name__}.{file.name}").ANSWERS.items():
            found[name] = [*found.get(name, ()), *some]
    return found


def defined(code: str, name: str):
    """What ``code`` calls ``name``, as from a notebook's cell: its lines can be shown, and ranks get it by value."""
    return own_engine.defined(code, name, _SETUP)
