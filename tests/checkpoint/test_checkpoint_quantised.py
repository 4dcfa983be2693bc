"""Eight-bit weights with scales: what a rank reads is a slice of the widened matrix, wherever its edges fall."""

import json

import pytest
import torch
from helpers.checkpoints import make_checkpoint, save_tensors
from helpers.trait_sweep import hf_logits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tplab.align import align, reassemble
from tplab.checkpoint import CheckpointError, open_checkpoint
from tplab.model import load_model
from tplab.ranks import logical_ranks
from tplab.shard import ShardPlan

FP8 = {"quant_method": "fp8", "weight_block_size": [7, 16], "activation_scheme": "dynamic"}
CHANNEL = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
    "targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel", "symmetric": True, "type": "int"}}}}


def in_blocks(weight, block):
    """A matrix in fp8, a scale for each block, and what both stand for."""
    rows, columns = (-(-whole // size) for whole, size in zip(weight.shape, block))
    scales = 0.001 + torch.rand(rows, columns)
    factors = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:weight.shape[0], :weight.shape[1]]
    narrow = (weight / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
    return narrow, scales, narrow.float() * factors


def by_row(weight, _block):
    """A matrix in int8, a scale for each row, and what both stand for."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    narrow = (weight / scales).round().to(torch.int8)
    return narrow, scales, narrow.float() * scales


def quantised(folder, plain, how, config, suffix, shards=1):
    """A copy of the checkpoint in ``plain`` with quantised matrices, and one with what they stand for."""
    tensors, wide = load_file(plain / "model.safetensors"), {}
    narrow = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            narrow[name], narrow[name + suffix], wide[name] = how(tensor, config.get("weight_block_size"))
        else:
            narrow[name] = wide[name] = tensor
    said = json.loads((plain / "config.json").read_text())
    for name, content, more in (("narrow", narrow, {"quantization_config": config}), ("wide", wide, {})):
        (path := folder / name).mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(said | more))
        save_tensors(path, content, shards if content is narrow else 1)
    return open_checkpoint(folder / "narrow"), open_checkpoint(folder / "wide")


KINDS = {"blocks": (in_blocks, FP8, "_scale_inv"), "rows": (by_row, CHANNEL, "_scale")}
MODELS = {"uneven": dict(heads=9, kv_heads=3, hidden=27, head_dim=6, inter=31, vocab=71),
          "even": dict(heads=6, kv_heads=2, hidden=48, inter=64)}


def on_rank(ckpt, plan):
    return {name: parameter.data for name, parameter in load_model(ckpt, plan).named_parameters()}


@pytest.mark.parametrize("kind, model, tp", [("blocks", "uneven", 2), ("rows", "even", 3), ("rows", "uneven", 4)])
def test_every_rank_holds_its_part_of_the_widened_weights(tmp_path, kind, model, tp):
    plain = make_checkpoint(tmp_path / "m", "qwen3", **MODELS[model])
    narrow, wide = quantised(tmp_path, plain, *KINDS[kind], shards=3)
    assert narrow.tensors.keys() == wide.tensors.keys()
    plan = ShardPlan.from_config(narrow.config, tp)
    for ours, right in zip(logical_ranks(tp, on_rank, narrow, plan), logical_ranks(tp, on_rank, wide, plan)):
        assert all(torch.equal(ours[name], right[name]) for name in right | ours)
    assert reassemble(narrow, tensor_parallel_size=tp, logical=True) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_aligned_with_hugging_face_on_the_widened_weights(tmp_path, kind):
    narrow, wide = quantised(tmp_path, make_checkpoint(tmp_path / "m", "llama", **MODELS["uneven"]), *KINDS[kind])
    for dtype in ("float32", "float64"):
        assert align(narrow, [[1, 2, 3, 4, 5]], dtype=dtype, logical=True).ok
    ids = [[1, 2, 3, 4, 5]]
    assert torch.equal(*(hf_logits(ckpt, torch.float32, ids)[0] for ckpt in (narrow, wide)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised")
    return quantised(folder, make_checkpoint(folder / "m", "llama", **MODELS["uneven"]), *KINDS["blocks"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_slice_is_that_of_the_widened_matrix(pair, data):
    name = data.draw(st.sampled_from([name for name, info in pair[0].tensors.items() if info.scale]))
    index = []
    for size in pair[0].tensors[name].shape[:data.draw(st.integers(1, 2))]:
        start = data.draw(st.integers(0, size - 1))
        index.append(slice(start, data.draw(st.integers(start + 1, size))))
    index = tuple(index) if len(index) > 1 else index[0]
    with pair[0].reader() as narrow, pair[1].reader() as wide:
        assert torch.equal(narrow[name][index], wide[name][index])


@pytest.mark.parametrize(("change", "words"), [
    (lambda tensors, config: tensors.pop("model.layers.0.mlp.up_proj.weight_scale_inv"),
     "model.layers.0.mlp.up_proj.weight in model.safetensors is stored as float8_e4m3fn; that is read only for"),
    (lambda tensors, config: tensors.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(5, 1)}),
     "model.layers.0.mlp.up_proj.weight_scale_inv has shape [5, 1], but [5, 2] blocks of [7, 16] cover"),
    (lambda tensors, config: tensors.update({"model.norm.weight": tensors["model.norm.weight"].to(torch.int8)}),
     "model.norm.weight in model.safetensors is stored as int8; that is read only for matrices, with their scales"),
    (lambda tensors, config: config.update(quantization_config=None), "with a quantization_config that says"),
    (lambda tensors, config: config.update(quantization_config=FP8 | {"weight_block_size": [0, 16]}), "quantised"),
    (lambda tensors, config: config.update(quantization_config={"quant_method": "awq"}), "quantised (awq)"),
    (lambda tensors, config: config.update(quantization_config={"quant_method": "compressed-tensors", "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "strategy": "group"}}}}), "quantised (compressed-tensors)"),
], ids=["no scales", "scales of another shape", "no matrix", "no config", "empty blocks", "awq", "4 bits"])
def test_what_cannot_be_widened_is_refused(tmp_path, change, words):
    quantised(tmp_path, make_checkpoint(tmp_path / "m", "llama", **MODELS["uneven"]), *KINDS["blocks"])
    folder = tmp_path / "narrow"
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_tensors(folder, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert words in str(caught.value)
