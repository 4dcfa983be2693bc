"""The data of the map of NaN: the share of every token that is NaN at every trace point, on each rank."""

from tplab.align.gather import trace_on_rank
from tplab.align.run import check_prompts
from tplab.checkpoint import open_checkpoint
from tplab.faults import as_patches
from tplab.model.dtypes import parse_dtype
from tplab.patch import applied
from tplab.pool import shared_pool
from tplab.shard import ShardPlan


def trace_nan(model, prompt, patches=(), *, tensor_parallel_size: int = 2, dtype: str = "float32"):
    """Run the model over one prompt on the ranks, with the arguments of :func:`tplab.align.align`; returns the tokens'
    texts, and for each rank ``{trace point: [tokens] shares}`` of numbers that are NaN."""
    ckpt = open_checkpoint(model)
    (ids,) = check_prompts(ckpt, [prompt])
    plan = ShardPlan.from_config(ckpt.config, tensor_parallel_size)
    with applied(*as_patches(patches)):
        lost = shared_pool(tensor_parallel_size).run(_lost_on_rank, ckpt, plan, parse_dtype(dtype), ids)
    return [ckpt.tokenizer().decode([token]) for token in ids], lost


def _lost_on_rank(ckpt, plan, dtype, ids) -> dict:
    points = trace_on_rank(ckpt, plan, dtype, [ids])[0]
    return {name: tensor.isnan().flatten(1).double().mean(1) for name, tensor in points.items()}
