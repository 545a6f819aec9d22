"""What a step of a constrained layer costs, by width: see `dissolving.costs`."""

from cdopt_tutorial.bench.rows import Measured, Progress, sweep
from cdopt_tutorial.dissolving.costs import BASELINE, VARIANTS, make_step, step_seconds

WIDTHS = (64, 128, 256, 512, 1024)
BUDGET = 0.3  # seconds of a variant's turn


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Time all variants of a width in turns, over the plain layer; width by width."""
    widths, turns = (WIDTHS[:1], 1) if smoke else (WIDTHS, 7)
    measured, values = [], {}
    for d in widths:
        steps = {f"{name}, d={d}": make_step(name, d, device) for name in VARIANTS}
        ways = {
            name: lambda _, step=step: {"step": step_seconds(step, BUDGET)}
            for name, step in steps.items()
        }
        found, more = sweep(ways, turns, progress, {"step": "s"}, f"{BASELINE}, d={d}")
        measured, values = measured + found, values | more["values"]
    return measured, {"values": values}
