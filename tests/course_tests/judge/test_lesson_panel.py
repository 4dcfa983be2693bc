"""The panel: what is ticked is what runs, mistakes are told in it, and nothing random is stored."""

import math

import pytest
from helpers.reports import make_report
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display
from IPython.utils.capture import capture_output

from course import lesson
from course.judge import fault_panel
from tplab.align import AlignError, Diagnosis
from tplab.errors import TplabError


@pytest.fixture
def asked(monkeypatch):
    """Every call of align, as the panel makes it; a report with NaN for nan_mask, a clean one otherwise."""
    calls = []

    def align(model, prompt, **options):
        calls.append({"prompt": prompt, **options, "patches": [fault.name for fault in options["patches"]]})
        if not prompt:
            raise AlignError("the prompt is empty; at least one token is <needed>")
        if prompt == "crash":
            raise RuntimeError("boom")
        report = make_report({"layers.0.attn": math.nan} if "nan_mask" in calls[-1]["patches"] else None)
        report.evidence.clear()
        report.diagnoses = [] if report.ok else [Diagnosis("nan_mask", "0 × -inf"), Diagnosis("no_mask", "a < b")]
        return report

    monkeypatch.setattr(fault_panel, "align", align)
    monkeypatch.setattr(fault_panel, "diagnose", lambda report: Diagnosis(None, "fine"))
    return calls


@pytest.fixture
def fable_stand_in(tmp_path):
    from helpers.checkpoints import make_checkpoint

    from tplab.checkpoint import open_checkpoint

    return open_checkpoint(make_checkpoint(tmp_path / "m"))


@pytest.fixture
def made(asked, fable_stand_in):
    return lesson.panel(["nan_mask", "no_mask", "row_bias_everywhere"], model=fable_stand_in, ticked=["nan_mask"],
                        prompt="Hi")


def test_it_runs_once_when_it_is_made(made, asked):
    assert asked == [{"prompt": "Hi", "tensor_parallel_size": 2, "dtype": "float32", "patches": ["nan_mask"]}]
    assert [fault.name for fault in made.ticked] == ["nan_mask"]
    assert "layers.0.attn" in made._verdict.value and "0 × -inf<br>a &lt; b" in made._verdict.value


def test_the_button_runs_what_is_ticked_chosen_and_written(made, asked):
    made._boxes[0].value, made._tp.value, made._prompt.value = False, 4, "Once"
    before = made._image.value
    made._button.click()
    assert asked[-1] == {"prompt": "Once", "tensor_parallel_size": 4, "dtype": "float32", "patches": []}
    assert made._image.value != before and made._image.value.startswith('<img alt="largest')
    assert 'src="data:image/png;base64,iVBOR' in made._image.value and "nothing ticked, 4 ranks" in made._image.value
    assert "nan_mask, 2 ranks" in made.alt_text and "nothing ticked, 4 ranks: inside the float32 floor" in made.alt_text


def test_a_panel_with_a_fault_of_decoding_compares_the_decode_path(asked, fable_stand_in, monkeypatch):
    monkeypatch.setattr(fault_panel, "align_decode", fault_panel.align)
    monkeypatch.setattr(fault_panel, "align", lambda *args, **options: pytest.fail("a forward pass does not see it"))
    lesson.panel(["nan_mask", "slot_off_by_one"], model=fable_stand_in, ticked=["slot_off_by_one"], prompt="Hi")
    lesson.panel(["nan_mask", "slot_off_by_one"], model=fable_stand_in, ticked=["nan_mask"], prompt="Hi")
    assert [one["patches"] for one in asked] == [["slot_off_by_one"], ["nan_mask"]], "whatever is ticked"


def test_a_fault_that_cannot_show_says_why(made):
    made._boxes[2].value = True
    made._button.click()
    assert "every rank adds the bias of a row-parallel layer: " in made._verdict.value


def test_a_mistake_is_told_in_the_panel_and_the_button_works_again(made):
    made._prompt.value = ""
    made._button.click()
    assert "the prompt is empty; at least one token is &lt;needed&gt;" in made._verdict.value
    assert made._image.value == "", "the picture of the run before would stand above the error"
    assert not made._button.disabled and made._button.description == "Run"
    made._prompt.value = "Once"
    made._button.click()
    assert "the prompt is empty" not in made._verdict.value


def test_a_crash_is_told_and_not_swallowed(made):
    made._prompt.value = "crash"
    with pytest.raises(RuntimeError, match="boom"):
        made.run()
    assert "RuntimeError: boom" in made._verdict.value and not made._button.disabled
    with pytest.raises(TplabError, match="'no_mask' cannot be ticked: the panel has nan_mask"):
        lesson.panel(["nan_mask"], ticked=["no_mask"], prompt="Hi")


def test_what_is_stored_has_a_picture_and_no_random_text(made, asked, fable_stand_in):
    InteractiveShell.instance()
    again = lesson.panel(["nan_mask", "no_mask", "row_bias_everywhere"], model=fable_stand_in, ticked=["nan_mask"],
                         prompt="Hi")
    stored = []
    for one in (made, again):
        with capture_output() as shown:
            display(one)
        (output,) = shown.outputs
        assert set(output.data) == {"text/plain", "image/png", "application/vnd.jupyter.widget-view+json"}
        assert output.data["application/vnd.jupyter.widget-view+json"] == {
            "version_major": 2, "version_minor": 0, "model_id": one.widget.model_id}
        stored.append((output.data["text/plain"], shown.stdout))
    assert stored[0] == stored[1]
    assert stored[0][1].startswith("Figure: ")
