"""The series as a whole: whether this machine is ready for it, and the map of its notebooks."""

import re
from html import escape

from tplab.errors import TplabError
from tplab.show.tables import Table


def environment() -> Table:
    """Whether the lab can run here: packages, the Jupyter kernel, the embedded model; each problem with its remedy.

    On a machine that is ready the table says ``ok`` and nothing else, so that it reads the same everywhere;
    ``./launch doctor`` tells the details.

        >>> lab.environment()
    """
    import pandas as pd

    from course.lab import doctor

    rows = {}
    for what, examine in (("packages", doctor.packages), ("Jupyter kernel", doctor.kernel),
                          ("the model fable", doctor.models)):
        wrong = [finding for finding in examine() if finding.remedy and finding.essential]
        rows[what] = "ok" if not wrong else "; ".join(f"{finding.what} → {finding.remedy}" for finding in wrong)
    frame = pd.DataFrame({"state": rows.values()}, index=list(rows))
    return Table(frame, frame != "ok")


class SeriesMap:
    """The notebooks of the series in order, with links. ``str()`` gives the same without them."""

    def __init__(self, stops: list[tuple[str, str, str]]):
        """``stops``: ``(file name, title, promise)``."""
        self.stops = stops

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/plain": str(self), "text/html": self._html()}

    def __str__(self) -> str:
        return "\n".join(f"{name[:2]}  {title}\n    {promise}" for name, title, promise in self.stops)

    def _html(self) -> str:
        rows = "".join(f'<tr><td style="text-align: right">{escape(name[:2])}</td>'
                       f'<td style="text-align: left"><a href="{escape(name)}">{escape(title)}</a></td>'
                       f'<td style="text-align: left">{escape(promise)}</td></tr>'
                       for name, title, promise in self.stops)
        summary = f"{len(self.stops)} notebooks, and what each of them promises"
        return f"<details><summary>{summary}</summary><table>{rows}</table></details>"


def map_of_series() -> SeriesMap:
    """The map: every notebook that is there, with its title, its promise and a link, read from the notebooks.

        >>> lab.map_of_series()
    """
    import nbformat

    from course.lab.batch import FOLDER

    found = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
    if not found:
        raise TplabError("the notebooks are not beside this copy of tplab; use the repository's own installation "
                         "(./launch)")
    stops = []
    for path in found:
        header = nbformat.read(path, as_version=4).cells[0].source
        title, promise, *_ = (line.strip() for line in header.splitlines() if line.strip())
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", promise)  # without its links
        stops.append((path.name, title.removeprefix("# "), re.sub(r"[*_`]", "", plain)))
    return SeriesMap(stops)
