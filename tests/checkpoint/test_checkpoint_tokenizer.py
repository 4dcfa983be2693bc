"""The ids are those of the folder's own tokenizer.json, whatever transformers thinks of the model type."""

import json

import pytest
from helpers.checkpoints import make_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from tplab.checkpoint import CheckpointError, open_checkpoint

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
TEXT = "Cafe\u0301 1984\n it's   <|im_start|>HERE<|im_end|>"


def byte_tokenizer(extra=("<|im_start|>", "<|im_end|>")):
    """All bytes, two merges, digits in groups, lower case: nothing that Qwen2's own tokenizer class would do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate([*alphabet, "he", "19"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("1", "9")]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in extra])
    return tokenizer


def with_tokenizer(folder, tokenizer, model_type="qwen2", vocab=300, **config):
    make_checkpoint(folder, model_type, vocab=vocab, **{"eos_token_id": 259 if vocab > 259 else 3} | config)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_ids_are_the_folders_own(tmp_path, model_type):
    stored = byte_tokenizer()
    tokenizer = open_checkpoint(with_tokenizer(tmp_path / "m", stored, model_type)).tokenizer()
    assert tokenizer.encode(TEXT, add_special_tokens=False) == stored.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 259 == tokenizer.eos_token_id


def test_the_trap_is_real(tmp_path):
    """AutoTokenizer reads the same folder with a class of its own, and says nothing."""
    stored = byte_tokenizer()
    auto = AutoTokenizer.from_pretrained(with_tokenizer(tmp_path / "m", stored))
    assert auto.encode(TEXT, add_special_tokens=False) != stored.encode(TEXT, add_special_tokens=False).ids


def test_the_chat_template_is_kept_and_the_tokenizer_is_loaded_once(tmp_path):
    ckpt = open_checkpoint(with_tokenizer(tmp_path / "m", byte_tokenizer()))
    text = ckpt.tokenizer().apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>hi<|im_end|>"
    assert ckpt.tokenizer() is ckpt.tokenizer()


def test_a_folder_without_a_tokenizer_opens_and_says_so_when_asked(tmp_path):
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m"))
    with pytest.raises(CheckpointError, match="there is no tokenizer.json, so text cannot be turned into token ids"):
        ckpt.tokenizer()


@pytest.mark.parametrize(("file", "content", "words"), [
    ("tokenizer.json", "{}", r"the tokenizer \(tokenizer.json\) cannot be loaded"),
    ("tokenizer.json", "[" * 9, r"the tokenizer \(tokenizer.json\) cannot be loaded"),
    ("tokenizer_config.json", "{", "cannot be loaded: Expecting property name"),
], ids=str)
def test_a_tokenizer_that_is_damaged(tmp_path, file, content, words):
    folder = with_tokenizer(tmp_path / "m", byte_tokenizer())
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(folder).tokenizer()


def test_a_vocabulary_larger_than_the_embedding(tmp_path):
    ckpt = open_checkpoint(with_tokenizer(tmp_path / "m", byte_tokenizer(), vocab=259))
    with pytest.raises(CheckpointError,
                       match=r"of another model: it has id 259 \('<\|im_end\|>'\), but the embedding has 259 rows"):
        ckpt.tokenizer()
