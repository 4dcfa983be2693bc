"""Tables for notebooks whose stored text is the same on every machine."""

from tplab.show.phrases import ShowError, describe_point


class Table:
    """A pandas ``frame`` that shows itself with fixed ids, and with its text beside it.

    A plain ``Styler`` carries random ids and a memory address, which a stored notebook cannot keep.
    """

    def __init__(self, frame, bad=None):
        """``bad``: a boolean frame of the same shape; True is shown bold, on a tint, with a mark before it."""
        self.frame, self._bad = frame, bad

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/plain": str(self), "text/html": self._styler().to_html()}

    def __str__(self) -> str:
        return self._marked().to_string()

    def _marked(self):
        if self._bad is None:
            return self.frame
        return self.frame.astype(str).mask(self._bad, "✗ " + self.frame.astype(str))

    def _styler(self):
        from pandas.io.formats.style import Styler

        styler = Styler(self._marked(), uuid="tplab", cell_ids=False)
        styler.set_table_styles([{"selector": "td, th", "props": "text-align: left; padding: .2em .9em .2em 0"}])
        if self._bad is not None:
            styles = self._bad.map(lambda bad: "font-weight: bold; background: #fbe3d6; color: #222" if bad else "")
            styler.apply(lambda _: styles, axis=None)
        return styler


def table(rows, index: str | None = None) -> Table:
    """Any list of dictionaries (one per row) as a :class:`Table`; ``index`` names the column that leads each row.

        >>> show.table(plan.rows(), index="rank")
    """
    import pandas as pd

    frame = pd.DataFrame(rows)
    return Table(frame.set_index(index) if index else frame)


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
        raise ShowError(f"{report.model} has no layer {layer!r}")
    frame = pd.DataFrame([{"point": p.name, "held by": HELD[p.layout], "shape": "×".join(map(str, p.shape)),
                           "difference from HF": describe_point(p), "NaN": f"{100 * p.nan / p.size:.0f} %"}
                          for p in points]).set_index("point")
    bad = pd.DataFrame(False, frame.index, frame.columns)
    bad["difference from HF"] = [not p.inside for p in points]
    return Table(frame, bad)


HELD = {"replicated": "every rank", "q_heads": "ranks, by query head", "kv_heads": "ranks, by KV head",
        "mlp": "ranks, by column", "vocab": "ranks, by token", "partial": "ranks, as summands"}


def rank_shapes(report) -> Table:
    """Per rank: the shapes of layer 0's q, k and v weights, ``[out_features, in_features]``, and what it read.

        >>> show.rank_shapes(report)
    """
    import pandas as pd

    frame = pd.DataFrame([{f"{name}_proj": f"[{shape[0]}, {shape[1]}]" for name, shape in shapes.items()}
                          for shapes in report.shapes])
    if report.load_stats:  # a diff along the decode path has none
        frame["read from the checkpoint"] = [f"{stats.bytes_read / 1e6:.2f} MB" for stats in report.load_stats]
    return Table(frame.set_index(pd.Index([f"rank {r}" for r in range(len(frame))])))


def top_tokens(report, tokenizer, k: int = 5) -> Table:
    """The k likeliest next tokens after the last prompt with their probabilities, Hugging Face and tplab side by side.

    A model whose logits hold NaN has no likeliest token; the table says so.

        >>> show.top_tokens(report, open_checkpoint(model).tokenizer())
    """
    import pandas as pd
    import torch

    def column(logits):
        if torch.isnan(logits[-1]).any():
            return ["NaN"] * k
        best = torch.softmax(logits[-1].double(), -1).topk(k)
        return [f"{tokenizer.decode([token])!r} {100 * p:.0f} %"
                for p, token in zip(best.values.tolist(), best.indices)]

    theirs, ours = column(report.hf_logits), column(report.tp_logits)
    frame = pd.DataFrame({"Hugging Face": theirs, "tplab": ours}, index=pd.RangeIndex(1, k + 1, name="place"))
    bad = pd.DataFrame({"Hugging Face": False, "tplab": [a != b for a, b in zip(theirs, ours)]}, index=frame.index)
    return Table(frame, bad)
