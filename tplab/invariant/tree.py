"""A sum whose order does not depend on the number of ranks.

The inputs of a row-parallel layer are cut into *leaves*, wherever some number of ranks would cut them. One binary tree
over the leaves says in which order their products are added up. A rank computes the largest nodes of the tree that lie
within its own inputs, and every rank finishes the tree from the nodes of all.
"""

from itertools import pairwise

from tplab.shard.plan import split_evenly

RANKS = (1, 2, 3, 4, 6, 8)  # numbers of ranks for which an MLP's columns have leaves


def leaves_of_heads(num_heads: int, head_dim: int) -> list[range]:
    """The inputs of an output projection: heads stay whole on any number of ranks."""
    return [range(head * head_dim, (head + 1) * head_dim) for head in range(num_heads)]


def leaves_of_columns(total: int) -> list[range]:
    """The inputs of a down projection: cut wherever one of :data:`RANKS` would cut them."""
    edges = {part.stop for ranks in RANKS for part in split_evenly(total, ranks)}
    return [range(*pair) for pair in pairwise(sorted(edges | {0}))]


def nodes_within(first: int, last: int, part: range) -> list[tuple[int, int]]:
    """The largest nodes of the tree over leaves ``first`` to ``last`` that lie within the leaves ``part``."""
    if part.start <= first and last <= part.stop:
        return [(first, last)]
    if last <= part.start or part.stop <= first:
        return []
    middle = (first + last) // 2
    return nodes_within(first, middle, part) + nodes_within(middle, last, part)


def additions(first: int, last: int) -> list[tuple[int, int]]:
    """The node's sum as ``x[a] += x[b]`` on its leaves, for each ``(a, b)`` in this order; it ends in ``x[first]``."""
    if last - first < 2:
        return []
    middle = (first + last) // 2
    return [*additions(first, middle), *additions(middle, last), (first, middle)]


def tree_sum(first: int, last: int, known: dict):
    """The node over leaves ``first`` to ``last``, from those ``(first, last)`` that are known."""
    if (first, last) in known:
        return known[first, last]
    middle = (first + last) // 2
    return tree_sum(first, middle, known) + tree_sum(middle, last, known)
