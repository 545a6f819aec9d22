"""Chapter 3's plane: functions with paths over them, and a map as arrows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from cdopt_tutorial.plots.style import INK, SERIES, add_legend, styled

_WIDTH = 2.7  # inches of a panel
_LEVELS = 11
_BESIDE, _BELOW, _TITLE = 0.75, 0.45, 0.45  # inches that labels and titles need
_OPEN: dict[str, Any] = {"color": INK, "mfc": "none", "ls": ""}
_TARGET = _OPEN | {"marker": "*", "ms": 15, "mew": 1.2, "label": "constrained minimum"}
_PATH: dict[str, Any] = {"lw": 1.6, "ms": 5, "mew": 0, "markevery": [-1]}
_START = _OPEN | {"marker": "o", "ms": 6, "mew": 1.3}
_ARROW: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1, "zorder": 3}


@styled
def landscape(
    axis: np.ndarray,
    panels: Mapping[str, tuple[ArrayLike, Mapping[str, ArrayLike]]],
    *,
    target: Sequence[float],
) -> Figure:
    """Draw four landscapes, with paths over them.

    A panel, by its title, has a function's values (rows, columns) on the rising `axis`,
    and paths (steps + 1, 2) by name, the same names in all. A star marks `target`.
    Contour lines divide the area evenly, so that valleys are seen however steep their
    walls are.
    """
    size = _BESIDE + 2 * _WIDTH, _BELOW + 2 * (_WIDTH + _TITLE)
    fig = Figure(figsize=size, layout="compressed")
    axes = fig.subplots(2, 2, sharex=True, sharey=True)
    for ax, (title, (values, paths)) in zip(axes.flat, panels.items(), strict=True):
        ax.set(title=title, aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
        ax.set(xlim=axis[[0, -1]], ylim=axis[[0, -1]])
        ax.label_outer()
        ax.locator_params(nbins=4)
        _draw_values(ax, axis, np.asarray(values))
        circle = _draw_circle(ax)
        (star,) = ax.plot(*target, **_TARGET, zorder=7)
        drawn = []
        for (name, path), look in zip(paths.items(), SERIES, strict=False):
            x, y = np.asarray(path).T
            ax.plot(x[0], y[0], **_START, zorder=5)
            drawn += ax.plot(x, y, **vars(look), **_PATH, label=name, zorder=6)
    start = Line2D([], [], **_START, label="start")
    add_legend(fig, [*drawn, start, circle, star], handlelength=3)
    return fig


@styled
def arrows(groups: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Figure:
    """Draw an arrow from each point of the plane to its image under a map.

    A group has points and their images, (n, 2) each.
    """
    fig = Figure(figsize=(_BESIDE + 1.5 * _WIDTH, _BELOW + 1.5 * _WIDTH))
    ax = fig.add_subplot(aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    ax.grid(visible=False)
    ax.locator_params(nbins=5)
    circle, drawn = _draw_circle(ax), []
    for (name, (points, images)), style in zip(groups.items(), SERIES, strict=False):
        x, y = np.asarray(points).T
        across, up = np.asarray(images).T - (x, y)
        ax.quiver(x, y, across, up, color=style.color, width=0.005, **_ARROW)
        drawn += ax.plot(x, y, style.marker, color=style.color, ms=4, label=name)
    add_legend(fig, [*drawn, circle])
    return fig


def _draw_circle(ax: Axes) -> Line2D:
    angle = np.linspace(0, 2 * np.pi, 200)
    look: dict[str, Any] = {"color": INK, "lw": 1.4, "alpha": 0.8}
    (line,) = ax.plot(np.cos(angle), np.sin(angle), **look, label="the circle")
    return line


def _draw_values(ax: Axes, axis: np.ndarray, values: np.ndarray) -> None:
    """Draw contour lines, and the ground between them darker the higher it is."""
    ax.grid(visible=False)
    levels = np.unique(np.quantile(values, np.linspace(0, 1, _LEVELS + 1)))
    shades = [to_rgba(INK, 0.2 * k / _LEVELS) for k in range(len(levels) - 1)]
    ax.contourf(axis, axis, values, levels, colors=shades)
    faint = [to_rgba(INK, 0.3)]
    ax.contour(axis, axis, values, levels[1:-1], colors=faint, linewidths=0.6)
