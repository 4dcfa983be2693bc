"""The case files: sealed engines, each with the bug of a real engine.

One file per case, ``case_NN.py``, in the order of difficulty; each holds one ``CASE``, a
:class:`course.cases.case_file.CaseFile`. The lesson, the score and the tests find a new file by its name. Do not read
a case before you have solved it.
"""

import pkgutil
import re
from dataclasses import replace
from importlib import import_module

from course.cases.case_file import CaseFile

CASES: dict[str, CaseFile] = {name: replace(import_module(f"{__name__}.{name}").CASE, name=name)
                              for name in sorted(module.name for module in pkgutil.iter_modules(__path__))
                              if re.fullmatch(r"case_\d+", name)}
