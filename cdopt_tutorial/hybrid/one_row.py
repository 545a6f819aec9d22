"""Chapter 5's two kinds of updates, in a case that can be computed by hand.

All images use one row of the table, a number r, and there are two classes, whose scores
are r + b₀ and b₁. All three numbers are 0, so r and b₀ have the same gradient: -½ from
an image with label 0, and ½ from one with label 1.
"""

from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple


class Moves(NamedTuple):
    """How far a step with learning rate 1 moves r and b₀."""

    row: float
    bias: float


def moves(labels: Sequence[int], shares: Sequence[int]) -> dict[str, Moves]:
    """The moves of one process with all images, and of trainers who share them out.

    `labels` are 0 or 1, and `shares` how many of them each trainer has, in order. The
    original's trainers each take the mean over their own images; DDP averages their
    gradients, and the table adds them. Exact trainers scale a sum instead, and the
    table's sum is divided. Raises ValueError if the shares do not add up.
    """
    if sum(shares) != len(labels) or min(shares) < 1:
        raise ValueError(f"shares are {list(shares)}, but must add up to {len(labels)}")
    each = [0.5 if label == 0 else -0.5 for label in labels]
    ends = [sum(shares[: k + 1]) for k in range(len(shares))]
    own = [each[end - share : end] for share, end in zip(shares, ends, strict=True)]
    means = [mean(part) for part in own]
    scaled = [len(shares) / len(labels) * sum(part) for part in own]
    return {
        "one process": Moves(mean(each), mean(each)),
        "original": Moves(sum(means), mean(means)),
        "exact": Moves(sum(scaled) / len(shares), mean(scaled)),
    }
