"""What torch's class of a parametrized layer lacks: to assign, to reset, and RNNs."""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints.dissolved import Dissolved
from cdopt_tutorial.constraints.surface import is_sharded

_here = threading.local()  # the layer that this thread resets; the RNNs that it is in


def extend_class(module: nn.Module, name: str) -> None:
    """Let a layer project what is assigned to a weight, and what resets it.

    This changes the class that torch made for this layer and its copies, and takes off
    again with the last parametrization.
    """
    cls, kind = type(module), parametrize.type_before_parametrizations(module)
    read = getattr(cls, name).fget

    def weight(self: nn.Module) -> Tensor:
        """A(W); while the layer is reset, W itself."""
        if not torch.compiler.is_compiling() and getattr(_here, "reset", None) is self:
            return self.parametrizations[name].original
        return read(self)

    setattr(cls, name, property(weight, lambda self, value: _assign(self, name, value)))
    for reset in ("reset_parameters", "_reset_parameters"):  # attention has the latter
        if hasattr(kind, reset):
            setattr(cls, reset, _resetting(getattr(kind, reset)))
    if isinstance(module, nn.RNNBase):
        _extend_recurrent(module, cls, kind)


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    """Write the projection of a value into W."""
    weight = module.parametrizations[name].original
    kind = type(module).__name__.removeprefix("Parametrized")
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
        raise ValueError(f"{name!r} of {kind} has to be a tensor of floats with data")
    if value.shape != weight.shape:
        raise ValueError(
            f"{name!r} of {kind} has shape {tuple(weight.shape)}, but what is assigned "
            f"has {tuple(value.shape)}"
        )
    try:
        _write(module, name, value.to(weight.dtype))
    except ValueError as error:
        raise ValueError(f"{name!r} of {kind}: {error}") from error


@torch.no_grad()
def _write(module: nn.Module, name: str, value: Tensor) -> None:
    rule, *others = module.parametrizations[name]
    weight = module.parametrizations[name].original
    for each in reversed(others):
        value = each.right_inverse(value)
    if is_sharded(weight) and not is_sharded(value):  # each rank has the whole value
        from cdopt_tutorial.constraints import sharded

        value = sharded.placed(value, weight)
    # In place: its memory may be shared, and FSDP has references to it.
    weight.copy_(rule.right_inverse(value))


def _resetting(reset: Any) -> Any:
    """A layer's reset, which then writes into W, followed by a projection."""

    def reset_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        _here.reset = self
        try:
            reset(self, *args, **kwargs)
        finally:
            _here.reset = None
        for name, listed in self.parametrizations.items():
            if isinstance(listed[0], Dissolved):
                _write(self, name, listed.original.detach().clone())

    return reset_parameters


def _extend_recurrent(module: nn.RNNBase, cls: type, kind: type) -> None:
    """Let an RNN compute its weights once in each pass, and keep none.

    Torch's keeps a list of them, which each pass compares with the attributes.
    """

    def forward(self: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return kind.forward(self, *args, **kwargs)
        outer = getattr(_here, "weights", {})
        _here.weights = outer | {id(self): _flat_weights(self)}
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            _here.weights = outer

    cls.forward = forward
    cls._update_flat_weights = lambda self: None
    cls._flat_weights = property(_flat_weights, _ignore)
    cls._flat_weight_refs = property(lambda self: [], _ignore)
    # Once the class is off, the layer finds here that its list is out of date.
    count = len(module._flat_weights_names)
    stale = {"_flat_weights": [None], "_flat_weight_refs": [type(None)]}
    vars(module).update({name: value * count for name, value in stale.items()})


def _flat_weights(rnn: nn.RNNBase) -> list[Tensor | None]:
    if not torch.compiler.is_compiling():
        if known := getattr(_here, "weights", {}).get(id(rnn)):
            return known
    return [getattr(rnn, name, None) for name in rnn._flat_weights_names]


def _ignore(rnn: nn.RNNBase, _: list) -> None:
    """Torch's RNN may set its list, and nothing is kept."""
