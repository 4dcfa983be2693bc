"""Chooses the checkpoint's model where several models were recorded, such as a draft and its target."""

from dataclasses import replace

from tplab.align.check.expected import Expected
from tplab.align.check.folder import Entry, Recorded
from tplab.align.check.match import near
from tplab.align.check.names import pattern_of, role_in, role_of, split_name
from tplab.checkpoint import Checkpoint

_INNER = ("q", "qkv", "o", "gate", "gate_up", "down", "attention", "feed_forward")
_ENDS = ("embed", "norm", "head")


def one_model(recorded: Recorded, ckpt: Checkpoint) -> Recorded:
    """``recorded`` with the tensors of the checkpoint's model, and the calls in which it ran."""
    names = dict.fromkeys(entry.name for rank in filter(None, recorded.ranks) for call in rank.calls
                          for entry in call.entries)
    stacks = list(dict.fromkeys(tuple(pattern_of(name).partition("{i}")[0].rstrip(".").split(".")) for name in names
                                if split_name(name)[0] is not None and role_of(*split_name(name)) in _INNER))
    if len(stacks) < 2:
        return recorded
    depth = next((i for i, parts in enumerate(zip(*stacks)) if len(set(parts)) > 1), min(map(len, stacks)))
    roots = list(dict.fromkeys(".".join(stack[:depth + 1]) for stack in stacks))
    entries = [entry for call in next(filter(None, recorded.ranks)).calls for entry in call.entries]
    chosen = max(roots, key=lambda root: _likeness([entry for entry in entries if _under(entry.name, root)], ckpt))
    ends = {role_of(None, name[len(chosen) + 1:]) for name in names if _under(name, chosen)} & {*_ENDS}

    def ours(name: str) -> bool:
        return _under(name, chosen) or not (any(_under(name, root) for root in roots)
                                            or role_of(*split_name(name)) in ends)

    def kept(rank):
        calls = [(call, tuple(entry for entry in call.entries if ours(entry.name))) for call in rank.calls]
        return replace(rank, calls=tuple(replace(call, entries=own) for call, own in calls if own or not call.entries),
                       parameters={name: entry for name, entry in rank.parameters.items() if ours(name)})
    others = ", ".join(root for root in roots if root != chosen)
    return replace(recorded, ranks=tuple(rank and kept(rank) for rank in recorded.ranks), notes=(
        *recorded.notes, f"{len(roots)} models were recorded; {chosen} is the checkpoint's; {others} was not judged"))


def _under(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}.")


def _likeness(entries: list[Entry], ckpt: Checkpoint) -> tuple:
    """A model's likeness to the checkpoint's: whether its norms give the expected values, its width, its depth."""
    config, evidence, right = ckpt.config, Expected(ckpt), False
    layers = {split_name(entry.name)[0] for entry in entries} - {None}
    norms = [entry for entry in entries if role_in(config, *split_name(entry.name)) == "input_norm"
             and entry.kind == "out" and entry.shape[-1:] == (config.hidden_size,)
             and split_name(entry.name)[0] < config.num_layers]
    for entry in norms[:3]:
        norm = f"layers.{split_name(entry.name)[0]}.input_norm"
        right = right or any(near(entry.tensor(), evidence.of(norm, other.tensor())) for other in entries if (
            other.name, other.nth, other.shape) == (entry.name, entry.nth, entry.shape) and other is not entry)
    return right, bool(norms), len(layers) == config.num_layers
