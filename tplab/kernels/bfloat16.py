"""Loops in bfloat16 for a processor that does not compute in it: in integers, of which a number is one of 16 bits.

LLVM would call a function for each rounding that neither Python nor torch has. Widening needs none: the number's bits
are the upper half of the float32 with its value.
"""

import re
from string import Template

_ONE = re.compile(r"(?P<z>%[\w.]+) = (?P<what>fptrunc|fpext|fneg|fadd|fsub|fmul|fdiv) "
                  r"(?:<(?P<lanes>\d+) x )?b?float>? (?P<x>%[\w.]+)(?:, (?P<y>%[\w.]+)| to [<\w ]+>?)?")

_WIDEN = Template("""
  $to.zero = zext $i16s $x to $i32s
  $to.bits = shl $i32s $to.zero, $shift
  $to = bitcast $i32s $to.bits to $floats
""")
# Halves go to the even neighbour: almost one half is added before 16 bits go, and all of it if the last bit that stays
# is 1. A NaN must not be carried into the sign.
_ROUND = Template("""
  $z.bits = bitcast $floats $x to $i32s
  $z.upper = lshr $i32s $z.bits, $shift
  $z.odd = and $i32s $z.upper, $one
  $z.half = add $i32s $z.odd, $below_half
  $z.carried = add $i32s $z.bits, $z.half
  $z.kept = lshr $i32s $z.carried, $shift
  $z.rounded = trunc $i32s $z.kept to $i16s
  $z.is.nan = fcmp uno $floats $x, $x
  $z = select $i1s $z.is.nan, $i16s $nan, $i16s $z.rounded
""")


def with_integers(ir: str) -> str:
    """``ir`` without the type ``bfloat``: what is computed in it is computed in float32, and rounded."""
    return _ONE.sub(_in_integers, ir).replace("bfloat", "i16")


def _in_integers(found: re.Match) -> str:
    """The lines for this instruction; as it is if there is no bfloat in it."""
    what, z, x, y = found["what"], found["z"], found["x"], found["y"]
    if "bfloat" not in found[0]:
        return found[0]
    kinds = _kinds(found["lanes"])
    if what == "fpext":
        return _WIDEN.substitute(kinds, to=z, x=x)
    if what == "fptrunc":
        return _ROUND.substitute(kinds, z=z, x=x)
    if what == "fneg":
        return f"\n  {z} = xor {kinds['i16s']} {x}, {kinds['sign']}\n"
    return (_WIDEN.substitute(kinds, to=f"{z}.x", x=x) + _WIDEN.substitute(kinds, to=f"{z}.y", x=y)
            + f"  {z}.wide = {what} {kinds['floats']} {z}.x, {z}.y"
            + _ROUND.substitute(kinds, z=z, x=f"{z}.wide"))


def _kinds(lanes: str | None) -> dict[str, str]:
    """Types and constants: of vectors of so many, or of single numbers."""
    kinds = {"floats": "float", "i32s": "i32", "i16s": "i16", "i1s": "i1"}
    constants = {"shift": ("i32", 16), "one": ("i32", 1), "below_half": ("i32", 0x7FFF), "nan": ("i16", 0x7FC0),
                 "sign": ("i16", 0x8000)}
    if lanes is None:
        return kinds | {name: str(value) for name, (_, value) in constants.items()}
    return ({name: f"<{lanes} x {kind}>" for name, kind in kinds.items()}
            | {name: f"splat ({kind} {value})" for name, (kind, value) in constants.items()})
