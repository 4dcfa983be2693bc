"""What a search with mutations found open: comparison, floors and spread on tensors made by hand; mistakes where only
k, only one layer, only some ranks or only some prompts are wrong."""

import dataclasses

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.faults import prompts
from helpers.reports import with_point

from tplab.align import AlignError, align, align_decode, diagnose, hf_greedy
from tplab.align.diagnose.case import Case
from tplab.align.gather import whole_point
from tplab.align.recording import Shard
from tplab.align.report import compare
from tplab.checkpoint import open_checkpoint
from tplab.faults import fault
from tplab.model import attention
from tplab.patch import Patch, original
from tplab.ranks import OpRecord, RankError, rank
from tplab.ranks.errors import Cause

ATTENTION = "tplab.model.attention.TensorParallelAttention"
REDUCE = "tplab.shard.linear.RowParallelLinear.reduce"
POSITIONS = "tplab.engine.runner.token_positions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("search") / "m", "qwen2", heads=6, kv_heads=3, hidden=48)


def broken(target, replacement, model="fable", tp=2, **options):
    return align(model, prompts(67), tensor_parallel_size=tp, patches=[Patch(target, replacement)], logical=True,
                 **options)


# The comparison.

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_difference_is_measured_on_the_largest_magnitude_of_the_reference(dtype):
    right = torch.tensor([[0.0, -8.0], [1.0, 2.0]], dtype=dtype)
    floor = {torch.float32: 2e-5, torch.float64: 2e-7, torch.bfloat16: 0.4}[dtype]
    for factor, inside in ((0.9, True), (1.2, False)):
        ours = right.clone()
        ours[1, 1] += factor * floor * 8
        assert compare("norm", ours, right, 0.0, dtype).inside == inside
        assert compare("norm", right, right, factor * floor * 8, dtype).inside == inside, "the spread counts as much"
    huge = compare("norm", right * 100, right, 0.0, dtype)
    assert huge.relative == pytest.approx(99) and not huge.inside, "tplab's own scale explains nothing"
    assert huge.mean_abs == pytest.approx(99 * 11 / 4) and huge.max_abs == 99 * 8


@pytest.mark.parametrize("dtype, floor", [(torch.float32, 2e-5), (torch.float64, 1e-5), (torch.bfloat16, 0.4)])
def test_the_decode_path_has_its_own_floor(dtype, floor):
    right = torch.ones(2, 2, dtype=dtype)
    for factor, inside in ((0.9, True), (1.2, False)):
        ours = right.clone()
        ours[0, 1] += factor * floor
        for name in ("norm", "logits"):
            assert compare(name, ours, right, 0.0, dtype, decode=True).inside == inside


@pytest.mark.parametrize("odd", [1, 2, 3])
def test_whichever_rank_disagrees_is_seen(odd):
    def replicated(*tensors):
        return whole_point("norm", [Shard(tensor, "replicated") for tensor in tensors])

    shards = [torch.ones(3, 8) for _ in range(4)]
    shards[odd][1, 2] = 1.5
    assert replicated(*shards)[1] == 0.5
    heads = [torch.ones(3, 1, 2) for _ in range(4)]
    heads[odd][2, 0, 1] = 3.0
    whole, spread, held = whole_point("layers.0.k", [Shard(head, "kv_heads", range(1)) for head in heads])
    assert spread == 2 and torch.equal(whole, torch.ones(3, 1, 2)) and held == [0]
    for same in ([torch.full((3, 8), float("nan"))] * 4, [torch.full((3, 8), float("inf"))] * 4):
        assert replicated(*same)[1] == 0, "all ranks agree on what is lost"
    assert replicated(torch.ones(3, 8), *[torch.full((3, 8), float("nan"))] * 3)[1] == float("inf")


def test_the_reports_totals_are_over_all_points(folder):
    clean = align(folder, [1, 2, 3], logical=True)
    apart = dataclasses.replace(clean.points[3], spread=7.0, nan=2, inf=4, inside=False)
    later = dataclasses.replace(clean.points[9], relative=100.0, nan=1, inside=False)
    points = [*clean.points[:3], apart, *clean.points[4:9], later, *clean.points[10:]]
    report = dataclasses.replace(clean, points=points)
    assert (report.rank_spread, report.nan_count) == (7.0, 3)
    assert report.first_divergence is apart, "the first, not the worst"


@pytest.mark.pool
def test_only_the_collectives_of_the_forward_pass_are_counted(folder):
    first, again = (align(folder, [1, 2, 3]).op_logs for _ in range(2))
    for logs in (first, again):
        assert [len(log) for log in logs] == [len(first[0])] * 2 and len({record.seq for record in logs[0]}) == len(
            logs[0])
    assert sum(record.op == "all_reduce" for record in again[0]) == 1 + 2 * open_checkpoint(folder).config.num_layers


def test_the_vocabulary_and_the_pool_have_exact_ends(folder, pool):
    assert align(folder, [66], logical=True).ok
    with pytest.raises(AlignError, match="token id 67 is not in"):
        align(folder, [67], logical=True)
    with pytest.raises(AlignError, match="the pool has 2 ranks, the plan needs 1"):
        align(folder, [1, 2], tensor_parallel_size=1, pool=pool)


def test_hugging_face_writes_on_behind_an_end_of_text(folder):
    ckpt = open_checkpoint(folder)
    first = hf_greedy(ckpt, [1, 2, 3], 1)[0]
    from tplab.align.reference import hf_model
    config = hf_model(ckpt, torch.float32).generation_config
    config.eos_token_id = first
    try:
        assert len(hf_greedy(ckpt, [1, 2, 3], 5)) == 5
    finally:
        config.eos_token_id = None


# The mistakes.

def test_in_float64_a_small_beginning_of_something_large_is_no_rounding():
    def split_heads(self, qkv):
        q, k, v = original("tplab.shard.linear.QKVParallelLinear.split_heads")(self, qkv)
        return q, k, v * (1 + 2e-6)

    report = broken("tplab.shard.linear.QKVParallelLinear.split_heads", split_heads, dtype="float64")
    assert report.first_divergence.name == "layers.0.v" and report.first_divergence.relative < 3e-6
    assert diagnose(report).sentence.startswith("Unknown cause"), "no module rounds that much"


@pytest.mark.parametrize("name", ["rope_missing", "rope_pairs", "rope_over_heads"])
def test_a_rotation_that_is_wrong_for_keys_only(name):
    def apply_rope(self, q, k, cos, sin):
        right = original(f"{ATTENTION}.apply_rope")(self, q, k, cos, sin)
        return right[0], fault(name).patches[0].replacement(self, q, k, cos, sin)[1]

    diagnosis = diagnose(broken(f"{ATTENTION}.apply_rope", apply_rope))
    assert diagnosis.point == "layers.0.k_rope" and name in diagnosis.names, diagnosis


def positions_as(change):
    return Patch(POSITIONS, lambda segment: change(original(POSITIONS)(segment), segment))


@pytest.mark.parametrize("change", [
    lambda right, segment: range(right.start + 1, right.stop + 1),
    lambda right, segment: range(right.start // 2, right.start // 2 + 1) if segment.count == 1 else right,
    lambda right, segment: range(right.start + 2, right.stop + 2) if segment.count == 1 else right,
    lambda right, segment: range(right.start % 5, right.start % 5 + 1) if segment.count == 1 else right,
], ids=["all one too far", "halved", "two too far", "modulo 5"])
def test_other_positions_of_the_decode_path_are_no_fault_of_the_museum(folder, change):
    report = align_decode(folder, [p + p[:4] for p in prompts(67)], new_tokens=5, logical=True,
                          patches=[positions_as(change)])
    diagnosis = diagnose(report)
    assert diagnosis.point == "layers.0.q_rope" and diagnosis.fault == "rope_positions", diagnosis
    assert diagnosis.sentence.startswith("RoPE is right, the positions are not")


@pytest.mark.parametrize("text, new_tokens, decoded, keys", [
    (range(13), 4, {9, 10, 11}, [6, 6, 6, 6, 6, 6, 9, 9, 9, 10, 11, 12]),  # a prompt of nine tokens, six at a time
    (range(2), 1, set(), [1]),  # a prompt of one token has no past
])
def test_decoded_are_those_computed_alone_with_a_past(folder, text, new_tokens, decoded, keys):
    report = align_decode(folder, [list(text)], new_tokens=new_tokens, max_num_batched_tokens=6, logical=True,
                          patches=[Patch("tplab.model.mlp.TensorParallelMLP.forward", lambda self, x: x * 0)])
    case = Case(report)
    assert {*case.positions[case.decoded].tolist()} == decoded and case.frame.num_keys.tolist() == keys


def test_in_one_layer_only_a_missing_all_reduce_is_missing_not_dropped():
    def __init__(self, *args):
        original(f"{ATTENTION}.__init__")(self, *args)
        self.o_proj.left_out = self.layer == 2

    def reduce(self, partial):
        return partial if getattr(self, "left_out", False) else original(REDUCE)(self, partial)

    report = align("fable", prompts(67), logical=True,
                   patches=[Patch(REDUCE, reduce), Patch(f"{ATTENTION}.__init__", __init__)])
    diagnosis = diagnose(report)
    assert diagnosis.point == "layers.2.o_proj" and diagnosis.names == ("all_reduce_missing",), diagnosis
    assert diagnosis.numbers["done"] == diagnosis.numbers["wanted"] - 1 == 12


@pytest.mark.parametrize("head", [0, 1])
def test_all_query_heads_read_one_kv_head(tmp_path, head):
    def attend_all(self, q, k, v, context):
        out = torch.empty_like(q)
        for rows, keys, values, mask in context.batches(self.layer, k, v):
            chosen = torch.full((q.shape[1],), head)
            out[rows] = attention.attend(q[rows].transpose(0, 1)[None], keys[:, chosen], values[:, chosen], mask,
                                         self.scaling)[0].transpose(0, 1)
        return out

    model = make_checkpoint(tmp_path / "m", "llama", heads=6, kv_heads=3, hidden=36)
    diagnosis = diagnose(broken(f"{ATTENTION}.attend_all", attend_all, tp=1, model=model))
    assert diagnosis.fault == "query_to_kv" and ("all query heads read KV head 0" in diagnosis.sentence) == (head == 0)


def test_nan_for_one_prompt_only_is_no_mask_of_nan(folder):
    report = align(folder, prompts(67), patches=[fault("nan_mask")], logical=True)
    nan_above = torch.arange(37)[:, None, None] < 26
    diagnosis = diagnose(with_point(report, "layers.0.attn",
                                    lambda tensor: torch.zeros_like(tensor).masked_fill(nan_above, float("nan"))))
    assert diagnosis.fault is None and "26 rows every key is hidden" in diagnosis.sentence


@pytest.mark.parametrize("target, wrong, names", [
    ("tplab.model.attention.mask_scores", lambda scores, mask: scores + mask * float("-inf"), ("nan_mask",)),
    (f"{ATTENTION}.apply_rope", lambda self, q, k, cos, sin: (q, k), ("rope_missing", "rope_swallowed"))])
def test_a_bug_of_prompts_only_has_its_name_beside_decoding_tokens_that_are_right(folder, target, wrong, names):
    def prompts_only(*args):
        alone = args[1].shape[-2] == 1 if "mask" in target else len(args[1]) == 1
        return original(target)(*args) if alone else wrong(*args)

    report = align_decode(folder, prompts(67)[:1], new_tokens=4, logical=True, patches=[Patch(target, prompts_only)])
    assert diagnose(report).names == names, diagnose(report)


@pytest.mark.parametrize("part", ["k", "v"])
def test_rows_of_k_and_v_in_other_places_are_counted_from_q_on(folder, part):
    def split_heads(self, qkv):
        parts = dict(zip("qkv", original("tplab.shard.linear.QKVParallelLinear.split_heads")(self, qkv)))
        if rank() == 1:
            parts[part] = parts[part].flip(-1)
        return tuple(parts.values())

    report = broken("tplab.shard.linear.QKVParallelLinear.split_heads", split_heads, model=folder)
    plan = report.plan
    wanted = (plan.num_heads + (part == "v") * plan.num_kv_heads + plan.ranks[1].kv_heads[0]) * plan.head_dim
    diagnosis = diagnose(report)
    assert diagnosis.numbers == {"rank": 1, "row": wanted + plan.head_dim - 1, "wanted": wanted}, diagnosis


def test_one_block_of_a_fused_matrix_that_the_ranks_cannot_share_evenly(tmp_path):
    model = make_checkpoint(tmp_path / "m", "llama", heads=6, kv_heads=2, head_dim=8, hidden=48)
    report = align(model, prompts(67), tensor_parallel_size=3, patches=[fault("fused_one_block")], logical=True)
    assert (6 + 2 * 2) * 8 % 3 and diagnose(report).fault == "fused_one_block"


@pytest.mark.parametrize("tie, name", [(True, "tie_ignored"), (False, "weight_not_loaded")])
def test_a_head_that_was_never_filled(tmp_path, tie, name):
    head = "tplab.shard.embedding.ParallelLMHead.forward"
    model = make_checkpoint(tmp_path / "m", "qwen2", tie=tie)
    diagnosis = diagnose(broken(head, lambda self, x: original(head)(self, x) * 0, model=model))
    assert diagnosis.fault == name and diagnosis.sentence.startswith("All logits are 0")
    assert diagnosis.sentence.endswith("ties it to the embedding.") == tie


def test_logits_with_the_other_sign_are_related():
    head = "tplab.shard.embedding.ParallelLMHead.forward"
    assert diagnose(broken(head, lambda self, x: -original(head)(self, x))).sentence.startswith("Unknown cause")


def test_an_order_that_all_ranks_but_the_first_have(folder):
    def batch_order(step):
        return tuple(reversed(step.requests)) if rank() else step.requests

    report = align_decode(folder, prompts(67), new_tokens=5, tensor_parallel_size=3, logical=True,
                          patches=[Patch("tplab.engine.runner.batch_order", batch_order)])
    assert diagnose(report).fault == "row_order"


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_reading_too_much_is_measured_in_the_checkpoints_bytes(tmp_path, dtype):
    model = make_checkpoint(tmp_path / "m", "qwen2", dtype=torch.bfloat16)
    assert diagnose(align(model, prompts(67), dtype=dtype, logical=True)).ok
    report = align(model, prompts(67), dtype=dtype, patches=[fault("full_copy_on_every_rank")], logical=True)
    diagnosis = diagnose(report)
    assert diagnosis.fault == "full_copy_on_every_rank" and 1.5 < diagnosis.numbers["times"] < 2.2


@pytest.mark.parametrize("odd", [1, 2])
def test_whichever_rank_drew_differently_is_named(folder, odd):
    report = align_decode(folder, prompts(67), new_tokens=3, tensor_parallel_size=3, logical=True)
    drawn = [dict(one) for one in report.decode.drawn]
    place = next(iter(drawn[odd]))
    drawn[odd][place] += 1
    diagnosis = diagnose(dataclasses.replace(report, decode=dataclasses.replace(report.decode, drawn=tuple(drawn))))
    assert diagnosis.fault == "rank_local_sampling"
    assert diagnosis.numbers == {"rank": odd, "prompt": place[0], "position": place[1]}


def test_a_rank_that_died_has_left_nothing_out():
    first, second = (OpRecord(seq, "all_reduce", (2, 8), "float32", 0, "mine.py", 7, seq == 1) for seq in (1, 2))
    error = RankError("rank 1 died", [Cause(1, "died", "died (SIGKILL)"), Cause(0, "waiting", "waits in all_reduce")],
                      [[first, second], [first]])
    diagnosis = diagnose(error)
    assert diagnosis.fault is None
    assert diagnosis.sentence == "Rank 1 died (SIGKILL). The error is in this rank alone; the others only lost it."


def test_an_average_on_one_rank_only_is_said_to_be_on_that_rank(folder):
    def reduce(self, partial):
        whole = original(REDUCE)(self, partial)
        return whole / 2 if rank() else whole

    diagnosis = diagnose(broken(REDUCE, reduce, model=folder))
    assert diagnosis.fault == "all_reduce_average" and "1/2 of the right one on rank 1 only" in diagnosis.sentence
