"""The cases solve themselves: with the lab's own instruments, and the repairs that their files hold."""

from contextlib import redirect_stdout
from io import StringIO

from course.cases import CASES, NOWHERE
from course.cases.repairing import judge_repair, one_thread_if_small
from course.cases.sealed import OpenCase
from tplab.align import AlignReport, diagnose
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.errors import TplabError
from tplab.patch import as_patches
from tplab.show.phrases import ShowError
from tplab.show.tables import Table, table


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
        with redirect_stdout(StringIO()):
            self.answer = case.answer([bug.place for bug in self.file.bugs] or [NOWHERE], list(self.file.kinds),
                                      next(why for why, wrong in self.file.why.items() if not wrong)).sentence
            cures = {bug.place: bug.right for bug in self.file.bugs} or self.file.cure
            self.repair, *self.hidden = (judge_repair(case, one, seed=seed)
                                         for one in (cures, *self.file.false_repairs))

    def _look(self, mended) -> tuple[str, set[str]]:
        """The reported run with these bugs mended: where it shows, and the names that the diagnosis has for it."""
        patches = (*self.file.patches, *as_patches([patch for bug in mended for patch in bug.repair]))
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


def prove_cases(model: str | Checkpoint = "fable", prompt="", *, tensor_parallel_size: int = 2) -> Table:
    """Solve every case with the lab's instruments and its file's own repair, and try the repairs that only hide it, a
    row for each. Raises `ShowError` where something does not go as it should."""
    ckpt, rows = open_checkpoint(model), []
    for file in CASES.values():
        if file.ranks_for(ckpt.config, tensor_parallel_size) is None:
            continue
        with one_thread_if_small(ckpt.config):
            solved = Solved(OpenCase(file, ckpt, prompt, tensor_parallel_size))
        if solved.wrong:
            raise ShowError(f"case {file.number}: {solved.wrong}")
        rows.append({"case": file.number, "ranks": solved.case.tensor_parallel_size, "seen at": solved.seen,
                     "named": ", ".join(solved.named) or "nothing: innocent", "its repair": "accepted",
                     "repairs that hide it": f"{len(solved.hidden)} refused"})
    return table(rows, "case", "Where each case shows, and what the diagnosis calls it: spoils all of them")
