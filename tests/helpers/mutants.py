"""Mutants: ``python tests/helpers/mutants.py cache 30 1`` makes 30 small changes, by the seed 1, in the code of a room,
one at a time in a copy of the repository (which rank processes import as well), and runs the room's tests on each, or
those that are named after the seed. Tests that take five times as long as on the right code have killed the mutant."""

import ast
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from copy import deepcopy
from pathlib import Path

import pytest
import torch  # noqa: F401
import transformers.models.auto.modeling_auto  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
         (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.And, ast.Or)]
SWAPS = {ast.Div: ast.Mult} | {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}


def changed(node: ast.AST) -> ast.AST | None:
    """The node with one small change; None where there is none to make."""
    new = deepcopy(node)
    if isinstance(new, ast.Compare):
        new.ops[0] = SWAPS[type(new.ops[0])]()
    elif isinstance(new, ast.BinOp | ast.BoolOp) and type(new.op) in SWAPS:
        new.op = SWAPS[type(new.op)]()
    elif isinstance(new, ast.Constant) and isinstance(new.value, int | float):
        new.value = not new.value if isinstance(new.value, bool) else new.value + 1
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        return new.operand
    else:
        is_call = isinstance(new, ast.Expr) and isinstance(new.value, ast.Call)
        return ast.Pass() if is_call or isinstance(new, ast.AugAssign | ast.Return) else None
    return new


def mutants(file: Path) -> list[tuple[Path, str, bytes]]:
    """``(file, what is changed, the file's text with it)``; annotations stay."""
    text, made = file.read_bytes(), []
    starts, tree = [0, *(at + 1 for at, byte in enumerate(text) if byte == 10)], ast.parse(text)
    kept = [getattr(node, "annotation", getattr(node, "returns", None)) for node in ast.walk(tree)]
    for node in set(ast.walk(tree)) - {part for whole in kept if whole for part in ast.walk(whole)}:
        if new := changed(node):
            begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            code = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
            said = f"{file.relative_to(ROOT)}:{node.lineno}:{node.col_offset}: {ast.unparse(node)[:60]} -> {code[:60]}"
            made.append((file, said, text[:begin] + code.encode() + text[end:]))
    return sorted(made)


def is_alive(copy: Path, tests: list[str], limit: float = 3600) -> bool:
    """Whether all tests pass on the copy. They run in a fork of this process, which has imported the slow libraries."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(copy)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.environ["PYTHONPATH"] = f"{copy}{os.pathsep}{copy / 'notebooks'}"
        sys.path[:1] = [str(copy), str(copy / "notebooks")]
        os._exit(pytest.main(["-xq", "-n0", "-p", "no:cacheprovider", *tests]))
    end = time.monotonic() + limit
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        time.sleep(0.05)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
    return ended[1] == 0


if __name__ == "__main__":
    room, count, seed, *tests = sys.argv[1:]
    tests = tests or [f"tests/{room}"]
    every = [mutant for source in sorted((ROOT / "tplab" / room).glob("*.py")) for mutant in mutants(source)]
    every = random.Random(int(seed)).sample(every, min(int(count), len(every)))
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(ROOT, Path(folder) / "copy", ignore=shutil.ignore_patterns(".git", ".venv", "runs"))
        begin, killed = time.monotonic(), 0
        assert is_alive(copy, tests), "the tests are red on the right code"
        limit = 60 + 5 * (time.monotonic() - begin)
        for file, said, text in every:
            (copy / file.relative_to(ROOT)).write_bytes(text)
            killed += not (alive := is_alive(copy, tests, limit))
            print("alive " if alive else "killed", said, flush=True)
            shutil.copy(file, copy / file.relative_to(ROOT))
    print(f"{room}, seed {seed}: {killed} of {len(every)} killed")
