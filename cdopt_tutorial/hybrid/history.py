"""What a run reports and returns."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cdopt_tutorial.constraints import Feasibility
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.hybrid.model import HybridConfig


@dataclass(frozen=True)
class Score:
    """How well some images are told apart."""

    accuracy: float  #: part of them with the highest score for their label
    loss: float  #: mean cross-entropy, nats


@dataclass(frozen=True)
class Progress:
    """What a trainer reports after each epoch."""

    epoch: int  #: from 1
    step: int  #: steps taken
    train_loss: float  #: mean of its own images in this epoch, nats
    valid: Score | None  #: of the validation images; None but for the first trainer


@dataclass(frozen=True)
class Projected:
    """What it costs to make a trained model exactly feasible."""

    test: Score | None  #: after it; None but for the first trainer
    feasibility: Feasibility  #: after it


@dataclass
class History:
    """What one trainer returns."""

    transport: str = "none: one process"  #: how its replicas talk, and why so
    progress: list[Progress] = field(default_factory=list)  #: all that it reported
    #: summed loss of each step, nats, of its own images.
    losses: list[float] = field(default_factory=list)
    images: list[int] = field(default_factory=list)  #: that it had in each step
    step_seconds: list[float] = field(default_factory=list)  #: of each step
    #: after each step: of its own replica, or, by the first trainer only, of the table.
    feasibility: list[Feasibility] = field(default_factory=list)
    #: largest one between any two replicas, after each step; none in one process.
    replica_differences: list[float] = field(default_factory=list)
    test: Score | None = None  #: at the end; None but for the first trainer
    projected: Projected | None = None  #: at the end; None without constraints
    #: all parameters by name, before the projection; the first trainer's only.
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What a run returns."""

    config: HybridConfig  #: of the run
    trainers: list[History]  #: what each trainer returned

    @property
    def weights(self) -> dict[str, Tensor]:
        """All parameters by name, before the projection."""
        return self.trainers[0].weights

    @property
    def test(self) -> Score:
        """Of the test images at the end, before the projection."""
        return self.trainers[0].test

    @property
    def projected(self) -> Projected | None:
        """What the projection at the end came to; None without constraints."""
        return self.trainers[0].projected

    @property
    def losses(self) -> list[float]:
        """Mean loss of each joint batch, nats."""
        losses = map(sum, zip(*(each.losses for each in self.trainers), strict=True))
        images = map(sum, zip(*(each.images for each in self.trainers), strict=True))
        return [loss / number for loss, number in zip(losses, images, strict=True)]

    @property
    def valid_losses(self) -> list[float]:
        """Mean loss of the validation images after each epoch, nats."""
        return [note.valid.loss for note in self.trainers[0].progress]

    @property
    def feasibility(self) -> Feasibility | None:
        """At the end, before the projection; None without constraints."""
        last = self.trainers[0].feasibility
        return last[-1] if last else None

    @property
    def replica_difference(self) -> float:
        """Largest difference of any two replicas after any step."""
        found = [gap for each in self.trainers for gap in each.replica_differences]
        return max(found, default=0.0)

    @property
    def samples_per_second(self) -> float:
        """Images of all trainers, by the time of the slowest one's steps."""
        seconds = max(sum(each.step_seconds) for each in self.trainers)
        return sum(sum(each.images) for each in self.trainers) / seconds

    def max_parameter_difference(self, other: "Result") -> float:
        """Largest difference of any parameter from another run's."""
        return max_difference(self.weights, other.weights)

    def as_json(self) -> dict[str, Any]:
        """What the command line writes."""
        left, projected = self.feasibility, self.projected
        settings = "num_trainers", "semantics", "manifold", "where", "by"
        return {
            **{name: getattr(self.config, name) for name in settings},
            "transport": self.trainers[0].transport,
            "steps": len(self.losses),
            "valid_accuracy": self.trainers[0].progress[-1].valid.accuracy,
            "test_accuracy": self.test.accuracy,
            "test_loss": self.test.loss,
            "loss": self.losses[-1],
            "feasibility": left and left.mapped,
            "feasibility_of_weight": left and left.weight,
            "projected_feasibility": projected and projected.feasibility.mapped,
            "projected_accuracy": projected and projected.test.accuracy,
            "replica_difference": self.replica_difference,
            "samples_per_second": self.samples_per_second,
        }
