"""The maps and penalties of `constraints` equal CDOpt's, with their derivatives."""

import math
from unittest import mock

import pytest
import torch
from cdopt.manifold_torch import stiefel_torch
from constrained import F64, drawn, near
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from cdopt_tutorial import constraints
from cdopt_tutorial.constraints import formulas
from cdopt_tutorial.constraints.surface import surface

size = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)
shapes = st.tuples(size, size) | st.tuples(st.integers(1, 4), size, size)
each_manifold = pytest.mark.parametrize("manifold", constraints.MANIFOLDS)


def assert_near(one, other):
    """To 1e-12 of the largest element."""
    assert one.shape == other.shape
    largest = max(one.abs().max(), other.abs().max(), torch.ones((), **F64))
    assert (one - other).abs().max() <= 1e-12 * largest


def by_cdopt(x):
    """CDOpt's A(X) and ‖C(X)‖² of each tall matrix, or of the wide one's transpose."""
    wide = x.shape[-2] < x.shape[-1]
    tall = x.mT if wide else x
    mapped, distance = [], 0
    for matrix in tall.reshape(-1, *tall.shape[-2:]):
        manifold = stiefel_torch(tuple(matrix.shape), **F64)
        mapped.append(manifold.A(matrix))
        distance = distance + manifold.C(matrix).square().sum()
    mapped = torch.stack(mapped).reshape(tall.shape)
    return mapped.mT if wide else mapped, distance


def derivatives(function, x, seed):
    """Gradient of a random combination of both results, and its own gradient."""
    mapped, distance = function(x)
    onto, along = drawn(x.shape, seed + 1), drawn(x.shape, seed + 2)
    total = (mapped * onto).sum() + 0.3 * distance
    (first,) = torch.autograd.grad(total, x, create_graph=True)
    (second,) = torch.autograd.grad((first * along).sum(), x)
    return mapped, distance, first, second


@given(shapes, seeds)
@example((1, 1), 0)
@example((7, 7), 0)
@example((3, 2, 9), 0)
@settings(max_examples=25)
def test_the_map_is_cdopts(shape, seed):
    x = drawn(shape, seed, requires_grad=True)
    ours = derivatives(constraints.stiefel_map, x, seed)
    theirs = derivatives(by_cdopt, x, seed)
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one.detach(), other.detach())


@each_manifold
@given(st.integers(1, 4), shapes, seeds)
@settings(max_examples=20)
def test_a_surface_is_that_of_the_formula_in_each_block(manifold, blocks, shape, seed):
    w = drawn((blocks * shape[0], *shape[1:]), seed)
    on, total = surface(manifold, w, blocks), 0
    mapped, distance = on.map_and_distance(w)
    for part, of_part in zip(w.chunk(blocks), mapped.chunk(blocks), strict=True):
        rows = part.flatten(1)
        if manifold == "stiefel":  # of the short side, whichever that is
            expected, off = by_cdopt(rows)
        else:
            axes = 1 if manifold == "oblique" else (0, 1)
            squares = rows.square().sum(axes, keepdim=True)
            expected, off = 2 * rows / (1 + squares), (squares - 1).square().sum()
        assert_near(of_part, expected.reshape(part.shape))
        total = total + off
    assert_near(distance, total)
    assert_near(on.distance(w), total)


@each_manifold
@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (4, 4), (4, 2, 3)])
def test_the_nearest_is_feasible_and_stays(manifold, shape):
    w = drawn(shape, 0)
    on = surface(manifold, w)
    found = on.nearest(w)
    assert on.distance(found).sqrt() < 1e-12
    assert_near(on.nearest(found), found)
    assert_near(on.map_and_distance(found)[0], found)


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1e-2, 0.2, 3.0])
@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (15, 15), (3, 14, 6)])
def test_the_nearest_is_the_polar_factor_however_far(size, shape):
    """Close to the manifold by products, elsewhere by an SVD."""
    w = nn.init.orthogonal_(torch.empty(shape[-2:], **F64))
    w = w.expand(shape) + size * drawn(shape, 1)
    stacked = w.flatten(0, -2)
    on = surface("stiefel", stacked, math.prod(shape[:-2]))
    u, _, v = torch.linalg.svd(w, full_matrices=False)
    near(on.nearest(stacked).reshape(shape), u @ v)


def test_a_part_refuses_a_second_derivative():
    """A mesh without ranks: its sums are those of this process."""
    sums = formulas.Sums(mesh=mock.Mock(get_group=lambda dim: None), inner=(0,))
    x = drawn((4, 3), 0, requires_grad=True)
    with mock.patch("torch.distributed.all_reduce"):
        for found in formulas.stiefel_map(x, sums), formulas.radial_map(x, (0,), sums):
            total = sum(each.sum() for each in found)
            with pytest.raises(RuntimeError, match="in shards has no second deriv"):
                torch.autograd.grad(total, x, create_graph=True)
