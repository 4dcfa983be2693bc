"""An op of the forward pass replaced by a wrong one: what would each rank hold then?

A wrong op is a function of :class:`OnRank`, which gives it what this rank had at the points before, and of the op's
name. Most hypotheses are one: ``explains(case, lambda at, op: attention(at, scaling=1.0))``. The op need not be the
guilty point's own: where the points between were not recorded, every op on the way may be the wrong one.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from tplab.align import arithmetic
from tplab.align.arithmetic import attend
from tplab.align.diagnose.case import Case
from tplab.align.local import LocalFrame
from tplab.align.operations import as_index, columns_of
from tplab.align.points import inputs, layout
from tplab.checkpoint.layout import EMBEDDING, HEAD
from tplab.model.rope import Rotary

# point → the module that computes it, and what from
LINEAR = {"q": ("self_attn.q_proj", "input_norm"), "k": ("self_attn.k_proj", "input_norm"),
          "v": ("self_attn.v_proj", "input_norm"), "gate": ("mlp.gate_proj", "post_norm"),
          "up": ("mlp.up_proj", "post_norm"), "o_partial": ("self_attn.o_proj", "attn"),
          "mlp_partial": ("mlp.down_proj", "mlp_act"), "logits": ("lm_head", "norm")}
NORMS = {"input_norm": ("input_layernorm", "before"), "post_norm": ("post_attention_layernorm", "residual"),
         "norm": ("model.norm", "before"), "q_norm": ("self_attn.q_norm", "q"), "k_norm": ("self_attn.k_norm", "k")}
_TOGETHER = (("q", "k", "v"), ("k", "v"), ("q", "k"), ("q_norm", "k_norm"), ("q_rope", "k_rope"), ("gate", "up"))

Wrong = Callable[["OnRank", str], torch.Tensor]


class Attended(NamedTuple):
    """The rows of one sequence on one rank: where they stand, their queries, and all they may look at."""

    positions: torch.Tensor  # [n]
    num_keys: torch.Tensor  # [n], how many keys there were when each was computed
    q: torch.Tensor  # [n, heads here, head_dim]
    k: torch.Tensor  # [m, all KV heads, head_dim]
    v: torch.Tensor


@dataclass(frozen=True)
class OnRank:
    """What one rank's ops see: ``at("q")`` is this rank's q, as recorded, or by the ops before it."""

    case: Case
    rank: int
    frame: LocalFrame

    def _full(self, point: str) -> str:
        at = f"{self.case.layer}." if self.case.layer else ""
        return self.frame.before(at) if point == "before" else at + point

    def __call__(self, point: str) -> torch.Tensor:
        """``[rows, heads here, head_dim]`` at heads, ``[rows, columns here]`` otherwise; ``"before"`` is what went into
        the layer. The case's own point is what it should be by its ops."""
        of = self.frame.expected if point == self.case.point else self.frame.value
        return of(self._full(point), self.rank)

    def expected(self, point: str) -> torch.Tensor:
        """What the point's own op, a right one, makes of what this rank had before it."""
        return LocalFrame.expected(self.frame, self._full(point), self.rank)

    def indices(self, point: str) -> Sequence[int]:
        """The global heads, columns or vocabulary rows that this rank holds at a point."""
        return self.frame.indices(self._full(point), self.rank)

    def features(self, point: str) -> torch.Tensor:
        """The rows of the weight (of a row-parallel one, the columns) that make this rank's part of a point."""
        source = LINEAR[point][1] if layout(point) == "partial" else point
        size = self.case.config.head_dim if layout(source) in ("q_heads", "kv_heads") else 1
        return torch.tensor(columns_of(self.indices(source), size), dtype=torch.long)

    def sequences(self) -> Iterator[Attended]:
        """What attention has, sequence by sequence."""
        frame, q, every = self.frame, self("q_rope"), range(self.case.config.num_kv_heads)
        for number, rows, k, v in frame.sequences(self._full(""), self.rank, every):
            yield Attended(frame.positions[rows], self.case.num_keys(number), q[rows], k, v)


class _Altered(LocalFrame):
    """A local frame in which some ops of one layer are others. What was recorded stays as it is."""

    def __init__(self, case: Case, wrong: dict[str, Wrong]):
        vars(self).update(vars(case.frame))
        self.case, self.wrong, self._once = case, wrong, {}
        self._values = {key: x for key, x in self._values.items() if key[0] in self.recording.points
                        or not key[0].startswith(f"{case.layer}.")}

    def expected(self, name: str, rank: int) -> torch.Tensor:
        layer, _, point = name.rpartition(".")
        if layer != self.case.layer or point not in self.wrong:
            return super().expected(name, rank)
        guess, scope = self.wrong[point](OnRank(self.case, rank, self), point), self.case.scope
        if scope is None:
            return guess
        should = super().expected(name, rank)
        if guess.shape != should.shape:
            return torch.full_like(should, float("nan"))
        rows = scope if point != "logits" or len(scope) == len(should) else scope[self.logit_rows]
        return torch.where(rows.view(-1, *[1] * (should.dim() - 1)), guess, should)


def right(case: Case, rank: int) -> OnRank:
    """What a rank's ops see where none of them is wrong."""
    return OnRank(case, rank, case.frame)


def compound(case: Case) -> Iterator[tuple[str, ...]]:
    """The ops that may be wrong where the case's point is: its own, and those whose points were not recorded; each
    alone, then those together that one mistake would touch."""
    ops, unseen = [case.point], [case.first.name]
    while unseen:
        for name in inputs(unseen.pop(), case.config.num_layers, case.config.qk_norm):
            layer, _, point = name.rpartition(".")
            if layer == case.layer and point not in ops and not case.has(point):
                ops.append(point)
                unseen.append(name)
    yield from ((op,) for op in ops)
    yield from (some for some in _TOGETHER if set(some) <= set(ops))


def sources(case: Case) -> list[str]:
    """The recorded points (or the input of the layer) from which the case's point is computed."""
    ops = {f"{case.layer}.{op}".lstrip(".") for op, *more in compound(case) if not more}
    found = (name for op in ops for name in inputs(op, case.config.num_layers, case.config.qk_norm))
    return sorted({*found} - ops)


def explains(case: Case, wrong: Wrong) -> bool:
    """Whether every rank that is wrong holds at the case's point what ``wrong`` in place of ``case.ops`` gives."""
    return misfit(case, wrong) <= case.tolerance


def misfit(case: Case, wrong: Wrong, ranks: Sequence[int] | None = None) -> float:
    """How far what these ranks (those that are wrong) hold is from what a wrong op gives, relative to its scale;
    infinite for NaN."""
    frame, gaps = _Altered(case, dict.fromkeys(case.ops, wrong)), []
    for rank in case.wrong_ranks if ranks is None else ranks:
        held, guess = case.shard(case.point, rank), OnRank(case, rank, frame)(case.point)
        if case.compared is not None and len(held) == len(guess):
            held, guess = held[case.compared], guess[case.compared]
        gaps.append(distance(held, guess))
        if gaps[-1] > 1:
            break  # far off: the other ranks cannot make it better
    return max(gaps, default=float("inf"))


def distance(held: torch.Tensor, guess: torch.Tensor) -> float:
    """The largest difference relative to the guess's scale; infinite where either is not finite or has another shape.
    """
    held, guess = held.flatten(1).double(), guess.flatten(1).double()
    if held.shape != guess.shape or not (torch.isfinite(held).all() and torch.isfinite(guess).all()):
        return float("inf")
    return (held - guess).abs().max().item() / max(guess.abs().max().item(), 1e-30)


def fitting(case: Case, candidates: dict[object, Wrong]) -> list:
    """The keys of the wrong ops that fit, the best first: rounding can hide which of them it is."""
    gaps = {key: misfit(case, wrong) for key, wrong in candidates.items()}
    return sorted((key for key, gap in gaps.items() if gap <= case.tolerance), key=gaps.get)


def best(case: Case, candidates: dict[object, Wrong]) -> object | None:
    """The key of the wrong op that fits best, if it fits."""
    return next(iter(fitting(case, candidates)), None)


def fitted(case: Case, family: Callable[[float], Wrong], low: float, high: float) -> float | None:
    """The number between ``low`` and ``high`` for which ``family(number)`` explains the point; None if none does."""
    def gap(log: float) -> float:
        return misfit(case, family(10 ** log), case.wrong_ranks[:1])

    grid = torch.linspace(torch.tensor(low).log10(), torch.tensor(high).log10(), 49, dtype=torch.float64).tolist()
    gaps = list(map(gap, grid))
    middle = gaps.index(min(gaps))
    a, b = grid[max(middle - 1, 0)], grid[min(middle + 1, len(grid) - 1)]
    golden = (5 ** 0.5 - 1) / 2
    c, d = b - golden * (b - a), a + golden * (b - a)
    at_c, at_d = gap(c), gap(d)
    # Near the right number the gap falls in proportion to the distance; where it does not, there is none.
    slope = 4 * max(gaps[max(middle - 1, 0)], gaps[min(middle + 1, len(grid) - 1)]) / (b - a)
    while b - a > 1e-7 and min(at_c, at_d) <= case.tolerance + slope * (b - a):
        if at_c < at_d:
            b, d, at_d = d, c, at_c
            c = b - golden * (b - a)
            at_c = gap(c)
        else:
            a, c, at_c = c, d, at_d
            d = a + golden * (b - a)
            at_d = gap(d)
    found = 10 ** ((a + b) / 2)
    return found if misfit(case, family(found)) <= case.tolerance else None


def coarser(case: Case) -> list[torch.dtype]:
    """The dtypes that have clearly fewer digits than the run's."""
    return [dtype for dtype in (torch.bfloat16, torch.float16)
            if torch.finfo(dtype).eps > 1000 * torch.finfo(case.report.dtype).eps]


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor with the digits of a smaller dtype."""
    return tensor.to(dtype).to(tensor.dtype)


# The ops, with what can be wrong about them as arguments.

def linear(at: OnRank, point: str, *, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
           x: torch.Tensor | None = None, features: torch.Tensor | None = None) -> torch.Tensor:
    """A column- or row-parallel product at ``point``; ``weight`` and ``bias`` are whole ones, ``features`` its rows (or
    columns) that the rank takes. A row-parallel bias is added by the ranks that add it."""
    module, source = LINEAR[point]
    x = (at(source) if x is None else x).flatten(1)
    weight = matrix(at.case, point) if weight is None else weight
    bias = vector(at.case, point) if bias is None else bias
    features = as_index((at.features(point) if features is None else features).tolist())
    if layout(point) == "partial":
        layer = f"{at.case.layer}."
        share = at.frame.bias_shares(layer, point.removesuffix("_partial"), at.rank).get(at.rank, 0.0)
        return F.linear(x, weight[:, features]) + (share * bias if share else 0)
    if point == "logits":
        x = x[at.frame.logit_rows]
    y = F.linear(x, weight[features], bias[features])
    return y.unflatten(1, (-1, at.case.config.head_dim)) if layout(point) in ("q_heads", "kv_heads") else y


def matrix(case: Case, point: str, layer: str | None = None) -> torch.Tensor:
    """The weight behind a point, ``[out, in]``, of this layer or of another one (``"layers.3"``)."""
    weights, module = case.frame.weights, LINEAR[point][0]
    if module == "lm_head":
        return weights.raw(HEAD if HEAD in weights else EMBEDDING).to(weights.dtype)
    if layer in (None, case.layer):
        return case.weight(f"{module}.weight")
    return weights.raw(f"model.{layer}.{module}.weight").to(weights.dtype)


def vector(case: Case, point: str, layer: str | None = None) -> torch.Tensor:
    """The bias behind a point, ``[out]``; zeros where the model has none."""
    weights, name = case.frame.weights, f"model.{layer or case.layer}.{LINEAR[point][0]}.bias"
    if name in weights:
        return weights.raw(name).to(weights.dtype)
    sizes = {"q_heads": case.config.q_size, "kv_heads": case.config.kv_size, "vocab": case.config.vocab_size,
             "mlp": case.config.intermediate_size, "partial": case.config.hidden_size}
    return torch.zeros(sizes[layout(point)], dtype=weights.dtype)


def has_bias(case: Case, point: str) -> bool:
    """Whether the checkpoint has a bias behind a point."""
    return f"model.{case.layer}.{LINEAR[point][0]}.bias" in case.frame.weights


def activation(case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    """The checkpoint's activation."""
    return arithmetic.activation(case.config.hidden_act)


def before_rope(at: OnRank, op: str) -> torch.Tensor:
    """q or k as RoPE gets it, ``[rows, heads here, head_dim]``, for ``op`` ``"q_rope"`` or ``"k_rope"``."""
    return at(at.frame.before_rope(op[0]))


def tables(at: OnRank, positions: torch.Tensor | None = None, **changed) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, ``[1, rows, head_dim]``, of the checkpoint's RoPE with some of its parameters changed; at the
    positions of the case's rows if no others are given."""
    config = copy.deepcopy(at.case.config.hf)
    config.rope_parameters = {**config.rope_parameters, **changed}
    if positions is None:
        return at.frame.tables(config, at.frame.positions)
    return Rotary(config)(torch.empty(0, dtype=at.frame.dtype), positions, [len(positions)])


def rotated(case: Case, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x [rows, heads, head_dim]`` rotated by Hugging Face's function."""
    return arithmetic.rotated(case.config.model_type, x, cos, sin)


def causal(query: torch.Tensor, key: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The right rule: which keys ``[1, m]`` a query ``[n, 1]`` may see."""
    return key <= query


def attention(at: OnRank, *, scaling: float | None = None, rule=causal, heads=None, weigh: Callable | None = None,
              values: Callable | None = None) -> torch.Tensor:
    """Attention of this rank's query heads, ``[rows, heads here, head_dim]``.

    ``heads``: which KV head each query head reads, or a pair: the one of the keys, the one of the values;
    ``weigh(scores, visible)``: the weights, both of them ``[heads, n, m]`` (``visible`` without heads), for who does
    something else than a masked softmax; ``values(one)``: other values than an :class:`Attended` has.
    """
    case, outs, here = at.case, [], list(at.indices("attn"))
    heads, scaling = case.kv_heads if heads is None else heads, case.scaling if scaling is None else scaling
    of_keys, of_values = (each[here] for each in (heads if isinstance(heads, tuple) else (heads, heads)))
    for one in at.sequences():
        k, v = one.k[:, of_keys], (values(one) if values else one.v)[:, of_values]
        visible = rule(one.positions[:, None], torch.arange(len(k))[None], one.num_keys[:, None])
        if weigh is None:
            outs.append(attend(one.q, k, v, visible, scaling))
            continue
        weights = weigh(one.q.transpose(0, 1) @ k.permute(1, 2, 0) * scaling, visible).to(one.q.dtype)
        outs.append((weights @ v.transpose(0, 1)).transpose(0, 1))
    return torch.cat(outs)
