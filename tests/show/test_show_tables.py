"""Tables: marks where they belong, and the same text and html every time."""

import math

import pytest
import torch
from helpers.reports import make_report

from tplab import show
from tplab.errors import TplabError


class Letters:
    """A tokenizer of 26 letters."""

    def decode(self, ids):
        return chr(ord("a") + int(ids[0]) % 26)


def bundle(table):
    return table._repr_mimebundle_()


def test_a_table_is_stored_the_same_way_every_time():
    """A pandas Styler has random ids in its html and its address in its text."""
    report = make_report({"layers.0.attn": math.nan})
    first, again = bundle(show.layer_table(report)), bundle(show.layer_table(report))
    assert first == again
    assert set(first) == {"text/plain", "text/html"} and "0x" not in first["text/plain"]


def test_the_layer_table_marks_what_is_outside():
    table = show.layer_table(make_report({"layers.1.q_rope": 0.5}), layer=1)
    marked = [name for name, words in table.frame["difference from HF"].items() if words != "inside the floor"]
    assert marked[0] == "layers.1.q_rope" and len(marked) == 11
    assert str(table).count("✗ ") == bundle(table)["text/html"].count("✗ ") == 11
    assert bundle(table)["text/html"].count("font-weight: bold; background: #fbe3d6; color: #222\">✗ ") == 11


def test_without_a_layer_the_table_holds_the_ends_and_the_layers():
    assert list(show.layer_table(make_report(layers=2)).frame.index) == [
        "embed", "layers.0.output", "layers.1.output", "norm", "logits"]
    with pytest.raises(TplabError, match="no layer 7"):
        show.layer_table(make_report(layers=2), layer=7)


def test_rank_shapes():
    frame = show.rank_shapes(make_report(tensor_parallel_size=3)).frame
    assert list(frame.index) == ["rank 0", "rank 1", "rank 2"]
    assert list(frame["read from the checkpoint"]) == ["1.23 MB"] * 3
    assert list(frame["q_proj"]) == ["[64, 128]"] * 3 and list(frame["k_proj"]) == ["[16, 128]"] * 3
    report = make_report()
    report.shapes = []
    with pytest.raises(TplabError, match="read on the ranks by align"):
        show.rank_shapes(report)


def test_top_tokens_of_nan_are_not_tokens():
    """argmax and topk of NaN name a token all the same."""
    frame = show.top_tokens(make_report({"layers.0.attn": math.nan}), Letters(), k=3).frame
    assert list(frame["tplab"]) == ["NaN"] * 3 and list(frame.index) == [1, 2, 3] and frame.index.name == "place"
    assert "NaN" not in list(frame["Hugging Face"])


def test_top_tokens_mark_where_the_sides_differ():
    report = make_report()
    report.evidence["logits"] = report.evidence["logits"]._replace(
        ours=torch.tensor([[9.0, 0.0, 0.0], [0.0, 5.0, 3.0]]),
        reference=torch.tensor([[9.0, 0.0, 0.0], [4.0, 5.0, 0.0]]))
    text = str(show.top_tokens(report, Letters(), k=2))
    assert "'b' 73 %" in text and "✗ 'b' 88 %" in text and "✗ 'c' 12 %" in text


@pytest.mark.parametrize("gap, shares", [(20.0, ("100 %", "2.1e-07 %")), (6.0, ("100 %", "0.25 %")),
                                         (3.0, ("95 %", "4.7 %"))])
def test_small_probabilities_of_a_token_are_told_from_0(gap, shares):
    report, logits = make_report(), torch.tensor([[0.0, 0.0, 0.0], [gap, 0.0, -40.0]])
    report.evidence["logits"] = report.evidence["logits"]._replace(ours=logits, reference=logits)
    assert [text.split("' ")[1] for text in show.top_tokens(report, Letters(), k=2).frame["tplab"]] == [*shares]
