"""From a constrained model to a free one's state, and back; in shards, too."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints.layers import Dissolved
from cdopt_tutorial.constraints.surface import Surface, placed


@torch.no_grad()
def free_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of the same model with no layer dissolved: A(W) in place of each W.

    A free model with it computes as this one does. What is a DTensor stays one, placed
    as it was; then all its ranks must call this.
    """
    state, names = model.state_dict(), dict(_names(model))
    free = {}
    for name, value in state.items():
        if name in names:
            name, on = names[name]
            value = on.map_and_distance(value)[0]
        free[name] = value
    return free


@torch.no_grad()
def load_free_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a free model's state: each W becomes the feasible weight nearest to its.

    A weight that is feasible stays as it is. Values may be plain tensors or DTensors,
    placed in any way on the model's mesh; if it has one, all its ranks must call this.
    Raises ValueError if a weight has no nearest feasible one, and RuntimeError, as
    ``load_state_dict`` does, if names or shapes don't fit.
    """
    own, loaded = model.state_dict(), dict(state)
    for name, (free, on) in _names(model):
        if free in loaded:
            value = placed(loaded.pop(free), own[name])
            try:
                loaded[name] = on.nearest(value)
            except (ValueError, torch.linalg.LinAlgError) as error:
                raise ValueError(f"{free}: {error}") from error
    fit = {name: placed(v, own[name]) for name, v in loaded.items() if name in own}
    model.load_state_dict({**loaded, **fit})


def _names(model: nn.Module) -> Iterator[tuple[str, tuple[str, Surface]]]:
    """The names of each W in the state, with those of a free model and manifolds."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        if not parametrize.is_parametrized(module):
            continue
        for name, (rule, *_) in module.parametrizations.items():
            if isinstance(rule, Dissolved):
                held = f"{prefix}.parametrizations.{name}.original".removeprefix(".")
                yield held, (f"{prefix}.{name}".removeprefix("."), rule.surface)
