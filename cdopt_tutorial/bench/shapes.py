"""A constrained step by the shape of its weight: measured, and predicted by a rule.

A rule is a constant plus a multiple of a method's work, fitted to some shapes and
checked on others.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import median

import numpy as np
from scipy.optimize import nnls

from cdopt_tutorial.bench.rows import Measured, Progress, Values, sweep
from cdopt_tutorial.dissolving import costs

Shape = tuple[int, int]  # n inputs, and p outputs, which are orthonormal rows
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
    costs.BASELINE: lambda n, p: n * p * costs.BATCH_SIZE,
    "cayley": lambda n, p: n**3,
    "householder": lambda n, p: n**2 * p,
    "matrix_exp": lambda n, p: n**3,
}


def measure(progress: Progress, smoke: bool, device: str) -> Measured:
    """Time each method at the shapes it can handle; fit the rules, and check them."""
    fitted, checked = (((8, 4), (16, 4)), ((16, 8),)) if smoke else (FITTED, CHECKED)
    groups = [variants(*shape, device) for shape in (*fitted, *checked)]
    measured, more = sweep(groups, {"step": "s"}, smoke, progress)
    values = more["values"]
    rules = {name: fit(values, name, fitted) for name in costs.VARIANTS}
    found: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in rules}
    for name, (n, p) in product(rules, checked):
        key = f"{name}, {n} x {p}"
        if key in values:
            pair = median(values[key]["step"]), foreseen(rules[name], name, n, p)
            found[name][f"{n} x {p}"] = pair
    return measured, {"values": values, "rules": rules, "checked": found}


def variants(n: int, p: int, device: str) -> dict[str, Callable]:
    """A step of each method for a layer of n inputs and p outputs."""
    names = [v for v in costs.VARIANTS if v not in costs.EXACT or n <= LARGEST]
    return {
        f"{name}, {n} x {p}": partial(_step, costs.make_step(name, n, p, device))
        for name in names
    }


def _step(step: costs.Step, _: int) -> dict[str, float]:
    return {"step": costs.step_seconds(step, budget=0.2)}


def fit(values: Values, name: str, shapes: Sequence[Shape]) -> list[float]:
    """A constant and the seconds per unit of work, with the least relative errors."""
    points = [(n, p) for n, p in shapes if f"{name}, {n} x {p}" in values]
    seconds = [median(values[f"{name}, {n} x {p}"]["step"]) for n, p in points]
    parts = [
        (1 / s, WORK[name](*of) / s) for of, s in zip(points, seconds, strict=True)
    ]
    return nnls(np.array(parts), np.ones(len(points)))[0].tolist()


def foreseen(rule: Sequence[float], name: str, n: int, p: int) -> float:
    """Predicted seconds of a method's step."""
    constant, each = rule
    return constant + each * WORK[name](n, p)
