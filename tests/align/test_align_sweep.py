"""tplab against Hugging Face on logical ranks: head layouts of real models, odd sizes, every RoPE, fp32 and fp64.

The bounds are the project's own: logits within 1e-4 in float32 and 1e-7 in float64, every inner point inside its floor.
Prompts differ in length and content, so a mixed-up row shows.
"""

import pytest
import torch
from helpers.checkpoints import ROPES, make_checkpoint, shapes

from tplab.align import align, reassemble
from tplab.align.run import run_ranks
from tplab.checkpoint import open_checkpoint

BOUNDS = {"float32": 1e-4, "float64": 1e-7}


def prompts(vocab):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in (17, 1, 30)]


def assert_aligned(folder, tp, dtype):
    ckpt = open_checkpoint(folder)
    report = align(ckpt, prompts(ckpt.config.vocab_size), tensor_parallel_size=tp, dtype=dtype, logical=True)
    assert report.ok, f"{report.first_divergence}"
    assert report.max_abs_diff <= BOUNDS[dtype] and report.top1_agreement == 1
    assert report.hf_logits.abs().max() > 0.5, "logits this small would hide a bug"


@pytest.fixture(scope="module", params=shapes())
def real_layout(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("layout") / "m", **shapes()[request.param], attention_bias=True,
                           mlp_bias=True, seed=3)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_head_layouts_of_real_models(real_layout, tp, dtype):
    assert_aligned(real_layout, tp, dtype)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_shards_are_the_checkpoint_bit_for_bit(real_layout, tp):
    assert reassemble(real_layout, tensor_parallel_size=tp, logical=True) == {}


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("rope", sorted(set(ROPES) - {"default"}))
def test_every_rope_also_beyond_the_original_length(tmp_path, rope, model_type):
    # 40 positions at most, so that the 30-token prompt is short and the 60-token one makes "dynamic" scale.
    folder = make_checkpoint(tmp_path / "m", model_type, rope=rope, max_positions=40 if rope == "dynamic" else 256,
                             seed=8)
    ckpt = open_checkpoint(folder)
    if rope == "dynamic":
        object.__setattr__(ckpt.config, "max_position_embeddings", 80)
    ids = torch.randint(67, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    for dtype, bound in BOUNDS.items():
        report = align(ckpt, [ids, ids[:20][::-1]], tensor_parallel_size=2, dtype=dtype, logical=True)
        assert report.ok and report.max_abs_diff <= bound


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("fused_qkv, fused_gate_up, shards", [(True, False, 1), (True, True, 3), (False, False, 3)])
def test_fused_and_many_files(tmp_path, tie, fused_qkv, fused_gate_up, shards):
    folder = make_checkpoint(tmp_path / "m", "llama", heads=9, kv_heads=3, hidden=27, head_dim=6, inter=31, vocab=71,
                             tie=tie, fused_qkv=fused_qkv, fused_gate_up=fused_gate_up, shards=shards,
                             attention_bias=True, seed=2)
    for tp in (2, 3):
        assert_aligned(folder, tp, "float64")
        assert reassemble(folder, tensor_parallel_size=tp, logical=True) == {}


@pytest.mark.parametrize("tp", [5, 6, 7, 8])
def test_up_to_eight_ranks(tmp_path, tp):
    assert_aligned(make_checkpoint(tmp_path / "m", "qwen3", heads=8, kv_heads=2, head_dim=10, attention_bias=True), tp,
                   "float64")


def test_a_float16_checkpoint_is_converted_not_rounded_again(tmp_path):
    assert_aligned(make_checkpoint(tmp_path / "m", "mistral", dtype=torch.float16, heads=6, kv_heads=3), 2, "float64")


def test_bfloat16_stays_inside_its_own_floor(tmp_path):
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", "qwen2"))
    report = align(ckpt, prompts(67), tensor_parallel_size=2, dtype="bfloat16", logical=True)
    assert report.ok and report.max_abs_diff > 1e-4


def test_columns_that_no_rank_holds_are_found(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "m", hidden=24)  # fewer than the MLP's columns

    def without_the_last(fn, *args, **options):
        first, last = run_ranks(fn, *args, **options)
        return [first, [piece for piece in last if not piece.name.endswith("1.mlp.down_proj.weight")]]
    monkeypatch.setattr("tplab.align.run.run_ranks", without_the_last)
    wrong = reassemble(folder, tensor_parallel_size=2, logical=True)
    assert wrong == {"model.layers.1.mlp.down_proj.weight": "21 of 43 rows are on no rank"}
