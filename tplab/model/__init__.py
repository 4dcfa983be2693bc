"""The mathematics of one forward pass, on one rank; nothing about processes, caches or scheduling."""

from tplab.model.attention import AttentionBatch, AttentionContext, NoCache, causal_mask
from tplab.model.decoder import TensorParallelCausalLM
from tplab.model.loader import LoadStats, load_model

__all__ = ["AttentionBatch", "AttentionContext", "LoadStats", "NoCache", "TensorParallelCausalLM", "causal_mask",
           "load_model"]
