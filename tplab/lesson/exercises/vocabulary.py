"""Notebook 06: both ends of the model, cut along the vocabulary, and the one decision of all ranks."""

import math
from collections.abc import Callable

import torch

from tplab.lesson.mine import Mine, NotYet, count_ops, for_each, on_ranks, tensor
from tplab.lesson.verdict import Setting, exercise
from tplab.patch import Patch
from tplab.ranks import rank
from tplab.shard import split_evenly

ALONE = "one rank holds every word, so the collectives were tried on two and on three logical ranks"


def embedding_patch(embedding: Callable) -> Patch:
    """The engine's embedding, looked up by a learner's function."""
    def forward(self, input_ids):
        return embedding(input_ids, self.weight, self.rows)

    return Patch("tplab.shard.embedding.VocabParallelEmbedding.forward", forward)


def head_patch(head_logits: Callable) -> Patch:
    """The engine's head with a learner's whole logits; the engine goes on with this rank's part of them."""
    def forward(self, hidden):
        return head_logits(hidden, self.weight, self.sizes)[:, self.rows.start:self.rows.stop].contiguous()

    return Patch("tplab.shard.embedding.ParallelLMHead.forward", forward)


@exercise("my_embedding", "06", takes="ids, weight_here, rows",
          agreed="on {ranks}, every trace point agrees with Hugging Face")
def my_embedding(mine: Mine, setting: Setting):
    """Eleven words on two and on three ranks, in bfloat16 too, and words of one rank alone; then in the engine."""
    def check(case):
        size, words, dtype = case
        weight, ids = torch.arange(1.0, 56.0).sin().view(11, 5).to(dtype), torch.tensor(words)
        parts = split_evenly(11, size)

        def look_up():
            rows = parts[rank()]
            return tensor(mine(ids, weight[rows.start:rows.stop], rows), "tokens, hidden", (len(ids), 5), weight.dtype)

        try:
            ran = on_ranks(size, look_up, waits="must a rank that owns none of the tokens not come to the sum as well?")
        except NotYet as wrong:
            if "IndexError" not in str(wrong):
                raise
            raise NotYet("\n".join([*str(wrong).splitlines()[:2], f"rank 1 of {size} holds words {parts[1].start} to "
                                    f"{parts[1][-1]}, in rows 0 to {len(parts[1]) - 1}: which row is word "
                                    f"{parts[1].start}, and which is a word that lives elsewhere?"])) from wrong
        for r, (found, ops) in enumerate(ran):
            _looked_up(f"rank {r} of {size}", found, weight, ids, parts, bool(ops))
        count_ops(ran, {"all_reduce": 1})

    words = [10, 0, 6, 3, 4, 1, 7, 5]
    for_each(((2, words, torch.float32), (2, [1, 0, 3], torch.float32), (2, words, torch.bfloat16),
              (3, words, torch.float32)), check, lambda case: f"{case[0]} ranks")
    setting.align(embedding_patch(mine.function))
    return ALONE if setting.tensor_parallel_size == 1 else None


def _looked_up(who: str, found, weight, ids, parts, talked: bool) -> None:
    owner = {word: r for r, rows in enumerate(parts) for word in rows}
    wrong = [(word, row) for word, row in zip(ids.tolist(), found) if not torch.allclose(row, weight[word], atol=1e-6)]
    for word, row in wrong:
        for other, true in enumerate(weight):
            if torch.allclose(row, true, atol=1e-6):
                raise NotYet(f"{who} gets for word {word} the row of word {other}: rank {owner[word]}'s rows begin "
                             f"with word {parts[owner[word]].start}. Is it just that which you subtract?")
    for word, row in wrong:
        said = f"{who} gets for word {word}, which lives on rank {owner[word]},"
        if row.isnan().any():
            raise NotYet(f"{said} NaN")
        if not row.any():
            raise NotYet(f"{said} zeros" + (": does its owner add its row to the sum?" if talked else
                                            ": who tells it what the other ranks have looked up?"))
        if torch.allclose(row * len(parts), weight[word], atol=1e-6):
            raise NotYet(f"{said} its row divided by {len(parts)}: how many ranks have looked it up?")
        raise NotYet(f"{said} a sum with rows of other words: what does a rank add for a word that it does not have?")


@exercise("my_head_logits", "06", takes="hidden, weight_here, sizes",
          agreed="767 words on two ranks and 766 on three; on {ranks}, the logits are Hugging Face's")
def my_head_logits(mine: Mine, setting: Setting):
    """Three tokens; 767 words on two ranks, 766 on three, of which two hold fewer; then in the engine."""
    def check(size):
        words = 769 - size
        weight, hidden = torch.arange(words * 5.0).sin().view(words, 5), torch.arange(15.0).cos().view(3, 5)
        right, parts = hidden @ weight.T, split_evenly(words, size)
        sizes = [len(rows) for rows in parts]

        def logits(parts=parts, sizes=sizes):
            return mine(hidden, weight[parts[rank()].start:parts[rank()].stop], sizes)

        try:
            ran = on_ranks(size, logits)
        except NotYet as wrong:
            if "different collectives" not in str(wrong):
                raise
            if "all_reduce" in str(wrong):
                raise NotYet(f"{size} ranks hold {sizes} words, and {str(wrong).splitlines()[0]}\nA sum adds up "
                             "numbers that belong to the same word; these are different words' logits. What puts them "
                             "side by side?") from wrong
            raise NotYet(f"{size} ranks hold {sizes} words, and {str(wrong).splitlines()[0]}\nhow does a rank hear how "
                         "many words the others send?") from wrong
        for r, (found, ops) in enumerate(ran):
            _whole(f"rank {r} of {size}", found, right, parts, ops)
        count_ops(ran, {"all_gather": 1})
        (sent,) = ran[0][1]
        if math.prod(sent.shape) > right.numel():
            raise NotYet(f"all_gather {list(sent.shape)} is more than the logits, {list(right.shape)}: what is smaller "
                         "in a real model, the weights or the logits of a few tokens?")

    for_each((2, 3), check)
    setting.align(head_patch(mine.function))
    return ALONE if setting.tensor_parallel_size == 1 else None


def _whole(who: str, found, right, parts, ops) -> None:
    if isinstance(found, torch.Tensor) and found.dim() == 2 and len(found) == 3:
        own = [len(rows) for rows in parts]
        if found.shape[1] in own:
            raise NotYet(f"{who} returns the logits of {found.shape[1]} words; there are {right.shape[1]} on all ranks "
                         f"together")
        if found.shape[1] == max(own) * len(parts):
            raise NotYet(f"{who} returns {found.shape[1]} columns for {right.shape[1]} words: some of them are filled "
                         f"up, and a "
                         "token is a column's number")
    tensor(found, "tokens, words", right.shape, right.dtype)
    if torch.allclose(found, right, atol=1e-5):
        return
    turned = torch.cat([right[:, rows.start:rows.stop] for rows in reversed(parts)], dim=-1)
    if torch.allclose(found, turned, atol=1e-5):
        raise NotYet(f"{who} has the ranks' words in another order: column 0 must be token 0, which lives on rank 0")
    if found.isnan().any():
        raise NotYet(f"{who} has NaN among its logits, though nothing that goes in is NaN")
    if found.min() >= 0 and found.max() <= 1:
        raise NotYet(f"{who}: its numbers lie between 0 and 1: are they probabilities? Logits come before any softmax")
    wrong = ~torch.isclose(found, right, atol=1e-5).all(0)
    first = int(wrong.nonzero()[0])
    owner = next(r for r, rows in enumerate(parts) if first in rows)
    raise NotYet(f"{who}: {int(wrong.sum())} of {right.shape[1]} columns are wrong, the first is token {first}'s, "
                 f"which lives on "
                 f"rank {owner}; which rows of the head made it?")


@exercise("my_best_offer", "06", takes="offer_here",
          agreed="on {ranks}, three sequences get the tokens of Hugging Face")
def my_best_offer(mine: Mine, setting: Setting):
    """Three sequences: a clear winner each on another rank, a tie, a hair's breadth, NaN; then in the engine."""
    tie, hair, nan = 2.5, 1.0, float("nan")
    for size, scores, what in (
            (3, [[-8.0, -2.0, -7.0], [5.0, 1.0, 2.0], [1.0, 0.5, 7.0], [0.5, tie, tie]], "plain"),
            (2, [[-3.0, -1.0], [-2.0, -4.0], [tie, tie]], "plain"),
            (3, [[1.0, 2.0, 0.0]], "plain"),
            (2, [[hair, hair + 1e-12], [3.0, 1.0], [0.0, 4.0]], "hair"),
            (3, [[1.0, nan, 2.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], "nan")):
        table = torch.tensor(scores, dtype=torch.float64)
        ids = torch.tensor([[40 * r + 10 - 3 * row for r in range(size)] for row in range(len(scores))]).double()

        def decide(table=table, ids=ids):
            return mine(torch.stack([table[:, rank()], ids[:, rank()]], dim=-1))

        ran = on_ranks(size, decide)
        right = ids.gather(1, table.argmax(1, keepdim=True))[:, 0].long()
        found = [tensor(answer, "sequences", (len(scores),), torch.int64) for answer, _ in ran]
        for r, answer in enumerate(found):  # all of them, before any is looked at
            if answer.tolist() != found[0].tolist():
                raise NotYet(f"rank 0 of {size} decides for {found[0].tolist()}, rank {r} for {answer.tolist()}: they "
                             "would go on with different texts")
        _decided(f"{size} ranks", found[0].tolist(), table, ids.long(), right.tolist(), what)
        count_ops(ran, {"all_gather": 1})
    prompts, reference = setting.reference(12)
    found = setting.texts(prompts, 12, Patch("tplab.engine.sampler.best_offer", mine.function))
    for number, (ours, theirs) in enumerate(zip(found, reference)):
        if ours != theirs:
            at = next(i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1])
            raise NotYet(f"in the engine, the text of sequence {number} leaves Hugging Face's at token {at}: on which "
                         "rank does its best token live?")


def _decided(who: str, answer, table, ids, right, what: str) -> None:
    if answer == right:
        return
    row = next(row for row, pair in enumerate(zip(answer, right)) if pair[0] != pair[1])
    mine, offers = answer[row], ids[row].tolist()
    head = f"{who}, sequence {row} of {len(right)}: "
    if mine not in offers:
        others = " to this sequence" if any(mine in other for other in ids.tolist()) else ""
        raise NotYet(f"{head}{mine:g} comes back, which nobody offered{others}; the offered tokens are {offers}")
    rank_, best = offers.index(mine), offers.index(right[row])
    if what == "nan":
        raise NotYet(f"{head}rank {best} offers NaN, and rank {rank_}'s token comes back. NaN counts as the largest, "
                     "as in torch.argmax, or nobody would hear of it")
    if what == "hair":
        raise NotYet(f"{head}two scores differ in the twelfth digit, and the lower one wins: have they lost digits on "
                     "the way?")
    if table[row, rank_] == table[row, best]:
        raise NotYet(f"{head}ranks {best} and {rank_} offer the same score. torch.argmax over the whole vocabulary "
                     f"takes the lowest id, {right[row]}; yours is {mine}")
    said = (f"rank {rank_}'s token comes back with {table[row, rank_]:g}, though rank {best} offers "
            f"{table[row, best]:g}.")
    if len(right) > 1 and all(token == offered[rank_] for token, offered in zip(answer, ids.tolist())):
        if right[0] == ids[0, rank_]:
            raise NotYet(f"{head}rank {rank_}, which wins for sequence 0, decides for all of them. Has each sequence a "
                         "winner of its own?")
        raise NotYet(f"{head}{said} It comes back for every sequence: which number says who is best?")
    raise NotYet(f"{head}{said} Is every rank's offer looked at?")
