"""Every fault of the decode path: it shows where it says, the diagnosis names it, and the engine is clean afterwards.
"""

import time

import pytest
from helpers import turns
from helpers.faults import case_checkpoint, models_where, nothing_is_patched, over_floor, prompts

from tplab.align import align, align_decode, diagnose
from tplab.engine.errors import EngineError
from tplab.errors import TplabError
from tplab.faults import MUSEUM, WING, fault, scenario
from tplab.ranks import RankError

DECODE = [name for name, one in MUSEUM.items() if one.shows_in == "decode"]
RUN = ["fable", "smollm2's heads", "qwen3, replicated"]


def run(name, ckpt, tp, patches, **options):
    return align_decode(ckpt, **scenario(name, ckpt.config.vocab_size), tensor_parallel_size=tp, patches=patches,
                        **options)


@pytest.mark.parametrize("at, name", [*enumerate(name for name in DECODE if name not in WING)])
def test_it_shows_where_it_says_and_is_named(at, name, tmp_path):
    """In one model by turns; the clean engine passes its scenario."""
    ((ckpt, tp),) = models_where(name, at, tmp_path, RUN)
    right = run(name, ckpt, tp, [], logical=True)
    assert right.ok and diagnose(right).ok, diagnose(right)
    if fault(name).first_point == "error":
        with pytest.raises(EngineError) as caught:
            run(name, ckpt, tp, [fault(name)], logical=True)
        diagnosis = diagnose(caught.value)
    else:
        report = run(name, ckpt, tp, [fault(name)], logical=True)
        diagnosis = diagnose(report)
        if fault(name).first_point in ("steps", "blocks", "drawn"):
            assert report.ok, "its numbers are right"
        else:
            assert report.first_divergence.name == fault(name).first_point and over_floor(report) >= 1000
    assert diagnosis.fault == name, diagnosis
    assert diagnosis.point == fault(name).first_point
    assert nothing_is_patched()


@pytest.mark.parametrize("name", [name for name in DECODE if fault(name).first_point != "error"][:: 2 - turns.ALL])
def test_on_one_rank_it_shows_exactly_where_it_names_no_reason_against_it(name):
    ckpt = case_checkpoint("fable", None)
    diagnosis = diagnose(run(name, ckpt, 1, [fault(name)], logical=True))
    assert (diagnosis.fault == name) == (not fault(name).why_not(ckpt.config, 1)), diagnosis


@pytest.mark.parametrize("at, name", [*enumerate((
    "no_mask", "rope_missing", "all_reduce_missing", "vocab_offset", "repeated_kv_stored",
    *("nan_mask", "head_random", "kv_first_rows") * turns.ALL))])
def test_faults_of_the_forward_pass_show_on_the_decode_path_too(at, name, tmp_path):
    ((ckpt, tp),) = models_where(name, at, tmp_path, RUN)
    report = run(name, ckpt, tp, [fault(name)], logical=True)
    assert report.first_divergence.name == fault(name).first_point and name in diagnose(report).names


@pytest.mark.pool
@pytest.mark.parametrize("name", ["decode_position_off_by_one", "stale_block_table", "rank_local_sampling"])
def test_on_real_ranks_and_clean_afterwards(name):
    ckpt = case_checkpoint("fable", None)
    assert diagnose(run(name, ckpt, 2, [fault(name)])).fault == name
    assert diagnose(run(name, ckpt, 2, [])).ok


@pytest.mark.pool
@pytest.mark.parametrize("logical", [True, False])
def test_a_skipped_collective_is_named_from_the_op_logs(logical):
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        align("fable", prompts(768), patches=[fault("collective_skipped")], logical=logical)
    diagnosis = diagnose(caught.value)
    assert diagnosis.fault == "collective_skipped" and diagnosis.point == "error" and "all_reduce" in diagnosis.sentence
    assert time.monotonic() - begin < 60
    assert align("fable", prompts(768), logical=logical).ok, "the ranks are usable again"


def test_a_leak_is_named_from_the_standstill_that_it_ends_in():
    ckpt = case_checkpoint("fable", None)
    options = scenario("block_leaked", 768) | {"prompts": [p + p for p in prompts(768)] * 3, "num_blocks": 14}
    with pytest.raises(EngineError) as caught:
        align_decode(ckpt, **options, patches=[fault("block_leaked")], logical=True)
    diagnosis = diagnose(caught.value)
    assert diagnosis.fault == "block_leaked" and diagnosis.numbers["leaked"] > 0
    assert align_decode(ckpt, **options, logical=True).ok


def test_another_error_is_not_explained_away():
    diagnosis = diagnose(EngineError("the cache is on fire\nreally"))
    assert diagnosis.fault is None
    assert diagnosis.sentence == "No known bug fits. The run ended with: the cache is on fire"


def test_a_rank_that_raised_is_no_skipped_collective():
    from tplab.ranks import all_reduce, logical_ranks, rank

    def one_fails():
        import torch
        if rank() == 1:
            raise ValueError("no")
        all_reduce(torch.ones(1))

    with pytest.raises(RankError) as caught:
        logical_ranks(2, one_fails)
    assert diagnose(caught.value).fault is None


def test_a_scenario_needs_a_fault_of_the_museum():
    with pytest.raises(TplabError):
        scenario("slot_off_by_two", 768)
