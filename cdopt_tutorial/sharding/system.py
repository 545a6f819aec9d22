"""The system: ranks that split one model, its data, or both, and train it."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from joblib import cpu_count
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from cdopt_tutorial import data
from cdopt_tutorial.calls.device import device_for, device_of, gpus_of
from cdopt_tutorial.calls.steps import clip_factor
from cdopt_tutorial.constraints import Constraints, Feasibility
from cdopt_tutorial.constraints.rivals import feasibility
from cdopt_tutorial.constraints.sums import whole
from cdopt_tutorial.data import Stream
from cdopt_tutorial.run import Role, launch, process_group
from cdopt_tutorial.sharding.model import (
    STAGED,
    Job,
    ShardConfig,
    constrain,
    kept,
    optimizers,
    transformer,
)
from cdopt_tutorial.training import History

# How tensor parallel cuts a block: by heads, and through the middle of the MLP. Torch
# means the transposed weight: Colwise cuts rows.
BY_ROWS = "attention.q", "attention.k", "attention.v", "up"
CUTS: dict[str, ParallelStyle] = dict.fromkeys(BY_ROWS, ColwiseParallel())
CUTS |= dict.fromkeys(("attention.out", "down"), RowwiseParallel())


def spread(model: nn.Sequential, config: ShardConfig, device: str) -> nn.Module:
    """Spread a free model over the ranks and constrain it; returns what to call.

    Every rank calls this with the same model. The order matters: tensor parallelism
    cuts plain layers, dissolving maps the parts, and FSDP cuts the trained weights.
    """
    kind, names = device.partition(":")[0], ("data", "parts")
    mesh = init_device_mesh(kind, config.mesh, mesh_dim_names=names)
    if config.strategy in ("tp", "2d"):
        for name, part in model.named_children():
            if name.startswith("block"):
                parallelize_module(part, mesh["parts"], CUTS)
    constrain(model, config)
    if config.strategy in ("fsdp", "2d"):
        for part in model:
            fully_shard(part, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    if config.strategy == "ddp":
        return DistributedDataParallel(model)
    return model


def stage_of(model: nn.Sequential, rank: int, num_ranks: int) -> nn.Module:
    """The layers of one rank of a pipeline, of which the blocks are shared evenly."""
    blocks = len(model) - 2
    inner = (1 + blocks * number // num_ranks for number in range(1, num_ranks))
    ends = [0, *inner, len(model)]
    return model[ends[rank] : ends[rank + 1]]


class Trainer:
    """One rank, or one process: its model, its data, and its optimizers."""

    stages: dist.ProcessGroup | None = None  # a pipeline's

    def __init__(self, job: Job, model: nn.Module, forward: nn.Module, copy: int = 0):
        self.job, self.config = job, job.config
        self.model, self.forward = model, forward
        self.copy = copy  # whose part of each batch it takes
        self.device = device_of(model)
        free = job.config.manifold == "none" or job.config.keeps
        self.constraints = None if free else Constraints(model)
        self.kept = kept(model, job.config)
        self.optimizers = optimizers(model, job.config)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """A step, together with all ranks; the mean loss of these tokens, in nats."""
        loss = self.backward(tokens, targets)
        if self.config.clip is not None:
            self.clip(self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        return loss

    def backward(self, tokens: Tensor, targets: Tensor) -> float:
        """Add the gradients of a batch (batch, seq_len) and of the penalty."""

        def forward() -> Tensor:
            return next_word_loss(self.forward(tokens), targets)

        if self.constraints is None:
            total = loss = forward()
        else:
            loss, penalty = self.constraints.with_penalty(forward)
            total = loss + penalty
        total.backward()
        return loss.item()

    def clip(self, largest: float) -> None:
        """Scale the gradients so that their norm over all ranks is at most ``largest``.

        Torch's own ``clip_grad_norm_`` refuses gradients of several meshes, or plain
        ones beside them, and sees only one stage of a pipeline.
        """
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        squares = (whole(gradient.square().sum()) for gradient in gradients)
        total = sum(squares, torch.zeros((), device=self.device))
        if self.stages is not None:
            dist.all_reduce(total, group=self.stages)
        factor = clip_factor(total.item(), largest)
        for gradient in gradients:
            gradient.mul_(factor)

    def batches(self) -> Iterator[Tensor]:
        """This rank's tokens and the next ones, (2, batch, seq_len), without end."""
        copies, _ = self.config.mesh
        stream = self.job.stream().shard(self.copy, copies)
        while True:
            for tokens, targets in stream.windows():
                if len(tokens) == self.config.seq_len:
                    # Copied, because torch 2.11's stages refuse views.
                    yield torch.stack((tokens.T, targets.T)).to(self.device)

    def weights(self) -> dict[str, Tensor]:
        """The whole parameters by name, on the CPU; all ranks must call this."""
        named = self.model.named_parameters()
        return {name: whole(value).detach().cpu() for name, value in named}


class StageTrainer(Trainer):
    """One rank of one or several pipelines: some of the layers, all of its data."""

    def __init__(self, job: Job, model: nn.Module, rank: int):
        (copies, parts), kind = job.config.mesh, device_of(model).type
        mesh = init_device_mesh(kind, job.config.mesh, mesh_dim_names=("data", "parts"))
        group, forward = mesh["data"].get_group(), model
        if copies > 1:
            # Unless DDP looks for unused parameters, it takes each piece of a batch for
            # a step of its own, and fails in the second step (torch 2.13).
            forward = DistributedDataParallel(
                model, process_group=group, find_unused_parameters=True
            )
        super().__init__(job, model, forward, rank // parts)
        self.stages = mesh["parts"].get_group()
        where = rank % parts, parts, self.device
        self.stage = PipelineStage(forward, *where, group=self.stages)
        self.schedule = ScheduleGPipe(self.stage, parts, loss_fn=next_word_loss)

    def backward(self, tokens: Tensor, targets: Tensor) -> float:
        """The same, in as many pieces as stages; only the last one knows the loss."""
        losses: list[Tensor] = []
        given = (tokens,) if self.stage.is_first else ()
        wanted = targets if self.stage.is_last else None
        self.schedule.step(*given, target=wanted, losses=losses)
        if self.constraints is not None:
            self.constraints.penalty().backward()
        return torch.stack(losses).mean().item() if losses else math.nan


def next_word_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of scores (batch, seq_len, vocab_size)."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Result:
    """What a run returns."""

    ranks: Sequence[History]  #: one each; losses are NaN on a rank that sees none

    @property
    def losses(self) -> list[float]:
        """Mean loss of each step's tokens, in nats, without the penalty."""
        losses = [rank.losses for rank in self.ranks]
        return torch.tensor(losses, dtype=torch.float64).nanmean(0).tolist()

    @property
    def weights(self) -> dict[str, Tensor]:
        """The whole parameters by name."""
        return {n: w for rank in self.ranks for n, w in rank.weights.items()}

    @property
    def feasibility(self) -> Feasibility | None:
        """How far all of the model's weights are from their manifolds."""
        measured = sum((rank.feasibility for rank in self.ranks), [])
        layers = {n: d for rank in measured for n, d in rank.layers.items()}
        return Feasibility(layers) if layers else None


def train(trainer: Trainer, history: History) -> History:
    """The training loop of one rank, or of one process."""
    for tokens, targets in islice(trainer.batches(), trainer.config.max_steps):
        begin = time.perf_counter()
        history.losses.append(trainer.step(tokens, targets))
        history.step_seconds.append(time.perf_counter() - begin)
    if trainer.constraints is not None:
        history.feasibility.append(trainer.constraints.feasibility())
    elif trainer.kept:
        history.feasibility.append(feasibility(trainer.kept))
    history.weights = trainer.weights()
    return history


def make_trainer(job: Job, rank: int, device: str) -> Trainer:
    """One rank's trainer; made on that rank, once it has joined the process group."""
    config = job.config
    model = transformer(config, len(job.corpus.vocabulary)).to(device)
    _, parts = config.mesh
    if config.strategy in STAGED:
        stage = stage_of(model, rank % parts, parts)
        constrain(stage, config)
        return StageTrainer(job, stage, rank)
    return Trainer(job, model, spread(model, config, device), rank // parts)


def run_rank(job: Job, rank: int) -> History:
    """The role of a rank."""
    config = job.config
    of = rank, config.num_ranks, gpus_of(config.device)
    chosen = process_group.join(*of, ddp_only=config.strategy == "ddp")
    return train(make_trainer(job, rank, chosen.device), History(transport=chosen.why))


def run(job: Job, **options: Any) -> Result:
    """Train on ranks, each in its own process; WorkerError if one fails.

    The options are those of :func:`~.launch.launch`.
    """
    ranks = range(job.config.num_ranks)
    threads = max(1, cpu_count() // len(ranks))
    roles = {f"rank{k}": Role(run_rank, (job, k), num_threads=threads) for k in ranks}
    results = launch(roles, **options)
    return Result(list(results.values()))


def run_locally(job: Job) -> Result:
    """The same training in this process: the whole model, on whole batches."""
    config = replace(job.config, strategy="ddp", num_ranks=1)
    job = replace(job, config=config)
    model = transformer(config, len(job.corpus.vocabulary))
    model.to(device_for(config.device, 0))
    constrain(model, config)
    return Result([train(Trainer(job, model, model), History())])


def perplexity(job: Job, weights: Mapping[str, Tensor]) -> float:
    """Perplexity of the held-out text, with these weights; in this process."""
    config = job.config
    model = transformer(config, len(job.corpus.vocabulary))
    constrain(model, config)
    model.load_state_dict(weights)
    return data.perplexity(held_out_loss(model, job.corpus.valid, config.seq_len))


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, seq_len: int) -> float:
    """Mean loss of a text's tokens, in nats; by a model in this process."""
    total, count, device = 0.0, 0, device_of(model)
    for tokens, targets in Stream(text, seq_len, 16).windows():
        tokens, targets = tokens.to(device), targets.to(device)
        loss = next_word_loss(model(tokens.T), targets.T)
        total, count = total + loss.item() * targets.numel(), count + targets.numel()
    return total / count
