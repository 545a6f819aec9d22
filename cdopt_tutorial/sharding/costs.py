"""What a step costs: bytes on the wire, and memory on a rank."""

from dataclasses import replace

from torch import Tensor

from cdopt_tutorial.engines import Role, Wire, bytes_per_step, launch, process_group
from cdopt_tutorial.engines.probes.counted import peak_memory
from cdopt_tutorial.engines.seam.device import gpus_of
from cdopt_tutorial.sharding.model import Job
from cdopt_tutorial.sharding.system import Trainer, make_trainer, run

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
    number = job.config.num_ranks
    roles = {f"rank{rank}": Role(_memory, (job, rank)) for rank in range(number)}
    return max(launch(roles).values())


def _memory(job: Job, rank: int) -> int:
    config = job.config
    chosen = process_group.join(rank, config.num_ranks, gpus_of(config.device))
    trainer = make_trainer(job, rank, chosen.device)
    batches = trainer.batches()
    trainer.step(*next(batches))  # the optimizer makes its buffers in the first one
    batch = next(batches)
    return _held(trainer) + peak_memory(lambda: trainer.step(*batch))


def _held(trainer: Trainer) -> int:
    """Bytes of this rank's parameters, and of its optimizer's state."""
    kept = trainer.optimizer.state.values()
    state = [each for of in kept for each in of.values() if isinstance(each, Tensor)]
    return sum(here(each).nbytes for each in (*trainer.model.parameters(), *state))


def here(value: Tensor) -> Tensor:
    """What of a tensor lies on this rank."""
    return value.to_local() if hasattr(value, "to_local") else value
