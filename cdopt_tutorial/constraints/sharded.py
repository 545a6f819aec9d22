"""A constrained weight under FSDP2, which each rank maps in part and then gathers."""

import math

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints.dissolved import Gathered


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
    listed.append(Gathered())
    return {listed.original}
