"""Run notebooks as a batch with papermill: every executed notebook is kept, one failure does not stop the rest.

``./launch run`` and ``python -m course run`` are its command lines.
"""

import ast
import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from course.lab.report import MARK, write_report
from tplab.checks import did_you_mean
from tplab.errors import TplabError
from tplab.files import check_writable

FOLDER = Path(__file__).resolve().parents[2]
# A cell that hangs fails its notebook and the batch goes on. Ranks have a shorter timeout of their own.
SECONDS_PER_CELL = 900
STOPPED = "stopped by Ctrl-C"
# Each kernel would warn on the terminal that its (loopback, signed) connection is not encrypted, and say when it is
# stopped.
QUIET_KERNEL = ["--IPKernelApp.log_level=CRITICAL"]


class BatchError(TplabError):
    """A notebook or a parameter that does not exist, or a value of the wrong type; found before anything runs."""


@dataclass(frozen=True)
class Outcome:
    """The result of one notebook."""

    notebook: Path  # the one that was asked for; its results have other files, which are called ``name``
    executed: Path  # the executed copy; there is none if the notebook failed before it started
    seconds: float
    failure: str | None  # None, or in one line where and why it stopped

    @property
    def name(self):
        return self.executed.stem

    @property
    def page(self):
        return self.executed.with_suffix(".html")


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
    if path.suffix == ".ipynb" and os.path.isfile(path):  # not Path's own, which fails for a name too long
        return path.resolve()
    found = [one for one in series if path.name in (one.name, one.stem, one.stem.split("_")[0])]
    if len(found) != 1:
        known = [one.stem for one in series]
        near = did_you_mean(name, known) or f"; there are: {', '.join(known) or 'none'}"
        raise BatchError(f"no notebook {name!r}{near}")
    return found[0]


def declared_parameters(notebook):
    """{name: default} of a notebook's cell tagged ``parameters``; {} if it has none. `BatchError` if it is no notebook.

    A default that is no literal (an expression) is None, which stands for any type.
    """
    import nbformat
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        cells = nbformat.read(notebook, as_version=4).cells
        sources = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    except Exception as error:  # JSON of any other kind comes as AttributeError, KeyError, TypeError and more
        raise BatchError(f"not a notebook: {_first_line(error)}") from error
    try:
        code = "".join(map(TransformerManager().transform_cell, sources[:1]))  # magics become plain Python
        return dict(pair for statement in ast.parse(code).body for pair in _assigned(statement))
    except (SyntaxError, ValueError) as error:
        raise BatchError(f"the parameters cell is not Python: {_first_line(error)}") from error


def _assigned(statement):
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    for target in targets:
        if isinstance(target, ast.Name) and statement.value is not None:
            try:
                yield target.id, ast.literal_eval(statement.value)
            except (ValueError, TypeError):  # not a literal; {[]: 1} looks like one
                yield target.id, None


def assign(notebooks, pairs):
    """Each notebook gets those of ``pairs`` ([name, text]) that it declares: ``{notebook: {name: value}}``.

    The second result is ``{notebook: failure}`` of those that cannot be run at all. Values are read as papermill's own
    ``-p`` reads them. A name that no notebook declares, or a value whose type is not the default's, raises
    `BatchError`.
    """
    from papermill.cli import _resolve_type as read_value  # private, but the one definition of what `-p` means

    declared, failures = {}, {}
    for notebook in notebooks:
        try:
            if not _is_utf8(notebook.name):
                raise BatchError("its name is not UTF-8; rename it")
            declared[notebook] = declared_parameters(notebook)
        except BatchError as error:
            failures[notebook] = str(error)
    known = {name: default for parameters in declared.values() for name, default in parameters.items()}
    values = {}
    for name, text in pairs if declared else ():
        if name not in known:
            near = did_you_mean(name, known) or f"; there are: {', '.join(sorted(known)) or 'none'}"
            raise BatchError(f"no notebook has a parameter {name!r}{near}")
        if not _is_utf8(text):
            raise BatchError(f"parameter {name} is not UTF-8: {text!r}")
        value, default = read_value(text), known[name]
        fitting = (float, int) if type(default) is float else (type(default),)
        if isinstance(default, str):
            value = text
        elif default is not None and type(value) not in fitting:
            raise BatchError(f"parameter {name} is {type(default).__name__} (default {default!r}), not {text!r}")
        values[name] = value
    return {one: {name: values[name] for name in values if name in names} for one, names in declared.items()}, failures


def _is_utf8(text):
    return not any("\ud800" <= letter <= "\udfff" for letter in text)  # how Python keeps a byte that it cannot decode


def result_names(notebooks):
    """A name for each notebook's results: its own, with a number behind it if that is taken or is the report's."""
    taken, names = {"index"}, []
    for notebook in notebooks:
        candidates = (f"{notebook.stem}-{count}" if count > 1 else notebook.stem for count in itertools.count(1))
        names.append(next(name for name in candidates if name.casefold() not in taken))
        taken.add(names[-1].casefold())  # A.ipynb and a.ipynb are one file on some disks
    return names


def results_folder(out, notebooks, names):
    """Make the folder ``out`` (None: a new one under ``runs/``), empty of what an earlier run left under ``names``.

    Raises `BatchError` if it cannot be written, or if the results would overwrite one of ``notebooks`` or any other
    file that no run has written.
    """
    try:
        if out is None:
            return _new_folder(FOLDER.parent / "runs", f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
        if not _is_utf8(out):
            raise BatchError(f"the name of --out is not UTF-8: {out!r}")
        out = Path(out)
        old = [path for name in names for path in (out / f"{name}.html", out / f"{name}.ipynb")] + [out / "index.html"]
        old = [path for path in old if os.path.lexists(path)]
        for path in old:
            check_writable(path)
            own = any(path.samefile(notebook) for notebook in notebooks)
            if own or not _is_result(path):
                what = "is one of the notebooks to run" if own else "was not written by an earlier run"
                raise BatchError(f"{path} {what} and would be overwritten; --out must name another folder")
        out.mkdir(parents=True, exist_ok=True)
        check_writable(out / "index.html")
        for path in old:
            path.unlink()
        return out
    except OSError as error:
        raise BatchError(f"results cannot be written to {out or FOLDER.parent / 'runs'}: {error.strerror}; "
                         "--out names a folder that can be written") from error


def _new_folder(parent, name):
    for count in itertools.count(1):
        folder = parent / (f"{name}-{count}" if count > 1 else name)
        try:
            folder.mkdir(parents=True)  # another run may have started in this second
            return folder
        except FileExistsError:
            if not parent.is_dir():
                raise


def _is_result(path):
    """Whether a run wrote this file: papermill leaves its mark in a notebook, the report its own in a page."""
    try:
        text = path.read_text(encoding="utf-8")
        return MARK in text if path.suffix == ".html" else "papermill" in json.loads(text)["metadata"]
    except (ValueError, KeyError, TypeError):
        return False


def run_notebook(notebook, parameters, target):
    """Execute ``notebook`` into the file ``target``; whatever happens inside it becomes an `Outcome`."""
    import papermill

    started, failure = time.perf_counter(), None
    try:
        papermill.execute_notebook(
            notebook, target, parameters=parameters, cwd=notebook.parent,
            execution_timeout=SECONDS_PER_CELL, progress_bar=sys.stderr.isatty(), extra_arguments=QUIET_KERNEL)
    except papermill.PapermillExecutionError as error:
        failure = f"cell [{error.exec_count}]: {': '.join([error.ename, *error.evalue.strip().splitlines()[:1]])}"
    except KeyboardInterrupt:
        failure = STOPPED
    except Exception as error:  # a kernel that died or is missing, a cell that timed out: the other notebooks still run
        failure = f"{type(error).__name__}: {_first_line(error)}"
    return Outcome(notebook, target, time.perf_counter() - started, failure)


def _first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
    runs if a notebook, a parameter or the model does not exist, or if the results would overwrite other files.
    """
    notebooks = choose(notebooks, FOLDER)
    assigned, failures = assign(notebooks, parameters)
    for values in assigned.values():
        if "model" in values:
            values["model"] = _model_at_hand(values["model"])
    names = result_names(notebooks)
    out = results_folder(out, notebooks, names)

    outcomes = []
    for at, (notebook, name) in enumerate(zip(notebooks, names), 1):
        print(f"[{at}/{len(notebooks)}] {name}{'' if name == notebook.stem else f', from {notebook}'} ...", flush=True)
        if notebook in failures:
            outcome = Outcome(notebook, out / f"{name}.ipynb", 0.0, failures[notebook])
        else:
            outcome = run_notebook(notebook, assigned[notebook], out / f"{name}.ipynb")
        outcomes.append(outcome)
        print(f"      {outcome.failure or 'passed'}, {outcome.seconds:.1f} s", flush=True)
        if outcome.failure == STOPPED:
            break
    return outcomes, write_report(outcomes, dict(parameters), out)


def _model_at_hand(model):
    """Open a model before several notebooks fail for lack of it; its name, as a notebook's own folder can use it."""
    from tplab.checkpoint import fetch, open_checkpoint

    if model == "smollm2":
        fetch(model)
    folder = open_checkpoint(model).folder
    return str(folder.resolve()) if Path(model).is_dir() else model


def add_options(parser):
    """Those of ``./launch run``, which passes them on."""
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="its name, number (00) or path; all if none")
    parser.add_argument("-p", dest="parameters", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
                        help="a parameter of the notebooks, e.g. -p model smollm2 -p tensor_parallel_size 3")
    parser.add_argument("--out", metavar="DIR", help="where the results go (default: a new folder under runs/)")


def main(chosen):
    """Run the batch and print its table; returns the exit code."""
    outcomes, index = run(chosen.notebooks, chosen.parameters, chosen.out)
    print(f"\n{table(outcomes)}\n\nreport: {index}")
    if outcomes[-1].failure == STOPPED:
        return 130
    return 1 if any(outcome.failure for outcome in outcomes) else 0
