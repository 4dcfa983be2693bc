"""A case file; reading on spoils it."""

from tplab.faults.case_file import Bug, CaseFile, Trial


def token_positions(segment):
    if segment.count == 1 and segment.start:  # it decodes, so it stands behind the prompt
        first = max(segment.start, segment.prompt_length)
        return range(first, first + 1)
    return range(segment.start, segment.start + segment.count)


def my_positions(segment):
    return range(segment.start, segment.start + segment.count)  # behind what is computed, however many come


def unless_chunk(segment):
    if segment.start % 16 == 0:
        return my_positions(segment)
    return token_positions(segment)


def trials(take):
    again = take(21)
    return (Trial("a prompt of 33 tokens, read 16 at a time, and four tokens more", [take(37)], 4,
                  {"max_num_batched_tokens": 16}),
            Trial("the same prompt of 21 tokens twice, its prefix in the cache", [again + take(3), again + take(3)], 3,
                  {"one_by_one": True}),
            Trial("prompts of 30 and 35 tokens, read 16 at a time", [take(34), take(39)], 4,
                  {"max_num_batched_tokens": 16}))


CASE = CaseFile(
    title="One length of prompt is answered wrongly",
    report="A fuzzer found it, not a user: with chunks of 16 tokens, a prompt of 33 gets another answer than from "
           "transformers. 32 is right, 34 is right, 35 to 48 are right. 49 is wrong again. In chunks of 32 it is 33 "
           "and 65. With {ranks} ranks as with one. Nobody believed the fuzzer.",
    trials=trials,
    bugs=(Bug("token_positions", token_positions, my_positions, "a special case is recognized by the wrong sign",
              "rope_positions"),),
    why={
        "A single token is taken for one that decodes and is placed behind the prompt; the last chunk of a prompt can "
        "be a single token, too.": "",
        "The last chunk is read with the mask of a whole prompt.":
            "attn is right, given its inputs: it is q_rope that is guilty first, in one row",
        "The last token of the prompt is written into the slot of the token before it.":
            "its key is found in its slot; it was turned as if it stood elsewhere before it was written",
        "A chunk's positions start at 0 again.":
            "then the second chunk would be wrong, and prompts of 20 and of 34 tokens as well",
    },
    elsewhere={
        "Scheduler.schedule": "it cuts 33 into 16, 16 and 1, as it should",
        "TensorParallelAttention.apply_rope": "it turns every token as the position says that it is given",
        "slot_mapping": "every token is in its slot",
        "Rotary.__call__": "its tables are right for the positions that it is given",
    },
    hints=((1, "33 = 2 × 16 + 1. Align along the decode path with max_num_batched_tokens=16, not one forward pass."),
           (1, "One row of q_rope is wrong: that of the prompt's last token."),
           (2, "It is turned as if it stood one place further. What says where a token stands?")),
    false_repairs=({"token_positions": unless_chunk},),
    production="The prefix cache leaves a single token to compute whenever a prompt comes again that is one longer "
               "than its full blocks: the same wrong place, and no chunk in sight.",
    story="A bug that knows one length is a gift: it is arithmetic. 33 and 49 with chunks of 16, 33 and 65 with 32: "
          "the rest of a division is 1. So the run is the decode path with that chunk, and the report has one guilty "
          "row, the prompt's last, at q_rope: a position. As which position was it turned? One too far. Whatever "
          "makes positions takes a single token for a decoding one and puts it behind the prompt. Where else does "
          "one token come alone? Behind a prefix hit, and after a preemption. A token stands behind those that are "
          "computed: no case is special.",
    sources=(("vLLM: with the budget of a step nearly used up, a new request could be given one token, and was then "
              "taken for one that decodes: a Mamba layer read another request's state.",
              "https://github.com/vllm-project/vllm/pull/32118"),
             ("vllm-ascend: a prompt of just one token more than it drafts was taken for a decode step, and accuracy "
              "fell; the merged fix asks whether anything has been computed.",
              "https://github.com/vllm-project/vllm-ascend/pull/6835")),
)
