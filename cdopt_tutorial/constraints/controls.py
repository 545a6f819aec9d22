"""Other ways than dissolving to treat a weight, with which a study compares it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from cdopt_tutorial.constraints.surface import surface

# What starts only, what keeps the constraint, and what keeps a bound.
CONTROLS = (
    "orthogonal start", "torch's orthogonal", "projected", "same norm", "spectral norm",
)  # fmt: skip


def treat(
    way: str, module: nn.Module, name: str = "weight", blocks: int = 1
) -> Callable[[], None]:
    """Have a layer's weight begin as a control wants it, and be kept so.

    "same norm" keeps the Frobenius norm that each block of rows would have if it were
    orthonormal, "spectral norm" a largest singular value of about 1, of all blocks
    together; the others begin at the nearest orthonormal blocks. Returned is what to
    call after each step.
    """
    weight = getattr(module, name)
    on = surface("stiefel", weight, blocks)
    if way == "same norm":
        norm = math.sqrt(min(weight.unflatten(0, (blocks, -1)).shape[-2:]))
        rule = SameNorm(blocks, norm)
        parametrize.register_parametrization(module, name, rule)
    elif way == "spectral norm":
        parametrizations.spectral_norm(module, name)
    else:
        start = on.nearest(weight)
        setattr(module, name, nn.Parameter(start))
        if way == "torch's orthogonal":
            _parametrize(module, name, start.unflatten(0, (blocks, -1)))

    @torch.no_grad()
    def project() -> None:
        weight = getattr(module, name)
        weight.copy_(on.nearest(weight))

    return project if way == "projected" else lambda: None


class SameNorm(nn.Module):
    """Scales each of a weight's blocks of rows to one Frobenius norm."""

    def __init__(self, blocks: int, norm: float):
        super().__init__()
        self.blocks, self.norm = blocks, norm

    def forward(self, weight: Tensor) -> Tensor:
        """The weight, scaled."""
        parts = weight.unflatten(0, (self.blocks, -1))
        norms = parts.square().sum((1, 2), keepdim=True).sqrt()
        return (self.norm / norms * parts).flatten(0, 1)


def _parametrize(module: nn.Module, name: str, start: Tensor) -> None:
    """Apply torch's orthogonal parametrization to each of a weight's blocks of rows."""
    setattr(module, name, nn.Parameter(start))
    parametrizations.orthogonal(module, name, orthogonal_map="cayley")
    setattr(module, name, start)  # completed anew, at random: so are stored results
    rows = nn.Flatten(0, 1)  # unsafe, as torch says, for it changes the shape
    parametrize.register_parametrization(module, name, rows, unsafe=True)
