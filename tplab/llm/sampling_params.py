"""``SamplingParams``: how one request's tokens are chosen and when it ends."""

from dataclasses import dataclass, field

from tplab.checks import number, quoted, whole_number
from tplab.engine.errors import RequestError

# Divided by less, a logit could leave float64. At this temperature already a softmax gives all to the largest logit.
COLDEST = 1e-200


@dataclass(frozen=True)
class SamplingParams:
    """vLLM's names and meanings.

    Attributes:
        temperature: 0 (or less than 1e-200) takes the most probable token; a higher one makes other tokens more likely.
        top_k: only the ``k`` most probable tokens; 0 or -1 is all of them.
        top_p: only the most probable tokens that together reach this probability.
        min_p: only tokens at least this fraction as probable as the most probable one.
        max_tokens: at most so many new tokens; None: until the model's length is reached.
        stop: a text or texts that end the output; they are not part of it.
        stop_token_ids: token ids that end the output, beside the model's own end of text.
        ignore_eos: go on after the end-of-text token.
        seed: it alone determines the noise, whatever the batch and the number of ranks. So in float64 the text is the
            same for any batch and any number of ranks; in float32 too, unless two tokens' scores are within rounding of
            each other (1e-5). In bfloat16 partial sums are rounded to 8 bits, so another batch or another number of
            ranks can give another text. The same prompts on the same number of ranks give the same text in every dtype.
        logprobs: return the log probability of each token and of this many most probable ones.

    Raises:
        RequestError: a value of the wrong type or out of range, or values that contradict each other.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] = field(default_factory=tuple)
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self):
        self._make_plain("temperature", number, 0, 100)
        self._make_plain("top_k", whole_number, -1, 2**31)
        self._make_plain("top_p", number, 0, 1, above=True)
        self._make_plain("min_p", number, 0, 1)
        self._make_plain("max_tokens", whole_number, 1, 2**31, optional=True)
        self._make_plain("seed", whole_number, 0, 2**63 - 1, optional=True)
        self._make_plain("logprobs", whole_number, 0, 100, optional=True)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False, not {quoted(self.ignore_eos)}")
        object.__setattr__(self, "stop", self._texts())
        object.__setattr__(self, "stop_token_ids", self._ids())
        if self.temperature == 0:
            narrowed = {"top_k": self.top_k not in (-1, 0, 1), "top_p": self.top_p != 1, "min_p": self.min_p != 0}
            if any(narrowed.values()):
                names = " and ".join(name for name, is_set in narrowed.items() if is_set)
                raise RequestError(f"temperature 0 always takes the most probable token, which contradicts {names}; "
                                   f"leave {names} out, or give a temperature above 0")

    @property
    def greedy(self) -> bool:
        """Whether there is nothing to draw."""
        return self.temperature < COLDEST

    def _make_plain(self, name, kind, low, high, optional=False, above=False):
        """Replace numpy's numbers by Python's own: they are sent to the ranks as JSON."""
        value = getattr(self, name)
        if optional and value is None:
            return
        plain = kind(value, low, high)
        if plain is None or (above and plain == low):
            what = "a whole number" if kind is whole_number else "a number"
            begin = f"above {low} to" if above else f"from {low} up to"
            raise RequestError(f"{name} must be {what} {begin} {high}{' or None' if optional else ''}, "
                               f"not {quoted(value)}")
        object.__setattr__(self, name, plain)

    def _texts(self) -> tuple[str, ...]:
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop must be a text or a list of texts, none of them empty, not {quoted(self.stop)}")
        return tuple(stop)

    def _ids(self) -> tuple[int, ...]:
        ids = self.stop_token_ids
        plain = [n for i in ids if (n := whole_number(i, 0)) is not None] if isinstance(ids, list | tuple) else None
        if plain is None or len(plain) < len(ids):
            raise RequestError(f"stop_token_ids must be a list of token ids, not {quoted(ids)}")
        return tuple(plain)
