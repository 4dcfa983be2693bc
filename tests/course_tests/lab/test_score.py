"""The score: what counts as named, and what does not."""


import pytest

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
    _outcome,
    _run,
)
from course.random_weights import write_random
from tplab.align import Diagnosis
from tplab.checkpoint import open_checkpoint
from tplab.faults import MUSEUM, fault


def named(name, *lookalikes):
    return Diagnosis(name, "…", "layers.0.q", lookalikes=lookalikes)


ROPE = fault("rope_missing")


@pytest.mark.parametrize("broken, found, outcome", [
    (ROPE, [named("rope_missing")], EXACT), (ROPE, [named("rope_swallowed", "rope_missing")], LOOKALIKE),
    (ROPE, [named("rope_missing"), named(None)], EXACT), (ROPE, [named("rope_missing"), named("nan_mask")], WRONG),
    (ROPE, [named("nan_mask")], WRONG), (ROPE, [named(None)], UNNAMED), (ROPE, [], UNSEEN),
    (None, [], HEALTHY), (None, [named(None)], FALSE_ALARM)])
def test_what_was_found_in_an_engine_has_its_outcome(broken, found, outcome):
    assert _outcome(broken, found) == outcome


def test_a_score_is_good_only_if_nothing_was_missed_or_blamed_and_counts_each_dtype_alone():
    def run(name, outcome, *names, dtype="float32"):
        return Run("fable", 2, dtype, name, names, outcome)

    good = [run(None, HEALTHY), run("nan_mask", EXACT, "nan_mask"), run("rope_missing", LOOKALIKE, "rope_swallowed")]
    assert Score(tuple(good)).ok
    assert str(Score(tuple(good))) == ("float32: 2 broken engines: 1 named exactly, 1 among lookalikes, 0 wrongly, 0 "
                                       "without a name, 0 unseen; 1 healthy ones: 0 false alarms")
    for bad in (run(None, FALSE_ALARM, "?"), run("no_mask", UNSEEN), run("no_mask", UNNAMED, "?"),
                run("no_mask", WRONG, "nan_mask")):
        found = Score((*good, bad))
        assert not found.ok and f"  {bad.outcome}: {bad.fault or 'healthy'} on fable, tp 2, float32" in str(found)
    both = Score((*good, run("no_mask", UNSEEN, dtype="bfloat16")))
    assert both.counts("float32")[EXACT] == 1 and both.counts("bfloat16") == {UNSEEN: 1}


def test_every_fault_shows_on_some_model_of_the_score(tmp_path):
    shown = set()
    for seed, layout in enumerate(LAYOUTS.values(), 4):
        config = open_checkpoint(write_random(tmp_path / str(seed), seed, **_SMALL, **layout)).config
        shown |= {name for name, bug in MUSEUM.items() for size in (2, 3) if not bug.why_not(config, size)}
    fable = open_checkpoint("fable").config
    assert shown | {name for name, bug in MUSEUM.items() if not bug.why_not(fable, 2)} == {*MUSEUM}


@pytest.mark.parametrize("name", ["nan_mask", "slot_off_by_one", "full_copy_on_every_rank", None])
def test_a_run_of_each_kind(name):
    """A forward pass, a decode path, one that only costs; and a healthy one."""
    found = _run("fable", open_checkpoint("fable"), 2, "float32", name and fault(name))
    assert found.outcome == (EXACT if name else HEALTHY), found
