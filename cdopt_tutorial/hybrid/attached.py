"""What attaches to the system in its workers: a trace's spans, a deadline's places."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from cdopt_tutorial.engines import attach as engine
from cdopt_tutorial.engines import gradients, passed, trace
from cdopt_tutorial.engines.pace import place
from cdopt_tutorial.hybrid import replicas
from cdopt_tutorial.hybrid.model import Table

SELDOM = 10  # deadlines of a step, for what is done once, or after an epoch


def attach(trainer: type, deadline: float) -> None:
    """Wrap what the class ``Trainer`` does, with seconds from place to place."""
    if trace.recording():
        _mark(trainer)
    _place(trainer, deadline)


def _mark(trainer: type) -> None:
    trace.mark(trainer.lookup, "lookup")
    trace.mark(trainer.scores, "dense forward")
    trace.mark(gradients.backward, "backward")
    trace.mark(trainer.update, "optimizer")
    trace.mark_backward(Table.forward, "table backward")
    trace.mark_until(default_hooks.allreduce_hook, "all-reduce")

    def replicate(function: Callable, *args: Any) -> torch.nn.Module:
        replica = function(*args)
        # What DDP does by itself, where it can be marked.
        replica.register_comm_hook(None, default_hooks.allreduce_hook)
        return replica

    engine.wrap(replicas.replicate, replicate)


def _place(trainer: type, deadline: float) -> None:
    # A place before and behind whatever may wait for somebody.
    def ask_server(*_: Any) -> None:
        passed(deadline, "ps")

    def lookup(function: Callable, *args: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():  # the first trainer scores, the others do not
            return function(*args)
        ask_server()
        vectors = function(*args)
        passed(deadline)
        # All gradients of this trainer are ready when that of the vectors is.
        vectors.register_hook(ask_server)
        return vectors

    def make(function: Callable, self: Any, *args: Any) -> None:
        function(self, *args)
        self.optimizer.register_step_post_hook(ask_server)

    for function in (replicas.join, replicas.replicate, replicas.barrier):
        place(function, SELDOM * deadline)
    place(trainer.run, SELDOM * deadline, then=math.inf)
    place(trainer.update, deadline)
    engine.wrap(trainer.lookup, lookup)
    engine.wrap(trainer.__init__, make)
