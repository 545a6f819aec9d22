"""Constraint dissolving where it can be seen: the circle x₁² + x₂² = 1 in the plane.

A *function* below is any smooth map of points (..., 2) to values (...). Source: Xiao,
Liu and Toh, Dissolving Constraints for Riemannian Optimization, Mathematics of
Operations Research, 2023: its β is twice CDOpt's ``penalty_param``.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

Function = Callable[[Tensor], Tensor]

_EXTENT = 2.5  # the search for stationary points covers this much of each axis
_STARTS = 21  # starts of Newton's method along each axis
_STRIDE = 0.3  # its longest step, so that it stays in the searched region
_NUDGE = 1e-5  # how far from the minimum a test of stability starts


def objective(x: Tensor) -> Tensor:
    """(x₁ - 0.6)² + ½ (x₂ - 0.3)², with its minimum in the plane off the circle.

    Its only minimum on the circle is 0.085 at (0.8, 0.6), where the multiplier is ½.
    """
    return (x[..., 0] - 0.6) ** 2 + (x[..., 1] - 0.3) ** 2 / 2


def constraint(x: Tensor) -> Tensor:
    """C(x) = ‖x‖² - 1 of points (..., 2), as (...): 0 only on the circle."""
    return x.square().sum(-1) - 1


def dissolving_map(x: Tensor) -> Tensor:
    """A(x) = 2x / (1 + ‖x‖²) of points (..., 2), as (..., 2)."""
    return 2 * x / (1 + x.square().sum(-1, keepdim=True))


def dissolved(f: Function, beta: float) -> Function:
    """The constraint dissolving function h(x) = f(A(x)) + (β/2) C(x)², β at least 0."""
    return penalised(f, beta, dissolving_map)


def penalised(f: Function, beta: float, mapping: Function = lambda x: x) -> Function:
    """f(x) + (β/2) C(x)², with x mapped for f."""
    return lambda x: f(mapping(x)) + beta / 2 * constraint(x) ** 2


def descend(
    function: Function, start: Sequence[float], lr: float, steps: int
) -> Tensor:
    """The path (steps + 1, 2) of ``torch.optim.SGD``, float64, from (x₁, x₂)."""
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer, path = torch.optim.SGD([x], lr=lr), [x.detach().clone()]
    for _ in range(steps):
        optimizer.zero_grad()
        function(x).backward()
        optimizer.step()
        path.append(x.detach().clone())
    return torch.stack(path)


def on_grid(function: Function, extent: float, size: int = 81) -> tuple[Tensor, Tensor]:
    """An axis (size,) around 0, and values (size, size), x₁ along the columns."""
    axis = torch.linspace(-extent, extent, size, dtype=torch.float64)
    return axis, function(torch.cartesian_prod(axis, axis).reshape(size, size, 2)).T


def on_circle(angle: Tensor) -> Tensor:
    """Points (..., 2) of the circle at angles (...) in radians."""
    return torch.stack([angle.cos(), angle.sin()], -1)


def stationary_points(function: Function) -> Tensor:
    """Isolated stationary points (k, 2) near 0, by Newton's method from a grid."""
    axis = torch.linspace(-_EXTENT, _EXTENT, _STARTS, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    slope, bend = vmap(grad(function)), vmap(jacrev(grad(function)))
    for _ in range(40):
        step = torch.linalg.solve_ex(bend(points), slope(points)).result
        length = step.norm(dim=1, keepdim=True).clamp(min=_STRIDE)
        points = points - _STRIDE * step / length
    inside = points.abs().amax(1) <= _EXTENT
    points = points[inside & (slope(points).norm(dim=1) < 1e-9)]
    near = torch.cdist(points, points) < 1e-5  # the same point
    return points[near.long().argmax(1) == torch.arange(len(points))]


def curvatures(function: Function, points: Tensor) -> Tensor:
    """Eigenvalues (..., 2) of the Hessian at points (..., 2), ascending.

    For the dissolved function at a stationary point x of f on the circle, they are
    4β - λ along the radius, with λ = xᵀ∇f(x), and tᵀ∇²f t - λ along the tangent t.
    """
    bend = vmap(jacrev(grad(function)))(points.reshape(-1, 2))
    return torch.linalg.eigvalsh(bend).reshape(points.shape)


def spurious_minima(f: Function, beta: float) -> Tensor:
    """Minima (k, 2) of the dissolved function off the circle."""
    points = stationary_points(dissolved(f, beta))
    least = curvatures(dissolved(f, beta), points)[:, 0]
    return points[(least > 0) & (constraint(points).abs() > 1e-6)]


def smallest_safe_beta(f: Function, high: float, tol: float) -> float:
    """The smallest β, to ``tol``, without a minimum of the dissolved f off the circle.

    By bisection from 0 to ``high``, on the assumption that no such minimum reappears as
    β grows. Raises ValueError if there is one at ``high``.
    """
    if len(spurious_minima(f, high)):
        raise ValueError(f"high is {high}, where a minimum off the circle is left")
    return _bisect(lambda beta: not len(spurious_minima(f, beta)), 0.0, high, tol)


def largest_stable_lr(function: Function, minimum: Tensor) -> float:
    """The largest learning rate with which gradient descent returns to a minimum (2,).

    By bisection to a thousandth; it should be 2 over the largest curvature there.
    """

    def unstable(lr: float) -> bool:
        # Not along an axis or the radius, so that every direction takes part.
        nudge = _NUDGE * on_circle(torch.tensor(1.0, dtype=torch.float64))
        path = descend(function, (minimum + nudge).tolist(), lr, steps=100)
        return not (path[-1] - minimum).norm() < _NUDGE  # perhaps NaN

    high = 1e-3
    while not unstable(high):
        high *= 2
    return _bisect(unstable, high / 2, high, high / 2000)


def _bisect(holds: Callable, low: float, high: float, tol: float) -> float:
    """Where a condition begins to hold that does so at ``high`` and not at ``low``."""
    while high - low > tol:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
