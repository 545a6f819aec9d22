"""What torch's class of a parametrized layer lacks: to assign, to reset, and RNNs."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints.dissolved import Dissolved

# The weights of the RNNs in whose passes this thread is, by id.
_in_pass = ContextVar[dict[int, list[Tensor | None]] | None]("_in_pass", default=None)


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
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise ValueError(f"{what} has to be a tensor of floats")
    if value.shape != weight.shape:
        raise ValueError(
            f"{what} has shape {tuple(weight.shape)}, but what is assigned has "
            f"{tuple(value.shape)}"
        )
    for other in reversed(others):
        value = other.right_inverse(value)
    try:
        rule.write(value, weight)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


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
            lists[name][0].write(value, weight)
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
