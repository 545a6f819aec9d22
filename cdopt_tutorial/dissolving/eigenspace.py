"""A constrained problem with a known answer, for constraint dissolving and its rivals.

Minimise f(X) = -tr(XᵀΣX) / 2 over all X (n, p) with XᵀX = I. By Ky Fan's theorem X
spans the eigenvectors of the p largest eigenvalues of Σ, here the digits' covariance.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import geoopt
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations

from cdopt_tutorial.calls.device import wait_for
from cdopt_tutorial.constraints import stiefel_constraint, stiefel_map
from cdopt_tutorial.data.bags import load_digits


@dataclass(frozen=True)
class Problem:
    """Minimise -tr(XᵀΣX) / 2 over XᵀX = I."""

    matrix: Tensor  #: Σ, (n, n), symmetric, float64
    p: int = 5  #: columns of X, from 1 to n - 1

    def value(self, x: Tensor) -> Tensor:
        """f at any x (n, p), on or off the manifold: a scalar."""
        return -0.5 * (x * (self.matrix @ x)).sum()

    @cached_property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues of Σ, (n,), the largest first."""
        return torch.linalg.eigh(self.matrix).eigenvalues.flip(0)

    def gap(self, x: Tensor) -> float:
        """How far f at a feasible x is above the minimum, relative to it."""
        minimum = -0.5 * self.eigenvalues[: self.p].sum().item()
        return (self.value(x).item() - minimum) / abs(minimum)

    def start(self, seed: int = 0) -> Tensor:
        """A point (n, p) of the manifold, drawn uniformly; the same on any device."""
        generator = torch.Generator().manual_seed(seed)
        shape = len(self.matrix), self.p
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return polar(drawn).to(self.matrix.device)


def digits_problem(device: str = "cpu") -> Problem:
    """The principal subspace, of dimension 5, of the digits' 64 pixels."""
    images, _ = load_digits()
    return Problem(images.T.cov().to(device))


def polar(x: Tensor) -> Tensor:
    """The point of the manifold nearest to x (n, p)."""
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    return left @ right


@dataclass(frozen=True)
class Solution:
    """A run of a method; the lists have an entry for the start and for each step."""

    seconds: list[float]  #: since the start, without the time for the other lists
    gap: list[float]  #: of f at the nearest feasible point, relative to the minimum
    feasibility: list[float]  #: ‖XᵀX - I‖


@dataclass(frozen=True)
class Method:
    """One way to keep the constraint."""

    #: learning rate, in units, tuned on a √2-spaced grid up to 32: of those with which
    #: X ends on the manifold, the one with which the slowest of ten starts needs the
    #: fewest steps to a gap of 1e-6. L-BFGS, with its line search, has 1.
    lr: float
    optimizer: Callable[..., optim.Optimizer] = optim.SGD
    parameter: Callable[[Tensor], nn.Parameter] = nn.Parameter  #: made of the start
    orthogonal_map: str | None = None  #: of torch's parametrization, if it is used
    penalty_param: float | None = None  #: factor of ‖XᵀX - I‖², if X is dissolved
    unit: float | None = None  #: of the learning rate; None is one over Σ's norm
    steps: int = 600  #: of the optimizer
    decays: bool = False  #: whether the learning rate falls to 0 along half a cosine
    projects: bool = False  #: whether each step ends with the polar projection


# Far from the manifold the dissolved problem is unbounded below, and L-BFGS looks far
# ahead along a line; with the larger penalty, that region is farther away.
_LBFGS = partial(optim.LBFGS, max_iter=10, line_search_fn="strong_wolfe")
_LBFGS = partial(_LBFGS, tolerance_grad=1e-12, tolerance_change=1e-16)
_GEOOPT = partial(geoopt.ManifoldParameter, manifold=geoopt.Stiefel())
METHODS = {
    "dissolving, SGD": Method(2**-1.5, penalty_param=0.1),
    "dissolving, Adam": Method(
        8, optim.Adam, penalty_param=0.1, unit=0.01, decays=True
    ),
    "dissolving, L-BFGS": Method(1, _LBFGS, penalty_param=1, unit=1, steps=25),
    "projection": Method(32, projects=True),
    "geoopt": Method(2**0.5, geoopt.optim.RiemannianSGD, _GEOOPT),
    "cayley": Method(2**1.5, orthogonal_map="cayley"),
    "householder": Method(2**-0.5, orthogonal_map="householder"),
    "matrix_exp": Method(2, orthogonal_map="matrix_exp"),
}


def solve(method: str, problem: Problem, seed: int = 0, **changes: Any) -> Solution:
    """Minimise by one of ``METHODS``, with the full gradient of f in each step.

    The seed draws the start, the same for all methods; ``changes`` are attributes of
    :class:`Method`. Raises LinAlgError if X stops being finite.
    """
    chosen = replace(METHODS[method], **changes)
    layer = _layer(chosen, problem.start(seed))
    step = _stepper(chosen, layer, problem)
    seconds, gap, feasibility = [0.0], [], []
    for place in range(chosen.steps + 1):
        if place > 0:
            begin = time.perf_counter()
            step()
            wait_for(problem.matrix.device)
            seconds.append(seconds[-1] + time.perf_counter() - begin)
        x = layer.weight.detach()
        gap.append(problem.gap(polar(x)))
        feasibility.append(stiefel_constraint(x).norm().item())
    return Solution(seconds, gap, feasibility)


def _layer(method: Method, start: Tensor) -> nn.Linear:
    """A layer whose weight is X."""
    kind = method.orthogonal_map
    with torch.random.fork_rng(devices=[]):
        layer = nn.Linear(start.shape[1], start.shape[0], bias=False)
        layer.weight = method.parameter(start)
        if kind is not None:
            # X is completed to a square matrix at random, the same on all devices.
            torch.manual_seed(0)
            parametrizations.orthogonal(layer.cpu(), orthogonal_map=kind)
    return layer.to(start.device)


def _stepper(method: Method, layer: nn.Linear, problem: Problem) -> Callable[[], None]:
    """One step of the method's optimizer, with its decay and projection."""
    # The Lipschitz constant of f's gradient is Σ's norm.
    unit = method.unit or 1 / problem.eigenvalues.abs().max().item()
    optimizer = method.optimizer(layer.parameters(), lr=method.lr * unit)
    decay = optim.lr_scheduler.CosineAnnealingLR(optimizer, method.steps)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        if method.penalty_param is None:
            loss = problem.value(layer.weight)
        else:
            x, squared_distance = stiefel_map(layer.weight)
            loss = problem.value(x) + method.penalty_param * squared_distance
        loss.backward()
        return loss

    def step() -> None:
        optimizer.step(evaluate)  # type: ignore[arg-type]  # or a tensor
        if method.decays:
            decay.step()
        if method.projects:
            with torch.no_grad():
                layer.weight.copy_(polar(layer.weight))

    return step
