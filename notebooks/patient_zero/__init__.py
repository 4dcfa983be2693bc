"""Tensor-parallel inference for Qwen2-type checkpoints, vLLM-style: weights are sharded during loading.

    torchrun --nproc-per-node 2 -m patient_zero FOLDER "Once upon a time"

This is the engine of notebook 09, as a stranger would have written it. It is wrong on purpose, in fifteen places; the
notebook cures them without touching these files. It knows nothing of the lab.
"""

from patient_zero.model import TensorParallelModel, load

__all__ = ["TensorParallelModel", "load"]
