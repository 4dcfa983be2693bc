"""The folder's own tokenizer, and proof that it is the folder's own."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from tplab.checks import number

from .config import ModelConfig
from .errors import CheckpointError, words_of
from .headers import read_json, refuse_unordinary

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

FILE = "tokenizer.json"
# Digits, contractions, runs of spaces, newlines, composed and decomposed accents, scripts, emoji: the places
# where two byte-level tokenizers with the same vocabulary cut differently.
_PROBES = ("Once upon a time, in 1984, there were 3 foxes.", "It's   they'LL  we've\n\n\tindent\r\n 12345678",
           "naïve cafe\u0301 Ångström ﬁ №½", "東京タワー Привет мир नमस्ते 🦊🦊", "def f(x):\n    return x**2  # x²")


def load_tokenizer(folder: Path, config: ModelConfig) -> "PreTrainedTokenizerFast":
    """A transformers tokenizer with exactly the ids of the folder's ``tokenizer.json``, chat template included.

    Not through ``AutoTokenizer``: for some model types (Qwen2 among them) it puts a class of its own, with its
    own normaliser and pre-tokenizer, in place of the folder's, and the ids come out wrong with no error.
    Raises ``CheckpointError`` if there is no such file, if it cannot be the tokenizer of this ``config``, or if
    transformers still disagrees with it about any id.
    """
    from transformers import PreTrainedTokenizerFast

    own = read_own_tokenizer(folder)
    check_tokenizer(folder, config, own)
    for path in (*folder.glob("*.json"), *folder.glob("*.jinja"), *folder.glob("additional_chat_templates/*")):
        refuse_unordinary(path)
    settings = folder / "tokenizer_config.json"
    longest = read_json(settings).get("model_max_length") if settings.exists() else None
    if longest is not None and number(longest, 1, math.inf) is None:
        raise CheckpointError(f"{folder}: {settings.name}: model_max_length is {longest!r}, not a number of tokens")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        tokenizer(_PROBES[0])
    except Exception as error:  # any of its JSON files may be malformed, in any way
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {words_of(error)}") from error
    loaded, stated = tokenizer.get_vocab().keys(), own.get_vocab().keys()
    if invented := sorted(loaded - stated):
        raise CheckpointError(f"{folder}: {invented[0]!r} is a token in tokenizer_config.json, but not in {FILE}")
    if lost := sorted(stated - loaded):
        raise CheckpointError(f"{folder}: {lost[0]!r} is a token in {FILE}, but transformers does not load it; "
                              "tokenizer_config.json does not fit it")
    added = [token.content for token in own.get_added_tokens_decoder().values()]
    for text in (*_PROBES, *added, " a ".join(added[:50])):
        want = own.encode(text, add_special_tokens=False).ids
        got = tokenizer.encode(text, add_special_tokens=False)
        if got != want:
            raise CheckpointError(f"{folder}: transformers reads {text!r} as {got[:8]}…, but {FILE} says {want[:8]}…; "
                                  "tokenizer_config.json does not fit it")
    return tokenizer


def read_own_tokenizer(folder: Path) -> "Tokenizer":
    """``tokenizer.json`` as the ``tokenizers`` library reads it, nothing added."""
    from tokenizers import Tokenizer

    if not (folder / FILE).exists():
        raise CheckpointError(f"{folder}: there is no {FILE}, so text cannot be turned into token ids; give ids "
                              "instead")
    read_json(folder / FILE)
    try:
        return Tokenizer.from_file(str(folder / FILE))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{folder}: {FILE} is damaged: {words_of(error)}") from error


def check_tokenizer(folder: Path, config: ModelConfig, own: "Tokenizer") -> None:
    """Refuse a tokenizer that cannot belong to ``config``.

    Two things can tell: an id beyond the embedding's rows, and an end-of-text id of the model that means
    ordinary text (or nothing) to the tokenizer. Another tokenizer with the same ids in both places passes, unless
    the folder carries ``SHA256SUMS``.
    """
    token, largest = max(own.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1], default=("", -1))
    if largest >= config.vocab_size:
        raise CheckpointError(f"{folder}: {FILE} is of another model: it has id {largest} ({token!r}), but the "
                              f"embedding has {config.vocab_size} rows")
    special = own.get_added_tokens_decoder()
    for eos in _stated_eos(folder, config):
        if eos not in special:
            raise CheckpointError(f"{folder}: {FILE} is of another model: the config ends a text with id {eos}, which "
                                  f"is {own.id_to_token(eos)!r} there")


def _stated_eos(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    # A Llama config that says nothing about eos gets 2 from Hugging Face; such a default proves nothing.
    stated = [read_json(folder / file).get("eos_token_id") for file in ("config.json", "generation_config.json")
              if (folder / file).exists()]
    return config.eos_token_ids if any(value is not None for value in stated) else ()
