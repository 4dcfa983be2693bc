"""The cheat sheet's two tables, computed from a plan and from the museum."""

from tplab.faults import MUSEUM
from tplab.shard import ShardPlan

# What a fault shows in where its numbers stay right.
BEYOND = {"load": "bytes read at loading", "steps": "tokens computed for each new one",
          "blocks": "blocks in use at the end", "drawn": "tokens that each rank draws",
          "error": "the run's error, ranks and op logs side by side"}


def held_by_ranks(plan: ShardPlan) -> list[dict[str, str]]:
    """Rows of a table: per tensor its whole shape ``[out, in]``, how it is cut, and what each rank holds.

        >>> show.table(lab.held_by_ranks(plan), index="weight")
    """
    dim = plan.head_dim
    q, kv, columns, words = ([len(getattr(shard, part)) for shard in plan.ranks]
                             for part in ("q_heads", "kv_heads", "mlp", "vocab"))

    def shapes(sizes, rows: bool, other: int) -> str:
        return " | ".join(f"[{size}, {other}]" if rows else f"[{other}, {size}]" for size in sizes)

    hidden, count, inner = plan.hidden_size, plan.num_experts, plan.expert_intermediate_size
    mlp, how = [], "whole experts" if plan.enable_expert_parallel else "{} of each"
    if plan.intermediate_size:
        mlp += [["gate_proj, up_proj", f"[{plan.intermediate_size}, {hidden}]", "rows",
                 shapes(columns, True, hidden)],
                ["down_proj", f"[{hidden}, {plan.intermediate_size}]", "columns", shapes(columns, False, hidden)]]
    if count:
        parts = [(len(shard.experts), len(shard.expert_mlp)) for shard in plan.ranks]
        mlp += [["router", f"[{count}, {hidden}]", "whole", "every rank"],
                ["experts: gate_proj, up_proj", f"{count} × [{inner}, {hidden}]", how.format("rows"),
                 " | ".join(f"{n} × [{part}, {hidden}]" for n, part in parts)],
                ["experts: down_proj", f"{count} × [{hidden}, {inner}]", how.format("columns"),
                 " | ".join(f"{n} × [{hidden}, {part}]" for n, part in parts)]]
    rows = [
        ["embed, lm_head", f"[{plan.vocab_size}, {hidden}]", "rows (tokens)", shapes(words, True, hidden)],
        ["q_proj", f"[{plan.num_heads * dim}, {hidden}]", "rows, at heads",
         shapes([n * dim for n in q], True, hidden)],
        ["k_proj, v_proj", f"[{plan.num_kv_heads * dim}, {hidden}]", "rows, at KV heads that its queries read",
         shapes([n * dim for n in kv], True, hidden)],
        ["o_proj", f"[{hidden}, {plan.num_heads * dim}]", "columns, at heads",
         shapes([n * dim for n in q], False, hidden)],
        *mlp,
        ["norms, bias of o and down", f"[{hidden}]", "whole; such a bias is added once", "every rank"],
        ["KV cache, a token and layer", f"2 × {plan.num_kv_heads} × {dim}", "KV heads, never repeated ones",
         " | ".join(f"2 × {n} × {dim}" for n in kv)]]
    return [dict(zip(("weight", "whole [out, in]", "cut along", "rank 0 | rank 1 | …"), row)) for row in rows]


def suspects() -> list[dict[str, str]]:
    """Rows of a table: per point (or other evidence) the museum's faults that first show there, with their notebooks.

        >>> show.table(lab.suspects(), index="first off the floor")
    """
    groups = {}
    for fault in MUSEUM.values():
        where = BEYOND.get(fault.first_point, fault.first_point.replace("layers.0.", "first layer: "))
        where = where.replace("layers.1.", "second layer, not the first: ")
        where += " (while decoding)" * (fault.shows_in == "decode" and "layer" in where)
        groups.setdefault(where, []).append(f"{fault.title} ({fault.notebook[:2]})")
    return [{"first off the floor": where, "suspects": "; ".join(group)} for where, group in groups.items()]
