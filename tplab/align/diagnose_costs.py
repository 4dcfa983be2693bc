"""Hypotheses about runs whose numbers are right: what did they cost?"""

from tplab.align.case import Diagnosis
from tplab.align.report import AlignReport
from tplab.checkpoint import open_checkpoint


def read_too_much(report: AlignReport) -> Diagnosis | None:
    """Did the ranks read more of the checkpoint than they keep?"""
    if not report.load_stats:
        return None
    stored = next(iter(open_checkpoint(report.model).tensors.values())).dtype.itemsize
    kept = [stats.parameter_bytes // report.dtype.itemsize * stored for stats in report.load_stats]
    times = max(stats.bytes_read / keeps for stats, keeps in zip(report.load_stats, kept))
    if times < 1.2:
        return None
    return Diagnosis("full_copy_on_every_rank", f"The numbers are right, but a rank read {times:.1f} times the bytes that "
                     "it keeps: whole tensors were read and cut afterwards.", "load", {"times": times})


HYPOTHESES = (read_too_much,)
