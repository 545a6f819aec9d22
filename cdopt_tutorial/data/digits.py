"""Real handwritten digits, which come with scikit-learn: nothing is downloaded."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

LEVELS = 16  # of grey above white, in the original


@dataclass(frozen=True)
class Digits:
    """The 8×8 images of the UCI "Optical Recognition of Handwritten Digits" test set.

    Attributes:
        images: (1797, 64) float64 from 0 to 1, row by row of an image.
        labels: (1797,) int64 from 0 to 9.
    """

    images: Tensor
    labels: Tensor


@cache
def load_digits() -> Digits:
    """The digits, in scikit-learn's order; every call gives the same object."""
    from sklearn import datasets  # takes long to import

    found = datasets.load_digits()
    images = torch.as_tensor(found.data, dtype=torch.float64) / LEVELS
    return Digits(images, torch.as_tensor(found.target, dtype=torch.int64))


def covariance(images: Tensor) -> Tensor:
    """The covariance of the pixels over the images, about their mean.

    Args:
        images: (n, d), n at least 2.

    Returns:
        (d, d), symmetric, divided by n - 1.

    Raises:
        ValueError: there are fewer than two images, or they are not in rows.
    """
    if images.ndim != 2 or len(images) < 2:
        raise ValueError(
            f"images have the shape {tuple(images.shape)}, but must have (n, d) with "
            "n at least 2"
        )
    centred = images - images.mean(dim=0)
    return centred.T @ centred / (len(images) - 1)
