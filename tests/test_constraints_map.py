"""The maps of the manifolds equal CDOpt's, or their formula, with their derivatives."""

import math
from unittest import mock

import cdopt.manifold_torch
import pytest
import torch
from constrained import F64, drawn, near
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from cdopt_tutorial import constraints
from cdopt_tutorial.constraints.manifolds import Oblique, Stiefel, manifold_of
from cdopt_tutorial.constraints.sums import Sums

size = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)
shapes = st.tuples(size, size) | st.tuples(st.integers(1, 4), size, size)


def assert_near(one, other):
    """To 1e-12 of the largest element."""
    assert one.shape == other.shape
    largest = max(one.abs().max(), other.abs().max(), torch.ones((), **F64))
    assert (one - other).abs().max() <= 1e-12 * largest


def by_cdopt(manifold, block):
    """CDOpt's A(X) and ‖C(X)‖² of a block, whose short side Stiefel takes."""
    x = block.flatten(1)
    wide = manifold == "stiefel" and x.shape[0] < x.shape[1]
    x = x.mT if wide else x
    on = getattr(cdopt.manifold_torch, f"{manifold}_torch")(tuple(x.shape), **F64)
    mapped = on.A(x)
    mapped = mapped.mT if wide else mapped
    return mapped.reshape(block.shape), on.C(x).square().sum()


@pytest.mark.parametrize("manifold", constraints.MANIFOLDS)
@given(st.integers(1, 4), shapes, seeds)
@example(1, (1, 1), 0)
@example(1, (7, 7), 0)
@settings(max_examples=20)
def test_each_block_is_mapped_as_by_cdopt_and_the_nearest_is_feasible(
    manifold, blocks, shape, seed
):
    w = drawn((blocks * shape[0], *shape[1:]), seed)
    on = manifold_of(manifold, w, blocks)
    expected = [by_cdopt(manifold, block) for block in w.chunk(blocks)]
    mapped, distance = on.map_and_distance(w)
    assert_near(mapped, torch.cat([block for block, _ in expected]))
    assert_near(distance, sum(of_block for _, of_block in expected))
    assert_near(on.distance(w), distance)
    nearest = on.nearest(w)
    assert on.distance(nearest).sqrt() < 1e-12
    assert_near(on.nearest(nearest), nearest)
    assert_near(on.map_and_distance(nearest)[0], nearest)


def test_a_batch_is_mapped_matrix_by_matrix():
    x = drawn((3, 2, 9), 0)
    mapped, distance = constraints.stiefel_map(x)
    one_by_one = [constraints.stiefel_map(matrix) for matrix in x]
    assert_near(mapped, torch.stack([each for each, _ in one_by_one]))
    assert_near(distance, sum(each for _, each in one_by_one))
    assert_near(constraints.stiefel_constraint(x).square().sum(), distance)


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1e-2, 0.2, 3.0])
@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (15, 15), (3, 14, 6)])
def test_the_nearest_is_the_polar_factor_however_far(size, shape):
    """Close to the manifold by products, elsewhere by an SVD."""
    w = nn.init.orthogonal_(torch.empty(shape[-2:], **F64))
    w = w.expand(shape) + size * drawn(shape, 1)
    stacked = w.flatten(0, -2)
    on = manifold_of("stiefel", stacked, math.prod(shape[:-2]))
    u, _, v = torch.linalg.svd(w, full_matrices=False)
    near(on.nearest(stacked).reshape(shape), u @ v)


def test_a_part_refuses_a_second_derivative():
    """A mesh without ranks: its sums are those of this process."""
    sums = Sums(mesh=mock.Mock(get_group=lambda dim: None), inner=(0,))
    x = drawn((4, 3), 0, requires_grad=True)
    with mock.patch("torch.distributed.all_reduce"):
        for manifold in Stiefel(), Oblique():
            total = sum(result.sum() for result in manifold.map_point(x, sums))
            with pytest.raises(RuntimeError, match="in shards has no second deriv"):
                torch.autograd.grad(total, x, create_graph=True)
