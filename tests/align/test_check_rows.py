"""Which token each row of a call is, names given by hand, and folders that belong to something else."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.third_party import HfLike, VllmLike
from helpers.third_party_parts import all_share, planned
from helpers.third_party_runs import batch_calls, flat_calls, run, wrong_points

from tplab.align import check
from tplab.align.check.folder import read_recorded
from tplab.align.check.placement import find_points
from tplab.align.check.rows import Texts, as_rows
from tplab.align.recording import PlacementError
from tplab.align.reference import hf_model, hf_trace
from tplab.checkpoint import open_checkpoint
from tplab.record import record


def rows(*calls):
    """``(ids, positions, sequences)`` of each call → the texts and, call by call, the places."""
    texts = Texts()
    found = []
    for i, (ids, positions, sequences) in enumerate(calls):
        call = texts.add_call(i, torch.tensor(ids), None if positions is None else torch.tensor(positions), sequences)
        found.append(dict(zip(call.rows, call.places)))
    return texts.ids, found


@pytest.mark.parametrize("calls, ids, places", [
    # A prompt, then one token after another.
    ([([5, 6, 7], None, None), ([8], None, None), ([9], None, None)], [[5, 6, 7, 8, 9]],
     [{0: (0, 0), 1: (0, 1), 2: (0, 2)}, {0: (0, 3)}, {0: (0, 4)}]),
    # A decode position that is off by one or begins again is a bug, not another text.
    ([([5, 6], [0, 1], None), ([7], [3], None), ([8], [0], None)], [[5, 6, 7, 8]], None),
    # Two prompts in one flat call, then one token of each; the positions part them.
    ([([1, 2, 3, 4, 5], [0, 1, 2, 0, 1], None), ([6, 7], [3, 2], None)], [[1, 2, 3, 6], [4, 5, 7]],
     [{0: (0, 0), 1: (0, 1), 2: (0, 2), 3: (1, 0), 4: (1, 1)}, {0: (0, 3), 1: (1, 2)}]),
    # The same in another order: the lengths say which is which.
    ([([1, 2, 3, 4, 5], [0, 1, 2, 0, 1], None), ([6], [2], None), ([7], [3], None)], [[1, 2, 3, 7], [4, 5, 6]], None),
    # Numbers of the engine's own, in any order.
    ([([1, 2, 3, 4], [0, 1, 0, 1], [7, 7, 3, 3]), ([5, 6], [2, 2], [3, 7])], [[1, 2, 6], [3, 4, 5]], None),
    # A batch, with padding on the left and decode steps.
    ([([[1, 2, 3], [-1, 4, 5]], None, None), ([[6], [7]], None, None)], [[1, 2, 3, 6], [4, 5, 7]],
     [{0: (0, 0), 1: (0, 1), 2: (0, 2), 4: (1, 0), 5: (1, 1)}, {0: (0, 3), 1: (1, 2)}]),
    # A token that is the prompt's first one again does not begin it anew.
    ([([5, 6, 7], None, None), ([5], None, None), ([6], None, None)], [[5, 6, 7, 5, 6]], [{i: (0, i) for i in range(3)},
                                                                                     {0: (0, 3)}, {0: (0, 4)}]),
    # A line of padding alone is no text.
    ([([[1, 2], [-1, -1]], None, None), ([[3], [-1]], None, None)], [[1, 2, 3]], [{0: (0, 0), 1: (0, 1)}, {0: (0, 2)}]),
    # Padding that only the positions tell.
    ([([[0, 0, 3], [4, 5, 6]], [[-1, -1, 0], [0, 1, 2]], None)], [[3], [4, 5, 6]], None),
    # A prompt in two pieces.
    ([([1, 2, 3], [0, 1, 2], None), ([4, 5], [3, 4], None)], [[1, 2, 3, 4, 5]], None),
    # An engine without a cache computes everything again.
    ([([[1, 2]], None, None), ([[1, 2, 3]], None, None), ([[1, 2, 3, 4]], None, None)], [[1, 2, 3, 4]],
     [{0: (0, 0), 1: (0, 1)}, {0: (0, 0), 1: (0, 1), 2: (0, 2)}, {i: (0, i) for i in range(4)}]),
    # The same with a number of its own, and a token of another sequence between.
    ([([[1, 2]], None, [4]), ([[7]], None, [5]), ([[1, 2, 3]], None, [4])], [[1, 2, 3], [7]],
     [{0: (0, 0), 1: (0, 1)}, {0: (1, 0)}, {i: (0, i) for i in range(3)}]),
    # Two prompts one after the other.
    ([([1, 2], [0, 1], None), ([3, 4, 5], [0, 1, 2], None)], [[1, 2], [3, 4, 5]], None),
])
def test_rows(calls, ids, places):
    found, seen = rows(*calls)
    assert found == ids and (places is None or seen == places)


def test_as_many_texts_as_tokens_stand_line_by_line():
    call = Texts().add_call(0, torch.tensor([[1, 2], [3, 4]]), None, None)
    tensor = torch.arange(12.0).reshape(2, 2, 3)
    assert torch.equal(as_rows(tensor, call), tensor.reshape(4, 3))


@pytest.mark.parametrize("sequences, words", [
    ([1], "call 0: 1 sequence numbers for 2 lines of 3 tokens; give one for each line or one for each token"),
    ([1] * 5, "call 0: 5 sequence numbers for 2 lines")])
def test_sequence_numbers_that_fit_nothing(sequences, words):
    with pytest.raises(PlacementError, match=words):
        rows(([[1, 2, 3], [4, 5, 6]], None, sequences))


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return open_checkpoint(make_checkpoint(folder, "llama", layers=2, heads=6, kv_heads=2, head_dim=6, hidden=24))


@pytest.fixture(scope="module")
def healthy(ckpt, tmp_path_factory):
    """A healthy recording in vLLM's names over two ranks, and the folder."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    run(folder, ckpt, VllmLike, flat_calls([[1, 2, 3, 4, 5, 6], [9, 8, 7, 6]], 1))
    return read_recorded(folder)


def with_calls(found, change):
    """The same recording with ``change(rank, call)`` instead of each call."""
    return replace(found, ranks=tuple(replace(r, calls=tuple(change(r.rank, call) for call in r.calls))
                                      for r in found.ranks))


def test_declared_positions_that_differ_are_kept(ckpt, healthy):
    assert find_points(healthy, ckpt).declared is None
    wrong = with_calls(healthy, lambda rank, call: replace(call, positions=call.positions + (call.index > 0)))
    found = find_points(wrong, ckpt)
    assert found.declared == [0, 1, 2, 3, 4, 6, 0, 1, 2, 4] and found.num_keys == [5] * 5 + [6] + [3] * 3 + [4]
    assert found.places == [(0, i) for i in range(6)] + [(1, i) for i in range(4)]


def test_an_engine_without_a_cache_is_told_so(ckpt, tmp_path):
    calls = [([[1, 2, 3, 4][:n]], [list(range(n))], [0] * n) for n in (2, 3, 4)]
    run(tmp_path / "run", ckpt, HfLike, calls, change=lambda model, weights: forget(model))
    found = find_points(read_recorded(tmp_path / "run"), ckpt)
    assert not wrong_points(found, ckpt) and found.num_keys == [4] * 4
    assert found.notes == ["calls 1–2 computed 5 tokens of earlier calls once more: nothing was read "
                           "from a cache"]


def forget(model):
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda module, args: module.core_attention.past.clear())


def test_some_layers_only_and_calls_that_were_cut_short(ckpt, tmp_path):
    shares = all_share(planned(ckpt, 2), q=[(3, 4, 5), (0, 1, 2)], kv=[(1,), (0,)])
    calls = batch_calls([[1, 2, 3, 4, 5, 6, 7]], 2)
    run(tmp_path / "last", ckpt, HfLike, calls, shares=shares, layers=[1])
    found = find_points(read_recorded(tmp_path / "last"), ckpt)
    assert not wrong_points(found, ckpt) and found.points["layers.1.attn"][0].indices == (3, 4, 5)
    assert "layers.0.q" not in found.points and len(found.places) == 7
    run(tmp_path / "whole", ckpt, HfLike, calls, shares=shares)
    first = read_recorded(tmp_path / "whole").ranks[0].calls[0].entries
    room = sum({(e.file, e.offset): e.tensor().nbytes for e in first}.values()) + 500
    run(tmp_path / "short", ckpt, HfLike, calls, shares=shares, max_bytes=room)
    found = find_points(read_recorded(tmp_path / "short"), ckpt)
    assert not wrong_points(found, ckpt) and "logits" in found.points and len(found.places) < 7
    assert any("were not judged: they lack tensors that call 0 has" in note for note in found.notes)


def test_in_bfloat16_too(ckpt, tmp_path):
    shares = all_share(planned(ckpt, 2), q=[(3, 4, 5), (0, 1, 2)], kv=[(1,), (0,)], mlp=[range(0, 43, 2),
                                                                                       [*range(1, 43, 2), -1]])
    run(tmp_path / "run", ckpt, HfLike, batch_calls([[1, 2, 3, 4, 5, 6, 7]]), dtype=torch.bfloat16, shares=shares)
    found = find_points(read_recorded(tmp_path / "run"), ckpt)
    assert found.dtype == torch.bfloat16 and not found.contradictions and not wrong_points(found, ckpt, 0.2)
    assert found.points["layers.1.attn"][0].indices == (3, 4, 5)
    assert tuple(found.points["layers.1.mlp_act"][1].indices) == tuple(range(1, 43, 2))
    assert "o_partial" in "".join(found.points) and found.points["layers.0.o_partial"][0].kind == "partial"


def test_what_one_rank_lacks(ckpt, healthy):
    """A rank that left nothing, or stopped early: the rest is placed."""
    alone = find_points(replace(healthy, ranks=(healthy.ranks[0], None)), ckpt)
    assert not wrong_points(alone, ckpt) and "rank 1 of 2 recorded nothing" in alone.notes
    assert "layers.0.o_proj" in alone.points and "layers.0.o_partial" not in alone.points, "a sum is no summand"
    assert alone.points["layers.0.q"][1] is None and alone.points["layers.0.q"][0] is not None
    assert not alone.contradictions
    stopped = with_calls(healthy, lambda rank, call: replace(
        call, status="cut off", last="model.layers.1.mlp") if rank and call.index else call)
    found = find_points(stopped, ckpt)
    assert found.places == [(0, i) for i in range(5)] + [(1, i) for i in range(3)] and not wrong_points(found, ckpt)


@pytest.mark.parametrize("engine", [VllmLike, HfLike])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_healthy_engine_of_which_one_rank_was_recorded_is_not_guilty(ckpt, tmp_path, rank, engine):
    calls = (flat_calls if engine is VllmLike else batch_calls)([[1, 2, 3, 4, 5, 6]], 1)
    run(tmp_path / "run", ckpt, engine, calls, ranks=[rank])
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "cannot tell" and not report.guilty, report.summary()
    assert report.computed == [[0, 1, 2, 3, 4, 5]], "in two calls: the rows of the decode path"


def test_a_first_call_that_was_cut_off_is_placed_as_far_as_it_goes(ckpt, healthy):
    def cut(rank, call):
        return replace(call, status="cut off", last="model.layers.1.self_attn",
                       entries=tuple(e for e in call.entries if e.order < 40))

    found = find_points(with_calls(replace(healthy), lambda rank, call: cut(rank, call)), ckpt)
    assert not wrong_points(found, ckpt) and "embed" in found.points and "logits" not in found.points


def test_names_given_by_hand(ckpt, healthy):
    def strange(rank, call):
        return replace(call, entries=tuple(replace(e, name=e.name.replace("self_attn.attn", "mix.core")
                                                   .replace("self_attn.qkv_proj", "mix.w")) for e in call.entries))

    names = {"model.layers.{i}.mix.c?re": "attn", "*.{i}.mix.w": "layers.{i}.qkv",
             "model.layers.{i}.mix.w:in": "input_norm", "model.layers.{i}.mix.core:in.2": "v",
             "model.layers.{i}.input_layernorm": ""}
    found = find_points(with_calls(healthy, strange), ckpt, names)
    assert not wrong_points(found, ckpt)
    for point, source in (("attn", "mix.core’s output"), ("v", "mix.core’s input 2"), ("input_norm", "mix.w’s input")):
        assert source in found.assumed[f"layers.1.{point}"]


@pytest.mark.parametrize("names, words", [
    ([1], r"names must be a dictionary \{pattern: point\}, not \[1\]"),
    ({"a": 1}, r"names must hold texts \{pattern: point\}, not \{'a': 1\}"),
    ({"model.layers.{i}.mlp": "mlp_out"}, "there is no point 'mlp_out'; did you mean 'mlp_act'?"),
    ({"model.layers.*.mlp": "mlp"}, "mlp is a point of each layer, so 'model.layers.[*].mlp' must hold {i} once"),
    ({"model.{i}.norm": "norm"}, "norm is no layer’s, so 'model.{i}.norm' must hold {i} nowhere"),
    ({"model.layers.{i}.mpl": "mlp"}, "'model.layers.{i}.mpl' fits nothing that was recorded; the nearest name is "),
])
def test_names_that_cannot_be(ckpt, healthy, names, words):
    with pytest.raises(PlacementError, match=words.replace("{i}", r"\{i\}").replace("?", r"\?")):
        find_points(healthy, ckpt, names)


def test_tensors_recorded_by_hand(tmp_path, ckpt):
    """No module at all: only what the engine calls by the lab's names, or what equals Hugging Face's."""
    trace = hf_trace(hf_model(ckpt, torch.float32), [3, 1, 4, 1, 5])
    with record(tmp_path / "run", rank=0, world_size=1) as rec:
        rec.inputs(torch.tensor([3, 1, 4, 1, 5]), torch.arange(5))
        for i in range(2):
            rec.tensor(f"layers.{i}.self_attn.q_rope", trace[f"layers.{i}.q_rope"])
            rec.tensor(f"layers.{i}.what", trace[f"layers.{i}.k_rope"].transpose(0, 1)[None])
            rec.tensor(f"layers.{i}.x", trace[f"layers.{i}.residual"][None])
            rec.tensor(f"layers.{i}.y", torch.randn(5, 24))
        rec.tensor("logits", trace["logits"])
    found = find_points(read_recorded(tmp_path / "run"), ckpt)
    assert not wrong_points(found, ckpt)
    points = ("q_rope", "k_rope", "residual")
    assert set(found.points) == {*(f"layers.{i}.{point}" for i in range(2) for point in points), "logits"}
    assert "equals Hugging Face's layers.{i}.k_rope" in found.assumed["layers.1.k_rope"]
    assert found.unplaced == ["layers.{i}.y: no point that the conventions know (layers 0–1)"]


def test_last_rows_alone(tmp_path, ckpt):
    trace = hf_trace(hf_model(ckpt, torch.float32), [3, 1, 4, 1, 5])
    with record(tmp_path / "run", rank=0, world_size=1) as rec:
        rec.inputs(torch.tensor([3, 1, 4, 1, 5]), torch.arange(5))
        rec.tensor("x", trace["norm"][-1:])
        rec.tensor("logits", trace["logits"][-1:])
    found = find_points(read_recorded(tmp_path / "run"), ckpt)
    assert found.logit_places == [(0, 4)] and not wrong_points(found, ckpt)


def test_folders_of_something_else(ckpt, healthy, tmp_path):
    other = open_checkpoint(make_checkpoint(tmp_path / "wide", "llama", layers=2, heads=6, kv_heads=2, hidden=36))
    with pytest.raises(PlacementError, match="embed_tokens gives 24 columns, but the checkpoint's hidden size is 36"):
        find_points(healthy, other)
    shallow = open_checkpoint(make_checkpoint(tmp_path / "shallow", "llama", layers=1, heads=6, kv_heads=2, hidden=24))
    with pytest.raises(PlacementError, match="has a layer 1, but the checkpoint's layers are 0 to 0"):
        find_points(healthy, shallow)
    for more in (66, 58):
        ids = with_calls(healthy, lambda rank, call, more=more: replace(call, input_ids=call.input_ids + more))
        with pytest.raises(PlacementError, match=f"id {9 + more} is not in the checkpoint's vocabulary: 0 to 66"):
            find_points(ids, ckpt)
    silent = with_calls(healthy, lambda rank, call: replace(call, input_ids=None, entries=tuple(
        e for e in call.entries if e.dtype.is_floating_point)))
    with pytest.raises(PlacementError, match="call 0 has no token ids: rec.inputs"):
        find_points(silent, ckpt)
    with pytest.raises(PlacementError, match="holds no recording of any of its 2 ranks"):
        find_points(replace(healthy, ranks=(None, None)), ckpt)


def test_ids_of_another_call_than_what_was_recorded(ckpt, healthy):
    longer = with_calls(healthy, lambda rank, call: replace(call, input_ids=torch.cat([call.input_ids, torch.ones(
        1, dtype=torch.int64)]), positions=None, sequences=None))
    with pytest.raises(PlacementError, match="call 0 has 9 token ids, but its tensors have 8 rows; give rec.inputs"):
        find_points(longer, ckpt)


def test_a_call_of_no_tokens_says_nothing(ckpt, tmp_path):
    with record(tmp_path / "run", rank=0, world_size=1) as rec:
        rec.inputs([], [])
        rec.tensor("model.embed", torch.zeros(0, 24))
    with pytest.raises(PlacementError, match="no recorded call has a token"):
        find_points(read_recorded(tmp_path / "run"), ckpt)


@pytest.mark.parametrize("sequences", [None, [4]])
def test_a_recording_that_begins_in_the_middle_of_a_text_is_refused(sequences):
    """What attention saw is not there, so nothing that it gives is right or wrong."""
    with pytest.raises(PlacementError, match="call 0: a single token at position 7 continues a text that was not rec"):
        rows(([5], [7], sequences))


def test_positions_without_a_name_are_known_by_counting(ckpt, healthy):
    """Two prompts in one flat call: only the positions part them."""
    def unsaid(rank, call):
        door = next(e for e in call.entries if not e.dtype.is_floating_point)
        given = SimpleNamespace(**vars(door) | {"path": "1", "shape": tuple(call.positions.shape),
                                                "tensor": lambda: call.positions})
        return replace(call, positions=None, sequences=None, entries=(door, given, *call.entries[1:]))
    found = find_points(with_calls(replace(healthy, ranks=tuple(replace(r, calls=r.calls[:1]) for r in healthy.ranks)),
                             unsaid), ckpt)
    assert found.ids == [[1, 2, 3, 4, 5], [9, 8, 7]]


def test_last_positions_only_and_padding(tmp_path, ckpt):
    """A batch whose shorter text is padded on the left, in Hugging Face's shapes; logits of the last column only."""
    calls = [([[-1, -1, 4, 5], [6, 7, 8, 9]], [[-1, -1, 0, 1], [0, 1, 2, 3]], None)]
    texts = batch_calls([[4, 5]]), batch_calls([[6, 7, 8, 9]])
    for i, call in enumerate(texts):
        run(tmp_path / str(i), ckpt, HfLike, call, size=1)
    short, long = (read_recorded(tmp_path / str(i)).ranks[0].calls[0] for i in (0, 1))
    entries = []
    for a, b in zip(short.entries, long.entries):
        both = [a.tensor(), b.tensor()]
        if a.dtype.is_floating_point:
            axis = next((i for i, (m, n) in enumerate(zip(both[0].shape, both[1].shape)) if m != n), None)
            pad = list(both[0].shape)
            pad[axis] = 2
            whole = torch.cat([torch.cat([torch.full(pad, float("nan")), both[0]], axis), both[1]])
            whole = whole[:, -1:] if a.name in ("lm_head", "") and a.kind == "out" else whole
            entries.append(SimpleNamespace(**{**vars(a), "shape": tuple(whole.shape), "tensor": lambda t=whole: t}))
    call = replace(short, input_ids=torch.tensor(calls[0][0]), positions=torch.tensor(calls[0][1]), sequences=None,
                   entries=tuple(entries))
    one = read_recorded(tmp_path / "0")
    found = find_points(replace(one, ranks=(replace(one.ranks[0], calls=(call,)),)), ckpt)
    assert not wrong_points(found, ckpt) and found.ids == [[4, 5], [6, 7, 8, 9]]
    assert found.logit_places == [(0, 1), (1, 3)] and len(found.places) == 6
