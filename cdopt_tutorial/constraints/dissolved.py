"""The parametrization of a dissolved weight."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from cdopt_tutorial.constraints.surface import Surface, placed

# ‖C(W)‖² of each W that this thread has mapped; None outside of `sharing_sums`.
_distances = ContextVar[dict[Tensor, Tensor] | None]("_distances", default=None)


class Dissolved(nn.Module):
    """The parametrization of a dissolved weight: W to A(W)."""

    def __init__(self, on: Surface, penalty_param: float, padding: int | None = None):
        super().__init__()
        self.surface, self.penalty_param, self.padding = on, penalty_param, padding

    def forward(self, weight: Tensor) -> Tensor:
        """A(W), shaped as W."""
        mapped, distance = self.surface.map_and_distance(_for_this_call(weight))
        known = _known()
        # Without a graph, as in a checkpointed pass, it is of no use to a penalty.
        if known is not None and (distance.requires_grad or not weight.requires_grad):
            known[weight] = distance
        return mapped

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The same memory, since what is feasible is mapped to itself."""
        return weight.detach()

    def distance(self, weight: Tensor) -> Tensor:
        """‖C(W)‖², a scalar."""
        known = _known()
        if known and weight in known:
            return known[weight]
        return self.surface.distance(_for_this_call(weight))

    def penalty(self, weight: Tensor) -> Tensor:
        """``penalty_param`` ‖C(W)‖²; a ValueError if that is 0 for every weight."""
        if not self.penalty_param > 0:
            raise ValueError(f"penalty_param is {self.penalty_param}: no penalty")
        return self.penalty_param * self.distance(weight)

    def nearest(self, weight: Tensor) -> Tensor:
        """The nearest feasible weight, or a ValueError."""
        return self.surface.nearest(weight, self.padding)

    @torch.no_grad()
    def write(self, value: Tensor, weight: Tensor) -> None:
        """Let W be the feasible weight nearest to a value, or raise ValueError."""
        nearest = self.nearest(value.to(weight.dtype))
        # In place: its memory may be shared, and FSDP has references to it.
        weight.copy_(placed(nearest, weight))

    @property
    def rule(self) -> tuple:
        """What layers that share a weight have to agree on."""
        return self.surface, self.penalty_param


@contextmanager
def sharing_sums() -> Iterator[None]:
    """Within it, ‖C(W)‖² is that of this thread's last pass, if there was one."""
    token = _distances.set({})
    try:
        yield
    finally:
        _distances.reset(token)


def _known() -> dict[Tensor, Tensor] | None:
    return None if torch.compiler.is_compiling() else _distances.get()


def _for_this_call(weight: Tensor) -> Tensor:
    """The weight to compute with: a copy in threads that answer calls by RPC.

    Another trainer's step may come before this call's backward pass, which needs the
    weight as it was.
    """
    if torch.compiler.is_compiling():
        return weight
    here = threading.current_thread() is threading.main_thread()
    return weight if here else weight.clone()
