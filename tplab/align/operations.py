"""Every operation of the forward pass on one rank, from this rank's own values before it.

Each parameter's default is its right value. A mistake is a call with one of them changed.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, wraps
from itertools import groupby
from typing import NamedTuple

import torch
from torch.nn import functional as F

from tplab.align.arithmetic import activation, attend, distance, rms_norm, rotated, soft_cap
from tplab.align.experts import ExpertOperations
from tplab.align.points import POINTS, as_index, columns_of, layer_of, layout, made_from
from tplab.checkpoint.layout import EMBEDDING, EXPERTS, HEAD
from tplab.model.rope import Rotary


class Attended(NamedTuple):
    """The rows of one sequence on one rank: their positions, their queries, and all keys and values of the sequence."""

    number: int  # of the sequence
    rows: slice
    positions: torch.Tensor  # [n]
    num_keys: torch.Tensor  # [n], how many keys there were when each was computed
    q: torch.Tensor  # [n, heads here, head_dim]
    k: torch.Tensor  # [m, KV heads, head_dim]
    v: torch.Tensor


def causal(query: torch.Tensor, key: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The right rule: which keys ``[1, m]`` a query ``[n, 1]`` may see, when there are ``keys`` of them."""
    return key <= query


def fixed(method: Callable) -> Callable:
    """A method of a frame whose answer no value of a point can change: each is worked out once."""
    @wraps(method)
    def asked(self, *about):
        key = method, *about
        if key not in self._fixed:
            self._fixed[key] = method(self, *about)
        return self._fixed[key]
    return asked


class Operations(ExpertOperations):
    """The operations of :class:`tplab.align.local.LocalFrame`. ``op(at, point, rank)`` makes the point ``at + point``,
    where ``at`` is ``"layers.3."``, or ``""`` at the ends of the model; :meth:`make` finds the op.
    """

    def make(self, name: str, rank: int, **changed) -> torch.Tensor:
        """A point by its operation, with some of its parameters changed."""
        at, _, point = name.rpartition(".")
        return getattr(self, POINTS[point].op)(f"{at}." if at else "", point, rank, **changed)

    @fixed
    def module(self, at: str, point: str) -> str:
        """The checkpoint's name of the module behind a point."""
        name = POINTS[point].module
        if point == "router_logits":
            name = EXPERTS[self.config.experts.stored][0]
        return f"model.{at}{dict(self.config.norms).get(name, name)}" if at else name

    def before(self, at: str) -> str:
        """The point that goes into a layer."""
        layer = int(at.split(".")[1]) if at else self.config.num_layers
        return f"layers.{layer - 1}.output" if layer else "embed"

    @fixed
    def sources(self, at: str, point: str) -> list[str]:
        """The points from which another one is made."""
        return [self.before(at) if source == "before" else at + source for source in made_from(at + point, self.config)]

    def given(self, at: str, point: str, rank: int) -> torch.Tensor:
        """The input of an operation that has one."""
        name = self.sources(at, point)[0]
        if POINTS[point].op in ("norm", "rope") and layout(point) != "replicated":
            return self.parts_of(name, rank, self.indices(at + point, rank))
        return self.value(name, rank)

    @cached_property
    def ids(self) -> torch.Tensor:
        """The token id of each row."""
        return torch.tensor([self.recording.ids[s][position] for s, position in self.recording.places])

    @cached_property
    def embedding_multiplier(self) -> float:
        """The factor of embeddings, in the run's dtype where the model rounds it."""
        factor = self.config.embedding_multiplier
        return torch.tensor(factor, dtype=self.recording.dtype).item() if self.config.rounds_multiplier else factor

    def embed(self, at: str, point: str, rank: int, *, ids: torch.Tensor | None = None, times: float | None = None
              ) -> torch.Tensor:
        """Rows of the embedding, for other token ids if they are given, times another number."""
        times = self.embedding_multiplier if times is None else times
        if ids is not None:
            return self.weights.raw(EMBEDDING)[ids].to(self.dtype) * times
        return self._shared(f"embed {times}", lambda: self.weights.raw(EMBEDDING)[self.ids].to(self.dtype) * times)

    def norm(self, at: str, point: str, rank: int, *, x: torch.Tensor | None = None, weight: torch.Tensor | None = None,
             eps: float | None = None, kind: str | None = None) -> torch.Tensor:
        """RMSNorm; of another input, with another weight or epsilon, of another kind."""
        eps, kind = self.config.rms_norm_eps if eps is None else eps, kind or self.config.norm
        over = None
        if x is None and layout(point) != "replicated" and self.config.full_width_qk_norm:
            heads = range(self.config.num_heads if point == "q_norm" else self.config.num_kv_heads)
            over = self.parts_of(self.sources(at, point)[0], rank, heads)
        x = self.given(at, point, rank) if x is None else x
        weight = self.norm_weight(at, point, rank) if weight is None else weight
        if over is not None:
            return rms_norm(x, weight, eps, kind, over.flatten(1)[:, None])
        return self._shared(f"{at}{point} {eps} {kind}", lambda x, weight: rms_norm(x, weight, eps, kind), x, weight)

    def norm_weight(self, at: str, point: str, rank: int) -> torch.Tensor:
        """A norm's weight; over the full width of q or k that of this rank's heads, ``[heads here, head_dim]``."""
        weight = self.weights[f"{self.module(at, point)}.weight"]
        if layout(point) == "replicated" or not self.config.full_width_qk_norm:
            return weight
        return weight.view(-1, self.config.head_dim)[as_index(self.indices(at + point, rank))]

    # Products.

    def features(self, at: str, point: str, rank: int) -> Sequence[int]:
        """The rows of the weight (of a row-parallel one, the columns) that make this rank's part of a point."""
        if layout(point) == "replicated":
            return range(len(self.matrix(at, point)))
        name = POINTS[point].made_from[0] if layout(point) == "partial" else point
        return columns_of(self.indices(at + name, rank), self.config.head_dim if "heads" in layout(name) else 1)

    @fixed
    def part(self, at: str, point: str, rank: int) -> slice | torch.Tensor:
        """:meth:`features` as something to index with."""
        return as_index(self.features(at, point, rank))

    def matrix(self, at: str, point: str) -> torch.Tensor:
        """The weight behind a point, ``[out, in]``."""
        if point == "logits":
            return self.weights.raw(HEAD if HEAD in self.weights else EMBEDDING).to(self.dtype)
        return self.weights[f"{self.module(at, point)}.weight"]

    def vector(self, at: str, point: str) -> torch.Tensor | None:
        """The bias behind a point, ``[out]``; None where the model has none."""
        name = f"{self.module(at, point)}.bias"
        return self.weights[name] if name in self.weights else None

    def linear(self, at: str, point: str, rank: int, *, x: torch.Tensor | None = None,
               weight: torch.Tensor | None = None, bias: torch.Tensor | float | None = None,
               features: Sequence[int] | None = None) -> torch.Tensor:
        """A column- or row-parallel product; ``weight`` and ``bias`` are whole (a bias of 0 is none), ``features`` are
        the rank's rows (or columns). :meth:`bias_shares` says which ranks add a row-parallel bias."""
        x = self.given(at, point, rank) if x is None else x
        if layout(point) == "partial":
            weight = self.matrix(at, point) if weight is None else weight
            y = self.product(at, point, rank, x, weight) if features is None else F.linear(
                x.flatten(1), weight[:, as_index(features)])
            share = self.bias_shares(at, point, rank).get(rank, 0.0)
            bias = self.vector(at, point) if bias is None else bias
            return y + share * bias if share else y
        rows = self.part(at, point, rank) if features is None else as_index(features)
        weight = (self.matrix(at, point) if weight is None else weight)[rows]
        bias = self.vector(at, point) if bias is None else bias
        y = F.linear(x.flatten(1), weight, bias[rows] if isinstance(bias, torch.Tensor) else None)
        return y.unflatten(1, (-1, self.config.head_dim)) if "heads" in layout(point) else y

    def product(self, at: str, point: str, rank: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A rank's summand of a row-parallel product, without a bias."""
        return self._shared(f"{at}{point} {rank}", lambda x, weight: F.linear(
            x.flatten(1), weight[:, self.part(at, point, rank)]), x, weight)

    @cached_property
    def logit_rows(self) -> torch.Tensor:
        """The rows of the other points from which the logits were made."""
        rows = {place: row for row, place in enumerate(self.recording.places)}
        return torch.tensor([rows[place] for place in self.recording.logit_places], dtype=torch.long)

    def head(self, at: str, point: str, rank: int, *, x: torch.Tensor | None = None, weight: torch.Tensor | None = None,
             features: Sequence[int] | None = None, bias: float = 0.0, cap: float | None = None) -> torch.Tensor:
        """The logits of a rank's rows of the vocabulary, scaled and capped (``cap``: by another number, 0 for not at
        all); the head has no bias."""
        rows = self.indices("logits", rank) if features is None else features
        raw = self.weights.raw(HEAD if HEAD in self.weights else EMBEDDING) if weight is None else weight

        def product(x, rows):
            return self.finished(F.linear(x[self.logit_rows], raw[as_index(rows)].to(self.dtype)), cap)
        own, shard = product(self.value("norm", rank) if x is None else x, rows), self.shard("logits", rank)
        changed = not (x is None and weight is None and features is None and cap is None)
        if changed or shard is None or len(rows) < len(raw):
            return own
        norms = {r: self.value("norm", r) for r in self.ranks}
        if all(torch.equal(norms[rank], norm) for norm in norms.values()):
            return own
        # A rank with whole logits computed them itself, or gathered them from ranks with other inputs.
        gathered = torch.cat([product(norms[held.rank], held.vocab) for held in self.plan.ranks], 1)
        return min((own, gathered[:, as_index(rows)]), key=lambda right: distance(shard.tensor, right))

    def finished(self, logits: torch.Tensor, cap: float | None = None) -> torch.Tensor:
        """The head's output, scaled and capped."""
        cap, logits = self.config.final_logit_softcapping if cap is None else cap, logits / self.config.logits_scaling
        return soft_cap(logits, cap) if cap else logits

    def rope_type(self, at: str) -> tuple[str, ...]:
        """A layer's type for :class:`tplab.model.rope.Rotary`, where each type has its own frequencies."""
        return self.config.rope_layer_types[layer_of(at):][:1]

    def cos_sin(self, at: str) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of every row's position in a layer, ``[1, rows, numbers of a head that turn]``."""
        kind = self.rope_type(at)
        if kind not in self._tables:
            self._tables[kind] = self.tables(self.config.hf, self.positions, *kind)
        return self._tables[kind]

    def tables(self, config, positions: torch.Tensor, *kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by a transformers ``config``, for rows at ``positions``."""
        # A dynamic RoPE depends on how long the sequence was when the row was computed.
        runs = groupby(zip(self.recording.places, self.recording.num_keys), lambda row: (row[0][0], row[1]))
        parts = [(len(list(rows)), keys) for (_, keys), rows in runs]
        return Rotary(config)(torch.empty(0, dtype=self.dtype), positions, parts, *kind)

    def rope(self, at: str, point: str, rank: int, *, x: torch.Tensor | None = None,
             cos: torch.Tensor | None = None, sin: torch.Tensor | None = None) -> torch.Tensor:
        """q or k rotated, in layers that rotate them; another input, or by other tables."""
        x = self.given(at, point, rank) if x is None else x
        if cos is None and sin is None:
            if not self.config.rotates[layer_of(at)]:
                return x
            cos, sin = self.cos_sin(at)
        return rotated(self.config.model_type, x, cos, sin)

    # Attention.

    @cached_property
    def key_rows(self) -> list[torch.Tensor]:
        """Per sequence and position, the row in which its key was computed: its own row, or with a prefix cache the row
        of a sequence with the same beginning; -1 if there is none."""
        texts, places = self.recording.ids, self.recording.places
        rows = {place: row for row, place in enumerate(places)}

        def row(number: int, position: int) -> int:
            alike = (s for s, text in enumerate(texts) if text[:position + 1] == texts[number][:position + 1])
            return rows.get((number, position), next((rows[s, position] for s in alike if (s, position) in rows), -1))
        ends = {number: position + 1 for number, position in places}  # places are sorted: the last one stays
        return [torch.tensor([row(number, position) for position in range(ends.get(number, 0))], dtype=torch.long)
                for number in range(len(texts))]

    @cached_property
    def rows_of(self) -> list[slice]:
        """The rows of each sequence."""
        rows: list[list[int]] = [[] for _ in self.recording.ids]
        for row, (number, _) in enumerate(self.recording.places):
            rows[number].append(row)
        return [slice(own[0], own[-1] + 1) if own else slice(0, 0) for own in rows]

    @cached_property
    def num_keys(self) -> torch.Tensor:
        """For each row, how many keys its sequence had at the end of its call."""
        return torch.tensor(self.recording.num_keys, dtype=torch.long)

    def keys(self, number: int, name: str, rank: int, heads: Sequence[int]) -> torch.Tensor:
        """``k_rope`` or ``v`` of a sequence as this rank computed them, ``[positions, heads, head_dim]``. Those that no
        recorded call computed are Hugging Face's."""
        def gathered(computed):
            rows = self.key_rows[number]
            found, lost = computed[rows.clamp(min=0)], rows < 0
            if lost.any():
                found[lost] = self._hf_points(number)[name][:len(rows)][lost][:, list(heads)].to(self.dtype)
            return found
        return self._shared(f"{name} {number} {heads}", gathered, self.parts_of(name, rank, heads))

    def sequences(self, at: str, rank: int, heads: Sequence[int]) -> Iterator[Attended]:
        """Attention's inputs, sequence by sequence, with the keys and values of these KV heads."""
        q = self.parts_of(at + "q_rope", rank, self.indices(at + "attn", rank))
        for number, rows in enumerate(self.rows_of):
            if rows.stop > rows.start:
                yield Attended(number, rows, self.positions[rows], self.num_keys[rows], q[rows], *(
                    self.keys(number, at + name, rank, heads) for name in ("k_rope", "v")))

    @cached_property
    def kv_heads(self) -> list[int]:
        """The KV head that each query head of the model reads."""
        return [head // (self.config.num_heads // self.config.num_kv_heads) for head in range(self.config.num_heads)]

    def window(self, at: str) -> int:
        """How many tokens a query of a layer sees, itself among them; 0: all before it."""
        return self.config.windows[layer_of(at)] or 0

    def sinks(self, at: str, rank: int) -> torch.Tensor | None:
        """The sinks of this rank's heads, ``[heads here]``; None for a model without."""
        if not self.config.sinks:
            return None
        return self.weights[f"model.{at}self_attn.sinks"][as_index(self.indices(at + "attn", rank))]

    def attention(self, at: str, point: str, rank: int, *, scaling: float | None = None, rule: Callable = causal,
                  keys_of: Sequence[int] | None = None, values_of: Sequence[int] | None = None,
                  weigh: Callable | None = None, keys: Callable | None = None, values: Callable | None = None,
                  longest: torch.Tensor | None = None, window: int | None = None, cap: float | None = None,
                  sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of this rank's query heads, ``[rows, heads here, head_dim]``.

        ``keys_of``, ``values_of``: the KV head that each query head of the model reads; ``rule``: as :func:`causal`;
        ``weigh(scores, visible)``: the weights, for something else than a masked softmax, from scores ``[heads, n,
        m]`` and ``visible`` ``[n, m]``; ``keys(one)`` and ``values(one)``: others than an :class:`Attended` has;
        ``longest``: per row, the number of keys to which its own are filled up with the newest, 0 for no filling;
        ``window``, ``cap``, ``sinks``: others than the model's (0: no window, no cap).
        """
        scaling, cap = self.config.scaling if scaling is None else scaling, (
            self.config.attn_logit_softcapping if cap is None else cap)
        window, sinks = self.window(at) if window is None else window, self.sinks(at, rank) if sinks is None else sinks
        pair = [[int((of or self.kv_heads)[head]) for head in self.indices(at + "attn", rank)]
                for of in (keys_of, values_of)]
        held, outs = sorted({*pair[0], *pair[1]}), []
        reads = [[held.index(head) for head in of] for of in pair]
        sequences = self.sequences(at, rank, held)
        if longest is not None or weigh is not None:
            sequences = (part for whole in sequences for part in call_by_call(whole, longest))
        for one in sequences:
            k, v = (keys(one) if keys else one.k)[:, reads[0]], (values(one) if values else one.v)[:, reads[1]]
            query, key = one.positions[:, None], torch.arange(len(k))[None]
            visible = rule(query, key, one.num_keys[:, None])
            visible = visible & (key > query - window) if window else visible
            if weigh is None:
                outs.append(attend(one.q, k, v, visible, scaling, cap, sinks))
                continue
            scores = one.q.transpose(0, 1) @ k.permute(1, 2, 0) * scaling
            weights = weigh(soft_cap(scores, cap) if cap else scores, visible).to(one.q.dtype)
            outs.append((weights @ v.transpose(0, 1)).transpose(0, 1))
        return torch.cat(outs)

    # The two row-parallel layers, behind their products.

    @fixed
    def summands(self, at: str, partial: str, rank: int) -> list[int]:
        """The ranks whose summands make up ``rank``'s sum: itself if it holds all columns, else every rank with columns
        that no rank before it has."""
        if partial == "moe_partial":
            return list(self.holders(at))
        columns = {r: set(self.features(at, partial, r)) for r in self.holders(at)}
        if all(set(self.features(at, partial, rank)) >= other for other in columns.values()):
            return [rank]
        chosen, covered = [], set()
        for r in columns:
            if columns[r] - covered:
                chosen.append(r)
                covered |= columns[r]
        return chosen

    def bias_shares(self, at: str, partial: str, rank: int) -> dict[int, float]:
        """The part of the bias in each summand, as recorded, if they add up to 1, or to 0 where the bias is added to
        the sum. With any other total there is a bug, and the first rank alone should have added it."""
        ranks, bias = self.summands(at, partial, rank), self.vector(at, partial)  # experts' is among their summands
        if bias is None:
            return dict.fromkeys(ranks, 0.0)
        default = {r: float(r == ranks[0]) for r in ranks}
        if not self.seen(at + partial) or any(self.shard(at + partial, r) is None for r in ranks):
            return default
        found = {}
        for r in ranks:
            own = self.product(at, partial, r, self.given(at, partial, r), self.matrix(at, partial))
            times = (((self.value(at + partial, r) - own) @ bias) / (bias @ bias)).nanmedian().item()
            found[r] = min((0.0, 1.0, 1 / len(ranks)), key=lambda share: abs(share - times))
            if not abs(found[r] - times) < 0.1 / len(ranks):
                return default
        return found if min(abs(sum(found.values()) - total) for total in (0, 1)) < 1e-6 else default

    def reduce(self, at: str, point: str, rank: int) -> torch.Tensor:
        """The sum of the ranks' summands, and the bias if no summand has it."""
        name, = self.sources(at, point)
        shares, bias = self.bias_shares(at, name[len(at):], rank), self.vector(at, point)

        def total(*summands):
            whole = sum(summands[1:], summands[0])
            return whole + bias if bias is not None and not sum(shares.values()) else whole
        return self._shared(f"{at}{point} sum", total, *(self.value(name, r) for r in shares))

    # Where streams meet.

    def add(self, at: str, point: str, rank: int, *, times: float | None = None) -> torch.Tensor:
        """The residual stream plus a sublayer's output, times the model's multiplier or another one."""
        times = self.config.residual_multiplier if times is None else times
        return self._shared(f"{at}{point} {times}", lambda x, y: x + y * times, *(
            self.value(name, rank) for name in self.sources(at, point)))

    def gated(self, at: str, point: str, rank: int, *, act: Callable | None = None) -> torch.Tensor:
        """``act(gate, up)``."""
        columns = self.indices(at + point, rank)
        gate, up = (self.parts_of(at + part, rank, columns) for part in ("gate", "up"))
        return activation(self.config.hidden_act)(gate) * up if act is None else act(gate, up)


def call_by_call(one: Attended, longest: torch.Tensor | None) -> Iterator[Attended]:
    """The rows of a sequence call by call, with the keys of that call, filled up with the newest to ``longest``."""
    for keys, run in groupby(range(len(one.q)), lambda row: int(one.num_keys[row])):
        first, *more = run
        rows, size = slice(first, first + 1 + len(more)), 0 if longest is None else int(longest[one.rows][first])
        seen = torch.arange(size or keys).clamp(max=keys - 1)
        yield one._replace(positions=one.positions[rows], num_keys=one.num_keys[rows], q=one.q[rows], k=one.k[seen],
                           v=one.v[seen])
