"""Constrained weights in shards, as DTensors: each rank maps its own part.

XᵀX is a sum over the rows of X. So where ranks have rows of it, each computes the XᵀX
of its own, one all-reduce adds them up, and the map of a row needs nothing more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from cdopt.manifold_torch import oblique_torch, sphere_torch, stiefel_torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cdopt_tutorial.constraints.fused import radial_map, stiefel_map
from cdopt_tutorial.constraints.manifold import PlainSurface


@dataclass(frozen=True)
class Layout:
    """How a weight lies on a mesh while it is mapped, and who completes its sums."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  #: of the weight, by dimension of the mesh
    inner: tuple[int, ...]  #: dimensions of the mesh that split each sum
    outer: tuple[int, ...]  #: those that split the sums among them, each one whole
    wide: bool  #: whether rows are made orthonormal, on the Stiefel manifold

    def inside(self, part: Tensor) -> None:
        """Complete sums to which several ranks contribute."""
        for dim in self.inner:
            dist.all_reduce(part, group=self.mesh.get_group(dim))

    def across(self, part: Tensor) -> None:
        """Sum what each of several ranks has found of its own."""
        for dim in self.outer:
            dist.all_reduce(part, group=self.mesh.get_group(dim))


def map_and_distance(on: PlainSurface, weight: DTensor) -> tuple[DTensor, Tensor]:
    """A(W), placed as the weight, and ‖C(W)‖², a plain scalar, the same on each rank.

    All ranks of the mesh must call it. What they send to each other, on the way there
    and again on the way back, for each dimension of the mesh that cuts the weight:

    - Stiefel, cut along the long side: one all-reduce of C, p × p.
    - Stiefel, cut along the short side: that, and the weight is exchanged for one that
      is cut along the long side, and A(W) exchanged back.
    - Stiefel, cut between whole blocks: the scalar, and nothing on the way back. A tall
      block that is on several ranks is gathered.
    - Oblique: an all-reduce of the sums that are cut, or of the scalar if none is.
    - Sphere: an all-reduce of a single number.
    - Oblique by columns, and CDOpt's other manifolds: the weight is gathered.
    """
    layout = _layout(on, weight)
    if layout is None:
        mapped, distance = on.map_and_distance(weight.full_tensor())
        return placed(mapped, weight), distance
    mapped, distance = _map(on, weight, layout)
    return _placed(mapped, weight, layout.placements), distance


def distance(on: PlainSurface, weight: DTensor) -> Tensor:
    """‖C(W)‖², a plain scalar; a gradient reaches the weight once, not once a rank."""
    layout = _layout(on, weight)
    if layout is None:
        return on.distance(weight.full_tensor())
    return _map(on, weight, layout)[1]


def placed(value: Tensor, like: DTensor) -> DTensor:
    """A tensor that all ranks have, brought to where a DTensor lies."""
    return _placed(value.to(like.device), like, [Replicate()] * like.device_mesh.ndim)


def _layout(on: PlainSurface, weight: DTensor) -> Layout | None:
    """How a weight is mapped where it lies; None if it must be gathered."""
    cuts = [_cut(placement) for placement in weight.placements]
    by_rows = [dim for dim, cut in enumerate(cuts) if cut == 0]
    ranks = math.prod([weight.device_mesh.size(dim) for dim in by_rows])
    split = on.blocks > 1 and on.blocks % ranks > 0  # some block is on several ranks
    wide = False
    if on.make is stiefel_torch:
        rows, columns = weight.shape[0] // on.blocks, math.prod(weight.shape[1:])
        # A square matrix may be either; then what is cut decides.
        either = rows == columns and (split or 0 not in cuts)
        wide = rows < columns or either
    elif on.transpose or on.make not in (oblique_torch, sphere_torch):
        return None
    placements: list[Placement] = list(weight.placements)
    members: dict[str, list[int]] = {"inner": [], "outer": []}
    for dim, cut in enumerate(cuts):
        if cut is None:
            continue
        to, sums = _exchange(on, cut, wide, split)
        if to is None:
            placements[dim] = Replicate()
            continue
        if to != cut:
            placements[dim] = Shard(to)
        members[sums].append(dim)
    inner, outer = tuple(members["inner"]), tuple(members["outer"])
    return Layout(weight.device_mesh, tuple(placements), inner, outer, wide)


def _cut(placement: Placement) -> int | None:
    """The axis of the weight that a dimension of the mesh cuts; None for a replica."""
    if placement.is_partial():
        raise ValueError("a weight is placed as a partial sum: redistribute it first")
    return None if placement.is_replicate() else placement.dim  # strided shards, too


def _exchange(
    on: PlainSurface, cut: int, wide: bool, split: bool
) -> tuple[int | None, str]:
    """Which axis to cut in place of the one that is cut, and which sums that splits."""
    if on.make is sphere_torch:
        return cut, "inner"
    if on.make is oblique_torch:
        return cut, "inner" if cut else "outer"
    if cut == 0 and on.blocks > 1 and not split:  # between blocks
        return cut, "outer"
    if wide:
        return cut or 1, "inner"
    return (0 if on.blocks == 1 else None), "inner"


def _map(on: PlainSurface, weight: DTensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """This rank's part of A(W), and ‖C(W)‖²."""
    part = weight.redistribute(placements=layout.placements).to_local()
    x = part.flatten(1) if part.ndim > 2 else part
    if on.make is not stiefel_torch:
        axes = (0, 1) if on.make is sphere_torch else (1,)
        mapped, distance = radial_map(x, axes, layout)
    else:
        if on.blocks > 1:
            rows = weight.shape[0] // on.blocks
            x = x.unflatten(0, (x.shape[0] // rows, rows))
        mapped, distance = stiefel_map(x, layout.wide, layout)
    return mapped.reshape(part.shape), distance


def _placed(part: Tensor, like: DTensor, placements: Sequence[Placement]) -> DTensor:
    """A tensor of these parts, brought to where another one lies."""
    shape, stride = like.shape, like.stride()
    made = DTensor.from_local(
        part, like.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return made.redistribute(placements=like.placements)
