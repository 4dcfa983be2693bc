"""Notebook 06: both ends of the model, cut along the vocabulary, and the one decision of all ranks."""

import math

import torch

from course.exercises.rotation import numbers
from course.judge.attempt import Attempt, NotYet, count_ops, for_each, on_ranks, saying, tensor
from course.judge.compare import agree
from course.judge.cuts import dealt
from course.judge.verdict import Setting, at, exercise
from tplab.patch import Patch
from tplab.ranks import rank

_ALONE = "one rank holds every word, so the collectives were tried on two and on three logical ranks"


@exercise("my_embedding", "06", takes="ids, weight_here, rows", place="looks words up", alone=_ALONE,
          patches=lambda embedding: [Patch("tplab.shard.embedding.VocabParallelEmbedding.forward",
                                           lambda self, ids: embedding(ids, self.weight, self.rows))])
def my_embedding(attempt: Attempt, setting: Setting):
    """Eleven words on two and on three ranks, in bfloat16 too, and words of one rank alone; then in the engine."""
    def check(case):
        size, words, dtype = case
        weight, ids = numbers(11, 14).to(dtype), torch.tensor(words)
        parts = dealt(11, size)

        def look_up():
            rows = parts[rank()]
            found = attempt(ids, weight[rows.start:rows.stop], rows)
            return tensor(found, "tokens, hidden", (len(ids), 14), weight.dtype)

        here = (f"The words are {words}; rank 1 holds words {parts[1].start} to {parts[1][-1]}, in rows 0 to "
                f"{len(parts[1]) - 1}")
        ran = on_ranks(size, look_up, asks={
            "IndexError": here, "calls all_gather": "Each rank adds the rows that it has: one all_reduce is enough"},
                       waits=f"{here}. Every rank comes to the sum, also one that has none of the words")
        for r, (found, ops) in enumerate(ran):
            _looked_up(f"rank {r} of {size}", found, weight, ids, parts, len(ops))
        count_ops(ran, {"all_reduce": 1})

    words = [10, 0, 6, 3, 4, 2, 1, 7, 0, 10]
    for_each(((2, words, torch.float32), (2, [1, 0, 1], torch.float32), (2, words, torch.bfloat16),
              (3, words, torch.float32)), check, lambda case: f"{case[0]} ranks")
    setting.align()


def _looked_up(who: str, found, weight, ids, parts, calls: int) -> None:
    owner = {word: r for r, rows in enumerate(parts) for word in rows}
    for word, row in zip(ids.tolist(), found):
        with saying(f"{who} gets for word {word}, which lives on rank {owner[word]}, "):
            if row.isnan().any() or not row.any():
                raise NotYet("NaN: what can be added without a trace?" if row.any() else
                             "zeros: does its owner add its row to the sum?" if calls else
                             "zeros: where does it get what the other ranks have looked up?")
            again = f"not its row, after {calls} collectives: is what is a sum already added up again?"
            agree(row, weight[word], {again: row} if calls > 1 else {}, "not its row", within=1e-6, dims="number",
                  parts={f"word {n}'s row, of rank {owner[n]},": one for n, one in enumerate(weight)})


@exercise("my_head_logits", "06", takes="hidden, weight_here, sizes", place="makes logits", alone=_ALONE,
          patches=lambda whole_logits: [Patch(  # the engine goes on with this rank's part of them
              "tplab.shard.embedding.ParallelLMHead.forward", lambda self, hidden: whole_logits(
                  hidden, self.weight, self.sizes)[:, self.rows.start:self.rows.stop].contiguous())],
          agreed="767 words on two ranks and 766 on three; on {ranks}, the logits are Hugging Face's")
def my_head_logits(attempt: Attempt, setting: Setting):
    """Three tokens and 767 words on two ranks, one token and 766 words, in float64, on three; then in the engine."""
    def check(size):
        words = 769 - size
        dtype = (torch.float32, torch.float64)[size - 2]
        weight = torch.arange(words * 5, dtype=dtype).sin().view(words, 5)
        hidden = torch.arange(15, dtype=dtype).cos().view(3, 5)[:7 - 2 * size]
        right, parts = hidden @ weight.T, dealt(words, size)
        sizes = [len(rows) for rows in parts]

        def logits(parts=parts, sizes=sizes):
            return attempt(hidden, weight[parts[rank()].start:parts[rank()].stop], sizes)

        ran = on_ranks(size, logits, waits="Every rank needs the logits of all words", asks={
            "do not fit": f"{sizes} words: sizes says how many of them each rank has, in the order of the ranks",
            "calls all_reduce": f"{sizes} words: a sum adds up numbers of the same word; these are different words' "
                                "logits. What puts them side by side?",
            "float32 dim 0": "Dim 0 are the tokens: along which dimension do the words stand side by side?",
            "different collectives": f"{sizes} words: how does a rank hear how many the others send?"})
        for r, (found, _) in enumerate(ran):
            with saying(f"rank {r} of {size}: "):
                tensor(found, "tokens, words", right.shape, right.dtype)
                agree(found, right, {}, within=1e-5, dims="token, word", made=attempt.made[r], steps={
                    "the logits of this rank's words": right[:, parts[r].start:parts[r].stop]})
        count_ops(ran, {"all_gather": 1})
        (sent,) = ran[0][1]
        if math.prod(sent.shape) > right.numel():
            raise NotYet(f"all_gather {list(sent.shape)} is more than the logits, {list(right.shape)}: what is smaller "
                         "in a real model, the weights or the logits of a few tokens?")

    for_each((2, 3), check, lambda size: f"{size} ranks" + ", with three tokens in float32," * (size == 2))
    setting.align()


@exercise("my_best_offer", "06", takes="offer_here", place="decides for a token",
          patches=at("tplab.engine.sampler.best_offer"),
          agreed="on {ranks}, three sequences get the tokens of Hugging Face")
def my_best_offer(attempt: Attempt, setting: Setting):
    """Three sequences: a clear winner each on another rank, a tie, a hair's breadth, NaN; then in the engine."""
    tie, hair, nan = 2.5, 1.0, float("nan")
    for size, scores in (
            (3, [[-8.0, -2.0, -7.0], [5.0, 1.0, 2.0], [1.0, 0.5, 7.0], [0.5, tie, tie]]),
            (2, [[-3.0, -1.0], [-2.0, -4.0], [tie, tie]]), (3, [[1.0, 2.0, 0.0]]), (2, [[-1.0, 2.0]]),
            (2, [[hair, hair + 1e-12], [3.0, 1.0], [0.0, 4.0]]), (2, [[math.inf, nan]]),
            (3, [[1.0, nan, 2.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])):
        table = torch.tensor(scores, dtype=torch.float64)
        ids = torch.tensor([[40 * r + 10 - 3 * row for r in range(size)] for row in range(len(scores))])

        def decide(table=table, ids=ids):
            return attempt(torch.stack([table[:, rank()], ids[:, rank()].double()], dim=-1))

        ran = on_ranks(size, decide, waits="Every rank has an offer, and all of them decide")
        found = [tensor(answer, "sequences", (len(scores),), torch.int64).tolist() for answer, _ in ran]
        for r, answer in enumerate(found):  # all of them, before any is looked at
            if answer != found[0]:
                raise NotYet(f"rank 0 of {size} decides for {found[0]}, rank {r} for {answer}: they would go on with "
                             "different texts")
        with saying(f"{size} ranks, "):
            _decided(found[0], table, ids)
        count_ops(ran, {"all_gather": 1})
    prompts, reference = setting.reference(12)
    found = setting.texts(prompts, 12, *setting.patches)
    if wrong := [number for number, pair in enumerate(zip(found, reference)) if pair[0] != pair[1]]:
        raise NotYet(f"in the engine, the text of sequence {wrong[0]} is not Hugging Face's: on which rank does its "
                     "best token live?")


def _decided(answer: list[int], table: torch.Tensor, ids: torch.Tensor) -> None:
    def offers(at: torch.Tensor) -> torch.Tensor:
        return ids.gather(1, at.expand(len(ids))[:, None])[:, 0]

    best, size = table.argmax(1), table.shape[1]
    right = offers(best).tolist()
    row = next((row for row, pair in enumerate(zip(answer, right)) if pair[0] != pair[1]), 0)
    at = (ids == answer[row]).nonzero().tolist()
    whose = f"Yours is rank {at[0][1]}'s, for sequence {at[0][0]}" if at else "It is no rank's"
    with saying(f"sequence {row} of {len(right)}: {answer[row]} comes back, where {right[row]} has the best score. "):
        agree(answer, right, {
            "NaN counts as the largest, as in torch.argmax; else a broken model would go unnoticed":
                offers(table.nan_to_num(-1e9).argmax(1)),
            "Two scores differ in the twelfth digit: have they lost digits on the way?":
                offers(table.float().argmax(1)),
            "Two ranks offer the same score. torch.argmax over the whole vocabulary takes the lowest id":
                offers(size - 1 - table.flip(1).argmax(1)),
            **{f"Rank {r}'s token comes back for every sequence: which rank is best for each of them?":
               offers(torch.tensor([r])) for r in range(size if len(right) > 1 else 0)},
            "That is the number of the rank with the best score; which token does it offer?": best},
            f"{whose}; the ranks offered tokens {ids[row].tolist()} with scores {table[row].tolist()}", within=1e-9)
