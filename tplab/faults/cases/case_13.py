"""A case file; reading on spoils it."""

import torch

from tplab.faults.case_file import Bug, CaseFile, Trial


def causal_mask(positions, keys, window=24):
    behind = positions[..., None] - torch.arange(keys, device=positions.device)
    return ((behind < 0) | (behind >= window))[:, None]


def my_mask(positions, keys):
    behind = positions[..., None] - torch.arange(keys, device=positions.device)
    return (behind < 0)[:, None]  # this model has no window: whatever came before is seen


def wider(positions, keys, window=64):
    return causal_mask(positions, keys, window)


def trials(take):
    return (Trial("a prompt of 60 tokens, of which eight come one by one", [take(60)], 8),
            Trial("a prompt of 110 tokens, read at once", [take(110)]),
            Trial("two prompts at once, of 12 and 40 tokens", [take(12), take(40)]))


def no_window(config, tensor_parallel_size):
    return "this model has sliding windows of its own" if any(config.windows) else ""


CASE = CaseFile(
    title="Nothing is wrong until the story gets long",
    report="Our smoke tests pass: twenty tokens in, ten out, the text is transformers' to the letter. In long chats "
           "the model forgets whom it talks about. It is the same on one rank and on {ranks}, with the prefix cache "
           "and without, for prompts and for what is generated. It began when a second model family went live, and "
           "this model's own code was not touched.",
    trials=trials, needs=no_window,
    bugs=(Bug("causal_mask", causal_mask, my_mask, "a setting of one model is taken for all", "sliding_window"),),
    why={
        "Whoever calls the mask without a window gets one by default, and this model has none.": "",
        "Keys that lie far back are overwritten in the cache.":
            "a prompt that is read at once is wrong, too, and reads no cache",
        "Far positions are rotated by angles of too few digits.":
            "q_rope and k_rope are right at every position; attn is the first guilty point",
        "The softmax underflows for keys that are far away.":
            "then each key's share would fade; here everything from one distance on has none at all",
    },
    elsewhere={
        "PagedContext.batches": "it reads all keys of a sequence; which of them are hidden is decided elsewhere",
        "TensorParallelAttention.attend_all": "it takes the mask as it is given, and this layer has no window",
        "mask_scores": "it hides what the mask says, and nothing else",
        "Rotary.__call__": "q_rope and k_rope are right, far back as well",
    },
    hints=((1, "Up to which position are all rows right? Count the tokens that the first wrong one should see."),
           (2, "Change the text's first token: which rows of attn of the first layer notice?"),
           (2, "Look at the defaults of the function that says which keys a query may see.")),
    false_repairs=({"causal_mask": wider},),
    production="A larger default moves the length at which it begins; the users with the longest texts, who need it "
               "most, are the ones who still have it.",
    story="Short prompts are right and long ones are not, on any number of ranks: so no sharding, and a matter of "
          "distance. One run on a long prompt: q, k, v and both rotations are right, attn is guilty, and only from the "
          "25th row on. What attention adds to its inputs is scores, mask and softmax. A first token that is changed "
          "moves rows 0 to 23 of the first layer's attn and no later one: those do not see it. That is a window of 24, "
          "and the checkpoint's config has none. The mask's function has got a parameter with a default, for another "
          "family; everybody who does not name it gets that.",
    sources=(("transformers applied Qwen2's sliding_window although use_sliding_window was false: the first 4,096 rows "
              "of logits agreed, and none behind them.", "https://github.com/huggingface/transformers/issues/38002"),
             ("lmdeploy did not look at use_sliding_window either.", "https://github.com/InternLM/lmdeploy/pull/3614"),
             ("LightLLM took Qwen2's windows out again.", "https://github.com/ModelTC/LightLLM/pull/469")),
)
