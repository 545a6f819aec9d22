"""Observers that play ahead or in step, where each step waits for a simulator."""

from dataclasses import replace
from functools import partial

from cdopt_tutorial.bench.rows import Measured, Progress, sweep
from cdopt_tutorial.rollouts import RolloutsConfig, speed

BASELINE = "in step, heavy waits, 8 observers"
UNITS = {"environment steps": "1/s"}
UPDATES = 32
WAYS = {"in step": {"max_lag": 0}, "ahead": {"max_lag": 4}}


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Time all variants in turns; in a smoke run, one turn of one update each."""
    turns, updates = (1, 1) if smoke else (5, UPDATES)
    config = RolloutsConfig(num_envs=1, step_ms=5.0, device=device)
    variants = {}
    for waits in ("fixed", "heavy"):
        for way, lag in WAYS.items():
            for number in (1, 8):
                own = replace(
                    config, num_observers=number, num_rollouts=number, waits=waits,
                    max_episodes=updates * number * config.num_envs, **lag,
                )  # fmt: skip
                plural = "s" if number > 1 else ""
                name = f"{way}, {waits} waits, {number} observer{plural}"
                variants[name] = partial(_figures, own)
    return sweep(variants, turns, progress, UNITS, BASELINE)


def _figures(config: RolloutsConfig, turn: int) -> dict[str, float]:
    ((pace,),) = speed.measure([replace(config, seed=turn)])
    return {"environment steps": pace}
