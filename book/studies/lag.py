"""What chapter 8's lag costs: episodes by the age of rollouts, and seconds of runs.

The book's results are stored in cdopt_tutorial/rollouts/lag.json.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import count, product
from statistics import fmean
from typing import Any

from acrobot import AcrobotConfig
from runs import Job, arguments, keep, write

from cdopt_tutorial.reinforce.speed import measure
from cdopt_tutorial.rollouts import RolloutsConfig, run_locally, train

CONFIGS = {"CartPole-v1": RolloutsConfig, "Acrobot-v1": AcrobotConfig}
LAGS, CLIPS = (0, 2, 8), (2.0, 0.0)  # updates; with the ratio, and without it
RATES, TUNING_SEEDS, SEEDS = (2e-2, 1e-2, 5e-3), (101, 102), (1, 2, 3, 4, 5)
NUM_ENVS, LIMIT = 32, 6_400
# In the runs by the clock a step now and then waits long; without lag all wait for it.
WAITING = {"num_observers": 8, "num_envs": 4, "step_ms": 2.0, "waits": "heavy"}


def schedule(lag: int) -> Iterator[dict[int, int]]:
    """An endless schedule of two observers, whose rollouts are ``lag`` updates old."""
    for update in count():
        yield dict.fromkeys((0, 1), max(0, update - lag))


def episodes_needed(
    environment: str,
    lag: int,
    clip: float,
    lr: float,
    seed: int,
    most: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train in this process: how many "episodes" it took, and whether it is "solved".

    Ratios are clipped to ``clip``, or left out if it is 0. The run ends after ``most``
    episodes, solved or not.
    """
    config = CONFIGS[environment](
        max_lag=lag, clip=clip, lr=lr, seed=seed, device=device, num_envs=NUM_ENVS,
        max_episodes=most,
    )  # fmt: skip
    score = run_locally(config, schedule(lag)).score
    return {"episodes": len(score.rewards), "solved": score.solved}


def best(runs: Sequence[Job]) -> float:
    """The learning rate with the fewest episodes on average."""
    by_rate: dict[float, list[int]] = {}
    for run in runs:
        by_rate.setdefault(run["lr"], []).append(run["episodes"])
    return min(by_rate, key=lambda lr: fmean(by_rate[lr]))


def by_the_clock(configs: Sequence[RolloutsConfig], turns: int) -> dict[str, dict]:
    """Seconds and episodes of runs on workers, and whether they solved CartPole."""
    print(f"runs by the clock, {turns} times", flush=True)
    runs = [(train, config) for config in configs]
    found = measure(runs, turns, lambda training: training.score)
    return {
        f"by the clock, max_lag {config.max_lag}": {
            "seconds": [score.seconds for score in scores],
            "episodes": [len(score.rewards) for score in scores],
            "solved": [score.solved for score in scores],
        }
        for config, scores in zip(configs, found, strict=True)
    }


def main(options: argparse.Namespace) -> None:
    """Learn from rollouts of each age, with each seed; then run by the clock."""
    few, lags, most = (1, LAGS[:2], 64) if options.smoke else (None, LAGS, LIMIT)
    same, seeds = {"most": most, "device": options.device}, SEEDS[:few]
    ways = [
        {"environment": environment, "lag": lag, "clip": clip}
        for environment, lag, clip in product(CONFIGS, lags, CLIPS)
        if lag or clip  # without lag every ratio is 1
    ]
    tries = product(ways, RATES[:few], TUNING_SEEDS[:few])
    jobs = [way | {"lr": lr, "seed": seed} | same for way, lr, seed in tries]
    tuned = keep(options.out, episodes_needed, jobs)
    for way in ways:
        way["lr"] = best([run for run in tuned if run.items() >= way.items()])
    jobs = [way | {"seed": seed} | same for way, seed in product(ways, seeds)]
    runs = keep(options.out, episodes_needed, jobs)
    for run in tuned + runs:
        del run["most"], run["device"]
    limits = {"max_episodes": most, "device": options.device, **WAITING}
    configs = [
        RolloutsConfig(max_lag=way["lag"], lr=way["lr"], **limits)
        for way in ways
        if way["clip"] and way["environment"] == "CartPole-v1"
    ]
    clock = by_the_clock(configs, len(seeds))
    write(options.out, waiting=WAITING, clock=clock, tuned=tuned, runs=runs)


if __name__ == "__main__":
    main(arguments(__doc__))
