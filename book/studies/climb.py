"""The best rate and scale on a grid that has no edges."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from statistics import fmean

Cell = tuple[int, int]  # numbers of a rate and a scale
Scores = dict[Cell, list[float]]  # of each seed
BESIDE = (-1, 0), (1, 0), (0, -1), (0, 1)


def setting(cell: Cell) -> dict[str, float]:
    """A rate of ..., 0.01, 0.02, 0.05, 0.1, ..., and a scale of ..., 0.5, 1, 2, ..."""
    rate, scale = cell
    return {"lr": float(f"{(1, 2, 5)[rate % 3]}e{rate // 3}"), "scale": 2.0**scale}


def climb(
    score: Callable[[Sequence[tuple[str, Cell]]], Iterable[list[float]]],
    names: Sequence[str],
    first: Sequence[Cell],
    beside: Sequence[Cell] = BESIDE,
) -> dict[str, Scores]:
    """Scores of the first cells, and then of those beside each name's best.

    It ends where no cell beside the best has a higher mean; of equals the first stays.
    """
    scores: dict[str, Scores] = {name: {} for name in names}
    new = [*product(names, first)]
    while new:
        for (name, cell), found in zip(new, score(new), strict=True):
            scores[name][cell] = found
        new = []
        for name in names:
            i, j = best(scores[name])
            cells = [(i + up, j + across) for up, across in beside]
            new += [(name, cell) for cell in cells if cell not in scores[name]]
    return scores


def best(scores: Scores) -> Cell:
    """The cell with the highest mean, the first of equals."""
    return max(scores, key=lambda cell: fmean(scores[cell]))
