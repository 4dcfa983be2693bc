"""Heads as pictures: each is named by the head whose numbers it has."""

import pytest
import torch
from matplotlib.colors import to_hex

from course import figures
from tplab import show
from tplab.show.drawings.svg import colour
from tplab.show.figures.style import RED


def test_each_rank_is_named_by_the_head_that_it_holds():
    whole = torch.randn(7, 2, 4, generator=torch.Generator().manual_seed(0))
    swapped = [whole[:, [1]], whole[:, [0]], whole[:, [0]] + 1]
    figure = figures.heads_figure(whole, {"right": [whole], "broken": swapped})
    assert figure.alt_text == ("Figure: what each rank holds of the KV heads. Hugging Face: head 0, head 1; right: "
                               "rank 0 head 0, rank 0 head 1; broken: rank 0 head 1, rank 1 head 0, rank 2 no head's "
                               "numbers.")
    grid = [[figure.axes[3 * row + column] for row in range(3)] for column in range(3)]
    frames = [[to_hex(ax.spines["top"].get_edgecolor()) for ax in column if ax.axison] for column in grid]
    zero, one = (to_hex(colour(head)[0]) for head in (0, 1))
    assert frames == [[zero, one], [zero, one], [one, zero, to_hex(RED)]]
    titles = [[ax.get_title(loc="left") for ax in column] for column in grid]
    assert titles == [["Hugging Face\nhead 0", "head 1", ""], ["right\nrank 0: head 0", "rank 0: head 1", ""],
                      ["broken\nrank 0: head 1", "rank 1: head 0", "rank 2: no head's numbers"]]
    pictures = [ax.images[0] for column in grid for ax in column if ax.axison]
    assert {image.get_clim() for image in pictures} == {(whole.min().item(), whole.max().item())}, "one scale for all"
    assert pictures[1].get_array().tolist() == whole[:, 1].T.tolist(), "tokens across"
    assert figure.get_suptitle() == "What each rank holds, in the colour of the head that it is"
    near = figures.heads_figure(whole, {"near": [whole + 5e-4 * whole.abs().max()]})
    assert "near: rank 0 head 0, rank 0 head 1" in near.alt_text, "rounding is no other head"
    far = figures.heads_figure(whole, {"far": [whole + 5e-3 * whole.abs().max()]})
    assert "far: rank 0 no head's numbers, rank 0 no head's numbers" in far.alt_text
    with pytest.raises(show.ShowError, match="tokens, heads, head_dim"):
        figures.heads_figure(whole[0], {"right": [whole]})
