"""The maps and penalties of `constraints` equal CDOpt's, with their derivatives."""

from unittest import mock

import pytest
import torch
from cdopt.manifold_torch import stiefel_torch
from constrained import F64, drawn
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cdopt_tutorial import constraints
from cdopt_tutorial.constraints import formulas
from cdopt_tutorial.constraints.surface import surface

size = st.integers(1, 9)
MANIFOLDS = st.sampled_from(sorted(constraints.MANIFOLDS))
seeds = st.integers(0, 2**32 - 1)
shapes = st.tuples(size, size) | st.tuples(st.integers(1, 4), size, size)


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


class TestStiefelMap:
    @given(shapes, seeds)
    @example((1, 1), 0)
    @example((7, 7), 0)
    @example((3, 2, 9), 0)
    @settings(max_examples=25)
    def test_equals_cdopts(self, shape, seed):
        x = drawn(shape, seed, requires_grad=True)
        ours = derivatives(constraints.stiefel_map, x, seed)
        theirs = derivatives(by_cdopt, x, seed)
        for one, other in zip(ours, theirs, strict=True):
            assert_near(one.detach(), other.detach())

    def test_refuses_what_is_no_matrix(self):
        with pytest.raises(ValueError, match="axes, but must have at least 2"):
            constraints.stiefel_map(torch.ones(4))


class TestSurface:
    """The formulas of the manifolds: by rows, by blocks, turned."""

    @given(shapes, seeds, MANIFOLDS)
    @settings(max_examples=60)
    def test_is_that_of_the_formula(self, shape, seed, manifold):
        w = drawn(shape, seed)
        on, rows = surface(manifold, w), w.flatten(1)
        if manifold == "stiefel":  # of the short side, whichever that is
            expected, off = by_cdopt(rows)
        else:
            axes = 1 if manifold == "oblique" else (0, 1)
            squares = rows.square().sum(axes, keepdim=True)
            expected, off = 2 * rows / (1 + squares), (squares - 1).square().sum()
        mapped, distance = on.map_and_distance(w)
        assert_near(mapped, expected.reshape(shape))
        assert_near(distance, off)
        assert_near(on.distance(w), off)

    @given(
        st.integers(1, 4),
        size,
        size,
        seeds,
        MANIFOLDS,
    )
    @settings(max_examples=20)
    def test_blocks_are_each_on_their_own(self, blocks, rows, columns, seed, manifold):
        w = drawn((blocks * rows, columns), seed)
        mapped, distance = surface(manifold, w, blocks).map_and_distance(w)
        total = 0
        for part, of_part in zip(w.chunk(blocks), mapped.chunk(blocks), strict=True):
            alone, its_distance = surface(manifold, part).map_and_distance(part)
            assert_near(of_part, alone)
            total = total + its_distance
        assert_near(distance, total)

    @pytest.mark.parametrize("manifold", constraints.MANIFOLDS)
    @pytest.mark.parametrize("shape", [(7, 3), (3, 7), (4, 4), (4, 2, 3)])
    def test_the_nearest_is_feasible_and_stays(self, manifold, shape):
        w = drawn(shape, 0)
        on = surface(manifold, w)
        found = on.nearest(w)
        assert on.distance(found).sqrt() < 1e-12
        if manifold == "stiefel":  # no feasible point is nearer
            stretch = torch.linalg.svdvals(w.flatten(1)) - 1
            assert_near((found - w).norm(), stretch.norm())
        assert_near(on.nearest(found), found)
        assert_near(on.map_and_distance(found)[0], found)


def test_a_part_refuses_a_second_derivative():
    """A mesh without ranks: its sums are those of this process."""
    mesh = mock.Mock(get_group=lambda dim: None)
    sums = formulas.Sums(mesh=mesh, inner=(0,))
    x = drawn((4, 3), 0, requires_grad=True)
    with mock.patch("torch.distributed.all_reduce"):
        for found in formulas.stiefel_map(x, sums), formulas.radial_map(x, (0,), sums):
            total = sum(each.sum() for each in found)
            with pytest.raises(RuntimeError, match="in shards has no second deriv"):
                torch.autograd.grad(total, x, create_graph=True)
