"""Faults of ranks that do different things."""

import torch

from tplab.faults.fault import bug, two_ranks
from tplab.ranks import all_reduce, rank


def rank_local_sampling(offer_here: torch.Tensor) -> torch.Tensor:
    return offer_here[:, 1].long()               # each rank's own best token, instead of the best of all


def collective_skipped(self, partial: torch.Tensor) -> torch.Tensor:
    if rank() == 0:                                      # "only the first rank needs the sum"
        all_reduce(partial)
    return partial


def row_order(scheduler_output):
    requests = scheduler_output.requests
    return tuple(reversed(requests)) if rank() % 2 else requests    # as if they had been kept in a set


FAULTS = (
    bug("tplab.engine.sampler.best_offer", rank_local_sampling, "each rank draws its own token",
        "After one right token, the ranks add up embeddings of different words.",
        ("transformers: under tensor parallelism every rank drew its own token, and the forward passes mixed different "
         "sequences.", "https://github.com/huggingface/transformers/issues/36634"),
        ("vLLM: draft tokens that differed between ranks ended in a hang.",
         "https://github.com/vllm-project/vllm/pull/31307"),
        first_point="drawn", notebook="06_full_tp_generate", shows_in="decode", needs=two_ranks),
    bug("tplab.shard.linear.RowParallelLinear.reduce", collective_skipped, "one rank skips an all-reduce",
        "There is no further token: one rank waits, and the others have gone on.",
        ("A rank without metrics returned before an all-gather; the others waited in it for 13 minutes at full load.",
         "https://github.com/bo-ke/llm-internal-medicine/pull/45"),
        ("SGLang on two machines: one rank in the logits' all-gather, the other one waiting for requests.",
         "https://github.com/sgl-project/sglang/issues/33289"),
        ("SGLang: each rank used its own clock to decide which requests had timed out.",
         "https://github.com/sgl-project/sglang/issues/27221"),
        first_point="error", notebook="08_when_ranks_hang", needs=two_ranks),
    bug("tplab.engine.runner.batch_order", row_order, "ranks hold the sequences of a batch in different orders",
        "A prompt alone is answered well; two at a time are mixed.",
        ("mini-sglang kept running requests in a set, so each rank had its own order.",
         "https://github.com/sgl-project/mini-sglang/pull/113"),
        first_point="embed", notebook="06_full_tp_generate", shows_in="decode", needs=two_ranks),
)
