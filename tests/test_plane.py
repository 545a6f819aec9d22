"""Constraint dissolving on the circle: against formulas, and where it goes wrong."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap

from cdopt_tutorial.dissolving import plane

OPTIMUM = torch.tensor([0.8, 0.6], dtype=torch.float64)

seeds = st.integers(0, 2**32 - 1)
betas = st.floats(0.0, 20.0)


def quadratic(seed: int):
    """½ (x - c)ᵀQ(x - c) with Q positive definite and c in the disk; also Q and c."""
    rng = np.random.default_rng(seed)
    turn, radius, side = rng.uniform(0, 2 * math.pi, 3)
    axes = plane.on_circle(torch.tensor([turn, turn + math.pi / 2]).double())
    matrix = axes.T @ torch.diag(torch.tensor(rng.uniform(0.3, 3, 2))) @ axes
    centre = 0.8 * math.sin(radius) * plane.on_circle(torch.tensor(side).double())

    def f(x):
        return ((x - centre) @ matrix * (x - centre)).sum(-1) / 2

    return f, matrix, centre


def multiplier(f, x: torch.Tensor) -> float:
    """λ = xᵀ∇f(x): above 0, f falls towards the inside."""
    return float(x @ grad(f)(x))


def stationary_on_circle(f) -> torch.Tensor:
    """Roots (k, 2) of the slope along the circle, the least f first; by bisection."""
    slope = vmap(grad(lambda angle: f(plane.on_circle(angle))))
    # Shifted, since a root exactly at a scanned angle would show no change of sign.
    angles = torch.linspace(0, 2 * math.pi, 4097, dtype=torch.float64) + 1e-4
    changes = slope(angles).sign().diff().nonzero()[:, 0]
    low, high = angles[changes], angles[changes + 1]
    for _ in range(50):
        middle = (low + high) / 2
        is_low = slope(middle).sign() == slope(low).sign()
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    points = plane.on_circle(low)
    return points[f(points).argsort()]


def well_posed(f) -> torch.Tensor:
    """Stationary points of f on the circle, none of them nearly degenerate."""
    found = stationary_on_circle(f)
    assume(plane.curvatures(plane.dissolved(f, 50.0), found).abs().min() > 0.05)
    return found


@given(seeds, betas)
@settings(max_examples=10)
def test_dissolving_is_exact_for_every_beta(seed, beta):
    """What is stationary for f on the circle is so for h, with known curvatures."""
    f, matrix, _ = quadratic(seed)
    h = plane.dissolved(f, beta)
    for x in stationary_on_circle(f):
        assert grad(h)(x).norm() < 1e-12 * (1 + beta)
        tangent = torch.stack([-x[1], x[0]])
        slope = multiplier(f, x)
        along, across = 4 * beta - slope, tangent @ matrix @ tangent - slope
        expected = torch.tensor(sorted([along, across.item()]), dtype=torch.float64)
        found = plane.curvatures(h, x)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


@given(seeds)
@settings(max_examples=4)
def test_with_a_large_beta_the_minima_are_those_on_the_circle(seed):
    f, *_ = quadratic(seed)
    on_circle = well_posed(f)
    h = plane.dissolved(f, 50.0)
    assert len(plane.spurious_minima(f, 50.0)) == 0
    found = plane.stationary_points(h)
    curvatures = plane.curvatures(h, found)
    minima = found[curvatures[:, 0] > 0]
    best = on_circle[plane.curvatures(h, on_circle)[:, 0] > 0]
    assert len(minima) == len(best) >= 1
    assert torch.cdist(minima, best).amin(1).max() < 1e-8
    # Of a function that grows to all sides the indices add up to one: none is missed.
    assume(curvatures.abs().min() > 1e-3)
    assert curvatures.prod(1).sign().sum() == 1


def test_the_smallest_safe_beta_is_above_what_the_curvature_asks():
    safe = plane.smallest_safe_beta(plane.objective, high=1, tol=1e-3)
    assert safe > multiplier(plane.objective, OPTIMUM) / 4
    assert len(plane.spurious_minima(plane.objective, safe)) == 0
    assert len(plane.spurious_minima(plane.objective, safe - 2e-3)) == 1
    with pytest.raises(ValueError, match="high is 0.2"):
        plane.smallest_safe_beta(plane.objective, high=0.2, tol=1e-3)


@given(seeds)
@settings(max_examples=4)
def test_the_penalty_alone_misses_the_circle_by_half_the_multiplier_over_beta(seed):
    f, *_ = quadratic(seed)
    best = well_posed(f)[0]
    slope = multiplier(f, best)
    errors = []
    for beta in (100.0, 1000.0):
        p = plane.penalised(f, beta)
        found = plane.stationary_points(p)
        nearest = found[(found - best).norm(dim=1).argmin()]
        assert plane.curvatures(p, nearest)[0] > 0
        errors.append(abs(beta * plane.constraint(nearest) + slope / 2))
    assert errors[1] < 0.2 * errors[0] + 1e-9
    assert errors[1] < 0.01 * (1 + abs(slope)) ** 2


@pytest.mark.parametrize("beta", [0.3, 8.0])
def test_the_largest_stable_lr_is_two_over_the_curvature(beta):
    h = plane.dissolved(plane.objective, beta)
    curvature = max(4 * beta - 0.5, 0.86)
    assert plane.largest_stable_lr(h, OPTIMUM) == pytest.approx(2 / curvature, rel=0.01)


def test_grid_has_the_first_coordinate_along_the_columns():
    axis, values = plane.on_grid(lambda x: x[..., 0] + 10 * x[..., 1], 2.0, 5)
    assert axis.tolist() == [-2, -1, 0, 1, 2]
    assert values[4, 0] == -2 + 20 and values[0, 4] == 2 - 20
