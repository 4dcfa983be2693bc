"""``strict=True``: what must hold after every step, checked."""

from tplab.cache import CacheError
from tplab.engine.errors import StrictError
from tplab.engine.scheduler import Scheduler
from tplab.engine.step import ModelRunnerOutput, ScheduledRequest, SchedulerOutput


class StrictChecks:
    """Free and used blocks add up; reference counts equal the block tables; every token is written to a slot of its own
    sequence, in a block that no other one reads, into a slot that nothing was written to since the block was handed
    out; all ranks wrote the same slots and drew the same tokens.
    """

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.written: dict[tuple[int, int], set[int]] = {}  # (block, how often it was handed out) → places written

    def after(self, step: SchedulerOutput, outputs: list[ModelRunnerOutput]) -> None:
        """Check the ranks' answers to a step."""
        for rank, output in enumerate(outputs):
            if output.sampled_token_ids != outputs[0].sampled_token_ids:
                drawn = [output.sampled_token_ids for output in outputs]
                raise StrictError(f"step {step.step_number}: rank 0 drew {drawn[0]}, rank {rank} drew {drawn[rank]}",
                                  drawn)
            if output.slots != outputs[0].slots:
                raise StrictError(f"step {step.step_number}: rank 0 wrote slots {outputs[0].slots}, rank {rank} wrote "
                                  f"{output.slots}")
        for request, slots in zip(step.requests, outputs[0].slots or (), strict=True):
            rejected = request.num_draft_tokens - outputs[0].num_accepted.get(request.request_id, 0)
            for slot in slots[:len(slots) - rejected]:
                self._written(step, request, slot)

    def _written(self, step: SchedulerOutput, request: ScheduledRequest, slot: int) -> None:
        block, place = divmod(slot, self.scheduler.pool.block_size)
        where = (f"step {step.step_number}: sequence {request.request_id} wrote slot {slot} (block {block}, place "
                 f"{place})")
        if block not in request.segment.block_ids:
            raise StrictError(f"{where}, but its blocks are {list(request.segment.block_ids)}")
        if self.scheduler.pool.ref_counts[block] > 1:
            raise StrictError(f"{where}, which {self.scheduler.pool.ref_counts[block]} sequences share")
        places = self.written.setdefault((block, self.scheduler.pool.times_allocated[block]), set())
        if place in places:
            raise StrictError(f"{where}, which was written before")
        places.add(place)

    def accounts(self) -> None:
        """Check that the block pool's counts agree with the block tables; called after the step was applied."""
        tables = [s.block_table.block_ids for s in (*self.scheduler.running, *self.scheduler.waiting)]
        try:
            self.scheduler.pool.check(tables)
        except CacheError as error:
            raise StrictError(f"step {self.scheduler.step_number}: {error}") from error
