"""``ModelRunner``: what one rank does in a step: tokens in, one forward pass, drawn tokens out.

It keeps the weights, the cache and the tokens drawn in the last step, and knows nothing about queues.
"""

import torch

from tplab.cache import PagedKVCache, Segment
from tplab.engine.config import EngineConfig
from tplab.engine.errors import EngineError
from tplab.engine.sampler import sample
from tplab.engine.step import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from tplab.engine.step_graph import StepGraphs
from tplab.model import load_model
from tplab.ranks import state
from tplab.shard import ShardPlan


def token_positions(segment: Segment) -> range:
    """Absolute positions of a sequence's new tokens: they follow those in the cache. Also where decoding happens."""
    return range(segment.start, segment.start + segment.count)


def batch_order(scheduler_output: SchedulerOutput) -> tuple[ScheduledRequest, ...]:
    """The sequences in the order of their rows. It must be the same on all ranks, or they add up unlike rows."""
    return scheduler_output.requests


class ModelRunner:
    """One rank's part of an engine."""

    def __init__(self, ckpt, plan: ShardPlan, config: EngineConfig):
        self.model, self.config = load_model(ckpt, plan, config.dtype), config
        self.cache = PagedKVCache(ckpt.config.num_layers, config.num_blocks, config.block_size,
                                  len(self.model.shard.kv_heads), plan.head_dim, config.dtype)
        self.drawn: dict[int, int] = {}
        self.graphs = None if config.enforce_eager or config.strict else StepGraphs(self.model, self.cache)

    def new_tokens(self, requests: tuple[ScheduledRequest, ...]) -> list[int]:
        """The flattened input: from the description, or what this rank knows was drawn a step ago."""
        tokens: list[int] = []
        for request in requests:
            tokens.extend(request.token_ids or (self.drawn[request.request_id],))
        return tokens

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step: one forward pass over all new tokens of all sequences, then one token for each that is due."""
        requests = batch_order(scheduler_output)
        segments = [request.segment for request in requests]
        positions = torch.tensor([position for segment in segments for position in token_positions(segment)])
        ids, slots = torch.tensor(self.new_tokens(requests)), None
        last_rows, due, row = [], [], -1
        for request in requests:
            row += request.segment.count
            if request.sampling is not None:
                last_rows.append(row)
                due.append(request)
        hidden = self.graphs.forward(ids, positions, segments) if self.graphs else None
        if hidden is None:
            context = self.cache.context(segments)
            if self.config.prune_last_layer and len(due) <= row:
                context.logits_indices = torch.tensor(last_rows or [row])
            hidden, slots = self.model(ids, positions, context), context.slots
        self.drawn, logprobs, nan = {}, {}, ()
        if due:
            logits_here = self.model.compute_logits(hidden if len(due) == len(hidden) else hidden[last_rows])
            tokens, by_row = sample(self.model, logits_here, [request.sampling for request in due])
            self.drawn = {request.request_id: token for request, token in zip(due, tokens) if token is not None}
            logprobs = {due[row].request_id: found for row, found in by_row.items()}
            nan = tuple(request.request_id for request, token in zip(due, tokens) if token is None)
        return ModelRunnerOutput(self.drawn, logprobs, slots if self.config.strict else None, nan)

    def execute_steps(self, scheduler_output: SchedulerOutput) -> list[ModelRunnerOutput]:
        """A step, and those that may follow it without the scheduler, until somebody cannot draw or all are at an end.
        """
        outputs = [self.execute_model(scheduler_output)]
        while scheduler_output.num_lookahead_steps and not outputs[-1].nan and not all(
                token in self.config.eos_token_ids for token in self.drawn.values()):
            scheduler_output = scheduler_output.next_step()
            if self.graphs:
                self.graphs.expect_another()
            outputs.append(self.execute_model(scheduler_output))
        return outputs


def load_runner(key: str, forget: list[str], *arguments) -> dict:
    """On a rank: make a :class:`ModelRunner` and keep it under ``key``; drop those that nobody needs any more.

    Returns what it costs: ``bytes_read``, ``parameter_bytes``, ``cache_bytes``, ``cache_bytes_per_token``.
    """
    drop_runners(forget)
    runner = state[key] = ModelRunner(*arguments)
    stats = runner.model.load_stats
    return {"bytes_read": stats.bytes_read, "parameter_bytes": stats.parameter_bytes,
            "cache_bytes": runner.cache.nbytes, "cache_bytes_per_token": runner.cache.bytes_per_token}


def drop_runners(keys: list[str]) -> None:
    """On a rank: forget engines."""
    for key in keys:
        state.pop(key, None)


def has_runner(key: str) -> bool:
    """On a rank: whether the engine ``key`` is loaded."""
    return key in state


def execute_model(key: str, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
    """On a rank: one step of the engine ``key``; EngineError if this rank was restarted since it was loaded."""
    return _runner(key).execute_model(scheduler_output)


def _runner(key: str) -> ModelRunner:
    if key not in state:
        raise EngineError("this rank was restarted and has lost its weights and its cache")
    return state[key]


def execute_model_from_json(key: str, data: bytes) -> ModelRunnerOutput:
    """On a rank: :func:`execute_model` for a step that came over the wire."""
    return execute_model(key, SchedulerOutput.from_json(data))


def execute_steps_from_json(key: str, data: bytes) -> list[ModelRunnerOutput]:
    """On a rank: a step of the engine ``key`` that came over the wire, and those that may follow it."""
    return _runner(key).execute_steps(SchedulerOutput.from_json(data))
