"""Compare the figures of a chapter with those in `notebooks/reference.toml`.

The table has the range of each figure over runs on several machines, and names these
machines; a figure may lie a little outside its range.
"""

import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
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
SEEN = "seen"  # the key of a row's value, or of its least and most
NOT_COMPARED = ("machine", "chaotic")  # rules of figures kept only for reading
KEYS = {SEEN, "exact", "at_most", "needs", *NOT_COMPARED}


@dataclass(frozen=True)
class Change:
    """A figure outside its range; values are formatted for a reader."""

    was: str | None  #: its range in the reference; None if that has none
    now: str | None  #: its value in this run; None if it is no longer there
    allowed: str = ""  #: the values that it may have
    holds: bool = False  #: whether `now` is one of them

    def __str__(self) -> str:
        if self.was is None:
            return f"{self.now}, and the reference has none"
        if self.now is None:
            return f"was {self.was}, is no longer there"
        return f"was {self.was}, is {self.now} (allowed: {self.allowed})"


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
                for row in part["figures"].values():
                    if unknown := {*row.keys()} - KEYS:
                        raise ValueError(f"there is no rule {min(unknown)!r}")
        except (ValueError, TypeError, AttributeError, TOMLKitError) as error:
            name = project.relative(self._path)
            raise ValueError(f"{name} can't be read: {error}") from error

    def changes(
        self, chapter: str, figures: Figures, *, complete: bool = True
    ) -> dict[str, Change]:
        """Return the compared figures that lie outside their ranges, by name.

        Unless the chapter is `complete`, figures may be missing.
        """
        rows = self._table.get(chapter, {}).get("figures", {})
        found = {}
        for name, value in figures.items():
            row = rows.get(name, {})
            if SEEN not in row:
                found[name] = Change(None, _short(value))
            elif not any(row.get(rule) for rule in NOT_COMPARED):
                was, allowed, now = row[SEEN], _allowed(row), _short(value)
                holds = _within(allowed, value)
                if not (holds and _within(was, value)):
                    found[name] = Change(_words(was), now, _words(allowed), holds)
        for name, row in rows.items() if complete else ():
            if name not in figures and SEEN in row and _is_here(row):
                found[name] = Change(_words(row[SEEN]), None)
        return found

    def drift(
        self, chapter: str, figures: Figures, *, complete: bool = True
    ) -> dict[str, str]:
        """Return how figures moved beyond what is allowed, by name."""
        found = self.changes(chapter, figures, complete=complete)
        return {name: str(each) for name, each in found.items() if not each.holds}

    def absent(self) -> list[str]:
        """Return the figures whose library is not installed."""
        tables = [part.get("figures", {}) for part in self._table.values()]
        return [n for rows in tables for n, row in rows.items() if not _is_here(row)]

    def update(self, chapter: str, figures: Figures, origin: str) -> None:
        """Add the figures of a run, on a machine named by `origin`, to their ranges.

        Exact figures and texts are replaced; figures no longer there are removed.
        """
        part = self._table.setdefault(chapter, tomlkit.table())
        runs = part.setdefault("runs", tomlkit.array().multiline(True))
        if origin not in runs:
            runs.append(origin)
        rows = part.setdefault("figures", tomlkit.table())
        for name, value in figures.items():
            row = rows.setdefault(name, tomlkit.inline_table())
            row[SEEN] = _joined(row, value)
        for name in rows.keys() - figures.keys():
            if _is_here(rows[name]):
                del rows[name]
        # Tomlkit adds a key to a row without a space before it.
        text = re.sub(f",(?={SEEN} =)", ", ", tomlkit.dumps(self._table))
        whole_file.write(self._path, text.encode())

    def forget(self, chapter: str) -> None:
        """Forget a chapter's ranges and machines, but keep its rules."""
        part = self._table.get(chapter, {})
        part.pop("runs", None)
        for row in part.get("figures", {}).values():
            row.pop(SEEN, None)


def processor() -> str:
    """The name of this machine's processor."""
    name = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.M)
    return name[1] if name else platform.machine()


def origin(**simulated: object) -> str:
    """Return the date, this machine and its versions, as the reference names them.

    `cpu` (the code path), `threads`, `cores`, `python` and `torch` can be overridden.
    """
    facts = {
        "cpu": cpu.get_cpu_capability().lower(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", 0)),
        "cores": cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
    } | simulated
    threads = f"{facts['threads']} threads, " if facts["threads"] else ""
    machine = f"{processor()}, {facts['cpu']}, {threads}{facts['cores']} cores"
    versions = f"Python {facts['python']}, torch {facts['torch']}"
    return f"{datetime.now(UTC).date()}: {machine}; {versions}"


def _is_here(row: Mapping) -> bool:  # the library that it is measured with
    return "needs" not in row or find_spec(row["needs"]) is not None


def _ends(seen: object) -> list:
    return list(seen) if isinstance(seen, list) else [seen, seen]


def _joined(row: Mapping, value: float | str) -> object:
    """Return a row's range with one more value."""
    value = float(_short(value)) if isinstance(value, float) else value
    texts = isinstance(value, str) or isinstance(row.get(SEEN), str)
    if SEEN not in row or texts or row.get("exact"):
        return value
    least, _, most = sorted([*_ends(row[SEEN]), value])
    return value if least == most else [least, most]


def _within(seen: object, value: float | str) -> bool:
    """Whether a value, to six digits, lies in a range, or is the same text."""
    if isinstance(value, str) or isinstance(seen, str):
        return seen == value
    least, most = _ends(seen)
    return least <= float(_short(value)) <= most


def _allowed(row: Mapping) -> object:
    """Return the text or the range that a figure may have."""
    if "at_most" in row:
        return [-math.inf, row["at_most"]]
    if row.get("exact") or isinstance(row[SEEN], str):
        return row[SEEN]
    least, most = _ends(row[SEEN])
    room = max(most - least, MARGIN * max(abs(least), abs(most)))
    return [least - room, most + room]


def _words(seen: object) -> str:
    least, most = map(_short, _ends(seen))
    if least == "-inf":
        return f"at most {most}"
    return least if least == most else f"{least} to {most}"


def _short(value: float | str) -> str:
    """Return a value to six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
