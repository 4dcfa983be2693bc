"""``ModelRunner``: what one rank does in a step: tokens in, one forward pass, drawn tokens out.

It keeps the weights, the cache and the tokens drawn in the last step. Queues are the scheduler's.
"""

from itertools import accumulate

import torch

from tplab.cache import PagedKVCache, Segment
from tplab.engine.config import EngineConfig
from tplab.engine.draft import num_accepted
from tplab.engine.errors import EngineError
from tplab.engine.sampler import sample
from tplab.engine.step import ModelRunnerOutput, SamplingMetadata, ScheduledRequest, SchedulerOutput
from tplab.model import load_model
from tplab.ranks import state
from tplab.shard import ShardPlan


def token_positions(segment: Segment) -> range:
    """Absolute positions of a sequence's new tokens: they follow those in the cache, in prefill and in decode."""
    return range(segment.start, segment.start + segment.count)


def batch_order(scheduler_output: SchedulerOutput) -> tuple[ScheduledRequest, ...]:
    """The sequences in the order of their rows. It must be the same on all ranks, or they add up unlike rows."""
    return scheduler_output.requests


class ModelRunner:
    """One rank's part of an engine."""

    def __init__(self, ckpt, plan: ShardPlan, config: EngineConfig):
        self.model, self.config = load_model(ckpt, plan, config.dtype), config
        self.lm_head = self.model.lm_head
        self.cache = PagedKVCache(ckpt.config.num_layers, config.num_blocks, config.block_size,
                                  len(self.model.shard.kv_heads), plan.head_dim, config.dtype)
        self.drawn: dict[int, int] = {}
        self.load_stats = {"bytes_read": self.model.load_stats.bytes_read,
                           "parameter_bytes": self.model.load_stats.parameter_bytes,
                           "cache_bytes": self.cache.nbytes, "cache_bytes_per_token": self.cache.bytes_per_token}

    def new_tokens(self, requests: tuple[ScheduledRequest, ...]) -> list[int]:
        """The flattened input: the tokens that were sent, or the token that this rank drew in the last step."""
        tokens: list[int] = []
        for request in requests:
            tokens.extend(request.token_ids or (self.drawn[request.request_id],))
        return tokens

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, segments: list[Segment], rows: list[int]
                ) -> tuple[torch.Tensor, list[list[int]]]:
        """One forward pass over the flattened tokens of all sequences: this rank's logits of the given rows, and the
        slots that each sequence wrote."""
        context = self.cache.context(segments)
        hidden = self.model(ids, positions, context)
        return self.model.compute_logits(hidden[rows]), context.slots

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step: one forward pass over all new tokens of all sequences, then one token for each that is due."""
        requests = batch_order(scheduler_output)
        segments = [request.segment for request in requests]
        positions = torch.tensor([position for segment in segments for position in token_positions(segment)])
        ends = accumulate(segment.count for segment in segments)
        # Where a prompt is complete, tokens are drawn from the logits of its last token and of the draft after it.
        rows: list[int] = []
        due: list[tuple[ScheduledRequest, SamplingMetadata]] = []
        for request, end in zip(requests, ends):
            if request.sampling is not None:
                drawn_from = range(end - 1 - request.num_draft_tokens, end)
                rows += drawn_from
                due += [(request, request.sampling)] * len(drawn_from)
        logits_here, slots = self.forward(torch.tensor(self.new_tokens(requests)), positions, segments, rows)
        tokens, by_row = sample(self.lm_head, logits_here, [draw for _, draw in due]) if due else ([], {})
        chosen: dict[int, list[int | None]] = {}
        for (request, _), token in zip(due, tokens):
            chosen.setdefault(request.request_id, []).append(token)
        accepted = {request.request_id: num_accepted(request.draft, chosen[request.request_id])
                    for request, _ in due if request.num_draft_tokens}
        self.drawn = {request_id: token for request_id, choices in chosen.items()
                      if (token := choices[accepted.get(request_id, 0)]) is not None}
        logprobs = {due[row][0].request_id: logprobs for row, logprobs in by_row.items()}
        nan = tuple(request.request_id for (request, _), token in zip(due, tokens) if token is None)
        return ModelRunnerOutput(self.drawn, logprobs, slots if self.config.strict else None, nan, accepted)

    def execute_steps(self, scheduler_output: SchedulerOutput) -> list[ModelRunnerOutput]:
        """A step and its lookahead steps, until a sequence's logits are NaN or all have ended."""
        outputs = [self.execute_model(scheduler_output)]
        while scheduler_output.num_lookahead_steps and not outputs[-1].nan and not all(
                token in self.config.eos_token_ids for token in self.drawn.values()):
            scheduler_output = scheduler_output.next_step()
            outputs.append(self.execute_model(scheduler_output))
        return outputs


def load_runner(key: str, forget: list[str], *arguments, make=ModelRunner) -> dict:
    """On a rank: ``make`` a runner and keep it under ``key``; drop the runners of ``forget``.

    Returns what it costs: ``bytes_read``, ``parameter_bytes``, ``cache_bytes``, ``cache_bytes_per_token``.
    """
    drop_runners(forget)
    state[key] = make(*arguments)
    return state[key].load_stats


def drop_runners(keys: list[str]) -> None:
    """On a rank: forget engines."""
    for key in keys:
        state.pop(key, None)


def _runner(key: str) -> ModelRunner:
    if key not in state:
        raise EngineError("this rank was restarted and has lost its weights and its cache")
    return state[key]


def execute_model(key: str, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
    """On a rank: one step of the engine ``key``; EngineError if this rank was restarted since it was loaded."""
    return _runner(key).execute_model(scheduler_output)


def execute_steps(key: str, data: bytes) -> list[ModelRunnerOutput]:
    """On a rank: a step that came over the wire, and its lookahead steps; errors as in :func:`execute_model`."""
    return _runner(key).execute_steps(SchedulerOutput.from_json(data))
