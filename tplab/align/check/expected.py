"""The values that a rank should have at a few rows: from its own recorded inputs, or by Hugging Face's trace."""

from functools import cached_property

import torch

from tplab.align.arithmetic import activation, rotated
from tplab.align.check.names import role_of, split_name
from tplab.align.check.sources import FEW, SAMPLE, SHAPE, Source, Sources
from tplab.align.local import LocalFrame
from tplab.align.points import layer_of
from tplab.align.recording import Recording
from tplab.align.reference import hf_model, hf_trace
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import EMBEDDING, HEAD
from tplab.model.rope import Rotary
from tplab.shard import ShardPlan

TABLES = "cos and sin of the rotation, which are no points by themselves"
_TABLE_NAMES = {"position_embeddings", "rotary_pos_emb", "freqs_cis", "freqs", "cos", "sin", "cos_sin", "rope_cache"}
_CLOSE = 2 ** -7  # bfloat16's rounding of a cosine
_MADE_OF = {**dict.fromkeys("qkv", "input_norm"), **dict.fromkeys(("gate", "up", "mlp_act", "router_logits"),
                                                                  "post_norm")}


class Expected:
    """The operations of :mod:`tplab.align.operations` on recorded rows, for the whole model, in float32; and Hugging
    Face's points at the sampled rows. Weights of one layer are kept at a time."""

    def __init__(self, ckpt: Checkpoint, sources: Sources | None = None):
        self.ckpt, self.config, self.sources = ckpt, ckpt.config, sources
        nothing = Recording(1, [[]], [], [], [], {}, torch.float32)
        self._frame = LocalFrame(nothing, ckpt, ShardPlan.from_config(ckpt.config, 1), torch.float32)
        self._rotary = Rotary(ckpt.config.hf)

    def module(self, point: str, layer: int | None) -> str:
        """The checkpoint's name of the module behind a point."""
        return self._frame.module("" if layer is None else f"layers.{layer}.", point)

    def weight(self, name: str) -> torch.Tensor | None:
        """A tensor of the checkpoint; None if this model has none of that name."""
        weights = self._frame.weights
        if name == HEAD and self.config.tie_word_embeddings:
            name = EMBEDDING
        if name not in weights:
            return None
        layer = name.split(".")[:3]
        if name not in weights.kept:
            weights.kept = {kept: tensor for kept, tensor in weights.kept.items() if kept.split(".")[:3] == layer}
        return weights[name]

    def of(self, name: str, x: torch.Tensor, **changed) -> torch.Tensor:
        """The point that a matrix makes of ``x``, or ``mlp_act`` from the second norm's output; ``changed``: as for
        :meth:`tplab.align.operations.Operations.make`."""
        at, _, point = name.rpartition(".")
        if point == "logits":
            return self._frame.finished(x.float() @ self.weight(HEAD).T)
        if point == "mlp_act":
            return activation(self.config.hidden_act)(self.of(f"{at}.gate", x)) * self.of(f"{at}.up", x)
        self.weight(f"{self.module(point, layer_of(name))}.weight")
        return self._frame.make(name, 0, x=x.float(), **changed)

    def _tables(self, *kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin at the sampled rows' positions, in layers of this type."""
        positions = [position for _, position in self.sources.places[:SAMPLE]]
        return self._rotary(torch.empty(0), torch.tensor(positions), [len(positions)], *kind)

    def turned(self, at: str, x: torch.Tensor) -> torch.Tensor:
        """``x [sampled rows, heads, head_dim]`` rotated as in a layer."""
        if not self.config.rotates[layer_of(at)]:
            return x.float()
        return rotated(self.config.model_type, x.float(), *self._tables(*self._frame.rope_type(at)))

    # Expected values of a source.

    def input_of(self, source: Source, name: str, rank: int) -> torch.Tensor | None:
        """The sampled rows of the input of a source's module; else of the point ``name``."""
        found = (self.sources.rows(one, rank, FEW) for one in self.sources.before(source, name, rank))
        return next((rows for rows in found if rows is not None), None)

    def own(self, name: str, source: Source, rank: int) -> torch.Tensor | None:
        """``[sampled rows, all items, …]`` of a point from the rank's own input; None if it has no such input."""
        at, _, point = name.rpartition(".")
        if name == "logits":
            return self._head(source, rank)
        x = self.input_of(source, f"{at}.{_MADE_OF[point]}", rank) if point in _MADE_OF else None
        return None if x is None else self.of(name, x)

    @cached_property
    def _trace(self) -> dict[str, torch.Tensor]:
        places, found = self.sources.places[:SAMPLE], {}
        for number in dict.fromkeys(number for number, _ in places):
            positions = [position for sequence, position in places if sequence == number]
            ids = self.sources.texts.ids[number][:max(positions) + 1]
            for name, tensor in hf_trace(hf_model(self.ckpt, torch.float32), ids).items():
                found.setdefault(name, []).append(tensor[positions])
        return {name: torch.cat(tensors) for name, tensors in found.items()}

    def _head(self, source: Source, rank: int) -> torch.Tensor | None:
        """The logits that a rank should have, from its head's input at the same places."""
        places = self._places(source, rank)
        for before in self.sources.before(source, "norm", rank):
            there, x = self.sources.logits(before, rank) or ([], torch.empty(0, 0))
            row_of = {place: row for row, place in enumerate(there)}
            if row_of.keys() >= {*places} and x.shape[1] == self.config.hidden_size:
                return self.of("logits", x[[row_of[place] for place in places]])
        return None

    def _places(self, source: Source, rank: int) -> list[tuple[int, int]]:
        """Of the sampled rows of logits."""
        return self.sources.logits(source, rank, SHAPE)[0][:SAMPLE]

    def reference(self, name: str, source: Source | None = None, rank: int = 0) -> torch.Tensor | None:
        """The same by Hugging Face, with a dimension for heads; None if its trace has no such point. The rows of logits
        are those of ``source`` on ``rank``."""
        if name == "logits":
            places, ids = self._places(source, rank), self.sources.texts.ids
            last = dict(sorted(places))  # sorted: of each text the last position stays
            found = {number: hf_trace(hf_model(self.ckpt, torch.float32), ids[number][:position + 1], [name])[name]
                     for number, position in last.items()}
            return torch.stack([found[number][position] for number, position in places])
        tensor = self._trace.get(name)
        if tensor is not None and name.endswith(".attn"):
            tensor = tensor.view(len(tensor), -1, self.config.head_dim)
        return tensor

    def are_tables(self, source: Source) -> bool:
        """Whether a source holds cos and sin, or the input of the module that makes them: by its name, or because its
        values are Hugging Face's for the recorded positions."""
        if role_of(*split_name(source.name)) == "rotary" or source.path.partition(".")[0] in _TABLE_NAMES:
            return True
        dim, rank = self.config.head_dim, self.sources.complete(source)[0]
        shape = self.sources.rows(source, rank, SHAPE)
        if shape is None or shape.shape[1] not in (dim, dim // 2):
            return False
        rows, positions = self.sources.rows(source, rank, FEW).double(), {p for _, p in self.sources.places[:SAMPLE]}
        tables = (table[0, :, :rows.shape[1]] for kind in self.config.ropes
                  for table in self._tables(*[kind] * bool(kind)))
        return len(positions) > 1 and any(table.shape == rows.shape and (rows - table).abs().max() <= _CLOSE
                                          for table in tables)
