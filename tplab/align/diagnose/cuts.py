"""Mistakes of which rows (of a row-parallel weight, which columns) a rank has, and in which order."""

import itertools
from collections.abc import Callable
from functools import partial

import torch

from tplab.align.diagnose.altered import IMPOSSIBLE, At, misfit, module, unaltered
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.table import Family, Mistake, procedure
from tplab.align.points import columns_of, made_by

PRODUCTS = made_by("linear", "head")
HEADS = ("q", "k", "v")
COLUMNS = (*HEADS, "gate", "up")


def _fused(op: str) -> tuple[str, ...]:
    """The projections that are often one with this one."""
    return next((parts for parts in (HEADS, ("gate", "up")) if op in parts), (op,))


def _fused_says(case: Case) -> dict[str, str]:
    """The fused weight and its parts, in words."""
    *first, last = _fused(case.op)
    return {f"[{'|'.join((*first, last))}]": f"{', '.join(first)} and {last}"}


def _start(at: At) -> int:
    """Where this rank's part of the op begins among its parts of the fused weight."""
    parts = _fused(at.op)
    return sum(len(at.features(part)) for part in parts[:parts.index(at.op)])


def _here(at: At) -> torch.Tensor:
    """The rows of this rank's part of the op, counted within its parts of the fused weight."""
    return _start(at) + torch.arange(len(at.features()))


def _kv_heads(heads: Callable) -> Callable:
    """The KV heads that a rank takes by another rule: ``heads(its shard, how many KV heads there are)``."""
    return lambda at: {"features": columns_of(heads(at.case.plan.ranks[at.rank], at.case.config.num_kv_heads),
                                              at.case.config.head_dim)}


def _one_block(at: At, _) -> dict:
    weight, bias = (torch.cat([of(part) for part in _fused(at.op)]) for of in (at.matrix, at.vector))
    rows = (at.rank * len(weight) // at.case.plan.tensor_parallel_size + _here(at)) % len(weight)
    return {"weight": weight, "bias": bias, "features": rows.tolist()}


def _by_column(at: At, _) -> dict:
    weight, bias = (torch.cat([of(part)[at.features(part)] for part in _fused(at.op)])
                    for of in (at.matrix, at.vector))
    return {"weight": weight.T.reshape(weight.shape), "bias": bias, "features": _here(at).tolist()}


def _written_by_column(name: str, ops: tuple[str, ...]) -> Family:
    return Family(ops, Mistake(
        name, "Each rank has cut the right rows of {text} and has written them side by side, as columns, into a fused "
        "weight that is read by row. A part's place is a row offset, dim 0.", _by_column, _fused_says))


def _divided_twice(at: At) -> dict:
    rows = at.features()
    first = int(rows[0]) if len(rows) else 0
    return {"features": (rows - first + first // at.case.plan.tensor_parallel_size).tolist()}


def _along_dim1(at: At) -> torch.Tensor:
    """The weight taken for ``[in, out]``. Its k and v may begin at any head: where heads are lost or doubled as well,
    nothing says which KV heads a rank meant to take."""
    weight, rows, dim = at.matrix(), at.features(), at.case.config.head_dim
    own = len(at.indices(at.op))
    heads = range(at.case.config.num_kv_heads - own + 1) if at.op in "kv" and at.op == at.case.point and own else ()
    return at.nearest({"weight": weight.reshape(weight.shape[1], weight.shape[0]).T, "features": here.tolist()}
                      for here in (rows, *(rows - rows[0] + first * dim for first in heads)))


def _orders(at: At) -> dict[str, torch.Tensor]:
    """The ways in which this rank's fused ``[q|k|v]`` may be filled or split otherwise: what it is → the features of
    ``[q|k|v]`` that end up as q, k and v."""
    dim, heads, kv_heads = at.case.config.head_dim, len(at.indices("q")), len(at.indices("k"))
    sizes = dict(zip(HEADS, (heads * dim, kv_heads * dim, kv_heads * dim)))
    every = torch.arange(sum(sizes.values()))
    blocks, found = dict(zip(HEADS, every.split(list(sizes.values())))), {}
    for order in itertools.permutations(HEADS):
        if order != HEADS:
            found[f"it is filled as [{'|'.join(order)}]"] = torch.cat([blocks[part] for part in order])
            read = dict(zip(order, every.split([sizes[part] for part in order])))
            found[f"it was read as [{'|'.join(order)}]"] = torch.cat([read[part] for part in HEADS])
    if kv_heads and heads % kv_heads == 0:
        groups = every.view(kv_heads, -1, dim)
        read = torch.cat([groups[:, :-2].flatten(), groups[:, -2].flatten(), groups[:, -1].flatten()])
        found["it was read group by group, [q … q k v] for each KV head"] = read
        found["it is filled group by group, [q … q k v] for each KV head"] = read.argsort()
    halves = torch.cat([torch.arange(0, dim, 2), torch.arange(1, dim, 2)])
    for inside, says in ((halves, "neighbours lie half a head apart"), (halves.argsort(), "halves lie in turns")):
        turned = every.view(-1, dim)[:, inside]
        turned[-kv_heads:] = every.view(-1, dim)[-kv_heads:]
        found[f"the rows of each head of q and k stand in another order ({says}), as Meta's checkpoints and Hugging "
              "Face's differ"] = turned.flatten()
    return found


def _in_order(at: At, says: str) -> torch.Tensor:
    whole = torch.cat([at.make(part).flatten(1) for part in HEADS], 1)
    features = _orders(at).get(says)
    if features is None:
        return torch.full_like(whole, IMPOSSIBLE)  # this rank's heads cannot stand like that
    return whole[:, features[_here(at)]].unflatten(1, (-1, at.case.config.head_dim))


def _order(name: str, kind: Callable[[str], bool]) -> Family:
    return Family(HEADS, Mistake(name, "The weights behind {name} are right, but in the fused [q|k|v] they have the "
                                 "wrong places: {text}.", _in_order,
                                 lambda case: {says: says for says in _orders(unaltered(case, 0)) if kind(says)}))


def _in_other_places(case: Case) -> Diagnosis | None:
    """Is every feature on every rank one of the model's, in another place?"""
    moved, parts = [], _fused(case.op)
    for rank in [rank for rank in case.frame.ranks if case.has(case.point, rank)] if case.op == case.point else ():
        at, held = unaltered(case, rank), case.looked_at(case.shard(case.op, rank)).flatten(1).double()
        whole = {part: case.looked_at(at.make(part, features=range(len(at.matrix(part))))).flatten(1).double()
                 for part in parts}
        wanted = sum(whole[part].shape[1] for part in parts[:parts.index(case.op)]) + at.features()
        some = torch.arange(held.shape[1])[::max(1, held.shape[1] // 256) if case.op == "logits" else 1]
        gaps = torch.cdist(held[:, some].T, torch.cat([*whole.values()], 1).T, p=float("inf"))
        if len(held) < 2 or not torch.isfinite(gaps).all() or (
                gaps.min(1).values > case.tolerance * held.abs().max()).any():
            return None
        moved += [(rank, *rows) for rows in zip(gaps.argmin(1).tolist(), wanted[some].tolist()) if rows[0] != rows[1]]
    if not moved or case.op == "logits" and shard_of_another_rank(case):
        return None
    rank, row, wanted = moved[0]
    numbers = {"rank": rank, "row": row, "wanted": wanted}
    if case.op == "logits":
        own = all(row in case.plan.ranks[rank].vocab for rank, row, _ in moved)
        says = ("The head's rows are right, but stand in another order" if own else
                "Every logit is right, but for another token")
        return case.diagnosis("head_rows", f"{says}: rank {rank} has token {row}'s logit where token {wanted}'s "
                              "belongs.", **numbers)
    whole, = _fused_says(case)
    return case.diagnosis(
        None if case.op in "qkv" else "mlp_columns", f"Every output feature of {case.op} is one of the checkpoint's in "
        f"another place: rank {rank} has row {row} of {whole} where row {wanted} belongs. The weights are right, their "
        "order or their cut is not.", **numbers)


head_rows = procedure("logits", names="head_rows")(partial(_in_other_places))
in_other_places = procedure(*COLUMNS, names="mlp_columns", last=True)(partial(_in_other_places))


@procedure(*PRODUCTS, names="shard_of_another_rank")
def shard_of_another_rank(case: Case) -> Diagnosis | None:
    """Does a rank hold the part of the weight that belongs to another?"""
    ranks = list(case.frame.ranks)
    if len(ranks) == 1 or {"k", "v"} & {*case.ops} and case.config.num_kv_heads < len(ranks):
        return None  # ranks that share a KV head hold the same by right
    parts = {op: [At(case, rank, case.frame, op).features().tolist() for rank in ranks] for op in case.ops}

    def fits(taken: list[int], rank: int | None = None) -> bool:
        alike = all(len(own[mine]) == len(own[other]) for own in parts.values()
                    for mine, other in enumerate(taken) if rank in (None, mine))
        return alike and misfit(case, lambda at: {"features": parts[at.op][taken[at.rank]]},
                                None if rank is None else [rank]) <= case.tolerance
    if case.op == case.point:
        taken = [next((other for other in ranks if other != rank and fits([other] * len(ranks), rank)), None)
                 if rank in case.wrong_ranks else rank for rank in ranks]
        ways = [] if None in taken or taken == ranks else [taken]
    else:  # made from all ranks' parts, so that these cannot be looked at one by one
        ways = [ranks[shift:] + ranks[:shift] for shift in ranks[1:]] + [[rank] * len(ranks) for rank in ranks]
        ways = filter(fits, ways)
    for taken in ways:
        first = next(rank for rank in ranks if taken[rank] != rank)
        return case.diagnosis("shard_of_another_rank", f"Rank {first} multiplies with rank {taken[first]}'s part of "
                              f"{module(case)} (the ranks' parts: {taken}).", rank=first, taken=taken[first])


CUTS = (
    Family(("k", "v"), Mistake(
        "qkv_order", "k holds the values and v the keys: the output of the fused projection was split in another order "
        "than [q|k|v].", lambda at: at.expected({"k": "v", "v": "k"}[at.op]))),
    Family(("k", "v"), Mistake(
        "kv_first_rows", "Every rank holds the first rows of {op}_proj, whatever its rank: the KV heads of all ranks "
        "but rank 0 are missing.", _kv_heads(lambda shard, kv_heads: range(len(shard.kv_heads))), all_ranks=True)),
    Family(("k", "v"), Mistake(
        "kv_replica_modulo", "Rank r holds KV head r % {c.num_kv_heads}. Ranks that share a KV head are neighbours: "
        "the head of rank r is r // replicas.", _kv_heads(lambda shard, kv_heads: (
            [shard.rank % kv_heads] if len(shard.kv_heads) == 1 else shard.kv_heads)), all_ranks=True,
        when=lambda case: case.plan.num_kv_heads < len(case.plan.ranks))),
    Family(COLUMNS, Mistake(
        "fused_one_block", "Each rank's {op} is the right number of rows of {value}, cut out of it as one block. Cut "
        "{text} apart first, then each for itself.", _one_block, _fused_says)),
    Family(COLUMNS, Mistake(
        "divided_twice", "Every rank has the right number of rows of {op}, but they begin at the rank's offset divided "
        "by {tp}: the offset was this rank's already.", _divided_twice)),
    Family(COLUMNS, Mistake(
        "shard_dim1", "{op} is what comes out when {op}_proj.weight is taken for [in, out] and cut along dim 1. A "
        "Linear's weight is [out_features, in_features]: a column-parallel layer keeps rows, dim 0.", _along_dim1)),
    _written_by_column("qkv_written_by_column", HEADS),
    _written_by_column("written_by_column", ("gate", "up")),
    _order("qkv_order", lambda says: "[" in says and "group" not in says),
    _order("qkv_interleaved", lambda says: "group" in says),
    _order("rope_permuted_rows", lambda says: "Meta" in says),
    in_other_places,
)
