"""How fable was made: batches, weights, rates, and one step of a training that changes what it should."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from course.fable import CHECKPOINT, stories, train, train_moe, words
from tplab.checkpoint.names import EMBEDDED

MOE = EMBEDDED["fable-moe"]


@pytest.fixture(scope="module")
def tokenizer():
    return Qwen2Tokenizer.from_pretrained(CHECKPOINT)


def test_the_phases_are_those_that_the_weights_came_from():
    """Of the first one's schedule a part was carried out; the others end where their rate does."""
    assert [(phase.steps, phase.planned, round(phase.warmup * (phase.planned + 1), 6), phase.decay, phase.long_rows,
             dict(phase.spread), phase.emphasis) for phase in train.PHASES] == [
        (1600, 2500, 50.02, 0.4, 1.0, {}, 1.0), (400, 900, 30, 0.6, 1.0, {"place": 1.3, "colour": 1.3}, 3.0),
        (900, 900, 30, 0.45, 0.85, {"colour": 2.0}, 6.0), (450, 450, 30, 0.45, 1.0, {"colour": 2.0}, 6.0)]
    assert train.PHASES[0].rate(1600 / 2501) == pytest.approx((1 - 1600 / 2501) / 0.4) and train.THREADS == 2
    assert (train.SHORT, train.LONG, train.OPENING_WEIGHT, train.SEED) == ((224, 14), (512, 6), 0.1, 0)


def test_the_committed_configuration_and_tokenizer_are_what_the_recipe_makes(tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr(train, "stories", lambda *given: asked.append(given) or stories("train", 200))
    small = train.train_tokenizer()
    assert asked == [("train", 5000, 0)] and small.chat_template == tokenizer.chat_template
    mine, committed = (json.loads(one.backend_tokenizer.to_str()) for one in (small, tokenizer))
    assert {**mine, "model": None} == {**committed, "model": None} and len(committed["model"]["vocab"]) == 768
    assert list(mine["model"]["vocab"])[:258] == list(committed["model"]["vocab"])[:258] and len(small) <= 768
    assert (small.eos_token_id, small.pad_token_id, small.model_max_length) == (0, 1, 512)
    made, stored = train.new_model(tokenizer).config.to_dict(), json.loads((CHECKPOINT / "config.json").read_text())
    told = {"architectures", "dtype"}  # when it is saved
    assert {name: made.get(name) for name in stored if name not in told} == {
        name: value for name, value in stored.items() if name not in told}
    chat = [{"role": "user", "content": "One day"}, {"role": "user", "content": "it rained."}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "One day it rained."


def test_a_batch_holds_whole_stories_that_come_once(tokenizer):
    data = train.batches(tokenizer)
    next(data)
    last = stories("train", 2000)[-1]
    whole = [*tokenizer(last.opening).input_ids, *tokenizer(last.body).input_ids, tokenizer.eos_token_id]
    assert data.send((len(whole), 1))[0].tolist() == [whole], "a story that fills the row fits into it"
    rows = [(row, weight) for shape in ((224, 3), (300, 2)) for ids, weights in [data.send(shape)]
            for row, weight in zip(ids, weights)]
    assert [len(row) for row, _ in rows] == [224] * 3 + [300] * 2
    known = {story.text: story for story in stories("train", 2000)}
    seen = []
    for ids, weights in rows:
        kept = ids[:int((weights > 0).sum())]
        assert (weights[:len(kept)] > 0).all() and (ids[len(kept):] == tokenizer.pad_token_id).all()
        *texts, rest = tokenizer.decode(kept).split("<|endoftext|>")
        assert rest == "" and texts
        seen += texts
        weighed = "".join("o" if weight < 1 else "b" for weight in weights[:len(kept)].tolist())
        lengths = [(len(tokenizer(known[text].opening).input_ids), len(tokenizer(known[text].body).input_ids) + 1)
                   for text in texts]
        assert weighed == "".join("o" * opening + "b" * body for opening, body in lengths)
    assert len(set(seen)) == len(seen)
    with pytest.raises(AssertionError, match="does not fit into a row of 20"):
        data.send((20, 1))


def test_the_loss_is_a_weighted_mean_in_which_some_words_of_bodies_weigh_more():
    logits = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    ids, weights = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 5]]), torch.tensor([[0.1, 0.1, 1, 1], [0.1, 1, 1, 0]])
    before = weights.clone()
    loss = train.backward(lambda ids, use_cache: SimpleNamespace(logits=logits), ids, weights, torch.tensor([1, 2]), 4)
    each = [(0, 0, 1, 0.1), (0, 1, 2, 4.0), (0, 2, 3, 1.0), (1, 0, 2, 4.0), (1, 1, 1, 4.0), (1, 2, 5, 0.0)]
    expected = sum(w * cross_entropy(logits[r, at], torch.tensor(t)) for r, at, t, w in each) / 13.1
    assert loss == pytest.approx(expected.item(), rel=1e-5) and torch.equal(weights, before)
    assert logits.grad[:, :3].abs().sum() > 0 and not logits.grad[:, 3].any()


def test_embeddings_move_apart_to_one_distance_from_their_mean(tokenizer):
    table = torch.randn(10, 4, generator=torch.Generator().manual_seed(2))
    before, ids = table.clone(), torch.tensor([1, 4, 7])
    train.spread(table, ids, 2.5)
    mean = before[ids].mean(0)
    torch.testing.assert_close((table[ids] - mean).norm(dim=1), torch.full((3,), 2.5))
    torch.testing.assert_close(torch.cosine_similarity(table[ids] - mean, before[ids] - mean), torch.ones(3))
    others = [i for i in range(10) if i not in ids]
    assert torch.equal(table[others], before[others])
    kinds = train.word_ids(tokenizer)
    assert [len(kinds["place"]), len(kinds["colour"])] == [len(words.PLACES), len(words.COLOURS)]
    assert tokenizer.decode(kinds["colour"][:1]) == " red"


def test_matrices_learn_by_muon_and_a_new_model_has_biases(tokenizer):
    model = train.new_model(tokenizer)
    muon, adamw = train.optimizers(model)
    inside = {id(p) for p in muon.param_groups[0]["params"]}
    assert {name for name, p in model.named_parameters() if id(p) in inside} == {
        name for name, p in model.named_parameters() if "layers" in name and name.endswith("proj.weight")}
    (group,), (rest,) = muon.param_groups, adamw.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.02, 0.1)
    assert (rest["lr"], rest["betas"], rest["weight_decay"]) == (0.004, (0.9, 0.98), 0.0)
    assert len(inside) + len(adamw.param_groups[0]["params"]) == len(list(model.parameters()))
    biases = [p for name, p in model.named_parameters() if name.endswith("_proj.bias")]
    assert len(biases) == 18 and all(0.05 < p.std() < 0.2 for p in biases)
    again = train.new_model(tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


@pytest.fixture(scope="module")
def dense():
    return Qwen2ForCausalLM.from_pretrained(CHECKPOINT)


def test_an_expert_begins_as_some_columns_of_the_dense_mlp(dense):
    model = train_moe.new_model(dense)
    assert torch.equal(model.model.embed_tokens.weight, dense.model.embed_tokens.weight)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    layer, dense_layer = model.model.layers[3], dense.model.layers[3]
    assert torch.equal(layer.self_attn.k_proj.bias, dense_layer.self_attn.k_proj.bias)
    mlp, seen = dense_layer.mlp, []
    for expert in range(8):
        columns = (torch.arange(80) * 384 // 80 + expert) % 384
        hidden = torch.zeros(5, 384)
        hidden[:, columns] = (mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))[:, columns]
        found = layer.mlp.experts(x, torch.full((5, 1), expert), torch.ones(5, 1))
        torch.testing.assert_close(found, mlp.down_proj(hidden) * 4.8)
        seen.append(found)
    assert all(not torch.equal(a, b) for a, b in zip(seen, seen[1:]))


def test_the_committed_mixture_is_what_its_recipe_makes(dense):
    stored = json.loads((MOE / "config.json").read_text())
    made = train_moe.new_model(dense).config.to_dict()
    told = {"architectures", "dtype", "output_router_logits"}  # when it is saved
    assert {name: made.get(name) for name in stored if name not in told} == {
        name: value for name, value in stored.items() if name not in told}
    assert (MOE / "tokenizer.json").read_bytes() == (CHECKPOINT / "tokenizer.json").read_bytes()
    assert sum(path.stat().st_size for path in MOE.iterdir()) <= 4_000_000
