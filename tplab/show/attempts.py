"""Running a learner's code, which may fail in any way."""

from collections.abc import Callable


def attempt(name: str, function: Callable, *args, **kwargs):
    """The result of ``function(*args, **kwargs)``; where it raises, None and the line ``NOT YET name: the error``.

    A check goes on only where there is something to judge, and *Run All* never breaks on a learner's mistake.

    Args:
        name: what is being tried, as :func:`show.check` names it.
        function: the learner's function, or one of the lab's that runs it.

        >>> report = show.attempt("it runs on the ranks", align, model, prompt, patches=[Patch(target, mine)])
        NOT YET  it runs on the ranks: RankError: rank 0 raised TypeError: …
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        print(f"NOT YET  {name}: {type(error).__name__}: {error}")
        return None
