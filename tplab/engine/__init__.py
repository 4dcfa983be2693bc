"""From prompts to text: sequences, scheduler, sampler, ``LLM``."""

from importlib import import_module

_HOMES = {
    "LLM": "llm", "SamplingParams": "sampling_params", "Engine": "core", "Scheduler": "scheduler",
    "Sequence": "sequence", "RequestOutput": "outputs", "CompletionOutput": "outputs", "RequestMetrics": "outputs",
    "Logprob": "outputs", "StreamChunk": "outputs", "EngineError": "errors", "RequestError": "errors",
    "GenerationError": "errors", "StrictError": "errors", "open_llm": "torchrun",
}
__all__ = list(_HOMES)


def __getattr__(name):
    # Lazy: a rank that only steps does not load the parent's side, nor the other way round.
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"tplab.engine.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'tplab.engine' has no attribute {name!r}")
