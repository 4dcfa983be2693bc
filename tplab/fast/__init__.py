"""What makes a loaded model quick, from outside: whole steps as compiled code, with the reference's numbers.

The rooms below are plain PyTorch and do not depend on this one. numba is imported on the ranks only.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module

import torch

from tplab.engine.runner import ModelRunner
from tplab.patch import in_force

SWITCH = "TPLAB_FAST"  # "0" in the environment: the reference computes everything


def is_off() -> bool:
    """Whether the environment turns the fast path off."""
    return os.environ.get(SWITCH) == "0"


def why_not(config, dtype: torch.dtype) -> str | None:
    """Why the reference computes a model of this :class:`tplab.checkpoint.ModelConfig`; None where this room does."""
    if is_off():
        return f"{SWITCH}=0 turns it off"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"only the reference computes {str(dtype).removeprefix('torch.')}"
    if config.traits:
        return f"it does not support {config.traits[0]}"
    if config.hidden_act != "silu":
        return f"it does not support hidden_act {config.hidden_act!r}"
    return None


def to_its_end(function: Callable, *arguments):
    """Call ``function`` in a thread of its own, to its end even where an interrupt stops this rank meanwhile.

    numba must not be stopped half way, neither while it is imported nor while it compiles: the next load on this rank
    would fail inside it, or crash. Signals are handled by a process's main thread, so another thread is safe.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()


def _is_compiled(dtype: str) -> bool:
    return to_its_end(import_module, "tplab.fast.compiled").is_compiled(dtype)


@contextmanager
def announced(pool, ckpt, plan, config) -> Iterator[None]:
    """A load of this model on the ranks of a pool: says so where they must compile first, and how long it took.

    Not under nbval, whose stored text it is no part of (pytest sets the variable that ipykernel looks at, too).
    """
    dtype = str(config.dtype)
    if ("PYTEST_CURRENT_TEST" in os.environ or in_force() or config.batch_invariant or not takes_over(ckpt, config)
            or all(pool.run(_is_compiled, dtype, timeout=600))):
        yield
        return
    what = f"{dtype.removeprefix('torch.')} code"
    print(f"compiling {what} for this processor, once …", end=" ", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    try:
        yield
    finally:
        print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)


def takes_over(ckpt, config) -> bool:
    """Whether a model on a pool's ranks takes the fast path until somebody looks."""
    return not (config.enforce_eager or config.strict or why_not(ckpt.config, config.dtype))


def make_runner(ckpt, plan, config) -> ModelRunner:
    """On a rank: a loaded runner, accelerated where that is possible and ``config`` allows it."""
    runner = ModelRunner(ckpt, plan, config)
    if takes_over(ckpt, config):
        to_its_end(import_module, "tplab.fast.accelerate").accelerate(runner)
    return runner
