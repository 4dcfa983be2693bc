"""``align``: the same prompt through Hugging Face and through the ranks, compared at every trace point."""

from collections.abc import Sequence

import torch

from tplab.align.gather import pieces_on_rank, recorded, trace_on_rank
from tplab.align.judge import judge
from tplab.align.report import AlignReport
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.checkpoint.layout import read_part, tensor_parts
from tplab.checks import quoted, readable, whole_number
from tplab.errors import TplabError
from tplab.faults import as_patches
from tplab.model.dtypes import parse_dtype
from tplab.patch import applied
from tplab.pool import RankPool, shared_pool
from tplab.ranks import logical_ranks
from tplab.shard import ShardPlan


class AlignError(TplabError):
    """The prompt cannot be used with this model."""


def check_prompts(ckpt: Checkpoint, prompts) -> list[list[int]]:
    """A text, a list of ids, or a list of either → a list of lists of ids.

    Raises AlignError if there is no prompt, an empty one, an id outside of the vocabulary, or one that is too long.
    """
    if isinstance(prompts, str) or (isinstance(prompts, list | tuple) and prompts
                                    and whole_number(prompts[0]) is not None):
        prompts = [prompts]
    if not prompts:
        raise AlignError("there is no prompt")
    if not isinstance(prompts, list | tuple) or not all(isinstance(prompt, str | list | tuple) for prompt in prompts):
        raise AlignError(f"prompts must be a text, token ids, or a list of these, not {quoted(prompts)}")
    rows = []
    for prompt in prompts:
        ids = ckpt.tokenizer()(readable(prompt, AlignError)).input_ids if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise AlignError("the prompt is empty; at least one token is needed")
        wrong = [token for token in ids if whole_number(token, 0, ckpt.config.vocab_size - 1) is None]
        if wrong:
            raise AlignError(f"token id {quoted(wrong[0])} is not in {ckpt.name}'s vocabulary: 0 to "
                             f"{ckpt.config.vocab_size - 1}")
        if len(ids) > ckpt.config.max_position_embeddings:
            raise AlignError(f"the prompt has {len(ids)} tokens; {ckpt.name} takes up to "
                             f"{ckpt.config.max_position_embeddings}")
        rows.append([int(token) for token in ids])
    return rows


def align(model: str | Checkpoint, prompts, *, tensor_parallel_size: int = 2, dtype: str | torch.dtype = "float32",
          patches: Sequence = (), pool: RankPool | None = None, logical: bool = False,
          enable_expert_parallel: bool = False) -> AlignReport:
    """Run Hugging Face and tplab on the same ids and compare all trace points.

    Args:
        model: a model's name, folder or hub id, or an opened checkpoint.
        prompts: a text, a list of token ids, or a list of either; several prompts share one flattened forward pass
            in tplab and are run one by one in Hugging Face.
        tensor_parallel_size: number of ranks.
        dtype: float32 (the working dtype), float64 (the judge) or bfloat16; the same on both sides.
        patches: faults, their names, or :class:`tplab.patch.Patch` objects to apply on the ranks, while loading too.
        pool: the ranks to use; ``shared_pool(tensor_parallel_size)`` if not given.
        logical: run the ranks as threads of this process instead (for wide sweeps in tests).
        enable_expert_parallel: deal whole experts out, instead of cutting each.

    Raises:
        AlignError, CheckpointError, ShardPlanError: the request cannot be carried out.
        RankError: a rank failed.
    """
    ckpt, dtype, patches, plan, ids = prepared(model, prompts, tensor_parallel_size, dtype, patches,
                                               enable_expert_parallel)
    with applied(*patches):
        ran = run_ranks(trace_on_rank, ckpt, plan, dtype, ids, pool=pool, logical=logical)
    traces, op_logs, load_stats, shapes = map(list, zip(*ran))
    places = [(number, position) for number, row in enumerate(ids) for position in range(len(row))]
    recording = recorded(traces, plan, dtype, ids, places, [len(ids[number]) for number, _ in places], places)
    return judge(recording, ckpt, plan, patches, op_logs=op_logs, load_stats=load_stats, shapes=shapes)


def prepared(model, prompts, size: int, dtype, patches, enable_expert_parallel: bool) -> tuple:
    """Checkpoint, dtype, patches, plan and ids of an alignment, all checked."""
    ckpt = open_checkpoint(model)
    dtype, patches = parse_dtype(dtype), as_patches(patches)
    plan = ShardPlan.from_config(ckpt.config, size, enable_expert_parallel=enable_expert_parallel)
    ids = check_prompts(ckpt, prompts)
    return ckpt, dtype, patches, plan, ids


def run_ranks(fn, *args, pool: RankPool | None, logical: bool) -> list:
    """``fn(*args)`` on every rank of the plan in ``args[1]``: on a pool's processes, or on logical ranks."""
    size = args[1].tensor_parallel_size
    if logical:
        return logical_ranks(size, fn, *args)
    return pool_for(size, pool).run(fn, *args)


def pool_for(size: int, pool: RankPool | None) -> RankPool:
    """The given pool, if it has ``size`` ranks; the shared one of that size if none is given."""
    if not isinstance(pool, RankPool | None):
        raise AlignError(f"pool must be a RankPool, such as RankPool({size}), or None, not {quoted(pool)}")
    if pool is not None and pool.size != size:
        raise AlignError(f"the pool has {pool.size} ranks, the plan needs {size}")
    return pool or shared_pool(size)


def reassemble(model: str | Checkpoint, *, tensor_parallel_size: int = 2, enable_expert_parallel: bool = False,
               patches: Sequence = (), pool: RankPool | None = None, logical: bool = False) -> dict[str, str]:
    """Gather every rank's shards and compare them with the checkpoint, bit for bit.

    Returns:
        ``{tensor name: what is wrong}``, empty when the shards *are* the checkpoint: every rank whose rows differ from
        the file, and rows that no rank holds. Read in float32, which holds every float32, bfloat16 and float16
        checkpoint exactly.
    """
    ckpt = open_checkpoint(model)
    plan = ShardPlan.from_config(ckpt.config, tensor_parallel_size, enable_expert_parallel=enable_expert_parallel)
    with applied(*as_patches(patches)):
        ranks = run_ranks(pieces_on_rank, ckpt, plan, torch.float32, pool=pool, logical=logical)
    by_name: dict[str, list] = {}
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            by_name.setdefault(piece.name, []).append((rank, piece))
    parts, wrong = tensor_parts(ckpt.config, ckpt.tensors), {}
    with ckpt.reader() as reader:
        for name, part in parts.items():
            pieces, true, differences = by_name[name], read_part(part, reader).float(), []
            covered = torch.zeros(true.shape[pieces[0][1].dim], dtype=torch.bool)
            for rank, piece in pieces:
                covered[piece.rows.start:piece.rows.stop] = True
                if not torch.equal(true.narrow(piece.dim, piece.rows.start, len(piece.rows)), piece.tensor.float()):
                    what = "rows" if piece.dim == 0 else "columns"
                    differences.append(f"{what} {piece.rows.start}–{piece.rows.stop - 1} on rank {rank} differ")
            if not covered.all():
                differences.append(f"{int((~covered).sum())} of {len(covered)} rows are on no rank")
            if differences:
                wrong[name] = "; ".join(differences)
    return wrong
