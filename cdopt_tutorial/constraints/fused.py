"""The maps of the manifolds together with their distances, from one shared sum.

The sum may run over several ranks, each with a part of the weight: then each rank maps
its own part, and only the sums cross the wire.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Sums:
    """The sums that a map takes over a weight, which may be spread over a mesh.

    X below is (..., n, p), or (..., p, n) if it is wide.
    """

    wide: bool = False  #: whether the rows, not the columns, are to be orthonormal
    mesh: DeviceMesh | None = None  #: of the ranks; None for a whole weight
    inner: tuple[int, ...] = ()  #: dimensions of the mesh that split each sum
    outer: tuple[int, ...] = ()  #: dimensions that share out whole sums
    square: bool = False  #: whether the whole X is square, and so has both sums

    def inside(self, part: Tensor) -> Tensor:
        """Complete, in place, sums to which several ranks contribute."""
        return self._over(self.inner, part)

    def across(self, part: Tensor) -> Tensor:
        """Add up, in place, the separate results of several ranks."""
        return self._over(self.outer, part)

    def gram(self, x: Tensor, y: Tensor) -> Tensor:
        """XᵀY, or XYᵀ if wide, (..., p, p): a transposed view would cost a copy."""
        return self.inside(x @ y.mT if self.wide else x.mT @ y)

    def times(self, x: Tensor, small: Tensor) -> Tensor:
        """X times a symmetric matrix (..., p, p), on the side that fits."""
        return small @ x if self.wide else x @ small

    def less_half(self, base: Tensor, x: Tensor, small: Tensor) -> Tensor:
        """The base minus half of that product, as one operation for a matrix."""
        if base.ndim > 2:
            return base - 0.5 * self.times(x, small)
        return torch.addmm(base, *((small, x) if self.wide else (x, small)), alpha=-0.5)

    def are_differentiated(self) -> bool:
        """Whether a backward pass will itself be differentiated."""
        if torch.is_grad_enabled() and self.mesh is not None:
            raise RuntimeError("a weight in shards has no second derivative: gather it")
        return torch.is_grad_enabled()

    def _over(self, dims: tuple[int, ...], part: Tensor) -> Tensor:
        for dim in dims:
            dist.all_reduce(part, group=self.mesh.get_group(dim))
        return part


def stiefel_map(weight: Tensor, sums: Sums | None = None) -> tuple[Tensor, Tensor]:
    """The map A(X) = X (3 I − XᵀX) / 2 and the squared distance ‖XᵀX − I‖².

    X is the weight (..., n, p) or, if n < p, its transpose, whose rows are then to be
    orthonormal. A(X) has the weight's shape; the distance is a scalar, summed over a
    batch. Both are twice differentiable, together or one after the other; a part of a
    weight needs ``sums``, and is differentiable once. Raises ValueError for fewer than
    two axes. Source: Xiao, Liu and Toh (2023).
    """
    if weight.ndim < 2:
        raise ValueError(f"weight has {weight.ndim} axes, but must have at least 2")
    sums = sums or sums_of(weight)
    with torch.no_grad():
        c = stiefel_constraint(weight, sums)
        product = sums.times(weight, c)
    both = weight, c, product, sums
    return _StiefelMap.apply(*both), _StiefelDistance.apply(*both)


def stiefel_constraint(weight: Tensor, sums: Sums | None = None) -> Tensor:
    """C(X) = XᵀX − I, (..., p, p), with X and the sums of :func:`stiefel_map`."""
    c = (sums or sums_of(weight)).gram(weight, weight)
    c.diagonal(dim1=-2, dim2=-1).sub_(1)
    return c


def sums_of(weight: Tensor) -> Sums:
    """The sums of a whole weight."""
    rows, columns = weight.shape[-2:]
    return Sums(wide=rows < columns, square=rows == columns)


class _StiefelMap(torch.autograd.Function):
    """X to A(X), given C and X C, which the distance needs too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, c: Tensor, product: Tensor, sums: Sums) -> Tensor:
        ctx.save_for_backward(x, c)
        ctx.sums = sums
        return torch.add(x, product, alpha=-0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (x, c), sums = ctx.saved_tensors, ctx.sums
        if sums.are_differentiated():
            c = stiefel_constraint(x, sums)
        inner = sums.gram(x, grad)
        # The gradient through C comes from both sides of the Gram matrix.
        through_c = sums.less_half(grad, x, inner + inner.mT)
        return sums.less_half(through_c, grad, c), None, None, None


class _StiefelDistance(torch.autograd.Function):
    """X to ‖C‖², with its own graph, so that either backward pass may come first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, c: Tensor, product: Tensor, sums: Sums) -> Tensor:
        ctx.save_for_backward(x, product)
        ctx.sums = sums
        flat = c.flatten()
        return sums.across(flat @ flat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (x, product), sums = ctx.saved_tensors, ctx.sums
        if sums.are_differentiated():
            product = sums.times(x, stiefel_constraint(x, sums))
        return product * (4 * grad), None, None, None


class RadialMap(torch.autograd.Function):
    """The map A(X) = 2 X / (1 + s) and the distance Σ (s − 1)², s the sum of squares.

    Takes a part of X, and the axes and ranks of s: one axis for an oblique manifold,
    all for a sphere. Differentiable once. Source: Xiao, Liu and Toh (2023).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axes: tuple[int, ...], sums: Sums
    ) -> tuple[Tensor, Tensor]:
        """A(X) and the distance, a plain scalar."""
        s = sums.inside(x.square().sum(axes, keepdim=True))
        ctx.save_for_backward(x, s)
        ctx.set_materialize_grads(False)  # since each costs a sum over the ranks
        ctx.axes, ctx.sums = axes, sums
        return 2 * x / (1 + s), sums.across((s - 1).square().sum())

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_distance: Tensor | None) -> tuple:
        """The gradient of X, given those of both results."""
        (x, s), sums = ctx.saved_tensors, ctx.sums
        sums.are_differentiated()
        found = torch.zeros_like(x)
        if grad_distance is not None:
            found = found + x * (s - 1) * (4 * grad_distance)
        if grad is not None:
            inner = sums.inside((x * grad).sum(ctx.axes, keepdim=True))
            found = found + (2 * grad - 4 * x * inner / (1 + s)) / (1 + s)
        return found, None, None
