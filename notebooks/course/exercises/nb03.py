"""Notebook 03: Hugging Face's rotation called with its shapes, the whole rotation, and the positions of a batch."""

from types import SimpleNamespace

import torch

from course.judge.exercise import Example, Exercise, at
from course.judge.work import numbers, pair
from tplab.model.rope import rotate
from tplab.patch import Patch, original

Failing = type("Failing", (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AssertionError), {})
ROTATION = "tplab.model.rope.Rotary.__call__"
FORWARD = "tplab.model.decoder.TensorParallelCausalLM.forward"


def my_apply_rope(self, q, k, cos, sin):
    q, k = self.rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


def queries_and_keys():
    for tokens, heads, kv_heads, how, dtype in (
            (5, 4, 2, "", torch.float32), (4, 4, 4, "", torch.float32), (3, 6, 1, "", torch.float32),
            (1, 2, 1, "", torch.float32), (5, 4, 2, "fails", torch.float32), (5, 4, 2, "doubles", torch.bfloat16)):
        q, k = numbers(tokens, heads, 6, seed=1, dtype=dtype), numbers(tokens, kv_heads, 6, seed=2, dtype=dtype)
        angles = (torch.arange(3, 3 + tokens)[:, None] * 500.0 ** (-torch.arange(0, 6, 2) / 6)).repeat(1, 2)[None]
        says = f"q [{tokens}, {heads}, 6], k [{tokens}, {kv_heads}, 6], cos and sin [1, {tokens}, 6]"
        yield Example(how, q, k, angles.cos().to(dtype), angles.sin().to(dtype), says=says + {
            "": "", "fails": ", and a self.rotate that fails",
            "doubles": " in bfloat16, and a self.rotate that doubles q and k, as of another architecture"}[how])


def rotated(answer, how, q, k, cos, sin):
    asked, failed = [], []

    def watched(*args, **more):
        asked.append(how)
        try:
            if how == "fails":
                raise Failing("on purpose")
            return (2 * args[0], 2 * args[1]) if how == "doubles" else rotate("qwen2")(*args, **more)
        except Exception as error:
            failed.append(type(error).__name__)
            raise

    try:
        turned, comes_out = answer(SimpleNamespace(rotate=watched), q, k, cos, sin), False
    except Failing:
        turned, comes_out = None, True
    yield "self.rotate is never called", not asked, False
    for name in failed:
        yield f"self.rotate raised a {name}, and your function catches it", not comes_out, False
    if not comes_out:
        for name, tensor in zip("qk", pair(turned, "the pair q, k")):
            yield f"for {name} it returns", tensor


def my_rope(x, positions, theta):
    head_dim = x.shape[-1]
    speeds = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = positions[:, None].float() * speeds                # [tokens, head_dim / 2]
    angles = torch.cat([angles, angles], dim=-1)[:, None]       # [tokens, 1, head_dim]
    first, second = x.chunk(2, dim=-1)
    other = torch.cat([-second, first], dim=-1)
    return (x * angles.cos() + other * angles.sin()).to(x.dtype)


def heads_at_positions():
    for shape, positions, theta in (((5, 3, 6), [7, 2, 0, 11, 3], 500.0), ((3, 3, 10), [4, 9, 1], 10000.0),
                                    ((1, 4, 6), [23], 70.0), ((2, 3, 6), [40001, 40003], 10000.0)):
        dtype = torch.float32 if max(positions) < 256 else torch.bfloat16  # which has none between 39936 and 40192
        yield Example(numbers(*shape, dtype=dtype), torch.tensor(positions), theta, says=f"x {list(shape)}"
                      f"{' in bfloat16' * (dtype == torch.bfloat16)}, positions {positions}, theta {theta:g}")


def as_tables(answer) -> list[Patch]:
    """Its angles as the engine's tables: what (1, 0) becomes is (cos, sin)."""
    def tables(self, x, positions, lengths):
        rope = self.config.rope_parameters
        if rope.get("rope_type") != "default":
            return original(ROTATION)(self, x, positions, lengths)
        cos, _ = original(ROTATION)(self, x, positions[:1], [1])
        half = cos.shape[-1] // 2
        ones = torch.cat([torch.ones(len(positions), 1, half), torch.zeros(len(positions), 1, half)], dim=-1)
        turned = answer(ones, positions, rope["rope_theta"])[:, 0].to(x.dtype)
        return tuple(part.repeat(1, 2)[None] for part in turned.chunk(2, dim=-1))

    return [Patch(ROTATION, tables)]


def instead_of_tables(setting, answer):
    rope = setting.checkpoint.config.hf.rope_parameters
    if rope.get("rope_type") != "default":
        how = rope.get("rope_type", "another one in each type of layer")
        return f"in the small examples only, since {setting.checkpoint.name} scales its angles ({how})"
    setting.align(dtype=setting.narrow)


def my_positions(starts, counts):
    return torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts)])


def whole(answer, starts, counts):
    positions = answer(starts, counts)
    is_short = isinstance(positions, torch.Tensor) and positions.dtype == torch.int32
    yield "it returns", positions.long() if is_short else positions


def under_the_engine(answer) -> list[Patch]:
    def forward(self, input_ids, positions, context):
        starts, counts = [s.start for s in context.segments], [s.count for s in context.segments]
        return original(FORWARD)(self, input_ids, answer(starts, counts), context)

    return [Patch(FORWARD, forward)]


_BACK = "q[0].transpose(0, 1), k[0].transpose(0, 1)"
_THERE = "q.transpose(0, 1)[None], k.transpose(0, 1)[None]"
_RESHAPED = "q.reshape(1, q.shape[1], -1, 6), k.reshape(1, k.shape[1], -1, 6)"
_PAIRED = "torch.cat([-second, first], dim=-1) -> torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)"
_IN_A_ROW = "torch.cat([angles, angles], dim=-1) -> angles.repeat_interleave(2, -1)"
_UNCAST = "(x * angles.cos() + other * angles.sin()).to(x.dtype) -> x * angles.cos() + other * angles.sin()"
_TURNED_BACK = "[-second, first] -> [second, -first]"
_BY_ROW = "positions[:, None] -> torch.arange(len(positions))[:, None]"
_EACH = "torch.arange(start, start + count)"
EXERCISES = [
    Exercise("03", my_apply_rope, queries_and_keys, {
        "view or reshape puts numbers of other tokens there; what exchanges two dimensions?": (
            f"{_THERE} -> {_RESHAPED}",
            f"{_THERE} -> {_RESHAPED} ;; {_BACK} -> q.reshape(q.shape[2], q.shape[1], 6), "
            "k.reshape(k.shape[2], k.shape[1], 6)"),
        "cos and sin have changed places": "cos, sin) -> sin, cos) ;; k, sin, cos): -> k, cos, sin):",
        "it returns k, q; q comes first": f"{_BACK} -> k[0].transpose(0, 1), q[0].transpose(0, 1)",
    }, observe=rotated, dims="token, head, number", place="rotates queries and keys",
             patches=at("tplab.model.attention.TensorParallelAttention.apply_rope")),
    Exercise("03", my_rope, heads_at_positions, {
        "it is turned the other way round: look at the sign of the sine, or of one half":
            (_TURNED_BACK, f"{_TURNED_BACK} ;; {_UNCAST}"),
        "numbers 0 and 1 are turned as a pair; here number 0 belongs to number head_dim / 2":
            (f"{_PAIRED} ;; {_IN_A_ROW}", f"{_PAIRED} ;; {_IN_A_ROW} ;; {_UNCAST}",
             "x.chunk(2, dim=-1) -> x[..., ::2], x[..., 1::2] ;; x * -> torch.cat([first, second], dim=-1) *"),
        "both halves use the same angles; yours are laid out for neighbours": _IN_A_ROW,
        "the first half lacks its minus: (a, b) becomes (-b, a)": "[-second, first] -> [second, first]",
        "x is added to itself: the sine belongs to the other number of the pair": "other * -> x *",
        "every token is turned as if its row were its position; positions says where it stands":
            (_BY_ROW, f"{_BY_ROW} ;; {_UNCAST}"),
        "theta is given, and 10000 is taken": "theta ** -> 10000.0 **",
        "the speed of pair i is theta ** (-2 i / head_dim); in yours, the exponent is twice as large":
            "/ head_dim) -> * 2 / head_dim)",
        "the speed of pair i is theta ** (-2 i / head_dim); in yours, the exponent is half as large":
            "/ head_dim) -> / 2 / head_dim)",
        "the speed of pair i is theta ** (-2 i / head_dim); in yours, the exponent has no minus":
            "theta ** (-torch.arange -> theta ** (torch.arange",
        "the angles are computed in the dtype of x, which has too few digits for large positions":
            ("positions[:, None].float() -> positions[:, None].to(x.dtype)",
             "positions[:, None].float() * speeds -> (positions[:, None].float() * speeds).to(x.dtype)",
             "dtype=torch.float32) / head_dim) -> dtype=x.dtype) / head_dim) ;; .float() -> .to(x.dtype)",
             "dtype=torch.float32) / head_dim) -> dtype=x.dtype) / head_dim) ;; "
             "positions[:, None].float() -> positions[:, None]"),
    }, "on {ranks}, the engine with your rotation in the place of its tables agrees with Hugging Face",
             dims="token, head, number", patches=as_tables, engine=instead_of_tables,
             place="makes the tables of angles"),
    Exercise("03", my_positions, lambda: [Example(*both) for both in (
        ([3, 0, 3, 5], [5, 4, 1, 2]), ([6, 0], [1, 1]), ([2 ** 24], [5]), ([0, 8, 20], [6, 4, 1]))], {
        "the tokens are numbered through, over all sequences: each sequence has positions of its own":
            f"torch.cat([{_EACH} for start, count in zip(starts, counts)]) -> torch.arange(sum(counts))",
        "each sequence begins at 0; starts says how many of its tokens are there": f"{_EACH} -> torch.arange(count)",
        "positions count from 0: of a sequence with 3 tokens in the cache the next has position 3":
            f"{_EACH} -> torch.arange(start + 1, start + count + 1)",
        "the rows of earlier sequences are counted, too": "torch.cat([torch.arange(start, start + count) for start, "
            "count in zip(starts, counts)]) -> torch.arange(sum(counts)) + torch.cat([torch.full([count], start) for "
            "start, count in zip(starts, counts)])",
    }, "on {ranks}, prompts read in chunks and beside each other agree with Hugging Face", whole, under_the_engine,
             lambda setting, answer: setting.align_in_chunks(), dims="token", within=0,
             place="gives each token its position")]
