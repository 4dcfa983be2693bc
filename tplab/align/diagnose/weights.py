"""Hypotheses about q, k and v: which rows of the checkpoint does a rank really hold?

Each output feature of a column-parallel layer belongs to one row of its weight and to no other. So a rank that holds
the wrong rows shows the reference's own numbers in the wrong places, and no weight needs to be looked at to see it.
"""

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.shard import RankShard


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(1)


def _rows(case: Case, shard: RankShard, what: str) -> range:
    heads, size = shard.q_heads if what == "q" else shard.kv_heads, case.plan.head_dim
    return range(heads.start * size, heads.stop * size)


def _on_all_ranks(case: Case, guess) -> bool:
    """Whether each rank's shard of the first divergent tensor fits ``guess(shard)``, ``[tokens, rows]``."""
    return all(case.fits(_flat(held), guess(shard))
               for shard, held in zip(case.plan.ranks, case.shards(case.at), strict=True))


def cut_along_dim1(case: Case) -> Diagnosis | None:
    """Does x times the columns of the weight, read as ``[in, out]``, give what the ranks computed?"""
    weight, x = case.tensor(f"self_attn.{case.at}_proj.weight"), case.right("input_norm")
    bias = case.tensor(f"self_attn.{case.at}_proj.bias") if case.config.qkv_bias else torch.zeros(len(weight))
    read = weight.reshape(weight.shape[1], weight.shape[0])

    def guess(shard):
        rows = _rows(case, shard, case.at)
        return x @ read[:, rows.start:rows.stop] + bias[rows.start:rows.stop].to(x.dtype)
    if _on_all_ranks(case, guess):
        return case.found("shard_dim1",
                          f"{case.at} is what comes out when {case.at}_proj.weight is taken for [in, out] "
                          "and cut along dim 1. A Linear's weight is [out_features, in_features]: a column-parallel "
                          "layer keeps rows, dim 0.", relative=case.first.relative)
    return None


def one_block(case: Case) -> Diagnosis | None:
    """Are a rank's rows one block of the fused ``[q|k|v]``, beginning at its share of the whole?"""
    fused = torch.cat([_flat(case.right(part)) for part in "qkv"], dim=1)

    def guess(shard):
        before = sum(len(_rows(case, shard, part)) for part in "qkv"[:"qkv".index(case.at)])
        start = shard.rank * fused.shape[1] // case.plan.tensor_parallel_size + before
        return fused.roll(-start, 1)[:, :len(_rows(case, shard, case.at))]
    if _on_all_ranks(case, guess):
        return case.found("fused_one_block",
                          f"Each rank's {case.at} is the right number of rows of [q|k|v], cut out of "
                          "it as one block. Cut q, k and v apart first, then each for itself.",
                          relative=case.first.relative)
    return None


def offset_divided(case: Case) -> Diagnosis | None:
    """Do the ranks' rows begin at their offset divided by tp?"""
    reference, tp = _flat(case.right(case.at)), case.plan.tensor_parallel_size

    def guess(shard):
        rows = _rows(case, shard, case.at)
        return reference[:, rows.start // tp:rows.start // tp + len(rows)]
    if _on_all_ranks(case, guess):
        return case.found("divided_twice", f"Every rank has the right number of rows of {case.at}, but they begin at "
                          f"the rank's offset divided by {tp}: the offset was this rank's already.",
                          relative=case.first.relative)
    return None


def exchanged(case: Case) -> Diagnosis | None:
    """Is k what v should be?"""
    if case.fits(case.ours(case.at), case.right({"k": "v", "v": "k"}[case.at])):
        return case.found("qkv_order",
                          "k holds the values and v the keys: the output of the fused projection was split "
                          "in another order than [q|k|v].", relative=case.first.relative)
    return None


def first_kv_rows(case: Case) -> Diagnosis | None:
    """Does every rank hold the first KV heads?"""
    reference = _flat(case.right(case.at))
    if _on_all_ranks(case, lambda shard: reference[:, :len(_rows(case, shard, case.at))]):
        return case.found("kv_first_rows", f"Every rank holds the first rows of {case.at}_proj, whatever its rank: the "
                          "KV heads of all ranks but rank 0 are missing.", relative=case.first.relative)
    return None


def replica_by_modulo(case: Case) -> Diagnosis | None:
    """Does rank r hold KV head ``r % kv_heads``?"""
    reference, kv_heads = case.right(case.at), case.plan.num_kv_heads

    def guess(shard):
        heads = [shard.rank % kv_heads] if len(shard.kv_heads) == 1 else list(shard.kv_heads)
        return _flat(reference[:, heads])
    if kv_heads < len(case.plan.ranks) and _on_all_ranks(case, guess):
        return case.found("kv_replica_modulo", f"Rank r holds KV head r % {kv_heads}. Ranks that share a KV head are "
                          "neighbours: the head of rank r is r // replicas.", relative=case.first.relative)
    return None


def moved_rows(case: Case) -> Diagnosis | None:
    """Nothing known fits; but is every output feature one of the reference's, in another place?"""
    fused = torch.cat([_flat(case.right(part)) for part in "qkv"], dim=1).double()
    for shard, held in zip(case.plan.ranks, case.shards(case.at), strict=True):
        distance = torch.cdist(_flat(held).double().T, fused.T, p=float("inf"))
        if not torch.isfinite(distance).all() or (distance.min(1).values > case.tolerance * held.abs().max()).any():
            return None
        rows, offset = distance.argmin(1), {"q": 0, "k": case.right("q")[0].numel()}
        offset["v"] = offset["k"] + case.right("k")[0].numel()
        wanted = torch.tensor(_rows(case, shard, case.at)) + offset[case.at]
        if not torch.equal(rows, wanted):
            first = int((rows != wanted).nonzero()[0])
            return case.found(None,
                              f"Every output feature of {case.at} is one of Hugging Face's in another place: rank "
                              f"{shard.rank} has row {int(rows[first])} of [q|k|v] where row {int(wanted[first])} "
                              "belongs. The weights are right, their order or their cut is not.",
                              rank=shard.rank, row=int(rows[first]), wanted=int(wanted[first]))
    return None


_ANY = (one_block, offset_divided)
HYPOTHESES = {
    "q": (*_ANY, cut_along_dim1, moved_rows),
    "k": (exchanged, first_kv_rows, replica_by_modulo, *_ANY, cut_along_dim1, moved_rows),
    "v": (exchanged, first_kv_rows, replica_by_modulo, *_ANY, cut_along_dim1, moved_rows),
}
