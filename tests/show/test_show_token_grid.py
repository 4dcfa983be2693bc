"""Where in the text a run goes wrong, and the judge of a learner's slot mapping."""

import xml.etree.ElementTree as ET

import pytest
from helpers.checkpoints import make_checkpoint
from helpers.reports import make_report

from tplab import lesson, show
from tplab.align import align_decode
from tplab.faults import fault


class Letters:
    """A tokenizer: every id is a letter."""

    @staticmethod
    def decode(ids):
        return "".join(chr(97 + token % 26) for token in ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("where") / "m", "qwen2", seed=3)


def test_a_wrong_slot_shows_from_the_first_decoded_token_on(folder):
    prompts = [list(range(13)), list(range(20, 30))]
    words = show.token_grid_figure(align_decode(folder, prompts, new_tokens=4, logical=True,
                                           patches=[fault("slot_off_by_one")]), Letters).alt_text
    assert words == ("Figure: the tokens at layers.0.attn. prompt 0: first wrong at position 9 ('j'); "
                     "prompt 1: first wrong at position 6 ('a').")


def test_a_healthy_run_is_all_right_and_says_what_was_found(folder):
    prompts = [list(range(13)), [*range(8), 40, 41, 42, 43]]
    figure = show.token_grid_figure(align_decode(folder, prompts, new_tokens=3, one_by_one=True, logical=True), Letters)
    assert figure.alt_text == ("Figure: the tokens at norm. prompt 0: all right; prompt 1: all right, "
                               "8 tokens found in the cache.")
    assert "not computed: found in the cache" in figure.svg and "#f3b98f" in figure.svg.split("decoding begins")[0]


def test_a_report_of_one_forward_pass_has_no_such_figure():
    with pytest.raises(show.ShowError, match="align_decode"):
        show.token_grid_figure(make_report(), Letters)


def right(block_ids, positions, block_size):
    return [block_ids[p // block_size] * block_size + p % block_size for p in positions]


@pytest.mark.parametrize("learners, told", [
    (lambda block_ids, positions, block_size: [block_ids[0] * block_size + p for p in positions],
     "position 4 goes to slot 20, which is in block 5 and belongs to somebody else"),
    (lambda block_ids, positions, block_size: [block_ids[p % 3] * block_size + p % block_size for p in positions],
     "position 1 goes to slot 5 in block 1, but it is the table's entry 0 that holds positions 0 to 3"),
    (lambda block_ids, positions, block_size: [block_ids[p // block_size] * block_size + 3 for p in positions],
     "place 3 of the right block; it is the block's 1. token"),
    (lambda block_ids, positions, block_size: [block_ids[p // block_size] * block_size for p in positions],
     "place 0 of the right block; it is the block's 2. token"),
    (lambda block_ids, positions, block_size: right(block_ids, range(len(positions)), block_size),
     "position 7 goes to slot 16 in block 4"),
    (lambda block_ids, positions, block_size: right(block_ids, positions, block_size)[:1],
     "10 positions go in, 1 slots"),
    (lambda block_ids, positions, block_size: None, "it returns NoneType"),
    (lambda block_ids, positions, block_size: [float(slot) for slot in right(block_ids, positions, block_size)],
     "a list of whole numbers must come back"),
    (lambda block_ids, positions, block_size: 1 / 0, "ZeroDivisionError"),
], ids=["one piece", "wrong entry", "last place", "no place", "from 0", "too few", "nothing", "floats", "crash"])
def test_wrong_slots_are_told_in_the_learners_terms(learners, told, capsys):
    assert lesson.check_slots(learners, "no model is needed for these", [[1]]) is None
    printed = capsys.readouterr().out
    assert printed.startswith("NOT YET") and told in printed


def test_right_slots_pass_on_the_ranks(folder, capsys):
    assert lesson.check_slots(right, folder, [list(range(13)), list(range(20, 34))]).ok
    assert capsys.readouterr().out.startswith("PASS  right: ")


def test_wrong_tokens_are_marked_below_and_a_bar_stands_where_decoding_begins(folder):
    report = align_decode(folder, [list(range(13))], new_tokens=4, logical=True)
    ours, reference, more = report.evidence["norm"]
    scale = report.floor * reference.abs().max()
    ours = reference.clone()
    ours[2, 0], ours[4, 0], ours[6, 0] = reference[2, 0] + 2 * scale, float("nan"), reference[6, 0] + scale / 2
    report.evidence["norm"] = report.evidence["norm"]._replace(ours=ours)
    figure = show.token_grid_figure(report, Letters, "norm")
    assert figure.alt_text.endswith("prompt 0: first wrong at position 2 ('c').")
    nodes = list(ET.fromstring(figure.svg).iter())
    at = {n.text: float(n.get("x")) for n in nodes if n.tag.endswith("text") and len(n.text) == 1}
    rects = [(float(n.get("x")), float(n.get("width")), float(n.get("height")), n.get("fill"))
             for n in nodes if n.tag.endswith("rect") and n.get("x") and float(n.get("y")) > 24]
    marks = sorted(x + wide / 2 for x, wide, high, fill in rects if (high, fill) == (3, "#D55E00"))
    assert marks == pytest.approx([at["c"], at["e"]], abs=0.01)
    (bar,) = [x for x, wide, high, fill in rects if fill == "#222"]
    assert at["i"] < bar < at["j"], "nine tokens are read at once, four one by one"


def test_slots_that_are_right_in_the_example_only_are_found_in_the_engine(folder, capsys):
    def learned_by_heart(block_ids, positions, block_size):
        slots = right(block_ids, positions, block_size)
        return slots if block_ids == [4, 1, 3] else slots[::-1]

    assert not lesson.check_slots(learned_by_heart, folder, [list(range(13)), list(range(20, 34))]).ok
    assert capsys.readouterr().out.startswith("NOT YET  learned_by_heart: ")
