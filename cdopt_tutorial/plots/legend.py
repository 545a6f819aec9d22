"""A legend that fits its figure, whatever the names in it."""

from collections.abc import Callable
from textwrap import fill

from matplotlib.legend import Legend

_MOST_COLUMNS = 4
_LINE = 40
"""Letters of a name above which it goes on in a next line: they fit a small figure."""


def wrapped(name: str) -> str:
    """Return a name in lines that fit the smaller figure."""
    return fill(name, _LINE)


def legend_in(room: float, make: Callable[[int], Legend]) -> float:
    """Make a legend of as many columns as fit.

    Args:
        room: width that there is, in pixels of the figure.
        make: makes the legend with so many columns.

    Returns:
        Its height in inches.
    """
    for ncols in range(_MOST_COLUMNS, 0, -1):
        legend = make(ncols)
        box = legend.get_window_extent()
        if box.width <= room or ncols == 1:
            break
        legend.remove()
    return box.height / legend.get_figure(root=True).dpi
