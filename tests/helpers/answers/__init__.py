"""What learners answer, right and wrong: text, one file a notebook, read by
``tests/course_tests/judge/test_exercises.py``.

A line ``### NAME wrong`` or ``### NAME right`` begins an answer to that exercise; the lines below it are what the
learner's cell holds. `torch`, `F` (torch.nn.functional) and the collectives with `rank` and `world_size` are imported
for it; or, where it begins so, ``edit old -> new`` of the notebook's solution. The solutions of the notebooks are right
answers of their own and need no entry.
"""

import re
from pathlib import Path

from helpers.notebooks import solutions

from course.exercises import own_engine


def answers() -> list[tuple[str, bool, str]]:
    """``(exercise, whether it is right, code)`` of each."""
    found = []
    for file in sorted(Path(__file__).parent.glob("nb*.txt")):
        _, *parts = re.split(r"^### (\w+) (right|wrong)\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        found += [(name, kind == "right", _written(name, code)) for name, kind, code in zip(*[iter(parts)] * 3)]
    return found


def _written(name: str, code: str) -> str:
    if not code.startswith("edit "):
        return code
    old, new = code.removeprefix("edit ").rstrip("\n").split(" -> ")
    assert old in (solution := solutions([name])[name]), old
    return solution.replace(old, new)


def defined(code: str, name: str):
    """What ``code`` calls ``name``, as from a notebook's cell: its lines can be shown, and ranks get it by value."""
    return own_engine.defined(code, name)
