"""Hypotheses about attention over several calls: what is seen of the tokens that earlier calls put into a cache."""

from collections.abc import Iterator

import torch

from tplab.align.arithmetic import attend
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import Attended, OnRank, attention, best, distance, explains, right

LOST = -1  # in the place of a row's number: it is not there


def _calls(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query, at which position its call began and of how many tokens of the sequence it is; from positions
    and numbers of keys, which differ from call to call, ``[n, 1]``."""
    _, call, sizes = keys.flatten().unique(return_inverse=True, return_counts=True)
    starts = torch.full_like(sizes, len(query) + int(query.max())).scatter_reduce(0, call, query.flatten(), "amin")
    return starts[call][:, None], sizes[call][:, None]


def _not_read(query, key, keys):
    return (key <= query) & (key >= _calls(query, keys)[0])


def _counted_from_0(query, key, keys):
    return key <= query - _calls(query, keys)[0]


def _only_first_masked(query, key, keys):
    return torch.where(_calls(query, keys)[0] > 0, key < keys, key <= query)


def _decoded_lost(query, key, keys):
    starts, sizes = _calls(query, keys)
    alone = query[(sizes == 1) & (starts > 0)]
    return (key <= query) & (~torch.isin(key, alone) | (key >= starts))


def _first_kept(query, key, keys):
    return (key <= query) & ((key < keys.min()) | (key >= _calls(query, keys)[0]))


_RULES = {
    ("cache_not_read", "each token sees those of its own call only; what is in the cache is not read"): _not_read,
    ("mask_without_past", "row i of a call sees the keys 0 to i, as if nothing were in the cache; the mask's diagonal "
     "must begin behind the tokens that are"): _counted_from_0,
    ("no_mask", "the first call is masked, the later ones are not: their tokens see the future"): _only_first_masked,
    ("cache_rows_lost", "tokens that were decoded are seen by none after them: they were not kept"): _decoded_lost,
    ("cache_rows_lost", "the tokens of the first call alone were kept"): _first_kept,
}


@hypothesis("attn")
def the_past_is_not_seen_as_it_should_be(case: Case) -> Diagnosis | None:
    """Do later calls see another part of what earlier ones computed?"""
    if len(set(case.recording.num_keys)) > 1:
        found = best(case, {kind: lambda at, op, rule=rule: attention(at, rule=rule) for kind, rule in _RULES.items()})
        if found:
            return case.diagnosis(found[0], f"Keys and values are right, but {found[1]}.")


@hypothesis("attn")
def softmax_over_the_queries(case: Case) -> Diagnosis | None:
    """Was the softmax taken over the wrong dimension?"""
    def over_queries(at, op):
        outs = []
        for one in at.sequences():
            k, v = (x[:, _reads(at)] for x in (one.k, one.v))
            for rows in _rows_of_calls(one):
                scores = one.q[rows].transpose(0, 1) @ k.permute(1, 2, 0) * case.scaling
                hidden = torch.arange(len(k))[None] > one.positions[rows][:, None]
                weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), 1, dtype=torch.float32).nan_to_num()
                outs.append((weights.to(v.dtype) @ v.transpose(0, 1)).transpose(0, 1))
        return torch.cat(outs)
    if explains(case, over_queries):
        return case.diagnosis("softmax_dim", "The softmax was taken over the queries; a query's weights over its keys "
                              "must add up to 1.")


@hypothesis("attn", last=True)
def another_row_in_the_cache(case: Case) -> Diagnosis | None:
    """Does a row of the cache hold another token's key and value, or none?"""
    if case.point != "attn" or not case.wrong_ranks:
        return None
    at, held, tables, first = right(case, case.wrong_ranks[0]), case.shard("attn", case.wrong_ranks[0]), [], None
    for number, one in enumerate(at.sequences()):
        ours, held = held[:len(one.q)], held[len(one.q):]
        table = torch.arange(len(one.k))
        for rows in _rows_of_calls(one):
            start, last = int(one.positions[rows].min()), int(rows.max())
            if distance(ours[last:last + 1], _looked_up(at, one, rows[-1:], table)) > case.tolerance:
                found = _swap(at, one, last, start, table, ours[last]) if start else None
                if found is None:
                    return None
                first = first or (number, start, *found)
                table = table.clone()
                table[found[0]] = found[1]
            tables.append(table)
    if first is None:
        return None

    def with_tables(at, op):
        left = iter(tables)
        return torch.cat([_looked_up(at, one, rows, next(left)) for one in at.sequences()
                          for rows in _rows_of_calls(one)])
    if explains(case, with_tables):
        number, start, row, other = first
        return case.diagnosis("cache_row_stale", f"From position {start} on, row {row} of sequence {number}'s cache "
                              + ("is empty." if other == LOST else f"holds token {other}'s key and value."), row=row)


def _rows_of_calls(one: Attended) -> Iterator[torch.Tensor]:
    """The rows of a sequence, call by call."""
    for number in one.num_keys.unique():
        yield (one.num_keys == number).nonzero().flatten()


def _reads(at: OnRank) -> torch.Tensor:
    return torch.tensor(at.indices("attn")) // at.case.group


def _looked_up(at: OnRank, one: Attended, rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Attention of some rows where row i of the cache holds token ``table[i]``."""
    visible = (torch.arange(len(table))[None] <= one.positions[rows][:, None]) & (table != LOST)
    k, v = (x[table][:, _reads(at)] for x in (one.k, one.v))
    return attend(one.q[rows], k, v, visible, at.case.scaling)


def _swap(at: OnRank, one: Attended, row: int, start: int, table: torch.Tensor, held: torch.Tensor
          ) -> tuple[int, int] | None:
    """Which row of the cache, holding which other token, explains one row's output; the nearest, if it fits."""
    q, size = one.q[row].double(), int(one.positions[row]) + 1
    k, v = (x[:size, _reads(at)].double() for x in (one.k, one.v))
    scores = torch.einsum("hd,khd->kh", q, k) * at.case.scaling
    e = torch.cat([(scores - scores.max(0).values).exp(), scores.new_zeros(1, scores.shape[1])])[..., None]
    ev = e * torch.cat([v, v.new_zeros(1, *v.shape[1:])])  # the last one: no token at all
    now = table[:size]
    above, below, found = ev[now].sum(0), e[now].sum(0), (float("inf"), 0, 0)
    for cached in range(start):
        guess = (above - ev[now[cached]] + ev) / (below - e[now[cached]] + e)
        gaps = (guess - held.double()).abs().amax((1, 2)) / guess.abs().amax((1, 2)).clamp(min=1e-30)
        other = int(gaps.argmin())
        found = min(found, (float(gaps[other]), cached, LOST if other == size else other))
    return found[1:] if found[0] <= at.case.tolerance else None
