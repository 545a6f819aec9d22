"""A layer with its penalty by torch.compile, against the same without it.

A step is forward, loss, penalty and backward, in float32, on one thread.
"""

import shutil
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from cdopt_tutorial import constraints
from cdopt_tutorial.bench.rows import Measured, Progress, sweep
from cdopt_tutorial.dissolving.costs import (
    BATCH_SIZE,
    PENALTY_PARAM,
    Step,
    step_seconds,
)

WIDTH, SMOKE_WIDTH = 512, 64
BASELINE = "eager"


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Time both ways in turns; in a smoke run, or without g++, nothing is fused."""
    fuses = not smoke and shutil.which("g++") is not None
    d, turns, budget = (SMOKE_WIDTH, 1, 1e-3) if smoke else (WIDTH, 9, 0.5)
    steps = make_steps(d, "inductor" if fuses else "aot_eager", device)

    def time_step(step: Step, turn: int) -> dict[str, float]:
        if turn == 1:
            step()  # which compiles
        return {"step": step_seconds(step, budget)}

    ways = {f"{name}, d={d}": partial(time_step, step) for name, step in steps.items()}
    return sweep(ways, turns, progress, {"step": "s"}, f"{BASELINE}, d={d}")


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
