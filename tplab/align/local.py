"""The local frame: the expected value of every point, from the engine's own values before it.

Each module is computed again, with Hugging Face's arithmetic, from its own recorded inputs and the checkpoint's
weights. A point that was not recorded is computed from those before it, so any selection of points is enough. A module
is not guilty of an error in its inputs.
"""

from collections.abc import Sequence

import torch

from tplab.align.operations import Operations, fixed
from tplab.align.points import layout
from tplab.align.recording import Recording, Shard
from tplab.align.reference import hf_model, hf_trace
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import read_part, tensor_parts
from tplab.shard import ShardPlan

_ALIKE = {"q_heads": ("q_rope", "q_norm", "q", "attn"), "kv_heads": ("k_rope", "k_norm", "k", "v"),
          "mlp": ("mlp_act", "gate", "up"), "vocab": ("logits",)}


class Weights:
    """The checkpoint's tensors as a run in ``run_dtype`` has them, in another dtype; kept until :meth:`drop`."""

    def __init__(self, ckpt: Checkpoint, run_dtype: torch.dtype, dtype: torch.dtype):
        self.ckpt, self.run_dtype, self.dtype = ckpt, run_dtype, dtype
        self.parts = tensor_parts(ckpt.config, ckpt.tensors)
        self.kept: dict[str, torch.Tensor] = {}
        self.reader = ckpt.reader()

    def __contains__(self, name: str) -> bool:
        return name in self.parts

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.kept:
            self.kept[name] = self.raw(name).to(self.dtype)
        return self.kept[name]

    def raw(self, name: str) -> torch.Tensor:
        """The tensor in the run's dtype, not kept."""
        return read_part(self.parts[name], self.reader).to(self.run_dtype)

    def scales(self, name: str) -> torch.Tensor | None:
        """The scale of each number of a quantised tensor; None for others."""
        part = self.parts[name]
        scale = self.ckpt.tensors[part.tensor].scale
        if scale is None or part.shape != self.ckpt.tensors[part.tensor].shape:
            return None
        return self.reader.scales_of(part.tensor).to(self.dtype)

    def drop(self) -> None:
        self.kept.clear()
        self.reader.close()
        self.reader = self.ckpt.reader()


class LocalFrame(Operations):
    """Values and expectations of one recording, per rank, in ``dtype``.

    Call :meth:`enter` for each layer, in the order of the forward pass, before asking for its points. It forgets the
    layers before, except for the last output.
    """

    def __init__(self, recording: Recording, ckpt: Checkpoint, plan: ShardPlan, dtype: torch.dtype = torch.float64):
        self.recording, self.config, self.plan, self.dtype = recording, ckpt.config, plan, dtype
        self.weights = Weights(ckpt, recording.dtype, dtype)
        self.ranks = range(recording.world_size)
        self.positions = torch.tensor([position for _, position in recording.places], dtype=torch.long)
        self._values: dict[tuple[str, int], torch.Tensor] = {}
        self._made_of: dict[tuple[str, int], set[tuple[str, int]]] = {}  # value → those that were asked for to make it
        self._asked: set[tuple[str, int]] = set()  # by the value that is being made
        self._fixed: dict[tuple, object] = {}
        self._once: dict[tuple, tuple] = {}
        self._hf: dict[int, dict[str, torch.Tensor]] = {}
        self._tables: dict[tuple[str, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.ckpt = ckpt

    # Shards.

    def shard(self, name: str, rank: int) -> Shard | None:
        """A point's recorded shard on a rank."""
        return self.recording.points.get(name, [None] * len(self.ranks))[rank]

    @fixed
    def seen(self, name: str) -> bool:
        """Whether a point was recorded on any rank."""
        return any(self.recording.points.get(name, ()))

    @fixed
    def indices(self, name: str, rank: int) -> Sequence[int]:
        """The global heads, columns or vocabulary rows that a rank holds of a point: as recorded at this point or at
        another point of the layer with the same layout, else by the plan."""
        at, _, point = name.rpartition(".")
        how = layout(name)
        alike = [point, *(p for p in _ALIKE.get(how, ()) if p != point)]
        for shard in (self.shard(f"{at}.{p}".lstrip("."), rank) for p in alike):
            if shard is not None and shard.kind == how:
                return shard.indices
        return getattr(self.plan.ranks[rank], how)

    def holders(self, name: str) -> Sequence[int]:
        """The ranks that hold the layer of a point."""
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        return self.recording.holders.get(int(layer), self.ranks) if layer else self.ranks

    # Values.

    def value(self, name: str, rank: int) -> torch.Tensor:
        """The engine's value at a point: recorded, or computed from its values before it."""
        key = name, rank
        self._asked.add(key)
        if key not in self._values:
            outer, self._asked = self._asked, set()
            self._values[key], self._made_of[key] = self._value(name, rank), self._asked
            self._asked = outer
        return self._values[key]

    def _value(self, name: str, rank: int) -> torch.Tensor:
        if not self.seen(name):
            return self.expected(name, rank)
        held = self.recording.points[name]
        if layout(name) == "replicated":
            if held[rank] is None:  # a missing rank is assumed to hold the others' value
                return self.value(name, next(r for r in self.ranks if held[r] is not None))
            for r in range(rank if held[rank] is not None else 0):  # the same bits are one tensor, judged once
                if held[r] is not None and (held[r] is held[rank] or torch.equal(held[r].tensor, held[rank].tensor)):
                    return self.value(name, r)
        return self.expected(name, rank) if held[rank] is None else held[rank].tensor.to(self.dtype)

    def parts_of(self, name: str, rank: int, wanted: Sequence[int]) -> torch.Tensor:
        """The values of these heads or columns, ``[rows, len(wanted), …]``: this rank's own, else another rank's; NaN
        if no rank holds them."""
        own = self.indices(name, rank)
        if tuple(own) == tuple(wanted):
            return self.value(name, rank)
        where = {index: (r, i) for r in (*reversed(self.holders(name)), rank)
                 for i, index in enumerate(self.indices(name, r))}
        nothing = torch.full_like(self.value(name, rank)[:, :1], float("nan")).squeeze(1)
        found = ((self.value(name, where[index][0])[:, where[index][1]] if index in where else nothing)
                 for index in wanted)
        return torch.stack(list(found), 1)

    def expected(self, name: str, rank: int) -> torch.Tensor:
        """The right value of a point on a rank, from this rank's own values before it."""
        return self.make(name, rank)

    def enter(self, layer: int) -> None:
        """Forget the layers before ``layer``, except for its input; the end of the model is one more layer."""
        name = f"layers.{layer - 1}.output" if layer else "embed"
        start = layer
        while start and not any(self.recording.points.get(f"layers.{start - 1}.output", ())) \
                and (f"layers.{start - 1}.output", 0) not in self._values:
            start -= 1
        for i in range(start, layer - 1):  # one after the other, not one inside the other
            for rank in self.ranks:
                self.value(f"layers.{i}.output", rank)
            self._forget(f"layers.{i}.output")
        for rank in self.ranks:
            self.value(name, rank)
        self._forget(name)

    def _forget(self, but: str) -> None:
        self._values = {key: value for key, value in self._values.items() if key[0] == but}
        self._made_of, self._asked = {}, set()
        self._once.clear()
        self.weights.drop()

    def _shared(self, name: str, make, *inputs: torch.Tensor) -> torch.Tensor:
        """``make(*inputs)``, computed once for ranks with the same input objects."""
        key = name, *map(id, inputs)
        if key not in self._once:
            self._once[key] = make(*inputs), inputs  # the inputs are kept, so that no id is used again
        return self._once[key][0]

    def _hf_points(self, number: int) -> dict[str, torch.Tensor]:
        """Hugging Face's keys and values of one sequence, all layers."""
        if number not in self._hf:
            trace = hf_trace(hf_model(self.ckpt, self.recording.dtype), self.recording.ids[number])
            self._hf[number] = {name: x for name, x in trace.items() if name.endswith((".k_rope", ".v"))}
        return self._hf[number]
