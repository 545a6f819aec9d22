"""The optimizer of the parameters that one worker owns, and a step of it."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor, optim


class Choice(Protocol):
    """What a config says of its optimizer: "sgd" or "adam", and its numbers."""

    optimizer: str
    lr: float
    momentum: float


def make_optimizer(parameters: Iterable[Tensor], config: Choice) -> optim.Optimizer:
    """The optimizer of some parameters, on the worker that owns them."""
    if config.optimizer == "adam":
        return optim.Adam(parameters, lr=config.lr)
    return optim.SGD(parameters, lr=config.lr, momentum=config.momentum)


def move(optimizer: optim.Optimizer, gradients: Mapping[Tensor, Tensor]) -> None:
    """One step with these gradients; none is left to move a parameter once more."""
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
