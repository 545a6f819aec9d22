"""Constraint dissolving for the weights of any layer, as torch's parametrizations."""

import sys
from numbers import Real

import torch
from torch import nn
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints.attributes import extend_class
from cdopt_tutorial.constraints.dissolved import Dissolved
from cdopt_tutorial.constraints.surface import (
    Manifold,
    check_finite,
    is_sharded,
    is_under_fsdp,
    surface,
)


def dissolve(
    module: nn.Module,
    name: str = "weight",
    manifold: Manifold = "stiefel",
    penalty_param: float = 0.1,
    *,
    blocks: int = 1,
    transpose: bool | None = None,
) -> nn.Module:
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
    rule = _rule(module, name, manifold, penalty_param, blocks, transpose)
    _register(module, name, rule)
    return module


def dissolve_recurrent(
    rnn: nn.Module,
    manifold: Manifold = "stiefel",
    penalty_param: float = 0.1,
    per_gate: bool = True,
) -> nn.Module:
    """Dissolve each hidden-to-hidden weight of a recurrent layer or cell of torch.nn.

    See :func:`dissolve`. Each gate's matrix (h, h) is on a manifold of its own; unless
    ``per_gate``, the stack of them, (4h, h) for an LSTM, is on one, as in
    ``LSTM_cdopt``, and no gate is orthogonal. Raises ValueError if there is no such
    weight; then none is dissolved.
    """
    kind, size = type(rnn).__name__, getattr(rnn, "hidden_size", None)
    free = _parameters(rnn) if isinstance(rnn, nn.Module) else []
    names = [name for name, w in free if "weight_hh" in name and w.ndim == 2]
    if not names:
        raise ValueError(f"{kind} has no weight_hh that is still free")
    rules = {}
    for name in names:
        rows = len(getattr(rnn, name))
        if per_gate and (not size or rows % size):
            raise ValueError(
                f"{name!r} of {kind} has {rows} rows and hidden_size is {size}: these "
                "are no gates; pass per_gate=False"
            )
        blocks = rows // size if per_gate else 1
        rules[name] = _rule(rnn, name, manifold, penalty_param, blocks, None)
    for name, rule in rules.items():
        if not parametrize.is_parametrized(rnn, name):  # under another name
            _register(rnn, name, rule)
    return rnn


def _rule(
    module: nn.Module,
    name: str,
    manifold: Manifold,
    penalty_param: float,
    blocks: int,
    transpose: bool | None,
) -> Dissolved:
    """The parametrization of a layer's weight; a ValueError if it can't have one."""
    weight = _free_weight(module, name)
    number = isinstance(penalty_param, Real) and type(penalty_param) is not bool
    if not number or not 0 < penalty_param < sys.float_info.max:
        raise ValueError(
            f"penalty_param is {penalty_param!r}, but must be above 0 and finite"
        )
    on = surface(manifold, weight, blocks, transpose)
    # A bag never reads its padding row.
    padding = module.padding_idx if isinstance(module, nn.Embedding) else None
    check_finite(weight, f"{name!r} of {type(module).__name__}: the weight")
    return Dissolved(on, float(penalty_param), padding)


def _free_weight(module: nn.Module, name: str) -> nn.Parameter:
    """A layer's weight, or a ValueError if it can't be dissolved."""
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        raise ValueError(f"a {kind} is no layer: give a module of torch.nn")
    if is_under_fsdp(module):
        raise ValueError(f"{kind} is under fully_shard: dissolve before, not after")
    if isinstance(name, str) and parametrize.is_parametrized(module, name):
        raise ValueError(f"{name!r} of {kind} is parametrized already")
    weight = dict(_parameters(module)).get(name) if isinstance(name, str) else None
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


def _register(module: nn.Module, name: str, rule: Dissolved) -> None:
    """Parametrize a weight, under each name that it has in this module."""
    weight = getattr(module, name)
    kind = parametrize.type_before_parametrizations(module)
    place = None if is_sharded(weight) else weight.detach()
    names = [other for other, value in _parameters(module) if value is weight]
    try:
        for other in names:
            # Torch's check of a safe one would compute A(W) once more.
            parametrize.register_parametrization(module, other, rule, unsafe=True)
    except ValueError as error:
        raise ValueError(f"{name!r} of {kind.__name__}: {error}") from error
    # Keep its memory, which may be shared, and its layout; not if elements overlap.
    if place is not None and place.untyped_storage().nbytes() >= place.nbytes:
        with torch.no_grad():
            weight.set_(place.copy_(weight))
    for other in names:
        extend_class(module, other)
