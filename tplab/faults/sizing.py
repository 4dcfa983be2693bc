"""Sizes that are multiplied by tp and divided by tp again.

The engine from which this lab began computed the size of its QKV layer from *local* head counts, multiplied by the
number of ranks; a column-parallel layer divided by the number of ranks again. If every count divides evenly, the result
is right; this module says when it is not. It is arithmetic, not a patch: :class:`ShardPlan` never
derives a global size from a local one, so there is no line of it to break.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tplab.checks import counted
from tplab.shard import ShardPlan


def multiplied_then_divided(num_heads: int, num_kv_heads: int, head_dim: int, tp: int) -> tuple[int, int]:
    """The old sizing: the layer's rows, which it calls global, and the rows that each rank gets."""
    heads_here = num_heads // tp
    kv_heads_here = max(1, num_kv_heads // tp)
    global_rows = (heads_here + 2 * kv_heads_here) * tp * head_dim
    return global_rows, global_rows // tp


@dataclass(frozen=True)
class Sizing:
    """The old sizing against the plan, for one head layout on one number of ranks."""

    num_heads: int
    num_kv_heads: int
    tp: int
    claimed_rows: int  # of the whole [q|k|v] matrix, by the old sizing
    true_rows: int  # the same in the checkpoint
    rows_per_rank: int  # by the old sizing
    needed_rows: tuple[int, ...]  # on each rank, by the plan
    lost: tuple[int, int]  # query and KV heads that no rank would hold

    @property
    def verdict(self) -> str:
        """Which of the two sizes is wrong, in words."""
        if any(self.lost):
            named = [counted(count, f"{kind} head") for count, kind in zip(self.lost, ("query", "KV")) if count]
            return f"wrong: {' and '.join(named)} on no rank"
        short = [rank for rank, rows in enumerate(self.needed_rows) if rows != self.rows_per_rank]
        if short:  # all query heads are dealt out, but those of some ranks reach across a group's edge
            ranks = f"rank {short[0]} needs" if len(short) == 1 else f"ranks {', '.join(map(str, short))} need"
            needed = self.needed_rows[short[0]]
            return f"wrong: {ranks} {needed} rows, not {self.rows_per_rank}: 2 KV heads are read there"
        if self.claimed_rows != self.true_rows:
            return f"right per rank, but a fused checkpoint has {self.true_rows} rows, not {self.claimed_rows}"
        return "right, because everything divides evenly"


def sizing(num_heads: int, num_kv_heads: int, tp: int, head_dim: int = 64) -> Sizing:
    """Compare :func:`multiplied_then_divided` with the plan; ShardPlanError if the heads cannot be dealt out at all."""
    plan = ShardPlan.make(tensor_parallel_size=tp, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                          hidden_size=head_dim, intermediate_size=tp, vocab_size=tp)
    claimed, per_rank = multiplied_then_divided(num_heads, num_kv_heads, head_dim, tp)
    needed = tuple((len(shard.q_heads) + 2 * len(shard.kv_heads)) * head_dim for shard in plan.ranks)
    lost = (num_heads % tp, num_kv_heads % tp if num_kv_heads > tp else 0)
    return Sizing(num_heads, num_kv_heads, tp, claimed, (num_heads + 2 * num_kv_heads) * head_dim, per_rank, needed,
                  lost)


def sizing_table(layouts: Iterable[tuple[int, int]], ranks: Iterable[int] = (1, 2, 3, 4), head_dim: int = 64):
    """A pandas table of :func:`sizing` over ``(query heads, KV heads)`` layouts and numbers of ranks."""
    import pandas as pd

    def needed(rows: Sequence[int]) -> str:
        return "/".join(map(str, rows[:1] if len({*rows}) == 1 else rows))

    rows = [sizing(heads, kv_heads, tp, head_dim) for heads, kv_heads in layouts for tp in ranks]
    return pd.DataFrame([{"query heads": s.num_heads, "KV heads": s.num_kv_heads, "tp": s.tp,
                          "rows claimed": s.claimed_rows, "rows in the checkpoint": s.true_rows,
                          "rows on each rank": s.rows_per_rank,
                          "rows needed": needed(s.needed_rows),
                          "verdict": s.verdict} for s in rows])
