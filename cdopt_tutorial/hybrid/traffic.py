"""How many bytes a step sends: by arithmetic, and as the sockets count them."""

import math
from dataclasses import replace

from cdopt_tutorial.data.bags import BagSplit
from cdopt_tutorial.engines import Wire, bytes_per_step
from cdopt_tutorial.hybrid.model import HybridConfig, Job, dense_layer
from cdopt_tutorial.hybrid.system import run

STEPS = 8
INDEX = 8  # bytes of a token or an offset


def expected_parts(config: HybridConfig, data: BagSplit) -> dict[str, float]:
    """Bytes of each kind of tensor in a full joint batch's step, of all trainers.

    gloo reduces around a ring: each of N trainers sends 2 (N - 1) / N times what is
    reduced. The table's own gradient never leaves the server.
    """
    numbers = config.torch_dtype.itemsize
    vectors = config.batch_size * config.embedding * numbers
    bag = len(data.train.tokens) / len(data.train)
    parameters = list(dense_layer(data.num_classes, config).parameters())
    learnt = sum(each.numel() for each in parameters if each.requires_grad)
    ring = 2 * (config.num_trainers - 1)
    return {
        "tokens": config.batch_size * bag * INDEX,
        "offsets": config.batch_size * INDEX,
        "vectors": vectors,
        "gradients of vectors": vectors,
        "gradients of the dense layer": ring * learnt * numbers,
        # What is measured, not learnt: the highest and the lowest of each parameter.
        "replica difference": ring * 2 * numbers * sum(p.numel() for p in parameters),
    }


def expected_bytes(config: HybridConfig, data: BagSplit) -> float:
    """Bytes of all tensors of a step, without the messages around them."""
    return sum(expected_parts(config, data).values())


def measured_bytes(job: Job) -> float:
    """Bytes of a step, by the workers' sockets; NaN without two full joint batches."""
    more = min(STEPS, len(job.data.train) // job.config.batch_size - 1)

    def run_steps(steps: int, wire: Wire) -> None:
        run(replace(job, config=replace(job.config, max_steps=steps)), wire=wire)

    return bytes_per_step(run_steps, more) if more > 0 else math.nan
