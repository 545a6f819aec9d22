"""What a run reports and returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cdopt_tutorial.constraints import Feasibility
from cdopt_tutorial.hybrid.config import HybridConfig


@dataclass(frozen=True)
class Score:
    """How well some images are told apart.

    Attributes:
        accuracy: part of them with the highest score for their label.
        loss: mean cross-entropy, nats.
    """

    accuracy: float
    loss: float


@dataclass(frozen=True)
class Progress:
    """What a trainer reports after each epoch.

    Attributes:
        trainer: its number.
        epoch: from 1.
        step: steps taken.
        images: that it has seen.
        seconds: that its steps took.
        train_loss: mean of its own images in this epoch, nats.
        valid: of the validation images; the first trainer's only, else None.
    """

    trainer: int
    epoch: int
    step: int
    images: int
    seconds: float
    train_loss: float
    valid: Score | None


@dataclass(frozen=True)
class Projected:
    """What it costs to make a trained model exactly feasible.

    Attributes:
        test: after the projection; the first trainer's only, else None.
        feasibility: after the projection.
        replica_difference: after the projection, which each replica does by itself.
    """

    test: Score | None
    feasibility: Feasibility
    replica_difference: float


@dataclass
class History:
    """What one trainer returns.

    Attributes:
        transport: how its replicas talk to each other, and why so.
        progress: all that it reported.
        losses: summed loss of each step, nats, of its own images.
        images: that it had in each step.
        step_seconds: of each step.
        feasibility: of the constrained weights after each step: of its own replica,
            or, by the first trainer only, of the table.
        replica_differences: largest one between any two replicas, after each step;
            none in one process.
        test: of the test images at the end; the first trainer's only, else None.
        projected: what the projection at the end came to; None without constraints.
        weights: all parameters by name, before the projection; the first trainer's
            only.
    """

    transport: str = ""
    progress: list[Progress] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    feasibility: list[Feasibility] = field(default_factory=list)
    replica_differences: list[float] = field(default_factory=list)
    test: Score | None = None
    projected: Projected | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What a run returns.

    Attributes:
        config: of the run.
        trainers: what each trainer returned.
    """

    config: HybridConfig
    trainers: list[History]

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
        per_step = zip(
            zip(*(each.losses for each in self.trainers), strict=True),
            zip(*(each.images for each in self.trainers), strict=True),
            strict=True,
        )
        return [sum(losses) / sum(images) for losses, images in per_step]

    @property
    def feasibility(self) -> Feasibility | None:
        """At the end, before the projection; None without constraints."""
        last = self.trainers[0].feasibility
        return last[-1] if last else None

    @property
    def replica_difference(self) -> float:
        """Largest difference of any two replicas after any step."""
        found = [each.replica_differences for each in self.trainers]
        return max((max(each, default=0.0) for each in found), default=0.0)

    @property
    def samples_per_second(self) -> float:
        """Images of all trainers, by the time of the slowest one's steps."""
        seconds = max(sum(each.step_seconds) for each in self.trainers)
        return sum(sum(each.images) for each in self.trainers) / seconds

    def max_parameter_difference(self, other: "Result") -> float:
        """Largest difference of any parameter from another run's."""
        return difference(self.weights, other.weights)

    def as_json(self) -> dict[str, Any]:
        """What the command line writes."""
        held, projected = self.feasibility, self.projected
        return {
            "num_trainers": self.config.num_trainers,
            "semantics": self.config.semantics,
            "manifold": self.config.manifold,
            "where": self.config.where,
            "by": self.config.by,
            "transport": self.trainers[0].transport,
            "steps": len(self.losses),
            "valid_accuracy": self.trainers[0].progress[-1].valid.accuracy,
            "test_accuracy": self.test.accuracy,
            "test_loss": self.test.loss,
            "loss": self.losses[-1],
            "feasibility": held and held.mapped,
            "feasibility_of_weight": held and held.weight,
            "projected_feasibility": projected and projected.feasibility.mapped,
            "projected_accuracy": projected and projected.test.accuracy,
            "replica_difference": self.replica_difference,
            "samples_per_second": self.samples_per_second,
        }


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Largest difference of any parameter.

    Raises:
        ValueError: the parameters are not the same ones.
    """
    if one.keys() != other.keys():
        raise ValueError(
            f"parameters {sorted(one)} can't be held against {sorted(other)}"
        )
    return max((one[name] - other[name]).abs().max().item() for name in one)
