"""Hold the figures that a chapter claims against those of `notebooks/reference.toml`.

The file says for every figure what it was, in each profile, and how far another
machine, torch or cdopt may move it. A figure that moves farther has drifted.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import tomlkit

from cdopt_tutorial.publish.figures import Value
from cdopt_tutorial.publish.project import PROFILES, Project

_PROFILES = " and ".join(PROFILES)

_USUAL = "1 %"
"""How far a figure may move that is new in the table."""


@dataclass(frozen=True)
class Drift:
    """One figure that is not what the reference says."""

    name: str
    reference: Value | None
    """None: the reference doesn't know this figure."""
    value: Value | None
    """None: the chapter ran through and didn't claim it."""
    allowed: str

    def __str__(self) -> str:
        if self.reference is None:
            return f"{self.name}: {_short(self.value)}, and the reference has none"
        if self.value is None:
            return f"{self.name}: was {_short(self.reference)}, is claimed no more"
        both = f"was {_short(self.reference)}, is {_short(self.value)}"
        return f"{self.name}: {both} ({self.allowed})"


class Reference:
    """The table of one book, read when it is made; empty if there is none yet.

    Raises:
        ValueError: the file is no table of this kind; the message names the place.
    """

    def __init__(self, project: Project) -> None:
        self._path = project.root / "notebooks" / "reference.toml"
        try:
            self._table = tomlkit.parse(self._path.read_text("utf-8"))
        except FileNotFoundError:
            self._table = tomlkit.document()
        except tomlkit.exceptions.TOMLKitError as error:
            name = project.relative(self._path)
            raise ValueError(f"{name} can't be read: {error}") from error
        for chapter, parts in self._table.items():
            if not all(isinstance(each, Mapping) for each in (parts, *parts.values())):
                raise ValueError(f"{chapter}: tables are needed, `smoke` and `figures`")
            for name, row in parts.get("figures", {}).items():
                _check(f"{chapter}: {name}", row)

    def parameters(self, chapter: str, profile: str) -> dict[str, object]:
        """Return what a profile sets in a chapter; `full` sets nothing.

        Args:
            chapter: name of its notebook, without `.ipynb`.
            profile: one of `PROFILES`.

        Raises:
            ValueError: the chapter has no such profile.
        """
        if profile == "full":
            return {}
        part = self._table.get(chapter, {}).get(profile)
        if part is None:
            raise ValueError(f"{chapter} has no profile {profile!r}")
        return part.unwrap()

    def drift(
        self,
        chapter: str,
        profile: str,
        figures: Mapping[str, Value],
        *,
        complete: bool = True,
    ) -> list[Drift]:
        """Return the figures that are not as the table has them.

        Args:
            chapter: name of its notebook, without `.ipynb`.
            profile: one of `PROFILES`, with which it ran.
            figures: what `figures.claimed` found.
            complete: whether it ran through; else figures may be missing.
        """
        rows = self._table.get(chapter, {}).get("figures", {})
        found = []
        for name, value in figures.items():
            was = rows.get(name, {}).get(profile)
            allowed = _allowed(rows[name]) if name in rows else ""
            if was is None or not _holds(rows[name], was, value):
                found.append(Drift(name, was, value, allowed))
        gone = [n for n, row in rows.items() if n not in figures and profile in row]
        if complete:
            found += [Drift(n, rows[n][profile], None, "") for n in gone]
        return found

    def update(self, chapter: str, profile: str, figures: Mapping[str, Value]) -> None:
        """Make the table say what a chapter claims now, and write it.

        What the table says of tolerances, and its comments, stay.
        """
        part = self._table.setdefault(chapter, tomlkit.table())
        rows = part.setdefault("figures", tomlkit.table())
        for drift in self.drift(chapter, profile, figures):
            if drift.value is None:
                del rows[drift.name][profile]
                if not set(PROFILES) & set(rows[drift.name]):
                    del rows[drift.name]
                continue
            if drift.name not in rows:
                rows[drift.name] = tomlkit.inline_table()
                rows[drift.name]["within"] = _USUAL
            rows[drift.name][profile] = _rounded(drift.value)
        self._path.write_text(tomlkit.dumps(self._table), "utf-8")


def _check(name: str, row: object) -> None:
    """Raise ValueError if a row of the table says anything but how far and what."""
    rules = {"within": _is_width, "at_most": _is_number, "machine": lambda x: x is True}
    given = [key for key in rules if isinstance(row, Mapping) and key in row]
    if len(given) != 1 or set(row) - set(given) - set(PROFILES):
        raise ValueError(
            f"{name}: give one of {', '.join(rules)}, and values for {_PROFILES}"
        )
    if not rules[given[0]](row.unwrap()[given[0]]):
        raise ValueError(
            f"{name}: {given[0]} is {row[given[0]]!r}: `within` takes a number or a "
            'share like "5 %", `at_most` a number, `machine` true'
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_width(value: object) -> bool:
    share = isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)? ?%", value)
    return _is_number(value) or bool(share)


def _holds(row: Mapping, was: Value, value: Value) -> bool:
    """Tell whether `value` is as near to `was` as the row asks for."""
    if row.get("machine"):
        return True
    if isinstance(was, str) or isinstance(value, str):
        return was == value
    if "at_most" in row:
        return value <= row["at_most"]
    return math.isfinite(value) and abs(value - was) <= _width(row, was)


def _width(row: Mapping, was: float) -> float:
    """Return how far a figure may be away: absolute, or a share of what it was."""
    within = row["within"]
    if isinstance(within, str):
        return abs(was) * float(within.removesuffix("%")) / 100
    return within


def _allowed(row: Mapping) -> str:
    """Say how far a figure may move."""
    if "at_most" in row:
        return f"allowed: at most {row['at_most']:g}"
    return "depends on the machine" if row.get("machine") else f"± {row['within']}"


def _rounded(value: Value) -> Value:
    """Return a value as a reader wants it in a table: six digits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _short(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
