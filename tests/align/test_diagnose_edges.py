"""The factors of sums, residual streams, norms and the ends of the model: each is named, a near miss is not."""

from types import SimpleNamespace as Some

import pytest
import torch
from helpers.hand_cases import EPS, NEAR, TOLERANCE, At, HandCase, misfit, named, noise

from tplab.align.arithmetic import rms_norm
from tplab.align.diagnose import ends, norms, residuals, sums


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    from tplab.align.diagnose import wrong
    monkeypatch.setattr(wrong, "misfit", misfit)  # best, explains and fitted ask it
    for module in (sums, residuals, norms, ends):
        if hasattr(module, "right"):
            monkeypatch.setattr(module, "right", At)


# Sums.

PARTS = [noise(5, 8, seed=rank) for rank in range(3)]


def summed(factors, op="o_proj", near=1.0, **more):
    """Rank r holds the sum of ``factors[r][i]`` times rank i's summand."""
    tp = len(factors)
    held = [sum(n * part for n, part in zip(row, PARTS)) * near for row in factors]
    partial = {"o_proj": "o_partial", "mlp": "mlp_partial"}[op]
    return HandCase(op, held, [{partial: PARTS[rank]} for rank in range(tp)], [sum(PARTS[:tp])] * tp, **more)


@pytest.mark.parametrize("op", ["o_proj", "mlp"])
@pytest.mark.parametrize("factors, fault", [
    ([(.5, .5), (.5, .5)], "all_reduce_average"), ([(2, 2), (2, 2)], "all_reduce_twice"),
    ([(1 / 3,) * 3] * 3, "all_reduce_average"), ([(3,) * 3] * 3, "all_reduce_twice"), ([(2,) * 3] * 3, "no name"),
    ([(1, 1), (1, 0)], "all_reduce_subset"), ([(1, 0), (1, 0)], "all_reduce_subset"),
    ([(0, 1), (1, 0)], "all_reduce_subset"), ([(1, 1), (1, 2)], "no name"), ([(1, 1), (.5, .5)], "no name"),
    ([(1, 1), (1, -1)], "no name"), ([(1, 1), (1, 1)], None), ([(1, 0), (0, 1)], None), ([(1, 1), (0, 0)], None),
    ([(1, 1), (1.25, 1)], None), ([(1,)], None), ([(2,)], None)])
def test_another_sum_of_the_summands(op, factors, fault):
    found = sums.another_sum_of_the_parts(summed(factors, op))
    assert named(found) == fault
    assert sums.another_sum_of_the_parts(summed(factors, op, NEAR)) is None
    if fault == "all_reduce_subset":
        rank = next(rank for rank, row in enumerate(factors) if set(row) != {1})
        assert found.numbers == {"rank": rank}
        assert f"ranks {[i for i, n in enumerate(factors[rank]) if n]} only" in found.sentence
    if fault in ("all_reduce_twice", "all_reduce_average"):
        assert found.numbers == {"times" if "twice" in fault else "ranks": len(factors)}


def test_a_sum_that_is_no_number_is_no_other_sum():
    case = summed([(2, 2), (2, 2)])
    case.held[1][0, 0] = float("nan")
    assert sums.another_sum_of_the_parts(case) is None
    case.held[1] = 2 * sum(PARTS[:2]) + noise(5, 8, seed=9)
    assert sums.another_sum_of_the_parts(case) is None, "one rank's is one, the other's is not"


@pytest.mark.parametrize("times, tp, fault", [(2, 2, "all_reduce_twice"), (.5, 2, "all_reduce_average"), (2, 3, None),
                                              (1 / 3, 3, "all_reduce_average"), (1, 1, None), (2, 1, None)])
def test_a_sum_that_was_not_recorded_itself(times, tp, fault):
    case = summed([(times,) * tp] * tp)
    case.point = "residual"
    case.op, case.expected = "o_proj", None
    case.values = [{"o_proj": sum(PARTS[:tp])}] * tp
    assert named(sums.another_sum_of_the_parts(case)) == fault


@pytest.mark.parametrize("logs, names", [
    ((), ("all_reduce_missing", "all_reduce_dropped")), ((3, 3), ("all_reduce_dropped",)),
    ((4, 3), ("all_reduce_dropped",)), ((3, 2), ("all_reduce_missing",)), ((0, 0), ("all_reduce_missing",))])
def test_the_op_log_says_whether_a_sum_was_made(logs, names):
    logs = [[Some(op="all_reduce")] * n + [Some(op="all_gather")] * 5 for n in logs]
    found = sums.not_reduced(summed([(1, 0), (0, 1)], logs=logs))
    assert found.names == names and found.numbers["wanted"] == 3
    assert sums.not_reduced(summed([(1, 0), (0, 1)], near=NEAR, logs=logs)) is None
    assert sums.not_reduced(summed([(1, 1), (0, 1)], logs=logs)) is None, "rank 0 has the sum"


# The residual stream.

POINTS = {name: noise(6, 16, seed=seed) for seed, name in enumerate(
    ("before", "input_norm", "o_proj", "residual", "post_norm", "mlp"))}


@pytest.mark.parametrize("point, times, tp, fault", [
    ("residual", {"o_proj": 1}, 2, "residual_missing"), ("residual", {"before": 1}, 2, "sublayer_missing"),
    ("residual", {"before": 2}, 2, "sublayer_missing"),
    ("residual", {"before": 2, "o_proj": 1}, 2, "residual_on_every_rank"),
    ("residual", {"before": 3, "o_proj": 1}, 3, "residual_on_every_rank"),
    ("residual", {"before": 2, "o_proj": 1}, 3, "no name"), ("residual", {"before": 2, "o_proj": 1}, 1, "no name"),
    ("residual", {"before": 2, "o_proj": 2}, 2, "no name"), ("residual", {"before": 1, "o_proj": -1}, 2, "no name"),
    ("residual", {"input_norm": 1, "o_proj": 1}, 2, "residual_wrong_place"),
    ("residual", {"before": 1, "o_proj": 1, "input_norm": 1}, 2, "no name"),
    ("residual", {"before": 1, "o_proj": 1}, 2, None), ("residual", {"before": 1.25, "o_proj": 1}, 2, None),
    ("output", {"mlp": 1}, 2, "residual_missing"), ("output", {"residual": 1}, 2, "sublayer_missing"),
    ("output", {"post_norm": 1, "mlp": 1}, 2, "residual_wrong_place"),
    ("output", {"before": 1, "mlp": 1}, 2, "residual_wrong_place"),
    ("output", {"residual": 1, "mlp": 1, "o_proj": 1}, 2, "parallel_sublayers"),
    ("output", {"residual": 1, "mlp": 1, "o_proj": 2}, 2, "no name"),
    ("output", {"residual": 1, "mlp": 1, "before": 1}, 2, "no name"),
    ("output", {"residual": 1, "mlp": 1, "before": 1}, 1, "no name")])
def test_another_sum_in_the_residual_stream(point, times, tp, fault):
    def case(near=1.0):
        held = [sum(n * POINTS[name] for name, n in times.items()) * near] * tp
        return HandCase(point, held, [POINTS] * tp)
    assert named(residuals.another_sum(case())) == fault
    assert residuals.another_sum(case(NEAR)) is None


@pytest.mark.parametrize("tp, fault", [(1, "no name"), (2, "residual_on_every_rank"), (3, "no name")])
def test_the_first_layers_output_is_no_scaled_embedding(tp, fault):
    held = [2 * POINTS["residual"] + POINTS["mlp"]] * tp
    found = residuals.another_sum(HandCase("output", held, [POINTS] * tp, layer="layers.0"))
    assert named(found) == fault and "is 2 × the residual stream + the MLP's output" in found.sentence


@pytest.mark.parametrize("times, whole, scaled", [(4.0, None, True), (3.7, None, True), (2.0, "residual_on_every_rank",
                                                                                         True)])
def test_embeddings_that_were_scaled(times, whole, scaled):
    def case(layer, near=1.0):
        return HandCase("residual", [(times * POINTS["before"] + POINTS["o_proj"]) * near] * 2, [POINTS] * 2,
                        layer=layer)
    assert named(residuals.another_sum(case("layers.0"))) == whole
    assert residuals.scaled_behind_the_embedding(case("layers.0")).numbers["times"] == pytest.approx(times)
    assert residuals.scaled_behind_the_embedding(case("layers.1")) is None
    off = case("layers.0")
    off.held = [held + 4 * TOLERANCE * held.abs().max() * noise(6, 16, seed=9).sign() for held in off.held]
    assert residuals.scaled_behind_the_embedding(off) is None


# Norms.

X = noise(6, 16, seed=11) * torch.tensor([1e-3, 0.01, 0.1, 1, 2, 5], dtype=torch.float64)[:, None] + 2e-3
WEIGHT = 1 + 0.3 * noise(16, seed=12)


def norm_case(held, x=X):
    values = {"before": x, "input_layernorm.weight": WEIGHT}
    return HandCase("input_norm", [held], [values], [rms_norm(x, WEIGHT, EPS)])


def divided(x, by):
    return WEIGHT * x / by


@pytest.mark.parametrize("hypothesis, held, fault", [
    (norms.norm_left_out, X, "norm_missing"), (norms.norm_left_out, X * WEIGHT, "norm_missing"),
    (norms.another_kind_of_norm, rms_norm(X, torch.ones_like(WEIGHT), EPS), "norm_weight_missing"),
    (norms.another_kind_of_norm, rms_norm(X, 1 + WEIGHT, EPS), "norm_plus_one"),
    (norms.another_kind_of_norm, rms_norm(X - X.mean(-1, keepdim=True), WEIGHT, EPS), "layer_norm"),
    (norms.another_kind_of_norm, divided(X, (X.var(-1, keepdim=True) + EPS).sqrt()), "norm_by_deviation"),
    (norms.another_kind_of_norm, rms_norm(rms_norm(X, WEIGHT, EPS), WEIGHT, EPS), "norm_twice"),
    (norms.another_epsilon, rms_norm(X, WEIGHT, 1e-3), "norm_epsilon"),
    (norms.another_epsilon, divided(X, X.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3), "norm_epsilon")])
def test_a_wrong_norm(hypothesis, held, fault):
    assert named(hypothesis(norm_case(held))) == fault
    wild = held + 4 * TOLERANCE * held.abs().max() * noise(6, 16, seed=9).sign()
    assert hypothesis(norm_case(wild)) is None


@pytest.mark.parametrize("epsilon, says", [(1e-3, "."), (1e-8, "."), (0.5, "."), (200.0, ".")])
def test_the_epsilon_that_was_used_is_told(epsilon, says):
    found = norms.another_epsilon(norm_case(rms_norm(X, WEIGHT, epsilon)))
    assert found.numbers["epsilon"] == pytest.approx(epsilon, rel=0.05) and "outside" not in found.sentence


@pytest.mark.parametrize("more, named_so", [(0.04, False), (0.06, True)])
def test_rows_must_be_of_two_sizes_to_tell_an_epsilon(more, named_so):
    x = torch.ones(2, 16, dtype=torch.float64)
    x[1] *= (1 + more) ** 0.5
    found = norms.another_epsilon(norm_case(rms_norm(x, WEIGHT, 0.5), x))
    assert (found is not None) is named_so


# The ends of the model.

TABLE = noise(8, 16, seed=21)
IDS = torch.tensor([0, 3, 4, 7, 5])


def embed_case(change, tp=2, ids=IDS):
    size = 8 // tp
    plan = [Some(rank=rank, vocab=range(rank * size, (rank + 1) * size)) for rank in range(tp)]
    case = HandCase("embed", [change(TABLE[ids], ids, shard) for shard in plan],
                    [{"model.embed_tokens.weight": TABLE}] * tp, [TABLE[ids]] * tp, layer="")
    case.plan, case.ids = Some(ranks=plan), ids
    case.ours = lambda name: case.held[0]
    return case


def own(x, ids, shard):
    return x * ((ids >= shard.vocab.start) & (ids < shard.vocab.stop))[:, None]


@pytest.mark.parametrize("change, tp, fault", [
    (own, 2, "all_reduce_missing"), (own, 4, "all_reduce_missing"), (lambda x, *_: 2 * x, 2, "all_reduce_twice"),
    (lambda x, *_: x / 2, 2, "all_reduce_average"), (lambda x, *_: x / 4, 4, "all_reduce_average"),
    (lambda x, *_: 2 * x, 4, None), (own, 1, None), (lambda x, *_: x / 1, 1, None)])
def test_embeddings_over_ranks(change, tp, fault):
    assert named(ends.embeddings_not_added_up(embed_case(change, tp))) == fault
    assert ends.embeddings_not_added_up(embed_case(lambda *given: change(*given) * NEAR, tp)) is None


@pytest.mark.parametrize("times, named_so", [(4.0, True), (0.25, True), (4.001, False), (2.0, False), (16.0, False)])
def test_embeddings_times_the_root_of_the_width(times, named_so):
    found = ends.scaled_embeddings(embed_case(lambda x, *_: x * times))
    assert named(found) == ("embedding_scale" if named_so else None) and (not found or found.numbers["times"] == times)


def test_tokens_looked_up_at_their_global_number():
    looked = torch.tensor([0, 3, 7, 7, 7])  # rank 1 begins at 4, and its last row is 7
    found = ends.offset_not_subtracted(embed_case(lambda *_: TABLE[looked]))
    assert found.fault == "vocab_offset" and found.numbers == {"tokens": 2}
    assert ends.offset_not_subtracted(embed_case(lambda *_: TABLE[looked] * NEAR)) is None
    assert ends.offset_not_subtracted(embed_case(lambda x, *_: x)) is None
    assert ends.offset_not_subtracted(embed_case(lambda x, *_: x, ids=torch.tensor([0, 3, 7]))) is None


LOGITS = [3 * noise(5, 8, seed=31), 3 * noise(5, 8, seed=32)]


def head_case(change, **config):
    case = HandCase("logits", [change(x) for x in LOGITS], [{}, {}], LOGITS, layer="", **config)
    case.plan = Some(ranks=[Some(rank=rank, vocab=range(8 * rank, 8 * rank + 8)) for rank in range(2)])
    return case


@pytest.mark.parametrize("change, fault, number", [
    (lambda x: 0.5 * x, "logits_scale", 0.5), (lambda x: 7 * x, "logits_scale", 7), (lambda x: -x, None, 0),
    (lambda x: 30 * torch.tanh(x / 30), "logits_softcap", 30), (lambda x: 5 * torch.tanh(x / 5), "logits_softcap", 5),
    (lambda x: x * (x > 0), None, 0), (lambda x: 0 * x, None, 0), (lambda x: x * float("nan"), None, 0)])
def test_logits_scaled_or_capped(change, fault, number):
    found = ends.changed_logits(head_case(change))
    assert named(found) == fault and (not found or [*found.numbers.values()] == [pytest.approx(number, rel=1e-3)])
    wild = 8 * TOLERANCE * max(change(x).abs().max().item() for x in LOGITS) * noise(5, 8, seed=9).sign()
    assert ends.changed_logits(head_case(lambda x: change(x) + wild)) is None


@pytest.mark.parametrize("tied, fault", [(True, "tie_ignored"), (False, "weight_not_loaded")])
def test_logits_of_nothing(tied, fault):
    assert ends.empty_head(head_case(lambda x: 0 * x, tie_word_embeddings=tied)).fault == fault
    assert ends.empty_head(head_case(lambda x: x * (x == x.max()), tie_word_embeddings=tied)) is None


@pytest.mark.parametrize("likeness, named_so", [(0.29, True), (-0.29, True), (0.31, False), (-0.31, False)])
def test_logits_that_have_nothing_to_do_with_the_right_ones(likeness, named_so):
    right = torch.cat(LOGITS, 1)
    right = (right - right.mean()) / (right - right.mean()).norm()
    other = noise(5, 16, seed=40)
    other -= other.mean()
    other -= (other * right).sum() * right
    both = likeness * right + (1 - likeness ** 2) ** 0.5 * other / other.norm() + 3
    case = head_case(lambda x: x)
    case.held = [both[:, :8], both[:, 8:]]
    found = ends.unrelated_head(case)
    assert (found is not None) is named_so and (not found or found.numbers["correlation"] == pytest.approx(likeness))
    assert ends.unrelated_head(head_case(lambda x: 0 * x)) is None


def test_ranks_that_stand_in_each_others_place():
    swapped = head_case(lambda x: x)
    swapped.held = LOGITS[::-1]
    assert ends.ranks_exchanged(swapped).fault == "shard_of_another_rank"
    swapped.held = [LOGITS[1], LOGITS[0] * NEAR]
    assert ends.ranks_exchanged(swapped) is None


def order_case(orders, decode=True, change=lambda x: x):
    """Ranks that look the tokens of a step up in these orders of the sequences; each holds two rows of eight."""
    tp, ids = len(orders), {(0, 0): 0, (0, 1): 3, (1, 0): 5, (2, 0): 6}
    places = sorted(ids)
    case = HandCase("embed", [None] * tp, [{"model.embed_tokens.weight": TABLE}] * tp, layer="")
    case.plan = Some(ranks=[Some(rank=rank, vocab=range(rank * 8 // tp, (rank + 1) * 8 // tp)) for rank in range(tp)])
    rows = [[place for number in order for place in places if place[0] == number] for order in orders]
    held = sum(own(TABLE[[ids[place] for place in row]], torch.tensor([ids[place] for place in row]), shard)
               for row, shard in zip(rows, case.plan.ranks))
    case.places = rows[0]
    case.ours = lambda name: change(held)
    case.token_ids = lambda some: torch.tensor([ids[place] for place in some])
    requests = [Some(request_id=number, segment=Some(start=0, count=sum(place[0] == number for place in places)))
                for number in orders[0]]
    case.report = Some(decode=Some(steps=[Some(step_number=4, requests=requests)]) if decode else None)
    return case


@pytest.mark.parametrize("orders, rank", [
    ([(0, 1, 2), (1, 0, 2)], 1), ([(0, 1, 2), (0, 2, 1)], 1), ([(2, 0, 1), (0, 1, 2), (2, 0, 1), (0, 1, 2)], 1),
    ([(0, 1, 2)] + [(2, 1, 0)] * 3, 1), ([(0, 1, 2)] * 2, None), ([(0, 1, 2), (0, 1, 2), (1, 0, 2), (2, 0, 1)], None)])
def test_sequences_in_another_order_on_other_ranks(orders, rank):
    found = ends.rows_in_other_orders(order_case(orders))
    assert named(found) == (None if rank is None else "row_order")
    assert not found or found.numbers == {"step": 4, "rank": rank}
    first, other = map(list, orders[:2])
    assert not found or f"in the order {first}, rank 1 in the order {other}" in found.sentence
    assert ends.rows_in_other_orders(order_case(orders, decode=False)) is None
    assert ends.rows_in_other_orders(order_case(orders, change=lambda x: x + 0.1)) is None
