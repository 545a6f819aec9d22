"""Who remembers? Recurrent models compared, over seeds, at their own learning rates."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from cdopt_tutorial.checks import at_least, check, choices
from cdopt_tutorial.dissolving.recurrent import MODELS, Model
from cdopt_tutorial.dissolving.tasks import CopyingMemory, NextWord
from cdopt_tutorial.engines import share

# The rate of 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1 and 3e-1 with the lowest final loss on
# average over the seeds 101 to 105, found by `cdopt-tutorial bench copying`.
LEARNING_RATES = dict.fromkeys(MODELS, 3e-3) | {"LSTM": 3e-2}
NEXT_WORD_LEARNING_RATES = dict.fromkeys(MODELS, 1e-2) | {"LSTM": 3e-2}
CLIP = 1.0  # the norm to which longer gradients are cut


@dataclass(frozen=True)
class MemoryConfig:
    """Settings of the comparison; checked when they are made.

    Raises:
        ValueError: a value is out of its range.
    """

    task: CopyingMemory | NextWord = CopyingMemory()  #: what to learn
    #: learning rate of RMSprop for each model of ``MODELS`` that is trained.
    lrs: Mapping[str, float] = field(default_factory=lambda: dict(LEARNING_RATES))
    #: each gives every model a start, and the same batches.
    seeds: Sequence[int] = (1, 2, 3, 4, 5)
    hidden: int = 64  #: width of the recurrent layer
    batch_size: int = 32  #: sequences of a step
    steps: int = 1_000  #: of the optimizer
    interval: int = 25  #: steps that are averaged to a point of the curves

    def __post_init__(self):
        at_least(self, 1, "hidden", "batch_size", "steps", "interval")
        allowed = f"a multiple of interval, {self.interval}"
        check(self, "steps", self.steps % self.interval == 0, allowed)
        _ = self.jobs  # which check themselves

    @property
    def jobs(self) -> list["Job"]:
        """Each model from each seed."""
        return [Job(m, lr, seed) for m, lr in self.lrs.items() for seed in self.seeds]


def next_word_config(**changes: Any) -> MemoryConfig:
    """The comparison on a task that needs no long memory, but for some changes."""
    config = MemoryConfig(
        task=NextWord(), lrs=dict(NEXT_WORD_LEARNING_RATES), batch_size=20, steps=600
    )
    return replace(config, **changes)


@dataclass(frozen=True)
class Job:
    """One run to do.

    Raises:
        ValueError: a value is out of its range.
    """

    model: str  #: a name of ``MODELS``
    lr: float  #: learning rate, above 0
    seed: int  #: of the start and the batches, at least 0

    def __post_init__(self):
        choices(self, model=MODELS)
        check(self, "lr", self.lr > 0, f"above 0 for {self.model!r}")
        at_least(self, 0, "seed")

    def seed_of(self, stream: int) -> int:
        """The seed for the start, 0, or for the batches, 1."""
        return int(np.random.SeedSequence([self.seed, stream]).generate_state(1)[0])


@dataclass(frozen=True)
class Run:
    """What a run gave.

    Loss and recall are taken on each batch before it is learned from.
    """

    job: Job  #: what was trained
    steps: list[int]  #: of the optimizer, at the end of each interval
    losses: list[float]  #: nats, mean of each interval, without the penalty
    recalls: list[float]  #: mean of each interval
    #: ‖WᵀW - I‖ of the hidden-to-hidden parameter W at the end. It says nothing of an
    #: LSTM, whose gates it takes as one matrix.
    weight: float
    #: the same of the matrix that the forward pass uses: A(W) for "Stiefel", Q for
    #: "torch's orthogonal", and else W itself.
    mapped: float
    seconds: float = field(compare=False)  #: that the run took; not compared

    @property
    def loss(self) -> float:
        """Nats in the last interval."""
        return self.losses[-1]

    @property
    def recall(self) -> float:
        """Recall in the last interval."""
        return self.recalls[-1]


def train(job: Job, config: MemoryConfig) -> Run:
    """Train one model by RMSprop; called by the workers, in one thread.

    Its smoothing is 0.9, as in Arjovsky et al. The config's ``lrs`` and ``seeds`` are
    not looked at.
    """
    task, begin = config.task, time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed_of(0))
        model = Model(job.model, task.num_inputs, task.num_outputs, config.hidden)
    optimizer = torch.optim.RMSprop(model.parameters(), job.lr, alpha=0.9)
    batches, found = torch.Generator().manual_seed(job.seed_of(1)), []
    for _ in range(config.steps):
        inputs, targets = task.batch(config.batch_size, batches)
        optimizer.zero_grad()
        logits = model(inputs)
        loss = task.loss(logits, targets)
        (loss + model.penalty()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found.append((loss.item(), task.recall(logits.detach(), targets)))
    each = torch.tensor(found, dtype=torch.float64).T.split(config.interval, dim=1)
    losses, recalls = torch.stack([part.mean(1) for part in each], 1).tolist()
    steps = list(range(config.interval, config.steps + 1, config.interval))
    seconds = time.perf_counter() - begin
    return Run(job, steps, losses, recalls, *model.distances(), seconds)


def run(
    config: MemoryConfig, on_done: Callable[[int, Run], None] | None = None
) -> dict[str, list[Run]]:
    """Train every model of ``config.lrs`` from every seed; called by the chapter.

    Returns:
        Each model's runs, in the order of the seeds.

    Raises:
        WorkerError: a worker failed.
    """
    runs = run_jobs(config.jobs, config, on_done=on_done)
    return {name: [r for r in runs if r.job.model == name] for name in config.lrs}


def run_jobs(jobs: Sequence[Job], config: MemoryConfig, **options: Any) -> list[Run]:
    """Share jobs out among processes; the runs come in the order of the jobs.

    Args:
        jobs: what to do.
        config: of the comparison; its ``lrs`` and ``seeds`` are not looked at.
        options: of :func:`~cdopt_tutorial.engines.share.share`.

    Raises:
        WorkerError: a worker failed.
    """
    return share(train, [(job, config) for job in jobs], **options)
