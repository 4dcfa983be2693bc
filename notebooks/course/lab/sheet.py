"""The cheat sheet: one page, computed from a plan and from the museum."""

from collections.abc import Sequence
from html import escape

from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.shard import ShardPlan

STREET = ["x [T, hidden]", "input_norm", "QKV, column parallel", "q k v [T, heads here, head_dim]", "RoPE on q and k",
          "KV cache: this rank's KV heads", "attention", "o_proj, row parallel: a summand", "ALL-REDUCE 1", "+ x",
          "post_norm", "gate, up, column parallel", "act(gate) · up [T, columns here]", "down, row parallel: a summand",
          "ALL-REDUCE 2", "+ residual"]
NUMBERS = [
    ("max |Δ logits| at tp 1", "large: the bug is not in the communication, but in mask, weights, RoPE, cache or head. "
     "Inside the floor proves nothing for more ranks: wrong cuts, sums and offsets show only there"),
    ("the first point off the floor", "the points before it are right; the bug is after the last of them"),
    ("spread across ranks", "not 0 where all ranks must agree: a sum is missing, or its result is not used"),
    ("NaN, from which point on", "the first layer's attention: something multiplies 0 by -inf"),
    ("tensors that differ from the checkpoint", "put all shards together; not 0: the weight was cut or placed wrongly"),
]
# What a fault shows in where its numbers stay right.
BEYOND = {"load": "bytes read at loading", "steps": "tokens computed for each new one",
          "blocks": "blocks in use at the end", "drawn": "tokens that each rank draws",
          "error": "the run's error, ranks and op logs side by side"}


class CheatSheet:
    """What :func:`cheat_sheet` returns; shows itself in a notebook."""

    def __init__(self, plan: ShardPlan, head_dim: int):
        self.plan, self.head_dim = plan, head_dim

    def held(self) -> list[list[str]]:
        """Per tensor: its name, its whole shape, how it is cut, and what each rank holds."""
        plan, dim = self.plan, self.head_dim
        q, kv, columns, words = ([len(getattr(one, part)) for one in plan.ranks]
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
            held = [(len(one.experts), len(one.expert_mlp)) for one in plan.ranks]
            mlp += [["router", f"[{count}, {hidden}]", "whole", "every rank"],
                    ["experts: gate_proj, up_proj", f"{count} × [{inner}, {hidden}]", how.format("rows"),
                     " | ".join(f"{n} × [{part}, {hidden}]" for n, part in held)],
                    ["experts: down_proj", f"{count} × [{hidden}, {inner}]", how.format("columns"),
                     " | ".join(f"{n} × [{hidden}, {part}]" for n, part in held)]]
        return [
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
             " | ".join(f"2 × {n} × {dim}" for n in kv)],
        ]

    def suspects(self) -> list[list[str]]:
        """Per point (or other evidence): the museum's faults that first show there, with their notebooks."""
        from tplab.faults import MUSEUM

        groups = {}
        for one in MUSEUM.values():
            where = BEYOND.get(one.first_point, one.first_point.replace("layers.0.", "first layer: "))
            where = where.replace("layers.1.", "second layer, not the first: ")
            where += " (while decoding)" * (one.shows_in == "decode" and "layer" in where)
            groups.setdefault(where, []).append(one)
        return [[where, "; ".join(f"{one.title} ({one.notebook[:2]})" for one in group)]
                for where, group in groups.items()]

    def __str__(self) -> str:
        tables = [["what each rank holds", *map(" · ".join, self.held())], ["one layer", " → ".join(STREET)],
                  ["five numbers to look at first", *map(": ".join, NUMBERS)],
                  ["first off the floor → suspects", *map(": ".join, self.suspects())]]
        return "\n\n".join("\n  ".join(lines) for lines in tables)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/plain": str(self), "text/html": self.html()}

    def html(self) -> str:
        """The sheet as a part of a page; its styles stand in its elements."""
        plan = self.plan
        street = " → ".join(f"<b>{escape(one)}</b>" if one.startswith("ALL") else escape(one) for one in STREET)
        return "".join([
            _heading(f"What each rank holds: {plan.num_heads} query and {plan.num_kv_heads} KV heads on "
                     f"{plan.tensor_parallel_size} ranks ({plan.kind})"),
            _table(["weight", "whole [out, in]", "cut along", "rank 0 | rank 1 | …"], self.held()),
            _heading("One layer, and its two all-reduces"), f'<p style="margin: .2em 0">{street}</p>',
            _heading("Five numbers to look at first"), _table(["number", "what it tells"], NUMBERS),
            _heading("First off the floor → suspects (and their notebooks)"),
            _table(["first off the floor", "suspects"], self.suspects()),
        ])


def cheat_sheet(model: str | Checkpoint = "fable", tensor_parallel_size: int = 2) -> CheatSheet:
    """One page: what each rank holds of ``model``, a layer's two all-reduces, what to look at first, and the suspects.

        >>> lab.cheat_sheet(model, tensor_parallel_size)
    """
    ckpt = open_checkpoint(model)
    return CheatSheet(ShardPlan.from_config(ckpt.config, tensor_parallel_size), ckpt.config.head_dim)


def _heading(text: str) -> str:
    return f'<h2 style="font-size: 1.15em; margin: .7em 0 .2em">{escape(text)}</h2>'


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cell = 'style="text-align: left; vertical-align: top; padding: .1em 1.2em .1em 0"'
    head = "".join(f'<th scope="col" {cell}>{escape(title)}</th>' for title in titles)
    body = "".join("<tr>" + "".join(f"<td {cell}>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
