"""``Diagnosis``: what is wrong with an engine, as far as the numbers tell."""

from dataclasses import dataclass, field

from tplab.checks import spans


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong, as far as the numbers tell."""

    # The museum's name for it, or a probe's ("norm_epsilon"); None if nothing is wrong or nothing fits.
    fault: str | None
    sentence: str  # the same in words, with the evidence
    point: str | None = None  # the trace point at which it was first seen; None if nothing is wrong
    numbers: dict[str, float] = field(default_factory=dict)  # the evidence by name
    lookalikes: tuple[str, ...] = ()  # other bugs that leave exactly the same numbers
    points: tuple[str, ...] = ()  # all trace points that it explains
    scope: str = ""  # of which rows it holds, in words ("in decode calls only"); empty if of all
    ranks: tuple[int, ...] = ()  # on which it shows; empty if on all

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return self.point is None

    @property
    def names(self) -> tuple[str, ...]:
        """The fault and those that cannot be told from it by numbers."""
        return (self.fault, *self.lookalikes) if self.fault else ()

    @property
    def where(self) -> str:
        """All its points in words: ``"layers 0–29: q_rope, k_rope"``."""
        at = [name.rpartition(".") for name in self.points or (self.point or "",)]
        layers = sorted({int(layer.split(".")[1]) for layer, _, _ in at if layer})
        names = ", ".join(dict.fromkeys(point for _, _, point in at))
        words = f"layer{'s' * (len(layers) > 1)} {', '.join(spans(layers))}: {names}" if layers else names
        return f"{words} {on_ranks(self.ranks)}".rstrip()

    def __str__(self) -> str:
        return self.sentence


def on_ranks(ranks: tuple[int, ...]) -> str:
    """``"on ranks 0, 2"``; empty for no ranks."""
    return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""


def one_digit(number: float) -> str:
    """Rounded: ``"0.8"``, ``"20"``, ``"3e-06"``."""
    return f"{float(f'{number:.1g}'):g}"


def sentence_of(title: str, evidence: str, point: str, scope: str = "", ranks: tuple[int, ...] = ()) -> str:
    """The one pattern of all sentences: a bug's title, its scope, the point, a line of numbers."""
    where = ", ".join(filter(None, (title, scope, on_ranks(ranks))))
    return f"{where[:1].upper()}{where[1:]}. At {point}, {evidence}."
