"""What ``ps`` does in an exact run beside its lookups: one step for all trainers."""

import threading

import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.futures import Future

from cdopt_tutorial.engines.optimizer import choice
from cdopt_tutorial.engines.remote import Handle
from cdopt_tutorial.hybrid.config import HybridConfig


class JointStep:
    """One optimizer step on the table with the mean of all trainers' gradients.

    Lives on ``ps``; made by the master, called by the trainers. The mean, since
    that is what DDP takes of the dense layer's gradients: one weight on each
    trainer's loss then serves both.

    Args:
        table: whose parameters are moved.
        config: of the run.
    """

    def __init__(self, table: nn.Module, config: HybridConfig):
        kind, arguments = choice(config)
        self._parameters = list(table.parameters())
        self._optimizer = kind(self._parameters, **arguments)
        self._num_trainers = config.num_trainers
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[int, Future]] = {}

    def step(self, trainer: int, context_id: int) -> Future[None]:
        """Leave a trainer's gradients; the last trainer's are followed by the step.

        Args:
            trainer: its number.
            context_id: of its context of distributed autograd.

        Returns:
            A future that completes once the step was taken.
        """
        future: Future[None] = Future()
        with self._lock:
            self._waiting[trainer] = context_id, future
            if len(self._waiting) < self._num_trainers:
                return future
            # In the trainers' order: sums must not depend on who came first.
            waiting = [self._waiting[rank] for rank in sorted(self._waiting)]
            self._waiting = {}
            self._apply([context for context, _ in waiting])
        for _, other in waiting:
            other.set_result(None)
        return future

    def _apply(self, contexts: list[int]) -> None:
        found = [dist_autograd.get_gradients(context) for context in contexts]
        for parameter in self._parameters:
            gradients = [each[parameter] for each in found if parameter in each]
            if gradients:
                parameter.grad = sum(gradients[1:], gradients[0]) / len(contexts)
        self._optimizer.step()


def make_joint_step(table_rref: rpc.RRef, config: HybridConfig) -> Handle:
    """The joint step of a table; runs on ``ps``, for the master.

    What the trainers get is a name: each RRef handed on would be one more to be
    confirmed by its owner before anybody may leave.
    """
    return Handle.to(JointStep(table_rref.local_value(), config))
