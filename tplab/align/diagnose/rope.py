"""Hypotheses about q and k after RoPE: how, and as which positions, were the tokens turned?"""

import copy

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.model.rope import Rotary, rotate


def _before(case: Case) -> torch.Tensor:
    """q or k as RoPE gets it, ``[tokens, heads, head_dim]``."""
    part = case.at[0]
    return case.right(f"{part}_norm" if case.config.qk_norm else part)


def _tables(case: Case, positions: torch.Tensor, lengths: list[int], **changed) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, ``[1, tokens, head_dim]``, of the checkpoint's RoPE with some parameters changed."""
    config = copy.deepcopy(case.config.hf)
    if changed:
        config.rope_parameters = {**config.rope_parameters, **changed}
    return Rotary(config)(_before(case), positions, lengths)


def _turned(case: Case, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x [tokens, heads, head_dim]`` turned by Hugging Face's function."""
    x = x.transpose(0, 1)[None]
    return rotate(case.config.model_type)(x, x, cos, sin)[0][0].transpose(0, 1)


def not_turned(case: Case) -> Diagnosis | None:
    """Is q after RoPE what it was before?"""
    if case.fits(case.ours(case.at), _before(case)):
        return case.found("rope_missing",
                          f"{case.at} equals {case.at[0]}: nothing was rotated. RoPE is not called, or it "
                          "fails and something swallows the exception.", "rope_swallowed", relative=case.first.relative)
    return None


def turned_in_pairs(case: Case) -> Diagnosis | None:
    """Are neighbours paired?"""
    cos, sin = _tables(case, case.positions, case.lengths)
    half = cos.shape[-1] // 2
    cos, sin = cos[0, :, None, :half], sin[0, :, None, :half]
    a, b = _before(case)[..., 0::2], _before(case)[..., 1::2]
    if case.fits(case.ours(case.at), torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)):
        return case.found("rope_pairs", f"{case.at} is {case.at[0]} with numbers 0 and 1, 2 and 3, … turned as pairs. "
                          f"This checkpoint pairs i with i + {half}, the two halves of a head.",
                          relative=case.first.relative)
    return None


def turned_by_head(case: Case) -> Diagnosis | None:
    """Does the angle depend on the head instead of the token?"""
    cos, sin = _tables(case, case.positions, case.lengths)
    heads = [len(shard.q_heads if case.at[0] == "q" else shard.kv_heads) for shard in case.plan.ranks]
    parts = []
    for shard, count in zip(case.plan.ranks, heads, strict=True):
        mine = shard.q_heads if case.at[0] == "q" else shard.kv_heads
        rows = torch.arange(count) % cos.shape[1]
        x = _before(case)[:, mine.start:mine.stop]
        parts.append(_turned(case, x.transpose(0, 1), cos[:, rows], sin[:, rows]).transpose(0, 1))
    if all(case.fits(held, part) for held, part in zip(case.shards(case.at), parts, strict=True)):
        return case.found("rope_over_heads", "All tokens of a head are turned by the same angle, head h by that of "
                          "position h: cos and sin were broadcast over the heads instead of the tokens.",
                          relative=case.first.relative)
    return None


def other_theta(case: Case) -> Diagnosis | None:
    """Is theta 10000?"""
    theta = case.config.hf.rope_parameters["rope_theta"]
    if theta != 10000.0 and case.fits(case.ours(case.at), _turned(
            case, _before(case), *_tables(case, case.positions, case.lengths, rope_theta=10000.0))):
        return case.found("rope_default_theta", f"{case.at} is right for theta 10000; the checkpoint says {theta:g}.",
                          theta=theta, relative=case.first.relative)
    return None


def scaling_ignored(case: Case) -> Diagnosis | None:
    """Are the frequencies those of an unscaled RoPE?"""
    kind = case.config.hf.rope_parameters["rope_type"]
    if kind != "default" and case.fits(case.ours(case.at), _turned(
            case, _before(case), *_tables(case, case.positions, case.lengths, rope_type="default"))):
        return case.found("rope_scaling_ignored", f"{case.at} is right for an unscaled RoPE; the checkpoint scales it "
                          f"({kind}).", relative=case.first.relative)
    return None


def other_positions(case: Case) -> Diagnosis | None:
    """As which position was each token turned? Try them all, and read the pattern."""
    used = positions_used(case)
    if used is None:
        return None
    wrong = (used != case.positions).nonzero().flatten()
    if not len(wrong):
        return None
    first, decoding = int(wrong[0]), torch.equal(wrong, decoded(case).nonzero().flatten())
    says = (f"token {first}, at position {int(case.positions[first])}, was rotated as if it stood at "
            f"{int(used[first])} "
            f"({len(wrong)} of {len(used)} tokens are misplaced). Keys are wrong, values are right: a position error")
    numbers = {"first_token": first, "position": int(case.positions[first]), "used": int(used[first])}
    if decoding and torch.equal(used[wrong], case.positions[wrong] + 1):
        return case.found("decode_position_off_by_one", f"One too far: {says}. The newest of n tokens stands at "
                          "position n - 1.", **numbers)
    if decoding and not used[wrong].any():
        return case.found("decode_position_restarted", f"Counted from 0 again: {says}. A decode step's position is the "
                          "number of tokens before it.", **numbers)
    return case.found(None, f"RoPE is right, the positions are not: {says}.", **numbers)


def decoded(case: Case) -> torch.Tensor:
    """``[tokens]``: which rows were computed alone, with a past behind them."""
    alone = {(s.number, s.segment.start) for step in (case.report.decode.steps if case.report.decode else ())
             for s in step.sequences if s.segment.count == 1 and s.segment.start}
    return torch.tensor([(prompt, position) in alone for prompt, positions in enumerate(case.rows)
                         for position in positions])


def positions_used(case: Case) -> torch.Tensor | None:
    """For each token the position as which it was turned, ``[tokens]``; None if for some token there is none."""
    x, ours = _before(case), case.ours(case.at)
    candidates = torch.arange(sum(case.lengths) + 2)
    cos, sin = _tables(case, candidates, [len(candidates)])
    scale = ours.abs().max()
    used = []
    for token, turned in zip(x, ours):
        guesses = _turned(case, token.expand(len(candidates), -1, -1), cos, sin)
        distance = (guesses - turned).abs().amax((1, 2))
        if not distance.min() <= case.tolerance * scale:
            return None
        used.append(int(distance.argmin()))
    return torch.tensor(used)


_TURNED = (not_turned, turned_in_pairs, turned_by_head, other_theta, scaling_ignored, other_positions)
HYPOTHESES = {"q_rope": _TURNED, "k_rope": _TURNED}
