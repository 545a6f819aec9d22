"""Chapter 8's speed and lag, measured, and predicted from a calibration.

The calibration has one observer, with waits of 1 ms or none. Policies hardly learn, so
episodes stay as long as they were in the calibration.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from statistics import median

from cdopt_tutorial.bench.rows import Measured, Progress, rows
from cdopt_tutorial.rollouts import RolloutsConfig, speed
from cdopt_tutorial.rollouts.predict import predict

OBSERVERS, LAGS, TURNS, UPDATES = (1, 2, 4, 8, 16), (0, 1, 4), 3, 16
WAITS = [("fixed", 0.0), *product(("fixed", "heavy"), (2.0, 5.0, 20.0))]
ALONE = "one process"
SETTINGS = "waits", "step_ms", "max_lag", "num_observers"
FIGURES = "measured", "lag", "predicted", "predicted_lag"


def measure(progress: Progress, smoke: bool, device: str) -> Measured:
    """Measure a sweep in turns, each with its own seed, and predict each run."""
    turns = 1 if smoke else TURNS
    few = WAITS[1:2], LAGS[:2], (1, 2), 2
    jobs = dict(sweep(*(few if smoke else (WAITS, LAGS, OBSERVERS, UPDATES)), device))
    alone = [name for name in jobs if name.startswith(ALONE)]
    apart = [jobs[name] for name in jobs if name not in alone]
    progress("the calibration")
    costs = speed.calibrate(1, device)
    progress(f"{len(jobs)} runs, {turns} times")
    by_one = [jobs[name] for name in alone]
    found = speed.measure(apart, turns, speed.pace_and_lag, by_one)
    values, runs = {}, []
    for (name, job), measured in zip(jobs.items(), found, strict=True):
        seeds = [replace(job, seed=job.seed + turn) for turn in range(turns)]
        predicted = [predict(costs, each, name in alone) for each in seeds]
        both = [(*m, *p) for m, p in zip(measured, predicted, strict=True)]
        columns = map(list, zip(*both, strict=True))
        values[name] = dict(zip(FIGURES, columns, strict=True))
        of = {setting: getattr(job, setting) for setting in SETTINGS}
        runs.append({**of, "alone": name in alone, **values[name]})
    more = {"costs": asdict(costs), "runs": runs}
    errors = {"predictions": {"error": list(map(error, values.values()))}}
    shown = rows(values, {"measured": "1/s", "predicted": "1/s"})
    return shown + rows(errors, {"error": "1"}), more


def sweep(waits, lags, observers, updates: int, device: str) -> Iterator:
    """Names and configs of runs; those in one process come last."""
    of = {"num_envs": 1, "lr": 1e-9, "device": device}
    for (kind, ms), lag, k in product(waits, lags, observers):
        size = {"num_observers": k, "max_lag": lag, "max_episodes": updates * k}
        name = f"max-lag {lag}, {kind} waits, {ms:g} ms, observers: {k}"
        yield name, RolloutsConfig(waits=kind, step_ms=ms, **size, **of)
    for kind, ms in waits:
        size = {"num_observers": 1, "max_lag": 0, "max_episodes": updates}
        name = f"{ALONE}, {kind} waits, {ms:g} ms"
        yield name, RolloutsConfig(waits=kind, step_ms=ms, **size, **of)


def error(values: dict[str, list[float]]) -> float:
    """The median predicted speed's error, as a share of the median measured speed."""
    return abs(median(values["predicted"]) / median(values["measured"]) - 1)
