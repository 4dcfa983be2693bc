"""A guilty point of ranks that were made by hand, and what its hypotheses see of them."""

from types import SimpleNamespace as Some

import torch

from tplab.align.diagnose.case import Diagnosis

EPS = 1e-5
TOLERANCE = 6e-5
NEAR = 1 + 4 * TOLERANCE


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class HandCase:
    """A guilty point of hand-made ranks: ``values`` are what each has, by name; ``expected`` what the point should be.
    """

    def __init__(self, point, held, values, expected=None, layer="layers.1", has=True, logs=(), **config):
        self.point = self.op = point
        self.ops, self.layer, self.held, self.values, self.expected = (point,), layer, held, values, expected
        self.wrong_ranks, tp = tuple(range(len(held))), len(held)
        self.recording = Some(world_size=tp)
        self.report, self.tolerance = Some(op_logs=logs), TOLERANCE
        self.config = Some(**{"num_layers": 1, "rms_norm_eps": EPS, "hidden_size": 16, "qk_norm": False,
                              "tie_word_embeddings": False} | config)
        self.plan = Some(tensor_parallel_size=tp)
        self.first = Some(name=f"{layer}.{point}", spread=0.0)
        self.recorded, self.frame = has, Some(dtype=torch.float64)

    def has(self, name):
        return self.recorded

    def shard(self, name, rank):
        return self.held[rank] if name == self.point else self.values[rank][name]

    def shards(self, name):
        return [self.shard(name, rank) for rank in range(len(self.held))]

    def weight(self, name):
        return self.values[0][name]

    def ours(self, name):
        return torch.cat(self.held, 1)

    def reference(self, name):
        return torch.cat(self.expected, 1)

    def fits(self, tensor, guess):
        return bool(tensor.shape == guess.shape and (tensor - guess).abs().max() <= TOLERANCE * guess.abs().max())

    def diagnosis(self, fault, sentence, *lookalikes, **numbers):
        return Diagnosis(fault, sentence, self.first.name, numbers, lookalikes)


class At:
    """What a rank's ops see."""

    def __init__(self, case, rank):
        self.case, self.rank, self.frame = case, rank, case.frame

    def indices(self, name):
        return self.case.plan.ranks[self.rank].vocab

    def __call__(self, name):
        case = self.case
        return case.expected[self.rank] if name == case.point else case.values[self.rank][name]


def misfit(case, wrong, ranks=None):
    gaps = []
    for rank in case.wrong_ranks if ranks is None else ranks:
        guess = wrong(At(case, rank), case.op)
        gaps.append(((case.held[rank] - guess).abs().max() / guess.abs().max().clamp(min=1e-30)).item())
    return max(gaps)


def named(found):
    return None if found is None else found.fault or "no name"
