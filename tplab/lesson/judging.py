"""Judging a learner's function: it takes the place of the engine's on every rank, and Hugging Face decides."""

from collections.abc import Callable

from tplab.lesson.exercise import check


def verdict(function: Callable, target: str, examine: Callable, agreed: str):
    """Print ``PASS`` and what ``agreed``, or ``NOT YET`` and the cause; returns the report, None if there is none.

    Whatever goes wrong in the learner's code ends in such a line, so that *Run All* goes on. ``target``: the dotted
    name that ``function`` replaces. ``examine`` takes the :class:`tplab.patch.Patch`; returns an ``AlignReport`` with
    the function in the engine, and what is wrong with it in the learner's terms (the empty string if nothing is; only
    else may there be no report).
    """
    from tplab.align import diagnose
    from tplab.patch import Patch

    name = getattr(function, "__name__", repr(function))
    report = None
    try:
        report, hint = examine(Patch(target, function))
        hint = hint or ("" if report.ok else diagnose(report).sentence)
    except Exception as error:
        hint = f"{type(error).__name__}: {error}"
    check(name if hint else f"{name}: {agreed}", not hint, hint)
    return report


def judge(function: Callable, target: str, model, prompt, *, problem: Callable[[Callable], str] = lambda function: "",
          tensor_parallel_size: int = 2, dtype: str = "float32"):
    """Put ``function`` at ``target`` in the engine, align the model, and print ``PASS``, or ``NOT YET`` and the cause.

    As :func:`verdict`; the other arguments are those of :func:`tplab.align.align`. ``problem`` looks at the function
    before the ranks do, on a small example; says what is wrong with it in the learner's terms, or the empty string.

        >>> mine = lesson.judge(mask_scores, "tplab.model.attention.mask_scores", model, prompt)
        NOT YET  mask_scores: 100% NaN although q, k and v are finite …
    """
    from tplab.align import align

    def examine(patch):
        hint = problem(function)
        return align(model, prompt, tensor_parallel_size=tensor_parallel_size, dtype=dtype, patches=[patch]), hint

    ranks = f"{tensor_parallel_size} rank{'s' * (tensor_parallel_size > 1)}"
    return verdict(function, target, examine, f"on {ranks}, every trace point agrees with Hugging Face")
