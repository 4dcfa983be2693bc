"""The rounding floors: how far two correct computations of the same thing may stand apart.

A point is *inside the floor* when ``max |tplab - HF| <= floor * max |HF|`` at that point. The numbers are upper bounds
of what was measured on correct models, not wishes; ``LOGITS`` bounds the logits absolutely as well.

Worst of all points (fable, SmolLM2-135M, and 25 random checkpoints in the head layouts of real models and with every
RoPE; 1 to 4 ranks; up to 60 tokens):

========  ===================  ================  ==================  =========  ================
dtype     random, 2-3 layers   fable, 6 layers   SmolLM2, 30 layers  the floor  logits, absolute
========  ===================  ================  ==================  =========  ================
float32   3.0e-6               below             5.7e-6              2e-5       1.0e-4
float64   4.9e-15              1.8e-15           1.1e-14             2e-7       3.9e-14
bfloat16  8.6e-2               below             1.8e-1              4e-1       3.2
========  ===================  ================  ==================  =========  ================

In float32, SmolLM2's logits are 5e-5 to 8e-5 from the float64 result in Hugging Face's own run, and as far on another
side in one that adds partial sums up; it happens at the first token, whose activations are a thousand times those of
the others. So the logits' bound is 1e-4 or 5e-6 of the largest logit, whichever is more.

In float64 what is left are the last bits of matrix products of other shapes, and the float32 casts inside norms and
softmax wipe them out again at every layer. Once in about a hundred million values, one of them falls on the other
side of a float32 rounding boundary; made to happen on purpose, that left 2e-7 to 1e-6 of the scale of later points
and 3e-7 to 1e-5 on logits. It is outside this floor, and :func:`tplab.align.diagnose` knows it by its size.

Along the decode path the same row of scores is summed up at another length (padded to the batch, where Hugging Face's
single pass pads to the prompt), and a float32 softmax over another length rounds differently, in float64 models too:
4e-7 was measured, and up to 1e-5 on logits where it crosses a boundary. Hence ``DECODE``.

In the local frame, where each module is judged from its own recorded inputs, nothing adds up: ``LOCAL`` bounds one
module's rounding, each row relative to its own largest value. Where more is left, the module is computed once more in
the run's dtype as Hugging Face would, from the same inputs; up to ``TIMES`` the rounding found there is rounding too.

========  =====================  ==============  ===============================================================
dtype     worst of one module    always allowed  otherwise
========  =====================  ==============  ===============================================================
float32   1.4e-6; SmolLM2 3.5e-6 2e-5            4 × the same module's rounding in float32, on the same inputs
float64   2.2e-15                1e-6            4 × …; softmax over another length can cross a float32 boundary
bfloat16  3.4e-2 (attention)     8e-3            4 × …; healthy runs came to 0.25 of that, which is 1 ×
float16   3.8e-3 (attention)     1e-3            4 × …
========  =====================  ==============  ===============================================================

(42 random checkpoints and fable, 1 to 4 ranks, 456 runs: no module was called guilty.)

In bfloat16 and float16 that decides, and the bounds above are caps: each point's floor is ``TIMES`` how far Hugging
Face's own run in that dtype stands from its float32 one there.
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


def inside(name: str, max_abs: float, scale: float, dtype: torch.dtype, decode: bool = False) -> bool:
    """Whether a difference at a trace point is explained by rounding."""
    return max_abs <= bound(name, scale, dtype, decode)
