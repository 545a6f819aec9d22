"""What chapter 8's lag costs: episodes by the age of rollouts, and seconds of runs."""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from cdopt_tutorial.bench.rows import Measured, Progress, Values, rows
from cdopt_tutorial.bench.runs import keep
from cdopt_tutorial.rollouts import RolloutsConfig, age, speed
from cdopt_tutorial.rollouts.system import Training

ENVIRONMENTS, LAGS = ("CartPole-v1", "Acrobot-v1"), (0, 2, 8)
RATES, TUNING_SEEDS, SEEDS = (2e-2, 1e-2, 5e-3), (101, 102), (1, 2, 3, 4, 5)
CLIPS = {"with the ratio": 2.0, "without it": 0.0}
# In the runs by the clock a step now and then waits long; without lag all wait for it.
WAITING = {"num_observers": 8, "num_envs": 4, "step_ms": 2.0, "waits": "heavy"}


def measure(
    progress: Progress, smoke: bool, device: str, path: Path | None
) -> Measured:
    """Learn from rollouts of each age, with each seed; then run by the clock."""
    lags, most = (LAGS[:2], 64) if smoke else (LAGS, age.LIMIT)
    few = 1 if smoke else None
    seeds, same = SEEDS[:few], {"device": device, "most": most}
    ways = [
        {"environment": environment, "lag": lag, "clip": clip}
        for environment, lag, clip in product(ENVIRONMENTS, lags, CLIPS.values())
        if lag or clip  # without lag every ratio is 1
    ]
    tries = product(ways, RATES[:few], TUNING_SEEDS[:few])
    jobs = [way | {"lr": lr, "seed": seed} | same for way, lr, seed in tries]
    tuned = keep(path, age.episodes_needed, jobs, progress)
    for way in ways:
        way["lr"] = _best(run for run in tuned if run.items() >= way.items())
    jobs = [way | {"seed": seed} | same for way, seed in product(ways, seeds)]
    runs = keep(path, age.episodes_needed, jobs, progress)
    progress(f"runs by the clock, {len(seeds)} times")
    rates = {
        way["lag"]: way["lr"]
        for way in ways
        if way["environment"] == ENVIRONMENTS[0] and way["clip"]
    }
    limits = {"max_episodes": most, "device": device, **WAITING}
    configs = [RolloutsConfig(max_lag=lag, lr=rates[lag], **limits) for lag in rates]
    found = speed.measure(configs, len(seeds), needed)
    clock = {
        f"by the clock, max_lag {lag}": {n: [run[n] for run in each] for n in each[0]}
        for lag, each in zip(rates, found, strict=True)
    }
    units = {"seconds": "s", "episodes": "1"}
    shown = [row for env in ENVIRONMENTS for row in rows(by_lag(runs, env), units)]
    more = {"runs": runs, "tuned": tuned, "clock": clock, "waiting": WAITING}
    return shown + rows(clock, units), more


def _best(runs: Iterable[dict[str, Any]]) -> float:
    """The learning rate with the fewest episodes on average."""
    by_rate: dict[float, list[int]] = {}
    for run in runs:
        by_rate.setdefault(run["lr"], []).append(run["episodes"])
    return min(by_rate, key=lambda lr: fmean(by_rate[lr]))


def by_lag(runs: Sequence[dict[str, Any]], environment: str) -> Values:
    """The episodes of an environment's runs, by lag, with the ratio and without it."""
    names, found = {clip: name for name, clip in CLIPS.items()}, {}
    for run in runs:
        if run["environment"] == environment:
            name = f"{environment}, lag {run['lag']}, {names[run['clip']]}"
            found.setdefault(name, {"episodes": []})["episodes"].append(run["episodes"])
    return found


def needed(found: Training) -> dict[str, Any]:
    """A run's seconds and episodes, and whether it solved its environment."""
    score = found.score
    episodes = len(score.rewards)
    return {"seconds": score.seconds, "episodes": episodes, "solved": score.solved}
