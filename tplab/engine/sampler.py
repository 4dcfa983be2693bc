"""From this rank's logits to one token for all ranks.

Every rank has the logits of its own part of the vocabulary. The most probable token is found without gathering
them: each rank offers its best token and that token's score, and all ranks take the best offer. Sampling is the same
with noise: with Gumbel noise added, the largest score *is* a draw from the softmax. The noise is made from the
request's seed for the whole vocabulary, so it is the same on any number of ranks. Only top-k, top-p and
log probabilities need the whole vocabulary, and only for the rows that ask for them.
"""

from collections.abc import Sequence

import torch

from tplab.engine.step import SamplingMetadata
from tplab.ranks import all_gather
from tplab.shard import ParallelLMHead


def gumbel_noise(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """``[vocab_size]`` in float64: the noise for one draw of one request, the same on every rank and in any batch."""
    mixed = (seed * 0x9E3779B97F4A7C15 + position) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64  # as in SplitMix64: torch reads the low 32 bits only
    generator = torch.Generator().manual_seed(mixed >> 32)
    return -torch.empty(vocab_size, dtype=torch.float64).exponential_(generator=generator).log()


def offer(scores_here: torch.Tensor, first: int) -> torch.Tensor:
    """``[n, vocabulary here]`` scores → this rank's best token per row, ``[n, 2]``: its score and its global id, both
    exact in float64.

    ``first`` is the global id of this rank's first token. The first of equal scores is taken; NaN is the largest.
    """
    wide = scores_here.float() if scores_here.dtype == torch.bfloat16 else scores_here
    ids = torch.from_numpy(wide.numpy().argmax(axis=-1))  # numpy's is vectorised: a sixth of the time of torch's
    return torch.stack([scores_here.gather(-1, ids[:, None])[:, 0].double(), (ids + first).double()], dim=-1)


def best_offer(offer_here: torch.Tensor) -> torch.Tensor:
    """The one decision: all ranks' offers → token ids ``[n]``, the same on every rank.

    Equal scores go to the lowest id, as in ``torch.argmax`` over the whole vocabulary: ranks stand in the order of
    their tokens and the first maximum wins. NaN counts as the largest, as it does there.
    """
    offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))
    best = offers[..., 0].argmax(dim=-1, keepdim=True)
    return offers[..., 1].gather(-1, best)[:, 0].long()


def lowest_allowed(logits: torch.Tensor, draw: SamplingMetadata) -> torch.Tensor:
    """The smallest logit that top-k, top-p and min-p let through; in this order, as in Hugging Face.

    ``logits`` are ``[vocab_size]`` in float64, divided by the temperature.
    """
    ordered = logits.sort(descending=True).values
    if ordered[0].isnan():
        return ordered[0]  # NaN is sorted first, and comparisons with it are False
    if 0 < draw.top_k < len(ordered):
        ordered = ordered[ordered >= ordered[draw.top_k - 1]]  # equals stay together, and count in top-p
    if draw.top_p < 1:
        before = ordered.softmax(-1).cumsum(-1).roll(1)
        before[0] = 0  # what the tokens before a token add up to; the first always stays
        ordered = ordered[before < draw.top_p]
    if draw.min_p > 0:
        ordered = ordered[ordered >= ordered[0] + torch.tensor(draw.min_p, dtype=torch.float64).log()]
    return ordered[-1]


def token_logprobs(logits: torch.Tensor, token: int, count: int) -> list[tuple[int, float, int]]:
    """``(token, log probability, rank)`` of the drawn token, then of the ``count`` most probable ones.

    A rank is 1 and how many tokens are *more* probable, so equal ones share it; of these, the lowest ids are named.
    """
    logprobs = logits.log_softmax(-1)
    tokens = [token]
    if count:
        # Not topk, which takes any of equal values, nor a sort of the whole vocabulary. `<` is False for NaN.
        candidates = (~(logprobs < logprobs.topk(min(count, len(logprobs))).values[-1])).nonzero()[:, 0]
        tokens += candidates[logprobs[candidates].sort(descending=True, stable=True).indices[:count]].tolist()
    return [(t, logprobs[t].item(), int((logprobs > logprobs[t]).sum()) + 1) for t in tokens]


def sample(lm_head: ParallelLMHead, logits_here: torch.Tensor, draws: Sequence[SamplingMetadata]
           ) -> tuple[list[int | None], dict[int, list]]:
    """Draw one token per row. Called on every rank with its own logits; every rank gets the same answer.

    ``logits_here`` is ``[n, vocabulary here]``, with one of ``draws`` per row. Returns token ids, None where the
    logits to draw from are NaN; and ``{row: log probabilities}`` for the rows that asked.
    """
    here = lm_head.rows
    whole_rows = [row for row, d in enumerate(draws)
                  if d.logprobs is not None or d.temperature and (d.top_k > 0 or d.top_p < 1 or d.min_p > 0)]
    whole = {}
    if whole_rows:
        gathered = lm_head.gather(logits_here[whole_rows]).double()
        whole = dict(zip(whole_rows, gathered))
    offers = offer(logits_here, here.start)
    for row, draw in enumerate(draws):
        if draw.temperature:
            scores = logits_here[row].double() / draw.temperature
            if row in whole:
                scores = scores.masked_fill(scores < lowest_allowed(whole[row] / draw.temperature, draw), float("-inf"))
            noise = gumbel_noise(draw.seed, draw.position, lm_head.num_embeddings)
            offers[row] = offer((scores + noise[here.start:here.stop])[None], here.start)[0]
            if offers[row, 0].isnan():
                offers[row, 1] = -1  # no token can be drawn. NaN counts as the largest score, so all ranks get it
    tokens = [token if token >= 0 else None for token in best_offer(offers).tolist()]
    return tokens, {row: token_logprobs(whole[row], token, count) for row in whole_rows
                    if (count := draws[row].logprobs) is not None and (token := tokens[row]) is not None}
