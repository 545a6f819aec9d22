"""The settings, what a run returns, and the layer that every trainer has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cdopt import manifold_torch
from cdopt import nn as cdopt_nn
from torch import Tensor, nn

from cdopt_tutorial import training
from cdopt_tutorial.checks import at_least, check, choices
from cdopt_tutorial.constraints import Feasibility, dissolve
from cdopt_tutorial.data.bags import BagSplit, digit_bags
from cdopt_tutorial.training import Projected, Score

SEMANTICS = ("exact", "original")


@dataclass(frozen=True)
class HybridConfig(training.Settings):
    """Settings of a run; a ValueError if one is out of its range, or no such device."""

    num_trainers: int = 2  #: trainers, at least 1
    num_servers: int = 1  #: the table's rows are dealt out to so many, at least 1
    #: "exact": every step is that of one process on the joint batch; or "original": DDP
    #: averages the trainers' mean gradients, and the table moves by each of them whole.
    semantics: str = "exact"
    #: each trainer's part of the training data, in any unit; None for equal ones.
    shares: tuple[float, ...] | None = None
    embedding: int = 16  #: width of a token's vector
    manifold: str = "none"  #: of a constrained weight: "none", "stiefel" or "oblique"
    #: whose: the dense layer's, on each "trainer", or the table's, on the "server",
    #: whose columns are then orthonormal, or have norm 1.
    where: str = "trainer"
    #: what has norm 1 in a table with "oblique": its "columns" or its "rows".
    unit: str = "columns"
    #: what constrains the dense layer: "dissolve", this book's, or "cdopt", the
    #: original's ``Linear_cdopt``. With "oblique", the former gives each class a vector
    #: of norm 1, the latter each column of the weight.
    by: str = "dissolve"
    penalty_param: float = 0.5  #: factor of ‖C(W)‖² in the loss, above 0
    optimizer: str = "sgd"  #: "sgd" or "adam"
    lr: float = 0.05  #: its learning rate, above 0
    momentum: float = 0.9  #: of SGD, 0 to below 1
    batch_size: int = 64  #: images of a joint batch, of all trainers together
    epochs: int = 30  #: passes over the training data
    max_steps: int | None = None  #: steps after which it ends; None for no limit
    seed: int = 1  #: of the initial parameters and the order of the images
    dtype: str = "float32"  #: "float32" or "float64"
    #: of the dense layers and the table, "auto", "cpu", "cuda" or "cuda:N"; trainers
    #: share the GPUs of "cuda", and the table has the next one. What is sent is on the
    #: CPU.
    device: str = "auto"
    #: whether the first trainer, which must then hold it, returns the whole table.
    gather: bool = True

    def __post_init__(self):
        super().__post_init__()
        choices(self, semantics=SEMANTICS, by=("dissolve", "cdopt"))
        choices(self, unit=("columns", "rows"))
        at_least(self, 1, "num_servers")
        if self.shares is not None:
            fits = all(0 < share < 2**63 for share in self.shares)
            fits = fits and len(self.shares) == self.num_trainers
            number = f"each of {self.num_trainers} trainers, and all below 2**63"
            check(self, "shares", fits, f"one above 0 for {number}")
        if self.constrained == "table":
            check(self, "by", self.by == "dissolve", "dissolve on the server")

    @property
    def constrained(self) -> str | None:
        """The part of the model that is constrained: "dense" or "table"."""
        if self.manifold == "none":
            return None
        return {"trainer": "dense", "server": "table"}[self.where]

    @property
    def has_unit_columns(self) -> bool:
        """Whether an oblique table has columns of norm 1, and not rows."""
        return self.manifold == "oblique" and self.unit == "columns"

    @property
    def is_spread(self) -> bool:
        """Whether a constraint is on columns that several servers have a part of."""
        by_rows = self.manifold == "oblique" and self.unit == "rows"
        return self.constrained == "table" and self.num_servers > 1 and not by_rows


@dataclass(frozen=True)
class Job:
    """What to train, and on which data."""

    config: HybridConfig  #: of the run
    #: bags to learn from and bags held out; the digits by default.
    data: BagSplit = field(default_factory=digit_bags)
    #: some or all of the initial parameters, by name, instead of those of the seed.
    begin: Mapping[str, Tensor] = field(default_factory=dict)
    #: a folder, within reach of all hosts, for a checkpoint after each pass over the
    #: data that ends before ``max_steps``.
    keep: Path | None = None
    resume: Path | None = None  #: such a folder, to go on from its last checkpoint


@dataclass
class History(training.History):
    """What one trainer returns; its losses are summed over its own images."""

    images: list[int] = field(default_factory=list)  #: how many it had in each step
    replica_difference: float = 0.0  #: the largest between any two replicas, at the end
    test: Score | None = None  #: at the end; the first trainer's only


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
        return next(trainer.test for trainer in self.trainers if trainer.test)

    @property
    def projected(self) -> Projected | None:
        """What the final projection led to; None without constraints."""
        return self.trainers[0].projected

    @property
    def losses(self) -> list[float]:
        """Mean loss of each joint batch, nats."""
        losses = zip(*(trainer.losses for trainer in self.trainers), strict=True)
        images = zip(*(trainer.images for trainer in self.trainers), strict=True)
        return [sum(part) / sum(of) for part, of in zip(losses, images, strict=True)]

    @property
    def valid_losses(self) -> list[float]:
        """Mean loss of the validation images after each epoch, nats."""
        return [note.valid.loss for note in self.trainers[0].progress if note.valid]

    @property
    def feasibility(self) -> Feasibility | None:
        """At the end, before the projection; None without constraints."""
        last = self.trainers[0].feasibility
        return last[-1] if last else None

    @property
    def replica_difference(self) -> float:
        """Largest difference of any two replicas at the end."""
        return self.trainers[0].replica_difference

    @property
    def samples_per_second(self) -> float:
        """Images of all trainers, over the time of the slowest one's steps."""
        seconds = max(trainer.seconds for trainer in self.trainers)
        return sum(sum(trainer.images) for trainer in self.trainers) / seconds

    def figures(self) -> dict[str, Any]:
        """What the command writes: losses in nats, None where there is no value."""
        left, projected = self.feasibility, self.projected
        valid = self.trainers[0].progress[-1].valid
        score = projected and projected.score
        settings = "num_trainers", "semantics", "manifold", "where", "by"
        return {
            **{name: getattr(self.config, name) for name in settings},
            "transport": self.trainers[0].transport,
            "steps": len(self.losses),
            "valid_accuracy": valid and valid.accuracy,
            "test_accuracy": self.test.accuracy,
            "test_loss": self.test.loss,
            "loss": self.losses[-1],
            "losses": self.losses,
            "feasibility": left and left.mapped,
            "feasibility_of_weight": left and left.weight,
            "projected_feasibility": projected and projected.feasibility.mapped,
            "projected_accuracy": score and score.accuracy,
            "replica_difference": self.replica_difference,
            "samples_per_second": self.samples_per_second,
        }


def dense_layer(num_classes: int, config: HybridConfig) -> nn.Module:
    """The layer that all trainers have: with one seed, the same on every worker."""
    sizes = config.embedding, num_classes
    dtype, constrained = config.torch_dtype, config.constrained == "dense"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2 * config.seed + 1)
        if constrained and config.by == "cdopt":
            on = getattr(manifold_torch, f"{config.manifold}_torch")
            penalty = config.penalty_param
            return cdopt_nn.Linear_cdopt(
                *sizes, manifold_class=on, penalty_param=penalty, dtype=dtype
            )
        layer = nn.Linear(*sizes, dtype=dtype)
    if constrained:
        dissolve(layer, "weight", config.manifold, config.penalty_param)
    return layer
