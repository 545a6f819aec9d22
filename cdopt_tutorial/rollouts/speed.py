"""How many steps observers take in a second, and how long each part of it takes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
from joblib import cpu_count

from cdopt_tutorial.engines import Role, launch, serve
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.reinforce.speed import in_turns, pace
from cdopt_tutorial.reinforce.system import learn
from cdopt_tutorial.rollouts.predict import Costs
from cdopt_tutorial.rollouts.system import (
    AheadAgent,
    Learner,
    Observer,
    RolloutsConfig,
    Training,
    in_step,
    replay,
    train,
)

SEEDS, ROLLOUTS = 6, 10  # of a calibration: policies, and rollouts of each
BATCHES = (1, 2, 4, 8)  # rollouts of the updates that it times
WAIT_MS = 1.0  # of each step in its simulator


def measure(
    configs: Sequence[RolloutsConfig],
    repeats: int = 1,
    figure: Callable[[Training], Any] = pace,
    alone: Sequence[RolloutsConfig] = (),
) -> list[list[Any]]:
    """Environment steps per second, or another figure; of each config, for each repeat.

    Each repeat has a seed of its own, and so other waits. After all others come those
    that one process runs `alone`, waits and all.
    """
    runs = [(train, each) for each in configs] + [
        (_train_alone, each) for each in alone
    ]
    turns = [
        [
            (role, TorchRPC(), replace(each, seed=each.seed + turn))
            for role, each in runs
        ]
        for turn in range(repeats)
    ]
    return in_turns(turns, figure)


def calibrate(num_envs: int = 1) -> Costs:
    """Measure the constants of a prediction, in some seconds on a quiet machine."""
    config = RolloutsConfig(
        num_observers=1, num_envs=num_envs, max_lag=SEEDS * ROLLOUTS
    )
    roles = {"agent": Role(serve), "observer0": Role(_calibrate, (config,))}
    return Costs(**launch(roles, rpc_threads=2)["observer0"], cores=cpu_count())


def _train_alone(engine: Workers, config: RolloutsConfig) -> Training:
    learner = Learner(config)
    observers = {n: Observer(n, config) for n in range(config.num_observers)}
    found = learn(engine, learner, replay(learner, in_step(config), observers))
    return Training(**vars(found), schedule=learner.schedule)


def _calibrate(config: RolloutsConfig) -> dict[str, Any]:
    """The role of an observer, whose agent is on a worker of its own."""
    calls, plays, lengths = _rollouts(config)
    _, waited, _ = _rollouts(replace(config, step_ms=WAIT_MS))
    (per_step, play), (in_simulator, _) = _line(plays), _line(waited)
    step = median(_steps(config))
    rollout, update = _line(_updates(config))
    trip = in_simulator - per_step - WAIT_MS / 1000
    found = {"call": median(calls), "play": play, "trip": trip, "step": step}
    found |= {"forward": per_step - step, "update": update, "rollout": rollout}
    found = {name: max(0.0, value) for name, value in found.items()}  # noise, if not
    return found | {"num_envs": config.num_envs, "lengths": lengths}


def _rollouts(config: RolloutsConfig) -> tuple[list, list, list]:
    """Seconds of calls; steps in a row and seconds of playing; and the lengths."""
    engine, calls, plays, lengths = TorchRPC(), [], [], []
    for seed in range(SEEDS):
        own = replace(config, seed=seed)
        agent = engine.remote("agent", AheadAgent, own, engine).rpc_sync()
        observer = Observer(0, own)
        for _ in range(ROLLOUTS):
            begin, given = _timed(agent.begin, 0)
            seconds, rollout = _timed(observer.play, *given[1:])
            calls.append(begin + _timed(agent.hand_over, given[0], rollout)[0])
            steps = len(rollout.rewards)
            plays.append((steps, seconds))
            lengths.append((steps, int(rollout.lengths.sum())))
    return calls, plays, lengths


def _steps(config: RolloutsConfig) -> list[float]:
    environments = config.make_environments()
    environments.reset()
    actions = np.zeros(config.num_envs, dtype=np.int64)
    return [_timed(environments.step, actions)[0] for _ in range(1000)]


def _updates(config: RolloutsConfig) -> list[tuple[int, float]]:
    """The rollouts of updates, and their seconds."""
    learner, found = Learner(replace(config, lr=1e-9)), []
    observers = [Observer(number, config) for number in range(max(BATCHES))]
    for number in BATCHES * ROLLOUTS:
        given = learner.version, learner.kept[learner.version]
        batch = [each.play(*given) for each in observers[:number]]
        found.append((number, _timed(learner.finish_episode, batch)[0]))
    return found


def _timed(function: Callable, *args: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - begin, result


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Slope and intercept by medians, which a slow second does not move (Theil-Sen)."""
    pairs = [(p, q) for p, q in combinations(points, 2) if p[0] != q[0]]
    slope = median((q[1] - p[1]) / (q[0] - p[0]) for p, q in pairs)
    return slope, median(y - slope * x for x, y in points)
