"""The engine on ranks that torchrun has made, also across machines.

Every process runs the same command and loads its own part. Rank 0 has the scheduler; before each step it sends the step
to the other ranks, as JSON in a tensor, and all ranks compute it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tplab.engine.runner import ModelRunner, execute_model, execute_steps
from tplab.engine.step import ModelRunnerOutput, SchedulerOutput
from tplab.llm.executor import load_for
from tplab.llm.llm import LLM
from tplab.patch import applied
from tplab.ranks import broadcast, join_torchrun, rank, world_size
from tplab.ranks.torchrun import under_torchrun


class TorchrunExecutor:
    """One process's side of an engine: rank 0 leads by :meth:`execute_model`, the others :meth:`follow`."""

    key = "engine"

    def __init__(self, size: int):
        self.size = size

    def load(self, *arguments) -> list[dict]:
        """Make this rank's :class:`ModelRunner`; what it costs."""
        return [load_for(ModelRunner, self.key, [], *arguments)]

    def loaded(self) -> bool:
        """True: when torchrun loses one process, it ends all others."""
        return True

    def execute_model(self, scheduler_output: SchedulerOutput) -> list[ModelRunnerOutput]:
        """On rank 0: one step on every rank; this rank's answer."""
        _send(scheduler_output.to_json())
        return [execute_model(self.key, scheduler_output)]

    def follow(self) -> None:
        """On the other ranks: compute the steps that rank 0 sends, until it sends an empty message."""
        while data := _receive():
            execute_steps(self.key, data)

    def close(self) -> None:
        """On rank 0: send the other ranks the message that ends :meth:`follow`."""
        if rank() == 0:
            _send(b"")


def _send(data: bytes) -> None:
    broadcast(torch.tensor([len(data)]))
    if data:
        broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _receive() -> bytes:
    length = int(broadcast(torch.zeros(1, dtype=torch.int64)))
    return broadcast(torch.zeros(length, dtype=torch.uint8)).numpy().tobytes() if length else b""


@contextmanager
def open_llm(model: str, tensor_parallel_size: int, dtype: str = "float32", **options) -> Iterator[LLM | None]:
    """An :class:`LLM` on a pool of its own; under torchrun, on all of torchrun's ranks.

    Under torchrun, ranks other than 0 get None, after they have computed all steps.
    """
    if not under_torchrun():
        with LLM(model, tensor_parallel_size, dtype, **options) as llm:
            yield llm
        return
    join_torchrun()
    llm = LLM(model, world_size(), dtype, executor=TorchrunExecutor, **options)
    if rank() == 0:
        with llm:
            yield llm
    else:
        with applied(*llm.patches):
            llm.engine.executor.follow()
        yield None
