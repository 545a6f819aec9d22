"""Which part of the model each rank owns, and what a step costs in bytes and memory."""

import timeit
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves

from cdopt_tutorial import training
from cdopt_tutorial.constraints.sums import is_sharded
from cdopt_tutorial.probes.counted import Sent, peak_memory
from cdopt_tutorial.run import Role, launch, process_group
from cdopt_tutorial.sharding.model import Job
from cdopt_tutorial.sharding.system import (
    Result,
    Trainer,
    make_trainer,
    perplexity,
    run,
)


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


class Cost(NamedTuple):
    """What a step costs one rank."""

    seconds: float  #: median of five
    bytes: int  #: that it gives to collectives
    peak: int  #: bytes of tensors, beyond those at the step's start


def cost(step: Callable[[], object]) -> Cost:
    """Of a step, which this takes seven times; all of its ranks must call it."""
    seconds = median(timeit.repeat(step, number=1, repeat=5))
    with Sent() as sent:
        step()
    return Cost(seconds, sent.bytes, peak_memory(step))


class Part(NamedTuple):
    """The part of a weight that one rank owns."""

    shape: tuple[int, ...]  #: of the whole weight
    begin: tuple[int, ...]  #: the part's first indices in it
    size: tuple[int, ...]  #: the part's own shape


def owned(job: Job) -> list[dict[str, Part]]:
    """Each rank's parts of the parameters, by the names of the layers' weights."""
    return _on_ranks(job, _parts)


def measured_bytes(job: Job) -> float:
    """Bytes that all ranks together send in a step, counted at their sockets."""
    return training.measured_bytes(run, job, most=6)


def measured_memory(job: Job) -> int:
    """Bytes of tensors at a step's peak, on the rank that holds most, on the CPU.

    They are its parameters, its optimizers' state, and what a step allocates.
    """
    return max(_on_ranks(job, _peak))


def figures(job: Job, result: Result) -> dict[str, Any]:
    """What the command writes of a run; its costs are measured on this host."""
    norms = result.feasibility
    return {
        "losses": result.losses,
        "valid_perplexity": perplexity(job, result.weights),
        "seconds_per_step": max(median(rank.step_seconds) for rank in result.ranks),
        "bytes_per_step": measured_bytes(job),
        "peak_memory_bytes": measured_memory(job),
        "transport": result.ranks[0].transport,
        "feasibility": norms and {"weight": norms.weight, "mapped": norms.mapped},
    }


def _on_ranks(job: Job, function: Callable[[Trainer], Any]) -> list:
    """What a function returns on each rank, of its trainer made for the CPU."""
    ranks = range(job.config.num_ranks)
    roles = {f"rank{k}": Role(_on_rank, (job, k, function)) for k in ranks}
    return list(launch(roles).values())


def _on_rank(job: Job, rank: int, function: Callable[[Trainer], Any]) -> Any:
    process_group.join(rank, job.config.num_ranks, gpus=())
    return function(make_trainer(job, rank, "cpu"))


def _parts(trainer: Trainer) -> dict[str, Part]:
    parts = {}
    for name, value in trainer.model.named_parameters():
        name = name.replace(".parametrizations", "").removesuffix(".original")
        shape = tuple(value.shape)
        size, begin = shape, (0,) * len(shape)
        if is_sharded(value):
            cut = value.device_mesh, value.placements
            size, begin = compute_local_shape_and_global_offset(shape, *cut)
        parts[name] = Part(shape, tuple(begin), tuple(size))
    return parts


def _peak(trainer: Trainer) -> int:
    batches = trainer.batches()
    trainer.step(*next(batches))  # the first one allocates the optimizers' state
    batch = next(batches)
    states = [optimizer.state_dict() for optimizer in trainer.optimizers]
    kept = tree_leaves([states, *trainer.model.parameters()])
    tensors = [leaf for leaf in kept if isinstance(leaf, Tensor)]
    here = [t.to_local() if is_sharded(t) else t for t in tensors]
    step_peak = peak_memory(lambda: trainer.step(*batch))
    return sum(tensor.nbytes for tensor in here) + step_peak
