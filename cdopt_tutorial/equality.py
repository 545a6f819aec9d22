"""Whether two runs agree: the one comparison that all systems use."""

import math
from collections.abc import Mapping

from torch import Tensor


def max_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference between tensors of the same names; infinite for NaN.

    Raises ValueError if names or shapes differ.
    """
    shapes, others = ({n: tuple(t.shape) for n, t in x.items()} for x in (one, other))
    if shapes != others:
        raise ValueError(f"{shapes} can't be compared with {others}")
    gaps = (one[name] - other[name] for name in one)
    largest = [gap.abs().max().item() for gap in gaps if gap.numel()]
    return max((math.inf if math.isnan(gap) else gap for gap in largest), default=0.0)
