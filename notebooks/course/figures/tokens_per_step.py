"""What generating costs: how many tokens the model computes in each step."""

from collections.abc import Iterable, Mapping

from tplab.show.figures.style import Picture, looks, picture, styled
from tplab.show.phrases import ShowError


@styled
def tokens_per_step_figure(histories: Mapping[str, Iterable], title: str | None = None) -> Picture:
    """Tokens computed per step, one line per engine. ``histories``: ``{label: llm.scheduler.history}``.

        >>> figures.tokens_per_step_figure({"with a cache": llm.scheduler.history})
    """
    counts = {label: [sum(record.tokens.values()) for record in history] for label, history in histories.items()}
    if not counts or not all(counts.values()):
        raise ShowError("there is nothing to draw: an engine has computed no step yet")
    figure, ax = picture(9.0, 3.9)
    for label, look in looks(counts).items():
        ax.plot(range(1, len(counts[label]) + 1), counts[label], color=look.color, marker=look.marker, ms=8,
                mec="white", label=label)
    ax.set_ylim(bottom=0)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel="step (the first one reads the prompt)", ylabel="tokens computed")
    ax.grid(axis="y", zorder=0.5)
    details = "; ".join(f"{label}: {steps[0]} in the first step, {steps[-1]} in the last, {sum(steps)} in all"
                     for label, steps in counts.items())
    return figure.finished(title or "Tokens computed in each step", (
        f"tokens that the model computes in each step. {details}."), columns=3)
