"""A case file; reading on spoils it."""

import torch

from tplab import patch
from tplab.align import align
from tplab.align.run import check_prompts
from tplab.faults.case_file import Bug, CaseFile, Trial
from tplab.model.rope import rotary_class


def __init__(self, config):
    self.config = config
    self.make = rotary_class(config.model_type)
    self.embedding = self.make(config).to(torch.bfloat16)
    self.per_sequence = "dynamic" in self.embedding.rope_type or self.embedding.rope_type == "longrope"


def my_init(self, config):
    self.config = config
    self.make = rotary_class(config.model_type)
    self.embedding = self.make(config)  # its frequencies stay in float32, whatever the model's dtype
    self.per_sequence = "dynamic" in self.embedding.rope_type or self.embedding.rope_type == "longrope"


def back(self, config):
    __init__(self, config)
    self.embedding = self.embedding.float()


def trials(take):
    return (Trial("a prompt of 190 tokens", [take(190)]),
            Trial("two prompts at once, of 31 and 100 tokens", [take(31), take(100)]),
            Trial("a prompt of which five tokens come one by one", [take(60)], 5))


def fixed(config, tensor_parallel_size):
    kind = config.hf.rope_parameters["rope_type"]
    if kind in ("default", "linear", "llama3", "yarn"):
        return ""
    return f"this model's RoPE ({kind}) is made anew for each text"


def user_output(ckpt, ranks):
    text = check_prompts(ckpt, ["One warm morning she went to the market. " * 40])[0]
    said = []
    for count in (12, 48, 190):
        with patch.applied(*CASE.patches):
            report = align(ckpt, text[:count], tensor_parallel_size=ranks, logical=True)
        off = [point.relative for point in report.points if point.name.endswith(".q_rope")]
        said.append(f"{count} tokens: queries off by {max(off):.0e}")
    return "The user's own numbers, against transformers: " + "; ".join(said) + " of their size."


CASE = CaseFile(
    title="Scores drop with the length of the context",
    report="Our retrieval evaluation loses a point at short contexts and fifteen at long ones, against the same "
           "checkpoint in transformers. It is no matter of ranks: one, two and four give the same. Since the last "
           "release modules are cast to the model's dtype in one place; we run float32 weights here, and it happens "
           "all the same.",
    trials=trials, needs=fixed, user_output=user_output, below_bfloat16=True,
    bugs=(Bug("Rotary.__init__", __init__, my_init, "too few digits where they matter", "rope_dtype"),),
    why={
        "The frequencies of the rotation are rounded to bfloat16, and each position multiplies their error.": "",
        "Theta is another one than the checkpoint's, so far tokens look near.":
            "no theta fits: the error differs from pair to pair without order, and the first pair is right",
        "Positions beyond 256 cannot be told apart in bfloat16.":
            "the positions are whole numbers below 256 here, which bfloat16 holds exactly, and it is wrong all the "
            "same",
        "q and k are cast to bfloat16 before they are rotated.":
            "then q_rope would be wrong at position 0, too; there it is right",
    },
    elsewhere={
        "TensorParallelAttention.apply_rope": "it rotates as the tables say that it is given",
        "Rotary.__call__": "it hands out what the embedding computes; the embedding is wrong already",
        "token_positions": "the positions are right",
        "attend": "attention is right, given q_rope and k_rope",
    },
    hints=((1, "report.guilty begins with layers.0.q_rope: q is right before it is turned."),
           (2, "At position 0 the error is none, at position p about p times that at 1: an angle's, not a number's."),
           (2, "inv_freq of the module that makes cos and sin: how many digits has it?")),
    false_repairs=({"Rotary.__init__": back},),
    production="Casting back changes the dtype that a log shows and not one digit: what bfloat16 has dropped is gone, "
               "and the long contexts stay fifteen points down.",
    story="Worse with length is a position's mistake or a cache's; a plain forward pass has no cache, so align "
          "first, with a long prompt. q is right and q_rope is not, in all layers, by the same factor. Where does it "
          "begin? At position 0 nothing, at 1 a little, at 100 a hundred times that: the angle is wrong by a share, "
          "so a frequency is. A wrong theta would be wrong in an order, from pair to pair; this is not, and no pair "
          "is off by more than one part in 256: that is bfloat16's rounding. The rotary module is cast with the rest "
          "of the model; .float() behind it brings zeros back, not digits. The cast goes.",
    sources=(("NeMo Automodel: a cast of the whole model rounded the frequency buffer, and float() afterwards could "
              "not bring the digits back; found because a reloaded checkpoint differed from transformers, and merged "
              "for seven families of models.", "https://github.com/NVIDIA-NeMo/Automodel/pull/2549"),
             ("transformers: for Llama and Gemma the angles had been computed in bfloat16 under autocast; since then "
              "they are forced to float32.", "https://github.com/huggingface/transformers/pull/29285")),
)
