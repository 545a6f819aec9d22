"""A layer with its penalty by torch.compile, against the same without it.

A step is forward, loss, penalty and backward, in float32, on one thread.
"""

import shutil
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from cdopt_tutorial import constraints
from cdopt_tutorial.bench.constraints import BATCH_SIZE, PENALTY_PARAM
from cdopt_tutorial.bench.rows import Measured, Progress, compare

WIDTH, SMOKE_WIDTH = 512, 64
TURNS = 9
BUDGET = 0.5  # seconds of a turn of one way
BASELINE = "eager"

Step = Callable[[], None]


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Time both ways in turns; in a smoke run, or without g++, nothing is fused."""
    fuses = not smoke and shutil.which("g++") is not None
    backend = "inductor" if fuses else "aot_eager"
    d, turns, budget = (SMOKE_WIDTH, 1, 1e-3) if smoke else (WIDTH, TURNS, BUDGET)
    steps = make_steps(d, backend, device)
    timed = {
        f"{name}, d={d}": partial(_time, step, budget) for name, step in steps.items()
    }
    units = {"step": "s"}
    return compare(timed, range(1, turns + 1), progress, units, f"{BASELINE}, d={d}")


def make_steps(d: int, backend: str, device: str = "cpu") -> dict[str, Step]:
    """A step of a layer d -> d/2 each way; the first compiled one compiles."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = constraints.dissolve(nn.Linear(d, d // 2), penalty_param=PENALTY_PARAM)
        x, target = torch.randn(BATCH_SIZE, d), torch.randn(BATCH_SIZE, d // 2)
    layer, x, target = layer.to(device), x.to(device), target.to(device)
    penalty = constraints.Constraints(layer).penalty

    def loss() -> Tensor:
        return nn.functional.mse_loss(layer(x), target) + penalty()

    def step(loss: Callable[[], Tensor]) -> None:
        layer.zero_grad()
        loss().backward()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    ways = {BASELINE: loss, f"compiled by {backend}": compiled}
    return {name: partial(step, way) for name, way in ways.items()}


def _time(step: Step, budget: float, turn: int) -> dict[str, float]:
    if turn == 1:
        step()  # which compiles
    timer = Timer("step()", globals={"step": step}, num_threads=1)
    return {"step": timer.blocked_autorange(min_run_time=budget).median}
