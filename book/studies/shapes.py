"""A constrained step by the shape of its weight: measured, and predicted by a rule.

A rule is a constant plus a multiple of a method's work, fitted to some shapes and
checked on others.

The book's results are stored in cdopt_tutorial/dissolving/shapes.json.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import median

import numpy as np
from runs import arguments, write
from scipy.optimize import nnls

from cdopt_tutorial.dissolving import costs

Shape = tuple[int, int]  # n inputs, and p outputs, which are orthonormal rows
Timed = tuple[int, int, float, float, float]  # of these columns
COLUMNS = "n", "p", "median s", "least", "most"
FITTED: Sequence[Shape] = (
    (64, 64), (64, 16), (256, 64), (256, 256), (1024, 64), (1024, 256),
)  # fmt: skip
CHECKED: Sequence[Shape] = (128, 32), (512, 64), (512, 128), (512, 512), (4096, 64)
LARGEST = 1024  # n of torch's parametrizations, which take minutes beyond
# Multiplications, up to a factor: products of n x p with p x p and with a batch; or
# those of n x n matrices, to which torch's maps complete a weight that is not square.
WORK: Mapping[str, Callable[[int, int], float]] = dict.fromkeys(
    costs.VARIANTS, lambda n, p: n * p * (p + costs.BATCH_SIZE)
) | {
    "plain": lambda n, p: n * p * costs.BATCH_SIZE,
    "cayley": lambda n, p: n**3,
    "householder": lambda n, p: n**2 * p,
    "matrix_exp": lambda n, p: n**3,
}


def main(options: argparse.Namespace) -> None:
    """Time each method at the shapes it can handle; fit the rules, and check them."""
    fitted, checked, turns = FITTED, CHECKED, 5
    if options.smoke:
        fitted, checked, turns = ((8, 4), (16, 4)), ((16, 8),), 1
    seconds: dict[str, list[Timed]] = {name: [] for name in costs.VARIANTS}
    for shape in (*fitted, *checked):
        for name, found in step_seconds(*shape, turns, options.device).items():
            timed = *shape, median(found), min(found), max(found)
            seconds[name].append(timed)
    rules = {name: fit(name, seconds[name], fitted) for name in seconds}
    pairs = {
        name: {
            f"{n} x {p}": (s, foreseen(rules[name], name, n, p))
            for n, p, s, *_ in timed
            if (n, p) in checked
        }
        for name, timed in seconds.items()
    }
    results = {"seconds": seconds, "rules": rules, "checked": pairs}
    write(options.out, columns=COLUMNS, **results)


def step_seconds(n: int, p: int, turns: int, device: str) -> dict[str, list[float]]:
    """Seconds of a step of each method for a layer of n inputs and p outputs."""
    names = [v for v in costs.VARIANTS if v not in costs.EXACT or n <= LARGEST]
    steps = {name: costs.make_step(name, n, p, device) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn, name in product(range(turns), names):  # a slow minute affects all
        print(f"{name}, {n} x {p}, turn {turn + 1}", flush=True)
        seconds[name].append(costs.step_seconds(steps[name], budget=0.2))
    return seconds


def fit(name: str, timed: Sequence[Timed], shapes: Sequence[Shape]) -> list[float]:
    """A constant and the seconds per unit of work, with the least relative errors."""
    used = [(n, p, s) for n, p, s, *_ in timed if (n, p) in shapes]
    points = [(1 / s, WORK[name](n, p) / s) for n, p, s in used]
    return nnls(np.array(points), np.ones(len(points)))[0].tolist()


def foreseen(rule: Sequence[float], name: str, n: int, p: int) -> float:
    """Predicted seconds of a method's step."""
    constant, each = rule
    return constant + each * WORK[name](n, p)


if __name__ == "__main__":
    main(arguments(__doc__))
