"""Notes of a recording besides its points: what was left out, which modules raised an error."""

from collections.abc import Iterable, Iterator

from tplab.align.check.folder import NOTHING_RAN, Call, RecordedRank
from tplab.align.check.names import pattern_of, split_name
from tplab.checks import span


def once(sentences: Iterable[tuple[int, int, str]]) -> list[str]:
    """``(rank, call, sentence)`` as lines, each sentence once: ``"ranks 0–1, calls 0–3: …"``."""
    calls: dict[str, dict[int, set[int]]] = {}
    for rank, call, what in sentences:
        calls.setdefault(what, {}).setdefault(rank, set()).add(call)
    return [f"{listed('rank', [*of_rank])}, {listed('call', sorted(set().union(*of_rank.values())))}: {what}"
            for what, of_rank in calls.items()]


def listed(what: str, numbers) -> str:
    """``"layers 0–2"``, ``"rank 1"``."""
    return f"{what}{'s' * (len(numbers) > 1)} {span(numbers)}"


def call_notes(ranks: Iterable[RecordedRank]) -> list[str]:
    """What was left out of calls, and errors inside of calls that went on."""
    return once((rank.rank, call.index, what) for rank in ranks for call in rank.calls
                for what in (*_swallowed(call), *call.left_out) if what != NOTHING_RAN)


def _swallowed(call: Call) -> Iterator[str]:
    """Each error once, with the modules in which it began; the error that ended a call is not among them."""
    began: dict[str, list[str]] = {}
    for what in call.raised:
        name, _, error = what.partition(": ")
        inner = began.setdefault(error, [])
        if not any(known == name or known.startswith(f"{name}." if name else "") for known in inner):
            inner.append(name)
    for error, names in began.items():
        if call.status != f"failed: {error}":
            layers = sorted({layer for layer, _ in map(split_name, names) if layer is not None})
            where = f" ({listed('layer', layers)})" if len(layers) > 1 else ""
            patterns = dict.fromkeys(map(pattern_of, names) if where else names)
            yield f"{', '.join(patterns) or 'the model'}: {error}{where}"
