"""Constrained layers of every kind, and helpers, that several test modules share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cdopt.manifold_torch
import pytest
import torch
from torch import nn
from torch.func import functional_call

from cdopt_tutorial import constraints

F64 = {"dtype": torch.float64}
ROWS, SPHERE = {"manifold": "oblique"}, {"manifold": "sphere"}


@dataclass
class Case:
    """A layer, the shape of an input, and how it is dissolved."""

    make: Callable[..., nn.Module]
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.sample = self.plain()

    @property
    def name(self):
        return self.options.get("name", "weight")

    @property
    def key(self):
        """The name of W among the layer's parameters."""
        return f"parametrizations.{self.name}.original"

    def plain(self):
        return self.make(**F64)

    def dissolve(self, layer):
        return constraints.dissolve(layer, **self.options)

    def build(self, factor=1.05):
        """The layer, off its manifold by a factor, and an input."""
        torch.manual_seed(0)
        layer = move_(self.dissolve(self.plain()), factor)
        return layer, torch.randn(self.shape, **F64)

    def w(self, layer):
        return free(layer, self.name)

    def formula(self, weight):
        """A(W) and ‖C(W)‖² by CDOpt, whose Stiefel manifold has orthonormal columns."""
        manifold = self.options.get("manifold", "stiefel")
        blocks, squares = [], 0.0
        for block in weight.flatten(1).chunk(self.options.get("blocks", 1)):
            is_wide = manifold == "stiefel" and block.shape[0] < block.shape[1]
            turned = is_wide or self.options.get("transpose", False)
            x = block.mT if turned else block
            on = getattr(cdopt.manifold_torch, f"{manifold}_torch")(x.shape, **F64)
            blocks.append(on.A(x).mT if turned else on.A(x))
            squares = squares + on.C(x).square().sum()
        return torch.cat(blocks).reshape(weight.shape), squares

    def plain_output(self, layer, weight, x):
        """What a plain layer does with A(W), and the layer's other parameters."""
        state = {n: p for n, p in layer.named_parameters() if n != self.key}
        state[self.name], _ = self.formula(weight)
        return output(self.sample, x, state)


CASES = {
    "tall": Case(partial(nn.Linear, 4, 8), (3, 4)),
    "wide": Case(partial(nn.Linear, 8, 4), (3, 8)),
    "square": Case(partial(nn.Linear, 5, 5), (3, 5)),
    "heads": Case(partial(nn.Linear, 4, 12), (3, 4), {"blocks": 3}),
    "short heads": Case(partial(nn.Linear, 4, 6), (3, 4), {"blocks": 3}),
    "unit rows": Case(partial(nn.Linear, 8, 4), (3, 8), ROWS),
    "unit columns": Case(partial(nn.Linear, 8, 4), (3, 8), ROWS | {"transpose": True}),
    "sphere": Case(partial(nn.Linear, 8, 4), (3, 8), SPHERE),
    "spheres": Case(partial(nn.Linear, 8, 4), (3, 8), SPHERE | {"blocks": 2}),
    "conv2d": Case(partial(nn.Conv2d, 2, 9, 2), (2, 2, 3, 3)),
    "depthwise": Case(partial(nn.Conv2d, 4, 8, 3, groups=4), (2, 4, 5, 5)),
    "transposed": Case(partial(nn.ConvTranspose1d, 4, 3, 2), (2, 4, 3)),
    "bilinear": Case(partial(nn.Bilinear, 4, 4, 5), (3, 4)),
    "cell": Case(partial(nn.GRUCell, 5, 6), (3, 5), {"name": "weight_hh", "blocks": 3}),
    "rnn": Case(partial(nn.RNN, 5, 6), (4, 3, 5), {"name": "weight_hh_l0"}),
    "lstm": Case(
        partial(nn.LSTM, 5, 6), (4, 3, 5), {"name": "weight_hh_l0", "blocks": 4}
    ),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def output(layer, x, state=None):
    """Of a layer, if need be with other weights."""
    inputs = (x, x) if isinstance(layer, nn.Bilinear) else (x,)
    result = layer(*inputs) if state is None else functional_call(layer, state, inputs)
    return result[0] if isinstance(result, tuple) else result


def dissolved(inputs=8, outputs=4, **options):
    return constraints.dissolve(nn.Linear(inputs, outputs, **F64), **options)


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


def near(one, other, tol=1e-11):
    torch.testing.assert_close(one, other, rtol=tol, atol=tol)
