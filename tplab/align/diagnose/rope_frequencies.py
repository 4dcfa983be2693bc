"""Hypotheses about RoPE that need its angles: they are read off q (or k) before and after."""

import math

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import Wrong, before_rope, best, explains, right, rotated, tables
from tplab.model.rope import Rotary

_THETAS = (1e3, 1e4, 4e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 8e6, 1e7)  # tried where none can be read off
_STRETCHES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 4.0, 8.0)


def _turned(case: Case, frequencies: torch.Tensor, scale: float = 1.0) -> Wrong:
    """The op that turns pair i of the token at position p by p × frequencies[i], times ``scale``."""
    angles = case.frame.positions[:, None].double() * torch.cat([frequencies, frequencies])[None]
    return lambda at, op: rotated(case, before_rope(at, op), *(
        (table * scale)[None].to(at.frame.dtype) for table in (angles.cos(), angles.sin())))


def _right(case: Case) -> tuple[torch.Tensor, float]:
    """The checkpoint's own frequencies, ``[head_dim / 2]``, and the factor of its cos and sin."""
    cos, sin = (table[0, 0].double() for table in tables(right(case, 0), torch.tensor([1])))
    half = len(cos) // 2
    return torch.atan2(sin, cos)[:half], math.hypot(cos[0], sin[0])


def _measured(case: Case) -> torch.Tensor | None:
    """By how much a pair was turned from one position to the next, ``[head_dim / 2]``; None where that cannot be read
    off, because q (or k) before or after was not recorded."""
    name = case.frame.before_rope(case.op[0])
    if case.op != case.point or not case.has(name):
        return None
    before, after = (torch.view_as_complex(torch.stack(x.double().chunk(2, -1), -1).contiguous())
                     for x in (case.reference(name), case.ours(case.op)))
    if not torch.isfinite(torch.view_as_real(after)).all():
        return None
    turn = (after * before.conj()).sum(1)  # [tokens, pairs]
    frequencies = None
    for position in case.positions.unique().tolist()[:200]:
        angle = turn[case.positions == position].sum(0).angle()
        if position and frequencies is None:
            if position > 1:
                return None  # nothing says how often it went round
            frequencies = angle
        elif position:
            wound = (angle - frequencies * position + math.pi).remainder(2 * math.pi) - math.pi
            frequencies = frequencies + wound / position
    return frequencies


@hypothesis("q_rope", "k_rope")
def another_theta(case: Case) -> Diagnosis | None:
    """Does another theta fit, or another size of the head in its exponent?"""
    theta_right, dim = case.config.hf.rope_parameters["rope_theta"], case.config.head_dim
    steps, scale, candidates = torch.arange(dim // 2), _right(case)[1], set(_THETAS)
    if (measured := _measured(case)) is not None:
        # theta from each pair that turns far enough to be read; the middle one
        frequencies = measured.clamp(min=1e-12)
        readings = (-frequencies.log() * dim / (2 * steps.clamp(min=1)))[1:][frequencies[1:] > frequencies.max() / 1e3]
        if not len(readings) or not 0 < (log := readings.median().item()) < 40:
            return None
        candidates = {math.exp(log), *(float(f"{math.exp(log):.{digits}g}") for digits in (1, 2, 3, 6))}
    other_sizes = {theta_right ** (dim / size): size for size in (
        case.config.hidden_size // case.config.num_heads, case.config.hidden_size, 2 * dim, dim // 2) if size != dim}
    # One that was read off differs from another size's in its last digits: then the size says more.
    candidates = {theta for theta in candidates if all(abs(theta / other - 1) > 1e-4 for other in other_sizes)}
    theta = best(case, {theta: _turned(case, theta ** (-2 * steps / dim), scale)
                        for theta in sorted(candidates | {*other_sizes}) if theta != theta_right})
    if theta in other_sizes:
        return case.diagnosis("rope_theta", f"{case.op} is right for a head of {other_sizes[theta]} numbers in the "
                              f"exponent of its angles; this model's heads have {dim}.", size=other_sizes[theta])
    if theta is not None:
        return case.diagnosis("rope_theta", f"{case.op} is right for theta {theta:g}; the checkpoint says "
                              f"{theta_right:g}.", theta=theta)


@hypothesis("q_rope", "k_rope")
def other_frequencies(case: Case) -> Diagnosis | None:
    """Are positions stretched, pairs left alone, angles turned back or doubled, or is a factor left out?"""
    frequencies, scale = _right(case)
    half, stretches = len(frequencies), set(_STRETCHES)
    if (measured := _measured(case)) is not None:
        known = frequencies > frequencies.max() / 1e3
        stretch = (measured[known] / frequencies[known]).median().item()
        stretches = {float(f"{stretch:.2g}"), float(f"{stretch:.4g}"), 1 / max(round(1 / max(stretch, 1e-3)), 1)}
    kinds = {("rope_attention_factor", f"the factor {scale:.4g} of cos and sin was left out"):
                 _turned(case, frequencies),
             ("rope_attention_factor", f"the factor {scale:.4g} of cos and sin was taken twice"):
                 _turned(case, frequencies, scale ** 2),
             ("rope_direction", "it was turned the other way round: the sign of sin is wrong"):
                 _turned(case, -frequencies, scale),
             ("rope_twice", "it was turned twice"): _turned(case, 2 * frequencies, scale ** 2)}
    for share in (4, 2):
        some = torch.arange(half) < half // share
        kinds |= {("rope_partial", f"only the first {half // share} of {half} pairs were turned"):
                  _turned(case, frequencies * some)}
    for part in sorted(stretches):
        if part > 0 and abs(part - 1) > 1e-3 and abs(part - 2) > 1e-3:
            kinds |= {("rope_scaling", f"all positions are multiplied by {part:.4g}"):
                      _turned(case, frequencies * part, scale)}
    if (kind := best(case, kinds)) is not None:
        return case.diagnosis(kind[0], f"{case.op} is not what the checkpoint's RoPE gives: {kind[1]}.")


@hypothesis("q_rope", "k_rope")
def rotated_front_of_the_head(case: Case) -> Diagnosis | None:
    """Was only the front of each head rotated, as if the head were smaller?"""
    dim, theta = case.config.head_dim, case.config.hf.rope_parameters["rope_theta"]
    for size, whole in ((dim // share, whole) for share in (4, 2) for whole in (dim, dim // share)):
        def front(at, op, size=size, whole=whole):
            x, frequencies = before_rope(at, op), theta ** (-torch.arange(0, size, 2) / whole)
            angles = case.frame.positions[:, None] * torch.cat([frequencies, frequencies])[None]
            turned = rotated(case, x[..., :size], angles.cos()[None].to(x.dtype), angles.sin()[None].to(x.dtype))
            return torch.cat([turned, x[..., size:]], -1)
        if size % 2 == 0 and explains(case, front):
            return case.diagnosis("rope_partial", f"Only the first {size} of a head's {case.config.head_dim} numbers "
                                  "were turned.")


@hypothesis("q_rope", "k_rope")
def rounded_tables(case: Case) -> Diagnosis | None:
    """Were angles or their cos and sin computed in half precision?"""
    if case.config.hf.rope_parameters["rope_type"] not in ("default", "linear", "llama3", "yarn"):
        return None
    ways, rows, scale = {}, case.frame.positions[:, None], _right(case)[1]
    single = Rotary(case.config.hf).embedding.inv_freq  # to the last bit: far positions show it
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")

        def table(angles, dtype=None):
            def turned(at, op):
                x = before_rope(at, op)
                cos, sin = (scale * both.repeat(1, 2)[None] for both in (angles.float().cos(), angles.float().sin()))
                if dtype is not None:
                    cos, sin = cos.to(dtype), sin.to(dtype)
                return rotated(case, x, cos.to(x.dtype), sin.to(x.dtype))
            return turned
        positions, exact = rows.to(dtype).float(), rows * single[None]
        ways |= {f"cos and sin were rounded to {name}": table(exact, dtype),
                 f"the frequencies were rounded to {name}": table(rows * single.to(dtype).float()),
                 f"the angles were rounded to {name}": table(exact.to(dtype)),
                 f"the positions were rounded to {name}, which counts no further than "
                 f"{256 if dtype is torch.bfloat16 else 2048}": table(positions * single),
                 f"the angles were computed in {name}": table(positions.to(dtype) * single.to(dtype)),
                 f"the angles, their cos and sin were computed in {name}":
                     table(positions.to(dtype) * single.to(dtype), dtype)}
    if (says := best(case, ways)) is not None:
        return case.diagnosis("rope_dtype", f"{case.op} is turned by angles of too few digits: {says}. They belong "
                              "in float32.")
