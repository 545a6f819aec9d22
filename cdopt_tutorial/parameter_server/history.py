"""What a run tells while it goes on, and what is left of it at the end."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from cdopt_tutorial.constraints import Feasibility

REPORT_EVERY = 10  # steps


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite where that is too large to write."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class Progress:
    """What a trainer reports every few steps, and after each epoch.

    Attributes:
        trainer: number of the trainer.
        epoch: from 1.
        step: steps that this trainer has taken.
        tokens: tokens that it has read in this run.
        seconds: that its steps took in this run.
        train_loss: mean of its own tokens over the last steps, nats.
        valid_loss: mean of the validation part, nats; None within an epoch.
        staleness: mean steps that others took between its reading and its writing.
    """

    trainer: int
    epoch: int
    step: int
    tokens: int
    seconds: float
    train_loss: float
    valid_loss: float | None
    staleness: float

    @property
    def perplexity(self) -> float | None:
        """Of the validation part; None within an epoch."""
        return None if self.valid_loss is None else perplexity(self.valid_loss)


@dataclass(frozen=True)
class Projected:
    """What it costs to make a trained model exactly feasible.

    Attributes:
        valid_loss: mean of the validation part after the projection, nats.
        feasibility: after the projection.
    """

    valid_loss: float
    feasibility: Feasibility

    @property
    def perplexity(self) -> float:
        """Of the validation part after the projection."""
        return perplexity(self.valid_loss)


@dataclass
class History:
    """What one trainer returns.

    Attributes:
        progress: all that it reported.
        losses: mean loss of each step, nats, of its own tokens; those before a
            resumed checkpoint included.
        staleness: of each step of this run.
        tokens: that it has read in this run.
        step_seconds: of each step of this run.
        feasibility: of the constrained weights after each step of this run; the first
            trainer's only.
        projected: what the projection at the end came to; None without constraints.
        weights: all parameters by name, before the projection; the first trainer's
            only.
    """

    progress: list[Progress] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    tokens: int = 0
    step_seconds: list[float] = field(default_factory=list)
    feasibility: list[Feasibility] = field(default_factory=list)
    projected: Projected | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Of the validation part at the end, before the projection."""
        return self.progress[-1].perplexity

    @property
    def seconds(self) -> float:
        """What all steps of this run took, without evaluation."""
        return sum(self.step_seconds)

    def report(self, trainer: int, epoch: int, valid_loss: float | None) -> Progress:
        """Note how far a trainer has come; epochs begin with 0 here."""
        losses = self.losses[-REPORT_EVERY:]
        staleness = self.staleness[-REPORT_EVERY:]
        progress = Progress(
            trainer=trainer,
            epoch=epoch + 1,
            step=len(self.losses),
            tokens=self.tokens,
            seconds=self.seconds,
            train_loss=sum(losses) / max(1, len(losses)),
            valid_loss=valid_loss,
            staleness=sum(staleness) / max(1, len(staleness)),
        )
        self.progress.append(progress)
        return progress
