"""Roles for the tests of the hybrid; they must be importable by workers."""

import os
import signal
import threading
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed.rpc as rpc
from cdopt.nn import get_quad_penalty
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer

from cdopt_tutorial.data.bags import Shard
from cdopt_tutorial.hybrid import HybridModel, Table, dense_layer, trainer, training
from cdopt_tutorial.hybrid.server import JointStep

PARTS = {  # of a step, and what is called in them
    "hook": (trainer, "loss_factor"),
    "optimizer": (DistributedOptimizer, "step"),
    "scoring": (trainer._Loop, "_score"),
    "ps lookup": (Table, "forward"),
    "ps step": (JointStep, "_apply"),
}


def stall(part):
    """Make this process stall whenever it comes to a part of a step."""
    trainer.SELDOM = 1  # do not wait longer after an epoch
    owner, name = PARTS[part]
    original = getattr(owner, name)

    def stalls(*args):
        if part != "hook":
            time.sleep(60)
        factor = torch.tensor(original(*args), requires_grad=True)
        factor.register_hook(lambda _: time.sleep(60))
        return factor

    setattr(owner, name, stalls)


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
    tasks = training.tasks(job, training.cut(job))
    tasks[number] = disturbed(tasks[number], how)
    return training.drive(job, tasks)


def napping_master(job, seconds):
    """A master whose trainers all rest in their third step, at the same time."""
    tasks = training.tasks(job, training.cut(job))
    return training.drive(job, [disturbed(task, "nap", seconds) for task in tasks])


def disturbed(task, *how):
    """The task with data that disturb."""
    shard = task.shard
    return replace(task, shard=Slow(shard.bags, shard.begin, shard.total, *how))


def killing_master(job, victim):
    """A master that kills a worker while all of them train."""
    threading.Timer(1.0, rpc.rpc_async, (victim, die)).start()
    return training.run_master(job)


def ask_cdopt(job):
    """What CDOpt's penalty says of the original's model."""
    table = RemoteModule("ps/cpu", Table, (job.data.num_tokens, job.config))
    model = HybridModel(table, dense_layer(job.data.num_classes, job.config), "cpu")
    try:
        return f"the penalty is {get_quad_penalty(model)}"
    except ValueError as error:
        return str(error)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def train_slowly(job):
    """Training in one process, whose reports take long: nobody waits for it."""
    return training.run_locally(job, tell=lambda _: time.sleep(1.0))
