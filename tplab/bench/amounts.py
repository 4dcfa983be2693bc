"""What one step costs, counted: weights, keys and values, arithmetic, messages. Sizes only; no machine, no clock.

The counts follow the engine's forward pass. A weight is read once per step, whatever the number of rows; a product
of ``rows`` rows makes ``2 * rows`` operations with each weight. Keys and values are read once per step and sequence.
Between two collectives lies a *phase*: attention ends at one all-reduce, the MLP at the next, and every phase waits for
its slowest rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tplab.engine.config import bytes_per_token
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


def parameter_bytes(config, shard: RankShard, dtype: torch.dtype) -> int:
    """What one rank's weights occupy: its rows and columns of the matrices, and its copies of what is not cut."""
    d, h, moe = config.head_dim, config.hidden_size, config.experts
    q, kv = len(shard.q_heads) * d, len(shard.kv_heads) * d
    attention = h * (2 * q + 2 * kv) + (q + 2 * kv) * config.qkv_bias + h * config.o_bias
    attention += (config.q_size + config.kv_size if config.full_width_qk_norm else 2 * d) * config.qk_norm
    attention += len(shard.q_heads) * config.sinks + h * len(config.norms)
    dense = _mlp_numbers(h, len(shard.mlp), config.mlp_bias)
    experts = sum(moe.layers) if moe else 0
    layers = config.num_layers * attention + (config.num_layers - experts) * dense
    if moe:
        sparse = len(shard.experts) * _mlp_numbers(h, len(shard.expert_mlp), moe.bias)
        sparse += (h + moe.bias) * moe.num_experts
        sparse += (3 * h * len(shard.shared_mlp) + h) * bool(moe.shared_intermediate_size)
        layers += experts * sparse
    ends = h * len(shard.vocab) * (1 if config.tie_word_embeddings else 2) + h
    return (layers + ends) * dtype.itemsize


def _mlp_numbers(hidden: int, columns: int, bias: bool) -> int:
    return 3 * hidden * columns + (2 * columns + hidden) * bias


def kv_bytes(config, shard: RankShard, tokens: int, dtype: torch.dtype) -> int:
    """What keys and values of so many tokens occupy on one rank."""
    return tokens * bytes_per_token(config, len(shard.kv_heads), dtype)
