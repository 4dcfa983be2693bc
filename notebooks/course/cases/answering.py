"""*Where, what, why*: what an answer to a case may say, and what is wrong with it, in words."""

from collections.abc import Sequence

from course.cases import CASES, CaseFile
from course.cases.case_file import NOWHERE
from course.judge.words import NotYet
from tplab.checks import did_you_mean
from tplab.show.phrases import in_width


def kinds() -> list[str]:
    """The kinds of mistakes, of all cases."""
    return sorted({kind for file in CASES.values() for kind in file.kinds})


def choices(file: CaseFile, is_found: bool) -> str:
    """What *what* can be, and *why* where the place is found: it would tell where to look."""
    shown = {"what": kinds()} | ({"why": sorted(file.why)} if is_found else {})
    lines = [line for name, some in shown.items()
             for line in (f"{name}:", *(in_width(f"  {choice}", "    ") for choice in some))]
    return "\n".join(lines + ["why: asked when where is right"] * (not is_found))


def place_called(name, known: Sequence[str]) -> str:
    """The place of that name; NotYet if there is none."""
    if name in (*known, NOWHERE):
        return name
    if str(name).startswith("layers.") or name in ("embed", "norm", "logits"):
        raise NotYet(f"{name!r} is a trace point; name the function that computes it (search tplab/model for point()")
    methods = [place for place in known if place.endswith(f".{name}")]
    meant = f"; its class is missing: {' or '.join(methods)}." if methods else did_you_mean(name, known) or "."
    raise NotYet(f"there is no function {name!r} in the engine's core{meant} If the engine is right, say "
                 f"{NOWHERE!r}.")


def check_where(file: CaseFile, where: str | Sequence[str], known: Sequence[str]) -> None:
    """NotYet if *where* is not where something is wrong."""
    true, answers = [*file.repair], [place_called(name, known) for name in _listed(where)]
    if not answers:
        raise NotYet("where is not answered: name the function that is wrong (report.guilty names the points)")
    if len(answers) > 3:
        raise NotYet(f"where: {len(answers)} places are named; a case has one or two")
    for place in answers:
        if place not in true:
            why = file.elsewhere.get(place) or (
                "the engine is not right" if place == NOWHERE else
                "what it does with its inputs is right")
            right = " and ".join(answer for answer in answers if answer in true and answer != NOWHERE)
            raise NotYet(f"not {place}: {why}" + f" ({right}: yes)" * bool(right))
    if missing := len(set(true) - set(answers)):
        raise NotYet(f"{' and '.join(answers)}: yes, and that is not all: with this alone mended the engine is still "
                     f"wrong ({missing} more to find)")


def check_what_and_why(file: CaseFile, where: str | Sequence[str], what: str | Sequence[str], why: str) -> None:
    """NotYet if *what* or *why* is wrong; ``where`` is right, and *what* must be in its order."""
    answers = [_chosen("what", answer, kinds()) for answer in _listed(what)]
    if not answers:
        raise NotYet("where is right; what is not answered: case.choices() prints what it can be")
    for answer in answers:
        if answer not in file.kinds:
            look = ("no function is wrong, so what does the report mistake?" if NOWHERE in file.repair else
                    "compare what goes in with what comes out there")
            raise NotYet(f"where is right; what is not {answer!r}: {file.not_what.get(answer, look)}")
    if set(file.kinds) - set(answers):
        raise NotYet(f"where is right, and so is {answers[0]!r}; the other bug is of another kind")
    by_place, found = {bug.place: bug.what for bug in file.bugs}, _listed(where)
    if len(answers) == len(found) > 1 and answers != [by_place[place] for place in found]:
        raise NotYet("where and what are right, but not in the same order: which kind of mistake is in which function?")
    if not why:
        raise NotYet("where and what are right; why is not answered: case.choices() prints what it can be")
    if wrong := file.why[_chosen("why", why, sorted(file.why))]:
        raise NotYet(f"where and what are right; why is not: {wrong}")


def _listed(answer: str | Sequence[str]) -> list[str]:
    """One or several, as a list."""
    return list(answer) if isinstance(answer, list | tuple | set) else [answer] * (answer != "")


def _chosen(question: str, answer, options: list[str]) -> str:
    """One of the options, by its words or their beginning."""
    if not isinstance(answer, str):
        raise NotYet(f"{question}: {answer!r} is no string; give one of the choices, or its beginning")
    fitting = [option for option in options if answer and option.startswith(answer)]
    if len(fitting) != 1:
        raise NotYet(f"{question}: {answer!r} is none of the choices, or begins several; case.choices() prints them")
    return fitting[0]
