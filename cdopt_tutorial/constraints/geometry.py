"""The geometry of a weight's manifold: the map, the constraint, the nearest point."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cdopt.manifold_torch import oblique_torch, sphere_torch, stiefel_torch
from torch import Tensor

from cdopt_tutorial.constraints.formulas import (
    Sums,
    radial_map,
    stiefel_constraint,
    stiefel_map,
)

NEAR = 0.5  # ‖C‖ of a block below which Newton-Schulz converges, faster than an SVD


@dataclass(frozen=True)
class Geometry:
    """The manifold of a weight. Axes after the second count as columns."""

    make: Callable[..., Any]  #: CDOpt's class of the manifold
    blocks: int = 1  #: equal blocks of rows, each of which is on a manifold of its own
    #: whether CDOpt's X is the transpose of the weight, or of a block; not for Stiefel,
    #: where X is the weight, and its short side becomes orthonormal
    transpose: bool = False

    @property
    def axes(self) -> tuple[int, ...] | None:
        """Those of X whose norm is to be 1; None if that is not the constraint."""
        return {oblique_torch: (-1,), sphere_torch: (-2, -1)}.get(self.make)

    def map_point(self, x: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
        """A(X), and ‖C(X)‖², a scalar, of X or of the part of it that a rank has."""
        if self.make is stiefel_torch:
            return stiefel_map(x, sums)
        if self.axes is not None:
            return radial_map(x, self.axes, sums)
        manifold = self._of(x)
        return manifold.A(x), manifold.C(x).square().sum()

    def distance_of_point(self, x: Tensor, sums: Sums) -> Tensor:
        """‖C(X)‖², a scalar."""
        if self.make is stiefel_torch:  # without the product of the map
            return sums.across(stiefel_constraint(x, sums).square().sum())
        return self.map_point(x, sums)[1]

    def nearest_point(self, x: Tensor) -> Tensor:
        """The nearest feasible X, of a whole one."""
        if self.make is stiefel_torch:
            return polar(x)
        if self.axes is None:
            return self._of(x).Post_process(x)
        norm = torch.linalg.vector_norm(x, dim=self.axes, keepdim=True)
        x = torch.where(norm > 0, x, 1.0)  # all points of norm 1 are equally near to 0
        return x / torch.linalg.vector_norm(x, dim=self.axes, keepdim=True)

    def point(self, weight: Tensor) -> Tensor:
        """X: the weight as a matrix (rows, columns), or (blocks, rows, columns)."""
        x = weight.flatten(1) if weight.ndim > 2 else weight
        x = x.unflatten(0, (self.blocks, -1)) if self.blocks > 1 else x
        return x.mT if self.transpose else x

    def weight(self, x: Tensor, shape: torch.Size) -> Tensor:
        """The weight, or the part of it, that belongs to an X."""
        return (x.mT if self.transpose else x).reshape(shape)

    def _of(self, x: Tensor) -> Any:
        """CDOpt's manifold, whose constants have one shape, dtype and device."""
        return self.make(tuple(x.shape), device=x.device, dtype=x.dtype)


def polar(x: Tensor) -> Tensor:
    """The nearest matrices whose short side is orthonormal, of X (..., n, p)."""
    if x.shape[-2] < x.shape[-1]:
        return polar(x.mT).mT
    c = stiefel_constraint(x)
    while (off := c.flatten(-2).norm(dim=-1).max().item()) < NEAR:
        x = x - 0.5 * x @ c  # one step of Newton-Schulz, the map A
        if off * off < torch.finfo(x.dtype).eps:  # the step leaves ¾ of the square
            return x
        c = stiefel_constraint(x)
    u, _, v = torch.svd(x)
    return u @ v.mT
