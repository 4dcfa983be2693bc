"""``ShardPlan``: which rank owns which heads, MLP columns, experts and vocabulary rows.

The plan is computed once, from the *global* counts of the configuration and the number of ranks. Every local size
is read from it; no global size is ever derived as ``local * tensor_parallel_size``.
"""

from dataclasses import dataclass

from tplab.checks import counted, quoted, spans, whole_number
from tplab.errors import TplabError


class ShardPlanError(TplabError):
    """The model cannot be sharded over that many ranks; the message names sizes that work."""


def split_evenly(total: int, parts: int) -> tuple[range, ...]:
    """Cut ``range(total)`` into one contiguous range per rank; their lengths differ by at most one, longer ones first.
    """
    size, longer = divmod(total, parts)
    bounds = [part * size + min(part, longer) for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in zip(bounds, bounds[1:]))


@dataclass(frozen=True)
class RankShard:
    """What one rank holds, in global indices (``kv_for_q`` alone is local).

    Attributes:
        q_heads: global query heads.
        kv_heads: global KV heads: exactly those that ``q_heads`` read.
        kv_for_q: for each local query head, the *local* index of the KV head it reads.
        mlp: global columns of the MLP's intermediate dimension.
        vocab: global rows of the embedding and the LM head.
        experts: the experts of which it holds something: all of them, or under expert parallelism its own.
        expert_mlp: global columns of each of these experts' intermediate dimension.
        shared_mlp: global columns of the shared expert's.
    """

    rank: int
    q_heads: range
    kv_heads: range
    kv_for_q: tuple[int, ...]
    mlp: range
    vocab: range
    experts: range = range(0)
    expert_mlp: range = range(0)
    shared_mlp: range = range(0)

    @property
    def kv_groups(self) -> tuple[tuple[range, range], ...]:
        """Runs of local KV heads that serve equally many query heads, as ``(local q heads, local kv heads)``.

        One run wherever heads divide evenly. Attention computes run by run, without repeating K and V.
        """
        runs: list[tuple[range, range]] = []
        for kv in range(len(self.kv_heads)):
            queries = [q for q, reads in enumerate(self.kv_for_q) if reads == kv]
            q_run = range(queries[0], queries[-1] + 1)
            if runs and len(runs[-1][0]) == len(q_run) * len(runs[-1][1]):
                last_q, last_kv = runs.pop()
                runs.append((range(last_q.start, q_run.stop), range(last_kv.start, kv + 1)))
            else:
                runs.append((q_run, range(kv, kv + 1)))
        return tuple(runs)


@dataclass(frozen=True)
class ShardPlan:
    """What every rank owns. Build one with :meth:`make` or :meth:`from_config`.

    Attributes:
        kind: ``"partition"`` (each KV head on one rank, all ranks alike), ``"replication"`` (fewer KV heads than
            ranks, all ranks alike) or ``"uneven"`` (ranks hold different head counts, or read KV heads of two groups).
        ranks: one :class:`RankShard` per rank.
        num_experts, expert_intermediate_size, shared_intermediate_size: of a mixture of experts; 0 without one.
        enable_expert_parallel: whole experts are dealt out; otherwise each expert is cut over all ranks.
    """

    tensor_parallel_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    kind: str
    ranks: tuple[RankShard, ...]
    num_experts: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    enable_expert_parallel: bool = False

    @classmethod
    def make(cls, *, tensor_parallel_size: int, num_heads: int, num_kv_heads: int, head_dim: int,
             hidden_size: int, intermediate_size: int, vocab_size: int, num_experts: int = 0,
             expert_intermediate_size: int = 0, shared_intermediate_size: int = 0, enable_expert_parallel: bool = False
             ) -> "ShardPlan":
        """Deal the heads out: whole GQA groups while there are at least as many KV heads as ranks, then head by head.

        Raises:
            ShardPlanError: heads that do not form groups; more ranks than query heads, MLP columns, tokens, or columns
                of an expert (under expert parallelism, experts); expert parallelism without experts.
        """
        if enable_expert_parallel and not num_experts:
            raise ShardPlanError("enable_expert_parallel deals experts out, but this model has none")
        counts = {"query heads": num_heads, "MLP columns": intermediate_size, "tokens": vocab_size}
        if num_experts:  # then there may be no dense layer, or no shared expert
            each = {"experts": num_experts} if enable_expert_parallel else {
                "columns of each expert": expert_intermediate_size}
            counts |= each | {"columns of the shared expert": shared_intermediate_size}
            counts = {what: count for what, count in counts.items() if count}
        scarce = min(counts, key=lambda what: counts[what])
        tp = whole_number(tensor_parallel_size, 1)
        if tp is None:
            raise ShardPlanError(f"tensor_parallel_size must be a whole number from 1 to {counts[scarce]}, "
                                 f"not {quoted(tensor_parallel_size)}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ShardPlanError(f"{num_heads} query heads do not form equal groups over {num_kv_heads} KV heads")
        if tp > counts[scarce]:
            raise ShardPlanError(f"{tp} ranks cannot share {counts[scarce]} {scarce}: a rank would hold none. "
                                 f"tensor_parallel_size can be 1 to {counts[scarce]}")
        group = num_heads // num_kv_heads
        if num_kv_heads >= tp:
            kv_parts = split_evenly(num_kv_heads, tp)
            q_parts = tuple(range(kv.start * group, kv.stop * group) for kv in kv_parts)
        else:
            q_parts = split_evenly(num_heads, tp)
            kv_parts = tuple(range(q[0] // group, q[-1] // group + 1) for q in q_parts)
        whole = range(num_experts), range(expert_intermediate_size)
        experts = ([(part, whole[1]) for part in split_evenly(num_experts, tp)] if enable_expert_parallel
                   else [(whole[0], part) for part in split_evenly(expert_intermediate_size, tp)])
        ranks = tuple(
            RankShard(rank, q, kv, tuple(head // group - kv.start for head in q), mlp, vocab, held, columns, shared)
            for rank, (q, kv, mlp, vocab, (held, columns), shared) in enumerate(zip(
                q_parts, kv_parts, split_evenly(intermediate_size, tp), split_evenly(vocab_size, tp), experts,
                split_evenly(shared_intermediate_size, tp))))
        alike = len({shard.kv_for_q for shard in ranks}) == 1
        kind = "uneven" if not alike else "partition" if num_kv_heads >= tp else "replication"
        return cls(tp, num_heads, num_kv_heads, head_dim, hidden_size, intermediate_size, vocab_size, kind, ranks,
                   num_experts, expert_intermediate_size, shared_intermediate_size, enable_expert_parallel)

    @classmethod
    def from_config(cls, config, tensor_parallel_size: int, *, enable_expert_parallel: bool = False) -> "ShardPlan":
        """The plan for a :class:`tplab.checkpoint.ModelConfig`. Errors as in :meth:`make`."""
        moe, sizes = config.experts, {name: getattr(config, name) for name in (
            "num_heads", "num_kv_heads", "head_dim", "hidden_size", "intermediate_size", "vocab_size")}
        if moe and all(moe.layers):
            sizes["intermediate_size"] = 0  # of a dense layer's MLP
        experts = {"num_experts": moe.num_experts, "expert_intermediate_size": moe.intermediate_size,
                   "shared_intermediate_size": moe.shared_intermediate_size} if moe else {}
        return cls.make(tensor_parallel_size=tensor_parallel_size, enable_expert_parallel=enable_expert_parallel,
                        **sizes, **experts)

    def sizes(self, dimension: str) -> list[int]:
        """Per-rank lengths of ``"q_heads"``, ``"kv_heads"``, ``"mlp"`` or ``"vocab"``, as ``all_gather`` takes them."""
        return [len(getattr(shard, dimension)) for shard in self.ranks]

    def rows(self) -> list[dict]:
        """One plain dictionary per rank, ready for a table or for JSON."""
        more: tuple[str, ...] = ("experts", "expert_mlp") if self.num_experts else ()
        more += ("shared_mlp",) if self.shared_intermediate_size else ()
        return [{"rank": s.rank, "q_heads": list(s.q_heads), "kv_heads": list(s.kv_heads)} | {
            name: [getattr(s, name).start, getattr(s, name).stop] for name in ("mlp", "vocab", *more)}
            for s in self.ranks]

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.num_heads} query heads and {self.num_kv_heads} KV heads "
                 f"over {counted(self.tensor_parallel_size, 'rank')}"]
        for s in self.ranks:
            lines.append(f"  rank {s.rank}: {_count(s.q_heads, 'query head')}, {_count(s.kv_heads, 'KV head')}, "
                         f"{f'MLP columns {spans(s.mlp)[0]}, ' if s.mlp else ''}{self.experts_of(s)}vocabulary rows "
                         f"{spans(s.vocab)[0]}")
        return "\n".join(lines)

    def experts_of(self, shard: RankShard) -> str:
        """What a rank holds of the experts, in words; ``""`` for a model without experts."""
        if not self.num_experts:
            return ""
        shared = f"columns {spans(shard.shared_mlp)[0]} of the shared one, " if self.shared_intermediate_size else ""
        if self.enable_expert_parallel:
            return f"{_count(shard.experts, 'expert')}, {shared}"
        return f"columns {spans(shard.expert_mlp)[0]} of each of {self.num_experts} experts, {shared}"


def _count(heads: range, what: str) -> str:
    return f"{counted(len(heads), what)} ({spans(heads)[0]})"
