"""Run notebooks as a batch with papermill: every executed notebook is kept, one failure does not stop the rest.

``./launch run`` is the command line of this module. It parses the words and hands them over as one JSON object, so
that the options stand in one place: ``python -m tplab.show.batch '{"notebooks": [], "parameters": [], "out": null}'``.
"""

import ast
import json
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tplab.errors import TplabError

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
# A cell that hangs fails its notebook and the batch goes on. Ranks have a shorter timeout of their own.
SECONDS_PER_CELL = 900
# Each kernel would warn on the terminal that its (loopback, signed) connection is not encrypted, and say when it is stopped.
QUIET_KERNEL = ["--IPKernelApp.log_level=CRITICAL"]


class BatchError(TplabError):
    """A notebook or a parameter that does not exist, or a value of the wrong type; found before anything runs."""


@dataclass(frozen=True)
class Outcome:
    """What became of one notebook: ``failure`` is None or says in one line where and why it stopped."""

    notebook: Path  # the executed copy
    seconds: float
    failure: str | None

    @property
    def name(self):
        return self.notebook.stem


def choose(names, folder):
    """The notebooks meant by ``names``: a name, its number or a path each; all of ``folder`` if there are none."""
    series = sorted(folder.glob("*.ipynb"))
    if not names:
        if not series:
            raise BatchError(f"there is no notebook in {folder}")
        return series
    return [_choose_one(name, series) for name in names]


def _choose_one(name, series):
    path = Path(name)
    if path.suffix == ".ipynb" and path.is_file():
        return path.resolve()
    found = [one for one in series if path.name in (one.name, one.stem, one.stem.split("_")[0])]
    if len(found) != 1:
        raise BatchError(f"no notebook {name!r}; there are: {', '.join(one.stem for one in series) or 'none'}")
    return found[0]


def declared_parameters(notebook):
    """{name: default} of a notebook's cell tagged ``parameters``; {} if it has none."""
    import nbformat

    for cell in nbformat.read(notebook, as_version=4).cells:
        if "parameters" in cell.metadata.get("tags", []):
            statements = [one for one in ast.parse(cell.source).body if isinstance(one, ast.Assign)]
            return {one.targets[0].id: ast.literal_eval(one.value) for one in statements}
    return {}


def assign(notebooks, pairs):
    """{notebook: {name: value}}: each notebook gets those of ``pairs`` ([name, text]) that it declares.

    Values are read as papermill's own ``-p`` reads them. A name that no notebook declares, or a value whose type is not
    the default's, raises `BatchError`.
    """
    from papermill.cli import _resolve_type as read_value  # private, but the one definition of what `-p` means

    declared = {notebook: declared_parameters(notebook) for notebook in notebooks}
    known = {name: default for parameters in declared.values() for name, default in parameters.items()}
    values = {}
    for name, text in pairs:
        if name not in known:
            raise BatchError(f"no notebook has a parameter {name!r}; there are: {', '.join(sorted(known)) or 'none'}")
        value, default = read_value(text), known[name]
        if isinstance(default, str):
            value = text
        elif default is not None and type(value) is not type(default) and not (type(default) is float and type(value) is int):
            raise BatchError(f"parameter {name} is {type(default).__name__} (default {default!r}), not {text!r}")
        values[name] = value
    return {notebook: {name: values[name] for name in values if name in declared[notebook]} for notebook in notebooks}


def run_notebook(notebook, parameters, out):
    """Execute ``notebook`` into the folder ``out``; whatever happens inside it becomes an `Outcome`."""
    import papermill

    target = out / notebook.name
    started, failure = time.perf_counter(), None
    try:
        papermill.execute_notebook(
            notebook, target, parameters=parameters, cwd=notebook.parent,
            execution_timeout=SECONDS_PER_CELL, progress_bar=sys.stderr.isatty(), extra_arguments=QUIET_KERNEL,
        )  # fmt: skip
    except papermill.PapermillExecutionError as error:
        failure = f"cell [{error.exec_count}]: {_one_line(error)}"
    except Exception as error:  # a dead kernel, a cell that timed out, a file that is no notebook: the others still run
        failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return Outcome(target, time.perf_counter() - started, failure)


def _one_line(error):
    first = error.evalue.strip().splitlines()[:1]
    return ": ".join([error.ename, *first])


def table(outcomes):
    """The closing table as text: notebook, result, seconds, and why a notebook failed."""
    width = max(len(name) for name in ('notebook', *(outcome.name for outcome in outcomes)))
    lines = [f"{'notebook':{width}}  result  seconds"]
    for outcome in outcomes:
        result = "FAILED" if outcome.failure else "passed"
        lines.append(f"{outcome.name:{width}}  {result}  {outcome.seconds:7.1f}  {outcome.failure or ''}".rstrip())
    return "\n".join(lines)


def run(notebooks, parameters, out):
    """Run a batch; returns its outcomes and the path of the report's index.

    ``notebooks``: names as `choose` takes them. ``parameters``: [name, text] pairs. ``out``: folder for the executed
    notebooks and the report (None: a new one under ``runs/`` in the repository). Raises `TplabError` before anything
    runs if a notebook, a parameter or the model does not exist.
    """
    from tplab.show.report import write_report

    notebooks = choose(notebooks, FOLDER)
    assigned = assign(notebooks, parameters)
    for values in assigned.values():
        if "model" in values:
            values["model"] = _model_at_hand(values["model"])
    out = Path(out) if out else FOLDER.parent / "runs" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    out.mkdir(parents=True, exist_ok=True)

    outcomes = []
    for at, notebook in enumerate(notebooks, 1):
        print(f"[{at}/{len(notebooks)}] {notebook.stem} ...", flush=True)
        outcome = run_notebook(notebook, assigned[notebook], out)
        outcomes.append(outcome)
        print(f"      {outcome.failure or 'passed'}, {outcome.seconds:.1f} s", flush=True)
    return outcomes, write_report(outcomes, dict(parameters), out)


def _model_at_hand(model):
    """Open a model before several notebooks fail for the lack of it; its name, as a notebook's own folder can use it."""
    from tplab.checkpoint import fetch, open_checkpoint

    if model == "smollm2":
        fetch(model)
    folder = open_checkpoint(model).folder
    return str(folder.resolve()) if Path(model).is_dir() else model


def main(arguments):
    try:
        outcomes, index = run(**json.loads(arguments[0]))
    except TplabError as error:
        print(f"launch run: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nlaunch run: stopped; the notebooks that had run are kept, without a report", file=sys.stderr)
        return 130
    print(f"\n{table(outcomes)}\n\nreport: {index}")
    return 1 if any(outcome.failure for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
