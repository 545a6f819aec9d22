"""Hold the figures that a chapter claims against those of `notebooks/reference.toml`.

It says what each was, by profile, and how far another machine or torch may move it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import tomlkit

from cdopt_tutorial.publish.chapter import Figures
from cdopt_tutorial.publish.project import PROFILES, Project


@dataclass(frozen=True)
class Change:
    """A figure that is not the reference's; values are as a reader wants them."""

    was: str | None  #: in the reference; None if it has none
    now: str | None  #: in this run; None if it is claimed no more
    allowed: str = ""  #: how far it may move; empty if there is no such rule
    holds: bool = False  #: whether it moved no farther

    def __str__(self) -> str:
        if self.was is None:
            return f"{self.now}, and the reference has none"
        if self.now is None:
            return f"was {self.was}, is claimed no more"
        far = self.allowed
        if far.startswith("at most"):
            far = f"allowed: {far}"
        return f"was {self.was}, is {self.now} ({far})"


class Reference:
    """The table of one book, by chapters without `.ipynb`; empty if there is none yet.

    A file that is no table of this kind is a ValueError that names the place.
    """

    def __init__(self, project: Project) -> None:
        self._path = project.root / "notebooks" / "reference.toml"
        try:
            text = self._path.read_text("utf-8") if self._path.exists() else ""
            self._table = tomlkit.parse(text)
            for chapter, parts in self._table.unwrap().items():
                _check_chapter(chapter, parts)
        except (tomlkit.exceptions.TOMLKitError, ValueError, OSError) as error:
            why = getattr(error, "strerror", None) or error
            name = project.relative(self._path)
            raise ValueError(f"{name} can't be read: {why}") from error

    def parameters(self, chapter: str, profile: str) -> dict[str, object]:
        """Return what a profile sets in a chapter; a ValueError if it has no such."""
        if profile == "full":  # that is the chapter as it stands
            return {}
        if profile not in self._table.get(chapter, {}):
            raise ValueError(f"{chapter} has no profile {profile!r}")
        return self._table[chapter][profile].unwrap()

    def changes(
        self, chapter: str, profile: str, figures: Figures, *, complete: bool = True
    ) -> dict[str, Change]:
        """Return what is not exactly the reference's, by name, but for speeds.

        What isn't complete may miss some.
        """
        rows = self._table.get(chapter, {}).get("figures", {})
        found = {}
        for name, value in figures.items():
            row = rows.get(name, {})
            if profile not in row:
                found[name] = Change(None, _short(value))
                continue
            was, now = _short(row[profile]), _short(value)
            holds = _holds(row, row[profile], value)
            if not holds or (was != now and not row.get("machine")):
                found[name] = Change(was, now, _allowed(row), holds)
        for name, row in rows.items():
            due = complete and profile in row and _is_here(row.get("needs"))
            if due and name not in figures:
                found[name] = Change(_short(row[profile]), None)
        return found

    def drift(
        self, chapter: str, profile: str, figures: Figures, *, complete: bool = True
    ) -> dict[str, str]:
        """Return what moved farther than it may, and how, by name."""
        found = self.changes(chapter, profile, figures, complete=complete)
        return {name: str(each) for name, each in found.items() if not each.holds}

    def has_text(self, chapter: str, digest: str) -> bool:
        """Tell whether a chapter has learned from this text, if it does from any."""
        return self._table.get(chapter, {}).get("text", digest) == digest

    def update(self, chapter: str, profile: str, figures: Figures, digest: str) -> None:
        """Write what a chapter claims now, of which text; the rest stays."""
        part = self._table.setdefault(chapter, tomlkit.table())
        if "text" in part:
            part["text"] = digest
        rows = part.setdefault("figures", tomlkit.table())
        for name in self.drift(chapter, profile, figures):
            if name in figures:
                usual = tomlkit.inline_table().append("within", "1 %")
                value = figures[name]
                short = float(_short(value)) if isinstance(value, float) else value
                rows.setdefault(name, usual)[profile] = short
            else:
                del rows[name][profile]
                if not set(PROFILES) & set(rows[name]):
                    del rows[name]
        self._path.write_text(tomlkit.dumps(self._table), "utf-8")


def _check_chapter(chapter: str, parts: object) -> None:
    """Raise ValueError unless a chapter's parts are tables, of figures in rows."""
    inner = dict(parts) if isinstance(parts, dict) else {"": parts}
    if not isinstance(inner.pop("text", ""), str):
        raise ValueError(f"{chapter}: text is no name of one")
    if not all(isinstance(part, dict) for part in inner.values()):
        raise ValueError(f"{chapter}: tables are needed, `smoke` and `figures`")
    for name, row in parts.get("figures", {}).items():
        _check(f"{chapter}: {name}", row)


def _check(place: str, row: object) -> None:
    """Raise ValueError unless a row has values of profiles and one rule."""
    given = row if isinstance(row, dict) else {}
    for profile in PROFILES:
        value = given.get(profile, 0)
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"{place}: {profile} is {value!r}: no number, and no text")
    if not isinstance(given.get("needs", ""), str):
        raise ValueError(f"{place}: needs is {given['needs']!r}, but must be a module")
    match [each for each in given.items() if each[0] not in (*PROFILES, "needs")]:
        case [("within" | "at_most", bool())]:
            pass
        case [("machine", True)] | [("within" | "at_most", int() | float())]:
            return
        case [("within", str(share))] if re.fullmatch(r"\d+(\.\d+)? ?%", share):
            return
    rules = 'a number or a share like "5 %", `at_most`, a number, and `machine`, true'
    values = f"and values for {' and '.join(PROFILES)}"
    raise ValueError(f"{place}: is {row!r}: give one of `within`, {rules}; {values}")


def _is_here(module: str | None) -> bool:
    """Tell whether what a figure is measured with is installed."""
    return module is None or find_spec(module) is not None


def _holds(row: Mapping, was: float | str, value: float | str) -> bool:
    """Tell whether `value` is as near to `was` as the row asks for."""
    if row.get("machine"):
        return True
    if isinstance(was, str) or isinstance(value, str):
        return was == value
    if "at_most" in row:
        return value <= row["at_most"]
    width = row["within"]
    if isinstance(width, str):  # a share of what it was
        width = abs(was) * float(width.removesuffix("%")) / 100
    return abs(value - was) <= width < math.inf


def _allowed(row: Mapping) -> str:
    """How far a figure may move, in words."""
    if "at_most" in row:
        return f"at most {row['at_most']:g}"
    return f"± {row.get('within')}"


def _short(value: float | str) -> str:
    """Return a value as a reader wants it in a table: six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
