"""The manifold of any weight: whole or in shards, of any dtype."""

import math
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from cdopt.manifold_torch import (
    euclidean_torch,
    oblique_torch,
    sphere_torch,
    stiefel_torch,
)
from cdopt.manifold_torch.basic_manifold_torch import basic_manifold_torch
from torch import Tensor, nn

from cdopt_tutorial.constraints.formulas import sums_of
from cdopt_tutorial.constraints.geometry import Geometry

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MANIFOLDS = dict(stiefel=stiefel_torch, oblique=oblique_torch, sphere=sphere_torch)
HALF = torch.bfloat16, torch.float16
DTYPES = torch.float64, torch.float32, *HALF

Manifold = str | type[basic_manifold_torch]


def is_sharded(weight: Tensor) -> TypeGuard["DTensor"]:
    """Whether a weight is a DTensor, without the second that its import takes."""
    return hasattr(weight, "device_mesh")


def is_under_fsdp(module: nn.Module) -> bool:
    """Whether ``fully_shard`` manages a module's parameters."""
    return getattr(module, "_is_fsdp_managed_module", False)


def whole(weight: Tensor) -> Tensor:
    """A weight in one piece; where it is in shards, all ranks must call this."""
    return weight.full_tensor() if is_sharded(weight) else weight


class Surface(Geometry):
    """The manifold of a weight of any dtype, which may be in shards.

    In half precision C would be lost as a small difference, so map and distance are
    computed, and the distance is returned, in float32. If a weight is in shards, all
    ranks must call each method, and get results placed like the weight;
    :func:`~cdopt_tutorial.constraints.sharded.part_of` says what that costs.
    """

    def map_and_distance(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A(W), shaped as the weight, and ‖C(W)‖², a scalar, equal on all ranks."""
        w = _at_least_float32(weight)
        with _exactly(weight):
            x, sums, *place = self.part_of(w)
            mapped, distance = self.map_point(x, sums)
            return self.whole_of(mapped, w, *place).to(weight.dtype), distance

    def distance(self, weight: Tensor) -> Tensor:
        """‖C(W)‖², a scalar, equal on all ranks."""
        with _exactly(weight):
            x, sums, *_ = self.part_of(_at_least_float32(weight))
            return self.distance_of_point(x, sums)

    def part_of(self, weight: Tensor) -> tuple:
        """X, or this rank's part of it, its sums, its shape, and its placements."""
        if is_sharded(weight):
            return _sharded().part_of(self, weight)
        x = self.point(weight)
        return x, sums_of(x), weight.shape, None

    def whole_of(
        self, x: Tensor, weight: Tensor, shape: torch.Size, placements: Any
    ) -> Tensor:
        """What X, or a part of it, is as a weight, placed like the given one."""
        return placed(self.weight(x, shape), weight, placements)

    @torch.no_grad()
    def nearest(self, weight: Tensor, padding: int | None = None) -> Tensor:
        """The nearest feasible weight, a new one of the same dtype.

        The padding row, if there is one, becomes exactly 0. A weight in shards is
        gathered: sums alone would square its small singular values, and lead to another
        point if it is far from the manifold. A weight without data, as on the meta
        device, stays as it is. Raises ValueError if the weight is not finite, or the
        result not feasible, as where CDOpt has no projection.
        """
        if _has_no_data(weight):
            return weight.clone()
        if not whole(weight.isfinite().all()):
            raise ValueError("the weight is not finite")
        value = whole(weight).clone()
        if padding is not None:
            value[padding] = 0
        if not self._is_feasible(value, 0.5):
            with _exactly(weight):  # and in float64: float32 would leave roundings
                x = self.nearest_point(self.point(value.double()))
            value = self.weight(x, value.shape).contiguous()
            if padding is not None:
                value[padding] = 0  # training would scale up what an SVD leaves
            feasible = self._is_feasible(value, 100)
            if not feasible and padding is not None:
                raise ValueError(
                    f"row {padding} is padding, but can't be 0 on this manifold"
                )
            if not feasible:
                raise ValueError(
                    f"no projection of a weight of shape {tuple(value.shape)} onto "
                    "this manifold"
                )
        return placed(value.to(weight.dtype), weight)

    def _is_feasible(self, weight: Tensor, ulps: float) -> bool:
        """Whether ‖C‖ is what rounding leaves, some ulps for each element; not NaN."""
        rounding = torch.finfo(weight.dtype).eps * weight.numel() ** 0.5
        return bool(self.distance(weight).sqrt() <= ulps * rounding)


def surface(
    manifold: Manifold, weight: Tensor, blocks: int = 1, transpose: bool | None = None
) -> Surface:
    """The manifold for a weight; :class:`Geometry` explains the arguments.

    For the Stiefel manifold ``transpose`` says that the rows are to be orthonormal, by
    default if they are the short side. Raises ValueError if the weight does not fit.
    """
    make = MANIFOLDS.get(manifold) if isinstance(manifold, str) else manifold
    if not (isinstance(make, type) and issubclass(make, basic_manifold_torch)):
        known = "stiefel, oblique, sphere or a class of cdopt.manifold_torch"
        raise ValueError(f"manifold is {manifold!r}, but must be {known}")
    if issubclass(make, euclidean_torch):
        raise ValueError(f"{make.__name__} constrains nothing")
    shape = tuple(weight.shape)
    if weight.ndim < 2 or weight.dtype not in DTYPES or 0 in shape:
        what = f"the weight has shape {shape} and is {weight.dtype}"
        raise ValueError(f"{what}, but must be a matrix of real floating-point numbers")
    rows, columns = shape[0], math.prod(shape[1:])
    if type(blocks) is not int or blocks < 1 or rows % blocks:
        raise ValueError(
            f"blocks is {blocks!r}, but must be an int that divides the {rows} rows"
        )
    if blocks > 1 and make not in MANIFOLDS.values():
        raise ValueError(f"blocks is {blocks}, but {make.__name__} takes no batch")
    if not isinstance(transpose, bool | None):
        raise ValueError(f"transpose is {transpose!r}, but must be True, False or None")
    if make is not stiefel_torch:
        return Surface(make, blocks, bool(transpose))
    rows //= blocks
    if rows != columns and transpose is (rows > columns):
        side = "rows" if transpose else "columns"
        raise ValueError(
            f"the {side} of a {rows} x {columns} matrix can't be orthonormal"
        )
    return Surface(make, blocks)


def placed(part: Tensor, weight: Tensor, placements: Any = None) -> Tensor:
    """A part of a weight, or what all ranks have of it, in shards if the weight is."""
    if is_sharded(part) or not is_sharded(weight):
        return part
    return _sharded().placed(part, weight, placements)


def _sharded() -> ModuleType:
    """The module for weights in shards, imported only where there is one."""
    from cdopt_tutorial.constraints import sharded

    return sharded


def _at_least_float32(weight: Tensor) -> Tensor:
    return weight.float() if weight.dtype in HALF else weight


def _has_no_data(weight: Tensor) -> bool:
    """Whether a weight is on the meta device, as also a fake tensor's storage is."""
    here = weight.to_local() if is_sharded(weight) else weight
    return here.untyped_storage().device.type == "meta"


def _exactly(weight: Tensor) -> AbstractContextManager:
    """Without autocast, which the meta device has not."""
    if weight.is_meta or not torch.is_autocast_enabled(weight.device.type):
        return nullcontext()
    return torch.autocast(weight.device.type, enabled=False)
