"""The diff against Hugging Face: trace points, floors, reports, and the reassembly check."""

from tplab.align.floors import DTYPES, parse_dtype
from tplab.align.report import AlignReport, Evidence, PointDiff
from tplab.align.run import AlignError, align, reassemble

__all__ = ["AlignError", "AlignReport", "DTYPES", "Evidence", "PointDiff", "align", "parse_dtype", "reassemble"]
