"""The one error of this room."""

from tplab.errors import TplabError

_LONGEST = 800
_TAIL = 200


class CheckpointError(TplabError):
    """A checkpoint that cannot be found, is not supported, or contradicts itself.

    Raised before any rank computes anything. The message is always one line of bounded length, whatever a
    damaged file made it quote: the folder or name, the file or tensor in question, and what would work.
    """

    def __init__(self, message: str):
        line = " ".join(message.split())
        super().__init__(line if len(line) <= _LONGEST else f"{line[: _LONGEST - _TAIL]}…{line[-_TAIL:]}")


def words_of(error: BaseException) -> str:
    """A library's exception in words, for use inside a ``CheckpointError`` message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path, which the message names already
    # str(KeyError("factor")) is only "'factor'", and some exceptions say nothing at all.
    return f"{type(error).__name__} {error}" if isinstance(error, LookupError) or not str(error) else str(error)
