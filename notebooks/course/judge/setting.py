"""What an answer is tried with once the small examples are behind it: the notebook's model, prompt and ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from course.judge.answers import greedy
from course.judge.words import NotYet, first_cause, in_words
from tplab.align import align, align_decode, diagnose, hf_greedy
from tplab.align.run import check_prompts
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.patch import Patch
from tplab.pool import shared_pool
from tplab.ranks import RankError

LITTLE = "What is off by so little has lost digits: in which dtype is it computed, or kept?"


def in_learners_words(diagnosis) -> str:
    """A diagnosis without what only a reader of the engine can use."""
    return diagnosis.sentence.partition(" Looked for and not found")[0]


@dataclass
class Setting:
    """The notebook's parameters, and the runs that an answer is tried in."""

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

    @property
    def narrow(self) -> str:
        """The setting's dtype, or float32 where that is float64: there, Hugging Face has tables, norms and softmax in
        float32, which no learner is asked to know."""
        return "float32" if self.dtype == "float64" else self.dtype

    def ids(self, at_least: int = 1) -> list[int]:
        """The prompt's token ids, begun again until there are ``at_least`` so many."""
        ids = self.prompt if not isinstance(self.prompt, str) else self.checkpoint.tokenizer()(self.prompt).input_ids
        return (list(ids) * at_least)[:max(at_least, len(ids))]

    def align(self, *patches: Patch, decode: bool = False, model=None, prompts=None, **options) -> None:
        """The engine with the answer in it against Hugging Face: :func:`tplab.align.align`, or with ``decode``
        :func:`tplab.align.align_decode`. Raises `NotYet` with the diagnosis if it does not agree.

        ``patches``: others than the exercise's; ``model``, ``prompts`` and ``options``: others than the setting's.
        """
        options = {"tensor_parallel_size": self.tensor_parallel_size, "dtype": self.dtype, **options}
        try:
            self.report = (align_decode if decode else align)(
                model or self.model, self.prompt if prompts is None else prompts, patches=patches or self.patches,
                **options)
        except Exception as error:  # of the learner's code, on the ranks or in the scheduler
            raise NotYet(f"in the engine: {in_words(first_cause(error))}") from error
        if not self.report.ok:
            diagnosis, first = diagnose(self.report), self.report.first_divergence
            little = diagnosis.fault is None and first is not None and first.relative < 5e-3
            raise NotYet(f"in the engine: {in_learners_words(diagnosis)}" + f"\n{LITTLE}" * little)

    def on_ranks(self, function: Callable, *args, size: int = 0, timeout: float | None = None) -> list:
        """What ``function(*args)`` gives on each rank of a pool, of ``size`` ranks if given; `NotYet` if it fails."""
        try:
            return shared_pool(size or self.tensor_parallel_size).run(function, *args, timeout=timeout)
        except RankError as error:  # of the learner's code
            raise NotYet(f"on the ranks: {in_words(error)}") from error

    def align_in_chunks(self, **options) -> None:
        """The same over two prompts, read five tokens at a time, and three tokens behind them."""
        ids = self.ids(16)
        self.align(decode=True, prompts=[ids, ids[4:]], new_tokens=3, max_num_batched_tokens=5, **options)

    def fails(self, patch: Patch, words: str, otherwise: str) -> None:
        """`NotYet` unless the engine with this patch fails in these words."""
        try:
            self.align(patch)
        except NotYet as stopped:
            if words in str(stopped):
                return
        raise NotYet(f"in the engine, {otherwise}")

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
