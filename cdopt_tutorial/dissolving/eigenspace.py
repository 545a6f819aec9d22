"""A constrained problem whose answer is known, by constraint dissolving and its peers.

Minimise f(X) = -tr(XᵀΣX) / 2 over all X (n, p) with XᵀX = I. By Ky Fan's theorem X
spans the eigenvectors of the p largest eigenvalues of Σ, here the digits' covariance.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import geoopt
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations

from cdopt_tutorial.checks import check
from cdopt_tutorial.constraints import stiefel_constraint, stiefel_map
from cdopt_tutorial.data.bags import load_digits
from cdopt_tutorial.engines.seam.device import wait_for


@dataclass(frozen=True)
class Problem:
    """Minimise -tr(XᵀΣX) / 2 over XᵀX = I; ValueError if p is out of its range."""

    matrix: Tensor  #: Σ, (n, n), symmetric, float64
    p: int = 5  #: columns of X, from 1 to n - 1

    def __post_init__(self):
        n = len(self.matrix)
        check(self, "p", 1 <= self.p < n, f"from 1 to {n - 1}")

    def value(self, x: Tensor) -> Tensor:
        """f at any x (n, p), on the manifold or not: a scalar."""
        return -0.5 * (x * (self.matrix @ x)).sum()

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (n,), the largest first, and eigenvectors (n, n) in columns."""
        values, vectors = torch.linalg.eigh(self.matrix)
        return values.flip(0), vectors.flip(1)

    @property
    def minimum(self) -> float:
        """The least value of f on the manifold."""
        return -0.5 * self.eigen[0][: self.p].sum().item()

    def gap(self, x: Tensor) -> float:
        """How far f at a feasible x is above the minimum, relative to it."""
        return (self.value(x).item() - self.minimum) / abs(self.minimum)

    def start(self, seed: int = 0) -> Tensor:
        """A point (n, p) of the manifold, drawn uniformly; the same on any device."""
        generator = torch.Generator().manual_seed(seed)
        shape = len(self.matrix), self.p
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return polar(drawn).to(self.matrix.device)


def digits_problem(device: str = "cpu") -> Problem:
    """The principal subspace of the 64 pixels of the digits, of dimension 5."""
    images, _ = load_digits()
    return Problem(images.T.cov().to(device))


def polar(x: Tensor) -> Tensor:
    """The point of the manifold nearest to x (n, p), NaN if x is not finite."""
    if not x.isfinite().all():
        return torch.full_like(x, math.nan)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    return left @ right


@dataclass(frozen=True)
class Solution:
    """A run of a method; the lists have an entry for the start and for each step."""

    seconds: list[float]  #: since the start; to evaluate the entries does not count
    #: of f at the nearest feasible point, relative to the minimum; NaN, and the run's
    #: end, where X is not finite.
    gap: list[float]
    feasibility: list[float]  #: ‖XᵀX - I‖
    x: Tensor  #: (n, p), the feasible point nearest to the last X


# What an optimizer moves, X as made of it, and what it minimises, of X.
Held = tuple[Iterable[nn.Parameter], Callable[[], Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Method:
    """One way to keep the constraint."""

    #: makes what is optimized of the problem, the start and penalty_param.
    hold: Callable[[Problem, Tensor, float], Held]
    #: learning rate, in units: of those up to 32, √2 apart, the one with which the
    #: slowest of ten starts needs the fewest steps to a gap of 1e-6. L-BFGS, which
    #: searches along lines, has 1.
    lr: float
    #: made of the parameters and the learning rate.
    optimizer: Callable[..., optim.Optimizer] = optim.SGD
    unit: float | None = None  #: of the learning rate; None is one over Σ's norm
    steps: int = 600  #: of the optimizer
    #: factor of ‖XᵀX - I‖² in the loss, for those that dissolve.
    penalty_param: float = 0.1
    decays: bool = False  #: whether the learning rate falls to 0 along half a cosine
    projects: bool = False  #: whether each step ends with the polar projection


def _dissolved(problem: Problem, start: Tensor, penalty_param: float) -> Held:
    def loss(x: Tensor) -> Tensor:
        mapped, squared_distance = stiefel_map(x)
        return problem.value(mapped) + penalty_param * squared_distance

    x = nn.Parameter(start)
    return [x], lambda: x, loss


def _direct(make: Callable, problem: Problem, start: Tensor, _: float) -> Held:
    x = make(start)
    return [x], lambda: x, problem.value


def _parametrized(kind: str, problem: Problem, start: Tensor, _: float) -> Held:
    layer = nn.Linear(problem.p, len(start), bias=False)
    layer.weight = nn.Parameter(start.cpu())
    # X is completed to a square matrix at random.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parametrizations.orthogonal(layer, orthogonal_map=kind)
    layer.to(start.device)
    return layer.parameters(), lambda: layer.weight, problem.value


# L-BFGS looks far ahead along a line, and far from the manifold the dissolved problem
# falls without bound: it needs the larger penalty, which moves that edge away.
_TOLERANCES = {"tolerance_grad": 1e-12, "tolerance_change": 1e-16}
_LINE_SEARCH = {"max_iter": 10, "line_search_fn": "strong_wolfe"}
_LBFGS = partial(optim.LBFGS, **_LINE_SEARCH, **_TOLERANCES)
_GEOOPT = partial(geoopt.ManifoldParameter, manifold=geoopt.Stiefel())
METHODS = {
    "dissolving, SGD": Method(_dissolved, 2**-1.5),
    "dissolving, Adam": Method(_dissolved, 8, optim.Adam, unit=0.01, decays=True),
    "dissolving, L-BFGS": Method(_dissolved, 1, _LBFGS, 1, steps=25, penalty_param=1),
    "projection": Method(partial(_direct, nn.Parameter), 32, projects=True),
    "geoopt": Method(partial(_direct, _GEOOPT), 2**0.5, geoopt.optim.RiemannianSGD),
    "cayley": Method(partial(_parametrized, "cayley"), 2**1.5),
    "householder": Method(partial(_parametrized, "householder"), 2**-0.5),
    "matrix_exp": Method(partial(_parametrized, "matrix_exp"), 2),
}


def solve(method: str, problem: Problem, seed: int = 0, **changes: Any) -> Solution:
    """Minimise by one of ``METHODS``, with the gradient of the whole of f in each step.

    The seed is that of the start, the same for all methods; ``changes`` are attributes
    of :class:`Method`. Raises ValueError if there is no such method.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, but must be {' or '.join(METHODS)}")
    chosen = replace(METHODS[method], **changes)
    held = chosen.hold(problem, problem.start(seed), chosen.penalty_param)
    _, current, _ = held
    step = _stepper(chosen, held, problem)
    seconds, gap, feasibility = [0.0], [], []
    for place in range(chosen.steps + 1):
        if place > 0:
            began = time.perf_counter()
            step()
            wait_for(problem.matrix.device)
            seconds.append(seconds[-1] + time.perf_counter() - began)
        x = current().detach()
        gap.append(problem.gap(polar(x)))
        feasibility.append(stiefel_constraint(x).norm().item())
        if math.isnan(gap[-1]):
            break
    return Solution(seconds, gap, feasibility, polar(x))


def _stepper(method: Method, held: Held, problem: Problem) -> Callable[[], None]:
    """One step of the method's optimizer, and of what comes after it."""
    parameters, x, loss = held
    # f's gradient changes as fast as Σ's largest eigenvalue in absolute value says.
    unit = method.unit or 1 / problem.eigen[0].abs().max().item()
    optimizer = method.optimizer(parameters, lr=method.lr * unit)
    decay = optim.lr_scheduler.CosineAnnealingLR(optimizer, method.steps)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        value = loss(x())
        value.backward()
        return value

    def step() -> None:
        optimizer.step(evaluate)
        if method.decays:
            decay.step()
        if method.projects:
            with torch.no_grad():
                x().copy_(polar(x()))

    return step
