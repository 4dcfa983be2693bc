"""The decode path's executor by hand: which row is which token's, what is told to the ranks and what they drew."""

from types import SimpleNamespace as Some

import pytest
import torch
from helpers.checkpoints import make_checkpoint

from tplab.align import align_decode, decode, reference
from tplab.align.decode import _ForcingExecutor
from tplab.align.run import AlignError
from tplab.engine.config import EngineConfig

TEXTS = [[10, 11, 12, 13, 14], [20, 21, 22, 23]]


def request(number, start, count, draws=True, draft=()):
    return Some(request_id=number, segment=Some(start=start, count=count), sampling=Some() if draws else None,
                num_draft_tokens=len(draft), draft=draft)


def ran(*steps):
    """Steps on two ranks; a row's point is 100 · rank + 10 · sequence + position, as it was computed in its step."""
    executor, told = _ForcingExecutor(None, TEXTS), []

    def run(function, step, forced):
        told.append((function, dict(forced)))
        answers = []
        for rank in (0, 1):
            rows = [100 * rank + 10 * s.request_id + position + 0.1 * (len(told) - 1) for s in step.requests
                    for position in range(s.segment.start, s.segment.start + s.segment.count)]
            ends = [100 * rank + 10 * s.request_id + s.segment.start + s.segment.count - 1 for s in step.requests
                    if s.sampling is not None]
            answers.append(({"q": torch.tensor(rows), "logits": torch.tensor(ends)},
                            {s.request_id: 7 + rank for s in step.requests if s.sampling is not None}))
        return answers
    executor.run = run
    tables = iter([{0: [4], 1: [5]}, {0: [4, 6], 1: [5]}, {1: [5]}])
    said = []
    for requests in steps:
        executor.scheduler = Some(running=[Some(request_id=number, block_table=Some(block_ids=blocks))
                                           for number, blocks in next(tables).items()])
        said.append(executor.execute_model(Some(requests=requests)))
    return executor, told, said


def test_every_step_is_carried_out_with_the_given_tokens():
    executor, told, said = ran([request(0, 0, 3), request(1, 0, 2, draws=False)], [request(1, 2, 1), request(0, 3, 1)])
    assert told == [(decode.traced_step, {0: 13}), (decode.traced_step, {1: 23, 0: 14})]
    assert [[one.sampled_token_ids for one in answers] for answers in said] == [[{0: 13}] * 2, [{1: 23, 0: 14}] * 2]
    assert executor.rows == {(0, 0): (0, 0), (0, 1): (0, 1), (0, 2): (0, 2), (1, 0): (0, 3), (1, 1): (0, 4),
                             (1, 2): (1, 0), (0, 3): (1, 1)}
    assert executor.logit_rows == {(0, 2): (0, 0), (1, 2): (1, 0), (0, 3): (1, 1)}
    assert executor.num_keys() == [3, 3, 3, 4, 2, 2, 3] and executor.places("logits") == executor.logit_rows
    assert executor.tables == [{0: (4,), 1: (5,)}, {0: (4, 6), 1: (5,)}] and len(executor.steps) == 2
    assert executor.drawn == [{(0, 2): 7, (1, 2): 7, (0, 3): 7}, {(0, 2): 8, (1, 2): 8, (0, 3): 8}]
    found = executor.whole_trace(1)
    assert found["q"].tolist() == pytest.approx([100, 101, 102, 103.1, 110, 111, 112.1])
    assert found["logits"].tolist() == [102, 103, 112]


def test_rows_that_were_computed_again_count_as_they_were_last():
    executor, _, _ = ran([request(0, 0, 3)], [request(0, 0, 2, draws=False)], [request(0, 2, 2)])
    assert executor.rows == {(0, 0): (1, 0), (0, 1): (1, 1), (0, 2): (2, 0), (0, 3): (2, 1)}
    assert executor.places("logits") == {(0, 3): (2, 0)}, "what was drawn at token 2 belongs to a row that is gone"
    assert executor.num_keys() == [2, 2, 4, 4]
    assert executor.whole_trace(0)["q"].tolist() == pytest.approx([0.1, 1.1, 2.2, 3.2])


def test_of_a_draft_the_given_tokens_stay_and_the_others_have_no_rows():
    """Token 10 is computed with the drafts 11, 9 and 13: the text goes on with 11 and 12."""
    executor, told, said = ran([request(0, 0, 4, draft=(11, 9, 13))])
    assert told == [(decode.traced_step, {0: 12})]
    assert [(one.sampled_token_ids, one.num_accepted) for one in said[0]] == [({0: 12}, {0: 1})] * 2
    assert executor.rows == executor.logit_rows == {(0, 0): (0, 0), (0, 1): (0, 1)}
    assert executor.drawn == [{}, {}], "it is behind as many drafts as the rank itself has accepted"


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


# Hugging Face's models.

def test_the_last_two_models_are_kept(monkeypatch):
    loaded = []
    monkeypatch.setattr(reference, "_loaded", type(reference._loaded)())
    monkeypatch.setattr(reference, "_load", lambda ckpt, dtype: loaded.append((ckpt.state, dtype)) or Some(
        eval=lambda: (ckpt.state, dtype)))

    def get(state, dtype=torch.float32):
        assert reference.hf_model(Some(state=state), dtype) == (state, dtype)
        return len(loaded)
    assert [get("a"), get("b"), get("a"), get("b")] == [1, 2, 2, 2]
    assert [get("a"), get("c"), get("a"), get("b")] == [2, 3, 3, 4], "b had to go: it was asked for longest ago"
    assert get("b", torch.float64) == 5 and get("b") == 5 and get("a") == 6
