"""The master, and how a run is started: on workers, or in one process."""

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.futures import Future

from cdopt_tutorial.data.bags import BagSplit, Shard, digit_bags, shards
from cdopt_tutorial.engines import Role, launch, serve
from cdopt_tutorial.engines.remote import remote_method
from cdopt_tutorial.hybrid.config import HybridConfig
from cdopt_tutorial.hybrid.history import History, Progress, Result
from cdopt_tutorial.hybrid.model import (
    HybridModel,
    Table,
    begin_at,
    dense_layer,
    weights_of,
)
from cdopt_tutorial.hybrid.server import make_joint_step
from cdopt_tutorial.hybrid.steps import SERVER, LocalStep
from cdopt_tutorial.hybrid.trainer import HeldOut, Task, fit, run_trainer

MASTER = "master"


@dataclass(frozen=True)
class Job:
    """What is to be trained on what.

    Attributes:
        config: of the run.
        data: bags to learn from and bags held out; the digits by default.
        begin: parameters to begin with, by name, some or all; those of the seed by
            default.
    """

    config: HybridConfig
    data: BagSplit = field(default_factory=digit_bags)
    begin: Mapping[str, Tensor] = field(default_factory=dict)


def run(job: Job, **options: Any) -> Result:
    """Train on workers: the trainers, the master and ``ps``.

    Args:
        job: what to train.
        options: of :func:`~cdopt_tutorial.engines.launch.launch`, for instance
            ``on_report``, which gets each :class:`Progress`.

    Raises:
        ValueError: see :func:`check`.
        WorkerError: a worker failed.
    """
    check(job)
    options.setdefault("polling", False)  # there may be more workers than cores
    options.setdefault("rpc_timeout", 0)  # the launcher notices who is gone
    results = launch(roles(job, Role(run_master, (job,))), **options)
    return Result(job.config, results[MASTER])


def check(job: Job) -> None:
    """See whether a run could begin; called before any process starts.

    Raises:
        ValueError: a trainer's share is less than one image, or a parameter to begin
            with does not fit.
    """
    cut(job)
    if job.begin:
        make(job)


def roles(job: Job, master: Role) -> dict[str, Role]:
    """The system's roles, ranks as in the original: trainers, master, server."""
    num_trainers = job.config.num_trainers
    threads = max(1, psutil.cpu_count() // (num_trainers + 1))  # one for the server
    trainers = {
        f"trainer{rank}": Role(serve, num_threads=threads)
        for rank in range(num_trainers)
    }
    return {**trainers, MASTER: master, SERVER: Role(serve)}


def cut(job: Job) -> list[Shard]:
    """Each trainer's part of the training data.

    Raises:
        ValueError: a trainer's share is less than one image.
    """
    shares = job.config.shares or (1.0,) * job.config.num_trainers
    return shards(job.data.train, shares)


def run_locally(job: Job, tell: Callable[[Progress], None] | None = None) -> Result:
    """The same training in this process: one trainer with the joint batches."""
    config = replace(job.config, num_trainers=1, shares=None, semantics="exact")
    job = replace(job, config=config)
    model = make(job)
    (task,) = tasks(job, cut(job))
    history = fit(model, LocalStep(model, config), task, tell or (lambda _: None))
    history.transport = "none: one process"
    return Result(config, [history])


def make(job: Job) -> HybridModel:
    """The model as it begins, all in this process.

    Raises:
        ValueError: a parameter to begin with is not one of the model's, or not of its
            shape.
    """
    table = Table(job.data.num_tokens, job.config)
    model = HybridModel(table, dense_layer(job.data.num_classes, job.config), "cpu")
    own = weights_of(model)
    for name, value in job.begin.items():
        if name not in own:
            raise ValueError(f"there is no parameter {name!r}, but {', '.join(own)}")
        if value.shape != own[name].shape:
            raise ValueError(
                f"{name} to begin with is {tuple(value.shape)}, but must be "
                f"{tuple(own[name].shape)}"
            )
    begin_at(model.table, "table", job.begin)
    begin_at(model.dense, "dense", job.begin)
    return model


def run_master(job: Job) -> list[History]:
    """The master's role: hand out the work, gather what the trainers report."""
    return drive(job, tasks(job, cut(job)))


def tasks(job: Job, parts: Sequence[Shard]) -> list[Task]:
    """What each trainer is to do with its part of the data."""
    data = job.data
    held_out = HeldOut(data.valid, data.test)
    return [
        Task(
            job.config,
            rank,
            part,
            None if rank else held_out,
            data.num_classes,
            job.begin,
        )
        for rank, part in enumerate(parts)
    ]


def drive(job: Job, work: Sequence[Task]) -> list[History]:
    """Make the table on the server, start the trainers' loops, wait for all of them.

    Runs on the master. The calls last as long as the training does, so they have no
    time-out; the launcher notices who is gone, and each trainer its own delay.
    """
    table = RemoteModule(f"{SERVER}/cpu", Table, (job.data.num_tokens, job.config))
    if job.begin:
        remote_method(begin_at, table.get_module_rref(), "table", job.begin)
    joint = None
    if job.config.semantics == "exact":
        args = table.get_module_rref(), job.config
        joint = rpc.rpc_sync(SERVER, make_joint_step, args=args)
    futures = []
    for task in work:
        name, args = f"trainer{task.trainer}", (table, joint, task)
        futures.append(rpc.rpc_async(name, run_trainer, args, timeout=0))
    return wait_for_all(futures)


def wait_for_all(futures: Sequence[Future]) -> list[Any]:
    """Their results, or the first error, whichever future it comes from.

    Waiting for one after the other would never see that the second has failed while
    the first waits for it.
    """
    done: queue.SimpleQueue = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(done.put)
    for _ in futures:
        done.get().wait()
    return [future.value() for future in futures]
