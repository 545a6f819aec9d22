"""CDOpt's manifolds of plain weights: the map, the constraint, the nearest point."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cdopt.manifold_torch import stiefel_torch
from torch import Tensor

from cdopt_tutorial.constraints.fused import stiefel_map


@dataclass(frozen=True)
class PlainSurface:
    """The manifold of a whole weight; its axes after the second count as columns."""

    make: Callable[..., Any]  #: CDOpt's class of the manifold
    blocks: int  #: into how many equal blocks the rows are split, each on its own
    transpose: bool  #: whether CDOpt's X is the transpose of the weight, or of a block

    def map_and_distance(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A(W), shaped as the weight, and ‖C(W)‖², a scalar."""
        if self.make is not stiefel_torch:
            mapped = self._of(weight).A(self._point(weight))
            return self._weight(mapped, weight), self.distance(weight)
        # The fused map makes the short side orthonormal: nothing needs turning.
        mapped, distance = stiefel_map(self._blocks(weight))
        return mapped.reshape(weight.shape), distance

    def distance(self, weight: Tensor) -> Tensor:
        """‖C(W)‖², a scalar."""
        if torch.compiler.is_compiling() and self.make is stiefel_torch:
            return self.map_and_distance(weight)[1]  # whose sums are found to be known
        return self._of(weight).C(self._point(weight)).square().sum()

    def nearest(self, weight: Tensor) -> Tensor:
        """The feasible weight that CDOpt's ``Post_process`` finds; see `feasible`."""
        exact = weight.double()  # a decomposition in float32 is off by many roundings
        point = self._of(exact).Post_process(self._point(exact))
        found = self._weight(point, weight).contiguous()
        return feasible(found, self.distance).to(weight.dtype)

    def _blocks(self, weight: Tensor) -> Tensor:
        matrix = weight.flatten(1) if weight.ndim > 2 else weight
        return matrix.unflatten(0, (self.blocks, -1)) if self.blocks > 1 else matrix

    def _point(self, weight: Tensor) -> Tensor:
        """CDOpt's X: the weight in blocks, turned where that is asked for."""
        blocks = self._blocks(weight)
        return blocks.mT if self.transpose else blocks

    def _weight(self, point: Tensor, like: Tensor) -> Tensor:
        """The weight of an X."""
        return (point.mT if self.transpose else point).reshape(like.shape)

    def _of(self, weight: Tensor) -> Any:
        """CDOpt's manifold, which keeps constants of one shape, dtype and device."""
        shape = tuple(self._point(weight).shape)
        return self.make(shape, device=weight.device, dtype=weight.dtype)


def feasible(found: Tensor, distance: Callable[[Tensor], Tensor]) -> Tensor:
    """What a projection found; ValueError if not feasible, as where CDOpt has none."""
    left = distance(found).sqrt().item()
    # Some ulps for each element; NaN is not below it either.
    if not left <= 100 * torch.finfo(found.dtype).eps * math.sqrt(found.numel()):
        what = f"no projection of a weight of shape {tuple(found.shape)}"
        raise ValueError(f"{what} onto this manifold: ‖C‖ is {left:.1e} after it")
    return found
