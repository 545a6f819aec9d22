"""Hold the figures that a chapter claims against those of `notebooks/reference.toml`.

The file says for every figure what it was, in each profile, and how far another
machine, torch or cdopt may move it. A figure that moves farther has drifted.
"""

import math
import re
from collections.abc import Mapping

import tomlkit

from cdopt_tutorial.publish.chapter import Value
from cdopt_tutorial.publish.project import PROFILES, Project

_USUAL = "1 %"
"""How far a figure may move that is new in the table."""


class Reference:
    """The table of one book, read when it is made; empty if there is none yet.

    A chapter goes by the name of its notebook, without `.ipynb`.

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
    ) -> dict[str, str]:
        """Return what moved, and how, by the names of the figures.

        Args:
            chapter: that ran.
            profile: one of `PROFILES`, with which it ran.
            figures: what it claimed.
            complete: whether it ran through; else figures may be missing.
        """
        rows = self._table.get(chapter, {}).get("figures", {})
        moved = {}
        for name, value in figures.items():
            row = rows.get(name, {})
            if profile not in row:
                moved[name] = f"{_short(value)}, and the reference has none"
            elif not _holds(row, row[profile], value):
                within, bound = row.get("within"), row.get("at_most")
                far = f"± {within}" if bound is None else f"allowed: at most {bound:g}"
                both = f"was {_short(row[profile])}, is {_short(value)}"
                moved[name] = f"{both} ({far})"
        for name, row in rows.items():
            if complete and profile in row and name not in figures:
                moved[name] = f"was {_short(row[profile])}, is claimed no more"
        return moved

    def update(self, chapter: str, profile: str, figures: Mapping[str, Value]) -> None:
        """Make the table say what a chapter claims now, and write it.

        What the table says of tolerances, and its comments, stay.
        """
        part = self._table.setdefault(chapter, tomlkit.table())
        rows = part.setdefault("figures", tomlkit.table())
        for name in self.drift(chapter, profile, figures):
            if name in figures:
                if name not in rows:
                    rows[name] = tomlkit.inline_table()
                    rows[name]["within"] = _USUAL
                value = figures[name]
                short = float(_short(value)) if isinstance(value, float) else value
                rows[name][profile] = short
            else:
                del rows[name][profile]
                if not set(PROFILES) & set(rows[name]):
                    del rows[name]
        self._path.write_text(tomlkit.dumps(self._table), "utf-8")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_RULES = {
    "within": lambda x: _is_number(x) or re.fullmatch(r"\d+(\.\d+)? ?%", str(x)),
    "at_most": _is_number,
    "machine": lambda x: x is True,
}
"""How far a figure may move, and the values that say it."""


def _check(name: str, row: object) -> None:
    """Raise ValueError if a row of the table says anything but how far and what."""
    given = [key for key in _RULES if isinstance(row, Mapping) and key in row]
    if len(given) != 1 or set(row) - set(given) - set(PROFILES):
        profiles = " and ".join(PROFILES)
        raise ValueError(
            f"{name}: give one of {', '.join(_RULES)}, and values for {profiles}"
        )
    if not _RULES[given[0]](row.unwrap()[given[0]]):
        raise ValueError(
            f"{name}: {given[0]} is {row[given[0]]!r}: `within` takes a number or a "
            'share like "5 %", `at_most` a number, `machine` true'
        )


def _holds(row: Mapping, was: Value, value: Value) -> bool:
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


def _short(value: Value) -> str:
    """Return a value as a reader wants it in a table: six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
