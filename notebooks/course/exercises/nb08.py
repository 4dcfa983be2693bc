"""Notebook 08: ranks that decide together: a failure that all hear of, a barrier where it belongs."""

import tempfile
from pathlib import Path

import torch

from course.judge.exercise import Example, Exercise
from course.judge.verdict import ranks_in_words
from course.judge.words import NotYet
from course.judge.work import whole_numbers
from tplab.checkpoint import CheckpointError
from tplab.checks import counted
from tplab.ranks import all_gather, all_reduce, barrier, rank, world_size
from tplab.ranks.context import current


def on_real_ranks(setting, call, *args) -> list:
    """What ``call(*args)`` gives on each of at least two ranks of a pool."""
    return setting.on_ranks(call, *args, size=max(2, setting.tensor_parallel_size), timeout=20)


def my_agree(work):
    failed = torch.zeros(world_size())
    try:
        work()
    except Exception:
        failed[rank()] = 1
    all_reduce(failed)
    return failed.nonzero().flatten().tolist()


class Work:
    """A rank's own work: says how often it was called, and fails on some ranks."""

    def __init__(self, failing):
        self.failing, self.calls = failing, 0

    def __call__(self):
        self.calls += 1
        if rank() in self.failing:
            raise CheckpointError(f"shard {rank()} cannot be read (work() may fail: catch this, and report it)")


def failures():
    for size, failing in ((5, [1, 4]), (2, []), (2, [0]), (2, [0, 1]), (3, [0, 2]), (3, [1, 2])):
        who = ranks_in_words(failing, size) if failing else "none"
        yield Example(failing, ranks=size, says=f"{size} ranks, of which {who} failed")


def heard(answer, failing):
    work = Work(failing)
    failed = answer(work)
    yield "the calls of work are", work.calls, 1
    yield "it returns", whole_numbers(failed, f"the failed ranks, which are {failing}")
    yield "called once more, with no failure, it returns", whole_numbers(answer(Work([])), "the failed ranks, none")


def agreed_on_real_ranks(setting, answer):
    answers = on_real_ranks(setting, lambda: answer(Work([1])))
    if any([*failed] != [1] for failed in answers):
        raise NotYet(f"on real ranks, of which rank 1 fails, they return {answers}")


def my_rounds(write, read, rounds):
    seen = []
    for number in range(rounds):
        if rank() == 0:
            write(number)
        barrier()                   # all ranks wait until it is written
        seen.append(read())
        barrier()                   # rank 0 waits until all ranks have read
    return seen


def in_turns(answer, rounds):
    """What counts is which rank waits for which: after how many collectives each has written and read."""
    numbers: list = []  # that this rank writes
    events, before = torch.full((2, 3 * rounds + 2), -1), current().log.seq

    def noted(row) -> int:
        place = min(int((row >= 0).sum()), len(row) - 1)
        row[place] = current().log.seq - before
        return place

    def write(number):
        numbers.append(number)
        noted(events[0])

    def read():
        return noted(events[1])

    seen = answer(write, read, rounds)
    calls = current().log.seq - before
    everyone = [[row[row >= 0].tolist() for row in each] for each in all_gather(events[None], dim=0)]
    (written, _), *_ = everyone
    for r, (writes, reads) in enumerate(everyone):
        yield f"the calls of write on rank {r} are", len(writes), 0 if r else rounds
        yield f"the calls of read on rank {r} are", len(reads), rounds
        for n in range(rounds if r else 0):
            yield f"in round {n}, rank {r} can read before rank 0 has written", reads[n] <= written[n], False
            if n + 1 < rounds:
                yield (f"rank 0 can write number {n + 1} before rank {r} has read number {n}",
                       written[n + 1] <= reads[n], False)
    if not rank():
        yield "the numbers that rank 0 writes are", numbers
    yield "it returns", seen, [*range(rounds)]
    yield (f"{counted(calls, 'collective')} in {counted(rounds, 'round')}, and {2 * rounds} are enough",
           calls <= 2 * rounds + 1, True)  # one more at the end is nobody's mistake


def rounds_on_real_ranks(setting, answer):
    with tempfile.TemporaryDirectory() as folder:
        answers = on_real_ranks(setting, through_a_file, answer, str(Path(folder, "slot")))
    if any(numbers != [0, 1, 2, 3] for numbers in answers):
        raise NotYet(f"on real ranks, through a file, they return {answers}, and [0, 1, 2, 3] is right")


def through_a_file(answer, slot: str) -> list:
    return answer(lambda n: Path(slot).write_text(str(n)), lambda: int(Path(slot).read_text()), 4)


EXERCISES = [
    Exercise("08", my_agree, failures, {
        "each rank returns only its own failure: no collective joins what the ranks know": "    all_reduce(failed) -> ",
        "every rank must call the collective, whether its work has failed or not": (
            "= 1\n    all_reduce(failed) -> = 1\n        all_reduce(failed)",
            "= 1\n    all_reduce(failed) -> = 1\n    else:\n        all_reduce(failed)"),
        "only what rank 0 knows reaches the others":
            "all_reduce(failed) -> failed = all_gather(failed, 0)[:world_size()]",
        "how many ranks failed does not say which":
            "failed.nonzero().flatten().tolist() -> [*range(int(failed.sum()))]",
        "this says for each rank whether it failed; the numbers of the ranks that failed are asked for":
            "failed.nonzero().flatten().tolist() -> failed.int().tolist()",
    }, "every rank returns the ranks that failed, and none waits", heard, engine=agreed_on_real_ranks,
             counted=False),
    Exercise("08", my_rounds, lambda: [Example(3, ranks=2, says="3 rounds on 2 ranks"),
                                       Example(1, ranks=3, says="1 round on 3 ranks")], {
        "nothing makes rank 0 wait until all ranks have read": "        barrier()                   # rank 0 -> # ",
        "nothing makes the other ranks wait until rank 0 has written":
            "        barrier()                   # all -> # ",
        "the ranks do not call equally many barriers: is one of them under an if?":
            "        barrier()                   # all ->             barrier()                   # all",
    }, "no rank reads before the file is written, and it is written again when all have read", in_turns,
             engine=rounds_on_real_ranks, counted=False)]
