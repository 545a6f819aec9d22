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
    """½ xᵀQx; where it is stationary on the circle, (4, 2), and the multipliers.

    These are the eigenvectors and eigenvalues of Q, the least first.
    """
    rng = np.random.default_rng(seed)
    turn, values = rng.uniform(0, 2 * math.pi), torch.tensor(rng.uniform(-3, 3, 2))
    values = values.sort().values
    axes = plane.on_circle(turn + torch.tensor([0, math.pi / 2], dtype=torch.float64))
    matrix = axes.T @ torch.diag(values) @ axes
    points = torch.cat([axes, -axes])
    return lambda x: (x @ matrix * x).sum(-1) / 2, points, values.repeat(2)


@given(seeds, betas)
@settings(max_examples=10)
def test_dissolving_is_exact_for_every_beta(seed, beta):
    """What is stationary for f on the circle is so for h, with known curvatures."""
    f, points, values = quadratic(seed)
    h = plane.dissolved(f, beta)
    assert vmap(grad(h))(points).norm(dim=1).max() < 1e-12 * (1 + beta)
    radial, tangent = 4 * beta - values, values.flip(0) - values
    expected = torch.stack([radial, tangent], 1).sort().values
    found = plane.curvatures(h, points)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


@given(seeds)
@settings(max_examples=4)
def test_with_a_large_beta_the_minima_are_those_on_the_circle(seed):
    f, points, values = quadratic(seed)
    assume(values[1] - values[0] > 0.05)
    h = plane.dissolved(f, 50.0)
    assert len(plane.spurious_minima(f, 50.0)) == 0
    found = plane.stationary_points(h)
    curvatures = plane.curvatures(h, found)
    minima = found[curvatures[:, 0] > 0]
    assert len(minima) == 2
    assert torch.cdist(points[::2], minima).amin(1).max() < 1e-8
    # Of a function that grows to all sides the indices add up to one: none is missed.
    assume(curvatures.abs().min() > 1e-3)
    assert curvatures.prod(1).sign().sum() == 1


def test_the_smallest_safe_beta_is_above_what_the_curvature_asks():
    safe = plane.smallest_safe_beta(plane.objective, high=1, tol=1e-3)
    assert safe > 0.5 / 4  # a quarter of the multiplier
    assert len(plane.spurious_minima(plane.objective, safe)) == 0
    for scale in 1.0, 0.01:  # however flat it is
        f = lambda x, scale=scale: scale * plane.objective(x)  # noqa: E731
        assert len(plane.spurious_minima(f, scale * (safe - 2e-3))) == 1
    with pytest.raises(ValueError, match="high is 0.2"):
        plane.smallest_safe_beta(plane.objective, high=0.2, tol=1e-3)


@pytest.mark.parametrize("beta", [0.3, 8.0])
def test_the_largest_stable_lr_is_two_over_the_curvature(beta):
    h = plane.dissolved(plane.objective, beta)
    curvature = max(4 * beta - 0.5, 0.86)
    assert plane.largest_stable_lr(h, OPTIMUM) == pytest.approx(2 / curvature, rel=0.01)


def test_grid_has_the_first_coordinate_along_the_columns():
    axis, values = plane.on_grid(lambda x: x[..., 0] + 10 * x[..., 1], 2.0, 5)
    assert axis.tolist() == [-2, -1, 0, 1, 2]
    assert values[4, 0] == -2 + 20 and values[0, 4] == 2 - 20
