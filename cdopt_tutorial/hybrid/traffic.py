"""How many bytes a step sends: by arithmetic, and as the sockets count them."""

from dataclasses import replace

from cdopt_tutorial.data.bags import BagSplit
from cdopt_tutorial.engines import Wire, bytes_per_step
from cdopt_tutorial.hybrid.model import HybridConfig, Job, dense_layer
from cdopt_tutorial.hybrid.system import run

STEPS = 8


def expected_bytes(config: HybridConfig, data: BagSplit) -> float:
    """Bytes of the tensors in a full joint batch's step, of all trainers together.

    gloo reduces around a ring: each of N trainers sends 2 (N - 1) / N times what is
    reduced. The table's own gradient never leaves the server. The messages around the
    tensors are not in it.
    """
    tokens = config.batch_size * len(data.train.tokens) / len(data.train)
    indices = tokens + config.batch_size  # an offset for each bag
    vectors = 2 * config.batch_size * config.embedding  # there, and their gradients
    parameters = list(dense_layer(data.num_classes, config).parameters())
    learnt = sum(each.numel() for each in parameters if each.requires_grad)
    # What is measured, not learnt: the highest and the lowest of each parameter.
    differences = 2 * sum(each.numel() for each in parameters)
    ring = 2 * (config.num_trainers - 1) * (learnt + differences)
    return 8 * indices + (vectors + ring) * config.torch_dtype.itemsize


def measured_bytes(job: Job) -> float:
    """Bytes of a step, by the workers' sockets; of at least two full joint batches."""
    more = min(STEPS, len(job.data.train) // job.config.batch_size - 1)

    def run_steps(steps: int, wire: Wire) -> None:
        run(replace(job, config=replace(job.config, max_steps=steps)), wire=wire)

    return bytes_per_step(run_steps, more)
