"""The diff along the decode path: the same tokens through scheduler, paged cache and ranks, a few at a time.

A plain forward pass uses no cache. Here the engine computes the prompts in its own steps (chunks, prefix hits, one
token after the other). The *next* token is given instead of sampled, so that every computed position can be compared
with Hugging Face's single pass over the whole text.
"""

from collections.abc import Sequence

import torch

from tplab.align.gather import recorded
from tplab.align.judge import judge
from tplab.align.report import AlignReport, DecodeFacts
from tplab.align.run import AlignError, pool_for, prepared
from tplab.cache import blocks_needed
from tplab.checkpoint import Checkpoint
from tplab.checks import positive_int, quoted, whole_number
from tplab.engine import runner
from tplab.engine.config import EngineConfig
from tplab.engine.core import Engine
from tplab.engine.runner import drop_runners, execute_model, load_runner
from tplab.engine.step import ModelRunnerOutput, SchedulerOutput
from tplab.llm.executor import LogicalExecutor
from tplab.llm.sampling_params import SamplingParams
from tplab.model.trace import recording
from tplab.patch import applied
from tplab.pool import RankPool
from tplab.ranks import state

_KEY = "align decode"


def traced_step(step: SchedulerOutput, forced: dict[int, int]) -> tuple[dict, dict[int, int]]:
    """On a rank: one step with all trace points; ``forced`` replaces the sampled tokens."""
    with recording() as points:
        drawn = dict(execute_model(_KEY, step).sampled_token_ids)  # a copy: the rank's own is overwritten next
    state[_KEY].drawn.update(forced)
    return points, drawn


class _ForcingExecutor:
    """An executor that keeps the steps' traces and returns the given tokens."""

    def __init__(self, run, texts: list[list[int]]):
        self.run, self.texts = run, texts
        self.rows: dict[tuple[int, int], tuple[int, int]] = {}
        self.logit_rows: dict[tuple[int, int], tuple[int, int]] = {}
        self.traces: list[list[dict]] = []
        self.scheduler = None
        self.steps: list[SchedulerOutput] = []
        self.tables: list[dict[int, tuple[int, ...]]] = []
        self.drawn: list[dict[tuple[int, int], int]] = []

    def execute_model(self, step: SchedulerOutput) -> list[ModelRunnerOutput]:
        due = [s for s in step.requests if s.sampling is not None]
        ends = {s.request_id: s.segment.start + s.segment.count - s.num_draft_tokens - 1 for s in due}  # newest tokens
        chosen = {s.request_id: self.texts[s.request_id][ends[s.request_id] + 1:][:s.num_draft_tokens + 1] for s in due}
        kept = {s.request_id: runner.num_accepted(s.draft, chosen[s.request_id]) for s in due}
        forced = {number: tokens[kept[number]] for number, tokens in chosen.items()}
        answers = self.run(traced_step, step, forced)
        at = len(self.traces)
        self.traces.append([points for points, _ in answers])
        rejected = {(s.request_id, ends[s.request_id] + 1 + place) for s in due
                    for place in range(kept[s.request_id], s.num_draft_tokens)}
        computed = [(s.request_id, position) for s in step.requests
                    for position in range(s.segment.start, s.segment.start + s.segment.count)]
        self.rows.update({key: (at, row) for row, key in enumerate(computed) if key not in rejected})
        drawn_from = [(s.request_id, ends[s.request_id] + place) for s in due
                      for place in range(s.num_draft_tokens + 1)]
        self.logit_rows.update({key: (at, row) for row, key in enumerate(drawn_from) if key not in rejected})
        self.steps.append(step)
        self.tables.append({s.request_id: tuple(s.block_table.block_ids) for s in self.scheduler.running})
        self.drawn = self.drawn or [{} for _ in answers]
        for known, (_, drawn) in zip(self.drawn, answers):
            known.update({(number, ends[number]): token for number, token in drawn.items() if len(chosen[number]) == 1})
        return [ModelRunnerOutput(forced, {}, num_accepted=kept) for _ in answers]

    def whole_trace(self, rank: int) -> dict[str, torch.Tensor]:
        """One rank's points over all steps, rows in the order of sequence and position; the last computation counts."""
        names = dict.fromkeys(name for ranks in self.traces for name in ranks[rank])
        return {name: torch.stack([self.traces[at][rank][name][row]
                                   for _, (at, row) in sorted(self.places(name).items())]) for name in names}

    def num_keys(self) -> list[int]:
        """For each row, the number of keys when it was computed: the tokens up to the end of its step."""
        ends = {(s.request_id, position): s.segment.start + s.segment.count for step in self.steps
                for s in step.requests for position in range(s.segment.start, s.segment.start + s.segment.count)}
        return [ends[place] for place in sorted(self.rows)]

    def places(self, name: str) -> dict[tuple[int, int], tuple[int, int]]:
        """``{(sequence, position): (step, row)}`` of a point. Logits from which a token was drawn before the row was
        computed once more are left out: they do not belong to what the other points hold."""
        if name != "logits":
            return self.rows
        return {place: (at, row) for place, (at, row) in self.logit_rows.items() if self.rows[place][0] == at}


def align_decode(model: str | Checkpoint, prompts, *, new_tokens: int = 8, tensor_parallel_size: int = 2,
                 dtype: str | torch.dtype = "float32", patches: Sequence = (), block_size: int = 4,
                 num_blocks: int | None = None, max_num_seqs: int = 8, max_num_batched_tokens: int = 512,
                 enable_prefix_caching: bool = True, num_speculative_tokens: int = 0, one_by_one: bool = False,
                 pool: RankPool | None = None, logical: bool = False, enable_expert_parallel: bool = False
                 ) -> AlignReport:
    """Compare the engine's decode path with Hugging Face, at every trace point of every computed position.

    Args:
        model, tensor_parallel_size, dtype, patches, pool, logical, enable_expert_parallel: as for
            :func:`tplab.align.align`.
        prompts: texts or lists of token ids. The last ``new_tokens`` tokens of each are not read with the prompt but
            fed one at a time, as if they had been generated.
        block_size, num_blocks, max_num_seqs, max_num_batched_tokens, enable_prefix_caching, num_speculative_tokens: of
            the engine. Of a draft, the tokens stay that the prompt goes on with.
        one_by_one: finish each prompt before the next begins (so that the later one can hit the earlier one's prefix).

    Returns:
        An :class:`AlignReport` over the positions that were computed; positions found in the prefix cache are not
        among them. Its logits are those from which a token would have been drawn.

    Raises:
        AlignError: a prompt is not longer than ``new_tokens``; otherwise as :func:`tplab.align.align`.
    """
    ckpt, dtype, patches, plan, texts = prepared(model, prompts, tensor_parallel_size, dtype, patches,
                                                 enable_expert_parallel)
    shortest = min(map(len, texts))
    if whole_number(new_tokens, 1, shortest - 1) is None:
        raise AlignError(f"the shortest prompt has {shortest} tokens, too few to decode {quoted(new_tokens)} of them "
                         "one by one and read at least one before: write a longer prompt, or give another new_tokens")
    block_size = positive_int("block_size", block_size, AlignError)
    config = EngineConfig(
        vocab_size=ckpt.config.vocab_size, max_model_len=max(map(len, texts)) + 1, block_size=block_size,
        num_blocks=num_blocks or sum(blocks_needed(len(text), block_size) for text in texts), dtype=dtype,
        tensor_parallel_size=tensor_parallel_size, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=enable_prefix_caching,
        num_speculative_tokens=num_speculative_tokens)
    run = LogicalExecutor(tensor_parallel_size).run if logical else pool_for(tensor_parallel_size, pool).run
    executor = _ForcingExecutor(run, texts)
    engine = Engine(executor, config)
    executor.scheduler = engine.scheduler
    try:
        with applied(*patches):
            run(load_runner, _KEY, [], ckpt, plan, config)
            for text in texts:
                engine.add(text[:-new_tokens], SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True))
                while one_by_one and engine.scheduler.has_unfinished:
                    engine.step()
            while engine.scheduler.has_unfinished:
                engine.step()
    finally:
        run(drop_runners, [_KEY])
    traces = [executor.whole_trace(rank) for rank in range(tensor_parallel_size)]
    recording = recorded(traces, plan, dtype, texts, sorted(executor.rows), executor.num_keys(),
                         sorted(executor.places("logits")), [origin for _, origin in sorted(executor.rows.items())])
    recording.segments = [[request.segment for request in step.requests] for step in executor.steps]
    recording.block_size = block_size
    facts = DecodeFacts(tuple(executor.steps), tuple(executor.tables), tuple(executor.drawn), block_size,
                        engine.pool.num_used, sum(len(record.preempted) for record in engine.scheduler.history),
                        engine.config.enable_prefix_caching)
    return judge(recording, ckpt, plan, patches, decode=facts)
