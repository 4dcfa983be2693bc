"""What can go wrong between a request and its text."""

from tplab.errors import TplabError


class EngineError(TplabError):
    """The engine was asked for something it cannot do; the message says what would work."""


class RequestError(EngineError):
    """One request cannot be carried out; others are not touched by it."""


class StrictError(EngineError):
    """``strict=True`` found ranks that disagree, or a cache in a state that it must never be in.

    Attributes:
        drawn: per rank ``{sequence: token}``, if that is what they disagree about.
    """

    def __init__(self, message: str, drawn=()):
        super().__init__(message)
        self.drawn = list(drawn)


class StandstillError(EngineError):
    """Sequences are unfinished, and none of them can go on.

    Attributes:
        used: how many blocks were in use.
        held: how many blocks belonged to a sequence.
        waiting: ``(request_id, tokens, tokens already computed)`` of every sequence that waited.
    """

    def __init__(self, message: str, used: int, held: int, waiting: list[tuple[int, int, int]]):
        super().__init__(message)
        self.used, self.held, self.waiting = used, held, waiting


class GenerationError(EngineError):
    """Ranks failed in the middle of a generation. Nothing that was generated is lost.

    Attributes:
        outputs: what every request had got so far, as ``generate`` would have returned it.
    """

    def __init__(self, message: str, outputs=()):
        super().__init__(message)
        self.outputs = list(outputs)
