"""tplab: a small library for tensor-parallel LLM inference, measured against Hugging Face.

The rooms, from the ground up: ``checkpoint``, ``ranks`` (collectives), ``pool`` (processes), ``shard``, ``model``,
``cache``, ``engine`` (the core loop), ``fast`` and ``invariant`` (other ways to compute a step), ``llm`` (the public
class), ``align``, ``faults``, ``show``. A room imports from rooms below it. The course that stands on it is the package
``course`` beside the notebooks; nothing here imports it.
"""

from importlib import import_module

__version__ = "1.0.0"


def lazy(package: str, homes: dict[str, str]):
    """``__getattr__`` of a package that loads each name from its home, ``{name: module}``, on first use.

    So ``import tplab`` costs nothing: torch and transformers are loaded by the room that needs them.
    """
    def load(name):
        if name in homes:
            return getattr(import_module(homes[name], package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}; there are {', '.join(homes)}")

    return load


_HOMES = {"TplabError": ".errors", "RankPool": ".pool", "shared_pool": ".pool", "open_checkpoint": ".checkpoint",
          "ShardPlan": ".shard", "LLM": ".llm", "SamplingParams": ".llm"}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES | {"load_ipython_extension": ".pool.magic"})
