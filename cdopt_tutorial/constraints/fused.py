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
    if sums is None and torch.compiler.is_compiling():
        # The compiler finds what both have in common, and drops what is not used.
        return _CompiledMap.apply(weight, wide), _CompiledDistance.apply(weight, wide)
    return _StiefelMap.apply(weight, wide, sums)


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
    """X to A(X) and ‖C‖²: what both need to go back is freed with the first of them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, wide: bool, sums: Sums | None
    ) -> tuple[Tensor, Tensor]:
        c = stiefel_constraint(x, wide, sums)
        product, flat = _times(x, c, wide), c.flatten()
        distance = flat @ flat
        if sums is not None:
            sums.across(distance)
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.kept, ctx.version = (x.detach(), c, product), _version(x)
        ctx.wide, ctx.sums = wide, sums
        return torch.add(x, product, alpha=-0.5), distance

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_distance: Tensor | None) -> tuple:
        x, c, product = ctx.kept
        wide, sums = ctx.wide, ctx.sums
        _check_unmodified(x, ctx.version)
        if torch.is_grad_enabled():
            _check_whole(sums)
            (x,) = ctx.saved_tensors  # this pass is to be differentiated in turn
            c = stiefel_constraint(x, wide)
            product = _times(x, c, wide)
        found = _back((x, c, product), grad, grad_distance, wide, sums)
        return found, None, None


class _CompiledMap(torch.autograd.Function):
    """X to A(X), as a compiler can follow it, which keeps no more than it needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wide: bool) -> Tensor:
        c = stiefel_constraint(x, wide)
        ctx.save_for_backward(x, c)
        ctx.wide = wide
        return x - 0.5 * _times(x, c, wide)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, c = ctx.saved_tensors
        return _back((x, c, None), grad, None, ctx.wide, None), None


class _CompiledDistance(torch.autograd.Function):
    """X to ‖C‖², apart from A(X): zeros for one's gradient cost as much as numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wide: bool) -> Tensor:
        c = stiefel_constraint(x, wide)
        ctx.save_for_backward(_times(x, c, wide))
        return c.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (product,) = ctx.saved_tensors
        return product * (4 * grad), None


def _back(
    kept: tuple[Tensor, Tensor, Tensor | None],
    grad: Tensor | None,
    grad_distance: Tensor | None,
    wide: bool,
    sums: Sums | None,
) -> Tensor | None:
    """The gradient of X, from those of A(X) and of the distance."""
    x, c, product = kept
    of_distance = None if grad_distance is None else product * (4 * grad_distance)
    if grad is None:
        return of_distance
    inner = _inner(x, grad, wide)
    if sums is not None:
        sums.inside(inner)
    # What reaches X through C comes by both sides of the Gram matrix.
    through_c = _add_times(grad, x, inner + inner.mT, wide)
    of_map = _add_times(through_c, grad, c, wide)
    return of_map if of_distance is None else of_map + of_distance


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
        ctx.set_materialize_grads(False)
        ctx.axes, ctx.sums = axes, sums
        return 2 * x / (1 + s), distance

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_distance: Tensor | None) -> tuple:
        if torch.is_grad_enabled():
            _check_whole(ctx.sums)
        x, s = ctx.saved_tensors
        found = torch.zeros_like(x)
        if grad_distance is not None:
            found = found + x * (s - 1) * (4 * grad_distance)
        if grad is not None:
            inner = (x * grad).sum(ctx.axes, keepdim=True)
            ctx.sums.inside(inner)
            found = found + (2 * grad - 4 * x * inner / (1 + s)) / (1 + s)
        return found, None, None


def _version(x: Tensor) -> int | None:
    """How often a tensor was written to; a compiler sees itself who writes where."""
    return None if torch.compiler.is_compiling() else x._version


def _check_unmodified(x: Tensor, version: int | None) -> None:
    if version is not None and x._version != version:
        raise RuntimeError("the weight has been modified by an inplace operation")


def _check_whole(sums: Sums | None) -> None:
    if sums is not None:
        raise RuntimeError("a weight in shards has no second derivative: gather it")


def _inner(x: Tensor, y: Tensor, wide: bool) -> Tensor:
    """XᵀY, or XYᵀ where the rows are the short side: a view would cost a copy."""
    return x @ y.mT if wide else x.mT @ y


def _times(x: Tensor, small: Tensor, wide: bool) -> Tensor:
    """X by a symmetric matrix, on the side where it fits."""
    return small @ x if wide else x @ small


def _add_times(base: Tensor, x: Tensor, small: Tensor, wide: bool) -> Tensor:
    """The base less half of X by a symmetric matrix, without a sum of its own."""
    left, right = (small, x) if wide else (x, small)
    if base.ndim == 2:
        return torch.addmm(base, left, right, alpha=-0.5)
    return base - 0.5 * (left @ right)
