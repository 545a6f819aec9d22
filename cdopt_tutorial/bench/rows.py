"""What all benches share: measuring in turns, and the rows they report."""

import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import torch
from joblib import cpu_count


@dataclass(frozen=True)
class Row:
    """One figure of a bench."""

    name: str
    value: float  #: an average, by default the median
    unit: str
    baseline: str  #: name of the row with which it is compared, or its own
    ratio: float  #: value over the baseline's value
    least: float  #: of all measurements
    most: float


Progress = Callable[[str], None]
Measured = tuple[list[Row], dict[str, Any]]  # the rows, and the rest of the JSON
Variants = Mapping[str, Callable[[int], Mapping[str, float]]]  # figures of a turn
Values = Mapping[str, Mapping[str, list[float]]]  # by variant and figure, for each turn
Units = Mapping[str, str]


def sweep(
    groups: Iterable[Variants], units: Units, smoke: bool, progress: Progress
) -> Measured:
    """Measure variants, group by group; the rows, and all values.

    The first of a group is its baseline. A smoke run has one turn, others five.
    """
    measured, values = [], {}
    for variants in groups:
        found = interleave(variants, 1 if smoke else 5, progress)
        measured += rows(found, units)
        values |= found
    return measured, {"values": values}


def interleave(variants: Variants, turns: int, progress: Progress) -> Values:
    """Measure variants in turns, so that a slow minute hits all alike; all values."""
    values: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    for turn in range(1, turns + 1):
        for name, measure in variants.items():
            progress(f"{name}, turn {turn}")
            for figure, value in measure(turn).items():
                values[name].setdefault(figure, []).append(value)
    return values


def rows(
    values: Values, units: Units, average: Callable = statistics.median
) -> list[Row]:
    """Averages, and their ratios to that of the first variant with such a figure.

    Figures without a unit have no row.
    """
    found = []
    for figure, unit in units.items():
        of = {name: each[figure] for name, each in values.items() if figure in each}
        base = next(iter(of), None)
        for name, measured in of.items():
            value, ends = average(measured), (min(measured), max(measured))
            row = f"{name}: {figure}", value, unit, f"{base}: {figure}"
            found.append(Row(*row, value / average(of[base]), *ends))
    return found


def report(
    measured: list[Row], before: Sequence[float] = (), **more: Any
) -> dict[str, Any]:
    """What a bench writes as JSON: its rows, the machine, the date, and more.

    The machine's load averages are those `before` the bench, and the current ones.
    """
    machine = {"cores": cpu_count(), "python": platform.python_version()}
    machine |= {"torch": torch.__version__, "system": platform.system()}
    about = {"date": str(date.today()), "load": [before, os.getloadavg()]}
    about["rows"] = [asdict(row) for row in measured]
    return {**about, "machine": machine, **more}


def table(measured: list[Row]) -> str:
    """The rows as text, one line each: value, least and most, ratio."""
    width = max(len(row.name) for row in measured)
    lines = []
    for row in measured:
        ends = f"({row.least:.3g} to {row.most:.3g})"
        value = f"{row.name:{width}}  {row.value:12.4g} {ends:24} {row.unit:8}"
        lines.append(f"{value}{row.ratio:8.3g} x {row.baseline}")
    return "\n".join(lines)
