"""What every bench measures with, and the rows that it reports."""

import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
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
    least: float  #: of all that was measured
    most: float


Progress = Callable[[str], None]
Measured = tuple[list[Row], dict[str, Any]]
Variants = Mapping[str, Callable[[int], Mapping[str, float]]]  # give a turn's figures
Values = dict[str, dict[str, list[float]]]  # by variant and figure, one of each turn
Units = Mapping[str, str]


def sweep(
    variants: Variants, turns: int, progress: Progress, units: Units, baseline: str
) -> Measured:
    """Measure each variant once a turn; the rows, and every single value.

    In turns, so that a slow minute hits all alike. Figures without a unit have no row.
    """
    values = interleave(variants, turns, progress)
    return rows(values, units, baseline), {"values": values}


def interleave(variants: Variants, turns: int, progress: Progress) -> Values:
    """Every value of variants that are measured in turns."""
    values: Values = {name: {} for name in variants}
    for turn in range(1, turns + 1):
        for name, measure in variants.items():
            progress(f"{name}, turn {turn}")
            for figure, value in measure(turn).items():
                values[name].setdefault(figure, []).append(value)
    return values


def rows(values: Values, units: Units, baseline: str) -> list[Row]:
    """Medians over the baseline variant's, or the first one's where it has none."""
    found = []
    for figure, unit in units.items():
        of = {name: each[figure] for name, each in values.items() if figure in each}
        base = baseline if baseline in of else next(iter(of), None)
        for name, measured in of.items():
            median = statistics.median(measured)
            ratio = median / statistics.median(of[base])
            row = f"{name}: {figure}", median, unit, f"{base}: {figure}", ratio
            found.append(Row(*row, min(measured), max(measured)))
    return found


def against(measured: Measured, name: str, other: str, figure: str) -> Measured:
    """The same, and one variant's figure over another's, of the same unit."""
    found, more = measured
    value = {row.name: row for row in found}
    own, base = value[f"{name}: {figure}"], value[f"{other}: {figure}"]
    ratio = own.value / base.value
    named = f"{name}, over {other}: {figure}"
    row = replace(own, name=named, baseline=base.name, ratio=ratio)
    return [*found, row], more


def phases(run: Callable, job: Any) -> dict[str, float]:
    """Median seconds of each phase of the first trainer's step, from a traced run."""
    trace, seconds = Trace(), {}
    run(job, trace=trace)
    for span in trace.spans:
        if span.worker == "trainer0":
            seconds.setdefault(span.name, []).append((span.ended - span.started) / 1e9)
    return {name: statistics.median(each) for name, each in seconds.items()}


def report(measured: list[Row], **more: Any) -> dict[str, Any]:
    """What a bench writes as JSON: the rows, where they come from, and more."""
    machine = {"cores": cpu_count(), "python": platform.python_version()}
    machine |= {"torch": torch.__version__, "system": platform.system()}
    return {"rows": [asdict(row) for row in measured], "machine": machine, **more}


def table(measured: list[Row]) -> str:
    """The rows as text, a line each: the median, the least and most, the ratio."""
    width = max(len(row.name) for row in measured)
    lines = []
    for row in measured:
        ends = f"({row.least:.3g} to {row.most:.3g})"
        value = f"{row.name:{width}}  {row.value:12.4g} {ends:24} {row.unit:8}"
        lines.append(f"{value}{row.ratio:8.3g} x {row.baseline}")
    return "\n".join(lines)
