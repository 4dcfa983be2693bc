"""The diff against Hugging Face: trace points, floors, reports, the diagnosis, and the reassembly check."""

from tplab.align.check.check import check
from tplab.align.check.verdict import CheckReport
from tplab.align.decode import align_decode
from tplab.align.diagnose import diagnose, diagnose_all
from tplab.align.diagnosis import Diagnosis
from tplab.align.fast_path import FastReport, align_fast
from tplab.align.reference import hf_greedy
from tplab.align.report import AlignReport, Evidence, PointDiff
from tplab.align.run import AlignError, align, reassemble

__all__ = ["AlignError", "AlignReport", "CheckReport", "Diagnosis", "Evidence", "FastReport", "PointDiff", "align",
           "align_decode", "align_fast", "check", "diagnose", "diagnose_all", "hf_greedy", "reassemble"]
