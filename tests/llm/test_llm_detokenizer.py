"""Tokens to text, one by one, for tokenizers that cut characters, hide spaces or mark beginnings."""

import pytest
from helpers.scripted import SMILE, byte_level, llama_like, metaspace, symbols, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tplab.llm.detokenizer import Detokenizer


def fast(tokenizer, **settings):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", **settings)


BYTES = byte_level(b"b" + SMILE[:1], b"bc", b" cat")
TOKENIZERS = {"byte level": BYTES, "Llama": llama_like(), "Metaspace": metaspace()}
FAST = {name: fast(tokenizer) for name, tokenizer in TOKENIZERS.items()}
HALF = BYTES.token_to_id(symbols(b"b" + SMILE[:1]))  # a letter and the first quarter of an emoji


def numbers(name, tokens):
    return [TOKENIZERS[name].token_to_id(token) for token in tokens]


def fed(tokenizer, ids, stop=(), prompt=()):
    """As the engine feeds it: the text, its pieces after every token, and where which stop text was met."""
    detokenizer, pieces = Detokenizer(tokenizer, list(prompt), tuple(stop)), []
    for i, token in enumerate(ids):
        found = detokenizer.add(token)
        last = i == len(ids) - 1
        if found is None and last:
            found = detokenizer.finish()
        pieces.append(detokenizer.take_certain(last or found is not None))
        if found is not None:
            return detokenizer.text, pieces, (i, found)
    return detokenizer.text, pieces, None


@pytest.mark.parametrize("name", ["Llama", "Metaspace"])
@pytest.mark.parametrize("prompt", [["▁a"], ["<bos>", "▁a"], ["▁a", "<eos>"], ["▁cat", "s"] * 9,
                                    ["<bos>"] * 9 + ["▁a"]])
def test_the_space_before_the_first_new_word(name, prompt):
    """A decoder takes the space from the beginning of a text. What the prompt ends with says that this is none."""
    text, pieces, _ = fed(FAST[name], numbers(name, ["▁cat", "s", "▁a"]), prompt=numbers(name, prompt))
    assert text == " cats a" and pieces == [" cat", "s", " a"]


@pytest.mark.parametrize("name", ["Llama", "Metaspace"])
@pytest.mark.parametrize("prompt", [[], ["<bos>"], ["<bos>"] * 3])
def test_a_text_that_begins_has_no_space(name, prompt):
    assert fed(FAST[name], numbers(name, ["▁cat", "▁a"]), prompt=numbers(name, prompt))[0] == "cat a"


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(data=st.data())
def test_any_tokens_after_any_prompt(name, data):
    """Piece by piece it is what decoding all at once gives behind the prompt's own text."""
    tokenizer = FAST[name]
    some = st.integers(0, len(tokenizer) - 1)
    if name == "byte level":
        some = st.sampled_from([*token_ids(BYTES, b"ab. "), *range(256, len(tokenizer))]) | some
    elif name == "Llama":  # whole characters only: next to bytes that are none, its decoder takes back those before
        some = st.integers(257, len(tokenizer) - 1)
    some = some.map(lambda token: [token]) | st.just(tokenizer(SMILE.decode(), add_special_tokens=False).input_ids)
    words = tokenizer("cat a cat", add_special_tokens=False).input_ids
    prompt = data.draw(st.sampled_from([[], words, [tokenizer.bos_token_id, *words], [*words, tokenizer.eos_token_id]]))
    new = sum(data.draw(st.lists(some, min_size=1, max_size=12)), [])
    text, pieces, _ = fed(tokenizer, new, prompt=prompt)
    behind = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt, *new], skip_special_tokens=True)
    assert behind + text == whole and "".join(pieces) == text


def test_every_piece_comes_as_soon_as_it_is_certain():
    text, pieces, _ = fed(FAST["byte level"], token_ids(BYTES, "aé b😀c".encode()))
    assert pieces == ["a", "", "é", " ", "b", "", "", "", "😀", "c"] and text == "aé b😀c"
    # With a stop text, only what may still become one is held back, and no longer than it may.
    _, pieces, _ = fed(FAST["byte level"], token_ids(BYTES, b"xaab.aa"), ["aab!", "b.!"])
    assert pieces == ["x", "", "", "", "aa", "b.", "aa"]


def test_an_unfinished_last_character_is_written():
    ids = token_ids(BYTES, b"a" + SMILE[:3])
    assert fed(FAST["byte level"], ids) == ("a�", ["a", "", "", "�"], None)
    assert fed(FAST["byte level"], [*ids, BYTES.token_to_id("<eos>")])[:2] == ("a�", ["a", "", "", "", "�"])
    llama = [TOKENIZERS["Llama"].token_to_id(token) for token in ("a", "<0xF0>", "<0x9F>")]
    assert fed(FAST["Llama"], llama)[0] == "a��"


def test_bytes_after_an_unfinished_character():
    """What cannot be finished any more does not swallow what follows."""
    text, pieces, _ = fed(FAST["byte level"], token_ids(BYTES, b"a" + SMILE[:2] + b"bcd"))
    assert (text, pieces) == ("a�bcd", ["a", "", "", "�b", "c", "d"])


@pytest.mark.parametrize("stop", ["b", "ab"])
def test_a_stop_text_inside_a_half_finished_token(stop):
    """The token that ends the stop text begins a character: it is seen when that is finished, or nothing follows."""
    ids = [*token_ids(BYTES, b"xa"), HALF, *token_ids(BYTES, SMILE[1:] + b"c")]
    cut = "xab"[:-len(stop)]
    text, pieces, met = fed(FAST["byte level"], ids, [stop])
    assert (text, "".join(pieces), met) == (cut, cut, (5, stop))
    text, pieces, met = fed(FAST["byte level"], ids[:3], [stop])
    assert (text, "".join(pieces), met) == (cut, cut, (2, stop))


def test_of_several_stop_texts_the_first_in_the_text_counts():
    bc = BYTES.token_to_id(symbols(b"bc"))
    ids = [*token_ids(BYTES, b"a"), bc, *token_ids(BYTES, b"d")]
    for stops in (["c", "b"], ["b", "c"]):
        assert fed(FAST["byte level"], ids, stops)[::2] == ("a", (1, "b"))
    assert fed(FAST["byte level"], ids, ["d", "c"])[::2] == ("ab", (1, "c"))
    for stops in (["b", "bc"], ["bc", "b"]):  # where two begin at the same place, the one that was named first
        assert fed(FAST["byte level"], ids, stops)[::2] == ("a", (1, stops[0]))


def test_a_stop_text_over_several_tokens_and_at_once():
    cat = BYTES.token_to_id(symbols(b" cat"))
    a, s = token_ids(BYTES, b"as")
    assert fed(FAST["byte level"], [a, cat, s], ["ts"])[::2] == ("a ca", (2, "ts"))
    assert fed(FAST["byte level"], [a, cat], ["a"])[::2] == ("", (0, "a"))
    assert fed(FAST["byte level"], [cat, cat], [" ca"])[::2] == ("", (0, " ca"))
    # Parts of it that were there before count, but not twice.
    assert fed(FAST["byte level"], token_ids(BYTES, b"aaab"), ["aab"])[::2] == ("a", (3, "aab"))


def test_stop_texts_are_not_looked_for_in_the_prompt():
    assert fed(FAST["byte level"], token_ids(BYTES, b"bx"), ["ab"], prompt=token_ids(BYTES, b"a"))[::2] == ("bx", None)


def test_special_tokens_are_no_text_and_spaces_stay():
    for name in TOKENIZERS:
        a, space, dot = token_ids(BYTES, b"a .") if name == "byte level" else numbers(name, ["a", "▁", "."])
        eos, bos = numbers(name, ["<eos>", "<bos>"])
        tidy = fast(TOKENIZERS[name], clean_up_tokenization_spaces=True)  # as a tokenizer_config.json may ask for
        assert fed(tidy, [a, eos, space, bos, dot])[:2] == ("a .", ["a", "", " ", "", "."]), name
