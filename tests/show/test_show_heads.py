"""Heads as pictures: each is named by the head whose numbers it has."""

import pytest
import torch

from tplab import show


def test_each_rank_is_named_by_the_head_that_it_holds():
    whole = torch.randn(7, 2, 4, generator=torch.Generator().manual_seed(0))
    swapped = [whole[:, [1]], whole[:, [0]], whole[:, [0]] + 1]
    figure = show.heads_figure(whole, {"right": [whole], "broken": swapped})
    assert figure.alt_text == ("Figure: what each rank holds of the KV heads. Hugging Face: head 0, head 1; right: "
                               "rank 0 head 0, rank 0 head 1; broken: rank 0 head 1, rank 1 head 0, rank 2 no head's "
                               "numbers.")
    assert figure.png().startswith(b"\x89PNG")
    with pytest.raises(show.ShowError, match="tokens, heads, head_dim"):
        show.heads_figure(whole[0], {"right": [whole]})
