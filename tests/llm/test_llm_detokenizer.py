"""Tokens to text, one by one, for tokenizers that cut characters, hide spaces or mark beginnings."""

import random

import pytest
from helpers.scripted import SMILE, byte_level, llama_like, metaspace, symbols, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tplab.llm.detokenizer import Detokenizer

BYTES = byte_level(b"b" + SMILE[:1], b"bc", b" cat")
TOKENIZERS = {"byte level": BYTES, "Llama": llama_like(), "Metaspace": metaspace()}
FAST = {name: PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>",
                                      clean_up_tokenization_spaces=True) for name, tokenizer in TOKENIZERS.items()}
HALF = BYTES.token_to_id(symbols(b"b" + SMILE[:1]))  # a letter and the first quarter of an emoji


def numbers(name, tokens):
    return [TOKENIZERS[name].token_to_id(token) for token in tokens]


def fed(name, ids, stop=(), prompt=()):
    """As the engine feeds it: the text, its pieces after every token, and where which stop text was met."""
    detokenizer, pieces = Detokenizer(FAST[name], list(prompt), tuple(stop)), []
    for i, token in enumerate(ids):
        met = detokenizer.add(token)
        last = i == len(ids) - 1
        if met is None and last:
            met = detokenizer.finish()
        pieces.append(detokenizer.take_certain(last or met is not None))
        if met is not None:
            return detokenizer.text, pieces, (i, met)
    return detokenizer.text, pieces, None


@pytest.mark.parametrize("name", ["Llama", "Metaspace"])
@pytest.mark.parametrize("prompt, text", [
    (["▁a"], " cats a"), (["<bos>", "▁a"], " cats a"), (["▁a", "<eos>"], " cats a"), (["▁cat", "s"] * 9, " cats a"),
    ([], "cats a"), (["<bos>"] * 3, "cats a")], ids=str)
def test_the_space_before_the_first_new_word(name, prompt, text):
    """A decoder takes the space from the beginning of a text. What the prompt ends with says whether this is one."""
    assert fed(name, numbers(name, ["▁cat", "s", "▁a"]), prompt=numbers(name, prompt))[0] == text


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(data=st.data())
def test_any_tokens_after_any_prompt(name, data):
    """Piece by piece it is what decoding all at once gives behind the prompt's own text."""
    tokenizer = TOKENIZERS[name]
    some = st.integers(0, tokenizer.get_vocab_size() - 1)
    if name == "byte level":
        some = st.sampled_from([*token_ids(BYTES, b"ab. "), *range(256, tokenizer.get_vocab_size())]) | some
    elif name == "Llama":  # whole characters only: next to bytes that are none, its decoder takes back those before
        some = st.integers(257, tokenizer.get_vocab_size() - 1)
    some = some.map(lambda token: [token]) | st.just(tokenizer.encode(SMILE.decode(), add_special_tokens=False).ids)
    words = tokenizer.encode("cat a cat", add_special_tokens=False).ids
    bos, eos = numbers(name, ["<bos>", "<eos>"])
    prompt = data.draw(st.sampled_from([[], words, [bos, *words], [*words, eos]]))
    new = sum(data.draw(st.lists(some, min_size=1, max_size=12)), [])
    text, pieces, _ = fed(name, new, prompt=prompt)
    assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *new]) and "".join(pieces) == text


def test_bytes_in_any_order_raise_nothing():
    """A model with a bug writes them; tokenizers refuses a text that changes what it has written before."""
    draw, count = random.Random(0), TOKENIZERS["Llama"].get_vocab_size()
    for _ in range(200):
        text, pieces, _ = fed("Llama", [draw.randrange(count) for _ in range(15)], prompt=[draw.randrange(count)])
        assert "".join(pieces) == text


@given(st.text(alphabet=st.sampled_from("ab é€😀\n한"), min_size=1, max_size=30),
       st.lists(st.text(alphabet="ab é€", min_size=1, max_size=4), max_size=3))
def test_a_stop_text_is_cut_off_and_never_shown(text, stop):
    """It stops at the character that first completes a stop text."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    written, pieces, met = fed("byte level", token_ids(BYTES, text.encode()), stop)
    assert "".join(pieces) == written and bool(met) == bool(ends)
    first = min(ends, default=(0, len(text)))[0]
    assert written == text[:min((begin for end, begin in ends if end == first), default=len(text))]


@pytest.mark.parametrize("ids, stop, text, pieces", [
    (token_ids(BYTES, "aé b😀c".encode()), [], "aé b😀c", ["a", "", "é", " ", "b", "", "", "", "😀", "c"]),
    # With a stop text, only what may still become one is held back, and no longer than it may.
    (token_ids(BYTES, b"xaab.aa"), ["aab!", "b.!"], "xaab.aa", ["x", "", "", "", "aa", "b.", "aa"]),
    # An unfinished last character is written; one that cannot be finished does not swallow what follows.
    (token_ids(BYTES, b"a" + SMILE[:3]), [], "a�", ["a", "", "", "�"]),
    (token_ids(BYTES, b"a" + SMILE[:2] + b"bcd"), [], "a�bcd", ["a", "", "", "�b", "c", "d"]),
    ([*token_ids(BYTES, b"a" + SMILE[:3]), BYTES.token_to_id("<eos>")], [], "a�", ["a", "", "", "", "�"]),
    ([BYTES.token_to_id(token) for token in ("a", "<eos>", "Ġ", "<bos>", ".")], [], "a .", ["a", "", " ", "", "."])])
def test_every_piece_comes_as_soon_as_it_is_certain(ids, stop, text, pieces):
    assert fed("byte level", ids, stop) == (text, pieces, None)


BC, CAT = (BYTES.token_to_id(symbols(piece)) for piece in (b"bc", b" cat"))
A, D, S = token_ids(BYTES, b"ads")
XAB = [*token_ids(BYTES, b"xa"), HALF]


@pytest.mark.parametrize("ids, stop, text, met", [
    ([A, BC, D], ["c", "b"], "a", (1, "b")), ([A, BC, D], ["d", "c"], "ab", (1, "c")),  # the first in the text
    ([A, BC, D], ["b", "bc"], "a", (1, "b")), ([A, BC, D], ["bc", "b"], "a", (1, "bc")),  # the one that is named first
    ([A, CAT, S], ["ts"], "a ca", (2, "ts")), ([A, CAT], ["a"], "", (0, "a")), ([CAT, CAT], [" ca"], "", (0, " ca")),
    (token_ids(BYTES, b"aaab"), ["aab"], "a", (3, "aab")), (token_ids(BYTES, b"bx"), ["ab"], "bx", None),
    # ``b`` comes with the first quarter of an emoji: it is found when the emoji is whole, or when nothing follows.
    ([*XAB, *token_ids(BYTES, SMILE[1:] + b"c")], ["ab"], "x", (5, "ab")), (XAB, ["b"], "xa", (2, "b"))])
def test_stop_texts(ids, stop, text, met):
    assert fed("byte level", ids, stop, prompt=token_ids(BYTES, b"a"))[::2] == (text, met)
