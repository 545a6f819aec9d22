"""The server that several trainers share: one copy of everything, one optimizer."""

import threading
from collections.abc import Iterable
from typing import Any

import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.futures import Future

from cdopt_tutorial.engines.optimizer import choice
from cdopt_tutorial.engines.remote import Handle
from cdopt_tutorial.parameter_server import checkpoint
from cdopt_tutorial.parameter_server.config import RNNConfig
from cdopt_tutorial.parameter_server.model import build
from cdopt_tutorial.parameter_server.optimizer import clip_factor, squared_norm

_shared: list["ParameterServer"] = []  # this process's, once somebody asked for it
_making = threading.Lock()


class ParameterServer:
    """Owns all parameters and the one optimizer that moves them.

    Lives on ``ps``. Each trainer's backward pass leaves its gradients here, in a
    context of its own; what is done with them is the server's business.

    Args:
        vocab_size: number of words.
        config: of the run.
    """

    def __init__(self, vocab_size: int, config: RNNConfig):
        names = ("embedding", "rnn", "decoder")
        self.parts = nn.ModuleDict({n: build(n, vocab_size, config) for n in names})
        kind, arguments = choice(config)
        self._optimizer = kind(self.parts.parameters(), **arguments)
        self._config = config
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[int, Future]] = {}
        self._met: dict[int, tuple[Any, Future]] = {}
        self.version = 0  # steps taken

    def part(self, name: str) -> nn.Module:
        """The embedding, the rnn or the decoder."""
        return self.parts[name]

    def begin(self) -> int:
        """The version that a trainer is about to read; called before its forward."""
        return self.version

    def step(self, context_id: int, begun: int) -> int:
        """Asynchronous: use one trainer's gradients at once.

        Args:
            context_id: of the trainer's context.
            begun: version that the trainer computed them from.

        Returns:
            Staleness: steps that others have taken since then.
        """
        with self._lock:
            stale = self.version - begun
            self._apply([dist_autograd.get_gradients(context_id)])
            return stale

    def step_together(self, trainer: int, context_id: int) -> Future[int]:
        """Synchronous: one step with the sum of all trainers' gradients.

        The trainers divide their losses by the tokens of all of them, so the sum is
        the gradient of the joint batch.

        Returns:
            A future that completes once the step was taken; staleness is 0.
        """
        future: Future[int] = Future()
        with self._lock:
            self._waiting[trainer] = context_id, future
            if len(self._waiting) < self._config.num_trainers:
                return future
            # In the order of the trainers, so that sums do not depend on who was first.
            waiting = [self._waiting[rank] for rank in sorted(self._waiting)]
            self._waiting = {}
            self._apply(
                [dist_autograd.get_gradients(context) for context, _ in waiting]
            )
        for _, future_ in waiting:
            future_.set_result(0)
        return future

    def meet(self, trainer: int, brought: Any) -> Future[list]:
        """A future that completes once all trainers have come: what each brought."""
        future: Future[list] = Future()
        with self._lock:
            self._met[trainer] = brought, future
            if len(self._met) < self._config.num_trainers:
                return future
            met, self._met = [self._met[rank] for rank in sorted(self._met)], {}
        for _, other in met:
            other.set_result([item for item, _ in met])
        return future

    def set_lr(self, lr: float) -> None:
        """Change the learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps, by the parameters' names."""
        return checkpoint.optimizer_state(self._optimizer, self._names())

    def load(self, weights: dict[str, Tensor], states: dict[str, dict]) -> None:
        """Take parameters and optimizer state of a checkpoint."""
        self.parts.load_state_dict(weights)
        checkpoint.load_optimizer_state(self._optimizer, self._names(), states)

    def _names(self) -> list[str]:
        return [name for name, _ in self.parts.named_parameters()]

    def _apply(self, gradients: Iterable[dict[Tensor, Tensor]]) -> None:
        for of_one in gradients:
            for parameter, gradient in of_one.items():
                if parameter.grad is None:
                    parameter.grad = gradient.clone()
                else:
                    parameter.grad += gradient
        if self._config.clip is not None:
            found = [p.grad for p in self.parts.parameters() if p.grad is not None]
            scale = clip_factor(squared_norm(found), self._config.clip)
            for gradient in found:
                gradient.mul_(scale)
        self._optimizer.step()
        self.version += 1


def shared_server(vocab_size: int, config: RNNConfig) -> Handle:
    """The one server of this process; runs on ``ps``, for every trainer.

    Whoever asks first has it made.
    """
    with _making:
        if not _shared:
            _shared.append(ParameterServer(vocab_size, config))
        return Handle.to(_shared[0])


def part_of(server: Handle, name: str) -> nn.Module:
    """The embedding, the rnn or the decoder; runs on ``ps``, where it stays."""
    return server.call("part", name)
