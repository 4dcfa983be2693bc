"""Recorded weights, on tensors made by hand."""

from types import SimpleNamespace as Some

import pytest
import torch

from tplab.align.check import weights as parameters
from tplab.align.recording import Parameter
from tplab.checkpoint.layout import EMBEDDING, HEAD

F32, BF16 = torch.float32, torch.bfloat16
THIRDS = torch.arange(12.0).reshape(4, 3) / 3


# Recorded weights.

@pytest.fixture
def judged(monkeypatch):
    def of(*ranks, dtype=F32, tensors=None):
        file = {"w": THIRDS, EMBEDDING: THIRDS + 1} | (tensors or {})
        monkeypatch.setattr(parameters, "Weights", lambda ckpt, run, dtype: Some(
            parts=file, raw=lambda name: file[name].to(run)))
        return parameters.wrong_parameters(Some(parameters=list(ranks), dtype=dtype), None)
    return of


@pytest.mark.parametrize("held, what", [
    (Parameter(THIRDS), None), (Parameter(THIRDS[1:3], 0, (1, 2)), None),
    (Parameter(THIRDS[:, [2, 0]], 1, (2, 0)), None),
    (Parameter(THIRDS[[3, 1]], 0, (1, 3)), "100% of its numbers are not the checkpoint's"),
    (Parameter(THIRDS + torch.tensor([0, 0, 1e-6])), "33% of its numbers are not the checkpoint's"),
    (Parameter(THIRDS[:, :2], 0, range(4)), "shape [4, 2], not [4, 3]"),
    (Parameter(THIRDS[:3], 0, (0, 1)), "shape [3, 3], not [2, 3]"), (Parameter(THIRDS.T), "shape [3, 4], not [4, 3]")])
def test_a_weight_is_the_checkpoints_bit_for_bit(judged, held, what):
    assert judged({"w": held}) == ({"rank 0: w": what} if what else {})
    assert judged(None, {}, {"w": held}) == ({"rank 2: w": what} if what else {}), "others recorded none"


def test_every_rank_and_tensor_is_named(judged):
    wrong = Parameter(THIRDS * 2)
    assert list(judged({"w": wrong, EMBEDDING: wrong}, {"w": Parameter(THIRDS)}, {"w": wrong})) == [
        "rank 0: w", f"rank 0: {EMBEDDING}", "rank 2: w"]


@pytest.mark.parametrize("dtype, held, right", [
    (BF16, THIRDS.to(BF16), True), (BF16, THIRDS, True),  # as the file has it, in a bfloat16 engine
    (BF16, THIRDS.to(BF16).float(), True),  # rounded before
    (BF16, THIRDS.to(torch.float16), True), (F32, THIRDS.to(BF16), True), (F32, THIRDS.to(BF16).float(), False),
    (BF16, THIRDS.to(torch.float16).float(), False)])
def test_a_weight_may_stand_in_another_dtype(judged, dtype, held, right):
    assert bool(judged({"w": Parameter(held)}, dtype=dtype)) is not right


def test_a_tied_head_is_the_embedding_and_an_own_one_is_not(judged):
    assert not judged({HEAD: Parameter(THIRDS + 1)}) and judged({HEAD: Parameter(THIRDS)})
    assert judged({HEAD: Parameter(THIRDS + 1)}, tensors={HEAD: THIRDS})
