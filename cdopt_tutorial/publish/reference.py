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
    """The table of one book, empty without a file; a ValueError if it is damaged."""

    def __init__(self, project: Project) -> None:
        path = project.root / "notebooks" / "reference.toml"
        try:
            table = tomllib.loads(path.read_text("utf-8") if path.exists() else "")
            self._rows = {name: part["figures"] for name, part in table.items()}
            all_rows = [row for rows in self._rows.values() for row in rows.items()]
            for name, row in all_rows:
                if "seen" not in row or not row.keys() <= KEYS:
                    raise ValueError(f"{name} lacks `seen`, or has an unknown rule")
                _words(row)
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
        figures, complete = claimed(run), "failed" not in run.metadata
        rows, moved = self._rows.get(chapter, {}), {}
        for name, value in figures.items():
            if name not in rows:
                moved[name] = f"is {short(value)}, the reference has none"
            elif not _holds(rows[name], value):
                moved[name] = f"is {short(value)}, allowed: {_words(rows[name])}"
        for name, row in rows.items() if complete else ():
            if name not in figures and is_here(row):
                moved[name] = "is no longer there"
        return moved


def is_here(row: Mapping) -> bool:
    """Whether the library is installed with which a figure is measured."""
    return "needs" not in row or find_spec(row["needs"]) is not None


def seen_range(row: Mapping) -> list:
    """Return the least and the most that was seen; of one value or a text, it twice."""
    seen = row["seen"]
    return list(seen) if isinstance(seen, list) else [seen, seen]


def short(value: float | str) -> str:
    """Return a value to six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _allowed(row: Mapping) -> list:
    least, most = seen_range(row)
    if "at_most" in row:
        return [-math.inf, row["at_most"]]
    if row.get("exact") or isinstance(least, str):
        return [least, most]
    room = max(most - least, MARGIN * max(abs(least), abs(most)))
    return [least - room, most + room]


def _holds(row: Mapping, value: float | str) -> bool:
    """Whether a value, to six digits, lies in its range, or is the same text."""
    if NOT_COMPARED & row.keys():
        return True
    least, most = _allowed(row)
    if isinstance(value, str) or isinstance(least, str):
        return value == least
    return least <= float(short(value)) <= most


def _words(row: Mapping) -> str:
    least, most = map(short, _allowed(row))
    if "at_most" in row:
        return f"at most {most}"
    return least if least == most else f"{least} to {most}"
