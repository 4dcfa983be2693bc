"""The one error of this room."""

from tplab.errors import TplabError


class CheckpointError(TplabError):
    """A checkpoint that cannot be found, is not supported, or contradicts itself.

    Raised before any rank computes anything. The message names the folder, the file or tensor, and what would work.
    It is always one line.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def words_of(error: BaseException) -> str:
    """What a library's exception says, for a ``CheckpointError`` message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path, which the message names already
    # str(KeyError("factor")) is only "'factor'", and some exceptions say nothing at all.
    return f"{type(error).__name__} {error}" if isinstance(error, LookupError) or not str(error) else str(error)
