"""What a step of a constrained layer costs, by width: see `dissolving.costs`."""

from cdopt_tutorial.bench.rows import Measured, Progress, sweep
from cdopt_tutorial.dissolving.costs import BASELINE, make_steps, step_seconds

WIDTHS = (64, 128, 256, 512, 1024)
BUDGET = 0.3  # seconds of a variant's turn
COMPARED = ("cdopt.nn", "geoopt")  # with "fused", beside the plain layer


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Time all variants; "fused over" has the step of "fused" over others', by d/2."""
    widths, turns = (WIDTHS[:1], 1) if smoke else (WIDTHS, 7)
    measured, values, over = [], {}, {name: {} for name in COMPARED}
    for d in widths:
        variants = {
            f"{name}, d={d}": lambda _, step=step: {"step": step_seconds(step, BUDGET)}
            for name, step in make_steps(d, device).items()
        }
        found, more = sweep(
            variants, turns, progress, {"step": "s"}, f"{BASELINE}, d={d}"
        )
        measured, values = measured + found, values | more["values"]
        medians = {row.name: row.value for row in found}
        for name in COMPARED:
            own, other = (medians[f"{n}, d={d}: step"] for n in ("fused", name))
            over[name][d // 2] = own / other
    return measured, {"fused over": over, "values": values}
