"""``ModelRunner``: what one rank does in a step: tokens in, one forward pass, drawn tokens out.

It keeps the weights, the cache and the tokens drawn in the last step, and knows nothing about queues.
"""

import torch

from tplab.cache import PagedKVCache, Segment
from tplab.engine.config import EngineConfig
from tplab.engine.errors import EngineError
from tplab.engine.sampler import sample
from tplab.engine.step import SequenceStep, StepInput, StepOutput
from tplab.model import load_model
from tplab.ranks import state
from tplab.shard import ShardPlan


def token_positions(segment: Segment) -> range:
    """Absolute positions of a sequence's new tokens: they follow those in the cache. Also where decoding happens."""
    return range(segment.start, segment.start + segment.count)


def batch_order(step: StepInput) -> tuple[SequenceStep, ...]:
    """The sequences in the order of their rows. It must be the same on all ranks, or they add up unlike rows."""
    return step.sequences


class ModelRunner:
    """One rank's part of an engine.

    Args:
        ckpt: the checkpoint.
        plan: the shard plan.
        config: of the engine.
    """

    def __init__(self, ckpt, plan: ShardPlan, config: EngineConfig):
        self.model, self.config = load_model(ckpt, plan, config.dtype), config
        self.cache = PagedKVCache(ckpt.config.num_layers, config.num_blocks, config.block_size,
                                  len(self.model.shard.kv_heads), plan.head_dim, config.dtype)
        self.drawn: dict[int, int] = {}

    def new_tokens(self, sequences: tuple[SequenceStep, ...]) -> list[int]:
        """The flattened input: from the description, or what this rank knows was drawn a step ago."""
        tokens: list[int] = []
        for sequence in sequences:
            tokens.extend(sequence.token_ids or (self.drawn[sequence.number],))
        return tokens

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        """One step: one forward pass over all new tokens of all sequences, then one token for each that is due."""
        sequences = batch_order(step)
        segments = [sequence.segment for sequence in sequences]
        context = self.cache.context(segments)
        positions = torch.tensor([position for segment in segments for position in token_positions(segment)])
        hidden = self.model(torch.tensor(self.new_tokens(sequences)), positions, context)
        last_rows, due, row = [], [], -1
        for sequence in sequences:
            row += sequence.segment.count
            if sequence.draw is not None:
                last_rows.append(row)
                due.append(sequence)
        self.drawn, logprobs, nan = {}, {}, ()
        if due:
            logits_here = self.model.compute_logits(hidden[last_rows])
            tokens, by_row = sample(self.model, logits_here, [sequence.draw for sequence in due])
            self.drawn = {sequence.number: token for sequence, token in zip(due, tokens) if token is not None}
            logprobs = {due[row].number: found for row, found in by_row.items()}
            nan = tuple(sequence.number for sequence, token in zip(due, tokens) if token is None)
        return StepOutput(self.drawn, logprobs, context.slots if self.config.strict else None, nan)


def load_runner(key: str, forget: list[str], *arguments) -> dict:
    """On a rank: make a :class:`ModelRunner` and keep it under ``key``; drop those that nobody needs any more.

    Returns:
        What it costs: ``bytes_read``, ``parameter_bytes``, ``cache_bytes``, ``cache_bytes_per_token``.
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


def run_step(key: str, step: StepInput) -> StepOutput:
    """On a rank: one step of the engine ``key``.

    Raises:
        EngineError: this rank was restarted and holds nothing any more.
    """
    if key not in state:
        raise EngineError("this rank was restarted and has lost its weights and its cache")
    return state[key].execute(step)


def run_described_step(key: str, description: bytes) -> StepOutput:
    """On a rank: :func:`run_step` for a step that came over the wire, as :meth:`StepInput.to_json` wrote it."""
    return run_step(key, StepInput.from_json(description))
