"""Alternatives to dissolving a weight, for a study to compare it with."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from cdopt_tutorial.constraints.manifolds import manifold_of
from cdopt_tutorial.dissolving.memory import SameNorm

# First those that only start on the manifold or stay on it, then bounds on the norm.
CONTROLS = (
    "orthogonal start", "torch's orthogonal", "projected", "same norm", "spectral norm",
)  # fmt: skip


def treat(
    way: str, module: nn.Module, name: str = "weight", blocks: int = 1
) -> Callable[[], None]:
    """Start a layer's weight as a control does; returns what to call after each step.

    "same norm" fixes the Frobenius norm of each block of rows to that of orthonormal
    rows or columns, "spectral norm" keeps the largest singular value of the whole
    weight near 1; the others start at the nearest orthonormal blocks.
    """
    weight = getattr(module, name)
    if way not in CONTROLS or weight.ndim != 2:
        raise ValueError(f"{way!r} of a weight of {weight.ndim} axes is no control")
    manifold = manifold_of("stiefel", weight, blocks)
    if way == "same norm":
        parametrize.register_parametrization(module, name, SameNorm(blocks))
    elif way == "spectral norm":
        parametrizations.spectral_norm(module, name)
    elif way == "torch's orthogonal":
        _parametrize(module, name, manifold.nearest(weight).unflatten(0, (blocks, -1)))
    else:
        setattr(module, name, nn.Parameter(manifold.nearest(weight)))

    @torch.no_grad()
    def project() -> None:
        weight = getattr(module, name)
        weight.copy_(manifold.nearest(weight))

    return project if way == "projected" else lambda: None


def _parametrize(module: nn.Module, name: str, start: Tensor) -> None:
    """Apply torch's orthogonal parametrization to each block of a weight's rows."""
    setattr(module, name, nn.Parameter(start))
    parametrizations.orthogonal(module, name, orthogonal_map="cayley")
    setattr(module, name, start)  # completed at random once more, as in stored results
    rows = nn.Flatten(0, 1)  # "unsafe" in torch's sense, since the shape changes
    parametrize.register_parametrization(module, name, rows, unsafe=True)
