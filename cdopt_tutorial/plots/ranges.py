"""What was measured at a few places: medians and ranges, side by side."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from cdopt_tutorial.plots.style import WIDTH, add_legend, looks, styled

_APART = 0.015  # of the axis, between two curves at one x


@styled
def ranges(
    curves: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]],
    *,
    xlabel: str,
    ylabel: str,
) -> Figure:
    """Draw medians on logarithmic axes, each with a bar from the least to the most.

    A curve has a pair (x, y) per repeat, and all have the same few x. At each x the
    curves stand side by side, where bands of equal curves would hide each other.
    """
    fig = Figure(figsize=(WIDTH, 3.5))
    scales = {"xscale": "log", "yscale": "log"}
    ax = fig.add_subplot(xlabel=xlabel, ylabel=ylabel, **scales)
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
    ax.set_xticks(x, [f"{each:g}" for each in x])
    ax.set_xticks([], minor=True)
    add_legend(fig, bars, handlelength=3)
    return fig
