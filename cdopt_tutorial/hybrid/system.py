"""The system: servers with a table, trainers that step together, and a master."""

import queue
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from joblib import cpu_count
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from cdopt_tutorial.calls import alone, gradients, remote
from cdopt_tutorial.calls.device import device_for, gpus_of, weights_of
from cdopt_tutorial.calls.references import Reference
from cdopt_tutorial.calls.rendezvous import Rendezvous
from cdopt_tutorial.calls.steps import make_optimizer, move
from cdopt_tutorial.constraints import Constraints
from cdopt_tutorial.data.bags import Bags, Batch, Shard, shards
from cdopt_tutorial.hybrid.checkpoint import (
    complete,
    load,
    load_rows,
    save_rows,
    settings_of,
)
from cdopt_tutorial.hybrid.model import (
    History,
    HybridConfig,
    Job,
    Result,
    dense_layer,
)
from cdopt_tutorial.hybrid.table import (
    ColumnsOnServers,
    OnServers,
    Table,
    name_of_table,
    table_on_device,
)
from cdopt_tutorial.probes import trace
from cdopt_tutorial.run import Role, launch, process_group, report, serve, span
from cdopt_tutorial.training import Progress, Projected, Score, check_begin

MASTER, SERVER = "master", "ps"


class JointStep:
    """Steps a server's rows by the mean of all trainers' gradients, like DDP."""

    def __init__(self, table: Reference, config: HybridConfig):
        self.table = table.local_value()
        self.parameters = list(self.table.parameters())
        self.optimizer = make_optimizer(self.parameters, config)
        self._all = Rendezvous(self._step, range(config.num_trainers))

    def step(self, trainer: int, context: gradients.Context) -> Future:
        """Join a step with the gradients of a trainer's context; done once it is."""
        return self._all.enter(trainer, context)

    def _step(self, contexts: Mapping[int, gradients.Context]) -> dict[int, None]:
        total = gradients.take_sum(contexts.values(), self.parameters)
        mean = {p: gradient / len(contexts) for p, gradient in total.items()}
        move(self.optimizer, mean)
        return dict.fromkeys(contexts)


class OriginalStep:
    """The original's: each trainer's whole gradient moves the table, N times a step."""

    def __init__(self, table: Reference, config: HybridConfig):
        part, trainers = table.local_value(), range(config.num_trainers)
        self._parameters = list(part.parameters())
        self._optimizers = [make_optimizer(self._parameters, config) for _ in trainers]
        self._lock = threading.Lock()

    def step(self, trainer: int, context: gradients.Context) -> None:
        """Step with the gradients of a trainer's context."""
        with self._lock:
            grads = gradients.take_sum([context], self._parameters)
            move(self._optimizers[trainer], grads)


def make_table(job: Job) -> OnServers:
    """Make the table's part on each server, and what steps it."""
    config, num_tokens = job.config, job.data.num_tokens
    kind = JointStep if config.semantics == "exact" else OriginalStep
    whole = job.begin.get(name_of_table(config))
    parts, steps = list[Reference](), list[Reference]()
    for server, name in enumerate(server_names(config)):
        rows = None
        if whole is not None:  # a copy, or all of it would be sent
            rows = whole[server :: config.num_servers].contiguous()
        parts.append(remote(name, table_on_device, num_tokens, config, rows, server))
        steps.append(remote(name, kind, parts[-1], config))
    table = OnServers(parts, steps)
    if config.is_spread:
        table = ColumnsOnServers(parts, steps, num_tokens, config)
        if whole is None:
            table.begin_feasible()
    if job.resume is not None:
        saved = load(job.resume)
        table.on_servers(load_rows, saved.folder, saved.settings["num_servers"])
    return table


def loss_factor(batch: Batch, config: HybridConfig) -> float:
    """The factor of a trainer's summed loss.

    The original's makes it the mean of the trainer's own batch. The exact one undoes
    DDP's mean over N trainers: that of N·sₜ/B is the joint batch's Σₜ sₜ/B.
    """
    if config.semantics == "original":
        return 1 / max(1, len(batch.bags))
    return config.num_trainers / batch.joint


def penalty_factor(trainer: int, config: HybridConfig) -> int:
    """The factor of a trainer's penalty with which it enters a step once."""
    if config.constrained == "dense":
        return 1  # DDP averages the replicas'
    if config.constrained is None or trainer > 0:
        return 0  # the first trainer adds the table's, for all
    return config.num_trainers if config.semantics == "exact" else 1


def replicate(layer: nn.Module, device: str) -> DistributedDataParallel:
    """A layer of this trainer's as a replica, which begins like the first one's."""
    ids = [torch.device(device)] if device != "cpu" else None
    replica = DistributedDataParallel(layer, device_ids=ids)

    def all_reduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        plain = partial(default_hooks.allreduce_hook, group, bucket)  # DDP's default
        return trace.mark_until_done("all-reduce", plain)

    if trace.collect() is not None:
        replica.register_comm_hook(replica.process_group, all_reduce)
    return replica


@torch.no_grad()
def replica_difference(layer: nn.Module) -> float:
    """The largest of any parameter between two replicas; all trainers call this."""
    flat = torch.cat([weight.flatten() for weight in layer.parameters()])
    both = torch.cat((flat, -flat))
    dist.all_reduce(both, dist.ReduceOp.MAX)
    highest, minus_lowest = both.chunk(2)
    return (highest + minus_lowest).max().item()


class Trainer:
    """One trainer: the dense layer here, the table elsewhere, and how both learn."""

    def __init__(self, table: OnServers, rank: int, shard: Shard, job: Job):
        config = job.config
        self.table, self.rank, self.shard = table, rank, shard
        self.job, self.config = job, config
        self.device = device_for(config.device, rank)
        self.dense = dense_layer(job.data.num_classes, config).to(self.device)
        nn.ModuleDict({"dense": self.dense}).load_state_dict(job.begin, strict=False)
        self.fc: nn.Module = self.dense  # what it learns through: DDP on workers
        self.optimizer = make_optimizer(self.dense.parameters(), config)
        self.first_epoch = 0
        if job.resume is not None:
            saved = load(job.resume)
            self.first_epoch = saved.epoch
            self.dense.load_state_dict(saved.dense["layer"])
            state = deepcopy(saved.dense["optimizer"])  # or it would map the file
            self.optimizer.load_state_dict(state)
        self.constraints: Constraints | ColumnsOnServers | None = None
        if isinstance(table, ColumnsOnServers):
            self.constraints = table
        elif config.constrained is not None:
            owned = [self.dense] if config.constrained == "dense" else table.parts
            self.constraints = Constraints(*owned)
        self.penalty_factor = penalty_factor(rank, config)
        # Each is in charge of its own layer, but only the first one of the table.
        self.in_charge = config.constrained == "dense" or rank == 0
        self.history = History()

    def run(self) -> History:
        """Join the other trainers and train with them; called by the master."""
        of = self.rank, self.config.num_trainers, gpus_of(self.config.device)
        chosen = process_group.join(*of, ddp_only=True)
        self.history.transport = chosen.why
        self.fc = replicate(self.dense, self.device)
        return self.train()

    def train(self) -> History:
        """The whole training: learn, validate, test, project."""
        config, data, history = self.config, self.job.data, self.history
        limit = config.max_steps or sys.maxsize
        for epoch in range(self.first_epoch, config.epochs):
            batches = self.shard.batches(config.batch_size, 1000 * config.seed + epoch)
            self.learn(islice(batches, limit - len(history.losses)))
            self.barrier()  # until every trainer's last step has moved the table
            valid = self.score(data.valid)
            if self.job.keep is not None and len(history.losses) < limit:
                self.save(self.job.keep, epoch + 1)
            self.barrier()
            self.report(epoch, valid)
            if len(history.losses) == limit:
                break
        if self.fc is not self.dense:
            history.replica_difference = replica_difference(self.dense)
        if self.rank == 0:
            history.test = self.score(data.test)
            history.weights = weights_of(self.dense, "dense.")
            if config.gather:
                history.weights |= {name_of_table(config): self.table.weight()}
        if self.constraints is not None:
            history.projected = self.project(self.constraints)
        return history

    def save(self, keep: Path, epoch: int) -> None:
        """Keep a checkpoint of a complete pass, in place of older ones."""
        folder = keep / f"epoch-{epoch}"
        self.table.on_servers(save_rows, folder)
        layer, optimizer = self.dense.state_dict(), self.optimizer.state_dict()
        dense = {"layer": layer, "optimizer": optimizer}
        complete(folder, settings=settings_of(self.job), epoch=epoch, dense=dense)

    def barrier(self) -> None:
        """Wait for all trainers, if there are others."""
        if self.fc is not self.dense:
            dist.barrier()

    def learn(self, batches: Iterable[Batch]) -> None:
        """Step on each of these batches, and record what the history has of a step."""
        history = self.history
        for batch in batches:
            start = time.perf_counter()
            history.losses.append(self.step(batch))
            history.step_seconds.append(time.perf_counter() - start)
            history.images.append(len(batch.bags))
            if self.constraints and self.in_charge:
                history.feasibility.append(self.constraints.feasibility())

    def step(self, batch: Batch) -> float:
        """One step with all trainers: the summed loss of this one's images."""
        bags = batch.bags
        with gradients.context() as context:
            with span("lookup"):
                vectors = self.table.lookup(bags.tokens)
            with span("dense forward"):
                scores = self.fc(vectors.to(self.device))
            labels = bags.labels.to(self.device)
            total = F.cross_entropy(scores, labels, reduction="sum")
            loss = loss_factor(batch, self.config) * total
            if self.constraints and self.penalty_factor:
                loss = loss + self.penalty_factor * self.constraints.penalty()
            with span("backward"):
                gradients.backward(context, loss)
            with span("optimizer"):
                grads = gradients.gradients(context, self.dense.parameters())
                move(self.optimizer, grads)
                self.table.step(self.rank, context)
        return total.item()

    def report(self, epoch: int, valid: Score | None) -> None:
        """Report this trainer's progress to the parent process."""
        history = self.history
        first = history.progress[-1].step if history.progress else 0
        of_epoch, images = history.losses[first:], history.images[first:]
        mean = sum(of_epoch) / max(1, sum(images))
        history.progress.append(Progress(epoch + 1, len(history.losses), mean, valid))
        report(history.progress[-1])

    @torch.no_grad()
    def score(self, bags: Bags) -> Score | None:
        """The model's score on some bags now, if any; involves no other trainer."""
        if not len(bags):
            return None
        scores = self.dense(self.table.lookup(bags.tokens).to(self.device)).cpu()
        right = (scores.argmax(1) == bags.labels).double().mean().item()
        return Score(F.cross_entropy(scores, bags.labels).item(), right)

    def project(self, constraints: Constraints | ColumnsOnServers) -> Projected:
        """Make the trained model exactly feasible; each replica does so by itself."""
        self.barrier()
        if self.in_charge:
            constraints.project_()
        self.barrier()
        return Projected(self.score(self.job.data.test), constraints.feasibility())


def divide(job: Job) -> list[tuple[int, Shard, Job]]:
    """Each trainer's rank and share, and its job: what else it needs of the whole one.

    Only the first one evaluates and keeps checkpoints. ValueError if a share comes to
    no image.
    """
    data, shares = job.data, job.config.shares or (1.0,) * job.config.num_trainers
    none = data.train.select(torch.arange(0))
    dense = {n: weight for n, weight in job.begin.items() if n[:6] == "dense."}
    first = replace(job, data=replace(data, train=none), begin=dense)
    no_data = replace(data, train=none, valid=none, test=none)
    other = replace(first, data=no_data, keep=None)
    return [
        (rank, shard, other if rank else first)
        for rank, shard in enumerate(shards(data.train, shares))
    ]


def drive(job: Job) -> list[History]:
    """Make the table, start the trainers, and wait for them; the master's role."""
    table = make_table(job)
    trainers = [remote(f"trainer{of[0]}", Trainer, table, *of) for of in divide(job)]
    # Without a time-out, since the calls last as long as the training.
    calls = [trainer.rpc_async(timeout=0).run() for trainer in trainers]
    # Waiting in order, one would not notice that the second fails before the first.
    done: queue.SimpleQueue = queue.SimpleQueue()
    for call in calls:
        call.add_done_callback(done.put)
    for _ in calls:
        done.get().wait()
    return [call.value() for call in calls]


def server_names(config: HybridConfig) -> list[str]:
    """The servers: ``ps`` or, if there are several, ``ps0`` and so on."""
    number = config.num_servers
    return [f"{SERVER}{server}" for server in range(number)] if number > 1 else [SERVER]


def first_weights(job: Job) -> dict[str, Tensor]:
    """The seed's initial parameters, by name."""
    table = Table(job.data.num_tokens, replace(job.config, num_servers=1))
    dense = dense_layer(job.data.num_classes, job.config)
    return weights_of(table, "table.") | weights_of(dense, "dense.")


def checked(job: Job) -> Job:
    """The job, whose folders are absolute; ValueError if it is impossible here."""
    divide(job)
    rows, config = job.data.num_tokens, job.config
    if job.keep is not None and config.semantics == "original":
        raise ValueError("semantics is 'original', but must be exact to be kept")
    if config.is_spread and rows < config.embedding:
        raise ValueError(
            f"embedding is {config.embedding}, but must be 1 to {rows}: columns can't "
            "be orthonormal in fewer rows"
        )
    if job.begin:
        check_begin(job.begin, first_weights(job))
    resume = None
    if job.resume is not None:
        saved = load(job.resume.absolute())
        saved.fits(job)
        resume = saved.folder  # this one for all, even if a later one comes
    return replace(job, keep=job.keep and job.keep.absolute(), resume=resume)


def run(job: Job, **options: Any) -> Result:
    """Train on workers: the trainers, the master and the servers.

    The options are those of :func:`~.launch.launch`. Raises a ValueError for a job that
    is impossible here, and a WorkerError if a worker failed.
    """
    job, number = checked(job), job.config.num_trainers
    servers = server_names(job.config)
    threads = max(1, cpu_count() // (number + len(servers)))
    trainer = Role(serve, num_threads=threads)
    roles = {f"trainer{rank}": trainer for rank in range(number)}  # as in the original
    roles |= {MASTER: Role(drive, (job,))}
    roles |= {server: Role(serve) for server in servers}
    return Result(job.config, launch(roles, **options)[MASTER])


def run_locally(job: Job) -> Result:
    """The same training in this process, by one trainer with the joint batches."""
    config = replace(
        job.config, num_trainers=1, num_servers=1, shares=None, semantics="exact"
    )
    job = checked(replace(job, config=config))
    ((rank, shard, rest),) = divide(job)
    with alone():
        trainer = Trainer(make_table(job), rank, shard, rest)
        return Result(config, [trainer.train()])
