"""Which rows of a sequence's cache hold another key or value than they should, as far as attention tells?"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F

from tplab.align.diagnose.altered import unaltered
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.table import procedure
from tplab.align.operations import Attended

UNKNOWN = -1  # a key that no token has


@procedure("attn", names="cache_row_stale", last=True)
def stale_rows(case: Case) -> Diagnosis | None:
    """Does a row of the cache hold another token's key or value, or what no token has?"""
    if case.point != "attn" or not torch.isfinite(case.ours("attn")).all():
        return None
    at = unaltered(case, case.wrong_ranks[0])
    heads = sorted({at.frame.kv_heads[head] for head in at.indices("attn")})
    reads = [heads.index(at.frame.kv_heads[head]) for head in at.indices("attn")]
    first, changed = None, 0
    for one in at.frame.sequences(at.layer, at.rank, heads):
        cache = _Cache(one, reads, at.held()[one.rows].double(), case.config.scaling, case.tolerance)
        for keys in one.num_keys.unique():
            rows = (one.num_keys == keys).nonzero().flatten().tolist()
            while wrong := cache.unexplained(rows):
                if (found := cache.change_one(wrong)) is None:
                    return None
                first = first or (one.number, int(one.positions[rows[0]]), *found)
        if not cache.keys_confirmed():
            return None
        changed += len(cache.changed)
    if first is None:
        return None
    number, start, row, what = first
    more = f", and {changed - 1} more row{'s' * (changed > 2)} like it" * (changed > 1)
    return case.diagnosis("cache_row_stale", f"From position {start} on, row {row} of sequence {number}'s cache {what}"
                          f"{more}: it was not written, or written over.", row=row, position=start)


class _Cache:
    """What stands in a sequence's cache: its own keys and values, but for the rows in ``changed``.

    A query holds the mean of the values, each weighted with ``e``, the exponential of its score. What it holds without
    one row, ``base``, is known; with it, it holds ``base + share · (value - base)``. So a row is read off from where
    several queries' lines from ``base`` to what they hold meet, and its weight from how far along the line they are.
    """

    def __init__(self, one: Attended, reads: list[int], held: torch.Tensor, scaling: float, tolerance: float):
        # Behind the tokens' keys and values those of a slot that was never written: zeros.
        k, v = (F.pad(x.double()[:, reads], (0, 0, 0, 0, 0, 1)) for x in (one.k, one.v))
        scores = torch.einsum("qhd,khd->qkh", one.q.double(), k) * scaling
        self.e = (scores - scores.amax(1, keepdim=True)).exp()  # [rows, tokens + 1, heads]
        self.tokens, self.held = v, held  # [tokens + 1, heads, dim], [rows, heads, dim]
        self.reads = torch.tensor(reads)
        self.sees, self.tolerance = (one.positions + 1).tolist(), tolerance
        self.key_of, self.values = torch.arange(len(one.k)), v[:-1].clone()
        self.changed: dict[int, int] = {}  # row of the cache → the last query that showed it at once
        self.trusted = torch.zeros(len(one.k), dtype=torch.long)  # how many queries were right that read each

    def _base(self, query: int, without: int = -2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a query holds by the known keys, ``[heads, dim]``, the sum of their weights, ``[heads, 1]``, and the
        rows whose keys are unknown."""
        of = self.key_of[:self.sees[query]]
        known = (of != UNKNOWN) & (torch.arange(len(of)) != without)
        e = (self.e[query, of] * known[:, None])[..., None]
        total = e.sum(0).clamp(min=1e-300)
        return (e * self.values[:len(of)]).sum(0) / total, total, (of == UNKNOWN).nonzero().flatten()

    def _explained(self, query: int) -> tuple[float, torch.Tensor, torch.Tensor]:
        """How far what a query holds is from what the cache gives; the rows whose keys are unknown, and their weights,
        ``[heads, rows]``: whatever fits best."""
        base, total, free = self._base(query)
        along = (self.values[free] - base).permute(1, 2, 0)  # [heads, dim, free]
        if len(free) > along.shape[1] // 2:
            return float("inf"), free, along[:, 0]  # with such shares anything could come out
        gone = self.held[query] - base
        shares = torch.linalg.lstsq(along, gone[..., None]).solution[..., 0].clamp(0, 1) if len(free) else along[:, 0]
        off = (gone - (along @ shares[..., None])[..., 0]).abs().max() / self.held[query].abs().max().clamp(min=1e-30)
        return off.item(), free, shares / (1 - shares.sum(1, keepdim=True)).clamp(min=1e-300) * total

    def unexplained(self, queries: list[int]) -> list[int]:
        """The queries that the cache as it is does not explain."""
        wrong = [query for query in queries if not self._explained(query)[0] <= self.tolerance]
        for query in {*queries} - {*wrong}:
            self.trusted[:self.sees[query]] += 1
        return wrong

    @contextmanager
    def _holding(self, row: int, key: int, value: torch.Tensor) -> Iterator[None]:
        """With another key and value in a row."""
        kept = self.key_of[row].clone(), self.values[row].clone()
        self.key_of[row], self.values[row] = key, value
        yield
        self.key_of[row], self.values[row] = kept

    def keys_confirmed(self) -> bool:
        """Whether later queries confirm the unknown keys: none of them fits the row's own key, and they do not all fit
        one multiple of its weight. What only the call shows that wrote the row may be a wrong mask; one multiple for
        all queries is a bias."""
        unknown = {row: last for row, last in self.changed.items() if self.key_of[row] == UNKNOWN}
        for row, last in unknown.items():
            later, times = range(last + 1, len(self.sees)), [torch.zeros(0)]
            with self._holding(row, row, self.tokens[row]):
                if any(self._explained(query)[0] <= self.tolerance for query in later):
                    return False
            for query in later:
                _, free, weights = self._explained(query)
                times.append(weights[:, free == row][:, 0] / self.e[query, row])
            times = torch.cat(times)
            if len(times) > 3 and (times - times.mean()).abs().max() < 1e-2 * times.mean():
                return False
        return not unknown or min(unknown.values()) < len(self.sees) - 1

    def change_one(self, wrong: list[int]) -> tuple[int, str] | None:
        """Change what one row of the cache holds so that these queries are explained, and say how; None if nothing
        does."""
        for contents in (self._of_tokens, self._of_no_token):
            fits = []
            for row in (row for row in range(self.sees[wrong[-1]]) if row not in self.changed):
                for key, value, says in contents(row, wrong):
                    with self._holding(row, key, value):
                        if all(self._explained(query)[0] <= self.tolerance for query in wrong):
                            off = max(self._explained(query)[0] for query in wrong)
                            fits.append((int(self.trusted[row]), off, row, key, value, says))
                            break
            if contents == self._of_no_token:  # rows that others read rightly before are less likely to be the one
                fits = [fit for fit in fits if fit[0] == min(fit[0] for fit in fits)]
            if fits and (contents == self._of_tokens or len(fits) == 1):
                *_, row, key, value, says = min(fits, key=lambda fit: fit[1])
                self.key_of[row], self.values[row], self.changed[row] = key, value, wrong[-1]
                return row, says
        return None

    def _of_tokens(self, row: int, wrong: list[int]) -> Iterator[tuple[int, torch.Tensor, str]]:
        """The other token (or the slot never written) of which a row may hold key and value, or only one of the two."""
        query, nothing = wrong[-1], len(self.key_of)
        base, total, free = self._base(query, row)
        if len(free):
            return
        others = [*range(self.sees[query]), nothing]
        e, v = self.e[query, others][..., None], self.tokens[others]
        for what, weights, values in (("{}'s key and value", e, v),
                                      ("{}'s value beside its own key", self.e[query, row][:, None].expand_as(e), v),
                                      ("{}'s key beside its own value", e, self.tokens[row].expand_as(v))):
            guess = (base * total + weights * values) / (total + weights)
            best = others[int((guess - self.held[query]).abs().amax((1, 2)).argmin())]
            says = "is empty" if what[3:] == "s key and value" and best == nothing else (
                "holds " + what.format("an empty slot" if best == nothing else f"token {best}"))
            yield row if "own key" in what else best, self.tokens[row if "own value" in what else best], says

    def _of_no_token(self, row: int, wrong: list[int]) -> Iterator[tuple[int, torch.Tensor, str]]:
        """What a row may hold that no token has: a value, a key, or both."""
        seen = [(query, *self._base(query, row)) for query in wrong if row < self.sees[query]]
        # Where it weighs most first.
        seen.sort(key=lambda one: -float((self.held[one[0]] - one[1]).abs().max()))
        if min(len(seen), 8) * int(torch.bincount(self.reads).min()) < 2:
            return
        if not any(len(free) for *_, free in seen[:8]):
            yield row, self._beside_own_key(row, seen[:8]), "holds a value that no token has, beside its own key"
        value = self._meeting(seen[:8])
        yield UNKNOWN, self.tokens[row], "holds a key that no token has, beside its own value"
        if value is not None:
            yield UNKNOWN, value, "holds a key and a value that no token has"

    def _beside_own_key(self, row: int, seen: list) -> torch.Tensor:
        """The value that these queries hold of a row if its key is its own; a larger share says more."""
        own = [self.e[query, row][:, None] for query, *_ in seen]
        shares = torch.stack([mine / (total + mine) for mine, (_, _, total, _) in zip(own, seen)])
        values = torch.stack([base + (self.held[query] - base) / share.clamp(min=1e-300)
                              for share, (query, base, _, _) in zip(shares, seen)])
        alike = (self.reads[:, None] == self.reads).to(values)  # the heads that read one KV head
        return torch.einsum("gh,qhd->gd", alike, values * shares ** 2) / torch.einsum("gh,qhd->gd", alike, shares ** 2)

    def _meeting(self, seen: list) -> torch.Tensor | None:
        """Where the lines of these queries meet, of which the longest tell most: the value of a row of which nothing is
        known. Each head's part of it, alike for heads that read one KV head; None if there are too few lines."""
        found, dim = torch.zeros_like(self.tokens[0]), self.tokens.shape[-1]
        for kv in self.reads.unique():
            total, side, known = torch.zeros(dim, dim).to(found), torch.zeros(dim).to(found), -dim // 2
            for query, base, _, free in seen:
                for head in (self.reads == kv).nonzero().flatten().tolist():
                    along = torch.cat([self.held[[query], head], self.values[free, head]]).T - base[head][:, None]
                    line, _ = torch.linalg.qr(along)
                    across = along[:, 0].norm() ** 2 * (torch.eye(dim).to(found) - line @ line.T)
                    total, side, known = total + across, side + across @ base[head], known + dim - along.shape[1]
            if known < dim or not torch.linalg.cond(total) < 1e10:  # too little is known of too much
                return None
            found[self.reads == kv] = torch.linalg.solve(total, side)
        return found
