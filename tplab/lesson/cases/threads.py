"""How many threads a case's judge computes on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SMALL = 1 << 20  # weights of a matrix; smollm2's largest have 885,000


@contextmanager
def one_thread_if_small(config) -> Iterator[None]:
    """Torch on one thread while Hugging Face and the diagnosis run over a small model.

    Their thousands of small products gain nothing from a second thread (SmolLM2, two cases: 60 s with one, 68 s with
    two, and twice the processor time), and on a busy machine each of them waits until both have a core.
    """
    before = torch.get_num_threads()
    if config.hidden_size * config.intermediate_size < _SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
