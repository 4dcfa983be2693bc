"""Notebook 03: the two halves, the rotation, Hugging Face's function, positions."""

from helpers.answers import Right, Wrong

_ROPE = """
def my_rope(x, positions, theta):
    tokens, heads, head_dim = x.shape
    half = head_dim // 2
    {angles}
    cos, sin = angles.cos(), angles.sin()
    {turn}
"""
_ANGLES = "angles = positions[:, None, None].float() * theta ** (-torch.arange(half) / half)"
_TURN = ("a, b = x[..., :half].float(), x[..., half:].float(); "
         "return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)")


def rope(angles=_ANGLES, turn=_TURN):
    return _ROPE.format(angles=angles, turn=turn)


def half(line):
    return f"def my_rotate_half(x): {line}"


def apply_rope(*lines):
    return "def my_apply_rope(self, q, k, cos, sin):\n    " + "\n    ".join(lines)


def positions(*lines):
    return "def my_positions(starts, counts):\n    " + "\n    ".join(lines)


_CALL = "q, k = self.rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)"
_BACK = "return q[0].transpose(0, 1), k[0].transpose(0, 1)"
_EACH = "[torch.arange(start, start + count) for start, count in zip(starts, counts)]"

ANSWERS = {
    "my_rotate_half": [
        Wrong(half("return x"), "and [-16 -25 -36 1 4 9] is a quarter turn x comes back as it went in"),
        Wrong(half("return torch.cat(x.chunk(2, -1)[::-1], -1)"), "It is right but for signs"),
        Wrong(half("a, b = x.chunk(2, -1); return torch.cat([b, -a], -1)"), "It is right but for its sign"),
        Wrong(half("a, b = x.chunk(2, -1); return torch.cat([-b, -a], -1)"), "It is right but for signs"),
        Wrong(half("a, b = x.chunk(2, -1); return torch.cat([-a, b], -1)"), "it makes [-1 -4 -9 16 25 36], and"),
        Wrong(half("return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)"), "neighbours are taken for"),
        Wrong(half("return x.flip(-1)"), " it makes [36 25 16 9 4 1], and [-16 -25 -36 1 4 9] is a quarter turn"),
        Wrong(half("a, b = x.chunk(2, 0); return torch.cat([-b, a], 0)"), "and dimension 0 is cut in two; dimension"),
        Wrong(half("a, b = x.chunk(2, -1); return -b, a"), "it returns a tuple of 2; a tensor [tokens,"),
        Wrong(half("a, b = x.chunk(2, -1); return torch.cat([-b, a])"), "it returns [8, 6, 3]"),
        Wrong(half("return torch.cat([-x[..., 8:], x[..., :8]], -1)"), "x comes back as it went in"),
        Wrong(half("x[..., :3], x[..., 3:] = -x[..., 3:].clone(), x[..., :3].clone(); return x"),
              "it changes its argument x"),
        Wrong(half("a, b, c = x.shape; return torch.cat([-x[..., c // 2:], x[..., :c // 2]], -1)"),
              "ValueError: too many values to unpack"),
        Wrong(half("torch.cat([-x, x], -1)"), "nothing (is a return missing?)"),
        Wrong(half("a, b = x.double().chunk(2, -1); return torch.cat([-b, a], -1)"),
              "it returns torch.float64; torch.float32 must come back"),
        Wrong(half("a, b = x.chunk(2, -1); return torch.cat([-b, 2 * a], -1)"),
              "it makes [-16 -25 -36 2 8 18], and [-16 -25 -36 1 4 9] is a quarter turn"),
        Right(half("n = x.shape[-1] // 2; return torch.cat([-x[..., n:], x[..., :n]], dim=-1)")),
        Right(half("s = torch.ones(x.shape[-1]); s[:len(s) // 2] = -1; return x.roll(len(s) // 2, -1) * s.to(x)")),
    ],
    "my_rope": [
        Wrong("def my_rope(x, positions, theta): return x", "x comes back as it went in"),
        Wrong(rope(_ANGLES.replace("positions", "torch.arange(tokens)")), "as if its row were its position"),
        Wrong(rope(turn="a, b = x[..., 0::2], x[..., 1::2]; "
                        "return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)"),
              "numbers 0 and 1 are turned as a pair"),
        Wrong(rope(turn="cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1); "
                        "return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin"),
              "repeat each angle twice in a row"),
        Wrong(rope(turn=_TURN.replace("a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos - a * sin")),
              "turned the other way round"),
        Wrong(rope(turn=_TURN.replace("- b * sin", "+ b * sin")), "that is a mirror and no turn"),
        Wrong(rope(turn="cos, sin = sin, cos; " + _TURN), "cos and sin have changed places"),
        Wrong(rope(turn="return x * torch.cat([cos, cos], -1)"), "x times cosine (line 6); not found: the other half"),
        Wrong(rope(turn="return torch.cat([-x[..., half:], x[..., :half]], -1) * torch.cat([sin, sin], -1)"),
              "not found: x times cosine"),
        Wrong(rope(_ANGLES + " * 2"), "is turned by a wrong angle: pair 0 of 3 by 3.15 where 4.72 is right"),
        Wrong(rope(_ANGLES.replace("theta **", "10000.0 **")), "times sine. Your code never reads theta"),
        Wrong(rope(_ANGLES.replace("/ half", "/ head_dim")), "not found: the speeds of the pairs, 1, 0."),
        Wrong(rope(_ANGLES.replace("positions[", "(positions + 1)[")), "not found: the angles"),
        Wrong(rope(_ANGLES.replace("positions[", "(positions - 1)[")), "not found: the angles"),
        Wrong(rope(_ANGLES.replace("[:, None, None]", "[None, :heads, None]")), "each head has an angle of its own"),
        Wrong(rope(_ANGLES.replace("[:, None, None]", "[:, None]")), "RuntimeError: The size of tensor a (3)"),
        Wrong(rope(_ANGLES.replace("positions[:, None, None].float()", "positions[:1, None, None]")),
              "not found: x times cosine"),
        Wrong(rope(_ANGLES.replace(".float()", ".to(x.dtype)")), "is turned by other angles than float32 gives"),
        Wrong(rope(turn="a, b = x[..., :half], x[..., half:]; "
                        "return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)"),
              "it returns torch.float32; torch.bfloat16 must come back"),
        Wrong(rope(_ANGLES.replace("torch.arange(half) / half", "torch.arange(8) / 8")), "RuntimeError"),
        Wrong(rope(turn="return torch.cat([x[..., :half] * cos, x[..., half:] * sin], -1)"), "a turn keeps lengths"),
        Wrong(rope(turn=_TURN.replace("-1).to", "-1)[None].to")), "it returns [1, 5, 3, 6]"),
        Wrong(rope(turn="pass"), "nothing (is a return missing?)"),
        Wrong(rope(_ANGLES.replace("theta", "base")), "NameError: name 'base' is not defined"),
        Right(rope("inv = 1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim)\n"
                   "    angles = (positions[:, None] * inv)[:, None]")),
        Right(rope("angles = positions[:, None, None].double() * theta ** (-torch.arange(half).double() / half)")),
        Right(rope(turn="z = torch.complex(x[..., :half].float(), x[..., half:].float()) * torch.complex(cos, sin)\n"
                        "    return torch.cat([z.real, z.imag], -1).to(x.dtype)")),
    ],
    "my_apply_rope": [
        Wrong(apply_rope("return q, k"), "self.rotate was not called"),
        Wrong(apply_rope("try: q, k = self.rotate((cos, sin), q, k)", "except Exception: pass", "return q, k"),
              "positional argument: 'sin', and your function went on: what catches it?"),
        Wrong(apply_rope("try:", f"    {_CALL}", "    q, k = q[0].transpose(0, 1), k[0].transpose(0, 1)",
                         "except Exception: pass", "return q, k"),
                               " went on: a rotation that fails must stop the engine. What catches it?"),
        Wrong(apply_rope("q, k = self.rotate((cos, sin), q, k)", "return q, k"),
              "TypeError: apply_rotary_pos_emb() missing 1 required"),
        Wrong(apply_rope("q, k = self.rotate(q, k, cos, sin)", "return q, k"), "RuntimeError: The size of tensor a"),
        Wrong(apply_rope("if q.shape[0] != q.shape[1]:", f"    {_CALL}", f"    {_BACK}",
                         "q, k = self.rotate(q[None], k[None], cos, sin)", "return q[0], k[0]"),
              "nothing clashes, and each head is turned as if its number"),
        Wrong(apply_rope(_CALL, "return q[0], k[0]"), "q comes back as [4, 5, 6]; [tokens, heads,"),
        Wrong(apply_rope(_CALL, "return q.transpose(1, 2), k.transpose(1, 2)"), "q comes back as [1, 5, 4, 6]"),
        Wrong(apply_rope("t, h, d = q.shape", "q, k = self.rotate(q.view(1, h, t, d), k.view(1, -1, t, d), cos, sin)",
                         "return q.view(t, h, d), k.view(t, -1, d)"), "numbers of other tokens"),
        Wrong(apply_rope(_CALL, "return q.reshape(cos.shape[1], -1, q.shape[-1]), k[0].transpose(0, 1)"),
              "right until the way back"),
        Wrong(apply_rope(_CALL, _CALL.replace("q.transpose(0, 1)[None]", "q").replace("k.transpose(0, 1)[None]", "k"),
                         _BACK), "sin [1, 5, 6], q and k with other numbers"),
        Wrong(apply_rope(_CALL.replace("cos, sin", "sin, cos"), _BACK), "cos and sin have changed places"),
        Wrong(apply_rope(_CALL.replace("sin)", "-sin)"), _BACK), "look at the sign of the sine, or of one half"),
        Wrong(apply_rope("old = k", _CALL, "return q[0].transpose(0, 1), old"),
              "head_dim] and [batch, tokens, head_dim] k comes back as it went in"),
        Wrong(apply_rope(_CALL, "return k[0].transpose(0, 1), q[0].transpose(0, 1)"), "it returns k, q; q comes first"),
        Wrong(apply_rope(_CALL, "return q[0].transpose(0, 1)"), "the pair q, k must come back"),
        Wrong(apply_rope(_CALL), "nothing (is a return missing?)"),
        Wrong(apply_rope(_CALL, "return q.squeeze().transpose(0, 1), k.squeeze().transpose(0, 1)"),
              "where is the dimension of 1? A squeeze takes all of them"),
        Wrong("def my_apply_rope(q, k, cos, sin): return q, k", "it must take (self, q, k, cos, sin)"),
        Right(apply_rope("q, k = self.rotate(q[None], k[None], cos, sin, unsqueeze_dim=2)", "return q[0], k[0]")),
        Right(apply_rope("q, k = (x.permute(1, 0, 2).unsqueeze(0) for x in (q, k))",
                         "q, k = self.rotate(q, k, cos, sin)",
                         "return tuple(x.squeeze(0).permute(1, 0, 2).contiguous() for x in (q, k))")),
    ],
    "my_positions": [
        Wrong(positions("return torch.arange(sum(counts))"), "yours are [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], and"),
        Wrong(positions("return torch.cat([torch.arange(count) for count in counts])"), "yours are [0, 1, 2, 3, 4, 0,"),
        Wrong(positions(f"return torch.cat({_EACH}) - 1"),
              "Every number is off by -1"),
        Wrong(positions(f"return torch.cat({_EACH}) + 1"),
              "Every number is off by +1"),
        Wrong(positions("starts = [s + 1 if c == 1 else s for s, c in zip(starts, counts)]",
                        f"return torch.cat({_EACH})"), "yours are [3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6], and [3, 4, 5"),
        Wrong(positions("return torch.arange(starts[0], starts[0] + counts[0])"), "yours are [3, 4, 5, 6, 7], and [3,"),
        Wrong(positions(f"return torch.cat({_EACH.replace('start + count', 'start + count + 1')})"),
              "yours are [3, 4, 5, 6, 7, 8, 0,"),
        Wrong(positions("return torch.cat([torch.arange(s, max(s, c)) for s, c in zip(starts, counts)])"),
              "yours are [3, 4, 0, 1, 2, 3], and [3, 4, 5, 6, 7, 0, 1, 2, 3, 3, 5, 6] are righ"),
        Wrong(positions("return [p for s, c in zip(starts, counts) for p in range(s, s + c)]"),
              "it returns a list of 12; a tensor [tokens] = [12] must come back"),
        Wrong(positions(f"return torch.cat({_EACH}).float()"),
              "positions are whole numbers"),
        Wrong(positions(f"return torch.cat({_EACH})[None]"), "it returns [1, 12]; [tokens] = [12]"),
        Wrong(positions("return torch.tensor(starts).repeat_interleave(torch.tensor(counts))"),
              "yours are [3, 3, 3, 3, 3, 0, 0, 0, 0, 3, 5, 5], and [3, 4, 5, 6, 7, 0, 1, 2, 3,"),
        Wrong(positions("starts.sort()", f"return torch.cat({_EACH})"), "it changes its argument starts"),
        Wrong(positions(f"return torch.cat({_EACH.replace('zip(starts, counts)', 'sorted(zip(starts, counts))')})"),
              "in another order"),
        Wrong(positions(f"return torch.stack({_EACH})"), "RuntimeError: stack expects each tensor to be equal size"),
        Wrong(positions("return torch.cat([torch.arange(starts[0], starts[0] + count) for count in counts])"),
              "yours are [3, 4, 5, 6, 7, 3, 4, 5, 6, 3, 3, 4], and [3, 4, 5, 6, 7, 0, 1, 2, 3,"),
        Wrong(positions("rows = torch.arange(sum(counts))", "at = torch.tensor(starts).repeat_interleave(",
                        "    torch.tensor(counts))", "return rows + at"), "yours are [3, 4, 5, 6, 7, 5, 6, 7, 8, 12"),
        Right(positions("return torch.tensor([p for s, c in zip(starts, counts) for p in range(s, s + c)])")),
        Right(positions("counts = torch.tensor(counts)", "before = counts.cumsum(0) - counts",
                        "shift = (torch.tensor(starts) - before).repeat_interleave(counts)",
                        "return torch.arange(len(shift)) + shift")),
    ],
}
