"""What a run has seen, rank by rank."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from cdopt_tutorial.constraints import Feasibility
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.sharding.model import ShardConfig


@dataclass
class History:
    """What one rank has seen, or one process."""

    why: str = "one process"  #: how it talked to others, and the reason
    losses: list[float] = field(default_factory=list)  #: of its tokens, by step; or NaN
    step_seconds: list[float] = field(default_factory=list)  #: of each step
    feasibility: Feasibility | None = None  #: at the end, of the weights it holds
    weights: dict[str, Tensor] = field(default_factory=dict)  #: at the end, whole


@dataclass(frozen=True)
class Result:
    """What a run has come to."""

    config: ShardConfig  #: of the run
    ranks: Sequence[History]  #: what each rank has seen

    @property
    def losses(self) -> list[float]:
        """Mean loss of each step's tokens, in nats, without the penalty."""
        steps = zip(*(rank.losses for rank in self.ranks), strict=True)
        seen = ([each for each in step if not math.isnan(each)] for step in steps)
        return [statistics.fmean(each) if each else math.nan for each in seen]

    @property
    def step_seconds(self) -> float:
        """Median of a step, on the slowest rank."""
        return max(statistics.median(each.step_seconds) for each in self.ranks)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The parameters, whole, by name."""
        return {n: w for rank in self.ranks for n, w in rank.weights.items()}

    @property
    def feasibility(self) -> Feasibility | None:
        """How far the weights are from their manifolds, all of the model's."""
        layers = {}
        for rank in self.ranks:
            layers |= rank.feasibility.layers if rank.feasibility else {}
        return Feasibility(layers) if layers else None

    def max_parameter_difference(self, local: "Result") -> float:
        """Largest difference of any parameter from a run in one process."""
        return max_difference(self.weights, local.weights)
