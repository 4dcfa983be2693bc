"""Mistakes of RoPE: other positions, other angles, terms exchanged or lost."""

from collections.abc import Callable

import torch

from tplab.align.arithmetic import rotated
from tplab.align.diagnose import numbers
from tplab.align.diagnose.case import Case
from tplab.align.diagnose.table import Family, Mistake
from tplab.align.diagnose.wrong import At, coarser, in_calls, rounded
from tplab.align.points import made_by
from tplab.model.rope import Rotary

ROPE = made_by("rope")
FULL_FLOAT = ("default", "linear", "llama3", "yarn")  # angles are a product of position and frequency


def _front(at: At, change: Callable) -> torch.Tensor:
    """``change(x, cos, sin)`` of the numbers of a head that turn, and the others as they are."""
    x, size = at.given(), at.case.turned
    cos, sin = (table[0, :, None].repeat(1, 1, size // table.shape[-1]) for table in at.rotary().values())
    return torch.cat([change(x[..., :size], cos, sin), x[..., size:]], -1)


def _neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = (table[..., :x.shape[-1] // 2] for table in (cos, sin))
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def _halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + _other_half(x) * sin


def _over_heads(at: At) -> torch.Tensor:
    x, tables = at.given(), at.rotary()
    rows = torch.arange(x.shape[1]) % tables["cos"].shape[1]
    return rotated(at.case.config.model_type, x.transpose(0, 1), tables["cos"][:, rows], tables["sin"][:, rows]
                   ).transpose(0, 1)


def angles(at: At, turn: torch.Tensor, scale: float = 1.0, dtype: torch.dtype | None = None) -> dict:
    """Tables of these angles, ``[rows, head_dim / 2]``, rounded to ``dtype`` if one is given."""
    both = (scale * table.repeat(1, at.case.times_in_tables)[None] for table in (turn.cos(), turn.sin()))
    return dict(zip(("cos", "sin"), ((x if dtype is None else x.to(dtype)).to(at.frame.dtype) for x in both)))


def by_frequency(at: At, frequencies: torch.Tensor, scale: float = 1.0) -> dict:
    """Pair i of the token at position p turned by p × frequencies[i]."""
    return angles(at, at.frame.positions[:, None].double() * frequencies[None], scale)


def _usual_positions(case: Case) -> dict[str, torch.Tensor]:
    rows = torch.tensor([place in case.decoded for place in case.places])
    return {"one": case.positions + rows, "zero": case.positions * ~rows, "call": case.positions - case.begins}


def _as_positions(name: str, which: str, says: str) -> Mistake:
    return Mistake(name, "Attention fits other positions: " + says + ".", lambda at: dict(zip(
        ("cos", "sin"), at.frame.tables(at.case.config.hf, _usual_positions(at.case)[which], *at.frame.rope_type(
            at.layer)))), when=lambda case:
        case.op != case.point and not torch.equal(_usual_positions(case)[which], case.positions))


def _spectrum(at: At, value: tuple) -> dict:
    frequencies, scale = numbers.own_frequencies(at.case)
    stretch, power, share = value
    some = torch.arange(len(frequencies)) < len(frequencies) // share
    return by_frequency(at, frequencies * stretch * some, scale ** power)


def _spectra(name: str, says: str, values) -> Mistake:
    return Mistake(name, "{op} is not what the checkpoint's RoPE gives: " + says + ".", _spectrum, values)


def _scaled(case: Case) -> dict:
    scale = numbers.own_frequencies(case)[1]
    return {(1, power, 1): f"the factor {scale:.4g} of cos and sin was {what}"
            for power, what in ((0, "left out"), (2, "taken twice")) if abs(scale - 1) > 1e-6}


def _first_numbers(at: At, value: tuple[int, int]) -> torch.Tensor:
    size, whole = value
    x, theta = at.given(), at.case.rope["rope_theta"]
    tables = by_frequency(at, (theta ** (-torch.arange(0, size, 2) / whole)).double())
    turned = rotated(at.case.config.model_type, x[..., :size], tables["cos"], tables["sin"])
    return torch.cat([turned, x[..., size:]], -1)


def _fronts(case: Case) -> dict:
    dim = case.config.head_dim
    return {(dim // share, whole): f"{dim // share}" for share in (4, 2) for whole in (dim, dim // share)
            if dim // share % 2 == 0}


def _rounded_tables(at: At, value: tuple[str, torch.dtype]) -> dict:
    what, dtype = value
    rows, scale = at.frame.positions[:, None], numbers.own_frequencies(at.case)[1]
    single = Rotary(at.case.config.hf).embedding.inv_freq  # to the last bit: far positions show it
    few = rows.to(dtype)
    turn = {"tables": rows * single[None], "frequencies": rows * single.to(dtype).float(),
            "angles": (rows * single[None]).to(dtype), "positions": few.float() * single,
            "product": few * single.to(dtype), "all": few * single.to(dtype)}[what]
    return angles(at, turn.float(), scale, dtype if what in ("tables", "all") else None)


def _table_texts(case: Case) -> dict:
    says = {"tables": "cos and sin were rounded to {}", "frequencies": "the frequencies were rounded to {}",
            "angles": "the angles were rounded to {}", "positions": "the positions were rounded to {}, which counts no "
            "further than {}", "product": "the angles were computed in {}",
            "all": "the angles, their cos and sin were computed in {}"}
    return {(what, dtype): text.format(str(dtype).removeprefix("torch."), limit) for dtype, limit in (
        (torch.bfloat16, 256), (torch.float16, 2048)) for what, text in says.items()}


def _other_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _terms(says: str, change: Callable) -> Mistake:
    return Mistake("rope_terms", "{op} is not what the checkpoint's RoPE gives: " + says + ".",
                   lambda at: _front(at, change))


def _in_pairs(table: torch.Tensor) -> torch.Tensor:
    return table[..., :table.shape[-1] // 2].repeat_interleave(2, -1)


def _upwards(at: At) -> dict:
    theta, size = at.case.rope["rope_theta"], at.case.turned
    turn = at.frame.positions[:, None] * theta ** (torch.arange(0, size, 2) / size)  # in float32: they are large
    return angles(at, turn)


def _viewed(says: str, before: bool, behind: bool) -> Mistake:
    def change(at: At) -> torch.Tensor:
        def view(x):
            return x.reshape(x.shape[1], len(x), -1).transpose(0, 1)

        def back(x):
            return x.transpose(0, 1).reshape(x.shape)
        turned = at.make(x=in_calls(at.case, at.given(), view) if before else at.given())
        return in_calls(at.case, turned, back) if behind else turned
    return Mistake("rope_viewed", "{op} is turned with numbers of other tokens: " + says + ", a view or reshape stands "
                   "where a transpose exchanges heads and tokens.", change)


def _turns(case: Case) -> bool:
    return case.config.rotates[int(case.layer.split(".")[1])]


TURNING = (
    Family(ROPE, Mistake(
        "rope_missing", "{op} equals {op[0]}: nothing was rotated. RoPE is not called, or it fails and something "
        "swallows the exception.", lambda at: at.given(), alike=("rope_swallowed",))),
    Family(ROPE, Mistake(
        "rope_in_every_layer", "{op} is {op[0]} rotated; in this layer the model does not rotate.",
        lambda at: dict(zip(("cos", "sin"), at.frame.cos_sin(at.layer))), when=lambda case: not _turns(case)), Mistake(
        "rope_whole_head", "All {dim} numbers of a head were rotated; this model rotates the first "
        "{c.partial_rotary_factor:.0%} of them.", lambda at: at.rotary(partial_rotary_factor=1.0),
        when=lambda case: case.config.partial_rotary_factor != 1)),
    Family(ROPE, Mistake(
        "rope_pairs", "{op} is {op[0]} with numbers 0 and 1, 2 and 3, … turned as pairs. This checkpoint pairs i with "
        "i + {half}, the two halves of a head.", lambda at: _front(at, _neighbours),
        when=lambda case: not case.config.rotates_pairs), Mistake(
        "rope_pairs", "{op} is {op[0]} with the two halves of a head turned together; this checkpoint pairs numbers 0 "
        "and 1, 2 and 3, ….", lambda at: _front(at, _halves), when=lambda case: case.config.rotates_pairs)),
    Family(ROPE, Mistake(
        "rope_over_heads", "All tokens of a head are turned by the same angle, head h by that of position h: cos and "
        "sin were broadcast over the heads instead of the tokens.", _over_heads)),
    Family(ROPE, Mistake(
        "low_precision", "{op} fits {op[0]} in {text}, rotated: it was cast to {text} before RoPE.",
        lambda at, dtype: {"x": rounded(at.given(), dtype)}, coarser)),
    Family(ROPE, Mistake(
        "rope_default_theta", "{op} is right for theta 10000; the checkpoint says {theta:g}.",
        lambda at: at.rotary(rope_theta=10000.0),
        when=lambda case: case.rope["rope_theta"] != 10000.0)),
    Family(ROPE, Mistake(
        "rope_scaling_ignored", "{op} is right for an unscaled RoPE; the checkpoint scales it ({kind}).",
        lambda at: at.rotary(rope_type="default"),
        when=lambda case: case.rope["rope_type"] != "default")),
    numbers.other_positions,
    Family(ROPE, _as_positions("decode_position_off_by_one", "one", "a decoding token is turned one position too far; "
                               "the newest of n tokens stands at position n - 1"),
           _as_positions("decode_position_restarted", "zero", "a decoding token is turned as if it stood at 0"),
           _as_positions("rope_positions", "call", "every call counts its positions from 0 again")),
    numbers.another_theta,
    Family(ROPE, _spectra("rope_attention_factor", "{text}", _scaled),
           _spectra("rope_direction", "it was turned the other way round: the sign of sin is wrong", {(-1, 1, 1): ""}),
           _spectra("rope_twice", "it was turned twice", {(2, 2, 1): ""}),
           _spectra("rope_partial", "only the first {text} pairs were turned", lambda case: {
               (1, 0, share): f"{case.config.head_dim // 2 // share} of {case.config.head_dim // 2}"
               for share in (4, 2)}),
           _spectra("rope_scaling", "all positions are multiplied by {text}", lambda case: {
               (part, 1, 1): f"{part:.4g}" for part in numbers.stretches(case)})),
    Family(ROPE, Mistake("rope_partial", "Only the first {text} of a head's {dim} numbers were turned.", _first_numbers,
                         _fronts)),
    Family(ROPE, Mistake(
        "rope_dtype", "{op} is turned by angles of too few digits: {text}. They belong in float32.", _rounded_tables,
        _table_texts, when=lambda case: case.rope["rope_type"] in FULL_FLOAT and not case.config.rope_layer_types)),
    Family(ROPE, _terms("cos and sin have changed places", lambda x, cos, sin: x * sin + _other_half(x) * cos),
           _terms("it is multiplied with cos, and the sine's part is missing", lambda x, cos, sin: x * cos),
           _terms("the cosine's part is missing", lambda x, cos, sin: _other_half(x) * sin),
           _terms("the other half comes in without its sign, which mirrors and does not turn",
                  lambda x, cos, sin: x * cos + x.roll(x.shape[-1] // 2, -1) * sin),
           _terms("the halves are turned by tables that were laid out for pairs of neighbours",
                  lambda x, cos, sin: x * _in_pairs(cos) + _other_half(x) * _in_pairs(sin)),
           Mistake("rope_terms", "{op} is not what the checkpoint's RoPE gives: theta's exponents have the wrong sign, "
                   "so the later pairs are the faster ones.", _upwards)),
    Family(ROPE, _viewed("before the rotation and behind it", True, True), _viewed("before the rotation", True, False),
           _viewed("behind the rotation", False, True)),
)
