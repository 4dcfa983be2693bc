"""Notebook 03: Hugging Face's rotation, called with its shapes."""

from types import SimpleNamespace

import torch

from course.exercises.rotation import angles, misturned, numbers, turned
from course.judge.attempt import Attempt, NotYet, given_in_words, several, tensor
from course.judge.compare import agree, is_like
from course.judge.verdict import Setting, at, exercise
from course.judge.words import CALLED
from tplab.model.rope import rotate

_ORDER, _TAKES = "q, k, cos, sin", "; it takes [batch, heads, tokens, head_dim] and [batch, tokens, head_dim]"
_Failing = type("Failing", (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AssertionError), {})


@exercise("my_apply_rope", "03", takes="self, q, k, cos, sin",
          place="turns queries and keys",
          patches=at("tplab.model.attention.TensorParallelAttention.apply_rope"))
def my_apply_rope(attempt: Attempt, setting: Setting):
    """On as many heads as tokens, more and fewer, one KV head, one token; with a rotation that fails; in the engine."""
    function = rotate(setting.checkpoint.config.model_type)
    for tokens, heads, kv_heads in ((5, 4, 2), (4, 4, 4), (3, 6, 1), (1, 2, 1)):
        _in_shape(attempt, function, tokens, heads, kv_heads)
    given = [numbers(*shape).bfloat16() for shape in ((5, 4, 6), (5, 2, 6), (1, 5, 6), (1, 5, 6))]
    for one, came in zip(attempt(SimpleNamespace(rotate=lambda q, k, *_, **more: (2 * q, 2 * k)), *given), given):
        if one.dtype != torch.bfloat16:
            raise NotYet(f"for q and k in bfloat16 it returns {one.dtype}; they must come back as they are")
        if not one.equal(2 * came):
            raise NotYet("another architecture turns in another way, and here self.rotate doubles q and k; what comes "
                         "back is not doubled: are its results used?")
    setting.align()


def _in_shape(attempt: Attempt, function, tokens: int, heads: int, kv_heads: int) -> None:
    asked, errors = [], []

    def watched(*args, **kwargs):
        asked[:] = [*args, *kwargs.values()]
        try:
            return function(*args, **kwargs)
        except Exception as error:
            errors.append(error)
            error.add_note(f"self.rotate{CALLED}{given_in_words(_ORDER, asked)}{_TAKES}")
            raise

    q, k = numbers(tokens, heads, 6, seed=1), numbers(tokens, kv_heads, 6, seed=2)
    angle = angles(torch.arange(3, 3 + tokens), 500.0, 6)[:, 0]
    cos, sin = (torch.cat([table, table], -1)[None] for table in (angle.cos(), angle.sin()))
    found = attempt(SimpleNamespace(rotate=watched), q, k, cos, sin)
    if errors:
        raise NotYet(f"self.rotate raised {type(errors[0]).__name__}: {errors[0]}, and your function went on: what "
                     "catches it?")
    if not asked:
        raise NotYet(f"q [{tokens}, {heads}, 6], from position 3 on: self.rotate was not called. It is the rotation of "
                     "the checkpoint's own architecture, which is to turn q and k")
    found = pair(found, q, k)
    for name, one, x in (("q", found[0], q), ("k", found[1], k)):
        tensor(one, "tokens, heads, head_dim", x.shape, x.dtype, it=f"{name} comes back as")
        others = " and ".join(what for what, came, ours in zip(_ORDER.split(", "), asked, (q, k, cos, sin))
                              if not is_like(came, ours, 1e-6))
        agree(one, turned(x, angle[:, None]), _confused(name, x, angle),
              f"{name} is not turned right: self.rotate{CALLED}{given_in_words(_ORDER, asked)}"
              f"{f', {others} with other numbers' * bool(others)}{_TAKES}", dims="token, head",
              made=attempt.made[0], steps={"the result": ()})
    fails_aloud(lambda failing: attempt(SimpleNamespace(rotate=failing), q, k, cos, sin), "self.rotate",
                "called once more, it does not call self.rotate: is an earlier result given out again?")


def pair(found, q: torch.Tensor, k: torch.Tensor) -> list:
    """``found`` as a list of two; :class:`NotYet` if k comes first."""
    found = several(found, "the pair q, k")
    if q.shape != k.shape and [getattr(one, "shape", None) for one in found] == [k.shape, q.shape]:
        raise NotYet("it returns k, q; q comes first")
    return found


def fails_aloud(call, name: str, idle: str) -> None:
    """:class:`NotYet` unless ``call(failing)`` lets out the error that ``failing`` raises. ``name``: what fails;
    ``idle`` is said if it is not called."""
    asked = []

    def failing(*args, **kwargs):
        asked.append(args)
        raise _Failing(f"{name} failed on purpose")

    try:
        call(failing)
    except NotYet as error:
        if not isinstance(error.__cause__, _Failing):
            raise
        return
    raise NotYet(f"{name} raised an error, and your function went on: a rotation that fails must stop the engine. What "
                 "catches it?" if asked else idle)


def _confused(name: str, x: torch.Tensor, angle: torch.Tensor) -> dict[str, torch.Tensor]:
    """What comes out if the shapes or the tables are mixed up, ``angle [tokens, half]``."""
    tokens, heads, dim = x.shape
    right = angle[:, None]
    cos, sin = (torch.cat([table, table], -1) for table in (right.cos(), right.sin()))
    viewed = turned(x.reshape(heads, tokens, dim).transpose(0, 1), right).transpose(0, 1).reshape(x.shape)
    if tokens != heads:
        known = {f"view or reshape from {[tokens, heads]} to {[heads, tokens]} puts numbers of other tokens there; "
                 "what exchanges two dimensions?": (viewed, viewed.reshape(heads, tokens, dim).transpose(0, 1)),
                 "right until the way back: view or reshape does not undo a transpose":
                     turned(x, right).transpose(0, 1).reshape(x.shape)}
    else:
        known = {f"{heads} heads and {tokens} tokens, so nothing clashes, and each head is turned as if its number "
                 "were its token's: which order of dimensions does self.rotate expect?": turned(x, angle[:heads][None]),
                 "heads and tokens have changed places on the way back": turned(x, right).transpose(0, 1)}
    known |= misturned(x, cos, sin)
    return {f"{name}, [tokens, heads] = {[tokens, heads]}: {says}": value for says, value in known.items()}
