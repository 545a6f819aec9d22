"""Digits that a network certifies: no small change makes it take them for others."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Generator, Tensor, nn, optim
from torch.nn import functional

from cdopt_tutorial.constraints.manifolds import Stiefel
from cdopt_tutorial.data.bags import load_digits
from cdopt_tutorial.study import stored

SIZES, BATCH_SIZE = (64, 64, 64, 64, 10), 64

Digits = tuple[Tensor, Tensor]  # images (n, 64) float64, 0 to 1, and labels (n,) int64


def hold_out(digits: Digits, number: int, seed: int) -> tuple[Digits, Digits]:
    """The digits without some, and these, drawn with a seed."""
    images, labels = digits
    order = torch.randperm(len(labels), generator=Generator().manual_seed(seed))
    held, kept = order[:number], order[number:]
    return (images[kept], labels[kept]), (images[held], labels[held])


def split() -> tuple[Digits, Digits]:
    """1,300 digits to learn from, and 497 for the test."""
    return hold_out(load_digits(), 497, seed=0)


def network(seed: int) -> list[nn.Linear]:
    """Layers of ``SIZES`` without biases, with orthogonal weights in float64."""
    layers = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for inputs, outputs in pairwise(SIZES):
            layer = nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)
            nn.init.orthogonal_(layer.weight)
            layers.append(layer)
    return layers


def scores(weights: Sequence[Tensor], images: Tensor) -> Tensor:
    """Scores z (n, 10) of images (n, 64).

    Between the layers is MaxMin, which sorts pairs and so is 1-Lipschitz.
    """
    *inner, last = weights
    for weight in inner:
        pairs = functional.linear(images, weight).unflatten(-1, (-1, 2))
        images = torch.cat((pairs.amax(-1), pairs.amin(-1)), dim=-1)
    return functional.linear(images, last)


def train(
    layers: Sequence[nn.Linear],
    digits: Digits,
    optimizer: optim.Optimizer,
    scale: float,
    seed: int,
    steps: int = 400,
    penalty: Callable[[], Tensor | float] = lambda: 0.0,
    after_step: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """Train layers of a network, parametrized or not; returns their last weights.

    The loss is the cross-entropy of ``scale`` times the scores, plus the penalty; the
    optimizer's rate falls linearly to 0. The seed is of the batches.
    """
    (images, labels), order = digits, Generator().manual_seed(seed)
    rate = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        batch = torch.randint(len(labels), (BATCH_SIZE,), generator=order)
        outputs = scale * scores([layer.weight for layer in layers], images[batch])
        loss = functional.cross_entropy(outputs, labels[batch]) + penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        after_step()
    # In training mode torch would estimate a spectral norm once more.
    return [layer.eval().weight.detach() for layer in layers]


def projected(weights: Sequence[Tensor]) -> list[Tensor]:
    """The nearest orthonormal weights; ValueError if one is not finite."""
    return [Stiefel().nearest(weight) for weight in weights]


def radii(weights: Sequence[Tensor], digits: Digits) -> Tensor:
    """Each digit's certified radius (n,), negative if it is taken for another.

    A change δ of an image changes z_y − z_j by at most ‖δ‖ times ‖w_y − w_j‖, of rows
    of the last weight, times the largest singular values of the weights before it.
    """
    (images, labels), (*inner, last) = digits, weights
    lipschitz = math.prod(torch.linalg.svdvals(weight)[0].item() for weight in inner)
    z, y = scores(weights, images), labels[:, None]
    apart = (last[y] - last).norm(dim=-1)  # (n, 10)
    return ((z.gather(1, y) - z) / (lipschitz * apart)).scatter(1, y, math.inf).amin(1)


def withstands(
    weights: Sequence[Tensor], digits: Digits, radius: float, steps: int = 50
) -> Tensor:
    """Which digits (n,) bool an attack never makes the network take for others.

    Projected gradient descent on the lead over the strongest other class, at most
    ``radius`` away; pixels may leave 0 to 1. Source: Madry et al. (2018).
    """
    images, labels = digits
    shift, right = torch.zeros_like(images), torch.ones_like(labels, dtype=torch.bool)
    for _ in range(steps + 1):
        shift.requires_grad_()
        z, y = scores(weights, images + shift), labels[:, None]
        lead = (z.gather(1, y) - z.scatter(1, y, -math.inf)).amin(1)
        right &= lead > 0
        (slope,) = torch.autograd.grad(lead.sum(), shift)
        step = functional.normalize(slope) * 2.5 * radius / steps
        shift = (shift - step).detach().renorm(2, 0, radius)
    return right


def stored_runs(way: str, name: str = "certified") -> Tensor:
    """Percentages of the test's digits in a way's stored runs: (5, radii), or (5,)."""
    runs = stored("dissolving/certificate.json")["runs"]
    each = [run[name] for run in runs if run["way"] == way]
    return torch.tensor(each, dtype=torch.float64)
