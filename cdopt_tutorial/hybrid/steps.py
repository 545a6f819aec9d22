"""How a loss moves the parameters: in one process, or by either semantics.

All have the same methods, and the training loop does not know which it has.
"""

from collections.abc import Callable

import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer

from cdopt_tutorial.data import bags
from cdopt_tutorial.engines import passed, span
from cdopt_tutorial.engines.optimizer import choice
from cdopt_tutorial.engines.remote import Handle
from cdopt_tutorial.hybrid import replicas
from cdopt_tutorial.hybrid.config import HybridConfig
from cdopt_tutorial.hybrid.model import HybridModel

SERVER = "ps"


def loss_factor(batch: bags.Batch, config: HybridConfig) -> float:
    """What a trainer's summed loss is multiplied by.

    With the original's semantics it becomes the mean of the trainer's own batch. The
    exact one undoes the mean over trainers that DDP and the server take: the mean of
    N·sₜ/B over N trainers is the joint batch's Σₜ sₜ/B.
    """
    if config.semantics == "original":
        return 1 / max(1, len(batch.bags))
    return config.num_trainers / batch.joint


def penalty_factor(trainer: int, config: HybridConfig) -> int:
    """What a trainer's penalty is multiplied by, so that it enters a step once.

    Of the dense layer every replica adds its own, and DDP takes the mean. Of the
    table the first trainer adds it, for all.
    """
    if config.constrained == "dense":
        return 1
    if config.constrained is None or trainer > 0:
        return 0
    return config.num_trainers if config.semantics == "exact" else 1


class LocalStep:
    """Plain training: everything is in this process.

    Args:
        model: with its table and its dense layer.
        config: of the run.
    """

    def __init__(self, model: HybridModel, config: HybridConfig):
        kind, arguments = choice(config)
        learnt = [each for each in model.parameters() if each.requires_grad]
        self._optimizer = kind(learnt, **arguments)

    def __call__(self, loss_of: Callable[[], Tensor]) -> None:
        """Compute the loss, step."""
        loss_of().backward()
        self._optimizer.step()

    def meet(self) -> None:
        """Wait for all trainers: there is one."""


class OriginalStep:
    """The original's: one ``DistributedOptimizer`` for the layer and the table.

    Lives on each trainer. Each applies its whole gradient of the table when it
    likes, so with N trainers the table moves N times for each move of the layer.

    Args:
        table: on the server.
        model: on this trainer.
        config: of the run.
    """

    def __init__(self, table: RemoteModule, model: HybridModel, config: HybridConfig):
        rrefs = [*table.remote_parameters(), *_rrefs(model)]
        self._deadline = config.step_deadline
        kind, arguments = choice(config)
        self._optimizer = DistributedOptimizer(kind, rrefs, **arguments)

    def __call__(self, loss_of: Callable[[], Tensor]) -> None:
        """Compute the loss, carry it back to the server, step."""
        with dist_autograd.context() as context_id:
            loss = loss_of()
            with span("backward"):
                dist_autograd.backward(context_id, [loss])
            passed(self._deadline)
            with span("optimizer"):
                self._optimizer.step(context_id)

    def meet(self) -> None:
        """Wait for all trainers."""
        replicas.wait_for_all()


class ExactStep:
    """As one process would: one step of the table for one of the dense layer.

    Lives on each trainer. A ``DistributedOptimizer`` moves the dense layer only: on
    the server it would make an optimizer for each trainer, with a momentum of its own.

    Args:
        joint: the server's :class:`~cdopt_tutorial.hybrid.server.JointStep`.
        trainer: number of this one.
        model: on this trainer.
        config: of the run.
    """

    def __init__(
        self, joint: Handle, trainer: int, model: HybridModel, config: HybridConfig
    ):
        self._joint, self._trainer = joint, trainer
        self._deadline = config.step_deadline
        kind, arguments = choice(config)
        self._optimizer = DistributedOptimizer(kind, _rrefs(model), **arguments)

    def __call__(self, loss_of: Callable[[], Tensor]) -> None:
        """Compute the loss, carry it back to the server, step with all trainers."""
        with dist_autograd.context() as context_id:
            loss = loss_of()
            with span("backward"):
                dist_autograd.backward(context_id, [loss])
            passed(self._deadline)
            with span("optimizer"):
                self._optimizer.step(context_id)
                passed(self._deadline, SERVER)
                self._joint.call("step", self._trainer, context_id)

    def meet(self) -> None:
        """Wait for all trainers."""
        replicas.wait_for_all()


def _rrefs(model: HybridModel) -> list[rpc.RRef]:
    """References to the dense layer's parameters, which are here."""
    return [rpc.RRef(each) for each in model.fc.parameters() if each.requires_grad]
