"""Notebook 03: the two halves of a head, and the whole rotation."""

import math

import torch

from course.judge.attempt import Attempt, for_each, saying
from course.judge.compare import agree
from course.judge.verdict import Setting, exercise
from tplab.checks import counted
from tplab.patch import Patch, original


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers, the same ones every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def halves(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)


def angles(positions: torch.Tensor, theta: float, head_dim: int) -> torch.Tensor:
    """``[tokens, 1, head_dim / 2]``: what each pair of numbers is turned by."""
    return positions[:, None, None].float() * theta ** -(torch.arange(0, head_dim, 2) / head_dim)


def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """``x [tokens, heads, head_dim]`` with pair i of the two halves turned by ``angle[..., i]``."""
    cos, sin = (torch.cat([table, table], -1) for table in (angle.cos(), angle.sin()))
    return x * cos + halves(x) * sin


def misturned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a rotation with these tables gives if one mistake is made, told the same way wherever one rotates."""
    half = x.shape[-1] // 2
    paired, paired_sin = (table[..., :half].repeat_interleave(2, -1) for table in (cos, sin))
    return {
        "it is turned the other way round: look at the sign of the sine, or of one half": x * cos - halves(x) * sin,
        "neighbours are exchanged, but the tables are made for halves": x * cos + neighbours(x) * sin,
        "cos and sin have changed places: at position 0, where nothing turns, what are they?":
            x * sin + halves(x) * cos,
        "the other half comes in without its sign: that is a mirror and no turn":
            (x * cos + x.roll(half, -1) * sin, x * cos - x.roll(half, -1) * sin),
        f"numbers 0 and 1 are turned as a pair; here number 0 belongs to number {half}":
            x * paired + neighbours(x) * paired_sin,
        "the tables repeat each angle twice in a row, the halves do not: which angle does number 1 have?":
            x * paired + halves(x) * paired_sin,
    }


def _as_rotation(answer) -> list[Patch]:
    def rotate(model_type):
        def apply(q, k, cos, sin):
            cos, sin = cos[:, None], sin[:, None]
            return q * cos + answer(q) * sin, k * cos + answer(k) * sin

        return apply

    return [Patch("tplab.model.attention.rotate", rotate)]


@exercise("my_rotate_half", "03", takes="x", place="makes a quarter turn", patches=_as_rotation,
          agreed="on {ranks}, q and k turned with yours are Hugging Face's in every layer")
def my_rotate_half(attempt: Attempt, setting: Setting):
    """Heads of 6, 10 and 8 numbers with two, three and no leading dimensions; then in the engine's rotation."""
    def check(shape):
        dtype = torch.bfloat16 if len(shape) == 4 else torch.float32
        x = torch.arange(1.0, 1 + math.prod(shape)).pow(2).view(shape).to(dtype)
        dims = ", ".join(("batch", "tokens", "heads", "head_dim")[-len(shape):])
        half = shape[-1] // 2
        found = attempt.tensor(x, dims=dims, shape=shape, dtype=x.dtype)
        agree(found, halves(x), {
            f"neighbours are taken for pairs, numbers 0 and 1; here number 0 belongs to number {half}": neighbours(x),
            **{f"x is {list(shape)}, and dimension {dim} is cut in two; dimension {x.dim() - 1} holds the numbers of a "
               "head": halves(x.movedim(dim, -1)).movedim(-1, dim) for dim in range(x.dim() - 1)
               if x.shape[dim] % 2 == 0},
        }, f"x is {list(shape)}: of its first head, {_head(x)}, it makes {_head(found)}, and {_head(halves(x))} is a "
           "quarter turn")

    size = setting.checkpoint.config.head_dim
    for_each(((4, 6, 6), (2, 4, 2, 10), (8,)), check, lambda shape: f"{len(shape)} dimensions",
             shown=("the engine's 3 dimensions", (4, 3, size)))
    setting.align()


def _head(x: torch.Tensor) -> str:
    """The numbers of the first head: ``"[-3 -4 1 2]"``."""
    return f"[{' '.join(f'{number:.4g}' for number in x.reshape(-1, x.shape[-1])[0].tolist())}]"


def _as_tables(answer) -> list[Patch]:
    """Its angles as the engine's tables: what (1, 0) becomes is (cos, sin)."""
    target = "tplab.model.rope.Rotary.__call__"

    def tables(self, x, positions, lengths):
        rope = self.config.rope_parameters
        if rope["rope_type"] != "default":
            return original(target)(self, x, positions, lengths)
        cos, _ = original(target)(self, x, positions[:1], [1])
        half = cos.shape[-1] // 2
        ones = torch.cat([torch.ones(len(positions), 1, half), torch.zeros(len(positions), 1, half)], dim=-1)
        turned = answer(ones, positions, rope["rope_theta"])[:, 0].to(x.dtype)
        return tuple(part.repeat(1, 2)[None] for part in turned.chunk(2, dim=-1))

    return [Patch(target, tables)]


@exercise("my_rope", "03", takes="x, positions, theta", place="makes the tables of angles", patches=_as_tables,
          agreed="on {ranks}, an engine without a table of its own turns as Hugging Face does")
def my_rope(attempt: Attempt, setting: Setting):
    """As many tokens as heads and not, positions in any order, another theta, bfloat16; then instead of the tables."""
    def check(case):
        (tokens, heads, dim), positions, theta = case
        half, head = dim // 2, f"x {list(case[0])}, positions {positions}, theta {theta:g}: "
        dtype = torch.float32 if max(positions) < 256 else torch.bfloat16  # which has none between 39936 and 40192
        x, positions = numbers(tokens, heads, dim).to(dtype), torch.tensor(positions)
        right = angles(positions, theta, dim)
        cos, sin = (torch.cat([table, table], -1) for table in (right.cos(), right.sin()))
        speeds = angles(torch.ones(1), theta, dim).flatten()
        known = {
            **misturned(x, cos, sin),
            "every token is turned as if its row were its position; positions says where it stands":
                turned(x, angles(torch.arange(tokens), theta, dim)),
        }
        if tokens >= heads:
            known |= {"each head has an angle of its own, whatever its token: along which dimension of x do the "
                      "angles run?": turned(x, angles(positions[:heads], theta, dim).transpose(0, 1))}
        found = attempt.tensor(x, positions, theta, dims="tokens, heads, head_dim", shape=x.shape, dtype=x.dtype)
        if dtype == torch.bfloat16:
            return agree(found, turned(x.float(), right), {}, f"{head}x, in bfloat16, is turned by other angles than "
                         "float32 gives: in which dtype are position and angle?", within=2e-2)
        with saying(head):
            agree(found, turned(x, right), known, _off(found, x, positions, right), made=attempt.made[0], steps={
                f"the speeds of the pairs, {', '.join(f'{speed:.3g}' for speed in speeds)}": speeds,
                "the angles": _ways(right, torch.cat([right, right], -1)), "their cosines": _ways(right.cos(), cos),
                "their sines": _ways(right.sin(), sin), "x times cosine": _ways(x * cos, x[..., :half] * right.cos()),
                "the other half": _ways(halves(x), x[..., half:]),
                "the other half times sine": _ways(halves(x) * sin, x[..., half:] * right.sin())},
                dims="token, head, number")

    size = setting.checkpoint.config.head_dim
    for_each((((5, 3, 6), [7, 2, 0, 11, 3], 500.0), ((3, 3, 10), [4, 9, 1], 10000.0), ((1, 4, 6), [23], 70.0),
              ((2, 3, 6), [40001, 40003], 10000.0)), check, lambda case: counted(case[0][0], "token"),
             shown=("positions 0 to 5", ((6, 4, size), list(range(6)), 10000.0)))
    rope = setting.checkpoint.config.hf.rope_parameters
    if rope["rope_type"] != "default":
        return f"in the small examples only, since {setting.checkpoint.name} scales its angles ({rope['rope_type']})"
    setting.align(dtype="float32" if setting.dtype == "float64" else setting.dtype)  # in which Hugging Face has its own


def _ways(*made: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of all tokens at once, and in a loop of the first."""
    return *made, *(one[0] for one in made)


def _off(found: torch.Tensor, x: torch.Tensor, positions: torch.Tensor, right: torch.Tensor) -> str:
    gap = (found - turned(x, right)).abs()
    token = int(gap.flatten(1).amax(1).argmax())
    longer = (found[token].norm() / x[token].norm()).item()
    if not abs(longer - 1) < 1e-3:
        return (f"the token at position {positions[token]} is {longer:.4g} times as long as before: a turn keeps "
                "lengths")
    pairs = right.shape[-1]
    pair = int(gap[token].amax(0).argmax()) % pairs
    (a, b), (c, d) = ((float(one[token, 0, pair]), float(one[token, 0, pair + pairs])) for one in (x, found))
    angle, full = math.atan2(d, c) - math.atan2(b, a), 2 * math.pi
    return (f"the token at position {positions[token]} is turned by a wrong angle: pair {pair} of {pairs} by "
            f"{angle % full:.3g} where {float(right[token, 0, pair]) % full:.3g} is right (full turns left out)")
