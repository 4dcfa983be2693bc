"""A repair judged: the mended engine on the ranks, beside Hugging Face, with inputs not seen before."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from course.cases.answering import place_called
from course.cases.case_file import NOWHERE, CaseFile, Trial, patches_at
from course.judge.observe import as_it_was
from course.judge.words import NotYet, in_words
from tplab.align import AlignReport, diagnose
from tplab.checkpoint import Checkpoint
from tplab.checks import counted
from tplab.patch import PatchError

_SMALL = 1 << 20  # weights of a matrix; smollm2's largest have 885,000
RANKS = (1, 2, 3, 4)  # numbers of ranks that a repair must be right on
# Points of a run that no tensor shows.
_OTHERWISE = {"steps": "the numbers are right, but tokens are computed that need not be",
              "drawn": "the logits are right, but the tokens that are drawn are not the most probable ones",
              "blocks": "the numbers are right, but blocks are lost or are read after their end"}


@contextmanager
def one_thread_if_small(config) -> Iterator[None]:
    """Torch on one thread while Hugging Face and the diagnosis run over a small model: thousands of small products
    gain nothing from a second one, and on a busy machine each waits until both have a core (22 s became 70)."""
    with as_it_was():
        if config.hidden_size * config.intermediate_size < _SMALL:
            torch.set_num_threads(1)
        yield


def examine(case, repair, seed: int) -> str:
    """What is true of a right repair of an :class:`OpenCase <course.cases.sealed.OpenCase>`, ``{place: function}``;
    NotYet with what is wrong in it. ``seed``: of the inputs."""
    file: CaseFile = case._file
    if not isinstance(repair, Mapping) or not repair:
        raise NotYet("there is no repair: give {place: function}, such as {'Class.method': my_method}")
    if file.examine is not None and len(repair) > 1:
        raise NotYet("the repair of this case is one function")
    for name, function in repair.items():
        place = "" if file.examine else place_called(name, case._places)  # a test replaces no function
        if not callable(function) or place == NOWHERE:
            raise NotYet(f"the repair for {name!r} is {type(function).__name__}; a function of the engine is replaced "
                         "by a function")
    with one_thread_if_small(case.checkpoint.config):
        if file.examine is None:
            return _in_the_engine(case, repair, seed)
        try:
            fresh = file.trials(unseen(case.checkpoint, seed))[0].prompts
            return file.examine(*repair.values(), case.checkpoint, case.tensor_parallel_size, case.trial.prompts, fresh)
        except ValueError as wrong:
            raise NotYet(str(wrong)) from wrong
        except Exception as error:  # of the learner's code
            raise NotYet(in_words(error)) from error


def unseen(ckpt: Checkpoint, seed: int) -> Callable[[int], list[int]]:
    """``take(count)``: random token ids, others with every seed."""
    generator = torch.Generator().manual_seed(seed)
    return lambda count: torch.randint(ckpt.config.vocab_size, (count,), generator=generator).tolist()


def usual(take: Callable[[int], list[int]], longest: int) -> tuple[Trial, ...]:
    """Runs that the mended engine of any case must get right; ``longest``: the tokens of the model's longest text."""
    alike, long, (a, b, c, d) = take(9), min(320, longest - 4), (take(4) for _ in range(4))
    return (Trial("a prompt of 9 tokens, read one token at a time", [take(12)], 3, {"max_num_batched_tokens": 1}),
            Trial("a prompt of one token", [take(6)], 5),
            Trial("five prompts of unlike lengths, the last tokens of each one by one",
                  [take(count) for count in (30, 11, 18, 7, 24)], 4),
            Trial(f"a prompt of {long} tokens, read 100 at a time", [take(long + 4)], 4,
                  {"max_num_batched_tokens": 100}),
            Trial("three prompts, of which the last begins as the second one and has then a block of the first one's",
                  [[*a, *b, *c, *take(7)], [*a, *d, *take(7)], [*a, *d, *c, *take(6)]], 3, {"one_by_one": True}),
            Trial("three prompts that begin alike, in a cache of 40 blocks of two",
                  [alike + take(count) for count in (30, 27, 33)], 8, {"block_size": 2, "num_blocks": 40}))


def _in_the_engine(case, repair: Mapping[str, Callable], seed: int) -> str:
    file: CaseFile = case._file
    mended, reports = (*file.patches, *patches_at(repair)), []  # the last one at a place is in force
    try:
        reports.append(_run(case, case.trial, mended, case.tensor_parallel_size))
    except NotYet as wrong:
        raise NotYet(f"the reported run is not right yet: {wrong}") from None
    longest = case.checkpoint.config.max_position_embeddings
    sizes = [size for size in RANKS if size <= case.checkpoint.config.num_heads]
    sizes.sort(key=lambda size: (size != case.tensor_parallel_size, -size))
    for at, size in enumerate(sizes):
        take = unseen(case.checkpoint, seed + at)
        runs = [(trial, bool(at)) for trial in file.trials(take)[:1 if at else None]]  # on logical ranks?
        for trial, logical in runs if at else runs + [(trial, True) for trial in usual(take, longest)]:
            try:
                reports.append(_run(case, trial, mended, size, logical))
            except NotYet as wrong:
                ranks = counted(size, "rank")
                raise NotYet(f"the reported run is right now; another one is not, on {ranks} ({trial.says}): "
                             f"{wrong}") from None
    wanted = 1 + file.collectives * case.checkpoint.config.num_layers  # the embedding's, and those in each layer
    if (more := max((len(log) - wanted for report in reports for log in report.op_logs), default=0)) > 0:
        raise NotYet(f"the numbers are right, and a forward pass has {more} collectives more than it needs: in each "
                     "one all ranks wait for the slowest")
    if set(repair) != set(file.repair):
        raise NotYet(f"the numbers are right, and the repair replaces {' and '.join(repair)}. What is wrong, "
                     f"{' and '.join(file.repair)}, must be replaced, and nothing else")
    return (f"the mended engine agrees with Hugging Face on the reported run, and on fresh tokens with "
            f"{', '.join(map(str, sorted(sizes)))} ranks.")


def _run(case, trial: Trial, patches, size: int, logical: bool = False) -> AlignReport:
    """One run of the mended engine; NotYet if it is not what Hugging Face computes, or costs more than it should."""
    try:
        report = case._run(trial, patches, tensor_parallel_size=size, logical=logical)
        diagnosis = diagnose(report)
        if diagnosis.point == "load" and diagnosis.numbers["times"] < 2:  # rows that are read twice are no bug
            diagnosis = diagnose(replace(report, load_stats=[]))
    except PatchError as error:
        raise NotYet(str(error)) from error
    except Exception as error:  # of the learner's code, on the ranks or in the scheduler
        raise NotYet(in_words(error)) from error
    only_rounding = not (report.ok or report.guilty or diagnosis.fault or report.recording.contradictions)  # it adds up
    if not (diagnosis.ok or only_rounding):
        # What its own bug is called would spare the learner the price of the diagnosis.
        is_told = diagnosis.fault and not {bug.fault for bug in case._file.bugs}.intersection(diagnosis.names)
        seen = next((words for words in diagnosis.sentence.split(". ") if words.startswith("At ")), "").rstrip(".")
        raise NotYet(f"it is as with a known bug: {diagnosis.sentence}" if is_told else _OTHERWISE.get(
            diagnosis.point, seen or f"{diagnosis.point} is not what it should be"))
    most = trial.options.get("max_num_batched_tokens")
    if most and (largest := max(map(computed_in, report.decode.steps))) > most:
        raise NotYet(f"the numbers are right, but a step computes {largest} tokens, and max_num_batched_tokens is "
                     f"{most}")
    if trial.options.keys() & {"num_speculative_tokens", "one_by_one"}:  # where a good engine does less
        finished = case._run(trial, tensor_parallel_size=size, logical=True)
        for what, count in ("steps", lambda step: 1), ("computed tokens", computed_in):
            taken, enough = (sum(map(count, each.decode.steps)) for each in (report, finished))
            if taken > enough:
                raise NotYet(f"the numbers are right, but it takes {taken} {what}, and {enough} are enough")
    return report


def computed_in(step) -> int:
    """How many tokens a step of the scheduler computes."""
    return sum(segment.count for _, segment, *_ in step.requests)
