"""What recorded tensors say of one another, whatever their values should be: layers that ran nowhere, joined logits,
columns of padding, copies of a KV head, adapters."""

from dataclasses import replace

import torch

from tplab.align.check.match import GROUPS, near
from tplab.align.check.notes import listed
from tplab.align.check.sources import FEW, SAMPLE, Source, Sources
from tplab.align.gather import whole_point
from tplab.align.points import short_name
from tplab.align.recording import Contradiction, Recording


def check_padding(sources: Sources) -> None:
    """Where every recorded tensor of logits is wider than the vocabulary, the sampler sees the padding, too."""
    logit_sources = sources.of("logits")
    for source in reversed(logit_sources):
        rank = sources.complete(source)[0]
        (_, logits), (_, padding) = (sources.logits(source, rank, padding=behind) or ([], torch.empty(0, 0))
                                     for behind in (False, True))
        if not padding.numel():
            return
    if logit_sources:
        more = f"{logit_sources[0]} has {padding.shape[1]} columns of padding"
        if drawn := int((padding.amax(1) > logits.amax(1)).sum()):
            sources.contradictions.append(Contradiction(
                f"{more}, and in {drawn} of {len(logits)} rows the largest logit is one of them, no token",
                "vocab_padding"))
        else:
            sources.warnings.append(f"{more}; the sampler must not see them")


def check_joined(sources: Sources, kept: Source, recording: Recording) -> None:
    """Where another tensor gathers the logits of the head, it must have them, in the vocabulary's order."""
    row_of, size = {place: row for row, place in enumerate(recording.logit_places)}, sources.config.vocab_size
    for source in sources.of("logits") if sources.world_size > 1 else ():
        for rank in sources.complete(source) if source is not kept else ():
            places, joined = sources.logits(source, rank) or ([], torch.empty(0, 0))
            rows = [(row_of[place], row) for row, place in enumerate(places) if place in row_of][:SAMPLE]
            if joined.shape[1] < size or not rows:
                continue
            few = [replace(shard, tensor=shard.tensor[[kept_row for kept_row, _ in rows]])
                   for shard in recording.points["logits"][::-1] if shard]
            whole, _, held = whole_point("logits", few)  # of several that hold a token, the last
            if held != list(range(size)):
                return
            ours, theirs = (x.double().T.contiguous() for x in (whole, joined[[row for _, row in rows], :size]))
            differs = (theirs != ours) & ~(theirs.isnan() & ours.isnan())
            if not differs.any() or near(theirs, ours):
                continue
            token_of = {bytes(column.numpy().data): token for token, column in enumerate(ours)}
            order = [token_of.get(bytes(column.numpy().data)) for column in theirs]
            wrong = int(differs.any(1).nonzero()[0])
            what = (f"has the logits' shape, and is neither the logits of {kept} nor a reordering of them"
                    if None in order else f"holds the logits of {kept} in another order: those of token {order[wrong]} "
                    f"stand in the place of token {wrong}")
            sources.contradictions.append(Contradiction(f"on rank {rank}, {source} {what}",
                                                        None if None in order else "head_rows"))
            return


def check_copies(recording: Recording) -> None:
    """Where heads are dealt out in another way than by the plan, ranks that hold the same KV head by their sizes must
    hold the same numbers. (Ranks that follow the plan are judged one by one.)"""
    if any(what.about for what in recording.contradictions):
        return  # heads are dealt out wrongly: copies that differ follow from it
    for group in GROUPS["k"], GROUPS["v"]:
        name, owner = next((name for name in recording.points if short_name(name) in group.points), ""), {}
        shards = recording.points[name] if name else []
        follows = [not shard or tuple(shard.indices) == tuple(planned.kv_heads)
                   for shard, planned in zip(shards, recording.plan.ranks)]
        for rank, shard in enumerate(shards):
            for at, head in enumerate(shard.indices if shard else ()):
                first, theirs = owner.setdefault(head, (rank, shard.tensor[:, at]))
                if not (follows[first] and follows[rank]) and not near(theirs, shard.tensor[:, at]):
                    recording.contradictions.append(Contradiction(
                        f"{group.words} are dealt out wrongly: by their sizes, ranks {first} and {rank} hold head "
                        f"{head}, and their numbers differ", about=group.behind))
                    break


def adapted_modules(sources: Sources) -> set[str]:
    """The modules with an adapter (LoRA) that adds something."""
    bare = {source.name: source for source in sources.unclaimed() if source.kind == "out"}

    def is_idle(whole: Source, base: Source) -> bool:
        pairs = ([sources.rows(source, rank, FEW) for source in (base, whole)] for rank in sources.complete(base))
        return any(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
    return {whole.name for whole in sources.claimed() if whole.kind == "out"
            and (base := bare.get(f"{whole.name}.base_layer")) and not is_idle(whole, base)}


def find_lost_layers(sources: Sources, shares) -> list[int]:
    """Layers that ran on no rank: no tensor of them was recorded, and the next layer's input is the output of the layer
    before them."""
    recorded, lost_layers = [-1, *sorted(sources.layers_of(*sources.ranks)), sources.config.num_layers], []

    def first(name: str) -> torch.Tensor | None:
        """A replicated point's first rows on the first rank that has it."""
        return next((rows for source, read, _ in shares.candidates(name)
                     for rank in sources.complete(source)[:1] if (rows := read(rank, FEW)) is not None), None)
    for before, behind in zip(recorded, recorded[1:]):
        ends = [first(f"layers.{layer}.output" if layer >= 0 else "embed") for layer in (before, behind - 1)]
        if behind - before > 1 and None not in [end if end is None else 1 for end in ends] and near(*ends):
            lost = list(range(before + 1, behind))
            lost_layers += lost
            source = f"layer {before}" if before >= 0 else "the embedding"
            target = f"layer {behind}" if behind < sources.config.num_layers else "the last norm"
            sources.contradictions.append(Contradiction(
                f"{listed('layer', lost)} ran on no rank: the input of {target} is the output of {source}",
                "layer_skipped"))
    return lost_layers
