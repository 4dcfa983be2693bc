"""The fables: the grammar, the measure of recall, and the committed checkpoint."""

import hashlib
import json
import re
from collections import Counter

import pytest
from tokenizers import Tokenizer

from course.fable import CHECKPOINT, plots, stories, words
from course.fable.recall import recall, right_references
from tplab.checkpoint.prompts import default_prompt
from tplab.errors import TplabError


@pytest.fixture(scope="module")
def many():
    return stories("train", 600) + stories("held-out", 300)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


# The grammar


def test_stories_are_deterministic(many):
    first = stories("train", 3)
    assert first == stories("train", 5)[:3]
    assert first != stories("train", 3, seed=1)
    # The committed checkpoint was trained on exactly these texts.
    digest = hashlib.sha256("\n".join(s.text for s in stories("train", 100)).encode()).hexdigest()
    assert digest[:16] == "7081e72cc36b55b5"
    more = hashlib.sha256("\n".join(f"{s.text}{list(s.references)}" for s in many).encode()).hexdigest()
    assert more[:16] == "9649cf726c67e933", "recall was measured on these"
    told = Counter(word for s in many for word in s.facts.values())
    assert len(told) == len(words.GIRLS + words.BOYS + words.COLOURS) + 3 * 16, "all words are met"
    assert {s.plot for s in many} == set(plots.PLOTS)


def test_references_are_words_of_the_body_that_the_opening_has_introduced(many):
    for story in many:
        assert story.text.startswith(story.opening)
        assert {kind for kind, _ in story.references} == {"name", "animal", "colour", "place", "thing"}
        kinds = {word: kind for kind, word in story.references}
        assert [(kinds[word], word) for word in re.findall(r"\w+", story.body) if word in kinds] == [*story.references]
        assert {word for _, word in story.references} <= set(re.findall(r"\w+", story.opening))


def test_splits_share_no_pair_of_names(many):
    pairs = {s: {(x.facts["hero"], x.facts["friend"]) for x in stories(s, 3000)} for s in ("train", "held-out")}
    assert not pairs["train"] & pairs["held-out"]
    # Every single word of the held-out stories is known from training, only never in this company.
    names = {s: {name for pair in pairs[s] for name in pair} for s in pairs}
    assert names["held-out"] <= names["train"]


@pytest.mark.parametrize("split, n", [("test", 1), ("", 1), ("train", -1)])
def test_bad_requests_are_refused(split, n):
    assert stories("train", 0) == []
    with pytest.raises(TplabError):
        stories(split, n)


def lost_story():
    return next(story for story in stories("held-out", 64) if story.plot == "lost")


def test_default_prompt_opens_a_held_out_story():
    assert default_prompt("fable") == lost_story().opening


# The measure


def test_every_story_has_its_own_references_right_and_a_wrong_word_costs_one(many):
    assert all(all(right_references(story, story.body)) for story in many)
    story = lost_story()
    at = next(i for i, (kind, _) in enumerate(story.references) if kind == "colour")
    wrong = "pink" if story.references[at][1] != "pink" else "blue"
    right = right_references(story, story.body.replace(story.references[at][1], wrong, 1))
    assert [i for i, made in enumerate(right) if not made] == [at]
    hero, friend = story.facts["hero"], story.facts["friend"]
    swapped = story.body.replace(hero, "?").replace(friend, hero).replace("?", friend)
    assert not all(right_references(story, swapped)), "the right word in another's place"
    sentence = story.body.index(".") + 1
    assert right_references(story, story.body[sentence:])[-8:] == [True] * 8, "a missing sentence costs only its own"
    assert not right_references(story, story.body[sentence:])[0]


@pytest.mark.parametrize("text", ["", " the the the the", "\ufffd\ufffd", " Once there was a boy named"])
def test_gibberish_scores_nothing(text):
    assert not any(right_references(lost_story(), text))


def test_recall_scores_an_oracle_full_and_a_repeater_empty(tokenizer):
    held_out = stories("held-out", 12)
    bodies = [tokenizer.encode(s.body + "<|endoftext|>" + s.body).ids for s in held_out]
    full = recall(lambda prompts, n: bodies, held_out)
    assert list(full) == ["animal", "colour", "name", "place", "thing", "overall"]
    assert full["overall"] == (sum(len(s.references) for s in held_out),) * 2
    assert all(right == of > 0 for right, of in full.values())
    empty = recall(lambda prompts, n: [[p[-1]] * n for p in prompts], held_out)
    assert {kind: (0, of) for kind, (_, of) in full.items()} == empty
    first = recall(lambda prompts, n: [bodies[0], *([] for _ in bodies[1:])], held_out)
    assert first["overall"][0] == len(held_out[0].references)


def test_recall_refuses_what_it_cannot_measure():
    with pytest.raises(TplabError, match="at least one story"):
        recall(lambda prompts, n: [], [])
    with pytest.raises(TplabError, match="1 outputs for 2 prompts"):
        recall(lambda prompts, n: [[]], stories("held-out", 2))


# The committed checkpoint


def test_sums_and_size():
    lines = [line.split("  ") for line in (CHECKPOINT / "SHA256SUMS").read_text().splitlines()]
    names = sorted(p.name for p in CHECKPOINT.iterdir())
    assert [name for _, name in lines] == [name for name in names if name != "SHA256SUMS"]
    for digest, name in lines:
        assert hashlib.sha256((CHECKPOINT / name).read_bytes()).hexdigest() == digest
    assert sum(p.stat().st_size for p in CHECKPOINT.iterdir()) < 8e6


def test_config_and_weights():
    from safetensors import safe_open

    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["model_type"] == "qwen2" and config["num_hidden_layers"] >= 6
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 2)
    assert config["rope_parameters"]["rope_theta"] != 10000, "a code's default theta must be wrong for this model"
    index = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) >= 2
    assert config["tie_word_embeddings"] and "lm_head.weight" not in index
    parameters = 0
    for file in set(index.values()):
        with safe_open(CHECKPOINT / file, "pt") as f:
            assert set(f.keys()) == {name for name, where in index.items() if where == file}
            for name in f.keys():
                tensor = f.get_tensor(name)
                parameters += tensor.numel()
                assert tensor.isfinite().all() and str(tensor.dtype) == "torch.float32"
                if name.endswith("_proj.bias"):
                    assert tensor.abs().mean() > 0.02, f"{name} is too small to reveal a bug"
                if name.endswith("norm.weight"):
                    assert tensor.std() > 0.01, f"{name} is too even to reveal a bug"
    assert 1e6 <= parameters <= 2e6


def test_every_tokenizer_gives_the_same_ids(tokenizer):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    auto, fast = (cls.from_pretrained(CHECKPOINT) for cls in (AutoTokenizer, PreTrainedTokenizerFast))
    assert len(auto) == len(fast) == tokenizer.get_vocab_size() == 768
    texts = [s.text for s in stories("held-out", 50)]
    for text in [*texts, "naïve café 😀 \n\n  two  spaces 123", "don't ,  .", "a<|endoftext|>b<|pad|>"]:
        ids = tokenizer.encode(text).ids
        assert auto(text).input_ids == fast(text).input_ids == ids
        assert auto.decode(ids) == fast.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False) == text
