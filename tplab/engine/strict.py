"""``strict=True``: what must hold after every step, checked."""

from tplab.cache import CacheError
from tplab.engine.errors import StrictError
from tplab.engine.scheduler import Scheduler
from tplab.engine.step import StepInput, StepOutput


class StrictChecks:
    """The invariants of one engine.

    Free and used blocks add up; reference counts equal the block tables; every token is written to a slot of its own
    sequence, in a block that nobody else reads, into a slot that nothing was written to since the block was handed
    out; all ranks wrote the same slots and drew the same tokens.
    """

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.written: dict[tuple[int, int], set[int]] = {}  # (block, how often it was handed out) → places written

    def forget(self) -> None:
        """The caches were lost."""
        self.written.clear()

    def after(self, step: StepInput, outputs: list[StepOutput]) -> None:
        """All ranks have answered."""
        for rank, output in enumerate(outputs):
            if output.token_ids != outputs[0].token_ids:
                raise StrictError(f"step {step.number}: rank 0 drew {outputs[0].token_ids}, rank {rank} drew "
                                  f"{output.token_ids}", [output.token_ids for output in outputs])
            if output.slots != outputs[0].slots:
                raise StrictError(f"step {step.number}: rank 0 wrote slots {outputs[0].slots}, rank {rank} wrote "
                                  f"{output.slots}")
        for sequence, slots in zip(step.sequences, outputs[0].slots, strict=True):
            for slot in slots:
                self._written(step, sequence, slot)

    def _written(self, step: StepInput, sequence, slot: int) -> None:
        block, place = divmod(slot, self.scheduler.pool.block_size)
        who = f"step {step.number}: sequence {sequence.number} wrote slot {slot} (block {block}, place {place})"
        if block not in sequence.segment.block_ids:
            raise StrictError(f"{who}, but its blocks are {list(sequence.segment.block_ids)}")
        if self.scheduler.pool.ref_counts[block] > 1:
            raise StrictError(f"{who}, which {self.scheduler.pool.ref_counts[block]} sequences share")
        places = self.written.setdefault((block, self.scheduler.pool.times_allocated[block]), set())
        if place in places:
            raise StrictError(f"{who}, which was written before")
        places.add(place)

    def accounts(self) -> None:
        """The step has been taken in: do the block pool's accounts agree with the tables?"""
        tables = [s.table.blocks for s in (*self.scheduler.running, *self.scheduler.waiting)]
        try:
            self.scheduler.pool.check(tables)
        except CacheError as error:
            raise StrictError(f"step {self.scheduler.step_number}: {error}") from error
