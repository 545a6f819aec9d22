"""CDOpt's manifolds for weights: the map A, the constraint C, the nearest point."""

import functools
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


def placed(value: Tensor, like: Tensor) -> Tensor:
    """A value where another one lies on a mesh, if it does; a plain one is on all."""
    return _sharded().placed(value, like) if is_sharded(like) else value


def _exactly(weight: Tensor) -> AbstractContextManager:
    """No autocast: C is a small difference of large numbers, lost in bfloat16."""
    # The meta device, which computes nothing, has no autocast to be asked for.
    if weight.is_meta or not torch.is_autocast_enabled(weight.device.type):
        return nullcontext()
    return torch.autocast(weight.device.type, enabled=False)


@dataclass(frozen=True)
class Surface:
    """The manifold of a weight of any dtype; axes after the second count as columns."""

    make: Callable[..., Any]  #: CDOpt's class of the manifold
    blocks: int  #: into how many equal blocks the rows are split, each on its own
    transpose: bool  #: whether CDOpt's X is the transpose of the weight, or of a block

    def map_and_distance(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A(W), shaped and placed as the weight, and ‖C(W)‖², a scalar."""
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
            mapped, distance = stiefel_map(self._blocks(weight))
        # Of a plain matrix nothing was split: to reshape would be one more node.
        plain = mapped.shape == weight.shape
        return mapped if plain else mapped.reshape(weight.shape), distance

    def distance(self, weight: Tensor) -> Tensor:
        """‖C(W)‖², a scalar."""
        if weight.dtype in HALF:
            return self.distance(weight.float()).to(weight.dtype)
        if is_sharded(weight):
            with _exactly(weight):
                return _sharded().distance(self, weight)
        if torch.compiler.is_compiling() and self.make is stiefel_torch:
            return self.map_and_distance(weight)[1]  # whose sums are found to be known
        with _exactly(weight):
            return self._of(weight).C(self._point(weight)).square().sum()

    @torch.no_grad()
    def nearest(self, weight: Tensor) -> Tensor:
        """The feasible weight that CDOpt's ``Post_process`` finds; see `feasible`."""
        if is_sharded(weight):
            return _sharded().nearest(self, weight)
        exact = weight.double()  # a decomposition in float32 is off by many roundings
        with _exactly(exact):
            point = self._of(exact).Post_process(self._point(exact))
        found = self._weight(point, weight).contiguous()
        return feasible(found, self.distance).to(weight.dtype)

    def _blocks(self, weight: Tensor) -> Tensor:
        matrix = weight.flatten(1) if weight.ndim > 2 else weight
        return matrix.unflatten(0, (self.blocks, -1)) if self.blocks > 1 else matrix

    def _point(self, weight: Tensor) -> Tensor:
        """CDOpt's X: the weight in blocks, turned where that is asked for."""
        blocks = self._blocks(weight)
        return blocks.mT if self.transpose else blocks

    def _weight(self, point: Tensor, like: Tensor) -> Tensor:
        """The weight of an X."""
        return (point.mT if self.transpose else point).reshape(like.shape)

    def _of(self, weight: Tensor) -> Any:
        shape = tuple(self._point(weight).shape)
        # A compiler sees through what is kept: it would trace this, and warn of it.
        compiling = torch.compiler.is_compiling()
        make = _manifold.__wrapped__ if compiling else _manifold
        return make(self.make, shape, weight.dtype, weight.device)


def feasible(found: Tensor, distance: Callable[[Tensor], Tensor]) -> Tensor:
    """What a projection found; ValueError if not feasible, as where CDOpt has none."""
    left = distance(found).sqrt().item()
    # Some ulps for each element; NaN is not below it either.
    if not left <= 100 * torch.finfo(found.dtype).eps * math.sqrt(found.numel()):
        what = f"no projection of a weight of shape {tuple(found.shape)}"
        raise ValueError(f"{what} onto this manifold: ‖C‖ is {left:.1e} after it")
    return found


@functools.lru_cache(maxsize=64)
def _manifold(make: Callable, shape: tuple, dtype: torch.dtype, device: torch.device):
    """CDOpt's manifolds keep constants of one shape and dtype on one device."""
    return make(shape, device=device, dtype=dtype)


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
        transpose = _turned(
            weight.shape[0] // blocks, math.prod(weight.shape[1:]), transpose
        )
    return Surface(make, blocks, bool(transpose))


def _turned(rows: int, columns: int, transpose: bool | None) -> bool:
    """Whether a matrix must be transposed to be tall; a square one as was asked."""
    if rows == columns:
        return bool(transpose)
    wide = rows < columns
    if transpose not in (None, wide):
        sides = f"{'columns' if wide else 'rows'} of a {rows} x {columns} matrix"
        raise ValueError(f"the {sides} can't be orthonormal")
    return wide
