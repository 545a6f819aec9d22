"""Curves over seeds or repeats."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cdopt_tutorial.plots.style import INK, WIDTH, add_legend, looks, styled

_SIZE = WIDTH, 3.5  # inches
_APART = 0.015  # of the axis, between two ranges at the same x
_Seed = tuple[Sequence[float], Sequence[float]]


@styled
def learning_curves(
    curves: Mapping[str, Sequence[_Seed]], *, threshold: float | None = None, **axes
) -> Figure:
    """Draw the median over the seeds of each curve, in a band from worst to best.

    A method of ``style.METHODS`` looks the same in every figure. A curve has a pair
    (x, y) per seed, with x rising; a run that stops early keeps its last value, and a
    marker shows where. `axes` are matplotlib's: xlabel, ylabel, xscale, yscale, ylim.
    """
    ax, lines = Figure(figsize=_SIZE).add_subplot(**axes), []
    for name, look in looks(curves).items():
        seeds = curves[name]
        x = np.unique(np.concatenate([xs for xs, _ in seeds]))
        x = x[x >= max(xs[0] for xs, _ in seeds)]
        y = np.array([np.interp(x, *seed) for seed in seeds])
        ax.fill_between(x, y.min(0), y.max(0), color=look.color, alpha=0.22, lw=0)
        line = {**vars(look), "markevery": [], "ms": 5, "label": name}
        lines += ax.plot(x, np.median(y, 0), **line)
        ends = [(xs[-1], ys[-1]) for xs, ys in seeds]
        ax.plot(*zip(*ends, strict=True), look.marker, color=look.color, ms=5, mew=0)
    if threshold is not None:
        _mark(ax, threshold)
    _tick_the_data(ax, curves)
    add_legend(ax.figure, lines, handlelength=3)
    return ax.figure


@styled
def ranges(curves: Mapping[str, Sequence[_Seed]], **axes) -> Figure:
    """Draw medians on logarithmic axes, each with a bar from least to most.

    A curve has a pair (x, y) per repeat, all with the same few x. At each x the curves
    stand side by side, since bands of equal curves would hide each other.
    """
    ax, bars = Figure(figsize=_SIZE).add_subplot(xscale="log", yscale="log", **axes), []
    for place, (name, look) in enumerate(looks(curves).items()):
        x, _ = curves[name][0]
        share = _APART * (place - (len(curves) - 1) / 2)
        aside, y = np.array(x) * (x[-1] / x[0]) ** share, [y for _, y in curves[name]]
        least, median, most = np.quantile(y, (0, 0.5, 1), axis=0)
        bar = {"yerr": (median - least, most - median), "elinewidth": 1.8}
        line = {**vars(look), "lw": 1.2, "ms": 5, "mew": 0}
        bars.append(ax.errorbar(aside, median, **bar, **line, label=name))
    _tick_the_data(ax, curves)
    add_legend(ax.figure, bars, handlelength=3)
    return ax.figure


def _mark(ax: Axes, threshold: float) -> None:
    ax.axhline(threshold, color=INK, lw=1, ls=(0, (2, 2)))
    ax.annotate(
        f"{threshold:g}", (1, threshold), xycoords=("axes fraction", "data"),
        xytext=(0, 2), textcoords="offset points", ha="right", va="bottom", size=9,
    )  # fmt: skip


def _tick_the_data(ax: Axes, curves: Mapping[str, Sequence[_Seed]]) -> None:
    """Where few x were measured, such as epochs or widths, put the ticks there."""
    measured = sorted({float(x) for c in curves.values() for xs, _ in c for x in xs})
    if len(measured) <= 8:
        ax.set_xticks(measured, [f"{x:g}" for x in measured])
        ax.set_xticks([], minor=True)
