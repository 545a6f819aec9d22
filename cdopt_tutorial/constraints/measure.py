"""The penalty, feasibility and projection of models, here and on other workers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from cdopt import nn as cdopt_nn
from cdopt.manifold_torch import euclidean_torch
from torch import Tensor, nn
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from cdopt_tutorial.constraints.layers import Dissolved, is_under_fsdp
from cdopt_tutorial.constraints.surface import Surface, is_sharded
from cdopt_tutorial.engines.probes import trace
from cdopt_tutorial.engines.seam import gradients
from cdopt_tutorial.engines.seam.reference import Reference, apply

Model = nn.Module | Reference
Constraint = tuple[Tensor, Dissolved]  # W, which an optimizer moves, and its rule


def constraints_of(model: nn.Module) -> dict[str, Constraint]:
    """The constrained weights in this process, by name.

    Weights that ``fully_shard`` has gathered for a pass are sharded again, since only
    the shards last. Raises ValueError for a gathered layer without its model.
    """
    found = {}
    for prefix, module in model.named_modules():
        if is_under_fsdp(module) and hasattr(module, "reshard"):
            module.reshard()
        for name, (weight, rule) in _of_layer(module):
            if is_under_fsdp(module) and not is_sharded(weight):
                kind = type(module).__name__
                raise ValueError(f"{kind} is gathered: give the model that is sharded")
            found[_joined(prefix, name)] = weight, rule
    return found


def _joined(prefix: str, name: str) -> str:
    """A dotted name, either part of which may be empty."""
    return f"{prefix}.{name}".strip(".")


def _of_layer(module: nn.Module) -> Iterator[tuple[str, Constraint]]:
    if parametrize.is_parametrized(module):
        for name, listed in module.parametrizations.items():
            if isinstance(listed[0], Dissolved):
                yield name, (listed.original, listed[0])
    free = isinstance(getattr(module, "manifold", None), euclidean_torch)
    if hasattr(module, "quad_penalty") and not free:
        if not isinstance(module, cdopt_nn.Linear_cdopt):
            kind = type(module).__name__
            raise ValueError(f"{kind} is CDOpt's: dissolve a plain layer of torch.nn")
        # The function for its own penalty does not survive a copy.
        turned = module.in_features >= module.out_features
        on = Surface(lambda *_, **__: module.manifold, blocks=1, transpose=turned)
        yield "weight", (module.weight, Dissolved(on, module.penalty_param))


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

    Models are modules, also in DDP, remote modules, or references to modules; pass
    every module, also those that another one refers to. The constructor calls each
    owner once; later calls go only to owners of constrained weights, and return numbers
    instead of weights. With weights in shards, all ranks must make each call, and all
    get the same result.

    Raises ValueError if no weight is constrained, or if a module has a reference to a
    constrained one that is missing here; RuntimeError if a worker can't be reached.
    """

    def __init__(self, *models: Model):
        self._here: dict[str, Constraint] = {}
        self._elsewhere: dict[str, Reference] = {}
        self._known: set[tuple[str, int]] = set()  # weights, by owner and id
        referred = []
        for number, model in enumerate(models):
            referred += self._add(str(number) if len(models) > 1 else "", model)
        for name, reference in referred:
            if _owned(reference) - self._known:
                raise ValueError(f"{name} refers to a constrained module: give it, too")
        if not (self._here or self._elsewhere):
            raise ValueError("no weight of this model is constrained: no penalty")

    def penalty(self) -> Tensor:
        """Σ penalty_param ‖C(W)‖², a scalar to be added to the loss.

        Inside a context of :mod:`~.gradients`, the graph includes the terms of other
        workers. Raises ValueError if a ``penalty_param`` is 0, as by CDOpt's default.
        """
        terms = [_term(name, each) for name, each in self._here.items()]
        elsewhere = self._elsewhere.values()
        terms += [gradients.call(each, penalty_on_cpu) for each in elsewhere]
        return sum((term.to(terms[0]) for term in terms[1:]), start=terms[0])

    @torch.no_grad()
    def feasibility(self) -> Feasibility:
        """Each weight's distance from its manifold, in float64, from its owner."""
        layers = {}
        for name, (weight, rule) in self._here.items():
            # float32 would err by more than the distance that a projection leaves.
            mapped, distance = rule.surface.map_and_distance(weight.detach().double())
            squares = distance, rule.surface.distance(mapped)
            layers[name] = Distance(*(square.item() ** 0.5 for square in squares))
        for prefix, reference in self._elsewhere.items():
            for name, distance in apply(reference, feasibility).layers.items():
                layers[_joined(prefix, name)] = distance
        return Feasibility(layers)

    @torch.no_grad()
    def project_(self) -> None:
        """Move each weight to the feasible one nearest to A(W), or raise ValueError."""
        found = {}
        for name, (weight, rule) in self._here.items():
            try:
                mapped, _ = rule.surface.map_and_distance(weight.detach().double())
                found[name] = rule.surface.nearest(mapped)
            except (ValueError, torch.linalg.LinAlgError) as error:
                raise ValueError(f"{name}: {error}") from error
        for name, value in found.items():
            self._here[name][0].copy_(value)
        for reference in self._elsewhere.values():
            apply(reference, project_)

    def _add(self, name: str, model: Model) -> list[tuple[str, Reference]]:
        """Add a model's new constraints; returns its references, with their names."""
        if isinstance(model, RemoteModule):
            model = model.get_module_rref()
        if isinstance(model, Reference):
            if not model.is_owner():
                if new := _owned(model) - self._known:
                    self._known |= new
                    self._elsewhere[name] = model
                return []
            model = model.local_value()
        for own, (weight, rule) in constraints_of(model).items():
            if ("", id(weight)) not in self._known:
                self._known.add(("", id(weight)))
                self._here[_joined(name, own)] = weight, rule
        return [
            (_joined(_joined(name, prefix), own), each)
            for prefix, module in model.named_modules()
            for own, value in vars(module).items()
            for each in tree_leaves(value)  # also in lists and dicts
            if isinstance(each, Reference)
        ]


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


def _term(name: str, constraint: Constraint) -> Tensor:
    weight, rule = constraint
    if not rule.penalty_param > 0:
        given = f"the penalty_param of {name} is {rule.penalty_param}"
        raise ValueError(f"{given}: its penalty would be 0, whatever its weight")
    return rule.penalty_param * rule.distance(weight)


def _owned(reference: Reference) -> set[tuple[str, int]]:
    """The constrained weights behind a reference, by owner and id."""
    owner = "" if reference.is_owner() else reference.owner_name()
    return {(owner, number) for number in apply(reference, _ids)}


def _ids(value: Any) -> list[int]:
    """The ids of an object's constrained weights, none unless it is a module."""
    found = constraints_of(value) if isinstance(value, nn.Module) else {}
    return [id(weight) for weight, _ in found.values()]
