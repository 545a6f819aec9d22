"""The optimizer of the parameters that one worker owns, a step of it, and clipping."""

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


def squared_norm(found: Iterable[Tensor]) -> float:
    """Sum of the squares of all gradients' elements."""
    return sum(gradient.square().sum().item() for gradient in found)


def clip_factor(squared_norm: float, largest: float | None) -> float:
    """Factor on all gradients, the same as ``torch.nn.utils.clip_grad_norm_`` takes."""
    if largest is None:
        return 1.0
    return min(1.0, largest / (squared_norm**0.5 + 1e-6))


def move(optimizer: optim.Optimizer, gradients: Mapping[Tensor, Tensor]) -> None:
    """One step with these gradients; none is left to move a parameter once more."""
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
