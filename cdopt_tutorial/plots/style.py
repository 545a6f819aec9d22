"""The look of roles and curves in every figure, and what all figures share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from string import digits

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.figure import Figure

INK = "#010203"  # `show.figure` replaces it by the text colour of the page
WIDTH = 7.2  # inches, at most, of a figure


@dataclass(frozen=True)
class Look:
    """How one worker or one curve is drawn; colour is never the only difference."""

    color: str
    linestyle: str | tuple
    marker: str


_DOTS, _DASHES, _DASH_DOT = (0, (1.2, 1.2)), (0, (5, 1.5)), (0, (5, 1.5, 1.2, 1.5))
# Each has a contrast of at least 3 on a white and on a dark page, and any two differ
# for people who see no red, no green or no blue; see tests/test_plots.py.
_BLUE = Look("#4696e6", "-", "o")
_OCHRE = Look("#c8821e", _DASHES, "s")
_TEAL = Look("#1e8278", _DASH_DOT, "^")
_PINK = Look("#f01ea5", _DOTS, "D")
_VIOLET = Look("#8c37fa", "-", "P")
_BROWN = Look("#8c6414", _DASHES, "X")

SERIES = (_BLUE, _OCHRE, _TEAL, _PINK, _VIOLET, _BROWN)
"""Looks of things that are not roles, in the order they are drawn."""

# Further lines and markers, where the colour is taken.
_LONG, _SHORT = (0, (8, 1.5, 1.2, 1.5, 1.2, 1.5)), (0, (2.5, 1))
_DASHES_DOTS = (0, (4, 1.2, 1.2, 1.2, 1.2, 1.2))

METHODS = {
    **dict.fromkeys(("free", "plain", "RNN"), _BLUE),
    # Dissolved.
    **dict.fromkeys(("Stiefel", "Stiefel RNN", "fused", "dissolved"), _OCHRE),
    "dissolving, SGD": _OCHRE,
    **dict.fromkeys(("cdopt.nn", "dissolving, Adam"), Look(_OCHRE.color, _SHORT, "*")),
    "dissolving, L-BFGS": Look(_OCHRE.color, _DASHES_DOTS, "h"),
    "LSTM, per gate": Look(_BROWN.color, _SHORT, "X"),
    "LSTM, stacked": Look(_OCHRE.color, _DOTS, ">"),  # beside "Stiefel RNN"
    # Exact at every step: by torch's parametrizations, or projected back after it.
    **dict.fromkeys(("torch's orthogonal", "cayley"), _TEAL),
    "householder": Look(_TEAL.color, _LONG, "<"),
    "matrix_exp": Look(_TEAL.color, _DOTS, "H"),
    "projection": Look(_BLUE.color, _LONG, "v"),
    "geoopt": Look(_BROWN.color, _SHORT, "d"),
    # Controls, which one figure shows together with four of the above: the seventh has
    # the colour of the text.
    "orthogonal start": _PINK,
    "penalty alone": Look(_BROWN.color, _DOTS, "8"),
    "spectral norm": _VIOLET,
    "same norm": Look(INK, _LONG, "v"),
    # Steepest descent in the spectral norm.
    "SPEL": Look(_PINK.color, _LONG, "p"),
    "Muon": Look(_VIOLET.color, _SHORT, "p"),
    # Another architecture.
    "LSTM": _VIOLET,
}
"""Looks of the methods that several figures compare: one each throughout the book."""


def looks(names: Iterable[str]) -> dict[str, Look]:
    """The look of each curve of a figure: a method's own, or the next free one."""
    taken = {name: METHODS.get(name) for name in names}
    colors = {look.color for look in taken.values() if look is not None}
    spare = cycle([look for look in SERIES if look.color not in colors] or SERIES)
    return {name: look or next(spare) for name, look in taken.items()}


# In the order of their lanes: those that lead, those that work, those that serve.
_ROLES = {
    "agent": (_BLUE,),
    "master": (_VIOLET,),
    "observer": (_OCHRE, _PINK, _BROWN),
    "trainer": (_OCHRE, _PINK, _BROWN),
    "ps": (_TEAL,),
    "rank": (_BLUE, _OCHRE),
}


def look(worker: str) -> Look:
    """The look of a worker; a KeyError if its name is not that of a role."""
    role = worker.rstrip(digits)  # `observer1` has the number 1
    of_role = _ROLES[role]
    return of_role[int(worker[len(role) :] or 0) % len(of_role)]


def in_order(workers: Iterable[str]) -> list[str]:
    """Sort the names of workers in the order of their lanes, each once."""
    lanes = list(_ROLES)

    def place(name: str) -> tuple[int, int, str]:
        return lanes.index(name.rstrip(digits)), len(name), name  # 2 comes before 10

    return sorted(set(workers), key=place)


# A decorator: the function draws by the style sheet alone.
styled = style.context(["default", f"{__package__}.tutorial"])


def add_legend(fig: Figure, handles: Sequence[Artist], **options) -> None:
    """Put a legend above all axes, in as many columns as fit; the figure grows by it.

    The layout of the figure must leave room for it.
    """
    for columns in range(4, 0, -1):
        legend = fig.legend(
            handles=handles, loc="outside upper left", ncols=columns, **options
        )
        box = legend.get_window_extent()
        if box.width <= fig.bbox.width or columns == 1:
            break
        legend.remove()
    fig.set_figheight(fig.get_figheight() + box.height / fig.dpi)
