"""The shares of ranks: other layouts than the lab's are found where they are consistent, and a bug is no layout."""

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.third_party import FastAttention, FastLike, HfLike, VllmAttention, VllmLike
from helpers.third_party_parts import Rotary, Weights, all_reduce, all_share, planned
from helpers.third_party_runs import batch_calls, flat_calls, run, texts, wrong_points

from tplab.align import check
from tplab.align.check.folder import read_recorded
from tplab.align.check.placement import find_points
from tplab.align.check.weights import wrong_parameters
from tplab.checkpoint import open_checkpoint
from tplab.ranks import logical_ranks, rank
from tplab.record import record


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """8 query and 4 KV heads, width and heads alike, nothing else even."""
    folder = tmp_path_factory.mktemp("small")
    return open_checkpoint(make_checkpoint(folder, "llama", layers=2, heads=8, kv_heads=4, head_dim=6, hidden=48,
                                           inter=43, vocab=67))


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """14 query and 2 KV heads."""
    folder = tmp_path_factory.mktemp("few")
    return open_checkpoint(make_checkpoint(folder, "qwen2", layers=2, heads=14, kv_heads=2, head_dim=4, hidden=56))


def placed(tmp_path, ckpt, engine, shares=None, size=2, change=lambda model, weights: None, **options):
    calls = flat_calls(texts(2, 7), 1) if engine is VllmLike else batch_calls(texts(2, 7), 1)
    run(tmp_path / "run", ckpt, engine, calls, size=size, shares=shares, change=change, **options)
    return find_points(read_recorded(tmp_path / "run"), ckpt)


def indices(found, point):
    return [tuple(shard.indices) for shard in found.points[point]]


def padded(total, count, rank):
    return [i if i < total else -1 for i in range(rank * count, (rank + 1) * count)]


ENGINES = pytest.mark.parametrize("engine", [HfLike, VllmLike, FastLike])

LAYOUTS = {
    "every other group": dict(q=[(0, 1, 4, 5), (2, 3, 6, 7)], kv=[(0, 2), (1, 3)]),
    "ranks the other way round": dict(q=[(4, 5, 6, 7), (0, 1, 2, 3)], kv=[(2, 3), (0, 1)]),
    "all KV heads everywhere": dict(kv=[(0, 1, 2, 3)] * 2),
    "every other column": dict(mlp=[range(0, 43, 2), [*range(1, 43, 2), -1]]),
    "equal shares with padding": dict(mlp=[padded(43, 24, r) for r in (0, 1)],
                                      vocab=[padded(67, 36, r) for r in (0, 1)]),
    "two padded KV slots": dict(kv=[(0, 1, -1, -1), (2, 3, -1, -1)]),
    "attention whole on every rank": dict(q=[range(8)] * 2, kv=[range(4)] * 2),
}


@ENGINES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_is_found(tmp_path, small, engine, layout):
    if "whole" in layout and engine is not VllmLike:
        pytest.skip("the others would add the same sum twice")

    def no_sum(model, weights):
        for block in model.model.layers if "whole" in layout else ():
            block.self_attn.o_proj.reduce = False

    found = placed(tmp_path, small, engine, all_share(planned(small, 2), **LAYOUTS[layout]), change=no_sum)
    assert not wrong_points(found, small) and not found.contradictions
    real = {name: [tuple(i for i in share if i >= 0) for share in shares] for name, shares in LAYOUTS[layout].items()}
    for name, point in (("q", "layers.1.attn"), ("kv", "layers.1.v"), ("mlp", "layers.0.mlp_act")):
        if name in real:
            assert indices(found, point) == real[name]
    if engine is HfLike and "padding" in layout:
        assert "padding" in found.assumed["layers.0.mlp_act"]
    if "other" in layout:
        assert "as the values say" in found.assumed["layers.0.attn" if "q" in real else "layers.0.mlp_act"]


@pytest.mark.parametrize("size", [3, 4])
def test_equal_shares_of_replicated_heads(tmp_path, few, size):
    found = placed(tmp_path, few, VllmLike, size=size)
    assert not wrong_points(found, few) and not found.contradictions
    assert [len(share) for share in indices(found, "layers.0.attn")] == {3: [5, 5, 4], 4: [4, 4, 3, 3]}[size]


@pytest.mark.parametrize("order", ["kqv", "vkq"])
@pytest.mark.parametrize("engine", [VllmLike, FastLike])
def test_a_fused_order_of_its_own_is_found_if_it_is_read_as_written(tmp_path, small, engine, order, monkeypatch):
    """gpt-fast's names show nothing between wqkv and wo: what follows has to say how the output was read."""
    monkeypatch.setattr(FastAttention if engine is FastLike else VllmAttention, "order", order)
    found = placed(tmp_path, small, engine)
    assert not wrong_points(found, small) and not found.contradictions
    assert ("order of their own" in found.assumed["layers.0.q"]) == (engine is FastLike)


# Bugs.

def in_turns(model, weights):
    """wqkv filled and read group by group, [q … q k v] for each KV head, as GPT-NeoX has it."""
    for block in model.model.layers if hasattr(model, "model") else model.layers:
        wqkv, sizes = block.attention.wqkv, block.attention.sizes
        q, k, v = (part.view(sizes[1] // 6, -1) for part in torch.arange(len(wqkv.weight)).split(sizes))
        turns = torch.cat([q, k, v], 1).flatten()
        wqkv.weight.data = wqkv.weight[turns]
        block.attention.read = turns.argsort()


def reading(read):
    """FastAttention's forward pass, which takes its columns of wqkv as ``read(attention)`` says."""
    def forward(self, x, input_pos):
        q, k, v = self.wqkv(x).flatten(0, 1)[:, read(self)].split(self.sizes, -1)
        q, k = self.rotary[0](input_pos.flatten(), q, k)
        return all_reduce(self.wo(self.core.forward(q, k, v))).view(x.shape)
    return forward


@pytest.mark.parametrize("bug, names", [
    ("none", []), ("k is not scaled", [("softmax_scale",)]), ("read as blocks", [("qkv_interleaved",)])])
def test_parts_that_lie_in_turns_are_no_bug_by_themselves(tmp_path, small, bug, names, monkeypatch):
    """A bug behind them does not make q, k and v wrong; being read otherwise than they were written does."""
    monkeypatch.setattr(FastAttention, "forward", reading(
        (lambda self: slice(None)) if bug == "read as blocks" else lambda self: self.read))
    if bug == "k is not scaled":
        turn = Rotary.forward
        monkeypatch.setattr(Rotary, "forward", lambda self, positions, q, k: turn(self, positions, 3 * q, k))
    run(tmp_path / "run", small, FastLike, batch_calls(texts(2, 7), 1), change=in_turns)
    report = check(tmp_path / "run", small)
    assert [one.names for one in report.diagnoses] == names, report.summary()
    assert ("order of their own" in report.recording.assumed["layers.0.q"]) == (bug != "read as blocks")



def test_the_first_kv_heads_on_every_rank_are_no_layout(tmp_path, small):
    found = placed(tmp_path, small, HfLike, all_share(planned(small, 2), kv=[(0, 1), (0, 1)]))
    wrong = wrong_points(found, small)
    assert {"layers.0.k", "layers.0.v"} <= set(wrong) and "layers.0.q" not in wrong
    assert indices(found, "layers.0.k") == [(0, 1), (2, 3)]
    assert "do not confirm" in found.assumed["layers.0.k"]


def test_kv_heads_by_modulo_are_no_layout(tmp_path, few):
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "model", "qwen3", layers=2, heads=8, kv_heads=2, hidden=24))
    found = placed(tmp_path, ckpt, HfLike, all_share(planned(ckpt, 4), kv=[(r % 2,) for r in range(4)]), size=4)
    wrong = wrong_points(found, ckpt)
    assert {"layers.0.k", "layers.0.v"} <= set(wrong) and "layers.0.q" not in wrong and not found.contradictions
    # Of 14 query heads, the second rank's read both KV heads: one of them is nowhere near.
    found = placed(tmp_path / "few", few, HfLike, all_share(planned(few, 4), kv=[(r % 2,) for r in range(4)]), size=4)
    assert "layers.0.attn" in wrong_points(found, few)
    assert found.contradictions[0].endswith("rank 3: 1): rank 1 holds 1, but its query heads read 0–1")


def test_a_matrix_cut_along_the_wrong_dimension_is_no_layout(tmp_path, small):
    def change(model, weights):
        for i, block in enumerate(model.model.layers):
            for x in "qkv":
                whole = weights.get(f"model.layers.{i}.self_attn.{x}_proj.weight")
                own = getattr(block.self_attn, f"{x}_proj").weight
                own.data = whole.chunk(2, 1)[rank()].reshape(own.shape).contiguous()

    wrong = wrong_points(placed(tmp_path, small, HfLike, change=change), small)
    assert {"layers.0.q", "layers.0.k", "layers.0.v"} <= set(wrong) and "layers.0.input_norm" not in wrong


def test_a_fused_matrix_cut_as_one_block_is_no_layout(tmp_path, small):
    def change(model, weights):
        for i, block in enumerate(model.model.layers):
            whole = torch.cat([weights.get(f"model.layers.{i}.self_attn.{x}_proj.weight") for x in "qkv"])
            block.self_attn.qkv_proj.weight.data = whole.chunk(2)[rank()].clone()

    found = placed(tmp_path, small, VllmLike, change=change)
    assert {"layers.0.q", "layers.0.k", "layers.0.v"} <= set(wrong_points(found, small))


@pytest.mark.parametrize("engine", [VllmLike, FastLike])
def test_q_and_k_and_v_written_in_one_order_and_read_in_another(tmp_path, small, engine):
    def change(model, weights):
        for i, block in enumerate(model.model.layers if engine is VllmLike else model.layers):
            parts = [weights.cut(f"model.layers.{i}.self_attn.{x}_proj") for x in "qvk"]
            fused = block.self_attn.qkv_proj if engine is VllmLike else block.attention.wqkv
            fused.weight.data = torch.cat(parts)

    placed(tmp_path, small, engine, change=change)
    wrong = check(tmp_path / "run", small).guilty
    assert {"layers.0.k", "layers.0.v"} <= set(wrong) and "layers.0.q" not in wrong and "layers.0.attn" not in wrong


def test_up_before_gate(tmp_path, small):
    def change(model, weights):
        for i, block in enumerate(model.model.layers):
            parts = [weights.cut(f"model.layers.{i}.mlp.{x}_proj") for x in ("up", "gate")]
            block.mlp.gate_up_proj.weight.data = torch.cat(parts)

    placed(tmp_path, small, VllmLike, change=change)
    assert check(tmp_path / "run", small).guilty == [f"layers.{i}.{part}" for i in (0, 1) for part in ("gate", "up")]


@pytest.mark.parametrize("engine", [HfLike, VllmLike, FastLike])
def test_an_all_reduce_that_is_missing_leaves_its_mark_behind_it(tmp_path, small, engine, monkeypatch):
    def change(model, weights):
        if engine is VllmLike:
            for block in model.model.layers:
                block.self_attn.o_proj.reduce = False

    if engine is not VllmLike:  # whichever sum it is: attention and MLP both lack it
        monkeypatch.setattr("helpers.third_party.all_reduce", lambda tensor: tensor)
    found = placed(tmp_path, small, engine, change=change)
    wrong = wrong_points(found, small)
    assert "layers.0.attn" not in wrong and "layers.0.o_partial" not in wrong and "layers.0.residual" in wrong


def test_ranks_that_were_given_other_tokens(tmp_path, small):
    def on_rank():
        model = HfLike(Weights(small, planned(small, 2), torch.float32))
        with torch.inference_mode(), record(tmp_path / "run", rank=rank(), world_size=2) as rec:
            rec.watch(model)
            ids = torch.tensor([[1, 2, 3 + rank()]])
            rec.inputs(ids)
            model.call(ids, torch.arange(3)[None], [0, 0, 0])

    logical_ranks(2, on_rank)
    found = find_points(read_recorded(tmp_path / "run"), small)
    assert found.contradictions == ["call 0: rank 1 was given other token ids than rank 0: [1, 2, 4], not [1, 2, 3]"]
    report = check(tmp_path / "run", small)
    assert "embed" in report.guilty and [one.point for one in report.diagnoses][:1] == ["layout"]
    assert not any("embed" in one.points for one in report.diagnoses), "it cannot be right with other ids"


# Weights.


@pytest.mark.parametrize("engine", [HfLike, VllmLike, FastLike])
@pytest.mark.parametrize("calls", [True, False])
def test_recorded_weights_are_the_checkpoints(tmp_path, small, engine, calls):
    shares = all_share(planned(small, 2), **LAYOUTS["every other group"], **LAYOUTS["equal shares with padding"])
    made = (flat_calls if engine is VllmLike else batch_calls)(texts(1, 7))
    run(tmp_path / "run", small, engine, made if calls else [], shares=shares, parameters=True)
    found = find_points(read_recorded(tmp_path / "run"), small)
    assert not wrong_parameters(found, small) and not found.contradictions
    held = found.parameters[1]
    assert {"model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight",
            "model.norm.weight"} <= set(held)
    assert held["model.layers.1.self_attn.k_proj.weight"].indices == (*range(6, 12), *range(18, 24))
    assert len(held["model.layers.0.mlp.up_proj.weight"].tensor) == 19


@pytest.mark.parametrize("calls", [True, False])
def test_recorded_weights_that_are_not(tmp_path, small, calls):
    def change(model, weights):
        model.model.layers[1].self_attn.o_proj.weight.data[3] += 1
        if rank():
            model.model.norm.weight.data.fill_(1)

    shares = all_share(planned(small, 2), kv=[(0, 1), (0, 1)])
    run(tmp_path / "run", small, HfLike, batch_calls(texts(1, 7)) if calls else [], shares=shares, change=change,
        parameters=True)
    wrong = wrong_parameters(find_points(read_recorded(tmp_path / "run"), small), small)
    assert set(wrong) == {f"rank 1: model.layers.{i}.self_attn.{x}_proj.weight" for i in (0, 1) for x in "kv"} | {
        f"rank {r}: model.layers.1.self_attn.o_proj.weight" for r in (0, 1)} | {"rank 1: model.norm.weight"}


def test_a_row_parallel_bias_belongs_to_the_first_rank(tmp_path):
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "model", "llama", layers=1, attention_bias=True, hidden=24))
    name = "model.layers.0.self_attn.o_proj.bias"
    for number in (0, 1):
        with record(tmp_path / "run", rank=number, world_size=2) as rec:
            rec.parameters({name: torch.zeros(24)})
    wrong = wrong_parameters(find_points(read_recorded(tmp_path / "run"), ckpt), ckpt)
    assert list(wrong) == [f"rank 0: {name}"], "the other ranks may hold zeros"
