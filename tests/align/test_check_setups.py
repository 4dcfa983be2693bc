"""Healthy engines of every ordinary kind are clean, in one table. Where names and sizes do not decide, the check asks
one question, and is clean when it is answered."""

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.recorded import record_lab
from helpers.setups import FLAT, LINES, SETUPS, SHAPES, Staged, adapted, calls_of, recorded
from helpers.third_party import FastLike, HfLike, VllmLike
from helpers.third_party_parts import Matrix, Weights, planned
from helpers.third_party_runs import TEXTS, batch_calls, run, texts
from helpers.trait_models import TRAITS, make_model

from tplab.align import check
from tplab.align.recording import PlacementError
from tplab.checkpoint import open_checkpoint
from tplab.ranks import logical_ranks, rank
from tplab.record import record


@pytest.fixture(scope="session")
def opened(tmp_path_factory):
    kept = {}

    def get(name):
        if name not in kept:
            folder = tmp_path_factory.mktemp("model")
            kept[name] = open_checkpoint(make_checkpoint(folder, layers=3, **SHAPES[name]) if name in SHAPES
                                         else make_model(folder, **TRAITS[name]))
        return kept[name]
    return get


@pytest.mark.parametrize("name", SETUPS)
def test_a_right_engine_is_clean(opened, tmp_path, name, monkeypatch):
    setup = SETUPS[name]
    if setup.engine is Staged:
        monkeypatch.setattr("helpers.third_party.all_reduce", lambda x: x)
    ckpt = opened(setup.shape)
    folder = recorded(tmp_path / "run", ckpt, setup, None if setup.asks else setup.said)
    if setup.asks:
        report = check(folder, ckpt)
        assert report.verdict == "cannot tell" and not report.failed, report.summary()
        assert len(report.open_questions) == 1 and setup.asks in report.open_questions[0], report.summary()
        folder = folder if setup.told else recorded(tmp_path / "told", ckpt, setup, setup.said)
    report = check(folder, ckpt, **setup.told)
    assert report.verdict == "clean" and not report.failed and not report.diagnoses, report.summary()
    assert [setup.warns in said for said in report.warnings] == [True] * bool(setup.warns), report.warnings
    assert {"layers.0.q", "layers.2.mlp_act", "layers.2.attn"} <= report.local.keys() and len(report.points) >= 30


@pytest.mark.parametrize("whole", [False, True], ids=["experts cut", "experts dealt out"])
@pytest.mark.parametrize("trait", ["experts, renormalised", "shared expert"])
def test_experts_are_clean_however_they_are_dealt_out(opened, tmp_path, trait, whole):
    ckpt = opened(trait)
    record_lab(tmp_path / "run", ckpt, texts(2, 7), enable_expert_parallel=whole)
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "clean", report.summary()
    assert trait == "shared expert" or report.plan.enable_expert_parallel is whole, "where a summand shows it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_padded_on_their_left_under_a_mask(opened, tmp_path, dtype):
    """Hugging Face's own generate on two texts of different lengths; nothing is told."""
    from transformers import AutoModelForCausalLM

    ckpt = opened("small")
    model = AutoModelForCausalLM.from_pretrained(ckpt.folder, dtype=dtype).eval()
    ids = torch.tensor([[0, 0, 0, 3, 14, 15], [7, 40, 2, 11, 60, 33]])
    with torch.inference_mode(), record(tmp_path / "run", rank=0, world_size=1) as rec:
        rec.watch(model)
        model.generate(ids, attention_mask=torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6]), max_new_tokens=4,
                       do_sample=False, pad_token_id=0, eos_token_id=None)
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "clean" and len(report.recording.places) == 9 + 6, report.summary()


def test_texts_padded_on_their_right(opened, tmp_path):
    ids = [[3, 14, 15, -1, -1], [7, 40, 2, 11, 60]]
    run(tmp_path / "run", opened("small"), HfLike, [([[max(i, 0) for i in line] for line in ids], [[*range(5)]] * 2, [
        0] * 5 + [1] * 5)], said=lambda rec, *_: rec.inputs(ids, [[*range(5)]] * 2))
    report = check(tmp_path / "run", opened("small"))
    assert report.verdict == "clean" and len(report.recording.places) == 8, report.summary()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_draft_and_its_target_in_one_record(opened, tmp_path, ranks):
    """Two models: the question which one is the checkpoint's."""
    other, ckpt = (open_checkpoint(make_checkpoint(tmp_path / "draft", layers=2, seed=9, **SHAPES["small"])),
                   opened("small"))

    def on_rank():
        with torch.inference_mode(), record(tmp_path / "run", rank=rank(), world_size=ranks) as rec:
            models = {name: HfLike(Weights(one, planned(one, ranks), torch.float32))
                      for name, one in (("draft", other), ("target", ckpt))}
            for name, model in models.items():
                rec.watch(model, name)
            for ids, positions, sequences in LINES:
                for model in models.values():
                    rec.inputs(torch.tensor(ids), torch.tensor(positions), [0, 1])
                    model.call(torch.tensor(ids), torch.tensor(positions), sequences)
    logical_ranks(ranks, on_rank)
    with pytest.raises(PlacementError, match=r"layers of 2 models .*--name 'target\*='"):
        check(tmp_path / "run", ckpt)
    assert check(tmp_path / "run", ckpt, names={"draft*": ""}).verdict == "clean"
    assert check(tmp_path / "run", other, names={"target*": ""}).verdict == "clean"


def test_data_parallel_ranks_are_recorded_one_by_one(opened, tmp_path, monkeypatch):
    ckpt, whole = opened("small"), planned(opened("small"), 1)

    def on_rank():
        folder = [tmp_path / "both", tmp_path / str(rank())]
        for to, number, size in zip(folder, (rank(), 0), (2, 1)):
            with torch.inference_mode(), record(to, rank=number, world_size=size) as rec:
                model = FastLike(Weights(ckpt, whole * 2, torch.float32))
                rec.watch(model)
                for ids, positions, numbers in batch_calls([TEXTS[rank()]], 1):
                    rec.inputs(ids, positions, numbers)
                    model.call(torch.tensor(ids), torch.tensor(positions), numbers)
    monkeypatch.setattr("helpers.third_party.all_reduce", lambda x: x)
    logical_ranks(2, on_rank)
    with pytest.raises(PlacementError, match="data or context parallelism: rank 1 .*record one rank alone"):
        check(tmp_path / "both", ckpt)
    assert [check(tmp_path / str(r), ckpt).verdict for r in range(2)] == ["clean", "clean"]


def test_an_adapter_that_the_checkpoint_does_not_have(opened, tmp_path):
    run(tmp_path / "run", opened("small"), HfLike, LINES, change=adapted("q_proj", "v_proj", merged=False))
    report = check(tmp_path / "run", opened("small"))
    assert report.verdict == "cannot tell" and not report.guilty, report.summary()
    assert "give the checkpoint into which they are merged" in report.open_questions[0]


def test_a_tree_of_drafts_cannot_be_told(opened, tmp_path):
    calls = [*calls_of(0, text=TEXTS[0][:6]), ([35, 8, 30], [6, 7, 7], [0] * 3), ([5], [8], [0])]
    run(tmp_path / "run", opened("small"), VllmLike, calls)
    report = check(tmp_path / "run", opened("small"))
    assert report.verdict == "cannot tell" and not report.guilty, report.summary()
    assert "a tree of drafts" in report.open_questions[0]


def test_ranks_that_differ_by_rounding(opened, tmp_path):
    def change(model, weights):
        layer = model.model.layers[1].mlp.down_proj
        layer.forward = lambda x: (Matrix.forward(layer, x)[0] * (1 + 1e-7 * rank()), None)

    run(tmp_path / "run", opened("small"), VllmLike, FLAT, change=change)
    report = check(tmp_path / "run", opened("small"))
    assert report.verdict == "clean" and "first at layers.1.mlp" in report.warnings[0], report.summary()


def test_what_is_placed_wrongly_is_asked_about(opened, tmp_path):
    """A tensor under a point's name that is another one: what the engine made of the right one is right."""
    ckpt = opened("small")
    with torch.inference_mode(), record(tmp_path / "run", rank=0, world_size=1) as rec:
        def on_rank():
            model = HfLike(Weights(ckpt, planned(ckpt, 1), torch.float32))
            rec.watch(model)
            ids, positions, sequences = LINES[0]
            rec.inputs(torch.tensor(ids), torch.tensor(positions))
            model.call(torch.tensor(ids), torch.tensor(positions), sequences)
            rec.tensor("layers.1.post_norm", torch.randn(*torch.tensor(ids).shape, 48))
        logical_ranks(1, on_rank)
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "cannot tell" and not report.failed, report.summary()
    assert "another tensor is layers.1.post_norm" in report.open_questions[0]
    assert check(tmp_path / "run", ckpt, names={"layers.1.post_norm": ""}).verdict == "clean"
