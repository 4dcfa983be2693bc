"""Hypotheses about q, k and v: which rows of the checkpoint does a rank really hold?

Each output feature of a column-parallel layer belongs to one row of its weight and to no other. So a rank that holds
the wrong rows shows the reference's own numbers in the wrong places, and no weight needs to be looked at to see it.
"""

import itertools
from collections.abc import Iterator
from functools import partial

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import OnRank, explains, linear, matrix, misfit, right, vector
from tplab.shard import RankShard


def _rows(case: Case, shard: RankShard, part: str) -> range:
    heads, size = shard.q_heads if part == "q" else shard.kv_heads, case.plan.head_dim
    return range(heads.start * size, heads.stop * size)


def _fits_on_all_ranks(case: Case, guess) -> bool:
    """Whether each rank's shard fits ``guess(shard)``, ``[tokens, rows]``, for one of q, k and v; those that are right,
    too: they tell rules apart that give the wrong ranks the same rows."""
    ranks = [rank for rank in range(case.recording.world_size) if case.has(case.point, rank)]
    return len(case.ops) == 1 and misfit(case, lambda at, op: guess(case.plan.ranks[at.rank]).unflatten(
        1, (-1, case.config.head_dim)), ranks) <= case.tolerance


@hypothesis("k", "v")
def k_and_v_exchanged(case: Case) -> Diagnosis | None:
    """Is k what v should be?"""
    if explains(case, lambda at, op: case.right({"k": "v", "v": "k"}[op], at.rank)):
        return case.diagnosis("qkv_order", "k holds the values and v the keys: the output of the fused projection was "
                              "split in another order than [q|k|v].")


@hypothesis("k", "v")
def first_kv_rows(case: Case) -> Diagnosis | None:
    """Does every rank hold the first KV heads?"""
    reference = case.reference(case.op).flatten(1)
    if _fits_on_all_ranks(case, lambda shard: reference[:, :len(_rows(case, shard, case.op))]):
        return case.diagnosis("kv_first_rows", f"Every rank holds the first rows of {case.op}_proj, whatever its "
                              "rank: the KV heads of all ranks but rank 0 are missing.")


@hypothesis("k", "v")
def replica_by_modulo(case: Case) -> Diagnosis | None:
    """Does rank r hold KV head ``r % kv_heads``?"""
    reference, kv_heads = case.reference(case.op), case.plan.num_kv_heads

    def guess(shard):
        heads = [shard.rank % kv_heads] if len(shard.kv_heads) == 1 else list(shard.kv_heads)
        return reference[:, heads].flatten(1)
    if kv_heads < len(case.plan.ranks) and _fits_on_all_ranks(case, guess):
        return case.diagnosis("kv_replica_modulo", f"Rank r holds KV head r % {kv_heads}. Ranks that share a KV head "
                              "are neighbours: the head of rank r is r // replicas.")


def _fused(op: str) -> tuple[str, ...]:
    """The projections that are often one with this one."""
    return ("q", "k", "v") if op in "qkv" else ("gate", "up")


@hypothesis("q", "k", "v", "gate", "up")
def fused_cut_as_one_block(case: Case) -> Diagnosis | None:
    """Are a rank's rows one block of the fused ``[q|k|v]``, beginning at its share of the whole?"""
    def block(at, op):
        parts = _fused(op)
        fused, bias = (torch.cat([of(case, part) for part in parts]) for of in (matrix, vector))
        start = at.rank * len(fused) // case.plan.tensor_parallel_size
        start += sum(len(at.features(part)) for part in parts[:parts.index(op)])
        rows = (start + torch.arange(len(at.features(op)))) % len(fused)
        return linear(at, op, weight=fused, bias=bias, features=rows)
    if explains(case, block):
        *first, last = _fused(case.op)
        return case.diagnosis("fused_one_block", f"Each rank's {case.op} is the right number of rows of "
                              f"[{'|'.join(_fused(case.op))}], cut out of it as one block. Cut {', '.join(first)} and "
                              f"{last} apart first, then each for itself.")


@hypothesis("q", "k", "v", "gate", "up")
def offset_divided_twice(case: Case) -> Diagnosis | None:
    """Do the ranks' rows begin at their offset divided by tp?"""
    tp = case.plan.tensor_parallel_size

    def shifted(at, op):
        rows = at.features(op)
        return linear(at, op, features=rows - rows[0] + rows[0] // tp)
    if explains(case, shifted):
        return case.diagnosis("divided_twice", f"Every rank has the right number of rows of {case.op}, but they "
                              f"begin at the rank's offset divided by {tp}: the offset was this rank's already.")


@hypothesis("q", "k", "v", "gate", "up")
def cut_along_dim1(case: Case) -> Diagnosis | None:
    """Does x times the columns of the weight, read as ``[in, out]``, give what the ranks computed?"""
    def read(at, op, first=None):
        weight, rows = matrix(case, op), at.features(op)
        return linear(at, op, weight=weight.reshape(weight.shape[1], weight.shape[0]).T, features=rows if first is None
                      else rows - rows[0] + first * case.config.head_dim)

    def from_any_head(rank):
        here = right(case, rank).indices(case.op)
        starts = range(len(here) and case.config.num_kv_heads - len(here) + 1)
        return any(misfit(case, partial(read, first=first), [rank]) <= case.tolerance for first in starts)
    # Where heads are lost or doubled as well, nothing says which KV heads a rank meant to take.
    if explains(case, read) or case.ops in (("k",), ("v",)) and case.wrong_ranks and all(
            map(from_any_head, case.wrong_ranks)):
        name = f"{case.op}_proj"
        return case.diagnosis("shard_dim1", f"{case.op} is what comes out when {name}.weight is taken for [in, out] "
                              "and cut along dim 1. A Linear's weight is [out_features, in_features]: a "
                              "column-parallel layer keeps rows, dim 0.")


@hypothesis("q", "k", "v", "gate", "up")
def written_by_column(case: Case) -> Diagnosis | None:
    """Were the right rows written side by side into a matrix ``[in, out]`` that is read as ``[out, in]``?"""
    parts = _fused(case.op)

    def read(at, op):
        weight, bias = (torch.cat([of(case, part)[at.features(part)] for part in parts]) for of in (matrix, vector))
        start = sum(len(at.features(part)) for part in parts[:parts.index(op)])
        return linear(at, op, weight=weight.T.reshape(weight.shape), bias=bias,
                      features=start + torch.arange(len(at.features(op))))
    if explains(case, read):
        return case.diagnosis("qkv_written_by_column" if case.op in "qkv" else None, "Each rank has cut the right rows "
                              f"of {', '.join(parts)} and has written them side by side, as columns, into a fused "
                              "weight that is read by row. A part's place is a row offset, dim 0.")


def _orders(at: OnRank) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The ways in which this rank's fused ``[q|k|v]`` may be filled or split otherwise, each as the features of
    ``[q|k|v]`` that end up as q, k and v; with its name and what it is."""
    dim, heads, kv_heads = at.case.config.head_dim, len(at.indices("q")), len(at.indices("k"))
    sizes = dict(zip("qkv", (heads * dim, kv_heads * dim, kv_heads * dim)))
    every = torch.arange(sum(sizes.values()))
    blocks = dict(zip("qkv", every.split(list(sizes.values()))))
    for order in itertools.permutations("qkv"):
        if order != ("q", "k", "v"):
            name = "|".join(order)
            yield "qkv_order", f"it is filled as [{name}]", torch.cat([blocks[part] for part in order])
            read = dict(zip(order, every.split([sizes[part] for part in order])))
            yield "qkv_order", f"it was read as [{name}]", torch.cat([read[part] for part in "qkv"])
    if kv_heads and heads % kv_heads == 0:
        groups = every.view(kv_heads, -1, dim)
        read = torch.cat([groups[:, :-2].flatten(), groups[:, -2].flatten(), groups[:, -1].flatten()])
        yield "qkv_interleaved", "it was read group by group, [q … q k v] for each KV head", read
        yield "qkv_interleaved", "it is filled group by group, [q … q k v] for each KV head", read.argsort()
    halves = torch.cat([torch.arange(0, dim, 2), torch.arange(1, dim, 2)])
    for inside, says in ((halves, "neighbours lie half a head apart"), (halves.argsort(), "halves lie in turns")):
        turned = every.view(-1, dim)[:, inside]
        turned[-kv_heads:] = every.view(-1, dim)[-kv_heads:]
        yield "rope_permuted_rows", (f"the rows of each head of q and k stand in another order ({says}), as Meta's "
                                     "checkpoints and Hugging Face's differ"), turned.flatten()


@hypothesis("q", "k", "v")
def another_order_in_the_fused_tensor(case: Case) -> Diagnosis | None:
    """Was the fused projection filled in one order and split in another?"""
    def taken(at, op, says):
        fused = torch.cat([linear(at, part).flatten(1) for part in "qkv"], 1)
        start = sum(len(at.features(part)) for part in "qkv"[:"qkv".index(op)])
        for _, name, features in _orders(at):
            if name == says:
                here = fused[:, features[start:start + len(at.features(op))]]
                return here.unflatten(1, (-1, case.config.head_dim))
        return torch.full_like(fused, float("nan"))  # this rank's heads cannot stand like that
    found: dict[str, str] = {}  # one of q, k and v may fit several; what fits all of them is the bug
    for fault, says, _ in _orders(right(case, 0)):
        if fault not in found and explains(case, lambda at, op, says=says: taken(at, op, says)):
            found[fault] = says
    if found:
        fault, *others = found
        return case.diagnosis(fault, f"The weights behind {case.first.name} are right, but in the fused [q|k|v] they "
                              f"have the wrong places: {found[fault]}.", *others)


@hypothesis("q", "k", "v", last=True)
def rows_in_other_places(case: Case) -> Diagnosis | None:
    """Is every output feature one of the reference's, in another place?"""
    if case.op != case.point:
        return None
    parts = {part: case.reference(part).flatten(1).double() for part in "qkv"}
    fused = torch.cat([*parts.values()], dim=1)
    before = sum(parts[part].shape[1] for part in "qkv"[:"qkv".index(case.point)])
    for shard, held in zip(case.plan.ranks, case.shards(case.point), strict=True):
        distance = torch.cdist(held.flatten(1).double().T, fused.T, p=float("inf"))
        if not torch.isfinite(distance).all() or (distance.min(1).values > case.tolerance * held.abs().max()).any():
            return None
        rows, wanted = distance.argmin(1), torch.tensor(_rows(case, shard, case.point)) + before
        if not torch.equal(rows, wanted):
            first = int((rows != wanted).nonzero()[0])
            return case.diagnosis(
                None, f"Every output feature of {case.point} is one of Hugging Face's in another place: rank "
                f"{shard.rank} has row {int(rows[first])} of [q|k|v] where row {int(wanted[first])} belongs. The "
                "weights are right, their order or their cut is not.",
                rank=shard.rank, row=int(rows[first]), wanted=int(wanted[first]))
