"""The notebooks' figures: each draws, has its title, its words and its axes; what cannot be drawn is refused."""

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.reports import make_report
from matplotlib.colors import to_hex

from course import figures, lesson
from course.figures.nb05 import slices
from tplab import LLM, SamplingParams, ShardPlan, show
from tplab.align import align_decode
from tplab.align.report import Evidence
from tplab.errors import TplabError
from tplab.faults import fault
from tplab.ranks import CollectiveMismatch, RankError
from tplab.ranks.errors import Cause
from tplab.ranks.oplog import OpRecord
from tplab.show.drawings.svg import colour

NAN, SVG = math.nan, "{http://www.w3.org/2000/svg}"
SCORES, FUTURE = torch.arange(16.0).reshape(4, 4), torch.ones(4, 4).triu(1)
SHARES = [{"embed": torch.zeros(2), "layers.0.q": torch.tensor([0, 0.5]), "layers.1.q": torch.ones(2)}]
WHOLE = torch.randn(7, 2, 4, generator=torch.Generator().manual_seed(0))
ROUTE = torch.tensor([[0.7, 0.3], [0.9, 0.1], [0.6, 0.4]]), torch.tensor([[2, 0], [2, 3], [0, 2]])


def positions(ours):
    """A report whose evidence at one point has these rows beside rows of 4."""
    report = make_report()
    report.evidence["layers.0.q_rope"] = Evidence(ours, torch.full_like(ours, 4.0), [])
    return report


def call(seq, op="all_reduce", shape=(4,), left=True):
    return OpRecord(seq, op, shape, "float32", 0, "cell.py", 7, left)


WAITS = Cause(0, "waiting", "waits in all_reduce at cell In[3], line 9", consequence=True)
DIED = Cause(1, "died", "died (SIGKILL) after all_reduce at cell In[3], line 2")
LOST = RankError("x", [DIED, WAITS], [[call(1), call(2, left=False)], [call(1)]])

# name: (figure, its title, its words without "Figure: "). Words that depend on the machine must not be there.
FIGURES = {
    "mask": (
        lambda: figures.mask_figure({"times": SCORES + FUTURE * -math.inf,
                                     "filled": SCORES.masked_fill(FUTURE.bool(), -math.inf)}, list("abcd")),
        "“times” turns 10 of 16 entries into NaN",
        "attention scores, queries down, keys across. times: of 16 entries, 6 hidden (-inf), 10 NaN. filled: of 16 "
        "entries, 10 numbers, 6 hidden (-inf)."),
    "nan map": (
        lambda: figures.nan_map(["x", "y"], SHARES),
        "NaN begins at layers.0.q, and nothing is left from layers.1.q on",
        "numbers lost to NaN, token by token, along the forward pass. rank 0: first at layers.0.q, in 1 of 2 tokens, "
        "everything from layers.1.q on."),
    "positions": (
        lambda: figures.position_figure({"a": positions(torch.full((5, 2, 2), 4.4))}),
        "layers.0.q_rope, token by token", "layers.0.q_rope, difference from Hugging Face token by token. a: 0.1 at "
        "position 0, 0.1 at position 1, 0.1 at position 4."),
    "op logs": (
        lambda: figures.op_logs(LOST), "Collectives in order, and where the ranks part",
        "the collectives of each rank, in order. 1 agrees, then rank 0 waits in all_reduce [4] float32; rank 1 died "
        "(SIGKILL)."),
    "bars": (
        lambda: figures.bars_figure({"r": {"a": 1.0, "b": 0}}, "MB", "Half", "memory", here="on this machine"), "Half",
        "memory: r; bars for a, b."),
    "roofline": (lambda: figures.roofline_figure({"decode": (0.5, 4e9)}, {"1 rank": (1e10, 1e11)}),
                 "What memory and arithmetic allow", None),
    "routes": (
        lambda: figures.routes_figure({"layer 0": ROUTE}, [" the", " fox", "\n"], 4, "All ask for expert 2"),
        "All ask for expert 2", "the experts of 3 tokens, darker where the weight is larger. Tokens of experts 0 to 3 "
        "in layer 0: 2, 0, 3, 1."),
    "texts": (lambda: figures.texts_figure({"a": ["the", " fox"], "b": ["the", " dog"]}, "Two answers"), "Two answers",
              None),
    "margins": (lambda: figures.margins_figure({"bfloat16": (torch.tensor([[5.0, 4.9, 0]]),
                                                             torch.tensor([[5.0, 5.1, 0]]))}, "Ties"), "Ties", None),
    "orders": (lambda: figures.orders_figure({"bfloat16": torch.tensor([1.0, 1.5, 1.0])}, 1.2, "Orders"), "Orders",
               "what a sum of the same numbers is in many orders. bfloat16: 2 different in 3 orders."),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_draws_and_has_its_title_and_its_words(name):
    make, title, words = FIGURES[name]
    figure = make()
    assert figure.png().startswith(b"\x89PNG") and figure.get_suptitle().replace("\n", " ") == title
    assert figure.alt_text.startswith("Figure: ") and "\n" not in figure.alt_text
    assert words is None or figure.alt_text == f"Figure: {words}"
    if words is None:  # what it shows is this machine's
        assert "this machine" in figure.alt_text and not any(word in figure.alt_text for word in ("dog", "GB/s", "2.0"))


@pytest.mark.parametrize("draw", [
    lambda: figures.mask_figure({"x": torch.zeros(2, 4, 4)}, []),
    lambda: figures.equal_heads(WHOLE[0], [WHOLE]), lambda: figures.position_figure({}),
    lambda: figures.position_figure({"a": positions(torch.ones(5, 2, 2))}, "layers.1.q"), lambda: figures.op_logs({}),
    lambda: figures.op_logs(ValueError("none")), lambda: figures.bars_figure({"r": {}}, "s", "t", "d"),
    lambda: figures.roofline_figure({"a": (0.0, 1.0)}, {"r": (1.0, 1.0)}), lambda: figures.texts_figure({"a": []}, ""),
    lambda: figures.routes_figure({"layer 0": ROUTE}, [" the"], 4, ""), lambda: figures.experts_figure({}),
    lambda: figures.token_grid_figure(make_report(), None)])
def test_what_cannot_be_drawn_is_refused(draw):
    with pytest.raises(TplabError):
        draw()


def test_a_rank_holds_the_head_that_its_numbers_are_equal_to():
    assert figures.equal_heads(WHOLE, [WHOLE + 5e-4]) == {"rank 0": "head 0, head 1"}
    assert figures.equal_heads(WHOLE, [WHOLE[:, [1]], WHOLE[:, [0]] + 1]) == {
        "rank 0": "head 1", "rank 1": "no head's numbers"}


def test_masks_mark_what_is_lost_and_hatch_what_is_hidden():
    figure = figures.mask_figure({"m": torch.tensor([[math.inf, -math.inf], [1.0, NAN]])}, ["a", "b"])
    crosses, arrows = ([tuple(map(int, at)) for at in one.get_offsets()] for one in figure.axes[0].collections)
    assert (crosses, arrows) == ([(1, 1)], [(0, 0)])
    assert figure.axes[0].images[0].get_array().tolist() == [[False, True], [False, False]], "grey where it is hidden"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["hidden (-inf)", "NaN", "+inf"]


@pytest.mark.pool
def test_the_nan_mask_takes_every_token_at_once():
    figure = figures.nan_map(*figures.trace_nan("fable", [5, 6, 7], [fault("nan_mask")], tensor_parallel_size=1))
    assert "rank 0: first at layers.0.attn, in 3 of 3 tokens, everything from layers.0.attn on." in figure.alt_text
    assert [axis.collections[0].get_array()[0, 0] for axis in figure.axes] == [0], "the embedding is whole"


def test_bars_are_as_long_as_their_numbers_and_positions_are_relative_to_hugging_face():
    measured = {"rank 0": {"copy": 12.0, "slices": 6.5}, "rank 1": {"copy": 1234.5}}
    ax = figures.bars_figure(measured, "MB", "t", "d").axes[0]
    assert [bar.get_width() for bar in ax.patches if bar.get_width()] == [12.0, 6.5, 1234.5]
    assert [text.get_text() for text in ax.texts] == ["12 MB", "6.5 MB", "1,234 MB"]
    ours = torch.full((5, 2, 2), 4.0)
    ours[:, 1, 0] += torch.tensor([0.0, 0.04, 0.4, 4.0, 40.0])
    ax = figures.position_figure({"a": positions(ours)}).axes[0]
    at = {x: y for line in ax.get_lines() if line.get_marker() == "^" for x, y in zip(*line.get_data())}
    assert [at[x] for x in (1, 2, 3, 4)] == pytest.approx([-2, -1, 0, 1]) and at[0] < -2
    panels = figures.position_figure({"a": positions(ours), "b": positions(ours + 1), "c": positions(ours + 9)}).axes
    assert len({(panel.get_ylim(), tuple(panel.get_yticks())) for panel in panels[:3]}) == 1, "panels on unlike scales"
    assert [len([line for line in panel.get_lines() if len(line.get_xdata()) > 2]) for panel in panels[:3]] == [1] * 3


def test_a_roof_is_a_slope_then_a_ceiling():
    roof, point = figures.roofline_figure({"decode": (0.5, 4e9)}, {"1 rank": (1e10, 1e11)}).axes[0].get_lines()
    assert np.allclose(roof.get_ydata(), np.minimum(1e10 * roof.get_xdata(), 1e11))
    assert point.get_xydata().tolist() == [[0.5, 4e9]]


# ---- op logs ---------------------------------------------------------------------------------------------------------


def boxes(figure):
    return [(to_hex(box.get_edgecolor()), box.get_hatch()) for box in figure.axes[0].patches
            if type(box).__name__ == "Rectangle"]


def test_a_rank_that_waits_is_hatched_and_one_that_does_not_come_is_dashed():
    figure = figures.op_logs(LOST)
    assert "≠ #2" in [text.get_text() for text in figure.axes[0].texts]
    assert boxes(figure) == [("#009e73", None)] * 2 + [("#e69f00", "////"), ("#222222", None)]
    outer = ValueError("the engine's own")
    outer.__cause__ = LOST
    assert figures.op_logs(outer).alt_text == figure.alt_text
    key = " ".join(figure.get_supxlabel().split())
    assert key == "green: done together; orange, hatched: waits; dashed: never came; ≠: the first difference"


def test_ranks_that_meet_in_different_collectives_call_and_do_not_wait():
    records = [call(1, left=False), call(1, shape=(5,), left=False)]
    error = CollectiveMismatch("x", CollectiveMismatch.of(records).causes.values(), [[r] for r in records])
    figure = figures.op_logs({"another shape": error})
    assert boxes(figure) == [("#d55e00", None)] * 2
    assert "another shape: rank 0 calls all_reduce [4] float32; rank 1 calls all_reduce [5] float32" in figure.alt_text


def test_only_the_rows_before_the_difference_are_drawn_and_the_error_of_real_ranks_is_one():
    from tplab.ranks import all_reduce, logical_ranks, rank

    long = [call(n) for n in range(1, 40)]
    figure = figures.op_logs(RankError("x", [WAITS, DIED], [[*long, call(40, left=False)], long]))
    assert [text.get_text() for text in figure.axes[0].texts if "#" in text.get_text()] == ["#38", "#39", "≠ #40"]

    def skips():
        all_reduce(torch.ones(2))
        if rank() == 0:
            all_reduce(torch.ones(3))

    assert figures.op_logs(lesson.caught(logical_ranks, 2, skips)).alt_text.endswith(
        "1 agrees, then rank 0 waits in all_reduce [3] float32; rank 1 returned.")


# ---- a run of the engine ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("run") / "m", "qwen2", seed=3)


def test_every_computed_token_stands_in_its_step_of_the_timeline(folder):
    prompts = [list(range(1, 12)), list(range(12, 21)), list(range(21, 30)), list(range(30, 41))]
    with LLM(folder, 1, "float64", logical=True, block_size=4, num_blocks=10, max_num_batched_tokens=12,
             enable_prefix_caching=False, strict=True) as llm:
        run = show.engine_steps(llm, prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
                                arrivals=[0, 0, 2, 5])
    rows = slices(run)
    for at, step in enumerate(run.history, 1):
        assert {n: row[at][1] for n, row in rows.items() if at in row and row[at][1]} == step.tokens
    lost = [number for number, output in enumerate(run.outputs) if output.metrics.preemptions]
    assert lost == [n for n, row in rows.items() if any(kind == "preempted" for kind, _ in row.values())] != []
    figure = figures.timeline_figure(run)
    assert figure.png().startswith(b"\x89PNG")
    assert "sequence 1: reads 1 in step 1, reads 8 in step 2, one token in steps 3–9, finished" in figure.alt_text
    assert figure.alt_text.endswith("At most 10 of 10 blocks in use.")
    drawn = [int(text.get_text()) for text in figure.axes[0].texts if text.get_text().isdigit()]
    assert sum(drawn) == sum(sum(step.tokens.values()) for step in run.history)
    assert [bar.get_height() for bar in figure.axes[1].patches] == [step.used_blocks for step in run.history]


class Letters:
    """A tokenizer: every id is a letter."""

    @staticmethod
    def decode(ids):
        return "".join(chr(97 + token % 26) for token in ids)


def test_the_grid_of_tokens_says_where_a_run_is_wrong_and_what_was_found_in_the_cache(folder):
    def words(prompts, **options):
        report = align_decode(folder, prompts, dtype="float64", logical=True, **options)
        figure = figures.token_grid_figure(report, Letters)
        assert figure.png().startswith(b"\x89PNG")
        return figure.alt_text

    assert words([list(range(13)), list(range(20, 30))], new_tokens=4, patches=[fault("slot_off_by_one")]) == (
        "Figure: the tokens at layers.0.attn. prompt 0: first wrong at position 9 ('j'); prompt 1: first wrong at "
        "position 6 ('a').")
    assert words([list(range(13)), [*range(8), 40, 41, 42, 43]], new_tokens=3, one_by_one=True) == (
        "Figure: the tokens at norm. prompt 0: all right; prompt 1: all right, 8 tokens found in the cache.")


def test_every_part_of_an_expert_is_drawn_once_in_its_ranks_colour():
    sizes = dict(num_heads=8, num_kv_heads=8, head_dim=4, hidden_size=32, intermediate_size=0, vocab_size=40,
                 num_experts=8, expert_intermediate_size=10)
    drawing = figures.experts_figure({f"{whole}": ShardPlan.make(
        tensor_parallel_size=3, enable_expert_parallel=whole, **sizes) for whole in (False, True)})
    drawn = [node.get("fill") for node in ET.fromstring(drawing.svg).iter(f"{SVG}rect")]
    assert [drawn.count(colour(rank)[0]) for rank in range(3)] == [8 + 3, 8 + 3, 8 + 2]
    assert len(drawn) == 1 + 8 * 3 + 8, "on white, eight experts by their columns and eight whole ones"
    assert drawing.alt_text.endswith("True: rank 0 3 experts (0–2); rank 1 3 experts (3–5); rank 2 2 experts (6–7).")


# ---- code ------------------------------------------------------------------------------------------------------------


def test_code_side_by_side_marks_the_lines_that_differ_and_nothing_of_a_header_or_a_comment():
    shown = figures.side_by_side("def broken(x):\n    # zero\n    return x * 0\n",
                                 "def f(x):\n    y = 1 < x\n    return y\n")
    html = shown._repr_mimebundle_()["text/html"]
    lines = html.split("<span")[1:]
    marked = [line.split("</span>")[0].split(">")[-1].strip() for line in lines if "background" in line]
    assert marked == ["✗     return x * 0", "✓     y = 1 &lt; x", "✓     return y"]
    assert str(shown).startswith("broken:\n    def broken(x):") and "<details" not in html
    folded = figures.side_by_side("x = 1", "x = (2,", folded="when yours passes <1>")._repr_mimebundle_()["text/html"]
    assert folded.startswith("<details><summary>when yours passes &lt;1&gt;</summary>")
