"""Every operation of the forward pass, on one rank, from what this rank had before it."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby

import torch
from torch.nn import functional as F

from tplab.align.arithmetic import activation, attend, distance, rms_norm, rotated
from tplab.checkpoint.layout import EMBEDDING, HEAD
from tplab.model.rope import Rotary

SUMS = {"o": ("self_attn.o_proj", "attn"), "mlp": ("mlp.down_proj", "mlp_act")}  # part → module, what it is made from


class Operations:
    """What :class:`tplab.align.local.LocalFrame` does at each point: ``_NAME(at, rank)`` makes the point ``at + NAME``,
    where ``at`` is ``"layers.3."``, or ``""`` at the ends of the model.
    """

    def _embed(self, at: str, rank: int) -> torch.Tensor:
        return self._shared("embed", lambda: self.weights.raw(EMBEDDING)[self.ids].to(self.dtype))

    @cached_property
    def ids(self) -> torch.Tensor:
        """The token id of each row."""
        return torch.tensor([self.recording.ids[s][position] for s, position in self.recording.places])

    def _norm_of(self, name: str, weight: str, x: torch.Tensor) -> torch.Tensor:
        return self._shared(name, lambda x: rms_norm(x, self.weights[weight], self.config.rms_norm_eps), x)

    def before(self, at: str) -> str:
        """The point that goes into a layer."""
        layer = int(at.split(".")[1]) if at else self.config.num_layers
        return f"layers.{layer - 1}.output" if layer else "embed"

    def _input_norm(self, at: str, rank: int) -> torch.Tensor:
        return self._norm_of(at + "input_norm", f"model.{at}input_layernorm.weight", self.value(self.before(at), rank))

    def _post_norm(self, at: str, rank: int) -> torch.Tensor:
        return self._norm_of(at + "post_norm", f"model.{at}post_attention_layernorm.weight",
                             self.value(at + "residual", rank))

    def _norm(self, at: str, rank: int) -> torch.Tensor:
        return self._norm_of("norm", "model.norm.weight", self.value(self.before(at), rank))

    def column(self, module: str, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """A column-parallel layer's output features ``rows``."""
        bias = self.weights[f"{module}.bias"] if f"{module}.bias" in self.weights else None
        rows = as_index(rows)
        return F.linear(x, self.weights[f"{module}.weight"][rows], None if bias is None else bias[rows])

    def _heads(self, at: str, rank: int, part: str) -> torch.Tensor:
        rows = columns_of(self.indices(at + part, rank), self.config.head_dim)
        found = self.column(f"model.{at}self_attn.{part}_proj", self.value(at + "input_norm", rank), rows)
        return found.unflatten(1, (-1, self.config.head_dim))

    def _q(self, at: str, rank: int) -> torch.Tensor:
        return self._heads(at, rank, "q")

    def _k(self, at: str, rank: int) -> torch.Tensor:
        return self._heads(at, rank, "k")

    def _v(self, at: str, rank: int) -> torch.Tensor:
        return self._heads(at, rank, "v")

    def _q_norm(self, at: str, rank: int, part: str = "q") -> torch.Tensor:
        name = f"{at}{part}_norm"
        x = self.parts_of(at + part, rank, self.indices(name, rank))
        return rms_norm(x, self.weights[f"model.{at}self_attn.{part}_norm.weight"], self.config.rms_norm_eps)

    def _k_norm(self, at: str, rank: int) -> torch.Tensor:
        return self._q_norm(at, rank, "k")

    @cached_property
    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of every row's position, ``[1, rows, head_dim]``."""
        return self.tables(self.config.hf, self.positions)

    def tables(self, config, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by a transformers ``config``, the rows taken to stand at ``positions``."""
        # A dynamic RoPE depends on how long the sequence was when the row was computed.
        runs = groupby(zip(self.recording.places, self.recording.num_keys), lambda row: (row[0][0], row[1]))
        parts = [(len(list(rows)), keys) for (_, keys), rows in runs]
        return Rotary(config)(torch.empty(0, dtype=self.dtype), positions, parts)

    def before_rope(self, part: str) -> str:
        """The short name of the point that RoPE turns: ``"q"`` or ``"q_norm"``."""
        return f"{part}_norm" if self.config.qk_norm else part

    def _q_rope(self, at: str, rank: int, part: str = "q") -> torch.Tensor:
        x = self.parts_of(at + self.before_rope(part), rank, self.indices(f"{at}{part}_rope", rank))
        return rotated(self.config.model_type, x, *self.cos_sin)

    def _k_rope(self, at: str, rank: int) -> torch.Tensor:
        return self._q_rope(at, rank, "k")

    @cached_property
    def key_rows(self) -> list[torch.Tensor]:
        """Per sequence and position, the row in which its key was computed: its own, or where a prefix cache had it,
        that of a sequence which begins alike; -1 if there is none."""
        texts, places = self.recording.ids, self.recording.places
        rows = {place: row for row, place in enumerate(places)}

        def row(number: int, position: int) -> int:
            alike = (s for s, text in enumerate(texts) if text[:position + 1] == texts[number][:position + 1])
            return rows.get((number, position), next((rows[s, position] for s in alike if (s, position) in rows), -1))
        ends = {number: position + 1 for number, position in places}  # places are sorted: the last one stays
        return [torch.tensor([row(number, position) for position in range(ends.get(number, 0))], dtype=torch.long)
                for number in range(len(texts))]

    def rows_of(self, number: int) -> slice:
        """The rows of a sequence."""
        rows = [row for row, (s, _) in enumerate(self.recording.places) if s == number]
        return slice(rows[0], rows[-1] + 1) if rows else slice(0, 0)

    def keys(self, number: int, name: str, rank: int, heads: Sequence[int]) -> torch.Tensor:
        """``k_rope`` or ``v`` of a sequence as this rank had computed them, ``[positions, heads, head_dim]``; those
        that no call computed are Hugging Face's: the engine took them out of a cache in which they never were."""
        return self._keys(number, name, self.parts_of(name, rank, heads), heads)

    def _keys(self, number: int, name: str, computed: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        rows = self.key_rows[number]
        found, lost = computed[rows.clamp(min=0)], rows < 0
        if lost.any():
            found[lost] = self._hf_points(number)[name][:len(rows)][lost][:, list(heads)].to(self.dtype)
        return found

    def sequences(self, at: str, rank: int, heads: Sequence[int]
                  ) -> Iterator[tuple[int, slice, torch.Tensor, torch.Tensor]]:
        """Each sequence that was computed: its number, its rows, its ``k_rope`` and its ``v`` as :meth:`keys` has them.
        """
        names = at + "k_rope", at + "v"
        computed = [self.parts_of(name, rank, heads) for name in names]
        for number in range(len(self.recording.ids)):
            if (rows := self.rows_of(number)).stop > rows.start:
                yield number, rows, *(self._keys(number, name, x, heads) for name, x in zip(names, computed))

    def _attn(self, at: str, rank: int) -> torch.Tensor:
        heads, group = self.indices(at + "attn", rank), self.config.num_heads // self.config.num_kv_heads
        q = self.parts_of(at + "q_rope", rank, heads)
        read = [head // group for head in heads]
        held = sorted(set(read))
        copies = [held.index(head) for head in read]
        out = torch.empty_like(q)
        for _, rows, k, v in self.sequences(at, rank, held):
            visible = torch.arange(len(k))[None] <= self.positions[rows][:, None]
            out[rows] = attend(q[rows], k[:, copies], v[:, copies], visible, self.config.head_dim ** -0.5)
        return out

    # The two row-parallel layers.

    def _columns(self, at: str, part: str, rank: int) -> list[int]:
        """The input columns of a row-parallel layer that a rank holds."""
        made_from = SUMS[part][1]
        return columns_of(self.indices(at + made_from, rank), self.config.head_dim if part == "o" else 1)

    def without_bias(self, at: str, part: str, rank: int) -> torch.Tensor:
        """A rank's summand of a row-parallel layer, from its own columns."""
        module, made_from = SUMS[part]
        weight = self.weights[f"model.{at}{module}.weight"]
        return self._shared(f"{at}{part} without bias", lambda x: F.linear(
            x.flatten(1), weight[:, as_index(self._columns(at, part, rank))]), self.value(at + made_from, rank))

    def summands(self, at: str, part: str, rank: int) -> list[int]:
        """The ranks whose summands make up the whole, seen from ``rank``: itself if it holds all columns, otherwise
        every rank that adds columns of its own."""
        columns = {r: set(self._columns(at, part, r)) for r in self.holders(at)}
        if all(set(self._columns(at, part, rank)) >= other for other in columns.values()):
            return [rank]
        chosen, covered = [], set()
        for r in columns:
            if columns[r] - covered:
                chosen.append(r)
                covered |= columns[r]
        return chosen

    def bias_shares(self, at: str, part: str, rank: int) -> dict[int, float]:
        """How much of the bias each summand has: once in all, or not at all where it is added to the sum; whichever
        rank adds it. One that is added more often is a bug: then it should have been the first rank's."""
        name, ranks = f"model.{at}{SUMS[part][0]}.bias", self.summands(at, part, rank)
        if name not in self.weights:
            return dict.fromkeys(ranks, 0.0)
        bias, default = self.weights[name], {r: float(r == ranks[0]) for r in ranks}
        if any(self.shard(f"{at}{part}_partial", r) is None for r in ranks):
            return default
        found = {}
        for r in ranks:
            more = self.value(f"{at}{part}_partial", r) - self.without_bias(at, part, r)
            times = ((more @ bias) / (bias @ bias)).nanmedian().item()
            found[r] = min((0.0, 1.0, 1 / len(ranks)), key=lambda share: abs(share - times))
            if not abs(found[r] - times) < 0.1 / len(ranks):
                return default
        return found if min(abs(sum(found.values()) - total) for total in (0, 1)) < 1e-6 else default

    def _partial(self, at: str, part: str, rank: int) -> torch.Tensor:
        own = self.without_bias(at, part, rank)
        share = self.bias_shares(at, part, rank).get(rank, 0.0)
        return own + share * self.weights[f"model.{at}{SUMS[part][0]}.bias"] if share else own

    def _sum(self, at: str, part: str, rank: int) -> torch.Tensor:
        shares = self.bias_shares(at, part, rank)
        bias = f"model.{at}{SUMS[part][0]}.bias"

        def total(*summands):
            whole = sum(summands[1:], summands[0])
            return whole + self.weights[bias] if bias in self.weights and not sum(shares.values()) else whole
        return self._shared(f"{at}{part} sum", total, *(self.value(f"{at}{part}_partial", r) for r in shares))

    def _o_partial(self, at: str, rank: int) -> torch.Tensor:
        return self._partial(at, "o", rank)

    def _o_proj(self, at: str, rank: int) -> torch.Tensor:
        return self._sum(at, "o", rank)

    def _mlp_partial(self, at: str, rank: int) -> torch.Tensor:
        return self._partial(at, "mlp", rank)

    def _mlp(self, at: str, rank: int) -> torch.Tensor:
        return self._sum(at, "mlp", rank)

    def _residual(self, at: str, rank: int) -> torch.Tensor:
        return self._shared(at + "residual", torch.add, self.value(self.before(at), rank),
                            self.value(at + "o_proj", rank))

    def _output(self, at: str, rank: int) -> torch.Tensor:
        return self._shared(at + "output", torch.add, self.value(at + "residual", rank), self.value(at + "mlp", rank))

    def _gate(self, at: str, rank: int, part: str = "gate") -> torch.Tensor:
        return self.column(f"model.{at}mlp.{part}_proj", self.value(at + "post_norm", rank),
                           self.indices(at + part, rank))

    def _up(self, at: str, rank: int) -> torch.Tensor:
        return self._gate(at, rank, "up")

    def _mlp_act(self, at: str, rank: int) -> torch.Tensor:
        columns = self.indices(at + "mlp_act", rank)
        gate, up = (self.parts_of(at + part, rank, columns) for part in ("gate", "up"))
        return activation(self.config.hidden_act)(gate) * up

    @cached_property
    def logit_rows(self) -> torch.Tensor:
        """The rows of the other points from which the logits were made."""
        rows = {place: row for row, place in enumerate(self.recording.places)}
        return torch.tensor([rows[place] for place in self.recording.logit_places], dtype=torch.long)

    def _logits(self, at: str, rank: int) -> torch.Tensor:
        weight = self.weights.raw(HEAD if HEAD in self.weights else EMBEDDING)
        rows, norms = self.indices("logits", rank), {r: self.value("norm", r)[self.logit_rows] for r in self.ranks}

        def product(rank, rows):
            return F.linear(norms[rank], weight[as_index(rows)].to(self.dtype))
        own, shard = product(rank, rows), self.shard("logits", rank)
        if shard is None or len(rows) < len(weight) or all(torch.equal(norms[rank], norm) for norm in norms.values()):
            return own
        # Whole logits on a rank were computed there, or gathered from ranks that had other inputs.
        gathered = torch.cat([product(held.rank, held.vocab) for held in self.plan.ranks], 1)
        return min((own, gathered[:, as_index(rows)]), key=lambda right: distance(shard.tensor, right))


def columns_of(items: Sequence[int], size: int) -> list[int]:
    """The features of heads (or of other items) that have ``size`` each."""
    if _in_a_row(items):
        return list(range(items[0] * size, (items[-1] + 1) * size))
    return [item * size + j for item in items for j in range(size)]


def as_index(indices: Sequence[int]) -> slice | torch.Tensor:
    """Indices as something to index with; a slice, which copies nothing, where they follow one another."""
    if _in_a_row(indices):
        return slice(indices[0], indices[0] + len(indices))
    return torch.tensor(indices, dtype=torch.long)


def _in_a_row(indices: Sequence[int]) -> bool:
    return len(indices) > 0 and list(indices) == list(range(indices[0], indices[0] + len(indices)))
