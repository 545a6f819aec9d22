"""Who remembers? Recurrent models compared, over seeds, at their own learning rates."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from cdopt_tutorial.data import CopyingMemory
from cdopt_tutorial.dissolving.next_word import NextWord
from cdopt_tutorial.dissolving.recurrent import MODELS, Model
from cdopt_tutorial.engines import share

# The rate of 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1 and 3e-1 with the lowest final loss on
# average over the seeds 101 to 105, found by `cdopt-tutorial bench copying`.
LEARNING_RATES = {
    "free": 3e-3,
    "orthogonal start": 3e-3,
    "Stiefel": 3e-3,
    "torch's orthogonal": 3e-3,
    "LSTM": 3e-2,
    "penalty alone": 3e-3,
}
NEXT_WORD_LEARNING_RATES = {
    "free": 1e-2,
    "orthogonal start": 1e-2,
    "Stiefel": 1e-2,
    "torch's orthogonal": 1e-2,
    "LSTM": 3e-2,
    "penalty alone": 1e-2,
}
STREAMS = "start", "batches"  # what a seed is split into


class Task(Protocol):
    """What the models are trained on; see :class:`CopyingMemory`."""

    num_inputs: int
    num_outputs: int
    floor: float

    def batch(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Inputs and targets, each (seq_len, batch_size) int64."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """In nats, a scalar."""

    def recall(self, logits: Tensor, targets: Tensor) -> float:
        """Share of the right answers among those that count."""


@dataclass(frozen=True)
class MemoryConfig:
    """Settings of the comparison; checked when they are made.

    Attributes:
        task: what to learn, :class:`CopyingMemory` or :class:`NextWord`.
        lrs: learning rate of RMSprop for each model; these models are trained, and
            each is a name of ``MODELS``.
        seeds: each gives every model a start, and the batches, which are the same for
            all models.
        hidden: width of the recurrent layer.
        batch_size: sequences of a step.
        steps: of the optimizer.
        clip: norm to which longer gradients are cut, above 0.
        penalty_param: factor of ‖C(W)‖² in the loss of "Stiefel" and "penalty alone".
        interval: steps over which loss and recall are averaged to a point of the
            curves.
        num_workers: processes among which the runs are shared out.

    Raises:
        ValueError: a value is out of its range.
    """

    task: Task = field(default_factory=CopyingMemory)
    lrs: Mapping[str, float] = field(default_factory=lambda: dict(LEARNING_RATES))
    seeds: Sequence[int] = (1, 2, 3, 4, 5)
    hidden: int = 64
    batch_size: int = 32
    steps: int = 1_000
    clip: float = 1.0
    penalty_param: float = 0.1
    interval: int = 25
    num_workers: int = 2

    def __post_init__(self):
        for name in ("hidden", "batch_size", "steps", "interval", "num_workers"):
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise ValueError(f"{name} is {value}, but must be at least 1")
        for name in ("clip", "penalty_param"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but must be above 0"
                )
        if self.steps % self.interval:
            raise ValueError(
                f"steps is {self.steps}, but must be a multiple of interval, "
                f"{self.interval}"
            )
        for name, lr in self.lrs.items():
            for seed in self.seeds:
                Job(name, lr, seed)


def next_word_config(**changes: Any) -> MemoryConfig:
    """The comparison on a task that needs no long memory.

    Args:
        changes: attributes of :class:`MemoryConfig` that are to be others.
    """
    config = MemoryConfig(
        task=NextWord(), lrs=dict(NEXT_WORD_LEARNING_RATES), batch_size=20, steps=600
    )
    return replace(config, **changes)


@dataclass(frozen=True)
class Job:
    """One run to do.

    Attributes:
        model: a name of ``MODELS``.
        lr: learning rate, above 0.
        seed: of the start and the batches, at least 0.

    Raises:
        ValueError: a value is out of its range.
    """

    model: str
    lr: float
    seed: int

    def __post_init__(self):
        if self.model not in MODELS:
            known = ", ".join(MODELS)
            raise ValueError(f"model is {self.model!r}, but must be one of {known}")
        if not self.lr > 0:
            raise ValueError(f"lr of {self.model!r} is {self.lr}, but must be above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, but must be at least 0")


@dataclass(frozen=True)
class Run:
    """What a run gave.

    Loss and recall are taken on each batch before it is learned from.

    Attributes:
        job: what was trained.
        steps: of the optimizer, at the end of each interval.
        losses: nats, mean of each interval, without the penalty.
        recalls: mean of each interval.
        weight: ‖C(W)‖ of the hidden-to-hidden parameter W at the end, where C is
            WᵀW - I. A model without a constraint shows how far it has drifted off. It
            says nothing of an LSTM, whose gates it takes as one matrix.
        mapped: ‖C‖ of the matrix that the forward pass uses: A(W) for "Stiefel", Q
            for "torch's orthogonal", and else W itself.
        seconds: that the run took; not compared.
    """

    job: Job
    steps: list[int]
    losses: list[float]
    recalls: list[float]
    weight: float
    mapped: float
    seconds: float = field(compare=False)

    @property
    def loss(self) -> float:
        """Nats in the last interval."""
        return self.losses[-1]

    @property
    def recall(self) -> float:
        """Recall in the last interval."""
        return self.recalls[-1]

    def steps_to(self, recall: float) -> float:
        """Steps until an interval's recall was at least so much; ``inf`` if never."""
        reached = (
            s for s, r in zip(self.steps, self.recalls, strict=True) if r >= recall
        )
        return next(reached, math.inf)


def train(model_name: str, config: MemoryConfig, seed: int, lr: float) -> Run:
    """Train one model; called by the workers, in one thread.

    Args:
        model_name: a name of ``MODELS``.
        config: of the comparison; its ``lrs`` and ``seeds`` are not looked at.
        seed: of the start and the batches, at least 0.
        lr: learning rate of RMSprop, whose smoothing is 0.9 as in Arjovsky et al.

    Raises:
        ValueError: a value is out of its range.
    """
    job, task, begin = Job(model_name, lr, seed), config.task, time.perf_counter()
    with _seeded(seed):
        model = Model(
            model_name,
            task.num_inputs,
            task.num_outputs,
            config.hidden,
            config.penalty_param,
        )
    losses, recalls = _learn(model, config, job)
    return Run(
        job,
        list(range(config.interval, config.steps + 1, config.interval)),
        _means(losses, config.interval),
        _means(recalls, config.interval),
        *model.distances(),
        seconds=time.perf_counter() - begin,
    )


def _learn(
    model: Model, config: MemoryConfig, job: Job
) -> tuple[list[float], list[float]]:
    """All steps of the optimizer; loss and recall of each."""
    task, losses, recalls = config.task, [], []
    optimizer = torch.optim.RMSprop(model.parameters(), job.lr, alpha=0.9)
    generator = torch.Generator().manual_seed(_seed_of(job.seed, "batches"))
    for _ in range(config.steps):
        inputs, targets = task.batch(config.batch_size, generator)
        optimizer.zero_grad()
        logits = model(inputs)
        loss = task.loss(logits, targets)
        (loss + model.penalty()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        losses.append(loss.item())
        recalls.append(task.recall(logits.detach(), targets))
    return losses, recalls


def _seed_of(seed: int, stream: str) -> int:
    sequence = np.random.SeedSequence([seed, STREAMS.index(stream)])
    return int(sequence.generate_state(1)[0])


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw starts from a seed, and leave torch's own generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed_of(seed, "start"))
        yield


def _means(values: list[float], interval: int) -> list[float]:
    return torch.tensor(values, dtype=torch.float64).view(-1, interval).mean(1).tolist()


def run(
    config: MemoryConfig, on_done: Callable[[int, Run], None] | None = None
) -> dict[str, list[Run]]:
    """Train every model of ``config.lrs`` from every seed.

    Called by the chapter.

    Args:
        config: of the comparison.
        on_done: see :func:`~cdopt_tutorial.engines.share.share`.

    Returns:
        Each model's runs, in the order of the seeds.

    Raises:
        WorkerError: a worker failed.
    """
    jobs = [
        Job(name, lr, seed) for name, lr in config.lrs.items() for seed in config.seeds
    ]
    runs = run_jobs(jobs, config, on_done=on_done)
    return {name: [r for r in runs if r.job.model == name] for name in config.lrs}


def run_jobs(jobs: Sequence[Job], config: MemoryConfig, **options: Any) -> list[Run]:
    """Share jobs out among ``config.num_workers`` processes of one thread each.

    Args:
        jobs: what to do.
        config: of the comparison; its ``lrs`` and ``seeds`` are not looked at.
        options: of :func:`~cdopt_tutorial.engines.share.share`.

    Returns:
        The runs in the order of the jobs, whatever finished first.

    Raises:
        WorkerError: a worker failed.
    """
    each = [(job.model, config, job.seed, job.lr) for job in jobs]
    return share(train, each, config.num_workers, **options)
