"""An optimizer's step with gradients that are handed to it, by their owner."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, optim


def make_optimizer(parameters: Iterable[Tensor], config: Any) -> optim.Optimizer:
    """A config's ``optimizer``, "sgd" or "adam", with its ``lr`` and ``momentum``.

    Made on the worker that owns the parameters.
    """
    # One by one, on a GPU too: torch's operators on lists can't mix plain and sharded
    # parameters, as tensor parallelism does.
    how = {"lr": config.lr, "foreach": False}
    if config.optimizer == "adam":
        return optim.Adam(parameters, **how)
    return optim.SGD(parameters, momentum=config.momentum, **how)


def squared_norm(gradients: Iterable[Tensor]) -> float:
    """The sum of the squares of all elements."""
    return sum(gradient.square().sum().item() for gradient in gradients)


def clip_factor(squared_norm: float, largest: float | None) -> float:
    """The factor by which ``torch.nn.utils.clip_grad_norm_`` scales all gradients."""
    return 1.0 if largest is None else min(1.0, largest / (squared_norm**0.5 + 1e-6))


def move(optimizer: optim.Optimizer, gradients: Mapping[Tensor, Tensor]) -> None:
    """Take one step with these gradients, and clear them, lest they be used twice."""
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
