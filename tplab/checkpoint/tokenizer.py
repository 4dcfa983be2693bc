"""The folder's own tokenizer."""

from pathlib import Path
from typing import TYPE_CHECKING

from .config import ModelConfig
from .errors import CheckpointError, words_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILE = "tokenizer.json"


def load_tokenizer(folder: Path, config: ModelConfig) -> "PreTrainedTokenizerFast":
    """A transformers tokenizer with exactly the ids of the folder's ``tokenizer.json``, chat template included.

    Not through ``AutoTokenizer``: for some model types (Qwen2 among them) it puts a class of its own, with its
    own normaliser and pre-tokenizer, in place of the folder's, and the ids come out wrong with no error.
    Raises ``CheckpointError`` if there is no such file, or if it has ids beyond the embedding's rows.
    """
    from transformers import PreTrainedTokenizerFast

    if not (folder / FILE).exists():
        raise CheckpointError(f"{folder}: there is no {FILE}, so text cannot be turned into token ids; give ids "
                              "instead")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # any of its JSON files may be malformed, in any way
        raise CheckpointError(f"{folder}: the tokenizer ({FILE}) cannot be loaded: {words_of(error)}") from error
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if largest >= config.vocab_size:
        raise CheckpointError(f"{folder}: {FILE} is of another model: it has id {largest} ({token!r}), but the "
                              f"embedding has {config.vocab_size} rows")
    return tokenizer
