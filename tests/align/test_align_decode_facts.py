"""The decode path's engine is made as it was asked for."""

import pytest
import torch
from helpers.checkpoints import make_checkpoint

from tplab.align import align_decode, decode
from tplab.align.run import AlignError
from tplab.engine.config import EngineConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("decode") / "m")


@pytest.mark.parametrize("given, config", [
    ({}, dict(block_size=4, num_blocks=2 + 3, max_num_seqs=8, max_num_batched_tokens=512, enable_prefix_caching=True)),
    (dict(block_size=2, num_blocks=9, max_num_seqs=3, max_num_batched_tokens=5, enable_prefix_caching=False),) * 2,
    (dict(block_size=16), dict(block_size=16, num_blocks=2))])
def test_the_engine_is_made_as_it_was_asked_for(monkeypatch, folder, given, config):
    made = []

    def config_of(**options):
        made.append(EngineConfig(**options))
        raise AlignError("enough")
    monkeypatch.setattr(decode, "EngineConfig", config_of)
    with pytest.raises(AlignError, match="enough"):
        align_decode(folder, [[1] * 8, [2] * 9], new_tokens=3, tensor_parallel_size=2, dtype="float64", logical=True,
                     **given)
    assert {key: getattr(made[0], key) for key in config} == config
    assert (made[0].max_model_len, made[0].vocab_size, made[0].tensor_parallel_size) == (10, 67, 2)
    assert made[0].dtype == torch.float64


@pytest.mark.parametrize("one_by_one, alike", [(True, True), (False, True), (True, False), (False, False)])
def test_prompts_are_finished_one_by_one_or_together(folder, one_by_one, alike):
    """Sequences with the same beginning are not computed together, but one step later."""
    report = align_decode(folder, [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4 if alike else 5, 9, 9]], new_tokens=1, logical=True,
                          one_by_one=one_by_one)
    facts = report.decode
    together = [[number for number, *_ in step.requests] for step in facts.steps]
    assert together == ([[0], [1]] if one_by_one or alike else [[0, 1]]) and report.ok
    assert report.computed == [[0, 1, 2, 3, 4], [4] if alike else [0, 1, 2, 3, 4]]
    assert (facts.block_size, facts.blocks_left, facts.preemptions, facts.prefix_caching) == (4, 0, 0, True)


@pytest.mark.parametrize("new_tokens", [0, 6, 7, 1.5, True, "2"])
def test_how_many_tokens_are_left_to_decode(folder, new_tokens):
    says = (r"the shortest prompt has 6 tokens, too few to decode .* of them one by one and read at least one before: "
            "write a longer prompt, or give another new_tokens")
    with pytest.raises(AlignError, match=says):
        align_decode(folder, [[1] * 9, [1] * 6], new_tokens=new_tokens, logical=True)
    assert align_decode(folder, [[1] * 6], new_tokens=5, logical=True, tensor_parallel_size=1).ok
