"""The maps of the manifolds and their distances, by sums that may run over ranks.

If a weight is in parts, each rank maps its own part, and only the sums cross the wire.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
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
        """Complete sums to which several ranks contribute: equal on all of them."""
        return _Summed.apply(part, self.mesh, self.inner, ()) if self.inner else part

    def across(self, part: Tensor) -> Tensor:
        """Add up the separate results of several ranks: equal on all of them."""
        return _Summed.apply(part, self.mesh, self.outer, ()) if self.outer else part

    def for_parts(self, total: Tensor) -> Tensor:
        """A completed sum with which each rank maps its own part, and no other."""
        return _Summed.apply(total, self.mesh, (), self.inner) if self.inner else total

    def gram(self, x: Tensor) -> Tensor:
        """XᵀX, or XXᵀ if wide, (..., p, p), of the whole X."""
        gram = _Gram.forward if _is_transformed(x) else _Gram.apply
        return self.inside(gram(x, self.wide))

    def times(self, x: Tensor, small: Tensor) -> Tensor:
        """X times a symmetric matrix (..., p, p), on the side that fits."""
        return small @ x if self.wide else x @ small


def stiefel_map(x: Tensor, sums: Sums | None = None) -> tuple[Tensor, Tensor]:
    """The map A(X) = X (3 I − XᵀX) / 2 and the squared distance ‖XᵀX − I‖².

    X is the weight (..., n, p) or, if n < p, its transpose, whose rows are then to be
    orthonormal. A(X) has the weight's shape; the distance is a scalar, summed over a
    batch. Both share a graph, so one backward pass is for both. A part of a weight
    needs ``sums``, and is differentiable once. Source: Xiao, Liu and Toh (2023).
    """
    sums = sums or sums_of(x)
    c = stiefel_constraint(x, sums)  # (..., p, p)
    factor = _eye(c) - 0.5 * sums.for_parts(c)
    return sums.times(x, factor), sums.across(c.square().sum())


def stiefel_constraint(x: Tensor, sums: Sums | None = None) -> Tensor:
    """C(X) = XᵀX − I, (..., p, p), with X and the sums of :func:`stiefel_map`."""
    gram = (sums or sums_of(x)).gram(x)
    return gram - _eye(gram)


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def radial_map(x: Tensor, axes: tuple[int, ...], sums: Sums) -> tuple[Tensor, Tensor]:
    """The map A(X) = 2 X / (1 + s) and the distance Σ (s − 1)², s the sum of squares.

    Takes X or a part of it, and the axes of s: one for an oblique manifold, all for a
    sphere. Source: Xiao, Liu and Toh (2023).
    """
    s = sums.inside(x.square().sum(axes, keepdim=True))
    return 2 * x / (1 + sums.for_parts(s)), sums.across((s - 1).square().sum())


def sums_of(x: Tensor) -> Sums:
    """The sums of a whole weight."""
    rows, columns = x.shape[-2:]
    return Sums(wide=rows < columns, square=rows == columns)


def _is_transformed(x: Tensor) -> bool:
    """Whether forward-mode AD or a transform of torch.func is at work.

    There torch's own product is right to any order, and a function of ours would not be
    (torch 2.13, forward over forward).
    """
    if torch.compiler.is_compiling():
        return False
    try:
        x.untyped_storage()  # which a transform's tensor does not have
    except (NotImplementedError, RuntimeError):
        return True
    return unpack_dual(x).tangent is not None


class _Gram(torch.autograd.Function):
    """XᵀX, or XXᵀ: autograd's own backward pass takes one product of n p² more.

    A transposed view of X instead of ``wide`` would have its gradient copied.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, wide: bool) -> Tensor:
        return x @ x.mT if wide else x.mT @ x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
        x, ctx.wide = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        both = grad + grad.mT  # X enters the product twice
        return both @ x if ctx.wide else x @ both, None


class _Summed(torch.autograd.Function):
    """A sum over some dimensions of a mesh; its gradient's, over others.

    If all ranks use a total alike, their gradients are equal; if each uses it for its
    own part, they are to be added up.
    """

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, mesh: DeviceMesh, forward: tuple, backward: tuple
    ) -> Tensor:
        ctx.mesh, ctx.dims = mesh, backward
        return _all_reduced(part, mesh, forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        if torch.is_grad_enabled():
            raise RuntimeError("a weight in shards has no second derivative: gather it")
        return _all_reduced(grad, ctx.mesh, ctx.dims), None, None, None


def _all_reduced(part: Tensor, mesh: DeviceMesh, dims: tuple[int, ...]) -> Tensor:
    total = part.contiguous().clone()
    for dim in dims:
        dist.all_reduce(total, group=mesh.get_group(dim))
    return total
