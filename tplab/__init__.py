"""tplab: a Jupyter-first teaching lab on tensor-parallel LLM inference.

The rooms, from the ground up: ``ranks`` (processes and collectives), ``checkpoint``, ``shard``, ``model``,
``cache``, ``engine``, ``align``, ``faults``, ``show``. A room imports only from rooms below it.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "TplabError": "tplab.errors",
    "RankPool": "tplab.ranks",
    "shared_pool": "tplab.ranks",
    "open_checkpoint": "tplab.checkpoint",
    "ShardPlan": "tplab.shard",
    "LLM": "tplab.engine",
    "SamplingParams": "tplab.engine",
}
__all__ = list(_HOMES)


def __getattr__(name):
    # Lazy, so that `import tplab` costs nothing: torch and transformers are loaded by the room that needs them.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tplab' has no attribute {name!r}")
