"""The process diagram: who runs, who owns what, who sends what to whom."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.textpath import TextPath

from cdopt_tutorial.publish.style import in_order, look, new_figure, split_name, styled

# All lengths are in points.
_LINE = 13.0
_PAD = 10.0
_ROW = 30.0
_GAP = 22.0
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
    the middle, a parameter server on the right.

    Args:
        workers: for each name, the lines to write into its box.
        messages: sender, receiver, label.
        size: `wide` or `small`; the height follows from the content.

    Raises:
        ValueError: a message between workers that are not there, or no room.
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
        _draw_messages(ax, boxes, pair, group)
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
    """Group the numbered messages by the pair of workers, left one first."""
    numbers: dict[str, int] = {}
    rows: dict[tuple[str, str], list[tuple[int, Message]]] = {}
    for message in messages:
        number = numbers.setdefault(message.label, len(numbers) + 1)
        ends = (message.sender, message.receiver)
        left, right = sorted(ends, key=lambda name: boxes[name].column)
        if boxes[left].column == boxes[right].column:
            raise ValueError(f"{left!r} and {right!r} stand in one column")
        rows.setdefault((left, right), []).append((number, message))
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
        sides = [len(rows[pair]) for pair in rows if name in pair and pair not in far]
        text = _LINE * (len(box.owns) + 1) + 2 * _PAD
        needs[name] = max(text, max(sides, default=0) * _ROW)
    many = [column for column in columns if len(column) > 1]
    stacked = [sum(needs[b.name] for b in c) + _GAP * (len(c) - 1) for c in many]
    alone = [needs[c[0].name] - band for c in columns if len(c) == 1]
    inner = max(stacked + alone)
    for column in columns:
        if len(column) == 1 and (band == 0 or column[0].column != 1):
            column[0].height = inner + band
            continue
        extra = (inner - sum(needs[b.name] for b in column)) / len(column)
        extra -= _GAP * (len(column) - 1) / len(column)
        top = inner
        for box in column:
            box.height = needs[box.name] + extra
            box.y = top - box.height
            top = box.y - _GAP
    return inner + band


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
        middle = sum(ends) / 2
        half = (_text_width(message.label, 8.5) + 18) / 2
        ax.plot(middle - half + 6, y + 10, "o", ms=12, mfc="none", mec=color, mew=1.2)
        number_at = (middle - half + 6, y + 9.6)
        ax.text(*number_at, str(number), size=8, ha="center", va="center")
        ax.text(middle - half + 17, y + 10, message.label, size=8.5, va="center")
