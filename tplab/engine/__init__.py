"""The core loop, in token ids: configuration, sequences, scheduler, step, runner, sampler."""

from tplab import lazy

_HOMES = {"Engine": ".core", "EngineConfig": ".config", "Scheduler": ".scheduler", "Sequence": ".sequence",
          "RequestMetrics": ".sequence", "EngineError": ".errors", "RequestError": ".errors",
          "GenerationError": ".errors", "StrictError": ".errors"}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)
