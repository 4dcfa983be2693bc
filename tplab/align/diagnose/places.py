"""Procedures that find out which row, head, column or token it is, if not the right one."""

from collections.abc import Iterator
from functools import partial

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.table import Family, Mistake, procedure, words
from tplab.align.diagnose.wrong import At, distance, explains, misfit, module, right
from tplab.align.operations import Attended
from tplab.align.points import made_by

LINEAR = made_by("linear", "head")


# Rows of weights.
def kv_rule(name: str, change, when, says: str):
    """A rule of which KV heads a rank holds. All ranks have to fit it, those that are right, too: they tell rules apart
    that give the wrong ranks the same rows."""
    @procedure("k", "v", names=name)
    def other_rule(case: Case) -> Diagnosis | None:
        held = [rank for rank in case.frame.ranks if case.has(case.point, rank)]
        if len(case.ops) == 1 and when(case) and misfit(case, change, held) <= case.tolerance:
            return case.diagnosis(name, says.format(**words(case)))
    return other_rule


@procedure("k", "v", names="shard_dim1")
def cut_along_dim1_anywhere(case: Case) -> Diagnosis | None:
    """Does the weight, read as ``[in, out]``, fit from any head on? Where heads are lost or doubled as well, nothing
    says which KV heads a rank meant to take."""
    def from_any_head(rank: int) -> bool:
        here = right(case, rank).indices(case.op)
        starts = range(len(here) and case.config.num_kv_heads - len(here) + 1)
        return any(misfit(case, lambda at, first=first: at.in_out(first), [rank]) <= case.tolerance
                   for first in starts)
    if len(case.ops) == 1 and case.wrong_ranks and all(map(from_any_head, case.wrong_ranks)):
        return case.diagnosis("shard_dim1", f"{case.op} is what comes out when {case.op}_proj.weight is taken for [in, "
                              "out] and cut along dim 1. A Linear's weight is [out_features, in_features]: a "
                              "column-parallel layer keeps rows, dim 0.")


def fused(op: str) -> tuple[str, ...]:
    """The projections that are often one with this one."""
    return next((parts for parts in (("q", "k", "v"), ("gate", "up")) if op in parts), (op,))


def _in_other_places(case: Case) -> Diagnosis | None:
    """Is every feature on every rank one of the model's, in another place?"""
    moved = []
    for rank in [rank for rank in case.frame.ranks if case.has(case.point, rank)] if case.op == case.point else ():
        at, held = right(case, rank), case.looked_at(case.shard(case.op, rank)).flatten(1).double()
        parts = [case.looked_at(at.make(part, features=range(len(at.matrix(part))))).flatten(1).double()
                 for part in fused(case.op)]
        start = sum(part.shape[1] for part in parts[:fused(case.op).index(case.op)])
        some = torch.arange(held.shape[1])[::max(1, held.shape[1] // 256) if case.op == "logits" else 1]
        gaps = torch.cdist(held[:, some].T, torch.cat(parts, 1).T, p=float("inf"))
        if len(held) < 2 or not torch.isfinite(gaps).all() or (
                gaps.min(1).values > case.tolerance * held.abs().max()).any():
            return None
        moved += [(rank, row, wanted) for row, wanted in zip(gaps.argmin(1).tolist(), (
            start + at.features())[some].tolist()) if row != wanted]
    if not moved or case.op == "logits" and ranks_exchanged(case):
        return None
    rank, row, wanted = moved[0]
    numbers = {"rank": rank, "row": row, "wanted": wanted}
    if case.op == "logits":
        own = all(row in case.plan.ranks[rank].vocab for rank, row, _ in moved)
        says = ("The head's rows are right, but stand in another order" if own else
                "Every logit is right, but for another token")
        return case.diagnosis("head_rows", f"{says}: rank {rank} has token {row}'s logit where token {wanted}'s "
                              "belongs.", **numbers)
    whole = f"[{'|'.join(fused(case.op))}]"
    return case.diagnosis(
        None if case.op in "qkv" else "mlp_columns", f"Every output feature of {case.op} is one of the checkpoint's in "
        f"another place: rank {rank} has row {row} of {whole} where row {wanted} belongs. The weights are right, their "
        "order or their cut is not.", **numbers)


head_rows = procedure("logits", names="head_rows")(partial(_in_other_places))
in_other_places = procedure("q", "k", "v", "gate", "up", names="mlp_columns", last=True)(partial(_in_other_places))


@procedure(*LINEAR, names="shard_of_another_rank")
def shard_of_another_rank(case: Case) -> Diagnosis | None:
    """Does a rank hold the part of the weight that belongs to another?"""
    tp = case.recording.world_size
    if tp == 1 or {"k", "v"} & {*case.ops} and case.config.num_kv_heads < tp:
        return None  # ranks that share a KV head hold the same by right
    parts = {op: [At(case, rank, case.frame, op).features().tolist() for rank in range(tp)] for op in case.ops}

    def taking(taken: list[int]):
        return lambda at: {"features": parts[at.op][taken[at.rank]]}
    taken = list(range(tp))
    if case.op != case.point:
        # Made from all ranks' parts, these cannot be looked at one by one.
        alike = all(len({*map(len, own)}) == 1 for own in parts.values())
        ways = [[(rank + shift) % tp for rank in range(tp)] for shift in range(1, tp)] + [[r] * tp for r in range(tp)]
        taken = next((way for way in ways if alike and explains(case, taking(way))), taken)
    else:
        for rank in case.wrong_ranks:
            for other in (other for other in range(tp) if other != rank):
                if all(len(own[other]) == len(own[rank]) for own in parts.values()) and misfit(
                        case, taking([other] * tp), [rank]) <= case.tolerance:
                    taken[rank] = other
                    break
            else:
                return None
    first = next((rank for rank, other in enumerate(taken) if rank != other), None)
    if first is not None:
        return case.diagnosis("shard_of_another_rank", f"Rank {first} multiplies with rank {taken[first]}'s part of "
                              f"{module(case)} (the ranks' parts: {taken}).", rank=first, taken=taken[first])


@procedure("logits", names="shard_of_another_rank")
def ranks_exchanged(case: Case) -> Diagnosis | None:
    """Are these Hugging Face's logits, with the ranks' parts in another place?"""
    parts = [case.reference("logits")[:, shard.vocab.start:shard.vocab.stop] for shard in case.plan.ranks]
    if all(any(case.fits(held, part) for part in parts) for held in case.shards("logits")):
        return case.diagnosis("shard_of_another_rank", "Every rank's logits are right, but they stand in another "
                              "rank's place.")


# KV heads.
@procedure("attn", names="query_to_kv")
def other_kv_heads(case: Case) -> Diagnosis | None:
    """Which KV head does each query head read: its keys and its values, or only one of the two?"""
    if case.point != "attn":
        return None
    own, kv_heads = case.frame.kv_heads, case.config.num_kv_heads
    for what, parts in (("", ("keys_of", "values_of")), ("the values of ", ("values_of",)),
                        ("the keys of ", ("keys_of",))):
        wrong = {head: kv for head, kv in _read(case, parts, own).items() if kv != own[head]}
        if not wrong:
            continue
        head, kv = next(iter(wrong.items()))

        modulo, zero = ({h: reads for h in range(len(own)) if (reads := pattern(h)) != own[h]}
                        for pattern in (lambda h: h % kv_heads, lambda h: 0))
        says = (f"h reads {what}KV head h % kv_heads; " if wrong == modulo else
                f"all query heads read {what}KV head 0; " if wrong == zero else "")
        return case.diagnosis("query_to_kv", f"K and V are right, but {says}query head {head} reads {what}KV head "
                              f"{kv}; in grouped attention, head h reads h // group, here {own[head]} ({len(wrong)} of "
                              f"{len(own)} query heads read another one than theirs).", head=head, reads=kv)


def _read(case: Case, parts: tuple[str, ...], own: list[int]) -> dict[int, int]:
    """The KV head that each query head of the wrong ranks reads, of these parts; none if that explains not all of them.
    """
    reads = {}
    for rank in case.wrong_ranks:
        at, held = At(case, rank, case.frame, "attn"), case.shard("attn", rank)
        guesses = {kv: at.make(**{part: [kv] * len(own) for part in parts}) for kv in range(case.config.num_kv_heads)}
        for local, head in enumerate(at.indices("attn")):
            gaps = {kv: distance(*(case.looked_at(x[:, local]) for x in (held, guess)))
                    for kv, guess in guesses.items()}
            reads[head] = min(gaps, key=lambda kv: (gaps[kv] > case.tolerance, kv != own[head], gaps[kv]))
            if gaps[reads[head]] > case.tolerance:
                return {}
    return reads


def keys_and_values_exchanged(change, when):
    """k and v are right where they were made: did they change places on the way to the rotation and to attention?"""
    one = Family(("k_rope", "attn"), Mistake(
        "qkv_order", "Keys and values change places behind the projection: what attention takes for keys are the "
        "rotated values, and it hands on the keys. Is the fused output split as q | k | v?", change, when=when))

    @procedure("k_rope", "attn", names="qkv_order")
    def exchanged(case: Case) -> Diagnosis | None:
        together = [case] if case.op == "k_rope" or case.has("k_rope") else [case, case.with_(ops=("k_rope", "attn"))]
        return next(filter(None, map(one, together)), None)
    return exchanged


# Rows of a cache.
@procedure("attn", names="cache_row_stale", last=True)
def another_row_in_the_cache(case: Case) -> Diagnosis | None:
    """Does a row of the cache hold another token's key or value, or what no token has?"""
    if case.point != "attn" or not case.wrong_ranks:
        return None
    at = right(case, case.wrong_ranks[0])
    held, first, caches, ones = case.shard("attn", at.rank), None, [], []
    heads = sorted({at.frame.kv_heads[head] for head in at.indices("attn")})
    reads = [heads.index(at.frame.kv_heads[head]) for head in at.indices("attn")]
    for one in at.frame.sequences(at.layer, at.rank, heads):
        caches.append(_Cache(one, reads, case.scaling, case.tolerance))
        ones.append(one)
        for rows in rows_of_calls(one):
            while wrong := caches[-1].unexplained(rows, held[one.rows]):
                if (found := caches[-1].replace_one(wrong)) is None:
                    return None
                first = first or (one.number, int(one.positions[rows].min()), *found)
    if first is None or not all(cache.holds_keys_of_none(held[one.rows]) for cache, one in zip(caches, ones)):
        return None
    (number, start, row, what), more = first, sum(len(cache.changed) for cache in caches) - 1
    return case.diagnosis("cache_row_stale", f"From position {start} on, row {row} of sequence {number}'s cache {what}"
                          + f", and {more} more row{'s' * (more > 1)} like it" * (more > 0) + ": it was not written, "
                          "or written over.", row=row, position=start)


def rows_of_calls(one: Attended) -> Iterator[torch.Tensor]:
    """The rows of a sequence, call by call."""
    for number in one.num_keys.unique():
        yield (one.num_keys == number).nonzero().flatten()


class _Cache:
    """What stands in a sequence's cache, as far as what was read from it tells: its own keys and values, but for the
    rows in ``changed``."""

    def __init__(self, one: Attended, reads: list[int], scaling: float, tolerance: float):
        self.positions, self.reads, self.tolerance = one.positions, torch.tensor(reads), tolerance
        scores = torch.einsum("qhd,khd->qkh", one.q.double(), one.k.double()[:, reads]) * scaling
        self.e = (scores - scores.amax(1, keepdim=True)).exp()  # [rows, keys, heads]
        self.own = one.v.double()[:, reads]  # [keys, heads, dim]
        self.values, self.key_of = self.own.clone(), torch.arange(len(one.k))  # -1: a key that no token has
        self.changed: dict[int, int] = {}  # row of the cache → the last position that showed it at once
        self.trusted = torch.zeros(len(one.k), dtype=torch.long)  # how many rows were right that read each

    def _parts(self, row: int, without: int = -1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of a row: what the known keys give above the line, ``[heads, dim]``, and below, ``[heads, 1]``, and the rows
        of the cache whose keys are not known."""
        of = self.key_of[:int(self.positions[row]) + 1]
        e = self.e[row][of.clamp(min=0)].masked_fill((of < 0)[:, None], 0.0)
        if 0 <= without < len(e):
            e[without] = 0
        return (e[..., None] * self.values[:len(e)]).sum(0), e.sum(0)[:, None], (of < 0).nonzero().flatten()

    def unexplained(self, rows: torch.Tensor, held: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """The rows that the cache as it is does not explain, with what they hold."""
        left = {row: self._left(row, held[row].double()) for row in rows.tolist()}
        for row in (row for row in left if left[row] <= self.tolerance):
            self.trusted[:int(self.positions[row]) + 1] += 1
        return [(row, held[row].double()) for row in left if not left[row] <= self.tolerance]

    def _left(self, row: int, held: torch.Tensor) -> float:
        """What is not explained of a row; keys that nobody knows may have any share of it."""
        above, below, free = self._parts(row)
        if len(free) > held.shape[-1] // 2:
            return float("inf")  # with such shares anything could come out
        guess = above / below.clamp(min=1e-300)
        if len(free):
            more = self.values[free] - guess  # [free, heads, dim]
            share = torch.linalg.lstsq(more.permute(1, 2, 0), (held - guess)[..., None]).solution[..., 0].T[..., None]
            guess = guess + (share.clamp(0, 1) * more).sum(0)
        return float((guess - held).abs().max() / held.abs().max().clamp(min=1e-30))

    def holds_keys_of_none(self, held: torch.Tensor) -> bool:
        """Whether rows whose keys no token has are read like that again: what only the call shows that wrote them may
        be something else, a wrong mask for one."""
        rows = [row for row in self.changed if self.key_of[row] < 0]
        if any(self._is_a_bias(cached, held) for cached in rows):
            return False
        again = [self._needs(cached, row, held[row].double()) for cached in rows
                 for row in range(len(held)) if self.positions[row] > self.changed[cached]]
        return not rows or bool(again) and all(again)

    def _is_a_bias(self, cached: int, held: torch.Tensor) -> bool:
        """Whether a row's own key would do if each query looked at it so many times as much: that is no other key."""
        kept, self.key_of[cached] = int(self.key_of[cached]), -1
        more = []
        for row in (row for row in range(len(held)) if self.positions[row] > self.changed[cached]):
            above, below, free = self._parts(row)
            if len(free) == 1:
                base = above / below
                away, gone = self.values[cached] - base, held[row].double() - base
                share = (away * gone).sum(-1) / (away * away).sum(-1)
                more.append(share / (1 - share) * below[:, 0] / self.e[row, cached])
        self.key_of[cached] = kept
        more = torch.cat(more) if more else torch.zeros(0)
        return len(more) > 3 and bool((more - more.mean()).abs().max() < 1e-2 * more.mean().abs())

    def _needs(self, cached: int, row: int, held: torch.Tensor) -> bool:
        """Whether a row of attention is not explained by the cache's row with its own key and value."""
        kept = int(self.key_of[cached]), self.values[cached].clone()
        self.key_of[cached], self.values[cached] = cached, self.own[cached]
        left = self._left(row, held)
        self.key_of[cached], self.values[cached] = kept
        return left > self.tolerance

    def replace_one(self, wrong: list[tuple[int, torch.Tensor]]) -> tuple[int, str] | None:
        """Change what one row of the cache holds so that these rows are explained, and say how; None if nothing does.
        """
        size = int(self.positions[wrong[-1][0]]) + 1
        for contents in (self._of_tokens, self._of_none):
            fits = []
            for cached in (at for at in range(size) if at not in self.changed):
                for key, value, says in contents(cached, wrong):
                    kept = int(self.key_of[cached]), self.values[cached].clone()
                    self.key_of[cached], self.values[cached] = key, value
                    left = max(self._left(row, held) for row, held in wrong)
                    self.key_of[cached], self.values[cached] = kept
                    if left <= self.tolerance:
                        fits.append((int(self.trusted[cached]), left, cached, key, value, says))
                        break
            if contents == self._of_none:  # rows that others read rightly before are less likely to be the one
                fits = [fit for fit in fits if fit[0] == min(fit[0] for fit in fits)]
            if fits and (contents == self._of_tokens or len(fits) == 1):
                *_, cached, key, value, says = min(fits, key=lambda fit: fit[1])
                self.key_of[cached], self.values[cached] = key, value
                self.changed[cached] = int(self.positions[wrong[-1][0]])
                return cached, says
        return None

    def _of_tokens(self, cached: int, wrong: list) -> Iterator[tuple[int, torch.Tensor, str]]:
        """The other token of which a row may hold key and value, or only one of the two; or nothing at all."""
        row, held = wrong[-1]
        above, below, free = self._parts(row, cached)
        if len(free):
            return
        size = int(self.positions[row]) + 1
        e, v, mine = self.e[row, :size], self.own[:size], self.e[row, cached]
        for says, weigh, values in (("holds token {}'s key and value", e, v),
                                    ("holds token {}'s value beside its own key", mine.expand_as(e), v),
                                    ("holds token {}'s key beside its own value", e, self.own[cached].expand_as(v))):
            guess = (above + weigh[..., None] * values) / (below + weigh[..., None])
            other = int(((guess - held).abs().amax((1, 2)) / held.abs().max()).argmin())
            yield (cached if weigh is not e else other), values[other], says.format(other)
        if (above / below.clamp(min=1e-300) - held).abs().max() <= self.tolerance * held.abs().max():
            yield -1, torch.zeros_like(held), "is empty"

    def _of_none(self, cached: int, wrong: list) -> Iterator[tuple[int, torch.Tensor, str]]:
        """What a row may hold that no token has: a value, a key, or both, solved for from what was read."""
        seen = [(row, held, *self._parts(row, cached)) for row, held in wrong if cached <= int(self.positions[row])]
        # Where it weighs most first.
        seen.sort(key=lambda one: -float((one[1] - one[2] / one[3].clamp(min=1e-300)).abs().max()))
        own, seen = self.own[cached], seen[:8]
        per_head = len(seen) * min(torch.bincount(self.reads)).item()  # equations for each KV head
        if per_head < 2 or not seen:
            return
        if not any(len(free) for *_, free in seen):
            yield cached, self._value(cached, seen), "holds a value that no token has, beside its own key"
        yield -1, own, "holds a key that no token has, beside its own value"
        if (value := self._solved(seen)) is not None:
            yield -1, value, "holds a key and a value that no token has"

    def _value(self, cached: int, seen: list) -> torch.Tensor:
        """The value beside its own key, one for all query heads that read one KV head; a larger share says more."""
        found, shares = [], []
        for row, held, above, below, _ in seen:
            mine = self.e[row, cached][:, None]
            found.append((held * (below + mine) - above) / mine.clamp(min=1e-300))
            shares.append((mine / (below + mine)) ** 2)
        found, shares = torch.stack(found), torch.stack(shares)
        total = torch.stack([(found * shares)[:, self.reads == kv].sum((0, 1)) for kv in self.reads])
        return total / torch.stack([shares[:, self.reads == kv].sum((0, 1)) for kv in self.reads]).clamp(min=1e-300)

    def _solved(self, seen: list) -> torch.Tensor | None:
        """The value of a row of which nothing is known. ``base`` is what the known keys give; a query holds ``base +
        share · (value - base)``, and as much of the values whose keys nobody knows: the value is where these lines
        meet, of which the longest tell most."""
        out, dim = torch.zeros_like(self.values[0]), self.values.shape[-1]
        for kv in self.reads.unique():
            total, side, known = torch.zeros(dim, dim).to(out), torch.zeros(dim).to(out), -dim // 2
            for _, held, above, below, free in seen:
                for head in (self.reads == kv).nonzero().flatten().tolist():
                    base = above[head] / below[head].clamp(min=1e-300)
                    along = torch.stack([held[head] - base, *(self.values[free, head] - base)], 1)
                    line, _ = torch.linalg.qr(along)
                    across = along[:, 0].norm() ** 2 * (torch.eye(dim).to(out) - line @ line.T)
                    total, side, known = total + across, side + across @ base, known + dim - along.shape[1]
            if known < dim or not torch.linalg.cond(total) < 1e10:  # too little is known of too much
                return None
            out[self.reads == kv] = torch.linalg.solve(total, side)
        return out
