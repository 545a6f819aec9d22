"""Roles for the tests of the hybrid; they must be importable by workers."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed.rpc as rpc
from cdopt.nn import get_quad_penalty
from roles import raise_error
from running import LONG
from torch import nn
from torch.distributed.nn.api.remote_module import RemoteModule

from cdopt_tutorial.calls import gradients
from cdopt_tutorial.data.bags import Shard
from cdopt_tutorial.hybrid import system
from cdopt_tutorial.hybrid.model import Table, dense_layer
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


class OriginalModel(nn.Module):
    """The original's model: a module elsewhere, and a layer here."""

    def __init__(self, job):
        super().__init__()
        args = job.data.num_tokens, job.config
        self.table = RemoteModule("ps/cpu", Table, args)
        self.fc = dense_layer(job.data.num_classes, job.config)


def ask_cdopt(job):
    """CDOpt's penalty of the original's model, or its error."""
    try:
        return f"the penalty is {get_quad_penalty(OriginalModel(job))}"
    except ValueError as error:
        return str(error)


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


def wait_both_ways():
    """The error that a master sees whose first trainer hangs and whose second raises.

    First by the book's way of waiting, then by the original's.
    """
    found = []
    for wait in (system.wait_for_all, wait_in_order):
        hanging = rpc.rpc_async("trainer0", time.sleep, (9.0,), timeout=8.0)
        raising = rpc.rpc_async("trainer1", raise_error, timeout=8.0)
        try:
            wait([hanging, raising])
        except Exception as error:
            found.append(str(error))
    return found


def wait_in_order(futures):
    for future in futures:
        future.wait()
