"""``python -m tplab faults``: the museum as a list, its faults with their code, and the score of the diagnosis."""

import argparse
import json
import textwrap

from tplab.checks import quoted
from tplab.errors import TplabError
from tplab.files import check_writable, write_file
from tplab.pool import available_cores

SIZES, DTYPES = "2,3", "float32,bfloat16"  # of a score where nothing else is said


class ScoreError(TplabError):
    """An option of the score makes no sense; the message says which values would."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The names, and the options of ``faults score``, which are refused without it."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to show with broken and right code; or: "
                        "score [MODEL …], which breaks the engine with each fault and asks the diagnosis")
    parser.add_argument("--tp", default=SIZES, metavar="N,N", help=f"score: numbers of ranks ({SIZES})")
    parser.add_argument("--dtype", default=DTYPES, metavar="D,D", help=f"score: dtypes ({DTYPES})")
    parser.add_argument("--json", metavar="FILE", help="score: write every run")
    parser.add_argument("--picture", metavar="FILE.png", help="score: draw which fault was taken for which")


def main(chosen: argparse.Namespace) -> int:
    """The command ``faults``."""
    from tplab.faults import MUSEUM, fault

    if chosen.names[:1] == ["score"]:
        return _score(chosen)
    _refuse_options(chosen)
    if not chosen.names:
        for notebook in dict.fromkeys(one.notebook for one in MUSEUM.values()):
            print(notebook)
            print("\n".join(f"  {one.name:30}{one.title}" for one in MUSEUM.values() if one.notebook == notebook))
        return 0
    for one in [fault(name) for name in chosen.names]:
        parts = [str(one), textwrap.fill(one.symptom, 90), f"first point: {one.first_point}; notebook: {one.notebook}",
                 "broken:\n" + textwrap.indent(one.broken, "    "), "right:\n" + textwrap.indent(one.right, "    "),
                 *(f"seen in the wild: {text}\n  {link}" for text, link in one.sightings)]
        print("\n\n".join(parts) + "\n")
    return 0


def _refuse_options(chosen) -> None:
    without = {"tp": SIZES, "dtype": DTYPES, "json": None, "picture": None}
    given = [name for name, default in without.items() if getattr(chosen, name) != default]
    if given:
        raise ScoreError(f"--{given[0]} belongs to the score: python -m tplab faults score [MODEL …] --{given[0]} …")


def _score(chosen) -> int:
    """Run it; exit code 1 if a fault was named wrongly, not named or not seen, or a healthy engine blamed."""
    from tplab.faults.score import score
    from tplab.model.dtypes import parse_dtype

    sizes = _listed(chosen.tp)
    if not all(one.isdecimal() and int(one) for one in sizes):
        raise ScoreError(f"--tp takes numbers of ranks from 1 up, such as 2,3, not {quoted(chosen.tp)}")
    dtypes = _listed(chosen.dtype)
    for dtype in dtypes:
        parse_dtype(dtype)
    for path in (chosen.json, chosen.picture):
        if path:
            check_writable(path)
    found = score(chosen.names[1:], [int(one) for one in sizes], dtypes, available_cores(),
                  lambda line: print(line, flush=True))
    print(found)
    if chosen.json:
        runs = [run.__dict__ | {"said": list(run.said)} for run in found.runs]
        write_file(chosen.json, lambda new: new.write_text(json.dumps(runs, indent=1), encoding="utf-8"))
    if chosen.picture:
        from tplab.show import confusion_figure

        write_file(chosen.picture, lambda new: new.write_bytes(confusion_figure(found).png()))
    return 0 if found.ok else 1


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
