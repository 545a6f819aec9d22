"""The parametrization of a dissolved weight."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cdopt_tutorial.constraints.surface import Surface


class Dissolved(nn.Module):
    """The parametrization of a dissolved weight: W to A(W)."""

    def __init__(self, on: Surface, penalty_param: float, padding: int | None = None):
        super().__init__()
        self.surface, self.penalty_param, self.padding = on, penalty_param, padding

    def forward(self, weight: Tensor) -> Tensor:
        """A(W), shaped as W."""
        mapped, distance = self.surface.map_and_distance(_for_this_call(weight))
        # Without a graph, as in a checkpointed pass, it is of no use to a penalty.
        if distance.requires_grad or not weight.requires_grad:
            _distances()[weight] = distance
        return mapped

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The W of a weight: the nearest feasible one."""
        return self.surface.nearest(weight, self.padding)

    def distance(self, weight: Tensor) -> Tensor:
        """‖C(W)‖², a scalar."""
        known = _distances().get(weight)
        return self.surface.distance(_for_this_call(weight)) if known is None else known

    @property
    def rule(self) -> tuple:
        """What layers that share a weight have to agree on."""
        return self.surface, self.penalty_param


@contextmanager
def sharing_sums() -> Iterator[None]:
    """Within it, ‖C(W)‖² is that of this thread's last pass, if there was one."""
    before = getattr(_shared, "distances", None)
    _shared.distances = {}
    try:
        yield
    finally:
        _shared.distances = before


_shared = threading.local()


def _distances() -> dict[Tensor, Tensor]:
    """‖C(W)‖² of each W that was mapped; always empty outside of that context."""
    if torch.compiler.is_compiling():
        return {}
    known = getattr(_shared, "distances", None)
    return {} if known is None else known


def _for_this_call(weight: Tensor) -> Tensor:
    """The weight to compute with: a copy in threads that answer calls by RPC.

    Another trainer's step may come before this call's backward pass, which needs the
    weight as it was.
    """
    if torch.compiler.is_compiling():
        return weight
    here = threading.current_thread() is threading.main_thread()
    return weight if here else weight.clone()
