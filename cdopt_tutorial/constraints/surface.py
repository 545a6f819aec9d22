"""The manifold of any weight: plain or in shards, and of any dtype."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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

from cdopt_tutorial.constraints.manifold import PlainSurface

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


class Surface(PlainSurface):
    """The manifold of a weight of any dtype, which may lie in shards.

    What it gives is placed as the weight.
    """

    def map_and_distance(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A(W), shaped as the weight, and ‖C(W)‖², a plain scalar."""
        if weight.dtype in HALF:
            mapped, distance = self.map_and_distance(weight.float())
            return mapped.to(weight.dtype), distance.to(weight.dtype)
        with _exactly(weight):
            if is_sharded(weight):
                return _sharded().map_and_distance(self, weight)
            return super().map_and_distance(weight)

    def distance(self, weight: Tensor) -> Tensor:
        """‖C(W)‖², a plain scalar."""
        if weight.dtype in HALF:
            return self.distance(weight.float()).to(weight.dtype)
        with _exactly(weight):
            if is_sharded(weight):
                return _sharded().distance(self, weight)
            return super().distance(weight)

    @torch.no_grad()
    def nearest(self, weight: Tensor) -> Tensor:
        """The feasible weight nearest to this one, which is gathered.

        That is done once, and not in a step: by sums alone, which square what is small,
        a weight far from its manifold would come to another point of it.
        """
        with _exactly(weight):
            return placed(super().nearest(whole(weight)), weight)


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
        if transpose is None:
            transpose = rows < columns
        if rows != columns and transpose != (rows < columns):
            long_side = "rows" if rows > columns else "columns"
            of = f"of a {rows} x {columns} matrix"
            raise ValueError(f"the {long_side} {of} can't be orthonormal")
    return Surface(make, blocks, bool(transpose))
