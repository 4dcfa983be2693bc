"""A checkpoint's tensor as an exercise hands it out: nothing is read until it is sliced, and then it is counted."""

import torch


class Source:
    """``shape``, ``dtype`` and exact slices, as a checkpoint's slices have them; ``read``: numbers read so far."""

    def __init__(self, data: torch.Tensor):
        self._data, self.shape, self.dtype, self.read = data, tuple(data.shape), data.dtype, 0

    def __getitem__(self, index) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > len(self.shape):
            raise IndexError(f"this source has {len(self.shape)} dimension{'s' * (len(self.shape) > 1)}, a bias has "
                             f"one; {len(parts)} slices were asked for")
        for dim, (part, size) in enumerate(zip(parts, self.shape)):
            if not isinstance(part, slice) or part.step not in (None, 1):
                raise IndexError(f"a source is read by slices a:b, not by {part!r}")
            start, stop = (0 if part.start is None else part.start), (size if part.stop is None else part.stop)
            if not 0 <= start <= stop <= size:
                raise IndexError(f"source[{start}:{stop}] along dim {dim} is outside 0:{size}")
        piece = self._data[parts].clone()
        self.read += piece.numel()
        return piece

    def __getattr__(self, name: str):
        raise AttributeError(f"a source has .shape, .dtype and slices a:b, and no .{name}: nothing of it is read yet")

    def __deepcopy__(self, memo):
        return self  # it cannot be written into, and counts for all
