"""The one error of this room."""

from tplab.errors import TplabError


class CheckpointError(TplabError):
    """A checkpoint that cannot be found, is not supported, or contradicts itself.

    Raised before any rank computes anything. The message is one line: the folder or name, the file or
    tensor in question, and what would work.
    """


def one_line(error: BaseException) -> str:
    """The text of a library's exception on one line, for use inside a ``CheckpointError`` message."""
    return " ".join(str(error).split()) or type(error).__name__
