"""``python -m course``: run notebooks, report on executed ones, score the diagnosis, measure.

Exit codes: 0 done, 1 a notebook failed or a fault was not named, 2 bad input, 130 interrupted.
"""

import argparse
import sys

from course.cost import race
from course.lab import batch, report, score
from tplab.cli import MODEL
from tplab.errors import TplabError


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    chosen = build_parser().parse_args(arguments)
    try:
        return chosen.run(chosen)
    except TplabError as error:
        print(f"course: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = argparse.ArgumentParser(prog="python -m course", description="The course's commands.", allow_abbrev=False)
    parser.set_defaults(run=lambda chosen: parser.print_help() or 0)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, module, about in (("run", batch, "Run notebooks with papermill and write an HTML report."),
                                ("report", report, "Write the report over the executed notebooks in a folder."),
                                ("score", score, "Break the engine with each fault: is it named? (minutes)"),
                                ("bench", race, "Measure beside Hugging Face and vLLM.")):
        made = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        module.add_options(made, *([MODEL] if module is race else []))
        made.set_defaults(run=module.main)
    return parser


if __name__ == "__main__":
    sys.exit(main())
