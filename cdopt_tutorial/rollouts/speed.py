"""How many steps observers take per second, and how long each part takes."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
from joblib import cpu_count

from cdopt_tutorial.engines import Role, launch, serve
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.reinforce.speed import in_turns, pace
from cdopt_tutorial.rollouts import system
from cdopt_tutorial.rollouts.predict import Costs
from cdopt_tutorial.rollouts.system import Learner, Observer, RolloutsConfig, Training

SEEDS, ROLLOUTS = 6, 10  # of a calibration: policies, and rollouts of each
WAIT_MS = 1.0  # per step of its simulators


def measure(
    configs: Sequence[RolloutsConfig],
    repeats: int = 1,
    figure: Callable[[Training], Any] = pace,
    alone: Sequence[RolloutsConfig] = (),
) -> list[list[Any]]:
    """Environment steps per second, or another figure, of each config and repeat.

    Each repeat has its own seed, and so other waits. Last come those configs that one
    process runs `alone`, waits and all.
    """
    runs = [(system.train, each) for each in configs]
    runs += [(system.train_alone, each) for each in alone]
    engine = TorchRPC()
    turns = [
        [(role, engine, replace(of, seed=of.seed + turn)) for role, of in runs]
        for turn in range(repeats)
    ]
    return in_turns(turns, figure)


def stored(name: str = "measured") -> dict[str, Any]:
    """What was measured for the book; "lag" is what `book/studies/lag.py` wrote."""
    return json.loads((files(__package__) / f"{name}.json").read_text())


def calibrate(num_envs: int = 1, device: str = "cpu") -> Costs:
    """Measure the constants of a prediction: some seconds on a quiet machine."""
    size = {"num_observers": 1, "num_envs": num_envs, "max_lag": ROLLOUTS}
    config = RolloutsConfig(**size, device=device)
    roles = {"agent": Role(serve), "observer0": Role(_calibrate, (config,))}
    return Costs(**launch(roles, rpc_threads=2)["observer0"], cores=cpu_count())


def _calibrate(config: RolloutsConfig) -> dict[str, Any]:
    """The role of an observer; its agent has another worker."""
    calls, plays, lengths = _rollouts(config)
    _, waited, _ = _rollouts(replace(config, step_ms=WAIT_MS))
    (per_step, play), (in_simulator, _) = _line(plays), _line(waited)
    environments, actions = config.make_environments(), np.zeros(config.num_envs, int)
    environments.reset()
    step = median(_timed(environments.step, actions)[0] for _ in range(1000))
    rollout, update = _line(_updates(config))
    found = {"call": median(calls), "play": play, "forward": per_step - step}
    found |= {"step": step, "trip": in_simulator - per_step - WAIT_MS / 1000}
    found |= {"update": update, "rollout": rollout}
    found = {name: max(0.0, value) for name, value in found.items()}  # noise, if not
    return found | {"num_envs": config.num_envs, "lengths": lengths}


def _rollouts(config: RolloutsConfig) -> tuple[list, list, list]:
    """Seconds of the calls; (steps, seconds) of each play; and the lengths."""
    engine, calls, plays, lengths = TorchRPC(), [], [], []
    for seed in range(SEEDS):
        own = replace(config, seed=seed)
        agent = engine.remote("agent", system.AheadAgent, own, engine).rpc_sync()
        observer = Observer(0, own)
        for _ in range(ROLLOUTS):
            begin, given = _timed(agent.begin, 0)
            seconds, rollout = _timed(observer.play, *given[1:])
            calls.append(begin + _timed(agent.hand_over, given[0], rollout)[0])
            plays.append((len(rollout.rewards), seconds))
            lengths.append((len(rollout.rewards), int(rollout.lengths.sum())))
    return calls, plays, lengths


def _updates(config: RolloutsConfig) -> list[tuple[int, float]]:
    """Updates: how many rollouts each has, and its seconds."""
    learner, found = Learner(replace(config, lr=1e-9)), []
    observers = [Observer(number, config) for number in range(8)]
    for number in (1, 2, 4, 8) * ROLLOUTS:
        given = learner.version, learner.kept[learner.version]
        batch = [each.play(*given) for each in observers[:number]]
        found.append((number, _timed(learner.finish_episode, batch)[0]))
    return found


def _timed(function: Callable, *args: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - begin, result


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Slope and intercept by medians, robust against a slow second (Theil-Sen)."""
    pairs = [(p, q) for p, q in combinations(points, 2) if p[0] != q[0]]
    slope = median((q[1] - p[1]) / (q[0] - p[0]) for p, q in pairs)
    return slope, median(y - slope * x for x, y in points)
