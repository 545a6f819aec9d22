"""Which part of each weight lies on which rank."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cdopt_tutorial.plots.style import INK, SERIES, WIDTH, styled

_ROW = 1.05  # inches of a row of the figure
_GAP = 0.22  # between two weights, as a fraction of the longest side


@styled
def ownership(ways: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw, for each way and each rank, the weights with the part that lies there.

    A part has the ``shape`` of the whole weight, a ``begin`` and a ``size``, by rows
    and columns; it is filled in the colour of its rank, of which there may be six.
    """
    ranks = max(map(len, ways.values()))
    fig = Figure(figsize=(WIDTH, _ROW * len(ways) + 0.3))
    axes = fig.subplots(len(ways), ranks, squeeze=False)
    for row, (strategy, of_ranks) in zip(axes, ways.items(), strict=True):
        longest = max(max(p.shape) for parts in of_ranks for p in parts.values())
        for rank, (ax, parts) in enumerate(zip(row, of_ranks, strict=True)):
            _draw(ax, parts, longest, rank)
        row[0].set_ylabel(strategy, rotation=0, ha="right", va="center")
    for rank, ax in enumerate(axes[0]):
        ax.set_title(f"rank {rank}")
    return fig


def _draw(ax: Axes, parts: Mapping[str, Any], longest: int, rank: int) -> None:
    """One rank's weights, side by side."""
    left = 0.0
    for name, part in parts.items():
        rows, columns = (side / longest for side in part.shape)
        corner = left, -rows / 2
        ax.add_patch(Rectangle(corner, columns, rows, fill=False, ec=INK, lw=0.8))
        height, width = (side / longest for side in part.size)
        down, right = (side / longest for side in part.begin)
        corner = left + right, rows / 2 - down - height
        ax.add_patch(Rectangle(corner, width, height, fc=SERIES[rank].color, lw=0))
        ax.text(left + columns / 2, -0.56, name, ha="center", va="top", size=9)
        left += columns + _GAP
    ax.set(xlim=(-0.05, left - _GAP + 0.05), ylim=(-0.8, 0.55), aspect="equal")
    ax.set(xticks=[], yticks=[], anchor="W")
    ax.spines[:].set_visible(False)
