"""The cases solve themselves: with the lab's own instruments, and the repairs that their files hold."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

from helpers import turns

from course.cases import repairing
from course.cases.answering import check_what_and_why, check_where
from course.cases.case_file import NOWHERE, engines_own, patches_at
from course.cases.sealed import OpenCase
from course.judge.words import NotYet
from tplab.align import AlignReport, diagnose
from tplab.errors import TplabError


def refused(function, *args) -> str:
    """What is wrong; the empty string if nothing is."""
    try:
        function(*args)
    except NotYet as wrong:
        return str(wrong)
    return ""


def no_runs(take, longest) -> tuple:
    """For ``repairing.usual``."""
    return ()


@contextmanager
def fewer_runs(case: OpenCase):
    """On the case's own number of ranks, with one run on fresh tokens, and without the usual runs: with the right
    repair every case's engine is the lab's own, and one case makes them all."""
    file = case._file
    one_trial = replace(file, trials=lambda take: file.trials(take)[:1])
    with (mock.patch.multiple(repairing, usual=no_runs, RANKS=(case.tensor_parallel_size,)),
          mock.patch.object(case, "_file", one_trial)):
        yield


class Solved:
    """One case, solved by the instruments: what they saw and named, and what the judge said."""

    def __init__(self, case: OpenCase, seed: int = 0):
        self.case, self.file, self.seen, self.named, left = case, case._file, "", [], list(case._file.bugs)
        while not self.seen or left:
            where, names = self._look([bug for bug in self.file.bugs if bug not in left])
            self.seen = self.seen or where
            found = [bug for bug in left if bug.fault in names]
            if not found:
                break
            self.named += [bug.fault for bug in found]
            left = [bug for bug in left if bug not in found]
        self.left = left
        why = next(why for why, wrong in self.file.why.items() if not wrong)
        self.answer = refused(check_where, self.file, [*self.file.repair], case._places) or refused(
            check_what_and_why, self.file, [*self.file.repair], list(self.file.kinds), why)
        # By turns: of two false repairs, or of one in every second case.
        some = self.file.false_repairs
        false_repairs = some if turns.ALL else some[self.file.number % max(2, len(some))::len(some)]
        with nullcontext() if turns.ALL or self.file.number == 1 else fewer_runs(case):
            self.repair = refused(repairing.examine, case, self.file.repair, seed)
        self.hidden = [refused(repairing.examine, case, one, seed) for one in false_repairs]

    def _look(self, mended) -> tuple[str, set[str]]:
        """The reported run with these bugs mended: where it shows, and the names that the diagnosis has for it."""
        patches = (*self.file.patches, *patches_at({bug.place: engines_own(bug.place) for bug in mended}))
        try:
            report: AlignReport | TplabError = self.case._run(self.case.trial, patches)
        except TplabError as error:
            report = error
        found = (report.diagnoses if isinstance(report, AlignReport) else ()) or [diagnose(report)]
        return found[0].point or NOWHERE, {name for one in found for name in one.names}

    @property
    def wrong(self) -> str:
        """What did not go as it should; empty if nothing."""
        if self.left:
            return f"the diagnosis does not name {', '.join(bug.fault for bug in self.left)}"
        accepted = "" if all(self.hidden) else f"the repair that hides it, number {self.hidden.index('')}, was accepted"
        return self.answer or self.repair or accepted
