"""Run notebooks as a batch with papermill: every executed notebook is kept, one failure does not stop the rest.

``./launch run`` and ``python -m course run`` are its command lines.
"""

import ast
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import datetime
from pathlib import Path

from course.lab.report import INDEX, Outcome, write_report
from tplab.checks import did_you_mean
from tplab.errors import TplabError

FOLDER = Path(__file__).resolve().parents[2]
# A cell that hangs fails its notebook and the batch goes on. Ranks have a shorter timeout of their own.
SECONDS_PER_CELL = 900
AT_ONCE = 2
# Two at a time have one thread in each process: with more, threads wait for each other's cores.
BESIDE_OTHERS = {"OMP_NUM_THREADS": "1"}
# It times this machine, so nothing runs beside it.
TIMING = ("10_beside_its_peers",)
STOPPED = "stopped by Ctrl-C"
# Each kernel would warn on the terminal that its (loopback, signed) connection is not encrypted, and say when it is
# stopped.
QUIET_KERNEL = ["--IPKernelApp.log_level=CRITICAL"]


def choose(names: list[str], folder: Path) -> list[Path]:
    """The notebooks meant by ``names``: a name, its number or a path each; all of ``folder`` if there are none."""
    series = sorted(folder.glob("*.ipynb"))
    chosen = [_choose_one(name, series) for name in names] or series
    twice = [path.stem for path in chosen if [other.stem for other in chosen].count(path.stem) > 1]
    if twice or not chosen:
        raise TplabError(f"two notebooks would both write {twice[0]}.html; run them one after the other" if twice
                         else f"there is no notebook in {folder}")
    return chosen


def _choose_one(name: str, series: list[Path]) -> Path:
    path = Path(name)
    if path.suffix == ".ipynb" and os.path.isfile(path):  # not Path's own, which fails for a name too long
        return path.resolve()
    matches = [other for other in series if path.name in (other.name, other.stem, other.stem.split("_")[0])]
    if len(matches) != 1:
        raise TplabError(f"no notebook {name!r}" + _known(name, [other.stem for other in series]))
    return matches[0]


def _known(name: str, known) -> str:
    return did_you_mean(name, known) or f"; there are: {', '.join(sorted(known)) or 'none'}"


def declared_parameters(notebook: Path) -> dict:
    """{name: default} of a notebook's cell tagged ``parameters``, as papermill finds it; {} if it has none.

    A default that is no literal (an expression) is None, which stands for any type. `TplabError` if it is no notebook.
    """
    import papermill

    try:
        parameters = papermill.inspect_notebook(notebook)
    except Exception as error:  # JSON of any other kind comes as AttributeError, KeyError, TypeError and more
        raise TplabError(f"not a notebook: {_first_line(error)}") from error
    return {name: _literal(parameter["default"], None) for name, parameter in parameters.items()}


def _literal(text: str, otherwise):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return otherwise


def assign(notebooks: list[Path], pairs: list[tuple[str, str]]) -> tuple[dict[Path, dict], dict[Path, str]]:
    """Each notebook gets those of ``pairs`` that it declares: ``{notebook: {name: value}}``.

    The second result is ``{notebook: failure}`` of those that cannot be run at all. A name that no notebook declares,
    or a value whose type is not the default's, raises `TplabError`.
    """
    declared, failures = {}, {}
    for notebook in notebooks:
        try:
            declared[notebook] = declared_parameters(notebook)
        except TplabError as error:
            failures[notebook] = str(error)
    known = {name: default for parameters in declared.values() for name, default in parameters.items()}
    values = {}
    for name, text in pairs if declared else ():
        if name not in known:
            raise TplabError(f"no notebook has a parameter {name!r}" + _known(name, known))
        default = known[name]
        value = text if isinstance(default, str) else _literal(text, text)
        fitting = (float, int) if type(default) is float else (type(default),)
        if default is not None and type(value) not in fitting:
            raise TplabError(f"parameter {name} is {type(default).__name__} (default {default!r}), not {text!r}")
        values[name] = value
    return {notebook: {name: values[name] for name in values if name in names}
            for notebook, names in declared.items()}, failures


def results_folder(out: str | None, notebooks: list[Path]) -> Path:
    """Make the folder ``out`` (None: a new one under ``runs/``).

    Raises `TplabError` if it cannot be written, or if it has a file already that the results would overwrite.
    """
    folder = Path(out) if out is not None else FOLDER.parent / "runs" / f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TplabError(f"results cannot be written to {folder}: {error.strerror}; --out names a folder that can be "
                         "written") from error
    results = [folder / name for notebook in notebooks for name in (f"{notebook.stem}.html", notebook.name)]
    for path in [*results, folder / INDEX]:
        if os.path.lexists(path):
            raise TplabError(f"{path} is there already and would be overwritten; --out must name another folder")
    return folder


class _Batch:
    """Notebooks that run into a folder, each in a kernel of its own."""

    def __init__(self, notebooks: list[Path], parameters: dict[Path, dict], folder: Path):
        self.notebooks, self.parameters, self.folder = notebooks, parameters, folder
        self.kernels: list = []  # Jupyter's managers of them
        self.stopped = False

    def outcomes(self, failures: dict[Path, str]) -> list[Outcome]:
        """Run all; after Ctrl-C only what has begun has an outcome. ``failures``: of those that cannot be run."""
        runs: dict[Path, Future] = {}
        for at_once, is_chosen in (AT_ONCE, False), (1, True):
            with ThreadPoolExecutor(at_once) as threads:
                runs |= {notebook: threads.submit(self._run, notebook, failures.get(notebook))
                         for notebook in self.notebooks if (notebook.stem in TIMING) is is_chosen}
                try:
                    wait(runs.values())
                except KeyboardInterrupt:
                    self.stopped = True
                    for kernel in self.kernels:
                        _end(kernel)
        return [outcome for notebook in self.notebooks if (outcome := runs[notebook].result())]

    def _run(self, notebook: Path, failure: str | None) -> Outcome | None:
        """None if it has not begun before Ctrl-C."""
        if self.stopped:
            return None
        name = f"[{self.notebooks.index(notebook) + 1}/{len(self.notebooks)}] {notebook.stem}"
        _say(f"{name} ...")
        started, target = time.perf_counter(), self.folder / notebook.name
        failure = failure or self._failure(notebook, target)
        outcome = Outcome(notebook, target, time.perf_counter() - started, STOPPED if self.stopped else failure)
        _say(f"{name}: {outcome.failure or 'passed'}, {outcome.seconds:.1f} s")
        return outcome

    def _failure(self, notebook: Path, target: Path) -> str | None:
        """Execute ``notebook`` into the file ``target``; whatever stops it, in a line."""
        import papermill
        from jupyter_client import AsyncKernelManager

        from course.lab.warm import started_again

        class Manager(AsyncKernelManager):
            async def start_kernel(manager, **kwargs):
                settings = {} if notebook.stem in TIMING else BESIDE_OTHERS
                await super().start_kernel(**kwargs | {"env": settings | os.environ | kwargs.get("env", {})})
                self.kernels.append(manager)
                if self.stopped:
                    _end(manager)

        try:
            started_again(
                papermill.execute_notebook, notebook, target, parameters=self.parameters[notebook], cwd=notebook.parent,
                progress_bar=False, execution_timeout=SECONDS_PER_CELL, extra_arguments=QUIET_KERNEL,
                kernel_manager_class=Manager)
        except papermill.PapermillExecutionError as error:
            return f"cell [{error.exec_count}]: {': '.join([error.ename, *error.evalue.strip().splitlines()[:1]])}"
        except Exception as error:  # a kernel that died or is missing, a cell that timed out: the other notebooks run
            return f"{type(error).__name__}: {_first_line(error)}"
        return None


def _say(line: str) -> None:
    print(f"{line}\n", end="", flush=True)  # in one piece: two threads print


def _end(kernel) -> None:
    if process := getattr(kernel.provisioner, "process", None):
        process.kill()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def run(names: list[str], parameters: list[tuple[str, str]], out: str | None) -> tuple[list[Outcome], Path]:
    """Run a batch; returns its outcomes and the path of the report's index.

    ``names``: as `choose` takes them. ``out``: folder for the executed notebooks and the report (None: a new one under
    ``runs/`` in the repository). Raises `TplabError` before anything runs if a notebook, a parameter or the model does
    not exist, or if the results would overwrite other files.
    """
    notebooks = choose(names, FOLDER)
    assigned, failures = assign(notebooks, parameters)
    for values in assigned.values():
        if "model" in values:
            values["model"] = _model_at_hand(values["model"])
    from course.lab.warm import use_warm_kernels

    folder = results_folder(out, notebooks)
    use_warm_kernels()
    outcomes = _Batch(notebooks, assigned, folder).outcomes(failures)
    return outcomes, write_report(outcomes, dict(parameters), folder)


def _model_at_hand(model: str) -> str:
    """Open a model before several notebooks fail for lack of it; its name, as a notebook's own folder can use it."""
    from tplab.checkpoint import fetch, open_checkpoint

    if model == "smollm2":
        fetch(model)
    folder = open_checkpoint(model).folder
    return str(folder.resolve()) if Path(model).is_dir() else model


def add_options(parser) -> None:
    """Those of ``./launch run``, which passes them on."""
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="its name, number (00) or path; all if none")
    parser.add_argument("-p", dest="parameters", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
                        help="a parameter of the notebooks, e.g. -p model smollm2 -p tensor_parallel_size 3")
    parser.add_argument("--out", metavar="DIR", help="where the results go (default: a new folder under runs/)")


def main(chosen) -> int:
    """Run the batch; returns the exit code."""
    outcomes, index = run(chosen.notebooks, chosen.parameters, chosen.out)
    print(f"report: {index}")
    if outcomes[-1].failure == STOPPED:
        return 130
    return 1 if any(outcome.failure for outcome in outcomes) else 0
