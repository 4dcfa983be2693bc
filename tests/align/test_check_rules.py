"""The check's rules where two would do: which tensor, which row, which rank, which word; on entries made by hand."""

from types import SimpleNamespace as Some

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.recorded import record_lab

from tplab.align.check import fused, place
from tplab.align.check.evident import _role
from tplab.align.check.folder import read_recorded
from tplab.align.check.layouts import Layout, decide, not_a_partition
from tplab.align.check.names import role_of
from tplab.align.check.place import _Placing, _Points
from tplab.align.check.rows import CallRows, Texts
from tplab.align.check.shares import Held, Shares
from tplab.align.check.sources import Source, Sources, _short, shared_modules
from tplab.align.check.sums import Sums
from tplab.align.check.verdict import CheckReport
from tplab.align.guilty import LocalDiff
from tplab.align.recording import PlacementError
from tplab.align.report import PointDiff
from tplab.checkpoint import open_checkpoint

F32, NAN = torch.float32, float("nan")
A, B = Some(name="a", pattern=("a",)), Some(name="b", pattern=("b",))

# Names that engines give: Hugging Face's, vLLM's, picotron's, gpt-fast's, Llama's own, Megatron's, GPT-NeoX's, GPT-2's.

NAMES = {
    "q": "q_proj wq to_q", "k": "k_proj wk to_k", "v": "v_proj wv to_v", "qkv": "qkv_proj wqkv c_attn query_key_value "
    "linear_qkv", "o": "o_proj wo out_proj", "gate": "gate_proj w1", "up": "up_proj w3", "down": "down_proj w2 "
    "linear_fc2", "gate_up": "gate_up_proj w13 linear_fc1", "attention": "self_attn attention attn self_attention",
    "feed_forward": "mlp feed_forward ffn", "input_norm": "input_layernorm attention_norm ln_1 ln_attn", "post_norm":
    "post_attention_layernorm ffn_norm ln_2 pre_mlp_layernorm", "q_norm": "q_norm q_layernorm", "k_norm": "k_norm "
    "k_layernorm", "rotary": "rotary_emb rotary rope", "act": "act_fn act", "core": "core_attention sdpa", "kv_cache":
    "kv_cache"}
OUTER = {"embed": "embed_tokens tok_embeddings wte embedding word_embeddings", "norm": "norm final_norm ln_f "
         "final_layernorm", "head": "lm_head output final_proj", "logits": "logits_processor", "rotary": "rotary_emb"}


@pytest.mark.parametrize("layer, table", [(0, NAMES), (None, OUTER)])
def test_the_names_that_engines_give(layer, table):
    for role, names in table.items():
        assert {name: role_of(layer, name) for name in names.split()} == dict.fromkeys(names.split(), role)


# Rows.

def places(*calls):
    texts = Texts()
    found = []
    for index, (ids, positions, sequences) in enumerate(calls):
        said = None if positions is None else torch.tensor(positions)
        call = texts.add_call(index, torch.tensor(ids), said, sequences)
        found.append([place for _, place in sorted(zip(call.rows, call.places))])
    return found, texts.notes


@pytest.mark.parametrize("calls, found, notes", [
    # One number for each line of a batch, as the engine counts them; the next batch has them the other way round.
    ([([[1, 2], [3, 4]], None, [7, 3]), ([[5], [6]], None, [3, 7])],
     [[(0, 0), (0, 1), (1, 0), (1, 1)], [(1, 2), (0, 2)]], 0),
    # Positions that leap are another text, of which the beginning is not there.
    ([([1, 2, 3, 4], [0, 1, 5, 6], None)], [[(0, 0), (0, 1), (1, 0), (1, 1)]], 1),
    ([([1, 2, 3], [0, 1, 1], None)], [[(0, 0), (0, 1), (1, 0)]], None),
    # Who has a number is nobody's whose tokens come without one.
    ([([1, 2], None, [4, 4]), ([9], None, None)], [[(0, 0), (0, 1)], [(1, 0)]], 0),
    ([([1, 2], None, [4, 4]), ([1, 2, 3], None, None)], [[(0, 0), (0, 1)], [(1, 0), (1, 1), (1, 2)]], 0),
    # Two alike at once are two.
    ([([[1, 2], [1, 2]], None, None), ([[1, 2, 3], [1, 2, 4]], None, None)],
     [[(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]], 0)])
def test_which_token_each_row_is(calls, found, notes):
    if notes is None:  # one token in the middle of nothing
        with pytest.raises(PlacementError, match="call 0: a single token at position 1 goes on with a text of which"):
            places(*calls)
        return
    assert places(*calls)[0] == found and len(places(*calls)[1]) == notes


@pytest.mark.parametrize("ids, sequences, words", [
    ([[1, 2, 3], [4, 5, 6]], [1] * 7, "call 0: 7 sequence numbers for 2 lines of 3 tokens"),
    ([1, 2, 3], [1] * 4, "call 0: 4 sequence numbers for 3 tokens; give one for each token"),
    ([1, 2, 3], [1] * 2, "call 0: 2 sequence numbers for 3 tokens"),
    ([1, 2, 3], [1], "call 0: 1 sequence numbers for 3 tokens")])
def test_sequence_numbers_that_fit_nothing(ids, sequences, words):
    with pytest.raises(PlacementError, match=words):
        places((ids, None, sequences))


@pytest.mark.parametrize("many, text", [(8, "[0, 1, 2, 3, 4, 5, 6, 7]"), (9, "[0, 1, 2, 3, 4, 5, 6, …]"), (1, "[0]")])
def test_many_ids_are_cut(many, text):
    assert _short(torch.arange(many)[None]) == text


# Sources.

def sources(*calls, **more):
    found = object.__new__(Sources)
    found.calls = [CallRows(index, *call) for index, call in enumerate(calls)]
    found._order_rows()
    vars(found).update(more)
    return found


PADDED = (2, 3, [0, 1, 2, 3, 4], [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)], [2, 4], [3, 3, 3, 2, 2])


def test_padding_behind_the_last_row_is_left_out():
    found = sources(PADDED)
    for look in ("whole", "few"):
        assert found._ordered([torch.arange(6)[:, None]], look).flatten().tolist() == [0, 1, 2, 3, 4]


def test_a_rank_is_complete_if_it_has_the_tensor_in_every_call():
    found = sources(ranks=[0, 1, 2], used=[0, 2])
    one = Source("a", "out", "", 1, 0, dict.fromkeys([(0, 0), (0, 2), (1, 0), (2, 0), (2, 1)]))
    assert found.complete(one) == [0]


def logits_of(found, *tensors):
    found._tensors = lambda source, rank, look: list(tensors)
    return found.logits(None, 0)


def test_logits_of_last_rows_stand_in_the_order_of_the_texts_in_their_call():
    two = (1, 3, [0, 2, 1], [(0, 0), (0, 1), (1, 0)], [2, 1], [2, 2, 1])  # tokens of two texts in turns
    one = (1, 2, [0, 1], [(0, 2), (1, 1)], [0, 1], [3, 2])
    last, next_ones = torch.tensor([[20.0], [10.0]]), torch.tensor([[30.0], [40.0]])
    where, found = logits_of(sources(two, one), last, next_ones)
    assert where == [(0, 1), (0, 2), (1, 0), (1, 1)] and found.flatten().tolist() == [20, 30, 10, 40]
    whole = torch.tensor([[0.0], [1.0], [2.0]])
    where, found = logits_of(sources(two, (1, 1, [0], [(0, 2)], [0], [3])), whole, torch.tensor([[9.0]]))
    assert where == [(0, 0), (0, 1), (0, 2), (1, 0)] and found.flatten().tolist() == [0, 2, 9, 1]
    where, found = logits_of(sources(two, (2, 2, [0, 1, 2, 3], [(0, 2), (0, 3), (1, 1), (1, 2)], [1, 3], [4, 4, 3, 3])),
                             whole, next_ones)
    assert where == [(0, 0), (0, 1), (0, 3), (1, 0), (1, 2)] and found.flatten().tolist() == [0, 2, 30, 1, 40]


def test_logits_that_are_none():
    call = (1, 3, [0, 1, 2], [(0, 0), (0, 1), (0, 2)], [2], [3, 3, 3])
    next_one = (1, 1, [0], [(0, 3)], [0], [4])
    assert logits_of(sources(call, next_one), torch.ones(2, 5), torch.ones(1, 5)) is None, "other rows"
    assert logits_of(sources(call, next_one), torch.ones(1, 5), torch.ones(1, 4)) is None, "of unlike sizes"
    assert logits_of(sources(call, next_one), torch.ones(3, 5), torch.ones(1, 4)) is None
    assert logits_of(sources()) is None, "of no call"


def test_a_module_that_runs_within_itself_is_counted_by_its_last_run():
    entries = [Some(name="rotary_emb", kind=kind, nth=nth)
               for kind, nth in (("in", 0), ("in", 1), ("out", 1), ("out", 0))]
    assert shared_modules(entries, 2) == {"rotary_emb": 1}


def given(*ranks, vocab=9):
    """Sources of these ranks' calls, ``(ids, positions)`` each."""
    entry = Some(dtype=F32, kind="tensor")
    recorded = {rank: {index: Some(index=index, status="done", entries=[entry] if ids or not index else [], left_out=(),
                                   raised=(), input_ids=None if ids is None else torch.tensor(ids), sequences=None,
                                   positions=None if said is None else torch.tensor(said))
                       for index, (ids, said) in enumerate(calls)} for rank, calls in enumerate(ranks)}
    found = object.__new__(Sources)
    vars(found).update(config=Some(vocab_size=vocab), notes=[], contradictions=[], ranks=[*recorded], texts=Texts(),
                       recorded=recorded)
    found._read_calls(Some(ranks=[Some(rank=rank, calls=[]) for rank in recorded]))
    return found


def test_ranks_that_were_given_something_else_than_the_first():
    found = given([([1, 2], [0, 1])], [([1, 3], [0, 1])], [([1, 2], [0, 2])])
    assert found.contradictions == [
        "call 0: rank 1 was given other token ids than rank 0: [1, 3], not [1, 2]",
        "call 0: rank 2 was given other positions than rank 0: [0, 2], not [0, 1]"]
    assert found.texts.ids == [[1, 2]] and found.calls[0].declared == [0, 1]
    late = given([([1, 2], None)], [([1, 2], [4, 5])], [([1, 2], [4, 6])])
    assert late.contradictions == ["call 0: rank 2 was given other positions than rank 1: [4, 6], not [4, 5]"]
    assert late.calls[0].declared == [4, 5], "of the first rank that said them"
    missing = given([([1], None), (None, None)], [([1], None), (None, None)])
    assert len(missing.calls) == 1, "a call about nothing in which nothing was recorded"


def test_the_last_token_of_the_vocabulary_is_one():
    assert given([([8], None)]).texts.ids == [[8]]
    with pytest.raises(PlacementError, match="call 0: token id 9 is not in the checkpoint's vocabulary: 0 to 8"):
        given([([8, 9], None)])


@pytest.mark.parametrize("rows, fine", [((6, 2), True), ((2,), True), ((6, 5, 5), True), ((5, 3, 5), False), ((), 1)])
def test_ids_must_be_those_of_what_was_recorded(rows, fine):
    """A call of 2 lines of 3 tokens: something of the hidden size has 6 rows, or the last of each of the 2 texts."""
    entries = [Some(shape=(many, 4), dtype=F32) for many in rows] + [Some(shape=(9, 4), dtype=torch.int64),
                                                                     Some(shape=(9, 5), dtype=F32)]
    found = sources(PADDED, recorded={0: {0: Some(entries=entries)}}, config=Some(hidden_size=4))
    if fine:
        found._check_rows()
    else:
        with pytest.raises(PlacementError, match="call 0 was said to be about 6 token ids, but .* it has 5 rows; rec"):
            found._check_rows()


# Sums.

@pytest.mark.parametrize("inputs, same", [
    ([[1.0, 2], [1, 2]], True), ([[1.0, 2], [1, 3]], False), ([[NAN, 2], [NAN, 2]], False), ([[1.0, 2], None], False),
    ([[1.0] * 4, [1.0] * 4], False)])  # all heads on each: a whole sum
def test_ranks_that_have_the_same_share_of_the_input(inputs, same):
    found = object.__new__(Sums)
    found.shares = Some(totals={"q": 4, "mlp": 9})
    found._input = lambda at, which, rank, source: None if inputs[rank] is None else torch.tensor([inputs[rank]])
    assert found._made_of_the_same(None, "o", "layers.0.", [0, 1]) is same


def test_what_can_be_taken_for_a_sum_or_its_summands_in_the_order_of_the_claims():
    found, claims = object.__new__(Sums), {"layers.1.o_proj": ["a", "d"], "layers.1.o": ["c", "b"], "embed": ["a", "b"],
                                           "layers.1.o_partial": [], "layers.1.down": ["c"], "norm": ["b"]}
    found.sources = Some(of=lambda name: list(claims.get(name, ())), rank_of=lambda source: source)
    found._is_summand = lambda source, which: (source, which) in (("b", "o"), ("c", "down"))
    found._is_masked = lambda source: source == "a"
    names = ("layers.1.o_proj", "layers.1.o_partial", "layers.1.mlp", "layers.1.mlp_partial", "embed", "norm")
    assert [found.sources_of(name) for name in names] == [["a", "c", "d"], ["b"], [], ["c"], ["b"], ["b"]]


def test_a_point_of_the_hidden_size_from_the_next_claim():
    found, kept = object.__new__(_Placing), []
    vars(found).update(unplaced={}, sums=Some(sources_of=lambda name: [Source("m.layers.1.x", "out", "", 1, 0),
                                                                      Source("m.layers.1.y", "in", "", 1, 1)]))
    found._rows = lambda source, look, kind: None if source.name.endswith("x") else {0: kind}
    found._keep = lambda name, source, sentence, build: kept.append((name, source.name, sentence, build()))
    found._hidden("layers.1.o_proj", "replicated")
    found._hidden("layers.1.o_partial", "partial")
    assert kept == [("layers.1.o_proj", "m.layers.1.y", "whole on every rank", {0: "replicated"}),
                    ("layers.1.o_partial", "m.layers.1.y", "one summand on each rank", {0: "partial"})]
    assert [why for _, why in found.unplaced] == ["rows or columns other than o_proj's", "rows or columns other than "
                                                  "o_partial's"]
    assert {what for what, _ in found.unplaced} == {"m.layers.{i}.x’s output"}


def test_logits_come_from_the_first_claim_that_the_layout_explains():
    found, checked = object.__new__(_Placing), []
    tensors = {"a": {0: torch.ones(2, 3), 1: torch.ones(2, 4)}, "b": {0: torch.ones(2, 3), 1: torch.ones(2, 3)}}
    claims = [Source(name, "out", "", 1, 0, {(0, 0): Some(dtype=F32)}) for name in tensors]
    vars(found).update(unplaced={}, points=_Points(2), dtypes={F32: 0}, assumed={}, learnt={})
    found.shares = Some(layouts={"vocab": Layout(((0, 1, 2), (3, 4, -1)), "said so")}, totals={"vocab": 5})
    found.sources = Some(of=lambda name: claims, complete=lambda source: [0, 1], places=[(0, 9)],
                         logits=lambda source, rank, look="whole": ([(0, 5), (0, 6)], tensors[source.name][rank]))
    found._check_joined = lambda kept, places, shards: checked.append((kept.name, places, len(shards)))
    assert found._logits() == [(0, 5), (0, 6)] and checked == [("b", [(0, 5), (0, 6)], 2)]
    assert found.assumed == {"logits": "from b’s output; said so"}
    assert [*found.unplaced] == [("a’s output", "rows or columns other than the logits'")]
    held = found.points["logits"]
    assert [tuple(shard.indices) for shard in held] == [(0, 1, 2), (3, 4)] and held[1].tensor.shape == (2, 2)
    assert len(found.points) == 1
    claims.pop()
    assert found._logits() == [(0, 9)], "none: as all other points have them"


# Shares.

PLAN = [(0, 1), (2, 3)]


@pytest.mark.parametrize("counts, found, says, wrong", [
    ([2, 2], PLAN, "heads dealt out by the plan's rule (rank 0: 0–1; rank 1: 2–3), as the values say", None),
    ([2, 2], [(2, 3), (0, 1)], "heads dealt out as the values say (rank 0: 2–3; rank 1: 0–1)", None),
    ([2, None], [(0, 1), (0, 1)], "heads dealt out by the plan's rule (rank 0: 0–1), as the values say", None),
    ([2, 2], [(0, 1), None], "heads dealt out by the plan's rule (rank 0: 0–1; rank 1: 2–3), which the values do not "
     "confirm", None),
    ([2, 2], [(0, 1), (1, 2)], "heads dealt out by the plan's rule (rank 0: 0–1; rank 1: 2–3), which the values do not "
     "confirm", None),
    ([1, 3], [(0,), (0, 1, 2)], "heads as the values say (rank 0: 0; rank 1: 0–2)",
     "heads cannot be dealt out as rank 0: 0; rank 1: 0–2: 3 on no rank and 0 more than once"),
    ([4, 4], [None, None], "all heads on every rank, by their number", None),
    ([1, 3], [None, None], "heads contiguous, by their number (rank 0: 0; rank 1: 1–3)", None),
    ([1, 2], [None, None], "heads contiguous, by their number (rank 0: 0; rank 1: 1–2)",
     "heads: rank 0 has 1, rank 1 has 2; 4 can be dealt out as 2, 2, or all on every rank. By their number rank 0: 0; "
     "rank 1: 1–2: 3 on no rank"),
    ([3, 2], [None, None], "", "heads: rank 0 has 3, rank 1 has 2; 4 can be dealt out as 2, 2, or all on every rank, "
     "and the values fit nothing else")])
def test_a_decision_in_words(counts, found, says, wrong):
    done = decide("heads", counts, PLAN, found, 4, lambda held: not_a_partition(held, 4))
    assert (done.sentence, done.contradiction or None) == (says, wrong)


def test_equal_shares_of_which_the_last_is_padded():
    done = decide("heads", [2, 2, 2], [(0, 1), (2,), (3, 4)], [None] * 3, 5, lambda held: "no")
    assert done.sentence == ("heads in equal shares, the last one padded (rank 0: 0–1; rank 1: 2–3; rank 2: 4 and "
                             "padding), by their number") and not done.contradiction


def shares(**more):
    found = object.__new__(Shares)
    vars(found).update(size=2, contradictions=[], _by_weight={}, config=Some(head_dim=2), **more)
    return found


def test_a_part_of_a_fused_output_on_every_rank_or_none():
    split = fused.Split([{"q": [0, 1], "k": [2, 3]}, {"q": [2, 3], "k": [0, 1]}], [4, 4], "said; ")
    rows = {0: torch.arange(4.0)[None], 1: torch.arange(4.0)[None] * 10}
    found = shares(splits={"qkv": split, "gate_up": split},
                   sources=Some(complete=lambda source: [0, 1], rows=lambda source, rank, look: rows[rank]))
    held = found._part(A, "qkv", "k", "whole")
    assert [held.tensors[rank].tolist() for rank in (0, 1)] == [[[[2, 3]]], [[[0, 10]]]] and held.sentence == "said; "
    assert found._part(A, "gate_up", "q", "whole").tensors[0].tolist() == [[0, 1]], "columns, no heads"
    for rank, wrong in ((1, None), (1, torch.ones(1, 6)), (0, torch.ones(1, 2))):
        kept, rows[rank] = rows[rank], wrong
        assert found._part(A, "qkv", "q", "whole") is None
        rows[rank] = kept
    found.splits["qkv"] = fused.Split([None, split.parts[1]], [4, 4])
    assert found._part(A, "qkv", "q", "whole") is None, "a rank where no cut fits"


@pytest.mark.parametrize("point, before, made", [
    ("q", "input_norm", "heads q"), ("v", "input_norm", "heads v"), ("gate", "post_norm", "columns gate"),
    ("up", "post_norm", "columns up"), ("mlp_act", "post_norm", "columns mlp_act"), ("q_rope", None, None),
    ("attn", None, None), ("k_norm", None, None)])
def test_what_a_ranks_own_input_says_of_a_point(point, before, made):
    found = shares(evidence=Some(heads=lambda layer, which, x: (layer, f"heads {which}", x),
                                 projection=lambda layer, which, x: (layer, f"columns {which}", x)))
    found.own_input = lambda source, name, rank: (name, rank)
    assert found._expected("layers.3.", point, A, 1) == (made and (3, made, (f"layers.3.{before}", 1)))
    found.own_input = lambda source, name, rank: None
    assert found._expected("layers.3.", point, A, 1) is None


def test_a_columns_source_is_read_as_rows_and_a_heads_one_as_heads():
    found = shares(sources=Some(complete=lambda source: [0, 1], rows=lambda source, rank, look: f"rows {look}",
                                heads=lambda source, rank, look: {"flat": f"heads {rank}"}))
    assert found._of(A, "layers.0.up", "few") == Held(A, {0: "rows few", 1: "rows few"})
    assert found._of(A, "layers.0.v", "few") == Held(A, {0: "heads 0", 1: "heads 1"})
    found.sources.heads = lambda source, rank, look: {} if rank else {"flat": 1}
    assert found._of(A, "layers.0.v", "few") is None


def test_a_cut_is_not_held_against_rows_that_cannot_be_read():
    """In the first of two layers the output has other rows; the second says how it was cut."""
    rows = {"layers.0.gate_up": None, "layers.1.gate_up": torch.tensor([[1.0, 3, 2, 4]])}
    found = Some(sampled=["layers.0.", "layers.1."], config=Some(hidden_act="relu"), sources=Some(
        of=lambda name: [name], complete=lambda source: [0], places=[(0, 0)],
        rows=lambda source, rank, look: rows.get(source, torch.tensor([[2.0, 12]]))))
    about = Some(shares=found, name="gate_up", before="post_norm", after="mlp_act")
    assert fused._made_of(about, 0, {"gate": [0, 1], "up": [2, 3]})
    assert not fused._made_of(about, 0, {"gate": [0, 2], "up": [1, 3]})


@pytest.mark.parametrize("x, y", [(None, torch.ones(2, 4)), (torch.ones(2, 4), None)])
def test_a_module_of_other_rows_is_nothing(x, y):
    entering, leaving = Some(name="in"), Some(name="blocks.0.mix")
    found = Some(complete=lambda source: [1], rows=lambda source, rank, look: y if source is leaving else x)
    assert _role(found, Some(config=Some(hidden_size=4), evidence=None), entering, leaving) is None


# A person's own words, and the verdict's.

def test_what_a_person_says_is_no_point_is_none(tmp_path):
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", "llama"))
    record_lab(tmp_path / "run", ckpt, [[1, 2, 3]], tp=1)
    recorded = read_recorded(tmp_path / "run")
    taken, left = (place.place(recorded, ckpt, names) for names in (None, {"norm": ""}))
    assert taken.assumed["norm"].startswith("from norm’s output") and "norm" in left.points
    assert left.assumed["norm"].startswith("from the model’s output"), "the next that claims it"
    assert left.unplaced == taken.unplaced, "left out on purpose"


def report(**local):
    diffs = {name: LocalDiff(name, 0.5, 1, 2e-5, guilty, unknown, perhaps) for name, (guilty, unknown, perhaps) in
             local.items()}
    points = [PointDiff(name, "replicated", (2, 4), 0.0, 0.0, 0.0, 0, 0, 8, 0.0, not diffs[name].guilty, 2e-5)
              for name in diffs]
    found = CheckReport("hand", None, F32, [[1]], points, {}, recording=Some(
        contradictions=["c"], points={name: ["a", None, "b"] for name in diffs}, assumed={"norm": "from x"},
        unplaced=["u"], notes=["n"], places=[(0, 0)], world_size=3), folder="run")
    found.local, found.diagnoses = diffs, []
    return found


def test_a_table_says_of_every_point_what_it_is_and_where_it_came_from():
    found = report(embed=((), True, ""), norm=((0,), False, ""), logits=((0, 2), False, "layers.0.q"))
    table = found.table()
    assert list(table.index) == ["embed", "norm", "logits"] and list(table["from"]) == ["", "from x", ""]
    assert list(table["says"]) == ["only NaN came in", "guilty (rank 0)",
                                   "guilty, or inherits from where layers.0.q has its error"]
    assert list(table["local"]) == [0.5] * 3 and list(table["tolerance"]) == [2e-5] * 3
    assert report(norm=((0, 2), False, "")).says("norm") == "guilty", "on every rank that has it"
    found.plan = Some(tensor_parallel_size=3, kind="uneven", rows=list)
    told = found.to_dict()
    keys = ("verdict", "contradictions", "notes", "unplaced", "assumed", "open")
    assert [told[key] for key in keys] == ["bug", ["c"], ["n"], ["u"], {"norm": "from x"}, []]
    assert [one["says"] for one in told["local"]] == list(table["says"]) and told["folder"] == "run"
