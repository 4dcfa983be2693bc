"""What one step costs, counted: weights, keys and values, arithmetic, messages. Sizes only; no machine, no clock.

The counts follow the engine's forward pass. A weight is read once per step, whatever the number of rows; a product
of ``rows`` rows makes ``2 * rows`` operations with each weight. Keys and values are read once per step and sequence.
Between two collectives lies a *phase*: attention ends at one all-reduce, the MLP at the next, and every phase waits for
its slowest rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tplab.shard import ShardPlan
from tplab.shard.plan import RankShard


class Part(NamedTuple):
    """One sequence's part of a step: ``count`` new tokens after ``start`` that are in the cache."""

    start: int
    count: int

    @property
    def keys(self) -> int:
        """How many keys its queries meet."""
        return self.start + self.count


class Amount(NamedTuple):
    """One rank's work in one phase.

    Attributes:
        rows, weights: rows that are multiplied, and numbers in the weights that they are multiplied with.
        kv_bytes: keys and values read.
        scores: operations in attention, scores and weighted sums together.
    """

    rows: int
    weights: int
    kv_bytes: int = 0
    scores: int = 0

    @property
    def operations(self) -> int:
        """Additions and multiplications of the products and of attention."""
        return 2 * self.rows * self.weights + self.scores

    def bytes(self, dtype: torch.dtype) -> int:
        """What must come from memory: every weight, every key, every value, once."""
        return self.weights * dtype.itemsize + self.kv_bytes


def attention_amount(config, shard: RankShard, parts: Sequence[Part], dtype: torch.dtype) -> Amount:
    """One layer's attention on one rank: q, k, v and o projections, and the heads between them."""
    rows, q, kv = sum(part.count for part in parts), len(shard.q_heads), len(shard.kv_heads)
    keys = sum(part.keys for part in parts)
    return Amount(rows, config.hidden_size * (2 * q + 2 * kv) * config.head_dim,
                  keys * 2 * kv * config.head_dim * dtype.itemsize,
                  4 * q * config.head_dim * sum(part.count * part.keys for part in parts))


def mlp_amount(config, shard: RankShard, rows: int) -> Amount:
    """One layer's MLP on one rank: gate, up and down."""
    return Amount(rows, 3 * config.hidden_size * len(shard.mlp))


def experts_amount(config, shard: RankShard, rows: int) -> Amount:
    """One layer's mixture of experts on one rank, where the router sends as many rows to each expert.

    An expert to which no row goes is not read; one row takes ``top_k`` of them. Under expert parallelism, a rank is
    assumed to compute as large a share of them as it holds.
    """
    moe, h = config.experts, config.hidden_size
    asked = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** rows)
    each = 3 * h * len(shard.expert_mlp) * len(shard.experts) / moe.num_experts
    always = h * moe.num_experts + (3 * h * len(shard.shared_mlp) + h) * bool(moe.shared_intermediate_size)
    weights = round(asked * each) + always
    return Amount(max(1, round(rows * (moe.top_k * each + always) / weights)), weights)


def head_amount(config, shard: RankShard, due: int) -> Amount:
    """The LM head on one rank, for the ``due`` rows that get a token."""
    return Amount(due, config.hidden_size * len(shard.vocab))


def step_amount(config, plan: ShardPlan, rank: int, parts: Sequence[Part], due: int, dtype: torch.dtype
                ) -> list[Amount]:
    """All phases of a step on one rank, in their order; without a row that gets a token there is none at the head.

    In the last layer, rows that get no token skip the MLP.
    """
    shard, attention = plan.ranks[rank], attention_amount(config, plan.ranks[rank], parts, dtype)
    sparse = config.experts.layers if config.experts else (False,) * config.num_layers
    rows = [attention.rows] * (config.num_layers - 1) + [last_mlp_rows(due)]
    layers = [[attention, (experts_amount if has_experts else mlp_amount)(config, shard, count)]
              for has_experts, count in zip(sparse, rows)]
    return sum(layers, []) + [head_amount(config, shard, due)] * bool(due)


def last_mlp_rows(due: int) -> int:
    """Rows of the last layer's MLP: those that get a token, or a single one if there is none."""
    return due or 1


def messages(config, parts: Sequence[Part], due: int, dtype: torch.dtype) -> list[int]:
    """Bytes of each collective of a step: an all-reduce after the embedding, two in every layer, and, where a token is
    drawn, the exchange of the ranks' best ones, of a score and a number each. A q/k norm over the full width gathers q
    and k: half of what an all-reduce of as many bytes would send.
    """
    row, rows = config.hidden_size * dtype.itemsize, sum(part.count for part in parts)
    gathered = rows * (config.q_size + config.kv_size) * dtype.itemsize // 2
    return ([rows * row] * (2 * config.num_layers) + [last_mlp_rows(due) * row] + [16 * due] * bool(due)
            + [gathered] * config.num_layers * config.full_width_qk_norm)
