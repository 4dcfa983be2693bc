"""*Where, what, why*: what an answer to a case may say, and what is wrong with it, in words."""

from collections.abc import Sequence

from course.cases import CASES, NOWHERE, CaseFile, places
from course.judge.words import NotYet
from tplab.checks import did_you_mean
from tplab.show.phrases import in_width


def kinds() -> list[str]:
    """The kinds of mistakes, of all cases."""
    return sorted({kind for file in CASES.values() for kind in file.kinds})


def choices(file: CaseFile, found: bool) -> str:
    """What *what* can be, and *why* where the place is ``found``: it would tell where to look."""
    shown = {"what": kinds()} | ({"why": sorted(file.why)} if found else {})
    lines = [line for name, some in shown.items()
             for line in (f"{name}:", *(in_width(f"  {one}", "    ") for one in some))]
    return "\n".join(lines + ["why: asked when where is right"] * (not found))


def place_called(name, known: Sequence[str]) -> str:
    """The place of that name, which may be dotted; NotYet if there is none."""
    if name in (*known, NOWHERE):
        return name
    found = [place for place in known if isinstance(name, str) and any(
        target == name or target.endswith("." + name) for target in places()[place])]
    if len(found) == 1:
        return found[0]
    meant = did_you_mean(str(name), known) or "."
    raise NotYet(f"where: there is no function {name!r} in the engine's core{meant} If the engine is right, say "
                 f"{NOWHERE!r}.")


def listed(given) -> list:
    """One or several, as a list."""
    if isinstance(given, list | tuple | set):
        return list(given)
    return [] if isinstance(given, str | None) and not given else [given]


def judge_answer(file: CaseFile, where, what, why: str, known: Sequence[str]) -> tuple[bool, str]:
    """Judge and print: whether *where* is right, and what is wrong in the answer; the empty string if nothing is."""
    found = False
    try:
        _where(file, [place_called(name, known) for name in listed(where)])
        found = True
        _what(file, [_chosen("what", one, kinds()) for one in listed(what)])
        _why(file, why)
    except NotYet as wrong:
        print(in_width(f"NOT YET  case {file.number}: {wrong}", " " * 9))
        return found, str(wrong)
    print(f"RIGHT  case {file.number}: where, what and why.")
    return found, ""


def _where(file: CaseFile, said: list[str]) -> None:
    true = [bug.place for bug in file.bugs] or [NOWHERE]
    if not said:
        raise NotYet("where is not answered: name the function that is wrong (report.guilty names the points)")
    if len(said) > 3:
        raise NotYet(f"where: {len(said)} places are named; a case has one or two")
    for place in said:
        if place not in true:
            why = file.elsewhere.get(place) or (
                "something is wrong in it" if place == NOWHERE else
                "what it makes of what it is given is right; a wrong input is not its fault")
            right = " and ".join(one for one in said if one in true and one != NOWHERE)
            raise NotYet(f"not {place}: {why}" + f" ({right}: yes)" * bool(right))
    if missing := len(set(true) - set(said)):
        raise NotYet(f"{' and '.join(said)}: yes, and that is not all: with this alone mended the engine is still "
                     f"wrong ({missing} more to find)")


def _what(file: CaseFile, said: list[str]) -> None:
    if not said:
        raise NotYet("where is right; what is not answered: case.choices() prints what it can be")
    for one in said:
        if one not in file.kinds:
            raise NotYet(f"where is right; what is not {one!r}: compare what goes in with what comes out there")
    if set(file.kinds) - set(said):
        raise NotYet(f"where is right, and so is {said[0]!r}; the other bug is of another kind")


def _why(file: CaseFile, said: str) -> None:
    if not said:
        raise NotYet("where and what are right; why is not answered: case.choices() prints what it can be")
    why = _chosen("why", said, sorted(file.why))
    if file.why[why]:
        raise NotYet(f"where and what are right; why is not: {file.why[why]}")


def _chosen(question: str, said, options: list[str]) -> str:
    """One of the options, by its words or their beginning."""
    found = [one for one in options if isinstance(said, str) and said and one.startswith(said)]
    if len(found) != 1:
        raise NotYet(f"{question}: {said!r} is none of the choices, or begins several; case.choices() prints them")
    return found[0]
