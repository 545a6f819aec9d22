"""What every bench measures with, and the rows that it reports."""

import platform
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from cdopt_tutorial.engines import Trace


@dataclass(frozen=True)
class Row:
    """One figure of a bench."""

    name: str  #: what was measured
    value: float  #: its median
    unit: str  #: of the value
    baseline: str  #: name of the row that it is compared with; its own if of none
    ratio: float  #: value over the baseline's value


Progress = Callable[[str], None]
Measured = tuple[list[Row], dict[str, Any]]
Variants = Mapping[str, Callable[[int], Mapping[str, float]]]  # give a turn's figures
Values = dict[str, dict[str, list[float]]]  # by variant and figure, one of each turn


def compare(
    variants: Variants,
    turns: Iterable[int],
    progress: Progress,
    units: Mapping[str, str],
    baseline: str,
) -> Measured:
    """The rows of variants measured in turns, and every single value.

    `units` has each figure that is to be reported, and `baseline` is the variant that
    the others are compared with.
    """
    values = interleave(variants, turns, progress)
    return rows(values, units, baseline), {"values": values}


def interleave(variants: Variants, turns: Iterable[int], progress: Progress) -> Values:
    """Measure each variant once a turn, so that a slow minute of the machine hits all.

    A turn is a number, for instance a seed.
    """
    values: Values = {name: {} for name in variants}
    for turn in turns:
        for name, measure in variants.items():
            progress(f"{name}, turn {turn}")
            for figure, value in measure(turn).items():
                values[name].setdefault(figure, []).append(value)
    return values


def phases(trace: Trace, worker: str) -> dict[str, float]:
    """Median seconds that a worker spends in each phase of a step, by its name.

    They show what holds several workers back: the last phase is where they wait for
    each other, and the others grow where all workers compute on the same cores.
    """
    seconds: dict[str, list[float]] = {}
    for span in trace.spans:
        if span.worker == worker:
            seconds.setdefault(span.name, []).append((span.ended - span.started) / 1e9)
    return {name: statistics.median(each) for name, each in seconds.items()}


def rows(values: Values, units: Mapping[str, str], baseline: str) -> list[Row]:
    """Medians of what :func:`interleave` measured, each over the baseline variant's.

    A figure that the baseline does not have is compared with the first variant's.
    """
    medians = {
        (variant, figure): statistics.median(measured)
        for variant, figures in values.items()
        for figure, measured in figures.items()
        if figure in units
    }
    measured = []
    for (variant, figure), median in medians.items():
        first = next(name for name, other in medians if other == figure)
        against = baseline if (baseline, figure) in medians else first
        ratio = median / medians[against, figure]
        name, other = f"{variant}: {figure}", f"{against}: {figure}"
        measured.append(Row(name, median, units[figure], other, ratio))
    return measured


def report(measured: list[Row], **more: Any) -> dict[str, Any]:
    """What a bench writes as JSON: the rows, where they come from, and more."""
    machine = {
        "cores": psutil.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
    }
    return {"rows": [asdict(row) for row in measured], "machine": machine, **more}


def table(measured: list[Row]) -> str:
    """The rows as text, a line each."""
    width = max(len(row.name) for row in measured)
    return "\n".join(
        f"{row.name:{width}}  {row.value:12.4g} {row.unit:8}"
        f"{row.ratio:8.3g} x {row.baseline}"
        for row in measured
    )
