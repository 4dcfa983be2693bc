"""A case file. It holds the solution: do not read on if you want to solve the case."""

import torch

from course.cases.case_file import Bug, CaseFile, Trial


def causal_mask(positions, keys, window=24):
    behind = positions[..., None] - torch.arange(keys, device=positions.device)
    return ((behind < 0) | (behind >= window))[:, None]


def wider(positions, keys, window=256):
    return causal_mask(positions, keys, window)


def trials(take):
    return (Trial("a prompt of 60 tokens, the last eight one by one", [take(60)], 8),
            Trial("a prompt of 110 tokens, read at once", [take(110)]),
            Trial("two prompts at once, of 12 and 40 tokens", [take(12), take(40)]))


def no_window(config, tensor_parallel_size):
    return "this model has sliding windows of its own" if any(config.windows) else ""


CASE = CaseFile(
    title="Only long stories are wrong",
    report="Our smoke tests pass: twenty tokens in, ten out, and the text is the same as with transformers. In long "
           "chats the model confuses the people it talks about. It is the same on one rank and on {ranks}, with the "
           "prefix cache and without, for prompts and for generated text. It began when a second model family went "
           "live; this model's own code was not changed.",
    trials=trials, needs=no_window,
    bugs=(Bug("causal_mask", causal_mask, "a setting of one model is used for all models", "sliding_window"),),
    why={
        "A call of the mask without a window gets a window by default, and this model has none.": "",
        "Keys that are far back are overwritten in the cache.":
            "a prompt that is read at once is wrong, too, and it reads no cache",
        "Far positions are rotated by angles of too few digits.":
            "q_rope and k_rope are right at every position; attn is the first guilty point",
        "The softmax underflows for keys that are far away.":
            "then the weights would get smaller gradually; here all keys from one distance on have a weight of exactly "
            "0",
    },
    elsewhere={
        "PagedContext.batches": "it reads all keys of a sequence; another function decides which of them are hidden",
        "TensorParallelAttention.attend_all": "it uses the mask that it gets, and this layer has no window",
        "mask_scores": "it hides what the mask says, and nothing else",
        "Rotary.__call__": "q_rope and k_rope are right, also for early tokens",
    },
    hints=("Up to which position are all rows right? Count the tokens that the first wrong row should see.",
           "Change the text's first token: which rows of the first layer's attn change?",
           "Look at the defaults of the function that says which keys a query can see."),
    false_repairs=({"causal_mask": wider},),
)
