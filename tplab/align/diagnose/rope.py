"""Hypotheses about q and k after RoPE: how, and as which positions, were the tokens rotated?"""

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import before_rope, best, coarser, explains, right, rotated, rounded, tables


@hypothesis("q_rope", "k_rope")
def not_rotated(case: Case) -> Diagnosis | None:
    """Is q after RoPE what it was before?"""
    if explains(case, before_rope):
        return case.diagnosis("rope_missing", f"{case.op} equals {case.op[0]}: nothing was rotated. RoPE is not "
                              "called, or it fails and something swallows the exception.", "rope_swallowed")


@hypothesis("q_rope", "k_rope")
def rotated_in_pairs(case: Case) -> Diagnosis | None:
    """Are neighbours paired?"""
    def pairs(at, op):
        x = before_rope(at, op)
        cos, sin = (table[0, :, None, :x.shape[-1] // 2] for table in tables(at))
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    if explains(case, pairs):
        return case.diagnosis("rope_pairs", f"{case.op} is {case.op[0]} with numbers 0 and 1, 2 and 3, … turned "
                              f"as pairs. This checkpoint pairs i with i + {case.config.head_dim // 2}, the two halves "
                              "of a head.")


@hypothesis("q_rope", "k_rope")
def rotated_by_head(case: Case) -> Diagnosis | None:
    """Does the angle depend on the head instead of the token?"""
    def by_head(at, op):
        x = before_rope(at, op)
        cos, sin = tables(at)
        rows = torch.arange(x.shape[1]) % cos.shape[1]
        return rotated(case, x.transpose(0, 1), cos[:, rows], sin[:, rows]).transpose(0, 1)
    if explains(case, by_head):
        return case.diagnosis("rope_over_heads", "All tokens of a head are turned by the same angle, head h by that of "
                              "position h: cos and sin were broadcast over the heads instead of the tokens.")


@hypothesis("q_rope", "k_rope")
def rounded_first(case: Case) -> Diagnosis | None:
    """Had q fewer digits when it was turned?"""
    for dtype in coarser(case):
        if explains(case, lambda at, op, dtype=dtype: rotated(case, rounded(before_rope(at, op), dtype), *tables(at))):
            name = str(dtype).removeprefix("torch.")
            return case.diagnosis("low_precision", f"{case.op} fits {case.op[0]} in {name}, rotated: it was cast to "
                                  f"{name} before RoPE.")


def _changed(case: Case, **parameters) -> bool:
    """Whether the checkpoint's RoPE with other parameters fits."""
    return explains(case, lambda at, op: rotated(case, before_rope(at, op), *tables(at, **parameters)))


@hypothesis("q_rope", "k_rope")
def default_theta(case: Case) -> Diagnosis | None:
    """Is theta 10000?"""
    theta = case.config.hf.rope_parameters["rope_theta"]
    if theta != 10000.0 and _changed(case, rope_theta=10000.0):
        return case.diagnosis("rope_default_theta", f"{case.op} is right for theta 10000; the checkpoint says "
                              f"{theta:g}.", theta=theta)


@hypothesis("q_rope", "k_rope")
def scaling_ignored(case: Case) -> Diagnosis | None:
    """Are the frequencies those of an unscaled RoPE?"""
    kind = case.config.hf.rope_parameters["rope_type"]
    if kind != "default" and _changed(case, rope_type="default"):
        return case.diagnosis("rope_scaling_ignored", f"{case.op} is right for an unscaled RoPE; the checkpoint "
                              f"scales it ({kind}).")


@hypothesis("q_rope", "k_rope")
def other_positions(case: Case) -> Diagnosis | None:
    """As which position was each token turned? Try them all, and read the pattern."""
    used = _positions_used(case)
    if used is None or torch.equal(used, case.positions) or torch.equal(used, 2 * case.positions):
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
                              "the number of tokens before it.", "rope_missing", "rope_swallowed", **numbers)
    prompts = [row for row in range(len(used)) if row not in set(decoded) and case.positions[row]]
    if decoded and wrong.tolist() == prompts and not used[wrong].any():
        return case.diagnosis("rope_missing", f"{case.point} equals {case.point[0]} where several tokens came at once; "
                              "tokens that came alone were turned. RoPE fails for prompts, and something swallows the "
                              "exception.", "rope_swallowed", **numbers)
    return case.diagnosis("rope_positions", f"RoPE is right, the positions are not: {says}.", **numbers)


@hypothesis("q_rope", "k_rope")
def usual_wrong_positions(case: Case) -> Diagnosis | None:
    """Where q and k were not seen after RoPE: does one of the usual mistakes explain attention's output?"""
    if case.op == case.point:
        return None
    rows = torch.tensor([place in case.decoded for place in case.places])
    starts: dict[tuple[int, int], int] = {}
    calls = [(number, keys) for (number, _), keys in zip(case.places, case.recording.num_keys)]
    for call, (_, position) in zip(calls, case.places):
        starts[call] = min(position, starts.get(call, position))
    begun = torch.tensor([starts[call] for call in calls])
    wrong = {("decode_position_off_by_one", "a decoding token is turned one position too far; the newest of n tokens "
              "stands at position n - 1"): case.positions + rows,
             ("decode_position_restarted", "a decoding token is turned as if it stood at position 0"):
             case.positions * ~rows,
             ("rope_positions", "every call counts its positions from 0 again"): case.positions - begun}

    def turned(at, op, positions):
        return rotated(case, before_rope(at, op), *at.frame.tables(case.config.hf, positions))
    found = best(case, {kind: lambda at, op, positions=positions: turned(at, op, positions)
                        for kind, positions in wrong.items() if not torch.equal(positions, case.positions)})
    if found:
        return case.diagnosis(found[0], f"Attention fits other positions: {found[1]}.")


def _positions_used(case: Case) -> torch.Tensor | None:
    """For each token the position as which it was turned, ``[tokens]``; None if for some token there is none."""
    if case.op != case.point:
        return None
    before, ours = case.reference(case.frame.before_rope(case.op[0])), case.ours(case.op)
    candidates = torch.arange(-1, sum(case.lengths) + 2)
    cos, sin = tables(right(case, 0), candidates)
    used = []
    for token, turned in zip(before, ours):
        guesses = rotated(case, token.expand(len(candidates), -1, -1), cos, sin)
        distance = (guesses - turned).abs().amax((1, 2))
        if not distance.min() <= case.tolerance * ours.abs().max():
            return None
        used.append(int(candidates[distance.argmin()]))
    return torch.tensor(used)
