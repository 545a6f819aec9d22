"""What may be asked of the systems that train by a loss: settings, and a start."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from cdopt_tutorial.checks import at_least, check, choices, learning_rate

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Training:
    """Base of their configs: checks the fields that all of them have."""

    def __post_init__(self):
        choices(self, optimizer=("sgd", "adam"), dtype=DTYPES)
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
        return DTYPES[self.dtype]


class Settings(Training):
    """Base of the configs of systems with a server, whose fields it checks as well."""

    def __post_init__(self):
        super().__post_init__()
        manifolds = "none", "stiefel", "oblique"
        choices(self, manifold=manifolds, where=("trainer", "server"))
        at_least(self, 1, "num_trainers", "embedding", "epochs")


def check_begin(begin: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """A ValueError if a parameter to begin with is not of a model, or of its shape."""
    for name, value in begin.items():
        if name not in own or own[name].shape != value.shape:
            known = ", ".join(f"{n} {tuple(w.shape)}" for n, w in own.items())
            shape = tuple(value.shape)
            raise ValueError(f"begin has {name} {shape}, but the model has {known}")
