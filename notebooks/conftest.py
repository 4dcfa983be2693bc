"""For ``pytest --nbval``: kernels start at once, and again if another program has taken one of their ports."""

from functools import partial

import nbval.kernel

from course.lab.warm import started_again, use_warm_kernels

use_warm_kernels()
nbval.kernel.start_new_kernel = partial(started_again, nbval.kernel.start_new_kernel)
