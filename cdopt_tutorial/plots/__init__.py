"""The figures of the book. Each function returns a figure; `show.figure` shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cdopt_tutorial.plots.diagram import Message, process_diagram
from cdopt_tutorial.plots.landscape import Panel, landscape
from cdopt_tutorial.plots.legend import legend_in, wrapped
from cdopt_tutorial.plots.pictures import pictures
from cdopt_tutorial.plots.style import (
    INK,
    SERIES,
    Look,
    is_role,
    look,
    new_figure,
    styled,
)
from cdopt_tutorial.plots.timeline import Call, timeline

__all__ = [
    "Call",
    "Message",
    "Panel",
    "bars",
    "landscape",
    "learning_curves",
    "pictures",
    "process_diagram",
    "timeline",
]

_GRID_POINTS = 200
_MOST_TICKS = 8
_LEGEND_ROW = 0.3  # inches of a legend of one row, for which the sizes have room

# The colours are too few for more curves: a second round is told by these.
_SECOND_LINES = ((0, (8, 1.5, 1.2, 1.5, 1.2, 1.5)), (0, (2.5, 1)))
_SECOND_MARKERS = "v*<>pd"


@styled
def learning_curves(
    curves: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]],
    *,
    xlabel: str,
    ylabel: str,
    threshold: float | None = None,
    log_x: bool = False,
    log_y: bool = False,
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
        log_y: draw y on a logarithmic scale; all y must be above zero.
        size: `wide` or `small`; a legend of more than one row makes it higher.

    Raises:
        ValueError: a curve has no seeds, x and y of one differ in length, or a y
            or the threshold is one that a logarithmic scale can't show.
    """
    if log_y and threshold is not None and threshold <= 0:
        raise ValueError(
            f"threshold is {threshold:g}, which a logarithmic scale can't show"
        )
    fig = new_figure(size)
    ax = fig.add_subplot(xlabel=xlabel, ylabel=ylabel)
    for style, (name, seeds) in zip(_looks(list(curves)), curves.items(), strict=True):
        x, y = _on_one_grid(name, seeds, log_x, log_y)
        color = style.color
        ax.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.22, lw=0)
        (line,) = ax.plot(x, np.median(y, 0), color=color, ls=style.linestyle)
        ends = [(xs[-1], ys[-1]) for xs, ys in seeds]
        ax.plot(*zip(*ends, strict=True), style.marker, color=color, ms=5, mew=0)
        line.set(label=wrapped(name), marker=style.marker, markevery=[], markersize=5)
    if threshold is not None:
        _mark(ax, threshold)
    if log_x:
        ax.set_xscale("log")
    if log_y:
        ax.set_yscale("log")
    _tick_the_data(ax, curves)
    _add_legend(fig, ax)
    return fig


def _tick_the_data(ax: Axes, curves: Mapping) -> None:
    """Where few x were measured, as epochs or widths, put the ticks on these."""
    measured = sorted(
        {float(x) for seeds in curves.values() for xs, _ in seeds for x in xs}
    )
    if len(measured) <= _MOST_TICKS:
        ax.set_xticks(measured, [f"{x:g}" for x in measured])
        ax.set_xticks([], minor=True)


def _mark(ax: Axes, threshold: float) -> None:
    """Mark a level, and write what it is at its right end."""
    ax.axhline(threshold, color=INK, lw=1, ls=(0, (2, 2)))
    ax.annotate(
        f"{threshold:g}", (1, threshold), xycoords=("axes fraction", "data"),
        ha="right", va="bottom", size=9, xytext=(0, 2), textcoords="offset points",
    )  # fmt: skip


def _add_legend(fig: Figure, ax: Axes) -> None:
    """Put the legend above the axes, and make the figure higher for its rows."""
    fig.draw_without_rendering()  # the layout decides how wide the axes are
    height = legend_in(
        ax.get_window_extent().width,
        lambda ncols: ax.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=ncols, handlelength=3
        ),
    )
    fig.set_figheight(fig.get_figheight() + max(0.0, height - _LEGEND_ROW))


def _looks(names: Sequence[str]) -> list[Look]:
    """Return a look for each name: a role's own, else the next of the series."""
    if all(is_role(name) for name in names):
        return [look(name) for name in names]
    return [_series(k) for k in range(len(names))]


def _series(k: int) -> Look:
    """Return the look of curve k, which repeats a colour but not a whole look."""
    turn, place = divmod(k, len(SERIES))
    if turn == 0:
        return SERIES[place]
    line = _SECOND_LINES[place % len(_SECOND_LINES)]
    return replace(SERIES[place], linestyle=line, marker=_SECOND_MARKERS[place])


def _on_one_grid(
    name: str, seeds, log_x: bool, log_y: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return a common x, and y of shape (seeds, len(x)) on it."""
    if not seeds:
        raise ValueError(f"the curve {name!r} has no seeds")
    if any(len(x) != len(y) or len(x) == 0 for x, y in seeds):
        raise ValueError(f"the curve {name!r} has an x and a y of different lengths")
    least = min(np.asarray(y).min() for _, y in seeds)
    if log_y and least <= 0:
        raise ValueError(
            f"the curve {name!r} has {least:g}, which a logarithmic scale can't show"
        )
    low = max(x[0] for x, _ in seeds)
    high = max(x[-1] for x, _ in seeds)
    space = np.geomspace if log_x else np.linspace
    grid = space(low, high, _GRID_POINTS)
    if log_y:
        logs = [np.interp(grid, x, np.log(y)) for x, y in seeds]
        return grid, np.exp(np.stack(logs))
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
