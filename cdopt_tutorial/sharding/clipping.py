"""Clipping, where a model's gradients are spread over ranks in whatever way.

Torch's own ``clip_grad_norm_`` takes gradients that lie on one mesh, as FSDP2 leaves
them; under tensor parallel some are plain tensors, in two dimensions there are two
meshes, and a rank of a pipeline has the gradients of its own layers only.
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from cdopt_tutorial.constraints.surface import whole
from cdopt_tutorial.engines.seam.gradients import clip_factor


def clip(parameters: Iterable[Tensor], largest: float, staged: bool) -> None:
    """Scale the gradients of a model so that their norm is at most ``largest``.

    On every rank, with its own parameters; ``staged`` says that others have others.
    """
    found = [each.grad for each in parameters if each.grad is not None]
    total = _squared_norm(found)
    if staged:
        dist.all_reduce(total)
    factor = clip_factor(total.item(), largest)
    if factor < 1:
        for gradient in found:
            gradient.mul_(factor)


def _squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of all elements; one all-reduce for each mesh."""
    sums: dict = {}
    for each in gradients:
        mesh, square = getattr(each, "device_mesh", None), each.square().sum()
        sums[mesh] = sums[mesh] + square if mesh in sums else square
    return sum(map(whole, sums.values()))
