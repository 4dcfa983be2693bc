"""The ids are those of the folder's own tokenizer.json, whatever transformers thinks of the model type."""

import json
import os

import pytest
from helpers.checkpoints import make_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from tplab.checkpoint import CheckpointError, open_checkpoint, write_sums
from tplab.checkpoint import tokenizer as tokenizer_module

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
TEXT = "Cafe\u0301 1984\n it's   <|im_start|>HERE<|im_end|>"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPLAB_CACHE", str(tmp_path / "cache"))


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


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral"])
def test_ids_are_the_folders_own(tmp_path, model_type):
    own = byte_tokenizer()
    tokenizer = open_checkpoint(with_tokenizer(tmp_path / "m", own, model_type)).tokenizer()
    assert tokenizer.encode(TEXT, add_special_tokens=False) == own.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 259 == tokenizer.eos_token_id


def test_the_trap_is_real(tmp_path):
    """AutoTokenizer reads the same folder with a class of its own, and says nothing."""
    own = byte_tokenizer()
    auto = AutoTokenizer.from_pretrained(with_tokenizer(tmp_path / "m", own))
    assert auto.encode(TEXT, add_special_tokens=False) != own.encode(TEXT, add_special_tokens=False).ids


def test_the_chat_template_is_kept_and_the_tokenizer_is_loaded_once(tmp_path):
    ckpt = open_checkpoint(with_tokenizer(tmp_path / "m", byte_tokenizer()))
    text = ckpt.tokenizer().apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>hi<|im_end|>"
    assert ckpt.tokenizer() is ckpt.tokenizer()


def test_a_folder_without_a_tokenizer_opens_and_says_so_when_asked(tmp_path):
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m"))
    with pytest.raises(CheckpointError, match="there is no tokenizer.json, so text cannot be turned into token ids"):
        ckpt.tokenizer()


def test_a_vocabulary_larger_than_the_embedding(tmp_path):
    folder = with_tokenizer(tmp_path / "m", byte_tokenizer(), vocab=259)
    for _ in range(2):
        with pytest.raises(CheckpointError,
                           match=r"of another model: it has id 259 \('<\|im_end\|>'\), but the embedding has 259 rows"):
            open_checkpoint(folder)
        write_sums(folder)  # which fit, and say nothing about that


def test_a_tokenizer_whose_end_of_text_is_ordinary_text(tmp_path):
    """The fox ends every text of a model whose config says that 100 does."""
    folder = with_tokenizer(tmp_path / "m", byte_tokenizer(), eos_token_id=100)
    with pytest.raises(CheckpointError, match="of another model: the config ends a text with id 100, which is"):
        open_checkpoint(folder)


def test_a_default_end_of_text_proves_nothing(tmp_path):
    """A Llama config without eos_token_id gets 2 from Hugging Face's class."""
    folder = with_tokenizer(tmp_path / "m", byte_tokenizer(), "llama")
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"model": 5}',
             '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}']
)
def test_a_damaged_tokenizer(tmp_path, text):
    folder = with_tokenizer(tmp_path / "m", byte_tokenizer())
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("settings", ["{", "[]", '{"eos_token": 5}', '{"added_tokens_decoder": {"x": 1}}'])
def test_a_damaged_tokenizer_config(tmp_path, settings):
    folder = with_tokenizer(tmp_path / "m", byte_tokenizer())
    (folder / "tokenizer_config.json").write_text(settings)
    with pytest.raises(CheckpointError, match="token"):
        open_checkpoint(folder).tokenizer()


@pytest.mark.parametrize("settings", [{"extra_special_tokens": ["it's"]}, {"pad_token": "<pad>"}])
def test_a_tokenizer_config_that_invents_tokens_is_refused(tmp_path, settings):
    """Red when transformers may add tokens of its own, with ids that no row of the embedding has."""
    folder = with_tokenizer(tmp_path / "m", byte_tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"} | settings))
    with pytest.raises(CheckpointError, match="is a token in tokenizer_config.json, but not in tokenizer.json"):
        open_checkpoint(folder).tokenizer()


def test_a_tokenizer_that_transformers_reads_differently_is_refused(tmp_path, monkeypatch):
    """Red when the loaded tokenizer's ids are not compared with the folder's own."""
    folder = with_tokenizer(tmp_path / "m", byte_tokenizer())
    other = byte_tokenizer()
    other.normalizer = normalizers.NFC()
    ckpt = open_checkpoint(folder)
    monkeypatch.setattr(tokenizer_module, "read_own_tokenizer", lambda folder: other)
    with pytest.raises(CheckpointError, match="tokenizer_config.json does not fit it"):
        ckpt.tokenizer()


def test_tokenizer_json_alone_is_enough(tmp_path):
    own = byte_tokenizer()
    folder = with_tokenizer(tmp_path / "m", own)
    (folder / "eval.json").mkdir()  # a folder, which is not read
    (folder / "tokenizer_config.json").unlink()
    assert open_checkpoint(folder).tokenizer().encode(TEXT) == own.encode(TEXT).ids


def test_the_probes_cut_where_tokenizers_differ():
    """Each difference between two byte-level tokenizers must show in at least one probe."""
    base = byte_tokenizer()
    ids = [base.encode(text).ids for text in tokenizer_module._PROBES]
    for change in ("composed", "cased", "no prefix", "single digits"):
        other = byte_tokenizer()
        if change == "composed":
            other.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        elif change == "cased":
            other.normalizer = normalizers.NFD()
        elif change == "no prefix":
            other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        else:
            other.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                           base.pre_tokenizer])
        assert [other.encode(text).ids for text in tokenizer_module._PROBES] != ids, change


@pytest.mark.parametrize("longest", ["512", [512], True, 0, -1])
def test_a_length_that_is_no_number(tmp_path, longest):
    folder = with_tokenizer(tmp_path / "m", byte_tokenizer())
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": longest}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: model_max_length is .*, not a number of tokens"):
        open_checkpoint(folder).tokenizer()


@pytest.mark.parametrize("longest", [512, 1e30, 1000000000000000019884624838656, None])
def test_a_length_as_hugging_face_writes_it(tmp_path, longest):
    folder = with_tokenizer(tmp_path / "m", byte_tokenizer())
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": longest}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert open_checkpoint(folder).tokenizer()("hello").input_ids


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                                  "model.safetensors.index.json", "special_tokens_map.json", "added_tokens.json",
                                  "chat_template.jinja",
                                  "additional_chat_templates/tool.jinja"])
def test_a_named_pipe_in_the_place_of_a_file(tmp_path, file):
    """A process that opens one to read waits for ever for a writer."""
    folder = with_tokenizer(tmp_path / "m", byte_tokenizer())
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    with pytest.raises(CheckpointError, match=f"{os.path.basename(file)} is not an ordinary file"):
        open_checkpoint(folder).tokenizer()


def test_a_tokenizer_that_was_changed_after_the_checkpoint_was_opened(tmp_path):
    ckpt = open_checkpoint(with_tokenizer(tmp_path / "m", byte_tokenizer()))
    byte_tokenizer([f"<{i}>" for i in range(50)]).save(str(tmp_path / "m" / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="of another model: it has id 307"):
        ckpt.tokenizer()


MANY = [f"<{i}>" for i in range(60)]


NOT_FITTING = r"transformers reads .* as \[.*, but tokenizer.json says \[.*; tokenizer_config.json does not fit it"


@pytest.mark.parametrize("own,words", [
    ([*MANY[:58], MANY[59], MANY[58]], NOT_FITTING),
    ([*MANY, "<more>", "<yet>"], "'<more>' is a token in tokenizer.json, but transformers does not load it"),
    ([*MANY[:58]], "'<58>' is a token in tokenizer_config.json, but not in tokenizer.json"),
    ([AddedToken("<0>", special=True, normalized=False, lstrip=True), *MANY[1:]], NOT_FITTING),
], ids=["two ids changed places", "two are missing", "two too many", "one that takes the space before it"])  # fmt: skip
def test_added_tokens_that_transformers_reads_differently(tmp_path, monkeypatch, own, words):
    """Each of them is read by itself, and some of them within a text."""
    folder = with_tokenizer(tmp_path / "m", byte_tokenizer(["<|im_end|>", *MANY]), vocab=330, eos_token_id=258)
    ckpt = open_checkpoint(folder)
    monkeypatch.setattr(tokenizer_module, "read_own_tokenizer", lambda folder: with_added(["<|im_end|>", *own]))
    with pytest.raises(CheckpointError, match=words):
        ckpt.tokenizer()


def with_added(tokens):
    tokenizer = byte_tokenizer(())
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) if isinstance(token, str) else token
                                  for token in tokens])
    return tokenizer


@pytest.mark.parametrize("config,generation", [
    ([259, 100], None), (0, None), (100, {}), (259, {"eos_token_id": 100}), (None, {"eos_token_id": [259, 100]}),
], ids=str)
def test_every_end_of_text_that_either_file_states(tmp_path, config, generation):
    folder = with_tokenizer(tmp_path / "m", byte_tokenizer(), "llama")
    stated = json.loads((folder / "config.json").read_text()) | {"eos_token_id": config}
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in stated.items() if value is not None}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(CheckpointError, match="of another model: the config ends a text with id (100|0),"):
        open_checkpoint(folder)
