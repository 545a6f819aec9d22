"""Find a model's constrained weights: dissolved ones, and those of ``cdopt.nn``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from cdopt import nn as cdopt_nn
from cdopt.manifold_torch import euclidean_torch
from torch import Tensor, nn
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints.layers import Dissolved
from cdopt_tutorial.constraints.surface import Surface, feasible
from cdopt_tutorial.engines.reference import Reference, is_reference


@dataclass(frozen=True)
class Constraint:
    """One weight on a manifold."""

    weight: Tensor  #: W, what an optimizer moves
    penalty_param: float  #: factor of ‖C(W)‖² in the penalty
    surface: "Surface | CdoptSurface"  #: the manifold
    distance: Callable[[], Tensor]  #: gives ‖C(W)‖², a scalar with a graph


@dataclass(frozen=True)
class CdoptSurface:
    """The manifold of a layer of CDOpt; see :class:`Surface` for the methods.

    The layer's own ``quad_penalty`` is a closure: that of a copy measures the original.
    """

    module: nn.Module

    def map_and_distance(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A(W), or W where the layer computes without the map, and ‖C(W)‖²."""
        mapped = weight
        if getattr(self.module, "forward_with_A", True):
            to_point, to_weight = self._turns()
            mapped = to_weight(self.module.manifold.A(to_point(weight)))
        return mapped, self.distance(weight)

    def distance(self, weight: Tensor) -> Tensor:
        """‖C(W)‖², a scalar."""
        to_point, _ = self._turns()
        return self.module.manifold.C(to_point(weight)).square().sum()

    def nearest(self, weight: Tensor) -> Tensor:
        """The feasible weight that CDOpt's ``Post_process`` finds."""
        to_point, to_weight = self._turns()
        found = self.module.manifold.Post_process(to_point(weight))
        return feasible(to_weight(found), self.distance)

    def _turns(self) -> tuple[Callable, Callable]:
        """From the layer's weight to CDOpt's X, and back."""
        module = self.module
        if hasattr(module, "weight_to_var"):
            return module.weight_to_var, module.var_to_weight
        wide = isinstance(module, cdopt_nn.Linear_cdopt) and (
            module.in_features >= module.out_features
        )
        return (torch.t, torch.t) if wide else (_same, _same)


def _same(value: Any) -> Any:
    return value


def constraints_of(model: nn.Module) -> dict[str, Constraint]:
    """The constrained weights in this process, by the names of their weights.

    Raises ValueError for a layer whose penalty is of a kind that is not known.
    """
    return {
        joined(prefix, name): constraint
        for prefix, module in _modules("", model)
        for name, constraint in _of_layer(module)
    }


def references_of(model: nn.Module) -> dict[str, Reference]:
    """The references in a model's attributes, or in lists and dicts there, by name."""
    found: dict[str, Reference] = {}
    for prefix, module in _modules("", model):
        if isinstance(module, RemoteModule):
            found[prefix] = module.get_module_rref()
            continue
        for name, value in vars(module).items():
            for own, one in _each(value).items():
                if is_reference(one):
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
    return Constraint(
        weight, rule.penalty_param, rule.surface, lambda: rule.distance(weight)
    )


def _of_cdopt(module: nn.Module) -> Iterator[tuple[str, Constraint]]:
    """The weights of a layer of CDOpt, with its manifold."""
    on = CdoptSurface(module)
    for name, weight in _weights(module):
        distance = partial(on.distance, weight)
        yield name, Constraint(weight, module.penalty_param, on, distance)


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The names and values of the weights that CDOpt constrains in a layer."""
    if isinstance(module, cdopt_nn.RNNBase_cdopt):
        for index in module.cdopt_weight_hh_index:
            yield module._flat_weights_names[index], module._flat_weights[index]
        return
    # Of cells; of set_constraint_dissolving; of all others.
    for name in ("weight_hh", "original", "weight"):
        if hasattr(module, name) and hasattr(module, "manifold"):
            yield name, getattr(module, name)
            return
    kind = type(module).__name__
    raise ValueError(f"{kind} has a quad_penalty, but no weight that is known")
