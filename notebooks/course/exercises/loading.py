"""Notebook 07: read what is kept."""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import torch

from course.judge.attempt import Attempt, NotYet, for_each, guarded, kind, on_ranks, saying, with_its_own
from course.judge.cuts import dealt, judge_part, owns, read_once, share_of
from course.judge.toy_checkpoint import CountedCheckpoint, ToySource, toy_model
from course.judge.verdict import Setting, at, exercise
from course.random_weights import random_tensors
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import by_parameter, tensor_parts
from tplab.model.decoder import TensorParallelCausalLM
from tplab.patch import Patch, original
from tplab.pool import shared_pool
from tplab.ranks import rank
from tplab.shard import ShardPlan

_ALONE = "one rank keeps everything, so it was judged on examples with 2 and 3"


@exercise("my_row_shard", "07", takes="source, columns", patches=at("tplab.shard.linear.row_shard"), alone=_ALONE,
          agreed="read and kept are the same columns, and on {ranks} the engine agrees with Hugging Face",
          place="cuts columns out of weights")
def my_row_shard(attempt: Attempt, setting: Setting):
    """A weight of 5 rows and 9 columns over 2 and 3 ranks; then the engine's."""
    def check(size):
        columns, dtype = dealt(9, size), (torch.float32, torch.float16)[size - 2]
        sources = [ToySource((5, 9), dtype) for _ in columns]
        for number, (found, _) in enumerate(on_ranks(size, with_its_own, attempt, sources, columns)):
            source, head = sources[number], f"rank {number} of {size}, a weight [5, 9]: "
            judge_part(found, source.whole, columns[number], head, dim=1)
            read_once(source.taken, found.nbytes, head, "which pair of brackets reads the file?")
            owns(found, head)

    for_each((2, 3), check, lambda size: f"{size} ranks" + ", in float32," * (size == 2))
    setting.align()


@exercise("MyRows", "07", takes="source, start, shape",
          agreed="a slice of a slice reads its own rows and no others, from the model's file too")
def my_rows(attempt: Attempt, setting: Setting):
    """The second of two matrices stacked on disk, 7 of 16 rows; a part of that part; then a real file."""
    source, bias = ToySource((16, 5)), ToySource((16,), torch.float16)
    made = _part(attempt, source, 4, (7, 5))
    if source.taken:
        raise NotYet(f"making it reads {source.taken} bytes already: nothing is to be read before it is sliced")
    shape = guarded(lambda: getattr(made, "shape", ()))
    if (has := list(shape) if isinstance(shape, list | tuple) else kind(shape)) != [7, 5]:
        raise NotYet(f"its .shape is {has}; the part has 7 of the 16 rows, [7, 5]" if has else
                     "it has no .shape, by which a layer knows how many rows there are")
    _rows_of(lambda: _part(attempt, source, 4, (7, 5)), (
        slice(2, 5), slice(0, 7), slice(None), slice(5, None), slice(None, 3), slice(0, 0), slice(None, 0), slice(5, 9),
        slice(8, 12), slice(-3, None), slice(1, -2)), source, range(4, 11), "rows 4–10 of a source of 16")
    _rows_of(lambda: _part(attempt, bias, 3, (8,)), [slice(1, 4)], bias, range(3, 11), "numbers 3–10 of a bias of 16")
    _rows_of(lambda: _part(attempt, made, 2, (4, 5)), [slice(1, 3)], source, range(6, 10),
             "rows 2–5 of rows 4–10, a slice of a slice")
    ckpt, name = setting.checkpoint, "model.embed_tokens.weight"
    with ckpt.reader() as files:
        count, head = ckpt.tensors[name].shape[0], "part[10:20] of a part of the model's file: "
        part = _part(attempt, files[name], count // 3, (count // 2, *ckpt.tensors[name].shape[1:]))
        found, read = guarded(lambda: part[10:20]), files.bytes_read
        judge_part(found, files[name][:], range(count // 3 + 10, count // 3 + 20), head, whose="meant")
        read_once(read, found.nbytes, head)


def _part(attempt: Attempt, source, start: int, shape: tuple[int, ...]):
    made = guarded(attempt.function, source, start, shape)
    if not hasattr(type(made), "__getitem__"):
        raise NotYet("it cannot be sliced: part[2:5] needs a method __getitem__(self, rows)")
    return made


def _rows_of(make: Callable, slices, source: ToySource, own: range, where: str) -> None:
    part = make()
    for rows in slices:
        call = f"part[{'' if rows.start is None else rows.start}:{'' if rows.stop is None else rows.stop}]"
        with saying(f"{call} of {where}: "):
            try:
                _read(part, rows, source, own)
            except NotYet as wrong:
                with suppress(NotYet):
                    _read(make(), rows, source, own)
                    wrong = NotYet(f"{str(wrong).splitlines()[0]}\nRead first, it is right: what does a read change?")
                raise wrong


def _read(part, rows: slice, source: ToySource, own: range) -> None:
    source.taken = 0
    try:
        found = guarded(lambda: part[rows])
    except NotYet:
        if min(rows.start or 0, rows.stop or 0) < 0 or max(rows.start or 0, rows.stop or 0) > len(own):
            return  # what a list does with such a slice, or an error
        raise
    judge_part(found, source.whole, own[rows], "", whose="meant, as of a list")
    read_once(source.taken, found.nbytes, "")


def _load_patch(answer) -> list[Patch]:
    """The engine's weights, loaded by a learner's function."""
    target = "tplab.model.loader.load_model"

    def load_model(ckpt, plan, dtype=torch.float32):
        parts = tensor_parts(ckpt.config, ckpt.tensors)
        if any(part.tensor != name for name, part in parts.items()):  # fused on disk: not what it was written for
            return original(target)(ckpt, plan, dtype)
        model, kept = TensorParallelCausalLM(ckpt.config, plan, dtype), answer(ckpt, plan, rank())
        for path, own in by_parameter(parts).items():
            model.get_parameter(path).data.copy_(torch.cat([kept[name] for name in own]))
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        model.load_stats = SimpleNamespace(bytes_read=size, parameter_bytes=size)
        return model.eval()

    return [Patch("tplab.engine.runner.load_model", load_model)]


@exercise("my_load", "07", takes="ckpt, plan, rank", patches=_load_patch, alone=_ALONE,
          agreed="0 tensors differ, and on {ranks} every byte read is kept", place="loads the weights")
def my_load(attempt: Attempt, setting: Setting):
    """A model of two layers with 9/3 heads on 2 ranks and 8/2 heads on 3; then the notebook's, on its ranks."""
    for heads, size in (((9, 3), 2), ((8, 2), 3)):
        toy = toy_model(*heads, 2, True, model_type="qwen3", fill=random_tensors if size == 2 else _in_float64)
        plan = ShardPlan.from_config(toy.config, size)
        for number in reversed(range(size)):  # the last one first: its part is where it is by all that come before
            ckpt = CountedCheckpoint(toy)
            with saying(f"{heads[0]} query and {heads[1]} KV heads, rank {number} of {size}: "):
                kept, taken = attempt(ckpt, plan, number), dict(ckpt.taken)
                compare(kept, ckpt, plan, number)
                for name, read in taken.items():
                    read_once(read, kept[name].nbytes, f"{name}: ")
    ckpt, size = setting.checkpoint, setting.tensor_parallel_size
    if any(".qkv_proj." in name or ".gate_up_proj." in name for name in ckpt.tensors):
        return "this checkpoint has fused tensors, so only the small model was read"
    on_ranks(shared_pool(size), _load_on_rank, attempt, ckpt, ShardPlan.from_config(ckpt.config, size))


def _in_float64(config, seed: int) -> dict[str, torch.Tensor]:
    return {name: one.double() for name, one in random_tensors(config, seed).items()}


def _load_on_rank(attempt: Attempt, ckpt: Checkpoint, plan: ShardPlan) -> None:
    counted = CountedCheckpoint(ckpt)
    with saying(f"in {ckpt.name}: "):
        kept = attempt(counted, plan, rank())
        read = counted.taken.total()
        compare(kept, ckpt, plan, rank())
        read_once(read, sum(t.nbytes for t in kept.values()), "all tensors together: ")


def compare(kept, ckpt, plan: ShardPlan, number: int) -> None:
    """Refuse what a rank keeps unless it is, tensor by tensor, what the plan gives it."""
    if not isinstance(kept, dict):
        raise NotYet(f"it returns {kind(kept)}; a dictionary from names to tensors must come back")
    if lacks := [name for name in ckpt.tensors if name not in kept]:
        raise NotYet(f"{len(lacks)} of {len(ckpt.tensors)} tensors are missing, {lacks[0]} first")
    if more := [name for name in kept if name not in ckpt.tensors]:
        raise NotYet(f"no tensor of the checkpoint is called {more[0]!r}")
    with ckpt.reader() as files:
        for name in ckpt.tensors:
            whole, (dim, part, what) = files[name][:], share_of(name, plan, number)
            others = {f"rank {r}'s": share_of(name, plan, r)[1] for r in range(len(plan.ranks)) if r != number}
            judge_part(kept[name], whole, range(len(whole)) if part is None else part, f"{name}: ", dim,
                       whose=f"its {what}" if part is not None else "its own: every rank keeps all of them",
                       ways=others if part is not None else {})
