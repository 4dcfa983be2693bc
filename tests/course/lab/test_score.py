"""The score: what counts as named, and what does not."""

import signal
import time
from multiprocessing import active_children

import pytest

from course.cases import CASES
from course.lab.score import (
    _SMALL,
    EXACT,
    FALSE_ALARM,
    HEALTHY,
    LAYOUTS,
    LOOKALIKE,
    UNNAMED,
    UNSEEN,
    WRONG,
    Run,
    Score,
    _mapped,
    _outcome,
    _run,
    score,
)
from course.random_weights import write_random
from tplab import faults
from tplab.align import Diagnosis
from tplab.checkpoint import open_checkpoint
from tplab.faults import MUSEUM, fault


def said(name, *lookalikes):
    return Diagnosis(name, "…", "layers.0.q", lookalikes=lookalikes)


@pytest.mark.parametrize("found, outcome", [
    ([said("rope_missing")], EXACT),
    ([said("rope_swallowed", "rope_missing")], LOOKALIKE),
    ([said("rope_missing"), said(None)], EXACT),
    ([said("rope_missing"), said("nan_mask")], WRONG),
    ([said("nan_mask")], WRONG),
    ([said(None)], UNNAMED),
    ([], UNSEEN),
])
def test_what_was_said_of_a_broken_engine_has_its_outcome(found, outcome):
    assert _outcome(fault("rope_missing"), found) == outcome


def test_a_healthy_engine_is_healthy_or_blamed():
    assert _outcome(None, []) == HEALTHY and _outcome(None, [said(None)]) == FALSE_ALARM


@pytest.mark.parametrize("case, found, outcome", [
    ("case_10", [said("rope_permuted_rows"), said("mask_of_another_row")], EXACT),
    ("case_12", [said("prefix_never_found")], EXACT),
    ("case_10", [said("rope_permuted_rows"), said("nan_mask")], WRONG),
    ("case_10", [said(None)], UNNAMED),
    ("case_10", [], UNSEEN),
    ("case_09", [], HEALTHY),
    ("case_09", [said(None)], FALSE_ALARM),
])
def test_what_was_said_of_a_case_has_its_outcome(case, found, outcome):
    """Of two bugs one may hide the other; an innocent engine must not be blamed."""
    assert _outcome(CASES[case], found) == outcome


def run(name, outcome, *said, dtype="float32"):
    return Run("fable", 2, dtype, name, said, outcome)


def test_a_score_is_good_only_if_nothing_was_missed_or_blamed():
    good = [run(None, HEALTHY), run("nan_mask", EXACT, "nan_mask"), run("rope_missing", LOOKALIKE, "rope_swallowed")]
    assert Score(tuple(good)).ok
    for bad in (run(None, FALSE_ALARM, "?"), run("no_mask", UNSEEN), run("no_mask", UNNAMED, "?"),
                run("no_mask", WRONG, "nan_mask")):
        found = Score((*good, bad))
        healthy = f"{1 + (bad.fault is None)} healthy ones: {int(bad.fault is None)} false alarms"
        assert healthy in str(found)
        assert not found.ok and f"  {bad.outcome}: {bad.fault or 'healthy'} on fable, tp 2, float32" in str(found)
    assert str(Score(tuple(good))) == ("float32: 2 broken engines: 1 named exactly, 1 among lookalikes, 0 wrongly, 0 "
                                       "without a name, 0 unseen; 1 healthy ones: 0 false alarms")


def test_each_dtype_is_counted_alone():
    found = Score((run("nan_mask", EXACT, "nan_mask"), run("no_mask", UNSEEN, dtype="bfloat16")))
    assert found.counts("float32") == {EXACT: 1} and found.counts("bfloat16") == {UNSEEN: 1}
    first, second, third = str(found).splitlines()
    assert first.startswith("float32: 1 broken engines: 1 named exactly, 0 among lookalikes, 0 wrongly, 0 without a n")
    assert second.endswith("0 without a name, 1 unseen; 0 healthy ones: 0 false alarms") and "no_mask" in third
    unnamed = str(Score((run("no_mask", UNNAMED, "?"), run("no_mask", WRONG, "nan_mask", "rope_missing"))))
    assert "1 wrongly, 1 without a name, 0 unseen" in unnamed and "float32: said nan_mask, rope_missing" in unnamed


def test_more_ranks_than_heads_are_left_out(monkeypatch):
    monkeypatch.setattr("course.lab.score._runs", lambda job: [job])
    assert [(name, size, dtype) for name, _, size, dtype in score(["fable"], [2, 8, 9], ["float32"]).runs] == [
        ("fable", 2, "float32"), ("fable", 8, "float32")]


def test_every_fault_is_put_into_a_model_on_which_it_can_show(monkeypatch):
    """The thirteen models on 2 and 3 ranks show every fault of the museum and every case: none is left out."""
    broken = []
    monkeypatch.setattr("course.lab.score._run", lambda name, ckpt, size, dtype, one: broken.append(one) or run(
        one and one.name, EXACT, dtype=dtype))
    lines = []
    found = score(dtypes=["bfloat16"], told=lines.append)
    below = {name for name, one in (MUSEUM | CASES).items() if one.below_bfloat16}
    assert {one.name for one in broken if one} == {*MUSEUM, *CASES} - below
    assert below == {"case_03", "router_low_precision"}
    assert broken.count(None) == len(lines) == 26
    assert found.counts("bfloat16")[EXACT] == len(broken)


@pytest.mark.parametrize("seed, name", enumerate(LAYOUTS, 4))
def test_nothing_is_wrong_with_any_of_its_models(tmp_path, seed, name):
    ckpt = open_checkpoint(write_random(tmp_path / "m", seed, **_SMALL, **LAYOUTS[name]))
    assert _run(name, ckpt, 2, "float32", None).outcome == HEALTHY


@pytest.mark.parametrize("name", ["nan_mask", "slot_off_by_one", "full_length_after_prefix_hit",
                                  "full_copy_on_every_rank", None])
def test_a_run_of_each_kind(name):
    """A forward pass, a decode path, one that ends in an error, one that only costs; and a healthy one."""
    found = _run("fable", open_checkpoint("fable"), 2, "float32", name and faults.fault(name))
    assert found.outcome == (EXACT if name else HEALTHY), found


def test_an_interrupt_ends_the_workers_in_the_middle_of_their_jobs():
    before = active_children()
    with pytest.raises(KeyboardInterrupt), _mapped(2) as mapped:
        next(iter(mapped(time.sleep, [0, 5, 5, 5])))
        workers = set(active_children()) - set(before)
        raise KeyboardInterrupt
    assert workers and {worker.exitcode for worker in workers} == {-signal.SIGTERM}
