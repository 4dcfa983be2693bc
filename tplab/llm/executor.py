"""How a step reaches the ranks: the processes of a pool, or logical ranks in this process (or ``torchrun.py``'s)."""

import itertools
import os
import weakref
from contextlib import suppress

from tplab import fast, invariant
from tplab.engine.runner import ModelRunner, drop_runners, execute_model, execute_steps, load_runner
from tplab.engine.step import ModelRunnerOutput, SchedulerOutput
from tplab.pool import RankPool, shared_pool
from tplab.ranks import logical_ranks, rank, state

_numbers = itertools.count()
# Per pool, the keys of engines that were thrown away and that its ranks still hold.
_garbage: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def load_for(make, key: str, forget: list[str], ckpt, plan, config) -> dict:
    """On a rank: :func:`tplab.engine.runner.load_runner` by ``make``, or for a batch-invariant runner."""
    return load_runner(key, forget, ckpt, plan, config, make=invariant.make_runner if config.batch_invariant else make)


# What an engine asks of its executor: ``load(*arguments)`` makes a ModelRunner from these on every rank and returns the
# costs of each; ``loaded()`` says whether every rank has it; ``execute_model`` computes one step and returns the ranks'
# answers, in rank order; ``close()`` forgets it on every rank.


class PoolExecutor:
    """An engine on the processes of a :class:`tplab.pool.RankPool`; on the shared pool if none is given.

    Several engines can share one pool, each under its own key. The weights of an engine that was dropped without being
    closed are freed on the ranks when the next engine loads.
    """

    def __init__(self, size: int, pool: RankPool | None = None):
        self.size, self._pool = size, pool
        self.key = f"engine {os.getpid()}-{next(_numbers)}"
        self._loaded_on: RankPool | None = None
        self._pids: list[int | None] = []
        self._finalizer: weakref.finalize | None = None

    @property
    def pool(self) -> RankPool:
        """The ranks; a shared pool that was closed is made again."""
        return self._pool or shared_pool(self.size)

    def load(self, *arguments) -> list[dict]:
        pool = self.pool
        garbage = _garbage.setdefault(pool, [])
        if self._finalizer is not None:
            self._finalizer.detach()
        # Before the load, because one that fails on one rank leaves weights on the others.
        self._loaded_on, self._finalizer = pool, weakref.finalize(self, garbage.append, self.key)
        forget = list(garbage)
        with fast.announced(pool, *arguments):
            costs = pool.run(load_for, fast.make_runner, self.key, forget, *arguments, timeout=LOAD_TIMEOUT)
        self._pids = pool.pids
        for key in forget:
            with suppress(ValueError):  # another thread's load has removed it
                garbage.remove(key)
        return costs

    def loaded(self) -> bool:
        """Whether every rank still has it: a rank that was restarted does not. The ranks need not be asked."""
        return self.pool.pids == self._pids and self.pool is self._loaded_on

    def execute_model(self, scheduler_output: SchedulerOutput) -> list[ModelRunnerOutput]:
        return self.execute_steps(scheduler_output)[0]

    def execute_steps(self, scheduler_output: SchedulerOutput) -> list[list[ModelRunnerOutput]]:
        """A step and its lookahead steps in one call; of each the ranks' answers."""
        answers = self.pool.run(execute_steps, self.key, scheduler_output.to_json())
        return [list(outputs) for outputs in zip(*answers, strict=True)]

    def close(self) -> None:
        """Free it on every rank. The pool stays open; nothing is done if its ranks have ended."""
        if self._finalizer is not None and self._loaded_on is not None and not self._loaded_on.closed:
            self._loaded_on.run(drop_runners, [self.key])
            self._finalizer.detach()


LOAD_TIMEOUT = 600.0  # seconds; a model of several GB from a cold disk takes minutes


class LogicalExecutor:
    """An engine on threads of this process, for wide sweeps: same collectives, same results, no speed."""

    key = "engine"

    def __init__(self, size: int):
        self.size = size
        self.states: list[dict] = [{} for _ in range(size)]

    def run(self, fn, *args) -> list:
        """``fn`` on every logical rank. Logical ranks start with an empty ``state``, so each rank's is kept here."""
        def on_rank():
            state.update(self.states[rank()])
            try:
                return fn(*args)
            finally:
                self.states[rank()] = dict(state)

        return logical_ranks(self.size, on_rank)

    def load(self, *arguments) -> list[dict]:
        return self.run(load_for, ModelRunner, self.key, [], *arguments)

    def loaded(self) -> bool:
        return all(self.key in state for state in self.states)

    def execute_model(self, scheduler_output: SchedulerOutput) -> list[ModelRunnerOutput]:
        return self.run(execute_model, self.key, scheduler_output)

    def close(self) -> None:
        self.states = [{} for _ in range(self.size)]
