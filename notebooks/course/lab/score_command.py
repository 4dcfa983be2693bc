"""``python -m course score``: breaks the engine with each fault of the museum and asks the diagnosis for its name."""

import argparse

from course.lab.score import score
from tplab.checks import quoted
from tplab.errors import TplabError
from tplab.model.dtypes import parse_dtype
from tplab.pool import available_cores


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="the models to break (those of the museum)")
    parser.add_argument("--tp", default="2,3", metavar="N,N", help="numbers of ranks (2,3)")
    parser.add_argument("--dtype", default="float32,bfloat16", metavar="D,D", help="dtypes (float32,bfloat16)")


def main(chosen: argparse.Namespace) -> int:
    """Run it; exit code 1 if a fault was named wrongly, not named or not seen, or a healthy engine blamed."""
    sizes = _listed(chosen.tp)
    if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
        raise TplabError(f"--tp takes numbers of ranks from 1 up, such as 2,3, not {quoted(chosen.tp)}")
    dtypes = _listed(chosen.dtype)
    for dtype in dtypes:
        parse_dtype(dtype)
    result = score(chosen.models, [int(size) for size in sizes], dtypes, available_cores(),
                   lambda line: print(line, flush=True))
    print(result)
    return 0 if result.ok else 1


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
