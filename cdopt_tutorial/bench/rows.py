"""What every bench measures with, and the rows that it reports."""

import platform
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from joblib import cpu_count

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
Turns = Iterable[int]
Units = Mapping[str, str]


def compare(
    variants: Variants, turns: Turns, progress: Progress, units: Units, baseline: str
) -> Measured:
    """The rows of variants measured in turns, and every single value."""
    values = interleave(variants, turns, progress)
    return rows(values, units, baseline), {"values": values}


def interleave(variants: Variants, turns: Turns, progress: Progress) -> Values:
    """Measure each variant once a turn, so that a slow minute hits all alike."""
    values: Values = {name: {} for name in variants}
    for turn in turns:
        for name, measure in variants.items():
            progress(f"{name}, turn {turn}")
            for figure, value in measure(turn).items():
                values[name].setdefault(figure, []).append(value)
    return values


def against(measured: Measured, name: str, other: str, units: Units) -> Measured:
    """The same, and one variant's figures over another's, those that have units."""
    values = measured[1]["values"]
    both = {other: values[other], f"{name}, over {other}": values[name]}
    _, *found = rows(both, units, other)
    return measured[0] + found, measured[1]


def phases(run: Callable, job: Any) -> dict[str, float]:
    """Median seconds of each phase of the first trainer's step, from a traced run."""
    trace, seconds = Trace(), {}
    run(job, trace=trace)
    for span in trace.spans:
        if span.worker == "trainer0":
            seconds.setdefault(span.name, []).append((span.ended - span.started) / 1e9)
    return {name: statistics.median(each) for name, each in seconds.items()}


def rows(values: Values, units: Units, baseline: str) -> list[Row]:
    """Medians over the baseline variant's, or the first one's where it has none.

    A figure without a unit is left out.
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
    machine = {"cores": cpu_count(), "python": platform.python_version()}
    machine |= {"torch": torch.__version__, "system": platform.system()}
    return {"rows": [asdict(row) for row in measured], "machine": machine, **more}


def table(measured: list[Row]) -> str:
    """The rows as text, a line each."""
    width = max(len(row.name) for row in measured)
    lines = []
    for row in measured:
        value = f"{row.name:{width}}  {row.value:12.4g} {row.unit:8}"
        lines.append(f"{value}{row.ratio:8.3g} x {row.baseline}")
    return "\n".join(lines)
