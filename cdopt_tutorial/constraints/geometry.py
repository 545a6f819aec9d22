"""The manifold of a whole weight: its map, its constraint, the nearest point on it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cdopt.manifold_torch import oblique_torch, sphere_torch, stiefel_torch
from torch import Tensor

from cdopt_tutorial.constraints.formulas import (
    radial_map,
    stiefel_constraint,
    stiefel_map,
    sums_of,
)

NEAR = 0.5  # ‖C‖ of a block below which Newton-Schulz converges, faster than an SVD


@dataclass(frozen=True)
class Geometry:
    """The manifold of a whole weight. Axes after the second count as columns."""

    make: Callable[..., Any]  #: CDOpt's class of the manifold
    blocks: int  #: equal blocks of rows, each of which is on a manifold of its own
    transpose: bool  #: whether CDOpt's X is the transpose of the weight, or of a block

    def map_and_distance(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A(W), shaped as the whole weight, and ‖C(W)‖², a scalar."""
        if self.make is stiefel_torch:
            # This map takes the short side, so there is nothing to transpose.
            mapped, distance = stiefel_map(self.in_blocks(weight))
            return mapped.reshape(weight.shape), distance
        x = self._point(weight)
        if self.axes is not None:
            mapped, distance = radial_map(x, self.axes, sums_of(x))
        else:
            on = self._of(weight)
            mapped, distance = on.A(x), on.C(x).square().sum()
        return self._weight(mapped, weight), distance

    @property
    def axes(self) -> tuple[int, ...] | None:
        """Those of X whose norm is to be 1; None if that is not the constraint."""
        return {oblique_torch: (-1,), sphere_torch: (-2, -1)}.get(self.make)

    def distance(self, weight: Tensor) -> Tensor:
        """‖C(W)‖² of a whole weight, a scalar."""
        if self.make is stiefel_torch:
            return stiefel_constraint(self.in_blocks(weight)).square().sum()
        if self.axes is not None:
            return self.map_and_distance(weight)[1]
        return self._of(weight).C(self._point(weight)).square().sum()

    def nearest(self, weight: Tensor) -> Tensor:
        """The feasible weight nearest to a whole one of float64.

        Raises ValueError if there is none, as where CDOpt has no projection.
        """
        point = self._point(weight)
        if self.make is stiefel_torch:
            point = polar(point)
        elif self.axes is not None:
            norm = torch.linalg.vector_norm(point, dim=self.axes, keepdim=True)
            # All points of norm 1 are equally near to 0.
            point = torch.where(norm > 0, point, 1.0)
            norm = torch.linalg.vector_norm(point, dim=self.axes, keepdim=True)
            point = point / norm
        else:
            point = self._of(weight).Post_process(point)
        return self._weight(point, weight).contiguous()

    def in_blocks(self, weight: Tensor) -> Tensor:
        """The weight as a matrix, (rows, columns), or as (blocks, rows, columns)."""
        matrix = weight.flatten(1) if weight.ndim > 2 else weight
        return matrix.unflatten(0, (self.blocks, -1)) if self.blocks > 1 else matrix

    def _point(self, weight: Tensor) -> Tensor:
        """CDOpt's X: the weight in blocks, transposed if so configured."""
        blocks = self.in_blocks(weight)
        return blocks.mT if self.transpose else blocks

    def _weight(self, point: Tensor, like: Tensor) -> Tensor:
        """The weight that belongs to an X."""
        return (point.mT if self.transpose else point).reshape(like.shape)

    def _of(self, weight: Tensor) -> Any:
        """CDOpt's manifold, whose constants have one shape, dtype and device."""
        shape = tuple(self._point(weight).shape)
        return self.make(shape, device=weight.device, dtype=weight.dtype)


def polar(x: Tensor) -> Tensor:
    """The nearest matrices with orthonormal columns, of X (..., n, p) with n ≥ p."""
    c = stiefel_constraint(x)
    while (off := c.flatten(-2).norm(dim=-1).max().item()) < NEAR:
        x = x - 0.5 * x @ c  # one step of Newton-Schulz, the map A
        if off * off < torch.finfo(x.dtype).eps:  # the step leaves ¾ of the square
            return x
        c = stiefel_constraint(x)
    u, _, v = torch.svd(x)
    return u @ v.mT
