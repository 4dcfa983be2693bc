"""A case file. It holds the solution: do not read on if you want to solve the case."""

from course.cases.case_file import Bug, CaseFile, Trial, edited
from tplab import patch
from tplab.align import align
from tplab.align.run import check_prompts
from tplab.faults.rope import ropes

PLACE = "Rotary.__init__"
# The frequencies stay in float32, whatever the model's dtype.
__init__ = edited(PLACE, "self.make(config) -> self.make(config).to(torch.bfloat16)")


def back(self, config):
    __init__(self, config)
    self.embedding = self.embedding.float()


def trials(take):
    return (Trial("a prompt of 190 tokens", [take(190)]),
            Trial("two prompts at once, of 31 and 100 tokens", [take(31), take(100)]),
            Trial("a prompt, the last five tokens one by one", [take(60)], 5))


def fixed(config, tensor_parallel_size):
    anew = {rope["rope_type"] for rope in ropes(config.hf)} - {"default", "linear", "llama3", "yarn"}
    return f"this model's RoPE ({', '.join(sorted(anew))}) is made anew for each text" if anew else ""


def user_output(ckpt, ranks, prompts):
    text = check_prompts(ckpt, ["One warm morning she went to the market. " * 40])[0]
    lines = []
    for count in (12, 48, 190):
        with patch.applied(*CASE.patches):
            report = align(ckpt, text[:count], tensor_parallel_size=ranks, logical=True)
        off = [point.relative for point in report.points if point.name.endswith(".q_rope")]
        lines.append(f"{count} tokens: queries off by {max(off):.1g}")
    return "The user's own numbers, against transformers: " + "; ".join(lines) + " of their size."


CASE = CaseFile(
    title="Scores drop with the length of the context",
    report="Our retrieval evaluation loses one point at short contexts and fifteen at long ones, against the same "
           "checkpoint in transformers. The number of ranks does not matter: one, two and four give the same. Since "
           "the last release, modules are cast to one dtype in one place; we run float32 weights here, and the "
           "scores drop all the same.",
    trials=trials, needs=fixed, user_output=user_output,
    bugs=(Bug(PLACE, __init__, "numbers are rounded to too few digits", "rope_dtype"),),
    why={
        "The frequencies of the rotation are rounded to bfloat16, and each position multiplies their error.": "",
        "Theta differs from the checkpoint's, so far tokens look near.":
            "no theta fits: the error differs from pair to pair without an order, and the first pair is right",
        "Positions beyond 256 cannot be distinguished in bfloat16.":
            "here the positions are whole numbers below 256, which bfloat16 holds exactly, and the result is still "
            "wrong",
        "q and k are cast to bfloat16 before they are rotated.":
            "then q_rope would be wrong at position 0, too; there it is right",
    },
    elsewhere={
        "TensorParallelAttention.apply_rope": "it rotates as its tables say",
        "Rotary.__call__": "it returns what the embedding computes, and the embedding is already wrong",
        "token_positions": "the positions are right",
        "attend": "attention is right, given q_rope and k_rope",
    },
    hints=("report.guilty begins with layers.0.q_rope: q is right before the rotation.",
           "At position 0 there is no error; at position p it is about p times that at position 1. So an angle is "
           "wrong.",
           "How many digits has inv_freq of the module that makes cos and sin?"),
    false_repairs=({PLACE: back},),
)
