"""Which pieces of the engine a learner's answers can stand in for, and how: exercise → patches."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from tplab.lesson.exercises.heads import heads_patch
from tplab.lesson.exercises.paging import batches_through
from tplab.lesson.exercises.pool_of_blocks import pool_patches
from tplab.lesson.exercises.vocabulary import embedding_patch, head_patch
from tplab.patch import Patch, original
from tplab.ranks import rank


@dataclass(frozen=True)
class Piece:
    """``patches(answer)`` puts a learner's answer into the engine; ``place``: what it does there."""

    place: str
    patches: Callable[[Callable], list[Patch]]


def _at(*targets: str) -> Callable[[Callable], list[Patch]]:
    """For an answer that is called just as the engine's own function is."""
    return lambda answer: [Patch(target, answer) for target in targets]


def _rotate_half(answer: Callable) -> list[Patch]:
    def rotate(model_type):
        def apply(q, k, cos, sin):
            cos, sin = cos[:, None], sin[:, None]
            return q * cos + answer(q) * sin, k * cos + answer(k) * sin

        return apply

    return [Patch("tplab.model.attention.rotate", rotate)]


def _rope(answer: Callable) -> list[Patch]:
    """Its angles as the engine's tables: what (1, 0) becomes is (cos, sin)."""
    target = "tplab.model.rope.Rotary.__call__"

    def tables(self, x, positions, lengths):
        rope = self.config.rope_parameters
        if rope["rope_type"] != "default":
            return original(target)(self, x, positions, lengths)
        cos, _ = original(target)(self, x, positions[:1], [1])
        half = cos.shape[-1] // 2
        ones = torch.cat([torch.ones(len(positions), 1, half), torch.zeros(len(positions), 1, half)], dim=-1)
        turned = answer(ones, positions, rope["rope_theta"])[:, 0].to(x.dtype)
        return tuple(part.repeat(1, 2)[None] for part in turned.chunk(2, dim=-1))

    return [Patch(target, tables)]


def _positions(answer: Callable) -> list[Patch]:
    target = "tplab.model.decoder.TensorParallelCausalLM.forward"

    def forward(self, input_ids, positions, context):
        starts, counts = [s.start for s in context.segments], [s.count for s in context.segments]
        return original(target)(self, input_ids, answer(starts, counts), context)

    return [Patch(target, forward)]


def _load(answer: Callable) -> list[Patch]:
    target = "tplab.model.loader.load_model"

    def load_model(ckpt, plan, dtype=torch.float32):
        from tplab.checkpoint.layout import by_parameter, tensor_parts
        from tplab.model.decoder import TensorParallelCausalLM

        parts = tensor_parts(ckpt.config, ckpt.tensors)
        if any(part.tensor != name for name, part in parts.items()):  # fused on disk: not what it was written for
            return original(target)(ckpt, plan, dtype)
        model, kept = TensorParallelCausalLM(ckpt.config, plan, dtype), answer(ckpt, plan, rank())
        for path, own in by_parameter(parts).items():
            model.get_parameter(path).data.copy_(torch.cat([kept[name] for name in own]))
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        model.load_stats = SimpleNamespace(bytes_read=size, parameter_bytes=size)
        return model.eval()

    return [Patch("tplab.engine.runner.load_model", load_model)]


PIECES: dict[str, Piece] = {
    "mask_scores": Piece("hides the future from attention", _at("tplab.model.attention.mask_scores")),
    "my_heads": Piece("says who owns which heads", lambda answer: [heads_patch(answer)]),
    "my_column_shard": Piece("cuts rows out of weights", _at("tplab.shard.linear.column_shard",
                                                             "tplab.shard.embedding.column_shard")),
    "my_merged": Piece("stacks q, k and v, gate and up", _at("tplab.shard.linear.merged_shard")),
    "my_rotate_half": Piece("makes a quarter turn", _rotate_half),
    "my_apply_rope": Piece("turns queries and keys", _at("tplab.model.attention.TensorParallelAttention.apply_rope")),
    "my_rope": Piece("makes the tables of angles", _rope),
    "my_positions": Piece("says where each token stands", _positions),
    "my_attend": Piece("attends", _at("tplab.model.attention.attend")),
    "my_mask": Piece("makes the mask", _at("tplab.model.attention.causal_mask", "tplab.cache.paged.causal_mask")),
    "my_token_positions": Piece("numbers a sequence's new tokens", _at("tplab.engine.runner.token_positions")),
    "my_slot_mapping": Piece("turns positions into slots", _at("tplab.cache.paged.slot_mapping")),
    "my_write_read": Piece("writes and reads the cache",
                           lambda answer: [Patch("tplab.cache.paged.PagedContext.batches", batches_through(answer))]),
    "my_key": Piece("names full blocks", _at("tplab.cache.table.block_key")),
    "MyPool": Piece("hands out blocks", pool_patches),
    "my_embedding": Piece("looks words up", lambda answer: [embedding_patch(answer)]),
    "my_head_logits": Piece("makes logits", lambda answer: [head_patch(answer)]),
    "my_best_offer": Piece("decides for a token", _at("tplab.engine.sampler.best_offer")),
    "my_generate": Piece("is the loop around it all", lambda answer: []),  # it calls the engine: see own_engine.py
    "my_row_shard": Piece("cuts columns out of weights", _at("tplab.shard.linear.row_shard")),
    "my_load": Piece("loads the weights", _load),
}
