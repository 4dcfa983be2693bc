"""The wing of models of today: each fault shows where it says, and has its name from ``align`` and from ``check``."""

import pytest
from helpers import turns
from helpers.faults import nothing_is_patched, over_floor
from helpers.trait_models import TRAITS
from helpers.wing import SHOWN_ON, aligned, checked, model_of, named

from tplab.checkpoint import open_checkpoint
from tplab.faults import WING, fault


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = model_of(name, tmp_path_factory.mktemp("wing") / "m")
        return made[name]
    return get


def test_at_least_sixteen_faults_each_with_a_sighting():
    assert len(WING) >= 16 and WING == tuple(SHOWN_ON)
    assert all(fault(name).sightings for name in WING)


@pytest.mark.parametrize("name", WING)
def test_it_shows_where_it_says_and_is_named(model, name):
    """By ``align``; every fourth one also by ``check``, below."""
    one, ckpt = fault(name), model(SHOWN_ON[name])
    assert one.why_not(open_checkpoint("fable").config, 2), "on a model without the trait there is nothing to see"
    report = aligned(ckpt, one, 2, "float32")
    assert report.first_divergence.name == one.first_point and over_floor(report) >= 100
    assert named(report, one) and report.diagnoses[0].fault == name, report.diagnosis_lines()
    assert nothing_is_patched()


@pytest.mark.parametrize("name", WING[1::4])
def test_a_recording_that_holds_no_trace_point_names_it_in_bfloat16_on_three_ranks(model, name, tmp_path):
    one, ckpt = fault(name), model(SHOWN_ON[name])
    tp = 2 if one.why_not(ckpt.config, 3) else 3
    report = checked(ckpt, one, tp, "float32" if one.below_bfloat16 else "bfloat16", tmp_path / "run")
    assert report.verdict == "bug" and named(report, one), report.diagnosis_lines()


@pytest.mark.parametrize(("tp", "dtype", "name"), [
    (2 + at % 3, ("float32", "bfloat16")[at % 2], name)
    for at, name in enumerate([*TRAITS] if turns.ALL else [*TRAITS][1::2])])
def test_nothing_is_wrong_with_a_healthy_recording(model, name, tp, dtype, tmp_path):
    """Every second model (tests/align/test_align_traits.py has the others), in both dtypes by turns; of experts, cut
    ones in float32 and dealt out ones in bfloat16."""
    ckpt = model(name)
    report = checked(ckpt, None, tp, dtype, tmp_path / "run",
                     enable_expert_parallel=dtype == "bfloat16" and ckpt.config.experts is not None)
    assert report.verdict == "clean" and not report.diagnoses, report.diagnosis_lines()
