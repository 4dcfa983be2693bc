"""The report of a batch: one HTML page per executed notebook, and an index with the results and all the figures."""

from dataclasses import dataclass
from html import escape

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 1000px; margin: 2.5rem auto; padding: 0 1rem }
h1 { margin-bottom: .2rem }  h2 { margin-top: 2.5rem }
.sub { color: #555; margin-top: 0 }
table { border-collapse: collapse }
th, td { text-align: left; padding: .35rem 1.4rem .35rem 0; border-bottom: 1px solid #ddd; vertical-align: top }
td.seconds { text-align: right; font-variant-numeric: tabular-nums }
.passed { color: #00603a }  .failed { color: #a4001d; font-weight: 600 }
figure { margin: 1.5rem 0 }  figure img { max-width: 100% }
figcaption { color: #444 }
"""


@dataclass(frozen=True)
class Figure:
    """One picture of a notebook: base64 PNG, and the words that say what it shows ('' if the notebook has none)."""

    png: str
    words: str


def figures(notebook):
    """All PNG figures of a notebook (a nbformat node), in order, each with its text alternative.

    The words are the line ``Figure: …`` that the same cell prints, or the first paragraph of the markdown cell below if
    that begins with "Figure".
    """
    found = []
    for cell, below in zip(notebook.cells, [*notebook.cells[1:], None]):
        if cell.cell_type != "code":
            continue
        printed = [line for output in cell.outputs if output.output_type == "stream" for line in output.text.splitlines()]
        words = [line for line in printed if line.startswith("Figure:")]
        if not words and below is not None and below.source.lstrip("*_> ").startswith("Figure"):
            words = [below.source.strip().split("\n\n")[0]]
        pictures = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
        found += [Figure(png.replace("\n", ""), words[0] if words else "") for png in pictures]
    return found


def write_report(outcomes, parameters, out):
    """Write ``<name>.html`` for every executed notebook and ``index.html`` over them; returns the index's path.

    ``outcomes``: `tplab.show.batch.Outcome`s, in order. ``parameters``: {name: text} as the user gave them. ``out``: the
    folder that holds the executed notebooks.
    """
    import nbformat
    from nbconvert import HTMLExporter

    exporter = HTMLExporter()
    rows, galleries = [], []
    for outcome in outcomes:
        link = escape(outcome.name)
        if outcome.notebook.exists():
            notebook = nbformat.read(outcome.notebook, as_version=4)
            page, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": outcome.name}})
            (out / f"{outcome.name}.html").write_text(page, encoding="utf-8")
            link = f'<a href="{link}.html">{link}</a>'
            galleries.append(_gallery(outcome.name, figures(notebook)))
        result = f'<td class="failed">failed: {escape(outcome.failure)}</td>' if outcome.failure else '<td class="passed">passed</td>'
        rows.append(f'<tr><td>{link}</td>{result}<td class="seconds">{outcome.seconds:.1f}</td></tr>')

    index = out / "index.html"
    index.write_text(_index(rows, galleries, parameters, outcomes), encoding="utf-8")
    return index


def _gallery(name, pictures):
    if not pictures:
        return ""
    shown = [f'<figure><img src="data:image/png;base64,{one.png}" alt="{escape(one.words)}"><figcaption>{escape(one.words)}</figcaption></figure>'
             for one in pictures]
    return f'<h2><a href="{escape(name)}.html">{escape(name)}</a></h2>\n' + "\n".join(shown)


def _index(rows, galleries, parameters, outcomes):
    given = ", ".join(f"{name} = {text}" for name, text in parameters.items()) or "the notebooks' own parameters"
    failed = sum(outcome.failure is not None for outcome in outcomes)
    verdict = f"{failed} of {len(outcomes)} failed" if failed else f"all {len(outcomes)} passed"
    seconds = sum(outcome.seconds for outcome in outcomes)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>tplab run: {verdict}</title><style>{STYLE}</style></head><body>
<h1>tplab run: {verdict}</h1>
<p class="sub">{escape(given)} · {seconds:.1f} s</p>
<table><tr><th>notebook</th><th>result</th><th>seconds</th></tr>
{chr(10).join(rows)}
</table>
{chr(10).join(galleries)}
</body></html>
"""
