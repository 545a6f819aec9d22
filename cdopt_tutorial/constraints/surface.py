"""The manifold of any weight: the map, the constraint, the nearest point."""

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
from torch import Tensor, nn

from cdopt_tutorial.constraints.fused import stiefel_map

MANIFOLDS = dict(stiefel=stiefel_torch, oblique=oblique_torch, sphere=sphere_torch)
HALF = torch.bfloat16, torch.float16  # C, a small difference, would be lost in them
BY_BLOCKS = stiefel_torch, oblique_torch  # CDOpt's classes that take a batch

Manifold = str | Callable[..., Any]


def is_sharded(weight: Tensor) -> bool:
    """Whether a weight is a DTensor, asked without the second that its import takes."""
    return hasattr(weight, "device_mesh")


def whole(weight: Tensor) -> Tensor:
    """All of a weight, of which this rank may have a part; all ranks must ask."""
    return weight.full_tensor() if is_sharded(weight) else weight


def _sharded() -> ModuleType:
    """How such a weight is computed with; imported where there is one."""
    from cdopt_tutorial.constraints import sharded

    return sharded


def _exactly(weight: Tensor) -> AbstractContextManager:
    """No autocast: C is a small difference of large numbers, lost in bfloat16."""
    # The meta device, which computes nothing, has no autocast to be asked for.
    if weight.is_meta or not torch.is_autocast_enabled(weight.device.type):
        return nullcontext()
    return torch.autocast(weight.device.type, enabled=False)


@dataclass(frozen=True)
class Surface:
    """The manifold of a weight of any dtype, which may lie in shards.

    Axes after the second count as columns. What it gives is placed as the weight.
    """

    make: Callable[..., Any]  #: CDOpt's class of the manifold
    blocks: int  #: into how many equal blocks the rows are split, each on its own
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
            # The fused map makes the short side orthonormal: nothing needs turning.
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
                return self.map_and_distance(weight)[1]  # whose sums are known
            return self._of(weight).C(self._point(weight)).square().sum()

    @torch.no_grad()
    def nearest(self, weight: Tensor) -> Tensor:
        """The feasible weight nearest to this one, by CDOpt's ``Post_process``.

        A weight in shards is gathered, once, and not in a step: by sums alone, which
        square what is small, one far from its manifold would come to another point of
        it. Raises ValueError if what is found is not feasible, as where CDOpt has no
        projection. On the meta device there is nothing to move.
        """
        if weight.is_meta:
            return weight.clone()
        with _exactly(weight):
            exact = whole(weight).double()  # in float32 it is off by many roundings
            point = self._of(exact).Post_process(self._point(exact))
            found = self._weight(point, exact).contiguous()
            left = self.distance(found).sqrt().item()
            # Some ulps for each element; NaN is not below it either.
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
        """CDOpt's X: the weight in blocks, turned where that is asked for."""
        blocks = self.in_blocks(weight)
        return blocks.mT if self.transpose else blocks

    def _weight(self, point: Tensor, like: Tensor) -> Tensor:
        """The weight of an X."""
        return (point.mT if self.transpose else point).reshape(like.shape)

    def _of(self, weight: Tensor) -> Any:
        """CDOpt's manifold, which keeps constants of one shape, dtype and device."""
        shape = tuple(self._point(weight).shape)
        return self.make(shape, device=weight.device, dtype=weight.dtype)


def surface(
    manifold: Manifold, weight: Tensor, blocks: int = 1, transpose: bool | None = None
) -> Surface:
    """The manifold for a weight; :class:`Surface` has the arguments.

    With ``transpose`` None, what is wider than tall is turned for the Stiefel manifold,
    and else nothing. Raises ValueError if the weight does not fit.
    """
    make = MANIFOLDS.get(manifold) if isinstance(manifold, str) else manifold
    if make is None:
        known = " or ".join(MANIFOLDS)
        raise ValueError(f"manifold is {manifold!r}, but must be {known}")
    if isinstance(make, type) and issubclass(make, euclidean_torch):
        raise ValueError(f"{make.__name__} constrains nothing")
    if isinstance(weight, nn.UninitializedParameter):
        raise ValueError("the weight has no shape yet: let the layer see an input")
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
