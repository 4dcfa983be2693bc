"""Where in the text a run goes wrong."""

import xml.etree.ElementTree as ET

import pytest
from helpers.checkpoints import make_checkpoint
from helpers.reports import make_report

from course import figures
from tplab import show
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
    words = figures.token_grid_figure(align_decode(folder, prompts, new_tokens=4, logical=True,
                                           patches=[fault("slot_off_by_one")]), Letters).alt_text
    assert words == ("Figure: the tokens at layers.0.attn. prompt 0: first wrong at position 9 ('j'); "
                     "prompt 1: first wrong at position 6 ('a').")


def test_a_healthy_run_is_all_right_and_says_what_was_found(folder):
    prompts = [list(range(13)), [*range(8), 40, 41, 42, 43]]
    report = align_decode(folder, prompts, new_tokens=3, one_by_one=True, logical=True)
    figure = figures.token_grid_figure(report, Letters)
    assert figure.alt_text == ("Figure: the tokens at norm. prompt 0: all right; prompt 1: all right, "
                               "8 tokens found in the cache.")
    cells = [node.get("fill") for node in ET.fromstring(figure.svg).iter() if node.tag.endswith("rect")
             and node.get("height") == "21"]
    assert cells == ["#d9f0e8"] * 12 + ["#ffffff"] * 8 + ["#d9f0e8"] * 3, "the last token of each is never computed"
    alone = figures.token_grid_figure(align_decode(folder, prompts[:1], new_tokens=3, logical=True), Letters)
    assert "found in the cache" not in alone.svg + alone.alt_text
    assert "not computed: found in the cache" in figure.svg and "#f3b98f" in figure.svg.split("decoding begins")[0]


def test_what_shows_in_the_logits_only_is_drawn_at_the_norm_which_has_a_row_for_each_token(folder):
    report = align_decode(folder, [list(range(13))], new_tokens=2, logical=True, patches=[fault("head_random")])
    assert report.first_divergence.name == "logits"
    assert figures.token_grid_figure(report, Letters).alt_text == "Figure: the tokens at norm. prompt 0: all right."


def test_a_report_of_one_forward_pass_has_no_such_figure():
    with pytest.raises(show.ShowError, match="align_decode"):
        figures.token_grid_figure(make_report(), Letters)


def test_wrong_tokens_are_marked_below_and_a_bar_stands_where_decoding_begins(folder):
    report = align_decode(folder, [list(range(13))], new_tokens=4, logical=True)
    ours, reference, more = report.evidence["norm"]
    scale = report.floor * reference.abs().max()
    ours = reference.clone()
    ours[2, 0], ours[4, 0], ours[6, 0] = reference[2, 0] + 2 * scale, float("nan"), reference[6, 0] + scale / 2
    report.evidence["norm"] = report.evidence["norm"]._replace(ours=ours)
    figure = figures.token_grid_figure(report, Letters, "norm")
    assert figure.alt_text.endswith("prompt 0: first wrong at position 2 ('c').")
    ours[4, 0] = reference[4, 0]
    assert figures.token_grid_figure(report, Letters, "norm").alt_text == figure.alt_text, "one is enough"
    nodes = list(ET.fromstring(figure.svg).iter())
    at = {n.text: float(n.get("x")) for n in nodes if n.tag.endswith("text") and len(n.text) == 1}
    rects = [(float(n.get("x")), float(n.get("width")), float(n.get("height")), n.get("fill"))
             for n in nodes if n.tag.endswith("rect") and n.get("x") and float(n.get("y")) > 24]
    marks = sorted(x + wide / 2 for x, wide, high, fill in rects if (high, fill) == (3, "#D55E00"))
    assert marks == pytest.approx([at["c"], at["e"]], abs=0.01)
    (bar,) = [x for x, wide, high, fill in rects if fill == "#222"]
    assert at["i"] < bar < at["j"], "nine tokens are read at once, four one by one"
