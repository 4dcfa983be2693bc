"""For ``pytest --nbval``: kernels start at once, and again if another program has taken one of their ports."""

import nbval.kernel

from course.lab.warm import use_warm_kernels

use_warm_kernels()
_start = nbval.kernel.start_new_kernel


def start(*args, **kwargs):
    """Jupyter chooses a kernel's ports before the kernel binds them; on a busy machine they can be taken by then."""
    for _ in range(2):
        try:
            return _start(*args, **kwargs)
        except RuntimeError as error:
            if "Kernel died before replying" not in str(error):
                raise
    return _start(*args, **kwargs)


nbval.kernel.start_new_kernel = start
