"""The figures of the book. Each function returns a figure; `show.figure` shows it."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from cdopt_tutorial.publish.diagram import Message, process_diagram
from cdopt_tutorial.publish.style import (
    INK,
    SERIES,
    Look,
    is_role,
    look,
    new_figure,
    styled,
)
from cdopt_tutorial.publish.timeline import Call, timeline

__all__ = [
    "Call",
    "Message",
    "bars",
    "learning_curves",
    "process_diagram",
    "timeline",
]

_GRID_POINTS = 200


@styled
def learning_curves(
    curves: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]],
    *,
    xlabel: str,
    ylabel: str,
    threshold: float | None = None,
    log_x: bool = False,
    size: str = "wide",
) -> Figure:
    """Draw the median over the seeds of each curve, in a band from worst to best.

    Called by the chapters. The seeds of a curve may stop at different x: a run
    that has stopped keeps its last value, and a marker shows where it stopped.

    Args:
        curves: for each name, a pair (x, y) per seed, x rising.
        xlabel: what x is, with its unit.
        ylabel: what y is, with its unit.
        threshold: a level to mark, such as "solved".
        log_x: draw x on a logarithmic scale; all x must be above zero.
        size: `wide` or `small`.

    Raises:
        ValueError: a curve has no seeds, or x and y of one differ in length.
    """
    fig = new_figure(size)
    ax = fig.add_subplot(xlabel=xlabel, ylabel=ylabel)
    for style, (name, seeds) in zip(_looks(list(curves)), curves.items(), strict=True):
        x, y = _on_one_grid(name, seeds, log_x)
        color = style.color
        ax.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.22, lw=0)
        (line,) = ax.plot(x, np.median(y, 0), color=color, ls=style.linestyle)
        ends = [(xs[-1], ys[-1]) for xs, ys in seeds]
        ax.plot(*zip(*ends, strict=True), style.marker, color=color, ms=5, mew=0)
        line.set(label=name, marker=style.marker, markevery=[], markersize=5)
    if threshold is not None:
        ax.axhline(threshold, color=INK, lw=1, ls=(0, (2, 2)))
        ax.annotate(
            f"{threshold:g}", (1, threshold), xycoords=("axes fraction", "data"),
            ha="right", va="bottom", size=9, xytext=(0, 2), textcoords="offset points",
        )  # fmt: skip
    if log_x:
        ax.set_xscale("log")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, handlelength=3)
    return fig


def _looks(names: Sequence[str]) -> list[Look]:
    """Return a look for each name: a role's own, else the next of the series."""
    if all(is_role(name) for name in names):
        return [look(name) for name in names]
    return [SERIES[k % len(SERIES)] for k in range(len(names))]


def _on_one_grid(name: str, seeds, log_x: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return a common x, and y of shape (seeds, len(x)) on it."""
    if not seeds:
        raise ValueError(f"the curve {name!r} has no seeds")
    if any(len(x) != len(y) or len(x) == 0 for x, y in seeds):
        raise ValueError(f"the curve {name!r} has an x and a y of different lengths")
    low = max(x[0] for x, _ in seeds)
    high = max(x[-1] for x, _ in seeds)
    space = np.geomspace if log_x else np.linspace
    grid = space(low, high, _GRID_POINTS)
    return grid, np.stack([np.interp(grid, x, y) for x, y in seeds])


@styled
def bars(
    rows: Sequence[Mapping],
    *,
    xlabel: str,
    log: bool = False,
    size: str = "wide",
) -> Figure:
    """Draw a bar per row, the first one on top, its value written beside it.

    Called by the chapters with the rows of a bench: `name`, `value`, and where
    there is one a `ratio`, which is written behind the value.

    Args:
        rows: what to draw.
        xlabel: what the value is, with its unit.
        log: draw the values on a logarithmic scale; all must be above zero.
        size: `wide` or `small`.

    Raises:
        ValueError: no rows, or a value that a logarithmic scale can't show.
    """
    if not rows:
        raise ValueError("no rows to draw")
    values = [row["value"] for row in rows]
    if log and min(values) <= 0:
        raise ValueError(f"a logarithmic scale can't show {min(values)}")
    fig = new_figure(size, 0.8 + 0.36 * len(rows))
    ax = fig.add_subplot(xlabel=xlabel)
    names = [row["name"] for row in rows]
    for style, (y, value) in zip(_looks(names), enumerate(values), strict=True):
        bar = ax.barh(y, value, height=0.62, color=style.color, alpha=0.85, lw=0)
        ax.bar_label(bar, [_label(rows[y])], padding=4, size=9)
    ax.set_yticks(range(len(rows)), names)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.invert_yaxis()
    if log:
        ax.set_xscale("log")
        ax.set_xlim(10 ** np.floor(np.log10(min(values)) - 0.2), max(values) * 6)
    else:
        ax.set_xlim(0, max(values) * 1.25)
        ax.xaxis.set_major_formatter("{x:,.6g}")
    return fig


def _label(row: Mapping) -> str:
    """Return what is written beside a bar: three digits of value, and the ratio."""
    value = row["value"]
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{text}  (×{row['ratio']:.3g})" if "ratio" in row else text
