"""Curves over seeds or repeats."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from cdopt_tutorial.plots.style import INK, WIDTH, add_legend, looks, styled

_Seed = tuple[Sequence[float], Sequence[float]]


@styled
def learning_curves(
    curves: Mapping[str, Sequence[_Seed]], *, threshold: float | None = None, **axes
) -> Figure:
    """Draw the median over the seeds of each curve, in a band from least to most.

    A method of ``style.METHODS`` looks the same in every figure. A curve has a pair
    (x, y) per seed, with x rising; a run that stops early keeps its last value, and a
    marker shows where. `axes` are matplotlib's: xlabel, ylabel, xscale, yscale, ylim.
    """
    ax, lines = Figure(figsize=(WIDTH, 3.5)).add_subplot(**axes), []
    for name, look in looks(curves).items():
        seeds = curves[name]
        x = np.unique(np.concatenate([xs for xs, _ in seeds]))
        x = x[x >= max(xs[0] for xs, _ in seeds)]
        y = np.array([np.interp(x, *seed) for seed in seeds])
        ax.fill_between(x, y.min(0), y.max(0), color=look.color, alpha=0.22, lw=0)
        middle = np.median(y, 0)
        lines += ax.plot(x, middle, **vars(look), markevery=[], ms=5, label=name)
        ends = [(xs[-1], ys[-1]) for xs, ys in seeds]
        ax.plot(*zip(*ends, strict=True), look.marker, color=look.color, ms=5, mew=0)
    if threshold is not None:
        ax.axhline(threshold, color=INK, lw=1, ls=(0, (2, 2)))
    measured = np.unique(np.concatenate([x for c in curves.values() for x, _ in c]))
    if len(measured) <= 8:  # such as epochs or widths
        ax.set_xticks(measured, [f"{x:g}" for x in measured])
        ax.set_xticks([], minor=True)
    add_legend(ax.figure, lines, handlelength=3)
    return ax.figure
