"""Chapter 8's speed and lag, measured, and as predicted from a calibration.

The calibration has one observer, and waits of 1 ms or none. Policies hardly learn, so
that episodes stay as long as it has found them.
"""

import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import date
from itertools import product
from statistics import median
from typing import Any

from cdopt_tutorial.bench.rows import Measured, Progress, rows
from cdopt_tutorial.rollouts import RolloutsConfig, Training, speed
from cdopt_tutorial.rollouts.predict import predict

CONFIG = RolloutsConfig(num_envs=1, lr=1e-9)
OBSERVERS, LAGS, TURNS, UPDATES = (1, 2, 4, 8, 16), (0, 1, 4), 3, 16
WAITS = [("fixed", ms) for ms in (0.0, 2.0, 5.0, 20.0)]
WAITS += [("heavy", ms) for ms in (2.0, 5.0, 20.0)]
UNITS = {"environment steps": "1/s", "predicted": "1/s"}
ALONE = "one process"


def measure(progress: Progress, smoke: bool, device: str) -> Measured:
    """Measure a sweep in turns, each of them with its seed, and predict each run."""
    few = (
        ((1, 2), LAGS[:2], WAITS[1:2], 2)
        if smoke
        else (OBSERVERS, LAGS, WAITS, UPDATES)
    )
    jobs = dict(sweep(*few, device))
    alone = {name: config for name, config in jobs.items() if name.startswith(ALONE)}
    apart = {name: config for name, config in jobs.items() if name not in alone}
    load = os.getloadavg()
    progress("the calibration")
    costs = speed.calibrate(CONFIG.num_envs)
    values: dict[str, dict[str, list[float]]] = {name: {} for name in jobs}
    for turn in range(1 if smoke else TURNS):
        progress(f"turn {turn + 1} of {len(jobs)} runs")
        own = [replace(each, seed=each.seed + turn) for each in apart.values()]
        own_alone = [replace(each, seed=each.seed + turn) for each in alone.values()]
        found = speed.measure(own, 1, _figures, own_alone)
        for (name, job), (figures,) in zip(jobs.items(), found, strict=True):
            same = predict(costs, replace(job, seed=job.seed + turn), name in alone)
            figures |= {"predicted": same.steps_per_second}
            figures |= {"predicted lag": same.mean_lag}
            for figure, value in figures.items():
                values[name].setdefault(figure, []).append(value)
    errors = {"predictions": {"error": list(map(error, values.values()))}}
    measured = rows(values, UNITS) + rows(errors, {"error": "1"})
    when = {"date": str(date.today()), "load": [load, os.getloadavg()]}
    return measured, {**when, "costs": asdict(costs), "values": values}


def sweep(
    observers: Iterable[int],
    lags: Iterable[int],
    all_waits: Iterable[tuple[str, float]],
    updates: int,
    device: str = "cpu",
) -> Iterable[tuple[str, RolloutsConfig]]:
    """Names and configs of runs; those of one process come last."""
    for (waits, ms), lag, k in product(all_waits, lags, observers):
        of = {"num_observers": k, "num_rollouts": k, "max_episodes": updates * k}
        how = {"waits": waits, "step_ms": ms, "max_lag": lag, "device": device}
        yield (
            f"max-lag {lag}, {waits} waits, {ms:g} ms, observers: {k}",
            replace(CONFIG, **of, **how),
        )
    for waits, ms in all_waits:
        how = {"waits": waits, "step_ms": ms, "max_episodes": updates, "max_lag": 0}
        one = {"num_observers": 1, "num_rollouts": 1, "device": device}
        yield f"{ALONE}, {waits} waits, {ms:g} ms", replace(CONFIG, **how, **one)


def error(values: dict[str, list[float]]) -> float:
    """Of the median predicted speed, as a share of the median measured."""
    return abs(median(values["predicted"]) / median(values["environment steps"]) - 1)


def _figures(found: Training) -> dict[str, Any]:
    rollouts = found.lags.total()
    lag = sum(lag * number for lag, number in found.lags.items()) / rollouts
    return {"environment steps": speed.pace(found), "lag": lag}
