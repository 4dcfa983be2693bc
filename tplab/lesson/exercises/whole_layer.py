"""Notebook 06: a whole decoder layer from an empty cell, judged point by point as the recording of an engine."""

import sys
from collections.abc import Iterator
from itertools import pairwise

import torch

from tplab.align import diagnose, hf_greedy
from tplab.align.gather import recorded
from tplab.align.judge import judge
from tplab.align.points import layout
from tplab.checkpoint import Checkpoint
from tplab.lesson.attempt import Attempt, NotYet, guarded, kept, on_ranks, saying, tensor
from tplab.lesson.own_engine import layer_fits, written
from tplab.lesson.toy_checkpoint import CountedCheckpoint, toy_model
from tplab.lesson.verdict import Setting, exercise, in_learners_words
from tplab.lesson.words import is_learners
from tplab.model import load_model
from tplab.model.rope import Rotary
from tplab.ranks import rank
from tplab.shard import RankShard, ShardPlan

POINTS = ("input_norm", "q", "k", "v", "q_rope", "k_rope", "attn", "o_proj", "residual", "post_norm", "mlp", "output")
STEPS = (0, 5, 8, 9, 10)  # a prompt of 5, a chunk of 3, two tokens
_IDS = list(range(3, 3 + STEPS[-1]))
_AT = "model.layers.0."
_COUNT = 16


@exercise("MyLayer", "06", takes="weights, here, config",
          agreed="every point is Hugging Face's, two sums a pass, and all layers of the model on {ranks} write its "
                 "text")
def my_layer(attempt: Attempt, setting: Setting):
    """One layer with 8/2 and 9/3 heads on 2 ranks and 8/2 on 3, in steps; then all layers of the notebook's model."""
    for heads, kv_heads, size in ((8, 2, 2), (9, 3, 2), (8, 2, 3)):
        toy = toy_model(heads, kv_heads)
        plan = ShardPlan.from_config(toy.config, size)
        with saying(f"{heads} query and {kv_heads} KV heads over {size} ranks: "):
            ran = on_ranks(size, _in_steps, attempt, toy, plan,
                           waits="A layer has two sums, and every rank comes to both of them")
            _examine([points for (points, *_), _ in ran], toy, plan)
            for number, ((_, read, own), ops) in enumerate(ran):
                _cost(number, read, own, [record.op for record in ops])
    ckpt, ids = setting.checkpoint, setting.ids(8)
    if not layer_fits(ckpt):
        return "in the small examples only: this checkpoint's layers have parts that yours has not"
    found = written(attempt.function, ckpt, ids, _COUNT, tensor_parallel_size=setting.tensor_parallel_size)
    right = hf_greedy(ckpt, ids, _COUNT)
    if found != right:
        at = next(i for i, pair in enumerate(zip(found, right)) if pair[0] != pair[1])
        raise NotYet(f"all layers of {ckpt.name} in a row: token {at} of its text is not Hugging Face's, though one "
                     "layer was right by itself: is something shared between two layers, the cache, say?")


class _Points(dict):
    """``point(name, tensor)`` as a learner's layer calls it on a rank: ``{name: (a copy, the line of the call)}``."""

    def __init__(self, new: int, here: RankShard, config):
        self.new, self.here, self.config = new, here, config

    def __call__(self, name, value):
        if name not in POINTS:
            raise ValueError(f"there is no point {name!r}; there are {', '.join(POINTS)}")
        frame = sys._getframe(1)
        while frame.f_back is not None and not is_learners(frame.f_code.co_filename):
            frame = frame.f_back
        self.keep(name, value, f"point {name!r}, your line {frame.f_lineno}")
        return value

    def keep(self, name: str, value, what: str) -> None:
        heads, d = getattr(self.here, layout(name), None), self.config.head_dim
        shape, dims = ((self.new, self.config.hidden_size), "new tokens, hidden") if heads is None else (
            (self.new, len(heads), d), "new tokens, heads here, head_dim")
        if heads is not None and isinstance(value, torch.Tensor) and value.shape == (self.new, len(heads) * d):
            value = value.view(shape)  # heads side by side are as good
        self[name] = tensor(value, dims, shape, torch.float32, it=f"{what}: comes as").clone(), what


def _in_steps(attempt: Attempt, toy: Checkpoint, plan: ShardPlan) -> tuple[list[_Points], int, int]:
    """On a rank: what was shown in each step, how many bytes were read, and how many the lab's own layer has."""
    counted, here, steps = CountedCheckpoint(toy), plan.ranks[rank()], []
    with torch.inference_mode(), counted.reader() as files, toy.reader() as own:
        embed = own["model.embed_tokens.weight"][:][_IDS]
        cos, sin = Rotary(toy.config.hf)(embed, torch.arange(STEPS[-1]), [(STEPS[-1],) * 2])
        weights = {name.removeprefix(_AT): files[name] for name in toy.tensors if name.startswith(_AT)}
        layer = guarded(attempt.function, weights, here, toy.config)
        if not callable(layer):
            raise NotYet("what it makes cannot be called: layer(hidden, cos, sin, point) needs a method __call__")
        layer = kept(layer.__call__, "hidden, cos, sin, point")
        for start, stop in pairwise(STEPS):
            steps.append(points := _Points(stop - start, here, toy.config))
            points.given = embed[start:stop]
            out = guarded(layer, *(x[start:stop].clone() for x in (embed, cos[0], sin[0])), points)
            points.keep("output", out, "what it returns")
        own = sum(4 * weight.numel() for weight in load_model(toy, plan).layers[0].parameters())
    return steps, counted.taken.total(), own


def _examine(ranks: list[list[_Points]], toy: Checkpoint, plan: ShardPlan) -> None:
    """What the ranks have shown, judged as the recording of an engine."""
    names = [name for name in POINTS if all(name in points for steps in ranks for points in steps)]
    traces = [{"embed": torch.cat([points.given for points in steps]),
               **{f"layers.0.{name}": torch.cat([points[name][0] for points in steps]) for name in names}}
              for steps in ranks]
    if all(trace["layers.0.output"].equal(trace["embed"]) for trace in traces):
        raise NotYet("what it returns: hidden comes back as it went in")
    num_keys = [stop for start, stop in pairwise(STEPS) for _ in range(start, stop)]
    report = judge(recorded(traces, plan, torch.float32, [_IDS], [(0, at) for at in range(STEPS[-1])], num_keys, []),
                   toy, plan)
    if report.ok:
        return
    found, shown = diagnose(report), ranks[0][0]
    name = (found.point or "").rpartition(".")[2]
    says = in_learners_words(found)
    if found.fault is None or found.point in report.evidence and report.evidence[found.point].ours.isnan().any():
        _, right, _ = report.evidence[found.point]
        for trace, here in zip(traces, plan.ranks):
            seen = {key.removeprefix("layers.0."): value for key, value in trace.items()}
            says = next((why for why, guess in _ways(name, seen, right, here, plan, toy) if guess.shape == seen[
                name].shape and torch.allclose(guess, seen[name], atol=1e-4, equal_nan=True)), says)
    before = names[:names.index(name)] if name in names else []
    on = f"on rank {', '.join(map(str, found.ranks))}, " * bool(found.ranks)
    raise NotYet(f"{on}{shown[name][1] if name in shown else name}: {says}\n" + (
        f"Right up to {shown[before[-1]][1].removeprefix('point ')}" if before else "It is the first point"
        if name == POINTS[0] else "Nothing before it was shown: call point(…) on the way"))


def _ways(name: str, seen: dict[str, torch.Tensor], right: torch.Tensor, here: RankShard, plan: ShardPlan,
          toy: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """What the table of mistakes has no name for: in the order of a cache, over the rows of a step, in the sums."""
    if name == "attn" and {"q_rope", "k_rope", "v"} <= seen.keys():
        yield "k stands in front of those in the cache, v behind them", _attended(seen, here, k_first=True)
        yield "v stands in front of those in the cache, k behind them", _attended(seen, here, v_first=True)
        yield "the new keys and values stand in front of the old ones", _attended(seen, here, True, True)
        yield ("the mask is the wrong way round: it hides what is there, and shows what comes",
               _attended(seen, here, hides=lambda key, query: key <= query))
        yield ("the mask comes after the softmax, so the weights that are left do not add up to 1",
               _attended(seen, here, weigh=lambda scores, hidden: scores.softmax(-1).masked_fill(hidden, 0)))
        yield "values stand behind cached keys: is v put behind k?", _attended(seen | {"old_v": seen["k_rope"]}, here)
        if "k" in seen:
            yield "the keys are those from before the rotation", _attended(seen | {"k_rope": seen["k"]}, here)
    with toy.reader() as files:
        weights = {key.removeprefix(_AT): files[key][:] for key in toy.tensors if key.startswith(_AT)}
    if name in ("input_norm", "post_norm"):
        key, source = ("input", "embed") if name == "input_norm" else ("post_attention", "residual")
        first = seen.get("input_norm", seen[source])
        for x, what in ((seen[source], ""), (first, "it reads what the first norm made")):
            for dims, over in ((-1, ""), (0, "one mean is taken over the tokens, for each number"),
                               ((0, 1), "one mean is taken over all tokens; each has its own")):
                normed = torch.cat([part * (part.pow(2).mean(dims, keepdim=True) + toy.config.rms_norm_eps).rsqrt()
                                    for part in x.split([b - a for a, b in pairwise(STEPS)])])
                yield what or over, normed * weights[f"{key}_layernorm.weight"]
                yield "the weight is added, and it is a factor", normed + weights[f"{key}_layernorm.weight"]
    if into := {"o_proj": "embed", "mlp": "residual"}.get(name):
        size = len(plan.ranks)
        yield (f"the residual is in it {size} times: it is added on every rank, before the sum",
               right + size * seen.get(into, right))
    if name == "mlp" and "post_norm" in seen:
        gate, up = (seen["post_norm"] @ weights[f"mlp.{one}_proj.weight"].T for one in ("gate", "up"))
        act, down = torch.nn.functional.silu(gate) * up, weights["mlp.down_proj.weight"]
        yield "every rank takes the first columns of down_proj", sum(
            act[:, one.mlp.start:one.mlp.stop] @ down[:, :len(one.mlp)].T for one in plan.ranks)
        yield "every rank takes the first rows of gate and up, and the first columns of down", sum(
            act[:, :len(one.mlp)] @ down[:, :len(one.mlp)].T for one in plan.ranks)


def _attended(seen: dict, here: RankShard, k_first: bool = False, v_first: bool = False, hides=torch.gt,
              weigh=lambda scores, hidden: scores.masked_fill(hidden, float("-inf")).softmax(-1)) -> torch.Tensor:
    """Attention of a rank in the steps, with another order in its cache, another mask, another softmax."""
    q, k, v, reads, rows = seen["q_rope"], seen["k_rope"], seen["v"], list(here.kv_for_q), []
    keys, values = [], []
    for start, stop in pairwise(STEPS):
        now = list(range(start, stop))
        keys, values = (now + keys if k_first else keys + now), (now + values if v_first else values + now)
        v_here = torch.cat([seen.get("old_v", v)[:start], v[start:stop]])[values]
        scores = torch.einsum("qhd,khd->hqk", q[now], k[keys][:, reads]) * q.shape[-1] ** -0.5
        hidden = hides(torch.arange(stop), torch.tensor(now)[:, None])
        rows.append(torch.einsum("hqk,khd->qhd", weigh(scores, hidden), v_here[:, reads]))
    return torch.cat(rows)


def _cost(number: int, read: int, own: int, ops: list[str]) -> None:
    """What it needs for that: sums, and bytes of weights."""
    passes = len(STEPS) - 1
    if ops != ["all_reduce"] * 2 * passes:
        raise NotYet(f"rank {number}: the numbers are right, with {len(ops)} collectives in {passes} passes "
                     f"({', '.join(dict.fromkeys(ops)) or 'none'}); two all_reduces a pass are enough: one behind "
                     "attention, one behind the MLP")
    if read > own:
        raise NotYet(f"rank {number}: the numbers are right, and it reads {read:,} bytes of weights; its own part has "
                     f"{own:,}: slice before you keep")
