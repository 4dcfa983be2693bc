"""The map of NaN: what is drawn and told is what happened on each rank."""

import pytest
import torch
from matplotlib.colors import to_hex

from course import figures
from course.figures import nan_trace
from tplab import open_checkpoint
from tplab.faults import fault
from tplab.model import trace
from tplab.patch import Patch
from tplab.ranks import rank

pytestmark = pytest.mark.pool

IDS = [5, 6, 7, 8, 9, 10]


def one_nan(name, tensor):
    if name == "layers.0.q_rope" and rank() == 0:
        tensor[4, 0, 0] = float("nan")
    trace.point(name, tensor)


def test_one_nan_reaches_the_other_rank_by_the_all_reduce_and_all_tokens_in_the_next_layer():
    figure = figures.nan_map(*figures.trace_nan("fable", IDS, [Patch("tplab.model.attention.point", one_nan)]))
    assert ("rank 0: first at layers.0.q_rope, in 1 of 6 tokens, everything from layers.1.attn on; "
            "rank 1: first at layers.0.o_proj, in 1 of 6 tokens, everything from layers.1.attn on") in figure.alt_text


def test_the_nan_mask_takes_every_token_at_once():
    figure = figures.nan_map(*figures.trace_nan("fable", IDS, [fault("nan_mask")], tensor_parallel_size=1))
    assert "rank 0: first at layers.0.attn, in 6 of 6 tokens, everything from layers.0.attn on." in figure.alt_text
    assert figure.get_suptitle() == "NaN begins at layers.0.attn, and nothing is left from layers.0.attn on"


def test_a_healthy_model_has_an_empty_map():
    figure = figures.nan_map(*figures.trace_nan("fable", IDS, tensor_parallel_size=1))
    assert figure.alt_text.endswith("rank 0: none.")


def test_the_ranks_are_asked_for_what_was_said(monkeypatch):
    class Pool:
        def run(self, fn, ckpt, plan, dtype, ids):
            return [ckpt.name, plan.tensor_parallel_size, dtype, ids]

    monkeypatch.setattr("course.figures.nan_trace.shared_pool", lambda size: Pool())
    tokens, asked = figures.trace_nan("fable", "Once", tensor_parallel_size=3, dtype="bfloat16")
    ids = open_checkpoint("fable").tokenizer()("Once").input_ids
    assert asked == ["fable", 3, torch.bfloat16, ids] and "".join(tokens) == "Once"


def test_the_share_of_each_token_that_is_lost(monkeypatch):
    lost = torch.tensor([[[1.0, float("nan")], [2.0, 3.0]], [[float("nan")] * 2] * 2])  # [tokens, heads, head_dim]
    monkeypatch.setattr(nan_trace, "trace_on_rank", lambda *given: [{"q": lost, "norm": torch.ones(2, 3)}])
    found = nan_trace._lost_on_rank("ckpt", "plan", torch.float32, [1, 2])
    assert {name: shares.tolist() for name, shares in found.items()} == {"q": [0.25, 1], "norm": [0, 0]}


def test_shades_and_title_come_from_the_shares():
    some, all_, none = torch.tensor([0, 0.5]), torch.ones(2), torch.zeros(2)
    ranks = [{"embed": none, "layers.0.q": none, "layers.1.q": some, "layers.2.q": all_, "logits": all_},
             {"embed": none, "layers.0.q": some, "layers.1.q": none, "layers.2.q": some, "logits": all_}]
    figure = figures.nan_map(["a", "b"], ranks, layers=2)
    shades = [ax.images[0].get_array().tolist() for ax in figure.axes]
    assert shades == [[[0, 0, 0, 2], [0, 0, 1, 2]], [[0, 0, 0, 2], [0, 1, 0, 2]]], "tokens down, points across"
    shades = [to_hex(colour) for colour in figure.axes[0].images[0].get_cmap().colors]
    assert shades == ["#f6f6f6", "#e69f00", "#222222"], "none, some, all"
    names = ("embed", "layers.0.q", "layers.0.k", "layers.0.v", "norm")
    wide = figures.nan_map(["a", "b"], [dict.fromkeys(names, none)])
    assert [(text.get_text(), text.xy[0]) for text in wide.axes[0].texts] == [("layer 0", 2.0)], "over its middle"
    borders = sorted(line.get_xdata()[0] for line in wide.axes[0].get_lines())
    assert borders == [0.5, 3.5]
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["embed", "q", "q", "logits"]
    assert figure.get_suptitle() == "NaN begins at layers.0.q, and nothing is left from logits on"
    for count in (16, 17):
        ax = figures.nan_map([f"t{at}" for at in range(count)], [{"embed": torch.zeros(count)}]).axes[0]
        assert ([label.get_text() for label in ax.get_yticklabels()][:1] == ["t0"]) == (count == 16)
    figure = figures.nan_map(["a", "b"], [{"embed": none, "logits": some}] * 2)
    assert figure.get_suptitle() == "NaN begins at logits" and "never everything" in figure.alt_text
