"""Compare the figures of a chapter with those in `notebooks/reference.toml`.

The table has the range of each figure over runs on several machines, and names these
machines; a figure may lie a little outside its range.
"""

import math
import os
import platform
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import tomlkit
from joblib import cpu_count
from tomlkit.exceptions import TOMLKitError
from torch.backends import cpu

from cdopt_tutorial import whole_file
from cdopt_tutorial.publish.chapter import Figures
from cdopt_tutorial.publish.project import Project

# A figure may leave its range by the range's width, since few machines were tried, and
# at least by this share of itself: `book/moves.md` says where the number comes from.
MARGIN = 0.03
NOT_COMPARED = {"machine", "chaotic"}  # rules of figures kept only for reading
KEYS = {"seen", "exact", "at_most", "needs", *NOT_COMPARED}


class Reference:
    """The table of one book, by chapters without `.ipynb`; empty if there is no file.

    A ValueError names what is wrong with a file of another form.
    """

    def __init__(self, project: Project) -> None:
        self._path = project.root / "notebooks" / "reference.toml"
        try:
            text = self._path.read_text("utf-8") if self._path.exists() else ""
            self._table = tomlkit.parse(text)
            for part in self._table.values():
                for rule in {key for row in part["figures"].values() for key in row}:
                    if rule not in KEYS:
                        raise ValueError(f"there is no rule {rule!r}")
        except (ValueError, TypeError, AttributeError, TOMLKitError) as error:
            name = project.relative(self._path)
            raise ValueError(f"{name} can't be read: {error}") from error

    def drift(
        self, chapter: str, figures: Figures, *, complete: bool = True
    ) -> dict[str, str]:
        """Return how figures moved beyond what is allowed, by name.

        Unless the chapter is `complete`, figures may be missing.
        """
        rows, moved = self._table.get(chapter, {}).get("figures", {}), {}
        for name, value in figures.items():
            row = rows.get(name, {})
            if "seen" not in row:
                moved[name] = f"is {_short(value)}, the reference has none"
            elif not _holds(row, value):
                moved[name] = f"is {_short(value)}, allowed: {_words(row)}"
        for name, row in rows.items() if complete else ():
            if name not in figures and "seen" in row and _is_here(row):
                moved[name] = "is no longer there"
        return moved

    def absent(self) -> list[str]:
        """Return the figures whose library is not installed."""
        tables = [part["figures"] for part in self._table.values()]
        return [n for rows in tables for n, row in rows.items() if not _is_here(row)]

    def update(
        self, chapter: str, figures: Figures, origin: str, *, anew: bool = False
    ) -> None:
        """Add the figures of a run, on a machine named by `origin`, to their ranges.

        Exact figures and texts are replaced; figures no longer there are removed. With
        `anew` only the rules of the figures are kept.
        """
        part = self._table.setdefault(chapter, tomlkit.table())
        if anew:
            part.pop("runs", None)
        runs = part.setdefault("runs", tomlkit.array().multiline(True))
        if origin not in runs:
            runs.append(origin)
        rows = part.setdefault("figures", tomlkit.table())
        for name, value in figures.items():
            row = rows.setdefault(name, tomlkit.inline_table())
            values = [float(_short(value)) if isinstance(value, float) else value]
            if "seen" in row and not (anew or row.get("exact") or _is_text(row, value)):
                values += _range(row)
            least, most = min(values), max(values)
            row["seen"] = least if least == most else [least, most]
        for name in rows.keys() - figures.keys():
            if _is_here(rows[name]):
                del rows[name]
        # Tomlkit adds a key to a row without a space before it.
        text = re.sub(",(?=seen =)", ", ", tomlkit.dumps(self._table))
        whole_file.write(self._path, text.encode())


def origin() -> str:
    """Return the date, this machine and its versions, as the reference names them."""
    name = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.M)
    machine = [name[1] if name else platform.machine()]
    machine += [cpu.get_cpu_capability().lower()]  # the code path
    if threads := os.environ.get("OMP_NUM_THREADS"):
        machine += [f"{threads} threads"]
    machine += [f"{cpu_count()} cores"]
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return f"{datetime.now(UTC).date()}: {', '.join(machine)}; {versions}"


def _is_here(row: Mapping) -> bool:  # the library that it is measured with
    return "needs" not in row or find_spec(row["needs"]) is not None


def _is_text(row: Mapping, value: float | str) -> bool:
    return isinstance(value, str) or isinstance(row["seen"], str)


def _range(row: Mapping) -> list:
    """The least and the most that was seen; of one value or a text, it twice."""
    seen = row["seen"]
    return list(seen) if isinstance(seen, list) else [seen, seen]


def _allowed(row: Mapping) -> list:
    """The range in which a figure may lie."""
    least, most = _range(row)
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
    if _is_text(row, value):
        return value == row["seen"]
    least, most = _allowed(row)
    return least <= float(_short(value)) <= most


def _words(row: Mapping) -> str:
    least, most = map(_short, _allowed(row))
    if least == "-inf":
        return f"at most {most}"
    return least if least == most else f"{least} to {most}"


def _short(value: float | str) -> str:
    """Return a value to six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
