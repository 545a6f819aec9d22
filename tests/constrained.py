"""Constrained layers that several modules of tests have, and what they do to them."""

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
    """The same for a seed on every worker."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, **F64).requires_grad_(requires_grad)


def move_(model, factor=1.1):
    """Off the manifolds; what is not trained, as CDOpt's constants, stays."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(factor)
    return model
