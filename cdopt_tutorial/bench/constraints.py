"""What a step of a constrained layer costs, by constraint dissolving and its peers.

A step is that of training a layer d -> d/2: clear the gradients, forward on a batch of
32, a loss, the penalty where there is one, backward, SGD. The batch is small, so that
the constraint shows: with more rows all variants come nearer to the plain layer. All
in float32, on one thread.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import geoopt
import torch
from cdopt.manifold_torch import stiefel_torch
from cdopt.nn import Linear_cdopt, get_quad_penalty
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from cdopt_tutorial import constraints
from cdopt_tutorial.bench.rows import Row, interleave, one_thread, rows

WIDTHS = (64, 128, 256, 512, 1024)
BATCH_SIZE = 32
PENALTY_PARAM = 0.1
LR = 1e-3
TURNS = 7
WARM_UP = 2  # steps that do not count: buffers are made, pages touched
MIN_STEPS, MAX_STEPS = 2, 200
BUDGET = 0.3  # seconds of a variant's turn, but never less than MIN_STEPS
BASELINE = "plain"
COMPARED = ("cdopt.nn", "geoopt")  # with "fused", beside the plain layer

Step = Callable[[], None]
Times = dict[int, dict[str, dict[str, list[float]]]]  # by width, variant and figure


def measure(
    progress: Callable[[str], None], smoke: bool = False
) -> tuple[list[Row], dict]:
    """Time the step of every variant at every width.

    Args:
        progress: called with a line before each measurement.
        smoke: one turn at the smallest width.

    Returns:
        The rows, each over the plain layer of its width, and more: every single value,
        and the median step of "fused" over that of the variants of its kind.
    """
    widths, turns = (WIDTHS[:1], 1) if smoke else (WIDTHS, TURNS)
    values = _step_times(widths, turns, BUDGET, progress)
    measured: list[Row] = []
    for d, of in values.items():
        named = {f"{name}, d={d}": found for name, found in of.items()}
        measured += rows(named, {"step": "s"}, f"{BASELINE}, d={d}")
    over = {name: _ratios(values, "fused", name) for name in COMPARED}
    fused_over = {name: {d // 2: r for d, r in each} for name, each in over.items()}
    return measured, {"fused over": fused_over, "values": values}


def step_costs(
    widths: Sequence[int] = WIDTHS, turns: int = 3, budget: float = BUDGET
) -> dict[str, list[tuple[int, float]]]:
    """Each variant's median step over the plain layer's, at each width.

    Args:
        widths: d, even.
        turns: of each variant, at each width.
        budget: seconds of a turn, but it has two steps at least.

    Returns:
        By variant: (width, ratio) for each width. The plain layer's is 1.

    Raises:
        ValueError: a width is not even and at least 2.
    """
    values = _step_times(widths, turns, budget, lambda line: None)
    return {name: _ratios(values, name, BASELINE) for name in VARIANTS}


def _step_times(
    widths: Sequence[int], turns: int, budget: float, progress: Callable[[str], None]
) -> Times:
    """Seconds of a step, a median for each turn; the variants take turns."""
    for d in widths:
        if d < 2 or d % 2:
            raise ValueError(f"width is {d}, but must be even and at least 2")
    with one_thread(), torch.random.fork_rng():
        torch.manual_seed(0)
        return {
            d: interleave(
                {name: _timer(make(d), budget) for name, make in VARIANTS.items()},
                range(1, turns + 1),
                lambda line, d=d: progress(f"d={d}: {line}"),
            )
            for d in widths
        }


def _timer(step: Step, budget: float) -> Callable[[int], dict[str, float]]:
    """Times a turn: as many steps as fit the budget, within their bounds."""

    def turn(_: int) -> dict[str, float]:
        begun = time.perf_counter()
        for _ in range(WARM_UP):
            step()
            if time.perf_counter() - begun > budget:
                break  # what takes so long is not warmer for more
        seconds: list[float] = []
        while len(seconds) < MIN_STEPS or (
            len(seconds) < MAX_STEPS and sum(seconds) < budget
        ):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        return {"step": statistics.median(seconds)}

    return turn


def _ratios(values: Times, name: str, other: str) -> list[tuple[int, float]]:
    """The median step of a variant over another's, at each width."""
    median = {
        (d, variant): statistics.median(of[variant]["step"])
        for d, of in values.items()
        for variant in (name, other)
    }
    return [(d, median[d, name] / median[d, other]) for d in values]


def _fused(d: int) -> Step:
    layer = constraints.dissolve(nn.Linear(d, d // 2), penalty_param=PENALTY_PARAM)
    return _step(layer, d, constraints.Constraints(layer).penalty)


def _cdopt(d: int) -> Step:
    options = {"manifold_class": stiefel_torch, "penalty_param": PENALTY_PARAM}
    layer = Linear_cdopt(d, d // 2, dtype=torch.float32, **options)
    return _step(layer, d, lambda: get_quad_penalty(layer))


class _Transposed(nn.Module):
    """A layer whose weight is geoopt's, which must be tall: (d, d/2)."""

    def __init__(self, d: int):
        super().__init__()
        manifold = geoopt.Stiefel()
        start = manifold.projx(torch.randn(d, d // 2))
        self.weight = geoopt.ManifoldParameter(start, manifold=manifold)
        self.bias = nn.Parameter(torch.zeros(d // 2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.mT, self.bias)


def _geoopt(d: int) -> Step:
    return _step(_Transposed(d), d, optimizer=geoopt.optim.RiemannianSGD)


def _orthogonal(kind: str, d: int) -> Step:
    layer = nn.Linear(d, d // 2)
    return _step(parametrizations.orthogonal(layer, orthogonal_map=kind), d)


VARIANTS: dict[str, Callable[[int], Step]] = {
    BASELINE: lambda d: _step(nn.Linear(d, d // 2), d),
    "fused": _fused,
    "cdopt.nn": _cdopt,
    "geoopt": _geoopt,
    "cayley": partial(_orthogonal, "cayley"),
    "householder": partial(_orthogonal, "householder"),
    "matrix_exp": partial(_orthogonal, "matrix_exp"),
}


def _step(
    layer: nn.Module,
    d: int,
    penalty: Callable[[], Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> Step:
    """One step of training; the target is random, for what it is takes no time."""
    x, target = torch.randn(BATCH_SIZE, d), torch.randn(BATCH_SIZE, d // 2)
    moves = optimizer(layer.parameters(), lr=LR)

    def step() -> None:
        moves.zero_grad()
        loss = nn.functional.mse_loss(layer(x), target)
        if penalty is not None:
            loss = loss + penalty()
        loss.backward()
        moves.step()

    return step
