"""Runs of the engine in which a fault of the decode path must show: preemptions, found prefixes, drafts."""

import torch

from tplab.faults.museum import fault


def plain_prompts(vocab_size: int) -> list[list[int]]:
    """For a forward pass: two unlike prompts of unlike length, with tokens from the whole vocabulary."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(vocab_size, (count,), generator=generator).tolist() for count in (26, 11)]


def scenario(name: str, vocab_size: int, seed: int = 0) -> dict:
    """Prompts and options for :func:`tplab.align.align_decode` under which the fault called ``name`` shows.

    Prompts are random token ids below ``vocab_size``. The clean engine passes every scenario.

        >>> align_decode(model, **scenario("stale_block_table", 768), patches=[fault("stale_block_table")])
    """
    fault(name)
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocab_size, (count,), generator=generator).tolist()

    if name == "stale_block_table":
        # Each needs 9 blocks in the end, and there are 14: the second prompt is preempted, and the first one, which
        # goes on, gets its blocks.
        return {"prompts": [tokens(17), tokens(18)], "new_tokens": 8, "block_size": 2, "num_blocks": 14,
                "enable_prefix_caching": False}
    if name == "prefix_hash_without_parent":
        # The third prompt begins like the second one and goes on like the first one.
        first, second, begins, goes_on = tokens(4), tokens(4), tokens(4), tokens(4)
        return {"prompts": [first + goes_on + tokens(6), begins + second + tokens(6), begins + goes_on + tokens(6)],
                "new_tokens": 4, "block_size": 4, "one_by_one": True}
    if name == "full_length_after_prefix_hit":
        prompt = tokens(12)
        return {"prompts": [prompt + tokens(4), prompt + tokens(4)], "new_tokens": 4, "block_size": 4,
                "one_by_one": True}
    if name == "embedding_unscaled":
        return {"prompts": [tokens(19)], "new_tokens": 5}
    if name in ("rejected_draft_kept", "rejected_draft_findable"):
        # Eight tokens, then the first four again: the engine drafts the next four, and the first of them is wrong. The
        # second prompt says all eight twice.
        first = tokens(8)
        other = (first[4] + 1) % vocab_size
        return {"prompts": [[*first, *first[:4], other, *first[5:7], *tokens(5)], first + first + tokens(13)],
                "new_tokens": 9, "block_size": 4, "one_by_one": True, "num_speculative_tokens": 4}
    if name == "block_leaked":
        return {"prompts": [tokens(15), tokens(11), tokens(18)], "new_tokens": 4, "one_by_one": True}
    return {"prompts": [tokens(19), tokens(14)], "new_tokens": 5}
