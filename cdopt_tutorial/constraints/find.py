"""Find a model's constrained weights: dissolved ones, and those of ``cdopt.nn``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.rpc as rpc
from cdopt import nn as cdopt_nn
from cdopt.manifold_torch import euclidean_torch
from torch import Tensor, nn
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints.layers import Dissolved
from cdopt_tutorial.constraints.surface import feasible
from cdopt_tutorial.engines import reference
from cdopt_tutorial.engines.remote import LocalRef

# rpc.remote gives no rpc.RRef, but its base.
Reference = rpc.PyRRef | LocalRef | reference.LocalRef | reference.Ref


@dataclass(frozen=True)
class Constraint:
    """One weight on a manifold.

    Attributes:
        weight: W, what an optimizer moves.
        penalty_param: factor of ‖C(W)‖² in the penalty.
        distance: gives ‖C(W)‖², a scalar with a graph.
        map_and_distance: gives A(V), with which the layer would compute, and ‖C(V)‖²
            for a V.
        distance_of: gives ‖C(V)‖² for a V.
        nearest: gives the feasible weight near a V.
    """

    weight: Tensor
    penalty_param: float
    distance: Callable[[], Tensor]
    map_and_distance: Callable[[Tensor], tuple[Tensor, Tensor]]
    distance_of: Callable[[Tensor], Tensor]
    nearest: Callable[[Tensor], Tensor]


def constraints_of(model: nn.Module) -> dict[str, Constraint]:
    """The constrained weights in this process, by the names of their weights.

    Raises:
        ValueError: a layer has a penalty of a kind that is not known.
    """
    return {
        joined(prefix, name): constraint
        for prefix, module in _modules("", model)
        for name, constraint in _of_layer(module)
    }


def references_of(model: nn.Module) -> dict[str, Reference]:
    """The references to modules elsewhere that a model holds, by name.

    Each is an attribute, or in a list, tuple or dict that is one.
    """
    found: dict[str, Reference] = {}
    for prefix, module in _modules("", model):
        if isinstance(module, RemoteModule):
            found[prefix] = module.get_module_rref()
            continue
        for name, value in vars(module).items():
            for own, one in _each(value).items():
                if isinstance(one, Reference):
                    found[joined(joined(prefix, name), own)] = one
    return found


def joined(prefix: str, name: str) -> str:
    """A name inside a module of that name, either of which may be empty."""
    return f"{prefix}.{name}".strip(".")


def _modules(prefix: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``named_modules``, which remote ones refuse: they are given, not entered."""
    yield prefix, model
    if not isinstance(model, RemoteModule):
        for name, child in model.named_children():
            yield from _modules(joined(prefix, name), child)


def _each(value: Any) -> dict[str, Any]:
    """What an attribute holds, by its key or place; itself by the empty name."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {str(key): one for key, one in value.items()}
    return {"": value}


def _of_layer(module: nn.Module) -> Iterator[tuple[str, Constraint]]:
    if isinstance(module, RemoteModule):
        return
    if parametrize.is_parametrized(module):
        for name, listed in module.parametrizations.items():
            if isinstance(listed[0], Dissolved):
                yield name, _dissolved(listed[0], listed.original)
    free = isinstance(getattr(module, "manifold", None), euclidean_torch)
    if hasattr(module, "quad_penalty") and not free:
        yield from _of_cdopt(module)


def _dissolved(rule: Dissolved, weight: Tensor) -> Constraint:
    on = rule.surface
    return Constraint(
        weight,
        rule.penalty_param,
        lambda: rule.distance(weight),
        on.map_and_distance,
        on.distance,
        on.nearest,
    )


def _of_cdopt(module: nn.Module) -> Iterator[tuple[str, Constraint]]:
    """The weights of a layer of CDOpt, with its manifold.

    Its own ``quad_penalty`` and ``feasibility`` are closures: those of a copy measure
    the original.
    """
    if isinstance(module, cdopt_nn.RNNBase_cdopt):
        for index in module.cdopt_weight_hh_index:
            name, weight = (
                module._flat_weights_names[index],
                module._flat_weights[index],
            )
            yield name, _by_cdopt(module, weight)
    elif hasattr(module, "weight_hh"):
        yield "weight_hh", _by_cdopt(module, module.weight_hh)
    elif hasattr(module, "original"):  # of set_constraint_dissolving
        yield "original", _by_cdopt(module, module.original)
    elif hasattr(module, "manifold") and hasattr(module, "weight"):
        yield "weight", _by_cdopt(module, module.weight)
    else:
        kind = type(module).__name__
        raise ValueError(f"{kind} has a quad_penalty, but no weight that is known")


def _by_cdopt(module: nn.Module, weight: Tensor) -> Constraint:
    manifold, (to_point, to_weight) = module.manifold, _turns(module)
    uses_map = getattr(module, "forward_with_A", True)

    def map_and_distance(value: Tensor) -> tuple[Tensor, Tensor]:
        mapped = to_weight(manifold.A(to_point(value))) if uses_map else value
        return mapped, distance_of(value)

    def distance_of(value: Tensor) -> Tensor:
        return manifold.C(to_point(value)).square().sum()

    return Constraint(
        weight,
        module.penalty_param,
        lambda: distance_of(weight),
        map_and_distance,
        distance_of,
        lambda value: feasible(
            to_weight(manifold.Post_process(to_point(value))), distance_of
        ),
    )


def _turns(module: nn.Module) -> tuple[Callable, Callable]:
    """From a layer's weight to CDOpt's X, and back."""
    if hasattr(module, "weight_to_var"):
        return module.weight_to_var, module.var_to_weight
    if isinstance(module, cdopt_nn.Linear_cdopt):
        if module.in_features >= module.out_features:
            return torch.t, torch.t
    return _same, _same


def _same(value: Any) -> Any:
    return value
