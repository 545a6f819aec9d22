"""Penalty, feasibility and projection of models, here and on other workers."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdopt_tutorial.constraints.find import (
    Constraint,
    constraints_of,
    joined,
    references_of,
)
from cdopt_tutorial.engines import gradients
from cdopt_tutorial.engines.reference import Reference, apply, is_reference

Model = nn.Module | Reference


class Distance(NamedTuple):
    """How far one weight is from its manifold."""

    weight: float  #: ‖C(W)‖ of the free parameter W, Frobenius norm
    mapped: float  #: ‖C(A(W))‖ of A(W), with which the layer computes


@dataclass(frozen=True)
class Feasibility:
    """How far the weights of a model are from their manifolds."""

    layers: dict[str, Distance]  #: each weight's distances, by its name

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

    Models are modules, DDP or not, or references to modules; what a module refers to is
    followed, too. Other workers are asked once, when this is made; after that only
    those are asked that have constrained weights. Numbers travel, not weights.

    Raises:
        ValueError: no weight is constrained, or a module on another worker holds
            references of its own.
        RuntimeError: a worker that owns a part can't be reached.
    """

    def __init__(self, *models: Model):
        self._here: dict[str, Constraint] = {}
        self._elsewhere: dict[str, Reference] = {}
        self._asked: set = set()  # the modules that were met, by owner and id
        for number, model in enumerate(models):
            self._add(str(number) if len(models) > 1 else "", model)
        if not (self._here or self._elsewhere):
            raise ValueError(
                "no weight of this model is constrained: its penalty would be 0"
            )

    def penalty(self) -> Tensor:
        """Σ penalty_param ‖C(W)‖², a scalar to be added to the loss.

        Inside a context of :mod:`~cdopt_tutorial.engines.gradients`, the terms of other
        workers are part of the graph. Raises ValueError if a ``penalty_param`` is 0, as
        CDOpt's default is.
        """
        terms = [_term(name, each) for name, each in self._here.items()]
        terms += [gradients.call(ref, _penalty) for ref in self._elsewhere.values()]
        return sum((term.to(terms[0]) for term in terms[1:]), start=terms[0])

    @torch.no_grad()
    def feasibility(self) -> Feasibility:
        """Each weight's distance from its manifold."""
        layers = {name: _distance(each) for name, each in self._here.items()}
        for prefix, reference in self._elsewhere.items():
            for name, distance in apply(reference, _feasibility).items():
                layers[joined(prefix, name)] = distance
        return Feasibility(layers)

    @torch.no_grad()
    def project_(self) -> None:
        """Move each weight to its manifold: to the feasible weight nearest to A(W).

        Raises ValueError if CDOpt has no projection for a manifold.
        """
        found = [(e.weight, _nearest(name, e)) for name, e in self._here.items()]
        for weight, value in found:
            weight.copy_(value)
        for reference in self._elsewhere.values():
            apply(reference, _project_all)

    def _add(self, name: str, model: Model) -> None:
        """Take a model's own constraints, and go after its references."""
        if is_reference(model):
            self._ask(name, model)
            return
        if ("", id(model)) in self._asked:  # a module may refer to itself
            return
        self._asked.add(("", id(model)))
        for own, constraint in constraints_of(model).items():
            if all(constraint.weight is not e.weight for e in self._here.values()):
                self._here[joined(name, own)] = constraint
        for own, reference in references_of(model).items():
            self._ask(joined(name, own), reference)

    def _ask(self, name: str, reference: Reference) -> None:
        """Find out what is behind a reference, unless that is known already."""
        if reference.is_owner():
            value = reference.local_value()
            if isinstance(value, nn.Module):
                self._add(name, value)
            return
        owner = reference.owner_name()
        try:
            number, is_constrained, refers = apply(reference, _look)
        except RuntimeError as error:
            raise RuntimeError(f"{name or 'a module'} on {owner}: {error}") from error
        if refers:
            raise ValueError(
                f"{name or 'a module'} on {owner} refers to modules elsewhere: name "
                "these references, too, or their constraints would count 0"
            )
        if (owner, number) not in self._asked and is_constrained:
            self._elsewhere[name] = reference
        self._asked.add((owner, number))


def penalty(*models: Model) -> Tensor:
    """See :meth:`Constraints.penalty`; a loop makes :class:`Constraints` only once."""
    return Constraints(*models).penalty()


def feasibility(*models: Model) -> Feasibility:
    """How far the weights of models, or of references, are from their manifolds.

    Computed in float64 by the worker that owns a weight; 0 exactly on the manifold.
    """
    return Constraints(*models).feasibility()


def project_(*models: Model) -> None:
    """Make models exactly feasible; see :meth:`Constraints.project_`."""
    Constraints(*models).project_()


def _term(name: str, constraint: Constraint) -> Tensor:
    if not constraint.penalty_param > 0:
        raise ValueError(
            f"the penalty_param of {name} is {constraint.penalty_param}: its penalty "
            "would be 0, whatever its weight"
        )
    return constraint.penalty_param * constraint.distance()


def _distance(constraint: Constraint) -> Distance:
    # A sum of squares in float32 would be off by more than a projection leaves.
    weight = constraint.weight.detach().double()
    mapped, distance = constraint.surface.map_and_distance(weight)
    squares = distance, constraint.surface.distance(mapped)
    return Distance(*(square.item() ** 0.5 for square in squares))


def _nearest(name: str, constraint: Constraint) -> Tensor:
    on, weight = constraint.surface, constraint.weight.detach().double()
    try:
        return on.nearest(on.map_and_distance(weight)[0])
    except (ValueError, torch.linalg.LinAlgError) as error:
        raise ValueError(f"{name}: {error}") from error


def _look(value: Any) -> tuple[int, bool, bool]:
    """Which object, whether it is constrained, and refers on; runs on its owner."""
    if not isinstance(value, nn.Module):
        return id(value), False, False
    return id(value), bool(constraints_of(value)), bool(references_of(value))


def _penalty(module: nn.Module) -> Tensor:
    return Constraints(module).penalty()


def _feasibility(module: nn.Module) -> dict[str, Distance]:
    return Constraints(module).feasibility().layers


def _project_all(module: nn.Module) -> None:
    Constraints(module).project_()
