"""What a load leaves on a rank: a model that is not training, and what it cost."""

import torch
from helpers.checkpoints import make_checkpoint

from tplab.checkpoint import open_checkpoint
from tplab.model import load_model
from tplab.ranks import logical_ranks
from tplab.shard import ShardPlan


def test_a_load_reads_what_it_keeps(tmp_path):
    """The checkpoint is in float32, what is kept in bfloat16."""
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", layers=1, tie=False))
    plan = ShardPlan.from_config(ckpt.config, 2)
    for model in logical_ranks(2, load_model, ckpt, plan, torch.bfloat16):
        assert not model.training and {p.dtype for p in model.parameters()} == {torch.bfloat16}
        values = sum(p.numel() for p in model.parameters())
        assert (model.load_stats.bytes_read, model.load_stats.parameter_bytes) == (4 * values, 2 * values)
