"""tplab: a Jupyter-first teaching lab on tensor-parallel LLM inference.

The rooms, from the ground up: ``ranks`` (collectives), ``pool`` (processes), ``checkpoint``, ``shard``, ``model``,
``cache``, ``engine`` (the core loop), ``llm`` (the front door), ``align``, ``faults``, ``fable``, ``bench``, ``show``,
``lesson``, ``lab``. A room imports only from rooms below it.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "TplabError": "tplab.errors",
    "RankPool": "tplab.pool",
    "shared_pool": "tplab.pool",
    "open_checkpoint": "tplab.checkpoint",
    "ShardPlan": "tplab.shard",
    "LLM": "tplab.llm",
    "SamplingParams": "tplab.llm",
    "load_ipython_extension": "tplab.pool.magic",
    "plan_svg": "tplab.show",
}
__all__ = [name for name in _HOMES if name not in ("load_ipython_extension", "plan_svg")]


def __getattr__(name):
    # Lazy, so that `import tplab` costs nothing: torch and transformers are loaded by the room that needs them.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tplab' has no attribute {name!r}")
