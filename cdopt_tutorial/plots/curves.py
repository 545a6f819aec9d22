"""What seeds, repeats or settings gave: curves, in one panel or several, and values."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cdopt_tutorial.plots.style import INK, WIDTH, Look, add_legend, looks, styled

_GRID_POINTS = 200
_APART = 0.015  # of the axis, between two ranges at one x
_DECADES = 3  # that a panel's values may span on a linear axis
_Seed = tuple[Sequence[float], Sequence[float]]


@styled
def learning_curves(
    curves: Mapping[str, Sequence[_Seed]],
    *,
    xlabel: str,
    ylabel: str,
    threshold: float | None = None,
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """Draw the median over the seeds of each curve, in a band from worst to best.

    A method of ``style.METHODS`` looks the same in every figure. A curve has a pair
    (x, y) per seed, x rising. A run that stops before others keeps its last value; a
    marker shows where. A line marks `threshold`.
    """
    xscale, yscale = ("log" if log else "linear" for log in (log_x, log_y))
    ax = _axes(xlabel=xlabel, ylabel=ylabel, xscale=xscale, yscale=yscale)
    lines = []
    for (name, seeds), style in zip(curves.items(), looks(list(curves)), strict=True):
        color, marker = style.color, style.marker
        x, y = _on_one_grid(seeds, log_x, log_y)
        ax.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.22, lw=0)
        lines += ax.plot(x, np.median(y, 0), color=color, ls=style.linestyle)
        lines[-1].set(label=name, marker=marker, markevery=[], markersize=5)
        ends = [(xs[-1], ys[-1]) for xs, ys in seeds]
        ax.plot(*zip(*ends, strict=True), marker, color=color, ms=5, mew=0)
    if threshold is not None:
        _mark(ax, threshold)
    _tick_the_data(ax, curves)
    add_legend(ax.figure, lines, handlelength=3)
    return ax.figure


@styled
def ranges(
    curves: Mapping[str, Sequence[_Seed]], *, xlabel: str, ylabel: str
) -> Figure:
    """Draw medians on logarithmic axes, each with a bar from the least to the most.

    A curve has a pair (x, y) per repeat, and all have the same few x. At each x the
    curves stand side by side, where bands of equal curves would hide each other.
    """
    ax = _axes(xlabel=xlabel, ylabel=ylabel, xscale="log", yscale="log")
    bars, styles = [], looks(list(curves))
    for place, (name, repeats) in enumerate(curves.items()):
        style, (x, _) = styles[place], repeats[0]
        share = _APART * (place - (len(curves) - 1) / 2)
        aside = np.array(x) * (x[-1] / x[0]) ** share
        least, median, most = np.quantile([y for _, y in repeats], (0, 0.5, 1), axis=0)
        bars.append(ax.errorbar(aside, median, (median - least, most - median)))
        line, _, (bar,) = bars[-1]
        bars[-1].set_label(name)
        line.set(color=style.color, ls=style.linestyle, lw=1.2)
        line.set(marker=style.marker, ms=5, mew=0)
        bar.set(color=style.color, lw=1.8)
    _tick_the_data(ax, curves)
    add_legend(ax.figure, bars, handlelength=3)
    return ax.figure


@styled
def kinds(
    values: Mapping[str, Sequence[float]], *, ylabel: str, threshold: float
) -> Figure:
    """Draw a marker for each seed's value, by kind, and a dash for their median.

    A line marks `threshold`.
    """
    ax = _axes(ylabel=ylabel)
    each = zip(values.values(), looks(list(values)), strict=True)
    for place, (found, style) in enumerate(each):
        color, marker = style.color, style.marker
        ax.plot([place] * len(found), found, marker, color=color, ms=6, mew=0)
        ax.hlines(np.median(found), place - 0.25, place + 0.25, color=color, lw=1.8)
    ax.set_xticks(range(len(values)), [name.replace(" ", "\n") for name in values])
    _mark(ax, threshold)
    return ax.figure


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
            lines.setdefault(name, _draw_finite(ax, y, look_of[name], name))
        _scale(ax)
    axes[0].set_ylabel(ylabel)
    add_legend(fig, [lines[name] for name in methods], handlelength=3)
    return fig


def _axes(**labels: str) -> Axes:
    return Figure(figsize=(WIDTH, 3.5)).add_subplot(**labels)


def _mark(ax: Axes, threshold: float) -> None:
    ax.axhline(threshold, color=INK, lw=1, ls=(0, (2, 2)))
    right = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
    above = {"xytext": (0, 2), "textcoords": "offset points", "size": 9}
    ax.annotate(f"{threshold:g}", (1, threshold), **right, **above)


def _on_one_grid(
    seeds: Sequence[_Seed], log_x: bool, log_y: bool
) -> tuple[np.ndarray, np.ndarray]:
    """A common x, and y of shape (seeds, len(x)) on it."""
    low, high = max(x[0] for x, _ in seeds), max(x[-1] for x, _ in seeds)
    # Between its points a curve is straight on the axes that are seen.
    seen_x, seen_y = (np.log if log else np.asarray for log in (log_x, log_y))
    grid = (np.geomspace if log_x else np.linspace)(low, high, _GRID_POINTS)
    lines = [np.interp(seen_x(grid), seen_x(x), seen_y(y)) for x, y in seeds]
    return grid, np.exp(lines) if log_y else np.array(lines)


def _tick_the_data(ax: Axes, curves: Mapping[str, Sequence[_Seed]]) -> None:
    """Where few x were measured, as epochs or widths, put the ticks on these."""
    measured = sorted({float(x) for c in curves.values() for xs, _ in c for x in xs})
    if len(measured) <= 8:
        ax.set_xticks(measured, [f"{x:g}" for x in measured])
        ax.set_xticks([], minor=True)


def _draw_finite(ax: Axes, y: Sequence[float], look: Look, name: str) -> Line2D:
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
