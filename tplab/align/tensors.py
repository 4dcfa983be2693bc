"""``Weights``: the checkpoint's tensors by name, as a run has them."""

import torch

from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import read_part, tensor_parts


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

    def drop(self) -> None:
        self.kept.clear()
        self.reader.close()
        self.reader = self.ckpt.reader()
