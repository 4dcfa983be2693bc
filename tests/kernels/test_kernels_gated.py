"""The product inside a gated MLP in one pass: PyTorch's bits, or PyTorch itself."""

from dataclasses import replace

import pytest
import torch

from tplab import open_checkpoint
from tplab.kernels import gated
from tplab.kernels.compiled import has
from tplab.kernels.gated import silu_times, silu_times_by_torch
from tplab.kernels.product import torch_threads
from tplab.model.mlp import TensorParallelMLP
from tplab.shard import ShardPlan

DTYPES = [torch.float32, torch.bfloat16]
needs_fma = pytest.mark.skipif(not has("fma"), reason="loops are for x86 processors of the last ten years")


def halves(rows, size, dtype, scale=4.0):
    """gate and up as the engine has them: views of one wide tensor."""
    return (scale * torch.randn(rows, 2 * size)).to(dtype).split([size, size], 1)


@needs_fma
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 96, 768, 1536, 4864])
def test_it_has_torchs_bits(dtype, size):
    for scale in (1e-6, 1.0, 12.0):
        gate, up = halves(40, size, dtype, scale)
        for rows in (slice(None), slice(1), slice(None, None, 3), slice(0)):
            exact = silu_times_by_torch(gate[rows], up[rows])
            for given in ((gate[rows], up[rows]), (gate[rows].contiguous(), up[rows])):
                found = silu_times(*given)
                assert torch.equal(found, exact) and found.is_contiguous() and found.dtype == dtype


@needs_fma
@pytest.mark.parametrize("dtype", DTYPES)
def test_from_one_end_of_the_numbers_to_the_other(dtype):
    """Where e^-x is 0 or has no end, and at every rounding in between."""
    numbers = torch.linspace(-130, 130, 160_000)
    odd = torch.tensor([0.0, -0.0, 88.7, -88.7, 100, -100, 104, -104, -104.1, 1e-30, 3e38, -3e38, float("inf"),
                        -float("inf"), float("nan"), 1.0] * 2)
    gate = torch.cat([numbers, odd]).to(dtype).view(-1, 32)
    for up in (torch.ones_like(gate), torch.full_like(gate, -3.7), torch.full_like(gate, float("inf"))):
        exact = silu_times_by_torch(gate, up)
        exact[exact.abs() < torch.finfo(dtype).tiny] *= 0 if dtype == torch.bfloat16 else 1  # its docstring says so
        found = silu_times(gate, up)
        torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)
        assert torch.equal((1 / found).nan_to_num(), (1 / exact).nan_to_num()), "zeros have their signs"


@needs_fma
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_the_rows(dtype):
    """As many as are worth sharing, one more, and fewer than there are threads."""
    for rows, size in ((512, 64), (513, 64), (5, 8192), (3, 16384)):
        gate, up = halves(rows, size, dtype)
        exact = silu_times_by_torch(gate, up)
        for threads in (2, 3, 7):
            with torch_threads(threads):
                assert torch.equal(silu_times(gate, up), exact)


ONES = torch.ones(2, 64)


@pytest.mark.parametrize("gate, up", [
    (ONES.double(), ONES.double()), (ONES.half(), ONES.half()), (ONES, ONES.bfloat16()), (ONES, ONES[:1]),
    (ONES[0], ONES[0]), (torch.ones(2, 65), torch.ones(2, 65)), (torch.ones(2, 48), torch.ones(2, 48)),
    (torch.ones(2, 0), torch.ones(2, 0)), (torch.ones(64, 32).T, torch.ones(32, 64)),
    (torch.ones(32, 64), torch.ones(64, 32).T), (ONES.clone().requires_grad_(), ONES),
    (ONES, ONES.clone().requires_grad_())])
def test_what_is_left_to_torch(gate, up):
    assert silu_times(gate, up) is None


@needs_fma
def test_where_torchs_power_is_another_it_does_the_product(monkeypatch):
    monkeypatch.setattr(gated, "silu_times_by_torch", lambda *given: silu_times_by_torch(*given) * (1 + 2 ** -22))
    assert gated._loop.__wrapped__(torch.float32, 64) is None
    monkeypatch.undo()
    assert gated._loop.__wrapped__(torch.float32, 64) is not None


@pytest.mark.parametrize("hidden_act", ["silu", "gelu", "relu"])
def test_an_mlp_takes_its_own_activation(hidden_act):
    from transformers.activations import ACT2FN

    config = replace(open_checkpoint("fable").config, hidden_act=hidden_act)
    mlp = TensorParallelMLP(config, ShardPlan.from_config(config, 1), 0, torch.float32)
    gate, up = halves(7, config.intermediate_size, torch.float32)
    assert torch.equal(mlp.activate(gate, up), ACT2FN[hidden_act](gate) * up)
