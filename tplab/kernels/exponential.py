"""e to the power of x, for several float32 numbers at once, as lines in LLVM's language."""

import struct
from string import Template

from tplab.kernels.compiled import each

# SLEEF's e^x, which is PyTorch's (xexpf in https://github.com/shibatch/sleef/blob/master/src/libm/sleefsimdsp.c): x is
# so many times ln 2, which is taken off in two parts, and a rest for which a polynomial stands.
_NUMBERS = {"one": 1.0, "per_ln2": 1.442695040888963407359924681, "minus_ln2": -0.693145751953125,
            "minus_ln2_rest": -1.428606765330187045e-06, "c6": 0.000198527617612853646278381,
            "c5": 0.00139304355252534151077271, "c4": 0.00833336077630519866943359, "c3": 0.0416664853692054748535156,
            "c2": 0.166666671633720397949219, "c1": 0.5, "none_below": -104.0, "endless_above": 100.0,
            "endless": float("inf")}
_LINES = Template("""
  %parts = fmul $V $x, $per_ln2
  %whole = call $V @llvm.rint.v${lanes}f32($V %parts)
  %nearly = call $V @llvm.fma.v${lanes}f32($V %whole, $V $minus_ln2, $V $x)
  %rest = call $V @llvm.fma.v${lanes}f32($V %whole, $V $minus_ln2_rest, $V %nearly)
  %p5 = call $V @llvm.fma.v${lanes}f32($V $c6, $V %rest, $V $c5)
  %p4 = call $V @llvm.fma.v${lanes}f32($V %p5, $V %rest, $V $c4)
  %p3 = call $V @llvm.fma.v${lanes}f32($V %p4, $V %rest, $V $c3)
  %p2 = call $V @llvm.fma.v${lanes}f32($V %p3, $V %rest, $V $c2)
  %p1 = call $V @llvm.fma.v${lanes}f32($V %p2, $V %rest, $V $c1)
  %square = fmul $V %rest, %rest
  %p0 = call $V @llvm.fma.v${lanes}f32($V %square, $V %p1, $V %rest)
  %power.of.rest = fadd $V %p0, $one
  %number = fptosi $V %whole to <$lanes x i32>
  %n = freeze <$lanes x i32> %number
  %n.0 = ashr <$lanes x i32> %n, splat (i32 1)
  %n.1 = sub <$lanes x i32> %n, %n.0
  $powers_of_two
  %once = fmul $V %power.of.rest, %two.0
  %twice = fmul $V %once, %two.1
  %none = fcmp olt $V $x, $none_below
  %some = select <$lanes x i1> %none, $V zeroinitializer, $V %twice
  %endless = fcmp ogt $V $x, $endless_above
  %exp = select <$lanes x i1> %endless, $V $endless, $V %some
""")
# 2 to the power of n, in two halves of n: each must fit a float's exponent.
_POWER_OF_TWO = """
  %biased.{half} = add <LANES x i32> %n.{half}, splat (i32 127)
  %exponent.{half} = shl <LANES x i32> %biased.{half}, splat (i32 23)
  %two.{half} = bitcast <LANES x i32> %exponent.{half} to <LANES x float>
"""


def declared(lanes: int) -> str:
    """What a module that uses :func:`exponential` must declare."""
    return Template("declare $V @llvm.rint.v${lanes}f32($V)\ndeclare $V @llvm.fma.v${lanes}f32($V, $V, $V)").substitute(
        lanes=lanes, V=f"<{lanes} x float>")


def exponential(x: str, lanes: int) -> str:
    """Lines that compute ``%exp`` from the vector named ``x``, with the bits of PyTorch's vectors."""
    return _LINES.substitute(
        x=x, lanes=lanes, V=f"<{lanes} x float>",
        powers_of_two=each(_POWER_OF_TWO.replace("LANES", str(lanes)), half=2),
        **{name: f"splat (float {in_hex(number)})" for name, number in _NUMBERS.items()})


def in_hex(number: float) -> str:
    """A float32 as LLVM writes it: with the bits that it has as a double."""
    single, = struct.unpack("f", struct.pack("f", number))
    return f"0x{struct.unpack('q', struct.pack('d', single))[0] & (1 << 64) - 1:016X}"
