"""The manifolds of weights: a class each, with its constraint, map and projection.

To add one, write a class like :class:`Oblique`, and name it in ``MANIFOLDS``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdopt_tutorial.constraints.sums import (
    Sums,
    completed,
    is_sharded,
    layout,
    placed,
    sums_of,
    whole,
)

NEAR = 0.5  # ‖C‖ of a block below which Newton-Schulz converges, faster than an SVD


@dataclass(frozen=True)
class Manifold(ABC):
    """The manifold of a weight of any dtype, which may be in shards.

    X is the weight as a matrix (rows, columns), whose columns are all axes after the
    first; or its blocks (blocks, rows, columns). In half precision C would be lost as a
    small difference, so map and distance are computed, and the distance is returned, in
    float32. If a weight is in shards, all ranks must call each method, and get results
    placed like the weight; :func:`~cdopt_tutorial.constraints.sums.layout` says what
    that costs.
    """

    blocks: int = 1  #: equal blocks of rows, each of which is on a manifold of its own

    @abstractmethod
    def summed(self, x: Tensor, sums: Sums) -> Tensor:
        """What C has sums of, of the part of X that a rank has."""

    @abstractmethod
    def from_sum(self, total: Tensor) -> Tensor:
        """C(X), given what is summed up over the ranks."""

    @abstractmethod
    def mapped(self, x: Tensor, c: Tensor, sums: Sums) -> Tensor:
        """A(X), shaped as X, given C(X)."""

    @abstractmethod
    def nearest_point(self, x: Tensor) -> Tensor:
        """The nearest feasible X, of a whole one."""

    @abstractmethod
    def lengths(self, x: Tensor) -> Tensor:
        """What is 1 if a whole X is feasible: its singular values, or its norms."""

    @abstractmethod
    def cut(self, axis: int, wide: bool) -> tuple[int | None, bool]:
        """Where a weight that is cut along an axis is to be cut for its map, or None.

        Also returns whether C has sums along that axis. With None the weight is
        gathered. A cut between whole blocks is not asked for.
        """

    def constraint(self, x: Tensor, sums: Sums) -> Tensor:
        """C(X), of X or of the part of it that a rank has."""
        return self.from_sum(sums.inside(self.summed(x, sums)))

    def map_point(self, x: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
        """A(X), and ‖C(X)‖², a scalar, of X or of the part of it that a rank has."""
        c = self.constraint(x, sums)
        mapped = self.mapped(x, sums.for_parts(c), sums)
        return mapped, sums.across(c.square().sum())

    def map_and_distance(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A(W), shaped as the weight, and ‖C(W)‖², a scalar, equal on all ranks."""
        with _exactly(weight):
            x, sums, shape, placements = self.part_of(weight)
            mapped, distance = self.map_point(x, sums)
            mapped = placed(mapped.reshape(shape), weight, placements)
            return mapped.to(weight.dtype), distance

    def distance(self, weight: Tensor) -> Tensor:
        """‖C(W)‖², a scalar, equal on all ranks, without the product of the map."""
        return squared_distances([(self, weight)])[0]

    def part_of(self, weight: Tensor) -> tuple[Tensor, Sums, torch.Size, Any]:
        """X, or this rank's part of it, its sums, its shape, and its placements."""
        part = weight.float() if weight.dtype.itemsize < 4 else weight
        sums, placements = None, None
        if is_sharded(part):
            placements, sums = layout(part, self.blocks, self.cut)
            part = part.redistribute(placements=placements).to_local()
        x = part.flatten(1) if part.ndim > 2 else part
        if self.blocks > 1:
            rows = weight.shape[0] // self.blocks
            x = x.unflatten(0, (len(x) // rows, rows))
        return x, sums or sums_of(x), part.shape, placements

    @torch.no_grad()
    def nearest(
        self, weight: Tensor, padding: int | None = None, name: str = "the weight"
    ) -> Tensor:
        """The nearest feasible weight, a new one of the same dtype.

        The padding row, if there is one, becomes exactly 0. A weight in shards is
        gathered: sums alone would square its small singular values, and lead to another
        point if it is far from the manifold. A weight without data, as on the meta
        device, stays as it is. Raises ValueError if the weight is not finite, the
        padding row can't be 0, or the result is not feasible.
        """
        if has_no_data(weight):
            return weight.clone()
        if not whole(weight.isfinite().all()):
            raise ValueError(f"{name} is not finite")
        value = whole(weight).clone()
        if padding is not None:
            value[padding] = 0
        if not self._is_feasible(value, 0.5):
            x, *_ = self.part_of(value.double())  # float32 would leave roundings
            value = self.nearest_point(x).reshape(value.shape).contiguous()
            if padding is not None:
                value[padding] = 0  # training would scale up what an SVD leaves
            feasible = self._is_feasible(value, 100)
            if padding is not None and not feasible:
                raise ValueError(f"row {padding} of {name} is padding: can't be 0")
            if not feasible:  # as where squares overflow
                raise ValueError(f"{name} has no projection onto this manifold")
        return placed(value.to(weight.dtype), weight)

    def worst_length(self, weight: Tensor) -> float:
        """The length that is farthest from 1; a weight in shards is gathered."""
        x, *_ = self.part_of(whole(weight).double())
        lengths = self.lengths(x).flatten()
        return lengths[(lengths - 1).abs().argmax()].item()

    def _is_feasible(self, weight: Tensor, ulps: float) -> bool:
        """Whether ‖C‖ is what rounding leaves, some ulps for each element."""
        rounding = torch.finfo(weight.dtype).eps * weight.numel() ** 0.5
        return bool(self.distance(weight).sqrt() <= ulps * rounding)


class Stiefel(Manifold):
    """The short side is orthonormal: C(X) = XᵀX − I, (..., p, p), or XXᵀ − I if wide.

    A(X) = X (3 I − XᵀX) / 2, and the nearest X is the polar factor. A weight is cut
    along its long side. Source: Xiao, Liu and Toh (2023).
    """

    def summed(self, x: Tensor, sums: Sums) -> Tensor:
        return sums.product(x)

    def from_sum(self, total: Tensor) -> Tensor:
        return total - _eye(total)

    def mapped(self, x: Tensor, c: Tensor, sums: Sums) -> Tensor:
        return sums.times(x, _eye(c) - 0.5 * c)

    def nearest_point(self, x: Tensor) -> Tensor:
        if x.shape[-2] < x.shape[-1]:
            return self.nearest_point(x.mT).mT
        c = stiefel_constraint(x)
        while (off := c.flatten(-2).norm(dim=-1).max().item()) < NEAR:
            x = x - 0.5 * x @ c  # one step of Newton-Schulz, the map A
            if off * off < torch.finfo(x.dtype).eps:  # the step leaves ¾ of the square
                return x
            c = stiefel_constraint(x)
        u, _, v = torch.svd(x)
        return u @ v.mT

    def lengths(self, x: Tensor) -> Tensor:
        return torch.linalg.svdvals(x)

    def cut(self, axis: int, wide: bool) -> tuple[int | None, bool]:
        if wide:
            return axis or 1, True
        return (None if self.blocks > 1 else 0), True


@dataclass(frozen=True)
class Oblique(Manifold):
    """The norm along some axes of X is 1: C(X) = s − 1, s the sums of squares.

    C is shaped as X with these axes of size 1. A(X) = 2 X / (1 + s), and the nearest X
    has its norms divided off. A weight is cut as it is. Source: Xiao, Liu and Toh
    (2023).
    """

    axes: tuple[int, ...] = (-1,)  #: of each row's norm; (-2,) is that of columns

    def summed(self, x: Tensor, sums: Sums) -> Tensor:
        return x.square().sum(self.axes, keepdim=True)

    def from_sum(self, total: Tensor) -> Tensor:
        return total - 1

    def mapped(self, x: Tensor, c: Tensor, sums: Sums) -> Tensor:
        return 2 * x / (2 + c)

    def nearest_point(self, x: Tensor) -> Tensor:
        x = torch.where(self.lengths(x) > 0, x, 1.0)  # all of norm 1 are as near to 0
        return x / self.lengths(x)

    def lengths(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=self.axes, keepdim=True)

    def cut(self, axis: int, wide: bool) -> tuple[int | None, bool]:
        if axis == 0 and self.blocks > 1:
            return None, False
        return axis, min(axis, 1) - 2 in self.axes


@dataclass(frozen=True)
class Sphere(Oblique):
    """The norm of the whole X, or of each of its blocks, is 1."""

    axes: tuple[int, ...] = (-2, -1)


MANIFOLDS: dict[str, type[Manifold]] = {
    "stiefel": Stiefel, "oblique": Oblique, "sphere": Sphere
}  # fmt: skip


def manifold_of(
    manifold: str, weight: Tensor, blocks: int = 1, transpose: bool = False
) -> Manifold:
    """The manifold of a weight, by its name in ``MANIFOLDS``.

    ``blocks`` is the number of equal blocks of rows, each of which is on a manifold of
    its own. An oblique manifold has rows of norm 1, or columns with ``transpose``.
    Raises ValueError if the weight does not fit.
    """
    if manifold not in list(MANIFOLDS):
        known = ", ".join(MANIFOLDS)
        raise ValueError(f"manifold is {manifold!r}, but must be one of {known}")
    shape = tuple(weight.shape)
    real = weight.is_floating_point() and weight.dtype.itemsize > 1  # not float8
    if weight.ndim < 2 or 0 in shape or not real:
        raise ValueError(
            f"the weight has shape {shape} and is {weight.dtype}, but must be a matrix "
            "of real floating-point numbers"
        )
    if type(blocks) is not int or blocks < 1 or shape[0] % blocks:
        raise ValueError(
            f"blocks is {blocks!r}, but must be an int that divides the {shape[0]} rows"
        )
    if transpose is not False and (transpose is not True or manifold != "oblique"):
        raise ValueError(
            f"transpose is {transpose!r}, but must be False, or True if oblique"
        )
    if manifold == "oblique":  # rows are as independent in one block as in several
        return Oblique(blocks, (-2,)) if transpose else Oblique()
    return MANIFOLDS[manifold](blocks)


def squared_distances(weights: Iterable[tuple[Manifold, Tensor]]) -> list[Tensor]:
    """‖C(W)‖² of each weight, a scalar, equal on all ranks.

    However many there are, ranks that form one dimension of a mesh call one all-reduce.
    """
    layouts, parts = [], []
    for manifold, weight in weights:
        with _exactly(weight):
            x, sums, *_ = manifold.part_of(weight)
            part = manifold.summed(x, sums)
        if not sums.inner:
            part = manifold.from_sum(part).square().sum()
        layouts.append((manifold, sums))
        parts.append((part, sums, sums.inner or sums.outer))
    squares = [
        (manifold.from_sum(total).square().sum(), sums, sums.outer)
        if sums.inner
        else (total, sums, ())
        for (manifold, sums), total in zip(layouts, completed(parts), strict=True)
    ]
    return completed(squares)


def stiefel_map(x: Tensor) -> tuple[Tensor, Tensor]:
    """A(X) of a whole X (..., n, p), and ‖XᵀX − I‖², a scalar, summed over a batch.

    If n < p, the rows are to be orthonormal. Both results share a graph, so one
    backward pass is for both.
    """
    return Stiefel().map_point(x, sums_of(x))


def stiefel_constraint(x: Tensor) -> Tensor:
    """C(X) = XᵀX − I, (..., p, p), of the X of :func:`stiefel_map`."""
    return Stiefel().constraint(x, sums_of(x))


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def has_no_data(weight: Tensor) -> bool:
    """Whether a weight is on the meta device, as also a fake tensor's storage is."""
    here = weight.to_local() if is_sharded(weight) else weight
    return here.untyped_storage().device.type == "meta"


def _exactly(weight: Tensor) -> AbstractContextManager:
    """Without autocast, which the meta device has not."""
    if weight.is_meta or not torch.is_autocast_enabled(weight.device.type):
        return nullcontext()
    return torch.autocast(weight.device.type, enabled=False)
