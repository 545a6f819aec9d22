"""Roles for the tests of the hybrid; they must be importable by workers."""

import os
import signal
import threading
import time
from dataclasses import dataclass, replace

import torch.distributed.rpc as rpc
from cdopt.nn import get_quad_penalty
from torch.distributed.nn.api.remote_module import RemoteModule

from cdopt_tutorial.data.bags import Shard
from cdopt_tutorial.hybrid import HybridModel, Table, dense_layer, training


@dataclass(frozen=True, eq=False)
class Slow(Shard):
    """Data that a trainer waits for; "sleep" stalls it, "raise" and "kill" end it."""

    how: str = "sleep"

    def batches(self, batch_size, seed):
        for number, batch in enumerate(super().batches(batch_size, seed)):
            if number == 2:
                self._disturb()
            yield batch

    def _disturb(self):
        if self.how == "sleep":
            time.sleep(60)
        if self.how == "raise":
            raise ArithmeticError("no more data")
        os.kill(os.getpid(), getattr(signal, self.how))


def disturbed_master(job, trainer, how):
    """A master whose trainer of this number is in trouble in its third step."""
    tasks = training.tasks(job, training.cut(job))
    shard = tasks[trainer].shard
    slow = Slow(shard.bags, shard.begin, shard.total, how)
    tasks[trainer] = replace(tasks[trainer], shard=slow)
    return training.drive(job, tasks)


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
