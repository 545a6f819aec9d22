"""Which weights of a model are constrained, and whether its layers agree on them."""

from collections.abc import Iterator
from typing import Any, TypeGuard, cast

from cdopt import nn as cdopt_nn
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from cdopt_tutorial.constraints.dissolved import Dissolved, Gathered
from cdopt_tutorial.constraints.manifolds import MANIFOLDS, manifold_of
from cdopt_tutorial.constraints.sums import is_sharded

Constraint = tuple[Tensor, Dissolved]  # W, which an optimizer moves, and its rule


def constrained(models: dict[str, nn.Module]) -> dict[str, Constraint]:
    """The constrained weights of models in this process, by name, each once.

    Weights that ``fully_shard`` has gathered for a pass are sharded again, since only
    the shards last. Raises ValueError if layers share a weight that they do not
    constrain alike, and for a gathered layer without its model.
    """
    constraints: dict[str, Constraint] = {}
    seen: dict[int, tuple[str, Any]] = {}  # first name and kind, by the weight's id
    for start, model in models.items():
        for name, weight, rule in _weights(model):
            name, kind = joined(start, name), None
            if rule is not None:
                kind = rule.manifold, rule.penalty_param
            first, known = seen.setdefault(id(weight), (name, kind))
            if kind != known:
                raise ValueError(
                    f"{name} is the weight of {first}: dissolve it in both layers, "
                    "with the same manifold and penalty_param"
                )
            # A row is 0 for whoever shares the table.
            if rule and (first not in constraints or rule.padding is not None):
                constraints[first] = weight, rule
    return constraints


def refuse_others(models: dict[str, nn.Module]) -> None:
    """Raise ValueError if a layer computes with another function of W than A(W)."""
    for start, model in models.items():
        for name, module in model.named_modules():
            if not _is_dissolved(module):
                continue
            if not isinstance(module[-1], Dissolved | Gathered):
                name = joined(start, name).replace("parametrizations.", "")
                raise ValueError(
                    f"{name} has another parametrization after the dissolved one: "
                    "remove it to measure or to project A(W)"
                )


def joined(*names: str) -> str:
    """A dotted name, each part of which may be empty."""
    return ".".join(filter(None, names))


def is_under_fsdp(module: nn.Module) -> bool:
    """Whether ``fully_shard`` manages a module's parameters."""
    return getattr(module, "_is_fsdp_managed_module", False)


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor, Dissolved | None]]:
    """A model's parameters, by name and with their rules, unless they are free."""
    modules = dict(model.named_modules())
    if any(map(_is_gathered, modules.values())):
        for module in modules.values():
            if hasattr(module, "reshard"):
                module.reshard()
    for name, module in modules.items():
        if _is_dissolved(module):
            name = f".{name}".replace(".parametrizations.", ".").strip(".")
            if hasattr(module.original, "cut"):
                raise ValueError(
                    f"{name} was cut in another layer that shares it: call "
                    "map_before_gathering for this one, too"
                )
            if _is_gathered(module):
                raise ValueError(
                    f"{name} is gathered by FSDP: give the model that fully_shard has "
                    "had, since FSDP1 is not supported"
                )
            yield name, module.original, cast(Dissolved, module[0])
        elif hasattr(module, "quad_penalty"):
            rule = _of_cdopt(module)
            yield joined(name, "weight"), cast(Tensor, module.weight), rule
        else:
            for parameter_name, parameter in module._parameters.items():
                yield joined(name, parameter_name), parameter, None


def _is_dissolved(module: nn.Module) -> TypeGuard[ParametrizationList]:
    return isinstance(module, ParametrizationList) and isinstance(module[0], Dissolved)


def _is_gathered(module: nn.Module) -> bool:
    whole = _is_dissolved(module) and not is_sharded(module.original)
    return whole and is_under_fsdp(module)


def _of_cdopt(layer: Any) -> Dissolved:
    """The rule of CDOpt's linear layer, whose own penalty does not survive a copy."""
    name = type(getattr(layer, "manifold", None)).__name__.removesuffix("_torch")
    if name not in MANIFOLDS or not isinstance(layer, cdopt_nn.Linear_cdopt):
        kind = type(layer).__name__
        raise ValueError(f"{kind} is CDOpt's: dissolve a plain layer of torch.nn")
    if not layer.penalty_param > 0:
        raise ValueError(f"penalty_param is {layer.penalty_param}: no penalty")
    turned = name == "oblique" and layer.in_features >= layer.out_features
    manifold = manifold_of(name, layer.weight, transpose=turned)
    return Dissolved(manifold, layer.penalty_param)
