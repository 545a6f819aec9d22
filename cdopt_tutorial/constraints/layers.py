"""Constraint dissolving for the weights of any layer, as torch's parametrizations."""

import sys
from numbers import Real
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints.dissolved import Dissolved, extend_class
from cdopt_tutorial.constraints.manifolds import Manifold, manifold_of
from cdopt_tutorial.constraints.weights import is_under_fsdp

_Layer = TypeVar("_Layer", bound=nn.Module)


def dissolve(
    module: _Layer,
    name: str = "weight",
    manifold: str = "stiefel",
    penalty_param: float = 0.1,
    *,
    blocks: int = 1,
    transpose: bool = False,
) -> _Layer:
    """Make a layer compute with A(W) in place of its weight, projected to start with.

    ``module.weight`` becomes A(W); the free parameter W, which any optimizer moves, is
    ``module.parametrizations.weight.original``. Assigning a weight projects it, and so
    does ``module.reset_parameters()``; otherwise the layer is as if parametrized by
    torch's ``register_parametrization``. Add :func:`~.measure.penalty` on W to the
    loss, ``penalty_param`` ‖C(W)‖²; the papers' β is twice that. Dissolve a shared
    weight in each of its layers; its penalty counts once.

    A weight may be in shards, see :func:`~.sums.layout`: call ``parallelize_module``
    before, DDP, ``fully_shard`` and ``torch.compile`` after this.

    The manifold is "stiefel" (the short side orthonormal), "oblique" (rows of norm 1)
    or "sphere" (norm 1); for ``blocks`` and ``transpose`` see
    :func:`~.manifolds.manifold_of`. Raises ValueError if there is no such weight, it is
    not finite, already parametrized or under ``fully_shard``, or does not fit the
    manifold; the layer is left unchanged. Source: Xiao, Liu and Toh (2023).
    """
    on = manifold_of(manifold, _free_weight(module, name), blocks, transpose)
    _register(module, {name: on}, penalty_param)
    return module


def dissolve_recurrent(
    rnn: _Layer,
    manifold: str = "stiefel",
    penalty_param: float = 0.1,
    per_gate: bool = True,
) -> _Layer:
    """Dissolve each hidden-to-hidden weight of a recurrent layer or cell of torch.nn.

    See :func:`dissolve`. Each gate's matrix (h, h) is on a manifold of its own; unless
    ``per_gate``, the stack of them, (4h, h) for an LSTM, is on one, as in
    ``LSTM_cdopt``, and no gate is orthogonal. Raises ValueError if there is no such
    weight; then none is dissolved.
    """
    manifolds = {}
    if isinstance(rnn, nn.RNNBase | nn.RNNCellBase):
        for name, weight in _parameters(rnn):
            if name.startswith("weight_hh"):
                gates = len(_free_weight(rnn, name)) // rnn.hidden_size
                blocks = gates if per_gate else 1
                manifolds[name] = manifold_of(manifold, weight, blocks)
    if not manifolds:
        raise ValueError(f"{type(rnn).__name__} has no weight_hh that is still free")
    _register(rnn, manifolds, penalty_param)
    return rnn


def _free_weight(module: nn.Module, name: str) -> nn.Parameter:
    """A layer's weight, or a ValueError if it can't be dissolved."""
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        raise ValueError(f"a {kind} is no layer: give a module of torch.nn")
    if is_under_fsdp(module):
        raise ValueError(f"{kind} is under fully_shard: dissolve before, not after")
    weight = dict(_parameters(module)).get(name)
    if weight is None:
        free = ", ".join(known for known, _ in _parameters(module)) or "none"
        raise ValueError(f"{kind} has no free parameter {name!r}: it has {free}")
    if weight.untyped_storage().nbytes() < weight.nbytes:
        raise ValueError(f"{name!r} of {kind} has elements that share memory")
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
def _register(
    module: nn.Module, manifolds: dict[str, Manifold], penalty_param: float
) -> None:
    """Parametrize weights, each under all names that it has in this module."""
    number = isinstance(penalty_param, Real) and type(penalty_param) is not bool
    if not number or not 0 < penalty_param < sys.float_info.max:
        raise ValueError(
            f"penalty_param is {penalty_param!r}, but must be above 0 and finite"
        )
    # A bag never reads its padding row.
    padding = module.padding_idx if isinstance(module, nn.Embedding) else None
    rules, starts = {}, {}
    for name, manifold in manifolds.items():
        rules[name] = rule = Dissolved(manifold, float(penalty_param), padding)
        called = f"{name!r} of {type(module).__name__}"
        starts[name] = rule.nearest(getattr(module, name), called)
    for name, rule in rules.items():
        if parametrize.is_parametrized(module, name):  # under another name
            continue
        weight = getattr(module, name)
        weight.copy_(starts[name])  # its memory may be shared
        for other, parameter in _parameters(module):
            if parameter is weight:
                # Torch's check of a safe one would compute A(W) once more.
                parametrize.register_parametrization(module, other, rule, unsafe=True)
                extend_class(module, other)
