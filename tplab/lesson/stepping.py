"""One sequence of an engine, a step at a time: what ``my_generate`` of notebook 06 is given."""

from collections.abc import Iterable

from tplab.lesson.limit import progress
from tplab.llm.llm import LLM
from tplab.llm.sampling_params import SamplingParams


def whole_numbers(what: str, values: Iterable) -> list[int]:
    """``values`` as a list of ints; ValueError names ``what`` if they are none."""
    try:
        found = [int(value) for value in values]
    except TypeError:
        raise ValueError(f"step takes two lists, {what} is {type(values).__name__}") from None
    return found


class Stepper:
    """Called with new token ids and their positions: the engine computes them, and draws the token that follows.

    ``count``: how many tokens will be asked for; with the last one the sequence ends and its blocks are free.
    """

    def __init__(self, llm: LLM, count: int):
        self.llm, self.count, self.known = llm, count, []

    def __deepcopy__(self, memo):
        return self

    @property
    def computed(self) -> int:
        """Tokens that the engine has computed so far, of all its sequences."""
        return sum(sum(record.tokens.values()) for record in self.llm.scheduler.history)

    def __call__(self, new_ids, positions) -> int:
        """The token behind ``new_ids``. ValueError if they are not the ones that come next."""
        new_ids, positions = whole_numbers("new_ids", new_ids), whole_numbers("positions", positions)
        begun = bool(self.known)
        expected = [len(self.known) - 1] if begun else list(range(len(new_ids)))
        if positions != expected or begun and new_ids != self.known[-1:]:
            raise ValueError(f"step was asked for tokens {new_ids[:4]} at positions {positions[:4]}; next is position "
                             f"{expected[0]}")
        if not begun:
            self.known = list(new_ids)
            self.llm.add_request(new_ids, SamplingParams(temperature=0, max_tokens=self.count, ignore_eos=True))
        while True:
            progress()
            for output in self.llm.step():
                self.known.append(output.outputs[0].token_ids[-1])
                return self.known[-1]
