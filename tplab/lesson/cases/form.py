"""The form of a case: where, what, why, and a button."""

from collections.abc import Sequence
from contextlib import redirect_stdout
from html import escape
from io import StringIO

from tplab.faults.cases import NOWHERE, CaseFile
from tplab.lesson.cases.answering import kinds


class Form:
    """Widgets with the same effect as ``case.answer(where=…, what=…, why=…)``; where no kernel runs, a line of text."""

    def __init__(self, case, file: CaseFile, known: Sequence[str]):
        import ipywidgets as widgets

        wide = widgets.Layout(width="auto")
        self._case = case
        self.where = widgets.SelectMultiple(options=[NOWHERE, *known], rows=8, layout=wide,
                                            tooltip="one function, or several with Ctrl")
        self.what = widgets.SelectMultiple(options=kinds(), rows=6, layout=wide, tooltip="one kind, or several")
        self.why = widgets.RadioButtons(options=sorted(file.why), value=None, layout=wide)
        button = widgets.Button(description="Answer", button_style="primary")
        button.on_click(lambda _: self.answer())
        self.verdict = widgets.HTML()
        titles = [widgets.HTML(f"<b>{escape(text)}</b>") for text in ("Where", "What", "Why")]
        self.widget = widgets.VBox([titles[0], self.where, titles[1], self.what, titles[2], self.why, button,
                                    self.verdict])

    def answer(self) -> None:
        """What the button does."""
        said = StringIO()
        with redirect_stdout(said):
            self._case.answer(list(self.where.value), list(self.what.value), self.why.value or "")
        self.verdict.value = f'<pre style="white-space: pre-wrap">{escape(said.getvalue())}</pre>'

    def __str__(self) -> str:
        return (f"Form of case {self._case.number}: where, what, why (case.answer(where=…, what=…, why=…) does the "
                "same).")

    def _ipython_display_(self) -> None:
        from IPython.display import display

        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        display({"text/plain": str(self), "application/vnd.jupyter.widget-view+json": view}, raw=True)
