"""What torch's class of a parametrized layer lacks: to assign, to reset, and RNNs."""

import threading
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints.dissolved import Dissolved
from cdopt_tutorial.constraints.surface import is_sharded


def extend_class(module: nn.Module, name: str) -> None:
    """Let a layer project what is assigned to a weight, and what resets it.

    This changes the class that torch made for this layer and its copies, and takes off
    again with the last parametrization.
    """
    cls, kind = type(module), parametrize.type_before_parametrizations(module)
    setattr(cls, name, property(getattr(cls, name).fget, partial(_assign, name)))
    if hasattr(kind, "reset_parameters"):
        cls.reset_parameters = partialmethod(_reset, kind)
    if isinstance(module, nn.RNNBase):
        # Torch's RNN keeps a list of its weights, and in each pass compares it with the
        # attributes. Here each pass makes the list, and nothing is kept.
        cls.forward = partialmethod(_forward, kind)
        cls._update_flat_weights = lambda rnn: None
        cls._flat_weights = property(_flat_weights, _ignore)
        cls._flat_weight_refs = property(lambda rnn: [], _ignore)
        # Once the class is off, the layer finds here that its list is out of date.
        count = len(module._flat_weights_names)
        stale = {"_flat_weights": [None], "_flat_weight_refs": [type(None)]}
        vars(module).update({name: value * count for name, value in stale.items()})


def _assign(name: str, module: nn.Module, value: Tensor) -> None:
    """Write the projection of a value into W."""
    rule, *others = module.parametrizations[name]
    weight = module.parametrizations[name].original
    kind = type(module).__name__.removeprefix("Parametrized")
    for each in reversed(others):
        value = each.right_inverse(value)
    if value.shape != weight.shape:
        raise ValueError(
            f"{name!r} of {kind} has shape {tuple(weight.shape)}, but what is assigned "
            f"has {tuple(value.shape)}"
        )
    try:
        _write(weight, rule, value)
    except ValueError as error:
        raise ValueError(f"{name!r} of {kind}: {error}") from error


def _reset(module: nn.Module, kind: type, *args: Any, **kwargs: Any) -> None:
    """Initialise a layer as its own class does, and project its dissolved weights."""
    listed = module.parametrizations.items()
    ours = {name: each for name, each in listed if isinstance(each[0], Dissolved)}
    with torch.no_grad(), parametrize.cached():
        for each in ours.values():
            each.original.zero_()
        # The class writes into A(W), which torch keeps here, or into W; the other is 0.
        mapped = {name: getattr(module, name) for name in ours}
        kind.reset_parameters(module, *args, **kwargs)
        for name, (rule, *_) in ours.items():
            weight = ours[name].original
            _write(weight, rule, _placed(mapped[name], weight) + weight)


@torch.no_grad()
def _write(weight: Tensor, rule: Dissolved, value: Tensor) -> None:
    # In place: its memory may be shared, and FSDP has references to it.
    weight.copy_(rule.right_inverse(_placed(value, weight)))


def _placed(value: Tensor, weight: Tensor) -> Tensor:
    """A value in shards if the weight is; each rank gives the whole value."""
    if is_sharded(value) or not is_sharded(weight):
        return value
    from cdopt_tutorial.constraints import sharded

    return sharded.placed(value, weight)


_passes = threading.local()  # the weights of the RNNs that this thread is in, by id


def _forward(rnn: nn.RNNBase, kind: type, *args: Any, **kwargs: Any) -> Any:
    """The pass of torch's RNN, which reads its list twice: one map serves both."""
    outer = getattr(_passes, "weights", {})
    _passes.weights = outer | {id(rnn): _flat_weights(rnn)}
    try:
        return kind.forward(rnn, *args, **kwargs)
    finally:
        _passes.weights = outer


def _flat_weights(rnn: nn.RNNBase) -> list[Tensor | None]:
    known = getattr(_passes, "weights", {}).get(id(rnn))
    names = rnn._flat_weights_names
    return known or [getattr(rnn, name, None) for name in names]


def _ignore(rnn: nn.RNNBase, _: list) -> None:
    """Torch's RNN may set its list, and nothing is kept."""
