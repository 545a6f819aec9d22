"""The cost of a training step of a constrained layer, dissolved or by its rivals.

A step of a layer n -> p, in float32 on one thread, clears the gradients, runs forward,
adds the penalty to the loss if there is one, runs backward, and applies SGD. The batch
is small, so that the cost of the constraint shows.
"""

from collections.abc import Callable, Sequence

import geoopt
import torch
from cdopt.manifold_torch import stiefel_torch
from cdopt.nn import Linear_cdopt, get_quad_penalty
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.benchmark import Timer

from cdopt_tutorial import constraints

BATCH_SIZE = 32
PENALTY_PARAM = 0.1
EXACT = ("cayley", "householder", "matrix_exp")  # torch's parametrizations
VARIANTS = ("plain", "fused", "cdopt.nn", "geoopt", *EXACT)


def step_costs(
    widths: Sequence[int], budget: float, device: str = "cpu"
) -> dict[str, list[tuple[int, float]]]:
    """Each variant's step time over the plain layer's, as (width d, ratio).

    The layers have d inputs and d / 2 outputs; each is timed for ``budget`` seconds.
    """
    costs: dict[str, list[tuple[int, float]]] = {name: [] for name in VARIANTS}
    for d in widths:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            steps = {name: make_step(name, d, d // 2, device) for name in VARIANTS}
        seconds = {name: step_seconds(step, budget) for name, step in steps.items()}
        for name in VARIANTS:
            costs[name].append((d, seconds[name] / seconds["plain"]))
    return costs


def step_seconds(step: Callable[[], None], budget: float) -> float:
    """Median seconds of a step on one thread, repeated for ``budget`` seconds."""
    timer = Timer("step()", globals={"step": step}, num_threads=1)
    return timer.blocked_autorange(min_run_time=budget).median


def make_step(variant: str, n: int, p: int, device: str = "cpu") -> Callable[[], None]:
    """One step of a layer of n inputs and p outputs, p at most n."""
    layer = _layer(variant, n, p, device).to(device)
    shapes = (BATCH_SIZE, n), (BATCH_SIZE, p)
    x, target = (torch.randn(shape).to(device) for shape in shapes)
    kind = geoopt.optim.RiemannianSGD if variant == "geoopt" else torch.optim.SGD
    optimizer = kind(layer.parameters(), lr=1e-3)
    dissolved = constraints.Constraints(layer) if variant == "fused" else None

    def loss() -> Tensor:
        return nn.functional.mse_loss(layer(x), target)

    def step() -> None:
        optimizer.zero_grad()
        if dissolved is not None:
            total = torch.add(*dissolved.with_penalty(loss))
        elif variant == "cdopt.nn":
            total = loss() + get_quad_penalty(layer)
        else:
            total = loss()
        total.backward()
        optimizer.step()

    return step


def _layer(variant: str, n: int, p: int, device: str) -> nn.Module:
    if variant == "geoopt":
        return _Transposed(n, p)
    if variant == "cdopt.nn":
        options = {"manifold_class": stiefel_torch, "penalty_param": PENALTY_PARAM}
        return Linear_cdopt(n, p, device=device, dtype=torch.float32, **options)
    layer = nn.Linear(n, p)
    if variant == "fused":
        constraints.dissolve(layer, penalty_param=PENALTY_PARAM)
    if variant in EXACT:
        parametrizations.orthogonal(layer, orthogonal_map=variant)
    return layer


class _Transposed(nn.Linear):
    """A layer with a weight of geoopt's, which must be tall: (n, p)."""

    def __init__(self, n: int, p: int):
        super().__init__(n, p)
        # The default, canonical metric takes four times as long: n x n matrices.
        manifold = geoopt.EuclideanStiefel()
        start = manifold.projx(self.weight.detach().mT)
        self.weight = geoopt.ManifoldParameter(start, manifold=manifold)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.mT, self.bias)
