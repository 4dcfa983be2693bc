"""What an exercise needs: a check that says PASS or NOT YET, a caught error."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tplab.show.phrases import say

SENTENCE = "The old lighthouse keeper climbed the stairs every evening, because the ships at sea"


def default_prompt(model) -> str:
    """The prompt a notebook uses when its reader gives none: a held-out story's opening for fable, else a sentence.

        >>> prompt = prompt or lesson.default_prompt(model)
    """
    from tplab import fable

    name = os.fspath(getattr(model, "name", model))
    return fable.default_prompt() if name == "fable" else SENTENCE


def check(name: str, condition, hint: str | Callable[[], str] = "") -> None:
    """Print ``PASS name``, or ``NOT YET name`` and a hint in the learner's terms.

    ``hint``: what to look at; a function is called only when it is needed.

        >>> lesson.check("no NaN", not out.isnan().any(), "is something multiplying 0 by -inf?")
        NOT YET  no NaN: is something multiplying 0 by -inf?
    """
    if condition:
        print(f"PASS  {name}")
    else:
        hint = hint() if callable(hint) else hint
        print(f"NOT YET  {name}" + (f": {hint}" if hint else ""))


@contextmanager
def shown_error(brief: bool = False) -> Iterator[None]:
    """Run a block that is expected to fail and print its error, so that *Run All* and papermill go on.

    ``brief``: at most three lines, with the line of the cell, as a verdict has them.

        >>> with lesson.shown_error():
        ...     pool.run(broken)
    """
    try:
        yield
    except Exception as error:
        from tplab.lesson.mine import in_words

        say(in_words(error) if brief else f"{type(error).__name__}: {error}")
    else:
        print("No error was raised.")
