"""The maps of the manifolds with their distances, from one sum for both.

The sums may run over several ranks, each of which has a part of the weight: then each
rank maps its own part, and the sums are all that crosses the wire.
"""

from typing import Any, Protocol

import torch
from torch import Tensor


class Sums(Protocol):
    """Completes, in place, sums to which several ranks contribute."""

    def inside(self, part: Tensor) -> None:
        """Sum over the ranks that have parts of the same columns, or rows."""

    def across(self, part: Tensor) -> None:
        """Sum over the ranks that have different columns, rows or blocks."""


def stiefel_map(
    weight: Tensor, wide: bool | None = None, sums: Sums | None = None
) -> tuple[Tensor, Tensor]:
    """The map A(X) = X (3 I − XᵀX) / 2 and the squared distance ‖XᵀX − I‖².

    X is the weight (..., n, p) or, if n < p, its transpose: the rows are meant to be
    orthonormal then. The map is shaped as the weight; the distance is a scalar, the sum
    over a batch. Both are differentiable, twice, too, together or one after the other.
    A part of a weight needs ``wide``, whether the whole is wider than tall, and
    ``sums``, and is differentiable once. Raises ValueError for fewer than two axes.
    Source: Xiao, Liu and Toh (2023).
    """
    if weight.ndim < 2:
        raise ValueError(f"weight has {weight.ndim} axes, but must have at least 2")
    if wide is None:
        wide = weight.shape[-2] < weight.shape[-1]
    with torch.no_grad():
        c = stiefel_constraint(weight, wide, sums)
        product = _times(weight, c, wide)
    both = weight, c, product, wide, sums
    return _StiefelMap.apply(*both), _StiefelDistance.apply(*both)


def radial_map(x: Tensor, axes: tuple[int, ...], sums: Sums) -> tuple[Tensor, Tensor]:
    """The map A(X) = 2 X / (1 + s) and the distance Σ (s − 1)², s the sum of squares.

    The sum runs over ``axes``, and over ranks: one axis for an oblique manifold, all
    for a sphere. Differentiable once. Source: Xiao, Liu and Toh (2023).
    """
    return _RadialMap.apply(x, axes, sums)


def stiefel_constraint(
    weight: Tensor, wide: bool | None = None, sums: Sums | None = None
) -> Tensor:
    """C(X) = XᵀX − I, (..., p, p), with X and the rest as above."""
    if wide is None:
        wide = weight.shape[-2] < weight.shape[-1]
    c = _inner(weight, weight, wide)
    if sums is not None:
        sums.inside(c)
    c.diagonal(dim1=-2, dim2=-1).sub_(1)
    return c


class _StiefelMap(torch.autograd.Function):
    """X to A(X), given C and X C, which the distance needs as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, c: Tensor, product: Tensor, wide, sums) -> Tensor:
        ctx.save_for_backward(x, c)
        ctx.wide, ctx.sums = wide, sums
        return torch.add(x, product, alpha=-0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (x, c), wide, sums = ctx.saved_tensors, ctx.wide, ctx.sums
        if _is_differentiated(sums):
            c = stiefel_constraint(x, wide)
        inner = _inner(x, grad, wide)
        if sums is not None:
            sums.inside(inner)
        # What reaches X through C comes by both sides of the Gram matrix.
        through_c = _less_half(grad, x, inner + inner.mT, wide)
        return _less_half(through_c, grad, c, wide), None, None, None, None


class _StiefelDistance(torch.autograd.Function):
    """X to ‖C‖², with a graph apart from the map's: either may go back first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, c: Tensor, product: Tensor, wide, sums) -> Tensor:
        ctx.save_for_backward(x, product)
        ctx.wide, ctx.sums = wide, sums
        flat = c.flatten()
        distance = flat @ flat
        if sums is not None:
            sums.across(distance)
        return distance

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, product = ctx.saved_tensors
        if _is_differentiated(ctx.sums):
            product = _times(x, stiefel_constraint(x, ctx.wide), ctx.wide)
        return product * (4 * grad), None, None, None, None


class _RadialMap(torch.autograd.Function):
    """X to A(X) and Σ (s − 1)², with the sum s of squares over some axes and ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axes: tuple[int, ...], sums: Sums
    ) -> tuple[Tensor, Tensor]:
        s = x.square().sum(axes, keepdim=True)
        sums.inside(s)
        distance = (s - 1).square().sum()
        sums.across(distance)
        ctx.save_for_backward(x, s)
        ctx.set_materialize_grads(False)  # for each costs a sum over the ranks
        ctx.axes, ctx.sums = axes, sums
        return 2 * x / (1 + s), distance

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_distance: Tensor | None) -> tuple:
        _is_differentiated(ctx.sums)
        x, s = ctx.saved_tensors
        found = torch.zeros_like(x)
        if grad_distance is not None:
            found = found + x * (s - 1) * (4 * grad_distance)
        if grad is not None:
            inner = (x * grad).sum(ctx.axes, keepdim=True)
            ctx.sums.inside(inner)
            found = found + (2 * grad - 4 * x * inner / (1 + s)) / (1 + s)
        return found, None, None


def _is_differentiated(sums: Sums | None) -> bool:
    """Whether a backward pass is to be differentiated in turn."""
    if torch.is_grad_enabled() and sums is not None:
        raise RuntimeError("a weight in shards has no second derivative: gather it")
    return torch.is_grad_enabled()


def _inner(x: Tensor, y: Tensor, wide: bool) -> Tensor:
    """XᵀY, or XYᵀ where the rows are the short side: a view would cost a copy."""
    return x @ y.mT if wide else x.mT @ y


def _times(x: Tensor, small: Tensor, wide: bool) -> Tensor:
    """X by a symmetric matrix, on the side where it fits."""
    return small @ x if wide else x @ small


def _less_half(base: Tensor, x: Tensor, small: Tensor, wide: bool) -> Tensor:
    """The base less half of X by a symmetric matrix, without a sum of its own."""
    left, right = (small, x) if wide else (x, small)
    if base.ndim == 2:
        return torch.addmm(base, left, right, alpha=-0.5)
    return base - 0.5 * (left @ right)
