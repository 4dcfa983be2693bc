"""``OpenCase``: a case as its learner has it: a sealed engine, the instruments on it, and runs that are counted."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice

from course.cases import CASES
from course.cases.answering import check_what_and_why, check_where, choices, place_called
from course.cases.case_file import NOWHERE, CaseFile, Trial, code_at, patches_at, places
from course.cases.repairing import examine
from course.judge import progress_file
from course.judge.answers import default_prompt, greedy
from course.judge.limit import limited
from course.judge.words import NotYet
from tplab.align import AlignReport, align, align_decode, diagnose, hf_greedy
from tplab.align.run import AlignError, check_prompts
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.checks import counted, positive_int, quoted
from tplab.errors import TplabError
from tplab.patch import Patch, applied
from tplab.show.phrases import in_width

PRICE_OF_NAMES = 3  # runs for the diagnosis of a report: it says nearly everything
_NEW = 12  # tokens of each text of the reported run


class CaseError(TplabError):
    """There is no such case, it cannot show here, or its budget is used up; the message says what would work."""


class OpenCase:
    """One sealed case on one model; its methods are the instruments, whose runs are counted. Judging is free."""

    def __init__(self, file: CaseFile, model: str | Checkpoint, prompt: str | Sequence[int] = "",
                 tensor_parallel_size: int = 2):
        self._file, self._places = file, tuple(places())  # named while nothing is patched
        self.checkpoint = open_checkpoint(model)
        asked = positive_int("tensor_parallel_size", tensor_parallel_size, CaseError)
        ranks = file.ranks_for(self.checkpoint.config, asked)
        if ranks is None:
            raise CaseError(f"case {file.number} cannot show with {self.checkpoint.name} on up to four ranks")
        self.asked_ranks, self.tensor_parallel_size = asked, ranks
        self.runs_left, self._hints, self._is_found = file.budget, iter(file.hints), False
        self._seed = secrets.randbits(31)  # of the judge's inputs: the same at each attempt
        (ids,) = check_prompts(self.checkpoint, [prompt or default_prompt(self.checkpoint)])
        text = cycle(ids)
        self.trial = file.trials(lambda count: list(islice(text, count)))[0]

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]

    def __repr__(self) -> str:
        """The report as its user wrote it."""
        size, asked = self.tensor_parallel_size, self.asked_ranks
        ranks = counted(size, "rank") + f", since with {asked} nothing is wrong to be seen" * (size != asked)
        budget = self._file.budget
        left = f"{budget} runs" if self.runs_left == budget else f"{self.runs_left} of {budget} runs are left"
        return "\n\n".join([f"Case {self._file.number}: {self._file.title}",
                            in_width(self._file.report.format(ranks=size), ""), in_width(
                                f"The run: {self.trial.says}; {ranks}. Budget: {left}.", "")])

    # The engine.

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Whatever runs inside runs on the broken engine, here and on the ranks of every pool; one run."""
        self._pay(1, "this run")
        try:
            with applied(*self._file.patches):
                yield
        except (AlignError, CaseError):  # of what it was called with, before anything ran
            self.runs_left += 1
            raise

    def _pay(self, price: int, what: str) -> None:
        if price > self.runs_left:
            raise CaseError(f"{what} costs {price}, and {self.runs_left} of {self._file.budget} runs are left: answer "
                            f"with what you have, or open the case again")
        self.runs_left -= price

    def _run(self, trial: Trial, patches=(), **options) -> AlignReport:
        options = {"tensor_parallel_size": self.tensor_parallel_size, "patches": patches, **trial.options, **options}
        if trial.new_tokens:
            return align_decode(self.checkpoint, trial.prompts, new_tokens=trial.new_tokens, **options)
        return align(self.checkpoint, trial.prompts, **options)

    def align(self, prompts=None, repair: Mapping | None = None, **options) -> AlignReport:
        """:func:`tplab.align.align` on the sealed engine, of the reported prompts and dtype unless told otherwise, with
        ``repair`` over it, ``{place: function}``; one run."""
        dtype = {name: value for name, value in self.trial.options.items() if name == "dtype"}
        with self.broken():
            return self._run(Trial("", prompts or self.trial.prompts, options=dtype | options), self._patches(repair))

    def align_decode(self, prompts=None, new_tokens: int = 0, repair: Mapping | None = None, **options) -> AlignReport:
        """:func:`tplab.align.align_decode` on the sealed engine, as in the reported run if nothing else is said, with
        ``repair`` over it; one run."""
        with self.broken():
            return self._run(Trial("", prompts or self.trial.prompts, new_tokens or self.trial.new_tokens or 5,
                                   {**self.trial.options, **options}), self._patches(repair))

    def _patches(self, repair: Mapping | None) -> tuple[Patch, ...]:
        return patches_at({self._place(place): function for place, function in (repair or {}).items()})

    def _place(self, name: str) -> str:
        try:
            return place_called(name, self._places)
        except NotYet as wrong:
            raise CaseError(str(wrong)) from None

    def generate(self, prompts=None, max_tokens: int = _NEW, **options) -> list[list[int]]:
        """The greedy token ids that the sealed engine writes behind each prompt; one run. ``options``: of the LLM."""
        with self.broken():
            return self._written(check_prompts(self.checkpoint, prompts or self._asked()), max_tokens, **options)

    def _asked(self) -> list[list[int]]:
        """The reported prompts, without the tokens that a decode path is given."""
        return [list(prompt)[:len(prompt) - self.trial.new_tokens] for prompt in self.trial.prompts]

    def _written(self, prompts, count: int, tensor_parallel_size: int = 0, **options) -> list[list[int]]:
        return greedy(self.checkpoint, prompts, count, tensor_parallel_size or self.tensor_parallel_size,
                      **{"block_size": 4, **self.trial.options, **options})

    def show(self) -> None:
        """Print the run as its user saw it: what Hugging Face writes, and what this engine does. Costs nothing."""
        if self._file.user_output is not None:
            print(in_width(self._file.user_output(self.checkpoint, self.tensor_parallel_size, self._asked()), ""))
            return
        asked, decode = self._asked(), self.checkpoint.tokenizer().decode
        count = max(_NEW, self.trial.new_tokens)
        with applied(*self._file.patches):
            written = self._written(asked, count)
        for number, (prompt, ours) in enumerate(zip(asked, written)):
            theirs = hf_greedy(self.checkpoint, prompt, count)
            print(f"prompt {number}, after {len(prompt)} tokens: …{decode(prompt[-8:])!r}")
            print(f"    Hugging Face: {decode(theirs)!r}")
            print("    this engine:  " + ("the same" if ours == theirs else repr(decode(ours))))

    def code(self, place: str) -> None:
        """Print what stands at a place of the sealed engine, below the imports that it needs; one run."""
        place = self._place(place)
        with self.broken():
            print(code_at(place))

    def diagnose(self, report: AlignReport | TplabError) -> None:
        """Print what the diagnosis says of a report, or of the error in which a run ended; three runs."""
        self._pay(PRICE_OF_NAMES, "the diagnosis")
        lines = report.diagnosis_lines() if isinstance(report, AlignReport) else []
        for line in lines or [diagnose(report).sentence]:
            print(in_width(line, "   "))

    # Hints and answers.

    def hint(self) -> None:
        """Print the next hint. Each says more than the one before."""
        print(in_width(next(self._hints, "There are no more hints."), "  "))

    def choices(self) -> None:
        """Print what *what* can be, and *why* once *where* is right. *Where* can be any function of the engine's core,
        such as ``attend``."""
        print(choices(self._file, self._is_found))

    def close(self, where: str | Sequence[str] = "", what: str | Sequence[str] = "", why: str = "",
              repair: Mapping | Callable | None = None) -> bool:
        """Judge *where* (functions), *what* and *why* (of :meth:`choices`, or their beginnings), then the repair,
        ``{place: function}``, on unseen inputs; print the verdict. Where there are two bugs, *where* and *what* are
        lists; where the report asks for a test, that is the repair. Solved where all are right, and then
        :func:`course.lesson.progress` keeps it."""
        number = self._file.number
        if self._file.examine and callable(repair):
            repair = {NOWHERE: repair}
        try:
            check_where(self._file, where, self._places)
            self._is_found = True
            check_what_and_why(self._file, where, what, why)
            print(f"RIGHT  case {number}: where, what and why.")
            remark = limited(examine, self, repair, self._seed)
        except NotYet as wrong:
            print(in_width(f"NOT YET  case {number}: {wrong}", " " * 9))
            return False
        print(in_width(f"PASS  case {number}: {remark}", " " * 6))
        progress_file.note(self._file.name, next(iter(repair.values())))
        return True


def open_case(number: int | str, model: str | Checkpoint = "fable", prompt: str | Sequence[int] = "", *,
              tensor_parallel_size: int = 2) -> OpenCase:
    """Open a case, sealed; ``number``: its number. With more ranks than asked for where it does not show with so few.
    Raises `CaseError` if there is no such case, or if it cannot show with this model."""
    if (name := f"case_{number:02}" if isinstance(number, int) else number) not in CASES:
        raise CaseError(f"there is no case {quoted(number)}; there are 1 to {len(CASES)}")
    return OpenCase(CASES[name], model, prompt, tensor_parallel_size)
