"""The parametrization of a dissolved weight, and what torch's class of its layer lacks.

That is to assign and to reset a weight, and recurrent layers.
"""

import threading
from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints.manifolds import Manifold, squared_distances
from cdopt_tutorial.constraints.sums import placed

# ‖C(W)‖² of each W that this thread has mapped; None outside of `with_penalty`.
distances = ContextVar[dict[Tensor, Tensor] | None]("distances", default=None)
# The weights of the RNNs in whose passes this thread is, by id.
_in_pass = ContextVar[dict[int, list[Tensor | None]] | None]("_in_pass", default=None)


class Dissolved(nn.Module):
    """The parametrization of a dissolved weight: W to A(W)."""

    def __init__(
        self, manifold: Manifold, penalty_param: float, padding: int | None = None
    ):
        super().__init__()
        self.manifold, self.penalty_param = manifold, penalty_param
        self.padding = padding  #: the row that is 0, if there is one

    def forward(self, weight: Tensor) -> Tensor:
        """A(W), shaped as W."""
        mapped, distance = self.manifold.map_and_distance(_for_this_call(weight))
        known = _known()
        # Without a graph, as in a checkpointed pass, it is of no use to a penalty.
        if known is not None and (distance.requires_grad or not weight.requires_grad):
            known[weight] = distance
        return mapped

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The same memory, since what is feasible is mapped to itself."""
        return weight.detach()

    def nearest(self, weight: Tensor, name: str) -> Tensor:
        """The nearest feasible weight, or a ValueError with a name for it."""
        return self.manifold.nearest(weight, self.padding, name)

    @torch.no_grad()
    def write(self, value: Tensor, weight: Tensor, name: str) -> None:
        """Let W be the feasible weight nearest to a value, or raise ValueError."""
        nearest = self.nearest(value.to(weight.dtype), name)
        # In place: its memory may be shared, and FSDP has references to it.
        weight.copy_(placed(nearest, weight))


class Gathered(nn.Module):
    """Gathers A(W); its gradient is a mean over the ranks, like FSDP2's."""

    def forward(self, mapped: Any) -> Tensor:
        """The whole of a DTensor."""
        from torch.distributed.tensor import Partial

        size = mapped.device_mesh.size()
        whole = mapped.full_tensor(grad_placements=[Partial()])
        if whole.requires_grad:
            whole.register_hook(lambda grad: grad / size)
        return whole

    def right_inverse(self, weight: Tensor) -> Tensor:
        """As it is, since the other parametrization cuts it."""
        return weight


def penalties(weights: Collection[tuple[Tensor, Dissolved]]) -> list[Tensor]:
    """``penalty_param`` ‖C(W)‖² of each weight, a scalar.

    What a map has not just computed takes one all-reduce for all weights in shards.
    """
    known = dict(_known() or {})
    missing = [(w, rule.manifold) for w, rule in weights if w not in known]
    here = [(manifold, _for_this_call(w)) for w, manifold in missing]
    for (weight, _), distance in zip(missing, squared_distances(here), strict=True):
        known[weight] = distance
    return [rule.penalty_param * known[weight] for weight, rule in weights]


def _known() -> dict[Tensor, Tensor] | None:
    return None if torch.compiler.is_compiling() else distances.get()


def _for_this_call(weight: Tensor) -> Tensor:
    """The weight to compute with: a copy in threads that answer calls by RPC.

    Another trainer's step may come before this call's backward pass, which needs the
    weight as it was.
    """
    if torch.compiler.is_compiling():
        return weight
    here = threading.current_thread() is threading.main_thread()
    return weight if here else weight.clone()


def extend_class(module: nn.Module, name: str) -> None:
    """Let a layer project what is assigned to a weight, and what resets it.

    This changes the class that torch made for this layer and its copies, and takes off
    again with the last parametrization.
    """
    cls, kind = type(module), parametrize.type_before_parametrizations(module)
    read = getattr(cls, name).fget
    setattr(cls, name, property(read, lambda self, value: _assign(self, name, value)))
    for reset in ("reset_parameters", "_reset_parameters"):  # attention has the latter
        if hasattr(kind, reset):
            setattr(cls, reset, _resetter(kind, getattr(kind, reset)))
    if isinstance(module, nn.RNNBase):
        _extend_recurrent(cls, kind)
        _forget(module)


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    """Write the projection of a value into W."""
    listed = getattr(module.parametrizations, name)
    rule: Dissolved
    weight, (rule, *others) = listed.original, listed
    what = f"{name!r} of {type(module).__name__.removeprefix('Parametrized')}"
    given = tuple(value.shape) if isinstance(value, Tensor) else type(value)
    if given != (shape := tuple(weight.shape)):
        raise ValueError(f"{what} has shape {shape}, but what is assigned is {given}")
    if value.is_complex():
        raise ValueError(f"{what} is real, but what is assigned is complex")
    for other in reversed(others):
        value = other.right_inverse(value)
    rule.write(value, weight, what)


def _resetter(kind: type[nn.Module], reset: Callable[..., None]) -> Callable[..., None]:
    """A layer's reset, as of a plain one that has W itself, and then a projection."""

    def reset_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain, free = kind.__new__(kind), {}
        vars(plain).update(vars(self))
        lists = vars(self)["_modules"]["parametrizations"]
        for name, listed in lists.items():
            if isinstance(listed[0], Dissolved):
                free[name] = listed.original
            else:
                vars(plain)[name] = getattr(self, name)
        plain._parameters = free | self._parameters
        reset(plain, *args, **kwargs)
        for name, weight in free.items():
            value = plain._parameters.pop(name)
            lists[name][0].write(value, weight, repr(name))
        vars(self).update((k, v) for k, v in vars(plain).items() if k in vars(self))

    return reset_parameters


def _extend_recurrent(cls: Any, kind: type[nn.RNNBase]) -> None:
    """Let an RNN compute its weights once in each pass, and keep none.

    Torch's keeps a list of them, which each pass compares with the attributes.
    """

    def forward(self: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return kind.forward(self, *args, **kwargs)
        outer = _in_pass.get() or {}
        token = _in_pass.set(outer | {id(self): _flat_weights(self)})
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            _in_pass.reset(token)

    cls.forward = forward
    cls._flat_weights = property(_flat_weights, lambda self, _: None)
    cls._init_flat_weights = _forget
    cls._update_flat_weights = lambda self: None


def _flat_weights(rnn: nn.RNNBase) -> list[Tensor | None]:
    if not torch.compiler.is_compiling():
        if known := (_in_pass.get() or {}).get(id(rnn)):
            return known
    return [getattr(rnn, name, None) for name in rnn._flat_weights_names]


def _forget(rnn: nn.RNNBase) -> None:
    """Once its class is off, an RNN finds here that its list is out of date."""
    size = len(rnn._flat_weights_names)
    vars(rnn).update(_flat_weights=[None] * size, _flat_weight_refs=[type(None)] * size)
