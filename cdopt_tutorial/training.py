"""What the systems that train by a loss share: settings, histories, and files."""

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from zipfile import ZipFile

import torch
from torch import Tensor

from cdopt_tutorial import whole_file
from cdopt_tutorial.calls.device import pick_device
from cdopt_tutorial.checks import at_least, check, choices, learning_rate
from cdopt_tutorial.constraints import Feasibility
from cdopt_tutorial.data import perplexity
from cdopt_tutorial.run import Wire

MEASURED_STEPS = 8


class Training:
    """Base of their configs, which checks the fields that all have."""

    OPTIMIZERS: ClassVar[tuple[str, ...]] = "sgd", "adam"
    max_steps: int | None
    penalty_param: float
    momentum: float
    seed: int
    dtype: str

    def __post_init__(self):
        choices(self, optimizer=self.OPTIMIZERS, dtype=("float32", "float64"))
        at_least(self, 1, "batch_size")
        if self.max_steps is not None:
            at_least(self, 1, "max_steps")
        learning_rate(self)
        fits = 0 < self.penalty_param < math.inf
        check(self, "penalty_param", fits, "above 0 and finite")
        check(self, "momentum", 0 <= self.momentum < 1, "0 to below 1")
        check(self, "seed", 0 <= self.seed < 2**31, "at least 0 and below 2**31")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return getattr(torch, self.dtype)


class Settings(Training):
    """Base of the configs of systems with a server, which checks their fields, too."""

    device: str

    def __post_init__(self):
        super().__post_init__()
        manifolds = "none", "stiefel", "oblique"
        choices(self, manifold=manifolds, where=("trainer", "server"))
        at_least(self, 1, "num_trainers", "embedding", "epochs")
        object.__setattr__(self, "device", pick_device(self.device))


@dataclass(frozen=True)
class Score:
    """How well held-out data are predicted."""

    loss: float  #: mean cross-entropy, nats
    accuracy: float | None = None  #: share of right answers; None for a text

    @property
    def perplexity(self) -> float:
        """exp of the loss."""
        return perplexity(self.loss)


@dataclass(frozen=True)
class Progress:
    """What a trainer reports after each epoch, and perhaps within it."""

    epoch: int  #: from 1
    step: int  #: steps that this trainer has taken
    train_loss: float  #: mean over its own data of the epoch, or of late; nats
    valid: Score | None  #: at an epoch's end; the first trainer's only


@dataclass(frozen=True)
class Projected:
    """A trained model after its projection, which makes it exactly feasible."""

    score: Score | None  #: the first trainer's only
    feasibility: Feasibility  #: of its weights


@dataclass
class History:
    """What one trainer returns; each system adds fields of its own."""

    transport: str = "none"  #: how replicas or parts communicate, and why so
    progress: list[Progress] = field(default_factory=list)  #: all that it reported
    losses: list[float] = field(default_factory=list)  #: its part of each step's; nats
    step_seconds: list[float] = field(default_factory=list)  #: of each step of this run
    #: after each step of this run; of what a server owns, the first trainer's only.
    feasibility: list[Feasibility] = field(default_factory=list)
    projected: Projected | None = None  #: at the end; None without constraints
    #: all parameters by name, before the projection; the first trainer's only.
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The time of all steps of this run, without evaluation."""
        return sum(self.step_seconds)


def check_begin(begin: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ValueError for an initial parameter that does not fit into a model."""
    shapes = {name: tuple(value.shape) for name, value in own.items()}
    for name, value in begin.items():
        if shapes.get(name) != (shape := tuple(value.shape)):
            raise ValueError(f"begin has {name} {shape}, but the model has {shapes}")


def measured_bytes(run: Callable, job: Any, most: int) -> float:
    """Bytes per step of a system's run, as the workers' own sockets count.

    The difference between a run of one step and one of several, at most ``most``, more:
    what both send at their start and end cancels. NaN if there are no more.
    """
    if most < 1:
        return math.nan
    more, short, long = min(MEASURED_STEPS, most), Wire(), Wire()
    for steps, wire in (1, short), (1 + more, long):
        run(replace(job, config=replace(job.config, max_steps=steps)), wire=wire)
    return (long.total - short.total) / more


def save_whole(path: Path, content: Any) -> None:
    """Replace a file by what torch saves, in one step; OSError if impossible."""
    saved = io.BytesIO()  # writing to a full disk, torch raises no OSError
    torch.save(content, saved)
    whole_file.write(path, saved.getvalue())


def load_whole(path: Path, *, mmap: bool = False) -> Any:
    """What a file of :func:`save_whole` has; ValueError if it has been damaged.

    With ``mmap`` tensors are read as they are used.
    """
    with path.open("rb") as file:
        try:
            with ZipFile(file) as archive:  # torch does not verify its checksums
                damaged = archive.testzip()
            file.seek(0)
            source = path if mmap else file  # torch maps a file by its name only
            content = torch.load(source, "cpu", mmap=mmap, weights_only=True)
        except Exception as error:  # neither has an error of its own for a bad file
            what = "it is damaged or truncated, or no checkpoint at all"
            raise ValueError(what) from error
    if damaged is not None:
        raise ValueError(f"it is damaged: {damaged} is not what was written")
    return content
