"""Constrained layers of every kind, and helpers, that several test modules share."""

from functools import partial

import pytest
import torch
from cdopt.manifold_torch import grassmann_torch
from torch import nn
from torch.func import functional_call

from cdopt_tutorial import constraints

F64 = {"dtype": torch.float64}
COLUMNS = {"manifold": "oblique", "transpose": True}
CASES = {  # the layer, its input, how it is dissolved
    "tall": (partial(nn.Linear, 4, 8), (3, 4), {}),
    "wide": (partial(nn.Linear, 8, 4), (3, 8), {}),
    "square": (partial(nn.Linear, 5, 5), (3, 5), {}),
    "heads": (partial(nn.Linear, 4, 12), (3, 4), {"blocks": 3}),
    "short heads": (partial(nn.Linear, 4, 6), (3, 4), {"blocks": 3}),
    "unit rows": (partial(nn.Linear, 8, 4), (3, 8), {"manifold": "oblique"}),
    "unit columns": (partial(nn.Linear, 8, 4), (3, 8), COLUMNS),
    "sphere": (partial(nn.Linear, 8, 4), (3, 8), {"manifold": "sphere"}),
    "CDOpt's": (partial(nn.Linear, 4, 8), (3, 4), {"manifold": grassmann_torch}),
    "conv2d": (partial(nn.Conv2d, 2, 9, 2), (2, 2, 3, 3), {}),
    "depthwise": (partial(nn.Conv2d, 4, 8, 3, groups=4), (2, 4, 5, 5), {}),
    "transposed": (partial(nn.ConvTranspose1d, 4, 3, 2), (2, 4, 3), {}),
    "bilinear": (partial(nn.Bilinear, 4, 4, 5), (3, 4), {}),
    "cell": (partial(nn.GRUCell, 5, 6), (3, 5), {"name": "weight_hh", "blocks": 3}),
    "rnn": (partial(nn.RNN, 5, 6), (4, 3, 5), {"name": "weight_hh_l0"}),
    "lstm": (partial(nn.LSTM, 5, 6), (4, 3, 5), {"name": "weight_hh_l0", "blocks": 4}),
}
PLAIN = {case: make(**F64) for case, (make, *_) in CASES.items()}
RNNS = "rnn", "lstm"  # of which torch has no vmap, nor a second derivative
each_case = pytest.mark.parametrize("case", CASES)
each_rnn = pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])


def build(case, factor=1.05):
    """The layer, off its manifold, and an input."""
    make, shape, options = CASES[case]
    torch.manual_seed(0)
    layer = constraints.dissolve(make(**F64), **options)
    return move_(layer, factor), torch.randn(shape, **F64)


def plain(case):
    return CASES[case][0](**F64)


def name_of(case):
    return CASES[case][2].get("name", "weight")


def key(case):
    """The name of W among the layer's parameters."""
    return f"parametrizations.{name_of(case)}.original"


def w_of(case, layer):
    return free(layer, name_of(case))


def output(layer, x, state=None):
    """Of a layer, if need be with other weights."""
    inputs = (x, x) if isinstance(layer, nn.Bilinear) else (x,)
    result = layer(*inputs) if state is None else functional_call(layer, state, inputs)
    return result[0] if isinstance(result, tuple) else result


def by_formula(case, weight):
    """A(W) and ‖C(W)‖² of a case."""
    options, rows = CASES[case][2], weight.flatten(1)
    if options.get("manifold") in ("oblique", "sphere"):
        axes = (0, 1) if options["manifold"] == "sphere" else 1
        axes = 0 if options.get("transpose") else axes
        squares = rows.square().sum(axes, keepdim=True)
        mapped, off = 2 * rows / (1 + squares), squares - 1
    else:
        x = rows.unflatten(0, (options.get("blocks", 1), -1))
        tall = x.shape[1] >= x.shape[2]
        x = x if tall else x.mT
        gram = x.mT @ x
        mapped, off = 1.5 * x - 0.5 * x @ gram, gram - torch.eye(x.shape[2], **F64)
        mapped = mapped if tall else mapped.mT
    return mapped.reshape(weight.shape), off.square().sum()


def plain_output(case, layer, weight, x):
    """What a plain layer does with A(W), and the layer's other parameters."""
    state = {n: p for n, p in layer.named_parameters() if n != key(case)}
    state[name_of(case)], _ = by_formula(case, weight)
    return output(PLAIN[case], x, state)


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
