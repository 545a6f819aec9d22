"""Which weights of a model are constrained, and whether its layers agree on them."""

from collections.abc import Iterator
from typing import TypeGuard, cast

from cdopt import nn as cdopt_nn
from cdopt.manifold_torch import euclidean_torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from cdopt_tutorial.constraints.dissolved import Dissolved
from cdopt_tutorial.constraints.surface import Surface, is_sharded, is_under_fsdp

Constraint = tuple[Tensor, Dissolved]  # W, which an optimizer moves, and its rule


def constrained(models: dict[str, nn.Module]) -> dict[str, Constraint]:
    """The constrained weights of models in this process, by name, each once.

    Weights that ``fully_shard`` has gathered for a pass are sharded again, since only
    the shards last. Raises ValueError if layers share a weight that they do not
    constrain alike, and for a gathered layer without its model.
    """
    constraints: dict[str, Constraint] = {}
    names: dict[int, str] = {}  # by the ids of constrained weights
    free: dict[int, str] = {}
    for start, model in models.items():
        for name, weight, rule in _weights(model):
            name = joined(start, name)
            if rule is None:
                free[id(weight)] = name
                continue
            first = names.setdefault(id(weight), name)
            known = constraints.setdefault(first, (weight, rule))[1]
            if rule.rule != known.rule:
                raise ValueError(
                    f"{name} is the weight of {first}, but its manifold or "
                    "penalty_param is another one"
                )
            if rule.padding is not None:  # the row is 0 for whoever shares the table
                constraints[first] = weight, rule
    for number, name in free.items():
        if number in names:
            raise ValueError(
                f"{name} is the weight of {names[number]}, which is dissolved: "
                "dissolve it in this layer, too"
            )
    return constraints


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
            _check(module, name)
            yield name, module.original, cast(Dissolved, module[0])
        elif isinstance(module, cdopt_nn.Linear_cdopt):
            if not isinstance(module.manifold, euclidean_torch):
                yield joined(name, "weight"), module.weight, _of_cdopt(module)
        elif hasattr(module, "quad_penalty"):
            kind = type(module).__name__
            raise ValueError(f"{kind} is CDOpt's: dissolve a plain layer of torch.nn")
        else:
            for own, parameter in module._parameters.items():
                yield joined(name, own), parameter, None


def _check(weight: ParametrizationList, name: str) -> None:
    """ValueError for what would be another weight than the one that is trained."""
    if hasattr(weight.original, "cut"):
        raise ValueError(
            f"{name} was cut in another layer that shares it: call "
            "map_before_gathering for this one, too"
        )
    if _is_gathered(weight):
        raise ValueError(
            f"{name} is gathered by FSDP: give the model that fully_shard has had, "
            "since FSDP1 is not supported"
        )


def _is_dissolved(module: nn.Module) -> TypeGuard[ParametrizationList]:
    return isinstance(module, ParametrizationList) and isinstance(module[0], Dissolved)


def _is_gathered(module: nn.Module) -> bool:
    whole = _is_dissolved(module) and not is_sharded(module.original)
    return whole and is_under_fsdp(module)


def _of_cdopt(layer: cdopt_nn.Linear_cdopt) -> Dissolved:
    # CDOpt's function for the layer's own penalty does not survive a copy.
    turned = layer.in_features >= layer.out_features
    on = Surface(lambda *_, **__: layer.manifold, transpose=turned)
    return Dissolved(on, layer.penalty_param)


def joined(*names: str) -> str:
    """A dotted name, each part of which may be empty."""
    return ".".join(filter(None, names))
