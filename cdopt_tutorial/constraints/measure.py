"""The penalty, feasibility and projection of models, here and on other workers."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.nn.api.remote_module import RemoteModule

from cdopt_tutorial.calls import gradients
from cdopt_tutorial.calls.references import Reference, apply
from cdopt_tutorial.constraints.dissolved import distances, penalties
from cdopt_tutorial.constraints.manifolds import has_no_data
from cdopt_tutorial.constraints.weights import (
    Constraint,
    constrained,
    joined,
    refuse_others,
)
from cdopt_tutorial.probes import trace

Model = nn.Module | Reference

FAR = 0.4  # of a length from 1: the map brings 0.6 to 1.4 closer, into 0.7 to 1


class Distance(NamedTuple):
    """How far one weight is from its manifold; 0 exactly on it."""

    weight: float  #: ‖C(W)‖, in the Frobenius norm, of the free parameter W
    mapped: float  #: ‖C(A(W))‖ of A(W), with which the layer computes


@dataclass(frozen=True)
class Feasibility:
    """How far the weights of a model are from their manifolds."""

    layers: dict[str, Distance]  #: by the names of the weights

    @property
    def weight(self) -> float:
        """‖C(W)‖ of all weights together: the root of the sum of squares."""
        return math.hypot(*(each.weight for each in self.layers.values()))

    @property
    def mapped(self) -> float:
        """‖C(A(W))‖ of all weights together."""
        return math.hypot(*(each.mapped for each in self.layers.values()))


class Constraints:
    """The constrained weights of models, wherever they live.

    Models are modules, also in DDP, remote modules, or references to modules; give
    every module once, also those that another one refers to. Each call looks the
    weights up, so it computes with those that the models have then. The constructor
    calls each owner once; later calls go only to owners of constrained weights, and
    return numbers instead of weights. With weights in shards, all ranks must make each
    call, and all get the same result.

    Raises ValueError if no weight is constrained, if layers share one that they do not
    constrain alike, or if a layer of CDOpt is another than a linear one with a penalty;
    RuntimeError if a worker can't be reached.
    """

    def __init__(self, *models: Model):
        self._models: dict[str, nn.Module] = {}
        self._elsewhere: dict[str, Reference] = {}
        for number, model in enumerate(models):
            name = str(number) if len(models) > 1 else ""
            if isinstance(model, RemoteModule):
                model = model.get_module_rref()
            if isinstance(model, Reference) and model.is_owner():
                model = model.local_value()
            if isinstance(model, nn.Module):
                self._models[name] = model
            elif not isinstance(model, Reference):
                raise ValueError(f"a {type(model).__name__} is no model: give modules")
            elif apply(model, _is_constrained):
                self._elsewhere[name] = model
        self._here()

    def penalty(self) -> Tensor:
        """Σ penalty_param ‖C(W)‖², a scalar to be added to the loss.

        Inside a context of :mod:`~.gradients`, the graph includes the terms of other
        workers. Under DDP the weights get this gradient outside of DDP's forward pass:
        with activation checkpointing use ``use_reentrant=False`` or
        ``static_graph=True``, and leave out layers that a pass does not use.
        """
        terms = penalties(self._here().values())
        elsewhere = self._elsewhere.values()
        terms += [gradients.call(each, penalty_on_cpu) for each in elsewhere]
        return sum((each.to(terms[0].device) for each in terms[1:]), start=terms[0])

    def with_penalty(self, function: Callable[[], Any]) -> tuple[Any, Tensor]:
        """What a forward pass returns, and the penalty, with one XᵀX for both.

        The function may not run a backward pass, nor move a weight.
        """
        token = distances.set({})
        try:
            return function(), self.penalty()
        finally:
            distances.reset(token)

    @torch.no_grad()
    def feasibility(self) -> Feasibility:
        """Each weight's distance from its manifold, in float64, from its owner.

        Raises ValueError if a layer computes with another function of W than A(W).
        """
        refuse_others(self._models)
        layers = {}
        for name, (weight, rule) in self._here().items():
            # float32 would err by more than the distance that a projection leaves.
            mapped, distance = rule.manifold.map_and_distance(weight.detach().double())
            squares = distance, rule.manifold.distance(mapped)
            layers[name] = Distance(*(square.item() ** 0.5 for square in squares))
        for prefix, reference in self._elsewhere.items():
            for name, distance in apply(reference, feasibility).layers.items():
                layers[joined(prefix, name)] = distance
        return Feasibility(layers)

    @torch.no_grad()
    def project_(self) -> None:
        """Move each weight to the feasible one nearest to A(W), or raise ValueError.

        Warns if W is so far away that its map can't be trusted: a singular value near 0
        stays there, and one above √3 changes its sign. Also raises ValueError where
        :meth:`feasibility` does.
        """
        refuse_others(self._models)
        projected = []
        for name, (weight, rule) in self._here().items():
            mapped, _ = rule.manifold.map_and_distance(weight.detach().double())
            projected.append((weight, rule.nearest(mapped, name)))
            if has_no_data(weight):
                continue
            length = rule.manifold.worst_length(weight)
            if abs(length - 1) > FAR:
                warnings.warn(
                    f"project_ moves {name} far: its singular value or norm "
                    f"{length:.2g} becomes 1",
                    stacklevel=3,
                )
        for weight, nearest in projected:
            weight.copy_(nearest)
        for reference in self._elsewhere.values():
            apply(reference, project_)

    def _here(self) -> dict[str, Constraint]:
        """The constrained weights in this process, as the models now have them."""
        constraints = constrained(self._models)
        if not (constraints or self._elsewhere):
            raise ValueError("no weight of this model is constrained: no penalty")
        return constraints


def penalty(*models: Model) -> Tensor:
    """See :meth:`Constraints.penalty`; a loop should make :class:`Constraints` once."""
    return Constraints(*models).penalty()


def penalty_on_cpu(module: nn.Module) -> Tensor:
    """A module's penalty, computed by its owner; on the CPU, since it is sent."""
    return trace.mark_backward("penalty backward", penalty(module).cpu())


def feasibility(*models: Model) -> Feasibility:
    """How far models are from their manifolds; see :meth:`Constraints.feasibility`."""
    return Constraints(*models).feasibility()


def project_(*models: Model) -> None:
    """Make models exactly feasible; see :meth:`Constraints.project_`."""
    Constraints(*models).project_()


def _is_constrained(module: nn.Module) -> bool:
    return bool(constrained({"": module}))
