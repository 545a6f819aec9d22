"""What a trainer does: look up, compute, carry back, step; again and again."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.api.remote_module import RemoteModule

from cdopt_tutorial.constraints import Constraints
from cdopt_tutorial.data.bags import Bags, Batch, Shard
from cdopt_tutorial.engines import passed, report
from cdopt_tutorial.engines.device import gpus_of
from cdopt_tutorial.engines.remote import Handle
from cdopt_tutorial.hybrid import replicas
from cdopt_tutorial.hybrid.config import HybridConfig
from cdopt_tutorial.hybrid.history import History, Progress, Projected, Score
from cdopt_tutorial.hybrid.model import HybridModel, begin_at, dense_layer, weights_of
from cdopt_tutorial.hybrid.steps import (
    SERVER,
    ExactStep,
    LocalStep,
    OriginalStep,
    loss_factor,
    penalty_factor,
)

Step = LocalStep | OriginalStep | ExactStep

SELDOM = 10  # deadlines of a step, for what is done once, or after an epoch


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Bags that nobody learns from.

    Attributes:
        valid: looked at after each epoch.
        test: looked at when the training is over.
    """

    valid: Bags
    test: Bags


@dataclass(frozen=True, eq=False)
class Task:
    """What the master gives one trainer to do.

    Attributes:
        config: of the run.
        trainer: number of the trainer.
        shard: its training data.
        held_out: bags to be watched by and to be tested on; for the first trainer only.
        num_classes: different labels.
        begin: parameters to begin with, by name; none are drawn from the seed.
    """

    config: HybridConfig
    trainer: int
    shard: Shard
    held_out: HeldOut | None
    num_classes: int
    begin: Mapping[str, Tensor]


def run_trainer(table: RemoteModule, joint: Handle | None, task: Task) -> History:
    """The training loop of one trainer; runs there, called by the master.

    Args:
        table: on the server.
        joint: the server's joint step; None with the original's semantics.
        task: what to do.
    """
    config = task.config
    once = SELDOM * config.step_deadline
    passed(once)
    gpus = gpus_of(config.device)
    chosen = replicas.join(task.trainer, config.num_trainers, gpus)
    passed(once)
    layer = dense_layer(task.num_classes, config)
    begin_at(layer, "dense", task.begin)
    passed(once)
    fc = replicas.replicate(layer, chosen.device)
    model = HybridModel(table, fc, chosen.device)
    if joint is None:
        step: Step = OriginalStep(table, model, config)
    else:
        step = ExactStep(joint, task.trainer, model, config)
    history = fit(model, step, task, report)
    history.transport = chosen.why
    passed(math.inf)
    return history


def fit(
    model: HybridModel, step: Step, task: Task, tell: Callable[[Progress], None]
) -> History:
    """Train, test, project.

    Args:
        model: as this trainer sees it.
        step: how its losses move the parameters.
        task: what to do.
        tell: called after each epoch.
    """
    loop = _Loop(model, step, task, tell)
    for epoch in range(task.config.epochs):
        loop.epoch(epoch)
        if loop.finished:
            break
    loop.conclude()
    if loop.constraints is not None:
        loop.project()
    return loop.history


class _Loop:
    """What one trainer's loop carries from step to step."""

    def __init__(self, model: HybridModel, step: Step, task: Task, tell):
        self._model, self._step, self._task, self._tell = model, step, task, tell
        self._config = task.config
        held = self._config.constrained is not None
        self.constraints = Constraints(model) if held else None
        self._penalty_factor = penalty_factor(task.trainer, self._config)
        # The table is one and the same for all trainers; the first one looks at it.
        dense = self._config.constrained == "dense"
        self._measures = held and (dense or task.trainer == 0)
        replicated = not isinstance(step, LocalStep)
        self._differences = replicas.Differences(model.dense) if replicated else None
        self.history = History()

    @property
    def finished(self) -> bool:
        """Whether the run ends before its epochs do."""
        return len(self.history.losses) == self._config.max_steps

    def _pass(self, deadlines: int = 1, waits_for: str = "") -> None:
        """Pass one more place; in one process nobody waits for it."""
        if self._differences is not None:
            passed(deadlines * self._config.step_deadline, waits_for)

    def epoch(self, epoch: int) -> None:
        """One pass over the training data, and what is told of it."""
        config, first = self._config, len(self.history.losses)
        seed = 1000 * config.seed + epoch
        batches = self._task.shard.batches(config.batch_size, seed)
        self._pass()
        while not self.finished:
            batch = next(batches, None)
            if batch is None:
                break
            self._one(batch)
        self._note(epoch, first)

    def conclude(self) -> None:
        """Test the model that has been trained, and fetch its parameters."""
        self._pass(SELDOM)
        if self._task.held_out is not None:
            self.history.test = self._score(self._task.held_out.test)
            self.history.weights = weights_of(self._model)

    def project(self) -> None:
        """Make the model exactly feasible; each replica does so by itself."""
        self._meet()
        if self._measures:
            self.constraints.project_()
        self._meet()
        held_out = self._task.held_out
        test = held_out and self._score(held_out.test)
        feasibility = self.constraints.feasibility()
        self._pass(SELDOM)
        difference = max(self._ask_difference(), default=0.0)
        self.history.projected = Projected(test, feasibility, difference)

    def _ask_difference(self) -> list[float]:
        if self._differences is None:
            return []
        self._differences.ask()
        return self._differences.answers()

    def _meet(self) -> None:
        """Wait for all trainers."""
        self._pass(SELDOM)
        self._step.meet()
        self._pass(SELDOM)

    def _one(self, batch: Batch) -> None:
        """One step, and what is measured after it."""
        begin = time.perf_counter()
        self._step(lambda: self._loss(batch))
        self._pass()
        self.history.step_seconds.append(time.perf_counter() - begin)
        self.history.images.append(len(batch.bags))
        if self._differences is not None:
            self._differences.ask()
        if self._measures:
            self.history.feasibility.append(self.constraints.feasibility())

    def _loss(self, batch: Batch) -> Tensor:
        """This trainer's loss, with its weight and its part of the penalty."""
        bags = batch.bags
        self._pass(waits_for=SERVER)
        vectors = self._model.lookup(bags.tokens, bags.offsets)
        self._pass()
        # All gradients of this trainer are ready when that of the vectors is.
        vectors.register_hook(lambda _: self._pass(waits_for=SERVER))
        scores = self._model.scores(vectors)
        labels = bags.labels.to(self._model.device)
        total = F.cross_entropy(scores, labels, reduction="sum")
        self.history.losses.append(total.item())
        loss = loss_factor(batch, self._config) * total
        if self._penalty_factor:
            loss = loss + self._penalty_factor * self.constraints.penalty().to(loss)
        return loss

    @torch.no_grad()
    def _score(self, bags: Bags) -> Score:
        """How well the model does now; no other trainer takes part."""
        vectors = self._model.lookup(bags.tokens, bags.offsets)
        scores = self._model.dense(vectors.to(self._model.device)).cpu()
        right = (scores.argmax(1) == bags.labels).double().mean().item()
        return Score(right, F.cross_entropy(scores, bags.labels).item())

    def _note(self, epoch: int, first: int) -> None:
        """Look at the validation bags, and tell; all trainers wait for the first."""
        self._meet()  # every trainer's last step has reached the table
        held_out = self._task.held_out
        valid = held_out and self._score(held_out.valid)
        self._meet()
        history = self.history
        if self._differences is not None:
            history.replica_differences += self._differences.answers()
        note = Progress(
            trainer=self._task.trainer,
            epoch=epoch + 1,
            step=len(history.losses),
            images=sum(history.images),
            seconds=sum(history.step_seconds),
            train_loss=sum(history.losses[first:])
            / max(1, sum(history.images[first:])),
            valid=valid,
        )
        history.progress.append(note)
        self._tell(note)
