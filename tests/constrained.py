"""Constrained layers, and helpers, that several test modules share."""

import torch
from torch import nn

from cdopt_tutorial import constraints

F64 = {"dtype": torch.float64}


def dissolved(inputs=8, outputs=4, **options):
    return constraints.dissolve(nn.Linear(inputs, outputs, **F64), **options)


def lstm(**options):
    return constraints.dissolve_recurrent(nn.LSTM(5, 6, **options, **F64))


def free(layer, name="weight"):
    """The weight that an optimizer moves."""
    return layer.parametrizations[name].original


def drawn(shape, seed, requires_grad=False):
    """Random numbers that depend only on the seed, on every worker."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, **F64).requires_grad_(requires_grad)


def move_(model, factor=1.1):
    """Scale what is trained, off the manifolds, but not CDOpt's constants."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(factor)
    return model
