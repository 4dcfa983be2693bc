"""``python -m course.lab.glossary``: link every term's first use in every notebook to the glossary.

The glossary is the notebook itself: a cell is a term, ``### name``, and what it means; a last line in italics, if there
is one, has other forms of it (*Also: …*), and where the series first uses it, which this command writes. A term is
looked for in prose only: not in headings, code, links or HTML; what is folded away counts if it stands nowhere else.
Links name the cell, which JupyterLab finds in a notebook that it only opens now; a heading it finds in a drawn one.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tplab.files import write_file

PAGE = "glossary.ipynb"
_NOT_PROSE = re.compile(r"""^```.*?^```[^\n]*$ | ^\#[^\n]*$ | ^[ ]*<[^\n]*$    # fenced code, headings, lines of HTML
                            | `+[^`]*`+ | !?\[[^]]*\]\([^)]*\) | </?[a-zA-Z][^>]*> | https?://\S+""",
                        re.VERBOSE | re.MULTILINE | re.DOTALL)
_LINK = re.compile(rf"\[([^]]+)\]\({re.escape(PAGE)}#[^)]*\)")
_FOLD = re.compile(r"<(/?)details>")
_LAST = re.compile(r"\n\n\*((?:Also|First)[^\n]*)\*$")


@dataclass(frozen=True)
class Term:
    """``forms``: the name and what else the texts say for it."""

    name: str
    forms: tuple[str, ...]

    @property
    def anchor(self) -> str:
        """The id of its cell and, as JupyterLab and nbconvert make it, of its heading."""
        return self.name.replace(" ", "-")


def read_terms(glossary) -> list[Term]:
    """All terms of the glossary, an nbformat node."""
    terms = []
    for cell in glossary.cells:
        if cell.source.startswith("### "):
            last = _LAST.search(cell.source)
            also = re.match(r"Also: ([^.]*)", last[1]) if last else None
            name = cell.source.splitlines()[0].removeprefix("### ")
            terms.append(Term(name, (name, *(also[1].split(", ") if also else ()))))
    return terms


def first_uses(notebook, terms: list[Term]) -> dict[str, tuple[int, int, int]]:
    """``{name: (cell, start, end)}``: where the prose, without its links to the glossary, first says each term."""
    pattern, owner = _pattern(terms), {_plain(form): term for term in terms for form in term.forms}
    seen, folded = {}, {}
    for at, source in _unlinked(notebook).items():
        for match in (match for start, end in _prose(source) for match in pattern.finditer(source, start, end)):
            said = owner.get(_plain(match[0])) or owner[_plain(match[0]).removesuffix("s")]
            (folded if _is_folded(source, match.start()) else seen).setdefault(said.name, (at, *match.span()))
    return {**folded, **seen}


def link(notebook, terms: list[Term]) -> bool:
    """Link each term's first use, and no other; whether that changed the notebook."""
    before, anchors = [cell.source for cell in notebook.cells], {term.name: term.anchor for term in terms}
    places = [(*where, anchors[name]) for name, where in first_uses(notebook, terms).items()]
    for at, source in _unlinked(notebook).items():
        notebook.cells[at].source = source
    for at, start, end, anchor in sorted(places, reverse=True):
        source = notebook.cells[at].source
        notebook.cells[at].source = f"{source[:start]}[{source[start:end]}]({PAGE}#cell-id={anchor}){source[end:]}"
    return before != [cell.source for cell in notebook.cells]


def say_where(glossary, series: dict) -> bool:
    """Write into each entry its id, and where ``{file name: nbformat node}`` first says it: in prose, else anywhere."""
    before = [(cell.id, cell.source) for cell in glossary.cells]
    terms = {f"### {term.name}": term for term in read_terms(glossary)}
    used = {name: first_uses(notebook, list(terms.values())) for name, notebook in series.items()}
    texts = {name: str(notebook.cells).replace("`", " ") for name, notebook in series.items()}
    for cell in glossary.cells:
        if term := terms.get(cell.source.split("\n")[0]):
            places = [name for name in series if term.name in used[name]]
            places = places or [name for name in series if _pattern([term]).search(texts[name])]
            last = [f"Also: {', '.join(term.forms[1:])}."] if len(term.forms) > 1 else []
            last += [f"First in [{places[0][:2]}]({places[0]})."] if places else []
            cell.source = _LAST.sub("", cell.source) + (f"\n\n*{' '.join(last)}*" if last else "")
            cell.id = term.anchor
    return before != [(cell.id, cell.source) for cell in glossary.cells]


def _unlinked(notebook) -> dict[int, str]:
    """The text of each markdown cell without links to the glossary."""
    return {at: _LINK.sub(r"\1", cell.source) for at, cell in enumerate(notebook.cells) if cell.cell_type == "markdown"}


def _plain(text: str) -> str:
    return text.lower().replace("-", " ")


def _pattern(terms: list[Term]) -> re.Pattern:
    """Any form of any term as a word, longer ones first; with an ``s``, a hyphen for a space, a capital."""
    words = []
    for form in sorted({form for term in terms for form in term.forms}, key=len, reverse=True):
        word = re.sub(r"(\\ |\\-)", "[ -]", re.escape(form))
        words.append(f"(?i:{word})" if form == form.lower() else word)
    return re.compile(rf"(?<![\w`.-])(?:{'|'.join(words)})s?(?![\w`]|-\w)")


def _prose(source: str) -> Iterator[tuple[int, int]]:
    """``(start, end)`` of each stretch of prose."""
    at = 0
    for match in _NOT_PROSE.finditer(source):
        yield at, match.start()
        at = match.end()
    yield at, len(source)


def _is_folded(source: str, place: int) -> bool:
    return sum(-1 if match[1] else 1 for match in _FOLD.finditer(source, 0, place)) > 0


def main(folder: Path) -> None:
    """Link all notebooks of ``folder`` that have a number, and bring its glossary up to date."""
    import nbformat

    glossary = nbformat.read(folder / PAGE, as_version=4)
    terms = read_terms(glossary)
    series = {path.name: nbformat.read(path, as_version=4) for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    changed = {name: notebook for name, notebook in series.items() if link(notebook, terms)}
    if say_where(glossary, series):
        changed[PAGE] = glossary
    for name, notebook in changed.items():
        write_file(folder / name, lambda new, notebook=notebook: nbformat.write(notebook, new))
        print(f"changed {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2])
