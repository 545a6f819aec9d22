"""Constraint dissolving for the weights of any layer, as torch's parametrizations."""

import sys
from numbers import Real
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints.attributes import extend_class
from cdopt_tutorial.constraints.dissolved import Dissolved
from cdopt_tutorial.constraints.surface import (
    Manifold,
    Surface,
    is_under_fsdp,
    surface,
)

_Layer = TypeVar("_Layer", bound=nn.Module)


def dissolve(
    module: _Layer,
    name: str = "weight",
    manifold: Manifold = "stiefel",
    penalty_param: float = 0.1,
    *,
    blocks: int = 1,
    transpose: bool | None = None,
) -> _Layer:
    """Make a layer compute with A(W) in place of its weight, projected to start with.

    ``module.weight`` becomes A(W); the free parameter W, which any optimizer moves, is
    ``module.parametrizations.weight.original``. Assigning a weight projects it, and so
    does ``module.reset_parameters()``. Add the penalty on W, ``penalty_param`` ‖C(W)‖²,
    to the loss, see :func:`~cdopt_tutorial.constraints.measure.penalty`; the papers' β
    is twice that. Dissolve a shared weight in each of its layers; its penalty counts
    once. Otherwise the layer is as if parametrized by torch's
    ``register_parametrization``: saved by its ``state_dict``, and plain again after
    ``remove_parametrizations``. Source: Xiao, Liu and Toh (2023).

    A weight may be in shards: call ``parallelize_module`` before, DDP, ``fully_shard``
    and ``torch.compile`` after this; :mod:`~cdopt_tutorial.constraints.sharded` says
    what that costs. Each stage of a pipeline adds its own penalty.

    The manifold is "stiefel" (the short side orthonormal), "oblique" (rows of norm 1),
    "sphere" (norm 1), or a class of CDOpt; for ``blocks`` and ``transpose`` see
    :func:`~cdopt_tutorial.constraints.surface.surface`. Raises ValueError if there is
    no such weight, it is not finite, already parametrized or under ``fully_shard``, or
    does not fit the manifold; the layer is left unchanged.
    """
    weight = _free_weight(module, name)
    on = surface(manifold, weight, blocks, transpose)
    _register(module, {name: _rule(module, name, on, penalty_param)})
    return module


def dissolve_recurrent(
    rnn: _Layer,
    manifold: Manifold = "stiefel",
    penalty_param: float = 0.1,
    per_gate: bool = True,
) -> _Layer:
    """Dissolve each hidden-to-hidden weight of a recurrent layer or cell of torch.nn.

    See :func:`dissolve`. Each gate's matrix (h, h) is on a manifold of its own; unless
    ``per_gate``, the stack of them, (4h, h) for an LSTM, is on one, as in
    ``LSTM_cdopt``, and no gate is orthogonal. Raises ValueError if there is no such
    weight; then none is dissolved.
    """
    free = _parameters(rnn) if isinstance(rnn, nn.Module) else []
    names = [name for name, w in free if "weight_hh" in name and w.ndim == 2]
    if not names:
        raise ValueError(f"{type(rnn).__name__} has no weight_hh that is still free")
    rules, size = {}, getattr(rnn, "hidden_size", None)
    for name in names:
        weight = _free_weight(rnn, name)
        if per_gate and (not size or len(weight) % size):
            raise ValueError(
                f"{name!r} has {len(weight)} rows, and hidden_size is {size}: these "
                "are no gates; pass per_gate=False"
            )
        blocks = len(weight) // size if size and per_gate else 1
        on = surface(manifold, weight, blocks)
        rules[name] = _rule(rnn, name, on, penalty_param)
    _register(rnn, rules)
    return rnn


def _rule(
    module: nn.Module, name: str, on: Surface, penalty_param: float
) -> tuple[Dissolved, Tensor]:
    """The parametrization of a layer's weight, and where W begins, or a ValueError."""
    number = isinstance(penalty_param, Real) and type(penalty_param) is not bool
    if not number or not 0 < penalty_param < sys.float_info.max:
        raise ValueError(
            f"penalty_param is {penalty_param!r}, but must be above 0 and finite"
        )
    # A bag never reads its padding row.
    padding = module.padding_idx if isinstance(module, nn.Embedding) else None
    rule = Dissolved(on, float(penalty_param), padding)
    try:
        return rule, rule.nearest(getattr(module, name))
    except ValueError as error:
        raise ValueError(f"{name!r} of {type(module).__name__}: {error}") from error


def _free_weight(module: nn.Module, name: str) -> nn.Parameter:
    """A layer's weight, or a ValueError if it can't be dissolved."""
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        raise ValueError(f"a {kind} is no layer: give a module of torch.nn")
    if is_under_fsdp(module):
        raise ValueError(f"{kind} is under fully_shard: dissolve before, not after")
    if parametrize.is_parametrized(module, name):
        raise ValueError(f"{name!r} of {kind} is parametrized already")
    weight = dict(_parameters(module)).get(name)
    if weight is None:
        raise ValueError(f"{kind} has no parameter {name!r}")
    if nn.parameter.is_lazy(weight):
        raise ValueError(f"{name!r} of {kind} has no shape before the first pass")
    if weight.layout != torch.strided or weight.is_mkldnn:
        raise ValueError(f"{name!r} of {kind} is {weight.layout}, but must be dense")
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.sparse:
            raise ValueError(f"{kind} has sparse=True, but a W has a dense gradient")
        if module.max_norm is not None:
            raise ValueError(f"{kind} has max_norm, which would scale A(W) unseen by W")
    return weight


def _parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A module's own parameters, by all of their names."""
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


@torch.no_grad()
def _register(module: nn.Module, rules: dict[str, tuple[Dissolved, Tensor]]) -> None:
    """Parametrize weights, each under all names that it has in this module."""
    for name, (rule, start) in rules.items():
        if parametrize.is_parametrized(module, name):  # under another name
            continue
        weight = getattr(module, name)
        if weight.untyped_storage().nbytes() < weight.nbytes:  # its elements overlap
            weight.data = start
        else:  # its memory may be shared
            weight.copy_(start)
        for other, parameter in _parameters(module):
            if parameter is weight:
                # Torch's check of a safe one would compute A(W) once more.
                parametrize.register_parametrization(module, other, rule, unsafe=True)
                extend_class(module, other)
