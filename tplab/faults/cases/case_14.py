"""A case file; reading on spoils it."""

import torch

from tplab.faults.case_file import Bug, CaseFile, Trial


def apply_rope(self, q, k, cos, sin):
    size = cos.shape[-1]
    if len(q) == 1:  # one new token: the function for small batches
        size //= 2
        cos, sin = (table[..., :size // 2].repeat(1, 1, 2) for table in (cos, sin))
    turned = self.rotate(*(x[..., :size].transpose(0, 1)[None] for x in (q, k)), cos, sin)
    return tuple(torch.cat([x[0].transpose(0, 1), whole[..., size:]], -1) for x, whole in zip(turned, (q, k)))


def my_rope(self, q, k, cos, sin):
    turned = self.rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    return tuple(x[0].transpose(0, 1) for x in turned)  # all of each head, however many tokens there are


def keys_only(self, q, k, cos, sin):
    return apply_rope(self, q, k, cos, sin)[0], my_rope(self, q, k, cos, sin)[1]


def trials(take):
    return (Trial("one prompt, the last ten tokens one by one", [take(34)], 10),
            Trial("another prompt, the last six tokens one by one", [take(21)], 6),
            Trial("three prompts at once, the last tokens one by one", [take(18), take(25), take(11)], 4))


def plain_rope(config, tensor_parallel_size):
    rope = config.hf.rope_parameters.get("rope_type")
    if rope != "default" or config.head_dim % 4 or config.partial_rotary_factor != 1:
        return "half of this model's heads cannot be rotated in the usual way"
    return ""


CASE = CaseFile(
    title="It is right as long as nobody is alone",
    report="Under load our answers are transformers' own. At night, when a single user is left, the first word is "
           "right and the rest is nearly right: fluent, with wrong names. A second user who joins repairs the next "
           "words of both. It is so on one rank and on {ranks}. We compared a forward pass over the whole text, for "
           "one user as well, and every number is right.",
    trials=trials, needs=plain_rope,
    bugs=(Bug("TensorParallelAttention.apply_rope", apply_rope, my_rope, "a special case has another rule",
              "rope_partial"),),
    why={
        "A token that comes alone is rotated by half of each head, where all of it should be.": "",
        "A token that comes alone has another position than one in a batch.":
            "no position explains it: a half of each head is turned rightly, the other not at all",
        "The cache of a single sequence loses its newest key.":
            "what goes into attention is wrong already: q_rope and k_rope of the new token",
        "Cosines and sines of a single position are broadcast over the heads.":
            "then heads would be turned by unlike angles; all of them are turned alike, as far as they are",
    },
    elsewhere={
        "token_positions": "the positions are right, for a token alone as well",
        "Rotary.__call__": "cos and sin are right; what is done with them is not",
        "PagedContext.batches": "the keys that it gets are wrong already",
        "Scheduler.schedule": "who is in a step decides whether it shows, not whether it is right",
    },
    hints=((1, "align cannot see it: ask align_decode, with one prompt, then with two."),
           (2, "In which of its numbers does the new token's q_rope differ from what it should be?"),
           (2, "Which function is told nothing of the batch, and could still find out how large it is?")),
    false_repairs=({"TensorParallelAttention.apply_rope": keys_only},),
    production="A single user's queries still look for what they need at half the angle: the text is wrong exactly "
               "when somebody tries the service alone, and right in every load test.",
    story="A pass over the whole text is right and one token at a time is not, but only alone: so a path that depends "
          "on the number of tokens. One decode run with a single prompt: q and k are right, q_rope and k_rope of "
          "decoded rows are guilty, of prompts they are not. Laid beside the right ones, the first quarter and the "
          "second of a head are turned among themselves, and the second half is as it came. Some models rotate a part "
          "of each head; this one does not, and the function for small batches was written for one that does.",
    sources=(("cascadia rotated parts of heads with the wrong partners; the tests compared the tables and not what was "
              "made with them.", "https://github.com/labscommunity/cascadia/pull/69"),
             ("MLC-LLM's table for long contexts was as long as half a head, where half of the rotated part belongs.",
              "https://github.com/mlc-ai/mlc-llm/pull/3268"),
             ("Two paths, two rules: a reader of SGLang asks whether a window counts the token itself, since prompts "
              "and decoding disagree.", "https://github.com/sgl-project/sglang/issues/34354")),
)
