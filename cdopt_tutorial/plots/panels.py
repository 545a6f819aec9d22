"""Curves of the same methods in several settings, side by side."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cdopt_tutorial.plots.style import WIDTH, Look, add_legend, looks, styled

_DECADES = 3  # that a panel's values may span on a linear axis


@styled
def panels(
    settings: Mapping[str, Mapping[str, Sequence[float]]], *, xlabel: str, ylabel: str
) -> Figure:
    """Draw a panel for each setting, and in it a curve for each method.

    A curve has a y for each x from 1, such as each epoch, and ends before the first y
    that is not finite, or leaves a panel in which it grows by more than some decades,
    where the axis is logarithmic. A method looks the same in all panels. A curve that
    begins with a y that is not finite, or too many methods, is a ValueError.
    """
    methods = dict.fromkeys(name for curves in settings.values() for name in curves)
    look_of = dict(zip(methods, looks(list(methods)), strict=True))
    fig = Figure(figsize=(WIDTH, 3.2))
    axes = fig.subplots(1, len(settings), squeeze=False)[0]
    lines = {}
    for ax, (title, curves) in zip(axes, settings.items(), strict=True):
        ax.set(title=title, xlabel=xlabel)
        for name, y in curves.items():
            lines.setdefault(name, _draw(ax, y, look_of[name], name))
        _scale(ax)
    axes[0].set_ylabel(ylabel)
    add_legend(fig, [lines[name] for name in methods], handlelength=3)
    return fig


def _draw(ax: Axes, y: Sequence[float], look: Look, name: str) -> Line2D:
    """Draw one curve as far as it is finite; return its line."""
    ends = next((i for i, value in enumerate(y) if not math.isfinite(value)), len(y))
    if not ends:
        raise ValueError(f"{name!r} has no finite y to begin with")
    style = {"color": look.color, "ls": look.linestyle, "marker": look.marker}
    line = ax.plot(range(1, ends + 1), y[:ends], **style, ms=5, mew=0, label=name)[0]
    if ends < len(y):
        place = {"xytext": (-8, 0), "textcoords": "offset points", "size": 9}
        place |= {"ha": "right", "va": "center"}
        ax.annotate("then not finite", (ends, y[ends - 1]), **place)
    return line


def _scale(ax: Axes) -> None:
    values = [value for line in ax.lines for value in line.get_ydata()]
    if min(values) > 0 and max(values) > 10**_DECADES * min(values):
        ax.set_yscale("log")
        # One curve that diverges would flatten all others.
        first = max(line.get_ydata()[0] for line in ax.lines)
        ax.set_ylim(top=min(max(values), 10**_DECADES * first))
    elif min(values) >= 0:
        ax.set_ylim(bottom=0)
