"""One optimizer over all owners of parameters, with clipping and a schedule."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.optim import DistributedOptimizer

from cdopt_tutorial.engines.optimizer import choice
from cdopt_tutorial.parameter_server import checkpoint
from cdopt_tutorial.parameter_server.config import RNNConfig


class Distributed:
    """``DistributedOptimizer`` with a schedule and with clipping over all workers.

    Lives on the trainer; each owner has an optimizer for its own parameters.

    Args:
        parameters: references to all parameters, by name.
        config: of the run.
    """

    def __init__(self, parameters: Mapping[str, rpc.RRef], config: RNNConfig):
        kind, arguments = choice(config)
        self._optimizer = DistributedOptimizer(kind, parameters.values(), **arguments)
        self._owners = {r.owner_name(): r.owner() for r in parameters.values()}
        # Each owner's optimizer has its parameters in the order in which they came.
        self._names: dict[str, list[str]] = {}
        for name, rref in parameters.items():
            self._names.setdefault(rref.owner_name(), []).append(name)
        self._clip = config.clip

    def step(self, context_id: int) -> None:
        """Use the gradients of a context on every worker that owns parameters."""
        if self._clip is not None:
            self._clip_gradients(context_id)
        self._optimizer.step(context_id)

    def set_lr(self, lr: float) -> None:
        """Change the learning rate on every owner."""
        for rref in self._optimizer.remote_optimizers:
            rpc.rpc_sync(rref.owner(), _set_lr, args=(rref, lr))

    def state(self) -> dict[str, dict[str, Any]]:
        """What the optimizers keep, by the parameters' names."""
        kept: dict[str, dict[str, Any]] = {}
        for rref in self._optimizer.remote_optimizers:
            names = self._names[rref.owner_name()]
            kept |= rpc.rpc_sync(rref.owner(), _get_state, args=(rref, names))
        return kept

    def load_state(self, states: dict[str, dict[str, Any]]) -> None:
        """Go on with what other optimizers kept."""
        for rref in self._optimizer.remote_optimizers:
            names = self._names[rref.owner_name()]
            rpc.rpc_sync(rref.owner(), _load_state, args=(rref, names, states))

    def _clip_gradients(self, context_id: int) -> None:
        """Scale all gradients so that their common norm is at most ``clip``."""
        owners = self._owners.values()
        asked = [rpc.rpc_async(o, _squared_norm, args=(context_id,)) for o in owners]
        scale = clip_factor(sum(future.wait() for future in asked), self._clip)
        if scale < 1:
            args = context_id, scale
            torch.futures.wait_all([rpc.rpc_async(o, _scale, args) for o in owners])


def clip_factor(squared_norm: float, largest: float) -> float:
    """Factor on all gradients, the same as ``torch.nn.utils.clip_grad_norm_`` takes."""
    return min(1.0, largest / (squared_norm**0.5 + 1e-6))


def squared_norm(gradients: Iterable[Tensor]) -> float:
    """Sum of the squares of all gradients' elements."""
    return sum(gradient.square().sum().item() for gradient in gradients)


def _squared_norm(context_id: int) -> float:
    return squared_norm(dist_autograd.get_gradients(context_id).values())


def _scale(context_id: int, scale: float) -> None:
    for gradient in dist_autograd.get_gradients(context_id).values():
        gradient.mul_(scale)


def _set_lr(optimizer_rref: rpc.RRef, lr: float) -> None:
    for group in optimizer_rref.local_value().optim.param_groups:
        group["lr"] = lr


def _get_state(optimizer_rref: rpc.RRef, names: Sequence[str]) -> dict:
    return checkpoint.optimizer_state(optimizer_rref.local_value().optim, names)


def _load_state(optimizer_rref: rpc.RRef, names: Sequence[str], states: dict) -> None:
    optimizer = optimizer_rref.local_value().optim
    checkpoint.load_optimizer_state(optimizer, names, states)
