"""Roles for the tests of the hybrid; they must be importable by workers."""

import os
import signal
import threading
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed.rpc as rpc
from cdopt.nn import get_quad_penalty
from torch import nn
from torch.distributed.nn.api.remote_module import RemoteModule

from cdopt_tutorial.data.bags import Shard
from cdopt_tutorial.engines.probes.attach import wrap
from cdopt_tutorial.engines.seam import gradients
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.engines.watch import pace
from cdopt_tutorial.engines.watch.pace import place
from cdopt_tutorial.hybrid import (
    Table,
    dense_layer,
    replicas,
    run_locally,
    system,
)

PARTS = {  # of a step, and what is called in them
    "forward": (system.Trainer, "scores"),
    "hook": (system, "loss_factor"),
    "optimizer": (system, "move"),
    "scoring": (system.Trainer, "score"),
    "ps lookup": (Table, "forward"),
    "ps step": (system, "move"),
}


def stall(part):
    """Make this process stall whenever it comes to a part of a step."""
    owner, name = PARTS[part]
    original = getattr(owner, name)

    def stalls(*args):
        if part != "hook":
            time.sleep(60)
        factor = torch.tensor(original(*args), requires_grad=True)
        factor.register_hook(lambda _: time.sleep(60))
        return factor

    setattr(owner, name, stalls)


def attach_impatiently(deadline):
    """Do not wait longer for what is done after an epoch."""

    def impatient(barrier, *args):
        with place(deadline):
            barrier(*args)

    wrap(replicas.barrier, impatient)


@dataclass(frozen=True, eq=False)
class Slow(Shard):
    """Data that disturb their trainer at the third batch; how is a signal or one of

    "sleep", "nap" (for so many seconds), "raise", or the part of the step to stall in:
    see ``stall``.
    """

    how: str = "sleep"
    nap: float = 0.0

    def batches(self, batch_size, seed):
        for number, batch in enumerate(super().batches(batch_size, seed)):
            if number == 2:
                self._disturb()
            yield batch

    def _disturb(self):
        if self.how == "nap":
            time.sleep(self.nap)
            return
        if self.how == "sleep":
            time.sleep(60)
        if self.how == "raise":
            raise ArithmeticError("no more data")
        if self.how.startswith("ps "):
            rpc.rpc_sync("ps", stall, args=(self.how,))
        elif self.how in PARTS:
            stall(self.how)
        else:
            os.kill(os.getpid(), getattr(signal, self.how))


def disturbed_master(job, number, how):
    """A master whose trainer of this number is in trouble in its third step."""
    tasks = system.tasks(job)
    tasks[number] = disturbed(tasks[number], how)
    return system.drive(TorchRPC(), job, tasks)


def napping_master(job, seconds):
    """A master whose trainers all rest in their third step, at the same time."""
    tasks = [disturbed(task, "nap", seconds) for task in system.tasks(job)]
    return system.drive(TorchRPC(), job, tasks)


def disturbed(task, *how):
    """The task with data that disturb."""
    shard = task.shard
    return replace(task, shard=Slow(shard.bags, shard.begin, shard.total, *how))


def killing_master(job, victim):
    """A master that kills a worker while all of them train."""
    threading.Timer(1.0, rpc.rpc_async, (victim, die)).start()
    return system.drive(TorchRPC(), job, system.tasks(job))


def counting_master(job):
    """A master that asks what is left on the server after a run with cuts."""
    system.drive(TorchRPC("cut"), job, system.tasks(job))
    return rpc.rpc_sync("ps", kept)


def pacing_master(job):
    """A master that asks how many places each trainer has passed in the end."""
    trainers = [f"trainer{task.rank}" for task in system.tasks(job)]
    system.drive(TorchRPC(), job, system.tasks(job))
    return [rpc.rpc_sync(trainer, places) for trainer in trainers]


def places():
    return pace._places


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
    """What CDOpt's penalty says of the original's model."""
    try:
        return f"the penalty is {get_quad_penalty(OriginalModel(job))}"
    except ValueError as error:
        return str(error)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def train_slowly(job):
    """Training in one process, whose reports take long: nobody waits for it."""
    return run_locally(job, on_report=lambda *_: time.sleep(1.0))


def differ(rank, perturbed):
    """A trainer's role: how far two replicas are apart, one of which was moved."""
    replicas.join(rank, 2, gpus=())
    layer = nn.Linear(2, 3, dtype=torch.float64)
    replicas.replicate(layer, "cpu")
    differences = replicas.Differences(layer)
    differences.ask()
    with torch.no_grad():
        layer.weight[1, 1] += 0.25 * (rank == perturbed)
        layer.bias[2] -= 0.125 * (rank == perturbed)
    differences.ask()
    return differences.answers(), differences.answers()


def raise_error():
    raise ArithmeticError("no more data")


def wait_both_ways():
    """A master whose first trainer hangs, while the second raises.

    What it sees: by the book's way of waiting, then by the original's.
    """
    found = []
    for wait in (system.wait_for_all, wait_in_order):
        hanging = rpc.rpc_async("trainer0", time.sleep, (4.0,), timeout=3.0)
        raising = rpc.rpc_async("trainer1", raise_error, timeout=3.0)
        try:
            wait([hanging, raising])
        except Exception as error:
            found.append(str(error))
    return found


def wait_in_order(futures):
    for future in futures:
        future.wait()
