"""Checkpoints: from a name to slices of safetensors whose headers were checked.

``open_checkpoint(name)`` finds and validates a folder; ``ckpt.reader()`` reads slices on a rank;
``fetch("smollm2")`` makes a folder out of a published GGUF. ``$TPLAB_CACHE`` moves the cache.
"""

from .checkpoint import Checkpoint, open_checkpoint
from .config import ModelConfig
from .errors import CheckpointError
from .fetching import fetch
from .headers import TensorInfo
from .names import cache_dir
from .reader import CheckpointReader, TensorSlice

__all__ = ["Checkpoint", "CheckpointError", "CheckpointReader", "ModelConfig", "TensorInfo", "TensorSlice", "cache_dir",
           "fetch", "open_checkpoint"]
