"""What a step of a constrained layer costs, by constraint dissolving and its peers.

A step is that of training a layer d -> d/2, in float32, on one thread: clear the
gradients, forward, a loss, the penalty where there is one, backward, SGD. The batch is
small, so that the constraint shows.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import geoopt
import torch
from cdopt.manifold_torch import stiefel_torch
from cdopt.nn import Linear_cdopt, get_quad_penalty
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.benchmark import Timer

from cdopt_tutorial import constraints
from cdopt_tutorial.bench.rows import Measured, Progress, Values, interleave, rows

WIDTHS = (64, 128, 256, 512, 1024)
BATCH_SIZE = 32
PENALTY_PARAM = 0.1
TURNS = 7
BUDGET = 0.3  # seconds of a variant's turn
BASELINE = "plain"
EXACT = ("cayley", "householder", "matrix_exp")  # torch's parametrizations
VARIANTS = (BASELINE, "fused", "cdopt.nn", "geoopt", *EXACT)
COMPARED = ("cdopt.nn", "geoopt")  # with "fused", beside the plain layer

Step = Callable[[], None]
Ratios = list[tuple[int, float]]  # with the width before
Penalty = Callable[[], Tensor]


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Time all variants; "fused over" has the step of "fused" over others', by d/2."""
    widths, turns = (WIDTHS[:1], 1) if smoke else (WIDTHS, TURNS)
    values = _step_times(widths, turns, BUDGET, progress, device)
    measured = []
    for d, of in values.items():
        named = {f"{name}, d={d}": found for name, found in of.items()}
        measured += rows(named, {"step": "s"}, f"{BASELINE}, d={d}")
    over = {name: _ratios(values, "fused", name) for name in COMPARED}
    fused_over = {name: {d // 2: r for d, r in each} for name, each in over.items()}
    return measured, {"fused over": fused_over, "values": values}


def step_costs(
    widths: Sequence[int], turns: int, budget: float, device: str = "cpu"
) -> dict[str, Ratios]:
    """Each variant's median step over the plain layer's, as (width d, ratio).

    A turn has a budget of seconds. A width not even and at least 2 is a ValueError.
    """
    values = _step_times(widths, turns, budget, lambda line: None, device)
    return {name: _ratios(values, name, BASELINE) for name in VARIANTS}


def _step_times(
    widths: Sequence[int],
    turns: int,
    budget: float,
    progress: Progress,
    device: str,
) -> dict[int, Values]:
    """Seconds of a step, by width: a median for each turn of each variant."""
    for d in widths:
        if d < 2 or d % 2:
            raise ValueError(f"width is {d}, but must be even and at least 2")
    values = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for d in widths:
            steps = {name: make_step(name, d, device) for name in VARIANTS}
            values[d] = interleave(
                {name: partial(_time, step, budget) for name, step in steps.items()},
                range(1, turns + 1),
                lambda line, d=d: progress(f"d={d}: {line}"),
            )
    return values


def _time(step: Step, budget: float, _: int) -> dict[str, float]:
    timer = Timer("step()", globals={"step": step}, num_threads=1)
    return {"step": timer.blocked_autorange(min_run_time=budget).median}


def _ratios(values: dict[int, Values], name: str, other: str) -> Ratios:
    """The median step of a variant over another's, at each width."""
    ratios = []
    for d, of in values.items():
        own, others = (statistics.median(of[each]["step"]) for each in (name, other))
        ratios.append((d, own / others))
    return ratios


def make_step(variant: str, d: int, device: str = "cpu") -> Step:
    """One step of training; the target is random, for what it is takes no time."""
    layer, penalty, optimizer = _layer(variant, d, device)
    x, target = torch.randn(BATCH_SIZE, d), torch.randn(BATCH_SIZE, d // 2)
    x, target = x.to(device), target.to(device)
    moves = optimizer(layer.parameters(), lr=1e-3)

    def step() -> None:
        moves.zero_grad()
        loss = nn.functional.mse_loss(layer(x), target)
        if penalty is not None:
            loss = loss + penalty()
        loss.backward()
        moves.step()

    return step


def _layer(variant: str, d: int, device: str) -> tuple[nn.Module, Penalty | None, type]:
    """A variant's layer, its penalty if it has one, and its kind of optimizer."""
    if variant == "geoopt":
        return _Transposed(d).to(device), None, geoopt.optim.RiemannianSGD
    if variant == "cdopt.nn":
        options = {"manifold_class": stiefel_torch, "penalty_param": PENALTY_PARAM}
        options |= {"dtype": torch.float32, "device": torch.device(device)}
        layer = Linear_cdopt(d, d // 2, **options)
        return layer, partial(get_quad_penalty, layer), torch.optim.SGD
    layer = nn.Linear(d, d // 2)
    if variant == "fused":
        layer = constraints.dissolve(layer, penalty_param=PENALTY_PARAM).to(device)
        return layer, constraints.Constraints(layer).penalty, torch.optim.SGD
    if variant in EXACT:
        layer = parametrizations.orthogonal(layer, orthogonal_map=variant)
    return layer.to(device), None, torch.optim.SGD


class _Transposed(nn.Module):
    """A layer whose weight is geoopt's, which must be tall: (d, d/2)."""

    def __init__(self, d: int):
        super().__init__()
        # Not the default, canonical metric: its n x n matrices take four times as long.
        manifold = geoopt.EuclideanStiefel()
        start = manifold.projx(torch.randn(d, d // 2))
        self.weight = geoopt.ManifoldParameter(start, manifold=manifold)
        self.bias = nn.Parameter(torch.zeros(d // 2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.mT, self.bias)
