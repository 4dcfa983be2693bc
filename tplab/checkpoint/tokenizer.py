"""The folder's own tokenizer."""

from pathlib import Path
from typing import TYPE_CHECKING

from .config import ModelConfig
from .errors import CheckpointError, words_of
from .headers import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILE = "tokenizer.json"


def load_tokenizer(folder: Path, config: ModelConfig) -> "PreTrainedTokenizerFast":
    """A transformers tokenizer with exactly the ids of the folder's ``tokenizer.json``, chat template included.

    Not through ``AutoTokenizer``: for some model types (Qwen2 among them) it puts a class of its own, with its
    own normaliser and pre-tokenizer, in place of the folder's, and the ids come out wrong with no error.
    Raises ``CheckpointError`` if there is no such file, or if it cannot be the tokenizer of this ``config``.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if not (folder / FILE).exists():
        raise CheckpointError(f"{folder}: there is no {FILE}, so text cannot be turned into token ids; give ids "
                              "instead")
    try:
        stored = Tokenizer.from_file(str(folder / FILE))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # any of its JSON files may be malformed, in any way
        raise CheckpointError(f"{folder}: the tokenizer ({FILE}) cannot be loaded: {words_of(error)}") from error
    _check_vocabulary(folder, config, stored.get_vocab())
    if added := sorted(tokenizer.get_vocab().keys() - stored.get_vocab().keys()):
        raise CheckpointError(f"{folder}: {added[0]!r} is a token in tokenizer_config.json, but not in {FILE}")
    special = stored.get_added_tokens_decoder()
    for eos in _stated_eos(folder, config):
        if eos not in special:
            raise CheckpointError(f"{folder}: {FILE} is of another model: the config ends a text with id {eos}, which "
                                  f"is {stored.id_to_token(eos)!r} there")
    return tokenizer


def _check_vocabulary(folder: Path, config: ModelConfig, vocabulary: dict[str, int]) -> None:
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if largest >= config.vocab_size:
        raise CheckpointError(f"{folder}: {FILE} is of another model: it has id {largest} ({token!r}), but the "
                              f"embedding has {config.vocab_size} rows")


def _stated_eos(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    # A Llama config that says nothing about eos gets 2 from Hugging Face; such a default proves nothing.
    stated = [read_json(folder / file).get("eos_token_id") for file in ("config.json", "generation_config.json")
              if (folder / file).exists()]
    return config.eos_token_ids if any(value is not None for value in stated) else ()
