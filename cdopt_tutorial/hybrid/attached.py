"""What attaches to the system in its workers: spans of a trace, places of a deadline.

The launcher has :func:`attach` called in every worker before its role begins. Without
it the system runs the same, and nobody sees who is late.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from cdopt_tutorial.engines import gradients, passed, trace
from cdopt_tutorial.engines.attach import wrap
from cdopt_tutorial.hybrid import replicas
from cdopt_tutorial.hybrid.model import Table

SELDOM = 10  # deadlines of a step, for what is done once, or after an epoch


def attach(trainer: type, deadline: float) -> None:
    """Wrap the trainer's functions, and what they call.

    Args:
        trainer: the class :class:`~cdopt_tutorial.hybrid.system.Trainer`.
        deadline: seconds from one place in a trainer's step to the next.
    """
    if trace.recording():
        _mark(trainer)
    _place(trainer, deadline)


def _mark(trainer: type) -> None:
    """Mark the phases of a step in the trace."""
    trace.mark(trainer.lookup, "lookup")
    trace.mark(trainer.scores, "dense forward")
    trace.mark(gradients.backward, "backward")
    trace.mark(trainer.update, "optimizer")

    def forward(function: Callable, *args: Any) -> torch.Tensor:
        return trace.span_backward(function(*args), "table backward")

    def replicate(function: Callable, *args: Any) -> torch.nn.Module:
        replica = function(*args)
        replica.register_comm_hook(None, _all_reduce)
        return replica

    wrap(Table.forward, forward)
    wrap(replicas.replicate, replicate)


def _all_reduce(group: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """What DDP does by itself, and a span in the trace."""
    return trace.span_until(default_hooks.allreduce_hook(group, bucket), "all-reduce")


def _place(trainer: type, deadline: float) -> None:
    """Pass a place before and behind whatever may wait for somebody.

    All trainers pass the same ones, so the one that is furthest behind waits for none
    of the others; but it may wait for ``ps``.
    """

    def step(*_: Any) -> None:
        passed(deadline)

    def ask_server(*_: Any) -> None:
        passed(deadline, "ps")

    def seldom(*_: Any) -> None:
        passed(SELDOM * deadline)

    def lookup(function: Callable, *args: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():  # the first trainer scores, the others do not
            return function(*args)
        ask_server()
        vectors = function(*args)
        step()
        # All gradients of this trainer are ready when that of the vectors is.
        vectors.register_hook(ask_server)
        return vectors

    def make(function: Callable, self: Any, *args: Any) -> None:
        function(self, *args)
        self.optimizer.register_step_post_hook(ask_server)

    _around(replicas.join, seldom, seldom)
    _around(replicas.replicate, seldom, seldom)
    _around(replicas.barrier, seldom, seldom)
    _around(trainer.update, step, step)  # behind the backward pass, and the step
    _around(trainer.run, seldom, lambda: passed(math.inf))
    wrap(trainer.lookup, lookup)
    wrap(trainer.__init__, make)


def _around(function: Callable, before: Callable, after: Callable) -> None:
    def around(function: Callable, *args: Any, **kwargs: Any) -> Any:
        before()
        result = function(*args, **kwargs)
        after()
        return result

    wrap(function, around)
