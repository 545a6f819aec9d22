"""What of each weight lies on which rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from cdopt_tutorial.engines import Role, launch
from cdopt_tutorial.sharding.model import Job
from cdopt_tutorial.sharding.system import join, make_trainer


@dataclass(frozen=True)
class Part:
    """The part of a weight that lies on one rank."""

    shape: tuple[int, ...]  #: of the whole weight
    begin: tuple[int, ...]  #: where the part begins in it
    size: tuple[int, ...]  #: how large it is

    @property
    def count(self) -> int:
        """Numbers in the part."""
        return math.prod(self.size)


def owned(jobs: Sequence[Job]) -> list[list[dict[str, Part]]]:
    """For each job and each of its ranks, the parts of its parameters, by name.

    The models are made as they are for a training, on as many ranks as the first job
    has, which must be the number of all. Names are those of the layers' weights.
    """
    ranks = range(jobs[0].config.num_ranks)
    found = launch({f"rank{k}": Role(_parts, (jobs, k)) for k in ranks})
    return [list(of_job) for of_job in zip(*found.values(), strict=True)]


def _parts(jobs: Sequence[Job], rank: int) -> list[dict[str, Part]]:
    device = join(jobs[0].config, rank).device
    return [_parts_of(make_trainer(job, rank, device).model) for job in jobs]


def _parts_of(model: nn.Module) -> dict[str, Part]:
    return {
        name.replace(".parametrizations", "").removesuffix(".original"): _part(value)
        for name, value in model.named_parameters()
    }


def _part(value: Tensor) -> Part:
    """What of a parameter lies here."""
    shape = tuple(value.shape)
    if not isinstance(value, DTensor):
        return Part(shape, (0,) * len(shape), shape)
    mesh, placements = value.device_mesh, value.placements
    size, begin = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Part(shape, tuple(begin), tuple(size))
