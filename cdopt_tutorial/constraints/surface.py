"""The manifold of any weight: whole or in shards, of any dtype."""

import math
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from cdopt.manifold_torch import (
    euclidean_torch,
    oblique_torch,
    sphere_torch,
    stiefel_torch,
)
from cdopt.manifold_torch.basic_manifold_torch import basic_manifold_torch
from torch import Tensor, nn

from cdopt_tutorial.constraints.geometry import Geometry

MANIFOLDS = dict(stiefel=stiefel_torch, oblique=oblique_torch, sphere=sphere_torch)
HALF = torch.bfloat16, torch.float16
DTYPES = torch.float64, torch.float32, *HALF

Manifold = str | type[basic_manifold_torch]


def is_sharded(weight: Tensor) -> bool:
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
    ranks must call each method, and get results placed like the weight.
    """

    def map_and_distance(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A(W), shaped as the weight, and ‖C(W)‖², a plain scalar."""
        w = _at_least_float32(weight)
        with _exactly(weight):
            if is_sharded(w):
                mapped, distance = _sharded().map_and_distance(self, w)
            else:
                mapped, distance = super().map_and_distance(w)
            return mapped.to(weight.dtype), distance

    def distance(self, weight: Tensor) -> Tensor:
        """‖C(W)‖², a plain scalar."""
        w = _at_least_float32(weight)
        with _exactly(weight):
            return (
                _sharded().distance(self, w) if is_sharded(w) else super().distance(w)
            )

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
        check_finite(weight)
        found = whole(weight).clone()
        if padding is not None:
            found[padding] = 0
        if not self.distance(found).sqrt() <= 0.5 * _rounding(found):
            with _exactly(weight):
                exact = super().nearest(found.double())  # float32 would leave roundings
            if padding is not None:
                exact[padding] = 0  # training would scale up what an SVD leaves
            self._check(exact, padding)
            found = exact.to(weight.dtype)
        return _sharded().placed(found, weight) if is_sharded(weight) else found

    def _check(self, weight: Tensor, padding: int | None) -> None:
        off = self.distance(weight).sqrt().item()
        # Some ulps for each element; the comparison is false for NaN, too.
        if off <= 100 * _rounding(weight):
            return
        if padding is not None:
            raise ValueError(
                f"row {padding} is padding, but can't be 0 on this manifold"
            )
        raise ValueError(
            f"no projection of a weight of shape {tuple(weight.shape)} onto this "
            f"manifold: ‖C‖ is {off:.1e} after it"
        )


def surface(
    manifold: Manifold, weight: Tensor, blocks: int = 1, transpose: bool | None = None
) -> Surface:
    """The manifold for a weight; :class:`Surface` explains the arguments.

    By default, only a weight that is wider than tall, for the Stiefel manifold, is
    transposed. Raises ValueError if the weight does not fit.
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
    if make is stiefel_torch:
        transpose = _short_side(rows // blocks, columns, transpose)
    return Surface(make, blocks, bool(transpose))


def _short_side(rows: int, columns: int, transpose: bool | None) -> bool:
    """Whether the rows become orthonormal; a ValueError if the long side should."""
    wide = rows < columns
    if transpose is None:
        return wide
    if rows != columns and transpose != wide:
        side = "columns" if wide else "rows"
        raise ValueError(
            f"the {side} of a {rows} x {columns} matrix can't be orthonormal"
        )
    return transpose


def check_finite(weight: Tensor, what: str = "the weight") -> None:
    """ValueError if a weight has a NaN or an infinity; all ranks must call this."""
    if not _has_no_data(weight) and not whole(weight.detach().isfinite().all()):
        raise ValueError(f"{what} is not finite")


def _sharded() -> ModuleType:
    """The module for weights in shards, imported only where there is one."""
    from cdopt_tutorial.constraints import sharded

    return sharded


def _rounding(weight: Tensor) -> float:
    """‖C‖ that rounding alone leaves, about."""
    return torch.finfo(weight.dtype).eps * weight.numel() ** 0.5


def _at_least_float32(weight: Tensor) -> Tensor:
    return weight.float() if weight.dtype in HALF else weight


def _has_no_data(weight: Tensor) -> bool:
    """Whether a weight is on the meta device, as also a fake tensor's storage is."""
    here = weight.to_local() if is_sharded(weight) else weight
    return here.untyped_storage().device.type == "meta"


def _exactly(weight: Tensor) -> AbstractContextManager:
    """Without autocast."""
    # The meta device, which computes nothing, has no autocast.
    if weight.is_meta or not torch.is_autocast_enabled(weight.device.type):
        return nullcontext()
    return torch.autocast(weight.device.type, enabled=False)
