"""How a loss moves the parameters: in one process, on two workers, by a shared server.

The three have the same methods, and the training loop does not know which it has.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn

from cdopt_tutorial.engines import span
from cdopt_tutorial.engines.optimizer import choice
from cdopt_tutorial.engines.remote import Handle, remote_method
from cdopt_tutorial.parameter_server import checkpoint
from cdopt_tutorial.parameter_server.config import RNNConfig
from cdopt_tutorial.parameter_server.model import RNNModel
from cdopt_tutorial.parameter_server.optimizer import Distributed

PARTS = ("embedding", "rnn", "decoder")


class LocalStep:
    """Plain training: everything is in this process.

    Args:
        refs: a reference to each part of the model, by its name.
        config: of the run.
    """

    def __init__(self, refs: Mapping[str, Any], config: RNNConfig):
        self.refs = refs
        named = nn.ModuleDict({name: refs[name].local_value() for name in PARTS})
        self._names, self._parameters = zip(*named.named_parameters(), strict=True)
        kind, arguments = choice(config)
        self._optimizer = kind(self._parameters, **arguments)
        self._clip = config.clip

    def __call__(self, loss_of: Callable[[], Tensor]) -> int:
        """Compute the loss, step; returns the staleness, which is 0."""
        loss_of().backward()
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        return 0

    def set_lr(self, lr: float) -> None:
        """Change the learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def reseed(self, seed: int) -> None:
        """Let the dropout's chance begin anew."""
        torch.manual_seed(seed)

    def meet(self, brought: Any = None) -> list:
        """Wait for all trainers; returns what each brought."""
        return [brought]

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps, by the parameters' names."""
        return checkpoint.optimizer_state(self._optimizer, self._names)

    def load(self, weights: dict[str, Tensor], states: dict[str, dict]) -> None:
        """Take the parameters and the optimizer's state of a checkpoint."""
        load_weights(self.refs, weights)
        checkpoint.load_optimizer_state(self._optimizer, self._names, states)


class DistributedStep:
    """One trainer and a server, each of which owns a part of the parameters.

    Args:
        refs: a reference to each part of the model, by its name.
        model: on this trainer.
        config: of the run.
    """

    def __init__(self, refs: Mapping[str, Any], model: RNNModel, config: RNNConfig):
        self.refs = refs
        self._optimizer = Distributed(model.parameter_rrefs(), config)
        self.set_lr = self._optimizer.set_lr
        self.optimizer_state = self._optimizer.state

    def __call__(self, loss_of: Callable[[], Tensor]) -> int:
        """Compute the loss, step; returns the staleness, which is 0."""
        with dist_autograd.context() as context_id:
            with span("forward"):
                loss = loss_of()
            with span("backward"):
                dist_autograd.backward(context_id, [loss])
            with span("optimizer"):
                self._optimizer.step(context_id)
        return 0

    def reseed(self, seed: int) -> None:
        """Let the dropout's chance begin anew, here and on the server."""
        torch.manual_seed(seed)
        _reseed_owner(self.refs["embedding"], seed + 1)

    def meet(self, brought: Any = None) -> list:
        """Wait for all trainers; returns what each brought."""
        return [brought]

    def load(self, weights: dict[str, Tensor], states: dict[str, dict]) -> None:
        """Take the parameters and the optimizers' state of a checkpoint."""
        load_weights(self.refs, weights)
        self._optimizer.load_state(states)


class SharedStep:
    """One of several trainers; the server owns all parameters.

    Args:
        refs: a reference to each part of the model, by its name.
        server: the :class:`ParameterServer`.
        trainer: number of this trainer.
        config: of the run.
    """

    def __init__(
        self,
        refs: Mapping[str, Any],
        server: Handle,
        trainer: int,
        config: RNNConfig,
    ):
        self.refs = refs
        self._server, self._trainer, self._sync = server, trainer, config.sync

    def __call__(self, loss_of: Callable[[], Tensor]) -> int:
        """Compute the loss, leave the gradients; returns the staleness."""
        with dist_autograd.context() as context_id:
            begun = 0 if self._sync else self._server.call("begin")
            with span("forward"):
                loss = loss_of()
            with span("backward"):
                dist_autograd.backward(context_id, [loss])
            with span("optimizer"):
                if self._sync:
                    return self._server.call("step_together", self._trainer, context_id)
                return self._server.call("step", context_id, begun)

    def set_lr(self, lr: float) -> None:
        """Change the learning rate; every trainer asks for the same."""
        self._server.call("set_lr", lr)

    def reseed(self, seed: int) -> None:
        """Let the dropout's chance begin anew, here and on the server."""
        torch.manual_seed(seed + 2 * self._trainer)
        if self._trainer == 0:
            _reseed_owner(self.refs["embedding"], seed + 1)

    def meet(self, brought: Any = None) -> list:
        """Wait for all trainers; returns what each brought."""
        return self._server.call("meet", self._trainer, brought)

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """What the server's optimizer keeps, by the parameters' names."""
        return self._server.call("optimizer_state")

    def load(self, weights: dict[str, Tensor], states: dict[str, dict]) -> None:
        """Take the parameters and the optimizer's state of a checkpoint."""
        if self._trainer == 0:
            self._server.call("load", weights, states)


def gather(refs: Mapping[str, Any]) -> dict[str, Tensor]:
    """All parameters by name, wherever their parts live."""
    return {
        f"{part}.{name}": value
        for part in PARTS
        for name, value in remote_method(_weights, refs[part]).items()
    }


def load_weights(refs: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Give every part its parameters, wherever it lives."""
    for part in PARTS:
        begin = f"{part}."
        own = {
            n.removeprefix(begin): w for n, w in weights.items() if n.startswith(begin)
        }
        remote_method(_load, refs[part], own)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _load(module: nn.Module, weights: dict[str, Tensor]) -> None:
    module.load_state_dict(weights)


def _reseed_owner(rref, seed: int) -> None:
    remote_method(_reseed, rref, seed)


def _reseed(_: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
