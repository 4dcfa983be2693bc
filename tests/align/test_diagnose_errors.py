"""The diagnosis of runs that end in an error: slow is not skipped, a cause behind an LLM's error is found."""

import pickle

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.faults import prompts

from tplab.align import align, diagnose
from tplab.checkpoint import CheckpointError
from tplab.engine import GenerationError, StrictError
from tplab.errors import TplabError
from tplab.faults import fault
from tplab.llm import LLM, SamplingParams
from tplab.patch import Patch
from tplab.pool import shared_pool
from tplab.ranks import OpRecord, RankError, all_gather, all_reduce, logical_ranks, rank
from tplab.ranks.errors import Cause

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("errors") / "m", heads=6, kv_heads=3, hidden=48)


def record(seq, op="all_reduce", shape=(2, 8), line=7, left=True):
    return OpRecord(seq, op, shape, "float32", 0, "mine.py", line, left)


def hung(kinds, logs):
    """An error in which no rank failed by itself, with these kinds of causes and these op logs."""
    return RankError("not finished after 1 s", [Cause(r, kind, {"running": "is still running at mine.py, line 3",
                                                                "waiting": "waits in all_reduce at mine.py, line 7",
                                                                "returned": "returned"}[kind])
                                                for r, kind in enumerate(kinds)], logs)


@pytest.mark.parametrize("kinds, logs", [
    (["waiting", "running"], [[record(1, left=False)], []]),
    (["running", "waiting"], [[record(1)], [record(1), record(2, left=False)]]),
    (["waiting", "waiting", "running"], [[record(4, left=False)], [record(4, left=False)], []]),
    (["running", "running"], [[record(1)], [record(1)]]),
    (["running", "running"], [[], []]),
])
def test_a_rank_at_work_has_left_nothing_out(kinds, logs):
    diagnosis = diagnose(hung(kinds, logs))
    assert diagnosis.fault is None and diagnosis.point == "error"
    assert diagnosis.sentence == "No known bug fits. The run ended with: not finished after 1 s"


def test_collectives_are_compared_by_their_number_not_by_their_place_in_the_ring():
    """A log keeps the newest only: that of the rank that is one ahead begins one later."""
    def log(begin, end):
        return [record(seq, ("all_reduce", "barrier")[seq % 2]) for seq in range(begin, end)]

    diagnosis = diagnose(hung(["waiting", "returned"], [log(101, 201), log(100, 200)]))
    assert diagnosis.fault == "collective_skipped" and diagnosis.numbers == {"collective": 200}


def test_one_line_with_tensors_of_unlike_shapes_is_no_skipped_collective():
    def unlike():
        all_reduce(torch.ones(3))
        all_gather(torch.ones(2 + rank(), 4), dim=1)

    with pytest.raises(RankError) as caught:
        logical_ranks(2, unlike)
    diagnosis = diagnose(caught.value)
    assert diagnosis.fault is None and diagnosis.numbers == {"collective": 2}
    assert "[2, 4]" in diagnosis.sentence and "[3, 4]" in diagnosis.sentence and "do not fit" in diagnosis.sentence


@pytest.mark.pool
@pytest.mark.parametrize("logical", [True, False])
def test_what_a_rank_raised_is_part_of_the_chain(logical):
    def raises():
        raise StrictError("ranks drew tokens 3 and 4", drawn=[{0: 3}, {0: 4}])

    with pytest.raises(RankError) as caught:
        logical_ranks(2, raises) if logical else shared_pool(2).run(raises)
    diagnosis = diagnose(caught.value)
    assert diagnosis.fault == "rank_local_sampling" and "ranks drew tokens 3 and 4" in diagnosis.sentence


@pytest.mark.parametrize("name, options", [
    ("collective_skipped", {}),
    ("rank_local_sampling", {"strict": True}),
    ("full_length_after_prefix_hit", {"block_size": 4}),
    ("block_leaked", {"block_size": 4, "num_blocks": 8}),
])
def test_the_error_of_a_step_names_the_fault_behind_it(folder, name, options):
    with LLM(folder, 2, logical=True, patches=[fault(name)], **options) as llm, pytest.raises(TplabError) as caught:
        for _ in range(9):
            for prompt in ([1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3]):
                llm.add_request(prompt, GREEDY)
            while llm.has_unfinished_requests:
                llm.step()
    assert diagnose(caught.value).fault == name, diagnose(caught.value)


def test_the_cause_behind_a_generation_error_is_its_diagnosis(folder):
    with LLM(folder, 2, logical=True, patches=[fault("collective_skipped")]) as llm:
        with pytest.raises(GenerationError) as caught:
            llm.generate([1, 2, 3], GREEDY)
    assert isinstance(caught.value.__cause__, RankError)
    assert diagnose(caught.value) == diagnose(caught.value.__cause__)


def test_a_rank_that_raised_in_an_llm(folder):
    def token_positions(segment):
        raise ValueError("no positions today")

    with LLM(folder, 2, logical=True, patches=[Patch("tplab.engine.runner.token_positions", token_positions)]) as llm:
        with pytest.raises(GenerationError) as caught:
            llm.generate([1, 2, 3], GREEDY)
    diagnosis = diagnose(caught.value)
    assert diagnosis.fault is None and "ValueError: no positions today" in diagnosis.sentence


def test_the_error_of_a_checkpoint_on_a_rank_is_quoted(folder):
    def load_model(*_):
        raise CheckpointError("the file went away")

    with pytest.raises(RankError) as caught:
        align("fable", prompts(768), patches=[Patch("tplab.align.gather.load_model", load_model)], logical=True)
    assert [type(error) for error in (caught.value, caught.value.first.exception)] == [RankError, CheckpointError]
    assert "the file went away" in diagnose(caught.value).sentence
    sent = pickle.loads(pickle.dumps(caught.value))  # without the exception object
    assert "the file went away" in diagnose(sent).sentence
