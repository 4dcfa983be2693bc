"""Notebook 02: rows of a weight, several in one, heads for ranks, column, row, one sum."""

from dataclasses import replace

import torch

from course.judge.differ import kind
from course.judge.exercise import Example, Exercise, Most, at
from course.judge.toy_checkpoint import ToySource
from course.judge.words import NotYet
from course.judge.work import Multiplications, dealt, numbers, pair
from tplab.align import reassemble
from tplab.checkpoint.layout import read_part, tensor_parts
from tplab.checks import counted
from tplab.patch import Patch, applied, original
from tplab.ranks import all_reduce, rank, world_size
from tplab.shard import split_evenly

SHARDS = "on {ranks}, the shards are the checkpoint bit for bit, and every trace point agrees with Hugging Face"
ALONE = "one rank has nothing to cut, so two and three logical ranks have judged it"


def source_of(n: int, rows: int, *columns: int) -> ToySource:
    """Numbers that say where they stand; of a bias in float16."""
    places = 500 * n + 20 * torch.arange(rows).view(-1, *columns and (1,)) + torch.arange(*columns or (1,))
    return ToySource(places.to(torch.float32 if columns else torch.float16))


def my_column_shard(source, rows: range):
    return source[rows.start:rows.stop]


def of_a_rank(answer, size, *shapes):
    """What a rank gets of sources of these shapes, and how many bytes of them it reads."""
    rows, alone = [dealt(shape[0], size)[rank()] for shape in shapes], len(shapes) == 1
    sources = [source_of(n, *shape) for n, shape in enumerate(shapes)]
    shards = answer(*(sources + rows if alone else (sources, rows)))
    yield f"for rows {', '.join(f'{each.start}:{each.stop}' for each in rows)} it returns", shards
    yield "the bytes that are read are", Most(sum(source.taken for source in sources), 1.01)


def cuts(*cases):
    return lambda: [Example(size, *shapes, ranks=size, says=(
        f"{counted(len(shapes), 'source')} {', '.join(map(str, map(list, shapes)))}, {size} ranks (row r of source n "
        "holds 500 n + 20 r, 500 n + 20 r + 1, …)"))
        for size, *shapes in cases]


def in_the_engine(setting, answer):
    if wrong := reassemble(setting.model, tensor_parallel_size=setting.tensor_parallel_size, patches=setting.patches):
        name, what = next(iter(wrong.items()))
        raise NotYet(f"in the engine, {len(wrong)} tensors are not the checkpoint's; {name}: {what}")
    setting.align()


def my_merged(sources, ranges):
    pieces = [source[rows.start:rows.stop] for source, rows in zip(sources, ranges)]
    return torch.cat(pieces)


def my_heads(num_heads, num_kv_heads, tensor_parallel_size):
    group, deal = num_heads // num_kv_heads, []
    for rank in range(tensor_parallel_size):
        first, end = (r * num_heads // tensor_parallel_size for r in (rank, rank + 1))
        deal.append((range(first, end), range(first // group, (end - 1) // group + 1)))
    return deal


def dealt_evenly(answer, num_heads, num_kv_heads, size):
    """Any deal of heads in a row is right, if no rank has many more than another, and KV heads are those it reads."""
    deal, group = answer(num_heads, num_kv_heads, size), num_heads // num_kv_heads
    if not isinstance(deal, list | tuple) or len(deal) != size:
        raise NotYet(f"it returns {kind(deal)}; a list of {counted(size, 'pair')}, one for each rank, must come back")
    deal = [pair(entry, "a pair for each rank, (query heads, KV heads),") for entry in deal]
    if any(not isinstance(heads, list | tuple | range) or len(heads) > 1000 for both in deal for heads in both):
        raise NotYet(f"rank 0 gets {deal[0]}: which heads are asked for, not how many: two ranges or lists")
    owned = [head for q, _ in deal for head in q]
    yield "the query heads of all ranks, in their order, are", owned, [*range(num_heads)]
    for r, (q, kv) in enumerate(deal):
        if not len(q):
            yield f"the query heads of rank {r} are", "none", "at least one"
        reads = sorted({head // group for head in q})
        yield f"the KV heads of rank {r}, whose query heads are {q[0]} to {q[-1]}, are", [*kv], reads
    counts = [len(q) for q, _ in deal]
    if max(counts) - min(counts) > group:
        even = [len(part) for part in split_evenly(num_heads, size)]
        yield f"the ranks' numbers of query heads, {counts}, are as even as {even}", False, True


def dealt_so(answer) -> list[Patch]:
    """The engine's plan with the heads as a learner's function deals them out."""
    def from_config(cls, config, tensor_parallel_size, **options):
        plan = original(target)(cls, config, tensor_parallel_size, **options)
        group = config.num_heads // config.num_kv_heads
        deal = answer(config.num_heads, config.num_kv_heads, tensor_parallel_size)
        return replace(plan, ranks=tuple(replace(
            shard, q_heads=range(q[0], q[-1] + 1), kv_heads=range(kv[0], kv[-1] + 1),
            kv_for_q=tuple(head // group - kv[0] for head in q)) for shard, (q, kv) in zip(plan.ranks, deal)))

    target = "tplab.shard.plan.ShardPlan.from_config"
    return [Patch(target, from_config)]


def model_dealt_so(setting, answer):
    with applied(*setting.patches):  # here too: the check of the report deals them out as well
        setting.align()


def my_linears(x, up, down, bias):
    first, end = (r * len(up) // world_size() for r in (rank(), rank() + 1))
    summand = x @ up[first:end].T @ down[:, first:end].T
    return all_reduce(summand) + bias


def multiplied(answer, x, up, down, bias):
    with Multiplications() as work:
        value = answer(x, up, down, bias)
    yield "it returns", value
    share = max(map(len, split_evenly(len(up), world_size()))) * len(x) * (x.shape[1] + len(down))
    yield "the numbers multiplied on this rank are", Most(work.count), Most(share)


def linears():
    for inner, size in ((4, 2), (5, 2), (4, 3)):  # each digit of the result is one inner feature's
        yield Example(torch.ones(1, 1), torch.ones(inner, 1), 10.0 ** torch.arange(inner)[None], torch.tensor([0.5]),
                      ranks=size, says=f"x [[1]], {inner} inner features, up all 1, down [[1, 10, 100, …]], bias "
                                       f"[0.5], {size} ranks")
    for tokens, hidden, inner, size in ((5, 6, 9, 2), (1, 5, 11, 3)):
        dtype = torch.float64 if inner > 8 else torch.float32
        shapes = (tokens, hidden), (inner, hidden), (hidden, inner), (hidden,)
        yield Example(*(numbers(*shape, seed=inner, dtype=dtype) for shape in shapes), ranks=size,
                      says=f"{counted(tokens, 'token')}, {hidden} → {inner} → {hidden} features, {size} ranks")


def models_own(setting):
    """The MLP weights of the model's first layer."""
    parts = tensor_parts(setting.checkpoint.config, setting.checkpoint.tensors)
    with setting.checkpoint.reader() as reader:
        up, down = (read_part(parts[f"model.layers.0.mlp.{way}_proj.weight"], reader).float() for way in ("up", "down"))
    return [Example(numbers(7, up.shape[1]), up, down, numbers(len(down), seed=1), ranks=setting.tensor_parallel_size,
                    says="the weights of the model")]


_CUT = "source[rows.start:rows.stop]"
_FIRST = "r * len(up) // world_size()"
_FLOOR = f"{_FIRST} -> r * (len(up) // world_size())"
_READ = "range(first // group, (end - 1) // group + 1)"
EXERCISES = [
    Exercise("02", my_column_shard, cuts((2, (5, 6)), (2, (12, 14)), (3, (11, 4)), (3, (11,)), (2, (16, 3))), {
        "these are the first rows; where do the rows of this rank begin?": "rows.start:rows.stop -> :len(rows)",
        "columns come back. A weight is [out, in]: which of the two is cut here?": (
            "[rows -> [:, rows", "[rows.start:rows.stop] -> [:, rows.start:rows.stop].T",
            "[rows.start:rows.stop] -> [:].reshape(source.shape[::-1])[:, rows.start:rows.stop].T",
            f"{_CUT} -> {_CUT} if len(source.shape) == 1 else source[:, rows.start:rows.stop]",
            f"{_CUT} -> {_CUT} if len(source.shape) == 1 else source[:, rows.start:rows.stop].T",
            f"{_CUT} -> {_CUT} if len(source.shape) == 1 else "
            "source[:].reshape(source.shape[::-1])[:, rows.start:rows.stop].T"),
        "the rows are right, and all of the source was read for them: slice the source itself": "[rows -> [:][rows",
    }, SHARDS, of_a_rank, at("tplab.shard.linear.column_shard", "tplab.shard.embedding.column_shard"), in_the_engine,
             within=0, dims="row, column", place="cuts rows out of a weight", alone=ALONE),
    Exercise("02", my_merged, cuts((2, (5, 2), (4, 2), (4, 2)), (2, (16, 6), (5, 6), (5, 6)),
                                   (3, (16, 1), (4, 1), (4, 1)), (3, (7,), (5,), (9,)), (2, (7, 4), (7, 4))), {
        "a range counts the rows of its own source, and here rows of the stacked sources are taken":
            ("zip(sources, ranges) -> zip([torch.cat([s[:] for s in sources])], "
            "[range(ranges[0].start, ranges[0].start + sum(map(len, ranges)))])",
            "[source[rows.start -> [torch.cat([s[:] for s in sources])[rows.start"),
        "the rows are right, and all of the sources were read for them": "[rows -> [:][rows",
        "every range is read from the first source": "[source[rows -> [sources[0][rows",
        "the rank's offset is divided by the number of ranks once more":
            "rows.start:rows.stop -> rows.start // world_size():rows.start // world_size() + len(rows)",
        "the first rows of each source come back": "rows.start:rows.stop -> :len(rows)",
        "the pieces are right, and stand in another order than the sources":
            tuple(f"torch.cat(pieces) -> torch.cat({order})"
                  for order in ("pieces[::-1]", "pieces[:1] + pieces[:0:-1]")),
    }, SHARDS, of_a_rank, at("tplab.shard.linear.merged_shard"), in_the_engine, within=0, dims="row, column",
             place="stacks q, k, v and gate, up", alone=ALONE),
    Exercise("02", my_heads, lambda: [Example(*layout) for layout in (
        (8, 2, 2), (8, 2, 4), (9, 3, 2), (8, 2, 3), (14, 2, 3), (6, 6, 4), (15, 5, 2), (6, 1, 4), (32, 8, 3))], {
        "what the division leaves over is on no rank":
            "r * num_heads // tensor_parallel_size -> r * (num_heads // tensor_parallel_size)",
        "a rank needs the KV heads of all its query heads, from the first to the last, whether or not another rank has "
        "them, too": (
            f"{_READ} -> range(first // group, first // group + 1)",
            f"{_READ} -> range((end - 1) // group, (end - 1) // group + 1)",
            f"{_READ} -> range(rank * num_kv_heads // tensor_parallel_size, "
            "(rank + 1) * num_kv_heads // tensor_parallel_size)",
            "r * num_heads // tensor_parallel_size -> r * (num_heads // tensor_parallel_size) ;; "
            f"{_READ} -> range(rank * max(1, num_kv_heads // tensor_parallel_size), "
            "(rank + 1) * max(1, num_kv_heads // tensor_parallel_size))"),
        "the rank's last query head is end - 1; end is on the next rank":
            f"{_READ} -> range(first // group, end // group + 1)",
        "the KV head of a rank's last query heads is missing: does the range end behind it?":
            f"{_READ} -> range(first // group, (end - 1) // group)",
        "every rank has all KV heads, and needs only those that its query heads read":
            f"{_READ} -> range(num_kv_heads)",
        "KV heads go to the ranks in turn: neighbouring query heads share one": f"{_READ} -> [rank % num_kv_heads]",
        "what is left over is all on the last rank: can it be dealt out more evenly?":
            "r * num_heads // tensor_parallel_size -> "
            "r * (num_heads // tensor_parallel_size) if r < tensor_parallel_size else num_heads",
    }, "each query head is on one rank, with the KV head that it reads; on {ranks}, every trace point agrees with "
       "Hugging Face", dealt_evenly,
             dealt_so, model_dealt_so, place="deals out the heads", alone=ALONE),
    Exercise("02", my_linears, linears, {
        "each rank returns its own summand: where are they added up, and is the result of that used?": (
            "all_reduce(summand) + bias -> summand + bias", "all_reduce(summand) + bias -> summand",
            *(f"all_reduce(summand) + bias -> summand + bias ;; {share}" for share in (
                _FLOOR, f"{_FLOOR} + min(r, len(up) % world_size())", f"{_FLOOR} if r < world_size() else len(up)",
                f"{_FIRST} -> min(len(up), r * -(-len(up) // world_size()))"))),
        "the bias is in the sum once for every rank": (
            "summand) + bias -> summand + bias)", f"summand) + bias -> summand + bias) ;; {_FLOOR}"),
        "the bias is missing": "+ bias -> ",
        "the bias is missing on the other ranks: after the sum, every rank adds it":
            "+ bias -> + bias * (rank() == 0)",
        "inner features of different ranks are added up, and they are not the same ones":
            "x @ up[first:end].T -> all_reduce(x @ up[first:end].T)",
        "every rank has computed everything":
            "all_reduce(summand) -> summand ;; up[first:end] -> up ;; [:, first:end] -> ",
        "all of up or all of down is multiplied: a rank needs only its share of both": (
            "x @ up[first:end].T -> (x @ up.T)[:, first:end]",
            "x @ up[first:end].T @ down[:, first:end].T -> "
            "torch.nn.functional.pad(x @ up[first:end].T, (first, len(up) - end)) @ down.T"),
        "what the division leaves over is on no rank": _FLOOR,
    }, "x upᵀ downᵀ + bias on every rank, each with its own share of the work, and one all_reduce; the model's own MLP "
       "weights on {ranks}, too", multiplied, more=models_own, engine=lambda setting, answer: None,
             dims="token, hidden", alone=ALONE)]
