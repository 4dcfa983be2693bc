"""What names do not say: a module is known by what it does, a tensor by what it equals.

A module that gives a matrix or a norm of the checkpoint, applied to its own recorded input, is that matrix or norm. A
tensor that equals a point of Hugging Face's trace on the same ids is that point.
"""

from tplab.align.arithmetic import rms_norm
from tplab.align.check.fused import Fused
from tplab.align.check.match import GROUP_OF, PADDING, PARTS, near
from tplab.align.check.names import pattern_of, place_of, role_of
from tplab.align.check.shares import Shares
from tplab.align.check.sources import FEW, Source, Sources
from tplab.align.check.sums import ROWS, kinds
from tplab.align.operations import columns_of
from tplab.align.points import LAYER_POINTS, layout
from tplab.checkpoint.layout import EMBEDDING

_NORMS = {"input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight"}


def learn(sources: Sources, shares: Shares) -> dict:
    """Place what the conventions did not know; returns how, by the pattern of a module's name or of a source."""
    roles: dict[str, str] = {}  # of modules
    order: dict[str, int] = {}
    for pattern, (entering, leaving) in _modules(sources).items():
        if role := _role(shares, entering, leaving):
            roles[pattern], order[pattern] = role, leaving.order
    norms = [pattern for pattern in sorted(order, key=order.get) if roles[pattern] in _NORMS]
    if [roles[pattern] for pattern in norms] == [*_NORMS][::-1]:  # they have each other's weights
        roles.update(zip(norms, _NORMS))
    if roles:
        sources.claim(roles=roles)
    points: dict[tuple[str, str, str], str] = {}
    for source in {source.pattern: source for source in reversed(_unknown(sources))}.values():  # the first of each
        if point := _point(shares, source):
            points[source.pattern] = point
    if points:
        sources.claim(roles=roles, points=points)
    return {name: f"known by what it does: {role}" for name, role in roles.items()} | {
        pattern: f"equals Hugging Face's {point}" for pattern, point in points.items()}


def _unknown(sources: Sources) -> list[Source]:
    """What was not claimed, of modules whose names say nothing: a known module's other tensors are tables or masks."""
    return [source for source in sources.unclaimed() if source.kind == "tensor" or not role_of(*place_of(source.name))]


def _modules(sources: Sources) -> dict[str, tuple[Source | None, Source]]:
    """By pattern, the modules nobody knows that take at most one tensor and give one; the first layer's."""
    found: dict[str, dict[str, list[Source]]] = {}
    for source in _unknown(sources):
        if source.kind != "tensor":
            found.setdefault(source.name, {"in": [None], "out": []})[source.kind].append(source)
    modules: dict[str, tuple[Source | None, Source]] = {}
    for name, sides in found.items():
        if sides["out"]:
            modules.setdefault(pattern_of(name), (sides["in"][:2][-1], sides["out"][0]))
    return modules


def _role(shares: Shares, entering: Source | None, leaving: Source) -> str | None:
    """What a module does, as a role of :mod:`tplab.align.check.names`."""
    sources, evidence, hidden = shares.sources, shares.evidence, shares.config.hidden_size
    rank, layer = sources.complete(leaving)[0], place_of(leaving.name)[0]
    x, y = (source and sources.rows(source, rank, FEW) for source in (entering, leaving))
    if y is None or not y.numel() or entering and x is None:
        return None
    if entering is None:
        return "embed" if layer is None and near(y, evidence.weight(EMBEDDING)[sources.sampled_ids]) else None
    if x.shape[1] == y.shape[1] == hidden:
        norms = {"norm": "model.norm.weight"} if layer is None else {
            role: f"model.layers.{layer}.{name}" for role, name in _NORMS.items()}
        for role, name in norms.items():
            if near(y, rms_norm(x.float(), evidence.weight(name), shares.config.rms_norm_eps)):
                return role
    if layer is None:
        return "head" if x.shape[1] == hidden and shares.vote("vocab", y, evidence.of("logits", x), rank) else None
    for name in PARTS if x.shape[1] == hidden else ():
        fused = Fused(shares, name)
        labels = fused.labels(y, x, f"layers.{layer}.", rank) or ()
        if found := {fused.part_of(label) for label in labels if label != PADDING}:
            return name if len(found) > 1 else found.pop()
    return next((role for role in ROWS if y.shape[1] == hidden and _is_row_parallel(
        shares, entering, leaving, f"layers.{layer}.", role)), None)


def _is_row_parallel(shares: Shares, entering: Source, leaving: Source, at: str, role: str) -> bool:
    """Whether a module gives its rank's summand of ``o`` or ``down``, or the sum of all."""
    partial, before, group = ROWS[role]
    own, outs = {}, {}
    for rank in shares.sources.complete(leaving):
        x, outs[rank] = (shares.sources.rows(source, rank, FEW) for source in (entering, leaving))
        columns = columns_of(shares.planned[group][rank], shares.dim(before))
        if x is None or outs[rank] is None or x.shape[1] != len(columns):
            return False
        own[rank] = shares.evidence.of(at + partial, x, features=columns, bias=0.0)
    return kinds(shares.evidence, at + partial, outs, own) in ({"summand"}, {"sum"})


def _point(shares: Shares, source: Source) -> str | None:
    """The point of Hugging Face's trace that a tensor equals on every rank, ``{i}`` in the place of its layer."""
    layer, _ = place_of(source.name)
    names = ["embed", "norm", "logits"] if layer is None else [f"layers.{layer}.{point}" for point in LAYER_POINTS]
    return next((name.replace(f".{layer}.", ".{i}.") for name in names if _equals(shares, source, name)), None)


def _equals(shares: Shares, source: Source, name: str) -> bool:
    sources, ranks, kind = shares.sources, shares.sources.complete(source), layout(name)
    size = shares.seat(ranks[0])[1]
    if name == "logits":
        seen = {rank: sources.logits(source, rank, FEW) for rank in ranks}
        return all(found is not None and found[1].shape[1] >= shares.config.vocab_size / size and shares.vote(
            "vocab", found[1], shares.evidence.logits(found[0]), rank) for rank, found in seen.items())
    true = shares.evidence.reference(name)
    if true is None:
        return False
    outs = [sources.rows(source, rank, FEW) for rank in ranks]
    if kind == "partial":
        same = len(ranks) == size > 1 and all(out is not None and out.shape == true.shape for out in outs)
        return same and near(sum(out.float() for out in outs), true)
    if kind == "replicated":
        return all(out is not None and near(out, true) for out in outs)
    return all(any(way is not None and shares.vote(GROUP_OF[name.rpartition(".")[2]], way, true, rank) for way in (
        [out] if kind == "mlp" else sources.heads(source, rank, FEW).values())) for rank, out in zip(ranks, outs))
