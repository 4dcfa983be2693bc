"""The diff along the decode path: every position that the engine computes in its own steps against one HF pass."""

from types import SimpleNamespace as Some

import pytest
import torch
from helpers.checkpoints import make_checkpoint

from tplab.align import AlignError, align_decode, decode, diagnose
from tplab.align.decode import _ForcingExecutor
from tplab.patch import Patch, original


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("decode") / "m", "qwen3", heads=9, kv_heads=3, hidden=36, head_dim=6,
                           attention_bias=True, seed=4)


def ids(*lengths):
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(67, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("options", [
    {}, {"block_size": 1}, {"block_size": 16, "max_num_batched_tokens": 5}, {"num_blocks": 12, "max_num_seqs": 2},
    {"enable_prefix_caching": False},
], ids=str)
def test_every_computed_position_is_hugging_faces(folder, tp, options):
    report = align_decode(folder, ids(23, 11, 30), new_tokens=6, tensor_parallel_size=tp, dtype="float64", logical=True,
                          **options)
    assert report.ok and report.max_abs_diff <= 1e-5
    # The prompts' rows but the very last token of each, whose keys are not needed; and one row of logits per draw.
    assert report.computed == [list(range(22)), list(range(10)), list(range(29))]
    assert report.tp_logits.shape == (18, 67)


def test_a_prefix_hit_is_not_computed_again_and_what_follows_is_right(folder):
    (text,) = ids(25)
    report = align_decode(folder, [text, text[:14] + ids(9)[0]], new_tokens=3, dtype="float64", one_by_one=True,
                          logical=True)
    assert report.ok and report.computed[0][0] == 0
    assert report.computed[1] == list(range(12, 22)), "three blocks of four tokens are shared"


@pytest.mark.pool
def test_on_real_ranks(folder):
    report = align_decode(folder, ids(19, 8), new_tokens=4)
    assert report.ok and report.dtype == torch.float32


def test_a_decode_position_off_by_one_shows_where_decoding_begins(folder):
    right = original("tplab.engine.runner.token_positions")

    def one_too_far(segment):
        positions = right(segment)
        return range(positions.start + 1, positions.stop + 1) if segment.count == 1 else positions

    report = align_decode(folder, ids(19), new_tokens=4, logical=True,
                          patches=[Patch("tplab.engine.runner.token_positions", one_too_far)])
    assert report.first_divergence.name == "layers.0.q_rope"
    assert diagnose(report).fault == "decode_position_off_by_one"


@pytest.mark.parametrize("new_tokens", [0, 8, 9])
def test_too_short_a_prompt_is_refused(folder, new_tokens):
    with pytest.raises(AlignError, match="shortest prompt"):
        align_decode(folder, ids(20, 8), new_tokens=new_tokens)


def test_of_a_row_that_was_computed_once_more_the_last_computation_counts():
    """A sequence that lost its blocks begins again; the token that was drawn before is not drawn again."""
    executor = _ForcingExecutor(None, [[5, 6, 7]])
    executor.rows = {(0, 1): (1, 1), (0, 0): (1, 0), (1, 0): (0, 2)}
    executor.logit_rows = {(0, 1): (0, 0), (1, 0): (0, 1)}
    executor.traces = [[{"q": torch.tensor([1, 2, 3]), "logits": torch.tensor([7, 8])}],
                       [{"q": torch.tensor([10, 20])}]]
    assert executor.places("q") == executor.rows and executor.places("logits") == {(1, 0): (0, 1)}
    found = executor.whole_trace(0)
    assert found["q"].tolist() == [10, 20, 3] and found["logits"].tolist() == [8]


def test_what_a_rank_drew_is_kept_before_it_is_told_otherwise(monkeypatch):
    runner = Some(drawn={0: 5, 1: 6})
    monkeypatch.setattr(decode, "execute_model", lambda key, step: Some(sampled_token_ids=runner.drawn))
    monkeypatch.setattr(decode, "state", {decode._KEY: runner})
    assert decode.traced_step(None, {0: 9})[1] == {0: 5, 1: 6} and runner.drawn == {0: 9, 1: 6}
