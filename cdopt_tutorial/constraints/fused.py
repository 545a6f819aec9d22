"""The Stiefel manifold's dissolving map and penalty, from one Gram matrix.

CDOpt computes XᵀX for the map, again for the penalty, and lets autograd take both
apart: nine matrix products. Here all share one Gram matrix: five.
"""

import torch
from torch import Tensor


def stiefel_map(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The map A(X) = X (3 I − XᵀX) / 2 and the squared distance ‖XᵀX − I‖².

    Both are differentiable, twice, too, together or one after the other: they share
    values, but no node of the graph. Source: Xiao, Liu and Toh (2023), section 4.

    Args:
        weight: (..., n, p), X or, if n < p, its transpose, so that the rows are meant
            to be orthonormal.

    Returns:
        The map, shaped as the weight, and the distance, a scalar: the sum over all
        matrices of a batch.

    Raises:
        ValueError: the weight has fewer than two axes.
    """
    if weight.ndim < 2:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, but must be a matrix"
        )
    mapped, c, product = _Map.apply(weight)
    return mapped, _Distance.apply(weight, c, product)


class _Map(torch.autograd.Function):
    """X to A(X), and to C = XᵀX − I and X C as values; all transposed for a wide X."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = _constraint(x)
        product = _times(x, c)
        ctx.save_for_backward(x, c)
        ctx.mark_non_differentiable(c, product)
        return torch.add(x, product, alpha=-0.5), c, product

    @staticmethod
    def backward(ctx, grad, *_):
        x, c = ctx.saved_tensors
        if torch.is_grad_enabled():  # C is a value: this backward needs its graph
            c = _constraint(x)
        inner = _inner(x, grad)
        # What reaches X through C comes by both sides of the Gram matrix.
        through_c = _add_times(grad, -0.5, x, inner + inner.mT)
        return _add_times(through_c, -0.5, grad, c)


class _Distance(torch.autograd.Function):
    """X to ‖C‖²; C and X C are given, so that its gradient, 4 X C, costs nothing."""

    @staticmethod
    def forward(ctx, x: Tensor, c: Tensor, product: Tensor) -> Tensor:
        ctx.save_for_backward(x, product)
        return c.square().sum()

    @staticmethod
    def backward(ctx, grad):
        x, product = ctx.saved_tensors
        if torch.is_grad_enabled():  # as above
            product = _times(x, _constraint(x))
        return product * (4 * grad), None, None


def _constraint(x: Tensor) -> Tensor:
    """XᵀX − I."""
    c = _inner(x, x)
    c.diagonal(dim1=-2, dim2=-1).sub_(1)
    return c


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """XᵀY, or XYᵀ where the rows are the short side: a view would cost a copy."""
    return x @ y.mT if x.shape[-2] < x.shape[-1] else x.mT @ y


def _times(x: Tensor, small: Tensor) -> Tensor:
    """X by a symmetric matrix, on the side where it fits."""
    return small @ x if x.shape[-2] < x.shape[-1] else x @ small


def _add_times(base: Tensor, alpha: float, x: Tensor, small: Tensor) -> Tensor:
    """The base plus alpha X by a symmetric matrix, without a sum of its own."""
    left, right = (small, x) if x.shape[-2] < x.shape[-1] else (x, small)
    if base.ndim == 2:
        return torch.addmm(base, left, right, alpha=alpha)
    return base + alpha * (left @ right)
