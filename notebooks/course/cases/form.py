"""The form of a case: where, what, why, and a button."""

from collections.abc import Sequence
from contextlib import redirect_stdout
from html import escape
from io import StringIO

from course.cases import NOWHERE, CaseFile
from course.cases.answering import kinds

# ipywidgets gives a radio button's words one line's height, so long ones lie over each other in a narrow window.
_LINES = """<style>
.tplab-why .widget-radio-box label {
  display: flex; flex-direction: row-reverse; justify-content: flex-end; height: auto; line-height: 1.4; margin: 3px 0 }
.tplab-why .widget-radio-box input { flex: none; height: 1.4em }
</style>"""
_NOTE = '<div style="font-size: 85%; line-height: 1.4; padding-bottom: 6px">{}</div>'
_MARKED = _NOTE.format("The first letters of a name lead to it. Of two bugs mark both: hold Ctrl (⌘ on a Mac) and "
                       "click. When where is right, you are asked why.")
_AGAIN = _NOTE.format("After the kernel was restarted, run this cell and the case's first one again.")
_NEXT = "Now mend it in the cell below; it need not repeat this answer."


class Form:
    """Widgets with the same effect as ``case.answer(where=…, what=…, why=…)``; where no kernel runs, a line of text."""

    def __init__(self, case, file: CaseFile, known: Sequence[str]):
        import ipywidgets as widgets

        def labelled(kind, name: str, **more):
            return kind(description=name, layout=widgets.Layout(width="auto"), style={"description_width": "4em"},
                        **more)
        self._case = case
        self.where = labelled(widgets.SelectMultiple, "Where", options=[NOWHERE, *known], rows=8)
        self.what = labelled(widgets.SelectMultiple, "What", options=kinds(), rows=len(kinds()))
        self.why = labelled(widgets.RadioButtons, "Why", options=sorted(file.why), value=None)
        self.why.add_class("tplab-why")
        self._ask_why()
        button = widgets.Button(description="Answer", button_style="primary")
        button.on_click(lambda _: self.answer())
        self.verdict = widgets.HTML()
        self.widget = widgets.VBox([self.where, self.what, widgets.HTML(_LINES + _MARKED), self.why, button,
                                    self.verdict, widgets.HTML(_AGAIN)])

    def _ask_why(self) -> None:
        """Show *why* only where the place is found: what it offers would tell where to look."""
        self.why.layout.display = None if self._case.found else "none"

    def answer(self) -> None:
        said = StringIO()
        with redirect_stdout(said):
            right = self._case.answer(list(self.where.value), list(self.what.value), self.why.value or "").passed
        self._ask_why()
        words = " ".join([*said.getvalue().split(), _NEXT * right])  # its lines are as long as the window is wide
        self.verdict.value = f'<div role="status" style="line-height: 1.4; padding: 6px 0">{escape(words)}</div>'

    def __str__(self) -> str:
        return (f"Form of case {self._case.number}: where, what, why (case.answer(where=…, what=…, why=…) does the "
                "same).")

    def _ipython_display_(self) -> None:
        from IPython.display import display

        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        display({"text/plain": str(self), "application/vnd.jupyter.widget-view+json": view}, raw=True)
