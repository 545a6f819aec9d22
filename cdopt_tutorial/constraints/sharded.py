"""Constrained weights in shards, as DTensors: each rank maps its own part.

XᵀX is a sum over the rows of X. So if X is cut into rows, each rank computes the XᵀX of
its own rows, one all-reduce adds them up, and the map of a row needs nothing more.
"""

import math
from collections.abc import Sequence

import torch
from cdopt.manifold_torch import oblique_torch, sphere_torch, stiefel_torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints.formulas import Sums, sums_of
from cdopt_tutorial.constraints.geometry import Geometry


def map_before_gathering(
    layer: nn.Module, mesh: DeviceMesh, name: str = "weight"
) -> set[nn.Parameter]:
    """Cut a dissolved weight for FSDP2 along its long side, and gather only A(W).

    Each rank then maps its own part instead of the whole, and the penalty needs no
    further sum. Call it on every rank between ``dissolve`` and ``fully_shard``; pass
    the latter the same mesh, of one dimension, and the result as ``ignored_params``.
    A(W) stays whole until the backward pass, and no ``MixedPrecisionPolicy`` casts it.
    Call it for each layer that shares the weight. Raises ValueError if the weight is
    not dissolved, or already cut.
    """
    known = parametrize.is_parametrized(layer, name)
    listed = getattr(layer.parametrizations, name) if known else None
    if listed is None or len(listed) > 1 or isinstance(listed.original, DTensor):
        raise ValueError(f"{name!r} has to be dissolved, and not cut yet")
    weight = listed.original
    if not hasattr(weight, "cut"):  # as by another layer that shares it
        long_side = int(weight.shape[0] < math.prod(weight.shape[1:]))
        parts = distribute_tensor(weight.detach(), mesh, [Shard(long_side)])
        weight.cut = nn.Parameter(parts, weight.requires_grad)
    listed.original = weight.cut
    listed.append(_Gathered())
    return {listed.original}


class _Gathered(nn.Module):
    """Gathers A(W); its gradient is a mean over the ranks, like FSDP2's."""

    def forward(self, mapped: DTensor) -> Tensor:
        size = mapped.device_mesh.size()
        whole = mapped.full_tensor(grad_placements=[Partial()])
        if whole.requires_grad:
            whole.register_hook(lambda grad: grad / size)
        return whole

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


def placed(
    part: Tensor, like: DTensor, placements: Sequence[Placement] | None = None
) -> DTensor:
    """A tensor of which each rank has a part, by default all, placed like another."""
    mesh, shape, stride = like.device_mesh, like.shape, like.stride()
    placements = placements or [Replicate()] * mesh.ndim
    part = part.to(like.device)
    made = DTensor.from_local(part, mesh, placements, shape=shape, stride=stride)
    return made.redistribute(placements=like.placements)


def part_of(
    on: Geometry, weight: DTensor
) -> tuple[Tensor, Sums, torch.Size, list[Placement]]:
    """This rank's part as X, its sums, and the shape and placements of the parts.

    All ranks of the mesh must call it. Each dimension of the mesh that cuts the weight
    costs, in the forward pass of a map and again in the backward pass:

    - Stiefel, cut along the long side: one all-reduce of C, p × p.
    - Stiefel, cut along the short side: the same, and all-to-alls that cut the weight
      along its long side, and A(W) back along the short one.
    - Stiefel, cut between whole blocks: the scalar, in the forward pass only. A tall
      block that is on several ranks is gathered.
    - Oblique: an all-reduce of the sums that are cut; if none is, of the scalar, in the
      forward pass only.
    - Sphere: an all-reduce of a single number.
    - Oblique by columns, spheres by blocks, and CDOpt's other manifolds: the weight is
      gathered.
    """
    placements, sums = _layout(on, weight)
    part = weight.redistribute(placements=placements).to_local()
    if sums is None:
        x = on.point(part)
        return x, sums_of(x), part.shape, placements
    x = part.flatten(1) if part.ndim > 2 else part
    if on.make is stiefel_torch and on.blocks > 1:
        rows = weight.shape[0] // on.blocks
        x = x.unflatten(0, (x.shape[0] // rows, rows))
    return x, sums, part.shape, placements


def _layout(on: Geometry, weight: DTensor) -> tuple[list[Placement], Sums | None]:
    """A weight's placements for its map, and its sums; None if it is gathered."""
    # The axis that each dimension of the mesh cuts, also by strided shards; torch's
    # type of a placement does not say that those that cut have a `dim`.
    cuts = [None if at.is_replicate() else at.dim for at in weight.placements]  # type: ignore[attr-defined]
    mesh, stiefel = weight.device_mesh, on.make is stiefel_torch
    spheres = on.make is sphere_torch and on.blocks > 1
    if not stiefel and (on.axes is None or on.transpose or spheres):
        return [Replicate()] * mesh.ndim, None
    ranks = math.prod([mesh.size(dim) for dim, cut in enumerate(cuts) if cut == 0])
    split = on.blocks > 1 and on.blocks % ranks > 0  # some block is on several ranks
    rows, columns = weight.shape[0] // on.blocks, math.prod(weight.shape[1:])
    # A square matrix may be either, so its cut decides.
    wide = rows < columns or (rows == columns and (split or 0 not in cuts))
    apart = on.make is oblique_torch or (on.blocks > 1 and not split)
    placements, inner, outer = list(weight.placements), [], []
    for dim, cut in enumerate(cuts):
        if cut == 0 and apart:  # between independent rows or blocks
            outer.append(dim)
        elif cut is not None and stiefel and not wide and on.blocks > 1:
            placements[dim] = Replicate()
        elif cut is not None:
            along = (cut or 1) if wide else 0  # the long side
            if stiefel and along != cut:
                placements[dim] = Shard(along)
            inner.append(dim)
    dims = tuple(inner), tuple(outer)
    return placements, Sums(stiefel and wide, mesh, *dims, rows == columns)
