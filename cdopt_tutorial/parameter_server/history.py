"""What a run tells while it goes on, and what is left of it at the end."""

from dataclasses import dataclass, field

from torch import Tensor

from cdopt_tutorial.constraints import Feasibility
from cdopt_tutorial.data import perplexity


@dataclass(frozen=True)
class Progress:
    """What a trainer reports every few steps, and after each epoch."""

    epoch: int  #: from 1
    step: int  #: steps that this trainer has taken
    train_loss: float  #: mean of its own tokens over the last steps, nats
    valid_loss: float | None  #: mean of the validation part, nats; None within an epoch

    @property
    def perplexity(self) -> float | None:
        """Of the validation part; None within an epoch."""
        return None if self.valid_loss is None else perplexity(self.valid_loss)


@dataclass(frozen=True)
class Projected:
    """What it costs to make a trained model exactly feasible."""

    valid_loss: float  #: mean of the validation part after the projection, nats
    feasibility: Feasibility  #: after the projection

    @property
    def perplexity(self) -> float:
        """Of the validation part after the projection."""
        return perplexity(self.valid_loss)


@dataclass
class History:
    """What one trainer returns."""

    progress: list[Progress] = field(default_factory=list)  #: all that it reported
    #: mean loss of its own tokens in each step, nats, before a checkpoint, too.
    losses: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)  #: of each step of this run
    tokens: int = 0  #: that it has read in this run
    step_seconds: list[float] = field(default_factory=list)  #: of each step of this run
    #: of the constrained weights after each step of this run; the first trainer's only.
    feasibility: list[Feasibility] = field(default_factory=list)
    projected: Projected | None = None  #: at the end; None without constraints
    #: all parameters by name, before the projection; the first trainer's only.
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Of the validation part at the end, before the projection."""
        return self.progress[-1].perplexity

    @property
    def seconds(self) -> float:
        """What all steps of this run took, without evaluation."""
        return sum(self.step_seconds)
