"""What a load leaves on a rank: packed weights, a model that is not training, and what it cost."""

import torch
from helpers.checkpoints import make_checkpoint

from tplab.checkpoint import open_checkpoint
from tplab.model import load_model, loader
from tplab.ranks import logical_ranks
from tplab.shard import ShardPlan


def test_every_product_of_the_forward_pass_has_its_weight_packed_when_it_is_filled(tmp_path, monkeypatch):
    """Also the head; the embedding, the norms and the biases are no factors of a product."""
    ckpt, packed = open_checkpoint(make_checkpoint(tmp_path / "m", layers=1, tie=False)), []
    plan = ShardPlan.from_config(ckpt.config, 2)

    def pack(weight):
        assert torch.isfinite(weight).all() and weight.any()
        packed.append(weight)

    monkeypatch.setattr(loader, "pack", pack)
    for model in logical_ranks(2, load_model, ckpt, plan, torch.bfloat16):
        names = {name for name, p in model.named_parameters() if any(p is weight for weight in packed)}
        layer = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        assert names == {"lm_head.weight", *(f"layers.0.{name}.weight" for name in layer)}
        assert not model.training and {p.dtype for p in model.parameters()} == {torch.bfloat16}
        values = sum(p.numel() for p in model.parameters())
        assert (model.load_stats.bytes_read, model.load_stats.parameter_bytes) == (4 * values, 2 * values)
    assert len(packed) == 10
