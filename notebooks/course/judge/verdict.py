"""The verdict on a learner's answer: one helper for every exercise, ``PASS`` or ``NOT YET`` and at most three lines."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from course.judge import progress_file
from course.judge.answers import greedy
from course.judge.attempt import Attempt, ranks_in_words
from course.judge.compare import LITTLE
from course.judge.limit import limited
from course.judge.memory import KEEPS
from course.judge.words import NotYet, first_cause, in_words
from tplab.align import align, align_decode, diagnose, hf_greedy
from tplab.align.run import check_prompts
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.checks import counted, quoted
from tplab.errors import TplabError
from tplab.patch import Patch
from tplab.show.phrases import in_width


class ExerciseError(TplabError):
    """There is no such exercise, or it cannot be judged with what was given."""


def in_learners_words(found) -> str:
    """A diagnosis without what only a reader of the engine can use."""
    return found.sentence.partition(" Looked for and not found")[0]


@dataclass
class Setting:
    """What an answer is tried with once the toy is behind it: the notebook's parameters."""

    model: str | Checkpoint = "fable"
    prompt: str | Sequence[int] = ""
    tensor_parallel_size: int = 2
    dtype: str = "float32"
    engine: Callable | None = None  # what the notebook tries an answer with, where it is not the lab's own engine
    patches: Sequence[Patch] = ()  # what puts the answer into the engine
    report: object = None  # the latest AlignReport, for the notebook's figures

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.model)

    def ids(self, at_least: int = 1) -> list[int]:
        """The prompt's token ids, begun again until there are ``at_least`` so many."""
        ids = self.prompt if not isinstance(self.prompt, str) else self.checkpoint.tokenizer()(self.prompt).input_ids
        return (list(ids) * at_least)[:max(at_least, len(ids))]

    def align(self, *patches: Patch, decode: bool = False, prompts=None, **options):
        """The engine with the learner's function in it against Hugging Face: :func:`tplab.align.align`, or with
        ``decode`` :func:`tplab.align.align_decode`. Raises `NotYet` with the diagnosis if it does not agree.

        ``patches``: others than the exercise's; ``options``: others than the setting's.
        """
        run = align_decode if decode else align
        options = {"tensor_parallel_size": self.tensor_parallel_size, "dtype": self.dtype, **options}
        try:
            self.report = run(self.model, self.prompt if prompts is None else prompts,
                              patches=patches or self.patches, **options)
        except Exception as error:  # of the learner's code, on the ranks or in the scheduler
            raise NotYet(f"in the engine: {in_words(error)}") from error
        if not self.report.ok:
            found, first = diagnose(self.report), self.report.first_divergence
            little = found.fault is None and first is not None and first.relative < 5e-3
            asks = f"\n{LITTLE}" * little
            on = f", on {ranks_in_words(found.ranks, self.tensor_parallel_size)} only" if found.ranks else ""
            raise NotYet(f"in the engine{on}: {in_learners_words(found)}{asks}")
        return self.report

    def align_in_chunks(self, **options):
        """The same over two prompts, read five tokens at a time, and three tokens behind them."""
        ids = self.ids(16)
        return self.align(decode=True, prompts=[ids, ids[4:]], new_tokens=3, max_num_batched_tokens=5, **options)

    def reference(self, count: int) -> tuple[list[list[int]], list[list[int]]]:
        """Three prompts of different lengths, from the setting's own, and ``count`` greedy tokens of Hugging Face's."""
        (ids, *_) = check_prompts(self.checkpoint, self.prompt)
        prompts = [ids, ids[:max(1, len(ids) // 2)], ids[-3:]]
        return prompts, [hf_greedy(self.checkpoint, prompt, count, self.dtype) for prompt in prompts]

    def texts(self, prompts: Sequence[Sequence[int]], count: int, *patches: Patch, **options) -> list[list[int]]:
        """The ``count`` greedy tokens that the engine writes for each prompt; `NotYet` if it cannot."""
        try:
            return greedy(self.model, prompts, count, self.tensor_parallel_size, self.dtype, patches=patches, **options)
        except Exception as error:  # of the learner's code, on the ranks or in the scheduler
            raise NotYet(f"in the engine: {in_words(first_cause(error))}") from error


@dataclass(frozen=True)
class Exercise:
    """One exercise: ``examine(attempt, setting)`` raises `NotYet` at the first thing wrong, or returns a remark."""

    name: str  # the function (or class) that the learner writes
    notebook: str  # "02"
    takes: str  # what it is called with: "num_heads, num_kv_heads, tensor_parallel_size"
    agreed: str  # what is true of an answer that passes; may name {ranks}
    examine: Callable[[Attempt, Setting], str | None]
    writes: str = ""  # arguments that it may write into
    right: Callable | None = None  # the lab's own, for a notebook that goes on with it while the learner's is not right
    patches: Callable = lambda answer: []  # those that put an answer into the engine
    place: str = ""  # what it does in the engine, if it stands there in the learner's own; "hides the future"
    alone: str = ""  # the remark where there is one rank, which says what has judged it instead
    spare: str = ""  # the one of ``takes`` that an answer need not read

    def judged(self, answer, setting: Setting) -> str | None:
        attempt = Attempt(answer, self.takes, self.writes)
        setting.patches = self.patches(attempt.function)
        try:
            remark = self.examine(attempt, setting) or (self.alone if setting.tensor_parallel_size == 1 else None)
            if attempt.memory.shows():
                raise NotYet(KEEPS)
            return remark
        except NotYet as wrong:
            lines, idle, same = str(wrong).splitlines(), attempt.unread(self.spare), attempt.unchanged()
            if same and "as it went in" not in lines[0]:
                lines[1:] = [f"{same} comes back as it went in"]
            if lines[0] != KEEPS and attempt.memory.shows():
                lines[1:] = [KEEPS.capitalize()]
            if idle:
                more = [line + "." * (not line.endswith("?")) for line in lines[2:]]
                lines[2:] = [" ".join([*more, f"Your code never reads {', '.join(idle)}"])]
            raise NotYet("\n".join(lines)) from wrong


EXERCISES: dict[str, Exercise] = {}
_AGREED = "on {ranks}, every trace point agrees with Hugging Face"


def exercise(name: str, notebook: str, takes: str, agreed: str = _AGREED, **more):
    """Register the decorated function as the check of an exercise; see :class:`Exercise`."""
    def register(examine):
        EXERCISES[name] = Exercise(name, notebook, takes, agreed, examine, **more)
        return examine

    return register


def at(*targets: str) -> Callable[[Callable], list[Patch]]:
    """The patches of an answer that is called just as the engine's own function is."""
    return lambda answer: [Patch(target, answer) for target in targets]


def all_exercises() -> dict[str, Exercise]:
    """All exercises by name, in the order of the series."""
    import course.exercises  # noqa: F401  (its files register what they hold)

    return dict(sorted(EXERCISES.items(), key=lambda pair: pair[1].notebook))


@dataclass(frozen=True)
class Verdict:
    """What :func:`judge` found."""

    exercise: str
    sentence: str  # what is wrong; the empty string if nothing is
    report: object = field(default=None, repr=False)  # the AlignReport of the answer in the engine, if it got there
    function: Callable | None = field(default=None, repr=False)  # the answer if it passed, else the lab's own, if any

    @property
    def passed(self) -> bool:
        return not self.sentence

    def _ipython_display_(self) -> None:
        """Shows nothing: what there is to read has been printed."""


def _called(answer, known, names: dict) -> str:
    """The answer's own name, or the exercise's that stands for it in ``names``: a lambda and a list have none."""
    own = getattr(answer, "__name__", quoted(answer))
    return own if own in known else next((name for name in known if names.get(name) is answer), own)


def judge(answer: Callable, model: str | Checkpoint = "fable", prompt: str | Sequence[int] = "", *,
          tensor_parallel_size: int = 2, dtype: str = "float32", name: str | None = None,
          engine: Callable | None = None) -> Verdict:
    """Judge a learner's answer: a small example first, then the real model on the ranks.

    Prints ``PASS`` and what is true of it, or ``NOT YET`` and what is wrong in at most three lines; whatever the
    learner's code does, *Run All* goes on. ``name``: the exercise, if the function has another name. Raises
    `ExerciseError` if there is no such exercise.
    """
    known = all_exercises()
    name = name or _called(answer, known, sys._getframe(1).f_globals)
    if name not in known:
        raise ExerciseError(f"there is no exercise {name!r}; there are {', '.join(known)}. "
                            "An answer of another name is judged with name=…")
    task, setting, sentence = known[name], Setting(model, prompt, tensor_parallel_size, dtype, engine), ""
    try:
        remark = limited(task.judged, answer, setting)
    except NotYet as wrong:
        sentence = str(wrong)
    except TplabError:  # of what the notebook gave, not of the answer
        raise
    except Exception as error:
        sentence = f"what comes back cannot be judged: {in_words(error).splitlines()[0]}"
    if sentence:
        first, *rest = sentence.splitlines()
        for line in [f"NOT YET  {name}: {first}", *(f"         {line}" for line in rest[:2])]:
            print(in_width(line, " " * 11))
    else:
        ranks = counted(tensor_parallel_size, "rank")
        print(in_width(f"PASS  {name}: {task.agreed.format(ranks=ranks)}" + (f"; {remark}" if remark else ""), " " * 8))
    progress_file.note(name, answer, passed=not sentence)
    return Verdict(name, sentence, setting.report, task.right if sentence else answer)
