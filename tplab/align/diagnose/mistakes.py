"""The table: every mistake that is known, row by row, and the procedures that read something off.

Each subject's families are asked in this order. A name is the museum's, or where the museum has no such fault, one in
its style.
"""

from tplab.align.diagnose import attention, errors, experts, norms, products, rope, steps, sums

TABLE = (*experts.EXPERTS, *norms.ANYTHING, *attention.ATTENDING, *norms.ENDS, *products.INSIDE, *norms.NORMING,
         *sums.STREAMS, *rope.TURNING, *sums.REDUCED, *products.CUTS, *products.PRODUCTS, *steps.COSTS, *errors.ERRORS)
