"""What of each weight lies on which rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from cdopt_tutorial.engines import Role, launch, process_group
from cdopt_tutorial.engines.seam.device import gpus_of
from cdopt_tutorial.sharding.model import Job
from cdopt_tutorial.sharding.system import make_trainer


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
    number = jobs[0].config.num_ranks
    roles = {f"rank{rank}": Role(_parts, (jobs, rank)) for rank in range(number)}
    by_rank = launch(roles).values()
    return [list(of_job) for of_job in zip(*by_rank, strict=True)]


def _parts(jobs: Sequence[Job], rank: int) -> list[dict[str, Part]]:
    config = jobs[0].config
    chosen = process_group.join(rank, config.num_ranks, gpus_of(config.device))
    trainers = (make_trainer(job, rank, chosen.device) for job in jobs)
    return [
        {
            name.replace(".parametrizations", "").removesuffix(".original"): part(value)
            for name, value in trainer.model.named_parameters()
        }
        for trainer in trainers
    ]


def part(value: Tensor) -> Part:
    """What of a parameter lies here."""
    shape = tuple(value.shape)
    if not isinstance(value, DTensor):
        return Part(shape, (0,) * len(shape), shape)
    mesh, placements = value.device_mesh, value.placements
    size, begin = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Part(shape, tuple(begin), tuple(size))
