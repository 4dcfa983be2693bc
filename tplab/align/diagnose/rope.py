"""Hypotheses about q and k after RoPE: how, and as which positions, were the tokens rotated?"""

import copy

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.model.rope import Rotary, rotate


def _before_rope(case: Case) -> torch.Tensor:
    """q or k as RoPE gets it, ``[tokens, heads, head_dim]``."""
    part = case.point[0]
    return case.reference(f"{part}_norm" if case.config.qk_norm else part)


def _cos_sin(case: Case, **changed) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, ``[1, tokens, head_dim]``, of the checkpoint's RoPE with some parameters changed."""
    config = copy.deepcopy(case.config.hf)
    config.rope_parameters = {**config.rope_parameters, **changed}
    return Rotary(config)(_before_rope(case), case.positions, case.lengths)


def _rotated(case: Case, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x [tokens, heads, head_dim]`` rotated by Hugging Face's function."""
    x = x.transpose(0, 1)[None]
    return rotate(case.config.model_type)(x, x, cos, sin)[0][0].transpose(0, 1)


@hypothesis("q_rope", "k_rope")
def not_rotated(case: Case) -> Diagnosis | None:
    """Is q after RoPE what it was before?"""
    if case.fits(case.ours(case.point), _before_rope(case)):
        return case.diagnosis("rope_missing", f"{case.point} equals {case.point[0]}: nothing was rotated. RoPE is not "
                              "called, or it fails and something swallows the exception.", "rope_swallowed")


@hypothesis("q_rope", "k_rope")
def rotated_in_pairs(case: Case) -> Diagnosis | None:
    """Are neighbours paired?"""
    cos, sin = _cos_sin(case)
    half = cos.shape[-1] // 2
    cos, sin = cos[0, :, None, :half], sin[0, :, None, :half]
    a, b = _before_rope(case)[..., 0::2], _before_rope(case)[..., 1::2]
    if case.fits(case.ours(case.point), torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)):
        return case.diagnosis("rope_pairs", f"{case.point} is {case.point[0]} with numbers 0 and 1, 2 and 3, … turned "
                              f"as pairs. This checkpoint pairs i with i + {half}, the two halves of a head.")


@hypothesis("q_rope", "k_rope")
def rotated_by_head(case: Case) -> Diagnosis | None:
    """Does the angle depend on the head instead of the token?"""
    cos, sin = _cos_sin(case)
    for shard, held in zip(case.plan.ranks, case.shards(case.point), strict=True):
        mine = shard.q_heads if case.point[0] == "q" else shard.kv_heads
        rows = torch.arange(len(mine)) % cos.shape[1]
        x = _before_rope(case)[:, mine.start:mine.stop].transpose(0, 1)
        if not case.fits(held, _rotated(case, x, cos[:, rows], sin[:, rows]).transpose(0, 1)):
            return None
    return case.diagnosis("rope_over_heads", "All tokens of a head are turned by the same angle, head h by that of "
                          "position h: cos and sin were broadcast over the heads instead of the tokens.")


@hypothesis("q_rope", "k_rope")
def default_theta(case: Case) -> Diagnosis | None:
    """Is theta 10000?"""
    theta = case.config.hf.rope_parameters["rope_theta"]
    if theta != 10000.0 and case.fits(case.ours(case.point), _rotated(
            case, _before_rope(case), *_cos_sin(case, rope_theta=10000.0))):
        return case.diagnosis("rope_default_theta", f"{case.point} is right for theta 10000; the checkpoint says "
                              f"{theta:g}.", theta=theta)


@hypothesis("q_rope", "k_rope")
def scaling_ignored(case: Case) -> Diagnosis | None:
    """Are the frequencies those of an unscaled RoPE?"""
    kind = case.config.hf.rope_parameters["rope_type"]
    if kind != "default" and case.fits(case.ours(case.point), _rotated(
            case, _before_rope(case), *_cos_sin(case, rope_type="default"))):
        return case.diagnosis("rope_scaling_ignored", f"{case.point} is right for an unscaled RoPE; the checkpoint "
                              f"scales it ({kind}).")


@hypothesis("q_rope", "k_rope")
def other_positions(case: Case) -> Diagnosis | None:
    """As which position was each token turned? Try them all, and read the pattern."""
    used = _positions_used(case)
    if used is None or torch.equal(used, case.positions):
        return None
    wrong = (used != case.positions).nonzero().flatten()
    decoded = [row for row, place in enumerate(case.places) if place in case.decoded]
    first, decoding = int(wrong[0]), wrong.tolist() == decoded
    numbers = {"first_token": first, "position": int(case.positions[first]), "used": int(used[first])}
    says = (f"token {first}, at position {numbers['position']}, was rotated as if it stood at {numbers['used']} "
            f"({len(wrong)} of {len(used)} tokens are misplaced). Keys are wrong, values are right: a position error")
    if decoding and torch.equal(used[wrong], case.positions[wrong] + 1):
        return case.diagnosis("decode_position_off_by_one", f"One too far: {says}. The newest of n tokens stands at "
                              "position n - 1.", **numbers)
    if decoding and not used[wrong].any():
        return case.diagnosis("decode_position_restarted", f"Counted from 0 again: {says}. A decode step's position is "
                              "the number of tokens before it.", **numbers)
    return case.diagnosis(None, f"RoPE is right, the positions are not: {says}.", **numbers)


def _positions_used(case: Case) -> torch.Tensor | None:
    """For each token the position as which it was turned, ``[tokens]``; None if for some token there is none."""
    before, ours = _before_rope(case), case.ours(case.point)
    candidates = torch.arange(sum(case.lengths) + 2)
    cos, sin = Rotary(case.config.hf)(before, candidates, [len(candidates)])
    used = []
    for token, turned in zip(before, ours):
        guesses = _rotated(case, token.expand(len(candidates), -1, -1), cos, sin)
        distance = (guesses - turned).abs().amax((1, 2))
        if not distance.min() <= case.tolerance * ours.abs().max():
            return None
        used.append(int(distance.argmin()))
    return torch.tensor(used)
