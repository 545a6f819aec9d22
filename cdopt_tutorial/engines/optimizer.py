"""Optimizers for gradients that come from contexts of distributed autograd."""

from typing import Any, Protocol

from torch import optim


class Choice(Protocol):
    """What a config says of its optimizer: "sgd" or "adam", and its numbers."""

    optimizer: str
    lr: float
    momentum: float


class _Clearing:
    """Forgets the gradients once they were used.

    ``DistributedOptimizer`` copies gradients from a context to ``.grad`` and leaves
    them there, so a parameter that the next context does not touch would be moved
    again by the old one. And since these classes are not torch's own, it does not
    compile them with TorchScript, whose removal is announced.
    """

    def step(self, closure=None):
        result = super().step(closure)
        self.zero_grad(set_to_none=True)
        return result


class ClearingSGD(_Clearing, optim.SGD):
    """SGD for the parameters that one worker owns."""


class ClearingAdam(_Clearing, optim.Adam):
    """Adam for the parameters that one worker owns."""


def choice(config: Choice) -> tuple[type[optim.Optimizer], dict[str, Any]]:
    """The optimizer's class and its arguments."""
    if config.optimizer == "adam":
        return ClearingAdam, {"lr": config.lr}
    return ClearingSGD, {"lr": config.lr, "momentum": config.momentum}
