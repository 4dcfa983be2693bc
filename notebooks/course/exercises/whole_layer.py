"""Notebook 06: a whole decoder layer from an empty cell, judged point by point as the recording of an engine."""

import math
import sys
from collections import Counter
from contextlib import suppress
from itertools import pairwise, product

import torch

from course.exercises.rotation import halves
from course.judge.attempt import Attempt, NotYet, guarded, kept, on_ranks, saying, tensor
from course.judge.compare import Made, is_like, right_lines, where
from course.judge.cuts import share_of
from course.judge.own_engine import layer_fits, written
from course.judge.toy_checkpoint import CountedCheckpoint, toy_model
from course.judge.verdict import Setting, exercise, in_learners_words
from course.judge.words import is_learners
from tplab.align import diagnose, hf_greedy
from tplab.align.gather import recorded
from tplab.align.judge import judge
from tplab.align.points import layout
from tplab.checkpoint import Checkpoint
from tplab.model.rope import Rotary
from tplab.ranks import rank
from tplab.shard import RankShard, ShardPlan

POINTS = ("input_norm", "q", "k", "v", "q_rope", "k_rope", "attn", "o_proj", "residual", "post_norm", "mlp", "output")
STEPS = (0, 5, 8, 9, 10)  # a prompt of 5, a chunk of 3, two tokens
_IDS = list(range(3, 3 + STEPS[-1]))
_AT = "model.layers.0."
_COUNT = 16
LLAMA = {"model_type": "llama", "attention_bias": False, "hidden_size": 24}


@exercise("MyLayer", "06", takes="weights, here, config",
          agreed="every point that it gives is Hugging Face's, two sums a pass, and all layers of the model on {ranks} "
                 "write its text")
def my_layer(attempt: Attempt, setting: Setting):
    """A layer with 8/2 and 9/3 heads on 2 ranks, and 8/2 on 3 of a Llama without biases, in steps; then all layers of
    the notebook's model."""
    toy = toy_model(8, 2)
    with saying("8 query and 2 KV heads on one rank: "):  # where no other one writes at the same time
        ((is_same, _),) = on_ranks(1, _is_repeated, attempt, toy, ShardPlan.from_config(toy.config, 1))
        if not is_same:
            raise NotYet("a second layer with the same weights makes something else of the same tokens: what do the "
                         "two share?")
    for heads, kv_heads, size in ((8, 2, 2), (9, 3, 2), (8, 2, 3)):
        toy = toy_model(heads, kv_heads, **LLAMA if size > 2 else {})
        plan = ShardPlan.from_config(toy.config, size)
        with saying(f"{heads} query and {kv_heads} KV heads over {size} ranks: "):
            ran = on_ranks(size, _in_steps, attempt, toy, plan,
                           waits="A layer has two sums, and every rank comes to both of them")
            _examine([points for (points, _), _ in ran], toy, plan)
            for number, ((_, taken), ops) in enumerate(ran):
                _cost(number, taken, toy, plan, [record.op for record in ops])
    ckpt, ids = setting.checkpoint, setting.ids(8)
    if not layer_fits(ckpt):
        return "in the small examples only: this checkpoint's layers have parts that yours has not"
    found = written(attempt.function, ckpt, ids, _COUNT, tensor_parallel_size=setting.tensor_parallel_size)
    right = hf_greedy(ckpt, ids, _COUNT)
    if found != right:
        raise NotYet(f"all layers of {ckpt.name} in a row: their text is not Hugging Face's, though one layer was "
                     "right by itself")


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


def _is_repeated(attempt: Attempt, toy: Checkpoint, plan: ShardPlan) -> bool:
    """On a rank: whether the second of two layers makes of the same tokens what the first one made of them."""
    _in_steps(attempt, toy, plan)
    with suppress(Exception):  # a single layer has just raised none: what the first one has left is in the way
        first, second = _in_steps(attempt, toy, plan, 2)[0][::len(STEPS) - 1]
        return first["output"][0].allclose(second["output"][0], equal_nan=True)
    return False


def _in_steps(attempt: Attempt, toy: Checkpoint, plan: ShardPlan, count: int = 1) -> tuple[list[_Points], Counter]:
    """On a rank: what each of so many layers has shown in each step, and how many bytes were read of each weight."""
    counted, here, shown = CountedCheckpoint(toy), plan.ranks[rank()], []
    with torch.inference_mode(), counted.reader() as files, toy.reader() as uncounted:
        embed = uncounted["model.embed_tokens.weight"][:][_IDS]
        cos, sin = Rotary(toy.config.hf)(embed, torch.arange(STEPS[-1]), [(STEPS[-1],) * 2])
        layers = [_layer(attempt, files, here, toy) for _ in range(count)]
        for layer, (start, stop) in product(layers, pairwise(STEPS)):
            shown.append(points := _Points(stop - start, here, toy.config))
            points.given, points.tables = embed[start:stop], (cos[0], sin[0])
            with Made() as made:
                out = guarded(layer, *(x[start:stop].clone() for x in (embed, cos[0], sin[0])), here.q_heads,
                              here.kv_heads, here.kv_for_q, points)
            points.made = made.found
            points.keep("output", out, "what it returns")
    return shown, counted.taken


def _layer(attempt: Attempt, files, here: RankShard, toy: Checkpoint):
    weights = {name.removeprefix(_AT): files[name] for name in toy.tensors if name.startswith(_AT)}
    layer = guarded(attempt.function, weights, here, toy.config)
    if not callable(layer):
        raise NotYet("what it makes cannot be called: layer(hidden, cos, sin, point) needs a method __call__")
    return kept(lambda hidden, cos, sin, q, kv, reads, point: layer(hidden, cos, sin, point),
                "hidden, cos, sin, here.q_heads, here.kv_heads, here.kv_for_q")  # what an error is told with


def _examine(ranks: list[list[_Points]], toy: Checkpoint, plan: ShardPlan) -> None:
    """What the ranks have shown, judged as the recording of an engine."""
    names = [name for name in POINTS if all(name in points for steps in ranks for points in steps)]
    if unfinished := all(points["output"][0].equal(points.given) for steps in ranks for points in steps):
        names.remove("output")
    nothing_back = "what it returns: hidden comes back as it went in"
    if not names:
        raise NotYet(nothing_back)
    traces = [{"embed": torch.cat([points.given for points in steps]),
               **{f"layers.0.{name}": torch.cat([points[name][0] for points in steps]) for name in names}}
              for steps in ranks]
    num_keys = [stop for start, stop in pairwise(STEPS) for _ in range(start, stop)]
    report = judge(recorded(traces, plan, torch.float32, [_IDS], [(0, at) for at in range(STEPS[-1])], num_keys, []),
                   toy, plan)
    if report.ok and unfinished:
        raise NotYet(f"right up to {ranks[0][0][names[-1]][1].removeprefix('point ')}; {nothing_back}")
    if report.ok:
        return
    found, shown = diagnose(report), ranks[0][0]
    name = (found.point or "").rpartition(".")[2]
    ours, right, _ = report.evidence.get(found.point, (torch.zeros(()), torch.zeros(()), None))
    says = found.fault is None and where(ours, right, 1e-4, ["token"]) or in_learners_words(found)
    before = names[:names.index(name)] if name in names else []
    on = f"on rank {', '.join(map(str, found.ranks))}, " * bool(found.ranks)
    fine = (f"Right up to {shown[before[-1]][1].removeprefix('point ')}" if before else "It is the first point"
            if name == POINTS[0] else "Nothing before it was shown: call point(…) on the way")
    lines = "" if found.fault else _on_the_way(name, ranks, traces, plan, toy)
    raise NotYet(f"{on}{shown[name][1] if name in shown else name}: {says}\n{fine}\n{lines}".rstrip())


def _on_the_way(name: str, ranks: list[list[_Points]], traces: list[dict], plan: ShardPlan, toy: Checkpoint) -> str:
    """Which steps to a point are right, of the first rank and step whose lines have made less than all."""
    said = ""
    for steps, trace, here in zip(ranks, traces, plan.ranks):
        seen = {key.removeprefix("layers.0."): value for key, value in trace.items()}
        for points, (start, stop) in sorted(zip(steps, pairwise(STEPS)), key=lambda step: not step[1][0]):
            try:
                wanted = _steps(name, seen | {"tables": points.tables}, here, toy, start, stop)
            except KeyError:  # a point that was not shown
                return ""
            if name == "attn" and start and _has(points, seen["k"][:stop]) and not _has(points, seen["k_rope"][:stop]):
                return "The keys of all tokens so far are there, but not rotated: which keys does the cache keep?"
            said = right_lines({**wanted, "the result": ()}, points.made, 1e-4) if wanted else ""
            if "See what follows" not in said:
                return said and f"{said}, in the step with tokens {start} to {stop - 1}"
    return said


def _has(points: _Points, step: torch.Tensor) -> bool:
    return any(is_like(one, step, 1e-4) for _, one in points.made)


def _steps(name: str, seen: dict, here: RankShard, toy: Checkpoint, start: int, stop: int) -> dict:
    """What a right layer makes between the points before it, as they were shown, and this one."""
    now = slice(start, stop)
    if name in ("q_rope", "k_rope"):
        x, (cos, sin) = seen[name[0]][now], (table[now, None] for table in seen["tables"])
        return {"x times cos": x * cos, "the other half": halves(x), "the other half times sin": halves(x) * sin}
    if name == "attn":
        reads, k, v = list(here.kv_for_q), seen["k_rope"][:stop], seen["v"][:stop]
        scores = torch.einsum("qhd,khd->hqk", seen["q_rope"][now], k[:, reads]) * toy.config.head_dim ** -0.5
        masked = scores.masked_fill(torch.arange(stop) > torch.arange(start, stop)[:, None], float("-inf"))
        return {"k of all tokens so far": (k, k[:, reads]), "the scaled scores": scores, "the masked scores": masked,
                "the weights": masked.softmax(-1), "v of all tokens so far": (v, v[:, reads])}
    if name == "mlp":
        with toy.reader() as files:
            gate, up, down = (files[f"{_AT}mlp.{one}_proj.weight"][:] for one in ("gate", "up", "down"))
        mlp = slice(here.mlp.start, here.mlp.stop)
        gate, up = (seen["post_norm"][now] @ one[mlp].T for one in (gate, up))
        act = torch.nn.functional.silu(gate) * up
        return {"its columns of gate": gate, "its columns of up": up, "silu(gate) · up": act,
                "this rank's summand": act @ down[:, mlp].T}
    return {}


def _cost(number: int, taken: Counter, toy: Checkpoint, plan: ShardPlan, ops: list[str]) -> None:
    """What it needs for that: sums, and bytes of weights."""
    passes = len(STEPS) - 1
    if ops != ["all_reduce"] * 2 * passes:
        raise NotYet(f"rank {number}: the numbers are right, with {len(ops)} collectives in {passes} passes "
                     f"({', '.join(dict.fromkeys(ops)) or 'none'}); two all_reduces a pass are enough: one behind "
                     "attention, one behind the MLP")
    for name, read in taken.items():
        (dim, part, _), shape = share_of(name, plan, number), list(toy.tensors[name].shape)
        shape[dim] = shape[dim] if part is None else len(part)
        if read > (own := 4 * math.prod(shape)):
            raise NotYet(f"rank {number}: the numbers are right, and of {name.removeprefix(_AT)} it reads {read:,} "
                         f"bytes; its own part has {own:,}: slice before you keep")
