"""The report of a batch: what a notebook holds cannot write into the page."""

from textwrap import fill

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course.lab.batch import Outcome, write_report
from course.lab.report import figures
from tplab.show.drawings.svg import Drawing


def test_a_pictures_data_stay_data(tmp_path):
    evil = 'iVBOR"><script>alert(1)</script><img src="'
    picture = new_output("display_data", data={"image/png": evil})
    nbformat.write(new_notebook(cells=[new_code_cell("", outputs=[picture])]), tmp_path / "own.ipynb")
    index = write_report([Outcome(tmp_path / "own.ipynb", tmp_path / "own.ipynb", 1.0, None)], {}, tmp_path)
    assert "<script>" not in index.read_text() and "iVBOR&quot;&gt;&lt;script" in index.read_text()


def test_the_index_sums_the_seconds_and_escapes_what_the_user_gave(tmp_path):
    outcomes = [Outcome(tmp_path / f"{name}.ipynb", tmp_path / f"{name}.ipynb", seconds, failure)
                for name, seconds, failure in (("a", 1.5, None), ("b", 2.25, "cell [1]: ValueError: <b>"))]
    text = write_report(outcomes, {"prompt": "<i>Once</i>"}, tmp_path).read_text()
    assert "prompt = &lt;i&gt;Once&lt;/i&gt; · 3.8 s" in text and "tplab run: 1 of 2 failed" in text
    assert '<td>a</td><td class="passed">passed</td><td class="seconds">1.5</td>' in text, "no page, no link"
    assert '<td>b</td><td class="failed">failed: cell [1]: ValueError: &lt;b&gt;</td>' in text


def test_each_picture_of_a_cell_has_the_line_that_stands_for_it(tmp_path):
    def cell(pictures, *lines):
        shown = [new_output("display_data", data={mime: mime}) for mime in pictures]
        return new_code_cell("", outputs=[*shown, new_output("stream", text="\n".join(lines))])

    cells = [cell(["image/png", "image/svg+xml"], "other", "Figure: one", "more", "Figure: two"), cell(["image/png"]),
             cell([], "Figure: of no picture"), cell(["image/png"], "Figure: last")]
    book = new_notebook(cells=cells)
    assert [figure.alt_text for figure in figures(book)] == ["Figure: one", "Figure: two", "", "Figure: last"]


def test_a_drawing_in_a_page_and_words_over_several_lines_are_found():
    shown = Drawing('<svg xmlns="http://www.w3.org/2000/svg"/>', 'Figure: "a" & b')
    words = "Figure: " + "word " * 40 + "end."
    cells = [new_code_cell("", outputs=[
        new_output("display_data", data={"text/html": shown.html()}),
        new_output("stream", text=fill(words, 100, subsequent_indent="  ") + "\nnot of it\n")])]
    (found,) = figures(new_notebook(cells=cells))
    assert found.source.startswith("data:image/svg+xml;base64,") and found.alt_text == words
    assert 'alt="&quot;a&quot; &amp; b"' in shown.html()


def test_a_page_loads_nothing_from_afar_and_links_to_no_notebook_that_is_not_there(tmp_path):
    text = "[one](a.ipynb) [there](a.ipynb#There) [other](b.ipynb) [word](b.ipynb#word) [web](https://x.org/c.ipynb)"
    book = new_notebook(cells=[new_markdown_cell(text)])
    outcomes = [Outcome(tmp_path / "a.ipynb", tmp_path / "a.ipynb", 1.0, None)]
    nbformat.write(book, tmp_path / "a.ipynb")
    index = write_report(outcomes, {}, tmp_path).read_text()
    page = (tmp_path / "a.html").read_text()
    assert 'href="a.html">one</a>' in page and 'href="a.html#There">there</a>' in page and " other word " in page
    assert 'href="https://x.org/c.ipynb"' in page
    assert 'src="https://' not in page and "src='https://" not in page
    assert "tplab run: passed" in index and "<main>" in index and "<th></th>" not in index
