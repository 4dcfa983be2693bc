"""What can go wrong between a request and its text."""

from tplab.errors import TplabError


class EngineError(TplabError):
    """The engine was asked for something it cannot do; the message says what would work."""


class RequestError(EngineError):
    """One request cannot be carried out; others are not touched by it."""


class StrictError(EngineError):
    """``strict=True`` found ranks that disagree, or a cache in a state that it must never be in."""


class GenerationError(EngineError):
    """Ranks failed in the middle of a generation. Nothing that was generated is lost.

    Attributes:
        outputs: what every request had got so far, as ``generate`` would have returned it.
    """

    def __init__(self, message: str, outputs=()):
        super().__init__(message)
        self.outputs = list(outputs)
