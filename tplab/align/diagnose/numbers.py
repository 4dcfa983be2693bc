"""Procedures that read a number off: positions, frequencies, factors, digits."""

import math

import torch

from tplab.align import arithmetic
from tplab.align.arithmetic import rms_norm, rotated
from tplab.align.diagnose.case import IN_PROMPTS, Case, Diagnosis
from tplab.align.diagnose.table import in_scope, procedure
from tplab.align.diagnose.wrong import At, coarser, distance, explains, fitted, fitting, module, right, rounded
from tplab.align.points import POINTS, layout, made_by

NORMS, ROPE = made_by("norm"), made_by("rope")
_THETAS = (1e3, 1e4, 4e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 8e6, 1e7)  # tried where none can be read off
_STRETCHES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 4.0, 8.0)


@procedure(*POINTS, names="low_precision")
def too_few_digits(case: Case) -> Diagnosis | None:
    """Is every number of it one of a smaller dtype's?"""
    for dtype, name in coarser(case).items() if case.op == case.point else ():
        some = [tuple(map(case.looked_at, (case.shard(case.point, rank), right(case, rank)(case.point))))
                for rank in case.wrong_ranks]
        if some and all(torch.equal(rounded(held, dtype), held) and held.any()
                        and distance(held, should) < 4 * torch.finfo(dtype).eps for held, should in some):
            return case.diagnosis("low_precision", f"{case.first.name} is right as far as {name} goes, and every "
                                  f"number of it is one of {name}'s: it was computed, or passed on, in {name}.")


# The two ends.

def _factor(ours: torch.Tensor, right: torch.Tensor) -> float:
    """By how much the one is the other, at best."""
    ours, right = ours.double(), right.double()
    return ((ours * right).sum() / (right * right).sum().clamp(min=1e-30)).item()


def _scale_says(case: Case, times: float) -> str:
    root = case.config.hidden_size ** 0.5
    known = {root: f"sqrt({case.config.hidden_size}), the root of the hidden size, as Gemma does",
             1 / root: f"1 / sqrt({case.config.hidden_size})"}
    return next((text for number, text in known.items() if abs(times / number - 1) < 1e-4), f"{times:.5g}")


@procedure("embed", names="all_reduce_twice all_reduce_average embedding_scale")
def embedding_times(case: Case) -> Diagnosis | None:
    """Is the embedding a multiple of the right one?"""
    tp, rank = case.recording.world_size, case.wrong_ranks[0]
    times = _factor(*map(case.looked_at, (case.shard("embed", rank), right(case, rank).expected())))
    says = {tp: ("all_reduce_twice", "it was reduced twice, or every rank looked all tokens up before the sum"),
            1 / tp: ("all_reduce_average", "the ranks' parts were averaged")} if tp > 1 else {}
    times = next((known for known in says if abs(times / known - 1) < 1e-4), times)
    if not times or not explains(case, lambda at: at.expected() * times):
        return None
    if times in says:
        return case.diagnosis(says[times][0], f"The embedding is {times:g} times the right one: {says[times][1]}.",
                              times=times)
    return case.diagnosis("embedding_scale", f"The embedding was multiplied with {_scale_says(case, times)}; this "
                          "model does not.", times=times)


@procedure("logits", names="vocab_rows_missing")
def rows_that_nobody_has(case: Case) -> Diagnosis | None:
    """Are all logits right, but for tokens whose row of the head is on no rank?"""
    should, ours = map(case.looked_at, (case.reference("logits"), case.ours("logits")))
    lost = (ours == 0).all(0) | torch.isneginf(ours).all(0)
    if lost.any() and not lost.all() and case.fits(ours[:, ~lost], should[:, ~lost]):
        tokens = lost.nonzero().flatten().tolist()
        return case.diagnosis("vocab_rows_missing", f"The logits are right but for {len(tokens)} of "
                              f"{case.config.vocab_size} tokens, of which {tokens[0]} is the first: theirs are "
                              f"{ours[0, tokens[0]]:g} everywhere. No rank has these rows of the head.",
                              tokens=len(tokens))


@procedure("logits", names="logits_scale logits_softcap")
def logits_times(case: Case) -> Diagnosis | None:
    """Were right logits scaled, or capped?"""
    rank = case.wrong_ranks[0]
    ours, should = (case.looked_at(x).double() for x in (case.shard("logits", rank), right(case, rank).expected()))
    if not torch.isfinite(ours).all() or not ours.any():
        return None
    times = _factor(ours, should)
    if times > 0 and explains(case, lambda at: at.expected() * times):
        return case.diagnosis("logits_scale", f"The logits are {times:.6g} times the right ones.", times=times)
    cap = fitted(case, lambda cap: lambda at: cap * torch.tanh(at.expected() / cap),
                 ours.abs().max().item() * 1.0001, should.abs().max().item() * 100)
    if cap is not None:
        return case.diagnosis("logits_softcap", f"The logits are c × tanh(logits / c) with c = {cap:.3g}; this model "
                              "does not cap them.", cap=cap)


def _likeness(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-30)).item()


@procedure("logits", names="tie_ignored weight_not_loaded")
def empty_head(case: Case) -> Diagnosis | None:
    """Are all logits zero?"""
    if not case.ours("logits").any():
        tied = case.config.tie_word_embeddings
        return case.diagnosis("tie_ignored" if tied else "weight_not_loaded", "All logits are 0 although the final "
                              "norm is right: the head's weight was made and never filled."
                              + " This model ties it to the embedding." * tied)


@procedure("logits", names="head_random", last=True)
def unrelated_head(case: Case) -> Diagnosis | None:
    """Have the logits anything to do with Hugging Face's?"""
    ours, should = (case.looked_at(x).double() for x in (case.ours("logits"), case.reference("logits")))
    likeness = _likeness(ours - ours.mean(), should - should.mean())
    if ours.any() and abs(likeness) < 0.3 and case.looked_at(case.guilty_rows).all():
        return case.diagnosis("head_random", "The final norm is right, and the logits have nothing to do with Hugging "
                              f"Face's (correlation {likeness:z.2f}): the head's weights are not the checkpoint's.",
                              correlation=likeness)


@procedure(*made_by("linear"), names="weight_not_loaded", last=True)
def unrelated_weight(case: Case) -> Diagnosis | None:
    """Is it a linear function of its input, by a matrix that has nothing to do with the checkpoint's?"""
    if case.op != case.point or len(case.ops) > 1:
        return None
    ours, theirs = [], []
    for rank in case.wrong_ranks:
        at, y = right(case, rank), case.shard(case.op, rank).flatten(1).double()
        x = at.given().flatten(1).double()
        x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        if len(x) < x.shape[1] + 2 or not torch.isfinite(x).all() or not torch.isfinite(y).all():
            return None  # too few tokens to tell
        solved = torch.linalg.lstsq(x, y).solution
        if not distance(y, x @ solved) <= case.tolerance:
            return None
        features, weight = at.features(), at.matrix()
        ours.append(solved[:-1].flatten())
        theirs.append((weight[:, features] if layout(case.op) == "partial" else weight[features]).T.double().flatten())
    a, b = torch.cat(ours), torch.cat(theirs)
    likeness = _likeness(a, b)
    # A shuffled weight is as little alike as a random one, but its numbers are the same.
    shuffled = (a.abs().sort().values - b.abs().sort().values).abs().max() <= 0.02 * b.abs().max()
    if abs(likeness) < 0.3 and not shuffled:
        return case.diagnosis("weight_not_loaded", f"{case.first.name} is a linear function of its input, as it should "
                              f"be, but its matrix has nothing to do with that of {module(case)} (correlation "
                              f"{likeness:z.2f}): it is not the checkpoint's.", correlation=likeness)


# Norms, the activation, NaN.

@procedure("input_norm", "post_norm", "norm", "residual", "output", names="norm_in_place")
def norm_in_place(case: Case) -> Diagnosis | None:
    """Does what a norm was given hold what the norm put out?"""
    if case.op != case.point:
        return None
    frame, says = case.frame, ("The residual stream holds what {} made of it: the norm works in place on the tensor "
                               "that is kept (float() of a float32 tensor makes no copy).")
    if case.op in NORMS:  # the stream was already called wrong for it, and says nothing about the norm
        source = frame.before(f"{case.layer}." if case.layer else "") if case.op != "post_norm" else (
            f"{case.layer}.residual")
        before = case.report.recording.points.get(source)
        if source not in case.report.guilty or not before or not all(before[rank] and torch.equal(*(
                case.looked_at(shards[rank].tensor) for shards in (before, case.recording.points[case.first.name])))
                for rank in case.wrong_ranks):
            return None
        return case.diagnosis("norm_in_place", says.format(case.op))
    last = int(case.layer.split(".")[1]) == case.config.num_layers - 1
    behind = {"residual": f"{case.layer}.post_norm", "output": "norm" if last else
              f"layers.{int(case.layer.split('.')[1]) + 1}.input_norm"}[case.op]
    at, _, op = behind.rpartition(".")
    weight = frame.weights.raw(f"{frame.module(f'{at}.' if at else '', op)}.weight").to(frame.dtype)
    stream, branch = case.made_from(case.op)
    for name in (stream, "input_norm" if case.op == "residual" else "post_norm"):
        if explains(case, lambda at, name=name: rms_norm(at(name) + at(branch), weight, case.config.rms_norm_eps)):
            return case.diagnosis("norm_in_place", says.format(op))


@procedure("input_norm", names="embedding_scale")
def scaled_into_the_first_norm(case: Case) -> Diagnosis | None:
    """Were the embeddings scaled before the first norm, which hardly shows there, and does the residual say it?"""
    if case.layer != "layers.0" or not case.has("residual") or not case.has("o_proj"):
        return None
    at = At(case, case.wrong_ranks[0], case.frame, "residual")
    times = _factor(at("residual") - at("o_proj"), at("before"))
    if abs(times - 1) < 1e-3 or not explains(case, lambda at: {"x": times * at.given()}):
        return None
    return case.diagnosis("embedding_scale", f"{case.op} was made of embeddings that were multiplied with "
                          f"{_scale_says(case, times)}; this model does not.", times=times)


@procedure("attn", names="nan_mask mask_inverted")
def zero_times_infinity(case: Case) -> Diagnosis | None:
    """NaN out of finite q, k and v: in which rows?"""
    nan = torch.isnan(case.ours(case.point)).flatten(1).any(1)  # attention's own, or a row of it behind o_proj
    if not nan.any():
        return None
    numbers = {"nan_share": case.first.nan / case.first.size, "nan": case.first.nan}
    share = f"{numbers['nan_share']:.0%} NaN"
    rows = {place: row for row, place in enumerate(case.places)}
    # A decoding token has no later ones to be hidden: an engine that reads its cache masks only what it reads at once.
    masked = {s: row for (s, p), row in rows.items() if (s, p) not in case.decoded} or {s: row for (s, _), row in
                                                                                        rows.items()}
    ends, together = list(masked.values()), [row for place, row in rows.items() if place not in case.decoded]
    if nan[ends].all() and int(nan[together].sum()) == len(ends) < len(together):
        found = case.diagnosis("mask_inverted", f"{share}: only the last token of each text, from which nothing is "
                               "hidden. The mask is the wrong way round, and hides all that this token may see.",
                               **numbers)
        return in_scope(found, IN_PROMPTS) if case.decoded and together else found
    if nan[ends].all():
        return case.diagnosis("nan_mask", f"{share} although q, k and v are finite, also for the last token, from "
                              "which nothing is hidden: something multiplies 0 by -inf. Use a boolean mask and "
                              "masked_fill.",
                              **numbers)
    return case.diagnosis(None, f"{share}, but not for the last token: in {int(nan.sum())} rows every key is hidden, "
                          "and a softmax over nothing but -inf is 0 / 0.", **numbers)


def another_activation(functions: dict):
    """Asks for each activation, and for the usual one that is applied elsewhere."""
    @procedure("mlp_act", names="wrong_activation")
    def wrong_activation(case: Case) -> Diagnosis | None:
        own, act = case.config.hidden_act, arithmetic.activation(case.config.hidden_act)
        ways = {f"{name}(gate) × up": lambda gate, up, f=f: f(gate) * up for name, f in functions.items()} | {
            f"{own}(gate), up left out": lambda gate, up: act(gate),
            f"{own}(up), gate left out": lambda gate, up: act(up),
            f"{own}(gate) × {own}(up)": lambda gate, up: act(gate) * act(up),
            f"{own}(gate × up)": lambda gate, up: act(gate * up),
            f"{own}(gate) + up": lambda gate, up: act(gate) + up}
        found = fitting(case, {says: lambda at, way=way: {"act": way} for says, way in ways.items()})
        if found and found[0] != f"{own}(gate) × up":
            alike = " (these numbers are too coarse to tell which)" * (len(found) > 1)
            return case.diagnosis("wrong_activation", f"{case.op} is {' or '.join(found)}{alike}; right is {own}(gate) "
                                  "× up.")
    return wrong_activation


# RoPE.

@procedure(*ROPE, names="decode_position_off_by_one decode_position_restarted rope_missing rope_swallowed "
                        "rope_positions")
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
    found = case.diagnosis("rope_positions", f"RoPE is right, the positions are not: {says}.", **numbers)
    return in_scope(found, where) if (where := case.kind_of_call(wrong.tolist())) else found


def _positions_used(case: Case) -> torch.Tensor | None:
    """For each token the position as which it was turned, ``[tokens]``; None if for some token there is none."""
    if case.op != case.point:
        return None
    before, ours = _before_and_after(case)
    candidates = torch.arange(-1, sum(case.lengths) + 2)
    tables, used = right(case, 0).rotary(candidates), []
    for row, (token, turned) in enumerate(zip(before, ours)):
        if case.scope is not None and not case.scope[row]:
            used.append(int(case.positions[row]))
            continue
        guesses = rotated(case.config.model_type, token.expand(len(candidates), -1, -1), tables["cos"], tables["sin"])
        distance = (guesses - turned).abs().amax((1, 2))
        if not distance.min() <= case.tolerance * ours.abs().max():
            return None
        used.append(int(candidates[distance.argmin()]))
    return torch.tensor(used)


def _before_and_after(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What RoPE was given and what it made of it, of all heads of the wrong ranks, ``[rows, heads, head_dim]``."""
    pairs = [(right(case, rank).given(), case.shard(case.op, rank)) for rank in case.wrong_ranks]
    return tuple(torch.cat(side, 1) for side in zip(*pairs))


def made_of(case: Case) -> str:
    """The point that RoPE turns: ``"q"`` or ``"q_norm"``."""
    return case.made_from(case.op)[0]


def own_frequencies(case: Case) -> tuple[torch.Tensor, float]:
    """The checkpoint's own frequencies, ``[head_dim / 2]``, and the factor of its cos and sin."""
    tables = right(case, 0).rotary(torch.tensor([1]))
    cos, sin = (tables[name][0, 0].double() for name in ("cos", "sin"))
    return torch.atan2(sin, cos)[:case.turned // 2], math.hypot(cos[0], sin[0])


def measured_frequencies(case: Case) -> torch.Tensor | None:
    """By how much a pair was turned from one position to the next, ``[head_dim / 2]``; None where that cannot be read
    off, because q (or k) before or after was not recorded."""
    if case.op != case.point or not case.has(made_of(case)):
        return None
    size, neighbours = case.turned, case.config.rotates_pairs
    before, after = (torch.view_as_complex(x.unflatten(-1, (-1, 2)) if neighbours else torch.stack(
        x.chunk(2, -1), -1)) for x in (case.looked_at(x)[..., :size].double() for x in _before_and_after(case)))
    if not torch.isfinite(torch.view_as_real(after)).all():
        return None
    def wound(angle: torch.Tensor) -> torch.Tensor:
        return (angle + math.pi).remainder(2 * math.pi) - math.pi
    turn, positions = (after * before.conj()).sum(1), case.looked_at(case.positions)  # [tokens, pairs], [tokens]
    frequencies = first = start = None
    for position in positions.unique().tolist()[:200]:
        angle = turn[positions == position].sum(0).angle()
        if frequencies is not None:
            far = position - first
            frequencies = frequencies + wound(angle - start - frequencies * far) / far
        elif first == position - 1:
            frequencies = wound(angle - start)  # of two neighbours, since nothing says how often it went round
        else:
            first, start = position, angle
    return frequencies


@procedure(*ROPE, names="rope_theta")
def another_theta(case: Case) -> Diagnosis | None:
    """Does another theta fit, or another size of the head in its exponent?"""
    theta_right, dim = case.rope["rope_theta"], case.turned
    steps, scale, candidates = torch.arange(dim // 2), own_frequencies(case)[1], set(_THETAS)
    if (measured := measured_frequencies(case)) is not None:
        # theta from each pair that turns far enough to be read; the middle one
        frequencies = measured.clamp(min=1e-12)
        readings = (-frequencies.log() * dim / (2 * steps.clamp(min=1)))[1:][frequencies[1:] > frequencies.max() / 1e3]
        if not len(readings) or not 0 < (log := readings.median().item()) < 40:
            return None
        candidates = {math.exp(log), *(float(f"{math.exp(log):.{digits}g}") for digits in (1, 2, 3, 6))}
    sizes = {theta_right ** (dim / size): size for size in (
        case.config.hidden_size // case.config.num_heads, case.config.hidden_size, 2 * dim, dim // 2) if size != dim}
    # One that was read off differs from another size's in its last digits: then the size says more.
    candidates = {theta for theta in candidates if all(abs(theta / other - 1) > 1e-4 for other in sizes)}

    def turned(theta: float):
        turn = case.frame.positions[:, None].double() * theta ** (-2 * steps / dim)
        both = (scale * table.repeat(1, case.times_in_tables)[None].to(case.frame.dtype)
                for table in (turn.cos(), turn.sin()))
        tables = dict(zip(("cos", "sin"), both))
        return lambda at: tables
    theta = next(iter(fitting(case, {theta: turned(theta) for theta in sorted(candidates | {*sizes})
                                     if theta != theta_right})), None)
    if theta in sizes:
        return case.diagnosis("rope_theta", f"{case.op} is right for a head of {sizes[theta]} numbers in the exponent "
                              f"of its angles; this model's heads have {dim}.", size=sizes[theta])
    if theta is not None:
        return case.diagnosis("rope_theta", f"{case.op} is right for theta {theta:g}; the checkpoint says "
                              f"{theta_right:g}.", theta=theta)


def stretches(case: Case) -> list[float]:
    """The factors by which all positions may have been multiplied; read off where that is possible."""
    frequencies, found = own_frequencies(case)[0], set(_STRETCHES)
    if (measured := measured_frequencies(case)) is not None:
        known = frequencies > frequencies.max() / 1e3
        stretch = (measured[known] / frequencies[known]).median().item()
        found = {float(f"{stretch:.2g}"), float(f"{stretch:.4g}"), 1 / max(round(1 / max(stretch, 1e-3)), 1)}
    return sorted(part for part in found if part > 0 and abs(part - 1) > 1e-3 and abs(part - 2) > 1e-3)
