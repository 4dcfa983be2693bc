"""The diagnosis beyond the museum: healthy runs, unknown causes, several faults, mistakes of learners, no peeking."""

import dataclasses

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.faults import prompts
from helpers.sentences import hold

from tplab.align import Diagnosis, align, diagnose
from tplab.align.diagnose.attention import decoded_lost
from tplab.checkpoint import open_checkpoint
from tplab.faults import fault
from tplab.patch import Patch, original
from tplab.ranks import all_reduce, rank

ATTENTION = "tplab.model.attention.TensorParallelAttention"
ROW = "tplab.shard.linear.RowParallelLinear"


def broken(target, replacement, tp=2, model="fable"):
    return diagnose(align(model, prompts(67), tensor_parallel_size=tp, patches=[Patch(target, replacement)],
                          logical=True))


def test_a_healthy_run():
    diagnosis = hold(diagnose(align("fable", "Once upon a time", tensor_parallel_size=2, logical=True)))
    assert diagnosis.ok and diagnosis.fault is None and diagnosis.names == () and "Nothing is wrong" in str(diagnosis)


def test_an_unknown_cause_is_admitted_with_its_place():
    def split_heads(self, qkv):
        q, k, v = original("tplab.shard.linear.QKVParallelLinear.split_heads")(self, qkv)
        return q, k, v * 1.01

    diagnosis = hold(broken("tplab.shard.linear.QKVParallelLinear.split_heads", split_heads))
    assert diagnosis.fault is None and not diagnosis.ok and diagnosis.point == "layers.0.v"
    assert "Looked for and not found: ids_shifted, rows_shifted, low_precision, " in str(diagnosis)


def test_keys_and_values_in_each_others_place_have_one_name():
    def split_heads(self, qkv):
        q, k, v = original("tplab.shard.linear.QKVParallelLinear.split_heads")(self, qkv)
        return q, v, k

    assert broken("tplab.shard.linear.QKVParallelLinear.split_heads", split_heads).names == ("qkv_order",)


def test_a_disagreement_between_ranks_alone_is_seen():
    def reduce(self, partial):
        return all_reduce(partial) * (1 + rank())

    diagnosis = hold(broken(f"{ROW}.reduce", reduce))
    assert diagnosis.point == "layers.0.o_proj" and diagnosis.fault == "all_reduce_twice"


def test_of_several_faults_the_first_to_show_is_named():
    names = ["all_reduce_missing", "rope_pairs", "nan_mask", "qkv_order"]
    found = []
    while names:
        report = align("fable", prompts(768), patches=[fault(name) for name in names], logical=True)
        found.append(diagnose(report).fault)
        names.remove(found[-1])
    assert found == ["qkv_order", "rope_pairs", "nan_mask", "all_reduce_missing"]


def test_a_fault_in_a_later_layer_is_named_too():
    def apply_rope(self, q, k, cos, sin):
        return (q, k) if self.layer == 3 else original(f"{ATTENTION}.apply_rope")(self, q, k, cos, sin)

    report = align("fable", prompts(768), patches=[Patch(f"{ATTENTION}.apply_rope", apply_rope)], logical=True)
    diagnosis = hold(diagnose(report))
    assert diagnosis.fault == "rope_missing" and diagnosis.point == "layers.3.q_rope"
    assert {name.rpartition(".")[0] for name in report.evidence} == {"", "layers.3"}
    assert {"embed", "norm", "logits", "layers.3.q", "layers.3.output"} <= {*report.evidence}


@pytest.mark.parametrize("name", ["shard_dim1", "no_mask", "rope_missing", "all_reduce_dropped"])
def test_it_does_not_look_at_the_patches(name):
    report = align("fable", prompts(768), patches=[fault(name)], logical=True)
    assert name in diagnose(dataclasses.replace(report, patches=())).names


@pytest.mark.parametrize("name", ["all_reduce_dropped", "read_before_wait"])
def test_without_op_logs_a_missing_and_a_dropped_all_reduce_look_alike_and_one_that_is_read_too_early(name):
    report = align("fable", prompts(768), patches=[fault(name)], logical=True)
    assert diagnose(report).names == (name,)
    assert diagnose(dataclasses.replace(report, op_logs=[])).names == (
        "all_reduce_missing", "all_reduce_dropped", "read_before_wait")


@pytest.mark.parametrize("made, text", [
    (lambda x: torch.cat([x[:, 16:], x[:, 16:]], 1), "the first half of the numbers"),
    (lambda x: torch.cat([x[19:], x[18:19], x[19:]]), "the first half of the rows"),
    (lambda x: x.roll(18, 0), "those of the next rank")])
def test_a_sum_whose_parts_are_written_over_or_change_places(tmp_path, made, text):
    """37 rows of 32 numbers, on two ranks that keep 19 and 18 of them."""
    def reduce(self, partial):
        return made(original("tplab.shard.linear.RowParallelLinear.reduce")(self, partial))

    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", hidden=32))
    found = diagnose(align(ckpt, prompts(67), patches=[Patch("tplab.shard.linear.RowParallelLinear.reduce", reduce)],
                           logical=True))
    assert found.fault in ("buffer_reused", "wrong_rows_scattered") and text in found.sentence


def test_rows_in_which_everything_is_hidden():
    def causal_mask(positions, keys):
        return (torch.arange(keys) >= positions[..., None])[:, None]

    diagnosis = hold(broken("tplab.model.attention.causal_mask", causal_mask))
    assert diagnosis.fault is None


def test_rows_in_the_wrong_order_are_described():
    def merged_shard(sources, ranges):
        q, *rest = ranges
        rows = [sources[0][row:row + 1] for row in reversed(q)]
        return torch.cat([*rows, *(source[r.start:r.stop] for source, r in zip(sources[1:], rest))])

    diagnosis = hold(broken("tplab.shard.linear.merged_shard", merged_shard))
    assert diagnosis.point == "layers.0.q" and diagnosis.numbers["wanted"] == 0


def test_gate_and_up_written_by_column():
    def load(self, parameter, *sources):
        original("tplab.shard.linear.MergedColumnParallelLinear.load")(self, parameter, *sources)
        if parameter == "weight":
            self.weight.data.copy_(self.weight.data.clone().T.reshape(self.weight.shape))

    diagnosis = hold(broken("tplab.shard.linear.MergedColumnParallelLinear.load", load))
    assert diagnosis.fault == "qkv_written_by_column"
    report = align("fable", prompts(67), logical=True, patches=[
        Patch("tplab.shard.linear.MergedColumnParallelLinear.load", load),
        Patch("tplab.shard.linear.QKVParallelLinear.load", original("tplab.shard.linear.QKVParallelLinear.load"))])
    found = hold(diagnose(report))
    assert found.fault == "written_by_column"


def test_a_diagnosis_prints_as_its_sentence():
    assert str(Diagnosis("nan_mask", "Because.", "layers.0.attn")) == "Because."


def test_one_crossed_rounding_boundary_in_float64_is_not_taken_for_a_bug():
    def forward(self, x):
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        if len(y) > 1:
            y[1, 3] = torch.nextafter(y[1, 3], torch.tensor(9.0))
        return self.weight * y.to(x.dtype)

    report = align("fable", prompts(768), dtype="float64", patches=[Patch("tplab.model.norm.RMSNorm.forward", forward)],
                   logical=True)
    assert not report.ok
    assert diagnose(report).fault is None and "rounding boundary" in diagnose(report).sentence


def test_nan_in_float64_is_no_rounding():
    report = align("fable", prompts(768), dtype="float64", patches=[fault("nan_mask")], logical=True)
    assert diagnose(report).fault == "nan_mask"


def test_a_small_error_of_the_angles_is_not_taken_for_other_positions():
    def apply_rope(self, q, k, cos, sin):
        q, k = original(f"{ATTENTION}.apply_rope")(self, q, k, cos, sin)
        return q * 1.00005, k

    diagnosis = hold(broken(f"{ATTENTION}.apply_rope", apply_rope))
    assert diagnosis.point == "layers.0.q_rope"


def test_a_prompt_of_one_token_was_not_decoded():
    """A decoded token that is not kept is seen by none after it, and the prompt by all."""
    at = torch.arange(4)
    visible = decoded_lost(at[:, None], at[None], at[:, None] + 1)
    assert visible.tolist() == [[key in (0, query) for key in range(4)] for query in range(4)]


def test_rows_of_one_size_name_no_epsilon(tmp_path):
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", "llama", hidden=48))
    with ckpt.reader() as reader:
        sizes = reader["model.embed_tokens.weight"][:].float().pow(2).mean(1)
    apart = (sizes[:, None] / sizes[None] - 1).abs() + torch.eye(len(sizes))
    pair = divmod(int(apart.argmin()), len(sizes))
    assert apart.min() < 1e-3
    norm = "tplab.model.norm.RMSNorm.forward"
    report = align(ckpt, [list(pair)], tensor_parallel_size=1, logical=True,
                   patches=[Patch(norm, lambda self, x: 0.9 * original(norm)(self, x))])
    diagnosis = hold(diagnose(report))
    assert diagnosis.point == "layers.0.input_norm" and diagnosis.fault != "norm_epsilon", diagnosis
