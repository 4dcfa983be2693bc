"""The values that a rank should have at a few rows: from its own recorded inputs, or by Hugging Face's trace."""

from functools import cached_property

import torch
from torch.nn import functional as F

from tplab.align.check.names import role_of, split_name
from tplab.align.check.sources import FEW, SAMPLE, SHAPE, Source, Sources
from tplab.align.points import POINTS, as_index, layer_of, layout
from tplab.align.reference import hf_model, hf_trace
from tplab.align.tensors import Weights
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import EMBEDDING, EXPERTS, HEAD
from tplab.model.rope import Rotary, rotate

TABLES = "cos and sin of the rotation, which are no points by themselves"
_TABLE_NAMES = {"position_embeddings", "rotary_pos_emb", "freqs_cis", "freqs", "cos", "sin", "cos_sin", "rope_cache"}
_CLOSE = 2 ** -7  # bfloat16's rounding of a cosine
_MADE_OF = {**dict.fromkeys("qkv", "input_norm"), **dict.fromkeys(("gate", "up", "mlp_act", "router_logits"),
                                                                  "post_norm")}


class Expected:
    """What Hugging Face's own modules make of recorded rows, for the whole model, in float32; and Hugging Face's points
    at the sampled rows. Weights of one layer are kept at a time."""

    def __init__(self, ckpt: Checkpoint, sources: Sources | None = None):
        self.ckpt, self.config, self.sources = ckpt, ckpt.config, sources
        self._weights, self._rotary = Weights(ckpt, torch.float32, torch.float32), Rotary(ckpt.config.hf)

    def module(self, point: str, layer: int | None) -> str:
        """The checkpoint's name of the module behind a point."""
        name = EXPERTS[self.config.experts.stored][0] if point == "router_logits" else POINTS[point].module
        return name if layer is None else f"model.layers.{layer}.{dict(self.config.norms).get(name, name)}"

    def weight(self, name: str) -> torch.Tensor | None:
        """A tensor of the checkpoint; None if this model has none of that name."""
        if name == HEAD and self.config.tie_word_embeddings:
            name = EMBEDDING
        if name not in self._weights:
            return None
        layer, kept = name.split(".")[:3], self._weights.kept
        if name not in kept:
            self._weights.kept = {other: x for other, x in kept.items() if other.split(".")[:3] == layer}
        return self._weights[name]

    def of(self, name: str, x: torch.Tensor, features=None, bias: bool = True) -> torch.Tensor:
        """The point that a module makes of ``x``, or ``mlp_act`` from the second norm's output; ``features``: of a
        row-parallel matrix, the columns that ``x`` has."""
        at, _, point = name.rpartition(".")
        layer, x = layer_of(name), x.float()
        if POINTS[point].op == "norm" or point == "moe_partial":
            inner = hf_model(self.ckpt, torch.float32).get_submodule(
                f"model.layers.{layer}.mlp" if point == "moe_partial" else self.module(point, layer))
            with torch.inference_mode():
                found = inner(x[None] if point == "moe_partial" else x)
            return (found[0] if isinstance(found, tuple) else found).reshape(x.shape)
        if point == "mlp_act":
            from transformers.activations import ACT2FN

            return ACT2FN[self.config.hidden_act](self.of(f"{at}.gate", x)) * self.of(f"{at}.up", x)
        module = self.module(point, layer)
        weight, added = self.weight(f"{module}.weight"), self.weight(f"{module}.bias") if bias else None
        y = F.linear(x.flatten(1), weight if features is None else weight[:, as_index(features)], added)
        if point == "logits":
            y, cap = y / self.config.logits_scaling, self.config.final_logit_softcapping
            return torch.tanh(y / cap) * cap if cap else y
        return y.unflatten(1, (-1, self.config.head_dim)) if "heads" in layout(point) else y

    def _tables(self, *kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin at the sampled rows' positions, in layers of this type."""
        positions = [position for _, position in self.sources.places[:SAMPLE]]
        return self._rotary(torch.empty(0), torch.tensor(positions), [len(positions)], *kind)

    def turned(self, at: str, x: torch.Tensor) -> torch.Tensor:
        """``x [sampled rows, heads, head_dim]`` rotated as in a layer."""
        layer, x = layer_of(at), x.float().transpose(0, 1)[None]
        if self.config.rotates[layer]:
            x = rotate(self.config.model_type)(x, x[:, :0], *self._tables(*self.config.rope_layer_types[layer:][:1]))[0]
        return x[0].transpose(0, 1)

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
