"""What a step costs: bytes on the wire, and memory on a rank."""

from dataclasses import replace

from torch import Tensor

from cdopt_tutorial.constraints.surface import is_sharded
from cdopt_tutorial.engines import Role, Wire, bytes_per_step, launch
from cdopt_tutorial.engines.probes.counted import peak_memory
from cdopt_tutorial.sharding.model import Job
from cdopt_tutorial.sharding.system import Trainer, join, make_trainer, run

STEPS = 6


def measured_bytes(job: Job) -> float:
    """Bytes that all ranks together send in a step, by their sockets."""

    def run_steps(steps: int, wire: Wire) -> None:
        run(replace(job, config=replace(job.config, max_steps=steps)), wire=wire)

    return bytes_per_step(run_steps, STEPS)


def measured_memory(job: Job) -> int:
    """Bytes of tensors that a rank holds at a step's peak; of the rank with the most.

    Its parameters, what its optimizer keeps, and what a step takes beyond; on the CPU.
    """
    ranks = range(job.config.num_ranks)
    return max(launch({f"rank{k}": Role(_memory, (job, k)) for k in ranks}).values())


def _memory(job: Job, rank: int) -> int:
    trainer = make_trainer(job, rank, join(job.config, rank).device)
    batches = trainer.batches()
    trainer.step(*next(batches))  # the optimizer makes its buffers in the first one
    batch = next(batches)
    return _held(trainer) + peak_memory(lambda: trainer.step(*batch))


def _held(trainer: Trainer) -> int:
    """Bytes on this rank of the parameters, and of the optimizer's state."""
    states = (each for of in trainer.optimizer.state.values() for each in of.values())
    kept = [each for each in states if isinstance(each, Tensor)]
    kept += trainer.model.parameters()
    here = (each.to_local() if is_sharded(each) else each for each in kept)
    return sum(each.nbytes for each in here)
