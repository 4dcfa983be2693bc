"""Tables for notebooks whose stored text is the same on every machine."""

from html import escape

from tplab.errors import TplabError
from tplab.show.phrases import describe_point

_CELL = "text-align: left; padding: .2em .9em .2em 0"


class Table:
    """A pandas ``frame`` that shows itself, as HTML and as text.

    Its styles are in the cells: a notebook that is not trusted loses ``<style>``, and a ``Styler``'s ids are random.
    """

    def __init__(self, frame, bad=None, folded: str = ""):
        """``bad``: a boolean frame of the same shape; True is shown bold, on a tint, with a mark before it.

        ``folded``: a line that hides the table until a click opens it.
        """
        self.frame, self._bad, self.folded = frame, bad, folded

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/plain": str(self), "text/html": self._html()}

    def __str__(self) -> str:
        return self._marked().to_string()

    def _marked(self):
        if self._bad is None:
            return self.frame
        return self.frame.astype(str).mask(self._bad, "✗ " + self.frame.astype(str))

    def _html(self) -> str:
        frame, head = self._marked(), f'<th scope="col" style="{_CELL}">'
        names = [frame.index.name or "", *map(str, frame.columns)]
        titles = "".join(f"{head}{escape(name)}</th>" if name else "<td></td>" for name in names)
        rows = ""
        for at, (label, *values) in enumerate(frame.itertuples(name=None)):
            bad = [False] * len(values) if self._bad is None else self._bad.iloc[at]
            rows += f'<tr><th scope="row" style="{_CELL}">{escape(str(label))}</th>' + "".join(
                f'<td style="{_CELL}{_BAD if wrong else ""}">{escape(_text(value))}</td>'
                for value, wrong in zip(values, bad)) + "</tr>"
        whole = f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>"
        return f"<details><summary>{escape(self.folded)}</summary>{whole}</details>" if self.folded else whole


_BAD = "; font-weight: bold; background: #fbe3d6; color: #222"


def _text(value) -> str:
    """A value as pandas writes it in a table."""
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def table(rows, index: str | None = None, folded: str = "") -> Table:
    """Any list of dictionaries (one per row) as a :class:`Table`.

    ``index``: the column that leads each row. ``folded``: a line that hides the table until a click opens it.

        >>> show.table(plan.rows(), index="rank")
    """
    import pandas as pd

    frame = pd.DataFrame(rows)
    return Table(frame.set_index(index) if index else frame, folded=folded)


def layer_table(report, layer: int | None = None) -> Table:
    """Every point's difference from Hugging Face in orders of magnitude; what is outside the floor is marked.

    ``layer``: a layer's number for its points; without it, the layers' outputs and the two ends of the model.

        >>> show.layer_table(report, layer=0)
    """
    import pandas as pd

    ends = ("embed", "output", "norm", "logits")
    points = [p for p in report.points
              if (p.name.rpartition(".")[2] in ends if layer is None else p.name.startswith(f"layers.{layer}."))]
    if not points:
        raise TplabError(f"{report.model} has no layer {layer!r}")
    frame = pd.DataFrame([{"point": p.name, "held by": HELD[p.layout], "shape": "×".join(map(str, p.shape)),
                           "difference from HF": describe_point(p), "NaN": f"{100 * p.nan / p.size:.0f} %"}
                          for p in points]).set_index("point")
    bad = pd.DataFrame(False, frame.index, frame.columns)
    bad["difference from HF"] = [not p.inside for p in points]
    return Table(frame, bad)


HELD = {"replicated": "every rank", "q_heads": "ranks, by query head", "kv_heads": "ranks, by KV head",
        "mlp": "ranks, by column", "vocab": "ranks, by token", "partial": "ranks, as summands"}


def rank_shapes(report) -> Table:
    """Per rank: the shapes of layer 0's q, k and v weights there, ``[out_features, in_features]``, and what it read.

        >>> show.rank_shapes(report)
    """
    import pandas as pd

    if not report.shapes:
        raise TplabError("the shapes of the weights are read on the ranks by align(…) only")
    frame = pd.DataFrame([{f"{name}_proj": f"[{shape[0]}, {shape[1]}]" for name, shape in shapes.items()}
                          for shapes in report.shapes])
    frame["read from the checkpoint"] = [f"{stats.bytes_read / 1e6:.2f} MB" for stats in report.load_stats]
    return Table(frame.set_index(pd.Index([f"rank {r}" for r in range(len(frame))])))


def top_tokens(report, tokenizer, k: int = 5) -> Table:
    """The k likeliest next tokens after the last prompt with their probabilities, Hugging Face's and the engine's.

    A model whose logits hold NaN has no likeliest token; the table says so.

        >>> show.top_tokens(report, open_checkpoint(model).tokenizer())
    """
    import pandas as pd
    import torch

    def column(logits):
        if torch.isnan(logits[-1]).any():
            return ["NaN"] * k
        best = torch.softmax(logits[-1].double(), -1).topk(k)
        return [f"{tokenizer.decode([token])!r} {100 * p:{'.0f' if p > 0.1 else '.2g'}} %"
                for p, token in zip(best.values.tolist(), best.indices)]

    theirs, ours = column(report.hf_logits), column(report.tp_logits)
    frame = pd.DataFrame({"Hugging Face": theirs, report.engine: ours}, index=pd.RangeIndex(1, k + 1, name="place"))
    other = [a != b for a, b in zip(theirs, ours)]
    bad = pd.DataFrame({"Hugging Face": False, report.engine: other}, index=frame.index)
    return Table(frame, bad)
