"""Compare figures with their ranges over machines, in `notebooks/reference.toml`."""

import math
import tomllib
from collections.abc import Mapping
from importlib.util import find_spec

from nbformat import NotebookNode

from cdopt_tutorial.publish.chapter import claimed
from cdopt_tutorial.publish.project import Project

# A figure may leave its range by the range's width, since few machines were tried, and
# at least by this share of itself: `book/moves.md` says where the number comes from.
MARGIN = 0.03
NOT_COMPARED = {"machine", "chaotic"}  # rules of figures kept only for reading
KEYS = {"seen", "exact", "at_most", "needs", *NOT_COMPARED}


class Reference:
    """The table of one book; a ValueError if it is damaged."""

    def __init__(self, project: Project) -> None:
        try:
            text = (project.root / "notebooks/reference.toml").read_text("utf-8")
            table = tomllib.loads(text)
            self._rows = {name: part["figures"] for name, part in table.items()}
            all_rows = [row for rows in self._rows.values() for row in rows.items()]
            for name, row in all_rows:
                if "seen" not in row or not row.keys() <= KEYS:
                    raise ValueError(f"{name} lacks `seen`, or has an unknown rule")
                seen_range(row)
        except Exception as error:  # of what is no table, no row, or no range
            what = f"notebooks/reference.toml can't be read: {error}"
            raise ValueError(what) from error
        #: The figures whose library is not installed.
        self.absent = [name for name, row in all_rows if not is_here(row)]

    def drift(self, chapter: str, run: NotebookNode) -> dict[str, str] | None:
        """Return how the figures of a chapter's run moved beyond what is allowed.

        None if its short profile ran; a run that failed may lack figures.
        """
        if run.metadata.get("shortened"):
            return None
        figures, rows = claimed(run), self._rows.get(chapter, {})
        moved = {name: _moved(rows.get(name), figures[name]) for name in figures}
        if "failed" not in run.metadata:
            lost = [name for name in rows if name not in figures]
            moved |= {n: "is no longer there" for n in lost if is_here(rows[n])}
        return {name: how for name, how in moved.items() if how}


def is_here(row: Mapping) -> bool:
    """Whether the library is installed with which a figure is measured."""
    return "needs" not in row or find_spec(row["needs"]) is not None


def seen_range(row: Mapping) -> list:
    """Return the least and the most that was seen; of one value or a text, it twice."""
    least, most = row["seen"] if isinstance(row["seen"], list) else [row["seen"]] * 2
    return [least, most]


def short(value: float | str) -> str:
    """Return a value to six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _moved(row: Mapping | None, value: float | str) -> str:
    """Return how a value left its range; an empty text if it did not."""
    if row is None:
        return f"is {short(value)}, the reference has none"
    least, most = seen_range(row)
    if "at_most" in row:
        least, most = -math.inf, row["at_most"]
    elif not (row.get("exact") or isinstance(least, str)):
        room = max(most - least, MARGIN * max(abs(least), abs(most)))
        least, most = least - room, most + room
    if isinstance(value, str) or isinstance(least, str):
        holds = value == least
    else:
        holds = least <= float(short(value)) <= most
    if holds or NOT_COMPARED & row.keys():
        return ""
    allowed = short(least) if least == most else f"{short(least)} to {short(most)}"
    if "at_most" in row:
        allowed = f"at most {short(most)}"
    return f"is {short(value)}, allowed: {allowed}"
