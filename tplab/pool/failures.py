"""What went wrong in a command: one `RankError` from what a `Watch` has seen."""

from dataclasses import replace

from tplab.pool import transfer
from tplab.pool.control_block import ANSWERED_AT
from tplab.pool.rank_process import snapshot
from tplab.ranks.errors import Cause, CollectiveMismatch, Frame, RankError, learner_frames, waiting

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


def failure(watch) -> RankError:
    """A rank raised or died: the first one on top; errors of ranks that only lost it are marked as a consequence."""
    if watch.pool.closed:
        watch.stop()
        return RankError("the pool was closed while it was running this")
    causes = _unfinished(watch, consequence=True)
    causes += [_finished(watch, r) for r, status in enumerate(watch.status) if status != "running"]
    first = min(causes, key=lambda cause: (cause.consequence or cause.kind == "returned", cause.at))
    if isinstance(first.exception, CollectiveMismatch):
        return _error(watch, first.exception.summary, first.exception.causes.values(), CollectiveMismatch)
    causes.sort(key=lambda cause: (cause is not first, cause.rank))
    return _error(watch, f"rank {first.rank} {first.text}", causes)


def skipped(watch) -> RankError:
    """Some ranks have returned, and others wait for them in a collective."""
    causes = _unfinished(watch) + _returned(watch)
    summary = "; ".join(f"rank {c.rank} {c.text}" for c in sorted(causes, key=lambda c: c.kind != "returned"))
    return _error(watch, summary, causes)


def too_late(watch) -> RankError:
    """The timeout has passed: where every rank is; those that do not wait for another one come first."""
    causes = sorted(_unfinished(watch) + _returned(watch), key=lambda cause: cause.rank)
    summary = f"not finished after {watch.timeout:g} s: " + "; ".join(f"rank {c.rank} {c.text}" for c in causes)
    return _error(watch, summary, sorted(causes, key=lambda cause: cause.kind != "running"))


def _unfinished(watch, consequence=False) -> list[Cause]:
    """Where the ranks are that have not finished."""
    ops = {r: watch.waits_in(r) for r in watch.running()}
    causes = [waiting(r, record, consequence=consequence) for r, record in ops.items() if record is not None]
    computing = [r for r, record in ops.items() if record is None]
    if consequence:  # healthy: where they are explains nothing
        return causes + [Cause(r, "running", "is still running", consequence=True) for r in computing]
    for r, frames in snapshot([watch.processes[r] for r in computing]).items():
        lines = learner_frames(frames)
        text = f"is still running at {lines[-1]}" if lines else "is still running, in code that does not say where"
        causes.append(Cause(r, "running", text, lines))
    return causes


def _returned(watch):
    return [Cause(r, "returned", "returned") for r, status in enumerate(watch.status) if status == "returned"]


def _finished(watch, r):
    status, report = watch.status[r], watch.reports[r]
    if status == "returned":
        return Cause(r, "returned", "returned")
    if status == "dead":
        return _death(watch, r)
    at = watch.control.word(r, ANSWERED_AT)
    if report.kind == "stopped":
        text = f"stopped in {record.op}" if (record := watch.waits_in(r)) else "stopped"
        text += f" at {report.frames[-1]}" if report.frames else ""
        return Cause(r, "stopped", text, report.frames, at=at, consequence=True)
    lost = any(sign in report.text for sign in _LOST)
    return Cause(r, "raised", f"raised {report.text}", report.frames, _exception(report.exception), at, lost)


def _death(watch, r):
    """How and where a rank died. Of one that was killed from outside, only its last collective is known."""
    process, record = watch.processes[r], watch.last_op(r)
    frames = learner_frames(process.stack(crash=True))
    text = f"died ({process.death()})"
    if frames:
        text += f" at {frames[-1]}"
    elif record is not None:
        frames = [Frame(record.file, record.line, "")]
        text += f" {'after' if record.left else 'in'} {record.op} at {frames[0]}"
    else:
        text += " before any collective"
    return Cause(r, "died", text, frames, at=watch.died_at[r])


def _error(watch, summary, causes, kind=RankError):
    dead = [r for r, status in enumerate(watch.status) if status == "dead"]
    watch.stop()
    # Read when no rank runs any more: logs that still grow would seem to differ.
    logs = [[replace(record, seq=record.seq - before) for record in log.records(before)]  # counted in this run
            for log, before in zip(watch.control.logs, watch.before)]
    notes = []
    if watch.ended:
        notes.append(f"{_ranks(watch.ended)} did not stop and had to be ended.")
    if afresh := {*dead, *watch.ended}:
        kept = "; the others keep theirs" if len(afresh) < watch.pool.size else ""
        notes.append(f"The next run starts {_ranks(afresh)} afresh, with an empty state{kept}.")
    return kind(summary, causes, logs, notes)


def _ranks(numbers) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, sorted(numbers)))


def _exception(pickled):
    """The exception object, if its class can be imported here; its text is known in any case."""
    try:
        return None if pickled is None else transfer.loads(pickled)
    except Exception:
        return None
