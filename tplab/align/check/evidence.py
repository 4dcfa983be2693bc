"""What a rank should have computed from its own recorded inputs, for a few rows: the evidence for layouts."""

from functools import cached_property

import torch

from tplab.align.arithmetic import activation, rotated
from tplab.align.check.names import place_of, role_of
from tplab.align.check.sources import FEW, SAMPLE, SHAPE
from tplab.align.local import LocalFrame
from tplab.align.points import POINTS
from tplab.align.recording import Recording
from tplab.align.reference import hf_model, hf_trace
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import EMBEDDING, HEAD
from tplab.model.rope import Rotary
from tplab.shard import ShardPlan

TABLES = "cos and sin of the rotation, which are no points by themselves"
_TABLE_NAMES = {"position_embeddings", "rotary_pos_emb", "freqs_cis", "freqs", "cos", "sin", "cos_sin", "rope_cache"}
_CLOSE = 2 ** -7  # bfloat16's rounding of a cosine


class Evidence:
    """The operations of :mod:`tplab.align.operations` on recorded rows, whole, in float32. Weights of one layer are
    kept at a time."""

    def __init__(self, ckpt: Checkpoint):
        self.config = ckpt.config
        nothing = Recording(1, [[]], [], [], [], {}, torch.float32)
        self._frame = LocalFrame(nothing, ckpt, ShardPlan.from_config(ckpt.config, 1), torch.float32)

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

    def of(self, layer: int, point: str, x: torch.Tensor) -> torch.Tensor:
        """A product at a point of a layer, or ``mlp_act`` of the second norm's output; ``x`` is what goes in."""
        if point == "mlp_act":
            return activation(self.config.hidden_act)(self.of(layer, "gate", x)) * self.of(layer, "up", x)
        self.weight(f"model.layers.{layer}.{POINTS[point].module}.weight")
        return self._frame.make(f"layers.{layer}.{point}", 0, x=x.float())

    def rope(self, x: torch.Tensor, positions: list[int]) -> torch.Tensor:
        """``x [rows, heads, head_dim]`` rotated to these positions."""
        tables = Rotary(self.config.hf)(torch.empty(0), torch.tensor(positions), [len(positions)])
        return rotated(self.config.model_type, x.float(), *tables)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, vocabulary]`` of the last norm's output."""
        return x.float() @ self.weight(HEAD).T

    def summand(self, layer: int, partial: str, x: torch.Tensor, columns: list[int]) -> torch.Tensor:
        """A rank's part of a sum: its ``columns`` of the matrix times its own input, without a bias."""
        self.weight(f"model.layers.{layer}.{POINTS[partial].module}.weight")
        return self._frame.make(f"layers.{layer}.{partial}", 0, x=x.float(), features=columns, bias=0.0)

    def bias(self, layer: int, partial: str) -> torch.Tensor | None:
        """The bias of a row-parallel layer."""
        return self.weight(f"model.layers.{layer}.{POINTS[partial].module}.bias")


class Reference:
    """Hugging Face's trace points at the sampled rows: where no input of the rank's own says what a tensor should be.
    """

    def __init__(self, ckpt: Checkpoint, sources):
        self.ckpt, self.sources = ckpt, sources

    @cached_property
    def _trace(self) -> dict[str, torch.Tensor]:
        places, model = self.sources.places[:SAMPLE], hf_model(self.ckpt, torch.float32)
        found: dict[str, list[torch.Tensor]] = {}
        for number in dict.fromkeys(number for number, _ in places):
            positions = [position for sequence, position in places if sequence == number]
            for name, tensor in hf_trace(model, self.sources.texts.ids[number][:max(positions) + 1]).items():
                found.setdefault(name, []).append(tensor[positions])
        return {name: torch.cat(tensors) for name, tensors in found.items()}

    def point(self, name: str) -> torch.Tensor | None:
        """``[sampled rows, …]``, heads apart; None if Hugging Face's trace has no such point."""
        tensor = self._trace.get(name)
        if tensor is not None and name.endswith(".attn"):
            tensor = tensor.view(len(tensor), -1, self.ckpt.config.head_dim)
        return tensor

    def logits(self, places: list[tuple[int, int]]) -> torch.Tensor | None:
        """``[places, vocabulary]``."""
        model, ids, found = hf_model(self.ckpt, torch.float32), self.sources.texts.ids, {}
        for number in {number for number, _ in places}:
            last = max(position for sequence, position in places if sequence == number)
            found[number] = hf_trace(model, ids[number][:last + 1])["logits"]
        return torch.stack([found[number][position] for number, position in places])


class Tables:
    """Knows cos and sin: by their names, or because they are Hugging Face's for the recorded positions."""

    def __init__(self, sources, config):
        self.sources, self.head_dim = sources, config.head_dim
        self._rotary = Rotary(config.hf)

    def known(self, source) -> bool:
        """Whether what a source holds are tables of the rotation, or what goes into the module that makes them."""
        layer, rest = place_of(source.name)
        if role_of(layer, rest) == "rotary" or source.path.partition(".")[0] in _TABLE_NAMES:
            return True
        return any(self._equal(source, rank) for rank in self.sources.complete(source)[:1])

    def _equal(self, source, rank: int) -> bool:
        shape = self.sources.rows(source, rank, SHAPE)
        if shape is None or shape.dim() != 2 or shape.shape[1] not in (self.head_dim, self.head_dim // 2):
            return False
        rows = self.sources.rows(source, rank, FEW).double()
        places = self.sources.places[:len(rows)]
        tables = self._rotary(torch.empty(0), torch.tensor([position for _, position in places]), [len(places)])
        return len({position for _, position in places}) > 1 and any(
            (rows - table[0, :, :rows.shape[1]]).abs().max() <= _CLOSE for table in tables)
