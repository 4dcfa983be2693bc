"""Rounding to bfloat16 by integers: torch's numbers, from one end of them to the other."""

import operator

import pytest
import torch

from tplab.kernels import compiled
from tplab.kernels.bfloat16 import with_integers

LANES = 16
ROUND = """
define void @loop(ptr %x, ptr %y, i64 %n) {
begin:
  br label %next

next:
  %i = phi i64 [0, %begin], [%i.next, %next]
  %x.at = getelementptr VF, ptr %x, i64 %i
  %y.at = getelementptr VB, ptr %y, i64 %i
  %numbers = load VF, ptr %x.at, align 4
  %rounded = fptrunc VF %numbers to VB
  store VB %rounded, ptr %y.at, align 2
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %n
  br i1 %more, label %next, label %done

done:
  ret void
}
"""
COMPUTE = """
define void @loop(ptr %x, ptr %y, i64 %n) {
begin:
  br label %next

next:
  %i = phi i64 [0, %begin], [%i.next, %next]
  %x.at = getelementptr VB, ptr %x, i64 %i
  %y.at = getelementptr VB, ptr %y, i64 %i
  %one = load VB, ptr %x.at, align 2
  %other = load VB, ptr %y.at, align 2
  %whole = WHAT VB %one, %other
  store VB %whole, ptr %y.at, align 2
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %n
  br i1 %more, label %next, label %done

done:
  ret void
}
"""


def loop(monkeypatch, text, lanes, what=""):
    """As it is compiled for a processor that does not round to bfloat16, whatever this one does."""
    monkeypatch.setattr(compiled, "has", lambda feature: False)
    kinds = ("float", "bfloat") if lanes == 1 else (f"<{lanes} x float>", f"<{lanes} x bfloat>")
    return compiled.compiled(text.replace("VF", kinds[0]).replace("VB", kinds[1]).replace("WHAT", what))


@pytest.mark.parametrize("lanes", [1, LANES])
def test_every_rounding_is_torchs(monkeypatch, lanes):
    """Each upper half of a float32, with what lies below, at and above the middle; infinities and NaNs among them."""
    below = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (torch.arange(1 << 16)[:, None] * (1 << 16) + below).flatten()
    x = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)
    y = torch.empty(x.shape, dtype=torch.bfloat16)
    loop(monkeypatch, ROUND, lanes)(x.data_ptr(), y.data_ptr(), len(x) // lanes)
    exact = x.bfloat16()
    assert torch.equal(y.isnan(), exact.isnan())
    numbers = ~exact.isnan()
    assert torch.equal(y[numbers].view(torch.int16), exact[numbers].view(torch.int16)), "zeros have their signs"


@pytest.mark.parametrize("lanes", [1, LANES])
@pytest.mark.parametrize("what, torchs", [("fadd", operator.add), ("fsub", operator.sub), ("fmul", operator.mul),
                                          ("fdiv", operator.truediv)])
def test_what_is_computed_in_bfloat16_is_rounded_once(monkeypatch, what, torchs, lanes):
    x, y = (torch.randn(2, 4096) * 10.0 ** torch.randint(-4, 5, (2, 4096))).bfloat16()
    exact = torchs(x, y)
    loop(monkeypatch, COMPUTE, lanes, what)(x.data_ptr(), y.data_ptr(), len(x) // lanes)
    assert torch.equal(y, exact)


@pytest.mark.parametrize("lanes", [1, LANES])
def test_only_the_sign_changes(monkeypatch, lanes):
    x = torch.arange(-(1 << 15), 1 << 15).short()
    text = COMPUTE.replace("%whole = WHAT VB %one, %other", "%whole = fneg VB %one")
    loop(monkeypatch, text, lanes)(x.data_ptr(), (y := torch.empty_like(x)).data_ptr(), len(x) // lanes)
    assert torch.equal(y, x ^ -(1 << 15))


def test_no_number_is_left_that_llvm_would_round():
    """It does so by a call of a function that neither Python nor torch has: of nothing, at address 0."""
    kept = "  %y = fadd float %a, %b\n  %z = fptrunc double %y to float"
    assert with_integers(kept) == kept
    widened = "%a = fpext <4 x bfloat> %b to <4 x float>"
    assert with_integers(widened + "%c = or i1 %d, %e") == with_integers(widened) + "%c = or i1 %d, %e"
    assert "bfloat" not in with_integers("%s = phi <16 x bfloat> [%a, %b], [%c, %d]\n%t = load bfloat, ptr %at")
