"""Roles for the tests of the hybrid; they must be importable by workers."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed.rpc as rpc
from roles import raise_error
from running import LONG
from torch import nn

from cdopt_tutorial.calls import gradients
from cdopt_tutorial.data.bags import Shard
from cdopt_tutorial.hybrid import system
from cdopt_tutorial.hybrid.model import Table
from cdopt_tutorial.run import Role, launch, process_group, serve


def stall():
    """Have this process stall in every lookup."""

    def stalled(*_):
        time.sleep(LONG)

    Table.forward = stalled


@dataclass(frozen=True, eq=False)
class Slow(Shard):
    """Data that call a function at the third batch."""

    disturb: Callable[[], object]

    def batches(self, batch_size, seed):
        for number, batch in enumerate(super().batches(batch_size, seed)):
            if number == 2:
                self.disturb()
            yield batch


def play(job, master, *args, **options):
    """What a master of one's own returns, which drives a job's workers."""
    serving = [f"trainer{rank}" for rank in range(job.config.num_trainers)] + ["ps"]
    roles = {name: Role(serve, num_threads=1) for name in serving}
    return launch(roles | {"master": Role(master, (job, *args))}, **options)["master"]


def disturbed_master(job, numbers, disturb):
    """A master with some trainers that are disturbed before their third step."""
    tasks = system.tasks(job)
    for number in numbers:
        slow = Slow(**vars(tasks[number].shard), disturb=disturb)
        tasks[number] = replace(tasks[number], shard=slow)
    return system.drive(job, tasks)


def counting_master(job):
    """A master that returns what is left on the server after a run with cuts."""
    system.drive(job, system.tasks(job))
    return rpc.rpc_sync("ps", kept)


def kept():
    return len(gradients._kept_gradients), len(gradients._kept_graphs)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def differ(rank):
    """A trainer's role: the difference of two replicas before and after one moves."""
    process_group.join(rank, 2, gpus=())
    layer = nn.Linear(2, 3, dtype=torch.float64)
    system.replicate(layer, "cpu")
    differences = [system.replica_difference(layer)]
    with torch.no_grad():
        for perturbed in (0, 1, 1):
            layer.weight[1, 1] += 0.25 * (rank == perturbed)
            layer.bias[2] -= 0.125 * (rank == perturbed)
            differences.append(system.replica_difference(layer))
    return differences


def wait_for_both():
    """What a master hears whose first trainer hangs and whose second raises."""
    hanging = rpc.rpc_async("trainer0", time.sleep, (9.0,), timeout=8.0)
    raising = rpc.rpc_async("trainer1", raise_error, timeout=8.0)
    try:
        system.wait_for_all([hanging, raising])
    except Exception as error:
        return str(error)
