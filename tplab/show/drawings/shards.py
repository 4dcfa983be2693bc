"""A plan and a sharded weight drawn: one colour per rank, and its number wherever there is room."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tplab.checks import counted, spans
from tplab.errors import TplabError
from tplab.shard.plan import RankShard, ShardPlan
from tplab.show.drawings.svg import GREY, INK, LINE, Drawing, Svg, beside, box, colour, write


def plan_drawing(plan: ShardPlan, title: str = "", ends: bool = True) -> Svg:
    """A row per rank: its query heads, the KV heads they read below, and, with ``ends``, MLP columns and vocabulary."""
    cell = max(7.0, min(26.0 if ends else 21.0, 560 / plan.num_heads))
    left, top, row, group = 62.0, 62.0, 62.0, plan.num_heads // plan.num_kv_heads
    heads_end = left + plan.num_heads * cell
    parts = [("mlp", plan.intermediate_size, "MLP columns"), ("vocab", plan.vocab_size, "vocabulary rows"),
             ("experts", plan.num_experts, "experts"), ("expert_mlp", plan.expert_intermediate_size, "columns of each"),
             ("shared_mlp", plan.shared_intermediate_size, "of the shared one")]
    parts = [part for part in parts if part[1]] if ends else []
    bars = [(heads_end + 30 + 128 * i, *part) for i, part in enumerate(parts)]
    width = max(heads_end + 14 + 128 * len(bars) + 16 * ends, 262.0)
    body = write(8, 16, title or "What each rank holds", size=13.5, bold=True)
    body += write(8, 38, f"{plan.kind}: {plan.num_heads} query, {plan.num_kv_heads} KV heads, "
                         f"{counted(plan.tensor_parallel_size, 'rank')}", size=11.5)
    for shard in plan.ranks:
        y = top + row * shard.rank
        body += write(8, y + 21, f"rank {shard.rank}", bold=True)
        body += _heads(plan, shard, left, y, cell, group)
        for x, dim, total, what in bars:
            held = getattr(shard, dim)
            at, long = 108 * held.start / total, 108 * len(held) / total
            body += box(x, y, 108, 18, GREY, LINE) + box(x + at, y, long, 18, colour(shard.rank)[0])
            body += write(x, y + 29, f"{held.start}–{held.stop - 1}", size=10.5)
            if shard.rank == 0:
                body += write(x, top - 10, what, size=11)
    return Svg(width, top + row * len(plan.ranks) - 6, body)


def _heads(plan: ShardPlan, shard: RankShard, left: float, y: float, cell: float, group: int) -> str:
    fill, ink = colour(shard.rank)
    body = ""
    for head in range(plan.num_heads):
        x, here = left + head * cell, head in shard.q_heads
        body += box(x, y, cell, 20, fill if here else GREY)
        if here and cell >= 15:
            body += write(x + cell / 2, y + 10, str(head), size=10.5, anchor="middle", ink=ink)
    for kv in range(plan.num_kv_heads):
        body += box(left + kv * group * cell + 1, y + 24, group * cell - 2, 17, GREY)
        if kv in shard.kv_heads:
            reads = [head for head in shard.q_heads if head // group == kv]
            x, long = left + reads[0] * cell, len(reads) * cell
            body += box(x + 1, y + 24, long - 2, 17, "#fff", fill)
            body += write(x + long / 2, y + 33, f"KV {kv}" if long >= 38 else str(kv), size=10.5 if long >= 15 else 8,
                          anchor="middle", bold=True)
    return body


def plan_html(plan: ShardPlan) -> str:
    """The drawing of one plan for a page; what a plan shows as the last line of a cell."""
    words = f"Which rank holds which heads: {_describe_plan(plan)}"
    return Drawing(plan_drawing(plan).text(), words).html()


def plan_figure(plans) -> Drawing:
    """Which rank holds which heads: a ``ShardPlan``, with its MLP columns and vocabulary rows, or ``{title: plan}``.

        >>> show.plan_figure({"Qwen2.5-0.5B": ShardPlan.from_config(qwen, 2), "SmolLM2": plan})
    """
    single = isinstance(plans, ShardPlan)
    plans = {"": plans} if single else plans
    if not isinstance(plans, Mapping) or not plans:
        raise TplabError("plan_figure takes a ShardPlan or {title: ShardPlan}")
    svg = beside([plan_drawing(plan, title, ends=single) for title, plan in plans.items()]).text()
    details = ". ".join(f"{title}: {_describe_plan(plan)}".removeprefix(": ") for title, plan in plans.items())
    return Drawing(svg, f"Figure: which rank holds which heads. {details}.")


def _describe_plan(plan: ShardPlan) -> str:
    held = "; ".join(f"rank {s.rank} query heads {spans(s.q_heads)[0]}, KV heads {spans(s.kv_heads)[0]}"
                     for s in plan.ranks)
    return f"{plan.num_heads} query and {plan.num_kv_heads} KV heads, {plan.kind}: {held}"


@dataclass(frozen=True)
class ShardedWeight:
    """A weight and what each rank holds of it. It draws itself in a notebook.

    Example: ``ShardedWeight("gate_proj", (352, 128), 0, [[r] for r in split_evenly(352, 2)])``, or
    ``ShardedWeight.of(plan, "o_proj")``.
    """

    name: str
    shape: tuple[int, int]  # (out_features, in_features)
    dim: int  # 0 when rows are dealt out, 1 when columns are
    parts: Sequence[Sequence[range]]  # of each rank, its rows (or columns); ranks may share some

    @classmethod
    def of(cls, plan: ShardPlan, name: str) -> "ShardedWeight":
        """The named weight of a layer as the plan deals it out: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``,
        ``gate_proj``, ``up_proj``, ``down_proj``, ``embed_tokens`` or ``lm_head``."""
        def rows(dimension: str) -> list[list[range]]:
            unit = plan.head_dim if dimension in ("q_heads", "kv_heads") else 1
            parts = [getattr(shard, dimension) for shard in plan.ranks]
            return [[range(part.start * unit, part.stop * unit)] for part in parts]

        q, kv, hidden = plan.num_heads * plan.head_dim, plan.num_kv_heads * plan.head_dim, plan.hidden_size
        mlp, vocab = plan.intermediate_size, plan.vocab_size
        weights = {"q_proj": ((q, hidden), 0, rows("q_heads")), "k_proj": ((kv, hidden), 0, rows("kv_heads")),
                   "v_proj": ((kv, hidden), 0, rows("kv_heads")), "o_proj": ((hidden, q), 1, rows("q_heads")),
                   "gate_proj": ((mlp, hidden), 0, rows("mlp")), "up_proj": ((mlp, hidden), 0, rows("mlp")),
                   "down_proj": ((hidden, mlp), 1, rows("mlp")),
                   "embed_tokens": ((vocab, hidden), 0, rows("vocab")), "lm_head": ((vocab, hidden), 0, rows("vocab"))}
        return cls(name, *weights[name])

    def shape_on(self, rank: int) -> tuple[int, int]:
        """The shape of what this rank holds."""
        held = sum(map(len, self.parts[rank]))
        return (held, self.shape[1]) if self.dim == 0 else (self.shape[0], held)

    def strips(self) -> list[tuple[range, tuple[int, ...]]]:
        """``(rows or columns, ranks that hold them)``, cut where the holders change, from the top (or left)."""
        cuts = {0, self.shape[self.dim]}
        cuts.update(edge for part in self.parts for held in part for edge in (held.start, held.stop))
        edges = sorted(cut for cut in cuts if 0 <= cut <= self.shape[self.dim])
        return [(range(a, b), tuple(r for r, part in enumerate(self.parts) if any(a in held for held in part)))
                for a, b in zip(edges, edges[1:])]

    def __str__(self) -> str:
        what = ("rows", "columns")[self.dim]
        held = [" and ".join(f"{part.start}–{part.stop - 1}" for part in parts) for parts in self.parts]
        return (f"{self.name} [{self.shape[0]}, {self.shape[1]}], {what} (dim {self.dim}) dealt out: "
                + ", ".join(f"rank {rank} holds {what} {text}" for rank, text in enumerate(held)))

    def _repr_html_(self) -> str:
        return Drawing(self.drawing().text(), str(self)).html()

    def drawing(self, title: str = "") -> Svg:
        """The weight as a rectangle to scale within limits: a Linear's height is ``out_features``, its width
        ``in_features``."""
        scale = 190 / max(self.shape)
        high, wide = (max(70.0, size * scale) for size in self.shape)
        left, top = 60.0, 76.0
        body = write(8, 16, title or self.name, size=13.5, bold=True)
        is_embedding = self.name == "embed_tokens"  # which multiplies nothing: its rows are looked up
        rows_are, columns_are = ("vocab_size", "hidden_size") if is_embedding else ("out_features", "in_features")
        shape = f"{'[vocab, hidden]' if is_embedding else '[out, in]'} = [{self.shape[0]}, {self.shape[1]}]"
        body += write(8, 36, f"{shape}, cut along dim {self.dim}", size=11.5)
        body += write(left + wide / 2, top - 11, f"{columns_are} {self.shape[1]}", size=10.5, anchor="middle")
        body += write(14, top + high / 2, f"{rows_are} {self.shape[0]}", size=10.5, anchor="middle", turned=True)
        unit = (high, wide)[self.dim] / self.shape[self.dim]
        for rows, ranks in self.strips():
            body += self._strip(rows, ranks, left, top, high, wide, unit)
        below = top + high + 18
        for rank in range(len(self.parts)):
            rows, columns = self.shape_on(rank)
            body += box(left - 30, below + 18 * rank - 6, 12, 12, colour(rank)[0])
            body += write(left - 12, below + 18 * rank, f"rank {rank} holds [{rows}, {columns}]", size=11)
        return Svg(max(left + wide + 12, 292.0), below + 18 * len(self.parts) - 2, body)

    def _strip(self, rows: range, ranks: tuple[int, ...], left, top, high, wide, unit) -> str:
        """One strip in its holder's colour; striped in the colours of all when several ranks hold the same rows."""
        start, long = rows.start * unit, len(rows) * unit
        x, y, w, h = (left, top + start, wide, long) if self.dim == 0 else (left + start, top, long, high)
        if not ranks:
            return box(x, y, w, h, "none", LINE)
        stripes = [ranks[i % len(ranks)] for i in range(1 if len(ranks) == 1 else 12)]
        body = ""
        for i, rank in enumerate(stripes):
            part = w / len(stripes)
            body += box(x + i * part, y, part + 0.5, h, colour(rank)[0], colour(rank)[0])
        body += box(x, y, w, h, "none")
        if h < 14 or w < 14:
            return body
        names = " and ".join(map(str, ranks))
        text = names if w < 46 else f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
        if len(ranks) > 1:
            body += box(x + w / 2 - 3.4 * len(text) - 4, y + h / 2 - 8, 6.8 * len(text) + 8, 16, "#fff")
        ink = colour(ranks[0])[1] if len(ranks) == 1 else INK
        return body + write(x + w / 2, y + h / 2, text, size=11, anchor="middle", ink=ink)


def weight_figure(weights) -> Drawing:
    """A ``ShardedWeight`` with each rank's part in its colour, or ``{title: ShardedWeight}`` side by side.

        >>> right = ShardedWeight.of(plan, "q_proj")
        >>> wrong = ShardedWeight("q_proj", (128, 128), dim=1, parts=[[range(64)], [range(64, 128)]])
        >>> show.weight_figure({"dim 0: output features": right, "dim 1: input features": wrong})
    """
    weights = {weights.name: weights} if isinstance(weights, ShardedWeight) else weights
    if not isinstance(weights, Mapping) or not weights:
        raise TplabError("weight_figure takes a ShardedWeight or {title: ShardedWeight}")
    svg = beside([weight.drawing(title) for title, weight in weights.items()]).text()
    return Drawing(svg, "Figure: what each rank holds of a weight. "
                   + ". ".join(f"{title}: {weight}" for title, weight in weights.items()) + ".")
