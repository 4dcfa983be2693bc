"""The learner's own engine: what was solved in all notebooks, put together; the lab's where something is missing."""

import ast
import linecache
from collections.abc import Callable, Sequence
from itertools import count
from textwrap import dedent

from tplab.lesson import progress_file
from tplab.lesson.limit import limited
from tplab.lesson.mine import first_cause, in_words
from tplab.lesson.stepping import Stepper
from tplab.patch import applied
from tplab.show.tables import Table, table

_number = count()
# What a cell of the notebooks may take for granted, besides what it imports itself.
SETUP = """
import torch
from torch.nn import functional as F
from tplab.ranks import all_gather, all_reduce, barrier, broadcast, rank, world_size
"""


def defined(code: str, name: str, setup: str = SETUP):
    """What ``code`` calls ``name``, as from a notebook's cell: its lines can be shown, and ranks get it by value.

    Only what it imports, assigns and defines is carried out, not what it calls.
    """
    file = f"<answer {next(_number)}>"
    source = dedent(code).strip("\n") + "\n"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    space = {"__name__": "__main__"}
    exec(setup, space)
    tree = ast.parse(source, file)
    tree.body = [one for one in tree.body if not isinstance(one, ast.Expr)]
    exec(compile(tree, file, "exec"), space)
    return space[name]


class Pieces(dict):
    """``{exercise: the learner's answer}`` of those that stand in the engine; shown as the table of all of them."""

    def table(self) -> Table:
        from tplab.lesson.pieces import PIECES
        from tplab.lesson.verdict import all_exercises

        return table([{"notebook": exercise.notebook, "piece": name, "in the engine it": PIECES[name].place,
                       "whose": "yours" if name in self else "the lab's"}
                      for name, exercise in all_exercises().items() if name in PIECES], index="notebook")

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return self.table()._repr_mimebundle_(include, exclude)

    def __repr__(self) -> str:
        return str(self.table())


def own_pieces() -> Pieces:
    """The learner's pieces: solved in this notebook, or in an earlier one, from what was kept.

    A kept piece that cannot be defined any more is said in a line, and the lab's takes its place.
    """
    from tplab.lesson.pieces import PIECES

    kept, found = progress_file.load(), Pieces()
    for name in PIECES:
        if name in progress_file.SOLVED:
            found[name] = progress_file.SOLVED[name]
        elif code := kept.get(name, {}).get("code"):
            try:
                found[name] = defined(code, name)
            except Exception as error:  # its cell may need what other cells have defined
                print(f"{name}: what was kept cannot be defined by itself ({in_words(error).splitlines()[0]}); the "
                      "lab's stands in")
    return found


def your_engine(pieces: dict[str, Callable], model, prompts: Sequence[Sequence[int]], max_new_tokens: int, *,
               tensor_parallel_size: int = 2, dtype: str = "float32") -> list[list[int]]:
    """What an engine of ``pieces`` writes: ``max_new_tokens`` greedy token ids for each of ``prompts``.

    ``my_generate``, if it is among them, drives the engine, one prompt after the other; all other pieces stand in it.
    If a piece fails, it prints what is wrong with which, and writes nothing.

        >>> lesson.your_engine(lesson.own_pieces(), ckpt, [ids], 40)
    """
    from tplab.lesson.verdict import all_exercises

    def write(pieces):
        return limited(_write, pieces, model, prompts, max_new_tokens, tensor_parallel_size, dtype)

    try:
        return write(pieces)
    except Exception as error:  # of whatever a piece does
        whose, said = "", in_words(first_cause(error))
    if len(pieces) > 1:
        for name in [name for name in all_exercises() if name in pieces]:  # the first that fails among the lab's own
            try:
                write({name: pieces[name]})
            except Exception as error:
                whose, said = f" at {name}", in_words(first_cause(error))
                break
    print(f"your engine stops{whose}: {said}")
    return [[] for _ in prompts]


def _write(pieces: dict[str, Callable], model, prompts, max_new_tokens: int, tensor_parallel_size: int, dtype: str):
    from tplab import LLM, SamplingParams
    from tplab.lesson.pieces import PIECES

    patches = [patch for name, answer in pieces.items() for patch in PIECES[name].patches(answer)]
    params = SamplingParams(temperature=0, max_tokens=max_new_tokens, ignore_eos=True)
    with applied(*patches), LLM(model, tensor_parallel_size, dtype, block_size=4, strict=True) as llm:
        if "my_generate" in pieces:
            return [pieces["my_generate"](Stepper(llm, max_new_tokens), list(prompt), max_new_tokens)
                    for prompt in prompts]
        done = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in done]
