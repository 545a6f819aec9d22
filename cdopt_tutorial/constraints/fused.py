"""The Stiefel manifold's map and penalty, from one Gram matrix for both."""

import torch
from torch import Tensor


def stiefel_map(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The map A(X) = X (3 I − XᵀX) / 2 and the squared distance ‖XᵀX − I‖².

    X is the weight (..., n, p) or, if n < p, its transpose: the rows are meant to be
    orthonormal then. The map is shaped as the weight; the distance is a scalar, the sum
    over a batch. Both are differentiable, twice, too, together or one after the other.
    Raises ValueError for fewer than two axes. Source: Xiao, Liu and Toh (2023).
    """
    if weight.ndim < 2:
        raise ValueError(f"weight has {weight.ndim} axes, but must have at least 2")
    return _StiefelMap.apply(weight)


def stiefel_constraint(weight: Tensor) -> Tensor:
    """C(X) = XᵀX − I, (..., p, p), with X as above."""
    c = _inner(weight, weight)
    c.diagonal(dim1=-2, dim2=-1).sub_(1)
    return c


class _StiefelMap(torch.autograd.Function):
    """X to A(X) and ‖C‖²: what both need to go back is freed with the first of them."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        c = stiefel_constraint(x)
        product, flat = _times(x, c), c.flatten()
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.kept, ctx.version = (x.detach(), c, product), x._version
        return torch.add(x, product, alpha=-0.5), flat @ flat

    @staticmethod
    def backward(ctx, grad, grad_distance):
        x, c, product = ctx.kept
        if x._version != ctx.version:
            raise RuntimeError("the weight has been modified by an inplace operation")
        if torch.is_grad_enabled():  # this pass is to be differentiated in turn
            (x,) = ctx.saved_tensors
            c = stiefel_constraint(x)
            product = _times(x, c)
        of_distance = None if grad_distance is None else product * (4 * grad_distance)
        if grad is None:
            return of_distance
        inner = _inner(x, grad)
        # What reaches X through C comes by both sides of the Gram matrix.
        through_c = _add_times(grad, x, inner + inner.mT)
        of_map = _add_times(through_c, grad, c)
        return of_map if of_distance is None else of_map + of_distance


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """XᵀY, or XYᵀ where the rows are the short side: a view would cost a copy."""
    return x @ y.mT if x.shape[-2] < x.shape[-1] else x.mT @ y


def _times(x: Tensor, small: Tensor) -> Tensor:
    """X by a symmetric matrix, on the side where it fits."""
    return small @ x if x.shape[-2] < x.shape[-1] else x @ small


def _add_times(base: Tensor, x: Tensor, small: Tensor) -> Tensor:
    """The base less half of X by a symmetric matrix, without a sum of its own."""
    left, right = (small, x) if x.shape[-2] < x.shape[-1] else (x, small)
    if base.ndim == 2:
        return torch.addmm(base, left, right, alpha=-0.5)
    return base - 0.5 * (left @ right)
