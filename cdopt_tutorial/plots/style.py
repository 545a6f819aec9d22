"""How a role looks, in every diagram and every plot; the two sizes of a figure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib.resources import as_file, files

from matplotlib import style
from matplotlib.figure import Figure

INK = "#010203"
"""Stands for the text colour of the page until `show.figure` puts that in."""

SIZES = {"wide": (7.2, 3.8), "small": (4.6, 3.2)}
"""Width and height in inches of the two sizes that a figure may have."""


@dataclass(frozen=True)
class Look:
    """How one worker or one curve is drawn; never told by its colour alone."""

    color: str
    linestyle: str | tuple
    marker: str
    hatch: str


_DOTS = (0, (1.2, 1.2))
_DASHES = (0, (5, 1.5))
_DASH_DOT = (0, (5, 1.5, 1.2, 1.5))

# Each has a contrast of at least 3 on a white and on a dark page, and each two
# differ to people who see no red, no green or no blue; tests/test_plots.py.
_BLUE = Look("#4696e6", "-", "o", "")
_OCHRE = Look("#c8821e", _DASHES, "s", "////")
_TEAL = Look("#1e8278", _DASH_DOT, "^", "....")
_PINK = Look("#f01ea5", _DOTS, "D", "\\\\\\\\")
_VIOLET = Look("#8c37fa", "-", "P", "xxxx")
_BROWN = Look("#8c6414", _DASHES, "X", "----")

SERIES = (_BLUE, _OCHRE, _TEAL, _PINK, _VIOLET, _BROWN)
"""Looks of things that are no roles, in the order they are drawn."""

_ROLES = {
    "agent": (_BLUE,),
    "master": (_VIOLET,),
    "observer": (_OCHRE, _PINK, _BROWN),
    "trainer": (_OCHRE, _PINK, _BROWN),
    "ps": (_TEAL,),
}


def split_name(worker: str) -> tuple[str, int]:
    """Return the role and the number in a worker's name: `observer1` has 1."""
    role, number = re.fullmatch(r"(.*?)(\d*)", worker).groups()
    return role, int(number or 0)


def is_role(worker: str) -> bool:
    """Tell whether `worker` names a role of the book, numbered or not."""
    return split_name(worker)[0] in _ROLES


def look(worker: str) -> Look:
    """Return how the worker of this name is drawn; numbers take turns.

    Raises:
        ValueError: the name is not that of a role of the book.
    """
    if not is_role(worker):
        raise ValueError(f"unknown role {worker!r}; allowed: {', '.join(_ROLES)}")
    role, number = split_name(worker)
    return _ROLES[role][number % len(_ROLES[role])]


def in_order(workers: Sequence[str]) -> list[str]:
    """Sort names as diagrams show them: who leads, who works, who serves."""
    rank = {role: k for k, role in enumerate(_ROLES)}

    def key(worker: str) -> tuple[int, str, int]:
        role, number = split_name(worker)
        return rank.get(role, len(rank)), role, number

    return sorted(set(workers), key=key)


def styled(draw: Callable) -> Callable:
    """Make a function that draws use the style sheet, and nothing else."""

    @wraps(draw)
    def wrapper(*args, **kwargs):
        with as_file(files(__package__) / "tutorial.mplstyle") as sheet:
            with style.context(["default", sheet]):
                return draw(*args, **kwargs)

    return wrapper


def new_figure(size: str, height: float | None = None) -> Figure:
    """Return an empty figure of one of the two sizes.

    Args:
        size: `wide` or `small`.
        height: inches, where the content decides it.

    Raises:
        ValueError: there is no such size.
    """
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}; allowed: {', '.join(SIZES)}")
    width, usual = SIZES[size]
    return Figure(figsize=(width, height or usual))
