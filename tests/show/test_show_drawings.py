"""Plans and weights that draw themselves: what is drawn is what the plan and the layers hold."""

import re
import xml.etree.ElementTree as ET
from base64 import b64decode

import pytest
from helpers.reports import plan

from tplab import show
from tplab.errors import TplabError
from tplab.ranks import logical_ranks, rank
from tplab.shard import QKVParallelLinear, RowParallelLinear, ShardPlan, split_evenly
from tplab.show.drawings.shards import ShardedWeight

SVG = "{http://www.w3.org/2000/svg}"
LAYOUTS = [(2, 14, 2), (2, 9, 3), (2, 8, 2), (4, 8, 2), (3, 14, 2), (1, 9, 3), (8, 64, 8)]


def drawn_by(shown) -> str:
    """The SVG document in the page's picture."""
    html = show.plan_html(shown) if isinstance(shown, ShardPlan) else shown._repr_html_()
    return b64decode(re.search('data:image/svg.xml;base64,([^"]+)"', html)[1]).decode()


def texts(svg):
    return [node.text for node in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("tp, heads, kv_heads", LAYOUTS)
def test_a_plan_draws_every_head_where_it_is_held(tp, heads, kv_heads):
    made = plan(tp, heads, kv_heads)
    drawn = texts(drawn_by(made))
    assert [text for text in drawn if text.startswith("rank ")] == [f"rank {r}" for r in range(tp)]
    assert any(text.startswith(made.kind) for text in drawn)
    if heads < 38:  # below that the squares hold numbers
        numbers = sorted(int(text) for text in drawn if text.isdigit())
        held = [head for shard in made.ranks for head in shard.q_heads]
        assert set(held) <= set(numbers)
    kv = sum(text.startswith("KV ") or text.isdigit() for text in drawn) - heads * (heads < 38)
    assert kv == sum(len(shard.kv_heads) for shard in made.ranks), "a replicated KV head is drawn on every rank"


def test_the_words_of_plans_say_which_rank_holds_what():
    words = show.describe(show.plan_figure({"SmolLM2": plan(2, 9, 3), "fable": plan(4, 8, 2)}))
    assert words.startswith("Figure: ")
    assert "SmolLM2: 9 query and 3 KV heads, uneven: rank 0 query heads 0–5, KV heads 0–1; " \
           "rank 1 query heads 6–8, KV heads 2" in words
    assert "replication: rank 0 query heads 0–1, KV heads 0; rank 1 query heads 2–3, KV heads 0" in words


@pytest.mark.parametrize("tp, heads, kv_heads", [layout for layout in LAYOUTS if layout[0] < 8])
def test_a_drawn_weight_has_the_shapes_of_the_layers(tp, heads, kv_heads):
    made = plan(tp, heads, kv_heads)

    def shapes():
        qkv = QKVParallelLinear(made.hidden_size, made.head_dim, heads, kv_heads, shards=made.ranks)
        columns = [range(s.q_heads.start * made.head_dim, s.q_heads.stop * made.head_dim) for s in made.ranks]
        o_proj = RowParallelLinear(heads * made.head_dim, made.hidden_size, parts=columns)
        return rank(), tuple(qkv.weight.shape), tuple(o_proj.weight.shape)

    q, k, v, o = (ShardedWeight.of(made, f"{name}_proj") for name in "qkvo")
    for number, qkv_shape, o_shape in logical_ranks(tp, shapes):
        rows = sum(part.shape_on(number)[0] for part in (q, k, v))
        assert (rows, made.hidden_size) == qkv_shape and o.shape_on(number) == o_shape


def test_two_ways_to_cut_a_weight_side_by_side():
    right = ShardedWeight.of(plan(2), "q_proj")
    wrong = ShardedWeight("q_proj", right.shape, 1, [[part] for part in split_evenly(right.shape[1], 2)])
    figure = show.weight_figure({"dim 0": right, "dim 1": wrong})
    assert texts(figure.svg).count("rank 0 holds [64, 128]") == texts(figure.svg).count("rank 0 holds [128, 64]") == 1
    assert "dim 0: q_proj [128, 128], rows (dim 0) dealt out: rank 0 holds rows 0–63" in figure.alt_text
    assert "dim 1: q_proj [128, 128], columns (dim 1) dealt out: rank 0 holds columns 0–63" in figure.alt_text


@pytest.mark.parametrize("draw", [show.plan_figure, show.weight_figure])
def test_nothing_to_draw(draw):
    with pytest.raises(TplabError):
        draw({})
