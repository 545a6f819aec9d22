"""Constraint dissolving where it can be seen: the circle in the plane.

The manifold is x₁² + x₂² = 1, so C(x) = ‖x‖² - 1 and A(x) = 2x / (1 + ‖x‖²), which
maps the plane into the disk and leaves the circle where it is. A *function* below is
any smooth map of points (..., 2) to values (...).

Source: Xiao, Liu and Toh, Dissolving Constraints for Riemannian Optimization,
Mathematics of Operations Research, 2023: its β is twice CDOpt's ``penalty_param``.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import grad, hessian, vmap

Function = Callable[[Tensor], Tensor]

_ON_CIRCLE = 1e-6  # |C(x)| up to which a solved point counts as on the circle
_STARTS = 21  # of Newton's method, along each axis
_STRIDE = 0.3  # its longest step: a longer one leaves what is to be searched
_NUDGE = 1e-5  # how far from the minimum a test of stability starts


def objective(x: Tensor) -> Tensor:
    """(x₁ - 0.6)² + ½ (x₂ - 0.3)², whose minimum in the plane is off the circle.

    On the circle it has one minimum, 0.085 at (0.8, 0.6), and one maximum. At the
    minimum the gradient, (0.4, 0.3), is ½ (0.8, 0.6): the multiplier is ½.

    Args:
        x: points (..., 2).

    Returns:
        Values (...).
    """
    return (x[..., 0] - 0.6) ** 2 + (x[..., 1] - 0.3) ** 2 / 2


def constraint(x: Tensor) -> Tensor:
    """C(x) = ‖x‖² - 1 of points (..., 2), as (...): 0 on the circle only."""
    return x.square().sum(-1) - 1


def dissolving_map(x: Tensor) -> Tensor:
    """A(x) = 2x / (1 + ‖x‖²) of points (..., 2), as (..., 2)."""
    return 2 * x / (1 + x.square().sum(-1, keepdim=True))


def dissolved(f: Function, beta: float) -> Function:
    """The constraint dissolving function h(x) = f(A(x)) + (β/2) C(x)².

    Raises:
        ValueError: ``beta`` is negative.
    """
    _check_beta(beta)
    return lambda x: f(dissolving_map(x)) + beta / 2 * constraint(x) ** 2


def penalised(f: Function, beta: float) -> Function:
    """The quadratic penalty function f(x) + (β/2) C(x)²: the same without the map.

    Raises:
        ValueError: ``beta`` is negative.
    """
    _check_beta(beta)
    return lambda x: f(x) + beta / 2 * constraint(x) ** 2


def _check_beta(beta: float) -> None:
    if beta < 0:
        raise ValueError(f"beta is {beta}, but must be at least 0")


def descend(
    function: Function, start: Sequence[float], lr: float, steps: int
) -> Tensor:
    """Minimise a function by ``torch.optim.SGD``, which knows of no constraint.

    Args:
        function: what to minimise.
        start: x₁ and x₂.
        lr: learning rate, above 0; one too large runs away to values that are not
            finite, and the path shows it.
        steps: at least 1.

    Returns:
        The path (steps + 1, 2), float64, from the start on.

    Raises:
        ValueError: ``lr`` or ``steps`` is out of its range.
    """
    if not lr > 0:
        raise ValueError(f"lr is {lr}, but must be above 0")
    if steps < 1:
        raise ValueError(f"steps is {steps}, but must be at least 1")
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=lr)
    path = [x.detach().clone()]
    for _ in range(steps):
        optimizer.zero_grad()
        function(x).backward()
        optimizer.step()
        path.append(x.detach().clone())
    return torch.stack(path)


def violations(path: Tensor) -> tuple[Tensor, Tensor]:
    """‖C(x)‖ and ‖C(A(x))‖ of points (..., 2), each as (...).

    The second is C(x)² / (2 + C(x))², near the circle a quarter of the first's
    square; computed so, it is right also where 1 - ‖A(x)‖² would round to 0.
    """
    c = constraint(path)
    return c.abs(), (c / (2 + c)) ** 2


def on_grid(
    function: Function, extent: float, points: int = 161
) -> tuple[Tensor, Tensor]:
    """Values of a function on a square grid around the origin, for a landscape.

    Args:
        function: to be drawn.
        extent: the grid runs from -extent to extent on both axes.
        points: along each axis.

    Returns:
        The axis (points,) and the values (points, points), x₁ along the columns.
    """
    axis = torch.linspace(-extent, extent, points, dtype=torch.float64)
    return axis, function(torch.cartesian_prod(axis, axis).reshape(points, points, 2)).T


def on_circle(angle: Tensor) -> Tensor:
    """Points (..., 2) of the circle at angles (...) in radians."""
    return torch.stack([angle.cos(), angle.sin()], -1)


def circle_stationary_points(f: Function, scan: int = 4096) -> Tensor:
    """Stationary points (k, 2) of f on the circle, the one with the least f first.

    They are the roots of a derivative by the angle, found by its change of sign
    between ``scan`` angles and then by bisection: no map, no penalty.

    Args:
        f: the objective.
        scan: angles; two roots closer than 2π/scan may be missed.
    """
    slope = vmap(grad(lambda angle: f(on_circle(angle))))
    angles = torch.linspace(-math.pi, math.pi, scan + 1, dtype=torch.float64)
    # Roots on the scanned angles themselves would have no sign to change.
    angles = angles + math.pi / scan / 7
    signs = slope(angles).sign()
    changes = signs[1:] != signs[:-1]
    low, high, sign = angles[:-1][changes], angles[1:][changes], signs[:-1][changes]
    for _ in range(60):
        middle = (low + high) / 2
        before = slope(middle).sign() == sign
        low, high = torch.where(before, middle, low), torch.where(before, high, middle)
    points = on_circle((low + high) / 2)
    return points[f(points).argsort()]


def stationary_points(function: Function, extent: float = 2.5) -> Tensor:
    """Stationary points (k, 2) of a function in a square around the origin.

    Newton's method from a grid of starts; what it ends in counts if the gradient is 0
    there, and once.

    Args:
        function: with isolated stationary points.
        extent: half the side of the square.
    """
    slope, bend = vmap(grad(function)), vmap(hessian(function))
    axis = torch.linspace(-extent, extent, _STARTS, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    for _ in range(40):
        step = torch.linalg.solve_ex(bend(points), slope(points)[..., None]).result
        length = step.norm(dim=1, keepdim=True).clamp(min=_STRIDE)
        points = points - _STRIDE * (step / length)[..., 0]
    found = (slope(points).norm(dim=1) < 1e-9) & (points.abs().amax(1) <= extent)
    return _distinct(points[found])


def _distinct(points: Tensor, apart: float = 1e-5) -> Tensor:
    """Of points (n, 2), one of each group that is closer than ``apart``."""
    near = torch.cdist(points, points) < apart
    return points[near.long().argmax(1) == torch.arange(len(points))]


def curvatures(function: Function, points: Tensor) -> Tensor:
    """Eigenvalues (..., 2) of the Hessian at points (..., 2), ascending.

    On the circle's stationary points those of the dissolved function are, along the
    radius, 4β - λ with λ = :func:`multiplier`, and along the tangent t, tᵀ∇²f t - λ,
    which is the curvature of f on the circle.
    """
    flat = points.reshape(-1, 2)
    return torch.linalg.eigvalsh(vmap(hessian(function))(flat)).reshape(points.shape)


def multiplier(f: Function, x: Tensor) -> float:
    """λ = xᵀ∇f(x) at a stationary point x (2,) of f on the circle.

    Where it is above 0, f falls towards the inside, and h has its minimum at x only
    if β is above λ/4, by the curvature along the radius; see :func:`curvatures`.
    """
    return float(x @ grad(f)(x))


def spurious_minima(f: Function, beta: float) -> Tensor:
    """Minima (k, 2) of the dissolved function that are not on the circle."""
    h = dissolved(f, beta)
    points = stationary_points(h)
    least = curvatures(h, points)[:, 0]
    return points[(least > 0) & (constraint(points).abs() > _ON_CIRCLE)]


def smallest_safe_beta(f: Function, high: float = 8.0, tol: float = 1e-4) -> float:
    """The β from which on the dissolved function has no minimum off the circle.

    Bisection, which takes it that no spurious minimum comes back as β grows.

    Args:
        f: the objective.
        high: a β that is large enough.
        tol: the answer is safe, and at most so much above the smallest that is.

    Raises:
        ValueError: there still is a spurious minimum at ``high``.
    """
    if len(spurious_minima(f, high)):
        raise ValueError(f"high is {high}, where a minimum off the circle is left")
    low = 0.0
    while high - low > tol:
        middle = (low + high) / 2
        if len(spurious_minima(f, middle)):
            low = middle
        else:
            high = middle
    return high


def largest_stable_lr(function: Function, minimum: Tensor, steps: int = 200) -> float:
    """The learning rate up to which gradient descent comes back to a minimum.

    Measured: bisection to a thousandth, each trial ``steps`` steps of
    :func:`descend` from a point beside the minimum. It should be 2 over the largest
    of :func:`curvatures`.

    Args:
        function: to be descended.
        minimum: (2,) float64, isolated.
        steps: of a trial; the more, the finer it tells stable from unstable.
    """

    def stable(lr: float) -> bool:
        # Not along an axis or the radius, so that no direction is left out.
        nudge = _NUDGE * on_circle(torch.tensor(1.0, dtype=torch.float64))
        path = descend(function, (minimum + nudge).tolist(), lr, steps)
        # A distance that is not finite compares as False, which is right.
        return bool((path[-1] - minimum).norm() < _NUDGE)

    low, high = 0.0, 1e-3
    while stable(high):
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return (low + high) / 2
