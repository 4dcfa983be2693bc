"""The table: every mistake that is known, row by row, and the procedures that read something off.

Each subject's families are asked in this order. A name is the museum's, or where the museum has no such fault, one in
its style.
"""

from tplab.align.diagnose import (
    any_point,
    attention,
    cuts,
    ends,
    errors,
    experts,
    mlp,
    norms,
    products,
    rope,
    steps,
    sums,
)

TABLE = (*experts.EXPERTS, *any_point.AT_ANY_POINT, *attention.ATTENTION, *ends.ENDS, *mlp.MLP, *norms.NORMS,
         *sums.RESIDUALS, *rope.ROPE, *sums.REDUCTIONS, *cuts.CUTS, *products.WEIGHTS, *steps.COSTS, *errors.ERRORS)
