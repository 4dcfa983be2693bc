"""The front door: text in, text out. ``LLM``, requests, sampling parameters, outputs, streaming."""

from tplab import lazy

_HOMES = {"LLM": ".llm", "SamplingParams": ".sampling_params", "RequestOutput": ".outputs",
          "CompletionOutput": ".outputs", "Logprob": ".outputs", "StreamChunk": ".outputs", "open_llm": ".torchrun"}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)
