"""The timeline of remote calls: a lane per worker, an arrow per message."""

from collections.abc import Sequence
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cdopt_tutorial.plots.style import INK, in_order, look, new_figure, styled

_HEADS_UP_TO = 40
"""Above this many calls the heads of the arrows would hide the arrows."""

_UNITS = {"µs": 1e3, "ms": 1e6, "s": 1e9}


class Call(Protocol):
    """What the timeline reads of one remote call; times are ns of one clock."""

    caller: str
    callee: str
    method: str
    sent: int
    started: int
    ended: int
    received: int


@styled
def timeline(
    calls: Sequence[Call],
    *,
    window: tuple[float, float] | None = None,
    size: str = "wide",
) -> Figure:
    """Draw who called whom, when, and how long the callee worked on it.

    Called by the chapters with the records of `engines.trace`. Every worker has
    a lane; in it, a row per method that it ran for others. A bar is the work, in
    the colour of the caller; the two thin lines from the caller's lane are the
    request and the response, and the line along that lane is the wait.

    Args:
        calls: the recorded calls, of any order.
        window: show only from and to these times, in the unit of the axis.
        size: `wide` or `small`; the height follows from the lanes.

    Raises:
        ValueError: there are no calls.
    """
    if not calls:
        raise ValueError("no calls to draw: was the system run with tracing on?")
    calls = sorted(calls, key=lambda call: call.sent)
    lanes = _Lanes(calls)
    zero = calls[0].sent
    unit = _unit(max(call.received for call in calls) - zero)
    fig = new_figure(size, 1.0 + 0.24 * lanes.height)
    ax = fig.add_subplot()
    lanes.draw(ax)
    shown = _visible(calls, zero, unit, window)
    for caller in in_order([call.caller for call in calls]):
        own = [call for call in shown if call.caller == caller]
        _draw_calls(ax, lanes, own, zero, _UNITS[unit], len(shown))
    if window:
        ax.set_xlim(*window)
    else:
        ax.margins(x=0.01)
    ax.set_xlabel(f"time in {unit}")
    _add_legend(ax, in_order([call.caller for call in calls]))
    return fig


def _unit(span: int) -> str:
    """Return the unit in which `span` ns is a number that people like to read."""
    return next((u for u, ns in _UNITS.items() if span < 2000 * ns), "s")


def _visible(calls, zero: int, unit: str, window) -> list[Call]:
    """Return the calls that touch the window."""
    if window is None:
        return calls
    low, high = (zero + t * _UNITS[unit] for t in window)
    return [call for call in calls if call.received >= low and call.sent <= high]


class _Lanes:
    """Where each worker, and each method that it runs, is drawn; y runs down."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._span: dict[str, tuple[float, float]] = {}
        self._row: dict[tuple[str, str], float] = {}
        self._callers: dict[tuple[str, str], list[str]] = {}
        for call in calls:
            row = self._callers.setdefault((call.callee, call.method), [])
            row.append(call.caller)
        names = in_order([n for call in calls for n in (call.caller, call.callee)])
        y = 0.0
        for name in names:
            begin = y
            y += 1
            for callee, method in self._callers:
                if callee == name:
                    self._row[callee, method] = y
                    y += 1
            self._span[name] = (begin, y + 0.15)
            y += 0.6
        self.height = y - 0.6

    def draw(self, ax: Axes) -> None:
        """Draw the lanes, and write the names beside them."""
        for name, (top, bottom) in self._span.items():
            ax.axhspan(top, bottom, color=look(name).color, alpha=0.1, lw=0)
        heads = [(top + 0.5, name) for name, (top, _) in self._span.items()]
        rows = [(y + 0.5, method) for (_, method), y in self._row.items()]
        ax.set_yticks([y for y, _ in heads + rows], [t for _, t in heads + rows])
        for tick in ax.get_yticklabels()[: len(heads)]:
            tick.set_fontweight("bold")
        ax.set_ylim(self.height + 0.2, -0.2)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)
        ax.spines["left"].set_visible(False)

    def bar(self, call: Call) -> tuple[float, float]:
        """Return top and height of the call's bar: callers share a row."""
        key = (call.callee, call.method)
        callers = in_order(self._callers[key])
        height = 0.9 / len(callers)
        return self._row[key] + 0.05 + height * callers.index(call.caller), height

    def edge(self, call: Call) -> float:
        """Return the edge of the caller's lane that faces the callee."""
        top, bottom = self._span[call.caller]
        return bottom if self._span[call.callee][0] > top else top


def _draw_calls(
    ax: Axes, lanes: _Lanes, calls: Sequence[Call], zero: int, ns: float, total: int
) -> None:
    """Draw the calls of one caller, in its look."""
    if not calls:
        return
    style = look(calls[0].caller)
    lines, waits, heads = [], [], {"v": [], "^": []}
    for call in calls:
        sent, started, ended, received = (
            (t - zero) / ns
            for t in (call.sent, call.started, call.ended, call.received)
        )
        (top, height), edge = lanes.bar(call), lanes.edge(call)
        down = top > edge
        near = top if down else top + height
        lines += [((sent, edge), (started, near)), ((ended, near), (received, edge))]
        waits.append(((sent, edge), (received, edge)))
        heads["v" if down else "^"].append((started, near))
        heads["^" if down else "v"].append((received, edge))
        ax.broken_barh([(started, ended - started)], (top, height), color=style.color)
    few = total <= _HEADS_UP_TO
    ax.add_collection(
        LineCollection(lines, colors=style.color, lw=0.9 if few else 0.35)
    )
    ax.add_collection(LineCollection(waits, colors=style.color, lw=1.8))
    if few:
        for marker, points in heads.items():
            ax.plot(*zip(*points, strict=True), marker, color=style.color, ms=3.5)


def _add_legend(ax: Axes, callers: Sequence[str]) -> None:
    """Say above the lanes which colour is whose call."""
    handles = [Patch(color=look(name).color, label=name) for name in callers]
    handles.append(Line2D([], [], color=INK, lw=1.8, label="caller waits"))
    ax.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles),
        title="called by", title_fontsize=9, alignment="left", borderpad=0,
    )  # fmt: skip
