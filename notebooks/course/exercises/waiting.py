"""Notebook 13: sums that are started, computed beside, and waited for before a read or a write."""

import math
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course.exercises.sequence_parallel import in_the_engine
from course.judge.attempt import Attempt, NotYet, Uncopied, for_each, on_ranks, saying, several, tensor
from course.judge.compare import agree, first_without, is_like
from course.judge.verdict import Setting, exercise
from tplab.checks import counted
from tplab.patch import Patch, applied, original
from tplab.ranks import rank, state

# Tokens, inputs on each rank, outputs, parts, ranks: first what divides.
PRODUCTS = ((6, 4, 5, 2, 2), (7, 3, 4, 3, 2), (5, 4, 3, 4, 3), (2, 5, 4, 3, 2), (6, 4, 5, 1, 2))
# Hidden numbers, rows of each part, ranks.
PARTS = ((4, (2, 2, 2, 2), 2), (3, (3, 3, 1), 2), (5, (2, 3, 1, 3, 2), 3), (4, (2,), 2), (4, (), 2))
_WAITS = "Every rank starts the same sums, in the same order"
_ASKS = {"without wait()": "Its sum is started, and nothing waits for it: when is it in the tensor?",
         "process group": "Use the lab's all_reduce(…, async_op=True): the ranks of this example are threads"}
_GROUP = "tplab.ranks.group."


def _start(self, t, frame):
    state["seen"].append(("start", t))
    return original(f"{_GROUP}Group.start_all_reduce")(self, t, frame)


def _wait(self):
    if not self.is_completed():
        state["seen"].append(("wait", self._tensor))
    return original(f"{_GROUP}Work.wait")(self)


WATCHED = Patch(f"{_GROUP}Group.start_all_reduce", _start), Patch(f"{_GROUP}Work.wait", _wait)


class _Products(TorchDispatchMode):
    """Notes every product of matrices among what is seen."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "bmm", "mv", "addmm", "linear", "matmul"):
            state["seen"].append(("product", None))
        return func(*args, **(kwargs or {}))


def _in_parts(answer: Callable) -> list[Patch]:
    """The engine's row-parallel products with their sums, by a learner's function, three parts at a time."""
    def partial(self, x):
        self.given = x
        return original("tplab.shard.linear.RowParallelLinear.partial")(self, x)

    def reduce(self, partial):
        return answer(self.given, self.weight, 3) + (0 if self.bias is None else self.bias)

    return [Patch("tplab.shard.linear.RowParallelLinear.partial", partial),
            Patch("tplab.shard.linear.RowParallelLinear.reduce", reduce)]


@exercise("my_overlapped_row_parallel", "13", takes="x, weight, parts", patches=_in_parts,
          agreed="while the sum of one part is under way, the next part is computed, and nothing is read before its "
                 "wait; on {ranks}, every trace point agrees with Hugging Face")
def my_overlapped_row_parallel(attempt: Attempt, setting: Setting):
    """Parts that divide the tokens and that do not, more parts than tokens, one part, bfloat16; then the engine."""
    def check(case, dtype=torch.float32):
        tokens, inputs, outputs, parts, size = case
        generator = torch.Generator().manual_seed(tokens)
        x, weight = (torch.randn(size, many, inputs, generator=generator).to(dtype) for many in (tokens, outputs))
        with applied(*WATCHED), saying(f"{tokens} tokens in {counted(parts, 'part')}, {size} ranks: "):
            ran = on_ranks(size, _computed, attempt, x, weight, parts, waits=_WAITS, asks=_ASKS)
            _judge_parts(ran, torch.stack([a @ b.T for a, b in zip(x, weight)]), parts, attempt.made)

    for_each(PRODUCTS, check, lambda case: "two parts and more" if case[3] > 1 else "one part")
    check(PRODUCTS[1], torch.bfloat16)
    in_the_engine(setting)


def _computed(attempt: Attempt, x, weight, parts: int) -> tuple[object, list[str]]:
    """On a rank: what the answer returns, and its products, starts and waits in their order."""
    state["seen"] = []
    with _Products():
        value = attempt(x[rank()], weight[rank()], parts)
    return value, [what for what, _ in state.pop("seen")]


def _judge_parts(ran: list, summands: torch.Tensor, parts: int, made) -> None:
    size, right, values = len(summands), summands.sum(0), []
    for number, ((value, _), _) in enumerate(ran):
        with saying(f"on rank {number} "):
            values.append(tensor(value, "tokens, outputs", right.shape, right.dtype))
    found, events = torch.stack(values), ran[0][0][1]
    starts = events.count("start")
    near, other = 3e-2 if right.dtype == torch.bfloat16 else 1e-4, first_without(made, [
        own.chunk(parts)[0] for own in summands])
    own = ((found - summands).abs() <= near) & ((found - right).abs() > near)
    if (own := own.all(-1)).any():
        tokens = own.any(0).nonzero().flatten().tolist()
        what = "every token" if len(tokens) == len(right) else f"token{'s' * (len(tokens) > 1)} " + ", ".join(
            map(str, tokens))
        raise NotYet(f"a rank's own summand stands at {what}. " + (
            "A sum is in its tensor behind its wait(), and not before: where is it read, copied or joined?" if starts
            else "Where are the summands added up?"))
    theirs, ours = right.chunk(parts), found[0].chunk(parts)
    for i, place in enumerate(ours):
        lost = not any(is_like(one, theirs[i], near) for one in ours)
        if lost and (j := next((j for j, one in enumerate(theirs) if is_like(place, one, near)), None)) is not None:
            raise NotYet(f"part {i}'s sum stands nowhere, and in its place stands what part {j} makes: is a tensor "
                         "written again before its sum is made and copied out?")
    agree(found, right.expand_as(found), {
        f"this is {size} times the sum: is something added up that was whole already?": size * right.expand_as(found),
        f"the summands are averaged: this is the sum divided by {size}": right.expand_as(found) / size,
        "there are only zeros: is a tensor added up that was never written?": torch.zeros_like(found)},
        dims="rank, token", within=near, made=made[other], steps={
            f"rank {other}'s product of part {n}": part for n, part in enumerate(summands[other].chunk(parts))} | {
            f"part {n}'s sum": part for n, part in enumerate(right.chunk(parts))},
        parts={f"rank {r}'s summand": own for r, own in enumerate(summands)})
    if not starts:
        raise NotYet("the result is right, and no sum is started: all_reduce(…, async_op=True) returns at once, and "
                     "its wait() later")
    _judge_others(ran, starts)
    if starts < min(parts, 2, len(right)):
        raise NotYet(f"the result is right, with one sum where {parts} parts are asked for")
    if starts > parts:
        raise NotYet(f"the result is right, with {starts} sums where {parts} part{'s are' if parts > 1 else ' is'} "
                     "asked for")
    sent = [math.prod(record.shape) for record in ran[0][1]]
    if sum(sent) > right.numel():
        raise NotYet(f"the result is right, and {sum(sent)} numbers are summed up where {right.numel()} are enough: of "
                     "each token once, in the sum of its part")
    if cut := [many for many in sent if many % right.shape[1]]:
        raise NotYet(f"the result is right, and one of the sums has {cut[0]} numbers, where each token has "
                     f"{right.shape[1]}: cut the tokens, and not the outputs")
    done = {"product": 0, "start": 0, "wait": 0}
    for what in events:
        done[what] += 1
        if what == "start" and done["product"] != done["start"]:
            raise NotYet(f"the result is right, and when sum {done['start']} of {starts} starts, {done['product']} of "
                         f"{events.count('product')} products have been computed: a part's sum starts as soon as its "
                         "product is there, before the next product")
        if what == "wait" and done["product"] < min(done["wait"] + 1, starts):
            raise NotYet(f"the result is right, and sum {done['wait']} is waited for before product "
                         f"{done['wait'] + 1}: nothing is computed while it is under way")


def _judge_others(ran: list, starts: int) -> None:
    """:class:`NotYet` if a rank calls other collectives than the sums that it starts."""
    if (more := len(ran[0][1]) - starts) > 0:
        raise NotYet(f"the result is right, with {counted(more, 'collective')} besides the sums that are started. A "
                     "rank that enters one completes these sums first: nothing is under way beside it")


class _Buffers(Uncopied, list):
    """Not copied with a learner's other arguments: where its tensors lie is what counts."""

    def where(self, t) -> int | None:
        """Which of them a tensor lies in."""
        places = [one.untyped_storage().data_ptr() for one in self]
        at = t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) else None
        return places.index(at) if at in places else None


def _by_buffers(answer: Callable) -> list[Patch]:
    """The engine's sums, five rows at a time, through two buffers of a learner's function."""
    def reduce(self, partial):
        return torch.cat(answer(list(partial.split(5)), [torch.empty_like(partial[:5]) for _ in range(2)]))

    return [Patch("tplab.shard.linear.RowParallelLinear.reduce", reduce)]


@exercise("my_two_buffers", "13", takes="parts, buffers", writes="buffers", patches=_by_buffers,
          agreed="two sums are under way whenever two are left, and no buffer is written before its sum is made and "
                 "copied; on {ranks}, every trace point agrees with Hugging Face")
def my_two_buffers(attempt: Attempt, setting: Setting):
    """Parts of equal and of unlike lengths, on 2 and 3 ranks, and one part alone; then every sum of the engine."""
    def check(case):
        hidden, rows, size = case
        x = torch.randn(size, sum(rows), hidden, generator=torch.Generator().manual_seed(hidden))
        with applied(*WATCHED), saying(f"{counted(len(rows), 'part')} of {'/'.join(map(str, rows)) or 'no'} rows, "
                                       f"{size} ranks: "):
            _judge_buffers(on_ranks(size, _buffered, attempt, x, list(rows), waits=_WAITS, asks=_ASKS), x, rows)

    for_each(PARTS, check, lambda case: f"{len(case[1])} parts")
    in_the_engine(setting)


def _buffered(attempt: Attempt, x: torch.Tensor, rows: list[int]) -> tuple[object, list[tuple[str, int | None]], list]:
    """On a rank: what the answer returns, its starts and waits with their buffers, and which results lie in one."""
    buffers = _Buffers(torch.full((max(rows, default=1), x.shape[2]), float("nan")) for _ in range(2))
    state["seen"] = []
    value = attempt(list(x[rank()].split(rows)), buffers)
    inside = [buffers.where(one) for one in value] if isinstance(value, list | tuple) else []
    return value, [(what, buffers.where(t)) for what, t in state.pop("seen")], inside


def _judge_buffers(ran: list, x: torch.Tensor, rows) -> None:
    size, count, parts = len(x), len(rows), [part.split(rows) for part in x]
    sums = [sum(own[i] for own in parts) for i in range(count)]
    for number, ((value, events, inside), _) in enumerate(ran):
        with saying(f"on rank {number}, "):
            several(value, "a list with the sum of every part", count)
            if any(what == "start" and where is None for what, where in events):
                raise NotYet("a sum is started in a tensor that is none of the buffers: copy the part into one first")
            if order := _order(value, sums):
                raise NotYet(f"the sums are right, and stand in another order: those of parts {order} come back")
            for i, (one, where) in enumerate(zip(value, inside)):
                with saying(f"for part {i} "):
                    tensor(one, "rows, hidden", sums[i].shape, x.dtype)
                    if where is not None:
                        raise NotYet(f"it returns a piece of buffer {where}, which is used again; each sum must be in "
                                     "a tensor of its own: copy it out")
                _judge_sum(i, one, parts[number], sums, size, [at for what, at in events if what == "start"])
    events, flying, made = ran[0][0][1], 0, 0
    if (started := sum(what == "start" for what, _ in events)) < count:
        raise NotYet(f"the sums are right, and {started} of {count} are started with async_op=True, which returns at "
                     "once")
    _judge_others(ran, started)
    for what, _ in events:
        if what == "wait" and flying < min(2, count - made):
            raise NotYet(f"the sums are right, and at wait {made + 1} of {count} one sum is under way, though "
                         f"{count - made} are left: start the next sum first. Wait for a sum when its buffer is "
                         "needed, not before")
        flying += 1 if what == "start" else -1
        made += what == "wait"


def _order(found: list, sums: list[torch.Tensor]) -> str:
    """Of which parts they are the sums, if of all, and not in order."""
    whose = [next((j for j, right in enumerate(sums) if isinstance(one, torch.Tensor) and one.dtype == right.dtype
                   and one.shape == right.shape and torch.allclose(one, right, 0, 1e-4)), -1) for one in found]
    return ", ".join(map(str, whose)) * (sorted(whose) == [*range(len(sums))] != whose)


def _judge_sum(i: int, one: torch.Tensor, own, sums: list[torch.Tensor], size: int, places: list) -> None:
    """``places``: of each part the buffer in which its sum is started."""
    def begin(t):
        return t[:len(one)] if len(t) >= len(one) else t.new_empty(0)

    def why(j):
        return (f"its buffer takes part {j} before the sum of part {i} is made and copied out"
                if len({places[at] for at in (i, j) if at < len(places)}) < 2 else
                f"that is in buffer {places[j]}, and the sum of part {i} in buffer {places[i]}")

    if one.isnan().any():
        raise NotYet(f"there is NaN in the sum of part {i}: what stood in the buffer before, or behind the part, is in "
                     "it")
    others = [j for j in range(len(sums)) if j != i]
    agree(one, sums[i], {
        f"part {i} is this rank's own summand: it is copied out before its wait()": own[i],
        **{f"in the place of part {i}'s sum stands what part {j} makes: {why(j)}": (
            begin(sums[j]), size * begin(sums[j]), begin(own[j])) for j in others},
        f"the sum of part {i} is in it {size} times" + ": it is started twice" * (len(places) > len(sums)):
            size * sums[i]},
        f"the sum of part {i} is wrong", dims="row",
        parts={f"the sum of part {i}": sums[i], "this rank's own summand": own[i],
               **{f"the sum of part {j}": sums[j] for j in others if sums[j].shape == sums[i].shape}})
