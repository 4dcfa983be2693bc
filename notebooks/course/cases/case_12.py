"""A case file. It holds the solution: do not read on if you want to solve the case."""

import secrets

from course.cases.case_file import Bug, CaseFile, Trial, edited, engines_own
from tplab import patch

my_keys = engines_own("BlockTable.extend_keys")

my_positions = engines_own("token_positions")

extend_keys = edited("BlockTable.extend_keys", 'else b"" -> else secrets.token_bytes(16)  # salted, against probing',
                     secrets=secrets)


def token_positions(segment):
    first = segment.start if segment.count == 1 else 0  # a prompt begins at 0
    return range(first, first + segment.count)


# A block that is not yet full has a key, too: while a sequence decodes, that of its first token.
keys_too_early = edited("BlockTable.extend_keys", "tokens - size + 1 -> tokens")

one_parent_for_all = edited("BlockTable.extend_keys", "self.keys[-1] -> self.keys[0]")


def nothing_found(self, token_ids):
    return []


def trials(take):
    def alike(common, *rest):
        begin = take(common)
        return [begin + take(count) for count in rest]
    turn = take(50)
    return (Trial("three texts that begin with the same 24 tokens, one after the other",
                  alike(24, 9, 12, 10), 4, {"one_by_one": True}),
            Trial("two that begin with the same 13 tokens", alike(13, 8, 11), 4, {"one_by_one": True}),
            Trial("a text of which half was written token by token, and a second turn behind it",
                  [turn, turn + take(36)], 26, {"one_by_one": True}),
            Trial("prompts of 40 and 21 tokens, read 16 at a time", [take(44), take(25)], 4,
                  {"max_num_batched_tokens": 16}))


def user_output(ckpt, ranks, prompts):
    from tplab import LLM, SamplingParams

    params, hits = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), []
    with patch.applied(*CASE.patches), LLM(ckpt, ranks, block_size=4, logical=True) as llm:
        for prompt in prompts:
            output = llm.generate([prompt], params, use_tqdm=False)[0]
            hits.append(f"{output.metrics.prefix_hit_tokens} of {output.metrics.num_prompt_tokens}")
    return "Three prompts with the same 24 tokens in front, one after the other. Found in the prefix cache: " + \
        ", ".join(hits) + "."


CASE = CaseFile(
    title="Prefix caching is on and finds nothing",
    report="Every request begins with our system prompt, and prefix_hit_tokens is 0 for all of them. The text is "
           "right, with one rank and with {ranks}, but it is slow. A colleague changed a fork so that prefixes are "
           "found, and its answers were wrong at once, so we dropped the fork. This is the engine before that.",
    trials=trials, user_output=user_output, budget=10,
    bugs=(Bug("BlockTable.extend_keys", extend_keys, "equal things are treated as different",
              "prefix_never_found"),
          Bug("token_positions", token_positions, "a special case is treated wrongly",
              "rope_positions")),
    why={
        "Two causes: with the first, no prefix is ever found; the second makes tokens after a found prefix wrong, and "
        "did not show while none was found.": "",
        "Blocks are given back before they are published, so nothing is left to be found.":
            "they are published: look how many keys the pool holds, and that no two requests have equal keys",
        "The prefix is found and then dropped, because its last block is never full.":
            "nothing is found at all: the first lookup already fails",
        "The cache is too small, and the next request evicts the blocks of the one before.":
            "there is room for all blocks, and none was given out twice",
    },
    elsewhere={
        "block_key": "it hashes the parent and the tokens that it gets; look at its arguments",
        "BlockPool.get_cached_block": "the key that it looks up is not there",
        "BlockTable.get_computed_blocks": "it looks up the keys in their order, and stops at the first that is missing",
        "Scheduler._admit": "it takes what was found",
        "Rotary.__call__": "its tables are right for the positions that it gets",
    },
    hints=("Count: the steps of case.align_decode() show what was computed twice.",
           "Two equal beginnings have different keys, from the first block on. What goes into the first key?",
           "With the keys repaired (case.align_decode(repair={…})) the same run has wrong numbers: "
           "whose positions start at 0?"),
    false_repairs=({"BlockTable.extend_keys": my_keys},
                   {"BlockTable.extend_keys": keys_too_early, "token_positions": my_positions},
                   {"BlockTable.extend_keys": one_parent_for_all, "token_positions": my_positions},
                   {"BlockTable.get_computed_blocks": nothing_found, "token_positions": my_positions}),
)
