"""Faults of cutting weights and of adding partial sums up."""

import torch
from torch.nn import functional as F

from tplab.faults.fault import bug, only_if, two_ranks
from tplab.ranks import all_reduce, rank, world_size


def shard_dim1(source, rows: range) -> torch.Tensor:
    if len(source.shape) == 1:
        return source[rows.start:rows.stop]
    weight = source[:].reshape(source.shape[1], source.shape[0])   # [out, in] treated as [in, out] ...
    return weight[:, rows.start:rows.stop].T                       # ... so its columns look like the outputs


def fused_one_block(sources, ranges) -> torch.Tensor:
    fused = torch.cat([source[:] for source in sources])           # [q|k|v], all heads of each
    start = rank() * len(fused) // world_size()                    # this rank's share: one cut through all three
    return fused.roll(-start, 0)[:sum(len(rows) for rows in ranges)]


def qkv_order(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, v, k = (part.unflatten(-1, (-1, self.head_size)) for part in self.split(qkv))   # the rows are q, k, v
    return q, k, v


def qkv_written_by_column(self, parameter: str, *sources) -> None:
    parts = [source[rows.start:rows.stop] for source, rows in zip(sources, self.ranges)]   # the right rows
    whole = torch.cat(parts)
    if parameter == "weight":
        whole = torch.cat([part.T for part in parts], dim=1)       # q, k and v side by side, as columns ...
        whole = whole.reshape(self.weight.shape)                   # ... of a matrix that is read row by row
    getattr(self, parameter).data.copy_(whole)


def divided_twice(source, rows: range) -> torch.Tensor:
    start = rows.start // world_size()                             # rows.start is this rank's already
    return source[start:start + len(rows)]


def row_bias_everywhere(self, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, self.weight, self.bias)                     # the sum of the ranks has the bias tp times


def all_reduce_missing(self, partial: torch.Tensor) -> torch.Tensor:
    return partial                                                 # each rank goes on with its own summand


def all_reduce_dropped(self, partial: torch.Tensor) -> torch.Tensor:
    all_reduce(partial.clone())                                    # the result of the sum is not used
    return partial


_row_bias = only_if(lambda c: c.o_bias, "o_proj has no bias in this model", two_ranks)
_COLUMN = "tplab.shard.linear.column_shard"
_NOTEBOOK = "02_dim0_sharding"

FAULTS = (
    bug(_COLUMN, shard_dim1, "cut along dim 1, as if weights were [in, out]",
        "All shapes fit, and the text has nothing to do with the prompt.",
        first_point="layers.0.q", notebook=_NOTEBOOK),
    bug("tplab.shard.linear.QKVParallelLinear.load", qkv_written_by_column,
        "q, k and v are cut right and written into the fused weight by column",
        "All shapes fit, every number of the checkpoint is there, and q, k and v are unrelated to the right ones.",
        first_point="layers.0.q", notebook=_NOTEBOOK),
    bug("tplab.shard.linear.merged_shard", fused_one_block, "a fused [q|k|v] matrix cut as one block",
        "Correct on one rank; on two, rank 1 computes its queries with rows of other heads and of keys.",
        ("litgpt's tensor-parallel generation splits the fused qkv weight with tensor_split along dim 0; that was "
         "right for the interleaved layout, which [q|k|v] replaced in 2024.",
         "https://github.com/Lightning-AI/litgpt/blob/main/litgpt/generate/tp.py"),
        ("vLLM's MiMo-V2 loader cut a fused qkv with chunk(tp, dim=0)[rank]; query rows were stored in the places of "
         "keys and values, without an error.", "https://github.com/vllm-project/vllm/issues/42803"),
        ("The same mistake when gathering: nnsight joined the ranks' [q|k|v] pieces one after the other. The "
         "difference from Hugging Face was 18.188, after reordering 0.031; a test that compared rows as a multiset had "
         "passed.", "https://github.com/ndif-team/nnsight/pull/719"),
        first_point="layers.0.q", notebook=_NOTEBOOK, needs=two_ranks),
    bug("tplab.shard.linear.QKVParallelLinear.split_heads", qkv_order,
        "k and v change places when the fused output is split",
        "Fluent nonsense: queries are compared with values, and the outputs are sums of keys.",
        ("A first port of InternLM2 to vLLM read its grouped wqkv rows in the wrong order on two ranks: \"that that "
         "that that which which which …\".", "https://github.com/vllm-project/vllm/pull/2527"),
        ("Slapo split its qkv output with chunk(3), which is another layout on one rank than on several.",
         "https://github.com/awslabs/slapo/pull/46"),
        first_point="layers.0.k", notebook=_NOTEBOOK),
    bug(_COLUMN, divided_twice, "the rank's offset is divided by the number of ranks once more",
        "Rank 0 is right; every other rank has rows that overlap its neighbour's.",
        ("MinivLLM passed start + size where narrow takes a size: rank 0 loads correctly, the others do not.",
         "https://github.com/Wenyueh/MinivLLM/issues/9"),
        first_point="layers.0.q", notebook=_NOTEBOOK, needs=two_ranks),
    bug("tplab.shard.linear.RowParallelLinear.partial", row_bias_everywhere,
        "every rank adds the bias of a row-parallel layer",
        "Correct on one rank; the text gets worse with every further rank.",
        ("text-generation-inference: the bias of a row-parallel layer was added once per rank.",
         "https://github.com/huggingface/text-generation-inference/issues/1036"),
        ("MinivLLM: the same, shown by a difference that is exactly one bias on two ranks.",
         "https://github.com/Wenyueh/MinivLLM/issues/80"),
        ("nano-vllm was reported for this bug, but it is right: its bias is added on rank 0 only.",
         "https://github.com/GeeeekExplorer/nano-vllm/issues/99"),
        first_point="layers.0.o_partial", notebook=_NOTEBOOK, needs=_row_bias),
    bug("tplab.shard.linear.RowParallelLinear.reduce", all_reduce_missing, "no all-reduce after a row-parallel layer",
        "The ranks differ more and more; each goes on with its own summands.",
        ("A model family made its o_proj replicated after a sharded qkv, and so reduced nothing; a partial sum \"still "
         "decodes to fluent-looking text\".", "https://github.com/FlashML-org/FreeToken/pull/429"),
        ("SGLang's Mamba layers set reduce_results=False and printed garbage on two ranks.",
         "https://github.com/sgl-project/sglang/pull/14811"),
        first_point="layers.0.o_proj", notebook=_NOTEBOOK, needs=two_ranks),
    bug("tplab.shard.linear.RowParallelLinear.reduce", all_reduce_dropped,
        "the all-reduce is done, but its result is not used",
        "The ranks differ more and more, although the log shows every all-reduce.",
        ("MinivLLM used the return value of dist.all_reduce, which works in place and returns nothing.",
         "https://github.com/Wenyueh/MinivLLM/issues/13"),
        first_point="layers.0.o_proj", notebook=_NOTEBOOK, needs=two_ranks),
)
