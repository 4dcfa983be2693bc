"""The core loop, in token ids: sequences, scheduler, step, runner, sampler."""

from importlib import import_module

_HOMES = {
    "Engine": "core", "EngineConfig": "config", "Scheduler": "scheduler", "Sequence": "sequence",
    "RequestMetrics": "sequence",
    "EngineError": "errors", "RequestError": "errors", "GenerationError": "errors", "StrictError": "errors",
}
__all__ = list(_HOMES)


def __getattr__(name):
    # Lazy: a rank that only steps does not load the parent's side, nor the other way round.
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"tplab.engine.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'tplab.engine' has no attribute {name!r}")
