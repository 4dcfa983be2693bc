"""The two ends of a real run: embeddings and logits with something else in them, by name and number."""

from types import SimpleNamespace as Some

import pytest
import torch
from helpers.real_cases import TEXTS, RealRun, asked, asks_for

IDS = torch.tensor(sum(TEXTS, []))
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A vocabulary of 67 over 3 ranks: 23, 22 and 22 rows; a head of its own."""
    return RealRun(tmp_path_factory.mktemp("model") / "m", tp=3, layers=2, heads=6, kv_heads=3, hidden=48)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return RealRun(tmp_path_factory.mktemp("model") / "m", tp=2, layers=2, heads=4, kv_heads=2, hidden=32, tie=True)


def own(run, rank):
    """Which ids are of a rank's own rows, ``[rows, 1]``."""
    rows = run.plan.ranks[rank].vocab
    return ((IDS >= rows.start) & (IDS < rows.stop))[:, None]


def test_the_ends_by_hand_are_right(run):
    for rank in range(3):
        assert torch.equal(run.w(EMBED)[IDS], run.x("embed", rank))
        rows = run.plan.ranks[rank].vocab
        logits = run.x("norm", rank) @ run.w(HEAD)[rows.start:rows.stop].T
        assert torch.allclose(logits, run.x("logits", rank), atol=1e-5)


def test_rows_that_were_looked_up_at_their_global_number(run):
    held = torch.zeros(12, 48)
    for rank in range(3):
        rows = run.plan.ranks[rank].vocab
        there = run.w(EMBED)[rows.start:rows.stop]
        held += there[IDS.clamp(max=len(rows) - 1)] * own(run, rank)
    found = asked(run, asks_for("vocab_offset"), [held] * 3, "embed")
    wrong = sum(23 <= token < 66 for token in IDS.tolist())  # the last row is right by chance
    assert found.fault == "vocab_offset" and found.numbers == {"tokens": wrong}


def test_embeddings_that_were_not_added_up(run):
    held = [run.w(EMBED)[IDS] * own(run, rank) for rank in range(3)]
    assert asked(run, asks_for("all_reduce_missing", "all_reduce_twice"), held, "embed").fault == "all_reduce_missing"


@pytest.mark.parametrize("times, fault", [(3, "all_reduce_twice"), (1 / 3, "all_reduce_average")])
def test_embeddings_that_were_added_up_otherwise(run, times, fault):
    found, near = (asks_for("all_reduce_missing", "all_reduce_twice")(run.case("embed", run.changed(
        "embed", lambda x, rank, number=number: x * number))) for number in (times, times * 1.001))
    assert near.fault == "embedding_scale"
    assert found.fault == fault and found.numbers == {"times": times}


@pytest.mark.parametrize("times", [48 ** 0.5, 48 ** -0.5, 3.7])
def test_embeddings_times_a_number(run, times):
    found = asks_for("embedding_scale")(run.case("embed", run.changed("embed", lambda x, rank: x * times)))
    assert found.fault == "embedding_scale" and found.numbers == {"times": pytest.approx(times)}


@pytest.mark.parametrize("shift", [1, -1])
def test_embeddings_of_the_token_beside(run, shift):
    held = run.changed("embed", lambda x, rank: torch.cat([part.roll(shift, 0) for part in x.split([7, 5])]))
    found = asked(run, asks_for("ids_shifted", "rows_shifted"), held, "embed")
    assert found.fault == "ids_shifted" and found.numbers == {"shift": shift}


def stepped(*steps):
    """Steps that computed ``(prompt, start, count)``, in their order."""
    return Some(steps=[Some(step_number=number, requests=[Some(request_id=p, segment=Some(start=start, count=count))
                                                          for p, start, count in step])
                       for number, step in enumerate(steps, 4)])


STEPS = stepped([(0, 0, 3), (1, 0, 2)], [(0, 3, 1), (1, 2, 1)], [(1, 3, 2), (0, 4, 3)])


@pytest.mark.parametrize("step, rows, ranks", [(1, [9, 3], (1, 2)), (2, [4, 5, 6, 10, 11], (1, 2)), (1, [9, 3], (1,)),
    (0, [7, 8, 0, 1, 2], (1, 2))])
def test_ranks_that_hold_the_rows_of_a_step_in_another_order(run, step, rows, ranks):
    ids, right = IDS.clone(), run.w(EMBED)[IDS]
    ids[[[0, 1, 2, 7, 8], [3, 9], [10, 11, 4, 5, 6]][step]] = IDS[rows]
    held = torch.zeros(12, 48)
    for rank in range(3):
        mine = run.plan.ranks[rank].vocab
        its = ids if rank in ranks else IDS
        held += run.w(EMBED)[its] * ((its >= mine.start) & (its < mine.stop))[:, None]
    assert not torch.equal(held, right)
    found = asked(run, asks_for("row_order"), [held] * 3, "embed", decode=STEPS)
    assert found.fault == "row_order" and found.numbers == {"step": step + 4, "rank": 1}
    assert asks_for("row_order")(run.case("embed", [held] * 3)) is None, "of a plain pass nothing is known"


# Logits.

def parts(run, logits):
    return [logits[:, shard.vocab.start:shard.vocab.stop] for shard in run.plan.ranks]


def right(run):
    return run.x("norm", 0) @ run.w(HEAD if HEAD in run.weights else EMBED).T


def test_the_head_is_the_embedding(run, tied):
    held = parts(run, run.x("norm", 0) @ run.w(EMBED).T)
    found = asked(run, asks_for("head_tied"), held, "logits")
    assert found.fault == "head_tied"
    other = parts(tied, right(tied) + 1)
    assert asks_for("head_tied")(tied.case("logits", other)) is None, "there it is right"


@pytest.mark.parametrize("value", [0.0, float("-inf")])
def test_tokens_that_have_no_row(run, value):
    logits = right(run)
    logits[:, [30, 45, 66]] = value
    found = asked(run, asks_for("vocab_rows_missing"), parts(run, logits), "logits")
    assert found.fault == "vocab_rows_missing" and found.numbers == {"tokens": 3}


@pytest.mark.parametrize("times", [0.137, 2.0, 1.01])
def test_logits_times_a_number(run, times):
    found = asks_for("logits_scale")(run.case("logits", parts(run, times * right(run))))
    assert found.fault == "logits_scale" and found.numbers == {"times": pytest.approx(times, rel=1e-5)}
    assert asks_for("logits_scale")(run.case("logits", parts(run, -right(run)))) is None


@pytest.mark.parametrize("share", [1.5, 3.0, 20.0])
def test_logits_that_were_capped(run, share):
    cap = right(run).abs().max().item() * share
    found = asked(run, asks_for("logits_scale"), parts(run, cap * torch.tanh(right(run) / cap)), "logits", near=1.001)
    assert found.fault == "logits_softcap" and found.numbers == {"cap": pytest.approx(cap, rel=1e-2)}


@pytest.mark.parametrize("taken, rank", [((0, 2, 1), 1), ((0, 1, 1), 2)])
def test_a_rank_with_the_logits_of_another(run, taken, rank):
    """Ranks 1 and 2 have 22 rows each."""
    whole = parts(run, right(run))
    found = asked(run, asks_for("shard_of_another_rank"), [whole[other] for other in taken], "logits")
    assert found.fault == "shard_of_another_rank" and found.numbers == {"rank": rank, "taken": taken[rank]}
    assert asks_for("head_rows")(run.case("logits", [whole[other] for other in taken])) is None


@pytest.mark.parametrize("change, wanted, row", [(lambda rows: rows.roll(1), 0, 66),
    (lambda rows: torch.cat([rows[:23].flip(0), rows[23:]]), 0, 22),
    (lambda rows: torch.cat([rows[:50], rows[50:51], rows[52:53], rows[51:52], rows[53:]]), 51, 52)])
def test_logits_of_other_tokens(run, change, wanted, row):
    held = parts(run, right(run)[:, change(torch.arange(67))])
    found = asked(run, asks_for("head_rows"), held, "logits")
    assert found.fault == "head_rows"
    assert (found.numbers["wanted"], found.numbers["row"]) == (wanted, row)


@pytest.mark.parametrize("name, fault, more", [("run", "weight_not_loaded", ""), (
    "tied", "tie_ignored", " This model ties it to the embedding.")])
def test_a_head_of_zeros(request, name, fault, more):
    run = request.getfixturevalue(name)
    held = parts(run, 0 * right(run))
    found = asks_for("tie_ignored")(run.case("logits", held))
    assert found.fault == fault
    held[1][3, 2] = 1e-3
    assert asks_for("tie_ignored")(run.case("logits", held)) is None
    assert asks_for("logits_scale")(run.case("logits", parts(run, 0 * right(run)))) is None


@pytest.mark.parametrize("share, random", [(0.0, True), (0.25, True), (0.35, False), (-0.25, True), (-0.35, False)])
def test_a_head_that_has_nothing_to_do_with_it(run, share, random):
    """Logits of which ``share`` is the right ones'."""
    there = right(run).double()
    there = (there - there.mean()) / (there - there.mean()).norm()
    other = torch.randn(there.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    other -= other.mean() + (other * there).sum() * there
    held = share * there + (1 - share ** 2) ** 0.5 * other / other.norm()
    found = asks_for("head_random")(run.case("logits", parts(run, held)))
    assert (found is not None) is random
    if random:
        assert found.fault == "head_random" and found.numbers == {"correlation": pytest.approx(share, abs=1e-5)}


def test_logits_of_the_token_beside_and_of_too_few_digits(run):
    held = run.changed("logits", lambda x, rank: torch.cat([part.roll(1, 0) for part in x.split([7, 5])]))
    assert asked(run, asks_for("ids_shifted", "rows_shifted"), held, "logits").fault == "rows_shifted"
    held = run.changed("logits", lambda x, rank: x.to(torch.float16).float())
    assert asked(run, asks_for("low_precision"), held, "logits").fault == "low_precision"


# Sums.

@pytest.mark.parametrize("part, whole", [("o_partial", "o_proj"), ("mlp_partial", "mlp")])
def test_each_rank_goes_on_with_its_own_summand(run, part, whole):
    at = "layers.1."
    held = [run.x(at + part, rank) for rank in range(3)]
    found = asked(run, asks_for("all_reduce_dropped"), held, at + whole)
    assert found.names[:2] == ("all_reduce_missing", "all_reduce_dropped") and found.numbers["wanted"] == 5
    logs = [[Some(op="all_reduce", started=False)] * 5] * 3
    found = asks_for("all_reduce_dropped")(run.case(at + whole, held, logs=logs))
    assert found.names == ("all_reduce_dropped",) and found.numbers == {"spread": 0.0, "wanted": 5, "done": 5}
    found = asks_for("all_reduce_dropped")(run.case(at + whole, held, logs=[logs[0], logs[0][1:], logs[0]]))
    assert found.names == ("all_reduce_missing",)
    started = [[Some(op="all_reduce", started=True)] * 5] * 3
    assert asks_for("all_reduce_dropped")(run.case(at + whole, held, logs=started)).names == ("read_before_wait",)
    hidden = run.case(at + whole, held, hide=(part,))
    assert asks_for("all_reduce_dropped")(hidden).fault == "all_reduce_missing", "the summands were not recorded"


def test_the_part_of_another_rank(run):
    at = "layers.1."
    parts = {rank: [5 * 0 + i for i in run.own(at + "attn", rank)] for rank in range(3)}
    weight = run.w("model.layers.1.self_attn.o_proj.weight")
    columns = {rank: torch.tensor([head * 8 + j for head in heads for j in range(8)]) for rank, heads in parts.items()}
    held = [run.x(at + "attn", rank).flatten(1) @ weight[:, columns[(rank + 1) % 3]].T for rank in range(3)]
    found = asked(run, asks_for("shard_of_another_rank"), held, at + "o_partial")
    assert found.fault == "shard_of_another_rank" and found.numbers == {"rank": 0, "taken": 1}
