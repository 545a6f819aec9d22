"""The process diagram: who runs, who owns what, who sends what to whom."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.textpath import TextPath

from cdopt_tutorial.plots.style import in_order, look, new_figure, split_name, styled

# All lengths are in points.
_LINE = 13.0
_PAD = 10.0
_ROW = 30.0
_GAP = 22.0
_LINK = 40.0  # a gap with an arrow in it
_MARGIN = 6.0
_COLUMN = {"agent": 0, "master": 0, "observer": 1, "trainer": 1, "ps": 2}


class Message(NamedTuple):
    """One kind of message between two workers."""

    sender: str
    receiver: str
    label: str


@dataclass
class _Box:
    """A worker's place in the diagram; `y` is its lower edge."""

    name: str
    owns: Sequence[str]
    column: int
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0


@styled
def process_diagram(
    workers: Mapping[str, Sequence[str]],
    messages: Sequence[Message | tuple[str, str, str]],
    *,
    size: str = "wide",
) -> Figure:
    """Draw a box per worker with what it owns, and a numbered arrow per message.

    Called by the chapters. Messages are numbered in their order; those with the
    same label have the same number. Who leads stands on the left, who works in
    the middle, a parameter server on the right. Between neighbours in a column the
    arrow is upright, with two heads where both send each other the same.

    Args:
        workers: for each name, the lines to write into its box.
        messages: sender, receiver, label.
        size: `wide` or `small`; the height follows from the content.

    Raises:
        ValueError: a message between workers that are not there, or that have
            another one between them; or no room.
    """
    messages = [Message(*message) for message in messages]
    for name in [n for m in messages for n in (m.sender, m.receiver)]:
        if name not in workers:
            raise ValueError(f"message of {name!r}, not one of {', '.join(workers)}")
    boxes = _place_columns(workers)
    rows = _rows_by_pair(messages, boxes)
    height = _place_boxes(boxes, rows) + 2 * _MARGIN
    fig = new_figure(size, height / 72)
    width = 72 * fig.get_figwidth()
    fig.set_layout_engine("none")
    ax = fig.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(-_MARGIN, height - _MARGIN))
    ax.set_axis_off()
    _spread_columns(boxes, messages, width)
    for box in boxes.values():
        _draw_box(ax, box)
    for pair, group in rows.items():
        upright = boxes[pair[0]].column == boxes[pair[1]].column
        draw = _draw_upright if upright else _draw_messages
        draw(ax, boxes, pair, group)
    return fig


def _place_columns(workers: Mapping[str, Sequence[str]]) -> dict[str, _Box]:
    """Give every worker a column by its role, and leave no column empty."""
    names = in_order(list(workers))
    wanted = {name: _COLUMN[split_name(name)[0]] for name in names if look(name)}
    used = sorted(set(wanted.values()))
    return {n: _Box(n, workers[n], used.index(wanted[n])) for n in names}


def _rows_by_pair(
    messages: Sequence[Message], boxes: dict[str, _Box]
) -> dict[tuple[str, str], list[tuple[int, Message]]]:
    """Group the numbered messages by the pair of workers, left or upper one first."""
    place = list(boxes)
    numbers: dict[str, int] = {}
    rows: dict[tuple[str, str], list[tuple[int, Message]]] = {}
    for message in messages:
        number = numbers.setdefault(message.label, len(numbers) + 1)
        ends = (message.sender, message.receiver)
        ends = sorted(ends, key=lambda name: (boxes[name].column, place.index(name)))
        rows.setdefault(tuple(ends), []).append((number, message))
    neighbours = {
        (above.name, below.name)
        for column in _columns(boxes)
        for above, below in pairwise(column)
    }
    for left, right in rows:
        if boxes[left].column == boxes[right].column and (
            (left, right) not in neighbours
        ):
            raise ValueError(f"{left!r} and {right!r} are not next to each other")
    return rows


def _place_boxes(boxes: dict[str, _Box], rows: dict) -> float:
    """Set `y` and `height` of each box; return the height of the whole.

    A worker alone in its column reaches over the full height, so that every
    arrow is level. Messages that pass over a column run above its boxes.
    """
    columns = _columns(boxes)
    far = [p for p in rows if boxes[p[1]].column - boxes[p[0]].column > 1]
    band = sum(len(rows[pair]) for pair in far) * _ROW
    needs = {}
    for name, box in boxes.items():
        sides = [
            len(group)
            for pair, group in rows.items()
            if name in pair and boxes[pair[1]].column - boxes[pair[0]].column == 1
        ]
        text = _LINE * (len(box.owns) + 1) + 2 * _PAD
        needs[name] = max(text, max(sides, default=0) * _ROW)
    many = [column for column in columns if len(column) > 1]
    stacked = [sum(needs[b.name] for b in c) + sum(_gaps(c, rows)) for c in many]
    alone = [needs[c[0].name] - band for c in columns if len(c) == 1]
    inner = max(stacked + alone)
    for column in columns:
        if len(column) == 1 and (band == 0 or column[0].column != 1):
            column[0].height = inner + band
            continue
        gaps = _gaps(column, rows)
        extra = (inner - sum(needs[b.name] for b in column) - sum(gaps)) / len(column)
        top = inner
        for box, gap in zip(column, [*gaps, 0.0], strict=True):
            box.height = needs[box.name] + extra
            box.y = top - box.height
            top = box.y - gap
    return inner + band


def _gaps(column: list[_Box], rows: dict) -> list[float]:
    """Return the gaps between the boxes of a column, wide where an arrow is."""
    pairs = [(above.name, below.name) for above, below in pairwise(column)]
    return [_LINK if pair in rows else _GAP for pair in pairs]


def _columns(boxes: dict[str, _Box]) -> list[list[_Box]]:
    """Return the boxes of each column, from top to bottom."""
    count = 1 + max(box.column for box in boxes.values())
    return [[b for b in boxes.values() if b.column == k] for k in range(count)]


def _spread_columns(
    boxes: dict[str, _Box], messages: Sequence[Message], total: float
) -> None:
    """Set `x` and `width` of each box, and check that every label has room."""
    columns = _columns(boxes)
    widths = []
    for column in columns:
        texts = [_text_width(b.name, 10, "bold") for b in column]
        texts += [_text_width(line, 8.5) for b in column for line in b.owns]
        widths.append(max(texts) + 2 * _PAD)
    free = total - sum(widths) - 2 * _MARGIN
    gap = free / max(1, len(columns) - 1)
    x = _MARGIN
    for column, width in zip(columns, widths, strict=True):
        for box in column:
            box.x, box.width = x, width
        x += width + gap
    for message in messages:
        ends = (boxes[message.sender], boxes[message.receiver])
        left, right = sorted(ends, key=lambda box: box.column)
        room = right.x - left.x - left.width
        if left.column == right.column:  # those of a pair stand side by side
            pair = {message.sender, message.receiver}
            room = left.width / len({m.label for m in messages if {*m[:2]} == pair})
        need = _text_width(message.label, 8.5) + 34
        if need > room:
            raise ValueError(
                f"the label {message.label!r} needs {need:.0f} points, there are "
                f"{room:.0f}: shorten it or what the workers own"
            )


@lru_cache(maxsize=1024)
def _text_width(text: str, size: float, weight: str = "normal") -> float:
    """Return the width of a line of text."""
    font = FontProperties(family="DejaVu Sans", weight=weight)
    return TextPath((0, 0), text, size=size, prop=font).get_extents().width


def _draw_box(ax: Axes, box: _Box) -> None:
    """Draw a worker: its name, and below it what it owns."""
    color = look(box.name).color
    shape = "round,pad=0,rounding_size=5"
    corner = (box.x, box.y)
    for face, alpha in ((color, 0.13), ("none", None)):
        edge = "none" if alpha else color
        ax.add_patch(
            FancyBboxPatch(
                corner, box.width, box.height, boxstyle=shape,
                facecolor=face, edgecolor=edge, alpha=alpha, linewidth=1.8,
            )
        )  # fmt: skip
    x = box.x + box.width / 2
    top = box.y + box.height / 2 + _LINE * len(box.owns) / 2
    ax.text(x, top, box.name, size=10, weight="bold", ha="center", va="center")
    for k, line in enumerate(box.owns, start=1):
        y = top - k * _LINE
        ax.text(x, y, line, size=8.5, ha="center", va="center")


def _draw_messages(ax: Axes, boxes: dict[str, _Box], pair, group) -> None:
    """Draw the messages of one pair of workers, the first one on top."""
    left, right = (boxes[name] for name in pair)
    low = max(left.y, right.y)
    high = min(left.y + left.height, right.y + right.height)
    if right.column - left.column > 1:
        low = high - _ROW * len(group)
    step = (high - low) / len(group)
    ends = left.x + left.width + 3, right.x - 3
    for k, (number, message) in enumerate(group):
        y = high - (k + 0.5) * step - 6
        start, end = ends if message.sender == left.name else ends[::-1]
        color = look(message.sender).color
        ax.add_patch(
            FancyArrowPatch(
                (start, y), (end, y), arrowstyle="-|>", mutation_scale=11,
                shrinkA=0, shrinkB=0, color=color, linewidth=1.6,
            )
        )  # fmt: skip
        half = (_text_width(message.label, 8.5) + 18) / 2
        _draw_label(ax, sum(ends) / 2 - half, y + 10, number, message.label, color)


def _draw_upright(ax: Axes, boxes: dict[str, _Box], pair, group) -> None:
    """Draw the messages of two workers in one column, side by side between them."""
    above, below = (boxes[name] for name in pair)
    labels = {message.label: number for number, message in group}
    low, high = below.y + below.height + 3, above.y - 3
    for k, (label, number) in enumerate(labels.items()):
        x = above.x + above.width * (k + 0.5) / len(labels)
        x -= (_text_width(label, 8.5) + 26) / 2
        senders = {m.sender for _, m in group if m.label == label}
        color = look(min(senders)).color
        style = {1: "-|>", 2: "<|-|>"}[len(senders)]
        start, end = (high, low) if above.name in senders else (low, high)
        ax.add_patch(
            FancyArrowPatch(
                (x, start), (x, end), arrowstyle=style, mutation_scale=11,
                shrinkA=0, shrinkB=0, color=color, linewidth=1.6,
            )
        )  # fmt: skip
        _draw_label(ax, x + 8, (low + high) / 2, number, label, color)


def _draw_label(
    ax: Axes, x: float, y: float, number: int, label: str, color: str
) -> None:
    """Write a message's number in a ring, and its label to the right of it."""
    ax.plot(x + 6, y, "o", ms=12, mfc="none", mec=color, mew=1.2)
    ax.text(x + 6, y - 0.4, str(number), size=8, ha="center", va="center")
    ax.text(x + 17, y, label, size=8.5, va="center")
