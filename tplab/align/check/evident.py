"""What names do not say: a module is known by what it does, a tensor by what it equals.

A module that gives a matrix or a norm of the checkpoint, applied to its own recorded input, is that matrix or norm. A
tensor that equals a point of Hugging Face's trace on the same ids is that point.
"""

from tplab.align.arithmetic import rms_norm
from tplab.align.check import layouts
from tplab.align.check.fused import columns_in, heads_in
from tplab.align.check.names import pattern_of, place_of, role_of
from tplab.align.check.shares import GROUPS, Shares
from tplab.align.check.sources import FEW, SAMPLE, Source, Sources
from tplab.align.operations import columns_of
from tplab.align.points import LAYER_POINTS, layout
from tplab.checkpoint.layout import EMBEDDING

_NORMS = {"input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight"}


def learn(sources: Sources, shares: Shares) -> dict:
    """Place what the conventions did not know; returns how, by the pattern of a module's name or of a source."""
    roles: dict[str, str] = {}  # of modules
    order: dict[str, int] = {}
    for pattern, (entering, leaving) in _modules(sources).items():
        if role := _role(sources, shares, entering, leaving):
            roles[pattern], order[pattern] = role, leaving.order
    norms = [pattern for pattern in sorted(order, key=order.get) if roles[pattern] in _NORMS]
    if [roles[pattern] for pattern in norms] == [*_NORMS][::-1]:  # they have each other's weights
        roles.update(zip(norms, _NORMS))
    if roles:
        sources.claim(roles=roles)
    points: dict[tuple[str, str, str], str] = {}
    for source in {source.pattern: source for source in reversed(_unknown(sources))}.values():  # the first of each
        if point := _equal(sources, shares, source):
            points[source.pattern] = point
    if points:
        sources.claim(roles=roles, points=points)
    return {name: f"known by what it does: {role}" for name, role in roles.items()} | {
        pattern: f"equals Hugging Face's {point}" for pattern, point in points.items()}


def _unknown(sources: Sources) -> list[Source]:
    """What was not claimed, of modules whose names say nothing: a known module's other tensors are tables or masks."""
    return [source for source in sources.unclaimed() if source.kind == "tensor" or not role_of(*place_of(source.name))]


def _modules(sources: Sources) -> dict[str, tuple[Source, Source]]:
    """By pattern, the modules nobody knows that take one tensor and give one; the first layer's."""
    found: dict[str, dict[str, list[Source]]] = {}
    for source in _unknown(sources):
        if source.kind != "tensor":
            found.setdefault(source.name, {"in": [], "out": []})[source.kind].append(source)
    modules: dict[str, tuple[Source, Source]] = {}
    for name, sides in found.items():
        if sides["out"]:
            entering = sides["in"] or [None]
            modules.setdefault(pattern_of(name), (entering[0], sides["out"][0]))
    return modules


def _role(sources: Sources, shares: Shares, entering: Source | None, leaving: Source) -> str | None:
    """What a module does, as a role of :mod:`tplab.align.check.names`."""
    rank = sources.complete(leaving)[0]
    y, (layer, _) = sources.rows(leaving, rank, FEW), place_of(leaving.name)
    if y is None or not y.numel():
        return None
    hidden, evidence = shares.config.hidden_size, shares.evidence
    if entering is None:
        ids = [sources.texts.ids[number][position] for number, position in sources.places[:SAMPLE]]
        same = y.shape[1] == hidden and layouts.near(y, evidence.weight(EMBEDDING)[ids])
        return "embed" if same and layer is None else None
    x = sources.rows(entering, rank, FEW)
    if x is None:
        return None
    if x.shape[1] == y.shape[1] == hidden:
        norms = {"norm": "model.norm.weight"} if layer is None else {
            role: f"model.layers.{layer}.{name}" for role, name in _NORMS.items()}
        for role, name in norms.items():
            if layouts.near(y, rms_norm(x.float(), evidence.weight(name), shares.config.rms_norm_eps)):
                return role
    if layer is None:
        return "head" if x.shape[1] == hidden and shares.vote("vocab", y, evidence.logits(x), rank) else None
    if x.shape[1] == hidden:
        dim = shares.config.head_dim
        for which in "qkv" if y.shape[1] % dim == 0 else "":
            if shares.vote(which, y.unflatten(1, (-1, dim)), evidence.of(layer, which, x), rank):
                return which
        for which in ("gate", "up"):
            if shares.vote("mlp", y, evidence.of(layer, which, x), rank):
                return which
        for role, fused in (("qkv", heads_in(shares)), ("gate_up", columns_in(shares))):
            if fused.labels(y, x, layer, rank):
                return role
    if y.shape[1] == hidden:
        for role in ("o", "down"):
            if _is_row_parallel(sources, shares, entering, leaving, layer, role):
                return role
    return None


def _is_row_parallel(sources: Sources, shares: Shares, entering: Source, leaving: Source, layer: int, role: str
                     ) -> bool:
    """Whether a module gives its rank's summand of ``o`` or ``down``, or the sum of all."""
    dim, partial = (shares.config.head_dim, "o_partial") if role == "o" else (1, "mlp_partial")
    own, outs = {}, {}
    for rank in sources.complete(leaving):
        x = sources.rows(entering, rank, FEW)
        columns = columns_of(shares.planned["q" if role == "o" else "mlp"][rank], dim)
        if x is None or x.shape[1] != len(columns):
            return False
        own[rank] = shares.evidence.summand(layer, partial, x, columns)
        outs[rank] = sources.rows(leaving, rank, FEW)
    bias = shares.evidence.bias(layer, partial)
    total = sum(own.values())
    return any(all(layouts.near(outs[rank], found[rank] + more) for rank in outs)
               for found in (own, dict.fromkeys(own, total)) for more in ([0.0] if bias is None else [0.0, bias]))


def _equal(sources: Sources, shares: Shares, source: Source) -> str | None:
    """The point of Hugging Face's trace that a tensor equals on every rank, ``{i}`` in the place of its layer."""
    layer, _ = place_of(source.name)
    names = ["embed", "norm", "logits"] if layer is None else [f"layers.{layer}.{point}" for point in LAYER_POINTS]
    return next((name if layer is None else name.replace(f".{layer}.", ".{i}.") for name in names
                 if _equals(sources, shares, source, name)), None)


def _equals(sources: Sources, shares: Shares, source: Source, name: str) -> bool:
    ranks = sources.complete(source)
    if name == "logits":
        seen = {rank: sources.logits(source, rank, FEW) for rank in ranks}
        least = shares.config.vocab_size / shares.seat(ranks[0])[1] if ranks else 0
        if any(found is None or found[1].shape[1] < least for found in seen.values()):
            return False
        return bool(seen) and all(shares.vote("vocab", tensor, shares.reference.logits(places), rank)
                                  for rank, (places, tensor) in seen.items())
    true = shares.reference.point(name)
    if true is None or not ranks:
        return False
    kind = layout(name)
    if kind == "partial":
        outs = [sources.rows(source, rank, FEW) for rank in ranks]
        same = all(out is not None and out.shape == true.shape for out in outs)
        return len(ranks) == shares.seat(ranks[0])[1] > 1 and same and layouts.near(sum(out.float() for out in outs),
                                                                                    true)
    for rank in ranks:
        if kind == "replicated":
            tensor = sources.rows(source, rank, FEW)
            if tensor is None or not layouts.near(tensor, true):
                return False
        else:
            ways = [sources.rows(source, rank, FEW)] if kind == "mlp" else list(
                sources.heads(source, rank, FEW).values())
            if not any(way is not None and shares.vote(GROUPS[name.rpartition(".")[2]], way, true, rank)
                       for way in ways):
                return False
    return True

