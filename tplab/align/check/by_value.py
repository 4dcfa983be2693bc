"""Finds points by their values where names say nothing.

A module whose output is a matrix or a norm of the checkpoint, applied to its own recorded input, is that matrix or
norm. A tensor that equals a point of Hugging Face's trace on the same ids is that point.
"""

from tplab.align.check.fused import Fused
from tplab.align.check.match import GROUP_OF, PADDING, PARTS, near
from tplab.align.check.names import pattern_of, role_in, split_name
from tplab.align.check.shares import ROWS, Shares
from tplab.align.check.sources import FEW, Source, Sources
from tplab.align.points import LAYER_POINTS, NORM_PLACES, OUTER, POINTS, layout
from tplab.checkpoint.layout import EMBEDDING


def place_by_value(sources: Sources, shares: Shares) -> dict:
    """Place tensors whose names are unknown; returns how, by the pattern of a module's name or of a source."""
    modules: dict[str, dict[str, list[Source]]] = {}  # those that take at most one tensor and give one
    for source in _unknown(sources):
        if source.kind != "tensor":
            modules.setdefault(source.name, {"in": [], "out": []})[source.kind].append(source)
    roles, orders = {}, {}
    for name, sides in modules.items():
        if sides["out"] and (pattern := pattern_of(name)) not in orders:  # the first layer's
            orders[pattern], role = sides["out"][0].order, _role(shares, next(iter(sides["in"]), None), sides["out"][0])
            roles |= {pattern: role} if role else {}
    norms = sorted((pattern for pattern, role in roles.items() if role in NORM_PLACES), key=orders.get)
    right = sorted((roles[pattern] for pattern in norms), key=[*NORM_PLACES].index)
    if len(norms) == 2 and [roles[pattern] for pattern in norms] == right[::-1]:  # they have each other's weights
        roles.update(zip(norms, right))
    if roles:
        sources.claim(roles=roles)
    points: dict[tuple[str, str, str], str] = {}
    for source in {source.pattern: source for source in reversed(_unknown(sources))}.values():  # the first of each
        layer, _ = split_name(source.name)
        names = OUTER if layer is None else [f"layers.{layer}.{point}" for point in LAYER_POINTS]
        if point := next((name for name in names if _equals(shares, source, name)), None):
            points[source.pattern] = point.replace(f".{layer}.", ".{i}.")
    if points:
        sources.claim(roles=roles, points=points)
    return {name: f"known by what it does: {role}" for name, role in roles.items()} | {
        pattern: f"equals Hugging Face's {point}" for pattern, point in points.items()}


def _unknown(sources: Sources) -> list[Source]:
    """Unclaimed tensors of modules with unknown names. (A known module's other tensors are tables or masks.)"""
    return [source for source in sources.unclaimed() if source.kind == "tensor" or not role_in(
        sources.config, *split_name(source.name))]


def _role(shares: Shares, entering: Source | None, leaving: Source) -> str | None:
    """The role of a module, as in :mod:`tplab.align.check.names`, by what it makes of its input."""
    sources, evidence, hidden = shares.sources, shares.expected, shares.config.hidden_size
    rank, layer = sources.complete(leaving)[0], split_name(leaving.name)[0]
    x, y = (source and sources.rows(source, rank, FEW) for source in (entering, leaving))
    if y is None or not y.numel() or entering and x is None:
        return None
    if entering is None:
        return "embed" if layer is None and near(y, evidence.weight(EMBEDDING)[sources.sampled_ids]) else None
    if x.shape[1] == y.shape[1] == hidden:
        norms = {"norm": "norm"} if layer is None else {
            role: f"layers.{layer}.{role}" for role in NORM_PLACES if POINTS[role].needs(shares.config, layer)}
        for role, name in norms.items():
            if near(y, evidence.of(name, x)):
                return role
    if layer is None:
        return "head" if x.shape[1] == hidden and shares.vote("vocab", y, evidence.of("logits", x), rank) else None
    for name in (name for name, parts in PARTS.items() if x.shape[1] == hidden and POINTS[parts[0]].needs(
            shares.config, layer)):
        fused = Fused(shares, name)
        labels = fused.labels(y, x, f"layers.{layer}.", rank) or ()
        if found := {fused.part_of(label) for label in labels if label != PADDING}:
            return name if len(found) > 1 else found.pop()
    return next((role for role in ROWS if y.shape[1] == hidden and POINTS[ROWS[role][0]].needs(
        shares.config, layer) and _is_row_parallel(
        shares, entering, leaving, f"layers.{layer}.", role)), None)


def _is_row_parallel(shares: Shares, entering: Source, leaving: Source, at: str, role: str) -> bool:
    """Whether a module gives its rank's summand of ``o`` or ``down``, or the sum of all."""
    partial, _, group = ROWS[role]
    own, outs = {}, {}
    for rank in shares.sources.complete(leaving):
        x, outs[rank] = (shares.sources.rows(source, rank, FEW) for source in (entering, leaving))
        own[rank] = shares.summand(at, role, x, shares.planned[group][rank])
        if own[rank] is None or outs[rank] is None:
            return False
    return shares.summand_or_sum(at + partial, outs, own) in ({"summand"}, {"sum"})


def _equals(shares: Shares, source: Source, name: str) -> bool:
    """Whether a tensor equals a point of Hugging Face's trace on every rank."""
    sources, ranks, kind = shares.sources, shares.sources.complete(source), layout(name)
    size = shares.in_stage(ranks[0])[1]
    if name == "logits":
        seen = {rank: sources.logits(source, rank, FEW) for rank in ranks}
        return all(found is not None and found[1].shape[1] >= shares.config.vocab_size / size and shares.vote(
            "vocab", found[1], shares.expected.reference(name, source, rank), rank) for rank, found in seen.items())
    if (true := shares.expected.reference(name)) is None:
        return False
    outs = [sources.rows(source, rank, FEW) for rank in ranks]
    if kind == "partial":
        same = len(ranks) == size > 1 and all(out is not None and out.shape == true.shape for out in outs)
        return same and near(sum(out.float() for out in outs), true)
    if kind == "replicated":
        return all(out is not None and near(out, true) for out in outs)
    return all(any(way is not None and shares.vote(GROUP_OF[name.rpartition(".")[2]], way, true, rank) for way in (
        [out] if kind == "mlp" else sources.heads(source, rank, FEW).values())) for rank, out in zip(ranks, outs))
