"""The sums that a map takes over a weight, which may be whole or in parts.

If a weight is in parts, each rank maps its own part, and only the sums cross the wire.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_sharded(weight: Tensor) -> TypeGuard["DTensor"]:
    """Whether a weight is a DTensor, without the second that its import takes."""
    return hasattr(weight, "device_mesh")


def whole(weight: Tensor) -> Tensor:
    """A weight in one piece; where it is in shards, all ranks must call this."""
    return weight.full_tensor() if is_sharded(weight) else weight


def placed(part: Tensor, weight: Tensor, placements: Any = None) -> Tensor:
    """A part of a weight, or what all ranks have of it, in shards if the weight is."""
    if is_sharded(part) or not is_sharded(weight):
        return part
    from torch.distributed.tensor import DTensor, Replicate

    mesh, shape, stride = weight.device_mesh, weight.shape, weight.stride()
    placements = placements or [Replicate()] * mesh.ndim
    part = part.to(weight.device)
    made = DTensor.from_local(part, mesh, placements, shape=shape, stride=stride)
    return made.redistribute(placements=weight.placements)


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

    def product(self, x: Tensor) -> Tensor:
        """XᵀX, or XXᵀ if wide, (..., p, p), of a part."""
        product = _product if _is_transformed(x) else _Gram.apply
        return product(x, self.wide)

    def times(self, x: Tensor, small: Tensor) -> Tensor:
        """X times a symmetric matrix (..., p, p), on the side that fits."""
        return small @ x if self.wide else x @ small


def sums_of(x: Tensor) -> Sums:
    """The sums of a whole weight."""
    rows, columns = x.shape[-2:]
    return Sums(wide=rows < columns, square=rows == columns)


def completed(parts: list[tuple[Tensor, Sums, tuple[int, ...]]]) -> list[Tensor]:
    """Complete sums, each over some dimensions of its mesh: equal on all ranks.

    Those over the same dimensions are one all-reduce.
    """
    totals = [part for part, *_ in parts]
    together = defaultdict(list)
    for number, (part, sums, dims) in enumerate(parts):
        if dims:
            together[sums.mesh, dims, part.dtype].append(number)
    for (mesh, dims, _), numbers in together.items():
        flat = torch.cat([totals[number].flatten() for number in numbers])
        pieces = _Summed.apply(flat, mesh, dims, ()).split(
            [totals[number].numel() for number in numbers]
        )
        for number, piece in zip(numbers, pieces, strict=True):
            totals[number] = piece.view_as(totals[number])
    return totals


def layout(
    weight: "DTensor", blocks: int, cut: Callable[[int, bool], tuple[int | None, bool]]
) -> tuple[list["Placement"], Sums]:
    """A weight's placements for its map, and its sums, by a manifold's ``cut``.

    Each dimension of the mesh that cuts the weight costs, in the forward pass of a map
    and again in the backward pass:

    - Stiefel, cut along the long side: one all-reduce of C, p × p.
    - Stiefel, cut along the short side: the same, and all-to-alls that cut the weight
      along its long side, and A(W) back along the short one.
    - Oblique and sphere, cut along what is summed: one all-reduce of the sums.
    - Cut between whole blocks, or between rows or columns of norm 1: the scalar, in the
      forward pass only.
    - A tall block, or a sphere's, that is on several ranks: the weight is gathered.
    """
    from torch.distributed.tensor import Replicate, Shard

    # The axis that each dimension of the mesh cuts, also by strided shards; torch's
    # type of a placement does not say that those that cut have a `dim`.
    cuts = [None if at.is_replicate() else at.dim for at in weight.placements]  # type: ignore[attr-defined]
    mesh = weight.device_mesh
    ranks = math.prod([mesh.size(dim) for dim, axis in enumerate(cuts) if axis == 0])
    between = blocks > 1 and blocks % ranks == 0  # no block is on several ranks
    rows, columns = weight.shape[0] // blocks, math.prod(weight.shape[1:])
    # A square matrix may be either, so its cut decides.
    by_columns = 0 not in cuts or (blocks > 1 and not between)
    wide = rows < columns or (rows == columns and by_columns)
    placements = list(weight.placements)
    inner: list[int] = []
    outer: list[int] = []
    for dim, axis in enumerate(cuts):
        if axis is None:
            continue
        along, summed = (0, False) if axis == 0 and between else cut(axis, wide)
        if along != axis:
            placements[dim] = Replicate() if along is None else Shard(along)
        if along is not None:
            (inner if summed else outer).append(dim)
    return placements, Sums(wide, mesh, tuple(inner), tuple(outer), rows == columns)


def _is_transformed(x: Tensor) -> bool:
    """Whether forward-mode AD or a transform of torch.func is at work.

    There only torch's own product is right to any order (torch 2.13).
    """
    if torch.compiler.is_compiling():
        return False
    functional = torch._C._are_functorch_transforms_active()
    return functional or unpack_dual(x).tangent is not None


def _product(x: Tensor, wide: bool) -> Tensor:
    return x @ x.mT if wide else x.mT @ x


class _Gram(torch.autograd.Function):
    """XᵀX, or XXᵀ: autograd's own backward pass takes one product of n p² more.

    A transposed view of X instead of ``wide`` would have its gradient copied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, wide: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.wide = wide
        return _product(x, wide)

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
