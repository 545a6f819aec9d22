"""The timeline of remote calls: a lane per worker, an arrow per message."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cdopt_tutorial.plots.style import INK, WIDTH, add_legend, in_order, look, styled
from cdopt_tutorial.probes.trace import Call

_ARROWS_UP_TO = 60  # calls; more arrows would hide each other
_TIMES = "sent", "started", "ended", "received"


@styled
def timeline(
    calls: Sequence[Call], *, window: tuple[float, float] | None = None
) -> Figure:
    """Draw who called whom, when, and how long the callee worked on it.

    Every worker has a lane, with a row for each method that it ran. A bar is the work,
    in the caller's colour. Where there are few calls, thin arrows are request and
    response, and a line along a lane is the wait. `window` is in the unit of the axis.
    No calls are a ValueError.
    """
    calls, unit = _on_axis(calls)
    fig = Figure(figsize=(WIDTH, 1))
    ax = fig.add_subplot(xlabel=f"time in {unit}")
    ax.margins(x=0.01)
    lanes, bars = _draw_lanes(fig, ax, calls)
    if window:
        low, high = ax.set_xlim(*window)
        calls = [call for call in calls if call.received >= low and call.sent <= high]
    arrows = len(calls) <= _ARROWS_UP_TO
    callers = in_order(call.caller for call in calls)
    for caller in callers:
        made = [call for call in calls if call.caller == caller]
        for call in made:
            top, bottom = bars[caller, call.callee, call.method]
            work = call.started, call.ended - call.started
            ax.broken_barh([work], (top, bottom - top), color=look(caller).color)
        if arrows:
            _draw_arrows(ax, made, lanes, bars)
    handles = [Patch(color=look(name).color, label=name) for name in callers]
    waits = [Line2D([], [], color=INK, lw=1.8, label="caller waits")] if arrows else []
    title = {"title": "called by", "title_fontsize": 9, "alignment": "left"}
    add_legend(fig, [*handles, *waits], **title)
    return fig


def turned(
    calls: Sequence[Call], window: tuple[float, float] | None = None
) -> tuple[str, dict]:
    """The `turn` of `show.figure` with which readers can zoom into `timeline`."""
    calls, unit = _on_axis(calls)
    whole = max(call.received for call in calls)
    low, high = window or (0, whole)
    return "timeline", {
        "calls": [
            [round(x, 3) if isinstance(x, float) else x for x in vars(call).values()]
            for call in calls
        ],
        "workers": [(name, look(name).color) for name in _workers(calls)],
        "unit": unit,
        "end": whole,
        "zoom": whole / (high - low),
        "at": 50 * (low + high) / whole,
    }


def _on_axis(calls: Sequence[Call]) -> tuple[list[Call], str]:
    """The calls with times counted from the first, in a suitable unit, and its name."""
    if not calls:
        raise ValueError("no calls to draw: was the system run with tracing on?")
    zero = min(call.sent for call in calls)
    span = max(call.received for call in calls) - zero
    unit, ns = ("µs", 1e3) if span < 2e6 else ("ms", 1e6) if span < 2e9 else ("s", 1e9)
    times = [{t: (getattr(call, t) - zero) / ns for t in _TIMES} for call in calls]
    return [replace(c, **at) for c, at in zip(calls, times, strict=True)], unit


def _workers(calls: Sequence[Call]) -> list[str]:
    return in_order(name for c in calls for name in (c.caller, c.callee))


def _draw_lanes(fig: Figure, ax: Axes, calls: Sequence[Call]) -> tuple[dict, dict]:
    """Draw lanes; return top and bottom of each, and of bars by (from, to, method)."""
    lanes, bars, names, methods, y = {}, {}, [], [], 0.0
    for name in _workers(calls):
        served = sorted((c for c in calls if c.callee == name), key=lambda c: c.sent)
        rows = list(dict.fromkeys(call.method for call in served))
        names.append((y + 0.5, name))
        for row, method in enumerate(rows, start=1):
            methods.append((y + row + 0.5, method))
            callers = in_order(c.caller for c in served if c.method == method)
            sides = np.linspace(y + row + 0.05, y + row + 0.95, len(callers) + 1)
            for caller, top, bottom in zip(callers, sides, sides[1:], strict=False):
                bars[caller, name, method] = top, bottom
        lanes[name] = y, y + len(rows) + 1.15
        ax.axhspan(*lanes[name], color=look(name).color, alpha=0.1, lw=0)
        y += len(rows) + 1.6
    fig.set_figheight(0.7 + 0.24 * (y - 0.6))
    ax.set_ylim(y - 0.4, -0.2)
    ax.set_yticks(*zip(*names, *methods, strict=True))
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.spines["left"].set_visible(False)
    for tick in ax.get_yticklabels()[: len(names)]:
        tick.set_fontweight("bold")
    return lanes, bars


def _draw_arrows(ax: Axes, calls: Sequence[Call], lanes: dict, bars: dict) -> None:
    """Draw the requests, responses and waits of one caller."""
    color = look(calls[0].caller).color
    lines, waits = [], []
    for call in calls:
        if call.caller == call.callee:
            continue  # its own work: nothing is sent
        # From the edge of the caller's lane to the edge of the bar that faces it.
        down = lanes[call.callee] > lanes[call.caller]
        edge = lanes[call.caller][1 if down else 0]
        near = bars[call.caller, call.callee, call.method][0 if down else 1]
        sent, received = (call.sent, edge), (call.received, edge)
        started, ended = (call.started, near), (call.ended, near)
        lines += [(sent, started), (ended, received)]
        waits.append((sent, received))
        ax.plot(*started, "v" if down else "^", color=color, ms=3.5)
        ax.plot(*received, "^" if down else "v", color=color, ms=3.5)
    ax.add_collection(LineCollection(lines, colors=color, lw=0.9))
    ax.add_collection(LineCollection(waits, colors=color, lw=1.8))
