"""The rounding floors: how far two correct computations of the same thing may stand apart.

A point is *inside the floor* when ``max |tplab - HF| <= floor * max |HF|`` at that point. The numbers are upper bounds
of measurements on correct models; ``LOGITS`` bounds the logits absolutely as well. Worst of all points
(fable, SmolLM2-135M, and 25 random checkpoints in the head layouts of real models; 1 to 4 ranks; up to 60 tokens):

========  ===================  ================  ==================  =========  ================
dtype     random, 2-3 layers   fable, 6 layers   SmolLM2, 30 layers  the floor  logits, absolute
========  ===================  ================  ==================  =========  ================
float32   3.0e-6               below             5.7e-6              2e-5       1.0e-4
float64   4.9e-15              1.8e-15           1.1e-14             2e-7       3.9e-14
bfloat16  8.6e-2               below             1.8e-1              4e-1       3.2
========  ===================  ================  ==================  =========  ================

In float32, SmolLM2's logits are 5e-5 to 8e-5 from float64 in Hugging Face's own run: so 1e-4 or 5e-6 of the largest.
In float64, one value in a hundred million falls on the other side of a float32 cast's boundary; :func:`diagnose` knows
that by its size. Along the decode path a softmax over another length rounds differently, up to 1e-5: ``DECODE``.

Where each module is judged from its own recorded inputs, errors do not add up: ``LOCAL`` is always allowed, each row
relative to its own largest value (the worst of 456 healthy runs: float32 3.5e-6, float64 2.2e-15, bfloat16 3.4e-2,
float16 3.8e-3). Beyond it, the module is computed once more in the run's dtype as Hugging Face would, from the same
inputs; up to ``TIMES`` the rounding found there is rounding too. In bfloat16 and float16 that decides, and each point's
floor is ``TIMES`` how far Hugging Face's own run in that dtype stands from its float32 one there.
"""

import torch

RELATIVE = {torch.float32: 2e-5, torch.float64: 2e-7, torch.bfloat16: 4e-1, torch.float16: 1e-1}
DECODE = RELATIVE | {torch.float64: 1e-5}
LOGITS = {torch.float32: 1e-4, torch.float64: 1e-7, torch.bfloat16: float("inf"), torch.float16: float("inf")}
LOGITS_RELATIVE = {torch.float32: 5e-6, torch.float64: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}
LOCAL = {torch.float32: 2e-5, torch.float64: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
TIMES = 4.0
SHORT = (torch.bfloat16, torch.float16)  # dtypes in which thirty layers' rounding and a bug look alike from outside


def relative_floor(dtype: torch.dtype, decode: bool) -> float:
    """The floor of a run, relative to the reference's scale at each point."""
    return (DECODE if decode else RELATIVE)[dtype]


def bound(name: str, scale: float, dtype: torch.dtype, decode: bool = False) -> float:
    """The largest difference at a trace point that rounding explains; ``scale`` is the reference's largest value."""
    relative = relative_floor(dtype, decode) * scale
    if name == "logits" and not decode:
        return min(relative, max(LOGITS[dtype], LOGITS_RELATIVE[dtype] * scale))
    return relative

