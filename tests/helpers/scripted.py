"""Checkpoints that say what a test wants: every token has one successor, whatever stands before it."""

import json
from pathlib import Path

from helpers.checkpoints import make_checkpoint, save_tensors
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tplab.llm import SamplingParams

SMILE = "😀".encode()  # four tokens of one byte each
TEMPLATE = "<bos>{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"


# GPT-2's table: printable bytes stand for themselves, the others for the characters from 256 up, in order.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_SYMBOL = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}


def symbols(data: bytes) -> str:
    """Bytes as a byte-level vocabulary writes them."""
    return "".join(_SYMBOL[byte] for byte in data)


def byte_level(*pieces: bytes) -> Tokenizer:
    """Every byte is a token, and so is every one of ``pieces``; ``<bos>`` is put before a text, ``<eos>`` ends it."""
    vocab = {symbol: i for i, symbol in enumerate([*_SYMBOL.values(), *map(symbols, pieces)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_bos(tokenizer)


def llama_like() -> Tokenizer:
    """As Llama 2 and Mistral: a space is ``▁``, which a text's beginning loses; what is in no piece is bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcst.", "▁a", "▁cat", "cat", "at"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    return _with_bos(tokenizer)


def metaspace() -> Tokenizer:
    """As XLNet and T5: the same spaces, put there and taken away by Metaspace."""
    pieces = ["<unk>", *"▁abcst.", "▁a", "▁cat", "cat", "at"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_bos(tokenizer)


def _with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<bos>", "<eos>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))])
    return tokenizer


def token_ids(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """One id per byte of a byte-level tokenizer."""
    return [tokenizer.token_to_id(symbols(bytes([byte]))) for byte in text]


def scripted_checkpoint(folder: Path, tokenizer: Tokenizer | None, chains: list[list[int]], vocab: int = 0,
                        settings: dict | None = None) -> Path:
    """Write a checkpoint after whose token ``chain[i]`` comes ``chain[i + 1]``, for each of ``chains``.

    One layer, of which nothing reaches the output; the embedding is the identity, the head the table of successors.
    """
    vocab = vocab or tokenizer.get_vocab_size()
    hidden = 4 * -(-vocab // 4)
    eos = tokenizer.token_to_id("<eos>") if tokenizer else vocab - 1
    make_checkpoint(folder, layers=1, heads=4, kv_heads=2, head_dim=4, hidden=hidden, inter=4, vocab=vocab,
                    max_positions=64, eos_token_id=eos)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) or "lm_head" in name or "embed" in name:
            tensor.zero_()
        if name.endswith("norm.weight"):
            tensor.fill_(1)
    tensors["model.embed_tokens.weight"][range(vocab), range(vocab)] = 1
    for chain in chains:
        for token, successor in zip(chain, chain[1:]):
            tensors["lm_head.weight"][successor, token] = 20  # nothing else is drawn at temperature 1
    save_tensors(folder, tensors)
    if tokenizer:
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE} | (settings or {})
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


# A model of letters: after A come x, y, z and the end of text; after B p, q, an emoji, r, s, t; after C m, n and HALF.

LETTERS = byte_level(b"b" + SMILE[:1])
HALF = LETTERS.token_to_id(symbols(b"b" + SMILE[:1]))  # a letter and the first quarter of an emoji
BOS, EOS = map(LETTERS.token_to_id, ("<bos>", "<eos>"))


def ids(data: bytes) -> list[int]:
    """One id per byte."""
    return token_ids(LETTERS, data)


CHAINS = [[*ids(b"Axyz"), EOS, *ids(b"k")], ids(b"Bpq" + SMILE + b"rst"), [*ids(b"Cmn"), HALF, ids(SMILE)[1]]]


def letters(folder: Path) -> Path:
    """Write the model of letters."""
    return scripted_checkpoint(folder, LETTERS, CHAINS)


def greedy(max_tokens: int = 9, **more) -> SamplingParams:
    """At most nine tokens, the most probable ones."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def ended(output) -> tuple:
    """Text, why it ended, what ended it, and after how many tokens."""
    out = output.outputs[0]
    return out.text, out.finish_reason, out.stop_reason, len(out.token_ids)
