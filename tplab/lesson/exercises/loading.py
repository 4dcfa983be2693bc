"""Notebook 07: read what is kept."""

import torch

from tplab.checkpoint import Checkpoint
from tplab.lesson.mine import Mine, NotYet, for_each, guarded, kind, on_ranks, tensor
from tplab.lesson.toy_checkpoint import CountedCheckpoint, ToySource, toy_model
from tplab.lesson.verdict import Setting, exercise
from tplab.patch import Patch
from tplab.pool import shared_pool
from tplab.ranks import rank
from tplab.shard import ShardPlan, split_evenly

_ALONE = "one rank keeps everything, so it was judged on examples with 2 and 3"


@exercise("my_row_shard", "07", takes="source, columns",
          agreed="read and kept are the same columns, and on {ranks} the engine agrees with Hugging Face")
def my_row_shard(mine: Mine, setting: Setting):
    """A weight of 5 rows and 7 columns over 2 and 3 ranks; then the engine's."""
    def check(size):
        for number, columns in enumerate(split_evenly(7, size)):
            source = ToySource((5, 7))
            found, whole = mine(source, columns), source.whole
            where = f"rank {number} of {size}, columns {columns.start}–{columns.stop - 1} of [5, 7]"
            if isinstance(found, torch.Tensor) and list(found.shape) == [len(columns), 7]:
                raise NotYet(f"{where}: it returns rows, {list(found.shape)}. A weight is [out, in]: which of the two "
                             "does a row-parallel layer share out?")
            right = whole[:, columns.start:columns.stop]
            tensor(found, "out, columns here", right.shape, right.dtype)
            if not found.equal(right):
                raise NotYet(f"{where}: the shape is right, the numbers are others: {_columns_in(found, whole)}")
            _read_once(source.taken, right.nbytes, where, "which pair of brackets reads the file?")
            _owns(found, where)

    for_each((2, 3), check)
    setting.align(Patch("tplab.shard.linear.row_shard", mine.function))
    return _ALONE if setting.tensor_parallel_size == 1 else None


@exercise("MyRows", "07", takes="source, start, shape",
          agreed="a slice of a slice reads its own rows and no others, from the model's file too")
def my_rows(mine: Mine, setting: Setting):
    """The second of two matrices stacked on disk, 7 of 16 rows; a part of that part; then a real file."""
    source = ToySource((16, 5))
    made, whole = _part(mine, source, 4, (7, 5)), source.whole
    if source.taken:
        raise NotYet(f"making it reads {source.taken} bytes already: nothing is to be read before somebody slices")
    shape = guarded(lambda: getattr(made, "shape", ()))
    if not isinstance(shape, list | tuple) or tuple(shape) != (7, 5):
        has = list(shape) if isinstance(shape, list | tuple) else kind(shape)
        raise NotYet("it has no .shape, by which a layer knows how many rows there are" if shape == () else
                     f"its .shape is {has}; the part has 7 of the 16 rows, [7, 5]")
    for rows in (slice(2, 5), slice(0, 7), slice(None), slice(5, None), slice(None, 3), slice(0, 0), slice(None, 0)):
        first, last, _ = rows.indices(7)
        _rows_of(made, rows, whole[4 + first:4 + last], source, "rows 4–10 of a source of 16")
    try:
        beyond = guarded(lambda: made[5:9])
    except NotYet:
        beyond = None
    if isinstance(beyond, torch.Tensor) and len(beyond) > 2:
        raise NotYet("part[5:9] of a part with 7 rows gives 4 rows: two of them belong to the matrix behind it")
    for rows in (slice(-3, None), slice(1, -2)):  # refused, or counted from the end of the part
        first, last, _ = rows.indices(7)
        try:
            found = guarded(lambda rows=rows: made[rows])
        except NotYet:
            continue
        if not isinstance(found, torch.Tensor) or not found.equal(whole[4 + first:4 + last]):
            raise NotYet(f"part[{'' if rows.stop is None else 1}{rows.start if rows.stop is None else ''}:"
                         f"{rows.stop or ''}] counts from the part's end, rows {first}–{last - 1} of it. Others "
                         "come back; an IndexError would do as well, other rows do not")
    inner = _part(mine, made, 2, (4, 5))
    _rows_of(inner, slice(1, 3), whole[7:9], source, "rows 2–5 of rows 4–10, a slice of a slice")
    ckpt, name = setting.checkpoint, "model.embed_tokens.weight"
    with ckpt.reader() as files:
        count = ckpt.tensors[name].shape[0]
        part = _part(mine, files[name], count // 3, (count // 2, *ckpt.tensors[name].shape[1:]))
        found = tensor(guarded(lambda: part[10:20]), "rows, hidden", (10, ckpt.tensors[name].shape[1]))
        if files.bytes_read != found.nbytes:
            raise NotYet(f"from the model's file: ten rows of {found.nbytes} bytes were asked for, {files.bytes_read} "
                         "bytes were read")
        if not found.equal(files[name][count // 3 + 10:count // 3 + 20]):
            raise NotYet(f"from the model's file: part[10:20] of a part that begins at row {count // 3} is to be rows "
                         f"{count // 3 + 10}–{count // 3 + 19}, and is not")


@exercise("my_load", "07", takes="ckpt, plan, rank",
          agreed="0 tensors differ, and on {ranks} every byte read is kept")
def my_load(mine: Mine, setting: Setting):
    """A model of two layers with 9/3 heads on 2 ranks and 8/2 heads on 3; then the notebook's, on its ranks."""
    for heads, size in (((9, 3), 2), ((8, 2), 3)):
        ckpt, plan = toy_model(*heads, size)
        for number in range(size):
            ckpt.taken.clear()
            where = f"{heads[0]} query and {heads[1]} KV heads, rank {number} of {size}: "
            kept, taken = mine(ckpt, plan, number), dict(ckpt.taken)
            compare(kept, ckpt, plan, number, where, owned=True)
            for name, read in taken.items():
                _read_once(read, kept[name].nbytes, where + name, "")
    ckpt = setting.checkpoint
    plan = ShardPlan.from_config(ckpt.config, setting.tensor_parallel_size)
    if any(".qkv_proj." in name or ".gate_up_proj." in name for name in ckpt.tensors):
        return "this checkpoint has fused tensors, so only the small model was read"
    on_ranks(shared_pool(setting.tensor_parallel_size), _load_on_rank, mine, ckpt, plan)
    return _ALONE if setting.tensor_parallel_size == 1 else None


def _load_on_rank(mine: Mine, ckpt: Checkpoint, plan: ShardPlan) -> None:
    counted, where = CountedCheckpoint(ckpt), f"in {ckpt.name}: "
    kept = mine(counted, plan, rank())
    read = counted.bytes_read
    compare(kept, ckpt, plan, rank(), where)
    _read_once(read, sum(t.nbytes for t in kept.values()), where + "all tensors together", "")


def compare(kept, ckpt, plan: ShardPlan, number: int, where: str, owned: bool = False) -> None:
    """Refuse what a rank keeps unless it is, tensor by tensor, what the plan gives it. The first wrong one is named.

    ``owned``: a view is refused too (slices of a file that is mapped into memory are views of the map).
    """
    if not isinstance(kept, dict):
        raise NotYet(f"it returns {kind(kept)}; a dictionary from names to tensors must come back")
    lacks = [name for name in ckpt.tensors if name not in kept]
    if lacks:
        raise NotYet(f"{where}{len(lacks)} of {len(ckpt.tensors)} tensors are missing, {lacks[0]} first")
    if more := [name for name in kept if name not in ckpt.tensors]:
        raise NotYet(f"{where}no tensor of the checkpoint is called {more[0]!r}")
    with ckpt.reader() as files:
        for name in ckpt.tensors:
            _compare(kept[name], name, files, plan, number, where + name)
            if owned:
                _owns(kept[name], where + name)


def _compare(found, name: str, files, plan: ShardPlan, number: int, where: str) -> None:
    if not isinstance(found, torch.Tensor):
        raise NotYet(f"{where} is {kind(found)}; a tensor must be kept (is the slice missing?)")
    right = _cut(files[name], *(cut := _share(name, plan, number)))
    if found.dtype != right.dtype:
        raise NotYet(f"{where} is kept in {found.dtype}; the file has it in {right.dtype}")
    if found.shape == right.shape and found.equal(right):
        return
    dim, part, what = cut
    size = files[name].shape
    if dim is None:
        raise NotYet(f"{where} comes as {list(found.shape)}; every rank keeps all of {list(size)}: who needs it whole?")
    wants = f"{'rows' if dim == 0 else 'columns'} {part.start}–{part.stop - 1} of {size[dim]}"
    why = f"{where}: its {what} are {wants}"
    if list(found.shape) == list(size):
        raise NotYet(f"{why}; all of it is kept")
    others = [(1 - dim, part)] if len(size) > 1 and part.stop <= size[1 - dim] else []
    if any(found.shape == (cut := _cut(files[name], *other)).shape and found.equal(cut) for other in others):
        raise NotYet(f"{why}; {'columns' if dim == 0 else 'rows'} {part.start}–{part.stop - 1} are kept: the other dim")
    owner = [r for r in range(plan.tensor_parallel_size)
             if (cut := _cut(files[name], *_share(name, plan, r))).shape == found.shape and found.equal(cut)]
    if owner:
        raise NotYet(f"{why}; rank {owner[0]}'s are kept")
    if list(found.shape) != list(right.shape):
        raise NotYet(f"{why}, {list(right.shape)}; {list(found.shape)} is kept")
    raise NotYet(f"{why}; the shape is right, the numbers are others")


def _share(name: str, plan: ShardPlan, number: int) -> tuple[int | None, range | None, str]:
    """Along which dim a tensor of that name is cut, which part of it the rank keeps, and what that is."""
    here, (layer, kind_of) = plan.ranks[number], name.split(".")[-2:]
    heads = {"q_proj": here.q_heads, "k_proj": here.kv_heads, "v_proj": here.kv_heads, "o_proj": here.q_heads}
    if layer in heads:
        part = range(heads[layer].start * plan.head_dim, heads[layer].stop * plan.head_dim)
        what = "query heads" if heads[layer] is here.q_heads else "KV heads"
    elif layer in ("embed_tokens", "lm_head"):
        part, what = here.vocab, "tokens"
    elif layer in ("gate_proj", "up_proj", "down_proj"):
        part, what = here.mlp, "MLP columns"
    else:
        return None, None, ""
    if layer in ("o_proj", "down_proj"):
        return (1, part, what) if kind_of == "weight" else (None, None, "")
    return 0, part, what


def _cut(source, dim: int | None, part: range | None, *_what) -> torch.Tensor:
    if dim is None:
        return source[:]
    return source[part.start:part.stop] if dim == 0 else source[:, part.start:part.stop]


def _read_once(read: int, kept: int, where: str, asks: str) -> None:
    if read > 1.01 * kept:
        raise NotYet(f"{where}: the numbers are right, but {read} bytes were read for {kept} that are kept, "
                     f"{read / kept:.1f} times as many{': ' * bool(asks)}{asks}")


def _owns(found: torch.Tensor, where: str) -> None:
    if (held := found.untyped_storage().nbytes()) > 1.01 * found.nbytes:
        raise NotYet(f"{where}: a view is kept, and with it all {held} bytes of what it was cut from, for "
                     f"{found.nbytes} of its own")


def _columns_in(found: torch.Tensor, whole: torch.Tensor) -> str:
    at = [next((str(i) for i in range(whole.shape[1]) if whole[:, i].equal(column)), "?") for column in found.T]
    return f"columns {', '.join(at)}" if "?" not in at else "no columns of this weight"


def _part(mine: Mine, source, start: int, shape: tuple[int, ...]):
    made = guarded(mine.function, source, start, shape)
    if not hasattr(type(made), "__getitem__"):
        raise NotYet("it cannot be sliced: part[2:5] needs a method __getitem__(self, rows)")
    return made


def _rows_of(part, rows: slice, right: torch.Tensor, source: ToySource, where: str) -> None:
    source.forget()
    found = guarded(lambda: part[rows])
    asked = f"part[{'' if rows.start is None else rows.start}:{'' if rows.stop is None else rows.stop}] of {where}"
    if not isinstance(found, torch.Tensor):
        raise NotYet(f"{asked} is {kind(found)}; a tensor must come back")
    if found.shape != right.shape:
        raise NotYet(f"{asked} has {list(found.shape)}; {list(right.shape)} must come back")
    if found.dtype != right.dtype:
        raise NotYet(f"{asked} is {found.dtype}; the source has {right.dtype}")
    if not found.equal(right):
        is_first, ours = ([at for at, row in enumerate(source.whole) if row.equal(rows[0])] for rows in (found, right))
        raise NotYet(f"{asked} begins with {f'row {is_first[0]}' if is_first else 'what is no row'} of the source; it "
                     f"should be row {ours[0]}")
    _read_once(source.taken, right.nbytes, asked, "")
