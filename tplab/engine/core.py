"""``Engine``: scheduler, ranks and stop conditions, on token ids. :class:`tplab.LLM` adds text."""

import secrets
import time

from tplab.cache import blocks_needed
from tplab.checks import quoted, whole_number
from tplab.engine.config import EngineConfig
from tplab.engine.errors import RequestError, StandstillError
from tplab.engine.scheduler import Scheduler
from tplab.engine.sequence import Sequence, Status
from tplab.engine.strict import StrictChecks


class Engine:
    """Runs sequences step by step on an executor (tplab/llm/executor.py), which has a model on ranks.

    ``executor.execute_steps`` is needed only by callers that ask :meth:`step` for several steps.
    """

    def __init__(self, executor, config: EngineConfig):
        self.executor, self.config = executor, config
        self.scheduler = Scheduler(config)
        self.pool = self.scheduler.pool
        self.checks = StrictChecks(self.scheduler) if config.strict else None
        self._count = 0

    def check_prompt(self, token_ids, params) -> int:
        """The most tokens that a request can generate here. RequestError says why it cannot run, and what would."""
        vocab_size, max_model_len = self.config.vocab_size, self.config.max_model_len
        if not token_ids:
            raise RequestError("the prompt is empty; at least one token is needed")
        for token in token_ids:
            if whole_number(token, 0, vocab_size - 1) is None:
                raise RequestError(f"token id {quoted(token)} is not in the vocabulary: 0 to {vocab_size - 1}")
        wrong = [token for token in params.stop_token_ids if token >= vocab_size]
        if wrong:
            raise RequestError(f"stop token id {wrong[0]} is not in the vocabulary: 0 to {vocab_size - 1}")
        room = max_model_len - len(token_ids)
        if room < 1:
            raise RequestError(f"the prompt has {len(token_ids)} tokens; prompt and output together can have "
                               f"{max_model_len} (max_model_len)")
        most = room if params.max_tokens is None else min(room, params.max_tokens)
        # The last token is never read again, so it needs no slot.
        needed = blocks_needed(len(token_ids) + most - 1, self.pool.block_size)
        if needed > self.pool.num_blocks:
            fits = self.pool.num_blocks * self.pool.block_size + 1 - len(token_ids)
            advice = f"ask for at most {fits} tokens (max_tokens), or " if fits > 0 else ""
            raise RequestError(f"{len(token_ids)} prompt tokens and {most} new ones need {needed} blocks of "
                               f"{self.pool.block_size}, but the cache has {self.pool.num_blocks}; {advice}make an LLM "
                               f"with num_blocks={needed}")
        return most

    def add(self, token_ids: list[int], params) -> Sequence:
        """Queue a request. Errors as in :meth:`check_prompt`."""
        most = self.check_prompt(token_ids, params)
        seed = secrets.randbits(62) if params.seed is None else params.seed
        sequence = Sequence(self._count, list(token_ids), params, self.pool, most, seed)
        self._count += 1
        sequence.metrics.arrival_time = time.perf_counter()
        sequence.metrics.num_prompt_tokens = len(token_ids)
        self.scheduler.add(sequence)
        return sequence

    def step(self, num_steps: int = 1) -> list[Sequence]:
        """One step, or up to ``num_steps`` in one call of the ranks where nothing has to be scheduled in between:
        schedule, compute on the ranks, take the tokens in; the sequences that got a token.

        Raises:
            StandstillError: unfinished sequences, but none can go on: blocks are missing.
            StrictError: an invariant does not hold.
            RankError: a rank failed. No sequence has lost a token; the next step computes the same again.
        """
        scheduler_output = self.scheduler.schedule(num_steps)
        if not scheduler_output.requests:
            self._refuse_standstill()
            return []
        steps = [self.executor.execute_model(scheduler_output)] if not scheduler_output.num_lookahead_steps else (
            self.executor.execute_steps(scheduler_output))
        advanced: dict[Sequence, None] = {}
        for outputs in steps:
            if self.checks:
                self.checks.after(scheduler_output, outputs)
            now = time.perf_counter()
            for sequence in self.scheduler.update_from_output(scheduler_output, outputs[0]):
                self._advance(sequence, now)
                advanced[sequence] = None
            for request_id in self.scheduler.requests.keys() & outputs[0].nan:
                self._end_for_nan(self.scheduler.requests[request_id])
            if self.checks:
                self.checks.accounts()
            scheduler_output = scheduler_output.next_step()
        return list(advanced)

    def _refuse_standstill(self) -> None:
        if self.scheduler.has_unfinished:
            used = {block for s in self.scheduler.running for block in s.block_table.block_ids}
            waiting = self.scheduler.waiting
            raise StandstillError(
                f"no sequence can go on: {self.pool.num_used} of {self.pool.num_blocks} blocks are in use, but running "
                f"sequences hold only {len(used)} of them",
                self.pool.num_used, len(used.union(*(s.block_table.block_ids for s in waiting))),
                [(s.request_id, s.num_tokens, s.num_computed_tokens) for s in waiting])

    def _advance(self, sequence: Sequence, now: float) -> None:
        metrics, params = sequence.metrics, sequence.params
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        for token in sequence.output_token_ids[metrics.num_output_tokens:]:
            metrics.num_output_tokens += 1
            if token in params.stop_token_ids:
                sequence.stop_reason = token
                self.finish(sequence, "stop")
            elif token in self.config.eos_token_ids and not params.ignore_eos:
                self.finish(sequence, "stop")
            elif metrics.num_output_tokens >= sequence.max_tokens:
                self.finish(sequence, "length")
            if sequence.status is Status.FINISHED:
                sequence.keep_output(metrics.num_output_tokens)
                break

    def _end_for_nan(self, sequence: Sequence) -> None:
        new = sequence.num_tokens - sequence.num_prompt_tokens
        sequence.error = RequestError(
            f"request {sequence.request_id} cannot go on: the logits for its token {sequence.num_tokens + 1} "
            f"({sequence.num_prompt_tokens} of the prompt and {new} new ones stand before it) are NaN, and temperature "
            f"{sequence.params.temperature} has nothing to draw from; align(model, prompt) shows at which point NaN "
            "begins")
        self.finish(sequence, "error")

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence, whatever its state. A second call changes nothing."""
        if sequence.status is not Status.FINISHED:
            self.scheduler.finish(sequence, reason)
            sequence.metrics.finished_time = time.perf_counter()

    def recompute(self) -> None:
        """The ranks have lost their caches: all sequences wait, and their tokens are computed again."""
        self.scheduler.reset()
