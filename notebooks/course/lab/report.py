"""The report over executed notebooks: one HTML page each, by nbconvert, and an index with the results.

``launch run`` writes it; ``python -m course report FOLDER`` writes it for notebooks that anything else executed.
"""

import os
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote, unquote

from course.lab.store import without_live_views
from tplab.errors import TplabError

INDEX = "index.html"
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 1000px;
       margin: 2.5rem auto; padding: 0 1rem }
.sub { color: #555 }  .passed { color: #00603a }  .failed { color: #a4001d; font-weight: 600 }
th, td { text-align: left; padding: .35rem 1.4rem .35rem 0; border-bottom: 1px solid #ddd; vertical-align: top }
a { color: #0b57a4; text-decoration: underline }
"""
# What nbconvert's own style lacks: contrast in small print and code, links that are more than a colour, and lines that
# break between words.
PAGE_STYLE = """<style>
body { --jp-mirror-editor-comment-color: #2f6a6a; --jp-mirror-editor-number-color: #006e00;
       --jp-mirror-editor-operator-color: #8510d0 }
.jp-OutputArea-output pre { word-break: normal !important; overflow-wrap: anywhere }
.jp-InputPrompt, .jp-OutputPrompt { color: #595959 !important; opacity: 1 !important }
.jp-RenderedHTMLCommon p a:link, .jp-RenderedHTMLCommon li a:link,
.jp-RenderedHTMLCommon td a:link { text-decoration: underline }
</style></head>"""
# nbconvert's pages load these from elsewhere; a report is read without a network.
_FROM_AFAR = re.compile(r'<script[^>]* src="https?://[^>]*>\s*</script>')
_TO_NOTEBOOK = re.compile(r'<a href="([^":/]+)\.ipynb(#[^"]*)?">(.*?)</a>', re.DOTALL)


@dataclass(frozen=True)
class Outcome:
    """The result of one notebook."""

    notebook: Path  # the one that was asked for
    executed: Path  # the executed copy; there is none if the notebook failed before it started
    seconds: float
    failure: str | None  # None, or in one line where and why it stopped


def outcomes_in(folder: Path) -> list[Outcome]:
    """Of every executed notebook in a folder what came of it, as the notebook itself says. `TplabError` for none."""
    import nbformat

    outcomes = []
    for path in sorted(folder.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        errors = [f"cell [{cell.execution_count}]: {output.ename}: {(output.evalue.splitlines() or [''])[0]}"
                  for cell in notebook.cells for output in cell.get("outputs", ()) if output.output_type == "error"]
        seconds = notebook.metadata.get("papermill", {}).get("duration") or 0.0
        outcomes.append(Outcome(path, path, seconds, errors[0] if errors else None))
    if not outcomes:
        raise TplabError(f"there is no notebook in {folder}; give a folder of executed notebooks")
    return outcomes


def write_report(outcomes: list[Outcome], parameters: dict[str, str], out: Path) -> Path:
    """Write a page for each notebook that was executed and ``index.html`` over them into ``out``; returns the index.

    ``parameters``: {name: text} as the user gave them.
    """
    import nbformat
    from nbconvert import HTMLExporter

    exporter, rows = HTMLExporter(), []
    names = {outcome.notebook.stem for outcome in outcomes}

    def to_page(link: re.Match) -> str:  # where there is no page, the words alone
        name, part, words = link.groups()
        return f'<a href="{name}.html{part or ""}">{words}</a>' if unquote(name) in names else words

    for outcome in outcomes:
        name, file = outcome.executed.stem, outcome.executed.with_suffix(".html")
        shown = escape(name)
        try:
            notebook = without_live_views(nbformat.read(outcome.executed, as_version=4))
        except (FileNotFoundError, nbformat.reader.NotJSONError):  # none, or a part only since the disk was full
            pass
        else:
            page, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": name}})
            page = _FROM_AFAR.sub("", _TO_NOTEBOOK.sub(to_page, page))
            _write(file, page.replace("</head>", PAGE_STYLE, 1))
            shown = f'<a href="{quote(os.fsencode(file.name))}">{shown}</a>'
        result = (f'<td class="failed">failed: {escape(outcome.failure)}</td>' if outcome.failure
                  else '<td class="passed">passed</td>')
        rows.append(f'<tr><td>{shown}</td>{result}<td>{outcome.seconds:.1f}</td></tr>')
    return _write(out / INDEX, _index(rows, parameters, outcomes))


def _write(path: Path, page: str) -> Path:
    # What a notebook prints may hold half of a surrogate pair, which UTF-8 does not have.
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def _index(rows: list[str], parameters: dict[str, str], outcomes: list[Outcome]) -> str:
    values = ", ".join(f"{name} = {text}" for name, text in parameters.items()) or "the notebooks' own parameters"
    failed, count = sum(outcome.failure is not None for outcome in outcomes), len(outcomes)
    verdict = f"{failed} of {count} failed" if failed else f"all {count} passed" if count > 1 else "passed"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>tplab run: {verdict}</title><style>{STYLE}</style></head><body><main>
<h1>tplab run: {verdict}</h1>
<p class="sub">{escape(values)} · {sum(outcome.seconds for outcome in outcomes):.1f} s</p>
<table><tr><th scope="col">notebook</th><th scope="col">result</th><th scope="col">seconds</th></tr>
{chr(10).join(rows)}
</table>
</main></body></html>
"""


def add_options(parser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder of executed notebooks")


def main(chosen) -> int:
    """Write the report into the folder; exit code 1 if a notebook in it failed."""
    outcomes = outcomes_in(chosen.folder)
    print(f"report: {write_report(outcomes, {}, chosen.folder)}")
    return 1 if any(outcome.failure for outcome in outcomes) else 0
