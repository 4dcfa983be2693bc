"""``Scheduler``: which tokens of which sequences are computed in the next step.

Continuous batching (Orca, OSDI 2022) with chunked prefill (Sarathi-Serve, arXiv:2403.02310), after vLLM's V1
scheduler: there is no prefill phase and no decode phase, only sequences whose computed tokens catch up with their
tokens, under one budget per step. It runs in the parent process and touches no tensor.
"""

from collections import deque
from typing import NamedTuple

from tplab.cache import BlockPool, blocks_needed
from tplab.engine.config import EngineConfig
from tplab.engine.draft import propose
from tplab.engine.sequence import Sequence, Status
from tplab.engine.step import ModelRunnerOutput, SchedulerOutput, scheduled_request


class StepRecord(NamedTuple):
    """What one step did, for tables and timelines.

    Attributes:
        tokens: ``{request_id: new tokens computed}``.
        prefill: those of them that were still reading their prompt (or reading it again).
        preempted, admitted: sequences that lost or got their place.
    """

    step_number: int
    tokens: dict[int, int]
    prefill: tuple[int, ...]
    preempted: tuple[int, ...]
    admitted: tuple[int, ...]
    used_blocks: int


def computed_after_prefix_hit(blocks: int, block_size: int) -> int:
    """How many tokens need not be computed when ``blocks`` blocks of the prompt were found in the cache."""
    return blocks * block_size


def tokens_to_compute(num_tokens: int, num_computed_tokens: int) -> int:
    """How many tokens of a sequence have no keys and values yet."""
    return num_tokens - num_computed_tokens


def free(sequence: Sequence) -> None:
    """Give a sequence's blocks back: it has finished, was aborted, or is preempted."""
    sequence.block_table.free()


class Scheduler:
    """Two queues and a block pool.

    ``running`` stands in order of admission; the last one is preempted first when blocks run out, and goes to the
    head of ``waiting``. Its tokens are kept, and computed again when there is room (recompute, not swap).
    """

    def __init__(self, config: EngineConfig):
        self.max_num_seqs, self.max_num_batched_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self.num_speculative_tokens = config.num_speculative_tokens
        self.pool = BlockPool(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.requests: dict[int, Sequence] = {}  # all that have not finished, by request_id
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.step_number = 0
        self.history: deque[StepRecord] = deque(maxlen=10_000)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request has not finished."""
        return bool(self.requests)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind all others."""
        self.requests[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def schedule(self, num_steps: int = 1) -> SchedulerOutput:
        """Choose what the next step computes, and allocate blocks for it; nothing where no sequence can go on. While
        there is nothing to choose, up to ``num_steps`` steps become one (vLLM's multi-step scheduling).

        Running sequences come first, in order of admission; waiting ones get what is left of the budget. None is
        admitted in a step in which a sequence was preempted. A sequence is not admitted either in a step that computes
        the next block of its prompt for another one: a step later, that block is found in the cache (as vLLM does for
        Mamba layers, https://github.com/vllm-project/vllm/pull/29387).
        """
        self.step_number += 1
        budget, preempted, admitted = self.max_num_batched_tokens, [], []
        scheduled: list[tuple[Sequence, int, tuple[int, ...]]] = []
        keys: set[bytes] = set()  # of the blocks that this step fills
        turn = 0
        while turn < len(self.running) and budget:
            sequence = self.running[turn]
            count = min(tokens_to_compute(sequence.num_tokens, sequence.num_computed_tokens), budget)
            needed = sequence.num_computed_tokens + count
            while self.pool.num_free < sequence.block_table.num_blocks_to_allocate(needed):
                victim = self.running.pop()
                self._preempt(victim)
                preempted.append(victim.request_id)
                if victim is sequence:
                    break
            else:
                draft = self._draft(sequence, needed, budget - count)
                self._give(sequence, count, scheduled, keys, draft)
                budget -= count + len(draft)
                turn += 1
        while self.waiting and budget and not preempted and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.block_table.missing_key(sequence.token_ids) in keys:
                break
            count = self._admit(sequence, budget)
            if not count:
                break
            self.waiting.popleft()
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            self._give(sequence, count, scheduled, keys)
            admitted.append(sequence.request_id)
            budget -= count
        self.history.append(StepRecord(
            self.step_number, {s.request_id: count + len(draft) for s, count, draft in scheduled},
            tuple(s.request_id for s, *_ in scheduled
                  if s.num_computed_tokens < max(s.num_prompt_tokens, s.num_tokens - 1)),
            tuple(preempted), tuple(admitted), self.pool.num_used))
        ahead = self._look_ahead([sequence for sequence, *_ in scheduled], num_steps)
        return SchedulerOutput(self.step_number, tuple(scheduled_request(self.step_number, *part)
                                                       for part in scheduled), ahead)

    def _look_ahead(self, scheduled: list[Sequence], num_steps: int) -> int:
        """How many more steps need no scheduling: all sequences decode, none waits or is at its end. Their blocks are
        allocated here; 0 if there are too few."""
        if self.waiting or self.num_speculative_tokens or any(
                s.num_computed_tokens < max(s.num_tokens - 1, s.num_prompt_tokens) for s in scheduled):
            return 0
        left = [s.max_tokens - (s.num_tokens - s.num_prompt_tokens) for s in scheduled]
        ahead = min(num_steps, *left) - 1 if left else 0
        if sum(s.block_table.num_blocks_to_allocate(s.num_tokens + ahead) for s in scheduled) > self.pool.num_free:
            return 0
        for sequence in scheduled:
            sequence.block_table.allocate_slots(sequence.num_tokens + ahead)
        return ahead

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """How many tokens a waiting sequence can begin with: 0 if its blocks do not fit."""
        free(sequence)  # it holds blocks only if it found some last time and could not be admitted
        cached = sequence.block_table.get_computed_blocks(sequence.token_ids)
        computed = computed_after_prefix_hit(len(cached), self.pool.block_size)
        count = min(tokens_to_compute(sequence.num_tokens, computed), budget)
        missing = sequence.block_table.num_blocks_to_allocate(computed + count) - len(cached)
        # Found blocks without a user count as free, but must not be handed out as well.
        if missing > self.pool.num_free - sum(map(self.pool.is_free, cached)):
            return 0
        sequence.block_table.add_computed_blocks(cached)
        sequence.num_computed_tokens = computed
        if sequence.status is Status.WAITING:
            sequence.metrics.prefix_hit_tokens = computed
        return count

    def _draft(self, sequence: Sequence, tokens: int, budget: int) -> tuple[int, ...]:
        """A draft of the tokens after its newest one, if that is computed in this step; ``()`` otherwise."""
        if (not self.num_speculative_tokens or tokens < sequence.num_tokens or not sequence.params.greedy
                or sequence.params.logprobs is not None):
            return ()
        left = sequence.max_tokens - (sequence.num_tokens - sequence.num_prompt_tokens)
        draft = propose(sequence.token_ids, min(self.num_speculative_tokens, left - 1, budget))
        fits = sequence.block_table.num_blocks_to_allocate(tokens + len(draft)) <= self.pool.num_free
        return draft if fits else ()

    def _give(self, sequence: Sequence, count: int, scheduled: list, keys: set[bytes],
              draft: tuple[int, ...] = ()) -> None:
        computed = sequence.num_computed_tokens + count
        sequence.block_table.allocate_slots(computed + len(draft))
        keys.update(sequence.block_table.keys_to_cache(sequence.token_ids, computed))
        sequence.metrics.blocks_used = max(sequence.metrics.blocks_used, blocks_needed(computed, self.pool.block_size))
        scheduled.append((sequence, count, draft))

    def _preempt(self, sequence: Sequence) -> None:
        free(sequence)
        sequence.num_computed_tokens, sequence.sampled_in_step = 0, -1
        sequence.status = Status.PREEMPTED
        sequence.metrics.preemptions += 1
        self.waiting.appendleft(sequence)

    def update_from_output(self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
                           ) -> list[Sequence]:
        """Apply what a step computed: new tokens, and blocks that are full now. Sequences that have ended since it was
        scheduled are left out.

        Returns the sequences that got a token. The caller decides whether one has ended (:meth:`finish`).
        """
        advanced, requests = [], [part for part in scheduler_output.requests if part.request_id in self.requests]
        if requests and self.step_number < scheduler_output.step_number:  # one that was not scheduled by itself
            self.step_number = scheduler_output.step_number
            self.history.append(StepRecord(self.step_number, {part.request_id: 1 for part in requests}, (), (), (),
                                           self.pool.num_used))
        for request in requests:
            request_id, accepted = request.request_id, runner_output.num_accepted.get(request.request_id, 0)
            sequence = self.requests[request_id]
            sequence.token_ids += request.draft[:accepted]
            sequence.logprobs += [None] * accepted
            # The slots of rejected tokens are written again.
            sequence.num_computed_tokens += request.segment.count - request.num_draft_tokens + accepted
            sequence.block_table.cache_blocks(sequence.token_ids, sequence.num_computed_tokens)
            sequence.metrics.num_draft_tokens += request.num_draft_tokens
            sequence.metrics.num_accepted_tokens += accepted
            if request_id in runner_output.sampled_token_ids:
                sequence.token_ids.append(runner_output.sampled_token_ids[request_id])
                sequence.logprobs.append(runner_output.logprobs.get(request_id))
                sequence.sampled_in_step = self.step_number
                advanced.append(sequence)
        return advanced

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Take a sequence out, wherever it is; its blocks are free from now on."""
        if sequence.status is Status.FINISHED:
            return
        queue = self.running if sequence.status is Status.RUNNING else self.waiting
        queue.remove(sequence)
        del self.requests[sequence.request_id]
        free(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason

    def reset(self) -> None:
        """The ranks have lost their caches: compute everything again, and find nothing by key any more."""
        while self.running:
            self._preempt(self.running.pop())
        self.pool.reset_prefix_cache()

    def __str__(self) -> str:
        head = (f"step {self.step_number}: {len(self.running)} running, {len(self.waiting)} waiting, "
                f"{self.pool.num_used} of {self.pool.num_blocks} blocks used")
        lines = [f"  {s.request_id:>3} {s.status.value:<9} prompt {s.num_prompt_tokens:>4} + "
                 f"{s.num_tokens - s.num_prompt_tokens:>3} new, computed {s.num_computed_tokens:>4}, "
                 f"blocks {s.block_table.block_ids}" for s in (*self.running, *self.waiting)]
        return "\n".join([head, *lines])
