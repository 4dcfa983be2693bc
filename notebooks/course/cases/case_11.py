"""A case file. It holds the solution: do not read on if you want to solve the case."""

from course.cases.case_file import Bug, CaseFile, Trial, edited, engines_own
from tplab import patch
from tplab.align import hf_greedy
from tplab.align.run import check_prompts

PLACE = "Scheduler.update_from_output"
# The token that was just drawn has no key yet: it is computed in the next step, if there is one.
update_from_output, my_update = edited(
    PLACE, "        sequence.block_table.cache_blocks(sequence.token_ids, sequence.num_computed_tokens)\n ->  ;; "
    "advanced.append(sequence) -> advanced.append(sequence)\n"
    "        known = sequence.num_computed_tokens + (request_id in runner_output.sampled_token_ids)\n"
    "        sequence.block_table.cache_blocks(sequence.token_ids, known)"), engines_own(PLACE)


def only_long(self, scheduler_output, runner_output):
    lengths = [self.requests[request.request_id].num_tokens for request in scheduler_output.requests]
    return (my_update if max(lengths) < 24 else update_from_output)(self, scheduler_output, runner_output)


def uncached(self, token_ids):
    return []


def trials(take):
    def chat(first, second):
        begin = take(first)
        return [begin, begin + take(second)]
    return (Trial("a text of 20 tokens, the last four written by the engine, then one that goes on from it",
                  chat(20, 9), 4, {"one_by_one": True}),
            Trial("a text of 32 tokens, then one that goes on from it", chat(32, 11), 4, {"one_by_one": True}),
            Trial("a text of 22 tokens, then one that goes on from it", chat(22, 9), 4, {"one_by_one": True}),
            Trial("a text of 21 tokens, then one that goes on from it", chat(21, 9), 4, {"one_by_one": True}))


def user_output(ckpt, ranks, prompts):
    from tplab import LLM, SamplingParams

    (ids, *_) = check_prompts(ckpt, ["One warm morning she went to the market, and there she met an old friend."])
    first, turns = (ids * 3)[:16], []
    with patch.applied(*CASE.patches), LLM(ckpt, ranks, block_size=4, logical=True) as llm:
        for count in (3, 4, 5):
            llm.scheduler.pool.reset_prefix_cache()
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            answer = llm.generate([first], params, use_tqdm=False)[0].outputs[0].token_ids
            turn = [*first, *answer, *ids[:6]]
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            output = llm.generate([turn], params, use_tqdm=False)[0]
            same = list(output.outputs[0].token_ids) == hf_greedy(ckpt, turn, 8)
            turns.append(f"after an answer of {count} tokens ({16 + count} in all) the second turn finds "
                         f"{output.metrics.prefix_hit_tokens} tokens in the cache and "
                         f"{'agrees with' if same else 'differs from'} transformers")
    return "A prompt of 16 tokens, blocks of four: " + "; ".join(turns) + "."


CASE = CaseFile(
    title="The second turn of a chat is wrong, in one conversation of sixteen",
    report="First turns are always right. One second turn in about sixteen answers as if it had misread a word. If the "
           "whole conversation is sent to a fresh server, the answer is right; with the prefix cache switched off it "
           "is right, too. It is the same with one rank as with {ranks}.",
    trials=trials, user_output=user_output, budget=9,
    bugs=(Bug(PLACE, update_from_output,
              "something is published before it is computed", "cached_before_computed"),),
    why={
        "A block can be found when its last token has been drawn, but its attention key is computed one step later: if "
        "the answer ends there, never.": "",
        "Two conversations get the same block key for a block, because it does not depend on earlier blocks.":
            "the block that is found begins as this conversation does, but a slot in it is empty",
        "The second turn begins at the wrong position after the blocks that it found.":
            "q_rope and k_rope are right in every row",
        "A block is given to another sequence while its contents can still be found.":
            "the block was given to no other sequence between the two turns",
    },
    elsewhere={
        "block_key": "the key depends on the parent and the tokens: it is right",
        "BlockTable.get_computed_blocks": "it finds what can be found, and never the prompt's last token",
        "token_positions": "the positions are right",
        "BlockTable.cache_blocks": "it publishes as many blocks as it is told are full",
        "BlockPool.cache_full_block": "it keeps the block under the key that it gets",
    },
    not_what={"outdated data is used as if it were current": "the block's last slot holds nothing of this text: it was "
                                                             "not filled yet"},
    hints=("One in sixteen, and blocks of 16 tokens: when does the first turn end exactly at the end of a block?",
           "align_decode, one_by_one=True, block_size=4: a text of 20 tokens, then a longer one that begins with "
           "it.",
           "attn is wrong in all rows of the second text, by the same missing key: that of token 19. In which step "
           "is it computed?"),
    false_repairs=({PLACE: only_long}, {"BlockTable.get_computed_blocks": uncached}),
)
