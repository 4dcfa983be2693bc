"""Notebook 04: which head a rank holds."""

from collections.abc import Sequence

from tplab.errors import TplabError

ALIKE = 1e-3  # relative to the whole's largest number


def equal_heads(whole, held: Sequence) -> dict[str, str]:
    """A row of a table: which of Hugging Face's heads each rank's heads are equal to.

    ``whole``: ``[tokens, heads, head_dim]``. ``held``: of each rank ``[tokens, heads here, head_dim]``.

        >>> show.table([{"rule": "modulo"} | figures.equal_heads(keys, per_rank)], index="rule")
    """
    if any(x.dim() != 3 for x in (whole, *held)):
        raise TplabError("heads are compared in tensors [tokens, heads, head_dim]")
    return {f"rank {rank}": ", ".join(_equal_head(x[:, head], whole) for head in range(x.shape[1]))
            for rank, x in enumerate(held)}


def _equal_head(x, whole) -> str:
    gaps = [(x - whole[:, head]).abs().max().item() for head in range(whole.shape[1])]
    alike = min(gaps) <= ALIKE * whole.abs().max().item()
    return f"head {gaps.index(min(gaps))}" if alike else "no head's numbers"
