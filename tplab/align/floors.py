"""The rounding floors: how far two correct computations of the same thing may stand apart.

A point is *inside the floor* when ``max |tplab - HF| <= floor * max |HF|`` at that point: the difference is measured
against the reference's own scale. The numbers are upper bounds of what was measured on correct models, not wishes;
``LOGITS`` bounds the logits absolutely as well.

Worst of all points (fable, SmolLM2-135M, and 25 random checkpoints in the head layouts of real models and with every
RoPE; 1 to 4 ranks; up to 60 tokens):

========  ==============  =================  ==================  ==========  ================
dtype     random, 3 lay.  fable, 8 layers    SmolLM2, 30 layers  the floor   logits, absolute
========  ==============  =================  ==================  ==========  ================
float32   3.0e-6          inside the others  5.7e-6              2e-5        1.0e-4
float64   4.9e-15         1.8e-15            1.1e-14             2e-7        3.9e-14
bfloat16  8.6e-2          inside the others  1.8e-1              4e-1        3.2
========  ==============  =================  ==================  ==========  ================

In float32 on one rank, SmolLM2 agrees bit for bit. Its 1e-4 on the logits is Hugging Face's own distance from the
float64 result (5e-5 to 8e-5) met by as much of ours, so a long prompt can touch the bound of 1e-4 by rounding alone.

In float64 what is left are the last bits of matrix products of other shapes, and the float32 casts inside norms and
softmax wipe them out again at every layer. Once in about a hundred million values, one of them falls on the other
side of a float32 rounding boundary; made to happen on purpose, that left 2e-7 to 1e-6 of the scale of later points
and 3e-7 to 1e-5 on logits. It is outside this floor, and :func:`tplab.align.diagnose` knows it by its size.
"""

import torch

RELATIVE = {torch.float32: 2e-5, torch.float64: 2e-7, torch.bfloat16: 4e-1}
LOGITS = {torch.float32: 1e-4, torch.float64: 1e-7, torch.bfloat16: float("inf")}


def inside(name: str, max_abs: float, scale: float, dtype: torch.dtype) -> bool:
    """Whether a difference at a trace point is explained by rounding."""
    bound = RELATIVE[dtype] * scale
    return max_abs <= (min(bound, LOGITS[dtype]) if name == "logits" else bound)
