"""Landscapes: functions of the plane as contour lines, and paths over them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.transforms import Affine2D
from numpy.typing import ArrayLike

from cdopt_tutorial.plots.legend import legend_in, wrapped
from cdopt_tutorial.plots.style import INK, SERIES, Look, new_figure, styled

_WIDEST = 2.7  # inches of a panel, for a small figure to fit a phone
_LEVELS = 11
_DOTS = 250  # across a panel; a contour line is right to a ninth of one
_BESIDE, _BELOW, _TITLE = 0.75, 0.45, 0.45  # inches that labels and titles need

_CURVE = {"color": INK, "lw": 1.4, "alpha": 0.8}
_TARGET = {"color": INK, "marker": "*", "ms": 15, "mew": 1.2, "mfc": "none", "ls": ""}
_START = {"color": INK, "marker": "o", "ms": 6, "mew": 1.3, "mfc": "none", "ls": ""}


@dataclass(frozen=True)
class Panel:
    """One landscape, and what was done on it.

    Attributes:
        values: of the function, (len(y), len(x)).
        paths: by name, each (steps + 1, 2); the same name looks the same in every
            panel.
    """

    values: ArrayLike
    paths: Mapping[str, ArrayLike] = field(default_factory=dict)


@styled
def landscape(
    x: Sequence[float],
    y: Sequence[float],
    panels: Mapping[str, Panel],
    *,
    curve: ArrayLike | None = None,
    curve_label: str = "",
    target: Sequence[float] | None = None,
    target_label: str = "",
    xlabel: str = "$x_1$",
    ylabel: str = "$x_2$",
    size: str = "wide",
) -> Figure:
    """Draw landscapes side by side on the same axes, with the paths over them.

    Called by the chapters. A ring is where a path starts and a filled marker where it
    ends; a path that leaves the panel is cut at its edge. The contour lines of a
    panel share its area evenly, so valleys are seen however steep the walls are.

    Args:
        x: of the columns of the values, rising.
        y: of their rows, rising.
        panels: by title, which is written above.
        curve: points (n, 2) of a line to draw in each, such as a manifold.
        curve_label: what the curve is, for the legend.
        target: a point to mark with a star in each, such as a known optimum.
        target_label: what the target is, for the legend.
        xlabel: what x is.
        ylabel: what y is.
        size: `wide` has up to three panels in a row, but four in rows of two; `small`
            has one below the other, to be read on a phone.

    Raises:
        ValueError: there are no panels, more names of paths than looks, or an array
            of another shape.
    """
    _check(panels, (len(y), len(x)))
    names = list(dict.fromkeys(n for panel in panels.values() for n in panel.paths))
    if len(names) > len(SERIES):
        raise ValueError(f"{len(names)} names of paths; allowed: up to {len(SERIES)}")
    looks = dict(zip(names, SERIES, strict=False))
    fig = new_figure(size)
    columns = 1 if size == "small" else min(3, len(panels))
    columns = 2 if columns == 3 and len(panels) == 4 else columns
    rows = -(-len(panels) // columns)
    width = min(_WIDEST, (fig.get_figwidth() - _BESIDE) / columns)
    fig.set_figwidth(_BESIDE + columns * width)
    fig.set_layout_engine("compressed", h_pad=0.08)
    axes = fig.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for ax, (title, panel) in zip(axes.flat, panels.items(), strict=False):
        ax.set(title=title, aspect="equal", xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
        ax.locator_params(nbins=4)
        _draw_values(ax, x, y, np.asarray(panel.values, dtype=float))
        _draw_fixed(ax, curve, target)
        for name, path in panel.paths.items():
            _draw_path(ax, np.asarray(path, dtype=float), looks[name])
    _label(axes, len(panels), xlabel, ylabel)
    handles = _handles(looks, curve_label, target_label)
    height = _add_legend(fig, handles)
    panel_height = width * (y[-1] - y[0]) / (x[-1] - x[0])
    fig.set_figheight(height + _BELOW + rows * (panel_height + _TITLE))
    return fig


def _label(axes: np.ndarray, panels: int, xlabel: str, ylabel: str) -> None:
    """Label the outer sides of the panels, and take away the axes without one."""
    for ax in axes[:, 0]:
        ax.set_ylabel(ylabel)
    for k, ax in enumerate(axes.flat):
        if k >= panels:
            ax.remove()
        elif k + axes.shape[1] >= panels:  # there is no panel below
            ax.set_xlabel(xlabel)
            ax.tick_params(labelbottom=True)


def _check(panels: Mapping[str, Panel], shape: tuple[int, int]) -> None:
    """Raise where there is nothing to draw, or an array of another shape."""
    if not panels:
        raise ValueError("no panels to draw")
    for title, panel in panels.items():
        if np.shape(panel.values) != shape:
            raise ValueError(
                f"the values of {title!r} have the shape {np.shape(panel.values)}, "
                f"but must have {shape}"
            )
        for name, path in panel.paths.items():
            if np.ndim(path) != 2 or np.shape(path)[1] != 2 or not len(path):
                raise ValueError(
                    f"the path {name!r} has the shape {np.shape(path)}, but must "
                    "have (steps + 1, 2)"
                )


def _draw_values(ax: Axes, x, y, values: np.ndarray) -> None:
    """Draw contour lines, the ground between them the fuller the higher."""
    ax.grid(visible=False)
    levels = np.unique(np.quantile(values, np.linspace(0, 1, _LEVELS + 1)))
    shades = [to_rgba(INK, 0.2 * k / _LEVELS) for k in range(len(levels) - 1)]
    lines = {"colors": [to_rgba(INK, 0.3)], "linewidths": 0.6}
    for drawn in (
        ax.contourf(x, y, values, levels, colors=shades),
        ax.contour(x, y, values, levels[1:-1], **lines),
    ):
        drawn.set_paths([_thinned(p, x[-1] - x[0]) for p in drawn.get_paths()])


def _thinned(path: Path, span: float) -> Path:
    """Leave out the points of a contour that nobody can see: the page is lighter.

    Args:
        path: in the coordinates of the panel.
        span: of the panel's x.
    """
    # Closing a part is going back to its start, and that can be thinned out.
    codes = np.where(path.codes == Path.CLOSEPOLY, Path.LINETO, path.codes)
    large = Affine2D().scale(_DOTS / span)
    thin = Path(path.vertices, codes).cleaned(transform=large, simplify=True)
    drawn = thin.codes != Path.STOP
    vertices = large.inverted().transform(thin.vertices[drawn])
    return Path(vertices, thin.codes[drawn])


def _draw_fixed(ax: Axes, curve, target) -> None:
    """Draw what is alike in all panels: the curve and the target."""
    if curve is not None:
        ax.plot(*np.asarray(curve).T, **_CURVE)
    if target is not None:
        ax.plot(*target, **_TARGET, zorder=7)


def _draw_path(ax: Axes, path: np.ndarray, style: Look) -> None:
    """Draw a path up to where it runs away, if it does."""
    span = np.ptp(ax.get_xlim()) + np.ptp(ax.get_ylim())
    # Not a number is never near, and ends the path, too.
    near = (np.abs(path) < 100 * span).all(axis=1)
    path = path[: near.argmin() if not near.all() else None]
    ax.plot(*path.T, color=style.color, ls=style.linestyle, lw=1.6, zorder=3)
    ax.plot(*path[:1].T, **_START, zorder=5)
    ax.plot(*path[-1:].T, style.marker, color=style.color, ms=5, mew=0, zorder=6)


def _handles(
    looks: Mapping[str, Look], curve_label: str, target_label: str
) -> list[Line2D]:
    """Return what the legend says: the paths, then what all panels share."""
    handles = [
        Line2D(
            [], [], color=s.color, ls=s.linestyle, lw=1.6, marker=s.marker, ms=5,
            mew=0, label=wrapped(name), markevery=[0],
        )
        for name, s in looks.items()
    ]  # fmt: skip
    if looks:
        handles.append(Line2D([], [], **_START, label="start"))
    if curve_label:
        handles.append(Line2D([], [], **_CURVE, label=wrapped(curve_label)))
    if target_label:
        handles.append(Line2D([], [], **_TARGET, label=wrapped(target_label)))
    return handles


def _add_legend(fig: Figure, handles: list[Line2D]) -> float:
    """Put the legend above the panels, and return its height in inches."""
    if not handles:
        return 0.0
    return legend_in(
        fig.bbox.width * 0.98,
        lambda ncols: fig.legend(
            handles=handles, loc="outside upper left", ncols=ncols, handlelength=3
        ),
    )
