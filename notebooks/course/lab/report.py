"""The report of a batch: one HTML page per executed notebook, and an index with the results and all the figures."""

import os
import re
from base64 import b64encode
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from urllib.parse import quote

from course.lab.store import without_live_views
from tplab.files import write_file

MARK = '<meta name="generator" content="tplab run">'  # in every page: a later run may overwrite it

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 1000px;
       margin: 2.5rem auto; padding: 0 1rem }
h1 { margin-bottom: .2rem }  h2 { margin-top: 2.5rem }
.sub { color: #555; margin-top: 0 }
table { border-collapse: collapse }
th, td { text-align: left; padding: .35rem 1.4rem .35rem 0; border-bottom: 1px solid #ddd; vertical-align: top }
td.seconds { text-align: right; font-variant-numeric: tabular-nums }
.passed { color: #00603a }  .failed { color: #a4001d; font-weight: 600 }
figure { margin: 1.5rem 0 }  figure img { max-width: 100% }
figcaption { color: #444 }
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

PICTURES = ("image/png", "image/svg+xml")


@dataclass(frozen=True)
class Figure:
    """One picture of a notebook as a data URI, and the line that says what it shows ('' if there is none)."""

    source: str
    alt_text: str


def figures(notebook):
    """All figures of an nbformat node; a cell's first picture has the first line ``Figure: …`` printed there, etc."""
    found = []
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        printed = "\n".join(output.text for output in outputs if output.output_type == "stream")
        texts = [" ".join(text.split()) for text in _WORDS.findall(printed)]
        sources = [source for output in outputs for source in _sources(output.get("data", {}))]
        found += [Figure(source, text) for source, text in zip_longest(sources, texts[: len(sources)], fillvalue="")]
    return found


_WORDS = re.compile(r"^Figure:.*(?:\n  .*)*", re.MULTILINE)  # with the lines that go on below it
_IMAGE = re.compile(r'<img [^>]*src="(data:image/[a-z+]+;base64,[\w+/=]+)"')


def _sources(data):
    """The pictures of one output: as such, or in its page."""
    return ([_data_uri(mime, data[mime]) for mime in PICTURES if mime in data]
            or _IMAGE.findall("".join(data.get("text/html", ""))))


def _data_uri(mime, content):
    # A notebook holds a PNG as base64 already, and an SVG as text.
    base64 = content.replace("\n", "") if mime == "image/png" else b64encode(content.encode()).decode()
    return f"data:{mime};base64,{base64}"


def write_report(outcomes, parameters, out):
    """Write ``<name>.html`` for each `Outcome`'s notebook and ``index.html`` over them into ``out``; returns the index.

    ``parameters``: {name: text} as the user gave them.
    """
    from nbconvert import HTMLExporter

    exporter = HTMLExporter()
    rows, galleries = [], []
    for outcome in outcomes:
        shown = escape(outcome.name)
        if notebook := _read(outcome.executed):
            page, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": outcome.name}})
            for other in outcomes:  # links between notebooks of this run lead to their pages
                if other.notebook.parent == outcome.notebook.parent:
                    name, address = quote(os.fsencode(other.notebook.name)), _address(other)
                    for end in '"#':  # a part of it may be meant
                        page = page.replace(f'href="{name}{end}', f'href="{address}{end}')
            # Links to notebooks without a page in this run are removed, and so are scripts that a page would download.
            page = _AFAR.sub("", _NOT_HERE.sub(r"\1", page))
            page = page.replace("<head>", f"<head>{MARK}", 1).replace("</head>", PAGE_STYLE, 1)
            _write_page(outcome.page, page)
            shown = f'<a href="{_address(outcome)}">{shown}</a>'
            galleries.append(_gallery(shown, figures(notebook)))
        if outcome.name != outcome.notebook.stem:
            shown += f"<br>from {escape(str(outcome.notebook))}"
        result = (f'<td class="failed">failed: {escape(outcome.failure)}</td>' if outcome.failure
                  else '<td class="passed">passed</td>')
        rows.append(f'<tr><td>{shown}</td>{result}<td class="seconds">{outcome.seconds:.1f}</td></tr>')

    index = out / "index.html"
    _write_page(index, _index(rows, galleries, parameters, outcomes))
    return index


_NOT_HERE = re.compile(r'<a href="[^":/]+\.ipynb(?:#[^"]*)?">(.*?)</a>', re.DOTALL)
_AFAR = re.compile(r'<script[^>]* src="https?://[^>]*>\s*</script>')


def _address(outcome):
    return quote(os.fsencode(outcome.page.name))  # a # or a % in a name would lead elsewhere


def _write_page(path, page):
    # What a notebook prints may hold half of a surrogate pair, which UTF-8 does not have.
    write_file(path, lambda new: new.write_text(page, encoding="utf-8", errors="replace"))


def _read(executed):
    """An executed notebook; None if there is none, or a part only since the disk was full."""
    import nbformat

    try:
        return without_live_views(nbformat.read(executed, as_version=4))
    except (FileNotFoundError, nbformat.reader.NotJSONError):
        return None


def _gallery(title, pictures):
    if not pictures:
        return ""
    shown = [f'<figure><img src="{escape(one.source)}" alt="{escape(one.alt_text)}">'
             f'<figcaption>{escape(one.alt_text)}</figcaption></figure>' for one in pictures]
    return f"<h2>{title}</h2>\n" + "\n".join(shown)


def _index(rows, galleries, parameters, outcomes):
    given = ", ".join(f"{name} = {text}" for name, text in parameters.items()) or "the notebooks' own parameters"
    failed = sum(outcome.failure is not None for outcome in outcomes)
    count = len(outcomes)
    verdict = f"{failed} of {count} failed" if failed else f"all {count} passed" if count > 1 else "passed"
    seconds = sum(outcome.seconds for outcome in outcomes)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">{MARK}<meta name="viewport" content="width=device-width">
<title>tplab run: {verdict}</title><style>{STYLE}</style></head><body><main>
<h1>tplab run: {verdict}</h1>
<p class="sub">{escape(given)} · {seconds:.1f} s</p>
<table><tr><th scope="col">notebook</th><th scope="col">result</th><th scope="col">seconds</th></tr>
{chr(10).join(rows)}
</table>
{chr(10).join(galleries)}
</main></body></html>
"""
