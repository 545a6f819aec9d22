"""Which weights of a model are constrained, and whether its layers agree on them."""

from collections.abc import Iterator

from cdopt import nn as cdopt_nn
from cdopt.manifold_torch import euclidean_torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from cdopt_tutorial.constraints.dissolved import Dissolved
from cdopt_tutorial.constraints.surface import Surface, is_sharded, is_under_fsdp

Constraint = tuple[Tensor, Dissolved]  # W, which an optimizer moves, and its rule


def constrained(models: dict[str, nn.Module]) -> dict[str, Constraint]:
    """The constrained weights of several models, by name, each once.

    Raises ValueError if layers share a weight that they do not constrain alike.
    """
    found, names = {}, {}
    for prefix, model in models.items():
        for name, (weight, rule) in constraints_of(model).items():
            name = joined(prefix, name)
            first = names.setdefault(id(weight), name)
            known = found.setdefault(first, (weight, rule))[1]
            if rule.rule != known.rule:
                raise ValueError(
                    f"{name} is the weight of {first}, but its manifold or "
                    "penalty_param is another one"
                )
            if rule.padding is not None:  # the row is 0 for whoever shares the table
                found[first] = weight, rule
    return found


def constraints_of(model: nn.Module) -> dict[str, Constraint]:
    """The constrained weights of a model in this process, by name.

    Weights that ``fully_shard`` has gathered for a pass are sharded again, since only
    the shards last. Raises ValueError for a gathered layer without its model.
    """
    found = dict(_constraints(model))
    if any(map(_is_gathered, found.values())):
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        found = dict(_constraints(model))
    for name, constraint in found.items():
        if _is_gathered(constraint):
            raise ValueError(
                f"{name} is gathered by FSDP: give the model that fully_shard has had, "
                "since FSDP1 is not supported"
            )
    return found


def check_sharing(models: dict[str, nn.Module]) -> None:
    """ValueError if a constrained weight is free in another layer that shares it."""
    known = {id(weight): name for name, (weight, _) in constrained(models).items()}
    for start, model in models.items():
        for prefix, module in model.named_modules():
            for own, weight in _free(module):
                if id(weight) in known:
                    raise ValueError(
                        f"{joined(start, prefix, own)} is the weight of "
                        f"{known[id(weight)]}, which is dissolved: dissolve it in this "
                        "layer, too"
                    )


def _free(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters, unless they are constrained."""
    if isinstance(module, cdopt_nn.Linear_cdopt) or _is_dissolved(module):
        return
    if hasattr(module, "quad_penalty"):
        kind = type(module).__name__
        raise ValueError(f"{kind} is CDOpt's: dissolve a plain layer of torch.nn")
    yield from module.named_parameters("", False, False)


def _constraints(model: nn.Module) -> Iterator[tuple[str, Constraint]]:
    for name, module in model.named_modules():
        if _is_dissolved(module):
            name = f".{name}".replace(".parametrizations.", ".").strip(".")
            if hasattr(module.original, "cut"):
                raise ValueError(
                    f"{name} was cut in another layer that shares it: call "
                    "map_before_gathering for this one, too"
                )
            yield name, (module.original, module[0])
        elif isinstance(module, cdopt_nn.Linear_cdopt):
            if not isinstance(module.manifold, euclidean_torch):
                yield joined(name, "weight"), (module.weight, _of_cdopt(module))


def _is_dissolved(module: nn.Module) -> bool:
    return isinstance(module, ParametrizationList) and isinstance(module[0], Dissolved)


def _of_cdopt(layer: cdopt_nn.Linear_cdopt) -> Dissolved:
    # CDOpt's function for the layer's own penalty does not survive a copy.
    turned = layer.in_features >= layer.out_features
    on = Surface(lambda *_, **__: layer.manifold, blocks=1, transpose=turned)
    return Dissolved(on, layer.penalty_param)


def _is_gathered(constraint: Constraint) -> bool:
    weight, rule = constraint
    return is_under_fsdp(rule) and not is_sharded(weight)


def joined(*names: str) -> str:
    """A dotted name, each part of which may be empty."""
    return ".".join(filter(None, names))
