"""One table says where every tensor is and what it fills: held against transformers' names and the files' own bytes."""

import pytest
import torch
from helpers.checkpoints import make_checkpoint, save_tensors
from safetensors.torch import load_file

from tplab.checkpoint import CheckpointError, open_checkpoint
from tplab.checkpoint.layout import by_parameter, read_part, sources, tensor_parts
from tplab.model import load_model
from tplab.ranks import logical_ranks
from tplab.shard import ShardPlan

UNEVEN = dict(heads=9, kv_heads=3, hidden=27, head_dim=6, inter=31, vocab=71)
KINDS = {
    "biases everywhere": dict(model_type="llama", attention_bias=True, mlp_bias=True),
    "qkv bias": dict(model_type="qwen2", tie=True),
    "norms of q and k": dict(model_type="qwen3", attention_bias=True),
    "no bias": dict(model_type="mistral", tie=True),
}
FUSED = {"separate": {}, "qkv": {"fused_qkv": True}, "gate and up": {"fused_gate_up": True},
         "both": {"fused_qkv": True, "fused_gate_up": True}}


def on_rank(ckpt, plan):
    model = load_model(ckpt, plan)
    return model.shard, {name: p.data for name, p in model.named_parameters()}, model.load_stats


def rows_of(heads, size=6):
    return slice(heads.start * size, heads.stop * size)


def wanted(stored, shard, name):
    """The parameter, cut by hand out of the tensors of a checkpoint that fuses nothing."""
    q, kv, mlp, vocab = rows_of(shard.q_heads), rows_of(shard.kv_heads), shard.mlp, shard.vocab
    mlp, vocab = slice(mlp.start, mlp.stop), slice(vocab.start, vocab.stop)
    head, last, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", *name.split("."))

    def whole(part):
        path = ".".join(filter(None, [head, part, kind]))
        return stored[path if part == "lm_head" else f"model.{path}"]

    if last == "qkv_proj":
        return torch.cat([whole("q_proj")[q], whole("k_proj")[kv], whole("v_proj")[kv]])
    if last == "gate_up_proj":
        return torch.cat([whole("gate_proj")[mlp], whole("up_proj")[mlp]])
    if last in ("embed_tokens", "lm_head"):
        return whole(last)[vocab]
    columns = {"o_proj": q, "down_proj": mlp}.get(last)
    return whole(last) if columns is None or kind == "bias" else whole(last)[:, columns]


@pytest.mark.parametrize("kind, fused, tp", [
    *zip(KINDS, FUSED, (2, 1, 4, 2)), *zip(KINDS, reversed(FUSED), (4, 2, 2, 1))])
def test_every_parameter_holds_its_slices_and_no_byte_is_read_twice(tmp_path, kind, fused, tp):
    stored = load_file(make_checkpoint(tmp_path / "separate", **KINDS[kind], **UNEVEN, seed=4) / "model.safetensors")
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", **KINDS[kind], **UNEVEN, **FUSED[fused], seed=4))
    plan = ShardPlan.from_config(ckpt.config, tp)
    for shard, parameters, stats in logical_ranks(tp, on_rank, ckpt, plan):
        assert {part.parameter for part in tensor_parts(ckpt.config, ckpt.tensors).values()} == parameters.keys()
        for name, tensor in parameters.items():
            assert torch.equal(tensor, wanted(stored, shard, name)), name
        assert stats.bytes_read == stats.parameter_bytes == sum(4 * t.numel() for t in parameters.values())


def test_rows_of_a_fused_tensor_are_sliced_as_any_tensor_is(tmp_path):
    stored = load_file(make_checkpoint(tmp_path / "separate", seed=4) / "model.safetensors")
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", fused_qkv=True, seed=4))
    attn = by_parameter(tensor_parts(ckpt.config, ckpt.tensors))["layers.0.self_attn.qkv_proj.weight"]
    with ckpt.reader() as reader:
        for (name, part), rows in zip(attn.items(), sources([*attn.values()], reader), strict=True):
            assert rows.shape == part.shape and torch.equal(read_part(part, reader), stored[name])
            for piece in (slice(None), slice(3, None), slice(None, 5), slice(4, 9), slice(2, 2), slice(0, 0)):
                assert torch.equal(rows[piece], stored[name][piece]), name


def test_a_fused_weight_wants_its_bias_fused_and_nothing_beside_it(tmp_path):
    folder = make_checkpoint(tmp_path / "m", "qwen2", fused_qkv=True)
    tensors, bias = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.qkv_proj.bias"
    save_tensors(folder, {name: tensor for name, tensor in tensors.items() if name != bias})
    with pytest.raises(CheckpointError, match=f"{bias} missing"):
        open_checkpoint(folder)
    extra = "model.layers.1.self_attn.k_proj.bias"
    save_tensors(folder, tensors | {extra: torch.ones(16)})
    with pytest.raises(CheckpointError, match=f"unexpected tensor {extra}"):
        open_checkpoint(folder)
