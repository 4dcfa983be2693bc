"""How many threads a case's judge computes on."""

from contextlib import AbstractContextManager

import torch

from tplab.kernels.product import torch_threads

_SMALL = 1 << 20  # weights of a matrix; smollm2's largest have 885,000


def one_thread_if_small(config) -> AbstractContextManager[None]:
    """Torch on one thread while Hugging Face and the diagnosis run over a small model.

    Their thousands of small products gain nothing from a second thread (SmolLM2, two cases: 60 s with one, 68 s with
    two, and twice the processor time), and on a busy machine each of them waits until both have a core.
    """
    small = config.hidden_size * config.intermediate_size < _SMALL
    return torch_threads(1 if small else torch.get_num_threads())
