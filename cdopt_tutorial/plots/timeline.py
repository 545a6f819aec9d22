"""The timeline of remote calls: a lane per worker, an arrow per message."""

from collections.abc import Callable, Sequence
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cdopt_tutorial.plots.style import INK, WIDTH, add_legend, in_order, look, styled

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
    calls: Sequence[Call], *, window: tuple[float, float] | None = None
) -> Figure:
    """Draw who called whom, when, and how long the callee worked on it.

    Called by the chapters with the records of `engines.trace`. Every worker has
    a lane; in it, a row per method that it ran for others. A bar is the work, in
    the colour of the caller; the two thin lines from the caller's lane are the
    request and the response, and the line along that lane is the wait.

    Args:
        calls: the recorded calls, of any order.
        window: show only from and to these times, in the unit of the axis.

    Raises:
        ValueError: there are no calls.
    """
    if not calls:
        raise ValueError("no calls to draw: was the system run with tracing on?")
    lanes = _Lanes(calls)
    zero = min(call.sent for call in calls)
    span = max(call.received for call in calls) - zero
    unit, ns = next(u for u in _UNITS.items() if span < 2000 * u[1] or u[0] == "s")
    fig = Figure(figsize=(WIDTH, 0.7 + 0.24 * lanes.height))
    ax = fig.add_subplot(xlabel=f"time in {unit}")
    ax.margins(x=0.01)
    lanes.draw(ax)
    if window:
        ax.set_xlim(*window)
        low, high = (zero + time * ns for time in window)
        calls = [call for call in calls if call.received >= low and call.sent <= high]
    callers = in_order([call.caller for call in calls])
    for caller in callers:
        own = [call for call in calls if call.caller == caller]
        _draw_calls(
            ax, own, lanes, lambda t: (t - zero) / ns, len(calls) <= _HEADS_UP_TO
        )
    handles = [Patch(color=look(name).color, label=name) for name in callers]
    handles.append(Line2D([], [], color=INK, lw=1.8, label="caller waits"))
    add_legend(fig, handles, title="called by", title_fontsize=9, alignment="left")
    return fig


class _Lanes:
    """Where each worker, and each method that it runs, is drawn; y runs down."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._span: dict[str, tuple[float, float]] = {}
        self._row: dict[tuple[str, str], float] = {}
        self._callers: dict[tuple[str, str], list[str]] = {}
        for call in sorted(calls, key=lambda call: call.sent):
            row = self._callers.setdefault((call.callee, call.method), [])
            row.append(call.caller)
        y = 0.0
        for name in in_order([n for c in calls for n in (c.caller, c.callee)]):
            rows = [key for key in self._callers if key[0] == name]
            self._row |= {key: y + k for k, key in enumerate(rows, start=1)}
            self._span[name] = (y, y + len(rows) + 1.15)
            y += len(rows) + 1.6
        self.height = y - 0.6

    def draw(self, ax: Axes) -> None:
        """Draw the lanes, and write the names beside them."""
        for name, (top, bottom) in self._span.items():
            ax.axhspan(top, bottom, color=look(name).color, alpha=0.1, lw=0)
        heads = [(top + 0.5, name) for name, (top, _) in self._span.items()]
        rows = [(y + 0.5, method) for (_, method), y in self._row.items()]
        ax.set_yticks(*zip(*heads, *rows, strict=True))
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
    ax: Axes, calls: Sequence[Call], lanes: _Lanes, at: Callable, few: bool
) -> None:
    """Draw the calls of one caller; `at` gives a time in the unit of the axis."""
    color = look(calls[0].caller).color
    lines, waits, heads = [], [], {"v": [], "^": []}
    for call in calls:
        (top, height), edge = lanes.bar(call), lanes.edge(call)
        down = top > edge
        near = top if down else top + height
        begin, end = (at(call.sent), edge), (at(call.received), edge)
        started, ended = (at(call.started), near), (at(call.ended), near)
        lines += [(begin, started), (ended, end)]
        waits.append((begin, end))
        heads["v" if down else "^"].append(started)
        heads["^" if down else "v"].append(end)
        bar = (started[0], ended[0] - started[0])
        ax.broken_barh([bar], (top, height), color=color)
    ax.add_collection(LineCollection(lines, colors=color, lw=0.9 if few else 0.35))
    ax.add_collection(LineCollection(waits, colors=color, lw=1.8))
    if few:
        for marker, points in heads.items():
            ax.plot(*zip(*points, strict=True), marker, color=color, ms=3.5)
