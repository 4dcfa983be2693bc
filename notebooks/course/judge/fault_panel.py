"""The panel of a notebook: tick faults, choose the number of ranks, edit the prompt, run the diff again."""

from collections.abc import Sequence
from html import escape

from course.judge.answers import default_prompt
from tplab.align import align, align_decode, diagnose
from tplab.checkpoint import open_checkpoint
from tplab.checks import counted
from tplab.errors import TplabError
from tplab.faults import fault
from tplab.show.figures.diffs import diff_figure, finding
from tplab.show.figures.style import image_html, show_with_words
from tplab.show.phrases import describe_report


class Panel:
    """Checkboxes for the faults, a choice of ranks, the prompt, and the diff against Hugging Face beside, along the
    decode path if one of the faults shows only there. ``ticked``: those that are on at the start.

    Shows the widgets in a notebook, and its last figure where no kernel runs: one output holds both.
    """

    def __init__(self, faults: Sequence, *, model="fable", ticked: Sequence[str] = (), tensor_parallel_size: int = 2,
                 prompt: str = "", dtype: str = "float32"):
        import ipywidgets as widgets

        self._faults = [fault(named) if isinstance(named, str) else named for named in faults]
        names, self._model, self._dtype, self._previous = [fault.name for fault in self._faults], model, dtype, {}
        if strange := [name for name in ticked if name not in names]:
            raise TplabError(f"{strange[0]!r} cannot be ticked: the panel has {', '.join(names)}")
        # The name that the legend uses; the title below it, where it may take several lines.
        self._boxes = [widgets.Checkbox(value=fault.name in ticked, description=fault.name, tooltip=fault.title,
                                        indent=False, layout=widgets.Layout(width="auto")) for fault in self._faults]
        lines = [line for box, fault in zip(self._boxes, self._faults) for line in (box, widgets.HTML(
            f'<div style="line-height: 1.3; padding: 0 0 6px 20px">{escape(fault.title)}</div>'))]
        self._tp = widgets.ToggleButtons(options=sorted({1, 2, 3, 4, tensor_parallel_size}),
                                         value=tensor_parallel_size, style={"button_width": "3em"})
        self._prompt = widgets.Textarea(value=prompt or default_prompt(model),
                                        layout=widgets.Layout(width="auto", height="7em"))
        self._button = widgets.Button(description="Run", button_style="primary", icon="play")
        self._button.on_click(lambda _: self.run())
        self._verdict = widgets.HTML()
        self._image = widgets.HTML()
        titles = [widgets.HTML(f"<b>{text}</b>") for text in ("Faults", "Ranks", "Prompt")]
        again = widgets.HTML("<small>After the kernel was restarted, run this cell again.</small>")
        left = widgets.VBox([titles[0], *lines, titles[1], self._tp, titles[2], self._prompt, self._button, again],
                            layout=widgets.Layout(width="300px", flex="0 0 auto", padding="0 12px 0 0"))
        right = widgets.VBox([self._image, self._verdict], layout=widgets.Layout(flex="1 1 420px", min_width="0"))
        self.widget = widgets.Box([left, right], layout=widgets.Layout(display="flex", flex_flow="row wrap"))
        self._redraw()

    @property
    def ticked(self) -> list:
        return [fault for fault, box in zip(self._faults, self._boxes) if box.value]

    def run(self) -> None:
        """What the button does: align again with what is ticked, and redraw."""
        self._button.description = "Running …"  # and not disabled, which would throw the keyboard's focus away
        try:
            self._redraw()
        except Exception as error:
            # A front end shows no traceback of a button, so every error is shown where the verdict would stand.
            what = escape(f"{type(error).__name__}: {error}")
            self._image.value = ""  # the picture of the run before would stand above the error as if it were its own
            self._verdict.value = f'<pre style="white-space: pre-wrap">{what}</pre>'
            if not isinstance(error, TplabError):
                raise
        finally:
            self._button.description = "Run"

    def _redraw(self) -> None:
        decodes = any(fault.shows_in == "decode" for fault in self._faults)
        config, ranks, options = open_checkpoint(self._model).config, self._tp.value, {}
        idle = [f"{bug.title}: {why}" for bug in self.ticked if (why := bug.why_not(config, ranks))]
        for bug in self.ticked:
            options |= {} if bug.why_not(config, ranks) else bug.options
        self.report = (align_decode if decodes else align)(
            self._model, self._prompt.value, tensor_parallel_size=ranks, dtype=self._dtype, patches=self.ticked,
            **options)
        now = {self._label(): self.report}
        self.figure, self._previous = diff_figure(self._previous | now, title=finding(now)), now
        self.alt_text = self.figure.alt_text.replace("Figure:", "Figure: the panel when this cell ran.", 1)
        self._image.value = image_html(self.figure.png(), self.figure.alt_text)
        if self.ticked and self.report.ok and not idle:
            idle = ["With this prompt nothing is computed otherwise."]
        sentences = [diagnosis.sentence for diagnosis in self.report.diagnoses] or [diagnose(self.report).sentence]
        lines = [f"<b>{escape(describe_report(self.report))}</b>", *map(escape, [*sentences, *idle])]
        self._verdict.value = "<br>".join(lines)

    def _label(self) -> str:
        what = " + ".join(fault.name for fault in self.ticked) or "nothing ticked"
        return f"{what}, {counted(self._tp.value, 'rank')}"

    def __str__(self) -> str:
        choices = ", ".join(fault.title for fault in self._faults)
        return f"Panel: {choices}; ranks {', '.join(map(str, self._tp.options))}. Shown: {self._label()}."

    def _ipython_display_(self):
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        show_with_words(self, {"text/plain": str(self), "image/png": self.figure.png(),
                               "application/vnd.jupyter.widget-view+json": view})


panel = Panel
