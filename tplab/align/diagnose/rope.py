"""Mistakes of RoPE: other positions, other angles, terms exchanged or lost."""

import math
from collections.abc import Callable

import torch

from tplab.align.arithmetic import rotated
from tplab.align.diagnose.altered import At, coarser, in_calls, rounded, unaltered
from tplab.align.diagnose.case import IN_DECODE, IN_PROMPTS, Case, Diagnosis
from tplab.align.diagnose.table import Family, Mistake, in_scope, procedure
from tplab.align.points import layer_of, made_by
from tplab.model.rope import Rotary

ROPE_POINTS = made_by("rope")
FULL_FLOAT = ("default", "linear", "llama3", "yarn")  # angles are a product of position and frequency
THETAS = (1e3, 1e4, 4e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 8e6, 1e7)  # tried where none can be read off
STRETCHES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 4.0, 8.0)


# Positions.

def _usual_positions(case: Case) -> dict[str, torch.Tensor]:
    """As which positions tokens are often turned."""
    positions, decoded = case.positions, case.decoded
    return {"decoded one too far": positions + decoded, "decoded at 0": positions * ~decoded,
            "prompts at 0": positions * decoded, "calls from 0": positions - case.begins}


def _misplaced(case: Case, used: torch.Tensor) -> dict[tuple[int, int, int], str]:
    """The first token that was turned as if it stood elsewhere, its position and the one that was used; in words."""
    wrong = (used != case.positions).nonzero().flatten()
    return {(row, position, turned): f"token {row}, at position {position}, was rotated as if it stood at {turned} "
            f"({len(wrong)} of {len(used)} tokens are misplaced). Keys are wrong, values are right: a position error"
            for row, position, turned in [(int(x[0]) for x in (wrong, case.positions[wrong], used[wrong]))]
            } if len(wrong) else {}


def _positions(name: str, says: str, which: str, *alike: str) -> Mistake:
    return Mistake(name, says, lambda at, _: dict(zip(("cos", "sin"), at.frame.tables(
        at.case.config.hf, _usual_positions(at.case)[which], *at.frame.rope_type(at.layer)))),
                   lambda case: _misplaced(case, _usual_positions(case)[which]), alike=alike,
                   numbers="first_token position used")


@procedure(*ROPE_POINTS, names="rope_positions")
def other_positions(case: Case) -> Diagnosis | None:
    """As which position was each token turned? Try them all."""
    used = _positions_used(case)
    if used is None or torch.equal(used, 2 * case.positions) or used.any() and any(
            torch.equal(used, usual) for usual in (case.positions, *_usual_positions(case).values())):
        return None  # all at 0 is no rotation, for which there are several names
    (numbers, says), = _misplaced(case, used).items()
    found = case.diagnosis("rope_positions", f"RoPE is right, the positions are not: {says}.",
                           **dict(zip(("first_token", "position", "used"), numbers)))
    kinds = case.decoded[used != case.positions].unique()
    one_kind = len(kinds) < len(case.decoded.unique())
    return in_scope(found, IN_DECODE if kinds[0] else IN_PROMPTS) if one_kind else found


def _positions_used(case: Case) -> torch.Tensor | None:
    """For each token the position as which it was turned, ``[tokens]``; None if for some token there is none."""
    if case.op != case.point:
        return None
    (before, ours), candidates = _before_and_after(case), torch.arange(-1, len(case.places) + 2)
    cos, sin = unaltered(case, 0).rotary(candidates).values()
    gaps = torch.stack([(rotated(case.config.model_type, before, cos[:, [i]], sin[:, [i]]) - ours).abs().amax((1, 2))
                        for i in range(len(candidates))])
    gap, nearest = gaps.min(0)
    if not (case.looked_at(gap) <= case.tolerance * ours.abs().max()).all():
        return None
    return torch.where(case.all_or(case.scope), candidates[nearest], case.positions)


def _before_and_after(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What RoPE was given and what it made of it, of all heads of the wrong ranks, ``[rows, heads, head_dim]``."""
    pairs = [(unaltered(case, rank).given(), case.shard(case.op, rank)) for rank in case.wrong_ranks]
    return tuple(torch.cat(side, 1) for side in zip(*pairs))


# Frequencies.

def own_frequencies(case: Case) -> torch.Tensor:
    """The checkpoint's own frequencies, ``[head_dim / 2]``."""
    def read() -> torch.Tensor:
        cos, sin = (table[0, 0].double() for table in unaltered(case, 0).rotary(torch.tensor([1])).values())
        return torch.atan2(sin, cos)[:case.turned // 2]
    return case.once(("frequencies",), read)


def own_factor(case: Case) -> float:
    """The factor of the checkpoint's cos and sin."""
    return math.hypot(*(table[0, 0, 0] for table in case.frame.cos_sin(f"{case.layer}.")))


def measured_frequencies(case: Case) -> torch.Tensor | None:
    """By how much a pair was turned from one position to the next, ``[head_dim / 2]``; None where that cannot be read
    off, because q (or k) before or after was not recorded."""
    if case.op != case.point or not case.has(case.made_from(case.op)[0]):
        return None
    before, after = (torch.view_as_complex(
        x.unflatten(-1, (-1, 2)) if case.config.rotates_pairs else torch.stack(x.chunk(2, -1), -1))
        for x in (case.looked_at(x)[..., :case.turned].double() for x in _before_and_after(case)))
    turn, rows = (after * before.conj()).sum(1), case.looked_at(case.positions)  # [tokens, pairs], [tokens]
    positions = rows.unique()
    turn = torch.stack([turn[rows == position].sum(0) for position in positions])
    neighbours = positions.diff() == 1  # between others, nothing says how often a pair went round
    if not neighbours.any() or not torch.isfinite(torch.view_as_real(turn)).all():
        return None
    frequencies = (turn[1:] * turn[:-1].conj())[neighbours].sum(0).angle()
    far = (positions - positions[0])[:, None].double()
    rest = (turn * turn[0].conj() * torch.polar(torch.ones_like(far), -far * frequencies)).angle()
    return frequencies + (far * rest).sum(0) / (far * far).sum()


def _sizes(case: Case) -> dict[tuple[int, float], str]:
    """Other sizes of a head that may stand in the exponent, each with the theta that gives the same angles."""
    config, dim = case.config, case.turned
    return {(size, case.rope["rope_theta"] ** (dim / size)): "" for size in (
        config.hidden_size // config.num_heads, config.hidden_size, 2 * dim, dim // 2) if size != dim}


def _thetas(case: Case) -> dict[float, str]:
    """Other thetas, read off where that is possible."""
    candidates, dim = set(THETAS), case.turned
    if (measured := measured_frequencies(case)) is not None:
        # theta from each pair that turns far enough to be read; the middle one
        frequencies, steps = measured.clamp(min=1e-12), torch.arange(dim // 2).clamp(min=1)
        readings = (-frequencies.log() * dim / (2 * steps))[1:][frequencies[1:] > frequencies.max() / 1e3]
        if not len(readings) or not 0 < (log := readings.median().item()) < 40:
            return {}
        candidates = {math.exp(log), *(float(f"{math.exp(log):.{digits}g}") for digits in (1, 2, 3, 6))}
    # One that was read off differs from another size's in its last digits: then the size says more.
    known = [theta for _, theta in _sizes(case)]
    return {theta: "" for theta in sorted(candidates) if theta != case.rope["rope_theta"]
            and all(abs(theta / other - 1) > 1e-4 for other in known)}


def _by_theta(at: At, theta: float) -> dict[str, torch.Tensor]:
    exponents = -2 * torch.arange(at.case.turned // 2) / at.case.turned
    return by_frequency(at, theta ** exponents, own_factor(at.case))


def _stretches(case: Case) -> dict[tuple, str]:
    """The factors by which all positions may have been multiplied; read off where that is possible."""
    frequencies, found = own_frequencies(case), set(STRETCHES)
    if (measured := measured_frequencies(case)) is not None:
        known = frequencies > frequencies.max() / 1e3
        stretch = (measured[known] / frequencies[known]).median().item()
        found = {float(f"{stretch:.2g}"), float(f"{stretch:.4g}"), 1 / max(round(1 / max(stretch, 1e-3)), 1)}
    return {(part, 1, 1): f"{part:.4g}" for part in sorted(found)
            if part > 0 and abs(part - 1) > 1e-3 and abs(part - 2) > 1e-3}


# Tables of cos and sin.

def angles(at: At, turn: torch.Tensor, scale: float = 1.0, dtype: torch.dtype | None = None) -> dict:
    """Tables of these angles, ``[rows, head_dim / 2]``, rounded to ``dtype`` if one is given."""
    both = (scale * table.repeat(1, at.case.times_in_tables)[None] for table in (turn.cos(), turn.sin()))
    return dict(zip(("cos", "sin"), ((x if dtype is None else x.to(dtype)).to(at.frame.dtype) for x in both)))


def by_frequency(at: At, frequencies: torch.Tensor, scale: float = 1.0) -> dict:
    """Pair i of the token at position p turned by p × frequencies[i]."""
    return angles(at, at.frame.positions[:, None].double() * frequencies[None], scale)


def _spectrum(at: At, value: tuple) -> dict:
    frequencies, (stretch, power, share) = own_frequencies(at.case), value
    some = torch.arange(len(frequencies)) < len(frequencies) // share
    return by_frequency(at, frequencies * stretch * some, own_factor(at.case) ** power)


def _spectra(name: str, says: str, values) -> Mistake:
    return Mistake(name, "{op} is not what the checkpoint's RoPE gives: " + says + ".", _spectrum, values)


def _scaled(case: Case) -> dict:
    scale = own_factor(case)
    return {(1, power, 1): f"the factor {scale:.4g} of cos and sin was {what}"
            for power, what in ((0, "left out"), (2, "taken twice")) if abs(scale - 1) > 1e-6}


ROUNDED = {(stages, dtype): text.format(str(dtype).removeprefix("torch."), limit)
           for dtype, limit in ((torch.bfloat16, 256), (torch.float16, 2048)) for stages, text in {
               ("tables",): "cos and sin were rounded to {}", ("frequencies",): "the frequencies were rounded to {}",
               ("angles",): "the angles were rounded to {}",
               ("positions",): "the positions were rounded to {}, which counts no further than {}",
               ("positions", "frequencies", "angles"): "the angles were computed in {}",
               ("positions", "frequencies", "angles", "tables"): "the angles, their cos and sin were computed in {}"
           }.items()}


def _rounded_tables(at: At, value: tuple[tuple[str, ...], torch.dtype]) -> dict:
    stages, dtype = value

    def few(x: torch.Tensor, stage: str) -> torch.Tensor:
        return rounded(x, dtype) if stage in stages else x
    frequencies = Rotary(at.case.config.hf).embedding.inv_freq  # to the last bit: far positions show it
    turn = few(few(at.frame.positions[:, None].float(), "positions") * few(frequencies, "frequencies"), "angles")
    return angles(at, turn, own_factor(at.case), dtype if "tables" in stages else None)


# How the tables are applied.

def _over_heads(at: At) -> torch.Tensor:
    x = at.given().transpose(0, 1)
    cos, sin = (table[:, torch.arange(len(x)) % table.shape[1]] for table in at.rotary().values())
    return rotated(at.case.config.model_type, x, cos, sin).transpose(0, 1)


def _paired(neighbours: bool) -> Callable:
    """Numbers 0 and 1, 2 and 3, … of a head turned as pairs, or its two halves."""
    def change(at: At) -> torch.Tensor:
        x, size = at.given(), at.case.turned
        cos, sin = (table[0, :, None, :size // 2] for table in at.rotary().values())
        a, b = (x[..., :size:2], x[..., 1:size:2]) if neighbours else x[..., :size].chunk(2, -1)
        turned = a * cos - b * sin, a * sin + b * cos
        turned = torch.stack(turned, -1).flatten(-2) if neighbours else torch.cat(turned, -1)
        return torch.cat([turned, x[..., size:]], -1)
    return change


def _tables(says: str, change: Callable, twice: bool = False) -> Mistake:
    """Other tables: ``change(cos, sin)``, each ``[1, rows, angles]`` as the model has them; ``twice``: only where they
    hold each angle twice (gpt-oss's hold it once)."""
    return Mistake("rope_terms", "{op} is not what the checkpoint's RoPE gives: " + says + ".",
                   lambda at: dict(zip(("cos", "sin"), change(*at.rotary().values()))),
                   when=lambda case: not twice or case.times_in_tables == 2)


def _in_pairs(table: torch.Tensor) -> torch.Tensor:
    return table[..., :table.shape[-1] // 2].repeat_interleave(2, -1)


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


def _viewed(says: str, before: bool, behind: bool) -> Mistake:
    def view(x):
        return x.reshape(x.shape[1], len(x), -1).transpose(0, 1)

    def back(x):
        return x.transpose(0, 1).reshape(x.shape)

    def change(at: At) -> torch.Tensor:
        turned = at.make(x=in_calls(at.case, at.given(), view) if before else at.given())
        return in_calls(at.case, turned, back) if behind else turned
    return Mistake("rope_viewed", "{op} is turned with numbers of other tokens: " + says + ", a view or reshape stands "
                   "where a transpose exchanges heads and tokens.", change)


ROPE = (
    Family(ROPE_POINTS, Mistake(
        "rope_missing", "{op} equals {op[0]}: nothing was rotated. RoPE is not called, or it fails and something "
        "swallows the exception.", lambda at: at.given(), alike=("rope_swallowed",))),
    Family(ROPE_POINTS, Mistake(
        "rope_in_every_layer", "{op} is {op[0]} rotated; in this layer the model does not rotate.",
        lambda at: dict(zip(("cos", "sin"), at.frame.cos_sin(at.layer))),
        when=lambda case: not case.config.rotates[layer_of(case.first.name)]), Mistake(
        "rope_whole_head", "All {dim} numbers of a head were rotated; this model rotates the first "
        "{c.partial_rotary_factor:.0%} of them.", lambda at: at.rotary(partial_rotary_factor=1.0),
        when=lambda case: case.config.partial_rotary_factor != 1)),
    Family(ROPE_POINTS, Mistake(
        "rope_pairs", "{op} is {op[0]} with numbers 0 and 1, 2 and 3, … turned as pairs. This checkpoint pairs i with "
        "i + {half}, the two halves of a head.", _paired(True),
        when=lambda case: not case.config.rotates_pairs), Mistake(
        "rope_pairs", "{op} is {op[0]} with the two halves of a head turned together; this checkpoint pairs numbers 0 "
        "and 1, 2 and 3, ….", _paired(False),
        when=lambda case: case.config.rotates_pairs)),
    Family(ROPE_POINTS, Mistake(
        "rope_over_heads", "All tokens of a head are turned by the same angle, head h by that of position h: cos and "
        "sin were broadcast over the heads instead of the tokens.", _over_heads)),
    Family(ROPE_POINTS, Mistake(
        "low_precision", "{op} fits {op[0]} in {text}, rotated: it was cast to {text} before RoPE.",
        lambda at, dtype: {"x": rounded(at.given(), dtype)}, coarser)),
    Family(ROPE_POINTS, Mistake(
        "rope_default_theta", "{op} is right for theta 10000; the checkpoint says {theta:g}.",
        lambda at: at.rotary(rope_theta=10000.0), when=lambda case: case.rope["rope_theta"] != 10000.0)),
    Family(ROPE_POINTS, Mistake(
        "rope_scaling_ignored", "{op} is right for an unscaled RoPE; the checkpoint scales it ({kind}).",
        lambda at: at.rotary(rope_type="default"), when=lambda case: case.rope["rope_type"] != "default")),
    Family(ROPE_POINTS, _positions(
        "decode_position_off_by_one", "One too far: {text}. The newest of n tokens stands at position n - 1.",
        "decoded one too far"), _positions(
        "decode_position_restarted", "Counted from 0 again: {text}. A decode step's position is the number of tokens "
        "before it.", "decoded at 0", "rope_missing", "rope_swallowed"), _positions(
        "rope_missing", "{op} equals {op[0]} where several tokens came at once; tokens that came alone were turned: "
        "{text}. RoPE fails for prompts, and something swallows the exception.", "prompts at 0", "rope_swallowed"),
        _positions(
            "rope_positions", "RoPE is right, the positions are not: every call counts them from 0 again; {text}.",
            "calls from 0")),
    other_positions,
    Family(ROPE_POINTS, Mistake(
        "rope_theta", "{op} is right for a head of {value[0]} numbers in the exponent of its angles; this model's "
        "heads have {turned}.", lambda at, value: _by_theta(at, value[1]), _sizes, numbers="size"), Mistake(
        "rope_theta", "{op} is right for theta {value:g}; the checkpoint says {theta:g}.", _by_theta, _thetas,
        numbers="theta")),
    Family(ROPE_POINTS, _spectra("rope_attention_factor", "{text}", _scaled),
           _spectra("rope_direction", "it was turned the other way round: the sign of sin is wrong", {(-1, 1, 1): ""}),
           _spectra("rope_twice", "it was turned twice", {(2, 2, 1): ""}),
           _spectra("rope_partial", "only the first {text} pairs were turned", lambda case: {
               (1, 0, share): f"{case.config.head_dim // 2 // share} of {case.config.head_dim // 2}"
               for share in (4, 2)}),
           _spectra("rope_scaling", "all positions are multiplied by {text}", _stretches)),
    Family(ROPE_POINTS, Mistake("rope_partial", "Only the first {text} of a head's {dim} numbers were turned.",
                                _first_numbers, _fronts)),
    Family(ROPE_POINTS, Mistake(
        "rope_dtype", "{op} is turned by angles of too few digits: {text}. They belong in float32.", _rounded_tables,
        ROUNDED, when=lambda case: case.rope["rope_type"] in FULL_FLOAT and not case.config.rope_layer_types)),
    Family(ROPE_POINTS,
           _tables("cos and sin have changed places", lambda cos, sin: (sin, cos)),
           _tables("it is multiplied with cos, and the sine's part is missing", lambda cos, sin: (cos, 0 * sin)),
           _tables("the cosine's part is missing", lambda cos, sin: (0 * cos, sin)),
           _tables("the other half comes in without its sign, which mirrors and does not turn",
                   lambda cos, sin: (cos, torch.cat([-sin.chunk(2, -1)[0], sin.chunk(2, -1)[1]], -1)), True),
           _tables("the halves are turned by tables that were laid out for pairs of neighbours",
                   lambda cos, sin: (_in_pairs(cos), _in_pairs(sin)), True),
           Mistake("rope_terms", "{op} is not what the checkpoint's RoPE gives: theta's exponents have the wrong sign, "
                   "so the later pairs are the faster ones.", lambda at: angles(  # in float32: they are large
                       at, at.frame.positions[:, None] * at.case.rope["rope_theta"] ** (
                           torch.arange(0, at.case.turned, 2) / at.case.turned)))),
    Family(ROPE_POINTS, _viewed("before the rotation and behind it", True, True), _viewed(
        "before the rotation", True, False), _viewed("behind the rotation", False, True)),
)
