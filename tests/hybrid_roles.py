"""Roles for the tests of the hybrid; they must be importable by workers."""

import os
import signal
import threading
import time
from dataclasses import dataclass, replace

import torch.distributed.rpc as rpc

from cdopt_tutorial.data.bags import Shard
from cdopt_tutorial.hybrid import training


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


def die():
    os.kill(os.getpid(), signal.SIGKILL)
