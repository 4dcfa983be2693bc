"""The learner's own engine: what was solved in all notebooks, put together, the lab's where something is missing; and
one all of whose layers are of a learner's class."""

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from textwrap import dedent
from types import MappingProxyType

import torch

from course.judge import progress_file
from course.judge.answers import greedy
from course.judge.exercise import run_lines
from course.judge.limit import limited
from course.judge.words import NotYet, first_cause, in_words
from tplab.checkpoint import Checkpoint
from tplab.llm.llm import LLM
from tplab.llm.sampling_params import SamplingParams
from tplab.model import NoCache, load_model
from tplab.patch import applied
from tplab.pool import shared_pool
from tplab.ranks import RankError, all_gather, rank
from tplab.shard import ShardPlan
from tplab.show.tables import Table, table

_number = count()
# What a cell of the notebooks may take for granted, besides what it imports itself.
SETUP = """
import torch
from torch.nn import functional as F
from tplab.ranks import all_gather, all_reduce, barrier, broadcast, rank, reduce_scatter, world_size
"""


def defined(code: str, name: str, known: Mapping = MappingProxyType({})):
    """What ``code`` calls ``name``, as from a notebook's cell where ``known`` is defined; what stands there as a call
    is not carried out, nor what asks the judge."""
    file, source = f"<answer {next(_number)}>", dedent(code).strip("\n") + "\n"
    space = {"__name__": "__main__"}
    exec(SETUP, space)
    space.update(known)
    tree = ast.parse(source, file)
    tree.body = [statement for statement in tree.body if not isinstance(statement, ast.Expr) and not _asks(statement)]
    run_lines(source, file, space, tree)
    return space[name]


def _asks(statement: ast.stmt) -> bool:
    """Whether it is like ``mine = lesson.judge(…)``."""
    return isinstance(statement, ast.Assign) and any(
        getattr(node, "id", "") == "lesson" for node in ast.walk(statement.value))


def listed(what: str, values: Iterable) -> list[int]:
    try:
        return [int(value) for value in values]
    except TypeError:
        raise ValueError(f"step takes two lists, {what} is {type(values).__name__}") from None


class Stepper:
    """Called with new token ids and their positions: the engine computes them, and draws the token that follows, up to
    ``count`` times."""

    def __init__(self, llm: LLM, count: int):
        self.llm, self.count, self.known = llm, count, []

    @property
    def computed(self) -> int:
        return sum(sum(record.tokens.values()) for record in self.llm.scheduler.history)

    def __call__(self, new_ids, positions) -> int:
        new_ids, positions = listed("new_ids", new_ids), listed("positions", positions)
        begun = bool(self.known)
        expected = [len(self.known) - 1] if begun else list(range(len(new_ids)))
        if positions != expected or begun and new_ids != self.known[-1:]:
            raise ValueError(f"step was asked for tokens {new_ids[:4]} at positions {positions[:4]}; next is position "
                             f"{expected[0]}")
        if not begun:
            self.known = list(new_ids)
            self.llm.add_request(new_ids, SamplingParams(temperature=0, max_tokens=self.count, ignore_eos=True))
        while True:
            for output in self.llm.step():
                self.known.append(output.outputs[0].token_ids[-1])
                return self.known[-1]


class Pieces(dict):
    """``{exercise: the learner's answer}`` of those that stand in the engine; shown as the table of all of them."""

    def table(self) -> Table:
        return table([{"notebook": exercise.notebook, "piece": name, "in the engine it": exercise.place,
                       "whose": "yours" if name in self else "the lab's"}
                      for name, exercise in pieces().items()], index="notebook")

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return self.table()._repr_mimebundle_(include, exclude)

    def __repr__(self) -> str:
        return str(self.table())


def pieces() -> dict:
    """The exercises whose answers can stand in the engine, by name."""
    from course.exercises import all_exercises

    return {name: exercise for name, exercise in all_exercises().items() if exercise.place}


def own_pieces() -> Pieces:
    """The learner's pieces: solved in this notebook, or kept from an earlier one. One may call another."""
    from course.exercises import all_exercises

    kept, solved, wanted = progress_file.load(), {}, pieces()
    for name in all_exercises():
        if name in progress_file.SOLVED:
            solved[name] = progress_file.SOLVED[name]
        elif code := kept.get(name, {}).get("code"):
            try:
                solved[name] = defined(code, name, known=solved)
            except Exception as error:  # its cell may need what other cells have defined
                if name in wanted:
                    print(f"{name}: what was kept cannot be defined by itself ({in_words(error).splitlines()[0]}); the "
                          "lab's stands in")
    return Pieces((name, answer) for name, answer in solved.items() if name in wanted)


def your_engine(parts: Mapping[str, Callable], model, prompts: Sequence[Sequence[int]], max_new_tokens: int, *,
               tensor_parallel_size: int = 2, dtype: str = "float32") -> list[list[int]]:
    """What an engine of these parts writes: ``max_new_tokens`` greedy token ids for each of ``prompts``.

    ``my_generate`` drives it, one prompt after the other; all other pieces stand in it. If a piece fails, it prints
    what is wrong, and writes nothing.
    """
    try:
        return limited(_write, parts, model, prompts, max_new_tokens, tensor_parallel_size, dtype)
    except Exception as error:  # of whatever a piece does
        print(f"your engine stops: {in_words(first_cause(error))}")
        return [[] for _ in prompts]


def _write(parts: Mapping[str, Callable], model, prompts, max_new_tokens: int, tensor_parallel_size: int, dtype: str):
    in_the_engine = pieces()
    with applied(*(patch for name, answer in parts.items() for patch in in_the_engine[name].patches(answer))):
        if "my_generate" not in parts:
            return greedy(model, prompts, max_new_tokens, tensor_parallel_size, dtype, block_size=4, strict=True)
        with LLM(model, tensor_parallel_size, dtype, block_size=4, strict=True) as llm:
            return [parts["my_generate"](Stepper(llm, max_new_tokens), list(prompt), max_new_tokens)
                    for prompt in prompts]


def layer_fits(ckpt: Checkpoint) -> bool:
    """Whether the model's layers are made of what ``MyLayer`` is given."""
    names = {name.split(".", 3)[3] for name in ckpt.tensors if name.startswith("model.layers.0.")}
    return not ckpt.config.qk_norm and {"self_attn.q_proj.weight", "mlp.gate_proj.weight"} <= names


def written(layer_class, ckpt: Checkpoint, ids: list[int], count: int, *, tensor_parallel_size: int = 2) -> list[int]:
    """``count`` greedy tokens behind ``ids``, by a model whose layers are of a learner's class, or else the lab's."""
    if layer_class is None or not layer_fits(ckpt):
        return greedy(ckpt, [ids], count, tensor_parallel_size)[0]
    plan = ShardPlan.from_config(ckpt.config, tensor_parallel_size)
    try:
        return shared_pool(tensor_parallel_size).run(_write_with, layer_class, ckpt, plan, ids, count)[0]
    except RankError as error:  # of the learner's layer
        raise NotYet(in_words(error)) from error


def _write_with(layer_class: Callable, ckpt: Checkpoint, plan: ShardPlan, ids: list[int], count: int) -> list[int]:
    """On a rank: the lab's two ends, and between them the learner's layers."""
    with torch.inference_mode(), ckpt.reader() as files:
        model, layers, rank_shard = load_model(ckpt, plan), [], plan.ranks[rank()]
        for number in range(ckpt.config.num_layers):
            at = f"model.layers.{number}."
            weights = {name.removeprefix(at): files[name] for name in ckpt.tensors if name.startswith(at)}
            layers.append(layer_class(weights, rank_shard, ckpt.config))
        new, known, words = list(ids), [], [len(shard.vocab) for shard in plan.ranks]
        while len(known) < len(ids) + count:
            positions = torch.arange(len(known), len(known) + len(new))
            hidden = model.embed_tokens(torch.tensor(new))
            cos, sin = (table[0] for table in model.rotary(hidden, positions, NoCache([len(new)]).lengths))
            for layer in layers:
                hidden = layer(hidden, cos, sin, lambda name, value: value)
            known += new
            logits = all_gather(model.compute_logits(model.norm(hidden[-1:])), dim=-1, sizes=words)
            new = [int(logits.argmax())]
    return (known + new)[len(ids):][:count]
