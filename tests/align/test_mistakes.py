"""The table of mistakes: what third-party engines do and the museum does not have is named, wherever it stands, and a
near miss is not."""

import dataclasses

import pytest
import torch
from helpers import mistakes_attention, mistakes_rest
from helpers.checkpoints import make_checkpoint
from helpers.faults import prompts
from helpers.reports import with_point
from helpers.scopes import SAID, only
from helpers.sentences import hold

from course.cases import CASES
from tplab.align import align, align_decode, diagnose
from tplab.align.diagnose.diagnose import diagnose_all
from tplab.align.diagnose.mistakes import TABLE
from tplab.checkpoint import open_checkpoint
from tplab.faults import MUSEUM
from tplab.patch import Patch, original

# See test_mistakes_of_traits.py.
OF_TRAITS = {"sinks_missing", "scores_uncapped", "logits_uncapped", "qk_norm_each_head", "shared_expert_missing",
             "residual_unscaled"}
MISTAKES = mistakes_attention.MISTAKES | mistakes_rest.MISTAKES  # one table, to which each of the files adds

MODELS = {
    "llama": {"model_type": "llama", "heads": 6, "kv_heads": 3, "head_dim": 10, "hidden": 30, "attention_bias": True,
              "mlp_bias": True, "rope": {"rope_type": "default", "rope_theta": 500000.0}},
    "qwen2": {"model_type": "qwen2", "heads": 6, "kv_heads": 3, "head_dim": 12, "hidden": 96},
    "qwen3": {"model_type": "qwen3", "heads": 6, "kv_heads": 3, "head_dim": 12, "hidden": 48},
    "square": {"model_type": "llama", "heads": 6, "kv_heads": 3, "head_dim": 6, "hidden": 36},
    "yarn": {"model_type": "llama", "heads": 6, "kv_heads": 3, "hidden": 36, "rope": "yarn"},
    "wide": {"model_type": "llama", "heads": 24, "kv_heads": 6, "head_dim": 6, "hidden": 48},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    opened = {}

    def get(name):
        if name not in opened:
            folder = make_checkpoint(tmp_path_factory.mktemp("mistakes") / "m", layers=3, seed=7, **MODELS[name])
            opened[name] = open_checkpoint(folder)
        return opened[name]
    return get


PROMPTS = [*prompts(67), *(prompt[::-1] for prompt in prompts(67))]


def report_of(models, name, tp=2, dtype="float32", texts=PROMPTS):
    one = MISTAKES[name]
    return align(models(one.model), texts, tensor_parallel_size=tp, dtype=dtype, patches=one.patches, logical=True)


IN_BFLOAT16 = ["no norm weight", "LayerNorm", "another layer's qkv", "no o bias", "[v|k|q]", "theta 1e6", "turned back",
               "scores not scaled", "averaged", "second residual behind the norm", "gate and up in turns", "relu",
               "embedding × sqrt(hidden)", "head tied"]
WHERE_RANKS_MATTER = ["qkv interleaved per group", "o of the next rank", "first rows of the bias", "KV heads by modulo",
                      "averaged", "rank 0 left out", "embedding not reduced", "gate and up as one block",
                      "residual on every rank", "another layer's gate and up", "head rows shifted by one"]
# Named by their digits, or nothing to be off by.
EXACT = {"gate and up of zeros", "mask the wrong way round", "norms in bfloat16", "o in bfloat16",
         "q and k rounded before they turn"}
LOST = {"head tied", "head rows reversed", "head rows shifted by one"}  # what is no longer the head's is "head_random"

ALIKE = {"q transposed": ("weight_transposed",), "theta 10000": ("rope_theta",), "KV head 0": ("query_to_kv",),
         "no first residual": ("embedding_scale",), "residual on every rank": ("embedding_scale",)}
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_a_near_miss_is_not(models, name):
    one, report = MISTAKES[name], report_of(models, name)
    diagnosis = hold(diagnose(report))
    assert one.fault in diagnosis.names and one.point in (None, diagnosis.point), diagnosis
    assert diagnosis.fault == one.fault or name == "KV head 0", diagnosis  # the museum has a bug like it
    assert diagnosis.names == (diagnosis.fault, *ALIKE.get(name, ()))
    if name not in EXACT:
        off = diagnose(with_point(report, diagnosis.point, lambda x: x + 8 * report.floor * x.abs().max() * noise(x)))
        assert off.fault is None or (name in LOST and off.fault == "head_random"), off


def test_each_fault_is_a_mistake_and_each_mistake_can_be_shown():
    """Broken code and the row that finds it have one name."""
    names = {name for entry in TABLE for name in entry.names}
    shown = {*MUSEUM, *(bug.fault for case in CASES.values() for bug in case.bugs), *(
        one.fault for one in MISTAKES.values())}
    assert shown <= names
    assert names - shown == {  # shown with tensors made by hand
        "cache_not_read", "cache_row_stale", "cache_rows_lost", "cache_scale_ignored", "mask_without_past",
        "mlp_columns", "written_by_column", "wrong_weight", *OF_TRAITS}


IN_ONE_PART = ["eps 1e-2", "no norm weight", "LayerNorm", "no norm", "norm by the sum", "[v|k|q]", "Meta's rows",
               "theta 1e6", "positions / 4", "turned back", "cos only", "a mirror", "half of the head",
               "scores not scaled", "scores scaled twice", "keys for values", "softmax in bfloat16", "gelu",
               "values by modulo", "no second residual", "first residual behind the norm", "gate and up exchanged",
               "gate and up in turns", "relu", "silu on both", "silu of the product", "no activation", "logits capped",
               "logits scaled", "norms in bfloat16", "norm in place", "averaged", "head rows reversed",
               "embedding × 3.7", "last rows of the head lost", "heads viewed", "theta 12345", "mask times scores",
               "mask behind the softmax", "mask added as 1", "sequences see each other",
               "embedding of the token before", "logits of the token before", "softmax over queries",
               "mask the wrong way round"]


MASKS = {"mask times scores", "mask behind the softmax", "mask added as 1"}  # a token alone has nothing to hide


@pytest.mark.parametrize("name, scope", [(name, scope) for at, name in enumerate(IN_ONE_PART)
                                         for scope in (("prefill", "decode")[at % 2], "rank 1")])
def test_in_one_part_of_a_run_only(models, name, scope):
    one = MISTAKES[name]
    found = align_decode(models(one.model), prompts(67), new_tokens=4, tensor_parallel_size=2, logical=True,
                         patches=only(one.patches, scope)).diagnoses
    assert found and all(one.fault in diagnosis.names for diagnosis in found), found
    if scope == "rank 1":
        assert {diagnosis.ranks for diagnosis in found} == {(1,)}
    elif name not in MASKS or scope != "prefill":
        assert {diagnosis.scope for diagnosis in found} <= {*SAID[scope]}


def noise(x):
    return 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype) - 1


def test_a_mask_the_wrong_way_round_is_no_nan_mask(models):
    """Only the last token has nothing left to see; 0 times -inf would hit all others too."""
    def attend(q, k, v, mask, scaling):
        return original("tplab.model.attention.attend")(q, k, v, ~mask, scaling)
    for size in (1, 2):
        report = align(models("llama"), PROMPTS, tensor_parallel_size=size, logical=True,
                       patches=[Patch("tplab.model.attention.attend", attend)])
        assert diagnose(report).fault == "mask_inverted", diagnose(report)


@pytest.mark.parametrize("name", WHERE_RANKS_MATTER)
def test_over_three_ranks(models, name):
    diagnosis = diagnose(report_of(models, name, tp=3))
    assert diagnosis.fault == MISTAKES[name].fault, diagnosis


HOOKS = ("q_norm", "k_norm", "q_rope", "k_rope", "o_partial", "mlp_partial")  # what no module of most engines returns
OUTSIDE = (*HOOKS, "q", "k", "v", "attn", "residual", "mlp_act")  # what only blocks' hooks do not see


@pytest.mark.parametrize("unseen, name", [
    *((HOOKS, name) for name in ("theta 1e6", "half of the head", "bf16 tables", "turned twice", "positions / 4",
                                 "scores not scaled", "averaged", "another layer's o", "no o bias",
                                 "o in bfloat16", "q and k rounded before they turn")),
    *((OUTSIDE, name) for name in ("gate and up exchanged", "relu", "[v|k|q]", "another layer's qkv", "no down bias",
                                   "o of the next rank", "qkv bias twice"))])
def test_where_the_points_between_were_not_recorded(models, unseen, name):
    report = report_of(models, name, texts=PROMPTS[:3])  # three texts tell it as well as six
    points = {point: shards for point, shards in report.recording.points.items()
              if point.rpartition(".")[2] not in unseen}
    report = dataclasses.replace(report, recording=dataclasses.replace(report.recording, points=points))
    found = diagnose_all(report)
    assert found and all(MISTAKES[name].fault in diagnosis.names for diagnosis in found), found


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_in_bfloat16(models, name):
    diagnosis = diagnose(report_of(models, name, dtype="bfloat16"))
    assert diagnosis.fault == MISTAKES[name].fault, diagnosis


def test_bfloat16_cannot_tell_one_gelu_from_another(models):
    sentences = {dtype: diagnose(report_of(models, "gelu", dtype=dtype)).sentence for dtype in ("float32", "bfloat16")}
    assert sentences["float32"] == "mlp_act is gelu(gate) × up; right is silu(gate) × up."
    assert "gelu(gate) × up" in sentences["bfloat16"] and "gelu_tanh(gate) × up" in sentences["bfloat16"]
    assert "too coarse to tell which" in sentences["bfloat16"]
