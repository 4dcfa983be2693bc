"""The diagnosis: probes and the same mistakes in other code are named, near misses are not; unknown causes are located;
a bug in one part of a run, on one rank, in one layer; rows of NaN.
"""

import dataclasses
import math

import pytest
import torch
from helpers import turns
from helpers.checkpoints import make_checkpoint
from helpers.faults import prompts
from helpers.reports import with_point
from helpers.scopes import SAID, only
from helpers.trait_models import TRAITS, make_model
from helpers.variants import VARIANTS

from tplab.align import Diagnosis, align, align_decode, diagnose
from tplab.checkpoint import open_checkpoint
from tplab.faults import fault
from tplab.faults.probes import probes
from tplab.patch import Patch, original
from tplab.ranks import RankError, all_reduce, rank

ATTENTION = "tplab.model.attention.TensorParallelAttention"
SPLIT = "tplab.shard.linear.QKVParallelLinear.split_heads"
REDUCE = "tplab.shard.linear.RowParallelLinear.reduce"
TEXTS = prompts(67)
MODELS = {
    "llama": {"model_type": "llama", "heads": 6, "kv_heads": 3, "head_dim": 10, "hidden": 30, "attention_bias": True,
              "mlp_bias": True, "rope": {"rope_type": "default", "rope_theta": 500000.0}},
    "yarn": {"model_type": "qwen2", "heads": 6, "kv_heads": 3, "hidden": 36, "rope": "yarn"},
    "qwen3": {"model_type": "qwen3", "heads": 6, "kv_heads": 3, "head_dim": 12, "hidden": 48},
    "square": {"model_type": "llama", "heads": 8, "kv_heads": 4, "head_dim": 6, "hidden": 48}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    opened = {}

    def get(name, bug=""):
        """``bug``: on one layer, where it needs no second one."""
        key = name, 2 if bug in ("", "wrong_layer") else 1
        if key not in opened:
            folder = tmp_path_factory.mktemp("models") / "m"
            opened[key] = open_checkpoint(make_checkpoint(folder, layers=key[1], seed=7, **MODELS[name])
                                          if name in MODELS else make_model(folder, **TRAITS[name]))
        return opened[key]
    return get


def broken(model, patches, texts=TEXTS, tp=2, **options):
    return align(model, texts, tensor_parallel_size=tp, patches=patches, logical=True, **options)


def noise(x):
    return 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype) - 1


# What is named.

# Probes whose numbers are those of a fault of the museum, or of another probe that is asked before: nothing but their
# name differs. Or they need a cache, a scaling or a shape that these models do not have.
SHOW = {"qwen3": {"norm_over_all_heads"}, "yarn": {"rope_attention_factor"}, "square": {
    "weight_transposed", "query_to_kv", "qkv_interleaved"}, "gpt-oss": {"sinks_missing"}, "Gemma-2": {
        "scores_uncapped", "logits_uncapped"}, "shared expert": {"shared_expert_missing"}, "multipliers": {
            "residual_unscaled", "logits_scale"}}
IN_DECODE_ONLY = {"mask_without_past", "cache_not_read", "cache_rows_lost", "mask_of_another_row"}


# Where a probe's first value is the model's own, or a museum fault's.
OTHER_VALUES = ("the norm's epsilon is 0.001", "q and k are turned with theta 1e+06")


def names_of(model):
    listed = [*probes(model.config)]
    return ({probe.name: probe for probe in listed[::-1]}
            | {probe.name: probe for probe in listed if probe.title in OTHER_VALUES})


@pytest.mark.parametrize("model, name", [(model, name) for model, names in SHOW.items() for name in sorted(names)])
def test_a_probe_of_a_trait_names_itself(models, model, name):
    report = broken(models(model), names_of(models(model))[name].patches, tp=2)
    assert report.diagnoses and all(name in one.names for one in report.diagnoses), report.diagnosis_lines()


ANYWHERE = sorted({probe.name for probe in probes(open_checkpoint("fable").config)} - IN_DECODE_ONLY - set().union(
    *SHOW.values()))


@pytest.mark.parametrize("at, name", list(enumerate(ANYWHERE)))
def test_a_probe_names_itself(models, at, name):
    """On two and three ranks by turns."""
    model, tp = models("llama", name), 2 + at % 2
    report = broken(model, names_of(model)[name].patches, tp=tp)
    assert report.diagnoses and all(name in one.names for one in report.diagnoses), report.diagnosis_lines()


@pytest.mark.parametrize("name", sorted(IN_DECODE_ONLY))
def test_a_probe_of_the_cache_names_itself(models, name):
    report = align_decode(models("llama"), prompts(67), new_tokens=4, logical=True,
                          patches=names_of(models("llama"))[name].patches, max_num_batched_tokens=8)
    assert report.diagnoses and all(name in one.names for one in report.diagnoses), report.diagnosis_lines()


@pytest.mark.parametrize("at, words", list(enumerate(VARIANTS)))
def test_the_same_mistake_in_other_code_is_named_and_a_near_miss_is_not(models, at, words):
    name, patches = VARIANTS[words]
    report = broken(models("square" if "rank 0" in words else "llama", name), patches)
    found = report.diagnoses
    assert found and all(name in one.names for one in found), report.diagnosis_lines()
    assert "Looked for" not in str(found[0]) and str(found[0]).count(f"At {found[0].point}, ") == 1
    if at % (3 if turns.ALL else 9) or name in ("low_precision", "weight_not_loaded", "mask_inverted"):
        return  # digits, zeros and NaN have no near miss
    off = with_point(report, found[0].point, lambda x: x + 8 * report.floor * x.abs().max() * noise(x))
    assert diagnose(off).fault is None, diagnose(off)


IN_BFLOAT16 = [words for words, (name, _) in VARIANTS.items() if name not in (
    "norm_epsilon", "rope_dtype", "softmax_dtype", "low_precision", "norm_by_deviation")]


@pytest.mark.parametrize("words", IN_BFLOAT16[::1 if turns.ALL else 5])
def test_in_bfloat16(models, words):
    name, patches = VARIANTS[words]
    report = broken(models("square" if "rank 0" in words else "llama", name), patches, dtype="bfloat16")
    assert name in diagnose(report).names, diagnose(report)


# By turns: each scope with every sixth of those that have parts.
PARTS = [(words, ("prefill", "decode", "rank 1")[at % 3]) for at, words in enumerate(VARIANTS) if ".load" not in
         VARIANTS[words][1][0].target and "__init__" not in VARIANTS[words][1][0].target
         and VARIANTS[words][0] not in ("all_reduce_subset", "all_reduce_average", "ids_shifted", "wrong_layer")]
PARTS = PARTS[::1 if turns.ALL else 4]


@pytest.mark.parametrize("words, scope", PARTS)
def test_in_one_part_of_a_run_only(models, words, scope):
    """A mask, a cache and a sum over queries have nothing to hide or to mix where one token is alone."""
    name, patches = VARIANTS[words]
    found = align_decode(models("llama"), prompts(67), new_tokens=2, logical=True,
                         patches=only(patches, scope)).diagnoses
    if not found:
        assert name == "cross_sequence_attention" or scope == "decode" and name in ("mask_misused", "softmax_dim")
        return
    assert all(name in one.names for one in found), found
    if scope == "rank 1":
        assert {one.ranks for one in found} == {(1,)}
    elif name not in ("mask_misused", "softmax_dim", "mask_inverted", "rope_positions"):  # the last says it row by row
        assert {one.scope for one in found} <= {*SAID[scope]}


def test_a_bug_on_one_rank_inside_a_sum_is_named_with_its_rank(models):
    """The sum alone was recorded, and it is wrong on all ranks."""
    def partial(self, x):
        right = original("tplab.shard.linear.RowParallelLinear.partial")(self, x)
        return torch.nn.functional.linear(x, 0 * self.weight) if rank() == 1 else right

    report = broken(models("qwen3"), [Patch("tplab.shard.linear.RowParallelLinear.partial", partial)])
    points = {name: held for name, held in report.recording.points.items() if not name.endswith("partial")}
    report = dataclasses.replace(report, recording=dataclasses.replace(report.recording, points=points))
    (one,) = report.diagnoses
    assert one.names[:1] in (("weight_not_loaded",), ("all_reduce_subset",)) and "rank 1" in one.sentence.lower(), one


# What is located.

def test_a_healthy_run(models):
    diagnosis = diagnose(broken(models("llama"), []))
    assert diagnosis.ok and diagnosis.fault is None and diagnosis.names == () and "Nothing is wrong" in str(diagnosis)
    assert str(Diagnosis("nan_mask", "Because.", "layers.0.attn")) == "Because."


def test_an_unknown_cause_is_told_with_its_place_rows_size_and_what_was_ruled_out(models):
    def split_heads(self, qkv):
        q, k, v = original(SPLIT)(self, qkv)
        return q, k, v * 1.01 if rank() else v

    one = diagnose(broken(models("llama"), [Patch(SPLIT, split_heads)]))
    assert one.fault is None and not one.ok and one.point == "layers.0.v" and one.ranks == (1,)
    assert one.sentence.startswith("Unknown cause, on rank 1. At layers.0.v, 37 of 37 rows differ from what their ")
    assert "0.01 times a row's largest value" in one.sentence and one.numbers["off"] == pytest.approx(0.01, rel=1e-3)
    assert "Looked for and not found: shard_dim1, " in one.sentence and "rope_missing" not in one.sentence


def test_of_several_faults_each_is_named_in_the_order_in_which_they_show(models):
    names = ["all_reduce_missing", "rope_pairs", "no_mask", "qkv_order"]
    found = broken(models("llama"), [fault(name) for name in names]).diagnoses
    assert [one.fault for one in found if one.fault] == ["qkv_order", "rope_pairs", "no_mask", "all_reduce_missing"]


def test_a_fault_in_one_layer_is_named_there(models):
    def apply_rope(self, q, k, cos, sin):
        return (q, k) if self.layer == 1 else original(f"{ATTENTION}.apply_rope")(self, q, k, cos, sin)

    report = broken(models("llama"), [Patch(f"{ATTENTION}.apply_rope", apply_rope)])
    (one,) = report.diagnoses
    assert one.fault == "rope_missing" and one.where == "layer 1: q_rope, k_rope" and one.point == "layers.1.q_rope"
    assert {name.rpartition(".")[0] for name in report.evidence} == {"", "layers.1"}


@pytest.mark.parametrize("name", ["shard_dim1", "no_mask", "rope_missing", "all_reduce_dropped"])
def test_it_does_not_look_at_the_patches(name):
    report = broken("fable", [fault(name)], prompts(768))
    assert name in diagnose(dataclasses.replace(report, patches=())).names


@pytest.mark.parametrize("name", ["all_reduce_dropped", "read_before_wait"])
def test_without_op_logs_a_missing_a_dropped_and_an_early_read_sum_look_alike(name):
    report = broken("fable", [fault(name)], prompts(768))
    assert diagnose(report).names == (name,)
    assert diagnose(dataclasses.replace(report, op_logs=[])).names == (
        "all_reduce_missing", "all_reduce_dropped", "read_before_wait")


def test_a_small_scale_is_no_named_one(models):
    """0.99999 is rounding, or nothing that has a name."""
    target = "tplab.shard.embedding.VocabParallelEmbedding.forward"
    report = broken(models("llama"), [Patch(target, lambda self, ids: original(target)(self, ids) * 0.99997)])
    assert not report.ok and diagnose(report).fault is None


def test_in_float64_what_rounding_does_is_called_rounding():
    def forward(self, x):
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        if len(y) > 1:
            y[1, 3] = torch.nextafter(y[1, 3], torch.tensor(9.0))
        return self.weight * y.to(x.dtype)

    report = broken("fable", [Patch("tplab.model.norm.RMSNorm.forward", forward)], prompts(768), dtype="float64")
    assert not report.ok and diagnose(report).fault is None
    assert diagnose(report).sentence.startswith("Most likely rounding. At ")


def test_a_disagreement_between_ranks_alone_is_seen(models):
    one = diagnose(broken(models("llama"), [Patch(REDUCE, lambda self, x: all_reduce(x) * (1 + rank()))]))
    assert one.point == "layers.0.o_proj" and one.ranks == (1,) and one.fault in (None, "all_reduce_twice")


# Rows of NaN.

def lost_at(point, row, value, decoding):
    """One row of a point's module in layer 1 becomes NaN or infinity."""
    target = {"v": SPLIT, "attn": f"{ATTENTION}.attend_all", "o_proj": REDUCE, "mlp": REDUCE}[point]
    calls = {}

    def wrong(self, *args):
        out = original(target)(self, *args)
        calls[rank()] = calls.get(rank(), 0) + 1  # two layers, with two sums each
        here = {"o_proj": calls[rank()] % 4 == 3, "mlp": calls[rank()] % 4 == 0, "v": calls[rank()] % 2 == 0}.get(
            point, getattr(self, "layer", 1) == 1)
        rows = out[2] if point == "v" else out
        if here and (len(rows) <= 2) == decoding:
            rows = rows.clone()
            rows[row] = value
        return (*out[:2], rows) if point == "v" else rows
    return [Patch(target, wrong)]


@pytest.mark.parametrize("point, row, value, decoding, tp", [
    ("o_proj", 5, math.nan, False, 2), ("mlp", 5, math.inf, False, 2), ("attn", 5, math.nan, False, 2),
    ("attn", -1, math.inf, False, 1), ("o_proj", 0, math.inf, True, 2), ("mlp", 0, math.nan, True, 3),
    ("v", 5, math.inf, False, 2), ("attn", 0, math.nan, True, 2)])
def test_a_row_of_nan_has_its_place_and_no_name(models, point, row, value, decoding, tp):
    report = align_decode(models("llama"), prompts(67), new_tokens=2, tensor_parallel_size=tp, logical=True,
                          patches=lost_at(point, row, value, decoding))
    found = report.diagnoses
    assert found[0].point == f"layers.1.{point}" and not [one.fault for one in found if one.fault], found
    assert "hold NaN or infinity that their inputs do not hold" in found[0].sentence


def test_rows_of_nan_do_not_hide_the_name_of_the_others(models):
    report = broken(models("llama"), [fault("rope_missing")])
    lost = with_point(report, "layers.0.q_rope", lambda x: x.index_fill(0, torch.tensor([4]), torch.nan))
    found = lost.diagnoses
    assert found[0].fault == "rope_missing" and found[1].fault is None and "1 of 37 rows hold NaN" in found[1].sentence


def test_a_first_row_without_a_key_is_not_the_mask_that_makes_nan_everywhere(models):
    """A mask that hides a token's own key, too: its first row has no key at all, and only that row is NaN."""
    def without_own(positions, keys):
        return torch.arange(keys) >= positions[:, None, :, None]

    found = broken(models("llama"), [Patch("tplab.model.attention.causal_mask", without_own)]).diagnoses
    assert [one.fault for one in found][:2] == ["mask_off_by_one", None], found


# A row of the cache.

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_the_cache_that_holds_another_is_one_finding(models, dtype):
    """Position 3 of the first text is not written over by what belongs there: its slot keeps position 2's."""
    target = "tplab.cache.paged.PagedContext.batches"

    def batches(self, layer, k, v):
        if len(k) > 9:
            k, v = (torch.cat([x[:3], x[2:3], x[4:]]) for x in (k, v))
        found = list(original(target)(self, layer, k, v))
        if len(k) > 9:  # the prompt's own attention was right
            found = list(NO_CACHE(self, layer))
        yield from found

    right = {}

    def keeping(self, q, k, v, context):
        right[rank(), self.layer] = k, v
        return original(f"{ATTENTION}.attend_all")(self, q, k, v, context)

    def NO_CACHE(self, layer):
        from tplab.model import NoCache
        return NoCache([segment.count for segment in self.segments]).batches(layer, *right[rank(), layer])

    report = align_decode(models("llama"), prompts(67)[:1], new_tokens=6, dtype=dtype, logical=True,
                          patches=[Patch(target, batches), Patch(f"{ATTENTION}.attend_all", keeping)])
    (one,) = report.diagnoses
    assert one.fault == "cache_row_stale" and one.where.startswith("layers 0–1: attn"), one
    assert "Row 3 of sequence 0's cache holds the key and value of token 2 of sequence 0" in one.sentence


@pytest.mark.parametrize("what, scale", [("keys and values", 0.25), ("values", 2.0), ("keys", 0.5)])
def test_scales_of_a_cache_in_fp8_that_are_not_read_are_named(models, what, scale):
    def attend(q, k, v, *args, **options):
        k, v = (x.div(scale).to(torch.float8_e4m3fn).to(x.dtype) * (1 if name in what else scale)
                for name, x in (("keys", k), ("values", v)))
        return original("tplab.model.attention.attend")(q, k, v, *args, **options)

    (one,) = broken(models("llama"), [Patch("tplab.model.attention.attend", attend)]).diagnoses
    assert one.fault == "cache_scale_ignored" and one.where == "layers 0–1: attn"
    assert f"The {what} of a cache in fp8 are read without their scale {scale:g}" in one.sentence


# The replay.

@pytest.mark.parametrize("at, name", [*enumerate(["llama", "Qwen2-MoE with a window"])])
def test_a_bug_shows_the_same_in_a_layer_that_was_loaded_without_it(models, at, name, monkeypatch):
    """A replay loads a layer once, and again only for bugs of loading. Of the bugs, each model has every eighth one."""
    class Everything:
        def __contains__(self, target):
            return True

    report = broken(models(name), [fault("all_reduce_missing")], prompts(67))
    for point in ("layers.1.output", "logits"):
        made = report.judge.made(point)
        for bug in report.judge.bugs[at::2 if turns.ALL else 8]:
            kept, anew = outcomes(report.judge, point, bug, monkeypatch, Everything())
            assert kept == anew, bug.title
        assert report.judge.made(point) is made


def outcomes(replay, point, bug, monkeypatch, everything):
    """What a bug makes, in the layer that is kept and in one that is loaded with it; the kind of error if it fails."""
    def made():
        try:
            return [(rank, name, x.nan_to_num(7).tolist()) for rank, points in replay.broken(point, bug.patches).items()
                    for name, x in points.items()]
        except RankError as error:
            return type(error)
    kept = made()
    with monkeypatch.context() as patching:
        patching.setattr("tplab.align.replay._LOADING", everything)
        return kept, made()
