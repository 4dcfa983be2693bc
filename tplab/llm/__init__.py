"""The front door: text in, text out. ``LLM``, requests, sampling parameters, outputs, streaming."""

from importlib import import_module

_HOMES = {
    "LLM": "llm", "SamplingParams": "sampling_params", "RequestOutput": "outputs", "CompletionOutput": "outputs",
    "Logprob": "outputs", "StreamChunk": "outputs", "open_llm": "torchrun",
}
__all__ = list(_HOMES)


def __getattr__(name):
    # Lazy: whoever wants the parameters alone does not load the ranks.
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"tplab.llm.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'tplab.llm' has no attribute {name!r}")
