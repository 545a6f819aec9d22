"""Rivals of dissolving: steps that keep a weight orthonormal, or are orthogonal.

A rule moves X (..., n, p), or (..., p, n) if it is wide, against a direction, by a
learning rate. If a weight is in parts, each rank moves its own, and only p x p sums
cross the wire; each docstring gives their number. A rule yields its part of them, gets
them back complete, and returns the moved part of X: so a step of many weights is still
one all-reduce.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, optim

from cdopt_tutorial.constraints.manifolds import (
    Manifold,
    Stiefel,
    manifold_of,
    squared_distances,
)
from cdopt_tutorial.constraints.measure import Distance, Feasibility
from cdopt_tutorial.constraints.sums import Sums, completed, placed

# What ``sums.completed`` takes.
Part = tuple[Tensor, Sums, tuple[int, ...]]
Rule = Generator[Part, Tensor, Tensor]
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315  # Muon's coefficients, for five steps
# Eigenvalues of a Gram matrix below this share of the largest are float32's noise.
FLOOR = 1e-6
NEAR = 0.1  # of the manifold, in each direction: chapter 3's limit


def nearest(x: Tensor, sums: Sums) -> Tensor:
    """The nearest orthonormal matrix, X (XᵀX)^(-1/2): one sum.

    Singular values below a thousandth of the largest don't come to 1.
    """
    gram = sums.inside(sums.product(x))
    return sums.times(x, _inverse_root(gram))


def _inverse_root(gram: Tensor, other: Tensor | None = None) -> Tensor:
    """(XᵀX)^(-1/2); eigenvalues are taken to be ``FLOOR`` of the largest, or more.

    The largest is that of the other Gram matrix, if there is one.
    """
    values, vectors = torch.linalg.eigh(gram)
    largest = (values if other is None else torch.linalg.eigvalsh(other))[..., -1:]
    values = values.clamp(min=1e-14).maximum(FLOOR * largest)
    return vectors * values.rsqrt()[..., None, :] @ vectors.mT


def projected(x: Tensor, grad: Tensor, sums: Sums, lr: float) -> Rule:
    """A free step, then the nearest orthonormal matrix: one sum.

    Source: Absil and Malick, Projection-like retractions on matrix manifolds (2012).
    """
    x = x - lr * grad
    gram = yield sums.product(x), sums, sums.inner
    return sums.times(x, _inverse_root(gram))


def landing(x: Tensor, grad: Tensor, sums: Sums, lr: float) -> Rule:
    """Along the level set of ‖C‖², and down its gradient (λ = 1): two sums at once.

    The paper's bound on the step is left out. Source: Ablin and Peyré, Fast and
    accurate optimization on the orthogonal manifold without retraction (2022).
    """
    small = [x @ y.mT if sums.wide else x.mT @ y for y in (x, grad)]
    gram, mixed = yield torch.stack(small), sums, sums.inner  # XᵀX and XᵀG
    # The tangent is skew(G Xᵀ) X, for X on or off the manifold.
    if sums.wide and sums.square:  # mixed is G Xᵀ, transposed
        tangent = 0.5 * (mixed.mT - mixed) @ x
    else:
        back = sums.times(x, mixed if sums.wide else mixed.mT)
        tangent = 0.5 * (sums.times(grad, gram) - back)
    return x - lr * (tangent + sums.times(x, Stiefel().from_sum(gram)))


def muon(x: Tensor, grad: Tensor, sums: Sums, lr: float) -> Rule:
    """A step with singular values near 1, by five Newton-Schulz iterations: one sum.

    They need only the Gram matrix. Source: Jordan et al., Muon (2024).
    """
    gram = yield sums.product(grad), sums, sums.inner
    square = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp(min=1e-14)
    factor = eye = torch.eye(gram.shape[-1]).to(gram)
    gram, (a, b, c) = gram / square, NEWTON_SCHULZ
    for _ in range(5):
        step = a * eye + b * gram + c * gram @ gram
        factor, gram = factor @ step, step @ gram @ step
    return x - lr * sums.times(grad, factor / square.sqrt())


def spel(x: Tensor, grad: Tensor, sums: Sums, lr: float) -> Rule:
    """The steepest step in the spectral norm along the manifold: three sums at once.

    The tangent part of G at an orthonormal X is made orthonormal, but for singular
    values below a thousandth of G's; the nearest orthonormal matrix ends the step.
    Source: Yang and Lai, Manifold constrained steepest descent (2026).
    """
    pairs = (x, x), (x, grad), (grad, grad)
    small = [y @ z.mT if sums.wide else y.mT @ z for y, z in pairs]
    # XᵀX, XᵀG and GᵀG
    gram, mixed, square = yield torch.stack(small), sums, sums.inner
    normal = 0.5 * (mixed + mixed.mT)
    tangent = grad - sums.times(x, normal)
    # The Gram matrices of T, the tangent, and of the step's end follow from these.
    across = mixed - gram @ normal  # XᵀT
    inner = square - mixed.mT @ normal - normal @ across  # TᵀT
    root = _inverse_root(inner, square)
    across, inner = across @ root, root @ inner @ root  # of T (TᵀT)^(-1/2)
    end = gram - lr * (across + across.mT) + lr**2 * inner
    return sums.times(x - lr * sums.times(tangent, root), _inverse_root(end))


#: By the names of `cdopt-tutorial shard --optimizer`.
RULES: dict[str, Callable[..., Rule]] = {
    "muon": muon, "projected": projected, "landing": landing, "spel": spel,
}  # fmt: skip
#: Those that hold near the manifold only; the others move any weight.
LOCAL = "landing", "spel"


class Rival(optim.Optimizer):
    """Moves weights, whole or in shards, by one of ``RULES``; all ranks must step.

    Takes parameters or their groups, whose "blocks" is the number of Stiefel matrices
    in each weight (1 by default). Momentum is SGD's, taken of the gradient, so it needs
    no sum; Muon's is Nesterov's, and its steps are scaled to the size of Adam's, like
    torch's ``match_rms_adamw``. Raises ValueError for an unknown rule or setting, a
    number below 0, or a weight that can't be on this manifold, or is far from it and
    moved by a rule of ``LOCAL``.
    """

    def __init__(
        self, rule: str, params: Iterable[Any], lr: float, momentum: float = 0.0
    ):
        settings = {"rule": rule, "blocks": 1, "lr": lr, "momentum": momentum}
        super().__init__(params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add weights, by the defaults where the group has nothing else."""
        group = self.defaults | param_group
        for name in param_group.keys() - {"params", *self.defaults}:
            raise ValueError(f"{name} is no setting of a Rival's group")
        if group["rule"] not in list(RULES):
            known = ", ".join(RULES)
            raise ValueError(f"rule is {group['rule']!r}, but must be one of {known}")
        for name in ("lr", "momentum"):
            if not group[name] >= 0:
                raise ValueError(f"{name} is {group[name]!r}, but must be at least 0")
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1]["params"], group["rule"], group["blocks"])
        except ValueError:
            self.param_groups.pop()
            raise

    # Torch says that a loss is a float.
    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Move each weight that has a gradient; returns the closure's loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.move(
            [
                (weight, self._direction(weight, weight.grad, group), group)
                for group in self.param_groups
                for weight in group["params"]
                if weight.grad is not None
            ]
        )
        return loss

    def move(self, weights: list[tuple[Tensor, Tensor, dict]]) -> None:
        """Move weights by their directions, as their groups say."""
        moves = [moving(*each) for each in weights]
        parts = [next(each) for each in moves]
        for each, total in zip(moves, completed(parts), strict=True):
            finish(each, total)

    def _direction(self, weight: Tensor, grad: Tensor, group: dict) -> Tensor:
        momentum, state = group["momentum"], self.state[weight]
        if not momentum:
            return grad
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(grad))
        buffer.mul_(momentum).add_(grad)
        return grad + momentum * buffer if group["rule"] == "muon" else buffer


def moving(
    weight: Tensor, direction: Tensor, group: dict
) -> Generator[Part, Tensor, None]:
    """Move a weight, or each of its blocks; yields its part of a sum."""
    rule, lr = RULES[group["rule"]], group["lr"]
    if group["rule"] == "muon":
        rows, columns = len(weight) // group["blocks"], weight.shape[1:].numel()
        lr *= 0.2 * max(rows, columns) ** 0.5
    manifold = manifold_of("stiefel", weight, group["blocks"])
    # In half precision the step is computed in float32.
    x, sums, shape, placements = manifold.part_of(weight)
    moved = yield from rule(x, manifold.part_of(direction)[0], sums, lr)
    weight.copy_(placed(moved.reshape(shape), weight, placements))


def finish(move: Generator[Part, Tensor, None], total: Tensor) -> None:
    """Move the weight of :func:`moving`, given the sum."""
    with suppress(StopIteration):
        move.send(total)


@torch.no_grad()
def _check(weights: Sequence[Tensor], rule: str, blocks: int) -> None:
    """Raise ValueError if a rule can't move one of these, or not from where it is."""
    manifolds = [manifold_of("stiefel", weight, blocks) for weight in weights]
    if rule not in LOCAL:
        return
    pairs = zip(manifolds, (weight.double() for weight in weights), strict=True)
    for weight, square in zip(weights, squared_distances(pairs), strict=True):
        p = min(len(weight) // blocks, weight.shape[1:].numel())
        if square.item() > NEAR**2 * blocks * p:
            raise ValueError(
                f"{rule} needs a start near the manifold, such as "
                "manifold_of('stiefel', weight).nearest(weight)"
            )


@torch.no_grad()
def feasibility(weights: Mapping[str, tuple[Tensor, Manifold]]) -> Feasibility:
    """How far weights that no map corrects are from orthonormal."""
    layers = {}
    for name, (weight, manifold) in weights.items():
        off = manifold.distance(weight.detach().double()).item() ** 0.5
        layers[name] = Distance(off, off)
    return Feasibility(layers)
