"""``%load_ext tplab``, then ``%%ranks``: a whole cell on every rank."""

import argparse
import ast
import linecache
import shlex
import symtable
import sys
import weakref

from tplab.pool.pool import latest_pool, shared_pool
from tplab.ranks import context
from tplab.ranks.errors import RankError, location

# Names that every cell has without an import.
_BUILT_IN = ("rank", "world_size", "all_reduce", "all_gather", "broadcast", "barrier", "state", "op_log")
_defined_names = weakref.WeakKeyDictionary()  # pool -> names that cells have defined on its ranks


def load_ipython_extension(shell) -> None:
    """Register ``%%ranks`` (called by ``%load_ext tplab``)."""
    shell.register_magic_function(lambda line, cell: run_cell(shell, line, cell), "cell", "ranks")


def run_cell(shell, line: str, cell: str) -> None:
    """Run `cell` on every rank of the pool that was made last, or of a shared one of two ranks.

    ``%%ranks 4`` takes the shared pool of four ranks; ``--timeout 5`` limits the run to five seconds. Each rank keeps
    its own variables from cell to cell; `torch` and the collectives are imported. A name that no cell has defined on
    the ranks has the value that it has in the notebook.
    """
    options = _parse(line)
    label = f"<%%ranks {_cell_name(shell)}>"
    source = "\n" + cell  # so that lines count from the %%ranks line, as in the notebook
    linecache.cache[label] = (len(source), None, ("%%ranks\n" + cell).splitlines(keepends=True), label)
    try:
        names = symtable.symtable(source, label, "exec")
    except SyntaxError as error:
        raise RankError(f"{location(label, error.lineno)}: {error.msg}: {(error.text or '').strip()}") from None
    pool = latest_pool() if options.size is None else shared_pool(options.size)
    defined = _defined_names.setdefault(pool, {"torch", *_BUILT_IN})
    defined |= {symbol.get_name() for symbol in names.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    wanted = _global_names(names) - defined - set(shell.user_ns_hidden)
    notebook = {name: shell.user_ns[name] for name in sorted(wanted) if name in shell.user_ns}
    pool.run(_Cell(source, label), notebook=notebook, timeout=options.timeout)


class _Cell:
    """The source of a cell, as a function on a rank."""

    def __init__(self, source: str, label: str):
        self.source, self.label = source, label

    def __call__(self, notebook: dict) -> None:
        """Run in the rank's namespace and print the last expression, as Jupyter would."""
        scope = _namespace()
        scope.update(notebook)
        tree = ast.parse(self.source, self.label)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, self.label, "exec"), scope)
        value = eval(compile(ast.Expression(last.value), self.label, "eval"), scope) if last is not None else None
        if value is not None:
            print(repr(value))


def _cell_name(shell) -> str:
    """``In[3]``, IPython's name of the running cell; `execution_count` may already be the next one's."""
    frame = sys._getframe()
    while frame is not None:
        if named := shell.compile.format_code_name(frame.f_code.co_filename):
            return named[1]
        frame = frame.f_back
    return f"In[{shell.execution_count}]"


def _namespace() -> dict:
    group = context.current()
    if group.namespace is None:
        import torch

        import tplab.ranks as ranks

        group.namespace = {"__name__": "__main__", "torch": torch, **{name: getattr(ranks, name) for name in _BUILT_IN}}
    return group.namespace


def _global_names(table) -> set[str]:
    """Names that the code reads as globals, in functions and classes too."""
    module = table.get_type() == "module"
    here = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (module or s.is_global())}
    return here.union(*map(_global_names, table.get_children()))


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise RankError(f"%%ranks: {message}; usage: %%ranks [SIZE] [--timeout SECONDS]")


def _parse(line: str):
    parser = _Parser(prog="%%ranks", add_help=False)
    parser.add_argument("size", nargs="?", type=int)
    parser.add_argument("--timeout", type=float)
    try:
        arguments = shlex.split(line)
    except ValueError as error:  # an unclosed quote
        parser.error(f"{line.strip()!r}: {error}")
    return parser.parse_args(arguments)
