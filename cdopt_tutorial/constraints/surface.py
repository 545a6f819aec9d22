"""The manifold of a weight: its map, its constraint, the nearest point on it."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from cdopt.manifold_torch import (
    euclidean_torch,
    oblique_torch,
    sphere_torch,
    stiefel_torch,
)
from torch import Tensor

from cdopt_tutorial.constraints.fused import stiefel_map

MANIFOLDS = dict(stiefel=stiefel_torch, oblique=oblique_torch, sphere=sphere_torch)
HALF = torch.bfloat16, torch.float16  # too coarse for C, a small difference
BY_BLOCKS = stiefel_torch, oblique_torch  # CDOpt's classes that take a batch

Manifold = str | Callable[..., Any]


def is_sharded(weight: Tensor) -> bool:
    """Whether a weight is a DTensor, without the second that its import takes."""
    return hasattr(weight, "device_mesh")


def whole(weight: Tensor) -> Tensor:
    """A weight in one piece; where it is in shards, all ranks must call this."""
    return weight.full_tensor() if is_sharded(weight) else weight


def _sharded() -> ModuleType:
    """The module for weights in shards, imported only where there is one."""
    from cdopt_tutorial.constraints import sharded

    return sharded


def _exactly(weight: Tensor) -> AbstractContextManager:
    """Without autocast: in bfloat16, C is lost as a small difference."""
    # The meta device, which computes nothing, has no autocast.
    if weight.is_meta or not torch.is_autocast_enabled(weight.device.type):
        return nullcontext()
    return torch.autocast(weight.device.type, enabled=False)


@dataclass(frozen=True)
class Surface:
    """The manifold of a weight of any dtype, which may be in shards.

    Axes after the second count as columns. Results are placed like the weight.
    """

    make: Callable[..., Any]  #: CDOpt's class of the manifold
    blocks: int  #: equal blocks of rows, each of which is on a manifold of its own
    transpose: bool  #: whether CDOpt's X is the transpose of the weight, or of a block

    def map_and_distance(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A(W), shaped as the weight, and ‖C(W)‖², a plain scalar."""
        if weight.dtype in HALF:
            mapped, distance = self.map_and_distance(weight.float())
            return mapped.to(weight.dtype), distance.to(weight.dtype)
        with _exactly(weight):
            if is_sharded(weight):
                return _sharded().map_and_distance(self, weight)
            if self.make is not stiefel_torch:
                mapped = self._of(weight).A(self._point(weight))
                return self._weight(mapped, weight), self.distance(weight)
            # The fused map takes the short side, so there is nothing to transpose.
            mapped, distance = stiefel_map(self.in_blocks(weight))
            return mapped.reshape(weight.shape), distance

    def distance(self, weight: Tensor) -> Tensor:
        """‖C(W)‖², a plain scalar."""
        if weight.dtype in HALF:
            return self.distance(weight.float()).to(weight.dtype)
        with _exactly(weight):
            if is_sharded(weight):
                return _sharded().distance(self, weight)
            if torch.compiler.is_compiling() and self.make is stiefel_torch:
                return self.map_and_distance(weight)[1]  # shares its sums
            return self._of(weight).C(self._point(weight)).square().sum()

    @torch.no_grad()
    def nearest(self, weight: Tensor) -> Tensor:
        """The nearest feasible weight, by CDOpt's ``Post_process``.

        A weight in shards is gathered for it: sums alone would square its small
        singular values, and lead to another point if it is far from the manifold.
        Raises ValueError if the result is not feasible, as where CDOpt has no
        projection.
        """
        if weight.is_meta:
            return weight.clone()
        with _exactly(weight):
            exact = whole(weight).double()  # float32 would leave many roundings
            point = self._of(exact).Post_process(self._point(exact))
            found = self._weight(point, exact).contiguous()
            left = self.distance(found).sqrt().item()
            # Some ulps for each element; the comparison is false for NaN, too.
            if not left <= 100 * torch.finfo(found.dtype).eps * found.numel() ** 0.5:
                off = f"onto this manifold: ‖C‖ is {left:.1e} after it"
                shape = f"a weight of shape {tuple(found.shape)}"
                raise ValueError(f"no projection of {shape} {off}")
            found = found.to(weight.dtype)
            return _sharded().placed(found, weight) if is_sharded(weight) else found

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


def surface(
    manifold: Manifold, weight: Tensor, blocks: int = 1, transpose: bool | None = None
) -> Surface:
    """The manifold for a weight; :class:`Surface` explains the arguments.

    By default, only a weight that is wider than tall, for the Stiefel manifold, is
    transposed. Raises ValueError if the weight does not fit.
    """
    make = MANIFOLDS.get(manifold) if isinstance(manifold, str) else manifold
    if make is None:
        known = " or ".join(MANIFOLDS)
        raise ValueError(f"manifold is {manifold!r}, but must be {known}")
    if isinstance(make, type) and issubclass(make, euclidean_torch):
        raise ValueError(f"{make.__name__} constrains nothing")
    if weight.ndim < 2 or not weight.is_floating_point():
        found = f"shape {tuple(weight.shape)} and is {weight.dtype}"
        raise ValueError(f"the weight has {found}, but must be a real matrix")
    if blocks < 1 or weight.shape[0] % blocks:
        rows = f"the weight's {weight.shape[0]} rows"
        raise ValueError(f"blocks is {blocks}, but must divide {rows}")
    if blocks > 1 and make not in BY_BLOCKS:
        raise ValueError(f"blocks is {blocks}, but {make.__name__} takes no batch")
    if make is stiefel_torch:
        rows, columns = weight.shape[0] // blocks, math.prod(weight.shape[1:])
        wide = rows < columns
        if transpose is None:
            transpose = wide
        elif rows != columns and transpose != wide:
            long_side = "columns" if wide else "rows"
            of = f"of a {rows} x {columns} matrix"
            raise ValueError(f"the {long_side} {of} can't be orthonormal")
    return Surface(make, blocks, bool(transpose))
