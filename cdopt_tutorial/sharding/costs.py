"""Which part of the model each rank owns, and what a step costs in bytes and memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves

from cdopt_tutorial import training
from cdopt_tutorial.constraints.surface import is_sharded
from cdopt_tutorial.probes.counted import peak_memory
from cdopt_tutorial.run import Role, launch, process_group
from cdopt_tutorial.sharding.model import Job
from cdopt_tutorial.sharding.system import make_trainer, run

STEPS = 6


class Predicted(NamedTuple):
    """The least that one step of a constrained weight costs each rank."""

    bytes: float  #: sent
    products: float  #: multiplications
    numbers: float  #: kept in memory


def predicted(n: int, p: int, num_ranks: int, itemsize: int) -> dict[str, Predicted]:
    """Costs of a Stiefel weight of n x p numbers, of `itemsize` bytes each.

    A step maps it forward and backward: by "rows" with two all-reduces of p x p
    numbers, "gathered" with an all-gather and a reduce-scatter of the whole, all in
    rings. Kept are the weight, its map, its gradient and two matrices of p x p.
    """
    others, products, square = (num_ranks - 1) / num_ranks, 5 * n * p * p, p * p
    rows = 4 * others * square * itemsize, products / num_ranks
    gathered = 2 * others * n * p * itemsize, products
    return {
        "rows": Predicted(*rows, 3 * n * p / num_ranks + 2 * square),
        "gathered": Predicted(*gathered, 3 * n * p + 2 * square),
    }


def curves(p: int, num_ranks: int) -> dict[str, list[tuple[list[int], list[float]]]]:
    """kB of float32 that a rank sends in a step, over n, as curves for each way."""
    sizes = [2**k for k in range(7, 18)]
    found = [predicted(n, p, num_ranks, 4) for n in sizes]
    names = {"rows": "cut into rows", "gathered": "gathered"}
    return {
        name: [(sizes, [each[cut].bytes / 1e3 for each in found])]
        for cut, name in names.items()
    }


@dataclass(frozen=True)
class Part:
    """The part of a weight that one rank owns."""

    shape: tuple[int, ...]  #: of the whole weight
    begin: tuple[int, ...]  #: the part's first indices in it
    size: tuple[int, ...]  #: the part's own shape

    @property
    def count(self) -> int:
        """Numbers in the part."""
        return math.prod(self.size)


def owned(jobs: Sequence[Job]) -> list[list[dict[str, Part]]]:
    """For each job and each of its ranks, the parts of its parameters, by name.

    The models are built as for training, but on the CPU. All jobs must have the same
    number of ranks. Names are those of the layers' weights.
    """
    ranks = range(jobs[0].config.num_ranks)
    found = launch({f"rank{k}": Role(_parts, (jobs, k)) for k in ranks})
    return [list(of_job) for of_job in zip(*found.values(), strict=True)]


def _parts(jobs: Sequence[Job], rank: int) -> list[dict[str, Part]]:
    process_group.join(rank, jobs[0].config.num_ranks, gpus=())
    found: list[dict[str, Part]] = []
    for job in jobs:
        named = make_trainer(job, rank, "cpu").model.named_parameters()
        layers = ((name.replace(".parametrizations", ""), p) for name, p in named)
        found.append({n.removesuffix(".original"): _part(p) for n, p in layers})
    return found


def _part(value: Tensor) -> Part:
    shape = tuple(value.shape)
    if not is_sharded(value):
        return Part(shape, (0,) * len(shape), shape)
    mesh, placements = value.device_mesh, value.placements
    size, begin = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Part(shape, tuple(begin), tuple(size))


def measured_bytes(job: Job) -> float:
    """Bytes that all ranks together send in a step, counted at their sockets."""
    return training.measured_bytes(run, job, STEPS)


def measured_memory(job: Job) -> int:
    """Bytes of tensors at a step's peak, on the rank that holds most, on the CPU.

    They are its parameters, its optimizers' state, and what a step allocates.
    """
    ranks = range(job.config.num_ranks)
    return max(launch({f"rank{k}": Role(_memory, (job, k)) for k in ranks}).values())


def _memory(job: Job, rank: int) -> int:
    process_group.join(rank, job.config.num_ranks, gpus=())
    trainer = make_trainer(job, rank, "cpu")
    batches = trainer.batches()
    trainer.step(*next(batches))  # the first one allocates the optimizers' state
    batch = next(batches)
    states = [optimizer.state_dict() for optimizer in trainer.optimizers]
    kept = tree_leaves([states, *trainer.model.parameters()])
    tensors = [each for each in kept if isinstance(each, Tensor)]
    here = (each.to_local() if is_sharded(each) else each for each in tensors)
    size = sum(each.nbytes for each in here)
    return size + peak_memory(lambda: trainer.step(*batch))
