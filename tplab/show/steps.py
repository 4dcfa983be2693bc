"""An engine stepped to the end, with its block tables and pool after each step, for the drawings of the cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tplab.errors import TplabError


class Moment(NamedTuple):
    """Tables and pool after one step."""

    step: int  # its number, from 1
    tables: dict[int, tuple[int, ...]]  # the blocks of each unfinished sequence that has arrived
    status: dict[int, str]  # of each sequence: "running", "waiting" or "preempted"
    computed: dict[int, int]  # tokens of each sequence in the cache
    ref_counts: tuple[int, ...]  # per block, its users
    findable: tuple[bool, ...]  # per block, whether it can be found by its contents
    contents: tuple[tuple[str, ...], ...]  # per block, the text (or id) in each place; empty where none was written
    fresh: frozenset[tuple[int, int]]  # the (block, place) that this step wrote

    def users(self, block: int) -> list[int]:
        """The sequences whose tables have the block."""
        return [number for number, table in self.tables.items() if block in table]

    def leaked(self, block: int) -> bool:
        """Whether a block counts as used and is in no table."""
        return self.ref_counts[block] > 0 and not self.users(block)


@dataclass
class EngineSteps:
    """What :func:`engine_steps` returns."""

    num_blocks: int
    block_size: int
    moments: list[Moment] = field(default_factory=list)  # one per step
    history: list = field(default_factory=list)  # the scheduler's ``StepRecord`` of each step
    outputs: list = field(default_factory=list)  # one ``RequestOutput`` per prompt, in their order
    arrivals: dict[int, int] = field(default_factory=dict)  # per sequence, the steps done when it arrived

    def moment(self, step: int) -> Moment:
        """The moment after ``step`` (from 1)."""
        if not 1 <= step <= len(self.moments):
            raise TplabError(f"there is no step {step!r}; the run has 1 to {len(self.moments)}")
        return self.moments[step - 1]

    @property
    def texts(self) -> list[str]:
        """What was written, per prompt."""
        return [output.outputs[0].text for output in self.outputs]


def engine_steps(llm, prompts: Sequence, sampling_params=None, arrivals: Sequence[int] | None = None) -> EngineSteps:
    """Step an engine until all prompts are finished, and keep tables and pool as they were after every step.

    ``llm`` must have nothing unfinished. ``arrivals``: per prompt, after how many steps it arrives, rising; all at the
    beginning if None. Steps in which there is nothing to do are left out.

        >>> steps = show.engine_steps(llm, [first, second], SamplingParams(max_tokens=8), arrivals=[0, 3])
    """
    arrivals = list(arrivals or [0] * len(prompts))
    if llm.has_unfinished_requests:
        raise TplabError("the engine still has unfinished requests; step it from the beginning")
    if len(arrivals) != len(prompts) or arrivals != sorted(arrivals):
        raise TplabError(f"arrivals must be one number of steps per prompt, rising, not {arrivals}")
    pool, outputs, coming = llm.engine.pool, {}, list(zip(arrivals, prompts))
    run = EngineSteps(pool.num_blocks, pool.block_size)
    contents = [[""] * pool.block_size for _ in range(pool.num_blocks)]
    handed_out = list(pool.times_allocated)
    while coming or llm.has_unfinished_requests:
        while coming and (coming[0][0] <= len(run.moments) or not llm.has_unfinished_requests):
            number = llm.add_request(coming.pop(0)[1], sampling_params)
            run.arrivals[number], outputs[number] = len(run.moments), None
        sequences = [*llm.scheduler.running, *llm.scheduler.waiting]
        before = {s.request_id: list(s.block_table.block_ids) for s in sequences}
        for output in llm.step():
            outputs[output.request_id] = output
        step_record = llm.scheduler.history[-1]
        for block, times in enumerate(pool.times_allocated):
            if times != handed_out[block]:
                handed_out[block], contents[block] = times, [""] * pool.block_size
        fresh = set()
        for s in sequences:
            computed = s.num_computed_tokens
            for position in range(computed - step_record.tokens.get(s.request_id, 0), computed):
                index, place = divmod(position, pool.block_size)
                blocks = s.block_table.block_ids or before[s.request_id]  # after its end it has none
                if index < len(blocks):
                    block = blocks[index]
                    token = s.token_ids[position]
                    contents[block][place] = llm.tokenizer.decode([token]) if llm.tokenizer else str(token)
                    fresh.add((block, place))
        there = sorted((s for s in sequences if s.finish_reason is None), key=lambda s: s.request_id)
        run.history.append(step_record)
        run.moments.append(Moment(
            len(run.moments) + 1, {s.request_id: tuple(s.block_table.block_ids) for s in there},
            {s.request_id: s.status.value for s in there}, {s.request_id: s.num_computed_tokens for s in there},
            tuple(pool.ref_counts), tuple(key is not None for key in pool.keys), tuple(map(tuple, contents)),
            frozenset(fresh)))
    run.outputs = [outputs[number] for number in run.arrivals]
    return run
