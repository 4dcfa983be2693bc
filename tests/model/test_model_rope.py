"""Rope types whose frequencies depend on the length: every sequence of a batch has its own."""

import pytest
import torch
from helpers.checkpoints import make_checkpoint

from tplab.checkpoint import open_checkpoint
from tplab.model.rope import Rotary

LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 16, "factor": 4.0}


@pytest.mark.parametrize("rope", ["dynamic", LONGROPE], ids=["dynamic", "longrope"])
def test_sequences_of_one_batch_leave_each_others_frequencies_alone(tmp_path, rope):
    folder = make_checkpoint(tmp_path / "m", "llama", rope=rope, max_positions=16 if rope == "dynamic" else 64)
    config, x = open_checkpoint(folder).config.hf, torch.empty(0)
    lengths = [30, 20, 5]  # longer and shorter than 16, from where on they are stretched; the longest one first
    alone = [Rotary(config)(x, torch.arange(n), [n]) for n in lengths]
    together = Rotary(config)(x, torch.cat([torch.arange(n) for n in lengths]), lengths)
    for found, expected in zip(together, zip(*alone)):
        assert torch.equal(found, torch.cat(expected, dim=1))


def test_a_part_is_turned_as_in_a_sequence_of_the_length_that_is_said(tmp_path):
    config, x = open_checkpoint(make_checkpoint(tmp_path / "m", "llama", rope="dynamic", max_positions=16)
                                ).config.hf, torch.empty(0)
    whole = Rotary(config)(x, torch.arange(30), [30])
    longer = Rotary(config)(x, torch.arange(31), [31])
    part = Rotary(config)(x, torch.arange(6), [(6, 30)])
    assert all(torch.equal(some, every[:, :6]) for some, every in zip(part, whole))
    assert not torch.equal(part[0], longer[0][:, :6])
