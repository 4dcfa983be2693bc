"""Notebooks 03 and 04: where the tokens of a batch stand, and the next one."""

import torch

from tplab.cache import Segment
from tplab.checks import shown, whole_number
from tplab.lesson.mine import Mine, NotYet, agree, kind, not_only, tensor
from tplab.lesson.verdict import Setting, exercise
from tplab.patch import Patch, original

FORWARD = "tplab.model.decoder.TensorParallelCausalLM.forward"


@exercise("my_positions", "03", takes="starts, counts",
          agreed="on {ranks}, prompts read in chunks and beside each other agree with Hugging Face")
def my_positions(mine: Mine, setting: Setting):
    """A chunk, a prompt and decoding tokens in one batch; then under the engine, in chunks of 5 tokens."""
    def check(case):
        starts, counts = case
        total = sum(counts)
        found = mine(starts, counts)
        right = _laid_out(starts, counts)
        if isinstance(found, torch.Tensor) and found.dim() == 1 and len(found) != total:
            raise NotYet(f"starts {starts}, counts {counts}: {_wrong_number(found, starts, counts)}")
        found = tensor(found, "tokens", [total])
        if found.dtype not in (torch.int64, torch.int32):
            raise NotYet(f"it returns {found.dtype}; positions are whole numbers, torch.int64")
        moved = [start + (count == 1) for start, count in zip(starts, counts)]
        agree(found, right, {f"starts {starts}, counts {counts}: {says}": value for says, value in {
            "the rows are counted through, as if all were one sequence": torch.arange(total),
            "every sequence begins at 0: what has it in the cache already?": _laid_out([0] * len(starts), counts),
            "one too little everywhere: after n tokens, at 0 to n - 1, where does the next one stand?":
                right - 1, "one too far everywhere: the first token of all stands at 0": right + 1,
            "a sequence's only new token stands one too far: the newest of n stands at n - 1":
                _laid_out(moved, counts),
            "all of a sequence's new tokens stand in the same place": torch.tensor(starts).repeat_interleave(
                torch.tensor(counts)),
            "the sequences come in another order than in starts": _laid_out(*zip(*sorted(zip(starts, counts)))),
            "every sequence begins where the first one does": _laid_out([starts[0]] * len(starts), counts),
            "the chunk is counted on from row to row instead of from its own start":
                torch.arange(total) + torch.tensor(starts).repeat_interleave(torch.tensor(counts)),
        }.items()}, f"starts {starts}, counts {counts}: row {_first(found, right)} of yours stands at "
              f"{int(found[_first(found, right)])}, not at {int(right[_first(found, right)])}")

    for case in (([3, 0, 12, 5], [5, 4, 1, 2]), ([6, 2], [1, 1]), ([9], [5])):
        not_only(check, ([0, 8, 20], [6, 4, 1]), case, "right for the batch that was shown, and not for another")

    function = mine.function

    def forward(self, input_ids, positions, context):
        given = [segment.start for segment in context.segments], [segment.count for segment in context.segments]
        return original(FORWARD)(self, input_ids, function(*given), context)
    ids = setting.ids(16)
    setting.align(Patch(FORWARD, forward), decode=True, prompts=[ids, ids[4:]], new_tokens=3, max_num_batched_tokens=5)


@exercise("my_token_positions", "04", takes="segment",
          agreed="on {ranks}, chunks of a prompt and tokens behind it agree with Hugging Face")
def my_token_positions(mine: Mine, setting: Setting):
    """A prompt, a chunk, a token; then in the engine."""
    for start, count in ((0, 5), (6, 1), (4, 3), (7, 8)):
        found = mine(Segment(start, count, list(range(4)), 12))
        have = f"{start} tokens are in the cache, {count} {'follow' if count > 1 else 'follows'}: "
        if isinstance(found, range) and len(found) > 1000:
            raise NotYet(f"{have}yours are {found}, far more than follow")
        try:
            given = found = found.tolist() if isinstance(found, torch.Tensor) else list(found)
            found = [whole_number(position) for position in found]
        except TypeError:
            raise NotYet(f"it returns {kind(found)}; a range or a list of positions must come back") from None
        if None in found:
            raise NotYet(f"it returns {shown(given)}; positions are whole numbers")
        right = list(range(start, start + count))
        ways = {"a new token that comes alone stands one too far": [start + 1] if count == 1 else right,
                "counted from 0 again: where does the first of them stand?": range(count),
                "one too far: the first token of all stands at 0": range(start + 1, start + count + 1),
                "one too little: " + ("that place is taken by the last token in the cache" if start else
                                      "the first token of all stands at 0"): range(start - 1, right[-1]),
                "only the first of the new tokens has a position": right[:1],
                "only the last of the new tokens has a position": right[-1:],
                "those in the cache have their positions already": range(start + count),
                "one too many: does a range hold its end?": range(start, start + count + 1),
                "one too few: a range ends before its end": range(start, start + max(1, count - 1)),
                "count says how many come, not where they end": range(start, count)}
        if found != right:
            raise NotYet(have + next((says for says, wrong in ways.items() if found == list(wrong)),
                                      f"yours stand at {shown(found)}; they follow each other, behind those in "
                                      "the cache"))
    ids = setting.ids(16)
    setting.align(Patch("tplab.engine.runner.token_positions", mine.function), decode=True, prompts=[ids, ids[4:]],
                  new_tokens=3, max_num_batched_tokens=5)


def _laid_out(starts, counts) -> torch.Tensor:
    return torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts)])


def _first(found: torch.Tensor, right: torch.Tensor) -> int:
    wrong = (found != right).nonzero()
    return int(wrong[0]) if len(wrong) else 0


def _wrong_number(found: torch.Tensor, starts: list[int], counts: list[int]) -> str:
    says = f"{len(found)} positions for {sum(counts)} tokens"
    if found.equal(_laid_out(starts[:1], counts[:1])):
        return f"{says}: those of the first sequence; and the others?"
    if len(found) == sum(counts) + len(counts):
        return f"{says}: one too many a sequence; does a range hold its end?"
    if len(found) == sum(max(0, count - start) for start, count in zip(starts, counts)):
        return f"{says}: counts says how many tokens come, not where they end"
    return f"{says}: of sequence i come counts[i], and no more"
