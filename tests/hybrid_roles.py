"""Roles for the tests of the hybrid; they must be importable by workers."""

import os
import signal
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed.rpc as rpc
from cdopt.nn import get_quad_penalty
from roles import raise_error
from torch import nn
from torch.distributed.nn.api.remote_module import RemoteModule

from cdopt_tutorial.data.bags import Shard
from cdopt_tutorial.engines import Role, launch, process_group, serve
from cdopt_tutorial.engines.probes.attach import wrap
from cdopt_tutorial.engines.seam import gradients
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.engines.watch import pace
from cdopt_tutorial.engines.watch.pace import place
from cdopt_tutorial.hybrid import run_locally, system
from cdopt_tutorial.hybrid.model import Table, dense_layer

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

    wrap(system.Trainer.barrier, impatient)


@dataclass(frozen=True, eq=False)
class Slow(Shard):
    """Data that disturb their trainer at the third batch.

    How is the name of a signal, "nap" with seconds, "raise", "ps die", or the part of
    the step to stall in: see ``stall``.
    """

    how: str = ""

    def batches(self, batch_size, seed):
        for number, batch in enumerate(super().batches(batch_size, seed)):
            if number == 2:
                self._disturb()
            yield batch

    def _disturb(self):
        match self.how.split():
            case ["nap", seconds]:
                time.sleep(float(seconds))
            case ["raise"]:
                raise ArithmeticError("no more data")
            case ["ps", "die"]:
                rpc.rpc_async("ps", die)
            case ["ps", _]:
                rpc.rpc_sync("ps", stall, args=(self.how,))
            case _ if self.how in PARTS:
                stall(self.how)
            case [name]:
                os.kill(os.getpid(), getattr(signal, name))


def play(job, master, *args, **options):
    """What a master returns that drives a job's workers in its own way."""
    serving = [f"trainer{rank}" for rank in range(job.config.num_trainers)] + ["ps"]
    roles = {name: Role(serve, num_threads=1) for name in serving}
    return launch(roles | {"master": Role(master, (job, *args))}, **options)["master"]


def disturbed_master(job, numbers, how):
    """A master whose trainers of these numbers are disturbed in their third step."""
    tasks = system.tasks(job)
    for number in numbers:
        shard = tasks[number].shard
        slow = Slow(shard.bags, shard.begin, shard.total, how)
        tasks[number] = replace(tasks[number], shard=slow)
    return system.drive(TorchRPC(), job, tasks)


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

    def late(report, *args):
        time.sleep(1.0)
        report(*args)

    wrap(system.Trainer.report, late)
    return run_locally(job)


def differ(rank):
    """A trainer's role: how far two replicas are apart before and after one moves."""
    process_group.join(rank, 2, gpus=())
    layer = nn.Linear(2, 3, dtype=torch.float64)
    system.replicate(layer, "cpu")
    answers = [system.ask_difference(layer)]
    with torch.no_grad():
        for perturbed in (0, 1, 1):
            layer.weight[1, 1] += 0.25 * (rank == perturbed)
            layer.bias[2] -= 0.125 * (rank == perturbed)
            answers.append(system.ask_difference(layer))
    return [answer() for answer in answers]


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
