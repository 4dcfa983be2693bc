"""The sharding rule and the parallel layers that follow it."""

from tplab.shard.embedding import ParallelLMHead, VocabParallelEmbedding
from tplab.shard.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from tplab.shard.plan import RankShard, ShardPlan, ShardPlanError, split_evenly

__all__ = ["ColumnParallelLinear", "MergedColumnParallelLinear", "ParallelLMHead", "QKVParallelLinear", "RankShard",
           "ReplicatedLinear", "RowParallelLinear", "ShardPlan", "ShardPlanError", "VocabParallelEmbedding",
           "split_evenly"]
